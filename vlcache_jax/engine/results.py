"""Results that were launched and are read later: first tokens, tokens of decode programs, scores, hidden states."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import abc, deque
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from vlcache_jax.cache.writer import Writer
from vlcache_jax.device.runner import Runner
from vlcache_jax.device.sampler import NO_ANSWER, SampledTokens
from vlcache_jax.engine.batching import Prefill, Step, prefill_steps
from vlcache_jax.engine.completions import Logprob
from vlcache_jax.engine.compressed_pages import Compression
from vlcache_jax.engine.decode_slots import DecodeSlots
from vlcache_jax.engine.prefilling import ForwardPass, LaunchedStep
from vlcache_jax.engine.readiness import PrefillPlan
from vlcache_jax.engine.request import Generation, Sequence
from vlcache_jax.engine.scoring import PooledSequence, ScoredSequence
from vlcache_jax.reuse.policies import Plan


class Results:
    """Results in flight, which are read once.

    Args:
      sequences: the sequences that they belong to.
    """

    def __init__(self, sequences: abc.Iterable[Sequence]):
        self._attempts = {sequence: sequence.progress.attempt for sequence in sequences}

    def read(self) -> abc.Iterator[Sequence]:
        """Wait for the results, store them, and yield the sequences that changed."""
        raise NotImplementedError

    def _counts(self, sequence: Sequence) -> bool:
        """Return whether results of a sequence are still valid."""
        block_table = sequence.progress.block_table
        is_sound = sequence.progress.compressed is not None or (block_table is not None and not block_table.is_lost)
        return is_sound and self._attempts[sequence] == sequence.progress.attempt and not sequence.end.is_finished


class InFlightResults:
    """Queue of the results in flight, in launch order, and of the sequences that leave after them.

    Memory outside the pool may be released when everything launched before has been read.

    Attributes:
      launched, read: numbers of results launched and read so far.
    """

    def __init__(self) -> None:
        self.launched = self.read = 0
        self._results: deque[Results] = deque()
        self._leaving: deque[tuple[int, Sequence]] = deque()  # with the number of results to read before

    @property
    def unread(self) -> int:
        """Number of results in the queue."""
        return len(self._results)

    @property
    def oldest(self) -> Results:
        """Results that are read next."""
        return self._results[0]

    @property
    def is_in_flight(self) -> bool:
        """True if results are unread or sequences have not left."""
        return bool(self._results or self._leaving)

    def add(self, results: Results) -> None:
        """Append results that were launched."""
        self.launched += 1
        self._results.append(results)

    def pass_oldest(self) -> None:
        """Remove the oldest results after they were read."""
        self._results.popleft()
        self.read += 1

    def leave(self, sequence: Sequence, *, now: bool) -> None:
        """Release a sequence's cache reservation.

        Args:
          sequence: the sequence.
          now: whether to release it immediately, instead of after everything launched so far has been read.
        """
        if now:
            _leave(sequence)
        else:
            self._leaving.append((self.launched, sequence))

    def let_leave(self) -> None:
        """Release the sequences for which everything launched before they ended has been read."""
        while self._leaving and self._leaving[0][0] <= self.read:
            _leave(self._leaving.popleft()[1])

    def clear(self) -> None:
        """Discard all results without reading them."""
        self._results.clear()
        self.read = self.launched
        self.let_leave()


def _leave(sequence: Sequence) -> None:
    if sequence.planned.reservation is not None:
        sequence.planned.reservation.leave()


class Tokens(Results):
    """Tokens of outputs.

    Args:
      answers: the outputs, one for each row from `first` on.
      sampled: tokens that each program sampled, [B], or that a decode program sampled, [tokens, B], in order.
      launched: the prefill chunk that they follow; None if they continue outputs.
      first: row of the first output.
      forced: for each output, tokens before the sampled ones that were forced.

    Attributes:
      size: rows of the programs, including padding.
    """

    def __init__(
        self,
        answers: abc.Sequence[Generation],
        sampled: abc.Sequence[SampledTokens],
        launched: LaunchedStep | None = None,
        first: int = 0,
        forced: abc.Iterable[list[int]] = itertools.repeat([]),
    ):
        super().__init__(answers)
        self._answers, self._launched, self._first, self._forced = answers, launched, first, forced
        self.size = int(sampled[0].token.shape[-1])
        wants_all = any(answer.params.logprobs is not None for answer in answers)
        self._arrays: list[tuple[jax.Array, ...]] = [tuple(one if wants_all else one[:1]) for one in sampled]
        jax.copy_to_host_async(self._arrays)

    def read(self) -> abc.Iterator[Sequence]:
        token, *logprobs = (_steps(parts) for parts in zip(*self._arrays, strict=True))
        if token.ndim == 1:
            token, *logprobs = token[None], *(x[None] for x in logprobs)
        now = time.perf_counter()
        for row, (answer, forced) in enumerate(zip(self._answers, self._forced, strict=False), self._first):
            if not self._counts(answer):
                continue
            if self._launched is not None:
                _note_prefill(answer, self._launched)
            new = [*forced, *itertools.takewhile(lambda one: one != NO_ANSWER, token[:, row].tolist())]
            with answer.lock:
                count = answer.extend(new)
                _note_delivery(answer, now)
                wanted = answer.params.logprobs
                for i in range(count if wanted is not None else 0):
                    answer.logprobs.append(_logprob(wanted or 0, new[i], *(x[i, row] for x in logprobs)))
            if answer.matcher is not None and not answer.is_done:
                answer.matcher.advance(new)
            yield answer


class ScoreResult(Results):
    """Scores of the tokens that follow the tokens of a prefill chunk.

    Args:
      given: (row of the hidden states, sequence, token that follows), sorted by row.
    """

    def __init__(self, runner: Runner, launched: LaunchedStep, given: abc.Sequence[tuple[int, Sequence, int]]):
        super().__init__(sequence for _, sequence, _ in given)
        self._launched = launched
        self._slices: list[tuple[list[tuple[int, Sequence, int]], tuple[jax.Array, ...], jax.Array | None]] = []
        max_sequences = runner.buckets.max_sequences
        for some in _within(max_sequences, given):
            first = some[0][0]
            logits, begin = runner.head(launched.x, first, min(max_sequences, len(launched.x)))
            target = np.zeros(len(logits), np.int32)
            target[[row - begin for row, _, _ in some]] = [token for _, _, token in some]
            wants_top = any(isinstance(sequence, Generation) for _, sequence, _ in some)
            scored = runner.score(logits, target, wants_top=wants_top)
            keeps = any(isinstance(sequence, ScoredSequence) and sequence.keep_logits for _, sequence, _ in some)
            self._slices.append(
                ([(row - begin, one, token) for row, one, token in some], scored, logits if keeps else None)
            )
            jax.copy_to_host_async(self._slices[-1][1:])

    def read(self) -> abc.Iterator[Sequence]:
        now = time.perf_counter()
        for sequence in self._attempts:
            if isinstance(sequence, ScoredSequence) and self._counts(sequence):
                _note_prefill(sequence, self._launched)
                _note_delivery(sequence, now)
        for rows, scored, logits in self._slices:
            logprob, greedy, *top = map(np.asarray, scored)
            kept = None if logits is None else np.asarray(logits)
            for row, sequence, token in rows:
                if not self._counts(sequence):
                    continue
                if isinstance(sequence, ScoredSequence):
                    sequence.append(logprob[row], greedy[row], None if kept is None else kept[row].copy())
                elif isinstance(sequence, Generation) and not sequence.token_ids:
                    count = sequence.params.prompt_logprobs or 0
                    sequence.prompt_logprobs.append(_logprob(count, token, logprob[row], *(x[row] for x in top)))
        yield from (
            sequence for sequence in self._attempts if self._counts(sequence) and isinstance(sequence, ScoredSequence)
        )


class HiddenResult(Results):
    """Hidden states of the last tokens of prompts.

    Args:
      given: (row of the hidden states, sequence), sorted by row.
    """

    def __init__(self, runner: Runner, launched: LaunchedStep, given: abc.Sequence[tuple[int, PooledSequence]]):
        super().__init__(sequence for _, sequence in given)
        self._launched = launched
        self._slices: list[tuple[list[tuple[int, PooledSequence]], jax.Array]] = []
        for some in _within(runner.buckets.max_sequences, given):
            states, begin = runner.last_hidden(launched.x, some[0][0])
            self._slices.append(([(row - begin, one) for row, one in some], states))
            jax.copy_to_host_async(states)

    def read(self) -> abc.Iterator[Sequence]:
        now = time.perf_counter()
        for rows, states in self._slices:
            read = np.asarray(states)
            for row, sequence in rows:
                if self._counts(sequence):
                    _note_prefill(sequence, self._launched)
                    _note_delivery(sequence, now)
                    sequence.append(read[row].copy())
                    yield sequence


class PrefillResult(Results):
    """Results of a prefill chunk: scores, then hidden states and first tokens.

    Args:
      launched: the prefill chunk.
      parts: its results.
    """

    def __init__(self, launched: LaunchedStep, parts: abc.Sequence[Results]):
        super().__init__(())
        self._launched, self._parts = launched, parts

    def read(self) -> abc.Iterator[Sequence]:
        self._launched.x.block_until_ready()
        if self._launched.chosen is not None:
            _note_chosen(self._launched, self._launched.chosen)
        for part in self._parts:
            yield from part.read()


class WriterMark(Results):
    """Marker in the queue: when it is read, the writer may fill cache entries with everything launched before."""

    def __init__(self, writer: Writer):
        super().__init__(())
        self._writer, self._last = writer, writer.requested

    def read(self) -> abc.Iterator[Sequence]:
        self._writer.begin(self._last)
        yield from ()


class ObservationResult(Results):
    """Sparsity of the attention of a prompt's last tokens.

    Args:
      answer: the output whose prompt was observed.
      zeros: counts, int32 [L, H], see `vlcache_jax.device.programs.compress.Observe`.
      found: called with the counts.
    """

    def __init__(self, answer: Generation, zeros: jax.Array, found: abc.Callable[[np.ndarray], None]):
        super().__init__([answer])
        self._zeros, self._found = zeros, found
        jax.copy_to_host_async(zeros)

    def read(self) -> abc.Iterator[Sequence]:
        self._found(np.asarray(self._zeros))
        yield from ()


class CompressionResult(Results):
    """Compression of an output's prompt.

    Args:
      compression: the compression, without its seconds.
      took: seconds on the device.
    """

    def __init__(self, answer: Generation, compression: Compression, took: abc.Sequence[Future[float]]):
        super().__init__([answer])
        self._compression, self._took = compression, took

    def read(self) -> abc.Iterator[Sequence]:
        for answer in filter(self._counts, self._attempts):
            report = answer.report
            report.metrics.compress = sum((seconds.result() for seconds in self._took), 0.0)
            report.compression = dataclasses.replace(self._compression, seconds=report.metrics.compress)
        yield from ()


def after_prefill(runner: Runner, decode_slots: DecodeSlots, launched: LaunchedStep) -> PrefillResult:
    """Launch what follows a prefill chunk: scores, hidden states and the first tokens."""
    wanted = list(enumerate(launched.step.wanted))
    answers = [(row, s) for row, (s, i) in wanted if isinstance(s, Generation) and i == s.length - 1]
    given = [(row, s, int(s.layout.token_ids[i + 1])) for row, (s, i) in wanted if i < len(s.layout) - 1]
    parts: list[Results] = [ScoreResult(runner, launched, given)] if given else []
    if pooled := [(row, s) for row, (s, _) in wanted if isinstance(s, PooledSequence)]:
        parts.append(HiddenResult(runner, launched, pooled))
    # The rows of outputs are consecutive unless scores or hidden states are requested as well.
    groups = [answers] if not parts else [[one] for one in answers]
    for group in filter(None, groups):
        sequences = [sequence for _, sequence in group]
        logits, begin = runner.head(launched.x, group[0][0], len(group))
        first = group[0][0] - begin  # near the end of a chunk, the head also returns logits of earlier rows
        steps = np.array([len(sequence.token_ids) for sequence in sequences], np.int32)
        parts.append(
            Tokens(sequences, [runner.sample(logits, decode_slots.open(sequences), steps, first)], launched, first)
        )
    return PrefillResult(launched, parts)


def _within[T: tuple[Any, ...]](count: int, given: abc.Sequence[T]) -> abc.Iterator[list[T]]:
    """Yield groups of (row, ...), sorted by row, that each lie within `count` consecutive rows."""
    rest = list(given)
    while rest:
        some = [one for one in rest[:count] if one[0] < rest[0][0] + count]
        rest = rest[len(some) :]
        yield some


def free(decoding: abc.Iterable[Sequence]) -> list[Generation]:
    """Return the outputs that can grow and may have any token."""
    return [one for one in decoding if isinstance(one, Generation) and not one.is_held and one.can_grow]


def held(decoding: abc.Iterable[Sequence], until: float = 0.0) -> list[Generation]:
    """Return the other outputs whose next allowed tokens are known, or become known by the time `until`."""
    found = [one for one in decoding if isinstance(one, Generation) and one.is_held and one.can_grow]
    return [one for one in found if one.may_go_on(until - time.perf_counter()) and _is_known(one)]


def _is_known(answer: Generation) -> bool:
    """Return whether the tokens allowed after everything launched so far are known."""
    return answer.allowed(answer.progress.scheduled) is not None


def decodable(runner: Runner, decode_slots: DecodeSlots, active: abc.Sequence[Generation], tokens: int) -> int:
    """Return how many of these outputs decode together: all, or fewer while a warm-up compiles the program for all."""
    if not runner.programs.is_warming:
        return len(active)
    block_tables = [one.progress.compressed for one in active if one.progress.compressed is not None]
    pages = max((len(table) for block_table in block_tables for table in block_table.tables), default=None)
    return runner.fitting.decodable(decode_slots.rows(active), tokens, pages)


def decode(runner: Runner, decode_slots: DecodeSlots, active: abc.Sequence[Generation], tokens: int) -> Tokens:
    """Launch up to `tokens` more tokens of each output. The prompts of all outputs are compressed, or of none."""
    first = np.array([sequence.progress.scheduled for sequence in active], np.int32)
    last = np.minimum(first + tokens, [sequence.max_length for sequence in active]) - 1
    decode_slots.hold(active, [sequence.progress.scheduled for sequence in active])
    rows, end = decode_slots.rows(active), np.stack([first, last])
    block_tables = [sequence.progress.compressed for sequence in active if sequence.progress.compressed is not None]
    if block_tables:
        tables, kept = (
            [block_table.tables for block_table in block_tables],
            np.stack([block_table.kept for block_table in block_tables], 1),
        )
        end -= np.array([len(sequence.layout) for sequence in active], np.int32)
        return Tokens(active, runner.compressed_window(rows, tables, kept, end, tokens))
    pages = [sequence.progress.block_table.table for sequence in active if sequence.progress.block_table is not None]
    return Tokens(active, runner.window(rows, pages, end, tokens))


def run_on(
    runner: Runner, decode_slots: DecodeSlots, prefills: abc.Sequence[Prefill]
) -> abc.Iterator[tuple[Step, Tokens | None]]:
    """Launch the forced tokens in `prefills`, and one sampled token after them for each output.

    Yields:
      Each chunk with the tokens of the outputs whose last forced token is in it; None if there are none.
    """
    if not prefills:
        return
    answers = [one.sequence for one in prefills if isinstance(one.sequence, Generation)]
    tokens = [prefill.layout.token_ids[len(prefill.sequence.layout) :].tolist() for prefill in prefills]
    forced = [prefill.layout.token_ids[prefill.cached + 1 :].tolist() for prefill in prefills]
    choosing, counts = decode_slots.go_on(answers, tokens), np.array(list(map(len, tokens)), np.int32)
    for step in prefill_steps(prefills, runner.buckets, runner.num_slots, *runner.shapes.depth):
        forward_pass = ForwardPass(runner, step)
        forward_pass.advance(runner.config.text.num_layers)
        ends = [answers.index(one) for one, _ in step.wanted if isinstance(one, Generation)]
        if not ends:
            yield step, None
            continue
        logits, _ = runner.head(forward_pass.x, 0, len(ends))
        sampled = runner.sample(logits, choosing[ends], counts[ends])
        yield step, Tokens([answers[i] for i in ends], [sampled], forced=[forced[i] for i in ends])


def _steps(parts: abc.Sequence[jax.Array]) -> np.ndarray:
    """Return the tokens of consecutive programs as one array."""
    return np.asarray(parts[0]) if len(parts) == 1 else np.concatenate(parts)


def _logprob(count: int, token: int, logprob: Any, rank: Any, top_logprob: Any, top_token: Any) -> Logprob:
    top = dict(zip(top_token[:count].tolist(), top_logprob[:count].tolist(), strict=True))
    return Logprob(float(logprob), top, token, int(rank))


def _note_prefill(sequence: Sequence, launched: LaunchedStep) -> None:
    """Add the device times of everything that the first token waited for."""
    metrics = sequence.report.metrics
    if sequence.generated or metrics.prefill:  # timed before a preemption
        return
    for name, seconds in launched.took:
        setattr(metrics, name, getattr(metrics, name) + seconds.result())


def _note_delivery(sequence: Sequence, now: float) -> None:
    """Note the time of new results."""
    report, metrics = sequence.report, sequence.report.metrics
    if not metrics.ttft:
        metrics.ttft = metrics.identified + now - report.arrived_at
        on_device = metrics.transfer + metrics.link + metrics.encode + metrics.prefill
        metrics.first_token = max(0.0, now - report.arrived_at - metrics.queue - on_device)
    else:
        report.gaps.append(now - report.delivered)
        metrics.decode += now - report.delivered
    report.delivered = now


def _note_chosen(launched: LaunchedStep, chosen: jax.Array) -> None:
    """Enter the tokens that the device selected into the reported plan."""
    [prefill] = launched.group.prefills
    report, selection = prefill.sequence.report, launched.step.selection
    assert report.ran is not None
    assert selection is not None
    candidates = selection.tokens[np.asarray(chosen)[selection.must : selection.must + selection.keep[0]]]
    depth = report.ran.depth.copy()
    for rank, token in enumerate(candidates):
        depth[token] = selection.policy.check_layer + 1 + sum(rank < count for count in selection.keep)
    report.ran = Plan(depth)


# The report of a sequence (`SequenceReport`).


def note_arrival(sequence: Sequence, called_at: float | None) -> None:
    """Note that a sequence arrived, and when it was called; None if the call has no time."""
    sequence.report.arrived_at = now = time.perf_counter()
    sequence.report.called_at = now if called_at is None else called_at


def note_admitted(sequence: Sequence, wave: int) -> None:
    """Note that a sequence received pages in the pass `wave`."""
    report = sequence.report
    report.metrics.queue, report.metrics.wave = time.perf_counter() - report.arrived_at, wave


def note_ready(sequence: Sequence, found: PrefillPlan) -> None:
    """Note the plan that a sequence runs, for its report.

    The first plan counts. A later one replaces it if images changed and no output has begun.
    """
    report, block_table = sequence.report, sequence.progress.block_table
    assert block_table is not None
    if report.ran is None or (found.images is not sequence.progress.images and not sequence.generated):
        report.ran = found.plan.after(block_table.cached)
        report.cached, report.matched = block_table.cached, block_table.matched


def note_launched(sequence: Sequence, first: float) -> None:
    """Note when the first program of a sequence was launched."""
    report = sequence.report
    report.metrics.launched = report.metrics.launched or first - report.called_at


def note_ended(sequence: Sequence) -> None:
    """Note the time of the end."""
    metrics = sequence.report.metrics
    metrics.e2e = metrics.identified + time.perf_counter() - sequence.report.arrived_at
