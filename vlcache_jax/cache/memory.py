"""The memory tier: records in host memory under one budget, the least recently used leaving first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vlcache_jax.cache.record import Meta, Part, Record, TierError
from vlcache_jax.cache.why import Why


class MemoryTier:
    """Records in host memory, counted at their padded size from the moment they get their place.

    A record that leaves is found no more, and its room is another's. Its memory goes when the last request that still
    reads it has run.

    Args:
      capacity: bytes at most.
      removed: called with every record that leaves, and why (None: nobody needs to know).
    """

    def __init__(self, capacity: int, removed: Callable[[Record, Why | None], object] = lambda record, why: None):
        self.capacity = capacity
        self.used = 0
        self.clashes = 0
        self._removed = removed
        self._records: OrderedDict[str, Record] = OrderedDict()  # the least recently used first
        self._lock = threading.RLock()

    def get(self, name: str) -> Record | None:
        """The record of this name, which may still be being filled."""
        with self._lock:
            record = self._records.get(_place(name))
            if record is not None and record.meta.name != name:
                self.clashes += 1
                return None
            return record

    def touch(self, record: Record) -> None:
        """Makes it the most recently used one."""
        with self._lock:
            if self._records.get(place := _place(record.meta.name)) is record:
                self._records.move_to_end(place)

    def allocate(self, metas: Sequence[Meta], displaced: Sequence[Record] = ()) -> list[Record | None]:
        """Records to be filled, and then settled; None where one is larger than what is not pinned.

        Args:
          metas: of the new records.
          displaced: records that have to leave in any case.
        """
        with self._lock:
            gone = list(displaced)
            free = self.capacity - self.used + sum(record.meta.nbytes for record in gone)
            fits = []
            for meta in metas:
                # Whatever has its place, and then the least recently used ones.
                there = self._records.get(_place(meta.name))
                more = [] if there is None or there in gone else [there]
                others = (r for r in self._records.values() if not (r.is_pinned or r in gone or r is there))
                room = free + sum(record.meta.nbytes for record in more)
                while room < meta.nbytes and (record := next(others, None)) is not None:
                    more.append(record)
                    room += record.meta.nbytes
                fits.append(room >= meta.nbytes and not any(record.is_pinned for record in more))
                if fits[-1]:
                    gone += more
                    free = room - meta.nbytes
            for record in gone:
                self.remove(record, Why.displaced if record in displaced else Why.evicted)
            return [self._insert(meta) if fit else None for meta, fit in zip(metas, fits, strict=True)]

    def _insert(self, meta: Meta) -> Record:
        record = self._records[_place(meta.name)] = Record(meta)
        self.used += meta.nbytes
        return record

    def remove(self, record: Record, why: Why | None = Why.evicted) -> None:
        """Forgets a record; who holds it may go on using it."""
        with self._lock:
            if self._records.get(place := _place(record.meta.name)) is record:
                del self._records[place]
                self.used -= record.meta.nbytes
                self._removed(record, why)

    def records(self) -> list[Record]:
        """All of them, the least recently used first."""
        with self._lock:
            return list(self._records.values())

    # The interface of a tier.

    def meta(self, name: str) -> Meta | None:
        record = self.get(name)
        return record.meta if record is not None and record.is_ready else None

    def read(
        self, name: str, parts: Iterable[Part], place: Callable[[Part], npt.NDArray[Any]] | None = None
    ) -> Iterator[tuple[Part, npt.NDArray[Any]]]:
        record = self.get(name)
        if record is None or not record.is_ready:
            raise TierError(f"no record {name}")
        for part in parts:
            yield part, record.data[record.meta.parts.index(part)]

    def write(self, meta: Meta, parts: Mapping[Part, npt.NDArray[Any]]) -> bool:
        [record] = self.allocate([meta])
        if record is None:
            return False
        for i, part in enumerate(meta.parts):
            np.copyto(record.data[i], parts[part])
        record.settle(True)
        return True

    def delete(self, name: str) -> None:
        record = self.get(name)
        if record is not None:
            self.remove(record)

    def keys(self, prefix: str = "") -> list[str]:
        return [
            record.meta.name for record in self.records() if record.is_ready and record.meta.name.startswith(prefix)
        ]

    def close(self) -> None:
        for record in self.records():
            self.remove(record, None)


def _place(name: str) -> str:
    """Where a record is kept. Two names might share a place; the name in the record decides whose it is."""
    return name
