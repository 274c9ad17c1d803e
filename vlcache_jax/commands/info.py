"""`vlcache info`: architecture and memory of a model, from its configuration."""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import re
from typing import Any

import numpy as np

from vlcache_jax.common.checks import check_whole
from vlcache_jax.convert.plan import as_dtype
from vlcache_jax.convert.source import locate
from vlcache_jax.device.buckets import BucketSizes
from vlcache_jax.device.kv_shape import KVShape
from vlcache_jax.device.memory_plan import (
    GPU_SHARE,
    USEFUL,
    activation_bytes,
    choose,
    dequantized_bytes,
    limit_rows,
    limit_snapshots,
    limit_states,
    round_pages,
    smaller_buckets,
    weight_bytes,
)
from vlcache_jax.device.mesh import check_sizes, fitting, widened
from vlcache_jax.inputs.processor import ImageProcessor
from vlcache_jax.kernel_selftest.gpu import find_chip, memory
from vlcache_jax.models import ModelConfig
from vlcache_jax.models.config import TextConfig
from vlcache_jax.models.params import parameters
from vlcache_jax.models.registry import FAMILIES, FP8, SIZES, find_name, load_config, published_config
from vlcache_jax.pallas_kernels import PAGE

GPUS = (24, 40, 48, 80, 141)  # GPU memory in GB
USABLE = 0.95  # fraction of a GPU's memory; the driver and XLA take the rest

NOTHING = "-"  # empty table cell

Findings = list[tuple[str, str]]


def describe(
    model: str,
    dtype: str,
    height: int,
    width: int,
    max_rows: int | None = None,
    max_pixels: int | None = None,
    gpus: int = 1,
) -> tuple[Findings, list[dict[str, Any]], list[str]]:
    """Return (facts by name, a table row for each GPU size, a hint for each size that the model does not fit).

    A row has the sizes that an engine with default options chooses on that GPU. A published size with an FP8 checkpoint
    has a row for each of both.

    Args:
      model: checkpoint directory, Hub ID, name of a shipped model, or a published size such as "qwen3-vl-8b", for which
        nothing is read or downloaded. Weights are never downloaded.
      dtype: data type of weights and KV; "auto" is bfloat16, as on a GPU.
      height, width: size of the image to count, in pixels.
      max_rows: tokens in a prefill chunk; None (default): as many as leave room for a KV pool.
      max_pixels: maximum pixels of an image; larger ones are scaled down; None (default): the checkpoint's own.
      gpus: number of GPUs that share the model.

    Raises:
      FileNotFoundError, ValueError: the model does not exist or has an unknown architecture, or an argument is invalid.
    """
    size = as_dtype("bfloat16" if dtype == "auto" else dtype)
    source, config, processor = _find(model)
    variants = [config, *_fp8(model)]
    processor = processor.with_limits(None if max_pixels is None else {"max_pixels": max_pixels})
    check_whole("gpus", gpus, 1)
    check_sizes(config.text, gpus, "gpus")
    text, vision = config.text, config.vision
    tokens = processor.num_tokens(processor.grid(height, width))
    # Sizes of the parts, in bytes of `dtype`.
    count = _count(config)
    kv = KVShape.of(config, size)
    slot = kv.slot_bytes
    rows = size.itemsize * (1 + vision.num_deepstack) * text.hidden_size * tokens
    kept = f"{_gigabytes(slot * tokens + kv.state_bytes)} of KV{' and states' * text.has_states} and "
    cached = kept if tokens >= kv.min_tokens else ""
    findings = [
        ("model", f"{config.model_type}, {source}"),
        (
            "decoder",
            f"{text.num_layers} layers x {text.hidden_size}, {text.num_heads} heads and {kv.heads} KV heads x "
            f"{kv.width}, vocabulary {text.vocab_size}",
        ),
        *_experts(text, count),
        (
            "vision tower",
            f"{vision.depth} layers x {vision.hidden_size}, patches of {vision.patch_size} pixels, "
            f"{vision.merge_size} x {vision.merge_size} per token",
        ),
        ("context", f"{text.max_position_embeddings} tokens"),
        ("weights", f"{_weights(variants, size)} ({_millions(count)} parameters)"),
        ("KV", f"{slot} bytes per token"),
        *_states(text, size),
        (
            f"an image of {height} x {width}",
            f"{tokens} tokens; cached: {cached}{_gigabytes(rows)} of encoder output",
        ),
    ]
    # The GPU of this machine, or common sizes.
    chip = find_chip()
    found = None if chip is None else memory(chip)
    sizes = {f"{size} GB": size * 10**9 for size in GPUS}
    if chip is not None and found is not None:
        sizes = {f"{chip.name}, {_gigabytes(found[1])}": found[1]}
    if gpus > 1:
        sizes = {f"{gpus} x {name}": each * gpus for name, each in sizes.items()}
    engines = [_Engine(one, processor, size, max_rows, gpus) for one in variants]
    if gpus > 1:
        engine = engines[0]
        own = f"{_gigabytes(engine.weights / gpus)} of weights, {engine.kv.slot_bytes // gpus} bytes of KV per token"
        findings.append((f"each of {gpus} GPUs", own))
    pairs = [(name, total, engine) for name, total in sizes.items() for engine in engines]
    fits = [_fit(*pair, tokens) for pair in pairs]
    hints = [_hint(*pair) for pair, fit in zip(pairs, fits, strict=True) if fit["tokens"] == NOTHING]
    return findings, fits, hints


def _count(config: ModelConfig) -> int:
    """Return the number of parameters of a model, without the scales of FP8 weights."""
    return sum(math.prod(one.shape) for one in parameters(config) if one.parts[0].factors is None)


def _bits(config: ModelConfig, dtype: np.dtype) -> str:
    """Return the data type of the weights as text."""
    return dtype.name if config.text.quantization is None else "FP8"


def _weights(variants: list[ModelConfig], dtype: np.dtype) -> str:
    return ", ".join(f"{_gigabytes(weight_bytes(one, dtype))} in {_bits(one, dtype)}" for one in variants)


def _fp8(model: str) -> list[ModelConfig]:
    """Return the configuration of the FP8 checkpoint of a published size, if there is one."""
    name = f"{find_name(model)}-FP8"
    return [published_config(name)] if name in FP8 and not pathlib.Path(model).is_dir() else []


def _experts(text: TextConfig, count: int) -> Findings:
    """Return a line about the experts of a mixture of experts; `count` is the number of parameters of the model."""
    if (experts := text.experts) is None:
        return []
    idle = len(experts.layers) * (experts.count - experts.chosen) * 3 * text.hidden_size * experts.intermediate_size
    summary = (
        f"{experts.count} x {experts.intermediate_size} in {len(experts.layers)} layers, {experts.chosen} per token; "
        f"{_millions(count - idle)} active parameters"
    )
    return [("experts", summary)]


def _states(text: TextConfig, dtype: np.dtype) -> Findings:
    """Return a line about the states of sequences, if some layers keep them."""
    if not text.has_states:
        return []
    count = text.num_layers - len(text.paged_layers)
    return [("states", f"{_gigabytes(text.sequence_bytes(dtype))} per running sequence, of {count} layers")]


def _find(model: str) -> tuple[str, ModelConfig, ImageProcessor]:
    """Return (source as text, configuration, image processor) of a model."""
    name = find_name(model)
    if name is not None and not pathlib.Path(model).is_dir():
        settings = FAMILIES[SIZES[FP8.get(name, name)].model_type].published.image_processor
        return f"as published: {name}", published_config(name), ImageProcessor.from_settings(settings, name)
    try:
        directory = locate(model, weights=False).directory
    except FileNotFoundError as error:
        size = find_name(re.sub(r"-(Instruct|Thinking)(?=$|-FP8)", "", model.rpartition("/")[2]))
        if size is not None:
            raise FileNotFoundError(f"{error}; without a network, run: vlcache info {size}") from None
        if "/" in model:
            raise
        known = ", ".join([*SIZES, *FP8])
        raise FileNotFoundError(f"{error}; names that need no network are {known}") from None
    return str(directory), load_config(directory), ImageProcessor.from_pretrained(directory)


@dataclasses.dataclass(frozen=True)
class _Engine:
    """Memory of an engine, in bytes over all its GPUs.

    Attributes:
      config: configuration of the model.
      processor: image processor of the model.
      dtype: data type of weights that are not FP8.
      rows: tokens in a prefill chunk; None: what fits.
      gpus: number of GPUs that share the model.
    """

    config: ModelConfig
    processor: ImageProcessor
    dtype: np.dtype
    rows: int | None
    gpus: int

    @property
    def computed(self) -> ModelConfig:
        return widened(self.config, self.gpus)

    @property
    def kv(self) -> KVShape:
        return KVShape.of(self.computed, self.dtype)

    @functools.cached_property
    def weights(self) -> int:
        return weight_bytes(self.computed, self.dtype, self.gpus)

    def activations(self, buckets: BucketSizes) -> int:
        made = dequantized_bytes(self.computed, False, self.gpus)
        return activation_bytes(self.computed, self.kv, buckets, self.gpus) + made

    def slots(self, total: int, snapshots: int, buckets: BucketSizes) -> int:
        """Return the KV slots of the pool on GPUs of `total` bytes; see `memory_plan.plan_pool`."""
        states = (1 + buckets.max_sequences + snapshots) * self.computed.text.sequence_bytes(self.dtype)
        rest = USABLE * total - self.weights - self.activations(buckets) - states
        return PAGE * round_pages(int(GPU_SHARE * rest // (self.kv.slot_bytes * PAGE)) - 1)

    def fit(self, total: int) -> tuple[BucketSizes, int]:
        """Return (bucket sizes, KV slots of the pool) on GPUs of `total` bytes; see `memory_plan.plan_memory`."""
        requested = BucketSizes() if self.rows is None else limit_rows(BucketSizes(), self.rows)
        longest = self.config.text.max_position_embeddings
        merge_size = self.config.vision.merge_size
        max_patches = min(self.processor.max_pixels // self.processor.patch_size**2, longest * merge_size**2)
        candidates = list(smaller_buckets(requested, max_patches, merge_size, self.rows is None))
        snapshots = 0
        if state := self.computed.text.sequence_bytes(self.dtype):
            left = USABLE * total - self.weights - self.activations(candidates[-1])
            candidates = limit_states(candidates, state, int(left))
            snapshots = limit_snapshots(candidates[0].max_sequences, state, int(left))
        return choose(candidates, functools.partial(self.slots, total, snapshots), USEFUL)


def _fit(name: str, total: int, engine: _Engine, tokens: int) -> dict[str, Any]:
    """Return the table row of GPUs of `total` bytes; `tokens` is the number of tokens of the image."""
    buckets, slots = engine.fit(total)
    fits, merged = slots > 0, engine.config.vision.merge_size**2
    max_pixels = min(buckets.patches[-1] * engine.processor.patch_size**2, engine.processor.max_pixels)
    holds = tokens * merged <= buckets.patches[-1]
    return {
        "GPU": name,
        "weights in": _bits(engine.config, engine.dtype),
        "weights": _gigabytes(engine.weights),
        "activations": _gigabytes(engine.activations(buckets)),
        "KV pool": _gigabytes(slots * engine.kv.slot_bytes) if fits else "does not fit",
        "tokens": slots if fits else NOTHING,
        "longest": min(slots, engine.config.text.max_position_embeddings) if fits else NOTHING,
        **({"sequences": buckets.max_sequences if fits else NOTHING} if engine.config.text.has_states else {}),
        "such images": (slots // tokens if holds else "too large") if fits else NOTHING,
        "prefill chunk": buckets.max_rows if fits else NOTHING,
        "largest image": f"{max_pixels / 1e6:.1f} million pixels" if fits else NOTHING,
    }


def _hint(name: str, total: int, engine: _Engine) -> str:
    """Return a remedy for GPUs that the model does not fit."""
    each = total // engine.gpus
    larger = [count for count in fitting(engine.config.text) if count > engine.gpus]
    enough = [count for count in larger if dataclasses.replace(engine, gpus=count).fit(count * each)[1] > 0]
    how = f"use --gpus {enough[0]}" if enough else "more GPUs do not help"
    return f"{name}, {_bits(engine.config, engine.dtype)}: too small; {how}"


def _millions(count: int) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 1e9 else f"{count / 1e6:.1f} million"


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
