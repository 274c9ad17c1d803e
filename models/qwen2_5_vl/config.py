"""Qwen2.5-VL: window attention in the vision tower, biases on q, k, v, sectioned M-RoPE."""

from __future__ import annotations

import dataclasses
from typing import Any

from vlcache_jax.fields import real, whole
from vlcache_jax.models import config as base
from vlcache_jax.models.qwen2_vl import config as qwen2

FIELDS = base.Fields(
    text=qwen2.TEXT,
    vision={
        "depth": 32,
        "hidden_size": 3584,
        "hidden_act": "silu",
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_channels": 3,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "out_hidden_size": 3584,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 4,
    },
    rope_theta=qwen2.ROPE_THETA,
    own_vision={
        "window_size": whole(1, 1 << 16),
        "fullatt_block_indexes": base.INDICES,
        "tokens_per_second": real(0, 1e6),
    },
)


@dataclasses.dataclass(frozen=True)
class VisionConfig(base.VisionConfig):
    """`window_size` is the side of an attention window in pixels; blocks in `full_blocks` see the whole image. A second
    of a video is `tokens_per_second` positions long."""

    window_size: int
    full_blocks: tuple[int, ...]
    tokens_per_second: float

    @property
    def window_side(self) -> int:
        """Side of a window in image tokens."""
        return self.window_size // self.merge_size // self.patch_size


def read_config(config: Any, raw: dict[str, Any]) -> base.ModelConfig:
    """Our configuration of the library's `config`; `raw` is the content of `config.json`."""
    vision = config.vision_config
    decoder = qwen2.read_text(config)
    if vision.window_size < (token := vision.spatial_merge_size * vision.patch_size):
        raise ValueError(f"window_size must be at least the {token} pixels of an image token, got {vision.window_size}")
    tower = VisionConfig(
        **base.read_vision(vision, "silu"),
        window_size=vision.window_size,
        full_blocks=tuple(vision.fullatt_block_indexes),
        tokens_per_second=vision.tokens_per_second,
    )
    return base.read_model(config, raw, decoder, tower, tie_word_embeddings=qwen2.is_tied(config))
