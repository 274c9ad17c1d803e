"""Small random checkpoints in the layout of the published ones, for demonstrations, tests and benchmarks.

No torch is needed. The outputs are meaningless, but file names, tensor names, tokenizer, chat template and image
processor settings are real. Biases are not zero and norm weights not one, so that tests notice an omitted part.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from vlcache_jax.inputs.prompt import CLOSE, OPEN
from vlcache_jax.models.config import ModelConfig
from vlcache_jax.models.family import Published, PublishedSize
from vlcache_jax.models.params import Part, parameters, pieces, published_name, whole_name
from vlcache_jax.models.quantization import FLOAT8
from vlcache_jax.models.registry import FAMILIES, config_file, load_config

# IDs 0-255 are the bytes themselves; the special tokens follow.
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TOKEN_IDS = {token: 256 + i for i, token in enumerate(SPECIAL_TOKENS)}

_TEXT: dict[str, Any] = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "bos_token_id": TOKEN_IDS["<|endoftext|>"],
    "eos_token_id": TOKEN_IDS["<|im_end|>"],
}
_VISION: dict[str, Any] = {
    "depth": 4,
    "num_heads": 2,
    "in_channels": 3,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
# Fields that each family adds. Small windows and position grids make borders and interpolation matter in small images.
_QWEN2_TEXT = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 4}
_QWEN3_5_TEXT = {
    "head_dim": 32,
    "attention_bias": False,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_FAMILY_TEXT: dict[str, dict[str, Any]] = {
    "qwen2_vl": _QWEN2_TEXT,
    "qwen2_5_vl": _QWEN2_TEXT,
    "qwen3_vl": {"head_dim": 24, "attention_bias": False},
    "qwen3_vl_moe": {
        "head_dim": 24,
        "attention_bias": False,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "qwen3_5": _QWEN3_5_TEXT,
    "qwen3_5_moe": {
        **_QWEN3_5_TEXT,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56,
    },
}
_QWEN3_VISION = {
    "hidden_size": 32,
    "intermediate_size": 72,
    "hidden_act": "gelu_pytorch_tanh",
    "patch_size": 16,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [1, 2],
}
_QWEN3_5_VISION = {**_QWEN3_VISION, "deepstack_visual_indexes": []}
_FAMILY_VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"embed_dim": 32, "mlp_ratio": 4, "hidden_act": "quick_gelu", "patch_size": 14},
    "qwen2_5_vl": {
        "hidden_size": 32,
        "intermediate_size": 52,
        "hidden_act": "silu",
        "patch_size": 14,
        "window_size": 56,
        "fullatt_block_indexes": [1, 3],
        "tokens_per_second": 2,
    },
    "qwen3_vl": _QWEN3_VISION,
    "qwen3_vl_moe": _QWEN3_VISION,
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), _QWEN3_5_VISION),
}

# Published templates, shortened. Videos have the same markers as images. Families whose template adds a system turn
# render all turns alike.
_PARTS = """\
{%- set images, videos = namespace(count=0), namespace(count=0) %}
{%- macro shown(content, media) %}
    {%- if content is string %}
        {{- content }}
    {%- else %}
        {%- for part in content %}
            {%- if media and (part.type == 'image' or 'image' in part or 'image_url' in part) %}
                {%- set images.count = images.count + 1 %}
                {%- if add_vision_id %}{{ 'Picture ' ~ images.count ~ ': ' }}{% endif %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif media and (part.type == 'video' or 'video' in part) %}
                {%- set videos.count = videos.count + 1 %}
                {%- if add_vision_id %}{{ 'Video ' ~ videos.count ~ ': ' }}{% endif %}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' }}
            {%- elif 'text' in part %}
                {{- part.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
"""
_TURNS_ALIKE = """\
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\n' + system_turn + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + shown(message.content, true) + '<|im_end|>\\n' }}
{%- endfor %}
"""
_TURNS_BY_ROLE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{ shown(messages[0].content, false) + '\\n\\n' }}{% endif %}
    {{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}
    {{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments ' }}
    {{- 'within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{"name": <function-name>, ' }}
    {{- '"arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and loop.first and not tools) %}
        {{- '<|im_start|>' + message.role + '\\n' + shown(message.content, message.role == 'user') + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + shown(message.content, false) }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}{{ '\\n' }}{% endif %}
            {%- if call.function %}{% set call = call.function %}{% endif %}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + shown(message.content, true) + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
"""
_ANSWER = """\
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


def make_checkpoint(
    directory: str | pathlib.Path,
    model_type: str = "qwen3_vl",
    *,
    seed: int = 0,
    dtype: Literal["float32", "bfloat16"] = "float32",
    shards: int = 1,
    text: Mapping[str, Any] | None = None,
    vision: Mapping[str, Any] | None = None,
    tie_word_embeddings: bool = False,
    layout: Literal["nested", "flat"] = "nested",
    names: Literal["published", "library"] = "published",
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    generation: Mapping[str, Any] | None = None,
    quantization: Literal["fp8", "block", "channel"] | None = None,
    block: int = 128,
    weights: bool = True,
    corpus: Iterable[str] = (),
) -> pathlib.Path:
    """Write a small random checkpoint.

    Args:
      directory: target directory; it is created if it does not exist.
      model_type: model family, such as "qwen3_vl".
      seed: seed of the weights. Two dtypes with the same seed have the same weights up to rounding.
      dtype: data type of the weights.
      shards: number of weight files; several files get an index.
      text, vision: fields of `text_config` and `vision_config` that differ from the defaults.
      tie_word_embeddings: use the table of token embeddings as output head.
      layout: layout of `config.json`; "flat" is the old one of some families, with the text fields at the top level.
      names: tensor names and expert layout, as in published checkpoints or as in the library's modules.
      min_pixels, max_pixels: limits of the image processor; by default one image token, and the published maximum.
      generation: fields of `generation_config.json` in addition to the token IDs.
      quantization: FP8 format of the decoder's matrices: "fp8" as published by Qwen, "block" and "channel" as in
        compressed-tensors, None for none. The values are those of the same seed, rounded; experts are stored
        separately.
      block: number of outputs and of inputs that share a scale; published checkpoints use 128.
      weights: False writes no weights, for sizes whose weights are drawn elsewhere.
      corpus: texts from which the tokenizer learns merges until the vocabulary is full; by default a token is a byte or
        a special token.

    Returns:
      The directory.

    Raises:
      ValueError: `model_type` or `quantization` is unknown, the family has no flat layout, or `vocab_size` is too
        small.
    """
    if model_type not in FAMILIES:
        raise ValueError(f"model_type must be one of {sorted(FAMILIES)}, got {model_type!r}")
    published = FAMILIES[model_type].published
    if layout == "flat" and not published.has_flat:
        raise ValueError(f"layout must be 'nested' for {model_type}, got 'flat'")
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = _config(model_type, text or {}, vision or {}, tie_word_embeddings, dtype, flat=layout == "flat")
    tags = (OPEN, CLOSE) if published.has_thinking_tags else ()
    vocab_size, min_size = config.get("text_config", config)["vocab_size"], 256 + len(SPECIAL_TOKENS) + len(tags)
    if vocab_size < min_size:
        raise ValueError(f"vocab_size must be at least {min_size}, the size of the tokenizer, got {vocab_size}")
    if quantization is not None:
        config["quantization_config"] = _quantization_config(quantization, block)
    _write_json(directory / "config.json", config)
    _write_json(directory / "preprocessor_config.json", _preprocessor(config, published, min_pixels, max_pixels))
    if published.video_processor is not None:
        video = {**published.video_processor, **_patches(config)}
        _write_json(directory / "video_preprocessor_config.json", video)
    stop = [TOKEN_IDS["<|im_end|>"], TOKEN_IDS["<|endoftext|>"]]
    _write_json(
        directory / "generation_config.json",
        {"do_sample": False, "eos_token_id": stop, "pad_token_id": stop[1], **(generation or {})},
    )
    tokenizer = _tokenizer(published.system_turn, corpus, vocab_size - len(tags))
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    tokenizer.save_pretrained(directory)
    if weights:
        _write_weights(directory, seed, dtype, shards, published=names == "published")
    return directory


def _config(
    model_type: str, text: Mapping[str, Any], vision: Mapping[str, Any], tied: bool, dtype: str, *, flat: bool
) -> dict[str, Any]:
    text = {**_TEXT, **_FAMILY_TEXT[model_type], **text}
    size = PublishedSize(model_type, text, {**_VISION, **_FAMILY_VISION[model_type], **vision}, tied)
    ids = {f"{name}_token_id": TOKEN_IDS[f"<|{name}_pad|>"] for name in ("image", "video")}
    ids |= {f"vision_{name}_token_id": TOKEN_IDS[f"<|vision_{name}|>"] for name in ("start", "end")}
    config = config_file(size, dtype=dtype, **ids)
    if not flat:
        return config
    rope = config.pop("text_config")["rope_parameters"]
    old_rope = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    dtypes = {"torch_dtype": config.pop("dtype")}
    return {**config, **dtypes, "rope_theta": rope["rope_theta"], "rope_scaling": old_rope, **text}


def _preprocessor(
    config: dict[str, Any], published: Published, min_pixels: int | None, max_pixels: int | None
) -> dict[str, Any]:
    settings = {**published.image_processor, **_patches(config)}
    min_pixels = min_pixels or (settings["patch_size"] * settings["merge_size"]) ** 2
    if (size := settings.get("size")) is not None:  # the newer spelling of the limits
        return settings | {"size": {"shortest_edge": min_pixels, "longest_edge": max_pixels or size["longest_edge"]}}
    return settings | {"min_pixels": min_pixels, "max_pixels": max_pixels or settings["max_pixels"]}


def _patches(config: dict[str, Any]) -> dict[str, int]:
    """Return the patch sizes of the vision tower under the names that processors use."""
    vision = config["vision_config"]
    return {
        "patch_size": vision["patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
    }


def _tokenizer(system_turn: str | None, corpus: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer. IDs: the bytes, the special tokens, then merges learned from `corpus`."""
    # ByteLevel spells each byte as one printable character: itself, or else one from U+0100 on, in the bytes' order.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(byte if byte in printable else 0x100 + others.index(byte)): byte for byte in range(256)}
    learning = Tokenizer(models.BPE())
    learning.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS), initial_alphabet=list(vocab), show_progress=False
    )
    learning.train_from_iterator(corpus, trainer)
    merges = [tuple(merge) for merge in json.loads(learning.to_str())["model"]["merges"]]
    vocab |= TOKEN_IDS
    vocab |= {"".join(merge): len(vocab) + i for i, merge in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(SPECIAL_TOKENS),
        chat_template=_chat_template(system_turn),
    )


def _chat_template(system_turn: str | None) -> str:
    if system_turn is None:
        return _PARTS + _TURNS_BY_ROLE + _ANSWER
    return f"{{%- set system_turn = {system_turn!r} %}}\n" + _PARTS + _TURNS_ALIKE + _ANSWER


def _write_weights(directory: pathlib.Path, seed: int, dtype: str, shards: int, *, published: bool) -> None:
    config = load_config(directory)
    plain = dataclasses.replace(config, text=dataclasses.replace(config.text, quantization=None))
    rng = np.random.default_rng(seed)
    tensors = {}
    by_output = not published or FAMILIES[config.model_type].published.experts_by_output
    parts = [part for parameter in parameters(plain) for part in parameter.parts]
    for part in sorted(parts, key=lambda part: part.path):
        tensor = _random(rng, _kind(part), part.tensor_shape)
        if _is_offset(config, part):
            tensor -= 1
        if part.is_stack and by_output:
            tensor = np.ascontiguousarray(tensor.swapaxes(1, 2))
        tensors[part.tensor] = tensor.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    _join_pieces(tensors, config)
    if config.text.quantization is not None:
        _quantize(tensors, config, is_turned=by_output)
    if published:
        tensors = {published_name(config, name): tensor for name, tensor in tensors.items()}
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(_split(sorted(tensors), shards), 1):
        file = f"model-{i:05d}-of-{shards:05d}.safetensors"
        save_file({name: tensors[name] for name in shard}, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(
        directory / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": weight_map}
    )


def _is_offset(config: ModelConfig, part: Part) -> bool:
    """Return whether a part is the weight w of a norm that multiplies by 1 + w."""
    in_decoder = part.path[0] == "language_model" and "linear_attn" not in part.path
    return config.text.norm_offset and in_decoder and part.path[-1] == "scale"


def _join_pieces(tensors: dict[str, np.ndarray], config: ModelConfig) -> None:
    """Replace tensors that are parts of one tensor of the library by that tensor."""
    for module, outputs in pieces(config).items():
        folder, _, joined = module.rpartition(".")
        own = [f".{folder}.{name}.weight" for name in outputs]
        for first in [name for name in tensors if name.endswith(own[0])]:
            layer = first.removesuffix(own[0])
            parts = [tensors.pop(layer + ending) for ending in own]
            tensors[f"{layer}.{folder}.{joined}.weight"] = np.concatenate(parts)


def _quantization_config(name: str, block: int) -> dict[str, Any]:
    """Return the `quantization_config` in its published form."""
    if name == "fp8":
        return {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "modules_to_not_convert": ["lm_head", "model.visual", "in_proj_a", "in_proj_b"],
            "quant_method": "fp8",
            "weight_block_size": [block, block],
        }
    if name not in ("block", "channel"):
        raise ValueError(f"quantization must be None, 'fp8', 'block' or 'channel', got {name!r}")
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": name}
    if name == "block":
        weights["block_structure"] = [block, block]
    return {
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "format": "float-quantized",
        "ignore": ["lm_head", "re:.*visual.*", "re:.*in_proj_[ab]$"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
    }


def _quantize(tensors: dict[str, np.ndarray], config: ModelConfig, *, is_turned: bool) -> None:
    """Round the decoder's matrices to FP8 in place. `is_turned`: matrices of experts are [E, out, in]."""
    for part in [part for parameter in parameters(config) for part in parameter.parts if part.is_float8]:
        if not part.is_stack:
            name = whole_name(part.tensor)
            if tensors[name].dtype != FLOAT8:  # the first of its parts
                tensors |= _rounded(name, tensors[name], config)
            continue
        stack = tensors.pop(part.tensor)
        for names, matrix in zip(part.singles, stack if is_turned else stack.swapaxes(1, 2), strict=True):
            for name, single in zip(names, np.split(matrix, len(names)), strict=True):
                tensors |= _rounded(name, single, config)


def _rounded(name: str, matrix: np.ndarray, config: ModelConfig) -> dict[str, np.ndarray]:
    """Return a matrix in FP8 and its scales, which map the largest value of a block to the largest FP8 value."""
    quantization = config.text.quantization
    assert quantization is not None
    outputs, inputs = matrix.shape
    rows, columns = quantization.stored_shape(outputs, inputs)
    height, width = quantization.outputs, quantization.inputs or inputs
    padded = np.zeros((rows * height, columns * width), np.float32)
    padded[:outputs, :inputs] = matrix
    largest = np.abs(padded.reshape(rows, height, columns, width)).max(axis=(1, 3))
    largest_fp8 = float(ml_dtypes.finfo(FLOAT8).max)
    factors = (np.maximum(largest, 1e-6) / largest_fp8).astype(ml_dtypes.bfloat16)
    group = quantization.group(inputs)
    spread = np.repeat(quantization.spread(factors, outputs, inputs), group, axis=1)
    rounded = np.clip(matrix.astype(np.float32) / spread, -largest_fp8, largest_fp8).astype(FLOAT8)
    return {name: rounded, name + quantization.suffix: factors}


def _kind(part: Part) -> str:
    if part.is_stack:
        return "experts"
    if part.path[-2:] == ("gate", "kernel"):
        return "router"
    # The output head is stored like the embedding table, but it is multiplied like a kernel.
    return "kernel" if part.path[0] == "lm_head" else str(part.path[-1])


def _random(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    noise = rng.standard_normal(shape, np.float32)
    match kind:
        case "scale":
            return 1 + np.float32(0.2) * noise
        case "bias":
            return np.float32(0.2) * noise
        case "embedding":
            return np.float32(0.5) * noise
        case "experts":
            return noise / np.float32(math.sqrt(shape[1]))
        case "A_log" | "dt_bias":
            # As trained models have them: decays of 0.001 to 1 a token. The library's own initial values forget
            # everything within a token.
            low, high = (0.02, 16) if kind == "A_log" else (1e-3, 1e-1)
            drawn = low * np.float32(high / low) ** rng.random(shape, np.float32)
            return np.log(drawn if kind == "A_log" else np.expm1(drawn))
        case "router":
            # Some experts are chosen often, others rarely.
            often = np.linspace(0.2, 1.8, shape[0], dtype=np.float32)[:, None]
            return often * noise / np.float32(math.sqrt(shape[1]))
        case _:
            return noise / np.float32(math.sqrt(math.prod(shape[1:])))


def _split(names: Sequence[str], parts: int) -> list[Sequence[str]]:
    return [names[len(names) * i // parts : len(names) * (i + 1) // parts] for i in range(parts)]


def _write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
