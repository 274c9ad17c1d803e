"""What tiers outside host memory did, counted for `CacheStats` and for Prometheus."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

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
        for field in fields(stats):
            if isinstance(value := getattr(stats, field.name), int):
                yield GaugeMetricFamily(f"vlcache_{field.name}", "See CacheStats", value=value)
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
