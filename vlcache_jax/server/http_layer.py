"""HTTP of the server: the parser and its refusals, checks of heads, bodies left unread, errors, answers, ids."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import re
import uuid
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any
from urllib.parse import urlsplit

import h11
from starlette.datastructures import Headers
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from vlcache_jax.async_llm import QueueFullError
from vlcache_jax.calls.groups import NotFiniteError
from vlcache_jax.protocol.schema import CHAT, TEXT, ApiError, write
from vlcache_jax.server.config import ServerConfig

TAG_DIGITS = 8
_NAMED = re.compile(rf"(?:resp_|file-)([0-9a-f]{{{TAG_DIGITS}}})[0-9a-f]+", re.ASCII)


class IdMaker:
    """Makes ids.

    Args:
      tag: hex digits of this server among several; none: it is alone.

    Raises:
      ValueError: it is no tag.
    """

    def __init__(self, tag: str = ""):
        if tag and not re.fullmatch(rf"[0-9a-f]{{{TAG_DIGITS}}}", tag):
            raise ValueError(f"tag must be {TAG_DIGITS} hex digits, got {tag!r}")
        self._tag = tag

    def new(self, prefix: str, digits: int = 32) -> str:
        """An id that nobody has."""
        return f"{prefix}{self._tag}{uuid.uuid4().hex}"[: len(prefix) + digits]


def tag_in(name: str) -> str | None:
    """The tag of the server that made the id of a response or a file; of one that is alone, digits that say nothing."""
    found = _NAMED.fullmatch(name)
    return None if found is None else found[1]


HEAD_BYTES = 1 << 16
"""Of a request's head at most. h11 holds to it; httptools, which uvicorn prefers where it is, has no limit."""


class HttpProtocol(H11Protocol):
    """Reads requests by h11, whatever else is installed, and refuses them with OpenAI's error object."""

    def send_400_response(self, msg: str) -> None:
        """Answers what is no request, and closes the connection."""
        response = refuse(ApiError(f"the request must be HTTP/1.1 with a head of at most {HEAD_BYTES} bytes: {msg}"))
        headers = [*response.raw_headers, (b"connection", b"close")]
        with contextlib.suppress(h11.LocalProtocolError):  # an answer has begun: nothing can be said any more
            for event in (
                h11.Response(status_code=response.status_code, headers=headers),
                h11.Data(data=bytes(response.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class HttpChecks:
    """Refuses requests by their Host and framing, and finds their path, whether a proxy has cut it or not (middleware).

    A server without keys answers whoever reaches it, and so would a page elsewhere whose name leads a browser to this
    machine (DNS rebinding). The Host, which no page can choose, tells it from the server's own.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig):
        self._app, self._root = app, config.root_path
        named = {name.lower() for name in (*config.allowed_hosts, config.host, "localhost")}
        self._hosts = None if config.has_keys or "*" in named else named

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            if (error := self._host_error(headers.get("host"))) is not None:
                return await refuse(error)(scope, receive, send)
            if "transfer-encoding" in headers and "content-length" in headers:
                told = "Transfer-Encoding must be left out beside Content-Length: what follows can be read in two ways"
                response = refuse(ApiError(told))
                response.headers["Connection"] = "close"
                return await response(scope, receive, send)
            if self._root:
                path = scope["path"]
                if path == self._root:  # what the page asks for lies beside the slash
                    return await RedirectResponse(f"{self._root}/")(scope, receive, send)
                path = path if path.startswith(f"{self._root}/") else self._root + path
                scope = {**scope, "path": path, "root_path": self._root}
        return await self._app(scope, receive, send)

    def _host_error(self, host: str | None) -> ApiError | None:
        if self._hosts is None or host is None:  # as of HTTP/1.0: browsers always name one
            return None
        try:
            name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
        except ValueError:
            name = ""
        if name in self._hosts or _is_address(name):
            return None
        told = f"Host must be an address, localhost or one of allowed_hosts on a server without keys, got {host!r:.100}"
        return ApiError(told, status=403)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


_UNREAD_SOON = 0.05  # seconds that an answer waits for the rest of a body, after which the connection may stay open
_UNREAD_SECONDS = 10.0  # for reading the rest of a body after its answer
_UNREAD_BYTES = 2**28  # read of such a rest at most, or the limit of bodies if that is larger


class DropUnread:
    """Drops what is left of a body that has its answer, within bounds, and closes the connection then (middleware).

    A connection that is closed with bytes unread is reset, and the answer may be lost with it; one that stays open is
    read by the HTTP server to the end of the body, which may never come.

    Args:
      ended: set once the server waits for no client any more.
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
                    while not is_read and dropped < max(_UNREAD_BYTES, self._most):
                        dropped += len((await read()).get("body", b""))

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start" and not is_read:
                if "expect" not in Headers(scope=scope):  # who asks before it sends would be told to
                    await drop(_UNREAD_SOON)
                if not is_read:
                    message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            elif not message.get("more_body") and not is_read:
                await send({**message, "more_body": True})
                await until_gone(self._end, drop(_UNREAD_SECONDS))
                message = {"type": "http.response.body"}
            await send(message)

        return await self._app(scope, read, answer)

    async def _end(self) -> Message:
        await self._ended.wait()
        return {"type": "http.disconnect"}


_log = logging.getLogger(__name__)

_PLACE = re.compile(r"(messages\[\d+\])(?: (?:((?:content|tool_calls)\[\d+\])|(\w+) must))?")


def as_api_error(error: BaseException, field: str = "prompt", form: str = "structured_outputs") -> ApiError:
    """What a client is told of an error. Of those that are no fault of its own the log says more.

    Args:
      field: of the body that holds what the engine calls the prompt.
      form: the one that says what the answer must be.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(str(error), status=503, retry_after=1)
    if isinstance(error, ValueError) and not isinstance(error, NotFiniteError):
        message = _told(str(error), field, form)
        code = "context_length_exceeded" if "max_model_len" in message else None
        return ApiError(message, _param(message, field, form), code=code)
    _log.error("a request failed", exc_info=error)
    return ApiError("the server failed; its log says more", status=500)


def _told(message: str, field: str, form: str) -> str:
    """An error of the engine with the names of fields at its beginning."""
    for pattern, own in (
        # What is not about the prompt, though it came up with it.
        (r"prompt: (?=sampling_params |structured_outputs|reuse |compress |max_tokens )", ""),
        (r"sampling_params (?=must leave a token)", "allowed_token_ids, bad_words and logit_bias "),
        (r"sampling_params ", ""),
        (r"structured_outputs(\.\w+)?", r"\g<0>" if form == "structured_outputs" else form),
        # Fields, and parts of one.
        (r"prompt (?=messages\[|mm_processor_kwargs|tools )", ""),
        (r"prompt prompt_token_ids(?= )", field),
        (r"(uuid of )?prompt (?=(images|videos)\[)", rf"{field}: \1"),
        (r"prompt(?=:? )", field),
    ):
        message = re.sub(f"^{pattern}", own, message)
    return message


def _param(message: str, field: str, form: str) -> str | None:
    if found := _PLACE.match(message):
        return ".".join(part for part in found.groups() if part is not None)
    if message.startswith(form):
        return form
    name = re.split(r"\W", message, maxsplit=1)[0]
    return name if name == field or name in CHAT or name in TEXT else None


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
