"""Building blocks of the kernels for every NVIDIA GPU since Ampere: pieces of matrices that a warpgroup's threads hold.

A warp multiplies 16 x 16 by 16 x 8 numbers at once (`mma.sync.m16n8k16`). Each thread holds some of them in its
registers: its fragments. The four warps of a program have 16 rows each of the left operand and of the sums, and all
columns.

The sums of two products lie as a left operand does, thread by thread, so computed weights stay where they are. Mosaic
GPU does not know that; `as_left` expresses it in Mosaic's terms. *Boxes*, eight rows of one query head (see
`attention.mosaic_gpu`), lie apart in device memory. Fragments are loaded from them and stored to them. jax's
interpreter supports neither fragments nor `plgpu.mma`; the code that it runs instead stands next to each use.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

M = 64  # rows that a warpgroup multiplies
BOX = 8
EIGHT = M // BOX
DEPTH = 16  # depth of a product

_NUMBER = plgpu.Layout.WG_SPLAT  # a scalar argument


def left(dtype: Any) -> Any:
    """Return the layout of a left operand."""
    return plgpu.Layout.MMA_LHS(dtype)


def right(dtype: Any) -> Any:
    """Return the layout of a right operand."""
    return plgpu.Layout.MMA_RHS(dtype)


def sums(dtype: Any) -> Any:
    """Return the layout of the sums of products of operands of this dtype."""
    return plgpu.Layout.MMA_ACC(dtype)


def multiply(acc: jax.Array, a: jax.Array, b: jax.Array, *, interpreted: bool) -> jax.Array:
    """Return acc + a @ b in float32.

    If `interpreted`, sum in blocks of `DEPTH` columns of `a`, as tensor cores do.
    """
    if not interpreted:
        return plgpu.mma(acc, a, b)
    for at in range(0, a.shape[1], DEPTH):
        part = slice(at, at + DEPTH)
        acc = acc + jnp.dot(a[:, part].astype(jnp.float32), b[part].astype(jnp.float32), precision="highest")
    return acc


def as_left(x: jax.Array, dtype: Any, *, interpreted: bool) -> jax.Array:
    """Return sums, rounded, as a left operand; no number leaves its thread."""
    if interpreted:
        return x.astype(dtype)

    result = plgpu.ShapeDtypeStruct(x.shape, dtype, layout=left(dtype))

    @plgpu.inline_mgpu(arg_types=(sums(dtype),), return_type=result)
    def convert(ctx: Any, own: Any) -> Any:
        layout = mgpu.MMALayouts(dtype).lhs
        rounded = own.astype(mgpu.utils.dtype_to_ir_type(dtype))
        registers = left_registers(rounded.registers, layout.registers_shape(x.shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    converted: jax.Array = convert(x)
    return converted


def left_registers(registers: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return registers of sums in the order of a left operand.

    Of sums, a thread has two registers for each 8 columns, of rows that are 8 apart. Of a left operand, it has four for
    each 16 columns: for the first 8 of these columns those two rows, then for the others.
    """
    return registers.reshape(-1).reshape(shape)


def load_boxes(
    ref: Any, box0: Any, head: Any, group: int, last: int, width: int, dtype: Any, *, interpreted: bool
) -> jax.Array:
    """Load a left operand: the rows of eight boxes, numbered octet by octet, then query head by query head.

    Args:
      ref: `[R, H, width]` in device memory, R a multiple of 8.
      box0: The first box.
      head: Which `group` of query heads.
      last: Number of octets of `ref`, minus one; boxes beyond the last octet are read from it.
    """
    if interpreted:
        boxes = [_box(box0 + i, head, group) for i in range(EIGHT)]
        return jnp.concatenate([ref[pl.ds(lax.min(o, jnp.int32(last)) * BOX, BOX), h] for o, h in boxes])

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), _NUMBER, _NUMBER),
        return_type=plgpu.ShapeDtypeStruct((M, width), dtype, layout=left(dtype)),
    )
    def load(ctx: Any, source: Any, first: Any, heads: Any) -> Any:
        layout = mgpu.MMALayouts(dtype).lhs
        shape = layout.registers_shape((M, width))
        two = ir.VectorType.get((2,), mgpu.utils.dtype_to_ir_type(dtype))
        rows, column = held(layout, (M, width))
        places = [_place(row, first, heads, group, last) for row in rows]
        registers = np.empty(math.prod(shape), dtype=object)
        for i in range(len(registers)):
            own = arith.addi(column, index(columns_before(i)))
            registers[i] = vector.load(two, source, [*places[i % 2], own])
        return mgpu.FragmentedArray(_registers=registers.reshape(shape), _layout=layout, _is_signed=None)

    loaded: jax.Array = load(ref, box0, head)
    return loaded


def store_boxes(
    x: jax.Array, ref: Any, box0: Any, boxes: Any, head: Any, group: int, dtype: Any, *, interpreted: bool
) -> None:
    """Store the rows of the first `boxes` of eight boxes of sums, rounded to the dtype of `ref`, as its first columns.

    Boxes are numbered as in `load_boxes`; `dtype` is that of the operands.
    """
    width = x.shape[1]
    if interpreted:
        for i in range(EIGHT):
            octet, own = _box(box0 + i, head, group)

            def write(i: int = i, octet: Any = octet, own: Any = own) -> None:
                ref[pl.ds(octet * BOX, BOX), own, pl.ds(0, width)] = x[i * BOX : (i + 1) * BOX].astype(dtype)

            pl.when(i < boxes)(write)
        return

    @plgpu.inline_mgpu(arg_types=(sums(dtype), plgpu.RefType(), _NUMBER, _NUMBER, _NUMBER))
    def store(ctx: Any, own: Any, target: Any, first: Any, count: Any, heads: Any) -> None:
        rounded = own.astype(mgpu.utils.dtype_to_ir_type(dtype))
        rows, column = held(own.layout, own.shape)
        for half, row in enumerate(rows):  # each row is of its own box
            here = arith.cmpi(arith.CmpIPredicate.ult, arith.divui(row, index(BOX)), scalar(count))
            with mgpu.utils.when(here):
                place = _place(row, first, heads, group, None)
                for i, register in list(enumerate(rounded.registers.flat))[half::2]:
                    vector.store(register, target, [*place, arith.addi(column, index(columns_before(i)))])

    store(x, ref, box0, boxes, head)


def columns_before(register: int) -> int:
    """Return how many columns a thread's register lies to the right of its first one, for sums and left operands.

    Registers with even numbers are of one row, the others of the row 8 below.
    """
    return 8 * (register // 2)


def held(layout: Any, shape: tuple[int, ...]) -> tuple[list[Any], Any]:
    """Return a thread's two rows and its first column. Addresses are computed from these alone, which saves
    registers.
    """
    (row, column), (below, _) = itertools.islice(layout.thread_idxs(shape), 2)
    return [row, below], column


def _box(box: Any, head: Any, group: int) -> tuple[Any, Any]:
    """Return (octet, query head) of a box."""
    return lax.div(box, jnp.int32(group)), head * group + lax.rem(box, jnp.int32(group))


def _place(row: Any, box0: Any, head: Any, group: int, last: int | None) -> tuple[Any, Any]:
    """Return where a row of eight boxes lies in `[R, H]`."""
    box = arith.addi(scalar(box0), arith.divui(row, index(BOX)))
    octet, of_group = arith.divui(box, index(group)), arith.remui(box, index(group))
    if last is not None:
        octet = arith.minui(octet, index(last))
    place = arith.addi(arith.muli(octet, index(BOX)), arith.remui(row, index(BOX)))
    return place, arith.addi(arith.muli(scalar(head), index(group)), of_group)


def index(number: int) -> Any:
    return mgpu.utils.c(number, ir.IndexType.get())


def scalar(number: Any) -> Any:
    """Return a non-negative scalar argument as an index."""
    return arith.index_castui(ir.IndexType.get(), number.registers.item())
