"""Records move between host memory and the tiers outside it, in the background.

What a request looks up and host memory lacks gets its place there at once, and comes part by part. What has been filled
is written to every tier. A fault of a tier is counted, and the request computes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import numpy.typing as npt

from vlcache_jax.cache.bounded import Bounded
from vlcache_jax.cache.channel import Channel
from vlcache_jax.cache.meter import Meter, TierStats
from vlcache_jax.cache.record import Lost, Meta, Part, Record, Why
from vlcache_jax.cache.store import Outside, Store
from vlcache_jax.cache.tier import DamagedError, Found, Tier, TierError, verified

_log = logging.getLogger(__name__)

_SIGHTED = 65536  # images that are remembered for `CacheConfig.admit`
_LOOK = 1.0  # seconds that a request waits at most to hear what a tier elsewhere has
_TICK = 0.05  # seconds between two looks at what is late
_UNCHECKED = 2  # parts that may have come and not be checked


class _Load(NamedTuple):
    """A record that is being loaded.

    Attributes:
      begun: by the clock of `Movement`.
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


class Movement(Outside):
    """Between a store and the tiers outside host memory.

    Args:
      store: whose records they are.
      tiers: the fastest first; may be none.
      room: for how many tokens records of so many have room in memory.
      limit: seconds that a record may take to come; who needs it computes then.
      clock: seconds that only grow.
    """

    def __init__(
        self,
        store: Store,
        tiers: Sequence[Tier],
        room: Callable[[int], int],
        *,
        limit: Callable[[Meta], float] = lambda meta: 30.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._store, self._room, self._limit, self._clock = store, room, limit, clock
        self._patience = _LOOK if store.config.timeout is None else min(_LOOK, store.config.timeout)
        self.meter = Meter()
        most = store.tier.capacity // 2
        self.channels = [Channel(tier, self.meter, clock=clock, ages=store.ages, most=most) for tier in tiers]
        self._sighted = Bounded[bool](_SIGHTED)  # images; whether more than once
        self._loading: dict[Future[None], _Load] = {}
        self._lock = threading.Lock()
        self._ticking: threading.Thread | None = None
        self._is_closing = False
        if tiers:
            store.outside = self

    # What a request needs.

    def look(self, entries: Sequence[str]) -> None:
        """Asks the tiers that are not on this machine for images, before their requests are planned."""
        asked = [(channel, channel.ask(entries)) for channel in self.channels]
        until = time.perf_counter() + self._patience
        for channel, looking in asked:
            # Of what is in memory, the others have little more; what they say is for the next time.
            needed = {entry: future for entry, future in looking.items() if not self._store.has_variants(entry)}
            channel.hear(needed, max(0.0, until - time.perf_counter()))

    def bring_in(self, entry: str, context: str, *, approximate: bool) -> dict[str, str]:
        """Begins to load what is kept of an image, and is not in host memory.

        Args:
          entry, context, approximate: as in `Store.lookup`, which finds the records from now on.

        Returns:
          Names of the records that come, and the label of the tier that each comes from.
        """
        if not self.channels:
            return {}
        self._sight(entry)
        kv = self._store.tier.get(name := f"kv/{entry}/{context}")
        known = None if kv is None else kv.meta
        wanted: dict[str, tuple[Channel, Found]] = {}
        there: dict[str, tuple[Channel, Found]] | None = None
        if known is None:
            there = self._find(entry)
            if name in there and self._is_of_use(there[name][1].meta, approximate):
                wanted[name] = there[name]
            elif approximate and not self._store.has_variants(entry):
                wanted |= _variant(there)
            known = next((found.meta for _, found in wanted.values()), None)
        computes = known is None or known.name != name or not known.is_exact  # some rows, from the encoder's
        if computes and self._store.tier.get(name := f"enc/{entry}") is None:
            there = self._find(entry) if there is None else there
            if name in there:
                wanted[name] = there[name]
        self._touch({f"kv/{entry}/{context}", f"enc/{entry}"} - wanted.keys())
        return {name: channel.tier.label for name, (channel, found) in wanted.items() if self._begin(channel, found)}

    def _is_of_use(self, meta: Meta, approximate: bool) -> bool:
        """Whether `Store.lookup` in the context of K, V would take them."""
        prefers_another = not meta.canonical and self._store.has_variants(meta.entry, canonical=True)
        return meta.is_exact or (approximate and not prefers_another)

    def has_rows(self, entry: str) -> bool:
        """Whether some tier has an image's encoder rows."""
        return f"enc/{entry}" in self._find(entry)

    def wait(self) -> None:
        """Until all that has been begun to load is there, or is known not to come."""
        with self._lock:
            loading = list(self._loading.values())
        for record, *_ in loading:
            record.wait()

    # What a request has computed.

    def published(self, record: Record) -> None:
        """Begins to write a record that has been filled to every tier that admits it."""
        if record.source is None and (self._store.config.admit == "always" or self._sighted.get(record.meta.entry)):
            self._keep(record, self.channels)

    def _keep(self, record: Record, channels: Sequence[Channel]) -> None:
        for channel in (channel for channel in channels if not channel.tier.is_read_only):
            self._store.hold(record, 1, to_write=True)
            channel.keep(record, lambda: self._store.hold(record, -1, to_write=True))

    def _sight(self, entry: str) -> None:
        """An image is asked for. Records that wait for its second time are written now."""
        if self._store.config.admit == "always":
            return
        times = self._sighted.get(entry)
        self._sighted.put(entry, times is not None)
        if times is False:
            for record in self._store.records(entry):
                self.published(record)

    # What users do.

    def delete(self, entry: str, pinned: Collection[str] = ()) -> set[str]:
        """Removes an image's records from every tier, but not what is pinned there, and some names; returns those that
        it removed."""
        names: set[str] = set()
        self._sighted.pop(entry)  # it has not been asked for yet
        for channel in (channel for channel in self.channels if not channel.tier.is_read_only):
            there = channel.to_write(entry)  # or written by the time of the look
            channel.forget(entry)
            channel.hear(channel.ask([entry]), self._patience)
            there |= {one.meta.name for one in channel.found(entry)}
            for name in sorted(there.difference(pinned, channel.pinned(entry))):
                if channel.delete(name):
                    names.add(name)
            channel.forget(entry)
        return names

    def pin(self, entry: str, is_pinned: bool) -> None:
        """An image's records stay in the tiers of this machine, or no longer."""
        for channel in self.channels:
            for one in channel.found(entry) if channel.tier.is_local else ():
                try:
                    channel.tier.pin(one.meta.name, is_pinned)
                except Exception as error:
                    channel.fault(error)

    def is_owner(self, owner: str, entry: str) -> bool:
        """Whether a tier has records of an entry key that was made under the owner's salt."""
        self.look([entry])
        found = [one for _, one in self._find(entry).values()]
        return bool(found) and all(one.meta.owner == owner for one in found)

    def flush(self) -> None:
        """Waits until everything published so far is kept in every tier of this machine."""
        for channel in self.channels:
            if channel.tier.is_local:
                channel.flush()

    def stats(self) -> dict[str, TierStats]:
        """Of each tier, by its label."""
        return {channel.tier.label: channel.stats() for channel in self.channels}

    def close(self) -> None:
        """What was published is kept, what is being loaded is given up."""
        with self._lock:
            self._is_closing = True
            loading = list(self._loading.values())
        for record, *_ in loading:
            self._store.withdraw(record)
        for channel in self.channels:
            channel.close()

    # Loading.

    def give_up_late(self) -> None:
        """Who waits for a record that is late computes instead."""
        now = self._clock()
        with self._lock:
            late = [load for load in self._loading.values() if now >= load.until(self._store.config.timeout)]
        for record, channel, _, _ in late:
            if not record.is_settled:
                channel.late()
                self._store.withdraw(record, Why.timeout)

    def _find(self, entry: str) -> dict[str, tuple[Channel, Found]]:
        """The records of an image outside host memory, each in the fastest tier that has it, the newest last."""
        there: dict[str, tuple[Channel, Found]] = {}
        oldest = self._store.ages.oldest()
        for channel in self.channels:
            for one in channel.found(entry):
                if one.meta.name not in there and (oldest is None or one.written >= oldest):
                    there[one.meta.name] = channel, one
        return there

    def _touch(self, names: Collection[str]) -> None:
        """Records are used in host memory, and should not leave the disk as if nobody had."""
        here = [name for name in names if self._store.tier.get(name) is not None]
        for channel in self.channels if here else ():
            channel.tier.touch(here)

    def _begin(self, channel: Channel, found: Found) -> bool:
        meta = found.meta
        with self._lock:
            if self._is_closing or self._store.tier.get(meta.name) is not None:  # another request has begun it
                return False
            if not channel.is_worth_a_try():
                return False
            room = replace(meta.with_room(self._room(meta.tokens)), checksums=())
            [record] = self._store.reserve([room], source=channel.tier.label)
            if record is None:
                return False
            record.written = found.written
            try:
                future = channel.load(lambda: self._load(channel, meta, record))
            except RuntimeError:  # it was closed meanwhile
                self._store.withdraw(record)
                return False
            self._loading[future] = _Load(record, channel, self._clock(), self._limit(meta))
            if self._ticking is None:
                self._ticking = threading.Thread(target=self._tick, name="vlcache-late", daemon=True)
                self._ticking.start()
        future.add_done_callback(self._has_ended)
        return True

    def _has_ended(self, future: Future[None]) -> None:
        with self._lock:
            self._loading.pop(future, None)

    def _tick(self) -> None:
        while True:
            time.sleep(_TICK)
            self.give_up_late()
            with self._lock:
                if not self._loading:
                    self._ticking = None
                    return

    def _load(self, channel: Channel, meta: Meta, record: Record) -> None:
        try:
            with self.meter.timing(channel.tier.label, "read"):
                fill(self._store, channel.tier, meta, record)
        except Exception as error:  # whatever it was, the answer does not depend on it
            channel.fault(error)
            channel.forget(meta.entry)
            if isinstance(error, DamagedError):
                channel.delete(meta.name)
                self._store.withdraw(record, Why.corrupt)
        else:
            if record.is_ready:
                channel.loaded(record)
                faster = self.channels[: self.channels.index(channel)]
                self._keep(record, [one for one in faster if one.tier.is_local])
            elif record.state == Lost(Why.not_finite):  # it is gone
                channel.forget(meta.entry)
        finally:
            self._store.withdraw(record)  # unless it is settled by now


def fill(store: Store, tier: Tier, meta: Meta, record: Record) -> None:
    """Fills a record that has its place, until nobody wants it any more, and publishes it. One that is not finite is
    deleted, or what is computed in its place would not be written.

    Args:
      meta: as the tier says it.

    Raises:
      TierError, or whatever the tier raises: it is not filled.
    """
    missing = set(meta.parts)
    whole = replace(record.meta, checksums=meta.checksums)
    places = dict(zip(meta.parts, record.data, strict=True))

    is_finite = True

    def check(part: Part, array: npt.NDArray[Any]) -> None:
        nonlocal is_finite
        if verified(whole, part, array) is not places[part]:
            places[part][:] = array
        number = meta.parts.index(part)
        if not record.is_finite(slice(number, number + 1)):  # it may be linked from here on
            is_finite = False
            return
        missing.discard(part)
        record.arrive(next((i for i, one in enumerate(meta.parts) if one in missing), len(meta.parts)))

    with ThreadPoolExecutor(1, "vlcache-check") as checker:  # one part is checked while the next one comes
        checks: deque[Future[None]] = deque()
        for part, array in tier.read(meta, meta.parts, places.__getitem__):
            checks.append(checker.submit(check, part, array))
            if len(checks) > _UNCHECKED:
                checks.popleft().result()
            if record.is_settled:
                return
            if not is_finite:
                break
        for left in checks:
            left.result()
    if not is_finite:
        try:
            tier.delete(meta.name)
        finally:
            store.withdraw(record, Why.not_finite)
    if record.is_settled:
        return
    if missing:
        raise TierError(f"{meta.name}: {missing} did not come")
    store.publish(record, meta.checksums)


def _variant(there: dict[str, tuple[Channel, Found]]) -> dict[str, tuple[Channel, Found]]:
    """K, V of an image in any context: of the canonical ones the newest, if there is one."""
    usable = {name: place for name, place in there.items() if place[1].meta.context is not None}
    canonical = [name for name, (_, found) in usable.items() if found.meta.canonical]
    newest = (canonical or list(usable))[-1:]
    return {name: usable[name] for name in newest}
