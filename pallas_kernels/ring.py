"""Blocks of the device's memory on their way through a few places in shared memory, one after the other.

From Hopper on TMA copies them and fills a barrier; before it threads issue asynchronous copies (`cp.async`), and wait
until no more than some are under way. While one block is multiplied, those that follow it are coming.
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
    """The places, and who fills them.

    Attributes:
      places: blocks that shared memory holds; one fewer are under way while one is used.
    """

    def __init__(self, places: int, copies: int, *, bulk: bool) -> None:
        """`copies`: of a block. `bulk`: they are TMA's."""
        self.places, self._copies, self._bulk = places, copies, bulk
        self._barriers: Any = None

    def barriers(self) -> list[Any]:
        """To be allocated in shared memory, and given to `begin`."""
        if not self._bulk:
            return []
        return [plgpu.Barrier(num_arrivals=self._copies, num_barriers=self.places)]

    def begin(self, barriers: Any) -> None:
        """Knows the barriers from now on."""
        self._barriers = barriers

    def place(self, number: Any) -> Any:
        """Of a block, by its number from 0 on."""
        return lax.rem(number, jnp.int32(self.places))

    def start(self, count: Any, fetches: Sequence[Fetch]) -> None:
        """Starts to load the first `places - 1` of `count` blocks. What was in the places must have been used, by this
        thread at least: before threads copy, Mosaic GPU lets them wait for each other."""
        if self._bulk:
            plgpu.commit_smem()  # orders what has been read before what TMA writes there
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
        """Waits for a block, and starts to load the one that is `places - 1` behind it, of `count` in all, into the
        place of the one before it, which everybody has used. Blocks are waited for in their order, each once.

        Returns:
          The place of the block.
        """
        following = number + (self.places - 1)
        more = following < count
        if self._bulk:
            plgpu.barrier_wait(self._barriers[0].at[self.place(number)])
            plgpu.commit_smem()  # as in `start`
        else:
            # Under way are the copies of this block, and of those behind it up to `following`.
            pl.when(more)(lambda: plgpu.wait_gmem_to_smem((self.places - 2) * self._copies))
            pl.when(following >= count)(lambda: plgpu.wait_gmem_to_smem(0))
        pl.when(more)(lambda: self._fetch(following, fetch))
        return self.place(number)
