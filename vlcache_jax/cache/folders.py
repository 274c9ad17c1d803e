"""Folders of stores: files that one process at a time holds, and what older formats left."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import pathlib
import re
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterator

_log = logging.getLogger(__name__)

_PATIENCE = 3.0  # seconds until a log line says what is waited for
MOST = 60.0  # seconds that opening waits: a large directory takes some, a stopped process takes for ever
_TICK = 0.05  # seconds between two tries
_MOST_HOLDER = 200  # bytes that say who holds a file


@contextlib.contextmanager
def held(
    path: pathlib.Path, *, waits: bool = True, most: float | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[bool]:
    """Hold a file, which says meanwhile who holds it; yield whether this process does.

    Args:
      waits: for another process that holds it. A log line says so after 3 seconds.
      most: seconds that it waits; None: as long as it takes.
      clock: seconds that only grow.

    Raises:
      TimeoutError: another process still holds it after `most` seconds.
      OSError: it cannot be a file, or cannot be opened.
    """
    descriptor = _open(path)
    try:
        is_mine = _take(descriptor) or (waits and _wait(path, descriptor, most, clock))
        if is_mine:
            _sign(descriptor, f"process {os.getpid()} on {socket.gethostname()}")
        try:
            yield is_mine
        finally:
            if is_mine:
                _sign(descriptor, "")
    finally:
        os.close(descriptor)


def _open(path: pathlib.Path) -> int:
    no_file = f"{path} must be a file: delete what is there"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise OSError(no_file) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(no_file)
    return descriptor


def _wait(path: pathlib.Path, descriptor: int, most: float | None, clock: Callable[[], float]) -> bool:
    begun, has_told = clock(), False
    while not _take(descriptor):
        waited = clock() - begun
        if most is not None and waited >= most:
            raise TimeoutError(
                f"{path} must be free within {most:.0f} s, but {_holder(descriptor)} holds it: wait until that process "
                "has opened the directory, or end it if it does not go on"
            )
        if waited >= _PATIENCE and not has_told:
            _log.warning("waiting for %s, which %s holds", path, _holder(descriptor))
            has_told = True
        time.sleep(_TICK)
    return True


def _take(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sign(descriptor: int, holder: str) -> None:
    with contextlib.suppress(OSError):  # on a full disk it is held without a name
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder.encode(), 0)


def _holder(descriptor: int) -> str:
    with contextlib.suppress(OSError):
        said = os.pread(descriptor, _MOST_HOLDER, 0).decode(errors="replace")
        if said.startswith("process ") and said.isprintable():
            return said
    return "another process"


LIBRARIES_FOLDER = "libraries-1"
"""Of libraries, in the directory of the disk tier. Its number changes whenever older libraries must not be read."""


def is_older(name: str, folder: str) -> bool:
    """Return whether a name is that of a folder of an older format.

    Args:
      folder: of the format in use, such as "vlcache-3".
    """
    stem, _, number = folder.rpartition("-")
    found = re.fullmatch(rf"{stem}-(\d{{1,4}})", name)
    return found is not None and int(found[1]) < int(number)


def older_folders(directory: pathlib.Path, *folders: str) -> list[pathlib.Path]:
    """Return the folders of older formats in a directory, by name.

    Args:
      folders: those of the formats in use.

    Raises:
      OSError: it cannot be listed.
    """
    there = (path for path in directory.iterdir() if path.is_dir() and not path.is_symlink())
    return sorted(path for path in there if any(is_older(path.name, folder) for folder in folders))


def log_older(directory: pathlib.Path, folder: str) -> None:
    """Log a line for each folder of an older format."""
    with contextlib.suppress(OSError):
        for path in older_folders(directory, folder):
            _log.warning(
                "%s has an older format and is not read: `vlcache cache stats %s` shows its size, "
                "`vlcache cache prune %s SIZE --old-formats` deletes it",
                path, directory, directory,
            )  # fmt: skip


def older_bytes(directory: pathlib.Path, *folders: str) -> dict[str, int]:
    """Return the size of all files below each folder of an older format, by its name; see `older_folders`."""
    sizes: dict[str, int] = {}
    for folder in older_folders(directory, *folders):
        sizes[folder.name] = 0
        for place, _, names in os.walk(folder):
            for name in names:
                with contextlib.suppress(OSError):
                    sizes[folder.name] += os.lstat(os.path.join(place, name)).st_size
    return sizes


def remove_folder(directory: pathlib.Path, name: str, *folders: str) -> None:
    """Delete a folder of an older format; see `older_folders`.

    Raises:
      ValueError: an engine of that format still uses it.
      OSError: there is none of that name, or it cannot be deleted.
    """
    folder = directory / name
    if folder not in older_folders(directory, *folders):
        raise FileNotFoundError(f"{folder} must be a folder of an older format")
    for path in folder.glob("*.writer"):
        with open(path, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"{folder} must not be in use, but an engine keeps {path.name}: close it") from None
    shutil.rmtree(folder)
