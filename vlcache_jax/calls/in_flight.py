"""Admission, abort and cleanup of the requests in flight of `AsyncLLM`."""

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

_THREADS = 32  # maximum number of requests whose images are identified in parallel


class QueueFullError(RuntimeError):
    """The engine has `max_waiting` requests in flight."""


@dataclass(eq=False)
class _Admission:
    """Admission state of a request, from its submission until it ends or its event loop is found closed.

    Attributes:
      name: ID of the request.
      events: its event loop.
      end: function that ends its job.
      job: its job, None until it is submitted.
      is_aborted: True if its job must end.
      has_room: True while it counts against `max_waiting`.
      is_left: True once its room and its name are free again.
    """

    name: str
    events: asyncio.AbstractEventLoop
    end: Callable[[Job], None]
    job: Job | None = None
    is_aborted: bool = False
    has_room: bool = False
    is_left: bool = False


class RequestsInFlight:
    """Requests in flight of any number of event loops. If a loop is closed, its requests in flight are ended.

    Args:
      max_waiting, when_full: see `AsyncLLM`.
      shows: show progress.
    """

    def __init__(self, max_waiting: int, when_full: str, *, shows: bool):
        self._room = _AdmissionQueue(max_waiting, raises=when_full == "raise")
        self._shows = shows
        self.threads = ThreadPoolExecutor(_THREADS, "vlcache-requests")
        self._admissions: dict[str, _Admission] = {}
        self._lock = threading.RLock()  # several event loops may use the engine
        self._numbers = itertools.count()

    def named(self, request_id: str | None) -> str:
        """Return the ID of a request, generated if `request_id` is None.

        Raises:
          ValueError: `request_id` is not a non-empty string.
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
        """Admit a request for the duration of the context; yield its job, and an event that is set at each progress.

        Args:
          chunk: returns the checked request; runs in a thread.
          caller: submits and ends the job.
          request_id: unique ID of the request.

        Raises:
          QueueFullError: `max_waiting` requests are in flight, and `when_full` is "raise".
          RequestError: the request is wrong.
          ValueError: a request with this ID is in flight.
          RuntimeError: the engine is closed.
        """
        admission = _Admission(request_id, asyncio.get_running_loop(), caller.end)
        if self._room.is_full or request_id in self._admissions:
            self._end_closed()
        with self._lock:
            if request_id in self._admissions:
                raise ValueError(f"request_id must be unique among the requests in flight, got {request_id!r}")
            self._admissions[request_id] = admission
        try:
            await self._room.enter(admission)
            progress = asyncio.Event()
            admission.job = job = await self._arrived(chunk, caller, progress, admission)
            with self._lock:
                if admission.is_aborted:
                    job.abort()
            yield job, progress
        finally:
            self._leave(admission)

    def _leave(self, admission: _Admission) -> None:
        """End a request and free its room and its name; only the first call does so."""
        with self._lock:
            if admission.is_left:
                return
            admission.is_left, job = True, admission.job
        try:
            if job is not None:
                admission.end(job)
        finally:
            self._room.leave(admission)
            with self._lock:
                del self._admissions[admission.name]

    def _end_closed(self) -> None:
        """End the requests whose event loops are closed, since these cannot run their own cleanup."""
        with self._lock:
            closed = [admission for admission in self._admissions.values() if admission.events.is_closed()]
        for admission in closed:
            self._leave(admission)
        if closed:
            _log.warning("requests aborted because their event loop was closed: %d", len(closed))

    def _orphan(self, admission: _Admission, job: Job | None) -> None:
        """Take a job that arrived without its request waiting: end it now, or leave that to the request's cleanup."""
        with self._lock:
            is_late = admission.is_left and admission.job is None and job is not None
            admission.job = admission.job or job
        if is_late and job is not None:
            admission.end(job)
        self._end_closed()

    async def run[T](self, work: Callable[[], T]) -> T:
        """Run `work` in a thread and return its result.

        Raises:
          RuntimeError: the engine is closed.
        """
        try:
            running = self.threads.submit(work)
        except RuntimeError as error:
            raise RuntimeError(CLOSED) from error
        return await asyncio.wrap_future(running)

    def check(self, job: Job, caller: Caller) -> None:
        """Raise the error of a job, if it has one.

        Raises:
          RuntimeError: the engine failed.
          NotFiniteError, RequestError: the request failed.
        """
        for fault in (one.end.fault for one in job.sequences if one.end.fault is not None):
            raise RuntimeError(str(fault)) from fault
        if wrong := caller.reporter.error(job.planned, *job.sequences):
            is_flaw = any(one.end.error == NOT_FINITE for one in job.sequences)
            raise (NotFiniteError if is_flaw else RequestError)({0: wrong})

    def abort(self, request_id: str) -> None:
        """End a request; does nothing if it is not in flight."""
        with self._lock:
            if (admission := self._admissions.get(request_id)) is not None:
                admission.is_aborted = True
                if admission.job is not None:
                    admission.job.abort()
                self._room.let_in(admission)

    def close(self) -> None:
        """Accept no more requests."""
        self.threads.shutdown(wait=False)  # for those still arriving, the engine raises that it is closed

    async def _arrived(
        self, chunk: Callable[[], RequestChunk[Any]], caller: Caller, progress: asyncio.Event, admission: _Admission
    ) -> Job:
        def heard(job: Job) -> None:
            try:
                admission.events.call_soon_threadsafe(progress.set)
            except RuntimeError:
                if not admission.events.is_closed():
                    raise
                self._orphan(admission, job)

        def arrive() -> Job:
            with contextlib.nullcontext() if self._shows else Progress("serving", show=False):
                return caller.arrive(chunk(), heard)

        def arrived(done: Future[Job]) -> None:
            if admission.events.is_closed():
                self._orphan(admission, None if done.cancelled() or done.exception() else done.result())

        try:
            arriving = self.threads.submit(arrive)
        except RuntimeError as error:
            raise RuntimeError(CLOSED) from error
        arriving.add_done_callback(arrived)
        heard_of = asyncio.wrap_future(arriving)
        # The event loop logs the exception of a future that nobody asks for it, as when the caller has left.
        heard_of.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            return await asyncio.shield(heard_of)
        except BaseException:
            # A callback in the worker thread: the event loop may be closed by the time the job arrives.
            if not arriving.cancel():
                arriving.add_done_callback(
                    lambda done: None if done.exception() else self._orphan(admission, done.result())
                )
            raise


class _AdmissionQueue:
    """Counter that admits up to `size` requests. Others wait in order of arrival, each in its event loop."""

    def __init__(self, size: int, *, raises: bool):
        self._size, self._raises = size, raises
        self._used = 0
        self._waiting: deque[tuple[_Admission, asyncio.Future[None]]] = deque()
        self._lock = threading.Lock()

    @property
    def is_full(self) -> bool:
        """True if one more request has to wait."""
        return self._used >= self._size

    async def enter(self, admission: _Admission) -> None:
        """Wait for room, or raise a QueueFullError if requests must not wait."""
        with self._lock:
            if not self.is_full:
                self._used += 1
                admission.has_room = True
                return
            if self._raises:
                raise QueueFullError(
                    f"the engine is full: it accepts max_waiting = {self._size} requests at a time; try again later"
                )
            admitted = admission.events.create_future()
            self._waiting.append((admission, admitted))
        await admitted

    def let_in(self, admission: _Admission) -> None:
        """Admit a waiting request at once, since it was aborted and will end soon."""
        with self._lock:
            for waiting in [one for one in self._waiting if one[0] is admission]:
                self._waiting.remove(waiting)
                if self._admit(*waiting):
                    self._used += 1

    def leave(self, admission: _Admission) -> None:
        """Remove a waiting request, or free the room of an admitted one for the next in the queue."""
        with self._lock:
            for waiting in [one for one in self._waiting if one[0] is admission]:
                self._waiting.remove(waiting)
            if not admission.has_room:
                return
            admission.has_room = False
            while self._waiting and self._used <= self._size:
                if self._admit(*self._waiting.popleft()):
                    return
            self._used -= 1

    def _admit(self, admission: _Admission, admitted: asyncio.Future[None]) -> bool:
        """Admit a waiting request; return False if its event loop is closed."""
        try:
            admission.events.call_soon_threadsafe(_let_in, admitted)
        except RuntimeError:  # its event loop is closed
            return False
        admission.has_room = True
        return True


def _let_in(admitted: asyncio.Future[None]) -> None:
    if not admitted.done():
        admitted.set_result(None)


async def together[T](work: Sequence[Callable[[], Coroutine[Any, Any, T]]], limit: int) -> list[T]:
    """Run coroutines, at most `limit` at a time, and return their results in order; the first error ends the rest."""
    results: dict[int, T] = {}
    left = iter(enumerate(work))  # shared by all workers, of which there are at most `limit`

    async def some() -> None:
        for number, begin in left:
            results[number] = await begin()

    tasks = [asyncio.ensure_future(some()) for _ in range(min(limit, len(work)))]
    try:
        await asyncio.gather(*tasks)
        return [results[number] for number in range(len(work))]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
