"""A call from its checked rows to its results: windows of rows, submitted in order, and told of as they end."""

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
from vlcache_jax.common.checks import is_a
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

_NAMED = 20  # rows that one message names
_AHEAD = 4  # times as many requests as run together are submitted ahead


class RequestError(ValueError):
    """Rows of a call that cannot be answered.

    Attributes:
      errors: why, by row.
      outputs: of the rows that were answered until then, in their places; None elsewhere. Empty if none was.
    """

    def __init__(self, errors: Mapping[int, str], outputs: Sequence[Any] = ()):
        self.errors = dict(sorted(errors.items()))
        self.outputs = list(outputs)
        lines = list(self.errors.values())
        message = "\n".join(
            [*lines[:_NAMED], *([f"... and {len(lines) - _NAMED} more"] if len(lines) > _NAMED else [])]
        )
        super().__init__(message if len(lines) == 1 else f"{len(lines)} requests are wrong:\n{message}")

    def __reduce__(self) -> tuple[Any, ...]:
        """As it was made: on its way from process to process it would be made anew of its message."""
        return type(self), (self.errors, self.outputs)


class NotFiniteError(RequestError):
    """Logits were not finite, which is no fault of the request's."""


class CallResult(Protocol):
    """What a row of a call comes to."""

    @property
    def error(self) -> str | None:
        """What is wrong with it; None: nothing."""


@dataclass(frozen=True)
class Call:
    """A call of `LLM`; see `LLM.chat`.

    Attributes:
      name: of a request, with {} for its number: "conversations[{}]".
      listed: the requests as they came.
      render: makes a prompt of one.
      options, on_error: of all of them.
      params: sampling parameters for all of them, or of each; None: the checkpoint's own.
      compressors: what replaces `options.compress` in each of them, or what is wrong with it; None: nothing does.
      first: number of the first one.
      group: of its rows, if a wrong one ends the call; calls that belong together share it.
      apart: what is kept for everyone does not stand in for what is kept under its salt, so that this is made.
      called_at: when it came.
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
        owner_key(self.options.cache_salt)  # checks the salt
        if self.group is None and self.stops:
            object.__setattr__(self, "group", Group())

    @property
    def stops(self) -> bool:
        """Whether a wrong row ends it: before its chunk runs; or, where only pixels or logits show it, after what runs
        then."""
        return self.on_error == "raise"

    def prompt(self, row: int) -> Prompt | ValueError:
        """The prompt of a request, or what is wrong with it."""
        name = self.name.format(self.first + row)
        try:
            return self.render(self.listed[row], name=name)
        except ValueError as error:
            return error
        except Exception as error:  # a caller's own objects may raise anything
            return ValueError(f"{name} must be readable, got {type(error).__name__}: {error}")


class Job:
    """A request under way.

    Args:
      row: of the call.
      planned: the request.
      sequences: that run for it.
      heard: is called with it when it begins, and when it ends, by the engine's thread.
      kind: of what it comes to; names its call.
      streams: it is also called whenever there are more tokens.

    Attributes:
      has_begun: its prompt is computed, or it ended before that.
    """

    def __init__(
        self,
        row: int,
        planned: Planned,
        sequences: Sequence[Running],
        heard: Callable[[Job], object],
        kind: ResultKind[Any],
        *,
        streams: bool = False,
    ):
        self.kind = kind
        self.row, self.planned, self.sequences = row, planned, sequences
        self.has_begun = False
        self._heard, self._streams = heard, streams
        for sequence in sequences:
            sequence.listen(self._hear, kind.call.group)
            if sequence.planned.hold is not None:
                sequence.planned.hold.enter()

    @property
    def answers(self) -> list[Generation]:
        """Its sequences, if it is to be answered."""
        return [sequence for sequence in self.sequences if isinstance(sequence, Generation)]

    @property
    def has_ended(self) -> bool:
        return all(sequence.end.is_finished for sequence in self.sequences)

    def leave(self, *, failed: bool = False) -> None:
        """End the use of the cache that its plan began; see `Holding.leave`."""
        if self.planned.hold is not None:
            self.planned.hold.leave(failed=failed)

    def abort(self) -> None:
        """Nobody wants it any more."""
        for sequence in self.sequences:
            sequence.abort()

    def _hear(self, sequence: Running) -> None:
        if self._streams or self.has_ended or not self.has_begun:
            self.has_begun = True
            self._heard(self)


@dataclass(frozen=True, eq=False)
class ResultKind[T: CallResult](ABC):
    """A kind of result: which sequences run for a row of a call, and the result that they make. Rows count from 0.

    Attributes:
      call: theirs.
      builder: of their sequences.
      reporter: makes their results.
      generates: whether there are answers, whose prompts may be compressed.
    """

    call: Call
    builder: SequenceBuilder
    reporter: Reporter

    generates: ClassVar[bool] = False

    def error(self, row: int, prompt: Prompt) -> ValueError | None:
        """Return what is wrong with what is asked of a row beside its prompt."""
        return None

    @abstractmethod
    def new_slots(self, row: int, length: int) -> int:
        """Return the slots that a row takes behind a prompt of `length` tokens."""

    @abstractmethod
    def sequences(self, row: int, planned: Planned) -> Sequence[Running]:
        """Return what runs for a row."""

    @abstractmethod
    def result(self, job: Job) -> T:
        """Return what a row came to whose job has ended."""

    @abstractmethod
    def failed(self, row: int, prompt: Prompt | ValueError, error: str) -> T:
        """Return the result of a row that is wrong, and never ran."""


@dataclass(frozen=True, eq=False)
class RequestChunk[T: CallResult]:
    """Rows of a call that are checked together, counted from 0.

    Attributes:
      kind: of their results; names the call.
      prompts: of each row, or what is wrong with it.
      arrivals: the requests.
    """

    kind: ResultKind[T]
    prompts: Sequence[Prompt | ValueError]
    arrivals: Arrivals

    def failed(self, row: int, error: object) -> tuple[int, T]:
        """Return a row's number in all calls, and its result, as it is wrong."""
        return self.kind.call.first + row, self.kind.failed(row, self.prompts[row], str(error))


class _Serving[T: CallResult]:
    """The rows of a call under way; see `serve`.

    Attributes:
      wrong: what is wrong with rows that end the call.
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
        """Submits a chunk, and yields what ends meanwhile."""
        call, errors = chunk.kind.call, chunk.arrivals.errors
        if errors and call.stops:
            self.wrong |= {call.first + row: str(error) for row, error in errors.items()}
        else:
            yield from itertools.starmap(chunk.failed, errors.items())
            yield from self._submitted(chunk)

    def ended(self, most: int = 0, begun: Iterable[Job] | None = None) -> Iterator[tuple[int, T]]:
        """Yields results until at most so many are running, or these have begun."""
        while len(self._running) > most if begun is None else not all(job.has_begun for job in begun):
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
        """Ends what runs."""
        if self._running:
            for job in self._running.values():
                job.leave(failed=True)
            self._loop.abort([sequence for job in self._running.values() for sequence in job.sequences])

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
                        yield from self.ended(_AHEAD * self._loop.engine.runner.ladder.max_sequences)
                    elif call.stops:
                        self.wrong[number] = str(found)
                    else:
                        yield chunk.failed(row, found)
                    if self.wrong:
                        return
                # Pixels of the next window are decoded meanwhile; those of this one are given up then.
                yield from self.ended(begun=begun)
                if self.wrong:
                    return


def serve[T: CallResult](
    chunks: Iterable[RequestChunk[T]],
    loop: Loop,
    start: Callable[[RequestChunk[T], int, Request, Callable[[Job], object]], Job],
    finish: Callable[[Job], T | None],
) -> Iterator[tuple[int, T]]:
    """Yields the rows of a call with their results, as they end.

    Args:
      chunks: one is asked for when the rows of the one before are under way.
      start: plans and submits the request of a row; what it is given last is called with the job when it begins, and
        when it ends.
      finish: the result of a request that has ended, None if it was given up; called once for each that was started.

    Raises:
      RequestError: a row is wrong, and that ends the call. It has no outputs: they have been yielded.
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
            except Exception as error:  # of whoever gives the rows: those before it are answered
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
    """Return the value of a row without an error."""
    assert not isinstance(value, ValueError)
    return value
