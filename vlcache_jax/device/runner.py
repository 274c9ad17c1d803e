"""The device side: weights, the KV pools, and the programs of a step in their order.

What programs update in place is donated to them. An interrupted call can leave donated arrays behind; `reset` drops
everything mutable, and the next call makes it again. `Clock` times the device by a thread that waits for its results.

The work lists of compressed prompts are made here, too: every layer keeps as many tokens as it needs, and a list for
each layer would cost the host more time than the device saves. So layers that keep nearly as many tokens use one list,
made for the largest of them.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import abc
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx

from vlcache_jax import pallas_kernels as kernels
from vlcache_jax.device.buckets import Ladder, cover, round_up
from vlcache_jax.device.kv_shape import KVShape
from vlcache_jax.device.mesh import ONE, Devices
from vlcache_jax.device.programs.answer import HeadRows, LastHidden, OutputHead, SampleFirst, ScoreTokens
from vlcache_jax.device.programs.base import Halves, Params, Program, Shapes
from vlcache_jax.device.programs.compress import EmptyCompressed
from vlcache_jax.device.programs.encode import Encode, EncodeApart, Stage, encoder_tables, rows_apart, smallest_grid
from vlcache_jax.device.programs.memory import (
    CopyPages,
    EmptyEncoderRows,
    EmptyLanes,
    EmptyPool,
    HoldLanes,
    OpenLane,
    Restage,
)
from vlcache_jax.device.programs.table import Fitting, Programs
from vlcache_jax.device.programs.window import ANSWER, LISTS, CompressedWindow, Window
from vlcache_jax.device.sampler import COLUMNS, NO_LANE, Lanes, SampledTokens, choice_of
from vlcache_jax.models import ModelConfig, abstract_model, bind
from vlcache_jax.models.layers import times
from vlcache_jax.models.vision import Grid
from vlcache_jax.pallas_kernels import PAGE, WorkConfig, make_work
from vlcache_jax.pallas_kernels.link import check_slots
from vlcache_jax.pallas_kernels.shapes import ExpertsShape
from vlcache_jax.sampling import MAX_BIASED


class Clock:
    """Times what is launched, in its order."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "vlcache-clock")
        self._lock = threading.Lock()
        self._last = 0.0

    def mark(self, arrays: Sequence[jax.Array]) -> Future[float]:
        """The seconds from when these were launched, or all marked before them were ready, until they are ready.

        Args:
          arrays: that no later program is given for good.
        """
        launched = time.perf_counter()

        def wait() -> float:
            try:
                jax.block_until_ready(arrays)
            except Exception:  # whoever reads them meets the error
                return 0.0
            begin, self._last = max(launched, self._last), time.perf_counter()
            return self._last - begin

        return self._thread.submit(wait)

    def close(self) -> None:
        self._thread.shutdown()


class Pool:
    """Its arrays are donated to each program and come back updated in place.

    Args:
      programs: that run on its device.
      empty: makes K or V.
      count: pairs of these: one for each layer, or one for all.

    Attributes:
      arrays: K and V of each layer, or of all layers, [S, K, D]; None: they are not made yet, or a program that had
        them was interrupted.
    """

    def __init__(self, programs: Programs, empty: Program[jax.Array], count: int):
        self._programs, self._empty, self._count = programs, empty, count
        self.arrays: Halves | None = None

    def make(self) -> Halves:
        """The arrays, made if they are not there."""
        if self.arrays is None:
            run = self._programs.run
            self.arrays = [[run(self._empty), run(self._empty)] for _ in range(self._count)]
        return self.arrays

    def taken(self) -> _Taken:
        """Within, the arrays, for programs that take and return them: what the list has in the end is the pool. If that
        does not come, everything in it is lost."""
        return _Taken(self)

    def copy_pages(self, pairs: abc.Sequence[tuple[int, int]]) -> None:
        """Copies pages: of each pair the first to the second, which none of the others names."""
        rest, shapes = list(pairs), self._programs.shapes
        for size in cover(len(pairs), shapes.ladder.sequences):
            some, rest = rest[:size], rest[size:]
            source, target = np.zeros(size, np.int32), np.full(size, shapes.num_slots // PAGE, np.int32)
            source[: len(some)], target[: len(some)] = zip(*some, strict=True)
            with self.taken() as arrays:
                arrays[:] = self._programs.run(CopyPages(size), arrays, source, target)


class _Taken:
    """The arrays of a pool, which has them again at the end of a `with` that raised nothing."""

    def __init__(self, pool: Pool):
        self._pool = pool

    def __enter__(self) -> Halves:
        self._arrays = self._pool.make()
        self._pool.arrays = None
        return self._arrays

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self._pool.arrays = self._arrays


Index = npt.NDArray[np.int32]

_ALIKE = 0.6  # of the most that a layer of a list keeps


def alike_layers(kept: Index) -> list[list[int]]:
    """The layers that share a list, those that keep most first.

    Args:
      kept: tokens of each layer and prompt, [L, B].
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
    """The lists int32 [LISTS, size], and which of them each layer goes by [L].

    Args:
      kept: see `alike_layers`.
      tokens: of each answer how many are seen behind the prompt's, at the window's first token and at its last, [2, B].
    """
    lists, list_of = np.zeros((LISTS, config.size), np.int32), np.zeros(len(kept), np.int32)
    first, last = tokens
    rows = np.arange(kept.shape[1])
    for number, layers in enumerate(alike_layers(kept)):
        end = kept[layers].max(0) + last
        tables = [np.zeros(-(-count // PAGE), np.int32) for count in end]  # the device knows them
        least = kept[layers].min(0) + first
        lists[number] = make_work(rows, np.zeros_like(end), end, tables, config, least=least).buffer
        list_of[layers] = number
    return lists, list_of


class Runner:
    """Runs the model.

    Args:
      params: nested dict of device arrays, all of one dtype.
      normalization: each byte's pixel value per channel, float32 [3, 256].
      num_slots: S of the pool, whole pages; the first page is nobody's.
      max_pages: of a request.
      ladder: sizes to compile for.
      implementation: of the kernels; None is the best for each case.
      codec: of stored K, V; None: they are kept as they are.
      kept_tokens: that the device tier has room for.
      compressed_slots: of the pool for what is kept of compressed prompts, whole pages; the first page is nobody's. 0:
        there is none.
      devices: where weights lie, and all else is to lie.

    Attributes:
      pool, compressed: the KV pools.
      fitting: chooses sizes of batches.
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
        codec: kernels.Codec | None = None,
        kept_tokens: int = 0,
        compressed_slots: int = 0,
        devices: Devices = ONE,
    ):
        self.config, self.devices = config, devices
        self.ladder = ladder
        self.num_slots = num_slots
        self.implementation = implementation
        self.dtype = params["language_model"]["norm"]["scale"].dtype
        self._visual = params["visual"]
        self.text = params["language_model"]
        self.head_weights = params.get("lm_head", self.text["embed_tokens"])
        self.normalization = devices.put(normalization)
        self.shapes = Shapes(
            config, params, self.normalization,
            num_slots=num_slots, max_pages=max_pages, ladder=ladder, implementation=implementation, codec=codec,
            kept_tokens=kept_tokens, compressed_slots=compressed_slots, is_host=self.is_host, devices=devices,
        )  # fmt: skip
        self.constants = self.shapes.constants(self.text)
        self.programs = Programs(self.shapes)
        self.fitting = Fitting(self.programs)
        self.token_rungs = self.shapes.token_rungs
        self.run = self.programs.run
        self.reset()

    def reset(self) -> None:
        """Forgets everything mutable, for example after an interrupted call."""
        self.pool = Pool(self.programs, EmptyPool(), self.shapes.kv.layers)
        self.compressed = Pool(self.programs, EmptyCompressed(), bool(self.shapes.compressed_slots))
        self._encoder_rows: jax.Array | None = None
        self._lanes: Lanes | None = None

    def prepare(self) -> None:
        """Makes everything mutable, which the first request would wait for; returns when it is there."""
        jax.block_until_ready((self.pool.make(), self.compressed.make(), self.encoder_rows(), self._lanes_now()))

    # What these return may not be computed yet; whoever needs a value waits for it.

    def encode(self, patches: abc.Sequence[np.ndarray], grids: abc.Sequence[Grid]) -> jax.Array:
        """Encodes images together, padded, in their order: -> [1 + J, P / merge**2, M].

        Args:
          patches: of each, uint8 [P_i, 3, patch**2], or with the frames of a video's chunk [P_i, 3, F, patch**2].
          grids: of each.
        """
        sizes, rungs = list(map(len, patches)), self.ladder.patches
        size, shares = self.fitting.encoder(sum(sizes)), self.devices.share_out(sizes)
        each = round_up(max(sum(sizes[i] for i in share) for share in shares), rungs)
        if each not in self.devices.shares(size, rungs):
            return self.run(Encode(size), self._visual, *self._packed(patches, grids, size), self.normalization)
        packed = [self._packed([patches[i] for i in share], [grids[i] for i in share], each) for share in shares]
        images = jax.tree.map(lambda *parts: np.stack(parts), *packed)
        merged = self.config.vision.merge_size**2
        order = np.zeros(size // merged, np.int32)
        rows = rows_apart(shares, [own // merged for own in sizes], each // merged)
        order[: len(rows)] = rows
        return self.run(EncodeApart(size, each), self._visual, *images, self.normalization, order)

    def _packed(
        self, patches: abc.Sequence[np.ndarray], grids: abc.Sequence[Grid], size: int
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Pixels and tables of images after each other, padded to `size` patches; without images, of nothing."""
        vision = self.config.vision
        pixels = np.zeros((size, vision.in_channels, vision.temporal_patch_size, vision.patch_size**2), np.uint8)
        first = 0
        for own in patches:  # a picture fills every slot in time
            pixels[first : first + len(own)] = own.reshape(len(own), vision.in_channels, -1, vision.patch_size**2)
            first += len(own)
        return pixels, encoder_tables(self.config, grids or [smallest_grid(self.config)], size)

    def stage(self, encoded: jax.Array | np.ndarray, place: np.ndarray) -> None:
        """Makes row i of an encoder output encoder row `place[i]` of the next step; places out of range are dropped."""
        rows, self._encoder_rows = self.encoder_rows(), None
        self._encoder_rows = self.run(Stage(len(place)), rows, encoded, place)

    def restage(self, kept: jax.Array, source: np.ndarray, place: np.ndarray) -> None:
        """The same of encoder rows that the device tier keeps: row `source[i]` becomes encoder row `place[i]`."""
        rows, self._encoder_rows = self.encoder_rows(), None
        self._encoder_rows = self.run(Restage(len(place)), rows, kept, source, place)

    @functools.cached_property
    def transfer_bytes(self) -> int:
        """Most bytes of records that are on their way to the device at once, unless one is larger."""
        return self.shapes.kv.slot_bytes * self.ladder.max_rows

    @functools.cached_property
    def is_host(self) -> bool:
        """Whether the device is the host's processor."""
        return bool(next(iter(self.normalization.devices())).platform == "cpu")

    @property
    def reads_in_place(self) -> bool:
        """Whether what `put` gives is the host's own memory."""
        return self.is_host and self.devices.count == 1

    def put(self, planes: abc.Sequence[np.ndarray]) -> list[jax.Array]:
        """What is stored of an image in some layers, on the device: [G, 2, T, K, ...] each. See `reads_in_place`."""
        heads = self.shapes.kv.heads // self.devices.copies
        turned = [plane.reshape(*plane.shape[:3], heads, -1) for plane in planes]
        return jax.device_put(turned, self.devices.sharding(self.devices.by_token(planes[0].shape[2])), may_alias=True)

    def places(
        self, slots: abc.Sequence[np.ndarray], positions: abc.Sequence[np.ndarray], size: int
    ) -> jax.Array | np.ndarray:
        """Slots and M-RoPE triples of the tokens of some images, on the device.

        Args:
          slots: of each image [n]; one beyond the pool is not written.
          positions: of each image [3, n].
          size: a rung that holds n, T.

        Returns:
          int32 [images, 4, T].

        Raises:
          ValueError: a slot is negative, or comes again.
        """
        places = np.zeros((len(slots), 4, size), np.int32)
        places[:, 0] = self.num_slots
        for place, slot, position in zip(places, slots, positions, strict=True):
            place[0, : len(slot)], place[1:, : len(slot)] = slot, position
        check_slots(places[:, 0].reshape(-1), self.num_slots)
        return places if self.is_host else self.devices.put(places)

    def head(self, x: jax.Array, first: int, count: int) -> tuple[jax.Array, int]:
        """Logits, float32 [B, V], of rows of `x` that hold those from `first` to `first + count`, and which row they
        begin with."""
        size = self.fitting.head(len(x), count)
        first = min(first, len(x) - size)
        return self.run(OutputHead(len(x), size), self.text["norm"], self.head_weights, x, np.int32(first)), first

    def last_hidden(self, x: jax.Array, first: int) -> tuple[jax.Array, int]:
        """Hidden states behind the last norm, float32 [B, M], of rows of `x` from `first` on, or before it at the end,
        and which row they begin with; B is at most `ladder.max_sequences`."""
        size = min(self.ladder.max_sequences, len(x))
        first = min(first, len(x) - size)
        return self.run(LastHidden(len(x), size), self.text["norm"], x, np.int32(first)), first

    def head_rows(self, tokens: abc.Sequence[int]) -> np.ndarray:
        """Rows of the output head, float32 [n, M]."""
        return np.asarray(self.run(HeadRows(len(tokens)), self.head_weights, np.array(tokens, np.int32)))

    def open_lane(self, lane: int, marks: np.ndarray, bias: np.ndarray, words: np.ndarray, recent: np.ndarray) -> None:
        """Lets a lane hold what an answer needs besides its tokens; see `vlcache_jax.device.sampler.Lanes`."""
        lanes, self._lanes = self._lanes_now(), None
        self._lanes = self.run(OpenLane(), lanes, np.int32(lane), marks, bias, words, recent)

    def hold(self, given: abc.Mapping[int, tuple[Any, Any]]) -> None:
        """Lets open lanes choose among some tokens; see `vlcache_jax.device.sampler.hold_lanes`.

        Args:
          given: by lane what may come, int32 [ceil(V / 32)], and pairs of a token and what is added to its logit.
        """
        size, vocab_size = self.fitting.held(len(given)), self.config.text.vocab_size
        lane, words = np.full(size, NO_LANE, np.int32), np.zeros((size, -(-vocab_size // 32)), np.int32)
        token, added = np.full((size, MAX_BIASED), vocab_size, np.int32), np.zeros((size, MAX_BIASED), np.float32)
        for row, (number, (allowed, pairs)) in enumerate(given.items()):
            lane[row], words[row] = number, allowed
            if pairs:
                token[row, : len(pairs)], added[row, : len(pairs)] = zip(*pairs, strict=True)
        held, self._lanes = self._lanes_now(), None
        self._lanes = self.run(HoldLanes(size), held, lane, words, token, added)

    def sample(self, logits: jax.Array, choosing: np.ndarray, steps: np.ndarray, first: int = 0) -> SampledTokens:
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
        program = SampleFirst(size, "asked" if self.shapes.is_host else choice_of(choosing))
        lanes, self._lanes = self._lanes_now(), None
        sampled, self._lanes = self.run(program, logits, lanes, rows, step)
        return sampled

    def window(
        self, rows: np.ndarray, tables: abc.Sequence[np.ndarray], end: np.ndarray, tokens: int
    ) -> list[SampledTokens]:
        """Decodes up to `tokens` tokens of each row, at most `ladder.window`.

        Args:
          rows: int32 [n, ANSWER + C], see `vlcache_jax.device.programs.window`.
          tables: pages of each, with room for its tokens.
          end: slots that each sees at its first and at its last token, [2, n].

        Returns:
          Of programs that follow each other [tokens, B] of each, or more, with `NO_ANSWER` where nothing was chosen.
        """
        count = len(rows)
        size = self.fitting.window(rows, tokens)
        config = self.shapes.work_config(size, decode=True)
        work = kernels.make_work(
            np.arange(count), np.zeros(count, np.int32), end[1], tables, config,
            least=end[0], shared=kernels.shared_prefixes(tables),
        )  # fmt: skip
        return self._decode(Window(size), self.pool, rows, tokens, work)

    def compressed_window(
        self, rows: np.ndarray, tables: abc.Sequence[abc.Sequence[np.ndarray]], kept: np.ndarray, end: np.ndarray,
        tokens: int,
    ) -> list[SampledTokens]:  # fmt: skip
        """The same of rows whose prompts are compressed.

        Args:
          rows: as in `window`.
          tables: pages of each in each layer, with room for its tokens.
          kept: tokens that each layer keeps of each prompt, [L, n].
          end: tokens behind the prompt that each sees at its first and at its last one here, [2, n].
        """
        count, longest = len(rows), max(len(pages) for own in tables for pages in own)
        size = self.fitting.window(rows, tokens, longest)
        program = CompressedWindow(size, round_up(longest, self.shapes.page_rungs))
        lists, list_of = compressed_work(kept, end, self.shapes.work_config(size, True, program.pages))
        padded, all_kept = np.zeros((len(kept), size, program.pages), np.int32), np.zeros((len(kept), size), np.int32)
        all_kept[:, :count] = kept
        for row, own in enumerate(tables):
            for layer, pages in enumerate(own):
                padded[layer, row, : len(pages)] = pages
        return self._decode(program, self.compressed, rows, tokens, lists, list_of, padded, all_kept)

    def _decode[P: (Window, CompressedWindow)](
        self, program: P, pool: Pool, rows: np.ndarray, tokens: int, *work: Any
    ) -> list[SampledTokens]:
        is_host, launched = self.shapes.is_host, []
        given = _padded(rows, program.count), *work, np.int32(tokens)
        if not is_host:
            given = self.devices.put(given)  # once, for all
        for one in self.fitting.windows(program, rows, tokens):
            lanes, self._lanes = self._lanes_now(), None
            with pool.taken() as arrays:
                chosen, self._lanes, arrays[:] = self.run(one, self.text, self.head_weights, arrays, lanes, *given)
            launched.append(chosen)
        return launched

    def score(self, logits: jax.Array, target: np.ndarray, *, wants_top: bool = False) -> tuple[jax.Array, ...]:
        """See `sampler.score`; rows of `logits` beyond `target` are padding."""
        target = np.pad(target, (0, len(logits) - len(target))).astype(np.int32)
        return self.run(ScoreTokens(len(logits)), logits, target, np.bool_(wants_top))

    # State.

    def encoder_rows(self) -> jax.Array:
        if self._encoder_rows is None:
            self._encoder_rows = self.run(EmptyEncoderRows())
        return self._encoder_rows

    def _lanes_now(self) -> Lanes:
        if self._lanes is None:
            self._lanes = self.run(EmptyLanes())
        return self._lanes


def _padded(rows: np.ndarray, size: int) -> np.ndarray:
    """A window's rows, and others of no lane."""
    padded = np.zeros((size, rows.shape[1]), np.int32)
    padded[: len(rows)], padded[len(rows) :, ANSWER] = rows, NO_LANE
    return padded


def check_kernels(config: ModelConfig, dtype: Any, implementation: str) -> None:
    """Raises NotImplementedError if the implementation does not do the kernels' cases of the model."""
    text, vision = config.text, config.vision
    index = jax.ShapeDtypeStruct((8,), jnp.int32)
    x = jax.ShapeDtypeStruct((8, vision.num_heads, vision.head_dim), dtype)
    jax.eval_shape(functools.partial(kernels.attention, implementation=implementation), x, x, x, index, index)
    q, kv = jax.ShapeDtypeStruct((8, text.num_heads, text.head_dim), dtype), KVShape.of(config, dtype)
    kernels.work_config(8, 1, 1, q, kv.heads, decode=False, implementation=implementation)
    angle = jax.ShapeDtypeStruct((8, 1, text.head_dim // 2), dtype)
    k, planes = kv.half(8), kv.stored(1, 2, 8)
    jax.eval_shape(functools.partial(kernels.link, implementation=implementation), k, k, [planes], index, angle, angle)
    x = jax.ShapeDtypeStruct((8, text.hidden_size), dtype)
    norm = functools.partial(kernels.norm_residual, eps=text.rms_norm_eps, implementation=implementation)
    jax.eval_shape(norm, x, x, jax.ShapeDtypeStruct(x.shape[1:], dtype))
    product = jax.ShapeDtypeStruct((8, kv.heads, text.num_heads // kv.heads + 2, text.head_dim), dtype)
    rotate_write = functools.partial(kernels.rotate_write, implementation=implementation)
    jax.eval_shape(rotate_write, [product], angle, angle, index, k, k)
    if (experts := text.experts) is not None:
        of_experts = ExpertsShape(8, experts.chosen, experts.count, text.hidden_size, experts.intermediate_size)
        if text.quantization is None:
            mix = functools.partial(kernels.mix_experts, implementation=implementation)
            jax.eval_shape(mix, *of_experts.specs(dtype))
    if text.quantization is not None:
        for layer in {text.first_like(i) for i in range(text.num_layers)}:
            graph, state = nnx.split(abstract_model(config, dtype).language_model.layers[layer])
            heads = jax.ShapeDtypeStruct((8, text.num_heads * text.head_dim), dtype)
            products = functools.partial(_products, graph, implementation)
            jax.eval_shape(products, nnx.to_pure_dict(state), jax.ShapeDtypeStruct((8, text.hidden_size), dtype), heads)


def _products(
    graph: Any, implementation: str, params: Params, x: jax.Array, heads: jax.Array
) -> tuple[list[jax.Array], jax.Array]:
    """All of a layer that has weights in 8 bits."""
    layer = bind(graph, params)
    made = times(layer.self_attn.o_proj, heads, implementation)
    queries = layer.self_attn.products(x, keep=len(x), implementation=implementation)
    return queries, layer.transform(x, made, jnp.ones(len(x), bool), implementation=implementation)
