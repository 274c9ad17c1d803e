"""Counted operations of a run (multiply-adds times two), to compare what different plans achieve in a second."""

from __future__ import annotations

import math

import numpy as np

from vlcache_jax.inputs.processor import Grid
from vlcache_jax.models import ModelConfig
from vlcache_jax.reuse.plan import Plan


def prefill(config: ModelConfig, plan: Plan) -> int:
    """Of the decoder on one prompt, and of the output head.

    A layer projects K and V of its rows; everything else it computes for the rows of the next layer only. A row attends
    to all slots up to its own.
    """
    text = config.text
    kv = 2 * text.hidden_size * text.num_kv_heads * text.head_dim
    other = 2 * text.hidden_size * text.num_heads * text.head_dim + 3 * text.hidden_size * text.intermediate_size
    total = 2 * text.hidden_size * text.vocab_size * int(np.count_nonzero(plan.depth > text.num_layers))
    for layer in range(text.num_layers):
        entering, leaving = plan.depth > layer, plan.depth > layer + 1
        seen = int((np.flatnonzero(leaving) + 1).sum())
        total += 2 * int(entering.sum()) * kv + 2 * int(leaving.sum()) * other
        total += 4 * text.num_heads * text.head_dim * seen
    return total


def encoder(config: ModelConfig, grid: Grid) -> int:
    """Of the vision tower on one image, as if every block saw the whole image (Qwen3-VL)."""
    vision = config.vision
    patches, width = math.prod(grid), vision.hidden_size
    block = 4 * width * width + 2 * width * vision.intermediate_size
    merged = vision.hidden_size * vision.merge_size**2
    mergers = (1 + vision.num_deepstack) * (merged * merged + merged * config.text.hidden_size)
    embedding = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2 * width
    blocks = vision.depth * (2 * patches * block + 4 * width * patches**2)
    return blocks + 2 * patches * embedding + 2 * patches // vision.merge_size**2 * mergers
