"""Parts of the vision towers of all families: patches, blocks, mergers, and tables computed on the host.

A tower is compiled for a number of patches P, not for an image size. Several images are packed along P and padded, and
index tables contain everything that depends on their sizes. Patches are bytes, which a table on the device normalizes.
This is exact and moves a quarter of the data.

An image is a still image, or two consecutive frames of a video: the chunks of a video do not attend to each other here,
so each is an image of its own. The patches of an image are in blocks of merge x merge (2 x 2), block by block in raster
order. Four consecutive rows of the tower become one image token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vlcache_jax.models import rope
from vlcache_jax.models.config import VisionConfig
from vlcache_jax.models.layers import linear
from vlcache_jax.pallas_kernels import attention, propagate_nonfinite

Grid = tuple[int, int, int]  # (1, h, w) in patches


class PatchEmbed(nnx.Module):
    def __init__(self, config: VisionConfig, *, bias: bool, dtype: Any, rngs: nnx.Rngs):
        self.proj = linear(config.patch_width, config.hidden_size, bias=bias, dtype=dtype, rngs=rngs)
        self.temporal_patch_size = config.temporal_patch_size

    def __call__(self, pixels: jax.Array, normalization: jax.Array) -> jax.Array:
        """Embed patches.

        Args:
          pixels: uint8 [P, C, F, patch * patch]. F is the number of temporal slots, or 1, or missing: a still image
            fills every slot.
          normalization: value of each byte per channel, float32 [C, 256].

        Returns:
          Hidden states [P, M].
        """
        count, channels, *_, area = pixels.shape
        channel = jnp.arange(channels)[:, None, None]
        values = normalization[channel, pixels.reshape(count, channels, -1, area)].astype(self.proj.kernel.dtype)
        values = jnp.broadcast_to(values, (count, channels, self.temporal_patch_size, area))
        return self.proj(values.reshape(count, -1))


class VisionAttention(nnx.Module):
    def __init__(self, config: VisionConfig, *, dtype: Any, rngs: nnx.Rngs):
        self.config = config
        self.qkv = linear(config.hidden_size, 3 * config.hidden_size, bias=True, dtype=dtype, rngs=rngs)
        self.proj = linear(config.hidden_size, config.hidden_size, bias=True, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        y: jax.Array,
        rotation: tuple[jax.Array, jax.Array],
        segment: tuple[jax.Array, jax.Array],
        implementation: str | None,
    ) -> jax.Array:
        qkv = self.qkv(y).reshape(len(y), 3, self.config.num_heads, self.config.head_dim)
        q, k = (rope.rotate(qkv[:, i].astype(jnp.float32), *rotation).astype(y.dtype) for i in (0, 1))
        k, v = propagate_nonfinite(k, qkv[:, 2])
        return self.proj(attention(q, k, v, *segment, implementation=implementation).reshape(len(y), -1))


class VisionBlock(nnx.Module):
    """A block of pre-norm attention and MLP. Attention is bidirectional within a row's segment."""

    def __init__(
        self,
        config: VisionConfig,
        norm: Callable[[], nnx.Module],
        mlp: Callable[[], nnx.Module],
        *,
        dtype: Any,
        rngs: nnx.Rngs,
    ):
        self.norm1, self.norm2 = norm(), norm()
        self.attn = VisionAttention(config, dtype=dtype, rngs=rngs)
        self.mlp = mlp()

    def __call__(
        self,
        x: jax.Array,
        rotation: tuple[jax.Array, jax.Array],
        segment: tuple[jax.Array, jax.Array],
        implementation: str | None,
    ) -> jax.Array:
        """Apply the block to x [P, M]. Row p attends to the rows segment[0][p] <= s < segment[1][p]."""
        x = x + self.attn(self.norm1(x), rotation, segment, implementation)
        return x + self.mlp(self.norm2(x))


class Merger(nnx.Module):
    """A layer that merges merge^2 consecutive rows into one image token, with a norm before or after the grouping."""

    def __init__(self, config: VisionConfig, norm: nnx.Module, *, norm_grouped: bool, dtype: Any, rngs: nnx.Rngs):
        width = config.hidden_size * config.merge_size**2
        self.norm = norm
        self.norm_grouped = norm_grouped
        self.linear_fc1 = linear(width, width, bias=True, dtype=dtype, rngs=rngs)
        self.linear_fc2 = linear(width, config.out_hidden_size, bias=True, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Merge rows, [P, M] -> [P / merge^2, out]. The GELU is exact for any `hidden_act`."""
        width = self.linear_fc1.in_features
        x = self.norm(x.reshape(-1, width)) if self.norm_grouped else self.norm(x).reshape(-1, width)
        return self.linear_fc2(jax.nn.gelu(self.linear_fc1(x), approximate=False))


@functools.lru_cache(maxsize=256)
def block_coordinates(h: int, w: int, merge: int) -> np.ndarray:
    """Return (y, x) of each patch of an h x w grid in block order, int32 [h * w, 2]."""
    y, x = np.mgrid[:h, :w].astype(np.int32)
    yx = np.stack([y, x], axis=-1).reshape(h // merge, merge, w // merge, merge, 2)
    return yx.transpose(0, 2, 1, 3, 4).reshape(-1, 2)


def pack(parts: Sequence[np.ndarray], length: int) -> np.ndarray:
    """Concatenate per-image tables and pad them with zeros to `length` rows."""
    packed = np.zeros((length, *parts[0].shape[1:]), parts[0].dtype)
    np.concatenate(parts, out=packed[: sum(len(part) for part in parts)])
    return packed


def segments(lengths: Sequence[int], num_patches: int) -> tuple[np.ndarray, np.ndarray]:
    """Return first and last + 1 row of each row's segment, for consecutive segments. Padding rows have empty ones."""
    ends = np.cumsum(lengths, dtype=np.int32)
    starts = ends - np.asarray(lengths, np.int32)
    return pack([np.repeat(starts, lengths)], num_patches), pack([np.repeat(ends, lengths)], num_patches)


def image_tables(config: VisionConfig, grids: Sequence[Grid], num_patches: int) -> dict[str, np.ndarray]:
    """Return tables for packed and padded images (host): yx [P, 2], start and end [P] of each patch's own image."""
    start, end = segments([h * w for _, h, w in grids], num_patches)
    yx = pack([block_coordinates(h, w, config.merge_size) for _, h, w in grids], num_patches)
    return {"yx": yx, "start": start, "end": end}
