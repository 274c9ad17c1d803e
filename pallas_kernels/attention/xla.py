"""Attention over slot intervals as a blocked XLA program: any device, any shape, memory linear in rows and slots.

Rows are cut into tiles. A tile walks over the key blocks between the first and the last slot that any of its rows sees,
with a running softmax. Blocks are sliced straight out of the pool, so neither time nor memory depends on its size.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

State = tuple[jax.Array, jax.Array, jax.Array]  # weighted values, largest score, sum of weights


def tile_rows(n: int, group: int) -> int:
    """Rows of a tile: the more rows share the reading of a block the better, as long as they see the same blocks.

    A handful of rows are requests that decode, and share nothing. Few rows are scattered over long prompts, where a
    large tile would see far more slots than its rows do. The query heads of a group multiply the same keys together;
    where there is but one, as in vision towers, more rows fill the product.
    """
    if n <= 8:
        return 1
    return 32 if n < 256 else 64 if n < 1024 else 128 if group > 1 else 256


def block_slots(n: int) -> int:
    """Slots of a block: longer ones waste more at the ends of intervals, shorter ones more on the loop.

    Rows that decode, and those of a whole prefill, see blocks that end where they do. Scattered rows do not.
    """
    return 256 if 8 < n < 1024 else 128


@functools.partial(jax.jit, static_argnames=("scale",))
def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, k_start: jax.Array, k_end: jax.Array, *, scale: float
) -> jax.Array:
    """The contract of `vlcache_jax.pallas_kernels.attention`, for arguments that it has checked."""
    # A CPU multiplies bfloat16 by widening it: widened once a block, the products take less time and round less.
    wide = functools.partial(_attention, scale=scale, compute=jnp.float32)
    narrow = functools.partial(_attention, scale=scale, compute=q.dtype)
    return lax.platform_dependent(q, k, v, k_start, k_end, cpu=wide, default=narrow)


def _attention(
    q: jax.Array, k: jax.Array, v: jax.Array, k_start: jax.Array, k_end: jax.Array, scale: float, compute: DTypeLike
) -> jax.Array:
    N, H, D = q.shape
    S, K, _ = k.shape
    rows = min(tile_rows(N, H // K), N)

    def tiles(x: jax.Array) -> jax.Array:  # [N, ...] -> [tiles, rows, ...]; the rows that fill the last tile are empty
        return jnp.pad(x, ((0, -N % rows),) + ((0, 0),) * (x.ndim - 1)).reshape(-1, rows, *x.shape[1:])

    def one(tile: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        return _tile(*tile, k, v, scale, compute, block=min(block_slots(N), S))

    k_start, k_end = jnp.clip(k_start, 0, S), jnp.clip(k_end, 0, S)
    out = lax.map(one, (tiles(q.reshape(N, K, H // K, D)), tiles(k_start), tiles(k_end)))
    return out.reshape(-1, H, D)[:N]


def _tile(
    q: jax.Array,
    start: jax.Array,
    end: jax.Array,
    k: jax.Array,
    v: jax.Array,
    scale: float,
    compute: DTypeLike,
    *,
    block: int,
) -> jax.Array:
    """Attention of the rows of one tile: q [N, K, G, D], start and end [N] -> [N, K, G, D]."""
    S, K, D = k.shape
    N, _, G, _ = q.shape
    empty = end <= start
    lo = jnp.where(empty, S, start).min()
    hi = jnp.where(empty, 0, end).max()
    # Empty rows see whatever the tile sees, so that they never cost a mask; their results are dropped at the end.
    start, end = jnp.where(empty, lo, start), jnp.where(empty, hi, end)
    everyone_from, everyone_to = start.max(), end.min()

    precision = lax.Precision.HIGHEST if compute == jnp.float32 else None
    product = functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    q = q.transpose(1, 2, 0, 3).astype(compute)

    def update(at: jax.Array, state: State, *, masked: bool) -> State:
        total, largest, weight = state
        first = jnp.minimum(at, S - block)  # the last block of the pool reaches back over slots that are done
        keys, values = (lax.dynamic_slice_in_dim(x, first, block).astype(compute) for x in (k, v))
        scores = product("kgnd,skd->kgns", q, keys)
        if masked:
            slot = first + jnp.arange(block)
            seen = (slot >= jnp.maximum(start, at)[:, None]) & (slot < end[:, None])
            # A weight of 0 does not silence a NaN in V. Move it to the scores, where rows that do not see it drop it.
            finite = jnp.isfinite(values).all(-1)
            values = jnp.where(finite[..., None], values, 0)
            scores = jnp.where(seen, scores + jnp.where(finite, 0, jnp.nan).T[:, None, None], -jnp.inf)
        # As the scale is positive, it can wait: here it shares a pass with the exponential.
        new_largest = jnp.maximum(largest, scores.max(-1))
        weights = jnp.exp((scores - new_largest[..., None]) * scale)
        decay = jnp.exp((largest - new_largest) * scale)
        total = total * decay[..., None] + product("kgns,skd->kgnd", weights.astype(compute), values)
        return total, new_largest, weight * decay + weights.sum(-1)

    def step(j: jax.Array, state: State) -> State:
        at = lo + j * block
        anyone = ((start < at + block) & (end > at)).any()
        everyone = (everyone_from <= at) & (at + block <= everyone_to)
        partly, fully = (functools.partial(update, at, masked=masked) for masked in (True, False))
        return lax.switch(anyone.astype(jnp.int32) + everyone, (lambda state: state, partly, fully), state)

    zeros = jnp.zeros((K, G, N), jnp.float32)
    state = jnp.zeros((K, G, N, D), jnp.float32), jnp.full_like(zeros, jnp.finfo(jnp.float32).min), zeros
    total, _, weight = lax.fori_loop(0, (hi - lo + block - 1) // block, step, state)
    out = jnp.where(empty[:, None], 0, total / weight[..., None])
    return out.transpose(2, 0, 1, 3).astype(k.dtype)
