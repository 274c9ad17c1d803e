"""Programs that compute a chunk's tokens through the layers, or select on the device which tokens continue.

See `vlcache_jax.reuse.selection` for the policies that select.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp

from vlcache_jax.device.programs.base import (
    Demand,
    Halves,
    Params,
    Program,
    Shapes,
    ints,
    repack,
    unpack,
    unpack_runs,
)
from vlcache_jax.models import Rows, bind, decoder
from vlcache_jax.models.layer_kinds import Runs, TokenStates
from vlcache_jax.pallas_kernels import PAGE, Work
from vlcache_jax.pallas_kernels.split import SECOND, WHOLE
from vlcache_jax.reuse.selection import SelectingPolicy, choose, narrow, project
from vlcache_jax.reuse.shift import Moves, differences, move

BLOCK = 4  # layers per program for short chunks
BLOCK_ROWS = 1024  # tokens of a chunk beyond which a layer takes far longer than its launch

NewKV = tuple[jax.Array, jax.Array]  # a layer's keys before rotation, and values


@dataclass(frozen=True)
class Embed(Program[tuple[jax.Array, list[jax.Array]]]):
    """A program that returns hidden states before the first layer, and DeepStack features of the first layers."""

    name = "embed"
    follows_rows = True
    size: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        return [cls(size) for size in demand.buckets.rows]

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        return shapes.text["embed_tokens"], shapes.encoder_rows, shapes.packed

    def compute(
        self, shapes: Shapes, table: Params, encoder_rows: jax.Array, rows: jax.Array
    ) -> tuple[jax.Array, list[jax.Array]]:
        source = unpack(rows, self.size).source
        x, deepstack = decoder.embed(bind(shapes.table_graph, table), encoder_rows, source)
        return x, list(deepstack)


@dataclass(frozen=True)
class Layer(Program[tuple[jax.Array, list[jax.Array], NewKV | None]]):
    """A program of a layer that `size` rows enter and `keep` rows leave. It returns (x, memory, saved KV)."""

    name = "layer"
    follows_rows = True
    gives = WHOLE, SECOND, SECOND
    size: int
    keep: int
    has_deepstack: bool
    shifts: bool = False
    like: tuple[int, ...] = (0,)

    @property
    def donates(self) -> tuple[int, ...]:
        # x can only be updated in place if the output has its shape.
        return (1, 2) if self.keep == self.size else (2,)

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        like, sizes = shapes.like, demand.buckets.rows
        layers, deepstack = len(like), shapes.config.vision.num_deepstack
        for size in sizes:
            for shifts in {False, demand.shifting}:
                for i in range(layers):
                    keep = size if i < layers - 1 else shapes.buckets.outputs(size)
                    yield cls(size, keep, i < deepstack, shifts, like[i : i + 1])
            # Only chunks with image tokens to recompute lose tokens. If the policy shifts, they shift in every layer.
            for i in demand.shrinking:
                for less in sizes[: sizes.index(size)]:
                    yield cls(size, less, i < deepstack, demand.shifting, like[i : i + 1])
            # For logits of all rows, slice by slice.
            yield cls(size, size, layers - 1 < deepstack, False, like[-1:])

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        x, work = shapes.hidden(self.size), shapes.work_config(self.keep).abstract()
        return (
            shapes.text["layers"][self.like[0]], x, shapes.memory(self.like[0]), shapes.packed, ints(2), work,
            x if self.has_deepstack else None, shapes.moves(1) if self.shifts else None, shapes.runs,
        )  # fmt: skip

    def compute(
        self,
        shapes: Shapes,
        params: Params,
        x: jax.Array,
        memory: list[jax.Array],
        rows: jax.Array,
        active: jax.Array,
        work: Work,
        added: jax.Array | None,
        moves: Moves | None,
        runs: tuple[jax.Array, jax.Array] | None,
    ) -> tuple[jax.Array, list[jax.Array], NewKV | None]:
        moves, own, order = _of_layer(moves, 0), unpack(rows, self.size), unpack_runs(runs, self.size)
        return layer_step(shapes, params, x, memory, own, active, work, added, moves, order, keep=self.keep)


@dataclass(frozen=True)
class Block(Program[tuple[jax.Array, Halves, list[NewKV | None]]]):
    """A program of `BLOCK` consecutive layers that all rows leave, without DeepStack features."""

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
        for size in demand.buckets.rows:
            if size <= BLOCK_ROWS:
                for shifts in {False, demand.shifting}:
                    yield from (cls(size, shifts, like[first : first + BLOCK]) for first in first_layers)

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        weights, work = [shapes.text["layers"][i] for i in self.like], shapes.work_config(self.size).abstract()
        moves, memory = shapes.moves(BLOCK) if self.shifts else None, [shapes.memory(i) for i in self.like]
        return weights, shapes.hidden(self.size), memory, shapes.packed, ints(BLOCK, 2), work, moves, shapes.runs

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
        runs: tuple[jax.Array, jax.Array] | None,
    ) -> tuple[jax.Array, Halves, list[NewKV | None]]:
        # An inner jit, so that code shared by layers is compiled once.
        layer = jax.jit(functools.partial(layer_step, shapes, keep=self.size))
        rest, new_kv, own, order = [], [], unpack(rows, self.size), unpack_runs(runs, self.size)
        for i, weights in enumerate(params):
            x, memory, values = layer(weights, x, pool[i], own, active[i], work, None, _of_layer(moves, i), order)
            rest.append(memory)
            new_kv.append(values)
        return x, rest, new_kv


@dataclass(frozen=True)
class Slice(Program[jax.Array]):
    """A program that returns the first `less` of `size` rows."""

    name = "slice"
    follows_rows = True
    size: int
    less: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        sizes = demand.buckets.rows
        if not demand.shrinking or min(demand.shrinking) >= shapes.config.vision.num_deepstack - 1:
            return []
        return [cls(size, less) for size in sizes for less in sizes if less < size]

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        return (shapes.hidden(self.size),)

    def compute(self, shapes: Shapes, x: jax.Array) -> jax.Array:
        return x[: self.less]


def layer_step(
    shapes: Shapes,
    params: Params,
    x: jax.Array,
    memory: list[jax.Array],
    rows: Rows,
    active: jax.Array,
    work: Work,
    added: jax.Array | None = None,
    moves: Moves | None = None,
    runs: Runs | TokenStates | None = None,
    *,
    keep: int,
    return_kv: bool = True,
) -> tuple[jax.Array, list[jax.Array], Any]:
    """Compute a layer of which only the first rows write KV.

    A bucket may include rows after them that have dropped out, whose KV slots contain linked KV. Before the layer runs,
    linked KV is shifted by the change that the recomputed rows show. States are not.

    Args:
      x: hidden states [N, M].
      memory: K and V of the layer's pool, or its states.
      active: [2], number of rows that write KV, and number of rows that the next layer needs.
      work: work list of the attention.
      added: DeepStack features [N, M], or None.
      moves: linked KV to shift, or None.
      runs: order in which rows change states, for a model that has some.
      keep: number of rows that leave the layer.
      return_kv: also return the rows' KV, keys before rotation.

    Returns:
      (hidden states, memory, the rows' KV or None).
    """
    index = jnp.arange(len(x), dtype=jnp.int32)
    writing, needed = active
    layer = shapes.bind_layer(params)
    if moves is not None and hasattr(layer, "self_attn"):
        row_image = jnp.where(index < writing, moves.row_image[: len(x)], -1)
        k, v = memory
        memory = [*move(layer.self_attn, k, v, differences(layer, x, k, v, rows, row_image), moves)]
    rows = rows._replace(slot=jnp.where(index < writing, rows.slot, shapes.num_slots + index))
    return layer(
        x, memory, rows, added, work, runs,
        keep=keep, needed=needed, return_kv=return_kv, implementation=shapes.implementation,
    )  # fmt: skip


def _of_layer(moves: Moves | None, index: int) -> Moves | None:
    """Return the moves of one layer."""
    return moves and Moves(moves.row_image, moves.tokens, moves.layer[index], moves.count[index])


@dataclass(frozen=True)
class ScoreRows(Program[jax.Array]):
    """A program that adds a layer's scores of rows to earlier scores. It reads `window` pages of the prompt."""

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
        sizes = demand.buckets.rows
        for below, size in zip((0, *sizes), sizes, strict=False):
            # Tokens to score may follow a prompt, as many as the head has rows.
            min_tokens = below - demand.buckets.max_sequences
            for window in shapes.windows:
                if window * PAGE > min_tokens:
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
    """A program that sorts rows so that those that continue come first: (hidden states, packed rows, row indices)."""

    name = "choose"
    size: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        return [] if demand.selecting is None else [cls(size) for size in demand.buckets.rows]

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        score = jax.ShapeDtypeStruct((self.size,), jnp.float32)
        return shapes.hidden(self.size), shapes.packed, score, ints(2)

    def compute(
        self, shapes: Shapes, x: jax.Array, rows: jax.Array, score: jax.Array, counts: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        order = choose(score, *counts)
        ordered = Rows(*(field[..., order] for field in unpack(rows, self.size)))
        return x[order], repack(ordered, shapes.buckets.max_rows), order


@dataclass(frozen=True)
class Narrow(Program[jax.Array]):
    """A program that narrows `size` rows to `less`, see `selection.narrow`."""

    name = "narrow"
    size: int
    less: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        if demand.selecting is None:
            return []
        return [cls(size, less) for size in demand.buckets.rows for less in demand.buckets.rows if less <= size]

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        return shapes.packed, ints()

    def compute(self, shapes: Shapes, rows: jax.Array, count: jax.Array) -> jax.Array:
        fewer = narrow(unpack(rows, self.size), count, size=self.less, slots=shapes.num_slots)
        return repack(fewer, shapes.buckets.max_rows)


@dataclass(frozen=True)
class Take(Program[jax.Array]):
    """A program that returns the first `less` of `size` rows in a new order."""

    name = "take"
    size: int
    less: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        if demand.selecting is None or demand.selecting.check_layer >= shapes.config.vision.num_deepstack:
            return []
        return [cls(size, less) for size in demand.buckets.rows for less in demand.buckets.rows if less <= size]

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        return shapes.hidden(self.size), ints(self.size)

    def compute(self, shapes: Shapes, x: jax.Array, order: jax.Array) -> jax.Array:
        return x[order[: self.less]]
