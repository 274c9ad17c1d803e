"""How far a conversion or a check is, told while it runs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from vlcache_jax.convert.memory import PeakMemory


@dataclasses.dataclass(frozen=True)
class ConvertProgress:
    """How far a conversion is.

    Attributes:
      step: "convert", "verify" or "check".
      tensors, total_tensors: done, and in all.
      nbytes, total_nbytes: done, and in all, as they are written.
      seconds: since the step began.
      peak_memory: the most anonymous memory of the process seen so far, in bytes; None where the system does not say.
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
        """Bytes per second."""
        return self.nbytes / max(self.seconds, 1e-9)


class ConvertMeter:
    """Counts tensors and bytes, and tells the caller."""

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
        """A tensor more is done."""
        self._tensors += 1
        self._nbytes += nbytes
        if self._progress is not None:
            seconds = time.perf_counter() - self._begin
            counts = self._tensors, self._total_tensors, self._nbytes, self._total_nbytes
            self._progress(ConvertProgress(self._step, *counts, seconds, self._memory.peak))
