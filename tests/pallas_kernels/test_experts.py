"""The experts' products: the contract in XLA, the table of tiles, and the Mosaic GPU kernels in jax's interpreter."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import reset_gpu_interpret_mode_state

from vlcache_jax.pallas_kernels import dispatch, mix_experts
from vlcache_jax.pallas_kernels.cases import array
from vlcache_jax.pallas_kernels.checks import CHECKS
from vlcache_jax.pallas_kernels.experts_cases import CASES, GROUPS, REAL, ExpertsCase, groups, reference, routed
from vlcache_jax.pallas_kernels.float8_cases import EXPERTS
from vlcache_jax.pallas_kernels.grouped_matmul import mosaic_gpu
from vlcache_jax.pallas_kernels.grouped_matmul.tiles import BOX, ExpertTiles, make_tiles, tiles_of_row

not_a_number = pytest.mark.filterwarnings("ignore:invalid value encountered")  # by the interpreter's numpy
SLOW = "many rows"  # half a minute
in_small = [check for check in CHECKS["experts"] if not any(case.name == check.name for case in REAL)]


def first_quick(cases: Sequence[Any], mark: pytest.MarkDecorator) -> list[Any]:
    slow = [pytest.mark.thorough] if mark.name == "interpreted" else []
    return [cases[0], *(pytest.param(case, marks=[mark, *slow * (case.name == SLOW)]) for case in cases[1:])]


@pytest.mark.parametrize("case", first_quick(CASES, pytest.mark.slow), ids=lambda case: case.name)
def test_the_contract(case: ExpertsCase) -> None:
    """Experts that nobody has chosen, and rows and weights that are nobody's, are NaN."""
    args = case.inputs()
    found = jax.jit(functools.partial(mix_experts, first=case.first, implementation="xla"))(*args)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, reference(*args, first=case.first), atol=2e-5)


@pytest.mark.parametrize("case", [*CASES, *EXPERTS], ids=lambda case: f"{case.name}, {case.F}")
def test_cases_compute_what_they_say(case: ExpertsCase) -> None:
    own = np.asarray(case.inputs()[2]) - case.first
    is_own = (own >= 0) & (own < case.E)
    assert is_own.any() == (case.name != "nothing is needed")
    partly = "nothing is needed", "some rows are not needed", "some of the experts", "one row, some of the experts"
    assert is_own.all() == (case.name not in partly)


@pytest.mark.parametrize(
    ("make", "choices", "count", "length"),
    [
        (make_tiles, sum(GROUPS), len(GROUPS), 8),
        (make_tiles, 1300, 3, 16),
        (make_tiles, 8, 128, 8),
        (make_tiles, 1, 1, 8),
        (tiles_of_row, 8, 128, 8),
        (tiles_of_row, 1, 1, 16),
    ],
)
@pytest.mark.parametrize("needed", ["all", "some", "none"])
def test_the_table_of_tiles(
    make: Callable[..., ExpertTiles], choices: int, count: int, length: int, needed: str
) -> None:
    rng = np.random.default_rng(0)
    expert = rng.permutation(np.repeat(np.arange(6), GROUPS)) if count == 6 else rng.integers(0, count, choices)
    if make is tiles_of_row:  # which chooses an expert once
        expert = rng.permutation(count)[:choices]
    expert[rng.random(choices) < {"all": 0, "some": 0.3, "none": 1}[needed]] = count
    made = jax.jit(make, static_argnums=(1, 2))(array(expert, jnp.int32), count, length)
    tiles = jax.tree.map(np.asarray, made)
    sizes = np.bincount(expert, minlength=count + 1)[:count]
    assert tiles.used == (-(-sizes // (BOX * length))).sum()
    rows = len(tiles.source)
    owner = np.full(rows, -1)
    for e, first, octets in zip(*(x[: tiles.used[0]] for x in tiles[:3]), strict=True):
        row = first * BOX
        assert 0 < octets <= length
        assert row + length * BOX <= rows  # a tile reads whole rows
        assert (owner[row : row + octets * BOX] == -1).all()
        owner[row : row + octets * BOX] = e
    own = np.flatnonzero(expert < count)
    assert len(set(tiles.place[own])) == len(own)
    np.testing.assert_array_equal(owner[tiles.place[own]], expert[own])
    of_rows = own // (choices if make is tiles_of_row else 1)
    np.testing.assert_array_equal(tiles.source[tiles.place[own]], of_rows)
    assert (tiles.place[expert == count] >= rows).all()
    assert ((owner >= 0).sum() - sizes.sum()) < BOX * max(1, (sizes > 0).sum())


SHARDED = """
import jax
jax.config.update("jax_num_cpu_devices", 4)
import functools
import numpy as np
from jax.sharding import AxisType, PartitionSpec as P
from vlcache_jax.pallas_kernels import mix_experts
from vlcache_jax.pallas_kernels.experts_cases import ExpertsCase, reference, some

case = ExpertsCase("", 24, 3, 8, 16, 8, some)
args = case.inputs()

def part(x, weight, expert, gate_up, down):
    first = len(down) * jax.lax.axis_index("expert")
    return jax.lax.psum(mix_experts(x, weight, expert, gate_up, down, first=first, implementation="xla"), "expert")

mesh = jax.make_mesh((4,), ("expert",), axis_types=(AxisType.Auto,))
specs = P(), P(), P(), P("expert"), P("expert")
whole = jax.jit(jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False))
found = whole(*args)
assert len(found.sharding.device_set) == 4
np.testing.assert_allclose(found, reference(*args), atol=2e-5)
print("equal")
"""


@pytest.mark.slow
def test_experts_spread_over_devices() -> None:
    code = f"import sys; sys.path[:] = {sys.path!r}\n{SHARDED}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "equal\n", done.stderr


@pytest.mark.slow
@not_a_number
@pytest.mark.parametrize("check", first_quick(in_small, pytest.mark.interpreted), ids=lambda check: check.name)
def test_the_kernels(check) -> None:
    assert check.error("mosaic_gpu_interpreted") < 0.03


@not_a_number
@pytest.mark.interpreted
def test_parts_of_the_experts_add_up_to_the_whole() -> None:
    case = ExpertsCase("", 24, 3, 8, 64, 64, routed)
    x, weight, expert, gate_up, down = case.inputs("bfloat16")
    mix = functools.partial(mix_experts, implementation="mosaic_gpu_interpreted")
    whole = mix(x, weight, expert, gate_up, down)
    parts = [mix(x, weight, expert, gate_up[i : i + 4], down[i : i + 4], first=i) for i in (0, 4)]
    np.testing.assert_allclose(np.sum(parts, 0), whole, atol=1e-5)


@not_a_number
@pytest.mark.interpreted
def test_nan_reaches_exactly_the_rows_of_its_expert() -> None:
    case = ExpertsCase("", sum(GROUPS), 1, len(GROUPS), 64, 64, groups)
    x, weight, expert, gate_up, down = case.inputs("bfloat16")
    broken = np.array(gate_up)
    broken[3, 0, 0] = np.nan
    mix = functools.partial(mix_experts, implementation="mosaic_gpu_interpreted")
    found, want = (np.asarray(mix(x, weight, expert, stack, down)) for stack in (broken, gate_up))
    is_hit = np.asarray(expert)[:, 0] == 3
    assert is_hit.sum() == 9
    assert np.isnan(found[is_hit]).all()
    np.testing.assert_array_equal(found[~is_hit], want[~is_hit])


@not_a_number
@pytest.mark.interpreted
@pytest.mark.parametrize("forgotten", [1, 2])  # for what is loaded, and for room to load
def test_a_missing_wait_is_seen(forgotten: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wait, calls = mosaic_gpu.plgpu.barrier_wait, []

    def forgetful(barrier):
        calls.append(barrier)
        if len(calls) != forgotten:
            wait(barrier)

    monkeypatch.setattr(mosaic_gpu.plgpu, "barrier_wait", forgetful)
    args = ExpertsCase("", 9, 1, 2, 640, 64, routed).inputs("bfloat16")
    try:
        with pytest.raises(Exception, match="RACE DETECTED"):
            mix_experts(*args, implementation="mosaic_gpu_interpreted")
    finally:
        reset_gpu_interpret_mode_state()  # its documentation asks for this after an exception


def test_how_work_is_cut() -> None:
    def cut(rows: int, width: int, experts: int = 128) -> tuple[int, int]:
        config = mosaic_gpu.default_config(8 * rows, experts)
        return config.warpgroups, mosaic_gpu.columns_of(width, experts, 8 * rows, config.programs)

    assert cut(1, 768) == (1, 64)  # 96 items instead of 48
    assert cut(1, 2048) == (1, 64)
    assert cut(64, 768) == cut(64, 2048) == (1, 128)
    assert cut(64, 320) == (1, 64)  # no multiple of 128
    assert cut(1024, 768) == (1, 128)
    assert cut(8192, 768) == (2, 128)


def test_what_the_kernels_do_not_do() -> None:
    for dtype, width, hidden, message in (
        ("float32", 64, 64, "got x in float32"),
        ("bfloat16", 96, 64, "multiples of 64, got 96 and 64"),
        ("bfloat16", 64, 32, "multiples of 64, got 64 and 32"),
    ):
        args = [jnp.zeros(s, dtype) for s in ((4, width), (4, 2), (3, width, 2 * hidden), (3, hidden, width))]
        args.insert(2, jnp.zeros((4, 2), jnp.int32))
        with pytest.raises(NotImplementedError, match=message):
            mix_experts(*args, implementation="mosaic_gpu_interpreted")
        with dispatch.recorded() as made:
            jax.eval_shape(mix_experts, *args)
        assert [(choice.kernel, choice.implementation) for choice in made] == [("experts", "xla")]


@pytest.mark.parametrize(
    ("at", "shape", "dtype", "message"),
    [
        (0, (5, 9), "float32", r"down must be \[E, F, 9\]"),
        (1, (4, 2), "float32", r"weight must be \[5, 2\]"),
        (2, (5, 2), "int8", r"expert must be int32 \[5, k\], got int8"),
        (3, (3, 8, 12), "float32", r"gate_up must be \[3, 8, 8\] in float32, got \[3, 8, 12\]"),
        (4, (3, 4, 8), "bfloat16", "down must be .* in float32, got .* in bfloat16"),
    ],
)
def test_shapes_must_go_together(at: int, shape: tuple[int, ...], dtype: str, message: str) -> None:
    args = [np.zeros(s, np.float32) for s in ((5, 8), (5, 2), (5, 2), (3, 8, 8), (3, 4, 8))]
    args[2] = args[2].astype(np.int32)
    args[at] = np.zeros(shape, jnp.dtype(dtype))
    with pytest.raises(ValueError, match=message):
        mix_experts(*args)
