"""The experts' products as Mosaic GPU kernels for Hopper, driven by a tile table (`tiles.py`).

One kernel computes silu(gate x) * up x of packed rows, another one multiplies by the down matrices. The router's
weights are applied when a row's parts are added. Programs are few and persistent: an *item* is a tile and some columns,
and each program does every P-th item. One warpgroup loads blocks ahead, also those of the next items; the others
multiply 64 rows each by a block that is loaded once. A tile reads 64 or 128 rows and writes only its own octets.

Rows of a product do not affect each other, and matrices of experts that no row has chosen are not read. Non-finite
numbers therefore do not spread.
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

from vlcache_jax.pallas_kernels.attention.mosaic_gpu import ACC, MULTIPROCESSORS, SHARED_MEMORY, tiled
from vlcache_jax.pallas_kernels.grouped_matmul.tiles import BOX, ExpertTiles, make_tiles, tiles_of_row
from vlcache_jax.pallas_kernels.quantized_matmul import mosaic_gpu as quantized

M = 64  # rows that a warpgroup multiplies
EIGHT = M // BOX
BLOCK = 64  # of K, loaded and multiplied at once
NARROW, WIDE = 64, 128  # columns of an item
STAGES = 8  # blocks in flight at most


@dataclasses.dataclass(frozen=True)
class GroupedMatmulConfig:
    """Parameters of the kernels.

    Attributes:
      warpgroups: Warpgroups that compute, 1 or 2; a tile has 64 rows for each.
      programs: Number of programs that share the items.
    """

    warpgroups: int
    programs: int


def default_config(choices: int, experts: int, programs: int | None = None) -> GroupedMatmulConfig:
    """Return large tiles if experts have more rows than a small one holds."""
    return GroupedMatmulConfig(2 if choices > M * experts else 1, programs or MULTIPROCESSORS)


def check(x: jax.Array, hidden: int) -> None:
    """Raise NotImplementedError, with the reason, for a case that the kernels do not support.

    Args:
      x: `[N, M]`.
      hidden: F.
    """
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"mosaic_gpu multiplies bfloat16 and float16, got x in {x.dtype}")
    if x.shape[1] % BLOCK or hidden % BLOCK:
        raise NotImplementedError(
            f"mosaic_gpu supports experts whose widths are multiples of {BLOCK}, got {x.shape[1]} and {hidden}"
        )


def mix_experts(
    x: jax.Array,
    weight: jax.Array,
    expert: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    *,
    config: GroupedMatmulConfig | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """Implement `vlcache_jax.pallas_kernels.mix_experts` for arguments that it and `check` have checked.

    Args:
      expert: Counted from the first one on this device; numbers from E on are elsewhere.
      config: Parameters of the kernels; None is `default_config`.
      interpret: Runs them in the CPU's interpreter (jax 0.12 or later) instead of compiling them.
    """
    config = config or default_config(expert.size, len(gate_up))
    run = functools.partial(_multiply, config=config, interpret=interpret)
    return mix_packed(x, weight, expert, gate_up, down, len(gate_up), config.warpgroups * EIGHT, run)


def mix_packed(
    x: jax.Array,
    weight: jax.Array,
    expert: jax.Array,
    gate_up: Any,
    down: Any,
    count: int,
    length: int,
    multiply: Callable[..., jax.Array],
) -> jax.Array:
    """Compute the mixture by `multiply(packed rows, matrices, tiles, gated=)`.

    Args:
      x, weight, expert: As in `mix_experts`.
      gate_up, down: Matrices in the form that `multiply` takes.
      count: Number of experts on this device.
      length: Maximum number of octets of a tile.
    """
    N, k = expert.shape
    tiles = (tiles_of_row if N == 1 else make_tiles)(expert.reshape(-1), count, length)
    packed = x.at[tiles.source // k].get(mode="clip")
    hidden = multiply(packed, gate_up, tiles, gated=True)
    made = multiply(hidden, down, tiles, gated=False)
    # As in the transformers library: products in the model's dtype, their sum in float32.
    parts = made.at[tiles.place].get(mode="clip").reshape(N, k, -1) * weight[:, :, None]
    return jnp.where((expert < count)[:, :, None], parts, 0).sum(axis=1, dtype=jnp.float32)


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
    rows = quantized.rows_of_experts(expert.size, E)

    def run(packed: jax.Array, own: tuple[jax.Array, jax.Array], tiles: ExpertTiles, *, gated: bool) -> jax.Array:
        outputs = own[0].shape[1] // (2 if gated else 1)
        config = quantized.default_config(rows, outputs, programs, tiles=min(E, expert.size))
        return quantized.multiply(packed, *own, *tiles.table, gated=gated, config=config, interpret=interpret)

    return mix_packed(x, weight, expert, (gate_up, gate_up_scale), (down, down_scale), E, rows // BOX, run)


# An inner jit: a program that calls the same case for each of its layers compiles one kernel.
@functools.partial(jax.jit, static_argnames=("gated", "config", "interpret"))
def _multiply(
    x: jax.Array,
    weights: jax.Array,
    tiles: ExpertTiles,
    *,
    gated: bool,
    config: GroupedMatmulConfig,
    interpret: plgpu.InterpretGPUParams | None,
) -> jax.Array:
    """Multiply packed rows `[P, K]` by the matrices `[E, K, width]` of their experts.

    Rows that no tile holds are left undefined. If `gated`, the matrices are `[E, K, 2 * width]`, gate and up side by
    side, and the result is silu(gate x) * up x.
    """
    (P, K), halves = x.shape, 2 if gated else 1
    E, width, dtype = len(weights), weights.shape[2] // halves, x.dtype
    warpgroups, programs = config.warpgroups, config.programs
    columns = columns_of(width, E, len(tiles.place), programs)
    across, blocks, rows = width // columns, K // BLOCK, warpgroups * M
    of_stage = 2 * BLOCK * (rows + halves * columns)
    stages = min(STAGES, (SHARED_MEMORY - 2048 - 2 * rows * columns) // of_stage)  # barriers, and what Mosaic adds

    def program(refs: Any, buffers: Any, barriers: Any) -> None:
        x_ref, w_ref, expert_ref, first_ref, octets_ref, used_ref, out_ref = refs
        (x_smem, w_smem, out_smem), (here, free) = buffers, barriers
        cta, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
        count = lax.div(used_ref[0] * across - cta + programs - 1, jnp.int32(programs))

        def do_items(do: Callable[[Any, Any, Any], None]) -> None:
            """Call do(tile, its columns, blocks before it) for each item."""

            def one(i: Any, _: Any) -> None:
                item = cta + i * programs
                tile = lax.div(item, jnp.int32(across))
                do(tile, lax.rem(item, jnp.int32(across)) * columns, i * blocks)

            lax.fori_loop(0, count, one, None)

        def load(tile: Any, column: Any, step: Any) -> None:
            expert, row = expert_ref[tile], first_ref[tile] * BOX

            def block(k: Any, _: Any) -> None:
                stage = lax.rem(step + k, jnp.int32(stages))
                part = pl.ds(k * BLOCK, BLOCK)
                pl.when(step + k >= stages)(lambda: plgpu.barrier_wait(free.at[stage]))
                plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(row, rows), part], x_smem.at[stage], here.at[stage])
                for half in range(halves):
                    own = w_ref.at[expert, part, pl.ds(half * width + column, columns)]
                    plgpu.copy_gmem_to_smem(own, w_smem.at[stage, half], here.at[stage])

            lax.fori_loop(0, blocks, block, None)

        def compute(tile: Any, column: Any, step: Any) -> None:
            def products(*accs: Any) -> list[jax.Array]:
                def block(k: Any, _: Any) -> None:
                    stage = lax.rem(step + k, jnp.int32(stages))
                    plgpu.barrier_wait(here.at[stage])
                    own = x_smem.at[stage, pl.ds(warpgroup * M, M)]
                    if interpret is not None:
                        _look_at(own, w_smem.at[stage])
                    for half, acc in enumerate(accs):
                        plgpu.wgmma(acc, own, w_smem.at[stage, half])
                    plgpu.wgmma_wait(halves)  # the products before these have ended
                    before = lax.rem(step + k + (stages - 1), jnp.int32(stages))
                    pl.when(k > 0)(lambda: plgpu.barrier_arrive(free.at[before]))

                lax.fori_loop(0, blocks, block, None)
                found = [acc[...] for acc in accs]
                plgpu.barrier_arrive(free.at[lax.rem(step + (blocks - 1), jnp.int32(stages))])
                return found

            found = pl.run_scoped(products, *[ACC((M, columns))] * halves)
            y = quantized.silu_times(found[0], found[1], dtype) if gated else found[0]
            first, octets = first_ref[tile], octets_ref[tile]
            own = out_smem.at[warpgroup]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            own[...] = y.astype(dtype)
            plgpu.commit_smem()
            for i in range(EIGHT):
                at = warpgroup * EIGHT + i
                target = out_ref.at[pl.ds((first + at) * BOX, BOX), pl.ds(column, columns)]
                copy = functools.partial(plgpu.copy_smem_to_gmem, own.at[pl.ds(i * BOX, BOX)], target)
                pl.when(at < octets)(copy)

        def compute_items() -> None:
            plgpu.set_max_registers(232, action="increase")
            do_items(compute)
            plgpu.wait_smem_to_gmem(0)

        def load_items() -> None:
            plgpu.set_max_registers(40, action="decrease")
            do_items(load)

        pl.when(warpgroup < warpgroups)(compute_items)
        pl.when(warpgroup == warpgroups)(load_items)

    buffers = (
        tiled((stages, rows, BLOCK), dtype, BLOCK),
        tiled((stages, halves, BLOCK, columns), dtype, columns),
        tiled((warpgroups, M, columns), dtype, columns),
    )
    barriers = (
        plgpu.Barrier(num_arrivals=1 + halves, num_barriers=stages),
        plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
    )

    def experts_kernel(*refs: Any) -> None:
        pl.run_scoped(functools.partial(program, refs), buffers, barriers, collective_axes="warpgroup")

    out: jax.Array = plgpu.kernel(
        experts_kernel,
        out_type=jax.ShapeDtypeStruct((P, width), dtype),
        grid=(programs,),
        grid_names=("program",),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(x, weights, *tiles.table)
    return out


def _look_at(*refs: Any) -> None:
    """Read shared memory as matrix products do, because the interpreter does not check these for races."""
    for ref in refs:
        ref[...]
    plgpu.commit_smem()  # orders this read before later writes of bulk copies


def columns_of(width: int, experts: int, choices: int, programs: int) -> int:
    """Return the columns of an item: few if there are few tiles, so that all programs have some."""
    items = min(experts, choices) * (width // WIDE)
    return NARROW if width % WIDE or items < 2 * programs else WIDE
