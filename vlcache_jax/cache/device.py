"""Index of the device tier: cache entries with a copy on the device, and the places of their tokens there."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vlcache_jax.cache.record import Record

PAGE_TOKENS = 128
ALIGNMENT = 8  # consecutive tokens of a page that a kernel reads at once

Index = npt.NDArray[np.int32]


@dataclass(eq=False)
class _DeviceCopy:
    """Copy of a cache entry on the device.

    Attributes:
      place: index of each token's place, up to a multiple of `ALIGNMENT`.
      missing, missing_rows: number of tokens whose KV, and whose encoder output, is not written yet.
    """

    place: Index
    missing: int
    missing_rows: int


class DeviceTier:
    """Copies of cache entries on the device, in pages of `PAGE_TOKENS` tokens; the least recently used are evicted.

    A copy lives as long as its entry in host memory. The caller launches programs in the order of the calls, so a page
    can be reassigned at once.

    Args:
      num_pages: number of pages; 0: the tier is off.
      page_bytes: size of a page in bytes.
    """

    def __init__(self, num_pages: int, page_bytes: int):
        self.num_pages, self.page_bytes = num_pages, page_bytes
        self._copies: weakref.WeakKeyDictionary[Record, _DeviceCopy] = (
            weakref.WeakKeyDictionary()
        )  # least recently used first
        self._begun: weakref.WeakSet[Record] = weakref.WeakSet()
        self._needed: weakref.WeakSet[Record] = weakref.WeakSet()
        self._kept: weakref.WeakSet[Record] = weakref.WeakSet()
        self._lock = threading.Lock()  # other threads read the counts

    def need(self, records: Iterable[Record]) -> None:
        """Protect the copies of these entries until the next call."""
        with self._lock:
            self._needed = weakref.WeakSet(records)

    def keep(self, records: Iterable[Record], share: float) -> bool:
        """Protect the copies of entries as long as the entries are pinned in host memory.

        Args:
          records: the entries.
          share: maximum fraction of all pages for protected copies.

        Returns:
          False, without a change, if an entry has no complete copy or the copies do not fit.
        """
        with self._lock:
            wanted = list(records)
            if not all(self._is_whole(record) for record in wanted):
                return False
            kept = {*wanted, *(record for record in self._kept if record.is_kept)}
            pages = sum(_pages(record.meta.tokens) for record in kept if record in self._copies)
            if pages > share * self.num_pages:
                return False
            self._kept.update(wanted)
            return True

    def find(self, record: Record) -> Index | None:
        """Return the places of an entry's KV, if its copy is complete; see `_DeviceCopy.place`."""
        with self._lock:
            copy = self._copies.get(record)
            if copy is None or copy.missing or not record.is_ready:
                return None
            self._copies[record] = self._copies.pop(record)
            return copy.place

    def find_rows(self, record: Record) -> Index | None:
        """Return the places of the image's encoder output, if the copy is complete and has it."""
        if self.find(record) is None:
            return None
        with self._lock:
            copy = self._copies.get(record)  # it may have been dropped just now
            return copy.place if copy is not None and not copy.missing_rows else None

    def begin(self, record: Record) -> Index | None:
        """Return the places to which the KV of an entry is written while it is computed.

        The first call allocates them. None: there is no room, or the copy is complete from an earlier attempt of the
        request.
        """
        with self._lock:
            if record not in self._begun:
                return self._take(record)
            copy = self._copies.get(record)
            return copy.place if copy is not None and copy.missing else None

    def take(self, record: Record) -> Index | None:
        """Allocate places for a copy of an entry in host memory; None: there is no room."""
        with self._lock:
            return self._take(record)

    def fill(self, record: Record, tokens: int, rows: int) -> None:
        """Note that KV of `tokens` tokens and encoder output of `rows` tokens have been written."""
        with self._lock:
            if (copy := self._copies.get(record)) is not None:
                copy.missing -= tokens
                copy.missing_rows -= rows

    def drop(self, record: Record) -> None:
        """Delete the copy of an entry that has left host memory. Called from any thread."""
        with self._lock:
            self._copies.pop(record, None)

    def clear(self) -> None:
        """Delete all copies, because the device memory was lost."""
        with self._lock:
            self._copies.clear()

    def counts(self) -> dict[str, int]:
        """Return the number of complete copies, bytes in use and capacity in bytes, by their names in `CacheStats`."""
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
