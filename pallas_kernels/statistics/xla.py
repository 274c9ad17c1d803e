"""Attention scores as an XLA program: tiles of rows pass twice over the pages that they see."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from vlcache_jax.pallas_kernels.attention.work import PAGE

TILE = 128  # rows whose scores are in memory together
SPAN = 4  # pages whose scores are in memory together

State = tuple[jax.Array, jax.Array]


@functools.partial(jax.jit, static_argnames=("scale",))
def attention_statistics(
    q: jax.Array, k: jax.Array, table: jax.Array, place: jax.Array, p: jax.Array, *, scale: float
) -> State:
    """Implement `vlcache_jax.pallas_kernels.attention_statistics` for arguments that it has checked."""
    N, H, D = q.shape
    K, B = k.shape[1], len(table)
    rows, span = min(TILE, N), min(SPAN, B)
    block = span * PAGE
    # In float32, bfloat16 and float16 lose nothing, even if a GPU multiplies float32 as TensorFloat-32.
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    p = p.reshape(()).astype(jnp.float32)
    pages = k.reshape(-1, PAGE, K, D)
    blocks = jnp.pad(table, (0, -B % span)).reshape(-1, span)
    # The padding of the last tile sees nothing.
    q = jnp.pad(q, ((0, -N % rows), (0, 0), (0, 0))).reshape(-1, rows, K, H // K, D).transpose(0, 2, 3, 1, 4)
    places = jnp.pad(place, (0, -N % rows), constant_values=-1).reshape(-1, rows)

    def add_tile(state: State, tile: State) -> tuple[State, None]:
        queries, last = tile[0].astype(jnp.float32), tile[1][:, None]
        count = (last.max() + block) // block

        def scores(i: jax.Array) -> tuple[jax.Array, jax.Array]:
            """Return the scores of a block's slots `[K, G, rows, block]`, and which are seen."""
            keys = pages[blocks[i]].reshape(block, K, D).astype(jnp.float32)
            x = scale * jnp.einsum("kgnd,skd->kgns", queries, keys, precision=precision)
            return x, i * block + jnp.arange(block) <= last

        def add_rows(i: jax.Array, sums: State) -> State:
            largest, weight = sums
            x, seen = scores(i)
            x = jnp.where(seen, x, -jnp.inf)
            new = jnp.maximum(largest, x.max(-1))
            return new, weight * jnp.exp(largest - new) + jnp.exp(x - new[..., None]).sum(-1)

        zero = jnp.zeros(queries.shape[:3], jnp.float32)
        largest, weight = lax.fori_loop(0, count, add_rows, (zero + jnp.finfo(jnp.float32).min, zero))
        share = jnp.where(weight == 0, 0, 1 / (H // K * weight))

        def add_columns(i: jax.Array, sums: State) -> State:
            received, zeros = sums
            x, seen = scores(i)
            part = jnp.exp(x - largest[..., None])  # part of the row's largest weight
            mine = jnp.where(seen, part * share[..., None], 0).sum((1, 2))
            own = lax.dynamic_slice_in_dim(received, i * block, block, 1)
            received = lax.dynamic_update_slice_in_dim(received, own + mine, i * block, 1)
            return received, zeros + (seen & (part < p)).sum((2, 3))

        return lax.fori_loop(0, count, add_columns, state), None

    nothing = jnp.zeros((K, blocks.size * PAGE), jnp.float32), jnp.zeros((K, H // K), jnp.int32)
    (received, zeros), _ = lax.scan(add_tile, nothing, (q, places))
    return received[:, : B * PAGE], zeros.reshape(H)
