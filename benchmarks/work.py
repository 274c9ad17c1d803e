"""What work lists cost on the host, and what they give XLA on its CPU.

    python -m vlcache_jax.benchmarks.work --out work.json

First the time of `make_work` for a step of Qwen3-VL-8B. Then attention of decoding requests, one row each, in pages
against the plain contract, in which their slots lie one after the other; and a step of 64 requests that share their
pages against one in which each has its own. The two take turns, after their results were compared. Medians.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vlcache_jax.benchmarks.shapes import AttentionShape, Seen, cold, questions, requests, stage
from vlcache_jax.pallas_kernels import PAGE, attention, make_work, paged_attention, shared_prefixes, work_config
from vlcache_jax.study import report

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.03}  # of results of standard normal values


def apart(rng: np.random.Generator, n: int, s: int) -> Seen:
    """Decoding requests that have nothing in common, of lengths from a quarter of the longest one up to it."""
    longest = int(s / (0.625 * n))
    lengths = rng.permutation(np.linspace(longest // 4, longest, n).astype(int))
    return Seen(np.arange(n), np.zeros(n, int), lengths.copy(), lengths)


def _step(name: str, n: int, s: int, seen: Callable[[np.random.Generator, int, int], Seen]) -> AttentionShape:
    return AttentionShape(name, n, s, 32, 8, 128, seen, (n, s))


def _decode(name: str, n: int, s: int, seen: Callable[[np.random.Generator, int, int], Seen]) -> AttentionShape:
    return AttentionShape(name, n, s, 12, 4, 64, seen, (n, s))


STEPS = (
    _step("64 decoding requests", 64, 64 * 2560, apart),
    _step("64 decoding requests, one prefix of 16384", 64, 64 * 16640, functools.partial(questions, rows=1)),
    _step("8192 causal rows of 20480", 8192, 20480, cold),
    _step("512 scattered rows of 20480", 512, 20480, stage),
    _step("64 requests x 128 rows of 2048", 8192, 64 * 2048, functools.partial(requests, count=64)),
)
DECODE = (
    _decode("16 requests, 1024 to 4096", 16, 16 * 2560, apart),
    _decode("64 requests, 1024 to 4096", 64, 64 * 2560, apart),
    _decode("64 requests, one prefix of 8192", 64, 64 * 8448, functools.partial(questions, rows=1)),
)


def _ms(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Of functions that take turns; each runs once before."""
    took: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            if repeat:
                took[name].append(1e3 * (time.perf_counter() - start))
    return took


def time_make_work(shape: AttentionShape, implementation: str, repeats: int) -> dict[str, Any]:
    """Milliseconds of one work list, and what is in it."""
    work, case = shape.work(implementation), shape.paged()
    make = functools.partial(make_work, *case[:3], case.tables, work.config, shared=case.shared)
    ms = _ms({"make": make}, repeats)["make"]
    return {
        "step": shape.name,
        "for": implementation,
        "ms": statistics.median(ms),
        "least ms": min(ms),
        "items": int(work.parts().ctas[-1]),
        "kB": work.buffer.nbytes / 1e3,
    }


def time_decoding(shape: AttentionShape, dtype: str, repeats: int) -> dict[str, Any]:
    """Milliseconds of attention of both contracts.

    Raises:
      ValueError: they differ.
    """
    plain, pool, work = shape.arrays(dtype), shape.paged_arrays(dtype), jax.device_put(shape.work("xla"))
    attend = jax.jit(functools.partial(attention, implementation="xla"))
    attend_pages = jax.jit(functools.partial(paged_attention, implementation="xla"))
    difference = float(jnp.abs(attend(*plain) - attend_pages(*pool, work)).max())
    if not difference < TOLERANCE[dtype]:
        raise ValueError(f"{shape.name}: contracts must agree to {TOLERANCE[dtype]} in {dtype}, got {difference}")
    took = _ms({"plain": lambda: attend(*plain), "paged": lambda: attend_pages(*pool, work)}, repeats)
    ms = {name: statistics.median(times) for name, times in took.items()}
    return {
        "requests": shape.name,
        "dtype": dtype,
        "plain ms": ms["plain"],
        "paged ms": ms["paged"],
        "times faster": ms["plain"] / ms["paged"],
        "GB/s": shape.bytes(jnp.dtype(dtype).itemsize) / ms["paged"] / 1e6,
    }


def time_sharing(dtype: str, repeats: int, rows: int = 64, pages: int = 32) -> dict[str, Any]:
    """Milliseconds of attention of a decode step as the engine makes it, on the same pages and on pages of one's own.

    Raises:
      ValueError: rows that share pages get something else than each of them alone.
    """
    number = 1 + np.random.default_rng(0).permutation(rows * pages).astype(np.int32)
    apart = list(number.reshape(rows, pages))
    tables = {"shared": [apart[0]] * rows, "apart": apart, "alone": [apart[0]] * rows}
    q = jax.ShapeDtypeStruct((rows, 12, 64), dtype)
    config = work_config(rows, rows, pages, q, 4, decode=True, implementation="xla")
    pool = ((1 + rows * pages) * PAGE, 4, 64)
    arrays = [jax.random.normal(jax.random.key(i), shape, dtype) for i, shape in enumerate((q.shape, pool, pool))]
    attend = functools.partial(jax.jit(functools.partial(paged_attention, implementation="xla")), *arrays)
    end = np.full(rows, pages * PAGE)
    works = {
        name: make_work(np.arange(rows), 0 * end, end, own, config, shared=shared_prefixes(own) * (name != "alone"))
        for name, own in tables.items()
    }
    works = jax.device_put(works)
    difference = float(jnp.abs(attend(works["shared"]) - attend(works["alone"])).max())
    if not difference < TOLERANCE[dtype]:
        raise ValueError(f"shared pages must give the same to {TOLERANCE[dtype]} in {dtype}, got {difference}")
    took = _ms({name: functools.partial(attend, works[name]) for name in ("shared", "apart")}, repeats)
    ms = {name: statistics.median(times) for name, times in took.items()}
    return {
        "rows": rows,
        "pages": pages,
        "dtype": dtype,
        "own pages ms": ms["apart"],
        "shared pages ms": ms["shared"],
        "times faster": ms["apart"] / ms["shared"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="of attention; work lists are made 20 times as often")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file; two others beside it have decoding")
    arguments = parser.parse_args()
    head = report.environment("jax", "numpy")
    made = [
        time_make_work(shape, implementation, 20 * arguments.repeats)
        for implementation in ("mosaic_gpu", "xla")
        for shape in STEPS
    ]
    report.publish("Making a work list", made, head, arguments.out)
    rows = [time_decoding(shape, dtype, arguments.repeats) for dtype in TOLERANCE for shape in DECODE]
    beside = arguments.out and arguments.out.with_stem(f"{arguments.out.stem}_decode")
    report.publish("Attention of decoding requests, 12/4 heads of 64", rows, head, beside)
    beside = arguments.out and arguments.out.with_stem(f"{arguments.out.stem}_sharing")
    rows = [time_sharing(dtype, arguments.repeats) for dtype in TOLERANCE]
    report.publish("Pages that requests share, 12/4 heads of 64", rows, head, beside)


if __name__ == "__main__":
    main()
