"""Answers that go on with a part of their prompt's K, V: the pages that hold it, and what is told of it (host).

A page is of one layer of one answer, whichever. An answer takes pages for what is kept of its prompt, and more as it
grows. Where none is left, one is put aside: its pages are others', and what they held waits in host memory until there
is room for it again. None begins, or comes back, before each that has pages then can fill one more in each layer: so
many tokens all go on by at least, until one is put aside again.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import Any

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
      tables: of each layer the pool's page of each of its logical pages; while it is put aside, those that it had.
      most: pages that it has in the end at most.
      room: tokens behind the prompt's that all layers have pages for.
      aside: what its pages held, while it is put aside; None: it is not.
    """

    kept: Index
    tables: list[Index]
    most: int
    room: int = 0
    aside: list[npt.NDArray[Any]] | None = None

    @property
    def pages(self) -> Index:
        """Those of all layers."""
        return np.concatenate(self.tables)

    @property
    def count(self) -> int:
        """How many they are."""
        return sum(map(len, self.tables))

    def missing(self, more: int) -> list[int]:
        """Pages that each layer lacks for `more` tokens behind the prompt's."""
        needed = -(-(self.kept + more) // PAGE)
        return [max(0, count - len(table)) for count, table in zip(needed.tolist(), self.tables, strict=True)]


class CompressedPages:
    """The pages of the pool, numbered from 1.

    Args:
      count: how many there are.

    Attributes:
      in_use: how many are leased.
      aside_bytes: of host memory, in which is what those that are put aside had.
    """

    def __init__(self, count: int):
        self.count = count
        self.reset()

    @property
    def in_use(self) -> int:
        return self.count - len(self._free)

    @property
    def aside_bytes(self) -> int:
        return sum(part.nbytes for lease in tuple(self._aside) for part in lease.aside or ())

    def reset(self) -> None:
        """All pages are free, as after the pool was lost; leases from before are of no use any more."""
        self._free = list(range(self.count, 0, -1))
        self._leases: set[CompressedLease] = set()
        self._aside: set[CompressedLease] = set()

    def needed(self, counts: abc.Sequence[int], more: int) -> int:
        """Pages of a prompt of which each layer keeps so many tokens, with room for `more` tokens behind them."""
        return sum(-(-(count + more) // PAGE) for count in counts)

    def take(self, counts: abc.Sequence[int], most: int) -> CompressedLease | None:
        """Pages for these tokens of each layer, if there is room.

        Args:
          most: tokens behind them in the end.
        """
        nothing = np.zeros(0, np.int32)
        lease = CompressedLease(np.array(counts, np.int32), [nothing] * len(counts), self.needed(counts, most))
        return lease if self._begin(lease, lease.missing(0)) else None

    def grow(self, leases: abc.Sequence[CompressedLease], tokens: abc.Sequence[int]) -> bool:
        """Lets each lease hold so many tokens behind its prompt's; False, and nothing changes, if there are not enough
        pages for all."""
        short = [(lease, count) for lease, count in zip(leases, tokens, strict=True) if count > lease.room]
        missing = [(lease, lease.missing(count)) for lease, count in short]
        if sum(sum(counts) for _, counts in missing) > len(self._free):
            return False
        for lease, counts in missing:
            self._add(lease, counts)
        return True

    def put_aside(self, lease: CompressedLease, held: list[npt.NDArray[Any]]) -> None:
        """Takes its pages from a lease.

        Args:
          held: what they hold.
        """
        lease.aside = held
        self._leases.remove(lease)
        self._aside.add(lease)
        self._free += lease.pages.tolist()

    def bring_back(self, lease: CompressedLease) -> list[npt.NDArray[Any]] | None:
        """Gives it as many as it had, if there is room; returns what they held."""
        had, held, nothing = lease.tables, lease.aside, np.zeros(0, np.int32)
        lease.tables = [nothing] * len(had)
        if not self._begin(lease, list(map(len, had))):
            lease.tables = had
            return None
        self._aside.remove(lease)
        lease.aside = None
        return held

    def end(self, lease: CompressedLease) -> None:
        """Nobody needs these pages any more."""
        if lease in self._leases:
            self._leases.remove(lease)
            self._free += lease.pages.tolist()
        self._aside.discard(lease)

    def _begin(self, lease: CompressedLease, counts: abc.Sequence[int]) -> bool:
        """Gives a lease that has none so many pages in each layer, if after that everybody can grow by one in each."""
        spare = sum(min(one.most - one.count, len(one.kept)) for one in self._leases)
        needed = sum(counts) + min(lease.most - sum(counts), len(counts)) + spare
        if needed > len(self._free):
            return False
        self._leases.add(lease)
        self._add(lease, counts)
        return True

    def _add(self, lease: CompressedLease, counts: abc.Sequence[int]) -> None:
        for layer, count in enumerate(counts):
            if count:
                new = np.array([self._free.pop() for _ in range(count)], np.int32)
                lease.tables[layer] = np.concatenate([lease.tables[layer], new])
        lease.room = min(
            PAGE * len(table) - kept for table, kept in zip(lease.tables, lease.kept.tolist(), strict=True)
        )
