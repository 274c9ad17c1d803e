"""Linking as an XLA program: a rotation, and scatters that drop what is out of range."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from vlcache_jax.pallas_kernels.flaws import carry_flaws
from vlcache_jax.pallas_kernels.link.codec import Codec, overflow

# Tokens of an image that is written alone: a CPU copies what is concatenated twice. Small images are concatenated, as
# the program would grow with their number.
LARGE = 512


def link(
    k_pool: jax.Array,
    v_pool: jax.Array,
    images: Sequence[jax.Array],
    slot: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    bias: jax.Array | None = None,
    weight: jax.Array | None = None,
    *,
    layer: int,
    codec: Codec | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The contract of `vlcache_jax.pallas_kernels.link`, for arguments that it has checked."""
    read = functools.partial(_read, layer=layer, like=k_pool, bias=bias, weight=weight, codec=codec)
    size = len(slot) // len(images)
    together = max(LARGE // size, 1)
    for first in range(0, len(images), together):
        several = zip(*map(read, images[first : first + together]), strict=True)
        k_raw, v = (jnp.concatenate(halves) for halves in several)
        part = slice(first * size, first * size + len(v))
        k_pool, v_pool = _write(k_pool, v_pool, k_raw, v, slot[part], cos[part], sin[part])
    return k_pool, v_pool


def recall(
    k_pool: jax.Array,
    v_pool: jax.Array,
    planes: Sequence[jax.Array],
    source: jax.Array,
    slot: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    bias: jax.Array | None = None,
    weight: jax.Array | None = None,
    *,
    codec: Codec | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The contract of `vlcache_jax.pallas_kernels.recall`, for arguments that it has checked."""
    k_raw, v = (jnp.concatenate([plane[half, source] for plane in planes], -1) for half in range(2))
    if codec is not None:
        _, K, D = k_pool.shape
        k_raw, v = _rounded(codec.decode(k_raw, K, D, bias, weight), codec.decode(v, K, D), k_pool.dtype)
    return _write(k_pool, v_pool, k_raw, v, slot, cos, sin)


def _write(
    k_pool: jax.Array,
    v_pool: jax.Array,
    k_raw: jax.Array,
    v: jax.Array,
    slot: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    a, b = jnp.split(k_raw, 2, axis=-1)
    rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    k, v = carry_flaws(rotated, v)
    k_pool = k_pool.at[slot].set(k, mode="drop", unique_indices=True)
    return k_pool, v_pool.at[slot].set(v, mode="drop", unique_indices=True)


def _read(
    data: jax.Array, *, layer: int, like: jax.Array, bias: Any, weight: Any, codec: Codec | None
) -> tuple[jax.Array, jax.Array]:
    """An image's keys before rotation and values, in the pool's dtype."""
    if codec is None:
        return data[layer, 0], data[layer, 1]
    _, K, D = like.shape
    k_raw = codec.decode_block(data[layer, 0], K, D, bias, weight)
    return _rounded(k_raw, codec.decode_block(data[layer, 1], K, D), like.dtype)


def _rounded(k_raw: jax.Array, v: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    # XLA may leave out a rounding in front of a test for infinity. What the dtype does not hold is not finite.
    return k_raw.astype(dtype), jnp.where(jnp.abs(v) < overflow(dtype), v, jnp.nan).astype(dtype)
