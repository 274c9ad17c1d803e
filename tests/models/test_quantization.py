"""What `config.json` says of weights in 8 bits, and how factors lie."""

from __future__ import annotations

import copy
import re

import numpy as np
import pytest

from vlcache_jax.models.quantization import PRODUCTS, Quantization, read_quantization

QWEN = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.visual.merger.linear_fc1"],
}
WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "channel"}
ACTIVATIONS = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": ACTIVATIONS}},
    "ignore": ["re:.*lm_head", "re:visual.*"],
    "kv_cache_scheme": None,
}
BLOCKS = {"strategy": "block", "block_structure": [128, 64]}


def compressed(**weights):
    config = copy.deepcopy(COMPRESSED)
    config["config_groups"]["group_0"]["weights"] |= weights
    return config


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (QWEN, Quantization("_scale_inv", 128, 128)),
        (COMPRESSED, Quantization("_scale", 1, None)),
        (compressed(**BLOCKS), Quantization("_scale", 128, 64)),
        ({**COMPRESSED, "format": "naive-quantized"}, Quantization("_scale", 1, None)),
    ],
)
def test_published_formats_are_read(config, expected):
    assert read_quantization({"quantization_config": config}, "config.json") == expected
    assert read_quantization({"text_config": {"quantization_config": config}}, "config.json") == expected


def left_out(config, layers=12, experts=2):
    return read_quantization({"quantization_config": config}, "config.json", layers, experts).left_out


LAYER = "model.language_model.layers"
LINEAR = "in_proj_qk", "in_proj_vz", "in_proj_ba", "out_proj"


@pytest.mark.parametrize(
    "patterns",
    [
        [f"{LAYER}.1.mlp.down_proj"],
        [f"{LAYER}.1", "lm_head"],  # not layer 11
        [f"{LAYER}.1.mlp.gate", f"{LAYER}.2.mlp"],  # not gate_proj
        ["o_proj", "mlp.experts"],
        [rf"{LAYER}.\d.self_attn"],
        [f"{LAYER}.(0|11).self_attn.(q|v)_proj", "proj"],
        ["layers.3", "model.visual", "visual"],
        ["re:.*"],
        [""],
    ],
)
def test_the_list_of_fp8_leaves_out_what_the_library_does(patterns):
    """A name from its beginning to the end of a module's name, also as a pattern, or the end of one."""
    from transformers.quantizers.quantizers_utils import should_convert_module

    expected = {
        (layer, product)
        for layer in range(12)
        for product, modules in PRODUCTS.items()
        if not all(should_convert_module(f"{LAYER}.{layer}.{module}", patterns) for module in modules)
    }
    assert left_out({**QWEN, "modules_to_not_convert": patterns}) == expected
    older = {key: value for key, value in QWEN.items() if key != "modules_to_not_convert"}
    assert left_out({**older, "ignored_layers": patterns}) == expected


@pytest.mark.parametrize("folder", ["model", "language_model.model", "language_model"])
def test_names_of_older_releases_are_read(folder):
    module = f"{folder}.layers.3.self_attn.k_proj"
    assert left_out({**QWEN, "modules_to_not_convert": [module]}) == {(3, "qkv_proj")}
    assert left_out({**COMPRESSED, "ignore": [module]}) == {(3, "qkv_proj")}
    assert left_out({**COMPRESSED, "ignore": [f"re:{folder}.layers.3.self_attn.*"]}) == {
        (3, "qkv_proj"),
        (3, "o_proj"),
    }


@pytest.mark.parametrize(
    ("targets", "ignore", "expected"),
    [
        (["Linear"], ["lm_head", "re:.*mlp.gate$", "re:model.visual.*"], set()),
        (None, None, set()),
        (["Linear"], [f"{LAYER}.1.mlp.up_proj"], {(1, "gate_up_proj")}),
        (["Linear"], [f"{LAYER}.1.mlp", "re:layers.0"], set()),  # whole names, and patterns from the beginning
        (["Linear"], [r"re:.*layers\.[01]\.self_attn\.o_proj"], {(0, "o_proj"), (1, "o_proj")}),
        (["Linear"], [f"{LAYER}.0.mlp.experts.1.down_proj"], {(0, "experts")}),
        (["Linear"], ["Linear"], {(layer, product) for layer in (0, 1) for product in PRODUCTS}),
        (["re:.*mlp.*"], [], {(layer, product) for layer in (0, 1) for product in ("qkv_proj", "o_proj", *LINEAR)}),
        (
            ["re:.*(proj)$", f"{LAYER}.0.mlp.gate"],
            [r"re:.*experts\.\d\.gate_proj", "re:.*1.mlp.gate_proj"],
            {(0, "experts"), (1, "experts"), (1, "gate_up_proj"), *((i, name) for i in (0, 1) for name in LINEAR[:3])},
        ),
    ],
)
def test_targets_and_ignored_names_of_compressed_tensors(targets, ignore, expected):
    config = copy.deepcopy(COMPRESSED) | {"ignore": ignore}
    config["config_groups"]["group_0"]["targets"] = targets
    assert left_out(config, layers=2) == expected


def test_groups_of_one_form_are_in_8_bits_together():
    config = copy.deepcopy(COMPRESSED)
    group = config["config_groups"].pop("group_0")
    config["config_groups"] = {name: {**group, "targets": [f"re:.*{name}"]} for name in ("q_proj", "v_proj", "o_proj")}
    others = "gate_up_proj", "down_proj", "experts", "shared_gate_up_proj", "shared_down_proj", *LINEAR
    assert left_out(config, layers=1) == {(0, name) for name in ("qkv_proj", *others)}
    config["config_groups"]["k_proj"] = {**group, "targets": ["re:.*k_proj"]}
    assert left_out(config, layers=1) == {(0, name) for name in others}


def test_a_model_may_have_none():
    assert read_quantization({"text_config": None, "quantization_config": None}, "config.json") is None


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "quant_method 'awq'"),
        ({"quant_method": "gptq", "bits": 4}, "quant_method 'gptq'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_method 'modelopt'"),
        ({}, "quant_method None"),
        ({**QWEN, "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({**QWEN, "expert_dtype": "fp4"}, "expert_dtype 'fp4'"),
        (
            {**compressed(num_bits=4, strategy="tensor_group"), "format": "nvfp4-pack-quantized"},
            "weights of 4 bits, type 'float', format 'nvfp4-pack-quantized'",
        ),
        (compressed(type="int"), "weights of 8 bits, type 'int'"),
        (compressed(symmetric=False), "weights that are not symmetric and static"),
        (compressed(dynamic=True), "weights that are not symmetric and static"),
        (compressed(dynamic="local"), "weights that are not symmetric and static"),
        (compressed(strategy="tensor"), "strategy 'tensor'"),
        ({**COMPRESSED, "kv_cache_scheme": {"num_bits": 8}}, "a kv_cache_scheme"),
        (
            {**COMPRESSED, "config_groups": {"a": {"weights": WEIGHTS}, "b": {"weights": {**WEIGHTS, **BLOCKS}}}},
            "2 config_groups that differ",
        ),
        ({**COMPRESSED, "config_groups": {}}, "0 config_groups that differ"),
    ],
)
def test_other_formats_are_refused_with_a_sentence(config, what):
    message = rf"^quantization_config of config.json must be FP8 in Qwen's format, .* got {re.escape(what)}"
    with pytest.raises(ValueError, match=message + ".*: use the published bfloat16 or FP8 checkpoint of this model$"):
        read_quantization({"quantization_config": config}, "config.json")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("fp8", "quantization_config of config.json must be an object, got 'fp8'"),
        (
            {**QWEN, "weight_block_size": None},
            "quantization_config.weight_block_size of .* must be a list of two integers",
        ),
        ({**QWEN, "weight_block_size": [128]}, "weight_block_size .* got \\[128\\]"),
        ({**QWEN, "weight_block_size": [128, 0]}, "weight_block_size .* got \\[128, 0\\]"),
        ({**COMPRESSED, "config_groups": None}, "quantization_config.config_groups of .* must be an object, got None"),
        (
            {**COMPRESSED, "config_groups": {"a": 3}},
            "quantization_config.config_groups.a of .* must be an object, got 3",
        ),
        (
            {**COMPRESSED, "config_groups": {"a": {"weights": None}}},
            "quantization_config.config_groups.weights of .* must be an object, got None",
        ),
        ({**QWEN, "modules_to_not_convert": "lm_head"}, "modules_to_not_convert of .* must be a list"),
        ({**QWEN, "modules_to_not_convert": ["a("]}, r"modules_to_not_convert of .* or patterns, got 'a\(': missing"),
        ({**COMPRESSED, "ignore": ["re:*"]}, r"ignore of .* must be names or patterns, got 're:\*': nothing to"),
        (
            {**COMPRESSED, "config_groups": {"a": {"weights": WEIGHTS, "targets": [5]}}},
            "quantization_config.config_groups.targets of .* must be a list",
        ),
        (compressed(strategy="block"), "weights.block_structure of .* must be a list of two integers from 1 to 65536"),
    ],
)
def test_damaged_fields_are_named(config, message):
    with pytest.raises(ValueError, match=message):
        read_quantization({"quantization_config": config}, "config.json")


@pytest.mark.parametrize(
    ("block", "outputs", "inputs", "group"),
    [
        ((128, 128), 256, 384, 128),
        ((128, 128), 200, 320, 64),  # blocks at the ends are smaller
        ((128, 128), 100, 33, 1),
        ((1, None), 7, 320, 64),
        ((1, None), 7, 256, 128),
        ((64, 48), 130, 100, 4),
    ],
)
def test_each_output_and_group_of_inputs_has_the_factor_of_its_block(block, outputs, inputs, group):
    quantization = Quantization("_scale", *block)
    assert quantization.group(inputs) == group
    shape = quantization.stored_shape(outputs, inputs)
    assert shape == (-(-outputs // block[0]), 1 if block[1] is None else -(-inputs // block[1]))
    stored = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    spread = quantization.spread(stored, outputs, inputs)
    assert (spread.shape, spread.dtype) == ((outputs, inputs // group), np.float32)
    rows = np.arange(outputs) // block[0]
    columns = np.arange(inputs) // (block[1] or inputs)
    np.testing.assert_array_equal(np.repeat(spread, group, axis=1), stored[rows[:, None], columns])
