"""The parts of the start, from `import` to the first repeat, on the shipped model.

    python -m vlcache_jax.benchmarks.start --out benchmarks/results/start_cpu.json

Each run is a process of its own, one after the other: some with nothing on disk, as many with programs on disk. The
repeat comes at once: what is compiled in the background has had no time. Medians.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from vlcache_jax.progress import Progress
from vlcache_jax.study.report import environment, publish

PARTS = ("import", "open", "first answer", "first repeat")


def run_parts() -> None:
    """One run, in this process; prints the seconds of each part as JSON."""
    times = [time.perf_counter()]
    from vlcache_jax import LLM, SamplingParams
    from vlcache_jax.assets import PICTURES, TINY_VQA

    times.append(time.perf_counter())
    content = [{"type": "image", "path": PICTURES / "picture.png"}, {"type": "text", "text": "What is at C2?"}]
    params = SamplingParams(max_tokens=16, temperature=0)
    with LLM(TINY_VQA, use_tqdm=False) as llm:
        times.append(time.perf_counter())
        for _ in range(2):
            [output] = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
            times.append(time.perf_counter())
    if output.cache.images[0].match != "exact":
        raise ValueError(f"a repeat must hit exactly, got {output.cache}")
    seconds = [after - before for before, after in itertools.pairwise(times)]
    print(json.dumps({"seconds": seconds, "torch": "torch" in sys.modules}))


def measure(processes: int, out: pathlib.Path | None) -> None:
    """Prints the table and writes it to `out`, if given."""
    groups: dict[str, list[dict[str, Any]]] = {"nothing on disk": [], "programs on disk": []}
    settings = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", f"from {__spec__.name} import run_parts; run_parts()"]
    with Progress("starting", 2 * processes) as bar:
        for _ in range(processes):
            with tempfile.TemporaryDirectory(prefix="vlcache-start-") as cache:
                for group in groups.values():
                    done = subprocess.run(
                        command, env=settings | {"XDG_CACHE_HOME": cache}, stdout=subprocess.PIPE, text=True, check=True
                    )
                    group.append(json.loads(done.stdout))
                    bar.update()
    rows = []
    for name, group in groups.items():
        parts = [statistics.median(run["seconds"][part] for run in group) for part in range(len(PARTS))]
        total = [sum(run["seconds"][:3]) for run in group]
        rows.append(
            {"start": name}
            | {f"{part} s": seconds for part, seconds in zip(PARTS, parts, strict=True)}
            | {"to the first answer s": statistics.median(total), "spread s": max(total) - min(total)}
            | {"torch imported": any(run["torch"] for run in group)}
        )
    head = environment("jax", "transformers", "torch") | {"processes": processes, "load": os.getloadavg()[0]}
    publish("The parts of the start", rows, head, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path)
    arguments = parser.parse_args()
    measure(arguments.processes, arguments.out)
