"""The Mosaic GPU kernels in jax's interpreter, which also looks for data races; test_compile.py compiles them."""

from __future__ import annotations

import dataclasses
import functools
import json
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import reset_gpu_interpret_mode_state

from tests.pallas_kernels.attention_cases import (
    Case,
    all_empty,
    beyond,
    causal,
    decode,
    packed,
    reference,
    scattered,
    some_empty,
    whole,
    windows,
)
from vlcache_jax.benchmarks.shapes import ATTENTION, AttentionShape
from vlcache_jax.pallas_kernels import attention, carry_flaws, dispatch, link
from vlcache_jax.pallas_kernels.attention import mosaic_gpu
from vlcache_jax.pallas_kernels.attention.mosaic_gpu import Config
from vlcache_jax.pallas_kernels.link import xla as xla_link

ATOL = 2e-2  # weights and results are rounded to bfloat16
RACES = dispatch.interpreter(dispatch.Choice("attention", "", "mosaic_gpu_interpreted", ""))
not_a_number = pytest.mark.filterwarnings("ignore:invalid value encountered")  # by the interpreter's numpy
# Every class once, and of the family with seven query heads a group those that differ most.
SHAPES = [*ATTENTION["Qwen3-VL-8B"], *(s for s in ATTENTION["Qwen2.5-VL-7B"] if s.N in (160, 512) or s.H == s.K)]


def interpreted(args, *, scale=None, config=None):
    run = functools.partial(
        mosaic_gpu.attention, scale=scale or args[0].shape[-1] ** -0.5, config=config, interpret=RACES
    )
    return np.asarray(jax.jit(run)(*args), np.float32)


def assert_close(out, args, scale=None):
    np.testing.assert_allclose(out, reference(*args, scale), atol=ATOL, rtol=0)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.name}, {s.H}x{s.D}")
def test_real_shapes_in_small(shape: AttentionShape) -> None:
    args = shape.in_small().arrays()
    assert_close(np.asarray(attention(*args, implementation="mosaic_gpu_interpreted"), np.float32), args)


@pytest.mark.parametrize(
    ("case", "config"),
    [
        (Case("causal", 45, 300, 6, 2, 64, causal), Config(2, 128, 2, 1)),
        (Case("no turns", 45, 300, 4, 1, 64, causal), Config(2, 64, 3, 1, take_turns=False)),
        (Case("scattered, split", 33, 500, 3, 1, 64, scattered), Config(2, 64, 2, 3)),
        (Case("packed, four stages", 40, 300, 5, 1, 128, packed), Config(1, 64, 4, 1)),
        (Case("more splits than blocks", 7, 100, 8, 1, 64, causal), Config(1, 64, 2, 5)),
        (Case("windows", 70, 70, 2, 2, 80, windows), Config(1, 64, 2, 1)),
        (Case("some empty", 30, 200, 4, 1, 64, some_empty), Config(1, 64, 2, 2)),
        (Case("all empty", 9, 100, 2, 1, 64, all_empty), Config(1, 64, 2, 2)),
        (Case("beyond the pool", 20, 150, 4, 2, 24, beyond), Config(1, 64, 2, 1)),
        (Case("requests apart", 12, 2600, 8, 1, 64, decode), Config(1, 128, 2, 2)),
        (Case("one row", 1, 300, 2, 1, 64, whole), Config(1, 128, 2, 1)),
        (Case("one slot", 3, 1, 3, 3, 24, whole), Config(1, 64, 2, 1)),
        (Case("scale", 10, 90, 4, 1, 64, causal, scale=0.07), Config(1, 64, 2, 1)),
    ],
    ids=lambda x: x.name if isinstance(x, Case) else None,
)
def test_ways_to_cut(case: Case, config: Config) -> None:
    args = case.inputs("bfloat16")
    assert_close(interpreted(args, scale=case.scale, config=config), args, case.scale)


@not_a_number
@pytest.mark.parametrize("splits", [1, 2])
def test_the_rest_of_the_pool_may_hold_anything(splits: int) -> None:
    case, config = Case("", 20, 400, 4, 1, 64, packed), Config(1, 64, 2, splits)
    clean, poisoned = (interpreted(case.inputs("bfloat16", poison=poison), config=config) for poison in (False, True))
    assert np.isfinite(clean).all()
    np.testing.assert_array_equal(clean, poisoned)


@not_a_number
@pytest.mark.parametrize("splits", [1, 2])
def test_nan_reaches_exactly_the_rows_that_see_it(splits: int) -> None:
    config = Config(1, 64, 2, splits)
    q, k, v, start, end = Case("", 32, 160, 2, 1, 64, whole).inputs("bfloat16")
    start, end = start.at[3].set(0), (128 + jnp.arange(32, dtype=jnp.int32)).at[3].set(0)  # row 3 is empty
    want = interpreted((q, k, v, start, end), config=config)
    sees = np.asarray(end) > 140
    # In slot 140 only some rows see it; slot 70 is seen by all but the empty one.
    for slot, rows in ((140, sees), (70, np.asarray(end) > 70)):
        for broken in ((k.at[slot].set(jnp.nan), v), carry_flaws(k, v.at[slot, 0, 3].set(jnp.inf))):
            out = interpreted((q, *broken, start, end), config=config)
            np.testing.assert_array_equal(out[~rows], want[~rows])
            assert not np.isfinite(out[rows]).any()


def test_rows_in_any_order() -> None:
    q, k, v, start, end = Case("", 40, 500, 4, 1, 64, scattered).inputs("bfloat16")
    order = np.random.default_rng(0).permutation(40)
    out = interpreted((q[order], k, v, start[order], end[order]))
    np.testing.assert_allclose(out, reference(q, k, v, start, end)[order], atol=ATOL, rtol=0)


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
            interpreted(Case("", 8, 70, 2, 1, 64, causal).inputs("bfloat16"))
    finally:
        reset_gpu_interpret_mode_state()  # its documentation asks for this after an exception


def visited(start, end, group, config):
    """Blocks of each tile, as the kernel walks over them."""
    bounds, runs = mosaic_gpu._visits(jnp.asarray(start, jnp.int32), jnp.asarray(end, jnp.int32), group, config)
    tiles = []
    for (count, blocks, _, _), of_tile in zip(np.asarray(bounds), np.asarray(runs), strict=True):
        walk = [block for begin, stop in of_tile[:count] for block in range(begin, stop)]
        assert len(walk) == blocks
        tiles.append(walk)
    return tiles


@pytest.mark.parametrize("group", [1, 3, 4, 7, 8])
@pytest.mark.parametrize("intervals", [causal, scattered, packed, windows, decode, some_empty, all_empty])
def test_tiles_visit_every_block_that_their_rows_see(group: int, intervals) -> None:
    config = Config(warpgroups=1, block=64)
    start, end = intervals(np.random.default_rng(0), 70, 900)
    start, end = (np.clip(x, 0, 900) for x in (start, end))
    for tile, walk in enumerate(visited(start, end, group, config)):
        assert len(set(walk)) == len(walk)
        rows = sorted({box // group * 8 + i for box in range(8 * tile, 8 * tile + 8) for i in range(8)})
        seen = {s // 64 for row in rows if row < 70 for s in range(start[row], end[row])}
        assert seen <= set(walk)
        assert not walk or (min(walk) in seen and max(walk) in seen)


def test_slots_that_nobody_sees_are_not_loaded() -> None:
    start = np.arange(16) * 1000
    [walk] = visited(start, start + 100, 4, Config(warpgroups=1, block=64))
    assert set(walk) == {s // 64 for a in start for s in range(a, a + 100)}
    # In another order they are, as in the middle of a prompt's rows.
    [walk] = visited(start[::-1], start[::-1] + 100, 4, Config(warpgroups=1, block=64))
    assert walk == list(range(15_100 // 64 + 1))


@not_a_number
@pytest.mark.parametrize(("heads", "width"), [(8, 128), (4, 64), (2, 64), (3, 128)])
@pytest.mark.parametrize("tokens", [5, 16])
def test_link(heads: int, width: int, tokens: int) -> None:
    rng = np.random.default_rng(heads)
    slots = 40
    pool = [jnp.asarray(rng.normal(size=(slots, heads, width)), jnp.bfloat16) for _ in "kv"]
    stored = [jnp.asarray(rng.normal(size=(tokens, heads, width)), jnp.bfloat16) for _ in "kv"]
    stored[0] = stored[0].at[0, 0, 3].set(jnp.nan)
    stored[1] = stored[1].at[2, 1, 5].set(jnp.inf).at[3, 0, width - 1].set(jnp.nan)
    slot = jnp.asarray(rng.permutation(slots)[:tokens], jnp.int32).at[jnp.array([1, 4])].set(slots + 7)
    angle = rng.uniform(0, 6, (tokens, 1, width // 2))
    args = *pool, *stored, slot, jnp.asarray(np.cos(angle), jnp.bfloat16), jnp.asarray(np.sin(angle), jnp.bfloat16)
    linked = jax.jit(functools.partial(link, implementation="mosaic_gpu_interpreted"))(*args)
    wide = (x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in args)
    k, v = (np.asarray(x, np.float32) for x in linked)
    for ours, want in zip((k, v), xla_link.link(*wide), strict=True):
        np.testing.assert_array_equal(ours, want.astype(jnp.bfloat16).astype(jnp.float32))
    assert np.isfinite(v).all()
    flawed = {(int(slot[token]), head) for token, head in ((0, 0), (2, 1), (3, 0))}
    assert {(s, h) for s, h, _ in np.argwhere(np.isnan(k)).tolist()} == flawed


def test_what_the_kernels_do_not_do() -> None:
    index = jnp.zeros(4, jnp.int32)
    for dtype, width, message in (("float32", 64, "got q in float32"), ("bfloat16", 256, "widths up to 128, got 256")):
        x = jnp.zeros((4, 2, width), dtype)
        with pytest.raises(NotImplementedError, match=message):
            attention(x, x, x, index, index, implementation="mosaic_gpu_interpreted")
    many = jnp.zeros((4, 40, 64), jnp.bfloat16)
    angle = jnp.zeros((4, 1, 32), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="up to 32 heads, got 40"):
        link(many, many, many, many, index, angle, angle, implementation="mosaic_gpu_interpreted")
    with pytest.raises(NotImplementedError, match="needs a Hopper GPU, got cpu"):
        attention(*[jnp.zeros((4, 2, 64), jnp.bfloat16)] * 3, index, index, implementation="mosaic_gpu")
    for dtype, width, message in (("float32", 64, "k_pool in float32"), ("bfloat16", 32, "64 and 128, got 32")):
        x, angle = jnp.zeros((4, 2, width), dtype), jnp.zeros((4, 1, width // 2), dtype)
        with pytest.raises(NotImplementedError, match=message):
            link(x, x, x, x, index, angle, angle, implementation="mosaic_gpu_interpreted")


class Hopper:
    platform, device_kind, compute_capability = "gpu", "NVIDIA H200", "9.0"


def test_the_choice_is_recorded_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    x, index = jax.ShapeDtypeStruct((4, 2, 64), jnp.bfloat16), jax.ShapeDtypeStruct((4,), jnp.int32)
    wide = jax.ShapeDtypeStruct((4, 2, 64), jnp.float32)

    def choices(x, implementation):
        with dispatch.recorded() as made:
            jax.eval_shape(functools.partial(attention, implementation=implementation), x, x, x, index, index)
        return [(choice.implementation, choice.why) for choice in made]

    assert choices(x, "xla") == [("xla", "asked for")]
    assert choices(x, None) == [("xla", "no Hopper GPU, but cpu")]
    monkeypatch.setattr(jax, "devices", lambda: [Hopper()])
    assert choices(x, None) == [("mosaic_gpu", "NVIDIA H200 is a Hopper GPU")]
    assert choices(wide, None) == [("xla", "mosaic_gpu multiplies bfloat16 and float16, got q in float32")]
    assert dispatch.is_hopper(Hopper())
    monkeypatch.setattr(Hopper, "compute_capability", "10.0")
    assert not dispatch.is_hopper(Hopper())


@pytest.mark.parametrize(("version", "refused"), [(12060, False), (12080, True), (12090, True), (13000, False)])
def test_toolchains_that_miscompile_masks_are_refused(version: int, refused: bool, monkeypatch) -> None:
    x, index = jax.ShapeDtypeStruct((4, 2, 64), jnp.bfloat16), jax.ShapeDtypeStruct((4,), jnp.int32)
    angle = jax.ShapeDtypeStruct((4, 1, 32), jnp.bfloat16)
    versions = types.SimpleNamespace(cuda_runtime_get_version=lambda: version)
    monkeypatch.setattr("jax._src.lib.cuda_versions", versions)
    monkeypatch.setattr(jax, "devices", lambda: [Hopper()])

    def choice(kernel, arguments, implementation):
        with dispatch.recorded() as made:  # a new function: what was traced before is not traced again
            jax.eval_shape(lambda *args: kernel(*args, implementation=implementation), *arguments)
        return made[0]

    for kernel, arguments in ((attention, (x, x, x, index, index)), (link, (x, x, x, x, index, angle, angle))):
        best = choice(kernel, arguments, None)
        # No assembler works for the interpreter.
        assert choice(kernel, arguments, "mosaic_gpu_interpreted").implementation == "mosaic_gpu_interpreted"
        if refused:
            assert best.implementation == "xla"
            assert "the ptxas of those miscompiles masks, got 12." in best.why
            with pytest.raises(NotImplementedError, match=r"the ptxas of those miscompiles masks, got 12\.[89]"):
                choice(kernel, arguments, "mosaic_gpu")
        else:
            assert best.implementation == "mosaic_gpu"
            assert choice(kernel, arguments, "mosaic_gpu").implementation == "mosaic_gpu"


def test_too_few_threads_are_an_error_and_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPROC", "2")
    x, index = jnp.zeros((4, 2, 64), jnp.bfloat16), jnp.zeros(4, jnp.int32)
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


ENTRY = {"N": 512, "H": 32, "K": 8, "D": 128, "ms": 1.0, "default ms": 2.0}


def test_the_table_of_fastest_cuts_is_read(tuned) -> None:
    tuned([])
    usual = mosaic_gpu.default_config(512, 20480, 32, 8, 128)
    fastest = Config(1, 64, 4, 7, take_turns=False)
    tuned([ENTRY | {"config": dataclasses.asdict(fastest)}, ENTRY | {"N": 64, "config": {"splits": 3}}])
    assert mosaic_gpu.default_config(512, 20480, 32, 8, 128) == fastest
    assert mosaic_gpu.default_config(300, 20480, 32, 8, 128) == fastest
    assert mosaic_gpu.default_config(100, 20480, 32, 8, 128).block == usual.block  # far below it
    assert mosaic_gpu.default_config(300, 512, 32, 8, 128) == dataclasses.replace(fastest, splits=2)
    assert mosaic_gpu.default_config(64, 20480, 32, 8, 128) == Config(splits=3)
    assert mosaic_gpu.default_config(513, 20480, 32, 8, 128).block == usual.block  # beyond the table
    assert mosaic_gpu.default_config(512, 20480, 32, 8, 64) != fastest


@pytest.mark.parametrize("wrong", [{"block": 96}, {"block": 0}, {"warpgroups": 3}, {"stages": 0}, {"splits": 0}])
def test_a_table_of_cuts_that_cannot_be_is_refused(tuned, wrong) -> None:
    tuned([ENTRY | {"config": wrong}])
    with pytest.raises(ValueError, match="config must have 1 or 2 warpgroups"):
        mosaic_gpu.default_config(512, 20480, 32, 8, 128)
