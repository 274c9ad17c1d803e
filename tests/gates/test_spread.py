"""Programs of engines that are spread over several H200s, compiled without one."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import pytest

from research.compiled import exchanged, spread_shapes
from vlcache_jax.device.programs.layers import Layer
from vlcache_jax.device.programs.memory import Link
from vlcache_jax.device.programs.window import Window
from vlcache_jax.models.registry import published_config
from vlcache_jax.pallas_kernels.split import AXIS

pytestmark = pytest.mark.cuda_gate
LAYERS = 2


@functools.cache
def shapes_of(name, count):
    config = published_config(name)
    return spread_shapes(dataclasses.replace(config, text=dataclasses.replace(config.text, num_layers=LAYERS)), count)


@pytest.mark.parametrize(
    ("name", "count", "program", "expected", "donated"),
    [
        ("Qwen3-VL-8B", 4, Layer(512, 512, False), {"all-reduce": 2}, 2),
        ("Qwen3-VL-8B", 4, Window(16, "greedy", 8), {"all-reduce": 2 * LAYERS + 1, "all-gather": 1}, 2 * LAYERS),
        ("Qwen3-VL-8B", 4, Link(1024, 1, 1), {"all-to-all": 1}, 2),
        pytest.param(
            "Qwen2.5-VL-7B",
            2,
            Window(1, "greedy", 8),
            {"all-reduce": 2 * LAYERS + 1, "all-gather": 1},
            2 * LAYERS,
            marks=pytest.mark.thorough,
        ),
        ("Qwen3-VL-30B-A3B", 8, Layer(64, 64, False), {"all-reduce": 2}, 2),  # two copies of each KV head
        ("Qwen3-VL-30B-A3B", 8, Link(1024, 1, 1), {"all-to-all": 1}, 2),
    ],
    ids=lambda value: str(value) if not isinstance(value, dict) else "",
)
def test_what_moves_between_gpus(name, count, program, expected, donated):
    """Two sums a layer, one of embeddings, the logits; nothing of a weight's or the pool's whole shape is anywhere."""
    shapes = shapes_of(name, count)
    compiled = program.lowered(shapes).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert exchanged(text) == expected
    assert "mosaic_gpu" in text
    whole = {leaf.shape for leaf in jax.tree.leaves(shapes.text) if AXIS in str(leaf.sharding.spec)} | {
        shapes.pool.shape
    }
    shown = set(re.findall(r"[a-z0-9]+\[([\d,]+)\]", text))
    assert not (shown & {",".join(map(str, shape)) for shape in whole})
    half = shapes.pool.size * shapes.pool.dtype.itemsize // count
    assert memory.alias_size_in_bytes >= donated * half
    assert memory.temp_size_in_bytes < 100e6
