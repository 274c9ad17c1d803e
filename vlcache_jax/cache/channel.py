"""Channel of a tier: its threads, counters, and a circuit breaker that suspends it after faults."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait

from vlcache_jax.cache.keys import REMEMBERED, Ages, Bounded
from vlcache_jax.cache.lookups import Event, Form, Meter, TierLookups, TierStats, serves_as
from vlcache_jax.cache.record import DamagedError, EntryGoneError, Found, Meta, Record, RefusedError, Tier

FAULTS = 3  # consecutive faults until a tier is suspended
_REST = (1.0, 60.0)  # first and maximum duration of a suspension in seconds


class Breaker:
    """Circuit breaker: after `FAULTS` consecutive faults it allows single attempts at growing intervals.

    Args:
      clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._lock = threading.Lock()
        self._faults = 0
        self._until = 0.0
        self._rest = _REST[0]

    def allows(self) -> bool:
        """Return whether to try. The caller reports the result with `worked` or `failed`."""
        with self._lock:
            if self._faults < FAULTS:
                return True
            if self._clock() < self._until:
                return False
            self._until = self._clock() + self._rest  # other callers wait for the result of this attempt
            return True

    def worked(self) -> None:
        with self._lock:
            self._faults, self._rest = 0, _REST[0]

    def failed(self, times: int = 1) -> None:
        with self._lock:
            was_open = self._faults >= FAULTS
            self._faults += times
            if self._faults >= FAULTS:
                self._rest = min(2 * self._rest, _REST[1]) if was_open else _REST[0]
                self._until = self._clock() + self._rest


_log = logging.getLogger(__name__)

_READERS = 4  # threads for lookups and loads
_CLOSING = 10.0  # seconds that closing waits for writes to a remote tier


class Channel:
    """Channel of one tier. Its methods raise no exceptions.

    Args:
      tier: the tier.
      meter: counters.
      clock: returns monotonic seconds.
      ages: ages of records.
      max_queued_bytes: maximum bytes in the write queue; further records are not written.
      patience: time limit of a lookup in a tier of this machine, in seconds.
      form: form of the records that this engine writes.
      damaged: called with each found record of another form.

    Attributes:
      looks: lookups in the tier.
    """

    def __init__(
        self,
        tier: Tier,
        meter: Meter,
        *,
        clock: Callable[[], float],
        ages: Ages,
        max_queued_bytes: int,
        patience: float,
        form: Form,
        damaged: Callable[[Meta], object],
    ):
        self.tier = tier
        self._meter, self._clock, self._ages, self._max_queued_bytes = meter, clock, ages, max_queued_bytes
        self._damaged = damaged
        self._breaker = Breaker(clock)
        self._readers = ThreadPoolExecutor(_READERS, f"vlcache-{tier.label}-load")
        self._writer = ThreadPoolExecutor(1, f"vlcache-{tier.label}-keep")
        self._refused = Bounded[int](REMEMBERED)
        self._removing: set[Future[None]] = set()
        self._writing: dict[Future[None], Record] = {}
        self._unwanted: weakref.WeakSet[Record] = weakref.WeakSet()  # deleted while they are being written
        self._lock = threading.Lock()
        self._queued = 0  # loads that wait for a thread
        self.is_closing = False
        self.progressed = 0.0  # time of the last progress of a load
        self.looks = TierLookups(self, self._readers, patience, form, clock)
        tier.report = self.fault
        self.count("damaged", tier.damaged)

    # Lookups.

    def allows(self) -> bool:
        """Return whether to try the tier. The caller reports the result."""
        return self._breaker.allows()

    def find(self, entry: str, is_late: Callable[[], bool] = lambda: False) -> list[Found]:
        """Return the tier's records of an image, with corrected times. `is_late` reports that the caller gave up."""
        found: list[Found] = []
        try:
            with self._meter.timing(self.tier.label, "find"):
                found = self._there(entry)
        except Exception as error:
            self.fault(error)
        else:
            if not is_late():
                self._breaker.worked()
            self.count("found" if found else "missing")
        return found

    def _there(self, entry: str) -> list[Found]:
        there = (one for one in self.tier.find(entry) if one.meta.entry == entry)
        return [one._replace(written=self._ages.since(one.meta.name, one.written)) for one in there]

    def refuse(self, meta: Meta, why: str) -> None:
        """Count, log and delete, once, a record that this engine would not have written."""
        with self._lock:
            if self._refused.get(meta.name) == hash(meta):
                return
            self._refused.put(meta.name, hash(meta))
        self.fault(DamagedError(f"{meta.name:.140} must match what this engine writes, and is deleted: {why}"))
        self._damaged(meta)
        with contextlib.suppress(RuntimeError):  # the channel is closed: the next engine finds it
            deleting = self._writer.submit(self._remove, meta.name)  # before the recomputed record is written
            with self._lock:
                self._removing.add(deleting)
            deleting.add_done_callback(self._removing.discard)

    def _remove(self, name: str) -> None:
        try:
            self.tier.delete(name)
        except Exception as error:
            self.fault(error)

    # Loading and writing.

    @property
    def is_busy(self) -> bool:
        """True if records wait to be loaded."""
        return self._queued > 0

    def load(self, work: Callable[[], bool]) -> Future[None]:
        """Run a load in turns with other loads: while `work` returns True, it runs again after the others."""
        done: Future[None] = Future()

        def turn() -> None:
            with self._lock:
                self._queued -= 1
            try:
                has_more = work()
                if has_more:
                    begin()
                    return
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        def begin() -> None:
            with self._lock:
                self._queued += 1
            self._readers.submit(turn)

        begin()
        return done

    def is_worth_a_try(self) -> bool:
        """Return whether to load a found record; count it if not."""
        if self._breaker.allows():
            return True
        self.count("unasked")
        return False

    def keep(self, record: Record, done: Callable[[], object]) -> None:
        """Start writing a record; call `done` when that has ended, successfully or not."""
        with self._lock:
            waiting = sum(one.meta.nbytes for one in self._writing.values())
            is_taken = not (self.is_closing or (waiting and waiting + record.meta.nbytes > self._max_queued_bytes))
            if is_taken:
                future = self._writer.submit(self._write, record)
                self._writing[future] = record
        if not is_taken:
            self.count("skipped")
            done()
            return
        future.add_done_callback(self._written)
        future.add_done_callback(lambda _: done())

    def to_write(self, entry: str) -> set[str]:
        """Return the names of an image's records in the write queue."""
        with self._lock:
            return {record.meta.name for record in self._writing.values() if record.meta.entry == entry}

    def delete(self, name: str) -> bool:
        """Delete a record, also from the write queue; return whether that succeeded."""
        with self._lock:
            own = [(future, record) for future, record in self._writing.items() if record.meta.name == name]
        for future, record in own:
            if not future.cancel():
                self._unwanted.add(record)
        try:
            self.tier.delete(name)
        except Exception as error:
            self.fault(error)
            return False
        return True

    def delete_all(self, entry: str, names: Iterable[str], pinned: Collection[str]) -> set[str]:
        """Delete an image's records and those of `names`, except pinned ones; return the names of the deleted ones."""
        there = {*names, *self.looks.all_names(entry)}
        deleted = {name for name in sorted(there.difference(pinned, self.pinned(entry))) if self.delete(name)}
        self.looks.forget(entry)
        return deleted

    def pin(self, entry: str, is_pinned: bool) -> list[str]:
        """Pin or unpin an image's records in the tier; return their names."""
        names = []
        for name in self.looks.all_names(entry):
            try:
                self.tier.pin(name, is_pinned)
                names.append(name)
            except Exception as error:
                self.fault(error)
        return names

    def pinned(self, entry: str) -> set[str]:
        """Return the names of an image's records that are pinned in the tier."""
        try:
            return self.tier.pinned(entry)
        except Exception as error:
            self.fault(error)
            return set()

    def flush(self) -> None:
        """Wait until the write queue is empty and damaged records are deleted."""
        with self._lock:
            writing, removing = list(self._writing), list(self._removing)
        wait(removing)
        for future in writing:
            with contextlib.suppress(CancelledError):  # it was deleted in the meantime
                future.exception()

    def close(self) -> None:
        """Close the tier after its writes: all of them on this machine, otherwise those that end within 10 seconds."""
        self.is_closing = True
        with self._lock:
            writing = list(self._writing)
        if not self.tier.is_local:
            for future in wait(writing, _CLOSING).not_done:
                if future.cancel():
                    self.count("skipped")
        self._writer.shutdown(wait=self.tier.is_local)
        self._readers.shutdown(wait=self.tier.is_local, cancel_futures=True)
        self.looks.close()
        try:
            self.tier.close()
        except Exception as error:
            self.fault(error)

    # Counting.

    def count(self, event: Event, times: int = 1) -> None:
        self._meter.count(self.tier.label, event, times)

    def note_progress(self) -> None:
        """Note that parts of a record were loaded."""
        self.progressed = self._clock()

    def loaded(self, record: Record) -> None:
        """Count a loaded record."""
        self.note_progress()
        self._breaker.worked()
        self.count("loaded")
        self._meter.move(self.tier.label, "in", record.meta.part_bytes * len(record.meta.parts))

    def fault(self, error: BaseException) -> None:
        """Log and count an error. No output depends on it."""
        _log.warning("%s: %s", self.tier.label, error)
        match error:
            case DamagedError():
                self.count("damaged")
            case EntryGoneError():
                self.count("gone")
            case RefusedError():
                self.count("refused")
                self._breaker.failed(FAULTS)
            case _:
                self.count("failed")
                self._breaker.failed()

    def late(self) -> None:
        """Count a record that was not loaded in time."""
        self.count("late")
        self._breaker.failed()

    def stats(self) -> TierStats:
        kept: dict[str, int] = {}
        try:
            kept = self.tier.counts()
        except Exception as error:
            self.fault(error)
        return self._meter.stats(self.tier.label, kept)

    def _write(self, record: Record) -> None:
        meta = record.meta
        if not record.is_ready:  # its request has failed
            return
        if not self._breaker.allows():
            self.count("skipped")
            return
        try:
            with self._meter.timing(self.tier.label, "write"):
                parts = record.parts
                outcome = self.tier.write(meta, parts)
                if outcome == "known" and self._is_outdated(meta):
                    self.tier.delete(meta.name)
                    outcome = self.tier.write(meta, parts)
                if outcome == "stored":
                    self.tier.date(meta.name, self._ages.date(record))  # it may be older than the write
            if not record.is_ready or record in self._unwanted:
                self.tier.delete(meta.name)
        except Exception as error:
            self.fault(error)
            return
        self._breaker.worked()
        self.count("skipped" if outcome == "refused" else outcome)
        if outcome == "stored":
            self._meter.move(self.tier.label, "out", meta.part_bytes * len(meta.parts))
            self.looks.outdate(meta.entry)
            self._refused.pop(meta.name)

    def _is_outdated(self, meta: Meta) -> bool:
        """Return whether the tier's record is expired or inferior to ours."""
        there = next((one for one in self._there(meta.entry) if one.meta.name == meta.name), None)
        if there is None:  # another process is writing it
            return False
        oldest = self._ages.oldest()
        return (oldest is not None and there.written < oldest) or not serves_as(there.meta, meta)

    def _written(self, future: Future[None]) -> None:
        with self._lock:
            self._writing.pop(future, None)
