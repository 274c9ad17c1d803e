"""Linking as a Mosaic GPU kernel, for every NVIDIA GPU since Ampere: one pass over memory, in place.

Each program copies a few tokens into shared memory, decodes coded data in registers, rotates the keys, and copies every
token's keys and values from shared memory to its slot, unless the slot is out of range. Before Hopper, which has TMA,
and if shared memory is short, tokens pass through registers alone, one after the other. Programs are small, so that
many run on a multiprocessor and hide each other's latency.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from vlcache_jax.pallas_kernels.chips import RESERVED, Chip
from vlcache_jax.pallas_kernels.link.codec import Codec, overflow

TOKENS = 8  # tokens of a program
WARPS, LANES = 4, 32


def check(k_pool: jax.Array, kept: int | None) -> None:
    """Raise NotImplementedError, with the reason, for a case that the kernel does not support.

    Args:
      kept: Number of tokens that the sources select from; None: tokens lie in their order.
    """
    _, K, D = k_pool.shape
    if k_pool.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"mosaic_gpu links bfloat16 and float16, got k_pool in {k_pool.dtype}")
    if D not in (64, 128):
        raise NotImplementedError(f"mosaic_gpu links heads of width 64 and 128, got {D}")
    if K > 256 // TOKENS:  # maximum rows of a bulk copy
        raise NotImplementedError(f"mosaic_gpu links up to {256 // TOKENS} heads, got {K}")
    if kept is not None and kept % TOKENS:  # a program copies all of its tokens
        raise NotImplementedError(
            f"mosaic_gpu links from buffers whose length is a multiple of {TOKENS} tokens, got {kept}"
        )


def has_room(k_pool: jax.Array, codec: Codec | None, chip: Chip) -> bool:
    """Return whether a multiprocessor has room for the bulk copies of two programs; a single one would wait for
    memory.
    """
    _, K, D = k_pool.shape
    linked, stored = 2 * D * k_pool.dtype.itemsize, 0 if codec is None else 2 * D * codec.bits // 8
    scales = 0 if codec is None else 2 * 4 * (D // codec.group(D))
    angles = 2 * (D // 2) * 4
    return 2 * (TOKENS * K * (linked + stored + scales) + TOKENS * angles + 2 * RESERVED) <= chip.shared_memory


def link(
    k_pool: jax.Array,
    v_pool: jax.Array,
    images: Sequence[Sequence[jax.Array]],
    source: jax.Array | None,
    slot: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    bias: jax.Array | None = None,
    weight: jax.Array | None = None,
    *,
    layer: int,
    codec: Codec | None = None,
    bulk: bool = True,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Implement `vlcache_jax.pallas_kernels.link` for arguments that it and `check` have checked."""
    size = len(slot) // len(images)
    tokens = slice(size) if source is None else source
    for i, buffers in enumerate(images):
        part = slice(i * size, (i + 1) * size)
        scales = None if codec is None else _scale_rows(codec, buffers[1][layer][:, tokens])
        k_pool, v_pool = _link(
            k_pool, v_pool, buffers[0], np.full(1, layer, np.int32), source, scales, slot[part], cos[part], sin[part],
            bias, weight, codec=codec, bulk=bulk, interpret=interpret,
        )  # fmt: skip
    return k_pool, v_pool


def _scale_rows(codec: Codec, buffer: jax.Array) -> jax.Array:
    """Return the scales of keys and values, of `[2, T, K, bytes]`, with those of a program's tokens together.

    Each kind (of K or V, a group, scale or zero) is a row of its own. Built from its rows, this is one operation; a
    transposition would be another one.
    """
    _, T, K, _ = buffer.shape
    pairs = codec.pairs(buffer).reshape(2, T * K, -1)
    pairs = jnp.pad(pairs, ((0, 0), (0, -T * K % (TOKENS * K)), (0, 0)))
    rows = [half[:, i].reshape(-1, TOKENS * K) for half in pairs for i in range(pairs.shape[-1])]
    return jnp.stack(rows, 1).reshape(-1, TOKENS * K)


def _layout(heads: int, width: int) -> Any:
    """Return the layout of `width` columns of some heads in four warps: each warp has full rows if there are enough."""
    rows = math.gcd(heads, WARPS)
    parts = min(WARPS // rows, width // LANES)  # parts of a row
    tiling = plgpu.Tiling(((rows, width), (1, width // parts), (width // parts // LANES,)))
    alike = plgpu.Replicated(WARPS // rows // parts)  # warps that do the same
    warps: tuple[Any, ...] = (-5, -4, alike) if alike.times > 1 else (-5, -4)
    found = mgpu.TiledLayout(tiling, warps, lane_dims=(-2,), vector_dim=-1, _check_canonical=False).canonicalize()
    return plgpu.Layout.TILED(found.tiling, found.warp_dims, found.lane_dims, found.vector_dim)


# An inner jit, to which the layer is an argument: a program that links all layers compiles one kernel.
@functools.partial(jax.jit, static_argnames=("codec", "bulk", "interpret"))
def _link(
    k_pool: jax.Array,
    v_pool: jax.Array,
    data: jax.Array,
    layer: jax.Array,
    source: jax.Array | None,
    scales: jax.Array | None,
    slot: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    bias: jax.Array | None,
    weight: jax.Array | None,
    *,
    codec: Codec | None,
    bulk: bool,
    interpret: plgpu.InterpretGPUParams | None,
) -> tuple[jax.Array, jax.Array]:
    (T,), (S, K, D), dtype = slot.shape, k_pool.shape, k_pool.dtype
    half = D // 2
    # Four heads, one for each warp, are rotated at once. If they are of several tokens, so are the angles.
    rows = K if K % WARPS == 0 or not bulk else WARPS
    if rows != K:
        cos, sin = (jnp.broadcast_to(x, (T, K, half)) for x in (cos, sin))
        bias = None if bias is None else jnp.tile(bias, (TOKENS, 1))
    stored = D if codec is None else D * codec.bits // 8  # columns of a row of `data`
    group = D if codec is None else codec.group(D)
    width = min(half, group)  # columns of one group that are rotated at once
    layout = _layout(K if rows == K else WARPS, width)
    slot = jnp.pad(slot, (0, -T % TOKENS), constant_values=S)
    source = None if source is None else jnp.pad(source, (0, -T % TOKENS))
    if not bulk:  # threads read full programs, including absent tokens
        cos, sin = (jnp.pad(x, ((0, -T % TOKENS), (0, 0), (0, 0))) for x in (cos, sin))
        data = jnp.pad(data, ((0, 0), (0, 0), (0, -data.shape[2] % TOKENS), (0, 0), (0, 0)))
    block = data[0, 0].size // stored  # rows
    limit = overflow(dtype)
    optional = {"source": source, "scales": scales, "bias": bias, "weight": weight}
    present = [name for name, array in optional.items() if array is not None]

    def load(ref: Any) -> jax.Array:
        return plgpu.load(ref, layout=layout, optimized=False)

    def load_column(ref: Any) -> jax.Array:
        x = plgpu.load(ref, layout=layout.reduce(1), optimized=False)
        return lax.broadcast_in_dim(x.astype(jnp.float32), (rows, width), [0])

    def load_row(ref: Any) -> jax.Array:
        x = plgpu.load(ref, layout=layout.reduce(0), optimized=False)
        return lax.broadcast_in_dim(x.astype(jnp.float32), (rows, width), [1])

    def load_angles(ref: Any, i: Any, columns: Any) -> jax.Array:
        if rows == K:
            return load_row(ref.at[i, columns])
        return load(ref.at[pl.ds(i * rows, rows), columns]).astype(jnp.float32)

    def link_kernel(data_ref: Any, layer_ref: Any, slot_ref: Any, cos_ref: Any, sin_ref: Any, *refs: Any) -> None:
        given, (k_out, v_out) = dict(zip(present, refs, strict=False)), refs[len(present) :]

        def program(k_smem: Any, v_smem: Any, angles_smem: Any, here: Any, *coded_smem: Any) -> None:
            k_stored, v_stored, scales_own = coded_smem or (k_smem, v_smem, None)

            def decoded(ref: Any, buffer: int, i: Any, column: int) -> Iterator[jax.Array]:
                """Yield both halves of the keys (buffer 0) or values (1) of one iteration, as float32."""
                some = pl.ds(i * rows, rows)
                for high in range(2):
                    at = column + high * half
                    if codec is None:
                        yield load(ref.at[some, pl.ds(at, width)]).astype(jnp.float32)
                        continue
                    code = load(ref.at[some, pl.ds(at if codec.bits == 8 else column, width)]).astype(jnp.int32)
                    if codec.bits == 4:
                        code = code >> 4 if high else code & 15
                    row = 2 * (buffer * (D // group) + at // group)
                    scale, zero = (load_column(scales_own.at[row + j, some]) for j in range(2))
                    x = code.astype(jnp.float32) * scale + zero
                    if buffer == 0:
                        if weight is not None:
                            x *= load_row(given["weight"].at[pl.ds(at, width)])
                        if bias is not None:
                            heads = pl.ds(0 if rows == K else i * rows, rows)
                            x += load(given["bias"].at[heads, pl.ds(at, width)]).astype(jnp.float32)
                        x = x.astype(dtype).astype(jnp.float32)  # as if it were not coded
                    yield x

            first = lax.axis_index("tokens") * TOKENS
            stored_first = first if source is None else given["source"][first]
            k_first, v_first = ((2 * layer_ref[0] + i) * block + stored_first * K for i in range(2))
            of_angles, of_scales = TOKENS * (1 if rows == K else K), 4 * (D // group)
            own = [
                (cos_ref, first * (of_angles // TOKENS), of_angles),
                (sin_ref, first * (of_angles // TOKENS), of_angles),
                (data_ref, k_first, TOKENS * K),
                (data_ref, v_first, TOKENS * K),
            ]
            if codec is not None:
                own.append((given["scales"], lax.axis_index("tokens") * of_scales, of_scales))
            sources = [ref.at[pl.ds(start, count)] for ref, start, count in own]
            if bulk:
                targets = [*angles_smem, k_stored, v_stored, *([] if codec is None else [scales_own])]
                for source_ref, target in zip(sources, targets, strict=True):
                    plgpu.copy_gmem_to_smem(source_ref, target, here[0])
                plgpu.barrier_wait(here[0])
            else:
                *angles_smem, k_stored, v_stored = sources[:4]
                scales_own = sources[4] if codec is not None else None

            def turn(i: Any, write: Callable[[Any, jax.Array, jax.Array], None]) -> None:
                for column in range(0, half, width):
                    c, s = (load_angles(ref, i, pl.ds(column, width)) for ref in angles_smem)
                    a, b = decoded(k_stored, 0, i, column)
                    turned = a * c - b * s, b * c + a * s
                    for high, value in enumerate(decoded(v_stored, 1, i, column)):
                        finite = jnp.abs(value) < limit  # see `propagate_nonfinite`
                        key = jnp.where(finite, turned[high], jnp.nan).astype(dtype)
                        part = pl.ds(high * half + column, width)
                        write(part, key, jnp.where(finite, value, 0.0).astype(dtype))

            def to_shared(i: Any) -> None:
                def write(part: Any, key: jax.Array, value: jax.Array) -> None:
                    k_smem[pl.ds(i * rows, rows), part], v_smem[pl.ds(i * rows, rows), part] = key, value

                turn(i, write)

            def to_slot(i: Any) -> None:
                place = slot_ref[first + i]

                def write(part: Any, key: jax.Array, value: jax.Array) -> None:
                    k_out[place, :, part], v_out[place, :, part] = key, value

                pl.when((place >= 0) & (place < S))(lambda: turn(i, write))

            one = to_shared if bulk else to_slot
            turns = TOKENS * K // rows
            if codec is None and bulk:
                for i in range(turns):
                    one(i)
            else:  # unrolled, it would compile for half a minute
                lax.fori_loop(0, turns, lambda i, _: one(i), None)
            if not bulk:
                return
            plgpu.commit_smem()
            for i in range(TOKENS):
                place = slot_ref[first + i]

                def copy(i: int = i, place: Any = place) -> None:
                    plgpu.copy_smem_to_gmem(k_smem.at[pl.ds(i * K, K)], k_out.at[place])
                    plgpu.copy_smem_to_gmem(v_smem.at[pl.ds(i * K, K)], v_out.at[place])

                pl.when((place >= 0) & (place < S))(copy)
            plgpu.wait_smem_to_gmem(0)

        if not bulk:
            program(None, None, [], [])
            return
        coded_smem: list[Any] = []
        if codec is not None:
            coded_smem = [plgpu.SMEM((TOKENS * K, stored), jnp.uint8)] * 2
            coded_smem.append(plgpu.SMEM((4 * (D // group), TOKENS * K), jnp.float16))
        pl.run_scoped(
            program,
            *[plgpu.SMEM((TOKENS * K, D), dtype)] * 2,
            [plgpu.SMEM((TOKENS * (1 if rows == K else K), half), cos.dtype)] * 2,
            [plgpu.Barrier(num_arrivals=4 if codec is None else 5)],
            *coded_smem,
        )

    k_ref, v_ref = jax.new_ref(k_pool), jax.new_ref(v_pool)
    plgpu.kernel(
        link_kernel,
        grid=(len(slot) // TOKENS,),
        grid_names=("tokens",),
        interpret=interpret,
    )(
        data.reshape(-1, stored),  # the full array: a slice would be copied before the kernel
        layer,
        slot,
        cos.reshape(-1, half),
        sin.reshape(-1, half),
        *(optional[name] for name in present),
        k_ref,
        v_ref,
    )
    return jax.freeze(k_ref), jax.freeze(v_ref)
