"""What a hit costs by counting: the rows of the table, on a small model."""

from __future__ import annotations

import json
import pathlib

import pytest

from research import hits
from vlcache_jax.benchmarks.floor import H200, MODELS
from vlcache_jax.models.registry import load_config

RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results" / "hits_h200_counted.json"
LAYERS = 4


@pytest.fixture(scope="module")
def config(checkpoints):
    return load_config(checkpoints("qwen3_vl"))


@pytest.mark.thorough  # opens ten engines
def test_the_rows(config):
    everything = hits.measure(config, images=2, tokens=64)
    codecs = ("auto", "int8", "int4")
    assert [(row["K, V in"], row["codec"]) for row in everything] == [
        (place, codec) for place in ("host", "device") for codec in codecs
    ]
    rows, here = everything[:3], everything[3:]
    heads, width, values = config.text.num_kv_heads, config.text.head_dim, 2 * config.text.num_kv_heads * 24
    assert (width, config.text.num_layers) == (24, LAYERS)
    # 64 x 20 // 500 tokens of each image are computed in the first layer. Scales are 4 bytes a head or group.
    encoder = 2 * 2 * (1 + config.vision.num_deepstack) * config.text.hidden_size * 2
    scales = 2 * heads * 4
    stored = [128 * LAYERS * kept + encoder for kept in (2 * values, values + scales, values // 2 + scales)]
    assert [row["MB on the bus"] * 1e6 for row in rows] == pytest.approx(stored)
    for row in rows:
        assert row["bus ms"] == pytest.approx(1e9 * row["MB on the bus"] / H200.host)
        assert row["floor ms"] == pytest.approx(row["bus ms"] + row["arithmetic ms"])
        assert row["arithmetic ms"] > 0
    # Each image alone is linked by a program in each of four groups of layers; the rest does not depend on them.
    alone, alone_here = hits.measure(config, ["auto"], images=1, tokens=64)
    assert {row["launches"] for row in rows} == {alone["launches"] + LAYERS}
    assert alone["launches"] > LAYERS
    for row, coming in zip(here, rows, strict=True):
        assert (row["MB on the bus"], row["bus ms"]) == (0, 0)
        assert row["arithmetic ms"] == pytest.approx(coming["arithmetic ms"])
    # From the device tier all images are linked by one.
    assert {row["launches"] for row in here} == {alone_here["launches"]}


def test_bytes_are_those_that_the_engine_moves(config, monkeypatch):
    monkeypatch.setattr(hits, "moved_bytes", lambda config, hit, dtype: 1)
    with pytest.raises(ValueError, match="counted bytes must equal those that the engine moved"):
        hits.measure(config, ["auto"], images=1, tokens=16)


def test_the_committed_table_is_that_of_the_model():
    found = json.loads(RESULTS.read_text())
    text = MODELS[hits.MODEL].text
    tokens = found["images"] * found["tokens of each"]
    [plain] = [row for row in found["rows"] if (row["K, V in"], row["codec"]) == ("host", "auto")]
    linked = tokens * text.num_layers * 2 * text.num_kv_heads * text.head_dim * 2
    staged = 20 * (1024 * 40 // 500) * 4 * text.hidden_size * 2
    assert plain["MB on the bus"] * 1e6 == linked + staged
    assert "nothing of it measured on a GPU" in found["title"]
