"""Qwen3-VL with mixtures of experts: each token uses a few of the many MLPs of a layer."""

from __future__ import annotations

import dataclasses
from typing import Any

from vlcache_jax.common.json_files import optional, whole
from vlcache_jax.models import config as base
from vlcache_jax.models import qwen3_vl
from vlcache_jax.models.family import PublishedSize, text_fields

FIELDS = dataclasses.replace(
    qwen3_vl.FIELDS,
    text={
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": None,
        "hidden_act": "silu",
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 4,
        "num_experts": 60,
        "mlp_only_layers": None,
    },
    own_text={
        "decoder_sparse_step": whole(1, 1024),
        "moe_intermediate_size": whole(1, 1 << 20),
        "num_experts_per_tok": whole(1, 1 << 12),
        "num_experts": whole(0, 1 << 12),
        "num_local_experts": whole(0, 1 << 12),  # the library's other name for `num_experts`
        "mlp_only_layers": optional(base.INDICES),
    },
)


def read_config(config: Any, raw: dict[str, Any]) -> base.ModelConfig:
    """Return our configuration for the library's `config`; `raw` is the content of `config.json`."""
    text = config.text_config
    if text.head_dim is None:
        text.head_dim = text.hidden_size // text.num_attention_heads
    model = qwen3_vl.read_config(config, raw)
    decoder = dataclasses.replace(model.text, experts=read_experts(text))
    return dataclasses.replace(model, text=decoder)


def read_experts(text: Any) -> base.ExpertsConfig | None:
    """Return the experts of the library's `text_config`; None: no layer has any."""
    count = getattr(text, "num_local_experts", text.num_experts)
    layers = tuple(
        i
        for i in range(text.num_hidden_layers)
        if i not in (text.mlp_only_layers or ()) and (i + 1) % text.decoder_sparse_step == 0
    )
    if not count or not layers:
        return None
    if text.num_experts_per_tok > count:
        raise ValueError(f"num_experts_per_tok must be at most num_experts = {count}, got {text.num_experts_per_tok}")
    return base.ExpertsConfig(count, text.num_experts_per_tok, text.moe_intermediate_size, layers)


def _text(width: int, layers: int, heads: int, mlp_width: int, expert_width: int) -> dict[str, Any]:
    """Return `text_config` with 128 experts in every layer, of which a token uses 8. No layer has a plain MLP."""
    experts = {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": expert_width,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return text_fields(width, layers, heads, 4, mlp_width, 151936, qwen3_vl.POSITIONS, **qwen3_vl.OWN, **experts)


FAMILY = dataclasses.replace(
    qwen3_vl.FAMILY,
    fields=FIELDS,
    published=dataclasses.replace(
        qwen3_vl.FAMILY.published,
        architecture="Qwen3VLMoeForConditionalGeneration",
        sizes={
            "Qwen3-VL-30B-A3B": PublishedSize("qwen3_vl_moe", _text(2048, 48, 32, 6144, 768), qwen3_vl.VISION),
            "Qwen3-VL-235B-A22B": PublishedSize("qwen3_vl_moe", _text(4096, 94, 64, 12288, 1536), qwen3_vl.VISION),
        },
    ),
    read_config=read_config,
)
