"""Files that commands read and write. Access is checked before the work, and files are written atomically."""

from __future__ import annotations

import errno
import os
import pathlib
import secrets
from collections.abc import Sequence

PICTURES = (".png", ".pdf", ".svg")


def check_writable(name: str, path: str | os.PathLike[str] | None, suffixes: tuple[str, ...] = ()) -> None:
    """Create the folder of an output file and check that the file can be written.

    Args:
      name: name of the argument, for the error.
      path: path of the file; None: do nothing.
      suffixes: allowed suffixes; empty: any.

    Raises:
      ValueError: the file cannot be written or has another suffix.
    """
    if path is None:
        return
    path = pathlib.Path(path)
    if suffixes and path.suffix.lower() not in suffixes:
        raise ValueError(f"{name} must end in {' or '.join(suffixes)}, got {path}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file() or path.is_dir():
            path.open("ab").close()
        elif not path.exists():  # a pipe would wait for its reader
            part = _part(path)
            part.touch()
            part.unlink()
    except OSError as error:
        raise ValueError(f"{name} must be a file that can be written, got {path}: {error.strerror}") from error


def make_folder(path: pathlib.Path) -> None:
    """Create a folder that only its owner can access (mode 0700), with its parents.

    Raises:
      OSError: it cannot be created. If a file or a broken link is in the way, the message names it and the remedy.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        for part in (*reversed(path.parents), path):
            if part.is_symlink() and not part.exists():
                what = "a broken symbolic link: delete it"
            elif part.exists() and not part.is_dir():
                what = "a file: move it away"
            else:
                continue
            raise NotADirectoryError(f"{part} is {what}, or name another directory") from error
        raise


def check_readable(name: str, path: str | os.PathLike[str]) -> None:
    """Check that a file can be read.

    Raises:
      ValueError: it does not exist, is not a regular file, or cannot be read.
    """
    try:
        if not pathlib.Path(path).is_file():
            raise FileNotFoundError(
                errno.ENOENT, "not a regular file" if pathlib.Path(path).exists() else "no such file"
            )
        open(path, "rb").close()
    except OSError as error:
        raise ValueError(f"{name} must be a file that can be read, got {path}: {error.strerror}") from error


def check_all_readable(name: str, paths: Sequence[str | os.PathLike[str]]) -> None:
    """Check that files can be read and that each is named once.

    Raises:
      ValueError: a file cannot be read, is not a regular file, or is named twice.
    """
    for number, path in enumerate(paths):
        check_readable(name, path)
        if any(os.path.samefile(path, other) for other in paths[:number]):
            raise ValueError(f"{name} must name each file once, got {path} twice")


def check_free(name: str, path: pathlib.Path) -> None:
    """Check that a directory can be created at a path.

    Raises:
      FileExistsError: the path exists and is not an empty directory.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise FileExistsError(f"{name} must be a new path or an empty directory, got {path}")


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file atomically, creating its folder. Devices and pipes are written directly."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():  # a device or a pipe
        path.write_bytes(data)
        return
    part = _part(path)
    try:
        part.write_bytes(data)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def cache_home() -> pathlib.Path:
    """Return the folder of derived files: compiled programs and results of kernel self-tests."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "vlcache-jax"


def _part(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(
        f"{path.name}.{secrets.token_hex(4)}.part"
    )  # unique: several processes may write the same file
