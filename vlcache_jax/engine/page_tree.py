"""Tree of the pages whose tokens are known (host, numpy).

The children of a page are the pages that followed it in some request, distinguished by their tokens, with entry keys in
place of image placeholders. Each salt has its own tree. The path from the root to a page therefore determines its KV.
Tokens and keys are compared directly; equality never depends on a hash. Snapshots of states are found on the same path.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vlcache_jax.engine.snapshots import MapSlots, Places, Snapshot, StateNeeds, StateSlots
from vlcache_jax.inputs.processor import Grid

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

    def has_image(self, key: str) -> bool:
        """Return whether some of its tokens are those of the image with this entry key."""
        return any(image.key == key for image in self.images)

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
class Page[Maker]:
    """Page of the pool, or the root of a tree.

    Attributes:
      number: number in the pool.
      uses: number of block tables that use it, including one that is to copy it.
      parent: parent in the tree; None if no request can find it.
      piece: tokens that it holds, if it is in a tree.
      children: children, sorted by their tokens.
      maker: block table that is to compute it and is not proven yet; None if its KV is complete.
      since: logical time at which it entered the tree.
      snapshots: snapshots of states among the tokens of the next page, each with these tokens up to it.
    """

    number: int
    uses: int = 0
    parent: Page[Maker] | None = None
    piece: Piece = _NOTHING
    children: list[Page[Maker]] = field(default_factory=list)
    maker: Maker | None = None
    since: int = 0
    snapshots: list[tuple[Piece, Snapshot[Maker]]] = field(default_factory=list)


class Match[Maker](NamedTuple):
    """Beginning of a chain that a prompt can use.

    Attributes:
      path: pages that hold its tokens; the last one may hold only a part of them.
      length: number of its tokens.
      matched: number of tokens whose KV is in pages. More than `length` where a prompt cannot continue after them.
      snapshot: states after these tokens; None if the model has none, or there are no tokens.
    """

    path: Sequence[Page[Maker]] = ()
    length: int = 0
    matched: int = 0
    snapshot: Snapshot[Maker] | None = None


class _Known[Maker](NamedTuple):
    """Page of a chain whose tokens, or the first of them, are in the tree.

    Attributes:
      start: number of the chain's tokens before it.
      piece: its tokens.
      parent, page: the page before it, and the page with most tokens in common.
      common: number of these tokens.
    """

    start: int
    piece: Piece
    parent: Page[Maker]
    page: Page[Maker]
    common: int


class PageTree[Maker]:
    """Pages with known tokens, by salt. The caller holds a lock.

    Args:
      size: tokens per page.
      states: slots of states; None if the model has none.
    """

    def __init__(self, size: int, states: StateSlots[Maker] | None = None):
        self._size, self._states = size, states
        self._roots: dict[str, Page[Maker]] = {}
        self._clock = 0

    # Searching.

    def find(self, chain: Chain) -> Match[Maker]:
        """Return the beginning of a chain whose KV is in pages."""
        path: list[Page[Maker]] = []
        done = 0
        for _, piece, parent, page, common in self._known(chain):
            if common < piece.length:
                page, common = _eldest(parent, piece, page, common, self._size // 4)
            # If the prompts differ early in a page, computing the equal part is faster than copying it.
            if not (common in (page.piece.length, piece.length) or 4 * common > self._size):
                break
            path.append(page)
            done += common
        return Match(path, done, done)

    def find_snapshot(self, chain: Chain, limit: int, places: Places) -> Match[Maker]:
        """Return the longest beginning of a chain after which there is a snapshot, of at most `limit` tokens.

        Args:
          places: where a prompt with this chain may continue.
        """
        states = self._states
        assert states is not None
        path: list[Page[Maker]] = []
        usable: list[Snapshot[Maker]] = []
        matched = 0
        for known in self._known(chain):
            path.append(known.page)
            matched += known.common
            snapshots = (one for one in self._snapshots(known) if one.place <= limit and states.can_use(one))
            usable += (one for one in snapshots if places.allows(one.place, one.is_decoded))
        last = max(usable, key=lambda one: one.place, default=None)
        length = 0 if last is None else last.place
        return Match(path[: -(-length // self._size)], length, matched, last)

    def _known(self, chain: Chain) -> Iterator[_Known[Maker]]:
        """Yield the pages of a chain that are in the tree; the last one may have only its first tokens in common."""
        node = self._roots.get(chain.owner)
        for start in range(0, len(chain), self._size):
            piece = chain.piece(start, min(start + self._size, len(chain)))
            page, common = (None, 0) if node is None else _closest(node, piece)
            if node is None or page is None or not common:
                return
            yield _Known(start, piece, node, page, common)
            if common < self._size:
                return
            node = page

    # Changes. Each returns the pages that have left the tree.

    def keep(
        self, pages: Sequence[Page[Maker]], shared: int, chain: Chain, count: int, maker: Maker | None
    ) -> list[Page[Maker]]:
        """Enter pages under the first `count` tokens of a chain.

        If another page holds the same tokens, that page stays in the tree instead.

        Args:
          pages: pages of these tokens, of which the first `shared` come from other requests.
          maker: see `Page`.
        """
        left: list[Page[Maker]] = []
        if count < len(chain):
            count -= count % self._size  # a page that also holds inexact KV stays out of the tree
        node = self._root(chain.owner)
        for number, page in enumerate(pages[: -(-count // self._size)]):
            piece = chain.piece(number * self._size, min((number + 1) * self._size, count))
            closest, common = _closest(node, piece)
            if closest is not None and common == piece.length:
                if closest is not page and number >= shared:
                    left += self.cut_off(page)
                node = closest
                continue
            if number < shared:
                break  # its shared beginning has left the tree
            if page.parent is None:
                page.maker, page.since = maker, self._clock
                self._clock += 1
            else:
                page.parent.children.remove(page)
            page.parent, page.piece = node, piece
            bisect.insort(node.children, page, key=_ids)
            if maker is None:
                left += self._absorb(node, page)
            node = page
        return left

    def cut_off(self, page: Page[Maker]) -> list[Page[Maker]]:
        """Remove a page and its descendants."""
        if (parent := page.parent) is None:
            return []
        parent.children.remove(page)
        subtree = [page]
        for one in subtree:  # no recursion: a chain may be longer than Python's stack
            subtree += one.children
            one.parent, one.maker, one.children = None, None, []
            self._drop_snapshots(one)
        self._drop_snapshots(parent, lambda piece: _closest(parent, piece)[1] < piece.length)
        return subtree

    def drop(self, key: str) -> list[Page[Maker]]:
        """Remove the pages with tokens of the image with this entry key, and their descendants."""
        tops: list[Page[Maker]] = []
        nodes = [*self._roots.values()]
        for node in nodes:
            self._drop_snapshots(node, lambda piece: piece.has_image(key))
            own = [page for page in node.children if page.piece.has_image(key)]
            tops += own
            nodes += (page for page in node.children if page not in own)
        return [page for top in tops for page in self.cut_off(top)]

    def clear(self) -> list[Page[Maker]]:
        """Remove all pages."""
        return [page for root in self._roots.values() for top in [*root.children] for page in self.cut_off(top)]

    def _root(self, owner: str) -> Page[Maker]:
        if owner not in self._roots:
            self._roots = {name: root for name, root in self._roots.items() if root.children}
        return self._roots.setdefault(owner, Page(0))

    def _absorb(self, node: Page[Maker], page: Page[Maker]) -> list[Page[Maker]]:
        """Cut off unused pages that hold only the beginning of `page`, since it replaces them."""
        left: list[Page[Maker]] = []
        place = bisect.bisect_left(node.children, page.piece.ids, key=_ids)
        for other in reversed(node.children[:place]):
            if other.piece.common(page.piece) < other.piece.length:
                break
            if not other.uses:
                left += self.cut_off(other)
        return left

    # Snapshots.

    def add_snapshot(
        self,
        chain: Chain,
        place: int,
        maker: Maker | None = None,
        *,
        slot: int | None = None,
        is_decoded: bool = False,
        is_needed: bool = False,
    ) -> Snapshot[Maker] | None:
        """Return a new snapshot after the first `place` tokens of a chain, see `Snapshot` and `StateSlots.add`.

        None if pages do not hold these tokens, if there is one already, or if all others are worth more.
        """
        assert self._states is not None
        before = 0
        for known in self._known(chain):
            own = [held.place for held in self._snapshots(known) if held.place <= place]
            before = max([before, *own])
            if place <= known.start + known.common:
                if before == place:
                    return None
                made = Snapshot(place, place - before, chain.owner, is_decoded, maker)
                if not self._states.add(made, slot=slot, is_needed=is_needed):
                    return None
                there = [(piece, held) for piece, held in known.parent.snapshots if not held.is_lost]
                known.parent.snapshots = [*there, (chain.piece(known.start, place), made)]
                return made
        return None

    def take_snapshots(
        self, chain: Chain, keep: int, places: Places, maker: Maker, cached: int, matched: int
    ) -> StateNeeds[Maker]:
        """Return the new snapshots that a prefill takes or loads, and the slots that it needs.

        Args:
          chain: tokens of its prompt.
          keep: number of tokens whose states others may use.
          places: where it may take snapshots.
          maker: its block table.
          cached, matched: see `BlockTable`.
        """
        assert self._states is not None
        loaded, read = places.loaded(cached), places.read(cached)
        needs = StateNeeds[Maker]()
        for place in dict.fromkeys([*loaded, *read]):
            made = self.add_snapshot(chain, place, maker, is_needed=place in loaded) if place <= keep else None
            if made is None and (place in loaded or places.edges is not None):
                made = self._alone(chain, place, maker)  # there is one in the tree, or the page there is not shared
            if made is not None:
                needs.snapshots.append(made)
                needs.stated[place] = made.slot
        # Maps come before snapshots from which no image is linked or stored.
        for end, inner in places.maps(cached):
            added, passed = (self._alone(chain, end, maker) for _ in range(2))
            needs.alone.extend(one for one in (added, passed) if one is not None)
            if added is not None and passed is not None:
                needs.maps[end] = MapSlots(end, inner, added.slot, passed.slot)
        for place in (place for place in places.chosen(cached, matched) if place <= keep and place not in needs.stated):
            if (made := self.add_snapshot(chain, place, maker)) is not None:
                needs.snapshots.append(made)
        return needs

    def _alone(self, chain: Chain, place: int, maker: Maker) -> Snapshot[Maker] | None:
        """Return a slot that only a prefill uses, until it was launched; None if there is none."""
        assert self._states is not None
        alone = Snapshot(place, place, chain.owner, maker=maker)
        if not self._states.add(alone, is_needed=True):
            return None
        self._states.drop(alone)
        return alone

    def _snapshots(self, known: _Known[Maker]) -> list[Snapshot[Maker]]:
        """Return the snapshots among the known tokens of a page."""
        assert self._states is not None
        return [
            held
            for piece, held in known.parent.snapshots
            if self._states.has(held) and piece.length <= known.common and piece.common(known.piece) == piece.length
        ]

    def _drop_snapshots(self, page: Page[Maker], which: Callable[[Piece], bool] = lambda piece: True) -> None:
        """Drop the snapshots after a page whose last tokens `which` accepts."""
        for piece, held in page.snapshots:
            if which(piece):
                assert self._states is not None
                self._states.drop(held)
        page.snapshots = [(piece, held) for piece, held in page.snapshots if not held.is_lost]


def _ids(page: Page[Any]) -> bytes:
    return page.piece.ids


def _closest[Maker](node: Page[Maker], piece: Piece) -> tuple[Page[Maker] | None, int]:
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


def _eldest[Maker](
    parent: Page[Maker], piece: Piece, closest: Page[Maker], common: int, less: int
) -> tuple[Page[Maker], int]:
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
