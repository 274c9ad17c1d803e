"""Records: what is kept for an image, and the interface of the places that keep them."""

from __future__ import annotations

import functools
import mmap
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import ml_dtypes  # noqa: F401  (lets numpy know bfloat16)
import numpy as np
import numpy.typing as npt

from vlcache_jax.checks import is_finite
from vlcache_jax.inputs.processor import Grid

Part = tuple[str] | tuple[str, int]
"""Unit of transfer and of checksums: ("encoder",), ("deepstack", j) or ("kv", layer)."""

_LARGE = 2**20
_ALIGNMENT = 64  # bytes; a CPU device can then use the memory as it lies


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
      dtype, shape: of the data, with the token axis padded to a rung: K, V before rotation [L, 2, T, K, D], encoder
        rows and DeepStack features [1 + J, T, M].
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
    checksums: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Under which the record is found."""
        return f"enc/{self.entry}" if self.context is None else f"kv/{self.entry}/{self.context}"

    @property
    def parts(self) -> tuple[Part, ...]:
        """In the order of the first axis of the data."""
        if self.context is None:
            return ("encoder",), *(("deepstack", j) for j in range(self.shape[0] - 1))
        return tuple(("kv", layer) for layer in range(self.shape[0]))

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


class Tier(Protocol):
    """A place that keeps records. Tiers never decide anything: the store does.

    What a tier outside host memory lends passes `verified` before anyone uses it; `Store.load` sees to that.
    """

    def meta(self, name: str) -> Meta | None:
        """Of a complete record, or None."""

    def read(self, name: str, parts: Iterable[Part]) -> Iterator[tuple[Part, npt.NDArray[Any]]]:
        """Lends the parts in the order in which they arrive. Raises TierError, and nothing else."""

    def write(self, meta: Meta, parts: Mapping[Part, npt.NDArray[Any]]) -> bool:
        """Keeps a record, visible only when it is complete; False: refused (full, or too large)."""

    def delete(self, name: str) -> None: ...

    def keys(self, prefix: str = "") -> list[str]: ...

    def close(self) -> None: ...


class TierError(Exception):
    """A record could not be read."""


class DamagedError(TierError):
    """A record was read, but is not what was written."""


def verified(meta: Meta, part: Part, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A part of a record as it came from outside host memory, once it is known to be what was written.

    Raises:
      DamagedError: it is not.
    """
    is_whole = array.shape == meta.shape[1:] and array.dtype == meta.dtype
    expected = dict(zip(meta.parts, meta.checksums, strict=False)).get(part)
    if not is_whole or _checksum(meta, array) != expected:
        raise DamagedError(f"{meta.name}: {part} is damaged")
    return array


def _checksum(meta: Meta, part: npt.NDArray[Any]) -> int:
    return functools.reduce(lambda crc, rows: zlib.crc32(rows.view(np.uint8), crc), _blocks(meta, part), 0)


def _blocks(meta: Meta, part: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Of a part, K and V [2, T, K, D] or rows [T, M]: contiguous arrays, without padding."""
    blocks = part[None] if meta.context is None else part
    return blocks[:, : meta.tokens]


class Record:
    """A record in host memory, at first still to be filled.

    Attributes:
      meta: see `Meta`.
      pins: how many handles need it to stay.
      is_kept: whether the user wants it to stay.
      held: how many requests are going to read it.
      missing: tokens whose K, V it still lacks.
      is_claimed: whether somebody is going to fill it.
    """

    def __init__(self, meta: Meta):
        self.meta = meta
        self.pins = 0
        self.is_kept = False
        self.held = 0
        self.missing = meta.tokens
        self.is_claimed = False
        self.is_ready = False
        self._settled = threading.Event()

    def wait(self) -> bool:
        """Waits until the record is filled; False if that failed."""
        self._settled.wait()
        return self.is_ready

    @functools.cached_property
    def data(self) -> npt.NDArray[Any]:
        """See `Meta.shape`; beyond the image's tokens it is undefined. It takes memory from its first use on."""
        return _aligned(self.meta.shape, np.dtype(self.meta.dtype))

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
        return not (self.is_pinned or self.held)

    @property
    def is_settled(self) -> bool:
        """Whether it is filled, or never will be."""
        return self._settled.is_set()

    def settle(self, is_ready: bool) -> None:
        """Ends the filling, if it has not ended yet."""
        if self.is_settled:
            return
        if is_ready:
            self.meta = replace(self.meta, checksums=self.checksums())
        self.is_ready = is_ready
        self._settled.set()

    def is_finite(self) -> bool:
        """Whether it holds no NaN and no infinity."""
        return all(is_finite(rows) for part in self.data for rows in _blocks(self.meta, part))

    def checksums(self) -> tuple[int, ...]:
        """Of each part as it is now."""
        return tuple(_checksum(self.meta, part) for part in self.data)


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> npt.NDArray[Any]:
    size = int(np.prod(shape)) * dtype.itemsize
    if size >= _LARGE:  # pages of its own go back to the system at once; the heap would keep them
        return np.frombuffer(mmap.mmap(-1, size), dtype).reshape(shape)
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    return memory[first : first + size].view(dtype).reshape(shape)
