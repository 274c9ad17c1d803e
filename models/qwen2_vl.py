"""Qwen2-VL: attention over the whole image in every block of the vision tower, biases on q, k, v, sectioned M-RoPE.

Qwen2.5-VL shares its decoder, its tensor names and the rule for tied embeddings.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vlcache_jax.common.json_files import whole
from vlcache_jax.models import config as base
from vlcache_jax.models import rope, vision
from vlcache_jax.models.config import VisionConfig
from vlcache_jax.models.family import Family, Published, PublishedSize, TensorNames, Videos, text_fields
from vlcache_jax.models.layers import by_chunks, layer_norm, linear

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
    """Return our configuration for the library's `config`; `raw` is the content of `config.json`."""
    given, text = config.vision_config, config.text_config
    decoder = read_decoder(config)
    # `embed_dim` is the width of the tower, and `hidden_size` the width of its output.
    if given.hidden_size != text.hidden_size:
        raise ValueError(f"vision hidden_size must equal hidden_size = {text.hidden_size}, got {given.hidden_size}")
    tower = VisionConfig(
        **base.read_vision(
            given,
            "quick_gelu",
            hidden_size=given.embed_dim,
            intermediate_size=given.embed_dim * given.mlp_ratio,
            out_hidden_size=given.hidden_size,
        )
    )
    return base.read_model(config, raw, decoder, tower, tie_word_embeddings=is_tied(config))


def read_decoder(config: Any) -> base.TextConfig:
    """Return the configuration of the decoder of Qwen2-VL and Qwen2.5-VL."""
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
    """Return whether the output head is the embedding table. Some checkpoints declare it in `text_config` only."""
    return bool(config.tie_word_embeddings or getattr(config.text_config, "tie_word_embeddings", False))


class Qwen2VLMLP(nnx.Module):
    def __init__(self, config: VisionConfig, *, dtype: Any, rngs: nnx.Rngs):
        self.fc1 = linear(config.hidden_size, config.intermediate_size, bias=True, dtype=dtype, rngs=rngs)
        self.fc2 = linear(config.intermediate_size, config.hidden_size, bias=True, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return by_chunks(self._rows, x)

    def _rows(self, x: jax.Array) -> jax.Array:
        x = self.fc1(x)
        # The library's quick_gelu, rounded once: XLA on a CPU rounds every step of a sigmoid in bfloat16.
        y = x.astype(jnp.float32)
        return self.fc2((y * jax.nn.sigmoid(1.702 * y)).astype(x.dtype))


class Qwen2VLVisionTower(nnx.Module):
    """The vision tower of Qwen2-VL."""

    def __init__(self, config: VisionConfig, *, dtype: Any, rngs: nnx.Rngs):
        norm = functools.partial(layer_norm, config.hidden_size, dtype=dtype, rngs=rngs)
        mlp = functools.partial(Qwen2VLMLP, config, dtype=dtype, rngs=rngs)
        self.config = config
        self.patch_embed = vision.PatchEmbed(config, bias=False, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List(
            [vision.VisionBlock(config, norm, mlp, dtype=dtype, rngs=rngs) for _ in range(config.depth)]
        )
        self.merger = vision.Merger(config, norm(), norm_grouped=False, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        pixels: jax.Array,
        normalization: jax.Array,
        tables: dict[str, jax.Array],
        *,
        implementation: str | None = None,
    ) -> jax.Array:
        """Encode patches, uint8 [P, C, patch * patch] -> [1, P / merge^2, out]."""
        x = self.patch_embed(pixels, normalization)
        rotation = rope.vision_rotation(tables["yx"], self.config.head_dim)
        for block in self.blocks:
            x = block(x, rotation, (tables["start"], tables["end"]), implementation)
        return self.merger(x)[None]


def encoder_tables(config: VisionConfig, grids: Sequence[vision.Grid], num_patches: int) -> dict[str, np.ndarray]:
    """Return the tower's index tables for images packed one after the other and padded to `num_patches` (host)."""
    return vision.image_tables(config, grids, num_patches)


_POSITIONS = 32768

FAMILY = Family(
    fields=FIELDS,
    names=TensorNames(
        modules={
            "visual.merger.norm.": "visual.merger.ln_q.",
            "visual.merger.linear_fc1.": "visual.merger.mlp.0.",
            "visual.merger.linear_fc2.": "visual.merger.mlp.2.",
        },
        published={"visual.": "model.visual.", "model.": "model.language_model."},
    ),
    published=Published(
        architecture="Qwen2VLForConditionalGeneration",
        rope={"rope_theta": ROPE_THETA, "mrope_section": [16, 24, 24]},
        image_processor={
            "patch_size": 14,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "min_pixels": 3136,
            "max_pixels": 12845056,
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2VLProcessor",
        },
        sizes={
            "Qwen2-VL-2B": PublishedSize(
                "qwen2_vl", text_fields(1536, 28, 12, 2, 8960, 151936, _POSITIONS), FIELDS.vision, True
            ),
            "Qwen2-VL-7B": PublishedSize(
                "qwen2_vl", text_fields(3584, 28, 28, 4, 18944, 152064, _POSITIONS), FIELDS.vision
            ),
            "Qwen2-VL-72B": PublishedSize(
                "qwen2_vl", text_fields(8192, 80, 64, 8, 29568, 152064, _POSITIONS), FIELDS.vision
            ),
        },
        has_flat=True,
        system_turn="You are a helpful assistant.",
        output_width="hidden_size",
    ),
    # All chunks are one run of placeholders, one position apart.
    video=Videos(processor="Qwen2VLVideoProcessor", chunk="<|video_pad|>", time_step=lambda vision, seconds: 1),
    vision_tower=Qwen2VLVisionTower,
    read_config=read_config,
    encoder_tables=encoder_tables,
)
