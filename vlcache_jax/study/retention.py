"""How well tokens that are kept for decoding stand for all: measures on rows of attention (VL-Cache, section 3).

Rows of attention are softmax weights [..., T] of decoded tokens over the prompt and what was decoded before them;
results are means over all rows, be they of heads, layers or tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vlcache_jax.compress.budgets import whole

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


def filtered(attention: Array, p: float) -> Array:
    """The rows without entries below p x their maximum (ThresholdFilter)."""
    return np.where(attention >= p * attention.max(-1, keepdims=True), attention, 0)


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
    """What a modality has of the weights in the prompt; rows in which the prompt has none do not count."""
    prompt = weights[..., : len(modality)]
    total = prompt.sum(-1)
    return float((prompt[..., modality].sum(-1)[total > 0] / total[total > 0]).mean())


def stream(
    kept: npt.NDArray[np.integer], sums: Array, row: Array, heavy: int, recent: int
) -> tuple[npt.NDArray[np.integer], Array]:
    """One decoded token of H2O's original method, which drops a token a step once heavy + recent are kept.

    Args:
      kept: tokens that are kept, rising [c].
      sums: what each has received so far, [c].
      row: the attention of the new token to them and to itself, [c + 1].
      heavy: tokens that are kept for their sums.
      recent: the last tokens, which are kept whatever they received.

    Returns:
      `kept` and `sums` with the new token; without that of the lowest sum that is not recent, where they are too many.
    """
    kept = np.append(kept, kept[-1] + 1)
    sums = np.append(sums, 0) + row
    if len(kept) <= heavy + recent:
        return kept, sums
    lowest = len(kept) - recent - 1 - np.argmin(sums[: len(kept) - recent][::-1])  # of equal ones the latest
    return np.delete(kept, lowest), np.delete(sums, lowest)
