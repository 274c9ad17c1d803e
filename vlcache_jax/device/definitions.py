"""What the runner's programs compute, for arguments of which shapes.

A definition is a function, its abstract arguments, and which of them are donated. Every size in it follows from the
ladder and from nothing else. Plain nested dicts cross into programs, never modules.
"""

from __future__ import annotations

import functools
from collections import abc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vlcache_jax import pallas_kernels as kernels
from vlcache_jax.device import sampler
from vlcache_jax.device.ladder import Ladder
from vlcache_jax.device.link_definitions import LinkDefinitions, Params
from vlcache_jax.device.packed import FIELDS, repack, unpack
from vlcache_jax.device.sampler import Choosing, Lanes
from vlcache_jax.device.window import ANSWER, Window
from vlcache_jax.models import ModelConfig, Rows, abstract_model, bind, decoder
from vlcache_jax.models.decoder import DecoderLayer
from vlcache_jax.models.model import bind_layer, layer_graphs
from vlcache_jax.models.registry import FAMILIES
from vlcache_jax.models.vision import Grid
from vlcache_jax.reuse.selection import SelectingPolicy, choose, narrow, project
from vlcache_jax.reuse.shift import TOKENS, Moves, differences, move

BLOCK = 4  # layers that are one program where steps are short
BLOCK_ROWS = 1024  # of a step beyond which a layer takes longer than its launch by far


class Definitions:
    """Defines each program by a method of its name, whose arguments are the program's static sizes.

    Args:
      config, params, normalization, num_slots, max_pages, ladder, implementation, codec, kept_tokens: see `Runner`; of
        arrays only the shapes count.

    Attributes:
      token_rungs: numbers of an image's tokens.
      moved: tokens of images that a step moves at most.
      links: the programs that move what is stored.
      windows: pages of the prompts that scores look at.
      work_config: (rows, decode=False) -> how their attention is cut, the same object every time.
      like: of each layer the first with weights of the same shapes; slices of it stand in the keys of programs.
      table_graph, norm_graph: what weights of an embedding table and a norm are bound to.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        normalization: jax.Array,
        *,
        num_slots: int,
        max_pages: int,
        ladder: Ladder,
        implementation: str | None,
        codec: kernels.Codec | None = None,
        kept_tokens: int = 0,
    ):
        self.config = config
        self.ladder = ladder
        self.num_slots = num_slots
        self.max_pages = max_pages
        self.work_config = functools.cache(self._work_config)  # asked for at every token
        self.implementation = implementation
        self.dtype = params["language_model"]["norm"]["scale"].dtype
        self._visual, self._normalization = shapes((params["visual"], normalization))
        self._text = shapes(params["language_model"])
        self._head = shapes(params.get("lm_head", params["language_model"]["embed_tokens"]))
        model = abstract_model(config, self.dtype)
        text = model.language_model
        self._tower_graph = nnx.graphdef(model.visual)
        self._layer_graphs = layer_graphs(model)
        self.like = tuple(map(config.text.first_like, range(config.text.num_layers)))
        self.table_graph = nnx.graphdef(text.embed_tokens)
        self.norm_graph = nnx.graphdef(text.norm)
        self.token_rungs = tuple(size // config.vision.merge_size**2 for size in ladder.patches)
        self.moved = min(max(TOKENS, self.token_rungs[-1]), num_slots)
        self.links = LinkDefinitions(
            config, self._text, self.dtype, num_slots=num_slots, max_rows=ladder.max_rows,
            token_rungs=self.token_rungs, implementation=implementation, codec=codec, kept_tokens=kept_tokens,
        )  # fmt: skip
        pages = {min(-(-size // kernels.PAGE), max_pages) for size in ladder.rows}
        self.windows = tuple(sorted({*pages, max_pages}))

    def bind_layer(self, params: Params) -> DecoderLayer:
        """The decoder layer of these parameters, to be called while tracing."""
        return bind_layer(self._layer_graphs, params)

    def define(self, key: abc.Sequence[Any]) -> Any:
        """A program by its name and sizes: (function, abstract arguments, which of them are donated)."""
        name, *sizes = key
        return getattr(self if hasattr(self, name) else self.links, name)(*sizes)

    def shape_of(self, name: str) -> Any:
        """Of the arrays that the program `name`, which takes nothing, makes."""
        return jax.eval_shape(self.define((name,))[0])

    def tables(self, grids: abc.Sequence[Grid], num_patches: int) -> dict[str, np.ndarray]:
        """What the vision tower needs to know of the images of a call."""
        return FAMILIES[self.config.model_type].encoder_tables(self.config.vision, grids, num_patches)

    def pool(self) -> Any:
        text = self.config.text
        return lambda: jnp.zeros((self.num_slots, text.num_kv_heads, text.head_dim), self.dtype), (), ()

    def encoder_rows(self) -> Any:
        shape = 1 + self.config.vision.num_deepstack, self.ladder.max_rows, self.config.text.hidden_size
        return lambda: jnp.zeros(shape, self.dtype), (), ()

    def lanes(self) -> Any:
        return functools.partial(sampler.empty_lanes, self.ladder.max_sequences, self.config.text.vocab_size), (), ()

    def open_lane(self) -> Any:
        lanes = self.shape_of("lanes")
        kept = lanes.marks, lanes.bias, lanes.words, lanes.recent
        one = (jax.ShapeDtypeStruct(field.shape[1:], field.dtype) for field in kept)
        return sampler.open_lane, (lanes, jax.ShapeDtypeStruct((), jnp.int32), *one), 0

    def encode(self, size: int) -> Any:
        def encode(params: Params, pixels: jax.Array, normalization: jax.Array, tables: Params) -> jax.Array:
            return bind(self._tower_graph, params)(pixels, normalization, tables, implementation=self.implementation)

        vision = self.config.vision
        shape = size, vision.in_channels, vision.temporal_patch_size, vision.patch_size**2
        pixels = jax.ShapeDtypeStruct(shape, jnp.uint8)
        smallest = (1, vision.merge_size, vision.merge_size)
        tables = self.tables([smallest], size)
        return encode, (self._visual, pixels, self._normalization, shapes(tables)), ()

    def stage(self, size: int) -> Any:
        def stage(rows: jax.Array, encoded: jax.Array, place: jax.Array) -> jax.Array:
            return rows.at[:, place].set(encoded, mode="drop", unique_indices=True)

        rows = self.shape_of("encoder_rows")
        encoded = jax.ShapeDtypeStruct((rows.shape[0], size, rows.shape[2]), self.dtype)
        return stage, (rows, encoded, jax.ShapeDtypeStruct((size,), jnp.int32)), 0

    def copy(self, count: int) -> Any:
        pool = [[self.shape_of("pool")] * 2] * self.config.text.num_layers
        pages = jax.ShapeDtypeStruct((count,), jnp.int32)
        return _copy, (pool, pages, pages), 0

    def slice(self, size: int, less: int) -> Any:
        return lambda x: x[:less], (self._hidden(size),), ()

    def embed(self, size: int) -> Any:
        def embed(table: Params, encoder_rows: jax.Array, rows: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
            x, deepstack = decoder.embed(bind(self.table_graph, table), encoder_rows, unpack(rows, size).source)
            return x, list(deepstack)

        return embed, (self._text["embed_tokens"], self.shape_of("encoder_rows"), self.packed), ()

    @property
    def packed(self) -> jax.ShapeDtypeStruct:
        """The rows of a step, see `vlcache_jax.device.packed`."""
        return jax.ShapeDtypeStruct((FIELDS, self.ladder.max_rows), jnp.int32)

    def _work_config(self, rows: int, decode: bool = False) -> kernels.WorkConfig:
        """How the attention of `rows` rows is cut, of one request each where they decode."""
        text = self.config.text
        q = jax.ShapeDtypeStruct((rows, text.num_heads, text.head_dim), self.dtype)
        return kernels.work_config(
            rows, min(rows, self.ladder.max_sequences), self.max_pages, q, text.num_kv_heads,
            decode=decode, implementation=self.implementation,
        )  # fmt: skip

    def layer(
        self, size: int, keep: int, has_deepstack: bool, shifts: bool = False, like: tuple[int, ...] = (0,)
    ) -> Any:
        pool, added = self.shape_of("pool"), self._hidden(size) if has_deepstack else None
        active, work = jax.ShapeDtypeStruct((2,), jnp.int32), self.work_config(keep).abstract()
        arguments = self._text["layers"][like[0]], self._hidden(size), pool, pool, self.packed, active, work, added

        def layer(params: Params, x: jax.Array, k: jax.Array, v: jax.Array, rows: jax.Array, *rest: Any) -> Any:
            active, work, added, moves = rest
            moves = _of_layer(moves, 0)
            return self.layer_step(params, x, k, v, unpack(rows, size), active, work, added, moves, keep=keep)

        # x can only be updated in place where the output has its shape.
        donated = (1, 2, 3) if keep == size else (2, 3)
        return layer, (*arguments, self._moves(1) if shifts else None), donated

    def layers(self, size: int, shifts: bool = False, like: tuple[int, ...] = (0,) * BLOCK) -> Any:
        """`BLOCK` layers after each other that all rows leave, none of them with DeepStack features."""
        # An inner jit: what they have in common is compiled once.
        layer = jax.jit(functools.partial(self.layer_step, keep=size))

        def block(
            params: list[Params], x: jax.Array, pool: Any, rows: jax.Array, active: Any, work: Any, moves: Any
        ) -> Any:
            rest, captured, own = [], [], unpack(rows, size)
            for i, weights in enumerate(params):
                x, k, v, values = layer(weights, x, *pool[i], own, active[i], work, None, _of_layer(moves, i))
                rest.append([k, v])
                captured.append(values)
            return x, rest, captured

        pool = [[self.shape_of("pool")] * 2] * BLOCK
        active, work = jax.ShapeDtypeStruct((BLOCK, 2), jnp.int32), self.work_config(size).abstract()
        weights, moves = [self._text["layers"][i] for i in like], self._moves(BLOCK) if shifts else None
        return block, (weights, self._hidden(size), pool, self.packed, active, work, moves), (1, 2)

    def layer_step(
        self,
        params: Params,
        x: jax.Array,
        k: jax.Array,
        v: jax.Array,
        rows: Rows,
        active: jax.Array,
        work: kernels.Work,
        added: jax.Array | None = None,
        moves: Moves | None = None,
        *,
        keep: int,
    ) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
        """A layer of which the first rows write: the bound may reach beyond them, into rows that have dropped out,
        whose slots hold linked K, V. Before that, linked K, V are moved by what the rows show.

        `active`: [2], rows that write, and of them rows that the next layer needs.
        """
        index = jnp.arange(len(x), dtype=jnp.int32)
        writing, needed = active
        layer = self.bind_layer(params)
        if moves is not None:
            row_image = jnp.where(index < writing, moves.row_image[: len(x)], -1)
            k, v = move(layer.self_attn, k, v, differences(layer, x, k, v, rows, row_image), moves)
        rows = rows._replace(slot=jnp.where(index < writing, rows.slot, self.num_slots + index))
        return layer(
            x, k, v, rows, added, work,
            keep=keep, needed=needed, capture=True, implementation=self.implementation,
        )  # fmt: skip

    def _hidden(self, size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size, self.config.text.hidden_size), self.dtype)

    def _moves(self, layers: int) -> Moves:
        rows, tokens, each = (
            jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((self.ladder.max_rows,), (6, self.moved), (layers,))
        )
        return Moves(rows, tokens, each, each)

    def take(self, size: int, less: int) -> Any:
        x = self._hidden(size)
        return lambda x, order: x[order[:less]], (x, jax.ShapeDtypeStruct((size,), jnp.int32)), ()

    def narrow(self, size: int, less: int) -> Any:
        def narrowed(rows: jax.Array, count: jax.Array) -> jax.Array:
            fewer = narrow(unpack(rows, size), count, size=less, slots=self.num_slots)
            return repack(fewer, self.ladder.max_rows)

        return narrowed, (self.packed, jax.ShapeDtypeStruct((), jnp.int32)), ()

    def score_rows(self, size: int, window: int, policy: SelectingPolicy, like: tuple[int, ...] = (0,)) -> Any:
        def score(
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
            layer = self.bind_layer(params)
            return before + policy.score(project(layer, x, k, v, unpack(rows, size), is_image, request, table))

        x = self._hidden(size)
        pool = self.shape_of("pool")
        flags, scores = (jax.ShapeDtypeStruct((size,), dtype) for dtype in (jnp.bool_, jnp.float32))
        request, table = (jax.ShapeDtypeStruct((count,), jnp.int32) for count in (2, window))
        weights = self._text["layers"][like[0]]
        return score, (weights, x, pool, pool, self.packed, flags, request, table, scores), ()

    def choose(self, size: int) -> Any:
        def chosen(x: jax.Array, rows: jax.Array, score: jax.Array, counts: jax.Array) -> Any:
            order = choose(score, *counts)
            ordered = Rows(*(field[..., order] for field in unpack(rows, size)))
            return x[order], repack(ordered, self.ladder.max_rows), order

        x = self._hidden(size)
        score = jax.ShapeDtypeStruct((size,), jnp.float32)
        return chosen, (x, self.packed, score, jax.ShapeDtypeStruct((2,), jnp.int32)), ()

    def head(self, size: int, count: int) -> Any:
        def head(norm: Params, head: Params, x: jax.Array, first: jax.Array) -> jax.Array:
            return self.logits(norm, head, jax.lax.dynamic_slice_in_dim(x, first, count))

        x = self._hidden(size)
        return head, (self._text["norm"], self._head, x, jax.ShapeDtypeStruct((), jnp.int32)), ()

    def logits(self, norm: Params, head: Params, x: jax.Array) -> jax.Array:
        return bind(self.table_graph, head).scores(bind(self.norm_graph, norm)(x))

    def window(self, count: int) -> Any:
        layer = functools.partial(self.layer_step, keep=count)
        window = Window(count, self.num_slots, self.ladder.window, jax.jit(layer), self._embedded, self.logits)
        pool = [[self.shape_of("pool")] * 2] * self.config.text.num_layers
        rows = jax.ShapeDtypeStruct((count, ANSWER + sampler.COLUMNS), jnp.int32)
        work = self.work_config(count, decode=True).abstract()
        tokens = jax.ShapeDtypeStruct((), np.int32)
        return window, (self._text, self._head, pool, self.shape_of("lanes"), rows, work, tokens), (2, 3)

    def _embedded(self, text: Params, token: jax.Array) -> jax.Array:
        return bind(self.table_graph, text["embed_tokens"])(token)

    def sample(self, count: int) -> Any:
        """The next token of lanes whose answers have `steps` tokens so far."""

        def sample(logits: jax.Array, lanes: Lanes, rows: jax.Array, steps: jax.Array) -> Any:
            choosing = Choosing.unpack(rows)
            begun = lanes._replace(
                step=lanes.step.at[choosing.lane].set(steps, mode="drop"),
                is_ended=lanes.is_ended.at[choosing.lane].set(False, mode="drop"),
            )
            return sampler.sample(logits, begun, choosing)

        logits = jax.ShapeDtypeStruct((count, self.config.text.vocab_size), jnp.float32)
        rows = jax.ShapeDtypeStruct((count, sampler.COLUMNS), jnp.int32)
        return sample, (logits, self.shape_of("lanes"), rows, jax.ShapeDtypeStruct((count,), jnp.int32)), 1

    def score(self, count: int) -> Any:
        logits = jax.ShapeDtypeStruct((count, self.config.text.vocab_size), jnp.float32)
        return sampler.score, (logits, jax.ShapeDtypeStruct((count,), jnp.int32), jax.ShapeDtypeStruct((), bool)), ()


def _copy(pool: Any, source: jax.Array, target: jax.Array) -> Any:
    """The pool with some pages copied to others."""

    def copied(half: jax.Array) -> jax.Array:
        pages = half.reshape(-1, kernels.PAGE, *half.shape[1:])
        return pages.at[target].set(pages[source], mode="drop").reshape(half.shape)

    return jax.tree.map(copied, pool)


def _of_layer(moves: Moves | None, index: int) -> Moves | None:
    """Of what several layers move, what one does."""
    return moves and Moves(moves.row_image, moves.tokens, moves.layer[index], moves.count[index])


def shapes(tree: Any) -> Any:
    """Abstract arrays like those of a tree."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
