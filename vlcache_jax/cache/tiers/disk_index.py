"""The index of a directory of records (SQLite): what there is, how large, whose, since when, and what was used last.

It can be made anew from the files at any time. Several processes may use it; who changes what is visible does so within
a transaction, so that index and files tell the same.
"""

from __future__ import annotations

import contextlib
import logging
import pathlib
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from vlcache_jax.cache.keys import payer
from vlcache_jax.cache.record import Line, Meta
from vlcache_jax.cache.tiers.record_file import file_bytes, make_header

_log = logging.getLogger(__name__)

_PATIENCE = 10.0  # seconds that another process may keep the index
_TABLE = """CREATE TABLE records (
  name TEXT PRIMARY KEY, header BLOB NOT NULL, bytes INTEGER NOT NULL, used REAL NOT NULL, written REAL NOT NULL,
  owner TEXT NOT NULL,  -- digest of the salt
  pinned INTEGER NOT NULL DEFAULT 0,
  writer TEXT  -- who is still writing it; NULL: it is complete
) WITHOUT ROWID"""
_KEY, _WRITER = 64 * "[0-9a-f]", 32 * "[0-9a-f]"
_IS_ROW = f"""
(name GLOB 'enc/{_KEY}' OR name GLOB 'kv/{_KEY}/{_KEY}') AND typeof(name) = 'text' AND typeof(header) = 'blob'
AND typeof(bytes) = 'integer' AND typeof(used) = 'real' AND typeof(written) = 'real' AND owner GLOB '{_KEY}'
AND pinned IN (0, 1) AND (writer IS NULL OR writer GLOB '{_WRITER}')
"""
_OF_IMAGE = "WHERE (name = ? OR (name >= ? AND name < ?)) AND writer IS NULL"  # see `_names`
_FILES = ("index.sqlite", "index.sqlite-wal", "index.sqlite-shm", "index.sqlite-journal")
_KEPT = "another process keeps it: try again when that has ended"
# What SQLite says when the index may be whole, and what to do then. Anything else, and it is to be made anew.
_PASSING = {sqlite3.SQLITE_BUSY: _KEPT, sqlite3.SQLITE_LOCKED: _KEPT, sqlite3.SQLITE_PROTOCOL: _KEPT} | {
    sqlite3.SQLITE_FULL: "make room on its disk",
    sqlite3.SQLITE_CANTOPEN: "let this process open more files",
    sqlite3.SQLITE_IOERR: "see whether its disk is well",
    sqlite3.SQLITE_NOMEM: "give this process more memory",
    sqlite3.SQLITE_PERM: "let this user read and write it",
}


class IndexRow(NamedTuple):
    """Of a record that is complete."""

    name: str
    header: bytes
    written: float


class Index:
    """The index of one directory.

    Args:
      directory: exists.

    Raises:
      sqlite3.Error, OSError: its files cannot be opened.
    """

    def __init__(self, directory: pathlib.Path):
        self.directory = directory
        self._lock = threading.RLock()  # of whoever changes something, who may wait for other processes
        self._looking = threading.Lock()
        self._used: dict[str, float] = {}  # since the last change, when each record was used
        _prepare(directory)
        self._index = self._connect()
        self._view = self._connect()

    def check(self) -> None:
        """Sees that the index is one, and takes out the rows that are none.

        Raises:
          sqlite3.Error, UnicodeDecodeError: it cannot be used; see `is_damage`.
        """
        self._index.execute("PRAGMA journal_mode = WAL")
        self._index.execute("PRAGMA synchronous = NORMAL")  # what a crash takes from it, the files give back
        schema = "SELECT sql FROM sqlite_master"
        if not self._index.execute(schema).fetchall():
            self._index.execute(_TABLE)
        [said] = self._index.execute("PRAGMA integrity_check(1)").fetchone()  # the quick one sees no wrong order
        if said != "ok" or self._index.execute(schema).fetchall() != [(_TABLE,)]:
            raise sqlite3.DatabaseError(f"it must be whole and hold records alone, its check says {said}")
        if wrong := self._index.execute(f"DELETE FROM records WHERE ({_IS_ROW}) IS NOT TRUE").rowcount:
            _log.warning("of the index of %s %d rows are damaged, and are made anew", self.directory, wrong)

    def discard(self) -> None:
        """Deletes its files, when it is closed."""
        for name in _FILES:
            (self.directory / name).unlink(missing_ok=True)

    # Looking, which waits for nobody who changes something.

    def find(self, entry: str) -> list[IndexRow]:
        """The complete records of an image, the one that was used last at the end."""
        rows = self._look(f"SELECT name, header, written FROM records {_OF_IMAGE} ORDER BY used", *_names(entry))
        return [IndexRow(*row) for row in rows]

    def pinned(self, entry: str) -> set[str]:
        """Names of the records of an image that make no room."""
        return {name for (name,) in self._look(f"SELECT name FROM records {_OF_IMAGE} AND pinned", *_names(entry))}

    def lines(self) -> list[Line]:
        """Of all complete records, the one that was used last at the end."""
        rows = self._look("SELECT name, bytes, used FROM records WHERE writer IS NULL ORDER BY used")
        return [Line(*row) for row in rows]

    def totals(self) -> tuple[int, int]:
        """Complete records, and their bytes."""
        [(records, size)] = self._look("SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM records WHERE writer IS NULL")
        return records, size

    def use(self, name: str, at: float) -> None:
        """Notes a use, to be written down with the next change."""
        self._used[name] = at

    # Changing.

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """A transaction that no other thread or process changes anything in."""
        with self._lock:
            self._index.execute("BEGIN IMMEDIATE")
            try:
                while self._used:
                    name, used = self._used.popitem()
                    self._index.execute("UPDATE records SET used = ? WHERE name = ?", (used, name))
                yield
                self._index.execute("COMMIT")
            except BaseException:
                if self._index.in_transaction:  # a disk that is full may have ended it
                    self._index.execute("ROLLBACK")
                raise

    def writer(self, name: str) -> tuple[str | None] | None:
        """Who writes a record; (None,) if it is complete, None if there is none."""
        return self._execute("SELECT writer FROM records WHERE name = ?", name).fetchone()

    def claim(self, meta: Meta, writer: str, at: float) -> None:
        """Somebody is about to write a record."""
        self._insert(meta, at, at, writer)

    def publish(self, name: str, writer: str, at: float) -> bool:
        """The record is complete; False if it was deleted while it was written."""
        mine = "UPDATE records SET writer = NULL, used = ?, written = ? WHERE name = ? AND writer = ?"
        return bool(self._execute(mine, at, at, name, writer).rowcount)

    def give_up(self, name: str, writer: str) -> None:
        """Who was to write a record will not; needs no transaction."""
        self._execute("DELETE FROM records WHERE name = ? AND writer = ?", name, writer)

    def enter(self, meta: Meta, written: float) -> None:
        """A file was found that the index does not know, or knows otherwise."""
        self._insert(meta, written, written, None)

    def forget(self, name: str) -> None:
        """A record is there no more."""
        self._execute("DELETE FROM records WHERE name = ?", name)

    def pin(self, name: str, is_pinned: bool) -> None:
        """A record makes no room as long as it is pinned."""
        self._execute("UPDATE records SET pinned = ? WHERE name = ?", int(is_pinned), name)

    def date(self, name: str, written: float) -> None:
        """Since when a complete record is kept."""
        self._execute("UPDATE records SET written = ? WHERE name = ? AND writer IS NULL", written, name)

    def abandoned(self, is_alive: Callable[[str], bool]) -> list[str]:
        """Records whose writers do not live any more."""
        rows = self._execute("SELECT name, writer FROM records WHERE writer IS NOT NULL").fetchall()
        return [name for name, writer in rows if not is_alive(writer)]

    def names(self) -> set[str]:
        """Of the complete records."""
        return {name for (name,) in self._execute("SELECT name FROM records WHERE writer IS NULL")}

    def knows(self, meta: Meta) -> bool:
        """Whether a complete record is entered as what it is."""
        told = "SELECT header, bytes, owner FROM records WHERE name = ? AND writer IS NULL"
        return self._execute(told, meta.name).fetchone() == (make_header(meta), file_bytes(meta), meta.owner)

    def set_right(self, now: float) -> None:
        """Times that are still to come, of a clock that was ahead, count as now; the order of use stays."""
        query = """UPDATE records SET written = MIN(written, ?),
          used = CASE WHEN used > ? THEN used - ((SELECT MAX(used) FROM records) - ?) ELSE used END
        WHERE written > ? OR used > ?"""
        self._execute(query, now, now, now, now, now)

    def leaving(
        self, size: int, capacity: int, who: str | None = None, before: float | None = None
    ) -> tuple[list[str], bool]:
        """The records that make room for one of a number of bytes, and whether that is enough.

        Args:
          capacity: for all records, or for those of a payer.
          who: pays for the records that count; None: all of them do.
          before: what was written before leaves in any case: seconds since the epoch.
        """
        query = "SELECT name, bytes, written, pinned, owner FROM records WHERE writer IS NULL ORDER BY used"
        coming = "SELECT bytes, owner FROM records WHERE writer IS NOT NULL"
        rows = [row for row in self._execute(query).fetchall() if who in (None, payer(row[4]))]
        being_written = sum(its for its, owner in self._execute(coming) if who in (None, payer(owner)))
        left = size + sum(row[1] for row in rows) + being_written
        names = []
        for name, its, written, pinned, _ in rows:
            is_old = before is not None and written < before
            if is_old or (left > capacity and not pinned):
                names.append(name)
                left -= its
        return names, left <= capacity

    def close(self) -> None:
        """Uses that were noted are written down."""
        if self._used:
            with self._lock, contextlib.suppress(sqlite3.Error), self.changing():
                pass
        with self._lock, self._looking:
            self._index.close()
            self._view.close()

    def _insert(self, meta: Meta, used: float, written: float, writer: str | None) -> None:
        row = meta.name, make_header(meta), file_bytes(meta), used, written, meta.owner, writer
        self._execute(
            """INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, 0, ?)
            ON CONFLICT (name) DO UPDATE SET header = excluded.header, bytes = excluded.bytes, used = excluded.used,
            written = excluded.written, owner = excluded.owner, writer = excluded.writer""",
            *row,
        )

    def _execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        with self._lock:
            return self._index.execute(statement, values)

    def _look(self, query: str, *values: Any) -> list[Any]:
        with self._looking:
            return self._view.execute(query, values).fetchall()

    def _connect(self) -> sqlite3.Connection:
        path = self.directory / _FILES[0]
        return sqlite3.connect(path, timeout=_PATIENCE, isolation_level=None, check_same_thread=False)


def is_damage(error: BaseException) -> bool:
    """Whether an index must be made anew as it is no index; if not, it may be whole."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)  # of what Python itself cannot read there is none
    return isinstance(error, sqlite3.Error | UnicodeDecodeError) and code & 0xFF not in _PASSING


def advice(error: sqlite3.Error) -> str:
    """What to do about an index that cannot be used."""
    return "delete it, it is made anew" if is_damage(error) else _PASSING[error.sqlite_errorcode & 0xFF]


def _prepare(directory: pathlib.Path) -> None:
    """Sees that the index's files are files, and its owner's."""
    for path in (directory / name for name in _FILES):
        with contextlib.suppress(FileNotFoundError):
            mode = path.lstat().st_mode
            if stat.S_ISREG(mode):
                path.chmod(0o600)
            elif stat.S_ISDIR(mode):
                raise IsADirectoryError(f"{path} must be a file, is a folder: move it away")
            else:  # a link is nothing of ours, and what it leads to is not touched
                _log.warning("%s is no file, and is deleted", path)
                path.unlink()
    (directory / _FILES[0]).touch(0o600)


def _names(entry: str) -> tuple[str, str, str]:
    """Of an image: its encoder rows, and from where to where those of K, V lie."""
    return f"enc/{entry}", f"kv/{entry}/", f"kv/{entry}0"
