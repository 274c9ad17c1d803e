"""How well tokens that are kept for decoding stand for all: measures on rows of attention (VL-Cache, section 3).

Rows of attention are softmax weights [..., T] of decoded tokens over the prompt and what was decoded before them;
results are means over all rows, be they of heads, layers or tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vlcache_jax.compress.budgets import whole

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


def filtered(attention: Array, p: float) -> Array:
    """The rows without entries below p x their maximum (ThresholdFilter)."""
    return np.where(attention >= p * attention.max(-1, keepdims=True), attention, 0)


def zeros(attention: Array, p: float) -> npt.NDArray[np.int64]:
    """How many entries of each row are below p x its maximum."""
    return np.asarray((attention < p * attention.max(-1, keepdims=True)).sum(-1))


def of_heads(sparsity: Array) -> list[list[float]]:
    """Of a measure of each head [L, H] the least, the mean and the greatest of a layer's heads: [3, L]."""
    return [sparsity.min(1).tolist(), sparsity.mean(1).tolist(), sparsity.max(1).tolist()]


def top(values: Array, k: int) -> Mask:
    """Which are the k highest of each row; of equal ones the earlier is higher."""
    order = np.argsort(-values, axis=-1, kind="stable")
    mask = np.zeros(values.shape, bool)
    np.put_along_axis(mask, order[..., :k], True, axis=-1)
    return mask


def cache_hit_rate(scores: Array, attention: Array, k: int) -> float:
    """The share of the k prompt tokens that an answer looks at most that are among the k of highest score.

    Args:
      scores, attention: each [..., m]; the attention is that of the first decoded row.
    """
    return float((top(scores, k) & top(attention, k)).sum(-1).mean() / k)


def contribution(attention: Array, modality: Mask, p: float) -> float:
    """The part that one modality has of the attention to the prompt, after the filter.

    Args:
      attention: [..., T].
      modality: the prompt's tokens that are of it, [m], m <= T.
    """
    return _share(filtered(attention, p), modality)


def coverage(attention: Array, modality: Mask, alpha: float) -> float:
    """The part that one modality has of the prompt's tokens among the floor(alpha T) that each row looks at most.

    Args:
      attention: [..., T].
      modality: the prompt's tokens that are of it, [m], m <= T.
    """
    T = attention.shape[-1]
    return _share(top(attention, *whole([alpha * T], T)).astype(np.float64), modality)


def _share(weights: Array, modality: Mask) -> float:
    """What a modality has of the weights in the prompt; rows in which the prompt has none do not count, NaN: all."""
    prompt = weights[..., : len(modality)]
    total = prompt.sum(-1)
    shares = prompt[..., modality].sum(-1)[total > 0] / total[total > 0]
    return float(shares.mean()) if len(shares) else np.nan


def mean_of_rows(rows: Sequence[Any]) -> Any:
    """The mean of the first axis, of what is not NaN, as lists."""
    return np.ma.masked_invalid(rows).mean(0).filled(np.nan).tolist()


def stream(
    kept: npt.NDArray[np.integer], sums: Array, row: Array, heavy: int, recent: int, every: int = 1
) -> tuple[npt.NDArray[np.integer], Array]:
    """One decoded token of H2O's original method, which goes on dropping tokens while it decodes.

    Args:
      kept: tokens that are kept, rising [c].
      sums: what each has received so far, [c].
      row: the attention of the new token to them and to itself, [c + 1].
      heavy: tokens that are kept for their sums.
      recent: the last tokens, which are kept whatever they received.
      every: tokens that are decoded before some are dropped again; 1: each drops one.

    Returns:
      `kept` and `sums` with the new token; where there are `every` too many, of those that are not recent the `heavy`
      ones of the highest sums alone.
    """
    kept, sums = np.append(kept, kept[-1] + 1), np.append(sums, 0) + row
    if len(kept) < heavy + recent + every:
        return kept, sums
    stays = np.append(top(sums[: len(kept) - recent], heavy), np.ones(recent, bool))
    return kept[stays], sums[stays]
