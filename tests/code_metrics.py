"""Size and coupling of the code: `python -m tests.code_metrics`; `--still` omits everything that needs a model.

Three requests to the shipped model are traced: an image that is cached, the same as a stream of 8 tokens from the HTTP
server, and 20 cached JPEGs. The trace counts files, functions and calls on all threads. Everything else comes from the
source. For another checkout:

    PYTHONPATH=../before/src python tests/code_metrics.py
"""

from __future__ import annotations

import ast
import asyncio
import base64
import contextlib
import http.client
import io
import itertools
import json
import os
import pathlib
import sys
import threading
import urllib.parse
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple

LONG_FILE, LONG_FUNCTION = 600, 80
COMMANDS = "commands/"
KERNELS = "pallas_kernels"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.comprehension, ast.match_case)
# Names by which code tells layers with pages of K,V from layers with a state of each sequence.
KINDS = {
    "LayerKind",
    "layer_kinds",
    "kind_of",
    "keeps_kv",
    "has_states",
    "paged_layers",
    "num_states",
    "linear_attention",
}
OF_TUPLES = {"_replace", "_asdict", "_fields", "_make"}  # public in spite of their names
ROOT_PACKAGE = "vlcache_jax"
QUESTION = "What is at C2?"
JPEGS, SIDE = 20, 64
STREAMED = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": True}


class Part(NamedTuple):
    """A function or a class; the complexity of a class is 0."""

    name: str  # with the file
    lines: int
    complexity: int


class Source(NamedTuple):
    """What is read from a file.

    Attributes:
      name: path below the package.
      lines: number of lines.
      functions, classes: in the order of the file.
      reads: places such as "engine/loop.py:7 x._y" that read a private attribute of another class.
      imports: modules, and names in modules, as in "cache.store.Store", without the package's own name.
      names_kinds: whether it tells kinds of decoder layers apart.
    """

    name: str
    lines: int
    functions: list[Part]
    classes: list[Part]
    reads: list[str]
    imports: set[str]
    names_kinds: bool = False


class Scope(NamedTuple):
    """What encloses a line.

    Attributes:
      own: names whose private attributes may be read: `self`, `cls`, modules, enclosing classes.
      private: private attributes of the enclosing classes; they may be read from any instance.
      others: parameters that are annotated with other classes.
      names: of the enclosing functions and classes.
    """

    own: frozenset[str]
    private: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()
    names: tuple[str, ...] = ()


class Trace(NamedTuple):
    """What a request enters.

    Attributes:
      functions: number of different functions of the package, by file.
      calls: calls of Python functions, also of other packages.
    """

    functions: Counter[str]
    calls: int


def files(root: pathlib.Path) -> dict[str, str]:
    """Return, for each Python file, its real path and its name below the root. Links are followed."""
    found = (pathlib.Path(at, name) for at, _, names in os.walk(root, followlinks=True) for name in names)
    return {os.path.realpath(path): path.relative_to(root).as_posix() for path in sorted(found) if path.suffix == ".py"}


def read(name: str, text: str) -> Source:
    """Read one file."""
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    used |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    source = Source(name, len(text.splitlines()), [], [], [], set(), bool(KINDS & used))
    imports = [alias for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    imported = [alias.name for alias in imports]
    imported += [
        f"{node.module}.{alias.name}" for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names
    ]
    source.imports.update(
        one.removeprefix(f"{ROOT_PACKAGE}.") for one in imported if one.startswith(f"{ROOT_PACKAGE}.")
    )
    modules = {(alias.asname or alias.name).partition(".")[0] for alias in imports}
    _read(source, tree, Scope(frozenset({"self", "cls", *modules})))
    return source


def _lines_of_documentation(source: Source, function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function's docstring, and of a command's signature, which is its list of options."""
    first = function.body[0]
    docstring = (first.end_lineno or first.lineno) - first.lineno + 1 if ast.get_docstring(function) else 0
    return docstring + (first.lineno - function.lineno if source.name.startswith(COMMANDS) else 0)


def _read(source: Source, node: ast.AST, scope: Scope) -> None:
    for child in ast.iter_child_nodes(node):
        within = scope
        if isinstance(child, (*FUNCTIONS, ast.ClassDef)):
            within = scope._replace(names=(*scope.names, child.name))
            lines = (child.end_lineno or child.lineno) - child.lineno + 1
            if isinstance(child, FUNCTIONS):
                lines -= _lines_of_documentation(source, child)
            name = f"{source.name}: {'.'.join(within.names)}"
            if isinstance(child, ast.ClassDef):
                source.classes.append(Part(name, lines, 0))
                within = within._replace(own=scope.own | {child.name}, private=scope.private | _attributes(child))
            else:
                source.functions.append(Part(name, lines, complexity(child)))
                annotated = (one for one in ast.walk(child.args) if isinstance(one, ast.arg) and one.annotation)
                same = scope.own | {"object", "Self"}
                others = {one.arg for one in annotated if ast.unparse(one.annotation or one) not in same}
                within = within._replace(others=scope.others | others)
        elif isinstance(child, ast.Attribute) and not _is_allowed(child, scope):
            source.reads.append(f"{source.name}:{child.lineno} {ast.unparse(child)}")
        _read(source, child, within)


def _attributes(node: ast.ClassDef) -> set[str]:
    """Return the methods, the fields, and the attributes that are assigned to `self`."""
    stored = (one for one in ast.walk(node) if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store))
    fields = (ast.unparse(child.target) for child in node.body if isinstance(child, ast.AnnAssign))
    methods = (child.name for child in node.body if isinstance(child, FUNCTIONS))
    return {*methods, *fields, *(one.attr for one in stored if ast.unparse(one.value) == "self")}


def _is_allowed(node: ast.Attribute, scope: Scope) -> bool:
    """Return whether an attribute is public, or private to an enclosing class or to a module."""
    if not node.attr.startswith("_") or node.attr.endswith("__") or node.attr in OF_TUPLES:
        return True
    owner = ast.unparse(node.value)
    is_alike = isinstance(node.value, ast.Name) and node.attr in scope.private and owner not in scope.others
    return is_alike or owner in scope.own or owner.startswith("super(")


def complexity(function: ast.AST) -> int:
    """Return McCabe's number; each `and`, `or` and `if` of a comprehension counts as a branch."""
    nodes = list(ast.walk(function))
    conditions = sum(len(node.values) - 1 for node in nodes if isinstance(node, ast.BoolOp))
    conditions += sum(len(node.ifs) for node in nodes if isinstance(node, ast.comprehension))
    return 1 + conditions + sum(isinstance(node, BRANCHES) for node in nodes)


def repeated_classes(sources: Iterable[Source]) -> dict[str, list[str]]:
    """Return the class names that several classes have, and their files."""
    found: dict[str, list[str]] = defaultdict(list)
    for source in sources:
        for part in source.classes:
            found[part.name.rpartition(" ")[2].rpartition(".")[2]].append(source.name)
    return {name: places for name, places in found.items() if len(places) > 1}


def cycles(sources: Iterable[Source]) -> list[list[str]]:
    """Return groups of modules or packages of one parent that import each other. All imports count, also those in
    functions and under TYPE_CHECKING."""
    modules = {
        source.name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): source for source in sources
    }
    graphs: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for module, source in modules.items():
        for imported in source.imports:
            target = imported if imported in modules else imported.rpartition(".")[0]
            own, other = module.split("."), target.split(".")
            shared = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(own, other, strict=False))))
            if target in modules and shared < min(len(own), len(other)):
                graph = graphs[".".join(own[:shared])]
                graph[".".join(own[: shared + 1])].add(".".join(other[: shared + 1]))
    return sorted(group for graph in graphs.values() for group in _cycles(graph))


def _cycles(graph: Mapping[str, set[str]]) -> Iterator[list[str]]:
    reached: dict[str, set[str]] = {}
    for node in graph:
        reached[node], left = set(), [node]
        while left:
            new = graph.get(left.pop(), set()) - reached[node]
            reached[node] |= new
            left += new
    yield from map(
        list, {tuple(sorted(n for n in seen if node in reached.get(n, ()))) for node, seen in reached.items()} - {()}
    )


@contextlib.contextmanager
def tracing(names: Mapping[str, str]) -> Iterator[Callable[[], Trace]]:
    """Count function calls on all threads; `names` is the result of `files`.

    Yields:
      A function that returns the trace, for after the block.
    """
    calls: Counter[tuple[str, str]] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            calls[frame.f_code.co_filename, frame.f_code.co_qualname] += 1

    def trace() -> Trace:
        places = (names.get(os.path.realpath(file)) for file, _ in calls)
        return Trace(Counter(place for place in places if place), calls.total())

    threading.setprofile_all_threads(note)
    try:
        yield trace
    finally:
        threading.setprofile_all_threads(None)


def trace_hit(names: Mapping[str, str], model: str | os.PathLike[str] = "tiny-vqa", **sizes: Any) -> Trace:
    """Trace one token about a cached image, by an engine of these sizes.

    Raises:
      ValueError: the image is not found in the cache.
    """
    from vlcache_jax import LLM
    from vlcache_jax.assets import PICTURES

    with LLM(model, use_tqdm=False, **sizes) as llm:
        return _trace_chat(llm, [PICTURES / "picture.png"], names, repeats=2)


def trace_jpegs(names: Mapping[str, str]) -> Trace:
    """Trace one token about `JPEGS` cached images, given as bytes.

    Raises:
      ValueError: an image is not found in the cache.
    """
    import numpy as np
    from PIL import Image

    from vlcache_jax import LLM

    rng, images = np.random.default_rng(0), []
    for _ in range(JPEGS):
        file = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)).save(file, "JPEG")
        images.append(file.getvalue())
    with LLM("tiny-vqa", use_tqdm=False, enable_prefix_caching=False) as llm:
        return _trace_chat(llm, images, names, repeats=1)


def _trace_chat(llm: Any, images: list[Any], names: Mapping[str, str], *, repeats: int) -> Trace:
    """Ask once, repeat so that everything is compiled, and trace the next repeat. No other request is compiled for."""
    from vlcache_jax import SamplingParams

    content = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": QUESTION}]
    conversation, params = [{"role": "user", "content": content}], SamplingParams(max_tokens=1, temperature=0)
    llm.service.ahead.stop()
    for _ in range(1 + repeats):
        llm.chat(conversation, params, use_tqdm=False)
    with tracing(names) as trace:
        [output] = llm.chat(conversation, params, use_tqdm=False)
    if {image.match for image in output.cache.images} != {"exact"}:
        raise ValueError(f"a repeat must hit exactly, got {output.cache}")
    return trace()


def trace_stream(names: Mapping[str, str], model: str | os.PathLike[str] = "tiny-vqa", **sizes: Any) -> Trace:
    """Trace a stream of 8 tokens about a cached image from the HTTP server, by an engine of these sizes.

    Raises:
      ValueError: the answer is not a stream to its end, or the image is not found in the cache.
    """
    from vlcache_jax import AsyncLLM
    from vlcache_jax.assets import PICTURES
    from vlcache_jax.server.app import Server
    from vlcache_jax.server.config import ServerConfig
    from vlcache_jax.server.lifecycle import listening

    url = "data:image/png;base64," + base64.b64encode((PICTURES / "picture.png").read_bytes()).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
    body = json.dumps({"messages": [{"role": "user", "content": content}], **STREAMED})
    engine = AsyncLLM(model, use_tqdm=False, **sizes)
    engine.service.ahead.stop()
    try:
        with listening(Server(engine, ServerConfig(port=0))) as address:
            for _ in range(3):
                _post(address, body)
            with tracing(names) as trace:
                answer = _post(address, body)
    finally:
        asyncio.run(engine.close())
    if not answer.endswith("data: [DONE]\n\n"):
        raise ValueError(f"an answer must be a whole stream, got {answer}")
    return trace()


def _post(address: str, body: str) -> str:
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(address).netloc, timeout=60)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode()
    if response.status != 200:
        raise ValueError(f"an answer must have status 200, got {response.status}: {text}")
    return text


def rows(sources: list[Source]) -> Iterator[dict[str, Any]]:
    """Yield what the source shows, as rows of a table."""
    functions = [part for source in sources for part in source.functions]
    plain = [part for source in sources if not source.name.startswith(KERNELS) for part in source.functions]
    classes = [part for source in sources for part in source.classes]
    for what, parts, most in (("files", sources, LONG_FILE), ("functions *", plain, LONG_FUNCTION)):
        long = [f"{part.name} {part.lines}" for part in parts if part.lines > most]
        yield {"what": f"{what} over {most} lines", "number": len(long), "which": "; ".join(long)}
    for what, parts in (("class", classes), ("function", functions), ("function *", plain)):
        largest = max(parts, key=lambda part: part.lines)
        branches = f", complexity {largest.complexity}" * (what != "class")
        yield {"what": f"largest {what}, lines", "number": largest.lines, "which": f"{largest.name}{branches}"}
    largest = max(plain, key=lambda part: part.complexity)
    yield {"what": "largest complexity *", "number": largest.complexity, "which": largest.name}
    repeated = repeated_classes(sources)
    yield {"what": "repeated class names", "number": len(repeated), "which": "; ".join(repeated)}
    kinds = [source.name for source in sources if source.names_kinds]
    yield {"what": "files that name kinds of layers", "number": len(kinds), "which": "; ".join(kinds)}
    found = cycles(sources)
    yield {"what": "import cycles", "number": len(found), "which": "; ".join(map(" ".join, found))}


def main() -> None:
    import vlcache_jax
    from vlcache_jax.study.report import show

    root = pathlib.Path(vlcache_jax.__file__).resolve().parent
    names, beside = files(root), files(root.parent / "research")
    sources = [read(name, pathlib.Path(path).read_text("utf-8")) for path, name in names.items()]
    own = sum(one.lines for one, path in zip(sources, names, strict=True) if pathlib.Path(path).is_relative_to(root))
    table = [
        {"what": "modules", "number": len(sources), "which": "with the linked folders"},
        {"what": "lines", "number": sum(source.lines for source in sources), "which": "with the linked folders"},
        {"what": "lines of vlcache_jax/", "number": own, "which": "without the linked folders"},
        *rows(sources),
    ]
    others = [read(f"research/{name}", pathlib.Path(path).read_text("utf-8")) for path, name in beside.items()]
    reads = [place for source in (*sources, *others) for place in source.reads]
    table.append({"what": "private attributes of other classes, read", "number": len(reads), "which": "; ".join(reads)})
    if "--still" not in sys.argv[1:]:
        traces = {"a hit": trace_hit(names), "a streamed hit": trace_stream(names), "20 JPEGs": trace_jpegs(names)}
        for what, trace in traces.items():
            for unit, number in (
                ("files", len(trace.functions)), ("functions", trace.functions.total()), ("calls", trace.calls),
            ):  # fmt: skip
                table.append({"what": f"{what}: {unit}", "number": number, "which": ""})
        entered = traces["a hit"].functions
        show("A hit", [{"file": name, "functions": number} for name, number in entered.most_common()])
    lines: Counter[str] = Counter()
    for source in (*sources, *others):
        lines[source.name.partition("/")[0]] += source.lines
    show("Packages", [{"package": package, "lines": number} for package, number in lines.most_common()])
    show("Code metrics (*: without kernels)", table)


if __name__ == "__main__":
    main()
