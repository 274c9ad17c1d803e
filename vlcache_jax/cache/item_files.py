"""Files with the bytes of images that libraries keep."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib

from vlcache_jax.cache.item import Item

_log = logging.getLogger(__name__)

_PART = ".part"


class ItemFiles:
    """Files of items.

    Args:
      folder: that has them; None: no bytes can be kept.

    Attributes:
      damaged: rows and files of items that were found damaged since the process began.
    """

    def __init__(self, folder: pathlib.Path | None):
        self._folder = folder
        self.damaged = 0

    @property
    def keeps_files(self) -> bool:
        """Whether bytes of pictures can be kept."""
        return self._folder is not None

    def read(self, item: Item, *, called: str) -> bytes:
        """The encoded file of a picture.

        Raises:
          ValueError: it was not kept, or is gone.
        """
        told = f"{called} is {item.id!r} of library {item.library!r}, whose records are gone or not to be used"
        if item.file is None or self._folder is None:
            raise ValueError(f"{told}, and its bytes were not kept (keep_bytes): add it again")
        try:
            return (self._folder / item.file).read_bytes()
        except OSError as error:
            raise ValueError(f"{told}, and its bytes cannot be read ({error.strerror}): add it again") from error

    def lose(self, item: Item, *, called: str) -> ValueError:
        """Delete the file of an item, which shows another image; return the error to raise."""
        self.damaged += 1
        _log.warning("the bytes of item %r of library %r are damaged, and are deleted", item.id, item.library)
        if item.file is not None and self._folder is not None:
            with contextlib.suppress(OSError):
                (self._folder / item.file).unlink(missing_ok=True)
        return ValueError(f"{called} is {item.id!r} of library {item.library!r}, whose bytes are damaged: add it again")

    def keep(self, file: str, encoded: bytes) -> None:
        """Keeps the bytes of a picture: they are there whole, or not at all.

        Raises:
          ValueError: they cannot be kept.
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
            raise ValueError(f"image must be kept as a file, but {self._folder}: {error.strerror}") from error

    def file_bytes(self, file: str) -> int:
        """Of a file that is kept; 0: it is gone."""
        try:
            return 0 if self._folder is None else (self._folder / file).stat().st_size
        except OSError:
            return 0

    def _unlink(self, file: str) -> None:
        if self._folder is not None:
            for name in (file, f"{file}{_PART}"):
                (self._folder / name).unlink(missing_ok=True)
