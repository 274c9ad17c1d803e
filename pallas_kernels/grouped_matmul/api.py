"""The contract of grouped products."""

from __future__ import annotations

import jax

from vlcache_jax.pallas_kernels.grouped_matmul.xla import grouped_matmul_xla


def grouped_matmul(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """Multiplies each row by the matrix of its group, as `jax.lax.ragged_dot` does.

    Operations follow the rows, and only matrices of groups that have rows are read. (What XLA makes of `ragged_dot` on
    CPUs and GPUs multiplies every row by every matrix.)

    Args:
      x: rows sorted by group, [R, K].
      weights: a matrix of each group, [E, K, N], of the same dtype.
      sizes: rows of each group, int32 [E]; rows beyond all of them belong to no group.

    Returns:
      [R, N] in the dtype of `x`; 0 where a row belongs to no group.

    Raises:
      ValueError: shapes or dtypes that do not go together.
    """
    if x.ndim != 2 or weights.ndim != 3 or weights.shape[1] != x.shape[1] or x.dtype != weights.dtype:
        raise ValueError(f"weights must be [E, {x.shape[-1]}, N] in {x.dtype}, got {weights.shape} in {weights.dtype}")
    if sizes.shape != weights.shape[:1]:
        raise ValueError(f"sizes must be [{len(weights)}], one for each matrix, got {sizes.shape}")
    return grouped_matmul_xla(x, weights, sizes)
