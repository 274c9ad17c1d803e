"""The public functions for rows: their contracts, and the checks of their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from vlcache_jax.pallas_kernels import dispatch
from vlcache_jax.pallas_kernels.rows import xla
from vlcache_jax.pallas_kernels.split import FIRST, SECOND, WHOLE, spreads

WIDEST_OF_PARTIALS = 8192  # numbers of a row that registers hold in addition to its partial sums


@spreads(gives=WHOLE, x=WHOLE, delta=WHOLE, scale=WHOLE)
def norm_residual(
    x: jax.Array,
    delta: jax.Array | None,
    scale: jax.Array,
    *,
    eps: float,
    offset: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Add a layer's output to its rows, and normalize the sum by its root mean square.

    The sum is rounded to its dtype. The mean of squares is float32. The normalized row is rounded before it is
    multiplied by the weight, as in the transformers library.

    Args:
      x: Rows `[N, M]`.
      delta: `[N, M]` in the dtype of `x`; or partial sums, float32 `[P, n, M]`, whose sum is rounded first and whose
        rows from `N` on are ignored; None adds nothing.
      scale: The norm's weight, `[M]`, in the dtype of `x`.
      eps: Added to the mean of squares.
      offset: The weight is 1 + `scale`, in float32, and the product is rounded once; the kernel does not do this.
      implementation: As in `vlcache_jax.pallas_kernels.attention`; the kernel does bfloat16 and float16.

    Returns:
      (sum, normed sum), both `[N, M]`.

    Raises:
      ValueError: An argument is wrong; the message names it.
      NotImplementedError: The requested implementation does not support this case.
    """
    if x.ndim != 2:
        raise ValueError(f"x must have shape [N, M], got {list(x.shape)}")
    _check_like("scale", scale, x.shape[1:], x.dtype)
    if delta is not None and delta.ndim == 3:
        partials, rows, _ = delta.shape
        _check_like("delta", delta, (max(partials, 1), max(rows, len(x)), x.shape[1]), jnp.float32)
    else:
        _check_like("delta", delta, x.shape, x.dtype)
    added = "" if delta is None else ", added" if delta.ndim == 2 else f", {len(delta)} partial sums added"
    choice = _choose_norm(x, f"{x.dtype} {list(x.shape)}{added}", implementation, offset)
    if choice.implementation == "xla":
        return xla.norm_residual(x, delta, scale, eps=eps, offset=offset)
    from vlcache_jax.pallas_kernels.rows import mosaic_gpu

    return mosaic_gpu.norm_residual(x, delta, scale, eps=eps, interpret=dispatch.interpreter(choice))


def adds_partials(x: jax.Array, implementation: str | None = None) -> bool:
    """Return whether a kernel does `norm_residual` of rows like `x`, and has registers for partial sums, too.

    If so, a product that is split over its inputs saves a launch.
    """
    if x.shape[1] > WIDEST_OF_PARTIALS:
        return False
    with dispatch.recorded():  # separate: this is no call of the kernel
        return _choose_norm(x, "", implementation, offset=False).implementation != "xla"


def _choose_norm(x: jax.Array, case: str, implementation: str | None, offset: bool) -> dispatch.Choice:
    def check() -> None:
        from vlcache_jax.pallas_kernels.rows import mosaic_gpu  # its import takes a second

        dispatch.check_array(implementation, x)
        _check_plain_weight(offset)
        mosaic_gpu.check_norm(x)

    return dispatch.choose("norm_residual", case, implementation, dict.fromkeys(dispatch.FAMILIES, check))


@spreads(
    gives=SECOND, parts=SECOND, cos=WHOLE, sin=WHOLE, slot=WHOLE, k_pool=SECOND, v_pool=SECOND,
    bias=FIRST, q_norm=WHOLE, k_norm=WHOLE, places=WHOLE,
)  # fmt: skip
def rotate_write(
    parts: Sequence[jax.Array],
    cos: jax.Array,
    sin: jax.Array,
    slot: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    *,
    bias: jax.Array | None = None,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
    eps: float = 0.0,
    offset: bool = False,
    keep: int | None = None,
    places: jax.Array | None = None,
    return_kv: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, tuple[jax.Array, jax.Array] | None]:
    """Normalize and rotate the heads of the product q|k|v, and write keys and values into the pool.

    Values are written finite, as in `vlcache_jax.pallas_kernels.propagate_nonfinite`. Rotation is rounded as in `link`
    of the same implementation, so a computed key equals a linked one.

    Letters: `N` rows, `S` slots, `K` key-value heads, `H` query heads, `G = H / K`, `D` head width.

    Args:
      parts: The product: `[N, K, G + 2, D]` for all rows, with each key-value head's queries, its key, its value. Or
        two parts: that of the first rows, and `[n, K, 2, D]` for the other rows, which need no queries.
      cos: Cosines of each row's angles, `[N, 1, D / 2]`, in the dtype of the product. If they are fewer, only the
        first values of each head rotate, twice as many as they are; the kernel does not do this.
      sin: Sines of these angles, of the same shape and dtype.
      slot: Slot of each row's key and value, int32 `[N]`; none negative, and those below `S` distinct. Rows with a slot
        from `S` on write nothing.
      k_pool: Keys of a layer `[S, K, D]`, in the dtype of the product; updated in place if donated.
      v_pool: Values of a layer, of the same shape and dtype; updated in place if donated.
      bias: Bias that is added to the product first, `[K, G + 2, D]`, with rounding.
      q_norm: Weight of the norm of each query head, `[D]`; None: no norm.
      k_norm: Weight of the norm of each key head, `[D]`; None: no norm.
      eps: Added to the mean of squares in both norms.
      offset: As in `norm_residual`, for both norms.
      keep: Number of first rows whose queries are wanted, at most those of the first part; None: all of these.
      places: Row at each place of the returned queries, int32 `[R]`. A place with a row from `keep` on has undefined
        content. None: the queries are in the order of their rows.
      return_kv: Also return the arrays that cache entries hold: keys before rotation, and values, both unmodified.
      implementation: As in `vlcache_jax.pallas_kernels.attention`; the kernel does bfloat16 and float16, and heads of
        width 64 and 128.

    Returns:
      (q `[keep, H, D]` or `[R, H, D]`, rotated; k_pool; v_pool; unmodified keys and values, `[N, K, D]` each, or None)

    Raises:
      ValueError: An argument is wrong; the message names it.
      NotImplementedError: The requested implementation does not support this case.
    """
    keep = _check_parts(parts, keep, k_pool)
    (_, K, width, D), dtype = parts[0].shape, parts[0].dtype
    rows = sum(map(len, parts))
    half = cos.shape[-1]
    if not 0 < half <= D // 2:
        raise ValueError(f"cos must have 1 to {D // 2} angles, half the width of a head, got {half}")
    for name, array in (("cos", cos), ("sin", sin)):
        _check_like(name, array, (rows, 1, half), dtype)
    _check_like("slot", slot, (rows,), jnp.int32)
    _check_like("v_pool", v_pool, k_pool.shape, dtype)
    _check_like("bias", bias, (K, width, D), dtype)
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        _check_like(name, weight, (D,), dtype)
    if places is not None and (places.ndim != 1 or places.dtype != jnp.int32):
        raise ValueError(f"places must be int32 of shape [R], got {places.dtype} {list(places.shape)}")

    def check() -> None:
        from vlcache_jax.pallas_kernels.rows import mosaic_gpu

        dispatch.check_array(implementation, k_pool)
        _check_plain_weight(offset)
        if 2 * half != D:
            raise NotImplementedError(f"mosaic_gpu rotates all {D} values of a head, got angles for {2 * half}")
        mosaic_gpu.check_rotate(parts[0], places)

    case = f"{dtype} {[rows, K, width, D]}{', KV returned' if return_kv else ''}"
    choice = dispatch.choose("rotate_write", case, implementation, dict.fromkeys(dispatch.FAMILIES, check))
    arrays = parts, cos, sin, slot, k_pool, v_pool, bias, q_norm, k_norm, places
    if choice.implementation == "xla":
        q, k_pool, v_pool, new_kv = xla.rotate_write(*arrays, eps=eps, offset=offset, keep=keep)
        return q, k_pool, v_pool, new_kv if return_kv else None
    from vlcache_jax.pallas_kernels.rows import mosaic_gpu

    return mosaic_gpu.rotate_write(
        *arrays, eps=eps, keep=keep, return_kv=return_kv, bulk=dispatch.has_bulk_copies(choice),
        interpret=dispatch.interpreter(choice),
    )  # fmt: skip


def _check_plain_weight(offset: bool) -> None:
    """Raise NotImplementedError for norms whose weight is 1 + `scale`."""
    if offset:
        raise NotImplementedError("mosaic_gpu multiplies by the weight of a norm as it is stored, got offset=True")


def _check_parts(parts: Sequence[jax.Array], keep: int | None, k_pool: jax.Array) -> int:
    """Check the parts; return how many rows' queries are wanted."""
    if k_pool.ndim != 3:
        raise ValueError(f"k_pool must have shape [S, K, D], got {list(k_pool.shape)}")
    _, K, D = k_pool.shape
    shapes = [part.shape[1:] for part in parts]
    if len(parts) not in (1, 2) or shapes[0][::2] != (K, D) or shapes[0][1] < 3 or shapes[1:] not in ([], [(K, 2, D)]):
        raise ValueError(
            f"parts must be [N, {K}, G + 2, {D}], and [n, {K}, 2, {D}] for rows without queries, "
            f"got {[list(part.shape) for part in parts]}"
        )
    for part in parts:
        _check_like("parts", part, part.shape, k_pool.dtype)
    keep = len(parts[0]) if keep is None else keep
    if not 0 < keep <= len(parts[0]):
        raise ValueError(f"keep must be from 1 to {len(parts[0])}, got {keep}")
    return keep


def _check_like(name: str, array: jax.Array | None, shape: tuple[int, ...], dtype: Any) -> None:
    dtype = jnp.dtype(dtype)
    if array is not None and (array.shape != tuple(shape) or array.dtype != dtype):
        raise ValueError(f"{name} must be {dtype} of shape {list(shape)}, got {array.dtype} {list(array.shape)}")
