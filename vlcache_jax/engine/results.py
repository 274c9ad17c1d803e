"""What has been launched and is read later: first tokens, windows of tokens, scores of given tokens."""

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
from vlcache_jax.engine.prefilling import Launched, Passage
from vlcache_jax.engine.request import Forced, Generation, PooledSequence, Sequence
from vlcache_jax.engine.scheduler import Ready
from vlcache_jax.reuse.policies import Plan


class Results:
    """Results under way, which are read once.

    Args:
      sequences: whose they are.
    """

    def __init__(self, sequences: abc.Iterable[Sequence]):
        self._attempts = {sequence: sequence.progress.attempt for sequence in sequences}

    def read(self) -> abc.Iterator[Sequence]:
        """Waits for the results and enters them; yields the sequences of which there is more."""
        raise NotImplementedError

    def _counts(self, sequence: Sequence) -> bool:
        """Whether what is read of a sequence still counts."""
        lease = sequence.progress.lease
        is_sound = sequence.progress.compressed is not None or (lease is not None and not lease.is_lost)
        return is_sound and self._attempts[sequence] == sequence.progress.attempt and not sequence.end.is_finished


class Flight:
    """Results under way, read in the order in which they were launched, and who leaves behind them.

    What lies outside the pool may be given back when everything launched until then has been read.

    Attributes:
      launched, read: of all results, so many.
    """

    def __init__(self) -> None:
        self.launched = self.read = 0
        self._results: deque[Results] = deque()
        self._leaving: deque[tuple[int, Sequence]] = deque()  # and how many must have been read before it may leave

    @property
    def unread(self) -> int:
        """How many there are."""
        return len(self._results)

    @property
    def oldest(self) -> Results:
        """What is to be read next."""
        return self._results[0]

    @property
    def is_under_way(self) -> bool:
        """Whether anything is, or anybody has not left."""
        return bool(self._results or self._leaving)

    def add(self, results: Results) -> None:
        """These have been launched."""
        self.launched += 1
        self._results.append(results)

    def pass_oldest(self) -> None:
        """It has been read."""
        self._results.popleft()
        self.read += 1

    def leave(self, sequence: Sequence, *, now: bool) -> None:
        """A sequence lets go of what it holds, now or when all that has been launched has been read."""
        if now:
            _leave(sequence)
        else:
            self._leaving.append((self.launched, sequence))

    def let_leave(self) -> None:
        """Those leave behind whom everything has been read."""
        while self._leaving and self._leaving[0][0] <= self.read:
            _leave(self._leaving.popleft()[1])

    def clear(self) -> None:
        """Nothing of it will be read."""
        self._results.clear()
        self.read = self.launched
        self.let_leave()


def _leave(sequence: Sequence) -> None:
    if sequence.planned.hold is not None:
        sequence.planned.hold.leave()


class Tokens(Results):
    """Tokens of answers.

    Args:
      answers: whose; one for each row.
      sampled: of each program that chose them [B], or of a window [tokens, B]; tokens that follow each other.
      launched: the prefill that they follow; None: they go on.
      first: row of the first answer.
      forced: of each, tokens before these that nobody had to choose.

    Attributes:
      size: rows that its programs had, padding included.
    """

    def __init__(
        self,
        answers: abc.Sequence[Generation],
        sampled: abc.Sequence[SampledTokens],
        launched: Launched | None = None,
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
        token, *told = (_steps(parts) for parts in zip(*self._arrays, strict=True))
        if token.ndim == 1:
            token, *told = token[None], *(x[None] for x in told)
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
                    answer.logprobs.append(_logprob(wanted or 0, new[i], *(x[i, row] for x in told)))
            if answer.matcher is not None and not answer.is_done:
                answer.matcher.advance(new)
            yield answer


class ScoreResult(Results):
    """Scores of the tokens that follow a prefill's rows.

    Args:
      given: (row of the hidden states, whose, the token that follows), in the order of rows.
    """

    def __init__(self, runner: Runner, launched: Launched, given: abc.Sequence[tuple[int, Sequence, int]]):
        super().__init__(sequence for _, sequence, _ in given)
        self._launched = launched
        self._slices: list[tuple[list[tuple[int, Sequence, int]], tuple[jax.Array, ...], jax.Array | None]] = []
        most = runner.ladder.max_sequences
        for some in _within(most, given):
            first = some[0][0]
            logits, begin = runner.head(launched.x, first, min(most, len(launched.x)))
            target = np.zeros(len(logits), np.int32)
            target[[row - begin for row, _, _ in some]] = [token for _, _, token in some]
            wants_top = any(isinstance(sequence, Generation) for _, sequence, _ in some)
            scored = runner.score(logits, target, wants_top=wants_top)
            keeps = any(isinstance(sequence, Forced) and sequence.keep_logits for _, sequence, _ in some)
            self._slices.append(
                ([(row - begin, one, token) for row, one, token in some], scored, logits if keeps else None)
            )
            jax.copy_to_host_async(self._slices[-1][1:])

    def read(self) -> abc.Iterator[Sequence]:
        now = time.perf_counter()
        for sequence in self._attempts:
            if isinstance(sequence, Forced) and self._counts(sequence):
                _note_prefill(sequence, self._launched)
                _note_delivery(sequence, now)
        for rows, scored, logits in self._slices:
            logprob, greedy, *told = map(np.asarray, scored)
            kept = None if logits is None else np.asarray(logits)
            for row, sequence, token in rows:
                if not self._counts(sequence):
                    continue
                if isinstance(sequence, Forced):
                    sequence.append(logprob[row], greedy[row], None if kept is None else kept[row].copy())
                elif isinstance(sequence, Generation) and not sequence.token_ids:
                    count = sequence.params.prompt_logprobs or 0
                    sequence.prompt_logprobs.append(_logprob(count, token, logprob[row], *(x[row] for x in told)))
        yield from (sequence for sequence in self._attempts if self._counts(sequence) and isinstance(sequence, Forced))


class HiddenResult(Results):
    """Hidden states of the last tokens of prompts.

    Args:
      given: (row of the hidden states, whose), in the order of rows.
    """

    def __init__(self, runner: Runner, launched: Launched, given: abc.Sequence[tuple[int, PooledSequence]]):
        super().__init__(sequence for _, sequence in given)
        self._launched = launched
        self._slices: list[tuple[list[tuple[int, PooledSequence]], jax.Array]] = []
        for some in _within(runner.ladder.max_sequences, given):
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


class Prefilled(Results):
    """A prefill step: its scores, then its hidden states and first tokens, if there are any.

    Args:
      parts: of its results.
    """

    def __init__(self, launched: Launched, parts: abc.Sequence[Results]):
        super().__init__(())
        self._launched, self._parts = launched, parts

    def read(self) -> abc.Iterator[Sequence]:
        self._launched.x.block_until_ready()
        if self._launched.chosen is not None:
            _note_chosen(self._launched, self._launched.chosen)
        for part in self._parts:
            yield from part.read()


class Recorded(Results):
    """What records are to hold of all that has been launched: it leaves the device behind the results before this."""

    def __init__(self, writer: Writer):
        super().__init__(())
        self._writer, self._last = writer, writer.asked

    def read(self) -> abc.Iterator[Sequence]:
        self._writer.begin(self._last)
        yield from ()


class Observed(Results):
    """How sparse the attention of a prompt's last rows is.

    Args:
      answer: whose prompt.
      zeros: int32 [L, H], see `vlcache_jax.device.programs.compress.Observe`.
      found: is called with it.
    """

    def __init__(self, answer: Generation, zeros: jax.Array, found: abc.Callable[[np.ndarray], None]):
        super().__init__([answer])
        self._zeros, self._found = zeros, found
        jax.copy_to_host_async(zeros)

    def read(self) -> abc.Iterator[Sequence]:
        self._found(np.asarray(self._zeros))
        yield from ()


class CompressionResult(Results):
    """What an answer goes on with.

    Args:
      compression: but for its seconds.
      took: these.
    """

    def __init__(self, answer: Generation, compression: Compression, took: abc.Sequence[Future[float]]):
        super().__init__([answer])
        self._compression, self._took = compression, took

    def read(self) -> abc.Iterator[Sequence]:
        for answer in filter(self._counts, self._attempts):
            told = answer.told
            told.metrics.compress = sum((seconds.result() for seconds in self._took), 0.0)
            told.compression = dataclasses.replace(self._compression, seconds=told.metrics.compress)
        yield from ()


def after_prefill(runner: Runner, lanes: DecodeSlots, launched: Launched) -> Prefilled:
    """Launches what follows a prefill step, and is read after it."""
    wanted = list(enumerate(launched.step.wanted))
    answers = [(row, s) for row, (s, i) in wanted if isinstance(s, Generation) and i == s.length - 1]
    given = [(row, s, int(s.layout.token_ids[i + 1])) for row, (s, i) in wanted if i < len(s.layout) - 1]
    parts: list[Results] = [ScoreResult(runner, launched, given)] if given else []
    if pooled := [(row, s) for row, (s, _) in wanted if isinstance(s, PooledSequence)]:
        parts.append(HiddenResult(runner, launched, pooled))
    # Rows of answers follow each other, unless something else is wanted between them.
    groups = [answers] if not parts else [[one] for one in answers]
    for group in filter(None, groups):
        sequences = [sequence for _, sequence in group]
        logits, begin = runner.head(launched.x, group[0][0], len(group))
        first = group[0][0] - begin  # near the end of a step, logits of rows before it come, too
        steps = np.array([len(sequence.token_ids) for sequence in sequences], np.int32)
        parts.append(Tokens(sequences, [runner.sample(logits, lanes.open(sequences), steps, first)], launched, first))
    return Prefilled(launched, parts)


def _within[T: tuple[Any, ...]](most: int, given: abc.Sequence[T]) -> abc.Iterator[list[T]]:
    """Those of (row, ...), in the order of rows, that stand among `most` rows, together."""
    rest = list(given)
    while rest:
        some = [one for one in rest[:most] if one[0] < rest[0][0] + most]
        rest = rest[len(some) :]
        yield some


def free(decoding: abc.Iterable[Sequence]) -> list[Generation]:
    """Of those whose prompts have been launched the answers that may go on as they like."""
    return [one for one in decoding if isinstance(one, Generation) and one.matcher is None and one.can_grow]


def held(decoding: abc.Iterable[Sequence], until: float = 0.0) -> list[Generation]:
    """Those that are held to something, and of which it is known what may come next, or will be by then."""
    found = [one for one in decoding if isinstance(one, Generation) and one.matcher is not None and one.can_grow]
    return [one for one in found if one.may_go_on(until - time.perf_counter()) and _is_known(one)]


def _is_known(answer: Generation) -> bool:
    """Whether it is known what may come behind all that has been launched of it."""
    return answer.allowed(answer.progress.scheduled) is not None


def decodable(runner: Runner, lanes: DecodeSlots, active: abc.Sequence[Generation], tokens: int) -> int:
    """How many of these answers go on together now: all, or fewer while a warm-up compiles the window for all."""
    if not runner.programs.is_warming:
        return len(active)
    leases = [one.progress.compressed for one in active if one.progress.compressed is not None]
    pages = max((len(table) for lease in leases for table in lease.tables), default=None)
    return runner.fitting.decodable(lanes.rows(active), tokens, pages)


def decode(runner: Runner, lanes: DecodeSlots, active: abc.Sequence[Generation], tokens: int) -> Tokens:
    """Lets answers go on by up to `tokens` tokens each; the prompts of all are compressed, or of none."""
    first = np.array([sequence.progress.scheduled for sequence in active], np.int32)
    last = np.minimum(first + tokens, [sequence.most for sequence in active]) - 1
    lanes.hold(active, [sequence.progress.scheduled for sequence in active])
    rows, end = lanes.rows(active), np.stack([first, last])
    leases = [sequence.progress.compressed for sequence in active if sequence.progress.compressed is not None]
    if leases:
        tables, kept = [lease.tables for lease in leases], np.stack([lease.kept for lease in leases], 1)
        end -= np.array([len(sequence.layout) for sequence in active], np.int32)
        return Tokens(active, runner.compressed_window(rows, tables, kept, end, tokens))
    pages = [sequence.progress.lease.table for sequence in active if sequence.progress.lease is not None]
    return Tokens(active, runner.window(rows, pages, end, tokens))


def run_on(
    runner: Runner, lanes: DecodeSlots, prefills: abc.Sequence[Prefill]
) -> abc.Iterator[tuple[Step, Tokens | None]]:
    """Lets answers go on by tokens that are forced, whose prefills these are, and by one that is chosen behind them.

    Returns:
      Of each step the tokens of the answers whose last forced token is in it; None: there are none.
    """
    if not prefills:
        return
    answers = [one.sequence for one in prefills if isinstance(one.sequence, Generation)]
    tokens = [prefill.layout.token_ids[len(prefill.sequence.layout) :].tolist() for prefill in prefills]
    forced = [prefill.layout.token_ids[prefill.cached + 1 :].tolist() for prefill in prefills]
    choosing, counts = lanes.go_on(answers, tokens), np.array(list(map(len, tokens)), np.int32)
    layers = runner.config.text.num_layers
    for step in prefill_steps(prefills, runner.ladder, runner.num_slots, layers):
        passage = Passage(runner, step)
        passage.advance(layers)
        ends = [answers.index(one) for one, _ in step.wanted if isinstance(one, Generation)]
        if not ends:
            yield step, None
            continue
        logits, _ = runner.head(passage.x, 0, len(ends))
        sampled = runner.sample(logits, choosing[ends], counts[ends])
        yield step, Tokens([answers[i] for i in ends], [sampled], forced=[forced[i] for i in ends])


def _steps(parts: abc.Sequence[jax.Array]) -> np.ndarray:
    """What programs chose that followed each other."""
    return np.asarray(parts[0]) if len(parts) == 1 else np.concatenate(parts)


def _logprob(count: int, token: int, logprob: Any, rank: Any, top_logprob: Any, top_token: Any) -> Logprob:
    top = dict(zip(top_token[:count].tolist(), top_logprob[:count].tolist(), strict=True))
    return Logprob(float(logprob), top, token, int(rank))


def _note_prefill(sequence: Sequence, launched: Launched) -> None:
    """How long the device took for what the first token waited for."""
    metrics = sequence.told.metrics
    if sequence.generated or metrics.prefill:  # it was put back, and has been timed
        return
    for name, seconds in launched.took:
        setattr(metrics, name, getattr(metrics, name) + seconds.result())


def _note_delivery(sequence: Sequence, now: float) -> None:
    """Some of its results have come."""
    told, metrics = sequence.told, sequence.told.metrics
    if not metrics.ttft:
        metrics.ttft = metrics.identified + now - told.arrived_at
        on_device = metrics.transfer + metrics.link + metrics.encode + metrics.prefill
        metrics.first_token = max(0.0, now - told.arrived_at - metrics.queue - on_device)
    else:
        told.gaps.append(now - told.delivered)
        metrics.decode += now - told.delivered
    told.delivered = now


def _note_chosen(launched: Launched, chosen: jax.Array) -> None:
    """Puts what was chosen on the device into the plan, for the report."""
    [prefill] = launched.turn.prefills
    told, selection = prefill.sequence.told, launched.step.selection
    assert told.ran is not None
    assert selection is not None
    candidates = selection.tokens[np.asarray(chosen)[selection.must : selection.must + selection.keep[0]]]
    depth = told.ran.depth.copy()
    for rank, token in enumerate(candidates):
        depth[token] = selection.policy.check_layer + 1 + sum(rank < count for count in selection.keep)
    told.ran = Plan(depth)


# What is told of a sequence beside its tokens.


def note_arrival(sequence: Sequence, called_at: float | None) -> None:
    """It has arrived, with a call of this time, or with none."""
    sequence.told.arrived_at = now = time.perf_counter()
    sequence.told.called_at = now if called_at is None else called_at


def note_admitted(sequence: Sequence, wave: int) -> None:
    """It has got pages, in a pass of this number."""
    told = sequence.told
    told.metrics.queue, told.metrics.wave = time.perf_counter() - told.arrived_at, wave


def note_ready(sequence: Sequence, found: Ready) -> None:
    """What it computes. That is what it is told to have computed, the first time; again, if it had to be changed and no
    answer has begun."""
    told, lease = sequence.told, sequence.progress.lease
    assert lease is not None
    if told.ran is None or (found.images is not sequence.progress.images and not sequence.generated):
        told.ran, told.cached = found.plan.behind(lease.cached), lease.cached


def note_launched(sequence: Sequence, first: float) -> None:
    """Programs of it have been launched, the first one at this time."""
    told = sequence.told
    told.metrics.launched = told.metrics.launched or first - told.called_at


def note_ended(sequence: Sequence) -> None:
    """It has ended."""
    metrics = sequence.told.metrics
    metrics.e2e = metrics.identified + time.perf_counter() - sequence.told.arrived_at
