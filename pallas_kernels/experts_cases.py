"""Cases of the experts' products, and their reference."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vlcache_jax.pallas_kernels.cases import array


@dataclasses.dataclass(frozen=True)
class ExpertsCase:
    """N rows with k choices each of `among` experts; E of them, from `first` on, are on the device. Widths are M and F.

    `choose` is a function of (generator, N, k, among) that returns int32 `[N, k]`; -1 is no expert.
    """

    name: str
    N: int
    k: int
    E: int
    M: int
    F: int
    choose: Callable[[np.random.Generator, int, int, int], np.ndarray]
    first: int = 0
    among: int | None = None

    def inputs(self, dtype: str = "float32") -> tuple[jax.Array, ...]:
        """Return the arguments of `mix_experts`: NaN in experts that no row has chosen, and in rows and weights of no
        expert.
        """
        rng = np.random.default_rng((self.N, self.E, self.M))
        expert = self.choose(rng, self.N, self.k, self.among or self.E)
        x = rng.standard_normal((self.N, self.M), np.float32)
        weight = rng.random((self.N, self.k), np.float32)
        gate_up = rng.standard_normal((self.E, self.M, 2 * self.F), np.float32) * np.float32(self.M**-0.5)
        down = rng.standard_normal((self.E, self.F, self.M), np.float32) * np.float32(self.F**-0.5)
        own = expert - self.first
        is_own = (own >= 0) & (own < self.E)
        unchosen = np.setdiff1d(np.arange(self.E), own[is_own])
        gate_up[unchosen], down[unchosen] = np.nan, np.nan
        x[~is_own.any(1)], weight[~is_own] = np.nan, np.nan
        rounded = functools.partial(array, dtype=dtype)
        return rounded(x), rounded(weight), array(expert, jnp.int32), rounded(gate_up), rounded(down)


GROUPS = (0, 1, 3, 9, 70, 0)


def groups(rng: np.random.Generator, n: int, k: int, e: int) -> np.ndarray:
    """Return choices with as many rows of each expert as in `GROUPS`, in no order."""
    return rng.permutation(np.repeat(np.arange(len(GROUPS)), GROUPS))[:, None]


def routed(rng: np.random.Generator, n: int, k: int, e: int) -> np.ndarray:
    """Return different experts for each row, some chosen often and others hardly ever."""
    liking = rng.standard_normal((n, e)) + 2 * rng.standard_normal(e)
    return np.argsort(-liking, axis=1)[:, :k]


def some(rng: np.random.Generator, n: int, k: int, e: int) -> np.ndarray:
    """Return choices as `routed` does, but a third of the rows is not needed."""
    return np.where(np.arange(n)[:, None] % 3 == 1, -1, routed(rng, n, k, e))


def nothing(rng: np.random.Generator, n: int, k: int, e: int) -> np.ndarray:
    return np.full((n, k), -1)


# Products sum blocks of 64: 1, 2, 3, 9 and more. Programs do several items, or none.
CASES = (
    ExpertsCase("groups of 0, 1, 3, 9 and 70 rows", sum(GROUPS), 1, len(GROUPS), 128, 64, groups),
    ExpertsCase("one row", 1, 8, 16, 64, 192, routed),
    ExpertsCase("one row, some of the experts", 1, 8, 8, 64, 64, routed, first=3, among=16),
    ExpertsCase("some rows are not needed", 40, 2, 5, 192, 128, some),
    ExpertsCase("nothing is needed", 9, 2, 4, 64, 64, nothing),
    ExpertsCase("some of the experts", 25, 3, 4, 128, 64, routed, first=3, among=10),
    ExpertsCase("many rows", 600, 2, 3, 128, 128, routed),
)
# Qwen3-VL-30B-A3B and 235B-A22B, with fewer experts.
REAL = (
    ExpertsCase("one row of 30B", 1, 8, 12, 2048, 768, routed),
    ExpertsCase("64 rows of 30B", 64, 8, 24, 2048, 768, some),
    ExpertsCase("512 rows of 235B", 512, 4, 8, 4096, 1536, routed),
)


def reference(x: Any, weight: Any, expert: Any, gate_up: Any, down: Any, *, first: int = 0) -> np.ndarray:
    """Compute the mixture expert by expert in float64, without rounding."""
    x, weight = (np.asarray(a, np.float64) for a in (x, weight))
    own, out = np.asarray(expert) - first, np.zeros(x.shape)
    for e in range(len(gate_up)):
        row, choice = np.nonzero(own == e)
        if len(row):
            gate, up = np.split(x[row] @ np.asarray(gate_up[e], np.float64), 2, axis=1)
            made = (gate / (1 + np.exp(-gate)) * up) @ np.asarray(down[e], np.float64)
            np.add.at(out, row, made * weight[row, choice][:, None])
    return out
