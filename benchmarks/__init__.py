"""What `vlcache bench` runs. Each measurement prints a table, writes JSON, and fails on empty or wrong output.

Figures that the docs quote are kept in `results/`, with date, chip and versions. Timings on shared machines are noisy:
both sides of a comparison run at one time, in turn, and medians count. `gpu` and `peer` are for a clone, and in no
wheel.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
from collections.abc import Callable
from typing import Any

# The allocator keeps its pages instead of returning them after each large array; both sides get that.
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "MALLOC_TOP_PAD_": "268435456",
}

SCHEDULE = "schedule"
"""Stands for levels that fall from 0.08 to 0 over the layers, in the mean 0.025, as in `vlcache bench ttft`."""
POLICIES = ("exact", "full", "cacheblend-0.15", "mpic-32", SCHEDULE, "approximate")
"""All that `vlcache bench serve --policies all` compares with "off"."""


def run_apart(measure: Callable[..., None], *given: Any, **options: Any) -> None:
    """Calls `measure` in a process of its own, whose allocator keeps its pages."""
    os.environ.update(ALLOCATOR)  # read when a process starts
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        process.submit(measure, *given, **options).result()
