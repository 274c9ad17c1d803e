"""Rotary positions: M-RoPE triples on the host, angles and rotation on the device.

A text token has the triple (p, p, p). An image that starts at position p with a merged grid of h x w tokens has
(p, p + y, p + x) for its token (y, x). All positions of an image shift together with its start, which is why keys
stored before rotation can be placed anywhere. A video is a sequence of images. Consecutive images without a token
between them begin at the same p, and each has its time added on the first axis. Tokens after an image or a video begin
at the greatest earlier position plus one, over all three axes. After an image, this is p + max(h, w). After a video
that lasts longer than its frames are wide, it is one after its last time. The paper of Qwen2-VL defines this, and the
code that trained the weights did the same. The present library begins text at p + max(h, w) after a video, too.
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
    """Return the position triples of a prompt with images (host).

    Args:
      num_tokens: number of tokens of the prompt, including image tokens.
      starts: index of each image's first token, ascending.
      grids: merged grid (h, w) of each image, which covers h * w tokens from its start.
      times: offset of each image's positions on the first axis. None: 0.

    Returns:
      Positions [3, n], int32, and delta: the position of the i-th generated token is n + i + delta on all axes.
    """
    positions = np.empty((3, num_tokens), np.int32)
    token = position = begin = 0
    for start, (h, w), time in zip(starts, grids, times or [0] * len(starts), strict=True):
        if start > token or not token:  # else the image continues a video
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
    """Return the positions of an image's tokens relative to its start, int32 [3, h * w]."""
    return np.stack([np.zeros(h * w), np.repeat(np.arange(h), w), np.tile(np.arange(w), h)]).astype(np.int32)


@functools.cache
def inverse_frequencies(theta: float, width: int) -> np.ndarray:
    """Return theta ** (-2 i / width) for i < width / 2, in float32 for any model dtype.

    Each step is rounded as in the library. At position 262143, an error in the last digit rotates a fast frequency by
    0.01. The power is computed in float64, because numpy's float32 power is not rounded correctly.
    """
    exponent = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    return np.float32(1) / np.power(np.float64(theta), exponent.astype(np.float64)).astype(np.float32)


@functools.cache
def frequency_axes(section: tuple[int, int, int], interleaved: bool) -> np.ndarray:
    """Return the axis T, H or W (0, 1, 2) of each of the D / 2 frequencies."""
    if not interleaved:
        return np.repeat(np.arange(3), section)
    axes = np.zeros(sum(section), np.int64)
    axes[1 : 3 * section[1] : 3] = 1
    axes[2 : 3 * section[2] : 3] = 2
    return axes


def text_rotation(
    position: jax.Array, theta: float, section: tuple[int, int, int], interleaved: bool, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """Return cos and sin [N, 1, D / 2] of position triples [3, N]. Angles are float32, the results have `dtype`."""
    axes = frequency_axes(section, interleaved)
    t, h, w = position[:, :, None].astype(jnp.float32)
    angle = jnp.where(axes == 0, t, jnp.where(axes == 1, h, w)) * inverse_frequencies(theta, 2 * len(axes))
    angle = angle[:, None]
    return jnp.cos(angle).astype(dtype), jnp.sin(angle).astype(dtype)


def vision_rotation(yx: jax.Array, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Return cos and sin [P, 1, D / 2] of patch coordinates [P, 2] in float32: all y frequencies, then all x."""
    angle = yx[:, :, None].astype(jnp.float32) * inverse_frequencies(10000.0, head_dim // 2)
    angle = angle.reshape(len(yx), 1, head_dim // 2)
    return jnp.cos(angle), jnp.sin(angle)
