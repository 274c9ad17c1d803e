"""Owner of the cache's state: known images, and their records in host memory and other tiers.

Records move between host memory and the tiers in the background. A lookup reserves memory for records that host memory
lacks, and they load part by part. Filled records are written to every tier. A fault of a tier is counted, and the
request computes.
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
    Buffers,
    DamagedError,
    Donors,
    Found,
    Lost,
    Meta,
    Part,
    Record,
    Tier,
    TierError,
    Why,
    verified,
)
from vlcache_jax.cache.records import Handle, Records
from vlcache_jax.inputs.processor import Grid

_log = logging.getLogger(__name__)

_REFUSED = 4096  # files that are not images
_DESCRIBED = 16384  # images with their limits, half a kilobyte each
_LOOK = 1.0  # maximum wait of a request for lookups in remote tiers, in seconds
_LOOK_HERE = 10.0  # maximum wait for lookups in tiers of this machine, unless `timeout` is set
_TICK = 0.05  # seconds between checks for late loads
_UNCHECKED = 2  # parts that may be loaded but not checked yet


@dataclass(frozen=True)
class ImageKey:
    """Identity of an image: content key, and size in pixels."""

    content: str
    height: int
    width: int


class _Load(NamedTuple):
    """Record that is being loaded.

    Attributes:
      record: the record.
      channel: channel of its tier.
      begun: start by the steady clock, in seconds.
      limit: time limit in seconds.
    """

    record: Record
    channel: Channel
    begun: float
    limit: float

    def until(self, timeout: float | None) -> float:
        """Return the time at which it is late. Its own limit restarts with every progress of the channel.

        Otherwise the later ones of several loads would all be given up and computed.
        """
        if timeout is not None:
            return self.begun + timeout
        return max(self.begun, self.channel.progressed) + self.limit


class Store(Records):
    """Cache of images. Methods may be called from any thread.

    Args:
      config: sizes and rules.
      tiers: tiers outside host memory, fastest first; may be empty.
      shares: quotas in host memory and on disk, each; None: those of the configuration.
      room: returns the padded number of tokens of a record.
      limit: time limit for loading a record in seconds; requests compute afterwards.
      forgotten: called with every record that leaves host memory.
      expired: called with the entry key of every image older than `ttl`.
      form: form of the records that this engine writes; found records of another form are damaged.
      together: layers of a record that are loaded before other records take a turn; None: all.
      clock, steady: return seconds since the epoch, and monotonic seconds.

    Attributes:
      image_keys: keys of images, by alias.
      described: data derived from an image, by alias and pixel limits; cleared with the aliases.
      refusals: reason by alias why a file is not an image.
      requests: lists of images that were sent together.
      shared: entry keys of images that an operator shares, by the entry keys without a salt.
      channels: channels of the tiers.
      meter, donors_made: counters of the tiers; see `CacheStats`.
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
        self.image_keys = Bounded[ImageKey](REMEMBERED)
        self.described = Bounded[Any](_DESCRIBED)
        self.refusals = Bounded[str](_REFUSED)
        self.requests = RememberedRequests()
        self.shared = Bounded[str](REMEMBERED)
        self._room, self._limit, self._expired, self._steady = room, limit, expired, steady
        self._patience = _LOOK if config.timeout is None else min(_LOOK, config.timeout)
        self.meter, self.donors_made = Meter(), 0
        make = functools.partial(
            Channel, meter=self.meter, clock=steady, ages=self.ages, form=form,
            max_queued_bytes=self.tier.capacity // 2,
            patience=_LOOK_HERE if config.timeout is None else config.timeout, damaged=self.found_damaged,
        )  # fmt: skip
        self.channels = [make(tier) for tier in tiers]
        self._sighted = Bounded[bool](REMEMBERED)  # by entry key; True if requested more than once
        self._loading: dict[Future[None], _Load] = {}
        self._moving, self._is_closing = threading.Lock(), False
        self._ticking: threading.Thread | None = None

    # For requests.

    def look(self, entries: Sequence[str]) -> None:
        """Look images up in remote tiers before their requests are planned."""
        lookups = [(channel, channel.looks.ask(entries)) for channel in self.channels]
        until = time.perf_counter() + self._patience
        for channel, looking in lookups:
            # Do not wait for images in host memory. The results for them count next time.
            needed = {entry: future for entry, future in looking.items() if not self.variants(entry)}
            channel.looks.hear(needed, max(0.0, until - time.perf_counter()))

    def lookup(
        self, entry: str, context: str, *, grid: Grid | None, donors: Donors | None, owner: str | None = None,
        waits: bool = False,
    ) -> Handle:  # fmt: skip
        """Find and pin the records of an image, and start loading those that host memory lacks.

        Args:
          entry: entry key of the image.
          context: digest of its prefix.
          grid: patch grid of the image, which its records must have; None: unknown.
          donors: contexts from which KV is also accepted; None: only KV of this context.
          owner: owner of the records, see `Meta`; None: unknown.
          waits: wait for records that are loading.
        """
        coming = self._bring_in(entry, context, donors, grid, owner) if self.channels else {}
        try:
            if waits:
                self.wait()
            self.expire_old(entry)
            handle = self.find(entry, context, grid=grid, donors=donors)
        finally:
            if coming:
                self.pin([*coming], -1)
        handle.brought = {record.meta.name: label for record, label in coming.items()}
        return _explained(handle, entry, self.channels)

    def _bring_in(
        self, entry: str, context: str, donors: Donors | None, grid: Grid | None, owner: str | None
    ) -> dict[Record, str]:
        """Start loading an image's records that host memory lacks; return them pinned, with labels of their tiers."""
        self._sight(entry)
        wanted = _wanted(
            self, entry, context, donors, lambda: _outside(self.channels, entry, self.ages.oldest(), grid, owner)
        )
        # Uses in host memory count on the disk, too, so that these records are not evicted there.
        names = {f"kv/{entry}/{context}", f"enc/{entry}"} - wanted.keys()
        here = [name for name in names if self.tier.get(name) is not None]
        for channel in self.channels if here else ():
            channel.tier.touch(here)
        begun = [(channel, found, self._place(channel, found)) for channel, found in wanted.values()]
        coming = {record: (channel, found.meta) for channel, found, record in begun if record is not None}
        self.pin([*coming], 1)  # so that they are not dropped before they are found
        for record, (channel, meta) in coming.items():
            self._start(channel, meta, record)
        return {record: channel.tier.label for record, (channel, _) in coming.items()}

    def expire_old(self, entry: str) -> None:
        """Remove the records of an image if it is older than `ttl`."""
        if self.config.ttl is not None and self.ages.end(entry):
            self.expire(entry)
            self._expired(entry)

    def knows(self, entry: str) -> bool:
        """Return whether any record of an image is here, being filled, or in another tier."""
        with self._lock:
            is_here = entry in self._variants or self.tier.get(f"enc/{entry}") is not None
        return is_here or f"enc/{entry}" in _outside(self.channels, entry, self.ages.oldest())

    def wait(self) -> None:
        """Wait until all records that are being loaded are filled or lost."""
        with self._moving:
            loading = list(self._loading.values())
        for record, *_ in loading:
            record.wait()

    # After a request.

    def published(self, record: Record) -> None:
        """Start writing a filled record to every tier that admits it."""
        if record.source is None and (self.config.admit == "always" or self._sighted.get(record.meta.entry)):
            self._keep(record, self.channels)

    def _keep(self, record: Record, channels: Sequence[Channel]) -> None:
        for channel in (channel for channel in channels if not channel.tier.is_read_only):
            self.hold([record], 1, to_write=True)
            channel.keep(record, lambda: self.hold([record], -1, to_write=True))

    def _sight(self, entry: str) -> None:
        """Note a request for an image, and at the second one write its records that wait for it."""
        if self.config.admit == "always":
            return
        times = self._sighted.get(entry)
        self._sighted.put(entry, times is not None)
        if times is False:
            for record in self.records(entry):
                self.published(record)

    # For users.

    def delete(self, entry: str, pinned: Collection[str] = ()) -> set[str]:
        """Delete an image's records in all tiers, except pinned ones and those in `pinned`; return their names."""
        names: set[str] = set()
        self._sighted.pop(entry)  # the next request counts as the first
        for channel in (channel for channel in self.channels if not channel.tier.is_read_only):
            there = channel.to_write(entry)  # possibly written by the time of the lookup
            channel.looks.forget(entry)
            channel.looks.hear(channel.looks.ask([entry]), self._patience)
            names |= channel.delete_all(entry, there, pinned)
        return names

    def write_out(self, entry: str) -> None:
        """Start writing an image's records to the tiers of this machine, even if it was requested only once."""
        for record in self.records(entry) if self.config.admit != "always" else ():
            if record.source is None:
                self._keep(record, [channel for channel in self.channels if channel.tier.is_local])

    def keep_outside(self, entry: str, is_pinned: bool) -> list[str]:
        """Pin or unpin an image's records in the tiers of this machine; return their names."""
        return [name for channel in self.channels if channel.tier.is_local for name in channel.pin(entry, is_pinned)]

    def is_owner(self, owner: str, entry: str) -> bool:
        """Return whether a known entry key was made with the owner's salt, also by records in other tiers."""
        if super().is_owner(owner, entry):
            return True
        self.look([entry])
        found = [one for _, one in _outside(self.channels, entry, self.ages.oldest()).values()]
        return bool(found) and all(one.meta.owner == owner for one in found)

    def flush(self) -> None:
        """Wait until all published records are written to every tier of this machine."""
        for channel in self.channels:
            if channel.tier.is_local:
                channel.flush()

    def clear(self) -> None:
        """Remove every record in host memory, alias and request. Counters continue."""
        with self._lock:
            super().clear()
            for memory in (self.image_keys, self.described, self.refusals, self.requests, self.shared):
                memory.clear()

    def stats(self) -> CacheStats:
        """Return the counters and the current contents."""
        tiers = {channel.tier.label: channel.stats() for channel in self.channels}
        return replace(super().stats(), donors_made=self.donors_made, tiers=tiers)

    def close(self) -> None:
        """Write published records, cancel loads, and close the tiers."""
        with self._moving:
            self._is_closing = True
            loading = list(self._loading.values())
        for record, *_ in loading:
            self.withdraw(record)
        for channel in self.channels:
            channel.close()

    # Loading.

    def give_up_late(self) -> None:
        """Withdraw the records that are late. Requests that wait for them compute instead."""
        now = self._steady()
        with self._moving:
            late = [load for load in self._loading.values() if now >= load.until(self.config.timeout)]
        for record, channel, _, _ in late:
            if not record.is_settled:
                channel.late()
                self.withdraw(record, Why.timeout)

    def _place(self, channel: Channel, found: Found) -> Record | None:
        """Reserve a record to load; None: it is not loaded."""
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
        """Start loading a record."""
        together = self._together if meta.context is not None else None
        filling = PendingWrite(self, channel.tier, meta, record, together)
        with self._moving:
            try:
                future = channel.load(functools.partial(self._load, channel, filling))
            except RuntimeError:  # closed in the meantime
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
        if load is not None and future.exception() is not None:  # the threads were shut down
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
        """Load parts of a record; return whether to continue after other records."""
        record, meta, has_more = filling.record, filling.meta, False
        try:
            with self.meter.timing(channel.tier.label, "read"):
                has_more = filling.read(lambda: channel.is_busy)
                channel.note_progress()
        except Exception as error:  # no output depends on it
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
            elif record.state == Lost(Why.not_finite):  # deleted
                channel.looks.forget(meta.entry)
        finally:
            if not has_more:
                self.withdraw(record)  # does nothing if it is settled
        return has_more


def _wanted(
    store: Store,
    entry: str,
    context: str,
    donors: Donors | None,
    outside: Callable[[], dict[str, tuple[Channel, Found]]],
) -> dict[str, tuple[Channel, Found]]:
    """Return the records of an image that a request needs and host memory lacks, by name.

    Args:
      outside: returns the records in the other tiers.
    """
    kv = store.tier.get(name := f"kv/{entry}/{context}")
    known = None if kv is None else kv.meta
    wanted: dict[str, tuple[Channel, Found]] = {}
    there: dict[str, tuple[Channel, Found]] | None = None
    if known is None:
        there = outside()
        variants = store.variants(entry)
        if name in there and _is_of_use(there[name][1].meta, donors, variants):
            wanted[name] = there[name]
        elif donors is not None:
            wanted |= _better_donor(donors, variants, there)
        known = next((found.meta for _, found in wanted.values()), None)
    computes = known is None or known.name != name or not known.is_exact  # some tokens, from encoder output
    if computes and store.tier.get(name := f"enc/{entry}") is None:
        there = outside() if there is None else there
        if name in there:
            wanted[name] = there[name]
    return wanted


def _with_room(meta: Meta, room: Callable[[int], int]) -> Meta | None:
    """Return the description of a padded, unfilled record; None: it is larger than the images of this engine."""
    try:
        return replace(meta.with_room(room(meta.tokens)), checksums=())
    except ValueError:
        return None


def _explained(handle: Handle, entry: str, channels: Sequence[Channel]) -> Handle:
    """Return a handle that says whether other engines cached its image with maps of other tokens."""
    if handle.why is Why.unknown_image and any(channel.looks.has_others(entry) for channel in channels):
        handle.why = Why.other_policy
    return handle


def _outside(
    channels: Sequence[Channel], entry: str, oldest: float | None, grid: Grid | None = None, owner: str | None = None
) -> dict[str, tuple[Channel, Found]]:
    """Return an image's records outside host memory by name, newest last, each from the fastest tier that has it.

    Records written before `oldest`, and records that this engine would not have written, are left out.
    """
    there: dict[str, tuple[Channel, Found]] = {}
    for channel in channels:
        for one in channel.looks.found(entry, grid, owner):
            if one.meta.name not in there and (oldest is None or one.written >= oldest):
                there[one.meta.name] = channel, one
    return there


class PendingWrite:
    """Load of a reserved record, which is published at the end or given up when it is no longer wanted.

    A record that is not finite is deleted from its tier; otherwise the recomputed one would not be written.

    Args:
      store: store that publishes it.
      tier: tier that has it.
      meta: description of the stored record.
      record: record to fill.
      together: number of parts that are read before other records may take a turn; None: all.
    """

    def __init__(self, store: Records, tier: Tier, meta: Meta, record: Record, together: int | None = None):
        self.meta, self.record = meta, record
        self._store, self._tier = store, tier
        self._together = together or len(meta.parts)
        self._missing, self._places = set(meta.parts), record.parts
        self._whole = replace(record.meta, checksums=meta.checksums)
        self._is_finite = True

    def read(self, is_busy: Callable[[], bool] = lambda: False) -> bool:
        """Read the missing parts, or only some of them if other records wait; return whether parts are left.

        Raises:
          TierError, or an error of the tier: the record cannot be filled.
        """
        parts, makes_way = [part for part in self.meta.parts if part in self._missing], False
        with ThreadPoolExecutor(1, "vlcache-check") as checker:  # checks one part while the next one is read
            checks: deque[Future[None]] = deque()
            given = self._tier.read(self.meta, parts, self._places.__getitem__)
            for count, (part, buffers) in enumerate(given, 1):
                checks.append(checker.submit(self._check, part, buffers))
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
            raise TierError(f"{self.meta.name}: parts {self._missing} are missing")
        self._store.publish(self.record, self.meta.checksums)
        return False

    def _check(self, part: Part, buffers: Buffers) -> None:
        place = self._places[part]
        if verified(self._whole, part, buffers) is not place:
            for own, buffer in zip(place, buffers, strict=True):
                own[:] = buffer
        number = self.meta.parts.index(part)
        if not self.record.is_finite(slice(number, number + 1)):  # before it can be loaded into the KV cache
            self._is_finite = False
            return
        self._missing.discard(part)
        first = next((i for i, one in enumerate(self.meta.parts) if one in self._missing), len(self.meta.parts))
        self.record.arrive(first)


def can_link(
    store: Store, entry: str, context: str, *, grid: Grid | None, donors: Donors, owner: str | None
) -> bool:  # fmt: skip
    """Return whether `Store.lookup` would find KV of an image, without loading it."""
    store.expire_old(entry)
    metas = [meta for meta in store.variants(entry) if grid in (None, meta.grid)]
    if not _serve(metas, context, donors) and store.channels:
        outside = _outside(store.channels, entry, store.ages.oldest(), grid, owner)
        metas = [found.meta for _, found in outside.values() if found.meta.context is not None]
    return _serve(metas, context, donors)


def _serve(metas: Sequence[Meta], context: str, donors: Donors) -> bool:
    """Return whether KV of an image can be linked in a context, exactly or from a donor."""
    return donors.best(metas) is not None or any(one.is_exact and one.context == context for one in metas)


def _is_of_use(meta: Meta, donors: Donors | None, variants: Sequence[Meta]) -> bool:
    """Return whether a lookup would return this KV in its own context, beside the KV that host memory has."""
    if meta.is_exact or donors is None:
        return meta.is_exact
    is_allowed = bool(meta.buffers) or donors.rank(meta) is not None
    return is_allowed and (meta.canonical or not any(one.canonical for one in variants))


def _better_donor(
    donors: Donors, here: Sequence[Meta], there: dict[str, tuple[Channel, Found]]
) -> dict[str, tuple[Channel, Found]]:
    """Return the best donor outside host memory, by its name, if it precedes all that are here."""
    outside = {name: place for name, place in there.items() if place[1].meta.context is not None}
    best, own = donors.best(found.meta for _, found in outside.values()), donors.best(here)
    if best is None or (own is not None and donors.best([best, own]) is own):
        return {}
    return {best.name: outside[best.name]}
