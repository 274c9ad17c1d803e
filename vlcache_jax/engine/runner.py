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
from vlcache_jax.engine.definitions import Definitions, Params
from vlcache_jax.engine.ladder import Ladder, round_up
from vlcache_jax.engine.packed import pack
from vlcache_jax.engine.programs import Programs
from vlcache_jax.engine.sampler import COLUMNS, NO_LANE, Lanes, Sampled
from vlcache_jax.engine.window import ANSWER
from vlcache_jax.models import ModelConfig
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
        self._lanes: Lanes | None = None

    # What these return may not be computed yet; whoever needs a value waits for it.

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
        works = step.works(self.definitions.work_config)
        own, works = jax.device_put((pack(step.rows, self.ladder.max_rows), works))
        attending, held = step.leaving, first
        x, deepstack = self._run(("embed", first), self._text["embed_tokens"], self._encoder_rows_now(), own)
        pool, self._pool = self._pool_now(), None
        shifts = [
            jax.device_put(shift.tokens(round_up(len(shift.slot), self.definitions.moved_rungs)))
            for shift in step.shifts
        ]
        captured = []
        score = chosen = None
        for layer, (size, keep) in enumerate(zip(step.bounds[:-1], step.bounds[1:], strict=True)):
            if layer > check + 1 and step.active[layer] < step.active[layer - 1]:
                own, held = self._run(("narrow", held, size), own, np.int32(step.active[layer])), size
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
                held = keep
            if step.captured:
                captured.append(values)
        self._pool = pool
        return x, captured, chosen

    def _score_rows(
        self, selection: Selection, weights: Params, x: jax.Array, pool: list[jax.Array], rows: jax.Array, score: Any
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
        self, layer: int, weights: Params, x: jax.Array, pool: list[jax.Array], rows: Any, row_image: Any, tokens: Any
    ) -> None:
        """Moves linked K, V of images of which the layer computes some rows."""
        if row_image.max() >= 0:
            difference = self._run(("differences", len(x)), weights, x, *pool, rows, row_image)
            pool[:] = self._run(("move", len(tokens[0])), *pool, difference, *tokens, np.int32(layer))

    def head(self, x: jax.Array, first: int, count: int) -> tuple[jax.Array, int]:
        """Logits, float32 [B, V], of rows of `x` that hold those from `first` to `first + count`, and which row they
        begin with."""
        most = self.ladder.max_sequences
        size = most if len(x) > most else min(round_up(count, self.ladder.sequences), len(x))
        first = min(first, len(x) - size)
        return self._run(("head", len(x), size), self._text["norm"], self._head, x, np.int32(first)), first

    def open_lane(self, lane: int, marks: np.ndarray, bias: np.ndarray, words: np.ndarray, recent: np.ndarray) -> None:
        """Lets a lane hold what an answer needs besides its tokens; see `vlcache_jax.engine.sampler.Lanes`."""
        lanes, self._lanes = self._lanes_now(), None
        self._lanes = self._run(("open_lane",), lanes, np.int32(lane), marks, bias, words, recent)

    def sample(self, logits: jax.Array, choosing: np.ndarray, steps: np.ndarray, first: int = 0) -> Sampled:
        """Chooses the first token of lanes after their prefill.

        Args:
          logits: [B, V]; rows before `first`, and beyond those of `choosing`, are padding.
          choosing: [n, C], see `Choosing`.
          steps: [n], tokens that the answers have so far.
        """
        size, own = len(logits), slice(first, first + len(steps))
        rows, step = np.zeros((size, COLUMNS), np.int32), np.zeros(size, np.int32)
        rows[:, 0] = NO_LANE
        rows[own], step[own] = choosing, steps
        lanes, self._lanes = self._lanes_now(), None
        sampled, self._lanes = self._run(("sample", size), logits, lanes, rows, step)
        return sampled

    def window(self, rows: np.ndarray, tables: abc.Sequence[np.ndarray], end: np.ndarray, tokens: int) -> Sampled:
        """Decodes up to `tokens` tokens of each row, at most `ladder.window`; returns [window, B] of each.

        Args:
          rows: int32 [n, ANSWER + C], see `vlcache_jax.engine.window`.
          tables: pages of each, with room for its tokens.
          end: slots that each sees at its first and at its last token, [2, n].
        """
        count = len(rows)
        size = round_up(count, self.ladder.sequences)
        config = self.definitions.work_config(size, decode=True)
        work = kernels.make_work(
            np.arange(count), np.zeros(count, np.int32), end[1], tables, config,
            least=end[0], shared=shared_prefixes(tables),
        )  # fmt: skip
        padded = np.zeros((size, rows.shape[1]), np.int32)
        padded[:count], padded[count:, ANSWER] = rows, NO_LANE
        pool, self._pool = self._pool_now(), None
        lanes, self._lanes = self._lanes_now(), None
        chosen, self._lanes, self._pool = self._run(
            ("window", size), self._text, self._head, pool, lanes, padded, work, np.int32(tokens)
        )
        return chosen

    def score(self, logits: jax.Array, target: np.ndarray, *, wants_top: bool = False) -> tuple[jax.Array, ...]:
        """See `sampler.score`; rows of `logits` beyond `target` are padding."""
        target = np.pad(target, (0, len(logits) - len(target))).astype(np.int32)
        return self._run(("score", len(logits)), logits, target, np.bool_(wants_top))

    # State.

    def _pool_now(self) -> list[list[jax.Array]]:
        if self._pool is None:
            self._pool = [[self._run(("pool",)), self._run(("pool",))] for _ in range(self.config.text.num_layers)]
        return self._pool

    def _encoder_rows_now(self) -> jax.Array:
        if self._encoder_rows is None:
            self._encoder_rows = self._run(("encoder_rows",))
        return self._encoder_rows

    def _lanes_now(self) -> Lanes:
        if self._lanes is None:
            self._lanes = self._run(("lanes",))
        return self._lanes


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
