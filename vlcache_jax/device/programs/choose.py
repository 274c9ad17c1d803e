"""Programs that choose on the device which rows go on, for policies that do; see `vlcache_jax.reuse.selection`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp

from vlcache_jax.device.packed import repack, unpack
from vlcache_jax.device.programs.base import Demand, Program
from vlcache_jax.device.programs.shapes import Params, Shapes, ints
from vlcache_jax.models import Rows
from vlcache_jax.pallas_kernels import PAGE
from vlcache_jax.reuse.selection import SelectingPolicy, choose, narrow, project


@dataclass(frozen=True)
class ScoreRows(Program[jax.Array]):
    """A layer's scores of rows, added to those before; `window` pages of the prompt are looked at."""

    name = "score_rows"
    size: int
    window: int
    policy: SelectingPolicy
    like: tuple[int, ...] = (0,)

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        if (policy := demand.selecting) is None:
            return
        scored = {shapes.like[layer : layer + 1] for layer in policy.scored_layers}
        rungs = demand.ladder.rows
        for below, size in zip((0, *rungs), rungs, strict=False):
            # A prompt may be followed by what is scored, as many rows as the head holds.
            least = below - demand.ladder.max_sequences
            for window in shapes.windows:
                if window * PAGE > least:
                    yield from (cls(size, window, policy, like) for like in scored)

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        flags, scores = (jax.ShapeDtypeStruct((self.size,), dtype) for dtype in (jnp.bool_, jnp.float32))
        return (
            shapes.text["layers"][self.like[0]], shapes.hidden(self.size), shapes.pool, shapes.pool, shapes.packed,
            flags, ints(2), ints(self.window), scores,
        )  # fmt: skip

    def compute(
        self,
        shapes: Shapes,
        params: Params,
        x: jax.Array,
        k: jax.Array,
        v: jax.Array,
        rows: jax.Array,
        is_image: jax.Array,
        request: jax.Array,
        table: jax.Array,
        before: jax.Array,
    ) -> jax.Array:
        layer = shapes.bind_layer(params)
        seen = project(layer, x, k, v, unpack(rows, self.size), is_image, request, table)
        return before + self.policy.score(seen)


@dataclass(frozen=True)
class Choose(Program[tuple[jax.Array, jax.Array, jax.Array]]):
    """(hidden states, rows and numbers of all rows, those first that go on)."""

    name = "choose"
    size: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        return [] if demand.selecting is None else [cls(size) for size in demand.ladder.rows]

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        score = jax.ShapeDtypeStruct((self.size,), jnp.float32)
        return shapes.hidden(self.size), shapes.packed, score, ints(2)

    def compute(
        self, shapes: Shapes, x: jax.Array, rows: jax.Array, score: jax.Array, counts: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        order = choose(score, *counts)
        ordered = Rows(*(field[..., order] for field in unpack(rows, self.size)))
        return x[order], repack(ordered, shapes.ladder.max_rows), order


@dataclass(frozen=True)
class Narrow(Program[jax.Array]):
    """Of `size` rows `less`, see `selection.narrow`."""

    name = "narrow"
    size: int
    less: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        if demand.selecting is None:
            return []
        return [cls(size, less) for size in demand.ladder.rows for less in demand.ladder.rows if less <= size]

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        return shapes.packed, ints()

    def compute(self, shapes: Shapes, rows: jax.Array, count: jax.Array) -> jax.Array:
        fewer = narrow(unpack(rows, self.size), count, size=self.less, slots=shapes.num_slots)
        return repack(fewer, shapes.ladder.max_rows)


@dataclass(frozen=True)
class Take(Program[jax.Array]):
    """The first `less` of `size` rows in a new order."""

    name = "take"
    size: int
    less: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        if demand.selecting is None or demand.selecting.check_layer >= shapes.config.vision.num_deepstack:
            return []
        return [cls(size, less) for size in demand.ladder.rows for less in demand.ladder.rows if less <= size]

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        return shapes.hidden(self.size), ints(self.size)

    def compute(self, shapes: Shapes, x: jax.Array, order: jax.Array) -> jax.Array:
        return x[order[: self.less]]
