"""Programs that take rows that have left the last layer to tokens and scores."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp

from vlcache_jax.device import sampler
from vlcache_jax.device.programs.base import Demand, Params, Program, Shapes, ints
from vlcache_jax.device.sampler import FIXED, Choice, Choosing, Lanes, SampledTokens
from vlcache_jax.models import bind


@dataclass(frozen=True)
class OutputHead(Program[jax.Array]):
    """Logits, float32 [count, V], of `count` of `size` rows."""

    name = "head"
    follows_rows = True
    size: int
    count: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        for size in demand.ladder.rows:
            keep = shapes.ladder.outputs(size)
            yield from (cls(keep, min(count, keep)) for count in demand.ladder.sequences)
            yield cls(size, keep)  # logits of all rows, slice by slice

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        return shapes.text["norm"], shapes.head, shapes.hidden(self.size), ints()

    def compute(self, shapes: Shapes, norm: Params, head: Params, x: jax.Array, first: jax.Array) -> jax.Array:
        return shapes.logits(norm, head, jax.lax.dynamic_slice_in_dim(x, first, self.count))


@dataclass(frozen=True)
class SampleFirst(Program[tuple[SampledTokens, Lanes]]):
    """The next token of lanes whose answers have `steps` tokens so far."""

    name = "sample"
    donates = (1,)
    count: int
    choice: Choice = "asked"

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        most = {shapes.ladder.outputs(size) for size in demand.ladder.rows} | {shapes.ladder.max_sequences}
        counts = [min(count, keep) for keep in sorted(most) for count in demand.ladder.sequences]
        choices: tuple[Choice, ...] = ("asked",) if shapes.is_host else FIXED
        return [cls(count, choice) for count in counts for choice in choices]

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        return shapes.vocabulary(self.count), shapes.lanes, ints(self.count, sampler.COLUMNS), ints(self.count)

    def compute(
        self, shapes: Shapes, logits: jax.Array, lanes: Lanes, rows: jax.Array, steps: jax.Array
    ) -> tuple[SampledTokens, Lanes]:
        choosing = Choosing.unpack(rows)
        begun = lanes._replace(
            step=lanes.step.at[choosing.lane].set(steps, mode="drop"),
            is_ended=lanes.is_ended.at[choosing.lane].set(False, mode="drop"),
        )
        return sampler.sample(logits, begun, choosing, choice=self.choice)


@dataclass(frozen=True)
class LastHidden(Program[jax.Array]):
    """Hidden states behind the last norm, float32 [count, M], of `count` of `size` rows."""

    name = "last_hidden"
    follows_rows = True
    size: int
    count: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        # More rows leave a step only where a prompt beside it wants log-probabilities of all of its tokens: the program
        # for that, of milliseconds, is made when it is first called for.
        return [cls(keep, keep) for keep in sorted({shapes.ladder.outputs(size) for size in demand.ladder.rows})]

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        return shapes.text["norm"], shapes.hidden(self.size), ints()

    def compute(self, shapes: Shapes, norm: Params, x: jax.Array, first: jax.Array) -> jax.Array:
        return shapes.normed(norm, jax.lax.dynamic_slice_in_dim(x, first, self.count)).astype(jnp.float32)


@dataclass(frozen=True)
class HeadRows(Program[jax.Array]):
    """Rows of the output head, float32 [count, M]."""

    name = "head_rows"
    count: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        return []  # who opened an engine to score documents calls for it once

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        return shapes.head, ints(self.count)

    def compute(self, shapes: Shapes, head: Params, index: jax.Array) -> jax.Array:
        return bind(shapes.table_graph, head)(index).astype(jnp.float32)


@dataclass(frozen=True)
class ScoreTokens(Program[tuple[jax.Array, ...]]):
    """See `sampler.score`."""

    name = "score"
    count: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        return [cls(shapes.ladder.outputs(size)) for size in demand.ladder.rows]

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        return shapes.vocabulary(self.count), ints(self.count), jax.ShapeDtypeStruct((), jnp.bool_)

    def compute(
        self, shapes: Shapes, logits: jax.Array, target: jax.Array, wants_top: jax.Array
    ) -> tuple[jax.Array, ...]:
        return sampler.score(logits, target, wants_top)
