"""Answers that go on with a part of their prompt's K, V: the pages that hold it, and what is told of it (host).

A page is of one layer of one answer, whichever. Who takes pages takes all that its answer can need, so that it always
comes to its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vlcache_jax.pallas_kernels import PAGE

Index = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Compression:
    """What an answer goes on with.

    Attributes:
      policy: what chose it.
      prompt_tokens: of the prompt, m.
      kept: tokens of these that each layer keeps, in each of its KV heads [L].
      sparsity: of each layer's attention [L]; None: the policy does not ask for it.
      bytes, bytes_full: of K, V of what is kept, and of the whole prompt. Memory is taken in pages, see `EngineStats`.
      seconds: on the device, to observe and to compact.
    """

    policy: str
    prompt_tokens: int
    kept: tuple[int, ...]
    sparsity: tuple[float, ...] | None
    bytes: int
    bytes_full: int
    seconds: float = 0.0

    @property
    def is_whole(self) -> bool:
        """Whether nothing is dropped."""
        return all(count == self.prompt_tokens for count in self.kept)


@dataclass(eq=False)
class CompressedLease:
    """The pages of a compressed prompt and its answer.

    Attributes:
      kept: tokens of the prompt that each layer keeps [L].
      tables: of each layer the pool's page of each of its logical pages.
    """

    kept: Index
    tables: list[Index] = field(default_factory=list)


class CompressedPages:
    """The pages of the pool, numbered from 1.

    Args:
      count: how many there are.

    Attributes:
      in_use: how many are leased.
    """

    def __init__(self, count: int):
        self.count = count
        self.reset()

    @property
    def in_use(self) -> int:
        return self.count - len(self._free)

    def reset(self) -> None:
        """All pages are free, as after the pool was lost; leases from before are of no use any more."""
        self._free = list(range(self.count, 0, -1))
        self._leases: set[CompressedLease] = set()

    def needed(self, counts: Sequence[int], more: int) -> int:
        """Pages of a prompt of which each layer keeps so many tokens, with room for `more` tokens behind them."""
        return sum(-(-(count + more) // PAGE) for count in counts)

    def take(self, counts: Sequence[int], more: int) -> CompressedLease | None:
        """These pages, if so many are free."""
        if self.needed(counts, more) > len(self._free):
            return None
        lease = CompressedLease(np.array(counts, np.int32))
        for count in counts:
            own = [self._free.pop() for _ in range(-(-(count + more) // PAGE))]
            lease.tables.append(np.array(own, np.int32))
        self._leases.add(lease)
        return lease

    def end(self, lease: CompressedLease) -> None:
        """Nobody needs these pages any more."""
        if lease in self._leases:
            self._leases.remove(lease)
            self._free += np.concatenate(lease.tables).tolist()
