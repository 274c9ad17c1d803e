"""Qwen2-VL: the whole image is seen in every block of the vision tower, biases on q, k, v, sectioned M-RoPE.

The decoder, and how a file says that the embeddings are tied, are those of Qwen2.5-VL, too.
"""

from __future__ import annotations

from typing import Any

from vlcache_jax.fields import whole
from vlcache_jax.models import config as base

TEXT = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
}
ROPE_THETA = 1000000.0
FIELDS = base.Fields(
    text=TEXT,
    vision={
        "depth": 32,
        "embed_dim": 1280,
        "hidden_size": 3584,
        "hidden_act": "quick_gelu",
        "mlp_ratio": 4,
        "num_heads": 16,
        "in_channels": 3,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    rope_theta=ROPE_THETA,
    own_vision={"embed_dim": base.WIDTH, "mlp_ratio": whole(1, 64)},
)


def read_config(config: Any, raw: dict[str, Any]) -> base.ModelConfig:
    """Our configuration of the library's `config`; `raw` is the content of `config.json`."""
    vision, text = config.vision_config, config.text_config
    decoder = read_text(config)
    # The width of the tower is `embed_dim` here, and `hidden_size` that of its output.
    if vision.hidden_size != text.hidden_size:
        raise ValueError(f"vision hidden_size must equal hidden_size = {text.hidden_size}, got {vision.hidden_size}")
    tower = base.VisionConfig(
        **base.read_vision(
            vision,
            "quick_gelu",
            hidden_size=vision.embed_dim,
            intermediate_size=vision.embed_dim * vision.mlp_ratio,
            out_hidden_size=vision.hidden_size,
        )
    )
    return base.read_model(config, raw, decoder, tower, tie_word_embeddings=is_tied(config))


def read_text(config: Any) -> base.TextConfig:
    """The decoder of Qwen2-VL and Qwen2.5-VL."""
    text = config.text_config
    if text.hidden_size % text.num_attention_heads:
        heads = text.num_attention_heads
        raise ValueError(f"hidden_size must be a multiple of num_attention_heads = {heads}, got {text.hidden_size}")
    return base.read_text(
        config,
        head_dim=text.hidden_size // text.num_attention_heads,
        mrope_section=(16, 24, 24),
        mrope_interleaved=False,
        qkv_bias=True,
        qk_norm=False,
    )


def is_tied(config: Any) -> bool:
    """Whether the output head is the table of embeddings. Some checkpoints say it of the text alone."""
    return bool(config.tie_word_embeddings or getattr(config.text_config, "tie_word_embeddings", False))
