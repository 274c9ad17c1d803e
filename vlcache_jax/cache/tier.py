"""The interface of the places outside host memory that keep records."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from vlcache_jax.cache.record import Meta, Part, Planes, checksum

_log = logging.getLogger(__name__)

Place = Callable[[Part], Planes]
"""Where a part of a record is to be put."""

Outcome = Literal["stored", "known", "refused"]
"""What became of a record that was to be written; "known": it was there, "refused": there is no room for it."""


class TierError(Exception):
    """A tier could not do what it was asked for."""


class DamagedError(TierError):
    """A record was read, but is not what was written."""


class GoneError(TierError):
    """A record was found, and is not there any more."""


class RefusedError(TierError):
    """Whoever keeps the records does not give them to us; the message says why."""


def _log_damage(error: DamagedError) -> None:
    _log.warning("%s", error)


class Found(NamedTuple):
    """A complete record in a tier, and when it was written: seconds since the epoch."""

    meta: Meta
    written: float


class Line(NamedTuple):
    """Of a tier's table of contents: bytes as they are kept, and when a record was used last, in seconds since the
    epoch (where nobody notes that: written)."""

    name: str
    bytes: int
    used: float


class Tier:
    """A place that keeps records. Tiers never decide anything: the store does.

    What a tier gives passes `verified` before anyone uses it; the store sees to that. Every method raises TierError,
    and nothing else, and may be called from any thread.

    Attributes:
      label: what reports call it.
      is_local: whether a look at it takes no longer than one at a file of this machine, and what was written survives
        this process.
      is_read_only: whether nothing can be written to it.
      report: called with the error of each record that `find` found damaged, and deleted.
      damaged: records that were found damaged, and deleted, when it was opened.
    """

    label: str
    is_local = False
    is_read_only = False
    damaged = 0
    report: Callable[[DamagedError], object] = staticmethod(_log_damage)

    def find(self, entry: str) -> list[Found]:
        """All complete records of an image, the newest last."""
        raise NotImplementedError

    def read(self, meta: Meta, parts: Iterable[Part], place: Place) -> Iterator[tuple[Part, Planes]]:
        """Gives parts of a record that was found, as they arrive: their places, filled, or arrays of the tier's own."""
        raise NotImplementedError

    def write(self, meta: Meta, parts: Mapping[Part, Planes]) -> Outcome:
        """Keeps a record, visible only when it is complete."""
        raise NotImplementedError

    def delete(self, name: str) -> None:
        raise NotImplementedError

    def lines(self) -> Iterable[Line]:
        """Of all complete records, in the order of their last use."""
        raise NotImplementedError

    def touch(self, names: Iterable[str]) -> None:
        """Records were used though they were not read here. Not every tier notes that."""

    def pin(self, name: str, is_pinned: bool) -> None:
        """A record stays until told otherwise. Where others decide what stays, nothing happens."""

    def pinned(self, entry: str) -> set[str]:
        """Names of an image's records that are to stay."""
        return set()

    def date(self, name: str, written: float) -> None:
        """What a record that was written just now holds was computed then: seconds since the epoch. Where others say
        when something was written, nothing happens."""

    def prune(self, capacity: int, before: float | None = None) -> None:
        """Deletes the records that were not used for longest, until the others take a number of bytes at most.

        Args:
          before: what was written before leaves in any case: seconds since the epoch.
        """
        lines = list(self.lines())
        left = sum(line.bytes for line in lines)
        for line in lines:
            if left > capacity or (before is not None and line.used < before):
                self.delete(line.name)
                left -= line.bytes

    def older(self) -> dict[str, int]:
        """Folders of older formats, which no engine of this one reads, and the bytes of each."""
        return {}

    def remove_older(self, name: str) -> None:
        """Deletes such a folder."""
        raise NotImplementedError

    def counts(self) -> dict[str, int]:
        """`records`, `bytes` and `capacity`, where it is known what is kept now."""
        return {}

    def close(self) -> None:
        """Nothing is asked of it any more."""


def verified(meta: Meta, part: Part, planes: Planes) -> Planes:
    """A part of a record as it came from outside host memory, once it is known to be what was written.

    Raises:
      DamagedError: it is not.
    """
    is_whole = [(*plane.shape, plane.dtype) for plane in planes] == [
        (*own[1:], meta.dtype) for own in meta.plane_shapes
    ]
    expected = dict(zip(meta.parts, meta.checksums, strict=False)).get(part)
    if not is_whole or checksum(meta, planes) != expected:
        raise DamagedError(f"{meta.name}: {part} is damaged")
    return planes
