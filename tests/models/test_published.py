"""The published sizes against the figures of their files."""

from __future__ import annotations

import math

import pytest

from tests.models.helper import state_layers
from vlcache_jax.models.config import ExpertsConfig
from vlcache_jax.models.params import parameters
from vlcache_jax.models.registry import FAMILIES, SIZES, config_file, find_name, published_config

# The figures below of models of layers with states beside layers with K, V. The MLP of those whose layers all have
# experts is the shared expert.
HYBRIDS = {
    "Qwen3.5-0.8B": (1024, 24, 8, 2, 3584, 248320, True, 1e7, 262144, 12, 12, 768, 64, 3072, 16, 852985920),
    "Qwen3.5-2B": (2048, 24, 8, 2, 6144, 248320, True, 1e7, 262144, 12, 24, 1024, 64, 4096, 16, 2213241664),
    "Qwen3.5-4B": (2560, 32, 16, 4, 9216, 248320, True, 1e7, 262144, 32, 24, 1024, 64, 4096, 16, 4539265536),
    "Qwen3.5-9B": (4096, 32, 16, 4, 12288, 248320, False, 1e7, 262144, 32, 27, 1152, 72, 4304, 16, 9409813744),
    **dict.fromkeys(
        ("Qwen3.5-27B", "Qwen3.6-27B", "Qwen3.8-27B"),
        (5120, 64, 24, 4, 17408, 248320, False, 1e7, 262144, 64, 27, 1152, 72, 4304, 16, 27356728560),
    ),
    **dict.fromkeys(
        ("Qwen3.5-35B-A3B", "Qwen3.6-35B-A3B"),
        (2048, 40, 16, 2, 512, 248320, False, 1e7, 262144, 20, 27, 1152, 72, 4304, 16, 35107181936),
    ),
    "Qwen3.5-122B-A10B": (3072, 48, 32, 2, 1024, 248320, False, 1e7, 262144, 24, 27, 1152, 72, 4304, 16, 122562817776),
    "Qwen3.5-397B-A17B": (4096, 60, 32, 2, 1024, 248320, False, 1e7, 262144, 30, 27, 1152, 72, 4304, 16, 396802360816),
}
# Heads of values of linear attention, and MiB of a sequence's states: of the rule in float32, of the convolution in
# bfloat16.
STATES = {
    "Qwen3.5-0.8B": (16, 18, 0.6),
    "Qwen3.5-2B": (16, 18, 0.6),
    "Qwen3.5-4B": (32, 48, 1.1),
    "Qwen3.5-9B": (32, 48, 1.1),
    **dict.fromkeys(("Qwen3.5-27B", "Qwen3.6-27B", "Qwen3.8-27B"), (48, 144, 2.8)),
    **dict.fromkeys(("Qwen3.5-35B-A3B", "Qwen3.6-35B-A3B"), (32, 60, 1.4)),
    "Qwen3.5-122B-A10B": (64, 144, 2.5),
    "Qwen3.5-397B-A17B": (64, 180, 3.2),
}
# Width, layers, heads, heads of K, V, MLP width, vocabulary, tied, base of RoPE, longest context, KiB of K, V a token
# (bfloat16); vision: layers, width, head width, MLP width, patch; and the parameters, as the library counts them.
FIGURES = {
    "Qwen2-VL-2B": (1536, 28, 12, 2, 8960, 151936, True, 1e6, 32768, 28, 32, 1280, 80, 5120, 14, 2208985600),
    "Qwen2-VL-7B": (3584, 28, 28, 4, 18944, 152064, False, 1e6, 32768, 56, 32, 1280, 80, 5120, 14, 8291375616),
    "Qwen2-VL-72B": (8192, 80, 64, 8, 29568, 152064, False, 1e6, 32768, 320, 32, 1280, 80, 5120, 14, 73405560320),
    "Qwen2.5-VL-3B": (2048, 36, 16, 2, 11008, 151936, True, 1e6, 128000, 36, 32, 1280, 80, 3420, 14, 3754622976),
    "Qwen2.5-VL-7B": (3584, 28, 28, 4, 18944, 152064, False, 1e6, 128000, 56, 32, 1280, 80, 3420, 14, 8292166656),
    "Qwen2.5-VL-32B": (5120, 64, 40, 8, 27648, 152064, False, 1e6, 128000, 256, 32, 1280, 80, 3456, 14, 33452718336),
    "Qwen2.5-VL-72B": (8192, 80, 64, 8, 29568, 152064, False, 1e6, 128000, 320, 32, 1280, 80, 3456, 14, 73410777344),
    "Qwen3-VL-2B": (2048, 28, 16, 8, 6144, 151936, True, 5e6, 262144, 112, 24, 1024, 64, 4096, 16, 2127532032),
    "Qwen3-VL-4B": (2560, 36, 32, 8, 9728, 151936, True, 5e6, 262144, 144, 24, 1024, 64, 4096, 16, 4437815808),
    "Qwen3-VL-8B": (4096, 36, 32, 8, 12288, 151936, False, 5e6, 262144, 144, 27, 1152, 72, 4304, 16, 8767123696),
    "Qwen3-VL-32B": (5120, 64, 64, 8, 25600, 151936, False, 5e6, 262144, 256, 27, 1152, 72, 4304, 16, 33357390064),
    "Qwen3-VL-30B-A3B": (2048, 48, 32, 4, 6144, 151936, False, 5e6, 262144, 96, 27, 1152, 72, 4304, 16, 31070754032),
    "Qwen3-VL-235B-A22B": (
        4096,
        94,
        64,
        4,
        12288,
        151936,
        False,
        5e6,
        262144,
        188,
        27,
        1152,
        72,
        4304,
        16,
        235670022896,
    ),
    **HYBRIDS,
}
# Experts of a layer, those that a row passes, their width, that of the shared one; every layer has them.
EXPERTS = {
    "Qwen3-VL-30B-A3B": (128, 8, 768, 0),
    "Qwen3-VL-235B-A22B": (128, 8, 1536, 0),
    **dict.fromkeys(("Qwen3.5-35B-A3B", "Qwen3.6-35B-A3B"), (256, 8, 512, 512)),
    "Qwen3.5-122B-A10B": (256, 8, 1024, 1024),
    "Qwen3.5-397B-A17B": (512, 10, 1024, 1024),
}
COUNTED = ("Qwen2-VL-2B", "Qwen2.5-VL-7B", "Qwen3-VL-8B")  # the others take a second each


def test_each_size_has_figures():
    assert list(SIZES) == list(FIGURES)


@pytest.mark.parametrize("name", SIZES)
def test_fields(name):
    config = published_config(name)
    text, vision = config.text, config.vision
    kv_bytes = 2 * len(text.paged_layers) * text.num_kv_heads * text.head_dim * 2
    found = (
        text.hidden_size, text.num_layers, text.num_heads, text.num_kv_heads, text.intermediate_size, text.vocab_size,
        config.tie_word_embeddings, text.rope_theta, text.max_position_embeddings, kv_bytes / 1024,
        vision.depth, vision.hidden_size, vision.head_dim, vision.intermediate_size, vision.patch_size,
    )  # fmt: skip
    assert found == FIGURES[name][:-1]
    is_hybrid = name in HYBRIDS
    heads = 12 if name == "Qwen3.5-0.8B" else 16
    wanted = 256 if is_hybrid else 128, 1e-6, heads, "bfloat16"
    assert (text.head_dim, text.rms_norm_eps, vision.num_heads, config.dtype) == wanted
    assert vision.out_hidden_size == text.hidden_size
    experts = None
    if name in EXPERTS:
        *sizes, shared = EXPERTS[name]
        experts = ExpertsConfig(*sizes, tuple(range(text.num_layers)), shared)
    assert text.experts == experts
    tokens = (248056, 248057) if is_hybrid else (151655, 151656)
    assert (config.image_token_id, config.video_token_id) == tokens
    assert text.has_states == is_hybrid


@pytest.mark.parametrize("name", HYBRIDS)
def test_states(name):
    text = published_config(name).text
    value_heads, *mebibytes = STATES[name]
    linear = text.linear_attention
    assert (linear.key_heads, linear.value_heads, linear.key_width, linear.value_width) == (16, value_heads, 128, 128)
    assert text.paged_layers == tuple(range(3, text.num_layers, 4))
    found = [0.0, 0.0]
    for layer in state_layers(text):
        tail, rule = text.kind_of(layer).states
        found[0] += rule.nbytes("bfloat16") / 2**20
        found[1] += tail.nbytes("bfloat16") / 2**20
    assert [found[0], round(found[1], 1)] == mebibytes
    assert (2 * sum(text.mrope_section), text.mrope_section, linear.taps) == (64, (11, 11, 10), 4)


def test_what_families_differ_in():
    qwen2, qwen2_5, qwen3 = (published_config(name) for name in COUNTED)
    small = published_config("Qwen3-VL-4B")
    assert qwen2.text.mrope_section == qwen2_5.text.mrope_section == (16, 24, 24)
    assert qwen3.text.mrope_section == (24, 20, 20)
    assert [model.text.mrope_interleaved for model in (qwen2, qwen2_5, qwen3)] == [False, False, True]
    assert [model.text.qkv_bias for model in (qwen2, qwen2_5, qwen3)] == [True, True, False]
    assert [model.text.qk_norm for model in (qwen2, qwen2_5, qwen3)] == [False, False, True]
    assert (qwen2_5.vision.window_size, qwen2_5.vision.full_blocks) == (112, (7, 15, 23, 31))
    assert qwen3.vision.num_position_embeddings == small.vision.num_position_embeddings == 2304
    assert (qwen3.vision.deepstack_blocks, small.vision.deepstack_blocks) == ((8, 16, 24), (5, 11, 17))


@pytest.mark.slow_for("Qwen2-VL-2B", "Qwen2.5-VL-7B")
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in COUNTED)) for n in SIZES])
@pytest.mark.thorough_for("Qwen2-VL-72B", "Qwen2.5-VL-32B", "Qwen2.5-VL-72B", "Qwen3-VL-235B")
def test_parameters(name):
    assert sum(math.prod(parameter.shape) for parameter in parameters(published_config(name))) == FIGURES[name][-1]


@pytest.mark.parametrize("name", SIZES)
def test_the_library_reads_them_alike(name):
    from transformers import AutoConfig

    raw = config_file(SIZES[name], dtype="bfloat16")
    kind, rest = raw["model_type"], {key: value for key, value in raw.items() if key != "model_type"}
    library = AutoConfig.for_model(kind, **rest)
    assert FAMILIES[kind].read_config(library, raw) == published_config(name)


def test_names_are_found_in_any_case():
    assert find_name("qwen3-vl-8b") == "Qwen3-VL-8B"
    assert find_name("QWEN2.5-VL-72B") == "Qwen2.5-VL-72B"
    assert find_name("Qwen/Qwen3-VL-8B-Instruct") is None
