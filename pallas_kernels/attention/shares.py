"""Deals the tiles of a work list to the programs of a device, in equal shares. Host, numpy."""

from __future__ import annotations

import bisect
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vlcache_jax.pallas_kernels.attention.work import WorkConfig

# What a program spends, in whole blocks: on an item besides its blocks, likewise on a partial, and more on a block with
# a masked side.
ITEM, MASK = 0.36, 0.12

Numbers = npt.NDArray[np.int64]


class Tiles(NamedTuple):
    """Items before they are shared out, [d] each; `partial`: of rows that other items visit, too."""

    octet: Numbers
    octets: Numbers
    table: Numbers
    first: Numbers
    last: Numbers
    inner_from: Numbers
    inner_to: Numbers
    partial: npt.NDArray[np.bool_]


class Pieces(NamedTuple):
    """Items: of which tile and head, which pages, whether the tile was cut for it, in which program; [i] each."""

    tile: Numbers
    head: Numbers
    first: Numbers
    last: Numbers
    is_cut: npt.NDArray[np.bool_]
    program: Numbers


def stable_order(numbers: Numbers, below: int) -> Numbers:
    """The order of integers from 0 to `below`, equal ones as they stand. Small types are sorted by their digits."""
    return (numbers.astype(np.uint16) if below <= 1 << 16 else numbers).argsort(kind="stable")


def share_out(tiles: Tiles, config: WorkConfig, limit: int) -> Pieces:
    """Deals tiles, times heads, to the programs; cuts what cannot be dealt whole, no tile into more than `limit`."""
    # What each tile costs, in pages.
    pages = tiles.last - tiles.first
    inner = np.minimum(np.maximum(tiles.inner_to - tiles.first, 0), pages)  # in front of those whose ends are masked
    masked = np.minimum(np.maximum(tiles.inner_from - tiles.first, 0), pages)
    fixed = ITEM * (1 + tiles.partial) + MASK * masked
    cost = fixed + inner + (1 + MASK) * (pages - inner)
    # Every tile comes once a head, the dearest first.
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
    for dealt in range(0, len(tile), programs):  # the longest of these to the program that has least
        mine = costs[dealt : dealt + programs]
        free = load.argsort(kind="stable")[: len(mine)]
        load = load.copy()
        load[free] += mine
        program[dealt : dealt + programs] = free
        loads.append(load)
    # Even enough: nothing is cut.
    mean = costs.sum() / programs
    dealt_whole = Pieces(tile, head, tiles.first[tile], tiles.last[tile], np.zeros(len(tile), bool), program)
    if load.max() - mean <= max(1.0, 0.015 * mean):
        return dealt_whole

    # Whole rounds stay as long as nobody has more than its share; what is left is cut along one line of pages.
    share = max(mean, costs[0] / max(limit - 1, 1) + 2 * ITEM)
    rounds = bisect.bisect_right(loads, share, key=np.ndarray.max) - 1  # loads grow from round to round
    dealt = min(rounds * programs, len(tile))
    if dealt == len(tile):
        return dealt_whole
    by_room = loads[rounds].argsort(kind="stable")
    rest = tile[dealt:]
    length = pages[rest]
    begin = np.zeros(len(rest) + 1, np.int64)  # of each on the line of all their pages
    length.cumsum(out=begin[1:])
    cuts = _cuts(begin, costs[dealt:], rest, fixed, inner, loads[rounds][by_room], share)
    # Items begin where a tile does and where a program's share does.
    points = np.concatenate([begin, cuts])  # where an item begins, and the end of the line
    points.sort()
    new = np.empty(len(points), bool)
    new[0] = True
    np.not_equal(points[1:], points[:-1], out=new[1:])
    points = points[new]
    points, stops = points[:-1], points[1:]
    item = begin.searchsorted(points, side="right") - 1
    # Each of them as a piece, behind those that were dealt whole.
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
    # As `cost` counts what is whole: a page that is masked on both sides counts as masked twice.
    length = cut.last - cut.first
    masked = np.minimum(np.maximum(tiles.inner_from[cut.tile] - cut.first, 0), length)
    masked += np.minimum(np.maximum(cut.last - tiles.inner_to[cut.tile], 0), length)
    each = ITEM * (1 + (tiles.partial[cut.tile] | cut.is_cut)) + cut.last - cut.first + MASK * masked
    return cut if np.bincount(cut.program, each, programs).max() < load.max() else dealt_whole


def _cuts(begin: Any, cost: Any, tile: Any, fixed: Any, inner: Any, load: Any, share: float) -> Numbers:
    """Where the programs' shares of a line of items end, counted in pages [P]; `fixed`, `inner` are of their tiles.

    A program that begins inside an item pays for an item and a partial again. How many do is known afterwards, so the
    share, at least `share`, is found in a few turns. What rounding to pages takes from a program, the next one gets.
    """
    line = [0.0, *cost.cumsum().tolist()]
    start, of_tile, used = begin.tolist(), tile.tolist(), load.tolist()
    ends = list(zip(fixed.tolist(), inner.tolist(), strict=True))
    programs, items = len(used), len(of_tile)
    share = max(share, 2 * ITEM + 1 + MASK)  # less than a page cannot be shared out
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
