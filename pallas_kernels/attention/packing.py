"""Makes the work list of a step's attention: rows into octets, octets into tiles, tiles into items (host, numpy).

Tiles are dealt to the programs of a device in equal parts.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

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
    TABLE,
    TO,
    Work,
    WorkConfig,
    WorkParts,
    eights,
)

# Costs of a program, in full blocks: for an item in addition to its blocks, for a partial, and extra for a block with a
# masked side.
ITEM, MASK = 0.36, 0.12

Numbers = npt.NDArray[np.int64]


class ItemTiles(NamedTuple):
    """Items before they are distributed, `[d]` each. `partial` marks those of rows that other items visit, too."""

    octet: Numbers
    octets: Numbers
    table: Numbers
    first: Numbers
    last: Numbers
    inner_from: Numbers
    inner_to: Numbers
    partial: npt.NDArray[np.bool_]


class Pieces(NamedTuple):
    """Items, `[i]` each: tile and head, pages, whether the tile was cut for the item, and program."""

    tile: Numbers
    head: Numbers
    first: Numbers
    last: Numbers
    is_cut: npt.NDArray[np.bool_]
    program: Numbers


def stable_order(numbers: Numbers, below: int) -> Numbers:
    """Return the stable sorting order of integers from 0 to `below`. Small dtypes use a radix sort."""
    return (numbers.astype(np.uint16) if below <= 1 << 16 else numbers).argsort(kind="stable")


def share_out(tiles: ItemTiles, config: WorkConfig, limit: int) -> Pieces:
    """Distribute tiles, times heads, over the programs. Tiles are cut only if necessary, none into more than
    `limit`.
    """
    # Cost of each tile, in pages.
    pages = tiles.last - tiles.first
    inner = np.minimum(np.maximum(tiles.inner_to - tiles.first, 0), pages)  # pages before those whose ends are masked
    masked = np.minimum(np.maximum(tiles.inner_from - tiles.first, 0), pages)
    fixed = ITEM * (1 + tiles.partial) + MASK * masked
    cost = fixed + inner + (1 + MASK) * (pages - inner)
    # Every tile comes once per head, the most expensive first.
    order = (-cost if config.programs > 1 else -tiles.octets).argsort(kind="stable")
    tile = order.repeat(config.heads)
    head = np.arange(len(tile)) % config.heads
    costs = cost[tile]
    programs = config.programs
    if programs == 1 or not len(tile):
        whole = np.zeros(len(tile), np.int64)
        return Pieces(tile, head, tiles.first[tile], tiles.last[tile], whole > 0, whole)

    program = np.empty(len(tile), np.int64)
    load = np.zeros(programs)
    loads = [load]
    # The most expensive of these goes to the program with the smallest load.
    for dealt in range(0, len(tile), programs):
        mine = costs[dealt : dealt + programs]
        free = load.argsort(kind="stable")[: len(mine)]
        load = load.copy()
        load[free] += mine
        program[dealt : dealt + programs] = free
        loads.append(load)
    # Balanced enough: nothing is cut.
    mean = costs.sum() / programs
    dealt_whole = Pieces(tile, head, tiles.first[tile], tiles.last[tile], np.zeros(len(tile), bool), program)
    if load.max() - mean <= max(1.0, 0.015 * mean):
        return dealt_whole

    # Full rounds stay while no program exceeds its share; the rest is cut along one line of pages.
    share = max(mean, costs[0] / max(limit - 1, 1) + 2 * ITEM)
    rounds = bisect.bisect_right(loads, share, key=np.ndarray.max) - 1  # loads grow from round to round
    dealt = min(rounds * programs, len(tile))
    if dealt == len(tile):
        return dealt_whole
    by_room = loads[rounds].argsort(kind="stable")
    rest = tile[dealt:]
    length = pages[rest]
    begin = np.zeros(len(rest) + 1, np.int64)  # where each begins on the line of all their pages
    length.cumsum(out=begin[1:])
    cuts = _cuts(begin, costs[dealt:], rest, fixed, inner, loads[rounds][by_room], share)
    # Items begin where a tile and where a program's share begins.
    points = np.concatenate([begin, cuts])  # where an item begins, and the end of the line
    points.sort()
    new = np.empty(len(points), bool)
    new[0] = True
    np.not_equal(points[1:], points[:-1], out=new[1:])
    points = points[new]
    points, stops = points[:-1], points[1:]
    item = begin.searchsorted(points, side="right") - 1
    # Each of them is a piece, after those that were distributed uncut.
    size, whole_size = stops - points, length[item]
    first = dealt_whole.first[dealt:][item] + points - begin[item]
    cut = Pieces(
        rest[item],
        head[dealt:][item],
        first,
        first + size,
        size < whole_size,
        by_room[cuts.searchsorted(points, side="right")],
    )
    if dealt:
        cut = Pieces(*(np.concatenate([before[:dealt], after]) for before, after in zip(dealt_whole, cut, strict=True)))
    if np.bincount(item).max() > limit:
        return dealt_whole
    # The same cost as in `cost`: a page that is masked on both sides counts as masked twice.
    length = cut.last - cut.first
    masked = np.minimum(np.maximum(tiles.inner_from[cut.tile] - cut.first, 0), length)
    masked += np.minimum(np.maximum(cut.last - tiles.inner_to[cut.tile], 0), length)
    each = ITEM * (1 + (tiles.partial[cut.tile] | cut.is_cut)) + cut.last - cut.first + MASK * masked
    return cut if np.bincount(cut.program, each, programs).max() < load.max() else dealt_whole


def _cuts(begin: Any, cost: Any, tile: Any, fixed: Any, inner: Any, load: Any, share: float) -> Numbers:
    """Return where the programs' shares of a line of items end, in pages `[P]`; `fixed`, `inner` are of their tiles.

    A program that begins inside an item pays for an item and a partial again. How many do is known only afterwards, so
    the share, at least `share`, is found in a few iterations. Pages that rounding takes from a program go to the next.
    """
    line = [0.0, *cost.cumsum().tolist()]
    start, of_tile, used = begin.tolist(), tile.tolist(), load.tolist()
    ends = list(zip(fixed.tolist(), inner.tolist(), strict=True))
    programs, items = len(used), len(of_tile)
    share = max(share, 2 * ITEM + 1 + MASK)  # less than a page cannot be distributed
    end, again, masked = line[-1], 2 * ITEM, 1 + MASK
    inside = programs - min(items, programs) / 2
    full = max(share, (end + sum(used) + again * inside) / programs)
    cuts: list[int] = []
    find = bisect.bisect_right
    for _ in range(8):
        cuts, at, place, debt, paid = [], 0.0, 0, 0.0, 0.0
        for spent in used:
            target = at + full - spent + debt - paid
            if at < target < end:
                item = find(line, target) - 1
                reached, stop = line[item], start[item]
                before, whole = ends[of_tile[item]]
                pages, paid = target - reached - before, 0.0
                if pages > 0:
                    count = round(pages if pages <= whole else whole + (pages - whole) / masked)
                    if stop + count >= start[item + 1]:
                        reached, stop = line[item + 1], start[item + 1]
                    elif count:
                        reached += before
                        reached += count
                        if count > whole:
                            reached += MASK * (count - whole)
                        stop, paid = stop + count, again
                if reached > at:
                    at, place = reached, stop
            elif target >= end:
                at, place, paid = end, start[-1], 0.0
            debt = target - at
            cuts.append(place)
        left = end - at - debt  # for the last program, above its share; below it does no harm
        if -2 * full < left <= 1 or (left < 0 and full <= share):
            break
        full = max(share, full + left / programs)
    cuts[-1] = start[-1]
    return np.array(cuts)


Index = npt.NDArray[np.int32]


class Shared(NamedTuple):
    """Tables whose first `pages` pages are the same."""

    tables: Sequence[int]
    pages: int


def shared_prefixes(tables: Sequence[Index]) -> list[Shared]:
    """Return the prefixes that tables have in common, each once."""
    found: list[Shared] = []

    def split(members: Iterable[int], done: int) -> None:
        """Split members that share their first `done` pages."""
        next_page: dict[int, list[int]] = {}
        for i in members:
            if len(tables[i]) > done:
                next_page.setdefault(int(tables[i][done]), []).append(i)
        for group in next_page.values():
            if len(group) > 1:
                size = min(len(tables[i]) for i in group)
                first = tables[group[0]][:size]
                differ = np.any([tables[i][:size] != first for i in group[1:]], axis=0)
                common = int(np.argmax(differ)) if differ.any() else size
                found.append(Shared(group, common))
                split(group, common)

    split(range(len(tables)), 0)
    return found


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
    """Cut the work of a step's attention.

    Args:
      table: The table of each row, `[n]`; n is at most `config.rows`, and further rows see nothing.
      start, end: The logical slots start <= s < end that each row sees, `[n]`.
      tables: The pool's page of each logical page, for each request.
      config: How the work is cut, from `work_config`.
      least: Lower bound of `end` if the device decides `end`, `[n]`; None is `end`.
      shared: Prefixes that several tables have in common, each once. A table may be in several; a longer prefix has no
        tables that the shorter ones lack. Rows that see a whole prefix visit it together if `config` allows it, it
        saves time, and there is room for their partials.

    Returns:
      The work list. It never changes, because a device may read it at any time.

    Raises:
      ValueError: An argument is wrong; the message names it.
    """
    table, start, end = (np.asarray(x, np.int64) for x in (table, start, end))
    least = end if least is None else np.minimum(np.asarray(least, np.int64), end)
    lengths = np.array([len(pages) for pages in tables], np.int64)  # type: ignore[arg-type]
    _check(table, start, end, lengths, config)
    work = Work(np.zeros(config.size, np.int32), config)
    parts = work.parts()
    if lengths.any():
        parts.tables[: len(lengths)][np.arange(config.pages) < lengths[:, None]] = np.concatenate(tables)
    parts.start[: len(start)], parts.end[: len(end)] = start, end
    live = (start < end).nonzero()[0]
    rows = _Rows(live, table[live], start[live], end[live], least[live])
    groups = _worthwhile(rows, parts.tables, lengths, shared, config)
    cuts = (_cut(rows, groups[:count], config) for count in range(len(groups), -1, -1))
    # The longest prefixes are dropped first; without prefixes, everything fits.
    cut = next(cut for cut in cuts if cut is not None)
    _write(parts, rows, *cut, config)
    return work


class _Rows(NamedTuple):
    """Rows that see something, `[n]` each."""

    row: Numbers
    table: Numbers
    start: Numbers
    end: Numbers
    least: Numbers


class _Group(NamedTuple):
    """Rows (indices into `_Rows`) that together visit the pages from `first` to `last` of a shared prefix."""

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
            f"tables must be at most {config.requests} block tables of at most {config.pages} pages, "
            f"got {len(lengths)} of up to {max(lengths, default=0)}"
        )
    if len(table) and (table.min() < 0 or table.max() >= len(lengths)):
        raise ValueError(
            f"table must be indices below {len(lengths)}, the number of tables, got {table.min()} to {table.max()}"
        )
    wrong = (start < 0) | (end > PAGE * lengths[table] if len(lengths) else False)
    if wrong.any() and (wrong := wrong & (start < end)).any():
        row = int(np.argmax(wrong))
        raise ValueError(
            f"start and end must be within the {lengths[table[row]]} pages of the block table, got {start[row]} and "
            f"{end[row]} for row {row}"
        )


def _worthwhile(
    rows: _Rows, tables: Index, lengths: Numbers, shared: Sequence[Shared], config: WorkConfig
) -> tuple[_Group, ...]:
    """Return the groups of rows that save more blocks by visiting a prefix together than their partials cost."""
    groups: list[_Group] = []
    if not shared or not config.shared:
        return ()
    done = np.zeros(len(lengths), np.int64)  # pages that an earlier group of the table visits
    per = config.tile // config.group
    for members, pages in sorted(shared, key=lambda prefix: prefix.pages):
        ids = np.asarray(members, np.int64)
        if len(ids) == 0 or ids.min() < 0 or ids.max() >= len(lengths):
            raise ValueError(
                f"shared must list indices below {len(lengths)}, the number of tables, got {list(members)}"
            )
        first = int(done[ids[0]])
        same = lengths[ids].min() >= pages and (tables[ids, :pages] == tables[ids[0], :pages]).all()
        if not same or (done[ids] != first).any():
            raise ValueError(
                f"shared must list nested groups of tables with the same first {pages} pages, got {list(members)}"
            )
        whole = (rows.start <= 0) & (rows.least >= pages * PAGE)
        is_member = np.zeros(len(lengths), bool)
        is_member[ids] = True
        joined = (is_member[rows.table] & whole).nonzero()[0]
        apart = int(_up(_up(np.bincount(rows.table[joined]), config.box), per).sum())
        together = _up(_up(len(joined), config.box), per)
        if (pages - first) * (apart - together) > apart + together:
            groups.append(_Group(joined, int(ids[0]), first, pages))
            done[ids] = pages
    return tuple(groups)


def _cut(rows: _Rows, groups: tuple[_Group, ...], config: WorkConfig) -> tuple[ItemTiles, Numbers, Pieces] | None:
    """Return tiles, the place of each row in its own octet and in those of each group, and items.

    Places are `[1 + groups, n]`, -1 for none. The result is None if the lengths of the configuration are too small.
    """
    count, box = len(rows.row), config.box
    # The groups of each row; `tail` is where its own pages begin.
    tail, level = np.zeros(count, np.int64), np.zeros(count, np.int64)
    chain = np.zeros((len(groups), count), np.int64)  # the groups of each row, the one with the shortest prefix first
    for number, group in enumerate(groups, 1):
        chain[level[group.rows], group.rows] = number
        tail[group.rows] = group.last
        level[group.rows] += 1
    levels = int(level.max(initial=0))
    # Rows with the same table and groups lie together, ordered by their ends.
    apart = np.concatenate([rows.table[None], chain[:levels][::-1]])  # rows of an octet agree in these
    order = np.lexsort((rows.end, *apart))
    table, start, end, least = (x[order] for x in rows[1:])
    tail, apart = tail[order], apart[:, order]

    # Runs of such rows, each in its own octets, and the place of each row in them.
    new = np.ones(count, bool)
    new[1:] = (apart[:, 1:] != apart[:, :-1]).any(0)
    first_row = new.nonzero()[0]
    run_of = new.cumsum() - 1
    runs = np.concatenate([first_row, [count]])
    octets = _up(runs[1:] - runs[:-1], box)
    first_octet = octets.cumsum() - octets
    within = np.arange(count) - first_row[run_of] if count else run_of
    place = np.full((1 + len(groups), count), -1)
    place[0, order] = (first_octet[run_of] + within // box) * box + within % box if count else 0

    # A group visits its prefix through the octets of its rows or, if these lie far apart, through a dense copy.
    used, apart_octets = int(octets.sum()), len(octets)
    spans: list[tuple[int, ...]] = []
    for number, group in enumerate(groups, 1):
        mine, dense = place[0, group.rows] // box, _up(len(group.rows), box)
        begin, stop = int(mine.min()), int(mine.max()) + 1
        if box > 1 and 2 * dense <= stop - begin:  # packed densely they fill at most half the octets
            begin, stop = used, used + dense
            place[number, group.rows] = begin * box + np.arange(len(group.rows))
            used = stop
        else:
            place[number, group.rows] = place[0, group.rows]
        spans.append((begin, stop - begin, group.table, group.first, group.last))
    shared: list[Any] = []
    if groups:
        begins, lengths, *of_groups = np.array(spans).T
        octets, first_octet = np.concatenate([octets, lengths]), np.concatenate([first_octet, begins])

    # Octets are stacked into tiles; those of the groups, which come last, see the full prefix.
    run, offset, height = _tile_starts(octets, config)
    octet = first_octet[run] + offset
    if groups:
        own = int(run.searchsorted(apart_octets))
        together = run[own:] - apart_octets
        visits = [column[together] for column in of_groups]
        shared = [octet[own:], height[own:], *visits, 0 * together, 0 * together + FAR, together >= 0]
        run, offset, octet, height = (x[:own] for x in (run, offset, octet, height))
    # For each other tile: the pages that any of its rows sees, and those that all rows see fully.
    at = first_row[run] + offset * box
    pages = (
        (np.minimum, np.maximum(start // PAGE, tail)),
        (np.maximum, _up(end, PAGE)),
        (np.maximum, _up(start, PAGE)),
        (np.minimum, least // PAGE),
    )
    bounds = [reduce.reduceat(x, at) if count else np.zeros(0, np.int64) for reduce, x in pages]
    tiles: list[Any] = [octet, height, table[at], *bounds, tail[at] > 0]
    # Tiles that see nothing are left out.
    kept = bounds[0] < bounds[1]
    if not kept.all():
        tiles = [x[kept] for x in tiles]
    merged = ItemTiles(*([np.concatenate(columns) for columns in zip(tiles, shared, strict=True)] if groups else tiles))
    # If the static lengths are too small, the caller drops a group.
    if used > config.octets or len(merged.octet) > config.tiles or (config.programs > 1 and levels >= config.pieces):
        return None
    pieces = share_out(merged, config, config.pieces // (1 + levels))
    most = eights(config.tile) * len(pieces.tile)
    if config.programs > 1 and groups and most > config.partial_boxes:
        is_partial = merged.partial[pieces.tile] | pieces.is_cut
        boxes = eights(merged.octets[pieces.tile[is_partial]] * config.group).sum()
        if boxes > config.partial_boxes:
            return None
    return merged, place, pieces


def _tile_starts(octets: Numbers, config: WorkConfig) -> tuple[Any, Any, Any]:
    """Cut runs of octets into tiles; return the run of each tile, its first octet in the run, and its number of octets.

    The rest of a run is one more large tile if it fills most of it, otherwise small tiles.
    """
    per, small = config.tile // config.group, config.small // config.group
    if small == per:
        count = _up(octets, per)
    else:
        whole, rest = octets // per, octets % per
        count = whole + np.where(4 * rest > 3 * per, 1, _up(rest, small))
    run = np.arange(len(octets)).repeat(count)
    index = np.arange(len(run)) - (count.cumsum() - count)[run]
    if small == per:
        offset = index * per
        return run, offset, np.minimum(per, octets[run] - offset)
    beyond = np.maximum(index - whole[run], 0)
    offset = (index - beyond) * per + beyond * small
    most = np.where((index < whole[run]) | (4 * rest[run] > 3 * per), per, small)
    return run, offset, np.minimum(most, octets[run] - offset)


def _write(parts: WorkParts, rows: _Rows, tiles: ItemTiles, place: Numbers, pieces: Pieces, config: WorkConfig) -> None:
    """Fill in the remaining parts of a work list."""
    box, group, heads = config.box, config.group, config.heads
    # The row at each place in the octets.
    parts.rows[:] = config.rows
    parts.rows[place[0]] = rows.row
    for places in place[1:]:
        packed = places >= 0
        parts.rows[places[packed]] = rows.row[packed]

    # The items, program by program; items whose result is not final get room for partials.
    order = stable_order(pieces.program, config.programs)
    tile, head, first, last, is_cut = (column[order] for column in pieces[:5])
    is_partial = (tiles.partial[tile] | is_cut) & (config.programs > 1)
    octets = tiles.octets[tile]
    boxes = eights(tiles.octets * group)[tile] * is_partial
    partial = np.where(is_partial, boxes.cumsum() - boxes, -1)
    items, of_tiles = parts.items[: len(tile)], np.zeros((len(tiles.octet), COLUMNS), np.int32)
    for column, values in {
        BOX0: tiles.octet * group,
        BOXES: tiles.octets * group,
        TABLE: tiles.table,
        INNER_FROM: tiles.inner_from,
        INNER_TO: tiles.inner_to,
    }.items():
        of_tiles[:, column] = values
    if config.programs > 1:
        first_row = _first_rows(parts.rows, tiles, config)
        of_tiles[:, DIRECT] = first_row
    of_tiles.take(tile, 0, items, "clip")
    items[:, HEAD], items[:, FROM], items[:, TO], items[:, PARTIAL] = head, first, last, partial
    # Where each program's items begin. A single program makes no partials.
    np.bincount(pieces.program, minlength=config.programs).cumsum(out=parts.ctas[1:])
    if config.programs == 1:
        return
    cut = is_partial.nonzero()[0]
    items[cut, DIRECT] = -1

    # The rows that the items of each octet give: the row at its place, and which of its own rows have partials.
    size = octets[cut]
    index = np.arange(size.sum()) - (size.cumsum() - size).repeat(size)  # of an octet in its item
    row = parts.rows.reshape(-1, box)[tiles.octet[tile[cut]].repeat(size) + index]
    here = (row < config.rows).ravel().nonzero()[0]
    row *= heads
    row += head[cut].astype(np.int32).repeat(size)[:, None]
    target = row.ravel()[here]
    here = here[stable_order(target, config.rows * heads)]
    at = (partial[cut] * box).repeat(size) + index * (group * box)
    parts.merge[: len(here)] = (at.astype(np.int32)[:, None] + np.arange(box, dtype=np.int32)).ravel()[here]
    np.bincount(target, minlength=config.rows * heads).cumsum(out=parts.merge_first[1:])
    # Where each row's result is read, except for rows that items write directly.
    parts.unpack[:] = config.octets * box
    parts.unpack[rows.row] = place[0]
    direct = (first_row >= 0).nonzero()[0]
    if len(direct):
        count = tiles.octets[direct] * box
        parts.unpack[(first_row[direct] - count.cumsum() + count).repeat(count) + np.arange(count.sum())] = -1


def _first_rows(rows: Index, tiles: ItemTiles, config: WorkConfig) -> Numbers:
    """Return the first row of each tile whose rows follow each other in the step and that no other items visit, else
    -1.

    The row is a multiple of `box`, as bulk copies require.
    """
    begin = tiles.octet * config.box
    last = begin + tiles.octets * config.box - 1
    first_row, last_row = rows[begin], rows[last]
    follow = (last_row - first_row == last - begin) & (last_row < config.rows)
    if follow.any():  # by their ends
        breaks = np.zeros(len(rows), np.int64)
        (rows[1:] != rows[:-1] + 1).cumsum(out=breaks[1:])
        follow &= (breaks[last] == breaks[begin]) & (first_row % config.box == 0) & ~tiles.partial
    return np.where(follow, first_row, -1)


def _up(x: Any, unit: int) -> Any:
    """Return the number of units that hold x."""
    return -(-x // unit)
