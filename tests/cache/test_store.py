"""The store and its memory tier, without a model."""

from __future__ import annotations

import dataclasses
import gc
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import vlcache_jax.cache.records
from tests.cache.records import DictTier, make
from vlcache_jax.cache.config import CacheConfig
from vlcache_jax.cache.keys import owner_key
from vlcache_jax.cache.record import DamagedError, Donors, Found, Meta, Record, TierError, verified
from vlcache_jax.cache.records import MemoryTier
from vlcache_jax.cache.store import PendingWrite, Store, _better_donor
from vlcache_jax.outputs import Why

GRID = (1, 4, 4)
OWNER = owner_key(None)


def kv(entry, context="c", *, canonical=True, tokens=3, padded=4, owner=OWNER):
    return Meta(entry, owner, context, canonical, GRID, tokens, "float32", (2, 2, padded, 1, 8))


def enc(entry, tokens=3, padded=4, owner=OWNER):
    return Meta(entry, owner, None, True, GRID, tokens, "float32", (3, padded, 8))


def fill(store, *metas, value=1.0):
    records = store.reserve(metas)
    for record in records:
        record.data[:] = value
        store.publish(record)
    return records


def lookup(store, entry, context="c", donors=None):
    with store.lookup(entry, context, grid=GRID, donors=donors) as handle:
        return handle


def held_handle(store, entry, context="c"):
    """Return a handle that holds the KV of an image, as a request that will read it does."""
    handle = store.lookup(entry, context, grid=GRID, donors=None)
    assert handle.kv is not None
    handle.hold()
    return handle


def test_what_a_record_is_made_of():
    meta = kv("a")
    assert meta.nbytes == 2 * 2 * 4 * 8 * 4
    assert meta.part_bytes == 2 * 3 * 8 * 4
    assert meta.parts == (("kv", 0), ("kv", 1))
    assert enc("a").parts == (("encoder",), ("deepstack", 0), ("deepstack", 1))
    assert meta.with_room(9).shape == (2, 2, 9, 1, 8)
    assert enc("a").with_room(9).shape == (3, 9, 8)
    tier = MemoryTier(10_000)
    assert tier.allocate([kv("b", padded=10_000)])[0] == [None]
    [record] = tier.allocate([meta])[0]
    assert record.data.ctypes.data % 64 == 0
    assert (tier.get(meta.name), tier.used) == (record, meta.nbytes)
    tier.remove(record)
    assert (tier.get(meta.name), tier.used) == (None, 0)


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


def test_pinned_records_stay_and_held_ones_make_room():
    store = Store(CacheConfig(host_bytes=2 * kv("a").nbytes))
    fill(store, kv("a"))
    fill(store, kv("b"))
    assert store.keep("a", True) == 1
    [record] = store.reserve([kv("c")])
    assert [r.meta.entry for r in store.tier.records()] == ["a", "c"]
    store.publish(record)
    held = held_handle(store, "c")
    assert store.reserve([kv("d"), kv("e")])[1] is None  # room for one beside what is pinned
    assert [r.meta.entry for r in store.tier.records()] == ["a", "d"]
    assert lookup(store, "c").why is Why.evicted
    assert lookup(store, "e").why is Why.too_large
    assert (store.stats().bytes, store.stats().left_bytes) == (2 * kv("a").nbytes, kv("a").nbytes)
    held.release()
    assert store.stats().left_bytes == 0
    assert store.keep("a", False) == 1
    assert store.stats().pinned == 0


def test_a_handle_pins_until_it_holds():
    store = Store(CacheConfig(host_bytes=kv("a").nbytes))
    fill(store, kv("a"))
    with store.lookup("a", "c", grid=GRID, donors=None) as handle:
        assert store.reserve([kv("b")]) == [None]
        handle.hold()
        assert store.stats().pinned == 1  # it is needed, but gives way
        [record] = store.reserve([kv("b")])
        assert record is not None
        assert store.stats().left_bytes == kv("a").nbytes
    assert store.stats().left_bytes == 0


def test_what_has_to_leave_keeps_its_contents_until_the_last_holder_releases_it():
    store = Store(CacheConfig(host_bytes=2 * kv("a").nbytes))
    [record, other] = fill(store, kv("a"), kv("b"), value=3.0)
    holders = [held_handle(store, "a") for _ in range(3)]
    with held_handle(store, "b"):
        fill(store, kv("new", "1"), kv("new", "2"), value=7.0)
        assert store.tier.get(record.meta.name) is None
        assert (lookup(store, "a").kv, lookup(store, "a").why) == (None, Why.evicted)
        assert not store.knows("a")
        stats = store.stats()
        assert (stats.bytes, stats.left_bytes, stats.evicted) == (2 * kv("a").nbytes, 2 * kv("a").nbytes, 2)
        assert (stats.kv_records, stats.pinned) == (2, 0)
        assert other.wait()
    assert store.stats().left_bytes == kv("a").nbytes
    for left in (2, 1, 0):
        assert record.is_ready
        assert record.wait()
        assert (record.data == 3).all()
        assert record.checksums() == record.meta.checksums
        assert record.held == left + 1
        assert store.stats().left_bytes == kv("a").nbytes
        holders.pop().release()
    assert record.held == store.stats().left_bytes == 0


@pytest.mark.parametrize("leave", ["reserve", "displace", "evict", "clear", "damage"])
def test_whatever_lets_a_held_record_leave(leave):
    config = CacheConfig(host_bytes=2 * kv("a").nbytes, max_contexts_per_image=1)
    store = Store(config)
    [record] = fill(store, kv("a"), value=3.0)
    handle = held_handle(store, "a")
    if leave == "reserve":
        fill(store, kv("b"), kv("d"))
    elif leave == "displace":
        fill(store, kv("a", "newer"))
    elif leave == "evict":
        assert not store.evict("a")  # who asks for that means what nobody needs
        assert lookup(store, "a").exact
        store.remove(record)
    elif leave == "clear":
        store.clear()
    else:
        record.data[0, 0, 0] = 4
        assert store.verify() == [record.meta.name]
    assert lookup(store, "a").kv is None
    assert store.stats().left_bytes == kv("a").nbytes
    assert record.is_ready
    [again] = fill(store, kv("a"), value=5.0)  # of the same name, and yet another one
    assert lookup(store, "a").kv is again
    handle.release()
    assert store.stats().left_bytes == 0
    assert lookup(store, "a").kv is again
    assert (again.data == 5).all()


@pytest.mark.parametrize("holders", [1, 3])
def test_a_held_record_that_left_is_still_filled(holders):
    """Also by who begins only then: others link it, and wait."""
    for claimed_before in (True, False):
        store = Store(CacheConfig(host_bytes=kv("a").nbytes))
        [record] = store.reserve([kv("a")])
        if claimed_before:
            record.begin()
        handles = [held_handle(store, "a") for _ in range(holders)]
        fill(store, kv("b"))
        assert store.tier.get(record.meta.name) is None
        assert record.is_awaited
        assert not record.is_settled
        assert (store.stats().evicted, store.stats().left_bytes) == (0, 0)  # it has no contents yet
        record.begin()
        record.data[:] = 3
        store.publish(record)
        assert record.wait()
        assert not record.is_awaited
        assert (record.data == 3).all()
        assert lookup(store, "a").kv is None
        assert (store.stats().stored, store.stats().left_bytes) == (1, kv("a").nbytes)  # stored is "b" alone
        for handle in handles:
            assert store.stats().left_bytes == kv("a").nbytes
            handle.release()
        assert store.stats().left_bytes == 0
        assert record.is_ready


@pytest.mark.parametrize("holders", [1, 3])
def test_a_claimed_record_that_left_is_filled_though_nobody_waits_any_more(holders):
    store = Store(CacheConfig(host_bytes=kv("a").nbytes))
    [record] = store.reserve([kv("a")])
    handles = [held_handle(store, "a") for _ in range(holders)]
    record.begin()
    fill(store, kv("b"))
    for handle in handles:
        handle.release()
    assert not record.is_settled
    record.data[:] = 3
    store.publish(record)
    assert record.wait()
    assert (store.stats().stored, store.stats().left_bytes) == (1, 0)
    assert lookup(store, "b").exact
    assert lookup(store, "a").kv is None


@pytest.mark.parametrize("holders", [0, 1, 3])
def test_what_left_and_nobody_holds_or_fills_is_settled_as_failed(holders):
    """With the last holder, not before: it might still be filled for the others."""
    store = Store(CacheConfig(host_bytes=kv("a").nbytes))
    [record] = store.reserve([kv("a")])
    handles = [held_handle(store, "a") for _ in range(holders)]
    fill(store, kv("b"))
    for handle in handles:
        assert not record.is_settled
        handle.release()
    assert record.is_settled
    assert not record.wait()
    stats = store.stats()
    assert (stats.failed, stats.evicted, stats.left_bytes, stats.kv_records) == (0, 0, 0, 1)


@pytest.mark.parametrize("is_filled", [False, True])
@pytest.mark.parametrize("end", ["discard", "withdraw", "cancel"])
def test_who_was_to_fill_a_record_that_left_gives_it_up(end, is_filled):
    store = Store(CacheConfig(host_bytes=kv("a").nbytes))
    [record] = store.reserve([kv("a")])
    handles = [held_handle(store, "a") for _ in range(2)]
    [other] = fill(store, kv("b"))
    if is_filled:
        record.data[:] = 3
        store.publish(record)
    getattr(store, end)(record)
    assert record.is_settled
    assert record.wait() is (is_filled and end != "discard")  # what failed is of no use to those that wait either
    for handle in handles:
        handle.release()
    assert (store.stats().left_bytes, store.stats().failed) == (
        0,
        end != "cancel" and (end == "discard" or not is_filled),
    )
    assert lookup(store, "b").kv is other


def test_a_record_that_stays_is_not_given_up_with_its_holder():
    store = Store(CacheConfig())
    [record] = store.reserve([kv("a")])
    held_handle(store, "a").release()
    assert not record.is_settled
    record.data[:] = 1
    store.publish(record)
    assert lookup(store, "a").exact


def test_a_reservation_takes_what_it_needs_whoever_holds_it():
    """What fits nowhere takes nothing from anybody."""
    store = Store(CacheConfig(host_bytes=enc("a").nbytes + 2 * kv("a").nbytes))
    fill(store, kv("old"))
    fill(store, kv("used"))
    held = held_handle(store, "used")
    [wide] = store.reserve([kv("wide", padded=100)])
    assert wide is None
    assert [record.meta.name for record in store.tier.records()] == ["kv/old/c", "kv/used/c"]
    assert store.stats().left_bytes == 0
    records = store.reserve([enc("new"), kv("new"), kv("new", "d")])
    assert [record.meta.name for record in store.tier.records()] == ["enc/new", "kv/new/c", "kv/new/d"]
    assert all(records)
    assert (lookup(store, "old").kv, lookup(store, "used").kv) == (None, None)
    assert store.stats().left_bytes == kv("used").nbytes
    held.release()
    assert store.stats().left_bytes == 0


def test_variants():
    store = Store(CacheConfig(max_contexts_per_image=2))
    fill(store, kv("a", "first", canonical=False))
    assert not lookup(store, "a", "first").exact
    assert lookup(store, "a", "first", donors=Donors()).kv is not None
    fill(store, kv("a", "second"))  # the first canonical one replaces those that are not
    assert [record.meta.context for record in store.records("a")] == ["second"]
    fill(store, kv("a", "third"))
    assert lookup(store, "a", "other", donors=Donors()).kv.meta.context == "third"
    assert lookup(store, "a", "other").kv is None
    assert lookup(store, "a", "other").why is Why.other_context
    fill(store, kv("a", "fourth"))
    assert [record.meta.context for record in store.records("a")] == ["third", "fourth"]
    assert lookup(store, "a", "second").why is Why.displaced
    assert lookup(store, "a", "first").why is Why.displaced
    assert lookup(store, "a", "other").why is Why.other_context
    fill(store, enc("a"))
    assert len(store.evict("a")) == 3
    assert lookup(store, "a", "third").why is Why.evicted
    assert lookup(store, "a", "second").why is Why.displaced
    assert lookup(store, "a", "other").why is Why.evicted


def test_what_passes_through_stays_for_whoever_is_to_read_it():
    store = Store(CacheConfig(host_bytes=0, disk="records"))
    [record] = store.reserve([kv("a")])
    store.hold([record], 1)
    store.hold([record], 1)
    store.publish(record)
    store.hold([record], -1)
    assert store.tier.get(record.meta.name) is record
    store.hold([record], -1)
    assert store.tier.get(record.meta.name) is None


@pytest.mark.parametrize("canonical", [True, False])
def test_coded_keys_and_values_are_never_exact(canonical):
    """They are taken where approximations are, also in the context that they were computed in."""
    store = Store(CacheConfig())
    coded = make(context="c", buffers=(16, 4)).meta
    [record] = store.reserve([dataclasses.replace(coded, canonical=canonical, checksums=())])
    store.publish(record)
    for approximate, kv in ((False, None), (True, record)):
        found = store.find(coded.entry, "c", grid=None, donors=Donors() if approximate else None)
        assert (found.kv, found.exact, found.is_coded) == (kv, False, canonical)
        assert found.why is (Why.coded if canonical else Why.other_context)


def test_of_other_contexts_the_newest_canonical_record_is_brought_in():
    def wanted(*metas, donors=Donors(), here=()):  # noqa: B008 - frozen
        """Return the names to load; the newest record is the last argument."""
        return [*_better_donor(donors, here, {meta.name: (None, Found(meta, 0.0)) for meta in metas})]

    first, second, other = kv("a", "first"), kv("a", "second"), kv("a", "third", canonical=False)
    assert wanted(enc("a"), first, second, other) == [second.name]
    assert wanted(first, dataclasses.replace(second, canonical=False), other, enc("a")) == [first.name]
    assert wanted(dataclasses.replace(first, canonical=False), other) == [other.name]
    assert wanted(enc("a")) == wanted() == []
    # A neutral context precedes the newest one, also one that host memory has.
    neutral, strict = Donors("first"), Donors("first", "neutral")
    assert wanted(first, second, donors=neutral) == wanted(first, second, here=[second], donors=neutral) == [first.name]
    assert wanted(second, here=[first], donors=neutral) == []
    assert wanted(first, second, donors=strict) == [first.name]
    assert wanted(second, other, donors=strict) == []
    linked = dataclasses.replace(first, canonical=False)  # itself with the KV of another context
    assert wanted(linked, donors=strict) == []
    assert [neutral.kind(meta) for meta in (first, second, linked)] == ["neutral", "other", "other"]
    assert wanted(second, here=[second]) == wanted(other, here=[second]) == []
    assert wanted(second, here=[other]) == [second.name]


def test_a_neutral_donor_precedes_newer_ones():
    """The last request has no influence on what others link."""
    store = Store(CacheConfig())
    fill(store, *(kv("a", context) for context in ("neutral", "attacker")))
    donors = Donors("neutral")
    found = lookup(store, "a", "new", donors=donors)
    assert (found.kv.meta.context, found.donor, found.why) == ("neutral", "neutral", Why.other_context)
    assert lookup(store, "a", "new", donors=Donors()).kv.meta.context == "attacker"
    assert lookup(store, "a", "new", donors=Donors()).donor == "other"
    assert lookup(store, "a", "attacker", donors=donors).donor is None  # exact
    fill(store, kv("b", "attacker"))
    strict = lookup(store, "b", "new", donors=donors._replace(rule="neutral"))
    assert (strict.kv, strict.donor, strict.why) == (None, None, Why.no_donor)
    fill(store, kv("a", "own"))
    used = donors._replace(is_own=lambda context: context == "own")
    for rule, linked in (("any", "neutral"), ("own", "own"), ("neutral", "neutral")):
        found = lookup(store, "a", "new", donors=used._replace(rule=rule))
        assert (found.kv.meta.context, found.donor) == (linked, linked)


@pytest.mark.parametrize("variants", [None, 2])
def test_as_many_variants_stay_as_fit_and_the_reason_is_that_of_the_context(variants):
    store = Store(CacheConfig(host_bytes=5 * kv("a").nbytes, max_contexts_per_image=variants))
    fill(store, *(kv("a", context) for context in "01"))
    fill(store, *(kv("a", context) for context in "23"))
    exact = [lookup(store, "a", context).exact for context in "0123"]
    assert exact == [variants is None] * 2 + [True] * 2
    assert lookup(store, "a", "new", donors=Donors()).kv.meta.context == "3"
    fill(store, *(kv(entry) for entry in "wxyz"))  # one of five places is left to the image
    assert [record.meta.context for record in store.records("a")] == ["3"]
    lost = Why.evicted if variants is None else Why.displaced
    reasons = [lookup(store, "a", context).why for context in ("0", "1", "2", "3", "new")]
    assert reasons == [lost, lost, Why.evicted, None, Why.other_context]
    fill(store, kv("a", "0"))
    assert lookup(store, "a", "0").why is None
    store.evict("a")
    assert lookup(store, "a", "0").why is Why.evicted
    store.clear()
    assert lookup(store, "a", "0").why is Why.unknown_image


def test_reasons_are_bounded(monkeypatch):
    monkeypatch.setattr(vlcache_jax.cache.records, "REMEMBERED", 9)
    store = Store(CacheConfig(host_bytes=kv("a").nbytes))
    for context in range(50):
        fill(store, kv("a", str(context)))
    assert len(store._lost) <= 9
    assert lookup(store, "a", "48").why is Why.evicted
    assert lookup(store, "a", "0").why is Why.other_context


def test_pins_leave_room_for_others():
    store = Store(CacheConfig(host_bytes=10 * kv("a").nbytes))
    fill(store, kv("both"), kv("both", "d"))
    assert store.keep("both", True) == 2
    for i in range(20):
        fill(store, kv(str(i)))
        if i < 3:
            assert store.keep(str(i), True) == 1
        else:
            with pytest.raises(ValueError, match=f"image must fit in the 0 bytes .*, got 512 bytes of entry {i}"):
                store.keep(str(i), True)
        assert lookup(store, str(i)).exact
    assert (store.stats().pinned, store.stats().pinned_bytes) == (5, 5 * kv("a").nbytes)
    assert store.stats().refused == 0
    assert store.keep("both", True) == 0  # it is
    assert store.keep("both", False) == 2
    fill(store, kv("wide", padded=12))
    with pytest.raises(ValueError, match="image must fit in the 1024 bytes"):
        store.keep("wide", True)
    fill(store, kv("19", "d"), kv("19", "e"))
    with pytest.raises(ValueError, match="image must fit in the 1024 bytes"):  # all of an image, or nothing
        store.keep("19", True)
    assert store.stats().pinned_bytes == 3 * kv("a").nbytes
    with store.lookup("wide", "c", grid=GRID, donors=None):
        assert (store.stats().pinned, store.stats().pinned_bytes) == (4, 3 * kv("a").nbytes)


def test_owners():
    store = Store(CacheConfig())
    mine, theirs = OWNER, owner_key("theirs")
    fill(store, kv("a", owner=mine), enc("a", owner=mine), kv("b", owner=theirs))
    store.requests.remember("request", ["b"], theirs)
    for _ in range(2):  # the second time their records are gone
        assert [store.is_owner(mine, entry) for entry in "abc"] == [True, False, False]
        assert [store.is_owner(theirs, entry) for entry in "abc"] == [False, True, False]
        assert [store.requests.find("request", owner) for owner in (mine, theirs)] == [None, ("b",)]
        assert store.requests.find("other", mine) is None
        store.evict("a")
        store.evict("b")


class Lending(DictTier):
    """Lends one record, after `fault` has had its way with the second part."""

    def __init__(self, meta, fault, flaw=None):
        super().__init__()
        self.fault = fault
        rng = np.random.default_rng(0)
        record = Record(meta)
        record.data[:] = rng.normal(size=meta.shape)
        if flaw is not None:
            record.data[0, 1, 2] = flaw
        record.complete()
        self.write(record.meta, record.parts)

    def read(self, meta, parts, place):
        for i, (part, (array,)) in enumerate(super().read(meta, parts, place)):
            if (lent := self.fault(array.copy()) if i == 1 else array.copy()) is not None:
                yield part, (lent,)


def brought(store, name="c"):
    """Asks for an image that only the tier has."""
    with store.lookup("a", name, grid=None, donors=None, waits=True) as handle:
        store.close()
        return handle.brought, store.stats().tiers["disk"]


def one_more(tokens):
    return tokens + 1


def flip(row):
    def fault(array):
        rows = array[-1] if array.ndim == 4 else array
        rows[row].reshape(-1).view(np.uint8)[5] ^= 1
        return array

    return fault


def fail(error):
    def fault(array):
        raise error

    return fault


@pytest.mark.parametrize("meta", [kv("a"), enc("a")], ids=["kv", "enc"])
@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (lambda array: array, None),
        (flip(3), None),  # padding
        (flip(0), Why.corrupt),
        (flip(2), Why.corrupt),
        (lambda array: array[..., :-1].copy(), Why.corrupt),
        (lambda array: array.astype(np.float64), Why.corrupt),
        (lambda array: None, Why.load_failed),
        (fail(TierError("gone")), Why.load_failed),
        (fail(MemoryError()), Why.load_failed),
    ],
)
def test_what_comes_from_outside_memory_is_verified(meta, fault, why, caplog):
    tier = Lending(meta, fault)
    store = Store(CacheConfig(), [tier], room=one_more)
    with caplog.at_level("CRITICAL"):
        comes, counted = brought(store)
    assert comes == {meta.name: "disk"}
    found = lookup(store, "a")
    stats = store.stats()
    assert (stats.corrupt, stats.failed) == (why is Why.corrupt, why is Why.load_failed)
    assert (counted.loaded, counted.damaged, counted.failed) == (
        why is None, why is Why.corrupt, why is Why.load_failed,
    )  # fmt: skip
    if why is None:
        record = found.kv or found.encoder
        [told] = tier.find("a")
        assert record.meta.with_room(3) == told.meta
        for part, (array,) in record.parts.items():
            [expected] = tier.kept[meta.name][2][part]
            np.testing.assert_array_equal(array[:, :3] if meta.context else array[:3], expected)
    else:
        assert (found.kv, found.encoder, stats.bytes) == (None, None, 0)
        assert found.why is (why if meta.context else Why.unknown_image)
        assert (tier.find("a") == []) == (why is Why.corrupt)  # nobody reads it again


def test_checksums_that_lack_are_damage():
    meta = dataclasses.replace(kv("a"), checksums=(0,))
    with pytest.raises(DamagedError, match=r"kv/a/c: \('kv', 1\) is damaged"):
        verified(meta, ("kv", 1), np.zeros(meta.shape[1:], np.float32))


def test_there_is_nothing_to_load():
    tier = Lending(kv("a"), lambda array: array)
    assert brought(Store(CacheConfig(), [tier], room=one_more), "another")[0] == {}
    store = Store(CacheConfig(host_bytes=0), [tier], room=one_more)
    assert brought(store)[0] == {}
    assert lookup(store, "a").why is Why.too_large


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


@pytest.mark.parametrize("meta", [kv("a"), enc("a")], ids=["kv", "enc"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_not_finite_is_no_record(meta, dtype):
    meta = dataclasses.replace(meta, dtype=dtype)
    rows = (slice(None), slice(None)) if meta.context else (slice(None),)
    for token, value, kept in ((2, np.nan, False), (0, -np.inf, False), (3, np.nan, True)):  # the last one is padding
        store = Store(CacheConfig())
        [record] = store.reserve([meta])
        record.data[:] = 1
        record.data[(*rows, token)][-1, ..., -1] = value
        store.publish(record)
        assert record.wait() is kept
        assert store.tier.get(meta.name) is (record if kept else None)
        store.discard(record)
        stats = store.stats()
        assert (stats.not_finite, stats.stored, stats.failed) == (not kept, kept, kept)
        if meta.context and not kept:
            assert lookup(store, "a").why is Why.not_finite


@pytest.mark.parametrize("flaw", [None, np.inf])
def test_nobody_goes_on_reading_what_is_settled(flaw):
    """A record that was given up meanwhile, or is not finite, receives nothing more."""
    tier, store = Lending(kv("a"), lambda array: array, flaw=flaw), Store(CacheConfig())
    [told], [record] = tier.find("a"), store.reserve([kv("a")])
    if flaw is None:
        store.withdraw(record)
    assert PendingWrite(store, tier, told.meta, record).read() is False
    assert (record.is_settled, record.is_ready, store.stats().bytes) == (True, False, 0)


def test_what_comes_from_outside_memory_is_finite():
    tier = Lending(kv("a"), lambda array: array, flaw=np.inf)
    store = Store(CacheConfig(), [tier], room=one_more)
    brought(store)
    assert lookup(store, "a").kv is None
    assert (store.stats().not_finite, store.stats().bytes) == (1, 0)


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


@pytest.mark.slow
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
    meta = Meta(entry, "", str(random.randrange(3)), True, (1, 2, 2), padded - 5, "float32", (4, 2, padded, 4, 64))
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


@pytest.mark.parametrize("disk", ["", 5, b"records", ["records"], False])
def test_what_is_no_path_is_no_disk(disk):
    with pytest.raises(ValueError, match=r"^disk must be the path of a directory or None, got "):
        CacheConfig(disk=disk)


@pytest.mark.parametrize("disk", [None, "records", pathlib.Path("records")])
def test_a_disk_is_as_it_was_given(disk):
    assert CacheConfig(disk=disk).disk == disk
