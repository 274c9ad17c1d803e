"""Operations on rows as two Mosaic GPU kernels, for every NVIDIA GPU since Ampere.

A program of the norm has one row, which stays in registers between the sum of its squares and the scaling.

A program of the rotation has the queries of four rows and one key-value head, or their key and value. Each warp rotates
the heads of its own row, so a head's norm is a sum within a warp, whatever the numbers of heads are. Heads are copied
row by row, because rows lie anywhere: in the step, among packed queries, in the pool. Absent rows are not copied.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from vlcache_jax.pallas_kernels.copies import Copies
from vlcache_jax.pallas_kernels.link.codec import overflow

WARPS, LANES = 4, 32
ROWS = WARPS  # of a program that rotates
DTYPES = (jnp.bfloat16, jnp.float16)
WIDEST = 16384  # numbers of a row that registers hold


def check_norm(x: jax.Array) -> None:
    """Raise NotImplementedError, with the reason, for a case that the kernel does not support."""
    if x.dtype not in DTYPES:
        raise NotImplementedError(f"mosaic_gpu normalizes bfloat16 and float16, got x in {x.dtype}")
    if x.shape[1] % (WARPS * LANES) or x.shape[1] > WIDEST:
        raise NotImplementedError(
            f"mosaic_gpu normalizes rows whose width is one of the multiples of {WARPS * LANES} up to {WIDEST}, "
            f"got {x.shape[1]}"
        )


def check_rotate(qkv: jax.Array, places: jax.Array | None) -> None:
    """Raise NotImplementedError, with the reason, for a case that the kernel does not support."""
    if qkv.dtype not in DTYPES:
        raise NotImplementedError(f"mosaic_gpu rotates bfloat16 and float16, got {qkv.dtype}")
    if qkv.shape[3] not in (64, 128):
        raise NotImplementedError(f"mosaic_gpu rotates heads of width 64 and 128, got {qkv.shape[3]}")
    if places is not None and len(places) % ROWS:
        raise NotImplementedError(f"mosaic_gpu needs places whose length is a multiple of {ROWS}, got {len(places)}")


# Inner jits: a program that calls the same case for each of its layers compiles one kernel.
@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def norm_residual(
    x: jax.Array,
    delta: jax.Array | None,
    scale: jax.Array,
    *,
    eps: float,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Implement `vlcache_jax.pallas_kernels.norm_residual` for arguments that it and `check_norm` have checked."""
    (N, M), dtype = x.shape, x.dtype
    vector = next(n for n in (8, 4, 2, 1) if M % (WARPS * LANES * n) == 0)
    layout = plgpu.Layout.WG_STRIDED((M,), vector)
    partials = [()] if delta is None or delta.ndim == 2 else [(i,) for i in range(len(delta))]

    def load(ref: Any) -> jax.Array:
        return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

    def norm_kernel(x_ref: Any, *refs: Any) -> None:
        row = lax.axis_index("row")
        scale_ref, *out_refs = refs if delta is None else refs[1:]
        y = load(x_ref.at[row])
        if delta is not None:
            given = functools.reduce(operator.add, [load(refs[0].at[*partial, row]) for partial in partials])
            total = (y + given.astype(dtype).astype(jnp.float32)).astype(dtype)
            out_refs[0][row] = total
            y = total.astype(jnp.float32)
        share = lax.rsqrt(jnp.sum(y * y) / M + eps)
        y *= plgpu.layout_cast(jnp.broadcast_to(share, (M,)), layout)
        out_refs[-1][row] = (y.astype(dtype).astype(jnp.float32) * load(scale_ref)).astype(dtype)

    arrays = (x, scale) if delta is None else (x, delta, scale)
    *total, normed = plgpu.kernel(
        norm_kernel,
        out_type=[jax.ShapeDtypeStruct(x.shape, dtype)] * (len(arrays) - 1),
        grid=(N,),
        grid_names=("row",),
        interpret=interpret,
    )(*arrays)
    return (total[0] if total else x), normed


def rotate_write(
    parts: Sequence[jax.Array],
    cos: jax.Array,
    sin: jax.Array,
    slot: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    bias: jax.Array | None,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
    places: jax.Array | None,
    *,
    eps: float,
    keep: int,
    return_kv: bool,
    bulk: bool = True,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, tuple[jax.Array, jax.Array] | None]:
    """Implement `vlcache_jax.pallas_kernels.rotate_write` for arguments that it and `check_rotate` have checked.

    `bulk`: TMA copies rows; it does so since Hopper.
    """
    angles = jnp.concatenate([cos[:, 0], sin[:, 0]], -1)
    found, new_kv, first = [], [], 0
    for part in parts:
        own_bias = None if bias is None else bias[:, -part.shape[2] :]
        k_pool, v_pool, queries, raw = _rotate_write(
            part, angles, slot, k_pool, v_pool, own_bias, q_norm, k_norm, places,
            first=first, keep=keep, eps=eps, return_kv=return_kv, bulk=bulk, interpret=interpret,
        )  # fmt: skip
        found += queries
        new_kv.append(raw)
        first += len(part)
    if not return_kv:
        return found[0], k_pool, v_pool, None
    halves = zip(*new_kv, strict=True)
    raw_k, raw_v = (of_parts[0] if len(of_parts) == 1 else jnp.concatenate(of_parts) for of_parts in halves)
    return found[0], k_pool, v_pool, (raw_k, raw_v)


@functools.partial(jax.jit, static_argnames=("first", "keep", "eps", "return_kv", "bulk", "interpret"))
def _rotate_write(
    qkv: jax.Array,
    angles: jax.Array,
    slot: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    bias: jax.Array | None,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
    places: jax.Array | None,
    *,
    first: int,
    keep: int,
    eps: float,
    return_kv: bool,
    bulk: bool,
    interpret: plgpu.InterpretGPUParams | None,
) -> tuple[jax.Array, jax.Array, list[jax.Array], list[jax.Array]]:
    """Rotate and write a part, whose rows begin at `first` in the step.

    Returns:
      (k_pool, v_pool, queries, unmodified keys and values); the last two are empty if there are none or they are not
      wanted.
    """
    (N, K, width, D), S, dtype = qkv.shape, len(k_pool), qkv.dtype
    G, half = width - 2, D // 2
    wanted = 0 if G == 0 else keep if places is None else len(places)
    blocks = pl.cdiv(wanted, ROWS)  # of queries, before those of keys and values
    layout = plgpu.Layout.TILED(
        plgpu.Tiling(((WARPS, half), (half // LANES,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
    )
    limit = overflow(dtype)
    copies = Copies(bulk=bulk)
    optional = {"bias": bias, "q_norm": q_norm, "k_norm": k_norm, "places": places if G else None}
    present = {name: array for name, array in optional.items() if array is not None}

    def columns(high: int) -> Any:
        return pl.ds(high * half, half)

    def load(ref: Any) -> jax.Array:
        return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

    def load_row(ref: Any) -> jax.Array:
        x = plgpu.load(ref, layout=layout.reduce(0), optimized=False)
        return lax.broadcast_in_dim(x.astype(jnp.float32), (ROWS, half), [1])

    def rounded(x: jax.Array) -> jax.Array:
        return x.astype(dtype).astype(jnp.float32)

    def normed(halves: list[jax.Array], weight: Any) -> list[jax.Array]:
        a, b = halves
        share = lax.rsqrt((a * a + b * b).sum(axis=1) * (1 / D) + eps)
        share = lax.broadcast_in_dim(share, (ROWS, half), [0])
        return [rounded(rounded(x * share) * load_row(weight.at[columns(high)])) for high, x in enumerate(halves)]

    def rotate_kernel(qkv_ref: Any, angle_ref: Any, slot_ref: Any, *refs: Any) -> None:
        given, rest = dict(zip(present, refs, strict=False)), refs[len(present) :]
        (k_out, v_out), out_refs = rest[:2], rest[2:]
        block, head = lax.axis_index("block"), lax.axis_index("head")

        def read(heads: Any, index: int, place: Any) -> list[jax.Array]:
            """Return both halves of a head of each row, with its bias."""
            halves = [load(heads.at[:, index, columns(high)]) for high in range(2)]
            if "bias" not in given:
                return halves
            biases = [load_row(given["bias"].at[place, columns(high)]) for high in range(2)]
            return [rounded(x + y) for x, y in zip(halves, biases, strict=True)]

        def write(heads: Any, index: int, halves: list[jax.Array]) -> None:
            for high, x in enumerate(halves):
                heads[:, index, columns(high)] = x.astype(dtype)

        def turned(halves: list[jax.Array], angle: Any) -> list[jax.Array]:
            (a, b), (c, s) = halves, [load(angle.at[:, columns(high)]) for high in range(2)]
            return [a * c - b * s, b * c + a * s]

        def fetch(rows: list[Any], at: Any, heads: Any, angle: Any, here: Any) -> None:
            """Copy these heads of rows, and their angles."""
            pairs = [(qkv_ref.at[row, at], heads.at[i]) for i, row in enumerate(rows)]
            copies.fetch([*pairs, *((angle_ref.at[first + row], angle.at[i]) for i, row in enumerate(rows))], here)

        def scoped(program: Callable[..., None], *counts: int) -> None:
            heads = [plgpu.SMEM((ROWS, count, D), dtype) for count in counts]
            pl.run_scoped(program, plgpu.SMEM((ROWS, D), dtype), copies.barrier(2 * ROWS), *heads)

        def queries() -> None:
            begin = block * ROWS
            rows = [given["places"][begin + i] if "places" in given else begin + i for i in range(ROWS)]
            there = [row < keep for row in rows]

            def program(angle: Any, here: Any, heads: Any) -> None:
                own = [lax.min(row, jnp.int32(keep - 1)) for row in rows]
                fetch(own, pl.ds(head * width, G), heads, angle, here)
                found = [read(heads, g, head * width + g) for g in range(G)]
                if "q_norm" in given:
                    found = [normed(halves, given["q_norm"]) for halves in found]
                for g, halves in enumerate(found):
                    write(heads, g, turned(halves, angle))
                copies.commit()
                for i, is_there in enumerate(there):
                    target = out_refs[0].at[begin + i, pl.ds(head * G, G)]
                    pl.when(is_there)(functools.partial(copies.put, heads.at[i], target))
                copies.finish()

            pl.when(functools.reduce(operator.or_, there))(lambda: scoped(program, G))

        def keys() -> None:
            begin = (block - blocks) * ROWS
            rows = [begin + i for i in range(ROWS)]

            def program(angle: Any, here: Any, heads: Any, *raw: Any) -> None:
                own = [lax.min(row, jnp.int32(N - 1)) for row in rows]
                fetch(own, pl.ds(head * width + G, 2), heads, angle, here)
                key, value = (read(heads, i, head * width + G + i) for i in range(2))
                if "k_norm" in given:
                    key = normed(key, given["k_norm"])
                finite = [jnp.abs(x) < limit for x in value]  # see `propagate_nonfinite`
                write(heads, 0, [jnp.where(*x, jnp.nan) for x in zip(finite, turned(key, angle), strict=True)])
                write(heads, 1, [jnp.where(*x, 0.0) for x in zip(finite, value, strict=True)])
                for i, halves in enumerate((key, value) if raw else ()):
                    write(raw[0], i, halves)
                copies.commit()
                for i, row in enumerate(rows):
                    place = slot_ref[first + own[i]]

                    def copy_to(targets: Sequence[Any], source: Any, at: Any, i: int = i) -> None:
                        for j, ref in enumerate(targets):
                            copies.put(source.at[i, j], ref.at[at, head])

                    is_there = row < N
                    stays = is_there & (place >= 0) & (place < S)
                    pl.when(stays)(functools.partial(copy_to, (k_out, v_out), heads, place))
                    if raw:
                        pl.when(is_there)(functools.partial(copy_to, out_refs[-2:], raw[0], row))
                copies.finish()

            scoped(program, 2, *([2] if return_kv else []))

        if blocks:
            pl.when(block < blocks)(queries)
        pl.when(block >= blocks)(keys)

    k_ref, v_ref = jax.new_ref(k_pool), jax.new_ref(v_pool)
    shapes = [(wanted, K * G, D)] * bool(wanted) + [(N, K, D)] * (2 * return_kv)
    outputs = plgpu.kernel(
        rotate_kernel,
        out_type=[jax.ShapeDtypeStruct(shape, dtype) for shape in shapes],
        grid=(blocks + pl.cdiv(N, ROWS), K),
        grid_names=("block", "head"),
        interpret=interpret,
    )(
        qkv.reshape(N, K * width, D),
        angles,
        slot,
        *(x.reshape(-1, D) if name == "bias" else x for name, x in present.items()),
        k_ref,
        v_ref,
    )
    count = len(outputs) - 2 * return_kv
    return jax.freeze(k_ref), jax.freeze(v_ref), outputs[:count], outputs[count:]
