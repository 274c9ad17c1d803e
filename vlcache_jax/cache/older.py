"""Folders that engines of older formats left in a directory: no engine of this one reads or counts them."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import pathlib
import re
import shutil

_log = logging.getLogger(__name__)

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
