"""Linking as an XLA program: a rotation, and scatters that drop out-of-range slots."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from vlcache_jax.pallas_kernels.link.codec import Codec, overflow
from vlcache_jax.pallas_kernels.nonfinite import propagate_nonfinite
from vlcache_jax.pallas_kernels.rotation import rotate

# Minimum tokens of an image that is written alone, because a CPU copies concatenated arrays twice. Small images are
# concatenated; otherwise the program would grow with their number.
LARGE = 512


def link(
    k_pool: jax.Array,
    v_pool: jax.Array,
    images: Sequence[Sequence[jax.Array]],
    source: jax.Array | None,
    slot: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    bias: jax.Array | None = None,
    weight: jax.Array | None = None,
    *,
    layer: int,
    codec: Codec | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Implement `vlcache_jax.pallas_kernels.link` for arguments that it has checked."""
    size = len(slot) // len(images)
    tokens = slice(size) if source is None else source
    read = functools.partial(
        _read, layer=layer, tokens=tokens, dtype=k_pool.dtype, bias=bias, weight=weight, codec=codec
    )
    together = max(LARGE // size, 1)
    for first in range(0, len(images), together):
        several = zip(*map(read, images[first : first + together]), strict=True)
        k_raw, v = (jnp.concatenate(halves) for halves in several)
        part = slice(first * size, first * size + len(v))
        k_pool, v_pool = _write(k_pool, v_pool, k_raw, v, slot[part], cos[part], sin[part])
    return k_pool, v_pool


def _write(
    k_pool: jax.Array,
    v_pool: jax.Array,
    k_raw: jax.Array,
    v: jax.Array,
    slot: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    k, v = propagate_nonfinite(rotate(k_raw, cos, sin), v)
    k_pool = k_pool.at[slot].set(k, mode="drop", unique_indices=True)
    return k_pool, v_pool.at[slot].set(v, mode="drop", unique_indices=True)


def _read(
    buffers: Sequence[jax.Array], *, layer: int, tokens: Any, dtype: Any, bias: Any, weight: Any, codec: Codec | None
) -> tuple[jax.Array, jax.Array]:
    """Return keys before rotation and values of an image, in the pool's dtype."""
    keys, values = ([buffer[layer, half, tokens] for buffer in buffers] for half in range(2))
    if codec is None:
        return keys[0], values[0]
    k_raw, v = codec.decode(keys[0], keys[1], bias, weight), codec.decode(values[0], values[1])
    # XLA may leave out a rounding before a test for infinity. Values beyond the dtype's range are not finite.
    return k_raw.astype(dtype), jnp.where(jnp.abs(v) < overflow(dtype), v, jnp.nan).astype(dtype)
