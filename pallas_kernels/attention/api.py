"""The public attention function: its contract, the check of its arguments, the choice of the implementation."""

import math

import jax
import jax.numpy as jnp

from vlcache_jax.pallas_kernels import dispatch
from vlcache_jax.pallas_kernels.attention import xla

DTYPES = tuple(jnp.dtype(d) for d in (jnp.float32, jnp.bfloat16, jnp.float16))


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_start: jax.Array,
    k_end: jax.Array,
    *,
    scale: float | None = None,
    implementation: str | None = None,
) -> jax.Array:
    r"""Attention in which every query row sees one interval of key slots.

    .. math:: out[n] = softmax(scale \cdot q[n] k[s]^T)\, v[s], \quad k\_start[n] \le s < k\_end[n]

    Letters: `N` rows, `S` slots, `H` query heads, `K` key-value heads, `G = H / K` query heads that share one, `D` head
    width. Query head `h` reads key-value head `h // G`.

    Every mask that serving needs is such an interval. Prefill, whole or of scattered rows: from the first slot of the
    request to `slot + 1`. Decoding: the same, one row per request. Vision towers: the bounds of the row's own window or
    image. Three rows over four slots, `k_start=[0, 1, 3]` and `k_end=[4, 3, 3]`::

        1 1 1 1
        0 1 1 0
        0 0 0 0     an empty row: its result is exactly 0

    Rows come in any order. A row's result depends on the slots of its interval only: neither on what the pool holds
    besides (NaN included), nor on its size, nor, up to the order in which float32 sums are rounded, on other rows.
    Memory is linear in `N` and `S`. Neighbouring rows are computed together and slots that none of them sees are
    skipped, so the cost follows the intervals as far as neighbours see much the same slots. There is no gradient.

    Args:
      q: Queries `[N, H, D]`; float32, bfloat16 or float16.
      k: Keys `[S, K, D]` in the dtype of `q`.
      v: Values `[S, K, D]` in the dtype of `q`.
      k_start: First slot that each row sees, int32 `[N]`; below 0 counts as 0.
      k_end: One past the last slot that each row sees, int32 `[N]`; above `S` counts as `S`.
      scale: Positive number, applied to the float32 scores; None is `D ** -0.5`.
      implementation: `"xla"` runs on every device, `"mosaic_gpu"` on Hopper GPUs, in bfloat16 and float16 and for head
        widths up to 128. `"mosaic_gpu_interpreted"` is the same kernel in jax's interpreter, on a CPU, for tests. None
        is `"mosaic_gpu"` where that does the case and has been checked on the device, else `"xla"`.

    Returns:
      `[N, H, D]` in the dtype of `q`. Softmax and sums are float32; float32 inputs are multiplied in full precision.

    Raises:
      ValueError: An argument is wrong; the message names it.
      NotImplementedError: The implementation asked for does not do this case.
    """
    q, k, v, k_start, k_end = (jnp.asarray(x) for x in (q, k, v, k_start, k_end))
    _check(q, k, v, k_start, k_end)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale must be a positive number, got {scale}")

    def check() -> None:
        from vlcache_jax.pallas_kernels.attention import mosaic_gpu  # takes a second to import

        dispatch.check_array(implementation, q)
        mosaic_gpu.check(q)

    case = f"q {q.dtype} {list(q.shape)}, k {list(k.shape)}"
    choice = dispatch.choose("attention", case, implementation, check)
    if choice.implementation == "xla":
        return xla.attention(q, k, v, k_start, k_end, scale=scale)
    from vlcache_jax.pallas_kernels.attention import mosaic_gpu

    return mosaic_gpu.attention(q, k, v, k_start, k_end, scale=scale, interpret=dispatch.interpreter(choice))


def _check(q: jax.Array, k: jax.Array, v: jax.Array, k_start: jax.Array, k_end: jax.Array) -> None:
    if q.ndim != 3 or 0 in q.shape:
        raise ValueError(f"q must have shape [N, H, D] with no empty axis, got {list(q.shape)}")
    if k.ndim != 3 or 0 in k.shape or k.shape[2] != q.shape[2]:
        raise ValueError(f"k must have shape [S, K, D] with D = {q.shape[2]} as in q, got {list(k.shape)}")
    if v.shape != k.shape:
        raise ValueError(f"v must have the shape of k, {list(k.shape)}, got {list(v.shape)}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"q must have a multiple of k's {k.shape[1]} heads, got {q.shape[1]}")
    if q.dtype not in DTYPES:
        raise ValueError(f"q must be one of {[d.name for d in DTYPES]}, got {q.dtype}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise ValueError(f"{name} must have the dtype of q, {q.dtype}, got {x.dtype}")
    for name, x in (("k_start", k_start), ("k_end", k_end)):
        if x.shape != q.shape[:1] or x.dtype != jnp.int32:
            raise ValueError(f"{name} must be int32 of shape {[q.shape[0]]}, got {x.dtype} {list(x.shape)}")
