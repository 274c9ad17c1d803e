"""The one owner of the cache's state: which images are known, what is kept of them, here and in the tiers outside.

Records move between host memory and these tiers in the background. What a request looks up and host memory lacks gets
its place there at once, and comes part by part. What has been filled is written to every tier. A fault of a tier is
counted, and the request computes.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from vlcache_jax.cache.channel import Channel
from vlcache_jax.cache.config import CacheConfig
from vlcache_jax.cache.keys import REMEMBERED, Bounded, Quotas, RememberedRequests
from vlcache_jax.cache.lookups import CacheStats, Form, Meter, any_form
from vlcache_jax.cache.record import (
    DamagedError,
    Found,
    Lost,
    Meta,
    Part,
    Planes,
    Record,
    Tier,
    TierError,
    Why,
    verified,
)
from vlcache_jax.cache.records import Handle, Records
from vlcache_jax.inputs.processor import Grid

_log = logging.getLogger(__name__)

_REFUSED = 4096  # files that are no pictures
_DESCRIBED = 16384  # pictures with their limits; half a kilobyte apiece
_LOOK = 1.0  # seconds that a request waits at most to hear what a tier elsewhere has
_LOOK_HERE = 10.0  # and at most for what one of this machine has, unless `timeout` says otherwise
_TICK = 0.05  # seconds between two looks at what is late
_UNCHECKED = 2  # parts that may have come and not be checked


@dataclass(frozen=True)
class PictureKey:
    """What an alias leads to: the content key of a picture, and its size in pixels."""

    content: str
    height: int
    width: int


class _Load(NamedTuple):
    """A record that is being loaded.

    Attributes:
      begun: by the steady clock.
      limit: seconds that it may take.
    """

    record: Record
    channel: Channel
    begun: float
    limit: float

    def until(self, timeout: float | None) -> float:
        """When it is late. By its own limit not before the channel has had as long since it last gave one: of several,
        each would have to be computed."""
        if timeout is not None:
            return self.begun + timeout
        return max(self.begun, self.channel.progressed) + self.limit


class Store(Records):
    """Finds, keeps and forgets records. Every method may be called from any thread.

    Args:
      config: sizes and rules.
      tiers: outside host memory, the fastest first; may be none.
      shares: of host memory and of a disk; None: those of the configuration.
      room: for how many tokens records of so many have room in memory.
      limit: seconds that a record may take to come; who needs it computes then.
      forgotten: called with every record that leaves host memory.
      expired: called with the entry key of an image that has become too old.
      form: of the records that this engine writes; whatever else is found is damaged.
      together: layers of a record that are loaded together where others are to be loaded, too, so that the first ones
        of all come first; None: all.
      clock: seconds since the epoch.
      steady: seconds that only grow.

    Attributes:
      pictures: what an alias stands for.
      described: what follows from that picture, by alias and limits of pixels. It is cleared with the aliases.
      refusals: why the file under an alias is no picture.
      requests: the lists of images that came together.
      shared: the entry keys of what an operator keeps for everyone, by those without a salt.
      channels: the ways to the tiers.
      meter: counts what they do.
    """

    def __init__(
        self,
        config: CacheConfig,
        tiers: Sequence[Tier] = (),
        *,
        shares: Quotas | None = None,
        room: Callable[[int], int] = int,
        limit: Callable[[Meta], float] = lambda meta: 30.0,
        forgotten: Callable[[Record], object] = lambda record: None,
        expired: Callable[[str], object] = lambda entry: None,
        form: Form = any_form,
        together: int | None = None,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ):
        self._together = together
        super().__init__(config, shares or Quotas(config.owner_bytes), clock, forgotten)
        self.pictures = Bounded[PictureKey](REMEMBERED)
        self.described = Bounded[Any](_DESCRIBED)
        self.refusals = Bounded[str](_REFUSED)
        self.requests = RememberedRequests()
        self.shared = Bounded[str](REMEMBERED)
        self._room, self._limit, self._expired, self._steady = room, limit, expired, steady
        self._patience = _LOOK if config.timeout is None else min(_LOOK, config.timeout)
        self.meter = Meter()
        make = functools.partial(
            Channel, meter=self.meter, clock=steady, ages=self.ages, most=self.tier.capacity // 2, form=form,
            patience=_LOOK_HERE if config.timeout is None else config.timeout, damaged=self.found_damaged,
        )  # fmt: skip
        self.channels = [make(tier) for tier in tiers]
        self._sighted = Bounded[bool](REMEMBERED)  # images; whether more than once
        self._loading: dict[Future[None], _Load] = {}
        self._moving = threading.Lock()
        self._ticking: threading.Thread | None = None
        self._is_closing = False

    # What a request needs.

    def look(self, entries: Sequence[str]) -> None:
        """Asks the tiers that are not on this machine for images, before their requests are planned."""
        asked = [(channel, channel.looks.ask(entries)) for channel in self.channels]
        until = time.perf_counter() + self._patience
        for channel, looking in asked:
            # Of what is in memory, the others have little more; what they say is for the next time.
            needed = {entry: future for entry, future in looking.items() if not self.has_variants(entry)}
            channel.looks.hear(needed, max(0.0, until - time.perf_counter()))

    def lookup(
        self, entry: str, context: str, *, grid: Grid | None, approximate: bool, owner: str | None = None,
        waits: bool = False,
    ) -> Handle:  # fmt: skip
        """Finds what is kept for an image and pins it. What host memory lacks begins to come; records that are still
        being filled are found too.

        Args:
          entry: entry key of the image.
          context: digest of what stands before it.
          grid: of the image; a record with another one is not its record. None: it is not known.
          approximate: whether K, V computed in another context may be returned.
          owner: whose records of it are, see `Meta`. None: it is not known.
          waits: for what comes.
        """
        coming = self._bring_in(entry, context, approximate, grid, owner) if self.channels else {}
        try:
            if waits:
                self.wait()
            if self.config.ttl is not None and self.ages.end(entry):
                self.expire(entry)
                self._expired(entry)
            handle = self.find(entry, context, grid=grid, approximate=approximate)
        finally:
            if coming:
                self.pin([*coming], -1)
        handle.brought = {record.meta.name: label for record, label in coming.items()}
        return handle

    def _bring_in(
        self, entry: str, context: str, approximate: bool, grid: Grid | None, owner: str | None
    ) -> dict[Record, str]:
        """Begins to load what is kept of an image, and is not in host memory; the records, pinned, and where each comes
        from."""
        self._sight(entry)
        wanted = _wanted(
            self, entry, context, approximate, lambda: _outside(self.channels, entry, self.ages.oldest(), grid, owner)
        )
        # Records that are used in host memory should not leave the disk as if nobody had.
        names = {f"kv/{entry}/{context}", f"enc/{entry}"} - wanted.keys()
        here = [name for name in names if self.tier.get(name) is not None]
        for channel in self.channels if here else ():
            channel.tier.touch(here)
        begun = [(channel, found, self._place(channel, found)) for channel, found in wanted.values()]
        coming = {record: (channel, found.meta) for channel, found, record in begun if record is not None}
        self.pin([*coming], 1)  # nobody lets them pass before they have been found
        for record, (channel, meta) in coming.items():
            self._start(channel, meta, record)
        return {record: channel.tier.label for record, (channel, _) in coming.items()}

    def knows(self, entry: str) -> bool:
        """Whether any record of an image exists, or is being filled, or can be brought in."""
        with self._lock:
            is_here = entry in self._variants or self.tier.get(f"enc/{entry}") is not None
        return is_here or f"enc/{entry}" in _outside(self.channels, entry, self.ages.oldest())

    def wait(self) -> None:
        """Until all that has been begun to load is there, or is known not to come."""
        with self._moving:
            loading = list(self._loading.values())
        for record, *_ in loading:
            record.wait()

    # What a request has computed.

    def published(self, record: Record) -> None:
        """Begins to write a record that has been filled to every tier that admits it."""
        if record.source is None and (self.config.admit == "always" or self._sighted.get(record.meta.entry)):
            self._keep(record, self.channels)

    def _keep(self, record: Record, channels: Sequence[Channel]) -> None:
        for channel in (channel for channel in channels if not channel.tier.is_read_only):
            self.hold([record], 1, to_write=True)
            channel.keep(record, lambda: self.hold([record], -1, to_write=True))

    def _sight(self, entry: str) -> None:
        """An image is asked for. Records that wait for its second time are written now."""
        if self.config.admit == "always":
            return
        times = self._sighted.get(entry)
        self._sighted.put(entry, times is not None)
        if times is False:
            for record in self.records(entry):
                self.published(record)

    # What users do.

    def delete(self, entry: str, pinned: Collection[str] = ()) -> set[str]:
        """Removes an image's records from every tier, but not what is pinned there, and some names; returns those that
        it removed."""
        names: set[str] = set()
        self._sighted.pop(entry)  # it has not been asked for yet
        for channel in (channel for channel in self.channels if not channel.tier.is_read_only):
            there = channel.to_write(entry)  # or written by the time of the look
            channel.looks.forget(entry)
            channel.looks.hear(channel.looks.ask([entry]), self._patience)
            names |= channel.delete_all(entry, there, pinned)
        return names

    def write_out(self, entry: str) -> None:
        """Begins to write an image's records to the tiers of this machine, though it was not asked for twice."""
        for record in self.records(entry) if self.config.admit != "always" else ():
            if record.source is None:
                self._keep(record, [channel for channel in self.channels if channel.tier.is_local])

    def keep_outside(self, entry: str, is_pinned: bool) -> int:
        """An image's records stay in the tiers of this machine, or no longer; returns of how many K, V are there."""
        return sum(channel.pin(entry, is_pinned) for channel in self.channels if channel.tier.is_local)

    def is_owner(self, owner: str, entry: str) -> bool:
        """Whether an entry key, of which something is known, was made under the owner's salt."""
        if super().is_owner(owner, entry):
            return True
        self.look([entry])
        found = [one for _, one in _outside(self.channels, entry, self.ages.oldest()).values()]
        return bool(found) and all(one.meta.owner == owner for one in found)

    def flush(self) -> None:
        """Waits until everything published so far is kept in every tier of this machine."""
        for channel in self.channels:
            if channel.tier.is_local:
                channel.flush()

    def clear(self) -> None:
        """Forgets every record in host memory, alias and request. Counters go on."""
        with self._lock:
            super().clear()
            for memory in (self.pictures, self.described, self.refusals, self.requests, self.shared):
                memory.clear()

    def stats(self) -> CacheStats:
        """Counters, and what is kept now."""
        return replace(super().stats(), tiers={channel.tier.label: channel.stats() for channel in self.channels})

    def close(self) -> None:
        """What was published is kept, what is being loaded is given up."""
        with self._moving:
            self._is_closing = True
            loading = list(self._loading.values())
        for record, *_ in loading:
            self.withdraw(record)
        for channel in self.channels:
            channel.close()

    # Loading.

    def give_up_late(self) -> None:
        """Who waits for a record that is late computes instead."""
        now = self._steady()
        with self._moving:
            late = [load for load in self._loading.values() if now >= load.until(self.config.timeout)]
        for record, channel, _, _ in late:
            if not record.is_settled:
                channel.late()
                self.withdraw(record, Why.timeout)

    def _place(self, channel: Channel, found: Found) -> Record | None:
        """The place of a record that is to come; None: it does not."""
        meta = found.meta
        with self._moving:
            if self._is_closing or self.tier.get(meta.name) is not None:  # another request has begun it
                return None
            if not channel.is_worth_a_try():
                return None
            if (room := _with_room(meta, self._room)) is None:
                return None
            [record] = self.reserve([room], source=channel.tier.label)
            if record is not None:
                record.written = found.written
            return record

    def _start(self, channel: Channel, meta: Meta, record: Record) -> None:
        """Begins to load a record."""
        together = self._together if meta.context is not None else None
        filling = PendingWrite(self, channel.tier, meta, record, together)
        with self._moving:
            try:
                future = channel.load(functools.partial(self._load, channel, filling))
            except RuntimeError:  # it was closed meanwhile
                self.withdraw(record)
                return
            self._loading[future] = _Load(record, channel, self._steady(), self._limit(meta))
            if self._ticking is None:
                self._ticking = threading.Thread(target=self._tick, name="vlcache-late", daemon=True)
                self._ticking.start()
        future.add_done_callback(self._has_ended)

    def _has_ended(self, future: Future[None]) -> None:
        with self._moving:
            load = self._loading.pop(future, None)
        if load is not None and future.exception() is not None:  # the threads were shut down between two turns
            self.withdraw(load.record)

    def _tick(self) -> None:
        while True:
            time.sleep(_TICK)
            self.give_up_late()
            with self._moving:
                if not self._loading:
                    self._ticking = None
                    return

    def _load(self, channel: Channel, filling: PendingWrite) -> bool:
        """Goes on loading a record; whether it is to go on behind others."""
        record, meta, has_more = filling.record, filling.meta, False
        try:
            with self.meter.timing(channel.tier.label, "read"):
                has_more = filling.read(lambda: channel.is_busy)
                channel.note_progress()
        except Exception as error:  # whatever it was, the answer does not depend on it
            channel.fault(error)
            channel.looks.forget(meta.entry)
            if isinstance(error, DamagedError):
                channel.delete(meta.name)
                self.withdraw(record, Why.corrupt)
        else:
            if record.is_ready:
                channel.loaded(record)
                faster = self.channels[: self.channels.index(channel)]
                self._keep(record, [one for one in faster if one.tier.is_local])
            elif record.state == Lost(Why.not_finite):  # it is gone
                channel.looks.forget(meta.entry)
        finally:
            if not has_more:
                self.withdraw(record)  # unless it is settled by now
        return has_more


def _wanted(
    store: Store,
    entry: str,
    context: str,
    approximate: bool,
    outside: Callable[[], dict[str, tuple[Channel, Found]]],
) -> dict[str, tuple[Channel, Found]]:
    """What a request wants of an image that host memory lacks, by name.

    Args:
      outside: gives what the other tiers have.
    """
    kv = store.tier.get(name := f"kv/{entry}/{context}")
    known = None if kv is None else kv.meta
    wanted: dict[str, tuple[Channel, Found]] = {}
    there: dict[str, tuple[Channel, Found]] | None = None
    if known is None:
        there = outside()
        if name in there and store.is_of_use(there[name][1].meta, approximate):
            wanted[name] = there[name]
        elif approximate and not store.has_variants(entry):
            wanted |= _variant(there)
        known = next((found.meta for _, found in wanted.values()), None)
    computes = known is None or known.name != name or not known.is_exact  # some rows, from the encoder's
    if computes and store.tier.get(name := f"enc/{entry}") is None:
        there = outside() if there is None else there
        if name in there:
            wanted[name] = there[name]
    return wanted


def _with_room(meta: Meta, room: Callable[[int], int]) -> Meta | None:
    """The same, padded and still to be filled; None: it is larger than the images that this engine takes."""
    try:
        return replace(meta.with_room(room(meta.tokens)), checksums=())
    except ValueError:
        return None


def _outside(
    channels: Sequence[Channel], entry: str, oldest: float | None, grid: Grid | None = None, owner: str | None = None
) -> dict[str, tuple[Channel, Found]]:
    """The records of an image outside host memory, each in the fastest tier that has it, the newest last; but none that
    were written before `oldest`, and none that this engine would not have written so."""
    there: dict[str, tuple[Channel, Found]] = {}
    for channel in channels:
        for one in channel.looks.found(entry, grid, owner):
            if one.meta.name not in there and (oldest is None or one.written >= oldest):
                there[one.meta.name] = channel, one
    return there


class PendingWrite:
    """Fills a record that has its place, until nobody wants it any more, and publishes it. One that is not finite is
    deleted, or what is computed in its place would not be written.

    Args:
      store: publishes it.
      tier: has it.
      meta: as the tier says it.
      together: parts that are read before others may come first; None: all.
    """

    def __init__(self, store: Records, tier: Tier, meta: Meta, record: Record, together: int | None = None):
        self.meta, self.record = meta, record
        self._store, self._tier = store, tier
        self._together = together or len(meta.parts)
        self._missing, self._places = set(meta.parts), record.parts
        self._whole = replace(record.meta, checksums=meta.checksums)
        self._is_finite = True

    def read(self, is_busy: Callable[[], bool] = lambda: False) -> bool:
        """Reads all parts that are left, or only some where others wait; whether there are more.

        Raises:
          TierError, or whatever the tier raises: it is not filled.
        """
        parts, makes_way = [part for part in self.meta.parts if part in self._missing], False
        with ThreadPoolExecutor(1, "vlcache-check") as checker:  # one part is checked while the next one comes
            checks: deque[Future[None]] = deque()
            given = self._tier.read(self.meta, parts, self._places.__getitem__)
            for count, (part, planes) in enumerate(given, 1):
                checks.append(checker.submit(self._check, part, planes))
                if len(checks) > _UNCHECKED:
                    checks.popleft().result()
                if self.record.is_settled:
                    return False
                makes_way = count % self._together == 0 and count < len(parts) and is_busy()
                if makes_way or not self._is_finite:
                    break
            for left in checks:
                left.result()
        if not self._is_finite:
            try:
                self._tier.delete(self.meta.name)
            finally:
                self._store.withdraw(self.record, Why.not_finite)
        if self.record.is_settled:
            return False
        if makes_way:
            return True
        if self._missing:
            raise TierError(f"{self.meta.name}: {self._missing} did not come")
        self._store.publish(self.record, self.meta.checksums)
        return False

    def _check(self, part: Part, planes: Planes) -> None:
        place = self._places[part]
        if verified(self._whole, part, planes) is not place:
            for own, plane in zip(place, planes, strict=True):
                own[:] = plane
        number = self.meta.parts.index(part)
        if not self.record.is_finite(slice(number, number + 1)):  # it may be linked from here on
            self._is_finite = False
            return
        self._missing.discard(part)
        first = next((i for i, one in enumerate(self.meta.parts) if one in self._missing), len(self.meta.parts))
        self.record.arrive(first)


def _variant(there: dict[str, tuple[Channel, Found]]) -> dict[str, tuple[Channel, Found]]:
    """K, V of an image in any context: of the canonical ones the newest, if there is one."""
    usable = {name: place for name, place in there.items() if place[1].meta.context is not None}
    canonical = [name for name, (_, found) in usable.items() if found.meta.canonical]
    newest = (canonical or list(usable))[-1:]
    return {name: usable[name] for name in newest}
