"""Memory, communication and lower bounds of several GPUs that share a model, counted.

    python -m research.spread --out benchmarks/results/spread_h200_counted.json

Bytes are those that an engine plans (`device.memory_plan`). Times are lower bounds (`benchmarks.floor`) of each GPU's
work, and two sums over all GPUs in each layer, of the rows that leave it. A sum moves 2 (N - 1) / N of its bytes over
the links of each GPU, and takes `LATENCY` more; so do gathering the logits, and resharding cache entries from tokens to
heads. Nothing here is measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from vlcache_jax.benchmarks import floor
from vlcache_jax.commands.info import USABLE
from vlcache_jax.device.buckets import BucketSizes
from vlcache_jax.device.kv_shape import KVShape
from vlcache_jax.device.memory_plan import GPU_SHARE, activation_bytes, limit_patches, round_pages, weight_bytes
from vlcache_jax.device.mesh import fitting, part_of, widened
from vlcache_jax.models import ModelConfig
from vlcache_jax.models.config import TextConfig
from vlcache_jax.models.registry import FAMILIES, SIZES, published_config
from vlcache_jax.pallas_kernels import PAGE
from vlcache_jax.study import report

MODELS = ("Qwen3-VL-8B", "Qwen3-VL-32B", "Qwen3-VL-30B-A3B", "Qwen3-VL-235B-A22B")
COUNTS = (1, 2, 4, 8)
GPU = 141e9  # bytes of an H200
LINKS = 450e9  # bytes per second that a GPU sends over NVLink 4, and receives at the same time
LATENCY = 15e-6  # seconds of a sum of few bytes over NVLink, as published for NCCL
CONTEXT = 2048  # slots that each row sees
TITLE = "Several H200s that share a model, counted, nothing of it measured"

BFLOAT16 = np.dtype("bfloat16")


def rows() -> Iterator[dict[str, Any]]:
    for name in MODELS:
        config = published_config(name)
        for count in COUNTS:
            if count in fitting(config.text):
                yield {"model": name, "GPUs": count} | _held(name, config, count) | _times(config, count)


def _held(name: str, config: ModelConfig, count: int) -> dict[str, Any]:
    """Return the bytes on each GPU, and the tokens of the pool of all."""
    computed = widened(config, count)
    kv = KVShape.of(computed, BFLOAT16)
    images = FAMILIES[SIZES[name].model_type].published.image_processor
    most = int(images["size"]["longest_edge"]) // config.vision.patch_size**2
    buckets = limit_patches(BucketSizes(), most, config.vision.merge_size)
    weights, activations = weight_bytes(computed, BFLOAT16, count), activation_bytes(computed, kv, buckets, count)
    pages = round_pages(int(GPU_SHARE * (USABLE * GPU * count - weights - activations) // (kv.slot_bytes * PAGE)) - 1)
    return {
        "weights, GB": weights / count / 1e9, "activations, GB": activations / count / 1e9,
        "K, V of a token, bytes": kv.slot_bytes / count, "tokens in the pool": max(pages, 0) * PAGE,
    }  # fmt: skip


def _times(config: ModelConfig, count: int) -> dict[str, Any]:
    """Return milliseconds, and bytes that each GPU sends."""
    own = _shared(config, count)
    cases = floor.reference(own, count)
    layers = config.text.num_layers
    tokens = floor.BEFORE + floor.IMAGES * floor.IMAGE + floor.AFTER
    fresh = [floor.IMAGES * floor.IMAGE * level // 500 for level in floor.FALLING]
    levels = [fresh[layer * len(fresh) // layers] + floor.BEFORE + floor.AFTER for layer in range(layers)]
    found: dict[str, Any] = {}
    records = floor.IMAGES * floor.IMAGE * KVShape.of(widened(config, count), BFLOAT16).slot_bytes
    for title, case, of_layers, turned in (
        ("cold 20K", "cold", [tokens] * layers, 0),
        ("hit 20K, falling", "falling to 0", levels, records),
    ):
        sent = sum(_summed(config.text, layer) * rows for layer, rows in enumerate(of_layers))
        found |= _exchange(title, cases[case].seconds, count, sent, 2 * layers, turned)
    for batch in (1, 16, 64):
        operators = floor.decode(own, batch, batch * CONTEXT)
        seconds = sum(max(one.operations / floor.H200.matrix, one.bytes / floor.H200.memory) for one in operators)
        logits = 4 * batch * config.text.vocab_size // 2  # gathered: half of the traffic of a sum
        sent = sum(_summed(config.text, layer) for layer in range(layers)) * batch + logits
        found |= _exchange(f"token of {batch}", seconds, count, sent, 2 * layers + 2, 0)
    return found


def _summed(text: TextConfig, layer: int) -> int:
    """Return the bytes of a row that a layer's two sums add up; outputs of experts are float32."""
    return text.hidden_size * (2 + (2 if text.experts_of(layer) is None else 4))


def _exchange(title: str, seconds: float, count: int, sent: int, times: int, turned: int) -> dict[str, Any]:
    if count == 1:
        return {f"{title}, ms": 1e3 * seconds, f"{title}, exchanged MB": 0.0, f"{title}, exchange ms": 0.0}
    moved = (2 * sent + turned / count) * (count - 1) / count
    took = times * LATENCY + moved / LINKS
    return {
        f"{title}, ms": 1e3 * (seconds + took), f"{title}, exchanged MB": moved / 1e6,
        f"{title}, exchange ms": 1e3 * took,
    }  # fmt: skip


def _shared(config: ModelConfig, count: int) -> ModelConfig:
    """Return the configuration of each GPU's part. With many rows, its experts are as much work as a part of every
    one.
    """
    own = part_of(config, count)
    experts = config.text.experts
    if experts is None:
        return own
    parts = dataclasses.replace(experts, intermediate_size=experts.intermediate_size // count)
    return dataclasses.replace(own, text=dataclasses.replace(own.text, experts=parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="JSON file")
    head = report.environment() | {
        "rates": dataclasses.asdict(floor.H200), "links": LINKS, "latency": LATENCY, "context": CONTEXT,
    }  # fmt: skip
    report.publish(TITLE, list(rows()), head, parser.parse_args().out)


if __name__ == "__main__":
    main()
