"""Effects of reuse inside a model: errors that reach an answer, and the attention of the answer.

The procedures of VLCache's figures 2 and 5 and of MPIC's figures 4, 8, 11 and 12, on dense runs (`probe`). Text before
the images must vary between donor and formal prompt: after equal text the KV is equal and every error is 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vlcache_jax.inputs.layout import ImageSpan
from vlcache_jax.reuse.schedule import UNITS
from vlcache_jax.study.probe import Placed, Probe, Trace
from vlcache_jax.study.sensitivity import CaseRuns, squared_error

Array = npt.NDArray[np.float64]


def attention_error(placed: Placed, reference: Trace, other: Trace) -> Array:
    """Return the distance of each layer's attention output from the reference's, in the rows that predict tokens `[L,
    c]`.

    It is the Euclidean norm after the output projection; column t is the row that predicts token t (VLCache, figure 2).
    """
    rows = slice(placed.prompt_length - 1, len(placed.layout) - 1)
    mine, others = (np.asarray(trace.attended[:, rows], np.float64) for trace in (reference, other))
    return np.linalg.norm(mine - others, axis=-1)


def recompute(probe: Probe, runs: CaseRuns, level: int, *, last: bool = False) -> Trace:
    """Run the formal prompt with floor(level T / 500) tokens of each image recomputed in all layers.

    They are the first tokens of the image, or with `last` the last ones.
    """
    placed = runs.placed
    mask = np.zeros(len(placed.layout), bool)
    for span in placed.images:
        count = level * span.length // UNITS
        start = span.stop - count if last else span.start
        mask[start : start + count] = True
    return probe.run(placed, probe.text_only(placed) | mask, runs.donor)


@dataclass(frozen=True, eq=False)
class ReuseError:
    """Effects of reuse on an answer, given its tokens so far: one entry for each way of reusing.

    Attributes:
      error: Mean square of the logits' error.
      changed: True if any most likely token differs.
    """

    error: Array
    changed: npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Decomposition:
    """Effects of reusing only a part of the reusable tokens.

    Attributes:
      num_image_tokens: Image tokens of the prompt.
      place: Position of each token that was tried separately, from its image's first on `[k]`.
      token: Only that token is reused, in all layers `[k]`. The rest of the total error comes from tokens together.
      layer: All tokens are reused, in one layer only `[L]`.
      until: All tokens are reused in a layer and all before it `[L]`; the last entry is full reuse.
      behind: All tokens are reused in a layer and all after it `[L]`; the first entry is full reuse.
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


def decompose(probe: Probe, runs: CaseRuns, *, tokens: int = 64) -> Decomposition:
    """Decompose the error of full reuse by token and by depth.

    Args:
      runs: CaseRuns of a case.
      tokens: Number of image tokens to try separately, evenly spaced over the images.
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
    """Return raw scores of the prompt's last row with all n tokens of the prompt `[L, H, n]`.

    The answer's first token comes from that row. Scores are not divided by the root of the head's width.
    """
    row, layers = placed.prompt_length - 1, []
    for i in range(probe.num_layers):
        q, k, _, _ = probe.project(placed, trace, i)
        query, keys = np.asarray(q[row], np.float64), np.asarray(k[: row + 1], np.float64)  # [H, D], [n, K, D]
        layers.append(np.einsum("hd,thd->ht", query, keys.repeat(len(query) // keys.shape[1], axis=1)))
    return np.stack(layers)


def answer_attention(scores: Array, images: Sequence[ImageSpan], width: int) -> tuple[list[Array], list[Array]]:
    """Return the attention of the answer's first token to each image.

    Args:
      scores: See `answer_scores`, `[L, H, n]`.
      images: Images of the prompt.
      width: Width of a head.

    Returns:
      For each image its weights `[L, H, T]`, a softmax over its own tokens (MPIC, figure 4): of scores divided
      by the root of the head's width, as in attention, and of raw scores.
    """
    own = [scores[:, :, span.tokens] for span in images]
    return [_softmax(one / width**0.5) for one in own], [_softmax(one) for one in own]


def key_distance(runs: CaseRuns, span: ImageSpan) -> Array:
    """Return the L1 distance of an image's keys before rotation between donor and cold run `[L, T]` (MPIC, figure
    8).
    """
    donor, own = (np.asarray(part[:, span.tokens], np.float64) for part in (runs.donor[0], runs.cold.values[0]))
    return np.abs(donor - own).sum((2, 3))


def distant_layers(distances: Array) -> npt.NDArray[np.int64]:
    """Return in how many layers each token of an image is among those whose keys differ most `[T]` (MPIC, figure 8).

    Args:
      distances: See `key_distance` `[L, T]`. The first layer does not count: its keys do not depend on context.

    These are 50 of 1176 tokens, as in the paper, and the same fraction in images of other sizes.
    """
    tokens = distances.shape[1]
    count = max(1, round(tokens * 50 / 1176))
    farthest = np.argsort(-distances[1:], axis=1, kind="stable")[:, :count]
    return np.bincount(farthest.ravel(), minlength=tokens)


def attention_map(probe: Probe, placed: Placed, trace: Trace) -> Array:
    """Return the attention of rows in the first layer `[n, n]`, as the mean over heads (MPIC, figure 11).

    In each head negative scores before softmax become 0, and its scores are scaled from their minimum and maximum to 0
    and 1. Keys that a row does not see are 0.
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
    """Data of `research.analyze attention`: of each image of some cases, and a map of the case with most images.

    Attributes:
      weights: "scaled" and "raw", see `answer_attention`, the mean over heads `[L, T]`.
      ranks: See `first_token_rank`.
      distances: See `key_distance`.
      seen: See `attention_map`.
      spans: Spans of the images in it.
    """

    weights: dict[str, list[Array]]
    ranks: list[Array]
    distances: list[Array]
    seen: Array
    spans: list[tuple[int, int]]


def look(probe: Probe, cases: Iterable[CaseRuns]) -> AttentionFindings:
    """Collect the attention of all cases; there must be at least one."""
    weights: dict[str, list[Array]] = {"scaled": [], "raw": []}
    ranks: list[Array] = []
    distances: list[Array] = []
    most: CaseRuns | None = None
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
    """Distance of the donor's KV of images from the cold run's, one entry per layer.

    Attributes:
      k, v: Sum of squares of the difference, divided by that of the cold run's values; keys before rotation `[L]`.
      mean_k, mean_v: Part of it that all tokens of an image share, which `vlcache_jax.reuse.shift` can correct `[L]`.
    """

    k: Array
    v: Array
    mean_k: Array
    mean_v: Array


def deviation(runs: CaseRuns) -> Deviation:
    """Return the distance of the donor's KV from the cold run's, and the part of it that is one vector per image and
    head.
    """
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
    """Return the percentile rank of an image's first token among all tokens, by attention `[L, H]` (MPIC, figure 12).

    Args:
      scores: See `answer_scores`, `[L, H, n]`.
      place: Position of that token in the prompt.

    Returns:
      Percentage of the other tokens that get less attention.
    """
    less = scores < scores[:, :, place : place + 1]
    return np.asarray(100 * less.sum(-1) / (scores.shape[-1] - 1))


def _softmax(scores: Array) -> Array:
    exponents = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(exponents / exponents.sum(-1, keepdims=True))
