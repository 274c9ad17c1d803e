"""Files that commands read and write: whether they can is known before the work, and what is written appears whole."""

from __future__ import annotations

import errno
import os
import pathlib
import secrets
from collections.abc import Sequence

PICTURES = (".png", ".pdf", ".svg")


def check_writable(name: str, path: str | os.PathLike[str] | None, suffixes: tuple[str, ...] = ()) -> None:
    """Makes the folder of a file that will be written, and sees that it can be.

    Args:
      name: of the argument, for the error.
      path: of the file; None is none.
      suffixes: of which it must have one.

    Raises:
      ValueError: it cannot be written, or is called otherwise.
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
    """Makes a folder for its owner alone, and those above it, if it does not exist.

    Raises:
      OSError: it cannot be made. It says which file or link is in the way, if one is, and what to do.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        for part in (*reversed(path.parents), path):
            if part.is_symlink() and not part.exists():
                what = "a link that leads nowhere: delete it"
            elif part.exists() and not part.is_dir():
                what = "a file: move it away"
            else:
                continue
            raise NotADirectoryError(f"{part} is {what}, or name another directory") from error
        raise


def check_readable(name: str, path: str | os.PathLike[str]) -> None:
    """Sees that a file can be read.

    Raises:
      ValueError: it cannot, or is none.
    """
    try:
        if not pathlib.Path(path).is_file():
            raise FileNotFoundError(errno.ENOENT, "no file" if pathlib.Path(path).exists() else "no such file")
        open(path, "rb").close()
    except OSError as error:
        raise ValueError(f"{name} must be a file that can be read, got {path}: {error.strerror}") from error


def check_all_readable(name: str, paths: Sequence[str | os.PathLike[str]]) -> None:
    """Sees that files can be read, and that each is named once.

    Raises:
      ValueError: one cannot, or is none, or comes twice.
    """
    for number, path in enumerate(paths):
        check_readable(name, path)
        if any(os.path.samefile(path, other) for other in paths[:number]):
            raise ValueError(f"{name} must name each file once, got {path} twice")


def check_free(name: str, path: pathlib.Path) -> None:
    """Sees that a directory can be made in a place.

    Raises:
      FileExistsError: something is there that is no empty directory.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise FileExistsError(f"{name} must not exist or be an empty directory, got {path}")


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Writes a file that appears only when it is complete; makes its folder."""
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
    """The folder of what can be made anew at any time: compiled programs, verdicts on kernels."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "vlcache-jax"


def _part(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")  # several may write the same file
