"""Fills records off the critical path, from what a run leaves on the device."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
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


class Writer:
    """One thread that copies to the host and settles records. Copies start when a method is called."""

    def __init__(self, store: Store):
        self._store = store
        self._thread = ThreadPoolExecutor(1, "vlcache-writer")
        self._running: deque[Future[None]] = deque()
        self._lock = threading.Lock()

    def encoder(self, record: Record, encoded: jax.Array, first: int) -> None:
        """The record's rows begin at row `first` of `encoded`, [1 + J, T, M]."""

        def fill() -> None:
            if not record.is_settled:
                tokens = record.meta.tokens
                record.data[:, :tokens] = np.asarray(encoded)[:, first : first + tokens]
                self._store.publish(record)

        self._start([encoded], [record], fill)

    def kv(self, captured: Sequence[Captured], layers: Sequence[tuple[jax.Array, jax.Array] | jax.Array]) -> None:
        """Rows of a step are what these are to hold.

        Args:
          layers: of each, keys before rotation and values as they are stored, see `Record.put`: [N, K, ...] twice, or
            [2, N, K, ...].
        """

        def fill() -> None:
            wanted = [part for part in captured if not part.record.is_settled]
            for layer, halves in enumerate(layers):
                for half, values in enumerate(jax.tree.map(np.asarray, halves)):
                    for record, tokens, rows in wanted:
                        record.put(layer, half, tokens, values[rows])
            for record, tokens, _ in wanted:
                record.missing -= len(tokens)
                if not record.missing:
                    self._store.publish(record)

        self._start(jax.tree.leaves(layers), [part.record for part in captured], fill)

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
            self._submit(drop, filling)  # behind what fills them: one that is not finite is to be counted as that

    def throttle(self, most: int) -> None:
        """Waits until at most `most` copies are under way: what they read occupies the device."""
        while True:
            with self._lock:
                while self._running and self._running[0].done():
                    self._running.popleft()
                if len(self._running) <= most:
                    return
                first = self._running[0]
            first.result()  # it stays in the queue, for whoever else waits

    def flush(self) -> None:
        """Waits for everything."""
        self.throttle(0)

    def close(self) -> None:
        self._thread.shutdown()

    def _start(self, arrays: Sequence[jax.Array], records: Sequence[Record], fill: Callable[[], None]) -> None:
        for record in records:
            record.begin()
        for array in arrays:
            array.copy_to_host_async()
        self._submit(fill, records)

    def _submit(self, work: Callable[[], None], records: Sequence[Record]) -> None:
        def job() -> None:
            try:
                work()
            except Exception:  # whatever it was, the answer does not depend on it
                _log.exception("%d records could not be filled", len(records))
                for record in records:
                    self._store.withdraw(record)

        with self._lock:
            self._running.append(self._thread.submit(job))
