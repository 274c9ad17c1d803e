"""What HTTP costs, in small."""

import json

from research import server_cost
from tests.helper import SIZES
from vlcache_jax import AsyncLLM


def test_both_ways_are_asked(checkpoints, tmp_path, monkeypatch):
    out = tmp_path / "out.json"
    monkeypatch.setattr(server_cost, "AsyncLLM", lambda model, **given: AsyncLLM(model, **SIZES | given))
    small = "--hits 2 --clients 2 --requests 1 --tokens 4 --repeats 1"
    server_cost.main(["--model", str(checkpoints("qwen3_vl")), *small.split(), "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [row["what"] for row in rows] == ["hits", "2 clients"]
    assert all(row["direct"] > 0 < row["HTTP"] for row in rows)
