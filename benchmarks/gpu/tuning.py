"""Tuning of the attention kernel: the fastest tiles, blocks, stages and alternation for each case."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

from vlcache_jax.benchmarks.gpu.plan import GpuCase, GpuPlan, Row, kernel_of
from vlcache_jax.benchmarks.gpu.speeds import time_attention
from vlcache_jax.pallas_kernels.shapes import AttentionShape


def tune(plan: GpuPlan) -> Iterator[GpuCase]:
    """Yield the cases to tune. Shapes with equal kernel sizes share one configuration; the portable kernel has one for
    all.
    """
    if plan.portable:
        return
    for key, same in itertools.groupby(sorted(plan.shapes(), key=_static), key=_static):
        n, heads, kv_heads, width, decode = key
        name = f"N {n}, {heads}/{kv_heads} heads of {width}{', decoding' * decode}"
        shapes = list(same)
        yield GpuCase(name, functools.partial(_tune, plan, shapes), (kernel_of(shapes[0]),))


def _static(shape: AttentionShape) -> tuple[int, int, int, int, bool]:
    return shape.N, shape.H, shape.K, shape.D, shape.is_decode


def _tune(plan: GpuPlan, shapes: list[AttentionShape]) -> Row:
    from vlcache_jax.pallas_kernels.attention import mosaic_gpu

    n, heads, kv_heads, width, decode = _static(shapes[0])
    usual = mosaic_gpu.default_config(n, heads, kv_heads, width, decode=decode)
    took: dict[Any, float] = {}

    def total_ms(config: Any) -> float:
        if config not in took:
            took[config] = sum(time_attention(plan, shape, plan.implementation, config)["ms"] for shape in shapes)
        return took[config]

    total_ms(usual)
    blocks = [{"block": 128, "stages": 2}, {"block": 128, "stages": 3}, {"block": 64, "stages": 4}]
    # One setting after the other, each from the best configuration so far.
    for changes in (
        [] if plan.rehearse else [{"tile": 24 - usual.tile} | block for block in blocks],
        blocks[:1] if plan.rehearse else blocks,
        [] if plan.rehearse else [{"take_turns": False}],
    ):
        best = min(took, key=total_ms)
        for change in changes:
            try:
                total_ms(dataclasses.replace(best, **change))
            # For example too much shared memory: this configuration is skipped, and the log has the error.
            except Exception as error:
                print(f"{shapes[0].name}: {change}: {str(error).splitlines()[0][:160]}")
    best = min(took, key=total_ms)
    return {
        "N": n, "H": heads, "K": kv_heads, "D": width, "decode": decode,
        "splits registers": mosaic_gpu.SPLITS_REGISTERS,
        "config": dataclasses.asdict(best), "ms": took[best], "default ms": took[usual],
    }  # fmt: skip
