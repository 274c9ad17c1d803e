"""Ring buffer in shared memory for blocks that are loaded from device memory ahead of their use.

Since Hopper, TMA copies them and fills a barrier. Before it, threads issue asynchronous copies (`cp.async`), and wait
until no more than some are in flight. While one block is multiplied, the next ones are loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

Fetch = Callable[[Any, Callable[[Any, Any], None]], None]  # (place, copy) issues `copies` copies of (source, target)


class Ring:
    """The places of the ring and the method that fills them.

    Attributes:
      places: Blocks that shared memory holds; one fewer are in flight while one is used.
    """

    def __init__(self, places: int, copies: int, *, bulk: bool) -> None:
        """Take the number of `copies` of a block; `bulk`: TMA copies."""
        self.places, self._copies, self._bulk = places, copies, bulk
        self._barriers: Any = None

    def barriers(self) -> list[Any]:
        """Return the barriers to allocate in shared memory and to pass to `begin`."""
        if not self._bulk:
            return []
        return [plgpu.Barrier(num_arrivals=self._copies, num_barriers=self.places)]

    def begin(self, barriers: Any) -> None:
        """Set the barriers."""
        self._barriers = barriers

    def place(self, number: Any) -> Any:
        """Return the place of a block, by its number from 0 on."""
        return lax.rem(number, jnp.int32(self.places))

    def start(self, count: Any, fetches: Sequence[Fetch]) -> None:
        """Start to load the first `places - 1` of `count` blocks.

        This thread must have used the contents of the places. Before threads copy, Mosaic GPU lets them wait for each
        other.
        """
        if self._bulk:
            plgpu.commit_smem()  # orders earlier reads before TMA's writes there
        for number, fetch in enumerate(fetches):
            pl.when(number < count)(functools.partial(self._fetch, jnp.int32(number), fetch))

    def _fetch(self, number: Any, fetch: Fetch) -> None:
        place = self.place(number)

        def copy(source: Any, target: Any) -> None:
            if self._bulk:
                plgpu.copy_gmem_to_smem(source, target, self._barriers[0].at[place])
            else:
                plgpu.copy_gmem_to_smem(source, target, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)

        fetch(place, copy)

    def step(self, number: Any, count: Any, fetch: Fetch) -> Any:
        """Wait for a block, and start to load the one `places - 1` after it, of `count` in all.

        The new block replaces the one before the awaited block, which all threads have used. Blocks are waited for in
        order, each once.

        Returns:
          The place of the block.
        """
        following = number + (self.places - 1)
        more = following < count
        if self._bulk:
            plgpu.barrier_wait(self._barriers[0].at[self.place(number)])
            plgpu.commit_smem()  # as in `start`
        else:
            # In flight are the copies of this block, and of the next blocks up to `following`.
            pl.when(more)(lambda: plgpu.wait_gmem_to_smem((self.places - 2) * self._copies))
            pl.when(following >= count)(lambda: plgpu.wait_gmem_to_smem(0))
        pl.when(more)(lambda: self._fetch(following, fetch))
        return self.place(number)
