"""A small run of `research.dialogue`."""

from __future__ import annotations

import json

import pytest

from research import dialogue
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
