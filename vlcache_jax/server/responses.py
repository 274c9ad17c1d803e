"""Answers as HTTP has them, and work that ends when nobody waits for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive

from vlcache_jax.protocol.values import ApiError, write


def answer_json(content: Any, status: int = 200) -> Response:
    """JSON."""
    return Response(write(content), status, media_type="application/json")


def refuse(error: ApiError) -> Response:
    """OpenAI's error object."""
    response = answer_json(error.to_dict(), error.status)
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if error.retry_after is not None:
        response.headers["Retry-After"] = str(error.retry_after)
    return response


async def merged[T](
    streams: Sequence[AsyncGenerator[T]], silence: float, ended: asyncio.Event
) -> AsyncGenerator[tuple[int, T] | None]:
    """What comes of any of the streams, each with the number of its own.

    Args:
      silence: seconds after which None says that nothing has come.
      ended: nobody waits for them any more.

    Raises:
      ApiError: they are ended before their ends.
    """
    heard: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(1)  # who reads slowly is not read ahead of

    async def hear(number: int, stream: AsyncGenerator[T]) -> None:
        try:
            async with contextlib.aclosing(stream):
                async for one in stream:
                    await heard.put((number, one))
            await heard.put(None)
        except Exception as error:
            await heard.put(error)

    async def end() -> None:
        await ended.wait()
        await heard.put(ApiError("the server is shutting down", status=503, retry_after=1))

    tasks = [asyncio.create_task(hear(i, stream)) for i, stream in enumerate(streams)]
    tasks.append(asyncio.create_task(end()))
    left = len(streams)
    try:
        while left:
            try:
                async with asyncio.timeout(silence):
                    found = await heard.get()
            except TimeoutError:
                yield None
                continue
            if isinstance(found, Exception):
                raise found
            if found is None:
                left -= 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until_gone[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """What some work comes to; None if the client goes away before, which cancels it.

    Args:
      receive: of a request whose body has been read.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_leaves(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
        del working, leaving  # an error that is raised here has this frame, and would keep itself and all that it has


async def _leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
