"""The public attention functions: contracts, checks of arguments, the choice of the implementation."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from vlcache_jax.pallas_kernels import dispatch
from vlcache_jax.pallas_kernels.attention import xla
from vlcache_jax.pallas_kernels.attention.work import PAGE, Work, WorkConfig
from vlcache_jax.pallas_kernels.split import SECOND, WHOLE, spreads

DTYPES = tuple(jnp.dtype(d) for d in (jnp.float32, jnp.bfloat16, jnp.float16))


@spreads(gives=SECOND, q=SECOND, k=SECOND, v=SECOND, k_start=WHOLE, k_end=WHOLE)
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
    r"""Compute attention in which every query row sees one interval of key slots.

    .. math:: out[n] = softmax(scale \cdot q[n] k[s]^T)\, v[s], \quad k\_start[n] \le s < k\_end[n]

    Letters: `N` rows, `S` slots, `H` query heads, `K` key-value heads, `G = H / K` query heads that share one, `D` head
    width. Query head `h` reads key-value head `h // G`.

    Every mask that serving needs is such an interval. Prefill, full or of scattered rows: from the first slot of the
    request to `slot + 1`. Decoding: the same, one row per request. Vision towers: the bounds of the row's own window or
    image. Three rows over four slots, `k_start=[0, 1, 3]` and `k_end=[4, 3, 3]`::

        1 1 1 1
        0 1 1 0
        0 0 0 0     an empty row: its result is exactly 0

    V must be finite, also in slots that no row sees, because a weight of 0 does not silence a NaN. K may hold anything:
    scores outside a row's interval are dropped, so a NaN in a key reaches exactly the rows that see it. Writers of a
    pool mark non-finite values in K (`vlcache_jax.pallas_kernels.propagate_nonfinite`).

    Rows come in any order. A row's result depends only on the slots of its interval. It does not depend on the rest of
    the pool, on its size or on other rows, up to the order in which float32 sums are rounded.
    Memory is linear in `N` and `S`. Neighboring rows are computed together and slots that none of them sees are
    skipped, so the cost follows the intervals if neighbors see nearly the same slots. There is no gradient.

    Args:
      q: Queries `[N, H, D]`; float32, bfloat16 or float16.
      k: Keys `[S, K, D]` in the dtype of `q`.
      v: Values `[S, K, D]` in the dtype of `q`; finite.
      k_start: First slot that each row sees, int32 `[N]`; below 0 counts as 0.
      k_end: One past the last slot that each row sees, int32 `[N]`; above `S` counts as `S`.
      scale: Positive number, applied to the float32 scores; None is `D ** -0.5`.
      implementation: `"xla"` runs on every device, `"mosaic_gpu"` on Hopper GPUs, `"mosaic_gpu_mma"` on every NVIDIA
        GPU since Ampere, both in bfloat16 and float16 and for head widths up to 128. `"mosaic_gpu_interpreted"` and
        `"mosaic_gpu_mma_interpreted"` are the same kernels in jax's interpreter, on a CPU, for tests. None is the first
        of `"mosaic_gpu"` and `"mosaic_gpu_mma"` that supports the case and has passed its self-test on the device, else
        `"xla"`.

    Returns:
      `[N, H, D]` in the dtype of `q`. Softmax and sums are float32; float32 inputs are multiplied in full precision.

    Raises:
      ValueError: An argument is wrong; the message names it.
      NotImplementedError: The requested implementation does not support this case.
    """
    q, k, v, k_start, k_end = (jnp.asarray(x) for x in (q, k, v, k_start, k_end))
    _check(q, k, v, k_start, k_end)
    scale = scale_of(scale, q)
    choice = choose("attention", f"q {q.dtype} {list(q.shape)}, k {list(k.shape)}", implementation, q)
    if choice.implementation == "xla":
        return xla.attention(q, k, v, k_start, k_end, scale=scale)
    interpret = dispatch.interpreter(choice)
    return _kernels(choice.implementation).attention(q, k, v, k_start, k_end, scale=scale, interpret=interpret)


@spreads(gives=SECOND, q=SECOND, k=SECOND, v=SECOND, work=WHOLE, end=WHOLE)
def paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    work: Work,
    *,
    end: jax.Array | None = None,
    packed: bool = False,
    scale: float | None = None,
    implementation: str | None = None,
) -> jax.Array:
    r"""Compute attention of rows of several requests. Each row sees an interval of its request's logical slots.

    The keys and values of a request lie in pages of 128 slots anywhere in the pool: its table leads from each logical
    slot to the physical one. With `t` the table of row `n`,

    .. math:: out[n] = softmax(scale \cdot q[n] k[s(i)]^T)\, v[s(i)], \quad start[n] \le i < end[n], \quad
              s(i) = 128 \cdot tables[t, \lfloor i / 128 \rfloor] + i \bmod 128

    The host states in `work` (see `make_work`) which rows visit which pages. Rows that see nearly the same pages load
    them together, and pages that several requests share are loaded once for all of them. The result does not
    depend on how the work is cut, up to the order in which float32 sums are rounded.

    The rest of the pool does not matter as long as V is finite; see `attention`. Letters as there.

    Args:
      q: Queries `[N, H, D]`, N as in `work`; float32, bfloat16 or float16.
      k: Keys `[S, K, D]` in the dtype of `q`, S a multiple of 128.
      v: Values `[S, K, D]` in the dtype of `q`; finite.
      work: The work list, made for this implementation (`work_config`).
      end: Ends that the device decides, int32 `[N]`, none above that in `work` nor below its `least`, except 0 for rows
        that see nothing; None takes those of `work`.
      packed: Queries stand at the places of `work.packing()`, `[R, H, D]`, and not in the order of their rows.
      scale, implementation: As in `attention`.

    Returns:
      `[N, H, D]` in the dtype of `q`; rows that see nothing are exactly 0.

    Raises:
      ValueError: An argument is wrong; the message names it.
      NotImplementedError: The requested implementation does not support this case.
    """
    q, k, v = (jnp.asarray(x) for x in (q, k, v))
    check_arrays(q, k, v)
    scale = scale_of(scale, q)
    if not isinstance(work, Work):
        raise ValueError(f"work must be a Work as made by make_work, got {type(work).__name__}")
    config = work.config
    if len(q) != (rows := config.packed if packed else config.rows):
        raise ValueError(
            f"work must be made for the {len(q)} {'packed rows' if packed else 'rows'} of q, got work for {rows}"
        )
    if len(k) % PAGE:
        raise ValueError(f"k must have full pages of {PAGE} slots, got {list(k.shape)}")
    if end is not None and (end.shape != (config.rows,) or end.dtype != jnp.int32):
        raise ValueError(f"end must be int32 of shape {[config.rows]}, got {end.dtype} {list(end.shape)}")
    case = f"q {q.dtype} {[config.rows, *q.shape[1:]]}, k {list(k.shape)}"
    choice = choose("paged_attention", case, implementation, q)
    if (choice.implementation == "xla") != (config.programs == 1):
        raise ValueError(f"work must be made for {choice.implementation} (see work_config), got {config}")
    if choice.implementation == "xla":
        return xla.paged_attention(q, k, v, work, end, scale=scale)
    interpret = dispatch.interpreter(choice)
    return _kernels(choice.implementation).paged_attention(
        q, k, v, work, end, packed=packed, scale=scale, interpret=interpret
    )


def work_config(
    rows: int,
    requests: int,
    pages: int,
    q: jax.ShapeDtypeStruct,
    kv_heads: int,
    *,
    decode: bool,
    shared: bool = True,
    implementation: str | None = None,
) -> WorkConfig:
    """Return the configuration that cuts the work of a case best.

    Args:
      rows: N, rows of a step.
      requests: Maximum number of tables.
      pages: Maximum number of pages of a table.
      q: Shape `[N, H, D]` and dtype of the queries.
      kv_heads: K.
      decode: True if each row belongs to another request.
      shared: True if requests may share prefixes; False compiles less.
      implementation: As in `paged_attention`.

    Raises:
      NotImplementedError: The requested implementation does not support this case.
    """
    choice = choose("paged_attention", f"q {q.dtype} {list(q.shape)}", implementation, q)
    if choice.implementation == "xla":
        return xla.work_config(rows, requests, pages, decode=decode, shared=shared)
    config: WorkConfig = _kernels(choice.implementation).work_config(
        rows, requests, pages, q.shape[1], kv_heads, q.shape[2], decode=decode, shared=shared,
        programs=3 if choice.implementation.endswith(dispatch.INTERPRETED) else None,
    )  # fmt: skip
    return config


def _kernels(implementation: str) -> Any:
    """Return the module of an implementation's kernels; its import takes a second."""
    if dispatch.family(implementation) == dispatch.PORTABLE:
        from vlcache_jax.pallas_kernels.attention import mosaic_gpu_mma

        return mosaic_gpu_mma
    from vlcache_jax.pallas_kernels.attention import mosaic_gpu

    return mosaic_gpu


def choose(
    kernel: str, case: str, implementation: str | None, q: Any, kinds: tuple[str, ...] = dispatch.FAMILIES
) -> dispatch.Choice:
    """Call `dispatch.choose` for a kernel that multiplies `q` as attention does."""

    def check(kind: str) -> None:
        if isinstance(q, jax.Array):
            dispatch.check_array(implementation, q)
        _kernels(kind).check(q)

    return dispatch.choose(kernel, case, implementation, {kind: functools.partial(check, kind) for kind in kinds})


def scale_of(scale: float | None, q: jax.Array) -> float:
    """Return `scale`, or `D ** -0.5` if it is None.

    Raises:
      ValueError: `scale` is not a positive finite number.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale must be a positive number, got {scale}")
    return scale


def _check(q: jax.Array, k: jax.Array, v: jax.Array, k_start: jax.Array, k_end: jax.Array) -> None:
    check_arrays(q, k, v)
    for name, x in (("k_start", k_start), ("k_end", k_end)):
        if x.shape != q.shape[:1] or x.dtype != jnp.int32:
            raise ValueError(f"{name} must be int32 of shape {[q.shape[0]]}, got {x.dtype} {list(x.shape)}")


def check_arrays(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    """Raise ValueError unless the shapes and dtypes of q, k and v match."""
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
