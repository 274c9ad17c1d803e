"""Qwen3.5 and 3.6 with mixtures of experts in every layer, beside one expert that all tokens share."""

from __future__ import annotations

import dataclasses
from typing import Any

from vlcache_jax.common.json_files import whole
from vlcache_jax.models import config as base
from vlcache_jax.models import qwen3_5
from vlcache_jax.models.family import PublishedSize

FIELDS = dataclasses.replace(
    qwen3_5.FIELDS,
    text={
        **qwen3_5.FIELDS.text,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8,
        "num_experts": 256,
    },
    own_text={
        **qwen3_5.FIELDS.own_text,
        "moe_intermediate_size": base.WIDTH,
        "shared_expert_intermediate_size": base.WIDTH,
        "num_experts_per_tok": whole(1, 1 << 12),
        "num_experts": whole(1, 1 << 12),
    },
)


def read_config(config: Any, raw: dict[str, Any]) -> base.ModelConfig:
    """Return our configuration for the library's `config`; `raw` is the content of `config.json`."""
    text = config.text_config
    if text.num_experts_per_tok > text.num_experts:
        raise ValueError(
            f"num_experts_per_tok must be at most num_experts = {text.num_experts}, got {text.num_experts_per_tok}"
        )
    # No layer has a plain MLP, and files have no width of one. The shared expert is computed like one.
    model = qwen3_5.read_config(config, raw, intermediate_size=text.shared_expert_intermediate_size)
    experts = base.ExpertsConfig(
        text.num_experts,
        text.num_experts_per_tok,
        text.moe_intermediate_size,
        tuple(range(text.num_hidden_layers)),
        text.shared_expert_intermediate_size,
    )
    return dataclasses.replace(model, text=dataclasses.replace(model.text, experts=experts))


def _size(
    width: int, layers: int, heads: int, value_heads: int, experts: int, chosen: int, expert_width: int
) -> PublishedSize:
    """Return a published size; the shared expert is as wide as one of the others."""
    text = qwen3_5.size_of(
        width, layers, heads, 2, value_heads, expert_width,
        num_experts=experts, num_experts_per_tok=chosen, moe_intermediate_size=expert_width,
        shared_expert_intermediate_size=expert_width,
    )  # fmt: skip
    return PublishedSize("qwen3_5_moe", text, qwen3_5.VISION)


FAMILY = dataclasses.replace(
    qwen3_5.FAMILY,
    fields=FIELDS,
    published=dataclasses.replace(
        qwen3_5.FAMILY.published,
        architecture="Qwen3_5MoeForConditionalGeneration",
        experts_by_output=True,
        sizes={
            **{f"Qwen{release}-35B-A3B": _size(2048, 40, 16, 32, 256, 8, 512) for release in ("3.5", "3.6")},
            "Qwen3.5-122B-A10B": _size(3072, 48, 32, 64, 256, 8, 1024),
            "Qwen3.5-397B-A17B": _size(4096, 60, 32, 64, 512, 10, 1024),
        },
    ),
    read_config=read_config,
)
