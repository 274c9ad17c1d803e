"""Products with FP8 matrices as a Mosaic GPU kernel for Hopper.

Outputs are the rows of the matrix products here, and the results are transposed when they are written. A warpgroup
loads 64 outputs times 128 inputs, which share a factor, from shared memory into registers, converts them with their
factors to 16 bits, and multiplies by rows in shared memory. Dequantized weights are never written.

Programs are few and persistent: an *item* is a tile of rows of one expert, and some outputs; each program does every
P-th item. One warpgroup loads blocks ahead, also those of the next items.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from vlcache_jax.pallas_kernels.attention.mosaic_gpu import ACC, MULTIPROCESSORS, SHARED_MEMORY, WGMMA, tiled

BOX = 8  # rows that are written together
M = 64  # outputs that a warpgroup multiplies
BLOCK = 128  # inputs, which share a factor
MAX_ROWS = 128  # rows of a tile
STAGES = 8  # blocks in flight at most
LOADED = plgpu.Layout.WGMMA_UPCAST_2X  # for 8-bit weights, four of which are loaded at once
FACTORS = LOADED.reduce(1)


@dataclasses.dataclass(frozen=True)
class QuantizedMatmulConfig:
    """Parameters of the Hopper FP8 kernel.

    Attributes:
      rows: Rows of a tile, a multiple of 8.
      warpgroups: Warpgroups that compute, each 64 outputs of an item.
      programs: Number of programs that share the items.
    """

    rows: int
    warpgroups: int
    programs: int


def default_config(
    rows: int, outputs: int, programs: int | None = None, tiles: int | None = None
) -> QuantizedMatmulConfig:
    """Return tiles as large as the rows fill; items of 64 outputs if there are too few of 128 for all programs.

    Args:
      tiles: Number of tiles of rows; None: as many as the rows fill.
    """
    programs = programs or MULTIPROCESSORS
    tile = min(MAX_ROWS, -(-rows // BOX) * BOX)
    items = (tiles or -(-rows // tile)) * (outputs // (2 * M))
    return QuantizedMatmulConfig(tile, 1 if outputs % (2 * M) or items < programs else 2, programs)


def rows_of_experts(choices: int, experts: int) -> int:
    """Return the rows of a tile: twice the mean of an expert, because few experts have more."""
    mean = choices / min(choices, experts)
    return int(min(MAX_ROWS, max(2 * BOX, BOX * -(-2 * mean // BOX))))


def check(x: Any, weight: Any, scale: Any, outputs: int) -> None:
    """Raise NotImplementedError, with the reason, for a case that the kernel does not support.

    Args:
      x: `[N, K]`.
      weight, scale: `[..., O, K]` in FP8, and their factors.
      outputs: Outputs that lie together: O, or half of it for gate and up.
    """
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"mosaic_gpu multiplies bfloat16 and float16, got x in {x.dtype}")
    if weight.shape[-1] != BLOCK * scale.shape[-1] or outputs % M:
        raise NotImplementedError(
            f"mosaic_gpu supports FP8 matrices with one factor for {BLOCK} inputs, and multiples of {M} outputs, "
            f"got {weight.shape[-1]} inputs, {scale.shape[-1]} factors and {outputs} outputs"
        )


def float8_matmul(
    x: jax.Array,
    weight: jax.Array,
    scale: jax.Array,
    *,
    config: QuantizedMatmulConfig | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """Implement `vlcache_jax.pallas_kernels.float8_matmul` for arguments that it and `check` have checked.

    Args:
      config: Parameters of the kernel; None is `default_config`.
      interpret: Runs it in the CPU's interpreter (jax 0.12 or later) instead of compiling it.
    """
    config = config or default_config(len(x), len(weight))
    run = functools.partial(multiply, gated=False, config=config, interpret=interpret)
    return in_tiles(run, x, weight, scale, config.rows)


def in_tiles(run: Callable[..., jax.Array], x: jax.Array, weight: jax.Array, scale: jax.Array, rows: int) -> jax.Array:
    """Multiply rows by one matrix with `run`, which takes the arguments of `multiply`, in tiles of `rows` rows."""
    count, octets = -(-len(x) // rows), rows // BOX
    padded = jnp.pad(x, ((0, count * rows - len(x)), (0, 0)))
    tile = np.arange(count, dtype=np.int32)
    tiles = np.zeros_like(tile), tile * octets, np.full_like(tile, octets), np.full(1, count, np.int32)
    return run(padded, weight[None], scale[None], *tiles)[: len(x)]


# An inner jit: a program that calls the same case for each of its layers compiles one kernel.
@functools.partial(jax.jit, static_argnames=("gated", "config", "interpret"))
def multiply(
    x: jax.Array,
    weights: jax.Array,
    scale: jax.Array,
    expert: Any,
    first: Any,
    octets: Any,
    count: Any,
    *,
    gated: bool,
    config: QuantizedMatmulConfig,
    interpret: plgpu.InterpretGPUParams | None,
) -> jax.Array:
    """Multiply rows `[P, K]` by FP8 matrices `[E, width, K]`; rows that no tile holds are left undefined.

    Args:
      scale: Factors, float32 `[E, width, K / 128]`.
      expert, first, octets: For each tile the number of its matrix, its first row / 8, and its rows / 8; it reads
        `config.rows` of them.
      count: `[1]`, number of tiles.
      gated: Matrices are `[E, 2 * width, K]`, gate above up, and the result is silu(gate x) * up x.
    """
    (P, K), halves, dtype = x.shape, 2 if gated else 1, x.dtype
    width, n, warpgroups, programs = weights.shape[1] // halves, config.rows, config.warpgroups, config.programs
    outputs, blocks = warpgroups * M, K // BLOCK
    across = width // outputs
    of_stage = BLOCK * (halves * outputs + 2 * n)
    stages = min(STAGES, (SHARED_MEMORY - 2048 - 2 * n * outputs) // of_stage)  # barriers, and what Mosaic adds

    def program(refs: Any, buffers: Any, barriers: Any) -> None:
        x_ref, w_ref, scale_ref, expert_ref, first_ref, octets_ref, count_ref, out_ref = refs
        (w_smem, x_smem, out_smem, made_smem), (here, free) = buffers, barriers
        cta, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
        items = lax.div(count_ref[0] * across - cta + programs - 1, jnp.int32(programs))

        def do_items(do: Callable[[Any, Any, Any], None]) -> None:
            """Call `do(tile, first_output, blocks_done)` for each item of this program."""

            def one(i: Any, _: Any) -> None:
                item = cta + i * programs
                tile = lax.div(item, jnp.int32(across))
                do(tile, lax.rem(item, jnp.int32(across)) * outputs, i * blocks)

            lax.fori_loop(0, items, one, None)

        def load(tile: Any, output: Any, step: Any) -> None:
            matrix, row = expert_ref[tile], first_ref[tile] * BOX

            def block(k: Any, _: Any) -> None:
                stage = lax.rem(step + k, jnp.int32(stages))
                part = pl.ds(k * BLOCK, BLOCK)
                pl.when(step + k >= stages)(lambda: plgpu.barrier_wait(free.at[stage]))
                plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(row, n), part], x_smem.at[stage], here.at[stage])
                for half in range(halves):
                    own = w_ref.at[matrix, pl.ds(half * width + output, outputs), part]
                    plgpu.copy_gmem_to_smem(own, w_smem.at[stage, half], here.at[stage])

            lax.fori_loop(0, blocks, block, None)

        def compute(tile: Any, output: Any, step: Any) -> None:
            matrix = expert_ref[tile]

            def factors(k: Any) -> list[jax.Array]:
                """Return the factor of each of the warpgroup's outputs for one block of inputs."""
                at = [
                    scale_ref.at[matrix, pl.ds(half * width + output + warpgroup * M, M), k] for half in range(halves)
                ]
                return [plgpu.load(one, layout=FACTORS, optimized=False) for one in at]

            def dequantized(w: Any, factor: jax.Array) -> jax.Array:
                whole = plgpu.load(w, layout=LOADED).astype(jnp.float16).astype(jnp.float32)
                spread = plgpu.layout_cast(lax.broadcast_in_dim(factor, (M, BLOCK), [0]), LOADED)
                return plgpu.layout_cast((whole * spread).astype(dtype), WGMMA)

            def products(*accs: Any) -> list[jax.Array]:
                def block(k: Any, now: list[jax.Array]) -> list[jax.Array]:
                    stage = lax.rem(step + k, jnp.int32(stages))
                    following = factors(jnp.minimum(k + 1, blocks - 1))
                    plgpu.barrier_wait(here.at[stage])
                    for half, acc in enumerate(accs):
                        a = dequantized(w_smem.at[stage, half, pl.ds(warpgroup * M, M)], now[half])
                        if interpret is not None:  # the interpreter multiplies only from shared memory
                            made_smem[warpgroup] = a
                            plgpu.commit_smem()
                            a = made_smem.at[warpgroup]
                            x_smem[stage]  # the interpreter does not check matrix products for races
                        plgpu.wgmma(acc, a, x_smem.at[stage].T)
                    plgpu.wgmma_wait(0)
                    plgpu.commit_smem()  # orders these loads before later writes of bulk copies
                    plgpu.barrier_arrive(free.at[stage])
                    return following

                lax.fori_loop(0, blocks, block, factors(0))
                return [acc[...] for acc in accs]

            found = pl.run_scoped(products, *[ACC((M, n))] * halves)
            y = (silu_times(found[0], found[1], dtype) if gated else found[0]).astype(dtype)
            own = out_smem.at[warpgroup]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if interpret is None:
                own.T[...] = plgpu.layout_cast(y, plgpu.Layout.WGMMA_TRANSPOSED)
            else:
                own[...] = y.T
            plgpu.commit_smem()
            row, held = first_ref[tile], octets_ref[tile]
            for i in range(n // BOX):
                target = out_ref.at[pl.ds((row + i) * BOX, BOX), pl.ds(output + warpgroup * M, M)]
                copy = functools.partial(plgpu.copy_smem_to_gmem, own.at[pl.ds(i * BOX, BOX)], target)
                pl.when(i < held)(copy)

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
        plgpu.SMEM(
            (stages, halves, outputs, BLOCK),
            dtype=jnp.float8_e4m3fn,
            transforms=(plgpu.TilingTransform((8, BLOCK)), plgpu.SwizzleTransform(BLOCK)),  # type: ignore[abstract]
        ),
        tiled((stages, n, BLOCK), dtype, BLOCK),
        tiled((warpgroups, n, M), dtype, M),
        None if interpret is None else tiled((warpgroups, M, BLOCK), dtype, BLOCK),
    )
    barriers = (
        plgpu.Barrier(num_arrivals=1 + halves, num_barriers=stages),
        plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
    )

    def float8_kernel(*refs: Any) -> None:
        pl.run_scoped(functools.partial(program, refs), buffers, barriers, collective_axes="warpgroup")

    out: jax.Array = plgpu.kernel(
        float8_kernel,
        out_type=jax.ShapeDtypeStruct((P, width), dtype),
        grid=(programs,),
        grid_names=("program",),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(x, weights, scale, expert, first, octets, count)
    return out


def silu_times(gate: jax.Array, up: jax.Array, dtype: Any) -> jax.Array:
    """Return silu(gate) * up in float32, rounded at the same points as in the transformers library."""
    gate, up = (x.astype(dtype).astype(jnp.float32) for x in (gate, up))
    return (gate / (1 + jnp.exp(-gate))).astype(dtype).astype(jnp.float32) * up
