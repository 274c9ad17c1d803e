"""Time to the first token of each turn of a dialogue with an image more in each turn, with a model with states.

    uv run --group test python -m research.dialogue --out benchmarks/results/dialogue_cpu.json

The model is the hybrid of `research.hybrids`: 12 layers of width 768 with random weights. One engine continues from
snapshots of states, the other one computes each prompt; both keep encoder output. Each round is a dialogue with other
images, and both engines answer each turn in turn. A second table tells what snapshots cost: a prompt of 4096 tokens
that no other one begins like, with and without them. Tables show medians.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import jax.numpy as jnp
import numpy as np

from vlcache_jax import LLM, RequestOutput, SamplingParams
from vlcache_jax.benchmarks.random_models import HYBRID_TEXT, LETTERS
from vlcache_jax.common.files import check_writable
from vlcache_jax.study.report import environment, show, write
from vlcache_jax.testing import make_checkpoint

SIDE = 512  # pixels: an image has 256 tokens
LONG = 4096  # tokens of the prompt whose snapshots are timed
WAYS = {"snapshots": None, "computed": 0}  # `state_snapshots` of each engine
ANSWER = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def first_token(llm: LLM, conversation: list[dict[str, Any]]) -> tuple[float, RequestOutput]:
    """Return the seconds to the first token, and the output."""
    begin = time.perf_counter()
    [output] = llm.chat([conversation], ANSWER, use_tqdm=False)
    return time.perf_counter() - begin, output


def dialogues(engines: dict[str, LLM], turns: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a row of each turn.

    Raises:
      ValueError: the engines give different tokens, or nothing is found.
    """
    seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
    tokens: dict[int, tuple[int, int]] = {}
    rng = np.random.default_rng(0)
    for number in range(rounds + 1):  # the first round compiles
        conversation: list[dict[str, Any]] = [{"role": "system", "content": "Answer in one word."}]
        for turn in range(turns):
            image = rng.integers(0, 256, (SIDE, SIDE, 3), np.uint8)
            question = {"type": "text", "text": f"What is new in image {turn}?"}
            conversation.append({"role": "user", "content": [{"type": "image", "image": image}, question]})
            answers = []
            for name, llm in engines.items():
                took, output = first_token(llm, conversation)
                answers.append(output.outputs[0].token_ids)
                if number:
                    seconds[name, turn].append(took)
                if name == "snapshots":
                    tokens[turn] = len(output.prompt_token_ids), output.num_cached_tokens
            if answers[0] != answers[1]:
                raise ValueError(f"turn {turn} must have the same tokens with and without snapshots, got {answers}")
            conversation.append({"role": "assistant", "content": "Red."})
    if not tokens[turns - 1][1]:
        raise ValueError("the last turn must continue from a snapshot, got 0 cached tokens")
    for turn in range(turns):
        known, new = (1e3 * statistics.median(seconds[name, turn]) for name in WAYS)
        count, cached = tokens[turn]
        yield {
            "turn": turn + 1, "tokens": count, "cached": cached, "from a snapshot [ms]": round(known),
            "computed [ms]": round(new), "times": round(new / known, 2),
        }  # fmt: skip


def cost(engines: dict[str, LLM], rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a row of each way to compute a long prompt. Each prompt is computed in both ways, one after the other."""
    seconds: dict[str, list[float]] = defaultdict(list)
    rng = np.random.default_rng(1)
    taken = 0
    for number in range(2 * rounds + 1):
        prompt = {"prompt_token_ids": rng.choice(LETTERS, LONG).tolist()}
        for name, llm in [*engines.items()][:: 1 if number % 2 else -1]:
            before = llm.stats()
            begin = time.perf_counter()
            llm.generate([prompt], ANSWER, use_tqdm=False)
            if number:
                seconds[name].append(time.perf_counter() - begin)
            if name == "snapshots":
                stats = llm.stats()
                taken = stats.snapshots + stats.snapshot_evictions - before.snapshots - before.snapshot_evictions
    if not taken:
        raise ValueError("the long prompt must have snapshots, got 0")
    for name in WAYS:
        more = statistics.median(own / base for own, base in zip(seconds[name], seconds["computed"], strict=True)) - 1
        row = {"way": name, f"{LONG} tokens [ms]": round(1e3 * statistics.median(seconds[name]))}
        yield row | {"more": f"{100 * more:.1f} %", "snapshots taken": taken if name == "snapshots" else 0}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=12, help="turns of a dialogue")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="dtype of both engines")
    parser.add_argument("--out", type=pathlib.Path, help="file of the results, JSON")
    given = parser.parse_args(arguments)
    check_writable("--out", given.out)
    with ExitStack() as stack:
        root = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vlcache-bench-")))
        hybrid = make_checkpoint(root / "hybrid", "qwen3_5", text=HYBRID_TEXT)
        options: dict[str, Any] = {"dtype": given.dtype, "max_model_len": LONG + 512, "use_tqdm": False}
        options |= {"kv_cache_bytes": "1GiB", "max_num_seqs": 4}
        engines = {
            name: stack.enter_context(LLM(hybrid, state_snapshots=count, **options)) for name, count in WAYS.items()
        }
        state = engines["snapshots"].service.checkpoint.config.text.sequence_bytes(jnp.dtype(given.dtype))
        rows = list(dialogues(engines, given.turns, given.rounds))
        show(f"A dialogue with an image of {SIDE} x {SIDE} more in each turn", rows)
        costs = list(cost(engines, given.rounds))
    show(f"Snapshots of {state / 2**20:.1f} MiB each in a prompt of {LONG} tokens", costs)
    if given.out is not None:
        head = {**environment("jax", "jaxlib"), "dtype": given.dtype, "rounds": given.rounds}
        head |= {"cost": costs, "state_bytes": state}
        write("First token of each turn", rows, head, given.out)


if __name__ == "__main__":
    main()
