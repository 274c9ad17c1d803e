"""This engine compared with others, on one machine, one checkpoint and the same requests.

    uv run --group test python -m benchmarks.peer --out benchmarks/results/peer_cpu.json
    uv run --group test python -m benchmarks.peer --only cold,decode --dtype float32 --minutes 8
    uv run --group test python -m benchmarks.peer --quick

It makes a checkpoint (Qwen3-VL, random weights, 12 layers x 768) and an environment for each peer. It runs each engine
in its own process, interleaved, so that no two are in memory together. Each run opens the engine and does every step:
first tokens without reuse and of repeated images, batches, decoding, and outputs that are compared with those of
transformers. The tables have medians of all runs, with minimum, maximum, count, and the CPU seconds of all processes. A
ratio above 1 means that this engine is better. Leave the machine idle meanwhile: the number of cores that other
processes used is printed and in the JSON.

A peer is a file in `engines/`; one that cannot be installed here is left out with a message. `--against` also measures
another checkout of this engine. The first run of all installs vLLM, and this engine compiles: give it 5 minutes more,
or measure in a second run. An engine takes up to 7 GB; a run with less free memory is worthless.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import pathlib
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from vlcache_jax.benchmarks import ALLOCATOR
from vlcache_jax.benchmarks.peer import table
from vlcache_jax.benchmarks.peer.harness import load
from vlcache_jax.benchmarks.peer.jobs import FULL, QUICK, SECTIONS, JobStep, Scale, first, make_steps
from vlcache_jax.benchmarks.throughput import commit
from vlcache_jax.common.files import cache_home, check_writable
from vlcache_jax.study.report import environment, show, write

OURS, AGAINST = "ours", "against"
ENGINES = pathlib.Path(__file__).with_name("engines")
ROOT = pathlib.Path(__file__).resolve().parents[2]
DTYPES = ("float32", "bfloat16")
LONGEST = 1800  # maximum seconds of a run
COMPILED = {"PYTHONDONTWRITEBYTECODE": ""}  # Python writes bytecode, so that no start compiles it again


@dataclasses.dataclass(frozen=True)
class InstalledEngine:
    """An engine that can be run.

    Attributes:
      name: Name in tables.
      script: File of the engine.
      python: Python of its environment.
      environment: Variables that it needs there.
    """

    name: str
    script: pathlib.Path
    python: str
    environment: dict[str, str]


def set_up(
    peers: Sequence[str], against: pathlib.Path | None, work: pathlib.Path
) -> tuple[list[InstalledEngine], list[str]]:
    """Return the engines, ours first and the reference last, and a sentence for each peer that is left out.

    Raises:
      ValueError: There is no such peer, or no such checkout.
    """
    known = {path.stem for path in ENGINES.glob("*.py")} - {"__init__", OURS, table.REFERENCE}
    if not set(peers) <= known:
        raise ValueError(f"peers must be names of {', '.join(sorted(known))}, got {', '.join(peers)}")
    engines: list[tuple[str, str, pathlib.Path | None]] = [(OURS, OURS, ROOT)]
    if against is not None:
        if not (against / "vlcache_jax" / "__init__.py").is_file():
            raise ValueError(f"against must be a checkout of this project, with a folder vlcache_jax, got {against}")
        engines.append((AGAINST, OURS, against.resolve()))
    engines += [(peer, peer, None) for peer in (*peers, table.REFERENCE)]
    opened, left_out = [], []
    for name, stem, root in engines:
        script = ENGINES / f"{stem}.py"
        print(f"setting up {name}", flush=True)
        try:
            python, own = load(script).setup(work)
        except RuntimeError as error:
            left_out.append(f"{name} is left out: {error}")
            print(left_out[-1], flush=True)
            continue
        own = ALLOCATOR | COMPILED | own | ({"PYTHONPATH": str(root)} if root is not None else {})
        opened.append(InstalledEngine(name, script, python, own))
    return opened, left_out


def take_turn(
    engine: InstalledEngine, task: dict[str, Any], steps: Sequence[JobStep], folder: pathlib.Path
) -> dict[str, Any]:
    """Run an engine through the steps, in a process that ends.

    Returns:
      The result of `harness.run`, with each step next to its outputs.

    Raises:
      ValueError: The engine failed; the message has the end of its log and the path of the log.
    """
    jobs, results, log = (folder / f"{engine.name}.{name}" for name in ("jobs.json", "results.json", "log"))
    results.unlink(missing_ok=True)
    task = task | {"steps": [dataclasses.asdict(step) for step in steps], "begun": time.time()}
    jobs.write_text(json.dumps(task), encoding="utf-8")
    command = [engine.python, "-P", str(pathlib.Path(__file__).with_name("harness.py"))]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, str(engine.script), str(jobs), str(results)],
            env=os.environ | engine.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | str = process.wait(LONGEST)
        except subprocess.TimeoutExpired:
            status = f"not before {LONGEST} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if status != 0 or not results.exists():
        words = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-5:]
        raise ValueError(f"{engine.name} ended with status {status}, see {log}: {' | '.join(words)}")
    result: dict[str, Any] = json.loads(results.read_text(encoding="utf-8"))
    result["steps"] = [(steps[int(number)], found) for number, found in result["steps"].items()]
    return result


def measure(
    scale: Scale,
    *,
    only: Sequence[str] = SECTIONS,
    dtypes: Sequence[str] = DTYPES,
    peers: Sequence[str] = ("vllm",),
    against: pathlib.Path | None = None,
    repeats: int = 2,
    minutes: float = 25,
    work: pathlib.Path | None = None,
    out: pathlib.Path | None = None,
) -> None:
    """Measure, and print the tables after each round of runs.

    Args:
      scale: Size of the model, the images and the requests.
      only: The sections.
      dtypes: Data types of the model.
      peers: Files in `engines/`.
      against: Another checkout, as its own engine.
      repeats: Maximum runs of each engine and dtype.
      minutes: After the first round no run begins that would not end by then.
      work: Folder of environments, the checkpoint, logs and compilation caches.
      out: JSON file to write.

    Raises:
      ValueError: An engine failed, or its output is wrong.
    """
    check_writable("out", out)
    begun = time.monotonic()
    work = (work or cache_home() / "peer").resolve()
    work.mkdir(parents=True, exist_ok=True)
    engines, left_out = set_up(peers, against, work)
    print(f"set up in {time.monotonic() - begun:.0f} s", flush=True)
    begun = time.monotonic()
    runs: table.Runs = {}
    with tempfile.TemporaryDirectory(prefix="pictures-", dir=work) as pictures:
        folder = pathlib.Path(pictures)
        steps = make_steps(scale, only, folder / "steps")
        task = {
            "model": str(_checkpoint(scale, work)),
            "options": scale.options,
            "first": dataclasses.asdict(first(scale, folder / "first")),
        }
        took: dict[str, float] = {}
        for turn in range(repeats):
            for dtype in dtypes:
                start = time.monotonic()
                left = 60 * minutes - (start - begun)
                if turn and took[dtype] > left:
                    print(f"{dtype}: no time for another turn, {left:.0f} s are left", flush=True)
                    continue
                for engine in engines:
                    own = _steps_of(steps, engine, is_first=not turn, is_first_dtype=dtype == dtypes[0])
                    if own:
                        own_dtype = "float32" if engine.name == table.REFERENCE else dtype
                        result = _turn(engine, task | {"dtype": own_dtype}, own, work)
                        table.check(engine.name, result)
                        runs.setdefault((engine.name, own_dtype), []).append(result)
                took[dtype] = time.monotonic() - start
            head = _head(scale, engines, runs) | {"sections": list(only), "left out": left_out}
            _publish(runs, head | {"seconds": time.monotonic() - begun}, out)


def _steps_of(
    steps: Sequence[JobStep], engine: InstalledEngine, *, is_first: bool, is_first_dtype: bool
) -> list[JobStep]:
    """Return an engine's steps in a run. Outputs are compared once; the reference gives them once for all dtypes."""
    if engine.name == table.REFERENCE:
        return [step for step in steps if step.case == "together"] if is_first and is_first_dtype else []
    return [step for step in steps if is_first or step.section != "agreement"]


def _turn(
    engine: InstalledEngine, task: dict[str, Any], steps: Sequence[JobStep], work: pathlib.Path
) -> dict[str, Any]:
    # Compilation caches lie in the work folder, so it is known whether there were any.
    kept = work / "kept" / "-".join((engine.name, task["dtype"], pathlib.Path(task["model"]).name))
    kept.mkdir(parents=True, exist_ok=True)
    was_kept = any(kept.iterdir())
    engine = dataclasses.replace(engine, environment=engine.environment | {"XDG_CACHE_HOME": str(kept)})
    begun = time.monotonic()
    result = take_turn(engine, task, steps, work)
    took = time.monotonic() - begun
    print(f"{engine.name}, {task['dtype']}: {took:.0f} s, others kept {result['others']:.2f} cores busy", flush=True)
    return result | {"kept": was_kept}


def _checkpoint(scale: Scale, work: pathlib.Path) -> pathlib.Path:
    """Write the checkpoint, once for each size, in float32; engines round it to smaller dtypes."""
    from vlcache_jax.testing import make_checkpoint

    size = repr((scale.text, scale.vision, scale.max_pixels))
    directory = work / f"model-{hashlib.sha256(size.encode()).hexdigest()[:8]}"
    if not directory.exists():
        part = directory.with_name(directory.name + ".part")
        # With tied random weights outputs repeat one token, and agree whatever is computed. vLLM runs the largest
        # possible image when it opens: no image here is larger.
        make_checkpoint(part, "qwen3_vl", text=scale.text, vision=scale.vision, max_pixels=scale.max_pixels)
        part.rename(directory)
    return directory


def _head(scale: Scale, engines: Sequence[InstalledEngine], runs: table.Runs) -> dict[str, Any]:
    text, vision = scale.text, scale.vision
    return environment("jax", "vlcache-jax") | {
        "model": f"Qwen3-VL, random weights, {text['num_hidden_layers']} x {text['hidden_size']}, vision "
        f"{vision['depth']} x {vision['hidden_size']}, vocabulary {text['vocab_size']}, untied",
        "options": dict(scale.options),
        "engines": {
            engine: {name: turns[0][name] for name in ("versions", "python", "preloaded")}
            for (engine, _), turns in runs.items()
        },
        "commits": {
            one.name: commit(pathlib.Path(one.environment["PYTHONPATH"]))
            for one in engines
            if "PYTHONPATH" in one.environment
        },
        "cores that others kept busy": {
            " ".join(key): [round(turn["others"], 2) for turn in turns] for key, turns in runs.items()
        },
    }


def _publish(runs: table.Runs, head: dict[str, Any], out: pathlib.Path | None) -> None:
    table.check_prompts(runs)
    title = f"Beside other engines: {head['model']}"
    rows = table.rows(runs, OURS)
    show(title, table.narrow(rows, lambda name: ":" not in name))
    show(
        "Least, most, runs, CPU seconds",
        table.narrow(rows, lambda name: ":" in name or name in ("dtype", "case", "size")),
    )
    more = {"agreement": table.agreement(runs), "batches": table.same_answers(runs, OURS)}
    for name, content in more.items():
        if content:
            show(name, table.narrow(content, lambda name: True))
    if out is not None:
        write(title, rows, head | more, out)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.peer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def listed(text: str) -> list[str]:
        return [name for name in text.split(",") if name]

    parser.add_argument("--only", type=listed, default=SECTIONS, help=f"some of {', '.join(SECTIONS)}; all by default")
    parser.add_argument("--dtype", type=listed, default=DTYPES, help=f"some of {', '.join(DTYPES)}; both by default")
    parser.add_argument("--peers", type=listed, default=["vllm"], help="files of engines/; vllm by default")
    parser.add_argument("--against", type=pathlib.Path, help="another checkout, as a further engine")
    parser.add_argument("--repeats", type=int, default=2, help="maximum runs of each engine and dtype")
    parser.add_argument(
        "--minutes", type=float, default=25, help="time limit; no run begins that would not end by then"
    )
    parser.add_argument("--quick", action="store_true", help="a small rehearsal with meaningless figures")
    parser.add_argument("--work", type=pathlib.Path, help="folder of environments, checkpoint and logs")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    arguments = parser.parse_args(given)
    for name, wrong in (
        ("only", set(arguments.only) - set(SECTIONS) or not arguments.only),
        ("dtype", set(arguments.dtype) - set(DTYPES) or not arguments.dtype),
    ):
        if wrong:
            parser.error(f"{name}: got {getattr(arguments, name)!r}")
    if arguments.repeats < 1:
        parser.error(f"repeats must be at least 1, got {arguments.repeats}")
    measure(
        QUICK if arguments.quick else FULL,
        only=arguments.only,
        dtypes=arguments.dtype,
        peers=arguments.peers,
        against=arguments.against,
        repeats=1 if arguments.quick else arguments.repeats,
        minutes=arguments.minutes,
        work=arguments.work,
        out=arguments.out,
    )
