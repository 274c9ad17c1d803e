"""Kernels against the reference, on the chip."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vlcache_jax.benchmarks.gpu.plan import GpuCase, GpuPlan, Row, kernel_of
from vlcache_jax.pallas_kernels import attention, link, paged_attention
from vlcache_jax.pallas_kernels.checks import CHECKS, PORTABLE, Check
from vlcache_jax.pallas_kernels.shapes import AttentionShape, LinkShape

TOLERANCE = 0.04  # of the root mean square of a row's results: weights and results are rounded to bfloat16


def check(plan: GpuPlan) -> Iterator[GpuCase]:
    for shape in plan.shapes():
        run = functools.partial(_check_attention, plan, shape)
        yield GpuCase(f"attention, {shape.name}, D {shape.D}", run, (kernel_of(shape),))
    for case in plan.links():
        yield GpuCase(f"link {case.T} tokens", functools.partial(_check_link, plan, case), ("link",))
    for kernel, corners in CHECKS.items():
        if plan.portable and kernel not in PORTABLE:
            continue
        for corner in corners[-1:] if plan.rehearse else corners:
            run = functools.partial(_check_corner, plan, corner)
            yield GpuCase(f"{kernel}, corner: {corner.name}", run, (kernel,))


def _check_attention(plan: GpuPlan, shape: AttentionShape) -> Row:
    plain = shape.arrays()
    args: tuple[Any, ...] = (*shape.paged_arrays(), shape.work(plan.implementation)) if shape.has_pages else plain
    run = jax.jit(functools.partial(contract(shape), implementation=plan.implementation))
    out = run(*args)
    error = _error(shape, plain, out)
    again = bool((out == run(*args)).all())
    if not (error < TOLERANCE and again):
        raise ValueError(
            f"{shape.name}: error must be below {TOLERANCE} and repeated results bit-identical, got {error} and "
            f"{'identical' if again else 'different'} results"
        )
    return {"error": error, "bit-equal": again}


def contract(shape: AttentionShape) -> Callable[..., jax.Array]:
    return paged_attention if shape.has_pages else attention


def _error(shape: AttentionShape, args: tuple[jax.Array, ...], out: jax.Array) -> float:
    """Return the largest difference from float32 of rows spread over the case, by the root mean square of the row."""
    q, k, v, start, end = args
    rows = np.unique(np.linspace(0, shape.N - 1, min(shape.N, 48)).astype(int))
    group = shape.H // shape.K

    @jax.jit
    def exact(q: jax.Array, k: jax.Array, v: jax.Array, start: jax.Array, end: jax.Array) -> jax.Array:
        product = functools.partial(jnp.einsum, precision="highest", preferred_element_type=jnp.float32)
        scores = product("kgd,skd->kgs", q.reshape(shape.K, group, -1).astype(jnp.float32), k.astype(jnp.float32))
        slot = jnp.arange(len(k))
        scores = jnp.where((slot >= start) & (slot < end), scores * shape.D**-0.5, -jnp.inf)
        weights = jnp.where(start < end, jax.nn.softmax(scores, -1), 0)
        return product("kgs,skd->kgd", weights, v.astype(jnp.float32)).reshape(shape.H, -1)

    def error(n: int) -> float:
        want = exact(q[n], k, v, start[n], end[n])
        scale = jnp.sqrt(jnp.mean(want**2))  # 0 for an empty row, whose result must be 0
        return float(jnp.nan_to_num(jnp.abs(want - out[n].astype(jnp.float32)) / scale, nan=0.0, posinf=jnp.inf).max())

    if not bool(jnp.isfinite(out).all()):
        return float("inf")
    return max(map(error, rows.tolist()))


def link_arrays(case: LinkShape) -> tuple[Any, ...]:
    keys = jax.random.split(jax.random.key(0), 4)
    specs = case.specs()
    k, v, data = (
        jax.random.normal(key, s.shape, s.dtype) for key, s in zip(keys, jax.tree.leaves(specs[:3]), strict=False)
    )
    slot = jnp.arange(case.T, dtype=jnp.int32) + (case.S - case.T) // 2
    angle = jax.random.uniform(keys[3], specs[4].shape) * 6
    return k, v, [[data]], slot, jnp.cos(angle).astype(specs[4].dtype), jnp.sin(angle).astype(specs[4].dtype)


def _check_link(plan: GpuPlan, case: LinkShape) -> Row:
    args = link_arrays(case)
    got = jax.jit(functools.partial(link, implementation=plan.implementation))(*args)
    wide = jax.tree.map(lambda x: x if x.dtype == jnp.int32 else x.astype(jnp.float32), args)
    want = jax.jit(functools.partial(link, implementation="xla"))(*wide)
    equal = all(bool((g == w.astype(g.dtype)).all()) for g, w in zip(got, want, strict=True))
    if not equal:
        raise ValueError(f"keys and values of {case} must equal the rounded float32 results of XLA, got different ones")
    return {"error": 0.0, "bit-equal": equal}


def _check_corner(plan: GpuPlan, corner: Check) -> Row:
    return {"error": corner.error(plan.implementation), "bit-equal": True}  # or it raises
