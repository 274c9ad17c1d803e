"""Ranking and selection of the prompt tokens that are kept (traced)."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from vlcache_jax.inputs.layout import Layout


class KeyStatistics(NamedTuple):
    """Attention statistics of a prompt's keys in one layer.

    Attributes:
      received: attention that each key receives from the observed tokens, summed over them and averaged over the query
        heads of a KV head; float32 [K, W]. Undefined from `length` on; zeros if no tokens are observed.
      length: tokens of the prompt; an int32 scalar.
      window: number of last tokens that are always kept; an int32 scalar.
      seed: random seed, see `seeds`; a uint32 scalar.
    """

    received: jax.Array
    length: jax.Array
    window: jax.Array
    seed: jax.Array


class Scores(Hashable, Protocol):
    """Function that ranks one layer's tokens for each KV head, [K, W]. Equal ones share a compiled program."""

    def __call__(self, seen: KeyStatistics) -> jax.Array: ...


@dataclass(frozen=True)
class Received:
    """Received attention (VL-Cache, H2O).

    Attributes:
      granularity: "kv_head": each KV head ranks for itself; "layer": all heads of a layer rank by their mean.
    """

    granularity: str

    def __call__(self, seen: KeyStatistics) -> jax.Array:
        score = self.by_head(seen)
        return jnp.broadcast_to(score.mean(0), score.shape) if self.granularity == "layer" else score

    def by_head(self, seen: KeyStatistics) -> jax.Array:
        return seen.received


@dataclass(frozen=True)
class PooledScores(Received):
    """Mean received attention of a key and its neighbors before the window (SnapKV).

    Attributes:
      width: number of keys in the mean, odd; keys outside the prompt count as 0.
    """

    width: int

    def by_head(self, seen: KeyStatistics) -> jax.Array:
        _, W = seen.received.shape
        candidate = jnp.where(jnp.arange(W) < seen.length - seen.window, seen.received, 0)
        padded = jnp.pad(candidate, ((0, 0), (self.width // 2,) * 2))
        return sum((padded[:, i : i + W] for i in range(1, self.width)), padded[:, :W]) / self.width


@dataclass(frozen=True)
class Normalized(Received):
    """Attention received from a token that sees the key, averaged over all such tokens of the prompt (ZipCache)."""

    def by_head(self, seen: KeyStatistics) -> jax.Array:
        return seen.received / jnp.maximum(seen.length - jnp.arange(seen.received.shape[1]), 1)


@dataclass(frozen=True)
class Earliest(Received):
    """Order of the prompt (StreamingLLM: the first tokens outside the window)."""

    def by_head(self, seen: KeyStatistics) -> jax.Array:
        K, W = seen.received.shape
        return jnp.broadcast_to(-jnp.arange(W, dtype=jnp.float32), (K, W))


@dataclass(frozen=True)
class Drawn(Received):
    """Random scores; the value of a token depends only on the seeds, its head and its position.

    Attributes:
      seed: additional random seed.
    """

    seed: int = 0

    def by_head(self, seen: KeyStatistics) -> jax.Array:
        K, W = seen.received.shape
        keys = jax.random.split(jax.random.key(seen.seed ^ np.uint32(self.seed)), K)
        return jax.vmap(functools.partial(jax.random.uniform, shape=(W,)))(keys)


# Scores of the built-in policies. One program contains all of them, so that a warm-up compiles them.
USUAL: Mapping[Scores, int] = {
    scores: number
    for number, scores in enumerate(
        (
            Received("kv_head"),
            PooledScores("kv_head", 5),
            Normalized("kv_head"),
            Earliest("kv_head"),
            Drawn("kv_head"),
        )
    )
}


def usual_scores(number: jax.Array, seen: KeyStatistics) -> jax.Array:
    """Return the scores [K, W] of `seen` by the entry of `USUAL` with this number, an int32 scalar on the device."""
    return jax.lax.select_n(number, *(scores(seen) for scores in USUAL))


def kept_tokens(
    score: jax.Array, length: jax.Array, count: jax.Array, window: jax.Array, *, max_count: int
) -> jax.Array:
    """Return the tokens that each KV head keeps: the last `window` of the prompt and those with the highest scores.

    Ties are resolved in favor of the earlier token.

    Args:
      score: scores [K, W]; NaN counts as -inf.
      length: tokens of the prompt.
      count: number of kept tokens, including the window; at most `length` and `most`.
      window: number of last tokens that are always kept.
      max_count: static upper limit of `count`.

    Returns:
      int32 [K, min(max_count, W)], ascending; W from `count` on.
    """
    W = score.shape[1]
    token = jnp.arange(W)
    # Entries after the prompt belong to other requests. No token may rank below them, as -nan would.
    score = jnp.where(jnp.isnan(score), -jnp.inf, score)
    score = jnp.where(token >= length, -jnp.inf, jnp.where(token >= length - window, jnp.inf, score))
    _, best = jax.lax.top_k(score, min(max_count, W))
    return jnp.sort(jnp.where(jnp.arange(best.shape[1]) < count, best, W), axis=1)


def seeds(layout: Layout, layers: int) -> npt.NDArray[np.uint32]:
    """Return a random seed per layer, uint32 [L], from the digest of the prompt's tokens and images."""
    digest = hashlib.shake_256(layout.token_ids.tobytes())
    for span in layout.images:
        digest.update(span.image.key.encode())
    return np.frombuffer(digest.digest(4 * layers), np.uint32)
