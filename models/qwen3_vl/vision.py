"""The vision tower of Qwen3-VL: learned positions, full attention per image, DeepStack."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vlcache_jax.models import rope, vision
from vlcache_jax.models.layers import Table, by_chunks, layer_norm, linear
from vlcache_jax.models.qwen3_vl.config import VisionConfig


class MLP(nnx.Module):
    def __init__(self, config: VisionConfig, *, dtype: Any, rngs: nnx.Rngs):
        self.linear_fc1 = linear(config.hidden_size, config.intermediate_size, bias=True, dtype=dtype, rngs=rngs)
        self.linear_fc2 = linear(config.intermediate_size, config.hidden_size, bias=True, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return by_chunks(lambda x: self.linear_fc2(jax.nn.gelu(self.linear_fc1(x), approximate=True)), x)


class VisionTower(nnx.Module):
    """Packed patches to image tokens."""

    def __init__(self, config: VisionConfig, *, dtype: Any, rngs: nnx.Rngs):
        norm = functools.partial(layer_norm, config.hidden_size, dtype=dtype, rngs=rngs)
        mlp = functools.partial(MLP, config, dtype=dtype, rngs=rngs)
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
        """uint8 [P, C, F, patch * patch] -> [1 + J, P / merge^2, out]: the image tokens and J DeepStack features."""
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


def encoder_tables(config: VisionConfig, grids: Sequence[vision.Grid], num_patches: int) -> dict[str, np.ndarray]:
    """What the tower must know of images packed one after the other and padded to `num_patches` (host).

    Beside `vision.image_tables`: tap [P, 4] and tap_weight [P, 4] of the learned positions.
    """
    per_image = [_position_taps(h, w, config.merge_size, config.position_side) for _, h, w in grids]
    return {
        **vision.image_tables(config, grids, num_patches),
        "tap": vision.pack([tap for tap, _ in per_image], num_patches),
        "tap_weight": vision.pack([weight for _, weight in per_image], num_patches),
    }


@functools.lru_cache(maxsize=256)
def _position_taps(h: int, w: int, merge: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """The four learned positions around each patch, [h * w, 4], and their bilinear weights; corners meet corners."""

    def axis(n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        at = np.arange(n, dtype=np.float32) * np.float32(side - 1) / np.float32(max(n - 1, 1))
        low = at.astype(np.int32)
        return low, np.minimum(low + 1, side - 1), at - low

    y, x = vision.block_coordinates(h, w, merge).T
    (top, bottom, fy), (left, right, fx) = ([table[i] for table in axis(n)] for i, n in ((y, h), (x, w)))
    tap = np.stack([top * side + left, top * side + right, bottom * side + left, bottom * side + right], axis=1)
    weight = np.stack([(1 - fy) * (1 - fx), (1 - fy) * fx, fy * (1 - fx), fy * fx], axis=1)
    return tap.astype(np.int32), weight.astype(np.float32)
