"""Which model families there are, and how a checkpoint directory names its own."""

from __future__ import annotations

import dataclasses
import pathlib
import reprlib
from typing import Any

from vlcache_jax.fields import read_object
from vlcache_jax.models import qwen2_5_vl, qwen2_vl, qwen3_vl, qwen3_vl_moe
from vlcache_jax.models.config import ModelConfig, check_config, library_config
from vlcache_jax.models.family import Family
from vlcache_jax.models.quantization import read_quantization

FAMILIES: dict[str, Family] = {
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": qwen3_vl_moe,
}


def load_config(directory: str | pathlib.Path) -> ModelConfig:
    """Reads `config.json` of a checkpoint directory, in the nested or in the old flat layout.

    Raises:
      FileNotFoundError: there is no `config.json`.
      ValueError: the file is damaged, the model type is unknown, weights are quantized in a format that is not read, or
        a field is out of bounds or has a value that is not implemented; the message names file and field.
    """
    path = pathlib.Path(directory) / "config.json"
    if not path.exists():
        wanted = "a checkpoint directory with config.json and safetensors files"
        raise FileNotFoundError(f"model must be {wanted}, but {path} does not exist")
    return read_config(read_object(path), path)


def read_config(raw: dict[str, Any], path: str | pathlib.Path) -> ModelConfig:
    """The model that the content of a `config.json` describes; `path` is how errors call the file.

    Raises:
      ValueError: see `load_config`.
    """
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(f"model_type must be one of {sorted(FAMILIES)}, got {reprlib.repr(model_type)} in {path}")
    family = FAMILIES[model_type]
    check_config(raw, family.FIELDS, path)
    read_quantization(raw, path)  # a format that is not read is named before what else may be wrong
    try:
        model = family.read_config(library_config(raw, family.FIELDS), raw)
    except Exception as error:  # whatever the fields together lead to
        reason = error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} must describe a model that is supported: {reason}") from error
    text, experts = model.text, model.text.experts
    quantization = read_quantization(raw, path, text.num_layers, 0 if experts is None else experts.count)
    return dataclasses.replace(model, text=dataclasses.replace(text, quantization=quantization))
