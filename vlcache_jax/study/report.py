"""Reports of measurements: the machine, tables, JSON files, figures, and files of finished parts."""

from __future__ import annotations

import datetime
import importlib.metadata
import io
import json
import os
import pathlib
import platform
from collections.abc import Sequence
from typing import Any

from PIL import Image

from vlcache_jax.common.files import check_writable, write_whole


def environment(*packages: str) -> dict[str, Any]:
    """Return date, processor, cores and versions of installed `packages`, for the head of a result."""
    model = platform.processor()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = lines[0].split(":", 1)[1].strip() if lines else model
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "processor": model,
        "cores": os.cpu_count(),
        "versions": {package: version for package in packages if (version := _version(package))},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def figures() -> Any:
    """Return pyplot with a backend that needs no screen. Imports matplotlib on the first call."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save_figure(figure: Any, path: pathlib.Path, dpi: int = 110) -> None:
    """Write a figure and close it. A PNG gets a palette of 256 colors, which takes a third of the bytes."""
    if path.suffix.lower() == ".png":
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png", dpi=dpi)
        with Image.open(drawn) as image:
            palette = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
            palette.save(path, optimize=True, dpi=image.info["dpi"])
    else:
        figure.savefig(path, dpi=dpi)
    figures().close(figure)


def to_json(content: dict[str, Any]) -> str:
    """Return compact JSON: a line for each key and for each row of a table."""
    parts = []
    for key, value in content.items():
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            text = "[\n" + ",\n".join(map(_compact, value)) + "\n]"
        elif isinstance(value, dict) and value and all(isinstance(one, dict) for one in value.values()):
            text = (
                "{\n" + ",\n".join(f"{json.dumps(str(name))}: {_compact(one)}" for name, one in value.items()) + "\n}"
            )
        else:
            text = _compact(value)
        parts.append(f"{json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows as a table. Numbers have two decimals.

    Raises:
      ValueError: there are no rows, or their columns differ.
    """
    _check(rows)
    cells = [[f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(rows[0], *cells, strict=True)]
    print(f"\n{title}")
    for line in (list(rows[0]), ["-" * width for width in widths], *cells):
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def write(title: str, rows: Sequence[dict[str, Any]], head: dict[str, Any], out: pathlib.Path) -> None:
    """Write the rows and the keys of `head` to a JSON file.

    Raises:
      ValueError: there are no rows, or their columns differ.
    """
    _check(rows)
    write_whole(out, to_json({"title": title, **head, "rows": list(rows)}))
    print(f"written to {out}")


def publish(title: str, rows: Sequence[dict[str, Any]], head: dict[str, Any], out: pathlib.Path | None) -> None:
    """Print the rows as a table and, if `out` is given, write them to it."""
    show(title, rows)
    if out is not None:
        write(title, rows, head, out)


def _check(rows: Sequence[dict[str, Any]]) -> None:
    if not rows or any(row.keys() != rows[0].keys() for row in rows):
        raise ValueError(f"rows must be non-empty and have the same columns, got {list(rows)}")


class WorkLog:
    """File of finished parts, one JSON line each. Truncated lines and lines of other work are ignored.

    Args:
      path: the file; None keeps parts in memory only.
      identity: digest of the settings of the work.

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
                raise ValueError(
                    f"work must be a new file or one that an earlier run of this command wrote, got {path}"
                )
            for line in lines:
                match _parse(line):
                    case [str(found), str(key), value] if found == identity:
                        self._parts[key] = value

    def get(self, key: str) -> Any:
        """Return a finished part, or None."""
        return self._parts.get(key)

    def add(self, key: str, value: Any) -> None:
        """Write a finished part, any JSON value except null."""
        self._parts[key] = value
        if self._path is not None:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(f"\n{json.dumps([self._identity, key, value])}\n")  # the first newline ends a truncated line


def _parse(line: str) -> Any:
    """Return the content of a line, or None if it was truncated."""
    try:
        return json.loads(line)
    except ValueError:
        return None
