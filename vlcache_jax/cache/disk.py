"""The disk tier: a directory of record files, and an index of them.

A file appears under its name when it is complete and on the disk, and never changes. The index (SQLite) says what there
is, and what was used last; it can be made anew from the files at any time. Several processes may use one directory: who
changes what is visible does so within a transaction, so that index and files tell the same.
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
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt

from vlcache_jax.cache.keys import FORMAT_VERSION
from vlcache_jax.cache.record import DamagedError, Meta, Part, TierError, blocks
from vlcache_jax.cache.record_file import LENGTH, MOST_HEADER, SUFFIX, file_name, make_header, part_bytes, read_header

_log = logging.getLogger(__name__)

FOLDER = f"vlcache-{FORMAT_VERSION}"  # of the directory: what lies beside it is not ours
_PART = ".part"
_WRITER = ".writer"  # files that their owners keep locked as long as they live
_OURS = re.compile(rf"[0-9a-f]{{64}}(\.[0-9a-f]{{64}})?{SUFFIX}(\.(?P<writer>[0-9a-f]{{32}})\.\d+{_PART})?")
_PATIENCE = 10.0  # seconds that another process may keep the index
_TABLE = """
CREATE TABLE IF NOT EXISTS records (
  name TEXT PRIMARY KEY, header BLOB NOT NULL, bytes INTEGER NOT NULL, used REAL NOT NULL,
  writer TEXT  -- who is still writing it; NULL: it is complete
) WITHOUT ROWID
"""


class DiskTier:
    """Records in a directory, under a budget of bytes; the least recently used leave first.

    Args:
      directory: is made if it does not exist, for its owner alone.
      capacity: bytes of all files, at most.
      clock: seconds since the epoch.

    Attributes:
      label: what reports call it.

    Raises:
      ValueError: it is no directory, or cannot be used.
    """

    label = "disk"

    def __init__(self, directory: str | os.PathLike[str], capacity: int, *, clock: Callable[[], float] = time.time):
        self.capacity = capacity
        self._clock = clock
        self._me = uuid.uuid4().hex
        self._numbers = itertools.count()  # of files that are being written
        self._lock = threading.RLock()  # of whoever changes something, who may wait for other processes
        self._looking = threading.Lock()
        self._used: dict[str, float] = {}  # since the last change of the index, when each record was used
        self._gone: set[str] = set()  # records whose file was not found
        try:
            self.directory = pathlib.Path(directory).expanduser() / FOLDER
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(self.directory / "lock", "ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # two that open at once would mend what the other is making
                self._alive = open(self.directory / f"{self._me}{_WRITER}", "wb")  # noqa: SIM115
                fcntl.flock(self._alive, fcntl.LOCK_EX)
                self._index = self._open_index()
                self._view = self._connect()
                self._agree()
        except (OSError, sqlite3.Error, RuntimeError, ValueError) as error:
            raise ValueError(f"disk must be a directory that can be used, got {str(directory)!r}: {error}") from error

    # The interface of a tier.

    def meta(self, name: str) -> Meta | None:
        with self._reporting(name):
            found = self._look("SELECT header FROM records WHERE name = ? AND writer IS NULL", name)
            if not found or name in self._gone:
                return None
            try:
                return read_header(found[0][0])
            except DamagedError:  # of the index; the file may be as it should
                return read_header(self._header(self.directory / file_name(name)))

    def read(
        self, name: str, parts: Iterable[Part], place: Callable[[Part], npt.NDArray[Any]]
    ) -> Iterator[tuple[Part, npt.NDArray[Any]]]:
        with self._reporting(name), self._open(name) as file:
            header = self._header(file.name)
            meta = read_header(header)
            size = part_bytes(meta)
            if meta.name != name or os.fstat(file.fileno()).st_size != len(header) + size * len(meta.parts):
                raise DamagedError(f"{name}: file is damaged")
            self._used[name] = self._clock()
            for part in parts:
                array = place(part)
                buffers = [rows.view(np.uint8).data.cast("B") for rows in blocks(meta, array)]
                if sum(map(len, buffers)) != size:
                    raise DamagedError(f"{name}: {part} must have {size} bytes, got place for another size")
                _read_all(file.fileno(), buffers, len(header) + meta.parts.index(part) * size)
                yield part, array

    def write(self, meta: Meta, parts: Mapping[Part, npt.NDArray[Any]]) -> bool:
        with self._reporting(meta.name):
            header = make_header(meta)
            size = len(header) + part_bytes(meta) * len(meta.parts)
            with self._changing():
                if self._has(meta.name):
                    return True  # it is there, or about to be
                if not self._make_room(size):
                    return False
                row = meta.name, header, size, self._clock(), self._me
                self._execute("INSERT INTO records VALUES (?, ?, ?, ?, ?)", *row)
            try:
                return self._write(meta, header, parts, size)
            except BaseException:
                with contextlib.suppress(sqlite3.Error):  # if need be, whoever opens the directory next does it
                    self._execute("DELETE FROM records WHERE name = ? AND writer = ?", meta.name, self._me)
                raise

    def delete(self, name: str) -> None:
        with self._reporting(name), self._changing():
            self._remove(name)

    def keys(self, prefix: str = "") -> list[str]:
        with self._reporting(prefix):
            found = self._look(
                "SELECT name FROM records WHERE name >= ? AND name < ? AND writer IS NULL ORDER BY used",
                prefix, prefix + "\U0010ffff",
            )  # fmt: skip
            return [name for (name,) in found]

    def close(self) -> None:
        with self._lock, contextlib.suppress(sqlite3.Error), self._changing():
            pass  # what was used last is noted
        with self._lock, self._looking:
            self._index.close()
            self._view.close()
            _discard(pathlib.Path(self._alive.name))
            self._alive.close()

    def lines(self) -> list[tuple[str, int, float]]:
        """Name, bytes and time of the last use of each record, the newest last."""
        with self._reporting("lines"):
            return self._look("SELECT name, bytes, used FROM records WHERE writer IS NULL ORDER BY used")

    def counts(self) -> dict[str, int]:
        """Records, their bytes, and the capacity."""
        with self._reporting("counts"):
            query = "SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM records WHERE writer IS NULL"
            [(records, size)] = self._look(query)
        return {"disk_records": records, "disk_bytes": size, "disk_capacity": self.capacity}

    # Files.

    def _open(self, name: str) -> BinaryIO:
        """A record's file; if it is gone, so will be its line in the index."""
        try:
            return cast(BinaryIO, open(self.directory / file_name(name), "rb", buffering=0))
        except FileNotFoundError:
            self._gone.add(name)
            raise

    def _header(self, path: str | os.PathLike[str]) -> bytes:
        """A file's header, with its length."""
        with open(path, "rb") as file:
            first = file.read(LENGTH.size)
            if len(first) < LENGTH.size or (length := LENGTH.unpack(first)[0]) > MOST_HEADER:
                raise DamagedError(f"{path}: no header")
            return first + file.read(length)

    def _write(self, meta: Meta, header: bytes, parts: Mapping[Part, npt.NDArray[Any]], size: int) -> bool:
        """The file of a record that has its room; then it is visible, unless it was deleted meanwhile."""
        path = self.directory / file_name(meta.name)
        part_file = path.with_name(f"{path.name}.{self._me}.{next(self._numbers)}{_PART}")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            descriptor = os.open(part_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb", buffering=0) as file:
                if hasattr(os, "posix_fallocate"):  # macOS has none
                    os.posix_fallocate(descriptor, 0, size)  # a full disk is known before the work
                _write_all(descriptor, memoryview(header))
                for part in meta.parts:
                    for rows in blocks(meta, parts[part]):
                        _write_all(descriptor, rows.view(np.uint8).data.cast("B"))
                os.fsync(file.fileno())
            with self._changing():
                mine = "UPDATE records SET writer = NULL, used = ? WHERE name = ? AND writer = ?"
                if not self._execute(mine, self._clock(), meta.name, self._me).rowcount:
                    return False
                part_file.rename(path)
                _sync_folder(path.parent)
                return True
        finally:
            _discard(part_file)

    # The index.

    def _has(self, name: str) -> bool:
        """Within a transaction: whether a record is there, or somebody who lives is writing it."""
        row = self._execute("SELECT writer FROM records WHERE name = ?", name).fetchone()
        if row is None:
            return False
        [writer] = row
        path = self.directory / (file_name(name) if writer is None else f"{writer}{_WRITER}")
        if path.is_file() and (writer in (None, self._me) or _is_locked(path)):
            return True
        self._execute("DELETE FROM records WHERE name = ?", name)
        return False

    def _make_room(self, size: int) -> bool:
        """Within a transaction; False if what is being written leaves none."""
        rows = self._execute("SELECT name, bytes, writer FROM records ORDER BY used").fetchall()
        if sum(its for _, its, writer in rows if writer is not None) + size > self.capacity:
            return False
        used = sum(its for _, its, _ in rows)
        for name, its, writer in rows:
            if used + size <= self.capacity:
                break
            if writer is None:
                self._remove(name)
                used -= its
        return True

    def _remove(self, name: str) -> None:
        """Within a transaction, so that nobody writes it anew meanwhile."""
        self._execute("DELETE FROM records WHERE name = ?", name)
        _discard(self.directory / file_name(name))

    def _connect(self) -> sqlite3.Connection:
        path = self.directory / "index.sqlite"
        return sqlite3.connect(path, timeout=_PATIENCE, isolation_level=None, check_same_thread=False)

    def _open_index(self) -> sqlite3.Connection:
        path = self.directory / "index.sqlite"
        for attempt in range(2):
            index = self._connect()
            try:
                os.chmod(path, 0o600)
                index.execute("PRAGMA journal_mode = WAL")
                index.execute("PRAGMA synchronous = NORMAL")  # what a crash takes from it, the files give back
                index.execute(_TABLE)
                columns = [row[1] for row in index.execute("PRAGMA table_info(records)")]
                [said] = index.execute("PRAGMA quick_check").fetchone()
                if said == "ok" and columns == ["name", "header", "bytes", "used", "writer"]:
                    return index
                raise sqlite3.DatabaseError(f"index must be whole, got {said}, {columns}")
            except sqlite3.OperationalError:  # it is locked, or the disk is full: it may be whole
                index.close()
                raise
            except sqlite3.DatabaseError:
                index.close()
                if attempt:
                    raise
                _log.warning("the index of %s is damaged, and is made anew", self.directory)
                for name in ("index.sqlite", "index.sqlite-wal", "index.sqlite-shm"):
                    _discard(self.directory / name)
        raise AssertionError("unreachable")

    def _agree(self) -> None:
        """Index and files tell the same again, whatever happened to whoever used them."""
        with self._changing():
            alive = {path.stem for path in self.directory.glob(f"*{_WRITER}") if _is_locked(path)}
            for name, writer in self._execute("SELECT name, writer FROM records").fetchall():
                if writer is not None and writer not in alive:
                    self._execute("DELETE FROM records WHERE name = ?", name)
            for part_file in self.directory.glob(f"??/*{_PART}"):
                ours = _OURS.fullmatch(part_file.name)
                if ours and ours["writer"] not in alive:
                    _discard(part_file)
            rows = dict(self._execute("SELECT name, bytes FROM records WHERE writer IS NULL").fetchall())
            there = set()
            for path in self.directory.glob(f"??/*{SUFFIX}"):
                if not (_OURS.fullmatch(path.name) and path.is_file()):
                    continue
                try:
                    header = self._header(path)
                    meta = read_header(header)
                    size = len(header) + part_bytes(meta) * len(meta.parts)
                    if path != self.directory / file_name(meta.name) or path.stat().st_size != size:
                        raise DamagedError(f"{path} is damaged")
                except OSError as error:  # it may pass
                    _log.warning("%s could not be read: %s", path, error)
                    continue
                except DamagedError:
                    _log.warning("%s is damaged, and is deleted", path)
                    _discard(path)
                    continue
                there.add(meta.name)
                if rows.get(meta.name) != size:
                    row = meta.name, header, size, path.stat().st_mtime
                    self._execute("INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, NULL)", *row)
            for name in rows.keys() - there:
                if not (self.directory / file_name(name)).is_file():
                    self._execute("DELETE FROM records WHERE name = ?", name)
            self._make_room(0)

    def _execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        with self._lock:
            return self._index.execute(statement, values)

    def _look(self, query: str, *values: Any) -> list[Any]:
        """What the index says. Waits for nobody who changes it."""
        with self._looking:
            return self._view.execute(query, values).fetchall()

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """A transaction that no other thread or process changes anything in."""
        with self._lock:
            self._index.execute("BEGIN IMMEDIATE")
            try:
                self._note()
                yield
            except BaseException:
                self._index.execute("ROLLBACK")
                raise
            self._index.execute("COMMIT")

    def _note(self) -> None:
        """Writes down what was seen since the last change."""
        while self._used:
            name, used = self._used.popitem()
            self._index.execute("UPDATE records SET used = ? WHERE name = ?", (used, name))
        while self._gone:
            name = self._gone.pop()
            if not (self.directory / file_name(name)).is_file():
                self._index.execute("DELETE FROM records WHERE name = ? AND writer IS NULL", (name,))

    @contextlib.contextmanager
    def _reporting(self, name: str) -> Iterator[None]:
        """Whatever goes wrong is a TierError."""
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            raise TierError(f"{name}: {type(error).__name__}: {error}") from error


def _read_all(descriptor: int, buffers: list[memoryview], offset: int) -> None:
    """Fills the buffers. Raises DamagedError if the file ends before."""
    for buffer in buffers:
        while buffer:
            got = os.preadv(descriptor, [buffer], offset)
            if not got:
                raise DamagedError("file ends too early")
            buffer, offset = buffer[got:], offset + got


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
    """Deletes a file, if it can."""
    with contextlib.suppress(OSError):
        path.unlink()


def _is_locked(path: pathlib.Path) -> bool:
    """Whether its owner lives; deletes it if not."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        _discard(path)
    return False
