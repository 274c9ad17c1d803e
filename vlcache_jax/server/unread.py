"""Bodies that nobody reads, as their requests were refused: clients that send before they listen see the answer."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vlcache_jax.server.config import ServerConfig
from vlcache_jax.server.responses import until_gone

_SOON = 0.05  # seconds that an answer waits for the rest of a body, behind which the connection may be used again
_SECONDS = 10.0  # of reading what is left behind the answer
_BYTES = 2**28  # of it; or of the largest body that is read, if that is more


class DropUnread:
    """Drops what is left of a body that has its answer, within bounds, and closes the connection then (middleware).

    A connection that is closed with bytes unread is reset, and the answer may be lost with it; one that stays open is
    read by the HTTP server to the end of the body, which may never come.

    Args:
      app: what is behind.
      config: how large a body may be.
      ended: nobody is waited for any more.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, ended: asyncio.Event):
        self._app, self._most, self._ended = app, int(config.max_body_bytes), ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        is_read, dropped = False, 0

        async def read() -> Message:
            nonlocal is_read
            message = await receive()
            is_read = not message.get("more_body")  # nor is there more where the client went away
            return message

        async def drop(seconds: float) -> None:
            nonlocal dropped
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    while not is_read and dropped < max(_BYTES, self._most):
                        dropped += len((await read()).get("body", b""))

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start" and not is_read:
                if "expect" not in Headers(scope=scope):  # who asks before it sends would be told to
                    await drop(_SOON)
                if not is_read:
                    message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            elif not message.get("more_body") and not is_read:
                await send({**message, "more_body": True})
                await until_gone(self._end, drop(_SECONDS))
                message = {"type": "http.response.body"}
            await send(message)

        return await self._app(scope, read, answer)

    async def _end(self) -> Message:
        await self._ended.wait()
        return {"type": "http.disconnect"}
