"""Attention as a Mosaic GPU kernel for Hopper, driven by a list of items.

The query heads of a group read the same keys, so their rows are packed along M. The unit of packing is a *box*: eight
rows of one query head, which one bulk copy (TMA) moves between `[R, H, D]` and shared memory. The boxes of an item's
head are numbered octet by octet, then query head by query head (`box = octet * group + g`). Eight of them fill the 64
rows that a warpgroup multiplies, so a group of any size packs, and nothing is transposed outside the kernel.

An *item* is a run of boxes and a range of pages of keys that they visit (`work.py`). Programs are few and stay: each
does its items one after the other. One warpgroup loads queries and pages ahead, also those of the items to come; the
others compute with a running softmax. A page is masked only on a side that some row does not see completely. An item
gives results, or sums that `mosaic_gpu_merge` brings together.

Values are finite (both contracts say so): a weight of 0 silences them, and nothing is cleaned here.
"""

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from vlcache_jax.pallas_kernels.attention.mosaic_gpu_merge import WIDTH, merge
from vlcache_jax.pallas_kernels.attention.work import (
    BOX,
    BOX0,
    BOXES,
    COLUMNS,
    DIRECT,
    EIGHT,
    FROM,
    HEAD,
    INNER_FROM,
    INNER_TO,
    PAGE,
    PARTIAL,
    TABLE,
    TO,
    Lists,
    Work,
    WorkConfig,
    check_cut,
    part_of_group,
    seen_by_work,
    tiles_of_rows,
)

M = BOX * EIGHT
MULTIPROCESSORS = 132  # multiprocessors of an H100 or H200
SHARED_MEMORY = 232_448  # bytes of shared memory that a program may use there
# jax 0.12 links kernels with nvJitLink; ptxas then ignores that warpgroups take more registers than others (C7504).
# Three warpgroups then have 168 each, too few for the scores of 64 rows and 128 slots.
SPLITS_REGISTERS = jax.__version_info__ < (0, 12)
# Largest score of a row that has seen nothing; finite, because differences of it are taken.
LOWEST = float(jnp.finfo(jnp.float32).min)

TUNED = pathlib.Path(__file__).with_name("tuned.json")

WGMMA = plgpu.Layout.WGMMA
ROW = WGMMA.reduce(1)
ACC = functools.partial(plgpu.ACC, dtype=jnp.float32)


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Parameters of the Hopper attention kernel.

    Attributes:
      tile: Maximum number of boxes of an item: 8 or 16, for one or two warpgroups that compute and share loaded blocks.
      block: Slots of a page that are loaded and multiplied at once, 64 or 128.
      stages: Blocks of K and of V in flight.
      take_turns: With two warpgroups, one multiplies while the other computes its softmax.
      programs: Number of programs that share the items.

    Raises:
      ValueError: A number is out of range.
    """

    tile: int = 16
    block: int = PAGE
    stages: int = 2
    take_turns: bool = True
    programs: int = MULTIPROCESSORS

    def __post_init__(self) -> None:
        if self.tile not in (EIGHT, 2 * EIGHT) or self.block not in (64, PAGE) or min(self.stages, self.programs) < 2:
            raise ValueError(
                f"config must have a tile of 8 or 16, a block of 64 or {PAGE}, and 2 stages and programs or more, "
                f"got {self}"
            )

    @property
    def warpgroups(self) -> int:
        return self.tile // EIGHT

    def queries(self, width: int) -> int:
        """Return for how many items shared memory holds the queries at once, 1 or 2.

        Raises:
          ValueError: It does not hold those of one item.
        """
        queries, keys = 2 * self.tile * BOX * width, 2 * self.block * width
        room = SHARED_MEMORY - 2048 - 2 * self.stages * keys  # barriers, and what Mosaic adds
        if room < queries:
            raise ValueError(f"config must fit into {SHARED_MEMORY} bytes of shared memory at D = {width}, got {self}")
        return min(2, room // queries)


def default_config(n: int, heads: int, kv_heads: int, width: int, *, decode: bool = False) -> AttentionConfig:
    """Return the fastest measured configuration of these heads for the next larger N.

    It comes from `TUNED` if there is an entry up to four times as large. Otherwise, requests with few packed rows get
    one warpgroup and many pages in flight.
    """
    tuned = _tuned().get((heads, kv_heads, width, decode), ())
    measured = {rows: config for rows, config in tuned if n <= rows <= 4 * n}
    if measured:
        return measured[min(measured)]
    group = heads // kv_heads
    if group <= EIGHT and (decode or n * group <= M):
        return AttentionConfig(tile=EIGHT, stages=3)
    return AttentionConfig() if SPLITS_REGISTERS else AttentionConfig(block=64, stages=4)


def is_tuned_here(entry: Mapping[str, Any]) -> bool:
    """Return whether an entry of `TUNED` applies: registers could be split where it was measured exactly if they can
    here. registers could be split, or could not, where it was measured, as here.
    """
    return entry.get("splits registers") is SPLITS_REGISTERS


@functools.cache
def _tuned() -> dict[tuple[int, int, int, bool], list[tuple[int, AttentionConfig]]]:
    """Return (H, K, D, decode) -> (N, fastest configuration), as written by `benchmarks.gpu`, without entries that do
    not apply here.
    """
    table: dict[tuple[int, int, int, bool], list[tuple[int, AttentionConfig]]] = {}
    if TUNED.exists():
        for entry in filter(is_tuned_here, json.loads(TUNED.read_text())["rows"]):
            key = entry["H"], entry["K"], entry["D"], entry.get("decode", False)
            table.setdefault(key, []).append((entry["N"], AttentionConfig(**entry["config"])))
    return table


def work_config(
    rows: int,
    requests: int,
    pages: int,
    heads: int,
    kv_heads: int,
    width: int,
    *,
    decode: bool,
    shared: bool = True,
    programs: int | None = None,
) -> WorkConfig:
    """Return how to cut work for `paged_attention`.

    Args:
      rows, requests, pages: See `WorkConfig`.
      heads, kv_heads, width: H, K, D.
      decode: True if requests have one row each.
      shared: True if prefixes may be shared; rows that visit them together fill large items.
      programs: None uses the number of `default_config`.
    """
    config = default_config(rows, heads, kv_heads, width, decode=decode and not shared)
    group = part_of_group(heads // kv_heads, config.tile, rows)
    programs = programs or config.programs
    return WorkConfig(
        rows=rows,
        requests=requests,
        pages=pages,
        box=BOX,
        group=group,
        heads=heads // group,
        tile=config.tile,
        small=config.tile,
        shared=shared,
        programs=programs,
        pieces=max(4, programs // (heads // group) + 3),
    )


def check(q: jax.Array) -> None:
    """Raise NotImplementedError, with the reason, for a case that the kernel does not support."""
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"mosaic_gpu multiplies bfloat16 and float16, got q in {q.dtype}")
    if q.shape[2] > 128:
        raise NotImplementedError(f"mosaic_gpu supports head widths up to 128, got {q.shape[2]}")


# Inner jits: a program that calls the same case for each of its layers compiles one kernel.
@functools.partial(jax.jit, static_argnames=("packed", "scale", "config", "interpret"))
def paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    work: Work,
    end: jax.Array | None = None,
    *,
    packed: bool = False,
    scale: float,
    config: AttentionConfig | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """Compute attention over pages.

    Args:
      q: `[N, H, D]`, rows of a step; if `packed`, in the packed order of `work`.
      k, v: `[S, K, D]`, a pool of pages; V is finite. The pool is copied only if D is no multiple of 32.
      work: Made with a configuration of `work_config` for H, K and D.
      end: `[N]`, one past the last logical slot that each row sees, if it is smaller than in the work list.
      packed: Queries stand in the packed order of `work`.
      scale: Factor of the scores.
      config: Parameters of the kernel; None is `default_config`.
      interpret: Runs the kernel in the CPU's interpreter (jax 0.12 or later) instead of compiling it.

    Returns:
      `[N, H, D]`; rows that see nothing are 0.

    Raises:
      ValueError: The work was cut for other arguments.
    """
    check_cut(work.config, q, k, packed=packed, tiles=(EIGHT, 2 * EIGHT))
    cut, N, (_, H, D) = work.config, work.config.rows, q.shape
    config = config or default_config(N, H, k.shape[1], D, decode=cut.tile == EIGHT)
    config = dataclasses.replace(config, tile=cut.tile, programs=cut.programs)
    q, k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, -D % 32))) for x in (q, k, v))
    seen, lists = seen_by_work(work, end), Lists.of_work(cut)
    outputs = _Outputs(cut.octets * BOX, WIDTH, cut.partial_boxes, N)
    if not packed:
        q = q.at[work.parts().rows].get(mode="clip")
    results, *partials, out = _launch(q, k, v, work.buffer, seen, lists, outputs, scale, config, interpret)
    return merge(out, results, tuple(partials), work, interpret)[:, :, :D]


@functools.partial(jax.jit, static_argnames=("scale", "config", "interpret"))
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_start: jax.Array,
    k_end: jax.Array,
    *,
    scale: float,
    config: AttentionConfig | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """Implement `vlcache_jax.pallas_kernels.attention` for arguments that it and `check` have checked.

    Args:
      config, interpret: As in `paged_attention`.
    """
    N, H, D = q.shape
    S, K, _ = k.shape
    config = config or default_config(N, H, K, D)
    # Bulk copies take boxes of 8 rows and of 32 or 64 columns. Vision towers have heads of 72 and 80; the padding
    # multiplies zeros.
    q, k, v = (jnp.pad(x, ((0, -len(x) % BOX), (0, 0), (0, -D % 32))) for x in (q, k, v))
    buffer, seen, lists = tiles_of_rows(k_start, k_end, S, K, H // K, config.tile, config.programs)
    outputs = _Outputs(len(q), q.shape[2], 0, 0)
    (out,) = _launch(q, k, v, buffer, seen, lists, outputs, scale, config, interpret)
    return out[:N, :, :D]


class _Outputs(NamedTuple):
    """Sizes of the outputs: packed rows of results and their width, boxes of partials, and rows of results that items
    write to their place. There may be no partials and no such rows.
    """

    rows: int
    width: int
    partial_boxes: int
    direct_rows: int


def _launch(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    buffer: jax.Array,
    seen: jax.Array,
    lists: Lists,
    outputs: _Outputs,
    scale: float,
    config: AttentionConfig,
    interpret: plgpu.InterpretGPUParams | None,
) -> tuple[jax.Array, ...]:
    """Launch the kernel over the items.

    Args:
      q: `[R, H, D]`, packed.
      buffer: int32, with the lists.
      seen: `[2, ...]`, first slot and one past the last of every row of the boxes.

    Returns:
      Results `[R, H, width]`; if there are partials, their float32 sums `[rows, D]`, largest scores and weights
      `[rows]`; if items write results to their place, these results `[direct_rows, H, width]`.
    """
    D = q.shape[2]
    group, tile, block, stages, warpgroups = lists.group, config.tile, config.block, config.stages, config.warpgroups
    of_page = PAGE // block
    queries = config.queries(D)
    per_head = lists.heads // k.shape[1]
    turns = warpgroups > 1 and config.take_turns
    to_exponent = scale * math.log2(math.e)

    def program(inputs: Any, out_refs: Any, buffers: Any, barriers: Any) -> None:
        q_ref, k_ref, v_ref, index_ref, seen_ref = inputs
        out_ref, *partial_refs = out_refs[: 4 if outputs.partial_boxes else 1]
        q_smem, k_smem, v_smem, p_smem = buffers
        q_here, q_free, k_here, v_here, k_free, v_free, turn = barriers
        cta, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
        begin, stop = (index_ref[lists.ctas + cta + i] for i in (0, 1))

        def read(item: Any, *columns: int) -> list[Any]:
            return [index_ref[lists.items + item * COLUMNS + column] for column in columns]

        def box(head: Any, index: Any) -> tuple[Any, Any]:  # its place in [R, H, D]
            return pl.ds(lax.div(index, group) * BOX, BOX), head * group + lax.rem(index, group)

        def do_items(do: Callable[[Any, Any, Any], None]) -> None:
            """Call do(item, place of its queries, blocks before it) for each item."""

            def one(item: Any, step: Any) -> Any:
                first, last = read(item, FROM, TO)
                do(item, lax.rem(item - begin, jnp.int32(queries)), step)
                return step + (last - first) * of_page

            lax.fori_loop(begin, stop, one, jnp.int32(0))

        def take_turn() -> None:
            if turns:
                plgpu.barrier_wait(turn.at[warpgroup])

        def pass_turn() -> None:
            if turns:
                plgpu.barrier_arrive(turn.at[1 - warpgroup])

        def across(x: jax.Array, width: int) -> jax.Array:
            return lax.broadcast_in_dim(x, (M, width), [0])

        def mask(x: jax.Array, needed: Any, seen: Callable[[], jax.Array]) -> jax.Array:
            return lax.cond(needed, lambda: jnp.where(seen(), x, -jnp.inf), lambda: x)

        def compute(item: Any, place: Any, step: Any) -> None:
            box0, first, last, inner_from, inner_to = read(item, BOX0, FROM, TO, INNER_FROM, INNER_TO)
            first, last = first * of_page, last * of_page
            rows = pl.ds((box0 + warpgroup * EIGHT) * BOX, M)
            start, end = (plgpu.load(seen_ref.at[i, rows], layout=ROW, optimized=False) for i in (0, 1))
            own_q = q_smem.at[place, warpgroup]

            def stage(at: Any) -> Any:
                return lax.rem(step + at - first, jnp.int32(stages))

            def softmax(x: jax.Array, at: Any, total: jax.Array, largest: jax.Array, weight: jax.Array) -> Any:
                """Return (sums, weights of the block, largest score, weight) from the scores of a block and the sums
                before it.
                """
                slot = plgpu.broadcasted_iota(jnp.int32, (M, block), 1, layout=WGMMA)
                x = mask(x, lax.div(at, of_page) < inner_from, lambda: slot >= across(start - at * block, block))
                x = mask(x, lax.div(at, of_page) >= inner_to, lambda: slot < across(end - at * block, block))
                new_largest = jnp.maximum(largest, x.max(axis=1) * to_exponent)
                p = jnp.exp2(x * to_exponent - across(new_largest, block))
                decay = jnp.exp2(largest - new_largest)
                return total * across(decay, D), p.astype(q.dtype), new_largest, weight * decay + p.sum(axis=1)

            def multiply_keys(acc: Any, at: Any) -> None:
                plgpu.wgmma(acc, own_q, k_smem.at[stage(at)].T)

            def multiply_values(acc: Any, at: Any, total: jax.Array, p: jax.Array) -> None:
                if interpret:  # the interpreter multiplies only from shared memory, and starts from 0
                    p_smem[warpgroup] = p
                    plgpu.commit_smem()
                    plgpu.wgmma(acc, p_smem.at[warpgroup], v_smem.at[stage(at)])
                else:
                    acc[...] = total
                    plgpu.wgmma(acc, p, v_smem.at[stage(at)])

            def sums(acc: Any, at: Any, total: jax.Array, pending: int) -> jax.Array:
                x = plgpu.wgmma_accumulator_load(acc, wait_n=pending)
                plgpu.barrier_arrive(v_free.at[stage(at)])
                return total + x if interpret else x

            def scores(acc: Any, at: Any) -> jax.Array:
                x = acc[...]
                plgpu.barrier_arrive(k_free.at[stage(at)])
                return x

            def first_keys(acc: Any) -> jax.Array:
                multiply_keys(acc, first)
                pass_turn()
                return scores(acc, first)

            def visit(at: Any, state: Any) -> Any:
                total, p, largest, weight = state

                def both(s_acc: Any, o_acc: Any) -> Any:
                    plgpu.barrier_wait(v_here.at[stage(at - 1)])
                    plgpu.barrier_wait(k_here.at[stage(at)])
                    take_turn()
                    multiply_values(o_acc, at - 1, total, p)
                    multiply_keys(s_acc, at)
                    pass_turn()
                    new = sums(o_acc, at - 1, total, 1)
                    return scores(s_acc, at), new

                x, total = pl.run_scoped(both, ACC((M, block)), ACC((M, D)))
                return softmax(x, at, total, largest, weight)

            plgpu.barrier_wait(q_here.at[place])
            plgpu.barrier_wait(k_here.at[stage(first)])
            take_turn()
            x = pl.run_scoped(first_keys, ACC((M, block)))
            state = (
                plgpu.layout_cast(jnp.zeros((M, D), jnp.float32), WGMMA),
                plgpu.layout_cast(jnp.full((M,), LOWEST, jnp.float32), ROW),
                plgpu.layout_cast(jnp.zeros((M,), jnp.float32), ROW),
            )
            total, p, largest, weight = lax.fori_loop(first + 1, last, visit, softmax(x, first, *state))

            def last_values(acc: Any) -> jax.Array:
                plgpu.barrier_wait(v_here.at[stage(last - 1)])
                take_turn()
                multiply_values(acc, last - 1, total, p)
                pass_turn()
                return sums(acc, last - 1, total, 0)

            total = pl.run_scoped(last_values, ACC((M, D)))
            empty = start >= end  # such a row has seen all that its neighbors see
            # Read again, as registers are scarce in the loop.
            head, box0, boxes, partial, direct = read(item, HEAD, BOX0, BOXES, PARTIAL, DIRECT)
            boxes = boxes - warpgroup * EIGHT

            def copy_boxes(ref: Any, box0: Any) -> None:
                for i in range(EIGHT):
                    target = ref.at[*box(head, box0 + warpgroup * EIGHT + i), pl.ds(0, D)]
                    copy = functools.partial(plgpu.copy_smem_to_gmem, own_q.at[pl.ds(i * BOX, BOX)], target)
                    pl.when(i < boxes)(copy)

            def write_result() -> None:
                share = jnp.where(empty, 0.0, 1 / jnp.where(empty, 1.0, weight))
                own_q[...] = jnp.where(across(empty, D), 0.0, total * across(share, D)).astype(q.dtype)
                plgpu.commit_smem()
                pl.when(direct < 0)(lambda: copy_boxes(out_ref, box0))
                if outputs.direct_rows:
                    pl.when(direct >= 0)(lambda: copy_boxes(out_refs[-1], lax.div(direct, BOX) * group))
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            def write_partial() -> None:
                rows = pl.ds((partial + warpgroup * EIGHT) * BOX, M)
                total_ref, largest_ref, weight_ref = partial_refs
                total_ref[rows, pl.ds(0, D)] = total
                largest_ref[rows] = jnp.where(empty, LOWEST, largest)
                weight_ref[rows] = jnp.where(empty, 0.0, weight)

            pl.when(partial < 0)(write_result)
            if outputs.partial_boxes:
                pl.when((partial >= 0) & (boxes > 0))(write_partial)
            plgpu.barrier_arrive(q_free.at[place])

        def load(item: Any, place: Any, step: Any) -> None:
            head, box0, table, first, last = read(item, HEAD, BOX0, TABLE, FROM, TO)
            first, last = first * of_page, last * of_page
            kv_head = lax.div(head, per_head)

            def page(at: Any) -> Any:
                at = lax.div(at, of_page)
                return at if lists.tables is None else index_ref[lists.tables + table * lists.pages + at]

            def visit(at: Any, current: Any) -> Any:
                following = page(at + 1)  # one too many at the end; the buffer has room
                stage = lax.rem(step + at - first, jnp.int32(stages))
                slots = pl.ds(current * PAGE + lax.rem(at, of_page) * block, block)
                filled = step + at - first >= stages
                pl.when(filled)(lambda: plgpu.barrier_wait(k_free.at[stage]))
                plgpu.copy_gmem_to_smem(k_ref.at[slots, kv_head], k_smem.at[stage], k_here.at[stage])
                pl.when(filled)(lambda: plgpu.barrier_wait(v_free.at[stage]))
                plgpu.copy_gmem_to_smem(v_ref.at[slots, kv_head], v_smem.at[stage], v_here.at[stage])
                return following

            pl.when(item - begin >= queries)(lambda: plgpu.barrier_wait(q_free.at[place]))
            for i in range(tile):
                target = q_smem.at[place, i // EIGHT, pl.ds(i % EIGHT * BOX, BOX)]
                plgpu.copy_gmem_to_smem(q_ref.at[box(head, box0 + i)], target, q_here.at[place])
            lax.fori_loop(first, last, visit, page(first))

        def compute_items() -> None:
            plgpu.set_max_registers(240, action="increase")
            pl.when(warpgroup == 1)(pass_turn)
            do_items(compute)
            pl.when(warpgroup == 0)(take_turn)

        def load_items() -> None:
            plgpu.set_max_registers(24, action="decrease")
            do_items(load)

        pl.when(warpgroup < warpgroups)(compute_items)
        pl.when(warpgroup == warpgroups)(load_items)

    swizzled = functools.partial(tiled, dtype=q.dtype, width=D)
    buffers = (
        swizzled((queries, warpgroups, M, D)),
        swizzled((stages, block, D)),
        swizzled((stages, block, D)),
        swizzled((warpgroups, M, block)) if interpret else None,
    )
    barriers = (
        plgpu.Barrier(num_arrivals=tile, num_barriers=queries),
        plgpu.Barrier(num_arrivals=warpgroups, num_barriers=queries),
        plgpu.Barrier(num_barriers=stages),
        plgpu.Barrier(num_barriers=stages),
        plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
        plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
        plgpu.Barrier(num_barriers=warpgroups),
    )
    rows = outputs.partial_boxes * BOX
    partials = [((rows, outputs.width), jnp.float32), ((rows,), jnp.float32), ((rows,), jnp.float32)]
    results = [((n, q.shape[1], outputs.width), q.dtype) for n in (outputs.rows, outputs.direct_rows) if n]
    out_types = [results[0], *(partials if rows else ()), *results[1:]]

    def attention_kernel(*refs: Any) -> None:
        run = functools.partial(program, refs[:5], refs[5:])
        pl.run_scoped(run, buffers, barriers, collective_axes="warpgroup")

    return plgpu.kernel(
        attention_kernel,
        out_type=[jax.ShapeDtypeStruct(*out) for out in out_types],
        grid=(lists.programs,),
        grid_names=("program",),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(q, k, v, buffer, seen)


def tiled(shape: tuple[int, ...], dtype: Any, width: int) -> Any:
    """Return a spec of shared memory that matrix products read and bulk copies fill, for rows that are `width` wide in
    device memory.
    """
    swizzle = 128 if width % 64 == 0 else 64
    transforms: Any = plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle)  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype=dtype, transforms=transforms)
