"""The chart of accuracy by recomputed tokens."""

from __future__ import annotations

import json

from research import policies_chart, published


def test_the_chart_has_each_family_and_mode(tmp_path):
    rows = json.loads((published.RESULTS / policies_chart.STUDY).read_text(encoding="utf-8"))["rows"]
    for pattern in policies_chart.FAMILIES.values():
        assert len(policies_chart.points(rows, pattern)) >= 3
    assert policies_chart.points(rows, "full")[0][0] == 0
    assert policies_chart.points(rows, published.APPROXIMATE)[0][0] < 3
    policies_chart.draw(rows, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 1000
