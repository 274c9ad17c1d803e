"""What reuse does inside a model: errors that reach an answer, and where the answer looks.

The procedures of VLCache's figures 2 and 5 and of MPIC's figures 4, 8, 11 and 12, on dense runs (`probe`). Text before
the images must vary between donor and formal prompt: behind equal text, K, V are equal and every error is 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vlcache_jax.inputs.layout import ImageSpan
from vlcache_jax.reuse.schedule import UNITS
from vlcache_jax.study.probe import Placed, Probe, Trace
from vlcache_jax.study.sensitivity import Runs, squared_error

Array = npt.NDArray[np.float64]


def attention_error(placed: Placed, reference: Trace, other: Trace) -> Array:
    """How far each layer's attention output is from the reference's, where answer tokens come from [L, c].

    Euclidean norm, after the output projection; column t is the row that predicts token t (VLCache, figure 2).
    """
    rows = slice(placed.prompt_length - 1, len(placed.layout) - 1)
    mine, others = (np.asarray(trace.attended[:, rows], np.float64) for trace in (reference, other))
    return np.linalg.norm(mine - others, axis=-1)


def recompute(probe: Probe, runs: Runs, level: int, *, last: bool = False) -> Trace:
    """The formal prompt with the first floor(level T / 500) tokens of each image its own in all layers, or the last."""
    placed = runs.placed
    mask = np.zeros(len(placed.layout), bool)
    for span in placed.images:
        count = level * span.length // UNITS
        start = span.stop - count if last else span.start
        mask[start : start + count] = True
    return probe.run(placed, probe.text_only(placed) | mask, runs.donor)


@dataclass(frozen=True, eq=False)
class ReuseError:
    """What reuse does to an answer, given its tokens so far: one entry for each way of reusing.

    Attributes:
      error: mean square of the logits' error.
      changed: whether any most likely token is another one.
    """

    error: Array
    changed: npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Decomposition:
    """The effect if only a part of what could be reused is reused.

    Attributes:
      num_image_tokens: in the prompt.
      place: of each token that was tried alone, from its image's first on [k].
      token: only that token is reused, in all layers [k]; what the sum of the errors lacks to the total comes from
        tokens together.
      layer: all tokens are reused, in one layer only [L].
      until: all tokens are reused in a layer and all before it [L]; the last entry is full reuse.
      behind: all tokens are reused in a layer and all behind it [L]; the first entry is full reuse.
    """

    num_image_tokens: int
    place: npt.NDArray[np.int64]
    token: ReuseError
    layer: ReuseError
    until: ReuseError
    behind: ReuseError

    @property
    def total(self) -> float:
        """Error of full reuse."""
        return float(self.behind.error[0])


def decompose(probe: Probe, runs: Runs, *, tokens: int = 64) -> Decomposition:
    """Takes the error of full reuse apart, by token and by depth.

    Args:
      runs: of a case.
      tokens: image tokens to try alone, evenly spaced over the images.
    """
    placed, layers = runs.placed, probe.num_layers
    image = np.flatnonzero(placed.is_image)
    chosen = image[np.unique(np.linspace(0, len(image) - 1, min(tokens, len(image))).astype(int))]

    def effect(parts: Sequence[tuple[slice, npt.NDArray[np.int64]]]) -> ReuseError:
        errors, changed = [], []
        for where, what in parts:
            write = np.ones((layers, len(placed.layout)), bool)
            write[where, what] = False
            logits = probe.run(placed, write, runs.donor).logits
            errors.append(squared_error(logits, runs.cold.logits))
            changed.append(bool((logits.argmax(-1) != runs.cold.logits.argmax(-1)).any()))
        return ReuseError(np.array(errors), np.array(changed))

    return Decomposition(
        num_image_tokens=len(image),
        place=np.concatenate([np.arange(span.length) for span in placed.images])[np.isin(image, chosen)],
        token=effect([(slice(None), chosen[i : i + 1]) for i in range(len(chosen))]),
        layer=effect([(slice(i, i + 1), image) for i in range(layers)]),
        until=effect([(slice(i + 1), image) for i in range(layers)]),
        behind=effect([(slice(i, None), image) for i in range(layers)]),
    )


def answer_scores(probe: Probe, placed: Placed, trace: Trace) -> Array:
    """Raw scores of the prompt's last row with all n tokens of the prompt [L, H, n].

    The answer's first token comes from that row. Scores are not divided by the root of the head's width.
    """
    row, layers = placed.prompt_length - 1, []
    for i in range(probe.num_layers):
        q, k, _, _ = probe.project(placed, trace, i)
        query, keys = np.asarray(q[row], np.float64), np.asarray(k[: row + 1], np.float64)  # [H, D], [n, K, D]
        layers.append(np.einsum("hd,thd->ht", query, keys.repeat(len(query) // keys.shape[1], axis=1)))
    return np.stack(layers)


def answer_attention(scores: Array, images: Sequence[ImageSpan], width: int) -> tuple[list[Array], list[Array]]:
    """Where the first token of the answer looks.

    Args:
      scores: see `answer_scores`, [L, H, n].
      images: of the prompt.
      width: of a head.

    Returns:
      For each image its weights [L, H, T], a softmax over its own tokens (MPIC, figure 4), of scores that are divided
      by the root of the head's width, as attention has them, and of raw ones.
    """
    own = [scores[:, :, span.tokens] for span in images]
    return [_softmax(one / width**0.5) for one in own], [_softmax(one) for one in own]


def key_distance(runs: Runs, span: ImageSpan) -> Array:
    """L1 distance of an image's keys before rotation between donor and cold run [L, T] (MPIC, figure 8)."""
    donor, own = (np.asarray(part[:, span.tokens], np.float64) for part in (runs.donor[0], runs.cold.values[0]))
    return np.abs(donor - own).sum((2, 3))


def distant_layers(distances: Array) -> npt.NDArray[np.int64]:
    """In how many layers each token of an image is among those whose keys differ most [T] (MPIC, figure 8).

    Args:
      distances: see `key_distance` [L, T]. The first layer counts nowhere: its keys know no context.

    Those are 50 of 1176 tokens, as in the paper, and as many of a hundred in images of other sizes.
    """
    tokens = distances.shape[1]
    count = max(1, round(tokens * 50 / 1176))
    farthest = np.argsort(-distances[1:], axis=1, kind="stable")[:, :count]
    return np.bincount(farthest.ravel(), minlength=tokens)


def attention_map(probe: Probe, placed: Placed, trace: Trace) -> Array:
    """What rows look at in the first layer [n, n], the mean over heads (MPIC, figure 11).

    In each head negative scores before softmax become 0, and its scores are scaled from their least to their greatest,
    0 to 1. Keys that a row does not see are 0.
    """
    q, k, _, _ = probe.project(placed, trace, 0)
    size = len(placed.layout)
    query, keys = np.asarray(q[:size], np.float64), np.asarray(k[:size], np.float64)
    group, seen, total = query.shape[1] // keys.shape[1], np.tri(size, dtype=bool), np.zeros((size, size))
    for head in range(query.shape[1]):
        scores = np.maximum(query[:, head] @ keys[:, head // group].T, 0)
        least, greatest = scores[seen].min(), scores[seen].max()
        total += np.where(seen, scores - least, 0) / max(greatest - least, np.finfo(float).tiny)
    return total / query.shape[1]


@dataclass(frozen=True, eq=False)
class AttentionFindings:
    """What `research.analyze attention` draws: of each image of some cases, and a map of the case with most images.

    Attributes:
      weights: "scaled" and "raw", see `answer_attention`, the mean over heads [L, T].
      ranks: see `first_token_rank`.
      distances: see `key_distance`.
      seen: see `attention_map`.
      spans: where the images stand in it.
    """

    weights: dict[str, list[Array]]
    ranks: list[Array]
    distances: list[Array]
    seen: Array
    spans: list[tuple[int, int]]


def look(probe: Probe, cases: Iterable[Runs]) -> AttentionFindings:
    """Looks into all cases, of which there must be one."""
    weights: dict[str, list[Array]] = {"scaled": [], "raw": []}
    ranks: list[Array] = []
    distances: list[Array] = []
    most: Runs | None = None
    for runs in cases:
        scores = answer_scores(probe, runs.placed, runs.cold)
        scaled, raw = answer_attention(scores, runs.placed.images, probe.config.text.head_dim)
        weights["scaled"] += [one.mean(1) for one in scaled]
        weights["raw"] += [one.mean(1) for one in raw]
        ranks += [first_token_rank(scores, span.start) for span in runs.placed.images]
        distances += [key_distance(runs, span) for span in runs.placed.images]
        if most is None or len(runs.placed.images) > len(most.placed.images):
            most = runs
    assert most is not None
    spans = [(span.start, span.stop) for span in most.placed.images]
    return AttentionFindings(weights, ranks, distances, attention_map(probe, most.placed, most.cold), spans)


@dataclass(frozen=True, eq=False)
class Deviation:
    """How far the donor's K, V of images are from the cold run's, one entry a layer.

    Attributes:
      k, v: sum of squares of the difference, over that of what the cold run has; keys before rotation [L].
      mean_k, mean_v: the part of it that all tokens of an image share, which `vlcache_jax.reuse.shift` can undo [L].
    """

    k: Array
    v: Array
    mean_k: Array
    mean_v: Array


def deviation(runs: Runs) -> Deviation:
    """How far the donor's K, V are from the cold run's, and how much of that is one vector an image and head."""
    found = []
    for cold, donor in zip(runs.cold.values, runs.donor, strict=True):
        size, total, shared = (np.zeros(len(cold)) for _ in range(3))
        for span in runs.placed.images:
            own = np.asarray(cold[:, span.tokens], np.float64)
            apart = own - np.asarray(donor[:, span.tokens], np.float64)
            size += np.square(own).sum((1, 2, 3))
            total += np.square(apart).sum((1, 2, 3))
            shared += span.length * np.square(apart.mean(1)).sum((1, 2))
        found.append((total / size, shared / np.maximum(total, np.finfo(float).tiny)))
    (k, mean_k), (v, mean_v) = found
    return Deviation(k, v, mean_k, mean_v)


def first_token_rank(scores: Array, place: int) -> Array:
    """Percentile rank of an image's first token among all tokens, by the attention it gets [L, H] (MPIC, figure 12).

    Args:
      scores: see `answer_scores`, [L, H, n].
      place: of that token in the prompt.

    Returns:
      Of the other tokens how many of a hundred get less.
    """
    less = scores < scores[:, :, place : place + 1]
    return np.asarray(100 * less.sum(-1) / (scores.shape[-1] - 1))


def _softmax(scores: Array) -> Array:
    exponents = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(exponents / exponents.sum(-1, keepdims=True))
