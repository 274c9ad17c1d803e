"""What the code at the models' release did (transformers 4.49 and 4.57), where the library of today does otherwise.

Written again, as oracles; `tests/test_release_rules.py` says which of the two is followed.
"""

from __future__ import annotations

import numpy as np


def rope_index(is_text, grids, steps):
    """Positions [3, n] of a prompt and delta; whatever follows begins at the greatest position before it plus one.

    Args:
      is_text: of each token.
      grids: merged (t, h, w) of each image and video, in order.
      steps: how far apart the chunks of each are.
    """
    parts, behind, done = [], 0, 0
    for (t, h, w), step in zip(grids, steps, strict=True):
        start = done + int(np.argmin(is_text[done:]))
        parts.append(np.tile(np.arange(start - done), (3, 1)) + behind)
        inside = np.indices((t, h, w)).reshape(3, -1).astype(np.float64)
        inside[0] = np.floor(inside[0] * step)
        parts.append(inside + behind + start - done)
        behind, done = parts[-1].max() + 1, start + t * h * w
    parts.append(np.tile(np.arange(len(is_text) - done), (3, 1)) + behind)
    positions = np.concatenate(parts, axis=1).astype(np.int64)
    return positions, int(positions.max()) + 1 - len(is_text)


def with_videos(text, videos):
    """The text of Qwen3-VL with what stands for each video in place of its placeholder and the markers around."""
    triple = "<|vision_start|><|video_pad|><|vision_end|>"
    for video in videos:
        place = triple if triple in text else "<|video_pad|>"
        text = text.replace(place, video.replace("<|video_pad|>", "<|hidden|>"), 1)
    return text.replace("<|hidden|>", "<|video_pad|>")
