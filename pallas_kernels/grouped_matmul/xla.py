"""Grouped products in loops over what there is: groups that have rows, and tiles of their rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp

LEAST, MOST = 8, 128  # rows of a tile


def grouped_matmul_xla(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """See `grouped_matmul`.

    A group's matrix is copied out once, where it stays in the processor's cache while the group's rows pass, a tile at
    a time. A group's last tile reaches into the rows of those behind it, which overwrite what it leaves there.
    """
    rows, groups = len(x), len(weights)
    tile = next(size for size in (MOST, 64, 32, 16, LEAST) if size == LEAST or 4 * size * groups <= rows)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    end = jnp.cumsum(sizes)
    with_rows_first = jnp.argsort(sizes == 0, stable=True)
    padded = jnp.pad(x, ((0, tile), (0, 0)))

    def group(i: jax.Array, out: jax.Array) -> jax.Array:
        g = with_rows_first[i]
        matrix = jax.lax.dynamic_index_in_dim(weights, g, keepdims=False)

        def step(j: jax.Array, out: jax.Array) -> jax.Array:
            first = end[g] - sizes[g] + j * tile
            own = jax.lax.dynamic_slice_in_dim(padded, first, tile)
            product = jnp.dot(own, matrix, precision=precision)
            return jax.lax.dynamic_update_slice_in_dim(out, product, first, 0)

        return jax.lax.fori_loop(0, -(-sizes[g] // tile), step, out)

    out = jnp.zeros((rows + tile, weights.shape[2]), x.dtype)
    out = jax.lax.fori_loop(0, (sizes > 0).sum(), group, out)[:rows]
    return jnp.where(jnp.arange(rows)[:, None] < end[-1], out, 0)
