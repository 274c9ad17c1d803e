"""CUDA graphs of multi-step decode, and the host's reads meanwhile: compiled for an H200 on a machine without one.

    JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 .venv-gate/bin/python -m research.thunks --out thunks_h200.json

XLA runs a program as a sequence of thunks. Those that it puts into a command buffer are launched as one graph. For a
conditional, and for a loop with an unknown number of iterations, the host reads a predicate, and waits for the device
until then. Here the sequence is read after all passes, for the first layers of a model; each further layer is like the
last. Without a device XLA leaves Mosaic's kernels (`kCustomCall`) outside of graphs; on a chip it captures them
(`benchmarks/results/trace_h200.json`).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import jax

from research.compiled import abstract_runner, compile_for
from vlcache_jax.benchmarks.floor import MODELS
from vlcache_jax.benchmarks.gpu.tracing import graphs, thunks
from vlcache_jax.device.programs.window import Window
from vlcache_jax.device.runner import Runner
from vlcache_jax.study import report

LAYERS = 4


def first_layers(model: str, layers: int = LAYERS) -> Runner:
    """Return a runner of a model's first layers, whose programs can be compiled."""
    config = MODELS[model]
    return abstract_runner(dataclasses.replace(config, text=dataclasses.replace(config.text, num_layers=layers)))


def of_window(runner: Runner, window: Window) -> dict[str, Any]:
    """Return figures of a decode program: seconds to compile it, in all and of processors, counts, and the sequence."""
    begin = sum(os.times()[:4])
    with tempfile.TemporaryDirectory() as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": "thunk.*"}
        compiled = compile_for(runner, window, dump)
        [file] = pathlib.Path(folder).glob("*thunk_sequence_after_thunk_passes*")
        text = file.read_text(errors="replace")
    found = graphs(text)
    steps, name = f"{window.steps} steps" if window.steps else "while any goes on", window.choice
    return {
        "rows": window.count, "window": f"{name}, {steps}",
        "compile s": compiled.seconds, "processor s": sum(os.times()[:4]) - begin,
        "predicates read": compiled.predicates, "operations": compiled.operations + compiled.looped, **found,
        "sequence": ", ".join(sequence(text)),
    }  # fmt: skip


def sequence(text: str) -> Iterator[str]:
    """Yield thunks outside of graphs, in their order, and graphs with the number of their thunks."""
    listed: list[list[Any]] = []
    for kind, inside in thunks(text):
        if inside:
            listed[-1][1] += 1
        else:
            listed.append([kind, 0])
    names = (f"graph of {held}" if kind == "kCommandBuffer" else kind for kind, held in listed)
    for name, alike in itertools.groupby(names):
        count = len(list(alike))
        yield f"{count} x {name}" if count > 1 else name


def measure(model: str, counts: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Yield the decode programs as a GPU runs them, and in their earlier form: one program that checks its rows'
    options.
    """
    runner = first_layers(model)
    steps = runner.buckets.window
    for count in counts:
        for window in (
            Window(count, "greedy", steps), Window(count, "drawn", steps), Window(count, "any", 1), Window(count),
        ):  # fmt: skip
            yield of_window(runner, window)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="Qwen3-VL-8B")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--out", type=pathlib.Path, help="JSON file")
    arguments = parser.parse_args()
    rows = list(measure(arguments.model, tuple(arguments.rows)))
    head = report.environment("jax", "jaxlib", "nvidia-cuda-nvcc")
    head |= {"target": "NVIDIA H200", "model": arguments.model, "layers": LAYERS}
    title = f"A window's thunks, {arguments.model}'s first {LAYERS} layers, jax {jax.__version__}"
    report.publish(title, rows, head, arguments.out)


if __name__ == "__main__":
    main()
