"""The keys of images and of what stands before them. What they mean stands at the head of the package."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from vlcache_jax.checks import check_text

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
        value: Any = part
        if isinstance(part, np.ndarray):
            value = part.astype("<i4").tobytes()
        elif isinstance(part, int):
            value = _TIME, part
        _write(digest.update, value)


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


def _digest(*parts: Any) -> str:
    digest = blake3()
    _write(digest.update, parts)
    return digest.hexdigest()


def _write(write: Callable[[bytes | memoryview], object], value: Any) -> None:
    """Writes an encoding that tells any two values apart: a letter for the type, a length, the content.

    Lists and tuples are the same; a mapping's order does not count, and its keys are strings.
    """
    match value:
        case str():
            _write_sized(write, b"s", value.encode())
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
        case None:
            write(b"n")
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


def _length(count: int) -> bytes:
    return struct.pack(">Q", count)


NO_TENANTS = frozenset({owner_key(None), owner_key(SHARED)})
"""Owners whose records `CacheConfig.salt_bytes` does not limit."""
