"""Keys and values: how many a token has, as which arrays they lie in the pool and are stored, and their bytes."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
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

    def record(self, tokens: int) -> jax.ShapeDtypeStruct:
        """The same of an image in all layers, as `Meta.shape` tells it."""
        if self.codec is None:
            return self.stored(self.layers, 2, tokens)[0]
        return jax.ShapeDtypeStruct((self.layers, 2, tokens * sum(self.code_bytes)), np.uint8)

    def joined(self, rows: int) -> jax.ShapeDtypeStruct:
        """Keys and values of rows as they are coded, of each head all planes: uint8 [2, N, K, bytes]."""
        return jax.ShapeDtypeStruct((2, rows, self.heads, sum(self.code_bytes) // self.heads), np.uint8)

    def split(self, rows: jax.Array) -> list[jax.Array]:
        """The planes of what has all of them in its last axis."""
        widths = [plane.shape[-1] for plane in self.stored()]
        return jnp.split(rows, list(itertools.accumulate(widths[:-1])), axis=-1)

    @property
    def slot_bytes(self) -> int:
        """Of a token's K and V in all layers, in the pool."""
        return 2 * self.layers * self.heads * self.width * self.dtype.itemsize

    @property
    def stored_bytes(self) -> int:
        """The same as it is stored, without padding."""
        return sum(math.prod(plane.shape) * plane.dtype.itemsize for plane in self.stored(self.layers, 2))
