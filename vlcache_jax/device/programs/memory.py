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
from vlcache_jax.device.sampler import Lanes
from vlcache_jax.models import rope
from vlcache_jax.pallas_kernels import PAGE
from vlcache_jax.pallas_kernels.split import SECOND, THIRD, WHOLE
from vlcache_jax.sampling import MAX_BIASED


@dataclass(frozen=True)
class EmptyPool(Program[jax.Array]):
    """K or V of a layer."""

    name = "pool"
    gives = SECOND

    def compute(self, shapes: Shapes) -> jax.Array:
        return jnp.zeros(shapes.pool.shape, shapes.pool.dtype)


@dataclass(frozen=True)
class EmptyEncoderRows(Program[jax.Array]):
    """Encoder rows of a step."""

    name = "encoder_rows"

    def compute(self, shapes: Shapes) -> jax.Array:
        return jnp.zeros(shapes.encoder_rows.shape, shapes.encoder_rows.dtype)


@dataclass(frozen=True)
class EmptyLanes(Program[Lanes]):
    """Lanes that nobody holds."""

    name = "lanes"

    def compute(self, shapes: Shapes) -> Lanes:
        return sampler.empty_lanes(shapes.ladder.max_sequences, shapes.config.text.vocab_size)


@dataclass(frozen=True)
class OpenLane(Program[Lanes]):
    """See `sampler.open_lane`."""

    name = "open_lane"
    donates = (0,)

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        lanes = shapes.lanes
        kept = lanes.marks, lanes.bias, lanes.words, lanes.recent
        return lanes, ints(), *(jax.ShapeDtypeStruct(field.shape[1:], field.dtype) for field in kept)

    def compute(self, shapes: Shapes, lanes: Lanes, lane: jax.Array, *kept: jax.Array) -> Lanes:
        return sampler.open_lane(lanes, lane, *kept)


@dataclass(frozen=True)
class HoldLanes(Program[Lanes]):
    """See `sampler.hold_lanes`; of `count` lanes. Few ask for it, so it is compiled when somebody does."""

    name = "hold"
    donates = (0,)
    count: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        return []

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        words, pairs = -(-shapes.config.text.vocab_size // 32), (self.count, MAX_BIASED)
        added = jax.ShapeDtypeStruct(pairs, jnp.float32)
        return shapes.lanes, ints(self.count), ints(self.count, words), ints(*pairs), added

    def compute(self, shapes: Shapes, lanes: Lanes, *held: jax.Array) -> Lanes:
        return sampler.hold_lanes(lanes, *held)


def _together(pool: Halves, source: jax.Array, target: jax.Array) -> Halves:
    """The pool with pages copied; targets beyond it are nobody's."""

    def copied(half: jax.Array) -> jax.Array:
        pages = half.reshape(-1, PAGE, *half.shape[1:])
        return pages.at[target].set(pages[source], mode="drop").reshape(half.shape)

    return jax.tree.map(copied, pool)


def _one_by_one(pool: Halves, source: jax.Array, target: jax.Array) -> Halves:
    """The same in place, where nobody's targets come last: as a gather and a scatter, a CPU copies the whole pool."""

    def copy(i: jax.Array, half: jax.Array) -> jax.Array:
        page = jax.lax.dynamic_slice_in_dim(half, source[i] * PAGE, PAGE)
        return jax.lax.dynamic_update_slice_in_dim(half, page, target[i] * PAGE, 0)

    def copied(half: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, (target < len(half) // PAGE).sum(), copy, half)

    return jax.tree.map(copied, pool)


@dataclass(frozen=True)
class CopyPages(Program[Halves]):
    """The pool with `count` pages copied to others."""

    name = "copy"
    donates = (0,)
    gives = SECOND
    count: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        return [cls(count) for count in demand.ladder.sequences]

    @classmethod
    def repeats(cls, shapes: Shapes, repeat: Repeat) -> Iterable[Self]:
        return [cls(count) for count in sorted(repeat.copied)]

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        return shapes.pools(shapes.config.text.num_layers), ints(self.count), ints(self.count)

    def compute(self, shapes: Shapes, pool: Halves, source: jax.Array, target: jax.Array) -> Halves:
        copied: Halves = jax.lax.platform_dependent(pool, source, target, cpu=_one_by_one, default=_together)
        return copied


DROP: dict[str, Any] = {"mode": "drop", "unique_indices": True}  # what a place beyond all others means


@dataclass(frozen=True)
class Link(Program[tuple[Halves, Any, jax.Array]]):
    """K, V of `count` images in `layers` layers that follow each other. Where there is a device tier, they are also
    written into it."""

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
        for size in (patches // shapes.config.vision.merge_size**2 for patches in demand.ladder.patches):
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
            by_plane = [*zip(*images, strict=True)]
            kept = [
                [
                    whole.at[:, where].set(jnp.concatenate([image[layer] for image in own], 1), **DROP)
                    for whole, own in zip(planes, by_plane, strict=True)
                ]
                for layer, planes in enumerate(kept)
            ]
        return linked, kept, jnp.zeros((), jnp.int32)


@dataclass(frozen=True)
class Recall(Program[tuple[Halves, jax.Array]]):
    """K, V of `size` tokens in the device tier, in `layers` layers that follow each other."""

    name = "recall"
    donates = (0,)
    gives = SECOND, WHOLE
    size: int
    layers: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        if not (shapes.kept_tokens and demand.linking):
            return []
        return [cls(size, layers) for size in shapes.recall_rungs for layers in _groups(shapes)]

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
        stored = [([[plane[None] for plane in planes]], 0) for planes in kept]
        return _link(shapes, pool, stored, places, constants, source), jnp.zeros((), jnp.int32)


@dataclass(frozen=True)
class Code(Program[jax.Array]):
    """A layer's keys before rotation and values, coded, as one array: see `KVShape.joined`."""

    name = "code"
    gives = THIRD
    size: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        return [cls(size) for size in demand.ladder.rows if shapes.kv.codec is not None and demand.linking]

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        return shapes.half(self.size), shapes.half(self.size), shapes.constants()[0]

    def compute(self, shapes: Shapes, k: jax.Array, v: jax.Array, constants: Constants) -> jax.Array:
        codec = shapes.kv.codec
        assert codec is not None
        return jnp.stack([jnp.concatenate(planes, -1) for planes in (codec.encode(k, *constants), codec.encode(v))])


def _groups(shapes: Shapes) -> set[int]:
    """How many layers are linked together."""
    return {part.stop - part.start for part in shapes.link_groups}


def _link(
    shapes: Shapes,
    pool: Halves,
    stored: list[tuple[list[list[jax.Array]], int]],
    places: jax.Array,
    constants: list[Constants],
    source: jax.Array | None = None,
) -> Halves:
    """The pool's layers with what is stored; `stored`: of each the planes of its images, and which layer of them."""
    text = shapes.config.text
    slot, *position = jnp.moveaxis(places, 1, 0).reshape(4, -1)
    cos, sin = rope.text_rotation(
        jnp.stack(position), text.rope_theta, text.mrope_section, text.mrope_interleaved, shapes.dtype
    )
    # Behind the barrier they are taken once, not anew for each head of each layer.
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
    """The device tier: of each layer the planes of its tokens, and encoder rows."""

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
    """A layer's rows become tokens `place` of the device tier; places beyond it are dropped."""

    name = "keep"
    donates = (0,)
    gives = THIRD
    size: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        return [cls(size) for size in demand.ladder.rows if shapes.kept_tokens and demand.linking]

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        half, coded = shapes.half(self.size), shapes.kv.codec is not None
        values = shapes.devices.abstract(shapes.kv.joined(self.size), THIRD) if coded else (half, half)
        return shapes.kept[0], values, ints(shapes.ladder.max_rows)

    def compute(self, shapes: Shapes, kept: list[jax.Array], values: Stored, place: jax.Array) -> list[jax.Array]:
        place = place[: self.size]
        planes = shapes.kv.split(jnp.stack(values) if isinstance(values, tuple) else values)
        return [whole.at[:, place].set(own, **DROP) for whole, own in zip(kept, planes, strict=True)]


@dataclass(frozen=True)
class KeepRows(Program[jax.Array]):
    """The same of a step's encoder rows."""

    name = "keep_rows"
    donates = (0,)

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        return [cls()] if shapes.kept_tokens and demand.linking else []

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        return shapes.kept_rows, shapes.encoder_rows, ints(shapes.ladder.max_rows)

    def compute(self, shapes: Shapes, kept: jax.Array, rows: jax.Array, place: jax.Array) -> jax.Array:
        return kept.at[:, place].set(rows, **DROP)


@dataclass(frozen=True)
class Restage(Program[jax.Array]):
    """`size` encoder rows of the device tier become those of a step."""

    name = "restage"
    donates = (0,)
    size: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        return [cls(size) for size in shapes.token_rungs if shapes.kept_tokens and demand.linking]

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        return shapes.encoder_rows, shapes.kept_rows, ints(self.size), ints(self.size)

    def compute(
        self, shapes: Shapes, rows: jax.Array, kept: jax.Array, source: jax.Array, place: jax.Array
    ) -> jax.Array:
        return rows.at[:, place].set(kept[:, source], **DROP)
