"""Pages of the KV pool: the requests that use them, the tokens that they hold, and their reuse (host, numpy).

A request holds a *block table*, a table of pages that grows with it. When the block table ends, pages with known tokens
stay in a tree. The children of a page are the pages that followed it in some request, distinguished by their tokens,
with entry keys in place of image placeholders. Each salt has its own tree. The path from the root to a page therefore
determines its KV. A request with the same beginning follows the path: it shares full pages, and copies the equal part
of the next page. Tokens and keys are compared directly; equality never depends on a hash.

Pages that no block table needs are *residents*. When their memory is needed, the least recently used leave first.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import heapq
import itertools
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vlcache_jax.inputs.processor import Grid
from vlcache_jax.pallas_kernels import PAGE

_IMAGE = 1 << 63  # above every token id
_MAX_ALIKE = 1024  # most pages that are searched for the eldest


class PlacedImage(NamedTuple):
    """Image among tokens.

    Attributes:
      start: index of its first token, counted from the first token at hand.
      key: its entry key.
      grid: its grid of patches.
      time: its time in a video (`vlcache_jax.inputs.layout.Moment`).
    """

    start: int
    key: str
    grid: Grid
    time: int = 0


class Piece(NamedTuple):
    """Tokens of a page: eight bytes each, whose order is that of the tokens, and the images among them."""

    ids: bytes
    images: tuple[PlacedImage, ...]

    @property
    def length(self) -> int:
        """Number of tokens in the page."""
        return len(self.ids) // 8

    def common(self, other: Piece) -> int:
        """Return the number of equal tokens at the beginning of both."""
        size = min(len(self.ids), len(other.ids))
        mine, its = (np.frombuffer(piece.ids, np.uint8, size) for piece in (self, other))
        differ = mine != its
        count = int(np.argmax(differ)) // 8 if differ.any() else size // 8
        # The eight bytes of a placeholder hold a part of its image's key. This compares the full keys.
        for one, two in zip(self.images, other.images, strict=False):
            if one != two:
                count = min(count, max(0, min(one.start, two.start)))
        return count


@dataclass(frozen=True, eq=False)
class Chain:
    """Tokens of a request, as the tree compares them.

    Attributes:
      owner: digest of the request's salt.
      ids: tokens, see `Piece`.
      images: images in order, each with its number of tokens.
    """

    owner: str
    ids: bytes
    images: tuple[tuple[PlacedImage, int], ...]

    @classmethod
    def of(cls, owner: str, token_ids: npt.NDArray[np.int32], images: Sequence[tuple[PlacedImage, int]] = ()) -> Chain:
        """Return the identity of a prompt's pages: `token_ids`, int32 [n], with entry keys in place of image tokens."""
        ids = token_ids.astype(">u8")
        for image, length in images:
            digest = hashlib.sha256(image.key.encode()).digest()
            ids[image.start : image.start + length] = _IMAGE | int.from_bytes(digest[:7])
        return cls(owner, ids.tobytes(), tuple(images))

    def __len__(self) -> int:
        return len(self.ids) // 8

    def extended(self, token_ids: Sequence[int]) -> Chain:
        """Return the chain with generated tokens after it."""
        return dataclasses.replace(self, ids=self.ids + np.asarray(token_ids, np.int32).astype(">u8").tobytes())

    def piece(self, first: int, last: int) -> Piece:
        """Return tokens `first` to `last`."""
        place = bisect.bisect_right(self._ends, first)
        images = []
        for image, _ in self.images[place:]:
            if image.start >= last:
                break
            images.append(image._replace(start=image.start - first))
        return Piece(self.ids[8 * first : 8 * last], tuple(images))

    @functools.cached_property
    def _ends(self) -> list[int]:
        return [image.start + length for image, length in self.images]


_NOTHING = Piece(b"", ())


@dataclass(eq=False)
class _Page:
    """Page of the pool, or the root of a tree.

    Attributes:
      number: number in the pool.
      uses: number of block tables that use it, including one that is to copy it.
      parent: parent in the tree; None if no request can find it.
      piece: tokens that it holds, if it is in a tree.
      children: children, sorted by their tokens.
      maker: block table that is to compute it and is not proven yet; None if its KV is complete.
      since: logical time at which it entered the tree.
    """

    number: int
    uses: int = 0
    parent: _Page | None = None
    piece: Piece = _NOTHING
    children: list[_Page] = field(default_factory=list)
    maker: BlockTable | None = None
    since: int = 0


@dataclass(eq=False)
class BlockTable:
    """Pages of a request.

    Attributes:
      shared: number of leading pages that come from other requests; it never writes into them.
      cached: number of leading tokens that need not be computed.
      copy: pages (from, to) to copy before anything is computed; None if there are none.
      sources: unproven block tables whose pages it uses.
      is_begun: whether its prefill has begun.
      is_computed: whether its prefill was launched, so that later programs find the KV.
      is_proven: whether its results were read and are finite.
      is_ended: whether it was released.
      is_fork: whether it began with the full prompt of another block table.
      table: page of the pool for each logical page, int32 [B].
      pages: these pages as `Pages` objects.
      original: page to copy, until the prefill was launched.
      era: value of `Pages` when it was taken.
    """

    shared: int = 0
    cached: int = 0
    copy: tuple[int, int] | None = None
    sources: list[BlockTable] = field(default_factory=list)
    is_begun: bool = False
    is_computed: bool = False
    is_proven: bool = False
    is_ended: bool = False
    is_fork: bool = False
    table: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    pages: list[_Page] = field(default_factory=list)
    original: _Page | None = None
    era: tuple[int, int] = (0, 0)

    @property
    def is_ready(self) -> bool:
        """True if the prefills of all sources were launched."""
        return all(source.is_computed for source in self.sources)

    @property
    def is_lost(self) -> bool:
        """True if a source ended without valid KV."""
        return any(source.is_ended and not source.is_proven for source in self.sources)

    def add(self, pages: Sequence[_Page]) -> None:
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
      copies: pages copied because a request continued from the middle of them.
      evictions: residents evicted for new pages.
      preemptions: requests preempted because pages were short, and resumed later.
    """

    pages: int
    in_use: int = 0
    resident: int = 0
    hits: int = 0
    hit_tokens: int = 0
    copies: int = 0
    evictions: int = 0
    preemptions: int = 0


class Pages:
    """Pages of a KV pool. Pages before the first belong to no request. Every method may be called from any thread.

    Args:
      count: number of pages.
      size: tokens per page.
      first: number of the first page.
    """

    def __init__(self, count: int, size: int = PAGE, first: int = 1):
        self.count, self.size, self._first = count, size, first
        self._lock = threading.RLock()
        self._hits = self._hit_tokens = self._copies = self._evictions = self._preemptions = 0
        # Number of resets, and number of `drop` and `clear` calls since. Pages of older block tables are not kept.
        self._era = (0, 0)
        self._clock = 0
        self.reset()

    def reset(self) -> None:
        """Free all pages after the pool was lost. Existing block tables become invalid."""
        with self._lock:
            self._era = (self._era[0] + 1, 0)
            self._all = [_Page(number) for number in range(self._first, self._first + self.count)]
            self._free = [(page.number, page) for page in self._all]
            self._residents: OrderedDict[_Page, None] = OrderedDict()  # the least recently used first
            self._roots: dict[str, _Page] = {}

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
    ) -> BlockTable | None:
        """Return a block table for `length` tokens, or None if there are not enough pages.

        Args:
          chain: the first tokens; None if pages are neither shared nor kept.
          max_cached: largest number of tokens that may count as cached.
          keep: number of tokens of the chain that will have exact KV, so that other requests can share it.
          usable: largest number of found tokens that can be used; None (default) for all.
          spare: number of pages that must stay available.
        """
        with self._lock:
            way, found = self._find(chain) if chain is not None else ([], 0)
            found = found if usable is None else min(found, usable)
            shared, cached = found // self.size, min(found, max_cached)
            block_table = BlockTable(shared=shared, cached=cached, era=self._era)
            source = way[shared] if cached > shared * self.size else None
            if not self._fill(block_table, way[:shared], source, length, spare):
                if source is None:
                    return None
                block_table.cached = shared * self.size  # without the page to copy there may be enough pages
                if not self._fill(block_table, way[:shared], None, length, spare):
                    return None
            if chain is not None:
                self._keep(block_table, chain, keep, block_table)
            return block_table

    def fork(self, origin: BlockTable, prompt: int, length: int, *, spare: int = 0) -> BlockTable | None:
        """Return a block table that begins with all `prompt` tokens of `origin`, without comparing them; see `take`."""
        with self._lock:
            shared = prompt // self.size
            block_table = BlockTable(shared=shared, cached=prompt - 1, is_fork=True, era=origin.era)
            source = origin.pages[shared] if prompt % self.size > 1 else None
            if not self._fill(block_table, origin.pages[:shared], source, length, spare):
                return None
            if not origin.is_proven and origin not in block_table.sources:
                block_table.sources.append(origin)
            return block_table

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
            block_table.is_computed = True
            self._forget_original(block_table)

    def proven(self, block_table: BlockTable) -> None:
        """Note that the results of a block table were read and are valid."""
        with self._lock:
            block_table.is_proven = True
            for page in block_table.pages:
                if page.maker is block_table:
                    page.maker = None

    def end(self, block_table: BlockTable, chain: Chain | None = None, *, failed: bool = False) -> None:
        """End a block table. Unproven pages leave the tree.

        Args:
          chain: its tokens including generated ones, all with exact KV; None if nothing more is kept.
          failed: whether to discard everything that it computed.
        """
        with self._lock:
            block_table.is_ended = True
            if block_table.era[0] != self._era[0]:
                return
            if chain is not None and block_table.is_proven and block_table.era == self._era:
                self._keep(block_table, chain, len(chain), None)
            for page in block_table.pages[block_table.shared :]:
                if failed or page.maker is block_table:
                    self._cut_off(page)
            self._forget_original(block_table)
            for page in reversed(block_table.pages):  # the first pages of a chain are evicted last
                self._release(page)
            block_table.pages = []

    # Residents.

    def drop(self, key: str) -> int:
        """Forget the pages with tokens of the image with this entry key, and all after them; return how many."""
        with self._lock:
            self._era = (self._era[0], self._era[1] + 1)
            known = (page for page in self._all if page.parent is not None)
            tops = [page for page in known if any(image.key == key for image in page.piece.images)]
            return sum(self._cut_off(page) for page in tops)

    def clear(self) -> int:
        """Forget the content of all pages; return the number of forgotten pages."""
        with self._lock:
            self._era = (self._era[0], self._era[1] + 1)
            return sum(self._cut_off(page) for root in [*self._roots.values()] for page in [*root.children])

    def count_hit(self, block_table: BlockTable) -> None:
        """Count what a request found in pages."""
        with self._lock:
            self._hits += block_table.cached > 0
            self._hit_tokens += block_table.cached

    def count_preemption(self) -> None:
        """Count a request that was preempted."""
        with self._lock:
            self._preemptions += 1

    def stats(self) -> PageStats:
        """Return the current use and the counters."""
        with self._lock:
            return PageStats(
                pages=self.count,
                in_use=self.count - self._available,
                resident=len(self._residents),
                hits=self._hits,
                hit_tokens=self._hit_tokens,
                copies=self._copies,
                evictions=self._evictions,
                preemptions=self._preemptions,
            )

    # The tree.

    def _find(self, chain: Chain) -> tuple[list[_Page], int]:
        """Return the pages that hold the beginning of a chain, and the number of its tokens that they hold.

        The last page may hold only a part of its tokens.
        """
        way: list[_Page] = []
        node = self._roots.get(chain.owner)
        done = 0
        while node is not None and done < len(chain):
            piece = chain.piece(done, min(done + self.size, len(chain)))
            parent, (node, common) = node, _closest(node, piece)
            if node is not None and common < piece.length:
                node, common = _eldest(parent, piece, node, common, self.size // 4)
            # If the prompts differ early in a page, computing the equal part is faster than copying it.
            if node is None or not (common in (node.piece.length, piece.length) or 4 * common > self.size):
                break
            way.append(node)
            done += common
            if common < self.size:
                break
        return way, done

    def _keep(self, block_table: BlockTable, chain: Chain, count: int, maker: BlockTable | None) -> None:
        """Enter a block table's pages into the tree under the first `count` tokens of its chain.

        If another page holds the same tokens, that page stays in the tree instead.
        """
        if count < len(chain):
            count -= count % self.size  # a page that also holds inexact KV stays out of the tree
        node = self._root(chain.owner)
        for number, page in enumerate(block_table.pages[: -(-count // self.size)]):
            piece = chain.piece(number * self.size, min((number + 1) * self.size, count))
            closest, common = _closest(node, piece)
            if closest is not None and common == piece.length:
                if closest is not page and number >= block_table.shared:
                    self._cut_off(page)
                node = closest
                continue
            if number < block_table.shared:
                return  # its shared beginning has left the tree
            if page.parent is None:
                page.maker, page.since = maker, self._clock
                self._clock += 1
            else:
                page.parent.children.remove(page)
            page.parent, page.piece = node, piece
            bisect.insort(node.children, page, key=_ids)
            if maker is None:
                self._absorb(node, page)
            node = page

    def _root(self, owner: str) -> _Page:
        if owner not in self._roots:
            self._roots = {name: root for name, root in self._roots.items() if root.children}
        return self._roots.setdefault(owner, _Page(0))

    def _absorb(self, node: _Page, page: _Page) -> None:
        """Cut off residents that hold only the beginning of `page`, since it replaces them."""
        place = bisect.bisect_left(node.children, page.piece.ids, key=_ids)
        for other in reversed(node.children[:place]):
            if other.piece.common(page.piece) < other.piece.length:
                break
            if other in self._residents:
                self._cut_off(other)

    def _cut_off(self, page: _Page) -> int:
        """Remove a page and its descendants from the tree; return how many there were."""
        if page.parent is None:
            return 0
        page.parent.children.remove(page)
        subtree = [page]
        for one in subtree:  # no recursion: a chain may be longer than Python's stack
            subtree += one.children
            one.parent, one.maker, one.children = None, None, []
            if one in self._residents:
                del self._residents[one]
                self._give_back(one)
        return len(subtree)

    # Memory.

    @property
    def _available(self) -> int:
        return len(self._free) + len(self._residents)

    def _fill(
        self, block_table: BlockTable, way: Sequence[_Page], source: _Page | None, length: int, spare: int
    ) -> bool:
        """Give a block table its shared pages and new pages for the rest; return False if there are too few."""
        needed = -(-length // self.size) - len(way)
        used = [*way, *([source] if source is not None else [])]
        if needed + spare > self._available - sum(page.uses == 0 for page in used):
            return False
        for page in used:
            self._use(page)
        block_table.add([*way, *(self._new() for _ in range(needed))])
        if source is not None:
            block_table.original, block_table.copy = source, (source.number, block_table.pages[len(way)].number)
            self._copies += 1
        block_table.sources = list(dict.fromkeys(page.maker for page in used if page.maker is not None))
        return True

    def _use(self, page: _Page) -> None:
        page.uses += 1
        self._residents.pop(page, None)

    def _release(self, page: _Page) -> None:
        page.uses -= 1
        if page.uses == 0 and page.parent is not None:
            self._residents[page] = None
        elif page.uses == 0:
            self._give_back(page)

    def _give_back(self, page: _Page) -> None:
        heapq.heappush(self._free, (page.number, page))

    def _new(self) -> _Page:
        if not self._free:
            self._evictions += 1
            self._cut_off(next(iter(self._residents)))
        _, page = heapq.heappop(self._free)
        page.uses = 1
        return page

    def _forget_original(self, block_table: BlockTable) -> None:
        if block_table.original is not None and block_table.era[0] == self._era[0]:
            self._release(block_table.original)
        block_table.original = None


def _ids(page: _Page) -> bytes:
    return page.piece.ids


def _closest(node: _Page, piece: Piece) -> tuple[_Page | None, int]:
    """Return the child with most tokens in common with a piece, and their number.

    The child is next to the piece's place in the sorted children.
    """
    place = bisect.bisect_left(node.children, piece.ids, key=_ids)
    best, longest = None, -1
    for child in node.children[max(0, place - 1) : place + 1]:
        common = child.piece.common(piece)
        if common > longest:
            best, longest = child, common
    return best, longest


def _eldest(parent: _Page, piece: Piece, closest: _Page, common: int, less: int) -> tuple[_Page, int]:
    """Return the eldest page that has at most `less` fewer tokens in common with a piece than the closest page.

    Prompts that differ in their last page then all copy the same page. Otherwise each would copy, and wait for, the
    page of the one before.
    """
    min_common = common - less
    if min_common <= 0:
        return closest, common
    begin = piece.ids[: 8 * min_common]
    first = bisect.bisect_left(parent.children, begin, key=_ids)
    last = bisect.bisect_left(parent.children, begin + b"\xff", lo=first, key=_ids)
    alike = itertools.islice(parent.children, first, min(last, first + _MAX_ALIKE))
    eldest = min((*alike, closest), key=lambda page: page.since)
    count = eldest.piece.common(piece)
    return (eldest, count) if count >= min_common else (closest, common)
