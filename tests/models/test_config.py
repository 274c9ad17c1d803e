"""`config.json` in all its spellings, and parameters against the library's own."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import os
import re
import shutil

import pytest

from tests.models.helper import divide, state_layers
from vlcache_jax.models import load_config
from vlcache_jax.models.params import library_name, parameters, published_name
from vlcache_jax.models.registry import FAMILIES, published_config
from vlcache_jax.testing import make_checkpoint


def edit(directory, **changes):
    """Changes fields of config.json; `text` and `vision` are the nested ones, and None takes a field away."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for name, section in (("text", "text_config"), ("vision", "vision_config")):
        config[section] = {**config.get(section, {}), **changes.pop(name, {})}
    config = {name: value for name, value in {**config, **changes}.items() if value is not None}
    path.write_text(json.dumps(config))
    return directory


@pytest.fixture
def make(checkpoints, tmp_path):
    """A directory with the config.json of a family's default configuration, to be changed."""

    def make(model_type):
        shutil.copy(checkpoints(model_type) / "config.json", tmp_path)
        return tmp_path

    return make


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl"])
def test_flat_and_nested_layouts_are_the_same_model(tmp_path, model_type):
    text = {"rms_norm_eps": 3e-6, "num_attention_heads": 8, "vocab_size": 280}
    nested, flat = (
        load_config(make_checkpoint(tmp_path / layout, model_type, layout=layout, text=text, tie_word_embeddings=tied))
        for layout, tied in (("nested", True), ("flat", True))
    )
    assert flat == nested
    assert flat.text.rms_norm_eps == 3e-6
    assert flat.text.rope_theta == 1e6
    assert flat.text.mrope_section == (2, 1, 1)
    assert flat.tie_word_embeddings
    assert flat.dtype == "float32"


def test_saved_by_the_library(checkpoint, tmp_path):
    """A configuration that the library has read and written again is the same model."""
    from transformers import AutoConfig

    AutoConfig.from_pretrained(checkpoint).save_pretrained(tmp_path)
    assert load_config(tmp_path) == load_config(checkpoint)


def test_fields(make):
    config = load_config(edit(make("qwen3_vl"), dtype="bfloat16"))
    assert config.dtype == "bfloat16"
    assert (config.image_token_id, config.video_token_id) == (262, 263)
    assert config.text.mrope_section == (6, 3, 3)
    assert (config.text.rope_theta, config.text.head_dim) == (5e6, 24)
    assert config.text.mrope_interleaved
    assert config.text.qk_norm
    assert not config.text.qkv_bias
    assert config.vision.deepstack_blocks == (1, 2)
    assert config.vision.position_side == 8
    vision = load_config(make("qwen2_vl")).vision
    assert (vision.hidden_size, vision.intermediate_size, vision.out_hidden_size) == (32, 128, 64)
    vision = load_config(make("qwen2_5_vl")).vision
    assert (vision.full_blocks, vision.window_side, vision.patch_width, vision.head_dim) == ((1, 3), 2, 1176, 16)


def test_rope_spellings(make):
    """The old key with theta beside it, and the flag for interleaving, which nobody reads."""
    expected = load_config(make("qwen3_vl"))
    section = {"mrope_section": [6, 3, 3]}
    old = {"rope_parameters": None, "rope_theta": 5e6}
    for rope in (
        {**old, "rope_scaling": {"type": "mrope", **section}},
        {**old, "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, **section}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6, **section}},
    ):
        assert load_config(edit(make("qwen3_vl"), text=rope)) == expected


def test_defaults_of_missing_keys_are_the_librarys(make):
    """A key that equals the library's default is not written."""
    path = make("qwen2_5_vl") / "config.json"
    config = json.loads(path.read_text())
    for key in ("rms_norm_eps", "max_position_embeddings"):
        del config["text_config"][key]
    path.write_text(json.dumps(config))
    assert load_config(path.parent).text.rms_norm_eps == 1e-5
    assert load_config(path.parent).text.max_position_embeddings == 32768


# As published: the first ones with the text's fields at the top, the later ones with them apart.
PUBLISHED = {
    "Qwen2-VL-2B": {
        "model_type": "qwen2_vl",
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 1536,
        "image_token_id": 151655,
        "intermediate_size": 8960,
        "max_position_embeddings": 32768,
        "max_window_layers": 28,
        "num_attention_heads": 12,
        "num_hidden_layers": 28,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "video_token_id": 151656,
        "vision_config": {
            "depth": 32,
            "embed_dim": 1280,
            "hidden_size": 1536,
            "in_chans": 3,
            "mlp_ratio": 4,
            "num_heads": 16,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "temporal_patch_size": 2,
        },
        "vision_token_id": 151654,
        "vocab_size": 151936,
    },
    "Qwen2.5-VL-3B": {
        "model_type": "qwen2_5_vl",
        "image_token_id": 151655,
        "video_token_id": 151656,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "max_position_embeddings": 128000,
        "max_window_layers": 70,
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vision_config": {
            "depth": 32,
            "hidden_act": "silu",
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "in_chans": 3,
            "out_hidden_size": 2048,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "tokens_per_second": 2,
            "temporal_patch_size": 2,
        },
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vocab_size": 151936,
    },
    "Qwen3-VL-8B": {
        "model_type": "qwen3_vl",
        "image_token_id": 151655,
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 151643,
            "dtype": "bfloat16",
            "eos_token_id": 151645,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "initializer_range": 0.02,
            "intermediate_size": 12288,
            "max_position_embeddings": 262144,
            "model_type": "qwen3_vl_text",
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            "rope_theta": 5000000,
            "vocab_size": 151936,
        },
        "tie_word_embeddings": False,
        "video_token_id": 151656,
        "vision_config": {
            "deepstack_visual_indexes": [8, 16, 24],
            "depth": 27,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 1152,
            "in_channels": 3,
            "intermediate_size": 4304,
            "model_type": "qwen3_vl",
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": 4096,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    },
    "Qwen3.5-9B": {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "image_token_id": 248056,
        "model_type": "qwen3_5",
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_output_gate": True,
            "dtype": "bfloat16",
            "eos_token_id": 248044,
            "full_attention_interval": 4,
            "head_dim": 256,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "initializer_range": 0.02,
            "intermediate_size": 12288,
            "layer_types": [*["linear_attention"] * 3, "full_attention"] * 8,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_value_head_dim": 128,
            "mamba_ssm_dtype": "float32",
            "max_position_embeddings": 262144,
            "model_type": "qwen3_5_text",
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "num_attention_heads": 16,
            "num_hidden_layers": 32,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
                "partial_rotary_factor": 0.25,
                "rope_theta": 10000000,
                "rope_type": "default",
            },
            "tie_word_embeddings": False,
            "use_cache": True,
            "vocab_size": 248320,
        },
        "tie_word_embeddings": False,
        "video_token_id": 248057,
        "vision_config": {
            "deepstack_visual_indexes": [],
            "depth": 27,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 1152,
            "in_channels": 3,
            "initializer_range": 0.02,
            "intermediate_size": 4304,
            "model_type": "qwen3_5",
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": 4096,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "vision_end_token_id": 248054,
        "vision_start_token_id": 248053,
    },
}
_9B = PUBLISHED["Qwen3.5-9B"]
PUBLISHED["Qwen3.6-35B-A3B"] = {
    **_9B,
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": {
        **{key: value for key, value in _9B["text_config"].items() if key != "intermediate_size"},
        "bos_token_id": 248044,
        "hidden_size": 2048,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 10,
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "output_router_logits": False,
        "pad_token_id": None,
        "partial_rotary_factor": 0.25,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 512,
    },
    "vision_config": {**_9B["vision_config"], "model_type": "qwen3_5_moe", "out_hidden_size": 2048},
}


# Family and the library's present base of RoPE, if the file has none -> that at the release, see
# tests/test_release_rules.py.
RELEASED = {("qwen3_vl", 5e5): 5e6, ("qwen3_5", 1e4): 1e7, ("qwen3_5_moe", 1e4): 1e7}


def read_or_error(read):
    try:
        return read()
    except ValueError as error:
        return str(error)


def without(config, key):
    return {name: value for name, value in config.items() if name != key}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_read_as_the_library_reads_them(name, tmp_path):
    """Whole, in other words, and with each key left out."""
    from transformers import AutoConfig

    whole = PUBLISHED[name]
    text, vision = whole.get("text_config", without(whole, "model_type")), whole["vision_config"]
    # The library of the newer families does not take null.
    nested = without(whole, "tie_word_embeddings") | {"text_config": text}
    spellings = [
        whole,
        nested,
        *([nested | {"text_config": text | {"num_key_value_heads": None}}] if "layer_types" not in text else []),
        whole | {"vision_config": without(vision, "depth") | {"num_hidden_layers": vision["depth"]}},
        *(without(whole, key) for key in whole if key != "model_type"),
        *(nested | {"text_config": without(text, key)} for key in text),
        *(whole | {"vision_config": without(vision, key)} for key in vision),
    ]
    read = 0
    for raw in spellings:
        (tmp_path / "config.json").write_text(json.dumps(raw))
        library = AutoConfig.from_pretrained(tmp_path)
        try:
            expected = FAMILIES[raw["model_type"]].read_config(library, raw)
        except ValueError as error:  # a default that does not fit the rest
            with pytest.raises(ValueError, match=re.escape(str(error))):
                load_config(tmp_path)
        else:
            read += 1
            if (theta := RELEASED.get((raw["model_type"], expected.text.rope_theta))) is not None:
                expected = dataclasses.replace(expected, text=dataclasses.replace(expected.text, rope_theta=theta))
            assert load_config(tmp_path) == expected
    assert read > len(spellings) / 2
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert load_config(tmp_path) == published_config(name)


@pytest.mark.parametrize("kind", ["Qwen3_5", "Qwen3_5Moe"])
def test_what_the_library_writes_of_hybrids_is_read(kind, tmp_path):
    """Its own default values, and uneven ones; it has another type for the tower than the published files."""
    import transformers

    make = getattr(transformers, f"{kind}Config")
    vision = {"out_hidden_size": 64, "depth": 3, "num_heads": 2, "hidden_size": 32}
    uneven = {
        "hidden_size": 64, "num_hidden_layers": 6, "full_attention_interval": 3, "head_dim": 48, "vocab_size": 300,
        "linear_num_key_heads": 3, "linear_num_value_heads": 9, "linear_key_head_dim": 24, "linear_value_head_dim": 40,
        "linear_conv_kernel_dim": 5, "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5, "mrope_section": [4, 4, 4],
        },
    }  # fmt: skip
    listed = {"num_hidden_layers": 3, "layer_types": ["full_attention", "linear_attention", "linear_attention"]}
    width = make().text_config.hidden_size
    for text, tower in (({}, {"out_hidden_size": width}), (uneven, vision), ({**uneven, **listed}, vision)):
        config = make(text_config=text, vision_config=tower, tie_word_embeddings=bool(text))
        raw = config.to_dict()
        assert raw["vision_config"]["model_type"].endswith("_vision")
        config.save_pretrained(tmp_path)
        found = load_config(tmp_path)
        assert found == FAMILIES[config.model_type].read_config(config, raw)
        assert [kind.name for kind in found.text.layer_kinds] == list(config.text_config.layer_types)
        published = {**raw, "vision_config": {**raw["vision_config"], "model_type": config.model_type}}
        (tmp_path / "config.json").write_text(json.dumps(published))
        assert load_config(tmp_path) == found
    linear = found.text.linear_attention
    assert (linear.key_heads, linear.value_heads, linear.group, linear.taps) == (3, 9, 3, 5)
    assert (linear.key_width, linear.value_width, 2 * sum(found.text.mrope_section)) == (24, 40, 24)
    assert (found.text.paged_layers, state_layers(found.text)) == ((0,), (1, 2))
    assert found.text.output_gate
    assert found.text.norm_offset


def test_layers_of_hybrids_are_listed_or_counted(make):
    """The list counts if a file has both."""
    kinds = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    both = {"layer_types": kinds, "full_attention_interval": 2}
    assert load_config(edit(make("qwen3_5"), text=both)).text.paged_layers == (0, 3)
    for interval, paged in ((2, (1, 3)), (3, (2,)), (1, (0, 1, 2, 3))):
        counted = {"layer_types": None, "full_attention_interval": interval}
        text = load_config(edit(make("qwen3_5"), text=counted)).text
        assert text.paged_layers == paged
        assert text.has_states == (interval > 1)


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="checkpoint directory"):
        load_config(tmp_path)
    deep = '{"model_type": ' + "[" * 100_000 + "]" * 100_000 + "}"
    for content in ("", "{", "[1]", '"text"', "null", '{"a": ' + "1" * 5000 + "}", deep):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match=rf"{tmp_path}/config.json must be a JSON file"):
            load_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="JSON file"):
        load_config(tmp_path)
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ValueError, match="must be a JSON file: not a regular file"):
        load_config(tmp_path)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "llama", "qwen2_5_omni", None, 5, ["qwen3_vl"]])
def test_unknown_model_types(make, model_type):
    with pytest.raises(ValueError, match=f"model_type must be one of .* got {re.escape(repr(model_type))}"):
        load_config(edit(make("qwen3_vl"), model_type=model_type))


SECTION = {"rope_type": "default", "rope_theta": 5e6}


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("qwen3_vl", {"quantization_config": {"quant_method": "awq"}}, "quant_method 'awq'"),
        ("qwen3_vl", {"text": {"quantization_config": {"quant_method": "gptq"}}}, "quant_method 'gptq'"),
        ("qwen3_vl", {"text": {"rope_parameters": {**SECTION, "mrope_section": [24, 20, 20]}}}, "sum to 12"),
        ("qwen3_vl", {"text": {"rope_parameters": {**SECTION, "mrope_section": [6, 6]}}}, "sum to 12"),
        ("qwen3_vl", {"text": {"rope_parameters": SECTION}}, "sum to 12"),
        ("qwen2_5_vl", {"text": {"rope_parameters": {**SECTION, "mrope_section": [4, 3, 3]}}}, "sum to 8"),
        ("qwen3_vl", {"text": {"rope_parameters": {**SECTION, "rope_type": "linear", "factor": 2.0}}}, "rope_type"),
        ("qwen2_5_vl", {"text": {"use_sliding_window": True}}, "use_sliding_window must be false"),
        ("qwen2_vl", {"text": {"use_sliding_window": True}}, "use_sliding_window must be false"),
        ("qwen2_vl", {"vision": {"hidden_act": "silu"}}, "vision hidden_act must be 'quick_gelu'"),
        ("qwen2_vl", {"vision": {"hidden_size": 32}}, "vision hidden_size must equal hidden_size = 64, got 32"),
        ("qwen2_vl", {"vision": {"num_heads": 3}}, "vision head width must be a multiple of 4, got 32 / 3"),
        ("qwen3_vl", {"text": {"attention_bias": True}}, "attention_bias must be False"),
        ("qwen3_vl", {"text": {"hidden_act": "gelu"}}, "text hidden_act must be 'silu'"),
        ("qwen3_vl", {"vision": {"hidden_act": "gelu"}}, "vision hidden_act must be 'gelu_pytorch_tanh'"),
        ("qwen3_vl", {"text": {"num_key_value_heads": 3}}, "num_attention_heads must be a multiple of"),
        ("qwen3_vl", {"vision": {"out_hidden_size": 32}}, "out_hidden_size must equal hidden_size = 64, got 32"),
        ("qwen3_vl", {"vision": {"num_heads": 3}}, "vision head width"),
        ("qwen3_vl", {"vision": {"deepstack_visual_indexes": [0, 1, 2, 3, 3]}}, "deepstack_visual_indexes must"),
        ("qwen3_vl", {"vision": {"deepstack_visual_indexes": [2, 1]}}, "deepstack_visual_indexes must"),
        ("qwen3_vl", {"vision": {"deepstack_visual_indexes": [1, 4]}}, "deepstack_visual_indexes must"),
        ("qwen3_5", {"vision": {"deepstack_visual_indexes": [1]}}, "deepstack_visual_indexes must be \\[\\]"),
        ("qwen3_5", {"model_type": "qwen3_5_text"}, "got 'qwen3_5_text' .*: text-only checkpoints are not supported"),
        ("qwen3_5_moe", {"model_type": "qwen3_5_moe_text"}, "'qwen3_5_moe_text' .*: text-only checkpoints are not"),
        ("qwen3_5", {"text": {"rope_parameters": {**SECTION, "rope_type": "yarn", "factor": 4.0}}}, "rope_type .*yarn"),
        ("qwen3_5", {"text": {"attention_bias": True}}, "attention_bias must be False, got True"),
        ("qwen3_5", {"text": {"attn_output_gate": False}}, "attn_output_gate must be True, got False"),
        ("qwen3_5", {"text": {"mamba_ssm_dtype": "bfloat16"}}, "mamba_ssm_dtype must be 'float32', got 'bfloat16'"),
        ("qwen3_5", {"text": {"linear_num_value_heads": 3}}, "a multiple of linear_num_key_heads = 2, got 3"),
        ("qwen3_5", {"text": {"num_key_value_heads": 3}}, "num_attention_heads must be a multiple of"),
        ("qwen3_5", {"text": {"layer_types": ["full_attention"] * 3}}, "layer_types must have .* = 4 entries, got 3"),
        ("qwen3_5", {"text": {"layer_types": ["linear_attention"] * 4}}, "at least one full_attention, got none"),
        ("qwen3_5", {"text": {"layer_types": None, "full_attention_interval": 5}}, "at least one full_attention"),
        ("qwen3_5", {"text": {"layer_types": ["sliding_attention"] * 4}}, "layer_types of .*'sliding_attention'"),
        ("qwen3_5", {"text": {"head_dim": 36}}, "partial_rotary_factor must give an even number .* 36, got 9 for 0.25"),
        ("qwen3_5", {"text": {"head_dim": 40}}, "mrope_section must be three counts that sum to 5"),
        ("qwen3_5_moe", {"text": {"num_experts_per_tok": 9}}, "num_experts_per_tok must be at most num_experts = 8"),
        ("qwen3_5_moe", {"text": {"shared_expert_intermediate_size": 0}}, "shared_expert_intermediate_size of "),
    ],
)  # fmt: skip
def test_what_is_not_implemented_is_refused(make, model_type, changes, message):
    with pytest.raises(ValueError, match=message):
        load_config(edit(make(model_type), **changes))


COUNTS = (0, -1, 10**10, 10**400, True, 2.0, "4", None, [4], {})
INDICES = ([-1], [10**9], [1.0], [True], ["1"], 3, "12", [1] * 2000)
NUMBERS = (float("nan"), float("inf"), 0, -1, 1e300, 10**400, "1", True, [])
TOKENS = (-1, 10**9, 1.0, True, "4", None)
ROPE = "text_config.rope_parameters."


def hostile():
    """A value that no model has, for every number that is read from `config.json`."""
    text = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    vision = ("depth", "hidden_size", "intermediate_size", "out_hidden_size", "num_heads", "in_channels", "patch_size",
              "spatial_merge_size", "temporal_patch_size", "num_hidden_layers", "num_attention_heads")  # fmt: skip
    table = {
        **{f"text_config.{key}": COUNTS for key in (*text, "max_position_embeddings")},
        **{f"vision_config.{key}": COUNTS for key in vision},
        **{f"text_config.{key}": [v for v in COUNTS if v is not None] for key in ("num_key_value_heads", "head_dim")},
        "text_config.rms_norm_eps": NUMBERS,
        **{f"{section}rope_theta": NUMBERS for section in ("text_config.", ROPE, "vision_config.rope_parameters.")},
        f"{ROPE}mrope_section": ([-1, 12, 1], [6.0, 3, 3], [True, 8, 3], "633", 12, [10**9] * 3, [1] * 12),
        f"{ROPE}rope_type": ("yarn", 1, None, []),
        "image_token_id": TOKENS,
        "video_token_id": TOKENS,
        "tie_word_embeddings": ("false", 0, None),
        "num_labels": (10**9, -1, "x"),
        "text_config.num_labels": (10**9,),
        "vision_config.num_labels": (10**9,),
        "text_config": ("x", 5, [1], True),
        "vision_config": ("x", 5, [1], True),
        "text_config.rope_parameters": ("x", 5, [1]),
        "text_config.rope_scaling": ("x", 5),
        "dtype": (5, ["float32"], {}),
        "vision_config.deepstack_visual_indexes": INDICES,
        "vision_config.num_position_embeddings": COUNTS,
    }
    yield from (("qwen3_vl", key, value) for key, values in table.items() for value in values)
    yield from (("qwen2_vl", f"vision_config.{key}", value) for key in ("embed_dim", "mlp_ratio") for value in COUNTS)
    yield from (("qwen2_5_vl", "vision_config.window_size", value) for value in COUNTS)
    yield from (("qwen2_5_vl", "vision_config.fullatt_block_indexes", value) for value in INDICES)
    linear = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    for key in (*(f"linear_{name}" for name in linear), "full_attention_interval"):
        yield from (("qwen3_5", f"text_config.{key}", value) for value in COUNTS)
    for value in ("linear_attention", 4, [1], [None], ["linear_attention"] * 2000, {}):
        yield "qwen3_5", "text_config.layer_types", value
    for value in (0, -1, 2, "0.25", float("nan")):
        yield "qwen3_5", f"{ROPE}partial_rotary_factor", value


def test_hostile_numbers_are_named_with_their_file(make):
    """Without AutoConfig, which would hang on some of them: none is seen by the library."""
    originals = {model_type: json.loads((make(model_type) / "config.json").read_text())
                 for model_type in ("qwen3_vl", "qwen2_5_vl", "qwen2_vl", "qwen3_5")}  # fmt: skip
    path = make("qwen3_vl") / "config.json"
    for model_type, key, value in hostile():
        config = copy.deepcopy(originals[model_type])
        *sections, last = key.split(".")
        functools.reduce(lambda node, name: node.setdefault(name, {}), sections, config)[last] = value
        path.write_text(json.dumps(config))
        with pytest.raises(ValueError, match=rf"{re.escape(key)} of {path} must be .*, got ") as caught:
            raise AssertionError(f"{key} = {value!r} gave {load_config(path.parent)}")
        assert caught.value.__cause__ is None, f"{key} = {value!r} came to the library"


def test_hostile_numbers_of_the_flat_layout(tmp_path):
    path = make_checkpoint(tmp_path, "qwen2_5_vl", layout="flat", weights=False) / "config.json"
    original = path.read_text()
    for key, value in (("num_hidden_layers", 10**9), ("rope_theta", 0), ("rms_norm_eps", float("inf"))):
        path.write_text(json.dumps(json.loads(original) | {key: value}))
        with pytest.raises(ValueError, match=rf"^{key} of {path} must be"):
            load_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": {"hidden_size": 66}}, "hidden_size must be a multiple of num_attention_heads = 4, got 66"),
        ({"text": {"num_attention_heads": 128}}, "hidden_size must be a multiple of num_attention_heads = 128"),
        ({"text": {"hidden_size": 60, "num_attention_heads": 4}}, "head_dim of the text model must be even, got 15"),
        ({"vision": {"window_size": 27}}, "window_size must be at least the 28 pixels of an image token, got 27"),
        ({"vision": {"num_heads": 64}}, "vision head width must be a multiple of 4"),
    ],
)
def test_fields_that_contradict_each_other_name_the_file(make, changes, message):
    directory = edit(make("qwen2_5_vl"), **changes)
    with pytest.raises(ValueError, match=rf"(?s){directory}/config.json must describe a supported model: .*{message}"):
        load_config(directory)


def test_bounds_leave_room_for_large_models(make):
    large = {"num_hidden_layers": 1000, "max_position_embeddings": 10**9, "vocab_size": 10**7}
    assert load_config(edit(make("qwen3_vl"), text=large)).text.num_layers == 1000


def test_parameters_are_the_librarys(checkpoint, load_oracle):
    config = load_config(checkpoint)
    library = {name: tensor.float().numpy() for name, tensor in load_oracle(checkpoint).state_dict().items()}
    divide(config, library)
    expected = {name: tensor.shape for name, tensor in library.items()}
    if config.tie_word_embeddings:
        del expected["lm_head.weight"]
    ours = [part for parameter in parameters(config) for part in parameter.parts]
    # Published experts are turned against the library's.
    shapes = {one.tensor: (one.transposed() if one.is_stack else one).tensor_shape for one in ours}
    assert shapes == expected
    assert len(ours) == len(expected)


def test_published_names(checkpoint):
    config = load_config(checkpoint)
    for name in (part.tensor for parameter in parameters(config) for part in parameter.parts):
        published = published_name(config, name)
        assert library_name(published) == name
        assert library_name(name) == name
        if config.model_type in ("qwen2_vl", "qwen2_5_vl"):
            assert published.startswith(("visual.", "model.layers.", "model.embed_tokens.", "model.norm.", "lm_head."))


def test_configs_are_hashable(checkpoint):
    config = load_config(checkpoint)
    assert hash(config) == hash(dataclasses.replace(config))
