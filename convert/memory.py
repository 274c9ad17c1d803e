"""How much memory a process takes, and sizes in words."""

from __future__ import annotations

import pathlib
import threading
from typing import Self


def gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


def anonymous_memory() -> int | None:
    """Bytes that only this process has, mapped files not counted; None where the system does not tell."""
    try:
        status = pathlib.Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return None
    lines = (line.split() for line in status.splitlines() if line.startswith("RssAnon:"))
    return next((int(line[1]) << 10 for line in lines), None)


class PeakMemory:
    """Watches anonymous memory while it is entered; `peak` and `base` are None where the system does not tell."""

    def __init__(self, interval: float = 0.005):
        self.base = self.peak = anonymous_memory()
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="vlcache-memory", daemon=True)

    def __enter__(self) -> Self:
        if self.base is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self._interval):
            self.peak = max(self.peak or 0, anonymous_memory() or 0)
