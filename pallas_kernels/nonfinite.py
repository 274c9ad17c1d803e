"""Treatment of non-finite values by writers of keys and values."""

import jax
import jax.numpy as jnp


def propagate_nonfinite(k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Make values finite and mark them in the keys: if V is NaN or infinite, K becomes NaN and V 0. All else is
    unchanged.

    A weight of 0 does not silence a NaN in V, but a row that does not see a slot drops its score. One NaN in a key
    makes all its scores NaN. So a non-finite value reaches exactly the rows that see it, and attention need not check
    V.

    Args:
      k: Keys of any shape, rotated.
      v: Values of the shape of `k`.

    Returns:
      (k, v)
    """
    finite = jnp.isfinite(v)
    return jnp.where(finite, k, jnp.nan), jnp.where(finite, v, 0)
