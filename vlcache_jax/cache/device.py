"""The device tier's books: which records have a copy on the device, and where in its memory the tokens lie."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vlcache_jax.cache.record import Record

PAGE_TOKENS = 128
ALIGNMENT = 8  # tokens that a kernel reads at once; they follow each other in a page

Index = npt.NDArray[np.int32]


@dataclass(eq=False)
class _DeviceCopy:
    """Of a record.

    Attributes:
      place: of its tokens, up to a multiple of `ALIGNMENT`.
      missing, missing_rows: tokens whose K, V, and encoder rows, it still lacks.
    """

    place: Index
    missing: int
    missing_rows: int


class DeviceTier:
    """Copies of records, in pages of `PAGE_TOKENS` tokens; the least recently used make room.

    A copy lives as long as its record: what is evicted, deleted or found damaged in host memory is gone here, too.
    Whoever calls launches programs in the order of the calls, so a page can change hands at once.

    Args:
      num_pages: 0: nothing is kept here.
      page_bytes: of a page.
    """

    def __init__(self, num_pages: int, page_bytes: int):
        self.num_pages, self.page_bytes = num_pages, page_bytes
        self._copies: weakref.WeakKeyDictionary[Record, _DeviceCopy] = (
            weakref.WeakKeyDictionary()
        )  # the oldest use first
        self._begun: weakref.WeakSet[Record] = weakref.WeakSet()
        self._needed: weakref.WeakSet[Record] = weakref.WeakSet()
        self._kept: weakref.WeakSet[Record] = weakref.WeakSet()
        self._lock = threading.Lock()  # others look at the counts

    def need(self, records: Iterable[Record]) -> None:
        """These stay until it is called again."""
        with self._lock:
            self._needed = weakref.WeakSet(records)

    def keep(self, records: Iterable[Record], share: float) -> bool:
        """Lets the copies of records stay as long as the records are kept in host memory.

        Args:
          share: of all pages that such copies take at most.

        Returns:
          Whether they do: each of them has a whole copy, and they fit.
        """
        with self._lock:
            asked = list(records)
            if not all(self._is_whole(record) for record in asked):
                return False
            kept = {*asked, *(record for record in self._kept if record.is_kept)}
            pages = sum(_pages(record.meta.tokens) for record in kept if record in self._copies)
            if pages > share * self.num_pages:
                return False
            self._kept.update(asked)
            return True

    def find(self, record: Record) -> Index | None:
        """Where the K, V of a record's tokens lie, if all are here; see `_DeviceCopy.place`."""
        with self._lock:
            copy = self._copies.get(record)
            if copy is None or copy.missing or not record.is_ready:
                return None
            self._copies[record] = self._copies.pop(record)
            return copy.place

    def find_rows(self, record: Record) -> Index | None:
        """The same of its image's encoder rows."""
        if self.find(record) is None:
            return None
        with self._lock:
            copy = self._copies.get(record)  # it may have been dropped just now
            return copy.place if copy is not None and not copy.missing_rows else None

    def begin(self, record: Record) -> Index | None:
        """Where what is computed for a record goes: at the first call it gets its place, if there is room. None: it has
        none, or has all of it already, from a first attempt of its request."""
        with self._lock:
            if record not in self._begun:
                return self._take(record)
            copy = self._copies.get(record)
            return copy.place if copy is not None and copy.missing else None

    def take(self, record: Record) -> Index | None:
        """A place for the copy of a record that lies in host memory. None: there is no room."""
        with self._lock:
            return self._take(record)

    def fill(self, record: Record, tokens: int, rows: int) -> None:
        """So many of its tokens' K, V, and of its encoder rows, have been written."""
        with self._lock:
            if (copy := self._copies.get(record)) is not None:
                copy.missing -= tokens
                copy.missing_rows -= rows

    def drop(self, record: Record) -> None:
        """The record has left host memory. Called from any thread."""
        with self._lock:
            self._copies.pop(record, None)

    def clear(self) -> None:
        """What the device held is gone."""
        with self._lock:
            self._copies.clear()

    def counts(self) -> dict[str, int]:
        """Complete copies, and the bytes of all pages and of those in use, by their names in `CacheStats`."""
        with self._lock:
            copies = list(self._copies.values())
        return {
            "device_records": sum(not copy.missing for copy in copies),
            "device_bytes": self.page_bytes * sum(_pages(len(copy.place)) for copy in copies),
            "device_capacity": self.page_bytes * self.num_pages,
        }

    def _is_whole(self, record: Record) -> bool:
        copy = self._copies.get(record)
        return copy is not None and not copy.missing

    def _stays(self, record: Record) -> bool:
        return record in self._needed or (record.is_kept and record in self._kept)

    def _take(self, record: Record) -> Index | None:
        self._begun.add(record)
        self._copies.pop(record, None)
        wanted = _pages(record.meta.tokens)
        used = {int(page) for copy in self._copies.values() for page in copy.place[::PAGE_TOKENS] // PAGE_TOKENS}
        free = [page for page in range(self.num_pages) if page not in used]
        leaving = []
        others = [(other, copy) for other, copy in self._copies.items() if not self._stays(other)]
        while len(free) < wanted and others:
            other, copy = others.pop(0)
            leaving.append(other)
            free += (copy.place[::PAGE_TOKENS] // PAGE_TOKENS).tolist()
        if len(free) < wanted:
            return None
        for other in leaving:
            self._copies.pop(other, None)
        pages = np.array(free[:wanted], np.int32)
        tokens = np.arange(-(-record.meta.tokens // ALIGNMENT) * ALIGNMENT, dtype=np.int32)
        place = pages[tokens // PAGE_TOKENS] * PAGE_TOKENS + tokens % PAGE_TOKENS
        self._copies[record] = _DeviceCopy(place, record.meta.tokens, record.meta.tokens)
        return place


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS)
