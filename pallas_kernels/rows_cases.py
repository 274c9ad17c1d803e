"""Cases of the operations on rows, and their references in numpy."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vlcache_jax.pallas_kernels.cases import array
from vlcache_jax.pallas_kernels.rows import norm_residual, rotate_write

EPS = 1e-6
# of `relative_error`: sums in another order may round to the next number, and then be scaled and rotated
TOLERANCE = {"bfloat16": 0.04, "float16": 0.005, "float32": 1e-5}


def _round(x: np.ndarray, dtype: Any) -> np.ndarray:
    """Round `x` to the dtype; return float64."""
    return x.astype(np.float32).astype(jnp.dtype(dtype)).astype(np.float64)


def _normed(x: np.ndarray, scale: np.ndarray, dtype: Any) -> np.ndarray:
    share = 1 / np.sqrt(np.square(x).mean(-1, keepdims=True) + EPS)
    return _round(_round(x * share, dtype) * scale, dtype)


def _wide(*arrays: jax.Array | None) -> list[Any]:
    return [None if x is None else np.array(x, np.float64) for x in arrays]


@dataclasses.dataclass(frozen=True)
class NormCase:
    """N rows of M numbers; if there are several, one has a NaN.

    Attributes:
      partials: Number of partial sums of the added array, which have one more row; 0: the array itself.
    """

    N: int
    M: int
    added: bool = True
    partials: int = 0

    @property
    def name(self) -> str:
        added = f", {self.partials} partial sums" * bool(self.partials) + ", added" * self.added
        return f"{self.N} rows of {self.M}{added}"

    def inputs(self, dtype: str) -> tuple[jax.Array, jax.Array | None, jax.Array]:
        """Return the arguments of `norm_residual`."""
        rng = np.random.default_rng((self.N, self.M))
        x, delta = rng.standard_normal((2, self.N, self.M)) * [[[3]], [[0.5]]]
        if self.N > 1:
            x[self.N // 2, self.M // 3] = np.nan
        scale = array(rng.standard_normal(self.M), dtype)
        if self.partials:
            parts = rng.standard_normal((self.partials, self.N + 1, self.M))
            parts[:, -1] = np.nan  # this row is not needed
            return array(x, dtype), array(parts, jnp.float32), scale
        return array(x, dtype), array(delta, dtype) if self.added else None, scale

    def run(self, args: tuple[Any, ...], implementation: str) -> tuple[jax.Array, jax.Array]:
        """Return (sum, normed) of the arguments that `inputs` returned."""
        return jax.jit(functools.partial(norm_residual, eps=EPS, implementation=implementation))(*args)

    def reference(self, x: Any, delta: Any, scale: Any) -> tuple[np.ndarray, np.ndarray]:
        """Compute (sum, normed) in numpy."""
        dtype = x.dtype
        x, delta, scale = _wide(x, delta, scale)
        if self.partials:
            delta = _round(delta[:, : self.N].sum(0), dtype)
        total = x if delta is None else _round(x + delta, dtype)
        return total, _normed(total, scale, dtype)


class RotateResult(NamedTuple):
    """Results of `rotate_write`. Queries are 0 at places of no row; `raw_k` and `raw_v` are returned on request."""

    q: Any
    k_pool: Any
    v_pool: Any
    raw_k: Any = None
    raw_v: Any = None


@dataclasses.dataclass(frozen=True)
class RotateCase:
    """N rows and a pool of S slots, whose free slots are NaN. Some rows write nowhere, others have non-finite values in
    V.

    Attributes:
      keep: Rows whose queries are wanted; 0: all.
      rest: Rows after the first part, without queries.
      places: Number of places for queries, some of a row several times, others of no row; 0: in the order of the rows.
    """

    N: int
    K: int
    G: int
    D: int
    S: int = 30
    normed: bool = True
    biased: bool = False
    keep: int = 0
    rest: int = 0
    places: int = 0
    return_kv: bool = False

    @property
    def name(self) -> str:
        options = {"normed": self.normed, "biased": self.biased, "KV returned": self.return_kv}
        numbers = {"kept": self.keep, "without queries": self.rest, "places": self.places}
        said = [f"{n} {what}" for what, n in numbers.items() if n] + [what for what, is_so in options.items() if is_so]
        return ", ".join([f"{self.N} rows, {self.K * self.G}/{self.K} heads of {self.D}", *said])

    def inputs(self, dtype: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of `rotate_write`."""
        rng = np.random.default_rng((self.N, self.K, self.G, self.D))
        rows, width = self.N + self.rest, self.G + 2
        parts = [rng.standard_normal((self.N, self.K, width, self.D))]
        if self.rest:
            parts.append(rng.standard_normal((self.rest, self.K, 2, self.D)))
        for part in parts:
            part[:, :, -1][rng.random(part[:, :, -1].shape) < 0.01] = np.inf
        slot = rng.permutation(self.S)[:rows]
        nowhere = rng.permutation(rows)[: rows // 3]
        slot[nowhere] = np.where(nowhere % 2, 2**29, self.S) + nowhere
        angle = rng.uniform(0, 6, (rows, 1, self.D // 2))
        given = [array(x, dtype) for x in (np.cos(angle), np.sin(angle), np.full((self.S, self.K, self.D), np.nan))]
        options: dict[str, Any] = {"eps": EPS, "return_kv": self.return_kv}
        if self.normed:
            options |= {name: array(rng.standard_normal(self.D), dtype) for name in ("q_norm", "k_norm")}
        if self.biased:
            options["bias"] = array(rng.normal(0, 4, (self.K, width, self.D)), dtype)
        if self.keep:
            options["keep"] = self.keep
        if self.places:
            place = rng.integers(0, 2 * self.kept, self.places)  # half of them have no row
            place[self.places // 2 : self.places // 2 + 8] = self.kept
            options["places"] = array(place, jnp.int32)
        cos, sin, pool = given
        return ([array(part, dtype) for part in parts], cos, sin, array(slot, jnp.int32), pool, pool), options

    @property
    def kept(self) -> int:
        return self.keep or self.N

    def run(self, args: tuple[Any, ...], options: dict[str, Any], implementation: str) -> RotateResult:
        """Rotate and write the arguments that `inputs` returned."""
        static = {name: options[name] for name in ("eps", "keep", "return_kv") if name in options}
        arrays = {name: x for name, x in options.items() if name not in static}
        function = functools.partial(rotate_write, **static, implementation=implementation)
        q, k_pool, v_pool, new_kv = jax.jit(function)(*args, **arrays)
        return RotateResult(self._at_rows(np.asarray(q), options), k_pool, v_pool, *(new_kv or ()))

    def reference(self, args: tuple[Any, ...], options: dict[str, Any]) -> RotateResult:
        """Compute the results in float64, with the roundings of the dtype: rotation is rounded once."""
        parts, *arrays, slot, k_pool, v_pool = args
        dtype = k_pool.dtype
        cos, sin, bias, q_norm, k_norm = _wide(*arrays, *(options.get(name) for name in ("bias", "q_norm", "k_norm")))
        parts = _wide(*parts)
        if bias is not None:
            parts = [_round(part + bias[:, -part.shape[2] :], dtype) for part in parts]
        q = parts[0][: self.kept, :, :-2].reshape(self.kept, -1, self.D)
        k, v = (np.concatenate([part[:, :, i] for part in parts]) for i in (-2, -1))
        if q_norm is not None:
            q, k = _normed(q, q_norm, dtype), _normed(k, k_norm, dtype)
        turned_q, turned_k = (_turned(x, cos[: len(x)], sin[: len(x)], dtype) for x in (q, k))
        if "places" in options:
            turned_q = turned_q[np.minimum(options["places"], self.kept - 1)]
        finite, slot = np.isfinite(v), np.asarray(slot)
        pools = _wide(k_pool, v_pool)
        for pool, x in zip(pools, (np.where(finite, turned_k, np.nan), np.where(finite, v, 0)), strict=True):
            pool[slot[slot < self.S]] = x[slot < self.S]
        return RotateResult(self._at_rows(turned_q, options), *pools, *((k, v) if self.return_kv else ()))

    def _at_rows(self, q: np.ndarray, options: dict[str, Any]) -> np.ndarray:
        """Return queries, 0 at places of no row."""
        if "places" not in options:
            return q
        return np.where((np.asarray(options["places"]) < self.kept)[:, None, None], q, np.zeros((), q.dtype))


def _turned(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, dtype: Any) -> np.ndarray:
    a, b = np.split(x, 2, -1)
    return _round(np.concatenate([a * cos - b * sin, b * cos + a * sin], -1), dtype)


NORM_CASES = (
    NormCase(1, 1024),
    NormCase(3, 384, added=False),
    NormCase(2, 2560),
    NormCase(5, 128),
    NormCase(1, 1024, partials=4),
    NormCase(3, 384, partials=3),
)

# Qwen3-VL has norms and Qwen2.5-VL biases.
ROTATE_CASES = (
    RotateCase(5, 2, 2, 128, return_kv=True),
    RotateCase(1, 8, 4, 128),
    RotateCase(6, 2, 7, 128, normed=False, biased=True, return_kv=True),
    RotateCase(4, 3, 1, 64, biased=True),
    RotateCase(6, 1, 5, 64, keep=3, rest=7, return_kv=True),
    RotateCase(7, 2, 4, 128, places=24),
    RotateCase(9, 1, 2, 128, keep=2, rest=4, normed=False, places=16),
    RotateCase(4, 1, 3, 128),
)
