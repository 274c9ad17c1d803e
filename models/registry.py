"""Which model families there are, and how a checkpoint directory names its own."""

from __future__ import annotations

import json
import pathlib

from vlcache_jax.models import qwen2_5_vl, qwen3_vl
from vlcache_jax.models.config import ModelConfig, library_config

FAMILIES = {"qwen2_5_vl": qwen2_5_vl, "qwen3_vl": qwen3_vl}


def load_config(directory: str | pathlib.Path) -> ModelConfig:
    """Reads `config.json` of a checkpoint directory, in the nested or in the old flat layout.

    Raises:
      FileNotFoundError: there is no `config.json`.
      ValueError: the model type is unknown, the checkpoint is quantized, or a field has a value that is not
        implemented.
    """
    path = pathlib.Path(directory) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"model must be a checkpoint directory, but {path} does not exist")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} must be a JSON file: {error}") from error
    model_type = raw.get("model_type") if isinstance(raw, dict) else None
    if model_type not in FAMILIES:
        raise ValueError(f"model_type must be one of {sorted(FAMILIES)}, got {model_type!r} in {path}")
    if any("quantization_config" in part for part in (raw, raw.get("text_config") or {})):
        raise ValueError(f"quantized checkpoints are not supported, but {path} has a quantization_config")
    family = FAMILIES[model_type]
    return family.read_config(library_config(raw, family.DEFAULTS), raw)
