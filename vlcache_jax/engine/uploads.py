"""Cached KV on the device: linked into the pool, converted to the cache's format, and kept in the device tier.

An `Upload` brings the KV of a prefill group's images into the pool, some layers at a time, so that computation can
begin with the first layers.
"""

from __future__ import annotations

import functools
from collections import abc, deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from vlcache_jax.cache.device import DeviceTier, Index
from vlcache_jax.cache.record import Record, State, TierError
from vlcache_jax.cache.writer import EntrySlots, Writer
from vlcache_jax.device.buckets import round_up
from vlcache_jax.device.programs.base import LinkGroup, Stored
from vlcache_jax.device.programs.memory import Code, EmptyTier, KeepLayer, KeepRows, Link, Recall
from vlcache_jax.device.runner import Runner
from vlcache_jax.engine.batching import Prefill, Step, linked_images
from vlcache_jax.engine.readiness import PATIENCE
from vlcache_jax.engine.snapshots import StateMove
from vlcache_jax.inputs.layout import ImageSpan

Array = jax.Array | np.ndarray
Images = list[list[jax.Array]]  # the buffers of each image


class DeviceCopies:
    """Programs that move cached data.

    Args:
      runner: runner with the device and its pool.
      tier: index of the device tier.
    """

    def __init__(self, runner: Runner, tier: DeviceTier):
        self.runner, self.tier = runner, tier
        self._arrays: tuple[list[list[jax.Array]], jax.Array] | None = None

    def reset(self) -> None:
        """Discard the device tier and its index."""
        self.tier.clear()
        self._arrays = None

    def prepare(self) -> None:
        """Allocate the device tier and wait for it."""
        if self.tier.num_pages:
            jax.block_until_ready(self._now())

    def link(
        self, group: LinkGroup, images: abc.Sequence[list[jax.Array]], places: Array, where: jax.Array | None
    ) -> jax.Array:
        """Write cached KV of images into some layers of the pool, and into the device tier if there is one.

        Args:
          group: the layers.
          images: buffers of each image in these layers, see `Runner.put`; empty if the images are in the device tier.
          places: places of each image's tokens, see `Runner.places`. For images in the device tier, those of all
            together, [1, 4, n], n a bucket of `recall_buckets`.
          where: places in the device tier of all tokens, padded, int32. Without `images` they are the sources, in the
            order of `source` of `kernels.link`. Otherwise they are the targets, and tokens beyond the tier are not
            kept. None if there is no device tier.

        Returns:
          An array that is ready after the link.
        """
        run, constants, size = self.runner.run, self.runner.constants[group.parts], places.shape[2]
        with self.runner.pool.taken_layers(group.paged) as pool:
            if not images:
                kept, _ = self._now()
                program = Recall(size, len(constants))
                pool[:], done = run(program, pool, kept[group.parts], where, places, constants)
            elif where is None:
                link = Link(size, len(images), len(constants))
                pool[:], _, done = run(link, pool, None, [*images], places, None, constants)
            else:
                link = Link(size, len(images), len(constants))
                kept, rows = self._take()
                pool[:], kept[group.parts], done = run(
                    link, pool, kept[group.parts], [*images], places, where, constants
                )
                self._arrays = kept, rows
        return done

    def save(self, step: Step, new_kv: list[tuple[jax.Array, jax.Array]]) -> abc.Sequence[Stored]:
        """Convert the KV that a chunk computed to the cache's format, and keep it in the device tier if there is room.

        Args:
          step: the chunk.
          new_kv: for each layer, the keys before rotation and the values of its tokens.

        Returns:
          For each layer, the KV in the cache's format.
        """
        layers: list[Stored] = [*new_kv]
        if self.runner.shapes.kv.codec is not None:
            pairs = zip(new_kv, self.runner.constants, strict=True)
            layers = [self.runner.run(Code(len(k)), k, v, constants) for (k, v), constants in pairs]
        if self.tier.num_pages:
            self._keep(step, layers)
        return layers

    def stage(self, source: Index, place: Index) -> None:
        """Copy encoder row `source[i]` of the device tier to encoder row `place[i]` of the next chunk."""
        sizes = self.runner.token_buckets
        for first in range(0, len(source), sizes[-1]):
            some, to = source[first : first + sizes[-1]], place[first : first + sizes[-1]]
            missing = round_up(len(some), sizes) - len(some)
            nowhere = self.runner.buckets.max_rows + np.arange(missing, dtype=np.int32)
            _, kept = self._now()
            self.runner.restage(kept, np.pad(some, (0, missing)), np.concatenate([to, nowhere]))

    def _keep(self, step: Step, layers: abc.Sequence[Stored]) -> None:
        max_rows = self.runner.buckets.max_rows
        nowhere = self.runner.shapes.kept_tokens + np.arange(max_rows, dtype=np.int32)
        place, row_place = nowhere.copy(), nowhere.copy()
        placements = {placement.image.key: placement for placement in step.placements}
        for record, tokens, rows, _ in step.saved:
            if (own := self.tier.begin(record)) is None:
                continue
            place[rows] = own[tokens]
            placement = placements.pop(record.meta.entry, None)  # only once, not again for another context
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
        """Return the arrays for a program that takes and returns them."""
        arrays, self._arrays = self._now(), None
        return arrays


def store_states(runner: Runner, writer: Writer, record: Record, slots: EntrySlots) -> None:
    """Request to fill a record with the states of slots, and with a map if it has one."""
    writer.throttle(2 * runner.transfer_bytes)  # a chunk may end many images
    own = [runner.pool.stored_states(slots.state)] if slots.state else []
    if not record.meta.maps:
        writer.states(record, own)
        return
    floats, maps = runner.pool.stored_map(slots.added, slots.passed)
    writer.states(record, [*own, floats], maps)


def move_snapshots(runner: Runner, writer: Writer, moves: abc.Iterable[StateMove]) -> None:
    """Launch copies of snapshots to host memory and from there, in their order."""
    for slot, record, is_load in moves:
        if not is_load:
            store_states(runner, writer, record, EntrySlots(slot))
            continue
        for group in runner.shapes.link_groups:
            states = runner.devices.put(record.buffers[-1][group.parts])
            runner.pool.load_states(group.parts, states, slot)


class Transfers:
    """Transfer of cache entries to the device, in a thread of its own.

    Args:
      runner: runner with the device.
    """

    def __init__(self, runner: Runner):
        self._runner = runner
        self._thread = ThreadPoolExecutor(1, "vlcache-transfers")

    def start(self, records: abc.Sequence[Record], parts: slice, wanted: EntryStates) -> Images | Future[Images]:
        """Return some parts of cache entries on the device, or a future of them.

        The future raises a TierError if an entry does not arrive.
        """
        if not records:
            return []
        if self._runner.reads_in_place:
            coming = [one for one in records if one.state is not State.ready and not one.has_arrived(parts.stop)]
            if not coming:
                return [one.lent.get((parts.start, *wanted)) or self._lent(one, parts, wanted) for one in records]

        def put() -> Images:
            for record in records:
                if not record.wait_for(parts.stop):
                    raise TierError(f"cache entry {record.meta.name} could not be loaded")
            here = {id(record): self._put(record, parts, wanted) for record in records}
            return [here[id(record)] for record in records]  # a prompt may show an image twice

        return self._thread.submit(put)

    def _put(self, record: Record, parts: slice, wanted: EntryStates) -> list[jax.Array]:
        kv, states = self._runner.put([buffer[parts] for buffer in record.kv]), wanted.of(record, parts)
        return [*kv, *self._runner.devices.put(states)] if states else kv

    def _lent(self, record: Record, parts: slice, wanted: EntryStates) -> list[jax.Array]:
        record.lent[parts.start, *wanted] = lent = self._put(record, parts, wanted)
        return lent

    def close(self) -> None:
        """Stop transfers without waiting for those in progress."""
        self._thread.shutdown(wait=False, cancel_futures=True)


class EntryStates(NamedTuple):
    """The states that links read from cache entries: those after the image, its map, both or none."""

    own: bool = False
    maps: bool = False

    @classmethod
    def of_slots(cls, slots: abc.Iterable[EntrySlots]) -> Self:
        """Return what is loaded into slots."""
        return cls(any(one.state for one in slots), any(one.added for one in slots))

    def of(self, record: Record, parts: slice) -> list[np.ndarray]:
        """Return these arrays of some parts of a cache entry."""
        found: list[np.ndarray] = []
        if record.states is not None:
            own = record.meta.own_states
            found += [record.states[parts, :own]] * self.own
            if self.maps and record.maps is not None:
                found += [record.states[parts, own:], record.maps[parts]]
        return found


@dataclass(frozen=True, eq=False)
class _Batch:
    """Images that one program links.

    Attributes:
      records: cache entries of the images; empty if they are in the device tier.
      places: function that returns `Runner.places` of the images. It is called at the first link, which then need not
        wait for the places of other batches.
      where: for images in the device tier, the places to read; for others, the places to write. None if there is no
        device tier.
      promoted: cache entries that are copied to the device tier.
      slots: for each image, the slots that its states and its map are loaded into; empty if the model has none.
    """

    records: tuple[Record, ...]
    places: abc.Callable[[], jax.Array | np.ndarray]
    where: jax.Array | None
    promoted: tuple[Record, ...] = ()
    slots: tuple[EntrySlots, ...] = ()

    @functools.cached_property
    def wanted(self) -> EntryStates:
        """What is transferred of the states in the entries."""
        return EntryStates.of_slots(self.slots)


@dataclass(frozen=True, eq=False)
class _Piece:
    """Part of a batch: its images in some layers."""

    batch: _Batch
    group: LinkGroup

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes to transfer for this piece."""
        parts, wanted = self.group.parts, self.batch.wanted
        return sum(
            [
                array.nbytes
                for record in self.batch.records
                for array in (*(buffer[parts] for buffer in record.kv), *wanted.of(record, parts))
            ]
        )


class Upload:
    """Transfer and linking of the cached images of some prefills.

    Args:
      copies: programs that link, with the index of the device tier.
      transfers: transfers to the device.
      prefills: the prefills.
    """

    def __init__(self, copies: DeviceCopies, transfers: Transfers, prefills: abc.Iterable[Prefill]):
        self._copies, self._runner, self._transfers = copies, copies.runner, transfers
        self._reads_in_place = copies.runner.reads_in_place
        batches = list(_batches(copies, linked_images(prefills)))
        groups = self._runner.shapes.link_groups
        self._waiting = deque(_Piece(batch, group) for group in groups for batch in batches)
        self._started: deque[tuple[_Piece, Images | Future[Images]]] = deque()
        self._linked: deque[tuple[int, jax.Array]] = deque()  # bytes in use until the array is ready

    def advance(self) -> tuple[list[jax.Array], list[jax.Array]]:
        """Launch the links whose cache entries have arrived.

        Returns:
          The arrays that the links read, and arrays that are ready after the links.

        Raises:
          TierError: a cache entry did not arrive.
        """
        read: list[jax.Array] = []
        done: list[jax.Array] = []
        while self._start() and _has_come(self._started[0][1]):
            piece, coming = self._started.popleft()
            images, batch = coming if isinstance(coming, list) else coming.result(), piece.batch
            read += jax.tree.leaves(images)
            kv = [image[: record.meta.kv_buffers] for image, record in zip(images, batch.records, strict=True)]
            done.append(self._copies.link(piece.group, kv, batch.places(), batch.where))
            for image, slots in zip(images, batch.slots, strict=False):
                self._load_states(piece.group.parts, image, slots)
            if piece.group.layers.stop == self._runner.config.text.num_layers:
                for record in batch.promoted:
                    self._copies.tier.fill(record, record.meta.tokens, 0)
            self._linked.append((0 if self._reads_in_place else piece.nbytes, done[-1]))
        return read, done

    def _load_states(self, parts: slice, image: list[jax.Array], slots: EntrySlots) -> None:
        """Load the states after an image, or its map, from the arrays of some parts of its cache entry."""
        pool, shapes = self._runner.pool, self._runner.shapes
        if slots.state:
            pool.load_states(parts, image[len(shapes.kv.stored())], slots.state)
        if slots.added:
            floats, maps = image[-2:]
            pool.load_map(parts, floats, maps, slots.added, slots.passed)

    @property
    def layers(self) -> int:
        """First layer with links that are not launched; the number of layers if all are launched."""
        pending = [piece for piece, _ in self._started] or self._waiting
        return pending[0].group.layers.start if pending else self._runner.config.text.num_layers

    def wait(self) -> None:
        """Wait at most `PATIENCE` seconds for what the next link lacks: other requests may arrive or end meanwhile."""
        if self._started:
            wait([coming for _, coming in self._started if isinstance(coming, Future)][:1], PATIENCE)
        elif self._waiting:
            self._linked[0][1].block_until_ready()

    def cancel(self) -> None:
        """Cancel the transfers that have not started."""
        for _, coming in self._started:
            if isinstance(coming, Future):
                coming.cancel()

    def _start(self) -> bool:
        """Start transfers while the bytes in flight are within the limit; return whether any transfer has started."""
        while self._linked and _is_ready(self._linked[0][1]):
            self._linked.popleft()
        if self._reads_in_place:  # nothing is transferred, so the next piece begins when the previous one is linked
            if self._waiting and not self._started:
                self._begin()
            return bool(self._started)
        in_flight = sum([size for size, _ in self._linked]) + sum([piece.nbytes for piece, _ in self._started])
        while self._waiting and (not in_flight or in_flight + self._waiting[0].nbytes <= self._runner.transfer_bytes):
            in_flight += self._begin().nbytes
        return bool(self._started)

    def _begin(self) -> _Piece:
        """Start the transfer of the next piece."""
        piece = self._waiting.popleft()
        coming = self._transfers.start(piece.batch.records, piece.group.parts, piece.batch.wanted)
        self._started.append((piece, coming))
        return piece


def _is_ready(array: Any) -> bool:
    return bool(array.is_ready())


def _has_come(coming: Images | Future[Images]) -> bool:
    return isinstance(coming, list) or coming.done()


def _batches(
    copies: DeviceCopies, images: abc.Sequence[tuple[Record, list[tuple[Prefill, ImageSpan]]]]
) -> abc.Iterator[_Batch]:
    """Yield the images that are linked together, with the places of their tokens."""
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
                stated = [(prefill, span) for record, prefill, span in some if record.meta.states]
                slots = tuple([prefill.states.loaded(span.stop) for prefill, span in stated])
                yield _Batch(records, functools.cache(places), None, slots=slots)
                continue
            new = [record for record in dict.fromkeys(records) if record not in promoted]
            promoted.update(new)
            yield _Batch(records, functools.cache(places), _promoted(copies, records, new, size), tuple(new))


def _places(runner: Runner, users: abc.Sequence[tuple[Prefill, ImageSpan]], size: int) -> jax.Array | np.ndarray:
    slots = [prefill.to_link[span.tokens] for prefill, span in users]
    positions = [prefill.layout.positions[:, span.tokens] for prefill, span in users]
    return runner.places(slots, positions, size)


def _recalls(runner: Runner, here: abc.Sequence[tuple[Index, Prefill, ImageSpan]]) -> abc.Iterator[_Batch]:
    """Yield batches of images in the device tier, each with as many tokens as one program links."""
    size = sum(len(place) for place, _, _ in here)
    source, slots = np.concatenate([place for place, _, _ in here]), np.full(size, runner.num_slots, np.int32)
    positions = np.zeros((3, size), np.int32)
    first = 0
    for place, prefill, span in here:
        own = slice(first, first + span.length)
        slots[own], positions[:, own] = prefill.to_link[span.tokens], prefill.layout.positions[:, span.tokens]
        first += len(place)
    first = 0
    for bucket in runner.shapes.split_recalls(span.length for _, _, span in here):
        some = slice(first, first + bucket)
        padded = np.pad(source[some], (0, max(0, first + bucket - size)))
        places = functools.partial(runner.places, [slots[some]], [positions[:, some]], bucket)
        yield _Batch((), functools.cache(places), runner.devices.put(padded))
        first += bucket


def _promoted(copies: DeviceCopies, records: abc.Sequence[Record], new: abc.Iterable[Record], size: int) -> jax.Array:
    """Return the places in the device tier to which the tokens of `new` entries are copied."""
    tokens = copies.runner.shapes.kept_tokens
    where = tokens + np.arange(len(records) * size, dtype=np.int32)  # out of bounds: not kept
    for record in new:
        if (place := copies.tier.take(record)) is not None:
            first = records.index(record) * size
            where[first : first + record.meta.tokens] = place[: record.meta.tokens]
    return copies.runner.devices.put(where)
