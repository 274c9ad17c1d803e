"""Questions about images, with their answers. A task is one column of the accuracy tables, made of a few kinds.

Most answers repeat what they look up, because a model this small finds best what stands right before. If something is
first read and then used, the answer contains both.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from vlcache_jax.benchmarks.tiny_vqa.pictures import COLOURS, GLYPHS, SHAPES, Glyph, Picture
from vlcache_jax.study.questions import number_name

_PLURALS = {"cross": "crosses"}
_COLUMNS = "ABCDEFGHIJ"  # places are named as in spreadsheets, B2: short names stand right after their object
_AT_ONCE = 3  # places or glyphs in one question
_MOST = 4  # the highest count in a question


@dataclasses.dataclass(frozen=True)
class Question:
    """Kind of a question, its text as the user writes it, and the one right answer."""

    kind: str
    text: str
    answer: str


def ask(rng: np.random.Generator, pictures: Sequence[Picture], kinds: Sequence[str]) -> Question | None:
    """Return a question of one of the kinds about the images, or None if these images allow none.

    Raises:
      ValueError: One of `kinds` is none of `KINDS` and `SEARCHES`.
    """
    known = KINDS | SEARCHES
    if unknown := set(kinds) - set(known):
        raise ValueError(f"kinds must be some of {tuple(known)}, got {sorted(unknown)}")
    for kind in rng.permutation(list(kinds)):
        found = known[kind](rng, pictures)
        if found is not None:
            text, answer = found
            return Question(str(kind), text[0].upper() + text[1:], answer)
    return None


def _what(rng: np.random.Generator, pictures: Sequence[Picture]) -> tuple[str, str] | None:
    i = int(rng.integers(len(pictures)))
    size = pictures[i].size
    row, column = int(rng.integers(size.rows)), int(rng.integers(size.columns))
    glyph = pictures[i].glyphs.get((row, column))
    return f"{_in_image(i, pictures)}what is at {_place(row, column)}?", str(glyph or "nothing")


def _colour(rng: np.random.Generator, pictures: Sequence[Picture]) -> tuple[str, str] | None:
    i = int(rng.integers(len(pictures)))
    (row, column), glyph = _any(rng, list(pictures[i].glyphs.items()))
    return f"{_in_image(i, pictures)}what colour is at {_place(row, column)}?", glyph.colour


def _where(rng: np.random.Generator, pictures: Sequence[Picture]) -> tuple[str, str] | None:
    i = int(rng.integers(len(pictures)))
    (row, column), glyph = _any(rng, list(pictures[i].glyphs.items()))
    return f"{_in_image(i, pictures)}where is the {glyph}?", f"{glyph} {_place(row, column)}"


def _attribute(rng: np.random.Generator, pictures: Sequence[Picture]) -> tuple[str, str] | None:
    i = int(rng.integers(len(pictures)))
    glyphs = list(pictures[i].glyphs.values())
    candidates = [(f"what colour is the {g.shape}?", g.colour) for g in glyphs if pictures[i].count(g.shape) == 1]
    candidates += [(f"what shape is {g.colour}?", g.shape) for g in glyphs if pictures[i].count(g.colour) == 1]
    if not candidates:
        return None
    text, answer = _any(rng, candidates)
    return _in_image(i, pictures) + text, answer


def _exists(rng: np.random.Generator, pictures: Sequence[Picture]) -> tuple[str, str] | None:
    i = int(rng.integers(len(pictures)))
    shown = set(pictures[i].glyphs.values())
    there = bool(rng.random() < 0.5)
    glyph = _any(rng, sorted(shown) if there else [glyph for glyph in GLYPHS if glyph not in shown])
    return f"{_in_image(i, pictures)}is there a {glyph}?", "yes" if there else "no"


def _code(rng: np.random.Generator, pictures: Sequence[Picture]) -> tuple[str, str] | None:
    i = int(rng.integers(len(pictures)))
    if rng.random() < 0.5:
        return f"{_in_image(i, pictures)}what is the code?", f"code {pictures[i].code_glyph}"
    return f"{_in_image(i, pictures)}where is the code?", f"code {_place(*pictures[i].code)}"


def _contents(rng: np.random.Generator, pictures: Sequence[Picture]) -> tuple[str, str] | None:
    i = int(rng.integers(len(pictures)))
    size = pictures[i].size
    cells = [divmod(int(cell), size.columns) for cell in rng.permutation(size.rows * size.columns)[:_AT_ONCE]]
    if len(cells) < 2:
        return None
    found = ", ".join(f"{_place(*cell)} {pictures[i].glyphs.get(cell, 'nothing')}" for cell in cells)
    return f"{_in_image(i, pictures)}what is at {_join([_place(*cell) for cell in cells])}?", found


def _places(rng: np.random.Generator, pictures: Sequence[Picture]) -> tuple[str, str] | None:
    i = int(rng.integers(len(pictures)))
    shown = list(pictures[i].glyphs.items())
    chosen = [shown[k] for k in rng.permutation(len(shown))[:_AT_ONCE]]
    if len(chosen) < 2:
        return None
    found = ", ".join(f"{glyph} {_place(*cell)}" for cell, glyph in chosen)
    return f"{_in_image(i, pictures)}where are the {_join([str(glyph) for _, glyph in chosen])}?", found


def _colours(rng: np.random.Generator, pictures: Sequence[Picture]) -> tuple[str, str] | None:
    i = int(rng.integers(len(pictures)))
    single = [glyph for glyph in pictures[i].glyphs.values() if pictures[i].count(glyph.shape) == 1]
    chosen = [single[k] for k in rng.permutation(len(single))[:_AT_ONCE]]
    if len(chosen) < 2:
        return None
    found = ", ".join(glyph.colour for glyph in chosen)
    return f"{_in_image(i, pictures)}what colours are the {_join([glyph.shape for glyph in chosen])}?", found


def _count(rng: np.random.Generator, pictures: Sequence[Picture]) -> tuple[str, str] | None:
    i = int(rng.integers(len(pictures)))
    kinds = {kind: pictures[i].count(kind) for kind in (*COLOURS, *SHAPES)}
    count = _any(rng, sorted({count for count in kinds.values() if count <= _MOST}))
    kind = _any(rng, [kind for kind in kinds if kinds[kind] == count])
    return f"{_in_image(i, pictures)}how many {_plural(kind)} are there?", _counted(pictures[i], kind)


def _more(rng: np.random.Generator, pictures: Sequence[Picture]) -> tuple[str, str] | None:
    if len(pictures) < 2:
        return None
    i, j = (int(k) for k in np.sort(rng.permutation(len(pictures))[:2]))
    pairs = {kind: (pictures[i].count(kind), pictures[j].count(kind)) for kind in (*COLOURS, *SHAPES)}
    uneven = [kind for kind, (a, b) in pairs.items() if a != b and max(a, b) <= _MOST]
    if not uneven:
        return None
    kind = _any(rng, uneven)
    a, b = pairs[kind]
    return (
        f"which has more {_plural(kind)}, {_image(i)} or {_image(j)}?",
        f"{_image(i)} {_counted(pictures[i], kind)}, {_image(j)} {_counted(pictures[j], kind)}, "
        f"so {_image(i if a > b else j)}",
    )


def _shows_code(rng: np.random.Generator, pictures: Sequence[Picture]) -> tuple[str, str] | None:
    if len(pictures) < 2:
        return None
    i, j = (int(k) for k in rng.permutation(len(pictures))[:2])
    code = pictures[i].code_glyph
    return (
        f"is the code of {_image(i)} on {_image(j)}?",
        f"{_image(i)} code {code}, {_image(j)} {code} {'yes' if pictures[j].find(code) else 'no'}",
    )


def _find_code(rng: np.random.Generator, pictures: Sequence[Picture]) -> tuple[str, str] | None:
    found = {
        (i, j): place
        for i, j in itertools.permutations(range(len(pictures)), 2)
        if (place := pictures[j].find(pictures[i].code_glyph)) is not None
    }
    if not found:
        return None
    (i, j), place = _any(rng, list(found.items()))
    code = pictures[i].code_glyph
    return (
        f"in {_image(j)}, where is the code of {_image(i)}?",
        f"{_image(i)} code {code}, {_image(j)} {code} {_place(*place)}",
    )


def _at_code(rng: np.random.Generator, pictures: Sequence[Picture]) -> tuple[str, str] | None:
    hops = [
        (i, j)
        for i, j in itertools.permutations(range(len(pictures)), 2)
        if all(at < side for at, side in zip(pictures[i].code, dataclasses.astuple(pictures[j].size), strict=False))
    ]
    if not hops:
        return None
    i, j = _any(rng, hops)
    code = pictures[i].code
    return (
        f"in {_image(j)}, what is where {_image(i)} has its code?",
        f"{_image(i)} code {_place(*code)}, {_image(j)} {_place(*code)} {pictures[j].glyphs.get(code, 'nothing')}",
    )


def _holder(rng: np.random.Generator, pictures: Sequence[Picture]) -> tuple[str, str] | None:
    if len(pictures) < 2:
        return None
    i = int(rng.integers(len(pictures)))
    code = pictures[i].code_glyph
    return f"which image has the code {code}?", f"code {code} {number_name(i + 1)}"


def _keyed(rng: np.random.Generator, pictures: Sequence[Picture]) -> tuple[str, str] | None:
    if len(pictures) < 2:
        return None
    i = int(rng.integers(len(pictures)))
    size, code = pictures[i].size, pictures[i].code_glyph
    row, column = int(rng.integers(size.rows)), int(rng.integers(size.columns))
    found = pictures[i].glyphs.get((row, column))
    return (
        f"where the code is {code}, what is at {_place(row, column)}?",
        f"code {code} {number_name(i + 1)} {_place(row, column)} {found or 'nothing'}",
    )


_Kinds = dict[str, Callable[[np.random.Generator, Sequence[Picture]], tuple[str, str] | None]]
KINDS: _Kinds = {
    "what": _what,
    "colour": _colour,
    "where": _where,
    "attribute": _attribute,
    "exists": _exists,
    "code": _code,
    "contents": _contents,
    "places": _places,
    "colours": _colours,
    "count": _count,
    "more": _more,
    "shows_code": _shows_code,
    "at_code": _at_code,
    "find_code": _find_code,
}
# Questions that identify one of many images by its content. They are in no task: the shipped model never learned them.
SEARCHES: _Kinds = {"holder": _holder, "keyed": _keyed}
TASKS = {
    "grid": ("what", "colour", "where", "attribute", "code"),
    "list": ("contents", "places", "colours"),
    "count": ("count", "count", "exists"),  # each of these equally often
    "compare": ("more", "shows_code"),
    "multihop": ("at_code", "find_code"),
}
# Auxiliary prompts about one image, and about several.
RELATED = (
    ("What is the code?", "In image one, what is the code?"),
    ("How many stars are there?", "In image two, how many stars are there?"),
    ("What is at B2?", "In image two, what is at B2?"),
    ("Is there a red circle?", "Is the code of image one on image two?"),
    ("Where is the code?", "In image two, what is where image one has its code?"),
    ("How many blue shapes are there?", "Which has more blue shapes, image one or image two?"),
    ("What is at A1, C3 and B4?", "In image one, what is at A1, C3 and B4?"),
    ("What colour is at C2?", "In image one, what colour is at C2?"),
)


def _in_image(i: int, pictures: Sequence[Picture]) -> str:
    return f"in {_image(i)}, " if len(pictures) > 1 else ""


def _counted(picture: Picture, kind: str) -> str:
    """Return the glyphs of a color or a shape, in a fixed order, and their count: "red circle star: 2"."""
    shown = picture.glyphs.values()
    if kind in COLOURS:
        named = [shape for shape in SHAPES if Glyph(kind, shape) in shown]
    else:
        named = [colour for colour in COLOURS if Glyph(colour, kind) in shown]
    return f"{' '.join([kind, *named])}: {len(named)}"


def _image(i: int) -> str:
    return f"image {number_name(i + 1)}"


def _place(row: int, column: int) -> str:
    return f"{_COLUMNS[column]}{row + 1}"


def _join(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _plural(kind: str) -> str:
    return f"{kind} shapes" if kind in COLOURS else _PLURALS.get(kind, f"{kind}s")


def _any[T](rng: np.random.Generator, values: Sequence[T]) -> T:
    return values[int(rng.integers(len(values)))]
