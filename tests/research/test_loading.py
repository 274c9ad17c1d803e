"""What loading takes: weights in place are counted as such."""

from __future__ import annotations

import pytest

from research.loading import measure, own_pages
from vlcache_jax.device.checkpoint import open_checkpoint


def test_what_is_in_place_is_taken_off(checkpoints):
    directory = checkpoints("qwen3_vl")
    row = measure(directory, 1)
    assert row["devices"] == 1
    assert row["in place GB"] == row["weights GB"] == pytest.approx(open_checkpoint(directory).nbytes() / 1e9)
    assert 0 < row["largest tensor GB"] < row["weights GB"]
    assert 0 <= row["most beside what is in place GB"] < own_pages() / 1e9
