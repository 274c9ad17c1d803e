"""Makes the work list of a step's attention: rows into octets, octets into tiles, tiles into items. Host, numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vlcache_jax.pallas_kernels.attention.shares import Numbers, Pieces, Tiles, share_out
from vlcache_jax.pallas_kernels.attention.work import (
    BOX0,
    BOXES,
    DIRECT,
    FAR,
    FROM,
    HEAD,
    INNER_FROM,
    INNER_TO,
    PAGE,
    PARTIAL,
    TABLE,
    TO,
    Parts,
    Work,
    WorkConfig,
    eights,
)

Index = npt.NDArray[np.int32]


class Shared(NamedTuple):
    """The first `pages` pages of these tables are the same."""

    tables: Sequence[int]
    pages: int


def make_work(
    table: npt.ArrayLike,
    start: npt.ArrayLike,
    end: npt.ArrayLike,
    tables: Sequence[npt.ArrayLike],
    config: WorkConfig,
    *,
    least: npt.ArrayLike | None = None,
    shared: Sequence[Shared] = (),
) -> Work:
    """Cuts the work of a step's attention.

    Args:
      table: which table each row sees through, [n]; n is at most `config.rows`, and further rows see nothing.
      start, end: the logical slots start <= s < end that it sees, [n].
      tables: of each request, the pool's page of each of its logical pages.
      least: what `end` is at least where the device decides, [n]; None is `end`.
      shared: prefixes that several tables have in common, each once; a table may be in several, of which the longer
        ones have no other tables. Rows that see them whole visit them together, where `config` allows it, that saves
        time, and there is room for their partials.

    Returns:
      The work list; it is never changed later, as a device may read it at any time.

    Raises:
      ValueError: an argument is wrong; the message names it.
    """
    table, start, end = (np.asarray(x, np.int64) for x in (table, start, end))
    least = end if least is None else np.minimum(np.asarray(least, np.int64), end)
    lengths = np.array([len(pages) for pages in tables], np.int64)  # type: ignore[arg-type]
    _check(table, start, end, lengths, config)
    work = Work(np.zeros(config.size, np.int32), config)
    parts = work.parts()
    for target, pages in zip(parts.tables, tables, strict=False):
        target[: len(pages)] = pages  # type: ignore[arg-type]
    parts.start[: len(start)], parts.end[: len(end)] = start, end
    live = np.flatnonzero(start < end)
    rows = _Rows(live, table[live], start[live], end[live], least[live])
    groups = _worthwhile(rows, tables, shared, config)
    cuts = (_cut(rows, groups[:count], config) for count in range(len(groups), -1, -1))
    cut = next(cut for cut in cuts if cut is not None)  # the longest prefixes are given up first; with none, all fits
    _write(parts, rows, *cut, config)
    return work


class _Rows(NamedTuple):
    """Rows that see something: [n] each."""

    row: Numbers
    table: Numbers
    start: Numbers
    end: Numbers
    least: Numbers


class _Group(NamedTuple):
    """Rows (as indices into `_Rows`) that visit the pages from `first` to `last` of a shared prefix together."""

    rows: Numbers
    table: int
    first: int
    last: int


def _check(table: Any, start: Any, end: Any, lengths: Any, config: WorkConfig) -> None:
    if table.ndim != 1 or len(table) > config.rows:
        raise ValueError(f"table must be [n] with n at most {config.rows}, the rows of config, got {table.shape}")
    for name, x in (("start", start), ("end", end)):
        if x.shape != table.shape:
            raise ValueError(f"{name} must have the shape of table, {table.shape}, got {x.shape}")
    if len(lengths) > config.requests or max(lengths, default=0) > config.pages:
        raise ValueError(
            f"tables must be at most {config.requests} of at most {config.pages} pages, got {len(lengths)} of up to "
            f"{max(lengths, default=0)}"
        )
    if ((table < 0) | (table >= len(lengths))).any():
        raise ValueError(f"table must name one of {len(lengths)} tables, got {table.min()} to {table.max()}")
    wrong = (start < end) & ((start < 0) | (end > PAGE * lengths[table] if len(lengths) else False))
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(
            f"start and end must lie within the {lengths[table[row]]} pages of the row's table, got {start[row]} and "
            f"{end[row]} for row {row}"
        )


def _worthwhile(
    rows: _Rows, tables: Sequence[npt.ArrayLike], shared: Sequence[Shared], config: WorkConfig
) -> tuple[_Group, ...]:
    """The groups of rows whose visiting a prefix together saves more blocks than its partials cost."""
    groups: list[_Group] = []
    if not shared or not config.shared:
        return ()
    done = np.zeros(len(tables), np.int64)  # pages that an earlier group of the table visits
    per = config.tile // config.group
    for members, pages in sorted(shared, key=lambda prefix: prefix.pages):
        ids = np.asarray(members, np.int64)
        if len(ids) == 0 or ids.min() < 0 or ids.max() >= len(tables):
            raise ValueError(f"shared must name some of {len(tables)} tables, got {list(members)}")
        first = int(done[ids[0]])
        common = np.asarray(tables[int(ids[0])])[:pages]
        same = all(np.array_equal(np.asarray(tables[i])[:pages], common) for i in ids.tolist()) and len(common) == pages
        if not same or (done[ids] != first).any():
            raise ValueError(f"shared must have tables with the same first {pages} pages, nested, got {list(members)}")
        whole = (rows.start <= 0) & (rows.least >= pages * PAGE)
        joined = np.flatnonzero(np.isin(rows.table, ids) & whole)
        count = np.bincount(rows.table[joined], minlength=1)
        apart, together = (int(_up(_up(x, config.box), per).sum()) for x in (count, np.array(len(joined))))
        if (pages - first) * (apart - together) > apart + together:
            groups.append(_Group(joined, int(ids[0]), first, pages))
            done[ids] = pages
    return tuple(groups)


def _cut(rows: _Rows, groups: tuple[_Group, ...], config: WorkConfig) -> tuple[Tiles, Numbers, Pieces] | None:
    """Tiles, the place of each row in its own octet and in those of each group [1 + groups, n] (-1: none), and items.

    None if the lengths of the configuration cannot hold it.
    """
    count, box = len(rows.row), config.box
    tail, level = np.zeros(count, np.int64), np.zeros(count, np.int64)
    chain = np.zeros((len(groups), count), np.int64)  # the groups of each row, the one with the shortest prefix first
    for number, group in enumerate(groups, 1):
        chain[level[group.rows], group.rows] = number
        tail[group.rows] = group.last
        level[group.rows] += 1
    levels = int(level.max(initial=0))
    apart = np.concatenate([rows.table[None], chain[:levels][::-1]])  # rows of an octet agree in these
    order = np.lexsort((rows.end, *apart))
    table, start, end, least = (x[order] for x in rows[1:])
    tail, apart = tail[order], apart[:, order]

    new = np.ones(count, bool)
    new[1:] = (apart[:, 1:] != apart[:, :-1]).any(0)
    first_row = np.flatnonzero(new)
    run_of = np.cumsum(new) - 1
    octets = -(-np.diff(first_row, append=count) // box)
    first_octet = np.cumsum(octets) - octets
    within = np.arange(count) - first_row[run_of] if count else run_of
    place = np.full((1 + len(groups), count), -1)
    place[0, order] = (first_octet[run_of] + within // box) * box + within % box if count else 0

    run, offset, height = _tile_starts(octets, config)
    at = first_row[run] + offset * box
    pages = (
        (np.minimum, np.maximum(start // PAGE, tail)),
        (np.maximum, -(-end // PAGE)),
        (np.maximum, -(-start // PAGE)),
        (np.minimum, least // PAGE),
    )
    bounds = [reduce.reduceat(x, at) if count else np.zeros(0, np.int64) for reduce, x in pages]
    kept = bounds[0] < bounds[1]
    own = [first_octet[run] + offset, height, table[at], *bounds, tail[at] > 0]
    tiles = [Tiles(*(x[kept] for x in own))]

    used = int(octets.sum())
    for number, group in enumerate(groups, 1):
        mine = np.sort(place[0, group.rows] // box)
        begin, stop = int(mine[0]), int(mine[-1]) + 1
        if box > 1 and 2 * -(-len(group.rows) // box) <= stop - begin:  # packed densely they fill half the octets
            begin, stop = used, used + -(-len(group.rows) // box)
            place[number, group.rows] = begin * box + np.arange(len(group.rows))
            used = stop
        else:
            place[number, group.rows] = place[0, group.rows]
        _, offset, height = _tile_starts(np.array([stop - begin]), config)
        same = np.ones_like(offset)
        tiles.append(
            Tiles(
                octet=begin + offset,
                octets=height,
                table=group.table * same,
                first=group.first * same,
                last=group.last * same,
                inner_from=0 * same,
                inner_to=FAR * same,
                partial=same > 0,
            )
        )
    merged = Tiles(*(np.concatenate(column) for column in zip(*tiles, strict=True))) if groups else tiles[0]
    if used > config.octets or len(merged.octet) > config.tiles or (config.programs > 1 and levels >= config.pieces):
        return None
    pieces = share_out(merged, config, config.pieces // (1 + levels))
    if config.programs > 1 and groups:
        is_partial = merged.partial[pieces.tile] | pieces.is_cut
        boxes = eights(merged.octets[pieces.tile[is_partial]] * config.group).sum()
        if boxes > config.partial_boxes:
            return None
    return merged, place, pieces


def _tile_starts(octets: Numbers, config: WorkConfig) -> tuple[Any, Any, Any]:
    """Cuts runs of octets into tiles: of which run each is, its first octet in it, and how many octets it has.

    What is left of a run is one more large tile if it fills most of it, else small ones.
    """
    per, small = config.tile // config.group, config.small // config.group
    whole, rest = octets // per, octets % per
    left = np.where(4 * rest > 3 * per, 1, -(-rest // small))
    count = whole + left
    run = np.repeat(np.arange(len(octets)), count)
    index = np.arange(len(run)) - np.repeat(np.cumsum(count) - count, count)
    beyond = np.maximum(index - whole[run], 0)
    offset = (index - beyond) * per + beyond * small
    most = np.where((index < whole[run]) | (4 * rest[run] > 3 * per), per, small)
    return run, offset, np.minimum(most, octets[run] - offset)


def _write(parts: Parts, rows: _Rows, tiles: Tiles, place: Numbers, pieces: Pieces, config: WorkConfig) -> None:
    """Fills in what is not filled in yet."""
    box, group, heads = config.box, config.group, config.heads
    parts.rows[:] = config.rows
    for places in place:
        packed = places >= 0
        parts.rows[places[packed]] = rows.row[packed]

    order = np.argsort(pieces.program, kind="stable")
    pieces = Pieces(*[column[order] for column in pieces])  # type: ignore[arg-type]
    tile = pieces.tile
    is_partial = (tiles.partial[tile] | pieces.is_cut) & (config.programs > 1)
    octets = tiles.octets[tile]
    boxes = np.where(is_partial, eights(octets * group), 0)
    columns = {
        HEAD: pieces.head,
        BOX0: tiles.octet[tile] * group,
        BOXES: octets * group,
        TABLE: tiles.table[tile],
        FROM: pieces.first,
        TO: pieces.last,
        INNER_FROM: tiles.inner_from[tile],
        INNER_TO: tiles.inner_to[tile],
        PARTIAL: np.where(is_partial, np.cumsum(boxes) - boxes, -1),
    }
    for column, values in columns.items():
        parts.items[: len(tile), column] = values
    np.cumsum(np.bincount(pieces.program, minlength=config.programs), out=parts.ctas[1:])
    if config.programs == 1:
        return
    first_row = _first_rows(parts.rows, tiles, config)
    parts.items[: len(tile), DIRECT] = np.where(is_partial, -1, first_row[tile])

    # Which rows the items of each octet give: the row at its place, and which of its own rows have partials.
    cut = np.flatnonzero(is_partial)
    size = octets[cut] * box
    index = np.repeat(np.arange(len(cut)), size)
    lane = np.arange(len(index)) - np.repeat(np.cumsum(size) - size, size)
    row = parts.rows[columns[BOX0][cut][index] // group * box + lane]
    here = row < config.rows
    index, lane, row = index[here], lane[here], row[here]
    target = row * heads + pieces.head[cut][index]
    at = (columns[PARTIAL][cut][index] + lane // box * group) * box + lane % box
    by_target = np.argsort(target, kind="stable")
    parts.merge[: len(at)] = at[by_target]
    np.cumsum(np.bincount(target, minlength=config.rows * heads), out=parts.merge_first[1:])
    parts.unpack[:] = config.octets * box
    parts.unpack[rows.row] = place[0]
    direct = first_row >= 0
    count = tiles.octets[direct] * box
    parts.unpack[np.repeat(first_row[direct] - np.cumsum(count) + count, count) + np.arange(count.sum())] = -1


def _first_rows(rows: Index, tiles: Tiles, config: WorkConfig) -> Numbers:
    """The first row of each tile whose rows follow each other in the step, and no other items visit; -1 of others.

    It is a multiple of `box`, as bulk copies ask.
    """
    begin = tiles.octet * config.box
    last = begin + tiles.octets * config.box - 1
    breaks = np.concatenate([[0], np.cumsum(rows[1:] != rows[:-1] + 1)])
    follow = (breaks[last] == breaks[begin]) & (rows[last] < config.rows)
    return np.where(follow & (rows[begin] % config.box == 0) & ~tiles.partial, rows[begin], -1)


def _up(x: Any, unit: int) -> Any:
    """How many units hold x."""
    return -(-x // unit)
