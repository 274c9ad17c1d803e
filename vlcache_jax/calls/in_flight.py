"""Requests of programs that serve, while they are under way: who may come in, and who is to end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from vlcache_jax.calls.caller import Caller
from vlcache_jax.calls.groups import Job, NotFiniteError, RequestChunk, RequestError
from vlcache_jax.common.progress import Progress
from vlcache_jax.engine.engine import CLOSED
from vlcache_jax.engine.request import NOT_FINITE

_log = logging.getLogger(__name__)

_THREADS = 32  # requests whose images are being identified; others wait for one of them


class QueueFullError(RuntimeError):
    """There are as many requests as the engine takes."""


@dataclass(eq=False)
class _Place:
    """A request's name and its place, from when it asks for them until it ends, or its event loop is found closed.

    Attributes:
      name: of the request.
      events: its event loop.
      end: ends its job.
      job: None: it has none yet.
      is_aborted: whether its job is to end.
      has_room: whether it takes room.
      is_left: whether it has given both back.
    """

    name: str
    events: asyncio.AbstractEventLoop
    end: Callable[[Job], None]
    job: Job | None = None
    is_aborted: bool = False
    has_room: bool = False
    is_left: bool = False


class UnderWay:
    """Requests under way, of any number of event loops. A loop that is closed with requests under way ends them.

    Args:
      max_waiting, when_full: see `AsyncLLM`.
      shows: whether progress is shown.
    """

    def __init__(self, max_waiting: int, when_full: str, *, shows: bool):
        self._room = _Room(max_waiting, raises=when_full == "raise")
        self._shows = shows
        self.threads = ThreadPoolExecutor(_THREADS, "vlcache-requests")
        self._places: dict[str, _Place] = {}
        self._lock = threading.RLock()  # there may be several event loops
        self._numbers = itertools.count()

    def named(self, request_id: str | None) -> str:
        """The name of a request; None: one is drawn.

        Raises:
          ValueError: it is none.
        """
        if request_id is None:
            return f"request-{next(self._numbers)}"
        if not isinstance(request_id, str) or not request_id:
            raise ValueError(f"request_id must be a non-empty string, got {request_id!r}")
        return request_id

    @contextlib.asynccontextmanager
    async def job(
        self, chunk: Callable[[], RequestChunk[Any]], caller: Caller, request_id: str
    ) -> AsyncGenerator[tuple[Job, asyncio.Event]]:
        """Lets a request in, and gives its job, and what is set whenever there is more of it. It ends with the context.

        Args:
          chunk: makes the checked request, in a thread.

        Raises:
          QueueFullError: there is no room.
          RequestError: the request is wrong.
          ValueError: there is one of that name.
          RuntimeError: the engine is closed.
        """
        place = _Place(request_id, asyncio.get_running_loop(), caller.end)
        if self._room.is_full or request_id in self._places:
            self._end_closed()
        with self._lock:
            if request_id in self._places:
                raise ValueError(f"request_id must not be that of a request under way, got {request_id!r}")
            self._places[request_id] = place
        try:
            await self._room.enter(place)
            more = asyncio.Event()
            place.job = job = await self._arrived(chunk, caller, more, place)
            with self._lock:
                if place.is_aborted:
                    job.abort()
            yield job, more
        finally:
            self._leave(place)

    def _leave(self, place: _Place) -> None:
        """End a request and free its room and its name; only the first call does so."""
        with self._lock:
            if place.is_left:
                return
            place.is_left, job = True, place.job
        try:
            if job is not None:
                place.end(job)
        finally:
            self._room.leave(place)
            with self._lock:
                del self._places[place.name]

    def _end_closed(self) -> None:
        """End the requests whose event loops are closed, since these cannot run their own cleanup."""
        with self._lock:
            closed = [place for place in self._places.values() if place.events.is_closed()]
        for place in closed:
            self._leave(place)
        if closed:
            _log.warning("requests ended as their event loop was closed: %d", len(closed))

    def _orphan(self, place: _Place, job: Job | None) -> None:
        """Take a job that its request does not wait for: the request ends it, or ends with its closed event loop."""
        with self._lock:
            is_late = place.is_left and place.job is None and job is not None
            place.job = place.job or job
        if is_late and job is not None:
            place.end(job)
        self._end_closed()

    async def run[T](self, work: Callable[[], T]) -> T:
        """What some work comes to, in one of the threads.

        Raises:
          RuntimeError: the engine is closed.
        """
        try:
            running = self.threads.submit(work)
        except RuntimeError as error:
            raise RuntimeError(CLOSED) from error
        return await asyncio.wrap_future(running)

    def check(self, job: Job, caller: Caller) -> None:
        """Sees that nothing has gone wrong with a job.

        Raises:
          RuntimeError: the engine failed.
          NotFiniteError, RequestError: the request did.
        """
        for fault in (one.end.fault for one in job.sequences if one.end.fault is not None):
            raise RuntimeError(str(fault)) from fault
        if wrong := caller.reporter.error(job.planned, *job.sequences):
            is_flaw = any(one.end.error == NOT_FINITE for one in job.sequences)
            raise (NotFiniteError if is_flaw else RequestError)({0: wrong})

    def abort(self, request_id: str) -> None:
        """Ends a request. One that is not under way is none."""
        with self._lock:
            if (place := self._places.get(request_id)) is not None:
                place.is_aborted = True
                if place.job is not None:
                    place.job.abort()
                self._room.let_in(place)

    def close(self) -> None:
        """None arrives any more."""
        self.threads.shutdown(wait=False)  # what is still to arrive is told by the engine that it is closed

    async def _arrived(
        self, chunk: Callable[[], RequestChunk[Any]], caller: Caller, more: asyncio.Event, place: _Place
    ) -> Job:
        def heard(job: Job) -> None:
            try:
                place.events.call_soon_threadsafe(more.set)
            except RuntimeError:
                if not place.events.is_closed():
                    raise
                self._orphan(place, job)

        def arrive() -> Job:
            with contextlib.nullcontext() if self._shows else Progress("serving", show=False):
                return caller.arrive(chunk(), heard)

        def arrived(done: Future[Job]) -> None:
            if place.events.is_closed():
                self._orphan(place, None if done.cancelled() or done.exception() else done.result())

        try:
            arriving = self.threads.submit(arrive)
        except RuntimeError as error:
            raise RuntimeError(CLOSED) from error
        arriving.add_done_callback(arrived)
        try:
            return await asyncio.shield(asyncio.wrap_future(arriving))
        except BaseException:
            # By the thread itself: the event loop may be gone when it has arrived.
            if not arriving.cancel():
                arriving.add_done_callback(
                    lambda done: None if done.exception() else self._orphan(place, done.result())
                )
            raise


class _Room:
    """Lets a number of requests in; the others wait in their order, each in its event loop."""

    def __init__(self, size: int, *, raises: bool):
        self._size, self._raises = size, raises
        self._used = 0
        self._waiting: deque[tuple[_Place, asyncio.Future[None]]] = deque()
        self._lock = threading.Lock()

    @property
    def is_full(self) -> bool:
        """Whether one more has to wait."""
        return self._used >= self._size

    async def enter(self, place: _Place) -> None:
        """Raises a QueueFullError if there is no room, and nobody is to wait."""
        with self._lock:
            if not self.is_full:
                self._used += 1
                place.has_room = True
                return
            if self._raises:
                raise QueueFullError(f"the engine takes max_waiting = {self._size} requests at a time; try again later")
            turn = place.events.create_future()
            self._waiting.append((place, turn))
        await turn

    def let_in(self, place: _Place) -> None:
        """A request need not wait any more: it is to end, and will take no room for long."""
        with self._lock:
            for waiting in [one for one in self._waiting if one[0] is place]:
                self._waiting.remove(waiting)
                if self._admit(*waiting):
                    self._used += 1

    def leave(self, place: _Place) -> None:
        """A request waits no more, and gives its room to the next one, if it has any."""
        with self._lock:
            for waiting in [one for one in self._waiting if one[0] is place]:
                self._waiting.remove(waiting)
            if not place.has_room:
                return
            place.has_room = False
            while self._waiting and self._used <= self._size:
                if self._admit(*self._waiting.popleft()):
                    return
            self._used -= 1

    def _admit(self, place: _Place, turn: asyncio.Future[None]) -> bool:
        """Gives room to a request that waits; whether its event loop takes it."""
        try:
            place.events.call_soon_threadsafe(_let_in, turn)
        except RuntimeError:  # its event loop is closed
            return False
        place.has_room = True
        return True


def _let_in(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)


async def together[T](work: Sequence[Callable[[], Coroutine[Any, Any, T]]], most: int) -> list[T]:
    """What all of it comes to, so many at a time; the first error ends the rest."""
    results: dict[int, T] = {}
    left = iter(enumerate(work))  # of all workers: there are no more tasks than may run

    async def some() -> None:
        for number, begin in left:
            results[number] = await begin()

    tasks = [asyncio.ensure_future(some()) for _ in range(min(most, len(work)))]
    try:
        await asyncio.gather(*tasks)
        return [results[number] for number in range(len(work))]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
