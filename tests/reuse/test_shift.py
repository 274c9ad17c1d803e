"""Moving linked keys and values: what the pool may hold afterwards."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.helper import SIZES, drawn
from vlcache_jax import LLM
from vlcache_jax.device.programs.layers import Layer
from vlcache_jax.models import load_config, rope
from vlcache_jax.models.decoder import SelfAttention
from vlcache_jax.reuse.shift import IMAGES, Moves, Shift, move

SLOTS = 12


def make_attention(directory, weight=None):
    """A layer's attention, with a bias where its family has one; `weight` is that of its key norm."""
    attention = drawn(lambda: SelfAttention(load_config(directory).text, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    if attention.config.qkv_bias:
        bias = attention.qkv_proj.bias  # longer than all the rest, as it may be
        bias[...] = jnp.asarray(20 * np.random.default_rng(1).standard_normal(bias.shape, np.float32))
    if weight is not None:
        attention.k_norm.scale[...] = jnp.asarray(weight)
    return attention


@pytest.mark.slow_for("5", "7")
@pytest.mark.parametrize(("size", "chunk"), [(5, 8), (9, 9), (7, 2), (20, 3)])
def test_keys_carry_what_is_not_finite_in_moved_values(checkpoints, monkeypatch, size, chunk):
    monkeypatch.setattr("vlcache_jax.reuse.shift._CHUNK", chunk)
    attention = make_attention(checkpoints("qwen3_vl"))
    text = attention.config
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
    moved = jax.jit(functools.partial(move, attention))
    new_k, new_v = moved(k, v, (np.zeros_like(change), change), moves)
    want_k, want_v = k.copy(), v.copy()
    want_k[3, 1, 2] = want_k[8, 0] = np.nan
    want_v[2, 1, 2] += largest
    want_v[3, 1, 2] = want_v[8, 0] = 0
    np.testing.assert_array_equal(new_k, want_k)
    np.testing.assert_array_equal(new_v, want_v)
    assert jnp.isfinite(new_v).all()


@pytest.mark.slow_for("qwen2_5_vl")
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_moved_keys_keep_the_length_that_they_had(checkpoints, family):
    directory = checkpoints(family)
    text = load_config(directory).text
    rng = np.random.default_rng(1)
    width = text.head_dim
    weight = rng.uniform(0.2, 3, width).astype(np.float32) if text.qk_norm else None
    attention = make_attention(directory, weight)
    shape = SLOTS, text.num_kv_heads, width
    raw, values = rng.normal(size=shape), rng.normal(size=shape).astype(np.float32)
    if text.qk_norm:
        raw = raw / np.sqrt(np.square(raw).mean(-1, keepdims=True)) * weight
    position = rng.integers(0, 50, (3, SLOTS)).astype(np.int32)
    turn = jax.jit(rope.text_rotation, static_argnums=(1, 2, 3, 4))
    cos, sin = map(np.asarray, turn(position, text.rope_theta, text.mrope_section, text.mrope_interleaved, jnp.float32))
    rotate = jax.jit(rope.rotate)
    keys = np.asarray(rotate(raw.astype(np.float32), cos, sin))
    change = np.zeros((IMAGES, *shape[1:]), np.float32)
    change[1] = rng.normal(size=shape[1:])
    image = np.arange(SLOTS, dtype=np.int32) % 2  # of image 0 nothing differs
    nothing = np.zeros(SLOTS, np.int32)
    shift = Shift(nothing[:0], np.arange(SLOTS, dtype=np.int32), position, image, nothing)
    moves = Moves(*shift.pack(0, SLOTS), np.int32(1), np.int32(SLOTS))
    moved, moved_values = map(
        np.asarray, jax.jit(functools.partial(move, attention))(keys, values, (change, change), moves)
    )
    np.testing.assert_array_equal(moved[::2], keys[::2])
    np.testing.assert_allclose(moved_values[1::2], values[1::2] + change[1], rtol=1e-6)
    bias = 0 if text.qk_norm else np.asarray(attention.qkv_proj.bias[...])[:, -2]
    new = raw[1::2] - bias + change[1]
    if text.qk_norm:
        normed = np.asarray(rotate(moved, cos, -sin), np.float64) / weight
        np.testing.assert_allclose(np.square(normed).mean(-1), 1, rtol=1e-5)
        new /= np.sqrt(np.square(new / weight).mean(-1, keepdims=True))
    else:
        assert np.abs(bias).max() > 10
        new *= np.linalg.norm(raw[1::2] - bias, axis=-1, keepdims=True) / np.linalg.norm(new, axis=-1, keepdims=True)
    new += bias
    want = rotate(new.astype(np.float32), cos[1::2], sin[1::2])
    np.testing.assert_allclose(moved[1::2], want, rtol=1e-5, atol=1e-5)


def test_lengths_are_kept_beside_a_long_bias_in_bfloat16(checkpoints):
    """What rounding to the pool's dtype leaves of a key beside a bias ten times as long."""
    directory = checkpoints("qwen2_5_vl")
    text = load_config(directory).text
    attention = make_attention(directory)
    rng = np.random.default_rng(3)
    shape = SLOTS, text.num_kv_heads, text.head_dim
    bias = np.asarray(attention.qkv_proj.bias[...])[:, -2]
    own = rng.normal(size=shape)
    position = rng.integers(0, 50, (3, SLOTS)).astype(np.int32)
    turn = jax.jit(rope.text_rotation, static_argnums=(1, 2, 3, 4))
    turn = functools.partial(turn, position, text.rope_theta, text.mrope_section, text.mrope_interleaved)
    keys = jax.jit(rope.rotate)((own + bias).astype(jnp.bfloat16), *turn(jnp.bfloat16))
    change = np.zeros((IMAGES, *shape[1:]), np.float32)
    change[0] = 2 * rng.normal(size=shape[1:])
    nothing = np.zeros(SLOTS, np.int32)
    shift = Shift(nothing[:0], np.arange(SLOTS, dtype=np.int32), position, nothing, nothing)
    moves = Moves(*shift.pack(0, SLOTS), np.int32(1), np.int32(SLOTS))
    moved, _ = jax.jit(functools.partial(move, attention))(keys, keys, (change, change), moves)
    cos, sin = map(np.asarray, turn(jnp.float32))
    found = np.asarray(jax.jit(rope.rotate)(np.asarray(moved, np.float32), cos, -sin)) - bias
    had, has, free = (np.linalg.norm(part, axis=-1) for part in (own, found, own + change[0]))
    np.testing.assert_allclose(has, had, rtol=0.1)
    assert (free > 1.2 * had).all()  # else nothing is shown


def test_channels_without_weight_and_keys_without_length_stay_finite(checkpoints):
    """A norm with zeros tells nothing of these channels, and nothing is divided by them."""
    directory = checkpoints("qwen3_vl")
    text = load_config(directory).text
    weight = np.ones(text.head_dim, np.float32)
    weight[:3] = 0
    attention = make_attention(directory, weight)
    shape = 3, text.num_kv_heads, text.head_dim
    raw = np.random.default_rng(2).normal(size=shape).astype(np.float32) * weight
    raw[1] = 0
    change = np.zeros((IMAGES, *shape[1:]), np.float32)
    change[0, :, -1] = 2
    change[2] = -raw[2]
    slot, image, at = np.arange(3, dtype=np.int32), np.array([0, 1, 2], np.int32), np.zeros((3, 3), np.int32)
    shift = Shift(slot[:0], slot, at, image, np.zeros(3, np.int32))
    moves = Moves(*shift.pack(0, 3), np.int32(1), np.int32(3))
    moved, _ = jax.jit(functools.partial(move, attention))(raw, raw, (change, change), moves)
    assert np.isfinite(moved).all()
    new = raw[0] + change[0]
    had, has = (np.sqrt(np.square(part).sum(-1, keepdims=True)) for part in (raw[0], new))
    np.testing.assert_allclose(moved[0], new * had / has, rtol=1e-5)
    np.testing.assert_array_equal(moved[1:], 0)


@pytest.mark.parametrize("family", ["qwen3_vl", pytest.param("qwen2_5_vl", marks=pytest.mark.slow)])
def test_rows_are_projected_once(checkpoints, family):
    """What moves needs K, V of the rows before attention, which the layer computes too: the compiler sees one."""
    with LLM(checkpoints(family), **SIZES) as llm:
        programs = llm.service.device.runner.programs
        size = programs.shapes.buckets.rows[0]
        plain, moving = (
            programs._lower(Layer(size, size, False, moves)).compile().as_text().count(" dot(")
            for moves in (False, True)
        )
    assert plain > 0
    assert moving == plain + 2  # the means of K and of V
