"""The work list of attention over pages: its parts, and how it is cut.

A page is `PAGE` slots. Every request has a *table*: the pool's page of each of its logical pages. A row of a step sees
an interval of its request's logical slots. Rows that see something are packed into *octets* of one table each, in the
order in which their intervals end. Several octets are a *tile*; a tile with a range of pages is an *item*. Pages that
several requests share are separate items, over the rows of all of these requests.

On a device that runs many programs in parallel, items are distributed to them in equal parts, longest first. Only items
that do not fit a part are cut. Cut and shared items give *partials*, sums that are merged at the end.

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
    """Return how many query heads of a group share an octet's place in a tile.

    As many as fit, or with many rows as many as fill the tile best.
    """
    fitting = [part for part in range(1, tile + 1) if group % part == 0]
    if rows < 2048:
        return fitting[-1]
    return max(fitting, key=lambda part: (tile // part * part, part))


def items_of_tiles(
    start: jax.Array, end: jax.Array, heads: int, boxes: int, tile: int, programs: int
) -> tuple[np.ndarray, jax.Array]:
    """Return items of tiles of rows `[tiles, rows]`, longest first and assigned to programs: (ctas, items) as in
    `WorkParts`.

    The last tile may exceed the rest of a head's `boxes`; its items do not name the excess. Copies to a place beyond an
    array are dropped, but a compiled copy of eight rows to an array of eight goes there from any place.

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
    rank[1::2] = rank[1::2, ::-1]  # a program with a longer item gets a shorter one next
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
    """Positions of the lists of `WorkParts` in the buffer, and the lengths of tables, groups and programs.

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
        """Return the lists of a work list in its buffer."""
        first = {name: place.start for name, (place, _) in cut.places.items()}
        return cls(first["ctas"], first["items"], first["tables"], cut.pages, cut.group, cut.heads, cut.programs)


def check_cut(cut: WorkConfig, q: jax.Array, k: jax.Array, *, packed: bool, tiles: Collection[int]) -> None:
    """Raise ValueError unless the work was cut for these arguments, into items of `tiles` boxes."""
    H, K = q.shape[1], k.shape[1]
    is_cut = (cut.packed if packed else cut.rows, cut.heads * cut.group, cut.box) == (len(q), H, BOX)
    if not is_cut or cut.heads % K or cut.tile not in tiles:
        raise ValueError(f"work must be made for q with {len(q)} rows and {H} heads and k with {K} heads, got {cut}")


def seen_by_work(work: Work, end: jax.Array | None) -> jax.Array:
    """Return the first slot and one past the last, `[2, ...]`, that each row of the boxes of a work list sees.

    Args:
      end: As in `paged_attention`.
    """
    parts = work.parts()
    return jnp.stack(
        [_of_boxes(x, work.config.group, parts.rows) for x in (parts.start, parts.end if end is None else end)]
    )


def tiles_of_rows(
    k_start: jax.Array, k_end: jax.Array, slots: int, kv_heads: int, group: int, tile: int, programs: int
) -> tuple[jax.Array, jax.Array, Lists]:
    """Return the list of items of `attention`: every octet of rows in order, in tiles of `tile` boxes.

    Args:
      k_start, k_end: `[N]`, into `slots` slots.
      programs: Maximum number of programs that share the items.

    Returns:
      (buffer with the lists, first slot and one past the last `[2, ...]` of each row of the boxes, lists).
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
    """Return the value for each row of boxes, `[N]` or packed as in `rows`: octet by octet, then query head by query
    head.
    """
    x = jnp.pad(x, (0, -len(x) % BOX)) if rows is None else x.at[rows].get(mode="fill", fill_value=0)
    x = x.reshape(-1, 1, BOX)
    return jnp.broadcast_to(x, (len(x), group, BOX)).reshape(-1)


PAGE = 128  # slots, the keys that the kernels multiply at once
FAR = 2**30  # a page beyond every other

COLUMNS = 16  # of an item
HEAD, BOX0, BOXES, TABLE, FROM, TO, INNER_FROM, INNER_TO, PARTIAL, DIRECT = range(10)

MAX_SHARED_BOXES = 32768  # maximum boxes of partials of shared pages: 128 MB at D = 128


@dataclass(frozen=True)
class WorkConfig:
    """Parameters that cut the work of attention. Every length of a `Work` follows from them.

    Attributes:
      rows: N, rows of a step.
      requests: T, maximum number of tables.
      pages: B, maximum number of pages of a table.
      box: Rows of an octet.
      group: Boxes of an octet: one for each query head that an item's head stands for; 1 if an item does all heads.
      heads: Heads that have their own items; 1 if an item does all heads.
      tile: Maximum number of boxes of an item.
      small: Boxes of an item for the rest of a request's rows; `tile` if all items are cut alike.
      shared: Tables may share prefixes.
      programs: P programs that share the items; 1 does one item after the other, without partials.
      pieces: Maximum number of partials of a row, if programs share.

    Raises:
      ValueError: A number is out of range.
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
            raise ValueError(f"config.pieces must be at least 4 if config.programs > 1, got {self.pieces}")

    @functools.cached_property
    def octets(self) -> int:
        """Maximum number of octets, which are groups of `box` rows.

        They hold all rows, with a partly filled octet per request, and once more the rows that share pages.
        """
        few = min(self.rows, self.requests) if self.box > 1 else 0
        return -(-self.rows // self.box) + few * (1 + self.shared)

    @functools.cached_property
    def packed(self) -> int:
        """Places of packed queries; 0 if one program takes them in the order of their rows."""
        return (self.octets + self.tile) * self.box if self.programs > 1 else 0

    @functools.cached_property
    def tiles(self) -> int:
        """Maximum number of items of a head, before they are cut."""
        return -(-self.octets // (self.small // self.group)) + min(self.rows, self.requests) * (1 + self.shared)

    @functools.cached_property
    def items(self) -> int:
        return self.heads * self.tiles + self.programs

    @functools.cached_property
    def partial_boxes(self) -> int:
        """Maximum number of boxes of all partials; each occupies a multiple of eight boxes."""
        if self.programs == 1:
            return 0
        # Rows that share pages: their own octets, and those in which they are packed densely, for a few levels.
        octets = min(self.rows, self.requests) + 4 * -(-self.rows // self.box)
        shared = min(self.heads * octets * eights(self.group), MAX_SHARED_BOXES) if self.shared else 0
        return 2 * self.programs * eights(self.tile) + shared

    @functools.cached_property
    def merges(self) -> int:
        """Maximum number of rows of partials."""
        return min(self.rows * self.heads * self.pieces, self.partial_boxes * self.box // self.group)

    @functools.cached_property
    def places(self) -> dict[str, tuple[slice, tuple[int, ...]]]:
        """Position and shape of each part of a work list in its buffer."""
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
        """Length of the buffer of a work list, in int32 numbers."""
        return self.places["merge"][0].stop

    def abstract(self) -> Work:
        """Return a work list of abstract shapes."""
        return Work(jax.ShapeDtypeStruct((self.size,), np.int32), self)


class WorkParts(NamedTuple):
    """Parts of a work list, int32.

    Attributes:
      ctas: `[P + 1]`, program c does the items ctas[c] to ctas[c + 1].
      items: `[I, 16]`: head; first box (octet * group); boxes; table; pages from, to; the pages from, to that all its
        rows see fully; first box of its partial, or -1 if it gives the result; its first row if its rows follow each
        other in the step from a multiple of `box` on and it can write the result to its place, else -1.
      tables: `[T, B]`, the pool's page of each logical page; unused ones are 0.
      rows: `[R + tile * box]`, the step's row at each place of the octets, N for none.
      start, end: `[N]`, logical slots that each row sees.
      unpack: `[N]`, the place in the octets of a row whose result one item gives, -1 if the item writes it to its
        place; R for rows that see nothing.
      merge_first: `[N * heads + 1]`, row n of head h has the entries of `merge` from merge_first[n * heads + h] on.
      merge: A row of a partial: its box * `box` + its place in the octet. The rows of the group's other query heads
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
      buffer: All parts in one array, so that they are transferred together.
      config: How the work was cut.
    """

    buffer: Any
    config: WorkConfig

    def parts(self) -> WorkParts:
        """Return views of the buffer."""
        return WorkParts(**{name: self.buffer[at].reshape(shape) for name, (at, shape) in self.config.places.items()})

    def packing(self) -> Any:
        """Return the row at each place of packed queries for `paged_attention`, `config.rows` for none; None if not
        packed.
        """
        return self.parts().rows if self.config.packed else None

    def through(self, tables: jax.Array) -> Work:
        """Return the same work over tables that the device decides, int32 `[T, B]`, of the same lengths.

        Which pages rows visit follows from lengths alone, unless tables share prefixes.
        """
        at, _ = self.config.places["tables"]
        return Work(self.buffer.at[at].set(tables.reshape(-1)), self.config)


def eights(boxes: Any) -> Any:
    """Return `boxes`, rounded up to a multiple of eight."""
    return -(-boxes // 8) * 8
