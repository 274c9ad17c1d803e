"""Products with FP8 matrices as a Mosaic GPU kernel for every NVIDIA GPU since Ampere.

As in `mosaic_gpu`, outputs are the rows of the matrix products here, so that each weight is dequantized by the one
thread that multiplies it. A program has one warpgroup, which loads blocks of 128 inputs ahead into a ring and reads
them from there into registers (`float8_fragments`). Results go from registers to device memory.

If there are fewer items than programs, an item has a part of the inputs, and the parts are added in float32 afterwards.
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
from vlcache_jax.pallas_kernels.float8_fragments import (
    FACTORS,
    LEFT,
    RIGHT,
    RUN,
    as_left,
    as_right,
    store_turned,
    to_float16,
)
from vlcache_jax.pallas_kernels.fragments import BOX, M, multiply, sums
from vlcache_jax.pallas_kernels.quantized_matmul.mosaic_gpu import BLOCK, in_tiles, silu_times
from vlcache_jax.pallas_kernels.quantized_matmul.mosaic_gpu import check as check
from vlcache_jax.pallas_kernels.ring import Ring

TOGETHER = 2  # programs on a multiprocessor
PLACES = 4  # maximum places of the ring
MAX_ROWS = 64  # of a tile: their sums are in registers
ROWS = 16  # a tile has a multiple of these: the fewest that threads copy as they are swizzled
NEAR = 16  # tiles whose items follow each other output by output, so that their reads stay in the second-level cache


@dataclasses.dataclass(frozen=True)
class QuantizedMatmulMmaConfig:
    """Parameters of the portable FP8 kernel.

    Attributes:
      rows: Rows of a tile, a multiple of 16.
      parts: Parts of 64 outputs of an item, 1 or 2; gate and up have one each.
      shares: Number of parts of the inputs, each of which is an item.
      places: Places of the ring.
      bulk: TMA copies; otherwise threads do.
      native: The chip converts FP8.
      programs: Number of programs that share the items.
    """

    rows: int
    parts: int
    shares: int
    places: int
    bulk: bool
    native: bool
    programs: int


def default_config(
    rows: int,
    outputs: int,
    inputs: int,
    *,
    gated: bool = False,
    tiles: int | None = None,
    chip: Chip | None = None,
    programs: int | None = None,
) -> QuantizedMatmulMmaConfig:
    """Return tiles as large as the rows fill and shared memory allows, and items as large as leave some for all
    programs.

    Args:
      rows: Rows in all, or of a tile (`rows_of_tile`) if `tiles` is given.
      outputs: Outputs that lie together.
      inputs: K.
      gated: The matrices are gate and up.
      tiles: Number of tiles of rows; None: as many as the rows fill.
      chip: None is the chip in use.
      programs: None is as many as run at once.
    """
    chip = chip or chip_at_hand()
    programs = programs or TOGETHER * chip.multiprocessors
    room = chip.shared_memory // TOGETHER - RESERVED - (RESERVED if chip.has_bulk_copies else 0)  # for barriers
    tile = rows_of_tile(rows, chip)
    count = (tiles or -(-rows // tile)) * (outputs // M)  # items of 64 outputs, or of as many of gate and up each
    wide = not gated and (outputs % (2 * M) == 0 and count >= 2 * programs)
    blocks = inputs // BLOCK
    # Writing and reading the parts takes at most a quarter of the weights' bytes.
    shares = 1 if wide else max(1, min(programs // count, blocks, inputs // (32 * tile)))
    shares = -(-blocks // -(-blocks // shares))  # none is empty
    parts = 2 if wide or gated else 1
    places = min(PLACES, room // _of_place(tile, parts))
    return QuantizedMatmulMmaConfig(tile, parts, shares, places, chip.has_bulk_copies, chip.converts_8_bits, programs)


def rows_of_tile(rows: int, chip: Chip) -> int:
    """Return as many rows as `rows` fill and as leave room for two places of a ring."""
    room = chip.shared_memory // TOGETHER - 2 * RESERVED
    most = next(rows for rows in (MAX_ROWS, MAX_ROWS // 2) if 2 * _of_place(rows, 2) <= room)
    return min(most, -(-rows // ROWS) * ROWS)


def _of_place(rows: int, parts: int) -> int:
    """Return the bytes of a place of the ring."""
    return BLOCK * (2 * rows + parts * M)


def float8_matmul(
    x: jax.Array,
    weight: jax.Array,
    scale: jax.Array,
    *,
    config: QuantizedMatmulMmaConfig | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """Implement `vlcache_jax.pallas_kernels.float8_matmul`, with the arguments of `mosaic_gpu.float8_matmul`."""
    config = config or default_config(len(x), *weight.shape)
    run = functools.partial(multiply_tiles, gated=False, config=config, interpret=interpret)
    return in_tiles(run, x, weight, scale, config.rows)


# An inner jit: a program that calls the same case for each of its layers compiles one kernel.
@functools.partial(jax.jit, static_argnames=("gated", "config", "interpret"))
def multiply_tiles(
    x: jax.Array,
    weights: jax.Array,
    scale: jax.Array,
    expert: Any,
    first: Any,
    octets: Any,
    count: Any,
    *,
    gated: bool,
    config: QuantizedMatmulMmaConfig,
    interpret: plgpu.InterpretGPUParams | None,
) -> jax.Array:
    """Multiply rows by FP8 matrices, with the arguments and the result of `mosaic_gpu.multiply`."""
    (P, K), halves, dtype = x.shape, 2 if gated else 1, x.dtype
    E, width, n, parts, shares = len(weights), weights.shape[1] // halves, config.rows, config.parts, config.shares
    bulk, programs, interpreted = config.bulk, config.programs, interpret is not None
    of_item = M if gated else parts * M
    across, blocks = width // of_item, -(-(K // BLOCK) // shares)
    apart = width if gated else M  # outputs from one part to the other
    ring = Ring(config.places, 1 + parts, bulk=bulk)

    def program(refs: Any, x_smem: Any, w_smem: Any, barriers: Any) -> None:
        x_ref, w_ref, scale_ref, expert_ref, first_ref, octets_ref, count_ref, out_ref = refs
        ring.begin(barriers)
        cta, tiles = lax.axis_index("program"), count_ref[0]

        def place_of(item: Any) -> tuple[Any, Any]:
            """Return an item's tile, and its index among the items of the tile."""
            before = lax.div(item, jnp.int32(NEAR * across * shares)) * NEAR
            near, at = lax.min(jnp.int32(NEAR), tiles - before), item - before * (across * shares)
            return before + lax.rem(at, near), lax.div(at, near)

        def one(i: Any, _: Any) -> None:
            tile, own = place_of(cta + i * programs)
            column, share = lax.div(own, jnp.int32(shares)) * of_item, lax.rem(own, jnp.int32(shares))
            row, matrix = first_ref[tile] * BOX, expert_ref[tile]
            first_block = share * blocks
            mine = lax.min(jnp.int32(blocks), K // BLOCK - first_block)

            def fetch(block: Any) -> Callable[[Any, Callable[[Any, Any], None]], None]:
                def copies(place: Any, copy: Callable[[Any, Any], None]) -> None:
                    inputs = pl.ds((first_block + block) * BLOCK, BLOCK)
                    copy(x_ref.at[pl.ds(row, n), inputs], x_smem.at[place])
                    for part in range(parts):
                        outputs = pl.ds(matrix * (halves * width) + part * apart + column, M)
                        copy(w_ref.at[outputs, inputs], w_smem.at[place, part])

                return copies

            def factors(block: Any) -> list[jax.Array]:
                """Return the factor of each output for one block of inputs."""
                at = [pl.ds(part * apart + column, M) for part in range(parts)]
                found = [scale_ref.at[matrix, one, first_block + block] for one in at]
                return [plgpu.load(ref, layout=FACTORS, optimized=False) for ref in found]

            def weights_of(place: Any, part: int, run: int, factor: jax.Array) -> jax.Array:
                own = plgpu.load(w_smem.at[place, part, :, pl.ds(run, RUN)], layout=LEFT)
                whole = to_float16(own, native=config.native, interpreted=interpreted).astype(jnp.float32)
                spread = plgpu.layout_cast(lax.broadcast_in_dim(factor, (M, RUN), [0]), LEFT)
                return as_left((whole * spread).astype(dtype), dtype, interpreted=interpreted)

            ring.start(mine, [fetch(block) for block in range(ring.places - 1)])

            def step(block: Any, state: Any) -> Any:
                accs, now = state
                following = factors(lax.min(block + 1, mine - 1))
                place = ring.step(block, mine, fetch(block + ring.places - 1))
                for run in range(0, BLOCK, RUN):
                    made = [weights_of(place, part, run, now[part]) for part in range(parts)]
                    for octet in range(n // BOX):
                        rows = x_smem.at[place, pl.ds(octet * BOX, BOX), pl.ds(run, RUN)]
                        rows = as_right(plgpu.load(rows.T, layout=RIGHT), dtype, interpreted=interpreted)
                        for part in range(parts):
                            at = part * (n // BOX) + octet
                            accs[at] = multiply(accs[at], made[part], rows, interpreted=interpreted)
                return accs, following

            zero = plgpu.layout_cast(jnp.zeros((M, BOX), jnp.float32), sums(dtype))
            found, _ = lax.fori_loop(0, mine, step, ([zero] * (parts * n // BOX), factors(0)))
            held = octets_ref[tile]
            for octet in range(n // BOX):
                at = share * P + row + octet * BOX

                def store(octet: int = octet, at: Any = at) -> None:
                    own = found[octet :: n // BOX]
                    own = [silu_times(own[0], own[1], dtype)] if gated and shares == 1 else own
                    for part, y in enumerate(own):
                        store_turned(y, out_ref, at, column + part * apart, dtype, interpreted=interpreted)

                pl.when(octet < held)(store)

        lax.fori_loop(0, lax.div(tiles * (across * shares) - cta + programs - 1, jnp.int32(programs)), one, None)

    def shared(shape: tuple[int, ...], dtype: Any, swizzle: int) -> Any:
        columns = swizzle // jnp.dtype(dtype).itemsize
        tiling: Any = plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle)  # type: ignore[abstract]
        return plgpu.SMEM(shape, dtype=dtype, transforms=tiling)

    def float8_kernel(*refs: Any) -> None:
        # Swizzled so that threads, 16 bytes each, read from different banks.
        buffers = (
            shared((ring.places, n, BLOCK), dtype, 2 * RUN),
            shared((ring.places, parts, M, BLOCK), jnp.float8_e4m3fn, RUN),
        )
        pl.run_scoped(functools.partial(program, refs), *buffers, ring.barriers())

    finished, partial = ((P, width), dtype), ((shares * P, halves * width), jnp.float32)
    out: jax.Array = plgpu.kernel(
        float8_kernel,
        out_type=jax.ShapeDtypeStruct(*(finished if shares == 1 else partial)),
        grid=(programs,),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )(x, weights.reshape(E * halves * width, K), scale, expert, first, octets, count)
    if shares == 1:
        return out
    whole = functools.reduce(jnp.add, jnp.split(out, shares))  # always in the same order
    if gated:
        gate, up = jnp.split(whole, 2, axis=1)
        whole = silu_times(gate, up, dtype)
    return whole.astype(dtype)
