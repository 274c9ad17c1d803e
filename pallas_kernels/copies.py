"""Small copies between device memory and shared memory: by TMA (since Hopper) or by threads.

Threads pass copied data through their registers. Mosaic GPU puts a barrier before and after all writes to shared
memory, so such copies need no wait.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

THREADS, LANES = 128, 32  # of a program, of a warp


class Copies:
    """Method of copying.

    Attributes:
      bulk: TMA copies; otherwise threads do.
    """

    def __init__(self, *, bulk: bool) -> None:
        self.bulk = bulk

    def barrier(self, count: int) -> list[Any]:
        """Return the barriers to allocate in shared memory for `count` copies that are waited for together."""
        return [plgpu.Barrier(num_arrivals=count)] * self.bulk

    def fetch(self, pairs: Sequence[tuple[Any, Any]], barrier: Sequence[Any]) -> None:
        """Copy each (source, target) to shared memory, and wait for all."""
        if self.bulk:
            for source, target in pairs:
                plgpu.copy_gmem_to_smem(source, target, barrier[0])
            plgpu.barrier_wait(barrier[0])
            return
        pieces = [piece for source, target in pairs for piece in _pieces(source, target)]
        for (_, target), value in zip(pieces, [_load(source) for source, _ in pieces], strict=True):
            target[...] = value

    def commit(self) -> None:
        """Make the threads' writes to shared memory visible to copies from there."""
        if self.bulk:
            plgpu.commit_smem()

    def put(self, source: Any, target: Any) -> None:
        """Copy from shared memory."""
        if self.bulk:
            plgpu.copy_smem_to_gmem(source, target)
            return
        for own, place in _pieces(source, target):
            place[...] = _load(own)

    def finish(self) -> None:
        """Wait until no copy reads the program's shared memory; called before the program ends."""
        if self.bulk:
            plgpu.wait_smem_to_gmem(0)


def _pieces(source: Any, target: Any) -> list[tuple[Any, Any]]:
    """Return the parts in which threads copy: all at once if each thread has as much, else row by row."""
    if len(source.shape) == 1 or math.prod(source.shape) % THREADS == 0:
        return [(source, target)]
    return [(source.at[i], target.at[i]) for i in range(source.shape[0])]


def _load(ref: Any) -> jax.Array:
    size = math.prod(ref.shape)
    layout: Any
    if size % THREADS == 0:
        vector = next(n for n in (4, 2, 1) if size % (THREADS * n) == 0 and ref.shape[-1] % n == 0)
        layout = plgpu.Layout.WG_STRIDED(ref.shape, vector)
    else:  # too few for all threads: each warp copies and writes the same
        layout = plgpu.Layout.TILED(
            plgpu.Tiling(((size,), (size // LANES,))),
            warp_dims=(plgpu.Replicated(THREADS // LANES),),
            lane_dims=(-2,),
            vector_dim=-1,
        )
    loaded: jax.Array = plgpu.load(ref, layout=layout, optimized=False)
    return loaded
