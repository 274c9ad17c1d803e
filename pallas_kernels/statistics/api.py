"""The contract of attention scores, and the checks of its arguments."""

import math

import jax
import jax.numpy as jnp

from vlcache_jax.pallas_kernels import dispatch
from vlcache_jax.pallas_kernels.attention.api import check_arrays, choose, scale_of
from vlcache_jax.pallas_kernels.attention.work import PAGE
from vlcache_jax.pallas_kernels.split import FIRST, SECOND, WHOLE, spreads
from vlcache_jax.pallas_kernels.statistics import xla


@spreads(gives=(FIRST, FIRST), q=SECOND, k=SECOND, table=WHOLE, place=WHOLE, p=WHOLE)
def attention_statistics(
    q: jax.Array,
    k: jax.Array,
    table: jax.Array,
    place: jax.Array,
    p: jax.Array | float,
    *,
    scale: float | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    r"""Return the attention that the keys of one request receive from some rows, and the number of small weights.

    The weights `A[h, n, j]` of row `n` and query head `h` are the softmax over the logical slots `0 <= j <= place[n]`:

    .. math:: received[c, j] = \frac{1}{G} \sum_{h \in c} \sum_n A[h, n, j], \quad
              zeros[h] = \#\{(n, j): A[h, n, j] < p \max_i A[h, n, i]\}

    with `c` a key-value head and its `G` query heads; only slots that a row sees count. These are the scores and the
    sparsity of VL-Cache (arXiv:2410.23317); with all rows, those of H2O (arXiv:2306.14048).

    No array of rows times keys is stored: the scores are computed twice, for each row's largest and sum, and then for
    the columns. The rest of the pool does not matter. A NaN in a key that some row sees makes all sums NaN that the
    slots of its key-value head receive; the number of zeros of its query heads is then undefined. Letters as in
    `attention`; `B` pages.

    Args:
      q: Queries `[N, H, D]`; float32, bfloat16 or float16.
      k: Keys `[S, K, D]` in the dtype of `q`, S a multiple of 128.
      table: The pool's page of each of the request's logical pages, int32 `[B]`; pages that no row sees may have any
        value.
      place: The last logical slot that each row sees, below `128 B`, int32 `[N]`, in any order; -1: none.
      p: Part of a row's largest weight below which a weight counts as zero; a number, or an array of one.
      scale, implementation: As in `attention`.

    Returns:
      (received, zeros): float32 `[K, 128 B]`, 0 for slots that no row sees; int32 `[H]`.

    Raises:
      ValueError: An argument is wrong; the message names it.
      NotImplementedError: The requested implementation does not support this case.
    """
    q, k, table, place, p = (jnp.asarray(x) for x in (q, k, table, place, p))
    check_arrays(q, k, k)
    scale = scale_of(scale, q)
    if len(k) % PAGE:
        raise ValueError(f"k must have full pages of {PAGE} slots, got {list(k.shape)}")
    if table.ndim != 1 or not len(table) or table.dtype != jnp.int32:
        raise ValueError(
            f"table must be int32 of shape [B] with at least one page, got {table.dtype} {list(table.shape)}"
        )
    if place.shape != q.shape[:1] or place.dtype != jnp.int32:
        raise ValueError(f"place must be int32 of shape {[len(q)]}, got {place.dtype} {list(place.shape)}")
    if math.prod(p.shape) != 1:
        raise ValueError(f"p must be one number, got shape {list(p.shape)}")

    case = f"q {q.dtype} {list(q.shape)}, k {list(k.shape)}, {len(table)} pages"
    choice = choose("statistics", case, implementation, q, (dispatch.HOPPERS,))
    if choice.implementation == "xla":
        return xla.attention_statistics(q, k, table, place, p, scale=scale)
    from vlcache_jax.pallas_kernels.statistics import mosaic_gpu

    interpret = dispatch.interpreter(choice)
    return mosaic_gpu.attention_statistics(q, k, table, place, p, scale=scale, interpret=interpret)
