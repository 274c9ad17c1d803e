"""A call from its checked rows to its results: windows of rows, submitted in order, and told of as they end."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, Protocol

from vlcache_jax.engine.loop import Loop
from vlcache_jax.engine.request import Group, Planned, Request
from vlcache_jax.engine.request import Sequence as Running
from vlcache_jax.intake.identification import Arrivals
from vlcache_jax.reuse.policies import Policy

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


class Result(Protocol):
    """What a request came to."""

    @property
    def error(self) -> str | None: ...


class Call(Protocol):
    """What rows have in common.

    Attributes:
      first: number of the first one.
      policy: under which they are planned.
      group: of its rows, if a wrong one ends the call.
      stops: whether a wrong one does: before its chunk runs; or, where only pixels or logits show it, after what runs
        then.
    """

    @property
    def first(self) -> int: ...

    @property
    def policy(self) -> Policy: ...

    @property
    def group(self) -> Group | None: ...

    @property
    def stops(self) -> bool: ...


class Job:
    """A request under way.

    Args:
      row: of the call.
      planned: the request.
      sequences: that run for it.
      heard: is called with it when it begins, and when it ends, by the engine's thread.
      call: whose row it is.
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
        call: Call,
        *,
        streams: bool = False,
    ):
        self.call = call
        self.row, self.planned, self.sequences = row, planned, sequences
        self.has_begun = False
        self._heard, self._streams = heard, streams
        for sequence in sequences:
            sequence.listener, sequence.group = self._hear, call.group
            if sequence.hold is not None:
                sequence.hold.enter()

    @property
    def has_ended(self) -> bool:
        return all(sequence.is_finished for sequence in self.sequences)

    def _hear(self, sequence: Running) -> None:
        if self._streams or self.has_ended or not self.has_begun:
            self.has_begun = True
            self._heard(self)


class Chunk[T: Result](Protocol):
    """Rows of a call that are checked together.

    Attributes:
      call: theirs.
      arrivals: they, counted from 0.
    """

    @property
    def call(self) -> Call: ...

    @property
    def arrivals(self) -> Arrivals: ...

    def start(self, row: int, request: Request, heard: Callable[[Job], object]) -> Job:
        """Plans and submits a request."""

    def failed(self, row: int, error: str) -> T:
        """The result of a row that is wrong."""


def serve[T: Result](
    chunks: Iterable[Chunk[T]], loop: Loop, finish: Callable[[Job], T | None]
) -> Iterator[tuple[int, T]]:
    """Yields the rows of a call with their results, as they end.

    Args:
      chunks: one is asked for when the rows of the one before are under way.
      finish: the result of a request that has ended, None if it was given up; called once for each that was started.

    Raises:
      RequestError: a row is wrong, and that ends the call. It has no outputs: they have been yielded.
    """
    heard: queue.SimpleQueue[Job] = queue.SimpleQueue()
    running: dict[int, Job] = {}
    wrong: dict[int, str] = {}

    def ended(most: int = 0, begun: Iterable[Job] | None = None) -> Iterator[tuple[int, T]]:
        """Results until at most so many are running, or these have begun."""
        while len(running) > most if begun is None else not all(job.has_begun for job in begun):
            loop.begin()
            job = heard.get()
            if not job.has_ended or running.pop(job.row, None) is None:
                continue
            result = finish(job)
            if result is not None and result.error is not None and job.call.stops:
                wrong[job.row] = result.error
            elif result is not None:
                yield job.row, result

    def submitted(chunk: Chunk[T]) -> Iterator[tuple[int, T]]:
        with closing(chunk.arrivals.windows()) as windows:
            for window in windows:
                begun: list[Job] = []
                for row, found in window:
                    if isinstance(found, Request):
                        job = running[chunk.call.first + row] = chunk.start(row, found, heard.put)
                        begun.append(job)
                        yield from ended(_AHEAD * loop.engine.runner.ladder.max_sequences)
                    elif chunk.call.stops:
                        wrong[chunk.call.first + row] = str(found)
                    else:
                        yield chunk.call.first + row, chunk.failed(row, str(found))
                    if wrong:
                        return
                # Pixels of the next window are decoded meanwhile; those of this one are given up then.
                yield from ended(begun=begun)
                if wrong:
                    return

    given = iter(chunks)
    failed: Exception | None = None
    try:
        while True:
            try:
                chunk = next(given)
            except StopIteration:
                break
            except Exception as error:  # of whoever gives the rows: those before it are answered
                failed = error
                break
            errors = {chunk.call.first + row: str(error) for row, error in chunk.arrivals.errors.items()}
            if errors and chunk.call.stops:
                wrong |= errors
            else:
                yield from ((row, chunk.failed(row - chunk.call.first, error)) for row, error in errors.items())
                yield from submitted(chunk)
            if wrong:
                break
        yield from ended()
    finally:
        if running:
            for job in running.values():
                job.planned.hold.leave(failed=True)
            loop.abort([sequence for job in running.values() for sequence in job.sequences])
    if failed is not None:
        raise failed
    if wrong:
        raise RequestError(wrong)
