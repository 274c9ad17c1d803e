"""How the tokens of a prompt are ranked, and which are kept (traced)."""

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
    """What is known of a prompt's keys in one layer.

    Attributes:
      received: the attention that each key gets from the observed rows, summed over them, the mean of a KV head's query
        heads; float32 [K, W], of no meaning from `length` on; zeros where no rows are observed.
      length: of the prompt; an int32 scalar.
      window: its last tokens that are kept whatever they received; an int32 scalar.
      seed: see `seeds`; a uint32 scalar.
    """

    received: jax.Array
    length: jax.Array
    window: jax.Array
    seed: jax.Array


class Scores(Hashable, Protocol):
    """What one layer's tokens are ranked by, for each KV head: [K, W]. Programs are compiled once for equal ones."""

    def __call__(self, seen: KeyStatistics) -> jax.Array: ...


@dataclass(frozen=True)
class Received:
    """The attention received (VL-Cache, H2O).

    Attributes:
      granularity: "kv_head": each KV head ranks for itself; "layer": all heads of a layer by their mean.
    """

    granularity: str

    def __call__(self, seen: KeyStatistics) -> jax.Array:
        score = self.by_head(seen)
        return jnp.broadcast_to(score.mean(0), score.shape) if self.granularity == "layer" else score

    def by_head(self, seen: KeyStatistics) -> jax.Array:
        return seen.received


@dataclass(frozen=True)
class PooledScores(Received):
    """The mean of what a token and its neighbours in front of the window received (SnapKV).

    Attributes:
      width: tokens that a mean is over, an odd number; those outside count as 0.
    """

    width: int

    def by_head(self, seen: KeyStatistics) -> jax.Array:
        _, W = seen.received.shape
        candidate = jnp.where(jnp.arange(W) < seen.length - seen.window, seen.received, 0)
        padded = jnp.pad(candidate, ((0, 0), (self.width // 2,) * 2))
        return sum((padded[:, i : i + W] for i in range(1, self.width)), padded[:, :W]) / self.width


@dataclass(frozen=True)
class Normalized(Received):
    """The attention received from a row that sees the token, the mean of all rows of the prompt (ZipCache)."""

    def by_head(self, seen: KeyStatistics) -> jax.Array:
        return seen.received / jnp.maximum(seen.length - jnp.arange(seen.received.shape[1]), 1)


@dataclass(frozen=True)
class Earliest(Received):
    """The prompt's order (StreamingLLM: the first tokens beside the window)."""

    def by_head(self, seen: KeyStatistics) -> jax.Array:
        K, W = seen.received.shape
        return jnp.broadcast_to(-jnp.arange(W, dtype=jnp.float32), (K, W))


@dataclass(frozen=True)
class Drawn(Received):
    """By chance; a token's draw depends on the seeds, its head and its place alone.

    Attributes:
      seed: another one draws otherwise.
    """

    seed: int = 0

    def by_head(self, seen: KeyStatistics) -> jax.Array:
        K, W = seen.received.shape
        keys = jax.random.split(jax.random.key(seen.seed ^ np.uint32(self.seed)), K)
        return jax.vmap(functools.partial(jax.random.uniform, shape=(W,)))(keys)


# Scores of the policies that a word stands for. One program has all of them, so that a warm-up compiles them.
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
    """What the scores of this number in `USUAL` make of `seen` [K, W]; the number is an int32 scalar of the device."""
    return jax.lax.select_n(number, *(scores(seen) for scores in USUAL))


def kept_tokens(score: jax.Array, length: jax.Array, count: jax.Array, window: jax.Array, *, most: int) -> jax.Array:
    """The tokens that each KV head keeps: the last `window` of the prompt, and of the others those of highest score.

    Of equal scores the earlier token is kept.

    Args:
      score: [K, W]; nan is as -inf.
      length: of the prompt.
      count: tokens that are kept, the window's among them; at most `length` and `most`.
      most: static.

    Returns:
      int32 [K, min(most, W)], rising; W from `count` on.
    """
    W = score.shape[1]
    token = jnp.arange(W)
    # What lies behind the prompt is somebody else's: nothing may be ranked after it, as -nan would be.
    score = jnp.where(jnp.isnan(score), -jnp.inf, score)
    score = jnp.where(token >= length, -jnp.inf, jnp.where(token >= length - window, jnp.inf, score))
    _, best = jax.lax.top_k(score, min(most, W))
    return jnp.sort(jnp.where(jnp.arange(best.shape[1]) < count, best, W), axis=1)


def seeds(layout: Layout, layers: int) -> npt.NDArray[np.uint32]:
    """A seed for each layer, from the digest of the prompt's tokens and images, [L]."""
    digest = hashlib.shake_256(layout.token_ids.tobytes())
    for span in layout.images:
        digest.update(span.image.key.encode())
    return np.frombuffer(digest.digest(4 * layers), np.uint32)
