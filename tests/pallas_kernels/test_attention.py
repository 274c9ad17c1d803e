"""Attention: every case against the reference, and the promises that one comparison cannot show."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helper import ATOL
from vlcache_jax.pallas_kernels import attention, propagate_nonfinite
from vlcache_jax.pallas_kernels.cases import CASES, KernelCase, causal, reference, scattered, whole

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
jitted = jax.jit(attention, static_argnames=("scale", "implementation"))


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


@pytest.mark.slow_for("bfloat16", "causal, many rows", "one row", "scale", "one image", "one slot", "windows")
@each_case
@pytest.mark.parametrize("dtype", ATOL)
def test_agrees_with_the_reference(case: KernelCase, dtype: str) -> None:
    args = case.inputs(dtype)
    out = jitted(*args, scale=case.scale)
    assert out.shape == args[0].shape
    assert out.dtype == args[0].dtype
    np.testing.assert_allclose(np.asarray(out, np.float64), reference(*args, case.scale), atol=ATOL[dtype], rtol=0)


@pytest.mark.slow_for("causal, many rows", "one row", "scale", "one image", "one slot", "windows")
@each_case
def test_the_rest_of_the_pool_may_hold_anything(case: KernelCase) -> None:
    clean, poisoned = (jitted(*case.inputs(poison=poison), scale=case.scale) for poison in (False, True))
    np.testing.assert_array_equal(clean, poisoned)


def test_nan_reaches_exactly_the_rows_that_see_it() -> None:
    q, k, v, start, end = map(np.array, KernelCase("", 90, 90, 8, 1, 24, causal).inputs())
    want = np.asarray(jitted(q, k, v, start, end))
    of_k, of_v, of_one = k.copy(), v.copy(), v.copy()
    of_k[50], of_v[50], of_one[50, 0, 3] = np.nan, np.nan, np.inf
    carry = jax.jit(propagate_nonfinite)
    for broken in ((of_k, v), carry(k, of_v), carry(k, of_one)):
        out = np.asarray(jitted(q, *broken, start, end))
        np.testing.assert_array_equal(out[:50], want[:50])
        assert not np.isfinite(out[50:]).any()


def test_empty_rows_are_zero_beside_nan() -> None:
    q, k, v, start, end = map(np.array, KernelCase("", 90, 90, 8, 1, 24, whole).inputs())
    end[::3] = 0
    out = np.asarray(jitted(q, *jax.jit(propagate_nonfinite)(k, np.full_like(v, np.inf)), start, end))
    assert (out[::3] == 0).all()
    assert np.isnan(out[1::3]).all()


def test_rows_do_not_depend_on_the_size_of_the_pool() -> None:
    q, k, v, start, end = map(np.asarray, KernelCase("", 90, 90, 8, 1, 24, causal).inputs())
    shift = 301
    big = [np.full((8 * 90, 1, 24), fill, np.float32) for fill in (np.nan, np.finfo(np.float32).max)]
    for pool, x in zip(big, (k, v), strict=True):
        pool[shift : shift + 90] = x
    out = jitted(q, *big, start + shift, end + shift)
    np.testing.assert_allclose(out, jitted(q, k, v, start, end), atol=ATOL["float32"], rtol=0)


def test_rows_do_not_depend_on_other_rows() -> None:
    q, k, v, start, end = map(np.asarray, KernelCase("", 300, 801, 6, 2, 64, scattered).inputs())
    want = np.asarray(jitted(q, k, v, start, end))
    order = np.random.default_rng(1).permutation(300)
    for rows in (order, order[:11], order[:1]):
        out = jitted(q[rows], k, v, start[rows], end[rows])
        np.testing.assert_allclose(out, want[rows], atol=ATOL["float32"], rtol=0)


def test_large_scores_do_not_overflow() -> None:
    q, k, v, start, end = KernelCase("", 90, 90, 8, 1, 24, whole).inputs()
    args = np.asarray(q) * np.float32(1e4), k, v, start, end
    np.testing.assert_allclose(jitted(*args), reference(*args), atol=1e-3, rtol=0)


def test_twice_is_bit_equal_and_eager_works() -> None:
    args = KernelCase("", 90, 90, 8, 1, 24, causal).inputs()
    np.testing.assert_array_equal(jitted(*args), jitted(*args))
    np.testing.assert_array_equal(attention(*args), jitted(*args))


def test_no_score_matrix_and_no_copy_of_the_pool() -> None:
    def temporaries(n: int, s: int) -> int:
        rows, pool, index = ((n, 12, 64), jnp.bfloat16), ((s, 4, 64), jnp.bfloat16), ((n,), jnp.int32)
        args = (jax.ShapeDtypeStruct(*x) for x in (rows, pool, pool, index, index))
        return jax.jit(attention).lower(*args).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(4096, 4096) < 4096 * 4096 * 4  # one head's scores; there are twelve
    assert temporaries(64, 100_000) == temporaries(64, 10_000) < 10_000_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": zeros(5, 6)}, r"q must have shape \[N, H, D\].*got \[5, 6\]"),
        ({"q": zeros(5, 4, 8)}, "q must have a multiple of k's 3 heads, got 4"),
        ({"q": zeros(5, 6, 8, dtype=np.int32)}, "q must be one of .*float32.*got int32"),
        ({"k": zeros(9, 3, 7)}, r"k must have shape \[S, K, D\] with D = 8.*got \[9, 3, 7\]"),
        ({"k": zeros(0, 3, 8)}, r"k must have shape .* got \[0, 3, 8\]"),
        ({"v": zeros(8, 3, 8)}, r"v must have the shape of k, \[9, 3, 8\], got \[8, 3, 8\]"),
        ({"v": zeros(9, 3, 8, dtype=jnp.bfloat16)}, "v must have the dtype of q, float32, got bfloat16"),
        ({"k_start": zeros(4, dtype=np.int32)}, r"k_start must be int32 of shape \[5\], got int32 \[4\]"),
        ({"k_end": zeros(5)}, r"k_end must be int32 of shape \[5\], got float32 \[5\]"),
        ({"scale": -1.0}, "scale must be a positive number, got -1.0"),
        ({"implementation": "cudnn"}, r"implementation must be None or one of \('xla', .*\), got 'cudnn'"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, object], message: str) -> None:
    index = zeros(5, dtype=np.int32)
    right = {
        "q": zeros(5, 6, 8),
        "k": zeros(9, 3, 8),
        "v": zeros(9, 3, 8),
        "k_start": index,
        "k_end": index,
    }
    assert jax.eval_shape(attention, **right).shape == (5, 6, 8)
    with pytest.raises(ValueError, match=message):
        attention(**(right | change))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(functools.partial(attention, **(right | change)))
