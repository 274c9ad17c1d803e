"""Products with an FP8 matrix in XLA: tile by tile of its outputs, except on a CPU.

A dequantized tile stays in a GPU's second-level cache while it is multiplied. The memory of a layer is its FP8 weights
and one tile.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

TILE = 2**23  # maximum number of weights that are dequantized at once


def float8_matmul(x: jax.Array, weight: jax.Array, scale: jax.Array) -> jax.Array:
    """Implement `vlcache_jax.pallas_kernels.float8_matmul` for arguments that it has checked."""
    # Weights are the same at every step: the compiler would move their dequantization out of a loop over steps, and
    # before earlier layers, and store the results.
    x, weight, scale = lax.optimization_barrier((x, weight, scale))
    return lax.platform_dependent(x, weight, scale, cpu=_product, default=_tiled)


def dequantized(weight: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Dequantize a matrix, or a stack of them, `[..., O, K]`, to `dtype`."""
    *outputs, inputs = weight.shape
    groups = weight.astype(jnp.float32).reshape(*outputs, scale.shape[-1], -1)
    return (groups * scale[..., None]).astype(dtype).reshape(*outputs, inputs)


def tile_of(outputs: int, inputs: int) -> int:
    """Return the outputs of a tile: the largest number that divides all."""
    return next(outputs // n for n in range(1, outputs + 1) if outputs % n == 0 and outputs // n * inputs <= TILE)


def _tiled(x: jax.Array, weight: jax.Array, scale: jax.Array) -> jax.Array:
    outputs, inputs = weight.shape
    size = tile_of(outputs, inputs)
    if size == outputs:
        return _product(x, weight, scale)

    def tile(i: jax.Array, out: jax.Array) -> jax.Array:
        own, factors = (lax.dynamic_slice_in_dim(one, i * size, size) for one in (weight, scale))
        return lax.dynamic_update_slice_in_dim(out, _product(x, own, factors), i * size, 1)

    return lax.fori_loop(0, outputs // size, tile, jnp.zeros((len(x), outputs), x.dtype))


def _product(x: jax.Array, weight: jax.Array, scale: jax.Array) -> jax.Array:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    rows = (((1,), (1,)), ((), ()))
    return lax.dot_general(x, dequantized(weight, scale, x.dtype), rows, precision=precision)
