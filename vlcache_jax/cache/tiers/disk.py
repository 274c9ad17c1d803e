"""Disk tier: a directory of record files with an index.

A file appears under its name when it is complete and synced, and never changes. Several processes may use one
directory. Visible changes happen within a transaction of the index, so that index and files agree.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import pathlib
import re
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import BinaryIO, cast

import numpy as np

from vlcache_jax.cache.folders import LIBRARIES_FOLDER, LOCK_TIMEOUT, held, log_older, older_bytes, remove_folder
from vlcache_jax.cache.keys import FORMAT_VERSION, Quotas, payer
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
from vlcache_jax.cache.tiers.disk_index import Index, advice, is_damage
from vlcache_jax.cache.tiers.record_file import (
    SUFFIX,
    file_bytes,
    file_name,
    make_header,
    name_of,
    read_header,
    take_header,
)  # fmt: skip
from vlcache_jax.common.files import make_folder

_log = logging.getLogger(__name__)

FOLDER = f"vlcache-{FORMAT_VERSION}"  # folder within the directory; its siblings belong to others
_PART = ".part"
_WRITER = ".writer"  # files that live writers keep locked
_BEING_WRITTEN = re.compile(rf"[0-9a-f.]+{SUFFIX}\.(?P<writer>[0-9a-f]{{32}})\.\d+{_PART}")


class DiskTier(Tier):
    """Records in a directory with a limit of bytes; the least recently used are evicted first.

    Args:
      directory: directory, which is created with access for its owner only.
      capacity: maximum size of all files in bytes.
      shares: quotas of payers within the capacity; None: no quotas.
      ttl: lifetime of records in seconds; expired records are deleted by the next write. Until then they are found, and
        the caller checks their time. None: no limit.
      clock: returns seconds since the epoch.

    Raises:
      ValueError: the directory or its index cannot be used, or another process has been opening it for a minute.
    """

    label = "disk"
    is_local = True

    def __init__(
        self,
        directory: str | os.PathLike[str],
        capacity: int,
        *,
        shares: Quotas | None = None,
        ttl: float | None = None,
        clock: Callable[[], float] = time.time,
    ):
        self.capacity, self._shares, self._ttl = capacity, shares or Quotas(), ttl
        self._clock = clock
        self._me, self._pid = uuid.uuid4().hex, os.getpid()
        self._numbers = itertools.count()  # for names of temporary files
        self._gone: set[str] = set()  # records whose file is missing
        try:
            self.directory = pathlib.Path(directory).expanduser() / FOLDER
            make_folder(self.directory)
            log_older(self.directory.parent, FOLDER)
            with held(self.directory / "lock", timeout=LOCK_TIMEOUT):  # another opener would delete unfinished files
                self._alive = open(self.directory / f"{self._me}{_WRITER}", "wb")  # noqa: SIM115
                fcntl.flock(self._alive, fcntl.LOCK_EX)
                try:
                    self._open_index()
                except BaseException:
                    self._die()
                    raise
        except (OSError, sqlite3.Error, RuntimeError, ValueError) as error:
            reason = f"its index: {error}; {advice(error)}" if isinstance(error, sqlite3.Error) else error
            raise ValueError(f"disk must be a usable directory, got {str(directory)!r}: {reason}") from error

    # Interface of a tier.

    def find(self, entry: str) -> list[Found]:
        with self._reporting(entry):
            found = []
            for name, header, written in self._index.find(entry):
                if name in self._gone:
                    continue
                try:
                    found.append(Found(self._meta(name, header), written))
                except DamagedError as error:
                    self.report(error)
                    with self._changing():
                        self._remove(name)
            return found

    def read(self, meta: Meta, parts: Iterable[Part], place: Place) -> Iterator[tuple[Part, Buffers]]:
        name, size = meta.name, meta.part_bytes
        with self._reporting(name), self._open(name) as file:
            header = make_header(meta)
            is_ours = _header(file.fileno()) == header  # the file may have been replaced
            if not is_ours or os.fstat(file.fileno()).st_size != file_bytes(meta):
                raise DamagedError(f"{name}: file is damaged")
            self._index.use(name, self._clock())
            for part in parts:
                buffers = place(part)
                views = [rows.view(np.uint8).data.cast("B") for rows in blocks(meta, buffers)]
                if sum(map(len, views)) != size:
                    raise DamagedError(f"{name}: {part} must have {size} bytes, got a buffer of {sum(map(len, views))}")
                _read_all(file.fileno(), views, len(header) + meta.parts.index(part) * size)
                yield part, buffers

    def write(self, meta: Meta, parts: Mapping[Part, Buffers]) -> Outcome:
        with self._reporting(meta.name):
            with self._changing():
                if self._has(meta.name):
                    return "known"  # exists, or is being written
                if not self._make_room(meta):
                    return "refused"
                self._index.claim(meta, self._me, self._clock())
            try:
                return "stored" if self._write(meta, parts) else "refused"
            except BaseException:
                with contextlib.suppress(sqlite3.Error):  # else the next process that opens the directory does it
                    self._index.give_up(meta.name, self._me)
                raise

    def delete(self, name: str) -> None:
        with self._reporting(name), self._changing():
            self._remove(name)

    def lines(self) -> list[Line]:
        with self._reporting("lines"):
            return self._index.lines()

    def touch(self, names: Iterable[str]) -> None:
        for name in names:
            self._index.use(name, self._clock())

    def pin(self, name: str, is_pinned: bool) -> None:
        with self._reporting(name), self._changing():
            self._index.pin(name, is_pinned)

    def pinned(self, entry: str) -> set[str]:
        with self._reporting(entry):
            return self._index.pinned(entry)

    def date(self, name: str, written: float) -> None:
        with self._reporting(name), self._changing():
            with contextlib.suppress(FileNotFoundError):  # it may be evicted already
                os.utime(self.directory / file_name(name), (written, written))
            self._index.date(name, written)

    def counts(self) -> dict[str, int]:
        with self._reporting("counts"):
            records, size = self._index.totals()
        return {"records": records, "bytes": size, "capacity": self.capacity}

    def close(self) -> None:
        if os.getpid() != self._pid:  # in a forked child: index and files belong to the parent
            return
        self._index.close()
        self._die()

    def prune(self, capacity: int, before: float | None = None) -> None:
        with self._reporting("prune"), self._changing():
            for name in self._index.leaving(0, capacity, before=before)[0]:
                self._remove(name)

    def older(self) -> dict[str, int]:
        with self._reporting("older formats"):
            return older_bytes(self.directory.parent, FOLDER, LIBRARIES_FOLDER)

    def remove_older(self, name: str) -> None:
        with self._reporting(name):
            remove_folder(self.directory.parent, name, FOLDER, LIBRARIES_FOLDER)

    # Files.

    def _meta(self, name: str, header: bytes) -> Meta:
        """Return the description of a record from the index, or from its file if the index is damaged."""
        with contextlib.suppress(DamagedError):
            if (meta := read_header(header)).name == name:
                return meta
        if (meta := read_header(_header(self.directory / file_name(name)))).name != name:
            raise DamagedError(f"{name}: its file contains {meta.name}")
        return meta

    @property
    def _oldest(self) -> float | None:
        """Time before which written records are expired; None: none are."""
        return None if self._ttl is None else self._clock() - self._ttl

    def _open(self, name: str) -> BinaryIO:
        """Open the file of a record. If it is missing, the next transaction removes it from the index."""
        try:
            return cast(BinaryIO, open(self.directory / file_name(name), "rb", buffering=0))
        except FileNotFoundError as error:
            self._gone.add(name)
            raise EntryGoneError(f"{name}: its file is missing") from error

    def _write(self, meta: Meta, parts: Mapping[Part, Buffers]) -> bool:
        """Write the file of a claimed record and publish it; return False if it was deleted in the meantime."""
        path = self.directory / file_name(meta.name)
        part_file = path.with_name(f"{path.name}.{self._me}.{next(self._numbers)}{_PART}")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            descriptor = os.open(part_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb", buffering=0) as file:
                if hasattr(os, "posix_fallocate"):  # macOS has none
                    os.posix_fallocate(descriptor, 0, file_bytes(meta))  # fails early on a full disk
                _write_all(descriptor, memoryview(make_header(meta)))
                for part in meta.parts:
                    for rows in blocks(meta, parts[part]):
                        _write_all(descriptor, rows.view(np.uint8).data.cast("B"))
                os.fsync(file.fileno())
            with self._changing():
                if not self._index.publish(meta.name, self._me, self._clock()):
                    return False
                part_file.rename(path)
                _sync_folder(path.parent)
                return True
        finally:
            _discard(part_file)

    def _has(self, name: str) -> bool:
        """Return whether a record exists, or a live writer is writing it. Call it within a transaction."""
        if (row := self._index.writer(name)) is None:
            return False
        [writer] = row
        path = self.directory / (file_name(name) if writer is None else f"{writer}{_WRITER}")
        if path.is_file() and (writer in (None, self._me) or _is_locked(path)):
            return True
        self._index.forget(name)
        return False

    def _make_room(self, meta: Meta) -> bool:
        """Evict records for a new one; return whether it fits. Call it within a transaction."""
        size = file_bytes(meta)
        self._index.set_right(self._clock())
        names, fits = self._index.leaving(size, self.capacity, before=self._oldest)
        if fits and (quota := self._shares.of(meta.owner)) is not None:
            own, fits = self._index.leaving(size, quota, who=payer(meta.owner))
            for name in own if fits else ():
                self._remove(name)
            names, _ = self._index.leaving(size, self.capacity, before=self._oldest)
        for name in names if fits else ():
            self._remove(name)
        return fits

    def _remove(self, name: str) -> None:
        """Delete a record. Call it within a transaction, so that it is not written concurrently."""
        self._index.forget(name)
        _discard(self.directory / file_name(name))

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Begin a transaction, which also removes records with missing files from the index."""
        with self._index.changing():
            while self._gone:
                name = self._gone.pop()
                if not (self.directory / file_name(name)).is_file() and self._index.writer(name) == (None,):
                    self._index.forget(name)
            yield

    def _die(self) -> None:
        _discard(pathlib.Path(self._alive.name))
        self._alive.close()

    def _open_index(self, *, is_new: bool = False) -> None:
        """Open the index and synchronize it with the files. A damaged index is rebuilt."""
        self._index = Index(self.directory)
        try:
            self._index.check()
            self._agree()
        except BaseException as error:
            self._index.close()
            if is_new or not is_damage(error):
                raise
            _log.warning("the index of %s is damaged and rebuilt: %s", self.directory, error)
            self._index.discard()
            self._open_index(is_new=True)

    def _agree(self) -> None:
        """Synchronize index and files, and delete the remains of dead writers."""
        with self._changing():
            writers = (path for path in self.directory.glob(f"*{_WRITER}") if path.is_file())
            alive = {path.stem for path in writers if _is_locked(path)}
            for name in self._index.abandoned(alive.__contains__):
                self._index.forget(name)
            for part_file in self.directory.glob(f"??/*{_PART}"):
                ours = _BEING_WRITTEN.fullmatch(part_file.name)
                if ours and ours["writer"] not in alive:
                    _discard(part_file)
            there = set(self._scan())
            for name in self._index.names() - there:
                if not (self.directory / file_name(name)).is_file():
                    self._index.forget(name)
            self._index.set_right(self._clock())
            for name in self._index.leaving(0, self.capacity, before=self._oldest)[0]:
                self._remove(name)

    def _scan(self) -> Iterator[str]:
        """Update the index from the files and delete damaged files; yield the names of intact records."""
        for path in self.directory.glob(f"??/*{SUFFIX}"):
            name = name_of(str(path.relative_to(self.directory)))
            if name is None or not path.is_file():
                continue
            try:
                meta = read_header(_header(path))
                about = path.stat()
                if meta.name != name or about.st_size != file_bytes(meta):
                    raise DamagedError(f"{path} is damaged")
            except OSError as error:  # possibly temporary
                _log.warning("%s could not be read: %s", path, error)
                continue
            except DamagedError:
                _log.warning("%s is damaged and deleted", path)
                self.damaged += 1
                _discard(path)
                continue
            if not self._index.knows(meta):
                self._index.enter(meta, about.st_mtime)
            yield name

    @contextlib.contextmanager
    def _reporting(self, name: str) -> Iterator[None]:
        """Convert errors of files and the index to TierError."""
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            raise TierError(f"{name}: {type(error).__name__}: {error}") from error


def _header(path: str | os.PathLike[str] | int) -> bytes:
    """Return the header of a file, given by path or open descriptor, with its length prefix."""
    with open(path, "rb", closefd=not isinstance(path, int)) as file:
        return take_header(file, path)


def _read_all(descriptor: int, views: list[memoryview], offset: int) -> None:
    """Fill the views from a file. Raises DamagedError if the file ends early."""
    for view in views:
        while view:
            got = os.preadv(descriptor, [view], offset)
            if not got:
                raise DamagedError("file ends early")
            view, offset = view[got:], offset + got


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _sync_folder(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _discard(path: pathlib.Path) -> None:
    """Delete a file, ignoring errors."""
    with contextlib.suppress(OSError):
        path.unlink()


def _is_locked(path: pathlib.Path) -> bool:
    """Return whether the owner of a writer file lives; otherwise delete the file."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        _discard(path)
    return False
