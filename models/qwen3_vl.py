"""Qwen3-VL (dense): learned positions and DeepStack in the vision tower, q and k norms, interleaved M-RoPE."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vlcache_jax.common.json_files import whole
from vlcache_jax.models import config as base
from vlcache_jax.models import rope, vision
from vlcache_jax.models.family import Family, Published, PublishedSize, TensorNames, Videos, text_fields
from vlcache_jax.models.layers import Table, by_chunks, layer_norm, linear

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
    rope_theta=5e6,  # the default at the release; the library's present default is 5e5
    own_vision={"num_position_embeddings": whole(1, 1 << 24), "deepstack_visual_indexes": base.INDICES},
)


@dataclasses.dataclass(frozen=True)
class Qwen3VLVisionConfig(base.VisionConfig):
    """The configuration of the vision tower of Qwen3-VL.

    Attributes:
      num_position_embeddings: number of learned positions.
      deepstack_blocks: blocks whose outputs are added to the hidden states after decoder layers 0, 1, 2...
    """

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
    """Return our configuration for the library's `config`; `raw` is the content of `config.json`."""
    given, text = config.vision_config, config.text_config
    base.expect("attention_bias", text.attention_bias, False)
    blocks = given.deepstack_visual_indexes
    # Ascending: the library adds the features in the order of the blocks, whatever the order of the list.
    if len(blocks) > text.num_hidden_layers or list(blocks) != [i for i in range(given.depth) if i in blocks]:
        raise ValueError(
            f"deepstack_visual_indexes must be ascending indices below depth = {given.depth}, "
            f"at most num_hidden_layers = {text.num_hidden_layers} of them, got {blocks}"
        )
    tower = Qwen3VLVisionConfig(
        **base.read_vision(given, "gelu_pytorch_tanh"),
        num_position_embeddings=given.num_position_embeddings,
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


class Qwen3VLMLP(nnx.Module):
    def __init__(self, config: Qwen3VLVisionConfig, *, dtype: Any, rngs: nnx.Rngs):
        self.linear_fc1 = linear(config.hidden_size, config.intermediate_size, bias=True, dtype=dtype, rngs=rngs)
        self.linear_fc2 = linear(config.intermediate_size, config.hidden_size, bias=True, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return by_chunks(lambda x: self.linear_fc2(jax.nn.gelu(self.linear_fc1(x), approximate=True)), x)


class Qwen3VLVisionTower(nnx.Module):
    """The vision tower of Qwen3-VL."""

    def __init__(self, config: Qwen3VLVisionConfig, *, dtype: Any, rngs: nnx.Rngs):
        norm = functools.partial(layer_norm, config.hidden_size, dtype=dtype, rngs=rngs)
        mlp = functools.partial(Qwen3VLMLP, config, dtype=dtype, rngs=rngs)
        merger = functools.partial(vision.Merger, config, dtype=dtype, rngs=rngs)
        grouped = functools.partial(layer_norm, config.hidden_size * config.merge_size**2, dtype=dtype, rngs=rngs)
        self.config = config
        self.patch_embed = vision.PatchEmbed(config, bias=True, dtype=dtype, rngs=rngs)
        self.pos_embed = Table(config.num_position_embeddings, config.hidden_size, dtype=dtype)
        self.blocks = nnx.List(
            [vision.VisionBlock(config, norm, mlp, dtype=dtype, rngs=rngs) for _ in range(config.depth)]
        )
        self.merger = merger(norm(), norm_grouped=False)
        self.deepstack_merger_list = nnx.List([merger(grouped(), norm_grouped=True) for _ in config.deepstack_blocks])

    def __call__(
        self,
        pixels: jax.Array,
        normalization: jax.Array,
        tables: dict[str, jax.Array],
        *,
        implementation: str | None = None,
    ) -> jax.Array:
        """Encode patches, uint8 [P, C, F, patch * patch] -> tokens and DeepStack features [1 + J, P / merge^2, out]."""
        x = self.patch_embed(pixels, normalization)
        taps = self.pos_embed(tables["tap"]).astype(jnp.float32) * tables["tap_weight"][:, :, None]
        x = x + taps.sum(axis=1).astype(x.dtype)
        rotation = rope.vision_rotation(tables["yx"], self.config.head_dim)
        segment = tables["start"], tables["end"]
        deepstack = {}
        for i, block in enumerate(self.blocks):
            x = block(x, rotation, segment, implementation)
            if i in self.config.deepstack_blocks:
                j = self.config.deepstack_blocks.index(i)
                deepstack[j] = self.deepstack_merger_list[j](x)
        return jnp.stack([self.merger(x), *(deepstack[j] for j in range(len(deepstack)))])


def encoder_tables(
    config: Qwen3VLVisionConfig, grids: Sequence[vision.Grid], num_patches: int
) -> dict[str, np.ndarray]:
    """Return the tower's index tables for images packed one after the other and padded to `num_patches` (host).

    In addition to `vision.image_tables`: tap [P, 4] and tap_weight [P, 4] of the learned positions.
    """
    per_image = [_position_taps(h, w, config.merge_size, config.position_side) for _, h, w in grids]
    return {
        **vision.image_tables(config, grids, num_patches),
        "tap": vision.pack([tap for tap, _ in per_image], num_patches),
        "tap_weight": vision.pack([weight for _, weight in per_image], num_patches),
    }


@functools.lru_cache(maxsize=256)
def _position_taps(h: int, w: int, merge: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the four learned positions around each patch, [h * w, 4], and their bilinear weights.

    The corners of the image are those of the grid of positions.
    """

    def axis(n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        at = np.arange(n, dtype=np.float32) * np.float32(side - 1) / np.float32(max(n - 1, 1))
        low = at.astype(np.int32)
        return low, np.minimum(low + 1, side - 1), at - low

    y, x = vision.block_coordinates(h, w, merge).T
    (top, bottom, fy), (left, right, fx) = ([table[i] for table in axis(n)] for i, n in ((y, h), (x, w)))
    tap = np.stack([top * side + left, top * side + right, bottom * side + left, bottom * side + right], axis=1)
    weight = np.stack([(1 - fy) * (1 - fx), (1 - fy) * fx, fy * (1 - fx), fy * fx], axis=1)
    return tap.astype(np.int32), weight.astype(np.float32)


POSITIONS = 262144
OWN = {"head_dim": 128, "attention_bias": False}
VISION = FIELDS.vision  # tower of 8B and 32B
SMALL_VISION = {
    **VISION, "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17],
}  # fmt: skip

FAMILY = Family(
    fields=FIELDS,
    names=TensorNames(),  # published under the library's names
    published=Published(
        architecture="Qwen3VLForConditionalGeneration",
        rope={"rope_theta": FIELDS.rope_theta, "mrope_section": [24, 20, 20], "mrope_interleaved": True},
        image_processor={
            "patch_size": 16,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "size": {"shortest_edge": 65536, "longest_edge": 16777216},
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "processor_class": "Qwen3VLProcessor",
        },
        video_processor={
            "patch_size": 16,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "size": {"shortest_edge": 4096, "longest_edge": 25165824},
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "video_processor_type": "Qwen3VLVideoProcessor",
            "processor_class": "Qwen3VLProcessor",
        },
        sizes={
            "Qwen3-VL-2B": PublishedSize(
                "qwen3_vl", text_fields(2048, 28, 16, 8, 6144, 151936, POSITIONS, **OWN), SMALL_VISION, True
            ),
            "Qwen3-VL-4B": PublishedSize(
                "qwen3_vl", text_fields(2560, 36, 32, 8, 9728, 151936, POSITIONS, **OWN), SMALL_VISION, True
            ),
            "Qwen3-VL-8B": PublishedSize(
                "qwen3_vl", text_fields(4096, 36, 32, 8, 12288, 151936, POSITIONS, **OWN), VISION
            ),
            "Qwen3-VL-32B": PublishedSize(
                "qwen3_vl", text_fields(5120, 64, 64, 8, 25600, 151936, POSITIONS, **OWN), VISION
            ),
        },
        has_fp8=True,
    ),
    # Each chunk follows the text of its time and has its own markers. The markers that a chat template puts around the
    # full video are dropped, as in the code at the models' release (transformers 4.57). The present library keeps them
    # around the chunks.
    video=Videos(
        processor="Qwen3VLVideoProcessor",
        chunk="<{seconds:.1f} seconds><|vision_start|><|video_pad|><|vision_end|>",
        time_step=lambda vision, seconds: 0,
        markers=("<|vision_start|>", "<|vision_end|>"),
    ),
    vision_tower=Qwen3VLVisionTower,
    read_config=read_config,
    encoder_tables=encoder_tables,
)
