"""Fragments of products whose left operand is FP8: outputs times inputs, by transposed rows.

The order in which inputs are multiplied does not matter, as long as both operands agree. A thread takes 16 consecutive
inputs, of weights and of rows, for those that `mma.sync` needs from it in four products. It loads 16 bytes at once, and
they lie as in an operand, number by number. jax's interpreter does not model threads and multiplies inputs in their
order.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

from vlcache_jax.pallas_kernels.fragments import BOX, DEPTH, M, held, index, left, right, scalar, sums

RUN = 64  # inputs that are multiplied one after the other: 16 of each thread
OWN = RUN // 4
# Weights [64, RUN] have 16 rows for each warp; rows, transposed [RUN, 8], are in every warp.
LEFT = plgpu.Layout.TILED(
    plgpu.Tiling(((M, RUN), (16, RUN), (8, RUN), (OWN,))), warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1
)
RIGHT = plgpu.Layout.TILED(
    plgpu.Tiling(((RUN, BOX), (OWN, BOX), (8, 1))),
    warp_dims=(plgpu.Replicated(4),),
    lane_dims=(-3, -6),
    vector_dim=-2,
)
FACTORS = LEFT.reduce(1)


def _of_own(count: int) -> Any:
    """Return the layout of data with `count` numbers for each `OWN` of `LEFT`."""
    tiling = plgpu.Tiling(((M, 4 * count), (16, 4 * count), (8, 4 * count), (count,)))
    return mgpu.TiledLayout(tiling, warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1)


_WORDS, _HALF = _of_own(OWN // 4), _of_own(OWN // 2)  # 32-bit words; every second number
_NUMBER = plgpu.Layout.WG_SPLAT  # a scalar argument


def as_left(x: jax.Array, dtype: Any, *, interpreted: bool) -> jax.Array:
    """Return weights `[64, RUN]` in layout `LEFT` as the left operand of `RUN` / 16 products."""
    if interpreted:
        return x

    @plgpu.inline_mgpu(arg_types=(LEFT,), return_type=plgpu.ShapeDtypeStruct((M, RUN), dtype, layout=left(dtype)))
    def convert(ctx: Any, own: Any) -> Any:
        return _in_pairs(own, mgpu.MMALayouts(dtype).lhs, left_pairs())

    converted: jax.Array = convert(x)
    return converted


def as_right(x: jax.Array, dtype: Any, *, interpreted: bool) -> jax.Array:
    """Return rows, transposed `[RUN, 8]`, in layout `RIGHT` as the right operand of as many products."""
    if interpreted:
        return x

    @plgpu.inline_mgpu(arg_types=(RIGHT,), return_type=plgpu.ShapeDtypeStruct((RUN, BOX), dtype, layout=right(dtype)))
    def convert(ctx: Any, own: Any) -> Any:
        return _in_pairs(own, mgpu.MMALayouts(dtype).rhs, right_pairs())

    converted: jax.Array = convert(x)
    return converted


def left_pairs() -> list[tuple[int, int]]:
    """Return, for each register of a left operand, the register of `LEFT` with its two numbers, and their offset.

    A product has these: a row's first pair, that of the row 8 below, and the second pair of both.
    """
    return [(row, 4 * product + 2 * pair) for product in range(RUN // DEPTH) for pair in (0, 1) for row in (0, 1)]


def right_pairs() -> list[tuple[int, int]]:
    """Return the same for a right operand and `RIGHT`, whose registers have 8 numbers."""
    return [divmod(4 * product + 2 * pair, 8) for product in range(RUN // DEPTH) for pair in (0, 1)]


def _in_pairs(own: Any, layout: Any, pairs: list[tuple[int, int]]) -> Any:
    registers = np.empty(len(pairs), dtype=object)
    for i, (register, at) in enumerate(pairs):
        registers[i] = mgpu.utils.vector_slice(own.registers.flat[register], slice(at, at + 2))
    registers = registers.reshape(layout.registers_shape(own.shape))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def to_float16(x: jax.Array, *, native: bool, interpreted: bool) -> jax.Array:
    """Convert float8_e4m3fn weights in layout `LEFT` to float16, which represents all of them.

    Args:
      native: The chip converts them; otherwise they are converted bit by bit.
    """
    if native or interpreted:
        return x.astype(jnp.float16)

    @plgpu.inline_mgpu(
        arg_types=(LEFT,), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.dtype(jnp.float16), layout=LEFT)
    )
    def convert(ctx: Any, own: Any) -> Any:
        i32, f16 = ir.IntegerType.get_signless(32), ir.F16Type.get()
        four = ir.VectorType.get((OWN // 4,), i32)
        words = _with(own, [vector.bitcast(four, register) for register in own.registers.flat], _WORDS, False)
        two = ir.VectorType.get((OWN // 2,), f16)
        parts = [[vector.bitcast(two, register) for register in part.registers.flat] for part in halves(words)]
        even, odd = ((_with(own, part, _HALF, None) * 256.0).registers.flat for part in parts)
        order = [i // 2 + OWN // 2 * (i % 2) for i in range(OWN)]
        return _with(own, [vector.shuffle(*pair, order) for pair in zip(even, odd, strict=True)], own.layout, None)

    converted: jax.Array = convert(x)
    return converted


def _with(own: Any, registers: list[Any], layout: Any, is_signed: bool | None) -> Any:
    """Return as many registers, with other contents."""
    array = np.empty(own.registers.shape, dtype=object)
    array.flat[:] = registers
    return mgpu.FragmentedArray(_registers=array, _layout=layout, _is_signed=is_signed)


def halves(words: Any) -> tuple[Any, Any]:
    """Convert float8_e4m3fn, four in each 32-bit word, to float16, two in each: even numbers, and odd ones.

    Read as a float16, a number's bits have its value times 2^-8. The largest bit pattern is NaN, and becomes NaN.

    Args:
      words: Operands that support the operators of unsigned integers.
    """
    found = []
    for sign, bits in (
        ((words << 8) & 0x80008000, (words & 0x007F007F) << 7),
        (words & 0x80008000, (words & 0x7F007F00) >> 1),
    ):
        found.append(sign | bits | ((bits + 0x00800080) & 0x40004000))
    return found[0], found[1]


def store_turned(x: jax.Array, ref: Any, row: Any, column: Any, dtype: Any, *, interpreted: bool) -> None:
    """Store sums `[64 outputs, 8 rows]`, transposed, at a row and a column of `[R, O]` in device memory.

    Args:
      dtype: Of the operands.
    """
    if interpreted:
        ref[pl.ds(row, BOX), pl.ds(column, M)] = x.T.astype(ref.dtype)
        return

    @plgpu.inline_mgpu(arg_types=(sums(dtype), plgpu.RefType(), _NUMBER, _NUMBER))
    def store(ctx: Any, own: Any, target: Any, first_row: Any, first_column: Any) -> None:
        rounded = own.astype(ir.MemRefType(target.type).element_type)
        outputs, of_octet = held(own.layout, own.shape)
        for output, register in zip(outputs, rounded.registers.flat, strict=True):
            for i in range(2):
                value = vector.extract(register, dynamic_position=[], static_position=[i])
                place = arith.addi(arith.addi(scalar(first_row), of_octet), index(i))
                memref.store(value, target, [place, arith.addi(scalar(first_column), output)])

    store(x, ref, row, column)
