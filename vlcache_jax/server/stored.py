"""Responses that others may go on from."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlcache_jax.protocol.values import write
from vlcache_jax.server.tenants import Tenant

_MOST = 10_000
_MOST_BYTES = 256 * 2**20  # as JSON; pictures stand in it as they came, each once


@dataclass(frozen=True)
class StoredResponse:
    """What is kept of a response.

    Attributes:
      response: as the client had it.
      messages: of the conversation so far, its own included.
      parts: of their contents, which other responses may hold, too.
      size: bytes as JSON of all but these.
    """

    response: Mapping[str, Any]
    messages: Sequence[Mapping[str, Any]]
    parts: Sequence[_Part]
    size: int


@dataclass
class _Part:
    """A part of a message's content: a text or a picture.

    Attributes:
      key: its tenant and a digest.
      content: the part.
      size: bytes as JSON.
      uses: how often it stands in what is kept.
    """

    key: tuple[str | None, bytes]
    content: Any
    size: int
    uses: int = 0

    @classmethod
    def of(cls, content: Any, tenant: Tenant | None) -> _Part:
        text = write(content)
        return cls((_name(tenant), hashlib.sha256(text).digest()), content, len(text))


class StoredResponses:
    """Keeps responses, each for its tenant; the least recently used leave. Every method may be called from any thread.

    A picture is kept once for all responses of a tenant in whose conversations it stands.

    Args:
      most, most_bytes: of all together.
    """

    def __init__(self, most: int = _MOST, most_bytes: int = _MOST_BYTES):
        self._most, self._most_bytes, self._bytes = most, most_bytes, 0
        self._found: OrderedDict[tuple[str | None, str], StoredResponse] = OrderedDict()
        self._parts: dict[tuple[str | None, bytes], _Part] = {}
        self._lock = threading.Lock()

    def put(self, response: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], tenant: Tenant | None) -> None:
        """Keeps one; what is larger than all may be is not."""
        size, found = len(write(response)), []
        for message in messages:
            content = message.get("content")
            parts = [_Part.of(one, tenant) for one in content] if isinstance(content, list) else []
            size += len(write({**message, "content": None} if parts else message))
            found.append((message, parts))
        if size + sum({part.key: part.size for _, parts in found for part in parts}.values()) > self._most_bytes:
            return
        with self._lock:
            shared = [(message, list(map(self._share, parts))) for message, parts in found]
            self._found[_name(tenant), response["id"]] = StoredResponse(
                response,
                [{**one, "content": [part.content for part in parts]} if parts else one for one, parts in shared],
                [part for _, parts in shared for part in parts],
                size,
            )
            self._bytes += size
            while self._bytes > self._most_bytes or len(self._found) > self._most:
                self._let_go(self._found.popitem(last=False)[1])

    def get(self, name: str, tenant: Tenant | None) -> StoredResponse | None:
        """One by its id; None: its tenant has none such."""
        with self._lock:
            found = self._found.get(key := (_name(tenant), name))
            if found is not None:
                self._found.move_to_end(key)
            return found

    def delete(self, name: str, tenant: Tenant | None) -> StoredResponse | None:
        """Forgets one; None: its tenant has none such."""
        with self._lock:
            gone = self._found.pop((_name(tenant), name), None)
            if gone is not None:
                self._let_go(gone)
            return gone

    def _share(self, part: _Part) -> _Part:
        """The part that is kept for all that are the same."""
        kept = self._parts.setdefault(part.key, part)
        self._bytes += 0 if kept.uses else kept.size
        kept.uses += 1
        return kept

    def _let_go(self, gone: StoredResponse) -> None:
        self._bytes -= gone.size
        for part in gone.parts:
            part.uses -= 1
            if not part.uses:
                self._bytes -= part.size
                del self._parts[part.key]


def _name(tenant: Tenant | None) -> str | None:
    return None if tenant is None else tenant.name
