"""Launches and traffic of decode steps and layers of real models, compiled for an H200, and their time by a model.

    JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 .venv-gate/bin/python -m research.steps --out steps.json
    JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 .venv-gate/bin/python -m research.steps --against OTHER_CLONE --out before.json

Programs of two and of four layers are compiled. A layer's figures are half of their difference, times the number of
layers. A prefill is its layer's step, once for each layer. Launches are counted in XLA's text (`research.hlo`), loops
with their iterations. If the compiler does not know these, those over experts are taken from evenly chosen ones.

Bytes are those that each kernel reads and writes: of the program's arguments, that is the weights, and of temporaries.
Our own kernels read all of their arguments, except for the pool and the experts, of which the chosen ones count. The KV
of the context is added, once; partial results of attention count nothing. Kernel times are from `research.chip_model`:
attention as a work list, others from their bytes, their products, or 1.7 us. The host's reads of predicates count
nothing. Nothing here is measured.

Each case is compiled in its own process, with a limit, and written when it is done. An existing file is completed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from scipy import stats

import vlcache_jax
from research import chip_model, hlo
from research.compiled import abstract_runner, compile_for
from vlcache_jax.benchmarks import floor
from vlcache_jax.benchmarks.throughput import commit
from vlcache_jax.common.files import check_writable, write_whole
from vlcache_jax.device.buckets import BucketSizes
from vlcache_jax.device.programs.base import Program
from vlcache_jax.device.programs.layers import Layer
from vlcache_jax.device.programs.window import Window
from vlcache_jax.models import ModelConfig
from vlcache_jax.models.config import ExpertsConfig, TextConfig
from vlcache_jax.models.registry import published_config
from vlcache_jax.pallas_kernels import PAGE
from vlcache_jax.pallas_kernels.shapes import AttentionShape, SeenSlots
from vlcache_jax.reuse.policies import Plan
from vlcache_jax.study import report

ROOT = pathlib.Path(__file__).resolve().parents[1]
MODELS = ("Qwen2.5-VL-7B", "Qwen3-VL-8B", "Qwen3-VL-30B-A3B")
STEPS, WINDOWS = (512, 4096), (1, 16, 64)  # rows
FEW, MORE = 2, 4  # layers of the programs that are compiled
CONTEXT = 2048  # slots that each row of a decode step sees
PACKAGES = ("jax", "jaxlib", "nvidia-cuda-nvcc")
_COUNTED = ("launches", "predicates", "attention", "weights", "temporaries", "us")
# Memory of temporaries and seconds of compiling are those of four layers, or of a step's layer.
_COLUMNS = (
    "launches a layer", "launches", "predicates a layer", "predicates", "MB", "MB of temporaries", "MB of K, V",
    "memory of temporaries, MB", "compile s", "spilled bytes", "registers", "ms by the model", "floor ms",
    "tokens/s by the model", "tokens/s of the floor", "of the floor",
)  # fmt: skip
TITLE = "Decode steps and layers, compiled for an H200 and counted, nothing of it measured"

Found = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """A program to compile.

    Attributes:
      kind: "window" (a decode step) of `rows` rows, or "layer" of a prefill's step.
      layers: Layers of the decoder.
    """

    model: str
    kind: str
    rows: int
    layers: int = FEW

    def __str__(self) -> str:
        return f"{self.model}: {self.kind} {self.rows}" + f", {self.layers} layers" * (self.kind == "window")

    @property
    def config(self) -> ModelConfig:
        whole = published_config(self.model)
        return dataclasses.replace(whole, text=dataclasses.replace(whole.text, num_layers=self.layers))

    @property
    def program(self) -> Program[Any]:
        if self.kind == "layer":
            return Layer(self.rows, self.rows, False)
        # older clones have one kind of decode program
        kind: dict[str, Any] = {"choice": "greedy", "steps": BucketSizes().window}
        known = {field.name for field in dataclasses.fields(Window)}
        return Window(self.rows, **{name: value for name, value in kind.items() if name in known})


def cases() -> Iterator[Case]:
    """Return all cases, those that take long to compile at the end."""
    for rows in STEPS:
        yield from (Case(model, "layer", rows) for model in MODELS)
    for rows in WINDOWS:
        yield from (Case(model, "window", rows, layers) for model in MODELS for layers in (FEW, MORE))


def count(case: Case) -> Found:
    """Compile a case; counts are of one token of each row, or of one layer.

    Returns:
      launches: Kernels and copies.
      predicates: Predicates that the host reads.
      attention: Launches of attention.
      weights, temporaries: Bytes that kernels move, without those of the pool and of attention's partial results.
      us: Time by the model of the chip of all launches except attention and merging its partial results.
      temp: Planned bytes; seconds: of compiling; spills, registers: the worst of our kernels.
    """
    runner = abstract_runner(case.config)
    compiled = compile_for(runner, case.program)
    module = hlo.Module(compiled.text)
    text, pool = case.config.text, runner.shapes.pool
    pool_bytes = pool.size * pool.dtype.itemsize
    experts = text.experts_of(0)
    groups, tiles = (0.0, 0.0) if experts is None else expert_loops(experts, case.rows)
    stacks = expert_stacks(text)
    shares = {pool_bytes: 0.0} | {stack: groups / experts.count for stack in stacks if experts is not None}
    token_loop = [float(runner.shapes.buckets.window)] if case.kind == "window" else []

    def trips(loops: int) -> float:
        known = token_loop + [groups, tiles] * (experts is not None)
        if loops >= len(known):
            raise ValueError(f"a loop within {loops} others has an unknown number of iterations")
        return known[loops]

    found: Found = dict.fromkeys(_COUNTED, 0.0)
    tokens = 1.0 if case.kind == "layer" else tokens_of(module, token_loop[0])
    for launch in module.launches(trips):
        times = launch.times / tokens
        if launch.is_predicate:
            found["predicates"] += times
            continue
        instruction, block = launch.instruction, launch.block
        given = [block[name].bytes for name in instruction.operands]
        is_ours = instruction.opcode == "custom-call"
        is_attention = is_ours and _is_attention(instruction, block, pool_bytes)
        # Its partial results have room for more than there are.
        partials = [
            block[name].bytes for name in instruction.operands
            if is_ours and _is_attention(hlo.source(block, name), block, pool_bytes)
        ]  # fmt: skip
        traffic = module.traffic(launch, shares)
        found["launches"] += times
        found["attention"] += times * is_attention
        found["weights"] += times * traffic.arguments
        found["temporaries"] += times * (traffic.temporaries - sum(partials) - is_attention * instruction.bytes)
        if is_attention or partials:
            continue
        operations: float = module.operations(launch)
        if is_ours and experts is not None:
            products = sum(size // 2 // experts.count for size in given if size in stacks)  # of a row with its expert
            operations += 2 * case.rows * experts.chosen * products
        found["us"] += times * chip_model.kernel_time(traffic.bytes, operations)
    if not found["attention"]:
        raise ValueError(f"{case} must have a kernel of ours that reads the pool")
    return found | {
        "temp": compiled.temp, "seconds": compiled.seconds, "spills": compiled.spills,
        "registers": compiled.registers, "program": [str(part) for part in case.program.key],
    }  # fmt: skip


def _is_attention(instruction: hlo.Instruction, block: dict[str, hlo.Instruction], pool_bytes: int) -> bool:
    """Return whether an instruction is a kernel of ours that reads the pool and does not write it."""
    given = [block[name].bytes for name in instruction.operands] if instruction.opcode == "custom-call" else []
    return pool_bytes in given and not instruction.aliased


def tokens_of(module: hlo.Module, most: float) -> float:
    """Return how many tokens a decode program decodes: the iterations of the loop with most launches."""
    loops = [one for one in module.computations[module.entry].values() if one.opcode == "while"]
    if not loops:
        raise ValueError("a decode program must have a loop over its tokens")
    largest = max(loops, key=lambda loop: len(module.computations[loop.called("body")[0]]))
    known = hlo.trip_count(largest)
    return most if known is None else float(known)


def expert_stacks(text: TextConfig) -> list[int]:
    """Return the bytes of the matrices of a layer's experts: gate and up, and down."""
    experts = text.experts_of(0)
    if experts is None:
        return []
    down = 2 * experts.count * experts.intermediate_size * text.hidden_size
    return [2 * down, down]


def expert_loops(experts: ExpertsConfig, rows: int) -> tuple[float, float]:
    """Return the number of experts with rows if rows choose evenly, and of tiles of rows of one, as XLA's loops cut
    them.
    """
    tile = next(size for size in (128, 64, 32, 16, 8) if size == 8 or 4 * size * experts.count <= rows * experts.chosen)
    own = np.arange(rows + 1)
    chance = stats.binom.pmf(own, rows, experts.chosen / experts.count)
    groups = experts.count * (1 - chance[0])
    return float(groups), float(experts.count * (chance * -(-own // tile)).sum() / groups)


def summary(found: dict[str, Found]) -> list[Found]:
    """Return a row for each model and program whose cases have been tried."""
    rows = []
    for case in cases():
        if case.layers == FEW and str(case) in found:
            more = dataclasses.replace(case, layers=MORE) if case.kind == "window" else case
            if str(more) in found:
                rows.append(_row(case, found[str(case)], found[str(more)]))
    return rows


def _row(case: Case, few: Found, more: Found) -> Found:
    text = published_config(case.model).text
    row: Found = {"model": case.model, "program": f"{case.kind} {case.rows}"}
    failed = [one["not compiled"] for one in (few, more) if "not compiled" in one]
    if failed:
        return row | dict.fromkeys(_COLUMNS) | {"not compiled": failed[-1]}
    if case.kind == "window":
        layer = {name: (more[name] - few[name]) / (MORE - FEW) for name in _COUNTED}
        whole = {name: more[name] + (text.num_layers - MORE) * layer[name] for name in _COUNTED}
    else:
        layer = {name: few[name] for name in _COUNTED}
        whole = {name: text.num_layers * layer[name] for name in _COUNTED}
    attention = attention_time(text, case)
    slots = case.rows * CONTEXT if case.kind == "window" else case.rows
    kv = text.num_layers * 2 * 2 * text.num_kv_heads * text.head_dim * slots
    us = whole["us"] + whole["attention"] * attention
    least = 1e6 * floor_seconds(case)
    values = (
        layer["launches"], whole["launches"], layer["predicates"], whole["predicates"],
        (whole["weights"] + whole["temporaries"] + kv) / 1e6, whole["temporaries"] / 1e6, kv / 1e6, more["temp"] / 1e6,
        more["seconds"], more["spills"], more["registers"], us / 1e3, least / 1e3, 1e6 * case.rows / us,
        1e6 * case.rows / least, least / us,
    )  # fmt: skip
    return row | dict(zip(_COLUMNS, values, strict=True)) | {"not compiled": None}


def attention_time(text: TextConfig, case: Case) -> float:
    """Return the time of one attention launch and of merging its partial results, in us, without the launches around
    it.
    """
    N, H, K, D = case.rows, text.num_heads, text.num_kv_heads, text.head_dim

    def seen(rng: np.random.Generator, n: int, s: int) -> SeenSlots:
        if case.kind == "window":
            return SeenSlots(np.arange(n), np.zeros(n, int), np.full(n, CONTEXT), np.full(n, s // n))
        return SeenSlots(np.zeros(n, int), np.zeros(n, int), np.arange(n) + 1, np.array([s]))

    slots = N * (CONTEXT + PAGE) if case.kind == "window" else N  # with a page for the output
    estimate = chip_model.work_list(AttentionShape(str(case), N, slots, H, K, D, seen, (N, slots)))
    return max(estimate.programs, estimate.read) + estimate.combine


def floor_seconds(case: Case) -> float:
    """Return the lower bound of a token of each row, or of all layers of a prefill's step (`benchmarks.floor`)."""
    whole = published_config(case.model)
    if case.kind == "window":
        operators = list(floor.decode(whole, case.rows, case.rows * CONTEXT))
    else:
        depth = np.full(case.rows, whole.text.num_layers, np.int16)
        depth[-1] += 1
        operators = [one for one in floor.prefill(whole, Plan(depth)) if one.part != "head"]
    return sum(max(one.operations / floor.H200.matrix, one.bytes / floor.H200.memory) for one in operators)


def compile_apart(case: Case, checkout: pathlib.Path, limit: float) -> Found:
    """Run `count` in its own process, which imports the package of a checkout; on failure return the reason."""
    paths = os.pathsep.join(map(str, (checkout / "src", ROOT)))
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "research.steps", "--count", str(case)],
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            return {"not compiled": f"in {limit:g} s", "limit": limit}
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        return {"not compiled": (errors.strip().splitlines() or [f"status {process.returncode}"])[-1][:300]}
    result: Found = json.loads(out.splitlines()[-1])
    if not pathlib.Path(result.pop("package")).resolve().is_relative_to(checkout.resolve()):
        raise ValueError(f"{case} must be compiled with the package of {checkout}")
    return result


def measure(checkout: pathlib.Path, only: Sequence[str], limit: float, out: pathlib.Path) -> list[Found]:
    """Compile the cases that are not done yet, one after the other, and write each.

    Args:
      only: Parts of names of cases; empty: all.
      limit: Seconds of a case. A case that took longer is repeated with a longer limit; one that failed is always
        repeated.

    Raises:
      ValueError: The file has results of another commit or other versions, or cannot be written.
    """
    check_writable("out", out)
    head = report.environment(*PACKAGES)
    same = {
        "commit": commit(checkout), "versions": head["versions"], "context": CONTEXT, "target": "NVIDIA H200",
    }  # fmt: skip
    found: dict[str, Found] = {}
    if out.exists() and out.stat().st_size:
        before = json.loads(out.read_text(encoding="utf-8"))
        if (other := {name: before.get(name) for name in same}) != same:
            raise ValueError(f"out has results of {other}; choose another file for {same}")
        found = before["cases"]
    for case in cases():
        name = str(case)
        is_done = name in found and ("not compiled" not in found[name] or found[name].get("limit", 0) >= limit)
        if is_done or (only and not any(part in name for part in only)):
            continue
        print(f"{name} ...", file=sys.stderr, flush=True)
        found[name] = compile_apart(case, checkout, limit)
        print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
        content = {"title": TITLE, **head, **same, "cases": found, "rows": summary(found)}
        write_whole(out, report.to_json(content))
    return summary(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="JSON file")
    parser.add_argument("--against", type=pathlib.Path, default=ROOT, help="another clone, whose programs are compiled")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="cases with this in their name")
    parser.add_argument("--limit", type=float, default=900, help="maximum seconds of a case")
    parser.add_argument("--count", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.count:
        [case] = [case for case in cases() if str(case) == arguments.count]
        print(json.dumps(count(case) | {"package": vlcache_jax.__file__}))
        return
    if arguments.out is None:
        parser.error("--out is needed")
    rows = measure(arguments.against, arguments.only, arguments.limit, arguments.out)
    if rows:
        report.show(TITLE, rows)


if __name__ == "__main__":
    main()
