"""Rotation of heads, for all XLA programs."""

import jax
import jax.numpy as jnp


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate the halves of the last axis as pairs: x `[N, H, D]`, cos and sin `[N, 1, D / 2]`.

    If cos and sin are narrower, only the first values of each head rotate, twice as many as their width.
    """
    width = 2 * cos.shape[-1]
    a, b = jnp.split(x[..., :width], 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., width:]], axis=-1)
