"""The experts' products of real sizes, compiled for an H200 on a machine without one."""

from __future__ import annotations

import functools

import pytest

from research import sass
from research.compiled import compile_program
from vlcache_jax.pallas_kernels import mix_experts
from vlcache_jax.pallas_kernels.shapes import EXPERTS, ExpertsShape

pytestmark = pytest.mark.cuda_gate

ODD = (ExpertsShape(3, 2, 5, 64, 192), ExpertsShape(700, 3, 7, 192, 64))


@pytest.mark.parametrize(
    "shape",
    [*(shape for of_model in EXPERTS.values() for shape in of_model), *ODD],
    ids=lambda shape: f"{shape.N} x {shape.k} of {shape.E}, {shape.M} x {shape.F}",
)
def test_experts_spill_nothing_and_copy_no_matrix(shape: ExpertsShape) -> None:
    compiled = compile_program(functools.partial(mix_experts, implementation="mosaic_gpu"), shape.specs())
    assert compiled.spills == 0
    assert compiled.looped == 0
    assert compiled.operations <= 14
    # Packed rows, what is hidden, and what is made of it; the table of tiles.
    packed = shape.N * shape.k + 7 * min(shape.E, shape.N * shape.k) + 256
    assert compiled.temp < 2 * packed * (2 * shape.M + shape.F) + 4 * 16 * packed + 2**21


@pytest.mark.parametrize("rows", [1, 64, 8192])
def test_experts_multiply_back_to_back(rows: int) -> None:
    [shape] = (shape for shape in EXPERTS["Qwen3-VL-30B-A3B"] if rows == shape.N)
    for kernel, products, most in zip(sass.compile_experts(shape), (8, 4), (90, 60), strict=True):
        assert kernel.spills == 0
        [loop] = kernel.compute
        [turn] = loop.values()
        assert turn.names["HGMMA"] == products
        assert turn.instructions <= most
