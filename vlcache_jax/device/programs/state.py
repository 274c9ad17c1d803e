"""Programs that make, and those that change aside, what others update in place: the pool, encoder rows and lanes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp

from vlcache_jax.device import sampler
from vlcache_jax.device.programs.base import Demand, Program, Repeat
from vlcache_jax.device.programs.shapes import Halves, Shapes, ints
from vlcache_jax.device.sampler import Lanes
from vlcache_jax.pallas_kernels import PAGE
from vlcache_jax.pallas_kernels.split import SECOND
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
