"""What HTTP costs, in small."""

import json

from research import server_cost


def test_both_ways_are_asked(checkpoints, tmp_path):
    out = tmp_path / "out.json"
    small = "--hits 2 --clients 2 --requests 1 --tokens 4 --repeats 1"
    server_cost.main(["--model", str(checkpoints("qwen3_vl-tied")), *small.split(), "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [row["what"] for row in rows] == ["hits", "2 clients"]
    assert all(row["direct"] > 0 < row["HTTP"] for row in rows)
