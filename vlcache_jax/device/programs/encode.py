"""Programs that take pixels to encoder rows of a step."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from vlcache_jax.device.programs.base import Demand, Program
from vlcache_jax.device.programs.shapes import Params, Shapes, abstract, ints
from vlcache_jax.models import ModelConfig, bind
from vlcache_jax.models.registry import FAMILIES
from vlcache_jax.models.vision import Grid


@dataclass(frozen=True)
class Encode(Program[jax.Array]):
    """`size` patches of images: -> [1 + J, P / merge**2, M]."""

    name = "encode"
    size: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> abc.Iterable[Self]:
        return [cls(size) for size in demand.ladder.patches]

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        vision = shapes.config.vision
        pixels = self.size, vision.in_channels, vision.temporal_patch_size, vision.patch_size**2
        smallest = (1, vision.merge_size, vision.merge_size)
        tables = abstract(encoder_tables(shapes.config, [smallest], self.size))
        return shapes.visual, jax.ShapeDtypeStruct(pixels, jnp.uint8), shapes.normalization, tables

    def compute(
        self, shapes: Shapes, params: Params, pixels: jax.Array, normalization: jax.Array, tables: Params
    ) -> jax.Array:
        tower = bind(shapes.tower_graph, params)
        return tower(pixels, normalization, tables, implementation=shapes.implementation)


@dataclass(frozen=True)
class Stage(Program[jax.Array]):
    """Encoder rows of a step, where `size` rows that are encoded have come to their places."""

    name = "stage"
    donates = (0,)
    size: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> abc.Iterable[Self]:
        return [cls(size // shapes.config.vision.merge_size**2) for size in demand.ladder.patches]

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        depth, _, width = shapes.encoder_rows.shape
        return shapes.encoder_rows, jax.ShapeDtypeStruct((depth, self.size, width), shapes.dtype), ints(self.size)

    def compute(self, shapes: Shapes, rows: jax.Array, encoded: jax.Array, place: jax.Array) -> jax.Array:
        return rows.at[:, place].set(encoded, mode="drop", unique_indices=True)


def encoder_tables(config: ModelConfig, grids: abc.Sequence[Grid], num_patches: int) -> dict[str, np.ndarray]:
    """What the vision tower needs to know of the images of a call."""
    return FAMILIES[config.model_type].encoder_tables(config.vision, grids, num_patches)
