"""Responses that others may go on from."""

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
    """A part of a message's content: a text or an image.

    Attributes:
      key: its digest.
      content: the part.
      size: bytes as JSON.
      uses: how often it stands in what is kept.
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


class _Shelf:
    """The responses of one tenant, the least recently used first.

    Attributes:
      found: by their ids.
      size: bytes of all.
    """

    def __init__(self) -> None:
        self.found: OrderedDict[str, StoredResponse] = OrderedDict()
        self.size = 0
        self._parts: dict[bytes, _Part] = {}

    def put(self, name: str, response: StoredResponse) -> None:
        """Keep one, whose parts stand for all that are the same."""
        self.found[name] = response
        self.size += response.size
        for part in response.parts:
            self.size += 0 if part.uses else part.size
            part.uses += 1
            self._parts[part.key] = part

    def shared(self, part: _Part) -> _Part:
        """The part that is kept in place of one that is the same."""
        return self._parts.get(part.key, part)

    def pop(self, name: str) -> StoredResponse | None:
        """Remove one; None: there is none such."""
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
    """Keeps responses, each for its tenant. Every method may be called from any thread.

    If they are too many or too large, the tenant that has most of them loses its least recently used one. Of equal
    tenants, the one whose response came last loses one. So a tenant removes no response of another that has less than
    an equal share. An image is kept once for all responses of a tenant in whose conversations it stands, without the
    bytes after its end.

    Args:
      most, most_bytes: of all together.
    """

    def __init__(self, most: int = _MOST, most_bytes: int = _MOST_BYTES):
        self._most, self._most_bytes = most, most_bytes
        self._shelves: dict[str | None, _Shelf] = {}
        self._lock = threading.Lock()

    def put(self, response: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], tenant: Tenant | None) -> None:
        """Keep one; what is larger than all may be is not kept."""
        size, split = len(write(response)), []
        for message in messages:
            content = message.get("content")
            parts = [_Part.of(one) for one in content] if isinstance(content, list) else []
            size += len(write({**message, "content": None} if parts else message))
            split.append((message, parts))
        if size + sum({part.key: part.size for _, parts in split for part in parts}.values()) > self._most_bytes:
            return
        with self._lock:
            own = self._shelves.setdefault(_name(tenant), _Shelf())
            same: dict[bytes, _Part] = {}
            for _, parts in split:
                parts[:] = [same.setdefault(part.key, own.shared(part)) for part in parts]
            kept = [{**one, "content": [part.content for part in parts]} if parts else one for one, parts in split]
            own.put(
                response["id"], StoredResponse(response, kept, [part for _, parts in split for part in parts], size)
            )
            while sum(shelf.size for shelf in self._shelves.values()) > self._most_bytes:
                self._evict(lambda name: (self._shelves[name].size, name == _name(tenant)))
            while sum(len(shelf.found) for shelf in self._shelves.values()) > self._most:
                self._evict(lambda name: (len(self._shelves[name].found), name == _name(tenant)))

    def get(self, name: str, tenant: Tenant | None) -> StoredResponse | None:
        """One by its id; None: its tenant has none such."""
        with self._lock:
            shelf = self._shelves.get(_name(tenant))
            if shelf is None or name not in shelf.found:
                return None
            shelf.found.move_to_end(name)
            return shelf.found[name]

    def delete(self, name: str, tenant: Tenant | None) -> StoredResponse | None:
        """Remove one; None: its tenant has none such."""
        with self._lock:
            shelf = self._shelves.get(_name(tenant))
            gone = None if shelf is None else shelf.pop(name)
            self._tidy(_name(tenant))
            return gone

    def counts(self) -> tuple[int, int]:
        """Responses that are kept, and their bytes as JSON."""
        with self._lock:
            shelves = self._shelves.values()
            return sum(len(shelf.found) for shelf in shelves), sum(shelf.size for shelf in shelves)

    def _evict(self, count: Callable[[str | None], tuple[int, bool]]) -> None:
        """Removes the least recently used response of the tenant with the highest count."""
        name = max(self._shelves, key=count)
        self._shelves[name].pop(next(iter(self._shelves[name].found)))
        self._tidy(name)

    def _tidy(self, name: str | None) -> None:
        if name in self._shelves and not self._shelves[name].found:
            del self._shelves[name]


def _trimmed(part: Any) -> Any:
    """A part of a message; an image in a `data:` URL ends where its file does."""
    image = part.get("image_url") if isinstance(part, Mapping) else None
    url = image.get("url") if isinstance(image, Mapping) else image
    if not isinstance(url, str) or (own := trimmed(url)) is url:
        return part
    return {**part, "image_url": {**image, "url": own} if isinstance(image, Mapping) else own}


def _name(tenant: Tenant | None) -> str | None:
    return None if tenant is None else tenant.name
