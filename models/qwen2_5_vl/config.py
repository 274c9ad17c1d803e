"""Qwen2.5-VL: window attention in the vision tower, biases on q, k, v, sectioned M-RoPE."""

from __future__ import annotations

import dataclasses
from typing import Any

from vlcache_jax.fields import whole
from vlcache_jax.models import config as base

FIELDS = base.Fields(
    text={
        "vocab_size": 152064,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
    },
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
    },
    rope_theta=1000000.0,
    own_vision={"window_size": whole(1, 1 << 16), "fullatt_block_indexes": base.INDICES},
)


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
    tower = VisionConfig(
        **base.read_vision(vision, "silu"),
        window_size=vision.window_size,
        full_blocks=tuple(vision.fullatt_block_indexes),
    )
    decoder = base.read_text(
        config,
        head_dim=text.hidden_size // text.num_attention_heads,
        mrope_section=(16, 24, 24),
        mrope_interleaved=False,
        qkv_bias=True,
        qk_norm=False,
    )
    # Some checkpoints say it of the text alone.
    tied = bool(config.tie_word_embeddings or getattr(text, "tie_word_embeddings", False))
    return base.read_model(config, raw, decoder, tower, tie_word_embeddings=tied)
