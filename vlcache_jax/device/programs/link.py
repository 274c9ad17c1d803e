"""Programs that bring what is stored into the pool, and what is computed into the form that is stored."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp

from vlcache_jax import pallas_kernels as kernels
from vlcache_jax.device.programs.base import Demand, Program
from vlcache_jax.device.programs.shapes import Constants, Halves, Shapes, ints
from vlcache_jax.models import rope

DROP: dict[str, Any] = {"mode": "drop", "unique_indices": True}  # what a place beyond all others means


@dataclass(frozen=True)
class Link(Program[tuple[Halves, Any, jax.Array]]):
    """K, V of `count` images in `layers` layers that follow each other. Where there is a device tier, they are also
    written into it."""

    name = "link"
    donates = (0, 1)
    size: int
    count: int
    layers: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        if not demand.linking:
            return
        for size in (patches // shapes.config.vision.merge_size**2 for patches in demand.ladder.patches):
            yield from (cls(size, count, layers) for count in shapes.linked(size) for layers in _groups(shapes))

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        layers, stored = self.layers, shapes.kv.record(self.size, self.layers)
        kept, where = (shapes.kept[:layers], ints(self.count * self.size)) if shapes.kept_tokens else (None, None)
        places = ints(self.count, 4, self.size)
        return shapes.pools(layers), kept, [stored] * self.count, places, where, shapes.constants()[:layers]

    def compute(
        self,
        shapes: Shapes,
        pool: Halves,
        kept: Halves | None,
        data: list[jax.Array],
        places: jax.Array,
        where: Any,
        constants: list[Constants],
    ) -> tuple[Halves, Any, jax.Array]:
        slot, cos, sin = _turned(shapes, places)
        write = _with(shapes, kernels.link)
        linked = [
            [*write(k, v, data, slot, cos, sin, layer=layer, bias=bias, weight=weight)]
            for layer, ((k, v), (bias, weight)) in enumerate(zip(pool, constants, strict=True))
        ]
        if kept is not None:
            planes = [_planes(shapes, image) for image in data]
            kept = [
                [
                    whole.at[:, where].set(jnp.concatenate([own[i][layer] for own in planes], 1), **DROP)
                    for i, whole in enumerate(wholes)
                ]
                for layer, wholes in enumerate(kept)
            ]
        return linked, kept, jnp.zeros((), jnp.int32)


@dataclass(frozen=True)
class Recall(Program[tuple[Halves, jax.Array]]):
    """K, V of `size` tokens in the device tier, in `layers` layers that follow each other."""

    name = "recall"
    donates = (0,)
    size: int
    layers: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        if not (shapes.kept_tokens and demand.linking):
            return []
        return [cls(size, layers) for size in shapes.recall_rungs for layers in _groups(shapes)]

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
        slot, cos, sin = _turned(shapes, places)
        write = _with(shapes, kernels.recall)
        linked = [
            [*write(k, v, planes, source, slot, cos, sin, bias=bias, weight=weight)]
            for (k, v), planes, (bias, weight) in zip(pool, kept, constants, strict=True)
        ]
        return linked, jnp.zeros((), jnp.int32)


@dataclass(frozen=True)
class Code(Program[jax.Array]):
    """A layer's keys before rotation and values, coded, uint8 [2, size, W]."""

    name = "code"
    size: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        return [cls(size) for size in demand.ladder.rows if shapes.kv.codec is not None and demand.linking]

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        return shapes.kv.half(self.size), shapes.kv.half(self.size), shapes.constants()[0]

    def compute(self, shapes: Shapes, k: jax.Array, v: jax.Array, constants: Constants) -> jax.Array:
        codec = shapes.kv.codec
        assert codec is not None
        return jnp.stack([codec.encode(k, *constants), codec.encode(v)])


def _groups(shapes: Shapes) -> set[int]:
    """How many layers are linked together."""
    return {part.stop - part.start for part in shapes.link_groups}


def _with(shapes: Shapes, kernel: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(kernel, codec=shapes.kv.codec_name, implementation=shapes.implementation)


def _turned(shapes: Shapes, places: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Slots of all tokens, and cosines and sines of their angles."""
    text = shapes.config.text
    slot, *position = jnp.moveaxis(places, 1, 0).reshape(4, -1)
    cos, sin = rope.text_rotation(
        jnp.stack(position), text.rope_theta, text.mrope_section, text.mrope_interleaved, shapes.dtype
    )
    # Behind the barrier they are taken once, not anew for each head of each layer.
    cos, sin = jax.lax.optimization_barrier((cos, sin))
    return slot, cos, sin


def _planes(shapes: Shapes, data: jax.Array) -> list[jax.Array]:
    """Of an image's data in some layers, what a token has in each plane: [layers, 2, T, ...] each."""
    if shapes.kv.codec is None:
        return [data]
    codes, scales = shapes.kv.code_bytes
    tokens = data.shape[2] // (codes + scales)
    halves = data[:, :, : tokens * codes], data[:, :, tokens * codes :]
    return [half.reshape(*data.shape[:2], tokens, -1) for half in halves]
