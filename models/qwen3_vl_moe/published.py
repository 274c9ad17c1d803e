"""What published checkpoints of Qwen3-VL with mixtures of experts look like."""

from __future__ import annotations

import dataclasses
from typing import Any

from vlcache_jax.models import qwen3_vl
from vlcache_jax.models.family import PublishedSize, TensorNames, text_fields
from vlcache_jax.models.qwen3_vl.published import OWN, POSITIONS, VISION

NAMES = TensorNames()  # published as the library has them


def _text(width: int, layers: int, heads: int, mlp_width: int, expert_width: int) -> dict[str, Any]:
    """Every layer has 128 experts, of which a row passes 8; `mlp_width` is said, but no layer has such an MLP."""
    experts = {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": expert_width,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return text_fields(width, layers, heads, 4, mlp_width, 151936, POSITIONS, **OWN, **experts)


PUBLISHED = dataclasses.replace(
    qwen3_vl.PUBLISHED,
    architecture="Qwen3VLMoeForConditionalGeneration",
    sizes={
        "Qwen3-VL-30B-A3B": PublishedSize("qwen3_vl_moe", _text(2048, 48, 32, 6144, 768), VISION),
        "Qwen3-VL-235B-A22B": PublishedSize("qwen3_vl_moe", _text(4096, 94, 64, 12288, 1536), VISION),
    },
)
