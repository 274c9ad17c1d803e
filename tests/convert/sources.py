"""Checkpoints of random bits that are too large to be held."""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any

import numpy as np

from vlcache_jax.models.params import parameters, published_name
from vlcache_jax.models.registry import load_config
from vlcache_jax.testing import make_checkpoint

TEXT = {
    "vocab_size": 60_000,
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
SHARES = (0.05, 0.31, 0.18, 0.46)  # of the bytes, by shard


def make_source(directory: pathlib.Path, text: dict[str, Any]) -> tuple[int, int]:
    """Write a checkpoint tensor by tensor; return its bytes and those of the largest tensor."""
    make_checkpoint(directory, dtype="bfloat16")
    (directory / "model.safetensors").unlink()
    config = json.loads((directory / "config.json").read_text())
    config["text_config"] |= text
    config["text_config"]["rope_parameters"]["mrope_section"] = _sections(text["head_dim"])
    config["vision_config"]["out_hidden_size"] = text["hidden_size"]
    (directory / "config.json").write_text(json.dumps(config))

    model = load_config(directory)
    sizes = {published_name(model, p.tensor): p.tensor_shape for one in parameters(model) for p in one.parts}
    total = 2 * sum(math.prod(shape) for shape in sizes.values())
    ends = np.cumsum(SHARES) * total
    shards: list[list[str]] = [[] for _ in SHARES]
    done = 0
    for name, shape in sizes.items():
        shards[int(np.searchsorted(ends[:-1], done))].append(name)
        done += 2 * math.prod(shape)

    rng = np.random.default_rng(0)
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        _write_random(directory / file, {name: sizes[name] for name in names}, rng)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return total, 2 * max(math.prod(shape) for shape in sizes.values())


def _sections(head_dim: int) -> list[int]:
    side = head_dim // 2 * 5 // 16
    return [head_dim // 2 - 2 * side, side, side]


def _write_random(path: pathlib.Path, shapes: dict[str, tuple[int, ...]], rng: np.random.Generator) -> None:
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for begin in range(0, end, 64 << 20):
            bits = np.frombuffer(rng.bytes(min(64 << 20, end - begin)), "<u2")
            file.write((bits & 0xBFFF).tobytes())  # one bit of the exponent is 0, so that every value is finite
