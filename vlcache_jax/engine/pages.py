"""Pages of the KV pool: who uses which, what their tokens are, and who else can use them (host, numpy).

A request holds a *lease*: a table of pages that grows with it. Pages whose tokens are known stay in a tree when their
lease ends: a page's children are the pages that followed it in some request, told apart by their tokens, with the
images' entry keys in place of placeholders. Under each salt there is a tree of its own. So the way from the root to a
page says everything that its K, V depend on, and whoever begins alike goes down the tree: whole pages are shared, and
of the next one what is alike is copied. Nothing is taken for the same by a hash: tokens and keys are compared.

Pages that no lease needs are *residents*. When their memory is needed, the least recently used leave first.
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
_MOST_ALIKE = 1024  # pages among which the eldest is looked for


class PlacedImage(NamedTuple):
    """An image among tokens: where it begins, counted from the first token at hand, its entry key, its grid, and its
    time in a video (`vlcache_jax.inputs.layout.Moment`)."""

    start: int
    key: str
    grid: Grid
    time: int = 0


class Piece(NamedTuple):
    """What the tokens of a page are: eight bytes each, which sort as they compare, and the images that they show."""

    ids: bytes
    images: tuple[PlacedImage, ...]

    @property
    def length(self) -> int:
        return len(self.ids) // 8

    def common(self, other: Piece) -> int:
        """How many tokens at their beginning are the same."""
        size = min(len(self.ids), len(other.ids))
        mine, its = (np.frombuffer(piece.ids, np.uint8, size) for piece in (self, other))
        differ = mine != its
        count = int(np.argmax(differ)) // 8 if differ.any() else size // 8
        # Of a placeholder the eight bytes hold a part of its image's key; here is the whole of it.
        for one, two in zip(self.images, other.images, strict=False):
            if one != two:
                count = min(count, max(0, min(one.start, two.start)))
        return count


@dataclass(frozen=True, eq=False)
class Chain:
    """What the tokens of a request are.

    Attributes:
      owner: digest of the salt that it came under.
      ids: see `Piece`.
      images: in order, each with its number of tokens.
    """

    owner: str
    ids: bytes
    images: tuple[tuple[PlacedImage, int], ...]

    @classmethod
    def of(cls, owner: str, token_ids: npt.NDArray[np.int32], images: Sequence[tuple[PlacedImage, int]] = ()) -> Chain:
        """That of expanded `token_ids` [n]."""
        ids = token_ids.astype(">u8")
        for picture, length in images:
            digest = hashlib.sha256(picture.key.encode()).digest()
            ids[picture.start : picture.start + length] = _IMAGE | int.from_bytes(digest[:7])
        return cls(owner, ids.tobytes(), tuple(images))

    def __len__(self) -> int:
        return len(self.ids) // 8

    def extended(self, token_ids: Sequence[int]) -> Chain:
        """The same with generated tokens after it."""
        return dataclasses.replace(self, ids=self.ids + np.asarray(token_ids, np.int32).astype(">u8").tobytes())

    def piece(self, first: int, last: int) -> Piece:
        """Tokens `first` to `last`."""
        place = bisect.bisect_right(self._ends, first)
        images = []
        for picture, _ in self.images[place:]:
            if picture.start >= last:
                break
            images.append(picture._replace(start=picture.start - first))
        return Piece(self.ids[8 * first : 8 * last], tuple(images))

    @functools.cached_property
    def _ends(self) -> list[int]:
        return [picture.start + length for picture, length in self.images]


_NOTHING = Piece(b"", ())


@dataclass(eq=False)
class _Page:
    """A page of the pool, or the root of a tree.

    Attributes:
      number: in the pool.
      uses: of how many leases, one that is to copy it included.
      parent: in the tree; None: nobody can find it.
      piece: what it holds, if it is in a tree.
      children: by their tokens.
      maker: the lease that is to compute it and is not proven yet; None: it is there.
      since: when it came into the tree.
    """

    number: int
    uses: int = 0
    parent: _Page | None = None
    piece: Piece = _NOTHING
    children: list[_Page] = field(default_factory=list)
    maker: Lease | None = None
    since: int = 0


@dataclass(eq=False)
class Lease:
    """The pages of a request.

    Attributes:
      shared: how many of its pages, the first ones, it has from others; it never writes into them.
      cached: tokens at its beginning that need not be computed.
      copy: pages (from, to) of which the first is to be copied before anything is computed; None: none is.
      sources: leases on whose pages it counts, and which were not proven when it was taken.
      is_computed: what it was to compute has been launched, so that whoever is launched later finds it.
      is_proven: its results have been seen, and are good.
      is_ended: nobody holds it any more.
      is_fork: whether it began with all of another one's prompt.
      table: the pool's page of each of its logical pages.
      pages: these, as `Pages` knows them.
      original: the page to be copied, until what the lease is to compute has been launched.
      era: of `Pages`, when it was taken.
    """

    shared: int = 0
    cached: int = 0
    copy: tuple[int, int] | None = None
    sources: list[Lease] = field(default_factory=list)
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
        """Whether all is there on which it counts."""
        return all(source.is_computed for source in self.sources)

    @property
    def is_lost(self) -> bool:
        """Whether something on which it counts will never be there, or is no good."""
        return any(source.is_ended and not source.is_proven for source in self.sources)

    def add(self, pages: Sequence[_Page]) -> None:
        """More of them."""
        self.pages += pages
        self.table = np.array([page.number for page in self.pages], np.int32)


@dataclass(frozen=True)
class PageStats:
    """What the KV pool's pages hold now, and counters since the engine began.

    Attributes:
      pages: that requests can use, of 128 tokens each.
      in_use: pages of requests that run.
      resident: pages that stay for requests to come; their memory is free to whoever needs it.
      hits: requests that found some of their tokens in pages.
      hit_tokens: how many these were.
      copies: pages that were copied, as a request went on from the middle of them.
      evictions: residents that had to make room.
      preemptions: requests that were put back for want of pages, and went on later.
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
    """The pages of a pool; those in front of the first are nobody's. Every method may be called from any thread.

    Args:
      count: of pages.
      size: tokens of a page.
      first: number of the first one.
    """

    def __init__(self, count: int, size: int = PAGE, first: int = 1):
        self.count, self.size, self._first = count, size, first
        self._lock = threading.RLock()
        self._hits = self._hit_tokens = self._copies = self._evictions = self._preemptions = 0
        # How often everything, and how often something, was forgotten: what a lease from before holds is not kept.
        self._era = (0, 0)
        self._clock = 0
        self.reset()

    def reset(self) -> None:
        """All pages are free, as after the pool was lost; leases from before are of no use any more."""
        with self._lock:
            self._era = (self._era[0] + 1, 0)
            self._all = [_Page(number) for number in range(self._first, self._first + self.count)]
            self._free = [(page.number, page) for page in self._all]
            self._residents: OrderedDict[_Page, None] = OrderedDict()  # the least recently used first
            self._roots: dict[str, _Page] = {}

    # Leases.

    def take(
        self,
        length: int,
        chain: Chain | None = None,
        *,
        most: int = 0,
        keep: int = 0,
        usable: int | None = None,
        spare: int = 0,
    ) -> Lease | None:
        """A lease of pages for `length` tokens.

        Args:
          chain: what the first tokens are; None: nothing is found, nor can anybody find it.
          most: tokens at most that may count as cached.
          keep: how many tokens of the chain will have exact K, V, so that others can use them.
          usable: how many of the tokens found can be used; None: all.
          spare: pages that must be left.

        Returns:
          None if there are not enough pages.
        """
        with self._lock:
            way, found = self._find(chain) if chain is not None else ([], 0)
            found = found if usable is None else min(found, usable)
            shared, cached = found // self.size, min(found, most)
            lease = Lease(shared=shared, cached=cached, era=self._era)
            source = way[shared] if cached > shared * self.size else None
            if not self._fill(lease, way[:shared], source, length, spare):
                if source is None:
                    return None
                lease.cached = shared * self.size  # the page to be copied may be the one that is missing
                if not self._fill(lease, way[:shared], None, length, spare):
                    return None
            if chain is not None:
                self._keep(lease, chain, keep, lease)
            return lease

    def fork(self, origin: Lease, prompt: int, length: int, *, spare: int = 0) -> Lease | None:
        """A lease that begins with all `prompt` tokens of another one, whatever they are; see `take`."""
        with self._lock:
            shared = prompt // self.size
            lease = Lease(shared=shared, cached=prompt - 1, is_fork=True, era=origin.era)
            source = origin.pages[shared] if prompt % self.size > 1 else None
            if not self._fill(lease, origin.pages[:shared], source, length, spare):
                return None
            if not origin.is_proven and origin not in lease.sources:
                lease.sources.append(origin)
            return lease

    def grow(self, leases: Sequence[Lease], lengths: Sequence[int]) -> bool:
        """Lets each lease hold so many tokens; False, and nothing changes, if there are not enough pages for all."""
        with self._lock:
            missing = [
                max(0, -(-length // self.size) - len(lease.pages))
                for lease, length in zip(leases, lengths, strict=True)
            ]
            if sum(missing) > self._available:
                return False
            for lease, count in zip(leases, missing, strict=True):
                if count:
                    lease.add([self._new() for _ in range(count)])
            return True

    def computed(self, lease: Lease) -> None:
        """What the lease was to compute has been launched."""
        with self._lock:
            lease.is_computed = True
            self._forget_original(lease)

    def proven(self, lease: Lease) -> None:
        """What the lease was to compute is there, and is good."""
        with self._lock:
            lease.is_proven = True
            for page in lease.pages:
                if page.maker is lease:
                    page.maker = None

    def end(self, lease: Lease, chain: Chain | None = None, *, failed: bool = False) -> None:
        """Ends a lease. What it was to compute and is not proven, nobody finds any more.

        Args:
          chain: what its tokens are, those generated included, all with exact K, V; None: nothing more is kept.
          failed: nothing of what it computed is kept.
        """
        with self._lock:
            lease.is_ended = True
            if lease.era[0] != self._era[0]:
                return
            if chain is not None and lease.is_proven and lease.era == self._era:
                self._keep(lease, chain, len(chain), None)
            for page in lease.pages[lease.shared :]:
                if failed or page.maker is lease:
                    self._cut_off(page)
            self._forget_original(lease)
            for page in reversed(lease.pages):  # the first pages of a chain stay longest
                self._release(page)
            lease.pages = []

    # Residents.

    def drop(self, key: str) -> int:
        """Forgets every page in which the image of this entry key is shown, and all behind them; returns how many."""
        with self._lock:
            self._era = (self._era[0], self._era[1] + 1)
            known = (page for page in self._all if page.parent is not None)
            tops = [page for page in known if any(image.key == key for image in page.piece.images)]
            return sum(self._cut_off(page) for page in tops)

    def clear(self) -> int:
        """Forgets what every page holds; returns how many were known."""
        with self._lock:
            self._era = (self._era[0], self._era[1] + 1)
            return sum(self._cut_off(page) for root in [*self._roots.values()] for page in [*root.children])

    def count_hit(self, lease: Lease) -> None:
        """Enters what a request found in the counters."""
        with self._lock:
            self._hits += lease.cached > 0
            self._hit_tokens += lease.cached

    def count_preemption(self) -> None:
        """Enters a request that gives its pages up and goes on later in the counters."""
        with self._lock:
            self._preemptions += 1

    def stats(self) -> PageStats:
        """What the pages hold now, and counters."""
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
        """The pages that hold the beginning of a chain, the last one perhaps in part, and how many tokens these are."""
        way: list[_Page] = []
        node = self._roots.get(chain.owner)
        done = 0
        while node is not None and done < len(chain):
            piece = chain.piece(done, min(done + self.size, len(chain)))
            parent, (node, common) = node, _closest(node, piece)
            if node is not None and common < piece.length:
                node, common = _eldest(parent, piece, node, common, self.size // 4)
            # Of a page in the middle of which the prompts part, a little is quicker computed than copied.
            if node is None or not (common in (node.piece.length, piece.length) or 4 * common > self.size):
                break
            way.append(node)
            done += common
            if common < self.size:
                break
        return way, done

    def _keep(self, lease: Lease, chain: Chain, count: int, maker: Lease | None) -> None:
        """Lets a lease's pages be found by the first `count` tokens of its chain.

        Where others hold the same already, theirs are found.
        """
        if count < len(chain):
            count -= count % self.size  # a page that holds something else, too, is not found
        node = self._root(chain.owner)
        for number, page in enumerate(lease.pages[: -(-count // self.size)]):
            piece = chain.piece(number * self.size, min((number + 1) * self.size, count))
            closest, common = _closest(node, piece)
            if closest is not None and common == piece.length:
                if closest is not page and number >= lease.shared:
                    self._cut_off(page)
                node = closest
                continue
            if number < lease.shared:
                return  # what it began with is known no more
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
        """Residents that hold nothing but the beginning of a page are of no use beside it."""
        place = bisect.bisect_left(node.children, page.piece.ids, key=_ids)
        for other in reversed(node.children[:place]):
            if other.piece.common(page.piece) < other.piece.length:
                break
            if other in self._residents:
                self._cut_off(other)

    def _cut_off(self, page: _Page) -> int:
        """Takes a page and all behind it out of the tree; returns how many there were."""
        if page.parent is None:
            return 0
        page.parent.children.remove(page)
        behind = [page]
        for one in behind:  # chains may be longer than Python's stack
            behind += one.children
            one.parent, one.maker, one.children = None, None, []
            if one in self._residents:
                del self._residents[one]
                self._give_back(one)
        return len(behind)

    # Memory.

    @property
    def _available(self) -> int:
        return len(self._free) + len(self._residents)

    def _fill(self, lease: Lease, way: Sequence[_Page], source: _Page | None, length: int, spare: int) -> bool:
        """Gives a lease the pages that it shares and new ones for the rest."""
        needed = -(-length // self.size) - len(way)
        used = [*way, *([source] if source is not None else [])]
        if needed + spare > self._available - sum(page.uses == 0 for page in used):
            return False
        for page in used:
            self._use(page)
        lease.add([*way, *(self._new() for _ in range(needed))])
        if source is not None:
            lease.original, lease.copy = source, (source.number, lease.pages[len(way)].number)
            self._copies += 1
        lease.sources = list(dict.fromkeys(page.maker for page in used if page.maker is not None))
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

    def _forget_original(self, lease: Lease) -> None:
        if lease.original is not None and lease.era[0] == self._era[0]:
            self._release(lease.original)
        lease.original = None


def _ids(page: _Page) -> bytes:
    return page.piece.ids


def _closest(node: _Page, piece: Piece) -> tuple[_Page | None, int]:
    """The child that has most tokens in common with a piece, and how many: it is next to where the piece would be."""
    place = bisect.bisect_left(node.children, piece.ids, key=_ids)
    best, most = None, -1
    for child in node.children[max(0, place - 1) : place + 1]:
        common = child.piece.common(piece)
        if common > most:
            best, most = child, common
    return best, most


def _eldest(parent: _Page, piece: Piece, closest: _Page, common: int, less: int) -> tuple[_Page, int]:
    """The eldest of the pages that have up to `less` tokens less in common with a piece than the closest one has.

    Many prompts that differ in their last page then all copy the same one, instead of each that of the one before,
    for which it would have to wait.
    """
    least = common - less
    if least <= 0:
        return closest, common
    begin = piece.ids[: 8 * least]
    first = bisect.bisect_left(parent.children, begin, key=_ids)
    last = bisect.bisect_left(parent.children, begin + b"\xff", lo=first, key=_ids)
    alike = itertools.islice(parent.children, first, min(last, first + _MOST_ALIKE))
    eldest = min((*alike, closest), key=lambda page: page.since)
    count = eldest.piece.common(piece)
    return (eldest, count) if count >= least else (closest, common)
