"""Runs waves: prefill, first tokens, decoding together until every answer is finished.

The engine knows sequences, tokens and slots; it knows nothing of messages, files or the user's names for things.
"""

from __future__ import annotations

import contextlib
import time
from collections import abc
from typing import Any

import jax
import numpy as np

from vlcache_jax.cache.record import Record
from vlcache_jax.cache.why import Why
from vlcache_jax.cache.writer import Writer
from vlcache_jax.engine.batching import Placement, Step, cut_waves, encoder_calls, pad_rows, prefill_steps
from vlcache_jax.engine.ladder import round_up
from vlcache_jax.engine.request import NOT_FINITE, Forced, Generation, Logprob, Sequence
from vlcache_jax.engine.runner import Runner
from vlcache_jax.engine.sampling import MAX_BANNED, SamplerInputs
from vlcache_jax.inputs.layout import ImageRef, ImageSpan
from vlcache_jax.models import Rows
from vlcache_jax.reuse.plan import Plan
from vlcache_jax.reuse.selection import Selection

PATCHES_PER_CALL = 16384  # more patches in one encoder call save nothing and cost memory


class Engine:
    """Runs sequences on a runner. A call fills them in and says of each when it is finished.

    Args:
      runner: computes.
      writer: fills records with what was computed.
    """

    def __init__(self, runner: Runner, writer: Writer):
        self.runner = runner
        self.writer = writer

    def generate(
        self, sequences: abc.Iterable[Generation], finished: abc.Callable[[Generation], object], *, stop: bool = False
    ) -> None:
        """Generates the answers; `finished` is called with each as it ends.

        Args:
          stop: an error ends the call with the wave that it is in; sequences of later waves do not finish.
        """
        with self._clean_after_error():
            for wave in self._waves(sequences, finished, stop):
                for lane, sequence in enumerate(wave):
                    sequence.lane = lane
                if any(sequence.params.repetition_penalty != 1 for sequence in wave):
                    self.runner.mark_seen([np.unique(sequence.layout.token_ids) for sequence in wave])
                for step, x in self._prefill(wave):
                    self._first_tokens([sequence for sequence, _ in step.wanted], x)
                self._decode(wave, finished)

    def score(
        self, sequences: abc.Iterable[Forced], finished: abc.Callable[[Forced], object], *, stop: bool = False
    ) -> None:
        """Scores the continuations; `finished` is called with each as it ends. `stop`: see `generate`."""
        with self._clean_after_error():
            for wave in self._waves(sequences, finished, stop):
                for step, x in self._prefill(wave):
                    self._scores(step, x)
                for sequence in wave:
                    _finish(sequence, finished)

    @contextlib.contextmanager
    def _clean_after_error(self) -> abc.Iterator[None]:
        try:
            yield
        except BaseException:  # Ctrl-C too: donated arrays may be gone
            self.runner.reset()
            raise

    def _waves[S: (Generation, Forced)](
        self, sequences: abc.Iterable[S], finished: abc.Callable[[S], object], stop: bool
    ) -> abc.Iterator[list[S]]:
        """Sequences that run together; those that cannot run end here."""
        for number, wave in enumerate(cut_waves(sequences, self.runner.ladder.max_sequences, self.runner.num_slots)):
            for sequence in wave:
                sequence.metrics.wave = number
                if sequence.error is None:
                    self._settle(sequence)
                if sequence.error is not None:
                    self._discard(sequence)
                    _finish(sequence, finished)
            if running := [sequence for sequence in wave if sequence.error is None]:
                yield running
            for sequence in running:
                if sequence.error is not None:
                    self._discard(sequence)
            if stop and any(sequence.error is not None for sequence in wave):
                return

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
        layers = self.runner.config.text.num_layers
        for use in sequence.images:
            if use.linked is not None and not use.linked.wait():
                use.linked, use.why = None, Why.load_failed
                sequence.plan = sequence.plan.computing(use.span.tokens, layers)
        records = {use.span.image: use.encoder for use in sequence.images}
        try:
            for span in sequence.layout.images:
                if sequence.plan.depth[span.tokens].any() and not _holds(records.get(span.image)):
                    _ = span.image.patches
        except ValueError as error:
            sequence.fail(str(error))

    def _prefill[S: (Generation, Forced)](self, wave: abc.Sequence[S]) -> abc.Iterator[tuple[Step[S], jax.Array]]:
        """Yields each step of which logits are wanted, with the hidden states of the rows that left the last layer."""
        runner = self.runner
        begin = time.perf_counter()
        transferring, linking = self._link(wave)
        transfer = link = 0.0
        steps = prefill_steps(wave, runner.ladder, runner.num_slots, runner.config.text.num_layers)
        last_use = {placement.image: i for i, step in enumerate(steps) for placement in step.placements}
        where: dict[ImageRef, tuple[jax.Array, int]] = {}  # image -> encoder output, its first row in it
        kept = {use.span.image: use.encoder for sequence in wave for use in sequence.images if use.encoder is not None}
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
                self._note_chosen(wave[0], step.selection, np.asarray(chosen))
            jax.block_until_ready([where[image][0] for image in new])
            encoded_at = time.perf_counter() if new else start
            x.block_until_ready()
            encode += encoded_at - start
            prefill += time.perf_counter() - encoded_at
            where = {image: place for image, place in where.items() if last_use[image] > i}
            for sequence, _ in step.wanted:
                metrics = sequence.metrics
                metrics.transfer, metrics.link, metrics.encode, metrics.prefill = transfer, link, encode, prefill
            if step.wanted:
                yield step, x

    def _note_chosen(self, sequence: Sequence, selection: Selection, chosen: np.ndarray) -> None:
        """Puts what was chosen on the device into the plan, for the report."""
        candidates = selection.tokens[chosen[selection.must : selection.must + selection.keep[0]]]
        first = selection.policy.check_layer + 1
        depth = sequence.plan.depth.copy()
        for rank, token in enumerate(candidates):
            depth[token] = first + sum(rank < count for count in selection.keep)
        sequence.plan = Plan(depth)

    def _link(self, wave: abc.Sequence[Sequence]) -> tuple[list[jax.Array], list[jax.Array]]:
        """Writes the K, V of stored images into the pool; returns what to wait for: the transfers, and the linking."""
        # Answers to one prompt, and requests with the same image, share the transfer.
        users: dict[int, tuple[Record, list[tuple[Sequence, ImageSpan]]]] = {}
        for sequence in wave:
            for use in sequence.images:
                if use.linked is not None:
                    users.setdefault(id(use.linked), (use.linked, []))[1].append((sequence, use.span))
        transferring: list[jax.Array] = []
        linking: list[jax.Array] = []
        for record, spans in users.values():
            under_way = sum(data.nbytes for data in transferring)
            if transferring and under_way + record.meta.nbytes > self.runner.transfer_bytes:
                jax.block_until_ready(linking)  # what has been linked gives its memory back
                transferring, linking = [], []
            data = self.runner.put(record.data)
            transferring.append(data)
            for sequence, span in spans:
                slot = sequence.base + sequence.plan.slots[span.tokens]
                linking.append(self.runner.link(data, slot, sequence.layout.positions[:, span.tokens]))
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

    def _first_tokens(self, sequences: list[Generation], x: jax.Array) -> None:
        start = time.perf_counter()
        self._choose(sequences, *self.runner.head(x, len(sequences)))
        for sequence in sequences:
            sequence.metrics.first_token = time.perf_counter() - start

    def _decode(self, wave: list[Generation], finished: abc.Callable[[Generation], object]) -> None:
        start = time.perf_counter()
        active = wave
        while True:
            for sequence in active:
                sequence.metrics.decode = time.perf_counter() - start
                if sequence.finish_reason is not None:
                    _finish(sequence, finished)
            active = [sequence for sequence in active if sequence.finish_reason is None]
            if not active:
                return
            self._choose(active, *self.runner.decode(self._next_rows(active), [sequence.pages for sequence in active]))

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

    def _next_rows(self, active: list[Generation]) -> Rows:
        """The rows of the tokens chosen last."""
        index = np.array([len(s.layout) + len(s.token_ids) - 1 for s in active], np.int32)
        base = np.array([s.base for s in active], np.int32)
        delta = np.array([s.layout.delta for s in active], np.int32)
        token = np.array([s.token_ids[-1] for s in active], np.int32)
        rows = Rows(base + index, np.tile(index + delta, (3, 1)), base, base + index + 1, token)
        return pad_rows(rows, round_up(len(active), self.runner.ladder.sequences), self.runner.num_slots)

    def _choose(self, sequences: list[Generation], logits: jax.Array, greedy: jax.Array) -> None:
        """Appends a token to each sequence; row i of the logits belongs to sequence i."""
        if all(sequence.params.is_plain_greedy for sequence in sequences):
            for sequence, token in zip(sequences, np.asarray(greedy).tolist(), strict=False):
                sequence.append(token)
            return
        sampled = jax.device_get(self.runner.sample(logits, self._sampler_inputs(sequences, *logits.shape)))
        for row, sequence in enumerate(sequences):
            if sequence.params.logprobs is not None and sampled.token[row] >= 0:
                top = slice(sequence.params.logprobs)
                pairs = zip(sampled.top_token[row, top].tolist(), sampled.top_logprob[row, top].tolist(), strict=True)
                sequence.logprobs.append(Logprob(float(sampled.logprob[row]), dict(pairs)))
            sequence.append(int(sampled.token[row]))

    def _sampler_inputs(self, sequences: list[Generation], size: int, vocab_size: int) -> SamplerInputs:
        inputs = SamplerInputs(
            temperature=np.zeros(size, np.float32),
            top_k=np.zeros(size, np.int32),
            top_p=np.ones(size, np.float32),
            penalty=np.ones(size, np.float32),
            seed=np.zeros(size, np.uint32),
            step=np.zeros(size, np.int32),
            banned=np.full((size, MAX_BANNED), vocab_size, np.int32),
            sequence=np.full(size, self.runner.ladder.max_sequences, np.int32),
            logprobs=np.zeros(size, np.bool_),
        )
        for row, sequence in enumerate(sequences):
            params = sequence.params
            inputs.temperature[row], inputs.top_k[row], inputs.top_p[row] = (
                params.temperature, params.top_k, params.top_p
            )  # fmt: skip
            inputs.penalty[row] = params.repetition_penalty
            inputs.seed[row], inputs.step[row] = sequence.seed, len(sequence.token_ids)
            inputs.sequence[row] = sequence.lane
            inputs.logprobs[row] = params.logprobs is not None
            if len(sequence.token_ids) < params.min_tokens:
                end = sorted(sequence.end_tokens)
                inputs.banned[row, : len(end)] = end
        return inputs


def _finish[S: Sequence](sequence: S, finished: abc.Callable[[S], object]) -> None:
    sequence.is_finished = True
    finished(sequence)


def _holds(record: Record | None) -> bool:
    """Whether a record holds an image's encoder rows, or will in a moment."""
    return record is not None and (record.is_ready or (record.is_claimed and record.wait()))
