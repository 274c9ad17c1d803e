"""The contract of products with an FP8 matrix."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from vlcache_jax.pallas_kernels import dispatch
from vlcache_jax.pallas_kernels.quantized_matmul import xla


def float8_matmul(x: jax.Array, weight: jax.Array, scale: jax.Array, *, implementation: str | None = None) -> jax.Array:
    """Multiply rows by an FP8 matrix. A tile of it is dequantized at a time, on a CPU the whole matrix.

    A weight is its FP8 code times its factor, rounded to the dtype of `x`.

    Letters: N rows, K inputs, O outputs, B groups of K / B consecutive inputs.

    Args:
      x: `[N, K]`, float32, bfloat16 or float16.
      weight: float8_e4m3fn `[O, K]`.
      scale: Factors of each output's groups, float32 `[O, B]`.
      implementation: As in `vlcache_jax.pallas_kernels.attention`; the kernel multiplies bfloat16 and float16.

    Returns:
      `[N, O]` in the dtype of `x`.

    Raises:
      ValueError: Shapes or dtypes do not match.
      NotImplementedError: The requested implementation does not support this case.
    """
    if x.ndim != 2 or weight.ndim != 2 or weight.shape[1] != x.shape[1]:
        raise ValueError(f"weight must be [O, {x.shape[-1]}], got {list(weight.shape)}")
    check_float8("weight", weight, scale)

    def check() -> None:
        from vlcache_jax.pallas_kernels.quantized_matmul import mosaic_gpu  # its import takes a second

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
    """Check that a matrix, or a stack of them, `[..., O, K]`, and its factors `[..., O, B]` match.

    Raises:
      ValueError: They do not; the message names `name`.
    """
    if weight.dtype != jnp.float8_e4m3fn:
        raise ValueError(f"{name} must be float8_e4m3fn if it has factors, got {weight.dtype}")
    *outputs, inputs = weight.shape
    if scale.dtype != jnp.float32 or list(scale.shape[:-1]) != outputs or inputs % scale.shape[-1]:
        raise ValueError(
            f"factors of {name} must be float32 of shape {outputs} x groups, a number that divides {inputs} inputs, "
            f"got {scale.dtype} {list(scale.shape)}"
        )
