"""Small modules that all families share, with the library's roundings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from vlcache_jax.models.config import matmul_precision
from vlcache_jax.models.quantization import FLOAT8, SCALE, Quantization
from vlcache_jax.pallas_kernels import adds_partials, float8_matmul, norm_residual, rms_norm, split

CHUNK = 512  # rows of an MLP that a CPU computes at once
FEW = 64  # largest number of rows of a split product
SPLIT_K = 4  # parts of a split product


class RMSNorm(nnx.Module):
    """An RMS norm in float32, rounded *before* the product with the weight, as in the library (flax: after).

    With `offset`, the weight w is stored around 0, and the norm multiplies by 1 + w in float32 and rounds once.
    """

    def __init__(self, width: int, eps: float, *, offset: bool = False, dtype: Any):
        self.scale = nnx.Param(jnp.ones((width,), dtype))
        self.eps, self.offset = eps, offset

    @property
    def factor(self) -> jax.Array:
        """The weight that normed rows are multiplied by, float32 [M]."""
        return self.scale[...].astype(jnp.float32) + self.offset

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.scale[...], self.eps, self.offset)

    def added(
        self, x: jax.Array, delta: jax.Array | None = None, *, implementation: str | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Return (x + delta, its norm) of rows [N, M]. See `norm_residual` for `delta`."""
        return norm_residual(x, delta, self.scale[...], eps=self.eps, offset=self.offset, implementation=implementation)


def linear(in_features: int, out_features: int, *, bias: bool, dtype: Any, rngs: nnx.Rngs) -> nnx.Linear:
    """Create a dense layer with a kernel [in, out] of zeros.

    Weights come from a checkpoint. Random ones would take time even if only their shapes are needed.
    """
    return nnx.Linear(
        in_features,
        out_features,
        use_bias=bias,
        dtype=dtype,
        param_dtype=dtype,
        precision=matmul_precision(dtype),
        kernel_init=nnx.initializers.zeros_init(),
        dot_general=product,
        rngs=rngs,
    )


def product(x: jax.Array, kernel: jax.Array, *args: Any, **options: Any) -> jax.Array:
    """Compute `lax.dot_general` of rows x. On GPUs, a single row is computed twice, and one result is dropped.

    XLA for GPUs treats one row as a vector. For matrices of fewer than ten million values, it multiplies, rounds and
    writes the products, and then sums them. Two equal rows avoid this at no cost.
    """

    def twice(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return lax.dot_general(_at_least_two(x), kernel, *args, **options)[:1]

    def once(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return lax.dot_general(x, kernel, *args, **options)

    if len(x) != 1:
        return once(x, kernel)
    return lax.platform_dependent(x, kernel, cpu=once, default=twice)


def _at_least_two(x: jax.Array) -> jax.Array:
    """Return rows [N, M], or a single row twice."""
    return jnp.broadcast_to(x, (2, *x.shape[1:])) if len(x) == 1 else x


class JoinedLinear(nnx.Module):
    """Dense layers with the same input as one product, with matrices side by side: [in, ..., layers, out].

    Args:
      width: number of inputs.
      shape: shape of a row's outputs, (..., layers, out).
    """

    def __init__(self, width: int, shape: tuple[int, ...], *, bias: bool, dtype: Any):
        self.kernel = nnx.Param(jnp.zeros((width, *shape), dtype))
        self.bias = nnx.Param(jnp.zeros(shape, dtype)) if bias else None

    def __call__(self, x: jax.Array, first: int = 0) -> jax.Array:
        """Apply the layers from `first` on, [N, in] -> [N, ..., layers, out]."""
        kernel = self.kernel[...][..., first:, :]
        rows = (((1,), (0,)), ((), ()))  # not flattened, so that sharded columns stay on their devices
        made = product(x.astype(kernel.dtype), kernel, rows, precision=matmul_precision(kernel.dtype))
        return made if self.bias is None else made + self.bias[...][..., first:, :]


class Float8Linear(nnx.Module):
    """Dense layers whose matrices stay in FP8, [..., layers, out, in] or [out, in].

    They have a scale for each output and group of inputs. The product is partitioned explicitly over devices, because
    the compiler would gather the dequantized tiles.

    Args:
      width: number of inputs.
      shape: shape of a row's outputs, (..., layers, out) or (out,).
      spread: sharded axis of the matrices. If it is the last one, the inputs', devices sum their results.
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
        """Apply the layers from `first` on, [N, in] -> [N, ..., layers, out]."""
        cut = (..., slice(first, None), slice(None), slice(None)) if len(self.shape) > 1 else ...
        by_input = self.spread == len(self.shape)
        adds = by_input and split.is_spread()

        def made(x: jax.Array, weight: jax.Array, scale: jax.Array) -> jax.Array:
            *shape, width = weight.shape
            whole = weight.reshape(-1, width), scale.reshape(-1, scale.shape[-1])
            y = float8_matmul(x, *whole, implementation=implementation).reshape(-1, *shape)
            return lax.psum(y, split.AXIS) if adds else y

        spec = PartitionSpec(*[None] * self.spread, split.AXIS)
        takes = split.SECOND if by_input else split.WHOLE, spec, spec
        gives = split.WHOLE if by_input else PartitionSpec(None, *spec)
        y = split.spread(made, takes, gives)(x, self.weight[...][cut], self.weight_scale[...][cut])
        return y if self.bias is None else y + self.bias[...][..., first:, :]


class ApartLinear(nnx.Module):
    """Dense layers with the same input of which some are in FP8, as products of their own with one result.

    Args:
      name: name of the product, one of `JOINED`.
      kept: storage of each matrix in FP8, or None.
      options: arguments of `Float8Linear`.
    """

    def __init__(
        self, name: str, width: int, shape: tuple[int, ...], kept: Sequence[Quantization | None], **options: Any
    ):
        *lead, count, out = shape
        self.places = tuple(layers_of(name, count).items())
        for (own, (first, last)), one in zip(self.places, kept, strict=True):
            setattr(self, own, joined(own, width, (*lead, last - first, out), (one,), **options))

    @property
    def bias(self) -> jax.Array | None:
        """Biases of all layers, [..., layers, out], or None."""
        found = [getattr(self, name).bias for name, _ in self.places]
        return None if found[0] is None else jnp.concatenate([one[...] for one in found], -2)

    def __call__(self, x: jax.Array, first: int = 0, implementation: str | None = None) -> jax.Array:
        """Apply the layers from `first` on, [N, in] -> [N, ..., layers, out]."""
        begin = first % self.places[-1][1][1]
        made = [
            times(getattr(self, name), x, implementation, first=max(begin - own, 0))
            for name, (own, last) in self.places
            if last > begin
        ]
        return jnp.concatenate(made, -2)


JOINED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qk": ("in_proj_q", "in_proj_k"),
    "in_proj_vz": ("in_proj_v", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
"""The library's layers of each joined product, along the axis before the last."""


def layers_of(product: str, count: int) -> dict[str, tuple[int, int]]:
    """Return the first and last + 1 entry of each layer of a joined product with `count` entries."""
    names = JOINED[product]
    # Queries have the rest of their axis. The layers of other products have equal parts.
    each = 1 if product == "qkv_proj" else count // len(names)
    ends = range(count - each * (len(names) - 1), count + 1, each)
    return dict(zip(names, zip((0, *ends), ends, strict=False), strict=True))


def times(
    layer: nnx.Linear | JoinedLinear | Float8Linear | ApartLinear,
    x: jax.Array,
    implementation: str | None = None,
    **options: int,
) -> jax.Array:
    """Apply a dense layer to rows. FP8 matrices use a kernel, of the given implementation."""
    if isinstance(layer, Float8Linear | ApartLinear):
        return layer(x, implementation=implementation, **options)
    return layer(x, **options)


def split_product(
    layer: nnx.Linear | Float8Linear, x: jax.Array, implementation: str | None = None, *, like: jax.Array
) -> jax.Array:
    """Apply a dense layer to rows [N, in], with a result for `RMSNorm.added` of rows like `like`.

    For few rows the result is partial sums over the inputs, [SPLIT_K, rows, out] in float32, if a kernel can sum them.
    XLA for GPUs splits the inputs of few rows in any case, to use more of the GPU's processors, and sums in a kernel of
    its own.
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
    name: str,
    width: int,
    shape: tuple[int, ...],
    kept: Sequence[Quantization | None],
    *,
    spread: int,
    bias: bool,
    dtype: Any,
) -> JoinedLinear | Float8Linear | ApartLinear:
    """Create dense layers with the same input as one product, or as several if only some of them are in FP8.

    Args:
      kept: storage of each matrix in FP8, or None. For other arguments see `Float8Linear` and `ApartLinear`.
    """
    if len(set(kept)) > 1:
        return ApartLinear(name, width, shape, kept, spread=spread, bias=bias, dtype=dtype)
    if (quantization := kept[0]) is None:
        return JoinedLinear(width, shape, bias=bias, dtype=dtype)
    return Float8Linear(width, shape, quantization, spread=spread, bias=bias, dtype=dtype)


def leading_back(
    width: int, out: int, quantization: Quantization | None, *, bias: bool, dtype: Any, rngs: nnx.Rngs
) -> nnx.Linear | Float8Linear:
    """Create a dense layer whose inputs are sharded over devices, in FP8 with `quantization`."""
    if quantization is None:
        return linear(width, out, bias=bias, dtype=dtype, rngs=rngs)
    return Float8Linear(width, (out,), quantization, spread=1, bias=bias, dtype=dtype)


def layer_norm(width: int, *, dtype: Any, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """Create a layer norm in float32 that rounds once at the end, with the eps of the vision towers."""
    return nnx.LayerNorm(width, epsilon=1e-6, use_fast_variance=False, dtype=dtype, param_dtype=dtype, rngs=rngs)


def by_chunks(rowwise: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Apply a row-wise function to x, [N, M] -> [N, M'].

    A CPU computes many rows chunk by chunk, so that values between the products of an MLP stay in its cache. All chunks
    are full, so results are identical to the last bit.
    """
    if len(x) <= CHUNK or len(x) % CHUNK:
        return rowwise(x)

    def in_turn(x: jax.Array) -> jax.Array:
        return lax.map(rowwise, x.reshape(-1, CHUNK, x.shape[1])).reshape(len(x), -1)

    return lax.platform_dependent(x, cpu=in_turn, default=rowwise)


class GatedMLP(nnx.Module):
    """The MLP down(silu(gate(x)) * up(x)). `kept` is the storage of gate and of up in FP8, `back` that of down."""

    def __init__(
        self,
        width: int,
        hidden: int,
        kept: Sequence[Quantization | None] = (None, None),
        back: Quantization | None = None,
        *,
        bias: bool,
        dtype: Any,
        rngs: nnx.Rngs,
    ):
        self.gate_up_proj = joined("gate_up_proj", width, (2, hidden), kept, spread=1, bias=bias, dtype=dtype)
        self.down_proj = leading_back(hidden, width, back, bias=bias, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, implementation: str | None = None) -> jax.Array:
        return by_chunks(functools.partial(self._rows, implementation=implementation), x)

    def _rows(self, x: jax.Array, implementation: str | None) -> jax.Array:
        made = times(self.gate_up_proj, x, implementation)
        return times(self.down_proj, jax.nn.silu(made[:, 0]) * made[:, 1], implementation)


class Table(nnx.Module):
    """A matrix with a row per vocabulary id, [V, M]: token embeddings or the output head.

    It is partitioned explicitly over devices, because the compiler would gather the full matrix for a few rows.
    """

    def __init__(self, rows: int, width: int, *, dtype: Any):
        self.embedding = nnx.Param(jnp.zeros((rows, width), dtype))

    def __call__(self, index: jax.Array) -> jax.Array:
        """Return the rows of `index`, [N] -> [N, M]."""

        def added(rows: jax.Array, index: jax.Array) -> jax.Array:
            """Sum over devices. Each has some rows of the matrix, and 0 for the others."""
            place = index - len(rows) * jax.lax.axis_index(split.AXIS)
            is_own = (place >= 0) & (place < len(rows))
            return jax.lax.psum(jnp.where(is_own[:, None], rows[jnp.where(is_own, place, 0)], 0), split.AXIS)

        if split.is_spread():
            return split.spread(added, (split.FIRST, split.WHOLE), split.WHOLE)(self.embedding[...], index)
        return self.embedding[...][index]

    def scores(self, x: jax.Array) -> jax.Array:
        """Return the products with all rows of the matrix in float32, [N, M] -> [N, V]."""
        # The table is the left operand: for one row this is five times faster on a CPU than x @ table.T.
        multiply = functools.partial(
            jnp.einsum, "vm,nm->vn", precision=matmul_precision(x.dtype), preferred_element_type=jnp.float32
        )

        def gathered(rows: jax.Array, x: jax.Array) -> jax.Array:
            """Gather the products of all devices. Each has some rows of the matrix."""
            return jax.lax.all_gather(multiply(rows, x), split.AXIS, tiled=True)

        product = split.spread(gathered, (split.FIRST, split.WHOLE), split.WHOLE) if split.is_spread() else multiply
        return product(self.embedding[...], x).T
