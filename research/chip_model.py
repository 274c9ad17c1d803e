"""How long attention takes on an H200's 132 multiprocessors, by a model: nothing here was measured on a chip.

    python -m research.chip_model --out benchmarks/results/attention_model.json

A multiprocessor runs one program at a time. A block of 128 slots takes 1.4 us for the packed rows of a program (64 or
128), a masked one 0.5 us more per 377 instructions that it has more; a program takes 5 us besides. Where programs take
items from a list, each costs 0.5 us, as its queries are loaded ahead, and 0.5 us more if it gives a partial. What
is to be combined, or brought from packed rows to their places, takes an operation of its own: 3 us, and its bytes at
4 TB/s. Nothing is faster than reading K and V once, at
4.3 TB/s.

Two kernels are compared. `work_list` is today's. `tiles` is the one before (commit 4036324): it cut the rows as they
came, whatever request they belonged to, with a program for each tile, head and split.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import pathlib
from collections.abc import Iterable

import numpy as np

from vlcache_jax.pallas_kernels import PAGE
from vlcache_jax.pallas_kernels.attention import work
from vlcache_jax.pallas_kernels.shapes import ATTENTION, AttentionShape
from vlcache_jax.study import report

MULTIPROCESSORS = 132
BLOCK, PROGRAM, ITEM, PARTIAL = 1.4, 5.0, 0.5, 0.5  # us
INSTRUCTION = 0.5 / 377  # us, of each that a masked block has more than a whole one
MASK_OF_TILES, MASK = 377, 130  # instructions more: for both sides together, and for each side
COMBINE, COMBINE_RATE, READ_RATE = 3.0, 4.0e6, 4.3e6  # us, and bytes/us


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What the model says of a kernel at a case; times in us.

    Attributes:
      programs: until the last program ends, the bytes aside.
      mean: of the multiprocessors' busy times: with equal shares `programs` would be that.
      read: of K and V, once each slot.
      combine: of merging partials.
      gather: of packing queries. It is not in the time, as the review's formula, which both sides follow, does not have
        it; today's tiles had no such operation where rows stand in order.
      items: programs, or items of the list.
      partials: results of programs or items that have to be merged.
      slots: that all programs load, per head.
    """

    programs: float
    mean: float
    read: float
    combine: float
    gather: float
    items: int
    partials: int
    slots: int

    @property
    def time(self) -> float:
        return max(self.programs, self.read) + self.combine

    @property
    def imbalance(self) -> float:
        return self.programs / self.mean


def schedule(durations: Iterable[float], processors: int = MULTIPROCESSORS) -> float:
    """When the last of these programs ends: each begins, in order, where one ends first."""
    ends = [0.0] * processors
    for duration in durations:
        heapq.heapreplace(ends, ends[0] + duration)
    return max(ends)


def tiles(shape: AttentionShape) -> Estimate:
    """The kernel before the work list. It knows slots, not requests, and no prefix is shared."""
    seen = shape.rows()
    base = (np.cumsum(seen.lengths) - seen.lengths)[seen.table]
    n, group, heads = shape.N, shape.H // shape.K, shape.K
    warpgroups = 1 if n * group <= 64 else 2
    boxes = 8 * warpgroups  # of 8 rows of one query head
    count = -(-(-(-n // 8) * group) // boxes)
    enough = MULTIPROCESSORS // (count * heads)
    splits = max(1, min(enough if enough > 1 else -(-2 * MULTIPROCESSORS // (count * heads)), shape.S // 256))
    durations, slots = [], 0
    for tile in range(count):
        rows = slice(tile * boxes // group * 8, (tile * boxes + boxes - 1) // group * 8 + 8)
        some = seen.start[rows] < seen.end[rows]
        start, end = ((base + x)[rows][some] for x in (seen.start, seen.end))
        at = _visited(start, end, sparse=n <= 1024)
        whole = (start.max(initial=0) <= at * PAGE) & ((at + 1) * PAGE <= end.min(initial=2**30))
        cost = np.concatenate([[0.0], np.cumsum(BLOCK + ~whole * MASK_OF_TILES * INSTRUCTION)])
        cuts = len(at) * np.arange(splits + 1) // splits
        durations.append(PROGRAM + np.diff(cost[cuts]))
        slots += len(at) * PAGE
    programs = np.concatenate([np.tile([d[split] for d in reversed(durations)], heads) for split in range(splits)])
    partials = count * heads * splits * (splits > 1)
    return Estimate(
        programs=schedule(programs),
        mean=float(programs.sum()) / MULTIPROCESSORS,
        read=_read(shape, paged=False),
        combine=_combine(shape, partials * boxes * 8, 0, shape.N * shape.H) if partials else 0.0,
        gather=0.0,
        items=len(programs),
        partials=partials,
        slots=slots,
    )


def work_list(shape: AttentionShape) -> Estimate:
    """The kernel that does the items of a work list, page by page."""
    listed = shape.work("mosaic_gpu")
    config, parts = listed.config, listed.parts()
    items = parts.items[: parts.ctas[-1]].astype(np.int64)
    pages = items[:, work.TO] - items[:, work.FROM]
    front = np.clip(items[:, work.INNER_FROM] - items[:, work.FROM], 0, pages)
    back = np.clip(items[:, work.TO] - items[:, work.INNER_TO], 0, pages)
    partial = items[:, work.PARTIAL] >= 0
    merged = np.diff(parts.merge_first)  # partials of each row and head, none where it has one result
    cost = ITEM + BLOCK * pages + MASK * INSTRUCTION * (front + back) + PARTIAL * partial
    programs = PROGRAM + np.diff(np.append(0.0, np.cumsum(cost))[parts.ctas])
    packed = (parts.unpack >= 0) & (parts.unpack < config.octets * config.box)
    brought = config.group * int(((merged.reshape(-1, config.heads) == 0) & packed[:, None]).sum())
    return Estimate(
        programs=float(programs.max()),
        mean=float(programs.mean()),
        read=_read(shape, paged=True),
        combine=_combine(shape, config.group * merged.sum(), brought, brought + config.group * (merged > 0).sum()),
        gather=2 * 2 * shape.D * shape.H * config.octets * config.box / COMBINE_RATE,
        items=len(items),
        partials=int(partial.sum()),
        slots=PAGE * int(pages.sum()) // shape.K,
    )


def _visited(start: np.ndarray, end: np.ndarray, *, sparse: bool) -> np.ndarray:
    """The blocks that a tile's rows visit: all from the first to the last one, or, of few rows in the order of their
    intervals, those that some row sees."""
    first, last = start // PAGE, -(-end // PAGE)
    if not len(start):
        return np.zeros(0, int)
    if sparse and (np.diff(first) >= 0).all():
        return np.unique(np.concatenate([np.arange(a, b) for a, b in zip(first, last, strict=True)]))
    return np.arange(first.min(), last.max())


def _read(shape: AttentionShape, *, paged: bool, itemsize: int = 2) -> float:
    return 2 * itemsize * shape.K * shape.D * shape.seen_slots(paged=paged) / READ_RATE


def _combine(shape: AttentionShape, partials: int, read: int, written: int, itemsize: int = 2) -> float:
    """Of rows of a query head: reads float32 sums, largest scores and weights of partials, and results that are only to
    be brought to their places; writes results, those aside that items write to their places."""
    values = itemsize * shape.D * (read + written)
    return COMBINE + (4 * int(partials) * (shape.D + 2) + int(values)) / COMBINE_RATE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="JSON file")
    rows = []
    for model, shapes in ATTENTION.items():
        for shape in filter(lambda shape: shape.has_pages, shapes):
            before, now = tiles(shape), work_list(shape)
            rows.append(
                {
                    "model": model,
                    "case": shape.name,
                    "tiles us": before.time,
                    "work list us": now.time,
                    "ratio": now.time / before.time,
                    "least us": now.read,
                    "combine us": now.combine,
                    "gather us": now.gather,
                    "imbalance": now.imbalance,
                    "imbalance of tiles": before.imbalance,
                    "items": now.items,
                    "partials": now.partials,
                    "loads of a slot": now.slots / shape.seen_slots(),
                    "by tiles": before.slots / shape.seen_slots(paged=False),
                }
            )
    report.publish("Attention by the model of a chip", rows, report.environment(), parser.parse_args().out)


if __name__ == "__main__":
    main()
