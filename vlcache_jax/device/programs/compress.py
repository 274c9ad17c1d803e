"""Programs that compress the KV of a prompt after its prefill.

`Observe` computes the attention that some of its tokens pay to all keys, in every layer. The tokens' KV is already in
the pool, so the program writes none. `Compact` copies the KV that a layer keeps to pages of the compressed pool, which
any layer can use. A page contains, for each KV head, tokens that this head keeps. Keys are stored rotated, so their
position in the pool does not matter. `ReadPages` and `WritePages` move such pages to the host and back.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from vlcache_jax.compress.scores import KeyStatistics, Scores, kept_tokens, usual_scores
from vlcache_jax.device.programs.base import (
    MOVED_PAGES,
    Demand,
    Halves,
    Params,
    Program,
    Shapes,
    ints,
    unpack,
    unpack_runs,
)
from vlcache_jax.device.programs.layers import layer_step
from vlcache_jax.models import Rows, bind, decoder
from vlcache_jax.pallas_kernels import PAGE, Work, attention_statistics, paged_attention, split
from vlcache_jax.pallas_kernels.split import FIRST, FOURTH, SECOND, WHOLE

Sums = tuple[jax.Array, jax.Array]  # see `Observe`


@dataclass(frozen=True)
class EmptyCompressed(Program[jax.Array]):
    """A program that creates K or V of the compressed KV pool."""

    name = "compressed_pool"
    gives = SECOND

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        return [cls()] if shapes.compressed_slots else []

    def compute(self, shapes: Shapes) -> jax.Array:
        return jnp.zeros(shapes.compressed.shape, shapes.compressed.dtype)


@dataclass(frozen=True)
class EmptySums(Program[Sums]):
    """A program that creates the sums of `Observe`, all 0."""

    name = "sums"
    gives = SECOND
    pages: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        return [cls(pages) for pages in shapes.page_buckets] if shapes.compressed_slots else []

    def compute(self, shapes: Shapes) -> Sums:
        received, zeros = _sums(shapes, self.pages)
        return jnp.zeros(received.shape, received.dtype), jnp.zeros(zeros.shape, zeros.dtype)


@dataclass(frozen=True)
class Observe(Program[tuple[Sums, Halves]]):
    """A program that adds the attention of some rows of a prompt of up to `pages` pages to its sums.

    It takes `Shapes.block_rows` rows. Rows before the first observed one only change the states of layers that have
    some, in a slot that is not the sequence's. The sums are the attention that each key receives, the mean of a KV
    head's query heads, float32 [L, K, 128 pages]; and how often it is below p x the maximum of its row,
    int32 [L, H].
    """

    name = "observe"
    donates = (0, 3)
    gives = SECOND, SECOND
    pages: int

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        return [cls(pages) for pages in shapes.page_buckets] if shapes.compressed_slots else []

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        return (
            _sums(shapes, self.pages), shapes.text, shapes.pools(shapes.kv.layers), shapes.states, shapes.encoder_rows,
            shapes.packed, shapes.runs, shapes.work_config(shapes.block_rows).abstract(), ints(self.pages),
            jax.ShapeDtypeStruct((), jnp.float32), ints(),
        )  # fmt: skip

    def compute(
        self,
        shapes: Shapes,
        sums: Sums,
        text: Params,
        pool: Halves,
        states: Halves,
        encoder_rows: jax.Array,
        packed: jax.Array,
        runs: Any,
        work: Work,
        table: jax.Array,
        p: jax.Array,
        first: jax.Array,
    ) -> tuple[Sums, Halves]:
        """Observe rows.

        Args:
          pool, states: K and V of the layers with pages, and states of the others, in their order.
          runs: order in which the rows change states, see `pack_runs`.
          table: pages of the prompt, int32 [pages].
          p: fraction of a row's maximum below which attention counts as nearly 0.
          first: index of the first observed token.

        Returns:
          Sums, and states.
        """
        rows, order = unpack(packed, shapes.block_rows), unpack_runs(runs, shapes.block_rows)
        x, deepstack = decoder.embed(bind(shapes.table_graph, text["embed_tokens"]), encoder_rows, rows.source)
        # An inner jit, so that code shared by layers is compiled once.
        layer = jax.jit(functools.partial(_observe, shapes), static_argnames="is_last")
        step = jax.jit(functools.partial(layer_step, shapes, keep=len(x), return_kv=False))
        active, seen, after = np.full(2, len(x), np.int32), [], [*states]
        paged, stated = iter(pool), iter(range(len(states)))
        last = shapes.config.text.paged_layers[-1]
        for i in range(last + 1):
            params = text["layers"][i]
            if shapes.config.text.kind_of(i).keeps_kv:
                x, *own = layer(params, x, *next(paged), rows, work, table, p, first, is_last=i == last)
                seen.append(own)
            else:
                number = next(stated)
                x, after[number], _ = step(params, x, states[number], rows, active, work, None, None, order)
            if i < len(deepstack):
                x = x + deepstack[i]
        received, zeros = zip(*seen, strict=True)
        return (sums[0] + jnp.stack(received), sums[1] + jnp.stack(zeros)), after


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
    first: jax.Array,
    *,
    is_last: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute a layer. Return its hidden states, the attention its keys receive, and how often it is nearly 0."""
    layer = shapes.bind_layer(params)
    normed, index = layer.input_layernorm(x), rows.k_end - 1
    q, *_ = layer.self_attn.project(normed, rows, keep=len(x))
    index = jnp.where(index < first, -1, index)  # not observed
    received, zeros = attention_statistics(q, k, table, index, p, implementation=shapes.implementation)
    if not is_last:  # hidden states of the last layer are not used
        out = paged_attention(q, k, v, work, implementation=shapes.implementation)
        x = layer.transform(x, layer.self_attn.back(normed, out), rows.k_end > 0, implementation=shapes.implementation)
    return x, received, zeros


@dataclass(frozen=True)
class Compact(Program[tuple[Halves, jax.Array]]):
    """A program that copies the KV that a layer keeps of a prompt into the compressed pool.

    Attributes:
      pages: largest number of pages of the prompt, W.
      scores: scores of a policy with options or of a user's policy. None: those of `USUAL` that an argument selects.
    """

    name = "compact"
    donates = (0,)
    gives = SECOND, WHOLE
    pages: int
    scores: Scores | None = None

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        return [cls(pages) for pages in shapes.page_buckets] if shapes.compressed_slots else []

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
        """Copy the KV of the kept tokens.

        Args:
          compressed: the compressed pool.
          halves: K and V of the layer in the KV pool.
          received: see `Observe`.
          numbers: number of the layer, tokens of the prompt, kept tokens, tokens at the end that are always kept,
            and number of the scores in `USUAL`; int32 [5].
          seed: see `vlcache_jax.compress.scores.KeyStatistics`.
          table: pages of the prompt, int32 [W].
          target: pages of the kept tokens in the compressed pool, int32 [W].

        Returns:
          The compressed pool, and the tokens that each head keeps, as `kept_tokens` returns them.
        """
        number, length, count, window, usual = numbers
        copies = shapes.devices.copies  # of each head, with an equal part of its queries
        of_heads = received[number].reshape(-1, copies, received.shape[-1]).mean(1)
        seen = KeyStatistics(of_heads, length, window, seed)
        score = usual_scores(usual, seen) if self.scores is None else self.scores(seen)
        of_head = kept_tokens(score, length, count, window, max_count=PAGE * self.pages)  # [K, 128 W]
        token = jnp.repeat(of_head, copies, axis=0)
        source = table.at[token // PAGE].get(mode="clip") * PAGE + token % PAGE
        place = jnp.arange(token.shape[1], dtype=jnp.int32)
        slot = target[place // PAGE] * PAGE + place % PAGE
        slot = jnp.where(place < count, slot, shapes.compressed_slots + place)

        def move(half: jax.Array, own: jax.Array, source: jax.Array, slot: jax.Array) -> jax.Array:
            rows = own[source, jnp.arange(len(source))[:, None]].swapaxes(0, 1)
            return half.at[slot].set(rows, mode="drop", unique_indices=True)

        moved = split.spread(move, (SECOND, SECOND, FIRST, WHOLE), SECOND)  # each device copies its own heads
        [kept] = compressed
        return [[moved(half, own, source, slot) for half, own in zip(kept, halves, strict=True)]], of_head


@dataclass(frozen=True)
class ReadPages(Program[jax.Array]):
    """A program that returns K and V of `count` pages of the compressed pool, [2, count, 128, K, D]."""

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
    """A program that writes `count` pages to the compressed pool. Targets beyond the pool are dropped."""

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
