"""Attention scores as two Mosaic GPU kernels for Hopper.

The first computes each row's largest score and sum of weights: programs share the pages that a tile of rows sees. A
program of the second has one page of one key-value head and iterates over all rows. Keys are the rows of its matrix
product, so that sums over queries stay within a few threads. Programs are small, so that several run on a
multiprocessor and hide each other's latency.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from vlcache_jax.pallas_kernels.attention.mosaic_gpu import ACC, LOWEST, MULTIPROCESSORS, ROW, WGMMA, M, tiled
from vlcache_jax.pallas_kernels.attention.work import PAGE

STAGES = 2  # blocks in flight
ENOUGH = 4 * MULTIPROCESSORS  # programs that keep a device busy
COLUMN = WGMMA.reduce(0)
TO_EXPONENT = math.log2(math.e)  # weights are powers of 2


@functools.partial(jax.jit, static_argnames=("scale", "interpret"))
def attention_statistics(
    q: jax.Array,
    k: jax.Array,
    table: jax.Array,
    place: jax.Array,
    p: jax.Array,
    *,
    scale: float,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Implement `vlcache_jax.pallas_kernels.attention_statistics` for arguments that it has checked.

    The pool is copied only if D is no multiple of 32.
    """
    N, H, D = q.shape
    K, B = k.shape[1], len(table)
    q, k = (jnp.pad(x, ((0, 0), (0, 0), (0, -D % 32))) for x in (q, k))
    # Rows of each query head in their own tiles, [K, G * rows, D]; the padding of the last tile sees nothing.
    q = jnp.pad(q, ((0, -N % M), (0, 0), (0, 0))).swapaxes(0, 1).reshape(K, -1, q.shape[2])
    place = jnp.pad(place, (0, -N % M), constant_values=-1)
    pages = (place.reshape(-1, M).max(1) + PAGE) // PAGE
    pages = jnp.append(pages, pages.max())  # pages that the rows of each tile see, and those of any
    lists = table, place, pages
    largest, weight = _rows(q, k, *lists, scale * TO_EXPONENT, interpret)
    total = largest.max(0)
    weight = (weight * jnp.exp2(largest - total)).sum(0)
    share = jnp.where(weight == 0, 0, 1 / (H // K * weight))
    p = p.reshape(1).astype(jnp.float32)
    received, zeros = _columns(q, k, *lists, total, share, p, H // K, scale * TO_EXPONENT, interpret)
    return received.reshape(K, B * PAGE), zeros.reshape(H, B).sum(1)


def _rows(
    q: jax.Array,
    k: jax.Array,
    table: jax.Array,
    place: jax.Array,
    pages: jax.Array,
    to_exponent: float,
    interpret: plgpu.InterpretGPUParams | None,
) -> tuple[jax.Array, jax.Array]:
    """Return largest scores as exponents of 2, and sums of weights relative to them, for q `[K, R, D]`.

    Both are float32 `[splits, K * R]`; pages alternate between splits.
    """
    K, R, D = q.shape
    tiles, of_head = R // M, len(place) // M
    programs = ENOUGH if interpret is None else 3  # each sees several pages
    splits = max(1, min(len(table), programs // (K * tiles)))

    def rows_kernel(q_ref: Any, k_ref: Any, table_ref: Any, place_ref: Any, pages_ref: Any, *refs: Any) -> None:
        def program(q_smem: Any, k_smem: Any, q_here: Any, k_here: Any) -> None:
            head, tile, split = (lax.axis_index(name) for name in ("head", "tile", "split"))
            own = lax.rem(tile, of_head)
            count = lax.div(pages_ref[own] + (splits - 1) - split, splits)

            def fetch(i: Any) -> None:
                slots = pl.ds(table_ref[split + i * splits] * PAGE, PAGE)
                stage = lax.rem(i, jnp.int32(STAGES))
                plgpu.copy_gmem_to_smem(k_ref.at[slots, head], k_smem.at[stage], k_here.at[stage])

            plgpu.copy_gmem_to_smem(q_ref.at[head, pl.ds(tile * M, M)], q_smem, q_here)
            for i in range(STAGES):
                pl.when(i < count)(functools.partial(fetch, jnp.int32(i)))
            last = plgpu.load(place_ref.at[pl.ds(own * M, M)], layout=ROW, optimized=False)
            plgpu.barrier_wait(q_here)

            def visit(i: Any, state: Any) -> Any:
                largest, weight = state
                stage = lax.rem(i, jnp.int32(STAGES))
                plgpu.barrier_wait(k_here.at[stage])
                x = _product(q_smem, k_smem.at[stage])
                pl.when(i + STAGES < count)(lambda: fetch(i + STAGES))
                slot = plgpu.broadcasted_iota(jnp.int32, (M, PAGE), 1, layout=WGMMA)
                seen = slot <= lax.broadcast_in_dim(last - (split + i * splits) * PAGE, (M, PAGE), [0])
                x = jnp.where(seen, x, -jnp.inf)
                new = jnp.maximum(largest, x.max(axis=1) * to_exponent)
                part = jnp.exp2(x * to_exponent - lax.broadcast_in_dim(new, (M, PAGE), [0]))
                return new, weight * jnp.exp2(largest - new) + part.sum(axis=1)

            state = (
                plgpu.layout_cast(jnp.full((M,), LOWEST, jnp.float32), ROW),
                plgpu.layout_cast(jnp.zeros((M,), jnp.float32), ROW),
            )
            at = pl.ds((split * K + head) * R + tile * M, M)
            for ref, value in zip(refs, lax.fori_loop(0, count, visit, state), strict=True):
                ref[at] = value

        pl.run_scoped(
            program, tiled((M, D), q.dtype, D), tiled((STAGES, PAGE, D), q.dtype, D),
            plgpu.Barrier(), plgpu.Barrier(num_barriers=STAGES),
        )  # fmt: skip

    out = jax.ShapeDtypeStruct((splits * K * R,), jnp.float32)
    found = plgpu.kernel(
        rows_kernel,
        out_type=[out, out],
        grid=(K, tiles, splits),
        grid_names=("head", "tile", "split"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(q, k, table, place, pages)
    largest, weight = (x.reshape(splits, -1) for x in found)
    return largest, weight


def _columns(
    q: jax.Array,
    k: jax.Array,
    table: jax.Array,
    place: jax.Array,
    pages: jax.Array,
    largest: jax.Array,
    share: jax.Array,
    p: jax.Array,
    group: int,
    to_exponent: float,
    interpret: plgpu.InterpretGPUParams | None,
) -> tuple[jax.Array, jax.Array]:
    """Return the sums that slots receive, float32 `[K * 128 B]`, and the counts of small weights, int32 `[H * B]`.

    `largest` and `share`, which is 1 / (G * weight), are of the rows, `[K * R]`.
    """
    (K, R, D), B = q.shape, len(table)
    of_head, halves = len(place) // M, PAGE // M

    def columns_kernel(*refs: Any) -> None:
        q_ref, k_ref, table_ref, place_ref, pages_ref, largest_ref, share_ref, p_ref, received_ref, zeros_ref = refs
        head, page = lax.axis_index("head"), lax.axis_index("page")

        def write(received: Any) -> None:
            for half, value in enumerate(received):
                received_ref[pl.ds((head * B + page) * PAGE + half * M, M)] = value

        def none(dtype: Any) -> jax.Array:
            return plgpu.layout_cast(jnp.zeros((M,), dtype), ROW)

        def program(q_smem: Any, k_smem: Any, q_here: Any, k_here: Any) -> None:
            def fetch(i: Any) -> None:
                stage = lax.rem(i, jnp.int32(STAGES))
                plgpu.copy_gmem_to_smem(q_ref.at[head, pl.ds(i * M, M)], q_smem.at[stage], q_here.at[stage])

            for half in range(halves):
                slots = pl.ds(table_ref[page] * PAGE + half * M, M)
                plgpu.copy_gmem_to_smem(k_ref.at[slots, head], k_smem.at[half], k_here)
            for i in range(min(STAGES, R // M)):
                fetch(jnp.int32(i))
            threshold = p_ref[0]
            plgpu.barrier_wait(k_here)

            def add_tile(i: Any, state: Any) -> Any:
                *received, zeros = state
                stage = lax.rem(i, jnp.int32(STAGES))
                at, own = pl.ds(head * R + i * M, M), pl.ds(lax.rem(i, of_head) * M, M)
                last, top, own_share = (
                    lax.broadcast_in_dim(plgpu.load(x, layout=COLUMN, optimized=False), (M, M), [1])
                    for x in (place_ref.at[own], largest_ref.at[at], share_ref.at[at])
                )
                plgpu.barrier_wait(q_here.at[stage])
                for half in range(halves):
                    x = _product(k_smem.at[half], q_smem.at[stage])
                    slot = plgpu.broadcasted_iota(jnp.int32, (M, M), 0, layout=WGMMA)
                    seen = slot + (page * PAGE + half * M) <= last
                    part = jnp.exp2(x * to_exponent - top)  # part of the row's largest weight
                    received[half] += jnp.where(seen, part * own_share, 0.0).sum(axis=1)
                    zeros += jnp.where(seen, jnp.where(part < threshold, 1, 0), 0).sum(axis=1)
                pl.when(i + STAGES < R // M)(lambda: fetch(i + STAGES))
                return *received, zeros

            def add_head(g: Any, received: Any) -> Any:
                state = *received, none(jnp.int32)
                *received, zeros = lax.fori_loop(g * of_head, (g + 1) * of_head, add_tile, state)
                zeros_ref[(head * group + g) * B + page] = zeros.sum()
                return tuple(received)

            write(lax.fori_loop(0, group, add_head, (none(jnp.float32),) * halves))

        def see() -> None:
            pl.run_scoped(
                program, tiled((STAGES, M, D), q.dtype, D), tiled((halves, M, D), q.dtype, D),
                plgpu.Barrier(num_barriers=STAGES), plgpu.Barrier(num_arrivals=halves),
            )  # fmt: skip

        def see_nothing() -> None:
            write([none(jnp.float32)] * halves)
            for g in range(group):
                zeros_ref[(head * group + g) * B + page] = 0

        seen = page < pages_ref[of_head]
        pl.when(seen)(see)
        pl.when(~seen)(see_nothing)

    received, zeros = plgpu.kernel(
        columns_kernel,
        out_type=[
            jax.ShapeDtypeStruct((K * B * PAGE,), jnp.float32),
            jax.ShapeDtypeStruct((K * group * B,), jnp.int32),
        ],
        grid=(K, B),
        grid_names=("head", "page"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(q, k, table, place, pages, largest, share, p)
    return received, zeros


def _product(a: Any, b: Any) -> jax.Array:
    """Return a `[64, D]` times b `[n, D]` transposed, both in shared memory."""

    def multiply(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, a, b.T)
        return acc[...]

    x: jax.Array = pl.run_scoped(multiply, ACC((a.shape[0], b.shape[0])))
    return x
