"""The device side: weights, the KV pool, and the programs of a step in their order.

The pool's arrays are donated to each program and come back updated in place. An interrupted call can leave donated
arrays behind; `reset` drops everything mutable, and the next call makes it anew.
"""

from __future__ import annotations

import functools
from collections import abc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vlcache_jax import pallas_kernels as kernels
from vlcache_jax.engine import memory_plan
from vlcache_jax.engine.batching import Step, shared_prefixes
from vlcache_jax.engine.definitions import MARK_BLOCK, Definitions, Params
from vlcache_jax.engine.ladder import Ladder, round_up
from vlcache_jax.engine.programs import Programs
from vlcache_jax.engine.sampling import Sampled, SamplerInputs
from vlcache_jax.models import ModelConfig, Rows
from vlcache_jax.models.vision import Grid
from vlcache_jax.pallas_kernels.link import check_slots
from vlcache_jax.reuse.selection import Selection


class Runner:
    """Runs the model on one device.

    Args:
      config: of the model.
      params: nested dict of device arrays, all of one dtype.
      normalization: each byte's pixel value per channel, float32 [3, 256].
      num_slots: S of the pool, whole pages; the first page is nobody's.
      max_pages: of a request.
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
        max_pages: int,
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
        self.definitions = Definitions(
            config, params, self._normalization,
            num_slots=num_slots, max_pages=max_pages, ladder=ladder, implementation=implementation,
        )  # fmt: skip
        self.programs = Programs(self.definitions)
        self.token_rungs = self.definitions.token_rungs
        self._run = self.programs.run
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
        return self._run(
            ("encode", size), self._visual, pixels, self._normalization, self.definitions.tables(grids, size)
        )

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
          slot: of its tokens, [n]; n is at most T; one beyond the pool is not written.
          position: M-RoPE triples, [3, n].

        Returns:
          Something to wait for.

        Raises:
          ValueError: a slot is negative, or comes again.
        """
        check_slots(slot, self.num_slots)
        size = data.shape[2]
        missing = size - len(slot)
        slots = np.concatenate([slot, self.num_slots + np.arange(missing)]).astype(np.int32)
        positions = np.pad(position, ((0, 0), (0, missing)))
        pool, self._pool = self._pool_now(), None
        self._pool, done = self._run(("link", size), pool, data, slots, positions)
        return done

    def copy_pages(self, pairs: abc.Sequence[tuple[int, int]]) -> None:
        """Copies pages: of each pair the first to the second, which none of the others names."""
        most = self.ladder.max_sequences
        for first in range(0, len(pairs), most):
            some = pairs[first : first + most]
            size = round_up(len(some), self.ladder.sequences)
            source, target = np.zeros(size, np.int32), np.full(size, self.num_slots // kernels.PAGE, np.int32)
            source[: len(some)], target[: len(some)] = zip(*some, strict=True)
            pool, self._pool = self._pool_now(), None
            self._pool = self._run(("copy", size), pool, source, target)

    def prefill(self, step: Step[Any]) -> tuple[jax.Array, list[tuple[jax.Array, jax.Array]], jax.Array | None]:
        """Runs a step's rows through the layers.

        Returns:
          The hidden states of the rows that leave the last layer; if some rows are captured, keys before rotation and
          values of each layer's rows, else nothing; if rows are chosen on the device, which ones go on (`choose`).
        """
        first = step.bounds[0]
        selection = step.selection
        check = self.config.text.num_layers if selection is None else selection.policy.check_layer
        sizes = set(step.bounds[: check + 1])
        rows = {n: jax.device_put(Rows(*(field[..., :n] for field in step.rows))) for n in sizes}
        works, attending = jax.device_put(step.works(self.definitions.work_config)), step.leaving
        x, deepstack = self._run(("embed", first), self._text["embed_tokens"], self._encoder_rows_now(), rows[first])
        pool, self._pool = self._pool_now(), None
        shifts = [
            jax.device_put(shift.tokens(round_up(len(shift.slot), self.definitions.moved_rungs)))
            for shift in step.shifts
        ]
        captured = []
        score = chosen = None
        for layer, (size, keep) in enumerate(zip(step.bounds[:-1], step.bounds[1:], strict=True)):
            if layer <= check:
                own = rows[size]
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
            leaving, _, is_chosen = attending[layer]
            x, *pool[layer], values = self._run(
                ("layer", size, leaving, added is not None),
                weights, x, *pool[layer], own, np.int32(step.active[layer]), works[leaving, is_chosen], added,
            )  # fmt: skip
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
        window = round_up(-(-selection.length // kernels.PAGE), self.definitions.windows)
        table = np.zeros(window, np.int32)
        pages = selection.table[:window]
        table[: len(pages)] = pages
        is_image = np.zeros(len(x), bool)
        is_image[selection.must : selection.must + selection.among] = True
        before = np.zeros(len(x), np.float32) if score is None else score
        request = np.array([selection.length, selection.question], np.int32)
        key = "score_rows", len(x), window, selection.policy
        return self._run(key, weights, x, *pool, rows, is_image, request, table, before)

    def _shift(
        self, layer: int, weights: Params, x: jax.Array, pool: list[jax.Array], rows: Rows, row_image: Any, tokens: Any
    ) -> None:
        """Moves linked K, V of images of which the layer computes some rows."""
        if row_image.max() >= 0:
            difference = self._run(("differences", len(x)), weights, x, *pool, rows, row_image)
            pool[:] = self._run(("move", len(tokens[0])), *pool, difference, *tokens, np.int32(layer))

    def head(self, x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
        """Logits, float32 [B, V], and the most likely tokens, int32 [B], of at least the first `count` rows of `x`."""
        size = min(round_up(count, self.ladder.sequences), len(x))
        return self._run(("head", len(x), size), self._text["norm"], self._head, x)

    def decode(self, rows: Rows, tables: abc.Sequence[np.ndarray]) -> tuple[jax.Array, jax.Array]:
        """Writes K, V of one row a sequence; returns logits, float32 [B, V], and the most likely tokens, int32 [B].

        Args:
          rows: padded to a rung.
          tables: pages of each sequence.
        """
        size, count = len(rows.slot), len(tables)
        config = self.definitions.work_config(size, decode=True)
        start, end = rows.k_start[:count], rows.k_end[:count]
        work = kernels.make_work(np.arange(count), start, end, tables, config, shared=shared_prefixes(tables))
        pool, self._pool = self._pool_now(), None
        logits, greedy, self._pool = self._run(("decode", size), self._text, self._head, pool, rows, work)
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

    # State.

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


def check_kernels(config: ModelConfig, dtype: Any, implementation: str) -> None:
    """Raises NotImplementedError if the implementation does not do the kernels' cases of the model."""
    text, vision = config.text, config.vision
    index = jax.ShapeDtypeStruct((8,), jnp.int32)
    x = jax.ShapeDtypeStruct((8, vision.num_heads, vision.head_dim), dtype)
    jax.eval_shape(functools.partial(kernels.attention, implementation=implementation), x, x, x, index, index)
    q = jax.ShapeDtypeStruct((8, text.num_heads, text.head_dim), dtype)
    kernels.work_config(8, 1, 1, q, text.num_kv_heads, decode=False, implementation=implementation)
    k = jax.ShapeDtypeStruct((8, text.num_kv_heads, text.head_dim), dtype)
    angle = jax.ShapeDtypeStruct((8, 1, text.head_dim // 2), dtype)
    jax.eval_shape(functools.partial(kernels.link, implementation=implementation), k, k, k, k, index, angle, angle)
