"""Attention as a blocked XLA program: any device, any shape, memory linear in rows and slots.

Rows are cut into tiles. A tile walks over the blocks of keys that its rows see, with a running softmax: large blocks
where all of its rows see all keys, as they do within an image. Blocks are sliced straight out of the pool, so neither
time nor memory depends on its size.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from vlcache_jax.pallas_kernels.attention.work import (
    BOX0,
    BOXES,
    FROM,
    INNER_FROM,
    INNER_TO,
    PAGE,
    TABLE,
    TO,
    Work,
    WorkConfig,
)

WHOLE_BLOCK = 512  # slots of a block that all rows of a tile see

State = tuple[jax.Array, jax.Array, jax.Array]  # weighted values, largest score, sum of weights


def tile_rows(n: int, group: int) -> int:
    """Return the rows of a tile. More rows share the reading of a block, as long as they see the same blocks.

    A handful of rows are requests that decode, and share nothing. Few rows are scattered over long prompts; a large
    tile would see far more slots than its rows do. The query heads of a group multiply the same keys together. A group
    of one, as in vision towers, takes more rows to fill the product.
    """
    if n <= 8:
        return 1
    return 32 if n < 256 else 64 if n < 1024 else 128 if group > 1 else 256


def block_slots(n: int) -> int:
    """Return the slots of a block: longer ones waste more at the ends of intervals, shorter ones more on the loop.

    Decoding rows, and those of a full prefill, see blocks that end where they do. Scattered rows do not.
    """
    return 256 if 8 < n < 1024 else 128


def work_config(rows: int, requests: int, pages: int, *, decode: bool, shared: bool) -> WorkConfig:
    """Return how paged attention is cut: tiles hold rows of one request, large ones as long as it has many rows left.

    Requests that decode have one row each. If pages may be shared, the rows that visit them together fill a tile. Sizes
    that are not needed are not compiled.
    """
    if decode:
        return WorkConfig(rows, requests, pages, box=1, tile=min(64, rows) if shared else 1, small=1, shared=shared)
    tile = 4 if _is_scattered(rows) else 32
    return WorkConfig(rows, requests, pages, tile=tile, small=4, shared=shared)


def _is_scattered(rows: int) -> bool:
    """Return whether few of a tile's rows follow each other. So few rows are mostly those recomputed after linking
    images.
    """
    return rows < 1024


@functools.partial(jax.jit, static_argnames=("scale",))
def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, k_start: jax.Array, k_end: jax.Array, *, scale: float
) -> jax.Array:
    """Implement `vlcache_jax.pallas_kernels.attention` for arguments that it has checked."""
    return _on_each_platform(_attention, scale, q, k, v, k_start, k_end)


@functools.partial(jax.jit, static_argnames=("scale",))
def paged_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, work: Work, end: jax.Array | None = None, *, scale: float
) -> jax.Array:
    """Implement `vlcache_jax.pallas_kernels.paged_attention` for arguments that it has checked."""
    return _on_each_platform(_paged_attention, scale, q, k, v, work, work.parts().end if end is None else end)


def _on_each_platform(function: Callable[..., jax.Array], scale: float, q: jax.Array, *args: Any) -> jax.Array:
    # Weights in bfloat16 are rounded once more. A CPU need not do so: it takes these products in float32.
    wide = functools.partial(function, scale=scale, compute=jnp.float32)
    narrow = functools.partial(function, scale=scale, compute=q.dtype)
    return lax.platform_dependent(q, *args, cpu=wide, default=narrow)


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
    """Compute attention of the rows of one tile: q `[N, K, G, D]`, start and end `[N]` -> `[N, K, G, D]`."""
    S, K, D = k.shape
    N, _, G, _ = q.shape
    empty = end <= start
    lo = jnp.where(empty, S, start).min()
    hi = jnp.where(empty, 0, end).max()
    # Empty rows see all that the tile sees, so they never require a mask; their results are dropped at the end.
    start, end = jnp.where(empty, lo, start), jnp.where(empty, hi, end)
    q = q.transpose(1, 2, 0, 3)
    # Slots that all rows see lie in `count` large blocks, after `front` masked blocks and before others.
    large = min(WHOLE_BLOCK, S)
    front = jnp.maximum(start.max() - lo + block - 1, 0) // block
    count = jnp.maximum(end.min() - lo - front * block, 0) // large
    front = jnp.where(count > 0, front, 0)

    def whole(j: jax.Array, state: State) -> State:
        return _add_block(q, *_block(k, v, lo + front * block + j * large, large, compute), None, state, scale)

    def partly(j: jax.Array, state: State) -> State:
        at = lo + j * block + jnp.where(j < front, 0, count * large)
        first = jnp.minimum(at, S - block)  # the last block of the pool overlaps slots that are done
        slot = first + jnp.arange(block)
        seen = (slot >= jnp.maximum(start, at)[:, None]) & (slot < end[:, None])

        def add(_: jax.Array, state: State) -> State:
            return _add_block(q, *_block(k, v, first, block, compute), seen, state, scale)

        # Loops, not conditions: a CPU runs the content of a condition in one thread, except products.
        return lax.fori_loop(0, seen.any().astype(jnp.int32), add, state)

    state = lax.fori_loop(0, count, whole, _empty_state((K, G, N), D))
    total, _, weight = lax.fori_loop(0, (hi - lo - count * large + block - 1) // block, partly, state)
    out = jnp.where(empty[:, None], 0, total / weight[..., None])
    return out.transpose(2, 0, 1, 3).astype(k.dtype)


def _paged_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, work: Work, end: jax.Array, scale: float, compute: DTypeLike
) -> jax.Array:
    """Compute paged attention item by item; each continues the sums of its rows, so there are no partials."""
    N, H, D = q.shape
    K = k.shape[1]
    parts, config = work.parts(), work.config
    # Few rows see many pages; two at once halve the loop. Decoding rows may see only one.
    span = min(2, config.pages) if config.box > 1 and _is_scattered(config.rows) else 1
    q = q.reshape(N, K, H // K, D)
    start = parts.start

    def add_item(height: int, i: jax.Array, sums: State) -> State:
        item = parts.items[i]
        places = height * config.box
        row = lax.dynamic_slice_in_dim(parts.rows, item[BOX0] * config.box, places)
        place = jnp.arange(places)
        row = jnp.where((place < item[BOXES] * config.box) & (row < N), row, N + place)
        mine, first, last = (x.at[row].get(mode="fill", fill_value=0) for x in (q, start, end))
        total, largest, weight = (x.at[row].get(mode="clip") for x in sums)
        add = functools.partial(_add_block, mine.transpose(1, 2, 0, 3))

        def visit(i: jax.Array, state: State) -> State:
            page = item[FROM] + i * span
            # Beyond the last page, that page is taken again, fully masked.
            numbers = [parts.tables[item[TABLE], jnp.minimum(page + j, item[TO] - 1)] for j in range(span)]
            pages = [_block(k, v, number * PAGE, PAGE, compute) for number in numbers]
            keys, values = (jnp.concatenate(blocks) for blocks in zip(*pages, strict=True))
            slot = page * PAGE + jnp.arange(span * PAGE)

            def partly(state: State) -> State:
                seen_to = jnp.minimum(last, item[TO] * PAGE)
                return add(keys, values, (slot >= first[:, None]) & (slot < seen_to[:, None]), state, scale)

            whole = functools.partial(add, keys, values, None, scale=scale)
            is_whole = (item[INNER_FROM] <= page) & (page + span <= jnp.minimum(item[INNER_TO], item[TO]))
            return lax.cond(is_whole, whole, partly, state)

        state = total.transpose(1, 2, 0, 3), largest.transpose(1, 2, 0), weight.transpose(1, 2, 0)
        total, largest, weight = lax.fori_loop(0, (item[TO] - item[FROM] + span - 1) // span, visit, state)
        done = total.transpose(2, 0, 1, 3), largest.transpose(2, 0, 1), weight.transpose(2, 0, 1)
        sum_total, sum_largest, sum_weight = (
            x.at[row].set(new, mode="drop", unique_indices=True) for x, new in zip(sums, done, strict=True)
        )
        return sum_total, sum_largest, sum_weight

    def add_row(i: jax.Array, sums: State) -> State:
        """Add an item of one row. Masking is cheap there, so every page is masked."""
        item = parts.items[i]
        row = parts.rows[item[BOX0]]
        mine, first, last, total, largest, weight = (
            lax.dynamic_index_in_dim(x, row, keepdims=False) for x in (q, start, end, *sums)
        )
        own, seen_to = _block_diagonal(mine), jnp.minimum(last, item[TO] * PAGE)

        def visit(page: jax.Array, state: State) -> State:
            keys, values = _block(k, v, parts.tables[item[TABLE], page] * PAGE, PAGE, compute)
            slot = page * PAGE + jnp.arange(PAGE)
            return _add_row(own, keys, values, (slot >= first) & (slot < seen_to), state, scale)

        state = _block_diagonal(total), largest.reshape(H), weight.reshape(H)
        total, largest, weight = lax.fori_loop(item[FROM], item[TO], visit, state)
        done = _own_blocks(total, K), largest.reshape(K, -1), weight.reshape(K, -1)
        sum_total, sum_largest, sum_weight = (
            lax.dynamic_update_index_in_dim(x, new, row, 0) for x, new in zip(sums, done, strict=True)
        )
        return sum_total, sum_largest, sum_weight

    large = (parts.items[:, BOXES] > config.small).sum()  # items are ordered by size
    sums = _empty_state((N, K, H // K), D)
    if config.tile > config.small:
        sums = lax.fori_loop(0, large, functools.partial(add_item, config.tile), sums)
    add_small = add_row if config.small * config.box == 1 else functools.partial(add_item, config.small)
    total, _, weight = lax.fori_loop(large, parts.ctas[-1], add_small, sums)
    # An item may have added pages that only its other rows see.
    is_empty = (weight == 0) | (start >= end)[:, None, None]
    return jnp.where(is_empty[..., None], 0, total / weight[..., None]).reshape(N, H, D).astype(k.dtype)


def _empty_state(shape: tuple[int, ...], width: int) -> State:
    zeros = jnp.zeros(shape, jnp.float32)
    return jnp.zeros((*shape, width), jnp.float32), jnp.full_like(zeros, jnp.finfo(jnp.float32).min), zeros


def _block(k: jax.Array, v: jax.Array, first: jax.Array, size: int, compute: DTypeLike) -> tuple[jax.Array, jax.Array]:
    keys, values = (lax.dynamic_slice_in_dim(x, first, size) for x in (k, v))
    return keys, values.astype(compute)


def _add_block(
    q: jax.Array, keys: jax.Array, values: jax.Array, seen: jax.Array | None, state: State, scale: float
) -> State:
    """Add a block of keys and values `[B, K, D]` to the sums of rows q `[K, G, N, D]`; `seen` `[N, B]`, None: all."""
    scores = _product("kgnd,skd->kgns", q, keys)
    weights, decay, largest = _softmax(scores, seen, state[1], scale)
    total = state[0] * decay[..., None] + _product("kgns,skd->kgnd", weights.astype(values.dtype), values)
    return total, largest, state[2] * decay + weights.sum(-1)


def _add_row(
    q: jax.Array, keys: jax.Array, values: jax.Array, seen: jax.Array | None, state: State, scale: float
) -> State:
    """Add a block for one row, q `[H, K * D]` of `_block_diagonal`, by plain products over the block as it lies."""
    keys, values = (x.reshape(len(x), -1) for x in (keys, values))
    weights, decay, largest = _softmax(_product("hc,sc->hs", q, keys), seen, state[1], scale)
    total = state[0] * decay[:, None] + _product("hs,sc->hc", weights.astype(values.dtype), values)
    return total, largest, state[2] * decay + weights.sum(-1)


def _softmax(scores: jax.Array, seen: jax.Array | None, largest: jax.Array, scale: float) -> State:
    """Return weights of a block's scores, the factor by which earlier sums decay, and the new largest score."""
    if seen is not None:
        scores = jnp.where(seen, scores, -jnp.inf)
    # The scale is positive, so it can be applied here, in the same pass as the exponential.
    new_largest = jnp.maximum(largest, scores.max(-1))
    return jnp.exp((scores - new_largest[..., None]) * scale), jnp.exp((largest - new_largest) * scale), new_largest


def _product(axes: str, a: jax.Array, b: jax.Array) -> jax.Array:
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(axes, a, b, precision=precision, preferred_element_type=jnp.float32)


def _block_diagonal(q: jax.Array) -> jax.Array:
    """Return the queries of a row `[K, G, D]` as `[H, K * D]`, zero outside their own key-value head.

    The heads of a page need not be separated: K times the multiplications take half the time.
    """
    K, G, D = q.shape
    own = jnp.eye(K, dtype=bool)[:, None, :, None]
    return jnp.where(own, q[:, :, None], 0).reshape(K * G, K * D)


def _own_blocks(total: jax.Array, kv_heads: int) -> jax.Array:
    """Return `[K, G, D]` of `[H, K * D]`: for each head the part of its own key-value head."""
    H, width = total.shape
    blocks = total.reshape(kv_heads, H // kv_heads, kv_heads, width // kv_heads)
    return jnp.moveaxis(jnp.diagonal(blocks, axis1=0, axis2=2), -1, 0)
