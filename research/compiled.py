"""Compilation for an H200 on a machine without one.

It needs jax with CUDA, no GPU, and `JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1` if there is no driver.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vlcache_jax.device.buckets import BucketSizes
from vlcache_jax.device.mesh import Devices, copies_of, repeats, spec_of, widened
from vlcache_jax.device.programs.base import Program, Shapes
from vlcache_jax.device.runner import Runner
from vlcache_jax.models import ModelConfig, abstract_model
from vlcache_jax.pallas_kernels import PAGE

TARGET = pathlib.Path(__file__).with_name("h200.txtpb")
SLOTS = 20480

_printed: list[str] = []  # output of the assembler, in this process


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Result of compiling a program.

    Attributes:
      seconds: Seconds of lowering and compiling.
      alias, temp: Bytes updated in place, and of temporaries.
      operations: Operations that the program launches: fusions, library calls, kernels, copies; a loop is one.
      looped: Operations of one iteration of its loops.
      predicates: Branches, and loops with an unknown number of iterations. A GPU's host reads a predicate for each, and
        waits for the device.
      spills: Bytes of stack and of spilled registers of its Mosaic GPU kernels, the worst of them; None without any.
        If the assembler prints nothing because it has them already, the worst of all kernels so far.
      registers: Registers of a thread, with the same rule.
      products: Matrix products, outside of Mosaic GPU kernels.
      written: Shapes of arrays that its operations write.
      text: Text of the compiled program.
    """

    seconds: float
    alias: int
    temp: int
    operations: int
    looped: int
    predicates: int
    spills: int | None
    registers: int | None
    products: int
    written: frozenset[tuple[int, ...]] = dataclasses.field(repr=False)
    text: str = dataclasses.field(repr=False)


@functools.cache
def h200s(count: int) -> list[Any]:
    """Return `count` H200s of one process, to compile for."""
    from jax.experimental import topologies

    topology = f"1x1x{count}"
    found = topologies.get_topology_desc(platform="cuda", target_config=TARGET.read_text(), topology=topology)
    return list(found.devices)


def h200() -> Any:
    """Return an H200 to compile for."""
    return h200s(1)[0]


def compile_h200(
    function: Callable[..., Any], arguments: tuple[Any, ...], donated: Any = (), options: dict[str, Any] | None = None
) -> jax.stages.Compiled:
    """Compile a program and return it; arguments are as in `compile_program`."""
    sharding = jax.sharding.SingleDeviceSharding(h200())
    specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    return jax.jit(function, donate_argnums=donated).lower(*specs).compile(options)


def compile_program(
    function: Callable[..., Any], arguments: tuple[Any, ...], donated: Any = (), options: dict[str, Any] | None = None
) -> Compiled:
    """Compile for an H200; arguments are trees of objects with shape and dtype, options are the compiler's."""
    start = time.perf_counter()
    with _ptxas_output() as output:
        compiled = compile_h200(function, arguments, donated, options)
    seconds = time.perf_counter() - start
    plan, text = compiled.memory_analysis(), compiled.as_text()
    if plan is None or text is None:
        raise RuntimeError("the compiler returned no memory plan")
    entry = text[text.index("ENTRY") :]
    loops = [computation(text, body) for body in re.findall(r"body=%([^,\s]+)", text)]
    # jax 0.12 assembles a kernel once in a process: all earlier output counts for kernels that it has already.
    _printed.append(output[0])
    printed = output[0] if "registers" in output[0] or "mosaic_gpu" not in text else "".join(_printed)
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", printed)
    registers = [int(n) for n in re.findall(r"[Uu]sed (\d+) registers", printed)]
    return Compiled(
        seconds=seconds,
        alias=plan.alias_size_in_bytes,
        temp=plan.temp_size_in_bytes,
        operations=count_operations(entry),
        looped=sum(map(count_operations, loops)),
        predicates=_predicates(text),
        spills=max((sum(map(int, frame)) for frame in frames), default=None),
        registers=max(registers, default=None),
        products=len(re.findall(r" dot\(|custom_call_target=\"__cublas", text)),
        written=frozenset().union(*map(_written, (entry, *loops))),
        text=text,
    )


def _predicates(text: str) -> int:
    """Return the number of branches, and of loops with an unknown number of iterations."""
    loops = re.findall(r"^.* while\(.*$", text, re.MULTILINE)
    return len(re.findall(r" conditional\(", text)) + sum("known_trip_count" not in loop for loop in loops)


def count_operations(text: str) -> int:
    """Return how many instructions of a computation are launched."""
    return len(_launched(text))


def _written(text: str) -> set[tuple[int, ...]]:
    """Return the shapes of arrays that instructions of a computation write."""
    return {tuple(map(int, shape.split(","))) for shape in re.findall(r"\[([\d,]+)\]", " ".join(_launched(text)))}


def _launched(text: str) -> list[str]:
    """Return the types of the launched instructions of a computation."""
    found = re.findall(r"^\s*(?:ROOT )?%\S+ = (\([^=]*?\)|\S+) ([a-z\-]+)\(", text, re.MULTILINE)
    unlaunched = "parameter", "bitcast", "get-tuple-element", "tuple", "constant"
    return [kind for kind, name in found if name not in unlaunched]


def exchanged(text: str) -> dict[str, int]:
    """Return how often a compiled program has each kind of exchange between devices."""
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    return dict(collections.Counter(re.findall(rf"= (?:\([^=]*?\)|\S+) ({kinds})(?:-start)?\(", text)))


def computation(text: str, name: str) -> str:
    """Return the instructions of a computation of a compiled program."""
    begin = text.index(f"\n%{name} (")
    return text[begin : text.index("\n}", begin)]


@contextmanager
def _ptxas_output() -> Iterator[list[str]]:
    """Capture the assembler's output, below Python, while Mosaic GPU kernels compile."""
    output: list[str] = []
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [(fd, os.dup(fd)) for fd in (1, 2)]
    with tempfile.TemporaryFile() as file:
        try:
            for fd, _ in kept:
                os.dup2(file.fileno(), fd)
            yield output
        finally:
            for fd, copy in kept:
                os.dup2(copy, fd)
                os.close(copy)
            file.seek(0)
            output.append(file.read().decode(errors="replace"))


def abstract_runner(config: ModelConfig, implementation: str = "mosaic_gpu", **stored: Any) -> Runner:
    """Return a runner without weights, whose programs compile but do not run. `stored` has `codec` and
    `kept_tokens`.
    """
    params = nnx.to_pure_dict(nnx.state(abstract_model(config, jnp.bfloat16)))
    normalization = np.zeros((3, 256), np.float32)
    return Runner(
        config, params, normalization,
        num_slots=SLOTS, max_pages=SLOTS // PAGE - 1, buckets=BucketSizes(), implementation=implementation, **stored,
    )  # fmt: skip


def compile_for(runner: Runner, program: Program[Any], options: dict[str, Any] | None = None) -> Compiled:
    """Compile one of the runner's programs."""
    shapes = runner.shapes
    return compile_program(program.function(shapes), program.arguments(shapes), program.donates, options)


def spread_shapes(config: ModelConfig, count: int, implementation: str | None = "mosaic_gpu", **stored: Any) -> Shapes:
    """Return the shapes of an engine that is distributed over some H200s; `stored` is as in `abstract_runner`."""
    devices = Devices.over(h200s(count), copies_of(config.text, count))
    computed = widened(config, count)
    whole = nnx.to_pure_dict(nnx.state(abstract_model(computed, jnp.bfloat16)))

    def placed(keys: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        path = tuple(key.key for key in keys)
        *outer, inner = leaf.shape
        shape = *outer, inner * repeats(path, leaf.shape, count)
        return devices.abstract(jax.ShapeDtypeStruct(shape, leaf.dtype), spec_of(path))

    return Shapes(
        computed, jax.tree_util.tree_map_with_path(placed, whole), devices.abstract(np.zeros((3, 256), np.float32)),
        num_slots=SLOTS, max_pages=SLOTS // PAGE - 1, buckets=BucketSizes(), implementation=implementation,
        is_host=False, devices=devices, **stored,
    )  # fmt: skip
