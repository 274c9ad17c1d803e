"""A client of OpenAI-compatible servers that records when each piece of an answer arrives. It uses sockets directly."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
import urllib.parse
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

REFUSED = (429, 503)


@dataclass
class ReceivedAnswer:
    """Result of a request; times are seconds of `time.perf_counter`.

    Attributes:
      kind: Kind of the request.
      due: Time when it was to be sent; all waits count from here.
      pieces: Times when text arrived.
      ended: Time when the answer ended.
      text: Text of the answer, including reasoning.
      usage: Token counts of the server.
      status: HTTP status; 0: there was none.
      error: Error message; None: the answer is complete.
    """

    kind: str
    due: float
    pieces: list[float] = field(default_factory=list)
    ended: float = 0.0
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    status: int = 0
    error: str | None = None

    @property
    def is_refused(self) -> bool:
        """True if the server refused the request for lack of capacity."""
        return self.status in REFUSED

    @property
    def tokens(self) -> int:
        return int(self.usage.get("completion_tokens", 0))

    @property
    def ttft(self) -> float:
        return self.pieces[0] - self.due

    @property
    def per_token(self) -> float:
        """Seconds of a token after the first."""
        return (self.pieces[-1] - self.pieces[0]) / max(1, self.tokens - 1)

    def take(self, event: dict[str, Any]) -> bool:
        """Record a piece of the stream. Return whether it ends the answer.

        Raises:
          ValueError: The server reports an error.
        """
        if "error" in event:
            raise ValueError(f"the stream reports an error: {event['error']}")
        self.usage = event.get("usage") or self.usage
        has_ended = False
        for choice in event.get("choices", ()):
            delta = choice.get("delta") or {}
            texts = [delta.get(name) or "" for name in ("content", "reasoning", "reasoning_content")]
            if text := texts[0] or texts[1] or texts[2]:
                self.text += text
                self.pieces.append(time.perf_counter())
            has_ended |= choice.get("finish_reason") is not None
        return has_ended


class Client:
    """Client of a server.

    Args:
      base_url: Such as http://127.0.0.1:8000 or .../v1.
      api_key: Sent as a bearer token; None: none.
      timeout: Seconds of a request.

    Raises:
      ValueError: The URL is invalid.
    """

    def __init__(self, base_url: str, api_key: str | None = None, timeout: float = 600.0):
        parts = urllib.parse.urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"base_url must be an address like http://127.0.0.1:8000, got {base_url!r}")
        self._host, self._secure = parts.hostname, parts.scheme == "https"
        self._port = parts.port or (443 if self._secure else 80)
        self._named = parts.netloc.rpartition("@")[2]
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._key = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._timeout = timeout

    async def model(self) -> str:
        """Return the first model of the server.

        Raises:
          ValueError: It names none.
          OSError: It cannot be reached.
        """
        async with asyncio.timeout(self._timeout), self._sent("GET", "/models", b"") as (status, body):
            content = b"".join([piece async for piece in body])
        try:
            return str(json.loads(content)["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"the server must list a model, got {status}: {content[:200]!r}") from error

    async def ask(self, kind: str, body: bytes, due: float) -> ReceivedAnswer:
        """Stream an answer to a chat. Errors are recorded in the answer."""
        answer = ReceivedAnswer(kind, due)
        try:
            async with asyncio.timeout(self._timeout), self._sent("POST", "/chat/completions", body) as (status, data):
                answer.status = status
                if status != 200:
                    raise ValueError(f"status {status}: {b''.join([piece async for piece in data])[:200]!r}")
                await self._read(answer, data)
        except (OSError, EOFError, ValueError) as error:  # TimeoutError is an OSError
            answer.error = f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)
        answer.ended = time.perf_counter()
        return answer

    async def _read(self, answer: ReceivedAnswer, data: AsyncIterator[bytes]) -> None:
        """Read a stream of events; an answer without text, without an end or without usage is an error."""
        has_ended, held = False, b""
        async for piece in data:
            *lines, held = (held + piece).split(b"\n")
            for line in lines:
                name, _, value = line.strip().partition(b":")
                if name != b"data":  # comments keep a connection alive
                    continue
                if value.strip() == b"[DONE]":
                    if not (has_ended and answer.text and answer.tokens):
                        what = "no text" if not answer.text else "no usage" if has_ended else "no finish_reason"
                        raise ValueError(f"the answer has {what}")
                    return
                has_ended |= answer.take(json.loads(value))
        raise ValueError("the stream ended without [DONE]")

    @contextlib.asynccontextmanager
    async def _sent(self, verb: str, path: str, body: bytes) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        """Send a request; yield the status and the pieces of the body."""
        secure = ssl.create_default_context() if self._secure else None
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=secure, limit=1 << 20)
        try:
            head = {"Host": self._named, "Content-Type": "application/json", "Connection": "close", **self._key}
            head["Content-Length"] = str(len(body))
            lines = [f"{verb} {self._path}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items())]
            writer.write("\r\n".join([*lines, "", ""]).encode() + body)
            with contextlib.suppress(ConnectionError):  # a server that refuses may not read all of it
                await writer.drain()
            status, headers = await _head(reader)
            yield status, _body(reader, headers)
        finally:
            writer.close()


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    version, status, *_ = [*first.split(" "), "", ""]
    if not version.startswith("HTTP/1") or not status.isdecimal():
        raise ValueError(f"the server must speak HTTP/1, got {first[:100]!r}")
    pairs = (line.partition(":") for line in lines if line)
    return int(status), {name.lower(): value.strip() for name, _, value in pairs}


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """Yield pieces of a body as they arrive."""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readline()).partition(b";")[0], 16):
            yield await reader.readexactly(size)
            await reader.readline()
        return
    left = int(headers["content-length"]) if "content-length" in headers else None
    while left != 0 and (piece := await reader.read(1 << 16)):
        left = None if left is None else left - len(piece)
        yield piece
