"""Attention as a Mosaic GPU kernel for every NVIDIA GPU since Ampere, driven by the list of items of `mosaic_gpu`.

A program has one warpgroup, which loads and computes. Each of its four warps multiplies 16 of the 64 packed rows
(`fragments`), so a row's scores, weights and sums stay in one warp's registers. Queries and results do not pass through
shared memory. Keys and values alternate in a ring of a few blocks of 64 slots (`ring`). The ring is small enough that
two programs fit on a multiprocessor: one computes weights while the other multiplies. The pool is viewed as [S, K * D];
a block holds a head's columns.

Masks, running softmax, empty rows and partials are as in `mosaic_gpu`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

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
from vlcache_jax.pallas_kernels.chips import RESERVED, Chip, chip_at_hand
from vlcache_jax.pallas_kernels.fragments import DEPTH, M, as_left, load_boxes, multiply, right, store_boxes, sums
from vlcache_jax.pallas_kernels.ring import Ring

BLOCK = 64  # slots that are loaded and multiplied at once
OF_PAGE = PAGE // BLOCK
TOGETHER = 2  # programs on a multiprocessor: their registers leave no room for more
PLACES = 4  # maximum places of the ring: more do not hide more latency
LOWEST = float(jnp.finfo(jnp.float32).min)  # as in `mosaic_gpu`


@dataclasses.dataclass(frozen=True)
class AttentionMmaConfig:
    """Parameters of the portable attention kernel.

    Attributes:
      places: Places of the ring.
      swizzle: Bytes in which columns of shared memory are swizzled: 32 are 16 columns, those of one product.
      bulk: TMA copies; otherwise threads do.
      programs: Number of programs that share the items.
    """

    places: int
    swizzle: int
    bulk: bool
    programs: int


def default_config(width: int, chip: Chip | None = None, programs: int | None = None) -> AttentionMmaConfig:
    """Return as many places as let two programs run on a multiprocessor.

    Args:
      width: D, a multiple of 16.
      chip: None is the chip in use.
      programs: None is as many as run at once.
    """
    chip = chip or chip_at_hand()
    room = chip.shared_memory // TOGETHER - RESERVED - (RESERVED if chip.has_bulk_copies else 0)  # for barriers
    places = min(PLACES, room // (2 * BLOCK * width))
    # TMA moves wide rows faster; copies by threads, 16 bytes each, do not depend on it.
    swizzles = (128, 64, 32) if chip.has_bulk_copies else (32,)
    swizzle = next(size for size in swizzles if 2 * width % size == 0)
    return AttentionMmaConfig(places, swizzle, chip.has_bulk_copies, programs or TOGETHER * chip.multiprocessors)


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
    """Return how to cut work for `paged_attention`, with the arguments of `mosaic_gpu.work_config`.

    Decoding rows are cut like others.
    """
    group = part_of_group(heads // kv_heads, EIGHT, rows)
    programs = programs or default_config(_whole(width)).programs
    return WorkConfig(
        rows=rows,
        requests=requests,
        pages=pages,
        box=BOX,
        group=group,
        heads=heads // group,
        tile=EIGHT,
        small=EIGHT,
        shared=shared,
        programs=programs,
        pieces=max(4, programs // (heads // group) + 3),
    )


def check(q: jax.Array) -> None:
    """Raise NotImplementedError, with the reason, for a case that the kernel does not support."""
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"mosaic_gpu_mma multiplies bfloat16 and float16, got q in {q.dtype}")
    if q.shape[2] > WIDTH:
        raise NotImplementedError(f"mosaic_gpu_mma supports head widths up to {WIDTH}, got {q.shape[2]}")


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
    config: AttentionMmaConfig | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """Compute attention over pages, with the arguments, result and errors of `mosaic_gpu.paged_attention`.

    `work` is made with this module's `work_config`. The pool is copied only if D is no multiple of 16.
    """
    check_cut(work.config, q, k, packed=packed, tiles=(EIGHT,))
    cut, N, D = work.config, work.config.rows, q.shape[2]
    q, k, v = (_padded(x) for x in (q, k, v))
    config = dataclasses.replace(config or default_config(q.shape[2]), programs=cut.programs)
    seen, lists = seen_by_work(work, end), Lists.of_work(cut)
    if not packed:
        q = q.at[work.parts().rows].get(mode="clip")
    sizes = cut.octets * BOX, cut.partial_boxes, -(-N // BOX) * BOX
    results, *partials, out = _launch(q, k, v, work.buffer, seen, lists, sizes, scale, config, interpret)
    return merge(out[:N], results, tuple(partials), work, interpret)[:, :, :D]


@functools.partial(jax.jit, static_argnames=("scale", "config", "interpret"))
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_start: jax.Array,
    k_end: jax.Array,
    *,
    scale: float,
    config: AttentionMmaConfig | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """Implement `vlcache_jax.pallas_kernels.attention` for arguments that it and `check` have checked.

    Args:
      config, interpret: As in `paged_attention`.
    """
    N, H, D = q.shape
    S, K, _ = k.shape
    q, k, v = (_padded(x) for x in (q, k, v))
    q = jnp.pad(q, ((0, -N % BOX), (0, 0), (0, 0)))
    k, v = (jnp.pad(x, ((0, -S % PAGE), (0, 0), (0, 0))) for x in (k, v))  # nothing is read beyond an array
    config = config or default_config(q.shape[2])
    buffer, seen, lists = tiles_of_rows(k_start, k_end, S, K, H // K, EIGHT, config.programs)
    (out,) = _launch(q, k, v, buffer, seen, lists, (len(q), 0, 0), scale, config, interpret)
    return out[:N, :, :D]


def _whole(width: int) -> int:
    """Return a head's width, rounded up to a multiple of a product's depth."""
    return -(-width // DEPTH) * DEPTH


def _padded(x: jax.Array) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, 0), (0, _whole(x.shape[2]) - x.shape[2])))


def _launch(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    buffer: jax.Array,
    seen: jax.Array,
    lists: Lists,
    sizes: tuple[int, int, int],
    scale: float,
    config: AttentionMmaConfig,
    interpret: plgpu.InterpretGPUParams | None,
) -> tuple[jax.Array, ...]:
    """Launch the kernel over the items.

    Args:
      q: `[R, H, D]`, packed.
      buffer: int32, with the lists.
      seen: `[2, ...]`, first slot and one past the last of every row of the boxes.
      sizes: Packed rows of results, boxes of partials, and rows of results that items write to their place; the last
        two may be 0.

    Returns:
      Results `[rows, H, WIDTH]` (or D, if there are no partials); if there are partials, their float32 sums
      `[rows, WIDTH]`, largest scores and weights `[rows]`; if items write results to their place, these results
      `[rows, H, WIDTH]`.
    """
    (R, H, D), dtype, group = q.shape, q.dtype, lists.group
    packed_rows, partial_boxes, direct_rows = sizes
    width = WIDTH if direct_rows else D
    per_head = lists.heads // k.shape[1]
    interpreted = interpret is not None
    to_exponent = scale * math.log2(math.e)
    acc, row_layout = sums(dtype), sums(dtype).reduce(1)
    columns = config.swizzle // 2  # columns that lie together in shared memory
    ring = Ring(config.places, 1, bulk=config.bulk)

    def across(x: jax.Array, count: int) -> jax.Array:
        return lax.broadcast_in_dim(x, (M, count), [0])

    def program(inputs: Any, out_refs: Any, blocks_smem: Any, barriers: Any) -> None:
        q_ref, k_ref, v_ref, index_ref, seen_ref = inputs
        out_ref, *partial_refs = out_refs[: 4 if partial_boxes else 1]
        ring.begin(barriers)
        cta = lax.axis_index("program")

        def read(item: Any, *wanted: int) -> list[Any]:
            return [index_ref[lists.items + item * COLUMNS + column] for column in wanted]

        def do_item(item: Any, _: Any) -> None:
            head, box0, table, first, last = read(item, HEAD, BOX0, TABLE, FROM, TO)
            inner_from, inner_to = read(item, INNER_FROM, INNER_TO)
            rows = pl.ds(box0 * BOX, M)
            start, end = (plgpu.load(seen_ref.at[i, rows], layout=row_layout, optimized=False) for i in (0, 1))
            first_block, blocks = first * OF_PAGE, (last - first) * OF_PAGE
            kv_columns = pl.ds(lax.div(head, per_head) * D, D)

            def page(block: Any) -> Any:  # a page of the item, or its last one
                at = lax.min(first + lax.div(block, jnp.int32(OF_PAGE)), last - 1)
                return at if lists.tables is None else index_ref[lists.tables + table * lists.pages + at]

            def fetch(ref: Any, block: Any, own: Any) -> Callable[[Any, Any], None]:
                slots = pl.ds(own * PAGE + lax.rem(block, jnp.int32(OF_PAGE)) * BLOCK, BLOCK)
                return lambda place, copy: copy(ref.at[slots, kv_columns], blocks_smem.at[place])

            # Blocks of keys have even numbers, blocks of values odd ones. While a block's keys are multiplied, the load
            # `places - 1` after them begins; while its values are, the next one.
            ahead = [(config.places - 1 + i) // 2 for i in range(2)]
            sources = [(k_ref, v_ref)[(config.places - 1 + i) % 2] for i in range(2)]
            ring.start(
                2 * blocks,
                [
                    fetch((k_ref, v_ref)[number % 2], jnp.int32(number // 2), page(number // 2))
                    for number in range(config.places - 1)
                ],
            )
            q_here = load_boxes(q_ref, box0, head, group, R // BOX - 1, D, dtype, interpreted=interpreted)

            def keys(place: Any) -> jax.Array:
                x = plgpu.layout_cast(jnp.zeros((M, BLOCK), jnp.float32), acc)
                for at in range(0, D, columns):
                    part = plgpu.load(
                        blocks_smem.at[place, :, pl.ds(at, columns)].T, layout=right(dtype), optimized=False
                    )
                    x = multiply(x, q_here[:, at : at + columns], part, interpreted=interpreted)
                return x

            def values(place: Any, total: jax.Array, p: jax.Array) -> jax.Array:
                for at in range(0, BLOCK, DEPTH):
                    part = plgpu.load(blocks_smem.at[place, pl.ds(at, DEPTH)], layout=right(dtype), optimized=False)
                    total = multiply(total, p[:, at : at + DEPTH], part, interpreted=interpreted)
                return total

            def visit(block: Any, state: Any) -> Any:
                total, largest, weight, pages = state
                following = [page(block + 1 + i) for i in ahead]  # needed in the next iteration
                x = keys(ring.step(2 * block, 2 * blocks, fetch(sources[0], block + ahead[0], pages[0])))
                slot = plgpu.broadcasted_iota(jnp.int32, (M, BLOCK), 1, layout=acc)
                at = first + lax.div(block, jnp.int32(OF_PAGE))
                before = (first_block + block) * BLOCK

                def seen() -> jax.Array:
                    return (slot >= across(start - before, BLOCK)) & (slot < across(end - before, BLOCK))

                x = lax.cond((at < inner_from) | (at >= inner_to), lambda: jnp.where(seen(), x, -jnp.inf), lambda: x)
                new_largest = jnp.maximum(largest, x.max(axis=1) * to_exponent)
                p = jnp.exp2(x * to_exponent - across(new_largest, BLOCK))
                decay = jnp.exp2(largest - new_largest)
                weight = weight * decay + p.sum(axis=1)
                total = total * across(decay, D)
                p = as_left(p, dtype, interpreted=interpreted)
                place = ring.step(2 * block + 1, 2 * blocks, fetch(sources[1], block + ahead[1], pages[1]))
                return values(place, total, p), new_largest, weight, following

            state = (
                plgpu.layout_cast(jnp.zeros((M, D), jnp.float32), acc),
                plgpu.layout_cast(jnp.full((M,), LOWEST, jnp.float32), row_layout),
                plgpu.layout_cast(jnp.zeros((M,), jnp.float32), row_layout),
                [page(i) for i in ahead],
            )
            total, largest, weight, _ = lax.fori_loop(0, blocks, visit, state)
            empty = start >= end  # such a row has seen all that its neighbors see
            # Read again, as registers are scarce in the loop.
            head, box0, boxes, partial, direct = read(item, HEAD, BOX0, BOXES, PARTIAL, DIRECT)

            def write_result() -> None:
                share = jnp.where(empty, 0.0, 1 / jnp.where(empty, 1.0, weight))
                found = jnp.where(across(empty, D), 0.0, total * across(share, D))

                def store(ref: Any, box0: Any) -> None:
                    store_boxes(found, ref, box0, boxes, head, group, dtype, interpreted=interpreted)

                pl.when(direct < 0)(lambda: store(out_ref, box0))
                if direct_rows:
                    pl.when(direct >= 0)(lambda: store(out_refs[-1], lax.div(direct, jnp.int32(BOX)) * group))

            def write_partial() -> None:
                rows = pl.ds(partial * BOX, M)
                total_ref, largest_ref, weight_ref = partial_refs
                total_ref[rows, pl.ds(0, D)] = total
                largest_ref[rows] = jnp.where(empty, LOWEST, largest)
                weight_ref[rows] = jnp.where(empty, 0.0, weight)

            pl.when(partial < 0)(write_result)
            if partial_boxes:
                pl.when(partial >= 0)(write_partial)

        lax.fori_loop(index_ref[lists.ctas + cta], index_ref[lists.ctas + cta + 1], do_item, None)

    transforms: Any = (
        plgpu.TilingTransform((8, columns)),  # type: ignore[abstract]
        plgpu.SwizzleTransform(config.swizzle),  # type: ignore[abstract]
    )
    blocks_smem = plgpu.SMEM((config.places, BLOCK, D), dtype=dtype, transforms=transforms)
    rows = partial_boxes * BOX
    partials = [((rows, width), jnp.float32), ((rows,), jnp.float32), ((rows,), jnp.float32)]
    results = [((n, H, width), dtype) for n in (packed_rows, direct_rows) if n]
    out_types = [results[0], *(partials if rows else ()), *results[1:]]

    def attention_kernel(*refs: Any) -> None:
        pl.run_scoped(functools.partial(program, refs[:5], refs[5:]), blocks_smem, ring.barriers())

    S, K, _ = k.shape
    return plgpu.kernel(
        attention_kernel,
        out_type=[jax.ShapeDtypeStruct(*out) for out in out_types],
        grid=(lists.programs,),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )(q, k.reshape(S, K * D), v.reshape(S, K * D), buffer, seen)
