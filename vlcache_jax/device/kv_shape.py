"""Keys and values: how many a token has, as which arrays they lie in the pool and are stored, and their bytes."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Self

import jax
import numpy as np

from vlcache_jax.models import ModelConfig
from vlcache_jax.pallas_kernels import Codec


@dataclass(frozen=True)
class KVShape:
    """The keys and values of a model.

    Attributes:
      layers, heads, width: of the decoder: layers, heads of K and V in each, values of a head.
      dtype: in the pool.
      codec: of what is stored; None: it is kept as it is.
    """

    layers: int
    heads: int
    width: int
    dtype: np.dtype
    codec: Codec | None = None

    @classmethod
    def of(cls, config: ModelConfig, dtype: Any, codec: Codec | None = None) -> Self:
        """Those of a model."""
        text = config.text
        return cls(text.num_layers, text.num_kv_heads, text.head_dim, np.dtype(dtype), codec)

    @property
    def codec_name(self) -> str | None:
        """Of the codec."""
        return None if self.codec is None else self.codec.name

    @property
    def stored_as(self) -> str:
        """How keys of records name what is stored: the dtype, or with a codec both."""
        return f"{self.dtype} {self.codec.name}" if self.codec else str(self.dtype)

    def half(self, rows: int) -> jax.ShapeDtypeStruct:
        """Keys or values of rows, [N, K, D]: of all slots, K or V of a layer in the pool."""
        return jax.ShapeDtypeStruct((rows, self.heads, self.width), self.dtype)

    @functools.cached_property
    def code_bytes(self) -> tuple[int, ...]:
        """Of a token's codes and of their scales, for its keys or values in a layer; empty if they are not coded."""
        return self.codec.planes(self.heads, self.width) if self.codec else ()

    def stored(self, *lead: int) -> list[jax.ShapeDtypeStruct]:
        """The planes of stored keys or values: [..., K, D], or codes and scales, uint8 [..., K, bytes] each."""
        if self.codec is None:
            return [jax.ShapeDtypeStruct((*lead, self.heads, self.width), self.dtype)]
        return [jax.ShapeDtypeStruct((*lead, self.heads, size // self.heads), np.uint8) for size in self.code_bytes]

    def record(self, tokens: int, layers: int | None = None) -> jax.ShapeDtypeStruct:
        """What is stored of an image, of all layers or some: [L, 2, T, K, D], or coded, uint8 [L, 2, bytes]."""
        count = self.layers if layers is None else layers
        if self.codec is None:
            return self.stored(count, 2, tokens)[0]
        return jax.ShapeDtypeStruct((count, 2, tokens * sum(self.code_bytes)), np.uint8)

    def split(self, data: jax.Array) -> list[jax.Array]:
        """The planes of a record, [L, 2, C, ...] each. That codes need not be copied, the scales behind them are taken
        for codes of more tokens, for which nobody asks."""
        if self.codec is None:
            return [data]
        (codes, scales), size = self.code_bytes, data.shape[2]
        end = size // (codes + scales) * codes
        parts = data if size % codes == 0 else data[:, :, :end], data[:, :, end:]
        tokens = zip(parts, self.stored(), strict=True)
        return [part.reshape(*data.shape[:2], -1, *plane.shape) for part, plane in tokens]

    @property
    def slot_bytes(self) -> int:
        """Of a token's K and V in all layers, in the pool."""
        return 2 * self.layers * self.heads * self.width * self.dtype.itemsize

    @property
    def stored_bytes(self) -> int:
        """The same as it is stored, without padding."""
        record = self.record(1)
        return math.prod(record.shape) * record.dtype.itemsize
