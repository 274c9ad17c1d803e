"""Programs that create and change device memory: the KV pool, encoder rows, decode slots, and the device tier.

They also load stored KV into the pool, and encode new KV as it is stored.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp

from vlcache_jax import pallas_kernels as kernels
from vlcache_jax.device import sampler
from vlcache_jax.device.programs.base import Constants, Demand, Halves, Program, Repeat, Shapes, Stored, ints
from vlcache_jax.device.sampler import DecodeState
from vlcache_jax.models import rope
from vlcache_jax.pallas_kernels import PAGE
from vlcache_jax.pallas_kernels.split import SECOND, THIRD, WHOLE
from vlcache_jax.sampling import MAX_BIASED


@dataclass(frozen=True)
class EmptyPool(Program[jax.Array]):
    """A program that creates K or V of a layer."""

    name = "pool"
    gives = SECOND

    def compute(self, shapes: Shapes) -> jax.Array:
        return jnp.zeros(shapes.pool.shape, shapes.pool.dtype)


@dataclass(frozen=True)
class EmptyEncoderRows(Program[jax.Array]):
    """A program that creates the encoder rows of a chunk."""

    name = "encoder_rows"

    def compute(self, shapes: Shapes) -> jax.Array:
        return jnp.zeros(shapes.encoder_rows.shape, shapes.encoder_rows.dtype)


@dataclass(frozen=True)
class EmptyDecodeState(Program[DecodeState]):
    """A program that creates decode slots without sequences."""

    name = "decode_slots"

    def compute(self, shapes: Shapes) -> DecodeState:
        return sampler.empty_decode_state(shapes.buckets.max_sequences, shapes.config.text.vocab_size)


@dataclass(frozen=True)
class OpenDecodeSlot(Program[DecodeState]):
    """A program that assigns a decode slot to a sequence, see `sampler.open_decode_slot`."""

    name = "open_decode_slot"
    donates = (0,)

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        decode_slots = shapes.decode_slots
        kept = decode_slots.marks, decode_slots.bias, decode_slots.words, decode_slots.recent
        return decode_slots, ints(), *(jax.ShapeDtypeStruct(field.shape[1:], field.dtype) for field in kept)

    def compute(
        self, shapes: Shapes, decode_slots: DecodeState, decode_slot: jax.Array, *kept: jax.Array
    ) -> DecodeState:
        return sampler.open_decode_slot(decode_slots, decode_slot, *kept)


@dataclass(frozen=True)
class HoldDecodeSlots(Program[DecodeState]):
    """A program that restricts the tokens of `count` decode slots, see `sampler.hold_decode_slots`.

    Few requests need it, so it is compiled at its first use.
    """

    name = "hold"
    donates = (0,)
    count: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        return []

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        words, pairs = -(-shapes.config.text.vocab_size // 32), (self.count, MAX_BIASED)
        added = jax.ShapeDtypeStruct(pairs, jnp.float32)
        return shapes.decode_slots, ints(self.count), ints(self.count, words), ints(*pairs), added

    def compute(self, shapes: Shapes, decode_slots: DecodeState, *held: jax.Array) -> DecodeState:
        return sampler.hold_decode_slots(decode_slots, *held)


def _together(pool: Halves, source: jax.Array, target: jax.Array) -> Halves:
    """Return the pool with pages copied. Targets beyond the pool are dropped."""

    def copied(half: jax.Array) -> jax.Array:
        pages = half.reshape(-1, PAGE, *half.shape[1:])
        return pages.at[target].set(pages[source], mode="drop").reshape(half.shape)

    return jax.tree.map(copied, pool)


def _one_by_one(pool: Halves, source: jax.Array, target: jax.Array) -> Halves:
    """Copy pages in place, with dropped targets last. As a gather and a scatter, a CPU would copy the full pool."""

    def copy(i: jax.Array, half: jax.Array) -> jax.Array:
        page = jax.lax.dynamic_slice_in_dim(half, source[i] * PAGE, PAGE)
        return jax.lax.dynamic_update_slice_in_dim(half, page, target[i] * PAGE, 0)

    def copied(half: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, (target < len(half) // PAGE).sum(), copy, half)

    return jax.tree.map(copied, pool)


@dataclass(frozen=True)
class CopyPages(Program[Halves]):
    """A program that copies `count` pages of the pool."""

    name = "copy"
    donates = (0,)
    gives = SECOND
    count: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        return [cls(count) for count in demand.buckets.sequences]

    @classmethod
    def repeats(cls, shapes: Shapes, repeat: Repeat) -> Iterable[Self]:
        return [cls(count) for count in sorted(repeat.copied)]

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        return shapes.pools(shapes.kv.layers), ints(self.count), ints(self.count)

    def compute(self, shapes: Shapes, pool: Halves, source: jax.Array, target: jax.Array) -> Halves:
        copied: Halves = jax.lax.platform_dependent(pool, source, target, cpu=_one_by_one, default=_together)
        return copied


DROP: dict[str, Any] = {"mode": "drop", "unique_indices": True}  # writes to places out of range are dropped


@dataclass(frozen=True)
class Link(Program[tuple[Halves, Any, jax.Array]]):
    """A program that links KV of `count` images of `size` tokens in `layers` consecutive layers.

    If there is a device tier, KV is also written to it.
    """

    name = "link"
    donates = (0, 1)
    gives = SECOND, THIRD, WHOLE
    size: int
    count: int
    layers: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        if not demand.linking:
            return
        for size in (patches // shapes.config.vision.merge_size**2 for patches in demand.buckets.patches):
            yield from (cls(size, count, layers) for count in shapes.linked(size) for layers in _groups(shapes))

    @classmethod
    def repeats(cls, shapes: Shapes, repeat: Repeat) -> Iterable[Self]:
        return [cls(size, count, layers) for size, count in sorted(repeat.linked) for layers in _groups(shapes)]

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        layers, stored = self.layers, shapes.stored(self.layers, self.size)
        kept, where = (shapes.kept[:layers], ints(self.count * self.size)) if shapes.kept_tokens else (None, None)
        places = ints(self.count, 4, self.size)
        return shapes.pools(layers), kept, [stored] * self.count, places, where, shapes.constants()[:layers]

    def compute(
        self,
        shapes: Shapes,
        pool: Halves,
        kept: Halves | None,
        images: list[list[jax.Array]],
        places: jax.Array,
        where: Any,
        constants: list[Constants],
    ) -> tuple[Halves, Any, jax.Array]:
        images = shapes.devices.by_head(images)
        stored = [(images, layer) for layer in range(self.layers)]
        linked = _link(shapes, pool, stored, places, constants)
        if kept is not None:
            by_buffer = [*zip(*images, strict=True)]
            kept = [
                [
                    whole.at[:, where].set(jnp.concatenate([image[layer] for image in own], 1), **DROP)
                    for whole, own in zip(buffers, by_buffer, strict=True)
                ]
                for layer, buffers in enumerate(kept)
            ]
        return linked, kept, jnp.zeros((), jnp.int32)


@dataclass(frozen=True)
class Recall(Program[tuple[Halves, jax.Array]]):
    """A program that links KV of `size` tokens from the device tier, in `layers` consecutive layers."""

    name = "recall"
    donates = (0,)
    gives = SECOND, WHOLE
    size: int
    layers: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        if not (shapes.kept_tokens and demand.linking):
            return []
        return [cls(size, layers) for size in shapes.recall_buckets for layers in _groups(shapes)]

    @classmethod
    def repeats(cls, shapes: Shapes, repeat: Repeat) -> Iterable[Self]:
        return [cls(size, layers) for size in sorted(repeat.recalled) for layers in _groups(shapes)]

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        pool, constants = shapes.pools(self.layers), shapes.constants()[: self.layers]
        return pool, shapes.kept[: self.layers], ints(self.size), ints(1, 4, self.size), constants

    def compute(
        self,
        shapes: Shapes,
        pool: Halves,
        kept: Halves,
        source: jax.Array,
        places: jax.Array,
        constants: list[Constants],
    ) -> tuple[Halves, jax.Array]:
        stored = [([[buffer[None] for buffer in buffers]], 0) for buffers in kept]
        return _link(shapes, pool, stored, places, constants, source), jnp.zeros((), jnp.int32)


@dataclass(frozen=True)
class Code(Program[jax.Array]):
    """A program that encodes a layer's keys before rotation and values as one array, see `KVShape.joined`."""

    name = "code"
    gives = THIRD
    size: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        return [cls(size) for size in demand.buckets.rows if shapes.kv.codec is not None and demand.linking]

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        return shapes.half(self.size), shapes.half(self.size), shapes.constants()[0]

    def compute(self, shapes: Shapes, k: jax.Array, v: jax.Array, constants: Constants) -> jax.Array:
        codec = shapes.kv.codec
        assert codec is not None
        return jnp.stack([jnp.concatenate(buffers, -1) for buffers in (codec.encode(k, *constants), codec.encode(v))])


def _groups(shapes: Shapes) -> set[int]:
    """Return the numbers of layers that are linked together."""
    return {group.count for group in shapes.link_groups}


def _link(
    shapes: Shapes,
    pool: Halves,
    stored: list[tuple[list[list[jax.Array]], int]],
    places: jax.Array,
    constants: list[Constants],
    source: jax.Array | None = None,
) -> Halves:
    """Return the pool's layers with stored KV written to them.

    Args:
      stored: by layer of the pool, the buffers of its images, and the layer's index in these buffers.
    """
    text = shapes.config.text
    slot, *position = jnp.moveaxis(places, 1, 0).reshape(4, -1)
    cos, sin = rope.text_rotation(
        jnp.stack(position), text.rope_theta, text.mrope_section, text.mrope_interleaved, shapes.dtype
    )
    # The barrier lets XLA gather them once, not for each head of each layer.
    cos, sin = jax.lax.optimization_barrier((cos, sin))
    write = functools.partial(
        kernels.link, source=source, codec=shapes.kv.codec_name, implementation=shapes.implementation
    )
    return [
        [*write(k, v, images, slot, cos, sin, layer=layer, bias=bias, weight=weight)]
        for (k, v), (images, layer), (bias, weight) in zip(pool, stored, constants, strict=True)
    ]


@dataclass(frozen=True)
class EmptyTier(Program[tuple[Halves, jax.Array]]):
    """A program that creates the device tier: by layer the buffers of its tokens, and encoder rows."""

    name = "kept"
    gives = THIRD, WHOLE

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        return [cls()] if shapes.kept_tokens and demand.linking else []

    def compute(self, shapes: Shapes) -> tuple[Halves, jax.Array]:
        made: tuple[Halves, jax.Array] = jax.tree.map(
            lambda one: jnp.zeros(one.shape, one.dtype), (shapes.kept, shapes.kept_rows)
        )
        return made


@dataclass(frozen=True)
class KeepLayer(Program[list[jax.Array]]):
    """A program that stores a layer's rows as tokens `place` of the device tier. Places beyond it are dropped."""

    name = "keep"
    donates = (0,)
    gives = THIRD
    size: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        return [cls(size) for size in demand.buckets.rows if shapes.kept_tokens and demand.linking]

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        half, coded = shapes.half(self.size), shapes.kv.codec is not None
        values = shapes.devices.abstract(shapes.kv.joined(self.size), THIRD) if coded else (half, half)
        return shapes.kept[0], values, ints(shapes.buckets.max_rows)

    def compute(self, shapes: Shapes, kept: list[jax.Array], values: Stored, place: jax.Array) -> list[jax.Array]:
        place = place[: self.size]
        buffers = shapes.kv.split(jnp.stack(values) if isinstance(values, tuple) else values)
        return [whole.at[:, place].set(own, **DROP) for whole, own in zip(kept, buffers, strict=True)]


@dataclass(frozen=True)
class KeepRows(Program[jax.Array]):
    """A program that stores a chunk's encoder rows as tokens `place` of the device tier."""

    name = "keep_rows"
    donates = (0,)

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        return [cls()] if shapes.kept_tokens and demand.linking else []

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        return shapes.kept_rows, shapes.encoder_rows, ints(shapes.buckets.max_rows)

    def compute(self, shapes: Shapes, kept: jax.Array, rows: jax.Array, place: jax.Array) -> jax.Array:
        return kept.at[:, place].set(rows, **DROP)


@dataclass(frozen=True)
class Restage(Program[jax.Array]):
    """A program that copies `size` encoder rows of the device tier to those of a chunk."""

    name = "restage"
    donates = (0,)
    size: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        return [cls(size) for size in shapes.token_buckets if shapes.kept_tokens and demand.linking]

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        return shapes.encoder_rows, shapes.kept_rows, ints(self.size), ints(self.size)

    def compute(
        self, shapes: Shapes, rows: jax.Array, kept: jax.Array, source: jax.Array, place: jax.Array
    ) -> jax.Array:
        return rows.at[:, place].set(kept[:, source], **DROP)
