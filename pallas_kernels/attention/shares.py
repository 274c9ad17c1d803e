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


def share_out(tiles: Tiles, config: WorkConfig, limit: int) -> Pieces:
    """Deals tiles, times heads, to the programs; cuts what cannot be dealt whole, no tile into more than `limit`."""
    pages = tiles.last - tiles.first
    inner = np.clip(tiles.inner_to - tiles.first, 0, pages)  # in front of the pages whose ends are masked
    fixed = ITEM * (1 + tiles.partial) + MASK * np.clip(tiles.inner_from - tiles.first, 0, pages)
    cost = fixed + inner + (1 + MASK) * (pages - inner)
    order = np.argsort(-cost if config.programs > 1 else -tiles.octets, kind="stable")
    tile = np.repeat(order, config.heads)
    head = np.tile(np.arange(config.heads), len(order))
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
        free = np.argsort(load, kind="stable")[: len(mine)]
        load = load.copy()
        load[free] += mine
        program[dealt : dealt + programs] = free
        loads.append(load)
    mean = costs.sum() / programs
    dealt_whole = Pieces(tile, head, tiles.first[tile], tiles.last[tile], np.zeros(len(tile), bool), program)
    if load.max() - mean <= max(1.0, 0.015 * mean):
        return dealt_whole

    share = max(mean, costs[0] / max(limit - 1, 1) + 2 * ITEM)
    rounds = sum(1 for dealt_to in loads[1:] if dealt_to.max() <= share)
    dealt = min(rounds * programs, len(tile))
    if dealt == len(tile):
        return dealt_whole
    by_room = np.argsort(loads[rounds], kind="stable")
    rest = tile[dealt:]
    begin = np.concatenate([[0], np.cumsum(pages[rest])])  # of each on the line of all their pages
    cuts = _cuts(begin, cost[rest], fixed[rest], inner[rest], loads[rounds][by_room], share)
    points = np.unique(np.concatenate([begin[:-1], cuts[cuts < begin[-1]]]))
    stops = np.append(points[1:], begin[-1])
    item = np.searchsorted(begin, points, side="right") - 1
    first = tiles.first[rest[item]] + points - begin[item]
    cut = Pieces(
        np.concatenate([tile[:dealt], rest[item]]),
        np.concatenate([head[:dealt], head[dealt:][item]]),
        np.concatenate([tiles.first[tile[:dealt]], first]),
        np.concatenate([tiles.last[tile[:dealt]], first + stops - points]),
        np.concatenate([np.zeros(dealt, bool), stops - points < pages[rest[item]]]),
        np.concatenate([program[:dealt], by_room[np.searchsorted(cuts, points, side="right")]]),
    )
    # As `cost` counts what is whole: a page that is masked on both sides counts as masked twice.
    front = np.clip(tiles.inner_from[cut.tile], cut.first, cut.last) - cut.first
    back = cut.last - np.clip(tiles.inner_to[cut.tile], cut.first, cut.last)
    each = ITEM * (1 + (tiles.partial[cut.tile] | cut.is_cut)) + cut.last - cut.first + MASK * (front + back)
    spent = np.bincount(cut.program, each, programs)
    return cut if np.bincount(item).max() <= limit and spent.max() < load.max() else dealt_whole


def _cuts(begin: Any, cost: Any, fixed: Any, inner: Any, load: Any, share: float) -> Numbers:
    """Where the programs' shares of a line of items end, counted in pages [P].

    A program that begins inside an item pays for an item and a partial again. How many do is known afterwards, so the
    share, at least `share`, is found in a few turns. What rounding to pages takes from a program, the next one gets.
    """
    line = [0.0, *np.cumsum(cost).tolist()]
    start, fixed, inner, used = begin.tolist(), fixed.tolist(), inner.tolist(), load.tolist()
    programs, items = len(used), len(fixed)
    share = max(share, 2 * ITEM + 1 + MASK)  # less than a page cannot be shared out
    inside = programs - min(items, programs) / 2
    full = max(share, (line[-1] + sum(used) + 2 * ITEM * inside) / programs)
    cuts: list[int] = []
    for _ in range(8):
        cuts, at, place, debt, is_inside = [], 0.0, 0, 0.0, False
        for spent in used:
            target = at + full - spent + debt - 2 * ITEM * is_inside
            item = bisect.bisect_right(line, target) - 1
            if item >= items:
                at, place, is_inside = line[-1], start[-1], False
            elif target > at:
                pages = target - line[item] - fixed[item]
                if pages > inner[item]:
                    pages = inner[item] + (pages - inner[item]) / (1 + MASK)
                count = max(0, round(pages))
                is_inside = 0 < count < start[item + 1] - start[item]
                if is_inside:
                    reached = line[item] + fixed[item] + count + MASK * max(0, count - inner[item])
                else:
                    reached, count = (line[item + 1], start[item + 1] - start[item]) if count else (line[item], 0)
                if reached > at:
                    at, place = reached, start[item] + count
            debt = target - at
            cuts.append(place)
        left = line[-1] - at - debt  # for the last program, above its share; below it does no harm
        if -2 * full < left <= 1 or (left < 0 and full <= share):
            break
        full = max(share, full + left / programs)
    cuts[-1] = start[-1]
    return np.array(cuts)
