"""The portable kernel of attention as XLA compiles it for a CPU: the kernel's own code, over stand-ins for Mosaic GPU.

jax's interpreter looks at each access, which takes a minute for a step of an engine. Here copies are made when they are
issued, and waits do nothing: what races, the interpreter finds; what is computed of which slots is the same. Float32 is
multiplied in full precision, so that an engine's promises hold to its rounding.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from vlcache_jax.pallas_kernels import dispatch, fragments, ring
from vlcache_jax.pallas_kernels.attention import mosaic_gpu_mma

IMPLEMENTATION = "mosaic_gpu_mma_interpreted"
PROGRAMS = 3


class _Stand:
    """A module, with some of its names replaced."""

    def __init__(self, module: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _load(ref: Any, *, layout: Any = None, optimized: bool = True) -> jax.Array:
    transforms = getattr(ref, "transforms", ())
    if transforms and type(transforms[-1]).__name__ == "TransposeTransform":
        return _load(dataclasses.replace(ref, transforms=transforms[:-1])).T
    return ref[...]


def _copy(source: Any, target: Any, *, oob_mode: Any) -> None:
    target[...] = source[...]


_program: list[Any] = []  # the number of the one whose body is traced


def _kernel(body: Callable[..., None], *, out_type: Any, grid: Any, **_: Any) -> Callable[..., Any]:
    def numbered(*refs: Any) -> None:
        _program.append(pl.program_id(0))  # not in a scope, where Pallas does not know it
        body(*refs)
        _program.pop()

    return pl.pallas_call(numbered, out_shape=out_type, grid=grid, interpret=True)


def _merge(out: jax.Array, packed: jax.Array, partials: Any, work: Any, interpret: Any) -> jax.Array:
    """`mosaic_gpu_merge.merge`, in jax."""
    cut, parts = work.config, work.parts()
    place = parts.unpack
    copied = packed.at[place].get(mode="fill", fill_value=0)
    found = jnp.where((place >= 0)[:, None, None], copied, out)
    total, largest, weight = partials
    entry = jnp.arange(len(parts.merge))
    target = jnp.searchsorted(parts.merge_first, entry, side="right") - 1  # row * heads + head
    there = entry < parts.merge_first[-1]
    source = parts.merge[:, None] + jnp.arange(cut.group) * cut.box  # of each query head of the group
    target = jnp.where(there, target, cut.rows * cut.heads)
    count = cut.rows * cut.heads
    high = jax.ops.segment_max(largest[source], target, count + 1)[:count]
    high = jnp.where(jnp.isfinite(high), high, 0)
    share = jnp.exp2(largest[source] - jnp.pad(high, ((0, 1), (0, 0)))[target])
    own = jnp.where(there[:, None], weight[source] * share, 0)
    weights = jax.ops.segment_sum(own, target, count + 1)[:count]
    values = total[source] * share[..., None]
    sums = jax.ops.segment_sum(jnp.where(weight[source][..., None] == 0, 0, values), target, count + 1)[:count]
    merged = jnp.where(weights[..., None] == 0, 0, sums / jnp.where(weights == 0, 1, weights)[..., None])
    merged = merged.reshape(found.shape).astype(found.dtype)
    cut_rows = (parts.merge_first[1:] > parts.merge_first[:-1]).reshape(cut.rows, cut.heads)
    return jnp.where(jnp.repeat(cut_rows, cut.group, axis=1)[..., None], merged, found)


@contextlib.contextmanager
def emulated(chosen: str | None = IMPLEMENTATION) -> Iterator[None]:
    """Attention with `implementation=chosen` is the emulated kernel, in any dtype; all other kernels are XLA's."""
    stands = _Stand(
        plgpu,
        kernel=_kernel,
        load=_load,
        copy_gmem_to_smem=_copy,
        wait_gmem_to_smem=lambda n: None,
        layout_cast=lambda x, layout: x,
        broadcasted_iota=lambda dtype, shape, axis, layout: lax.broadcasted_iota(dtype, shape, axis),
        SMEM=lambda shape, dtype, transforms: pl.MemoryRef(jax.core.ShapedArray(shape, dtype), pl.ANY),
    )
    choose = dispatch.choose

    def choose_emulated(kernel: str, case: str, implementation: str | None, checks: Any) -> dispatch.Choice:
        if implementation != chosen:
            return choose(kernel, case, implementation, checks)
        if kernel in ("attention", "paged_attention"):
            return dispatch.Choice(kernel, case, IMPLEMENTATION, "emulated")
        return choose(kernel, case, "xla", checks)

    config = mosaic_gpu_mma.AttentionMmaConfig(3, 32, False, PROGRAMS)
    with pytest.MonkeyPatch.context() as patch:
        for module in (mosaic_gpu_mma, ring, fragments):
            patch.setattr(module, "plgpu", stands)
        patch.setattr(mosaic_gpu_mma, "lax", _Stand(lax, axis_index=lambda name: _program[-1]))
        patch.setattr(mosaic_gpu_mma, "default_config", lambda *_, **__: config)
        patch.setattr(mosaic_gpu_mma, "merge", _merge)
        patch.setattr(dispatch, "choose", choose_emulated)
        patch.setattr(dispatch, "interpreter", lambda choice: "emulated")
        yield
