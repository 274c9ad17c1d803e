"""Programs that bring what is stored into the pool, and what is computed into the form that is stored."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp

from vlcache_jax import pallas_kernels as kernels
from vlcache_jax.device.programs.base import Demand, Program, Repeat
from vlcache_jax.device.programs.shapes import Constants, Halves, Shapes, ints
from vlcache_jax.models import rope
from vlcache_jax.pallas_kernels.split import SECOND, THIRD, WHOLE

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
