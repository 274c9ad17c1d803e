"""A client of OpenAI's servers that notes when each piece of an answer comes. Nothing but sockets lies between."""

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
    """What came of a request; times are seconds of `time.perf_counter`.

    Attributes:
      kind: of the request.
      due: when it was to be sent; all waits count from here.
      pieces: when text came.
      ended: when the answer had ended.
      text: of it, thoughts included.
      usage: as the server counts.
      status: of HTTP; 0: there was none.
      error: what was wrong; None: it is a whole answer.
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
        """The server had no room, and said so."""
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
        """Notes a piece of the stream. Returns whether it is the one that ends the answer.

        Raises:
          ValueError: the server tells of an error.
        """
        if "error" in event:
            raise ValueError(f"the stream tells of an error: {event['error']}")
        self.usage = event.get("usage") or self.usage
        has_ended = False
        for choice in event.get("choices", ()):
            delta = choice.get("delta") or {}
            told = [delta.get(name) or "" for name in ("content", "reasoning", "reasoning_content")]
            if text := told[0] or told[1] or told[2]:
                self.text += text
                self.pieces.append(time.perf_counter())
            has_ended |= choice.get("finish_reason") is not None
        return has_ended


class Client:
    """Asks a server.

    Args:
      base_url: such as http://127.0.0.1:8000 or .../v1.
      api_key: sent as a bearer token; None: none.
      timeout: seconds of a request.

    Raises:
      ValueError: the URL is none.
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
        """The first model of the server.

        Raises:
          ValueError: it names none.
          OSError: it cannot be reached.
        """
        async with asyncio.timeout(self._timeout), self._sent("GET", "/models", b"") as (status, body):
            told = b"".join([piece async for piece in body])
        try:
            return str(json.loads(told)["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"the server must name a model, answered {status}: {told[:200]!r}") from error

    async def ask(self, kind: str, body: bytes, due: float) -> ReceivedAnswer:
        """Streams an answer to a chat. What goes wrong stands in it."""
        answer = ReceivedAnswer(kind, due)
        try:
            async with asyncio.timeout(self._timeout), self._sent("POST", "/chat/completions", body) as (status, told):
                answer.status = status
                if status != 200:
                    raise ValueError(f"status {status}: {b''.join([piece async for piece in told])[:200]!r}")
                await self._read(answer, told)
        except (OSError, EOFError, ValueError) as error:  # TimeoutError is an OSError
            answer.error = f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)
        answer.ended = time.perf_counter()
        return answer

    async def _read(self, answer: ReceivedAnswer, told: AsyncIterator[bytes]) -> None:
        """Takes a stream of events; an answer without text, without an end or without usage is wrong."""
        has_ended, held = False, b""
        async for piece in told:
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
        """Sends a request; gives the status and what comes of the body."""
        secure = ssl.create_default_context() if self._secure else None
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=secure, limit=1 << 20)
        try:
            head = {"Host": self._named, "Content-Type": "application/json", "Connection": "close", **self._key}
            head["Content-Length"] = str(len(body))
            lines = [f"{verb} {self._path}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items())]
            writer.write("\r\n".join([*lines, "", ""]).encode() + body)
            with contextlib.suppress(ConnectionError):  # who refuses may not read it all
                await writer.drain()
            status, headers = await _head(reader)
            yield status, _body(reader, headers)
        finally:
            writer.close()


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    version, status, *_ = [*first.split(" "), "", ""]
    if not version.startswith("HTTP/1") or not status.isdecimal():
        raise ValueError(f"the server must speak HTTP/1, answered {first[:100]!r}")
    pairs = (line.partition(":") for line in lines if line)
    return int(status), {name.lower(): value.strip() for name, _, value in pairs}


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """Pieces of a body as they come."""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readline()).partition(b";")[0], 16):
            yield await reader.readexactly(size)
            await reader.readline()
        return
    left = int(headers["content-length"]) if "content-length" in headers else None
    while left != 0 and (piece := await reader.read(1 << 16)):
        left = None if left is None else left - len(piece)
        yield piece
