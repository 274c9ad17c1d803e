"""Instructions of the kernels' inner loops, counted in their machine code for an H200, on a machine without one.

    JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 .venv-gate/bin/python -m research.sass --out instructions.json

Mosaic GPU writes the output of `nvdisasm` for a compiled kernel. The innermost loops that multiply matrices and those
that only load are counted; waits, which loop out of line, are not. Some instructions of an iteration are branched over:
the longest path counts for each number of selects (which mask), or of accesses to shared memory, in an iteration. jax's
own kernel, `jax.experimental.pallas.ops.gpu.attention_mgpu`, is counted for comparison.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import graphlib
import os
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp

from research.compiled import compile_program
from vlcache_jax.pallas_kernels import attention_statistics, float8_matmul, mix_experts, paged_attention
from vlcache_jax.pallas_kernels.shapes import (
    ATTENTION,
    EXPERTS,
    STATISTICS,
    AttentionShape,
    ExpertsShape,
    StatisticsShape,
)
from vlcache_jax.study import report

_INSTRUCTION = re.compile(r":(\d+)\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?(\w+)\s+)?([A-Z][A-Z0-9_.]*) *(.*?)\s*$")
_TARGET = re.compile(r"^(.*)`\((\.L\w+)\)")
SHARED_MEMORY = ("LDS", "LDSM", "STS", "STSM")
COUNTED = ("HGMMA", "FFMA", "FMUL", "FADD", "FMNMX", "MUFU", "F2FP", "FSEL", "ISETP", "R2UR", "BAR", "LDG", "UTMALDG")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One machine instruction: its name without modifiers, its minimum stall in cycles, and its successors."""

    name: str
    stall: int
    after: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class LoopTurn:
    """A path through a loop: its instructions, their minimum stall in cycles, and the count of each name."""

    instructions: int
    stall: int
    names: collections.Counter[str]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A compiled kernel.

    Attributes:
      name: Name of its function.
      compute: Loops that multiply; iterations by their number of selects.
      load: Loops that only load; iterations by their number of accesses to shared memory.
      registers: Registers of a thread at the launch.
      spills: Bytes of stack and of spilled registers.
      stack: Bytes of stack alone, which a call may need for its arguments.
      shared_memory: Bytes of a program.
      warnings: Warnings of the assembler.
    """

    name: str
    compute: list[dict[int, LoopTurn]]
    load: list[dict[int, LoopTurn]]
    registers: int
    spills: int
    stack: int
    shared_memory: int
    warnings: list[str]


def parse(text: str) -> list[Instruction]:
    """Parse `nvdisasm`'s output for one kernel, with stall cycles before each instruction."""
    labels: dict[str, int] = {}
    lines: list[re.Match[str]] = []
    for line in text.splitlines():
        if label := re.match(r"(\.L\w+):", line):
            labels[label[1]] = len(lines)
        elif match := _INSTRUCTION.search(line):
            lines.append(match)
    code = []
    for at, match in enumerate(lines):
        stall, predicate, name, operands = match.groups()
        name = name.split(".")[0]
        target = _TARGET.match(operands) if name == "BRA" else None
        if name in ("BRX", "JMP") or (name == "BRA" and target is None):
            raise ValueError(f"branches must have a label, got {match[0]}")
        goes_on = name not in ("BRA", "EXIT", "RET") or predicate is not None or (target and target[1].strip())
        after = ([labels[target[2]]] if target else []) + ([at + 1] if goes_on and at + 1 < len(lines) else [])
        code.append(Instruction(name, int(stall), tuple(after)))
    return code


def loops(code: list[Instruction]) -> dict[int, set[int]]:
    """Return the instructions of each loop by its first one: those that reach a branch back to it without passing
    it.
    """
    before: list[list[int]] = [[] for _ in code]
    for at, instruction in enumerate(code):
        for after in instruction.after:
            before[after].append(at)
    everything = (1 << len(code)) - 1
    # Dominators of each instruction, as bits: those on every path to it.
    dominators = [1] + [everything] * (len(code) - 1)
    changed = True
    while changed:
        changed = False
        for at in range(1, len(code)):
            found = functools.reduce(int.__and__, (dominators[b] for b in before[at]), everything) | 1 << at
            changed |= found != dominators[at]
            dominators[at] = found
    found_loops: dict[int, set[int]] = {}
    for at, instruction in enumerate(code):
        for first in instruction.after:
            if dominators[at] >> first & 1:
                body = found_loops.setdefault(first, {first})
                ahead = [at]
                while ahead:
                    if (here := ahead.pop()) not in body:
                        body.add(here)
                        ahead += before[here]
    return found_loops


def innermost(code: list[Instruction], names: Iterable[str]) -> dict[int, set[int]]:
    """Return the loops that have such instructions, but no inner loop with them."""
    containing = {
        first: body for first, body in loops(code).items() if not {code[at].name for at in body}.isdisjoint(names)
    }
    return {first: body for first, body in containing.items() if not any(body > other for other in containing.values())}


def turns(code: list[Instruction], first: int, names: Iterable[str]) -> dict[int, LoopTurn]:
    """Return the longest iterations of a loop by their number of instructions with these names, without inner loops."""
    found = loops(code)
    body = found[first].difference(*(inner for inner in found.values() if inner < found[first]))
    before: dict[int, list[int]] = {at: [] for at in body}
    for at in body:
        for after in code[at].after:
            if after in body and after != first:
                before[after].append(at)
    ways: dict[int, dict[int, LoopTurn]] = {}
    for at in graphlib.TopologicalSorter(before).static_order():
        instruction, ways[at] = code[at], {}
        arriving = [LoopTurn(0, 0, collections.Counter())] if at == first else []
        for turn in arriving + [turn for b in before[at] for turn in ways[b].values()]:
            counts = turn.names + collections.Counter([instruction.name])
            _keep_longest(ways[at], LoopTurn(turn.instructions + 1, turn.stall + instruction.stall, counts), names)
    whole: dict[int, LoopTurn] = {}
    for at in body:
        if first in code[at].after:
            for turn in ways[at].values():
                _keep_longest(whole, turn, names)
    return dict(sorted(whole.items()))


def _keep_longest(ways: dict[int, LoopTurn], turn: LoopTurn, names: Iterable[str]) -> None:
    key = sum(turn.names[name] for name in names)
    if key not in ways or ways[key].instructions < turn.instructions:
        ways[key] = turn


def kernels(compile_them: Callable[[], object]) -> list[Kernel]:
    """Return the Mosaic GPU kernels that `compile_them` compiles, which must not have been compiled before.

    Raises:
      RuntimeError: None was compiled, or `nvdisasm` (package nvidia-cuda-nvdisasm) is missing.
    """
    with tempfile.TemporaryDirectory() as folder, _environment("MOSAIC_GPU_DUMP_TO", folder):
        compile_them()
        found = sorted(pathlib.Path(folder).glob("*.sass_ctrl"), key=by_number)
        if not found:
            raise RuntimeError(f"no kernel was compiled and disassembled, got {os.listdir(folder)}")
        return [_read(path) for path in found]


def by_number(path: pathlib.Path) -> tuple[str, int]:
    """Return the sorting key of a kernel's file: Mosaic appends the count of kernels of that name, so 10 is after 9."""
    name, number = path.stem.rsplit("_", 1)
    return name, int(number)


def _read(path: pathlib.Path) -> Kernel:
    code = parse(path.read_text())
    assembler = path.with_suffix(".ptxas").read_text()
    [memory] = re.findall(r"smem_scratch_bytes=(\d+)", path.with_suffix(".resources.txt").read_text())
    [spilled] = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", assembler)
    [registers] = re.findall(r"Used (\d+) registers", assembler)
    compute = innermost(code, ["HGMMA", "HMMA"])
    load = [first for first, body in innermost(code, ["UTMALDG"]).items() if first not in compute]
    return Kernel(
        name=path.stem,
        compute=[turns(code, first, ["FSEL"]) for first in compute],
        load=[turns(code, first, SHARED_MEMORY) for first in load],
        registers=int(registers),
        spills=sum(map(int, spilled)),
        stack=int(spilled[0]),
        shared_memory=int(memory),
        warnings=re.findall(r"^.*(?:warning|C75\d\d).*$", assembler, re.MULTILINE),
    )


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def compile_paged(shape: AttentionShape) -> Kernel:
    """Return our kernel for a case (another one merges its partials)."""
    attend = functools.partial(paged_attention, implementation="mosaic_gpu")
    arguments = *shape.paged_specs(), shape.work("mosaic_gpu").config.abstract()
    return kernels(lambda: compile_program(attend, arguments))[0]


def compile_statistics(shape: StatisticsShape) -> list[Kernel]:
    """Return our kernels for attention scores: of columns, and of rows."""
    observe = functools.partial(attention_statistics, implementation="mosaic_gpu")
    return kernels(lambda: compile_program(observe, shape.specs()))


def compile_experts(shape: ExpertsShape) -> list[Kernel]:
    """Return our kernels for a mixture of experts: gate and up, and down."""
    mix = functools.partial(mix_experts, implementation="mosaic_gpu")
    return kernels(lambda: compile_program(mix, shape.specs()))


def compile_float8(rows: int, outputs: int, inputs: int) -> Kernel:
    """Return our kernel for an FP8 matrix."""
    arguments = (
        jax.ShapeDtypeStruct((rows, inputs), jnp.bfloat16),
        jax.ShapeDtypeStruct((outputs, inputs), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((outputs, inputs // 128), jnp.float32),
    )
    multiply = functools.partial(float8_matmul, implementation="mosaic_gpu")
    [kernel] = kernels(lambda: compile_program(multiply, arguments))
    return kernel


def compile_jaxs(shape: AttentionShape, *, causal: bool) -> Kernel:
    """Return jax's kernel for as many rows as slots, with two warpgroups of 64 rows and blocks of 128 slots as in
    ours.
    """
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    config = attention_mgpu.TuningConfig(block_q=64, block_kv=128, max_concurrent_steps=2, causal=causal)
    attend = functools.partial(attention_mgpu.attention, config=config)
    # In jax 0.11.2 it supports float16 only.
    q, k = (jax.ShapeDtypeStruct((1, shape.N, heads, shape.D), jnp.float16) for heads in (shape.H, shape.K))
    [kernel] = kernels(lambda: compile_program(attend, (q, k, k)))
    return kernel


def _rows(name: str, kernel: Kernel) -> Iterator[dict[str, object]]:
    for kind, loops_of_kind in (("multiplies", kernel.compute), ("loads", kernel.load)):
        whole = min((turn.instructions for loop in loops_of_kind for turn in loop.values()), default=0)
        for loop in loops_of_kind:
            for turn in loop.values():
                yield {
                    "kernel": name,
                    "loop": kind,
                    "instructions": turn.instructions,
                    "more": turn.instructions - whole,
                    "stall cycles": turn.stall,
                    **{instruction: turn.names[instruction] for instruction in COUNTED},
                    "of shared memory": sum(turn.names[instruction] for instruction in SHARED_MEMORY),
                    "registers": kernel.registers,
                    "spilled bytes": kernel.spills,
                    "shared memory": kernel.shared_memory,
                }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="JSON file")
    arguments = parser.parse_args()
    cases = {shape.name: shape for shape in ATTENTION["Qwen3-VL-8B"]}
    cold = cases["cold 4096"]
    compiled = {f"paged attention, {name}": compile_paged(cases[name]) for name in ("cold 4096", "decode 8 x 20480")}
    observed = STATISTICS["Qwen3-VL-8B"][0]
    for part, kernel in zip(("columns", "rows"), compile_statistics(observed), strict=True):
        compiled[f"statistics of {observed.N} rows x {observed.slots}, {part}"] = kernel
    for experts in EXPERTS["Qwen3-VL-30B-A3B"]:
        if experts.N in (1, 64, 8192):
            for part, kernel in zip(("gate and up", "down"), compile_experts(experts), strict=True):
                compiled[f"experts of {experts.N} rows, {part}"] = kernel
    for count in (64, 4096):
        compiled[f"8 bits, {count} rows x 4096 x 4096"] = compile_float8(count, 4096, 4096)
    for causal in (False, True):
        name = f"jax.experimental.pallas.ops.gpu.attention_mgpu, {'causal' if causal else 'not causal'}"
        compiled[name] = compile_jaxs(cold, causal=causal)
    rows = [row for name, kernel in compiled.items() for row in _rows(name, kernel)]
    head = report.environment("jax", "jaxlib", "nvidia-cuda-nvcc", "nvidia-cuda-nvdisasm") | {"target": "NVIDIA H200"}
    report.publish("Instructions of a warp for each turn of a loop", rows, head, arguments.out)


if __name__ == "__main__":
    main()
