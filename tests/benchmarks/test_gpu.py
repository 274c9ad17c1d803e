"""The command for a day with a GPU, rehearsed on the CPU."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import time

import numpy as np
import pytest

from research.thunks import sequence
from vlcache_jax.benchmarks.gpu import GpuCase, GpuPlan, run, running
from vlcache_jax.benchmarks.gpu import plan as plans
from vlcache_jax.benchmarks.gpu.tracing import _occupation, graphs
from vlcache_jax.benchmarks.gpu.workers import GpuWorker
from vlcache_jax.kernel_selftest.gpu import Gpu
from vlcache_jax.pallas_kernels.shapes import ATTENTION

SHAPES = {shape.name: shape for shape in ATTENTION["Qwen3-VL-8B"]}


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # by the interpreter: NaN in K
@pytest.mark.parametrize(
    ("sections", "portable"),
    [
        pytest.param(("check", "ceiling"), False, marks=pytest.mark.interpreted),
        pytest.param(("check", "ceiling"), True, marks=pytest.mark.thorough),
        pytest.param(("answers", "ttft", "decode"), False, marks=pytest.mark.thorough),
    ],
)
def test_rehearsal(tmp_path, sections, portable, monkeypatch):
    plan = GpuPlan(rehearse=True, out=tmp_path, portable=portable)
    rows = run(plan, minutes=9, only=sections)
    assert {row["case"].split(":")[0] for row in rows} == set(sections)
    assert not [row for row in rows if row["result"].startswith(("failed", "not measured"))]
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert content["identity"]["rehearsed"]
    assert content["head"]["versions"]["jax"]
    assert set(content["cases"]) == {row["case"] for row in rows}
    # A second run has nothing left to do.
    monkeypatch.setattr(GpuWorker, "run", lambda *_: pytest.fail("it is done"))
    assert run(plan, minutes=0, only=sections) == rows


@pytest.mark.parametrize(
    ("capability", "forms"),
    [("9.0", ["mosaic_gpu", "mosaic_gpu_mma"]), ("8.9", ["mosaic_gpu_mma"] * 2), ("7.5", []), (None, [])],
)
def test_each_gpu_has_its_form_of_the_kernels(tmp_path, monkeypatch, capability, forms):
    chip = None if capability is None else Gpu("a GPU", capability, "580", "")
    monkeypatch.setattr(running, "find_chip", lambda: chip)
    found = []
    monkeypatch.setattr(running, "run", lambda plan, *_: found.append(plan) or [{"case": "", "result": ""}])
    for options in ([], ["--portable"]):
        monkeypatch.setattr("sys.argv", ["gpu", "--out", str(tmp_path), *options])
        if forms:
            running.main()
        else:
            with pytest.raises(RuntimeError, match=r"this needs an? .*GPU.*, found .*; --rehearse runs small cases"):
                running.main()
    if forms:
        assert [plan.implementation for plan in found] == forms
        checked = {kernel for case in running.sections()["check"].cases(found[-1]) for kernel in case.kernels}
        assert "float8_experts" in checked
        assert "statistics" not in checked
        assert not list(running.sections()["tune"].cases(found[-1]))


def test_tuning_writes_the_table_that_the_kernel_reads(tmp_path, monkeypatch):
    from vlcache_jax.benchmarks.gpu import tuning
    from vlcache_jax.pallas_kernels.attention import mosaic_gpu

    def took(plan, shape, implementation, config):
        if config.stages == 3:
            raise ValueError("too much shared memory")
        return {"ms": 1.0 + config.take_turns}

    usual = mosaic_gpu.default_config(2048, 32, 8, 128)
    monkeypatch.setattr(tuning, "time_attention", took)
    monkeypatch.setattr(plans, "SHAPES", tuple(s for s in SHAPES.values() if s.N in (64, 2048)))
    cases = list(tuning.tune(GpuPlan(rehearse=False, out=tmp_path)))
    assert [case.name.split()[:2] for case in cases] == [["N", "64,"], ["N", "64,"], ["N", "2048,"]]
    # Decoding of 64 looks alike, with one prefix or apart; its usual way is three stages here.
    with pytest.raises(ValueError, match="too much shared memory"):
        cases[1].measure()
    results = running.GpuResults(GpuPlan(rehearse=True, out=tmp_path))
    for case in (cases[0], cases[2]):
        results.keep(f"tune: {case.name}", row=case.measure())
    results.write_tuned()
    monkeypatch.setattr(mosaic_gpu, "TUNED", tmp_path / "tuned.json")
    mosaic_gpu._tuned.cache_clear()
    try:
        found = mosaic_gpu.default_config(2048, 32, 8, 128)
        assert found == dataclasses.replace(usual, take_turns=False)
    finally:
        mosaic_gpu._tuned.cache_clear()


def test_a_wrong_kernel_is_not_timed_and_nothing_stops_the_rest(tmp_path, monkeypatch):
    outcomes = {"a": "attention: error 3", "b": "", "c": ""}

    class Here(GpuWorker):
        def run(self, name, limit):
            if outcomes[name]:
                raise RuntimeError(outcomes[name])
            return {"error": 0.0}

    checks = [GpuCase("a", dict, ("attention",)), GpuCase("b", dict, ("link",))]
    speeds = [GpuCase("b", dict, ("link",)), GpuCase("a", dict, ("attention",)), GpuCase("c", dict)]
    cases = {"check": running.Section(lambda _: checks, 9, together=2), "speed": running.Section(lambda _: speeds, 9)}
    monkeypatch.setattr(running, "GpuWorker", Here)
    monkeypatch.setattr(running, "sections", lambda: cases)
    plan = GpuPlan(rehearse=True, out=tmp_path)

    def results():
        return [row["result"].split("  case")[0] for row in run(plan, minutes=9, only=("check", "speed"))]

    wrong = "not measured: attention is wrong"
    assert results() == ["failed: attention: error 3", "error 0", "error 0", wrong, "error 0"]
    outcomes["a"] = ""
    assert results() == ["error 0"] * 5


@pytest.mark.slow
def test_a_case_that_hangs_or_takes_its_process_along_costs_no_other():
    cases = {
        "well": functools.partial(dict, pid=1),
        "wrong": functools.partial(int, "three"),
        "hangs": functools.partial(time.sleep, 1000),
        "dies": functools.partial(os._exit, 3),
        "variable": functools.partial(eval, "{'set': __import__('os').environ['OF_THE_WORKER']}"),
    }
    with GpuWorker(functools.partial(dict, cases), {"OF_THE_WORKER": "x"}) as worker:
        assert worker.run("well", 60) == {"pid": 1}
        with pytest.raises(RuntimeError, match="ValueError: invalid literal"):
            worker.run("wrong", 60)
        with pytest.raises(RuntimeError, match="did not end within 0 s, and its process was killed"):
            worker.run("hangs", 0.1)
        with pytest.raises(RuntimeError, match="it crashed its process, which ended with status 3"):
            worker.run("dies", 60)
        assert worker.run("well", 60) == {"pid": 1}
        assert worker.run("variable", 60) == {"set": "x"}
    assert "OF_THE_WORKER" not in os.environ


THUNKS = """\
000: kCommandBuffer [source       | next=016 (1)]
    001: kCopy         [source | sink] kCopy
016: kWhile         [prev=000 (1) | sink        ]
condition:
    017: kCustomKernel [source | sink] loop_and_fusion grid: [1, 1, 1]
  body:
    000: kCommandBuffer [source       | next=965 (1)]
        018: kCustomKernel [source       | sink         ] input_reduce_fusion_237 grid: [1, 1, 1]
        019: kConditional  [source       | next=932 (1)]
          false_branch:
            020: kCustomKernel [source | sink] loop_select_fusion_42 grid: [2, 1, 1]
          true_branch:
            No thunks.
    965: kConditional   [prev=000 (1) | next=966 (1)]
      false_branch:
        000: kCommandBuffer [source       | next=958 (1)]
            926: kCustomKernel [source       | next=935 (4)] wrapped_concatenate grid: [2, 1, 1]
        927: kCustomCall    [prev=000 (1) | sink        ] kCustomCall
      true_branch:
        962: kCopy         [source       | sink        ] kCopy
    966: kCustomKernel  [prev=965 (1) | sink        ] input_reduce_fusion_91 grid: [1, 1, 1]
"""


def test_graphs_of_a_window_are_counted():
    counts = {"graphs": 3, "kernels inside": 4, "kernels outside": 3, "conditionals outside": 1, "loops outside": 1}
    assert graphs(THUNKS) == counts
    assert list(sequence(THUNKS)) == [
        "graph of 1", "kWhile", "graph of 3", "kConditional", "graph of 1", "kCustomCall", "kCopy", "kCustomKernel"
    ]  # fmt: skip


def test_a_trace_tells_when_something_ran():
    busy, gaps, span = _occupation([(5e6, 6e6), (0, 2e6), (1e6, 3e6), (7e6, 7.5e6)])
    np.testing.assert_allclose([busy, *gaps, span], [4.5, 2, 1, 7.5])
