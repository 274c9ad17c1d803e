"""Runner of an engine in its own environment: `python -P harness.py ENGINE.py JOBS.json RESULTS.json`.

It imports nothing of this package, only Pillow and psutil, and must run on Python 3.11. It loads the engine's file by
its path (see `engines`). Child processes of the engine import this file again, and then it does nothing.
"""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import sys
import time
from typing import Any

import psutil
from PIL import Image


def processes() -> list[psutil.Process]:
    """Return this process and all of its descendants."""
    own = psutil.Process()
    return [own, *own.children(recursive=True)]


def cpu_seconds() -> float:
    """Return the CPU seconds of all processes, including those that have ended."""
    return sum(sum(one.cpu_times()[:4]) for one in processes())


def machine_seconds() -> float:
    """Return the CPU seconds of everything that runs on this machine."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait - times.guest - times.guest_nice


def memory() -> int:
    """Return the bytes of all processes; shared memory counts once (Pss)."""
    return sum(one.memory_full_info().pss for one in processes())


def loaded(request: dict[str, Any]) -> dict[str, Any]:
    """Return the request with its images decoded."""
    return request | {"images": [Image.open(path).convert("RGB") for path in request["images"]]}


def run_step(engine: Any, step: dict[str, Any]) -> dict[str, Any]:
    """Run the requests of a step; see `jobs.JobStep`."""
    calls = [[one] for one in step["requests"]] if step["alone"] else [step["requests"]]
    answers: list[dict[str, Any]] = []
    seconds = cpu = 0.0
    for call in calls:
        if step["forget"]:
            engine.forget()
        requests = [loaded(one) for one in call]
        gc.collect()
        before, start = cpu_seconds(), time.perf_counter()
        answers += engine.answer(requests, step["reuse"], step["logprobs"])
        seconds += time.perf_counter() - start
        cpu += cpu_seconds() - before
        engine.settle()
    return {"seconds": seconds, "cpu": cpu, "answers": answers}


def run(module: Any, task: dict[str, Any]) -> dict[str, Any]:
    """Open the engine and run all steps that it supports; see `jobs.Task`."""
    engine = module.ENGINE(task["model"], task["dtype"], task["options"])
    opened = time.time() - task["begun"]
    run_step(engine, task["first"])
    start = {"open": opened, "first answer": time.time() - task["begun"], "memory": memory()}
    steps = [(number, step) for number, step in enumerate(task["steps"]) if step["reuse"] in module.REUSE]
    begin = time.perf_counter()
    engine.warm(list(dict.fromkeys(step["reuse"] for _, step in steps)))
    start["warm-up"] = time.perf_counter() - begin
    before, begin = machine_seconds() - cpu_seconds(), time.perf_counter()
    found = {str(number): run_step(engine, step) for number, step in steps}
    others = (machine_seconds() - cpu_seconds() - before) / (time.perf_counter() - begin)
    end = {"memory": memory(), "processes": len(processes())}
    engine.close()
    versions = {name: importlib.metadata.version(name) for name in module.PACKAGES}
    # names only, because the paths are specific to this machine
    preloaded = [os.path.basename(path) for path in os.environ.get("LD_PRELOAD", "").split(":") if path]
    result = {"versions": versions, "python": sys.version.split()[0], "preloaded": preloaded}
    return result | {"start": start, "end": end, "others": others, "steps": found}


def load(engine: pathlib.Path) -> Any:
    """Import the file as a module."""
    spec = importlib.util.spec_from_file_location("peer_engine", engine)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    engine, jobs, results = map(pathlib.Path, sys.argv[1:])
    content = run(load(engine), json.loads(jobs.read_text(encoding="utf-8")))
    results.write_text(json.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    main()
