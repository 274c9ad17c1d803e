"""Small modules that the families share exactly, with the library's roundings."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from vlcache_jax.models.config import FLOAT8, SCALE, Quantization, matmul_precision
from vlcache_jax.pallas_kernels import adds_partials, float8_matmul, norm_residual, rms_norm, split

CHUNK = 512  # rows that a CPU takes through an MLP at once
FEW = 64  # rows of a product that is split at most
SPLIT_K = 4


class RMSNorm(nnx.Module):
    """Normalises in float32 and rounds *before* it multiplies by the weight, as the library does (flax: after)."""

    def __init__(self, width: int, eps: float, *, dtype: Any):
        self.scale = nnx.Param(jnp.ones((width,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.scale[...], self.eps)

    def added(
        self, x: jax.Array, delta: jax.Array | None = None, *, implementation: str | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Of rows [N, M] (x + delta, what is normalised of it); `delta` as of `norm_residual`."""
        return norm_residual(x, delta, self.scale[...], eps=self.eps, implementation=implementation)


def linear(in_features: int, out_features: int, *, bias: bool, dtype: Any, rngs: nnx.Rngs) -> nnx.Linear:
    """A dense layer with its kernel as [in, out]."""
    return nnx.Linear(
        in_features,
        out_features,
        use_bias=bias,
        dtype=dtype,
        param_dtype=dtype,
        precision=matmul_precision(dtype),
        dot_general=product,
        rngs=rngs,
    )


def product(x: jax.Array, kernel: jax.Array, *args: Any, **options: Any) -> jax.Array:
    """`lax.dot_general` of rows x; except on a CPU a single row is computed twice, and one dropped.

    XLA for GPUs takes one row for a vector. Of its product with a matrix of fewer than ten million values it makes
    multiplications, whose results it rounds and writes, and a sum. Two rows that are the same cost nothing more.
    """

    def twice(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return lax.dot_general(_at_least_two(x), kernel, *args, **options)[:1]

    def once(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return lax.dot_general(x, kernel, *args, **options)

    if len(x) != 1:
        return once(x, kernel)
    return lax.platform_dependent(x, kernel, cpu=once, default=twice)


def _at_least_two(x: jax.Array) -> jax.Array:
    """Rows [N, M], a single one twice."""
    return jnp.broadcast_to(x, (2, *x.shape[1:])) if len(x) == 1 else x


class JoinedLinear(nnx.Module):
    """Dense layers of the same rows as one product, their matrices side by side: [in, ..., layers, out].

    Args:
      width: in.
      shape: (..., layers, out) of what comes out; the axis before the last tells the layers apart.
    """

    def __init__(self, width: int, shape: tuple[int, ...], *, bias: bool, dtype: Any):
        self.kernel = nnx.Param(jnp.zeros((width, *shape), dtype))
        self.bias = nnx.Param(jnp.zeros(shape, dtype)) if bias else None

    def __call__(self, x: jax.Array, first: int = 0) -> jax.Array:
        """Of the layers from `first` on: [N, in] -> [N, ..., layers, out]."""
        kernel = self.kernel[...][..., first:, :]
        rows = (((1,), (0,)), ((), ()))  # not flat: columns that devices share out stay theirs
        made = product(x.astype(kernel.dtype), kernel, rows, precision=matmul_precision(kernel.dtype))
        return made if self.bias is None else made + self.bias[...][..., first:, :]


class Float8Linear(nnx.Module):
    """Dense layers whose matrices stay in 8 bits, as they are stored: [..., layers, out, in] or [out, in], with a
    factor for each output and group of inputs.

    Several devices say themselves how they share it: left to the compiler, what is made of a tile would be gathered.

    Args:
      width: in.
      shape: of what comes out: (..., layers, out), or (out,).
      spread: the axis of the matrices that devices share out; the last one is that of the inputs, over which they add
        up what each of them makes.
    """

    def __init__(
        self, width: int, shape: tuple[int, ...], quantization: Quantization, *, spread: int, bias: bool, dtype: Any
    ):
        groups = width // quantization.group(width)
        self.weight = nnx.Param(jnp.zeros((*shape, width), FLOAT8))
        self.weight_scale = nnx.Param(jnp.ones((*shape, groups), SCALE))
        self.bias = nnx.Param(jnp.zeros(shape, dtype)) if bias else None
        self.shape, self.spread = shape, spread

    def __call__(self, x: jax.Array, first: int = 0, implementation: str | None = None) -> jax.Array:
        """Of the layers from `first` on: [N, in] -> [N, ..., layers, out]."""
        cut = (..., slice(first, None), slice(None), slice(None)) if len(self.shape) > 1 else ...
        by_input = self.spread == len(self.shape)
        adds = by_input and split.is_spread()

        def made(x: jax.Array, weight: jax.Array, scale: jax.Array) -> jax.Array:
            *shape, width = weight.shape
            whole = weight.reshape(-1, width), scale.reshape(-1, scale.shape[-1])
            y = float8_matmul(x, *whole, implementation=implementation).reshape(-1, *shape)
            return lax.psum(y, split.AXIS) if adds else y

        lies = PartitionSpec(*[None] * self.spread, split.AXIS)
        takes = split.SECOND if by_input else split.WHOLE, lies, lies
        gives = split.WHOLE if by_input else PartitionSpec(None, *lies)
        y = split.spread(made, takes, gives)(x, self.weight[...][cut], self.weight_scale[...][cut])
        return y if self.bias is None else y + self.bias[...][..., first:, :]


def times(
    layer: nnx.Linear | JoinedLinear | Float8Linear, x: jax.Array, implementation: str | None = None, **options: int
) -> jax.Array:
    """What a dense layer makes of rows; matrices in 8 bits have kernels."""
    if isinstance(layer, Float8Linear):
        return layer(x, implementation=implementation, **options)
    return layer(x, **options)


def split_product(
    layer: nnx.Linear | Float8Linear, x: jax.Array, implementation: str | None = None, *, like: jax.Array
) -> jax.Array:
    """What a dense layer makes of rows [N, in], for `RMSNorm.added` of rows like `like`: where a kernel adds them up,
    that of few rows is partial sums over the inputs.

    XLA for GPUs splits the inputs of few rows in any case, as they are else computed by too few of a GPU's processors,
    and adds up in a kernel of its own.
    """
    inputs = x.shape[1]
    is_few = 0 < len(x) <= FEW and inputs % SPLIT_K == 0
    if isinstance(layer, Float8Linear) or layer.bias is not None or split.is_spread() or not is_few:
        return times(layer, x, implementation)
    if not adds_partials(like, implementation):
        return times(layer, x, implementation)
    kernel = layer.kernel[...]
    parts = SPLIT_K, inputs // SPLIT_K
    return lax.dot_general(
        _at_least_two(x.astype(kernel.dtype)).reshape(-1, *parts),
        kernel.reshape(*parts, -1),
        (((2,), (1,)), ((1,), (0,))),
        preferred_element_type=jnp.float32,
    )


def joined(
    width: int,
    shape: tuple[int, ...],
    quantization: Quantization | None,
    *,
    spread: int,
    bias: bool,
    dtype: Any,
) -> JoinedLinear | Float8Linear:
    """Dense layers as one product, with their matrices in 8 bits if those of the model are; see the two."""
    if quantization is None:
        return JoinedLinear(width, shape, bias=bias, dtype=dtype)
    return Float8Linear(width, shape, quantization, spread=spread, bias=bias, dtype=dtype)


def leading_back(
    width: int, out: int, quantization: Quantization | None, *, bias: bool, dtype: Any, rngs: nnx.Rngs
) -> nnx.Linear | Float8Linear:
    """A dense layer whose inputs devices share out, with its matrix in 8 bits if those of the model are."""
    if quantization is None:
        return linear(width, out, bias=bias, dtype=dtype, rngs=rngs)
    return Float8Linear(width, (out,), quantization, spread=1, bias=bias, dtype=dtype)


def layer_norm(width: int, *, dtype: Any, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """Statistics and affine in float32, one rounding at the end. The vision tower's eps is constant."""
    return nnx.LayerNorm(width, epsilon=1e-6, use_fast_variance=False, dtype=dtype, param_dtype=dtype, rngs=rngs)


def by_chunks(rowwise: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """What a function of each row makes of x, [N, M] -> [N, M'].

    A CPU takes many rows chunk by chunk: what an MLP has between its products then stays in the cache. All chunks are
    full, so that results are the same to the last bit.
    """
    if len(x) <= CHUNK or len(x) % CHUNK:
        return rowwise(x)

    def in_turn(x: jax.Array) -> jax.Array:
        return lax.map(rowwise, x.reshape(-1, CHUNK, x.shape[1])).reshape(len(x), -1)

    return lax.platform_dependent(x, cpu=in_turn, default=rowwise)


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x)); `back` is the quantization of down."""

    def __init__(
        self,
        width: int,
        hidden: int,
        quantization: Quantization | None = None,
        back: Quantization | None = None,
        *,
        bias: bool,
        dtype: Any,
        rngs: nnx.Rngs,
    ):
        self.gate_up_proj = joined(width, (2, hidden), quantization, spread=1, bias=bias, dtype=dtype)
        self.down_proj = leading_back(hidden, width, back, bias=bias, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, implementation: str | None = None) -> jax.Array:
        return by_chunks(functools.partial(self._rows, implementation=implementation), x)

    def _rows(self, x: jax.Array, implementation: str | None) -> jax.Array:
        made = times(self.gate_up_proj, x, implementation)
        return times(self.down_proj, jax.nn.silu(made[:, 0]) * made[:, 1], implementation)


class Table(nnx.Module):
    """A matrix whose rows belong to vocabulary ids: token embeddings and the output head, [V, M].

    Several devices say themselves how they share it: left to the compiler, few rows would gather the whole matrix.
    """

    def __init__(self, rows: int, width: int, *, dtype: Any):
        self.embedding = nnx.Param(jnp.zeros((rows, width), dtype))

    def __call__(self, index: jax.Array) -> jax.Array:
        """The rows of `index`: [N] -> [N, M]."""

        def added(rows: jax.Array, index: jax.Array) -> jax.Array:
            """Of several devices each has some rows, and 0 for the others."""
            place = index - len(rows) * jax.lax.axis_index(split.AXIS)
            is_own = (place >= 0) & (place < len(rows))
            return jax.lax.psum(jnp.where(is_own[:, None], rows[jnp.where(is_own, place, 0)], 0), split.AXIS)

        if split.is_spread():
            return split.spread(added, (split.FIRST, split.WHOLE), split.WHOLE)(self.embedding[...], index)
        return self.embedding[...][index]

    def scores(self, x: jax.Array) -> jax.Array:
        """Products with every row in float32: [N, M] -> [N, V]."""
        # The table is the left operand: for one row this is five times faster on a CPU than x @ table.T.
        multiply = functools.partial(
            jnp.einsum, "vm,nm->vn", precision=matmul_precision(x.dtype), preferred_element_type=jnp.float32
        )

        def gathered(rows: jax.Array, x: jax.Array) -> jax.Array:
            """Of several devices each has some rows."""
            return jax.lax.all_gather(multiply(rows, x), split.AXIS, tiled=True)

        product = split.spread(gathered, (split.FIRST, split.WHOLE), split.WHOLE) if split.is_spread() else multiply
        return product(self.embedding[...], x).T
