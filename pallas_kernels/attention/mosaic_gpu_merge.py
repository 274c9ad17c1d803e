"""Mosaic GPU kernel that merges the results of `mosaic_gpu`'s items into the results of a step's rows.

If one item gives all results of a row's head, it has written them to their place (if its rows follow each other in the
step), or they are copied from the packed rows. Partials of the other rows are summed, relative to their largest score.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from vlcache_jax.pallas_kernels.attention.work import Work

WIDTH = 128  # of packed rows and of partials: one number for each thread of a program
LOADS = 16  # rows of partials that are loaded at once
ENOUGH = 4096  # programs that keep a device busy
LOWEST = float(jnp.finfo(jnp.float32).min)


def merge(
    out: jax.Array,
    packed: jax.Array,
    partials: tuple[jax.Array, ...],
    work: Work,
    interpret: plgpu.InterpretGPUParams | None,
) -> jax.Array:
    """Return the results of the rows of a step.

    Args:
      out: `[N, H, 128]`, with the results that items have written to their place.
      packed: `[R, H, 128]`, results of the other items.
      partials: float32 `[rows, 128]`, `[rows]`, `[rows]` of items: weighted sums of values, largest scores as exponents
        of 2, and sums of weights relative to them, 0 for a row that sees nothing.

    Returns:
      `[N, H, 128]`; rows that see nothing are 0.
    """
    cut = work.config
    N, heads, group, box = cut.rows, cut.heads, cut.group, cut.box
    R, H, _ = packed.shape
    per = max(part for part in range(1, heads + 1) if heads % part == 0 and (part == 1 or N * heads >= part * ENOUGH))
    ahead = max(1, LOADS // group)
    first = {name: place.start for name, (place, _) in cut.places.items()}
    of_head = plgpu.Layout.WG_STRIDED((WIDTH,), 1)

    def like(x: Any) -> Any:
        return plgpu.layout_cast(jnp.broadcast_to(x, (WIDTH,)), of_head)

    def merge_kernel(packed_ref: Any, total_ref: Any, largest_ref: Any, weight_ref: Any, index: Any, out: Any) -> None:
        row, head0 = lax.axis_index("row"), lax.axis_index("heads") * per
        place = index[first["unpack"] + row]

        def columns(head: Any, count: int = 1) -> Any:
            return pl.ds(head * (group * WIDTH), count * group * WIDTH)

        def entry(head: Any) -> Any:  # the first of this head
            return index[first["merge_first"] + row * heads + head]

        def copy(head: Any, count: int) -> None:
            shape, at = (count * group * WIDTH,), columns(head, count)
            vector = next(n for n in (8, 4, 2, 1) if count * group % n == 0)
            layout = plgpu.Layout.WG_STRIDED(shape, vector)

            def result() -> None:
                out[row, at] = plgpu.load(packed_ref.at[place, at], layout=layout, optimized=False)

            def nothing() -> None:
                out[row, at] = plgpu.layout_cast(jnp.zeros(shape, packed.dtype), layout)

            pl.when((place >= 0) & (place < R))(result)
            pl.when(place >= R)(nothing)

        def write_sum(head: Any) -> None:
            begin, stop = entry(head), entry(head + 1)

            def add(state: Any, source: Any, value: Any, there: Any) -> Any:
                total, largest, weight = state
                high = like(jnp.where(there, largest_ref[source], LOWEST))
                new = jnp.maximum(largest, high)
                decay, share = jnp.exp2(largest - new), jnp.exp2(high - new)
                part = like(jnp.where(there, weight_ref[source], 0.0))
                return total * decay + value * share, new, weight * decay + part * share

            def more(i: Any, states: Any) -> Any:
                at = [begin + i * ahead + j for j in range(ahead)]
                # An index beyond the last one repeats the last, with weight 0.
                boxes = [index[first["merge"] + lax.min(x, stop - 1)] for x in at]
                sources = [[source + g * box for g in range(group)] for source in boxes]
                values = [[plgpu.load(total_ref.at[x], layout=of_head, optimized=False) for x in xs] for xs in sources]
                for x, xs, of_groups in zip(at, sources, values, strict=True):
                    states = [add(*of_group, x < stop) for of_group in zip(states, xs, of_groups, strict=True)]
                return states

            empty = like(jnp.float32(0)), like(jnp.float32(LOWEST)), like(jnp.float32(0))
            states = lax.fori_loop(0, pl.cdiv(stop - begin, ahead), more, [empty] * group)
            for g, (total, _, weight) in enumerate(states):
                result = jnp.where(weight == 0, 0.0, total / weight)
                out[row, pl.ds((head * group + g) * WIDTH, WIDTH)] = result.astype(packed.dtype)

        def one(head: Any) -> None:
            none = entry(head) == entry(head + 1)
            pl.when(none)(lambda: copy(head, 1))
            pl.when(~none)(lambda: write_sum(head))

        if per == 1:
            one(head0)
            return
        none = entry(head0) == entry(head0 + per)
        pl.when(none)(lambda: copy(head0, per))
        pl.when(~none)(lambda: lax.fori_loop(head0, head0 + per, lambda head, _: one(head), None))

    out_ref = jax.new_ref(out.reshape(N, H * WIDTH))
    plgpu.kernel(
        merge_kernel,
        grid=(N, heads // per),
        grid_names=("row", "heads"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(packed.reshape(R, H * WIDTH), *partials, work.buffer, out_ref)
    return jax.freeze(out_ref).reshape(N, H, WIDTH)
