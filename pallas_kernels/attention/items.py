"""Items of the GPU kernels of attention: boxes of rows, and the ranges of pages that they visit.

The unit of packing is a *box*: eight rows of one query head. The boxes of an item's head are numbered octet by octet,
then query head by query head (`box = octet * group + g`), and eight of them fill the 64 rows that a warpgroup
multiplies.
"""

from typing import Any, NamedTuple

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
