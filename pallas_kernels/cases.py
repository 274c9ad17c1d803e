"""Corner cases of the kernels, references in numpy, and tolerances, for every implementation.

The tests run this table on the CPU, the checks on a chip: `checks.py` and `benchmarks.gpu`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vlcache_jax.pallas_kernels.link import link
from vlcache_jax.pallas_kernels.link.codec import CODECS, Codec
from vlcache_jax.pallas_kernels.nonfinite import propagate_nonfinite

TOLERANCE = {"bfloat16": 0.04, "float16": 0.01}  # of `relative_error` if weights, too, are rounded to the dtype

Intervals = tuple[np.ndarray, np.ndarray]
Inputs = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


def array(x: Any, dtype: Any) -> jax.Array:
    """Round `x` to the dtype with numpy. (`jnp.asarray` would compile a program for each shape.)"""
    return jax.device_put(np.asarray(x, jnp.dtype(dtype)))


@functools.partial(jax.jit, static_argnums=0)
def encode(codec: Codec, x: Any, bias: Any = None, weight: Any = None) -> tuple[jax.Array, jax.Array]:
    """Call `codec.encode`, compiled once for each shape."""
    return codec.encode(x, bias, weight)


@dataclasses.dataclass(frozen=True)
class KernelCase:
    """A case of attention: shapes by their letters, and intervals as a function of (generator, N, S)."""

    name: str
    N: int
    S: int
    H: int
    K: int
    D: int
    intervals: Callable[[np.random.Generator, int, int], Intervals]
    scale: float | None = None

    def inputs(self, dtype: str = "float32", *, poison: bool = False, flaw: bool = False, seed: int = 0) -> Inputs:
        """Return the arguments of attention.

        Args:
          dtype: Of q, k and v.
          poison: Fill every slot that no row sees: K with NaN and infinities, V, which is finite, with the largest
            number.
          flaw: Put NaN into K, for one head of a slot in the middle of those that some row sees.
          seed: Of the random numbers.
        """
        rng = np.random.default_rng((seed, self.N, self.S, self.D))
        q, k, v = (rng.standard_normal(s) for s in ((self.N, self.H, self.D), *[(self.S, self.K, self.D)] * 2))
        start, end = self.intervals(rng, self.N, self.S)
        slot = np.arange(self.S)[:, None]
        seen = ((slot >= start) & (slot < end)).any(1)
        if poison:
            largest = float(jnp.finfo(dtype).max)
            k[~seen] = rng.choice([np.nan, np.inf, -np.inf], k[~seen].shape)
            v[~seen] = rng.choice([largest, -largest], v[~seen].shape)
        if flaw:
            k[np.flatnonzero(seen)[seen.sum() // 2], 0, 0] = np.nan
        bounds = array(start, jnp.int32), array(end, jnp.int32)
        return array(q, dtype), array(k, dtype), array(v, dtype), *bounds


def causal(rng: np.random.Generator, n: int, s: int) -> Intervals:
    return np.zeros(n, int), np.arange(s - n, s) + 1


def scattered(rng: np.random.Generator, n: int, s: int) -> Intervals:
    """Return some rows of one request, in no order."""
    return np.zeros(n, int), rng.choice(s, n, replace=False) + 1


def packed(rng: np.random.Generator, n: int, s: int) -> Intervals:
    """Return causal rows of several requests one after the other, with a gap between two of them."""
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
    end = np.where(kind == 1, start, np.where(kind == 2, start - 5, end))  # length 0, and negative length
    return start, end


def all_empty(rng: np.random.Generator, n: int, s: int) -> Intervals:
    return np.full(n, s // 2), np.full(n, s // 2)


def whole(rng: np.random.Generator, n: int, s: int) -> Intervals:
    return np.zeros(n, int), np.full(n, s)


def beyond(rng: np.random.Generator, n: int, s: int) -> Intervals:
    """Return bounds outside the pool, and rows fully outside it."""
    start, end = rng.integers(-s, s // 2, n), rng.integers(s // 2, 3 * s, n)
    start[0], end[0] = -9, -2
    start[-1], end[-1] = s + 3, s + 8
    return start, end


def windows(rng: np.random.Generator, n: int, s: int, size: int = 64) -> Intervals:
    row = np.arange(n)
    return row // size * size, np.minimum(row // size * size + size, s)


def decode(rng: np.random.Generator, n: int, s: int) -> Intervals:
    """Return one row for each request; the requests stand in the pool in no order."""
    start = rng.permutation(n) * (s // n)
    return start, start + rng.integers(1, s // n + 1, n)


# Many intervals share a shape, so that each shape is compiled once.
CASES = (
    KernelCase("causal, behind a prefix", 300, 801, 6, 2, 64, causal),
    KernelCase("scattered", 300, 801, 6, 2, 64, scattered),
    KernelCase("packed", 300, 801, 6, 2, 64, packed),
    KernelCase("windows in a larger pool", 300, 801, 6, 2, 64, windows),
    KernelCase("many requests", 300, 801, 6, 2, 64, decode),
    KernelCase("some empty", 300, 801, 6, 2, 64, some_empty),
    KernelCase("all empty", 300, 801, 6, 2, 64, all_empty),
    KernelCase("beyond the pool", 300, 801, 6, 2, 64, beyond),
    KernelCase("causal", 90, 90, 8, 1, 24, causal),
    KernelCase("some empty, small pool", 90, 90, 8, 1, 24, some_empty),
    KernelCase("scale", 90, 90, 8, 1, 24, causal, scale=0.07),
    KernelCase("causal, many rows, groups of 9", 1100, 1100, 9, 1, 24, causal),
    KernelCase("windows", 200, 200, 3, 3, 80, windows),
    KernelCase("one image", 70, 70, 2, 2, 72, whole),
    KernelCase("decode, groups of 32", 5, 2600, 32, 1, 64, decode),
    KernelCase("one row", 1, 1000, 6, 2, 64, whole),
    KernelCase("packed, groups of 7", 70, 515, 28, 4, 128, packed),
    KernelCase("one slot", 3, 1, 3, 3, 24, whole),
)

# GPU only: ways to cut that no heuristic chooses for such small cases, as fields of `AttentionConfig`.
WAYS: tuple[tuple[KernelCase, dict[str, Any]], ...] = (
    (KernelCase("causal", 45, 300, 6, 2, 64, causal), {"block": 128}),
    (KernelCase("no turns", 45, 300, 4, 1, 64, causal), {"block": 64, "stages": 3, "take_turns": False}),
    (KernelCase("packed, few programs", 75, 300, 7, 1, 128, packed), {"tile": 8, "stages": 2, "programs": 2}),
    (KernelCase("scattered, half pages", 33, 500, 9, 1, 32, scattered), {"block": 64, "stages": 4, "programs": 3}),
    (KernelCase("some empty", 30, 200, 4, 1, 64, some_empty), {"tile": 8, "stages": 3}),
    (KernelCase("all empty", 9, 100, 2, 1, 64, all_empty), {"tile": 8, "stages": 3}),
    (KernelCase("beyond the pool", 20, 150, 4, 2, 24, beyond), {"tile": 8, "stages": 3}),
    (KernelCase("a large group", 5, 300, 32, 1, 64, scattered), {"block": 128}),
    (KernelCase("one slot", 3, 1, 3, 3, 24, whole), {"tile": 8, "stages": 3}),
    (KernelCase("scale", 10, 90, 4, 1, 64, causal, scale=0.07), {"tile": 8, "stages": 3}),
)


def reference(q: Any, k: Any, v: Any, k_start: Any, k_end: Any, scale: float | None = None) -> np.ndarray:
    """Compute attention row by row in float64, from the slots of the row's interval alone."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    S, K, D = k.shape
    k, v = (np.ascontiguousarray(x.swapaxes(0, 1)) for x in (k, v))  # [K, S, D]
    out = np.zeros(q.shape)
    for n, (start, end) in enumerate(zip(np.asarray(k_start), np.asarray(k_end), strict=True)):
        seen = slice(max(start, 0), max(min(end, S), 0))
        if seen.stop <= seen.start:
            continue
        scores = q[n].reshape(K, -1, D) @ k[:, seen].swapaxes(1, 2) * (D**-0.5 if scale is None else scale)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out[n] = (weights @ v[:, seen]).reshape(-1, D)
    return out


def relative_error(out: Any, want: np.ndarray) -> float:
    """Return the largest difference, divided by the root mean square of its row's results: long intervals give small
    ones.

    It is infinite if only one of both is finite, or if a row that must be 0 is not.
    """
    out = np.asarray(out, np.float64)
    finite = np.isfinite(want)
    if (finite != np.isfinite(out)).any():
        return float("inf")
    axes = tuple(range(1, want.ndim))
    difference = np.abs(np.subtract(out, want, where=finite, out=np.zeros(want.shape))).max(axes)
    size = np.sqrt(np.square(want, where=finite, out=np.zeros(want.shape)).sum(axes) / np.maximum(finite.sum(axes), 1))
    return float(np.divide(difference, size, where=size > 0, out=np.where(difference > 0, np.inf, 0.0)).max())


@dataclasses.dataclass(frozen=True)
class LinkCase:
    """Link T tokens into a pool of S slots. Some are padding, which is dropped; some have non-finite values in V.

    The tokens are of the last of `layers` layers. They may be coded, the keys without a `constant`: "bias" or "weight".
    If `kept`, they are on the device, at any place among as many tokens.
    """

    T: int
    S: int
    K: int
    D: int
    padding: int = 0
    layers: int = 1
    codec: str | None = None
    constant: str | None = None
    kept: int = 0

    @property
    def name(self) -> str:
        layers = f", of {self.layers} layers" if self.layers > 1 else ""
        coded = f", {self.codec}" + f" without {self.constant}" * bool(self.constant) if self.codec else ""
        kept = f", of {self.kept} on the device" if self.kept else ""
        return f"{self.T} tokens, {self.padding} of them padding, {self.K} heads of {self.D}{layers}{coded}{kept}"

    @property
    def layer(self) -> int:
        return self.layers - 1

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of link."""
        rng = np.random.default_rng(self.K)
        bias, weight = rng.normal(0, 50, (self.K, self.D)), rng.standard_normal(self.D) * (rng.random(self.D) < 0.9)
        constants = {
            name: array(x, "bfloat16") for name, x in (("bias", bias), ("weight", weight)) if name == self.constant
        }
        return {"layer": self.layer, "codec": self.codec, **constants}

    def inputs(self, dtype: str = "bfloat16", seed: int = 0) -> tuple[Any, ...]:
        """Return the positional arguments of link: slots in no order, those of padding just and far beyond the pool."""
        rng = np.random.default_rng((seed, self.T, self.K, self.D))
        pools = rng.standard_normal((2, self.S, self.K, self.D))
        stored = rng.standard_normal((2, self.T, self.K, self.D))
        stored[1, rng.random((self.T, self.K, self.D)) < (0.001 if self.codec else 0.01)] = np.nan
        slot = rng.permutation(self.S)[: self.T]
        nowhere = rng.permutation(self.T)[: self.padding]
        slot[nowhere] = np.where(np.arange(self.padding) % 2, 2**29, self.S) + nowhere
        angle = rng.uniform(0, 6, (self.T, 1, self.D // 2))
        layers = rng.standard_normal((self.layers, 2, self.T, self.K, self.D))
        layers[self.layer] = stored
        k_pool, v_pool, data, cos, sin = (array(x, dtype) for x in (*pools, layers, np.cos(angle), np.sin(angle)))
        buffers = [data]
        if self.codec is not None:
            coded = [[self._coded(k, self.options()), self._coded(v, {})] for k, v in layers.astype(np.float32)]
            buffers = [jnp.asarray(np.stack([[half[i] for half in layer] for layer in coded])) for i in range(2)]
        return k_pool, v_pool, [buffers], array(slot, jnp.int32), cos, sin

    def _coded(self, x: np.ndarray, options: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
        return encode(CODECS[self.codec or ""], x, options.get("bias"), options.get("weight"))

    def run(self, args: tuple[Any, ...], implementation: str) -> tuple[jax.Array, jax.Array]:
        """Link the arguments that `inputs` returned."""
        options: dict[str, Any] = self.options() | {"implementation": implementation}
        if self.kept:
            k_pool, v_pool, [buffers], *rest = args
            options["source"], buffers = self._kept(buffers)
            args = k_pool, v_pool, [buffers], *rest
        return jax.jit(functools.partial(link, **options))(*args)

    def _kept(self, buffers: Sequence[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
        """Return (source, buffers) of stored keys and values among others, with their groups of eight in another
        order.
        """
        source = np.zeros(self.T, np.int32)
        order = np.random.default_rng(self.T).permutation(self.kept // 8)
        for number, first in enumerate(range(0, self.T, 8)):
            source[first : first + 8] = 8 * order[number] + np.arange(min(8, self.T - first))
        kept = [np.ones((*buffer.shape[:2], self.kept, *buffer.shape[3:]), buffer.dtype) for buffer in buffers]
        for whole, buffer in zip(kept, buffers, strict=True):
            whole[:, :, source] = buffer
        return jnp.asarray(source), [jnp.asarray(whole) for whole in kept]


LINK_CASES = (
    LinkCase(5, 40, 8, 128, padding=1),
    LinkCase(16, 40, 4, 64),
    LinkCase(5, 40, 2, 64, padding=2),
    LinkCase(37, 40, 3, 128, padding=12),
    LinkCase(16, 40, 3, 128, padding=16),
    LinkCase(1, 1, 8, 128),
    LinkCase(11, 40, 2, 64, padding=1, layers=3),
    LinkCase(29, 40, 8, 128, padding=3, kept=64),
    LinkCase(24, 40, 3, 64, kept=128),
)

CODED_LINK_CASES = (
    LinkCase(16, 40, 8, 128, padding=3, layers=2, codec="int8", constant="weight"),
    LinkCase(12, 40, 4, 128, codec="int4", constant="bias"),
    LinkCase(24, 40, 2, 64, padding=2, codec="int8", constant="bias"),
    LinkCase(20, 40, 2, 64, padding=20, codec="int4"),
    LinkCase(32, 40, 3, 128, padding=1, layers=2, codec="int8"),
    LinkCase(28, 40, 3, 128, layers=3, codec="int4", constant="weight"),
    LinkCase(13, 40, 8, 64, padding=1, codec="int4"),
    LinkCase(20, 40, 8, 128, padding=1, codec="int8", constant="weight", kept=64),
    LinkCase(32, 40, 2, 64, codec="int4", constant="bias", kept=128),
)


def link_reference(
    *args: Any,
    layer: int = 0,
    codec: str | None = None,
    bias: jax.Array | None = None,
    weight: jax.Array | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the pools after linking, in their dtype: rotated in float32, rounded once, K marks non-finite V."""
    k_pool, v_pool, [buffers], slot, cos, sin = jax.tree.map(np.asarray, args)
    keys, values = ([buffer[layer, half] for buffer in buffers] for half in range(2))
    k_raw, v = keys[0], values[0]
    if codec is not None:
        k_raw = _decoded(keys[0], keys[1], codec, bias, weight).astype(k_pool.dtype)
        v = _decoded(values[0], values[1], codec).astype(v_pool.dtype)
    a, b, cos, sin = (x.astype(np.float32) for x in (*np.split(k_raw, 2, -1), cos, sin))
    turned = np.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(k_pool.dtype)
    turned, v = map(np.asarray, jax.jit(propagate_nonfinite)(turned, v))
    k_pool, v_pool = k_pool.copy(), v_pool.copy()
    stays = slot < len(k_pool)
    k_pool[slot[stays]], v_pool[slot[stays]] = turned[stays], v[stays]
    return k_pool, v_pool


def _decoded(code: np.ndarray, scales: np.ndarray, name: str, bias: Any = None, weight: Any = None) -> np.ndarray:
    """Decode codes; each step is rounded to float32."""
    if name == "int4":
        code = np.concatenate([code & 15, code >> 4], -1)
    pairs = scales.copy().view(np.float16).astype(np.float32).reshape(*scales.shape[:-1], -1, 2)
    with np.errstate(invalid="ignore"):
        x = code.reshape(*pairs.shape[:-1], -1).astype(np.float32) * pairs[..., :1] + pairs[..., 1:]
    x = x.reshape(code.shape)
    if weight is not None:
        x = x * np.asarray(weight, np.float32)
    return x if bias is None else x + np.asarray(bias, np.float32)
