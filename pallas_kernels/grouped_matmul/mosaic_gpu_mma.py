"""The experts' products as Mosaic GPU kernels for every NVIDIA GPU since Ampere, driven by the same tile table.

They differ from `mosaic_gpu` in the warpgroup: there is one, which loads blocks ahead into a ring and multiplies 64
rows of an expert by its matrices (`fragments`), from shared memory into registers and from there to device memory.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from vlcache_jax.pallas_kernels.chips import RESERVED, Chip, chip_at_hand
from vlcache_jax.pallas_kernels.fragments import DEPTH, EIGHT, M, left, multiply, right, store_boxes, sums
from vlcache_jax.pallas_kernels.grouped_matmul.mosaic_gpu import BLOCK, NARROW, columns_of, mix_packed
from vlcache_jax.pallas_kernels.grouped_matmul.mosaic_gpu import check as check
from vlcache_jax.pallas_kernels.grouped_matmul.tiles import BOX, ExpertTiles
from vlcache_jax.pallas_kernels.quantized_matmul import mosaic_gpu_mma as quantized
from vlcache_jax.pallas_kernels.quantized_matmul.mosaic_gpu import rows_of_experts, silu_times
from vlcache_jax.pallas_kernels.ring import Ring

TOGETHER = 2  # programs on a multiprocessor
PLACES = 4  # maximum places of the ring


@dataclasses.dataclass(frozen=True)
class GroupedMatmulMmaConfig:
    """Parameters of the portable kernels.

    Attributes:
      room: Bytes of shared memory for a program's ring.
      bulk: TMA copies; otherwise threads do.
      programs: Number of programs that share the items.
    """

    room: int
    bulk: bool
    programs: int


def default_config(chip: Chip | None = None, programs: int | None = None) -> GroupedMatmulMmaConfig:
    """Return room for two programs on a multiprocessor of the chip; None is the chip in use."""
    chip = chip or chip_at_hand()
    room = chip.shared_memory // TOGETHER - RESERVED - (RESERVED if chip.has_bulk_copies else 0)  # for barriers
    return GroupedMatmulMmaConfig(room, chip.has_bulk_copies, programs or TOGETHER * chip.multiprocessors)


def mix_experts(
    x: jax.Array,
    weight: jax.Array,
    expert: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    *,
    config: GroupedMatmulMmaConfig | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """Implement `vlcache_jax.pallas_kernels.mix_experts`, with the arguments of `mosaic_gpu.mix_experts`."""
    run = functools.partial(_multiply, config=config or default_config(), interpret=interpret)
    return mix_packed(x, weight, expert, gate_up, down, len(gate_up), EIGHT, run)


def mix_float8_experts(
    x: jax.Array,
    weight: jax.Array,
    expert: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    gate_up_scale: jax.Array,
    down_scale: jax.Array,
    *,
    programs: int | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """Mix experts with FP8 matrices; `programs` is the number of programs that share the items."""
    E = len(gate_up)
    rows = quantized.rows_of_tile(rows_of_experts(expert.size, E), chip_at_hand())

    def run(packed: jax.Array, own: tuple[jax.Array, jax.Array], tiles: ExpertTiles, *, gated: bool) -> jax.Array:
        _, outputs, inputs = own[0].shape
        outputs //= 2 if gated else 1
        few = min(E, expert.size)
        config = quantized.default_config(rows, outputs, inputs, gated=gated, tiles=few, programs=programs)
        return quantized.multiply_tiles(packed, *own, *tiles.table, gated=gated, config=config, interpret=interpret)

    return mix_packed(x, weight, expert, (gate_up, gate_up_scale), (down, down_scale), E, rows // BOX, run)


# An inner jit: a program that calls the same case for each of its layers compiles one kernel.
@functools.partial(jax.jit, static_argnames=("gated", "config", "interpret"))
def _multiply(
    x: jax.Array,
    weights: jax.Array,
    tiles: ExpertTiles,
    *,
    gated: bool,
    config: GroupedMatmulMmaConfig,
    interpret: plgpu.InterpretGPUParams | None,
) -> jax.Array:
    """Multiply packed rows by the matrices of their experts, as in `mosaic_gpu`."""
    (P, K), halves = x.shape, 2 if gated else 1
    E, width, dtype, programs = len(weights), weights.shape[2] // halves, x.dtype, config.programs
    # Sums of both halves are in registers, which have room for 128 columns.
    columns = NARROW if gated else columns_of(width, E, len(tiles.place), programs)
    across, blocks = width // columns, K // BLOCK
    ring = Ring(min(PLACES, config.room // (2 * BLOCK * (M + halves * columns))), 1 + halves, bulk=config.bulk)
    interpreted = interpret is not None
    swizzle = 128 if config.bulk else 32  # as in attention

    def program(refs: Any, x_smem: Any, w_smem: Any, barriers: Any) -> None:
        x_ref, w_ref, expert_ref, first_ref, octets_ref, used_ref, out_ref = refs
        ring.begin(barriers)
        cta = lax.axis_index("program")

        def one(i: Any, _: Any) -> None:
            item = cta + i * programs
            tile, column = lax.div(item, jnp.int32(across)), lax.rem(item, jnp.int32(across))
            first, matrix = first_ref[tile], expert_ref[tile] * K

            def fetch(block: Any) -> Callable[[Any, Callable[[Any, Any], None]], None]:
                def copies(place: Any, copy: Callable[[Any, Any], None]) -> None:
                    copy(x_ref.at[pl.ds(first * BOX, M), pl.ds(block * BLOCK, BLOCK)], x_smem.at[place])
                    rows = pl.ds(matrix + block * BLOCK, BLOCK)
                    for half in range(halves):
                        own = pl.ds(half * width + column * columns, columns)
                        copy(w_ref.at[rows, own], w_smem.at[place, half])

                return copies

            ring.start(blocks, [fetch(block) for block in range(ring.places - 1)])

            def step(block: Any, accs: list[jax.Array]) -> list[jax.Array]:
                place = ring.step(block, blocks, fetch(block + ring.places - 1))
                own = plgpu.load(x_smem.at[place], layout=left(dtype), optimized=False)
                for at in range(0, BLOCK, DEPTH):
                    for half in range(halves):
                        part = w_smem.at[place, half, pl.ds(at, DEPTH)]
                        part = plgpu.load(part, layout=right(dtype), optimized=False)
                        accs[half] = multiply(accs[half], own[:, at : at + DEPTH], part, interpreted=interpreted)
                return accs

            zero = plgpu.layout_cast(jnp.zeros((M, columns), jnp.float32), sums(dtype))
            found = lax.fori_loop(0, blocks, step, [zero] * halves)
            y = silu_times(found[0], found[1], dtype) if gated else found[0]
            octets, first = octets_ref[tile], first_ref[tile]
            store_boxes(y, out_ref, first, octets, column, 1, dtype, interpreted=interpreted)

        count = lax.div(used_ref[0] * across - cta + programs - 1, jnp.int32(programs))
        lax.fori_loop(0, count, one, None)

    def shared(*shape: int) -> Any:
        tiling: Any = plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle)  # type: ignore[abstract]
        return plgpu.SMEM(shape, dtype=dtype, transforms=tiling)

    def experts_kernel(*refs: Any) -> None:
        buffers = shared(ring.places, M, BLOCK), shared(ring.places, halves, BLOCK, columns)
        pl.run_scoped(functools.partial(program, refs), *buffers, ring.barriers())

    out: jax.Array = plgpu.kernel(
        experts_kernel,
        out_type=jax.ShapeDtypeStruct((P, across, columns), dtype),
        grid=(programs,),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )(x, weights.reshape(E * K, -1), *tiles.table)
    return out.reshape(P, width)
