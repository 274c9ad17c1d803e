"""From checked arguments of the public API to what a call returns."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vlcache_jax.calls.groups import Call, CallResult, Job, RequestChunk, RequestError, serve
from vlcache_jax.calls.verification import verify as verify_answers
from vlcache_jax.common.checks import is_a
from vlcache_jax.common.progress import Progress, interruptible
from vlcache_jax.engine.compile_ahead import Ahead
from vlcache_jax.engine.engine import Loop
from vlcache_jax.engine.request import Forced, Planned, PooledSequence, Request
from vlcache_jax.engine.request import Sequence as Running
from vlcache_jax.inputs.prompt import Prompt
from vlcache_jax.outputs import HiddenState, Reporter, RequestOutput, Score
from vlcache_jax.preparation.identification import Arrivals, Identifier
from vlcache_jax.preparation.planner import Planner
from vlcache_jax.preparation.sequences import SequenceBuilder, or_error

Conversation = Sequence[Mapping[str, Any]]
PromptLike = str | Mapping[str, Any] | Sequence[int]


def is_token_ids(prompt: Any) -> bool:
    """Whether it is one prompt, as token ids, rather than several."""
    return isinstance(prompt, list | tuple | np.ndarray) and len(prompt) > 0 and is_a(prompt[0], int | np.integer)


class Caller:
    """Answers and scores prompts.

    Args:
      identifier, planner, loop, sequences, reporter: of the model.
      ahead: is told what was answered.
    """

    def __init__(
        self,
        identifier: Identifier,
        planner: Planner,
        loop: Loop,
        sequences: SequenceBuilder,
        reporter: Reporter,
        ahead: Ahead,
    ):
        self.loop, self.reporter = loop, reporter
        self._identifier, self._planner = identifier, planner
        self._sequences = sequences
        self._ahead = ahead
        self._arriving = threading.Lock()  # what is planned first runs first

    def answers(
        self,
        calls: Iterable[Call],
        *,
        total: int | None,
        show: bool,
        verify: bool = False,
        returns_all: bool = True,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Yields rows with their outputs as they end; see `LLM.chat`.

        Args:
          calls: rows that are checked together, each behind those of the one before.
          total: rows of all calls; None: nobody knows.
          show: whether progress is shown.
          returns_all: nobody gets any output if the engine fails in the middle.
        """
        kept: list[tuple[Job, RequestOutput]] = []
        bar = Progress("answering", total, show=show)

        def output(job: Job) -> RequestOutput:
            bar.update(tokens=sum(len(sequence.generated) for sequence in job.sequences))
            told = self.reporter.output(job.planned, job.answers, request_id=str(job.row))
            if verify and told.error is None:
                kept.append((job, told))
            return told

        def outputs() -> Generator[tuple[int, RequestOutput]]:
            try:
                chunks = map(self.to_answer, calls)
                yield from self._serve(chunks, output, keeps=verify, returns_all=returns_all)
                if verify:
                    yield from self._verified(kept)
            finally:
                for job, _ in kept:
                    job.planned.hold.leave()
            self._ahead.start()

        return _watched(outputs(), bar)

    def to_answer(self, call: Call) -> RequestChunk[RequestOutput]:
        """The rows of a call, checked."""
        params = self._sequences.sampling_params(call.params, len(call.listed), call.first)
        compress = call.compress if isinstance(call.compress, Sequence) else [call.compress] * len(call.listed)
        asked = [
            one if isinstance(one, ValueError) else own if isinstance(own, ValueError) else (one, own)
            for one, own in zip(params, compress, strict=True)
        ]
        prompts = self._prompts(call)
        asked = [
            self._sequences.held(one[0], prompt) or one
            if isinstance(one, tuple) and isinstance(prompt, Prompt)
            else one
            for one, prompt in zip(asked, prompts, strict=True)
        ]

        def failed(row: int, error: str) -> RequestOutput:
            prompt = prompts[row]
            text = prompt.text if isinstance(prompt, Prompt) else ""
            return self.reporter.failed_output(text, error, request_id=str(call.first + row))

        def sequences(row: int, planned: Planned) -> Sequence[Running]:
            params, compress = _good(asked[row])
            return self._sequences.answers(planned, params, call.priority, compress, call.tenant)

        arrivals = self._check(prompts, asked, lambda length, one: self._sequences.new_slots(length, one[0]), call)
        return RequestChunk(call, arrivals, sequences, failed)

    def scores(
        self, call: Call, continuations: Sequence[str | Sequence[int]], *, keep_logits: bool, show: bool
    ) -> Iterator[tuple[int, Score]]:
        """Yields rows with their scores as they end; see `LLM.score`."""
        forced = self._sequences.continuations(continuations, len(call.listed))
        prompts = self._prompts(call)

        def sequences(row: int, planned: Planned) -> Sequence[Running]:
            return [self._sequences.forced(planned, _good(forced[row]), keep_logits=keep_logits, capture=True)]

        bar = Progress("scoring", len(prompts), show=show)

        def score(job: Job) -> Score:
            bar.update()
            [sequence] = job.sequences
            assert isinstance(sequence, Forced)
            return self.reporter.score(job.planned, sequence)

        arrivals = self._check(prompts, forced, lambda _, tokens: len(tokens), call)
        chunk = RequestChunk(call, arrivals, sequences, lambda _, error: self.reporter.failed_score(error))
        return _watched(self._serve([chunk], score), bar)

    def hidden_states(self, call: Call, *, doing: str, show: bool) -> Iterator[tuple[int, HiddenState]]:
        """Yields rows with the hidden states of their last tokens as they end; see `LLM.embed`.

        Args:
          doing: what progress calls it.
          show: whether progress is shown.
        """
        bar = Progress(doing, len(call.listed), show=show)

        def state(job: Job) -> HiddenState:
            bar.update()
            return self.hidden_state(job)

        return _watched(self._serve([self.to_pool(call)], state), bar)

    def hidden_state(self, job: Job) -> HiddenState:
        """Of a job of `to_pool` that has ended."""
        [sequence] = job.sequences
        assert isinstance(sequence, PooledSequence)
        return self.reporter.hidden_state(job.planned, sequence)

    def to_pool(self, call: Call) -> RequestChunk[HiddenState]:
        """The rows of a call, checked, of which the last hidden states are wanted."""
        prompts = self._prompts(call)
        arrivals = self._check(prompts, [None] * len(prompts), lambda *_: 0, call)

        def sequences(_: int, planned: Planned) -> Sequence[Running]:
            return [self._sequences.pooled(planned, call.priority, call.tenant)]

        return RequestChunk(call, arrivals, sequences, lambda _, error: self.reporter.failed_hidden_state(error))

    def start(
        self,
        chunk: RequestChunk[Any],
        row: int,
        request: Request,
        heard: Callable[[Job], object],
        *,
        streams: bool = False,
    ) -> Job:
        """Plans a request and submits the sequences that run for it, behind all that were planned before."""
        call = chunk.call
        with self._arriving:
            self.loop.check_open()
            planned = self._planner.plan(request, call.policy)
            job = Job(call.first + row, planned, chunk.sequences(row, planned), heard, call, streams=streams)
            self.loop.submit(job.sequences, call.called_at)
        return job

    def arrive(self, chunk: RequestChunk[Any], heard: Callable[[Job], object]) -> Job:
        """Identifies, plans and submits the one request of a chunk; `heard` is called whenever there is more of it.

        Raises:
          RequestError: it is wrong.
        """
        for error in chunk.arrivals.errors.values():
            raise RequestError({0: str(error)})
        for window in chunk.arrivals.windows(keep_patches=True):
            for row, request in window:
                if isinstance(request, ValueError):
                    raise RequestError({0: str(request)})
                job = self.start(chunk, row, request, heard, streams=True)
                self.loop.begin()
                return job
        raise AssertionError("a call has a row")

    def end(self, job: Job) -> None:
        """Nobody reads what a job came to any more; one that still runs is aborted."""
        has_failed = not job.has_ended or any(
            one.end.is_aborted or one.end.error is not None or one.end.fault is not None for one in job.sequences
        )
        if not has_failed:
            self._ahead.expect(job.call.policy, job.sequences)
            self._ahead.start()
        job.planned.hold.leave(failed=has_failed)
        job.abort()

    def _serve[T: CallResult](
        self,
        chunks: Iterable[RequestChunk[T]],
        result: Callable[[Job], T],
        *,
        keeps: bool = False,
        returns_all: bool = True,
    ) -> Generator[tuple[int, T]]:
        """See `serve`. A call that returns all at once, and that the engine's error or Ctrl-C ends, served nothing."""
        served: list[str] = []

        def finish(job: Job) -> T | None:
            found = self._finish(result, job, keeps=keeps)
            if returns_all and found is not None and job.planned.request_key and not job.planned.request_known:
                served.append(job.planned.request_key)
            return found

        try:
            yield from serve(chunks, self.loop, self.start, finish)
        except RequestError:
            raise
        except (Exception, KeyboardInterrupt):
            for key in served:
                self._planner.store.requests.forget(key)
            raise

    def _finish[T: CallResult](self, result: Callable[[Job], T], job: Job, *, keeps: bool) -> T | None:
        """The result of a job that has ended, None if it was given up. It lets go of the cache unless it `keeps` it."""
        fault = next((one.end.fault for one in job.sequences if one.end.fault is not None), None)
        has_failed = fault is not None or any(one.end.is_aborted or one.end.error is not None for one in job.sequences)
        keeps = keeps and not has_failed
        try:
            if fault is not None:
                raise fault
            if any(sequence.end.is_aborted for sequence in job.sequences):
                return None
            self._ahead.expect(job.call.policy, job.sequences)
            return result(job)
        finally:
            if not keeps:
                job.planned.hold.leave(failed=has_failed)

    def _verified(self, answered: Sequence[tuple[Job, RequestOutput]]) -> Iterator[tuple[int, RequestOutput]]:
        """The outputs once more, beside those of a cold run."""
        jobs = [job for job, _ in answered]
        first = [job.answers[0] for job in jobs]
        compared = verify_answers(self.loop, self._sequences, [job.planned for job in jobs], first)
        for (job, told), found in zip(answered, compared, strict=True):
            error = self.reporter.error(job.planned, *job.answers)
            yield job.row, dataclasses.replace(told, verification=found, error=error)

    def _prompts(self, call: Call) -> list[Prompt | ValueError]:
        """Side by side, as images may come from the network; behind all other checks for the same reason."""
        return self._identifier.side_by_side(call.prompt, range(len(call.listed)))

    def _check[T](
        self,
        prompts: Sequence[Prompt | ValueError],
        wanted: Sequence[T | ValueError],
        new_slots: Callable[[int, T], int],
        call: Call,
    ) -> Arrivals:
        """Finds every row that arguments and heads of files tell to be wrong.

        Args:
          wanted: what is asked of each row.
          new_slots: that it takes behind a prompt of so many tokens.
        """
        given = [
            own if isinstance(own, ValueError) and isinstance(prompt, Prompt) else prompt
            for prompt, own in zip(prompts, wanted, strict=True)
        ]
        arrivals = self._identifier.open(given, call.salt, lookup=call.policy.links, apart=call.apart)
        for i, length in arrivals.lengths.items():
            slots = new_slots(length, _good(wanted[i]))
            if error := or_error(self._sequences.check_length, _good(prompts[i]).name, length, slots):
                arrivals.errors[i] = error
        return arrivals


def _watched[T](results: Generator[T], bar: Progress) -> Iterator[T]:
    """The results. Each is worked at within the bar, and not while whoever asked looks at the one before."""
    bar.open()
    try:
        while True:
            with bar.active(), interruptible():
                try:
                    result = next(results)
                except StopIteration:
                    return
            yield result
    finally:
        try:
            with bar.active(), interruptible():
                results.close()
        finally:
            bar.close()


def in_order[T: CallResult](results: Iterator[tuple[int, T]]) -> list[T]:
    """All results of a call, by row; of several for a row the last one.

    Raises:
      RequestError: a row is wrong. It has the outputs of those that were answered.
    """
    found: dict[int, T] = {}
    try:
        for row, result in results:
            found[row] = result
    except RequestError as error:
        good = {row: result for row, result in found.items() if result.error is None}
        outputs = [good.get(row) for row in range(1 + max(found, default=-1))]
        raise RequestError(error.errors, outputs if good else ()) from None
    return [found[row] for row in sorted(found)]


def _good[T](value: T | ValueError) -> T:
    """Of a row that is not wrong."""
    assert not isinstance(value, ValueError)
    return value
