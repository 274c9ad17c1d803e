"""How old what is kept of an image is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from vlcache_jax.cache.bounded import Bounded
from vlcache_jax.cache.record import Record

_REMEMBERED = 65536  # images


class _Met(NamedTuple):
    """When something was written, in seconds since the epoch, and when it was met first, by the steady clock."""

    said: float
    at: float


class Ages:
    """Knows since when images are kept, whether or not their records are still here.

    A time that is still to come was told by a clock that was ahead: it counts as now. Whatever clocks say, what was met
    is as old as the time since then.

    Args:
      ttl: seconds after which what is kept of an image is not used any more; None: it always is.
      clock: seconds since the epoch.
      steady: seconds that only grow.
    """

    def __init__(self, ttl: float | None, clock: Callable[[], float], steady: Callable[[], float] = time.monotonic):
        self._ttl, self._clock, self._steady = ttl, clock, steady
        self._born = Bounded[_Met](_REMEMBERED)  # by entry key; of the oldest of its records
        self._ahead = Bounded[_Met](_REMEMBERED)  # by a record's name and its time, if that was still to come

    def oldest(self) -> float | None:
        """What was written before is not used any more; None: all is."""
        return None if self._ttl is None else self._clock() - self._ttl

    def since(self, name: str, said: float) -> float:
        """When a record was written, by what a tier says of it."""
        met = self._ahead.get(told := f"{name} {said!r}")
        if met is None:
            if said <= self._clock():
                return said
            self._ahead.put(told, met := _Met(said, self._steady()))
        return self._written(met)

    def date(self, record: Record) -> float:
        """A record has been filled: just now, unless it came from a tier that says when."""
        now = self._clock()
        record.written = now if record.written is None else min(record.written, now)
        return record.written

    def note(self, record: Record) -> None:
        """A record that has been filled is kept."""
        said, before = self.date(record), self._born.get(record.meta.entry)
        new = _Met(said, self._steady()) if before is None else before._replace(said=min(before.said, said))
        self._born.put(record.meta.entry, new)

    def end(self, entry: str) -> bool:
        """Whether an image has become too old; it begins anew then."""
        born, oldest = self._born.get(entry), self.oldest()
        if born is None or oldest is None or self._written(born) >= oldest:
            return False
        self._born.pop(entry)
        return True

    def clear(self) -> None:
        self._born.clear()

    def _written(self, met: _Met) -> float:
        return min(met.said, self._clock() - (self._steady() - met.at))
