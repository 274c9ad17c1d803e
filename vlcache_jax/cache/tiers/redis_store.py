"""Remote tier on a Redis or Valkey server.

The records of an image are fields of one hash. Their data are chunks under separate keys, which each write chooses
itself. Chunks expire after an hour unless a script on the server publishes the record: it adds the field and makes the
chunks persistent, atomically.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import struct
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from vlcache_jax.cache.keys import FORMAT_VERSION
from vlcache_jax.cache.record import (
    Buffers,
    DamagedError,
    EntryGoneError,
    Found,
    Line,
    Meta,
    Outcome,
    Part,
    Place,
    Tier,
    TierError,
    blocks,
)
from vlcache_jax.cache.tiers.record_file import file_bytes, make_header, read_header
from vlcache_jax.common.checks import shorten

_CHUNK = 2**23  # bytes
_MAX_BYTES = 2**36  # maximum size of a record; a larger claim means damage
_PATIENCE = 3600  # seconds until the server deletes chunks of a dead writer
_ABOUT = struct.Struct(">16sQ")  # before a header: id of the write, and milliseconds since the epoch
_NAMESPACE = 16  # digits
_PAGE = 1000  # keys that the server scans at a time

# Keys of both scripts are the hash and the chunks; arguments are the field and the id of the write. A script that fails
# changes nothing: HSET comes first, and a server without memory rejects it.
_PUBLISH = """
local there = redis.call('HGET', KEYS[1], ARGV[1])
if there then
  if string.sub(there, 1, 16) == ARGV[2] then return 1 end
  for i = 2, #KEYS do redis.call('UNLINK', KEYS[i]) end
  return 0
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
for i = 2, #KEYS do
  if redis.call('PERSIST', KEYS[i]) == 0 then
    redis.call('HDEL', KEYS[1], ARGV[1])
    for j = 2, #KEYS do redis.call('UNLINK', KEYS[j]) end
    return -1
  end
end
return 1
"""
_REMOVE = """
local there = redis.call('HGET', KEYS[1], ARGV[1])
if there and string.sub(there, 1, 16) == ARGV[2] then redis.call('HDEL', KEYS[1], ARGV[1]) end
for i = 2, #KEYS do redis.call('UNLINK', KEYS[i]) end
"""


class _RedisEntry(NamedTuple):
    """Content of a field: id of the write, time in seconds since the epoch, and description."""

    write: bytes
    written: float
    meta: Meta


class RedisTier(Tier):
    """Records on a server that any number of machines use. The server's `maxmemory` limits their size.

    Args:
      url: redis://, or rediss:// with TLS, with user, password and database in the format of redis-py.
      timeout: time limit for connecting and for each response, in seconds.
      namespace: first 16 digits of the model's fingerprint, or a function that returns them at first use. None: records
        of all models.
      clock: returns seconds since the epoch.

    Raises:
      ValueError: redis-py rejects the URL.
    """

    label = "remote"

    def __init__(
        self,
        url: str,
        *,
        timeout: float,
        namespace: str | Callable[[], str] | None = None,
        clock: Callable[[], float] = time.time,
    ):
        self._clock = clock
        self._given = namespace
        # Reopen a connection once if the server has closed it. Other errors are not retried.
        again = Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,))
        self._client: Any = redis.Redis.from_url(
            url, socket_timeout=timeout, socket_connect_timeout=timeout, retry=again, protocol=2
        )

    def find(self, entry: str) -> list[Found]:
        with _reporting("find", entry):
            found = [Found(one.meta, one.written) for key in self._hashes(entry) for one in self._kept(key)]
            return sorted(found, key=lambda one: one.written)

    def read(self, meta: Meta, parts: Iterable[Part], place: Place) -> Iterator[tuple[Part, Buffers]]:
        with _reporting("read", meta.name):
            key = _key(_space(meta), meta.entry)
            value = self._client.hget(key, meta.name)
            if value is None or value[_ABOUT.size :] != make_header(meta):
                raise EntryGoneError(f"{meta.name} no longer exists")
            write = value[:16]
            for part in parts:
                buffers = place(part)
                rows = [rows.reshape(-1).view(np.uint8) for rows in blocks(meta, buffers)]
                if [len(one) for one in rows] != _block_sizes(meta):
                    raise DamagedError(
                        f"{meta.name}: {part} must have {sum(_block_sizes(meta))} bytes, "
                        f"got a buffer of {sum(map(len, rows))}"
                    )
                pipeline = self._client.pipeline(transaction=False)
                for chunk in _chunk_keys(key, write, meta, part):
                    pipeline.get(chunk)
                for piece, data in zip(_pieces(rows), pipeline.execute(), strict=True):
                    if data is None:
                        self._remove(key, meta, write)
                        raise EntryGoneError(f"{meta.name}: the server dropped a part of it (maxmemory reached?)")
                    if len(data) != len(piece):
                        raise DamagedError(
                            f"{meta.name}: {part} must have a chunk of {len(piece)} bytes, got {len(data)}"
                        )
                    piece[:] = np.frombuffer(data, np.uint8)
                yield part, buffers

    def write(self, meta: Meta, parts: Mapping[Part, Buffers]) -> Outcome:
        with _reporting("write", meta.name):
            key, write = _key(_space(meta), meta.entry), uuid.uuid4().bytes
            if self._client.hexists(key, meta.name):
                return "known"
            try:
                for part in meta.parts:
                    pipeline = self._client.pipeline(transaction=False)
                    rows = [rows.reshape(-1).view(np.uint8) for rows in blocks(meta, parts[part])]
                    for chunk, piece in zip(_chunk_keys(key, write, meta, part), _pieces(rows), strict=True):
                        pipeline.set(chunk, piece.data, ex=_PATIENCE)
                    pipeline.execute()
                value = _ABOUT.pack(write, int(self._clock() * 1000)) + make_header(meta)
                keys = _all_keys(key, write, meta)
                outcome = self._client.eval(_PUBLISH, len(keys), *keys, meta.name, write, value)
            except redis.ResponseError:  # the server responds and may be full: free the memory at once
                with contextlib.suppress(redis.RedisError):
                    self._remove(key, meta, write)
                raise
            if outcome < 0:
                raise TierError(f"write {meta.name}: the server dropped a part of it (maxmemory reached?)")
            return "stored" if outcome else "known"

    def delete(self, name: str) -> None:
        with _reporting("delete", name):
            entry = name.split("/")[1]
            for key in self._hashes(entry):
                value = self._client.hget(key, name)
                if value is not None and (kept := self._kept_or_dropped(key, name.encode(), value)) is not None:
                    self._remove(key, kept.meta, kept.write)

    def lines(self) -> list[Line]:
        """Return a listing of all complete records, in the order of writing."""
        with _reporting("list", "records"):
            kept = [one for key in set(self._hashes()) for one in self._kept(key)]
            lines = [Line(one.meta.name, file_bytes(one.meta), one.written) for one in kept]
            return sorted(lines, key=lambda line: line.used)

    def close(self) -> None:
        with _reporting("close", "connection"):
            self._client.close()

    @functools.cached_property
    def _namespace(self) -> str | None:
        return self._given() if callable(self._given) else self._given

    def _hashes(self, entry: str | None = None) -> Iterable[bytes]:
        """Return the keys of one image's hashes, or of all hashes."""
        space = self._namespace
        if entry is not None and space is not None:
            return [_key(space, entry)]
        found = self._client.scan_iter(_key(space or "*", entry or "*"), _PAGE, _type="hash")
        ours = _key(space or "[^:]*", entry or "[0-9a-f]{64}")
        return [key for key in found if re.fullmatch(ours, key)]

    def _kept(self, key: bytes) -> Iterator[_RedisEntry]:
        """Yield the intact fields of a hash."""
        for field, value in self._client.hgetall(key).items():
            if (kept := self._kept_or_dropped(key, field, value)) is not None:
                yield kept

    def _kept_or_dropped(self, key: bytes, field: bytes, value: bytes) -> _RedisEntry | None:
        """Return the content of a field; None: it is damaged, and is deleted with its chunks."""
        try:
            if len(value) < _ABOUT.size:
                raise DamagedError(f"its value must have at least {_ABOUT.size} bytes, got {len(value)}")
            write, milliseconds = _ABOUT.unpack_from(value)
            meta = read_header(value[_ABOUT.size :])
            if meta.name.encode() != field or _key(_space(meta), meta.entry) != key:
                raise DamagedError("its header belongs to another cache entry")
            if file_bytes(meta) > _MAX_BYTES:  # before the list of its keys is made
                raise DamagedError(f"its header must declare at most {_MAX_BYTES} bytes, got {file_bytes(meta)}")
            return _RedisEntry(write, milliseconds / 1000, meta)
        except DamagedError as error:
            self.report(DamagedError(f"{field!r:.200} of {key!r} is damaged and deleted: {error}"))
            chunks = self._client.scan_iter(key + b":" + value[:16].hex().encode() + b":*", _PAGE)
            self._client.eval(_REMOVE, 1, key, field, value[:16])
            for some in itertools.batched(chunks, _PAGE):
                self._client.unlink(*some)
            return None

    def _remove(self, key: bytes, meta: Meta, write: bytes) -> None:
        """Delete the field and the chunks of one write."""
        keys = _all_keys(key, write, meta)
        self._client.eval(_REMOVE, len(keys), *keys, meta.name, write)


def _space(meta: Meta) -> str:
    return meta.model[:_NAMESPACE]


def _key(space: str, entry: str) -> bytes:
    """Return the key of the hash of an image's records."""
    return f"vlcache-{FORMAT_VERSION}:{space}:{entry}".encode()


def _all_keys(key: bytes, write: bytes, meta: Meta) -> list[bytes]:
    """Return the keys of a hash and of all chunks of a record in it."""
    return [key, *(chunk for part in meta.parts for chunk in _chunk_keys(key, write, meta, part))]


def _chunk_keys(key: bytes, write: bytes, meta: Meta, part: Part) -> list[bytes]:
    """Return the keys of a part's chunks, in the order of `_pieces`."""
    count = sum(-(-size // _CHUNK) for size in _block_sizes(meta))
    beginning = b"%b:%b:%d:" % (key, write.hex().encode(), meta.parts.index(part))
    return [beginning + b"%d" % number for number in range(count)]


def _block_sizes(meta: Meta) -> list[int]:
    """Return the size of each block of a part in bytes, without padding."""
    if meta.context is None:
        return [meta.part_bytes]
    rest = [size for size in meta.state_bytes if size]
    kv = [meta.tokens * size for size in meta.buffers] if meta.buffers else [(meta.part_bytes - sum(rest)) // 2]
    return kv * 2 + rest


def _pieces(rows: list[npt.NDArray[np.uint8]]) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield a part's blocks, cut into chunks."""
    for one in rows:
        for first in range(0, len(one), _CHUNK):
            yield one[first : first + _CHUNK]


@contextlib.contextmanager
def _reporting(operation: str, name: str) -> Iterator[None]:
    """Convert every error to TierError."""
    try:
        yield
    except TierError:
        raise
    except Exception as error:
        raise TierError(f"{operation} {name}: {type(error).__name__}: {shorten(str(error))}") from error
