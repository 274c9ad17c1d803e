"""How many of a prompt's tokens each layer keeps (host, numpy, double precision)."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

LEAST = 0.01  # of the prompt that a layer keeps (VL-Cache)
# Least density of a layer, so that one whose attention is all zeros has its share when the others are full.
_DENSE = 1e-9


def visible(length: int, rows: int) -> int:
    """Entries of causal attention in the last `rows` rows of a prompt."""
    return rows * (length - rows) + rows * (rows + 1) // 2


def sparsity(zeros: npt.NDArray[np.integer], length: int, rows: int) -> npt.NDArray[np.float64]:
    """How sparse each layer's attention is (VL-Cache's ThresholdFilter), the mean of its query heads.

    Args:
      zeros: entries below p x the maximum of their row, in the last `rows` rows of the prompt, [L, H].

    Returns:
      Their share of the entries that are not masked, [L].
    """
    return np.asarray(zeros, np.float64).mean(1) / visible(length, rows)


def whole(tokens: Iterable[float], length: int) -> tuple[int, ...]:
    """Budgets as integers: rounded down, at least 1 and at most `length`. 0.29 of 100 tokens are 29."""
    return tuple(min(length, max(1, math.floor(budget + 1e-9))) for budget in tokens)


def layer_shares(gamma: npt.NDArray[np.float64], alpha: float, *, refill: bool) -> npt.NDArray[np.float64]:
    """VL-Cache's share of the prompt for each layer: in proportion to its density 1 - gamma, from `LEAST` to 1.

    Args:
      gamma: sparsity [L].
      alpha: the mean share.
      refill: whether what these bounds took or gave is shared out among the other layers, in proportion again, so that
        the mean is alpha (but never below `LEAST`). The paper does not.

    Returns:
      [L].
    """
    density = np.maximum(1 - np.asarray(gamma, np.float64), _DENSE)
    total = alpha * len(density)
    if not refill:
        return np.clip(density / density.sum() * total, LEAST, 1)
    # The sum of the bounded shares rises with their common scale, and is linear between the scales at which a layer
    # meets a bound.
    scales = np.sort(np.concatenate([LEAST / density, 1 / density]))
    sums = np.clip(scales[:, None] * density, LEAST, 1).sum(1)
    return np.clip(np.interp(total, sums, scales) * density, LEAST, 1)


def pyramid(mean: float, most: float, layers: int, steepness: float = 20.0) -> npt.NDArray[np.float64]:
    """PyramidKV's tokens of each layer: falling linearly with depth to mean / steepness, the first at most `most`, [L].

    Kept as real numbers: the public code's integer steps lose count of the sum.
    """
    first = min(2 * mean - mean / steepness, most)
    step = 2 * (first - mean) / max(layers - 1, 1)
    return mean - (np.arange(layers, dtype=np.float64) - (layers - 1) / 2) * step
