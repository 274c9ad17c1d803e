"""Movement between host memory and the tiers outside it, without a model and by a clock of its own."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
import time

import numpy as np
import pytest

from tests.cache.records import DictTier, key, make
from tests.helper import eventually
from vlcache_jax.cache.channel import Breaker
from vlcache_jax.cache.config import CacheConfig
from vlcache_jax.cache.keys import SHARED, Ages, owner_key
from vlcache_jax.cache.lookups import any_form
from vlcache_jax.cache.record import Donors, Record, RefusedError, TierError, Why
from vlcache_jax.cache.store import Store
from vlcache_jax.cache.tiers.disk import DiskTier
from vlcache_jax.cache.writer import SavedTokens, Writer

CONTEXT = key(7)


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Elsewhere(DictTier):
    """A remote tier that lists its calls; `gate` keeps them waiting, `error` fails them."""

    label = "remote"
    is_local = False

    def __init__(self, **options):
        super().__init__(**options)
        self.gate, self.error, self.calls = threading.Event(), None, []
        self.gate.set()

    def _pass(self, what):
        self.calls.append(what)
        self.gate.wait(10)
        if self.error is not None:
            raise self.error

    def find(self, entry):
        self._pass("find")
        return super().find(entry)

    def read(self, meta, parts, place):
        for part, array in super().read(meta, parts, place):
            self._pass("read")
            yield part, array

    def write(self, meta, parts):
        self._pass("write")
        return super().write(meta, parts)


class House:
    """A store, its tiers, and a clock."""

    def __init__(self, *tiers, limit=5.0, clock=None, expired=lambda entry: None, form=any_form, **config):
        self.clock = clock or Clock()
        self.store = Store(
            CacheConfig(**config), tiers,
            limit=lambda meta: limit, clock=self.clock, steady=self.clock, expired=expired, form=form,
        )  # fmt: skip

    def compute(self, record):
        """As a request does that finds nothing."""
        meta = dataclasses.replace(record.meta, checksums=())
        [place] = self.store.reserve([meta])
        if place is not None:
            place.data[:] = record.data
            self.store.publish(place)
        return place

    def bring(self, record, context=CONTEXT, donors=None):
        """As a request does: asks elsewhere, then begins to load; the handle of what is found."""
        self.store.look([record.meta.entry])
        return self.store.lookup(record.meta.entry, context, grid=record.meta.grid, donors=donors)

    def settle(self):
        self.store.wait()
        for channel in self.store.channels:
            channel.flush()

    def counted(self, label="remote"):
        return self.store.stats().tiers[label]


@pytest.fixture
def record():
    return make(1, CONTEXT, padded=6)


def filled(tier, *records):
    for record in records:
        tier.write(record.meta, record.parts)
    return tier


# Looking elsewhere.


def test_what_is_elsewhere_is_found_loaded_and_kept_on_the_disk(record):
    disk, remote = DictTier(), filled(Elsewhere(), record)
    house = House(disk, remote)
    with house.bring(record) as handle:
        assert handle.exact
        house.settle()
        np.testing.assert_array_equal(handle.kv.data, record.data)
    assert list(disk.kept) == [record.meta.name]
    assert (house.counted().loaded, house.counted("disk").stored) == (1, 1)
    assert house.counted().bytes_in == record.meta.nbytes == house.counted("disk").bytes_out


def test_without_a_look_nothing_elsewhere_is_asked(record):
    remote = filled(Elsewhere(), record)
    house = House(remote)
    remote.calls.clear()
    assert house.store.lookup(record.meta.entry, CONTEXT, grid=None, donors=None).brought == {}
    assert remote.calls == []


def test_a_look_holds_for_a_while(record):
    remote = Elsewhere()
    house = House(remote)
    for seconds, asked in ((0, 1), (4.9, 1), (0.2, 2)):  # nothing was found
        house.clock.now += seconds
        house.store.look([record.meta.entry])
        assert len(remote.calls) == asked
    filled(remote, record)
    remote.calls.clear()
    for seconds, asked in ((5.1, 1), (59, 1), (1.1, 2)):  # something was
        house.clock.now += seconds
        house.store.look([record.meta.entry])
        assert len(remote.calls) == asked
    assert (house.counted().missing, house.counted().found) == (2, 2)


def test_what_was_found_and_is_gone_is_computed_and_asked_for_again(record):
    remote = filled(Elsewhere(), record)
    house = House(remote)
    house.store.look([record.meta.entry])
    remote.kept.clear()
    with house.bring(record) as handle:
        house.settle()
        assert handle.kv is None or not handle.kv.is_ready
    assert house.counted().gone == 1
    remote.calls.clear()
    house.store.look([record.meta.entry])
    assert remote.calls == ["find"]


@pytest.mark.parametrize("tier", [DictTier, Elsewhere])
def test_what_is_not_finite_makes_room_for_what_is_computed(record, tier):
    flawed = Record(dataclasses.replace(record.meta, checksums=()))
    flawed.data[:] = record.data
    flawed.data[0, 0, 1] = np.nan
    flawed.complete()
    there = filled(tier(), flawed)
    house = House(there)
    with house.bring(record):
        house.settle()
    assert (house.store.stats().not_finite, there.kept) == (1, {})
    house.compute(record)
    house.settle()
    assert list(there.kept) == [record.meta.name]
    assert house.counted(there.label).stored == 1


def test_another_images_record_is_not_taken(record):
    class Lying(Elsewhere):
        def find(self, entry):
            return super().find(record.meta.entry)

    house = House(filled(Lying(), record))
    other = make(2, CONTEXT, padded=6)
    assert house.bring(other).kv is None


def test_a_look_waits_no_longer_than_its_time(record):
    remote = filled(Elsewhere(), record)
    house = House(remote, timeout=0.05)
    remote.gate.clear()
    assert house.bring(record).kv is None
    assert house.counted().late == 1
    remote.gate.set()


# Faults.


def test_a_tier_that_fails_is_left_alone_for_a_while(record):
    remote = filled(Elsewhere(), record)
    house = House(remote)
    remote.error, remote.calls[:] = TierError("the cable is out"), []
    for number in range(10, 20):
        assert house.bring(make(number, CONTEXT)).kv is None
    assert (len(remote.calls), house.counted().failed, house.counted().unasked) == (3, 3, 7)
    house.clock.now += 1.1
    house.bring(make(21, CONTEXT))  # one try, and it rests twice as long
    house.clock.now += 1.1
    house.bring(make(22, CONTEXT))
    assert len(remote.calls) == 4
    remote.error = None
    house.clock.now += 1.0
    with house.bring(record) as handle:
        house.settle()
        assert handle.kv.is_ready
    assert house.bring(make(23, CONTEXT)).kv is None
    assert house.counted().unasked == 8


def test_the_breaker():
    clock = Clock()
    breaker = Breaker(clock)
    for _ in range(2):
        breaker.failed()
    breaker.worked()
    for _ in range(2):
        breaker.failed()
    assert breaker.allows()
    breaker.failed()
    rests = []
    for _ in range(8):
        start = clock.now
        while not breaker.allows():
            clock.now += 0.25
        assert not breaker.allows()  # others wait for the one that tries
        rests.append(clock.now - start)
        breaker.failed()
    assert rests == [1, 2, 4, 8, 16, 32, 60, 60]
    clock.now += 60
    assert breaker.allows()
    breaker.worked()
    assert breaker.allows()
    assert breaker.allows()


def test_who_refuses_is_not_asked_again_at_once(record):
    remote = Elsewhere()
    remote.error = RefusedError("token")
    house = House(remote)
    for number in range(3):
        house.bring(make(number + 1, CONTEXT))
    assert (remote.calls, house.counted().refused, house.counted().unasked) == (["find"], 1, 2)


def test_a_record_that_comes_too_late_is_computed(record):
    remote = filled(Elsewhere(), record, make(2, CONTEXT))
    house = House(remote, limit=5.0)
    house.store.look([key(1), key(2)])
    remote.gate.clear()
    one, two = house.bring(record), house.bring(make(2, CONTEXT))
    house.clock.now += 4.9
    house.store.give_up_late()
    assert [one.kv.is_settled, two.kv.is_settled] == [False, False]
    house.clock.now += 0.2
    house.store.channels[0].progressed = house.clock.now  # one that came just now gives the others time
    house.store.give_up_late()
    assert [one.kv.is_settled, two.kv.is_settled] == [False, False]
    house.clock.now += 5.0
    house.store.give_up_late()
    assert house.store.find(key(1), CONTEXT, grid=None, donors=None).why is Why.timeout
    assert [one.kv.is_settled, two.kv.is_settled, house.counted().late] == [True, True, 2]
    remote.gate.set()
    house.settle()
    assert (one.kv.is_ready, house.store.stats().bytes, house.counted().loaded) == (False, 0, 0)


def test_a_time_limit_of_the_user_holds_for_each(record):
    remote = filled(Elsewhere(), record, make(2, CONTEXT))
    house = House(remote, timeout=2.0)
    house.store.look([key(1), key(2)])
    remote.gate.clear()
    handles = house.bring(record), house.bring(make(2, CONTEXT))
    house.clock.now += 2.0
    house.store.give_up_late()
    assert all(handle.kv.is_settled for handle in handles)
    remote.gate.set()


def test_the_time_limit_is_looked_at_by_itself(record):
    remote = filled(Elsewhere(), record)
    house = House(remote)
    house.store.look([key(1)])
    remote.gate.clear()
    handle = house.bring(record)
    house.clock.now += 6.0
    assert not handle.kv.wait(10)  # somebody ends it
    remote.gate.set()
    house.settle()


def test_what_ends_waits_for_whoever_counts_what_is_loading(record):
    remote = filled(Elsewhere(), record)
    house = House(remote)
    house.store.look([key(1)])
    remote.gate.clear()
    with house.bring(record) as handle:
        with house.store._moving:
            remote.gate.set()
            assert handle.kv.wait(10)
            time.sleep(0.01)
            assert len(house.store._loading) == 1
        house.settle()


def test_nobody_loads_what_nobody_wants(record):
    remote = filled(Elsewhere(), record)
    house = House(remote)
    house.store.look([key(1)])
    remote.gate.clear()
    with house.bring(record) as handle:
        loading = handle.kv
        assert not loading.is_settled
    assert loading.is_settled
    assert house.store.stats().bytes == 0
    remote.gate.set()
    house.settle()
    assert (loading.is_ready, house.counted().loaded, house.counted().failed) == (False, 0, 0)


# Writing.


def test_what_is_computed_is_written_everywhere(record):
    disk, remote = DictTier(), Elsewhere()
    house = House(disk, remote)
    remote.gate.clear()
    house.compute(record)
    house.store.flush()  # nobody waits for what is far away
    assert (list(disk.kept), list(remote.kept)) == ([record.meta.name], [])
    remote.gate.set()
    house.settle()
    assert list(remote.kept) == [record.meta.name]
    assert not any(one.held or one.pins for one in house.store.tier.records())


def test_what_others_lend_is_only_read(record):
    peer = filled(Elsewhere(), record)
    peer.is_read_only = True
    house = House(peer)
    peer.calls.clear()
    house.compute(make(2, CONTEXT))
    house.settle()
    assert house.store.delete(key(1)) == set()
    assert (peer.calls, list(peer.kept)) == ([], [record.meta.name])
    assert (house.counted().skipped, house.counted().stored) == (0, 0)


def test_what_waits_to_be_written_has_a_limit(record):
    remote = Elsewhere()
    house = House(remote, host_bytes=6 * record.meta.nbytes)
    remote.gate.clear()
    for number in range(1, 8):
        house.compute(make(number, CONTEXT, padded=6))
    remote.gate.set()
    house.settle()
    assert (house.counted().stored, house.counted().skipped) == (3, 4)
    assert house.store.stats().left_bytes == 0


def test_who_deletes_deletes_what_is_still_to_be_written(record):
    remote = Elsewhere()
    house = House(remote)
    other = make(2, CONTEXT, padded=6)
    remote.gate.clear()
    house.compute(other)
    house.compute(record)
    deleting = [threading.Thread(target=house.store.delete, args=(key(number),)) for number in (1, 2)]
    for thread in deleting:
        thread.start()
    remote.gate.set()
    for thread in deleting:
        thread.join()
    house.settle()
    for number in (1, 2):
        house.store.delete(key(number))
    assert remote.kept == {}


class Arriving:
    """Rows on their way from the device."""

    def __init__(self, rows):
        self.rows, self.gate, self.nbytes = rows, threading.Event(), rows.nbytes

    def __array__(self, *_, **__):
        assert self.gate.wait(10)
        return self.rows


def test_nothing_is_published_before_it_has_arrived():
    """What others had: a record that was visible, here or in a store, before its copy from the device was complete."""
    rows, disk = make(1, padded=6), DictTier()
    house = House(disk)
    writer = Writer(house.store)
    [place] = house.store.reserve([dataclasses.replace(rows.meta, checksums=())])
    writer.encoder(place, coming := Arriving(rows.data), 0)
    writer.begin()
    house.store.flush()
    assert (place.is_ready, disk.kept, house.store.stats().stored) == (False, {}, 0)
    coming.gate.set()
    writer.flush()
    house.store.flush()
    assert (list(disk.kept), place.checksums()) == ([rows.meta.name], rows.meta.checksums)
    writer.close()


class Computed:
    """An array on the device, of an engine that notes what is copied to the host."""

    def __init__(self, rows, name, copied):
        self.rows, self.name, self.copied, self.nbytes = rows, name, copied, rows.nbytes

    def copy_to_host_async(self):
        self.copied.append(("sent", self.name))

    def __array__(self, *_, **__):
        self.copied.append(("there", self.name))
        return self.rows


@pytest.fixture
def writing():
    """A writer, a function that has it fill the record of the encoder rows of an image, and what has been copied."""
    house, copied = House(), []
    writer = Writer(house.store)

    def ask(number):
        rows = make(number, padded=6)
        [place] = house.store.reserve([dataclasses.replace(rows.meta, checksums=())])
        writer.encoder(place, Computed(rows.data, number, copied), 0)
        return place

    yield writer, ask, copied
    writer.close()


def there(*numbers):
    return [("there", number) for number in numbers]


def test_no_copy_begins_before_it_may(writing):
    writer, ask, copied = writing
    ask(1)
    requested = writer.requested
    places = [ask(2), ask(3)]
    writer.throttle(10**9)
    assert copied == []
    writer.begin(requested)
    writer.begin(requested)
    writer.throttle(sum(place.data.nbytes for place in places))  # the first one has been copied, then
    assert copied == there(1)
    assert not any(place.is_ready for place in places)
    writer.flush()
    assert copied == there(1, 2, 3)
    assert all(place.is_ready for place in places)


def test_no_more_waits_on_the_device_than_there_is_room_for(writing):
    writer, ask, copied = writing
    size = ask(1).data.nbytes
    for number in (2, 3):
        ask(number)
        writer.throttle(2 * size)
    assert copied == there(1)
    writer.throttle(size - 1)
    assert copied == there(1, 2, 3)


@pytest.mark.parametrize("failed", [False, True])
def test_whoever_ends_before_a_copy_has_begun_loses_it_only_if_it_failed(writing, failed):
    writer, ask, copied = writing
    places = [ask(1), ask(2)]
    writer.end(places[1:], failed=failed)
    writer.flush()
    assert copied == there(1, 2)
    assert [place.is_ready for place in places] == [True, not failed]


def test_who_closes_loses_nothing(writing):
    writer, ask, _ = writing
    place = ask(1)
    writer.close()
    assert place.is_ready


def test_two_layers_are_on_their_way_at_most(record):
    """So that tokens, which are copied as everything is in its turn, wait for no more."""
    house, copied = House(), []
    writer = Writer(house.store)
    [place] = house.store.reserve([dataclasses.replace(record.meta, checksums=())])
    layers = [tuple(Computed(half, layer, copied) for half in halves) for layer, halves in enumerate(record.data)]
    tokens = np.arange(record.meta.tokens)
    writer.kv([SavedTokens(place, tokens, tokens)], layers)
    writer.flush()
    ahead = [("sent", 0), ("sent", 1), ("there", 0), ("sent", 2), ("there", 1), ("there", 2)]
    assert copied == [one for one in ahead for _ in range(2)]  # keys and values
    assert place.checksums() == record.meta.checksums
    writer.close()


def test_what_could_not_be_written_is_seen_by_nobody(record):
    """What others had: a failed store that stays visible."""
    remote = Elsewhere()
    house = House(remote)
    remote.error = TierError("full")
    house.compute(record)
    house.settle()
    remote.error = None
    assert (house.counted().stored, house.counted().failed) == (0, 1)
    other = House(remote)
    assert other.bring(record).kv is None


def test_who_waits_for_what_is_deleted_waits_no_longer(record):
    class Slow(Elsewhere):
        is_local = True

    disk = Slow()
    house = House(disk)
    disk.gate.clear()
    house.compute(make(2, CONTEXT))
    house.compute(record)
    with concurrent.futures.ThreadPoolExecutor(1) as other:
        flushing = other.submit(house.store.flush)
        time.sleep(0.01)
        house.store.channels[0].delete(record.meta.name)
        disk.gate.set()
        flushing.result(10)


@pytest.mark.parametrize("has_begun", [False, True])
def test_what_is_deleted_at_once_never_comes_elsewhere(record, has_begun):
    disk, remote = DictTier(), Elsewhere()
    house = House(disk, remote)
    remote.gate.clear()
    if not has_begun:
        house.compute(make(2, CONTEXT))  # is written before
    house.compute(record)
    house.store.flush()
    assert house.store.evict(key(1)) == {record.meta.name}  # though it is still to be written
    deleting = threading.Thread(target=house.store.delete, args=(key(1),))
    deleting.start()
    remote.gate.set()
    deleting.join()
    house.settle()
    assert record.meta.name not in disk.kept.keys() | remote.kept.keys()
    assert house.store.stats().left_bytes == 0


def test_at_the_second_sighting(record):
    disk = DictTier()
    house = House(disk, admit="second_use")
    rows = make(1, padded=6)
    house.bring(record)
    house.compute(rows)
    house.compute(record)
    house.store.flush()
    assert not disk.kept
    house.bring(record)
    house.store.flush()
    assert set(disk.kept) == {record.meta.name, rows.meta.name}
    again = make(1, key(8), padded=6)
    house.compute(again)  # the image is known to be worth it
    house.store.flush()
    assert again.meta.name in disk.kept
    house.bring(record)
    assert house.counted("disk").known == 0


def test_closing_gives_up_what_is_far_away(record, monkeypatch):
    monkeypatch.setattr("vlcache_jax.cache.channel._CLOSING", 0.05)
    remote = filled(Elsewhere(), make(3, CONTEXT))
    house = House(remote)
    house.store.look([key(3)])
    remote.gate.clear()
    handle = house.bring(make(3, CONTEXT))
    for number in (1, 2, 4):
        house.compute(make(number, CONTEXT))
    assert eventually(lambda: "write" in remote.calls)
    house.store.close()
    skipped = 2  # The first of three records is being written.
    assert (handle.kv.is_settled, handle.kv.is_ready, house.counted().skipped) == (True, False, skipped)
    remote.gate.set()


def test_what_is_canonical_replaces_what_is_not(record):
    disk = DictTier()
    house = House(disk)
    first = Record(dataclasses.replace(record.meta, canonical=False, checksums=()))
    first.data[:] = record.data + 1
    house.compute(first)
    house.compute(record)
    house.compute(first)  # whoever computes it so again does not take it back
    house.store.flush()
    with House(disk).bring(record) as handle:
        assert handle.exact


# No memory of its own, time to live, shares.


def test_without_host_memory_records_pass_through(record):
    disk = DictTier()
    house = House(disk, host_bytes=0, disk="somewhere")
    house.compute(record)
    house.store.flush()
    assert (list(disk.kept), house.store.stats().bytes) == ([record.meta.name], 0)
    with house.bring(record) as handle:
        house.settle()
        np.testing.assert_array_equal(handle.kv.data, record.data)
        assert house.store.stats().bytes == record.meta.nbytes
    assert house.store.stats().bytes == 0
    house.store.channels[0].is_closing = True  # it takes nothing more
    assert house.compute(make(2, CONTEXT)) is not None
    assert house.store.stats().bytes == 0


def test_what_is_too_old_is_not_used_any_more(record):
    clock = Clock()
    disk = DictTier(now=clock)
    dropped = []
    house = House(disk, ttl=60.0, clock=clock, expired=dropped.append)
    house.compute(record)
    clock.now += 50
    house.compute(make(1, key(8), padded=6))
    house.settle()
    assert house.bring(record).exact
    clock.now += 11
    found = house.bring(record)
    assert (found.kv, found.why, dropped) == (None, Why.expired, [key(1)])
    assert (house.store.stats().expired, house.store.stats().kv_records) == (1, 0)
    with house.bring(record, key(8)) as handle:  # the disk has it, and it is younger
        house.settle()
        assert handle.exact
    clock.now += 50
    assert house.bring(record, key(8)).kv is None


def test_what_comes_from_a_tier_is_as_old_as_it_was_there(record):
    clock = Clock()
    remote = filled(Elsewhere(now=clock), record)
    house = House(remote, ttl=60.0, clock=clock)
    clock.now += 50
    with house.bring(record) as handle:
        house.settle()
        assert handle.kv.is_ready
    clock.now += 11
    assert house.bring(record).kv is None


def test_a_copy_is_as_old_as_what_it_is_of(record, tmp_path):
    clock = Clock()
    remote = filled(Elsewhere(now=clock), record)
    disk = DiskTier(tmp_path, 10**6, ttl=60.0, clock=clock)
    house = House(disk, remote, ttl=60.0, clock=clock)
    clock.now += 50
    with house.bring(record):
        house.settle()
    assert house.counted("disk").stored == 1
    clock.now += 11
    with house.bring(record, key(8)) as handle:
        assert handle.kv is None
    house.store.close()


def test_a_clock_that_was_ahead_makes_nothing_younger(record, tmp_path):
    """What was kept by it, in memory, on the disk or elsewhere, counts as kept now, from when that is met first."""
    clock, steady = Clock(), Clock()
    ahead = 10 * 365 * 86400.0
    clock.now += ahead
    remote = filled(Elsewhere(now=clock), make(3, CONTEXT, padded=6))
    disk = DiskTier(tmp_path, 10**6, ttl=60.0, clock=clock)
    house = House(disk, remote, ttl=60.0, clock=clock)
    house.store.ages._steady = steady
    house.compute(record)
    house.settle()
    late = make(2, CONTEXT, padded=6)
    house.compute(late)
    clock.now -= ahead
    house.settle()
    house.store.evict(key(2))
    elsewhere = make(3, CONTEXT, padded=6)
    for passed, is_found in ((0, True), (59, True), (2, False), (ahead + 59, False)):
        clock.now += passed
        steady.now += passed
        for one in (record, late, elsewhere):
            with house.bring(one) as handle:
                house.settle()
                assert (handle.kv is not None) is is_found, (passed, one.meta.entry)
    house.store.close()


def test_a_clock_that_is_wrong_for_a_moment_changes_no_age():
    clock, steady = Clock(), Clock()
    ages = Ages(60.0, clock, steady)
    ages.note(make(1))
    said = clock.now
    for wrong in (-900.0, 900.0):
        clock.now += wrong
        assert ages.since("a", said) == min(said, clock.now)
        clock.now -= wrong
        assert ages.since("a", said) == said
    clock.now -= 900.0
    assert not ages.end(key(1))
    clock.now += 900.0
    assert not ages.end(key(1))
    steady.now += 61  # the clock stands still
    assert ages.since("a", said) == said - 61
    assert ages.end(key(1))


def test_rests_and_limits_go_by_a_clock_that_nobody_sets():
    """By one that was ahead for a moment, a store would be left alone, and what it said hold, for years."""
    store = Store(CacheConfig(), [DictTier()])
    [channel] = store.channels
    assert store._steady is channel._clock is channel._breaker._clock is time.monotonic
    store.close()


def test_what_is_admitted_late_is_as_old_as_it_is(record, tmp_path):
    clock = Clock()
    disk = DiskTier(tmp_path, 10**6, ttl=60.0, clock=clock)
    house = House(disk, ttl=60.0, admit="second_use", clock=clock)
    house.bring(record)
    house.compute(record)
    clock.now += 50
    house.bring(record)
    house.settle()
    [found] = disk.find(key(1))
    assert found.written == 1000.0
    house.store.evict(key(1))
    clock.now += 11
    assert house.bring(record).kv is None
    house.store.close()


def test_what_is_deleted_has_not_been_asked_for(record):
    disk = DictTier()
    house = House(disk, admit="second_use")
    house.bring(record).release()
    house.compute(record)
    house.bring(record).release()
    house.settle()
    assert house.store.evict(key(1)) == house.store.delete(key(1)) == {record.meta.name}
    house.bring(record).release()
    assert house.compute(record) is not None
    house.settle()
    assert disk.kept == {}


def test_what_is_too_old_is_deleted_too(record, tmp_path):
    clock = Clock()
    disk = filled(DiskTier(tmp_path, 10**6, ttl=60.0, clock=clock), record)
    house = House(disk, ttl=60.0, clock=clock)
    clock.now += 61
    assert house.bring(record).kv is None
    assert house.store.delete(key(1)) == {record.meta.name}
    assert not list(tmp_path.rglob("*.safetensors"))
    house.store.close()


def test_what_no_look_up_would_take_is_not_loaded(record):
    """K, V of the same context that are not canonical, where canonical ones of another are in memory."""
    record.meta = dataclasses.replace(record.meta, canonical=False)
    disk = filled(DictTier(), record)
    house = House(disk)
    with house.bring(record, donors=Donors()) as handle:  # there is no other
        house.settle()
        assert handle.kv.is_ready
    house.compute(make(1, key(8), padded=6))
    with house.bring(record, donors=Donors()) as handle:
        house.settle()
        assert handle.kv.meta.context == key(8)
    assert house.counted("disk").loaded == 1


def test_what_is_pinned_on_the_disk_is_not_evicted(record, tmp_path):
    disk = DiskTier(tmp_path, 10**6)
    house = House(filled(disk, record))
    house.store.keep_outside(key(1), True)
    assert house.store.delete(key(1)) == set()
    assert disk.counts()["records"] == 1
    house.store.keep_outside(key(1), False)
    assert house.store.delete(key(1)) == {record.meta.name}
    house.store.close()


def test_what_was_pinned_passes_through_later(record):
    house = House(DictTier(), host_bytes=0, disk="somewhere")
    house.compute(record)
    house.store.flush()
    with house.bring(record):
        house.settle()
        house.store.keep(key(1), True)
    assert house.store.stats().bytes == record.meta.nbytes
    house.store.keep(key(1), False)
    assert house.store.stats().bytes == 0


def test_a_salt_has_its_share(record):
    size = record.meta.nbytes
    house = House(host_bytes=10 * size, max_bytes_per_salt=2 * size)
    for number in range(1, 5):
        house.compute(make(number, CONTEXT, padded=6, owner="greedy"))
    for number in range(5, 9):
        house.compute(make(number, CONTEXT, padded=6, owner=None))
    for number in range(9, 11):
        house.compute(make(number, CONTEXT, padded=6, owner=SHARED))
    owners = [one.meta.owner for one in house.store.tier.records()]
    assert [owners.count(owner_key(salt)) for salt in ("greedy", None, SHARED)] == [2, 4, 2]
    assert house.bring(make(4, CONTEXT, owner="greedy")).exact
    assert house.compute(make(11, CONTEXT, tokens=18, padded=18, owner="greedy")) is None  # larger than its share
    assert house.store.stats().kv_records == 8
    both = [dataclasses.replace(make(n, CONTEXT, padded=6, owner="new").meta, checksums=()) for n in (12, 13, 14)]
    assert [one is not None for one in house.store.reserve(both)] == [True, True, False]


def test_pins_reach_the_disk(record):
    disk = filled(DictTier(), record)
    house = House(disk)
    house.store.keep_outside(key(1), True)
    assert disk.staying == {record.meta.name}
    house.store.keep_outside(key(1), False)
    assert not disk.staying


def test_the_counters_are_those_of_prometheus(record):
    from prometheus_client import generate_latest

    house = House(filled(Elsewhere(), record))
    with house.bring(record):
        house.settle()
    text = generate_latest(house.store.meter.registry).decode()
    assert 'vlcache_tier_events_total{event="loaded",tier="remote"} 1.0' in text
    assert f'vlcache_tier_bytes_total{{direction="in",tier="remote"}} {float(record.meta.nbytes)}' in text
    assert 'vlcache_tier_seconds_count{operation="read",tier="remote"} 1.0' in text


# What is found says of itself what this engine would not write.


def form_of(record):
    """The form of an engine that writes records like this one."""
    return lambda found, grid: dataclasses.replace(
        record.meta.with_room(record.meta.tokens), grid=grid, canonical=found.canonical, owner=found.owner
    )


def test_what_is_no_record_of_this_engine_is_never_read_and_told_of_once(record):
    other = dataclasses.replace(record.meta, model=key(98))
    remote = Elsewhere()
    remote.kept[record.meta.name] = other.with_room(other.tokens), 0.0, record.parts
    house = House(remote, form=form_of(record))
    for _ in range(2):  # within the time that a look holds
        assert house.bring(record).kv is None
    house.settle()
    assert (remote.kept, "read" in remote.calls, house.counted().damaged) == ({}, False, 1)
    assert (house.store.stats().corrupt, house.store.stats().whys) == (1, {})
    remote.kept[record.meta.name] = other.with_room(other.tokens), 0.0, record.parts
    house.compute(record)  # what is there is replaced
    house.settle()
    assert remote.kept[record.meta.name][0].model == record.meta.model


@pytest.mark.parametrize("name", ["grid", "owner"])
def test_what_only_the_image_tells_is_compared_too(record, name):
    remote = filled(Elsewhere(), record)
    house = House(remote, form=form_of(record))
    asked = {"grid": record.meta.grid, "owner": record.meta.owner} | {name: {"grid": (1, 2, 12), "owner": ""}[name]}
    house.store.look([record.meta.entry])
    assert house.store.lookup(record.meta.entry, CONTEXT, donors=None, **asked).kv is None
    house.settle()
    assert (house.counted().damaged, remote.kept) == (1, {})


def test_an_image_that_another_engine_takes_alone_is_left_there(record):
    """Its sizes are beyond those of this engine, and it is asked for by its key."""

    def room(tokens):
        raise ValueError("size must be at most 4")

    remote = filled(Elsewhere(), record)
    house = House(remote, form=form_of(record))
    house.store._room = room
    assert house.bring(record).kv is None
    assert (house.counted().damaged, list(remote.kept)) == (0, [record.meta.name])


# A tier of this machine that hangs.


def test_a_look_that_hangs_is_waited_for_once(record):
    disk = filled(Elsewhere(), record)
    disk.label, disk.is_local = "disk", True
    house = House(disk)
    looks = house.store.channels[0].looks
    looks._limit = 0.01
    disk.gate.clear()
    for _ in range(3):  # as long as the first look goes on, there is no other
        assert house.bring(record).kv is None
        assert not house.store.knows(record.meta.entry)
    assert (disk.calls.count("find"), house.counted("disk").late) == (1, 1)
    looks._limit = 100.0
    disk.gate.set()
    while looks._stuck:
        time.sleep(0.001)
    with house.bring(record) as handle:
        house.settle()
        assert handle.kv.is_ready


def test_looks_that_hang_count_against_the_tier(record):
    disk = filled(Elsewhere(), record)
    disk.label, disk.is_local = "disk", True
    house = House(disk)
    looks = house.store.channels[0].looks
    for _ in range(3):
        looks._limit = 0.01
        disk.gate.clear()
        assert house.bring(record).kv is None
        disk.gate.set()
        while looks._stuck:
            time.sleep(0.001)
    looks._limit = 100.0
    asked = len(disk.calls)
    assert house.bring(record).kv is None  # it is left alone
    assert len(disk.calls) == asked
    house.clock.now += 1.1
    assert house.bring(record).kv is not None
