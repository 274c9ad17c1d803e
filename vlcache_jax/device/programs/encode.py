"""Programs that take pixels to encoder rows of a step."""

from __future__ import annotations

import functools
from collections import abc
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from vlcache_jax.device.programs.base import Demand, Params, Program, Shapes, abstract, ints
from vlcache_jax.models import ModelConfig, bind
from vlcache_jax.models.registry import FAMILIES
from vlcache_jax.models.vision import Grid
from vlcache_jax.pallas_kernels import split
from vlcache_jax.pallas_kernels.split import FIRST, WHOLE


@dataclass(frozen=True)
class Encode(Program[jax.Array]):
    """`size` patches of images: -> [1 + J, P / merge**2, M]."""

    name = "encode"
    size: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> abc.Iterable[Self]:
        return [cls(size) for size in demand.ladder.patches]

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        return shapes.visual, *_images(shapes.config, self.size), shapes.normalization

    def compute(
        self, shapes: Shapes, params: Params, pixels: jax.Array, tables: Params, normalization: jax.Array
    ) -> jax.Array:
        return split.spread(functools.partial(_encoded, shapes), WHOLE, WHOLE)(params, pixels, tables, normalization)


@dataclass(frozen=True)
class EncodeApart(Program[jax.Array]):
    """The same of images of which each device encodes some: `each` patches on each of them, of `size` in all."""

    name = "encode_apart"
    size: int
    each: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> abc.Iterable[Self]:
        for size in demand.ladder.patches:
            yield from (cls(size, each) for each in shapes.devices.shares(size, demand.ladder.patches))

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        def of_each(one: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            stacked = jax.ShapeDtypeStruct((shapes.devices.count, *one.shape), one.dtype)
            return shapes.devices.abstract(stacked, FIRST)

        images = jax.tree.map(of_each, _images(shapes.config, self.each))
        return shapes.visual, *images, shapes.normalization, ints(self.size // shapes.config.vision.merge_size**2)

    def compute(
        self,
        shapes: Shapes,
        params: Params,
        pixels: jax.Array,
        tables: Params,
        normalization: jax.Array,
        order: jax.Array,
    ) -> jax.Array:
        """Encodes images.

        Args:
          pixels, tables: of the images of each device, [devices, ...].
          order: which of all devices' rows, one device's after another's, each row of the result is.
        """

        def own(params: Params, pixels: jax.Array, tables: Params, normalization: jax.Array) -> jax.Array:
            pixels, tables = jax.tree.map(lambda part: part[0], (pixels, tables))
            rows = _encoded(shapes, params, pixels, tables, normalization)
            return jax.lax.all_gather(rows, split.AXIS, axis=1, tiled=True)

        takes = WHOLE, FIRST, FIRST, WHOLE
        return split.spread(own, takes, WHOLE)(params, pixels, tables, normalization)[:, order]


def _images(config: ModelConfig, size: int) -> tuple[jax.ShapeDtypeStruct, Params]:
    """Pixels and tables of `size` patches."""
    vision = config.vision
    pixels = size, vision.in_channels, vision.temporal_patch_size, vision.patch_size**2
    tables: Params = abstract(encoder_tables(config, [smallest_grid(config)], size))
    return jax.ShapeDtypeStruct(pixels, jnp.uint8), tables


def _encoded(shapes: Shapes, params: Params, pixels: jax.Array, tables: Params, normalization: jax.Array) -> jax.Array:
    tower = bind(shapes.tower_graph, params)
    return tower(pixels, normalization, tables, implementation=shapes.implementation)


def rows_apart(shares: abc.Sequence[abc.Sequence[int]], tokens: abc.Sequence[int], each: int) -> np.ndarray:
    """Where the rows of images are, image after image, that devices encode apart.

    Args:
      shares: which images each device has, in its order.
      tokens: of each image.
      each: rows that each device has, one device's after another's.
    """
    first = dict[int, int]()
    for device, share in enumerate(shares):
        begin = device * each
        for image in share:
            first[image] = begin
            begin += tokens[image]
    return np.concatenate([first[image] + np.arange(count) for image, count in enumerate(tokens)])


def smallest_grid(config: ModelConfig) -> Grid:
    """Of an image of one token."""
    return 1, config.vision.merge_size, config.vision.merge_size


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
