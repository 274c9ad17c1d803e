"""Savings of compressed KV for Qwen3-VL-8B on an H200 and on 80 GB. All figures are counted, none measured on a GPU.

    python -m research.compression --out benchmarks/results/compression_h200_counted.json

It compares a decode step with the full KV and one with a tenth. Times are the lower bounds of its operators at the
rates of an H200 (`floor`), with attention by the model of its multiprocessors (`research.chip_model`). Budgets are
equal, or those of a sparsity that falls evenly over the layers, where layers share work lists. It also counts how many
requests of 20480 image tokens fit in the memory plan.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from research.chip_model import work_list
from vlcache_jax.benchmarks.compression import drawn_counts
from vlcache_jax.benchmarks.floor import AFTER, BEFORE, H200, IMAGE, IMAGES, MODELS, decode
from vlcache_jax.benchmarks.known_images import MARKS
from vlcache_jax.commands.info import USABLE
from vlcache_jax.compress.parse import parse_compressor
from vlcache_jax.compress.policies import make_counts
from vlcache_jax.device.kv_shape import KVShape
from vlcache_jax.device.memory_plan import MemoryPlan, plan_memory, round_pages
from vlcache_jax.device.programs.window import alike_layers
from vlcache_jax.engine.compressed_pages import CompressedPages
from vlcache_jax.models import ModelConfig
from vlcache_jax.models.params import parameters
from vlcache_jax.pallas_kernels import PAGE
from vlcache_jax.pallas_kernels.shapes import AttentionShape, SeenSlots
from vlcache_jax.study import report

MODEL = "Qwen3-VL-8B"
BUDGET = 0.1
CASES = ((1, 131072), (16, 8192))  # outputs, and tokens of each one's prompt
PAPER = 7.08  # speedup of attention only: VL-Cache's kernels, at batch 1 and 128 thousand tokens
GPU, ANSWER = 80 * 10**9, 256  # bytes; tokens of an output
WHOLE = 2  # prompts that are computed and observed meanwhile, in the pool of full prompts
TOGETHER = 256  # `max_num_seqs`: more than fit
TITLE = f"A tenth of the K, V of {MODEL}, counted, nothing of it measured on a GPU"


def milliseconds(config: ModelConfig, answers: int, tokens: int) -> tuple[float, float]:
    """Return the lower bound of a decode step on an H200, and of its attention, in ms; each output sees `tokens`
    tokens.
    """
    took = {"attention": 0.0, "rest": 0.0}
    for one in decode(config, answers, answers * tokens):
        part = one.part if one.part in took else "rest"
        took[part] += 1e3 * max(one.operations / H200.matrix, one.bytes / H200.memory)
    return sum(took.values()), took["attention"]


def attention_us(config: ModelConfig, answers: int, counts: Sequence[int]) -> float:
    """Return the microseconds of the attention of all layers by the model of the chip, with shared work lists.

    Args:
      counts: Tokens that each layer keeps of every prompt `[L]`.
    """
    kept = np.repeat(np.array(counts, np.int32)[:, None], answers, 1)
    return sum(len(layers) * _layer_us(config, answers, counts[layers[0]]) for layers in alike_layers(kept))


def _layer_us(config: ModelConfig, answers: int, tokens: int) -> float:
    def seen(rng: np.random.Generator, n: int, s: int) -> SeenSlots:
        lengths = np.full(n, tokens)
        return SeenSlots(np.arange(n), np.zeros(n, int), lengths, lengths)

    text = config.text
    slots = answers * -(-tokens // PAGE) * PAGE
    heads = text.num_heads, text.num_kv_heads, text.head_dim
    return work_list(AttentionShape("decode", answers, slots, *heads, seen, (1, PAGE))).time


def decoding(config: ModelConfig) -> Iterator[dict[str, Any]]:
    """Yield a row for each case."""
    layers = config.text.num_layers
    uneven = parse_compressor(f"vl-cache-{BUDGET}")
    for answers, length in CASES:
        equal = int(BUDGET * length)
        full, full_attention = milliseconds(config, answers, length)
        less, less_attention = milliseconds(config, answers, equal)
        by_model = attention_us(config, answers, [length] * layers)
        yield {
            "answers": answers,
            "tokens": length,
            "step ms": full,
            "its attention ms": full_attention,
            "compressed step ms": less,
            "its attention, compressed, ms": less_attention,
            "attention, times": full_attention / less_attention,
            "step, times": full / less,
            "attention by model, times": by_model / attention_us(config, answers, [equal] * layers),
            "uneven budgets": by_model / attention_us(config, answers, drawn_counts(uneven, length, layers)),
        }


class _Gpu:
    """A device with `GPU` bytes, all of them free."""

    platform = "gpu"

    def __init__(self, total: int):
        self._total = total

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": int(USABLE * self._total), "bytes_in_use": 0}

    def __str__(self) -> str:
        return f"{self._total / 1e9:.0f} GB"


def plan(config: ModelConfig, length: int, **pools: int) -> MemoryPlan:
    """Return the plan of an engine on `GPU` bytes for requests of `length` tokens.

    Args:
      pools: Bytes of each pool; none: the default of the pool of full prompts.
    """
    device: Any = _Gpu(GPU)
    kv = KVShape.of(config, "bfloat16")
    return plan_memory(
        config, kv, device, None,
        weights=weight_bytes(config), max_rows=None, max_patches=4 * IMAGE, max_model_len=length,
        kv_cache_bytes=pools.get("kv_cache_bytes"), compressed_bytes=pools.get("compressed_bytes", 0),
        max_sequences=TOGETHER,
    )  # fmt: skip


def weight_bytes(config: ModelConfig) -> int:
    """Return the bytes of the weights in bfloat16."""
    return 2 * sum(math.prod(parameter.shape) for parameter in parameters(config))


def requests(config: ModelConfig) -> dict[str, Any]:
    """Return how many requests fit at once with their full KV, and with a tenth."""
    kv, prompt = KVShape.of(config, "bfloat16"), BEFORE + IMAGES * (IMAGE + MARKS) + AFTER
    length = prompt + ANSWER
    page, own = PAGE * kv.slot_bytes, -(-length // PAGE)
    whole = plan(config, length)
    # The same bytes, but some full prompts have their pool, and the compressed pool gets the rest.
    prompts = round_pages(WHOLE * own, up=True) * page
    counts = make_counts(parse_compressor(f"postvision-{BUDGET}"), prompt, None, kv.layers)
    each = CompressedPages(0).needed(counts, ANSWER - 1)
    rest = whole.num_slots * kv.slot_bytes - prompts
    split = plan(config, length, kv_cache_bytes=prompts, compressed_bytes=rest)
    return {
        "GPU GB": GPU / 1e9,
        "prompt": prompt,
        "answer": ANSWER,
        "weights GB": weight_bytes(config) / 1e9,
        "pool GB": whole.num_slots * kv.slot_bytes / 1e9,
        "MB of a request": own * page / 1e6,
        "requests": whole.num_slots // PAGE // own,
        "pool of whole prompts GB": split.num_slots * kv.slot_bytes / 1e9,
        "pool of compressed GB": split.compressed_pages * page / kv.layers / 1e9,
        "MB of a compressed request": each * page / kv.layers / 1e6,
        "compressed requests": split.compressed_pages // each,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="JSON file")
    config = MODELS[MODEL]
    memory = requests(config)
    report.show("Requests that fit at once", [memory])
    head = report.environment() | {"budget": BUDGET, "rates": dataclasses.asdict(H200), "paper": PAPER}
    report.publish(TITLE, list(decoding(config)), head | {"memory": memory}, parser.parse_args().out)


if __name__ == "__main__":
    main()
