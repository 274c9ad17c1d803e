"""Items of the GPU kernels of attention: boxes of rows, and the ranges of pages that they visit.

The unit of packing is a *box*: eight rows of one query head. The boxes of an item's head are numbered octet by octet,
then query head by query head (`box = octet * group + g`), and eight of them fill the 64 rows that a warpgroup
multiplies.
"""

from collections.abc import Collection
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from vlcache_jax.pallas_kernels.attention.work import (
    BOX0,
    BOXES,
    COLUMNS,
    DIRECT,
    FAR,
    FROM,
    HEAD,
    INNER_FROM,
    INNER_TO,
    PAGE,
    PARTIAL,
    TO,
    Work,
    WorkConfig,
)

BOX = 8  # rows that are copied together: the height of a swizzled tile in shared memory
EIGHT = 8  # boxes of a warpgroup, whose matrix product has 64 rows


def part_of_group(group: int, tile: int, rows: int) -> int:
    """Query heads of a group that share an octet's place in a tile.

    As many as fit; where rows are many, as many as fill the tile best.
    """
    fitting = [part for part in range(1, tile + 1) if group % part == 0]
    if rows < 2048:
        return fitting[-1]
    return max(fitting, key=lambda part: (tile // part * part, part))


def items_of_tiles(
    start: jax.Array, end: jax.Array, heads: int, boxes: int, tile: int, programs: int
) -> tuple[np.ndarray, jax.Array]:
    """Items of tiles of rows [tiles, rows], longest first, dealt to the programs: (ctas, items) as in `work.Parts`.

    The last tile may be longer than what is left of a head's `boxes`, and its items name no others. What is copied to a
    place beyond an array is lost, but a compiled copy of eight rows to an array of eight goes there from any place.

    A tile visits all pages from the first to the last that its rows see; one without any visits one page in vain.
    """
    some = start < end
    last = jnp.where(some, pl.cdiv(end, PAGE), 1).max(1)
    first = jnp.minimum(jnp.where(some, start // PAGE, FAR).min(1), last - 1)
    inner_from = jnp.where(some, pl.cdiv(start, PAGE), 0).max(1)
    inner_to = jnp.where(some, end // PAGE, FAR).min(1)
    order = jnp.argsort(first - last)

    count = len(start) * heads
    rank = np.arange(-(-count // programs) * programs).reshape(-1, programs)
    rank[1::2] = rank[1::2, ::-1]  # who had a longer one has a shorter one next
    of_programs = rank.transpose()
    there = of_programs < count
    rank = of_programs[there]
    chosen = order[rank // heads]
    box0 = chosen * tile
    columns: dict[int, Any] = {HEAD: rank % heads, BOX0: box0, BOXES: jnp.minimum(boxes - box0, tile)}
    columns |= {FROM: first[chosen], TO: last[chosen]}
    columns |= {INNER_FROM: inner_from[chosen], INNER_TO: inner_to[chosen], PARTIAL: -1, DIRECT: -1}
    items = [jnp.broadcast_to(columns.get(i, 0), count) for i in range(COLUMNS)]
    return np.cumsum([0, *there.sum(1)]).astype(np.int32), jnp.stack(items, 1).astype(jnp.int32)


class Lists(NamedTuple):
    """Where the lists of `work.Parts` lie in the buffer; the lengths of tables, groups and programs.

    `tables` is None where pages lie in order.
    """

    ctas: int
    items: int
    tables: int | None
    pages: int
    group: int
    heads: int
    programs: int

    @classmethod
    def of_work(cls, cut: WorkConfig) -> Self:
        """Those of a work list in its buffer."""
        first = {name: place.start for name, (place, _) in cut.places.items()}
        return cls(first["ctas"], first["items"], first["tables"], cut.pages, cut.group, cut.heads, cut.programs)


def check_cut(cut: WorkConfig, q: jax.Array, k: jax.Array, *, packed: bool, tiles: Collection[int]) -> None:
    """Raises ValueError unless work was cut for these arguments, into items of so many boxes."""
    H, K = q.shape[1], k.shape[1]
    is_cut = (cut.packed if packed else cut.rows, cut.heads * cut.group, cut.box) == (len(q), H, BOX)
    if not is_cut or cut.heads % K or cut.tile not in tiles:
        raise ValueError(f"work must be cut for {len(q)} rows, {H} heads, {K} key-value heads, got {cut}")


def seen_by_work(work: Work, end: jax.Array | None) -> jax.Array:
    """First slot and one past the last, [2, ...], that each row of the boxes of a work list sees.

    Args:
      end: as in `paged_attention`.
    """
    parts = work.parts()
    return jnp.stack(
        [_of_boxes(x, work.config.group, parts.rows) for x in (parts.start, parts.end if end is None else end)]
    )


def tiles_of_rows(
    k_start: jax.Array, k_end: jax.Array, slots: int, kv_heads: int, group: int, tile: int, programs: int
) -> tuple[jax.Array, jax.Array, Lists]:
    """What `attention` does, as a list of items: every octet of rows in order, in tiles of so many boxes.

    Args:
      k_start, k_end: [N], into so many slots.
      programs: that share the items at most.

    Returns:
      (buffer with the lists, first slot and one past the last [2, ...] of each row of the boxes, lists).
    """
    boxes = -(-len(k_start) // BOX) * group
    tiles = -(-boxes // tile)

    def of_boxes(x: jax.Array) -> jax.Array:  # [N] -> [tiles, rows]
        x = _of_boxes(jnp.clip(x, 0, slots), group)
        return jnp.pad(x, (0, tiles * tile * BOX - len(x))).reshape(tiles, -1)

    start, end = of_boxes(k_start), of_boxes(k_end)
    programs = min(programs, tiles * kv_heads)
    ctas, items = items_of_tiles(start, end, kv_heads, boxes, tile, programs)
    lists = Lists(0, len(ctas), None, 0, group, kv_heads, programs)
    return jnp.concatenate([ctas, items.reshape(-1)]), jnp.stack([start.reshape(-1), end.reshape(-1)]), lists


def _of_boxes(x: jax.Array, group: int, rows: jax.Array | None = None) -> jax.Array:
    """Of each row of boxes, [N] or packed as `rows` says: octet by octet, then query head by query head."""
    x = jnp.pad(x, (0, -len(x) % BOX)) if rows is None else x.at[rows].get(mode="fill", fill_value=0)
    x = x.reshape(-1, 1, BOX)
    return jnp.broadcast_to(x, (len(x), group, BOX)).reshape(-1)
