"""The portable kernels: interpreted against the references, their fragments and copies, and who runs them where."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import reset_gpu_interpret_mode_state
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests import emulation
from tests.helper import ATOL
from vlcache_jax.kernel_selftest import SelfTestResult
from vlcache_jax.kernel_selftest.gpu import SINCE_AMPERE
from vlcache_jax.pallas_kernels import (
    PAGE,
    attention,
    attention_statistics,
    chips,
    dispatch,
    float8_fragments,
    fragments,
    paged_attention,
    paged_cases,
    ring,
    work_config,
)
from vlcache_jax.pallas_kernels.attention import mosaic_gpu_mma
from vlcache_jax.pallas_kernels.cases import (
    KernelCase,
    all_empty,
    array,
    beyond,
    causal,
    packed,
    reference,
    relative_error,
    scattered,
    some_empty,
    windows,
)
from vlcache_jax.pallas_kernels.checks import CHECKS, PORTABLE, Check
from vlcache_jax.pallas_kernels.chips import RESERVED, Chip
from vlcache_jax.pallas_kernels.grouped_matmul import mosaic_gpu_mma as experts
from vlcache_jax.pallas_kernels.quantized_matmul import mosaic_gpu_mma as float8

pytestmark = pytest.mark.interpreted

INTERPRETED = "mosaic_gpu_mma_interpreted"
not_a_number = pytest.mark.filterwarnings("ignore:invalid value encountered")  # by the interpreter's numpy
QUICK = ("packed", "requests, 8/2 heads of 64", "two_levels, decoding, 3/3 heads of 64", "one row")

SLOW = pytest.mark.interpreted, pytest.mark.thorough


def portable_checks() -> list[Any]:
    """What a first contact checks. One of each kernel is quick, or several of attention."""
    found = []
    for kernel in PORTABLE:
        if kernel in ("float8_matmul", "float8_experts"):  # see `test_quantized_matmul.py`
            continue
        of_kernel = [check for check in CHECKS[kernel] if check.first]
        quick = [check for check in of_kernel if check.name in QUICK] or of_kernel[:1]
        found += [
            pytest.param(check, id=f"{kernel}: {check.name}", marks=() if check in quick else SLOW)
            for check in of_kernel
        ]
    return found


@pytest.mark.slow_for("paged_attention: requests", "attention: packed", "experts: one row")
@not_a_number
@pytest.mark.parametrize("check", portable_checks())
def test_interpreted(check: Check) -> None:
    check.error(INTERPRETED)


@pytest.mark.slow
@pytest.mark.parametrize(("places", "width"), [(2, 128), (3, 80)])
def test_rings_of_any_size(places: int, width: int) -> None:
    """Two places, where shared memory has no more, to four; windows, as towers see them."""
    case = KernelCase("", 70, 300, 2, 1, width, windows)
    args = case.inputs("bfloat16", poison=True)
    config = mosaic_gpu_mma.AttentionMmaConfig(places, 32, True, 3)
    races = dispatch.interpreter(dispatch.Choice("attention", "", INTERPRETED, ""))
    out = mosaic_gpu_mma.attention(*args, scale=width**-0.5, config=config, interpret=races)
    assert relative_error(np.asarray(out, np.float64), reference(*args, None)) < 0.04


COUNT, HEADS, KV_HEADS, WIDTH = 304, 6, 2, 16  # one shape for all cases, so that they compile once


@pytest.fixture
def emulated():
    with emulation.emulated():
        yield


@pytest.mark.slow
@pytest.mark.parametrize("case", paged_cases.CASES, ids=lambda case: case.__name__)
def test_emulated_in_float32(emulated, case: Any) -> None:
    """The kernel's own code, compiled for a CPU, to the rounding of float32."""
    rows = case(np.random.default_rng(0))
    q, k, v = (array(x, "float32") for x in paged_cases.arrays(rows, COUNT, HEADS, KV_HEADS, WIDTH, poison=True))
    k, v = (np.pad(pool, ((0, 60 * PAGE - len(pool)), (0, 0), (0, 0))) for pool in (k, v))
    spec = jax.ShapeDtypeStruct(q.shape, q.dtype)
    config = work_config(COUNT, 20, 40, spec, KV_HEADS, decode=False, implementation=INTERPRETED)
    out = paged_attention(q, k, v, rows.work(config), implementation=INTERPRETED)
    np.testing.assert_allclose(out, paged_cases.reference(rows, q, k, v), atol=2 * ATOL["float32"], rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("intervals", [causal, scattered, packed, windows, some_empty, all_empty, beyond])
def test_emulated_intervals_in_float32(emulated, intervals: Any) -> None:
    args = KernelCase("", 90, 300, 6, 2, 24, intervals).inputs(poison=True)
    out = attention(*args, implementation=INTERPRETED)
    np.testing.assert_allclose(out, reference(*args), atol=2 * ATOL["float32"], rtol=0)


@pytest.mark.thorough
def test_promises_of_reuse_hold_by_the_emulated_kernel() -> None:
    """P1-P7 of the algorithms' specification, as `tests/test_reuse.py` has them, to the rounding of float32."""
    environment = os.environ | {"VLCACHE_EMULATED": "1"}
    promises = " or ".join(f"test_p{i}" for i in range(1, 8))
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "tests/test_reuse.py", "-k", promises]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-3000:]
    assert " passed" in ended.stdout


def test_a_missing_wait_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above mean something only if the interpreter finds races."""
    monkeypatch.setattr(ring.plgpu, "barrier_wait", lambda barrier: None)
    try:
        with pytest.raises(Exception, match="RACE DETECTED"):
            attention(*KernelCase("", 8, 70, 2, 1, 64, causal).inputs("bfloat16"), implementation=INTERPRETED)
    finally:
        reset_gpu_interpret_mode_state()  # its documentation asks for this after an exception


# Fragments. What the interpreter does not know: who holds which number.


def held(layout: Any, shape: tuple[int, int]) -> np.ndarray:
    """By a layout of Mosaic GPU, of each warp, lane and register the first number that it holds, as row and column."""
    of_tiles = layout.tiling.tile_strides((shape[1], 1))
    registers = layout.registers_shape(shape)
    tiled = layout.tiling.tile_shape(shape)

    def offsets(dims: Any) -> list[int]:
        sizes = [range(d.times) if isinstance(d, plgpu.Replicated) else range(tiled[d]) for d in dims]
        steps = [0 if isinstance(d, plgpu.Replicated) else of_tiles[d] for d in dims]
        return [sum(i * step for i, step in zip(at, steps, strict=True)) for at in itertools.product(*sizes)]

    warps, lanes = offsets(layout.warp_dims), offsets(layout.lane_dims)
    own = [sum(i * step for i, step in zip(at, of_tiles, strict=True)) for at in np.ndindex(*registers)]
    linear = np.add.outer(np.add.outer(warps, lanes), own)
    return np.stack(np.unravel_index(linear, shape), -1)


def by_the_manual(operand: str, columns: int) -> np.ndarray:
    """The same by the PTX manual's figures of `mma.m16n8k16`, for four warps of 16 rows each."""
    found = np.zeros((4, 32, columns // 16 * 4, 2), int)
    for warp, lane, register in np.ndindex(found.shape[:3]):
        if operand == "a":  # a0 a1: row of the lane; a2 a3: 8 below; a4 to a7: the same 8 columns on
            tile, i = divmod(register, 4)
            row, column = lane // 4 + 8 * (i % 2), 16 * tile + lane % 4 * 2 + 8 * (i // 2)
        else:  # c0 c1: row of the lane; c2 c3: 8 below
            tile, i = divmod(register, 2)
            row, column = lane // 4 + 8 * i, 8 * tile + lane % 4 * 2
        found[warp, lane, register] = 16 * warp + row, column
    return found


@pytest.mark.parametrize("columns", [16, 64, 128])
def test_who_holds_what(columns: int) -> None:
    layouts = mgpu.MMALayouts(jnp.bfloat16)
    a, c = (by_the_manual(operand, columns) for operand in "ac")
    np.testing.assert_array_equal(held(layouts.lhs, (64, columns)), a)
    np.testing.assert_array_equal(held(layouts.acc, (64, columns)), c)
    # What addresses are made of: two rows, a column, and how far each register is from it.
    before = [(0, fragments.columns_before(i)) for i in range(columns // 4)]
    for registers in (a, c):
        np.testing.assert_array_equal(registers, registers[:, :, np.arange(columns // 4) % 2] + before)
    # Sums, register by register, are a left operand: a thread gives nothing to another one.
    names = np.arange(columns // 4).reshape(layouts.acc.registers_shape((64, columns)))
    order = fragments.left_registers(names, layouts.lhs.registers_shape((64, columns)))
    assert order.shape == layouts.lhs.registers_shape((64, columns))
    np.testing.assert_array_equal(c[:, :, order.ravel()], a)


def test_a_product_by_fragments() -> None:
    """64 x 16 by 16 x 8, each warp's threads with what they hold alone, adds up to the product."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((64, 16)), rng.standard_normal((16, 8))
    layout = mgpu.MMALayouts(jnp.bfloat16)
    of_a, of_c = held(layout.lhs, (64, 16)), held(layout.acc, (64, 8))
    of_b = held(layout.rhs, (16, 8))
    out = np.full((64, 8), np.nan)
    for warp in range(4):
        left, right = np.full((16, 16), np.nan), np.full((16, 8), np.nan)
        for lane in range(32):
            for row, column in of_a[warp, lane]:
                left[row - 16 * warp, column : column + 2] = a[row, column : column + 2]
            for row, column in of_b[warp, lane]:  # two below each other
                right[row : row + 2, column] = b[row : row + 2, column]
        product = left @ right
        for lane in range(32):
            for row, column in of_c[warp, lane]:
                out[row, column : column + 2] = product[row - 16 * warp, column : column + 2]
    np.testing.assert_allclose(out, a @ b, rtol=1e-12)


def test_weights_in_8_bits_meet_their_rows() -> None:
    """Numbers as threads load them, 16 of a row at once, are multiplied as operands: their product is that of all."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((64, 64)), rng.standard_normal((64, 8))
    layouts = mgpu.MMALayouts(jnp.bfloat16)
    of_a, of_b = (
        held(layout.to_mgpu(), x.shape) for layout, x in ((float8_fragments.LEFT, a), (float8_fragments.RIGHT, b))
    )
    as_a, as_b = held(layouts.lhs, a.shape), held(layouts.rhs, b.shape)
    out = np.full((64, 8), np.nan)
    for warp in range(4):
        left, right = np.full((64, 64), np.nan), np.full((64, 8), np.nan)
        for lane in range(32):
            for (row, column), (register, at) in zip(as_a[warp, lane], float8_fragments.left_pairs(), strict=True):
                own, first = of_a[warp, lane, register]
                assert own == row
                left[row, column : column + 2] = a[own, first + at : first + at + 2]
            for (row, column), (register, at) in zip(as_b[warp, lane], float8_fragments.right_pairs(), strict=True):
                first, own = of_b[warp, lane, register]
                assert own == column
                right[row : row + 2, column] = b[first + at : first + at + 2, own]
        rows = slice(16 * warp, 16 * warp + 16)
        out[rows] = left[rows] @ right
    np.testing.assert_allclose(out, a @ b, rtol=1e-12)


def test_8_bits_become_float16_bit_by_bit() -> None:
    """Every number there is, NaN too, four in a word."""
    kept = np.arange(256, dtype=np.uint8)
    even, odd = (part.view(np.float16) * np.float16(256) for part in float8_fragments.halves(kept.view(np.uint32)))
    whole = kept.view(jnp.float8_e4m3fn).astype(np.float16)
    np.testing.assert_array_equal(even, whole[::2])
    np.testing.assert_array_equal(odd, whole[1::2])
    assert np.isnan(odd[[63, 127]]).all()
    assert np.isfinite(np.delete(odd, [63, 127])).all()


def test_interpreted_products_are_summed_as_tensor_cores_do() -> None:
    a, b = (array(np.random.default_rng(i).standard_normal((64, 64)), jnp.bfloat16) for i in range(2))
    acc = array(np.ones((64, 64)), jnp.float32)
    found = fragments.multiply(acc, a, b, interpreted=True)
    np.testing.assert_allclose(found, 1 + np.asarray(a, np.float64) @ np.asarray(b, np.float64), atol=1e-5)


# The ring before Hopper, where one counts copies: the interpreter knows barriers alone.


class Counted:
    """Stands for `plgpu` and `pl`: who is waited for, and what is overwritten."""

    class OOBFillMode:
        PROMISE_IN_BOUNDS = "in bounds"

    def __init__(self) -> None:
        self.in_flight: list[Any] = []
        self.places: dict[int, Any] = {}

    def copy_gmem_to_smem(self, source: Any, target: int, oob_mode: Any) -> None:
        self.in_flight.append((target, source))

    def wait_gmem_to_smem(self, n: int) -> None:
        while len(self.in_flight) > n:
            target, source = self.in_flight.pop(0)
            self.places.setdefault(target, []).append(source)

    def when(self, condition: Any) -> Any:
        return lambda run: run() if condition else None


@pytest.mark.parametrize("places", [2, 3, 4])
@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_blocks_have_come_when_they_are_used(monkeypatch: Any, places: int, copies: int, count: int) -> None:
    counted = Counted()
    monkeypatch.setattr(ring, "plgpu", counted)
    monkeypatch.setattr(ring, "pl", counted)

    def fetch(number: int) -> Any:
        def run(place: Any, copy: Any) -> None:
            counted.places[int(place)] = []  # from now on it may hold anything
            for i in range(copies):
                copy((number, i), int(place))

        return run

    blocks = ring.Ring(places, copies, bulk=False)
    assert blocks.barriers() == []
    for _ in range(2):  # items, one after the other
        blocks.start(count, [fetch(number) for number in range(places - 1)])
        for number in range(count):
            place = int(blocks.step(number, count, fetch(number + places - 1)))
            assert counted.places[place] == [(number, i) for i in range(copies)]
        assert not counted.in_flight


# Who runs where.


@dataclasses.dataclass
class Device:
    compute_capability: str
    core_count: int = 108
    platform: str = "gpu"

    @property
    def device_kind(self) -> str:
        return f"GPU of {self.compute_capability}"


def test_every_architecture_has_room_for_two_programs() -> None:
    for capability in SINCE_AMPERE:
        chip = Chip(capability, 100)
        barriers = 1024 if chip.has_bulk_copies else 0
        for width in (64, 80, 96, 128):
            config = mosaic_gpu_mma.default_config(width, chip)
            assert 2 <= config.places <= 4
            assert 2 * (config.places * 64 * width * 2 + barriers + RESERVED) <= chip.shared_memory
            assert 2 * width % config.swizzle == 0
            assert config.programs == 200
        assert experts.default_config(chip).room // (2 * 64 * (64 + 128)) >= 2
        for rows, outputs, inputs, gated in (
            (1, 4096, 12288, False), (40, 64, 128, False), (4096, 24576, 4096, False), (64, 768, 2048, True)
        ):  # fmt: skip
            config = float8.default_config(rows, outputs, inputs, gated=gated, chip=chip)
            assert 2 <= config.places <= 4
            bytes_of_place = 128 * (2 * config.rows + 64 * config.parts)
            assert 2 * (config.places * bytes_of_place + barriers + RESERVED) <= chip.shared_memory
            blocks = inputs // 128
            assert (config.shares - 1) * -(-blocks // config.shares) < blocks  # none is empty
            assert config.parts == 2 or rows < 4096
        assert chip.has_bulk_copies is (float(capability) >= 9)


@pytest.fixture
def on(monkeypatch):
    """Puts a stand-in for a GPU in the place of the CPU, and results."""

    def put(capability: str, **passed: bool) -> Device:
        device = Device(capability)
        monkeypatch.setattr(jax, "devices", lambda *_: [device])
        monkeypatch.setattr(
            dispatch,
            "result_on",
            lambda name: SelfTestResult(passed.get(name), "3 cases" if passed.get(name) else "wrong"),
        )
        return device

    return put


def chosen(kernel: Any = None) -> dispatch.Choice:
    q = jax.ShapeDtypeStruct((64, 8, 128), jnp.bfloat16)
    with dispatch.recorded() as choices:
        if kernel is None:
            work_config(64, 4, 4, q, 2, decode=False)
        else:
            jax.eval_shape(kernel)
    [choice] = choices
    return choice


@pytest.mark.parametrize("capability", SINCE_AMPERE)
def test_nothing_unproven_runs(on, capability: str) -> None:
    device = on(capability)
    choice = chosen()
    assert choice.implementation == "xla"
    assert choice.why.startswith(f"self-test on {device.device_kind} unknown: wrong")
    on(capability, paged_attention_mma=False)
    assert chosen().implementation == "xla"
    on(capability, paged_attention_mma=True)
    choice = chosen()
    assert choice.implementation == "mosaic_gpu_mma"
    assert choice.why.startswith(f"self-test on {device.device_kind} passed: 3 cases")
    dispatch.check_device("mosaic_gpu_mma", device)


def test_on_hopper_it_is_the_second_choice(on) -> None:
    device = on("9.0", paged_attention=True, paged_attention_mma=True)
    assert chosen().implementation == "mosaic_gpu"
    on("9.0", paged_attention=False, paged_attention_mma=True)
    choice = chosen()
    assert choice.implementation == "mosaic_gpu_mma"
    assert (
        choice.why
        == f"self-test on {device.device_kind} passed: 3 cases; self-test on {device.device_kind} failed: wrong"
    )


@pytest.mark.parametrize("capability", ["7.5", "13.0"])
def test_other_gpus_run_xla(on, capability: str) -> None:
    device = on(capability, paged_attention=True, paged_attention_mma=True)
    assert chosen() == dispatch.Choice(
        "paged_attention",
        "q bfloat16 [64, 8, 128]",
        "xla",
        f"Pallas kernels need an NVIDIA GPU (Ampere or later), got {device.device_kind}",
    )
    with pytest.raises(NotImplementedError, match=r"needs an NVIDIA GPU \(Ampere or later\), got GPU of"):
        dispatch.check_device("mosaic_gpu_mma", device)


def test_statistics_have_no_portable_form(on) -> None:
    q, k = (jnp.zeros((n, 2, 64), jnp.bfloat16) for n in (8, 128))
    table, place = jnp.zeros(1, jnp.int32), jnp.zeros(8, jnp.int32)

    def observe(**options: Any) -> Any:
        return attention_statistics(q, k, table, place, jnp.float32(0.1), **options)

    with pytest.raises(NotImplementedError, match="mosaic_gpu_mma has no kernel of statistics"):
        observe(implementation="mosaic_gpu_mma")
    on("8.0")
    assert chosen(observe).why == "mosaic_gpu_mma has no kernel of statistics"


def test_cases_that_it_does_not_do() -> None:
    for shape, dtype, why in (
        ((64, 8, 128), jnp.float32, "mosaic_gpu_mma multiplies bfloat16 and float16, got q in float32"),
        ((64, 8, 160), jnp.bfloat16, "mosaic_gpu_mma supports head widths up to 128, got 160"),
    ):
        with pytest.raises(NotImplementedError, match=why):
            work_config(64, 4, 4, jax.ShapeDtypeStruct(shape, dtype), 2, decode=False, implementation=INTERPRETED)


def test_work_of_the_kernel_for_hopper_is_refused() -> None:
    q = array(np.zeros((64, 4, 64)), jnp.bfloat16)
    config = work_config(64, 2, 4, q, 2, decode=False, implementation="mosaic_gpu_interpreted")
    work = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), config.abstract())
    with pytest.raises(ValueError, match="work must be made for q with 64 rows and 4 heads and k with 2 heads"):
        mosaic_gpu_mma.paged_attention(q, q[:, :2], q[:, :2], work, scale=1.0)


def test_a_device_that_is_none_stands_for_hopper() -> None:
    assert chips.chip_at_hand() == chips.HOPPER
    with chips.compiling_for(Chip("8.9", 58)):
        assert chips.chip_at_hand().multiprocessors == 58
    assert set(SINCE_AMPERE) == set(chips._SHARED_MEMORY)


@pytest.mark.slow
def test_packed_rows(monkeypatch) -> None:
    """Rows whose intervals begin anywhere, which towers have where images are packed."""
    args = KernelCase("", 40, 300, 4, 2, 72, packed).inputs("float16")
    out = attention(*args, implementation=INTERPRETED)
    assert relative_error(np.asarray(out, np.float64), reference(*args, None)) < 0.01
