"""The pool: K and V of all tokens of running sequences, and the states of layers without K and V.

Programs take its arrays and return changed ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from vlcache_jax.device.buckets import cover
from vlcache_jax.device.programs.base import Halves, Program
from vlcache_jax.device.programs.memory import CopyPages
from vlcache_jax.device.programs.states import LoadMaps, LoadStates, StoreMaps, StoreStates
from vlcache_jax.device.programs.table import Programs
from vlcache_jax.pallas_kernels import PAGE


class Pool:
    """A KV pool, whose arrays are donated to programs and returned updated in place.

    Args:
      programs: programs of the device.
      empty: program that creates K or V.
      states: by layer, the program that creates its states, or None if it has K and V. A single None: one pair of K
        and V for all layers.

    Attributes:
      arrays: K and V of each layer, or of all layers, [S, K, D], or the states of a layer. None: they do not exist
        yet, or a program that took them was interrupted.
    """

    def __init__(
        self, programs: Programs, empty: Program[jax.Array], states: Sequence[Program[list[jax.Array]] | None]
    ):
        self._programs, self._empty, self._states = programs, empty, states
        self.arrays: Halves | None = None

    def make(self) -> Halves:
        """Return the arrays, and create them if they do not exist."""
        if self.arrays is None:
            run = self._programs.run
            self.arrays = [run(states) if states else [run(self._empty), run(self._empty)] for states in self._states]
        return self.arrays

    def taken(self) -> _Taken:
        """Return a context manager that yields the arrays for programs that take and return them.

        At the end of the `with` block, the list's arrays become the pool. If the block raises, the pool is lost.
        """
        return _Taken(self)

    def paged(self) -> Halves:
        """Return K and V of each layer that has them."""
        return [arrays for arrays, states in zip(self.make(), self._states, strict=True) if states is None]

    @contextlib.contextmanager
    def taken_states(self) -> Iterator[Halves]:
        """Yield the states of the layers that have some, in their order, as `taken` does."""
        stated = [i for i, states in enumerate(self._states) if states is not None]
        if not stated:
            yield []
            return
        with self.taken_layers(stated) as own:
            yield own

    @contextlib.contextmanager
    def taken_layers(self, layers: Sequence[int]) -> Iterator[Halves]:
        """Yield what some layers keep, as `taken` does."""
        with self.taken() as arrays:
            own = [arrays[i] for i in layers]
            yield own
            for i, kept in zip(layers, own, strict=True):
                arrays[i] = kept

    def load_states(self, parts: slice, stored: jax.Array, slot: int) -> None:
        """Load states after an image, float32 [parts, n], from some parts of a cache entry into a slot."""
        shapes = self._programs.shapes
        layers = [layer for own in shapes.state_parts(parts) for layer in own]
        with self.taken_layers(layers) as states:
            states[:] = self._programs.run(LoadStates.for_parts(shapes, parts), states, stored, np.int32(slot))

    def stored_states(self, slot: int) -> jax.Array:
        """Return the states of a slot as a cache entry holds them, float32 [L, n]."""
        with self.taken_states() as states:
            return self._programs.run(StoreStates(), states, np.int32(slot))

    def load_map(self, parts: slice, floats: jax.Array, maps: jax.Array, added: int, passed: int) -> None:
        """Load the map of an image, from some parts of a cache entry, into the slots of B and A, see `LoadMaps`."""
        shapes = self._programs.shapes
        layers = [layer for own in shapes.state_parts(parts) for layer in own]
        with self.taken_layers(layers) as states:
            program = LoadMaps.for_parts(shapes, parts)
            states[:] = self._programs.run(program, states, floats, maps, np.int32(added), np.int32(passed))

    def stored_map(self, added: int, passed: int) -> tuple[jax.Array, jax.Array]:
        """Return the map of an image as a cache entry holds it, see `StoreMaps`."""
        with self.taken_states() as states:
            return self._programs.run(StoreMaps(), states, np.int32(added), np.int32(passed))

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages.

        Args:
          pairs: (source, target) of each copy; a target occurs in no other pair.
        """
        rest, shapes = list(pairs), self._programs.shapes
        for size in cover(len(pairs), shapes.buckets.sequences):
            some, rest = rest[:size], rest[size:]
            source, target = np.zeros(size, np.int32), np.full(size, shapes.num_slots // PAGE, np.int32)
            source[: len(some)], target[: len(some)] = zip(*some, strict=True)
            paged = [i for i, states in enumerate(self._states) if states is None]
            with self.taken_layers(paged) as halves:
                halves[:] = self._programs.run(CopyPages(size), halves, source, target)


class _Taken:
    """A context manager that takes the arrays of a pool, and returns them unless the block raises."""

    def __init__(self, pool: Pool):
        self._pool = pool

    def __enter__(self) -> Halves:
        self._arrays = self._pool.make()
        self._pool.arrays = None
        return self._arrays

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self._pool.arrays = self._arrays


@contextlib.contextmanager
def taken_compressed(compressed: Pool, pool: Pool) -> Iterator[Halves]:
    """Yield K and V of compressed prompts, and the states of the layers that have some, as `Pool.taken` does."""
    with compressed.taken() as halves, pool.taken_states() as states:
        arrays = [*halves, *states]
        yield arrays
        halves[:], states[:] = arrays[:1], arrays[1:]
