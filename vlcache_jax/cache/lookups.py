"""Lookups in tiers outside host memory, within a time limit, and the counters of these tiers."""

from __future__ import annotations

import contextlib
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
    """A tier since the engine began, and what it keeps now.

    Attributes:
      found, missing: look-ups of images that had records there, and that had none.
      unasked: look-ups and loads that it was not asked for, as it had failed shortly before.
      loaded, stored: records that came from there, and that were written to it.
      known: records that were to be written and were there already.
      skipped: records that were not written, as too many waited for it, or it has no room, or it had failed shortly
        before.
      failed: times that it could not be read or written.
      damaged, gone, late: records that were found, but were not what was written; were not there any more; or came
        later than computing takes.
      refused: times that a peer refused.
      bytes_in, bytes_out: of records that were loaded and stored.
      records, bytes, capacity: what it keeps now, for all that use it; 0 where nobody knows.
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
    """Counts for all tiers of an engine.

    Attributes:
      registry: of `prometheus_client`.
    """

    def __init__(self) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        self._lock = threading.Lock()
        self._events: Counter[tuple[str, Event]] = Counter()
        self._bytes: Counter[tuple[str, Direction]] = Counter()
        self._seconds = prometheus_client.Histogram(
            "vlcache_tier_seconds", "Seconds that an operation took", ("tier", "operation"), registry=self.registry,
            buckets=_SECONDS,
        )  # fmt: skip
        self.registry.register(self)

    def count(self, tier: str, event: Event, times: int = 1) -> None:
        with self._lock:
            self._events[tier, event] += times

    def move(self, tier: str, direction: Direction, size: int) -> None:
        """Bytes of a record came from a tier, or went there."""
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
        """Of a tier.

        Args:
          kept: see `Tier.counts`.
        """
        with self._lock:
            counts = {event: self._events[tier, event] for event in get_args(Event)}
            moved = {f"bytes_{direction}": self._bytes[tier, direction] for direction in get_args(Direction)}
        return TierStats(**counts, **moved, **kept)

    def describe(self) -> Iterator[Metric]:
        yield from ()

    def collect(self) -> Iterator[Metric]:
        """What has been counted, as `prometheus_client` wants it."""
        events = CounterMetricFamily("vlcache_tier_events", "See TierStats", labels=("tier", "event"))
        moved = CounterMetricFamily("vlcache_tier_bytes", "Of records that came and went", labels=("tier", "direction"))
        with self._lock:
            for counted, times in self._events.items():
                events.add_metric(counted, times)
            for way, size in self._bytes.items():
                moved.add_metric(way, size)
        yield from (events, moved)

    def also(self, stats: Callable[[], Any]) -> None:
        """The registry tells these statistics, too: a dataclass of numbers, `whys` and `tiers`, as they are then."""
        self.registry.register(_Statistics(stats))


class _Statistics(Collector):
    """Numbers that are counted elsewhere."""

    def __init__(self, stats: Callable[[], Any]):
        self._stats = stats

    def describe(self) -> Iterator[Metric]:
        yield from ()

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for one in fields(stats):
            if isinstance(value := getattr(stats, one.name), int):
                yield GaugeMetricFamily(f"vlcache_{one.name}", "See CacheStats", value=value)
        whys = CounterMetricFamily(
            "vlcache_whys", "Images that were not linked as they were, by reason", labels=("why",)
        )
        for why, times in stats.whys.items():
            whys.add_metric((why,), times)
        yield whys
        for name in ("records", "bytes", "capacity"):
            kept = GaugeMetricFamily(f"vlcache_tier_kept_{name}", "What a tier keeps now", labels=("tier",))
            for tier, counted in stats.tiers.items():
                kept.add_metric((tier,), getattr(counted, name))
            yield kept


_KNOWN, _UNKNOWN = 60.0, 5.0  # seconds that such a look holds, where something was found and where nothing was
_LOOKERS = 4  # threads

type Form = Callable[[Meta, Grid], Meta]
"""Returns what the engine itself would write, without room for padding, under the name and owner of a found record, of
an image with this grid. Raises ValueError if no image has that grid."""


def any_form(meta: Meta, grid: Grid) -> Meta:
    """The form where no model says more: the record's own, with this grid."""
    return replace(meta, grid=grid)


def misfit(found: Meta, form: Form, grid: Grid | None, owner: str | None) -> str | None:
    """Compare all that a found record says with what the engine would write; return what differs, None if nothing does.

    Args:
      grid, owner: of the image; None: not known, and the record's own is taken.
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


def serves_as(found: Meta, ours: Meta) -> bool:
    """Whether a found record is as good as one of ours with its name: it says the same, and is canonical if ours is."""
    its, own = (replace(one.with_room(one.tokens), canonical=True, checksums=()) for one in (found, ours))
    return its == own and found.canonical >= ours.canonical


class _Look(NamedTuple):
    """What a tier had of an image, and when it was asked."""

    at: float
    found: list[Found]


class Asker(Protocol):
    """The channel that looks are made for."""

    tier: Tier
    is_closing: bool

    def allows(self) -> bool: ...

    def find(self, entry: str, is_late: Callable[[], bool] = ...) -> list[Found]: ...

    def count(self, event: Event, times: int = 1) -> None: ...

    def late(self) -> None: ...

    def refuse(self, meta: Meta, why: str) -> None: ...


class TierLookups:
    """Looks at one tier. A look never raises.

    Args:
      channel: makes them, counts them, and removes what is damaged.
      threads: look at a tier elsewhere. One of this machine has threads of its own, which no record keeps busy.
      limit: seconds that a look at a tier of this machine may take; what takes longer is not there.
      form: of records.
      clock: seconds that only grow.
    """

    def __init__(
        self, channel: Asker, threads: ThreadPoolExecutor, limit: float, form: Form, clock: Callable[[], float]
    ):
        self._channel, self._threads, self._limit, self._form, self._clock = channel, threads, limit, form, clock
        if channel.tier.is_local:
            self._threads = ThreadPoolExecutor(_LOOKERS, f"vlcache-{channel.tier.label}-look")
        self._looks = Bounded[_Look](REMEMBERED)
        self._stuck: set[Future[list[Found]]] = set()  # looks at a tier of this machine that are late, and go on

    def ask(self, entries: Iterable[str]) -> dict[str, Future[list[Found]]]:
        """Asks a tier elsewhere what it has of images, unless that is known."""
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

    def hear(self, asked: Mapping[str, Future[list[Found]]], patience: float) -> None:
        """Waits for what was asked, but no longer than so many seconds; what does not come is not there."""
        wait(asked.values(), patience)
        for entry, future in asked.items():
            if not future.done():
                future.cancel()
                self._channel.late()
                self._looks.put(entry, _Look(self._clock(), []))

    def found(self, entry: str, grid: Grid | None = None, owner: str | None = None) -> list[Found]:
        """What a tier has of an image, the newest last; of one elsewhere, what it had when it was asked. A record that
        says anything that this engine would not write of the image is damaged, and is removed.

        Args:
          grid, owner: of the image; None: not known.
        """
        if self._channel.tier.is_local:
            there = self._here(entry)
        else:
            look = self._looks.get(entry)
            there = [] if look is None else look.found
        sound = []
        for one in there:
            if (why := misfit(one.meta, self._form, grid, owner)) is None:
                sound.append(one)
            else:
                self._channel.refuse(one.meta, why)
        return sound

    def forget(self, entry: str) -> None:
        """What a tier has of an image has changed."""
        self._looks.pop(entry)

    def close(self) -> None:
        """Nothing is looked up any more."""
        if self._channel.tier.is_local:
            self._threads.shutdown(cancel_futures=True)

    def _here(self, entry: str) -> list[Found]:
        """Look at a tier of this machine within the limit. While one look is late, there is no other: a request makes
        several looks, and waits once."""
        if self._stuck or self._channel.is_closing or not self._channel.allows():
            return []
        late = threading.Event()
        try:
            look = self._threads.submit(self._channel.find, entry, late.is_set)
        except RuntimeError:  # it was closed meanwhile
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

    def _find(self, entry: str) -> list[Found]:
        found = self._channel.find(entry)
        self._looks.put(entry, _Look(self._clock(), found))
        return found

    def _is_fresh(self, look: _Look | None, now: float) -> bool:
        return look is not None and now - look.at < (_KNOWN if look.found else _UNKNOWN)


@dataclass
class CacheStats:
    """Counters since the engine began, and what is kept now.

    Attributes:
      hits_exact, hits_approximate: images whose K, V were found, as they were computed in the same context; or computed
        in another one, or kept by a codec.
      misses: images whose K, V were not found, or could not be used.
      passed_over: images whose K, V were found, and computed all the same (`CacheConfig.load`).
      encoder_hits: images whose encoder rows were found, and not passed over.
      stored, evicted: records.
      refused: records that found no room.
      clashes: look-ups that met another image's record.
      corrupt: records that were found damaged.
      failed: records that could not be filled.
      not_finite: records that held NaN or infinities, and were not kept.
      encoder_records, kv_records, pinned: records that are kept now.
      pinned_bytes: of records that `pin` keeps.
      bytes, capacity: of host memory.
      left_bytes: of records that have lost their place and that requests under way still read; they come on top.
      device_records: of K, V that have a copy in the device tier.
      device_bytes, device_capacity: of device memory.
      expired: images that were older than `ttl`, and were forgotten.
      whys: how often an image was not linked as it was, by the reason (`Why`).
      tiers: of each tier outside memory, by its label: "disk", "remote", "peer".
    """

    hits_exact: int = 0
    hits_approximate: int = 0
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
