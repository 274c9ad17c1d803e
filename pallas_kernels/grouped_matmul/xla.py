"""Grouped products in XLA, in loops over groups that have rows and over tiles of their rows.

Rows are sorted by expert, so that each expert's rows are multiplied together. Other experts and rows that are not
needed are not computed.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from vlcache_jax.pallas_kernels.quantized_matmul import dequantized

LEAST, MOST = 8, 128  # rows of a tile


def mix_experts(
    x: jax.Array,
    weight: jax.Array,
    expert: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    gate_up_scale: jax.Array | None = None,
    down_scale: jax.Array | None = None,
) -> jax.Array:
    """Implement `vlcache_jax.pallas_kernels.mix_experts` for arguments that it has checked.

    Args:
      expert: Counted from the first one on this device; experts that are elsewhere are E.
    """
    count, (N, k) = len(gate_up), expert.shape
    weight = jnp.where(expert < count, weight, 0)
    expert = expert.reshape(-1)
    order = jnp.argsort(expert, stable=True)  # choices of experts elsewhere are sorted after all experts
    sizes = jnp.zeros(count, jnp.int32).at[expert].add(1, mode="drop")
    gate, up = jnp.split(grouped_matmul(x[order // k], gate_up, sizes, gate_up_scale), 2, axis=1)
    made = grouped_matmul(jax.nn.silu(gate) * up, down, sizes, down_scale)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=order.dtype), unique_indices=True)
    parts = made[place].reshape(N, k, -1) * weight[:, :, None]
    return parts.sum(axis=1, dtype=jnp.float32)


def grouped_matmul(x: jax.Array, weights: jax.Array, sizes: jax.Array, scale: jax.Array | None = None) -> jax.Array:
    """Implement `vlcache_jax.pallas_kernels.grouped_matmul` for arguments that it has checked.

    A group's matrix is copied out once, dequantized if it is FP8, and stays in the processor's cache while the group's
    rows pass, one tile at a time. A group's last tile extends into the rows of the next groups, which overwrite its
    excess.
    """
    rows, groups = len(x), len(weights)
    tile = tile_of(rows, groups)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    end = jnp.cumsum(sizes)
    with_rows_first = jnp.argsort(sizes == 0, stable=True)
    padded = jnp.pad(x, ((0, tile), (0, 0)))
    # FP8 matrices are [out, in]: if they were transposed, the compiler would store a transposed copy of the stack.
    columns, inputs = (weights.shape[2], 0) if scale is None else (weights.shape[1], 1)

    def matrix_of(g: jax.Array) -> jax.Array:
        matrix = jax.lax.dynamic_index_in_dim(weights, g, keepdims=False)
        if scale is None:
            return matrix
        return dequantized(matrix, jax.lax.dynamic_index_in_dim(scale, g, keepdims=False), x.dtype)

    def group(i: jax.Array, out: jax.Array) -> jax.Array:
        g = with_rows_first[i]
        matrix = matrix_of(g)

        def step(j: jax.Array, out: jax.Array) -> jax.Array:
            first = end[g] - sizes[g] + j * tile
            own = jax.lax.dynamic_slice_in_dim(padded, first, tile)
            product = jax.lax.dot_general(own, matrix, (((1,), (inputs,)), ((), ())), precision=precision)
            return jax.lax.dynamic_update_slice_in_dim(out, product, first, 0)

        return jax.lax.fori_loop(0, -(-sizes[g] // tile), step, out)

    out = jnp.zeros((rows + tile, columns), x.dtype)
    out = jax.lax.fori_loop(0, (sizes > 0).sum(), group, out)[:rows]
    return jnp.where(jnp.arange(rows)[:, None] < end[-1], out, 0)


def tile_of(rows: int, groups: int) -> int:
    """Return the rows of a tile: fewer if groups are small."""
    return next(size for size in (MOST, 64, 32, 16, LEAST) if size == LEAST or 4 * size * groups <= rows)
