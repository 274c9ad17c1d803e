"""Remote tier on an object store: S3, Google Cloud, Azure, or a directory that machines share.

An object has the content of a file of the disk tier. It appears atomically, is written once, and never changes. Lookups
list the objects; there is no index.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import pathlib
import urllib.parse
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt
import obstore
from obstore.exceptions import AlreadyExistsError
from obstore.store import LocalStore, from_url

from vlcache_jax.cache.folders import is_older
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
from vlcache_jax.cache.tiers.record_file import (
    LENGTH,
    MAX_HEADER,
    file_bytes,
    file_name,
    make_header,
    name_of,
    read_header,
)
from vlcache_jax.common.files import make_folder

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

FOLDER = f"vlcache-{FORMAT_VERSION}"  # folder within the store; its siblings belong to others
_FIRST = 2**16  # bytes of the first read; most headers are shorter
_HEADERS = 8  # headers that are read concurrently
_PARTS = 4  # parts that are read concurrently
_RECORDS = 16  # maximum number of records of an image in a lookup
_PAGE = 64  # objects per page of a listing


class ObjectTier(Tier):
    """Records in an object store that any number of machines use. The tier has no limit of its size.

    Args:
      url: s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or file:///directory, which is created with
        access for its owner only. Region and credentials come from the environment variables of the cloud's own tools.
      timeout: time limit of each request in seconds.
      store: store to use instead of the URL's; None: open the URL.

    Raises:
      ValueError: the store cannot be opened, or the environment lacks settings of it.
    """

    label = "remote"

    def __init__(self, url: str, *, timeout: float, store: ObjectStore | None = None):
        self._store = _open(url, timeout) if store is None else store
        self._pool = ThreadPoolExecutor(_HEADERS, "vlcache-remote")

    def find(self, entry: str) -> list[Found]:
        with _reporting("find", entry):
            objects = sorted(self._objects(entry), key=lambda one: one["last_modified"])
            rows = [one for one in objects if _name(one) == f"enc/{entry}"]  # at most one, which is always included
            newest = [one for one in objects if one not in rows][len(rows) - _RECORDS :]
            found = [one for _, one in self._side_by_side(self._found, newest + rows, _HEADERS) if one is not None]
            return sorted(found, key=lambda one: one.written)

    def read(self, meta: Meta, parts: Iterable[Part], place: Place) -> Iterator[tuple[Part, Buffers]]:
        path, first, size = _path(meta.name), len(make_header(meta)), meta.part_bytes

        def fetch(part: Part) -> npt.NDArray[np.uint8]:
            start = first + meta.parts.index(part) * size
            return np.frombuffer(obstore.get_range(self._store, path, start=start, length=size), np.uint8)

        with _reporting("read", meta.name):
            try:
                for part, data in self._side_by_side(fetch, parts, _PARTS):
                    if len(data) != size:
                        raise DamagedError(f"{meta.name}: object ends early")
                    buffers = place(part)
                    rows = [rows.reshape(-1).view(np.uint8) for rows in blocks(meta, buffers)]
                    if sum(map(len, rows)) != size:
                        raise DamagedError(
                            f"{meta.name}: {part} must have {size} bytes, got a buffer of {sum(map(len, rows))}"
                        )
                    for block in rows:
                        block[:], data = data[: len(block)], data[len(block) :]
                    yield part, buffers
            except FileNotFoundError as error:
                raise EntryGoneError(f"{meta.name} no longer exists") from error

    def write(self, meta: Meta, parts: Mapping[Part, Buffers]) -> Outcome:
        with _reporting("write", meta.name):
            path = _path(meta.name)
            with contextlib.suppress(FileNotFoundError):
                obstore.head(self._store, path)
                return "known"  # without sending it
            views = (rows.reshape(-1).view(np.uint8) for part in meta.parts for rows in blocks(meta, parts[part]))
            try:
                obstore.put(self._store, path, [make_header(meta), *views], mode="create", use_multipart=False)
            except AlreadyExistsError:
                return "known"
            return "stored"

    def delete(self, name: str) -> None:
        with _reporting("delete", name), contextlib.suppress(FileNotFoundError):
            obstore.delete(self._store, _path(name))

    def lines(self) -> list[Line]:
        """Return a listing of all complete records, in the order of writing."""
        with _reporting("list", FOLDER):
            pages = obstore.list(self._store, FOLDER, chunk_size=_PAGE)
            ours = ((_name(one), one) for page in pages for one in page)
            lines = [Line(name, one["size"], _written(one)) for name, one in ours if name is not None]
            return sorted(lines, key=lambda line: line.used)

    def older(self) -> dict[str, int]:
        with _reporting("list", "older formats"):
            folders = obstore.list_with_delimiter(self._store)["common_prefixes"]
            older = {folder: self._below(folder) for folder in folders if is_older(folder, FOLDER)}
            return {folder: sum(one["size"] for one in objects) for folder, objects in older.items() if objects}

    def remove_older(self, name: str) -> None:
        with _reporting("delete", name):
            if is_older(name, FOLDER):
                obstore.delete(self._store, [one["path"] for one in self._below(name)])

    def _below(self, folder: str) -> list[ObjectMeta]:
        return [one for page in obstore.list(self._store, folder, chunk_size=_PAGE) for one in page]

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _objects(self, entry: str) -> Iterator[ObjectMeta]:
        """Yield the objects of an image. Listings cover a folder and start at an offset; they are ordered except in
        directories.
        """
        folder = f"{FOLDER}/{entry[:2]}"
        for page in obstore.list(self._store, folder, offset=f"{folder}/{entry}", chunk_size=_PAGE):
            for one in page:
                if one["path"].startswith(f"{folder}/{entry}."):
                    if _name(one) is not None:
                        yield one
                elif not isinstance(self._store, LocalStore):
                    return

    def _found(self, one: ObjectMeta) -> Found | None:
        """Return the record of an object; None: it no longer exists, or is damaged and deleted."""
        try:
            return Found(self._meta(one), _written(one))
        except FileNotFoundError:
            return None
        except DamagedError as error:
            self.report(DamagedError(f"{error}, and is deleted"))
            with contextlib.suppress(Exception):  # the credentials may not allow it
                obstore.delete(self._store, one["path"])
            return None

    def _meta(self, one: ObjectMeta) -> Meta:
        path = one["path"]
        if one["size"] < LENGTH.size:
            raise DamagedError(f"{path}: object of {one['size']} bytes is damaged")
        got = obstore.get(self._store, path, options={"range": (0, _FIRST)})
        first, size = bytes(got.bytes()), got.meta["size"]
        length = LENGTH.size + LENGTH.unpack_from(first)[0]
        if length > min(size, LENGTH.size + MAX_HEADER):
            raise DamagedError(f"{path}: object without a header is damaged")
        if length > len(first):
            first += bytes(obstore.get_range(self._store, path, start=len(first), end=length))
        meta = read_header(first[:length])
        if meta.name != _name(one) or size != file_bytes(meta):
            raise DamagedError(f"{path}: object of {size} bytes is damaged")
        return meta

    def _side_by_side(
        self, work: Callable[[_Item], _Result], items: Iterable[_Item], limit: int
    ) -> Iterator[tuple[_Item, _Result]]:
        """Yield items and the results of `work`, in order, with at most `limit` running at a time."""
        waiting: deque[tuple[_Item, Future[_Result]]] = deque()
        try:
            for item in items:
                waiting.append((item, self._pool.submit(work, item)))
                if len(waiting) == limit:
                    done, future = waiting.popleft()
                    yield done, future.result()
            while waiting:
                done, future = waiting.popleft()
                yield done, future.result()
        finally:
            for _, future in waiting:
                future.cancel()


def _open(url: str, timeout: float) -> ObjectStore:
    try:
        if url.startswith("file:"):
            directory = pathlib.Path(urllib.parse.unquote(urllib.parse.urlsplit(url).path))
            make_folder(directory)
            return LocalStore(directory)
        limit = datetime.timedelta(seconds=timeout)
        is_plain = any(os.environ.get(f"{cloud}_ALLOW_HTTP", "").lower() == "true" for cloud in ("AWS", "AZURE"))
        return from_url(
            url,
            client_options={"timeout": limit, "connect_timeout": limit, "allow_http": is_plain},
            retry_config={"max_retries": 0, "retry_timeout": limit},
        )
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ValueError(f"remote must be a reachable store, got {url!r}: {_first_line(error)}") from error


def _path(name: str) -> str:
    return f"{FOLDER}/{file_name(name)}"


def _name(one: ObjectMeta) -> str | None:
    """Return the name of an object's record; None: it is not the object of a record."""
    return name_of(one["path"].removeprefix(f"{FOLDER}/"))


def _written(one: ObjectMeta) -> float:
    return one["last_modified"].timestamp()


@contextlib.contextmanager
def _reporting(operation: str, name: str) -> Iterator[None]:
    """Convert every error to TierError."""
    try:
        yield
    except (TierError, GeneratorExit, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # panics of the library are not subclasses of Exception
        raise TierError(f"{operation} {name}: {type(error).__name__}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    """Return the first line of an error message, without debugging details of the library."""
    return str(error).partition("\n")[0]
