"""Speed of a model with linear attention, beside one with full attention of the same size, and beside transformers.

    uv run --group test python -m research.hybrids --out benchmarks/results/hybrids_cpu.json

All models have 12 layers of width 768 and random weights in float32. The hybrid has full attention in every fourth
layer, as Qwen3.5 has. Each round measures every model once, in turn, and the table shows medians.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from vlcache_jax import LLM, SamplingParams
from vlcache_jax.benchmarks.random_models import HYBRID_TEXT, LETTERS, TEXT
from vlcache_jax.common.files import check_writable
from vlcache_jax.study.report import environment, show, write
from vlcache_jax.testing import make_checkpoint

PROMPT, STEPS = 1024, 32  # tokens of the prompt whose first token is timed, and tokens decoded after short prompts
SHORT = 32  # tokens of the prompts before decoding
BATCHES = (1, 8, 32)
FULL = "full attention"
HYBRID = "hybrid"
OTHER = "hybrid, transformers"
Measure = Callable[[Sequence[Sequence[int]], int], float]  # (prompts, tokens of each output) -> seconds


def of_engine(llm: LLM) -> Measure:
    """Return a function that answers prompts with an engine."""

    def measure(prompts: Sequence[Sequence[int]], tokens: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        begin = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": list(one)} for one in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        if any(len(output.outputs[0].token_ids) != tokens for output in outputs):
            raise ValueError(f"outputs must have {tokens} tokens, got {[len(o.outputs[0].token_ids) for o in outputs]}")
        return seconds

    return measure


def of_transformers(directory: pathlib.Path) -> Measure:
    """Return a function that answers prompts of equal length with transformers, all together."""
    import torch
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()

    def measure(prompts: Sequence[Sequence[int]], tokens: int) -> float:
        ids = torch.tensor([list(one) for one in prompts])
        begin = time.perf_counter()
        with torch.no_grad():
            made = model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        if made.shape[1] != ids.shape[1] + tokens:
            raise ValueError(f"outputs must have {tokens} tokens, got {made.shape[1] - ids.shape[1]}")
        return time.perf_counter() - begin

    return measure


def measure(rounds: int) -> list[dict[str, Any]]:
    """Return the rows of the table."""
    rng = np.random.default_rng(0)

    def prompts(count: int, length: int) -> list[list[int]]:
        return rng.choice(LETTERS, (count, length)).tolist()

    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    with ExitStack() as stack:
        root = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vlcache-bench-")))
        full = make_checkpoint(root / "full", "qwen3_vl", text=TEXT)
        hybrid = make_checkpoint(root / "hybrid", "qwen3_5", text=HYBRID_TEXT)
        options: dict[str, Any] = {"dtype": "float32", "max_model_len": 4096, "enable_prefix_caching": False}
        engines = [stack.enter_context(LLM(one, use_tqdm=False, **options)) for one in (full, hybrid)]
        ways = dict(zip((FULL, HYBRID), map(of_engine, engines), strict=True)) | {OTHER: of_transformers(hybrid)}
        for number in range(rounds + 1):  # the first round compiles
            first = prompts(1, PROMPT)
            batches = {count: prompts(count, SHORT) for count in BATCHES}
            for name, way in ways.items():
                found = {"first": way(first, 1)}
                for count, batch in batches.items():
                    found[f"{count}"] = way(batch, 1 + STEPS) - way(batch, 1)
                for what, value in found.items() if number else ():
                    seconds[name, what].append(value)
    return list(_rows(seconds))


def _rows(seconds: dict[tuple[str, str], list[float]]) -> Iterator[dict[str, Any]]:
    for name in (FULL, HYBRID, OTHER):
        row: dict[str, Any] = {
            "model": name,
            "first token [ms]": round(1e3 * statistics.median(seconds[name, "first"])),
        }
        for count in BATCHES:
            row[f"decode {count} [tokens/s]"] = round(count * STEPS / statistics.median(seconds[name, f"{count}"]), 1)
        yield row


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds of all models")
    parser.add_argument("--out", type=pathlib.Path, help="file of the results, JSON")
    given = parser.parse_args(arguments)
    check_writable("--out", given.out)
    rows = measure(given.rounds)
    title = f"First token after {PROMPT} tokens, and decoding after {SHORT}"
    show(title, rows)
    if given.out is not None:
        head = {**environment("jax", "jaxlib", "torch", "transformers"), "rounds": given.rounds}
        write(title, rows, head, given.out)


if __name__ == "__main__":
    main()
