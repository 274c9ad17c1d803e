"""Small runs of `research.donor_cost` and `research.video_donors`."""

from __future__ import annotations

import contextlib
import json

import pytest

from research import donor_cost, video_donors
from vlcache_jax import LLM, CacheConfig
from vlcache_jax.assets import TINY_VQA
from vlcache_jax.benchmarks.tiny_vqa.splits import load_samples
from vlcache_jax.testing import make_checkpoint


@pytest.mark.slow
def test_the_cost_of_donors_is_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(donor_cost, "SIDE", 64)
    monkeypatch.setattr(donor_cost, "FRAME", 64)
    monkeypatch.setattr(donor_cost, "LONGEST", 1024)
    monkeypatch.setattr(donor_cost, "drawn_weights", contextlib.nullcontext)
    monkeypatch.setattr(donor_cost, "make_random_model", lambda path: (make_checkpoint(path, "qwen3_vl"), "tiny"))
    donor_cost.main(["--rounds", "1", "--out", str(tmp_path / "cost.json")])
    rows = json.loads((tmp_path / "cost.json").read_text())["rows"]
    assert [row["images"] for row in rows] == [1, 1, 4, 4, "a video of 4 chunks", "a video of 4 chunks"]
    assert [row["request"] for row in rows[:2]] == ["first request", "next request"]
    assert all(row["any [ms]"] > 0 and row["neutral [ms]"] > 0 for row in rows)


@pytest.mark.slow
def test_chunks_come_from_their_kind_of_context():
    samples = [one for one in load_samples([], questions=8) if len(one.images) == 1][:4]
    with LLM(TINY_VQA, cache=CacheConfig(load="kv"), enable_prefix_caching=False, use_tqdm=False) as llm:
        errors = video_donors.measure(llm, samples)
    assert {len(found) for found in errors.values()} == {1}
    for name in video_donors.SETTINGS:
        assert 0 < errors[video_donors.WHOLE, name][0] < errors[video_donors.APART, name][0]
