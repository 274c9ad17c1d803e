"""Operations on rows as XLA programs."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from vlcache_jax.pallas_kernels.nonfinite import propagate_nonfinite
from vlcache_jax.pallas_kernels.rotation import rotate


def rms_norm(x: jax.Array, scale: jax.Array, eps: float, offset: bool = False) -> jax.Array:
    """Normalize the last axis in float32, and round *before* multiplying by the weight, as the transformers library
    does.

    With `offset`, multiply by 1 + scale in float32, and round once.
    """
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + eps)
    if offset:
        return (y * (1 + scale.astype(jnp.float32))).astype(x.dtype)
    return y.astype(x.dtype) * scale


def norm_residual(
    x: jax.Array, delta: jax.Array | None, scale: jax.Array, *, eps: float, offset: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Implement `vlcache_jax.pallas_kernels.norm_residual` for arguments that it has checked."""
    if delta is not None and delta.ndim == 3:
        delta = delta[:, : len(x)].sum(0).astype(x.dtype)
    x = x if delta is None else x + delta
    return x, rms_norm(x, scale, eps, offset)


def rotated(
    parts: Sequence[jax.Array],
    cos: jax.Array,
    sin: jax.Array,
    *,
    bias: jax.Array | None = None,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
    eps: float = 0.0,
    offset: bool = False,
    keep: int,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Compute the heads of `vlcache_jax.pallas_kernels.rotate_write`, before anything is written.

    Returns:
      (q `[keep, H, D]`, rotated k, raw k, v `[N, K, D]`)
    """
    if bias is not None:
        parts = [part + bias[:, -part.shape[2] :] for part in parts]
    q = parts[0][:keep, :, :-2].reshape(keep, -1, parts[0].shape[3])
    raw_k, v = (jnp.concatenate([part[:, :, place] for part in parts]) for place in (-2, -1))
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps, offset)
    if k_norm is not None:
        raw_k = rms_norm(raw_k, k_norm, eps, offset)
    return rotate(q, cos[:keep], sin[:keep]), rotate(raw_k, cos, sin), raw_k, v


def rotate_write(
    parts: Sequence[jax.Array],
    cos: jax.Array,
    sin: jax.Array,
    slot: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    bias: jax.Array | None,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
    places: jax.Array | None,
    *,
    eps: float,
    offset: bool = False,
    keep: int,
) -> tuple[jax.Array, jax.Array, jax.Array, tuple[jax.Array, jax.Array]]:
    """Implement `vlcache_jax.pallas_kernels.rotate_write` for arguments that it has checked."""
    q, k, raw_k, raw_v = rotated(
        parts, cos, sin, bias=bias, q_norm=q_norm, k_norm=k_norm, eps=eps, offset=offset, keep=keep
    )
    if places is not None:
        q = q.at[places].get(mode="clip")
    k, v = propagate_nonfinite(k, raw_v)
    k_pool = k_pool.at[slot].set(k, mode="drop", unique_indices=True)
    v_pool = v_pool.at[slot].set(v, mode="drop", unique_indices=True)
    return q, k_pool, v_pool, (raw_k, raw_v)
