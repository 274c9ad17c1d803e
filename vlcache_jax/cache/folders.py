"""Folders of stores: files that one process locks at a time, and folders of older formats."""

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

_PATIENCE = 3.0  # seconds until a log line names the process that holds the lock
LOCK_TIMEOUT = 60.0  # seconds that opening waits; a large directory takes some, a stopped process never finishes
_TICK = 0.05  # seconds between attempts
_MAX_HOLDER = 200  # bytes of the name of the holder


@contextlib.contextmanager
def held(
    path: pathlib.Path, *, waits: bool = True, timeout: float | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[bool]:
    """Lock a file, which names its holder meanwhile; yield whether this process has the lock.

    Args:
      path: path of the lock file, which is created if it does not exist.
      waits: wait for another process that has the lock. A log line reports it after 3 seconds.
      timeout: maximum wait in seconds; None: no limit.
      clock: returns monotonic seconds.

    Raises:
      TimeoutError: another process still has the lock after `timeout` seconds.
      OSError: the path is not a regular file, or cannot be opened.
    """
    descriptor = _open(path)
    try:
        is_mine = _take(descriptor) or (waits and _wait(path, descriptor, timeout, clock))
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
    no_file = f"{path} must be a regular file; delete the existing one"
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


def _wait(path: pathlib.Path, descriptor: int, timeout: float | None, clock: Callable[[], float]) -> bool:
    begun, is_logged = clock(), False
    while not _take(descriptor):
        waited = clock() - begun
        if timeout is not None and waited >= timeout:
            raise TimeoutError(
                f"{path} must be unlocked within {timeout:.0f} s, but {_holder(descriptor)} holds the lock: wait until "
                "that process has opened the directory, or end it if it hangs"
            )
        if waited >= _PATIENCE and not is_logged:
            _log.warning("waiting for the lock %s, held by %s", path, _holder(descriptor))
            is_logged = True
        time.sleep(_TICK)
    return True


def _take(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sign(descriptor: int, holder: str) -> None:
    with contextlib.suppress(OSError):  # on a full disk the lock has no name of the holder
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder.encode(), 0)


def _holder(descriptor: int) -> str:
    with contextlib.suppress(OSError):
        holder = os.pread(descriptor, _MAX_HOLDER, 0).decode(errors="replace")
        if holder.startswith("process ") and holder.isprintable():
            return holder
    return "another process"


LIBRARIES_FOLDER = "libraries-1"
"""Folder of libraries in the directory of the disk tier. The number changes when older libraries must not be read."""


def is_older(name: str, folder: str) -> bool:
    """Return whether `name` is a folder of an older format.

    Args:
      name: name of a folder.
      folder: folder of the current format, such as "vlcache-3".
    """
    stem, _, number = folder.rpartition("-")
    found = re.fullmatch(rf"{stem}-(\d{{1,4}})", name)
    return found is not None and int(found[1]) < int(number)


def older_folders(directory: pathlib.Path, *folders: str) -> list[pathlib.Path]:
    """Return the folders of older formats in a directory, ordered by name.

    Args:
      directory: directory to search.
      folders: folders of the current formats.

    Raises:
      OSError: the directory cannot be listed.
    """
    there = (path for path in directory.iterdir() if path.is_dir() and not path.is_symlink())
    return sorted(path for path in there if any(is_older(path.name, folder) for folder in folders))


def log_older(directory: pathlib.Path, folder: str) -> None:
    """Log a warning for each folder of an older format."""
    with contextlib.suppress(OSError):
        for path in older_folders(directory, folder):
            _log.warning(
                "%s has an older format and is not read: `vlcache cache stats %s` shows its size, "
                "`vlcache cache prune %s SIZE --old-formats` deletes it",
                path, directory, directory,
            )  # fmt: skip


def older_bytes(directory: pathlib.Path, *folders: str) -> dict[str, int]:
    """Return the total file size of each folder of an older format in bytes, by name; see `older_folders`."""
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
      ValueError: an engine of that format uses it.
      FileNotFoundError: there is no such folder.
      OSError: it cannot be deleted.
    """
    folder = directory / name
    if folder not in older_folders(directory, *folders):
        raise FileNotFoundError(f"{folder} must be a folder of an older format")
    for path in folder.glob("*.writer"):
        with open(path, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"{folder} must not be in use, but an engine holds {path.name}: close it") from None
    shutil.rmtree(folder)
