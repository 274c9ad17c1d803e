"""The Mosaic GPU kernels in jax's interpreter, which also looks for data races; test_compile.py compiles them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import reset_gpu_interpret_mode_state

from vlcache_jax.kernel_selftest import SelfTestResult, selftest
from vlcache_jax.pallas_kernels import (
    PAGE,
    attention,
    dispatch,
    link,
    norm_residual,
    paged_cases,
    propagate_nonfinite,
    rotate_write,
)
from vlcache_jax.pallas_kernels.attention import mosaic_gpu, mosaic_gpu_merge
from vlcache_jax.pallas_kernels.attention.mosaic_gpu import AttentionConfig
from vlcache_jax.pallas_kernels.attention.mosaic_gpu_merge import merge
from vlcache_jax.pallas_kernels.attention.work import (
    BOX0,
    BOXES,
    FROM,
    HEAD,
    INNER_FROM,
    INNER_TO,
    PARTIAL,
    TO,
    items_of_tiles,
)
from vlcache_jax.pallas_kernels.cases import (
    CODED_LINK_CASES,
    LINK_CASES,
    WAYS,
    KernelCase,
    LinkCase,
    all_empty,
    array,
    causal,
    link_reference,
    packed,
    reference,
    scattered,
    some_empty,
    whole,
    windows,
)
from vlcache_jax.pallas_kernels.checks import CHECKS, Check
from vlcache_jax.pallas_kernels.paged_cases import PagedRows
from vlcache_jax.pallas_kernels.shapes import ATTENTION, AttentionShape

pytestmark = pytest.mark.interpreted

ATOL = 2e-2  # weights and results are rounded to bfloat16
RACES = dispatch.interpreter(dispatch.Choice("attention", "", "mosaic_gpu_interpreted", ""))
not_a_number = pytest.mark.filterwarnings("ignore:invalid value encountered")  # by the interpreter's numpy
SMALL, LARGE = AttentionConfig(tile=8, stages=3), AttentionConfig(block=128)
# Every class of the plain contract once: what towers ask for, and what has only one row or many.
PLAIN = [s for s in ATTENTION["Qwen3-VL-8B"] if s.name in ("cold 4096", "stage 512 of 20480", "decode 1 x 20480")]
PLAIN += [s for model in ("Qwen3-VL-8B", "Qwen2.5-VL-7B") for s in ATTENTION[model] if s.H == s.K]


def plain(args, *, scale=None, config=None):
    scale = args[0].shape[-1] ** -0.5 if scale is None else scale
    return np.asarray(mosaic_gpu.attention(*args, scale=scale, config=config, interpret=RACES), np.float32)


def assert_close(out, args, scale=None):
    np.testing.assert_allclose(out, reference(*args, scale), atol=ATOL, rtol=0)


def first_quick(cases):
    """The first case runs with all tests, the others, minutes together, where what is interpreted does."""
    first, *others = ((case if isinstance(case, tuple) else (case,)) for case in cases)
    return [pytest.param(*first), *(pytest.param(*case, marks=pytest.mark.interpreted) for case in others)]


@pytest.mark.slow
@pytest.mark.parametrize("shape", first_quick(PLAIN), ids=lambda s: f"{s.name}, {s.H}x{s.D}")
def test_real_shapes_in_small(shape: AttentionShape) -> None:
    args = shape.in_small().arrays()
    assert_close(np.asarray(attention(*args, implementation="mosaic_gpu_interpreted"), np.float32), args)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "fields"), first_quick(WAYS), ids=lambda x: x.name if isinstance(x, KernelCase) else None
)
def test_ways_to_cut(case: KernelCase, fields: dict[str, Any]) -> None:
    args = case.inputs("bfloat16")
    assert_close(plain(args, scale=case.scale, config=AttentionConfig(**fields)), args, case.scale)


@pytest.mark.slow
@not_a_number
def test_keys_that_nobody_sees_may_be_anything() -> None:
    clean, poisoned = (KernelCase("", 20, 400, 4, 1, 64, packed).inputs("bfloat16", poison=poison) for poison in (0, 1))
    out = plain(clean, config=SMALL)
    assert np.isfinite(out).all()
    q, k, _, start, end = poisoned
    np.testing.assert_array_equal(plain((q, k, clean[2], start, end), config=SMALL), out)


@not_a_number
def test_nan_reaches_exactly_the_rows_that_see_it() -> None:
    q, k, v, start, end = KernelCase("", 32, 160, 2, 1, 64, whole).inputs("bfloat16")
    start, end = np.array(start), np.arange(128, 160, dtype=np.int32)
    start[3] = end[3] = 0  # row 3 is empty
    want = plain((q, k, v, start, end), config=SMALL)
    # Slot 140 only some rows see; slot 70 all but the empty one.
    for slot in (140, 70):
        sees = end > slot
        of_k, of_v = np.array(k), np.array(v)
        of_k[slot], of_v[slot, 0, 3] = np.nan, np.inf
        for broken in ((of_k, v), jax.jit(propagate_nonfinite)(k, of_v)):
            out = plain((q, *broken, start, end), config=SMALL)
            np.testing.assert_array_equal(out[~sees], want[~sees])
            assert not np.isfinite(out[sees]).any()


def test_a_missing_wait_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above mean something only if the interpreter finds races."""
    wait, calls = mosaic_gpu.plgpu.barrier_wait, []

    def forgetful(barrier):
        calls.append(barrier)
        if len(calls) > 1:
            wait(barrier)

    monkeypatch.setattr(mosaic_gpu.plgpu, "barrier_wait", forgetful)
    try:
        with pytest.raises(Exception, match="RACE DETECTED"):
            plain(KernelCase("", 8, 70, 2, 1, 64, causal).inputs("bfloat16"))
    finally:
        reset_gpu_interpret_mode_state()  # its documentation asks for this after an exception


@pytest.mark.parametrize("group", [1, 3, 4, 7, 32])
@pytest.mark.parametrize("intervals", [causal, scattered, packed, windows, some_empty, all_empty])
def test_items_of_the_plain_contract(group: int, intervals) -> None:
    """Each tile has one item a head, from the first to the last page that its rows see, and programs do their share."""
    heads, length, programs, pages = 2, 8, 5, 20
    boxes = 9 * group  # a head's; the last tile has fewer than the others
    start, end = (np.clip(x, 0, 2500) for x in intervals(np.random.default_rng(0), 70, 2500))
    start, end = (np.repeat(np.pad(x, (0, 2)).reshape(-1, 1, 8), group, 1).ravel() for x in (start, end))
    start, end = (np.pad(x, (0, -len(x) % (length * 8))).reshape(-1, length * 8) for x in (start, end))
    cut = jax.jit(items_of_tiles, static_argnums=(2, 3, 4, 5))
    ctas, items = map(np.asarray, cut(*(x.astype(np.int32) for x in (start, end)), heads, boxes, length, programs))
    assert ctas[0] == 0
    assert ctas[-1] == len(items) == heads * len(start)
    assert {(head, box) for head, box in items[:, [HEAD, BOX0]].tolist()} == {
        (head, length * tile) for head in range(heads) for tile in range(len(start))
    }
    for item in items:
        tile = item[BOX0] // length
        first, last = start[tile][:, None] // PAGE, -(-end[tile][:, None] // PAGE)
        page, some = np.arange(pages + 1), (start[tile] < end[tile])[:, None]
        seen = (some & (first <= page) & (page < last)).any(0)
        assert (item[BOXES], item[PARTIAL]) == (min(length, boxes - item[BOX0]), -1)
        assert item[TO] - item[FROM] >= 1
        if seen.any():
            assert (item[FROM], item[TO]) == (seen.argmax(), seen.nonzero()[0][-1] + 1)
        whole = (~some | ((start[tile][:, None] <= page * PAGE) & ((page + 1) * PAGE <= end[tile][:, None]))).all(0)
        inner = (item[INNER_FROM] <= page) & (page < item[INNER_TO])
        np.testing.assert_array_equal(inner[item[FROM] : item[TO]], whole[item[FROM] : item[TO]])
    lengths = items[:, TO] - items[:, FROM]
    loads = [lengths[begin:stop].sum() for begin, stop in itertools.pairwise(ctas)]
    assert max(loads) - min(loads) <= lengths.max()


def paged(rows, arrays, cut, *, end=None, least=None, **settings):
    """The kernel's results for q [N, H, D] and pools, whose work `cut` says how to cut."""
    q, k, v = (array(x, jnp.bfloat16) for x in arrays)
    work = rows.work(cut, least)
    scale = q.shape[2] ** -0.5
    out = mosaic_gpu.paged_attention(q, k, v, work, end, scale=scale, interpret=RACES, **settings)
    return np.asarray(out, np.float32), work.parts()


def paged_inputs(case, count, heads, kv_heads, width, *, decode=False, pages=60, programs=3, **settings):
    """Rows, arrays as bfloat16 has them, and how to cut; of one shape for all cases, so that they compile once."""
    rows = case(np.random.default_rng(0))
    q, *pools = paged_cases.arrays(rows, count, heads, kv_heads, width, **settings)
    pools = [np.pad(pool, ((0, pages * PAGE - len(pool)), (0, 0), (0, 0))) for pool in pools]
    arrays = [np.asarray(array(x, jnp.bfloat16), np.float32) for x in (q, *pools)]
    shared = bool(rows.shared)
    cut = mosaic_gpu.work_config(count, 20, 40, heads, kv_heads, width, decode=decode, shared=shared, programs=programs)
    return rows, arrays, cut


def assert_paged(rows, arrays, out):
    np.testing.assert_allclose(out, paged_cases.reference(rows, *arrays), atol=ATOL, rtol=0)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(paged_cases.nothing, marks=pytest.mark.interpreted),
        *(
            pytest.param(case, marks=pytest.mark.thorough)
            for case in (paged_cases.requests, paged_cases.shared_by_prefill, paged_cases.decode_beside_prefill)
        ),
    ],
    ids=lambda case: case.__name__,
)
def test_pages(case) -> None:
    rows, arrays, cut = paged_inputs(case, 96, 6, 2, 64)
    assert cut.tile == 16
    out, parts = paged(rows, arrays, cut)
    assert_paged(rows, arrays, out)
    if case is paged_cases.shared_by_prefill:
        assert (parts.items[: parts.ctas[-1], PARTIAL] >= 0).any()


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(paged_cases.one_long, marks=pytest.mark.interpreted),
        *(
            pytest.param(case, marks=pytest.mark.thorough)
            for case in (paged_cases.shared, paged_cases.decode, paged_cases.two_levels)
        ),
    ],
    ids=lambda case: case.__name__,
)
def test_rows_that_decode(case) -> None:
    rows, arrays, cut = paged_inputs(case, 20, 8, 2, 128, decode=True)
    assert cut.tile == (16 if rows.shared else 8)
    assert_paged(rows, arrays, paged(rows, arrays, cut)[0])


def few(rng: np.random.Generator) -> PagedRows:
    """Two rows of one request, of which programs share the pages, and one of another."""
    tables = paged_cases.tables(rng, 7, 1)
    return PagedRows(np.array([0, 1, 0]), np.array([0, 7, 140]), np.array([880, 90, 690]), tables)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "width", "config"),
    [
        (3, 72, AttentionConfig(block=64, stages=3, take_turns=False)),
        *(
            pytest.param(*case, marks=pytest.mark.interpreted)
            for case in (
                (1, 24, None),
                (4, 128, AttentionConfig(stages=3)),
                (7, 80, None),
                (9, 64, None),
                (32, 64, AttentionConfig(block=128)),
            )
        ),
    ],
)
def test_groups_and_widths(group: int, width: int, config: AttentionConfig | None) -> None:
    rows, arrays, cut = paged_inputs(few, 5, group, 1, width, pages=9)
    assert cut.heads * cut.group == group
    out, parts = paged(rows, arrays, cut, config=config)
    assert (parts.items[: parts.ctas[-1], PARTIAL] >= 0).any()
    assert_paged(rows, arrays, out)


def test_rows_are_copied_whole_or_merged_head_by_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a program of the merge does where rows are many: all heads of a row."""
    monkeypatch.setattr(mosaic_gpu_merge, "ENOUGH", 1)
    rng = np.random.default_rng(0)
    rows, heads = paged_cases.one_long(rng), 4
    cut = mosaic_gpu.work_config(12, 8, 40, heads, heads, 32, decode=False, programs=3)
    work = rows.work(cut)
    parts = work.parts()
    packed, there = (rng.standard_normal((n, heads, 128)).astype(np.float32) for n in (cut.octets * 8, 12))
    lines = cut.partial_boxes * 8
    total, largest, weight = (rng.random(shape).astype(np.float32) for shape in ((lines, 128), lines, lines))
    half = (array(x, jnp.float16) for x in (there, packed))
    results = merge(*half, (total, largest, weight), work, RACES)
    kinds = set()
    for n, of_row in enumerate(np.asarray(results, np.float32)):
        counts = np.diff(parts.merge_first[n * heads : (n + 1) * heads + 1])
        kinds.add((n < len(rows.table), bool(counts.any()), bool(counts.all())))
        for head, out in enumerate(of_row):
            entries = parts.merge[parts.merge_first[n * heads + head] :][: counts[head]]
            if len(entries):
                share = np.exp2(largest[entries])
                want = (total[entries] * share[:, None]).sum(0) / (weight[entries] * share).sum()
            else:
                place = parts.unpack[n]
                want = there[n, head] if place < 0 else packed[place, head] if place < len(packed) else 0
            np.testing.assert_allclose(out, want, atol=1e-3, rtol=1e-3)
    assert kinds == {(False, False, False), (True, False, False), (True, True, False)}


@pytest.mark.interpreted
def test_ends_that_the_device_decides() -> None:
    rows, arrays, cut = paged_inputs(paged_cases.decode, 20, 8, 2, 128, decode=True)
    least = np.maximum(rows.end - 150, 0)
    end = np.zeros(20, np.int32)
    end[: len(rows.end)] = np.random.default_rng(0).integers(least, rows.end + 1)
    end[5] = 0  # has ended
    out, _ = paged(rows, arrays, cut, end=jnp.asarray(end), least=least)
    assert_paged(dataclasses.replace(rows, end=end[: len(rows.end)]), arrays, out)


@not_a_number
@pytest.mark.thorough
def test_keys_of_other_requests_may_be_anything() -> None:
    clean, poisoned = (
        paged_inputs(paged_cases.two_levels, 20, 8, 2, 128, decode=True, poison=poison) for poison in (False, True)
    )
    np.testing.assert_array_equal(paged(*clean)[0], paged(*poisoned)[0])


@not_a_number
@pytest.mark.parametrize(
    "place",  # in a prefix that some share, and at the row's own end
    [pytest.param(place, marks=pytest.mark.thorough) for place in (100, -1)],
)
def test_nan_in_a_page_reaches_exactly_the_rows_that_see_it(place: int) -> None:
    rows, arrays, cut = paged_inputs(paged_cases.two_levels, 20, 8, 2, 128, decode=True)
    want = paged(rows, arrays, cut)[0]
    broken = int(rows.slots(4)[place])
    sees = np.array([n < len(rows.table) and broken in rows.slots(n) for n in range(20)])
    q, k, v = (np.array(x) for x in arrays)
    k[broken, 1] = np.nan
    out = paged(rows, (q, k, v), cut)[0]
    np.testing.assert_array_equal(out[~sees], want[~sees])
    np.testing.assert_array_equal(out[:, :4], want[:, :4])  # the other key-value head
    assert sees[4]
    assert np.isnan(out[sees][:, 4:]).all()


def test_how_work_is_cut() -> None:
    def cut(rows, heads, kv_heads, decode=False, shared=False):
        config = mosaic_gpu.work_config(rows, 64, 160, heads, kv_heads, 128, decode=decode, shared=shared)
        return config.group, config.heads, config.tile, config.pieces

    assert cut(64, 32, 8, decode=True) == (4, 8, 8, 19)
    assert cut(64, 32, 8, decode=True, shared=True) == (4, 8, 16, 19)  # rows over a prefix fill large tiles
    assert cut(1, 64, 8, decode=True) == (8, 8, 8, 19)
    assert cut(64, 9, 1, decode=True) == (9, 1, 16, 135)
    assert cut(64, 32, 1, decode=True) == (16, 2, 16, 69)  # a group that does not fit
    assert cut(8, 32, 8) == (4, 8, 8, 19)
    assert cut(512, 32, 8) == (4, 8, 16, 19)
    assert cut(512, 28, 4) == (7, 4, 16, 36)
    assert cut(8192, 28, 4) == (1, 28, 16, 7)  # rows enough to fill a tile with those of one head


def test_work_of_other_arguments_is_refused() -> None:
    rows, arrays, _ = paged_inputs(few, 5, 4, 1, 64, pages=9)
    other = mosaic_gpu.work_config(5, 20, 40, 8, 1, 64, decode=False, programs=3)
    with pytest.raises(
        ValueError, match="work must be made for q with 5 rows and 4 heads and k with 1 heads, got WorkConfig"
    ):
        paged(rows, arrays, other)


@not_a_number
@pytest.mark.parametrize("case", [*first_quick(LINK_CASES), *first_quick(CODED_LINK_CASES)], ids=lambda case: case.name)
def test_link(case: LinkCase) -> None:
    args = case.inputs()
    found = case.run(args, "mosaic_gpu_interpreted")
    for got, want in zip(found, link_reference(*args, **case.options()), strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


@not_a_number
@pytest.mark.parametrize("check", first_quick((check,) for check in CHECKS["statistics"]), ids=lambda check: check.name)
def test_statistics(check: Check) -> None:
    assert check.error("mosaic_gpu_interpreted") < 1e-5


@not_a_number
@pytest.mark.parametrize(
    "check",
    [param for kernel in ("norm_residual", "rotate_write") for param in first_quick((x,) for x in CHECKS[kernel])],
    ids=lambda check: check.name,
)
def test_rows(check: Check) -> None:
    check.error("mosaic_gpu_interpreted")


def test_what_the_kernels_do_not_do() -> None:
    index = jnp.zeros(4, jnp.int32)
    for dtype, width, message in (("float32", 64, "got q in float32"), ("bfloat16", 256, "widths up to 128, got 256")):
        x = jnp.zeros((4, 2, width), dtype)
        with pytest.raises(NotImplementedError, match=message):
            attention(x, x, x, index, index, implementation="mosaic_gpu_interpreted")
    many = jnp.zeros((4, 40, 64), jnp.bfloat16)
    angle = jnp.zeros((4, 1, 32), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="up to 32 heads, got 40"):
        link(
            many, many, [[jnp.stack([many, many])[None]]], index, angle, angle, implementation="mosaic_gpu_interpreted"
        )
    with pytest.raises(NotImplementedError, match="needs a Hopper GPU, got cpu"):
        attention(*[jnp.zeros((4, 2, 64), jnp.bfloat16)] * 3, index, index, implementation="mosaic_gpu")
    for dtype, width, message in (("float32", 64, "k_pool in float32"), ("bfloat16", 32, "64 and 128, got 32")):
        x, angle = jnp.zeros((4, 2, width), dtype), jnp.zeros((4, 1, width // 2), dtype)
        with pytest.raises(NotImplementedError, match=message):
            link(x, x, [[jnp.stack([x, x])[None]]], index, angle, angle, implementation="mosaic_gpu_interpreted")
    for dtype, width, message in (
        ("float32", 128, "got x in float32"),
        ("bfloat16", 100, "multiples of 128 .* got 100"),
    ):
        x = jnp.zeros((4, width), dtype)
        with pytest.raises(NotImplementedError, match=message):
            norm_residual(x, x, x[0], eps=1e-6, implementation="mosaic_gpu_interpreted")
    for dtype, width, message in (("float32", 64, "got float32"), ("bfloat16", 32, "64 and 128, got 32")):
        qkv, angle = jnp.zeros((4, 2, 3, width), dtype), jnp.zeros((4, 1, width // 2), dtype)
        pool = jnp.zeros((9, 2, width), dtype)
        with pytest.raises(NotImplementedError, match=message):
            rotate_write([qkv], angle, angle, index, pool, pool, implementation="mosaic_gpu_interpreted")


class Hopper:
    platform, device_kind, compute_capability = "gpu", "NVIDIA H200", "9.0"


def test_the_choice_is_recorded_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    x, index = jax.ShapeDtypeStruct((4, 2, 64), jnp.bfloat16), jax.ShapeDtypeStruct((4,), jnp.int32)
    wide = jax.ShapeDtypeStruct((4, 2, 64), jnp.float32)

    def choices(x, implementation):
        with dispatch.recorded() as made:
            jax.eval_shape(functools.partial(attention, implementation=implementation), x, x, x, index, index)
        return [(choice.implementation, choice.why) for choice in made]

    assert choices(x, "xla") == [("xla", "requested")]
    assert choices(x, None) == [("xla", "Pallas kernels need an NVIDIA GPU (Ampere or later), got cpu")]
    monkeypatch.setattr(jax, "devices", lambda: [Hopper()])
    for passed, chosen, why in (
        (True, "mosaic_gpu", "self-test on NVIDIA H200 passed: 3 cases"),
        (False, "xla", "self-test on NVIDIA H200 failed: 3 cases"),
        (None, "xla", "self-test on NVIDIA H200 unknown: 3 cases; run `vlcache doctor`"),
    ):
        monkeypatch.setattr(selftest, "_known", {"attention": SelfTestResult(passed, "3 cases")})
        assert choices(x, None) == [(chosen, why)]
        assert choices(x, "mosaic_gpu") == [("mosaic_gpu", "requested")]
    monkeypatch.setattr(selftest, "_known", {})
    assert choices(x, None) == [
        ("xla", "self-test on NVIDIA H200 unknown: the self-test has not run; run `vlcache doctor`")
    ]
    assert choices(wide, None) == [("xla", "mosaic_gpu multiplies bfloat16 and float16, got q in float32")]
    assert dispatch.is_hopper(Hopper())
    monkeypatch.setattr(Hopper, "compute_capability", "10.0")
    assert not dispatch.is_hopper(Hopper())


@pytest.mark.parametrize(("version", "refused"), [(12060, False), (12080, True), (12090, True), (13000, False)])
def test_toolchains_that_miscompile_masks_are_refused(version: int, refused: bool, monkeypatch) -> None:
    x, index = jax.ShapeDtypeStruct((4, 2, 64), jnp.bfloat16), jax.ShapeDtypeStruct((4,), jnp.int32)
    angle = jax.ShapeDtypeStruct((4, 1, 32), jnp.bfloat16)
    data = jax.ShapeDtypeStruct((1, 2, 4, 2, 64), jnp.bfloat16)
    versions = types.SimpleNamespace(cuda_runtime_get_version=lambda: version)
    monkeypatch.setattr("jax._src.lib.cuda_versions", versions)
    monkeypatch.setattr(jax, "devices", lambda: [Hopper()])
    monkeypatch.setattr(selftest, "_known", dict.fromkeys(("attention", "link"), SelfTestResult(True, "3 cases")))

    def choice(kernel, arguments, implementation):
        with dispatch.recorded() as made:  # a new function: what was traced before is not traced again
            jax.eval_shape(lambda *args: kernel(*args, implementation=implementation), *arguments)
        return made[0]

    for kernel, arguments in ((attention, (x, x, x, index, index)), (link, (x, x, ((data,),), index, angle, angle))):
        best = choice(kernel, arguments, None)
        # No assembler works for the interpreter.
        assert choice(kernel, arguments, "mosaic_gpu_interpreted").implementation == "mosaic_gpu_interpreted"
        if refused:
            assert best.implementation == "xla"
            assert "because ptxas 12.8 and 12.9 miscompile masks, got 12." in best.why
            with pytest.raises(NotImplementedError, match=r"ptxas 12.8 and 12.9 miscompile masks, got 12\.[89]"):
                choice(kernel, arguments, "mosaic_gpu")
        else:
            assert best.implementation == "mosaic_gpu"
            assert choice(kernel, arguments, "mosaic_gpu").implementation == "mosaic_gpu"


def test_too_few_threads_are_an_error_and_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPROC", "2")
    x, index = np.zeros((4, 2, 64), jnp.bfloat16), np.zeros(4, np.int32)
    with pytest.raises(NotImplementedError, match="set NPROC=16"):
        attention(x, x, x, index, index, implementation="mosaic_gpu_interpreted")


@pytest.fixture
def tuned(tmp_path, monkeypatch) -> Iterator[Callable[[list[dict[str, Any]]], None]]:
    """(rows) -> None: writes a table of fastest cuts, which is read from then on."""
    monkeypatch.setattr(mosaic_gpu, "TUNED", tmp_path / "tuned.json")

    def write(rows: list[dict[str, Any]]) -> None:
        (tmp_path / "tuned.json").write_text(json.dumps({"rows": rows}))
        mosaic_gpu._tuned.cache_clear()

    yield write
    mosaic_gpu._tuned.cache_clear()


ENTRY = {"N": 512, "H": 32, "K": 8, "D": 128, "splits registers": mosaic_gpu.SPLITS_REGISTERS, "ms": 1.0}


def test_the_table_of_fastest_settings_is_read(tuned) -> None:
    tuned([])
    usual = mosaic_gpu.default_config(512, 32, 8, 128)
    fastest = AttentionConfig(8, 64, 4, take_turns=False, programs=264)
    tuned([ENTRY | {"config": dataclasses.asdict(fastest)}, ENTRY | {"N": 64, "config": {"stages": 3}}])
    assert mosaic_gpu.default_config(512, 32, 8, 128) == fastest
    assert mosaic_gpu.default_config(300, 32, 8, 128) == fastest
    assert mosaic_gpu.default_config(100, 32, 8, 128) == usual  # far below it
    assert mosaic_gpu.default_config(64, 32, 8, 128) == AttentionConfig(stages=3)
    assert mosaic_gpu.default_config(513, 32, 8, 128) == usual  # beyond the table
    assert mosaic_gpu.default_config(512, 32, 8, 64) != fastest
    cut = mosaic_gpu.work_config(512, 1, 160, 32, 8, 128, decode=False)
    assert (cut.tile, cut.programs) == (8, 264)


@pytest.mark.parametrize("splits", [not mosaic_gpu.SPLITS_REGISTERS, None])
def test_settings_of_a_jax_that_uses_registers_otherwise_are_passed_over(tuned, splits) -> None:
    """Blocks of 128 slots spill where registers cannot be split."""
    tuned([])
    usual = mosaic_gpu.default_config(512, 32, 8, 128)
    entry = ENTRY | {"config": dataclasses.asdict(LARGE), "splits registers": splits}
    tuned([entry if splits is not None else {key: entry[key] for key in entry if key != "splits registers"}])
    assert mosaic_gpu.default_config(512, 32, 8, 128) == usual != LARGE
    tuned([entry, ENTRY | {"config": {"stages": 5}}])
    assert mosaic_gpu.default_config(512, 32, 8, 128) == AttentionConfig(stages=5)


@pytest.mark.parametrize("wrong", [{"block": 96}, {"block": 256}, {"tile": 24}, {"stages": 1}, {"programs": 1}])
def test_a_table_of_settings_that_cannot_be_is_refused(tuned, wrong) -> None:
    tuned([ENTRY | {"config": wrong}])
    with pytest.raises(ValueError, match="config must have a tile of 8 or 16, a block of 64 or 128, and 2 stages"):
        mosaic_gpu.default_config(512, 32, 8, 128)


def test_settings_that_do_not_fit_into_shared_memory_are_refused() -> None:
    assert AttentionConfig(stages=2).queries(128) == 2
    assert AttentionConfig(stages=3).queries(128) == 1
    assert AttentionConfig(tile=8, stages=3).queries(128) == 2
    x, index = np.zeros((4, 2, 128), jnp.bfloat16), np.zeros(4, np.int32)
    reason = "config must fit into 232448 bytes of shared memory at D = 128, got AttentionConfig"
    with pytest.raises(ValueError, match=reason):
        plain((x, x, x, index, index), config=AttentionConfig(block=128, stages=4))
