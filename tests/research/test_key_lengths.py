"""`shift` with keys' lengths kept and left free, side by side."""

from __future__ import annotations

import pytest

from research import key_lengths
from vlcache_jax.benchmarks.tiny_vqa.splits import load_samples
from vlcache_jax.reuse import shift
from vlcache_jax.study.accuracy import Protocol


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["qwen3_vl-tied", "qwen2_5_vl"])
def test_both_are_compared_on_the_same_questions(checkpoints, family):
    before = shift.length_kept
    samples = load_samples([], questions=1, split="profile", images=2)
    rows = key_lengths.compare(str(checkpoints(family)), samples, [Protocol("text_first", donors="apart")])
    assert shift.length_kept is before
    assert [row["reuse"] for row in rows] == list(key_lengths.SETTINGS)
    for row in rows:
        assert (row["donors"], row["images"], row["questions"]) == ("apart", "several", 5)
        assert 0 < row["kept MSE"] != row["free MSE"] > 0
