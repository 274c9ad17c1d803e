"""Programs of real models, compiled for an H200 on a machine without one: their costs and memory.

    uv run --extra cuda13 python -m research.compile_report --full --out benchmarks/results/compile.json

Kernels report registers, and bytes spilled to memory (there should be none). Programs report their memory plan (bytes
of the KV pool updated in place, temporaries), and how many operations they launch. `tests/gates` checks a smaller list.
It needs jax with CUDA, no GPU, and `JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1` if there is no driver.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from research.compiled import Compiled, abstract_runner, compile_for, compile_program
from vlcache_jax.benchmarks.floor import MODELS
from vlcache_jax.device.programs.base import unpack
from vlcache_jax.device.programs.encode import Encode
from vlcache_jax.device.programs.layers import BLOCK, Block, Layer, layer_step
from vlcache_jax.device.programs.memory import Link
from vlcache_jax.device.programs.window import Window
from vlcache_jax.device.runner import Runner
from vlcache_jax.pallas_kernels import attention, attention_statistics, link, paged_attention
from vlcache_jax.pallas_kernels.shapes import ATTENTION, LINK, STATISTICS
from vlcache_jax.study import report

# Rows of each layer of a selective prefill of 20480 slots: a schedule of mean 0.025, with its text rows.
SHRINKING = (2048, 1024, 512, 256, 128)


def compile_prefill(runner: Runner, bounds: tuple[int, ...]) -> Compiled:
    """Compile a full prefill as one program; `bounds` are the rows of each layer, and those that leave the last."""
    layer = jax.jit(functools.partial(layer_step, runner.shapes), static_argnames="keep")  # traced once for each shape

    def prefill(layers: list[Any], x: jax.Array, pool: list[Any], rows: jax.Array, works: dict[int, Any]) -> Any:
        updated = []
        for params, memory, keep in zip(layers, pool, bounds[1:], strict=True):
            own = unpack(rows, len(x))
            active = np.full(2, len(x), np.int32)
            x, memory, _ = layer(params, x, memory, own, active, works[keep], None, keep=keep)
            updated.append(memory)
        return x, updated

    text = runner.config.text
    layer_params, x, memory, rows, *_ = Layer(bounds[0], bounds[0], False).arguments(runner.shapes)
    works = {keep: runner.shapes.work_config(keep).abstract() for keep in bounds[1:]}
    return compile_program(prefill, ([layer_params] * text.num_layers, x, [memory] * text.num_layers, rows, works), 2)


def prefill_bounds(num_layers: int, *, shrinking: bool) -> tuple[int, ...]:
    """Return the rows of each layer of a cold prefill of 4096 rows, or of a schedule, for the logits of one row."""
    if not shrinking:
        return (4096,) * num_layers + (1,)
    return (*(SHRINKING[i * len(SHRINKING) // num_layers] for i in range(num_layers)), 1)


def kernels(model: str) -> Iterator[tuple[str, Compiled]]:
    """Yield every real shape of the model's kernels, compiled."""
    for shape in ATTENTION[model]:
        attend = functools.partial(attention, implementation="mosaic_gpu")
        if shape.has_pages:
            attend_pages = functools.partial(paged_attention, implementation="mosaic_gpu")
            work = shape.work("mosaic_gpu").config.abstract()
            yield f"paged attention, {shape.name}", compile_program(attend_pages, (*shape.paged_specs(), work))
        if not shape.has_pages or shape.name == "cold 4096":
            yield f"attention, {shape.name}", compile_program(attend, shape.specs())
    for case in LINK.get(model, ()):
        write = functools.partial(link, implementation="mosaic_gpu")
        yield f"link {case.T} tokens", compile_program(write, case.specs(), (0, 1))
    for observed in STATISTICS.get(model, ()):
        observe = functools.partial(attention_statistics, implementation="mosaic_gpu")
        yield f"statistics of {observed.N} rows, {observed.slots} slots", compile_program(observe, observed.specs())


def programs(model: str) -> Iterator[tuple[str, Compiled]]:
    """Yield layer steps, decoding, the encoder, linking, and full prefills of a model, compiled."""
    runner = abstract_runner(MODELS[model])
    for size, keep in ((8192, 8192), (2048, 512), (512, 512), (64, 64), (64, 1)):
        yield f"layer {size} -> {keep}", compile_for(runner, Layer(size, keep, False))
    window = runner.buckets.window
    for size in (1, 64):
        for one in (Window(size, "greedy", window), Window(size, "drawn", window), Window(size, "any", 1)):
            yield f"window {size}, {one.choice}", compile_for(runner, one)
    yield "encode 4096 patches", compile_for(runner, Encode(4096))
    layers = runner.shapes.link_groups[0].count
    for size, count in ((4096, 1), (1024, 16)):
        name = f"link {count} x {size} tokens, {layers} layers"
        yield name, compile_for(runner, Link(size, count, layers))
    yield f"{BLOCK} layers of 512 rows", compile_for(runner, Block(512))
    for shrinking in (False, True):
        bounds = prefill_bounds(runner.config.text.num_layers, shrinking=shrinking)
        yield f"prefill {bounds[0]} rows{', shrinking' * shrinking}", compile_prefill(runner, bounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="all models; otherwise Qwen3-VL-8B")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file")
    arguments = parser.parse_args()
    rows = []
    for model in MODELS if arguments.full else ("Qwen3-VL-8B",):
        for of_kernels, compiled in ((True, kernels(model)), (False, programs(model))):
            for name, result in compiled:
                print(f"{model}: {name}: {result}", file=sys.stderr)
                rows.append(
                    {
                        "model": model,
                        "program": name,
                        "compile s": result.seconds,
                        "spilled bytes": result.spills,
                        "registers": result.registers if of_kernels else "",
                        "in place MB": result.alias / 1e6,
                        "temporary MB": result.temp / 1e6,
                        "operations": result.operations,
                        "in loops": result.looped,
                        "predicates": result.predicates,
                    }
                )
    head = report.environment("jax", "jaxlib", "nvidia-cuda-nvcc") | {"target": "NVIDIA H200"}
    report.publish(f"Compiled for an H200 with jax {jax.__version__}", rows, head, arguments.out)


if __name__ == "__main__":
    main()
