"""Blocks of tokens of layers with states, and the order in which the rows of a step change these states (host).

A prompt is cut into blocks of up to 64 tokens by its layout alone: at the ends of images, at the starts of messages, at
multiples of 64 tokens, and before its last token. Each generated token is a block. A step computes whole blocks. So the
same blocks are multiplied whether a prompt is computed in one step or in several, alone or with others, and after it
was preempted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from vlcache_jax.inputs.layout import Layout
from vlcache_jax.models.layer_kinds import BLOCK, Runs

Index = npt.NDArray[np.int32]


def block_ends(layout: Layout, prompt: int, size: int = BLOCK) -> npt.NDArray[np.bool_]:
    """Return for each token whether it is the last one of its block, bool [n].

    Args:
      layout: layout of the prompt and of tokens generated after it.
      prompt: number of tokens of the prompt.
      size: largest number of tokens of a block.
    """
    is_end = np.zeros(len(layout), bool)
    is_end[size - 1 :: size] = True
    is_end[[span.stop - 1 for span in layout.images]] = True
    is_end[[start - 1 for start in layout.turns if start]] = True
    is_end[max(prompt - 2, 0) :] = True
    return is_end


def whole_blocks(is_end: npt.NDArray[np.bool_], count: int) -> int:
    """Return how many of the next tokens a step of up to `count` tokens takes: whole blocks, and at least one.

    Args:
      is_end: of the next tokens, whether they end a block.
    """
    ends = np.flatnonzero(is_end[:count])
    return int(ends[-1] if len(ends) else np.argmax(is_end)) + 1


def make_runs(
    owner: Index, index: Index, is_end: npt.NDArray[np.bool_], slots: Sequence[int], forks: Mapping[int, Sequence[int]],
    prompts: Sequence[int], order: npt.NDArray[np.int64],
) -> Runs:  # fmt: skip
    """Return the runs of a step.

    Args:
      owner, index: of the step's tokens in the order of the prompts, the number of the prompt and the token's index in
        it, [N].
      is_end: whether a token ends a block, [N].
      slots: slot of the states of each prompt.
      forks: by prompt, slots that receive a copy of its states before its last token.
      prompts: number of tokens of each prompt.
      order: of the step's rows, their index in the order of the prompts, [N].
    """
    ends = np.flatnonzero(is_end)
    starts = np.append(0, ends[:-1] + 1)
    blocks = []  # start, length, source, target
    for begin, end in zip(starts.tolist(), ends.tolist(), strict=True):
        number, first, last = int(owner[begin]), int(index[begin]), int(index[end])
        slot = slots[number]
        blocks.append((begin, end + 1 - begin, slot if first else 0, slot))
        if last == prompts[number] - 2:
            blocks += [(end + 1, 0, slot, fork) for fork in forks.get(number, ())]
    start, length, source, target = np.array(blocks, np.int32).T
    return Runs(order.astype(np.int32), start, length, source, target, len(blocks))
