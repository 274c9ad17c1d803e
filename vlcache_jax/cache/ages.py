"""How old what is kept of an image is."""

from __future__ import annotations

from collections.abc import Callable

from vlcache_jax.cache.bounded import Bounded
from vlcache_jax.cache.record import Record

_REMEMBERED = 65536  # images


class Ages:
    """Knows since when images are kept, whether or not their records are still here.

    Args:
      ttl: seconds after which what is kept of an image is not used any more; None: it always is.
      clock: seconds since the epoch.
    """

    def __init__(self, ttl: float | None, clock: Callable[[], float]):
        self._ttl, self._clock = ttl, clock
        self._born = Bounded[float](_REMEMBERED)  # entry key -> when the oldest of its records was written

    def oldest(self) -> float | None:
        """What was written before is not used any more; None: all is."""
        return None if self._ttl is None else self._clock() - self._ttl

    def date(self, record: Record) -> float:
        """A record has been filled: just now, unless it came from a tier that says when."""
        if record.written is None:
            record.written = self._clock()
        return record.written

    def note(self, record: Record) -> None:
        """A record that has been filled is kept."""
        written, before = self.date(record), self._born.get(record.meta.entry)
        self._born.put(record.meta.entry, written if before is None else min(before, written))

    def end(self, entry: str) -> bool:
        """Whether an image has become too old; it begins anew then."""
        born, oldest = self._born.get(entry), self.oldest()
        if born is None or oldest is None or born >= oldest:
            return False
        self._born.pop(entry)
        return True

    def clear(self) -> None:
        self._born.clear()
