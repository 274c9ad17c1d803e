"""What a decoder layer keeps of earlier tokens: K,V of each token in pages, or a state of each sequence.

A layer of full attention keeps K and V of every token. A layer of linear attention keeps a state of fixed size for each
running sequence, which each token changes. A family describes its states by name, shape and dtype, so that the pool,
the programs, the memory plan and the distribution over devices need not know what the states mean.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Any, NamedTuple

import numpy as np


@dataclasses.dataclass(frozen=True)
class StateArray:
    """An array of a sequence's state in a layer.

    Attributes:
      name: name within the layer.
      shape: shape. Several devices divide its first axis.
      dtype: dtype. None: that of the model.
      is_linear: True for matrices S that tokens change to A S + B, see `BlockKind`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype | None = None
    is_linear: bool = False

    @property
    def values(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    def nbytes(self, dtype: Any) -> int:
        """Return its bytes in a model of `dtype`."""
        return self.values * np.dtype(self.dtype or dtype).itemsize


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """A kind of decoder layer, by what it keeps of earlier tokens.

    Attributes:
      name: name of the kind in `layer_types` of `config.json`, and of its module in `decoder.MIXERS`.
      states: arrays of a sequence's state. Empty: the layer keeps K,V in pages.
    """

    name: str
    states: tuple[StateArray, ...] = ()

    @property
    def keeps_kv(self) -> bool:
        """True if the layer keeps K,V of each token in pages."""
        return not self.states

    @property
    def state_values(self) -> int:
        """Number of values of a sequence's state; 0 for a layer with pages."""
        return sum(array.values for array in self.states)

    def sequence_bytes(self, dtype: Any) -> int:
        """Return the bytes of a sequence's state in a model of `dtype`; 0 for a layer with pages."""
        return sum(array.nbytes(dtype) for array in self.states)

    def part(self, count: int) -> LayerKind:
        """Return the part of each of `count` devices."""
        cut = (dataclasses.replace(one, shape=(one.shape[0] // count, *one.shape[1:])) for one in self.states)
        return dataclasses.replace(self, states=tuple(cut))


FULL_ATTENTION = LayerKind("full_attention")


@dataclasses.dataclass(frozen=True)
class LinearAttentionConfig:
    """The sizes of linear attention (Gated DeltaNet).

    Attributes:
      key_heads: heads of queries and keys, each of `key_width` values.
      value_heads: heads of values, a multiple of `key_heads`, each of `value_width` values.
      taps: number of tokens that the convolution sees, with the present one.
    """

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    taps: int

    @property
    def group(self) -> int:
        """Number of value heads of each key head."""
        return self.value_heads // self.key_heads


BLOCK = 64  # largest number of tokens that a layer with a state computes together


class Runs(NamedTuple):
    """The order in which the rows of a prefill step change the states of their sequences.

    The tokens of a prompt are cut into blocks of at most `BLOCK` tokens, at places that the prompt alone decides. A
    step computes whole blocks, one after the other, each with arrays of one shape. So a result does not depend on how
    a prompt is cut into steps, nor on the other prompts of a step.

    Attributes:
      place: [N] int32, index of each row in an order in which the rows of a prompt follow each other.
      start, length: [B] int32, first index and number of tokens of each block in that order. A block without tokens
        copies a state.
      source, target: [B] int32, slots of the states that each block reads and writes. Slot 0 is zero.
      count: [] int32, number of blocks. The others are padding.
      kind: [B] int32, what a block does, see `BlockKind`; None: all of them compute.
      tail: [B] int32, slot of what comes before a block in other arrays than the one that maps change; None: `source`.
      factor: [B] int32, slot of A for blocks of kind `LINK`; None if there are none.
    """

    place: Any
    start: Any
    length: Any
    source: Any
    target: Any
    count: Any
    kind: Any = None
    tail: Any = None
    factor: Any = None


class BlockKind(enum.IntEnum):
    """The kinds of blocks, which do different things with a state S that changes linearly.

    For fixed inputs, the tokens of an image change S to A S + B, whatever stands before them.

    Attributes:
      COMPUTE: compute the outputs of its tokens and the state after them.
      ADDED: compute B for its tokens after those of `source`; slot 0 is no tokens.
      PASSED: compute A for its tokens after those of `source`; slot 0 is no tokens.
      LINK: change the state of `source` to A S + B, with A in the slot `factor` and B in the slot `tail`.
    """

    COMPUTE = 0
    ADDED = 1
    PASSED = 2
    LINK = 3


class TokenStates(NamedTuple):
    """The states of a decode step, in which each row is the only row of its sequence.

    Attributes:
      source, target: [N] int32, slots of the states that each row reads and writes. A row that has ended reads slot 0,
        and its target is out of range and distinct, so that its state is dropped.
    """

    source: Any
    target: Any
