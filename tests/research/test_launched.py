"""A small run of `research.launched`."""

from __future__ import annotations

from research import launched


def test_each_part_of_a_hit_is_measured(monkeypatch):
    monkeypatch.setattr(launched, "SIDE", 64)
    rows, launches = launched.measure(count=2, repeats=1)
    assert [row["what"] for row in rows[-len(launched.PARTS) :]] == [f"part: {name}" for name, _, _ in launched.PARTS]
    assert all(0 < row["least ms"] <= row["ms"] <= row["most ms"] for row in rows)
    assert launches > launched.TEXT["num_hidden_layers"]
