"""A dialogue with an image more in each turn, beside vLLM's build for CPUs.

    uv run --group test python -m research.dialogue_vllm --out benchmarks/results/dialogue_vllm_cpu.json

The model and the dialogue are those of `research.dialogue`, in bfloat16, the only dtype of these models in that build.
Both engines keep prompts and encoder output. They take turns in processes of their own (`benchmarks.peer`), which the
first run sets up. The table shows medians.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from research.dialogue import SIDE
from vlcache_jax.benchmarks.peer import set_up, take_turn
from vlcache_jax.benchmarks.peer.jobs import JobStep, Pictures
from vlcache_jax.benchmarks.random_models import HYBRID_TEXT
from vlcache_jax.benchmarks.throughput import IMAGE
from vlcache_jax.common.files import cache_home, check_writable
from vlcache_jax.study.report import environment, show, write
from vlcache_jax.testing import make_checkpoint

DTYPE: Literal["bfloat16"] = "bfloat16"
OURS, OTHER = "ours", "vllm"
OPTIONS = {"requests": 4, "rows": 4096, "model_len": 4608, "kv_bytes": 2**30}


def dialogue(turns: int, pictures: Pictures) -> Iterator[JobStep]:
    """Yield a call for each turn; a new dialogue has other images."""
    text, images = "<|im_start|>system\nAnswer in one word.<|im_end|>\n", []
    for turn in range(turns):
        images.append(pictures(SIDE, SIDE))
        text += f"<|im_start|>user\n{IMAGE}What is new in image {turn}?<|im_end|>\n<|im_start|>assistant\n"
        yield JobStep("dialogue", "turn", turn, [{"prompt": text, "images": [*images], "max_tokens": 1}])
        text += "Red.<|im_end|>\n"


def table(runs: dict[str, list[dict[str, Any]]], turns: int) -> Iterator[dict[str, Any]]:
    """Yield a row of each turn.

    Raises:
      ValueError: an engine has no result of a turn, or prompts have other lengths.
    """
    for turn in range(turns):
        row: dict[str, Any] = {"turn": turn + 1}
        for name, results in runs.items():
            found = [answer for result in results for step, answer in result["steps"] if step.size == turn]
            if not found:
                raise ValueError(f"{name} must have results of turn {turn + 1}, got none")
            answers = [one["answers"][0] for one in found]
            if row.setdefault("tokens", answers[0]["prompt_tokens"]) != answers[0]["prompt_tokens"]:
                raise ValueError(f"{name} must have prompts of {row['tokens']} tokens, got {answers[0]}")
            row[f"not computed, {name}"] = round(statistics.median(one["cached"] for one in answers))
            row[f"{name} [ms]"] = round(1e3 * statistics.median(one["seconds"] for one in found))
        yield row


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=12, help="turns of a dialogue")
    parser.add_argument("--rounds", type=int, default=3, help="dialogues in a process, after one that is not measured")
    parser.add_argument("--repeats", type=int, default=2, help="processes of each engine, alternating")
    parser.add_argument("--out", type=pathlib.Path, help="file of the results, JSON")
    given = parser.parse_args(arguments)
    check_writable("--out", given.out)
    work = (cache_home() / "peer").resolve()
    work.mkdir(parents=True, exist_ok=True)
    engines, left_out = set_up([OTHER], None, work)
    engines = [one for one in engines if one.name in (OURS, OTHER)]
    if left_out:
        raise ValueError(f"vLLM must be installed, but {left_out[0]}")
    runs: dict[str, list[dict[str, Any]]] = {one.name: [] for one in engines}
    with tempfile.TemporaryDirectory(prefix="dialogue-", dir=work) as name:
        folder = pathlib.Path(name)
        hybrid = make_checkpoint(folder / "hybrid", "qwen3_5", text=HYBRID_TEXT, dtype=DTYPE)
        for repeat in range(given.repeats):
            pictures = Pictures(folder / str(repeat), repeat)
            first, *steps = (step for _ in range(given.rounds + 1) for step in dialogue(given.turns, pictures))
            steps = [dataclasses.replace(step, timed=i >= given.turns - 1) for i, step in enumerate(steps)]
            task = {
                "model": str(hybrid),
                "dtype": DTYPE,
                "options": OPTIONS | {"images": given.turns},
                "first": dataclasses.asdict(first),
            }
            for engine in engines:
                kept = work / "kept" / f"dialogue-{engine.name}"
                kept.mkdir(parents=True, exist_ok=True)
                own = dataclasses.replace(engine, environment=engine.environment | {"XDG_CACHE_HOME": str(kept)})
                result = take_turn(own, task, steps, folder)
                result["steps"] = [(step, found) for step, found in result["steps"] if step.timed]
                runs[engine.name].append(result)
                print(f"{engine.name}: others kept {result['others']:.2f} cores busy", flush=True)
    rows = list(table(runs, given.turns))
    show(f"A dialogue with an image of {SIDE} x {SIDE} more in each turn, {DTYPE}", rows)
    if given.out is not None:
        head = {**environment("jax", "jaxlib"), "dtype": DTYPE, "rounds": given.rounds, "repeats": given.repeats}
        versions = {name: results[0]["versions"] for name, results in runs.items()}
        write("A dialogue beside vLLM", rows, head | {"engines": versions}, given.out)


if __name__ == "__main__":
    main()
