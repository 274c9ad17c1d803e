"""Small runs of `research.dialogue` and `research.dialogue_vllm`."""

from __future__ import annotations

import dataclasses
import json

import pytest

from research import dialogue, dialogue_vllm
from vlcache_jax.benchmarks import peer
from vlcache_jax.testing import make_checkpoint


@pytest.mark.slow
def test_turns_and_the_cost_of_snapshots_are_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(dialogue, "SIDE", 64)
    monkeypatch.setattr(dialogue, "LONG", 2100)
    monkeypatch.setattr(dialogue, "make_checkpoint", lambda path, family, text: make_checkpoint(path, family))
    dialogue.main(["--turns", "3", "--rounds", "1", "--out", str(tmp_path / "dialogue.json")])
    found = json.loads((tmp_path / "dialogue.json").read_text())
    assert [row["turn"] for row in found["rows"]] == [1, 2, 3]
    assert found["rows"][0]["cached"] == 0
    assert all(0 < row["cached"] < row["tokens"] for row in found["rows"][1:])
    assert [row["snapshots taken"] for row in found["cost"]] == [3, 0]
    assert "A dialogue with an image of 64 x 64 more in each turn" in capsys.readouterr().out


@pytest.mark.thorough
def test_two_engines_answer_the_same_dialogue(monkeypatch, tmp_path):
    """This engine stands for vLLM, which tests do not install."""

    def set_up(peers, against, work):
        engines, left_out = peer.set_up([], None, work)
        return [engines[0], dataclasses.replace(engines[0], name="vllm")], left_out

    monkeypatch.setattr(dialogue_vllm, "set_up", set_up)
    monkeypatch.setattr(dialogue_vllm, "cache_home", lambda: tmp_path)
    monkeypatch.setattr(dialogue_vllm, "SIDE", 64)
    monkeypatch.setattr(dialogue_vllm, "OPTIONS", {"requests": 1, "rows": 64, "model_len": 512, "kv_bytes": 2**22})
    monkeypatch.setattr(dialogue_vllm, "make_checkpoint", lambda path, family, **_: make_checkpoint(path, family))
    given = ["--turns", "3", "--rounds", "1", "--repeats", "1", "--out", str(tmp_path / "found.json")]
    dialogue_vllm.main(given)
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["turn"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["not computed, ours"] == row["not computed, vllm"] < row["tokens"]
        assert min(row["ours [ms]"], row["vllm [ms]"]) > 0
    assert rows[2]["not computed, ours"] > 0
