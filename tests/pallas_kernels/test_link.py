"""Linking against numpy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vlcache_jax.models.rope import text_rotation
from vlcache_jax.pallas_kernels import CODECS, link
from vlcache_jax.pallas_kernels.cases import CODED_LINK_CASES, LINK_CASES, array, encode
from vlcache_jax.pallas_kernels.link import xla
from vlcache_jax.pallas_kernels.link.codec import find

S, K, D = 37, 3, 8
jitted = jax.jit(link, static_argnames=("layer", "codec"))


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def arrays(tokens, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    pool = [array(rng.normal(size=(S, K, D)), dtype) for _ in "kv"]
    stored = array(rng.normal(size=(1, 2, tokens, K, D)), dtype)
    angle = rng.uniform(0, 6, (tokens, 1, D // 2))
    return *pool, [[stored]], array(np.cos(angle), dtype), array(np.sin(angle), dtype)


@pytest.mark.slow_for("256")
@pytest.mark.parametrize("size", [xla.LARGE // 2, xla.LARGE])
def test_images_together_are_those_one_by_one(size):
    """Small ones are concatenated, large ones written alone."""
    count = 3
    pool = np.zeros((count * size, K, D), np.float32)
    data, cos, sin = zip(*(arrays(size, seed=seed)[2:] for seed in range(count)), strict=True)
    slot = np.random.default_rng(0).permutation(len(pool)).astype(np.int32)
    slot[5] = len(pool)
    images = [image for [image] in data]
    found = jax.jit(link)(pool, pool, images, slot, np.concatenate(cos), np.concatenate(sin))
    k, v = pool, pool
    for i in range(count):
        k, v = jax.jit(link)(k, v, data[i], slot[i * size : (i + 1) * size], cos[i], sin[i])
    for got, wanted in zip(found, (k, v), strict=True):
        np.testing.assert_array_equal(got, wanted)
        assert (np.asarray(got) != 0).any((1, 2)).sum() == len(pool) - 1


def test_the_worked_example():
    """Width 2, frequency 1: the key (1, 0) at position 5 is (cos 5, sin 5); turned from 3 by 2 more it is the same."""

    @jax.jit
    def turned(key, position):
        pool = jnp.zeros((1, 1, 2))
        cos, sin = text_rotation(jnp.full((3, 1), position), 1.0, (1, 0, 0), False, jnp.float32)
        data = jnp.stack([jnp.asarray(key, jnp.float32).reshape(1, 1, 2), pool])[None]
        return link(pool, pool, [[data]], jnp.zeros(1, jnp.int32), cos, sin)[0].ravel()

    once = turned(np.float32([1, 0]), 5)
    np.testing.assert_allclose(once, [0.28366, -0.95892], atol=1e-5)
    np.testing.assert_allclose(turned(turned(np.float32([1, 0]), 3), 2), once, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": [[zeros(1, 2, 5, K, D)]]}, "buffers of images must hold at least 6 tokens, got 5"),
        ({"images": [[zeros(6, K, D)]]}, "buffers of images must be"),
        ({"images": [[zeros(1, 2, 6, K, D, dtype=jnp.bfloat16)]]}, "buffers of images must be"),
        ({"layer": 1}, "layer must be .* below 1, got 1"),
        ({"layer": -1}, "layer must be .* below 1, got -1"),
        ({"bias": zeros(K, D)}, "bias and weight must be None without a codec"),
        ({"slot": zeros(6)}, "slot must be int32"),
        ({"cos": zeros(6, 1, D)}, "cos must be"),
        ({"v_pool": zeros(S + 1, K, D)}, "k_pool and v_pool must have the same shape"),
    ],
)
def test_bad_arguments(change, message):
    names = ("k_pool", "v_pool", "images", "cos", "sin")
    arguments = dict(zip(names, arrays(6), strict=True)) | {"slot": np.arange(6, dtype=np.int32)} | change
    with pytest.raises(ValueError, match=message):
        link(**arguments)


# Codecs.


def coded_arrays(codec, tokens, heads, width, dtype, bias=None, weight=None, seed=0):
    """(pools, stored keys and values, their data as the last of two layers, slots, cos, sin).

    The slots are those of a pool of 64, every fifth of them beyond it.
    """
    rng = np.random.default_rng(seed)
    pool = [array(rng.normal(size=(64, heads, width)), dtype) for _ in "kv"]
    stored = rng.normal(size=(2, tokens, heads, width)).astype(np.float32)
    if weight is not None:
        stored[0] *= np.asarray(weight, np.float32)
    if bias is not None:
        stored[0] += np.asarray(bias, np.float32)
    return pool, stored, data_of(codec, stored, bias, weight), *places(rng, tokens, width, dtype)


def places(rng, tokens, width, dtype):
    slot = rng.permutation(64)[:tokens]
    slot[::5] += 64
    angle = rng.uniform(0, 6, (tokens, 1, width // 2))
    return array(slot, jnp.int32), *(array(f(angle), dtype) for f in (np.cos, np.sin))


@functools.partial(jax.jit, static_argnums=0)
def data_of(codec, stored, bias=None, weight=None):
    buffers = map(jnp.stack, zip(codec.encode(stored[0], bias, weight), codec.encode(stored[1]), strict=True))
    return [[jnp.stack([jnp.zeros_like(buffer), buffer]) for buffer in buffers]]


def constant(kind, heads, width, seed=1):
    rng = np.random.default_rng(seed)
    if kind == "bias":
        return {"bias": array(rng.normal(0, 20, (heads, width)), jnp.float32)}
    weight = rng.normal(1, 0.3, width) * (np.arange(width) % 7 > 0)
    return {"weight": array(weight, jnp.float32)} if kind == "weight" else {}


@functools.partial(jax.jit, static_argnums=0)
def decode(codec, buffers, bias=None, weight=None):
    return codec.decode(*buffers, bias, weight)


def wanted(codec, pool, data, slot, cos, sin, bias=None, weight=None):
    """In float64, from decoded keys and values rounded to the pool's dtype."""
    k, v = (
        np.asarray(decode(codec, [np.asarray(buffer)[1, half] for buffer in data[0]], *c))
        .astype(pool[0].dtype)
        .astype(np.float64)
        for half, c in enumerate(((bias, weight), ()))
    )
    (a, b), c, s = np.split(k, 2, -1), *(np.asarray(x, np.float64) for x in (cos, sin))
    turned = np.concatenate([a * c - b * s, b * c + a * s], -1)
    finite = np.isfinite(v)
    out = [np.array(x, np.float64) for x in pool]
    slot = np.asarray(slot)
    stays = slot < len(pool[0])
    out[0][slot[stays]] = np.where(finite, turned, np.nan)[stays]
    out[1][slot[stays]] = np.where(finite, v, 0)[stays]
    return out


KERNELS = [
    *(("xla", dtype) for dtype in ("float32", "bfloat16", "float16")),
    # In short, test_mosaic_gpu.py has the cases that a GPU is checked with.
    *(
        pytest.param("mosaic_gpu_interpreted", dtype, marks=pytest.mark.interpreted)
        for dtype in ("bfloat16", "float16")
    ),
]


@pytest.mark.slow_for("float16", "bfloat16", "int8", "None", "weight")
@pytest.mark.parametrize(("implementation", "dtype"), KERNELS)
@pytest.mark.parametrize("kind", [None, "bias", "weight"])
@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_what_is_coded_is_linked_as_its_decoded_values(codec, kind, implementation, dtype):
    constants = constant(kind, 2, 64)
    pool, _, *args = coded_arrays(codec, 24, 2, 64, dtype, **constants)
    run = functools.partial(link, layer=1, codec=codec.name, implementation=implementation, **constants)
    k, v = jax.jit(run)(*pool, *args)
    want_k, want_v = wanted(codec, pool, *args, **constants)
    np.testing.assert_array_equal(np.asarray(v, np.float64), want_v)
    rounding = float(jnp.finfo(dtype).eps)
    times = 3 if implementation == "xla" else 1  # that the key is rounded
    atol = times * rounding * np.abs(want_k).max()
    np.testing.assert_allclose(np.asarray(k, np.float64), want_k, atol=atol, rtol=0)


@pytest.mark.slow_for("int4", "mosaic_gpu")
@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu_interpreted"])
@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_flaws_of_what_is_coded(codec, implementation):
    """A value that is not finite, or that float16 does not hold, is 0, and its key NaN; the others are as they were."""
    rng = np.random.default_rng(2)
    stored = rng.normal(size=(2, 16, 4, 64)).astype(np.float32)
    places_ = places(rng, 16, 64, jnp.float16)
    pool = [zeros(64, 4, 64, dtype=np.float16)] * 2
    run = jax.jit(functools.partial(link, layer=1, codec=codec.name, implementation=implementation))
    clean = [np.asarray(x, np.float64) for x in run(*pool, data_of(codec, stored), *places_)]
    stored[1, 1, 2, 5] = np.inf
    stored[1, 2, 0, 40] = np.nan
    stored[1, 3, 3] = 70000 + rng.uniform(0, 9000, 64)
    k, v = (np.asarray(x, np.float64) for x in run(*pool, data_of(codec, stored), *places_))
    slot = np.asarray(places_[0])
    hit = np.isnan(k)
    for token, head, channels in ((1, 2, slice(0, 32)), (2, 0, slice(32, 64)), (3, 3, slice(0, 64))):
        place = slot[token], head, channels if codec.name == "int4" or token == 3 else slice(None)
        assert hit[place].all()
        assert (v[place] == 0).all()
        hit[place] = False
        for x, was in zip((k, v), clean, strict=True):
            x[place] = was[place]
    assert not hit.any()
    np.testing.assert_array_equal(k, clean[0])
    np.testing.assert_array_equal(v, clean[1])


@pytest.mark.slow_for("int8", "16", "32", "128")
@pytest.mark.parametrize("width", [16, 32, 64, 128])
@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_the_error_of_a_code_is_half_a_step(codec, width):
    rng = np.random.default_rng(width)
    x = (rng.normal(size=(60, 3, width)) * 10 ** rng.uniform(-5, 3, (60, 3, 1))).astype(np.float32)
    x[:4] = np.array([600.3, 600, 0, -1e-9], np.float32)[:, None, None]  # constant, far from 0
    x[4] = 600 + rng.uniform(0, 0.1, (3, width))
    coded = encode(codec, x)
    assert [3 * buffer.shape[2] for buffer in coded] == [*codec.buffers(3, width)]
    decoded = np.asarray(decode(codec, coded), np.float64)
    group = min(width, codec.shares or width)
    grouped, error = (y.reshape(60, 3, -1, group) for y in (x.astype(np.float64), np.abs(decoded - x)))
    low = grouped.min(-1, keepdims=True)
    spread = grouped.max(-1, keepdims=True) - low + np.abs(low) * 2.0**-10 + 2.0**-24  # the zero is rounded down
    steps = 2**codec.bits - 1
    step = spread / steps * (1 + 2.0**-10) + 2.0**-24  # and the scale up
    assert (error <= step / 2 + np.abs(grouped) * 2.0**-22).all()
    np.testing.assert_array_equal(decoded[[1, 2]], x[[1, 2]])


def test_what_a_code_takes():
    assert CODECS["int8"].buffers(8, 128) == (1024, 32)
    assert CODECS["int4"].buffers(8, 128) == (512, 128)
    assert {name: sum(codec.buffers(8, 128)) * 8 / 1024 for name, codec in CODECS.items()} == {"int8": 8.25, "int4": 5}
    low, high = np.zeros((1, 1, 64), np.float32), np.zeros((1, 1, 64), np.float32)
    low[0, 0, 3], high[0, 0, 3 + 32] = 15, 15  # paired by rotation: one byte
    assert np.asarray(encode(CODECS["int4"], low)[0])[0, 0, 3] == 15
    assert np.asarray(encode(CODECS["int4"], high)[0])[0, 0, 3] == 15 << 4
    for name, width in (("int4", 48), ("int4", 15), ("int8", 7)):
        with pytest.raises(ValueError, match=f"head width must be even.* for codec '{name}', got {width}"):
            CODECS[name].buffers(1, width)
    with pytest.raises(ValueError, match=r"codec must be one of \('int8', 'int4'\), got 'fp8'"):
        find("fp8")


@pytest.mark.slow_for("int8")
@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38, -7e4])
def test_what_a_code_does_not_hold_decodes_to_what_is_not_finite(codec, value):
    x = np.random.default_rng(0).normal(size=(2, 2, 64)).astype(np.float32)
    x[1, 1, 40] = value
    for weight in (None, zeros(64)):
        decoded = np.asarray(decode(codec, encode(codec, x, None, weight), None, weight))
        if weight is not None and np.isfinite(value):
            np.testing.assert_array_equal(decoded, 0)  # as the channel is
        else:
            assert not np.isfinite(decoded[1, 1, 40])
            assert np.isfinite(decoded[0]).all()
            assert np.isfinite(decoded[1, 0]).all()


@pytest.mark.slow_for("int4")
@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_the_model_s_own_constants_cost_nothing_where_they_are_taken_out(codec):
    rng = np.random.default_rng(0)
    x = np.round(rng.normal(0, 1.5, (200, 4, 128)) * 2**12).astype(np.float32) / 2**12  # so that x + bias is exact
    bias = np.zeros((4, 128), np.float32)
    bias[:, rng.permutation(128)[:8]] = np.round(rng.normal(0, 1, (4, 8)) * 2**6)
    bias *= np.float32(2.0 ** np.round(np.log2(600 / np.linalg.norm(bias))))
    assert 400 < np.linalg.norm(bias) < 900

    def error(x, without):
        there_and_back = jax.jit(lambda x: codec.decode(*codec.encode(x, without), without))
        return np.asarray(there_and_back(x), np.float64) - x

    plain, taken_out, left_in = error(x, None), error(x + bias, jnp.asarray(bias)), error(x + bias, None)
    np.testing.assert_allclose(taken_out, plain, atol=1e-4)
    assert np.sqrt((left_in**2).mean()) > 10 * np.sqrt((taken_out**2).mean())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codec": "fp8"}, "codec must be one of"),
        (
            {"images": [[zeros(1, 2, 6, 3, size, dtype=np.uint8) for size in (8, 5)]]},
            "buffers of images must be uint8 of shape",
        ),
        (
            {"images": [[zeros(1, 2, 6, 3, size, dtype=np.int8) for size in (8, 4)]]},
            "buffers of images must be uint8 of shape",
        ),
        ({"bias": zeros(D)}, "bias must be floats of shape"),
        ({"weight": zeros(D, dtype=np.int32)}, "weight must be floats of shape"),
    ],
)
def test_bad_arguments_of_what_is_coded(change, message):
    k_pool, v_pool, _, cos, sin = arrays(6)
    arguments = {"k_pool": k_pool, "v_pool": v_pool, "cos": cos, "sin": sin, "codec": "int8"}
    arguments |= {"images": [[zeros(1, 2, 6, 3, size, dtype=np.uint8) for size in (8, 4)]]}
    arguments |= {"slot": np.arange(6, dtype=np.int32)}
    jitted(**arguments)
    with pytest.raises(ValueError, match=message):
        link(**arguments | change)


# What is kept on the device.


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in (*LINK_CASES, *CODED_LINK_CASES) if case.kept], ids=lambda c: c.name)
def test_what_is_kept_on_the_device_is_linked_like_what_comes(case):
    args = case.inputs()
    want = jax.jit(functools.partial(link, **case.options()))(*args)
    for got, wanted_ in zip(case.run(args, "xla"), want, strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(wanted_, np.float32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": [[]]}, "buffers of images must be float32 of shape .*got none"),
        (
            {"images": [[zeros(1, 2, 16, K, D, dtype=jnp.bfloat16)]]},
            "buffers of images must be float32 of shape .*got bfloat16",
        ),
        ({"images": [[zeros(16, K, D)]]}, "buffers of images must be"),
        ({"images": [[zeros(1, 2, 16, K, D)]] * 2}, "source must be .* for exactly one image, got int32 .* for 2"),
        ({"codec": "int8"}, r"buffers of images must be uint8 of shape \[G, 2, C, 3, 8\] and \[G, 2, C, 3, 4\]"),
        ({"source": zeros(7, dtype=np.int32)}, r"source must be int32 of shape \[6\]"),
        ({"source": zeros(6)}, "source must be int32"),
        ({"cos": zeros(6, 1, D)}, "cos must be"),
        ({"bias": zeros(K, D)}, "bias and weight must be None without a codec"),
    ],
)
def test_bad_arguments_of_what_is_kept(change, message):
    k_pool, v_pool, _, cos, sin = arrays(6)
    index = np.arange(6, dtype=np.int32)
    arguments = {"k_pool": k_pool, "v_pool": v_pool, "cos": cos, "sin": sin, "slot": index, "source": index}
    arguments |= {"images": [[np.ones((1, 2, 16, K, D), np.float32)]]}
    assert (np.asarray(jitted(**arguments)[1])[:6] == 1).all()
    with pytest.raises(ValueError, match=message):
        link(**arguments | change)
