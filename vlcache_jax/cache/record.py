"""Cache entries of images (records), and the interface of the tiers outside host memory."""

from __future__ import annotations

import contextlib
import enum
import functools
import itertools
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

Buffers = tuple[npt.NDArray[Any], ...]
"""Arrays of a record or a part: one, or two (codes and scales) if the KV is coded, then states and maps if it has some.
"""

CHECKSUM = "xxh3_64"
_LARGE, _HUGE = 2**20, 2**24  # bytes
_ALIGNMENT = 64  # bytes; a CPU device can then use the memory without a copy


class Why(enum.Enum):
    """Reason why an image was computed, or reused less than possible."""

    reuse_off = "reuse_off"
    unknown_image = "unknown_image"  # not cached, no loss remembered
    other_context = "other_context"  # cached only in other contexts
    coded = "coded"  # cached in this context, but by a codec that is not exact (`codec`)
    displaced = "displaced"  # replaced by another context of the image (`max_contexts_per_image`)
    evicted = "evicted"  # evicted to make room (`host_bytes`) or by the user
    too_large = "too_large"  # did not fit in the cache
    load_failed = "load_failed"  # the entry could not be filled or read
    not_finite = "not_finite"  # the computed values had NaN or infinities and were not stored
    corrupt = "corrupt"  # the entry was damaged
    cheaper_to_compute = "cheaper_to_compute"  # KV was found but not used (`load`)
    expired = "expired"  # older than `ttl`
    timeout = "timeout"  # the entry was not loaded in time (`timeout`)
    no_donor = "no_donor"  # cached only in contexts from which it may not be linked (`donors`)
    not_stored = "not_stored"  # cached without KV, which is not stored of images this small (`KVShape.min_tokens`)
    other_policy = "other_policy"  # cached with maps of other tokens, by an engine with another policy (`reuse`)
    no_state = "no_state"  # no slot for its states or its map, or tokens that these stand for are computed


@dataclass(frozen=True)
class Meta:
    """Description of a record.

    Attributes:
      entry: entry key of the image.
      owner: digest of its salt (`owner_key`).
      context: digest of the image's prefix when its KV was computed; None for encoder output, which does not depend on
        it.
      canonical: every token before and in the image was computed, or reused exactly.
      grid, tokens: patch grid and number of tokens of the image; no tokens: a snapshot of states, see `HostSnapshots`.
      dtype, shape: dtype and shape of the data, with the token axis padded to a bucket size: KV before rotation [L, 2,
        T, K, D], or coded [L, 2, bytes] over all buffers; encoder output and DeepStack features [1 + J, T, M].
      buffers: bytes per token of the codes and of the scales; empty if the KV is not coded.
      states, maps: float32 values, and values in `map_dtype`, per part: those of the layers without KV that precede the
        part's layer (`TextConfig.state_layers`), see `KVShape.entry_states`, `KVShape.entry_maps`. 0: there are none.
      model: fingerprint of the model's configuration and weights.
      codec: dtype or codec of the KV, as in entry keys.
      checksums: checksum of each part without padding; empty until the record is filled.
    """

    entry: str
    owner: str
    context: str | None
    canonical: bool
    grid: Grid
    tokens: int
    dtype: str
    shape: tuple[int, ...]
    buffers: tuple[int, ...] = ()
    states: int = 0
    maps: int = 0
    model: str = ""
    codec: str = ""
    checksums: tuple[int, ...] = ()

    @functools.cached_property
    def name(self) -> str:
        """Name of the record, by which it is found."""
        if self.is_snapshot:
            return f"snapshot/{self.entry}"
        return f"enc/{self.entry}" if self.context is None else f"kv/{self.entry}/{self.context}"

    @property
    def parts(self) -> tuple[Part, ...]:
        """Parts, in the order of the first axis of the data."""
        if self.context is None:
            return ("encoder",), *(("deepstack", j) for j in range(self.shape[0] - 1))
        return tuple(("kv", layer) for layer in range(self.shape[0]))

    @functools.cached_property
    def padded(self) -> int:
        """Length of the token axis, with padding."""
        if self.context is None:
            return self.shape[1]
        return self.shape[2] // sum(self.buffers) if self.buffers else self.shape[2]

    @property
    def buffer_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the arrays: KV, [L, 2, T, bytes] if it is coded, and [L, states] and [L, maps] if there are any."""
        data = tuple((*self.shape[:2], self.padded, size) for size in self.buffers) or (self.shape,)
        return (*data, *((self.shape[0], values) for values in (self.states, self.maps) if values))

    @property
    def buffer_dtypes(self) -> tuple[np.dtype[Any], ...]:
        """Dtypes of the arrays."""
        rest = ((np.dtype(np.float32), self.states), (self.map_dtype, self.maps))
        return (*((np.dtype(self.dtype),) * self.kv_buffers), *(dtype for dtype, values in rest if values))

    @property
    def kv_buffers(self) -> int:
        """Number of arrays of KV or encoder output, which precede states and maps."""
        return max(len(self.buffers), 1)

    @property
    def own_states(self) -> int:
        """Float32 values per part of the states after the image, which come first; 0 if the KV is coded.

        If they are n + m, of which m are matrices, a map of 2 m values has n float32 values of its own.
        """
        return 0 if self.buffers else (self.states + self.maps // 2) // (2 if self.maps else 1)

    @property
    def map_dtype(self) -> np.dtype[Any]:
        """Dtype of the maps: int8 if the KV is coded, else that of the KV."""
        return np.dtype(np.int8 if self.buffers else self.dtype)

    @property
    def state_bytes(self) -> tuple[int, int]:
        """Sizes of the states and of the maps of each part in bytes."""
        return 4 * self.states, self.maps * self.map_dtype.itemsize

    @functools.cached_property
    def nbytes(self) -> int:
        """Size in host memory in bytes, with padding."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize + self.shape[0] * sum(self.state_bytes)

    @property
    def part_bytes(self) -> int:
        """Size of each part in bytes without padding, as stored outside host memory."""
        return self.with_room(self.tokens).nbytes // len(self.parts)

    @property
    def is_snapshot(self) -> bool:
        """True if it belongs to no image, and only holds states of a prompt."""
        return not self.tokens

    @property
    def is_exact(self) -> bool:
        """True if the KV in its own context is equivalent to newly computed KV."""
        return self.canonical and not self.buffers

    def with_room(self, tokens: int) -> Meta:
        """Return a copy with a token axis of `tokens`."""
        axis = 1 if self.context is None else 2
        room = tokens * max(sum(self.buffers), 1)
        return replace(self, shape=(*self.shape[:axis], room, *self.shape[axis + 1 :]))


def checksum(meta: Meta, part: Buffers) -> int:
    """Return the checksum of a part without padding."""
    digest = xxhash.xxh3_64()
    for rows in blocks(meta, part):
        digest.update(rows.view(np.uint8))
    return digest.intdigest()


def blocks(meta: Meta, part: Buffers) -> Iterator[npt.NDArray[Any]]:
    """Yield the contiguous arrays of a part without padding, in their order outside memory.

    KV has all buffers of the keys, then those of the values, states and maps. Encoder output has one array [T, M].
    """
    data, rest = part[: meta.kv_buffers], part[meta.kv_buffers :]
    for half in [data] if meta.context is None else zip(*data, strict=True):
        for buffer in half:
            yield buffer[: meta.tokens]
    yield from rest


class State(enum.Enum):
    """Fill state of a record. Records that failed to fill or were invalidated are `Lost`."""

    reserved = "reserved"  # memory is reserved
    filling = "filling"  # being computed or loaded
    ready = "ready"  # complete


@dataclass(frozen=True)
class Lost:
    """State of a record that will not be filled or was invalidated."""

    why: Why


DONOR_RULES = ("any", "own", "neutral")
"""Values of `CacheConfig.donors`, the one that allows most first."""
OWN_RANK = (-1, 0)
"""Rank of KV of the same context, which precedes all donors."""
# Kinds that a rule allows, the best first. Others may have neutral donors made. With "own", own ones come first, so
# that outputs do not depend on this.
_BY_RULE = {"any": ("neutral", "own", "other"), "own": ("own", "neutral"), "neutral": ("neutral",)}


def _is_nobodys(context: str) -> bool:
    return False


class Donors(NamedTuple):
    """Contexts from which the KV of an image may be linked in another context.

    The KV of an image depends on the text and images before it, and so on the caller who chose them. So contexts with
    nothing of a caller come first, and then those that the caller chose.

    Attributes:
      neutral: the context of the request with nothing of another caller before the image; None: there is none.
      rule: see `CacheConfig.donors`.
      is_own: returns whether the caller of the request used a context before.
      are_shared: the records are those that the operator shares with all salts: each of their contexts is neutral.
    """

    neutral: str | None = None
    rule: str = "any"
    is_own: Callable[[str], bool] = _is_nobodys
    are_shared: bool = False

    def rank(self, meta: Meta) -> tuple[int, int] | None:
        """Return the rank of a donor, the smallest for the best; None: it may not be linked."""
        kind, kinds = self.kind(meta), _BY_RULE[self.rule]
        if kind not in kinds:
            return None
        return kinds.index(kind), int(not meta.canonical)

    def kind(self, meta: Meta) -> str:
        """Return the kind of a donor: "neutral", "own" or "other". KV that was itself linked is "other"."""
        if not meta.canonical or meta.context is None:
            return "other"
        is_neutral = self.are_shared or meta.context == self.neutral
        return "neutral" if is_neutral else "own" if self.is_own(meta.context) else "other"

    def best(self, metas: Iterable[Meta]) -> Meta | None:
        """Return the best donor, of equal ones the last; None if there is none."""
        ranked = [(rank, meta) for meta in metas if (rank := self.rank(meta)) is not None]
        return min(reversed(ranked), key=lambda one: one[0])[1] if ranked else None


class Record:
    """Record in host memory, which is filled after its creation.

    Attributes:
      meta: description, see `Meta`.
      source: label of the tier that it is loaded from, part by part in order; None: it is computed.
      state: fill state: from `State.reserved` to `State.filling` to `State.ready`, and from any of them to `Lost`.
      pins: number of handles that pin it.
      is_kept: pinned by the user.
      held: number of requests and of tiers outside memory that are going to read it.
      writes: number of tiers among `held`.
      missing: number of tokens whose KV is still missing, and 1 more for missing states.
      written: time when it was computed, in seconds since the epoch; None: it is not filled.
      lent: its memory as device arrays without a copy, by their first part and by what they have of the states.
    """

    def __init__(self, meta: Meta, source: str | None = None):
        self.meta, self.source = meta, source
        self.state: State | Lost = State.reserved if source is None else State.filling
        self.pins = 0
        self.is_kept = False
        self.held = 0
        self.writes = 0
        self.missing = meta.tokens + bool(meta.states)
        self.written: float | None = None
        self.lent: dict[tuple[int, bool, bool], Any] = {}
        self._arrived = 0  # number of parts
        self._changed = threading.Condition()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the record is filled; return False if that failed or took longer than `timeout` seconds."""
        return self.wait_for(len(self.meta.parts) + 1, timeout)

    def arrive(self, count: int) -> None:
        """Note that the first `count` parts are filled, and wake the waiting threads."""
        with self._changed:
            self._arrived = count
            self._changed.notify_all()

    def has_arrived(self, count: int) -> bool:
        """Return whether the first `count` parts are filled."""
        state = self.state
        return state is State.ready or (state is State.filling and self._arrived >= count)

    def wait_for(self, count: int, timeout: float | None = None) -> bool:
        """Wait until the first `count` parts are filled; return False on failure or after `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_settled or self._arrived >= count, timeout)
        return self.has_arrived(count)

    @functools.cached_property
    def buffers(self) -> Buffers:
        """Arrays of the record, see `Meta.buffer_shapes`; undefined after the image's tokens. Allocated when used."""
        return tuple(map(_aligned, self.meta.buffer_shapes, self.meta.buffer_dtypes))

    @property
    def data(self) -> npt.NDArray[Any]:
        """First buffer: encoder output, or KV that is not coded."""
        return self.buffers[0]

    @property
    def kv(self) -> Buffers:
        """Buffers of KV, without states and maps."""
        return self.buffers[: self.meta.kv_buffers]

    @property
    def states(self) -> npt.NDArray[np.float32] | None:
        """Float32 values of layers without KV, [L, states], see `Meta.states`; None if the model has none."""
        return self.buffers[self.meta.kv_buffers] if self.meta.states else None

    @property
    def maps(self) -> npt.NDArray[Any] | None:
        """Maps of these layers, [L, maps], see `Meta.maps`; None if there are none."""
        return self.buffers[-1] if self.meta.maps else None

    def part(self, number: int) -> Buffers:
        """Return the arrays of a part."""
        return tuple(buffer[number] for buffer in self.buffers)

    @property
    def parts(self) -> dict[Part, Buffers]:
        """All parts, in order."""
        return {part: self.part(number) for number, part in enumerate(self.meta.parts)}

    def put(self, layer: int, half: int, tokens: npt.NDArray[np.int64], rows: npt.NDArray[Any]) -> None:
        """Store keys (half 0) or values (half 1) of some tokens of a layer.

        Args:
          layer: number of the layer.
          half: 0 for keys, 1 for values.
          tokens: token numbers [n].
          rows: values in stored form, [n, K, D], or coded, [n, K, bytes] with all buffers of each head.
        """
        done = 0
        for buffer in self.kv:
            own = buffer[layer, half]
            width = own[0].size // rows.shape[1]
            own[tokens] = rows[..., done : done + width].reshape(len(tokens), *own.shape[1:])
            done += width

    @property
    def is_pinned(self) -> bool:
        """True if it must not be evicted."""
        return self.is_kept or self.pins > 0

    @property
    def is_awaited(self) -> bool:
        """True if requests are going to read it and it is not filled yet."""
        return self.held > 0 and not self.is_settled

    @property
    def is_free(self) -> bool:
        """True if nothing pins or reads it."""
        return not (self.is_kept or self.pins or self.held)

    @property
    def is_needed(self) -> bool:
        """True if it is pinned or read other than for writing to another tier."""
        return self.is_pinned or self.held > self.writes

    @property
    def is_ready(self) -> bool:
        """True if it is filled."""
        return self.state is State.ready

    @property
    def is_settled(self) -> bool:
        """True if it is filled or lost."""
        return self.state is State.ready or isinstance(self.state, Lost)

    def begin(self) -> None:
        """Change the state from reserved to filling."""
        with self._changed:
            if self.state is State.reserved:
                self.state = State.filling

    def complete(self, checksums: tuple[int, ...] | None = None) -> None:
        """Mark it as filled, unless it is lost.

        Args:
          checksums: checksums of its parts; None: compute them.
        """
        if self.is_settled:
            return
        self.meta = replace(self.meta, checksums=self.checksums() if checksums is None else checksums)
        with self._changed:
            if not self.is_settled:
                self.state = State.ready
            self._changed.notify_all()

    def lose(self, why: Why, *, spoiled: bool = False) -> None:
        """Mark it as lost, unless it is filled already.

        Args:
          why: the reason.
          spoiled: mark it as lost even if it is filled.
        """
        with self._changed:
            if spoiled or not self.is_settled:
                self.state = Lost(why)
            self._changed.notify_all()

    def is_finite(self, parts: slice = slice(None)) -> bool:
        """Return whether its parts, or some of them, have no NaN and no infinity."""
        for number in range(len(self.meta.parts))[parts]:
            part, rest = self.part(number), self.meta.kv_buffers
            floats = blocks(self.meta, part)
            if self.meta.buffers:  # codes are integers, with float16 scales; the scales of maps are among the states
                halves = (half[: self.meta.tokens].view(np.float16) for half in part[rest - 1])
                floats = itertools.chain(halves, part[rest : rest + bool(self.meta.states)])
            if not all(map(is_finite, floats)):
                return False
        return True

    def checksums(self) -> tuple[int, ...]:
        """Return the checksum of each part as it is now."""
        return tuple(checksum(self.meta, part) for part in self.parts.values())


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> npt.NDArray[Any]:
    size = math.prod(shape) * dtype.itemsize
    if size >= _LARGE:  # separate pages return to the system at once; the heap would retain them
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE") and size >= _HUGE:  # huge pages are cleared six times faster
            with contextlib.suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(memory, dtype).reshape(shape)
    heap = np.empty(size + _ALIGNMENT, np.uint8)
    first = -heap.ctypes.data % _ALIGNMENT
    return heap[first : first + size].view(dtype).reshape(shape)


_log = logging.getLogger(__name__)

Place = Callable[[Part], Buffers]
"""Function that returns the destination arrays of a part."""

Outcome = Literal["stored", "known", "refused"]
"""Result of a write; "known": the record exists already, "refused": there is no room for it."""


class TierError(Exception):
    """An operation of a tier failed."""


class DamagedError(TierError):
    """A record that was read differs from what was written."""


class EntryGoneError(TierError):
    """A record that was found no longer exists."""


class RefusedError(TierError):
    """A peer refuses access; the message has the reason."""


def _log_damage(error: DamagedError) -> None:
    _log.warning("%s", error)


class Found(NamedTuple):
    """Complete record in a tier, and the time when it was written, in seconds since the epoch."""

    meta: Meta
    written: float


class Line(NamedTuple):
    """Record in the listing of a tier: name, stored bytes, and last use in seconds since the epoch.

    In tiers that do not note uses, `used` is the time of writing.
    """

    name: str
    bytes: int
    used: float


class Tier:
    """Storage of records outside host memory. The store decides what tiers contain.

    The store passes everything that a tier returns through `verified` before use. Every method raises only TierError
    and may be called from any thread.

    Attributes:
      label: name in reports.
      is_local: a lookup is as fast as one of a local file, and written records survive this process.
      is_read_only: nothing can be written to it.
      report: called with the error of each damaged record that `find` found and deleted.
      damaged: number of damaged records that were deleted on opening.
    """

    label: str
    is_local = False
    is_read_only = False
    damaged = 0
    report: Callable[[DamagedError], object] = staticmethod(_log_damage)

    def find(self, entry: str) -> list[Found]:
        """Return all complete records of an image, newest last."""
        raise NotImplementedError

    def read(self, meta: Meta, parts: Iterable[Part], place: Place) -> Iterator[tuple[Part, Buffers]]:
        """Yield parts of a found record as they arrive: in the arrays of `place`, or in arrays of the tier."""
        raise NotImplementedError

    def write(self, meta: Meta, parts: Mapping[Part, Buffers]) -> Outcome:
        """Store a record, which becomes visible when it is complete."""
        raise NotImplementedError

    def delete(self, name: str) -> None:
        """Delete a record, if it exists."""
        raise NotImplementedError

    def lines(self) -> Iterable[Line]:
        """Return a listing of all complete records, least recently used first."""
        raise NotImplementedError

    def touch(self, names: Iterable[str]) -> None:
        """Note that records were used without being read here. Some tiers ignore it."""

    def pin(self, name: str, is_pinned: bool) -> None:
        """Pin or unpin a record. Does nothing in tiers without eviction of their own."""

    def pinned(self, entry: str) -> set[str]:
        """Return the names of an image's pinned records."""
        return set()

    def date(self, name: str, written: float) -> None:
        """Set the time, in seconds since the epoch, at which a record that was just written was computed.

        Does nothing in tiers whose times cannot be set.
        """

    def prune(self, capacity: int, before: float | None = None) -> None:
        """Delete the least recently used records until the others take at most `capacity` bytes.

        Args:
          capacity: maximum size in bytes.
          before: also delete all records written before this time, in seconds since the epoch.
        """
        lines = list(self.lines())
        left = sum(line.bytes for line in lines)
        for line in lines:
            if left > capacity or (before is not None and line.used < before):
                self.delete(line.name)
                left -= line.bytes

    def older(self) -> dict[str, int]:
        """Return the size in bytes of each folder of an older format, which this version does not read."""
        return {}

    def remove_older(self, name: str) -> None:
        """Delete a folder of an older format."""
        raise NotImplementedError

    def counts(self) -> dict[str, int]:
        """Return current `records`, `bytes` and `capacity`; empty if they are unknown."""
        return {}

    def close(self) -> None:
        """Close it. No method is called afterwards."""


def verified(meta: Meta, part: Part, buffers: Buffers) -> Buffers:
    """Return a part that was read from outside host memory, verified by shape, dtype and checksum.

    Raises:
      DamagedError: it differs from what was written.
    """
    own = zip(meta.buffer_shapes, meta.buffer_dtypes, strict=True)
    is_whole = [(buffer.shape, buffer.dtype) for buffer in buffers] == [(shape[1:], dtype) for shape, dtype in own]
    expected = dict(zip(meta.parts, meta.checksums, strict=False)).get(part)
    if not is_whole or checksum(meta, buffers) != expected:
        raise DamagedError(f"{meta.name}: {part} is damaged")
    return buffers
