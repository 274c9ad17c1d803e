"""Products with matrices in 8 bits, against float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vlcache_jax.pallas_kernels import dispatch, float8_cases, float8_matmul, grouped_matmul, mix_experts
from vlcache_jax.pallas_kernels.cases import array, relative_error
from vlcache_jax.pallas_kernels.checks import CHECKS
from vlcache_jax.pallas_kernels.dispatch import HOPPERS, PORTABLE
from vlcache_jax.pallas_kernels.quantized_matmul import mosaic_gpu_mma, xla

FLOAT8 = jnp.float8_e4m3fn
ATOL = {"float32": 2e-5, "bfloat16": 0.1}


def matrix(seed, *shape, groups):
    """In 8 bits, its factors, and what it stands for in float64."""
    rng = np.random.default_rng(seed)
    weight = np.asarray(rng.standard_normal(shape) * 8, FLOAT8)
    scale = rng.uniform(0.01, 0.02, (*shape[:-1], groups)).astype(np.float32)
    whole = weight.astype(np.float64) * np.repeat(scale.astype(np.float64), shape[-1] // groups, axis=-1)
    return weight, scale, whole


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("rows", "outputs", "inputs", "groups"), [(1, 24, 40, 5), (17, 96, 128, 1), (3, 36, 33, 33)])
def test_rows_times_what_a_matrix_stands_for(dtype, rows, outputs, inputs, groups):
    weight, scale, whole = matrix(0, outputs, inputs, groups=groups)
    x = np.random.default_rng(1).standard_normal((rows, inputs)).astype(dtype)
    found = jax.jit(float8_matmul)(x, weight, scale)
    assert found.dtype == dtype
    np.testing.assert_allclose(np.asarray(found, np.float64), x.astype(np.float64) @ whole.T, atol=ATOL[dtype])


def test_tiles_give_what_the_whole_gives(monkeypatch):
    """The way of a GPU, of whose tiles none is as large as the matrix."""
    weight, scale, whole = matrix(0, 96, 64, groups=2)
    x = np.random.default_rng(1).standard_normal((5, 64)).astype(np.float32)
    monkeypatch.setattr(xla, "TILE", 20 * 64)
    assert xla.tile_of(96, 64) == 16
    tiled = jax.jit(lambda *args: xla._tiled(*args))
    np.testing.assert_allclose(tiled(x, weight, scale), x.astype(np.float64) @ whole.T, atol=ATOL["float32"])
    shapes = "f32[96,64]", "f32[96,2,32]"
    text = tiled.lower(x, weight, scale).compile().as_text()
    assert not any(shape in text for shape in shapes)
    assert "f32[16,64]" in text or "f32[16,2,32]" in text


def test_a_loop_over_layers_holds_one_matrix():
    """What stands for weights is made again at every step, and not of all layers before the first."""
    layers, size = 6, 256

    def run(x, weights, scales, steps):
        def step(_, x):
            for weight, scale in zip(weights, scales, strict=True):
                x = jnp.tanh(float8_matmul(x, weight, scale))
            return x

        return jax.lax.fori_loop(0, steps, step, x)

    spec = jax.ShapeDtypeStruct
    weights, scales = [spec((size, size), FLOAT8)] * layers, [spec((size, 2), jnp.float32)] * layers
    compiled = jax.jit(run).lower(spec((4, size), jnp.float32), weights, scales, spec((), jnp.int32)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1.5 * 4 * size**2


def test_groups_of_rows():
    sizes = np.array([3, 0, 17, 1], np.int32)
    weight, scale, whole = matrix(0, 4, 40, 24, groups=3)
    x = np.random.default_rng(1).standard_normal((24, 24)).astype(np.float32)
    found = jax.jit(grouped_matmul)(x, weight, sizes, scale)
    expected = np.zeros((24, 40))
    group = np.repeat(np.arange(4), sizes)
    expected[: len(group)] = np.einsum("rk,rnk->rn", x[: len(group)].astype(np.float64), whole[group])
    np.testing.assert_allclose(found, expected, atol=ATOL["float32"])


def test_experts():
    """As with the matrices that they stand for; some choices are nobody's."""
    rng = np.random.default_rng(1)
    gate_up, gate_up_scale, wide = matrix(2, 5, 32, 24, groups=3)
    down, down_scale, back = matrix(3, 5, 24, 16, groups=1)
    x, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((9, 24), (9, 2)))
    expert = array(rng.integers(0, 6, (9, 2)), jnp.int32)
    mix = jax.jit(functools.partial(mix_experts, implementation="xla"))
    found = mix(x, weight, expert, gate_up, down, gate_up_scale, down_scale)
    assert found.dtype == jnp.float32
    plain = mix(x, weight, expert, *(np.float32(one.swapaxes(1, 2)) for one in (wide, back)))
    np.testing.assert_allclose(found, plain, atol=2e-5)


@pytest.mark.parametrize(
    ("weight", "scale", "message"),
    [
        (((4, 9), FLOAT8), ((4, 1), jnp.float32), r"weight must be \[O, 8\], got \[4, 9\]"),
        (((4, 8), jnp.float32), ((4, 1), jnp.float32), "weight must be float8_e4m3fn if it has factors, got float32"),
        (((4, 8), FLOAT8), ((4, 1), jnp.bfloat16), "factors of weight must be float32 .* got bfloat16"),
        (
            ((4, 8), FLOAT8),
            ((3, 1), jnp.float32),
            r"factors of weight must be float32 of shape \[4\] x groups, .* \[3, 1\]",
        ),
        (((4, 8), FLOAT8), ((4, 3), jnp.float32), r"groups, a number that divides 8 inputs, got float32 \[4, 3\]"),
    ],
)
def test_shapes_and_dtypes_must_go_together(weight, scale, message):
    x = np.zeros((2, 8), np.float32)
    with pytest.raises(ValueError, match=message):
        float8_matmul(x, jax.ShapeDtypeStruct(*weight), jax.ShapeDtypeStruct(*scale))


not_a_number = pytest.mark.filterwarnings("ignore:invalid value encountered")  # by the interpreter's numpy
SMALL = [
    check
    for kernel, real in (("float8_matmul", float8_cases.REAL), ("float8_experts", float8_cases.REAL_EXPERTS))
    for check in CHECKS[kernel]
    if not any(case.name == check.name for case in real)
]


QUICK = {HOPPERS: "nine rows", PORTABLE: "one row"}  # of float8_matmul


@not_a_number
@pytest.mark.parametrize(
    ("check", "implementation"),
    [
        pytest.param(
            check,
            f"{family}_interpreted",
            id=f"{family}: {check.name}",
            marks=() if check in CHECKS["float8_matmul"] and check.name == quick else pytest.mark.interpreted,
        )
        for family, quick in QUICK.items()
        for check in SMALL
    ],
)
def test_the_kernel(check, implementation):
    assert check.error(implementation) < 0.03


def portable(args, gated, **config):
    """The portable kernel's product with experts 0 and 1 of 8 rows each, and its reference in float64."""
    x, weight, scale, whole = args
    table = [np.array(part, np.int32) for part in ([0, 1], [0, 1], [1, 1], [2])]
    cut = mosaic_gpu_mma.QuantizedMatmulMmaConfig(16, places=2, bulk=True, native=True, programs=3, **config)
    races = dispatch.interpreter(dispatch.Choice("", "", "mosaic_gpu_mma_interpreted", ""))
    made = mosaic_gpu_mma.multiply_tiles(x, weight, scale, *table, gated=gated, config=cut, interpret=races)[:16]
    products = np.einsum("erk,eok->ero", np.asarray(x[:16], np.float64).reshape(2, 8, -1), whole).reshape(16, -1)
    if gated:
        gate, up = np.split(products, 2, axis=1)
        products = gate / (1 + np.exp(-gate)) * up
    return np.asarray(made, np.float64), products


@pytest.mark.parametrize(
    ("gated", "parts", "shares", "inputs"),
    [
        (False, 1, 2, 256),
        pytest.param(False, 2, 1, 256, marks=pytest.mark.interpreted),
        pytest.param(False, 1, 3, 640, marks=pytest.mark.interpreted),  # the last one has fewer
        pytest.param(True, 2, 2, 384, marks=pytest.mark.interpreted),
    ],
)
def test_shares_of_the_inputs_add_up(gated, parts, shares, inputs):
    args = matrix(0, 2, 128, inputs, groups=inputs // 128)
    x = array(np.random.default_rng(1).standard_normal((24, inputs)), jnp.float16)
    weight, scale, whole = args
    found, expected = portable((x, jnp.asarray(weight), jnp.asarray(scale), whole), gated, parts=parts, shares=shares)
    assert relative_error(found, expected) < 0.01


@pytest.mark.parametrize("check", CHECKS["float8_matmul"][:4], ids=lambda check: check.name)
def test_what_is_checked_on_a_chip_holds_in_xla(check):
    assert check.error("xla") < 0.03


@not_a_number
def test_experts_that_are_checked_on_a_chip_hold_in_xla():
    assert CHECKS["float8_experts"][-1].error("xla") < 0.03


@pytest.mark.parametrize(
    ("x", "outputs", "inputs", "groups", "message"),
    [
        ("float32", 64, 128, 1, "multiplies bfloat16 and float16, got x in float32"),
        ("bfloat16", 64, 192, 3, "with one factor for 128 inputs, .* got 192 inputs, 3 factors and 64 outputs"),
        ("bfloat16", 96, 128, 1, "multiples of 64 outputs, got 128 inputs, 1 factors and 96 outputs"),
    ],
)
def test_what_the_kernel_does_not_do_is_told(x, outputs, inputs, groups, message):
    specs = (jax.ShapeDtypeStruct((3, inputs), x), jax.ShapeDtypeStruct((outputs, inputs), FLOAT8))
    scale = jax.ShapeDtypeStruct((outputs, groups), jnp.float32)
    for implementation in ("xla", None):
        jax.eval_shape(functools.partial(float8_matmul, implementation=implementation), *specs, scale)
    for implementation in (HOPPERS, PORTABLE):
        with pytest.raises(NotImplementedError, match=message):
            jax.eval_shape(functools.partial(float8_matmul, implementation=implementation), *specs, scale)


def test_the_kernel_for_experts_takes_factors_of_128_inputs():
    args = (
        *(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((3, 64), (3, 1))),
        jax.ShapeDtypeStruct((3, 1), jnp.int32),
        *(jax.ShapeDtypeStruct(shape, FLOAT8) for shape in ((2, 128, 64), (2, 64, 64))),
        *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 128, 1), (2, 64, 1))),
    )
    for implementation in (HOPPERS, PORTABLE):
        with pytest.raises(NotImplementedError, match="with one factor for 128 inputs"):
            jax.eval_shape(functools.partial(mix_experts, implementation=implementation), *args)
