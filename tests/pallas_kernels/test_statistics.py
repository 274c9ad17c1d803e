"""Statistics of attention: every case against float64, and what the program holds."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vlcache_jax.pallas_kernels import PAGE, attention_statistics
from vlcache_jax.pallas_kernels.statistics_cases import CASES, StatisticsCase, reference

jitted = jax.jit(attention_statistics, static_argnames=("scale", "implementation"))


@pytest.mark.slow_for("one head", "edges", "one row", "last rows")
@pytest.mark.parametrize(
    ("case", "dtype", "flaw"),
    [
        *(pytest.param(case, "float32", False, id=case.name) for case in CASES),
        pytest.param(CASES[1], "bfloat16", False, id="bfloat16"),
        pytest.param(CASES[1], "float32", True, id="NaN"),  # in a key: reaches what its head gives, and nothing else
    ],
)
def test_agrees_with_float64(case: StatisticsCase, dtype: str, flaw: bool) -> None:
    args = case.inputs(dtype, flaw=flaw)
    received, zeros = jitted(*args, scale=case.scale)
    want = reference(*args, scale=case.scale)
    np.testing.assert_allclose(received, want.received, atol=1e-5, rtol=1e-5)
    zeros = np.asarray(zeros)
    assert ((want.least <= zeros) & (zeros <= want.most)).all()
    if not flaw:
        np.testing.assert_array_equal(want.least, want.most)  # no weight lies on the threshold: counts are exact
    unseen = want.received == 0
    assert (np.asarray(received)[unseen] == 0).all()


def test_a_weight_on_the_threshold_is_kept() -> None:
    """Equality is kept (ThresholdFilter), and a row's largest is never below; masked slots count in neither."""
    weights = np.array([0.5, 0.25, 0.25])
    q, k = np.ones((2, 1, 1), np.float32), np.zeros((PAGE, 1, 1), np.float32)
    k[:3, 0, 0] = np.log2(weights) * np.log(2)
    for p, zeros in ((0.4, 0), (0.6, 3), (1.0, 3)):  # of rows of two slots and of three
        received, found = jitted(q, k, np.zeros(1, np.int32), np.array([1, 2], np.int32), p, scale=1.0)
        assert found.tolist() == [zeros]
    np.testing.assert_allclose(received[0, :4], [2 / 3 + 0.5, 1 / 3 + 0.25, 0.25, 0], rtol=1e-6)


def test_nothing_of_rows_times_keys_is_held() -> None:
    def temporaries(rows: int, pages: int, slots: int = 64 * PAGE) -> int:
        shapes = ((rows, 32, 128), jnp.bfloat16), ((slots, 8, 128), jnp.bfloat16), ((pages,), jnp.int32)
        args = [jax.ShapeDtypeStruct(*x) for x in (*shapes, ((rows,), jnp.int32), ((), jnp.float32))]
        return jax.jit(attention_statistics).lower(*args).compile().memory_analysis().temp_size_in_bytes

    few = temporaries(64, 64)
    assert few < 64 * 32 * 64 * PAGE * 4 // 4  # the scores of 64 rows, 32 heads and 8192 keys
    assert temporaries(64, 256, 256 * PAGE) == few  # of however many pages, whatever the pool holds besides
    assert temporaries(2048, 64) < 2 * few + 2048 * 32 * 128 * 4  # two such tiles at once, and the queries, packed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": np.zeros((5, 4, 8), np.float32)}, "q must have a multiple of k's 3 heads, got 4"),
        ({"k": np.zeros((200, 3, 8), np.float32)}, r"k must have full pages of 128 slots, got \[200, 3, 8\]"),
        ({"k": np.zeros((256, 3, 8), jnp.bfloat16)}, "k must have the dtype of q, float32, got bfloat16"),
        ({"table": np.zeros(2, np.float32)}, r"table must be int32 of shape \[B\] .* got float32 \[2\]"),
        ({"table": np.zeros(0, np.int32)}, r"table must be int32 .* got int32 \[0\]"),
        ({"place": np.zeros(4, np.int32)}, r"place must be int32 of shape \[5\], got int32 \[4\]"),
        ({"p": np.zeros(2, np.float32)}, r"p must be one number, got shape \[2\]"),
        ({"scale": 0.0}, "scale must be a positive number, got 0.0"),
        ({"implementation": "cudnn"}, r"implementation must be None or one of \('xla', .*\), got 'cudnn'"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, object], message: str) -> None:
    right = {
        "q": np.zeros((5, 6, 8), np.float32),
        "k": np.zeros((256, 3, 8), np.float32),
        "table": np.zeros(2, np.int32),
        "place": np.zeros(5, np.int32),
        "p": 0.01,
    }
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(functools.partial(attention_statistics, **(right | change)))
