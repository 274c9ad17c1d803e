"""The vision tower of Qwen2-VL: attention over the whole image in every block."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vlcache_jax.models import rope, vision
from vlcache_jax.models.config import VisionConfig
from vlcache_jax.models.layers import by_chunks, layer_norm, linear


class MLP(nnx.Module):
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


class VisionTower(nnx.Module):
    """Packed patches to image tokens."""

    def __init__(self, config: VisionConfig, *, dtype: Any, rngs: nnx.Rngs):
        norm = functools.partial(layer_norm, config.hidden_size, dtype=dtype, rngs=rngs)
        mlp = functools.partial(MLP, config, dtype=dtype, rngs=rngs)
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
        """uint8 [P, C, patch * patch] -> [1, P / merge^2, out]."""
        x = self.patch_embed(pixels, normalization)
        rotation = rope.vision_rotation(tables["yx"], self.config.head_dim)
        for block in self.blocks:
            x = block(x, rotation, (tables["start"], tables["end"]), implementation)
        return self.merger(x)[None]


def encoder_tables(config: VisionConfig, grids: Sequence[vision.Grid], num_patches: int) -> dict[str, np.ndarray]:
    """What the tower must know of images packed one after the other and padded to `num_patches` (host)."""
    return vision.image_tables(config, grids, num_patches)
