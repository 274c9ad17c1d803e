"""Filling of cache entries off the critical path, from arrays on the device."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from vlcache_jax.cache.record import Record, State
from vlcache_jax.cache.store import Store

_log = logging.getLogger(__name__)


class EntrySlots(NamedTuple):
    """Slots of states that a cache entry is stored from or loaded into; 0: none.

    Attributes:
      state: slot of the states after the image.
      added, passed: slots of B and A of its map.
    """

    state: int = 0
    added: int = 0
    passed: int = 0


class SavedTokens(NamedTuple):
    """Tokens of a cache entry that a prefill chunk computed: row `rows[i]` of the chunk is token `tokens[i]`.

    If the last token is among them and the model has states, `slots` has what the entry stores of these.
    """

    record: Record
    tokens: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    slots: EntrySlots | None = None


class _PendingCopy(NamedTuple):
    """Copy that waits for the writer thread.

    Attributes:
      work: function that copies.
      records: cache entries that it settles.
      sizes: bytes of the device arrays that it reads, by their identity; they stay allocated until it is done.
    """

    work: Callable[[], None]
    records: Sequence[Record]
    sizes: Mapping[int, int]


class Writer:
    """Thread that copies to the host and settles cache entries.

    Requested copies start with `begin`. A device copies to the host one array at a time, and these copies are large, so
    they must not delay the copies of new tokens.

    Attributes:
      requested: number of copies requested so far.

    Args:
      store: store of the cache entries.
      copies: number of copies of each KV head in computed arrays; a cache entry has one.
    """

    def __init__(self, store: Store, copies: int = 1):
        self._store, self._copies = store, copies
        self._thread = ThreadPoolExecutor(1, "vlcache-writer")
        self.requested = 0
        self._waiting: deque[_PendingCopy] = deque()
        self._running: deque[tuple[Future[None], Mapping[int, int]]] = deque()
        self._lock = threading.Lock()

    def encoder(self, record: Record, encoded: jax.Array, first: int) -> None:
        """Request to fill `record` from `encoded`, [1 + J, T, M], starting at row `first`."""

        def fill() -> None:
            if not record.is_settled:
                tokens = record.meta.tokens
                record.data[:, :tokens] = np.asarray(encoded)[:, first : first + tokens]
                self._store.publish(record)

        self._enqueue([encoded], [record], fill)

    def kv(self, saved: Sequence[SavedTokens], layers: Sequence[tuple[jax.Array, jax.Array] | jax.Array]) -> None:
        """Request to fill cache entries with keys and values of a prefill chunk.

        At most two layers are copied at a time, so that copies of new tokens do not wait long.

        Args:
          saved: tokens of the chunk and their cache entries.
          layers: per layer keys before rotation and values in stored form, see `Record.put`: a pair of [N, K, ...], or
            one array [2, N, K, ...].
        """

        def fill() -> None:
            wanted = [part for part in saved if not part.record.is_settled]
            if not wanted:
                return
            jax.copy_to_host_async(layers[:1])
            for layer, halves in enumerate(layers):
                jax.copy_to_host_async(layers[layer + 1 : layer + 2])
                for half, values in enumerate(jax.tree.map(np.asarray, halves)):
                    heads = values[:, :: self._copies]
                    for record, tokens, rows, _ in wanted:
                        record.put(layer, half, tokens, heads[rows])
            for part in wanted:
                self._arrived(part.record, len(part.tokens))

        self._enqueue(jax.tree.leaves(layers), [part.record for part in saved], fill)

    def states(self, record: Record, states: Sequence[jax.Array], maps: jax.Array | None = None) -> None:
        """Request to fill a cache entry with a snapshot, or with what belongs to its image.

        Args:
          record: the entry.
          states: columns of `Record.states`, [L, n] each.
          maps: `Record.maps`; None if it has none.
        """

        def fill() -> None:
            if not record.is_settled and record.states is not None:
                np.concatenate(states, axis=1, out=record.states)
                if record.maps is not None:
                    record.maps[:] = maps
                self._arrived(record, 1)

        self._enqueue([*states, *([] if maps is None else [maps])], [record], fill)

    def _arrived(self, record: Record, count: int) -> None:
        """Note that `count` of what a cache entry lacks has been copied, see `Record.missing`."""
        record.missing -= count
        if record.meta.is_snapshot:
            record.complete()
        elif not record.missing:
            self._store.publish(record)

    def begin(self, last: int | None = None) -> None:
        """Start requested copies. The results launched before them are no longer urgent, or the caller cannot wait.

        Args:
          last: number of the last copy to start, counted like `requested`; None: all.
        """
        with self._lock:
            count = len(self._waiting) if last is None else last - (self.requested - len(self._waiting))
            for _ in range(count):
                self._begin_next()

    def end(self, records: Sequence[Record], *, failed: bool) -> None:
        """Settle the entries of a request that has ended: those not being filled are cancelled.

        Args:
          records: cache entries that the request was to fill.
          failed: discard all of them, filled or not.
        """
        filling = [record for record in records if record.state is State.filling]
        for record in records:
            if failed and record not in filling:
                self._store.discard(record)
            elif record.state is State.reserved:
                self._store.cancel(record)

        def drop() -> None:
            for record in filling:
                self._store.discard(record)

        if failed and filling:
            # Queue it after the copies that fill them, so that non-finite ones are counted as such.
            self.begin()
            with self._lock:
                self._submit(_PendingCopy(drop, filling, {}))

    def throttle(self, max_bytes: int) -> None:
        """Wait until pending copies occupy at most `max_bytes` of device memory, starting copies as necessary."""
        while True:
            with self._lock:
                while self._running and self._running[0][0].done():
                    self._running.popleft()
                sizes = [*(sizes for _, sizes in self._running), *(copy.sizes for copy in self._waiting)]
                if sum(dict(item for one in sizes for item in one.items()).values()) <= max_bytes:
                    return
                if not self._running:
                    self._begin_next()
                    continue
                first, _ = self._running[0]
            first.result()  # it stays in the queue for other waiting threads

    def flush(self) -> None:
        """Wait for all requested copies."""
        self.begin()
        with self._lock:
            running = [future for future, _ in self._running]
        for future in running:
            future.result()

    def close(self) -> None:
        self.begin()
        self._thread.shutdown()

    def _enqueue(self, arrays: Sequence[jax.Array], records: Sequence[Record], fill: Callable[[], None]) -> None:
        for record in records:
            record.begin()
        with self._lock:
            self._waiting.append(_PendingCopy(fill, records, {id(array): array.nbytes for array in arrays}))
            self.requested += 1

    def _begin_next(self) -> None:
        self._submit(self._waiting.popleft())

    def _submit(self, copy: _PendingCopy) -> None:
        """Submit a copy. The caller has the lock, so that copies run in order."""
        work, records, sizes = copy

        def run() -> None:
            try:
                work()
            except Exception:  # no output depends on it
                _log.exception("%d cache entries could not be filled", len(records))
                for record in records:
                    self._store.withdraw(record)

        try:
            self._running.append((self._thread.submit(run), sizes))
        except RuntimeError:  # the process ends
            _log.warning("%d cache entries were not stored because the process ends; call close() first", len(records))
