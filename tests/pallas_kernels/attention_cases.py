"""What every implementation of attention has to do: cases, tolerances and a reference, shared by their tests."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

ATOL = {"float32": 2e-6, "bfloat16": 1e-2}

Intervals = tuple[np.ndarray, np.ndarray]
Inputs = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


def large(dtype: str) -> float:
    """Half of the largest finite number."""
    return float(jnp.finfo(dtype).max) / 2


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes by their letters, and intervals as a function of (generator, N, S)."""

    name: str
    N: int
    S: int
    H: int
    K: int
    D: int
    intervals: Callable[[np.random.Generator, int, int], Intervals]
    scale: float | None = None

    def inputs(self, dtype: str = "float32", *, poison: bool = False, seed: int = 0) -> Inputs:
        """Arguments of attention; `poison` fills every slot that no row sees: K with NaN and infinities, V with numbers
        near the largest."""
        rng = np.random.default_rng((seed, self.N, self.S, self.D))
        q, k, v = (rng.standard_normal(s) for s in ((self.N, self.H, self.D), *[(self.S, self.K, self.D)] * 2))
        start, end = self.intervals(rng, self.N, self.S)
        if poison:
            slot = np.arange(self.S)[:, None]
            unseen = ~((slot >= start) & (slot < end)).any(1)
            k[unseen] = rng.choice([np.nan, np.inf, -np.inf], k[unseen].shape)
            v[unseen] = rng.choice([-large(dtype), large(dtype)], v[unseen].shape)
        index = (jnp.asarray(x, jnp.int32) for x in (start, end))
        return *(jnp.asarray(x, dtype) for x in (q, k, v)), *index


def causal(rng: np.random.Generator, n: int, s: int) -> Intervals:
    return np.zeros(n, int), np.arange(s - n, s) + 1


def scattered(rng: np.random.Generator, n: int, s: int) -> Intervals:
    """Some rows of one request, in no order."""
    return np.zeros(n, int), rng.choice(s, n, replace=False) + 1


def packed(rng: np.random.Generator, n: int, s: int) -> Intervals:
    """Causal rows of several requests one after the other, with a gap between two of them."""
    bounds = np.array([0, s // 7, s // 3, s // 2, s])
    slot = np.sort(rng.choice(s, n, replace=False))
    slot = slot[(slot < s // 3) | (slot >= s // 3 + s // 9)]
    start = bounds[np.searchsorted(bounds, slot, side="right") - 1]
    lost = n - len(slot)  # become padding, as in a bucket
    return np.pad(start, (0, lost)), np.pad(slot + 1, (0, lost))


def some_empty(rng: np.random.Generator, n: int, s: int) -> Intervals:
    start = rng.integers(0, s, n)
    end = np.minimum(start + rng.integers(1, s, n), s)
    kind = np.arange(n) % 4
    end = np.where(kind == 1, start, np.where(kind == 2, start - 5, end))  # of length 0, and of less
    return start, end


def all_empty(rng: np.random.Generator, n: int, s: int) -> Intervals:
    return np.full(n, s // 2), np.full(n, s // 2)


def whole(rng: np.random.Generator, n: int, s: int) -> Intervals:
    return np.zeros(n, int), np.full(n, s)


def beyond(rng: np.random.Generator, n: int, s: int) -> Intervals:
    """Bounds outside the pool, and rows wholly outside it."""
    start, end = rng.integers(-s, s // 2, n), rng.integers(s // 2, 3 * s, n)
    start[0], end[0] = -9, -2
    start[-1], end[-1] = s + 3, s + 8
    return start, end


def windows(rng: np.random.Generator, n: int, s: int, size: int = 64) -> Intervals:
    row = np.arange(n)
    return row // size * size, np.minimum(row // size * size + size, s)


def decode(rng: np.random.Generator, n: int, s: int) -> Intervals:
    """Every row another request, which stand in the pool in no order."""
    start = rng.permutation(n) * (s // n)
    return start, start + rng.integers(1, s // n + 1, n)


# Many intervals share a shape, so that each shape is compiled once.
CASES = (
    Case("causal, behind a prefix", 300, 801, 6, 2, 64, causal),
    Case("scattered", 300, 801, 6, 2, 64, scattered),
    Case("packed", 300, 801, 6, 2, 64, packed),
    Case("windows in a larger pool", 300, 801, 6, 2, 64, windows),
    Case("many requests", 300, 801, 6, 2, 64, decode),
    Case("some empty", 300, 801, 6, 2, 64, some_empty),
    Case("all empty", 300, 801, 6, 2, 64, all_empty),
    Case("beyond the pool", 300, 801, 6, 2, 64, beyond),
    Case("causal", 90, 90, 8, 1, 24, causal),
    Case("some empty, small pool", 90, 90, 8, 1, 24, some_empty),
    Case("scale", 90, 90, 8, 1, 24, causal, scale=0.07),
    Case("causal, many rows", 1100, 1100, 3, 1, 24, causal),
    Case("windows", 200, 200, 3, 3, 80, windows),
    Case("one image", 70, 70, 2, 2, 72, whole),
    Case("decode", 5, 2600, 8, 1, 64, decode),
    Case("one row", 1, 1000, 6, 2, 64, whole),
    Case("one slot", 3, 1, 3, 3, 24, whole),
)


def reference(
    q: jax.Array, k: jax.Array, v: jax.Array, k_start: jax.Array, k_end: jax.Array, scale: float | None = None
) -> np.ndarray:
    """Row by row in float64, from the slots of the row's interval alone."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    S, K, D = k.shape
    out = np.zeros(q.shape)
    for n, (start, end) in enumerate(zip(np.asarray(k_start), np.asarray(k_end), strict=True)):
        seen = slice(max(start, 0), max(min(end, S), 0))
        if seen.stop <= seen.start:
            continue
        scores = np.einsum("kgd,skd->kgs", q[n].reshape(K, -1, D), k[seen]) * (D**-0.5 if scale is None else scale)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out[n] = np.einsum("kgs,skd->kgd", weights, v[seen]).reshape(-1, D)
    return out
