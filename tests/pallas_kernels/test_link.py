"""Linking against numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vlcache_jax.models.rope import text_rotation
from vlcache_jax.pallas_kernels import link

S, K, D = 37, 3, 8


def arrays(tokens, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    pool = [jnp.asarray(rng.normal(size=(S, K, D)), dtype) for _ in "kv"]
    stored = [jnp.asarray(rng.normal(size=(tokens, K, D)), dtype) for _ in "kv"]
    angle = rng.uniform(0, 6, (tokens, 1, D // 2))
    return *pool, *stored, jnp.asarray(np.cos(angle), dtype), jnp.asarray(np.sin(angle), dtype)


@pytest.mark.parametrize("slots", [range(5, 11), [30, 2, 36, 17, 0, 9], [3, S, S + 1, 4, S + 5, 7], range(S, S + 6)])
def test_tokens_go_to_their_slots_rotated(slots):
    k_pool, v_pool, k_raw, v, cos, sin = arrays(6)
    slot = jnp.asarray(slots, jnp.int32)
    k, new_v = jax.jit(link)(k_pool, v_pool, k_raw, v, slot, cos, sin)
    expected_k, expected_v = np.array(k_pool), np.array(v_pool)
    for i, s in enumerate(slots):
        if s < S:
            a, b = np.split(np.asarray(k_raw[i]), 2, axis=-1)
            c, n = np.asarray(cos[i]), np.asarray(sin[i])
            expected_k[s] = np.concatenate([a * c - b * n, b * c + a * n], axis=-1)
            expected_v[s] = np.asarray(v[i])
    np.testing.assert_allclose(k, expected_k, atol=1e-6)
    np.testing.assert_array_equal(new_v, expected_v)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_keys_carry_what_is_not_finite_in_values(dtype):
    k_pool, v_pool, k_raw, v, cos, sin = arrays(6, dtype)
    slot = jnp.asarray([3, S, 8, 9, 20, 30], jnp.int32)
    k_raw = k_raw.at[0, 2, 5].set(jnp.inf)
    broken = v.at[1].set(jnp.nan).at[2, 1, 4].set(-jnp.inf).at[4, 0].set(jnp.nan)
    want_k, want_v = jax.jit(link)(k_pool, v_pool, k_raw, v, slot, cos, sin)
    k, new_v = jax.jit(link)(k_pool, v_pool, k_raw, broken, slot, cos, sin)
    k, new_v, want_k, want_v = (np.array(x, np.float32) for x in (k, new_v, want_k, want_v))
    places = (8, 1, 4), (20, 0)
    for place in places:
        want_k[place], want_v[place] = np.nan, 0
    np.testing.assert_array_equal(k, want_k)
    np.testing.assert_array_equal(new_v, want_v)
    assert np.isfinite(new_v).all()


@pytest.mark.parametrize(("slots", "message"), [([1, 5, S, S, 5, 2], "got 5 more than once"), ([0, -1, 3], "got -1")])
def test_slots_are_checked_where_they_need_not_be_waited_for(slots, message):
    k_pool, v_pool, k_raw, v, cos, sin = arrays(len(slots))
    with pytest.raises(ValueError, match=f"slot must .*{message}"):
        link(k_pool, v_pool, k_raw, v, np.array(slots, np.int32), cos, sin)
    good = np.array([7, S + 1, S + 1, *range(20, 20 + len(slots) - 3)], np.int32)
    k, new_v = link(k_pool, v_pool, k_raw, v, good, cos, sin)
    np.testing.assert_array_equal(new_v[7], v[0])
    assert (np.asarray(k) != np.asarray(k_pool)).any((1, 2)).sum() == len(slots) - 2


def test_the_worked_example():
    """Width 2, frequency 1: the key (1, 0) at position 5 is (cos 5, sin 5); turned from 3 by 2 more it is the same."""

    def turned(key, position):
        pool = jnp.zeros((1, 1, 2))
        cos, sin = text_rotation(jnp.full((3, 1), position), 1.0, (1, 0, 0), False, jnp.float32)
        return link(
            pool, pool, jnp.asarray(key, jnp.float32).reshape(1, 1, 2), pool, jnp.zeros(1, jnp.int32), cos, sin
        )[0]

    once = turned([1, 0], 5).ravel()
    np.testing.assert_allclose(once, [0.28366, -0.95892], atol=1e-5)
    np.testing.assert_allclose(turned(turned([1, 0], 3), 2).ravel(), once, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_raw": jnp.zeros((5, K, D))}, "k_raw must be"),
        ({"v": jnp.zeros((6, K, D), jnp.bfloat16)}, "v must be"),
        ({"slot": jnp.zeros(6)}, "slot must be int32"),
        ({"cos": jnp.zeros((6, 1, D))}, "cos must be"),
        ({"v_pool": jnp.zeros((S + 1, K, D))}, "k_pool, v_pool must have one shape"),
    ],
)
def test_bad_arguments(change, message):
    names = ("k_pool", "v_pool", "k_raw", "v", "cos", "sin")
    arguments = dict(zip(names, arrays(6), strict=True)) | {"slot": jnp.arange(6, dtype=jnp.int32)} | change
    with pytest.raises(ValueError, match=message):
        link(**arguments)
