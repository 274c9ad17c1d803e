"""What images may be read from where, and the reading."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any, cast

from vlcache_jax.checks import check_flags, parse_bytes, short, shorten
from vlcache_jax.inputs.fetch import TooLargeError, domain_name, fetch, read_at_most

# A pipe or a terminal that takes the place of a file between a check and the opening must not hold up the caller.
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | getattr(os, "O_PATH", os.O_RDONLY)


@dataclass(frozen=True)
class Access:
    """What images may be read from where.

    Attributes:
        allow_remote_images: whether http(s) URLs are fetched.
        allowed_media_domains: hosts that may be asked, also by redirects; None is all. A name means itself alone, one
            that begins with a dot all names that end so. Only public addresses are dialled, but for one that stands
            here as a number, such as "127.0.0.1", and is written so in the URL.
        allowed_local_media_path: folder that images on disk must lie in, with links resolved; "/" allows all files,
            None or "" none.
        max_image_bytes: of a file, of encoded bytes and of what a URL brings; a number or a string such as "64MiB".

    Raises:
        ValueError: an argument of another type or form, or a folder that is none.
    """

    allow_remote_images: bool = False
    allowed_media_domains: Sequence[str] | None = None
    allowed_local_media_path: str | os.PathLike[str] | None = "/"
    max_image_bytes: int | str = "64MiB"

    def __post_init__(self) -> None:
        check_flags(allow_remote_images=self.allow_remote_images)
        for key, value in (
            ("allowed_media_domains", _check_domains(self.allowed_media_domains)),
            ("allowed_local_media_path", _check_folder(self.allowed_local_media_path)),
            ("max_image_bytes", parse_bytes(self.max_image_bytes, "max_image_bytes")),
        ):
            object.__setattr__(self, key, value)

    def check_size(self, count: int, name: str) -> None:
        """Sees that `count` bytes are not too many.

        Raises:
            ValueError: they are.
        """
        if count > self._max_bytes:
            raise ValueError(f"{name} must have at most {self._max_bytes} bytes, got {count}")

    def fetch(self, url: str, name: str) -> bytes:
        """What an http(s) URL brings.

        Raises:
            ValueError: it is not allowed, fails, takes more than 20 seconds or brings too much.
        """
        if not self.allow_remote_images:
            raise ValueError(f"{name} must be local unless allow_remote_images=True, got {_quoted(url)}")
        return fetch(url, domains=self.allowed_media_domains, max_bytes=self._max_bytes, name=name)

    def read_file(self, path: str | os.PathLike[str], name: str) -> bytes:
        """The content of a regular file; "~" at the beginning of its path is the home directory.

        Raises:
            ValueError: the path is not allowed, in the same words whether it exists or not; or it leads to no file, to
                one that cannot be read, or to one that is too large.
        """
        folder = cast(str, self.allowed_local_media_path)
        try:
            where = os.path.expanduser(os.fsdecode(path))
            if folder != "/":
                # `..` goes first: what it means behind a link would tell where that link leads.
                where = os.path.realpath(os.path.abspath(where))
                if not folder or not Path(where).is_relative_to(folder):
                    raise ValueError("not allowed by allowed_local_media_path")
            with _open(where, folder) as file:
                if os.fstat(file.fileno()).st_size > self._max_bytes:
                    raise TooLargeError
                return read_at_most(self._max_bytes, file.read)  # it may have grown
        except TooLargeError:
            raise self._too_large(name) from None
        except FileNotFoundError:
            reason = "no such file"
        except (OSError, TypeError, ValueError) as error:
            reason = shorten(getattr(error, "strerror", None) or str(error))
        raise ValueError(f"{name} must be the path of a readable file, got {_quoted(path)}: {reason}")

    def read_open(self, file: Any, name: str) -> bytes:
        """The content of an open file from its beginning, as Pillow reads it; it stands afterwards where it stood.

        Of what cannot be rewound, such as a pipe, it is what is left.

        Raises:
            ValueError: the file is closed, gives text, cannot be read, or is too large.
        """

        def read(count: int) -> bytes | None:
            try:
                piece = file.read(count)
            except UnicodeDecodeError:
                piece = ""
            if not isinstance(piece, bytes | None):
                raise TypeError('it gives text, open it in mode "rb"')
            return piece

        try:
            if not (hasattr(file, "seekable") and file.seekable()):
                return read_at_most(self._max_bytes, read)
            stood = file.tell()
            file.seek(0)
            try:
                return read_at_most(self._max_bytes, read)
            finally:
                file.seek(stood)
        except TooLargeError:
            raise self._too_large(name) from None
        except Exception as error:  # of any class that has a method `read`; a closed file raises a ValueError
            raise ValueError(
                f"{name} must be a file that is open for reading bytes, got {short(file)}: {error}"
            ) from error

    def _too_large(self, name: str) -> ValueError:
        return ValueError(f"{name} must have at most {self._max_bytes} bytes, got a larger file")

    @property
    def _max_bytes(self) -> int:
        return cast(int, self.max_image_bytes)


def _check_domains(domains: object) -> tuple[str, ...] | None:
    if domains is None:
        return None
    if not isinstance(domains, (list, tuple, set, frozenset)):
        raise ValueError(f"allowed_media_domains must be a list of host names, got {short(domains)}")
    return tuple(_check_domain(domain) for domain in domains)


def _check_domain(domain: object) -> str:
    try:
        if isinstance(domain, str):
            return "." + domain_name(domain[1:]) if domain.startswith(".") else domain_name(domain)
    except ValueError:
        pass
    raise ValueError(
        "allowed_media_domains must hold host names, without scheme or port, and addresses in their usual form, "
        f"got {short(domain)}"
    )


def _check_folder(path: object) -> str:
    if path is None or path == "":
        return ""
    try:
        if isinstance(path, (str, os.PathLike)) and os.path.isdir(folder := os.path.expanduser(os.fsdecode(path))):
            return os.path.realpath(folder)
    except (TypeError, ValueError):
        pass
    raise ValueError(f"allowed_local_media_path must be a folder or None, got {_quoted(path)}")


def _open(path: str, folder: str) -> FileIO:
    """Opens a regular file; within a folder no link is followed, as one could have been put there since the check."""
    if folder == "/":
        return _open_regular(path)
    *parents, last = Path(path).relative_to(folder).parts or (".",)
    directory = os.open(folder, _FOLDER)
    try:
        for parent in parents:
            outer, directory = directory, os.open(parent, _FOLDER, dir_fd=directory)
            os.close(outer)
        return _open_regular(last, directory)
    finally:
        os.close(directory)


def _open_regular(path: str, directory: int | None = None) -> FileIO:
    mode = os.stat(path, dir_fd=directory, follow_symlinks=directory is None).st_mode
    if S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "a directory")
    if not S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file")
    links = 0 if directory is None else os.O_NOFOLLOW
    return FileIO(os.open(path, _FILE | links, dir_fd=directory))


def _quoted(value: object) -> str:
    return short(str(value), 200)


LOCAL_ONLY = Access()
"""Every file and no URL: what holds unless something else is said."""
