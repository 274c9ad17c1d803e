"""Multi-step decode: programs that decode several tokens of each sequence without the host.

Row i continues from the token of its decode slot, in the KV slots of table i of the work list. The work list covers the
last token. The device computes where a row's keys end at each token. A row that has ended sees no keys and writes none.

On a CPU, one program tests what its rows request, and ends when all rows have ended. On a GPU, the host would have to
read every predicate and wait for the device. So there a program has a fixed number of steps, and the host chooses it by
what rows may request (`fixed`).

For compressed requests, each layer has its own tables into one pool, and its own number of prompt tokens. A work list
per layer would cost the host more time than the device saves. So layers that keep similar numbers of tokens share a
list, which is made for the largest of them (`compressed_work`).
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
from vlcache_jax.device.sampler import Choice, Choosing, DecodeState, SampledTokens
from vlcache_jax.models import Rows, bind
from vlcache_jax.models.layer_kinds import TokenStates
from vlcache_jax.pallas_kernels import PAGE, Work, WorkConfig, make_work
from vlcache_jax.pallas_kernels.split import SECOND, WHOLE

ANSWER = 3  # columns of decode rows before those of `Choosing`, see `WindowRows`
LISTS = 4  # work lists of compressed requests; more would cost the host more time than they save
_ALIKE = 0.6  # a layer shares a list if it keeps at least this fraction of the tokens of the list's largest layer

Index = npt.NDArray[np.int32]


class WindowRows(NamedTuple):
    """Unpacked decode rows.

    Attributes:
      length, delta, state_slot: number of tokens of the prompt, its M-RoPE delta, and slot of states, int32 [B].
      choosing: sampling parameters.
    """

    length: jax.Array
    delta: jax.Array
    state_slot: jax.Array
    choosing: Choosing

    @classmethod
    def of(cls, rows: jax.Array) -> Self:
        """Unpack rows, int32 [B, ANSWER + C]."""
        return cls(rows[:, 0], rows[:, 1], rows[:, 2], Choosing.unpack(rows[:, ANSWER:]))


Place = Callable[[jax.Array, jax.Array], jax.Array]  # (index of each row's token, rows that continue) -> KV slots
# (hidden states, pool, rows, rows that continue) -> (hidden states, pool) after all layers
Layers = Callable[[jax.Array, Halves, Rows, jax.Array], tuple[jax.Array, Halves]]


@dataclass(frozen=True)
class Window(Program[tuple[SampledTokens, DecodeState, Halves]]):
    """A program that decodes tokens of `count` rows, B.

    Attributes:
      choice: requests that it serves, see `sampler.Choice`.
      steps: tokens of each row. None: up to `buckets.window`, until all rows have ended.
    """

    name = "window"
    donates = (2, 3)
    gives = WHOLE, WHOLE, SECOND
    count: int
    choice: Choice = "dynamic"
    steps: int | None = None

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        return [one for count in demand.buckets.sequences for one in kinds(cls(count), shapes)]

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        return (
            shapes.text, shapes.head, [shapes.memory(i) for i in range(shapes.config.text.num_layers)],
            shapes.decode_slots,
            ints(self.count, ANSWER + sampler.COLUMNS), shapes.work_config(self.count, decode=True).abstract(), ints(),
        )  # fmt: skip

    def compute(
        self,
        shapes: Shapes,
        text: Params,
        head: Params,
        pool: Halves,
        decode_slots: DecodeState,
        rows: jax.Array,
        work: Work,
        tokens: jax.Array,
    ) -> tuple[SampledTokens, DecodeState, Halves]:
        """Decode tokens of each row.

        Args:
          pool: K and V, or states, of each layer.
          rows: int32 [B, ANSWER + C].
          work: work list of the last token.
          tokens: largest number of tokens, if `steps` is None.

        Returns:
          The tokens, [`steps` or `buckets.window`, B] of each field, with `NO_ANSWER` where none was chosen; decode
          slots; pool.
        """
        layer = jax.jit(functools.partial(layer_step, shapes, keep=self.count, return_kv=False))
        unpacked = WindowRows.of(rows)
        tables = work.parts().tables
        index = jnp.arange(self.count, dtype=jnp.int32)

        def place(last: jax.Array, live: jax.Array) -> jax.Array:
            slot = tables[index, last // PAGE] * PAGE + last % PAGE
            return jnp.where(live, slot, shapes.num_slots + index)

        def layers(x: jax.Array, pool: Halves, row: Rows, live: jax.Array) -> tuple[jax.Array, Halves]:
            updated, states = [], token_states(shapes, unpacked, live)
            for i, memory in enumerate(pool):
                active = np.full(2, self.count, np.int32)
                x, memory, _ = layer(text["layers"][i], x, memory, row, active, work, None, None, states)
                updated.append(memory)
            return x, updated

        return _decode(self, shapes, text, head, pool, decode_slots, unpacked, tokens, place, layers)


@dataclass(frozen=True)
class CompressedWindow(Program[tuple[SampledTokens, DecodeState, Halves]]):
    """A program that decodes tokens of `count` rows of compressed requests, B.

    Attributes:
      pages: largest number of pages that a layer has of a row, C.
      choice, steps: see `Window`.
    """

    name = "compressed_window"
    donates = (2, 3)
    gives = WHOLE, WHOLE, SECOND
    count: int
    pages: int
    choice: Choice = "dynamic"
    steps: int | None = None

    @classmethod
    def family(cls, shapes: Shapes, demand: Demand) -> Iterable[Self]:
        if shapes.compressed_slots:
            for count in demand.buckets.sequences:
                for pages in shapes.page_buckets:
                    yield from kinds(cls(count, pages), shapes)

    def arguments(self, shapes: Shapes) -> tuple[Any, ...]:
        layers, lists = shapes.kv.layers, shapes.work_config(self.count, True, self.pages)
        return (
            shapes.text, shapes.head, [[shapes.compressed] * 2, *shapes.states], shapes.decode_slots,
            ints(self.count, ANSWER + sampler.COLUMNS), ints(LISTS, lists.size), ints(layers),
            ints(layers, self.count, self.pages), ints(layers, self.count), ints(),
        )  # fmt: skip

    def compute(
        self,
        shapes: Shapes,
        text: Params,
        head: Params,
        pool: Halves,
        decode_slots: DecodeState,
        rows: jax.Array,
        lists: jax.Array,
        list_of: jax.Array,
        tables: jax.Array,
        kept: jax.Array,
        tokens: jax.Array,
    ) -> tuple[SampledTokens, DecodeState, Halves]:
        """Decode tokens of each row.

        Args:
          pool: K and V of all layers with pages, and states of each of the others.
          rows: int32 [B, ANSWER + C].
          lists: work lists of the last token, int32 [LISTS, size].
          list_of: number of each layer's work list, int32 [L].
          tables: pages of each row in each layer, int32 [L, B, C].
          kept: number of prompt tokens that each layer keeps, after which the output begins, int32 [L, B].
          tokens: as in `Window`.

        Returns:
          See `Window`.
        """
        layer = jax.jit(functools.partial(layer_step, shapes, keep=self.count, return_kv=False))
        config = shapes.work_config(self.count, True, self.pages)
        unpacked = WindowRows.of(rows)
        index = jnp.arange(self.count, dtype=jnp.int32)

        def layers(x: jax.Array, pool: Halves, row: Rows, live: jax.Array) -> tuple[jax.Array, Halves]:
            halves, *rest = pool
            active, states = np.full(2, self.count, np.int32), token_states(shapes, unpacked, live)
            paged = iter(range(len(tables)))
            after: Halves = []
            for i in range(shapes.config.text.num_layers):
                params = text["layers"][i]
                if not shapes.config.text.kind_of(i).keeps_kv:
                    x, memory, _ = layer(params, x, rest[len(after)], row, active, None, None, None, states)
                    after.append(memory)
                    continue
                number = next(paged)
                place = jnp.where(live, row.slot - unpacked.length + kept[number], 0)
                slot = tables[number][index, place // PAGE] * PAGE + place % PAGE
                own = row._replace(
                    slot=jnp.where(live, slot, shapes.compressed_slots + index), k_end=jnp.where(live, place + 1, 0)
                )
                work = Work(lists[list_of[number]], config).through(tables[number])
                x, halves, _ = layer(params, x, halves, own, active, work)
            return x, [halves, *after]

        # KV slots differ between layers, so `layers` computes them from the token's index.
        return _decode(self, shapes, text, head, pool, decode_slots, unpacked, tokens, lambda last, live: last, layers)


def token_states(shapes: Shapes, rows: WindowRows, live: jax.Array) -> TokenStates | None:
    """Return the slots of states that each row reads and writes; None if the model has none."""
    if not shapes.num_states:
        return None
    dropped = shapes.num_states + jnp.arange(len(live), dtype=jnp.int32)
    return TokenStates(jnp.where(live, rows.state_slot, 0), jnp.where(live, rows.state_slot, dropped))


def kinds[P: Window | CompressedWindow](program: P, shapes: Shapes) -> list[P]:
    """Return the programs that decode rows of the sizes of `program`."""
    if shapes.is_host:
        return [program]
    choices: tuple[Choice, ...] = ("greedy", "drawn")
    whole = [replace(program, choice=choice, steps=shapes.buckets.window) for choice in choices]
    return [*whole, replace(program, choice="any", steps=1)]


def fixed[P: Window | CompressedWindow](program: P, rows: npt.NDArray[np.int32], tokens: int, window: int) -> list[P]:
    """Return the programs that decode `tokens` tokens of rows [n, ANSWER + C] on a GPU, one after the other.

    A full window of simple requests is one program. Fewer tokens, or requests that need "any", are decoded token by
    token. So only sequences that end early waste steps.
    """
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
    decode_slots: DecodeState,
    unpacked: WindowRows,
    tokens: jax.Array,
    place: Place,
    layers: Layers,
) -> tuple[SampledTokens, DecodeState, Halves]:
    """Run the layers and choose tokens, one step after the other."""
    length, delta, _, choosing = unpacked

    def continues(decode_slots: DecodeState) -> jax.Array:
        return ~decode_slots.is_ended.at[choosing.decode_slot].get(mode="fill", fill_value=True)

    def token(carry: tuple[Halves, DecodeState], _: None = None) -> tuple[tuple[Halves, DecodeState], SampledTokens]:
        pool, decode_slots = carry
        live = continues(decode_slots)
        last = jnp.where(live, length + decode_slots.step.at[choosing.decode_slot].get(mode="clip") - 1, 0)
        row = Rows(
            slot=place(last, live),
            position=jnp.tile(jnp.where(live, last + delta, 0), (3, 1)),
            k_start=jnp.zeros_like(last),
            k_end=jnp.where(live, last + 1, 0),
            source=jnp.where(live, decode_slots.token.at[choosing.decode_slot].get(mode="clip"), 0),
        )
        x, pool = layers(bind(shapes.table_graph, text["embed_tokens"])(row.source), pool, row, live)
        sampled, decode_slots = _sample(shapes.logits(text["norm"], head, x), decode_slots, choosing, program.choice)
        return (pool, decode_slots), sampled

    def has_next(state: Any) -> jax.Array:
        step, (_, decode_slots), _ = state
        return (step < tokens) & continues(decode_slots).any()

    def decode_next(state: Any) -> Any:
        step, carry, chosen = state
        carry, sampled = token(carry)
        return step + 1, carry, jax.tree.map(lambda all_, one: all_.at[step].set(one), chosen, sampled)

    if program.steps is None:
        begin = jnp.int32(0), (pool, decode_slots), _nothing(shapes, len(length), decode_slots, choosing)
        _, (pool, decode_slots), chosen = jax.lax.while_loop(has_next, decode_next, begin)
    else:
        (pool, decode_slots), chosen = jax.lax.scan(token, (pool, decode_slots), length=program.steps)
    return chosen, decode_slots, pool


def _nothing(shapes: Shapes, count: int, decode_slots: DecodeState, choosing: Choosing) -> SampledTokens:
    sampled, _ = jax.eval_shape(sampler.sample, shapes.vocabulary(count), decode_slots, choosing)
    nothing = jax.tree.map(lambda x: jnp.zeros((shapes.buckets.window, *x.shape), x.dtype), sampled)
    return nothing._replace(token=jnp.full_like(nothing.token, sampler.NO_ANSWER))


def _sample(
    logits: jax.Array, decode_slots: DecodeState, choosing: Choosing, choice: Choice
) -> tuple[SampledTokens, DecodeState]:
    """Call `sampler.sample`. A CPU computes the head as [V, B], and a transpose takes half as long as the product."""
    sample = functools.partial(sampler.sample, choice=choice)

    def transposed(
        logits: jax.Array, decode_slots: DecodeState, choosing: Choosing
    ) -> tuple[SampledTokens, DecodeState]:
        return sample(logits.T, decode_slots, choosing, axis=0)

    chosen: tuple[SampledTokens, DecodeState] = jax.lax.platform_dependent(
        logits, decode_slots, choosing, cpu=transposed, default=sample
    )
    return chosen


def alike_layers(kept: Index) -> list[list[int]]:
    """Return the groups of layers that share a work list, those that keep most tokens first.

    Args:
      kept: kept tokens by layer and prompt, [L, B].
    """
    total = kept.sum(1)
    classes: list[list[int]] = []
    for layer in np.argsort(-total, kind="stable").tolist():
        if classes and (total[layer] >= _ALIKE * total[classes[-1][0]] or len(classes) == LISTS):
            classes[-1].append(layer)
        else:
            classes.append([layer])
    return classes


def compressed_work(kept: Index, tokens: Index, config: WorkConfig) -> tuple[Index, Index]:
    """Return the work lists int32 [LISTS, size], and the number of each layer's list, int32 [L].

    Args:
      kept: see `alike_layers`.
      tokens: tokens after the prompt that each sequence sees at its first and at its last decoded token, [2, B].
    """
    lists, list_of = np.zeros((LISTS, config.size), np.int32), np.zeros(len(kept), np.int32)
    first, last = tokens
    rows = np.arange(kept.shape[1])
    for number, layers in enumerate(alike_layers(kept)):
        end = kept[layers].max(0) + last
        tables = [np.zeros(-(-count // PAGE), np.int32) for count in end]  # the device fills them in
        least = kept[layers].min(0) + first
        lists[number] = make_work(rows, np.zeros_like(end), end, tables, config, least=least).buffer
        list_of[layers] = number
    return lists, list_of
