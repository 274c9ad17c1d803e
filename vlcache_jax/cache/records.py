"""Records in host memory: lookup, reservation, pinning, eviction, the reasons of losses, and counters."""

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
from vlcache_jax.cache.record import OWN_RANK, Donors, Lost, Meta, Record, State, Why
from vlcache_jax.inputs.processor import Grid


def linked_bytes(meta: Meta, *, is_exact: bool) -> int:
    """Return the bytes of an entry that a link reads: no map if it is exact, else no states after the image."""
    maps = 4 * (meta.states - meta.own_states) + meta.state_bytes[1]
    return meta.nbytes - meta.shape[0] * (maps if is_exact else 4 * meta.own_states)


class Handle:
    """Result of a lookup. Its records are pinned until `release`, which the end of a `with` block calls.

    Attributes:
      encoder: record of the encoder output, or None.
      kv: record of KV, or None.
      exact: the KV was computed in this context and is not coded.
      is_coded: KV was computed in this context, but is stored by a codec.
      why: the reason if not `exact`.
      passed_over: records that were found but are computed nevertheless.
      brought: label of the source tier by the name of each record that the lookup loads.
      donor: kind of the context of KV that was computed in another one, see `Donors.kind`; otherwise None.
      rank: rank of the KV among donors, see `Donors.rank`.
    """

    def __init__(
        self,
        records: Records,
        encoder: Record | None,
        kv: Record | None,
        exact: bool,
        why: Why | None,
        is_coded: bool = False,
        donor: str | None = None,
        rank: tuple[int, int] = OWN_RANK,
    ):
        self.encoder, self.kv, self.exact, self.why, self.is_coded = encoder, kv, exact, why, is_coded
        self.donor, self.rank = donor, rank
        self.passed_over: list[Record] = []
        self.brought: dict[str, str] = {}
        self._store = records
        self._records = [record for record in (encoder, kv) if record is not None]
        self._count = records.pin

    def pass_over(self, *, encoder: bool) -> None:
        """Release the KV, if there is any, because computing it is cheaper.

        Args:
          encoder: also release the encoder output.
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
        """Return the better of two handles, with the encoder output of either, and release the rest."""
        is_better = other.exact or (other.kv is not None and (self.kv is None or other.rank < self.rank))
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
        """Hold the records instead of pinning them: they may be evicted, but their contents stay."""
        Handle.hold_all([self])

    def release(self) -> None:
        """Release the records."""
        Handle.release_all([self])

    @staticmethod
    def hold_all(handles: Sequence[Handle]) -> None:
        """Call `hold` for handles of one store, under one lock each."""
        records = [record for handle in handles for record in handle._records]
        for first in handles[:1]:
            first._store.hold(records, 1)
            first._store.pin(records, -1)
        for handle in handles:
            handle._count = handle._store.hold

    @staticmethod
    def release_all(handles: Sequence[Handle]) -> None:
        """Call `release` for handles of one store, of which all or none are held."""
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
    """Records in host memory. Their padded size counts from the reservation on.

    An evicted record is not found any more, and its room is free. Its memory is freed after the last request that reads
    it.

    Args:
      capacity: maximum size in bytes.
      shares: quotas of payers within the capacity; None: no quotas.
      for_states: maximum size in bytes of the records with states; None: the capacity.
    """

    def __init__(self, capacity: int, *, shares: Quotas | None = None, for_states: int | None = None):
        self.capacity, self._shares = capacity, shares or Quotas()
        self._for_states = capacity if for_states is None else for_states
        self.used = 0
        self.clashes = 0
        self._records: OrderedDict[str, Record] = OrderedDict()  # the least recently used first
        self._lock = threading.RLock()

    def get(self, name: str) -> Record | None:
        """Return the record of this name, which may not be filled yet."""
        return self.get_all([name])[0]

    def get_all(self, names: Sequence[str]) -> list[Record | None]:
        """Return the records of these names."""
        with self._lock:
            found = [self._records.get(_place(name)) for name in names]
            for i, name in enumerate(names):
                if (record := found[i]) is not None and record.meta.name != name:
                    self.clashes += 1
                    found[i] = None
            return found

    def touch(self, records: Sequence[Record]) -> None:
        """Mark records as used now, the last one most recently."""
        with self._lock:
            for record in records:
                if self._records.get(place := _place(record.meta.name)) is record:
                    self._records.move_to_end(place)

    def allocate(
        self, metas: Sequence[Meta], displaced: Sequence[Record] = (), source: str | None = None
    ) -> tuple[list[Record | None], dict[Record, Why]]:
        """Reserve memory for new records, evicting others.

        Args:
          metas: descriptions of the new records.
          displaced: records to evict in any case.
          source: see `Record`.

        Returns:
          The new records, None for those that do not fit; and the reasons of the evicted ones.
        """
        with self._lock:
            gone = list(displaced)
            free = self.capacity - self.used + sum(record.meta.nbytes for record in gone)
            fits = []
            taken: Counter[str] = Counter()  # bytes of new records by payer
            taken_for_states = 0  # bytes of new records with states
            for meta in metas:
                # First evict a record with the same name, then the least recently used ones.
                there = self._records.get(_place(meta.name))
                leaving = [] if there is None or there in gone else [there]
                others = [r for r in self._records.values() if not (r.is_pinned or r in gone or r is there)]
                # Evict records of the payer until the new one fits in the payer's quota.
                who = payer(meta.owner)
                share = self._share(meta.owner, [*gone, *leaving]) - taken[who]
                own = (record for record in others if payer(record.meta.owner) == who)
                while share < meta.nbytes and (record := next(own, None)) is not None:
                    leaving.append(record)
                    share += record.meta.nbytes
                # Evict records with states until one with states fits in their share.
                for_states = self._left_for_states([*gone, *leaving]) - taken_for_states if meta.states else math.inf
                stated = (record for record in others if record.meta.states and record not in leaving)
                while for_states < meta.nbytes and (record := next(stated, None)) is not None:
                    leaving.append(record)
                    for_states += record.meta.nbytes
                # Then evict records of any payer until it fits in the capacity.
                room = free + sum(record.meta.nbytes for record in leaving)
                left = (record for record in others if record not in leaving)
                while room < meta.nbytes and (record := next(left, None)) is not None:
                    leaving.append(record)
                    room += record.meta.nbytes
                # Evict nothing for a record that does not fit.
                least = min(room, share, for_states)
                fits.append(least >= meta.nbytes and not any(record.is_pinned for record in leaving))
                if fits[-1]:
                    gone += leaving
                    free = room - meta.nbytes
                    taken[who] += meta.nbytes
                    taken_for_states += meta.nbytes if meta.states else 0
            whys = {
                record: Why.displaced if record in displaced else Why.evicted for record in gone if self.remove(record)
            }
            return [self._insert(meta, source) if fit else None for meta, fit in zip(metas, fits, strict=True)], whys

    def _share(self, owner: str, gone: Sequence[Record]) -> float:
        """Return the bytes left in the quota of an owner's payer when the records `gone` are evicted."""
        if (quota := self._shares.of(owner)) is None:
            return math.inf
        who = payer(owner)
        own = (record for record in self._records.values() if payer(record.meta.owner) == who and record not in gone)
        return quota - sum(record.meta.nbytes for record in own)

    def _left_for_states(self, gone: Sequence[Record]) -> float:
        """Return the bytes left for records with states when the records `gone` are evicted."""
        stated = (record for record in self._records.values() if record.meta.states and record not in gone)
        return self._for_states - sum(record.meta.nbytes for record in stated)

    def _insert(self, meta: Meta, source: str | None) -> Record:
        record = self._records[_place(meta.name)] = Record(meta, source)
        self.used += meta.nbytes
        return record

    def remove(self, record: Record) -> bool:
        """Remove a record and return whether it was here. Its holders may continue to use it."""
        with self._lock:
            is_here = self._records.get(place := _place(record.meta.name)) is record
            if is_here:
                del self._records[place]
                self.used -= record.meta.nbytes
            return is_here

    def records(self) -> list[Record]:
        """Return all records, least recently used first."""
        with self._lock:
            return list(self._records.values())

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the records that users pin."""
        return sum(record.meta.nbytes for record in self.records() if record.is_kept)

    def counts(self) -> dict[str, int]:
        """Return current counts, by their names in `CacheStats`."""
        records = [record for record in self.records() if record.is_ready]
        kv = sum(record.meta.context is not None for record in records)
        snapshots = sum(record.meta.is_snapshot for record in records)
        return {
            "clashes": self.clashes,
            "encoder_records": len(records) - kv - snapshots,
            "kv_records": kv,
            "snapshot_records": snapshots,
            "pinned": sum(not record.is_free for record in records),
            "pinned_bytes": self.pinned_bytes,
            "bytes": self.used,
            "capacity": self.capacity,
        }


class Records:
    """Records in host memory with the rules of the cache. Methods may be called from any thread.

    Args:
      config: sizes and rules.
      shares: quotas of payers.
      clock: returns seconds since the epoch.
      forgotten: called with every record that leaves host memory.

    Attributes:
      ages: ages of images.
      shares: quotas of payers in host memory and on disk, each.
      tier: memory of the records.
    """

    def __init__(
        self, config: CacheConfig, shares: Quotas, clock: Callable[[], float], forgotten: Callable[[Record], object]
    ):
        self.config, self.shares = config, shares
        self.ages = Ages(config.ttl, clock)
        self.tier = MemoryTier(config.memory_bytes, shares=shares, for_states=config.memory_for_states)
        self._lock = threading.RLock()
        self._counts = CacheStats()
        self._whys = Counter[str]()
        self._forgotten = forgotten
        self._lost = Losses(REMEMBERED)
        self._variants: dict[str, list[Record]] = {}  # records of KV by entry key, newest last
        self._left: set[Record] = set()  # evicted records that requests still read

    def is_owner(self, owner: str, entry: str) -> bool:
        """Return whether a known entry key was made with the owner's salt."""
        with self._lock:
            if records := self._records(entry):
                return records[0].meta.owner == owner
            return (lost := self._lost.get(entry)) is not None and lost[1] == owner

    def find(self, entry: str, context: str, *, grid: Grid | None, donors: Donors | None) -> Handle:
        """Find an image's records in host memory and pin them; see `Store.lookup`."""
        with self._lock:
            encoder, same = self._get_all([f"enc/{entry}", name := f"kv/{entry}/{context}"], grid)
            is_own = same is not None and same.meta.canonical
            is_coded = same is not None and is_own and bool(same.meta.buffers)
            exact = is_own and not is_coded
            kv, why = same, None
            if is_coded:
                kv, why = (None if donors is None else same), Why.coded
            elif not exact:
                variants = [record for record in self._variants.get(entry, ()) if grid in (None, record.meta.grid)]
                best = None if donors is None else donors.best(record.meta for record in variants)
                kv = next((record for record in variants if record.meta is best), None)
                lost = (self._lost.get(name) if same is None else None) or (None if variants else self._lost.get(entry))
                other = Why.other_context if donors is None or kv is not None else Why.no_donor
                why = lost[0] if lost else other if variants else Why.unknown_image
            found = [record for record in (kv, encoder) if record is not None]
            self.tier.touch(found)  # encoder output last, as it is useful in every context
            for record in found:
                record.pins += 1
            if exact or is_coded or kv is None or donors is None:
                return Handle(self, encoder, kv, exact, why, is_coded)
            rank = donors.rank(kv.meta) or OWN_RANK
            return Handle(self, encoder, kv, exact, why, is_coded, donors.kind(kv.meta), rank)

    def count(self, handles: Sequence[Handle]) -> None:
        """Add lookups to the counters."""
        with self._lock:
            for handle in handles:
                self._counts.encoder_hits += handle.encoder is not None
                self._counts.hits_exact += handle.exact
                self._counts.hits_approximate += handle.kv is not None and not handle.exact
                self._counts.hits_neutral += handle.donor == "neutral"
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

    def reserve(self, metas: Sequence[Meta], *, source: str | None = None) -> list[Record | None]:
        """Reserve records of a request, to be filled and published. None: there is no room for one.

        The first canonical KV record of an image replaces those that are not canonical. If the number of variants is
        limited, new ones replace the oldest.

        Args:
          metas: descriptions of the records.
          source: see `Record`.
        """
        with self._lock:
            new: defaultdict[str, list[Meta]] = defaultdict(list)
            for meta in metas:
                if meta.context is not None:
                    new[meta.entry].append(meta)
            limit, variants = self.config.max_contexts_per_image, self._variants
            displaced = [one for entry, own in new.items() for one in _displaced(variants.get(entry, ()), own, limit)]
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
        """Mark a record as filled. A record that is not finite is withdrawn, unless `checksums` show that it was
        checked.
        """
        if checksums is None and not (record.is_settled or record.is_finite()):
            self.withdraw(record, Why.not_finite)
        self.ages.date(record)
        record.complete(checksums)
        with self._lock:
            if self.tier.get(record.meta.name) is record:  # it may be evicted already
                self._counts.stored += 1
                self.ages.note(record)
                if record.meta.context is not None:
                    self._lost.pop(record.meta.entry)
                    self._lost.pop(record.meta.name)
        if record.is_ready:
            self.published(record)
        self._let_pass([record])

    def published(self, record: Record) -> None:
        """Hook for a filled record. `Store` writes it to the other tiers."""

    def withdraw(self, record: Record, why: Why = Why.load_failed) -> None:
        """Mark a record as lost, unless it is filled. Requests that wait for it compute instead."""
        with self._lock:
            if not record.is_settled:
                record.lose(why)
                self._counts.corrupt += why is Why.corrupt
                self._counts.not_finite += why is Why.not_finite
                self._counts.failed += why is Why.load_failed
                self.remove(record, why)

    def found_damaged(self, meta: Meta) -> None:
        """Note that a tier has a damaged record. Its image is computed."""
        self._lost.note(meta, Why.corrupt)
        with self._lock:
            self._counts.corrupt += 1

    def discard(self, record: Record) -> None:
        """Mark a record of a failed request as lost, filled or not."""
        with self._lock:
            if isinstance(record.state, Lost):
                return
            record.lose(Why.load_failed, spoiled=True)
            self._counts.failed += 1
            self.remove(record, Why.load_failed)

    def cancel(self, record: Record, why: Why | None = None) -> None:
        """Cancel a record that is no longer needed, unless it is filled; lookups report `why`, see `remove`."""
        with self._lock:
            if not record.is_settled:
                record.lose(why or Why.load_failed)
                self.remove(record, why)

    # Pinning and eviction.

    def pin(self, records: Sequence[Record], by: int) -> None:
        """Change the number of handles that pin records by `by`."""
        with self._lock:
            for record in records:
                record.pins += by
            if by < 0:
                self._let_pass(records)

    def keep(self, entry: str, is_kept: bool) -> int:
        """Pin an image's present records for the user, or unpin them; return how many change.

        Raises:
          ValueError: they exceed `CacheConfig.pinned_share`. None of them is pinned then.
        """
        with self._lock:
            records = [record for record in self.records(entry) if record.is_kept is not is_kept]
            size = sum(record.meta.nbytes for record in records)
            share = int(self.config.pinned_share * self.tier.capacity)
            if is_kept and size > (left := share - self.tier.pinned_bytes):
                raise ValueError(
                    f"image must fit in the {left} bytes left for pinned entries, got {size} bytes of entry {entry}; "
                    "increase pinned_share or unpin other images"
                )
            for record in records:
                record.is_kept = is_kept
            self._let_pass(records)
            return len(records)

    def hold(self, records: Sequence[Record], by: int, *, to_write: bool = False) -> None:
        """Change the number of requests that will read records, or of tiers that will write them, by `by`."""
        with self._lock:
            for record in records:
                record.held += by
                record.writes += by * to_write
                # An evicted record without holders is lost.
                may_be_gone = record in self._left or record.state is State.reserved
                if not record.held and may_be_gone and self.tier.get(record.meta.name) is not record:
                    self._left.discard(record)
                    if record.state is State.reserved:
                        record.lose(Why.load_failed)  # it need not be filled
            if by < 0:
                self._let_pass(records)

    def _let_pass(self, records: Sequence[Record]) -> None:
        """Drop unused records that are being loaded, or all unused ones if host memory only passes records on."""
        with self._lock:
            for record in records:
                if (record.source is None and not self.config.passes_on) or not record.is_free:
                    continue
                if record.source is not None:
                    self.cancel(record)
                if self.config.passes_on and record.is_settled:
                    self.remove(record, None)

    def variants(self, entry: str) -> list[Meta]:
        """Return the descriptions of an image's KV that is stored or being filled, newest last."""
        with self._lock:
            return [record.meta for record in self._variants.get(entry, ())]

    def records(self, entry: str) -> list[Record]:
        """Return all complete records of an image."""
        with self._lock:
            return [record for record in self._records(entry) if record.is_ready]

    def _records(self, entry: str) -> list[Record]:
        encoder = self.tier.get(f"enc/{entry}")
        return [*self._variants.get(entry, ()), *([] if encoder is None else [encoder])]

    def evict(self, entry: str) -> set[str]:
        """Evict an image's records that are neither pinned nor about to be read; return their names."""
        with self._lock:
            leaving = [record for record in self.records(entry) if not record.is_needed]
            for record in leaving:
                self.remove(record, Why.evicted)
            return {record.meta.name for record in leaving}

    def expire(self, entry: str) -> None:
        """Remove an image that is older than `ttl`."""
        with self._lock:
            self._counts.expired += 1
            for record in self.records(entry):
                self.remove(record, Why.expired)

    def verify(self) -> list[str]:
        """Compare all checksums and remove damaged records; return their names."""
        records = [record for record in self.tier.records() if record.is_ready]
        damaged = [record for record in records if record.checksums() != record.meta.checksums]
        with self._lock:
            self._counts.corrupt += len(damaged)
            for record in damaged:
                self.remove(record, Why.corrupt)
        return [record.meta.name for record in damaged]

    def clear(self) -> None:
        """Remove every record. Counters continue."""
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
        """Remove a record, if it is still here, and remember the reason unless it is None."""
        with self._lock:
            if self.tier.remove(record):
                self._forget(record, why)

    def _forget(self, record: Record, why: Why | None) -> None:
        """Update the index after a record was removed."""
        self._forgotten(record)
        if record.held:
            self._left.add(record)
        elif record.state is State.reserved:
            record.lose(Why.load_failed)  # it need not be filled
        self._counts.evicted += record.is_ready and why in (Why.displaced, Why.evicted)
        if record.meta.context is not None:
            entry = record.meta.entry
            if why is not None:
                self._lost.note(record.meta, why)
            self._variants[entry].remove(record)
            if not self._variants[entry]:
                del self._variants[entry]


def _displaced(variants: Sequence[Record], new: Sequence[Meta], max_count: int | None) -> list[Record]:
    """Return the variants of an image that its new ones replace."""
    contexts = {meta.context for meta in new}
    staying = [record for record in variants if record.meta.context not in contexts]
    leaving = []
    if any(meta.canonical for meta in new):
        leaving = [record for record in staying if not record.meta.canonical]
        staying = [record for record in staying if record.meta.canonical]
    if max_count is not None:
        leaving += staying[: max(0, len(staying) + len(new) - max_count)]
    return [record for record in leaving if not record.is_pinned]


def _place(name: str) -> str:
    """Return the dictionary key of a name. If two names share a key, the name in the record decides."""
    return name
