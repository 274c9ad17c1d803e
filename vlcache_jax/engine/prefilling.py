"""Launches what prompts compute: linking, encoding, and the steps of their rows through the layers. Nothing waits."""

from __future__ import annotations

from collections import abc, deque
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import numpy as np

from vlcache_jax.cache.device import Index
from vlcache_jax.cache.record import Record
from vlcache_jax.cache.writer import Writer
from vlcache_jax.device.clock import Clock
from vlcache_jax.device.ladder import Ladder, round_up
from vlcache_jax.device.runner import Runner
from vlcache_jax.engine.batching import Placement, Prefill, Step, copied_pages, encoder_calls, prefill_steps
from vlcache_jax.engine.device_copies import DeviceCopies
from vlcache_jax.engine.needed import usable_ladder
from vlcache_jax.engine.passage import Passage
from vlcache_jax.engine.request import ImageUse, Sequence
from vlcache_jax.engine.scheduler import Scheduler
from vlcache_jax.engine.uploads import Transfers, Upload
from vlcache_jax.inputs.layout import ImageRef

PATCHES_PER_CALL = 16384  # more patches in one encoder call save nothing and cost memory


@dataclass(eq=False)
class Turn:
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
      took: of its turn up to here, see `Turn`.
    """

    turn: Turn
    step: Step
    x: jax.Array
    chosen: jax.Array | None
    took: tuple[tuple[str, Future[float]], ...]


class _Ahead(NamedTuple):
    """What was encoded ahead for a sequence; see `Turn`."""

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

    def begin(self, prefills: abc.Sequence[Prefill], ladder: Ladder) -> Turn:
        """Copies pages, and has stored images brought to the device.

        Args:
          ladder: sizes of the steps.
        """
        if pairs := copied_pages(prefills):
            self.runner.pool.copy_pages(pairs)
        turn = Turn(prefills, ladder, Upload(self.copies, self._transfers, prefills))
        for ahead in (self._ahead.pop(prefill.sequence, None) for prefill in prefills):
            if ahead is not None:
                turn.where.update(ahead.where)
                turn.took += ahead.took
        turn.images = [[self._found(use, turn) for use in prefill.sequence.progress.images] for prefill in prefills]
        return turn

    def launch(self, turn: Turn) -> Launched | None:
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

    def stage(self, step: Step, turn: Turn) -> None:
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

    def _found(self, use: ImageUse, turn: Turn) -> ImageUse:
        """An image with the tier that it comes from now."""
        if use.encoder is not None:
            turn.kept[use.span.image] = use.encoder
        if use.linked is None or self.copies.tier.find(use.linked) is None:
            return use
        if (rows := self.copies.tier.find_rows(use.linked)) is None:
            return replace(use, kv_tier="device")
        turn.here[use.span.image] = rows
        return replace(use, kv_tier="device", encoder_tier="device")

    def _link(self, turn: Turn) -> None:
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

    def _stage(self, step: Step, turn: Turn) -> None:
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
