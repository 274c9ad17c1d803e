"""Whether something that may fail is worth a try."""

from __future__ import annotations

import threading
from collections.abc import Callable

FAULTS = 3  # one after the other, and a tier is left alone
_REST = (1.0, 60.0)  # seconds that it is, at first and at most


class Breaker:
    """Says whether something that may fail is worth a try: after some faults, one at a time, ever more rarely.

    Args:
      clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._lock = threading.Lock()
        self._faults = 0
        self._until = 0.0
        self._rest = _REST[0]

    def allows(self) -> bool:
        """Whether to try; who does says how it went."""
        with self._lock:
            if self._faults < FAULTS:
                return True
            if self._clock() < self._until:
                return False
            self._until = self._clock() + self._rest  # others wait for how this one goes
            return True

    def worked(self) -> None:
        with self._lock:
            self._faults, self._rest = 0, _REST[0]

    def failed(self, times: int = 1) -> None:
        with self._lock:
            was_open = self._faults >= FAULTS
            self._faults += times
            if self._faults >= FAULTS:
                self._rest = min(2 * self._rest, _REST[1]) if was_open else _REST[0]
                self._until = self._clock() + self._rest
