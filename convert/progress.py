"""Progress and memory of a conversion or a check."""

from __future__ import annotations

import dataclasses
import pathlib
import threading
import time
from collections.abc import Callable
from typing import Self


def gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


def anonymous_memory() -> int | None:
    """Return the anonymous memory of this process in bytes, without mapped files. None: the system has no figure."""
    try:
        status = pathlib.Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return None
    lines = (line.split() for line in status.splitlines() if line.startswith("RssAnon:"))
    return next((int(line[1]) << 10 for line in lines), None)


class PeakMemory:
    """A context manager that measures anonymous memory.

    Attributes:
      base, peak: bytes at the beginning, and the maximum so far. None: the system has no figure.
    """

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


@dataclasses.dataclass(frozen=True)
class ConvertProgress:
    """The progress of a conversion.

    Attributes:
      step: "convert", "verify" or "check".
      tensors, total_tensors: finished tensors, and all.
      nbytes, total_nbytes: finished bytes, and all, in the written dtype.
      seconds: seconds since the step began.
      peak_memory: maximum anonymous memory of the process so far, in bytes. None: the system has no figure.
    """

    step: str
    tensors: int
    total_tensors: int
    nbytes: int
    total_nbytes: int
    seconds: float
    peak_memory: int | None

    @property
    def rate(self) -> float:
        """Rate in bytes per second."""
        return self.nbytes / max(self.seconds, 1e-9)


class ConvertMeter:
    """A counter of tensors and bytes that reports progress to the caller."""

    def __init__(
        self,
        step: str,
        tensors: int,
        nbytes: int,
        memory: PeakMemory,
        progress: Callable[[ConvertProgress], None] | None,
    ):
        self._step, self._memory, self._progress = step, memory, progress
        self._total_tensors, self._total_nbytes = tensors, nbytes
        self._tensors = self._nbytes = 0
        self._begin = time.perf_counter()

    def count(self, nbytes: int) -> None:
        """Count a finished tensor of `nbytes`."""
        self._tensors += 1
        self._nbytes += nbytes
        if self._progress is not None:
            seconds = time.perf_counter() - self._begin
            counts = self._tensors, self._total_tensors, self._nbytes, self._total_nbytes
            self._progress(ConvertProgress(self._step, *counts, seconds, self._memory.peak))
