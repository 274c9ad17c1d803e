"""Requests of programs that serve, while they are under way: who may come in, and who is to end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vlcache_jax.calls import Caller
from vlcache_jax.engine.loop import CLOSED
from vlcache_jax.engine.request import NOT_FINITE
from vlcache_jax.progress import Progress
from vlcache_jax.serving import Chunk, Job, NotFiniteError, RequestError

_THREADS = 32  # requests whose images are being identified; others wait for one of them


class QueueFullError(RuntimeError):
    """There are as many requests as the engine takes."""


class UnderWay:
    """Requests under way, of any number of event loops.

    Args:
      max_waiting, when_full: see `AsyncLLM`.
      shows: whether progress is shown.
    """

    def __init__(self, max_waiting: int, when_full: str, *, shows: bool):
        self._room = _Room(max_waiting, raises=when_full == "raise")
        self._shows = shows
        self.threads = ThreadPoolExecutor(_THREADS, "vlcache-requests")
        self._jobs: dict[str, Job | None] = {}  # None: it is still being identified
        self._aborted: set[str] = set()
        self._lock = threading.Lock()  # of both, as there may be several event loops
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
        self, chunk: Callable[[], Chunk[Any]], caller: Caller, request_id: str
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
        with self._lock:
            if request_id in self._jobs:
                raise ValueError(f"request_id must not be that of a request under way, got {request_id!r}")
            self._jobs[request_id] = None
        try:
            await self._room.enter(request_id)
            try:
                more = asyncio.Event()
                job = await self._arrived(chunk, caller, more)
                try:
                    with self._lock:
                        self._jobs[request_id] = job
                        if request_id in self._aborted:
                            job.abort()
                    yield job, more
                finally:
                    caller.end(job)
            finally:
                self._room.leave()
        finally:
            with self._lock:
                del self._jobs[request_id]
                self._aborted.discard(request_id)

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
            if request_id in self._jobs:
                self._aborted.add(request_id)
                if (job := self._jobs[request_id]) is not None:
                    job.abort()
                self._room.let_in(request_id)

    def close(self) -> None:
        """None arrives any more."""
        self.threads.shutdown(wait=False)  # what is still to arrive is told by the engine that it is closed

    async def _arrived(self, chunk: Callable[[], Chunk[Any]], caller: Caller, more: asyncio.Event) -> Job:
        events = asyncio.get_running_loop()

        def heard(_: Job) -> None:
            events.call_soon_threadsafe(more.set)

        def arrive() -> Job:
            with contextlib.nullcontext() if self._shows else Progress("serving", show=False):
                return caller.arrive(chunk(), heard)

        try:
            arriving = self.threads.submit(arrive)
        except RuntimeError as error:
            raise RuntimeError(CLOSED) from error
        try:
            return await asyncio.shield(asyncio.wrap_future(arriving))
        except BaseException:
            # By the thread itself: the event loop may be gone when it has arrived.
            if not arriving.cancel():
                arriving.add_done_callback(lambda done: None if done.exception() else caller.end(done.result()))
            raise


class _Room:
    """Lets a number of requests in; the others wait in their order, each in its event loop."""

    def __init__(self, size: int, *, raises: bool):
        self._size, self._raises = size, raises
        self._used = 0
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None], str]] = deque()
        self._lock = threading.Lock()

    async def enter(self, request_id: str) -> None:
        """Raises a QueueFullError if there is no room, and nobody is to wait."""
        with self._lock:
            if self._used < self._size:
                self._used += 1
                return
            if self._raises:
                raise QueueFullError(f"the engine takes max_waiting = {self._size} requests at a time; try again later")
            events = asyncio.get_running_loop()
            turn = events.create_future()
            self._waiting.append((events, turn, request_id))
        try:
            await turn
        except BaseException:
            with self._lock:
                is_waiting = (events, turn, request_id) in self._waiting
                if is_waiting:
                    self._waiting.remove((events, turn, request_id))
            if not is_waiting:  # it has been let in
                self.leave()
            raise

    def let_in(self, request_id: str) -> None:
        """Whoever waits under this name need not any more: it is to end, and will take no room for long."""
        with self._lock:
            for waiting in [one for one in self._waiting if one[2] == request_id]:
                self._waiting.remove(waiting)
                with contextlib.suppress(RuntimeError):  # its event loop is closed
                    waiting[0].call_soon_threadsafe(_let_in, waiting[1])
                    self._used += 1

    def leave(self) -> None:
        with self._lock:
            while self._waiting and self._used <= self._size:
                events, turn, _ = self._waiting.popleft()
                with contextlib.suppress(RuntimeError):  # its event loop is closed
                    events.call_soon_threadsafe(_let_in, turn)
                    return
            self._used -= 1


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
