"""The contracts of grouped products, and of the mixture of experts that uses them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from vlcache_jax.pallas_kernels import dispatch
from vlcache_jax.pallas_kernels.grouped_matmul import xla
from vlcache_jax.pallas_kernels.quantized_matmul import check_float8


def grouped_matmul(x: jax.Array, weights: jax.Array, sizes: jax.Array, scale: jax.Array | None = None) -> jax.Array:
    """Multiply each row by the matrix of its group, as `jax.lax.ragged_dot` does; in XLA.

    The number of operations follows the rows, and only matrices of groups that have rows are read. (XLA compiles
    `ragged_dot` on CPUs and GPUs so that every row is multiplied by every matrix.)

    Args:
      x: Rows sorted by group, `[R, K]`.
      weights: One matrix for each group, `[E, K, N]`, of the same dtype; or FP8 (float8_e4m3fn), `[E, N, K]`.
      sizes: Number of rows of each group, int32 `[E]`; rows beyond their sum belong to no group.
      scale: Factors of FP8 weights, float32 `[E, N, B]`, see `float8_matmul`; None if the weights are not FP8.

    Returns:
      `[R, N]` in the dtype of `x`; 0 if a row belongs to no group.

    Raises:
      ValueError: Shapes or dtypes do not match.
    """
    if scale is not None:
        check_float8("weights", weights, scale)
        if x.ndim != 2 or weights.ndim != 3 or weights.shape[2] != x.shape[1]:
            raise ValueError(f"weights must be [E, N, {x.shape[-1]}] in float8_e4m3fn, got {weights.shape}")
    elif x.ndim != 2 or weights.ndim != 3 or weights.shape[1] != x.shape[1] or x.dtype != weights.dtype:
        raise ValueError(f"weights must be [E, {x.shape[-1]}, N] in {x.dtype}, got {weights.shape} in {weights.dtype}")
    if sizes.shape != weights.shape[:1]:
        raise ValueError(f"sizes must be [{len(weights)}], one for each matrix, got {sizes.shape}")
    return xla.grouped_matmul(x, weights, sizes, scale)


def mix_experts(
    x: jax.Array,
    weight: jax.Array,
    expert: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    gate_up_scale: jax.Array | None = None,
    down_scale: jax.Array | None = None,
    *,
    first: int | jax.Array = 0,
    implementation: str | None = None,
) -> jax.Array:
    """Sum weight * down_e(silu(gate_e x) * up_e x) over the experts e that each row has chosen.

    The number of operations follows the choices, and only matrices of chosen experts are read. As in the transformers
    library, products are rounded to the dtype of `x` and added in float32, always in the same order.

    Experts may be distributed over devices, each of which holds consecutive ones. Each device leaves out the results of
    other experts; the float32 sum over the devices is the full result.

    Letters: N rows, `k` choices of each, E experts on this device, M width, F width of an expert.

    Args:
      x: `[N, M]`.
      weight: Weight of each choice, `[N, k]`, in the dtype of `x`.
      expert: Chosen experts, int32 `[N, k]`; a choice of an expert that is not here adds nothing, whatever the row and
        the weight are.
      gate_up: Gate and up side by side, `[E, M, 2F]`, in the dtype of `x`; or FP8 (float8_e4m3fn), `[E, 2F, M]`.
      down: `[E, F, M]` in the dtype of `x`; or FP8, `[E, M, F]`.
      gate_up_scale, down_scale: Factors of FP8 matrices, float32 `[E, 2F, B]` and `[E, M, B']`, see `float8_matmul`.
      first: Number of the first expert on this device.
      implementation: As in `vlcache_jax.pallas_kernels.attention`; the kernel multiplies bfloat16 and float16.

    Returns:
      float32 `[N, M]`.

    Raises:
      ValueError: Shapes or dtypes do not match.
      NotImplementedError: The requested implementation does not support this case.
    """
    if is_float8 := gate_up_scale is not None and down_scale is not None:
        check_float8("gate_up", gate_up, gate_up_scale)
        check_float8("down", down, down_scale)
    _check(x, weight, expert, *(_turned(x, one) if is_float8 else one for one in (gate_up, down)))
    N, E, F, M = len(x), len(down), gate_up.shape[1 if is_float8 else 2] // 2, x.shape[1]

    def check() -> None:
        from vlcache_jax.pallas_kernels.grouped_matmul import mosaic_gpu  # its import takes a second
        from vlcache_jax.pallas_kernels.quantized_matmul import mosaic_gpu as quantized

        dispatch.check_array(implementation, x)
        if is_float8:
            quantized.check(x, gate_up, gate_up_scale, F)
            quantized.check(x, down, down_scale, M)
        else:
            mosaic_gpu.check(x, F)

    bits = " in 8 bits" if is_float8 else ""
    case = f"{N} x {expert.shape[1]} of {E} experts, {x.dtype} {M} x {F}{bits}"
    name, checks = "float8_experts" if is_float8 else "experts", dict.fromkeys(dispatch.FAMILIES, check)
    choice = dispatch.choose(name, case, implementation, checks)
    own = expert - first
    own = jnp.where((own >= 0) & (own < E), own, E)
    if choice.implementation == "xla":
        return xla.mix_experts(x, weight, own, gate_up, down, gate_up_scale, down_scale)
    interpret = dispatch.interpreter(choice)
    programs = None if interpret is None else 3
    from vlcache_jax.pallas_kernels.grouped_matmul import mosaic_gpu, mosaic_gpu_mma

    portable = dispatch.family(choice.implementation) == dispatch.PORTABLE
    if gate_up_scale is not None and down_scale is not None:
        mix = mosaic_gpu_mma.mix_float8_experts if portable else mosaic_gpu.mix_float8_experts
        stacks = gate_up, down, gate_up_scale, down_scale
        return mix(x, weight, own, *stacks, programs=programs, interpret=interpret)
    if portable:
        config = mosaic_gpu_mma.default_config(programs=programs)
        return mosaic_gpu_mma.mix_experts(x, weight, own, gate_up, down, config=config, interpret=interpret)
    of_hopper = mosaic_gpu.default_config(expert.size, E, programs)
    return mosaic_gpu.mix_experts(x, weight, own, gate_up, down, config=of_hopper, interpret=interpret)


def _turned(x: jax.Array, matrices: jax.Array) -> jax.ShapeDtypeStruct:
    """Return the shape of the dequantized `[E, in, out]` matrices of FP8 matrices `[E, out, in]`."""
    count, outputs, inputs = matrices.shape
    return jax.ShapeDtypeStruct((count, inputs, outputs), x.dtype)


def _check(x: jax.Array, weight: jax.Array, expert: jax.Array, gate_up: Any, down: Any) -> None:
    if x.ndim != 2 or down.ndim != 3 or down.shape[2] != x.shape[1] or down.dtype != x.dtype:
        raise ValueError(f"down must be [E, F, {x.shape[-1]}] in {x.dtype}, got {down.shape} in {down.dtype}")
    E, F, M = down.shape
    if gate_up.shape != (E, M, 2 * F) or gate_up.dtype != x.dtype:
        raise ValueError(f"gate_up must be {[E, M, 2 * F]} in {x.dtype}, got {list(gate_up.shape)} in {gate_up.dtype}")
    if expert.ndim != 2 or len(expert) != len(x) or expert.dtype != jnp.int32:
        raise ValueError(f"expert must be int32 [{len(x)}, k], got {expert.dtype} {list(expert.shape)}")
    if weight.shape != expert.shape or weight.dtype != x.dtype:
        raise ValueError(
            f"weight must be {list(expert.shape)} in {x.dtype}, got {list(weight.shape)} in {weight.dtype}"
        )
