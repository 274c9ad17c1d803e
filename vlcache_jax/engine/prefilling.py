"""Launches what prompts compute: linking, encoding, and the steps of their rows through the layers. Nothing waits."""

from __future__ import annotations

from collections import abc, deque
from concurrent.futures import Future
from dataclasses import dataclass, field

import jax
import numpy as np

from vlcache_jax.cache.record import Record
from vlcache_jax.cache.writer import Writer
from vlcache_jax.engine.batching import Placement, Prefill, Step, encoder_calls, linked_images, prefill_steps
from vlcache_jax.engine.clock import Clock
from vlcache_jax.engine.ladder import round_up
from vlcache_jax.engine.request import Sequence
from vlcache_jax.engine.runner import Runner
from vlcache_jax.inputs.layout import ImageRef
from vlcache_jax.reuse.plan import Plan
from vlcache_jax.reuse.selection import Selection

PATCHES_PER_CALL = 16384  # more patches in one encoder call save nothing and cost memory


@dataclass(eq=False)
class Turn[S: Sequence]:
    """Prefills whose rows are cut into steps together.

    Attributes:
      prefills: these.
      steps: that are still to be launched.
      took: what the device takes for each kind of work launched so far, in seconds.
    """

    prefills: abc.Sequence[Prefill[S]]
    steps: deque[Step[S]]
    took: list[tuple[str, Future[float]]] = field(default_factory=list)
    where: dict[ImageRef, tuple[jax.Array, int]] = field(default_factory=dict)  # encoder output, first row in it
    kept: dict[ImageRef, Record] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Launched[S: Sequence]:
    """A step under way.

    Attributes:
      turn: whose step it is.
      step: this.
      x: hidden states of the rows that leave the last layer.
      chosen: which rows the device chose; None: it was not asked.
      took: of its turn up to here, see `Turn`.
    """

    turn: Turn[S]
    step: Step[S]
    x: jax.Array
    chosen: jax.Array | None
    took: tuple[tuple[str, Future[float]], ...]

    def note_chosen(self) -> None:
        """Puts what was chosen on the device into the plan, for the report."""
        if self.step.selection is not None and self.chosen is not None:
            [prefill] = self.turn.prefills
            _note_chosen(prefill.sequence, self.step.selection, np.asarray(self.chosen))


class Prefiller[S: Sequence]:
    """Launches turns step by step.

    Args:
      runner: computes.
      writer: fills records with what was computed.
      clock: times it.
    """

    def __init__(self, runner: Runner, writer: Writer, clock: Clock):
        self.runner, self.writer, self._clock = runner, writer, clock

    def begin(self, prefills: abc.Sequence[Prefill[S]]) -> Turn[S]:
        """Copies pages, links stored images, and cuts the rest into steps."""
        leases = [prefill.sequence.lease for prefill in prefills if prefill.sequence.prefilled == 0]
        self.runner.copy_pages([lease.copy for lease in leases if lease is not None and lease.copy is not None])
        config = self.runner.config
        steps = prefill_steps(prefills, self.runner.ladder, self.runner.num_slots, config.text.num_layers)
        turn = Turn(prefills, deque(steps))
        for use in (use for prefill in prefills for use in prefill.sequence.images):
            if use.encoder is not None:
                turn.kept[use.span.image] = use.encoder
        self._link(turn)
        return turn

    def launch(self, turn: Turn[S]) -> Launched[S]:
        """Launches a turn's next step."""
        step = turn.steps.popleft()
        new = [p.image for p in step.placements if p.image not in turn.where and not _holds(turn.kept.get(p.image))]
        turn.where.update(self._encode(new, turn.kept))
        if new:
            turn.took.append(("encode", self._clock.mark([turn.where[image][0] for image in new])))
        self._stage(step, turn)
        x, captured, chosen = self.runner.prefill(step)
        turn.took.append(("prefill", self._clock.mark([x])))
        if captured:
            k, v = zip(*captured, strict=True)
            self.writer.kv(step.captured, k, v)
            self.writer.throttle(2)  # what they read occupies the device
        later = {placement.image for other in turn.steps for placement in other.placements}
        turn.where = {image: place for image, place in turn.where.items() if image in later}
        return Launched(turn, step, x, chosen, tuple(turn.took))

    def _link(self, turn: Turn[S]) -> None:
        """Writes the K, V of stored images into the pool."""
        transferring: list[jax.Array] = []
        linking: list[jax.Array] = []
        for record, spans in linked_images(turn.prefills):
            under_way = sum(data.nbytes for data in transferring)
            if transferring and under_way + record.meta.nbytes > self.runner.transfer_bytes:
                jax.block_until_ready(linking)  # what has been linked gives its memory back
                transferring = []
            data = self.runner.put(record.data)
            transferring.append(data)
            for prefill, span in spans:
                slot = prefill.linked_slots(span, self.runner.num_slots + data.shape[2])
                linking.append(self.runner.link(data, slot, prefill.layout.positions[:, span.tokens]))
        if linking:
            turn.took += [("transfer", self._clock.mark(transferring)), ("link", self._clock.mark(linking))]

    def _encode(
        self, images: abc.Iterable[ImageRef], kept: abc.Mapping[ImageRef, Record]
    ) -> dict[ImageRef, tuple[jax.Array, int]]:
        """Encodes images, several in a call; returns of each in which output and from which row on it stands."""
        where = {}
        for call in encoder_calls(images, min(PATCHES_PER_CALL, self.runner.ladder.patches[-1])):
            encoded = self.runner.encode([image.patches.pixels for image in call], [i.patches.grid for i in call])
            first = np.cumsum([0, *(image.num_tokens for image in call)]).tolist()
            for image, row in zip(call, first[:-1], strict=True):
                where[image] = encoded, row
                record = kept.get(image)
                if record is not None and not record.is_settled:
                    self.writer.encoder(record, encoded, row)
        return where

    def _stage(self, step: Step[S], turn: Turn[S]) -> None:
        """Hands the step its encoder rows, one call for each encoder output or record that holds some of them."""
        placed: dict[int, tuple[jax.Array | np.ndarray, list[tuple[Placement, int]]]] = {}
        for placement in step.placements:
            image = placement.image
            if image in turn.where:
                output, first = turn.where[image]
                placed.setdefault(id(output), (output, []))[1].append((placement, first))
            else:
                size = round_up(int(placement.image_row.max()) + 1, self.runner.token_rungs)  # what is needed, no more
                placed[id(image)] = turn.kept[image].data[:, :size], [(placement, 0)]
        for rows, placements in placed.values():
            place = self.runner.ladder.max_rows + np.arange(rows.shape[1], dtype=np.int32)  # nowhere
            for placement, first in placements:
                place[first + placement.image_row] = placement.place
            self.runner.stage(rows, place)


def _holds(record: Record | None) -> bool:
    """Whether a record holds an image's encoder rows."""
    return record is not None and record.is_ready


def _note_chosen(sequence: Sequence, selection: Selection, chosen: np.ndarray) -> None:
    candidates = selection.tokens[chosen[selection.must : selection.must + selection.keep[0]]]
    first = selection.policy.check_layer + 1
    assert sequence.ran is not None
    depth = sequence.ran.depth.copy()
    for rank, token in enumerate(candidates):
        depth[token] = first + sum(rank < count for count in selection.keep)
    sequence.ran = Plan(depth)
