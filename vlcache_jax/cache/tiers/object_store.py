"""The remote tier over an object store: S3, Google Cloud, Azure, or a directory that machines share.

An object holds what the disk tier's file holds. It appears whole or not at all, is written once, and never changes.
What there is, listings tell; nobody keeps an index.
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
    DamagedError,
    EntryGoneError,
    Found,
    Line,
    Meta,
    Outcome,
    Part,
    Place,
    Planes,
    Tier,
    TierError,
    blocks,
)
from vlcache_jax.cache.tiers.record_file import (
    LENGTH,
    MOST_HEADER,
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

FOLDER = f"vlcache-{FORMAT_VERSION}"  # of the store: what lies beside it is not ours
_FIRST = 2**16  # bytes; most headers are shorter
_HEADERS = 8  # that are read side by side
_PARTS = 4  # that are read side by side
_RECORDS = 16  # of an image, whose headers are read at most
_PAGE = 64  # objects that a listing gives at once


class ObjectTier(Tier):
    """Records in an object store that any number of machines use. It has no budget: who owns the store sees to that.

    Args:
      url: s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or file:///directory, which is made for its
        owner alone if it does not exist. Region, credentials and the like come from the environment, as the clouds'
        own tools take them.
      timeout: seconds for each request.
      store: in the place of the URL's.

    Raises:
      ValueError: there is no such store, or the environment does not say enough to use it.
    """

    label = "remote"

    def __init__(self, url: str, *, timeout: float, store: ObjectStore | None = None):
        self._store = _open(url, timeout) if store is None else store
        self._pool = ThreadPoolExecutor(_HEADERS, "vlcache-remote")

    def find(self, entry: str) -> list[Found]:
        with _reporting("find", entry):
            objects = sorted(self._objects(entry), key=lambda one: one["last_modified"])
            rows = [one for one in objects if _name(one) == f"enc/{entry}"]  # there is one at most; it always counts
            newest = [one for one in objects if one not in rows][len(rows) - _RECORDS :]
            found = [one for _, one in self._side_by_side(self._found, newest + rows, _HEADERS) if one is not None]
            return sorted(found, key=lambda one: one.written)

    def read(self, meta: Meta, parts: Iterable[Part], place: Place) -> Iterator[tuple[Part, Planes]]:
        path, first, size = _path(meta.name), len(make_header(meta)), meta.part_bytes

        def fetch(part: Part) -> npt.NDArray[np.uint8]:
            start = first + meta.parts.index(part) * size
            return np.frombuffer(obstore.get_range(self._store, path, start=start, length=size), np.uint8)

        with _reporting("read", meta.name):
            try:
                for part, data in self._side_by_side(fetch, parts, _PARTS):
                    if len(data) != size:
                        raise DamagedError(f"{meta.name}: object ends too early")
                    planes = place(part)
                    rows = [rows.reshape(-1).view(np.uint8) for rows in blocks(meta, planes)]
                    if sum(map(len, rows)) != size:
                        raise DamagedError(f"{meta.name}: {part} must have {size} bytes, got place for another size")
                    for block in rows:
                        block[:], data = data[: len(block)], data[len(block) :]
                    yield part, planes
            except FileNotFoundError as error:
                raise EntryGoneError(f"{meta.name} is not there any more") from error

    def write(self, meta: Meta, parts: Mapping[Part, Planes]) -> Outcome:
        with _reporting("write", meta.name):
            path = _path(meta.name)
            with contextlib.suppress(FileNotFoundError):
                obstore.head(self._store, path)
                return "known"  # before all of it is sent
            buffers = (rows.reshape(-1).view(np.uint8) for part in meta.parts for rows in blocks(meta, parts[part]))
            try:
                obstore.put(self._store, path, [make_header(meta), *buffers], mode="create", use_multipart=False)
            except AlreadyExistsError:
                return "known"
            return "stored"

    def delete(self, name: str) -> None:
        with _reporting("delete", name), contextlib.suppress(FileNotFoundError):
            obstore.delete(self._store, _path(name))

    def lines(self) -> list[Line]:
        """Of all complete records, in the order in which they were written."""
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
        """An image's. Stores list whole folders, but begin where they are told to, and all but directories in order."""
        folder = f"{FOLDER}/{entry[:2]}"
        for page in obstore.list(self._store, folder, offset=f"{folder}/{entry}", chunk_size=_PAGE):
            for one in page:
                if one["path"].startswith(f"{folder}/{entry}."):
                    if _name(one) is not None:
                        yield one
                elif not isinstance(self._store, LocalStore):
                    return

    def _found(self, one: ObjectMeta) -> Found | None:
        """What an object says of itself; None: it has gone, or is damaged, and is deleted."""
        try:
            return Found(self._meta(one), _written(one))
        except FileNotFoundError:
            return None
        except DamagedError as error:
            self.report(DamagedError(f"{error}, and is deleted"))
            with contextlib.suppress(Exception):  # who may not delete may not
                obstore.delete(self._store, one["path"])
            return None

    def _meta(self, one: ObjectMeta) -> Meta:
        path = one["path"]
        if one["size"] < LENGTH.size:
            raise DamagedError(f"{path}: object of {one['size']} bytes is damaged")
        got = obstore.get(self._store, path, options={"range": (0, _FIRST)})
        first, size = bytes(got.bytes()), got.meta["size"]
        length = LENGTH.size + LENGTH.unpack_from(first)[0]
        if length > min(size, LENGTH.size + MOST_HEADER):
            raise DamagedError(f"{path}: object without a header is damaged")
        if length > len(first):
            first += bytes(obstore.get_range(self._store, path, start=len(first), end=length))
        meta = read_header(first[:length])
        if meta.name != _name(one) or size != file_bytes(meta):
            raise DamagedError(f"{path}: object of {size} bytes is damaged")
        return meta

    def _side_by_side(
        self, work: Callable[[_Item], _Result], items: Iterable[_Item], most: int
    ) -> Iterator[tuple[_Item, _Result]]:
        """Items and what work makes of them, in their order; at most so many at a time."""
        waiting: deque[tuple[_Item, Future[_Result]]] = deque()
        try:
            for item in items:
                waiting.append((item, self._pool.submit(work, item)))
                if len(waiting) == most:
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
        raise ValueError(f"remote must be a store that can be used, got {url!r}: {_first_line(error)}") from error


def _path(name: str) -> str:
    return f"{FOLDER}/{file_name(name)}"


def _name(one: ObjectMeta) -> str | None:
    """The record whose object this is; None: it is not ours."""
    return name_of(one["path"].removeprefix(f"{FOLDER}/"))


def _written(one: ObjectMeta) -> float:
    return one["last_modified"].timestamp()


@contextlib.contextmanager
def _reporting(operation: str, name: str) -> Iterator[None]:
    """Whatever goes wrong is a TierError."""
    try:
        yield
    except (TierError, GeneratorExit, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library's panics are no Exceptions
        raise TierError(f"{operation} {name}: {type(error).__name__}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    """What it says, without the library's own view of it."""
    return str(error).partition("\n")[0]
