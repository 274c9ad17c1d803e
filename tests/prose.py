"""Counts what makes Markdown, docstrings and errors hard to read: `python -m tests.prose [FOLDER]`.

FOLDER is the root of a clone. In Markdown, code, tables, headings, HTML and link targets are not prose. An item of a
list is a paragraph of its own. A docstring should open with an imperative or a noun phrase.
"""

from __future__ import annotations

import ast
import dataclasses
import pathlib
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]
MAX_SENTENCE, MAX_PARAGRAPH = 30, 80  # words


@dataclasses.dataclass(frozen=True)
class Banned:
    """A word that pages do not use.

    Attributes:
      pattern: of the word and its forms.
      instead: the words to use.
      allowed: where the word has another, common meaning; empty: nowhere.
    """

    pattern: str
    instead: str
    allowed: str = ""

    def found(self, text: str) -> list[str]:
        """Return every use of the word in `text` that is not an allowed one."""
        if self.allowed:
            text = re.sub(self.allowed, " ", text, flags=re.IGNORECASE)
        return [match[0] for match in re.finditer(rf"\b(?:{self.pattern})\b", text, re.IGNORECASE)]


BANNED = (
    Banned("pictures?", "image, screenshot, figure"),
    Banned(
        "behind",
        "after",
        r"\bbehind (?:an?|the|your|its) (?:\w+ )?(?:proxy|proxies|gateway|load balancer|NAT|firewall)\b",
    ),
    Banned("in front of", "before", r"\bin front of (?:it|the server|vlcache|the engines?)\b"),
    Banned("anew", "again, recomputed"),
    Banned("told|tells", "reports, returns, logs, documents"),
    Banned("whoever|whatever|whichever", "name the actor or the thing"),
    Banned("nobody|somebody|anybody|everybody", "name the actor"),
    Banned("lanes?", "decode slot"),
    Banned("rungs?|ladders?", "bucket, bucket sizes"),
    Banned("put aside|puts aside", "swap out, swapped out"),
    Banned("put back|puts back", "preempt, preempted"),
    Banned("goes on|go on|going on|went on", "continues, resumes"),
    Banned("so too|so do|so does", "also, likewise"),
    Banned("wings?", "package, layer"),
    Banned("first contact", "kernel self-test"),
    Banned("heard|hears", "received, receives"),
    Banned("times as (?:fast|soon|many|much|long|large)", "3x faster, 3 times the size"),
    Banned("as soon as it can", "give the condition"),
    Banned("seen (?:apart|together|before)", "cached separately, cached together, cached"),
    Banned("known (?:images?|ones?|films?|videos?)", "cached image, repeated image"),
    Banned("comes? again|came again|come back", "repeated, cached"),
    Banned("in 8 bits|in 4 bits", "FP8, int8, int4"),
    Banned("K, V", "KV, keys and values"),
    Banned("outdoes?|outlasts?", "overrides, exceeds"),
    Banned(
        "licence|colour|behaviour|normalis\\w+|initialis\\w+|optimis\\w+|recognis\\w+|serialis\\w+", "American spelling"
    ),
)

DIALECT = (
    Banned("must hold(?! (?:at least|the KV|the images))", "must have, must be; unknown key ... in ..."),
    Banned("must be left out", "cannot be combined with ..., needs ..."),
    *(word for word in BANNED if word.pattern not in ("K, V",)),
)
"""Words that errors do not use."""

FRAGMENT = re.compile(
    r"(?:Of|What|Where|Whether|As|Who|How|The same|That|So|Which|Whose|Whatever|Whoever|Behind|Those|These|Such)\b"
)
CODE = "vlcache_jax", "models", "pallas_kernels", "convert", "benchmarks", "research"


def sources(root: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield the Python files of the package and of its folders, each once."""
    for folder in CODE:
        for path in sorted((root / folder).rglob("*.py")):
            if not any(place.is_symlink() for place in (path, *path.parents)):
                yield path


def docstrings(root: pathlib.Path) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each docstring."""
    for path in sources(root):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            has_one = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if has_one and (text := ast.get_docstring(node)):
                yield f"{path.relative_to(root)}:{getattr(node, 'lineno', 1)}", text


def errors(root: pathlib.Path) -> Iterator[tuple[str, str]]:
    """Yield the place and the fixed parts of the text of each error that is raised where it is written."""
    for path in sources(root):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                parts = [one.value for one in ast.walk(node.exc) if isinstance(one, ast.Constant)]
                yield f"{path.relative_to(root)}:{node.lineno}", " ".join(one for one in parts if isinstance(one, str))


def opening(text: str) -> list[str]:
    """Return the word with which a text opens, if that makes it a fragment."""
    match = FRAGMENT.match(text)
    return [match[0]] if match else []


def pages(root: pathlib.Path) -> list[pathlib.Path]:
    """Return the Markdown files that readers open, in a fixed order."""
    top = [root / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    return [path for path in (*top, *sorted((root / "docs").rglob("*.md"))) if path.is_file()]


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield each paragraph and each item of a list: its first line, counted from 1, and its plain text."""
    text = re.sub(r"<!--.*?-->", lambda match: re.sub(r"[^\n]", "", match[0]), text, flags=re.DOTALL)
    first, lines, fence = 0, list[str](), ""
    for number, line in enumerate([*text.splitlines(), ""], 1):
        bare = re.sub(r"^[\s>]+", "", line)
        mark = re.match(r"`{3,}|~{3,}|:{3,}", bare)
        if mark and (not fence or bare.strip() == fence):
            is_block = mark[0][0] == ":"  # a colon fence holds prose
            fence = "" if fence or is_block else mark[0]
            ends, bare = True, ""
        elif fence:
            continue
        else:
            is_item = re.match(r"(?:[-*+]|\d+\.)\s", bare)
            ends = not bare or bool(is_item) or bare.startswith(("#", "|", "<", "$$", ":"))
            bare = "" if bare.startswith(("#", "|", "<", "$$", ":")) else re.sub(r"^(?:[-*+]|\d+\.)\s+", "", bare)
        if ends and lines:
            yield first, _plain(" ".join(lines))
            lines = []
        if bare:
            first = first if lines else number
            lines.append(bare)
    if lines:
        yield first, _plain(" ".join(lines))


def sentences(paragraph: str) -> list[str]:
    """Return the sentences of a plain paragraph."""
    return [one for one in re.split(r"(?<=[.!?])[\"')\]*_]*\s+(?=[\"'(\[*_]*[A-Z0-9`])", paragraph) if one.strip()]


def words(text: str) -> int:
    """Return how many words a plain text has."""
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def _plain(text: str) -> str:
    """The text without code, targets of links and tags; each piece of code counts as one word."""
    text = re.sub(r"``.+?``|`[^`]+`", "`CODE`", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"<[^>]+>", "", text).replace("`CODE`", "CODE")


def _prose(text: str) -> str:
    """Everything that is read as prose, tables and headings included, without code."""
    text = re.sub(r"^(\s*)(`{3,}).*?^\s*\2\s*$", "", text, flags=re.MULTILINE | re.DOTALL)
    return _plain(re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL))


def faults(root: pathlib.Path, path: pathlib.Path) -> Iterator[tuple[str, str]]:
    """Yield the kind of each fault of a page, and a message with its place and its remedy."""
    name, text = path.relative_to(root), path.read_text(encoding="utf-8")
    for line, paragraph in paragraphs(text):
        if (count := words(paragraph)) > MAX_PARAGRAPH:
            yield "paragraph", f"{name}:{line}: a paragraph of {count} words; at most {MAX_PARAGRAPH}: split it"
        for sentence in sentences(paragraph):
            if (count := words(sentence)) > MAX_SENTENCE:
                shown = " ".join(sentence.split()[:8])
                yield "sentence", f"{name}:{line}: {count} words, at most {MAX_SENTENCE}: {shown} ..."
    plain = _prose(text)
    for banned in BANNED:
        for found in banned.found(plain):
            yield "word", f"{name}: {found!r}; write {banned.instead}"


def main(arguments: Sequence[str]) -> None:
    """Print the faults, and a table of them by kind of page."""
    root = pathlib.Path(arguments[0]).resolve() if arguments else ROOT
    table: dict[str, Counter[str]] = {}
    for path in pages(root):
        place = path.relative_to(root).parts
        row = table.setdefault(place[0] if len(place) == 1 else "/".join(place[:-1]), Counter())
        row["pages"] += 1
        row["lines"] += len(path.read_text(encoding="utf-8").splitlines())
        for kind, message in faults(root, path):
            print(message)
            row[kind] += 1
    kinds = ("pages", "lines", "sentence", "paragraph", "word")
    print("\n| place | pages | lines | sentences over 30 words | paragraphs over 80 words | banned words |")
    print("|---|" + "---:|" * len(kinds))
    for name, row in [*table.items(), ("all", sum(table.values(), Counter()))]:
        print("|", " | ".join([name, *(str(row[kind]) for kind in kinds)]), "|")
    texts = [text for _, text in docstrings(root)]
    print(f"\ndocstrings: {len(texts)}")
    print("that open as fragments:", sum(bool(opening(text)) for text in texts))
    print("of four words or fewer:", sum(words(text) <= 4 for text in texts))
    print("banned words in errors:", sum(len(word.found(text)) for _, text in errors(root) for word in DIALECT))


if __name__ == "__main__":
    main(sys.argv[1:])
