"""How large the house is, and how tangled: `python -m tests.house`; `--still` leaves the traced request out.

Traced is a warm hit: the shipped model answers one token about an image that it has seen. Files and functions of the
package count that are entered in any thread, but for the one that compiles ahead what later requests may need. All else
is read from the source. Of another checkout:

    PYTHONPATH=../before python tests/house.py
"""

from __future__ import annotations

import ast
import os
import pathlib
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple

LONG_FILE, LONG_FUNCTION = 600, 80
KERNELS = "pallas_kernels"
COMPILES = "vlcache-ahead"  # a thread
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.comprehension, ast.match_case)
OF_TUPLES = {"_replace", "_asdict", "_fields", "_make"}  # public, whatever their names


class Part(NamedTuple):
    """A function or a class."""

    name: str  # with the file
    lines: int
    complexity: int  # of a class 0


class Source(NamedTuple):
    """What is read of a file.

    Attributes:
      name: below the package.
      lines: of the file.
      functions, classes: in the order of the file.
      reads: places such as "engine/loop.py:7 x._y" that read what is private to another class.
    """

    name: str
    lines: int
    functions: list[Part]
    classes: list[Part]
    reads: list[str]


class Around(NamedTuple):
    """What a line stands in.

    Attributes:
      own: names that may be asked for what is private: `self`, `cls`, modules, classes around.
      kept: what is private to these classes; any instance may be asked for it.
      others: parameters that are said to be of other classes.
      names: of the functions and classes around.
    """

    own: frozenset[str]
    kept: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()
    names: tuple[str, ...] = ()


def files(root: pathlib.Path) -> dict[str, str]:
    """Of each Python file, links followed: where it lies, and its name below the root."""
    found = (pathlib.Path(at, name) for at, _, names in os.walk(root, followlinks=True) for name in names)
    return {os.path.realpath(path): path.relative_to(root).as_posix() for path in sorted(found) if path.suffix == ".py"}


def read(name: str, text: str) -> Source:
    """Reads one file."""
    source, tree = Source(name, len(text.splitlines()), [], [], []), ast.parse(text)
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.Import))
    modules = {(alias.asname or alias.name).partition(".")[0] for node in imports for alias in node.names}
    _read(source, tree, Around(frozenset({"self", "cls", *modules})))
    return source


def _read(source: Source, node: ast.AST, around: Around) -> None:
    for child in ast.iter_child_nodes(node):
        within = around
        if isinstance(child, (*FUNCTIONS, ast.ClassDef)):
            within = around._replace(names=(*around.names, child.name))
            lines = (child.end_lineno or child.lineno) - child.lineno + 1
            name = f"{source.name}: {'.'.join(within.names)}"
            if isinstance(child, ast.ClassDef):
                source.classes.append(Part(name, lines, 0))
                within = within._replace(own=around.own | {child.name}, kept=around.kept | _kept(child))
            else:
                source.functions.append(Part(name, lines, complexity(child)))
                said = (one for one in ast.walk(child.args) if isinstance(one, ast.arg) and one.annotation)
                same = around.own | {"object", "Self"}
                others = {one.arg for one in said if ast.unparse(one.annotation or one) not in same}
                within = within._replace(others=around.others | others)
        elif isinstance(child, ast.Attribute) and not _is_open(child, around):
            source.reads.append(f"{source.name}:{child.lineno} {ast.unparse(child)}")
        _read(source, child, within)


def _kept(node: ast.ClassDef) -> set[str]:
    """Methods, fields, and what is assigned to `self`."""
    stored = (one for one in ast.walk(node) if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store))
    fields = (ast.unparse(child.target) for child in node.body if isinstance(child, ast.AnnAssign))
    methods = (child.name for child in node.body if isinstance(child, FUNCTIONS))
    return {*methods, *fields, *(one.attr for one in stored if ast.unparse(one.value) == "self")}


def _is_open(node: ast.Attribute, around: Around) -> bool:
    """Whether an attribute is public, or private to a class around or to a module."""
    if not node.attr.startswith("_") or node.attr.endswith("__") or node.attr in OF_TUPLES:
        return True
    owner = ast.unparse(node.value)
    is_alike = isinstance(node.value, ast.Name) and node.attr in around.kept and owner not in around.others
    return is_alike or owner in around.own or owner.startswith("super(")


def complexity(function: ast.AST) -> int:
    """McCabe's number; each `and`, `or` and `if` of a comprehension is a branch, too."""
    nodes = list(ast.walk(function))
    conditions = sum(len(node.values) - 1 for node in nodes if isinstance(node, ast.BoolOp))
    conditions += sum(len(node.ifs) for node in nodes if isinstance(node, ast.comprehension))
    return 1 + conditions + sum(isinstance(node, BRANCHES) for node in nodes)


def trace_hit(names: Mapping[str, str]) -> Counter[str]:
    """How many functions a warm hit enters, by file; `names` is what `files` returns."""
    from vlcache_jax import LLM, SamplingParams
    from vlcache_jax.assets import PICTURES

    entered: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and threading.current_thread().name != COMPILES:
            entered.add((frame.f_code.co_filename, frame.f_code.co_qualname))

    content = [{"type": "image", "image": PICTURES / "picture.png"}, {"type": "text", "text": "What is at C2?"}]
    conversation, params = [{"role": "user", "content": content}], SamplingParams(max_tokens=1, temperature=0)
    with LLM("tiny-vqa", use_tqdm=False) as llm:
        for _ in range(3):  # computes; hits; hits with everything compiled
            llm.chat(conversation, params, use_tqdm=False)
        threading.setprofile_all_threads(note)
        try:
            [output] = llm.chat(conversation, params, use_tqdm=False)
        finally:
            threading.setprofile_all_threads(None)
    if output.cache.images[0].match != "exact":
        raise ValueError(f"a repeat must hit exactly, got {output.cache}")
    places = (names.get(os.path.realpath(file)) for file, _ in entered)
    return Counter(place for place in places if place)


def rows(sources: list[Source]) -> Iterator[dict[str, Any]]:
    """What is read, as lines of a table."""
    functions = [part for source in sources for part in source.functions]
    plain = [part for source in sources if not source.name.startswith(KERNELS) for part in source.functions]
    classes = [part for source in sources for part in source.classes]
    for what, parts, most in (("files", sources, LONG_FILE), ("functions *", plain, LONG_FUNCTION)):
        long = [f"{part.name} {part.lines}" for part in parts if part.lines > most]
        yield {"what": f"{what} over {most} lines", "number": len(long), "which": "; ".join(long)}
    for what, parts in (("class", classes), ("function", functions), ("function *", plain)):
        largest = max(parts, key=lambda part: part.lines)
        tangled = f", complexity {largest.complexity}" * (what != "class")
        yield {"what": f"largest {what}, lines", "number": largest.lines, "which": f"{largest.name}{tangled}"}
    largest = max(plain, key=lambda part: part.complexity)
    yield {"what": "largest complexity *", "number": largest.complexity, "which": largest.name}


def main() -> None:
    import vlcache_jax
    from vlcache_jax.study.report import show

    root = pathlib.Path(vlcache_jax.__file__).resolve().parent
    names, beside = files(root), files(root.parent / "research")
    sources = [read(name, pathlib.Path(path).read_text("utf-8")) for path, name in names.items()]
    table = list(rows(sources))
    sources += [read(f"research/{name}", pathlib.Path(path).read_text("utf-8")) for path, name in beside.items()]
    reads = [place for source in sources for place in source.reads]
    table.append({"what": "private to others, read", "number": len(reads), "which": "above"})
    if "--still" not in sys.argv[1:]:
        hit = trace_hit(names)
        table.append({"what": "files that a warm hit enters", "number": len(hit), "which": "above"})
        table.append({"what": "functions that it enters", "number": hit.total(), "which": ""})
        show("A warm hit", [{"file": name, "functions": number} for name, number in hit.most_common()])
    print("\nPrivate to others, read", *reads, sep="\n")
    lines: Counter[str] = Counter()
    for source in sources:
        lines[source.name.partition("/")[0]] += source.lines
    show("Wings", [{"wing": wing, "lines": number} for wing, number in lines.most_common()])
    show("The house (*: but for kernels)", table)


if __name__ == "__main__":
    main()
