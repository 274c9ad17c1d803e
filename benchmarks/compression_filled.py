"""Outputs after prompts that were never computed: the KV of the pool is drawn at random, and the kept part is copied.

So decoding after many long prompts can be timed without their prefills. All else is the engine's own: its programs, its
KV blocks, its work lists.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from vlcache_jax.compress.scores import USUAL, Received
from vlcache_jax.device.buckets import round_up
from vlcache_jax.device.programs.compress import Compact, EmptySums
from vlcache_jax.device.programs.window import ANSWER, alike_layers
from vlcache_jax.device.runner import Runner
from vlcache_jax.device.sampler import Choosing, SampledTokens
from vlcache_jax.engine.compressed_pages import CompressedBlockTable
from vlcache_jax.engine.decode_slots import marks_row, recent_tokens, words_array
from vlcache_jax.models import Rows, bind
from vlcache_jax.pallas_kernels import PAGE
from vlcache_jax.sampling import SamplingParams

if TYPE_CHECKING:
    from vlcache_jax import LLM

_SHARP = 2.0  # standard deviation of drawn keys: some tokens get far more attention than others
# Maximum difference of log-probabilities, as a fraction of the largest logit.
_CLOSE = {"float32": 1e-4, "bfloat16": 5e-2}


@dataclass(frozen=True)
class KeptBlockTables:
    """KV that outputs decode with.

    Attributes:
      counts: Tokens that each layer keeps of a prompt, `[L]`.
      block_tables: Block table of each output.
      tokens: For each layer the tokens that the last output's KV heads keep, `[K, count]`.
    """

    counts: tuple[int, ...]
    block_tables: list[CompressedBlockTable]
    tokens: list[npt.NDArray[np.int32]]

    @property
    def lists(self) -> int:
        """Work lists of a multi-step decode."""
        return len(alike_layers(np.stack([block_table.kept for block_table in self.block_tables], 1)))


@dataclass(frozen=True)
class FilledRun:
    """One run of the outputs, from their first tokens on.

    Attributes:
      seconds: Seconds until the last token arrived.
      host: Seconds of the host in them, over all multi-step decodes.
      tokens: `[steps, answers]`.
    """

    seconds: float
    host: float
    tokens: npt.NDArray[np.int32]


def fill(runner: Runner) -> None:
    """Fill the pool with random KV; no two layers hold the same."""
    half = runner.shapes.pool
    k, v = (jax.random.normal(jax.random.key(seed), half.shape, half.dtype) for seed in range(2))
    with runner.pool.taken() as arrays:
        for layer in range(len(arrays)):
            arrays[layer] = [x * np.asarray(scale * (1 + 0.1 * layer), x.dtype) for x, scale in ((k, _SHARP), (v, 1))]


class FilledAnswers:
    """Outputs after prompts in a filled pool. The engine must not serve other requests during or after this.

    Args:
      llm: Engine whose pool is filled.
      length: Tokens of each prompt.
      count: Number of outputs.
      steps: Tokens of each output after its first one.
    """

    def __init__(self, llm: LLM, length: int, count: int, steps: int):
        self._runner: Runner = llm.service.device.runner
        self._pages = llm.service.engine.scheduler.compressed
        self._length, self._count, self._steps = length, count, steps
        pages = -(-(length + steps) // PAGE)
        self._tables = 1 + np.arange(count * pages, dtype=np.int32).reshape(count, pages)

    @property
    def pages(self) -> int:
        """KV blocks in use without compression."""
        return self._tables.size

    def compress(self, counts: tuple[int, ...]) -> KeptBlockTables:
        """Give each output `counts[l]` randomly drawn tokens of each layer.

        Raises:
          ValueError: There are not enough KV blocks.
        """
        runner, kept = self._runner, KeptBlockTables(counts, [], [])
        bucket = round_up(self._tables.shape[1], runner.shapes.page_buckets)
        program, [sums, _] = Compact(bucket), runner.run(EmptySums(bucket))
        for i, table in enumerate(self._tables):
            block_table = self._pages.take(counts, self._steps)
            if block_table is None:
                raise ValueError(
                    f"compressed_kv_bytes must hold the KV of {self._count} outputs, got room for {i}; increase it"
                )
            kept.block_tables.append(block_table)
            received = jax.random.uniform(jax.random.key(i), sums.shape)
            for layer, count in enumerate(counts):
                numbers = np.array(
                    [layer, self._length, count, max(1, count // 10), USUAL[Received("kv_head")]], np.int32
                )
                target = block_table.tables[layer][:bucket]
                with runner.compressed.taken() as arrays:
                    arrays[:], tokens = runner.run(
                        program, arrays, runner.pool.make()[layer], received, numbers, np.uint32(0),
                        _padded(table, bucket), _padded(target, bucket),
                    )  # fmt: skip
                if i == self._count - 1:
                    kept.tokens.append(np.asarray(tokens)[:, :count])
        return kept

    def give_back(self, kept: KeptBlockTables) -> None:
        """Release the KV blocks."""
        for block_table in kept.block_tables:
            self._pages.end(block_table)

    def run(self, kept: KeptBlockTables | None) -> FilledRun:
        """Decode, with the full prompts if `kept` is None.

        Raises:
          ValueError: An output has no token at a step.
        """
        self._begin()
        launched: list[SampledTokens] = []
        host, window = 0.0, self._runner.buckets.window
        start = time.perf_counter()
        for done in range(0, self._steps, window):
            begin = time.thread_time()
            launched += self._window(kept, done, min(window, self._steps - done))
            host += time.thread_time() - begin
        found = np.concatenate([np.asarray(sampled.token) for sampled in launched])[: self._steps, : self._count]
        seconds = time.perf_counter() - start
        if (found < 0).any():
            raise ValueError(f"outputs must have a token at each of {self._steps} steps, got {found.tolist()}")
        return FilledRun(seconds, host, found)

    def check(self, kept: KeptBlockTables | None) -> None:
        """Check the last output's first step against dense attention over its prompt.

        Each KV head sees the tokens that it keeps.

        Raises:
          ValueError: Log-probabilities differ.
        """
        first = self._begin()
        [window] = self._window(kept, 0, 1, with_logprobs=True)
        sampled = jax.tree.map(lambda x: np.asarray(x)[0, self._count - 1], window)
        logits = self._dense(int(first[-1]), kept)
        wanted = np.asarray(jax.nn.log_softmax(logits))[sampled.top_token]
        most = _CLOSE[str(self._runner.dtype)] * np.abs(logits).max()
        differ = np.abs(wanted - sampled.top_logprob).max()
        if sampled.token != sampled.top_token[0] or not differ < most:
            raise ValueError(
                f"log-probabilities of {self._count} answers after {self._length} tokens must be within {most:.2g} of "
                f"dense attention's, got {differ:.2g}"
            )

    # Helpers.

    def _begin(self) -> npt.NDArray[np.int32]:
        """Give each output a decode slot and its first token; return these tokens."""
        runner, V = self._runner, self._runner.config.text.vocab_size
        marks, bias = marks_row((), (), (), V), np.zeros(V, np.float32)
        for decode_slot in range(self._count):
            runner.open_decode_slot(decode_slot, marks, bias, words_array((), V), recent_tokens(()))
        logits = jax.random.normal(jax.random.key(0), (round_up(self._count, runner.buckets.sequences), V))
        sampled = runner.sample(logits, self._rows()[:, ANSWER:], np.zeros(self._count, np.int32))
        return np.asarray(sampled.token)[: self._count]

    def _rows(self, *, with_logprobs: bool = False) -> npt.NDArray[np.int32]:
        """Return the rows of a multi-step decode, see `vlcache_jax.device.programs.window`: the most likely tokens."""
        params = SamplingParams(temperature=0, logprobs=20 if with_logprobs else None).resolve({})
        return np.stack(
            [
                np.append(
                    [self._length, 0, 0],
                    Choosing.row(params, decode_slot=decode_slot, seed=0, max_tokens=self._steps + 2),
                )
                for decode_slot in range(self._count)
            ]
        ).astype(np.int32)

    def _window(
        self, kept: KeptBlockTables | None, done: int, tokens: int, *, with_logprobs: bool = False
    ) -> list[SampledTokens]:
        """Launch the next multi-step decode, after `done` steps."""
        rows = self._rows(with_logprobs=with_logprobs)
        end = np.full((2, self._count), done + 1, np.int32) + np.array([[0], [tokens - 1]], np.int32)
        if kept is None:
            return self._runner.window(rows, list(self._tables), end + self._length, tokens)
        counts = np.stack([block_table.kept for block_table in kept.block_tables], 1)
        return self._runner.compressed_window(
            rows, [block_table.tables for block_table in kept.block_tables], counts, end, tokens
        )

    def _dense(self, token: int, kept: KeptBlockTables | None) -> npt.NDArray[np.float32]:
        """Return the logits after the last output's first token, `[V]`."""
        runner, heads = self._runner, self._runner.config.text.num_kv_heads
        x = bind(runner.shapes.table_graph, runner.text["embed_tokens"])(jnp.array([token]))
        for i, (k, v) in enumerate(runner.pool.make()):
            seen = np.ones((heads, self._length + 1), bool)
            if kept is not None:
                seen[:, : self._length] = False
                np.put_along_axis(seen, kept.tokens[i], True, axis=1)
            x = self._dense_layer(runner.text["layers"][i], x, k, v, seen)
        return np.asarray(runner.shapes.logits(runner.text["norm"], runner.head_weights, x))[0]

    @functools.cached_property
    def _dense_layer(self) -> Callable[..., jax.Array]:
        """Function of one layer for the row after the last prompt.

        Each KV head sees some of the prompt's tokens and the row itself, `[K, n + 1]`.
        """
        length, table, config = self._length, self._tables[-1], self._runner.config.text
        rows = Rows(None, jnp.full((3, 1), length), None, None, None)

        def appended(pool: jax.Array, new: jax.Array) -> jax.Array:
            pages = pool.reshape(-1, PAGE, *pool.shape[1:])[table]
            return jnp.concatenate([pages.reshape(-1, *pool.shape[1:])[:length], new]).astype(jnp.float32)

        def layer(params: Any, x: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> jax.Array:
            own = self._runner.shapes.bind_layer(params)
            y = own.input_layernorm(x)
            q, new_k, _, new_v = own.self_attn.project(y, rows, keep=1)
            q = q.reshape(config.num_kv_heads, -1, config.head_dim).astype(jnp.float32)
            score = jnp.einsum("kgd,skd->kgs", q, appended(k, new_k), precision="highest") * config.head_dim**-0.5
            weight = jax.nn.softmax(jnp.where(seen[:, None], score, -jnp.inf), -1)
            out = jnp.einsum("kgs,skd->kgd", weight, appended(v, new_v), precision="highest")
            out = out.reshape(1, -1, config.head_dim).astype(x.dtype)
            return own.transform(x, own.self_attn.back(y, out), jnp.ones(1, bool))

        return jax.jit(layer)


def _padded(pages: npt.NDArray[np.int32], size: int) -> npt.NDArray[np.int32]:
    """Return KV blocks, padded for a program."""
    padded = np.zeros(size, np.int32)
    padded[: len(pages)] = pages
    return padded
