"""Pages of the KV pool: the requests that use them, and their reuse (host, numpy).

A request holds a *block table*, a table of pages that grows with it. When the block table ends, pages with known tokens
stay in a tree (`page_tree`). A request with the same beginning shares full pages, and copies the equal part of the next
page. In a model with states it does so up to a snapshot (`snapshots`).

Pages that no block table needs are *residents*. When their memory is needed, the least recently used leave first.
"""

from __future__ import annotations

import heapq
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vlcache_jax.engine.page_tree import Chain, Match, Page, PageTree
from vlcache_jax.engine.snapshots import Places, Snapshot, StateNeeds, StateSlots
from vlcache_jax.pallas_kernels import PAGE


@dataclass(eq=False)
class BlockTable:
    """Pages of a request.

    Attributes:
      shared: number of leading pages that come from other requests; it never writes into them.
      cached: number of leading tokens that need not be computed.
      matched: number of leading tokens whose KV was in pages; more than `cached` where no snapshot of states is.
      copy: pages (from, to) to copy before anything is computed; None if there are none.
      sources: unproven block tables whose pages it uses.
      is_begun: whether its prefill has begun.
      is_computed: whether its prefill was launched, so that later programs find the KV.
      is_proven: whether its results were read and are finite.
      is_ended: whether it was released.
      origin: block table with whose full prompt it began; None if it is no fork.
      table: page of the pool for each logical page, int32 [B].
      pages: these pages as `Pages` objects.
      original: page to copy, until the prefill was launched.
      resumed: snapshot from which the prompt continues, until the prefill was launched.
      states: slots of states that its prefill needs.
      era: value of `Pages` when it was taken.
    """

    shared: int = 0
    cached: int = 0
    matched: int = 0
    copy: tuple[int, int] | None = None
    sources: list[BlockTable] = field(default_factory=list)
    is_begun: bool = False
    is_computed: bool = False
    is_proven: bool = False
    is_ended: bool = False
    origin: BlockTable | None = None
    table: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    pages: list[Page[BlockTable]] = field(default_factory=list)
    original: Page[BlockTable] | None = None
    resumed: Snapshot[BlockTable] | None = None
    states: StateNeeds[BlockTable] = field(default_factory=StateNeeds)
    era: tuple[int, int] = (0, 0)

    @property
    def is_fork(self) -> bool:
        """True if it began with the full prompt of another block table."""
        return self.origin is not None

    @property
    def is_ready(self) -> bool:
        """True if the prefills of all sources were launched."""
        return all(source.is_computed for source in self.sources)

    @property
    def is_lost(self) -> bool:
        """True if a source ended without valid KV."""
        return any(source.is_ended and not source.is_proven for source in self.sources)

    def add(self, pages: Sequence[Page[BlockTable]]) -> None:
        """Append pages to the table."""
        self.pages += pages
        self.table = np.array([page.number for page in self.pages], np.int32)


@dataclass(frozen=True)
class PageStats:
    """Current use of the KV pool's pages, and counters since the start of the engine.

    Attributes:
      pages: pages that requests can use, of 128 tokens each.
      in_use: pages of running requests.
      resident: pages kept for later requests; their memory counts as free.
      hits: requests that found some of their tokens in pages.
      hit_tokens: tokens found in pages.
      unresumed_tokens: tokens found in pages and computed again, because no snapshot of states was there.
      copies: pages copied because a request continued from the middle of them.
      evictions: residents evicted for new pages.
      preemptions: requests preempted because pages were short, and resumed later.
      max_snapshots, snapshots: largest and current number of snapshots of states.
      snapshot_evictions: snapshots evicted for others, or not taken because all others are worth more.
      snapshot_returns: evicted snapshots that returned from host memory.
    """

    pages: int
    in_use: int = 0
    resident: int = 0
    hits: int = 0
    hit_tokens: int = 0
    unresumed_tokens: int = 0
    copies: int = 0
    evictions: int = 0
    preemptions: int = 0
    max_snapshots: int = 0
    snapshots: int = 0
    snapshot_evictions: int = 0
    snapshot_returns: int = 0


class Pages:
    """Pages of a KV pool. Pages before the first belong to no request. Every method may be called from any thread.

    Args:
      count: number of pages.
      size: tokens per page.
      first: number of the first page.
      states: slots of states; None if the model has none.
    """

    def __init__(self, count: int, size: int = PAGE, first: int = 1, states: StateSlots[BlockTable] | None = None):
        self.count, self.size, self._first, self.states = count, size, first, states
        self._lock = threading.RLock()
        self._counts = dict.fromkeys(
            ("hits", "hit_tokens", "unresumed_tokens", "copies", "evictions", "preemptions"), 0
        )
        # Number of resets, and number of `drop` and `clear` calls since. Pages of older block tables are not kept.
        self._era = (0, 0)
        self._tree = PageTree[BlockTable](size, states)
        self.reset()

    def reset(self) -> None:
        """Free all pages after the pool was lost. Existing block tables become invalid."""
        with self._lock:
            self._era = (self._era[0] + 1, 0)
            self._tree.clear()
            if self.states is not None:
                self.states.take_moves()
            self._free = [(number, Page[BlockTable](number)) for number in range(self._first, self._first + self.count)]
            self._residents: OrderedDict[Page[BlockTable], None] = OrderedDict()  # the least recently used first

    # Block tables.

    def take(
        self,
        length: int,
        chain: Chain | None = None,
        *,
        max_cached: int = 0,
        keep: int = 0,
        usable: int | None = None,
        spare: int = 0,
        places: Places | None = None,
    ) -> BlockTable | None:
        """Return a block table for `length` tokens, or None if there are not enough pages.

        Args:
          chain: the first tokens; None if pages are neither shared nor kept.
          max_cached: largest number of tokens that may count as cached.
          keep: number of tokens of the chain that will have exact KV, so that other requests can share it.
          usable: largest number of found tokens that can be used; None (default) for all.
          spare: number of pages that must stay available.
          places: where a prompt of a model with states may continue, and takes snapshots.
        """
        with self._lock:
            limit, match = max_cached, Match[BlockTable]()
            while True:
                if chain is not None:
                    match = self._match(chain, limit, usable, places)
                shared, cached = match.length // self.size, min(match.length, limit)
                block_table = BlockTable(shared=shared, cached=cached, era=self._era)
                block_table.matched = min(match.matched, max_cached) if places is not None else cached
                source = match.path[shared] if cached > shared * self.size else None
                if self._fill(block_table, match.path[:shared], source, length, spare):
                    break
                if source is None:
                    return None
                limit = shared * self.size  # without the page to copy there may be enough pages
            if match.snapshot is not None:
                self._resume(block_table, match.snapshot)
            if chain is not None:
                self._enter(block_table, chain, keep, block_table)
            if chain is not None and places is not None:
                matched = block_table.matched
                block_table.states = self._tree.take_snapshots(chain, keep, places, block_table, cached, matched)
            return block_table

    def fork(self, origin: BlockTable, prompt: int, length: int, *, spare: int = 0) -> BlockTable | None:
        """Return a block table that begins with all `prompt` tokens of `origin`, without comparing them; see `take`."""
        with self._lock:
            shared = prompt // self.size
            block_table = BlockTable(shared, prompt - 1, prompt - 1, origin=origin, era=origin.era)
            source = origin.pages[shared] if prompt % self.size > 1 else None
            if not self._fill(block_table, origin.pages[:shared], source, length, spare):
                return None
            if not origin.is_proven and origin not in block_table.sources:
                block_table.sources.append(origin)
            return block_table

    def resume(self, chain: Chain, limit: int, places: Places) -> Snapshot[BlockTable] | None:
        """Return the last complete snapshot within `limit` tokens of a chain, in use until the caller leaves it."""
        with self._lock:
            found = self._tree.find_snapshot(chain, limit, places).snapshot
            if found is None or found.maker is not None or self.states is None:
                return None
            self.states.use(found)
            return found

    def grow(self, block_tables: Sequence[BlockTable], lengths: Sequence[int]) -> bool:
        """Give block tables pages for `lengths` tokens each; return False and change nothing if there are too few."""
        with self._lock:
            missing = [
                max(0, -(-length // self.size) - len(block_table.pages))
                for block_table, length in zip(block_tables, lengths, strict=True)
            ]
            if sum(missing) > self._available:
                return False
            for block_table, count in zip(block_tables, missing, strict=True):
                if count:
                    block_table.add([self._new() for _ in range(count)])
            return True

    def computed(self, block_table: BlockTable) -> None:
        """Note that the prefill of a block table was launched."""
        with self._lock:
            self._let_go(block_table)
            block_table.is_computed = True

    def proven(self, block_table: BlockTable) -> None:
        """Note that the results of a block table were read and are valid."""
        with self._lock:
            block_table.is_proven = True
            for page in block_table.pages:
                if page.maker is block_table:
                    page.maker = None
            for snapshot in block_table.states.snapshots:
                snapshot.maker = None

    def end(
        self,
        block_table: BlockTable,
        chain: Chain | None = None,
        *,
        failed: bool = False,
        slot: int | None = None,
        is_decoded: bool = False,
    ) -> bool:
        """End a block table. Unproven pages and snapshots leave the tree.

        Args:
          chain: its tokens including generated ones, all with exact KV; None if nothing more is kept.
          failed: whether to discard everything that it computed.
          slot: slot of the states after these tokens, which may become a snapshot.
          is_decoded: see `Snapshot`.

        Returns:
          Whether the slot became a snapshot, so that it no longer belongs to the sequence.
        """
        with self._lock:
            block_table.is_ended = True
            self._let_go(block_table)
            snapshot = None
            if chain is not None and block_table.is_proven and block_table.era == self._era:
                self._enter(block_table, chain, len(chain), None)
                if slot is not None:
                    snapshot = self._tree.add_snapshot(chain, len(chain), slot=slot, is_decoded=is_decoded)
            for made in block_table.states.snapshots:
                if self.states is not None and (failed or made.maker is block_table):
                    self.states.drop(made)
            if block_table.era[0] == self._era[0]:
                for page in block_table.pages[block_table.shared :]:
                    if failed or page.maker is block_table:
                        self._free_residents(self._tree.cut_off(page))
                for page in reversed(block_table.pages):  # the first pages of a chain are evicted last
                    self._release(page)
                block_table.pages = []
            return snapshot is not None

    # Residents.

    def drop(self, key: str) -> int:
        """Forget the pages with tokens of the image with this entry key, and all after them; return how many."""
        with self._lock:
            self._era = (self._era[0], self._era[1] + 1)
            return self._free_residents(self._tree.drop(key))

    def clear(self) -> int:
        """Forget the content of all pages; return the number of forgotten pages."""
        with self._lock:
            self._era = (self._era[0], self._era[1] + 1)
            return self._free_residents(self._tree.clear())

    def count_hit(self, block_table: BlockTable) -> None:
        """Count what a request found in pages."""
        with self._lock:
            self._counts["hits"] += block_table.cached > 0
            self._counts["hit_tokens"] += block_table.cached
            self._counts["unresumed_tokens"] += block_table.matched - block_table.cached

    def count_preemption(self) -> None:
        """Count a request that was preempted."""
        with self._lock:
            self._counts["preemptions"] += 1

    def stats(self) -> PageStats:
        """Return the current use and the counters."""
        with self._lock:
            states = StateSlots[BlockTable](0, 0) if self.states is None else self.states
            return PageStats(
                self.count, self.count - self._available, len(self._residents), **self._counts,
                max_snapshots=states.max_snapshots, snapshots=len(states), snapshot_evictions=states.evictions,
                snapshot_returns=states.returns,
            )  # fmt: skip

    # The tree.

    def _match(self, chain: Chain, limit: int, usable: int | None, places: Places | None) -> Match[BlockTable]:
        """Return the beginning of a chain that a prompt can use; see `take`."""
        if places is not None:
            return self._tree.find_snapshot(chain, limit if usable is None else min(limit, usable), places)
        found = self._tree.find(chain)
        return found if usable is None else found._replace(length=min(found.length, usable))

    def _resume(self, block_table: BlockTable, snapshot: Snapshot[BlockTable]) -> None:
        """Let a prompt continue from a snapshot, when it is there."""
        assert self.states is not None
        self.states.use(snapshot)
        block_table.resumed = snapshot
        if snapshot.maker is not None and snapshot.maker not in block_table.sources:
            block_table.sources.append(snapshot.maker)

    def _enter(self, block_table: BlockTable, chain: Chain, count: int, maker: BlockTable | None) -> None:
        """Enter pages into the tree, see `PageTree.keep`."""
        self._free_residents(self._tree.keep(block_table.pages, block_table.shared, chain, count, maker))

    def _free_residents(self, pages: Sequence[Page[BlockTable]]) -> int:
        """Free the unused ones of pages that have left the tree; return how many have left it."""
        for page in pages:
            if page in self._residents:
                del self._residents[page]
                self._give_back(page)
        return len(pages)

    # Memory.

    @property
    def _available(self) -> int:
        return len(self._free) + len(self._residents)

    def _fill(
        self,
        block_table: BlockTable,
        path: Sequence[Page[BlockTable]],
        source: Page[BlockTable] | None,
        length: int,
        spare: int,
    ) -> bool:
        """Give a block table its shared pages and new pages for the rest; return False if there are too few."""
        needed = -(-length // self.size) - len(path)
        used = [*path, *([source] if source is not None else [])]
        if needed + spare > self._available - sum(page.uses == 0 for page in used):
            return False
        for page in used:
            self._use(page)
        block_table.add([*path, *(self._new() for _ in range(needed))])
        if source is not None:
            block_table.original, block_table.copy = source, (source.number, block_table.pages[len(path)].number)
            self._counts["copies"] += 1
        block_table.sources = list(dict.fromkeys(page.maker for page in used if page.maker is not None))
        return True

    def _use(self, page: Page[BlockTable]) -> None:
        page.uses += 1
        self._residents.pop(page, None)

    def _release(self, page: Page[BlockTable]) -> None:
        page.uses -= 1
        if page.uses == 0 and page.parent is not None:
            self._residents[page] = None
        elif page.uses == 0:
            self._give_back(page)

    def _give_back(self, page: Page[BlockTable]) -> None:
        heapq.heappush(self._free, (page.number, page))

    def _new(self) -> Page[BlockTable]:
        if not self._free:
            self._counts["evictions"] += 1
            self._free_residents(self._tree.cut_off(next(iter(self._residents))))
        _, page = heapq.heappop(self._free)
        page.uses = 1
        return page

    def _let_go(self, block_table: BlockTable) -> None:
        """Release what the prefill of a block table reads and writes besides its pages, unless that was launched."""
        if block_table.original is not None and block_table.era[0] == self._era[0]:
            self._release(block_table.original)
        if self.states is not None and not block_table.is_computed:
            resumed = [block_table.resumed] if block_table.resumed else []
            for snapshot in [*block_table.states.snapshots, *block_table.states.alone, *resumed]:
                self.states.leave(snapshot)
        block_table.original = block_table.resumed = None
