"""Models in 8 bits, compiled for an H200 on a machine without one: no layer's weights are dequantised anywhere."""

from __future__ import annotations

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest

from research import sass
from research.compiled import SLOTS, abstract_runner, compile_for, compile_program, exchanged, spread_shapes
from vlcache_jax.device.memory_plan import dequantized_bytes
from vlcache_jax.device.programs.layers import Layer
from vlcache_jax.device.programs.window import Window
from vlcache_jax.models.registry import published_config
from vlcache_jax.pallas_kernels import float8_matmul, mix_experts
from vlcache_jax.pallas_kernels.quantized_matmul import TILE

pytestmark = pytest.mark.cuda_gate

FLOAT8 = jnp.float8_e4m3fn
spec = jax.ShapeDtypeStruct


@functools.cache
def model(name: str, layers: int = 2):
    config = published_config(name)
    return dataclasses.replace(config, text=dataclasses.replace(config.text, num_layers=layers))


def largest(text: str) -> int:
    """Values of the largest array in 16 or 32 bits that a compiled program has."""
    found = re.findall(r"\b(?:bf16|f16|f32)\[([\d,]+)\]", text)
    return max(math.prod(map(int, shape.split(","))) for shape in found)


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"),
    [(1, 6144, 4096), (64, 24576, 4096), (4096, 4096, 12288), (100, 5120, 2560)],
)
def test_the_kernel_spills_nothing_and_writes_nothing_dequantised(rows: int, outputs: int, inputs: int) -> None:
    x, weight = spec((rows, inputs), jnp.bfloat16), spec((outputs, inputs), FLOAT8)
    arguments = x, weight, spec((outputs, inputs // 128), jnp.float32)
    compiled = compile_program(functools.partial(float8_matmul, implementation="mosaic_gpu"), arguments)
    assert compiled.spills == 0
    assert compiled.operations <= 4  # the kernel, and its list of tiles; rows that do not fill a tile are padded
    assert compiled.temp < 2 * 2 * (rows + 128) * max(outputs, inputs) + 2**16


@pytest.mark.parametrize("rows", [1, 64, pytest.param(8192, marks=pytest.mark.thorough)])
def test_the_kernel_for_experts_spills_nothing(rows: int) -> None:
    E, M, F, k = 128, 2048, 768, 8
    arguments = (
        spec((rows, M), jnp.bfloat16), spec((rows, k), jnp.bfloat16), spec((rows, k), jnp.int32),
        spec((E, 2 * F, M), FLOAT8), spec((E, M, F), FLOAT8),
        spec((E, 2 * F, M // 128), jnp.float32), spec((E, M, F // 128), jnp.float32),
    )  # fmt: skip
    compiled = compile_program(functools.partial(mix_experts, implementation="mosaic_gpu"), arguments)
    assert compiled.spills == 0
    assert compiled.looped == 0
    assert compiled.operations <= 15
    packed = rows * k + 7 * min(E, rows * k) + 256
    assert compiled.temp < 2 * packed * (2 * M + F) + 4 * 16 * packed + 2**21


@pytest.mark.parametrize("implementation", ["mosaic_gpu", "xla"])
@pytest.mark.parametrize("size", [64, pytest.param(4096, marks=pytest.mark.thorough)])
def test_a_layer_holds_a_tile_at_most(size: int, implementation: str) -> None:
    config = model("Qwen3-VL-8B-FP8")
    compiled = compile_for(abstract_runner(config, implementation), Layer(size, size, False))
    pool = 2 * SLOTS * config.text.num_kv_heads * config.text.head_dim * 2
    assert compiled.alias == pool + 2 * size * config.text.hidden_size
    row_bytes = 4 * (4 * config.text.hidden_size + 3 * config.text.intermediate_size + 4 * 4096)
    made = dequantized_bytes(config, False) if implementation == "xla" else 0
    assert compiled.temp < size * row_bytes + made + 2**26
    own = max(SLOTS * config.text.num_kv_heads * config.text.head_dim, size * 2 * config.text.intermediate_size)
    assert largest(compiled.text) <= max(own, TILE if implementation == "xla" else 0)


@pytest.mark.parametrize("implementation", [pytest.param("mosaic_gpu", marks=pytest.mark.thorough), "xla"])
def test_a_window_holds_a_tile_at_most(implementation: str) -> None:
    """Nothing of the layers is dequantised before its loop over tokens."""
    config = model("Qwen3-VL-8B-FP8")
    runner = abstract_runner(config, implementation)
    compiled = compile_for(runner, Window(16, "greedy", runner.buckets.window))
    made = dequantized_bytes(config, False) if implementation == "xla" else 0
    assert compiled.temp < 16 * 2**20 + made + 16 * 4 * config.text.vocab_size * 4


@pytest.mark.parametrize("implementation", ["mosaic_gpu", pytest.param("xla", marks=pytest.mark.thorough)])
def test_a_layer_with_experts_holds_few_matrices(implementation: str) -> None:
    config, size = model("Qwen3-VL-30B-A3B-FP8"), 64
    text, experts = config.text, config.text.experts
    compiled = compile_for(abstract_runner(config, implementation), Layer(size, size, False))
    matrices = 3 * text.hidden_size * experts.intermediate_size
    row = experts.chosen * (4 * text.hidden_size + 3 * experts.intermediate_size)
    assert compiled.temp < 2 * size * row + 3 * 4 * matrices + dequantized_bytes(config, False) + 16 * 2**20
    if implementation == "mosaic_gpu":
        assert compiled.looped == 0
        assert compiled.operations < 40


@pytest.mark.parametrize(
    ("name", "count", "implementation"),
    [("Qwen3-VL-8B-FP8", 4, "mosaic_gpu"), pytest.param("Qwen3-VL-4B-FP8", 8, None, marks=pytest.mark.thorough)],
)
def test_over_several_gpus_no_weight_moves(name: str, count: int, implementation: str | None) -> None:
    """Blocks of 128 inputs do not fall on the parts that eight GPUs have of 4B: there XLA multiplies."""
    shapes = spread_shapes(model(name), count, implementation=implementation)
    compiled = Layer(64, 64, False).lowered(shapes).compile()
    assert exchanged(compiled.as_text()) == {"all-reduce": 2}
    assert compiled.memory_analysis().temp_size_in_bytes < 100e6


@pytest.mark.parametrize("rows", [64, 4096])
def test_the_kernel_multiplies_back_to_back(rows: int) -> None:
    kernel = sass.compile_float8(rows, 4096, 4096)
    assert kernel.spills == 0
    [loop] = kernel.compute
    [turn] = loop.values()
    assert turn.names["HGMMA"] == 8  # of 128 inputs
    assert turn.instructions <= 520
