"""Will it fit: weights, KV pool and activations against the memory there is, before anything is loaded."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from vlcache_jax.cache.device import PAGE_TOKENS
from vlcache_jax.device.buckets import Ladder
from vlcache_jax.device.kv_shape import KVShape
from vlcache_jax.device.mesh import repeats, spec_of
from vlcache_jax.device.programs.base import MOVED_PAGES
from vlcache_jax.models import ModelConfig
from vlcache_jax.models.config import TextConfig
from vlcache_jax.models.params import parameters
from vlcache_jax.pallas_kernels import PAGE
from vlcache_jax.pallas_kernels.quantized_matmul import TILE
from vlcache_jax.pallas_kernels.split import WHOLE

GIB = 2**30
# A CPU computes padding as slowly as rows; a GPU reads the same weights for few rows and for some more. The first rung
# holds a prompt that is there but for its end. The others are filled well by prompts of a few images of 1024 tokens of
# which a tenth is computed.
CPU_ROWS = (16, 48, 80, 144, 240, 352, 544, 1024, 4096)
# A row of a window costs as much where nobody is in it: 32 answers took 1.6 times as long in a window of 64. A rung of
# 24 would save little more in batches, and costs as many programs as the others.
CPU_SEQUENCES = (1, 4, 8, 16, 32, 48, 64)
GPU_SHARE = 0.9  # of what weights and activations leave, for the pool
FEWER_ROWS = (4096, 2048)  # of a step, where more do not fit
IMAGE_PARTS = (1, 2, 4, 8)  # parts of the largest image, likewise
USEFUL = 8192  # tokens in a pool, for which steps and images are made smaller: a prompt of some images
_FINE_PAGES = 32  # from here on, a pool's sizes are 1/32 to 1/16 apart

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MemoryPlan:
    """Sizes that fit.

    Attributes:
      ladder: without rungs that are not needed.
      num_slots: of the KV pool that requests can use, see `round_pages`; the page that is nobody's comes on top.
      max_model_len: tokens of prompt and answer at most.
      kept_pages: of the device tier.
      compressed_pages: of what is kept of compressed prompts, each of one layer; the one that is nobody's comes on top.
    """

    ladder: Ladder
    num_slots: int
    max_model_len: int
    kept_pages: int = 0
    compressed_pages: int = 0


def plan_memory(
    config: ModelConfig,
    kv: KVShape,
    device: jax.Device,
    ladder: Ladder | None,
    *,
    weights: int,
    max_rows: int | None,
    max_patches: int,
    max_model_len: int | None,
    kv_cache_bytes: int | None,
    max_sequences: int | None = None,
    share: float | None = None,
    device_bytes: int = 0,
    compressed_bytes: int = 0,
    others: Sequence[Any] = (),
) -> MemoryPlan:
    """Plans an engine.

    Args:
      kv: of the model, of the dtype of its weights.
      ladder: as wished; None is the default, of which a GPU gets what leaves room for a useful pool.
      weights: bytes of the weights, on all devices together.
      max_rows, max_model_len, kv_cache_bytes: see `EngineConfig`.
      max_patches: of an image.
      max_sequences, share: `max_num_seqs` and `gpu_memory_utilization` of `EngineConfig`.
      device_bytes: see `CacheConfig`; of it are taken as many pages as `round_pages` says, before the pool.
      compressed_bytes: `compressed_kv_bytes` of `EngineConfig`; likewise.
      others: devices like `device`, with which it shares heads; all bytes are those of all together.

    Raises:
      MemoryError: it does not fit.
      ValueError: `device_bytes` or `compressed_kv_bytes` is above 0 and below a page, or `max_model_len` is more than
        the model or the pool takes, or the pool is too small to serve anybody.
    """
    # The sizes that programs are compiled for, within what was asked.
    wished = ladder or default_ladder(device, kv.dtype)
    if max_rows is not None:
        wished = limit_rows(wished, max_rows)
    if max_sequences is not None:
        wished = limit_sequences(wished, max_sequences)
    most = config.text.max_position_embeddings
    longest = min(max_model_len or most, most)
    merge_size = config.vision.merge_size
    ladders = list(smaller_ladders(wished, min(max_patches, longest * merge_size**2), merge_size, max_rows is None))
    if ladder is not None or device.platform == "cpu":
        ladders = ladders[:1]
    # Records that stay on the device take their pages first, and the pool what is left.
    page = PAGE_TOKENS * kept_token_bytes(config, kv, 1 + len(others))
    if 0 < device_bytes < page:
        raise ValueError(
            f"device_bytes must be 0 or at least {page}, a page of {PAGE_TOKENS} tokens, got {device_bytes}"
        )
    kept_pages = round_pages(device_bytes // page)
    compressed_page = PAGE * kv.slot_bytes // kv.layers
    if 0 < compressed_bytes < PAGE * kv.slot_bytes:
        raise ValueError(
            f"compressed_kv_bytes must be 0 or at least {PAGE * kv.slot_bytes}, a page of {PAGE} tokens in each layer, "
            f"got {compressed_bytes}"
        )
    compressed_pages = round_pages(compressed_bytes // compressed_page)
    slots_of = functools.partial(
        plan_pool, config, kv, device,
        weights=weights, kv_cache_bytes=kv_cache_bytes, max_model_len=longest, share=share, kept=kept_pages * page,
        compressed=(compressed_pages + 1) * compressed_page if compressed_pages else 0, others=others,
    )  # fmt: skip
    chosen, num_slots = choose(ladders, slots_of, min(USEFUL, longest))
    if chosen.patches != ladders[0].patches:
        pixels = chosen.patches[-1] * config.vision.patch_size**2
        _log.warning("images of more than %d pixels do not fit beside the model, and are refused", pixels)
    fitting = min(longest, num_slots)
    if max_model_len is not None and max_model_len > fitting:
        raise ValueError(
            f"max_model_len must be at most {fitting} (the model takes {most} tokens, the KV pool {num_slots}), "
            f"got {max_model_len}"
        )
    return MemoryPlan(chosen, num_slots, fitting, kept_pages, compressed_pages)


def smaller_ladders(ladder: Ladder, most: int, merge_size: int, rows: bool) -> Iterator[Ladder]:
    """The ladder for images of `most` patches, and smaller ones, those that give up least first.

    Args:
      rows: whether steps may have fewer rows.
    """
    fewer = [own for own in FEWER_ROWS if own < ladder.max_rows and rows]
    for part in IMAGE_PARTS:
        # However small images are made, each has a token.
        own = limit_patches(ladder, max(merge_size**2, most // part), merge_size)
        yield own
        yield from (limit_rows(own, size) for size in fewer)


def choose(ladders: Sequence[Ladder], slots_of: Callable[[Ladder], int], useful: int) -> tuple[Ladder, int]:
    """The first ladder that leaves a pool of so many slots, or else that which leaves most, and how many.

    Raises:
      MemoryError: none leaves any.
    """
    best: tuple[Ladder, int] | None = None
    for ladder in ladders:
        try:
            slots = slots_of(ladder)
        except MemoryError:
            if best is None and ladder is ladders[-1]:
                raise
            continue
        if best is None or slots > best[1]:
            best = ladder, slots
        if slots >= useful:
            break
    assert best is not None
    return best


def plan_pool(
    config: ModelConfig,
    kv: KVShape,
    device: jax.Device,
    ladder: Ladder,
    *,
    weights: int,
    kv_cache_bytes: int | None,
    max_model_len: int,
    share: float | None = None,
    kept: int = 0,
    compressed: int = 0,
    others: Sequence[Any] = (),
) -> int:
    """The slots of the KV pool that requests can use.

    Args:
      weights: bytes of the weights.
      kv_cache_bytes: bytes of these slots at most, see `round_pages`; None takes most of what is free, but no more than
        the ladder's sequences of `max_model_len` tokens can use.
      share: of the free bytes, for all together where `kv_cache_bytes` is None; None: the pool takes 0.9 of what the
        others leave, on a CPU a quarter.
      kept: bytes of the device tier.
      compressed: bytes of the pool of compressed prompts.
      others: see `plan_memory`.

    Raises:
      MemoryError: it does not fit; the message has the figures.
      ValueError: `kv_cache_bytes` is less than a page.
    """
    count = 1 + len(others)
    slot, activations = kv.slot_bytes, activation_bytes(config, kv, ladder, count)
    activations += dequantized_bytes(config, device.platform == "cpu", count)
    if compressed:  # what every key of a prompt received, and pages on their way to host memory and back
        activations += 2 * 4 * kv.layers * kv.heads * max_model_len + 2 * MOVED_PAGES[-1] * PAGE * slot // kv.layers
    each, device = min(((free_bytes(one), one) for one in (device, *others)), key=lambda found: found[0])
    free = each if device.platform == "cpu" else count * each  # the host has one memory
    taken = weights + activations + kept + compressed
    if kv_cache_bytes is None:
        # A CPU's memory is not ours alone, and nothing there is fast enough to need a large pool.
        rest = free - taken
        usual = 0.25 if device.platform == "cpu" else GPU_SHARE
        most = usual * rest if share is None else share * free - (free - rest)
        useful = ladder.max_sequences * -(-max_model_len // PAGE)
        pages = min(round_pages(int(max(most, 0)) // (slot * PAGE) - 1), round_pages(useful, up=True))
    elif kv_cache_bytes < PAGE * slot:
        raise ValueError(
            f"kv_cache_bytes must hold at least a page of {PAGE} tokens, that is {PAGE * slot} bytes ({slot} a token), "
            f"got {kv_cache_bytes}"
        )
    else:
        pages = round_pages(kv_cache_bytes // (slot * PAGE))
    needed = taken + (max(pages, 1) + 1) * PAGE * slot
    if pages < 1 or needed > free:
        wanted = "at least " + _gib(2 * PAGE * slot) if kv_cache_bytes is None else _gib((pages + 1) * PAGE * slot)
        raise MemoryError(
            f"model and KV pool must fit in the {_gib(free)} that are free on {_named(device, count)}: "
            f"weights {_gib(weights)}, "
            f"activations about {_gib(activations)}, {f'device_bytes {_gib(kept)}, ' if kept else ''}"
            f"{f'compressed_kv_bytes {_gib(compressed)}, ' if compressed else ''}KV pool {wanted} "
            f"({slot} bytes a slot, {PAGE} slots a page, and one page that no request uses); "
            f"that is {_devices_worth(needed, each)} such devices' worth, and "
            f"{'one is' if count == 1 else f'{count} are'} used"
        )
    return pages * PAGE


def round_pages(pages: int, *, up: bool = False) -> int:
    """The next of a few sizes at or below so many pages, or at or above: each up to 32, then 17 to 32 times 2, 4, 8 ...

    Programs are compiled for the size of the pool. Free memory, which it is taken from, differs from run to run; the
    size seldom does, and then the programs of an earlier run serve.
    """
    step = 2 ** max(pages.bit_length() - _FINE_PAGES.bit_length() + 1, 0)
    return (-(-pages // step) if up else max(pages, 0) // step) * step


def kept_token_bytes(config: ModelConfig, kv: KVShape, count: int = 1) -> int:
    """Bytes of one token in the device tier, on `count` devices together: K and V as they are stored, which they share,
    and encoder rows, which each of them has."""
    rows = (1 + config.vision.num_deepstack) * config.text.hidden_size * kv.dtype.itemsize
    return kv.stored_bytes + rows * count


def free_bytes(device: jax.Device) -> int:
    """Bytes that can still be allocated on a device."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats is not None:
        return int(stats["bytes_limit"] - stats["bytes_in_use"])
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = pathlib.Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = (pathlib.Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if limit.exists() and limit.read_text().strip() != "max":  # a container's own limit
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return free


def limit_rows(ladder: Ladder, max_rows: int) -> Ladder:
    """The ladder with steps of at most `max_rows` rows."""
    rows = (*(rung for rung in ladder.rows if rung < max_rows), max_rows)
    return dataclasses.replace(ladder, rows=rows)


def default_ladder(device: Any, dtype: Any) -> Ladder:
    """The ladder for a device and a model's dtype."""
    if device.platform != "cpu":
        return Ladder()
    # A CPU multiplies a single row of bfloat16 ten times slower than four of them.
    sequences = CPU_SEQUENCES if np.dtype(dtype) == np.float32 else CPU_SEQUENCES[1:]
    return Ladder(rows=CPU_ROWS, sequences=sequences)


def limit_sequences(ladder: Ladder, max_sequences: int) -> Ladder:
    """The ladder with at most `max_sequences` sequences that run together."""
    sequences = (*(rung for rung in ladder.sequences if rung < max_sequences), max_sequences)
    return dataclasses.replace(ladder, sequences=sequences)


def limit_patches(ladder: Ladder, most: int, merge_size: int) -> Ladder:
    """The ladder without rungs beyond the first that holds `most` patches."""
    rungs = ladder.patches
    kept = tuple(rung for below, rung in zip((0, *rungs), rungs, strict=False) if below < most)
    for rung in kept:
        if rung % merge_size**2:
            raise ValueError(f"ladder.patches must be multiples of merge_size**2 = {merge_size**2}, got {rung}")
    return dataclasses.replace(ladder, patches=kept)


def activation_bytes(config: ModelConfig, kv: KVShape, ladder: Ladder, count: int = 1) -> int:
    """A generous estimate of what a step holds besides weights and pool, on `count` devices together: they share what
    heads and a plain MLP hold, and records on their way; all else each of them has."""
    text, vision = config.text, config.vision
    row = 4 * text.hidden_size * count + _mlp_values(text, count) + 3 * (text.num_heads + kv.heads) * kv.width
    patch = 10 * vision.hidden_size + 3 * vision.intermediate_size + vision.patch_width
    encoder_rows = (1 + vision.num_deepstack) * text.hidden_size * ladder.max_rows
    # K, V of three steps on their way to the host, and of records on their way to the device.
    largest = max(ladder.max_rows, ladder.patches[-1] // vision.merge_size**2)
    moving = kv.slot_bytes * (3 * ladder.max_rows + largest)
    logits = 4 * 4 * ladder.max_sequences * text.vocab_size
    whole = patch * ladder.patches[-1] + 2 * encoder_rows
    return kv.dtype.itemsize * (row * ladder.max_rows + whole * count) + moving + logits * count


def dequantized_bytes(config: ModelConfig, is_host: bool, count: int = 1) -> int:
    """A generous estimate of what stands for weights in 8 bits while they are multiplied, on `count` devices together:
    a tile, or an expert's matrices; a CPU dequantises a matrix whole."""
    if config.text.quantization is None:
        return 0
    kept = [one for one in parameters(config) if one.parts[0].in_8_bits]
    sizes = (math.prod(one.shape) // (one.shape[0] if one.parts[0].is_stack else 1) for one in kept)
    largest = max(sizes, default=0)
    # In float32, rounded, and what a product takes in another order.
    return 3 * 4 * count * (largest if is_host else min(largest, TILE))


def _mlp_values(text: TextConfig, count: int) -> int:
    """What a row's MLP, or its experts, hold at once; the latter on each device."""
    if text.experts is None:
        return 3 * text.intermediate_size
    # A row stands once for each of its experts: sorted, padded, and in what they make of it.
    each = 4 * text.hidden_size + 3 * text.experts.intermediate_size
    return max(3 * text.intermediate_size, count * (text.experts.chosen * each + 2 * text.experts.count))


def weight_bytes(config: ModelConfig, dtype: np.dtype, count: int = 1) -> int:
    """Bytes of the weights of a model as `count` devices compute it, on all of them together."""
    shared = whole = 0
    for parameter in parameters(config):
        size = parameter.nbytes(dtype) * repeats(parameter.path, parameter.shape, count)
        shared, whole = (shared, whole + size) if spec_of(parameter.path) == WHOLE else (shared + size, whole)
    return shared + whole * count


def _named(device: Any, count: int) -> str:
    return str(device) if count == 1 else f"{count} devices, of which {device} has least"


def _devices_worth(needed: float, each: float) -> int:
    """Devices with `each` bytes that together hold what is needed."""
    return math.ceil(needed / max(each, 1))


def _gib(count: Any) -> str:
    return f"{count / GIB:.2f} GiB"
