"""The KV pools: K and V of the slots that requests have their tokens in, and of what is kept of compressed prompts."""

from __future__ import annotations

import contextlib
from collections import abc

import jax
import numpy as np

from vlcache_jax.device.ladder import cover
from vlcache_jax.device.programs.base import Program
from vlcache_jax.device.programs.shapes import Halves
from vlcache_jax.device.programs.state import CopyPages
from vlcache_jax.device.programs.table import Programs
from vlcache_jax.pallas_kernels import PAGE


class Pool:
    """Its arrays are donated to each program and come back updated in place.

    Args:
      programs: that run on its device.
      empty: makes K or V.
      count: pairs of these: one for each layer, or one for all.

    Attributes:
      arrays: K and V of each layer, or of all layers, [S, K, D]; None: they are not made yet, or a program that had
        them was interrupted.
    """

    def __init__(self, programs: Programs, empty: Program[jax.Array], count: int):
        self._programs, self._empty, self._count = programs, empty, count
        self.arrays: Halves | None = None

    def make(self) -> Halves:
        """The arrays, made if they are not there."""
        if self.arrays is None:
            run = self._programs.run
            self.arrays = [[run(self._empty), run(self._empty)] for _ in range(self._count)]
        return self.arrays

    @contextlib.contextmanager
    def taken(self) -> abc.Iterator[Halves]:
        """The arrays, for programs that take and return them: what the list has in the end is the pool. If that does
        not come, everything in it is lost."""
        arrays, self.arrays = self.arrays or self.make(), None
        yield arrays
        self.arrays = arrays

    def copy_pages(self, pairs: abc.Sequence[tuple[int, int]]) -> None:
        """Copies pages: of each pair the first to the second, which none of the others names."""
        rest, shapes = list(pairs), self._programs.shapes
        for size in cover(len(pairs), shapes.ladder.sequences):
            some, rest = rest[:size], rest[size:]
            source, target = np.zeros(size, np.int32), np.full(size, shapes.num_slots // PAGE, np.int32)
            source[: len(some)], target[: len(some)] = zip(*some, strict=True)
            with self.taken() as arrays:
                arrays[:] = self._programs.run(CopyPages(size), arrays, source, target)
