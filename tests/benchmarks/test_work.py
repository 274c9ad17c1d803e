"""The benchmark of work lists, in small."""

from __future__ import annotations

import dataclasses

import pytest

from vlcache_jax.benchmarks import work


def test_lists_are_made_for_both_kernels():
    for implementation in ("mosaic_gpu", "xla"):
        row = work.time_make_work(work.STEPS[0], implementation, repeats=1)
        assert 0 < row["least ms"] <= row["ms"]
        assert row["items"] >= 64


def test_contracts_are_compared_before_they_are_timed(monkeypatch):
    shape = dataclasses.replace(work.DECODE[0], N=3, S=3 * 300)
    row = work.time_decoding(shape, "float32", repeats=1)
    assert row["times faster"] == pytest.approx(row["plain ms"] / row["paged ms"])
    right = work.paged_attention
    monkeypatch.setattr(work, "paged_attention", lambda *args, **options: right(*args, **options) + 1)
    with pytest.raises(ValueError, match="contracts must agree"):
        work.time_decoding(shape, "float32", repeats=1)
