"""What the programs compute that move stored keys, values and encoder rows; see `definitions.py`."""

from __future__ import annotations

import functools
from collections import abc
from typing import Any

import jax
import jax.numpy as jnp

from vlcache_jax import pallas_kernels as kernels
from vlcache_jax.cache.device import ALIGNMENT
from vlcache_jax.device.ladder import cover
from vlcache_jax.models import ModelConfig, rope

Params = dict[str, Any]
Constants = tuple[Any, Any]  # bias [K, D] and weight [D] of keys, or None

LINK_GROUPS = 4  # in which the layers' K, V are linked one after the other, so that computing need not wait for all
LINKED = (16, 4, 1)  # images that one program links
LINKED_TOKENS = 16384  # of these images together, where they are several


class LinkDefinitions:
    """Defines each program by a method of its name, whose arguments are the program's static sizes.

    Args:
      config: of the model.
      text: abstract weights of the decoder.
      dtype: of K, V.
      num_slots: of the pool.
      max_rows: of a step.
      token_rungs: numbers of an image's tokens.
      implementation, codec, kept_tokens: see `vlcache_jax.device.runner.Runner`.

    Attributes:
      link_groups: layers whose K, V are linked together, in their order.
      recall_rungs: tokens that one program links from the device tier.
    """

    def __init__(
        self,
        config: ModelConfig,
        text: Params,
        dtype: Any,
        *,
        num_slots: int,
        max_rows: int,
        token_rungs: tuple[int, ...],
        implementation: str | None,
        codec: kernels.Codec | None,
        kept_tokens: int,
    ):
        self.config, self.dtype, self.codec, self.kept_tokens = config, dtype, codec, kept_tokens
        self.num_slots, self.max_rows, self.implementation = num_slots, max_rows, implementation
        self._attention = [text["layers"][layer]["self_attn"] for layer in range(config.text.num_layers)]
        layers = config.text.num_layers
        size = -(-layers // LINK_GROUPS)
        self.link_groups = tuple(slice(first, min(first + size, layers)) for first in range(0, layers, size))
        largest = token_rungs[-1]
        self.recall_rungs = tuple(sorted({*token_rungs, *(count * largest for count in self.linked(largest))}))

    def linked(self, size: int) -> tuple[int, ...]:
        """How many images of `size` tokens one program links, the largest number first."""
        return tuple(count for count in LINKED if count == 1 or count * size <= LINKED_TOKENS)

    def split_links(self, size: int, number: int) -> list[int]:
        """How many images each program links where `number` images of `size` tokens are linked."""
        counts = []
        for count in self.linked(size):
            counts += [count] * (number // count)
            number %= count
        return counts

    def split_recalls(self, lengths: abc.Iterable[int]) -> list[int]:
        """How many tokens each program links where images of so many tokens are linked from the device tier."""
        tokens = sum(-(-length // ALIGNMENT) * ALIGNMENT for length in lengths)
        return cover(tokens, self.recall_rungs)

    # The programs.

    def link(self, size: int, count: int, layers: int) -> Any:
        """K, V of `count` images in `layers` layers that follow each other. Where there is a device tier, they are also
        written into it."""

        def link(
            pool: Any, kept: Any, data: list[jax.Array], places: jax.Array, where: Any, constants: list[Constants]
        ) -> Any:
            slot, cos, sin = self._turned(places)
            write = functools.partial(kernels.link, codec=self._codec_name, implementation=self.implementation)
            linked = [
                [*write(k, v, data, slot, cos, sin, layer=layer, bias=bias, weight=weight)]
                for layer, ((k, v), (bias, weight)) in enumerate(zip(pool, constants, strict=True))
            ]
            if kept is not None:
                planes = [self._planes(image) for image in data]
                kept = [
                    [
                        whole.at[:, where].set(jnp.concatenate([own[i][layer] for own in planes], 1), **_DROP)
                        for i, whole in enumerate(wholes)
                    ]
                    for layer, wholes in enumerate(kept)
                ]
            return linked, kept, jnp.zeros((), jnp.int32)

        text = self.config.text
        stored = jax.ShapeDtypeStruct((layers, 2, size, text.num_kv_heads, text.head_dim), self.dtype)
        if self.codec is not None:
            planes = self.codec.planes(text.num_kv_heads, text.head_dim)
            stored = jax.ShapeDtypeStruct((layers, 2, size * sum(planes)), jnp.uint8)
        constants, places = self.constants()[:layers], jax.ShapeDtypeStruct((count, 4, size), jnp.int32)
        where = jax.ShapeDtypeStruct((count * size,), jnp.int32)
        kept = self._kept_shapes[0][:layers] if self.kept_tokens else None
        arguments = self._pool(layers), kept, [stored] * count, places, where if self.kept_tokens else None, constants
        return link, arguments, (0, 1)

    def recall(self, size: int, layers: int) -> Any:
        """K, V of tokens in the device tier, in `layers` layers that follow each other."""

        def recall(pool: Any, kept: Any, source: jax.Array, places: jax.Array, constants: list[Constants]) -> Any:
            slot, cos, sin = self._turned(places)
            write = functools.partial(kernels.recall, codec=self._codec_name, implementation=self.implementation)
            linked = [
                [*write(k, v, planes, source, slot, cos, sin, bias=bias, weight=weight)]
                for (k, v), planes, (bias, weight) in zip(pool, kept, constants, strict=True)
            ]
            return linked, jnp.zeros((), jnp.int32)

        kept = self._kept_shapes[0][:layers]
        source, places = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((size,), (1, 4, size)))
        return recall, (self._pool(layers), kept, source, places, self.constants()[:layers]), 0

    def kept(self) -> Any:
        """The device tier: of each layer what `kernels.recall` reads, and encoder rows."""
        text, tokens = self.config.text, self.kept_tokens
        planes: list[tuple[tuple[int, ...], Any]] = [((text.num_kv_heads, text.head_dim), self.dtype)]
        if self.codec is not None:
            planes = [((size,), jnp.uint8) for size in self.codec.planes(text.num_kv_heads, text.head_dim)]
        rows = 1 + self.config.vision.num_deepstack, tokens, text.hidden_size

        def kept() -> Any:
            layers = [
                [jnp.zeros((2, tokens, *shape), dtype) for shape, dtype in planes] for _ in range(text.num_layers)
            ]
            return layers, jnp.zeros(rows, self.dtype)

        return kept, (), ()

    def keep(self, size: int) -> Any:
        """A layer's rows become tokens `place` of the device tier; places beyond it are dropped."""

        def keep(kept: list[jax.Array], values: Any, place: jax.Array) -> list[jax.Array]:
            planes = [jnp.stack(values)] if self.codec is None else self._split(values)
            return [whole.at[:, place[:size]].set(own, **_DROP) for whole, own in zip(kept, planes, strict=True)]

        text = self.config.text
        rows = jax.ShapeDtypeStruct((size, text.num_kv_heads, text.head_dim), self.dtype)
        values: Any = (rows, rows)
        if self.codec is not None:
            width = sum(self.codec.planes(text.num_kv_heads, text.head_dim))
            values = jax.ShapeDtypeStruct((2, size, width), jnp.uint8)
        kept = self._kept_shapes[0][0]
        return keep, (kept, values, jax.ShapeDtypeStruct((self.max_rows,), jnp.int32)), 0

    def keep_rows(self) -> Any:
        """The same of a step's encoder rows."""

        def keep(kept: jax.Array, rows: jax.Array, place: jax.Array) -> jax.Array:
            return kept.at[:, place].set(rows, **_DROP)

        kept = self._kept_shapes[1]
        rows = jax.ShapeDtypeStruct((len(kept), self.max_rows, kept.shape[2]), self.dtype)
        return keep, (kept, rows, jax.ShapeDtypeStruct((self.max_rows,), jnp.int32)), 0

    def restage(self, size: int) -> Any:
        """Encoder rows of the device tier become those of a step."""

        def restage(rows: jax.Array, kept: jax.Array, source: jax.Array, place: jax.Array) -> jax.Array:
            return rows.at[:, place].set(kept[:, source], **_DROP)

        kept = self._kept_shapes[1]
        rows = jax.ShapeDtypeStruct((len(kept), self.max_rows, kept.shape[2]), self.dtype)
        index = jax.ShapeDtypeStruct((size,), jnp.int32)
        return restage, (rows, kept, index, index), 0

    def code(self, size: int) -> Any:
        """A layer's keys before rotation and values, coded."""
        text, codec = self.config.text, self.codec
        assert codec is not None

        def code(k: jax.Array, v: jax.Array, constants: Constants) -> jax.Array:
            return jnp.stack([codec.encode(k, *constants), codec.encode(v)])

        rows = jax.ShapeDtypeStruct((size, text.num_kv_heads, text.head_dim), self.dtype)
        return code, (rows, rows, self.constants()[0]), ()

    # What they have in common.

    def constants(self, text: Params | None = None) -> list[Constants]:
        """Of each layer what its keys before rotation have in common, and codecs take out.

        Args:
          text: weights of the decoder; None: abstract ones.
        """
        layers = range(self.config.text.num_layers)
        return [self._constants(self._attention[i] if text is None else text["layers"][i]["self_attn"]) for i in layers]

    def _constants(self, attention: Params) -> Constants:
        text = self.config.text
        if self.codec is None:
            return None, None
        bias = attention["k_proj"].get("bias")
        if isinstance(bias, jax.ShapeDtypeStruct):
            bias = jax.ShapeDtypeStruct((text.num_kv_heads, text.head_dim), bias.dtype)
        elif bias is not None:
            bias = bias.reshape(text.num_kv_heads, text.head_dim)
        return bias, attention["k_norm"]["scale"] if "k_norm" in attention else None

    def _pool(self, layers: int) -> list[list[jax.ShapeDtypeStruct]]:
        text = self.config.text
        return [[jax.ShapeDtypeStruct((self.num_slots, text.num_kv_heads, text.head_dim), self.dtype)] * 2] * layers

    @functools.cached_property
    def _kept_shapes(self) -> Any:
        return jax.eval_shape(self.kept()[0])

    @property
    def _codec_name(self) -> str | None:
        return None if self.codec is None else self.codec.name

    def _turned(self, places: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Slots of all tokens, and cosines and sines of their angles."""
        text = self.config.text
        slot, *position = jnp.moveaxis(places, 1, 0).reshape(4, -1)
        cos, sin = rope.text_rotation(
            jnp.stack(position), text.rope_theta, text.mrope_section, text.mrope_interleaved, self.dtype
        )
        # Behind the barrier they are taken once, not anew for each head of each layer.
        cos, sin = jax.lax.optimization_barrier((cos, sin))
        return slot, cos, sin

    def _planes(self, data: jax.Array) -> list[jax.Array]:
        """Of an image's data in some layers, what a token has in each plane: [layers, 2, T, ...] each."""
        if self.codec is None:
            return [data]
        text = self.config.text
        codes, scales = self.codec.planes(text.num_kv_heads, text.head_dim)
        tokens = data.shape[2] // (codes + scales)
        halves = data[:, :, : tokens * codes], data[:, :, tokens * codes :]
        return [half.reshape(*data.shape[:2], tokens, -1) for half in halves]

    def _split(self, coded: jax.Array) -> abc.Sequence[jax.Array]:
        """Codes and scales of rows [2, N, W]."""
        assert self.codec is not None
        codes, _ = self.codec.planes(self.config.text.num_kv_heads, self.config.text.head_dim)
        return coded[..., :codes], coded[..., codes:]


_DROP: dict[str, Any] = {"mode": "drop", "unique_indices": True}
