"""How long the device takes, told by a thread that waits for its results, so that nobody else has to."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax


class Clock:
    """Times what is launched, in its order."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "vlcache-clock")
        self._lock = threading.Lock()
        self._last = 0.0

    def mark(self, arrays: Sequence[jax.Array]) -> Future[float]:
        """The seconds from when these were launched, or all marked before them were ready, until they are ready.

        Args:
          arrays: that no later program is given for good.
        """
        launched = time.perf_counter()

        def wait() -> float:
            try:
                jax.block_until_ready(arrays)
            except Exception:  # whoever reads them meets the error
                return 0.0
            begin, self._last = max(launched, self._last), time.perf_counter()
            return self._last - begin

        return self._thread.submit(wait)

    def close(self) -> None:
        self._thread.shutdown()
