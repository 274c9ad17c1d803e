"""Moving linked keys and values: what the pool may hold afterwards."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vlcache_jax.models import load_config
from vlcache_jax.reuse.shift import IMAGES, Moves, Shift, move

SLOTS = 12


@pytest.mark.parametrize(("size", "chunk"), [(5, 8), (9, 9), (7, 2), (20, 3)])
def test_keys_carry_what_is_not_finite_in_moved_values(checkpoints, monkeypatch, size, chunk):
    monkeypatch.setattr("vlcache_jax.reuse.shift._CHUNK", chunk)
    text = load_config(checkpoints("qwen3_vl")).text
    rng = np.random.default_rng(0)
    shape = SLOTS, text.num_kv_heads, text.head_dim
    k, v = (rng.normal(size=shape).astype(np.float32) for _ in "kv")
    k[4, 0, 0] = np.inf  # stays what it is
    largest = np.finfo(np.float32).max
    v[3, 1, 2] = v[6, 1, 2] = largest
    change = np.zeros((IMAGES, *shape[1:]), np.float32)
    change[1, 1, 2] = largest  # token 2 is of this image, and so is token 0, where it does no harm
    change[2, 0] = np.nan
    slot, image = np.array([2, 4, 3, 6, 8], np.int32), np.array([1, 0, 1, 1, 2], np.int32)
    depth = np.array([0, 0, 0, 9, 0], np.int32)  # the fourth token is computed in this layer
    shift = Shift(np.zeros(0, np.int32), slot, np.zeros((3, 5), np.int32), image, depth)
    moves = Moves(*shift.pack(0, size), np.int32(1), np.int32(5))
    moved = jax.jit(functools.partial(move, text))
    new_k, new_v = moved(k, v, (np.zeros_like(change), change), moves)
    want_k, want_v = k.copy(), v.copy()
    want_k[3, 1, 2] = want_k[8, 0] = np.nan
    want_v[2, 1, 2] += largest
    want_v[3, 1, 2] = want_v[8, 0] = 0
    np.testing.assert_array_equal(new_k, want_k)
    np.testing.assert_array_equal(new_v, want_v)
    assert jnp.isfinite(new_v).all()
