"""The published sizes as data: each family's folder has its own, and here they are found by name."""

from __future__ import annotations

import functools
from typing import Any

from vlcache_jax.models.config import ModelConfig
from vlcache_jax.models.family import PublishedSize
from vlcache_jax.models.registry import FAMILIES, read_config

SIZES: dict[str, PublishedSize] = {
    name: size for family in FAMILIES.values() for name, size in family.PUBLISHED.sizes.items()
}

LIKE = {f"Qwen3-VL-{kind}-{size}": f"Qwen3-VL-{size}" for kind in ("Embedding", "Reranker") for size in ("2B", "8B")}
"""Published models that are of another one's size, with another use of their last token."""


FP8 = {f"{name}-FP8": name for name, size in SIZES.items() if FAMILIES[size.model_type].PUBLISHED.has_fp8}
"""Published models whose decoders are in 8 bits, and the size that each is of."""

_FP8_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def find_name(name: str) -> str | None:
    """The name of a published size, given in any case, or None: "qwen3-vl-8b" is Qwen3-VL-8B."""
    known = {one: one for one in (*SIZES, *FP8)} | LIKE
    return {one.lower(): size for one, size in known.items()}.get(name.lower())


@functools.cache
def published_config(name: str) -> ModelConfig:
    """The configuration of a published size, or of one in 8 bits.

    Raises:
      KeyError: there is no such size.
    """
    raw = config_file(SIZES[FP8.get(name, name)], dtype="bfloat16")
    return read_config(raw | ({"quantization_config": _FP8_CONFIG} if name in FP8 else {}), f"config.json of {name}")


def config_file(size: PublishedSize, *, dtype: str, **tokens: int) -> dict[str, Any]:
    """The content of `config.json`; `tokens` are ids that are not the library's defaults.

    Heads of another width than the published ones share out their frequencies among T, H and W alike.
    """
    published, text = FAMILIES[size.model_type].PUBLISHED, size.text
    half = (text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]) // 2
    section = published.rope["mrope_section"]
    side = half * section[1] // sum(section)  # H and W have as many
    rope = {"rope_type": "default", **published.rope, "mrope_section": [half - 2 * side, side, side]}
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
