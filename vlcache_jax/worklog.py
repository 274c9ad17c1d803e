"""Finished parts of long work in a file, so that a second run goes on where the first one stopped."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any


class WorkLog:
    """One JSON line for each finished part. A line that was cut off, or belongs to other work, counts for nothing.

    Args:
      path: of the file; None keeps parts in memory only.
      identity: of the work: the same parts of other work have another one.
    """

    def __init__(self, path: str | os.PathLike[str] | None, identity: str):
        self._path = None if path is None else pathlib.Path(path)
        self._identity = identity
        self._parts: dict[str, Any] = {}
        if self._path is not None and self._path.exists():
            for line in self._path.read_text(encoding="utf-8", errors="replace").splitlines():
                try:
                    found, key, value = json.loads(line)
                except ValueError:
                    continue
                if found == identity:
                    self._parts[key] = value

    def get(self, key: str) -> Any:
        """A finished part, or None."""
        return self._parts.get(key)

    def add(self, key: str, value: Any) -> None:
        """Writes a finished part, anything but None that JSON can hold."""
        self._parts[key] = value
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(f"\n{json.dumps([self._identity, key, value])}\n")  # also after a line that was cut off
