"""Items of libraries, as rows of their index. Any row that no library would write is damaged."""

from __future__ import annotations

import json
import math
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vlcache_jax.cache.keys import Salt
from vlcache_jax.cache.store import PictureKey
from vlcache_jax.checks import is_a

COLUMNS = "library, id, version, content, height, width, limits, entry, file, metadata, added, expires"
_KEY, _NAME = re.compile("[0-9a-f]{64}"), re.compile("[0-9a-f]{32}")
_LIMITS = {"min_pixels", "max_pixels"}
_MOST_SIDE = 2**31  # pixels


@dataclass(frozen=True, eq=False)
class Item:
    """A picture of a library, as it is at one time.

    Attributes:
      library, id: its name.
      picture: what it shows.
      limits: of its pixels.
      entry: entry key of its records.
      file: name of the file of its bytes; None: they are not kept.
      metadata: what else is said of it.
      added: seconds since the epoch.
      expires: when it ends; None: it does not.
      version: no two are alike, and none comes again.
      salt: under which its records are kept.
    """

    library: str
    id: str
    picture: PictureKey
    limits: Mapping[str, int]
    entry: str
    file: str | None
    metadata: Mapping[str, Any]
    added: float
    expires: float | None
    version: str = field(default_factory=lambda: uuid.uuid4().hex)
    salt: Salt = field(default=None, repr=False)


class Loose(NamedTuple):
    """Records, and maybe a file, that belong to no item."""

    number: int
    entry: str
    file: str | None


def read_item(salt: Salt, row: Sequence[Any]) -> Item:
    """Return the item of a row with `COLUMNS`.

    Raises:
      ValueError: a library would not have written such a row.
    """
    library, name, version, content, height, width, limits, entry, file, metadata, added, expires = row
    read = {"limits": _object(limits), "metadata": _object(metadata)}
    checks = {
        "library": isinstance(library, str),
        "id": isinstance(name, str),
        "version": _is(_NAME, version),
        "content": _is(_KEY, content),
        "height": is_a(height, int) and 0 < height < _MOST_SIDE,
        "width": is_a(width, int) and 0 < width < _MOST_SIDE,
        "limits": set(read["limits"]) <= _LIMITS and all(is_a(one, int) for one in read["limits"].values()),
        "entry": _is(_KEY, entry),
        "file": file is None or _is(_NAME, file),
        "added": _is_time(added),
        "expires": expires is None or _is_time(expires),
    }
    for column, is_right in checks.items():
        if not is_right:
            got = dict(zip(COLUMNS.split(", "), row, strict=True))[column]
            raise ValueError(f"{column} must be what a library writes, got {got!r:.80}")
    picture = PictureKey(content, height, width)
    return Item(library, name, picture, read["limits"], entry, file, read["metadata"], added, expires, version, salt)


def read_loose(row: Sequence[Any]) -> Loose:
    """Return what belongs to no item, of a row with number, entry and file.

    Raises:
      ValueError: a library would not have written such a row.
    """
    number, entry, file = row
    if not (_is(_KEY, entry) and (file is None or _is(_NAME, file))):
        raise ValueError(f"entry and file must be what a library writes, got {entry!r:.80} and {file!r:.80}")
    return Loose(number, entry, file)


def _is(pattern: re.Pattern[str], value: Any) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _is_time(value: Any) -> bool:
    return is_a(value, (int, float)) and math.isfinite(value)


def _object(text: Any) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"limits and metadata must be JSON, got {text!r:.80}: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"limits and metadata must be objects, got {text!r:.80}")
    return value
