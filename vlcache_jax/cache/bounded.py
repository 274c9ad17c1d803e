"""What is remembered as long as there is room."""

from __future__ import annotations

import threading
from collections import OrderedDict


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
