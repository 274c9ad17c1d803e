"""Paged attention on XLA: every case against the reference, and the promises that one comparison cannot show."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helper import ATOL
from vlcache_jax.pallas_kernels import PAGE, Shared, make_work, paged_attention, paged_cases, work_config
from vlcache_jax.pallas_kernels.cases import array
from vlcache_jax.pallas_kernels.paged_cases import CASES, arrays, reference

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
jitted = jax.jit(paged_attention, static_argnames=("scale", "implementation"))
COUNT = 304  # one shape for all cases, so that they compile once
HEADS, KV_HEADS, WIDTH = 6, 2, 16


def config(count=COUNT, dtype="float32", decode=False):
    q = jax.ShapeDtypeStruct((count, HEADS, WIDTH), dtype)
    return work_config(count, 20, 40, q, KV_HEADS, decode=decode)


def padded(*pools):
    """Pools of one size for all cases."""
    return [np.pad(pool, ((0, 60 * PAGE - len(pool)), (0, 0), (0, 0))) for pool in pools]


@pytest.mark.slow_for("bfloat16")
@each_case
@pytest.mark.parametrize("dtype", ATOL)
def test_agrees_with_the_reference(case, dtype):
    rows = case(np.random.default_rng(0))
    q, k, v = (array(x, dtype) for x in arrays(rows, COUNT, HEADS, KV_HEADS, WIDTH))
    out = jitted(q, *padded(k, v), rows.work(config(dtype=dtype)))
    assert out.dtype == q.dtype
    np.testing.assert_allclose(np.asarray(out, np.float64), reference(rows, q, k, v), atol=ATOL[dtype], rtol=0)


@pytest.mark.parametrize("case", [paged_cases.decode, paged_cases.shared, paged_cases.two_levels, paged_cases.one_long])
def test_rows_that_decode(case):
    rows = case(np.random.default_rng(0))
    q, k, v = arrays(rows, 20, HEADS, KV_HEADS, WIDTH)
    out = jitted(q, *padded(k, v), rows.work(config(20, decode=True)), scale=0.3)
    np.testing.assert_allclose(out, reference(rows, q, k, v, scale=0.3), atol=ATOL["float32"], rtol=0)


@pytest.mark.slow
def test_a_row_that_decodes_does_not_depend_on_others():
    """To the last bit, however many rows a step has, and how many of them see something."""
    rng = np.random.default_rng(0)
    lengths = np.array([200, 130, 900, 1, 128, 129, 300, 2, 600, 255, 256, 257, 640])
    pages = -(-lengths // PAGE)
    tables = np.split(1 + rng.permutation(pages.sum()), np.cumsum(pages)[:-1])
    q = rng.standard_normal((16, HEADS, WIDTH), np.float32)
    pools = rng.standard_normal((2, 60 * PAGE, KV_HEADS, WIDTH), np.float32)

    def run(rows, bucket):
        own = [tables[row] for row in rows]
        work = make_work(np.arange(len(rows)), 0 * lengths[rows], lengths[rows], own, config(bucket, decode=True))
        return np.asarray(jitted(q[np.array([*rows] + [0] * (bucket - len(rows)))], *pools, work))[: len(rows)]

    want = np.concatenate([run([row], 1) for row in range(13)])
    assert np.isfinite(want).all()
    assert want.any()
    for rows, bucket in ((range(4), 4), ([2, 0, 1], 4), ([8, 2, 4, 6, 0], 8), (range(13), 16), ([9, 3], 16)):
        np.testing.assert_array_equal(run([*rows], bucket), want[[*rows]])


@each_case
def test_the_rest_of_the_pool_may_hold_anything_finite_in_v(case):
    rows = case(np.random.default_rng(0))
    work = rows.work(config())
    clean, poisoned = (
        jitted(q, *padded(k, v), work)
        for q, k, v in (arrays(rows, COUNT, HEADS, KV_HEADS, WIDTH, poison=poison) for poison in (False, True))
    )
    np.testing.assert_array_equal(clean, poisoned)


@pytest.mark.parametrize("case", [paged_cases.requests, paged_cases.two_levels])
def test_nan_in_k_reaches_exactly_the_rows_that_see_it(case):
    rows = case(np.random.default_rng(0))
    q, k, v = arrays(rows, COUNT, HEADS, KV_HEADS, WIDTH)
    work = rows.work(config())
    want = np.asarray(jitted(q, *padded(k, v), work))
    seen = rows.slots(4)
    broken = int(seen[len(seen) // 2])
    k[broken, 1] = np.nan
    out = np.asarray(jitted(q, *padded(k, v), work))
    sees = np.zeros(COUNT, bool)
    sees[: len(rows.table)] = [broken in rows.slots(n) for n in range(len(rows.table))]
    assert sees[4]
    np.testing.assert_array_equal(out[~sees], want[~sees])
    np.testing.assert_array_equal(out[:, :3], want[:, :3])  # the other key-value head
    assert np.isnan(out[sees][:, 3:]).all()


@pytest.mark.parametrize("least", [np.zeros_like, np.copy])
def test_ends_that_the_device_decides(least):
    """The list is made for the most that rows may see; some see less, some nothing."""
    rows = paged_cases.decode_beside_prefill(np.random.default_rng(0))
    q, k, v = arrays(rows, COUNT, HEADS, KV_HEADS, WIDTH)
    work = rows.work(config(), least=least(rows.end))
    end = np.maximum(np.random.default_rng(1).integers(0, rows.end + 1), least(rows.end))
    end[[2, 20]] = 0
    less = paged_cases.PagedRows(rows.table, rows.start, end, rows.tables)
    out = jitted(q, *padded(k, v), work, end=array(np.pad(end, (0, COUNT - len(end))), jnp.int32))
    np.testing.assert_allclose(out, reference(less, q, k, v), atol=ATOL["float32"], rtol=0)
    assert not np.asarray(out[2]).any()


def test_pages_may_lie_anywhere():
    """To the last bit."""
    rows = paged_cases.requests(np.random.default_rng(0))
    q, k, v = arrays(rows, COUNT, HEADS, KV_HEADS, WIDTH)
    want = jitted(q, *padded(k, v), rows.work(config()))
    order = np.concatenate([[0], 1 + np.random.default_rng(2).permutation(rows.num_pages - 1)])
    moved = [np.zeros_like(x).reshape(-1, PAGE, *x.shape[1:]) for x in (k, v)]
    for pool, x in zip(moved, (k, v), strict=True):
        pool[order] = x.reshape(pool.shape)
    elsewhere = paged_cases.PagedRows(rows.table, rows.start, rows.end, [order[table] for table in rows.tables])
    pools = padded(*(x.reshape(k.shape) for x in moved))
    np.testing.assert_array_equal(jitted(q, *pools, elsewhere.work(config())), want)


@pytest.mark.slow
def test_no_copy_of_the_pool():
    def temporaries(rows, pages, decode):
        q, pool = ((rows, 12, 64), jnp.bfloat16), ((pages * PAGE, 4, 64), jnp.bfloat16)
        args = [jax.ShapeDtypeStruct(*x) for x in (q, pool, pool)]
        work = work_config(rows, 8, 100, args[0], 4, decode=decode).abstract()
        return jitted.lower(*args, work).compile().memory_analysis().temp_size_in_bytes

    for rows, decode in ((1, True), (64, False)):
        assert temporaries(rows, 1000, decode) == temporaries(rows, 100, decode) < 10_000_000


def test_wrong_arguments_are_named():
    q, pool = np.zeros((8, 4, 16), np.float32), np.zeros((2 * PAGE, 2, 16), np.float32)
    q_spec = jax.ShapeDtypeStruct(q.shape, q.dtype)
    work = make_work(np.zeros(3), np.zeros(3), np.ones(3), [[1]], work_config(8, 1, 1, q_spec, 2, decode=False))
    right = {"q": q, "k": pool, "v": pool, "work": work}
    assert paged_attention(**right).shape == q.shape
    for change, message in (
        ({"q": q[:7]}, "work must be made for the 7 rows of q, got work for 8"),
        ({"k": pool[:200], "v": pool[:200]}, "k must have full pages of 128 slots"),
        ({"v": pool[:128]}, "v must have the shape of k"),
        ({"work": None}, "work must be a Work as made by make_work, got NoneType"),
        ({"end": np.zeros(7, np.int32)}, r"end must be int32 of shape \[8\], got int32 \[7\]"),
        ({"scale": 0.0}, "scale must be a positive number"),
        ({"implementation": "cudnn"}, "implementation must be None or one of"),
    ):
        with pytest.raises(ValueError, match=message):
            paged_attention(**right | change)
    with pytest.raises(ValueError, match="work must be made for mosaic_gpu_interpreted"):
        paged_attention(
            **{name: array(x, jnp.bfloat16) for name, x in right.items() if name != "work"},
            work=work,
            implementation="mosaic_gpu_interpreted",
        )


def test_a_shared_prefix_gives_what_rows_apart_give():
    rows = paged_cases.shared(np.random.default_rng(0))
    q, k, v = arrays(rows, 20, HEADS, KV_HEADS, WIDTH)
    run = functools.partial(jitted, q, *padded(k, v))
    together, apart = (
        make_work(rows.table, rows.start, rows.end, rows.tables, config(20, decode=True), shared=shared)
        for shared in (rows.shared, ())
    )
    assert isinstance(rows.shared[0], Shared)
    assert together.parts().ctas[-1] > apart.parts().ctas[-1]
    np.testing.assert_allclose(run(together), run(apart), atol=ATOL["float32"], rtol=0)
