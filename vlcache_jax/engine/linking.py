"""Stored K, V of a turn's images on their way into the pool: group of layers by group of layers, so that computing can
begin with those that are there."""

from __future__ import annotations

import functools
import math
from collections import abc, deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import jax

from vlcache_jax.cache.record import Record, TierError
from vlcache_jax.engine.batching import Prefill, linked_images
from vlcache_jax.engine.runner import Runner
from vlcache_jax.inputs.layout import ImageSpan

_PATIENCE = 0.1  # seconds


class Transfers:
    """Brings records to the device.

    Args:
      runner: whose device it is.
    """

    def __init__(self, runner: Runner):
        self._runner = runner
        self._thread = ThreadPoolExecutor(1, "vlcache-transfers")

    def start(self, records: abc.Sequence[Record], layers: slice) -> Future[list[jax.Array]]:
        """Some layers of records on the device. The future has a TierError if one does not come."""
        if self._runner.is_host and all(record.has_arrived(layers.stop) for record in records):
            here: Future[list[jax.Array]] = Future()  # nothing has to move
            here.set_result([self._lent(record, layers) for record in records])
            return here

        def put() -> list[jax.Array]:
            for record in records:
                if not record.wait_for(layers.stop):
                    raise TierError(f"{record.meta.name} did not come")
            here = {id(record): self._runner.put(record.data[layers]) for record in records}
            return [here[id(record)] for record in records]  # a prompt may show an image twice

        return self._thread.submit(put)

    def _lent(self, record: Record, layers: slice) -> jax.Array:
        if layers.start not in record.lent:
            record.lent[layers.start] = self._runner.put(record.data[layers])
        return record.lent[layers.start]

    def close(self) -> None:
        """It brings nothing any more. Nobody waits for what is on its way."""
        self._thread.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, eq=False)
class _Piece:
    """Images that one program links in some layers.

    Attributes:
      records: of the images.
      places: see `Runner.places`.
      layers: these.
    """

    records: tuple[Record, ...]
    places: jax.Array
    layers: slice

    @functools.cached_property
    def nbytes(self) -> int:
        """That its records have in these layers."""
        return sum(record.data[self.layers].nbytes for record in self.records)


class Linking:
    """Links the stored images of some prefills.

    Args:
      runner: computes.
      transfers: bring records to its device.
      prefills: these.
    """

    def __init__(self, runner: Runner, transfers: Transfers, prefills: abc.Iterable[Prefill[Any]]):
        self._runner, self._transfers = runner, transfers
        batches = list(_batches(runner, linked_images(prefills)))
        groups = runner.definitions.link_groups
        self._waiting = deque(_Piece(*batch, layers) for layers in groups for batch in batches)
        self._started: deque[tuple[_Piece, Future[list[jax.Array]]]] = deque()
        self._linked: deque[tuple[int, jax.Array]] = deque()  # bytes that their programs read until they are ready

    def advance(self) -> tuple[list[jax.Array], list[jax.Array]]:
        """Launches the links whose records are there.

        Returns:
          What they read, and what is ready when they have been done.

        Raises:
          TierError: a record does not come.
        """
        read: list[jax.Array] = []
        done: list[jax.Array] = []
        while self._start() and self._started[0][1].done():
            piece, coming = self._started.popleft()
            data = coming.result()
            read += data
            done.append(self._runner.link(piece.layers, data, piece.places))
            self._linked.append((piece.nbytes, done[-1]))
        return read, done

    @property
    def layers(self) -> int:
        """The first layer whose links have not all been launched; beyond the last one if they have."""
        pending = [piece for piece, _ in self._started] or self._waiting
        return pending[0].layers.start if pending else self._runner.config.text.num_layers

    def wait(self) -> None:
        """Waits for what the next link lacks, but not for long: others may arrive meanwhile, or be aborted."""
        if self._started:
            wait([self._started[0][1]], _PATIENCE)
        elif self._waiting:
            self._linked[0][1].block_until_ready()

    def cancel(self) -> None:
        """Nobody wants the rest any more."""
        for _, coming in self._started:
            coming.cancel()

    def _start(self) -> bool:
        """Starts transfers, as long as what is on its way is not too much; whether some have been started."""
        while self._linked and _is_ready(self._linked[0][1]):
            self._linked.popleft()
        under_way = sum(size for size, _ in self._linked) + sum(piece.nbytes for piece, _ in self._started)
        most = math.inf if self._runner.is_host else self._runner.transfer_bytes
        while self._waiting and (not under_way or under_way + self._waiting[0].nbytes <= most):
            piece = self._waiting.popleft()
            self._started.append((piece, self._transfers.start(piece.records, piece.layers)))
            under_way += piece.nbytes
        return bool(self._started)


def _is_ready(array: Any) -> bool:
    return bool(array.is_ready())


def _batches(
    runner: Runner, images: abc.Iterable[tuple[Record, list[tuple[Prefill[Any], ImageSpan]]]]
) -> abc.Iterator[tuple[tuple[Record, ...], jax.Array]]:
    """Records that are linked by one program, and where their tokens belong."""
    by_size: dict[int, list[tuple[Record, Prefill[Any], ImageSpan]]] = {}
    for record, users in images:
        by_size.setdefault(record.meta.padded, []).extend((record, *user) for user in users)
    for size, alike in by_size.items():
        for count in runner.definitions.split_links(size, len(alike)):
            some, alike = alike[:count], alike[count:]
            slots = [prefill.to_link[span.tokens] for _, prefill, span in some]
            positions = [prefill.layout.positions[:, span.tokens] for _, prefill, span in some]
            yield tuple(record for record, _, _ in some), runner.places(slots, positions, size)
