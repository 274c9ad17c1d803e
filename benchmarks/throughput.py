"""Throughput of engines in requests and tokens per second: `vlcache bench throughput`.

Requests are prompts with images, lengths of their outputs, and arrival times. Engines run interleaved on the same
requests: this checkout, another one, and transformers + torch on the same weights. Each has its own process, compiles
and answers other prompts before it is timed, and begins every run with an empty cache. All give outputs of the
requested lengths, and those of exact settings must have the same tokens in both checkouts. Medians of the runs are
printed.

    vlcache bench throughput --against ../before --transformers --out benchmarks/results/throughput_cpu.json
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

import vlcache_jax
from vlcache_jax.benchmarks import ALLOCATOR
from vlcache_jax.common.files import check_writable
from vlcache_jax.common.progress import Progress
from vlcache_jax.study.report import environment, show, write

SHARES = (0.3, 0.4, 0.3)  # fractions of prompts with 0, 1 and 2 images
SIDES = (160, 192, 224, 256)  # sides of images, in pixels
LOAD_TEXT = (16, 256)  # characters after the images
BEFORE = (8, 32)  # characters before them, in every second prompt
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


@dataclass(frozen=True)
class ThroughputLoad:
    """The requests to an engine. Equal loads have equal requests, and each part has its own random numbers.

    Attributes:
      requests: Number of requests.
      images: Images of the pool. Half of them have one place each; the others fill all other places.
      mean_answer, max_answer: Tokens of outputs are geometric with this mean, and at most `max_answer`.
      rate: Requests per second, a Poisson process; None: all come at once.
      seed: Seed of everything.
      zipf: Exponent of the frequencies of images in all places; None: see `images`.

    Raises:
      ValueError: A number is out of range.
    """

    requests: int = 96
    images: int = 40
    mean_answer: float = 48
    max_answer: int = 256
    rate: float | None = None
    seed: int = 0
    zipf: float | None = None

    def __post_init__(self) -> None:
        for name in ("requests", "images", "max_answer"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 1 <= self.mean_answer < math.inf:
            raise ValueError(f"mean_answer must be a number of at least 1, got {self.mean_answer}")
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise ValueError(f"rate must be a number above 0, got {self.rate}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")

    def __str__(self) -> str:
        come = "at once" if self.rate is None else f"as a Poisson process of {self.rate:g} a second"
        none, one, two = (f"{share:.0%}" for share in SHARES)
        met = "half of which are met once" if self.zipf is None else f"met by Zipf's law ({self.zipf:g})"
        return (
            f"{self.requests} prompts that come {come}; 0, 1 or 2 images ({none}, {one}, {two}) of a pool of "
            f"{self.images}, {met}, of {SIDES[0]} to {SIDES[-1]} pixels a side; behind them "
            f"{LOAD_TEXT[0]} to {LOAD_TEXT[1]} characters, log-uniform, in front of them {BEFORE[0]} to {BEFORE[1]} in "
            f"every second prompt; answers geometric with mean {self.mean_answer:g}, 1 to {self.max_answer} tokens; "
            f"seed {self.seed}"
        )

    def make(self, directory: pathlib.Path) -> list[dict[str, Any]]:
        """Write the images; return prompt, images, max_tokens and arrival in seconds of each request."""
        count, answers, places, texts, noise, times = (np.random.default_rng([self.seed, i]) for i in range(6))
        counts = count.choice(len(SHARES), self.requests, p=SHARES)
        lengths = answers.geometric(1 / self.mean_answer, self.requests).clip(1, self.max_answer)
        pool = [_write_picture(noise, directory / f"{i}.png") for i in range(self.images)]
        used = self._places(places, int(counts.sum()))
        pictures = iter(used)
        wait = np.zeros(self.requests) if self.rate is None else times.exponential(1 / self.rate, self.requests)
        return [
            {
                "prompt": _prompt(texts, int(images), in_front=i % 2 == 1),
                "images": [pool[next(pictures)] for _ in range(images)],
                "max_tokens": int(length),
                "arrival": float(arrival),
            }
            for i, (images, length, arrival) in enumerate(zip(counts, lengths, np.cumsum(wait), strict=True))
        ]

    def _places(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Return the image of each place."""
        if self.zipf is not None:
            shares = np.arange(1, self.images + 1) ** -self.zipf
            return rng.choice(self.images, count, p=shares / shares.sum())
        once = min(self.images // 2, count // 2)
        used = rng.integers(self.images // 2, self.images, count)
        used[rng.choice(count, once, replace=False)] = np.arange(once)
        return used


def longest(requests: list[dict[str, Any]]) -> int:
    """Return the maximum tokens of prompt and output of a request, in full blocks of 128."""
    most_tokens = (SIDES[-1] // 28 + 1) ** 2  # 28 pixels are the smallest side of a token of all families
    slots = max(len(r["prompt"]) + most_tokens * len(r["images"]) + r["max_tokens"] for r in requests)
    return -(-slots // 128) * 128


def _prompt(rng: np.random.Generator, images: int, *, in_front: bool) -> str:
    low, high = np.log(LOAD_TEXT)
    after = _words(rng, round(float(np.exp(rng.uniform(low, high)))))
    before = _words(rng, int(rng.integers(BEFORE[0], BEFORE[1] + 1))) if in_front else ""
    return f"<|im_start|>user\n{before}{IMAGE * images}{after}<|im_end|>\n<|im_start|>assistant\n"


def _words(rng: np.random.Generator, count: int) -> str:
    return bytes(rng.integers(97, 123, count, dtype=np.uint8)).decode()


def _write_picture(rng: np.random.Generator, path: pathlib.Path) -> str:
    """Write colored noise, in squares of 16 pixels."""
    height, width = rng.choice(SIDES, 2) // 16
    noise = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(noise.repeat(16, axis=0).repeat(16, axis=1)).save(path)
    return str(path)


# Used without MODEL. With this vocabulary the output head takes nearly the same part of a step as in published models.
TEXT = {
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 8192,
}
VISION = {
    "depth": 4,
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_heads": 3,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [1, 2],
}
OURS, TORCH = "this checkout", "transformers"
BATCHES = (8, 16, 32, 64)
EXACT = ("off", "exact")  # settings whose outputs are those of a cold run
WARM = ThroughputLoad(
    requests=8, images=4, mean_answer=8, max_answer=16, seed=2**32
)  # no seed of a command is as large
FLOOR_MODEL = "Qwen3-VL-8B"
SPEED = ("seconds", "spread %", "requests/s", "tokens/s")
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


class Worker:
    """An engine in its own process; commands and results are one line of JSON each.

    Args:
      name: Name for errors.
      script: Module file next to this one.
      root: Folder of its `vlcache_jax`.
      task: File with all settings.

    Raises:
      ValueError: It could not start, or a command failed; stderr has the reason.
    """

    def __init__(self, name: str, script: str, root: pathlib.Path, task: pathlib.Path):
        self.name = name
        settings = os.environ | ALLOCATOR | {"PYTHONPATH": str(root), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        self._process = subprocess.Popen(
            # -P: modules next to the script must not be imported.
            [sys.executable, "-P", str(pathlib.Path(__file__).with_name(script)), str(task)],
            env=settings,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def ask(self, method: str, **arguments: Any) -> Any:
        """Call a method of the engine and return its result."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([method, arguments]) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the end of its output has the reason
        return self._answer()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"it ended with status {self._process.wait()}"}
        if "error" in answer:
            raise ValueError(f"{self.name}: {answer['error']}")
        return answer


def check(reuse: Sequence[str], repeats: int, against: pathlib.Path | None, rate: float | None, torch: bool) -> None:
    """Check that there is something to measure.

    Raises:
      ValueError: There is not.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    if against is not None and not (against / "vlcache_jax" / "__init__.py").is_file():
        raise ValueError(f"against must be a checkout of this project, with a folder vlcache_jax, got {against}")
    if torch and rate is not None:
        raise ValueError(
            f"rate must be None for transformers, which runs full batches, got {rate}; leave out rate or transformers"
        )
    from vlcache_jax.reuse.selection import parse_policy  # imports JAX; other errors are raised without it

    for setting in reuse:
        parse_policy(setting)


def measure(
    model: str | None,
    load: ThroughputLoad,
    *,
    reuse: Sequence[str] = ("exact",),
    dtype: str = "float32",
    kv_cache_bytes: int = 2**29,
    against: pathlib.Path | None = None,
    transformers: bool = False,
    repeats: int = 3,
    floor: bool = False,
    out: pathlib.Path | None = None,
    text: dict[str, Any] = TEXT,
    vision: dict[str, Any] = VISION,
    **settings: Any,
) -> None:
    """Measure and print.

    Args:
      model: Checkpoint or id on the hub; None is one of 6 layers x 384 with random weights.
      load: The requests.
      reuse: Reuse modes, each measured separately.
      dtype: Data type of the model.
      kv_cache_bytes: KV pool of every checkout's engine.
      against: Another checkout, the second engine.
      transformers: True to measure transformers too, with the best of its batches.
      repeats: Runs of each engine and setting; they are interleaved.
      floor: Also print the lower bound of the decode steps for Qwen3-VL-8B on an H200.
      out: JSON file to write.
      text, vision: Configurations of the model with random weights.
      settings: Settings of every checkout's engine; unknown ones are ignored.

    Raises:
      ValueError: An argument is wrong, an engine failed, or outputs are wrong.
    """
    check_writable("out", out)
    check(reuse, repeats, against, load.rate, transformers)
    with tempfile.TemporaryDirectory(prefix="vlcache-bench-") as name, contextlib.ExitStack() as closing:
        folder = pathlib.Path(name)
        if model is None:
            from vlcache_jax.testing import make_checkpoint

            with Progress("drawing weights"):
                # With tied random weights every output repeats its first token, whatever the prompt and the engine.
                make_checkpoint(folder / "model", "qwen3_vl", text=text, vision=vision)
        requests = _make(load, folder / "pictures")
        limits = {"max_model_len": longest(requests), "kv_cache_bytes": kv_cache_bytes}
        options = {"dtype": dtype, "use_tqdm": False} | limits | settings
        # The same model, options and requests for every worker.
        task = {
            "model": model or str(folder / "model"),
            "options": options,
            "open": load.rate is not None,
            "requests": requests,
            "warm": _make(WARM, folder / "others"),
        }
        # One worker for each checkout; their runs are interleaved.
        roots = {OURS: pathlib.Path(vlcache_jax.__file__).parent.parent}
        if against is not None:
            roots[f"against {against.resolve().name}"] = against.resolve()
        workers = _open(roots | ({TORCH: roots[OURS]} if transformers else {}), task, folder, closing)
        runs = _run(workers, list(dict.fromkeys(reuse)), requests, repeats, dtype)
        head = environment("jax", "transformers", "torch") | {
            "load": str(load),
            "returned tokens": sum(request["max_tokens"] for request in requests),
            "dtype": dtype,
            "model": model or f"random weights, {text['num_hidden_layers']} layers x {text['hidden_size']}",
            "kv_cache_bytes": kv_cache_bytes,
            "max_model_len": options["max_model_len"],
            "engines": {engine: commit(root) for engine, root in roots.items()},
            "repeats": repeats,
            "processor load": os.getloadavg()[0],
        }
    rows = [_row(engine, setting, own, runs) for (engine, setting), own in runs.items()]
    equal = _equal_answers(runs)
    for row in rows:
        row["equal answers %"] = equal[row["engine"], row["reuse"]]
    least = _floors(runs) if floor else []
    _publish(rows, least, head, out)


def _make(load: ThroughputLoad, folder: pathlib.Path) -> list[dict[str, Any]]:
    folder.mkdir()
    return load.make(folder)


def _open(
    roots: dict[str, pathlib.Path], task: dict[str, Any], folder: pathlib.Path, closing: contextlib.ExitStack
) -> dict[str, Worker]:
    """Open each engine on its own checkout, with the common task."""
    workers: dict[str, Worker] = {}
    for engine, root in roots.items():
        file = folder / f"{len(workers)}.json"
        file.write_text(json.dumps(task | {"root": str(root)}), encoding="utf-8")
        script = "throughput_torch.py" if engine == TORCH else "throughput_engine.py"
        with Progress(f"opening {engine}"):
            workers[engine] = worker = Worker(engine, script, root, file)
        closing.callback(worker.close)
    return workers


def commit(root: pathlib.Path) -> str | None:
    """Return git's name of the state of a checkout; None: git does not know it."""
    found = subprocess.run(
        ["git", "-C", str(root), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or None


Runs = dict[tuple[str, str], list[dict[str, Any]]]


def _run(
    workers: dict[str, Worker], settings: list[str], requests: list[dict[str, Any]], repeats: int, dtype: str
) -> Runs:
    """Return the runs of each engine and setting; the engines are interleaved.

    Raises:
      ValueError: Outputs are empty, have wrong lengths, or differ although they must be equal.
    """
    lengths = [request["max_tokens"] for request in requests]
    ask: dict[tuple[str, str], Callable[[], dict[str, Any]]] = {}
    for setting in settings:
        for engine, worker in workers.items():
            if engine != TORCH:
                with Progress(f"warming {engine}, {setting}"):
                    worker.ask("warm", reuse=setting)
                ask[engine, setting] = functools.partial(worker.ask, "run", reuse=setting)
    if TORCH in workers:
        with Progress("finding the best batches of transformers", 2 * len(BATCHES)) as bar:
            batches = _best_batches(workers[TORCH], lengths, bar)
        name = f"batches of {batches['batch']}{', by length' * batches['by_length']}"
        ask[TORCH, name] = functools.partial(workers[TORCH].ask, "run", **batches)
    runs: Runs = {key: [] for key in ask}
    reference: tuple[str, dict[str, Any]] | None = None
    with Progress("measuring", repeats * len(ask)) as bar:
        for _ in range(repeats):
            for (engine, setting), run in ask.items():
                found = run()
                _check_lengths(f"{engine}, {setting}", found, lengths)
                if engine != TORCH and setting in EXACT and dtype == "float32":
                    reference = reference or (f"{engine}, {setting}", found)
                    _check_equal(*reference, f"{engine}, {setting}", found)
                runs[engine, setting].append(found)
                bar.update()
    return runs


def _best_batches(worker: Worker, lengths: list[int], bar: Progress) -> dict[str, Any]:
    worker.ask("warm", batch=len(lengths))
    tried = []
    for batch in BATCHES:
        for by_length in (False, True):
            found = worker.ask("run", batch=batch, by_length=by_length)
            _check_lengths(TORCH, found, lengths)
            tried.append((found["seconds"], {"batch": batch, "by_length": by_length}))
            bar.update()
    return min(tried, key=lambda one: one[0])[1]


def _check_lengths(name: str, run: dict[str, Any], lengths: list[int]) -> None:
    got = [len(tokens) for tokens in run["tokens"]]
    if got != lengths:
        wrong = [i for i, (a, b) in enumerate(zip(got, lengths, strict=False)) if a != b]
        first = f", first in request {wrong[0]}: {got[wrong[0]]} tokens, not {lengths[wrong[0]]}" if wrong else ""
        raise ValueError(f"{name}: answers must have the requested lengths, got {len(got)} of {len(lengths)}{first}")


def _check_equal(name: str, run: dict[str, Any], other: str, another: dict[str, Any]) -> None:
    for i, (one, two) in enumerate(zip(run["tokens"], another["tokens"], strict=True)):
        if one != two:
            at = next(k for k, (a, b) in enumerate(zip(one, two, strict=True)) if a != b)
            raise ValueError(
                f"outputs of {name} must equal those of {other}, but those of request {i} differ at token {at} of "
                f"{len(one)}: {one[at]} and {two[at]}"
            )


def _equal_answers(runs: Runs) -> dict[tuple[str, str], float | None]:
    """Return for each engine and setting the fraction of outputs that equal the first exact ones of this checkout, or
    None.
    """
    exact = [run[0]["tokens"] for (engine, setting), run in runs.items() if engine == OURS and setting in EXACT]
    if not exact:
        return dict.fromkeys(runs)
    return {
        key: 100 * statistics.mean(float(a == b) for a, b in zip(own[0]["tokens"], exact[0], strict=True))
        for key, own in runs.items()
    }


def _row(engine: str, setting: str, own: list[dict[str, Any]], runs: Runs) -> dict[str, Any]:
    """Return medians of an engine's runs with a setting; None: the engine does not report the figure."""
    seconds = [run["seconds"] for run in own]
    took = statistics.median(seconds)
    first = own[0]
    tokens = sum(map(len, first["tokens"]))
    row: dict[str, Any] = {"engine": engine, "reuse": setting, "seconds": took}
    row["spread %"] = 100 * (max(seconds) - min(seconds)) / took
    row["requests/s"], row["tokens/s"] = len(first["tokens"]) / took, tokens / took
    for other in dict.fromkeys(name for name, _ in runs if name != OURS):
        theirs = [run for (name, what), run in runs.items() if name == other and (what == setting or name == TORCH)]
        row[f"over {other}"] = (
            statistics.median(run["seconds"] for run in theirs[0]) / took if theirs and engine != other else None
        )
    row["runs"] = seconds
    figures = [_latencies(run) | _work(run, tokens) for run in own]
    for name in figures[0]:
        known = [value for figure in figures if (value := figure[name]) is not None]
        row[name] = statistics.median(known) if known else None
    return row


def _latencies(run: dict[str, Any]) -> dict[str, float | None]:
    """Return latencies over all requests, in milliseconds."""
    found: dict[str, float | None] = {}
    first = [times[0] for times in run["times"]]
    between = np.concatenate([np.diff(times) for times in run["times"]] or [np.zeros(0)])
    for name, values in (("TTFT", np.array(first)), ("inter-token", between)):
        for which, share in QUANTILES.items():
            found[f"{name} {which} ms"] = 1000 * float(np.quantile(values, share)) if len(values) else None
    return found | {"inter-token most ms": 1000 * float(between.max()) if len(between) else None}


def _work(run: dict[str, Any], tokens: int) -> dict[str, float | None]:
    """Return the computed and found tokens. Rows are as launched; `padded_` counts the padding among them."""
    count = run["counters"].get

    def ratio(above: float | None, below: float | None, scale: float = 1.0) -> float | None:
        return None if above is None or not below else scale * above / below

    def less(rows: float | None, some: float | None) -> float | None:
        return None if rows is None or some is None else rows - some

    # The first token of each comes from its prefill.
    returned = less(count("generated_tokens", tokens), len(run["tokens"]))
    active = less(count("decode_rows"), count("padded_decode_rows"))
    return {
        "images": run["images"],
        "exact": run["exact"],
        "approximate": run["approximate"],
        "encoder": run["encoder"],
        "prefill steps": count("prefill_steps"),
        "prefill padding %": ratio(count("padded_prefill_rows"), count("prefill_rows"), 100),
        "decode steps": count("decode_steps"),
        "active rows": ratio(active, count("decode_steps")),
        "decode padding %": ratio(count("padded_decode_rows"), count("decode_rows"), 100),
        "rows returned %": ratio(returned, active, 100),
        "launches a token": ratio(count("launches"), tokens),
        "launches a prefill": ratio(less(count("launches"), count("windows")), count("prefill_steps")),
        "host ms a prefill": ratio(count("host_prefill_seconds"), count("prefill_steps"), 1000),
        "host ms a window": ratio(count("host_window_seconds"), count("windows"), 1000),
    }


def decode_seconds(trace: Sequence[Sequence[int]]) -> float:
    """Return the lower bound of the decode steps in seconds for Qwen3-VL-8B on an H200, without prefills.

    Args:
      trace: For each multi-step decode its rows, the slots that they see in its first step, and its steps.
    """
    from vlcache_jax.benchmarks.floor import H200, MODELS, decode

    config = MODELS[FLOOR_MODEL]
    return sum(
        max(operator.operations / H200.matrix, operator.bytes / H200.memory)
        for rows, contexts, steps in trace
        for step in range(steps)
        for operator in decode(config, rows, contexts + step * rows)
    )


def _floors(runs: Runs) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for (engine, setting), own in runs.items():
        trace = own[0]["trace"]
        row: dict[str, Any] = {"engine": engine, "reuse": setting, "decode steps": None, "mean rows": None}
        row |= {"mean context": None, "floor s": None, "tokens/s at most": None}
        if trace:
            steps = sum(window[2] for window in trace)
            launched = sum(rows * steps for rows, _, steps in trace)
            seen = sum(contexts * steps + rows * steps * (steps - 1) // 2 for rows, contexts, steps in trace)
            row |= {"decode steps": steps, "mean rows": launched / steps, "mean context": seen / launched}
            row["floor s"] = decode_seconds(trace)
            row["tokens/s at most"] = sum(map(len, own[0]["tokens"])) / row["floor s"]
        rows.append(row)
    ours = {row["reuse"]: row["floor s"] for row in rows if row["engine"] == OURS}
    for row in rows:
        # Transformers reuses nothing: it is compared with the first setting.
        mine = ours.get(row["reuse"], next(iter(ours.values())))
        row["over this checkout"] = row["floor s"] / mine if row["floor s"] and mine else None
    return rows


def _publish(
    rows: list[dict[str, Any]], least: list[dict[str, Any]], head: dict[str, Any], out: pathlib.Path | None
) -> None:
    who = ("engine", "reuse")
    over = [name for name in rows[0] if name.startswith("over ")]
    times = [name for name in rows[0] if name.endswith(" ms")]
    rest = [name for name in rows[0] if name not in (*who, *SPEED, *over, *times, "runs")]
    found = ["images", "exact", "approximate", "encoder", "equal answers %"]
    print(f"\n{head['load']}; {head['returned tokens']} tokens returned")
    _show(f"Throughput, {head['dtype']}, {head['model']}, medians of {head['repeats']}", rows, [*who, *SPEED, *over])
    _show("Waiting", rows, [*who, *times])
    _show("Images, and those found: K, V exact and approximate, encoder rows", rows, [*who, *found])
    _show("Work", rows, [*who, *(name for name in rest if name not in found)])
    if least:
        _show(f"What these decode steps take at least: {FLOOR_MODEL} on an H200", least, list(least[0]))
    if out is not None:
        write("Throughput", rows, head | ({"floor": least} if least else {}), out)


def _show(title: str, rows: list[dict[str, Any]], names: list[str]) -> None:
    show(title, [{name: "" if row[name] is None else row[name] for name in names} for row in rows])
