"""Keys of images and prefixes, quotas of salts, and bounded memories. The docstring of the package defines the keys."""

from __future__ import annotations

import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from vlcache_jax.cache.record import Meta, Record, Why
from vlcache_jax.common.checks import check_text

FORMAT_VERSION = 3
"""Version of keys and records. `tests/cache/test_format.py` compares it with their contents.

Change it with every change of a key, of a record's header or of its byte order. Readers are strict: a header with an
additional field is damaged for a reader of the same version, which deletes the record. Also change it if records with
the same header get another meaning, such as keys after rotation.

Additions that readers of the same version ignore or rebuild need no change: another file next to the records, the table
of the disk index, a route or a JSON field of `vlcache cache serve`. Libraries have their own version,
`LIBRARIES_FOLDER`: a new table is ignored, a new column is not.
"""

_TIME = "all behind begins after this time"
"""Digested with each time of a video. Contexts with times alone belong to records with another rule of positions."""


type Salt = str | tuple[str, ...] | None

SHARED: Salt = ("shared",)
"""Salt of images that an operator shares with everyone; it cannot equal a caller's salt, which is a string."""


OWNER_DIGITS = 64
"""Hex digits of an owner key. The first half identifies the payer, whose quota its records count toward."""


class TenantSalt(NamedTuple):
    """Salt of a request of a server's tenant. All requests of a tenant share one quota.

    Attributes:
      tenant: secret that identifies the tenant.
      own: the salt in the request.
    """

    tenant: str
    own: str

    @property
    def of_tenant(self) -> TenantSalt:
        """Salt of data that all requests of the tenant share."""
        return TenantSalt(self.tenant, "")


def content_key(rgb: npt.NDArray[np.uint8], *more: npt.NDArray[np.uint8]) -> str:
    """Return the key of a decoded image: 64 hex digits. C-contiguous arrays are hashed in place.

    Args:
        rgb: pixels, uint8 [H, W, 3].
        more: the other frames of a video chunk, of the same shape.

    Raises:
        ValueError: an array has another dtype or shape.
    """
    height, width, _ = rgb.shape if rgb.ndim == 3 else (0, 0, 0)
    for frame in (rgb, *more):
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape != (height, width, 3):
            raise ValueError(f"rgb must be uint8 [H, W, 3], got {frame.dtype} {frame.shape}")
    return _digest("rgb8", height, width, *(np.ascontiguousarray(one).reshape(-1).data for one in (rgb, *more)))


def alias_key(encoded: bytes | str | tuple[str | int, ...], salt: Salt = None) -> str:
    """Return the key of an encoded file, of a caller's id (a string), or of the frames of a chunk: 64 hex digits."""
    return _digest(encoded, salt)


def entry_key(
    content: str,
    *,
    settings: Mapping[str, Any],
    fingerprint: str,
    codec: str,
    salt: Salt = None,
    format_version: int = FORMAT_VERSION,
) -> str:
    """Return the key of an image's cache entries: 64 hex digits.

    Args:
        content: content key of the image.
        settings: `ImageProcessor.settings`, with the request's pixel limits; or `VideoProcessor.settings`.
        fingerprint: fingerprint of the model's configuration and weights.
        codec: dtype or codec of the stored KV, such as "bfloat16".
        salt: separates callers; None and "" differ.
        format_version: format version of the record.
    """
    return _digest(content, settings, fingerprint, codec, format_version, salt)


def context_keys(parts: Iterable[str | int | npt.NDArray[np.int32]]) -> Iterator[str]:
    """Yield the digest of each image's prefix in a prompt: 64 hex digits each.

    Args:
        parts: parts of the prompt in order: token ids of each text and the entry key of each image. A number before an
            image is its time, if the parts before it do not determine it.
    """
    digest = blake3()
    for part in parts:
        if isinstance(part, str):
            yield digest.hexdigest()
            letter, content = b"s", part.encode()
        elif isinstance(part, np.ndarray):
            letter, content = b"b", part.astype("<i4").tobytes()
        else:
            _write(digest.update, (_TIME, part))
            continue
        digest.update(letter + _length(len(content)) + content)  # as `_write` does


def owner_key(salt: Salt) -> str:
    """Return the digest of a salt that identifies the owner of cache entries: 64 hex digits.

    Raises:
      ValueError: the salt is not a string.
    """
    half = OWNER_DIGITS // 2
    if isinstance(salt, TenantSalt):
        return _digest("tenant", salt.tenant)[:half] + _digest("owner", salt)[:half]
    if salt is not None and salt != SHARED:
        check_text(salt, "cache_salt", "a string or None")
    return _digest("owner", salt)


def group_key(contents: Sequence[str]) -> str:
    """Return the key of a video, from the content keys of its chunks: 64 hex digits."""
    return _digest("group", contents)


def request_key(entries: Sequence[str]) -> str:
    """Return the key of a request's list of images, from their entry keys in order: 64 hex digits."""
    return _digest("request", entries)


_length = struct.Struct(">Q").pack


def _digest(*parts: Any) -> str:
    digest = blake3()
    digest.update(b"l" + _length(len(parts)))
    for part in parts:
        _write(digest.update, part)
    return digest.hexdigest()


def _write(write: Callable[[bytes | memoryview], object], value: Any) -> None:
    """Write an injective encoding of a value: a letter for the type, the length and the content.

    Lists and tuples are equivalent. A mapping's order does not count, and its keys are strings.
    """
    match value:
        case None:
            write(b"n")
        case str():
            write(b"s" + _length(len(encoded := value.encode())) + encoded)
        case bytes() | memoryview():  # without a copy: it may be a full image
            write(b"b" + _length(len(value)))
            write(value)
        case list() | tuple():
            write(b"l" + _length(len(value)))
            for item in value:
                _write(write, item)
        case Mapping():
            write(b"m" + _length(len(value)))
            for key in sorted(value):
                _write_sized(write, b"s", key.encode())
                _write(write, value[key])
        case bool():
            write(b"t" if value else b"f")
        case int():
            _write_sized(write, b"i", b"%d" % value)
        case float():
            _write_sized(write, b"d", struct.pack(">d", value))
        case _:
            raise TypeError(f"part of a key must be a plain value, got {type(value).__name__}")


def _write_sized(write: Callable[[bytes], object], letter: bytes, content: bytes) -> None:
    write(letter + _length(len(content)) + content)


NO_TENANTS = frozenset({owner_key(None), owner_key(SHARED)})
"""Owners whose cache entries `CacheConfig.max_bytes_per_salt` does not limit."""


class Quotas:
    """Maximum bytes of each payer's cache entries, in host memory and on disk, each.

    Args:
      usual: quota of payers without their own; None: no limit.
    """

    def __init__(self, usual: int | None = None):
        self._usual = usual
        self._own: Mapping[str, int | None] = {}

    def set(self, own: Mapping[str, int | None]) -> None:
        """Replace the quotas of individual payers. Existing entries stay until room is needed."""
        self._own = dict(own)

    def of(self, owner: str) -> int | None:
        """Return the quota in bytes of an owner's payer; None: no limit."""
        return None if owner in NO_TENANTS else self._own.get(payer(owner), self._usual)


def payer(owner: str) -> str:
    """Return the payer of an owner's cache entries: the owner itself, or its tenant."""
    return owner[: OWNER_DIGITS // 2]


REMEMBERED = 65536  # images, aliases and reasons of losses; a few hundred bytes each
_MAX_CALLERS, _MAX_CONTEXTS = 1024, 1024  # callers, and contexts of each; a hundred bytes per context
_MAX_REQUESTS = 4096  # lists of images with a hundred bytes per image


class Bounded[V]:
    """Mapping of at most `max_keys` keys; the least recently used are evicted. All methods are thread-safe."""

    def __init__(self, max_keys: int):
        self._max_keys = max_keys
        self._values: OrderedDict[Hashable, V] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable) -> V | None:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: Hashable, value: V) -> bool:
        """Set a value; return whether the key existed."""
        with self._lock:
            known = key in self._values
            self._values[key] = value
            self._values.move_to_end(key)
            while len(self._values) > self._max_keys:
                self._values.popitem(last=False)
            return known

    def pop(self, key: Hashable) -> V | None:
        with self._lock:
            return self._values.pop(key, None)

    def clear(self) -> None:
        with self._lock:
            self._values.clear()


class Losses(Bounded[tuple[Why, str]]):
    """Reason and owner of lost KV, by record name, and by entry key for all contexts together."""

    def note(self, meta: Meta, why: Why) -> None:
        """Remember why a record of KV is lost."""
        for name in (meta.name, meta.entry) if meta.context is not None else ():
            self.put(name, (why, meta.owner))


class RememberedRequests:
    """Image lists of the last requests, by request key, and contexts, by caller. All methods are thread-safe."""

    def __init__(self) -> None:
        self._known = Bounded[tuple[str, tuple[str, ...]]](_MAX_REQUESTS)  # request key -> owner, entry keys
        # By owner and caller, so that one caller's contexts do not displace those of others.
        self._contexts = Bounded[Bounded[bool]](_MAX_CALLERS)

    def remember(self, key: str, entries: Sequence[str], owner: str) -> bool:
        """Store a request's list of images; return whether it was there."""
        return self._known.put(key, (owner, tuple(entries)))

    def forget(self, key: str) -> None:
        self._known.pop(key)

    def find(self, key: str, owner: str) -> tuple[str, ...] | None:
        """Return the entry keys of a request's images; None if the request is unknown or belongs to another owner."""
        found, entries = self._known.get(key) or (None, ())
        return entries if found == owner else None

    def note_contexts(self, owner: str, caller: str | None, contexts: Iterable[str]) -> None:
        """Store the contexts that images of a caller's request have."""
        if (own := self._contexts.get((owner, caller))) is None:
            self._contexts.put((owner, caller), own := Bounded[bool](_MAX_CONTEXTS))
        for context in contexts:
            own.put(context, True)

    def had_context(self, owner: str, caller: str | None, context: str) -> bool:
        """Return whether an image of a caller's request had this context."""
        own = self._contexts.get((owner, caller))
        return own is not None and own.get(context) is not None

    def clear(self) -> None:
        self._known.clear()
        self._contexts.clear()


class _Sighting(NamedTuple):
    """Claimed time of writing in seconds since the epoch, and time of the first sighting by the steady clock."""

    claimed: float
    at: float


class Ages:
    """Ages of images, independent of whether their records are still here.

    A time in the future comes from a clock that is ahead and counts as now. Independent of the clocks, an image is at
    least as old as the time since its first sighting.

    Args:
      ttl: lifetime of cache entries in seconds; None: no limit.
      clock: returns seconds since the epoch.
      steady: returns monotonic seconds.
    """

    def __init__(self, ttl: float | None, clock: Callable[[], float], steady: Callable[[], float] = time.monotonic):
        self._ttl, self._clock, self._steady = ttl, clock, steady
        self._born = Bounded[_Sighting](REMEMBERED)  # oldest record by entry key
        self._ahead = Bounded[_Sighting](REMEMBERED)  # times in the future, by record name and time

    def oldest(self) -> float | None:
        """Return the time before which written records are expired; None: none are."""
        return None if self._ttl is None else self._clock() - self._ttl

    def since(self, name: str, claimed: float) -> float:
        """Return the time when a record was written, given the time that a tier claims."""
        sighting = self._ahead.get(key := f"{name} {claimed!r}")
        if sighting is None:
            if claimed <= self._clock():
                return claimed
            self._ahead.put(key, sighting := _Sighting(claimed, self._steady()))
        return self._written(sighting)

    def date(self, record: Record) -> float:
        """Set and return the time of a filled record: now, or its earlier time if it was loaded from a tier."""
        now = self._clock()
        record.written = now if record.written is None else min(record.written, now)
        return record.written

    def note(self, record: Record) -> None:
        """Note the time of a filled record for the age of its image."""
        at, before = self.date(record), self._born.get(record.meta.entry)
        new = _Sighting(at, self._steady()) if before is None else before._replace(claimed=min(before.claimed, at))
        self._born.put(record.meta.entry, new)

    def end(self, entry: str) -> bool:
        """Return whether an image is expired, and if so forget its age."""
        born, oldest = self._born.get(entry), self.oldest()
        if born is None or oldest is None or self._written(born) >= oldest:
            return False
        self._born.pop(entry)
        return True

    def clear(self) -> None:
        self._born.clear()

    def _written(self, sighting: _Sighting) -> float:
        return min(sighting.claimed, self._clock() - (self._steady() - sighting.at))
