"""Which programs take prompts through the layers, and what these are handed. Nothing is computed."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from vlcache_jax.device.buckets import BucketSizes
from vlcache_jax.device.programs.layers import Block, Embed, Layer, ScoreRows, Slice
from vlcache_jax.engine.prefilling import PATCHES_PER_CALL, ForwardPass, Prefiller, _through
from vlcache_jax.pallas_kernels import PAGE


def through(bounds, deepstack=2, *, selects=False):
    vision = SimpleNamespace(num_deepstack=deepstack)
    shapes = SimpleNamespace(like=tuple(range(len(bounds) - 1)), config=SimpleNamespace(vision=vision))
    return [*_through(SimpleNamespace(shapes=shapes), bounds, False, selects)]


def test_features_of_images_are_cut_where_rows_have_dropped_out():
    """In the first layers, which add them; rows that the device chooses are taken otherwise."""
    first, second = Layer(64, 16, True, False, (0,)), Layer(16, 16, True, False, (1,))
    others = [Layer(16, 16, False, False, (2,)), Layer(16, 8, False, False, (3,))]
    bounds = (64, 16, 16, 16, 8)
    assert through(bounds) == [Embed(64), first, Slice(64, 16), second, *others]
    assert through(bounds, selects=True) == [Embed(64), first, second, *others]
    whole = Layer(16, 16, True, False, (0,))
    assert through((16, *bounds[1:])) == [Embed(16), whole, second, *others]


def test_layers_behind_those_with_features_are_launched_together():
    bounds = (64, 16, 16, 16, 16, 16, 8)
    assert through(bounds, 1)[1:] == [
        Layer(64, 16, True, False, (0,)),
        Block(16, False, (1, 2, 3, 4)),
        Layer(16, 8, False, False, (5,)),
    ]


@pytest.mark.parametrize(
    ("patches", "on_host", "on_gpu"),
    [
        ((64, 1024, PATCHES_PER_CALL, 2 * PATCHES_PER_CALL), (64, 1024, PATCHES_PER_CALL), (PATCHES_PER_CALL,)),
        ((2 * PATCHES_PER_CALL,), (2 * PATCHES_PER_CALL,), (2 * PATCHES_PER_CALL,)),
    ],
)
def test_a_gpu_encodes_in_the_largest_calls(patches, on_host, on_gpu):
    """It would read all weights again for a small one, where a processor would compute padding."""
    for is_host, calls in ((True, on_host), (False, on_gpu)):
        runner = SimpleNamespace(buckets=BucketSizes((16,), patches, (1,)), is_host=is_host)
        assert Prefiller(runner, None, None, None, None)._calls == calls


def test_rows_of_images_are_scored():
    """They follow those that go on in any case, and text that none chooses among follows them."""
    forward_pass, asked = object.__new__(ForwardPass), []
    forward_pass.x, forward_pass._score, forward_pass._rows = np.zeros((16, 4)), None, "rows"
    forward_pass.runner = SimpleNamespace(
        shapes=SimpleNamespace(windows=(4, 8), like=(0, 1, 1)),
        text={"layers": ["first", "second"]},
        run=lambda *given: asked.append(given),
    )
    selection = SimpleNamespace(
        must=3, among=5, length=2 * PAGE + 1, question=7, table=np.arange(1, 9), policy="policy"
    )
    forward_pass._score_rows(selection, 1, ["k", "v"])
    [(program, weights, x, k, v, rows, is_image, request, table, before)] = asked
    assert program == ScoreRows(16, 4, "policy", (1,))
    assert (weights, k, v, rows) == ("second", "k", "v", "rows")
    assert x is forward_pass.x
    assert np.flatnonzero(is_image).tolist() == [3, 4, 5, 6, 7]
    assert (request.tolist(), table.tolist(), before.tolist()) == ([2 * PAGE + 1, 7], [1, 2, 3, 4], [0.0] * 16)
