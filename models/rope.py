"""Rotary positions: M-RoPE triples on the host, angles and rotation on the device.

A text token has the triple (p, p, p). An image that starts at position p with a merged grid of h x w tokens has
(p, p + y, p + x) for its token (y, x). All positions of an image shift together with its start, which is why keys
stored before rotation can be placed anywhere. A video is a sequence of images; those that follow each other without a
token between them begin at the same p, each later by its time on the first axis. What comes behind an image or a video
begins at the greatest position before it plus one, over all three axes: behind an image at p + max(h, w), behind a
video that lasts longer than its frames are wide, behind its last time. So it says in the paper of Qwen2-VL, and so did
the code that the weights were trained with. The library of today lets text begin at p + max(h, w) behind a video, too.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from vlcache_jax.pallas_kernels.rotation import rotate as rotate


def mrope_positions(
    num_tokens: int, starts: Sequence[int], grids: Sequence[tuple[int, int]], times: Sequence[int] | None = None
) -> tuple[np.ndarray, int]:
    """Position triples of a prompt with images (host).

    Args:
      num_tokens: tokens of the prompt, image tokens included.
      starts: index of each image's first token, ascending.
      grids: merged grid (h, w) of each image; it covers h * w tokens from its start.
      times: what is added to each image's positions on the first axis; None: nothing.

    Returns:
      positions [3, n] int32, and delta: the position of the i-th generated token is n + i + delta on all axes.
    """
    positions = np.empty((3, num_tokens), np.int32)
    token = position = begin = 0
    for start, (h, w), time in zip(starts, grids, times or [0] * len(starts), strict=True):
        if start > token or not token:  # else it goes on with the images before it
            positions[:, token:start] = np.arange(position, position + start - token)
            begin = position + start - token
        token = start + h * w
        np.add(_grid_positions(h, w), begin, out=positions[:, start:token])
        if time:
            positions[0, start:token] += time
        position = max(position, begin + max(h, w), begin + time + 1)
    positions[:, token:] = np.arange(position, position + num_tokens - token)
    return positions, position - token


@functools.lru_cache(64)
def _grid_positions(h: int, w: int) -> np.ndarray:
    """Of an image's tokens, its first one at 0: int32 [3, h * w]."""
    return np.stack([np.zeros(h * w), np.repeat(np.arange(h), w), np.tile(np.arange(w), h)]).astype(np.int32)


@functools.cache
def inverse_frequencies(theta: float, width: int) -> np.ndarray:
    """theta ** (-2 i / width) for i < width / 2, in float32 whatever the model's dtype.

    Each step is rounded as in the library: at position 262143 one wrong last digit turns a fast frequency by 0.01. The
    power is taken in float64, because numpy's own float32 power is not rounded correctly.
    """
    exponent = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    return np.float32(1) / np.power(np.float64(theta), exponent.astype(np.float64)).astype(np.float32)


@functools.cache
def frequency_axes(section: tuple[int, int, int], interleaved: bool) -> np.ndarray:
    """Which of the axes T, H, W (0, 1, 2) turns each of the D / 2 frequencies."""
    if not interleaved:
        return np.repeat(np.arange(3), section)
    axes = np.zeros(sum(section), np.int64)
    axes[1 : 3 * section[1] : 3] = 1
    axes[2 : 3 * section[2] : 3] = 2
    return axes


def text_rotation(
    position: jax.Array, theta: float, section: tuple[int, int, int], interleaved: bool, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """cos and sin [N, 1, D / 2] of position triples [3, N]; angles in float32, the tables rounded to `dtype`."""
    axes = frequency_axes(section, interleaved)
    t, h, w = position[:, :, None].astype(jnp.float32)
    angle = jnp.where(axes == 0, t, jnp.where(axes == 1, h, w)) * inverse_frequencies(theta, 2 * len(axes))
    angle = angle[:, None]
    return jnp.cos(angle).astype(dtype), jnp.sin(angle).astype(dtype)


def vision_rotation(yx: jax.Array, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """cos and sin [P, 1, D / 2] in float32 of patch coordinates [P, 2]: first all y frequencies, then all x."""
    angle = yx[:, :, None].astype(jnp.float32) * inverse_frequencies(10000.0, head_dim // 2)
    angle = angle.reshape(len(yx), 1, head_dim // 2)
    return jnp.cos(angle), jnp.sin(angle)
