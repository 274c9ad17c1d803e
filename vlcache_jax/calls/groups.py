"""Running a call: submits groups of its requests in order, and yields their results as they end."""

from __future__ import annotations

import itertools
import queue
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from vlcache_jax.cache.keys import owner_key
from vlcache_jax.common.checks import check_text, is_a
from vlcache_jax.compress.policies import Compressor
from vlcache_jax.engine.engine import Loop
from vlcache_jax.engine.request import Generation, Group, Planned, Request
from vlcache_jax.engine.request import Sequence as Running
from vlcache_jax.inputs.prompt import Prompt
from vlcache_jax.outputs import Reporter
from vlcache_jax.preparation.identification import Arrivals
from vlcache_jax.preparation.sequences import SequenceBuilder
from vlcache_jax.request_options import ResolvedOptions
from vlcache_jax.sampling import SamplingParams

_NAMED = 20  # maximum number of requests that an error message lists
_AHEAD = 4  # maximum number of submitted requests, as a multiple of those that run together


class RequestError(ValueError):
    """One or more requests of a call are wrong.

    Attributes:
      errors: error message by request number.
      outputs: outputs of the requests answered until then, by request number, None for others; empty if there are none.
    """

    def __init__(self, errors: Mapping[int, str], outputs: Sequence[Any] = ()):
        self.errors = dict(sorted(errors.items()))
        self.outputs = list(outputs)
        lines = list(self.errors.values())
        message = "\n".join(
            [*lines[:_NAMED], *([f"... and {len(lines) - _NAMED} more"] if len(lines) > _NAMED else [])]
        )
        super().__init__(message if len(lines) == 1 else f"{len(lines)} requests failed:\n{message}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments: by default, an exception is recreated from its message alone."""
        return type(self), (self.errors, self.outputs)


class NotFiniteError(RequestError):
    """Logits were not finite: an error of the engine or the model, not of the request."""


class CallResult(Protocol):
    """Result of one request of a call."""

    @property
    def error(self) -> str | None:
        """Reason if the request failed, otherwise None."""


@dataclass(frozen=True)
class Call:
    """Call of a public method; see `LLM.chat`.

    Attributes:
      name: name of its requests in errors, with {} for the request number: "conversations[{}]".
      listed: the requests as given.
      render: function that renders one of them to a prompt.
      options, on_error: see `LLM.chat`.
      params: sampling parameters of all requests, or one per request; None: the checkpoint's.
      compressors: compressor of each request in place of `options.compress`, or its error; None: no replacement.
      first: number of the first request.
      group: scheduler group that a wrong request ends, if `on_error` is "raise"; related calls share it.
      apart: do not use shared cache entries in place of those under the call's salt, so that the latter are made.
      called_at: time of the call (`time.perf_counter`).
    """

    name: str
    listed: Sequence[Any]
    render: Callable[..., Prompt]
    options: ResolvedOptions
    on_error: str
    params: SamplingParams | Sequence[SamplingParams] | None = None
    compressors: Sequence[Compressor | ValueError | None] | None = None
    first: int = 0
    group: Group | None = None
    apart: bool = False
    called_at: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        if self.on_error not in ("raise", "return"):
            raise ValueError(f'on_error must be "raise" or "return", got {self.on_error!r}')
        if not is_a(priority := self.options.priority, int):
            raise ValueError(f"priority must be an integer, got {priority!r}")
        if (caller := self.options.caller) is not None:
            check_text(caller, "caller", "a string or None")
        owner_key(self.options.cache_salt)  # raises if the salt is wrong
        if self.group is None and self.stops:
            object.__setattr__(self, "group", Group())

    @property
    def stops(self) -> bool:
        """True if a wrong request ends the call.

        The call ends before the request's chunk runs, or, if only pixels or logits show the fault, after the running
        requests.
        """
        return self.on_error == "raise"

    def prompt(self, row: int) -> Prompt | ValueError:
        """Return the prompt of a request, or its error."""
        name = self.name.format(self.first + row)
        try:
            return self.render(self.listed[row], name=name)
        except ValueError as error:
            return error
        except Exception as error:  # a caller's own objects may raise anything
            return ValueError(f"{name} must be readable, got {type(error).__name__}: {error}")


class Job:
    """Request in flight.

    Args:
      row: number of the request in its call.
      planned: the planned request.
      sequences: its running sequences.
      heard: callback that the engine's thread calls with the job when it begins and when it ends.
      kind: kind of its result; it has the call.
      donors: sequences that compute images of the request in a neutral context.
      streams: also call `heard` whenever there are new tokens.

    Attributes:
      has_begun: True once its prompt is computed, or it ended before that.
    """

    def __init__(
        self,
        row: int,
        planned: Planned,
        sequences: Sequence[Running],
        heard: Callable[[Job], object],
        kind: ResultKind[Any],
        *,
        donors: Sequence[Running] = (),
        streams: bool = False,
    ):
        self.kind = kind
        self.row, self.planned, self.sequences, self._donors = row, planned, sequences, donors
        self.has_begun = False
        self._heard, self._streams = heard, streams
        for sequence in sequences:
            sequence.listen(self._hear, kind.call.group)
            if sequence.planned.reservation is not None:
                sequence.planned.reservation.enter()

    @property
    def answers(self) -> list[Generation]:
        """Sequences that generate text; empty for other kinds of results."""
        return [sequence for sequence in self.sequences if isinstance(sequence, Generation)]

    @property
    def has_ended(self) -> bool:
        return all(sequence.end.is_finished for sequence in self.sequences)

    def leave(self, *, failed: bool = False) -> None:
        """Release the cache reservation of the request; see `CacheReservation.leave`."""
        if self.planned.reservation is not None:
            self.planned.reservation.leave(failed=failed)

    @property
    def submitted(self) -> list[Running]:
        """All sequences that run for the request alone."""
        return [*self.sequences, *self._donors]

    def abort(self) -> None:
        """Abort all sequences of the job. Donors that other requests wait for are computed nevertheless."""
        for sequence in self.submitted:
            sequence.abort()

    def _hear(self, sequence: Running) -> None:
        if self._streams or self.has_ended or not self.has_begun:
            self.has_begun = True
            self._heard(self)


@dataclass(frozen=True, eq=False)
class ResultKind[T: CallResult](ABC):
    """Kind of result: builds the sequences of a request, and its result. Requests of a call count from 0.

    Attributes:
      call: the call.
      builder: builds sequences.
      reporter: builds results.
      generates: True if the requests generate text, so that their prompts may be compressed.
    """

    call: Call
    builder: SequenceBuilder
    reporter: Reporter

    generates: ClassVar[bool] = False

    def error(self, row: int, prompt: Prompt) -> ValueError | None:
        """Return the error of a request's other arguments, or None."""
        return None

    @abstractmethod
    def new_slots(self, row: int, length: int) -> int:
        """Return the number of KV slots that a request needs after its prompt of `length` tokens."""

    @abstractmethod
    def sequences(self, row: int, planned: Planned) -> Sequence[Running]:
        """Return the sequences of a request."""

    @abstractmethod
    def result(self, job: Job) -> T:
        """Return the result of a finished job."""

    @abstractmethod
    def failed(self, row: int, prompt: Prompt | ValueError, error: str) -> T:
        """Return the result of a request that is wrong and never ran."""


@dataclass(frozen=True, eq=False)
class RequestChunk[T: CallResult]:
    """Requests of a call that are checked together, counted from 0.

    Attributes:
      kind: kind of their results; it has the call.
      prompts: prompt of each request, or its error.
      arrivals: the identified requests.
    """

    kind: ResultKind[T]
    prompts: Sequence[Prompt | ValueError]
    arrivals: Arrivals

    def failed(self, row: int, error: object) -> tuple[int, T]:
        """Return the number of a wrong request among all calls, and its result."""
        return self.kind.call.first + row, self.kind.failed(row, self.prompts[row], str(error))


class _Serving[T: CallResult]:
    """Requests of a call in flight; see `serve`.

    Attributes:
      wrong: errors that end the call, by request number.
    """

    def __init__(
        self,
        loop: Loop,
        start: Callable[[RequestChunk[T], int, Request, Callable[[Job], object]], Job],
        finish: Callable[[Job], T | None],
    ):
        self.wrong: dict[int, str] = {}
        self._loop, self._start, self._finish = loop, start, finish
        self._heard: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._running: dict[int, Job] = {}

    def answered(self, chunk: RequestChunk[T]) -> Iterator[tuple[int, T]]:
        """Submit a chunk, and yield the results that become ready meanwhile."""
        call, errors = chunk.kind.call, chunk.arrivals.errors
        if errors and call.stops:
            self.wrong |= {call.first + row: str(error) for row, error in errors.items()}
        else:
            yield from itertools.starmap(chunk.failed, errors.items())
            yield from self._submitted(chunk)

    def ended(self, max_running: int = 0, begun: Iterable[Job] | None = None) -> Iterator[tuple[int, T]]:
        """Yield results until at most `max_running` jobs run, or until all jobs in `begun` have begun."""
        while len(self._running) > max_running if begun is None else not all(job.has_begun for job in begun):
            self._loop.begin()
            job = self._heard.get()
            if not job.has_ended or self._running.pop(job.row, None) is None:
                continue
            result = self._finish(job)
            if result is not None and result.error is not None and job.kind.call.stops:
                self.wrong[job.row] = result.error
            elif result is not None:
                yield job.row, result

    def give_up(self) -> None:
        """Abort all running jobs."""
        if self._running:
            for job in self._running.values():
                job.leave(failed=True)
            self._loop.abort([sequence for job in self._running.values() for sequence in job.submitted])

    def _submitted(self, chunk: RequestChunk[T]) -> Iterator[tuple[int, T]]:
        call = chunk.kind.call
        with closing(chunk.arrivals.windows()) as windows:
            for window in windows:
                begun: list[Job] = []
                for row, found in window:
                    number = call.first + row
                    if isinstance(found, Request):
                        job = self._running[number] = self._start(chunk, row, found, self._heard.put)
                        begun.append(job)
                        yield from self.ended(_AHEAD * self._loop.engine.runner.buckets.max_sequences)
                    elif call.stops:
                        self.wrong[number] = str(found)
                    else:
                        yield chunk.failed(row, found)
                    if self.wrong:
                        return
                # Meanwhile, threads decode the images of the next group. The pixels of this one are freed then.
                yield from self.ended(begun=begun)
                if self.wrong:
                    return


def serve[T: CallResult](
    chunks: Iterable[RequestChunk[T]],
    loop: Loop,
    start: Callable[[RequestChunk[T], int, Request, Callable[[Job], object]], Job],
    finish: Callable[[Job], T | None],
) -> Iterator[tuple[int, T]]:
    """Run the requests of a call; yield (request number, result) as they end.

    Args:
      chunks: iterable of chunks; the next one is read once the requests of the one before are in flight.
      start: plans and submits a request. Its last argument is a callback for the beginning and the end of the job.
      finish: returns the result of a finished job, or None if it was aborted; called once per started job.

    Raises:
      RequestError: a wrong request ended the call. Its `outputs` are empty, since they have been yielded.
    """
    serving = _Serving(loop, start, finish)
    given = iter(chunks)
    failed: Exception | None = None
    try:
        while not serving.wrong:
            try:
                chunk = next(given)
            except StopIteration:
                break
            except Exception as error:  # error of the caller's iterable: requests before it still run
                failed = error
                break
            yield from serving.answered(chunk)
        yield from serving.ended()
    finally:
        serving.give_up()
    if failed is not None:
        raise failed
    if serving.wrong:
        raise RequestError(serving.wrong)


def good[T](value: T | ValueError) -> T:
    """Return a value that is known not to be an error."""
    assert not isinstance(value, ValueError)
    return value
