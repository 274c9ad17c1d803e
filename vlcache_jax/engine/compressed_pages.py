"""Compressed outputs: the pages that hold the kept KV of their prompts, and their reports (host).

A page belongs to one layer of one output. An output takes pages for the kept tokens of its prompt, and more as it
grows. If none is left, an output is swapped out: others use its pages, and their content waits in host memory until
there is room. An output starts or returns only if afterwards every output with pages can fill one more page in each
layer. All outputs can thus generate at least that many tokens before one is swapped out again.
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
    """Part of a prompt's KV with which an output continues.

    Attributes:
      policy: name of the compression policy.
      prompt_tokens: number of tokens in the prompt, m.
      kept: number of tokens that each KV head of each layer keeps [L].
      sparsity: sparsity of each layer's attention [L]; None if the policy does not need it.
      bytes, bytes_full: bytes of the kept KV, and of the full prompt's KV. Memory is allocated in pages, see
        `EngineStats`.
      seconds: device time to observe and to compact, in seconds.
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
        """True if nothing is dropped."""
        return all(count == self.prompt_tokens for count in self.kept)


@dataclass(eq=False)
class CompressedBlockTable:
    """Pages of a compressed prompt and its output.

    Attributes:
      kept: number of prompt tokens that each layer keeps, int32 [L].
      tables: for each layer the pool's page of each logical page; while swapped out, the pages that it had.
      max_pages: largest number of pages that it can have.
      room: number of generated tokens for which all layers have pages.
      swapped: content of its pages while it is swapped out; otherwise None.
    """

    kept: Index
    tables: list[Index]
    max_pages: int
    room: int = 0
    swapped: list[npt.NDArray[Any]] | None = None

    @property
    def pages(self) -> Index:
        """Pages of all layers, concatenated, int32."""
        return np.concatenate(self.tables)

    @property
    def count(self) -> int:
        """Number of pages of all layers."""
        return sum(map(len, self.tables))

    def missing(self, more: int) -> list[int]:
        """Return how many pages each layer lacks for `more` generated tokens."""
        needed = -(-(self.kept + more) // PAGE)
        return [max(0, count - len(table)) for count, table in zip(needed.tolist(), self.tables, strict=True)]


class CompressedPages:
    """Pages of the pool for compressed prompts, numbered from 1.

    Args:
      count: number of pages.

    Attributes:
      in_use: number of pages that belong to outputs.
      swapped_bytes: host memory that swapped-out outputs take, in bytes.
    """

    def __init__(self, count: int):
        self.count = count
        self.reset()

    @property
    def in_use(self) -> int:
        return self.count - len(self._free)

    @property
    def swapped_bytes(self) -> int:
        return sum(part.nbytes for block_table in tuple(self._swapped) for part in block_table.swapped or ())

    def reset(self) -> None:
        """Free all pages after the pool was lost. Existing block tables become invalid."""
        self._free = list(range(self.count, 0, -1))
        self._block_tables: set[CompressedBlockTable] = set()
        self._swapped: set[CompressedBlockTable] = set()

    def needed(self, counts: abc.Sequence[int], more: int) -> int:
        """Return the number of pages, over all layers, for kept prompt tokens and generated tokens.

        Args:
          counts: number of kept prompt tokens in each layer.
          more: number of generated tokens.
        """
        return sum(-(-(count + more) // PAGE) for count in counts)

    def take(self, counts: abc.Sequence[int], max_tokens: int) -> CompressedBlockTable | None:
        """Return a block table with pages for the kept tokens; None if there is no room.

        Args:
          counts: number of kept tokens in each layer.
          max_tokens: largest number of generated tokens.
        """
        nothing = np.zeros(0, np.int32)
        block_table = CompressedBlockTable(
            np.array(counts, np.int32), [nothing] * len(counts), self.needed(counts, max_tokens)
        )
        return block_table if self._begin(block_table, block_table.missing(0)) else None

    def grow(self, block_tables: abc.Sequence[CompressedBlockTable], tokens: abc.Sequence[int]) -> bool:
        """Give block tables the pages for `tokens` generated tokens each.

        Returns:
          False, without any change, if there are not enough pages for all.
        """
        short = [
            (block_table, count)
            for block_table, count in zip(block_tables, tokens, strict=True)
            if count > block_table.room
        ]
        missing = [(block_table, block_table.missing(count)) for block_table, count in short]
        if sum(sum(counts) for _, counts in missing) > len(self._free):
            return False
        for block_table, counts in missing:
            self._add(block_table, counts)
        return True

    def swap_out(self, block_table: CompressedBlockTable, held: list[npt.NDArray[Any]]) -> None:
        """Release the pages of a block table.

        Args:
          block_table: the block table.
          held: content of its pages.
        """
        block_table.swapped = held
        self._block_tables.remove(block_table)
        self._swapped.add(block_table)
        self._free += block_table.pages.tolist()

    def bring_back(self, block_table: CompressedBlockTable) -> list[npt.NDArray[Any]] | None:
        """Give a swapped-out block table as many pages as it had; return their content, or None if there is no room."""
        had, held, nothing = block_table.tables, block_table.swapped, np.zeros(0, np.int32)
        block_table.tables = [nothing] * len(had)
        if not self._begin(block_table, list(map(len, had))):
            block_table.tables = had
            return None
        self._swapped.remove(block_table)
        block_table.swapped = None
        return held

    def end(self, block_table: CompressedBlockTable) -> None:
        """Release the pages of an ended output."""
        if block_table in self._block_tables:
            self._block_tables.remove(block_table)
            self._free += block_table.pages.tolist()
        self._swapped.discard(block_table)

    def _begin(self, block_table: CompressedBlockTable, counts: abc.Sequence[int]) -> bool:
        """Give a block table without pages `counts[l]` pages in each layer.

        Returns:
          False, without any change, unless every output could still grow by one page in each layer.
        """
        spare = sum(min(one.max_pages - one.count, len(one.kept)) for one in self._block_tables)
        needed = sum(counts) + min(block_table.max_pages - sum(counts), len(counts)) + spare
        if needed > len(self._free):
            return False
        self._block_tables.add(block_table)
        self._add(block_table, counts)
        return True

    def _add(self, block_table: CompressedBlockTable, counts: abc.Sequence[int]) -> None:
        for layer, count in enumerate(counts):
            if count:
                new = np.array([self._free.pop() for _ in range(count)], np.int32)
                block_table.tables[layer] = np.concatenate([block_table.tables[layer], new])
        block_table.room = min(
            PAGE * len(table) - kept for table, kept in zip(block_table.tables, block_table.kept.tolist(), strict=True)
        )
