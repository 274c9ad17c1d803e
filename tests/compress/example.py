"""The specification's worked example: six tokens, of which 1 to 3 are an image's, and their attention in one head."""

from __future__ import annotations

import functools

import jax
import numpy as np

from vlcache_jax.compress.scores import KeyStatistics, Scores, kept_tokens

ATTENTION = np.array(
    [
        [1.0, 0, 0, 0, 0, 0],
        [0.5, 0.5, 0, 0, 0, 0],
        [0.4, 0.3, 0.3, 0, 0, 0],
        [0.4, 0.2, 0.2, 0.2, 0, 0],
        [0.30, 0.05, 0.40, 0.002, 0.248, 0],
        [0.20, 0.01, 0.50, 0.001, 0.089, 0.20],
    ]
)
POST_VISION = [0.5, 0.06, 0.9, 0.003, 0.337, 0.2]
ACCUMULATED = [2.8, 1.06, 1.4, 0.203, 0.337, 0.2]
NORMALIZED = [0.4667, 0.212, 0.35, 0.0677, 0.1685, 0.2]


@functools.partial(jax.jit, static_argnames=("scores", "max_count"))
def kept_of(scores: Scores, seen: KeyStatistics, count: int, max_count: int) -> jax.Array:
    """The tokens that each KV head keeps by these scores, as one program."""
    return kept_tokens(scores(seen), seen.length, count, seen.window, max_count=max_count)
