"""Number of prompt tokens that each layer keeps (host, numpy, double precision)."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

LEAST = 0.01  # minimum fraction of the prompt that a layer keeps (VL-Cache)
# Minimum density, so that a layer whose attention is all zeros gets tokens once the other layers are full.
_MIN_DENSITY = 1e-9


def visible(length: int, rows: int) -> int:
    """Return the number of unmasked entries of causal attention in the last `rows` rows of a prompt."""
    return rows * (length - rows) + rows * (rows + 1) // 2


def sparsity(zeros: npt.NDArray[np.integer], length: int, rows: int) -> npt.NDArray[np.float64]:
    """Return the sparsity of each layer's attention (VL-Cache's ThresholdFilter), averaged over its query heads.

    Args:
      zeros: number of entries below p times the maximum of their row, in the last `rows` rows of the prompt, [L, H].
      length: tokens of the prompt.
      rows: number of observed rows.

    Returns:
      Fraction of the unmasked entries that `zeros` counts, float64 [L].
    """
    return np.asarray(zeros, np.float64).mean(1) / visible(length, rows)


def whole(tokens: Iterable[float], length: int) -> tuple[int, ...]:
    """Return budgets as integers, rounded down and clipped to 1 to `length`. 0.29 of 100 tokens are 29."""
    return tuple(min(length, max(1, math.floor(budget + 1e-9))) for budget in tokens)


def layer_shares(gamma: npt.NDArray[np.float64], alpha: float, *, refill: bool) -> npt.NDArray[np.float64]:
    """Return the fraction of the prompt that each layer keeps by VL-Cache: proportional to the density 1 - gamma,
    within `LEAST` to 1.

    Args:
      gamma: sparsity [L].
      alpha: mean fraction.
      refill: redistribute what these bounds add or remove among the other layers, in proportion to density, so that the
        mean is alpha (but at least `LEAST`). The paper does not.

    Returns:
      Fractions, float64 [L].
    """
    density = np.maximum(1 - np.asarray(gamma, np.float64), _MIN_DENSITY)
    total = alpha * len(density)
    if not refill:
        return np.clip(density / density.sum() * total, LEAST, 1)
    # The sum of the bounded fractions increases with their common scale. It is linear between the scales at which a
    # layer reaches a bound.
    scales = np.sort(np.concatenate([LEAST / density, 1 / density]))
    sums = np.clip(scales[:, None] * density, LEAST, 1).sum(1)
    return np.clip(np.interp(total, sums, scales) * density, LEAST, 1)


def pyramid(mean: float, maximum: float, layers: int, steepness: float = 20.0) -> npt.NDArray[np.float64]:
    """Return PyramidKV's number of tokens per layer, float64 [L].

    The numbers decrease linearly with depth to mean / steepness; the first is at most `maximum`. They stay real
    numbers: the integer steps of the public code do not preserve the sum.
    """
    first = min(2 * mean - mean / steepness, maximum)
    step = 2 * (first - mean) / max(layers - 1, 1)
    return mean - (np.arange(layers, dtype=np.float64) - (layers - 1) / 2) * step
