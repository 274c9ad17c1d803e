"""Finished parts of long work in a file, so that a second run goes on where the first one stopped."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

from vlcache_jax.common.files import check_writable


class WorkLog:
    """One JSON line for each finished part. A line that was cut off, or belongs to other work, counts for nothing.

    Args:
      path: of the file; None keeps parts in memory only.
      identity: of the work: the same parts of other work have another one.

    Raises:
      ValueError: the file cannot be written, or is another kind of file.
    """

    def __init__(self, path: str | os.PathLike[str] | None, identity: str):
        self._path = None if path is None else pathlib.Path(path)
        self._identity = identity
        self._parts: dict[str, Any] = {}
        check_writable("work", path)
        if self._path is not None and self._path.is_file():
            lines = [line for line in self._path.read_text(encoding="utf-8", errors="replace").splitlines() if line]
            if lines and not lines[0].startswith('["'):
                raise ValueError(f"work must be a file of finished parts, or a new one, got {path}")
            for line in lines:
                match _parse(line):
                    case [str(found), str(key), value] if found == identity:
                        self._parts[key] = value

    def get(self, key: str) -> Any:
        """A finished part, or None."""
        return self._parts.get(key)

    def add(self, key: str, value: Any) -> None:
        """Writes a finished part, anything but None that JSON can hold."""
        self._parts[key] = value
        if self._path is not None:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(f"\n{json.dumps([self._identity, key, value])}\n")  # also after a line that was cut off


def _parse(line: str) -> Any:
    """What a line holds; None if it was cut off."""
    try:
        return json.loads(line)
    except ValueError:
        return None
