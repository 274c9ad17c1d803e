"""The contract of products with a matrix that is kept in 8 bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from vlcache_jax.pallas_kernels import dispatch
from vlcache_jax.pallas_kernels.quantized_matmul import xla


def float8_matmul(x: jax.Array, weight: jax.Array, scale: jax.Array, *, implementation: str | None = None) -> jax.Array:
    """Multiplies rows by a matrix in 8 bits, of which no more than a tile is dequantised at once, on a CPU the whole.

    A weight is its 8 bits times its factor, rounded to the dtype of `x`.

    Letters: N rows, K inputs, O outputs, B groups of K / B inputs that follow each other.

    Args:
      x: [N, K], float32, bfloat16 or float16.
      weight: float8_e4m3fn [O, K].
      scale: the factors of each output's groups, float32 [O, B].
      implementation: as in `vlcache_jax.pallas_kernels.attention`; the kernel multiplies bfloat16 and float16.

    Returns:
      [N, O] in the dtype of `x`.

    Raises:
      ValueError: shapes or dtypes that do not go together.
      NotImplementedError: the implementation asked for does not do this case.
    """
    if x.ndim != 2 or weight.ndim != 2 or weight.shape[1] != x.shape[1]:
        raise ValueError(f"weight must be [O, {x.shape[-1]}], got {list(weight.shape)}")
    check_float8("weight", weight, scale)

    def check() -> None:
        from vlcache_jax.pallas_kernels.quantized_matmul import mosaic_gpu  # takes a second to import

        dispatch.check_array(implementation, x)
        mosaic_gpu.check(x, weight, scale, len(weight))

    (outputs, inputs), groups = weight.shape, scale.shape[1]
    case = f"{len(x)} rows, {x.dtype} {inputs} in {groups} groups x {outputs} in 8 bits"
    choice = dispatch.choose("float8_matmul", case, implementation, dict.fromkeys(dispatch.FAMILIES, check))
    if choice.implementation == "xla":
        return xla.float8_matmul(x, weight, scale)
    from vlcache_jax.pallas_kernels.quantized_matmul import mosaic_gpu, mosaic_gpu_mma

    interpret = dispatch.interpreter(choice)
    programs = None if interpret is None else 3
    if dispatch.family(choice.implementation) == dispatch.PORTABLE:
        portable = mosaic_gpu_mma.default_config(len(x), outputs, inputs, programs=programs)
        return mosaic_gpu_mma.float8_matmul(x, weight, scale, config=portable, interpret=interpret)
    config = mosaic_gpu.default_config(len(x), outputs, programs=programs)
    return mosaic_gpu.float8_matmul(x, weight, scale, config=config, interpret=interpret)


def check_float8(name: str, weight: jax.Array, scale: jax.Array) -> None:
    """Sees that a matrix, or a stack of them, [..., O, K], and its factors [..., O, B] go together.

    Raises:
      ValueError: they do not; it names `name`.
    """
    if weight.dtype != jnp.float8_e4m3fn:
        raise ValueError(f"{name} must be float8_e4m3fn beside its factors, got {weight.dtype}")
    *outputs, inputs = weight.shape
    if scale.dtype != jnp.float32 or list(scale.shape[:-1]) != outputs or inputs % scale.shape[-1]:
        raise ValueError(
            f"factors of {name} must be float32 {outputs} x groups that share {inputs} inputs, "
            f"got {scale.dtype} {list(scale.shape)}"
        )
