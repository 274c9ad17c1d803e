"""Decode steps: their times, their kernels, and their share in CUDA graphs."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import statistics
import tempfile
import time
from collections.abc import Iterator

import numpy as np

from vlcache_jax import LLM, SamplingParams
from vlcache_jax.benchmarks.floor import H200
from vlcache_jax.benchmarks.floor import decode as decoded
from vlcache_jax.benchmarks.gpu.engines import checkpoint, settings
from vlcache_jax.benchmarks.gpu.plan import KERNELS, GpuCase, GpuPlan, Row
from vlcache_jax.benchmarks.gpu.tracing import dump_folder, graphs, traced
from vlcache_jax.benchmarks.random_models import drawn_weights
from vlcache_jax.outputs import RequestOutput

PROMPT, ANSWER = 2048, 257  # tokens of each sequence: the last of 64 begins before the first ends


def decode(plan: GpuPlan) -> Iterator[GpuCase]:
    for sequences in (1, 2) if plan.rehearse else (1, 16, 64):
        yield GpuCase(f"{sequences} sequences", functools.partial(_decode, plan, sequences), KERNELS)
        traced_decode = functools.partial(_traced_decode, plan, sequences)
        yield GpuCase(f"{sequences} sequences, traced", traced_decode, KERNELS)
    yield GpuCase("1 prompt read, traced", functools.partial(_traced_read, plan), KERNELS)
    if not plan.rehearse:
        yield GpuCase("graphs", functools.partial(_graphs, plan), KERNELS)


@functools.cache
def _decoder(plan: GpuPlan) -> LLM:
    """Return an engine that the cases of a process share."""
    stack = contextlib.ExitStack()
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    stack.enter_context(drawn_weights())
    checkpoint(plan, folder)
    length, answer = _lengths(plan)
    return LLM(folder, max_model_len=length + answer + 8, reuse="off", **settings(plan))


def _lengths(plan: GpuPlan) -> tuple[int, int]:
    """Return the tokens of each prompt and output."""
    return (20, 25) if plan.rehearse else (PROMPT, ANSWER)


def _generate(plan: GpuPlan, sequences: int, answer: int, length: int) -> list[RequestOutput]:
    rng = np.random.default_rng(0)
    prompts = [{"prompt_token_ids": rng.integers(97, 123, length).tolist()} for _ in range(sequences)]
    params = SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True)
    outputs = _decoder(plan).generate(prompts, params, use_tqdm=False)
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    if lengths != [answer] * sequences:
        raise ValueError(f"outputs must be {sequences} of {answer} tokens, got outputs of {lengths} tokens")
    return outputs


def _decode(plan: GpuPlan, sequences: int) -> Row:
    """Measure a step while all sequences decode, in the first multi-step decodes of the sequence that began last."""
    length, answer = _lengths(plan)
    start = time.monotonic()
    llm = _decoder(plan)
    opened = time.monotonic()
    _generate(plan, sequences, answer, length)
    compiled = time.monotonic()
    outputs = _generate(plan, sequences, answer, length)
    last = max(outputs, key=lambda output: output.metrics.ttft).metrics
    window = llm.service.device.runner.shapes.buckets.window
    step = statistics.median(last.inter_token[1 : 1 + len(last.inter_token) // 3]) / window
    least = sum(
        max(operator.operations / H200.matrix, operator.bytes / H200.memory)
        for operator in decoded(llm.service.checkpoint.config, sequences, sequences * (length + answer // 3))
    )
    return {
        "step ms": 1e3 * step, "tokens/s": sequences / step, "floor ms": 1e3 * least, "of floor": least / step,
        "prompts read, s": last.ttft, "opened, s": opened - start, "first run, s": compiled - opened,
    }  # fmt: skip


def _traced_decode(plan: GpuPlan, sequences: int) -> Row:
    """Trace short prompts, which are read in one step, and two multi-step decodes."""

    def run() -> None:
        _generate(plan, sequences, *((3, 20) if plan.rehearse else (17, 100)))

    run()
    return traced(plan, f"decode_{sequences}", run)


def _traced_read(plan: GpuPlan) -> Row:
    def run() -> None:
        _generate(plan, 1, 1, 20 if plan.rehearse else PROMPT)

    run()
    return traced(plan, "read", run)


def _graphs(plan: GpuPlan) -> Row:
    """Count which parts are in CUDA graphs, for the decode programs that this process compiled (not read from a
    disk).
    """
    files = sorted(pathlib.Path(dump_folder(plan)).glob("*thunk_sequence_after_thunk_passes*"))
    if not files:
        raise ValueError(
            "the compiler must dump its thunks, got none: programs were loaded from the compile cache; delete it"
        )
    found = [graphs(file.read_text(errors="replace")) for file in files]
    return {name: [row[name] for row in found] for name in found[0]}
