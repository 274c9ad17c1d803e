"""A store, its movement and its tiers against a dictionary that knows every byte that was ever computed.

The threads of `channel` are replaced: each piece of work waits until the machine does it, so that what overtakes what
is drawn like everything else, and comes again in the same way.
"""

from __future__ import annotations

import concurrent.futures
import shutil
import tempfile
import threading
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import vlcache_jax.cache.channel
import vlcache_jax.cache.store
from tests.cache.records import GRID, DictTier, key
from vlcache_jax.cache.config import CacheConfig
from vlcache_jax.cache.keys import NO_TENANTS, Quotas, entry_key, owner_key
from vlcache_jax.cache.record import Donors, EntryGoneError, Meta, Record, RefusedError, Tier, TierError, blocks
from vlcache_jax.cache.records import Handle
from vlcache_jax.cache.store import Store
from vlcache_jax.cache.tiers.disk import DiskTier
from vlcache_jax.cache.tiers.record_file import file_name

SALTS = ("me", "you", None)
CONTEXTS = (key(7), key(8))
LARGEST = 320  # bytes of the largest record
FILE = 2048  # more than the file of any record takes
ERRORS = (TierError("it failed"), EntryGoneError("it is gone"), RefusedError("no"), MemoryError())


@dataclass(frozen=True)
class Image:
    """A picture under a salt."""

    picture: int
    salt: str | None

    @property
    def entry(self):
        return entry_key(str(self.picture), settings={}, fingerprint="model", codec="float32", salt=self.salt)

    def meta(self, context, canonical=True):
        tokens = 2 + self.picture
        shape = (1, tokens + 1, 4) if context is None else (2, 2, tokens + 1, 1, 4)
        owner = owner_key(self.salt)
        return Meta(self.entry, owner, context, canonical, GRID, tokens, "float32", shape, codec="float32")


IMAGES = [Image(0, "me"), Image(0, "you"), Image(1, None)]
BY_ENTRY = {image.entry: image for image in IMAGES}


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Hands:
    """Stands for threads: its work waits until somebody does it."""

    def __init__(self, at_once):
        self.jobs, self.is_closed, self._at_once = [], False, at_once

    def submit(self, work, *arguments):
        if self.is_closed:
            raise RuntimeError("it is closed")
        job = Job(self)
        self.jobs.append((job, lambda: work(*arguments)))
        if self._at_once():
            self.work(-1)
        return job

    def work(self, number=0):
        job, work = self.jobs.pop(number)
        if job.set_running_or_notify_cancel():
            try:
                job.set_result(work())
            except Exception as error:
                job.set_exception(error)

    def shutdown(self, wait=True, cancel_futures=False):
        self.is_closed = True
        for job, _ in self.jobs if cancel_futures else ():
            job.cancel()
        while self.jobs:
            self.work()


class Job(concurrent.futures.Future):
    """Who waits for it has it done, after what comes before it."""

    def __init__(self, hands):
        super().__init__()
        self._hands = hands

    def exception(self, timeout=None):
        while not self.done():
            self._hands.work()
        return super().exception(timeout)


class Faulty(Tier):
    """Another tier, one operation of which goes wrong when it is told to.

    Attributes:
      faults: what the next call of an operation raises.
      meanwhile: what happens while the next record is read.
      age: of what is written, when it was computed.
      kept: records that were stored and should be there, and when they were computed, by their names.
      staying: those of them that are pinned.
      taken: names of records that were there after they were written, since somebody looked last.
    """

    def __init__(self, tier, age: Callable[[Meta, bytes], float]):
        self.tier, self.label, self.is_local = tier, tier.label, tier.is_local
        self.age = age
        self.faults, self.meanwhile = {}, lambda: None
        self.kept: dict[str, float] = {}
        self.staying, self.taken = set(), set()

    def _pass(self, operation):
        if error := self.faults.pop(operation, None):
            raise error

    def find(self, entry):
        self._pass("find")
        return self.tier.find(entry)

    def read(self, meta, parts, place):
        for part, array in self.tier.read(meta, parts, place):
            meanwhile, self.meanwhile = self.meanwhile, lambda: None
            meanwhile()
            self._pass("read")
            yield part, array

    def write(self, meta, parts):
        self._pass("write")
        outcome = self.tier.write(meta, parts)
        if outcome == "stored":
            self.kept[meta.name] = self.age(meta, content(meta, parts.values()))
        if outcome != "refused":
            self.taken.add(meta.name)
        return outcome

    def delete(self, name):
        self.lose(name)
        self._pass("delete")
        self.tier.delete(name)

    def lose(self, name):
        """Nobody may rely on it any more."""
        self.kept.pop(name, None)
        self.staying.discard(name)

    def lines(self):
        return self.tier.lines()

    def touch(self, names):
        self.tier.touch(names)

    def pin(self, name, is_pinned):
        self._pass("pin")
        self.tier.pin(name, is_pinned)
        (self.staying.add if is_pinned and name in self.kept else self.staying.discard)(name)

    def pinned(self, entry):
        return self.tier.pinned(entry)

    def date(self, name, written):
        self.tier.date(name, written)

    def counts(self):
        return self.tier.counts()

    def close(self):
        self.tier.close()


class Elsewhere(DictTier):
    label = "remote"
    is_local = False

    def date(self, name, written):
        meta, _, data = self.kept[name]
        self.kept[name] = meta, written, data


@dataclass(frozen=True)
class Made:
    """What was computed once under a name."""

    canonical: bool
    at: float


@dataclass
class Lookup:
    """A request: what it found and what it may find."""

    image: Image
    handle: Handle
    oldest: float
    is_held: bool = False
    records: list[Record] = field(default_factory=list)


def content(meta, parts):
    """A record's bytes, without padding."""
    return b"".join(rows.tobytes() for part in parts for rows in blocks(meta, part))


class Machine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.patches = pytest.MonkeyPatch()
        self.patches.setattr(vlcache_jax.cache.store, "_LOOK", 0.0)
        self.patches.setattr(vlcache_jax.cache.channel, "_CLOSING", 0.0)
        self.patches.setattr(vlcache_jax.cache.channel, "ThreadPoolExecutor", self.new_hands)
        self.folder = tempfile.mkdtemp()
        self.clock = Clock()
        self.hands, self.at_once = [], False
        self.made: dict[str, dict[bytes, Made]] = {}  # by name and content
        self.generation = 0
        self.store = None

    def new_hands(self, workers, name):
        self.hands.append(Hands(lambda: self.at_once))
        return self.hands[-1]

    @initialize(
        places=st.sampled_from([30, 4, 4, 0]),
        share=st.sampled_from([None, 2]),
        files=st.sampled_from([500, 500, 3]),
        ttl=st.sampled_from([60.0, None]),
        variants=st.sampled_from([None, 2]),
        admit=st.sampled_from(["always", "always", "second_use"]),
    )
    def begin(self, places, share, files, ttl, variants, admit):
        self.config = CacheConfig(
            host_bytes=places * LARGEST, disk=self.folder, disk_bytes=files * FILE, ttl=ttl,
            max_contexts_per_image=variants, max_bytes_per_salt=None if share is None else share * LARGEST, admit=admit,
        )  # fmt: skip
        # A share of the disk, whose files have headers, is as many records.
        self.owner_bytes = None if share is None else share * FILE
        self.never_full = files == 500 and share is None
        self.remote = Faulty(Elsewhere(now=self.clock), self.age)
        self.start({}, set())

    def start(self, kept, pinned):
        """A process begins.

        Args:
          kept, pinned: what is on the disk, as in `Faulty`.
        """
        capacity, ttl = int(self.config.disk_bytes), self.config.ttl
        disk = DiskTier(self.folder, capacity, shares=Quotas(self.owner_bytes), ttl=ttl, clock=self.clock)
        self.disk = Faulty(disk, self.age)
        self.disk.kept, self.disk.staying = kept, pinned
        self.hands.clear()
        tiers = [self.disk, self.remote]
        self.store = Store(
            self.config, tiers,
            room=lambda tokens: tokens + 1, limit=lambda meta: 5.0, clock=self.clock, steady=self.clock,
        )  # fmt: skip
        self.store._ticking = threading.current_thread()  # who is late is looked at when time passes
        self.filling: list[Record] = []
        self.lookups: list[Lookup] = []
        self.pinned: dict[str, Record] = {}  # in memory
        self.published: list[Record] = []  # since the last flush
        self.lost_writes = 0

    def teardown(self):
        if self.store is not None:
            while self.lookups:
                self.end(self.lookups.pop())
            for record in self.filling:
                self.store.cancel(record)
            self.drain()
            self.store.wait()
            self.nothing_leaks()
            self.store.close()
        self.patches.undo()
        shutil.rmtree(self.folder)

    # What is computed.

    def fill(self, record):
        """Contents that nothing else has, of this name or of another."""
        self.generation += 1
        seed = zlib.crc32(record.meta.name.encode()), self.generation
        record.data[:] = np.random.default_rng(seed).normal(size=record.meta.shape)
        own = self.made.setdefault(record.meta.name, {})
        own[content(record.meta, record.parts.values())] = Made(record.meta.canonical, self.clock.now)

    def age(self, meta, its):
        return self.made[meta.name][its].at

    def settle(self, record, fate):
        match fate:
            case "publish":
                self.fill(record)
                self.store.publish(record)
                self.published.append(record)
            case "damaged":
                record.data[:] = np.nan
                self.store.publish(record)
                assert not record.is_ready
            case "withdraw":
                self.store.withdraw(record)
            case "cancel":
                self.store.cancel(record)
            case "fail":
                self.fill(record)
                self.store.publish(record)
                self.store.discard(record)
                assert not record.is_ready

    @rule(
        image=st.sampled_from(IMAGES),
        contexts=st.lists(st.sampled_from([None, *CONTEXTS]), min_size=1, max_size=3, unique=True),
        canonical=st.booleans(),
        is_slow=st.sampled_from([False, False, True]),
    )
    def compute(self, image, contexts, canonical, is_slow):
        """As a request does for what it has not found."""
        metas = [image.meta(context, canonical or context is None) for context in contexts]
        there = {meta.name: self.store.tier.get(meta.name) for meta in metas}
        metas = [
            meta for meta in metas
            if (own := there[meta.name]) is None or (own.is_settled and meta.canonical and not own.meta.canonical)
        ]  # fmt: skip
        for record in self.store.reserve(metas):
            if record is not None:
                record.begin()
                self.filling.append(record)
                if not is_slow:
                    self.settle(self.filling.pop(), "publish")
                    if self.store.tier.get(record.meta.name) is record and record.meta.canonical and self.is_kv(record):
                        with self.store.lookup(image.entry, record.meta.context, grid=GRID, donors=None) as found:
                            assert found.exact
                            assert found.kv is record

    @rule(image=st.sampled_from(IMAGES), context=st.sampled_from(CONTEXTS))
    def compute_twice(self, image, context):
        """At first behind what was reused approximately."""
        for canonical in (False, True):
            self.compute(image, [context], canonical, False)
        self.flush()

    @staticmethod
    def is_kv(record):
        return record.meta.context is not None

    @precondition(lambda self: self.filling)
    @rule(
        data=st.data(),
        fate=st.sampled_from(["publish", "publish", "publish", "damaged", "withdraw", "cancel", "fail"]),
    )
    def finish(self, data, fate):
        self.settle(self.filling.pop(data.draw(st.integers(0, len(self.filling) - 1))), fate)

    @rule(image=st.sampled_from(IMAGES), context=st.sampled_from([None, *CONTEXTS]))
    def compute_elsewhere(self, image, context):
        record = Record(image.meta(context))
        self.fill(record)
        record.complete()
        self.remote.tier.write(record.meta, record.parts)

    # What requests find.

    @rule(
        image=st.sampled_from(IMAGES), context=st.sampled_from(CONTEXTS), approximate=st.booleans(),
        hears=st.sampled_from([True, True, True, False]), is_held=st.booleans(), waits=st.booleans(),
    )  # fmt: skip
    def ask(self, image, context, approximate, hears, is_held, waits):
        """A request is planned, and later waits for what comes."""
        lookup = self.bring(image, context, approximate, hears)
        self.lookups.append(lookup)
        if is_held:
            lookup.handle.hold()
            lookup.is_held = True
        if waits:
            self.drain()
            for record in lookup.records:
                assert record.is_settled or record in self.filling
            self.check(lookup)

    def bring(self, image, context, approximate, hears=True):
        entry = image.entry
        self.at_once = hears
        self.store.look([entry])
        for other in SALTS:
            if other != image.salt:
                assert not self.store.is_owner(owner_key(other), entry)
        self.at_once = False
        handle = self.store.lookup(entry, context, grid=GRID, donors=Donors() if approximate else None)
        oldest = -np.inf if self.config.ttl is None else self.clock.now - self.config.ttl
        lookup = Lookup(image, handle, oldest)
        lookup.records = [record for record in (handle.encoder, handle.kv) if record is not None]
        if handle.exact:
            assert handle.kv.meta.canonical
            assert handle.kv.meta.context == context
        else:
            assert approximate or handle.kv is None
        if handle.encoder is not None:
            assert handle.encoder.meta.context is None
        self.check(lookup)
        return lookup

    def check(self, lookup):
        """What a request found is what was computed for its image, and not too old when it came."""
        for record in lookup.records:
            assert record.meta.entry == lookup.image.entry
            assert record.meta.owner == owner_key(lookup.image.salt)
            if record.is_ready:
                made = self.made[record.meta.name][content(record.meta, record.parts.values())]
                assert made.canonical == record.meta.canonical
                assert made.at >= lookup.oldest

    def end(self, lookup):
        self.check(lookup)
        lookup.handle.release()

    @precondition(lambda self: self.lookups)
    @rule(data=st.data())
    def release(self, data):
        self.end(self.lookups.pop(data.draw(st.integers(0, len(self.lookups) - 1))))

    # What happens in the background.

    @precondition(lambda self: any(hands.jobs for hands in self.hands))
    @rule(data=st.data())
    def work(self, data):
        hands = data.draw(st.sampled_from([number for number, hands in enumerate(self.hands) if hands.jobs]))
        self.hands[hands].work()

    @rule()
    def drain(self):
        while busy := [hands for hands in self.hands if hands.jobs]:
            busy[0].work()

    @rule()
    def flush(self):
        """What was published is on the disk, unless something went wrong there."""
        self.store.flush()
        written = self.store.stats().tiers["disk"]
        lost = written.skipped + written.failed + written.refused + written.gone
        for record in self.published if lost == self.lost_writes else ():
            name, entry = record.meta.name, record.meta.entry
            if self.is_old(record.written):
                continue
            if record.is_ready and self.never_full and self.config.admit == "always":
                assert name in self.disk.taken
            if record.is_ready and name in self.disk.taken & self.disk.kept.keys():
                there = [one.meta for one in self.disk.tier.find(entry) if one.meta.name == name]
                assert all(meta.canonical or not record.meta.canonical for meta in there)
        self.lost_writes = lost
        self.published.clear()
        self.disk.taken.clear()

    @rule(seconds=st.sampled_from([0.1, 2, 6, 30, 61]))
    def wait(self, seconds):
        self.clock.now += seconds
        self.store.give_up_late()
        if self.config.ttl is not None:
            self.ask_for_all()

    def ask_for_all(self):
        for image in IMAGES:
            for context in CONTEXTS:
                lookup = self.bring(image, context, True)
                self.drain()
                self.end(lookup)

    # What users do.

    @rule(image=st.sampled_from(IMAGES))
    def pin(self, image):
        self.flush()
        try:
            self.store.keep(image.entry, True)
        except ValueError:
            return
        self.pinned |= {record.meta.name: record for record in self.store.records(image.entry)}
        self.store.keep_outside(image.entry, True)

    @rule(image=st.sampled_from(IMAGES))
    def unpin(self, image):
        self.store.keep_outside(image.entry, False)
        self.store.keep(image.entry, False)
        self.pinned = {name: one for name, one in self.pinned.items() if one.meta.entry != image.entry}

    @rule(image=st.sampled_from(IMAGES))
    def evict(self, image):
        self.flush()
        self.store.evict(image.entry)
        pinned = {record.meta.name for record in self.store.records(image.entry)}
        assert self.config.ttl is not None or self.pinned.keys() & self.names(image) <= pinned
        self.at_once = True
        self.store.delete(image.entry, pinned)
        self.at_once = False

    @rule(image=st.sampled_from(IMAGES), is_new=st.booleans())
    def delete(self, image, is_new):
        """Nothing of it is found any more, unless somebody was using it, or a tier failed."""
        if is_new:  # it may still be on its way
            self.compute(image, [None, *CONTEXTS], True, False)
        is_healthy = not (self.disk.faults or self.remote.faults) and all(
            channel._breaker._faults < 3 for channel in self.store.channels
        )
        self.unpin(image)
        is_used = any(lookup.image == image for lookup in self.lookups) or any(
            record.meta.entry == image.entry and not record.is_ready
            for record in (*self.store.tier.records(), *self.filling)  # one may have lost its place, and be filled
        )
        self.evict(image)
        if is_healthy and not is_used:
            assert not self.store.records(image.entry)
            for name in self.names(image):
                self.made.pop(name, None)  # whoever finds it now finds what nobody has computed
            self.drain()
            assert not self.remote.tier.find(image.entry)
            assert not self.disk.tier.find(image.entry)

    def names(self, image):
        return {image.meta(context).name for context in (None, *CONTEXTS)}

    @rule(data=st.data())
    def damage_memory(self, data):
        self.drain()
        records = [record for record in self.store.tier.records() if record.is_ready and not record.pins]
        if records:
            record = data.draw(st.sampled_from(records))
            if not record.held:
                record.data.reshape(-1)[0] += 1
                assert self.store.verify() == [record.meta.name]
                self.pinned.pop(record.meta.name, None)
        assert self.store.verify() == []

    # What goes wrong.

    @rule(
        is_disk=st.booleans(), error=st.sampled_from(ERRORS),
        operation=st.sampled_from(["find", "read", "write", "delete", "pin"]),
    )  # fmt: skip
    def fault(self, is_disk, error, operation):
        (self.disk if is_disk else self.remote).faults[operation] = error

    @rule(is_disk=st.booleans(), image=st.sampled_from(IMAGES), how=st.sampled_from(["release", "evict", "late"]))
    def meanwhile(self, is_disk, image, how):
        """Something happens while the next record is read."""

        def happen():
            match how:
                case "release":
                    while self.lookups:
                        self.end(self.lookups.pop())
                case "evict":
                    self.store.evict(image.entry)
                case "late":
                    self.clock.now += 6.0
                    self.store.give_up_late()

        (self.disk if is_disk else self.remote).meanwhile = happen

    @rule(data=st.data(), how=st.sampled_from(["gone", "short", "header", "data"]))
    def damage_file(self, data, how):
        names = sorted(line.name for line in self.disk.lines())
        if not names:
            return
        name = data.draw(st.sampled_from(names))
        path = self.disk.tier.directory / file_name(name)
        self.disk.lose(name)
        self.published = [record for record in self.published if record.meta.name != name]
        if how == "gone" or not path.exists():
            path.unlink(missing_ok=True)
            return
        changed = bytearray(path.read_bytes())
        if how == "short":
            changed.pop()
        else:
            changed[20 if how == "header" else -3] ^= 1
        path.write_bytes(changed)
        self.store.evict(name.split("/")[1])
        self.ask_for_all()

    @rule(image=st.sampled_from(IMAGES), context=st.sampled_from([None, *CONTEXTS]))
    def lose_elsewhere(self, image, context):
        self.remote.tier.delete(image.meta(context).name)

    @rule(is_killed=st.booleans())
    def restart(self, is_killed):
        """Another process begins; what the disk has kept is found by it."""
        while self.lookups:
            self.end(self.lookups.pop())
        if is_killed:
            for hands in self.hands:
                hands.jobs.clear()
            self.disk.close()
        else:
            self.store.close()
            self.nothing_leaks()
        self.remote.faults.clear()
        self.remote.meanwhile = lambda: None
        self.start(self.disk.kept, self.disk.staying)
        if self.never_full and self.config.admit == "always":
            for name in sorted(self.expected()):
                self.find_again(name)

    def find_again(self, name):
        _, entry, *context = name.split("/")
        image = BY_ENTRY[entry]
        lookup = self.bring(image, context[0] if context else CONTEXTS[0], True)
        self.drain()
        self.check(lookup)
        handle = lookup.handle
        # An image that is linked in its own context needs no encoder rows.
        assert handle.exact if not context and handle.encoder is None else handle.kv or handle.encoder
        assert all(record.is_ready for record in lookup.records if record.meta.name in self.expected())
        lookup.handle.release()

    # What always holds.

    @invariant()
    def budgets_hold(self):
        if self.store is None:
            return
        memory = self.store.tier
        records = memory.records()
        assert memory.used == sum(record.meta.nbytes for record in records) <= memory.capacity
        assert memory.pinned_bytes <= self.config.pinned_share * memory.capacity
        by_owner: Counter[str] = Counter()
        for record in records:
            by_owner[record.meta.owner] += record.meta.nbytes
        self.shares_hold(by_owner, self.config.max_bytes_per_salt)
        lines = self.disk.lines()
        assert sum(line.bytes for line in lines) == self.disk.counts()["bytes"] <= self.config.disk_bytes
        by_owner = Counter()
        for line in lines:
            by_owner[owner_key(BY_ENTRY[line.name.split("/")[1]].salt)] += line.bytes
        self.shares_hold(by_owner, self.owner_bytes)

    def shares_hold(self, by_owner, most):
        for owner, size in by_owner.items():
            assert most is None or owner in NO_TENANTS or size <= most

    @invariant()
    def users_are_counted(self):
        if self.store is None:
            return
        pins, held = Counter(), Counter()
        for lookup in self.lookups:
            for record in lookup.records:
                (held if lookup.is_held else pins)[record] += 1
        for channel in self.store.channels:
            held.update(channel._writing.values())
        for record in {*self.store.tier.records(), *self.store._left, *pins, *held}:
            assert (record.pins, record.held) == (pins[record], held[record])

    @invariant()
    def what_is_kept_stays(self):
        if self.store is None:
            return
        for name, record in self.pinned.items() if self.config.ttl is None else ():
            assert self.store.tier.get(name) is record
        on_disk = {line.name for line in self.disk.lines()}
        assert self.disk.staying & self.expected() <= on_disk
        if self.never_full:
            assert self.expected() <= on_disk

    def expected(self):
        """What the disk has kept and may still be used."""
        return {name for name, at in self.disk.kept.items() if not self.is_old(at)}

    def is_old(self, at):
        return self.config.ttl is not None and at < self.clock.now - self.config.ttl

    def nothing_leaks(self):
        """Nobody asks, nothing is in flight."""
        assert self.store.stats().left_bytes == 0
        for record in self.store.tier.records():
            assert (record.pins, record.held) == (0, 0)
            assert record.is_settled or record in self.filling
            if self.store.config.passes_on:
                assert record.is_kept or not record.is_settled


def run(examples, steps):
    options = settings(max_examples=examples, stateful_step_count=steps, deadline=None, derandomize=True)
    run_state_machine_as_test(Machine, settings=options)


def test_whatever_happens():
    run(50, 30)


@pytest.mark.thorough
def test_whatever_happens_for_long():
    run(250, 50)
