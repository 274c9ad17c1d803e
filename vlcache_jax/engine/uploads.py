"""Cached KV on its way to the device: linked into the pool, encoded, and kept in the device tier.

An `Upload` brings the KV of a prefill group's images into the pool, some layers at a time, so that computing can begin
with the first layers.
"""

from __future__ import annotations

import functools
from collections import abc, deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from vlcache_jax.cache.device import DeviceTier, Index
from vlcache_jax.cache.record import Record, State, TierError
from vlcache_jax.device.buckets import round_up
from vlcache_jax.device.programs.base import Stored
from vlcache_jax.device.programs.memory import Code, EmptyTier, KeepLayer, KeepRows, Link, Recall
from vlcache_jax.device.runner import Runner
from vlcache_jax.engine.batching import Prefill, Step, linked_images
from vlcache_jax.engine.scheduler import PATIENCE
from vlcache_jax.inputs.layout import ImageSpan

Array = jax.Array | np.ndarray
Images = list[list[jax.Array]]  # of each image its planes


class DeviceCopies:
    """Runs the programs that move what is stored.

    Args:
      runner: whose device and pool it is.
      tier: says where in the device tier everything lies.
    """

    def __init__(self, runner: Runner, tier: DeviceTier):
        self.runner, self.tier = runner, tier
        self._arrays: tuple[list[list[jax.Array]], jax.Array] | None = None

    def reset(self) -> None:
        """What the device held is gone."""
        self.tier.clear()
        self._arrays = None

    def prepare(self) -> None:
        """Makes what the device tier holds; returns when it is there."""
        if self.tier.num_pages:
            jax.block_until_ready(self._now())

    def link(
        self, layers: slice, images: abc.Sequence[list[jax.Array]], places: Array, where: jax.Array | None
    ) -> jax.Array:
        """Writes stored K, V of images into some layers of the pool, and into the device tier if there is one.

        Args:
          images: of each its planes in these layers, see `Runner.put`; none: they are in the device tier.
          places: of each image where its tokens belong, see `Runner.places`; of those in the device tier of all
            together, [1, 4, n], n a rung of `recall_rungs`.
          where: of all their tokens, padded, the place in the device tier, int32: where they go, those beyond it not
            being kept, or where they come from, in the order that `kernels.link` asks of `source`.

        Returns:
          Something to wait for.
        """
        run, constants, size = self.runner.run, self.runner.constants[layers], places.shape[2]
        with self.runner.pool.taken() as pool:
            if not images:
                kept, _ = self._now()
                program = Recall(size, len(constants))
                pool[layers], done = run(program, pool[layers], kept[layers], where, places, constants)
            elif where is None:
                link = Link(size, len(images), len(constants))
                pool[layers], _, done = run(link, pool[layers], None, [*images], places, None, constants)
            else:
                link = Link(size, len(images), len(constants))
                kept, rows = self._take()
                pool[layers], kept[layers], done = run(
                    link, pool[layers], kept[layers], [*images], places, where, constants
                )
                self._arrays = kept, rows
        return done

    def capture(self, step: Step, captured: list[tuple[jax.Array, jax.Array]]) -> abc.Sequence[Stored]:
        """What a step computed of records to be filled: codes it, and keeps it in the device tier, if there is room.

        Args:
          captured: of each layer its rows' keys before rotation and values.

        Returns:
          Of each layer the same as it is stored.
        """
        layers: list[Stored] = [*captured]
        if self.runner.shapes.kv.codec is not None:
            pairs = zip(captured, self.runner.constants, strict=True)
            layers = [self.runner.run(Code(len(k)), k, v, constants) for (k, v), constants in pairs]
        if self.tier.num_pages:
            self._keep(step, layers)
        return layers

    def stage(self, source: Index, place: Index) -> None:
        """Makes encoder row `source[i]` of the device tier encoder row `place[i]` of the next step."""
        rungs = self.runner.token_rungs
        for first in range(0, len(source), rungs[-1]):
            some, to = source[first : first + rungs[-1]], place[first : first + rungs[-1]]
            missing = round_up(len(some), rungs) - len(some)
            nowhere = self.runner.ladder.max_rows + np.arange(missing, dtype=np.int32)
            _, kept = self._now()
            self.runner.restage(kept, np.pad(some, (0, missing)), np.concatenate([to, nowhere]))

    def _keep(self, step: Step, layers: abc.Sequence[Stored]) -> None:
        most = self.runner.ladder.max_rows
        nowhere = self.runner.shapes.kept_tokens + np.arange(most, dtype=np.int32)
        place, row_place = nowhere.copy(), nowhere.copy()
        placements = {placement.image.key: placement for placement in step.placements}
        for record, tokens, rows in step.captured:
            if (own := self.tier.begin(record)) is None:
                continue
            place[rows] = own[tokens]
            placement = placements.pop(record.meta.entry, None)  # once: another context of it has none
            count = 0
            if placement is not None:
                row_place[placement.place] = own[placement.image_row]
                count = len(placement.image_row)
            self.tier.fill(record, len(tokens), count)
        if (place >= self.runner.shapes.kept_tokens).all():
            return
        kept, encoder_rows = self._take()
        places, row_places = self.runner.devices.put((place, row_place))
        for layer, values in enumerate(layers):
            kept[layer] = self.runner.run(KeepLayer(step.bounds[layer]), kept[layer], values, places)
        encoder_rows = self.runner.run(KeepRows(), encoder_rows, self.runner.encoder_rows(), row_places)
        self._arrays = kept, encoder_rows

    def _now(self) -> tuple[list[list[jax.Array]], jax.Array]:
        if self._arrays is None:
            self._arrays = self.runner.run(EmptyTier())
        return self._arrays

    def _take(self) -> tuple[list[list[jax.Array]], jax.Array]:
        """For a program that takes it and returns it."""
        arrays, self._arrays = self._now(), None
        return arrays


class Transfers:
    """Brings records to the device.

    Args:
      runner: whose device it is.
    """

    def __init__(self, runner: Runner):
        self._runner = runner
        self._thread = ThreadPoolExecutor(1, "vlcache-transfers")

    def start(self, records: abc.Sequence[Record], layers: slice) -> Images | Future[Images]:
        """Some layers of records on the device, if need be later. The future has a TierError if one does not come."""
        if not records:
            return []
        if self._runner.reads_in_place:
            coming = [one for one in records if one.state is not State.ready and not one.has_arrived(layers.stop)]
            if not coming:
                return [one.lent.get(layers.start) or self._lent(one, layers) for one in records]

        def put() -> Images:
            for record in records:
                if not record.wait_for(layers.stop):
                    raise TierError(f"{record.meta.name} did not come")
            here = {id(record): self._put(record, layers) for record in records}
            return [here[id(record)] for record in records]  # a prompt may show an image twice

        return self._thread.submit(put)

    def _put(self, record: Record, layers: slice) -> list[jax.Array]:
        return self._runner.put([plane[layers] for plane in record.planes])

    def _lent(self, record: Record, layers: slice) -> list[jax.Array]:
        record.lent[layers.start] = lent = self._put(record, layers)
        return lent

    def close(self) -> None:
        """It brings nothing any more. Nobody waits for what is on its way."""
        self._thread.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, eq=False)
class _Batch:
    """Images that one program links.

    Attributes:
      records: of the images; empty: they are in the device tier.
      places: makes those of `Runner.places` when first asked: the first link waits for no others'.
      where: of images in the device tier, which of its tokens these are; of others, which they become. None: there is
        no such tier.
      promoted: the records that get a copy there.
    """

    records: tuple[Record, ...]
    places: abc.Callable[[], jax.Array | np.ndarray]
    where: jax.Array | None
    promoted: tuple[Record, ...] = ()


@dataclass(frozen=True, eq=False)
class _Piece:
    """A batch in some layers."""

    batch: _Batch
    layers: slice

    @functools.cached_property
    def nbytes(self) -> int:
        """That have to come."""
        return sum([plane[self.layers].nbytes for record in self.batch.records for plane in record.planes])


class Upload:
    """Brings the stored images of some prefills to the device and links them.

    Args:
      copies: links, and says what is on the device already.
      transfers: bring records to its device.
      prefills: these.
    """

    def __init__(self, copies: DeviceCopies, transfers: Transfers, prefills: abc.Iterable[Prefill]):
        self._copies, self._runner, self._transfers = copies, copies.runner, transfers
        self._reads_in_place = copies.runner.reads_in_place
        batches = list(_batches(copies, linked_images(prefills)))
        groups = self._runner.shapes.link_groups
        self._waiting = deque(_Piece(batch, layers) for layers in groups for batch in batches)
        self._started: deque[tuple[_Piece, Images | Future[Images]]] = deque()
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
        while self._start() and _has_come(self._started[0][1]):
            piece, coming = self._started.popleft()
            images, batch = coming if isinstance(coming, list) else coming.result(), piece.batch
            read += jax.tree.leaves(images)
            done.append(self._copies.link(piece.layers, images, batch.places(), batch.where))
            if piece.layers.stop == self._runner.config.text.num_layers:
                for record in batch.promoted:
                    self._copies.tier.fill(record, record.meta.tokens, 0)
            self._linked.append((0 if self._reads_in_place else piece.nbytes, done[-1]))
        return read, done

    @property
    def layers(self) -> int:
        """The first layer whose links have not all been launched; beyond the last one if they have."""
        pending = [piece for piece, _ in self._started] or self._waiting
        return pending[0].layers.start if pending else self._runner.config.text.num_layers

    def wait(self) -> None:
        """Waits for what the next link lacks, but not for long: others may arrive meanwhile, or be aborted."""
        if self._started:
            wait([coming for _, coming in self._started if isinstance(coming, Future)][:1], PATIENCE)
        elif self._waiting:
            self._linked[0][1].block_until_ready()

    def cancel(self) -> None:
        """Nobody wants the rest any more."""
        for _, coming in self._started:
            if isinstance(coming, Future):
                coming.cancel()

    def _start(self) -> bool:
        """Starts transfers, as long as what is on its way is not too much; whether some have been started."""
        while self._linked and _is_ready(self._linked[0][1]):
            self._linked.popleft()
        if self._reads_in_place:  # nothing moves, so the next one begins when the one before is linked
            if self._waiting and not self._started:
                self._begin()
            return bool(self._started)
        under_way = sum([size for size, _ in self._linked]) + sum([piece.nbytes for piece, _ in self._started])
        while self._waiting and (not under_way or under_way + self._waiting[0].nbytes <= self._runner.transfer_bytes):
            under_way += self._begin().nbytes
        return bool(self._started)

    def _begin(self) -> _Piece:
        """Starts the transfer of the next piece."""
        piece = self._waiting.popleft()
        self._started.append((piece, self._transfers.start(piece.batch.records, piece.layers)))
        return piece


def _is_ready(array: Any) -> bool:
    return bool(array.is_ready())


def _has_come(coming: Images | Future[Images]) -> bool:
    return isinstance(coming, list) or coming.done()


def _batches(
    copies: DeviceCopies, images: abc.Sequence[tuple[Record, list[tuple[Prefill, ImageSpan]]]]
) -> abc.Iterator[_Batch]:
    """Images that are linked together, and where their tokens belong."""
    runner, tier = copies.runner, copies.tier
    if tier.num_pages:
        tier.need([record for record, _ in images])
    here: list[tuple[Index, Prefill, ImageSpan]] = []
    by_size: dict[int, list[tuple[Record, Prefill, ImageSpan]]] = {}
    for record, users in images:
        if tier.num_pages and (place := tier.find(record)) is not None:
            here += [(place, *user) for user in users]
        else:
            by_size.setdefault(record.meta.padded, []).extend([(record, *user) for user in users])
    if here:
        yield from _recalls(runner, here)
    promoted: set[Record] = set()
    for size, alike in by_size.items():
        for count in runner.shapes.split_links(size, len(alike)):
            some, alike = alike[:count], alike[count:]
            places = functools.partial(_places, runner, [(prefill, span) for _, prefill, span in some], size)
            records = tuple([record for record, _, _ in some])
            if not tier.num_pages:
                yield _Batch(records, functools.cache(places), None)
                continue
            new = [record for record in dict.fromkeys(records) if record not in promoted]
            promoted.update(new)
            yield _Batch(records, functools.cache(places), _promoted(copies, records, new, size), tuple(new))


def _places(runner: Runner, users: abc.Sequence[tuple[Prefill, ImageSpan]], size: int) -> jax.Array | np.ndarray:
    slots = [prefill.to_link[span.tokens] for prefill, span in users]
    positions = [prefill.layout.positions[:, span.tokens] for prefill, span in users]
    return runner.places(slots, positions, size)


def _recalls(runner: Runner, here: abc.Sequence[tuple[Index, Prefill, ImageSpan]]) -> abc.Iterator[_Batch]:
    """Of images in the device tier, as many tokens together as one program links, whosever they are."""
    size = sum(len(place) for place, _, _ in here)
    source, slots = np.concatenate([place for place, _, _ in here]), np.full(size, runner.num_slots, np.int32)
    positions = np.zeros((3, size), np.int32)
    first = 0
    for place, prefill, span in here:
        own = slice(first, first + span.length)
        slots[own], positions[:, own] = prefill.to_link[span.tokens], prefill.layout.positions[:, span.tokens]
        first += len(place)
    first = 0
    for rung in runner.shapes.split_recalls(span.length for _, _, span in here):
        some = slice(first, first + rung)
        padded = np.pad(source[some], (0, max(0, first + rung - size)))
        places = functools.partial(runner.places, [slots[some]], [positions[:, some]], rung)
        yield _Batch((), functools.cache(places), runner.devices.put(padded))
        first += rung


def _promoted(copies: DeviceCopies, records: abc.Sequence[Record], new: abc.Iterable[Record], size: int) -> jax.Array:
    """Where in the device tier the tokens of records go on their way, of those that are `new`."""
    tokens = copies.runner.shapes.kept_tokens
    where = tokens + np.arange(len(records) * size, dtype=np.int32)  # nowhere
    for record in new:
        if (place := copies.tier.take(record)) is not None:
            first = records.index(record) * size
            where[first : first + record.meta.tokens] = place[: record.meta.tokens]
    return copies.runner.devices.put(where)
