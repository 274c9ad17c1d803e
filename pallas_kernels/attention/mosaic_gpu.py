"""Attention over slot intervals as a Mosaic GPU kernel for Hopper.

The query heads of a group read the same keys, so their rows are packed along M. The unit of packing is a *box*: eight
consecutive rows of one query head, which one bulk copy (TMA) moves between `[N, H, D]` and shared memory. The boxes of
a key-value head are numbered row by row, then head by head (`box = row // 8 * G + g`). Eight of them fill the 64 rows
that a warpgroup multiplies, and the boxes of one or two warpgroups are a *tile*. So a group of any size packs without
waste, and nothing is transposed outside the kernel.

A program visits the blocks of slots that the rows of its tile see (`_visits`). One warpgroup loads them, the others
compute with a running softmax. Blocks that every row sees whole are not masked. Where rows are few, several programs
share the blocks of a tile (*splits*), and their sums are combined at the end.
"""

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

BOX = 8  # rows that are copied together: the height of a swizzled tile in shared memory
BOXES = 8  # of a warpgroup, whose matrix product has 64 rows
MULTIPROCESSORS = 132  # of an H100 or H200
LOWEST = float(jnp.finfo(jnp.float32).min)  # largest score of a row that has seen nothing: finite, as differences are

TUNED = pathlib.Path(__file__).with_name("tuned.json")

WGMMA = plgpu.Layout.WGMMA
ROW, COLUMN = WGMMA.reduce(1), WGMMA.reduce(0)


@dataclasses.dataclass(frozen=True)
class Config:
    """How a case is cut.

    Attributes:
      warpgroups: That compute, 1 or 2, with 64 packed rows each; they share the loaded blocks.
      block: Slots of a block, a multiple of 64.
      stages: Blocks of K and of V in flight.
      splits: Programs that share the blocks of a tile.
      take_turns: Of two warpgroups, one multiplies while the other is at its softmax.

    Raises:
      ValueError: numbers that are not such.
    """

    warpgroups: int = 2
    block: int = 128
    stages: int = 2
    splits: int = 1
    take_turns: bool = True

    def __post_init__(self) -> None:
        if self.warpgroups not in (1, 2) or self.block < 64 or self.block % 64 or min(self.stages, self.splits) < 1:
            raise ValueError(f"config must have 1 or 2 warpgroups, a block in 64s, stages and splits, got {self}")


def default_config(n: int, s: int, heads: int, kv_heads: int, width: int) -> Config:
    """What was measured to be fastest for the next larger N of these heads, if `TUNED` has one up to four times as
    large. Otherwise enough programs for every multiprocessor, and twice as many where the rows of tiles may see unequal
    lengths."""
    group = heads // kv_heads
    measured = {rows: config for rows, config in _tuned().get((heads, kv_heads, width), ()) if n <= rows <= 4 * n}
    if measured:
        config = measured[min(measured)]
    else:
        warpgroups = 1 if n * group <= BOX * BOXES else 2
        programs = _count_tiles(n, group, warpgroups) * kv_heads
        enough = MULTIPROCESSORS // programs
        splits = enough if enough > 1 else pl.cdiv(2 * MULTIPROCESSORS, programs)
        config = Config(warpgroups=warpgroups, splits=splits)
    return dataclasses.replace(config, splits=max(1, min(config.splits, s // 256)))


@functools.cache
def _tuned() -> dict[tuple[int, int, int], list[tuple[int, Config]]]:
    """(H, K, D) -> (N, fastest way to cut), as `benchmarks.gpu` wrote them."""
    table: dict[tuple[int, int, int], list[tuple[int, Config]]] = {}
    if TUNED.exists():
        for entry in json.loads(TUNED.read_text())["rows"]:
            table.setdefault((entry["H"], entry["K"], entry["D"]), []).append((entry["N"], Config(**entry["config"])))
    return table


def check(q: jax.Array) -> None:
    """Raises NotImplementedError, with the reason, for a case that the kernel does not do."""
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"mosaic_gpu multiplies bfloat16 and float16, got q in {q.dtype}")
    if q.shape[2] > 128:
        raise NotImplementedError(f"mosaic_gpu does head widths up to 128, got {q.shape[2]}")


# An inner jit: a program that calls the same case for each of its layers compiles one kernel.
@functools.partial(jax.jit, static_argnames=("scale", "config", "interpret"))
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_start: jax.Array,
    k_end: jax.Array,
    *,
    scale: float,
    config: Config | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """The contract of `vlcache_jax.pallas_kernels.attention`, for arguments that it and `check` have checked.

    Args:
      config: None is `default_config`.
      interpret: Runs the kernel in the CPU's interpreter (jax 0.12 or later) instead of compiling it.
    """
    N, H, D = q.shape
    S, K, _ = k.shape
    G = H // K
    config = config or default_config(N, S, H, K, D)
    start, end = jnp.clip(k_start, 0, S), jnp.clip(k_end, 0, S)
    bounds, visits = _visits(start, end, G, config)

    # Bulk copies take boxes of 8 rows and of 32 or 64 columns. Vision towers have heads of 72 and 80: what is padded
    # multiplies zeros. KV pools are never padded, as that would copy them: their S is a multiple of 8 (`plan_pool`).
    q, k, v = (jnp.pad(x, ((0, -len(x) % BOX), (0, 0), (0, -D % 32))) for x in (q, k, v))
    boxes = len(bounds) * config.warpgroups * BOXES
    octets = pl.cdiv(boxes, G)  # eight rows, of every head of the group

    def of_rows(x: jax.Array) -> jax.Array:  # [N] -> [tiles, warpgroups, 64], as the rows of boxes are packed
        x = jnp.pad(x, (0, octets * BOX - len(x))).reshape(octets, 1, BOX)
        x = jnp.broadcast_to(x, (octets, G, BOX)).reshape(-1, BOX)[:boxes]
        return x.reshape(-1, config.warpgroups, BOXES * BOX)

    row_start, row_end = of_rows(start), of_rows(end)
    sums = _launch(q, k, v, bounds, visits, row_start, row_end, scale, config, interpret)
    if config.splits == 1:
        (out,) = sums
        return out[:N, :, :D]
    out = jnp.where((row_start < row_end)[..., None], _combine(*sums), 0).astype(q.dtype)  # [K, *row_start.shape, D]
    out = out.reshape(K, boxes * BOX, -1)[:, : pl.cdiv(N, BOX) * G * BOX]
    out = out.reshape(K, -1, G, BOX, out.shape[-1]).transpose(1, 3, 0, 2, 4).reshape(-1, H, out.shape[-1])
    return out[:N, :, :D]


def _count_tiles(n: int, group: int, warpgroups: int) -> int:
    return pl.cdiv(pl.cdiv(n, BOX) * group, warpgroups * BOXES)


def _visits(start: jax.Array, end: jax.Array, group: int, config: Config) -> tuple[jax.Array, jax.Array]:
    """The blocks that each tile visits.

    Rows in the order of their intervals leave out the slots between them that nobody sees, such as those of requests
    that have ended. That is worth its bookkeeping where rows are few, and its cost grows with their square; elsewhere,
    and in any other order, a tile visits all blocks from its first to its last.

    Returns:
      ([tiles, 4]: number of runs, of blocks, and the slots [from, to) that every row sees; [tiles, runs, 2]: each run's
      first block and one past its last), int32
    """
    n, block, per_tile = len(start), config.block, config.warpgroups * BOXES
    tile = jnp.arange(_count_tiles(n, group, config.warpgroups))
    first, last = tile * per_tile // group, (tile * per_tile + per_tile - 1) // group
    rows = first[:, None] * BOX + jnp.arange((per_tile // group + 2) * BOX)
    there = rows < jnp.minimum((last[:, None] + 1) * BOX, n)
    start, end = (x.at[rows].get(mode="clip") for x in (start, end))
    seen = there & (start < end)

    a, b = jnp.where(seen, start // block, 2**30), jnp.where(seen, pl.cdiv(end, block), 0)
    hull = jnp.stack([jnp.minimum(a.min(1), b.max(1)), b.max(1)], -1)[:, None]
    inner = jnp.where(seen, start, 0).max(1), jnp.where(seen, end, 2**30).min(1)
    if n > 1024:
        return jnp.stack([jnp.ones_like(tile), hull[:, 0, 1] - hull[:, 0, 0], *inner], -1), hull

    earlier = seen[:, None] & jnp.tri(rows.shape[1], k=-1, dtype=bool)
    reached = jnp.where(earlier, b[:, None], 0).max(-1)
    ordered = (~seen | (a >= jnp.where(earlier, a[:, None], 0).max(-1))).all(1)
    gaps = ordered & (seen & earlier.any(-1) & (a > reached)).any(1)
    begin = jnp.where(seen, jnp.maximum(a, reached), 0)
    runs = jnp.stack([begin, jnp.where(seen, jnp.maximum(begin, b), 0)], -1)
    runs = jnp.where(gaps[:, None, None], runs, jnp.pad(hull, ((0, 0), (0, rows.shape[1] - 1), (0, 0))))
    count = jnp.where(gaps, rows.shape[1], 1)
    return jnp.stack([count, (runs[..., 1] - runs[..., 0]).sum(1), *inner], -1), runs


def _combine(total: jax.Array, largest: jax.Array, weight: jax.Array) -> jax.Array:
    """Sums of weighted values [splits, ..., D] and of weights, relative to the largest scores -> results [..., D]."""
    share = jnp.exp2(largest - largest.max(0))
    total, weight = (total * share[..., None]).sum(0), (weight * share).sum(0)
    return total / weight[..., None]


def _launch(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bounds: jax.Array,
    visits: jax.Array,
    start: jax.Array,
    end: jax.Array,
    scale: float,
    config: Config,
    interpret: plgpu.InterpretGPUParams | None,
) -> tuple[jax.Array, ...]:
    """(result [N, H, D],), or for splits the float32 (sums, largest scores, sums of weights) of each, packed."""
    K, D = k.shape[1:]
    G = q.shape[1] // K
    tiles, warpgroups, M = start.shape
    block, stages, splits = config.block, config.stages, config.splits
    many_runs = visits.shape[1] > 1
    to_exponent = scale * math.log2(math.e)

    def program(inputs: Any, out_refs: Any, buffers: Any, barriers: Any) -> None:
        q_ref, k_ref, v_ref, bounds_ref, visits_ref, start_ref, end_ref = inputs
        q_smem, k_smem, v_smem, p_smem, flaws = buffers
        q_here, k_here, v_raw, v_here, k_free, v_free, turn = barriers
        # Later tiles first: of a causal prefill they take longest.
        head, tile, split = lax.axis_index("head"), tiles - 1 - lax.axis_index("tile"), lax.axis_index("split")
        warpgroup = lax.axis_index("warpgroup")
        runs, blocks, inner_from, inner_to = (bounds_ref[tile, i] for i in range(4))
        first, last = lax.div(blocks * split, splits), lax.div(blocks * (split + 1), splits)

        def walk(visit: Callable[[Any, Any, Any], Any], carry: Any) -> Any:
            """carry = visit(step, block, carry) for the blocks of this split."""

            def run(i: Any, state: Any) -> Any:
                before, carry = state
                begin = visits_ref[tile, i, 0]
                length = visits_ref[tile, i, 1] - begin
                low, high = jnp.clip(first - before, 0, length), jnp.clip(last - before, 0, length)
                carry = lax.fori_loop(low, high, lambda j, c: visit(before + j - first, begin + j, c), carry)
                return before + length, carry

            if many_runs:
                return lax.fori_loop(0, runs, run, (jnp.int32(0), carry))[1]
            return run(0, (jnp.int32(0), carry))[1]

        def seen_by_all(at: Any) -> Any:
            return (inner_from <= at * block) & ((at + 1) * block <= inner_to)

        def box(i: int) -> tuple[Any, Any]:  # of this warpgroup -> its place in [N, H, D]
            index = (tile * warpgroups + warpgroup) * BOXES + i
            return pl.ds(lax.div(index, G) * BOX, BOX), head * G + lax.rem(index, G)

        def change_turns() -> None:
            if warpgroups > 1 and config.take_turns:
                plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(turn)

        def compute() -> None:
            plgpu.set_max_registers(224, action="increase")
            for i in range(BOXES):
                plgpu.copy_gmem_to_smem(
                    q_ref.at[box(i)], q_smem.at[warpgroup, pl.ds(i * BOX, BOX)], q_here.at[warpgroup]
                )
            row_start, row_end = (
                plgpu.load(ref.at[tile, warpgroup], layout=ROW, optimized=False) for ref in (start_ref, end_ref)
            )
            plgpu.barrier_wait(q_here.at[warpgroup])

            def across(x: jax.Array, width: int) -> jax.Array:
                return lax.broadcast_in_dim(x, (M, width), [0])

            def visit(step: Any, at: Any, state: Any) -> Any:
                total, largest, weight = state
                stage = lax.rem(step, jnp.int32(stages))
                whole = seen_by_all(at)

                def scores(acc: Any) -> jax.Array:
                    plgpu.wgmma(acc, q_smem.at[warpgroup], k_smem.at[stage].T)
                    change_turns()
                    return acc[...]

                def masked() -> jax.Array:
                    plgpu.barrier_wait(v_here.at[stage])
                    flaw = plgpu.load(flaws.at[stage], layout=COLUMN, optimized=False)
                    slot = plgpu.broadcasted_iota(jnp.int32, (M, block), 1, layout=WGMMA) + at * block
                    seen = (slot >= across(row_start, block)) & (slot < across(row_end, block))
                    return jnp.where(seen, x + lax.broadcast_in_dim(flaw, (M, block), [1]), -jnp.inf)

                plgpu.barrier_wait(k_here.at[stage])
                x = pl.run_scoped(scores, plgpu.ACC((M, block), jnp.float32))
                plgpu.barrier_arrive(k_free.at[stage])
                x = lax.cond(whole, lambda: x, masked)
                new_largest = jnp.maximum(largest, x.max(axis=1) * to_exponent)
                p = jnp.exp2(x * to_exponent - across(new_largest, block))
                decay = jnp.exp2(largest - new_largest)
                weight = weight * decay + p.sum(axis=1)
                total = total * across(decay, D)
                p = p.astype(q.dtype)

                pl.when(whole)(lambda: plgpu.barrier_wait(v_here.at[stage]))
                change_turns()
                total = _accumulate(total, p, p_smem, v_smem.at[stage], interpret is not None)
                plgpu.barrier_arrive(v_free.at[stage])
                return total, new_largest, weight

            state = (
                plgpu.layout_cast(jnp.zeros((M, D), jnp.float32), WGMMA),
                plgpu.layout_cast(jnp.full((M,), LOWEST, jnp.float32), ROW),
                plgpu.layout_cast(jnp.zeros((M,), jnp.float32), ROW),
            )
            pl.when(warpgroup == 1)(change_turns)
            total, largest, weight = walk(visit, state)
            pl.when(warpgroup == 0)(change_turns)
            if splits > 1:
                for ref, x in zip(out_refs, (total, largest, weight), strict=True):
                    ref[split, head, tile, warpgroup] = x
                return
            empty = row_start >= row_end  # such a row has seen what its neighbours see whole
            total = jnp.where(across(empty, D), 0.0, total / across(jnp.where(empty, 1.0, weight), D))
            q_smem[warpgroup] = total.astype(q.dtype)
            plgpu.commit_smem()
            for i in range(BOXES):
                plgpu.copy_smem_to_gmem(q_smem.at[warpgroup, pl.ds(i * BOX, BOX)], out_refs[0].at[box(i)])
            plgpu.wait_smem_to_gmem(0)

        def load() -> None:
            plgpu.set_max_registers(56, action="decrease")

            def visit(step: Any, at: Any, _: None) -> None:
                stage = lax.rem(step, jnp.int32(stages))
                slots = pl.ds(at * block, block)

                def values_to(arrived: Any) -> None:
                    plgpu.copy_gmem_to_smem(v_ref.at[slots, head], v_smem.at[stage], arrived)

                def values_without_flaws() -> None:
                    values_to(v_raw)
                    plgpu.barrier_wait(v_raw)
                    _move_flaws(v_smem.at[stage], flaws.at[stage], swizzle // 2)
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(v_here.at[stage])

                pl.when(step >= stages)(lambda: plgpu.barrier_wait(k_free.at[stage]))
                plgpu.copy_gmem_to_smem(k_ref.at[slots, head], k_smem.at[stage], k_here.at[stage])
                pl.when(step >= stages)(lambda: plgpu.barrier_wait(v_free.at[stage]))
                whole = seen_by_all(at)
                pl.when(whole)(lambda: values_to(v_here.at[stage]))
                pl.when(~whole)(values_without_flaws)

            walk(visit, None)

        pl.when(warpgroup < warpgroups)(compute)
        pl.when(warpgroup == warpgroups)(load)

    swizzle = 128 if D % 64 == 0 else 64
    transforms: Any = plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle)  # type: ignore[abstract]
    tiled = functools.partial(plgpu.SMEM, dtype=q.dtype, transforms=transforms)
    buffers = (
        tiled((warpgroups, M, D)),
        tiled((stages, block, D)),
        tiled((stages, block, D)),
        tiled((warpgroups, M, block)) if interpret else None,
        plgpu.SMEM((stages, block), jnp.float32),
    )
    barriers = (
        plgpu.Barrier(num_arrivals=BOXES, num_barriers=warpgroups),
        plgpu.Barrier(num_barriers=stages),
        plgpu.Barrier(),
        plgpu.Barrier(num_barriers=stages),
        plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
        plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
        plgpu.Barrier(num_arrivals=warpgroups),
    )
    packed = (splits, K, tiles, warpgroups, M)
    out_type = (
        [jax.ShapeDtypeStruct(q.shape, q.dtype)]
        if splits == 1
        else [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((*packed, D), packed, packed)]
    )

    def attention_kernel(*refs: Any) -> None:
        run = functools.partial(program, refs[:7], refs[7:])
        pl.run_scoped(run, buffers, barriers, collective_axes="warpgroup")

    return plgpu.kernel(
        attention_kernel,
        out_type=out_type,
        # Programs that run together read the same head, which the L2 cache then holds.
        grid=(splits, K, tiles),
        grid_names=("split", "head", "tile"),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(q, k, v, bounds, visits, start, end)


def _move_flaws(v: Any, flaws: Any, columns: int) -> None:
    """Replaces what is not finite in a block of values by 0, and notes its slots.

    A weight of 0 does not silence a NaN in V. Added to the scores, it reaches exactly the rows that see it.
    """
    for half in range(v.shape[0] // 64):
        slots = pl.ds(half * 64, 64)
        worst = plgpu.layout_cast(jnp.zeros((64,), jnp.float32), ROW)
        for at in range(0, v.shape[1], columns):
            part = v.at[slots, pl.ds(at, columns)]
            x = plgpu.load(part, layout=WGMMA, optimized=False)
            finite = jnp.abs(x.astype(jnp.float32)) < jnp.inf
            worst = worst + jnp.where(finite, 0.0, 1.0).sum(axis=1)
            part[...] = jnp.where(finite, x, jnp.zeros_like(x))
        flaws[slots] = jnp.where(worst > 0, jnp.nan, 0.0)


def _accumulate(total: jax.Array, p: jax.Array, p_smem: Any, v: Any, interpreted: bool) -> jax.Array:
    """total + p @ v. The interpreter multiplies what lies in shared memory only, and knows no run_state."""
    if not interpreted:
        return pl.run_state(lambda acc: plgpu.wgmma(acc, p, v))(plgpu.ACC.init(total))
    p_smem = p_smem.at[lax.axis_index("warpgroup")]
    p_smem[...] = p
    plgpu.commit_smem()

    def product(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, p_smem, v)
        return acc[...]

    return total + pl.run_scoped(product, plgpu.ACC((total.shape[0], total.shape[1]), jnp.float32))
