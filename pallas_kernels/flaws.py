"""What writers of K and V do with values that are not finite."""

import jax
import jax.numpy as jnp


def carry_flaws(k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """K and V as they may be read: where V is NaN or infinite, K becomes NaN and V 0. All else stays, bit for bit.

    A weight of 0 does not silence a NaN in V, but whoever does not see a slot drops its score. One NaN in a key makes
    all its scores NaN, so a flaw reaches exactly the rows that see it, and attention need not look for flaws in V.

    Args:
      k: Keys of any shape, rotated.
      v: Values of the shape of `k`.

    Returns:
      (k, v)
    """
    finite = jnp.isfinite(v)
    return jnp.where(finite, k, jnp.nan), jnp.where(finite, v, 0)
