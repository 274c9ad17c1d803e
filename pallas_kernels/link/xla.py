"""Linking as an XLA program: a rotation, and scatters that drop what is out of range."""

import jax
import jax.numpy as jnp

from vlcache_jax.pallas_kernels.flaws import carry_flaws


def link(
    k_pool: jax.Array,
    v_pool: jax.Array,
    k_raw: jax.Array,
    v: jax.Array,
    slot: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The contract of `vlcache_jax.pallas_kernels.link`, for arguments that it has checked."""
    a, b = jnp.split(k_raw, 2, axis=-1)
    rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    k, v = carry_flaws(rotated, v)
    k_pool = k_pool.at[slot].set(k, mode="drop", unique_indices=True)
    v_pool = v_pool.at[slot].set(v, mode="drop", unique_indices=True)
    return k_pool, v_pool
