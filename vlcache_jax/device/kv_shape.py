"""Shapes, dtypes and sizes of KV in the pool and in cache entries."""

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

# Smallest image, in tokens, whose KV is stored in models with states. The states after it take as much memory whatever
# its size: in Qwen3.5-9B 53 MB, as much as the KV of 1600 tokens. From host memory at 50 GB/s they take 1 ms, in which
# an H200 computes 55 tokens; from a disk at 5 GB/s they take as long as 550 tokens.
STATED_TOKENS = 256


@dataclass(frozen=True)
class KVShape:
    """The layout of a model's keys and values.

    Attributes:
      layers: number of decoder layers that have K,V.
      heads: KV heads per layer.
      width: values per head.
      dtype: dtype of KV in the pool.
      codec: codec of stored KV. None: KV is stored in full precision.
      states: float32 values of a sequence's states that precede each layer with K,V.
      matrices, rows: values of those that change linearly (`StateArray.is_linear`), and their number of matrix rows.
      maps: name of the tokens that maps of images in cache entries stand for, see `Edges`; empty: entries hold none.
    """

    layers: int
    heads: int
    width: int
    dtype: np.dtype
    codec: Codec | None = None
    states: int = 0
    matrices: int = 0
    rows: int = 0
    maps: str = ""

    @classmethod
    def of(cls, config: ModelConfig, dtype: Any, codec: Codec | None = None, maps: str = "") -> Self:
        """Return the layout for a model whose KV has the given dtype and codec; see `maps`."""
        text = config.text
        arrays = [[one for layer in layers for one in text.kind_of(layer).states] for layers in text.state_layers]
        linear = [[one for one in part if one.is_linear] for part in arrays]
        states, matrices, rows = (
            max((sum(count(one) for one in part) for part in parts), default=0)
            for parts, count in (
                (arrays, lambda one: one.values),
                (linear, lambda one: one.values),
                (linear, lambda one: one.values // one.shape[-1]),
            )
        )
        return cls(
            len(text.paged_layers), text.num_kv_heads, text.head_dim, np.dtype(dtype), codec,
            states, matrices, rows, maps,
        )  # fmt: skip

    @property
    def codec_name(self) -> str | None:
        """Name of the codec, or None without one."""
        return None if self.codec is None else self.codec.name

    @property
    def stored_as(self) -> str:
        """Name of the stored format in entry keys: the dtype, followed by the codec if there is one."""
        return f"{self.dtype} {self.codec.name}" if self.codec else str(self.dtype)

    @property
    def form(self) -> str:
        """Name of the stored format in entries of KV, which also says what tokens their maps stand for."""
        return f"{self.stored_as} {self.maps}" if self.maps else self.stored_as

    def half(self, rows: int) -> jax.ShapeDtypeStruct:
        """Return the abstract keys or values of `rows` tokens, [N, K, D]. K or V of a layer has all KV slots."""
        return jax.ShapeDtypeStruct((rows, self.heads, self.width), self.dtype)

    @functools.cached_property
    def code_bytes(self) -> tuple[int, ...]:
        """Bytes of a token's codes and of their scales, for K or V of a layer. Empty without a codec."""
        return self.codec.buffers(self.heads, self.width) if self.codec else ()

    def stored(self, *lead: int) -> list[jax.ShapeDtypeStruct]:
        """Return the buffers of stored keys or values: [..., K, D], or codes and scales, uint8 [..., K, bytes] each."""
        if self.codec is None:
            return [jax.ShapeDtypeStruct((*lead, self.heads, self.width), self.dtype)]
        return [jax.ShapeDtypeStruct((*lead, self.heads, size // self.heads), np.uint8) for size in self.code_bytes]

    def record(self, tokens: int) -> jax.ShapeDtypeStruct:
        """Return the abstract KV of an image in all layers, in the shape that `Meta.shape` records."""
        if self.codec is None:
            return self.stored(self.layers, 2, tokens)[0]
        return jax.ShapeDtypeStruct((self.layers, 2, tokens * sum(self.code_bytes)), np.uint8)

    def joined(self, rows: int) -> jax.ShapeDtypeStruct:
        """Return the encoded keys and values of `rows` tokens, all buffers of a head joined: uint8 [2, N, K, bytes]."""
        return jax.ShapeDtypeStruct((2, rows, self.heads, sum(self.code_bytes) // self.heads), np.uint8)

    def split(self, rows: jax.Array) -> list[jax.Array]:
        """Return the buffers of an array that joins them in its last axis."""
        widths = [buffer.shape[-1] for buffer in self.stored()]
        return jnp.split(rows, list(itertools.accumulate(widths[:-1])), axis=-1)

    @property
    def min_tokens(self) -> int:
        """Number of tokens of the smallest image whose KV is stored, see `STATED_TOKENS`."""
        return STATED_TOKENS if self.states else 1

    @property
    def own_states(self) -> int:
        """Float32 values of the states after an image, for each layer with K,V in its cache entry.

        0 with a codec: coded KV cannot be linked exactly, and only exact links need these states.
        """
        return 0 if self.codec else self.states

    @property
    def map_states(self) -> int:
        """Float32 values that belong to the map of an image, for each layer with K,V in its cache entry.

        They are the states that do not change linearly, after the tokens of the map, and the scales of coded maps: one
        for each row of B and A.
        """
        scales = 2 * self.rows if self.codec else 0
        return self.states - self.matrices + scales if self.maps else 0

    @property
    def entry_states(self) -> int:
        """Float32 values of a cache entry for each layer with K,V (`Meta.states`)."""
        return self.own_states + self.map_states

    @property
    def entry_maps(self) -> int:
        """Values of B and A in a cache entry for each layer with K,V (`Meta.maps`)."""
        return 2 * self.matrices if self.maps else 0

    @property
    def map_dtype(self) -> np.dtype:
        """Dtype of B and A in cache entries."""
        return np.dtype(np.int8) if self.codec else self.dtype

    @property
    def map_bytes(self) -> int:
        """Bytes of the maps in a cache entry of KV, and of what belongs to them."""
        return self.layers * (4 * self.map_states + self.map_dtype.itemsize * self.entry_maps)

    @property
    def state_bytes(self) -> int:
        """Bytes of states and maps in a cache entry of KV."""
        return 4 * self.layers * self.own_states + self.map_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of a token's KV in all layers, in the pool."""
        return 2 * self.layers * self.heads * self.width * self.dtype.itemsize

    @property
    def stored_bytes(self) -> int:
        """Bytes of a token's KV in all layers as it is stored, without padding."""
        return sum(math.prod(buffer.shape) * buffer.dtype.itemsize for buffer in self.stored(self.layers, 2))
