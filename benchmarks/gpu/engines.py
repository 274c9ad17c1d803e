"""Engines of published shapes with random weights, and functions that run in their own process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

from vlcache_jax import BucketSizes
from vlcache_jax.benchmarks.gpu.plan import MODEL, GpuPlan, Row
from vlcache_jax.benchmarks.gpu.workers import changed_environment
from vlcache_jax.benchmarks.random_models import make_random_model
from vlcache_jax.testing import make_checkpoint


def checkpoint(plan: GpuPlan, directory: str, layers: int | None = None) -> None:
    """Write configuration, tokenizer and processor; weights are drawn on the device."""
    if plan.rehearse:
        make_checkpoint(directory, "qwen3_vl", weights=False)
    else:
        make_random_model(directory, MODEL, layers or plan.layers)


def settings(plan: GpuPlan) -> Row:
    if plan.rehearse:
        return {"buckets": BucketSizes(rows=(64,), patches=(64,), sequences=(1, 2)), "max_rows": 64, "dtype": "float32"}
    return {
        "dtype": "bfloat16",
        "kv_cache_bytes": 24 * 2**30 * (plan.layers or 36) // 36,  # which leaves room for the library's model
        "implementation": plan.implementation,  # not XLA instead, whatever a self-test has found
    }


def in_process(function: Callable[..., Any], *args: Any, platform: str | None = None) -> Any:
    """Run a function in its own process, which releases its memory, on jax's `platform` if it is given."""
    changed = {} if platform is None else {"JAX_PLATFORMS": platform}
    with changed_environment(changed), multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)
