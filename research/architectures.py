"""The portable kernels, compiled for each architecture since Ampere on a machine without a GPU.

    JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 .venv-gate/bin/python -m research.architectures --out architectures.json

Each case compiles in its own process: a compiler that does not know an instruction of a GPU ends its process, and this
outcome is part of the result. For each kernel the result has the assembler's output and the longest iteration of its
loop in machine code, with masks and without.

The lower bound of an iteration is counted in cycles of a multiprocessor:

- products at the rate of the data sheet (with sums in float32; for B200, whose sheet gives only that of tcgen05,
  Ampere's);
- one instruction per cycle for each of four schedulers;
- 128 bytes per cycle of shared memory;
- stalls that the assembler has encoded, which the programs of a multiprocessor hide for each other.

Waits for memory and at barriers come on top, so the shares are upper bounds. (The kernel for Hopper, measured, takes
1.8 times its bound.)
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import importlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from research import sass
from vlcache_jax.common.files import write_whole
from vlcache_jax.pallas_kernels import (
    attention,
    float8_matmul,
    link,
    mix_experts,
    norm_residual,
    paged_attention,
    rotate_write,
)
from vlcache_jax.pallas_kernels.chips import REGISTERS, RESERVED, Chip, compiling_for
from vlcache_jax.pallas_kernels.shapes import (
    ATTENTION,
    EXPERTS,
    ROWS,
    AttentionShape,
    LinkShape,
    cold,
)
from vlcache_jax.study import report

LIMIT = 300.0  # seconds for a case
IMPLEMENTATION = "mosaic_gpu_mma"
THREADS, SCHEDULERS = 128, 4  # of a program, of a multiprocessor
PRODUCTS = 16 * 8 * 16  # of one instruction
LOADED, BANDWIDTH = 512, 128  # bytes of shared memory: loaded by one instruction of a warp; available per cycle
_PATH = pathlib.Path(__file__).resolve().parents[1]


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU of an architecture, by its data sheet.

    Attributes:
      name: Name of the GPU.
      chip: Its resources as the kernels use them.
      clock: Boost clock in GHz.
      bandwidth: Bytes per second of its memory.
      products: Dense bfloat16 products with float32 sums, of a multiprocessor in a cycle.
      threads: Threads of a multiprocessor.
    """

    name: str
    chip: Chip
    clock: float
    bandwidth: float
    products: int
    threads: int


TARGETS = {
    "sm_80": Target("NVIDIA A100 80GB", Chip("8.0", 108), 1.41, 2039e9, 1024, 2048),
    "sm_86": Target("NVIDIA A10", Chip("8.6", 72), 1.695, 600e9, 512, 1536),
    "sm_89": Target("NVIDIA L4", Chip("8.9", 58), 2.04, 300e9, 512, 1536),
    "sm_90": Target("NVIDIA H200", Chip("9.0", 132), 1.83, 4800e9, 2048, 2048),
    "sm_100": Target("NVIDIA B200", Chip("10.0", 148), 1.85, 8000e9, 1024, 2048),
    "sm_120": Target("NVIDIA GeForce RTX 5090", Chip("12.0", 170), 2.407, 1792e9, 256, 1536),
}


def _attention(shape: AttentionShape, run: Callable[..., None]) -> None:
    run(functools.partial(attention, implementation=IMPLEMENTATION), shape.specs())


def _paged(shape: AttentionShape, run: Callable[..., None]) -> None:
    config = shape.work(IMPLEMENTATION).config
    attend = functools.partial(paged_attention, implementation=IMPLEMENTATION)
    run(lambda q, k, v, work: attend(q, k, v, work), (*shape.paged_specs(), config.abstract()))


def _link(shape: LinkShape, run: Callable[..., None]) -> None:
    run(functools.partial(link, codec=shape.codec, implementation=IMPLEMENTATION), shape.specs())


def _norm(rows: int, run: Callable[..., None]) -> None:
    shape = next(shape for shape in ROWS["Qwen3-VL-8B"] if rows == shape.N)
    run(functools.partial(norm_residual, eps=1e-6, implementation=IMPLEMENTATION), shape.norm_specs())


def _rotate(rows: int, run: Callable[..., None]) -> None:
    given, options = next(shape for shape in ROWS["Qwen3-VL-8B"] if rows == shape.N).rotate_specs()
    write = functools.partial(rotate_write, implementation=IMPLEMENTATION)
    run(lambda given, options: write(*given, **options), (given, options))


def _experts(rows: int, run: Callable[..., None]) -> None:
    shape = next(shape for shape in EXPERTS["Qwen3-VL-30B-A3B"] if rows == shape.N)
    run(functools.partial(mix_experts, implementation=IMPLEMENTATION), shape.specs())


def _float8(rows: int, run: Callable[..., None]) -> None:
    x, matrix = jax.ShapeDtypeStruct((rows, 4096), jnp.bfloat16), (12288, 4096)  # gate or up of the 8B model
    weight = jax.ShapeDtypeStruct(matrix, jnp.float8_e4m3fn)
    scale = jax.ShapeDtypeStruct((matrix[0], matrix[1] // 128), jnp.float32)
    run(functools.partial(float8_matmul, implementation=IMPLEMENTATION), (x, weight, scale))


def _float8_experts(rows: int, run: Callable[..., None]) -> None:
    shape = next(shape for shape in EXPERTS["Qwen3-VL-30B-A3B"] if rows == shape.N)
    run(functools.partial(mix_experts, implementation=IMPLEMENTATION), shape.float8_specs())


def _of_8b(name: str) -> AttentionShape:
    return next(shape for shape in ATTENTION["Qwen3-VL-8B"] if shape.name == name)


def _with_heads_of(width: int) -> AttentionShape:
    return AttentionShape(f"heads of {width}", 512, 4096, 16, 4, width, cold, (45, 150))


# The function that compiles each case.
CASES: dict[str, Callable[[Callable[..., None]], None]] = {
    "paged attention, cold 4096": functools.partial(_paged, _of_8b("cold 4096")),
    "paged attention, decode": functools.partial(_paged, _of_8b("decode 8 x 20480")),
    "paged attention, 7 queries a head": functools.partial(_paged, ATTENTION["Qwen2.5-VL-7B"][3]),
    **{
        f"paged attention, heads of {width}": functools.partial(_paged, _with_heads_of(width)) for width in (64, 80, 96)
    },
    "attention, heads of 72": functools.partial(_attention, ATTENTION["Qwen3-VL-8B"][-1]),  # padded to 80
    "link, 8 heads": functools.partial(_link, LinkShape(1024, 20480, 8, 128)),
    "link, 2 heads": functools.partial(_link, LinkShape(1024, 20480, 2, 128)),
    "link, int8": functools.partial(_link, LinkShape(1024, 20480, 8, 128, codec="int8")),
    "link, int4": functools.partial(_link, LinkShape(1024, 20480, 8, 128, codec="int4")),
    "norm with residual": functools.partial(_norm, 64),
    "rotation and writing": functools.partial(_rotate, 64),
    "experts of 30B-A3B": functools.partial(_experts, 8192),
    "8 bits, decode of 8B": functools.partial(_float8, 16),
    "8 bits, experts of 30B-A3B": functools.partial(_float8_experts, 8192),
}


def compile_case(target: Target, case: Callable[[Callable[..., Any]], None]) -> list[dict[str, Any]]:
    """Compile in this process, which may end here; return a row for each kernel."""
    from jax.experimental import topologies
    from jax.experimental.mosaic.gpu import utils

    # Lowering gets the architecture from the default device, which is no GPU here.
    architecture = tuple(map(int, target.chip.capability.split(".")))
    mock.patch.object(utils, "_infer_arch", return_value=architecture).start()
    [device] = topologies.get_topology_desc(platform="cuda", target_config=_config(target), topology="1x1x1").devices
    sharding = jax.sharding.SingleDeviceSharding(device)

    def run(function: Callable[..., Any], arguments: tuple[Any, ...]) -> jax.stages.Compiled:
        specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
        return jax.jit(function).lower(*specs).compile()

    with compiling_for(target.chip):
        return [describe(target, kernel) for kernel in sass.kernels(lambda: case(run))]


def _config(target: Target) -> str:
    """Return the compiler's description of a GPU."""
    major, minor = target.chip.capability.split(".")
    feature = "feature_extension: ACCELERATED_FEATURES" if target.chip.has_bulk_copies else ""
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {target.chip.shared_memory}
  shared_memory_per_block_optin: {target.chip.shared_memory - RESERVED}
  threads_per_core_limit: {target.threads} core_count: {target.chip.multiprocessors} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {int(target.bandwidth)} l2_cache_size: 41943040 clock_rate_ghz: {target.clock}
  device_memory_size: 24000000000 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {major} minor: {minor} {feature} }}
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }} device_description_str: "{target.name}"
runtime_version {{ major: 13 }}"""


def describe(target: Target, kernel: sass.Kernel) -> dict[str, Any]:
    """Return a kernel's row."""
    registers = -(-kernel.registers // 8) * 8  # they are allocated by eights
    room = target.chip.shared_memory // (kernel.shared_memory + RESERVED)
    programs = min(REGISTERS // (registers * THREADS), room, target.threads // THREADS)
    row: dict[str, Any] = {
        "kernel": kernel.name,
        "registers": kernel.registers,
        "spilled bytes": kernel.spills - kernel.stack,
        "stack bytes": kernel.stack,
        "shared memory": kernel.shared_memory,
        "programs on a multiprocessor": programs,
    }
    if kernel.compute:
        [loop] = kernel.compute
        turns = list(loop.values())
        row |= bounds(target, turns[0], programs, *loads_of(kernel.name, turns[0]))
        if len(turns) > 1:
            row["instructions of a masked turn"] = turns[-1].instructions
    return row


def loads_of(kernel: str, turn: sass.LoopTurn) -> tuple[int, int, int]:
    """Return how many loads a warp shares with all warps and how many are its own, and how many loads are read once.

    The last number counts keys and values, or matrices, which are read once from device memory.
    """
    loads = turn.names["LDSM"]
    if kernel.startswith("float8"):
        # Weights are a warp's own, 16 per thread and load, each of which is widened. A warp loads 8 rows with all
        # inputs of the iteration, for as many products as there are of them with each 64 outputs.
        own = turn.names["HADD2"] // 16
        return turn.names["HMMA"] // (2 * (own // 4)), own, SCHEDULERS * own
    # The experts' rows also come from shared memory; a warp loads its own. Attention's are in registers.
    own = 4 if kernel.startswith("experts") else 0
    return loads - own, own, loads - own


def bounds(target: Target, turn: sass.LoopTurn, programs: int, alike: int, own: int, read: int) -> dict[str, Any]:
    """Return the lower bound of an iteration, in cycles of a multiprocessor that its programs share.

    Args:
      alike, own, read: See `loads_of`.
    """
    products = turn.names["HMMA"] * PRODUCTS * SCHEDULERS  # products of a program
    loads = alike + own
    stored = alike + SCHEDULERS * own
    cycles = {
        "products": products / target.products,
        "instructions": turn.instructions,
        "shared memory": (SCHEDULERS * loads + stored) * LOADED / BANDWIDTH,
        "stalls": turn.stall / programs,
    }
    limit = max(cycles, key=lambda name: cycles[name])
    memory = read * LOADED / (target.bandwidth / target.chip.multiprocessors / (target.clock * 1e9))
    return {
        "instructions of a turn": turn.instructions,
        "products of a turn": turn.names["HMMA"],
        "loads from shared memory": loads,
        "stall cycles": turn.stall,
        "cycles": {name: round(count) for name, count in cycles.items()},
        "share of matrix rate at most": round(cycles["products"] / cycles[limit], 2),
        "limited by": limit,
        "share of bandwidth at most": round(min(1.0, memory / cycles[limit]), 2),
    }


def in_child(architecture: str, case: str, limit: float = LIMIT) -> list[dict[str, Any]] | str:
    """Compile in a child process; return the rows of the case's kernels, or the reason of a failure.

    Args:
      case: A name of `CASES`, or "module:function" for a case that is not there.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "rows.json")
        command = [sys.executable, "-m", "research.architectures", architecture, case, "--out", str(out)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (_PATH / "src", _PATH)))}
        try:
            ended = subprocess.run(
                command, cwd=_PATH, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                timeout=limit, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"took more than {limit:g} s"
        if ended.returncode == 0:
            rows: list[dict[str, Any]] = json.loads(out.read_text())
            return rows
    lines = [line for line in ended.stderr.splitlines() if "Error" in line or "LLVM ERROR" in line]
    how = f"status {ended.returncode}" if ended.returncode > 0 else signal.Signals(-ended.returncode).name
    return f"{how}: {lines[-1][:300] if lines else ended.stderr[-300:]}"


def _found(name: str) -> Callable[[Callable[..., None]], None]:
    if name in CASES:
        return CASES[name]
    module, function = name.split(":")
    found: Callable[[Callable[..., None]], None] = getattr(importlib.import_module(module), function)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "architecture", nargs="?", choices=TARGETS, help="architecture to compile a case for, in this process"
    )
    parser.add_argument("case", nargs="?")
    parser.add_argument("--only", default="", help="regular expression of cases; other results in the file are kept")
    parser.add_argument("--together", type=int, default=1, help="number of concurrent processes")
    parser.add_argument("--limit", type=float, default=LIMIT, help="maximum seconds of a case")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="JSON file")
    arguments = parser.parse_args()
    if arguments.architecture:
        rows = compile_case(TARGETS[arguments.architecture], _found(arguments.case))
        arguments.out.write_text(json.dumps(rows))
        return
    head = report.environment("jax", "jaxlib", "nvidia-cuda-nvcc", "nvidia-cuda-nvdisasm")
    known: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    content = {"title": "Portable kernels by architecture", "dtype": jnp.dtype(jnp.bfloat16).name, **head}
    cases = [case for case in CASES if re.search(arguments.only, case)]
    with concurrent.futures.ThreadPoolExecutor(arguments.together) as pool:
        runs = {(name, case): pool.submit(in_child, name, case, arguments.limit) for case in cases for name in TARGETS}
        for (name, case), run in runs.items():
            known.setdefault(name, {"cases": {}})["cases"][case] = run.result()
            print(name, case, run.result(), flush=True)
            for architecture, target in TARGETS.items():
                found = known.get(architecture, {"cases": {}})["cases"]
                content[architecture] = {
                    "chip": target.name,
                    "capability": target.chip.capability,
                    "cases": {case: found[case] for case in CASES if case in found},
                }
            write_whole(arguments.out, report.to_json(content))


if __name__ == "__main__":
    main()
