"""The records in host memory: which exist, who needs them, why others are gone, and what was counted."""

from __future__ import annotations

import math
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from vlcache_jax.cache.config import CacheConfig
from vlcache_jax.cache.keys import REMEMBERED, Ages, Losses, Quotas, payer
from vlcache_jax.cache.lookups import CacheStats
from vlcache_jax.cache.record import Lost, Meta, Record, State, Why
from vlcache_jax.inputs.processor import Grid


class Handle:
    """What was found for an image. Its records, which are pinned, stay until it is released, at the end of a `with`.

    Attributes:
      encoder: record of the encoder rows, or None.
      kv: record of K, V, or None.
      exact: K, V were computed in this very context, and are kept as they were.
      is_coded: they were, but are kept by a codec.
      why: the reason if not.
      passed_over: the records that were found, but are computed all the same.
      brought: names of the records that the look-up brings in, and the label of the tier that each comes from.
    """

    def __init__(
        self,
        records: Records,
        encoder: Record | None,
        kv: Record | None,
        exact: bool,
        why: Why | None,
        is_coded: bool = False,
    ):
        self.encoder, self.kv, self.exact, self.why, self.is_coded = encoder, kv, exact, why, is_coded
        self.passed_over: list[Record] = []
        self.brought: dict[str, str] = {}
        self._store = records
        self._records = [record for record in (encoder, kv) if record is not None]
        self._count = records.pin

    def pass_over(self, *, encoder: bool) -> None:
        """Lets go of K, V, if there are any, as computing them is cheaper.

        Args:
          encoder: of the encoder rows, too.
        """
        if self.kv is not None:
            self.why = Why.cheaper_to_compute
        self.passed_over = [r for r in (self.kv, self.encoder if encoder else None) if r is not None]
        self.kv, self.exact = None, False
        if encoder:
            self.encoder = None
        for record in self.passed_over:
            self._records.remove(record)
        self._count(self.passed_over, -1)

    def prefer(self, other: Handle) -> Handle:
        """The better of two, with the encoder rows of either; the rest of them is released."""
        is_better = other.exact or (self.kv is None and other.kv is not None)
        better, worse = (other, self) if is_better else (self, other)
        if better.why is Why.unknown_image:
            better.why = worse.why
        if better.encoder is None and worse.encoder is not None:
            better.encoder = worse.encoder
            worse._records.remove(worse.encoder)
            better._records.append(worse.encoder)
        better.brought |= worse.brought
        worse.release()
        return better

    def hold(self) -> None:
        """Holds the records from now on, instead of pinning them: they may lose their place, not their contents."""
        Handle.hold_all([self])

    def release(self) -> None:
        """Lets go of the records."""
        Handle.release_all([self])

    @staticmethod
    def hold_all(handles: Sequence[Handle]) -> None:
        """Does what `hold` does for handles of one store."""
        records = [record for handle in handles for record in handle._records]
        for first in handles[:1]:
            first._store.hold(records, 1)
            first._store.pin(records, -1)
        for handle in handles:
            handle._count = handle._store.hold

    @staticmethod
    def release_all(handles: Sequence[Handle]) -> None:
        """Does what `release` does for handles of one store, all of which are held, or none is."""
        records = [record for handle in handles for record in handle._records]
        for handle in handles:
            handle._records = []
        for first in handles[:1]:
            first._count(records, -1)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class MemoryTier:
    """Records in host memory, counted at their padded size from the moment they get their place.

    A record that leaves is found no more, and its room is another's. Its memory goes when the last request that still
    reads it has run.

    Args:
      capacity: bytes at most.
      shares: of it, of those who pay for records; None: they have no limits.
    """

    def __init__(self, capacity: int, *, shares: Quotas | None = None):
        self.capacity, self._shares = capacity, shares or Quotas()
        self.used = 0
        self.clashes = 0
        self._records: OrderedDict[str, Record] = OrderedDict()  # the least recently used first
        self._lock = threading.RLock()

    def get(self, name: str) -> Record | None:
        """The record of this name, which may still be being filled."""
        return self.get_all([name])[0]

    def get_all(self, names: Sequence[str]) -> list[Record | None]:
        """The records of these names."""
        with self._lock:
            found = [self._records.get(_place(name)) for name in names]
            for i, name in enumerate(names):
                if (record := found[i]) is not None and record.meta.name != name:
                    self.clashes += 1
                    found[i] = None
            return found

    def touch(self, records: Sequence[Record]) -> None:
        """Makes them the most recently used ones, the last one most of all."""
        with self._lock:
            for record in records:
                if self._records.get(place := _place(record.meta.name)) is record:
                    self._records.move_to_end(place)

    def allocate(
        self, metas: Sequence[Meta], displaced: Sequence[Record] = (), source: str | None = None
    ) -> tuple[list[Record | None], dict[Record, Why]]:
        """Records to be filled, None where one is larger than what is not pinned; and those that leave, and why.

        Args:
          metas: of the new records.
          displaced: records that have to leave in any case.
          source: see `Record`.
        """
        with self._lock:
            gone = list(displaced)
            free = self.capacity - self.used + sum(record.meta.nbytes for record in gone)
            fits = []
            taken: Counter[str] = Counter()  # by what is new, of each payer's share
            for meta in metas:
                # Whatever has its place, and then the least recently used ones.
                there = self._records.get(_place(meta.name))
                more = [] if there is None or there in gone else [there]
                others = [r for r in self._records.values() if not (r.is_pinned or r in gone or r is there)]
                # A payer's records make room in its own share,
                who = payer(meta.owner)
                share = self._share(meta.owner, [*gone, *more]) - taken[who]
                own = (record for record in others if payer(record.meta.owner) == who)
                while share < meta.nbytes and (record := next(own, None)) is not None:
                    more.append(record)
                    share += record.meta.nbytes
                # and then anybody's in the whole.
                room = free + sum(record.meta.nbytes for record in more)
                left = (record for record in others if record not in more)
                while room < meta.nbytes and (record := next(left, None)) is not None:
                    more.append(record)
                    room += record.meta.nbytes
                # Nothing leaves for a record that does not fit after all.
                fits.append(min(room, share) >= meta.nbytes and not any(record.is_pinned for record in more))
                if fits[-1]:
                    gone += more
                    free = room - meta.nbytes
                    taken[who] += meta.nbytes
            leaving = {
                record: Why.displaced if record in displaced else Why.evicted for record in gone if self.remove(record)
            }
            return [self._insert(meta, source) if fit else None for meta, fit in zip(metas, fits, strict=True)], leaving

    def _share(self, owner: str, gone: Sequence[Record]) -> float:
        """Bytes that are left to an owner's new records when some have gone."""
        if (most := self._shares.of(owner)) is None:
            return math.inf
        who = payer(owner)
        own = (record for record in self._records.values() if payer(record.meta.owner) == who and record not in gone)
        return most - sum(record.meta.nbytes for record in own)

    def _insert(self, meta: Meta, source: str | None) -> Record:
        record = self._records[_place(meta.name)] = Record(meta, source)
        self.used += meta.nbytes
        return record

    def remove(self, record: Record) -> bool:
        """Forgets a record; who holds it may go on using it. Whether it was here."""
        with self._lock:
            is_here = self._records.get(place := _place(record.meta.name)) is record
            if is_here:
                del self._records[place]
                self.used -= record.meta.nbytes
            return is_here

    def records(self) -> list[Record]:
        """All of them, the least recently used first."""
        with self._lock:
            return list(self._records.values())

    @property
    def pinned_bytes(self) -> int:
        """Of records that the user wants to stay."""
        return sum(record.meta.nbytes for record in self.records() if record.is_kept)

    def counts(self) -> dict[str, int]:
        """Of what it keeps now, as `CacheStats` calls them."""
        records = [record for record in self.records() if record.is_ready]
        kv = sum(record.meta.context is not None for record in records)
        return {
            "clashes": self.clashes,
            "encoder_records": len(records) - kv,
            "kv_records": kv,
            "pinned": sum(not record.is_free for record in records),
            "pinned_bytes": self.pinned_bytes,
            "bytes": self.used,
            "capacity": self.capacity,
        }


class Records:
    """Keeps and forgets records in host memory. Every method may be called from any thread.

    Args:
      config: sizes and rules.
      clock: seconds since the epoch.
      forgotten: called with every record that leaves.

    Attributes:
      ages: of images.
      shares: how much each payer may take, of host memory and of a disk.
      tier: where the records lie.
    """

    def __init__(
        self, config: CacheConfig, shares: Quotas, clock: Callable[[], float], forgotten: Callable[[Record], object]
    ):
        self.config, self.shares = config, shares
        self.ages = Ages(config.ttl, clock)
        self.tier = MemoryTier(config.memory_bytes, shares=shares)
        self._lock = threading.RLock()
        self._counts = CacheStats()
        self._whys = Counter[str]()
        self._forgotten = forgotten
        self._lost = Losses(REMEMBERED)
        self._variants: dict[str, list[Record]] = {}  # entry key -> records of K, V, the newest last
        self._left: set[Record] = set()  # have lost their place, and are still to be read

    def is_owner(self, owner: str, entry: str) -> bool:
        """Whether an entry key, of which something is known, was made under the owner's salt."""
        with self._lock:
            if records := self._records(entry):
                return records[0].meta.owner == owner
            return (lost := self._lost.get(entry)) is not None and lost[1] == owner

    # Look-up.

    def find(self, entry: str, context: str, *, grid: Grid | None, approximate: bool) -> Handle:
        """Finds what is here of an image and pins it; see `Store.lookup`."""
        with self._lock:
            encoder, same = self._get_all([f"enc/{entry}", name := f"kv/{entry}/{context}"], grid)
            is_own = same is not None and same.meta.canonical
            is_coded = same is not None and is_own and bool(same.meta.planes)
            exact = is_own and not is_coded
            kv, why = same, None
            if is_coded:
                kv, why = (same if approximate else None), Why.coded
            elif not exact:
                variants = [record for record in self._variants.get(entry, ()) if grid in (None, record.meta.grid)]
                canonical = [record for record in variants if record.meta.canonical]
                usable = (canonical or variants) if approximate else []
                kv = usable[-1] if usable else None
                lost = (self._lost.get(name) if same is None else None) or (None if variants else self._lost.get(entry))
                why = lost[0] if lost else Why.other_context if variants else Why.unknown_image
            found = [record for record in (kv, encoder) if record is not None]
            self.tier.touch(found)  # the encoder's rows last: they are of use for longer
            for record in found:
                record.pins += 1
            return Handle(self, encoder, kv, exact, why, is_coded)

    def is_of_use(self, meta: Meta, approximate: bool) -> bool:
        """Whether `find` in the context of K, V would take them."""
        return meta.is_exact or (approximate and (meta.canonical or not self.has_variants(meta.entry, canonical=True)))

    def count(self, handles: Sequence[Handle]) -> None:
        """Enters look-ups in the counters."""
        with self._lock:
            for handle in handles:
                self._counts.encoder_hits += handle.encoder is not None
                self._counts.hits_exact += handle.exact
                self._counts.hits_approximate += handle.kv is not None and not handle.exact
                passed_over = bool([record for record in handle.passed_over if record.meta.context is not None])
                self._counts.passed_over += passed_over
                self._counts.misses += handle.kv is None and not passed_over
                if handle.why is not None:
                    self._whys[handle.why.value] += 1

    def _get_all(self, names: Sequence[str], grid: Grid | None) -> list[Record | None]:
        found = self.tier.get_all(names)
        for i, record in enumerate(found):
            if record is not None and grid not in (None, record.meta.grid):
                self._counts.clashes += 1
                found[i] = None
        return found

    # Making records.

    def reserve(self, metas: Sequence[Meta], *, source: str | None = None) -> list[Record | None]:
        """Places for a request's new records, to be filled, and told of by `publish`. None: there is no room for one.

        Args:
          source: see `Record`.

        The first canonical record of K, V of an image replaces those that are not canonical, and where the variants of
        an image are limited, the oldest one makes room for a new one.
        """
        with self._lock:
            new: defaultdict[str, list[Meta]] = defaultdict(list)
            for meta in metas:
                if meta.context is not None:
                    new[meta.entry].append(meta)
            most, variants = self.config.variants, self._variants
            displaced = [one for entry, own in new.items() for one in _displaced(variants.get(entry, ()), own, most)]
            made, gone = self.tier.allocate(metas, displaced, source)
            for leaving, why in gone.items():
                self._forget(leaving, why)
            self._counts.refused += made.count(None)
            for meta, record in zip(metas, made, strict=True):
                if meta.context is None:
                    continue
                if record is not None:
                    self._variants.setdefault(meta.entry, []).append(record)
                else:
                    self._lost.put(meta.entry, (Why.too_large, meta.owner))
            return made

    def publish(self, record: Record, checksums: tuple[int, ...] | None = None) -> None:
        """The record is filled. Unless somebody has looked at its parts and gives their checksums, one that is not
        finite is withdrawn, so that nobody reuses what is damaged."""
        if checksums is None and not (record.is_settled or record.is_finite()):
            self.withdraw(record, Why.not_finite)
        self.ages.date(record)
        record.complete(checksums)
        with self._lock:
            if self.tier.get(record.meta.name) is record:  # it may have had to go already
                self._counts.stored += 1
                self.ages.note(record)
                if record.meta.context is not None:
                    self._lost.pop(record.meta.entry)
                    self._lost.pop(record.meta.name)
        if record.is_ready:
            self.published(record)
        self._let_pass([record])

    def published(self, record: Record) -> None:
        """A record has been filled. The `Store` hands it to the tiers outside; here nobody is told."""

    def withdraw(self, record: Record, why: Why = Why.load_failed) -> None:
        """The record will not be filled, unless it is already; who waits for it computes instead."""
        with self._lock:
            if not record.is_settled:
                record.lose(why)
                self._counts.corrupt += why is Why.corrupt
                self._counts.not_finite += why is Why.not_finite
                self._counts.failed += why is Why.load_failed
                self.remove(record, why)

    def found_damaged(self, meta: Meta) -> None:
        """A tier has a record that must not be read; its image is computed."""
        self._lost.note(meta, Why.corrupt)
        with self._lock:
            self._counts.corrupt += 1

    def discard(self, record: Record) -> None:
        """The record came from a request that failed."""
        with self._lock:
            if isinstance(record.state, Lost):
                return
            record.lose(Why.load_failed, spoiled=True)
            self._counts.failed += 1
            self.remove(record, Why.load_failed)

    def cancel(self, record: Record) -> None:
        """The record is not wanted after all, unless it is filled already."""
        with self._lock:
            if not record.is_settled:
                record.lose(Why.load_failed)
                self.remove(record, None)

    # Staying and leaving.

    def pin(self, records: Sequence[Record], by: int) -> None:
        """Counts handles that need records to stay."""
        with self._lock:
            for record in records:
                record.pins += by
            if by < 0:
                self._let_pass(records)

    def keep(self, entry: str, is_kept: bool) -> int:
        """Lets an image's present records stay until told otherwise, or no longer; returns how many that changes.

        Raises:
          ValueError: they do not fit in `CacheConfig.pinned_share`. None of them stays then.
        """
        with self._lock:
            records = [record for record in self.records(entry) if record.is_kept is not is_kept]
            asked = sum(record.meta.nbytes for record in records)
            share = int(self.config.pinned_share * self.tier.capacity)
            if is_kept and asked > (left := share - self.tier.pinned_bytes):
                raise ValueError(
                    f"image must fit in the {left} bytes that pinned_share leaves, got {asked} bytes of entry {entry}"
                )
            for record in records:
                record.is_kept = is_kept
            self._let_pass(records)
            return len(records)

    def hold(self, records: Sequence[Record], by: int, *, to_write: bool = False) -> None:
        """Counts requests that are going to read records, and those that are to write them to another tier."""
        with self._lock:
            for record in records:
                record.held += by
                record.writes += by * to_write
                # A record that nobody holds, and that has lost its place, is gone.
                may_be_gone = record in self._left or record.state is State.reserved
                if not record.held and may_be_gone and self.tier.get(record.meta.name) is not record:
                    self._left.discard(record)
                    if record.state is State.reserved:
                        record.lose(Why.load_failed)  # nobody needs to fill it any more
            if by < 0:
                self._let_pass(records)

    def _let_pass(self, records: Sequence[Record]) -> None:
        """Lets go of records that nobody needs: those that are being loaded, or of which no memory is to be kept."""
        with self._lock:
            for record in records:
                if (record.source is None and not self.config.passes_on) or not record.is_free:
                    continue
                if record.source is not None:
                    self.cancel(record)
                if self.config.passes_on and record.is_settled:
                    self.remove(record, None)

    def has_variants(self, entry: str, *, canonical: bool = False) -> bool:
        """Whether K, V of an image, or canonical ones, are kept, or being filled."""
        with self._lock:
            return any(record.meta.canonical or not canonical for record in self._variants.get(entry, ()))

    def records(self, entry: str) -> list[Record]:
        """All records of an image that are complete."""
        with self._lock:
            return [record for record in self._records(entry) if record.is_ready]

    def _records(self, entry: str) -> list[Record]:
        encoder = self.tier.get(f"enc/{entry}")
        return [*self._variants.get(entry, ()), *([] if encoder is None else [encoder])]

    def evict(self, entry: str) -> set[str]:
        """Removes an image's records that nobody has pinned or is going to use; returns their names."""
        with self._lock:
            leaving = [record for record in self.records(entry) if not record.is_needed]
            for record in leaving:
                self.remove(record, Why.evicted)
            return {record.meta.name for record in leaving}

    def expire(self, entry: str) -> None:
        """An image has become too old."""
        with self._lock:
            self._counts.expired += 1
            for record in self.records(entry):
                self.remove(record, Why.expired)

    def verify(self) -> list[str]:
        """Computes all checksums again and removes records that are damaged; returns their names."""
        records = [record for record in self.tier.records() if record.is_ready]
        damaged = [record for record in records if record.checksums() != record.meta.checksums]
        with self._lock:
            self._counts.corrupt += len(damaged)
            for record in damaged:
                self.remove(record, Why.corrupt)
        return [record.meta.name for record in damaged]

    def clear(self) -> None:
        """Forgets every record. Counters go on."""
        with self._lock:
            for record in self.tier.records():
                self.remove(record, None)
            self._lost.clear()
            self.ages.clear()
            self._variants.clear()

    def stats(self) -> CacheStats:
        with self._lock:
            left = sum(record.meta.nbytes for record in self._left if record.is_ready)
            kept = self.tier.counts()
            kept["clashes"] += self._counts.clashes
            return replace(self._counts, left_bytes=left, whys=dict(self._whys), **cast(Mapping[str, Any], kept))

    def remove(self, record: Record, why: Why | None = Why.evicted) -> None:
        """A record leaves, if it has not; why is not remembered if that is None."""
        with self._lock:
            if self.tier.remove(record):
                self._forget(record, why)

    def _forget(self, record: Record, why: Why | None) -> None:
        """A record has left."""
        self._forgotten(record)
        if record.held:
            self._left.add(record)
        elif record.state is State.reserved:
            record.lose(Why.load_failed)  # nobody needs to fill it any more
        self._counts.evicted += record.is_ready and why in (Why.displaced, Why.evicted)
        if record.meta.context is not None:
            entry = record.meta.entry
            if why is not None:
                self._lost.note(record.meta, why)
            self._variants[entry].remove(record)
            if not self._variants[entry]:
                del self._variants[entry]


def _displaced(variants: Sequence[Record], new: Sequence[Meta], most: int | None) -> list[Record]:
    """The variants of an image that leave because of its new ones."""
    contexts = {meta.context for meta in new}
    staying = [record for record in variants if record.meta.context not in contexts]
    leaving = []
    if any(meta.canonical for meta in new):
        leaving = [record for record in staying if not record.meta.canonical]
        staying = [record for record in staying if record.meta.canonical]
    if most is not None:
        leaving += staying[: max(0, len(staying) + len(new) - most)]
    return [record for record in leaving if not record.is_pinned]


def _place(name: str) -> str:
    """Where a record is kept. Two names might share a place; the name in the record decides whose it is."""
    return name
