"""Grouped products: what they give, and that they cost what the rows cost."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vlcache_jax.pallas_kernels import grouped_matmul
from vlcache_jax.pallas_kernels.cases import array

SIZES = [
    (3, 0, 17, 1, 0),
    (0, 0, 0, 0, 9),
    (0, 0, 0, 0, 0),
    (8, 16, 0, 32, 8),
    (200, 0, 65, 1, 7),
    (400, 0, 190, 1, 33),
]
jitted = jax.jit(grouped_matmul)


@pytest.mark.slow_for("float32")
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_each_row_meets_the_matrix_of_its_group(sizes, dtype):
    """Matrices of groups without rows are NaN, and so are the rows behind all groups."""
    rng, rows = np.random.default_rng(0), 280 if sum(sizes) < 280 else 640  # few shapes, so that few are compiled
    weights = rng.standard_normal((len(sizes), 24, 40), np.float32)
    weights[np.array(sizes) == 0] = np.nan
    x = rng.standard_normal((rows, 24), np.float32)
    x[sum(sizes) :] = np.nan
    x, weights = array(x, dtype), array(weights, dtype)
    expected = np.zeros((len(x), 40))
    group = np.repeat(np.arange(len(sizes)), sizes)
    exact = np.einsum("rk,rkn->rn", np.asarray(x[: len(group)], np.float64), np.asarray(weights, np.float64)[group])
    expected[: len(group)] = exact
    found = jitted(x, weights, array(sizes, jnp.int32))
    assert found.dtype == dtype
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, atol=2e-5 if dtype == jnp.float32 else 0.1)


def compiled(groups, rows=64):
    shapes = ((rows, 32), jnp.float32), ((groups, 32, 48), jnp.float32), ((groups,), jnp.int32)
    return jax.jit(grouped_matmul).lower(*(jax.ShapeDtypeStruct(*shape) for shape in shapes)).compile()


def test_operations_follow_the_rows_and_not_the_groups():
    """One product in the program, of a tile with one matrix, in a loop over the tiles of groups that have rows."""
    few, many = compiled(4), compiled(64)
    products = [re.findall(r"= (\S+) dot\(", one.as_text()) for one in (few, many)]
    assert products[0] == ["f32[8,48]{1,0}"] or products[0] == ["f32[32,48]{1,0}"]
    assert products[1] == ["f32[8,48]{1,0}"]
    # All that does more for more groups is what counts them.
    assert many.cost_analysis()["flops"] < few.cost_analysis()["flops"] + 64 * 64


def test_only_one_matrix_at_a_time_is_read():
    """Whatever takes the stack takes a slice of it or hands it on; nothing as large is made of it."""
    groups = 64
    program = compiled(groups)
    stack = rf"f32\[{groups},32,48\]"
    made = re.findall(rf"= {stack}\S* (\S+?)\(", program.as_text())
    assert set(made) <= {"parameter", "get-tuple-element"}
    assert program.memory_analysis().temp_size_in_bytes < 4 * (32 * 48 + 4 * 64 * 96)


@pytest.mark.parametrize(
    ("x", "weights", "sizes", "message"),
    [
        ((5, 8), (3, 9, 4), (3,), r"weights must be \[E, 8, N\]"),
        ((5, 8), (3, 8), (3,), r"weights must be \[E, 8, N\]"),
        ((5, 8), (3, 8, 4), (4,), r"sizes must be \[3\]"),
    ],
)
def test_shapes_must_go_together(x, weights, sizes, message):
    with pytest.raises(ValueError, match=message):
        grouped_matmul(np.zeros(x, np.float32), np.zeros(weights, np.float32), np.zeros(sizes, np.int32))
