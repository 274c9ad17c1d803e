"""Linking as a Mosaic GPU kernel for Hopper: one pass over memory, in place.

Each program copies a few tokens into shared memory, turns their keys there, and copies every token's keys and values to
its slot, unless that is out of range. Programs are small, so that many run on a multiprocessor and cover each other's
waiting.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

TOKENS = 8  # of a program
WARPS, LANES = 4, 32


def check(k_pool: jax.Array) -> None:
    """Raises NotImplementedError, with the reason, for a case that the kernel does not do."""
    if k_pool.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"mosaic_gpu links bfloat16 and float16, got k_pool in {k_pool.dtype}")
    if k_pool.shape[2] not in (64, 128):
        raise NotImplementedError(f"mosaic_gpu links heads of width 64 and 128, got {k_pool.shape[2]}")
    if k_pool.shape[1] > 256 // TOKENS:  # rows of a bulk copy
        raise NotImplementedError(f"mosaic_gpu links up to {256 // TOKENS} heads, got {k_pool.shape[1]}")


# An inner jit: a program that links all layers compiles one kernel.
@functools.partial(jax.jit, static_argnames=("interpret",))
def link(
    k_pool: jax.Array,
    v_pool: jax.Array,
    k_raw: jax.Array,
    v: jax.Array,
    slot: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The contract of `vlcache_jax.pallas_kernels.link`, for arguments that it and `check` have checked."""
    S, (T, K, D) = len(k_pool), k_raw.shape
    half = D // 2
    # Four heads, one for each warp, are turned at once. Where they are of several tokens, so are the angles.
    rows = K if K % WARPS == 0 else WARPS
    if rows != K:
        cos, sin = (jnp.broadcast_to(x, (T, K, half)) for x in (cos, sin))
    layout = plgpu.Layout.TILED(
        plgpu.Tiling(((WARPS, half), (half // LANES,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
    )
    slot = jnp.pad(slot, (0, -T % TOKENS), constant_values=S)

    def load(ref: Any) -> jax.Array:
        return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

    def load_angles(ref: Any, i: int) -> jax.Array:
        if rows == K:
            x = plgpu.load(ref.at[i], layout=layout.reduce(0), optimized=False)
            return lax.broadcast_in_dim(x.astype(jnp.float32), (rows, half), [1])
        return load(ref.at[pl.ds(i * rows, rows)])

    def link_kernel(k_ref: Any, v_ref: Any, slot_ref: Any, cos_ref: Any, sin_ref: Any, k_out: Any, v_out: Any) -> None:
        def program(k_smem: Any, v_smem: Any, cos_smem: Any, sin_smem: Any, here: Any) -> None:
            first = lax.axis_index("tokens") * TOKENS
            for source, target in ((k_ref, k_smem), (v_ref, v_smem), (cos_ref, cos_smem), (sin_ref, sin_smem)):
                each = target.shape[0] // TOKENS
                plgpu.copy_gmem_to_smem(source.at[pl.ds(first * each, TOKENS * each)], target, here)
            plgpu.barrier_wait(here)
            for i in range(TOKENS * K // rows):
                c, s = load_angles(cos_smem, i), load_angles(sin_smem, i)
                halves = [(pl.ds(i * rows, rows), pl.ds(start, half)) for start in (0, half)]
                a, b = (load(k_smem.at[part]) for part in halves)
                for part, turned in zip(halves, (a * c - b * s, b * c + a * s), strict=True):
                    value = load(v_smem.at[part])
                    finite = jnp.abs(value) < jnp.inf  # see `carry_flaws`
                    k_smem[part] = jnp.where(finite, turned, jnp.nan).astype(k_pool.dtype)
                    v_smem[part] = jnp.where(finite, value, 0.0).astype(v_pool.dtype)
            plgpu.commit_smem()
            for i in range(TOKENS):
                place = slot_ref[first + i]

                def copy(i: int = i, place: Any = place) -> None:
                    plgpu.copy_smem_to_gmem(k_smem.at[pl.ds(i * K, K)], k_out.at[place])
                    plgpu.copy_smem_to_gmem(v_smem.at[pl.ds(i * K, K)], v_out.at[place])

                pl.when((place >= 0) & (place < S))(copy)
            plgpu.wait_smem_to_gmem(0)

        pl.run_scoped(
            program,
            *[plgpu.SMEM((TOKENS * K, D), k_pool.dtype)] * 2,
            *[plgpu.SMEM((TOKENS * (1 if rows == K else K), half), cos.dtype)] * 2,
            plgpu.Barrier(num_arrivals=4),
        )

    k_ref, v_ref = jax.new_ref(k_pool), jax.new_ref(v_pool)
    plgpu.kernel(
        link_kernel,
        grid=(len(slot) // TOKENS,),
        grid_names=("tokens",),
        interpret=interpret,
    )(
        *(x.reshape(-1, x.shape[-1]) for x in (k_raw, v)),
        slot,
        cos.reshape(-1, half),
        sin.reshape(-1, half),
        k_ref,
        v_ref,
    )
    return jax.freeze(k_ref), jax.freeze(v_ref)
