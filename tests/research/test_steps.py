"""Decode steps and layers, counted: what their figures follow from. `python -m research.steps` compiles them."""

from __future__ import annotations

import json

import pytest

from research import chip_model, hlo, steps
from research.steps import Case
from vlcache_jax.models.registry import published_config

COUNTED = {
    "launches": 60.0, "predicates": 3.0, "attention": 2.0, "weights": 2e9, "temporaries": 1e6, "us": 900.0,
    "temp": 5_000_000, "seconds": 20.0, "spills": 0, "registers": 168, "program": ["window", "1"],
}  # fmt: skip


def grown(**more: float) -> dict:
    return COUNTED | {name: COUNTED[name] + value for name, value in more.items()}


def test_experts_are_chosen_evenly():
    experts = published_config("Qwen3-VL-30B-A3B").text.experts_of(0)
    assert steps.expert_loops(experts, 1) == pytest.approx((8, 1))
    groups, tiles = steps.expert_loops(experts, 64)
    assert groups == pytest.approx(128 * (1 - (1 - 8 / 128) ** 64))
    assert 1 < tiles < 1.1  # four rows of eight, in the mean
    groups, tiles = steps.expert_loops(experts, 4096)
    assert groups == pytest.approx(128)
    assert tiles == pytest.approx(256 / 64 + 0.5, abs=0.05)  # each last tile is half full


def test_experts_have_the_bytes_that_are_stored():
    text = published_config("Qwen3-VL-30B-A3B").text
    assert steps.expert_stacks(text) == [128 * 2048 * 1536 * 2, 128 * 768 * 2048 * 2]
    assert steps.expert_stacks(published_config("Qwen3-VL-8B").text) == []


def test_a_model_has_as_many_layers_as_it_has():
    few, more = (Case("Qwen3-VL-8B", "window", 1, layers) for layers in (2, 4))
    found = {str(few): COUNTED, str(more): grown(launches=50, weights=4e8, us=200, attention=2)}
    [row] = steps.summary(found)
    assert (row["model"], row["program"], row["launches a layer"]) == ("Qwen3-VL-8B", "window 1", 25)
    assert row["launches"] == 110 + 32 * 25
    assert row["predicates"] == 3
    kv = 36 * 2 * 2 * 8 * 128 * 2048
    assert row["MB"] == pytest.approx((2.4e9 + 32 * 2e8 + 1e6 + kv) / 1e6)
    text = published_config("Qwen3-VL-8B").text
    us = 1100 + 32 * 100 + 36 * steps.attention_time(text, few)
    assert row["ms by the model"] == pytest.approx(us / 1e3)
    assert row["of the floor"] == pytest.approx(row["tokens/s by the model"] / row["tokens/s of the floor"])
    assert 3 < row["floor ms"] < 4  # weights and K, V at 4.3 TB/s


def test_a_prefill_is_its_layer_as_often_as_there_are_layers():
    case = Case("Qwen2.5-VL-7B", "layer", 512)
    [row] = steps.summary({str(case): COUNTED})
    assert row["launches a layer"] == 60
    assert row["launches"] == 28 * 60
    assert row["memory of temporaries, MB"] == 5
    assert row["floor ms"] < row["ms by the model"]


def test_what_did_not_compile_is_told():
    few, more = (Case("Qwen3-VL-8B", "window", 64, layers) for layers in (2, 4))
    assert steps.summary({str(few): COUNTED}) == []
    [row] = steps.summary({str(few): COUNTED, str(more): {"not compiled": "in 900 s", "limit": 900.0}})
    assert row["not compiled"] == "in 900 s"
    assert row["launches"] is None
    assert row.keys() == steps.summary({str(few): COUNTED, str(more): COUNTED})[0].keys()


def test_a_file_goes_on_with_what_it_lacks(monkeypatch, tmp_path):
    compiled = []

    def compile_apart(case, checkout, limit):
        compiled.append((str(case), limit))
        return {"not compiled": f"in {limit} s", "limit": limit} if case.rows == 4096 else COUNTED

    monkeypatch.setattr(steps, "compile_apart", compile_apart)
    monkeypatch.setattr(steps, "commit", lambda checkout: "abc")
    out = tmp_path / "steps.json"
    steps.measure(steps.ROOT, [": layer 512"], 5, out)
    assert [name for name, _ in compiled] == [f"{model}: layer 512" for model in steps.MODELS]
    rows = steps.measure(steps.ROOT, [": layer"], 5, out)
    assert [name for name, _ in compiled[3:]] == [f"{model}: layer 4096" for model in steps.MODELS]
    assert len(rows) == 6
    steps.measure(steps.ROOT, [": layer"], 5, out)
    assert len(compiled) == 6
    steps.measure(steps.ROOT, ["Qwen3-VL-8B: layer"], 9, out)  # longer
    assert compiled[6:] == [("Qwen3-VL-8B: layer 4096", 9)]
    content = json.loads(out.read_text())
    assert content["commit"] == "abc"
    assert len(content["cases"]) == len(content["rows"]) == 6

    monkeypatch.setattr(steps, "commit", lambda checkout: "def")
    with pytest.raises(ValueError, match="another file"):
        steps.measure(steps.ROOT, [": layer"], 5, out)


def test_a_case_that_takes_too_long_is_ended():
    found = steps.compile_apart(Case("Qwen3-VL-8B", "layer", 512), steps.ROOT, 0.01)
    assert found == {"not compiled": "in 0.01 s", "limit": 0.01}


def test_tokens_of_a_window():
    text = """HloModule window

%body (x: s32[]) -> s32[] {
  ROOT %x = s32[] parameter(0)
}

ENTRY %main (y: s32[]) -> s32[] {
  %y = s32[] parameter(0)
  ROOT %loop = s32[] while(%y), condition=%body, body=%bodyTRIPS
}
"""
    assert steps.tokens_of(hlo.Module(text.replace("TRIPS", "")), 8.0) == 8
    known = ', backend_config={"known_trip_count":{"n":"4"}}'
    assert steps.tokens_of(hlo.Module(text.replace("TRIPS", known)), 8.0) == 4
    with pytest.raises(ValueError, match="loop over its tokens"):
        steps.tokens_of(hlo.Module(text.replace("while", "call").replace("TRIPS", "")), 8.0)


def test_kernels_take_what_bounds_them():
    assert chip_model.kernel_time(0, 0) == 1.7
    assert chip_model.kernel_time(3.744e9, 0) == pytest.approx(1000)  # 0.78 of 4.8 TB/s
    assert chip_model.kernel_time(0, 677e9) == pytest.approx(1000)
