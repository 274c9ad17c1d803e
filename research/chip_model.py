"""Model of the time of attention on an H200's 132 multiprocessors, compared with measurements.

    python -m research.chip_model --out benchmarks/results/attention_model.json

A multiprocessor runs one program at a time. A block of 128 slots takes 1.9 us for the packed rows of a program (64 or
128). A masked block takes 0.5 us more per 377 additional instructions. A program takes 5 us in addition. Programs take
items from a list: each costs 1 us, and 0.5 us more if it gives a partial. Merging partials, or moving packed rows to
their places, is a separate operation: 3 us, and its bytes at 4 TB/s, as is packing the queries. Nothing is faster than
reading K and V once, at 4 TB/s. The launches around the kernel take 11 us: four kernels that wait for each other.

Other kernels take 1.7 us, or as long as their bytes at 0.78 of the data sheet's 4.8 TB/s, or their products at the rate
that XLA's reached on the chip. The first two were fixed before any step was measured.

The block, the item, the read rate and the launches are fitted to `gpu_h200.json`: 13 cases of Qwen3-VL-8B, from which
the model differs by at most 11 %.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib

import numpy as np

from vlcache_jax.pallas_kernels import PAGE
from vlcache_jax.pallas_kernels.attention import work
from vlcache_jax.pallas_kernels.shapes import ATTENTION, AttentionShape
from vlcache_jax.study import report

MULTIPROCESSORS = 132
MEASURED = pathlib.Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "gpu_h200.json"
OF_MODEL = "Qwen3-VL-8B"  # model whose attention was measured
BLOCK, PROGRAM, ITEM, PARTIAL, AROUND = 1.9, 5.0, 1.0, 0.5, 11.0  # us
INSTRUCTION = 0.5 / 377  # us, for each additional instruction of a masked block
MASK = 130  # additional instructions for each side
COMBINE, RATE = 3.0, 4.0e6  # us, and bytes/us
# Other kernels: us, bytes/us, and operations/us, of products of 8192 (`gpu_h200.json`).
SMALL, BANDWIDTH, PRODUCTS = 1.7, 0.78 * 4.8e6, 677e6


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Predicted times of a kernel at a case, in us.

    Attributes:
      programs: Until the last program ends, without memory traffic.
      mean: Mean of the multiprocessors' busy times; equal to `programs` if their shares are equal.
      read: Reading K and V, once for each slot.
      combine: Merging partials.
      gather: Packing queries.
      items: Number of programs, or of items of the list.
      partials: Number of results of programs or items to merge.
      slots: Slots that all programs load, per head.
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
        return max(self.programs, self.read) + self.combine + self.gather + AROUND

    @property
    def imbalance(self) -> float:
        return self.programs / self.mean


def work_list(shape: AttentionShape) -> Estimate:
    """Estimate the kernel that does the items of a work list, page by page."""
    listed = shape.work("mosaic_gpu")
    config, parts = listed.config, listed.parts()
    items = parts.items[: parts.ctas[-1]].astype(np.int64)
    pages = items[:, work.TO] - items[:, work.FROM]
    front = np.clip(items[:, work.INNER_FROM] - items[:, work.FROM], 0, pages)
    back = np.clip(items[:, work.TO] - items[:, work.INNER_TO], 0, pages)
    partial = items[:, work.PARTIAL] >= 0
    merged = np.diff(parts.merge_first)  # partials of each row and head; none if it has one result
    cost = ITEM + BLOCK * pages + MASK * INSTRUCTION * (front + back) + PARTIAL * partial
    programs = PROGRAM + np.diff(np.append(0.0, np.cumsum(cost))[parts.ctas])
    packed = (parts.unpack >= 0) & (parts.unpack < config.octets * config.box)
    brought = config.group * int(((merged.reshape(-1, config.heads) == 0) & packed[:, None]).sum())
    return Estimate(
        programs=float(programs.max()),
        mean=float(programs.mean()),
        read=2 * 2 * shape.K * shape.D * shape.seen_slots() / RATE,
        combine=_combine(shape, config.group * merged.sum(), brought, brought + config.group * (merged > 0).sum()),
        gather=2 * 2 * shape.D * shape.H * config.octets * config.box / RATE,
        items=len(items),
        partials=int(partial.sum()),
        slots=PAGE * int(pages.sum()) // shape.K,
    )


def kernel_time(moved: float, operations: float) -> float:
    """Return the time of a kernel other than attention in us, from its bytes and the operations of its matrix
    products.
    """
    return max(SMALL, moved / BANDWIDTH, operations / PRODUCTS)


def _combine(shape: AttentionShape, partials: int, read: int, written: int, itemsize: int = 2) -> float:
    """Return the time of merging rows of a query head, in us.

    It reads float32 sums, largest scores and weights of partials, and results that only move to their places. It writes
    results, except those that items write to their places.
    """
    values = itemsize * shape.D * (read + written)
    return COMBINE + (4 * int(partials) * (shape.D + 2) + int(values)) / RATE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="JSON file")
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))["cases"]
    rows = []
    for model, shapes in ATTENTION.items():
        for shape in filter(lambda shape: shape.has_pages, shapes):
            now, case = work_list(shape), measured.get(f"speed: attention, {shape.name}, D {shape.D}")
            rows.append(
                {
                    "model": model,
                    "case": shape.name,
                    "us": now.time,
                    "measured us": 1e3 * case["ms"] if case and model == OF_MODEL else None,
                    "least us": now.read,
                    "combine us": now.combine,
                    "gather us": now.gather,
                    "imbalance": now.imbalance,
                    "items": now.items,
                    "partials": now.partials,
                    "loads of a slot": now.slots / shape.seen_slots(),
                }
            )
    report.publish("Attention by the model of a chip", rows, report.environment(), parser.parse_args().out)


if __name__ == "__main__":
    main()
