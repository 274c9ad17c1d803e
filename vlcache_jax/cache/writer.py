"""Fills records off the critical path, from what a run leaves on the device."""

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


class Captured(NamedTuple):
    """Row `rows[i]` of a step is token `tokens[i]` of the image whose K, V the record is to hold."""

    record: Record
    tokens: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]


class _PendingCopy(NamedTuple):
    """What the thread is to do.

    Attributes:
      work: this.
      records: that it settles.
      sizes: bytes of the arrays that it reads, which occupy the device until it is done, by their identity.
    """

    work: Callable[[], None]
    records: Sequence[Record]
    sizes: Mapping[int, int]


class Writer:
    """One thread that copies to the host and settles records.

    What is asked for waits for `begin`: a device copies to the host one thing after the other, these are large, and an
    answer waits for its tokens.

    Attributes:
      asked: how many copies have been asked for so far.

    Args:
      store: of the records.
      copies: of each KV head among what a run leaves; a record has one.
    """

    def __init__(self, store: Store, copies: int = 1):
        self._store, self._copies = store, copies
        self._thread = ThreadPoolExecutor(1, "vlcache-writer")
        self.asked = 0
        self._waiting: deque[_PendingCopy] = deque()
        self._running: deque[tuple[Future[None], Mapping[int, int]]] = deque()
        self._lock = threading.Lock()

    def encoder(self, record: Record, encoded: jax.Array, first: int) -> None:
        """The record's rows begin at row `first` of `encoded`, [1 + J, T, M]."""

        def fill() -> None:
            if not record.is_settled:
                tokens = record.meta.tokens
                record.data[:, :tokens] = np.asarray(encoded)[:, first : first + tokens]
                self._store.publish(record)

        self._ask([encoded], [record], fill)

    def kv(self, captured: Sequence[Captured], layers: Sequence[tuple[jax.Array, jax.Array] | jax.Array]) -> None:
        """Rows of a step are what these are to hold. Two layers are on their way at most: tokens, which may be launched
        and copied meanwhile, wait for no more.

        Args:
          layers: of each, keys before rotation and values as they are stored, see `Record.put`: [N, K, ...] twice, or
            [2, N, K, ...].
        """

        def fill() -> None:
            wanted = [part for part in captured if not part.record.is_settled]
            if not wanted:
                return
            jax.copy_to_host_async(layers[:1])
            for layer, halves in enumerate(layers):
                jax.copy_to_host_async(layers[layer + 1 : layer + 2])
                for half, values in enumerate(jax.tree.map(np.asarray, halves)):
                    heads = values[:, :: self._copies]
                    for record, tokens, rows in wanted:
                        record.put(layer, half, tokens, heads[rows])
            for record, tokens, _ in wanted:
                record.missing -= len(tokens)
                if not record.missing:
                    self._store.publish(record)

        self._ask(jax.tree.leaves(layers), [part.record for part in captured], fill)

    def begin(self, last: int | None = None) -> None:
        """Begins what has been asked for; others need what was launched before it no more, or cannot wait.

        Args:
          last: number of the last copy, as `asked` counts; None: all.
        """
        with self._lock:
            count = len(self._waiting) if last is None else last - (self.asked - len(self._waiting))
            for _ in range(count):
                self._begin_next()

    def end(self, records: Sequence[Record], *, failed: bool) -> None:
        """Whoever was to have these filled has ended; what nobody has begun to fill, nobody will.

        Args:
          failed: they are of no use, filled or not.
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
            # Behind what fills them: one that is not finite is to be counted as that.
            self.begin()
            with self._lock:
                self._submit(_PendingCopy(drop, filling, {}))

    def throttle(self, most: int) -> None:
        """Waits until what copies read occupies at most so many bytes of the device. It lets copies begin for that."""
        while True:
            with self._lock:
                while self._running and self._running[0][0].done():
                    self._running.popleft()
                sizes = [*(sizes for _, sizes in self._running), *(copy.sizes for copy in self._waiting)]
                if sum(dict(item for one in sizes for item in one.items()).values()) <= most:
                    return
                if not self._running:
                    self._begin_next()
                    continue
                first, _ = self._running[0]
            first.result()  # it stays in the queue, for whoever else waits

    def flush(self) -> None:
        """Waits for everything that has been asked for."""
        self.begin()
        with self._lock:
            running = [future for future, _ in self._running]
        for future in running:
            future.result()

    def close(self) -> None:
        self.begin()
        self._thread.shutdown()

    def _ask(self, arrays: Sequence[jax.Array], records: Sequence[Record], fill: Callable[[], None]) -> None:
        for record in records:
            record.begin()
        with self._lock:
            self._waiting.append(_PendingCopy(fill, records, {id(array): array.nbytes for array in arrays}))
            self.asked += 1

    def _begin_next(self) -> None:
        self._submit(self._waiting.popleft())

    def _submit(self, copy: _PendingCopy) -> None:
        """The lock is held, so that they run in their order."""
        work, records, sizes = copy

        def run() -> None:
            try:
                work()
            except Exception:  # whatever it was, the answer does not depend on it
                _log.exception("%d records could not be filled", len(records))
                for record in records:
                    self._store.withdraw(record)

        try:
            self._running.append((self._thread.submit(run), sizes))
        except RuntimeError:  # the process ends, and nobody will ask for these records
            _log.warning("%d records were not stored, as the process ends; close() waits for them", len(records))
