"""Runs waves: prefill in turns, first tokens, decoding together until every answer is finished.

The engine knows sequences, tokens and slots; it knows nothing of messages, files or the user's names for things.
"""

from __future__ import annotations

import contextlib
import time
from collections import abc, deque
from typing import Any

import jax
import numpy as np

from vlcache_jax.cache.record import Record
from vlcache_jax.cache.why import Why
from vlcache_jax.cache.writer import Writer
from vlcache_jax.engine.batching import (
    Placement,
    Prefill,
    Step,
    encoder_calls,
    linked_images,
    pad_rows,
    prefill_steps,
)  # fmt: skip
from vlcache_jax.engine.decoding import append, next_rows, sampler_inputs
from vlcache_jax.engine.ladder import round_up
from vlcache_jax.engine.pages import Pages
from vlcache_jax.engine.request import NOT_FINITE, Forced, Generation, Sequence
from vlcache_jax.engine.runner import Runner
from vlcache_jax.engine.scheduler import Scheduler
from vlcache_jax.inputs.layout import ImageRef
from vlcache_jax.reuse.plan import Plan
from vlcache_jax.reuse.selection import Selection

PATCHES_PER_CALL = 16384  # more patches in one encoder call save nothing and cost memory


class Engine:
    """Runs sequences on a runner. A call fills them in and says of each when it is finished.

    Args:
      runner: computes.
      writer: fills records with what was computed.
      pages: of the runner's pool.
    """

    def __init__(self, runner: Runner, writer: Writer, pages: Pages):
        self.runner = runner
        self.writer = writer
        self.pages = pages
        self.scheduler = Scheduler(pages, runner.ladder.max_sequences, runner.config.text.num_layers)

    def generate(
        self, sequences: abc.Iterable[Generation], finished: abc.Callable[[Generation], object], *, stop: bool = False
    ) -> None:
        """Generates the answers; `finished` is called with each as it ends.

        Args:
          stop: an error ends the call with the wave that it is in; sequences of later waves do not finish.
        """
        with self._clean_after_error():
            waiting = _in_order(sequences)
            for wave, turns in self._waves(waiting, finished, stop):
                for lane, sequence in enumerate(wave):
                    sequence.lane = lane
                if any(sequence.params.repetition_penalty != 1 for sequence in wave):
                    self.runner.mark_seen([np.union1d(s.layout.token_ids, s.token_ids) for s in wave])
                running = self._in_turns(turns, waiting, self._first_tokens)
                self._end_failed(wave, finished)
                self._decode(running, waiting, finished)

    def score(
        self, sequences: abc.Iterable[Forced], finished: abc.Callable[[Forced], object], *, stop: bool = False
    ) -> None:
        """Scores the continuations; `finished` is called with each as it ends. `stop`: see `generate`."""
        with self._clean_after_error():
            waiting = _in_order(sequences)
            for _, turns in self._waves(waiting, finished, stop):
                for sequence in self._in_turns(turns, waiting, self._scores):
                    self._finish(sequence, finished)

    @contextlib.contextmanager
    def _clean_after_error(self) -> abc.Iterator[None]:
        try:
            yield
        except BaseException:  # Ctrl-C too: donated arrays may be gone
            self.pages.reset()  # first: nothing may be found in a pool that is gone
            self.runner.reset()
            raise

    def _waves[S: (Generation, Forced)](
        self, waiting: deque[S], finished: abc.Callable[[S], object], stop: bool
    ) -> abc.Iterator[tuple[list[S], list[list[S]]]]:
        """Sequences that run together, and those of each turn; those that failed before they ran end here."""
        number = 0
        while waiting:
            wave, turns = self.scheduler.admit(waiting)
            for sequence in wave:
                if sequence.ran is None:
                    sequence.metrics.wave = number
            self._end_failed(wave, finished)  # before anybody waits for what they were to compute
            yield wave, turns
            self._end_failed(wave, finished)
            if stop and any(sequence.error is not None for sequence in wave):
                return
            number += 1

    def _end_failed[S: (Generation, Forced)](self, wave: list[S], finished: abc.Callable[[S], object]) -> None:
        for sequence in wave:
            if sequence.error is not None and not sequence.is_finished:
                self._finish(sequence, finished)

    def _finish[S: Sequence](self, sequence: S, finished: abc.Callable[[S], object]) -> None:
        self.scheduler.finish(sequence)
        if sequence.error is not None:
            self._discard(sequence)
        sequence.is_finished = True
        finished(sequence)

    def _in_turns[S: (Generation, Forced)](
        self,
        turns: list[list[S]],
        waiting: deque[S],
        use: abc.Callable[[Step[S], jax.Array], None],
    ) -> list[S]:
        """Prefills turn by turn; returns those that go on.

        Once one has failed, those of later turns, which may count on it, go back to what waits.

        Args:
          use: is handed each step of which logits are wanted, with the hidden states of the rows that left the last
            layer.
        """
        done: list[S] = []
        for turn in turns:
            if any(sequence.error is not None for sequence in done):
                break
            for sequence in turn:
                self._settle(sequence)
            good = [sequence for sequence in turn if sequence.error is None]
            self.runner.copy_pages([s.lease.copy for s in good if s.lease is not None and s.lease.copy is not None])
            for together in zip(*map(self.scheduler.prefills, good), strict=True):  # one has several if it is alone
                for step, x in self._prefill(together):
                    use(step, x)
            self.scheduler.computed(turn)
            done += turn
        late = [sequence for turn in turns for sequence in turn if sequence not in done]
        self.scheduler.put_back(late)
        _wait_again(waiting, late)
        return [sequence for sequence in done if sequence.error is None]

    def _discard(self, sequence: Sequence) -> None:
        """What a sequence that failed was to keep is not kept; who waits for it computes instead."""
        for use in sequence.images:
            made = use.captured, None if use.has_encoder else use.encoder
            self.writer.discard([record for record in made if record is not None])

    def _settle(self, sequence: Generation | Forced) -> None:
        """Decides what is linked and what is computed, and has the pixels that this takes.

        A record that was not filled after all is no error: its image is computed. A picture that cannot be decoded is
        one, and ends the sequence.
        """
        assert sequence.lease is not None
        layers, cached = self.runner.config.text.num_layers, sequence.lease.cached
        if sequence.lease.is_fork:
            cached = len(sequence.layout)
        for use in sequence.images:
            is_there = use.span.start + use.span.length <= cached
            if use.linked is not None and not is_there and not use.linked.wait():
                use.linked, use.why = None, Why.load_failed
                sequence.plan = sequence.plan.computing(use.span.tokens, layers)
        plan = sequence.plan.behind(sequence.lease.cached)
        if sequence.ran is None:
            sequence.ran, sequence.cached = plan, sequence.lease.cached
        records = {use.span.image: use.encoder for use in sequence.images}
        try:
            for span in sequence.layout.images:
                if plan.depth[span.tokens].any() and not _holds(records.get(span.image)):
                    _ = span.image.patches
        except ValueError as error:
            sequence.fail(str(error))

    def _prefill[S: (Generation, Forced)](
        self, prefills: abc.Sequence[Prefill[S]]
    ) -> abc.Iterator[tuple[Step[S], jax.Array]]:
        """Yields each step of which logits are wanted, with the hidden states of the rows that left the last layer."""
        runner = self.runner
        begin = time.perf_counter()
        transferring, linking = self._link(prefills)
        transfer = link = 0.0
        steps = prefill_steps(prefills, runner.ladder, runner.num_slots, runner.config.text.num_layers)
        last_use = {placement.image: i for i, step in enumerate(steps) for placement in step.placements}
        where: dict[ImageRef, tuple[jax.Array, int]] = {}  # image -> encoder output, its first row in it
        uses = [use for prefill in prefills for use in prefill.sequence.images]
        kept = {use.span.image: use.encoder for use in uses if use.encoder is not None}
        encode = prefill = 0.0
        for i, step in enumerate(steps):
            start = time.perf_counter()
            new = [p.image for p in step.placements if p.image not in where and not _holds(kept.get(p.image))]
            where.update(self._encode(new, kept))
            self._stage(step, where, kept)
            x, captured, chosen = runner.prefill(step)
            if captured:
                k, v = zip(*captured, strict=True)
                self.writer.kv(step.captured, k, v)
                self.writer.throttle(2)  # one more may wait while the next step runs
            # Everything is on its way; waiting in order tells the steps apart without holding them up.
            if transferring:
                jax.block_until_ready(transferring)
                transferred_at = time.perf_counter()
                jax.block_until_ready(linking)
                transfer, start = transferred_at - begin, time.perf_counter()
                link = start - transferred_at
                transferring, linking = [], []
            if step.selection is not None and chosen is not None:
                _note_chosen(prefills[0].sequence, step.selection, np.asarray(chosen))
            jax.block_until_ready([where[image][0] for image in new])
            encoded_at = time.perf_counter() if new else start
            x.block_until_ready()
            encode += encoded_at - start
            prefill += time.perf_counter() - encoded_at
            where = {image: place for image, place in where.items() if last_use[image] > i}
            for sequence, _ in step.wanted:
                if not sequence.generated:  # else it was put back, and has been timed
                    metrics = sequence.metrics
                    metrics.transfer, metrics.link, metrics.encode, metrics.prefill = transfer, link, encode, prefill
            if step.wanted:
                yield step, x

    def _link(self, prefills: abc.Sequence[Prefill[Any]]) -> tuple[list[jax.Array], list[jax.Array]]:
        """Writes the K, V of stored images into the pool; returns what to wait for: the transfers, and the linking."""
        transferring: list[jax.Array] = []
        linking: list[jax.Array] = []
        for record, spans in linked_images(prefills):
            under_way = sum(data.nbytes for data in transferring)
            if transferring and under_way + record.meta.nbytes > self.runner.transfer_bytes:
                jax.block_until_ready(linking)  # what has been linked gives its memory back
                transferring, linking = [], []
            data = self.runner.put(record.data)
            transferring.append(data)
            for prefill, span in spans:
                slot = prefill.linked_slots(span, self.runner.num_slots + data.shape[2])
                linking.append(self.runner.link(data, slot, prefill.layout.positions[:, span.tokens]))
        return transferring, linking

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

    def _stage(
        self, step: Step[Any], where: abc.Mapping[ImageRef, tuple[jax.Array, int]], kept: abc.Mapping[ImageRef, Record]
    ) -> None:
        """Hands the step its encoder rows, one call for each encoder output or record that holds some of them."""
        placed: dict[int, tuple[jax.Array | np.ndarray, list[tuple[Placement, int]]]] = {}
        for placement in step.placements:
            image = placement.image
            if image in where:
                output, first = where[image]
                placed.setdefault(id(output), (output, []))[1].append((placement, first))
            else:
                size = round_up(int(placement.image_row.max()) + 1, self.runner.token_rungs)  # what is needed, no more
                placed[id(image)] = kept[image].data[:, :size], [(placement, 0)]
        for rows, placements in placed.values():
            place = self.runner.ladder.max_rows + np.arange(rows.shape[1], dtype=np.int32)  # nowhere
            for placement, first in placements:
                place[first + placement.image_row] = placement.place
            self.runner.stage(rows, place)

    def _first_tokens(self, step: Step[Generation], x: jax.Array) -> None:
        start = time.perf_counter()
        sequences = [sequence for sequence, _ in step.wanted]
        self._choose(sequences, *self.runner.head(x, len(sequences)))
        for sequence in sequences:
            if len(sequence.token_ids) < 2:
                sequence.metrics.first_token = time.perf_counter() - start

    def _decode(
        self, active: list[Generation], waiting: deque[Generation], finished: abc.Callable[[Generation], object]
    ) -> None:
        last = time.perf_counter()
        while True:
            last, took = (now := time.perf_counter()), now - last
            for sequence in active:
                sequence.metrics.decode += took
                if sequence.finish_reason is not None:
                    self._finish(sequence, finished)
            active = [sequence for sequence in active if sequence.finish_reason is None]
            late = self.scheduler.grow(active)
            _wait_again(waiting, late)
            active = [sequence for sequence in active if sequence not in late]
            if not active:
                return
            tables = [sequence.lease.table for sequence in active if sequence.lease is not None]
            rows = next_rows(active, tables)
            rows = pad_rows(rows, round_up(len(active), self.runner.ladder.sequences), self.runner.num_slots)
            self._choose(active, *self.runner.decode(rows, tables))

    def _scores(self, step: Step[Forced], x: jax.Array) -> None:
        start = time.perf_counter()
        logits, _ = self.runner.head(x, len(step.wanted))
        target = np.zeros(len(logits), np.int32)
        target[: len(step.wanted)] = [sequence.layout.token_ids[i + 1] for sequence, i in step.wanted]
        logprobs, greedy = jax.device_get(self.runner.score(logits, target))
        kept = np.asarray(logits) if any(sequence.keep_logits for sequence, _ in step.wanted) else None
        for row, (sequence, _) in enumerate(step.wanted):
            sequence.logprobs.append(logprobs[row])
            sequence.greedy.append(greedy[row])
            if not np.isfinite(logprobs[row]):
                sequence.fail(NOT_FINITE)
            if kept is not None and sequence.keep_logits:
                sequence.logits.append(kept[row].copy())
            sequence.metrics.first_token = time.perf_counter() - start

    def _choose(self, sequences: list[Generation], logits: jax.Array, greedy: jax.Array) -> None:
        """Appends a token to each sequence; row i of the logits belongs to sequence i."""
        if all(sequence.params.is_plain_greedy for sequence in sequences):
            for sequence, token in zip(sequences, np.asarray(greedy).tolist(), strict=False):
                sequence.append(token)
            return
        inputs = sampler_inputs(sequences, *logits.shape, no_lane=self.runner.ladder.max_sequences)
        append(sequences, jax.device_get(self.runner.sample(logits, inputs)))


def _in_order[S: Sequence](sequences: abc.Iterable[S]) -> deque[S]:
    waiting = deque(sequences)
    for number, sequence in enumerate(waiting):
        sequence.arrived = number
    return waiting


def _wait_again[S: Sequence](waiting: deque[S], late: abc.Iterable[S]) -> None:
    """They came before all that wait."""
    waiting.extendleft(sorted(late, key=lambda sequence: -sequence.arrived))


def _note_chosen(sequence: Sequence, selection: Selection, chosen: np.ndarray) -> None:
    """Puts what was chosen on the device into the plan, for the report."""
    candidates = selection.tokens[chosen[selection.must : selection.must + selection.keep[0]]]
    first = selection.policy.check_layer + 1
    assert sequence.ran is not None
    depth = sequence.ran.depth.copy()
    for rank, token in enumerate(candidates):
        depth[token] = first + sum(rank < count for count in selection.keep)
    sequence.ran = Plan(depth)


def _holds(record: Record | None) -> bool:
    """Whether a record holds an image's encoder rows, or will in a moment."""
    return record is not None and (record.is_ready or (record.is_claimed and record.wait()))
