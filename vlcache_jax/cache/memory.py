"""Records in host memory under one budget, the least recently used leaving first."""

from __future__ import annotations

import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence

from vlcache_jax.cache.keys import NO_TENANTS
from vlcache_jax.cache.record import Meta, Record, Why


class MemoryTier:
    """Records in host memory, counted at their padded size from the moment they get their place.

    A record that leaves is found no more, and its room is another's. Its memory goes when the last request that still
    reads it has run.

    Args:
      capacity: bytes at most.
      owner_bytes: bytes at most of records under one salt; None: they have no limit of their own.
    """

    def __init__(self, capacity: int, *, owner_bytes: int | None = None):
        self.capacity, self._owner_bytes = capacity, owner_bytes
        self.used = 0
        self.clashes = 0
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

    def allocate(
        self, metas: Sequence[Meta], displaced: Sequence[Record] = (), source: str | None = None
    ) -> tuple[list[Record | None], dict[Record, Why]]:
        """Records to be filled, None where one is larger than what is not pinned; and those that leave, and why.

        Args:
          metas: of the new records.
          displaced: records that have to leave in any case.
          source: see `Record`.
        """
        with self._lock:
            gone = list(displaced)
            free = self.capacity - self.used + sum(record.meta.nbytes for record in gone)
            fits = []
            taken: Counter[str] = Counter()  # by what is new, of each owner's share
            for meta in metas:
                # Whatever has its place, and then the least recently used ones.
                there = self._records.get(_place(meta.name))
                more = [] if there is None or there in gone else [there]
                others = [r for r in self._records.values() if not (r.is_pinned or r in gone or r is there)]
                # An owner's records make room in its own share,
                share = self._share(meta.owner, [*gone, *more]) - taken[meta.owner]
                own = (record for record in others if record.meta.owner == meta.owner)
                while share < meta.nbytes and (record := next(own, None)) is not None:
                    more.append(record)
                    share += record.meta.nbytes
                # and then anybody's in the whole.
                room = free + sum(record.meta.nbytes for record in more)
                left = (record for record in others if record not in more)
                while room < meta.nbytes and (record := next(left, None)) is not None:
                    more.append(record)
                    room += record.meta.nbytes
                # Nothing leaves for a record that does not fit after all.
                fits.append(min(room, share) >= meta.nbytes and not any(record.is_pinned for record in more))
                if fits[-1]:
                    gone += more
                    free = room - meta.nbytes
                    taken[meta.owner] += meta.nbytes
            leaving = {
                record: Why.displaced if record in displaced else Why.evicted for record in gone if self.remove(record)
            }
            return [self._insert(meta, source) if fit else None for meta, fit in zip(metas, fits, strict=True)], leaving

    def _share(self, owner: str, gone: Sequence[Record]) -> float:
        """Bytes that are left to an owner's new records when some have gone."""
        if self._owner_bytes is None or owner in NO_TENANTS:
            return math.inf
        own = (record for record in self._records.values() if record.meta.owner == owner and record not in gone)
        return self._owner_bytes - sum(record.meta.nbytes for record in own)

    def _insert(self, meta: Meta, source: str | None) -> Record:
        record = self._records[_place(meta.name)] = Record(meta, source)
        self.used += meta.nbytes
        return record

    def remove(self, record: Record) -> bool:
        """Forgets a record; who holds it may go on using it. Whether it was here."""
        with self._lock:
            is_here = self._records.get(place := _place(record.meta.name)) is record
            if is_here:
                del self._records[place]
                self.used -= record.meta.nbytes
            return is_here

    def records(self) -> list[Record]:
        """All of them, the least recently used first."""
        with self._lock:
            return list(self._records.values())

    @property
    def pinned_bytes(self) -> int:
        """Of records that the user wants to stay."""
        return sum(record.meta.nbytes for record in self.records() if record.is_kept)

    def counts(self) -> dict[str, int]:
        """Of what it keeps now, as `CacheStats` calls them."""
        records = [record for record in self.records() if record.is_ready]
        kv = sum(record.meta.context is not None for record in records)
        return {
            "clashes": self.clashes,
            "encoder_records": len(records) - kv,
            "kv_records": kv,
            "pinned": sum(not record.is_free for record in records),
            "pinned_bytes": self.pinned_bytes,
            "bytes": self.used,
            "capacity": self.capacity,
        }


def _place(name: str) -> str:
    """Where a record is kept. Two names might share a place; the name in the record decides whose it is."""
    return name
