"""Snapshots of states in host memory, which they share with the records of images."""

from __future__ import annotations

import itertools

from vlcache_jax.cache.record import Meta, Record
from vlcache_jax.cache.records import Records


class HostSnapshots:
    """Snapshots of states in host memory.

    Each is a record without tokens. It counts towards `CacheConfig.states_bytes` and the quota of its owner, and leaves
    when it is the least recently used record. No other tier receives it. Every method may be called from any thread.

    Args:
      records: records of images and their memory.
      layers, values: shape of the states of a sequence, see `Meta.states`.
    """

    def __init__(self, records: Records, layers: int, values: int):
        self._records, self._layers, self._values = records, layers, values
        self._numbers = itertools.count()

    def take(self, owner: str) -> Record | None:
        """Return a record to be filled with a snapshot; None if there is no room.

        Args:
          owner: see `Meta`.
        """
        name, shape = str(next(self._numbers)), (self._layers, 0, 0)
        meta = Meta(name, owner, None, True, (0, 0, 0), 0, "float32", shape, states=self._values)
        [record] = self._records.reserve([meta])
        return record

    def holds(self, record: Record) -> bool:
        """Return whether a record was not evicted. It may not be filled yet."""
        return self._records.tier.get(record.meta.name) is record

    def touch(self, record: Record) -> None:
        """Mark a record as used now."""
        self._records.tier.touch([record])

    def drop(self, record: Record) -> None:
        """Forget a record."""
        self._records.remove(record, None)
