"""Responses that others may go on from."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlcache_jax.protocol.values import write
from vlcache_jax.server.tenants import Tenant

_MOST = 10_000
_MOST_BYTES = 256 * 2**20  # as JSON; pictures stand in it as they came


@dataclass(frozen=True)
class StoredResponse:
    """What is kept of a response.

    Attributes:
      response: as the client had it.
      messages: of the conversation so far, its own included.
      size: bytes as JSON.
    """

    response: Mapping[str, Any]
    messages: Sequence[Mapping[str, Any]]
    size: int


class StoredResponses:
    """Keeps responses, each for its tenant; the least recently used leave. Every method may be called from any thread.

    Args:
      most, most_bytes: of all together.
    """

    def __init__(self, most: int = _MOST, most_bytes: int = _MOST_BYTES):
        self._most, self._most_bytes, self._bytes = most, most_bytes, 0
        self._found: OrderedDict[tuple[str | None, str], StoredResponse] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, response: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], tenant: Tenant | None) -> None:
        """Keeps one; what is larger than all may be is not."""
        size = len(write(response)) + len(write(messages))
        if size > self._most_bytes:
            return
        with self._lock:
            self._found[_key(response["id"], tenant)] = StoredResponse(response, messages, size)
            self._bytes += size
            while self._bytes > self._most_bytes or len(self._found) > self._most:
                _, gone = self._found.popitem(last=False)
                self._bytes -= gone.size

    def get(self, name: str, tenant: Tenant | None) -> StoredResponse | None:
        """One by its id; None: its tenant has none such."""
        with self._lock:
            found = self._found.get(key := _key(name, tenant))
            if found is not None:
                self._found.move_to_end(key)
            return found

    def delete(self, name: str, tenant: Tenant | None) -> StoredResponse | None:
        """Forgets one; None: its tenant has none such."""
        with self._lock:
            gone = self._found.pop(_key(name, tenant), None)
            self._bytes -= 0 if gone is None else gone.size
            return gone


def _key(name: str, tenant: Tenant | None) -> tuple[str | None, str]:
    return None if tenant is None else tenant.name, name
