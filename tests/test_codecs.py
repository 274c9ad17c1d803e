"""Keys and values stored by a codec, through the public engine; pallas_kernels/test_link.py has the codecs."""

from __future__ import annotations

import contextlib
import functools
import re

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import vlcache_jax.service
from tests.helper import SIZES, user
from vlcache_jax import LLM, CacheConfig, SamplingParams
from vlcache_jax.cache import config
from vlcache_jax.cache.record import Why
from vlcache_jax.device.programs.base import Shapes
from vlcache_jax.pallas_kernels import CODECS
from vlcache_jax.testing import make_checkpoint

FORCED = "the quick brown fox"
# Most nats between next-token distributions with coded records and with those of the model's dtype, all of them linked;
# some times of what is found, 4e-7 to 7e-7 and 9e-5 to 2e-4.
MAX_KL = {"int8": 3e-6, "int4": 6e-4}


def large_bias(tensors):
    """A key bias of norm 600 in every layer, as published Qwen2.5-VL has them.

    It is in the channel that turns slowest, about 1e-3 of a turn over a prompt: what it adds to a query's scores is
    nearly the same for all keys, and softmax does not see it. So the model answers as without it. But where it stays in
    what is coded, a code's step is some units, in channels whose values are of the order of one.
    """
    for name, tensor in tensors.items():
        if re.search(r"self_attn\.k_proj\.bias$", name):
            tensor.reshape(2, 16)[:, 7] = 600 / np.sqrt(2)  # of both heads; the pair is channels 7 and 15


def zero_channel(tensors):
    """A channel of keys that the norm makes zero."""
    for name, tensor in tensors.items():
        if name.endswith("k_norm.weight"):
            tensor[3] = 0


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(family, plant=None, **text) -> the directory of a tiny checkpoint of two layers, after `plant(tensors)`."""
    root = tmp_path_factory.mktemp("codecs")

    @functools.cache
    def make(family, plant=None, **text):
        name = f"{family}-{plant and plant.__name__}-{len(list(root.iterdir()))}"
        directory = make_checkpoint(root / name, family, seed=7, text={"num_hidden_layers": 2, **text})
        if plant is not None:
            tensors = load_file(directory / "model.safetensors")
            plant(tensors)
            save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory

    return make


@pytest.fixture(scope="module")
def opened():
    """(directory, codec="auto", dtype="float32") -> its engine, with an empty cache; opened once."""
    with contextlib.ExitStack() as stack:
        llms = functools.cache(lambda *arguments: stack.enter_context(open_llm(*arguments)))

        def get(directory, codec="auto", dtype="float32"):
            llm = llms(directory, codec, dtype)
            llm.reset_mm_cache()
            return llm

        yield get


def open_llm(directory, codec="auto", dtype="float32"):
    # Half of the layers, and half of the bytes: the same slots, so that layers are compiled once for all tests.
    sizes = SIZES | {"dtype": dtype, "kv_cache_bytes": SIZES["kv_cache_bytes"] // 2}
    return LLM(directory, **sizes, cache=CacheConfig(codec=codec), enable_prefix_caching=False, use_tqdm=False)


@pytest.fixture(scope="module")
def image(textured_image):
    return textured_image(90, 120)


def score(llm, *parts, reuse):
    [found] = llm.score(user(*parts), [FORCED], reuse=reuse, keep_logits=True, use_tqdm=False)
    llm.cache.flush()
    return found


def report(found):
    [one] = found.cache.images
    return one


def kv_records(llm):
    return [record for record in llm.service.cache.store.tier.records() if record.meta.context is not None]


def linked(llm, image):
    """The score with an image as another context left it."""
    score(llm, "Something else ", image, "?", reuse="exact")
    found = score(llm, "What is ", image, "?", reuse=0)
    assert report(found).match == "approximate"
    assert np.isfinite(found.logits).all()
    return found


def log_probabilities(llm, image):
    """Of the next tokens, with an image as another context left it [n, V]."""
    found = linked(llm, image)
    wide = found.logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def divergence(p, q):
    return (np.exp(p) * (p - q)).sum(-1).mean()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("family", "plant"), [("qwen2_5_vl", None), pytest.param("qwen3_vl", zero_channel, marks=pytest.mark.slow)]
)
def test_exact_reuse_never_links_what_is_coded(opened, made, image, monkeypatch, family, plant, codec):
    llm = opened(made(family, plant), codec)
    prompt = "What is ", image, "?"
    cold = score(llm, *prompt, reuse="off")
    first = score(llm, *prompt, reuse="exact")
    assert (report(first).match, report(first).why) == ("miss", Why.unknown_image)
    [record], stats = kv_records(llm), llm.cache.stats()
    saved = []
    monkeypatch.setattr(llm.service.cache.writer, "kv", lambda parts, layers: saved.extend(parts))
    again = score(llm, *prompt, reuse="exact")
    assert (report(again).match, report(again).kv, report(again).why) == ("miss", "none", Why.coded)
    assert report(again).encoder == "host"
    assert report(again).recomputed == (report(again).tokens,) * 2
    assert (again.cache.exact, again.cache.approximate_tokens) == (True, 0)
    for found in (first, again):
        np.testing.assert_array_equal(found.logits, cold.logits)
    assert not saved
    assert kv_records(llm) == [record]
    now = llm.cache.stats()
    assert (now.stored, now.hits_exact, now.misses - stats.misses) == (stats.stored, stats.hits_exact, 1)


@pytest.mark.slow
def test_exact_answers_are_those_of_a_cold_run(opened, made, image):
    llm = opened(made("qwen2_5_vl"), "int8")
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

    def answers(reuse):
        prompts = [user("What is ", image, "?"), user("And what ", image, "?"), user("What is ", image, "?")]
        return [output.outputs[0].token_ids for output in llm.chat(prompts, greedy, reuse=reuse, use_tqdm=False)]

    cold = answers("off")
    assert [answers("exact") for _ in range(2)] == [cold, cold]
    answers(0)
    assert answers("exact") == cold


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("family", "plant"), [("qwen2_5_vl", None), pytest.param("qwen3_vl", zero_channel, marks=pytest.mark.slow)]
)
def test_approximate_reuse_links_what_is_coded(opened, made, image, family, plant, codec):
    llm = opened(made(family, plant), codec)
    score(llm, "What is ", image, "?", reuse="exact")
    [record], stats = kv_records(llm), llm.cache.stats()
    for before, why in (("What is ", Why.coded), ("Look at ", Why.other_context)):
        for ratio in (0, 0.3):
            found = score(llm, before, image, "?", reuse=ratio)
            rows = int(ratio * report(found).tokens)
            assert (report(found).match, report(found).kv, report(found).why) == ("approximate", "host", why)
            assert report(found).recomputed == (rows,) * 2
            assert (found.cache.exact, found.cache.approximate_tokens) == (False, report(found).tokens - rows)
    assert kv_records(llm) == [record]
    now = llm.cache.stats()
    assert (now.stored, now.hits_approximate - stats.hits_approximate) == (stats.stored, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "dtype", "bits", "less"),
    [
        ("int8", "float32", 8.25, 1.9),
        ("int4", "bfloat16", 5, 3.1),
        pytest.param("int8", "bfloat16", 8.25, 1.9, marks=pytest.mark.thorough),
        pytest.param("int4", "float32", 5, 3.1, marks=pytest.mark.thorough),
    ],
)
def test_bytes_do_not_depend_on_the_engine(opened, made, image, codec, bits, less, dtype):
    llm = opened(made("qwen3_vl", head_dim=128), codec, dtype)
    found = linked(llm, image)
    [record] = kv_records(llm)
    values = 2 * 2 * record.meta.padded * 2 * 128  # layers, K and V, tokens, heads, width
    assert (
        sum(buffer.nbytes for buffer in record.buffers)
        == record.meta.nbytes
        == report(found).bytes_moved
        == values * bits / 8
    )
    assert values * 2 / report(found).bytes_moved >= less


@pytest.mark.parametrize(("codec", "transfers"), [("auto", 2), ("int8", 1), ("int4", 1)])
def test_saved_kv_comes_in_few_transfers(opened, made, image, monkeypatch, codec, transfers):
    """Of a layer: keys and values, or all that is coded."""
    llm, arrays = opened(made("qwen2_5_vl"), codec), []
    writer, enqueue = llm.service.cache.writer, llm.service.cache.writer._enqueue
    monkeypatch.setattr(writer, "_enqueue", lambda own, *rest: (arrays.append(len(own)), enqueue(own, *rest)))
    score(llm, "Never ", image, " before?", reuse="exact")
    assert arrays == [1, 2 * transfers]  # encoder rows, and two layers


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("plant", [None, large_bias], ids=["drawn", "large"])
def test_the_bias_of_keys_costs_nothing(opened, made, image, plant, codec):
    directory = made("qwen2_5_vl", plant)
    plain, coded = (log_probabilities(opened(directory, one), image) for one in ("auto", codec))
    assert 0 < divergence(plain, coded) < MAX_KL[codec]


@pytest.mark.slow_for("int4")
@pytest.mark.parametrize("codec", CODECS)
def test_a_bias_that_stays_in_costs_much(opened, made, image, monkeypatch, codec):
    directory = made("qwen2_5_vl", large_bias)
    plain = log_probabilities(opened(directory), image)
    monkeypatch.setattr(Shapes, "constants", lambda self, text=None: [(None, None)] * self.config.text.num_layers)
    with open_llm(directory, codec) as llm:
        assert divergence(plain, log_probabilities(llm, image)) > 100 * MAX_KL[codec]


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
def test_a_channel_that_the_norm_makes_zero(opened, made, image, codec):
    directory = made("qwen3_vl", zero_channel)
    llm = opened(directory, codec)
    plain, coded = log_probabilities(opened(directory), image), log_probabilities(llm, image)
    assert 0 < divergence(plain, coded) < MAX_KL[codec]
    [record], own = kv_records(llm), CODECS[codec]
    meta, decode, pairs = record.meta, jax.jit(own.decode), jax.jit(own.pairs)
    assert meta.buffers == own.buffers(2, 24)
    for layer, (_, weight) in enumerate(llm.service.device.runner.constants):
        assert weight[3] == 0
        buffers = [buffer[layer, 0].reshape(meta.padded, 2, -1) for buffer in record.buffers]
        stored = np.asarray(decode(*buffers))[: meta.tokens]
        scales = np.asarray(pairs(buffers[1]), np.float32)[: meta.tokens, :, 0, 0]
        assert (np.abs(stored[..., 3]) <= 0.51 * scales).all()  # 0, as near as codes come
        assert not np.asarray(decode(*buffers, weight=weight))[: meta.tokens, :, 3].any()


@pytest.mark.parametrize("codec", CODECS)
def test_damage_is_found(opened, made, image, codec):
    llm = opened(made("qwen2_5_vl"), codec)
    for buffer in range(2):
        for half in range(2):
            llm.reset_mm_cache()
            score(llm, "What is ", image, "?", reuse="exact")
            [record] = kv_records(llm)
            codes, scales = (own[1, half] for own in record.buffers)
            tokens = record.meta.tokens
            assert tokens < record.meta.padded
            codes[tokens, 0] ^= 1  # padding
            scales[-1, -1] ^= 1
            assert llm.cache.verify() == []
            corrupt = llm.cache.stats().corrupt
            if buffer:
                scales[tokens - 1, -1] ^= 1
            else:
                codes[0, 5] ^= 1
            assert llm.cache.verify() == [record.meta.name]
            assert llm.cache.stats().corrupt == corrupt + 1
            found = score(llm, "What is ", image, "?", reuse=0)
            assert (report(found).match, report(found).why) == ("miss", Why.corrupt)


@pytest.mark.parametrize("value", [np.nan, 1e30], ids=["nan", "beyond float16"])
@pytest.mark.parametrize("codec", CODECS)
def test_scales_that_are_not_finite_are_not_kept(opened, made, image, monkeypatch, codec, value):
    llm = opened(made("qwen2_5_vl"), codec)
    cold = score(llm, "What is ", image, "?", reuse="off")
    kept = llm.service.engine._prefiller.copies
    before, save = llm.cache.stats(), kept.save
    with monkeypatch.context() as context:
        context.setattr(
            kept,
            "save",
            lambda step, layers: save(step, [*layers[:-1], (layers[-1][0].at[:, 1, 2].set(value), layers[-1][1])]),
        )
        score(llm, "What is ", image, "?", reuse="exact")
    assert not kv_records(llm)
    assert llm.cache.stats().not_finite == before.not_finite + 1
    found = score(llm, "What is ", image, "?", reuse=0)
    assert (report(found).match, report(found).why) == ("miss", Why.not_finite)
    np.testing.assert_array_equal(found.logits, cold.logits)


@pytest.mark.parametrize("name", ["fp8", "INT8", "", None, 8, ["int8"]])
def test_names_of_codecs(name):
    with pytest.raises(ValueError, match=re.escape(f"codec must be one of ('auto', 'int8', 'int4'), got {name!r}")):
        CacheConfig(codec=name)


def test_a_head_width_that_a_codec_does_not_do(made, monkeypatch):
    monkeypatch.setattr(vlcache_jax.service, "_load", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(
        ValueError, match="head width must be even and at most 32 or a multiple of 32 for codec 'int4', got 40"
    ):
        open_llm(made("qwen3_vl", head_dim=40), "int4")


def test_the_names_of_codecs_are_those_of_the_kernels():
    assert tuple(CODECS) == config.CODECS
