"""Budgets: the worked examples of the specification (D.1, D.2, D.6), and what holds for any prompt."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from research.masked_answers import filtered
from tests.compress.example import ATTENTION
from vlcache_jax.compress.budgets import layer_shares, pyramid, sparsity, visible, whole
from vlcache_jax.compress.parse import parse_compressor
from vlcache_jax.compress.policies import PyramidKV, Random, VLCache, make_counts

WORDS = ("vl-cache", "postvision", "snapkv", "pyramidkv", "h2o", "zipcache", "streaming", "random", "refill")
SHARES = st.integers(1, 1000).map(lambda n: n / 1000)
LENGTHS = st.integers(1, 40_000)
GAMMAS = st.lists(st.integers(0, 1000), min_size=1, max_size=12).map(lambda values: np.array(values) / 1000)


def make(word, alpha):
    return VLCache(alpha, refill=True) if word == "refill" else parse_compressor(f"{word}-{alpha}")


@pytest.mark.parametrize(("rows", "expected"), [(6, 2 / 21), (2, 2 / 11)])
def test_sparsity(rows, expected):
    seen = ATTENTION[-rows:]
    zeros = ((seen > 0) & (filtered(seen, 0.01) == 0)).sum()
    assert visible(6, rows) == (seen > 0).sum()
    assert sparsity(np.array([[zeros], [0]]), 6, rows) == pytest.approx([expected, 0])
    assert sparsity(np.array([[zeros, 0]]), 6, rows) == pytest.approx([expected / 2])  # the mean of the heads


def test_layer_shares():
    gamma = np.array([0.2, 0.6, 0.9, 0.995])
    shares = layer_shares(gamma, 0.1, refill=False)
    assert shares == pytest.approx([0.24521, 0.12261, 0.03065, 0.01], abs=1e-5)
    assert shares.sum() == pytest.approx(0.40847, abs=1e-5)
    assert VLCache(0.1).counts(1000, gamma, 4) == (245, 122, 30, 10)
    gamma = np.array([0, 0.9, 0.9, 0.9])
    assert layer_shares(gamma, 0.5, refill=False) == pytest.approx([1, 0.1538, 0.1538, 0.1538], abs=1e-4)
    assert layer_shares(gamma, 0.5, refill=True) == pytest.approx([1, 1 / 3, 1 / 3, 1 / 3])
    for refill in (False, True):  # nothing to go by: the same for all
        assert layer_shares(np.ones(3), 0.5, refill=refill) == pytest.approx([0.5] * 3)


def test_pyramid():
    assert pyramid(40, 198, 4) == pytest.approx([78, 52.667, 27.333, 2], abs=1e-3)
    assert whole(pyramid(40, 198, 4) + 0.5, 200) == (78, 53, 27, 2)
    assert pyramid(40, 60, 4) == pytest.approx([60, 46.667, 33.333, 20], abs=1e-3)
    assert whole(pyramid(40, 60, 4) + 0.5, 62) == (60, 47, 33, 20)
    assert pyramid(40, 198, 1) == pytest.approx([40])
    assert PyramidKV(0.1).counts(2000, None, 4) == (371, 257, 143, 29)  # 20 of the window in each
    # The first example and a window of 4.44: 82.44, 57.11, 31.78 and 6.44 tokens, rounded at the end.
    assert PyramidKV(4 / 9).counts(100, None, 4) == (82, 57, 32, 6)


def test_whole():
    assert whole([0.29 * 100, 0.4, 7.9, 200], 100) == (29, 1, 7, 100)


@settings(deadline=None)
@given(st.sampled_from(WORDS), SHARES, SHARES, LENGTHS, GAMMAS)
def test_counts(word, alpha, other, length, gamma):
    """They stay within the prompt, rise with alpha, and keep all at 1."""
    layers = len(gamma)
    low, high = (make_counts(make(word, share), length, gamma, layers) for share in sorted((alpha, other)))
    assert all(1 <= a <= b <= length for a, b in zip(low, high, strict=True))
    for known in (gamma, None):  # nothing has to be observed
        assert make_counts(make(word, 1.0), length, known, layers) == (length,) * layers
    assert all(1 <= make(word, alpha).window(count) <= count for count in low)


@settings(deadline=None)
@given(st.sampled_from(["postvision", "pyramidkv", "refill"]), SHARES, LENGTHS, GAMMAS)
def test_sum_of_counts(word, alpha, length, gamma):
    """All of alpha is given out, but for rounding and for the least that a layer has."""
    layers = len(gamma)
    wanted = max(alpha, 0.01 if word == "refill" else 0) * length * layers
    assert wanted - layers - 1e-6 <= sum(make(word, alpha).counts(length, gamma, layers)) <= wanted + layers


def test_counts_of_others():
    class Odd(Random):
        def counts(self, length, gamma, layers):
            return (length + 1,) * layers

    with pytest.raises(ValueError, match=r"counts of random-0.5 must be 2 integers from 1 to 9, got \(10, 10\)"):
        make_counts(Odd(0.5), 9, None, 2)
