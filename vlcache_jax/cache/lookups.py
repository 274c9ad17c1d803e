"""Lookups in tiers outside host memory, within a time limit, and the counters of these tiers."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, Protocol, get_args

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vlcache_jax.cache.keys import REMEMBERED, Bounded
from vlcache_jax.cache.record import Found, Meta, Tier
from vlcache_jax.inputs.processor import Grid

Event = Literal[
    "found", "missing", "unasked", "loaded", "stored", "known", "skipped", "failed", "damaged", "gone", "late",
    "refused",
]  # fmt: skip
Direction = Literal["in", "out"]
_SECONDS = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


@dataclass(frozen=True)
class TierStats:
    """Counters of a tier since the engine started, and its current contents.

    Attributes:
      found, missing: lookups of images with and without records there.
      unasked: lookups and loads that were skipped because the tier is suspended after faults.
      loaded, stored: records read from and written to the tier.
      known: records that already existed when they were to be written.
      skipped: records not written because the queue or the tier was full, or the tier is suspended.
      failed: failed operations.
      damaged, gone, late: found records that were damaged, that no longer existed, or that exceeded the time limit.
      refused: refusals by a peer.
      bytes_in, bytes_out: bytes of loaded and stored records.
      records, bytes, capacity: current contents, for all users of the tier; 0 if unknown.
    """

    found: int = 0
    missing: int = 0
    unasked: int = 0
    loaded: int = 0
    stored: int = 0
    known: int = 0
    skipped: int = 0
    failed: int = 0
    damaged: int = 0
    gone: int = 0
    late: int = 0
    refused: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    records: int = 0
    bytes: int = 0
    capacity: int = 0


class Meter(Collector):
    """Counters of all tiers of an engine.

    Attributes:
      registry: registry of `prometheus_client`.
    """

    def __init__(self) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        self._lock = threading.Lock()
        self._events: Counter[tuple[str, Event]] = Counter()
        self._bytes: Counter[tuple[str, Direction]] = Counter()
        self._seconds = prometheus_client.Histogram(
            "vlcache_tier_seconds", "Duration of tier operations", ("tier", "operation"), registry=self.registry,
            buckets=_SECONDS,
        )  # fmt: skip
        self.registry.register(self)

    def count(self, tier: str, event: Event, times: int = 1) -> None:
        with self._lock:
            self._events[tier, event] += times

    def move(self, tier: str, direction: Direction, size: int) -> None:
        """Add the bytes of a record that was read from a tier or written to it."""
        with self._lock:
            self._bytes[tier, direction] += size

    @contextlib.contextmanager
    def timing(self, tier: str, operation: Literal["find", "read", "write"]) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds.labels(tier, operation).observe(time.perf_counter() - start)

    def stats(self, tier: str, kept: Mapping[str, int]) -> TierStats:
        """Return the statistics of a tier.

        Args:
          tier: label of the tier.
          kept: current contents, see `Tier.counts`.
        """
        with self._lock:
            counts = {event: self._events[tier, event] for event in get_args(Event)}
            moved = {f"bytes_{direction}": self._bytes[tier, direction] for direction in get_args(Direction)}
        return TierStats(**counts, **moved, **kept)

    def describe(self) -> Iterator[Metric]:
        yield from ()

    def collect(self) -> Iterator[Metric]:
        """Yield the counters as metrics of `prometheus_client`."""
        events = CounterMetricFamily("vlcache_tier_events", "See TierStats", labels=("tier", "event"))
        moved = CounterMetricFamily(
            "vlcache_tier_bytes", "Bytes of records read and written", labels=("tier", "direction")
        )
        with self._lock:
            for counted, times in self._events.items():
                events.add_metric(counted, times)
            for way, size in self._bytes.items():
                moved.add_metric(way, size)
        yield from (events, moved)

    def also(self, stats: Callable[[], Any]) -> None:
        """Add gauges of a dataclass of numbers with `whys` and `tiers`, which `stats` returns at each scrape."""
        self.registry.register(_Statistics(stats))


class _Statistics(Collector):
    """Collector of numbers that are counted elsewhere."""

    def __init__(self, stats: Callable[[], Any]):
        self._stats = stats

    def describe(self) -> Iterator[Metric]:
        yield from ()

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for one in fields(stats):
            if isinstance(value := getattr(stats, one.name), int):
                yield GaugeMetricFamily(f"vlcache_{one.name}", "See CacheStats", value=value)
        whys = CounterMetricFamily("vlcache_whys", "Images not reused exactly, by reason", labels=("why",))
        for why, times in stats.whys.items():
            whys.add_metric((why,), times)
        yield whys
        for name in ("records", "bytes", "capacity"):
            kept = GaugeMetricFamily(f"vlcache_tier_kept_{name}", "Current contents of a tier", labels=("tier",))
            for tier, counted in stats.tiers.items():
                kept.add_metric((tier,), getattr(counted, name))
            yield kept


_KNOWN, _UNKNOWN = 60.0, 5.0  # seconds that a lookup remains valid, if it found something and if not
_LOOKUP_THREADS = 4

type Form = Callable[[Meta, Grid], Meta]
"""Function that returns the description of the record that this engine would write, without padding, with the name and
owner of a found record and the given grid. It raises ValueError if no image has that grid."""


def any_form(meta: Meta, grid: Grid) -> Meta:
    """Return the found record's own description with this grid, for use without a model."""
    return replace(meta, grid=grid)


def misfit(found: Meta, form: Form, grid: Grid | None, owner: str | None) -> str | None:
    """Compare a found record with the one that the engine would write; return the first difference or None.

    Args:
      found: description of the found record.
      form: form of the engine's records.
      grid, owner: grid and owner of the image; None: unknown, use those of the record.
    """
    try:
        ours = form(found, found.grid if grid is None else grid)
    except ValueError as error:
        return str(error)
    ours = replace(ours, owner=found.owner if owner is None else owner, checksums=found.checksums)
    for name in [one.name for one in fields(Meta)]:
        if (expected := getattr(ours, name)) != (got := getattr(found, name)):
            return f"{name} must be {expected!r:.80}, got {got!r:.80}"
    return None


def is_others(found: Meta, form: Form, grid: Grid | None, owner: str | None) -> bool:
    """Return whether a found record differs only by its states, as that of an engine with another reuse policy.

    Entry keys contain the dtype or codec of KV, but not the tokens that maps stand for (`Meta.codec` has both).
    """

    def same_states(meta: Meta, grid: Grid) -> Meta:
        ours = form(meta, grid)
        kv = 2 if ours.buffers else 1  # words of a codec or a dtype, which the tokens of maps may follow
        is_same = found.codec.split(" ")[:kv] == ours.codec.split(" ")[:kv]
        return replace(ours, codec=found.codec if is_same else ours.codec, states=found.states, maps=found.maps)

    return misfit(found, same_states, grid, owner) is None


def serves_as(found: Meta, ours: Meta) -> bool:
    """Return whether a found record can replace ours: same description, and canonical if ours is."""
    its, own = (replace(one.with_room(one.tokens), canonical=True, checksums=()) for one in (found, ours))
    return its == own and found.canonical >= ours.canonical


class _LookupResult(NamedTuple):
    """Time of a lookup, and the records that it found."""

    at: float
    found: list[Found]


class LookupChannel(Protocol):
    """Methods of `Channel` that `TierLookups` uses."""

    tier: Tier
    is_closing: bool

    def allows(self) -> bool: ...

    def find(self, entry: str, is_late: Callable[[], bool] = ...) -> list[Found]: ...

    def count(self, event: Event, times: int = 1) -> None: ...

    def late(self) -> None: ...

    def refuse(self, meta: Meta, why: str) -> None: ...


class TierLookups:
    """Lookups in one tier. They raise no exceptions.

    Args:
      channel: channel that looks up, counts, and deletes damaged records.
      threads: threads for lookups in a remote tier. A tier of this machine gets separate threads, which loads do not
        occupy.
      limit: time limit of a lookup in a tier of this machine, in seconds; later results count as not found.
      form: form of the engine's records.
      clock: returns monotonic seconds.
    """

    def __init__(
        self, channel: LookupChannel, threads: ThreadPoolExecutor, limit: float, form: Form, clock: Callable[[], float]
    ):
        self._channel, self._threads, self._limit, self._form, self._clock = channel, threads, limit, form, clock
        if channel.tier.is_local:
            self._threads = ThreadPoolExecutor(_LOOKUP_THREADS, f"vlcache-{channel.tier.label}-look")
        self._looks = Bounded[_LookupResult](REMEMBERED)
        self._others = Bounded[bool](REMEMBERED)
        self._stuck: set[Future[list[Found]]] = set()  # late lookups in a tier of this machine that still run

    def ask(self, entries: Iterable[str]) -> dict[str, Future[None]]:
        """Start lookups of images in a remote tier, except those with a recent result."""
        if self._channel.tier.is_local:
            return {}
        now = self._clock()
        wanted = [entry for entry in dict.fromkeys(entries) if not self._is_fresh(self._looks.get(entry), now)]
        if not wanted:
            return {}
        if self._channel.is_closing or not self._channel.allows():
            self._channel.count("unasked", len(wanted))
            return {}
        return {entry: self._threads.submit(self._find, entry) for entry in wanted}

    def hear(self, lookups: Mapping[str, Future[None]], patience: float) -> None:
        """Wait at most `patience` seconds for lookups. Later results count as not found."""
        wait(lookups.values(), patience)
        for entry, future in lookups.items():
            if not future.done():
                future.cancel()
                self._channel.late()
                self._looks.put(entry, _LookupResult(self._clock(), []))

    def found(self, entry: str, grid: Grid | None = None, owner: str | None = None) -> list[Found]:
        """Return the tier's records of an image, newest last; for a remote tier the result of the last lookup.

        A record that this engine would not have written for the image counts as damaged and is deleted, unless it is
        one of another engine's, see `is_others`.

        Args:
          entry: entry key of the image.
          grid, owner: grid and owner of the image; None: unknown.
        """
        ours, others = self._sorted(entry, grid, owner)
        if others:
            self._others.put(entry, True)
        else:
            self._others.pop(entry)
        return ours

    def all_names(self, entry: str) -> list[str]:
        """Return the names of all records of an image in the tier, also of other engines."""
        return [one.meta.name for one in itertools.chain(*self._sorted(entry, None, None))]

    def _sorted(self, entry: str, grid: Grid | None, owner: str | None) -> tuple[list[Found], list[Found]]:
        """Return an image's records for this engine, and those of others."""
        if self._channel.tier.is_local:
            there = self._here(entry)
        else:
            look = self._looks.get(entry)
            there = [] if look is None else look.found
        ours: list[Found] = []
        others: list[Found] = []
        for one in there:
            if (why := misfit(one.meta, self._form, grid, owner)) is None:
                ours.append(one)
            elif is_others(one.meta, self._form, grid, owner):
                others.append(one)
            else:
                self._channel.refuse(one.meta, why)
        return ours, others

    def has_others(self, entry: str) -> bool:
        """Return whether the last call of `found` passed over records of other engines."""
        return bool(self._others.get(entry))

    def forget(self, entry: str) -> None:
        """Discard the result of an image's last lookup, because records are gone."""
        self._looks.pop(entry)

    def outdate(self, entry: str) -> None:
        """Repeat an image's last lookup at the next request, because a record was written.

        Until then, its result is valid: requests for images in host memory do not wait for lookups.
        """
        if (look := self._looks.get(entry)) is not None:
            self._looks.put(entry, look._replace(at=-math.inf))

    def close(self) -> None:
        """Stop the lookups."""
        if self._channel.tier.is_local:
            self._threads.shutdown(cancel_futures=True)

    def _here(self, entry: str) -> list[Found]:
        """Look up in a tier of this machine within the limit. While one lookup is late, no other starts.

        A request makes several lookups, but waits at most once.
        """
        if self._stuck or self._channel.is_closing or not self._channel.allows():
            return []
        late = threading.Event()
        try:
            look = self._threads.submit(self._channel.find, entry, late.is_set)
        except RuntimeError:  # closed in the meantime
            return []
        try:
            return look.result(self._limit)
        except CancelledError:
            return []
        except TimeoutError:
            late.set()
            self._stuck.add(look)
            look.add_done_callback(self._stuck.discard)
            look.cancel()
            self._channel.late()
            return []

    def _find(self, entry: str) -> None:
        found = self._channel.find(entry)
        self._looks.put(entry, _LookupResult(self._clock(), found))

    def _is_fresh(self, look: _LookupResult | None, now: float) -> bool:
        return look is not None and now - look.at < (_KNOWN if look.found else _UNKNOWN)


@dataclass
class CacheStats:
    """Counters of the cache since the engine started, and its current contents.

    Attributes:
      hits_exact, hits_approximate: images whose KV was found in the same context; in another context, or coded.
      hits_neutral: images among `hits_approximate` with KV of a neutral context, see `CacheConfig.donors`.
      donors_made: images that were computed in a neutral context for a request, by themselves.
      misses: images whose KV was not found or could not be used.
      passed_over: images whose KV was found but computed nevertheless (`CacheConfig.load`).
      encoder_hits: images whose encoder output was found and used.
      stored, evicted: records stored in and evicted from host memory.
      refused: records that did not fit.
      clashes: lookups that found a record of another image.
      corrupt: damaged records.
      failed: records that could not be filled.
      not_finite: records with NaN or infinities, which were not stored.
      encoder_records, kv_records, pinned: current number of records.
      snapshot_records: current number of snapshots of states in host memory.
      pinned_bytes: bytes of records that users pin.
      bytes, capacity: used and available host memory in bytes.
      left_bytes: bytes of evicted records that requests in flight still read, in addition to `bytes`.
      device_records: KV records with a copy in the device tier.
      device_bytes, device_capacity: used and available memory of the device tier in bytes.
      expired: images older than `ttl`.
      whys: number of images not reused exactly, by reason (`Why`).
      tiers: statistics of each tier outside memory, by label: "disk", "remote", "peer".
    """

    hits_exact: int = 0
    hits_approximate: int = 0
    hits_neutral: int = 0
    donors_made: int = 0
    misses: int = 0
    passed_over: int = 0
    encoder_hits: int = 0
    stored: int = 0
    evicted: int = 0
    refused: int = 0
    clashes: int = 0
    corrupt: int = 0
    failed: int = 0
    not_finite: int = 0
    encoder_records: int = 0
    kv_records: int = 0
    snapshot_records: int = 0
    pinned: int = 0
    pinned_bytes: int = 0
    bytes: int = 0
    capacity: int = 0
    left_bytes: int = 0
    device_records: int = 0
    device_bytes: int = 0
    device_capacity: int = 0
    expired: int = 0
    whys: Mapping[str, int] = field(default_factory=dict)
    tiers: Mapping[str, TierStats] = field(default_factory=dict)

    @property
    def lookups(self) -> int:
        """Number of images that were looked up."""
        return self.hits_exact + self.hits_approximate + self.misses + self.passed_over
