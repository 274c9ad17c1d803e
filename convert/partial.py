"""The hidden directory that a conversion writes into, which becomes the destination when it is complete.

It is locked while its process lives, however that ends; so what a killed conversion has left is told from what a
running one still needs.
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
    """A directory to write `nbytes` into, which becomes the destination if all goes well and disappears if not.

    Raises:
      FileExistsError: the destination holds something, or another process is converting into it.
      OSError: the disk is too small, or becomes full.
    """
    partial = destination.parent / f".{destination.name}.converting"
    partial.mkdir(parents=True, exist_ok=True)
    with _locked(partial):
        try:
            _clear(partial)  # a run that was killed leaves its files
            free = shutil.disk_usage(partial).free
            if free < nbytes:
                raise OSError(f"destination must have room for {gigabytes(nbytes)}, got {gigabytes(free)} free")
            try:
                yield partial
                _flush(partial)
            except Exception as error:
                if (code := _code_of_full_disk(error)) is None:
                    raise
                why = "" if code == errno.ENOSPC else f" ({os.strerror(code)})"
                raise OSError(
                    f"disk full while writing {destination}: needs about {gigabytes(nbytes)}, "
                    f"{gigabytes(free)} were free{why}"
                ) from error
            check_free("destination", destination)
            partial.rename(destination)
            _flush_one(destination.parent)
        except BaseException:
            _remove(partial)
            raise


def describe_leftovers(folder: pathlib.Path, but: pathlib.Path | None = None) -> list[str]:
    """A sentence for each directory that a killed conversion has left in a folder, with its size.

    Args:
      but: a destination whose own leftovers are not named, since they are about to be removed.
    """
    skipped = None if but is None else f".{but.name}.converting"
    found = []
    with contextlib.suppress(OSError):  # a folder that cannot be read, or is none
        found = sorted(path for path in folder.glob(".*.converting") if path.name != skipped and _is_abandoned(path))
    return [
        f"a conversion that was killed has left {path} ({gigabytes(_size(path))}): delete it, "
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
    except OSError:  # locked by a running conversion, or a file system without locks
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
    """The system's code for a disk, quota or file size that is used up, if that is what an error comes from."""
    while error is not None:
        # TensorStore raises ValueErrors, with the code at the end of their text.
        told = re.search(r"os_error_code='(\d+)'", str(error))
        code = error.errno if isinstance(error, OSError) else int(told[1]) if told else None
        if code in _FULL:
            return code
        error = error.__cause__ or error.__context__
    return None


@contextlib.contextmanager
def _locked(directory: pathlib.Path) -> Iterator[None]:
    """Keeps out a second conversion into one destination; the lock goes with the process, however that ends."""
    with contextlib.ExitStack() as opened:
        try:
            descriptor = os.open(directory, os.O_RDONLY)
            opened.callback(os.close, descriptor)
            _lock(descriptor)
            if not os.path.samestat(os.fstat(descriptor), directory.stat()):
                raise FileNotFoundError  # the other one finished in between, and what is locked is its destination
        except (BlockingIOError, FileNotFoundError):
            raise FileExistsError(f"another process is converting into {directory}") from None
        yield


def _lock(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(0.005)  # who looks for leftovers holds it for an instant
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove(directory: pathlib.Path) -> None:
    """Tries for some seconds, since Orbax may be closing a file in a thread of its own."""
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
    """To the disk, so that no power cut leaves a renamed directory of empty files."""
    for folder, _, files in os.walk(directory):
        for path in [*(os.path.join(folder, name) for name in files), folder]:
            _flush_one(path)


def _flush_one(path: str | pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
