"""JSON files from elsewhere: read, and checked field by field before anything is built from them.

A number out of bounds hangs or crashes far from here, where nothing knows the file. Bounds are generous: beyond any
model there is, but such that the work that a number asks for is bounded.
"""

from __future__ import annotations

import json
import os
import pathlib
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vlcache_jax.checks import is_a

_MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class Kind:
    """What a field may hold: in words that follow "must be", and as a test."""

    words: str
    accepts: Callable[[Any], bool]


def whole(least: int, most: int) -> Kind:
    return Kind(
        f"an integer from {least} to {most}",
        lambda value: is_a(value, int) and least <= value <= most,
    )


def real(least: float, most: float) -> Kind:
    return Kind(
        f"a finite number from {least:g} to {most:g}",
        lambda value: is_a(value, (int, float)) and least <= value <= most,
    )


def listed(kind: Kind, most: int) -> Kind:
    return Kind(
        f"a list of at most {most} entries, each {kind.words}",
        lambda value: isinstance(value, list) and len(value) <= most and all(map(kind.accepts, value)),
    )


def one_of(*names: str) -> Kind:
    return Kind(f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names)


def either(first: Kind, second: Kind) -> Kind:
    return Kind(f"{first.words} or {second.words}", lambda value: first.accepts(value) or second.accepts(value))


def optional(kind: Kind) -> Kind:
    return either(kind, Kind("null", lambda value: value is None))


FLAG = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("a string", lambda value: isinstance(value, str))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))


def read_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
      ValueError: it is no regular file, larger than 64 MiB, not JSON, nested too deep, or holds something else.
    """
    path = pathlib.Path(path)
    try:
        if not path.is_file():
            raise ValueError("no regular file")
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES} bytes")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be a JSON file: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must be a JSON file that holds an object, got {reprlib.repr(content)}")
    return content


def check_fields(
    values: Mapping[str, Any],
    kinds: Mapping[str, Kind],
    source: str | os.PathLike[str] | None = None,
    *,
    section: str = "",
    required: bool = False,
) -> None:
    """Checks the fields that `kinds` names; others may hold anything.

    Args:
      source: the file that they are from.
      section: where in the file, such as "text_config.".
      required: a field that is not there counts as null; otherwise it is passed over.

    Raises:
      ValueError: a field holds something else; the message names it and the file.
    """
    of = "" if source is None else f" of {os.fspath(source)}"
    for key, kind in kinds.items():
        if (required or key in values) and not kind.accepts(values.get(key)):
            raise ValueError(f"{section}{key}{of} must be {kind.words}, got {reprlib.repr(values.get(key))}")
