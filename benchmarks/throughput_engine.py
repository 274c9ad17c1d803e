"""An engine of `vlcache bench throughput`, in its own process.

This file runs as a script, with PYTHONPATH at the checkout to measure, which may be another version than this file. It
imports nothing of its own checkout, uses the public API that all versions have, and leaves out figures that a version
does not report. It reads commands and writes results, a line of JSON each; see `throughput.Worker`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import json
import os
import pathlib
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

COUNTERS = (
    "prefill_steps",
    "prefill_rows",
    "padded_prefill_rows",
    "windows",
    "decode_steps",
    "decode_rows",
    "padded_decode_rows",
    "generated_tokens",
    "launches",
    "host_prefill_seconds",
    "host_window_seconds",
)


class StepCounters:
    """Counters around an engine that does not count: its runner's steps, and the times when tokens are chosen.

    The wrapped methods are private; if a version has none of that name, the counter is missing.
    """

    def __init__(self, llm: Any):
        self.counters: dict[str, float] = {}
        self.trace: list[tuple[int, int, int]] = []
        self.times: dict[int, list[float]] = {}  # by the identity of a sequence
        self._sequences: list[Any] = []  # kept alive, so that no other sequence gets the same identity
        self._runner: Any = getattr(llm, "_runner", None)
        decode = ("windows", "decode_steps", "decode_rows", "padded_decode_rows")
        self._wrap(self._runner, "decode", self._decode, decode)
        self._wrap(self._runner, "prefill", self._prefill, ("prefill_steps", "prefill_rows", "padded_prefill_rows"))
        self._wrap(self._runner, "_run", lambda *_: self._add(launches=1), ("launches",))
        self._wrap(_engine(llm), "_choose", self._chosen)

    def clear(self) -> None:
        """Start a new run."""
        self.counters = dict.fromkeys(self.counters, 0)
        self.trace, self.times, self._sequences = [], {}, []

    def _wrap(self, owner: Any, name: str, note: Callable[..., None], counters: tuple[str, ...] = ()) -> None:
        """Wrap a method so that `note` is called with its arguments after it has run."""
        method = getattr(owner, name, None)
        if method is None:
            return
        self.counters |= dict.fromkeys(counters, 0)

        def noted(*args: Any, **options: Any) -> Any:
            result = method(*args, **options)
            note(*args)
            return result

        setattr(owner, name, noted)

    def _add(self, **more: float) -> None:
        for name, count in more.items():
            self.counters[name] += count

    def _decode(self, rows: Any, *tables: Any) -> None:
        size = len(rows.slot)
        count = len(tables[0]) if tables else int((rows.slot < self._runner.num_slots).sum())
        self.trace.append((count, int((rows.k_end - rows.k_start)[:count].sum()), 1))
        self._add(windows=1, decode_steps=1, decode_rows=size, padded_decode_rows=size - count)

    def _prefill(self, step: Any) -> None:
        size = step.bounds[0]
        self._add(prefill_steps=1, prefill_rows=size, padded_prefill_rows=size - step.active[0])

    def _chosen(self, sequences: Any, *_: Any) -> None:
        now = time.perf_counter()
        for sequence in sequences:
            if id(sequence) not in self.times:
                self._sequences.append(sequence)
            self.times.setdefault(id(sequence), []).append(now)


def _engine(llm: Any) -> Any:
    """Return the engine of a version, or None if it has none."""
    return llm.service.engine if hasattr(llm, "service") else getattr(llm, "_engine", None)


class EngineServer:
    """One checkout's engine, which is warmed up and then serves the load.

    Args:
      task: Settings that `throughput.measure` wrote.
    """

    def __init__(self, task: dict[str, Any]):
        import vlcache_jax

        found = pathlib.Path(vlcache_jax.__file__).parent
        if found != pathlib.Path(task["root"]) / "vlcache_jax":
            raise ValueError(f"vlcache_jax must come from {task['root']}, got {found}")
        self._task, self._sampling = task, vlcache_jax.SamplingParams
        self._loop = asyncio.Runner() if task["open"] else None
        if self._loop is not None and not hasattr(vlcache_jax, "AsyncLLM"):
            raise ValueError(f"rate must be None for {task['root']}, which has no AsyncLLM")
        kind = vlcache_jax.AsyncLLM if self._loop is not None else vlcache_jax.LLM
        known = inspect.signature(vlcache_jax.LLM).parameters
        self._llm = self._call(lambda: kind(task["model"], **{k: v for k, v in task["options"].items() if k in known}))
        counts_steps = getattr(self._stats(), "decode_steps", None) is not None
        self._watch = None if counts_steps else StepCounters(self._llm)

    def warm(self, reuse: str) -> dict[str, Any]:
        """Compile what this setting needs and answer a few other prompts."""
        if hasattr(self._llm, "warmup"):
            self._call(lambda: self._llm.warmup(reuse=reuse, verbose=False))
        self._answer(self._task["warm"], reuse)
        return {}

    def run(self, reuse: str) -> dict[str, Any]:
        """Serve the load with an empty cache; return outputs and measurements."""
        self._call(self._llm.reset_mm_cache)
        engine = _engine(self._llm)
        if self._watch is not None:
            self._watch.clear()
        elif hasattr(engine, "trace"):
            engine.trace = []
        before = self._stats()
        start = time.perf_counter()
        outputs, clock = self._answer(self._task["requests"], reuse)
        seconds = time.perf_counter() - start
        after = self._stats()
        counters: dict[str, float]
        trace: list[tuple[int, int, int]] | None
        if self._watch is not None:
            counters, trace = self._watch.counters, self._watch.trace
            clock = clock or [[at - start for at in times] for times in self._watch.times.values()]
        else:
            counters = {name: getattr(after, name) - getattr(before, name) for name in COUNTERS if hasattr(after, name)}
            trace = getattr(engine, "trace", None)
        if not clock and outputs and hasattr(outputs[0].metrics, "inter_token"):
            clock = [list(itertools.accumulate((o.metrics.ttft, *o.metrics.inter_token))) for o in outputs]
        images = [image for output in outputs for image in output.cache.images]
        return {
            "seconds": seconds,
            "tokens": [list(map(int, output.outputs[0].token_ids)) for output in outputs],
            "times": clock,  # for each request, when its tokens came after its arrival; in any order
            "images": len(images),
            "exact": sum(image.match == "exact" for image in images),
            "approximate": sum(image.match == "approximate" for image in images),
            "encoder": sum(image.encoder not in ("computed", "none") for image in images),
            "counters": counters,
            "trace": trace,
        }

    def close(self) -> None:
        """Release everything."""
        self._call(self._llm.close)
        if self._loop is not None:
            self._loop.close()

    def _stats(self) -> Any:
        return self._call(self._llm.stats) if hasattr(self._llm, "stats") else None

    def _call(self, function: Callable[[], Any]) -> Any:
        """Call `function`, in the event loop if there is one, which also awaits its result."""
        if self._loop is None:
            return function()

        async def call() -> Any:
            result = function()
            return await result if inspect.isawaitable(result) else result

        return self._loop.run(call())

    def _answer(self, requests: list[dict[str, Any]], reuse: str) -> tuple[list[Any], list[list[float]]]:
        """Return the last output of each request; with arrivals, also the times of its tokens."""
        prompts = [
            {"prompt": request["prompt"]}
            | ({"multi_modal_data": {"image": request["images"]}} if request["images"] else {})
            for request in requests
        ]
        params = [self._sampling(max_tokens=r["max_tokens"], ignore_eos=True, temperature=0) for r in requests]
        if self._loop is None:
            return self._llm.generate(prompts, params, reuse=reuse, use_tqdm=False), []

        async def one(i: int) -> tuple[Any, list[float]]:
            await asyncio.sleep(requests[i]["arrival"])
            came, times, output = time.perf_counter(), list[float](), None
            async for output in self._llm.generate(prompts[i], params[i], reuse=reuse):
                new = len(output.outputs[0].token_ids) - len(times)
                times += [time.perf_counter() - came] * new
            return output, times

        async def together() -> list[tuple[Any, list[float]]]:
            return await asyncio.gather(*map(one, range(len(requests))))

        outputs, times = zip(*self._loop.run(together()), strict=True)
        return list(outputs), list(times)


@contextlib.contextmanager
def answers() -> Iterator[Any]:
    """Yield the stream of results; all other output goes to stderr."""
    with os.fdopen(os.dup(1), "w") as stream:
        os.dup2(2, 1)
        yield stream


def serve(make: Callable[[dict[str, Any]], Any]) -> None:
    """Execute commands `[method, arguments]` until there are no more; an error is a result, too, and the last one."""
    with answers() as stream:
        try:
            server = make(json.loads(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8")))
            print(json.dumps({}), file=stream, flush=True)
            for line in sys.stdin:
                method, arguments = json.loads(line)
                answer = getattr(server, method)(**arguments)
                print(json.dumps(answer, default=lambda number: number.item()), file=stream, flush=True)
            server.close()
        except Exception as error:
            traceback.print_exc()
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=stream, flush=True)
            sys.exit(1)


if __name__ == "__main__":
    serve(EngineServer)
