"""What fits, and in which words it is told."""

from __future__ import annotations

import itertools
import types

import jax
import numpy as np
import pytest

from vlcache_jax import BucketSizes
from vlcache_jax.cache.device import PAGE_TOKENS
from vlcache_jax.commands.info import USABLE, describe
from vlcache_jax.device import memory_plan
from vlcache_jax.device.kv_shape import KVShape
from vlcache_jax.device.memory_plan import dequantized_bytes, kept_token_bytes, plan_memory, round_pages, weight_bytes
from vlcache_jax.models import load_config
from vlcache_jax.models.registry import published_config
from vlcache_jax.pallas_kernels import PAGE


@pytest.fixture
def plan(checkpoints):
    config = load_config(checkpoints("qwen3_vl"))
    kv = KVShape.of(config, np.float32)
    slot = kv.slot_bytes

    def plan(slots=128, max_patches=1024, sequences=1, **changes):
        return plan_memory(
            config,
            kv,
            jax.devices()[0],
            BucketSizes(rows=(64,), patches=(64, 256, 1024), sequences=(sequences,)),
            weights=0,
            max_rows=None,
            max_patches=max_patches,
            kv_cache_bytes=slots and slots * slot,
            **{"max_model_len": None} | changes,
        )

    return plan, slot


def test_a_pool_too_small_to_serve_anybody(plan):
    plan, slot = plan
    assert [plan(slots=slots).num_slots for slots in (128, 255, 256)] == [128, 128, 256]  # whole pages
    assert plan(slots=256).max_model_len == 256
    message = (
        rf"kv_cache_bytes must be at least {128 * slot}, a page of 128 tokens \({slot} bytes per token\), "
        rf"got {127 * slot}"
    )
    with pytest.raises(ValueError, match=message):
        plan(slots=127)


def test_nearly_equal_pools_are_equal(plan, checkpoints, monkeypatch):
    """So that programs of an earlier run serve, though free memory is never the same twice."""
    plan, config = plan[0], load_config(checkpoints("qwen3_vl"))
    sizes = sorted({round_pages(pages) for pages in range(5000)})
    assert sizes[:34] == [*range(33), 34]
    assert all(a < b <= a + max(1, a / 16) for a, b in itertools.pairwise(sizes))
    assert [round_pages(pages) for pages in sizes] == [round_pages(pages, up=True) for pages in sizes] == sizes
    assert (round_pages(2047), round_pages(2047, up=True)) == (1984, 2048)
    assert plan(slots=1000 * PAGE).num_slots == plan(slots=1020 * PAGE).num_slots == 992 * PAGE
    page = PAGE_TOKENS * kept_token_bytes(config, KVShape.of(config, np.float32))
    assert plan(device_bytes=1000 * page).kept_pages == 992
    found = []
    for free in (40.5, 41):
        monkeypatch.setattr(memory_plan, "free_bytes", lambda device, free=free: int(free * 2**20))
        found.append(plan(slots=None, sequences=64))
    assert found[0] == found[1]
    # What fits, and can be used, is not rounded away.
    assert plan(slots=None, sequences=3, max_model_len=11 * PAGE).num_slots == 34 * PAGE


def test_a_pool_that_does_not_fit(plan):
    with pytest.raises(MemoryError, match=r"out of memory: model and KV pool must fit in the .* KV pool"):
        plan[0](slots=2**50)


@pytest.mark.parametrize(("max_patches", "expected"), [(0, (64,)), (65, (64, 256)), (10**6, (64, 256, 1024))])
def test_patches_have_a_rung_however_small_images_are(plan, max_patches, expected):
    assert plan[0](slots=1024, max_patches=max_patches).buckets.patches == expected


GPU = types.SimpleNamespace(platform="gpu")  # a stand-in


def on_gpu(monkeypatch, gigabytes, name, **options):
    """The plan of a published model on a GPU."""
    monkeypatch.setattr(memory_plan, "free_bytes", lambda device: int(USABLE * gigabytes * 10**9))
    config, dtype = published_config(name), np.dtype("bfloat16")
    given = {"max_rows": None, "max_patches": 65536, "max_model_len": None, "kv_cache_bytes": None} | options
    buckets = given.pop("buckets", None)
    return plan_memory(config, KVShape.of(config, dtype), GPU, buckets, weights=weight_bytes(config, dtype), **given)


@pytest.mark.slow_for("Qwen3-VL-30B", "Qwen3-VL-32B")
@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("Qwen3-VL-8B", 24),
        ("Qwen3-VL-8B-FP8", 24),
        ("Qwen3.5-9B", 24),
        ("Qwen3-VL-30B-A3B-FP8", 48),
        ("Qwen3-VL-32B-FP8", 48),
    ],
)
def test_a_model_opens_with_the_sizes_that_info_tells(monkeypatch, caplog, name, gigabytes):
    found = on_gpu(monkeypatch, gigabytes, name)
    bits = "FP8" if name.endswith("FP8") else "bfloat16"
    _, rows, _ = describe(name, "auto", 1024, 1024)
    [told] = (row for row in rows if (row["GPU"], row["weights in"]) == (f"{gigabytes} GB", bits))
    assert (found.num_slots, found.buckets.max_rows) == (told["tokens"], told["prefill chunk"])
    assert found.buckets.max_sequences == told.get("sequences", 64)
    pixels = found.buckets.patches[-1] * 16**2
    assert told["largest image"] == f"{pixels / 1e6:.1f} million pixels"
    refused = [record.message for record in caplog.records]
    assert refused == [
        f"images of more than {pixels} pixels do not fit in memory next to the model and are rejected"
    ] * (pixels < 2**24)


def test_what_is_asked_for_is_not_made_smaller(monkeypatch):
    rows = on_gpu(monkeypatch, 24, "Qwen3-VL-8B", max_rows=4096)
    assert (rows.buckets.max_rows, rows.buckets.patches[-1]) == (4096, 8192)
    with pytest.raises(MemoryError, match="must fit"):
        on_gpu(monkeypatch, 24, "Qwen3-VL-8B", buckets=BucketSizes())
    small = on_gpu(monkeypatch, 24, "Qwen3-VL-8B", kv_cache_bytes=2**30)
    assert (small.num_slots, small.buckets.max_rows) == (7168, 2048)
    with pytest.raises(MemoryError, match=r"weights 62\.13 GiB"):
        on_gpu(monkeypatch, 40, "Qwen3-VL-32B")


def test_states_of_sequences_have_room_beside_the_weights(monkeypatch):
    """Those of Qwen3.6-27B take 154 MB each, and its weights 55 GB."""
    assert on_gpu(monkeypatch, 80, "Qwen3.6-27B").buckets.max_sequences == 16
    assert on_gpu(monkeypatch, 80, "Qwen3.6-27B", max_sequences=40).buckets.max_sequences == 40
    message = r"max_num_seqs must be at most \d+, got 200: each running sequence keeps states of 146.8 MiB, and .* free"
    with pytest.raises(ValueError, match=message):
        on_gpu(monkeypatch, 80, "Qwen3.6-27B", max_sequences=200)
    with pytest.raises(ValueError, match=r"the last of buckets.sequences must be at most \d+, got 300: "):
        on_gpu(monkeypatch, 80, "Qwen3.6-27B", buckets=BucketSizes(sequences=(300,)))
    # Fewer run together if the pool or a share of the memory is given. A model that does not fit is a MemoryError.
    fewer = [on_gpu(monkeypatch, 80, "Qwen3.6-27B", **given) for given in ({"share": 0.8}, {"kv_cache_bytes": 10**10})]
    assert [one.buckets.max_sequences < 16 for one in fewer] == [True, True]
    with pytest.raises(
        MemoryError, match=r"must fit .* weights 50\.\d+ GiB.*reduce max_num_seqs or state_snapshots, or use a smaller"
    ):
        on_gpu(monkeypatch, 40, "Qwen3.6-27B", max_sequences=4)


def test_snapshots_have_room_beside_the_states(monkeypatch):
    found = on_gpu(monkeypatch, 80, "Qwen3.6-27B")
    assert 0 < found.num_snapshots <= 4 * found.buckets.max_sequences
    assert on_gpu(monkeypatch, 80, "Qwen3-VL-8B").num_snapshots == 0
    assert on_gpu(monkeypatch, 80, "Qwen3.6-27B", snapshots=3).num_snapshots == 3
    with pytest.raises(ValueError, match=r"state_snapshots must be at most \d+, got 500: each keeps states of 146"):
        on_gpu(monkeypatch, 80, "Qwen3.6-27B", snapshots=500)
    assert on_gpu(monkeypatch, 80, "Qwen3.6-27B", snapshots=0).num_slots > found.num_slots


def test_what_stands_for_8_bits_is_counted():
    config = published_config("Qwen3-VL-8B-FP8")
    assert dequantized_bytes(published_config("Qwen3-VL-8B"), True) == 0
    assert dequantized_bytes(config, True) == 3 * 4 * 2 * 12288 * 4096  # gate and up
    assert dequantized_bytes(config, False) == 3 * 4 * 2**23  # a tile
    assert dequantized_bytes(config, False, 4) == 4 * 3 * 4 * 2**23
    assert dequantized_bytes(published_config("Qwen3-VL-30B-A3B-FP8"), True) == 3 * 4 * 5120 * 2048  # q, k and v
