"""What fits, and in which words it is told."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from vlcache_jax import Ladder
from vlcache_jax.engine.memory_plan import plan_memory, slot_bytes
from vlcache_jax.models import load_config


@pytest.fixture
def plan(checkpoints):
    config, dtype = load_config(checkpoints("qwen3_vl")), np.dtype(np.float32)
    slot = slot_bytes(config, dtype)

    def plan(slots=128.0, max_patches=1024):
        return plan_memory(
            config,
            dtype,
            jax.devices()[0],
            Ladder(rows=(64,), patches=(64, 256, 1024), sequences=(1,)),
            weights=0,
            max_rows=None,
            max_patches=max_patches,
            max_model_len=None,
            kv_cache_bytes=int(slots * slot),
        )

    return plan, slot


def test_a_pool_too_small_to_serve_anybody(plan):
    plan, slot = plan
    assert plan(slots=64).num_slots == 128  # a page
    assert plan(slots=128).num_slots == 128
    assert plan(slots=129).num_slots == plan(slots=129).max_model_len == 256
    message = (
        rf"kv_cache_bytes must hold at least 64 slots, that is {64 * slot} bytes \({slot} a slot\), got {63 * slot}"
    )
    with pytest.raises(ValueError, match=message):
        plan(slots=63)


def test_a_pool_that_does_not_fit(plan):
    with pytest.raises(MemoryError, match=r"model and KV pool must fit in the .* KV pool"):
        plan[0](slots=2**50)


@pytest.mark.parametrize(("max_patches", "expected"), [(0, (64,)), (65, (64, 256)), (10**6, (64, 256, 1024))])
def test_patches_have_a_rung_however_small_images_are(plan, max_patches, expected):
    assert plan[0](slots=1024, max_patches=max_patches).ladder.patches == expected
