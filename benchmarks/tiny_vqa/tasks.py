"""Questions about pictures, with their answers. A task is one column of the accuracy tables, made of a few kinds."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from vlcache_jax.benchmarks.tiny_vqa.pictures import COLOURS, GLYPHS, SHAPES, Picture

_DIRECTIONS = {"right of": (0, 1), "left of": (0, -1), "above": (-1, 0), "below": (1, 0)}
_PLURALS = {"cross": "crosses"}
_COLUMNS = "ABCDEFGHIJ"  # places are named as in spreadsheets, B2: short names stand right behind what they belong to
_AT_ONCE = 3  # places or glyphs in one question
_MOST = 4  # the highest count that is asked for


@dataclasses.dataclass(frozen=True)
class Question:
    """Its kind, the text as the user writes it, and the one right answer."""

    kind: str
    text: str
    answer: str


def ask(rng: np.random.Generator, pictures: Sequence[Picture], kinds: Sequence[str]) -> Question | None:
    """A question of one of the kinds about the pictures, or None if these pictures allow none.

    Raises:
      ValueError: one of `kinds` is none of `KINDS`.
    """
    if unknown := set(kinds) - set(KINDS):
        raise ValueError(f"kinds must be of {tuple(KINDS)}, got {sorted(unknown)}")
    for kind in rng.permutation(list(kinds)):
        asked = KINDS[kind](rng, pictures)
        if asked is not None:
            text, answer = asked
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
    return f"{_in_image(i, pictures)}where is the {glyph}?", _place(row, column)


def _neighbour(rng: np.random.Generator, pictures: Sequence[Picture]) -> tuple[str, str] | None:
    i = int(rng.integers(len(pictures)))
    pairs = [
        (direction, glyph, pictures[i].glyphs[place])
        for direction, glyph, place in _neighbours(pictures[i])
        if place in pictures[i].glyphs
    ]
    if not pairs:
        return None
    direction, glyph, answer = _any(rng, pairs)
    return f"{_in_image(i, pictures)}what is {direction} the {glyph}?", str(answer)


def _attribute(rng: np.random.Generator, pictures: Sequence[Picture]) -> tuple[str, str] | None:
    i = int(rng.integers(len(pictures)))
    glyphs = list(pictures[i].glyphs.values())
    asked = [(f"what colour is the {g.shape}?", g.colour) for g in glyphs if pictures[i].count(g.shape) == 1]
    asked += [(f"what shape is {g.colour}?", g.shape) for g in glyphs if pictures[i].count(g.colour) == 1]
    if not asked:
        return None
    text, answer = _any(rng, asked)
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
        return f"{_in_image(i, pictures)}what is the code?", str(pictures[i].code_glyph)
    return f"{_in_image(i, pictures)}where is the code?", _place(*pictures[i].code)


def _line(rng: np.random.Generator, pictures: Sequence[Picture]) -> tuple[str, str] | None:
    i = int(rng.integers(len(pictures)))
    size = pictures[i].size
    if rng.random() < 0.5:
        row = int(rng.integers(size.rows))
        name, places = f"row {row + 1}", [(row, column) for column in range(size.columns)]
    else:
        column = int(rng.integers(size.columns))
        name, places = f"column {_COLUMNS[column]}", [(row, column) for row in range(size.rows)]
    answer = ", ".join(str(pictures[i].glyphs.get(place, "nothing")) for place in places)
    return f"{_in_image(i, pictures)}what is in {name}?", answer


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
    asked = [shown[k] for k in rng.permutation(len(shown))[:_AT_ONCE]]
    if len(asked) < 2:
        return None
    found = ", ".join(f"{glyph} {_place(*cell)}" for cell, glyph in asked)
    return f"{_in_image(i, pictures)}where are the {_join([str(glyph) for _, glyph in asked])}?", found


def _colours(rng: np.random.Generator, pictures: Sequence[Picture]) -> tuple[str, str] | None:
    i = int(rng.integers(len(pictures)))
    single = [glyph for glyph in pictures[i].glyphs.values() if pictures[i].count(glyph.shape) == 1]
    asked = [single[k] for k in rng.permutation(len(single))[:_AT_ONCE]]
    if len(asked) < 2:
        return None
    found = ", ".join(f"{glyph.shape} {glyph.colour}" for glyph in asked)
    return f"{_in_image(i, pictures)}what colours are the {_join([glyph.shape for glyph in asked])}?", found


def _count(rng: np.random.Generator, pictures: Sequence[Picture]) -> tuple[str, str] | None:
    i = int(rng.integers(len(pictures)))
    kinds = {kind: pictures[i].count(kind) for kind in (*COLOURS, *SHAPES)}
    count = _any(rng, sorted({count for count in kinds.values() if count <= _MOST}))
    kind = _any(rng, [kind for kind in kinds if kinds[kind] == count])
    return f"{_in_image(i, pictures)}how many {_plural(kind)} are there?", str(count)


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
        f"which has more {_plural(kind)}, image {i + 1} or image {j + 1}?",
        f"image {i + 1}" if a > b else f"image {j + 1}",
    )


def _shows_code(rng: np.random.Generator, pictures: Sequence[Picture]) -> tuple[str, str] | None:
    if len(pictures) < 2:
        return None
    i, j = (int(k) for k in rng.permutation(len(pictures))[:2])
    shown = pictures[j].find(pictures[i].code_glyph) is not None
    return f"is the code of image {i + 1} on image {j + 1}?", "yes" if shown else "no"


def _beside_code(rng: np.random.Generator, pictures: Sequence[Picture]) -> tuple[str, str] | None:
    hops = [
        (direction, i, j, pictures[j].glyphs[place])
        for j in range(len(pictures))
        for direction, glyph, place in _neighbours(pictures[j])
        if place in pictures[j].glyphs
        for i in range(len(pictures))
        if i != j and pictures[i].code_glyph == glyph
    ]
    if not hops:
        return None
    direction, i, j, answer = _any(rng, hops)
    return f"in image {j + 1}, what is {direction} the code of image {i + 1}?", str(answer)


def _at_code(rng: np.random.Generator, pictures: Sequence[Picture]) -> tuple[str, str] | None:
    hops = [
        (i, j)
        for i, j in itertools.permutations(range(len(pictures)), 2)
        if all(at < side for at, side in zip(pictures[i].code, dataclasses.astuple(pictures[j].size), strict=False))
    ]
    if not hops:
        return None
    i, j = _any(rng, hops)
    glyph = pictures[j].glyphs.get(pictures[i].code)
    return f"in image {j + 1}, what is where image {i + 1} has its code?", str(glyph or "nothing")


KINDS: dict[str, Callable[[np.random.Generator, Sequence[Picture]], tuple[str, str] | None]] = {
    "what": _what,
    "colour": _colour,
    "where": _where,
    "neighbour": _neighbour,
    "attribute": _attribute,
    "exists": _exists,
    "code": _code,
    "line": _line,
    "contents": _contents,
    "places": _places,
    "colours": _colours,
    "count": _count,
    "more": _more,
    "shows_code": _shows_code,
    "at_code": _at_code,
    "beside_code": _beside_code,
}
TASKS = {
    "grid": ("what", "colour", "where", "neighbour", "attribute", "exists", "code"),
    "list": ("line", "contents", "places", "colours"),
    "count": ("count",),
    "compare": ("more", "shows_code"),
    "multihop": ("at_code", "beside_code"),
}


def _neighbours(picture: Picture) -> list[tuple[str, object, tuple[int, int]]]:
    return [
        (direction, glyph, (row + down, column + right))
        for (row, column), glyph in picture.glyphs.items()
        for direction, (down, right) in _DIRECTIONS.items()
    ]


def _in_image(i: int, pictures: Sequence[Picture]) -> str:
    return f"in image {i + 1}, " if len(pictures) > 1 else ""


def _place(row: int, column: int) -> str:
    return f"{_COLUMNS[column]}{row + 1}"


def _join(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _plural(kind: str) -> str:
    return f"{kind} shapes" if kind in COLOURS else _PLURALS.get(kind, f"{kind}s")


def _any[T](rng: np.random.Generator, values: Sequence[T]) -> T:
    return values[int(rng.integers(len(values)))]
