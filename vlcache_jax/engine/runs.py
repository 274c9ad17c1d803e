"""Blocks of tokens of layers with states, and the order in which the rows of a step change these states (host).

A prompt is cut into blocks of up to 64 tokens by its layout alone: at the ends of images, at the starts of messages, at
multiples of 64 tokens, and before its last token. Each generated token is a block. A step computes whole blocks. So the
same blocks are multiplied whether a prompt is computed in one step or in several, alone or with others, and after it
was preempted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vlcache_jax.cache.writer import EntrySlots
from vlcache_jax.engine.snapshots import MapSlots
from vlcache_jax.inputs.layout import Layout
from vlcache_jax.models.layer_kinds import BLOCK, BlockKind, Runs
from vlcache_jax.reuse.edges import Edges

Index = npt.NDArray[np.int32]


def block_ends(layout: Layout, prompt: int, max_rows: int = BLOCK, edges: Edges | None = None) -> npt.NDArray[np.bool_]:
    """Return for each token whether it is the last one of its block, bool [n].

    Args:
      layout: layout of the prompt and of tokens generated after it.
      prompt: number of tokens of the prompt.
      max_rows: largest number of tokens of a step; a block has at most as many.
      edges: tokens of linked images that are computed. Images have the same blocks whether they are linked or not.
    """
    size = min(BLOCK, max_rows)
    is_end = np.zeros(len(layout), bool)
    is_end[size - 1 :: size] = True
    is_end[[span.stop - 1 for span in layout.images]] = True
    is_end[[start - 1 for start in layout.turns if start]] = True
    if edges is not None:
        inner = [edges.inner(span) for span in layout.images]
        is_end[[place - 1 for run in inner if len(run) for place in (run.start, run.stop)]] = True
    is_end[max(prompt - 2, 0) :] = True
    return is_end


def whole_blocks(is_end: npt.NDArray[np.bool_], count: int) -> int:
    """Return how many of the next tokens a step of up to `count` tokens takes: whole blocks, and at least one.

    Args:
      is_end: of the next tokens, whether they end a block.
    """
    ends = np.flatnonzero(is_end[:count])
    return int(ends[-1] if len(ends) else np.argmax(is_end)) + 1


class PromptStates(NamedTuple):
    """States that a prefill reads and writes.

    Attributes:
      slot: slot of the states of its sequence.
      first: index of its first token.
      source: slot of the states before that token; 0 if there are no tokens before it.
      copies: slots that receive a copy of the states, by the number of the prompt's tokens before it.
      loads: slots that the states after linked images are loaded into, by the number of tokens up to their end.
      stores: by the same number, the slots of what is stored with images. The states after them are among the copies.
      made: maps of images that are computed, to be saved.
      linked: maps of images that are linked.
    """

    slot: int
    first: int = 0
    source: int = 0
    copies: Mapping[int, Sequence[int]] = MappingProxyType({})
    loads: Mapping[int, int] = MappingProxyType({})
    stores: Mapping[int, EntrySlots] = MappingProxyType({})
    made: Sequence[MapSlots] = ()
    linked: Sequence[MapSlots] = ()

    def loaded(self, end: int) -> EntrySlots:
        """Return the slots that the states after a linked image, or its map, are loaded into.

        Args:
          end: number of tokens up to the end of the image.
        """
        maps = [(one.added, one.passed) for one in self.linked if one.end == end]
        return EntrySlots(self.loads.get(end, 0), *(maps[0] if maps else ()))

    def before(self, place: int) -> int | None:
        """Return the slot of the states from which a block after the first `place` tokens continues.

        None: the block follows another one of the same prompt.
        """
        return self.source if place == self.first else self.loads.get(place)


NO_STATES = PromptStates(0)


def make_runs(
    owner: Index, index: Index, is_end: npt.NDArray[np.bool_], states: Sequence[PromptStates],
    order: npt.NDArray[np.int64],
) -> Runs:  # fmt: skip
    """Return the runs of a step.

    Args:
      owner, index: of the step's tokens in the order of the prompts, the number of the prompt and the token's index in
        it, [N].
      is_end: whether a token ends a block, [N].
      states: of each prompt.
      order: of the step's rows, their index in the order of the prompts, [N].
    """
    ends = np.flatnonzero(is_end)
    starts = np.append(0, ends[:-1] + 1)
    blocks: list[tuple[int, ...]] = []  # start, length, source, target, kind, tail, factor
    for begin, end in zip(starts.tolist(), ends.tolist(), strict=True):
        first, last = int(index[begin]), int(index[end])
        own = states[int(owner[begin])]
        if (source := own.before(first)) is not None:
            blocks += [_block(begin, 0, source, target) for target in own.copies.get(first, ())]
        for one in own.linked:
            if one.inner.stop == first:
                blocks.append((begin, 0, own.slot, own.slot, BlockKind.LINK, one.added, one.passed))
        before, count = own.slot if source is None else source, end + 1 - begin
        for one in own.made:
            if first in one.inner:
                for slot, kind in ((one.added, BlockKind.ADDED), (one.passed, BlockKind.PASSED)):
                    blocks.append((begin, count, slot if first > one.inner.start else 0, slot, kind, before, 0))
        blocks.append(_block(begin, count, before, own.slot))
        blocks += [_block(end + 1, 0, own.slot, target) for target in own.copies.get(last + 1, ())]
    start, length, source, target, *kinds = np.array(blocks, np.int32).T
    return Runs(order.astype(np.int32), start, length, source, target, len(blocks), *kinds)


def _block(start: int, length: int, source: int, target: int) -> tuple[int, ...]:
    """Return a block that computes tokens, or copies a state if it has none."""
    return start, length, source, target, BlockKind.COMPUTE, source, 0
