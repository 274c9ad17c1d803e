"""Models with states on four devices, which divide the heads of the states."""

import dataclasses

import numpy as np
import pytest

from tests.helper import user
from tests.models import float8
from tests.test_hybrids import BUCKETS, GREEDY, answers, open_llm
from vlcache_jax import CacheConfig
from vlcache_jax.device import kv_shape
from vlcache_jax.testing import make_checkpoint

pytestmark = pytest.mark.devices

HEADS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
PLAIN = "in_proj_z", "in_proj_qkv"  # of the first two layers


def test_states_behind_images_are_those_of_any_number_of_devices(tmp_path, textured_image, monkeypatch):
    """One device loads from the disk what four stored there, and the other way around."""
    monkeypatch.setattr(kv_shape, "STATED_TOKENS", 1)
    directory = make_checkpoint(tmp_path / "model", "qwen3_5", seed=6, text=HEADS)
    first, second = (user("What is in ", textured_image(90, 130, seed), "?") for seed in (1, 2))
    options = {"buckets": dataclasses.replace(BUCKETS, rows=(256,)), "cache": CacheConfig(disk=tmp_path / "disk")}

    def ask(llm, conversation):
        [output] = llm.chat(conversation, GREEDY, use_tqdm=False)
        llm.cache.flush()
        return output.cache.images[0].kv, *answers([output])[0]

    with open_llm(directory, **options) as one, open_llm(directory, tensor_parallel_size=4, **options) as four:
        found = [[ask(one, first), ask(four, first)], [ask(four, second), ask(one, second)]]
    for (stored, (tokens, expected)), (loaded, (same, chosen)) in found:
        assert (stored, loaded) == ("none", "disk")
        assert same == tokens
        np.testing.assert_allclose(chosen, expected, atol=2e-5, rtol=0)


def test_maps_of_images_are_those_of_any_number_of_devices(tmp_path, textured_image, monkeypatch):
    """One device links from the disk what four stored there, and the other way around."""
    monkeypatch.setattr(kv_shape, "STATED_TOKENS", 1)
    directory = make_checkpoint(tmp_path / "model", "qwen3_5", seed=6, text=HEADS)
    images = [textured_image(90, 130, seed) for seed in (1, 2)]
    options = {"buckets": dataclasses.replace(BUCKETS, rows=(256,)), "cache": CacheConfig(disk=tmp_path / "disk")}
    options["reuse"] = "shift-ends-0.5"

    def ask(llm, *parts):
        llm.reset_prefix_cache()
        [output] = llm.chat(user(*parts), GREEDY, use_tqdm=False)
        llm.cache.flush()
        [(tokens, chosen)] = answers([output])[0]
        return (output.cache.images[0].match, output.cache.images[0].kv), tokens, chosen

    with open_llm(directory, **options) as one, open_llm(directory, tensor_parallel_size=4, **options) as four:
        for first, second, image in ((one, four, images[0]), (four, one, images[1])):
            assert ask(first, "What is in ", image, "?")[0] == ("miss", "none")
            (linked, tokens, expected), (loaded, same, chosen) = (
                ask(llm, "And here: ", image, "!") for llm in (first, second)
            )
            assert (linked, loaded) == (("approximate", "host"), ("approximate", "disk"))
            assert same == tokens
            np.testing.assert_allclose(chosen, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("is_apart", [False, pytest.param(True, id="apart")])
def test_answers_are_those_of_one_device(tmp_path, textured_image, is_apart):
    """Also if some matrices of a product are in 8 bits and others are not."""
    bits = {"quantization": "fp8", "block": 32} if is_apart else {}
    directory = make_checkpoint(tmp_path / "model", "qwen3_5", seed=6, text=HEADS, **bits)
    if is_apart:
        names = [f"model.language_model.layers.{i}.linear_attn.{name}" for i, name in enumerate(PLAIN)]
        directory = float8.left_out(directory, tmp_path / "apart", names)
    conversations = [user("What is in ", textured_image(90, 130, 1), "? " + "Say it. " * 20), user("And this?")]
    found = []
    for count in (1, 4):
        buckets = dataclasses.replace(BUCKETS, rows=(256,))
        with open_llm(directory, tensor_parallel_size=count, buckets=buckets) as llm:
            found.append(answers(llm.chat(conversations, GREEDY, use_tqdm=False)))
            for state in llm.service.device.runner.pool.arrays[0]:
                [*shards] = state.addressable_shards
                assert {shard.data.shape[1] for shard in shards} == {4 // count}
    for [(tokens, chosen)], [(expected_tokens, expected)] in zip(*found, strict=True):
        assert tokens == expected_tokens
        np.testing.assert_allclose(chosen, expected, atol=2e-5, rtol=0)
