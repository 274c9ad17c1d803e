"""Host time of a step: rows, their work lists, and submitting both; and the part of it before the first layer.

    uv run python -m research.host --out benchmarks/results/host.json

The case is Qwen3-VL-8B without its weights, because only shapes matter. Every part is timed separately, as medians, on
one thread.
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
import numpy as np

from research.compiled import abstract_runner
from vlcache_jax.benchmarks.compression import drawn_counts
from vlcache_jax.benchmarks.floor import MODELS
from vlcache_jax.compress.parse import parse_compressor
from vlcache_jax.device.programs.base import PAGE_BUCKETS, pack
from vlcache_jax.device.programs.window import alike_layers, compressed_work
from vlcache_jax.engine.batching import Prefill, prefill_steps
from vlcache_jax.engine.completions import RequestMetrics
from vlcache_jax.engine.pages import Pages
from vlcache_jax.engine.request import Planned, Request, Sequence
from vlcache_jax.engine.scheduler import Scheduler
from vlcache_jax.inputs.layout import ImageRef, make_layout
from vlcache_jax.pallas_kernels import PAGE, make_work, shared_prefixes
from vlcache_jax.request_options import ResolvedOptions
from vlcache_jax.reuse.policies import Policy, Scheduled, full_prefill, make_plan
from vlcache_jax.reuse.schedule import Schedule
from vlcache_jax.reuse.selection import parse_policy
from vlcache_jax.study import report

MODEL = "Qwen3-VL-8B"
COMPRESSED = 8192  # tokens of prompts of which a tenth is kept
_NO_PROMPT: Any = None  # no prompt report
SIDE = 32  # merged patches per side of an image
TEXT = 5


def sequence(images: int, text: int, layers: int, policy: Policy | None = None) -> Sequence:
    """Return a prompt of images, cached under `policy`, and of text after them."""
    size = SIDE * SIDE
    refs = [ImageRef(str(i), (1, 2 * SIDE, 2 * SIDE), size, _no_pixels) for i in range(images)]
    starts = [TEXT + i * (size + 2) for i in range(images)]
    tokens = np.zeros(TEXT + images * (size + 2) + text, np.int32)
    layout = make_layout(tokens, starts, refs, 2, ["approximate"] * images if policy is not None else None)
    plan = full_prefill(layout, layers) if policy is None else make_plan(policy, layout, layers)
    options = ResolvedOptions(reuse=policy or parse_policy("off"))
    request = Request(_NO_PROMPT, tokens, tuple(starts), tuple(refs), (None,) * images, "", RequestMetrics())
    return Sequence(Planned(request, options, layout, plan), 10)


def _no_pixels() -> Any:
    raise AssertionError("nothing is computed")


def prefills(sequences: list[Sequence], runner: Any) -> list[Prefill]:
    """Return the prefill chunks that they compute together."""
    layers = runner.config.text.num_layers
    pages = Pages(runner.num_slots // PAGE - 1)
    scheduler = Scheduler(pages, runner.buckets.max_sequences, runner.buckets.max_rows, layers)
    for one in sequences:
        scheduler.add(one)
    scheduler.admit()
    return scheduler.next_group(scheduler.prefilling)


def work_lists(step: Any, config: Callable[[int], Any], count: int | None = None) -> list[Any]:
    """Return the work lists of a step's layers, of the first `count` kinds of layers."""
    kinds = dict.fromkeys((bound, is_chosen) for bound, _, is_chosen in step.leaving)
    return [step.work(*kind, config(kind[0])) for kind in [*kinds][:count]]


def milliseconds(work: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):  # the first repeat fills caches
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times[1:])


def measure(repeats: int) -> list[dict[str, Any]]:
    """Return one row for each case."""
    runner = abstract_runner(MODELS[MODEL])
    layers = runner.config.text.num_layers
    falling = Schedule(tuple(int(120 * 0.9**layer) for layer in range(layers)), "any", "any", allow_other_model=True)
    cases = {
        "prefill, 8192 rows of 8 images": [sequence(8, 0, layers)],
        "prefill, 8192 rows of 64 texts": [sequence(0, 123, layers) for _ in range(64)],
        f"19 known images, a schedule of {layers} layers": [sequence(19, 40, layers, Scheduled(falling))],
    }
    rows = []
    # Prefills: the rows of a step, its work lists, and the transfer to the device.
    for name, sequences in cases.items():
        group = prefills(sequences, runner)
        step = prefill_steps(group, runner.buckets, runner.num_slots, layers)[0]
        works = functools.partial(work_lists, step, runner.shapes.work_config)
        made = works()
        packed = pack(step.rows, runner.buckets.max_rows)
        parts: dict[str, Callable[[], Any]] = {
            "rows ms": functools.partial(prefill_steps, group, runner.buckets, runner.num_slots, layers),
            "work lists ms": works,
            "handing over ms": functools.partial(jax.device_put, (packed, made)),
        }
        took = {part: milliseconds(work, repeats) for part, work in parts.items()}
        # The other lists are made while the device computes.
        first = milliseconds(functools.partial(works, 1), repeats)
        first += milliseconds(functools.partial(jax.device_put, (packed, made[:1])), repeats)
        took |= {"together ms": sum(took.values()), "until the first layer ms": took["rows ms"] + first}
        rows.append({"case": name, "arrays": 1 + len(made), **took})
    # A multi-step decode: one work list for all of its steps.
    count, config = 64, runner.shapes.work_config(64, decode=True)
    pages = np.arange(1, 1 + count * 8, dtype=np.int32).reshape(count, 8)
    tables, last = list(pages), np.full(count, 7 * PAGE + 70)

    def window() -> Any:
        shared = shared_prefixes(tables)
        return make_work(np.arange(count), 0 * last, last, tables, config, least=last - 8, shared=shared)

    work, state = window(), np.zeros((count, 14), np.int32)
    took = {
        "rows ms": milliseconds(lambda: np.stack([state[0]] * count), repeats),
        "work lists ms": milliseconds(window, repeats),
        "handing over ms": milliseconds(lambda: jax.device_put((state, work)), repeats),
    }
    rows.append(_window_row("a window of 8 tokens, 64 answers", 2, took))
    # The same for compressed prompts, with equal or adaptive budgets of layers: one work list, or four for all layers.
    config = runner.shapes.work_config(count, True, PAGE_BUCKETS[0])
    for policy in ("postvision", "vl-cache"):
        counts = drawn_counts(parse_compressor(f"{policy}-0.1"), COMPRESSED, layers)
        kept = np.repeat(np.array(counts, np.int32)[:, None], count, 1)
        lists = functools.partial(compressed_work, kept, np.stack([0 * last + 1, 0 * last + 8]), config)
        given = state, *lists(), np.zeros((layers, count, PAGE_BUCKETS[0]), np.int32), kept
        took = {
            "rows ms": milliseconds(lambda: np.stack([state[0]] * count), repeats),
            "work lists ms": milliseconds(lists, repeats),
            "handing over ms": milliseconds(functools.partial(jax.device_put, given), repeats),
        }
        lists_made = len(alike_layers(kept))
        name = f"the same of compressed prompts, {lists_made} work list{'s' * (lists_made > 1)}"
        rows.append(_window_row(name, len(given), took))
    return rows


def _window_row(case: str, arrays: int, took: dict[str, float]) -> dict[str, Any]:
    """Return the row of a multi-step decode, which no layer starts before everything is made."""
    together = sum(took.values())
    return {"case": case, "arrays": arrays, **took, "together ms": together, "until the first layer ms": together}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--out", type=pathlib.Path, help="JSON file")
    arguments = parser.parse_args()
    rows = measure(arguments.repeats)
    report.publish(f"The host's part of a step, {MODEL}", rows, report.environment("jax", "numpy"), arguments.out)


if __name__ == "__main__":
    main()
