"""Index of the images in libraries (SQLite), and files with their bytes.

An item is an image with its cache entries and metadata. It changes atomically: a reader continues with the version that
it found. Data that belong to no item are noted in the index, so that they are deleted even after the process was
killed. A row that no library would write counts as damaged.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import pathlib
import re
import sqlite3
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vlcache_jax.cache.folders import LIBRARIES_FOLDER, LOCK_TIMEOUT, held, log_older
from vlcache_jax.cache.keys import SHARED, Salt, TenantSalt, owner_key
from vlcache_jax.cache.store import ImageKey
from vlcache_jax.common.checks import is_a, short
from vlcache_jax.common.files import make_folder

COLUMNS = "library, id, version, content, height, width, limits, entry, file, metadata, added, expires"
_KEY, _NAME = re.compile("[0-9a-f]{64}"), re.compile("[0-9a-f]{32}")
_LIMITS = {"min_pixels", "max_pixels"}
_MAX_SIDE = 2**31  # pixels


@dataclass(frozen=True, eq=False)
class Item:
    """One version of an image in a library.

    Attributes:
      library, id: name of the library and of the item.
      image_key: content key and size of the image.
      limits: pixel limits `min_pixels` and `max_pixels`.
      entry: entry key of its cache entries.
      file: name of the file with its bytes; None: they are not stored.
      metadata: description from the user.
      added: seconds since the epoch.
      expires: end of its lifetime in seconds since the epoch; None: no end.
      version: unique id of this version.
      salt: salt of its cache entries.
    """

    library: str
    id: str
    image_key: ImageKey
    limits: Mapping[str, int]
    entry: str
    file: str | None
    metadata: Mapping[str, Any]
    added: float
    expires: float | None
    version: str = field(default_factory=lambda: uuid.uuid4().hex)
    salt: Salt = field(default=None, repr=False)


class OrphanData(NamedTuple):
    """Cache entries, and possibly a file, that belong to no item."""

    number: int
    entry: str
    file: str | None


def read_item(salt: Salt, row: Sequence[Any]) -> Item:
    """Return the item of a row with `COLUMNS`.

    Raises:
      ValueError: the row is damaged.
    """
    library, name, version, content, height, width, limits, entry, file, metadata, added, expires = row
    read = {"limits": _object(limits), "metadata": _object(metadata)}
    checks = {
        "library": isinstance(library, str),
        "id": isinstance(name, str),
        "version": _is(_NAME, version),
        "content": _is(_KEY, content),
        "height": is_a(height, int) and 0 < height < _MAX_SIDE,
        "width": is_a(width, int) and 0 < width < _MAX_SIDE,
        "limits": set(read["limits"]) <= _LIMITS and all(is_a(one, int) for one in read["limits"].values()),
        "entry": _is(_KEY, entry),
        "file": file is None or _is(_NAME, file),
        "added": _is_time(added),
        "expires": expires is None or _is_time(expires),
    }
    for column, is_right in checks.items():
        if not is_right:
            got = dict(zip(COLUMNS.split(", "), row, strict=True))[column]
            raise ValueError(f"{column} has an invalid value: {got!r:.80}")
    image_key = ImageKey(content, height, width)
    return Item(library, name, image_key, read["limits"], entry, file, read["metadata"], added, expires, version, salt)


def read_orphan(row: Sequence[Any]) -> OrphanData:
    """Return the data that belong to no item, of a row with number, entry and file.

    Raises:
      ValueError: the row is damaged.
    """
    number, entry, file = row
    if not (_is(_KEY, entry) and (file is None or _is(_NAME, file))):
        raise ValueError(f"entry or file has an invalid value: {entry!r:.80}, {file!r:.80}")
    return OrphanData(number, entry, file)


def _is(pattern: re.Pattern[str], value: Any) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _is_time(value: Any) -> bool:
    return is_a(value, (int, float)) and math.isfinite(value)


def _object(text: Any) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"limits and metadata must be JSON, got {text!r:.80}: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"limits and metadata must be objects, got {text!r:.80}")
    return value


_log = logging.getLogger(__name__)

_PART = ".part"


class ItemFiles:
    """Files with the image bytes of items.

    Args:
      folder: folder of the files; None: no bytes can be stored.

    Attributes:
      damaged: damaged index rows and files found since the process started.
    """

    def __init__(self, folder: pathlib.Path | None):
        self._folder = folder
        self.damaged = 0

    @property
    def keeps_files(self) -> bool:
        """True if image bytes can be stored."""
        return self._folder is not None

    def read(self, item: Item, *, called: str) -> bytes:
        """Return the encoded image file of an item.

        Args:
          item: the item.
          called: name of the image in errors.

        Raises:
          ValueError: the file was not stored, or cannot be read.
        """
        problem = f"{called} is {item.id!r} of library {item.library!r}: its cache entries cannot be used"
        if item.file is None or self._folder is None:
            raise ValueError(f"{problem}, and its bytes are not stored: add it again with keep_bytes=True")
        try:
            return (self._folder / item.file).read_bytes()
        except OSError as error:
            raise ValueError(f"{problem}, and its bytes cannot be read ({error.strerror}): add it again") from error

    def lose(self, item: Item, *, called: str) -> ValueError:
        """Delete the damaged file of an item; return the error to raise."""
        self.damaged += 1
        _log.warning("the bytes of item %r of library %r are damaged and deleted", item.id, item.library)
        if item.file is not None and self._folder is not None:
            with contextlib.suppress(OSError):
                (self._folder / item.file).unlink(missing_ok=True)
        return ValueError(f"{called} is {item.id!r} of library {item.library!r}: its bytes are damaged, add it again")

    def keep(self, file: str, encoded: bytes) -> None:
        """Store the bytes of an image atomically.

        Raises:
          ValueError: they cannot be written.
        """
        assert self._folder is not None
        part = self._folder / f"{file}{_PART}"
        try:
            with open(part, "wb") as opened:
                opened.write(encoded)
                opened.flush()
                os.fsync(opened.fileno())
            part.rename(self._folder / file)
        except OSError as error:
            raise ValueError(f"image cannot be stored in {self._folder}: {error.strerror}") from error

    def file_bytes(self, file: str) -> int:
        """Return the size of a stored file in bytes; 0 if it does not exist."""
        try:
            return 0 if self._folder is None else (self._folder / file).stat().st_size
        except OSError:
            return 0

    def _unlink(self, file: str) -> None:
        if self._folder is not None:
            for name in (file, f"{file}{_PART}"):
                (self._folder / name).unlink(missing_ok=True)


_FILE, _LOCK, _OPENING = "index.sqlite", "lock", "opening"
FOLDER = LIBRARIES_FOLDER
_PATIENCE = 10.0  # seconds to wait for another process that locks the index
_TABLES = """
CREATE TABLE IF NOT EXISTS items (
  owner TEXT NOT NULL, library TEXT NOT NULL, id TEXT NOT NULL,
  version TEXT NOT NULL,  -- another one with each change
  content TEXT NOT NULL, height INTEGER NOT NULL, width INTEGER NOT NULL, limits TEXT NOT NULL, entry TEXT NOT NULL,
  file TEXT, metadata TEXT NOT NULL, added REAL NOT NULL, expires REAL,
  PRIMARY KEY (owner, library, id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS ends ON items (owner, library, expires) WHERE expires IS NOT NULL;
CREATE TABLE IF NOT EXISTS states (
  owner TEXT NOT NULL, library TEXT NOT NULL,
  state TEXT NOT NULL,  -- another one with each change of its items
  PRIMARY KEY (owner, library)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS loose (
  number INTEGER PRIMARY KEY, owner TEXT NOT NULL, entry TEXT NOT NULL, file TEXT,
  version TEXT  -- of the item that it was; NULL: it was none yet
);
CREATE TABLE IF NOT EXISTS vectors (
  owner TEXT NOT NULL, library TEXT NOT NULL, id TEXT NOT NULL, embedder TEXT NOT NULL, version TEXT NOT NULL,
  vector BLOB NOT NULL, PRIMARY KEY (owner, library, embedder, id)
) WITHOUT ROWID;
"""


type Vector = npt.NDArray[np.float32]


class Use:
    """Token that keeps the cache entries and bytes of one item version alive while it is referenced."""


class Items(ItemFiles):
    """Items of all libraries. Methods may be called from any thread and from several processes.

    Args:
      directory: directory of the disk tier; None: the index is in memory, and no bytes can be stored.
      clock: returns seconds since the epoch.

    Raises:
      ValueError: the index cannot be used, or another process has been opening it for a minute.
    """

    def __init__(self, directory: str | os.PathLike[str] | None, clock: Callable[[], float] = time.time):
        super().__init__(None if directory is None else pathlib.Path(directory).expanduser() / FOLDER)
        self._clock = clock
        self._lock = threading.RLock()
        self._index: sqlite3.Connection | None = None
        self._uses: weakref.WeakValueDictionary[str, Use] = weakref.WeakValueDictionary()  # by version
        self._pid = os.getpid()
        self._adding = threading.RLock()
        self._depth = 0  # nesting of `writing` in the thread that adds

    # For requests.

    def find(self, library: str, name: str, salt: Salt, *, called: str) -> tuple[Item, Use]:
        """Return the item that a salt may use, and a token that keeps it alive.

        Items of the salt come first, then those of its tenant, then the operator's shared ones.

        Args:
          library: name of the library.
          name: id of the item.
          salt: salt of the request.
          called: name of the image in errors.

        Raises:
          ValueError: there is none. The error is the same for items of other owners.
        """
        for owner in _owners(salt):
            with self._lock:
                if (item := self.get(owner, library, name)) is not None:
                    return item, self._uses.setdefault(item.version, Use())
        raise ValueError(f"{called} must be an existing item, but library {short(library)} has no {short(name)}")

    # For libraries.

    def items(self, owner: Salt, library: str) -> list[Item]:
        """Return all items of a library, ordered by id."""
        return self._rows("AND library = ? ORDER BY id", owner, library)

    def count(self, owner: Salt, library: str) -> int:
        """Return the number of items in a library."""
        query = "SELECT COUNT(*) FROM items WHERE owner = ? AND library = ? AND (expires IS NULL OR expires > ?)"
        return int(self._run(query, owner_key(owner), library, self._clock())[0][0])

    def state(self, owner: Salt, library: str) -> tuple[Any, ...]:
        """Return a value that changes whenever an item of a library changes or expires. Its cost does not depend on the
        size.
        """
        query = (
            "SELECT (SELECT state FROM states WHERE owner = ? AND library = ?), "
            "(SELECT COUNT(*) FROM items WHERE owner = ? AND library = ? AND expires <= ?)"
        )
        whose = owner_key(owner), library
        return tuple(self._run(query, *whose, *whose, self._clock())[0])

    def libraries(self, owner: Salt) -> list[str]:
        """Return the names of an owner's libraries that have items."""
        rows = self._run("SELECT DISTINCT library FROM items WHERE owner = ? ORDER BY library", owner_key(owner))
        return [library for (library,) in rows]

    def expired(self, owner: Salt, library: str) -> list[str]:
        """Return the ids of expired items that are not removed yet."""
        query = "SELECT id FROM items WHERE owner = ? AND library = ? AND expires <= ?"
        return [name for (name,) in self._run(query, owner_key(owner), library, self._clock())]

    def get(self, owner: Salt, library: str, name: str) -> Item | None:
        """Return an item; None if it does not exist or is expired."""
        rows = self._rows("AND library = ? AND id = ?", owner, library, name)
        return rows[0] if rows else None

    def put(self, item: Item, loose: int, vectors: Mapping[str, Vector] | None = None) -> None:
        """Publish an item, replacing the one with its name.

        Args:
          item: the item.
          loose: number of the orphan row of its data, which is deleted.
          vectors: vectors by embedder name.
        """
        owner, image_key = owner_key(item.salt), item.image_key
        with self._changing() as index:
            old = self._one(item.salt, item.library, item.id)
            if old is not None:
                self._loosen(index, owner, old)
            index.execute(
                f"INSERT OR REPLACE INTO items (owner, {COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (owner, item.library, item.id, item.version, image_key.content, image_key.height, image_key.width,
                 json.dumps(dict(item.limits)), item.entry, item.file, json.dumps(dict(item.metadata)), item.added,
                 item.expires),
            )  # fmt: skip
            index.execute("DELETE FROM loose WHERE number = ?", (loose,))
            _note_change(index, owner, item.library)
            for embedder, vector in (vectors or {}).items():
                _put_vectors(index, owner, item.library, embedder, {item.id: (item.version, vector)})

    def describe(
        self,
        owner: Salt,
        library: str,
        name: str,
        metadata: Mapping[str, Any],
        until: Callable[[float | None], float | None],
    ) -> bool:
        """Replace the metadata of an item, and its expiration time by `until` of the old one.

        Returns:
          Whether the item exists.
        """
        with self._changing() as index:
            old = self._one(owner, library, name)
            if old is None:
                return False
            expires = until(old.expires)
            command = "UPDATE items SET metadata = ?, expires = ? WHERE owner = ? AND library = ? AND id = ?"
            index.execute(command, (json.dumps(dict(metadata)), expires, owner_key(owner), library, name))
            _note_change(index, owner_key(owner), library)
            return True

    def remove(self, owner: Salt, library: str, name: str) -> bool:
        """Remove an item; return whether it existed."""
        with self._changing() as index:
            old = self._one(owner, library, name)
            if old is None:
                return False
            self._loosen(index, owner_key(owner), old)
            for table in ("items", "vectors"):
                command = f"DELETE FROM {table} WHERE owner = ? AND library = ? AND id = ?"
                index.execute(command, (owner_key(owner), library, name))
            _note_change(index, owner_key(owner), library)
            return True

    # Data that belong to no item.

    def begin(self, owner: Salt, entry: str, file: str | None) -> int:
        """Note cache entries, and possibly a file, that belong to no item yet; return the number of the row."""
        with self._changing() as index:
            command = "INSERT INTO loose (owner, entry, file) VALUES (?, ?, ?)"
            return int(index.execute(command, (owner_key(owner), entry, file)).lastrowid or 0)

    def loose(self, owner: Salt) -> list[OrphanData]:
        """Return an owner's data that belong to no item and no request in flight. Call it within `writing`."""
        rows = self._run("SELECT number, entry, file, version FROM loose WHERE owner = ?", owner_key(owner))
        found = []
        for *row, version in rows:
            try:
                loose = read_orphan(row)
            except ValueError as error:
                _log.warning("row %.80r of data without an item is damaged and deleted: %s", row[0], error)
                self._delete_damaged("loose", number=row[0])
                continue
            if version not in self._uses:
                found.append(loose)
        return found

    def is_used(self, owner: Salt, entry: str) -> bool:
        """Return whether an item has this entry key."""
        return bool(self._run("SELECT 1 FROM items WHERE owner = ? AND entry = ? LIMIT 1", owner_key(owner), entry))

    def forget(self, loose: OrphanData) -> None:
        """Delete the file of data that belong to no item, and their row."""
        if loose.file is not None:
            self._unlink(loose.file)
        with self._changing() as index:
            index.execute("DELETE FROM loose WHERE number = ?", (loose.number,))

    @contextlib.contextmanager
    def writing(self, *, waits: bool = True) -> Iterator[bool]:
        """Lock the adding and cleaning of items against other threads and processes; yield whether this thread has the
        lock.

        Args:
          waits: wait for the lock.
        """
        if not self._adding.acquire(blocking=waits):
            yield False
            return
        with contextlib.ExitStack() as stack:
            stack.callback(self._adding.release)
            if self._folder is None or self._depth:
                yield True
                return
            with self._explained():
                make_folder(self._folder)
                is_mine = stack.enter_context(held(self._folder / _LOCK, waits=waits))
            self._depth = int(is_mine)
            stack.callback(setattr, self, "_depth", 0)
            yield is_mine

    # Vectors of items.

    def vectors(self, owner: Salt, library: str, embedder: str) -> dict[str, tuple[str, Vector]]:
        """Return an embedder's vectors by id, each with the version of its item. Damaged vectors are deleted."""
        query = "SELECT id, version, vector FROM vectors WHERE owner = ? AND library = ? AND embedder = ?"
        found = {}
        for name, version, vector in self._run(query, owner_key(owner), library, embedder):
            if isinstance(vector, bytes) and vector and len(vector) % 4 == 0:
                found[name] = version, np.frombuffer(vector, "<f4")
            if name not in found or not np.isfinite(found[name][1]).all():
                found.pop(name, None)
                _log.warning("the vector of item %.80r of library %.80r is damaged and deleted", name, library)
                whose = {"owner": owner_key(owner), "library": library}
                self._delete_damaged("vectors", **whose, embedder=embedder, id=name)
        return found

    def put_vectors(self, owner: Salt, library: str, embedder: str, given: Mapping[str, tuple[str, Vector]]) -> None:
        """Store vectors by id, each with the version of its item."""
        with self._changing() as index:
            _put_vectors(index, owner_key(owner), library, embedder, given)

    def close(self) -> None:
        """Close the index."""
        if os.getpid() != self._pid:  # in a forked child: the index belongs to the parent
            return
        with self._lock:
            if self._index is not None:
                self._index.close()
            self._index = None

    def _one(self, owner: Salt, library: str, name: str) -> Item | None:
        """Return an item even if it is expired."""
        rows = self._rows("AND library = ? AND id = ?", owner, library, name, ended=True)
        return rows[0] if rows else None

    def _rows(self, where: str, owner: Salt, *values: Any, ended: bool = False) -> list[Item]:
        rows = self._run(f"SELECT {COLUMNS} FROM items WHERE owner = ? {where}", owner_key(owner), *values)
        now, items = self._clock(), []
        for row in rows:
            try:
                item = read_item(owner, row)
            except ValueError as error:
                _log.warning("item %.80r of library %.80r is damaged and deleted: %s", row[1], row[0], error)
                self._delete_damaged("items", owner=owner_key(owner), library=row[0], id=row[1])
                continue
            if ended or item.expires is None or item.expires > now:
                items.append(item)
        return items

    def _delete_damaged(self, table: str, **where: Any) -> None:
        """Delete a damaged row. If that fails, the next read deletes it."""
        self.damaged += 1
        command = f"DELETE FROM {table} WHERE {' AND '.join(f'{column} = ?' for column in where)}"
        with contextlib.suppress(ValueError):
            self._run(command, *where.values())

    def _loosen(self, index: sqlite3.Connection, owner: str, item: Item) -> None:
        index.execute(
            "INSERT INTO loose (owner, entry, file, version) VALUES (?, ?, ?, ?)",
            (owner, item.entry, item.file, item.version),
        )

    def _run(self, command: str, *values: Any) -> list[Any]:
        with self._lock, self._explained():
            return self._opened().execute(command, values).fetchall()

    @contextlib.contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._explained():
            index = self._opened()
            index.execute("BEGIN IMMEDIATE")
            try:
                yield index
                index.execute("COMMIT")
            except BaseException:
                if index.in_transaction:
                    index.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            place = self._folder or "memory"
            raise ValueError(
                f"the index of libraries in {place} cannot be used: {error}; only if it is damaged, delete that folder "
                "and add the items again"
            ) from error

    def _opened(self) -> sqlite3.Connection:
        """Return the index, opening it at the first use."""
        if self._index is None:
            if self._folder is None:
                self._index = _connected(":memory:")
            else:
                make_folder(self._folder)
                log_older(self._folder.parent, FOLDER)
                with held(self._folder / _OPENING, timeout=LOCK_TIMEOUT):  # SQLite waits for no process here
                    self._index = _connected(str(self._folder / _FILE))
        return self._index


def _connected(place: str) -> sqlite3.Connection:
    index = sqlite3.connect(place, timeout=_PATIENCE, isolation_level=None, check_same_thread=False)
    try:
        index.execute("PRAGMA journal_mode = WAL")
        index.execute("PRAGMA synchronous = FULL")  # added items survive a crash
        index.executescript(_TABLES)
    except BaseException:
        index.close()
        raise
    return index


def _owners(salt: Salt) -> list[Salt]:
    """Return the owners whose items a request may use: its salt, its tenant and the operator."""
    return list(dict.fromkeys((salt, *([salt.of_tenant] if isinstance(salt, TenantSalt) else []), SHARED)))


def _note_change(index: sqlite3.Connection, owner: str, library: str) -> None:
    index.execute("INSERT OR REPLACE INTO states VALUES (?, ?, ?)", (owner, library, uuid.uuid4().hex))


def _put_vectors(
    index: sqlite3.Connection, owner: str, library: str, embedder: str, given: Mapping[str, tuple[str, Vector]]
) -> None:
    index.executemany(
        "INSERT OR REPLACE INTO vectors (owner, library, embedder, id, version, vector) SELECT ?, ?, ?, ?, ?, ? WHERE "
        "EXISTS (SELECT 1 FROM items WHERE owner = ? AND library = ? AND id = ? AND version = ?)",
        [
            (
                owner,
                library,
                embedder,
                name,
                version,
                np.asarray(vector, "<f4").tobytes(),
                owner,
                library,
                name,
                version,
            )
            for name, (version, vector) in given.items()
        ],
    )
