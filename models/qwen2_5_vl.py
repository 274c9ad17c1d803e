"""Qwen2.5-VL: attention in windows in most blocks of the vision tower, else as Qwen2-VL."""

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
from vlcache_jax.models.family import Family, PublishedSize, Videos, text_fields
from vlcache_jax.models.layers import GatedMLP, RMSNorm

FIELDS = base.Fields(
    text=qwen2_vl.TEXT,
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
    rope_theta=qwen2_vl.ROPE_THETA,
    own_vision={
        "window_size": whole(1, 1 << 16),
        "fullatt_block_indexes": base.INDICES,
        "tokens_per_second": real(0, 1e6),
    },
)


@dataclasses.dataclass(frozen=True)
class Qwen25VLVisionConfig(base.VisionConfig):
    """The configuration of the vision tower of Qwen2.5-VL.

    Attributes:
      window_size: side of an attention window in pixels.
      full_blocks: blocks that attend to the full image.
      tokens_per_second: positions per second of a video.
    """

    window_size: int
    full_blocks: tuple[int, ...]
    tokens_per_second: float

    @property
    def window_side(self) -> int:
        """Side of a window in image tokens."""
        return self.window_size // self.merge_size // self.patch_size


def read_config(config: Any, raw: dict[str, Any]) -> base.ModelConfig:
    """Return our configuration for the library's `config`; `raw` is the content of `config.json`."""
    given = config.vision_config
    decoder = qwen2_vl.read_decoder(config)
    if given.window_size < (token := given.spatial_merge_size * given.patch_size):
        raise ValueError(f"window_size must be at least the {token} pixels of an image token, got {given.window_size}")
    tower = Qwen25VLVisionConfig(
        **base.read_vision(given, "silu"),
        window_size=given.window_size,
        full_blocks=tuple(given.fullatt_block_indexes),
        tokens_per_second=given.tokens_per_second,
    )
    return base.read_model(config, raw, decoder, tower, tie_word_embeddings=qwen2_vl.is_tied(config))


class Qwen25VLVisionTower(nnx.Module):
    """The vision tower of Qwen2.5-VL. It sorts image tokens by window, and restores their order after the merger."""

    def __init__(self, config: Qwen25VLVisionConfig, *, dtype: Any, rngs: nnx.Rngs):
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
        """Encode patches, uint8 [P, C, F, patch * patch] -> [1, P / merge^2, out]."""
        x = self.patch_embed(pixels, normalization)
        tokens = len(x) // self.config.merge_size**2
        x = x.reshape(tokens, -1)[tables["window_order"]].reshape(x.shape)
        rotation = rope.vision_rotation(tables["yx"], self.config.head_dim)
        image, window = ((tables[f"{name}_start"], tables[f"{name}_end"]) for name in ("image", "window"))
        for i, block in enumerate(self.blocks):
            x = block(x, rotation, image if i in self.config.full_blocks else window, implementation)
        return self.merger(x)[tables["image_order"]][None]


def encoder_tables(
    config: Qwen25VLVisionConfig, grids: Sequence[vision.Grid], num_patches: int
) -> dict[str, np.ndarray]:
    """Return the tower's index tables for images packed one after the other and padded to `num_patches` (host).

    window_order [P / merge^2]: the image token at each place of the window order; image_order: its inverse;
    yx [P, 2] in window order; {image, window}_{start, end} [P]: the patches that a patch attends to.
    """
    unit = config.merge_size**2
    order, yx, first = [], [], 0
    windows: list[int] = []
    for _, h, w in grids:
        index, lengths = _windows(h // config.merge_size, w // config.merge_size, config.window_side)
        order.append(index + first)
        yx.append(vision.block_coordinates(h, w, config.merge_size).reshape(-1, unit, 2)[index].reshape(-1, 2))
        windows.extend(lengths * unit)
        first += len(index)
    order.append(np.arange(first, num_patches // unit, dtype=np.int32))
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
    """Return the image tokens of an h x w grid, window by window, int32 [h * w], and the size of each window.

    Windows start at the top left; those at the border are smaller.
    """
    index = np.arange(h * w, dtype=np.int32).reshape(h, w)
    windows = [index[y : y + side, x : x + side].ravel() for y in range(0, h, side) for x in range(0, w, side)]
    return np.concatenate(windows), np.array([len(window) for window in windows])


_POSITIONS = 128000
_VISION = {**FIELDS.vision, "hidden_size": 1280, "tokens_per_second": 2}
_WIDER_VISION = {**_VISION, "intermediate_size": 3456}

FAMILY = Family(
    fields=FIELDS,
    names=qwen2_vl.FAMILY.names,
    published=dataclasses.replace(
        qwen2_vl.FAMILY.published,
        architecture="Qwen2_5_VLForConditionalGeneration",
        image_processor={**qwen2_vl.FAMILY.published.image_processor, "processor_class": "Qwen2_5_VLProcessor"},
        sizes={
            "Qwen2.5-VL-3B": PublishedSize(
                "qwen2_5_vl", text_fields(2048, 36, 16, 2, 11008, 151936, _POSITIONS), _VISION, True
            ),
            "Qwen2.5-VL-7B": PublishedSize(
                "qwen2_5_vl", text_fields(3584, 28, 28, 4, 18944, 152064, _POSITIONS), _VISION
            ),
            "Qwen2.5-VL-32B": PublishedSize(
                "qwen2_5_vl", text_fields(5120, 64, 40, 8, 27648, 152064, _POSITIONS), _WIDER_VISION
            ),
            "Qwen2.5-VL-72B": PublishedSize(
                "qwen2_5_vl", text_fields(8192, 80, 64, 8, 29568, 152064, _POSITIONS), _WIDER_VISION
            ),
        },
        output_width="out_hidden_size",
    ),
    # All chunks are one run of placeholders. The seconds between them set their positions.
    video=Videos(
        processor="Qwen2VLVideoProcessor",
        chunk="<|video_pad|>",
        time_step=lambda vision, seconds: vision.tokens_per_second * seconds,
    ),
    vision_tower=Qwen25VLVisionTower,
    read_config=read_config,
    encoder_tables=encoder_tables,
)
