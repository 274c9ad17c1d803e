"""What compressed K, V save by counting, against values made by hand."""

from __future__ import annotations

import json
import pathlib

import pytest

from research import compression
from vlcache_jax.benchmarks.floor import H200, MODELS
from vlcache_jax.device import memory_plan

RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results" / "compression_h200_counted.json"
CONFIG = MODELS[compression.MODEL]


def test_a_step_reads_its_weights_and_what_is_kept():
    """Of 128 thousand tokens at 147456 bytes; a layer has 193 million weights, the head 622 million."""
    whole, attention = compression.milliseconds(CONFIG, 1, 131072)
    assert attention == pytest.approx(1e3 * 147456 * 131072 / H200.memory, rel=1e-3)
    layer = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 12288
    assert whole - attention == pytest.approx(1e3 * 2 * (36 * layer + 4096 * 151936) / H200.memory, rel=1e-3)
    less, of_less = compression.milliseconds(CONFIG, 1, 13107)
    assert whole - attention == less - of_less
    assert attention / of_less == pytest.approx(10, rel=1e-2)


def test_the_committed_table_is_that_of_the_model(monkeypatch):
    # In tests every device has the same memory.
    monkeypatch.setattr(memory_plan, "free_bytes", lambda device: device.memory_stats()["bytes_limit"])
    found = json.loads(RESULTS.read_text())
    assert "nothing of it measured on a GPU" in found["title"]
    assert found["rows"] == [pytest.approx(row) for row in compression.decoding(CONFIG)]
    assert found["memory"] == pytest.approx(compression.requests(CONFIG))
    memory = found["memory"]
    # 20546 tokens and 256 more in whole pages of 128: of 36 layers, or of each layer a tenth.
    assert memory["MB of a request"] == pytest.approx(163 * 128 * 147456 / 1e6)
    assert memory["MB of a compressed request"] == pytest.approx(36 * 19 * 128 * 4096 / 1e6)
    pools = memory["pool of whole prompts GB"] + memory["pool of compressed GB"]
    assert 0.95 * memory["pool GB"] < pools <= memory["pool GB"]
    assert memory["compressed requests"] > 6 * memory["requests"]
