"""Programs that create the states of sequences, and move them and maps of images between slots and cache entries.

A map has two slots, one for B and one for A, see `layer_kinds.BlockKind`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from vlcache_jax.device.programs.base import Demand, Halves, Program, Repeat, Shapes, ints
from vlcache_jax.pallas_kernels.split import SECOND, WHOLE

_LARGEST = 127  # largest code of a value of a map
_TINY = 1e-30  # in place of the scale 0 of rows of zeros


@dataclass(frozen=True)
class EmptyStates(Program[list[jax.Array]]):
    """A program that creates the states of a layer, all zero.

    Attributes:
      like: first layer with states of these shapes.
    """

    name = "states"
    gives = SECOND
    like: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        return cls.of(shapes)

    @classmethod
    def of(cls, shapes: Shapes) -> list[Self]:
        """Return the programs of a model, one for layers of the same shapes."""
        kinds = map(shapes.config.text.kind_of, shapes.like)
        return [cls(like) for like in sorted({i for i, kind in zip(shapes.like, kinds, strict=True) if kind.states})]

    def compute(self, shapes: Shapes) -> list[jax.Array]:
        return [jnp.zeros(one.shape, one.dtype) for one in shapes.memory(self.like)]


@dataclass(frozen=True)
class _LoadParts(Program[Halves]):
    """A program that loads what some parts of a cache entry hold of layers with states.

    Attributes:
      parts: for each part, the layers whose states it holds, as the first layers with states of the same shapes.
    """

    donates = (0,)
    gives = SECOND
    parts: tuple[tuple[int, ...], ...]

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        return cls.of(shapes) if demand.linking else []

    @classmethod
    def repeats(cls, shapes: Shapes, repeat: Repeat) -> Iterable[Self]:
        return cls.of(shapes) if repeat.linked else []

    @classmethod
    def of(cls, shapes: Shapes) -> list[Self]:
        """Return the programs of a model, one for groups of layers with states of the same shapes."""
        groups = (shapes.state_parts(group.parts) for group in shapes.link_groups if shapes.num_states)
        return [cls(parts) for parts in sorted({_like(shapes, parts) for parts in groups})]

    @classmethod
    def for_parts(cls, shapes: Shapes, parts: slice) -> Self:
        """Return the program of some parts of a cache entry."""
        return cls(_like(shapes, shapes.state_parts(parts)))

    def states(self, shapes: Shapes) -> list[Any]:
        """Return the abstract states of the layers."""
        return [shapes.memory(layer) for layers in self.parts for layer in layers]


@dataclass(frozen=True)
class LoadStates(_LoadParts):
    """A program that loads the states after an image, or a snapshot, from some parts of its cache entry into a slot."""

    name = "load_states"

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        stored = jax.ShapeDtypeStruct((len(self.parts), shapes.kv.states), jnp.float32)
        return self.states(shapes), stored, ints()

    def compute(self, shapes: Shapes, states: Halves, stored: jax.Array, slot: jax.Array) -> Halves:
        loaded = [list(arrays) for arrays in states]
        for place in _places(shapes, self.parts):
            _write(loaded, place, stored, slot)
        return loaded


@dataclass(frozen=True)
class StoreStates(Program[jax.Array]):
    """A program that returns the states of a slot as a cache entry holds them, float32 [L, n] (`KVShape.states`)."""

    name = "store_states"

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        return [cls()] if shapes.num_states and demand.linking else []

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        return shapes.states, ints()

    def compute(self, shapes: Shapes, states: Halves, slot: jax.Array) -> jax.Array:
        return _read(shapes, states, slot)


@dataclass(frozen=True)
class LoadMaps(_LoadParts):
    """A program that loads the map of an image, from some parts of its cache entry, into the slots of B and A."""

    name = "load_maps"

    @classmethod
    def of(cls, shapes: Shapes) -> list[Self]:
        return super().of(shapes) if shapes.kv.maps else []

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        kv, parts = shapes.kv, len(self.parts)
        floats = jax.ShapeDtypeStruct((parts, kv.map_states), jnp.float32)
        return self.states(shapes), floats, jax.ShapeDtypeStruct((parts, kv.entry_maps), kv.map_dtype), ints(), ints()

    def compute(
        self, shapes: Shapes, states: Halves, floats: jax.Array, maps: jax.Array, added: jax.Array, passed: jax.Array
    ) -> Halves:
        kv, loaded = shapes.kv, [list(arrays) for arrays in states]
        if kv.codec is not None:
            scales = floats[:, -2 * kv.rows :, None]
            maps = (maps.reshape(len(maps), 2 * kv.rows, -1) * scales).reshape(maps.shape)
        for place in _places(shapes, self.parts, linear=False):
            _write(loaded, place, floats, added)
        for place in _places(shapes, self.parts, linear=True):
            _write(loaded, place, maps[:, : kv.matrices], added)
            _write(loaded, place, maps[:, kv.matrices :], passed)
        return loaded


@dataclass(frozen=True)
class StoreMaps(Program[tuple[jax.Array, jax.Array]]):
    """A program that returns a map as a cache entry holds it, from the slots of B and A.

    The results are the last columns of `Meta.states`, float32 [L, `KVShape.map_states`], and `Meta.maps`. With a codec
    each row of B and A is rounded to int8 with a scale of its own.
    """

    name = "store_maps"
    gives = WHOLE, WHOLE

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        return [cls()] if shapes.kv.maps and demand.linking else []

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        return shapes.states, ints(), ints()

    def compute(
        self, shapes: Shapes, states: Halves, added: jax.Array, passed: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        kv, floats = shapes.kv, _read(shapes, states, added, linear=False)
        maps = jnp.concatenate([_read(shapes, states, slot, linear=True) for slot in (added, passed)], 1)
        if kv.codec is not None:
            rows = maps.reshape(len(maps), 2 * kv.rows, -1)
            scales = jnp.abs(rows).max(2) / _LARGEST
            floats = jnp.concatenate([floats, scales], 1)
            maps = jnp.round(rows / jnp.maximum(scales, _TINY)[..., None]).reshape(maps.shape)
        return floats, maps.astype(kv.map_dtype)


def _like(shapes: Shapes, parts: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(shapes.like[layer] for layer in layers) for layers in parts)


class _Place(NamedTuple):
    """The place of an array of a layer's state in some parts of a cache entry.

    Attributes:
      layer: number of the layer among those of the parts.
      array: number of the array in the layer.
      part: number of the part.
      values: its values among those of the part.
    """

    layer: int
    array: int
    part: int
    values: slice


def _places(shapes: Shapes, parts: tuple[tuple[int, ...], ...], linear: bool | None = None) -> Iterable[_Place]:
    """Yield where the states of layers are in the parts of a cache entry.

    Args:
      parts: for each part, the layers whose states it holds.
      linear: only states that change linearly (`StateArray.is_linear`), or only the others. None: all.
    """
    layer = 0
    for part, layers in enumerate(parts):
        first = 0
        for number in layers:
            for array, one in enumerate(shapes.config.text.kind_of(number).states):
                if linear in (None, one.is_linear):
                    yield _Place(layer, array, part, slice(first, first + one.values))
                    first += one.values
            layer += 1


def _read(shapes: Shapes, states: Halves, slot: jax.Array, linear: bool | None = None) -> jax.Array:
    """Return states of a slot, float32 [L, n]; see `_places`."""
    parts = shapes.state_parts(slice(None))
    rows: list[list[jax.Array]] = [[] for _ in parts]
    for place in _places(shapes, parts, linear):
        own = jax.lax.dynamic_index_in_dim(states[place.layer][place.array], slot, 0, False)
        rows[place.part].append(own.reshape(-1).astype(jnp.float32))
    joined = [jnp.concatenate(row) for row in rows]
    longest = max(map(len, joined))
    return jnp.stack([jnp.pad(row, (0, longest - len(row))) for row in joined])


def _write(states: list[list[jax.Array]], place: _Place, stored: jax.Array, slot: jax.Array) -> None:
    """Replace an array of states by one that has the values of a part in a slot."""
    array = states[place.layer][place.array]
    values = stored[place.part, place.values].reshape(1, *array.shape[1:]).astype(array.dtype)
    states[place.layer][place.array] = jax.lax.dynamic_update_slice_in_dim(array, values, slot, 0)
