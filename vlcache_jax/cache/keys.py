"""Keys of images and prefixes, quotas of salts, and bounded memories of what was seen.

The head of the package defines the keys.
"""

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
"""Version of keys and records. `tests/cache/test_format.py` ties it to what both hold.

It must change with every change of a key, of a record's header or of the order of its bytes. Readers ignore nothing in
these: a header with one more field is damaged to a reader of the same version, which deletes the record. It must also
change when records of the same header would mean something else, such as K after rotation.

It need not change for additions that a reader of the same version ignores or makes again: another file beside the
records, the table of the disk's index, a route or a JSON field of `vlcache cache serve`. Libraries have a version of
their own, `LIBRARIES_FOLDER`: a new table is ignored, a new column is not.
"""

_TIME = "all behind begins after this time"
"""Stands beside each time of a video. Records whose contexts hold bare times were made by another rule of positions."""


type Salt = str | tuple[str, ...] | None

SHARED: Salt = ("shared",)
"""Salt of what an operator keeps for everyone; no caller's salt, which is a string, is like it."""


OWNER_DIGITS = 64
"""Hex digits of an owner's key. The first half says in whose share its records count."""


class TenantSalt(NamedTuple):
    """Salt of a request of one of a server's tenants, who shares what one payer may keep with its other requests.

    Attributes:
      tenant: stands for the tenant; nobody else may know it.
      own: stands for the salt that the request itself names.
    """

    tenant: str
    own: str

    @property
    def of_tenant(self) -> TenantSalt:
        """Of what is the tenant's whatever the salts of its requests."""
        return TenantSalt(self.tenant, "")


def content_key(rgb: npt.NDArray[np.uint8], *more: npt.NDArray[np.uint8]) -> str:
    """Key of a decoded picture, uint8 [H, W, 3]: 64 hex digits. C-contiguous arrays are hashed in place.

    Args:
        more: the other frames of a video's chunk, of the same shape.
    """
    height, width, _ = rgb.shape if rgb.ndim == 3 else (0, 0, 0)
    for frame in (rgb, *more):
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape != (height, width, 3):
            raise ValueError(f"rgb must be uint8 [H, W, 3], got {frame.dtype} {frame.shape}")
    return _digest("rgb8", height, width, *(np.ascontiguousarray(one).reshape(-1).data for one in (rgb, *more)))


def alias_key(encoded: bytes | str | tuple[str | int, ...], salt: Salt = None) -> str:
    """Key of an encoded file, of a caller's own id (a string), or of the frames of a chunk: 64 hex digits."""
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
    """Key of what is stored for an image: 64 hex digits.

    Args:
        content: the picture's content key.
        settings: `ImageProcessor.settings`, with the request's pixel limits; or `VideoProcessor.settings`.
        fingerprint: of the model's configuration and weights.
        codec: dtype or codec of the stored keys and values, such as "bfloat16".
        salt: keeps callers apart; None and "" differ.
        format_version: of the record.
    """
    return _digest(content, settings, fingerprint, codec, format_version, salt)


def context_keys(parts: Iterable[str | int | npt.NDArray[np.int32]]) -> Iterator[str]:
    """Digests of everything before each image in its prompt: 64 hex digits each.

    Args:
        parts: of the prompt in order, the token ids of each stretch of text and the entry key of each image; before it
            a number, where its place in time does not follow from what is before it.
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
    """Digest that stands for a salt beside what is kept under it: 64 hex digits.

    Raises:
      ValueError: the salt is no text.
    """
    half = OWNER_DIGITS // 2
    if isinstance(salt, TenantSalt):
        return _digest("tenant", salt.tenant)[:half] + _digest("owner", salt)[:half]
    if salt is not None and salt != SHARED:
        check_text(salt, "cache_salt", "a string or None")
    return _digest("owner", salt)


def group_key(contents: Sequence[str]) -> str:
    """Key of a video, by the content keys of its chunks: 64 hex digits."""
    return _digest("group", contents)


def request_key(entries: Sequence[str]) -> str:
    """Key of a request's images together, by their entry keys in order: 64 hex digits."""
    return _digest("request", entries)


_length = struct.Struct(">Q").pack


def _digest(*parts: Any) -> str:
    digest = blake3()
    digest.update(b"l" + _length(len(parts)))
    for part in parts:
        _write(digest.update, part)
    return digest.hexdigest()


def _write(write: Callable[[bytes | memoryview], object], value: Any) -> None:
    """Writes an encoding that tells any two values apart: a letter for the type, a length, the content.

    Lists and tuples are the same; a mapping's order does not count, and its keys are strings.
    """
    match value:
        case None:
            write(b"n")
        case str():
            write(b"s" + _length(len(encoded := value.encode())) + encoded)
        case bytes() | memoryview():  # in place: it may be a whole picture
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
            raise TypeError(f"a key's part must be a plain value, got {type(value).__name__}")


def _write_sized(write: Callable[[bytes], object], letter: bytes, content: bytes) -> None:
    write(letter + _length(len(content)) + content)


NO_TENANTS = frozenset({owner_key(None), owner_key(SHARED)})
"""Owners whose records `CacheConfig.salt_bytes` does not limit."""


class Quotas:
    """Bytes that the records of each payer take at most, in host memory and on the disk each.

    Args:
      usual: of who has no share of its own; None: no limit.
    """

    def __init__(self, usual: int | None = None):
        self._usual = usual
        self._own: Mapping[str, int | None] = {}

    def set(self, own: Mapping[str, int | None]) -> None:
        """Gives some payers their own shares, and takes from all others what they had. What is kept stays until room is
        made."""
        self._own = dict(own)

    def of(self, owner: str) -> int | None:
        """Bytes that the payer of an owner's records has; None: no limit."""
        return None if owner in NO_TENANTS else self._own.get(payer(owner), self._usual)


def payer(owner: str) -> str:
    """In whose share an owner's records count: itself, or its tenant."""
    return owner[: OWNER_DIGITS // 2]


REMEMBERED = 65536  # images, aliases, reasons for losses; a few hundred bytes apiece
_MOST_REQUESTS = 4096  # each a list of images, of a hundred bytes apiece


class Bounded[V]:
    """A mapping of at most `most` keys; the least recently used leave. Every method may be called from any thread."""

    def __init__(self, most: int):
        self._most = most
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
        """Whether the key was there before."""
        with self._lock:
            known = key in self._values
            self._values[key] = value
            self._values.move_to_end(key)
            while len(self._values) > self._most:
                self._values.popitem(last=False)
            return known

    def pop(self, key: Hashable) -> V | None:
        with self._lock:
            return self._values.pop(key, None)

    def clear(self) -> None:
        with self._lock:
            self._values.clear()


class Losses(Bounded[tuple[Why, str]]):
    """Why there are no K, V, and whose they were: by a record's name, and by an entry key for all contexts together."""

    def note(self, meta: Meta, why: Why) -> None:
        """Remembers why a record of K, V is gone."""
        for name in (meta.name, meta.entry) if meta.context is not None else ():
            self.put(name, (why, meta.owner))


class RememberedRequests:
    """Remembers the images of the last requests, by their request keys. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._known = Bounded[tuple[str, tuple[str, ...]]](_MOST_REQUESTS)  # request key -> owner, entry keys

    def remember(self, key: str, entries: Sequence[str], owner: str) -> bool:
        """Notes a request's list of images; whether the same list was there before."""
        return self._known.put(key, (owner, tuple(entries)))

    def forget(self, key: str) -> None:
        self._known.pop(key)

    def find(self, key: str, owner: str) -> tuple[str, ...] | None:
        """The entry keys of a request's images, by its request key; None if it is not this owner's."""
        found, entries = self._known.get(key) or (None, ())
        return entries if found == owner else None

    def clear(self) -> None:
        self._known.clear()


class _Met(NamedTuple):
    """When something was written, in seconds since the epoch, and when it was met first, by the steady clock."""

    said: float
    at: float


class Ages:
    """Knows since when images are kept, whether or not their records are still here.

    A time that is still to come was told by a clock that was ahead: it counts as now. Whatever clocks say, what was met
    is as old as the time since then.

    Args:
      ttl: seconds after which what is kept of an image is not used any more; None: it always is.
      clock: seconds since the epoch.
      steady: seconds that only grow.
    """

    def __init__(self, ttl: float | None, clock: Callable[[], float], steady: Callable[[], float] = time.monotonic):
        self._ttl, self._clock, self._steady = ttl, clock, steady
        self._born = Bounded[_Met](REMEMBERED)  # by entry key; of the oldest of its records
        self._ahead = Bounded[_Met](REMEMBERED)  # by a record's name and its time, if that was still to come

    def oldest(self) -> float | None:
        """What was written before is not used any more; None: all is."""
        return None if self._ttl is None else self._clock() - self._ttl

    def since(self, name: str, said: float) -> float:
        """When a record was written, by what a tier says of it."""
        met = self._ahead.get(told := f"{name} {said!r}")
        if met is None:
            if said <= self._clock():
                return said
            self._ahead.put(told, met := _Met(said, self._steady()))
        return self._written(met)

    def date(self, record: Record) -> float:
        """A record has been filled: just now, unless it came from a tier that says when."""
        now = self._clock()
        record.written = now if record.written is None else min(record.written, now)
        return record.written

    def note(self, record: Record) -> None:
        """A record that has been filled is kept."""
        said, before = self.date(record), self._born.get(record.meta.entry)
        new = _Met(said, self._steady()) if before is None else before._replace(said=min(before.said, said))
        self._born.put(record.meta.entry, new)

    def end(self, entry: str) -> bool:
        """Whether an image has become too old; it begins anew then."""
        born, oldest = self._born.get(entry), self.oldest()
        if born is None or oldest is None or self._written(born) >= oldest:
            return False
        self._born.pop(entry)
        return True

    def clear(self) -> None:
        self._born.clear()

    def _written(self, met: _Met) -> float:
        return min(met.said, self._clock() - (self._steady() - met.at))
