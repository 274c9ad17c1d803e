"""Speeds of kernels compared with the chip's limits and other libraries."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vlcache_jax.benchmarks.floor import seconds
from vlcache_jax.benchmarks.gpu.checks import contract, link_arrays
from vlcache_jax.benchmarks.gpu.plan import GpuCase, GpuPlan, Row, kernel_of
from vlcache_jax.pallas_kernels import Work, attention, dispatch, link
from vlcache_jax.pallas_kernels.shapes import AttentionShape, LinkShape

JAXS = "jax.experimental.pallas.ops.gpu.attention_mgpu"
SLOWER = 20  # XLA on a GPU is about this many times slower
BESIDE_XLA = ("cold 4096", "stage 512 of 20480", "decode 1 x 20480", "decode 64 x 4096", "vision, windows")
L2_CACHE = 50 * 2**20  # bytes of an H100's or H200's


def times_for(operations: int, traffic: int) -> int:
    """Return the number of runs that take about 50 ms on an H200."""
    return max(1, min(1000, int(0.05 / max(operations / 5e14, traffic / 3e12, 5e-6))))


def ceiling(plan: GpuPlan) -> Iterator[GpuCase]:
    yield GpuCase("matrix product", functools.partial(_matrix_rate, plan))
    yield GpuCase("copy", functools.partial(_copy_rate, plan))
    yield GpuCase("small kernels", functools.partial(_small_kernels, plan))


def _matrix_rate(plan: GpuPlan) -> Row:
    size = 256 if plan.rehearse else 8192
    x, w = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in range(2))
    took = seconds(lambda x, w: (x @ w) * size**-0.5, x, w, times=20, repeats=plan.repeats)
    return {"ms": 1e3 * took, "TFLOP/s": 2 * size**3 / took / 1e12}


def _copy_rate(plan: GpuPlan) -> Row:
    x = jnp.zeros(2**20 if plan.rehearse else 2**29, jnp.float32)
    took = seconds(lambda x: x + 1, x, times=20, repeats=plan.repeats)
    return {"ms": 1e3 * took, "TB/s": 2 * x.nbytes / took / 1e12}


def _small_kernels(plan: GpuPlan) -> Row:
    """Measure the cost of a launch: a chain of kernels that each wait for the one before and do next to nothing."""
    x, count = jnp.zeros((8, 4096), jnp.bfloat16), 100

    def chain(x: jax.Array) -> jax.Array:
        for _ in range(count):
            x = jax.lax.optimization_barrier(jnp.roll(x, 1, axis=1) + 1)
        return x

    run = jax.jit(chain)
    jax.block_until_ready(run(x))
    took = []
    for _ in range(1 + 4 * plan.repeats):
        start = time.perf_counter()
        jax.block_until_ready(run(x))
        took.append((time.perf_counter() - start) / count)
    return {"us a kernel": 1e6 * statistics.median(took)}


def speed(plan: GpuPlan) -> Iterator[GpuCase]:
    for n in (64,) if plan.rehearse else (4096, 20480):
        heads = n, 32, 8, 128
        yield GpuCase(f"causal {n}", functools.partial(_time_causal, plan, heads, plan.implementation), ("attention",))
        if not plan.rehearse:
            yield GpuCase(f"causal {n}, cuDNN", functools.partial(_time_causal, plan, heads, "cudnn"))
            if not plan.portable:  # this kernel is written for Hopper
                yield GpuCase(f"causal {n}, {JAXS}, float16", functools.partial(_time_causal, plan, heads, JAXS))
        yield GpuCase(f"causal {n}, torch", functools.partial(_time_torch, plan, heads))
    for shape in plan.shapes():
        name = f"attention, {shape.name}, D {shape.D}"
        kernels = (kernel_of(shape),)
        yield GpuCase(name, functools.partial(time_attention, plan, shape, plan.implementation), kernels)
        if shape.has_pages and shape.paged().shared:
            time_apart = functools.partial(time_attention, plan, shape, plan.implementation, shared=False)
            yield GpuCase(f"{name}, each request apart", time_apart, kernels)
        if shape.name in BESIDE_XLA:
            yield GpuCase(f"{name}, XLA", functools.partial(time_attention, plan, shape, "xla"))
    for case in plan.links()[-1:]:  # the largest: smaller ones stay in the L2 cache
        for implementation in (plan.implementation, "xla"):
            name = f"link {case.T} tokens{', XLA' * (implementation == 'xla')}"
            yield GpuCase(name, functools.partial(_time_link, plan, case, implementation), ("link",))


def _rates(took: float, operations: int, traffic: int) -> Row:
    return {"ms": 1e3 * took, "TFLOP/s": operations / took / 1e12, "TB/s": traffic / took / 1e12}


def time_attention(
    plan: GpuPlan, shape: AttentionShape, implementation: str, config: Any = None, *, shared: bool = True
) -> Row:
    options: dict[str, Any] = {"implementation": implementation}
    step = contract(shape)
    if config is not None:
        from vlcache_jax.pallas_kernels.attention import mosaic_gpu

        step = mosaic_gpu.paged_attention if shape.has_pages else mosaic_gpu.attention
        interpret = dispatch.interpreter(dispatch.Choice("attention", shape.name, implementation, "measured"))
        options = {"scale": shape.D**-0.5, "config": config, "interpret": interpret}
    step = functools.partial(step, **options)
    slower = SLOWER if implementation == "xla" else 1
    times = 1 if plan.rehearse else times_for(slower * shape.operations(), slower * shape.bytes())
    if not shape.has_pages:
        q, k, v, start, end = shape.arrays()

        def plain_turn(carry: Any, k: jax.Array, v: jax.Array) -> Any:
            q, start, end = carry
            return step(q, k, v, start, end), start, end

        took = seconds(plain_turn, (q, start, end), k, v, times=times, repeats=plan.repeats)
        return _rates(took, shape.operations(), shape.bytes())

    # Every iteration reads other pages, so that none finds its own in the cache.
    q, k, v = shape.paged_arrays()
    pages, copies = shape.paged().pages, 2 if plan.rehearse else 1 + 3 * L2_CACHE // (k.nbytes + v.nbytes)
    work = shape.work(implementation, shared=shared, **({"tile": config.tile, "small": config.tile} if config else {}))
    place, _ = work.config.places["tables"]
    lists = np.tile(work.buffer, (copies, 1))
    lists[:, place] += pages * np.arange(copies, dtype=np.int32)[:, None]

    def turn(carry: Any, k: jax.Array, v: jax.Array) -> Any:
        q, count, lists = carry
        return step(q, k, v, Work(lists[count % copies], work.config)), count + 1, lists

    k, v = (jnp.tile(x, (copies, 1, 1)) for x in (k, v))
    took = seconds(turn, (q, jnp.int32(0), jnp.asarray(lists)), k, v, times=times, repeats=plan.repeats)
    return _rates(took, shape.operations(), shape.bytes())


def _time_link(plan: GpuPlan, case: LinkShape, implementation: str) -> Row:
    k_pool, v_pool, *rest = link_arrays(case)
    write = functools.partial(link, implementation=implementation)
    times = 1 if plan.rehearse else 200
    took = seconds(
        lambda pools, *rest: write(*pools, *rest), (k_pool, v_pool), *rest, times=times, repeats=plan.repeats
    )
    return _rates(took, 0, case.bytes())


def _causal_cost(shape: tuple[int, int, int, int]) -> tuple[int, int]:
    n, heads, kv_heads, width = shape
    return 2 * n * (n + 1) * heads * width, 2 * 2 * n * (heads + kv_heads) * width


def _time_causal(plan: GpuPlan, shape: tuple[int, int, int, int], implementation: str) -> Row:
    n, heads, kv_heads, width = shape
    q, k, v = (
        jax.random.normal(jax.random.key(i), (n, h, width), jnp.bfloat16)
        for i, h in enumerate((heads, kv_heads, kv_heads))
    )
    if implementation == "cudnn":

        def step(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return jax.nn.dot_product_attention(q[None], k[None], v[None], is_causal=True, implementation="cudnn")[0]

        args: tuple[jax.Array, ...] = (q, k, v)
    elif implementation == JAXS:
        from jax.experimental.pallas.ops.gpu import attention_mgpu

        config = attention_mgpu.TuningConfig(block_q=64, block_kv=128, max_concurrent_steps=2, causal=True)

        def step(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return attention_mgpu.attention(q, k, v, config)

        args = tuple(x[None].astype(jnp.float16) for x in (q, k, v))  # it supports float16 only, in jax 0.11.2
    else:
        step = functools.partial(attention, implementation=implementation)
        args = q, k, v, jnp.zeros(n, jnp.int32), jnp.arange(n, dtype=jnp.int32) + 1
    operations, traffic = _causal_cost(shape)
    took = seconds(step, *args, times=1 if plan.rehearse else times_for(operations, traffic), repeats=plan.repeats)
    return _rates(took, operations, traffic)


def _time_torch(plan: GpuPlan, shape: tuple[int, int, int, int]) -> Row:
    import torch

    n, heads, kv_heads, width = shape
    device = "cpu" if plan.rehearse else "cuda"
    q, k, v = (torch.randn(1, h, n, width, dtype=torch.bfloat16, device=device) for h in (heads, kv_heads, kv_heads))

    def run() -> None:
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def synchronize() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    operations, traffic = _causal_cost(shape)
    times = 1 if plan.rehearse else times_for(operations, traffic)
    run()
    measured = []
    for _ in range(plan.repeats):
        synchronize()
        start = time.perf_counter()
        for _ in range(times):
            run()
        synchronize()
        measured.append((time.perf_counter() - start) / times)
    return _rates(statistics.median(measured), operations, traffic)
