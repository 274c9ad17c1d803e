"""Prefill: uploads, the encoder, and forward passes of prefill chunks. Nothing here waits.

`ForwardPass` launches the layers of a chunk for which the KV to read is there. The functions before `Prefiller` find
the programs that a group of prompts needs, and chunk sizes whose programs are compiled already.
"""

from __future__ import annotations

import collections
import dataclasses
from collections import abc, deque
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from vlcache_jax import pallas_kernels as kernels
from vlcache_jax.cache.device import Index
from vlcache_jax.cache.record import Record
from vlcache_jax.cache.writer import Writer
from vlcache_jax.device.buckets import BucketSizes, cover, round_up
from vlcache_jax.device.programs.base import Program, pack
from vlcache_jax.device.programs.layers import (
    BLOCK,
    BLOCK_ROWS,
    Block,
    Choose,
    Embed,
    Layer,
    Narrow,
    ScoreRows,
    Slice,
    Take,
)
from vlcache_jax.device.programs.memory import (
    CopyPages,
    EmptyDecodeState,
    EmptyEncoderRows,
    EmptyPool,
    HoldDecodeSlots,
    Link,
    OpenDecodeSlot,
)
from vlcache_jax.device.programs.states import EmptyStates, LoadMaps, LoadStates
from vlcache_jax.device.runner import Clock, Runner
from vlcache_jax.engine.batching import (
    Placement,
    Prefill,
    Step,
    copied_pages,
    encoder_calls,
    linked_images,
    prefill_steps,
)
from vlcache_jax.engine.pages import BlockTable
from vlcache_jax.engine.request import Generation, ImageUse, Sequence
from vlcache_jax.engine.scheduler import Scheduler, note_begun
from vlcache_jax.engine.snapshots import StateSlots
from vlcache_jax.engine.uploads import DeviceCopies, Transfers, Upload, move_snapshots, store_states
from vlcache_jax.inputs.layout import ImageRef
from vlcache_jax.pallas_kernels import Work
from vlcache_jax.reuse.selection import Selection
from vlcache_jax.reuse.shift import Moves


class ForwardPass:
    """Forward pass of a prefill chunk through the layers. Between layers other programs may use the pool.

    Args:
      runner: runner of the programs.
      step: the chunk; its encoder output has been staged.

    Attributes:
      layer: first layer that is not launched yet.
      x: hidden states of the tokens that leave the last launched layer.
      new_kv: keys before rotation and values of each launched layer, if some are saved.
      chosen: order of the tokens after the device selected some of them (`choose`); None before.
    """

    def __init__(self, runner: Runner, step: Step):
        self.runner, self.step = runner, step
        self.layer = 0
        self.new_kv: list[tuple[jax.Array, jax.Array]] = []
        self.chosen: jax.Array | None = None
        self._score: jax.Array | None = None
        self._held = first = step.bounds[0]
        self._leaving = step.leaving
        max_rows, shift = runner.buckets.max_rows, step.shift
        self._works: dict[tuple[int, bool], Work] = {}
        shifted = None if shift is None else shift.pack(max_rows, runner.shapes.moved)
        runs = runner.shapes.pack_runs(step.runs)
        self._rows, self._shifted, self._runs = runner.devices.put((pack(step.rows, max_rows), shifted, runs))
        embeddings = runner.text["embed_tokens"]
        self.x, self._deepstack = runner.run(Embed(first), embeddings, runner.encoder_rows(), self._rows)

    @property
    def is_done(self) -> bool:
        """True if all layers are launched."""
        return self.layer == len(self.step.active)

    def advance(self, stop: int) -> None:
        """Launch the layers before `stop`, but no part of a block of layers that is one program.

        The programs therefore do not depend on when cache entries arrive, and neither does the last digit of an output.
        """
        with self.runner.pool.taken() as pool:
            while self.layer < stop:
                if is_block(self.step.bounds, self.layer, len(self._deepstack), self.step.selection is not None):
                    if self.layer + BLOCK > stop:
                        break
                    self._run_block(pool, slice(self.layer, self.layer + BLOCK))
                    self.layer += BLOCK
                else:
                    self._run_layer(pool[self.layer], self.layer)
                    self.layer += 1

    def _run_block(self, pool: list[list[jax.Array]], layers: slice) -> None:
        size, weights = len(self.x), [self.runner.text["layers"][i] for i in range(layers.start, layers.stop)]
        active = np.array([self._active(i) for i in range(layers.start, layers.stop)], np.int32)
        moves = self._moves(layers)
        block = Block(size, moves is not None, self.runner.shapes.like[layers])
        work = self._work(size, False)
        self.x, pool[layers], new_kv = self.runner.run(
            block, weights, self.x, pool[layers], self._rows, active, work, moves, self._runs
        )
        if self.step.saved:
            self.new_kv += [kv for kv in new_kv if kv is not None]

    def _moves(self, layers: slice) -> Moves | None:
        """Return what these layers add to shifted tokens; None if the chunk shifts no image."""
        if (shift := self.step.shift) is None:
            return None
        numbers, (row_image, tokens) = range(layers.start, layers.stop), self._shifted
        count = [shift.count(layer, self.step.active[layer]) for layer in numbers]
        return Moves(row_image, tokens, np.array(numbers, np.int32), np.array(count, np.int32))

    def _run_layer(self, pool: list[jax.Array], layer: int) -> None:
        step, run, selection = self.step, self.runner.run, self.step.selection
        size = step.bounds[layer]
        check = len(step.active) if selection is None else selection.policy.check_layer
        weights, like = self.runner.text["layers"][layer], self.runner.shapes.like[layer : layer + 1]
        if layer > check and step.active[layer] < step.active[layer - 1]:
            self._rows = run(Narrow(self._held, size), self._rows, np.int32(step.active[layer]))
            self._held = size
        if selection is not None and layer in selection.policy.scored_layers:
            self._score = self._score_rows(selection, layer, pool)
        if selection is not None and layer == check:
            counts = np.array([selection.must, selection.among], np.int32)
            self.x, self._rows, self.chosen = run(Choose(size), self.x, self._rows, self._score, counts)
        added = self._deepstack[layer] if layer < len(self._deepstack) else None
        if added is not None and self.chosen is not None:
            added = run(Take(len(added), size), added, self.chosen)
        elif added is not None and len(added) != size:
            added = run(Slice(len(added), size), added)
        leaving, _, is_chosen = self._leaving[layer]
        moves = self._moves(slice(layer, layer + 1))
        self.x, pool[:], values = run(
            Layer(size, leaving, added is not None, moves is not None, like),
            weights, self.x, pool, self._rows, np.array(self._active(layer), np.int32),
            self._work(leaving, is_chosen), added, moves, self._runs,
        )  # fmt: skip
        if self.step.saved:
            self.new_kv += [values] if values is not None else []

    def _work(self, bound: int, is_chosen: bool) -> Work:
        """Return the work list of layers with this bound. The first call builds it while the device computes."""
        if (bound, is_chosen) not in self._works:
            config = self.runner.shapes.work_config(bound)
            self._works[bound, is_chosen] = self.runner.devices.put(self.step.work(bound, is_chosen, config))
        return self._works[bound, is_chosen]

    def _active(self, layer: int) -> tuple[int, int]:
        """Return the number of tokens that a layer computes, and how many of them the next layer needs."""
        return self.step.active[layer], self._leaving[layer][1]

    def _score_rows(self, selection: Selection, layer: int, pool: list[jax.Array]) -> jax.Array:
        """Return the scores of the tokens, with those of this layer added."""
        window = round_up(-(-selection.length // kernels.PAGE), self.runner.shapes.windows)
        table = np.zeros(window, np.int32)
        pages = selection.table[:window]
        table[: len(pages)] = pages
        is_image = np.zeros(len(self.x), bool)
        is_image[selection.must : selection.must + selection.among] = True
        before = np.zeros(len(self.x), np.float32) if self._score is None else self._score
        request = np.array([selection.length, selection.question], np.int32)
        like = self.runner.shapes.like[layer : layer + 1]
        program = ScoreRows(len(self.x), window, selection.policy, like)
        weights = self.runner.text["layers"][layer]
        return self.runner.run(program, weights, self.x, *pool, self._rows, is_image, request, table, before)


def is_block(bounds: abc.Sequence[int], first: int, num_deepstack: int, selects: bool) -> bool:
    """Return whether the layers from `first` on are one program in a chunk with these bounds."""
    size, stop = bounds[first], first + BLOCK
    if size > BLOCK_ROWS or selects or first < num_deepstack or stop >= len(bounds):
        return False
    return all(bounds[layer + 1] == size for layer in range(first, stop))


def usable_buckets(
    runner: Runner, prefills: abc.Sequence[Prefill], calls: tuple[int, ...], encoded: abc.Container[ImageRef]
) -> BucketSizes | None:
    """Return chunk sizes of a group for which all programs are compiled; None if the group has to wait for programs.

    While the programs of a chunk are being compiled, other compiled buckets serve: several smaller ones, or a larger
    one. Cutting is exact. Chunks that select tokens or shift images keep their sizes.

    Args:
      runner: runner of the programs.
      prefills: prefills of the group.
      calls: sizes of encoder calls, in patches.
      encoded: images that were encoded ahead.
    """
    buckets, fitting = runner.buckets, runner.fitting
    if not runner.programs.is_warming:
        return buckets
    other = [*_other_programs(runner, prefills)]
    steps = prefill_steps(prefills, buckets, runner.num_slots, *runner.shapes.depth)
    encoding = [*_encoding(runner, prefills, steps, calls, encoded)]
    best = [*other, *encoding, *_layers(runner, steps)]
    if not fitting.is_coming(best):
        return buckets
    if all(step.selection is None and step.shift is None for step in steps):
        there = tuple(rows for rows in buckets.rows if fitting.is_there(_plain(runner, rows)))
        # Smaller chunks than a block of tokens would cut these, and change results.
        if there and there[-1] < runner.shapes.block_rows:
            return None
        if there and fitting.is_there([*other, *encoding]):
            fewer = dataclasses.replace(buckets, rows=there)
            steps = prefill_steps(prefills, fewer, runner.num_slots, *runner.shapes.depth)
            if fitting.is_there(_layers(runner, steps)):
                return fewer
    return None


def _plain(runner: Runner, rows: int) -> abc.Iterator[Program[Any]]:
    """Yield the programs of a chunk that computes `rows` tokens in all layers."""
    return _through(runner, (*[rows] * runner.config.text.num_layers, runner.buckets.outputs(rows)), False, False)


def _through(runner: Runner, bounds: abc.Sequence[int], shifts: bool, selects: bool) -> abc.Iterator[Program[Any]]:
    """Yield the programs of a chunk with these bounds, except those that select tokens."""
    like, deepstack = runner.shapes.like, runner.shapes.config.vision.num_deepstack
    yield Embed(bounds[0])
    layer = 0
    while layer < len(bounds) - 1:
        size, leaving = bounds[layer], bounds[layer + 1]
        if is_block(bounds, layer, deepstack, selects):
            yield Block(size, shifts, like[layer : layer + BLOCK])
            layer += BLOCK
            continue
        if layer < deepstack and size != bounds[0] and not selects:
            yield Slice(bounds[0], size)
        yield Layer(size, leaving, layer < deepstack, shifts, like[layer : layer + 1])
        layer += 1


def _layers(runner: Runner, steps: abc.Iterable[Step]) -> abc.Iterator[Program[Any]]:
    """Yield the programs that take chunks through the layers and sample tokens."""
    for step in steps:
        yield from _through(runner, step.bounds, step.shift is not None, step.selection is not None)
        rows = step.bounds[-1]
        answers = [one for one, i in step.wanted if isinstance(one, Generation) and i == one.length - 1]
        if answers and len(answers) == len(step.wanted):
            yield from runner.fitting.choosing(rows, runner.fitting.head(rows, len(answers)))


def _encoding(
    runner: Runner,
    prefills: abc.Iterable[Prefill],
    steps: abc.Iterable[Step],
    calls: tuple[int, ...],
    encoded: abc.Container[ImageRef],
) -> abc.Iterator[Program[Any]]:
    """Yield the programs that encode the new images of chunks."""
    uses = (use for prefill in prefills for use in prefill.sequence.progress.images)
    kept = {use.span.image for use in uses if use.encoder is not None and use.encoder.is_ready}
    seen: set[ImageRef] = set()
    for step in steps:
        images = [one.image for one in step.placements if one.image not in kept and one.image not in encoded]
        new = [image for image in dict.fromkeys(images) if image not in seen]
        seen.update(new)
        for call in encoder_calls(new, calls):
            patches = sum(image.num_tokens for image in call) * runner.config.vision.merge_size**2
            yield from runner.fitting.encoding(runner.fitting.encoder(patches))


def _other_programs(runner: Runner, prefills: abc.Sequence[Prefill]) -> abc.Iterator[Program[Any]]:
    """Yield the programs that allocate arrays, open decode slots, copy pages and link images."""
    shapes = runner.shapes
    yield from (EmptyPool(), EmptyEncoderRows(), EmptyDecodeState(), OpenDecodeSlot())
    yield from EmptyStates.of(shapes)
    held = sum(isinstance(one.sequence, Generation) and one.sequence.is_held for one in prefills)
    if held:
        yield HoldDecodeSlots(runner.fitting.held(held))
    yield from (CopyPages(size) for size in cover(len(copied_pages(prefills)), runner.buckets.sequences))
    linked = collections.Counter(record.meta.padded for record, users in linked_images(prefills) for _ in users)
    for size, number in linked.items():
        for count in shapes.split_links(size, number):
            yield from (Link(size, count, group.count) for group in shapes.link_groups)
    if linked:
        yield from (*LoadStates.of(shapes), *LoadMaps.of(shapes))


PATCHES_PER_CALL = 16384  # more patches in one encoder call save no time and take memory


@dataclass(eq=False)
class PrefillGroup:
    """Prefills whose tokens are cut into chunks together.

    Attributes:
      prefills: the prefills.
      buckets: sizes of the chunks.
      upload: transfer of the cached images; it is complete when the first chunk has been launched.
      steps: chunks that are not launched yet; None before the tokens were cut.
      forward_pass: forward pass of the chunk that is being launched; None between chunks.
      images: for each prefill, its images and their tiers.
      took: kinds of the work launched so far, with its device time in seconds.
      where: for each encoded image, the encoder output and its first row in it.
      kept: for each image, the cache entry of its encoder output.
      here: for each image in the device tier, the rows of its encoder output.
    """

    prefills: abc.Sequence[Prefill]
    buckets: BucketSizes
    upload: Upload
    steps: deque[Step] | None = None
    forward_pass: ForwardPass | None = None
    images: abc.Sequence[abc.Sequence[ImageUse]] = ()
    took: list[tuple[str, Future[float]]] = field(default_factory=list)
    where: dict[ImageRef, tuple[jax.Array, int]] = field(default_factory=dict)
    kept: dict[ImageRef, Record] = field(default_factory=dict)
    here: dict[ImageRef, Index] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class LaunchedStep:
    """Prefill chunk in flight.

    Attributes:
      group: prefill group of the chunk.
      step: the chunk.
      x: hidden states of the tokens that leave the last layer.
      chosen: tokens that the device selected; None if it selected none.
      took: device times of the group so far, see `PrefillGroup`.
    """

    group: PrefillGroup
    step: Step
    x: jax.Array
    chosen: jax.Array | None
    took: tuple[tuple[str, Future[float]], ...]


class _EncodedAhead(NamedTuple):
    """Images encoded ahead for a sequence; see `PrefillGroup`."""

    where: dict[ImageRef, tuple[jax.Array, int]]
    took: list[tuple[str, Future[float]]]


class Prefiller:
    """Launcher of prefill groups, chunk by chunk.

    Args:
      runner: runner of the programs.
      writer: writer that fills cache entries with computed KV and encoder output.
      clock: clock of the device times.
      copies: programs that move cached data.
      states: slots of states; None if the model has none.
    """

    def __init__(
        self, runner: Runner, writer: Writer, clock: Clock, copies: DeviceCopies, states: StateSlots[BlockTable] | None
    ):
        self.runner, self.writer, self._clock, self.copies = runner, writer, clock, copies
        self._states = states
        self._transfers = Transfers(runner)
        self._ahead: dict[Sequence, _EncodedAhead] = {}  # of sequences that wait for cache entries
        first, *sizes = runner.buckets.patches
        calls = first, *(bucket for bucket in sizes if bucket <= PATCHES_PER_CALL)
        # On a GPU every call takes the largest bucket, because a small call re-reads all weights.
        self._calls = calls if runner.is_host else calls[-1:]

    def encode_ahead(self, sequence: Sequence, uses: abc.Iterable[ImageUse]) -> bool:
        """Encode images of a sequence that waits for cache entries, as many as a chunk has rows for.

        Returns:
          Whether any image was encoded.
        """
        known = self.ahead(sequence)
        new: dict[ImageRef, Record | None] = {}
        left = self.runner.buckets.max_rows - sum(i.num_tokens for one in self._ahead.values() for i in one.where)
        for use in uses:
            if use.span.image not in known and use.span.image not in new and use.span.image.num_tokens <= left:
                new[use.span.image] = use.encoder
                left -= use.span.image.num_tokens
        if not new:
            return False
        ahead = self._ahead.setdefault(sequence, _EncodedAhead({}, []))
        ahead.where.update(self._encode(new, {image: record for image, record in new.items() if record is not None}))
        ahead.took.append(("encode", self._clock.mark([ahead.where[image][0] for image in new])))
        return True

    def ahead(self, sequence: Sequence) -> abc.Container[ImageRef]:
        """Return the images that were encoded ahead for a sequence."""
        return self._ahead[sequence].where if sequence in self._ahead else ()

    def forget(self, sequence: Sequence) -> None:
        """Discard what was encoded ahead for a sequence."""
        self._ahead.pop(sequence, None)

    def next_group(
        self, scheduler: Scheduler, ready: abc.Sequence[Sequence]
    ) -> tuple[list[Prefill], BucketSizes] | None:
        """Return the next prefill group and its chunk sizes; None if all ready sequences wait for programs.

        If the programs of the whole group are not compiled, single sequences overtake the others.
        """
        for candidates in (ready, *([one] for one in ready if len(ready) > 1)):
            group = scheduler.next_group(candidates)
            if (buckets := self._usable_buckets(group)) is not None:
                return group, buckets
        return None

    def _usable_buckets(self, prefills: abc.Sequence[Prefill]) -> BucketSizes | None:
        ahead = [self._ahead[one.sequence].where for one in prefills if one.sequence in self._ahead]
        encoded = {image for images in ahead for image in images}
        return usable_buckets(self.runner, prefills, self._calls, encoded)

    def begin(self, prefills: abc.Sequence[Prefill], buckets: BucketSizes) -> PrefillGroup:
        """Copy pages, move snapshots and start the upload of cached images; return the new group.

        Args:
          prefills: prefills of the group.
          buckets: sizes of the chunks.
        """
        note_begun(prefills)
        if pairs := copied_pages(prefills):
            self.runner.pool.copy_pages(pairs)
        if self._states is not None:
            move_snapshots(self.runner, self.writer, self._states.take_moves())
        group = PrefillGroup(prefills, buckets, Upload(self.copies, self._transfers, prefills))
        for ahead in (self._ahead.pop(prefill.sequence, None) for prefill in prefills):
            if ahead is not None:
                group.where.update(ahead.where)
                group.took += ahead.took
        uses = [prefill.sequence.progress.images for prefill in prefills]
        group.kept = {use.span.image: use.encoder for some in uses for use in some if use.encoder is not None}
        has_tier = self.copies.tier.num_pages > 0
        group.images = [[self._found(use, group) for use in some] for some in uses] if has_tier else uses
        return group

    def launch(self, group: PrefillGroup) -> LaunchedStep | None:
        """Launch the next chunk of a group, or the layers whose cached KV has arrived.

        Returns:
          The chunk, or None if some of its layers are not launched yet.

        Raises:
          TierError: a cache entry did not arrive.
        """
        self._link(group)  # first, because it needs no chunks
        if group.steps is None:
            steps = prefill_steps(group.prefills, group.buckets, self.runner.num_slots, *self.runner.shapes.depth)
            group.steps = deque(steps)
        step = group.steps[0]
        if group.forward_pass is None:
            self.stage(step, group)
            group.forward_pass = ForwardPass(self.runner, step)
        forward_pass = group.forward_pass
        while True:
            linked = group.upload.layers
            forward_pass.advance(linked)
            if forward_pass.is_done:
                break
            self._link(group)
            if group.upload.layers == linked:
                return None
        group.forward_pass = None
        group.steps.popleft()
        group.took.append(("prefill", self._clock.mark([forward_pass.x])))
        if step.saved:
            self.writer.kv(step.saved, self.copies.save(step, forward_pass.new_kv))
            for saved in step.saved:
                if saved.slots is not None:
                    store_states(self.runner, self.writer, saved.record, saved.slots)
        self.writer.throttle(2 * self.runner.transfer_bytes)
        later = {placement.image for other in group.steps for placement in other.placements}
        group.where = {image: place for image, place in group.where.items() if image in later}
        return LaunchedStep(group, step, forward_pass.x, forward_pass.chosen, tuple(group.took))

    def stage(self, step: Step, group: PrefillGroup) -> None:
        """Encode new images and stage the encoder output of a chunk."""
        images = [placement.image for placement in step.placements if placement.image not in group.here]
        new = [image for image in images if image not in group.where and not _holds(group.kept.get(image))]
        group.where.update(self._encode(new, group.kept))
        if new:
            group.took.append(("encode", self._clock.mark([group.where[image][0] for image in new])))
        self._stage(step, group)

    def prepare(self) -> None:
        """Allocate the device memory and wait for it."""
        self.runner.prepare()
        self.copies.prepare()

    def reset(self) -> None:
        """Discard images encoded ahead and all device state."""
        self._ahead.clear()
        self.runner.reset()
        self.copies.reset()

    def close(self) -> None:
        """Stop the thread that transfers cache entries."""
        self._transfers.close()

    def _found(self, use: ImageUse, group: PrefillGroup) -> ImageUse:
        """Return the image use with the tiers that it comes from now."""
        if use.linked is None or self.copies.tier.find(use.linked) is None:
            return use
        if (rows := self.copies.tier.find_rows(use.linked)) is None:
            return replace(use, kv_tier="device")
        group.here[use.span.image] = rows
        return replace(use, kv_tier="device", encoder_tier="device")

    def _link(self, group: PrefillGroup) -> None:
        """Launch the links of cached images that have arrived."""
        read, done = group.upload.advance()
        if done:
            group.took += [("transfer", self._clock.mark(read)), ("link", self._clock.mark(done))]

    def _encode(
        self, images: abc.Iterable[ImageRef], kept: abc.Mapping[ImageRef, Record]
    ) -> dict[ImageRef, tuple[jax.Array, int]]:
        """Encode images, several in one call; return the output of each image and its first row in it."""
        where = {}
        for call in encoder_calls(images, self._calls):
            encoded = self.runner.encode([image.patches.pixels for image in call], [i.patches.grid for i in call])
            first = np.cumsum([0, *(image.num_tokens for image in call)]).tolist()
            for image, row in zip(call, first[:-1], strict=True):
                where[image] = encoded, row
                record = kept.get(image)
                if record is not None and not record.is_settled:
                    self.writer.encoder(record, encoded, row)
        return where

    def _stage(self, step: Step, group: PrefillGroup) -> None:
        """Stage the encoder output of a chunk: one call per output, and one for cache entries."""
        placed: dict[int, tuple[jax.Array, list[tuple[Placement, int]]]] = {}
        kept, here = [], []
        for placement in step.placements:
            if placement.image in group.here:
                here.append(placement)
            elif placement.image in group.where:
                output, first = group.where[placement.image]
                placed.setdefault(id(output), (output, []))[1].append((placement, first))
            else:
                kept.append(placement)
        for rows, placements in placed.values():
            place = self.runner.buckets.max_rows + np.arange(rows.shape[1], dtype=np.int32)  # out of bounds: dropped
            for placement, first in placements:
                place[first + placement.image_row] = placement.place
            self.runner.stage(rows, place)
        if here:
            source = np.concatenate([group.here[placement.image][placement.image_row] for placement in here])
            self.copies.stage(source, np.concatenate([placement.place for placement in here]))
        if kept:
            self._stage_kept([(group.kept[placement.image].data, placement) for placement in kept])

    def _stage_kept(self, kept: abc.Sequence[tuple[np.ndarray, Placement]]) -> None:
        """Stage encoder output of cache entries, only the rows that the chunk computes."""
        parts = [data[:, placement.image_row] for data, placement in kept]
        place = np.concatenate([placement.place for _, placement in kept])
        largest = self.runner.token_buckets[-1]
        left = len(place) % largest or largest
        missing = round_up(left, self.runner.token_buckets) - left
        rows = np.concatenate([*parts, np.zeros_like(parts[0], shape=(len(parts[0]), missing, parts[0].shape[2]))], 1)
        nowhere = self.runner.buckets.max_rows + np.arange(missing, dtype=np.int32)  # out of bounds: dropped
        place = np.concatenate([place, nowhere])
        for first in range(0, len(place), largest):
            self.runner.stage(rows[:, first : first + largest], place[first : first + largest])


def _holds(record: Record | None) -> bool:
    """Return whether a cache entry holds the encoder output of an image."""
    return record is not None and record.is_ready
