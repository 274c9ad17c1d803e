"""Cases of products with FP8 matrices, and their reference."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vlcache_jax.pallas_kernels import experts_cases
from vlcache_jax.pallas_kernels.cases import array
from vlcache_jax.pallas_kernels.experts_cases import ExpertsCase, groups, routed, some

GROUP = 128  # inputs that share a factor
MOST = np.float32(jnp.finfo(jnp.float8_e4m3fn).max)  # larger numbers become NaN

QuantizedMatrix = tuple[np.ndarray, np.ndarray, np.ndarray]  # codes, factors, and the dequantized values in float64


@dataclasses.dataclass(frozen=True)
class Float8Case:
    """A product of N rows with a matrix `[O, K]`."""

    name: str
    N: int
    O: int  # noqa: E741 -- as everywhere
    K: int

    def inputs(self, dtype: str = "bfloat16") -> tuple[jax.Array, ...]:
        """Return the arguments of `float8_matmul`."""
        rng = np.random.default_rng((self.N, self.O, self.K))
        x = array(rng.standard_normal((self.N, self.K), np.float32), dtype)
        weight, scale, _ = self.kept
        return x, jnp.asarray(weight), jnp.asarray(scale)

    @property
    def kept(self) -> QuantizedMatrix:
        """The quantized matrix."""
        rng = np.random.default_rng(self.O)
        return rounded(rng, rng.standard_normal((self.O, self.K), np.float32) * np.float32(self.K**-0.5))

    def reference(self, x: Any) -> np.ndarray:
        """Compute the product in float64."""
        found: np.ndarray = np.asarray(x, np.float64) @ self.kept[2].T
        return found


def rounded(rng: np.random.Generator, matrix: np.ndarray) -> QuantizedMatrix:
    """Quantize a matrix, or a stack of them, `[..., O, K]`, with factors that differ by output and group."""
    *outputs, inputs = matrix.shape
    largest = np.abs(matrix).reshape(*outputs, inputs // GROUP, GROUP).max(-1)
    scale = np.fmax(largest, 1e-3) / MOST * rng.uniform(1, 2, largest.shape).astype(np.float32)  # also of NaN
    spread = np.repeat(scale, GROUP, axis=-1)
    weight = (matrix / spread).astype(jnp.float8_e4m3fn)
    return weight, scale, weight.astype(np.float64) * spread


def experts_inputs(case: ExpertsCase, dtype: str = "bfloat16") -> tuple[tuple[jax.Array, ...], tuple[np.ndarray, ...]]:
    """Return the arguments of `mix_experts` in FP8, and the dequantized gate and up, and down."""
    *given, gate_up, down = case.inputs("float32")
    rng = np.random.default_rng(case.E)
    kept = [rounded(rng, np.asarray(one).swapaxes(1, 2)) for one in (gate_up, down)]
    x, weight, expert = given
    as_array = functools.partial(array, dtype=dtype)
    arrays = *(jnp.asarray(own[0]) for own in kept), *(jnp.asarray(own[1]) for own in kept)
    whole = tuple(own[2].swapaxes(1, 2) for own in kept)
    return (as_array(np.asarray(x)), as_array(np.asarray(weight)), expert, *arrays), whole


def experts_reference(case: ExpertsCase, args: tuple[jax.Array, ...], whole: tuple[np.ndarray, ...]) -> np.ndarray:
    """Compute the mixture in float64."""
    return experts_cases.reference(*args[:3], *whole, first=case.first)


# Fewer inputs than there are stages, and more; programs do several items, or none.
CASES = (
    Float8Case("nine rows", 9, 128, 256),
    Float8Case("one row", 1, 64, 128),
    Float8Case("many rows", 300, 192, 384),
    Float8Case("many inputs", 40, 128, 1536),
)
# Qwen3-VL-8B: q, k, v, and down.
REAL = (Float8Case("64 rows of 8B", 64, 6144, 4096), Float8Case("512 rows of 8B", 512, 4096, 12288))

EXPERTS = (
    ExpertsCase("groups of 0, 1, 3, 9 and 70 rows", sum(experts_cases.GROUPS), 1, 6, 128, 128, groups),
    ExpertsCase("one row", 1, 8, 16, 128, 256, routed),
    ExpertsCase("some rows are not needed", 40, 2, 5, 256, 128, some),
    ExpertsCase("some of the experts", 25, 3, 4, 128, 128, routed, first=3, among=10),
)
REAL_EXPERTS = (
    ExpertsCase("64 rows of 30B", 64, 8, 24, 2048, 768, some),
    ExpertsCase("512 rows of 235B", 512, 4, 8, 4096, 1536, routed),
)
