"""What is remembered as long as there is room, also of what is not here any more: aliases, requests, ages."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from vlcache_jax.cache.record import Meta, Record, Why

REMEMBERED = 65536  # images, aliases, reasons for losses; a few hundred bytes apiece
_MOST_REQUESTS = 4096  # each a list of images, of a hundred bytes apiece


class Bounded[V]:
    """A mapping of at most `most` keys; the least recently used leave. Every method may be called from any thread."""

    def __init__(self, most: int):
        self._most = most
        self._values: OrderedDict[str, V] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: str) -> V | None:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: str, value: V) -> bool:
        """Whether the key was there before."""
        with self._lock:
            known = key in self._values
            self._values[key] = value
            self._values.move_to_end(key)
            while len(self._values) > self._most:
                self._values.popitem(last=False)
            return known

    def pop(self, key: str) -> V | None:
        with self._lock:
            return self._values.pop(key, None)

    def clear(self) -> None:
        with self._lock:
            self._values.clear()


class Losses(Bounded[tuple[Why, str]]):
    """Why there are no K, V, and whose they were: by a record's name, and by an entry key for all contexts together."""

    def note(self, meta: Meta, why: Why) -> None:
        """Remembers why a record of K, V is gone."""
        for name in (meta.name, meta.entry) if meta.context is not None else ():
            self.put(name, (why, meta.owner))


class Requests:
    """Remembers the images of the last requests, by their request keys. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._known = Bounded[tuple[str, tuple[str, ...]]](_MOST_REQUESTS)  # request key -> owner, entry keys

    def remember(self, key: str, entries: Sequence[str], owner: str) -> bool:
        """Notes a request's list of images; whether the same list was there before."""
        return self._known.put(key, (owner, tuple(entries)))

    def forget(self, key: str) -> None:
        self._known.pop(key)

    def find(self, key: str, owner: str) -> tuple[str, ...] | None:
        """The entry keys of a request's images, by its request key; None if it is not this owner's."""
        found, entries = self._known.get(key) or (None, ())
        return entries if found == owner else None

    def clear(self) -> None:
        self._known.clear()


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
        self._born = Bounded[_Met](REMEMBERED)  # by entry key; of the oldest of its records
        self._ahead = Bounded[_Met](REMEMBERED)  # by a record's name and its time, if that was still to come

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
