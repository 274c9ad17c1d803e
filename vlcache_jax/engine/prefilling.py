"""Prefill: uploads, the encoder, and prefill chunks on their way through the layers. Nothing here waits.

`Passage` launches a chunk as far as the KV that its layers read is there. The functions before `Prefiller` find the
programs that a group of prompts needs, and sizes of chunks that do without programs that are still to be compiled.
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
from vlcache_jax.device.buckets import Ladder, cover, round_up
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
    EmptyEncoderRows,
    EmptyLanes,
    EmptyPool,
    HoldLanes,
    Link,
    OpenLane,
)
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
from vlcache_jax.engine.request import Generation, ImageUse, Sequence
from vlcache_jax.engine.scheduler import Scheduler
from vlcache_jax.engine.uploads import DeviceCopies, Transfers, Upload
from vlcache_jax.inputs.layout import ImageRef
from vlcache_jax.pallas_kernels import Work
from vlcache_jax.reuse.selection import Selection
from vlcache_jax.reuse.shift import Moves


class Passage:
    """Runs a step's rows through the layers. Between layers other programs may use the pool.

    Args:
      runner: computes.
      step: its encoder rows have been staged.

    Attributes:
      layer: the first that is not launched yet.
      x: hidden states of the rows that have left the one before; in the end, of those that leave the last layer.
      captured: keys before rotation and values of each layer's rows so far, where some are wanted.
      chosen: if rows are chosen on the device, their order then (`choose`).
    """

    def __init__(self, runner: Runner, step: Step):
        self.runner, self.step = runner, step
        self.layer = 0
        self.captured: list[tuple[jax.Array, jax.Array]] = []
        self.chosen: jax.Array | None = None
        self._score: jax.Array | None = None
        self._held = first = step.bounds[0]
        self._leaving = step.leaving
        most, shift = runner.ladder.max_rows, step.shift
        self._works: dict[tuple[int, bool], Work] = {}
        shifted = None if shift is None else shift.pack(most, runner.shapes.moved)
        self._rows, self._shifted = runner.devices.put((pack(step.rows, most), shifted))
        embeddings = runner.text["embed_tokens"]
        self.x, self._deepstack = runner.run(Embed(first), embeddings, runner.encoder_rows(), self._rows)

    @property
    def is_done(self) -> bool:
        """Whether all layers are launched."""
        return self.layer == len(self.step.active)

    def advance(self, stop: int) -> None:
        """Launches the layers before `stop`, but no part of what is one program.

        So which programs run does not depend on when records arrive, and neither does the last digit of an answer.
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
        self.x, pool[layers], captured = self.runner.run(
            block, weights, self.x, pool[layers], self._rows, active, work, moves
        )
        if self.step.captured:
            self.captured += captured

    def _moves(self, layers: slice) -> Moves | None:
        """What these layers move."""
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
        self.x, *pool[:], values = run(
            Layer(size, leaving, added is not None, moves is not None, like),
            weights, self.x, *pool, self._rows, np.array(self._active(layer), np.int32),
            self._work(leaving, is_chosen), added, moves,
        )  # fmt: skip
        if self.step.captured:
            self.captured.append(values)

    def _work(self, bound: int, is_chosen: bool) -> Work:
        """The work list of layers with this bound; made when the first of them comes: the device computes meanwhile."""
        if (bound, is_chosen) not in self._works:
            config = self.runner.shapes.work_config(bound)
            self._works[bound, is_chosen] = self.runner.devices.put(self.step.work(bound, is_chosen, config))
        return self._works[bound, is_chosen]

    def _active(self, layer: int) -> tuple[int, int]:
        """Rows that a layer computes, and those of them that the next one needs."""
        return self.step.active[layer], self._leaving[layer][1]

    def _score_rows(self, selection: Selection, layer: int, pool: list[jax.Array]) -> jax.Array:
        """Adds a layer's scores to those of the layers before."""
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
    """Whether the layers from `first` on of a step with these bounds are one program."""
    size, stop = bounds[first], first + BLOCK
    if size > BLOCK_ROWS or selects or first < num_deepstack or stop >= len(bounds):
        return False
    return all(bounds[layer + 1] == size for layer in range(first, stop))


def usable_ladder(
    runner: Runner, prefills: abc.Sequence[Prefill], calls: tuple[int, ...], encoded: abc.Container[ImageRef]
) -> Ladder | None:
    """The sizes for a turn's steps, for which all programs are there; None: they are coming, and the turn waits.

    While the programs of a step are coming, rungs that are there serve: several smaller ones, or a larger one. Cutting
    is exact. Steps that choose rows or move images keep their sizes.

    Args:
      calls: sizes of encoder calls.
      encoded: images that were encoded ahead.
    """
    ladder, fitting = runner.ladder, runner.fitting
    if not runner.programs.is_warming:
        return ladder
    other = [*_other_programs(runner, prefills)]
    steps = prefill_steps(prefills, ladder, runner.num_slots, runner.shapes.kv.layers)
    encoding = [*_encoding(runner, prefills, steps, calls, encoded)]
    best = [*other, *encoding, *_layers(runner, steps)]
    if not fitting.is_coming(best):
        return ladder
    if all(step.selection is None and step.shift is None for step in steps):
        there = tuple(rows for rows in ladder.rows if fitting.is_there(_plain(runner, rows)))
        if there and fitting.is_there([*other, *encoding]):
            fewer = dataclasses.replace(ladder, rows=there)
            steps = prefill_steps(prefills, fewer, runner.num_slots, runner.shapes.kv.layers)
            if fitting.is_there(_layers(runner, steps)):
                return fewer
    return None


def _plain(runner: Runner, rows: int) -> abc.Iterator[Program[Any]]:
    """What takes a step of which all layers compute `rows` rows through them."""
    return _through(runner, (*[rows] * runner.shapes.kv.layers, runner.ladder.outputs(rows)), False, False)


def _through(runner: Runner, bounds: abc.Sequence[int], shifts: bool, selects: bool) -> abc.Iterator[Program[Any]]:
    """What takes a step with these bounds through the layers, but for what chooses rows."""
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
    """What takes steps through the layers, and chooses tokens."""
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
    """What encodes the new images of steps."""
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
    """What makes the arrays that all need, opens lanes, copies pages and links images."""
    shapes = runner.shapes
    yield from (EmptyPool(), EmptyEncoderRows(), EmptyLanes(), OpenLane())
    held = sum(isinstance(one.sequence, Generation) and one.sequence.matcher is not None for one in prefills)
    if held:
        yield HoldLanes(runner.fitting.held(held))
    yield from (CopyPages(size) for size in cover(len(copied_pages(prefills)), runner.ladder.sequences))
    linked = collections.Counter(record.meta.padded for record, users in linked_images(prefills) for _ in users)
    for size, number in linked.items():
        for count in shapes.split_links(size, number):
            yield from (Link(size, count, part.stop - part.start) for part in shapes.link_groups)


PATCHES_PER_CALL = 16384  # more patches in one encoder call save nothing and cost memory


@dataclass(eq=False)
class PrefillGroup:
    """Prefills whose rows are cut into steps together.

    Attributes:
      prefills: these.
      ladder: sizes of their steps.
      images: of each, where they come from.
      upload: of stored images, before the first step has ended.
      steps: that are still to be launched; None: rows have not been cut into steps yet.
      passage: of the step that is being launched; None: it has not been begun.
      took: what the device takes for each kind of work launched so far, in seconds.
    """

    prefills: abc.Sequence[Prefill]
    ladder: Ladder
    upload: Upload
    steps: deque[Step] | None = None
    passage: Passage | None = None
    images: abc.Sequence[abc.Sequence[ImageUse]] = ()
    took: list[tuple[str, Future[float]]] = field(default_factory=list)
    where: dict[ImageRef, tuple[jax.Array, int]] = field(default_factory=dict)  # encoder output, first row in it
    kept: dict[ImageRef, Record] = field(default_factory=dict)
    here: dict[ImageRef, Index] = field(default_factory=dict)  # encoder rows in the device tier


@dataclass(frozen=True, eq=False)
class Launched:
    """A step under way.

    Attributes:
      turn: whose step it is.
      step: this.
      x: hidden states of the rows that leave the last layer.
      chosen: which rows the device chose; None: it was not asked.
      took: of its turn up to here, see `PrefillGroup`.
    """

    turn: PrefillGroup
    step: Step
    x: jax.Array
    chosen: jax.Array | None
    took: tuple[tuple[str, Future[float]], ...]


class _Ahead(NamedTuple):
    """What was encoded ahead for a sequence; see `PrefillGroup`."""

    where: dict[ImageRef, tuple[jax.Array, int]]
    took: list[tuple[str, Future[float]]]


class Prefiller:
    """Launches turns step by step.

    Args:
      runner: computes.
      writer: fills records with what was computed.
      clock: times it.
      copies: moves what is stored.
    """

    def __init__(self, runner: Runner, writer: Writer, clock: Clock, copies: DeviceCopies):
        self.runner, self.writer, self._clock, self.copies = runner, writer, clock, copies
        self._transfers = Transfers(runner)
        self._ahead: dict[Sequence, _Ahead] = {}  # of those that wait for records
        first, *rungs = runner.ladder.patches
        calls = first, *(rung for rung in rungs if rung <= PATCHES_PER_CALL)
        self._calls = calls if runner.is_host else calls[-1:]  # a GPU reads all weights again for a call of a few

    def encode_ahead(self, sequence: Sequence, uses: abc.Iterable[ImageUse]) -> bool:
        """Encodes images of a sequence that waits for records, as many as a step has rows for; whether it did."""
        known = self.ahead(sequence)
        new: dict[ImageRef, Record | None] = {}
        left = self.runner.ladder.max_rows - sum(i.num_tokens for one in self._ahead.values() for i in one.where)
        for use in uses:
            if use.span.image not in known and use.span.image not in new and use.span.image.num_tokens <= left:
                new[use.span.image] = use.encoder
                left -= use.span.image.num_tokens
        if not new:
            return False
        ahead = self._ahead.setdefault(sequence, _Ahead({}, []))
        ahead.where.update(self._encode(new, {image: record for image, record in new.items() if record is not None}))
        ahead.took.append(("encode", self._clock.mark([ahead.where[image][0] for image in new])))
        return True

    def ahead(self, sequence: Sequence) -> abc.Container[ImageRef]:
        """The images that were encoded ahead for a sequence."""
        return self._ahead[sequence].where if sequence in self._ahead else ()

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        self._ahead.pop(sequence, None)

    def next_turn(self, scheduler: Scheduler, ready: abc.Sequence[Sequence]) -> tuple[list[Prefill], Ladder] | None:
        """The prefills that have a turn, and the sizes of their steps. Those whose programs are coming wait for them;
        None: all do."""
        for some in (ready, *([one] for one in ready if len(ready) > 1)):
            turn = scheduler.next_turn(some)
            if (ladder := self._usable_ladder(turn)) is not None:
                return turn, ladder
        return None

    def _usable_ladder(self, prefills: abc.Sequence[Prefill]) -> Ladder | None:
        ahead = [self._ahead[one.sequence].where for one in prefills if one.sequence in self._ahead]
        encoded = {image for images in ahead for image in images}
        return usable_ladder(self.runner, prefills, self._calls, encoded)

    def begin(self, prefills: abc.Sequence[Prefill], ladder: Ladder) -> PrefillGroup:
        """Copies pages, and has stored images brought to the device.

        Args:
          ladder: sizes of the steps.
        """
        if pairs := copied_pages(prefills):
            self.runner.pool.copy_pages(pairs)
        turn = PrefillGroup(prefills, ladder, Upload(self.copies, self._transfers, prefills))
        for ahead in (self._ahead.pop(prefill.sequence, None) for prefill in prefills):
            if ahead is not None:
                turn.where.update(ahead.where)
                turn.took += ahead.took
        uses = [prefill.sequence.progress.images for prefill in prefills]
        turn.kept = {use.span.image: use.encoder for some in uses for use in some if use.encoder is not None}
        has_tier = self.copies.tier.num_pages > 0
        turn.images = [[self._found(use, turn) for use in some] for some in uses] if has_tier else uses
        return turn

    def launch(self, turn: PrefillGroup) -> Launched | None:
        """Launches a turn's next step, or of it what does not need records that are still on their way.

        Returns:
          The step; None: not all of it is launched yet.

        Raises:
          TierError: a record does not come.
        """
        layers = self.runner.config.text.num_layers
        self._link(turn)  # at once: it needs no steps
        if turn.steps is None:
            turn.steps = deque(prefill_steps(turn.prefills, turn.ladder, self.runner.num_slots, layers))
        step = turn.steps[0]
        if turn.passage is None:
            self.stage(step, turn)
            turn.passage = Passage(self.runner, step)
        passage = turn.passage
        while True:
            linked = turn.upload.layers
            passage.advance(linked)
            if passage.is_done:
                break
            self._link(turn)
            if turn.upload.layers == linked:
                return None
        turn.passage = None
        turn.steps.popleft()
        turn.took.append(("prefill", self._clock.mark([passage.x])))
        if step.captured:
            self.writer.kv(step.captured, self.copies.capture(step, passage.captured))
        self.writer.throttle(2 * self.runner.transfer_bytes)
        later = {placement.image for other in turn.steps for placement in other.placements}
        turn.where = {image: place for image, place in turn.where.items() if image in later}
        return Launched(turn, step, passage.x, passage.chosen, tuple(turn.took))

    def stage(self, step: Step, turn: PrefillGroup) -> None:
        """Encodes new images, and hands the step its encoder rows."""
        images = [placement.image for placement in step.placements if placement.image not in turn.here]
        new = [image for image in images if image not in turn.where and not _holds(turn.kept.get(image))]
        turn.where.update(self._encode(new, turn.kept))
        if new:
            turn.took.append(("encode", self._clock.mark([turn.where[image][0] for image in new])))
        self._stage(step, turn)

    def prepare(self) -> None:
        """Makes what the device will hold; returns when it is there."""
        self.runner.prepare()
        self.copies.prepare()

    def reset(self) -> None:
        """What the device held is gone."""
        self._ahead.clear()
        self.runner.reset()
        self.copies.reset()

    def close(self) -> None:
        """It launches nothing any more."""
        self._transfers.close()

    def _found(self, use: ImageUse, turn: PrefillGroup) -> ImageUse:
        """An image with the tier that it comes from now."""
        if use.linked is None or self.copies.tier.find(use.linked) is None:
            return use
        if (rows := self.copies.tier.find_rows(use.linked)) is None:
            return replace(use, kv_tier="device")
        turn.here[use.span.image] = rows
        return replace(use, kv_tier="device", encoder_tier="device")

    def _link(self, turn: PrefillGroup) -> None:
        """Writes the K, V of stored images that are there into the pool."""
        read, done = turn.upload.advance()
        if done:
            turn.took += [("transfer", self._clock.mark(read)), ("link", self._clock.mark(done))]

    def _encode(
        self, images: abc.Iterable[ImageRef], kept: abc.Mapping[ImageRef, Record]
    ) -> dict[ImageRef, tuple[jax.Array, int]]:
        """Encodes images, several in a call; returns of each in which output and from which row on it stands."""
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

    def _stage(self, step: Step, turn: PrefillGroup) -> None:
        """Hands the step its encoder rows: of each encoder output in one call, and those of records together."""
        placed: dict[int, tuple[jax.Array, list[tuple[Placement, int]]]] = {}
        kept, here = [], []
        for placement in step.placements:
            if placement.image in turn.here:
                here.append(placement)
            elif placement.image in turn.where:
                output, first = turn.where[placement.image]
                placed.setdefault(id(output), (output, []))[1].append((placement, first))
            else:
                kept.append(placement)
        for rows, placements in placed.values():
            place = self.runner.ladder.max_rows + np.arange(rows.shape[1], dtype=np.int32)  # nowhere
            for placement, first in placements:
                place[first + placement.image_row] = placement.place
            self.runner.stage(rows, place)
        if here:
            source = np.concatenate([turn.here[placement.image][placement.image_row] for placement in here])
            self.copies.stage(source, np.concatenate([placement.place for placement in here]))
        if kept:
            self._stage_kept([(turn.kept[placement.image].data, placement) for placement in kept])

    def _stage_kept(self, kept: abc.Sequence[tuple[np.ndarray, Placement]]) -> None:
        """Hands the step rows of records: no more than it computes."""
        parts = [data[:, placement.image_row] for data, placement in kept]
        place = np.concatenate([placement.place for _, placement in kept])
        most = self.runner.token_rungs[-1]
        missing = round_up(len(place) % most or most, self.runner.token_rungs) - (len(place) % most or most)
        rows = np.concatenate([*parts, np.zeros_like(parts[0], shape=(len(parts[0]), missing, parts[0].shape[2]))], 1)
        place = np.concatenate([place, self.runner.ladder.max_rows + np.arange(missing, dtype=np.int32)])  # nowhere
        for first in range(0, len(place), most):
            self.runner.stage(rows[:, first : first + most], place[first : first + most])


def _holds(record: Record | None) -> bool:
    """Whether a record holds an image's encoder rows."""
    return record is not None and record.is_ready
