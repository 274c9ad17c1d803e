"""Memory planning before loading: weights, KV pool and activations against the free memory of the devices."""

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
from vlcache_jax.device.buckets import BucketSizes
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
# A CPU computes padding as slowly as tokens. A GPU reads the same weights for few tokens and for some more. The first
# bucket holds the end of a prompt whose other tokens are cached. Prompts with a few images of 1024 tokens, of which a
# tenth is computed, fill the other buckets well.
CPU_ROWS = (16, 48, 80, 144, 240, 352, 544, 1024, 4096)
# Padding rows of a decode program cost as much as others: 32 sequences took 1.6 times as long in the bucket of 64. A
# bucket of 24 would save little more in batches, and needs as many programs as the others.
CPU_SEQUENCES = (1, 4, 8, 16, 32, 48, 64)
STATE_SHARE = 0.25  # largest fraction of this memory that states of sequences take if their number is not given
SNAPSHOT_SHARE = 0.1  # largest fraction that snapshots of states take if their number is not given
SNAPSHOTS = 4  # of each sequence that can run, unless they take more than that
MAP_SNAPSHOTS = 12  # the same if images are linked by maps, which have two slots while a prompt is computed
GPU_SHARE = 0.9  # fraction of the memory left by weights and activations that the pool takes
FEWER_ROWS = (4096, 2048)  # smaller limits of a prefill chunk, tried if the default does not fit
IMAGE_PARTS = (1, 2, 4, 8)  # divisors of the largest image, tried in the same way
USEFUL = 8192  # KV slots of a useful pool, about a prompt with some images; smaller chunks and images make room for it
_FINE_PAGES = 32  # from here on, sizes of a pool are 1/32 to 1/16 apart

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MemoryPlan:
    """Sizes that fit in memory.

    Attributes:
      buckets: bucket sizes, without unneeded buckets.
      num_slots: KV slots that requests can use, see `round_pages`. One unused page comes on top.
      max_model_len: largest number of tokens of a prompt and its output.
      kept_pages: pages of the device tier.
      compressed_pages: pages of the compressed KV pool, each of one layer. One unused page comes on top.
      num_snapshots: maximum number of snapshots of states; 0 if no layer has states.
    """

    buckets: BucketSizes
    num_slots: int
    max_model_len: int
    kept_pages: int = 0
    compressed_pages: int = 0
    num_snapshots: int = 0


def plan_memory(
    config: ModelConfig,
    kv: KVShape,
    device: jax.Device,
    buckets: BucketSizes | None,
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
    snapshots: int | None = None,
    others: Sequence[Any] = (),
) -> MemoryPlan:
    """Choose bucket sizes and pool sizes for an engine.

    Args:
      kv: layout of the model's KV, in the dtype of its weights.
      buckets: requested bucket sizes. None: the default, reduced on a GPU until a useful pool fits.
      weights: bytes of the weights, on all devices together.
      max_rows, max_model_len, kv_cache_bytes: see `EngineConfig`.
      max_patches: patches of the largest image.
      max_sequences, share: `max_num_seqs` and `gpu_memory_utilization` of `EngineConfig`.
      device_bytes: see `CacheConfig`. Rounded down to pages by `round_pages`, and reserved before the pool.
      compressed_bytes: `compressed_kv_bytes` of `EngineConfig`. Rounded and reserved in the same way.
      snapshots: `state_snapshots` of `EngineConfig`.
      others: devices like `device` that share the model with it. All byte counts are sums over all devices.

    Raises:
      MemoryError: the model and the pool do not fit.
      ValueError: `device_bytes` or `compressed_kv_bytes` is above 0 and below a page, `max_model_len` is more than the
        model or the pool takes, `kv_cache_bytes` is less than a page, or the states of so many sequences and snapshots
        do not fit.
    """
    # The sizes that programs are compiled for, within the requested limits.
    wished = buckets or default_buckets(device, kv.dtype)
    if max_rows is not None:
        wished = limit_rows(wished, max_rows)
    if max_sequences is not None:
        wished = limit_sequences(wished, max_sequences)
    limit = config.text.max_position_embeddings
    longest = min(max_model_len or limit, limit)
    merge_size = config.vision.merge_size
    candidates = list(smaller_buckets(wished, min(max_patches, longest * merge_size**2), merge_size, max_rows is None))
    if buckets is not None or device.platform == "cpu":
        candidates = candidates[:1]
    num_snapshots = 0
    if state := config.text.sequence_bytes(kv.dtype):
        least = activation_bytes(config, kv, candidates[-1], 1 + len(others))
        left = int((share or 1) * _free_bytes(device, others)[1]) - weights - least - (kv_cache_bytes or 0)
        name = "max_num_seqs" if max_sequences is not None else "the last of buckets.sequences" if buckets else None
        candidates = limit_states(candidates, state, left, given=name)
        each = MAP_SNAPSHOTS if kv.maps else SNAPSHOTS
        num_snapshots = limit_snapshots(candidates[0].max_sequences, state, left, snapshots, each)
        _log.info(
            "max_num_seqs is %d and state_snapshots %d: the states of each take %.1f MiB",
            candidates[0].max_sequences, num_snapshots, state / 2**20,
        )  # fmt: skip
    # The device tier reserves its pages first. The pool takes the rest.
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
        compressed=(compressed_pages + 1) * compressed_page if compressed_pages else 0,
        snapshots=num_snapshots, others=others,
    )  # fmt: skip
    chosen, num_slots = choose(candidates, slots_of, min(USEFUL, longest))
    if chosen.patches != candidates[0].patches:
        pixels = chosen.patches[-1] * config.vision.patch_size**2
        _log.warning("images of more than %d pixels do not fit in memory next to the model and are rejected", pixels)
    fitting = min(longest, num_slots)
    if max_model_len is not None and max_model_len > fitting:
        raise ValueError(
            f"max_model_len must be at most {fitting} (the model supports {limit} tokens, and the KV pool holds "
            f"{num_slots}), got {max_model_len}; reduce max_model_len or increase kv_cache_bytes"
        )
    return MemoryPlan(chosen, num_slots, fitting, kept_pages, compressed_pages, num_snapshots)


def limit_states(
    candidates: list[BucketSizes], state: int, left: int, *, given: str | None = None
) -> list[BucketSizes]:
    """Return the bucket sizes with as many sequences as have room for their states.

    If not even one has room, nothing changes, since the model does not fit.

    Args:
      state: bytes of a sequence's states.
      left: bytes of memory that weights, activations and a KV pool of a given size leave.
      given: the option by which the user has chosen the number of sequences, or None.

    Raises:
      ValueError: a number that the user has chosen does not fit.
    """
    wished, fitting = candidates[0].max_sequences, left // state - 1  # one slot is zero, and no sequence's
    if fitting < 1:
        return candidates
    if given is not None:
        if wished > fitting:
            raise ValueError(
                f"{given} must be at most {fitting}, got {wished}: each running sequence keeps states of "
                f"{state / 2**20:.1f} MiB, and {_gib(left)} are free beside the weights; reduce it, or increase "
                "tensor_parallel_size"
            )
        return candidates
    count = max(int(STATE_SHARE * left) // state - 1, 1)
    if count >= wished:
        return candidates
    count = max((size for size in candidates[0].sequences if size <= count), default=count)
    return [limit_sequences(one, count) for one in candidates]


def limit_snapshots(
    sequences: int, state: int, left: int, given: int | None = None, each: int = SNAPSHOTS
) -> int:  # fmt: skip
    """Return the number of snapshots of states that have room beside those of running sequences.

    Args:
      sequences: maximum number of running sequences.
      state, left: see `limit_states`.
      given: the number that the user has chosen, or None.
      each: snapshots of each sequence, if they fit.

    Raises:
      ValueError: a number that the user has chosen does not fit.
    """
    left -= (1 + sequences) * state
    fitting = max(left // state, 0)
    if given is None:
        return round_pages(min(each * sequences, max(int(SNAPSHOT_SHARE * left) // state, 0)))
    if given > fitting:
        raise ValueError(
            f"state_snapshots must be at most {fitting}, got {given}: each keeps states of {state / 2**20:.1f} MiB, "
            f"and {_gib(max(left, 0))} are free beside the weights and the states of {sequences} running sequences"
        )
    return given


def smaller_buckets(buckets: BucketSizes, max_patches: int, merge_size: int, rows: bool) -> Iterator[BucketSizes]:
    """Yield the bucket sizes for images of `max_patches` patches, then smaller ones, the mildest reductions first.

    Args:
      rows: True if prefill chunks may have fewer tokens.
    """
    fewer = [own for own in FEWER_ROWS if own < buckets.max_rows and rows]
    for part in IMAGE_PARTS:
        # The smallest image has one token.
        own = limit_patches(buckets, max(merge_size**2, max_patches // part), merge_size)
        yield own
        yield from (limit_rows(own, size) for size in fewer)


def choose(
    candidates: Sequence[BucketSizes], slots_of: Callable[[BucketSizes], int], useful: int
) -> tuple[BucketSizes, int]:
    """Return the first candidate that leaves at least `useful` KV slots, else the one that leaves most, and its slots.

    Raises:
      MemoryError: no candidate leaves a pool.
    """
    best: tuple[BucketSizes, int] | None = None
    for buckets in candidates:
        try:
            slots = slots_of(buckets)
        except MemoryError:
            if best is None and buckets is candidates[-1]:
                raise
            continue
        if best is None or slots > best[1]:
            best = buckets, slots
        if slots >= useful:
            break
    assert best is not None
    return best


def plan_pool(
    config: ModelConfig,
    kv: KVShape,
    device: jax.Device,
    buckets: BucketSizes,
    *,
    weights: int,
    kv_cache_bytes: int | None,
    max_model_len: int,
    share: float | None = None,
    kept: int = 0,
    compressed: int = 0,
    snapshots: int = 0,
    others: Sequence[Any] = (),
) -> int:
    """Return the number of KV slots that requests can use.

    Args:
      weights: bytes of the weights.
      kv_cache_bytes: limit of the slots' bytes, rounded down by `round_pages`. None: most of the free memory, but at
        most what `buckets.max_sequences` sequences of `max_model_len` tokens can use.
      share: fraction of the free bytes that everything together may take if `kv_cache_bytes` is None. None: the pool
        takes 0.9 of the remaining memory on a GPU, and a quarter of it on a CPU.
      kept: bytes of the device tier.
      compressed: bytes of the compressed KV pool.
      snapshots: number of snapshots of states.
      others: see `plan_memory`.

    Raises:
      MemoryError: the pool does not fit. The message lists all sizes.
      ValueError: `kv_cache_bytes` is less than a page.
    """
    count = 1 + len(others)
    slot, activations = kv.slot_bytes, activation_bytes(config, kv, buckets, count)
    activations += dequantized_bytes(config, device.platform == "cpu", count)
    if compressed:  # attention that each key of a prompt received, and pages that move to and from host memory
        activations += 2 * 4 * kv.layers * kv.heads * max_model_len + 2 * MOVED_PAGES[-1] * PAGE * slot // kv.layers
    each, free, device = _free_bytes(device, others)
    states = (1 + buckets.max_sequences + snapshots + bool(compressed)) * config.text.sequence_bytes(kv.dtype)
    taken = weights + activations + kept + compressed + states
    if kv_cache_bytes is None:
        # Other processes use a CPU's memory too, and a CPU is too slow to need a large pool.
        rest = free - taken
        usual = 0.25 if device.platform == "cpu" else GPU_SHARE
        room = usual * rest if share is None else share * free - (free - rest)
        useful = buckets.max_sequences * -(-max_model_len // PAGE)
        pages = min(round_pages(int(max(room, 0)) // (slot * PAGE) - 1), round_pages(useful, up=True))
    elif kv_cache_bytes < PAGE * slot:
        raise ValueError(
            f"kv_cache_bytes must be at least {PAGE * slot}, a page of {PAGE} tokens ({slot} bytes per token), "
            f"got {kv_cache_bytes}"
        )
    else:
        pages = round_pages(kv_cache_bytes // (slot * PAGE))
    needed = taken + (max(pages, 1) + 1) * PAGE * slot
    if pages < 1 or needed > free:
        stated = f"states of {buckets.max_sequences} sequences and {snapshots} snapshots {_gib(states)}, "
        stated = stated if states else ""
        wanted = "at least " + _gib(2 * PAGE * slot) if kv_cache_bytes is None else _gib((pages + 1) * PAGE * slot)
        raise MemoryError(
            f"out of memory: model and KV pool must fit in the {_gib(free)} free on {_named(device, count)}, "
            f"got weights {_gib(weights)}, activations about {_gib(activations)}, "
            f"{f'device_bytes {_gib(kept)}, ' if kept else ''}"
            f"{f'compressed_kv_bytes {_gib(compressed)}, ' if compressed else ''}"
            f"{stated}KV pool {wanted} "
            f"({slot} bytes per slot, {PAGE} slots per page, and one unused page). This needs "
            f"{_devices_needed(needed, each)} such devices, but {count} {'is' if count == 1 else 'are'} used; "
            f"increase tensor_parallel_size, {'reduce max_num_seqs or state_snapshots, ' if states else ''}"
            "or use a smaller or quantized model"
        )
    return pages * PAGE


def round_pages(pages: int, *, up: bool = False) -> int:
    """Round a number of pages down, or `up`, to one of a few sizes: 1 to 32, then 17 to 32 times 2, 4, 8 ...

    Programs are compiled for the size of the pool. Free memory differs from run to run, but the rounded size seldom
    does, so programs of an earlier run can be used again.
    """
    step = 2 ** max(pages.bit_length() - _FINE_PAGES.bit_length() + 1, 0)
    return (-(-pages // step) if up else max(pages, 0) // step) * step


def kept_token_bytes(config: ModelConfig, kv: KVShape, count: int = 1) -> int:
    """Return the bytes of one token in the device tier, summed over `count` devices.

    Stored KV is sharded over the devices. Encoder rows are replicated.
    """
    rows = (1 + config.vision.num_deepstack) * config.text.hidden_size * kv.dtype.itemsize
    return kv.stored_bytes + rows * count


def _free_bytes(device: Any, others: Sequence[Any]) -> tuple[int, int, Any]:
    """Return the least free bytes of a device, those of all together, and the device with the least."""
    each, device = min(((free_bytes(one), one) for one in (device, *others)), key=lambda found: found[0])
    return each, each if device.platform == "cpu" else (1 + len(others)) * each, device  # CPU devices share one memory


def free_bytes(device: jax.Device) -> int:
    """Return the bytes that can still be allocated on a device."""
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


def limit_rows(buckets: BucketSizes, max_rows: int) -> BucketSizes:
    """Return the bucket sizes with prefill chunks of at most `max_rows` tokens."""
    rows = (*(bucket for bucket in buckets.rows if bucket < max_rows), max_rows)
    return dataclasses.replace(buckets, rows=rows)


def default_buckets(device: Any, dtype: Any) -> BucketSizes:
    """Return the default bucket sizes for a device and a model's dtype."""
    if device.platform != "cpu":
        return BucketSizes()
    # A CPU multiplies a single row of bfloat16 ten times slower than four of them.
    sequences = CPU_SEQUENCES if np.dtype(dtype) == np.float32 else CPU_SEQUENCES[1:]
    return BucketSizes(rows=CPU_ROWS, sequences=sequences)


def limit_sequences(buckets: BucketSizes, max_sequences: int) -> BucketSizes:
    """Return the bucket sizes with at most `max_sequences` sequences that run together."""
    sequences = (*(bucket for bucket in buckets.sequences if bucket < max_sequences), max_sequences)
    return dataclasses.replace(buckets, sequences=sequences)


def limit_patches(buckets: BucketSizes, max_patches: int, merge_size: int) -> BucketSizes:
    """Return the bucket sizes without buckets beyond the first that holds `max_patches` patches.

    Raises:
      ValueError: a remaining bucket is no multiple of merge_size**2.
    """
    sizes = buckets.patches
    kept = tuple(bucket for below, bucket in zip((0, *sizes), sizes, strict=False) if below < max_patches)
    for bucket in kept:
        if bucket % merge_size**2:
            raise ValueError(f"buckets.patches must be multiples of merge_size**2 = {merge_size**2}, got {bucket}")
    return dataclasses.replace(buckets, patches=kept)


def activation_bytes(config: ModelConfig, kv: KVShape, buckets: BucketSizes, count: int = 1) -> int:
    """Return an upper estimate of a chunk's bytes besides weights and pool, summed over `count` devices.

    Values of attention heads and plain MLPs, and cache entries in transfer, are sharded. The rest is replicated.
    """
    text, vision = config.text, config.vision
    row = 4 * text.hidden_size * count + _mlp_values(text, count) + _mixer_values(text, kv)
    patch = 10 * vision.hidden_size + 3 * vision.intermediate_size + vision.patch_width
    encoder_rows = (1 + vision.num_deepstack) * text.hidden_size * buckets.max_rows
    # KV of three chunks on its way to the host, and cache entries on their way to the device.
    largest = max(buckets.max_rows, buckets.patches[-1] // vision.merge_size**2)
    moving = kv.slot_bytes * (3 * buckets.max_rows + largest)
    logits = 4 * 4 * buckets.max_sequences * text.vocab_size
    whole = patch * buckets.patches[-1] + 2 * encoder_rows
    return kv.dtype.itemsize * (row * buckets.max_rows + whole * count) + moving + logits * count


def dequantized_bytes(config: ModelConfig, is_host: bool, count: int = 1) -> int:
    """Return an upper estimate of the bytes of dequantized FP8 weights during a product, summed over `count` devices.

    A GPU dequantizes a tile at a time, or the matrices of an expert. A CPU dequantizes a full matrix.
    """
    if config.text.quantization is None:
        return 0
    kept = [one for one in parameters(config) if one.parts[0].is_float8]
    sizes = (math.prod(one.shape) // (one.shape[0] if one.parts[0].is_stack else 1) for one in kept)
    largest = max(sizes, default=0)
    # Three float32 copies at most: dequantized, rounded, and reordered for the product.
    return 3 * 4 * count * (largest if is_host else min(largest, TILE))


def _mixer_values(text: TextConfig, kv: KVShape) -> int:
    """Return the values of the widest layer's heads that a token holds at once."""
    full = 3 * (text.num_heads + kv.heads) * kv.width + text.output_gate * text.num_heads * kv.width
    if (linear := text.linear_attention) is None:
        return full
    # Inputs, and the same in float32: in the order of the prompts, and the output.
    keys, values = linear.key_heads * linear.key_width, linear.value_heads * linear.value_width
    return max(full, 3 * (2 * keys + 2 * values) + 2 * values)


def _mlp_values(text: TextConfig, count: int) -> int:
    """Return the values that a token's MLP or experts hold at once. Those of experts count for each device."""
    if text.experts is None:
        return 3 * text.intermediate_size
    # Each token has a copy per chosen expert: sorted, padded, and in the experts' outputs.
    each = 4 * text.hidden_size + 3 * text.experts.intermediate_size
    own = count * (text.experts.chosen * each + 2 * text.experts.count)
    return max(3 * text.intermediate_size, own + 3 * text.experts.shared_size)


def weight_bytes(config: ModelConfig, dtype: np.dtype, count: int = 1) -> int:
    """Return the bytes of a model's weights on `count` devices, summed over all of them."""
    shared = whole = 0
    for parameter in parameters(config):
        size = parameter.nbytes(dtype) * repeats(parameter.path, parameter.shape, count)
        shared, whole = (shared, whole + size) if spec_of(parameter.path) == WHOLE else (shared + size, whole)
    return shared + whole * count


def _named(device: Any, count: int) -> str:
    return str(device) if count == 1 else f"{count} devices ({device} has the least free memory)"


def _devices_needed(needed: float, each: float) -> int:
    """Return the number of devices with `each` bytes that together hold `needed` bytes."""
    return math.ceil(needed / max(each, 1))


def _gib(count: Any) -> str:
    return f"{count / GIB:.2f} GiB"
