"""What a router takes for a request: what is timed is what serves."""

from __future__ import annotations

import json

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from research import routing
from vlcache_jax.protocol.schema import read_object
from vlcache_jax.router.affinity import Affinity, look


def test_a_body_is_one_that_a_client_sends():
    body = routing.body_of(np.random.default_rng(0), 3, 1000)
    seen = look(read_object(body))
    assert sorted(seen.images.values()) == pytest.approx([1000] * 3, abs=3)


def test_the_table(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(Affinity, "order", lambda self, seen, loads: asked.append(len(loads)) or list(loads))
    app = typer.Typer()
    app.command()(routing.main)
    out = tmp_path / "out.json"
    words = ["--engines", "2,5", "--pictures", "3", "--size", "100", "--requests", "4", "--out", str(out)]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0
    told = json.loads(out.read_text())
    assert asked == [2] * 3 + [2] * 4 + [5] * 4
    assert [row["engines"] for row in told["rows"]] == [2, 5]
    assert all(value > 0 for row in told["rows"] for value in row.values())


def test_pictures_that_are_not_seen_are_no_result(monkeypatch):
    monkeypatch.setattr(routing, "look", lambda request: look({}))
    with pytest.raises(ValueError, match="must show 2 images, got 0"):
        routing.measure(2, pictures=2, size=10, requests=1)
