"""Programs that take a prompt that has been computed to what its answer goes on with.

`Observe` says what some of its rows look at, in every layer; they stand in the pool already, and write nothing.
`Compact` copies what a layer keeps of its K, V into pages of the compressed pool, which are pages of any layer; a page
holds of each KV head the tokens that this head keeps. Keys carry their rotation, so that it does not matter where they
lie. `ReadPages` and `WritePages` take such pages to the host and back.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp

from vlcache_jax.compress.scores import KeyStatistics, Scores, kept_tokens, usual_scores
from vlcache_jax.device.programs.base import MOVED_PAGES, Demand, Halves, Params, Program, Shapes, ints, unpack
from vlcache_jax.models import Rows, bind, decoder
from vlcache_jax.pallas_kernels import PAGE, Work, attention_statistics, paged_attention, split
from vlcache_jax.pallas_kernels.split import FIRST, FOURTH, SECOND, WHOLE

Sums = tuple[jax.Array, jax.Array]  # see `Observe`


@dataclass(frozen=True)
class EmptyCompressed(Program[jax.Array]):
    """K or V of what is kept of prompts."""

    name = "compressed_pool"
    gives = SECOND

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        return [cls()] if shapes.compressed_slots else []

    def compute(self, shapes: Shapes) -> jax.Array:
        return jnp.zeros(shapes.compressed.shape, shapes.compressed.dtype)


@dataclass(frozen=True)
class EmptySums(Program[Sums]):
    """Sums of a prompt of which no row has been observed."""

    name = "sums"
    gives = SECOND
    pages: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        return [cls(pages) for pages in shapes.page_rungs] if shapes.compressed_slots else []

    def compute(self, shapes: Shapes) -> Sums:
        received, zeros = _sums(shapes, self.pages)
        return jnp.zeros(received.shape, received.dtype), jnp.zeros(zeros.shape, zeros.dtype)


@dataclass(frozen=True)
class Observe(Program[Sums]):
    """Adds what the keys of a prompt of up to `pages` pages receive from as many rows as the smallest prefill step has.

    The sums are the attention that each key receives, the mean of a KV head's query heads, float32 [L, K, 128 pages];
    and how often it is below p x the maximum of its row, int32 [L, H].
    """

    name = "observe"
    donates = (0,)
    gives = SECOND
    pages: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        return [cls(pages) for pages in shapes.page_rungs] if shapes.compressed_slots else []

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        rows = shapes.ladder.rows[0]
        return (
            _sums(shapes, self.pages), shapes.text, shapes.pools(shapes.kv.layers), shapes.encoder_rows,
            shapes.packed, shapes.work_config(rows).abstract(), ints(self.pages),
            jax.ShapeDtypeStruct((), jnp.float32),
        )  # fmt: skip

    def compute(
        self,
        shapes: Shapes,
        sums: Sums,
        text: Params,
        pool: Halves,
        encoder_rows: jax.Array,
        packed: jax.Array,
        work: Work,
        table: jax.Array,
        p: jax.Array,
    ) -> Sums:
        rows = unpack(packed, shapes.ladder.rows[0])
        x, deepstack = decoder.embed(bind(shapes.table_graph, text["embed_tokens"]), encoder_rows, rows.source)
        # Inner jits: what layers have in common is compiled once.
        layer = jax.jit(functools.partial(_observe, shapes), static_argnames="is_last")
        seen = []
        for i, (k, v) in enumerate(pool):
            x, *own = layer(text["layers"][i], x, k, v, rows, work, table, p, is_last=i == len(pool) - 1)
            if i < len(deepstack):
                x = x + deepstack[i]
            seen.append(own)
        received, zeros = zip(*seen, strict=True)
        return sums[0] + jnp.stack(received), sums[1] + jnp.stack(zeros)


def _sums(shapes: Shapes, pages: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    layers, text = shapes.kv.layers, shapes.config.text
    received = jax.ShapeDtypeStruct((layers, shapes.kv.heads, PAGE * pages), jnp.float32)
    abstract = shapes.devices.abstract
    return abstract(received, SECOND), abstract(ints(layers, text.num_heads), SECOND)


def _observe(
    shapes: Shapes,
    params: Params,
    x: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rows: Rows,
    work: Work,
    table: jax.Array,
    p: jax.Array,
    *,
    is_last: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A layer: (hidden states behind it, what its keys receive, how often that is next to nothing)."""
    layer = shapes.bind_layer(params)
    q, *_ = layer.self_attn.project(layer.input_layernorm(x), rows, keep=len(x))
    received, zeros = attention_statistics(q, k, table, rows.k_end - 1, p, implementation=shapes.implementation)
    if not is_last:  # nobody needs what leaves the last one
        out = paged_attention(q, k, v, work, implementation=shapes.implementation)
        x = layer.transform(
            x, layer.self_attn.o_proj(out.reshape(len(x), -1)), rows.k_end > 0, implementation=shapes.implementation
        )
    return x, received, zeros


@dataclass(frozen=True)
class Compact(Program[tuple[Halves, jax.Array]]):
    """(the compressed pool with what a layer keeps of a prompt of up to `pages` pages, W; which tokens these are).

    Attributes:
      scores: those of a policy with options, or of a user's own; None: those of `USUAL` that an argument numbers.
    """

    name = "compact"
    donates = (0,)
    gives = SECOND, WHOLE
    pages: int
    scores: Scores | None = None

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        return [cls(pages) for pages in shapes.page_rungs] if shapes.compressed_slots else []

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        received, _ = _sums(shapes, self.pages)
        return (
            [[shapes.compressed] * 2], [shapes.pool] * 2, received, ints(5), jax.ShapeDtypeStruct((), jnp.uint32),
            ints(self.pages), ints(self.pages),
        )  # fmt: skip

    def compute(
        self,
        shapes: Shapes,
        compressed: Halves,
        halves: list[jax.Array],
        received: jax.Array,
        numbers: jax.Array,
        seed: jax.Array,
        table: jax.Array,
        target: jax.Array,
    ) -> tuple[Halves, jax.Array]:
        """Moves what a layer keeps.

        Args:
          halves: K and V of the layer.
          received: see `Observe`.
          numbers: the layer's; of the prompt's tokens how many there are, how many are kept, and how many of these are
            the last ones; the number of the scores in `USUAL`; int32 [5].
          seed: see `vlcache_jax.compress.scores.KeyStatistics`.
          table: pages of the prompt, int32 [W].
          target: pages of what is kept, int32 [W].

        Returns:
          (the pool, the tokens that each head keeps as `kept_tokens` gives them).
        """
        number, length, count, window, usual = numbers
        copies = shapes.devices.copies  # of a head, each with its share of the queries
        of_heads = received[number].reshape(-1, copies, received.shape[-1]).mean(1)
        seen = KeyStatistics(of_heads, length, window, seed)
        score = usual_scores(usual, seen) if self.scores is None else self.scores(seen)
        of_head = kept_tokens(score, length, count, window, most=PAGE * self.pages)  # [K, 128 W]
        token = jnp.repeat(of_head, copies, axis=0)
        source = table.at[token // PAGE].get(mode="clip") * PAGE + token % PAGE
        place = jnp.arange(token.shape[1], dtype=jnp.int32)
        slot = target[place // PAGE] * PAGE + place % PAGE
        slot = jnp.where(place < count, slot, shapes.compressed_slots + place)

        def move(half: jax.Array, own: jax.Array, source: jax.Array, slot: jax.Array) -> jax.Array:
            rows = own[source, jnp.arange(len(source))[:, None]].swapaxes(0, 1)
            return half.at[slot].set(rows, mode="drop", unique_indices=True)

        moved = split.spread(move, (SECOND, SECOND, FIRST, WHOLE), SECOND)  # each device's heads stay where they are
        [kept] = compressed
        return [[moved(half, own, source, slot) for half, own in zip(kept, halves, strict=True)]], of_head


@dataclass(frozen=True)
class ReadPages(Program[jax.Array]):
    """What stands in `count` pages of the compressed pool: K and V, [2, count, 128, K, D]."""

    name = "read_pages"
    gives = FOURTH
    count: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        return map(cls, MOVED_PAGES if shapes.compressed_slots else ())

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        return [[shapes.compressed] * 2], ints(self.count)

    def compute(self, shapes: Shapes, compressed: Halves, source: jax.Array) -> jax.Array:
        [kept] = compressed
        return jnp.stack([_by_page(half)[source] for half in kept])


@dataclass(frozen=True)
class WritePages(Program[Halves]):
    """The compressed pool with that in `count` pages; targets beyond it are nobody's."""

    name = "write_pages"
    donates = (0,)
    gives = SECOND
    count: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        return map(cls, MOVED_PAGES if shapes.compressed_slots else ())

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        half = shapes.compressed
        held = jax.ShapeDtypeStruct((2, self.count, PAGE, *half.shape[1:]), half.dtype)
        return [[half] * 2], shapes.devices.abstract(held, FOURTH), ints(self.count)

    def compute(self, shapes: Shapes, compressed: Halves, held: jax.Array, target: jax.Array) -> Halves:
        [kept] = compressed
        written = (_by_page(half).at[target].set(own, mode="drop") for half, own in zip(kept, held, strict=True))
        return [[half.reshape(shapes.compressed.shape) for half in written]]


def _by_page(half: jax.Array) -> jax.Array:
    return half.reshape(-1, PAGE, *half.shape[1:])
