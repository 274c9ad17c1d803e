"""Programs that take a step's tokens through the layers, or choose on the device which tokens continue.

See `vlcache_jax.reuse.selection` for the policies that choose.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp

from vlcache_jax.device.programs.base import Demand, Halves, Params, Program, Shapes, ints, repack, unpack
from vlcache_jax.models import Rows, bind, decoder
from vlcache_jax.pallas_kernels import PAGE, Work
from vlcache_jax.pallas_kernels.split import SECOND, WHOLE
from vlcache_jax.reuse.selection import SelectingPolicy, choose, narrow, project
from vlcache_jax.reuse.shift import Moves, differences, move

BLOCK = 4  # layers that are one program where steps are short
BLOCK_ROWS = 1024  # of a step beyond which a layer takes longer than its launch by far

Captured = tuple[jax.Array, jax.Array]  # a layer's keys before rotation, and values


@dataclass(frozen=True)
class Embed(Program[tuple[jax.Array, list[jax.Array]]]):
    """Hidden states that enter the first layer, and DeepStack features of the first layers."""

    name = "embed"
    follows_rows = True
    size: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        return [cls(size) for size in demand.ladder.rows]

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        return shapes.text["embed_tokens"], shapes.encoder_rows, shapes.packed

    def compute(
        self, shapes: Shapes, table: Params, encoder_rows: jax.Array, rows: jax.Array
    ) -> tuple[jax.Array, list[jax.Array]]:
        source = unpack(rows, self.size).source
        x, deepstack = decoder.embed(bind(shapes.table_graph, table), encoder_rows, source)
        return x, list(deepstack)


@dataclass(frozen=True)
class Layer(Program[tuple[jax.Array, jax.Array, jax.Array, Captured]]):
    """A layer that `size` rows enter and `keep` leave: (x, k, v, what is captured)."""

    name = "layer"
    follows_rows = True
    gives = WHOLE, SECOND, SECOND, SECOND
    size: int
    keep: int
    has_deepstack: bool
    shifts: bool = False
    like: tuple[int, ...] = (0,)

    @property
    def donates(self) -> tuple[int, ...]:
        # x can only be updated in place where the output has its shape.
        return (1, 2, 3) if self.keep == self.size else (2, 3)

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        like, rungs = shapes.like, demand.ladder.rows
        layers, deepstack = len(like), shapes.config.vision.num_deepstack
        for size in rungs:
            for shifts in {False, demand.shifting}:
                for i in range(layers):
                    keep = size if i < layers - 1 else shapes.ladder.outputs(size)
                    yield cls(size, keep, i < deepstack, shifts, like[i : i + 1])
            # Steps with rows of images that are moved move in every layer, and no others have fewer and fewer rows.
            for i in demand.shrinking:
                for less in rungs[: rungs.index(size)]:
                    yield cls(size, less, i < deepstack, demand.shifting, like[i : i + 1])
            # Logits of all rows, slice by slice.
            yield cls(size, size, layers - 1 < deepstack, False, like[-1:])

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        x, work = shapes.hidden(self.size), shapes.work_config(self.keep).abstract()
        return (
            shapes.text["layers"][self.like[0]], x, shapes.pool, shapes.pool, shapes.packed, ints(2), work,
            x if self.has_deepstack else None, shapes.moves(1) if self.shifts else None,
        )  # fmt: skip

    def compute(
        self,
        shapes: Shapes,
        params: Params,
        x: jax.Array,
        k: jax.Array,
        v: jax.Array,
        rows: jax.Array,
        active: jax.Array,
        work: Work,
        added: jax.Array | None,
        moves: Moves | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array, Captured]:
        moves, own = _of_layer(moves, 0), unpack(rows, self.size)
        return layer_step(shapes, params, x, k, v, own, active, work, added, moves, keep=self.keep)


@dataclass(frozen=True)
class Block(Program[tuple[jax.Array, Halves, list[Captured]]]):
    """`BLOCK` layers after each other that all rows leave, none of them with DeepStack features."""

    name = "layers"
    follows_rows = True
    gives = WHOLE, SECOND, SECOND
    donates = (1, 2)
    size: int
    shifts: bool = False
    like: tuple[int, ...] = (0,) * BLOCK

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        like = shapes.like
        first_layers = range(shapes.config.vision.num_deepstack, len(like) - BLOCK + 1)
        for size in demand.ladder.rows:
            if size <= BLOCK_ROWS:
                for shifts in {False, demand.shifting}:
                    yield from (cls(size, shifts, like[first : first + BLOCK]) for first in first_layers)

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        weights, work = [shapes.text["layers"][i] for i in self.like], shapes.work_config(self.size).abstract()
        moves = shapes.moves(BLOCK) if self.shifts else None
        return weights, shapes.hidden(self.size), shapes.pools(BLOCK), shapes.packed, ints(BLOCK, 2), work, moves

    def compute(
        self,
        shapes: Shapes,
        params: list[Params],
        x: jax.Array,
        pool: Halves,
        rows: jax.Array,
        active: jax.Array,
        work: Work,
        moves: Moves | None,
    ) -> tuple[jax.Array, Halves, list[Captured]]:
        # An inner jit: what they have in common is compiled once.
        layer = jax.jit(functools.partial(layer_step, shapes, keep=self.size))
        rest, captured, own = [], [], unpack(rows, self.size)
        for i, weights in enumerate(params):
            x, k, v, values = layer(weights, x, *pool[i], own, active[i], work, None, _of_layer(moves, i))
            rest.append([k, v])
            captured.append(values)
        return x, rest, captured


@dataclass(frozen=True)
class Slice(Program[jax.Array]):
    """The first `less` of `size` rows."""

    name = "slice"
    follows_rows = True
    size: int
    less: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        rungs = demand.ladder.rows
        if not demand.shrinking or min(demand.shrinking) >= shapes.config.vision.num_deepstack - 1:
            return []
        return [cls(size, less) for size in rungs for less in rungs if less < size]

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        return (shapes.hidden(self.size),)

    def compute(self, shapes: Shapes, x: jax.Array) -> jax.Array:
        return x[: self.less]


def layer_step(
    shapes: Shapes,
    params: Params,
    x: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rows: Rows,
    active: jax.Array,
    work: Work,
    added: jax.Array | None = None,
    moves: Moves | None = None,
    *,
    keep: int,
    capture: bool = True,
) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
    """A layer of which the first rows write: the bound may reach beyond them, into rows that have dropped out, whose
    slots hold linked K, V. Before that, linked K, V are moved by what the rows show.

    `active`: [2], rows that write, and of them rows that the next layer needs.
    """
    index = jnp.arange(len(x), dtype=jnp.int32)
    writing, needed = active
    layer = shapes.bind_layer(params)
    if moves is not None:
        row_image = jnp.where(index < writing, moves.row_image[: len(x)], -1)
        k, v = move(layer.self_attn, k, v, differences(layer, x, k, v, rows, row_image), moves)
    rows = rows._replace(slot=jnp.where(index < writing, rows.slot, shapes.num_slots + index))
    return layer(
        x, k, v, rows, added, work,
        keep=keep, needed=needed, capture=capture, implementation=shapes.implementation,
    )  # fmt: skip


def _of_layer(moves: Moves | None, index: int) -> Moves | None:
    """Of what several layers move, what one does."""
    return moves and Moves(moves.row_image, moves.tokens, moves.layer[index], moves.count[index])


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
