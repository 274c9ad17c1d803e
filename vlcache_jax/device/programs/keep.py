"""Programs of the device tier: records that stay on the device, beside the pool."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp

from vlcache_jax.device.programs.base import Demand, Program
from vlcache_jax.device.programs.link import DROP
from vlcache_jax.device.programs.shapes import Halves, Shapes, Stored, ints
from vlcache_jax.pallas_kernels.split import THIRD, WHOLE


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
