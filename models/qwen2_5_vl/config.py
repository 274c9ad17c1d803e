"""Qwen2.5-VL: window attention in the vision tower, biases on q, k, v, sectioned M-RoPE."""

from __future__ import annotations

import dataclasses
from typing import Any

from vlcache_jax.models import config as base


@dataclasses.dataclass(frozen=True)
class VisionConfig(base.VisionConfig):
    """`window_size` is the side of an attention window in pixels; blocks in `full_blocks` see the whole image."""

    window_size: int
    full_blocks: tuple[int, ...]

    @property
    def window_side(self) -> int:
        """Side of a window in image tokens."""
        return self.window_size // self.merge_size // self.patch_size


def read_config(config: Any, raw: dict[str, Any]) -> base.ModelConfig:
    """Our configuration of the library's `config`; `raw` is the content of `config.json`."""
    vision, text = config.vision_config, config.text_config
    if text.hidden_size % text.num_attention_heads:
        heads = text.num_attention_heads
        raise ValueError(f"hidden_size must be a multiple of num_attention_heads = {heads}, got {text.hidden_size}")
    if vision.window_size < (token := vision.spatial_merge_size * vision.patch_size):
        raise ValueError(f"window_size must be at least the {token} pixels of an image token, got {vision.window_size}")
    return base.read_model(
        config,
        raw,
        VisionConfig(
            **base.read_vision(vision, "silu"),
            window_size=vision.window_size,
            full_blocks=tuple(vision.fullatt_block_indexes),
        ),
        head_dim=text.hidden_size // text.num_attention_heads,
        is_qwen3=False,
    )
