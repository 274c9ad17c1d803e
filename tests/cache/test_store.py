"""The store and its memory tier, without a model."""

from __future__ import annotations

import gc
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from vlcache_jax.cache.config import CacheConfig
from vlcache_jax.cache.memory import BusyError, MemoryTier
from vlcache_jax.cache.record import Meta, TierError
from vlcache_jax.cache.store import Store
from vlcache_jax.outputs import Why

GRID = (1, 4, 4)


def kv(entry, context="c", *, canonical=True, tokens=3, padded=4):
    return Meta(entry, context, canonical, GRID, tokens, "float32", (2, 2, padded, 1, 8))


def enc(entry, tokens=3, padded=4):
    return Meta(entry, None, True, GRID, tokens, "float32", (3, padded, 8))


def fill(store, *metas, value=1.0):
    records = store.reserve(metas)
    for record in records:
        record.data[:] = value
        store.publish(record)
    return records


def lookup(store, entry, context="c", approximate=False):
    with store.lookup(entry, context, grid=GRID, approximate=approximate) as handle:
        return handle


def test_a_tier_keeps_what_it_is_given():
    tier = MemoryTier(10_000)
    meta = kv("a")
    assert meta.nbytes == 2 * 2 * 4 * 8 * 4
    assert meta.parts == (("kv", 0), ("kv", 1))
    assert enc("a").parts == (("encoder",), ("deepstack", 0), ("deepstack", 1))
    rng = np.random.default_rng(0)
    parts = {part: rng.normal(size=meta.shape[1:]).astype(np.float32) for part in meta.parts}
    assert tier.meta(meta.name) is None
    assert tier.write(meta, parts)
    assert tier.meta(meta.name).checksums
    for part, array in tier.read(meta.name, reversed(meta.parts)):
        np.testing.assert_array_equal(array, parts[part])
        assert array.ctypes.data % 64 == 0
    assert tier.keys("kv/a") == [meta.name]
    assert tier.keys("enc/") == []
    assert not tier.write(kv("b", padded=10_000), {})
    tier.delete(meta.name)
    assert tier.used == 0
    with pytest.raises(TierError):
        list(tier.read(meta.name, meta.parts))


def test_the_least_recently_used_leaves_first():
    store = Store(CacheConfig(host_bytes=3 * kv("a").nbytes))
    fill(store, kv("a"))
    fill(store, kv("b"))
    fill(store, kv("c"))
    assert lookup(store, "a").exact  # used again
    fill(store, kv("d"))
    assert [lookup(store, entry).exact for entry in "abcd"] == [True, False, True, True]
    assert lookup(store, "b").why is Why.evicted
    assert lookup(store, "z").why is Why.unknown_image


def test_pinned_records_stay_and_held_ones_make_others_wait():
    store = Store(CacheConfig(host_bytes=2 * kv("a").nbytes))
    fill(store, kv("a"))
    fill(store, kv("b"))
    assert store.keep("a", True) == 1
    [record] = store.reserve([kv("c")])
    assert [r.meta.entry for r in store.tier.records()] == ["a", "c"]
    store.publish(record)
    held = store.lookup("c", "c", grid=GRID, approximate=False)
    held.hold()
    before = store.stats()
    with pytest.raises(BusyError):
        store.reserve([kv("d")])
    assert store.stats() == before  # nothing has changed
    held.release()
    assert store.reserve([kv("d"), kv("e")])[1] is None  # room for one beside what is pinned
    assert lookup(store, "e").why is Why.too_large
    assert store.keep("a", False) == 1
    assert store.stats().pinned == 0


def test_a_reservation_is_all_or_nothing():
    store = Store(CacheConfig(host_bytes=enc("a").nbytes + 2 * kv("a").nbytes))
    fill(store, kv("old"))
    fill(store, kv("used"))
    held = store.lookup("used", "c", grid=GRID, approximate=False)
    held.hold()
    names = [record.meta.name for record in store.tier.records()]
    with pytest.raises(BusyError):
        store.reserve([enc("new"), kv("new"), kv("new", "d")])
    assert [record.meta.name for record in store.tier.records()] == names
    assert lookup(store, "old").exact
    held.release()


def test_variants():
    store = Store(CacheConfig())
    fill(store, kv("a", "first", canonical=False))
    assert not lookup(store, "a", "first").exact
    assert lookup(store, "a", "first", approximate=True).kv is not None
    fill(store, kv("a", "second"))  # the first canonical one replaces those that are not
    assert [record.meta.context for record in store.records("a")] == ["second"]
    fill(store, kv("a", "third"))
    assert lookup(store, "a", "other", approximate=True).kv.meta.context == "third"
    assert lookup(store, "a", "other").kv is None
    assert lookup(store, "a", "other").why is Why.other_context
    fill(store, kv("a", "fourth"))
    assert [record.meta.context for record in store.records("a")] == ["third", "fourth"]
    fill(store, enc("a"))
    assert store.evict("a") == 3


def test_damage_is_found_and_padding_is_not_looked_at():
    store = Store(CacheConfig())
    [record, other] = fill(store, kv("a"), enc("a"))
    record.data[:, :, 3:] = np.nan
    other.data[:, 3:] = np.nan
    assert store.verify() == []
    record.data[1, 1, 2, 0, 5] = 7
    other.data[2, 0, 0] = 7
    assert sorted(store.verify()) == ["enc/a", "kv/a/c"]
    assert lookup(store, "a").why is Why.corrupt
    assert store.stats().corrupt == 2
    assert store.stats().bytes == 0


def test_what_is_never_filled_is_no_record():
    store = Store(CacheConfig())
    [failed, cancelled, late] = store.reserve([kv("a"), kv("b"), kv("c")])
    store.withdraw(failed)
    store.cancel(cancelled)
    assert not failed.wait()
    assert not cancelled.wait()
    assert lookup(store, "a").why is Why.load_failed
    assert lookup(store, "b").why is Why.unknown_image
    store.evict("c")  # complete records only
    store.clear()
    store.publish(late)
    stats = store.stats()
    assert (stats.failed, stats.stored, stats.bytes, stats.kv_records) == (1, 0, 0, 0)


def test_a_budget_bounds_the_process(tmp_path: pathlib.Path):
    """Random traffic over 200 MB: tracked bytes and resident memory."""
    script = tmp_path / "traffic.py"
    script.write_text(
        """
import pathlib, random, re
from vlcache_jax.cache.config import CacheConfig
from vlcache_jax.cache.record import Meta
from vlcache_jax.cache.store import Store

def resident():
    return int(re.search(r"RssAnon:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]) * 1024

random.seed(0)
store = Store(CacheConfig(host_bytes="200MB"))
base = resident()
most = seen = 0
for i in range(400):
    entry = str(random.randrange(40))
    padded = 256 * random.choice([1, 2, 4, 8, 16, 64])
    meta = Meta(entry, str(random.randrange(3)), True, (1, 2, 2), padded - 5, "float32", (4, 2, padded, 4, 64))
    [record] = store.reserve([meta])
    if record is not None:
        record.data[:] = 1
        store.publish(record)
        seen += meta.nbytes
        del record
    assert store.stats().bytes <= 200_000_000
    most = max(most, resident() - base)
print(seen, most)
""",
        encoding="utf-8",
    )
    gc.collect()
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    seen, most = map(int, done.stdout.split())
    assert seen > 2e9
    assert most < 200e6 + 20e6
