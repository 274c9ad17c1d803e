"""The device side: compiled programs, weights, the KV pool.

Programs are compiled for shapes that follow from the ladder and from nothing else, and stand in one table by name and
sizes; `warmup` compiles all of them ahead, else each is compiled at its first use. Plain nested dicts cross into
programs, never modules.

The pool's arrays are donated to each program and come back updated in place. An interrupted call can leave donated
arrays behind; `reset` drops everything mutable, and the next call makes it anew.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
import time
from collections import abc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vlcache_jax import pallas_kernels as kernels
from vlcache_jax.engine import memory_plan, sampling
from vlcache_jax.engine.batching import Step
from vlcache_jax.engine.ladder import Ladder, round_up
from vlcache_jax.engine.sampling import Sampled, SamplerInputs
from vlcache_jax.models import ModelConfig, Rows, abstract_model, bind, decoder, rope
from vlcache_jax.models.registry import FAMILIES
from vlcache_jax.models.vision import Grid
from vlcache_jax.reuse.selection import SelectingPolicy, Selection, choose, narrow, project
from vlcache_jax.reuse.shift import IMAGES, differences, move

MARK_BLOCK = 4096  # (sequence, token) pairs in one call of the program `mark_seen`

Params = dict[str, Any]
Key = tuple[Any, ...]  # a program's name and its static sizes


class Runner:
    """Runs the model on one device.

    Args:
      config: of the model.
      params: nested dict of device arrays, all of one dtype.
      normalization: each byte's pixel value per channel, float32 [3, 256].
      num_slots: S of the pool.
      ladder: sizes to compile for.
      implementation: of the kernels; None is the best for each case.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        normalization: np.ndarray,
        *,
        num_slots: int,
        ladder: Ladder,
        implementation: str | None = None,
    ):
        self.config = config
        self.ladder = ladder
        self.num_slots = num_slots
        self.implementation = implementation
        self.dtype = params["language_model"]["norm"]["scale"].dtype
        self._visual = params["visual"]
        self._text = params["language_model"]
        self._head = params.get("lm_head", self._text["embed_tokens"])
        self._normalization = jax.device_put(normalization)
        model = abstract_model(config, self.dtype)
        text = model.language_model
        self._tower_graph = nnx.graphdef(model.visual)
        self._layer_graph = nnx.graphdef(text.layers[0])
        self._table_graph = nnx.graphdef(text.embed_tokens)
        self._norm_graph = nnx.graphdef(text.norm)
        self._programs: dict[Key, jax.stages.Compiled] = {}
        self.kernels: dict[Key, tuple[kernels.dispatch.Choice, ...]] = {}
        self.token_rungs = tuple(size // config.vision.merge_size**2 for size in ladder.patches)
        self.reset()

    def reset(self) -> None:
        """Forgets everything mutable, for example after an interrupted call."""
        self._pool: list[list[jax.Array]] | None = None
        self._encoder_rows: jax.Array | None = None
        self._seen: jax.Array | None = None

    # The steps of a wave. What they return may not be computed yet; whoever needs a value waits for it.

    def encode(self, patches: abc.Sequence[np.ndarray], grids: abc.Sequence[Grid]) -> jax.Array:
        """Encodes images together: uint8 [P_i, 3, patch**2] each -> [1 + J, P / merge**2, M] in their order, padded."""
        used = sum(map(len, patches))
        size = round_up(used, self.ladder.patches)
        pixels = np.zeros((size, *patches[0].shape[1:]), np.uint8)
        np.concatenate(patches, out=pixels[:used])
        return self._run(("encode", size), self._visual, pixels, self._normalization, self._tables(grids, size))

    def stage(self, encoded: jax.Array | np.ndarray, place: np.ndarray) -> None:
        """Makes row i of an encoder output encoder row `place[i]` of the next step; places out of range are dropped."""
        rows, self._encoder_rows = self._encoder_rows_now(), None
        self._encoder_rows = self._run(("stage", len(place)), rows, encoded, place)

    @property
    def transfer_bytes(self) -> int:
        """Most bytes of records that are on their way to the device at once, unless one is larger."""
        return memory_plan.slot_bytes(self.config, self.dtype) * self.ladder.max_rows

    def put(self, record: np.ndarray) -> jax.Array:
        """A record's data on the device. On a CPU they stay where they are."""
        return jax.device_put(record, may_alias=True)

    def link(self, data: jax.Array, slot: np.ndarray, position: np.ndarray) -> jax.Array:
        """Writes an image's stored K, V into the pool.

        Args:
          data: keys before rotation and values, [L, 2, T, K, D], T a rung of `token_rungs`.
          slot: of its tokens, [n]; n is at most T.
          position: M-RoPE triples, [3, n].

        Returns:
          Something to wait for.
        """
        size = data.shape[2]
        missing = size - len(slot)
        slots = np.concatenate([slot, self.num_slots + np.arange(missing)]).astype(np.int32)
        positions = np.pad(position, ((0, 0), (0, missing)))
        pool, self._pool = self._pool_now(), None
        self._pool, done = self._run(("link", size), pool, data, slots, positions)
        return done

    def prefill(self, step: Step[Any]) -> tuple[jax.Array, list[tuple[jax.Array, jax.Array]], jax.Array | None]:
        """Runs a step's rows through the layers.

        Returns:
          The hidden states of the rows that leave the last layer; if some rows are captured, keys before rotation and
          values of each layer's rows, else nothing; if rows are chosen on the device, which ones go on (`choose`).
        """
        first = step.bounds[0]
        selection = step.selection
        check = self.config.text.num_layers if selection is None else selection.policy.check_layer
        kinds = {(step.bounds[i], n): i for i, n in enumerate(step.active) if i <= check}
        rows = {kind: jax.device_put(step.layer_rows(layer)) for kind, layer in kinds.items()}
        entering = rows[first, step.active[0]]
        x, deepstack = self._run(("embed", first), self._text["embed_tokens"], self._encoder_rows_now(), entering)
        pool, self._pool = self._pool_now(), None
        shifts = [jax.device_put(shift.tokens(round_up(len(shift.slot), self._moved_rungs))) for shift in step.shifts]
        captured = []
        score = chosen = None
        for layer, (size, keep) in enumerate(zip(step.bounds[:-1], step.bounds[1:], strict=True)):
            if layer <= check:
                own = rows[size, step.active[layer]]
            elif layer > check + 1 and step.active[layer] < step.active[layer - 1]:
                own = self._run(("narrow", len(own.slot), size), own, np.int32(step.active[layer]))
            added = deepstack[layer] if layer < len(deepstack) else None
            if added is not None and chosen is not None:
                added = self._run(("take", len(added), len(chosen), size), added, chosen)
            elif added is not None and len(added) != size:
                added = self._run(("slice", len(added), size), added)
            weights = self._text["layers"][layer]
            if selection is not None and layer in selection.policy.scored_layers:
                score = self._score_rows(selection, weights, x, pool[layer], own, score)
            for shift, tokens in zip(step.shifts, shifts, strict=True):
                if layer:  # in the first layer nothing differs
                    row_image = shift.layer_rows(step.active[layer], size)
                    self._shift(layer, weights, x, pool[layer], own, row_image, tokens)
            leaving = size if layer == check else keep
            x, *pool[layer], values = self._run(
                ("layer", size, leaving, added is not None), weights, x, *pool[layer], own, added
            )
            if selection is not None and layer == check:
                counts = np.array([selection.must, selection.among, selection.keep[0]], np.int32)
                x, own, chosen = self._run(("choose", size, keep), x, own, score, counts)
            if step.captured:
                captured.append(values)
        self._pool = pool
        return x, captured, chosen

    def _score_rows(
        self, selection: Selection, weights: Params, x: jax.Array, pool: list[jax.Array], rows: Rows, score: Any
    ) -> jax.Array:
        """Adds a layer's scores to those of the layers before."""
        window = min(round_up(selection.length, self._windows), self.num_slots)
        is_image = np.zeros(len(x), bool)
        is_image[selection.must : selection.must + selection.among] = True
        before = np.zeros(len(x), np.float32) if score is None else score
        request = np.array([selection.start, selection.length, selection.question], np.int32)
        key = "score_rows", len(x), window, selection.policy
        return self._run(key, weights, x, *pool, rows, is_image, request, before)

    def _shift(
        self, layer: int, weights: Params, x: jax.Array, pool: list[jax.Array], rows: Rows, row_image: Any, tokens: Any
    ) -> None:
        """Moves linked K, V of images of which the layer computes some rows."""
        if row_image.max() >= 0:
            difference = self._run(("differences", len(x)), weights, x, *pool, rows, row_image)
            pool[:] = self._run(("move", len(tokens[0])), *pool, difference, *tokens, np.int32(layer))

    @property
    def _moved_rungs(self) -> tuple[int, ...]:
        """Numbers of tokens that are moved together."""
        return tuple(sorted({*self.ladder.rows, *self.token_rungs}))

    @property
    def _windows(self) -> tuple[int, ...]:
        """Sizes of the part of the pool that scores look at."""
        return tuple(dict.fromkeys((*self.ladder.rows, self.num_slots)))

    def head(self, x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
        """Logits, float32 [B, V], and the most likely tokens, int32 [B], of at least the first `count` rows of `x`."""
        size = min(round_up(count, self.ladder.sequences), len(x))
        return self._run(("head", len(x), size), self._text["norm"], self._head, x)

    def decode(self, rows: Rows) -> tuple[jax.Array, jax.Array]:
        """Writes K, V of one row a sequence; returns logits, float32 [B, V], and the most likely tokens, int32 [B]."""
        pool, self._pool = self._pool_now(), None
        logits, greedy, self._pool = self._run(("decode", len(rows.slot)), self._text, self._head, pool, rows)
        return logits, greedy

    def sample(self, logits: jax.Array, inputs: SamplerInputs) -> Sampled:
        """Chooses a token for each row of `logits`."""
        seen, self._seen = self._seen_now(), None
        sampled, self._seen = self._run(("sample", len(logits)), logits, seen, inputs)
        return sampled

    def score(self, logits: jax.Array, target: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """See `sampling.score`."""
        return self._run(("score", len(logits)), logits, target)

    def mark_seen(self, tokens: abc.Sequence[np.ndarray]) -> None:
        """Lets sequence i of the wave have seen the ids `tokens[i]`, and nothing else."""
        self._seen = None
        sequence = np.repeat(np.arange(len(tokens), dtype=np.int32), [len(ids) for ids in tokens])
        pairs = np.stack([sequence, np.concatenate(tokens).astype(np.int32)])
        for first in range(0, pairs.shape[1], MARK_BLOCK):
            block = np.full((2, MARK_BLOCK), self.ladder.max_sequences, np.int32)
            block[:, : min(MARK_BLOCK, pairs.shape[1] - first)] = pairs[:, first : first + MARK_BLOCK]
            seen, self._seen = self._seen_now(), None
            self._seen = self._run(("mark_seen",), seen, *block)

    # Programs.

    def keys(
        self,
        *,
        linking: bool = False,
        shrinking: abc.Collection[int] = (),
        selecting: SelectingPolicy | None = None,
        shifting: bool = False,
    ) -> list[Key]:
        """Every program that prefill, decoding, sampling and scoring can call for.

        Args:
          linking: also linking.
          shrinking: layers that fewer rows leave than enter, besides the last one. Any number may leave: a step that
            ends inside an image may hold nothing but rows that drop out early.
          selecting: also choosing rows on the device.
          shifting: also moving linked K, V.
        """
        ladder, layers, deepstack = self.ladder, self.config.text.num_layers, self.config.vision.num_deepstack
        keys: list[Key] = [("pool",), ("encoder_rows",), ("seen",), ("mark_seen",)]
        for size in ladder.rows:
            keep = ladder.outputs(size)
            keys += [("embed", size)]
            keys += [("layer", size, size if i < layers - 1 else keep, i < deepstack) for i in range(layers)]
            fewer = [rung for rung in ladder.rows if rung < size]
            checked = None if selecting is None else selecting.check_layer  # is left through `choose`
            keys += [("layer", size, rung, i < deepstack) for i in shrinking if i != checked for rung in fewer]
            if shrinking and min(shrinking) < deepstack - 1:
                keys += [("slice", size, rung) for rung in fewer]
            for count in {min(count, keep) for count in ladder.sequences}:
                keys += [("head", keep, count), ("sample", count), ("score", count)]
            if selecting is not None:
                lower = [rung for rung in ladder.rows if rung <= size]
                keys += [("choose", size, rung) for rung in lower]
                if any(layer > selecting.check_layer for layer in shrinking):
                    keys += [("narrow", size, rung) for rung in lower]
                if selecting.check_layer < deepstack - 1:
                    keys += [("take", size, rung, less) for rung in lower for less in lower if less <= rung]
                keys += [("score_rows", size, window, selecting) for window in self._windows if window >= size]
        for count in ladder.sequences:
            keys += [("decode", count), ("sample", count)]
        for size in ladder.patches:
            keys += [("encode", size)]
        for size in self.token_rungs:
            keys += [("stage", size)] + [("link", size)] * linking
        if shifting:
            keys += [("differences", size) for size in ladder.rows] + [("move", size) for size in self._moved_rungs]
        return list(dict.fromkeys(keys))

    def warmup(
        self, keys: abc.Iterable[Key], progress: abc.Callable[[Key], None] = lambda key: None
    ) -> tuple[int, float]:
        """Compiles those of `keys` that are not yet; returns the number of programs and the seconds it took."""
        start = time.perf_counter()
        missing = self.missing(keys)
        threads = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
        try:
            compiling = {threads.submit(self._lower(key).compile): key for key in missing}
            for future in concurrent.futures.as_completed(compiling):
                self._programs[compiling[future]] = future.result()
                progress(compiling[future])
        finally:
            threads.shutdown(cancel_futures=True)  # after Ctrl-C, what has not begun never will
        return len(missing), time.perf_counter() - start

    def missing(self, keys: abc.Iterable[Key]) -> list[Key]:
        """Those of `keys` that are not compiled yet."""
        return [key for key in keys if key not in self._programs]

    @property
    def num_programs(self) -> int:
        """Programs compiled so far."""
        return len(self._programs)

    def _run(self, key: Key, *args: Any) -> Any:
        if key not in self._programs:
            self._programs[key] = self._lower(key).compile()
        return self._programs[key](*args)

    def _lower(self, key: Key) -> jax.stages.Lowered:
        name, *sizes = key
        function, arguments, donated = getattr(self, f"_define_{name}")(*sizes)
        with kernels.dispatch.recorded() as choices:
            lowered = jax.jit(function, donate_argnums=donated).lower(*arguments)
        if choices:
            self.kernels[key] = tuple(dict.fromkeys(choices))
        return lowered

    # Definitions: name -> (function, abstract arguments, which of them are donated).

    def _define_pool(self) -> Any:
        text = self.config.text
        return lambda: jnp.zeros((self.num_slots, text.num_kv_heads, text.head_dim), self.dtype), (), ()

    def _define_encoder_rows(self) -> Any:
        shape = 1 + self.config.vision.num_deepstack, self.ladder.max_rows, self.config.text.hidden_size
        return lambda: jnp.zeros(shape, self.dtype), (), ()

    def _define_seen(self) -> Any:
        return lambda: jnp.zeros((self.ladder.max_sequences, self.config.text.vocab_size), bool), (), ()

    def _define_mark_seen(self) -> Any:
        pairs = jax.ShapeDtypeStruct((MARK_BLOCK,), jnp.int32)
        return sampling.mark_seen, (self._shape_of("seen"), pairs, pairs), 0

    def _define_encode(self, size: int) -> Any:
        def encode(params: Params, pixels: jax.Array, normalization: jax.Array, tables: Params) -> jax.Array:
            return bind(self._tower_graph, params)(pixels, normalization, tables, implementation=self.implementation)

        vision = self.config.vision
        pixels = jax.ShapeDtypeStruct((size, vision.in_channels, vision.patch_size**2), jnp.uint8)
        smallest = (1, vision.merge_size, vision.merge_size)
        tables = self._tables([smallest], size)
        return encode, _shapes((self._visual, pixels, self._normalization, tables)), ()

    def _define_stage(self, size: int) -> Any:
        def stage(rows: jax.Array, encoded: jax.Array, place: jax.Array) -> jax.Array:
            return rows.at[:, place].set(encoded, mode="drop", unique_indices=True)

        rows = self._shape_of("encoder_rows")
        encoded = jax.ShapeDtypeStruct((rows.shape[0], size, rows.shape[2]), self.dtype)
        return stage, (rows, encoded, jax.ShapeDtypeStruct((size,), jnp.int32)), 0

    def _define_link(self, size: int) -> Any:
        text = self.config.text

        def link(pool: Any, data: jax.Array, slot: jax.Array, position: jax.Array) -> Any:
            cos, sin = rope.text_rotation(
                position, text.rope_theta, text.mrope_section, text.mrope_interleaved, self.dtype
            )
            write = functools.partial(kernels.link, implementation=self.implementation)
            linked = [
                [*write(k, v, data[layer, 0], data[layer, 1], slot, cos, sin)] for layer, (k, v) in enumerate(pool)
            ]
            return linked, jnp.zeros((), jnp.int32)

        pool = [[self._shape_of("pool")] * 2] * text.num_layers
        shape = text.num_layers, 2, size, text.num_kv_heads, text.head_dim
        index = jax.ShapeDtypeStruct((size,), jnp.int32)
        return link, (pool, jax.ShapeDtypeStruct(shape, self.dtype), index, _rows(size).position), 0

    def _define_slice(self, size: int, less: int) -> Any:
        return lambda x: x[:less], (jax.ShapeDtypeStruct((size, self.config.text.hidden_size), self.dtype),), ()

    def _define_embed(self, size: int) -> Any:
        def embed(table: Params, encoder_rows: jax.Array, rows: Rows) -> tuple[jax.Array, list[jax.Array]]:
            x, deepstack = decoder.embed(bind(self._table_graph, table), encoder_rows, rows.source)
            return x, list(deepstack)

        return embed, (_shapes(self._text["embed_tokens"]), self._shape_of("encoder_rows"), _rows(size)), ()

    def _define_layer(self, size: int, keep: int, has_deepstack: bool) -> Any:
        x = jax.ShapeDtypeStruct((size, self.config.text.hidden_size), self.dtype)
        pool = self._shape_of("pool")
        arguments = _shapes(self._text["layers"][0]), x, pool, pool, _rows(size), x if has_deepstack else None
        # x can only be updated in place where the output has its shape.
        return functools.partial(self._layer, keep=keep), arguments, (1, 2, 3) if keep == size else (2, 3)

    def _layer(
        self,
        params: Params,
        x: jax.Array,
        k: jax.Array,
        v: jax.Array,
        rows: Rows,
        added: jax.Array | None,
        *,
        keep: int,
    ) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
        layer = bind(self._layer_graph, params)
        return layer(x, k, v, rows, added, keep=keep, capture=True, implementation=self.implementation)

    def _define_take(self, size: int, chosen: int, less: int) -> Any:
        x = jax.ShapeDtypeStruct((size, self.config.text.hidden_size), self.dtype)
        return lambda x, order: x[order[:less]], (x, jax.ShapeDtypeStruct((chosen,), jnp.int32)), ()

    def _define_narrow(self, size: int, less: int) -> Any:
        narrowed = functools.partial(narrow, size=less, slots=self.num_slots)
        return narrowed, (_rows(size), jax.ShapeDtypeStruct((), jnp.int32)), ()

    def _define_score_rows(self, size: int, window: int, policy: SelectingPolicy) -> Any:
        def score(
            params: Params,
            x: jax.Array,
            k: jax.Array,
            v: jax.Array,
            rows: Rows,
            is_image: jax.Array,
            request: jax.Array,
            before: jax.Array,
        ) -> jax.Array:
            layer = bind(self._layer_graph, params)
            return before + policy.score(project(layer, x, k, v, rows, is_image, request, window))

        x = jax.ShapeDtypeStruct((size, self.config.text.hidden_size), self.dtype)
        pool = self._shape_of("pool")
        flags, scores = (jax.ShapeDtypeStruct((size,), dtype) for dtype in (jnp.bool_, jnp.float32))
        request = jax.ShapeDtypeStruct((3,), jnp.int32)
        weights = _shapes(self._text["layers"][0])
        return score, (weights, x, pool, pool, _rows(size), flags, request, scores), ()

    def _define_differences(self, size: int) -> Any:
        def between(params: Params, x: jax.Array, k: jax.Array, v: jax.Array, rows: Rows, row_image: jax.Array) -> Any:
            return differences(bind(self._layer_graph, params), x, k, v, rows, row_image)

        x = jax.ShapeDtypeStruct((size, self.config.text.hidden_size), self.dtype)
        pool = self._shape_of("pool")
        index = jax.ShapeDtypeStruct((size,), jnp.int32)
        return between, (_shapes(self._text["layers"][0]), x, pool, pool, _rows(size), index), ()

    def _define_move(self, size: int) -> Any:
        text, pool = self.config.text, self._shape_of("pool")
        difference = jax.ShapeDtypeStruct((IMAGES, text.num_kv_heads, text.head_dim), jnp.float32)
        index, number = jax.ShapeDtypeStruct((size,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
        arguments = pool, pool, (difference, difference), index, _rows(size).position, index, index, number
        return functools.partial(move, text), arguments, (0, 1)

    def _define_choose(self, size: int, less: int) -> Any:
        def chosen(x: jax.Array, rows: Rows, score: jax.Array, counts: jax.Array) -> Any:
            return choose(x, rows, score, *counts, size=less, slots=self.num_slots)

        x = jax.ShapeDtypeStruct((size, self.config.text.hidden_size), self.dtype)
        score = jax.ShapeDtypeStruct((size,), jnp.float32)
        return chosen, (x, _rows(size), score, jax.ShapeDtypeStruct((3,), jnp.int32)), ()

    def _define_head(self, size: int, count: int) -> Any:
        x = jax.ShapeDtypeStruct((size, self.config.text.hidden_size), self.dtype)
        head = functools.partial(self._logits, count=count)
        return head, (_shapes(self._text["norm"]), _shapes(self._head), x), ()

    def _logits(self, norm: Params, head: Params, x: jax.Array, *, count: int) -> tuple[jax.Array, jax.Array]:
        logits = bind(self._table_graph, head).scores(bind(self._norm_graph, norm)(x[:count]))
        return logits, jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def _define_decode(self, count: int) -> Any:
        layer = jax.jit(self._layer, static_argnames="keep")  # traced once, not once a layer

        def decode(text: Params, head: Params, pool: list[list[jax.Array]], rows: Rows) -> Any:
            x = bind(self._table_graph, text["embed_tokens"])(rows.source)
            updated = []
            for i, (k, v) in enumerate(pool):
                x, k, v, _ = layer(text["layers"][i], x, k, v, rows, None, keep=count)
                updated.append([k, v])
            return *self._logits(text["norm"], head, x, count=count), updated

        pool = [[self._shape_of("pool")] * 2] * self.config.text.num_layers
        return decode, (_shapes(self._text), _shapes(self._head), pool, _rows(count)), 2

    def _define_sample(self, count: int) -> Any:
        def of(dtype: Any, *rest: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((count, *rest), dtype)

        inputs = SamplerInputs(
            temperature=of(jnp.float32),
            top_k=of(jnp.int32),
            top_p=of(jnp.float32),
            penalty=of(jnp.float32),
            seed=of(jnp.uint32),
            step=of(jnp.int32),
            banned=of(jnp.int32, sampling.MAX_BANNED),
            sequence=of(jnp.int32),
            logprobs=of(jnp.bool_),
        )
        return sampling.sample, (of(jnp.float32, self.config.text.vocab_size), self._shape_of("seen"), inputs), 1

    def _define_score(self, count: int) -> Any:
        logits = jax.ShapeDtypeStruct((count, self.config.text.vocab_size), jnp.float32)
        return sampling.score, (logits, jax.ShapeDtypeStruct((count,), jnp.int32)), ()

    # State.

    def _shape_of(self, name: str) -> jax.ShapeDtypeStruct:
        return jax.eval_shape(getattr(self, f"_define_{name}")()[0])

    def _pool_now(self) -> list[list[jax.Array]]:
        if self._pool is None:
            self._pool = [[self._run(("pool",)), self._run(("pool",))] for _ in range(self.config.text.num_layers)]
        return self._pool

    def _encoder_rows_now(self) -> jax.Array:
        if self._encoder_rows is None:
            self._encoder_rows = self._run(("encoder_rows",))
        return self._encoder_rows

    def _seen_now(self) -> jax.Array:
        if self._seen is None:
            self._seen = self._run(("seen",))
        return self._seen

    def _tables(self, grids: abc.Sequence[Grid], num_patches: int) -> dict[str, np.ndarray]:
        return FAMILIES[self.config.model_type].encoder_tables(self.config.vision, grids, num_patches)


def check_kernels(config: ModelConfig, dtype: Any, implementation: str) -> None:
    """Raises NotImplementedError if the implementation does not do the kernels' cases of the model."""
    text, vision = config.text, config.vision
    index = jax.ShapeDtypeStruct((8,), jnp.int32)
    attention = functools.partial(kernels.attention, implementation=implementation)
    heads = ((text.num_heads, text.num_kv_heads, text.head_dim), (vision.num_heads,) * 2 + (vision.head_dim,))
    for num_heads, kv_heads, width in heads:
        q, k = (jax.ShapeDtypeStruct((8, h, width), dtype) for h in (num_heads, kv_heads))
        jax.eval_shape(attention, q, k, k, index, index)
    k = jax.ShapeDtypeStruct((8, text.num_kv_heads, text.head_dim), dtype)
    angle = jax.ShapeDtypeStruct((8, 1, text.head_dim // 2), dtype)
    jax.eval_shape(functools.partial(kernels.link, implementation=implementation), k, k, k, k, index, angle, angle)


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def _rows(size: int) -> Rows:
    index = jax.ShapeDtypeStruct((size,), jnp.int32)
    return Rows(index, jax.ShapeDtypeStruct((3, size), jnp.int32), index, index, index)
