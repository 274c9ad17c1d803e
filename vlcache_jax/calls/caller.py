"""Execution of calls: starts the requests of a call and collects their results."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vlcache_jax.calls.groups import Call, CallResult, Job, RequestChunk, RequestError, ResultKind, good, serve
from vlcache_jax.calls.verification import verify as verify_answers
from vlcache_jax.common.checks import is_a
from vlcache_jax.common.progress import Progress, interruptible
from vlcache_jax.engine.compile_ahead import Ahead
from vlcache_jax.engine.engine import Loop
from vlcache_jax.engine.request import Generation, Planned, Request
from vlcache_jax.engine.scoring import PooledSequence, ScoredSequence
from vlcache_jax.inputs.prompt import Prompt
from vlcache_jax.outputs import HiddenState, Reporter, RequestOutput, Score
from vlcache_jax.preparation.identification import Identifier
from vlcache_jax.preparation.planner import Planner
from vlcache_jax.preparation.sequences import SequenceBuilder, or_error
from vlcache_jax.sampling import SamplingParams

Conversation = Sequence[Mapping[str, Any]]
PromptLike = str | Mapping[str, Any] | Sequence[int]


def is_token_ids(prompt: Any) -> bool:
    """Return whether `prompt` is one prompt given as token IDs, rather than a list of prompts."""
    return isinstance(prompt, list | tuple | np.ndarray) and len(prompt) > 0 and is_a(prompt[0], int | np.integer)


@dataclass(frozen=True, eq=False)
class AnswerKind(ResultKind[RequestOutput]):
    """Results of `LLM.chat` and `LLM.generate`.

    Attributes:
      params: resolved sampling parameters of each request, or their error.
    """

    params: Sequence[SamplingParams | ValueError]

    generates = True

    def error(self, row: int, prompt: Prompt) -> ValueError | None:
        params = self.params[row]
        if isinstance(params, ValueError):
            return params
        if self.call.compressors is not None and isinstance(wrong := self.call.compressors[row], ValueError):
            return wrong
        return self.builder.held(params, prompt)

    def new_slots(self, row: int, length: int) -> int:
        return self.builder.new_slots(length, good(self.params[row]))

    def sequences(self, row: int, planned: Planned) -> Sequence[Generation]:
        return self.builder.answers(planned, good(self.params[row]))

    def result(self, job: Job) -> RequestOutput:
        return self.reporter.output(job.planned, job.answers, request_id=str(job.row))

    def failed(self, row: int, prompt: Prompt | ValueError, error: str) -> RequestOutput:
        text = prompt.text if isinstance(prompt, Prompt) else ""
        return self.reporter.failed_output(text, error, request_id=str(self.call.first + row))


@dataclass(frozen=True, eq=False)
class ScoreKind(ResultKind[Score]):
    """Results of `LLM.score`.

    Attributes:
      tokens: token IDs of each request's continuation, or its error.
      keep_logits: include the logits in the results.
    """

    tokens: Sequence[list[int] | ValueError]
    keep_logits: bool

    def error(self, row: int, prompt: Prompt) -> ValueError | None:
        tokens = self.tokens[row]
        return tokens if isinstance(tokens, ValueError) else None

    def new_slots(self, row: int, length: int) -> int:
        return len(good(self.tokens[row]))

    def sequences(self, row: int, planned: Planned) -> Sequence[ScoredSequence]:
        return [self.builder.scored(planned, good(self.tokens[row]), keep_logits=self.keep_logits, save=True)]

    def result(self, job: Job) -> Score:
        [sequence] = job.sequences
        assert isinstance(sequence, ScoredSequence)
        return self.reporter.score(job.planned, sequence)

    def failed(self, row: int, prompt: Prompt | ValueError, error: str) -> Score:
        return self.reporter.failed_score(error)


@dataclass(frozen=True, eq=False)
class HiddenStateKind(ResultKind[HiddenState]):
    """Results of embedding and reranking: the hidden states of the prompts' last tokens."""

    def new_slots(self, row: int, length: int) -> int:
        return 0

    def sequences(self, row: int, planned: Planned) -> Sequence[PooledSequence]:
        return [self.builder.pooled(planned)]

    def result(self, job: Job) -> HiddenState:
        [sequence] = job.sequences
        assert isinstance(sequence, PooledSequence)
        return self.reporter.hidden_state(job.planned, sequence)

    def failed(self, row: int, prompt: Prompt | ValueError, error: str) -> HiddenState:
        return self.reporter.failed_hidden_state(error)


class Caller:
    """Runner of calls that answer, score or pool prompts.

    Args:
      identifier, planner, loop, sequences, reporter: parts of the open model.
      ahead: compiler of the programs that repeated requests will need.
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
        self._arriving = threading.Lock()  # requests are submitted in the order of their plans

    def answers(
        self,
        calls: Iterable[Call],
        *,
        total: int | None,
        show: bool,
        verify: bool = False,
        returns_all: bool = True,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Yield (request number, output) as the requests end; see `LLM.chat`.

        Args:
          calls: calls whose requests are checked together; each runs after the requests of the call before.
          total: number of requests in all calls; None if unknown.
          show: show progress.
          verify: compare each output with a cold run.
          returns_all: the caller gets no output at all if the engine fails in the middle.
        """
        kept: list[tuple[Job, RequestOutput]] = []
        bar = Progress("answering", total, show=show)

        def outputs() -> Generator[tuple[int, RequestOutput]]:
            try:
                chunks = map(self.to_answer, calls)
                yield from self._serve(chunks, bar, kept if verify else None, returns_all=returns_all)
                if verify:
                    yield from self._verified(kept)
            finally:
                for job, _ in kept:
                    job.leave()
            self._ahead.start()

        return _watched(outputs(), bar)

    def scores(
        self, call: Call, continuations: Sequence[str | Sequence[int]], *, keep_logits: bool, show: bool
    ) -> Iterator[tuple[int, Score]]:
        """Yield (request number, score) as the requests end; see `LLM.score`."""
        tokens = self._sequences.continuations(continuations, len(call.listed))
        kind = ScoreKind(call, self._sequences, self.reporter, tokens, keep_logits)
        chunk, bar = self._checked(kind), Progress("scoring", len(call.listed), show=show)
        return _watched(self._serve([chunk], bar), bar)

    def hidden_states(self, call: Call, *, doing: str, show: bool) -> Iterator[tuple[int, HiddenState]]:
        """Yield (request number, hidden state) as the requests end; see `LLM.embed`.

        Args:
          doing: label of the progress bar.
          show: show progress.
        """
        chunk, bar = self.to_pool(call), Progress(doing, len(call.listed), show=show)
        return _watched(self._serve([chunk], bar), bar)

    def to_answer(self, call: Call) -> RequestChunk[RequestOutput]:
        """Return the checked requests of a call that generates text."""
        params = self._sequences.sampling_params(call.params, len(call.listed), call.first)
        return self._checked(AnswerKind(call, self._sequences, self.reporter, params))

    def to_pool(self, call: Call) -> RequestChunk[HiddenState]:
        """Return the checked requests of a call that needs hidden states."""
        return self._checked(HiddenStateKind(call, self._sequences, self.reporter))

    def _checked[T: CallResult](self, kind: ResultKind[T]) -> RequestChunk[T]:
        """Return the requests of a call, with the errors that arguments and file headers show."""
        call, options, given = kind.call, kind.call.options, []
        if options.compress is not None and not kind.generates:
            raise ValueError(
                f"compress must be None for a method that does not generate text, got {options.compress.name}"
            )
        # In parallel and after all other checks, since images may come from the network.
        prompts = self._identifier.side_by_side(call.prompt, range(len(call.listed)))
        for row, prompt in enumerate(prompts):
            wrong = None if isinstance(prompt, ValueError) else kind.error(row, prompt)
            given.append(prompt if wrong is None else wrong)
        arrivals = self._identifier.open(given, options.cache_salt, lookup=options.reuse.links, apart=call.apart)
        for row, length in arrivals.lengths.items():
            name, slots = good(prompts[row]).name, kind.new_slots(row, length)
            if error := or_error(self._sequences.check_length, name, length, slots):
                arrivals.errors[row] = error
        return RequestChunk(kind, prompts, arrivals)

    def start(
        self,
        chunk: RequestChunk[Any],
        row: int,
        request: Request,
        heard: Callable[[Job], object],
        *,
        streams: bool = False,
    ) -> Job:
        """Plan a request and submit its sequences, after all that were planned before."""
        kind, call = chunk.kind, chunk.kind.call
        with self._arriving:
            self.loop.check_open()
            options = call.options
            if call.compressors is not None:
                options = dataclasses.replace(options, compress=good(call.compressors[row]))
            donors = self._planner.donors(request, options)
            to_make = self._planner.donors_to_make(request, options, donors)
            made = [self._make(one, call.called_at) for one in to_make]
            planned = self._planner.plan(request, options, donors)
            sequences = kind.sequences(row, planned)
            job = Job(call.first + row, planned, sequences, heard, kind, donors=made, streams=streams)
            self.loop.submit(job.sequences, call.called_at)
        return job

    def _make(self, planned: Planned, called_at: float | None) -> PooledSequence:
        """Submit a prompt that computes a donor for a request after it; return its sequence."""
        assert planned.reservation is not None
        planned.reservation.enter()  # of the sequence, which leaves when it has run
        try:
            sequence = self._sequences.pooled(planned)
            self.loop.submit([sequence], called_at)
        finally:
            planned.reservation.leave()
        return sequence

    def arrive(self, chunk: RequestChunk[Any], heard: Callable[[Job], object]) -> Job:
        """Identify, plan and submit the only request of a chunk; `heard` is called at each progress of its job.

        Raises:
          RequestError: the request is wrong.
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
        raise AssertionError("a chunk has at least one request")

    def end(self, job: Job) -> None:
        """Release a job whose results are no longer read; abort it if it still runs."""
        has_failed = not job.has_ended or any(
            one.end.is_aborted or one.end.error is not None or one.end.fault is not None for one in job.sequences
        )
        if not has_failed:
            self._ahead.expect(job.planned.options.reuse, job.sequences)
            self._ahead.start()
        job.leave(failed=has_failed)
        job.abort()

    def _serve[T: CallResult](
        self,
        chunks: Iterable[RequestChunk[T]],
        bar: Progress,
        kept: list[tuple[Job, T]] | None = None,
        *,
        returns_all: bool = True,
    ) -> Generator[tuple[int, T]]:
        """Run chunks; see `serve`.

        If the engine's error or Ctrl-C ends a call that returns all outputs at once, its image lists count as not
        served.

        Args:
          bar: progress bar that counts the requests that have ended.
          kept: list that receives the jobs and results of successful requests, whose cache entries stay reserved; None
            releases them.
        """
        served: list[str] = []

        def finish(job: Job) -> T | None:
            found: T | None = self._finish(job, kept)
            if found is not None:
                bar.update(tokens=sum(len(sequence.generated) for sequence in job.sequences))
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

    def _finish(self, job: Job, kept: list[tuple[Job, Any]] | None) -> Any:
        """Return the result of a finished job, None if it was aborted. Release its entries unless `kept` gets it."""
        fault = next((one.end.fault for one in job.sequences if one.end.fault is not None), None)
        has_failed = fault is not None or any(one.end.is_aborted or one.end.error is not None for one in job.sequences)
        keeps = kept is not None and not has_failed
        try:
            if fault is not None:
                raise fault
            if any(sequence.end.is_aborted for sequence in job.sequences):
                return None
            self._ahead.expect(job.planned.options.reuse, job.sequences)
            result = job.kind.result(job)
            if kept is not None and keeps:
                kept.append((job, result))
            return result
        finally:
            if not keeps:
                job.leave(failed=has_failed)

    def _verified(self, answered: Sequence[tuple[Job, RequestOutput]]) -> Iterator[tuple[int, RequestOutput]]:
        """Yield the outputs again, with their comparison to a cold run."""
        jobs = [job for job, _ in answered]
        first = [job.answers[0] for job in jobs]
        compared = verify_answers(self.loop, self._sequences, [job.planned for job in jobs], first)
        for (job, output), found in zip(answered, compared, strict=True):
            error = self.reporter.error(job.planned, *job.answers)
            yield job.row, dataclasses.replace(output, verification=found, error=error)


def _watched[T](results: Generator[T], bar: Progress) -> Iterator[T]:
    """Yield results with the progress bar active only while the next result is computed, not while the caller runs."""
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
    """Return the results of a call in request order; of several results of a request, the last one counts.

    Raises:
      RequestError: a request is wrong. `outputs` has the results of those that were answered.
    """
    found: dict[int, T] = {}
    try:
        for row, result in results:
            found[row] = result
    except RequestError as error:
        answered = {row: result for row, result in found.items() if result.error is None}
        outputs = [answered.get(row) for row in range(1 + max(found, default=-1))]
        raise RequestError(error.errors, outputs if answered else ()) from None
    return [found[row] for row in sorted(found)]
