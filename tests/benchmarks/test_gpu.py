"""The command for a day with a GPU, rehearsed on the CPU."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from vlcache_jax.benchmarks import gpu
from vlcache_jax.pallas_kernels.shapes import ATTENTION

SHAPES = {shape.name: shape for shape in ATTENTION["Qwen3-VL-8B"]}


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # by the interpreter: NaN in K
@pytest.mark.parametrize(
    "sections",
    [
        pytest.param(("check", "ceiling"), marks=pytest.mark.interpreted),
        pytest.param(("ttft", "decode"), marks=pytest.mark.ladder),
    ],
)
def test_rehearsal(tmp_path, sections, monkeypatch):
    plan = gpu.Plan(rehearse=True, out=tmp_path)
    rows = gpu.run(plan, minutes=9, only=sections)
    assert {row["case"].split(":")[0] for row in rows} == set(sections)
    assert not [row for row in rows if row["result"].startswith(("failed", "not measured"))]
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert content["identity"]["rehearsed"]
    assert content["head"]["versions"]["jax"]
    assert set(content["cases"]) == {row["case"] for row in rows}
    # A second run has nothing left to do.
    for name in ("_check_attention", "_check_corner", "_matrix_rate", "_ttft", "_decode", "_in_process"):
        monkeypatch.setattr(gpu, name, lambda *args: pytest.fail("it is done"))
    assert gpu.run(plan, minutes=0, only=sections) == rows


def test_tuning_writes_the_table_that_the_kernel_reads(tmp_path, monkeypatch):
    from vlcache_jax.pallas_kernels.attention import mosaic_gpu

    def took(plan, shape, implementation, config):
        if config.stages == 3:
            raise ValueError("too much shared memory")
        return {"ms": 1.0 + config.take_turns}

    usual = mosaic_gpu.default_config(2048, 32, 8, 128)
    monkeypatch.setattr(gpu, "_time_attention", took)
    monkeypatch.setattr(gpu, "SHAPES", tuple(s for s in SHAPES.values() if s.N in (64, 2048)))
    rows = gpu.run(gpu.Plan(rehearse=False, out=tmp_path), minutes=9, only=("tune",))
    # Decoding of 64 looks alike, with one prefix or apart; its usual way is three stages here.
    assert [row["result"].split()[0] for row in rows] == ["N", "failed:", "N"]
    monkeypatch.setattr(mosaic_gpu, "TUNED", tmp_path / "tuned.json")
    mosaic_gpu._tuned.cache_clear()
    try:
        found = mosaic_gpu.default_config(2048, 32, 8, 128)
        assert found == dataclasses.replace(usual, take_turns=False)
    finally:
        mosaic_gpu._tuned.cache_clear()


def test_a_wrong_kernel_is_not_timed_and_nothing_stops_the_rest(tmp_path, monkeypatch):
    def section(*cases):
        return lambda plan: iter(cases)

    def fail():
        raise ValueError("attention: error 3")

    monkeypatch.setattr(gpu, "check", section(("a", fail), ("b", lambda: {"error": 0.0})))
    monkeypatch.setattr(gpu, "speed", section(("a", lambda: {"ms": 1.0})))
    plan = gpu.Plan(rehearse=True, out=tmp_path)
    rows = gpu.run(plan, minutes=9, only=("check", "speed"))
    assert [row["result"] for row in rows] == [
        "failed: ValueError: attention: error 3",
        "error 0",
        "not measured: a kernel is wrong",
    ]
    monkeypatch.setattr(gpu, "check", section(("a", lambda: {"error": 0.0})))
    assert gpu.run(plan, minutes=9, only=("check", "speed"))[-1] == {"case": "speed: a", "result": "ms 1"}
    monkeypatch.setattr(gpu, "speed", section(("c", lambda: {"ms": 1.0})))
    assert gpu.run(plan, minutes=0, only=("speed",))[-1]["result"] == "not measured: out of time"


@pytest.mark.ladder
def test_lost_slots_are_found(tmp_path, monkeypatch):
    """Results of long intervals are small, and so are such faults."""
    right, shape = gpu.paged_attention, SHAPES["decode 1 x 20480"].in_small()

    def lossy(q, k, v, work, **options):
        return right(q, k, v, work, end=work.parts().end - 16, **options)

    monkeypatch.setattr(gpu.Plan, "shapes", lambda plan: (shape,))
    monkeypatch.setattr(gpu.Plan, "implementation", "xla")
    assert gpu.run(gpu.Plan(rehearse=True, out=tmp_path / "a"), 9, ("check",))[0]["result"].startswith("error")
    monkeypatch.setattr(gpu, "paged_attention", lossy)
    rows = gpu.run(gpu.Plan(rehearse=True, out=tmp_path / "b"), 9, ("check",))
    assert rows[0]["result"].startswith("failed: ValueError: decode 1")


def test_a_folder_belongs_to_one_chip_and_state(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "ceiling", lambda plan: iter([("a", lambda: {"ms": 1.0})]))
    gpu.run(gpu.Plan(rehearse=True, out=tmp_path), 9, ("ceiling",))
    with pytest.raises(ValueError, match=r"out must have no results of .*'rehearsed': True"):
        gpu.run(gpu.Plan(rehearse=False, out=tmp_path), 9, ("ceiling",))


def test_a_case_that_was_killed_comes_last_the_next_time(tmp_path, monkeypatch):
    order = []

    def case(name):
        def measure():
            order.append(name)
            if name == "long" and len(order) == 1:
                raise KeyboardInterrupt
            return {"ms": 1.0}

        return name, measure

    monkeypatch.setattr(gpu, "ceiling", lambda plan: iter([case("long"), case("short")]))
    plan = gpu.Plan(rehearse=True, out=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        gpu.run(plan, 9, ("ceiling",))
    gpu.run(plan, 9, ("ceiling",))
    assert order == ["long", "short", "long"]


def test_without_a_hopper_gpu_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["gpu", "--out", str(tmp_path)])
    with pytest.raises(NotImplementedError, match="needs a Hopper GPU, got cpu"):
        gpu.main()


def test_every_turn_reads_other_pages(tmp_path, monkeypatch):
    """And finds the same there."""
    used = []

    def two_turns(step, carry, *pools, **options):
        q, count, lists = carry
        used.extend(lists)
        first, count, lists = step(carry, *pools)
        again, *_ = step((q, count, lists), *pools)
        assert (first == again).all()
        return 1.0

    shape = SHAPES["decode 64 over one prefix of 16384"].in_small()
    monkeypatch.setattr(gpu, "seconds", two_turns)
    gpu._time_attention(gpu.Plan(rehearse=True, out=tmp_path), shape, "xla")
    place, _ = shape.work("xla").config.places["tables"]
    first, again = (set(np.asarray(lists[place]).tolist()) for lists in used)
    assert not first & again
