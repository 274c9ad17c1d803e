"""Programs that compute tokens and scores from rows after the last layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp

from vlcache_jax.device import sampler
from vlcache_jax.device.programs.base import Demand, Params, Program, Shapes, ints
from vlcache_jax.device.sampler import FIXED, Choice, Choosing, DecodeState, SampledTokens
from vlcache_jax.models import bind


@dataclass(frozen=True)
class OutputHead(Program[jax.Array]):
    """A program that returns logits, float32 [count, V], of `count` of `size` rows."""

    name = "head"
    follows_rows = True
    size: int
    count: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        for size in demand.buckets.rows:
            keep = shapes.buckets.outputs(size)
            yield from (cls(keep, min(count, keep)) for count in demand.buckets.sequences)
            yield cls(size, keep)  # for logits of all rows, slice by slice

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        return shapes.text["norm"], shapes.head, shapes.hidden(self.size), ints()

    def compute(self, shapes: Shapes, norm: Params, head: Params, x: jax.Array, first: jax.Array) -> jax.Array:
        return shapes.logits(norm, head, jax.lax.dynamic_slice_in_dim(x, first, self.count))


@dataclass(frozen=True)
class SampleFirst(Program[tuple[SampledTokens, DecodeState]]):
    """A program that samples the next token of `count` decode slots whose sequences have `steps` tokens so far."""

    name = "sample"
    donates = (1,)
    count: int
    choice: Choice = "dynamic"

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        outputs = {shapes.buckets.outputs(size) for size in demand.buckets.rows} | {shapes.buckets.max_sequences}
        counts = [min(count, keep) for keep in sorted(outputs) for count in demand.buckets.sequences]
        choices: tuple[Choice, ...] = ("dynamic",) if shapes.is_host else FIXED
        return [cls(count, choice) for count in counts for choice in choices]

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        return shapes.vocabulary(self.count), shapes.decode_slots, ints(self.count, sampler.COLUMNS), ints(self.count)

    def compute(
        self, shapes: Shapes, logits: jax.Array, decode_slots: DecodeState, rows: jax.Array, steps: jax.Array
    ) -> tuple[SampledTokens, DecodeState]:
        choosing = Choosing.unpack(rows)
        begun = decode_slots._replace(
            step=decode_slots.step.at[choosing.decode_slot].set(steps, mode="drop"),
            is_ended=decode_slots.is_ended.at[choosing.decode_slot].set(False, mode="drop"),
        )
        return sampler.sample(logits, begun, choosing, choice=self.choice)


@dataclass(frozen=True)
class LastHidden(Program[jax.Array]):
    """A program that returns hidden states after the last norm, float32 [count, M], of `count` of `size` rows."""

    name = "last_hidden"
    follows_rows = True
    size: int
    count: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        # More rows leave a chunk only if another prompt in it requests log-probabilities of all its tokens. The program
        # for this case compiles in milliseconds, at its first use.
        return [cls(keep, keep) for keep in sorted({shapes.buckets.outputs(size) for size in demand.buckets.rows})]

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        return shapes.text["norm"], shapes.hidden(self.size), ints()

    def compute(self, shapes: Shapes, norm: Params, x: jax.Array, first: jax.Array) -> jax.Array:
        return shapes.normed(norm, jax.lax.dynamic_slice_in_dim(x, first, self.count)).astype(jnp.float32)


@dataclass(frozen=True)
class HeadRows(Program[jax.Array]):
    """A program that returns rows of the output head, float32 [count, M]."""

    name = "head_rows"
    count: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        return []  # only engines that score documents need it, once

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        return shapes.head, ints(self.count)

    def compute(self, shapes: Shapes, head: Params, index: jax.Array) -> jax.Array:
        return bind(shapes.table_graph, head)(index).astype(jnp.float32)


@dataclass(frozen=True)
class ScoreTokens(Program[tuple[jax.Array, ...]]):
    """A program that scores target tokens of `count` rows, see `sampler.score`."""

    name = "score"
    count: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        return [cls(shapes.buckets.outputs(size)) for size in demand.buckets.rows]

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        return shapes.vocabulary(self.count), ints(self.count), jax.ShapeDtypeStruct((), jnp.bool_)

    def compute(
        self, shapes: Shapes, logits: jax.Array, target: jax.Array, wants_top: jax.Array
    ) -> tuple[jax.Array, ...]:
        return sampler.score(logits, target, wants_top)
