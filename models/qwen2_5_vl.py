"""Qwen2.5-VL: window attention in the vision tower, biases on q, k, v, sectioned M-RoPE.

Qwen2.5-VL: window attention in the vision tower, biases on q, k, v, sectioned M-RoPE.

The vision tower of Qwen2.5-VL: attention in windows, and over the whole image in a few blocks.

What published checkpoints of Qwen2.5-VL look like: as Qwen2-VL's, but for what is here; and their videos.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from vlcache_jax.common.json_files import real, whole
from vlcache_jax.models import config as base
from vlcache_jax.models import qwen2_vl, rope, vision
from vlcache_jax.models import qwen2_vl as qwen2
from vlcache_jax.models.family import PublishedSize, Videos, text_fields
from vlcache_jax.models.layers import GatedMLP, RMSNorm

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


class VisionTower(nnx.Module):
    """Packed patches to image tokens. Image tokens are reordered window by window, and put back after the merger."""

    def __init__(self, config: VisionConfig, *, dtype: Any, rngs: nnx.Rngs):
        norm = functools.partial(RMSNorm, config.hidden_size, 1e-6, dtype=dtype)
        mlp = functools.partial(
            GatedMLP, config.hidden_size, config.intermediate_size, bias=True, dtype=dtype, rngs=rngs
        )
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
        """uint8 [P, C, F, patch * patch] -> [1, P / merge^2, out]."""
        x = self.patch_embed(pixels, normalization)
        tokens = len(x) // self.config.merge_size**2
        x = x.reshape(tokens, -1)[tables["window_order"]].reshape(x.shape)
        rotation = rope.vision_rotation(tables["yx"], self.config.head_dim)
        image, window = ((tables[f"{name}_start"], tables[f"{name}_end"]) for name in ("image", "window"))
        for i, block in enumerate(self.blocks):
            x = block(x, rotation, image if i in self.config.full_blocks else window, implementation)
        return self.merger(x)[tables["image_order"]][None]


def encoder_tables(config: VisionConfig, grids: Sequence[vision.Grid], num_patches: int) -> dict[str, np.ndarray]:
    """What the tower must know of images packed one after the other and padded to `num_patches` (host).

    window_order [P / merge^2]: the image token at each place of the window order; image_order: its inverse;
    yx [P, 2] in window order; {image, window}_{start, end} [P]: the rows that a row sees.
    """
    unit = config.merge_size**2
    order, yx, base = [], [], 0
    windows: list[int] = []
    for _, h, w in grids:
        index, lengths = _windows(h // config.merge_size, w // config.merge_size, config.window_side)
        order.append(index + base)
        yx.append(vision.block_coordinates(h, w, config.merge_size).reshape(-1, unit, 2)[index].reshape(-1, 2))
        windows.extend(lengths * unit)
        base += len(index)
    order.append(np.arange(base, num_patches // unit, dtype=np.int32))
    window_order = np.concatenate(order)
    image_start, image_end = vision.segments([h * w for _, h, w in grids], num_patches)
    window_start, window_end = vision.segments(windows, num_patches)
    return {
        "window_order": window_order,
        "image_order": np.argsort(window_order).astype(np.int32),
        "yx": vision.pack(yx, num_patches),
        "image_start": image_start,
        "image_end": image_end,
        "window_start": window_start,
        "window_end": window_end,
    }


@functools.lru_cache(maxsize=256)
def _windows(h: int, w: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Image tokens of an h x w grid window by window, int32 [h * w], and the tokens in each window.

    Windows start at the top left; those at the border are smaller.
    """
    index = np.arange(h * w, dtype=np.int32).reshape(h, w)
    windows = [index[y : y + side, x : x + side].ravel() for y in range(0, h, side) for x in range(0, w, side)]
    return np.concatenate(windows), np.array([len(window) for window in windows])


POSITIONS = 128000
VISION = {**FIELDS.vision, "hidden_size": 1280, "tokens_per_second": 2}
WIDER_VISION = {**VISION, "intermediate_size": 3456}

NAMES = qwen2_vl.NAMES
PUBLISHED = dataclasses.replace(
    qwen2_vl.PUBLISHED,
    architecture="Qwen2_5_VLForConditionalGeneration",
    image_processor={**qwen2_vl.PUBLISHED.image_processor, "processor_class": "Qwen2_5_VLProcessor"},
    sizes={
        "Qwen2.5-VL-3B": PublishedSize(
            "qwen2_5_vl", text_fields(2048, 36, 16, 2, 11008, 151936, POSITIONS), VISION, True
        ),
        "Qwen2.5-VL-7B": PublishedSize("qwen2_5_vl", text_fields(3584, 28, 28, 4, 18944, 152064, POSITIONS), VISION),
        "Qwen2.5-VL-32B": PublishedSize(
            "qwen2_5_vl", text_fields(5120, 64, 40, 8, 27648, 152064, POSITIONS), WIDER_VISION
        ),
        "Qwen2.5-VL-72B": PublishedSize(
            "qwen2_5_vl", text_fields(8192, 80, 64, 8, 29568, 152064, POSITIONS), WIDER_VISION
        ),
    },
    output_width="out_hidden_size",
)
# All chunks in one run of placeholders, positions by the seconds between them.
VIDEO = Videos(
    processor="Qwen2VLVideoProcessor",
    chunk="<|video_pad|>",
    time_step=lambda vision, seconds: vision.tokens_per_second * seconds,
)
