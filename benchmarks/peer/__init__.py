"""This engine beside others, on one machine, one checkpoint and the same requests.

    uv run --group test python -m benchmarks.peer --out benchmarks/results/peer_cpu.json
    uv run --group test python -m benchmarks.peer --only cold,decode --dtype float32 --minutes 8
    uv run --group test python -m benchmarks.peer --quick

It makes a checkpoint (Qwen3-VL, random weights, 12 layers x 768) and an environment for each peer, and asks each engine
in a process of its own, one after the other, in turns: no two are in memory together. Each turn opens the engine and
takes every step: first tokens cold, and of pictures that come again, batches, decoding, and answers that are compared
with those of transformers. The tables have medians of all turns, with the least, the most, how many, and the CPU
seconds of all processes; a ratio above 1 says that this engine is the better one. Leave the machine alone meanwhile:
how many cores others kept busy in a turn is printed and in the JSON.

A peer is a file in `engines/`; one that cannot be set up here is left out, and told. `--against` measures another
checkout of this one too. The first run of all installs vLLM, and this engine compiles: give it 5 minutes more, or
measure in a second run. With little memory free (an engine takes up to 7 GB) nothing here is worth a run.
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
LONGEST = 1800  # seconds of a turn
COMPILED = {"PYTHONDONTWRITEBYTECODE": ""}  # a start compiles no Python, wherever it is told not to keep that


@dataclasses.dataclass(frozen=True)
class Opened:
    """An engine that can be run.

    Attributes:
      name: in tables.
      script: its file.
      python: of its environment.
      environment: what it needs there.
    """

    name: str
    script: pathlib.Path
    python: str
    environment: dict[str, str]


def set_up(peers: Sequence[str], against: pathlib.Path | None, work: pathlib.Path) -> tuple[list[Opened], list[str]]:
    """The engines, ours first and the reference last, and in a sentence each what is left out.

    Raises:
      ValueError: there is no such peer, or no such checkout.
    """
    known = {path.stem for path in ENGINES.glob("*.py")} - {"__init__", OURS, table.REFERENCE}
    if not set(peers) <= known:
        raise ValueError(f"peers must be of {', '.join(sorted(known))}, got {', '.join(peers)}")
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
        opened.append(Opened(name, script, python, own))
    return opened, left_out


def take_turn(engine: Opened, task: dict[str, Any], steps: Sequence[JobStep], folder: pathlib.Path) -> dict[str, Any]:
    """Runs an engine through the steps, in a process that ends.

    Returns:
      What `harness.run` does, with each step beside what came of it.

    Raises:
      ValueError: it failed; the error has its last words and names its log.
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
    """Measures, and prints the tables after each round of turns.

    Args:
      only: the sections.
      peers: files in `engines/`.
      against: another checkout, as an engine of its own.
      repeats: turns of each engine and dtype at most.
      minutes: after the first round no turns begin that would not end by then.
      work: folder of environments, the checkpoint, logs and what engines keep of compilation.
      out: JSON file to write.

    Raises:
      ValueError: an engine failed, or its output is not what it must be.
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
                    own = _asked(steps, engine, is_first=not turn, is_first_dtype=dtype == dtypes[0])
                    if own:
                        own_dtype = "float32" if engine.name == table.REFERENCE else dtype
                        result = _turn(engine, task | {"dtype": own_dtype}, own, work)
                        table.check(engine.name, result)
                        runs.setdefault((engine.name, own_dtype), []).append(result)
                took[dtype] = time.monotonic() - start
            head = _head(scale, engines, runs) | {"sections": list(only), "left out": left_out}
            _publish(runs, head | {"seconds": time.monotonic() - begun}, out)


def _asked(steps: Sequence[JobStep], engine: Opened, *, is_first: bool, is_first_dtype: bool) -> list[JobStep]:
    """An engine's steps in a turn. Answers are compared once, and the reference gives them once for all dtypes."""
    if engine.name == table.REFERENCE:
        return [step for step in steps if step.case == "together"] if is_first and is_first_dtype else []
    return [step for step in steps if is_first or step.section != "agreement"]


def _turn(engine: Opened, task: dict[str, Any], steps: Sequence[JobStep], work: pathlib.Path) -> dict[str, Any]:
    # What engines keep of compilation lies in the work folder, and so it is known whether there was any.
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
    """Made once for each size, in float32: engines round it to smaller dtypes."""
    from vlcache_jax.testing import make_checkpoint

    size = repr((scale.text, scale.vision, scale.max_pixels))
    directory = work / f"model-{hashlib.sha256(size.encode()).hexdigest()[:8]}"
    if not directory.exists():
        part = directory.with_name(directory.name + ".part")
        # With tied random weights answers repeat one token, and agree whatever is computed. vLLM runs the largest
        # picture there can be when it opens: there is none larger than those here.
        make_checkpoint(part, "qwen3_vl", text=scale.text, vision=scale.vision, max_pixels=scale.max_pixels)
        part.rename(directory)
    return directory


def _head(scale: Scale, engines: Sequence[Opened], runs: table.Runs) -> dict[str, Any]:
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

    parser.add_argument("--only", type=listed, default=SECTIONS, help=f"of {', '.join(SECTIONS)}; all by default")
    parser.add_argument("--dtype", type=listed, default=DTYPES, help=f"of {', '.join(DTYPES)}; both by default")
    parser.add_argument("--peers", type=listed, default=["vllm"], help="files of engines/; vllm by default")
    parser.add_argument("--against", type=pathlib.Path, help="another checkout, an engine more")
    parser.add_argument("--repeats", type=int, default=2, help="turns of each engine and dtype, at most")
    parser.add_argument("--minutes", type=float, default=25, help="begin no turns that would not end by then")
    parser.add_argument("--quick", action="store_true", help="a rehearsal in small, whose figures say nothing")
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
