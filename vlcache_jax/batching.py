"""How requests are put together: waves that share the pool, and the steps that prefill a wave (host, numpy).

The rows of a wave lie one after the other in slot order and are cut into steps of static sizes. A cut may fall inside a
request or an image: a step's rows see all slots before them, so cutting is exact.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vlcache_jax.buckets import Ladder, round_up, split_rows
from vlcache_jax.layout import ImageRef, Layout
from vlcache_jax.models import Rows
from vlcache_jax.plan import Plan

Index = npt.NDArray[np.int32]


@dataclass(eq=False)
class Sequence:
    """One prompt and what is generated after it, in consecutive slots of the pool.

    Attributes:
      layout, plan: of the prompt.
      new_slots: slots needed beyond the prompt.
      base: first slot; set when the sequence joins a wave.
    """

    layout: Layout
    plan: Plan
    new_slots: int
    base: int = 0

    @property
    def num_slots(self) -> int:
        return len(self.layout) + self.new_slots


@dataclass(frozen=True, eq=False)
class Placement:
    """Rows of an image that a step computes: row `image_row[i]` of the image is encoder row `place[i]` of the step."""

    image: ImageRef
    image_row: Index
    place: Index


@dataclass(frozen=True, eq=False)
class Step[S: Sequence]:
    """One prefill step.

    Attributes:
      rows: padded to a rung.
      bounds: rows entering each layer, and last the rows leaving the last one; non-increasing.
      placements: the images whose rows are computed.
      wanted: (sequence, index of the token in its prompt) of each row whose logits are wanted; they come first.
    """

    rows: Rows
    bounds: tuple[int, ...]
    placements: tuple[Placement, ...]
    wanted: tuple[tuple[S, int], ...]


def cut_waves[S: Sequence](sequences: abc.Iterable[S], max_sequences: int, num_slots: int) -> list[list[S]]:
    """Consecutive sequences that fit in the pool together; each gets its first slot."""
    waves: list[list[S]] = []
    used = num_slots
    for sequence in sequences:
        if used + sequence.num_slots > num_slots or len(waves[-1]) == max_sequences:
            waves.append([])
            used = 0
        sequence.base = used
        used += sequence.num_slots
        waves[-1].append(sequence)
    return waves


def prefill_steps[S: Sequence](wave: abc.Sequence[S], ladder: Ladder, num_slots: int, num_layers: int) -> list[Step[S]]:
    """The steps that compute all rows of a wave, in slot order."""
    length = [len(sequence.layout) for sequence in wave]
    owner = np.repeat(np.arange(len(wave), dtype=np.int32), length)
    index = np.concatenate([np.arange(n, dtype=np.int32) for n in length])  # of the token in its prompt
    base = np.array([sequence.base for sequence in wave], np.int32)[owner]
    depth = np.concatenate([sequence.plan.depth for sequence in wave])
    position = np.concatenate([sequence.layout.positions for sequence in wave], axis=1)
    token = np.concatenate([sequence.layout.token_ids for sequence in wave])
    images, image, image_row = _image_rows(wave, length)

    steps = []
    start = 0
    while start < len(owner):
        size = split_rows(len(owner) - start, ladder.rows)[0]
        end = min(start + size, len(owner))
        wanted = start + np.flatnonzero(depth[start:end] > num_layers)
        if len(wanted) > ladder.max_sequences:  # the output head holds no more
            end = int(wanted[ladder.max_sequences])
            size = round_up(end - start, ladder.rows)
        rows = start + np.argsort(-depth[start:end], kind="stable")
        placements, source = _place(images, image[rows], image_row[rows], token[rows])
        slot = base[rows] + index[rows]
        outputs = rows[depth[rows] > num_layers]
        steps.append(
            Step(
                rows=pad_rows(Rows(slot, position[:, rows], base[rows], slot + 1, source), size, num_slots),
                bounds=(size,) * num_layers + (ladder.outputs(size),),
                placements=placements,
                wanted=tuple((wave[owner[row]], int(index[row])) for row in outputs),
            )
        )
        start = end
    return steps


def pad_rows(rows: Rows, size: int, num_slots: int) -> Rows:
    """Padding rows write nowhere (distinct slots beyond the pool) and see nothing."""
    missing = size - len(rows.slot)
    padded = Rows(*(np.pad(field, [(0, 0)] * (field.ndim - 1) + [(0, missing)]) for field in rows))
    padded.slot[size - missing :] = num_slots + np.arange(size - missing, size)
    return padded


def encoder_calls(images: abc.Iterable[ImageRef], most: int) -> list[list[ImageRef]]:
    """Consecutive images that share an encoder call of up to `most` patches; a larger image has a call of its own."""
    calls: list[list[ImageRef]] = []
    used = most
    for image in images:
        patches = len(image.patches.pixels)
        if used + patches > most:
            calls.append([])
            used = 0
        used += patches
        calls[-1].append(image)
    return calls


def _image_rows(wave: abc.Sequence[Sequence], length: list[int]) -> tuple[list[ImageRef], Index, Index]:
    """The wave's images, and for every row which image it belongs to (-1: text) and which row of it it is."""
    images: list[ImageRef] = []
    image = np.full(sum(length), -1, np.int32)
    image_row = np.zeros(sum(length), np.int32)
    known: dict[int, int] = {}  # answers to one prompt share its images
    first = 0
    for sequence in wave:
        for span in sequence.layout.spans:
            if span.image is not None:
                number = known.setdefault(id(span.image), len(images))
                if number == len(images):
                    images.append(span.image)
                place = slice(first + span.start, first + span.start + span.length)
                image[place] = number
                image_row[place] = np.arange(span.length)
        first += len(sequence.layout)
    return images, image, image_row


def _place(images: list[ImageRef], image: Index, image_row: Index, token: Index) -> tuple[tuple[Placement, ...], Index]:
    """Numbers a step's image rows as its encoder rows; returns where they come from, and each row's source.

    Answers to one prompt share the rows of its images.
    """
    is_image = image >= 0
    pairs, place = np.unique(np.stack([image[is_image], image_row[is_image]]), axis=1, return_inverse=True)
    source = token.copy()
    source[is_image] = -1 - place
    placements = []
    for number in np.unique(pairs[0]):
        mine = np.flatnonzero(pairs[0] == number).astype(np.int32)
        placements.append(Placement(images[number], pairs[1, mine], mine))
    return tuple(placements), source
