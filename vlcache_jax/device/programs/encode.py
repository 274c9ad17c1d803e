"""Programs that compute encoder rows from pixels."""

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
    """A program that encodes `size` patches, P, of images: -> [1 + J, P / merge**2, M]."""

    name = "encode"
    size: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> abc.Iterable[Self]:
        return [cls(size) for size in demand.buckets.patches]

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        return shapes.visual, *_images(shapes.config, self.size), shapes.normalization

    def compute(
        self, shapes: Shapes, params: Params, pixels: jax.Array, tables: Params, normalization: jax.Array
    ) -> jax.Array:
        return split.spread(functools.partial(_encoded, shapes), WHOLE, WHOLE)(params, pixels, tables, normalization)


@dataclass(frozen=True)
class EncodeApart(Program[jax.Array]):
    """A program that encodes `size` patches of images on several devices, `each` patches on each device."""

    name = "encode_apart"
    size: int
    each: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> abc.Iterable[Self]:
        for size in demand.buckets.patches:
            yield from (cls(size, each) for each in shapes.devices.shares(size, demand.buckets.patches))

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
        """Encode images.

        Args:
          pixels, tables: inputs of each device's images, [devices, ...].
          order: for each row of the result, its index in the devices' concatenated rows.
        """

        def own(params: Params, pixels: jax.Array, tables: Params, normalization: jax.Array) -> jax.Array:
            pixels, tables = jax.tree.map(lambda part: part[0], (pixels, tables))
            rows = _encoded(shapes, params, pixels, tables, normalization)
            return jax.lax.all_gather(rows, split.AXIS, axis=1, tiled=True)

        takes = WHOLE, FIRST, FIRST, WHOLE
        return split.spread(own, takes, WHOLE)(params, pixels, tables, normalization)[:, order]


def _images(config: ModelConfig, size: int) -> tuple[jax.ShapeDtypeStruct, Params]:
    """Return abstract pixels and tables of `size` patches."""
    vision = config.vision
    pixels = size, vision.in_channels, vision.temporal_patch_size, vision.patch_size**2
    tables: Params = abstract(encoder_tables(config, [smallest_grid(config)], size))
    return jax.ShapeDtypeStruct(pixels, jnp.uint8), tables


def _encoded(shapes: Shapes, params: Params, pixels: jax.Array, tables: Params, normalization: jax.Array) -> jax.Array:
    tower = bind(shapes.tower_graph, params)
    return tower(pixels, normalization, tables, implementation=shapes.implementation)


def rows_apart(shares: abc.Sequence[abc.Sequence[int]], tokens: abc.Sequence[int], each: int) -> np.ndarray:
    """Return the indices of images' rows, image after image, in the concatenated rows of all devices.

    Args:
      shares: images of each device, in its order.
      tokens: number of tokens of each image.
      each: number of rows of each device.
    """
    first = dict[int, int]()
    for device, share in enumerate(shares):
        begin = device * each
        for image in share:
            first[image] = begin
            begin += tokens[image]
    return np.concatenate([first[image] + np.arange(count) for image, count in enumerate(tokens)])


def smallest_grid(config: ModelConfig) -> Grid:
    """Return the grid of an image of one token."""
    return 1, config.vision.merge_size, config.vision.merge_size


@dataclass(frozen=True)
class Stage(Program[jax.Array]):
    """A program that copies `size` encoded rows to their places among the encoder rows of a chunk."""

    name = "stage"
    donates = (0,)
    size: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> abc.Iterable[Self]:
        return [cls(size // shapes.config.vision.merge_size**2) for size in demand.buckets.patches]

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        depth, _, width = shapes.encoder_rows.shape
        return shapes.encoder_rows, jax.ShapeDtypeStruct((depth, self.size, width), shapes.dtype), ints(self.size)

    def compute(self, shapes: Shapes, rows: jax.Array, encoded: jax.Array, place: jax.Array) -> jax.Array:
        return rows.at[:, place].set(encoded, mode="drop", unique_indices=True)


def encoder_tables(config: ModelConfig, grids: abc.Sequence[Grid], num_patches: int) -> dict[str, np.ndarray]:
    """Return the index tables of the vision tower for the images of a call, padded to `num_patches`."""
    return FAMILIES[config.model_type].encoder_tables(config.vision, grids, num_patches)
