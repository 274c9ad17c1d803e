"""Qwen3-VL (dense): learned positions and DeepStack in the vision tower, q/k norms, interleaved M-RoPE."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from vlcache_jax.fields import whole
from vlcache_jax.models import config as base

FIELDS = base.Fields(
    text={
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
    },
    vision={
        "depth": 27,
        "hidden_size": 1152,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": 4304,
        "num_heads": 16,
        "in_channels": 3,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 3584,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
    },
    rope_theta=5e6,  # as at the release; the library of today has 5e5
    own_vision={"num_position_embeddings": whole(1, 1 << 24), "deepstack_visual_indexes": base.INDICES},
)


@dataclasses.dataclass(frozen=True)
class VisionConfig(base.VisionConfig):
    """The output of the blocks in `deepstack_blocks` is added to the hidden states after decoder layers 0, 1, 2..."""

    num_position_embeddings: int
    deepstack_blocks: tuple[int, ...]

    @property
    def position_side(self) -> int:
        """Side of the square grid of learned positions."""
        return math.isqrt(self.num_position_embeddings)

    @property
    def num_deepstack(self) -> int:
        return len(self.deepstack_blocks)


def read_config(config: Any, raw: dict[str, Any]) -> base.ModelConfig:
    """Our configuration of the library's `config`; `raw` is the content of `config.json`."""
    vision, text = config.vision_config, config.text_config
    base.expect("attention_bias", text.attention_bias, False)
    blocks = vision.deepstack_visual_indexes
    # Ascending: the library adds the features in the order of the blocks, whatever the order of the list.
    if len(blocks) > text.num_hidden_layers or list(blocks) != [i for i in range(vision.depth) if i in blocks]:
        raise ValueError(
            f"deepstack_visual_indexes must be ascending indices below depth = {vision.depth}, "
            f"at most num_hidden_layers = {text.num_hidden_layers} of them, got {blocks}"
        )
    tower = VisionConfig(
        **base.read_vision(vision, "gelu_pytorch_tanh"),
        num_position_embeddings=vision.num_position_embeddings,
        deepstack_blocks=tuple(blocks),
    )
    decoder = base.read_text(
        config,
        head_dim=text.head_dim,
        mrope_section=(24, 20, 20),
        mrope_interleaved=True,
        qkv_bias=False,
        qk_norm=True,
    )
    return base.read_model(config, raw, decoder, tower, tie_word_embeddings=config.tie_word_embeddings)
