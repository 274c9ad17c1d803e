"""The programs that decode a window: several tokens of each answer, one after the other, without the host.

Row i goes on at its lane's token, in the slots to which table i of the work list leads. The work list is that of the
last token; where a row's interval ends at each of them, the device says. A row that has ended sees nothing and writes
nowhere.

On a CPU one program looks what its rows ask for, and ends when all rows have. On a GPU the host would have to read
every such predicate, and wait for the device each time; so there a program has a number of steps, and the host chooses
it by what rows may ask for (`fixed`).

Where prompts are compressed, each layer has tables of its own into one pool, and so many of the prompt's tokens as it
keeps; a few work lists serve all layers (`vlcache_jax.device.runner`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from vlcache_jax.device import sampler
from vlcache_jax.device.programs.base import Demand, Halves, Params, Program, Shapes, ints
from vlcache_jax.device.programs.layers import layer_step
from vlcache_jax.device.sampler import Choice, Choosing, Lanes, SampledTokens
from vlcache_jax.models import Rows, bind
from vlcache_jax.pallas_kernels import PAGE, Work
from vlcache_jax.pallas_kernels.split import SECOND, WHOLE

ANSWER = 2  # columns of a window's rows before those of `Choosing`: tokens of the prompt, and its M-RoPE delta
LISTS = 4  # work lists of a window where prompts are compressed: more cost the host more than they save


class WindowRows(NamedTuple):
    """What a window's rows say: tokens of their prompts, M-RoPE deltas [B], and how they choose."""

    length: jax.Array
    delta: jax.Array
    choosing: Choosing

    @classmethod
    def of(cls, rows: jax.Array) -> Self:
        """Those of int32 [B, ANSWER + C]."""
        return cls(rows[:, 0], rows[:, 1], Choosing.unpack(rows[:, ANSWER:]))


Place = Callable[[jax.Array, jax.Array], jax.Array]  # slots, of tokens' numbers and which rows go on
# Hidden states and the pool behind all layers, of hidden states, the pool, rows, and which of them go on.
Layers = Callable[[jax.Array, Halves, Rows, jax.Array], tuple[jax.Array, Halves]]


@dataclass(frozen=True)
class Window(Program[tuple[SampledTokens, Lanes, Halves]]):
    """Decodes tokens of `count` rows, B: `steps` of each; None: up to `ladder.window`, until all rows have ended."""

    name = "window"
    donates = (2, 3)
    gives = WHOLE, WHOLE, SECOND
    count: int
    choice: Choice = "asked"
    steps: int | None = None

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        return [one for count in demand.ladder.sequences for one in kinds(cls(count), shapes)]

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        return (
            shapes.text, shapes.head, shapes.pools(shapes.config.text.num_layers), shapes.lanes,
            ints(self.count, ANSWER + sampler.COLUMNS), shapes.work_config(self.count, decode=True).abstract(), ints(),
        )  # fmt: skip

    def compute(
        self,
        shapes: Shapes,
        text: Params,
        head: Params,
        pool: Halves,
        lanes: Lanes,
        rows: jax.Array,
        work: Work,
        tokens: jax.Array,
    ) -> tuple[SampledTokens, Lanes, Halves]:
        """Decodes tokens of each row.

        Args:
          pool: K and V of each layer.
          rows: int32 [B, ANSWER + C].
          work: of the last token.
          tokens: most, where the program has no number of its own.

        Returns:
          (what was chosen, [steps or ladder.window, B] of each, `NO_ANSWER` where nothing was; lanes; pool).
        """
        layer = jax.jit(functools.partial(layer_step, shapes, keep=self.count, capture=False))
        asked = WindowRows.of(rows)
        tables = work.parts().tables
        index = jnp.arange(self.count, dtype=jnp.int32)

        def place(last: jax.Array, live: jax.Array) -> jax.Array:
            slot = tables[index, last // PAGE] * PAGE + last % PAGE
            return jnp.where(live, slot, shapes.num_slots + index)

        def layers(x: jax.Array, pool: Halves, row: Rows, live: jax.Array) -> tuple[jax.Array, Halves]:
            updated = []
            for i, (k, v) in enumerate(pool):
                x, k, v, _ = layer(text["layers"][i], x, k, v, row, np.full(2, self.count, np.int32), work, None)
                updated.append([k, v])
            return x, updated

        return _decode(self, shapes, text, head, pool, lanes, asked, tokens, place, layers)


@dataclass(frozen=True)
class CompressedWindow(Program[tuple[SampledTokens, Lanes, Halves]]):
    """The same of rows whose prompts are compressed; no layer has more than `pages` pages of one of them, C."""

    name = "compressed_window"
    donates = (2, 3)
    gives = WHOLE, WHOLE, SECOND
    count: int
    pages: int
    choice: Choice = "asked"
    steps: int | None = None

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        if shapes.compressed_slots:
            for count in demand.ladder.sequences:
                for pages in shapes.page_rungs:
                    yield from kinds(cls(count, pages), shapes)

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        layers, lists = shapes.kv.layers, shapes.work_config(self.count, True, self.pages)
        return (
            shapes.text, shapes.head, [[shapes.compressed] * 2], shapes.lanes,
            ints(self.count, ANSWER + sampler.COLUMNS), ints(LISTS, lists.size), ints(layers),
            ints(layers, self.count, self.pages), ints(layers, self.count), ints(),
        )  # fmt: skip

    def compute(
        self,
        shapes: Shapes,
        text: Params,
        head: Params,
        pool: Halves,
        lanes: Lanes,
        rows: jax.Array,
        lists: jax.Array,
        list_of: jax.Array,
        tables: jax.Array,
        kept: jax.Array,
        tokens: jax.Array,
    ) -> tuple[SampledTokens, Lanes, Halves]:
        """Decodes tokens of each row.

        Args:
          pool: K and V of all layers.
          rows: int32 [B, ANSWER + C].
          lists: work lists of the last token, int32 [LISTS, size].
          list_of: which of them each layer goes by, int32 [L].
          tables: pages of each row in each layer, int32 [L, B, C].
          kept: tokens of the prompt that each layer keeps, before which answers begin, int32 [L, B].
          tokens: as in `Window`.

        Returns:
          As `Window`.
        """
        layer = jax.jit(functools.partial(layer_step, shapes, keep=self.count, capture=False))
        config = shapes.work_config(self.count, True, self.pages)
        asked = WindowRows.of(rows)
        index = jnp.arange(self.count, dtype=jnp.int32)

        def layers(x: jax.Array, pool: Halves, row: Rows, live: jax.Array) -> tuple[jax.Array, Halves]:
            [[k, v]] = pool
            for i, table in enumerate(tables):
                place = jnp.where(live, row.slot - asked.length + kept[i], 0)
                slot = table[index, place // PAGE] * PAGE + place % PAGE
                own = row._replace(
                    slot=jnp.where(live, slot, shapes.compressed_slots + index), k_end=jnp.where(live, place + 1, 0)
                )
                work = Work(lists[list_of[i]], config).through(table)
                x, k, v, _ = layer(text["layers"][i], x, k, v, own, np.full(2, self.count, np.int32), work, None)
            return x, [[k, v]]

        # Slots are other ones in each layer.
        return _decode(self, shapes, text, head, pool, lanes, asked, tokens, lambda last, live: last, layers)


def kinds[P: Window | CompressedWindow](program: P, shapes: Shapes) -> list[P]:
    """The programs that decode where `program` is of their sizes."""
    if shapes.is_host:
        return [program]
    choices: tuple[Choice, ...] = ("greedy", "drawn")
    whole = [replace(program, choice=choice, steps=shapes.ladder.window) for choice in choices]
    return [*whole, replace(program, choice="any", steps=1)]


def fixed[P: Window | CompressedWindow](program: P, rows: npt.NDArray[np.int32], tokens: int, window: int) -> list[P]:
    """The programs that decode `tokens` tokens of rows [n, ANSWER + C], one after the other, each a number of its own:
    a whole window as one, and what is less, or asks for more, token by token: steps are in vain only of answers that
    end before their time."""
    choice = sampler.choice_of(rows[:, ANSWER:])
    if tokens == window and choice != "any":
        return [replace(program, choice=choice, steps=window)]
    return [replace(program, choice="any", steps=1)] * tokens


def _decode(
    program: Window | CompressedWindow,
    shapes: Shapes,
    text: Params,
    head: Params,
    pool: Halves,
    lanes: Lanes,
    asked: WindowRows,
    tokens: jax.Array,
    place: Place,
    layers: Layers,
) -> tuple[SampledTokens, Lanes, Halves]:
    """Goes through the layers and chooses, token after token."""
    length, delta, choosing = asked

    def goes_on(lanes: Lanes) -> jax.Array:
        return ~lanes.is_ended.at[choosing.lane].get(mode="fill", fill_value=True)

    def token(carry: tuple[Halves, Lanes], _: None = None) -> tuple[tuple[Halves, Lanes], SampledTokens]:
        pool, lanes = carry
        live = goes_on(lanes)
        last = jnp.where(live, length + lanes.step.at[choosing.lane].get(mode="clip") - 1, 0)
        row = Rows(
            slot=place(last, live),
            position=jnp.tile(jnp.where(live, last + delta, 0), (3, 1)),
            k_start=jnp.zeros_like(last),
            k_end=jnp.where(live, last + 1, 0),
            source=jnp.where(live, lanes.token.at[choosing.lane].get(mode="clip"), 0),
        )
        x, pool = layers(bind(shapes.table_graph, text["embed_tokens"])(row.source), pool, row, live)
        sampled, lanes = _sample(shapes.logits(text["norm"], head, x), lanes, choosing, program.choice)
        return (pool, lanes), sampled

    def more(state: Any) -> jax.Array:
        step, (_, lanes), _ = state
        return (step < tokens) & goes_on(lanes).any()

    def one_more(state: Any) -> Any:
        step, carry, chosen = state
        carry, sampled = token(carry)
        return step + 1, carry, jax.tree.map(lambda all_, one: all_.at[step].set(one), chosen, sampled)

    if program.steps is None:
        begin = jnp.int32(0), (pool, lanes), _nothing(shapes, len(length), lanes, choosing)
        _, (pool, lanes), chosen = jax.lax.while_loop(more, one_more, begin)
    else:
        (pool, lanes), chosen = jax.lax.scan(token, (pool, lanes), length=program.steps)
    return chosen, lanes, pool


def _nothing(shapes: Shapes, count: int, lanes: Lanes, choosing: Choosing) -> SampledTokens:
    sampled, _ = jax.eval_shape(sampler.sample, shapes.vocabulary(count), lanes, choosing)
    nothing = jax.tree.map(lambda x: jnp.zeros((shapes.ladder.window, *x.shape), x.dtype), sampled)
    return nothing._replace(token=jnp.full_like(nothing.token, sampler.NO_ANSWER))


def _sample(logits: jax.Array, lanes: Lanes, choosing: Choosing, choice: Choice) -> tuple[SampledTokens, Lanes]:
    """See `sampler.sample`. A CPU multiplies the head as [V, B], and to turn that takes as long as half the product."""
    sample = functools.partial(sampler.sample, choice=choice)

    def turned(logits: jax.Array, lanes: Lanes, choosing: Choosing) -> tuple[SampledTokens, Lanes]:
        return sample(logits.T, lanes, choosing, axis=0)

    chosen: tuple[SampledTokens, Lanes] = jax.lax.platform_dependent(
        logits, lanes, choosing, cpu=turned, default=sample
    )
    return chosen
