"""Cases of attention scores, and their reference."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vlcache_jax.pallas_kernels.attention import PAGE
from vlcache_jax.pallas_kernels.cases import array


@dataclasses.dataclass(frozen=True)
class StatisticsCase:
    """N rows over a request of B pages, by the letters of shapes; places as a function of (generator, N, slots)."""

    name: str
    N: int
    B: int
    H: int
    K: int
    D: int
    place: Callable[[np.random.Generator, int, int], np.ndarray]
    p: float = 0.01
    scale: float | None = None

    def inputs(self, dtype: str = "float32", *, flaw: bool = False) -> tuple[jax.Array, ...]:
        """Return the arguments of `attention_statistics`: pages in no order, NaN in slots that no row sees.

        Args:
          flaw: Also put NaN into a key of the first head, in the middle of the slots that some row sees.
        """
        rng = np.random.default_rng((self.N, self.B, self.D))
        pages = self.B + 3
        q, k = rng.standard_normal((self.N, self.H, self.D)) * 2, rng.standard_normal((pages * PAGE, self.K, self.D))
        table, place = rng.permutation(pages)[: self.B], self.place(rng, self.N, self.B * PAGE)
        slots = _slots(table)[: max(place.max() + 1, 0)]
        unseen = np.ones(len(k), bool)
        unseen[slots] = False
        k[unseen] = np.nan
        if flaw:
            k[slots[len(slots) // 2], 0, 0] = np.nan
        indices = array(table, jnp.int32), array(place, jnp.int32)
        return array(q, dtype), array(k, dtype), *indices, jnp.float32(self.p)


def last_rows(rng: np.random.Generator, n: int, slots: int) -> np.ndarray:
    """Return a prompt that ends within its last page, its last rows, and padding."""
    end = slots - PAGE // 3
    return np.pad(np.arange(end - n + n // 4, end), (0, n // 4), constant_values=-1)


def all_rows(rng: np.random.Generator, n: int, slots: int) -> np.ndarray:
    return np.arange(n)


def scattered(rng: np.random.Generator, n: int, slots: int) -> np.ndarray:
    """Return rows in no order, some of which see nothing, over the first half of the pages."""
    return np.where(rng.random(n) < 0.2, -1, rng.integers(0, slots // 2, n))


def edges(rng: np.random.Generator, n: int, slots: int) -> np.ndarray:
    """Return the first and the last slots of pages."""
    return np.resize([0, PAGE - 1, PAGE, slots - 1], n)


def nothing(rng: np.random.Generator, n: int, slots: int) -> np.ndarray:
    return np.full(n, -1)


CASES = (
    StatisticsCase("one row", 1, 2, 2, 1, 64, last_rows),
    StatisticsCase("last rows", 40, 9, 6, 2, 64, last_rows),
    StatisticsCase("scattered", 40, 9, 6, 2, 64, scattered, p=0.1),
    StatisticsCase("edges", 40, 9, 6, 2, 64, edges, scale=0.3),
    StatisticsCase("nothing", 40, 9, 6, 2, 64, nothing),
    StatisticsCase("all rows", 300, 3, 4, 4, 24, all_rows, p=1e-4),
    StatisticsCase("one row, groups of 7", 1, 2, 28, 4, 128, last_rows),
    StatisticsCase("one head", 30, 7, 1, 1, 80, last_rows),
)


class ExpectedScores(NamedTuple):
    """Expected results: sums that slots receive, and the minimum and maximum number of weights below the threshold.

    Weights on the threshold, up to rounding, may be on either side, and so may NaN.
    """

    received: np.ndarray
    least: np.ndarray
    most: np.ndarray


def reference(
    q: Any, k: Any, table: Any, place: Any, p: Any, *, scale: float | None = None, within: float = 1e-5
) -> ExpectedScores:
    """Compute attention scores row by row in float64.

    `within` is the relative distance from the threshold at which a weight is surely on its side.
    """
    q, k = (np.asarray(x, np.float64) for x in (q, k))
    H, (_, K, D) = q.shape[1], k.shape
    keys = k[_slots(table)]
    received = np.zeros((K, len(keys)))
    least, most = (np.zeros(H, int) for _ in range(2))
    for row, last in zip(q.reshape(len(q), K, H // K, D), np.asarray(place), strict=True):
        if last < 0:
            continue
        scores = np.einsum("kgd,skd->kgs", row, keys[: last + 1]) * (D**-0.5 if scale is None else scale)
        part = np.exp(scores - scores.max(-1, keepdims=True))
        received[:, : last + 1] += (part / part.sum(-1, keepdims=True)).mean(1)
        least += (part < float(p) * (1 - within)).sum(-1).reshape(H)
        most += (~(part >= float(p) * (1 + within))).sum(-1).reshape(H)
    return ExpectedScores(received, least, most)


def _slots(table: Any) -> np.ndarray:
    """Return the pool's slots of a request, in their order."""
    return np.add.outer(np.asarray(table) * PAGE, np.arange(PAGE)).ravel()
