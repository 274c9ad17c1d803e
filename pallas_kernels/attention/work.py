"""The work list of attention over pages: its parts, and how it is cut.

A page is `PAGE` slots. Every request has a *table*: the pool's page of each of its logical pages. A row of a step sees
an interval of its request's logical slots. Rows that see something are packed into *octets* of one table each, in the
order in which their intervals end; several octets are a *tile*; a tile with a range of pages is an *item*. Pages that
several requests share are items of their own, over the rows of all of them.

On a device that runs many programs side by side, items are dealt to them in equal parts, longest first, and only what
cannot be dealt whole is cut. What is cut or shared gives *partials*, sums that are merged at the end.

The unit of GPU kernels is a *box*: eight rows of one query head. The boxes of an item's head are numbered octet by
octet, then query head by query head (`box = octet * group + g`), and eight of them fill the 64 rows that a warpgroup
multiplies. `packing.make_work` makes a work list.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

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
    """Items of tiles of rows [tiles, rows], longest first, dealt to the programs: (ctas, items) as in `WorkParts`.

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
    """Where the lists of `WorkParts` lie in the buffer; the lengths of tables, groups and programs.

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


PAGE = 128  # slots, the keys that the kernels multiply at once
FAR = 2**30  # a page beyond every other

COLUMNS = 16  # of an item
HEAD, BOX0, BOXES, TABLE, FROM, TO, INNER_FROM, INNER_TO, PARTIAL, DIRECT = range(10)

MAX_SHARED_BOXES = 32768  # of partials of shared pages: 128 MB at D = 128


@dataclass(frozen=True)
class WorkConfig:
    """How work is cut. Every length of a `Work` follows from it.

    Attributes:
      rows: N, rows of a step.
      requests: T, tables at most.
      pages: B, pages of a table at most.
      box: rows of an octet.
      group: boxes of an octet: one for each query head that an item's head stands for; 1 where an item does all heads.
      heads: that have items of their own; 1 where an item does all heads.
      tile: boxes of an item at most.
      small: boxes of an item of what is left of a request's rows; `tile` where all items are cut alike.
      shared: tables may share prefixes.
      programs: P that share the items; 1 does one after the other, and keeps no partials.
      pieces: partials of a row at most, where programs share.

    Raises:
      ValueError: numbers that are not such.
    """

    rows: int
    requests: int
    pages: int
    box: int = 8
    group: int = 1
    heads: int = 1
    tile: int = 16
    small: int = 16
    shared: bool = False
    programs: int = 1
    pieces: int = 0

    def __post_init__(self) -> None:
        for name in ("rows", "requests", "pages", "box", "group", "heads", "programs"):
            if getattr(self, name) < 1:
                raise ValueError(f"config.{name} must be positive, got {getattr(self, name)}")
        if not self.group <= self.small <= self.tile:
            raise ValueError(f"config must have group <= small <= tile, got {self.group}, {self.small}, {self.tile}")
        if self.programs > 1 and self.pieces < 4:
            raise ValueError(f"config.pieces must be at least 4 where programs share, got {self.pieces}")

    @functools.cached_property
    def octets(self) -> int:
        """Octets at most: of the rows, of which every request may leave one unfilled, and of rows that share pages."""
        few = min(self.rows, self.requests) if self.box > 1 else 0
        return -(-self.rows // self.box) + few * (1 + self.shared)

    @functools.cached_property
    def packed(self) -> int:
        """Places in which queries stand packed; 0 where one program takes them as their rows lie."""
        return (self.octets + self.tile) * self.box if self.programs > 1 else 0

    @functools.cached_property
    def tiles(self) -> int:
        """Items of a head at most, before they are cut."""
        return -(-self.octets // (self.small // self.group)) + min(self.rows, self.requests) * (1 + self.shared)

    @functools.cached_property
    def items(self) -> int:
        return self.heads * self.tiles + self.programs

    @functools.cached_property
    def partial_boxes(self) -> int:
        """Boxes of all partials at most; each occupies whole eights of boxes."""
        if self.programs == 1:
            return 0
        # Of rows that share pages: their own octets, and those in which they are packed densely, for a few levels.
        octets = min(self.rows, self.requests) + 4 * -(-self.rows // self.box)
        shared = min(self.heads * octets * eights(self.group), MAX_SHARED_BOXES) if self.shared else 0
        return 2 * self.programs * eights(self.tile) + shared

    @functools.cached_property
    def merges(self) -> int:
        """Rows of partials at most."""
        return min(self.rows * self.heads * self.pieces, self.partial_boxes * self.box // self.group)

    @functools.cached_property
    def places(self) -> dict[str, tuple[slice, tuple[int, ...]]]:
        """Where each part of a work list lies in its buffer, and its shape."""
        merging = self.programs > 1
        shapes = {
            "ctas": (self.programs + 1,),
            "items": (self.items, COLUMNS),
            "tables": (self.requests, self.pages),
            "rows": ((self.octets + self.tile) * self.box,),  # a tile more, for reading beyond the last one
            "start": (self.rows,),
            "end": (self.rows,),
            "unpack": (self.rows * merging,),
            "merge_first": ((self.rows * self.heads + 1) * merging,),
            "merge": (self.merges,),
        }
        ends = itertools.accumulate((int(np.prod(shape)) for shape in shapes.values()), initial=0)
        return {
            name: (slice(begin, stop), shape)
            for (name, shape), (begin, stop) in zip(shapes.items(), itertools.pairwise(ends), strict=True)
        }

    @functools.cached_property
    def size(self) -> int:
        """Numbers in the buffer of a work list."""
        return self.places["merge"][0].stop

    def abstract(self) -> Work:
        """A work list of shapes."""
        return Work(jax.ShapeDtypeStruct((self.size,), np.int32), self)


class WorkParts(NamedTuple):
    """What a work list says, int32.

    Attributes:
      ctas: [P + 1], program c does the items ctas[c] to ctas[c + 1].
      items: [I, 16]: head; first box (octet * group); boxes; table; pages from, to; all its rows see the pages from,
        to whole; first box of its partial, or -1: it gives the result; its first row, if its rows follow each other in
        the step from a multiple of `box` on and it can write the result to its place, else -1.
      tables: [T, B], the pool's page of each logical page; unused ones are 0.
      rows: [R + tile * box], the step's row at each place of the octets, N for none.
      start, end: [N], logical slots that each row sees.
      unpack: [N], the place in the octets of a row whose result one item gives, -1 if that writes it to its place; R
        for rows that see nothing.
      merge_first: [N * heads + 1], row n of head h has the entries of `merge` from merge_first[n * heads + h] on.
      merge: a row of a partial: its box * `box` + its place in the octet; those of the group's other query heads
        follow at a distance of `box`.
    """

    ctas: Any
    items: Any
    tables: Any
    rows: Any
    start: Any
    end: Any
    unpack: Any
    merge_first: Any
    merge: Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=["buffer"], meta_fields=["config"])
@dataclass(frozen=True, eq=False)
class Work:
    """The work list of one step and row bound.

    Attributes:
      buffer: its parts in one array, so that they travel together.
      config: how it was cut.
    """

    buffer: Any
    config: WorkConfig

    def parts(self) -> WorkParts:
        """Views of the buffer."""
        return WorkParts(**{name: self.buffer[at].reshape(shape) for name, (at, shape) in self.config.places.items()})

    def packing(self) -> Any:
        """Where queries are packed for `paged_attention`, the row at each place, `config.rows` for none; else None."""
        return self.parts().rows if self.config.packed else None

    def through(self, tables: jax.Array) -> Work:
        """The same work over tables that the device decides, int32 [T, B], which must be as long: what rows visit
        follows from lengths alone, unless tables share prefixes."""
        at, _ = self.config.places["tables"]
        return Work(self.buffer.at[at].set(tables.reshape(-1)), self.config)


def eights(boxes: Any) -> Any:
    """Rounded up to whole eights."""
    return -(-boxes // 8) * 8
