"""Records, which are the cache entries of images, and the interface of the tiers outside host memory."""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import math
import mmap
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import ml_dtypes  # noqa: F401  (lets numpy know bfloat16)
import numpy as np
import numpy.typing as npt
import xxhash

from vlcache_jax.common.checks import is_finite
from vlcache_jax.inputs.processor import Grid

Part = tuple[str] | tuple[str, int]
"""Unit of transfer and of checksums: ("encoder",), ("deepstack", j) or ("kv", layer)."""

Planes = tuple[npt.NDArray[Any], ...]
"""The arrays of a record, or of one of its parts: one, or where K, V are coded two, the codes and the scales."""

CHECKSUM = "xxh3_64"
_LARGE, _HUGE = 2**20, 2**24  # bytes
_ALIGNMENT = 64  # bytes; a CPU device can then use the memory as it lies


class Why(enum.Enum):
    """Why an image was computed, or not reused as far as it could have been."""

    reuse_off = "reuse_off"
    unknown_image = "unknown_image"  # never seen, or long forgotten
    other_context = "other_context"  # known, but computed behind something else
    coded = "coded"  # known in this context, but its K, V are kept by a codec that is not exact (`codec`)
    displaced = "displaced"  # known in this context, but it made room for another context of the image (`variants`)
    evicted = "evicted"  # known, but it had to make room (`host_bytes`), or was told to go
    too_large = "too_large"  # the cache has no room for it
    load_failed = "load_failed"  # known, but its record could not be filled or read
    not_finite = "not_finite"  # known, but what was computed of it was not finite, and is not kept
    corrupt = "corrupt"  # known, but its record was found damaged
    cheaper_to_compute = "cheaper_to_compute"  # K, V were found, but not wanted (`load`)
    expired = "expired"  # known, but older than `ttl`
    timeout = "timeout"  # known, but its record did not come in time (`timeout`)


@dataclass(frozen=True)
class Meta:
    """What a record says of itself.

    Attributes:
      entry: the image's whole entry key.
      owner: digest of the salt in it (`owner_key`).
      context: digest of what stood before the image when its K, V were computed; None for encoder rows, which do not
        depend on it.
      canonical: every row before and in the image was computed, or reused exactly.
      grid, tokens: of the image.
      dtype, shape: of the data, with the token axis padded to a rung: K, V before rotation [L, 2, T, K, D], or coded
        [L, 2, bytes], all planes counted; encoder rows and DeepStack features [1 + J, T, M].
      planes: of coded K, V, bytes a token of the codes and of the scales. Empty: they are not coded.
      model: fingerprint of the model's configuration and weights.
      codec: of K, V, as keys name it.
      checksums: of the parts, without padding; empty as long as the record is being filled.
    """

    entry: str
    owner: str
    context: str | None
    canonical: bool
    grid: Grid
    tokens: int
    dtype: str
    shape: tuple[int, ...]
    planes: tuple[int, ...] = ()
    model: str = ""
    codec: str = ""
    checksums: tuple[int, ...] = ()

    @functools.cached_property
    def name(self) -> str:
        """Under which the record is found."""
        return f"enc/{self.entry}" if self.context is None else f"kv/{self.entry}/{self.context}"

    @property
    def parts(self) -> tuple[Part, ...]:
        """In the order of the first axis of the data."""
        if self.context is None:
            return ("encoder",), *(("deepstack", j) for j in range(self.shape[0] - 1))
        return tuple(("kv", layer) for layer in range(self.shape[0]))

    @functools.cached_property
    def padded(self) -> int:
        """Tokens that the data have room for."""
        if self.context is None:
            return self.shape[1]
        return self.shape[2] // sum(self.planes) if self.planes else self.shape[2]

    @property
    def plane_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the record's arrays; where K, V are coded [L, 2, T, bytes]."""
        return tuple((*self.shape[:2], self.padded, size) for size in self.planes) or (self.shape,)

    @functools.cached_property
    def nbytes(self) -> int:
        """With padding, as it lies in memory."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def part_bytes(self) -> int:
        """Of each part without padding, as it is kept outside memory."""
        return self.with_room(self.tokens).nbytes // len(self.parts)

    @property
    def is_exact(self) -> bool:
        """Whether K, V may be linked in their own context as if they had just been computed."""
        return self.canonical and not self.planes

    def with_room(self, tokens: int) -> Meta:
        """The same with room for so many tokens."""
        axis = 1 if self.context is None else 2
        room = tokens * max(sum(self.planes), 1)
        return replace(self, shape=(*self.shape[:axis], room, *self.shape[axis + 1 :]))


def checksum(meta: Meta, part: Planes) -> int:
    """Of a part, without padding."""
    digest = xxhash.xxh3_64()
    for rows in blocks(meta, part):
        digest.update(rows.view(np.uint8))
    return digest.intdigest()


def blocks(meta: Meta, part: Planes) -> Iterator[npt.NDArray[Any]]:
    """Of a part contiguous arrays without padding, as they follow each other outside memory: of keys all planes, then
    of values; or rows [T, M]."""
    for half in [part] if meta.context is None else zip(*part, strict=True):
        for plane in half:
            yield plane[: meta.tokens]


class State(enum.Enum):
    """How far a record has come. One that is not filled, or of no use though it was, is `Lost`."""

    reserved = "reserved"  # it has its place
    filling = "filling"  # somebody fills it
    ready = "ready"  # it is filled


@dataclass(frozen=True)
class Lost:
    """A record will not be filled, or is of no use."""

    why: Why


class Record:
    """A record in host memory, at first still to be filled.

    Attributes:
      meta: see `Meta`.
      source: label of the tier that it comes from, its parts in their order; None: it is computed.
      state: how far it has come. It only goes on: from `State.reserved` to `State.filling` to `State.ready`, and from
        any of them to `Lost`.
      pins: how many handles need it to stay.
      is_kept: whether the user wants it to stay.
      held: how many requests are going to read it, and tiers outside memory.
      writes: how many of these are tiers that it is to be written to.
      missing: tokens whose K, V it still lacks.
      written: when it was computed, in seconds since the epoch; None: it is not filled yet.
      lent: its memory as arrays of a device that reads it as it lies, by their first part.
    """

    def __init__(self, meta: Meta, source: str | None = None):
        self.meta, self.source = meta, source
        self.state: State | Lost = State.reserved if source is None else State.filling
        self.pins = 0
        self.is_kept = False
        self.held = 0
        self.writes = 0
        self.missing = meta.tokens
        self.written: float | None = None
        self.lent: dict[int, Any] = {}
        self._arrived = 0  # parts
        self._changed = threading.Condition()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the record is filled; False if that failed, or has not ended after so many seconds."""
        return self.wait_for(len(self.meta.parts) + 1, timeout)

    def arrive(self, count: int) -> None:
        """The first `count` parts are there, and what they are."""
        with self._changed:
            self._arrived = count
            self._changed.notify_all()

    def has_arrived(self, count: int) -> bool:
        """Whether the first `count` parts are there."""
        state = self.state
        return state is State.ready or (state is State.filling and self._arrived >= count)

    def wait_for(self, count: int, timeout: float | None = None) -> bool:
        """Waits until the first `count` parts are there; False if they do not come, or not within so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_settled or self._arrived >= count, timeout)
        return self.has_arrived(count)

    @functools.cached_property
    def planes(self) -> Planes:
        """See `Meta.plane_shapes`; beyond the image's tokens they are undefined. They take memory from their first use
        on."""
        return tuple(_aligned(shape, np.dtype(self.meta.dtype)) for shape in self.meta.plane_shapes)

    @property
    def data(self) -> npt.NDArray[Any]:
        """The first plane: all of what is not coded."""
        return self.planes[0]

    def part(self, number: int) -> Planes:
        """One of its parts."""
        return tuple(plane[number] for plane in self.planes)

    @property
    def parts(self) -> dict[Part, Planes]:
        """All of its parts, in their order."""
        return {part: self.part(number) for number, part in enumerate(self.meta.parts)}

    def put(self, layer: int, half: int, tokens: npt.NDArray[np.int64], rows: npt.NDArray[Any]) -> None:
        """Fills in keys (half 0) or values (1) of some tokens.

        Args:
          rows: as they are stored, [n, K, D], or coded, [n, K, bytes], of each head all planes.
        """
        done = 0
        for plane in self.part(layer):
            own = plane[half]
            width = own[0].size // rows.shape[1]
            own[tokens] = rows[..., done : done + width].reshape(len(tokens), *own.shape[1:])
            done += width

    @property
    def is_pinned(self) -> bool:
        """Whether it must never make room."""
        return self.is_kept or self.pins > 0

    @property
    def is_awaited(self) -> bool:
        """Whether requests are going to read it, and it is not filled yet."""
        return self.held > 0 and not self.is_settled

    @property
    def is_free(self) -> bool:
        """Whether nobody needs it to stay."""
        return not (self.is_kept or self.pins or self.held)

    @property
    def is_needed(self) -> bool:
        """Whether anybody needs it to stay, for more than to write it to another tier."""
        return self.is_pinned or self.held > self.writes

    @property
    def is_ready(self) -> bool:
        """Whether it is filled."""
        return self.state is State.ready

    @property
    def is_settled(self) -> bool:
        """Whether it is filled, or never will be."""
        return self.state is State.ready or isinstance(self.state, Lost)

    def begin(self) -> None:
        """Somebody fills it."""
        with self._changed:
            if self.state is State.reserved:
                self.state = State.filling

    def complete(self, checksums: tuple[int, ...] | None = None) -> None:
        """It is filled, unless it has been lost.

        Args:
          checksums: of its parts, where they are known.
        """
        if self.is_settled:
            return
        self.meta = replace(self.meta, checksums=self.checksums() if checksums is None else checksums)
        with self._changed:
            if not self.is_settled:
                self.state = State.ready
            self._changed.notify_all()

    def lose(self, why: Why, *, spoiled: bool = False) -> None:
        """It will not be filled, unless it is already.

        Args:
          spoiled: it is of no use, filled or not.
        """
        with self._changed:
            if spoiled or not self.is_settled:
                self.state = Lost(why)
            self._changed.notify_all()

    def is_finite(self, parts: slice = slice(None)) -> bool:
        """Whether it, or some of its parts, hold no NaN and no infinity."""
        for number in range(len(self.meta.parts))[parts]:
            for rows in blocks(self.meta, self.part(number)[-1:]):  # scales say whether what they scale is finite
                if not is_finite(rows.view(np.float16) if self.meta.planes else rows):
                    return False
        return True

    def checksums(self) -> tuple[int, ...]:
        """Of each part as it is now."""
        return tuple(checksum(self.meta, part) for part in self.parts.values())


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> npt.NDArray[Any]:
    size = math.prod(shape) * dtype.itemsize
    if size >= _LARGE:  # pages of its own go back to the system at once; the heap would keep them
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE") and size >= _HUGE:  # what is first touched is then cleared six times as fast
            with contextlib.suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(memory, dtype).reshape(shape)
    heap = np.empty(size + _ALIGNMENT, np.uint8)
    first = -heap.ctypes.data % _ALIGNMENT
    return heap[first : first + size].view(dtype).reshape(shape)


_log = logging.getLogger(__name__)

Place = Callable[[Part], Planes]
"""Where a part of a record is to be put."""

Outcome = Literal["stored", "known", "refused"]
"""What became of a record that was to be written; "known": it was there, "refused": there is no room for it."""


class TierError(Exception):
    """A tier could not do what it was asked for."""


class DamagedError(TierError):
    """A record was read, but is not what was written."""


class EntryGoneError(TierError):
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
