"""Measures of what kept tokens are worth: the worked examples of the specification (D.3, D.9)."""

from __future__ import annotations

import numpy as np
import pytest

from research.masked_answers import cache_hit_rate, contribution, coverage, of_heads, stream, zeros
from tests.compress.example import ACCUMULATED, ATTENTION, NORMALIZED, POST_VISION

FIRST_DECODED = np.array([0.15, 0.01, 0.55, 0.002, 0.188, 0.10])
IMAGE = np.array([False, True, True, True, False, False])


def test_cache_hit_rate():
    rates = [cache_hit_rate(np.array(one), FIRST_DECODED, 3) for one in (ACCUMULATED, NORMALIZED, POST_VISION)]
    assert rates == pytest.approx([2 / 3, 2 / 3, 1])
    both = np.array([[ACCUMULATED, POST_VISION]])
    assert cache_hit_rate(both, np.broadcast_to(FIRST_DECODED, both.shape), 3) == pytest.approx(5 / 6)
    assert cache_hit_rate(np.zeros(4), np.array([4, 1, 1, 1]), 2) == 1  # of equal ones the earlier


def test_sparsity_of_heads():
    small = zeros(ATTENTION[-1:], 0.01)  # the threshold of the last row is 0.005
    assert small.tolist() == [1]
    assert zeros(np.stack([FIRST_DECODED, np.full(6, 1 / 6)]), 0.2).tolist() == [3, 0]
    assert zeros(np.array([0.01, 1.0]), 0.01) == 0  # what equals the threshold is kept
    assert of_heads(np.array([[0.1, 0.5], [0.2, 0.2]])) == [[0.1, 0.2], [pytest.approx(0.3), 0.2], [0.5, 0.2]]


def test_contribution():
    assert contribution(FIRST_DECODED, IMAGE, 0.01) == pytest.approx(0.5611, abs=1e-4)
    rows = np.stack([FIRST_DECODED, np.eye(6)[0]])
    assert contribution(rows, IMAGE, 0.01) + contribution(rows, ~IMAGE, 0.01) == pytest.approx(1)
    assert contribution(rows, IMAGE, 0.01) == pytest.approx(0.5611 / 2, abs=1e-4)
    # What was decoded has no modality, but sets the maximum of its row.
    assert contribution(np.array([0.3, 0.1, 0.6]), np.array([False, True]), 0.2) == 0
    assert contribution(np.array([[0.3, 0.1, 0.6], [0, 0, 1]]), np.array([True, False]), 0.2) == 1


def test_coverage():
    assert coverage(FIRST_DECODED, IMAGE, 0.5) == pytest.approx(1 / 3)
    assert coverage(FIRST_DECODED, ~IMAGE, 0.5) == pytest.approx(2 / 3)
    assert coverage(np.array([0.3, 0.1, 0.2, 0.4]), np.array([False, False, True]), 0.75) == pytest.approx(1 / 2)


def test_stream():
    kept, sums = stream(np.array([0, 2, 5]), np.array([2.8, 1.4, 0.2]), np.array([0.5, 0.2, 0.1, 0.2]), 2, 1)
    assert kept.tolist() == [0, 2, 6]
    assert sums == pytest.approx([3.3, 1.6, 0.2])
    kept, sums = stream(np.array([0, 1]), np.array([1.0, 0]), np.array([0.5, 0.3, 0.2]), 2, 1)
    assert kept.tolist() == [0, 1, 2]
    kept, _ = stream(np.arange(3), np.zeros(3), np.zeros(4), 2, 1)
    assert kept.tolist() == [0, 1, 3]  # of equal ones the earlier stays


def test_stream_by_and_by():
    """Nothing is dropped until three are too many, then all of them at once."""
    kept, sums = np.arange(3), np.array([3.0, 1, 2])
    for new in (3, 4):
        kept, sums = stream(kept, sums, np.full(len(kept) + 1, 0.1), 2, 1, every=3)
        assert kept.tolist() == list(range(new + 1))
    kept, sums = stream(kept, sums, np.array([0, 0, 0, 0, 0.5, 0.5]), 2, 1, every=3)
    assert kept.tolist() == [0, 2, 5]
    assert sums == pytest.approx([3.2, 2.2, 0.5])
