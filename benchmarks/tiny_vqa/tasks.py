"""Questions about pictures, with their answers. A task is one column of the accuracy tables, made of a few kinds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from vlcache_jax.benchmarks.tiny_vqa.pictures import COLOURS, SHAPES, Picture

_DIRECTIONS = {"right of": (0, 1), "left of": (0, -1), "above": (-1, 0), "below": (1, 0)}
_PLURALS = {"cross": "crosses"}
_COLUMNS = "ABCDEFGHIJ"  # letters, as in spreadsheets: with numbers for both, which is which was learnt very late
_MOST = 4  # the highest count that is asked for


@dataclasses.dataclass(frozen=True)
class Question:
    """The text as the user writes it, and the one right answer."""

    task: str
    text: str
    answer: str


def ask(rng: np.random.Generator, pictures: Sequence[Picture], task: str) -> Question | None:
    """A question of the task about the pictures, or None if these pictures do not allow one.

    Raises:
      ValueError: `task` is none of `TASKS`.
    """
    if task not in _KINDS:
        raise ValueError(f"task must be one of {TASKS}, got {task!r}")
    kinds = _KINDS[task]
    for kind in rng.permutation(len(kinds)):
        asked = kinds[kind](rng, pictures)
        if asked is not None:
            text, answer = asked
            return Question(task, text[0].upper() + text[1:], answer)
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


_Kind = Callable[[np.random.Generator, Sequence[Picture]], tuple[str, str] | None]
_KINDS: dict[str, tuple[_Kind, ...]] = {
    "grid": (_what, _colour, _where, _neighbour),
    "list": (_line,),
    "count": (_count,),
    "compare": (_more, _shows_code),
    "multihop": (_beside_code,),
}
TASKS = tuple(_KINDS)


def _neighbours(picture: Picture) -> list[tuple[str, object, tuple[int, int]]]:
    return [
        (direction, glyph, (row + down, column + right))
        for (row, column), glyph in picture.glyphs.items()
        for direction, (down, right) in _DIRECTIONS.items()
    ]


def _in_image(i: int, pictures: Sequence[Picture]) -> str:
    return f"in image {i + 1}, " if len(pictures) > 1 else ""


def _place(row: int, column: int) -> str:
    return f"row {row + 1}, column {_COLUMNS[column]}"


def _plural(kind: str) -> str:
    return f"{kind} shapes" if kind in COLOURS else _PLURALS.get(kind, f"{kind}s")


def _any[T](rng: np.random.Generator, values: Sequence[T]) -> T:
    return values[int(rng.integers(len(values)))]
