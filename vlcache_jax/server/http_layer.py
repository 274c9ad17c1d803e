"""HTTP layer of the server: parser, header checks, unread bodies, error responses, JSON answers and ids."""

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
    """Generator of unique ids.

    Args:
      tag: 8 hex digits that identify this server among several; "" for a single server.

    Raises:
      ValueError: the tag has another form.
    """

    def __init__(self, tag: str = ""):
        if tag and not re.fullmatch(rf"[0-9a-f]{{{TAG_DIGITS}}}", tag):
            raise ValueError(f"tag must be {TAG_DIGITS} hex digits, got {tag!r}")
        self._tag = tag

    def new(self, prefix: str, digits: int = 32) -> str:
        """Return a new id: `prefix`, then `digits` hex digits that begin with the tag."""
        return f"{prefix}{self._tag}{uuid.uuid4().hex}"[: len(prefix) + digits]


def tag_in(name: str) -> str | None:
    """Return the tag of the server that made the id of a response or a file, or None if `name` is no such id.

    Ids of a server without a tag have random digits in its place.
    """
    found = _NAMED.fullmatch(name)
    return None if found is None else found[1]


HEAD_BYTES = 1 << 16
"""Maximum bytes of a request's head. h11 enforces it; httptools, which uvicorn prefers if installed, has no limit."""


class HttpProtocol(H11Protocol):
    """HTTP protocol that always uses h11 and reports malformed requests with OpenAI's error object."""

    def send_400_response(self, msg: str) -> None:
        """Send the error response to a malformed request, and close the connection."""
        response = refuse(ApiError(f"the request must be HTTP/1.1 with a head of at most {HEAD_BYTES} bytes: {msg}"))
        headers = [*response.raw_headers, (b"connection", b"close")]
        with contextlib.suppress(h11.LocalProtocolError):  # a response has already begun
            for event in (
                h11.Response(status_code=response.status_code, headers=headers),
                h11.Data(data=bytes(response.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class HttpChecks:
    """Check of the Host header and of the framing, which also sets the path under `root_path` (ASGI middleware).

    A server without keys answers every client that reaches it. With DNS rebinding, a page of another origin could reach
    it through a user's browser. A page cannot choose the Host header, so the check refuses it.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig):
        self._app, self._root = app, config.root_path
        named = {name.lower() for name in (*config.allowed_hosts, config.host, "localhost")}
        self._hosts = None if config.has_keys or "*" in named else named

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            if (error := self._host_error(headers.get("host"))) is not None:
                return await refuse(error, self._path(scope))(scope, receive, send)
            if "transfer-encoding" in headers and "content-length" in headers:
                # The end of such a body is ambiguous (request smuggling).
                message = "Transfer-Encoding and Content-Length are mutually exclusive, got both"
                response = refuse(ApiError(message), self._path(scope))
                response.headers["Connection"] = "close"
                return await response(scope, receive, send)
            if self._root:
                path = scope["path"]
                if path == self._root:  # the page's relative links need the slash
                    return await RedirectResponse(f"{self._root}/")(scope, receive, send)
                path = path if path.startswith(f"{self._root}/") else self._root + path
                scope = {**scope, "path": path, "root_path": self._root}
        return await self._app(scope, receive, send)

    def _path(self, scope: Scope) -> str:
        path: str = scope["path"]
        return path.removeprefix(self._root)

    def _host_error(self, host: str | None) -> ApiError | None:
        if self._hosts is None or host is None:  # HTTP/1.0 needs no Host, but browsers always send it
            return None
        try:
            name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
        except ValueError:
            name = ""
        if name in self._hosts or _is_address(name):
            return None
        hosts = "an IP address, localhost or one of allowed_hosts"
        return ApiError(
            f"Host must be {hosts} on a server without keys, got {host!r:.100}; add it with --allowed-hosts", status=403
        )


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


_UNREAD_SOON = 0.05  # seconds that a response waits for the rest of a body; if it arrives, the connection stays open
_UNREAD_SECONDS = 10.0  # maximum seconds to read the rest of a body after its response
_UNREAD_BYTES = 2**28  # maximum bytes to read of the rest, or `max_body_bytes` if that is larger


class DropUnread:
    """Reader of the rest of a body after its response, within limits; then it closes the connection (ASGI middleware).

    If a connection is closed with unread bytes, it is reset and the response may be lost. If it stays open, the HTTP
    server reads to the end of the body, which may never arrive.

    Args:
      app: the application.
      config: its `max_body_bytes` is used.
      ended: event that aborts the requests in flight.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, ended: asyncio.Event):
        self._app, self._max_bytes, self._ended = app, int(config.max_body_bytes), ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        is_read, dropped = False, 0

        async def read() -> Message:
            nonlocal is_read
            message = await receive()
            is_read = not message.get("more_body")  # also true after a disconnect
            return message

        async def drop(seconds: float) -> None:
            nonlocal dropped
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    while not is_read and dropped < max(_UNREAD_BYTES, self._max_bytes):
                        dropped += len((await read()).get("body", b""))

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start" and not is_read:
                if "expect" not in Headers(scope=scope):  # reading would send "100 Continue" to the client
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
    """Return an error as an `ApiError` in the names of the body's fields. Internal errors are logged and hidden.

    Args:
      error: the error of the engine.
      field: the body's field for the engine's prompt.
      form: the body's field for the engine's `structured_outputs`.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(str(error), status=503, retry_after=1)
    if isinstance(error, ValueError) and not isinstance(error, NotFiniteError):
        message = _with_fields(str(error), field, form)
        code = "context_length_exceeded" if "max_model_len" in message else None
        return ApiError(message, _param(message, field, form), code=code)
    _log.error("a request failed", exc_info=error)
    return ApiError("internal server error; see the server's log", status=500)


def _with_fields(message: str, field: str, form: str) -> str:
    """Return the message of an engine's error with the body's field at its beginning."""
    for pattern, own in (
        # Errors of options, which were found with the prompt.
        (r"prompt: (?=sampling_params |structured_outputs|reuse |donors |compress |max_tokens )", ""),
        (r"sampling_params (?=must leave a token)", "allowed_token_ids, bad_words and logit_bias "),
        (r"sampling_params ", ""),
        (r"structured_outputs(\.\w+)?", r"\g<0>" if form == "structured_outputs" else form),
        (r"prompt must be valid for [^:]*, which raised an error: (?=reasoning_effort )", ""),
        # Fields and their parts.
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
    """Return a JSON response."""
    return Response(write(content), status, media_type="application/json")


MESSAGES_PATH = "/v1/messages"
"""Path of Anthropic's API. Its responses, and those of the paths below it, have Anthropic's form."""


def path_of(scope: Scope) -> str:
    """Return the path of a request without the root path, as the router matches it."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def refuse(error: ApiError, path: str = "") -> Response:
    """Return the response to a refused request, with the headers of its status.

    Args:
      error: the error.
      path: path of the request without the root path. Anthropic's API has its own error object and an id for each
        request; other paths have OpenAI's error object.
    """
    if path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/"):
        request_id = f"req_{uuid.uuid4().hex}"
        response = answer_json(error.to_anthropic(request_id), error.status)
        response.headers["request-id"] = request_id
    else:
        response = answer_json(error.to_dict(), error.status)
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if error.retry_after is not None:
        response.headers["Retry-After"] = str(error.retry_after)
    return response


async def merged[T](
    streams: Sequence[AsyncGenerator[T]], silence: float, ended: asyncio.Event
) -> AsyncGenerator[tuple[int, T] | None]:
    """Merge several streams into one.

    Args:
      streams: the streams; all are closed at the end.
      silence: seconds without an element after which None is yielded.
      ended: event that aborts the streams.

    Yields:
      The number of a stream and its next element; or None after `silence`.

    Raises:
      ApiError: `ended` was set (status 503).
      Exception: the first error of a stream.
    """
    # One element only: a slow client must not make the streams run ahead.
    queue: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(1)

    async def forward(number: int, stream: AsyncGenerator[T]) -> None:
        try:
            async with contextlib.aclosing(stream):
                async for one in stream:
                    await queue.put((number, one))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    async def end() -> None:
        await ended.wait()
        await queue.put(ApiError("the server is shutting down", status=503, retry_after=1))

    tasks = [asyncio.create_task(forward(i, stream)) for i, stream in enumerate(streams)]
    tasks.append(asyncio.create_task(end()))
    left = len(streams)
    try:
        while left:
            try:
                async with asyncio.timeout(silence):
                    found = await queue.get()
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
    """Return the result of `work`, or None if the client disconnects first, which cancels the work.

    Args:
      receive: ASGI's function of a request whose body has been read.
      work: the coroutine to run.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_leaves(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
        del working, leaving  # else an error raised here and this frame would keep each other in memory


async def _leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
