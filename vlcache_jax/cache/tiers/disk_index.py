"""Index of a directory of records (SQLite): name, header, size, owner, and times of writing and last use.

It can be rebuilt from the files at any time. Several processes may use it. Visible changes happen within a transaction,
so that index and files agree.
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

_PATIENCE = 10.0  # seconds to wait for another process that locks the index
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
_LOCKED = "another process locks it: try again after that process has ended"
# Errors of an index that may be intact, with their remedies. After other errors it is rebuilt.
_REMEDIES = {sqlite3.SQLITE_BUSY: _LOCKED, sqlite3.SQLITE_LOCKED: _LOCKED, sqlite3.SQLITE_PROTOCOL: _LOCKED} | {
    sqlite3.SQLITE_FULL: "free space on its disk",
    sqlite3.SQLITE_CANTOPEN: "raise the limit of open files (ulimit -n)",
    sqlite3.SQLITE_IOERR: "check its disk",
    sqlite3.SQLITE_NOMEM: "free memory for this process",
    sqlite3.SQLITE_PERM: "allow this user to read and write it",
}


class IndexRow(NamedTuple):
    """Index row of a complete record; `written` is in seconds since the epoch."""

    name: str
    header: bytes
    written: float


class Index:
    """Index of one directory.

    Args:
      directory: an existing directory.

    Raises:
      sqlite3.Error, OSError: its files cannot be opened.
    """

    def __init__(self, directory: pathlib.Path):
        self.directory = directory
        self._lock = threading.RLock()  # for changes, which may wait for other processes
        self._looking = threading.Lock()
        self._used: dict[str, float] = {}  # time of last use by name, since the last change
        _prepare(directory)
        self._index = self._connect()
        self._view = self._connect()

    def check(self) -> None:
        """Create the table if necessary, check the index, and delete invalid rows.

        Raises:
          sqlite3.Error, UnicodeDecodeError: the index cannot be used; see `is_damage`.
        """
        self._index.execute("PRAGMA journal_mode = WAL")
        self._index.execute("PRAGMA synchronous = NORMAL")  # after a crash the files restore lost rows
        schema = "SELECT sql FROM sqlite_master"
        if not self._index.execute(schema).fetchall():
            self._index.execute(_TABLE)
        [result] = self._index.execute("PRAGMA integrity_check(1)").fetchone()  # quick_check misses a wrong order
        if result != "ok" or self._index.execute(schema).fetchall() != [(_TABLE,)]:
            raise sqlite3.DatabaseError(f"integrity check: {result}, or its tables are not those of an index")
        if wrong := self._index.execute(f"DELETE FROM records WHERE ({_IS_ROW}) IS NOT TRUE").rowcount:
            _log.warning("the index of %s has %d damaged rows, which are rebuilt", self.directory, wrong)

    def discard(self) -> None:
        """Delete its files. Call it after `close`."""
        for name in _FILES:
            (self.directory / name).unlink(missing_ok=True)

    # Reading, which does not wait for changes.

    def find(self, entry: str) -> list[IndexRow]:
        """Return the complete records of an image, most recently used last."""
        rows = self._look(f"SELECT name, header, written FROM records {_OF_IMAGE} ORDER BY used", *_names(entry))
        return [IndexRow(*row) for row in rows]

    def pinned(self, entry: str) -> set[str]:
        """Return the names of an image's pinned records."""
        return {name for (name,) in self._look(f"SELECT name FROM records {_OF_IMAGE} AND pinned", *_names(entry))}

    def lines(self) -> list[Line]:
        """Return all complete records, most recently used last."""
        rows = self._look("SELECT name, bytes, used FROM records WHERE writer IS NULL ORDER BY used")
        return [Line(*row) for row in rows]

    def totals(self) -> tuple[int, int]:
        """Return the number of complete records and their size in bytes."""
        [(records, size)] = self._look("SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM records WHERE writer IS NULL")
        return records, size

    def use(self, name: str, at: float) -> None:
        """Note a use, which the next transaction writes."""
        self._used[name] = at

    # Changing.

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Begin a transaction that excludes changes by other threads and processes."""
        with self._lock:
            self._index.execute("BEGIN IMMEDIATE")
            try:
                while self._used:
                    name, used = self._used.popitem()
                    self._index.execute("UPDATE records SET used = ? WHERE name = ?", (used, name))
                yield
                self._index.execute("COMMIT")
            except BaseException:
                if self._index.in_transaction:  # an error such as a full disk may have ended it
                    self._index.execute("ROLLBACK")
                raise

    def writer(self, name: str) -> tuple[str | None] | None:
        """Return the writer of a record; (None,) if it is complete, None if it does not exist."""
        return self._execute("SELECT writer FROM records WHERE name = ?", name).fetchone()

    def claim(self, meta: Meta, writer: str, at: float) -> None:
        """Enter a record that `writer` is about to write."""
        self._insert(meta, at, at, writer)

    def publish(self, name: str, writer: str, at: float) -> bool:
        """Mark a record as complete; return False if it was deleted while it was written."""
        mine = "UPDATE records SET writer = NULL, used = ?, written = ? WHERE name = ? AND writer = ?"
        return bool(self._execute(mine, at, at, name, writer).rowcount)

    def give_up(self, name: str, writer: str) -> None:
        """Remove a record that `writer` will not complete. It needs no transaction."""
        self._execute("DELETE FROM records WHERE name = ? AND writer = ?", name, writer)

    def enter(self, meta: Meta, written: float) -> None:
        """Enter the record of a file that the index lacks or describes differently."""
        self._insert(meta, written, written, None)

    def forget(self, name: str) -> None:
        """Remove a record."""
        self._execute("DELETE FROM records WHERE name = ?", name)

    def pin(self, name: str, is_pinned: bool) -> None:
        """Pin a record, which excludes it from eviction, or unpin it."""
        self._execute("UPDATE records SET pinned = ? WHERE name = ?", int(is_pinned), name)

    def date(self, name: str, written: float) -> None:
        """Set the time of writing of a complete record."""
        self._execute("UPDATE records SET written = ? WHERE name = ? AND writer IS NULL", written, name)

    def abandoned(self, is_alive: Callable[[str], bool]) -> list[str]:
        """Return the names of records whose writers are not alive."""
        rows = self._execute("SELECT name, writer FROM records WHERE writer IS NOT NULL").fetchall()
        return [name for name, writer in rows if not is_alive(writer)]

    def names(self) -> set[str]:
        """Return the names of all complete records."""
        return {name for (name,) in self._execute("SELECT name FROM records WHERE writer IS NULL")}

    def knows(self, meta: Meta) -> bool:
        """Return whether a complete record is entered with this header, size and owner."""
        query = "SELECT header, bytes, owner FROM records WHERE name = ? AND writer IS NULL"
        return self._execute(query, meta.name).fetchone() == (make_header(meta), file_bytes(meta), meta.owner)

    def set_right(self, now: float) -> None:
        """Set times in the future, from a clock that was ahead, to now. The order of use is preserved."""
        query = """UPDATE records SET written = MIN(written, ?),
          used = CASE WHEN used > ? THEN used - ((SELECT MAX(used) FROM records) - ?) ELSE used END
        WHERE written > ? OR used > ?"""
        self._execute(query, now, now, now, now, now)

    def leaving(
        self, size: int, capacity: int, who: str | None = None, before: float | None = None
    ) -> tuple[list[str], bool]:
        """Select the records to evict for a new one.

        Args:
          size: size of the new record in bytes.
          capacity: maximum size in bytes, of all records or of those of a payer.
          who: payer whose records count; None: all records count.
          before: also evict records written before this time, in seconds since the epoch.

        Returns:
          Names of the records, and whether the new one then fits.
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
        """Write the noted uses and close the connections."""
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
    """Return whether an error means that the index must be rebuilt; otherwise it may be intact."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)  # errors raised by Python have no code
    return isinstance(error, sqlite3.Error | UnicodeDecodeError) and code & 0xFF not in _REMEDIES


def advice(error: sqlite3.Error) -> str:
    """Return the remedy for an index that cannot be used."""
    return "delete it; it will be rebuilt" if is_damage(error) else _REMEDIES[error.sqlite_errorcode & 0xFF]


def _prepare(directory: pathlib.Path) -> None:
    """Check that the index's files are regular files, and restrict access to their owner."""
    for path in (directory / name for name in _FILES):
        with contextlib.suppress(FileNotFoundError):
            mode = path.lstat().st_mode
            if stat.S_ISREG(mode):
                path.chmod(0o600)
            elif stat.S_ISDIR(mode):
                raise IsADirectoryError(f"{path} must be a file, got a folder: move it away")
            else:  # a link or device; the target of a link is not touched
                _log.warning("%s is not a regular file and is deleted", path)
                path.unlink()
    (directory / _FILES[0]).touch(0o600)


def _names(entry: str) -> tuple[str, str, str]:
    """Return the name of an image's encoder output, and the range of names of its KV."""
    return f"enc/{entry}", f"kv/{entry}/", f"kv/{entry}0"
