"""Launches of a layer's experts in decoding and prefill, counted in programs that are compiled for an H200.

    JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 .venv-gate/bin/python -m research.experts --out experts.json

XLA's version is a loop over the experts that have rows, with an inner loop over tiles of their rows. Their operations
count once per iteration, if all experts are equally likely. A sort counts once, however many kernels it takes.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import re
import sys
from collections.abc import Sequence

import numpy as np

from research.compiled import abstract_runner, compile_h200, computation, count_operations
from vlcache_jax.device.programs.layers import Layer
from vlcache_jax.models.registry import published_config
from vlcache_jax.pallas_kernels import mix_experts
from vlcache_jax.pallas_kernels.grouped_matmul.xla import tile_of
from vlcache_jax.pallas_kernels.shapes import EXPERTS, ExpertsShape
from vlcache_jax.study import report

_LOOP = re.compile(r" while\(.*?condition=%([^,\s]+), body=%([^,\s]+)")


def launches(program: str, text: str, turns: Sequence[float]) -> float:
    """Return the number of operations that a part of a compiled program launches.

    Args:
      program: The full program.
      text: The part.
      turns: Iterations of its loops, of the loops within them, and so on; deeper loops are an error.
    """
    loops = _LOOP.findall(text)
    within = [computation(program, part) for of_loop in loops for part in of_loop]
    return count_operations(text) - len(loops) + sum(turns[0] * launches(program, part, turns[1:]) for part in within)


def turns_of(shape: ExpertsShape) -> tuple[float, float]:
    """Return the iterations of XLA's loops: over experts, and over tiles of one of them."""
    sizes = shape.sizes()
    tiles = -(-sizes // tile_of(shape.N * shape.k, shape.E))
    experts = int(np.count_nonzero(sizes))
    return experts, float(tiles.sum()) / experts


def of_experts(shape: ExpertsShape, implementation: str) -> tuple[float, int]:
    """Return (operations of the experts' products of a layer, from the router's choice on; bytes of temporaries)."""
    compiled = compile_h200(functools.partial(mix_experts, implementation=implementation), shape.specs())
    text, plan = compiled.as_text(), compiled.memory_analysis()
    if text is None or plan is None:
        raise RuntimeError("the compiler returned no memory plan")
    return launches(text, text[text.index("ENTRY") :], turns_of(shape)), plan.temp_size_in_bytes


def of_layer(model: str, rows: int) -> float:
    """Return the operations of a layer of `rows` rows, with the kernels."""
    runner = abstract_runner(published_config(model))
    program = Layer(rows, rows, False)
    arguments = program.arguments(runner.shapes)
    text = compile_h200(program.function(runner.shapes), arguments, program.donates).as_text() or ""
    return launches(text, text[text.index("ENTRY") :], ())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", help="rows of a step; by default all of `shapes.EXPERTS`")
    parser.add_argument("--model", default="Qwen3-VL-30B-A3B", choices=EXPERTS)
    parser.add_argument("--out", type=pathlib.Path, help="JSON file")
    arguments = parser.parse_args()
    rows, model = [], arguments.model
    layers = published_config(model).text.num_layers
    for shape in EXPERTS[model]:
        if arguments.rows and shape.N not in arguments.rows:
            continue
        loops, loop_bytes = of_experts(shape, "xla")
        kernels, kernel_bytes = of_experts(shape, "mosaic_gpu")
        layer = of_layer(model, shape.N)
        rows.append(
            {
                "model": model,
                "rows": shape.N,
                "experts, XLA": round(loops),
                "experts, kernels": round(kernels),
                "all layers, XLA": round(layers * (layer - kernels + loops)),
                "all layers, kernels": round(layers * layer),
                "temporary MB, XLA": loop_bytes / 1e6,
                "temporary MB, kernels": kernel_bytes / 1e6,
            }
        )
        print(rows[-1], file=sys.stderr)
    head = report.environment("jax", "jaxlib", "nvidia-cuda-nvcc") | {"target": "NVIDIA H200"}
    report.publish("Operations that layers with experts launch", rows, head, arguments.out)


if __name__ == "__main__":
    main()
