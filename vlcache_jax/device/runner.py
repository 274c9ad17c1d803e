"""The runner of the device: weights, KV pools, decode slots, and calls of programs.

Arrays that programs update in place are donated to them. An interrupted call can leave donated arrays behind. `reset`
drops all mutable arrays, and the next call creates them again. `Clock` measures device time with a thread that waits
for results.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import abc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vlcache_jax import pallas_kernels as kernels
from vlcache_jax.device.buckets import BucketSizes, cover, round_up
from vlcache_jax.device.kv_shape import KVShape
from vlcache_jax.device.mesh import ONE, Devices
from vlcache_jax.device.programs.answer import HeadRows, LastHidden, OutputHead, SampleFirst, ScoreTokens
from vlcache_jax.device.programs.base import Halves, Params, Program, Shapes
from vlcache_jax.device.programs.compress import EmptyCompressed
from vlcache_jax.device.programs.encode import Encode, EncodeApart, Stage, encoder_tables, rows_apart, smallest_grid
from vlcache_jax.device.programs.memory import (
    CopyPages,
    EmptyDecodeState,
    EmptyEncoderRows,
    EmptyPool,
    HoldDecodeSlots,
    OpenDecodeSlot,
    Restage,
)
from vlcache_jax.device.programs.states import EmptyStates, LoadMaps, LoadStates, StoreMaps, StoreStates
from vlcache_jax.device.programs.table import Fitting, Programs
from vlcache_jax.device.programs.window import ANSWER, CompressedWindow, Window, compressed_work
from vlcache_jax.device.sampler import COLUMNS, NO_DECODE_SLOT, DecodeState, SampledTokens, choice_of
from vlcache_jax.models import ModelConfig, abstract_model, bind
from vlcache_jax.models.vision import Grid
from vlcache_jax.pallas_kernels import PAGE
from vlcache_jax.pallas_kernels.link import check_slots
from vlcache_jax.pallas_kernels.shapes import ExpertsShape
from vlcache_jax.sampling import MAX_BIASED


class Clock:
    """A timer of launched programs, in launch order."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "vlcache-clock")
        self._lock = threading.Lock()
        self._last = 0.0

    def mark(self, arrays: Sequence[jax.Array]) -> Future[float]:
        """Return a future of the seconds that these arrays took on the device.

        The time starts at this call, or when all arrays marked before are ready if that is later.

        Args:
          arrays: results of the launch that no later program takes as donated arguments.
        """
        launched = time.perf_counter()

        def wait() -> float:
            try:
                jax.block_until_ready(arrays)
            except Exception:  # the reader of the arrays raises this error
                return 0.0
            begin, self._last = max(launched, self._last), time.perf_counter()
            return self._last - begin

        return self._thread.submit(wait)

    def close(self) -> None:
        self._thread.shutdown()


class Pool:
    """A KV pool, whose arrays are donated to programs and returned updated in place.

    Args:
      programs: programs of the device.
      empty: program that creates K or V.
      states: by layer, the program that creates its states, or None if it has K and V. A single None: one pair of K
        and V for all layers.

    Attributes:
      arrays: K and V of each layer, or of all layers, [S, K, D], or the states of a layer. None: they do not exist
        yet, or a program that took them was interrupted.
    """

    def __init__(
        self, programs: Programs, empty: Program[jax.Array], states: Sequence[Program[list[jax.Array]] | None]
    ):
        self._programs, self._empty, self._states = programs, empty, states
        self.arrays: Halves | None = None

    def make(self) -> Halves:
        """Return the arrays, and create them if they do not exist."""
        if self.arrays is None:
            run = self._programs.run
            self.arrays = [run(states) if states else [run(self._empty), run(self._empty)] for states in self._states]
        return self.arrays

    def taken(self) -> _Taken:
        """Return a context manager that yields the arrays for programs that take and return them.

        At the end of the `with` block, the list's arrays become the pool. If the block raises, the pool is lost.
        """
        return _Taken(self)

    def paged(self) -> Halves:
        """Return K and V of each layer that has them."""
        return [arrays for arrays, states in zip(self.make(), self._states, strict=True) if states is None]

    @contextlib.contextmanager
    def taken_states(self) -> Iterator[Halves]:
        """Yield the states of the layers that have some, in their order, as `taken` does."""
        stated = [i for i, states in enumerate(self._states) if states is not None]
        if not stated:
            yield []
            return
        with self.taken_layers(stated) as own:
            yield own

    @contextlib.contextmanager
    def taken_layers(self, layers: Sequence[int]) -> Iterator[Halves]:
        """Yield what some layers keep, as `taken` does."""
        with self.taken() as arrays:
            own = [arrays[i] for i in layers]
            yield own
            for i, kept in zip(layers, own, strict=True):
                arrays[i] = kept

    def load_states(self, parts: slice, stored: jax.Array, slot: int) -> None:
        """Load states after an image, float32 [parts, n], from some parts of a cache entry into a slot."""
        shapes = self._programs.shapes
        layers = [layer for own in shapes.state_parts(parts) for layer in own]
        with self.taken_layers(layers) as states:
            states[:] = self._programs.run(LoadStates.for_parts(shapes, parts), states, stored, np.int32(slot))

    def stored_states(self, slot: int) -> jax.Array:
        """Return the states of a slot as a cache entry holds them, float32 [L, n]."""
        with self.taken_states() as states:
            return self._programs.run(StoreStates(), states, np.int32(slot))

    def load_map(self, parts: slice, floats: jax.Array, maps: jax.Array, added: int, passed: int) -> None:
        """Load the map of an image, from some parts of a cache entry, into the slots of B and A, see `LoadMaps`."""
        shapes = self._programs.shapes
        layers = [layer for own in shapes.state_parts(parts) for layer in own]
        with self.taken_layers(layers) as states:
            program = LoadMaps.for_parts(shapes, parts)
            states[:] = self._programs.run(program, states, floats, maps, np.int32(added), np.int32(passed))

    def stored_map(self, added: int, passed: int) -> tuple[jax.Array, jax.Array]:
        """Return the map of an image as a cache entry holds it, see `StoreMaps`."""
        with self.taken_states() as states:
            return self._programs.run(StoreMaps(), states, np.int32(added), np.int32(passed))

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages.

        Args:
          pairs: (source, target) of each copy; a target occurs in no other pair.
        """
        rest, shapes = list(pairs), self._programs.shapes
        for size in cover(len(pairs), shapes.buckets.sequences):
            some, rest = rest[:size], rest[size:]
            source, target = np.zeros(size, np.int32), np.full(size, shapes.num_slots // PAGE, np.int32)
            source[: len(some)], target[: len(some)] = zip(*some, strict=True)
            paged = [i for i, states in enumerate(self._states) if states is None]
            with self.taken_layers(paged) as halves:
                halves[:] = self._programs.run(CopyPages(size), halves, source, target)


class _Taken:
    """A context manager that takes the arrays of a pool, and returns them unless the block raises."""

    def __init__(self, pool: Pool):
        self._pool = pool

    def __enter__(self) -> Halves:
        self._arrays = self._pool.make()
        self._pool.arrays = None
        return self._arrays

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self._pool.arrays = self._arrays


@contextlib.contextmanager
def _taken_compressed(compressed: Pool, pool: Pool) -> Iterator[Halves]:
    """Yield K and V of compressed prompts, and the states of the layers that have some, as `Pool.taken` does."""
    with compressed.taken() as halves, pool.taken_states() as states:
        arrays = [*halves, *states]
        yield arrays
        halves[:], states[:] = arrays[:1], arrays[1:]


Taken = Callable[[], contextlib.AbstractContextManager[Halves]]


class Runner:
    """The runner of a model on its devices.

    Args:
      params: nested dict of device arrays, all of one dtype.
      normalization: each byte's pixel value per channel, float32 [3, 256].
      num_slots: KV slots S of the pool, a multiple of the page size. No request uses the first page.
      max_pages: largest number of pages of a request.
      implementation: implementation of the kernels. None: the best one for each case.
      codec, maps: codec of stored KV, and what its maps stand for, see `KVShape`.
      kept_tokens: capacity of the device tier in tokens.
      compressed_slots: KV slots of the compressed KV pool, as for `num_slots`. 0: there is no such pool.
      num_snapshots: maximum number of snapshots of states, if the model has some.
      devices: devices of the weights and of all other arrays.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        normalization: np.ndarray,
        *,
        num_slots: int,
        max_pages: int,
        buckets: BucketSizes,
        implementation: str | None = None,
        codec: kernels.Codec | None = None,
        maps: str = "",
        kept_tokens: int = 0,
        compressed_slots: int = 0,
        num_snapshots: int = 0,
        devices: Devices = ONE,
    ):
        self.config, self.devices, self.buckets = config, devices, buckets
        self.num_slots, self.implementation = num_slots, implementation
        self.dtype = params["language_model"]["norm"]["scale"].dtype
        self._visual, self.text = params["visual"], params["language_model"]
        self.head_weights = params.get("lm_head", self.text["embed_tokens"])
        self.normalization = devices.put(normalization)
        self.shapes = Shapes(
            config, params, self.normalization,
            num_slots=num_slots, max_pages=max_pages, buckets=buckets, implementation=implementation, codec=codec,
            maps=maps, kept_tokens=kept_tokens, compressed_slots=compressed_slots, num_snapshots=num_snapshots,
            is_host=self.is_host, devices=devices,
        )  # fmt: skip
        self.constants = self.shapes.constants(self.text)
        self.programs = Programs(self.shapes)
        self.fitting = Fitting(self.programs)
        self.token_buckets = self.shapes.token_buckets
        self.run = self.programs.run
        self.reset()

    def reset(self) -> None:
        """Drop all mutable arrays, for example after an interrupted call."""
        kinds = zip(self.shapes.like, map(self.config.text.kind_of, range(self.config.text.num_layers)), strict=True)
        self.pool = Pool(self.programs, EmptyPool(), [EmptyStates(i) if kind.states else None for i, kind in kinds])
        self.compressed = Pool(self.programs, EmptyCompressed(), [None] * bool(self.shapes.compressed_slots))
        self._encoder_rows: jax.Array | None = None
        self._decode_slots: DecodeState | None = None

    def prepare(self) -> None:
        """Create all mutable arrays and wait for them, so that the first request does not."""
        jax.block_until_ready((self.pool.make(), self.compressed.make(), self.encoder_rows(), self._decode_slots_now()))

    # These methods return before the device has computed their results. Callers wait when they read a value.

    def encode(self, patches: abc.Sequence[np.ndarray], grids: abc.Sequence[Grid]) -> jax.Array:
        """Encode images together, padded and in their order.

        Args:
          patches: patches of each image, uint8 [P_i, 3, patch**2], or [P_i, 3, F, patch**2] with the frames of a video
            chunk.

        Returns:
          Encoder outputs and DeepStack features, [1 + J, P / merge**2, M].
        """
        counts, sizes = list(map(len, patches)), self.buckets.patches
        size, shares = self.fitting.encoder(sum(counts)), self.devices.share_out(counts)
        each = round_up(max(sum(counts[i] for i in share) for share in shares), sizes)
        if each not in self.devices.shares(size, sizes):
            return self.run(Encode(size), self._visual, *self._packed(patches, grids, size), self.normalization)
        packed = [self._packed([patches[i] for i in share], [grids[i] for i in share], each) for share in shares]
        images = jax.tree.map(lambda *parts: np.stack(parts), *packed)
        merged = self.config.vision.merge_size**2
        order = np.zeros(size // merged, np.int32)
        rows = rows_apart(shares, [own // merged for own in counts], each // merged)
        order[: len(rows)] = rows
        return self.run(EncodeApart(size, each), self._visual, *images, self.normalization, order)

    def _packed(
        self, patches: abc.Sequence[np.ndarray], grids: abc.Sequence[Grid], size: int
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return pixels and tables of consecutive images, padded to `size` patches. Without images, all is padding."""
        vision = self.config.vision
        pixels = np.zeros((size, vision.in_channels, vision.temporal_patch_size, vision.patch_size**2), np.uint8)
        first = 0
        for own in patches:  # a still image fills every temporal slot
            pixels[first : first + len(own)] = own.reshape(len(own), vision.in_channels, -1, vision.patch_size**2)
            first += len(own)
        return pixels, encoder_tables(self.config, grids or [smallest_grid(self.config)], size)

    def stage(self, encoded: jax.Array | np.ndarray, place: np.ndarray) -> None:
        """Copy row i of encoder outputs [1 + J, n, M] to encoder row `place[i]` of the next chunk.

        `place` is int32 [n]. Places out of range are dropped.
        """
        rows, self._encoder_rows = self.encoder_rows(), None
        self._encoder_rows = self.run(Stage(len(place)), rows, encoded, place)

    def restage(self, kept: jax.Array, source: np.ndarray, place: np.ndarray) -> None:
        """Copy row `source[i]` of the device tier's encoder rows to encoder row `place[i]` of the next chunk."""
        rows, self._encoder_rows = self.encoder_rows(), None
        self._encoder_rows = self.run(Restage(len(place)), rows, kept, source, place)

    @functools.cached_property
    def transfer_bytes(self) -> int:
        """Limit, in bytes, of cache entries in transfer to the device. A single larger entry may exceed it."""
        return self.shapes.kv.slot_bytes * self.buckets.max_rows

    @functools.cached_property
    def is_host(self) -> bool:
        """True if the device is the host's CPU."""
        return bool(next(iter(self.normalization.devices())).platform == "cpu")

    @property
    def reads_in_place(self) -> bool:
        """True if arrays from `put` share the host's memory."""
        return self.is_host and self.devices.count == 1

    def put(self, buffers: abc.Sequence[np.ndarray]) -> list[jax.Array]:
        """Put stored KV of an image in some layers on the device: [G, 2, T, K, ...] each. See `reads_in_place`."""
        heads = self.shapes.kv.heads // self.devices.copies
        turned = [buffer.reshape(*buffer.shape[:3], heads, -1) for buffer in buffers]
        return jax.device_put(turned, self.devices.sharding(self.devices.by_token(buffers[0].shape[2])), may_alias=True)

    def places(
        self, slots: abc.Sequence[np.ndarray], positions: abc.Sequence[np.ndarray], size: int
    ) -> jax.Array | np.ndarray:
        """Return KV slots and M-RoPE triples of images' tokens, on the device.

        Args:
          slots: KV slots of each image, [n]. Slots beyond the pool are not written.
          positions: M-RoPE triples of each image, [3, n].
          size: T, a bucket that holds n.

        Returns:
          int32 [images, 4, T].

        Raises:
          ValueError: a slot is negative or occurs twice.
        """
        places = np.zeros((len(slots), 4, size), np.int32)
        places[:, 0] = self.num_slots
        for place, slot, position in zip(places, slots, positions, strict=True):
            place[0, : len(slot)], place[1:, : len(slot)] = slot, position
        check_slots(places[:, 0].reshape(-1), self.num_slots)
        return places if self.is_host else self.devices.put(places)

    def head(self, x: jax.Array, first: int, count: int) -> tuple[jax.Array, int]:
        """Compute logits of rows of `x` that include those from `first` to `first + count`.

        Returns:
          Logits, float32 [B, V], and the first row of `x` that they belong to.
        """
        size = self.fitting.head(len(x), count)
        first = min(first, len(x) - size)
        return self.run(OutputHead(len(x), size), self.text["norm"], self.head_weights, x, np.int32(first)), first

    def last_hidden(self, x: jax.Array, first: int) -> tuple[jax.Array, int]:
        """Compute hidden states after the last norm, of rows of `x` from `first` on.

        Returns:
          Hidden states, float32 [B, M] with B <= `buckets.max_sequences`, and the row of `x` that they begin with. Near
          the end of `x` this row is before `first`.
        """
        size = min(self.buckets.max_sequences, len(x))
        first = min(first, len(x) - size)
        return self.run(LastHidden(len(x), size), self.text["norm"], x, np.int32(first)), first

    def head_rows(self, tokens: abc.Sequence[int]) -> np.ndarray:
        """Return the output head's rows of these tokens, float32 [n, M]."""
        return np.asarray(self.run(HeadRows(len(tokens)), self.head_weights, np.array(tokens, np.int32)))

    def open_decode_slot(
        self, decode_slot: int, marks: np.ndarray, bias: np.ndarray, words: np.ndarray, recent: np.ndarray
    ) -> None:
        """Assign a decode slot to a sequence. See `vlcache_jax.device.sampler.DecodeState` for the arguments."""
        decode_slots, self._decode_slots = self._decode_slots_now(), None
        self._decode_slots = self.run(OpenDecodeSlot(), decode_slots, np.int32(decode_slot), marks, bias, words, recent)

    def hold(self, given: abc.Mapping[int, tuple[Any, Any]]) -> None:
        """Restrict the next tokens of open decode slots; see `vlcache_jax.device.sampler.hold_decode_slots`.

        Args:
          given: by decode slot, the bit mask of allowed tokens, int32 [ceil(V / 32)], and pairs (token, logit bias).
        """
        size, vocab_size = self.fitting.held(len(given)), self.config.text.vocab_size
        decode_slot, words = np.full(size, NO_DECODE_SLOT, np.int32), np.zeros((size, -(-vocab_size // 32)), np.int32)
        token, added = np.full((size, MAX_BIASED), vocab_size, np.int32), np.zeros((size, MAX_BIASED), np.float32)
        for row, (number, (allowed, pairs)) in enumerate(given.items()):
            decode_slot[row], words[row] = number, allowed
            if pairs:
                token[row, : len(pairs)], added[row, : len(pairs)] = zip(*pairs, strict=True)
        held, self._decode_slots = self._decode_slots_now(), None
        self._decode_slots = self.run(HoldDecodeSlots(size), held, decode_slot, words, token, added)

    def sample(self, logits: jax.Array, choosing: np.ndarray, steps: np.ndarray, first: int = 0) -> SampledTokens:
        """Sample the first token of decode slots after their prefill.

        Args:
          logits: float32 [B, V]. Rows before `first`, and after the n rows of `choosing`, are padding.
          choosing: int32 [n, C], see `Choosing`.
          steps: [n], number of tokens that the sequences have generated so far.
        """
        size, own = len(logits), slice(first, first + len(steps))
        rows, step = np.zeros((size, COLUMNS), np.int32), np.zeros(size, np.int32)
        rows[:, 0] = NO_DECODE_SLOT
        rows[own], step[own] = choosing, steps
        program = SampleFirst(size, "dynamic" if self.shapes.is_host else choice_of(choosing))
        decode_slots, self._decode_slots = self._decode_slots_now(), None
        sampled, self._decode_slots = self.run(program, logits, decode_slots, rows, step)
        return sampled

    def window(
        self, rows: np.ndarray, tables: abc.Sequence[np.ndarray], end: np.ndarray, tokens: int
    ) -> list[SampledTokens]:
        """Decode up to `tokens` tokens of each row, at most `buckets.window`.

        Args:
          rows: int32 [n, ANSWER + C], see `vlcache_jax.device.programs.window`.
          tables: pages of each row, with room for its tokens.
          end: KV slots that each row sees at its first and at its last token, [2, n].

        Returns:
          Results of consecutive programs, [tokens, B] each or more, with `NO_ANSWER` where no token was chosen.
        """
        count = len(rows)
        size = self.fitting.window(rows, tokens)
        config = self.shapes.work_config(size, decode=True)
        work = kernels.make_work(
            np.arange(count), np.zeros(count, np.int32), end[1], tables, config,
            least=end[0], shared=kernels.shared_prefixes(tables),
        )  # fmt: skip
        return self._decode(Window(size), self.pool.taken, rows, tokens, work)

    def compressed_window(
        self, rows: np.ndarray, tables: abc.Sequence[abc.Sequence[np.ndarray]], kept: np.ndarray, end: np.ndarray,
        tokens: int,
    ) -> list[SampledTokens]:  # fmt: skip
        """Decode up to `tokens` tokens of each row of compressed requests; see `window` for the rows and results.

        Args:
          tables: pages of each row in each layer, with room for its tokens.
          kept: tokens that each layer keeps of each prompt, [L, n].
          end: tokens after the prompt that each row sees at its first and at its last token, [2, n].
        """
        count, longest = len(rows), max(len(pages) for own in tables for pages in own)
        size = self.fitting.window(rows, tokens, longest)
        program = CompressedWindow(size, round_up(longest, self.shapes.page_buckets))
        lists, list_of = compressed_work(kept, end, self.shapes.work_config(size, True, program.pages))
        padded, all_kept = np.zeros((len(kept), size, program.pages), np.int32), np.zeros((len(kept), size), np.int32)
        all_kept[:, :count] = kept
        for row, own in enumerate(tables):
            for layer, pages in enumerate(own):
                padded[layer, row, : len(pages)] = pages
        taken = functools.partial(_taken_compressed, self.compressed, self.pool)
        return self._decode(program, taken, rows, tokens, lists, list_of, padded, all_kept)

    def _decode[P: (Window, CompressedWindow)](
        self, program: P, taken: Taken, rows: np.ndarray, tokens: int, *work: Any
    ) -> list[SampledTokens]:
        is_host, launched = self.shapes.is_host, []
        given = _padded(rows, program.count), *work, np.int32(tokens)
        if not is_host:
            given = self.devices.put(given)  # once for all programs
        for one in self.fitting.windows(program, rows, tokens):
            decode_slots, self._decode_slots = self._decode_slots_now(), None
            with taken() as arrays:
                chosen, self._decode_slots, arrays[:] = self.run(
                    one, self.text, self.head_weights, arrays, decode_slots, *given
                )
            launched.append(chosen)
        return launched

    def score(self, logits: jax.Array, target: np.ndarray, *, wants_top: bool = False) -> tuple[jax.Array, ...]:
        """Score target tokens; see `sampler.score`. Rows of `logits` beyond `target` are padding."""
        target = np.pad(target, (0, len(logits) - len(target))).astype(np.int32)
        return self.run(ScoreTokens(len(logits)), logits, target, np.bool_(wants_top))

    # State.

    def encoder_rows(self) -> jax.Array:
        if self._encoder_rows is None:
            self._encoder_rows = self.run(EmptyEncoderRows())
        return self._encoder_rows

    def _decode_slots_now(self) -> DecodeState:
        if self._decode_slots is None:
            self._decode_slots = self.run(EmptyDecodeState())
        return self._decode_slots


def _padded(rows: np.ndarray, size: int) -> np.ndarray:
    """Return decode rows, padded to `size` with rows that have no decode slot."""
    padded = np.zeros((size, rows.shape[1]), np.int32)
    padded[: len(rows)], padded[len(rows) :, ANSWER] = rows, NO_DECODE_SLOT
    return padded


def check_kernels(config: ModelConfig, dtype: Any, implementation: str) -> None:
    """Check that the implementation supports the kernels' cases of the model.

    Raises:
      NotImplementedError: a case is not supported.
    """
    text, vision = config.text, config.vision
    index = jax.ShapeDtypeStruct((8,), jnp.int32)
    x = jax.ShapeDtypeStruct((8, vision.num_heads, vision.head_dim), dtype)
    jax.eval_shape(functools.partial(kernels.attention, implementation=implementation), x, x, x, index, index)
    q, kv = jax.ShapeDtypeStruct((8, text.num_heads, text.head_dim), dtype), KVShape.of(config, dtype)
    kernels.work_config(8, 1, 1, q, kv.heads, decode=False, implementation=implementation)
    angle = jax.ShapeDtypeStruct((8, 1, text.head_dim // 2), dtype)
    k, buffers = kv.half(8), kv.stored(1, 2, 8)
    jax.eval_shape(functools.partial(kernels.link, implementation=implementation), k, k, [buffers], index, angle, angle)
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
            products = functools.partial(_products, graph, implementation)
            jax.eval_shape(products, nnx.to_pure_dict(state), jax.ShapeDtypeStruct((8, text.hidden_size), dtype))


def _products(graph: Any, implementation: str, params: Params, x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """Compute all products of a layer that can have FP8 weights."""
    layer = bind(graph, params)
    taken, made = getattr(layer, layer.mixer_name).all_products(x, implementation)
    return taken, layer.transform(x, made, jnp.ones(len(x), bool), implementation=implementation)
