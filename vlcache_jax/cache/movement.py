"""Records move between host memory and the tiers outside it, in the background.

What a request looks up and host memory lacks gets its place there at once, and comes part by part. What has been filled
is written to every tier. A fault of a tier is counted, and the request computes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from vlcache_jax.cache.record import DamagedError, Meta, Record, Tier, TierError, verified
from vlcache_jax.cache.record_file import fitted
from vlcache_jax.cache.store import Store
from vlcache_jax.cache.why import Why

_log = logging.getLogger(__name__)

_READERS = 2  # threads that bring records in


class Movement:
    """Between a store and the tiers outside host memory, the fastest first.

    Args:
      store: whose records they are.
      tiers: may be none.
      room: for how many tokens records of so many have room in memory.
    """

    def __init__(self, store: Store, tiers: Sequence[Tier], room: Callable[[int], int]):
        self._store, self._tiers, self._room = store, tuple(tiers), room
        self._most = store.tier.capacity // 2  # bytes that wait to be written; what comes then is not written
        self._readers = ThreadPoolExecutor(_READERS, "vlcache-load")
        self._writer = ThreadPoolExecutor(1, "vlcache-keep")
        self._loading: set[Future[None]] = set()
        self._writing: dict[Future[None], int] = {}  # bytes
        self._lock = threading.Lock()
        self._is_closing = False
        if tiers:
            store.published, store.elsewhere = self.keep, self._has_rows

    def bring_in(self, entry: str, context: str, *, approximate: bool) -> dict[str, str]:
        """Begins to load what is kept of an image, and is not in host memory.

        Args:
          entry, context, approximate: as in `Store.lookup`, which finds the records from now on.

        Returns:
          Names of the records that come, and the label of the tier that each comes from.
        """
        if not self._tiers:
            return {}
        found: dict[str, tuple[Tier, Meta]] = {}
        kv = self._store.tier.get(name := f"kv/{entry}/{context}")
        known = None if kv is None else kv.meta
        if known is None:
            found |= self._find([name])
            if name in found and not (approximate or _is_exact(found[name][1])):
                del found[name]
            if name not in found and approximate and not self._store.has_variants(entry):
                found |= self._find_variant(entry)
            known = next((meta for _, meta in found.values()), None)
        computes = known is None or known.name != name or not _is_exact(known)  # some rows, from the encoder's
        if computes and self._store.tier.get(name := f"enc/{entry}") is None:
            found |= self._find([name])
        return {name: tier.label for name, (tier, meta) in found.items() if self._begin(tier, meta)}

    def wait(self) -> None:
        """Until all that has been begun to load is there, or is known not to come."""
        with self._lock:
            loading = list(self._loading)
        for future in loading:
            future.exception()

    def keep(self, record: Record) -> None:
        """Begins to write a record to every tier."""
        if record.is_loading:
            return
        size = record.meta.nbytes
        with self._lock:
            waiting = sum(self._writing.values())
            if self._is_closing or (waiting and waiting + size > self._most):
                self._store.add(disk_skipped=1)
                return
            self._store.hold(record, 1)
            future = self._writer.submit(self._write, record)
            self._writing[future] = size
        future.add_done_callback(self._written)

    def delete(self, entry: str, pinned: Collection[str] = ()) -> set[str]:
        """Removes an image's records from every tier, but not some names; returns those that it removed."""
        names: set[str] = set()
        for tier in self._tiers:
            try:
                there = {name for name in tier.keys(f"enc/{entry}") if name == f"enc/{entry}"}
                for name in there.union(tier.keys(f"kv/{entry}/")).difference(pinned):
                    tier.delete(name)
                    names.add(name)
            except Exception as error:
                self._fault(error)
        return names

    def is_owner(self, owner: str, entry: str) -> bool:
        """Whether a tier has records of an entry key that was made under the owner's salt."""
        for tier in self._tiers:
            try:
                there = self._find(tier.keys(f"enc/{entry}") or tier.keys(f"kv/{entry}/"))
            except Exception as error:
                self._fault(error)
                continue
            if there:
                return all(meta.owner == owner for _, meta in there.values())
        return False

    def flush(self) -> None:
        """Waits until everything published so far is kept in every tier."""
        with self._lock:
            writing = list(self._writing)
        for future in writing:
            future.exception()

    def counts(self) -> dict[str, int]:
        """Of all tiers."""
        counts: dict[str, int] = {}
        for tier in self._tiers:
            try:
                counts |= tier.counts()
            except Exception as error:
                self._fault(error)
        return counts

    def close(self) -> None:
        """What was published is kept, what is being loaded is given up."""
        with self._lock:
            self._is_closing = True
        self._writer.shutdown()
        self._readers.shutdown(cancel_futures=True)
        for tier in self._tiers:
            try:
                tier.close()
            except Exception as error:
                self._fault(error)

    def _find(self, names: Sequence[str]) -> dict[str, tuple[Tier, Meta]]:
        """Of some records, the fastest tier that has them."""
        found: dict[str, tuple[Tier, Meta]] = {}
        for tier in self._tiers:
            for name in names:
                try:
                    meta = None if name in found else tier.meta(name)
                except Exception as error:
                    self._fault(error)
                    continue
                if meta is not None and meta.name == name:
                    found[name] = tier, meta
        return found

    def _has_rows(self, entry: str) -> bool:
        """Whether some tier has an image's encoder rows."""
        return bool(self._find([f"enc/{entry}"]))

    def _find_variant(self, entry: str) -> dict[str, tuple[Tier, Meta]]:
        """K, V of an image in any context: of the canonical ones the newest, if there is one."""
        for tier in self._tiers:
            try:
                there = self._find(tier.keys(f"kv/{entry}/"))
            except Exception as error:
                self._fault(error)
                continue
            canonical = [name for name, (_, meta) in there.items() if meta.canonical]
            if there:
                name = (canonical or list(there))[-1]
                return {name: there[name]}
        return {}

    def _begin(self, tier: Tier, meta: Meta) -> bool:
        with self._lock:
            if self._is_closing or self._store.tier.get(meta.name) is not None:  # another request has begun it
                return False
            room = fitted(meta, self._room(meta.tokens))
            [record] = self._store.reserve([replace(room, checksums=())], loading=True)
            if record is None:
                return False
            future = self._readers.submit(self._load, tier, meta, record)
            self._loading.add(future)
        future.add_done_callback(self._loading.discard)
        return True

    def _load(self, tier: Tier, meta: Meta, record: Record) -> None:
        _fill(self._store, tier, meta, record, lambda: self._is_closing)
        self._store.add(disk_loaded=int(record.is_ready), disk_failed=int(not record.is_ready))

    def _write(self, record: Record) -> None:
        try:
            for tier in self._tiers:
                if record.is_ready:
                    parts = dict(zip(record.meta.parts, record.data, strict=True))
                    is_kept = tier.write(record.meta, parts)
                    self._store.add(disk_stored=int(is_kept), disk_skipped=int(not is_kept))
                if not record.is_ready:  # of a request that has failed
                    tier.delete(record.meta.name)
        except Exception as error:  # whatever it was, the answer does not depend on it
            self._fault(error)
        finally:
            self._store.hold(record, -1)

    def _written(self, future: Future[None]) -> None:
        with self._lock:
            self._writing.pop(future)

    def _fault(self, error: Exception) -> None:
        """Whatever it was, no answer depends on it."""
        _log.warning("%s", error)
        self._store.add(disk_failed=1)


def load(store: Store, tier: Tier, name: str) -> Record | None:
    """Brings a record into host memory, with room for as many tokens as it has in the tier.

    Returns:
      The record, verified; None if there is no such record, or no room, or if it is damaged or cannot be read.
    """
    meta = tier.meta(name)
    if meta is None or meta.name != name:
        return None
    [record] = store.reserve([replace(meta, checksums=())], loading=True)
    if record is not None:
        _fill(store, tier, meta, record)
    return record if record is not None and record.is_ready else None


def _fill(
    store: Store, tier: Tier, meta: Meta, record: Record, is_unwanted: Callable[[], bool] = lambda: False
) -> None:
    """Fills a record that has its place.

    Args:
      meta: as the tier says it.
      is_unwanted: whether nobody needs it any more.
    """
    try:
        missing = set(meta.parts)
        whole = replace(record.meta, checksums=meta.checksums)
        places = dict(zip(meta.parts, record.data, strict=True))
        for part, array in tier.read(meta.name, meta.parts, places.__getitem__):
            if is_unwanted():
                raise TierError(f"{meta.name}: nobody needs it any more")
            number = meta.parts.index(part)
            if verified(whole, part, array) is not places[part]:
                places[part][:] = array
            if not record.is_finite(slice(number, number + 1)):  # it may be linked from here on
                store.withdraw(record, Why.not_finite)
            missing.discard(part)
            record.arrive(next((i for i, one in enumerate(meta.parts) if one in missing), len(meta.parts)))
        if missing:
            raise TierError(f"{meta.name}: {missing} did not come")
        store.publish(record)
    except Exception as error:  # whatever it was, the answer does not depend on it
        _log.warning("record %s could not be loaded", meta.name, exc_info=True)
        if isinstance(error, DamagedError):
            store.withdraw(record, Why.corrupt)
            with contextlib.suppress(Exception):
                tier.delete(meta.name)
    finally:
        store.withdraw(record)  # unless it is settled by now


def _is_exact(meta: Meta) -> bool:
    """Whether K, V may be linked in their own context as if they had just been computed."""
    return meta.canonical and not meta.planes
