"""The model families by model type, and the published sizes of all families by name."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import reprlib
from typing import Any

from vlcache_jax.common.json_files import read_object
from vlcache_jax.models import qwen2_5_vl, qwen2_vl, qwen3_5, qwen3_5_moe, qwen3_vl, qwen3_vl_moe
from vlcache_jax.models.config import ModelConfig, check_config, library_config
from vlcache_jax.models.family import Family, PublishedSize
from vlcache_jax.models.quantization import read_quantization

FAMILIES: dict[str, Family] = {
    "qwen2_vl": qwen2_vl.FAMILY,
    "qwen2_5_vl": qwen2_5_vl.FAMILY,
    "qwen3_vl": qwen3_vl.FAMILY,
    "qwen3_vl_moe": qwen3_vl_moe.FAMILY,
    "qwen3_5": qwen3_5.FAMILY,
    "qwen3_5_moe": qwen3_5_moe.FAMILY,
}


def load_config(directory: str | pathlib.Path) -> ModelConfig:
    """Read `config.json` of a checkpoint directory, in the nested or in the old flat layout.

    Raises:
      FileNotFoundError: there is no `config.json`.
      ValueError: the file is damaged, the model type is unknown, the format of quantized weights is not supported, or
        a field is out of bounds or has an unsupported value. The message names file and field.
    """
    path = pathlib.Path(directory) / "config.json"
    if not path.exists():
        wanted = "a checkpoint directory with config.json and safetensors files"
        raise FileNotFoundError(f"model must be {wanted}, but {path} does not exist")
    return read_config(read_object(path), path)


def read_config(raw: dict[str, Any], path: str | pathlib.Path) -> ModelConfig:
    """Return the configuration for the content of a `config.json`.

    Args:
      path: name of the file in errors.

    Raises:
      ValueError: see `load_config`.
    """
    model_type = raw.get("model_type")
    if isinstance(model_type, str) and model_type.removesuffix("_text") in FAMILIES and model_type not in FAMILIES:
        raise ValueError(
            f"model_type must be that of a model with a vision tower, such as {model_type.removesuffix('_text')!r}, "
            f"got {model_type!r} in {path}: text-only checkpoints are not supported"
        )
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(f"model_type must be one of {sorted(FAMILIES)}, got {reprlib.repr(model_type)} in {path}")
    family = FAMILIES[model_type]
    check_config(raw, family.fields, path)
    read_quantization(raw, path)  # reports an unsupported format before other errors
    try:
        model = family.read_config(library_config(raw, family.fields), raw)
    except Exception as error:  # combinations of fields can lead to any error
        reason = error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} must describe a supported model: {reason}") from error
    text, experts = model.text, model.text.experts
    quantization = read_quantization(raw, path, text.num_layers, 0 if experts is None else experts.count)
    return dataclasses.replace(model, text=dataclasses.replace(text, quantization=quantization))


SIZES: dict[str, PublishedSize] = {
    name: size for family in FAMILIES.values() for name, size in family.published.sizes.items()
}

LIKE = {f"Qwen3-VL-{kind}-{size}": f"Qwen3-VL-{size}" for kind in ("Embedding", "Reranker") for size in ("2B", "8B")}
"""Published models of another model's size, with another use of their last token."""


FP8 = {f"{name}-FP8": name for name, size in SIZES.items() if FAMILIES[size.model_type].published.has_fp8}
"""Published models whose decoders are in FP8, and their sizes."""

_FP8_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def find_name(name: str) -> str | None:
    """Return the name of a published size, given in any case, or None: "qwen3-vl-8b" is Qwen3-VL-8B."""
    known = {one: one for one in (*SIZES, *FP8)} | LIKE
    return {one.lower(): size for one, size in known.items()}.get(name.lower())


@functools.cache
def published_config(name: str) -> ModelConfig:
    """Return the configuration of a published size, or of one in FP8.

    Raises:
      KeyError: there is no such size.
    """
    raw = config_file(SIZES[FP8.get(name, name)], dtype="bfloat16")
    return read_config(raw | ({"quantization_config": _FP8_CONFIG} if name in FP8 else {}), f"config.json of {name}")


def config_file(size: PublishedSize, *, dtype: str, **tokens: int) -> dict[str, Any]:
    """Return the content of `config.json`.

    Heads of another width than the published ones split their frequencies among T, H and W in the same ratio.

    Args:
      tokens: ids of special tokens that are not the library's defaults.
    """
    published, text = FAMILIES[size.model_type].published, size.text
    head_dim = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    half = int(head_dim * published.rope.get("partial_rotary_factor", 1)) // 2
    section = published.rope["mrope_section"]
    side = half * section[1] // sum(section)  # of H and of W
    own = section if half == sum(section) else [half - 2 * side, side, side]
    rope = {"rope_type": "default", **published.rope, "mrope_section": own}
    return {
        "architectures": [published.architecture],
        "model_type": size.model_type,
        **tokens,
        "tie_word_embeddings": size.tie_word_embeddings,
        "dtype": dtype,
        "vision_config": {
            "model_type": size.model_type,
            **size.vision,
            published.output_width: text["hidden_size"],
        },
        "text_config": {"model_type": f"{size.model_type}_text", "rope_parameters": rope, **text},
    }
