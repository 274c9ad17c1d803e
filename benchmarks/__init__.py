"""The measurements of `vlcache bench`. Each one prints a table, writes JSON, and fails on empty or wrong output.

Figures that the docs quote are stored in `results/`, with date, chip and versions. Timings on shared machines are
noisy, so both sides of a comparison run interleaved in one session, and medians count. `gpu` and `peer` run from a
clone and are in no wheel.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import re
from collections.abc import Callable, Iterable
from typing import Any

# The allocator keeps its pages instead of returning them after each large array. Both sides of a comparison use this.
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "MALLOC_TOP_PAD_": "268435456",
}

SCHEDULE = "schedule"
"""Stands for levels that fall from 0.08 to 0 over the layers, in the mean 0.025, as in `vlcache bench ttft`."""
POLICIES = ("exact", "full", "cacheblend-0.15", "mpic-32", SCHEDULE, "approximate")
"""All that `vlcache bench serve --policies all` compares with "off"."""


_BASELINE = "VLCache's baseline"
_NOTE = (
    "CacheBlend as in Table 5 of VLCache's paper, in one pass: K, V of every token in layers 0 to 2, then a share of "
    "the reused tokens. MPIC's CacheBlend takes a share of all tokens, in two passes, and is not measured here."
)


def label(policy: str) -> str:
    """Return the name of a policy in tables and charts.

    A note follows the name of a method that papers define in different ways.
    """
    if re.fullmatch(r"cacheblend-[\d.]+", policy):
        return f"{policy} ({_BASELINE})"
    return {"off": "off (no reuse)", SCHEDULE: f"{SCHEDULE} (mean 2.5 %)"}.get(policy, policy)


def notes(policies: Iterable[str]) -> dict[str, str]:
    """Return the notes that results carry about the labels of some policies."""
    return {_BASELINE: _NOTE} if any(_BASELINE in label(policy) for policy in policies) else {}


def run_apart(measure: Callable[..., None], *given: Any, **options: Any) -> None:
    """Call `measure` in its own process, whose allocator keeps its pages."""
    os.environ.update(ALLOCATOR)  # read when a process starts
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        process.submit(measure, *given, **options).result()
