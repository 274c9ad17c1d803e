"""Stored responses, which later requests continue by `previous_response_id`."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlcache_jax.inputs.images import trimmed
from vlcache_jax.protocol.schema import write
from vlcache_jax.server.tenants import Tenant

_MAX_COUNT = 10_000
_MAX_BYTES = 256 * 2**20  # as JSON; images are stored as they were sent, each one once per tenant


@dataclass(frozen=True)
class StoredResponse:
    """Stored response with its conversation.

    Attributes:
      response: the body of the answer.
      messages: messages of the conversation, including this response.
      parts: parts of the messages' contents, which other responses may share.
      size: bytes as JSON without the parts.
    """

    response: Mapping[str, Any]
    messages: Sequence[Mapping[str, Any]]
    parts: Sequence[_Part]
    size: int


@dataclass
class _Part:
    """Part of a message's content, a text or an image.

    Attributes:
      key: SHA-256 of the part as JSON.
      content: the part.
      size: bytes as JSON.
      uses: number of its occurrences in stored responses.
    """

    key: bytes
    content: Any
    size: int
    uses: int = 0

    @classmethod
    def of(cls, content: Any) -> _Part:
        content = _trimmed(content)
        text = write(content)
        return cls(hashlib.sha256(text).digest(), content, len(text))


class _TenantResponses:
    """Stored responses of one tenant.

    Attributes:
      found: responses by id, least recently used first.
      size: bytes of all responses as JSON, with each part counted once.
    """

    def __init__(self) -> None:
        self.found: OrderedDict[str, StoredResponse] = OrderedDict()
        self.size = 0
        self._parts: dict[bytes, _Part] = {}

    def put(self, name: str, response: StoredResponse) -> None:
        """Add a response. Its parts become the shared instances of equal parts."""
        self.found[name] = response
        self.size += response.size
        for part in response.parts:
            self.size += 0 if part.uses else part.size
            part.uses += 1
            self._parts[part.key] = part

    def shared(self, part: _Part) -> _Part:
        """Return the stored part that equals `part`, or `part` itself."""
        return self._parts.get(part.key, part)

    def pop(self, name: str) -> StoredResponse | None:
        """Remove and return a response; None if the id is unknown."""
        gone = self.found.pop(name, None)
        if gone is not None:
            self.size -= gone.size
            for part in gone.parts:
                part.uses -= 1
                if not part.uses:
                    self.size -= part.size
                    del self._parts[part.key]
        return gone


class StoredResponses:
    """Store of responses by tenant. All methods are thread-safe.

    If a limit is exceeded, the tenant with the highest use loses its least recently used response. Among equal tenants,
    the one that added the last response loses one. A tenant thus evicts no response of a tenant that uses less than an
    equal share. An image in several conversations of a tenant is stored once, without the bytes after its end.

    Args:
      max_responses: maximum number of responses of all tenants.
      max_bytes: maximum bytes as JSON of all tenants.
    """

    def __init__(self, max_responses: int = _MAX_COUNT, max_bytes: int = _MAX_BYTES):
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._tenants: dict[str | None, _TenantResponses] = {}
        self._lock = threading.Lock()

    def put(self, response: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], tenant: Tenant | None) -> None:
        """Store a response and its conversation. One that is larger than `max_bytes` is not stored.

        Args:
          response: the body of the answer, with its `id`.
          messages: messages of the conversation, including this response.
          tenant: the owner; None on a server without tenants.
        """
        size, split = len(write(response)), []
        for message in messages:
            content = message.get("content")
            parts = [_Part.of(one) for one in content] if isinstance(content, list) else []
            size += len(write({**message, "content": None} if parts else message))
            split.append((message, parts))
        if size + sum({part.key: part.size for _, parts in split for part in parts}.values()) > self._max_bytes:
            return
        with self._lock:
            own = self._tenants.setdefault(_name(tenant), _TenantResponses())
            same: dict[bytes, _Part] = {}
            for _, parts in split:
                parts[:] = [same.setdefault(part.key, own.shared(part)) for part in parts]
            kept = [{**one, "content": [part.content for part in parts]} if parts else one for one, parts in split]
            own.put(
                response["id"], StoredResponse(response, kept, [part for _, parts in split for part in parts], size)
            )
            while sum(owner.size for owner in self._tenants.values()) > self._max_bytes:
                self._evict(lambda name: (self._tenants[name].size, name == _name(tenant)))
            while sum(len(owner.found) for owner in self._tenants.values()) > self._max_responses:
                self._evict(lambda name: (len(self._tenants[name].found), name == _name(tenant)))

    def get(self, name: str, tenant: Tenant | None) -> StoredResponse | None:
        """Return a response by its id; None if the tenant has no such response."""
        with self._lock:
            owner = self._tenants.get(_name(tenant))
            if owner is None or name not in owner.found:
                return None
            owner.found.move_to_end(name)
            return owner.found[name]

    def delete(self, name: str, tenant: Tenant | None) -> StoredResponse | None:
        """Remove and return a response; None if the tenant has no such response."""
        with self._lock:
            owner = self._tenants.get(_name(tenant))
            gone = None if owner is None else owner.pop(name)
            self._tidy(_name(tenant))
            return gone

    def counts(self) -> tuple[int, int]:
        """Return the number of stored responses and their bytes as JSON."""
        with self._lock:
            owners = self._tenants.values()
            return sum(len(owner.found) for owner in owners), sum(owner.size for owner in owners)

    def _evict(self, count: Callable[[str | None], tuple[int, bool]]) -> None:
        """Remove the least recently used response of the tenant with the highest `count`."""
        name = max(self._tenants, key=count)
        self._tenants[name].pop(next(iter(self._tenants[name].found)))
        self._tidy(name)

    def _tidy(self, name: str | None) -> None:
        if name in self._tenants and not self._tenants[name].found:
            del self._tenants[name]


def _trimmed(part: Any) -> Any:
    """Return a part without the bytes after the end of the image in a `data:` URL."""
    image = part.get("image_url") if isinstance(part, Mapping) else None
    url = image.get("url") if isinstance(image, Mapping) else image
    if not isinstance(url, str) or (own := trimmed(url)) is url:
        return part
    return {**part, "image_url": {**image, "url": own} if isinstance(image, Mapping) else own}


def _name(tenant: Tenant | None) -> str | None:
    return None if tenant is None else tenant.name
