"""Runner of the cases that are not done yet, and storage of their results."""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import hashlib
import json
import os
import pathlib
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jax

from vlcache_jax.benchmarks import gpu
from vlcache_jax.benchmarks.gpu.plan import GpuCase, GpuPlan, Row
from vlcache_jax.benchmarks.gpu.workers import GpuWorker
from vlcache_jax.common.files import write_whole
from vlcache_jax.kernel_selftest.gpu import find_chip
from vlcache_jax.pallas_kernels import dispatch
from vlcache_jax.study import report


class Section(NamedTuple):
    """Cases of one kind.

    Attributes:
      cases: Returns the cases of a plan.
      limit: Maximum seconds of a case.
      together: How many run at a time; 1 if they are timed.
    """

    cases: Callable[[GpuPlan], Iterable[GpuCase]]
    limit: float
    together: int = 1


def sections() -> dict[str, Section]:
    """Return the sections by name, in their order."""
    from vlcache_jax.benchmarks.gpu import answers, checks, decoding, first_tokens, speeds, tuning

    return {
        "contact": Section(answers.contact, 300),
        "check": Section(checks.check, 90, together=4),
        "answers": Section(answers.answers, 150, together=2),
        "ceiling": Section(speeds.ceiling, 60),
        "decode": Section(decoding.decode, 240),
        "ttft": Section(first_tokens.ttft, 240),
        "speed": Section(speeds.speed, 60),
        "tune": Section(tuning.tune, 120),
    }


SECTIONS = ("contact", "check", "answers", "ceiling", "decode", "ttft", "speed", "tune")


def measures(plan: GpuPlan, section: str) -> dict[str, Callable[[], Row]]:
    """Return the function of each case of a section, by name."""
    return {case.name: case.measure for case in sections()[section].cases(plan)}


def device_head(plan: GpuPlan) -> Row:
    """Return chip, driver and versions."""
    head = report.environment("jax", "jaxlib", "flax", "torch", "transformers")
    driver = ""
    if not plan.rehearse:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return head | {"chip": chip_name(plan), "driver": driver}


def chip_name(plan: GpuPlan) -> str:
    """Return the name of the GPU, which this process does not use.

    Raises:
      RuntimeError: There is none.
    """
    if plan.rehearse:
        return "cpu"
    chip = find_chip()
    if chip is None or not (chip.is_since_ampere if plan.portable else chip.is_hopper):
        needed = "an NVIDIA GPU since Ampere" if plan.portable else "a Hopper GPU"
        raise RuntimeError(f"this needs {needed}, found {chip}; --rehearse runs small cases on a CPU")
    return chip.name


def identity(plan: GpuPlan) -> Row:
    """Return the identity that all results of a folder share."""
    kernels = pathlib.Path(dispatch.__file__).parent
    sources = b"".join(path.read_bytes() for path in sorted(kernels.rglob("*.py")))
    return {
        "rehearsed": plan.rehearse,
        "chip": chip_name(plan),
        "jax": jax.__version__,
        "form": plan.implementation,
        "kernels": hashlib.sha256(sources).hexdigest()[:16],
        "layers": plan.layers,
    }


class GpuResults:
    """Results in `gpu.json`.

    Args:
      plan: Plan with the folder.

    Raises:
      ValueError: The folder has results of another chip, jax, number of layers or state of the kernels.
    """

    def __init__(self, plan: GpuPlan):
        self._plan, self._file, self._lock = plan, plan.out / "gpu.json", threading.Lock()
        self._head, self._identity = device_head(plan), identity(plan)
        self.done: dict[str, Row] = {}
        self.tried: dict[str, int] = {}
        self.failed: dict[str, str] = {}
        plan.out.mkdir(parents=True, exist_ok=True)
        if self._file.exists():
            before = json.loads(self._file.read_text())
            if before["identity"] != self._identity:
                raise ValueError(f"out has results of {before['identity']}; choose another folder for {self._identity}")
            self.done, self.tried = before["cases"], before["tried"]

    def keep(self, key: str, *, row: Row | None = None, failed: str = "") -> None:
        """Record that a case begins, its row, or its failure."""
        with self._lock:
            if row is not None:
                self.done[key] = row
                print(key, row, flush=True)
            elif failed:
                self.failed[key] = f"failed: {failed}"
                print(key, self.failed[key], flush=True)
            else:
                self.tried[key] = self.tried.get(key, 0) + 1  # a case that is killed is not the first one next time
            content = {"head": self._head, "identity": self._identity, "tried": self.tried}
            text = json.dumps({**content, "failed": self.failed, "cases": self.done}, indent=1)
            write_whole(self._file, text + "\n")

    def shown(self, key: str) -> str:
        """Return the result of a case as text for a table."""
        if key not in self.done:
            return self.failed.get(key, "not measured: out of time")[:300]
        return "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in self.done[key].items())

    def write_tuned(self) -> None:
        """Write the table that the kernel reads."""
        entries = [row for key, row in self.done.items() if key.startswith("tune: ")]
        if entries:
            report.write("Fastest ways to cut attention", entries, self._head, self._plan.out / "tuned.json")


def run(plan: GpuPlan, minutes: float, only: tuple[str, ...] = SECTIONS) -> list[Row]:
    """Run the cases that are not done yet; return a row for every case.

    Raises:
      ValueError: See `GpuResults`.
      RuntimeError: There is no GPU for the kernels.
    """
    results = GpuResults(plan)
    deadline = time.monotonic() + 60 * minutes
    wrong: set[str] = set()  # kernels
    shown = []
    for name in only:
        section = sections()[name]
        cases = {f"{name}: {case.name}": case for case in section.cases(plan)}
        shown += list(cases)
        left = iter(
            sorted((key for key in cases if key not in results.done), key=lambda key: results.tried.get(key, 0))
        )
        lock = threading.Lock()
        with concurrent.futures.ThreadPoolExecutor(section.together) as pool:
            turns = [
                pool.submit(_take_turns, plan, name, cases, _shared(left, lock), results, deadline, wrong)
                for _ in range(section.together)
            ]
        for turn in turns:
            turn.result()
    results.write_tuned()
    return [{"case": key, "result": results.shown(key)} for key in shown]


def _shared(items: Iterator[str], lock: threading.Lock) -> Iterator[str]:
    """Yield the next item to each of several threads."""
    while True:
        with lock:
            item = next(items, None)
        if item is None:
            return
        yield item


def _take_turns(
    plan: GpuPlan,
    name: str,
    cases: dict[str, GpuCase],
    keys: Iterator[str],
    results: GpuResults,
    deadline: float,
    wrong: set[str],
) -> None:
    """Run cases of a section in a process, until there are none."""
    section = sections()[name]
    with GpuWorker(functools.partial(measures, plan, name), environment(plan, name)) as worker:
        for key in keys:
            case, left = cases[key], deadline - time.monotonic()
            if left < 0:
                continue
            if name != "check" and (missing := wrong.intersection(case.kernels)):
                # Speeds of a wrong kernel are worth nothing.
                results.failed[key] = f"not measured: {', '.join(sorted(missing))} is wrong"
                continue
            results.keep(key)
            start = time.monotonic()
            try:
                limit = left if plan.rehearse else min(section.limit, left)  # an interpreter is as fast as its machine
                row = worker.run(case.name, max(20.0, limit))
            except RuntimeError as error:  # the other cases are worth having
                if name == "check":
                    wrong.update(case.kernels)
                results.keep(key, failed=str(error))
                continue
            results.keep(key, row=row | {"case, s": time.monotonic() - start})


def environment(plan: GpuPlan, section: str) -> dict[str, str]:
    """Return the environment variables of the processes of a section."""
    changed = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # torch measures on the same chip
    if section == "decode" and not plan.rehearse:
        from vlcache_jax.benchmarks.gpu.tracing import dump_folder

        dump = f"--xla_dump_to={dump_folder(plan)} --xla_dump_hlo_module_re=.*unnamed.* --xla_dump_hlo_pass_re=thunk.*"
        changed["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {dump}".strip()
    return changed


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu", description=gpu.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of the results")
    parser.add_argument("--minutes", type=float, default=9.0, help="minutes after which no further case begins")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--layers", type=int, help="layers of the models' decoders; all by default")
    parser.add_argument("--rehearse", action="store_true", help="run small cases on a CPU")
    parser.add_argument(
        "--portable", action="store_true", help="use the portable kernels; always on GPUs other than Hopper"
    )
    arguments = parser.parse_args()
    chip = None if arguments.rehearse else find_chip()
    portable = arguments.portable or (chip is not None and not chip.is_hopper)
    plan = GpuPlan(arguments.rehearse, arguments.out, arguments.layers, portable)
    rows = run(plan, arguments.minutes, tuple(arguments.only))
    report.show(f"{chip_name(plan)}, jax {jax.__version__}", rows)
    if any(row["result"].startswith("failed") for row in rows):
        raise SystemExit(1)
