"""The hidden directory of a running conversion, which is renamed to the destination when it is complete.

It is locked until its process ends in any way. The lock distinguishes directories of killed conversions from those of
running ones.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pathlib
import re
import shutil
import time
from collections.abc import Iterator

from vlcache_jax.common.files import check_free
from vlcache_jax.convert.progress import gigabytes

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def appearing(destination: pathlib.Path, nbytes: int) -> Iterator[pathlib.Path]:
    """Yield a directory to write `nbytes` into. It becomes the destination, or is removed after an error.

    Raises:
      FileExistsError: the destination is not empty, or another process is converting into it.
      OSError: the disk has too little space, or becomes full.
    """
    partial = destination.parent / f".{destination.name}.converting"
    partial.mkdir(parents=True, exist_ok=True)
    with _locked(partial):
        try:
            _clear(partial)  # a killed run leaves its files
            free = shutil.disk_usage(partial).free
            if free < nbytes:
                raise OSError(f"destination must have {gigabytes(nbytes)} of free disk space, got {gigabytes(free)}")
            try:
                yield partial
                _flush(partial)
            except Exception as error:
                if (code := _code_of_full_disk(error)) is None:
                    raise
                why = "" if code == errno.ENOSPC else f" ({os.strerror(code)})"
                raise OSError(
                    f"disk full while writing {destination}: the checkpoint needs about {gigabytes(nbytes)}, "
                    f"but {gigabytes(free)} were free{why}"
                ) from error
            check_free("destination", destination)
            partial.rename(destination)
            _flush_one(destination.parent)
        except BaseException:
            _remove(partial)
            raise


def describe_leftovers(folder: pathlib.Path, but: pathlib.Path | None = None) -> list[str]:
    """Return a sentence for each directory that a killed conversion left in a folder, with its size.

    Args:
      but: destination whose leftovers are not listed, because its conversion removes them.
    """
    skipped = None if but is None else f".{but.name}.converting"
    found = []
    with contextlib.suppress(OSError):  # the folder does not exist or cannot be read
        found = sorted(path for path in folder.glob(".*.converting") if path.name != skipped and _is_abandoned(path))
    return [
        f"a killed conversion left {path} ({gigabytes(_size(path))}): delete it, "
        f"or convert to {folder / path.name[1 : -len('.converting')]} again"
        for path in found
    ]


def _is_abandoned(directory: pathlib.Path) -> bool:
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # a running conversion has the lock, or the file system has no locks
        return False
    finally:
        os.close(descriptor)
    return True


def _size(directory: pathlib.Path) -> int:
    total = 0
    for folder, _, files in os.walk(directory):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def _code_of_full_disk(error: BaseException | None) -> int | None:
    """Return the system's error code if a full disk, a quota or a file size limit caused an error, else None."""
    while error is not None:
        # TensorStore raises ValueErrors, with the code at the end of their text.
        match = re.search(r"os_error_code='(\d+)'", str(error))
        code = error.errno if isinstance(error, OSError) else int(match[1]) if match else None
        if code in _FULL:
            return code
        error = error.__cause__ or error.__context__
    return None


@contextlib.contextmanager
def _locked(directory: pathlib.Path) -> Iterator[None]:
    """Lock a directory against a second conversion into it. The lock ends with the process."""
    with contextlib.ExitStack() as opened:
        try:
            descriptor = os.open(directory, os.O_RDONLY)
            opened.callback(os.close, descriptor)
            _lock(descriptor)
            if not os.path.samestat(os.fstat(descriptor), directory.stat()):
                raise FileNotFoundError  # another conversion finished in between, and its destination is locked
        except (BlockingIOError, FileNotFoundError):
            raise FileExistsError(f"another process is converting into {directory}: wait until it ends") from None
        yield


def _lock(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(0.005)  # a search for leftovers holds the lock for an instant
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove(directory: pathlib.Path) -> None:
    """Remove a directory. Retry for some seconds, because a thread of Orbax may still close a file."""
    for _ in range(50):
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return
        time.sleep(0.1)


def _clear(directory: pathlib.Path) -> None:
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _flush(directory: pathlib.Path) -> None:
    """Flush files to disk, so that a power cut cannot leave a renamed directory of empty files."""
    for folder, _, files in os.walk(directory):
        for path in [*(os.path.join(folder, name) for name in files), folder]:
            _flush_one(path)


def _flush_one(path: str | pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
