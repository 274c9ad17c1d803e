"""The vision tower of Qwen2.5-VL: attention in windows, and over the whole image in a few blocks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from vlcache_jax.models import rope, vision
from vlcache_jax.models.layers import GatedMLP, RMSNorm
from vlcache_jax.models.qwen2_5_vl.config import VisionConfig


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
