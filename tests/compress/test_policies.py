"""Policies: what they observe and keep (the specification's D.2 to D.6 and D.8), and what `compress` may be."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.compress.example import ACCUMULATED, ATTENTION, NORMALIZED, POST_VISION, kept_of
from vlcache_jax.compress.parse import parse_compressor
from vlcache_jax.compress.policies import (
    H2O,
    PostVision,
    PyramidKV,
    Random,
    SnapKV,
    Streaming,
    VLCache,
    ZipCache,
    make_counts,
    make_observed,
    make_windows,
)
from vlcache_jax.compress.scores import Drawn, KeyStatistics, PooledScores, Received, kept_tokens, seeds
from vlcache_jax.inputs.layout import ImageRef, make_layout

ALL = (VLCache, PostVision, SnapKV, PyramidKV, H2O, ZipCache, Streaming, Random)
ranked = jax.jit(kept_tokens, static_argnames="max_count")


def observed(received, window=1, seed=0):
    """Keys as a program sees them: [K, 8 more], with nothing of meaning behind the prompt."""
    received = np.atleast_2d(np.asarray(received, np.float32))
    padded = np.pad(received, ((0, 0), (0, 8)), constant_values=np.nan)
    return KeyStatistics(padded, np.int32(received.shape[1]), np.int32(window), np.uint32(seed))


def kept(scores, count, seen):
    """Sets of tokens, one a KV head."""
    chosen = np.asarray(kept_of(scores, seen, count, max_count=seen.received.shape[1]))[:, :count]
    assert (np.diff(chosen, axis=1) > 0).all()
    return [set(head.tolist()) for head in chosen]


def layout(length, *images, key="a"):
    """Images of 2 tokens that begin at those places."""
    refs = [ImageRef(key, (1, 2, 4), 2, lambda: None) for _ in images]
    return make_layout(np.arange(length, dtype=np.int32), images, refs, 2)


def test_scores_of_the_example():
    post_vision, all_rows = observed(ATTENTION[4:].sum(0)), observed(ATTENTION.sum(0))
    np.testing.assert_allclose(VLCache(0.1).scores(post_vision)[0, :6], POST_VISION, atol=1e-6)
    np.testing.assert_allclose(H2O(0.1).scores(all_rows)[0, :6], ACCUMULATED, atol=1e-6)
    np.testing.assert_allclose(ZipCache(0.1).scores(all_rows)[0, :6], NORMALIZED, atol=1e-4)
    assert kept(VLCache(0.1).scores, 4, post_vision) == [{0, 2, 4, 5}]
    assert kept(H2O(0.1).scores, 4, all_rows) == [{0, 1, 2, 5}]


def test_streaming():
    policy = Streaming(0.4)
    assert kept(policy.scores, 8, observed(np.zeros(20), policy.window(8))) == [{0, 1, 2, 3, 16, 17, 18, 19}]
    assert kept(policy.scores, 3, observed(np.zeros(20), policy.window(3))) == [{0, 1, 19}]


def test_snapkv():
    received = [0.6, 0.1, 0.1, 0.5, 0.1, 0.2, 9, 9]  # the window's own are no neighbours
    seen = observed(received, window=2)
    means = PooledScores("kv_head", 3)(seen)[0, :6]
    np.testing.assert_allclose(means, [0.2333, 0.2667, 0.2333, 0.2333, 0.2667, 0.1], atol=1e-4)
    assert kept(PooledScores("kv_head", 3), 4, seen) == [{1, 4, 6, 7}]
    assert kept(Received("kv_head"), 4, seen) == kept(PooledScores("kv_head", 1), 4, seen) == [{0, 3, 6, 7}]


def test_granularity():
    heads = np.array([[5, 1, 4, 0, 0, 0], [0, 3, 4, 0, 0, 0]])
    assert kept(Received("kv_head"), 3, observed(heads)) == [{0, 2, 5}, {1, 2, 5}]
    assert kept(Received("layer"), 3, observed(heads)) == [{0, 2, 5}, {0, 2, 5}]
    same = observed(np.tile(ATTENTION.sum(0), (2, 1)))
    for policy in ALL:
        if policy is not Random:
            by_head, by_layer = policy(0.5).scores, policy(0.5, granularity="layer").scores
            assert kept(by_head, 3, same) == kept(by_layer, 3, same)


def test_random():
    [first, second] = seeds(layout(9, 2), 2)
    assert [first, second] == seeds(layout(9, 2), 2).tolist()
    others = (layout(10, 2), layout(9, 3), layout(9, 2, key="b"))
    assert (
        len({first, second, *(seeds(other, 1).item() for other in others)}) == 4
    )  # an image is its key, not its place
    draw = kept(Drawn("kv_head"), 20, observed(np.zeros((2, 200)), seed=first))
    assert draw[0] != draw[1]
    # A larger window of keys draws the same.
    wide = Drawn("kv_head")(observed(np.zeros((2, 400)), seed=first))
    np.testing.assert_array_equal(Drawn("kv_head")(observed(np.zeros((2, 200)), seed=first)), wide[:, :208])
    assert not np.array_equal(wide, Drawn("kv_head")(observed(np.zeros((2, 400)), seed=second)))


@settings(deadline=None)
@given(st.data())
def test_kept_tokens(data):
    """As a sort on the host chooses, with equal scores in the prompt's order."""
    K, W = 2, 16
    score = np.array(data.draw(st.lists(st.lists(st.integers(0, 3), min_size=W, max_size=W), min_size=K, max_size=K)))
    length = data.draw(st.integers(1, W))
    count = data.draw(st.integers(1, length))
    window = data.draw(st.integers(0, count))
    got = np.asarray(ranked(score.astype(np.float32), length, count, window, max_count=W))
    for head, chosen in zip(score, got, strict=True):
        order = np.argsort(-head[: length - window], kind="stable")[: count - window]
        assert chosen.tolist() == [*sorted(order), *range(length - window, length), *[W] * (W - count)]


def test_kept_tokens_no_more_than_there_are():
    assert ranked(np.zeros((1, 4), np.float32), 4, 2, 1, max_count=9).tolist() == [[0, 3, 4, 4]]


def test_a_score_of_no_number_chooses_nothing_behind_the_prompt():
    """0 / 0 is -nan on x86, and sorted behind -inf."""
    score = np.copysign(np.full((1, 8), np.nan, np.float32), -1)
    assert ranked(score, 4, 3, 1, max_count=8).tolist() == [[0, 1, 3, *[8] * 5]]
    score[0, 2] = -5
    assert ranked(score, 4, 2, 1, max_count=8).tolist() == [[2, 3, *[8] * 6]]


def test_observed_rows():
    for policy, expected in (
        (VLCache(0.1), (55, 1, 50, 7)),
        (PostVision(0.1), (55, 1, 50, 7)),
        (SnapKV(0.1), (32, 32, 32, 7)),
        (PyramidKV(0.1, rows=8), (8, 8, 8, 7)),
        (H2O(0.1), (100, 100, 100, 7)),
        (ZipCache(0.1), (100, 100, 100, 7)),
        (Streaming(0.1), (0, 0, 0, 0)),
        (Random(0.1), (0, 0, 0, 0)),
    ):
        # Behind the last image; the image at the end; no image, and few tokens.
        prompts = (layout(100, 3, 43), layout(100, 3, 98), layout(100), layout(7))
        assert tuple(policy.observed(prompt) for prompt in prompts) == expected


def test_windows():
    assert [VLCache(0.1).window(count) for count in (1, 9, 10, 129)] == [1, 1, 1, 12]
    assert [Streaming(0.1).window(count) for count in (1, 4, 5, 129)] == [1, 1, 1, 125]


def test_programs_are_shared():
    """What a layer's program is compiled for is no other for another share, or for how rows are chosen."""
    assert VLCache(0.1).scores == VLCache(0.2, p=0.1).scores == PostVision(0.5).scores == H2O(0.1).scores
    assert SnapKV(0.1).scores == PyramidKV(0.2, rows=3).scores
    assert hash(VLCache(0.1).scores) == hash(H2O(0.1).scores)
    different = [SnapKV(0.1), SnapKV(0.1, pooling=3), VLCache(0.1), VLCache(0.1, granularity="layer")]
    different += [ZipCache(0.1), Streaming(0.1), Random(0.1)]
    assert len({policy.scores for policy in different}) == len(different)


@pytest.mark.parametrize("policy", ALL)
def test_parse(policy):
    for alpha in (0.1, 1.0, 1e-05):
        one = policy(alpha)
        assert parse_compressor(one.name) == parse_compressor(one) == one
    assert (policy(0.1).p is None) == (policy is not VLCache)


def test_names():
    assert parse_compressor("vl-cache-0.10") == VLCache(0.1)
    assert parse_compressor("h2o-.5") == H2O(0.5)
    assert parse_compressor("random-1").name == "random-1"
    assert VLCache(0.1, granularity="layer", refill=True).name == "vl-cache-0.1 (granularity=layer, refill=True)"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("vl-cache-0", r"compress must be vl-cache-A with a fraction A \(0 < A <= 1\), got 'vl-cache-0'"),
        ("h2o-1.5", r"compress must be h2o-A with a fraction A \(0 < A <= 1\), got 'h2o-1.5'"),
        ("vlcache-0.1", r"compress must be one of vl-cache-A, .*, got 'vlcache-0.1'; did you mean 'vl-cache-0.1'\?"),
        ("snapkv", r"compress must be one of .*random-A, where A is .*, or a Compressor, got 'snapkv'"),
        ("snapkv-nan", r"compress must be one of .*, got 'snapkv-nan'"),
        (0.1, r"compress must be one of .*, got 0.1$"),
        (VLCache, r"compress must be one of .*, got <class"),
    ],
)
def test_not_a_compressor(wrong, message):
    with pytest.raises(ValueError, match=message):
        parse_compressor(wrong)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: H2O(0), "alpha of compress must be a number above 0 and at most 1, got 0"),
        (lambda: H2O(True), "alpha of compress must be"),
        (lambda: H2O(float("nan")), "alpha of compress must be"),
        (lambda: VLCache(0.1, granularity="head"), "granularity of compress must be kv_head or layer, got 'head'"),
        (lambda: VLCache(0.1, p=0), "p of compress must be a number above 0 and at most 1, got 0"),
        (lambda: VLCache(0.1, refill=1), "refill must be a bool, got 1"),
        (lambda: SnapKV(0.1, rows=0), "rows of compress must be a positive integer, got 0"),
        (lambda: SnapKV(0.1, pooling=4), "pooling of compress must be odd, got 4"),
        (lambda: Streaming(0.1, first=-1), "first of compress must be an integer of at least 0, got -1"),
    ],
)
def test_wrong_options(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def own(**parts):
    """A compressor of somebody's own."""
    return type("Own", (Streaming,), {"name": "own"} | parts)(0.5)


class Same:
    """Scores of the function's."""

    def __init__(self, make):
        self.make = make

    def __call__(self, seen):
        return self.make(seen)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"name": 3}, "name of compress must be a string, got 3"),
        ({"alpha": property(lambda _: 2, lambda *_: None)}, "alpha of compress must be a number above 0 .*, got 2"),
        ({"p": "x"}, "p of compress must be a number above 0 and at most 1, got 'x'"),
        ({"scores": 3}, "scores of compress must be callable and hashable, got 3"),
        ({"scores": [].append}, r"scores of compress must return the shape \[K, W\] .* got None"),
        ({"scores": Same(lambda seen: seen.received[:, :3])}, r"scores of compress must return .* got \(2, 3\)"),
    ],
)
def test_a_compressor_of_ones_own_is_looked_at_before_it_is_used(parts, message):
    assert parse_compressor(own()).name == "own"
    with pytest.raises(ValueError, match=f"^{message}"):
        parse_compressor(own(**parts))


def test_what_a_compressor_of_ones_own_says_is_checked():
    prompt = layout(9)

    def ask(**parts):
        compressor = own(**parts)
        counts = make_counts(compressor, 9, None, 2)
        return make_observed(compressor, prompt), counts, make_windows(compressor, counts)

    numpy = ask(counts=lambda *_: np.full(2, 3), observed=lambda *_: np.int64(5), window=lambda *_: np.int32(0))
    assert numpy == (5, (3, 3), (0, 0))
    assert {type(number) for number in (numpy[0], *numpy[1], *numpy[2])} == {int}
    for parts, message in (
        ({"counts": lambda *_: 1 / 0}, r"counts of own raised ZeroDivisionError\('division by zero'\)"),
        ({"counts": lambda *_: None}, "counts of own raised TypeError"),
        ({"counts": lambda *_: [3]}, r"counts of own must be 2 integers from 1 to 9, got \(3,\)"),
        ({"counts": lambda *_: [0, 10]}, "counts of own must be 2 integers from 1 to 9, got"),
        ({"observed": lambda *_: 1 / 0}, "observed of own raised"),
        ({"observed": lambda *_: 10}, "observed of own must be an integer from 0 to 9, got 10"),
        ({"observed": lambda *_: 2.0}, "observed of own must be .* got 2.0"),
        ({"window": lambda *_: 1 / 0}, "window of own raised"),
        ({"window": lambda *_: 5}, "window of own must be an integer from 0 to 4, got 5"),
        ({"window": lambda *_: None}, "window of own must be .* got None"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            ask(**parts)
