"""Which slots of a request are computed, and through how many layers (host, numpy).

Full prefill is the plan in which every row stays to the last layer. Reuse is a plan with smaller depths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vlcache_jax.inputs.layout import Layout


@dataclass(frozen=True, eq=False)
class Plan:
    """What is computed of a request of n tokens, and where it is put.

    Attributes:
      depth: int16 [n]: in how many layers a token's K, V are fresh; num_layers + 1 = its logits are wanted too.
      slot: int32 [n], where a token's K, V stand among the request's slots; None is in the order of the prompt. A
        computed row sees the slots before its own.
      shift: whether tokens of approximate images that are not computed are moved by what those that are computed
        differ from what was linked (`vlcache_jax.reuse.shift`).
    """

    depth: npt.NDArray[np.int16]
    slot: npt.NDArray[np.int32] | None = None
    shift: bool = False

    @property
    def slots(self) -> npt.NDArray[np.int32]:
        """`slot`, never None."""
        return np.arange(len(self.depth), dtype=np.int32) if self.slot is None else self.slot

    def wanting(self, tokens: Sequence[int], num_layers: int) -> Plan:
        """The same plan, but with the logits of `tokens`, and of no others."""
        depth = np.minimum(self.depth, num_layers).astype(np.int16)
        depth[list(tokens)] = num_layers + 1
        return dataclasses.replace(self, depth=depth)

    def extended(self, count: int, num_layers: int) -> Plan:
        """The same plan for a prompt with `count` more tokens, which are computed in every layer."""
        size = len(self.depth)
        more = np.arange(size, size + count, dtype=np.int32)
        slot = None if self.slot is None else np.concatenate([self.slot, more])
        return Plan(np.concatenate([self.depth, np.full(count, num_layers, np.int16)]), slot, self.shift)

    def computing(self, tokens: slice, num_layers: int) -> Plan:
        """The plan if `tokens` have to be computed in every layer, and so in the order of the prompt."""
        depth = self.depth.copy()
        depth[tokens] = np.maximum(depth[tokens], num_layers)
        return Plan(depth, shift=self.shift)

    def behind(self, count: int) -> Plan:
        """The same plan if the first `count` tokens need not be computed."""
        depth = self.depth.copy()
        depth[:count] = 0
        return dataclasses.replace(self, depth=depth)

    def rows(self, num_layers: int) -> tuple[int, ...]:
        """Active rows in each layer."""
        return active_rows(self.depth, num_layers)


def active_rows(depth: npt.NDArray[np.int16], num_layers: int) -> tuple[int, ...]:
    """How many of some tokens are active in each layer, by their depths; counted in one pass."""
    done = np.cumsum(np.bincount(depth, minlength=num_layers))[:num_layers]
    return tuple((len(depth) - done).tolist())


def full_prefill(layout: Layout, num_layers: int, wanted: Sequence[int] | None = None) -> Plan:
    """Every token in every layer, and logits of the tokens `wanted` (by default of the last one)."""
    depth = np.full(len(layout), num_layers, np.int16)
    depth[[-1] if wanted is None else list(wanted)] = num_layers + 1
    return Plan(depth)
