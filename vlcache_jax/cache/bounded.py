"""What is remembered as long as there is room."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

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
