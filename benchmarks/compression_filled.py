"""Answers whose prompts nobody has asked: K and V of the pool are drawn, and what is kept of them is copied.

So decoding behind many long prompts can be timed without their prefills. All else is the engine's own: its programs,
its pages, its work lists.
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
from vlcache_jax.device.programs.window import ANSWER
from vlcache_jax.device.runner import Runner, alike_layers
from vlcache_jax.device.sampler import Choosing, SampledTokens
from vlcache_jax.engine.compressed_pages import CompressedLease
from vlcache_jax.engine.decode_slots import marks_row, recent_tokens, words_array
from vlcache_jax.models import Rows, bind
from vlcache_jax.pallas_kernels import PAGE
from vlcache_jax.sampling import SamplingParams

if TYPE_CHECKING:
    from vlcache_jax import LLM

_SHARP = 2.0  # deviation of drawn keys: some tokens get far more attention than others
_CLOSE = {"float32": 1e-4, "bfloat16": 5e-2}  # of the largest logit, that log-probabilities may differ by


@dataclass(frozen=True)
class KeptLeases:
    """What answers go on with.

    Attributes:
      counts: tokens that each layer keeps of a prompt [L].
      leases: pages of each answer.
      tokens: of each layer those that the last answer's KV heads keep, [K, count].
    """

    counts: tuple[int, ...]
    leases: list[CompressedLease]
    tokens: list[npt.NDArray[np.int32]]

    @property
    def lists(self) -> int:
        """Work lists of a window."""
        return len(alike_layers(np.stack([lease.kept for lease in self.leases], 1)))


@dataclass(frozen=True)
class FilledRun:
    """Answers from their first tokens on.

    Attributes:
      seconds: until the last token had come.
      host: of these the host's, for all windows.
      tokens: [steps, answers].
    """

    seconds: float
    host: float
    tokens: npt.NDArray[np.int32]


def fill(runner: Runner) -> None:
    """Draws what the pool holds; no two layers hold the same."""
    half = runner.shapes.pool
    k, v = (jax.random.normal(jax.random.key(seed), half.shape, half.dtype) for seed in range(2))
    with runner.pool.taken() as arrays:
        for layer in range(len(arrays)):
            arrays[layer] = [x * np.asarray(scale * (1 + 0.1 * layer), x.dtype) for x, scale in ((k, _SHARP), (v, 1))]


class FilledAnswers:
    """Answers behind prompts in a filled pool. Nobody asks the engine anything meanwhile, nor afterwards.

    Args:
      llm: whose pool is filled.
      length: tokens of each prompt.
      count: how many answers there are.
      steps: tokens of each behind its first one.
    """

    def __init__(self, llm: LLM, length: int, count: int, steps: int):
        self._runner: Runner = llm.service.device.runner
        self._pages = llm.service.engine.scheduler.compressed
        self._length, self._count, self._steps = length, count, steps
        pages = -(-(length + steps) // PAGE)
        self._tables = 1 + np.arange(count * pages, dtype=np.int32).reshape(count, pages)

    @property
    def pages(self) -> int:
        """Of the pool, where nothing is compressed."""
        return self._tables.size

    def compress(self, counts: tuple[int, ...]) -> KeptLeases:
        """Lets each answer have so many tokens of each layer, which are drawn.

        Raises:
          ValueError: there are not enough pages.
        """
        runner, kept = self._runner, KeptLeases(counts, [], [])
        rung = round_up(self._tables.shape[1], runner.shapes.page_rungs)
        program, [sums, _] = Compact(rung), runner.run(EmptySums(rung))
        for i, table in enumerate(self._tables):
            lease = self._pages.take(counts, self._steps)
            if lease is None:
                raise ValueError(f"compressed_kv_bytes must hold {self._count} answers, got room for {i}")
            kept.leases.append(lease)
            received = jax.random.uniform(jax.random.key(i), sums.shape)
            for layer, count in enumerate(counts):
                numbers = np.array(
                    [layer, self._length, count, max(1, count // 10), USUAL[Received("kv_head")]], np.int32
                )
                target = lease.tables[layer][:rung]
                with runner.compressed.taken() as arrays:
                    arrays[:], tokens = runner.run(
                        program, arrays, runner.pool.make()[layer], received, numbers, np.uint32(0),
                        _padded(table, rung), _padded(target, rung),
                    )  # fmt: skip
                if i == self._count - 1:
                    kept.tokens.append(np.asarray(tokens)[:, :count])
        return kept

    def give_back(self, kept: KeptLeases) -> None:
        """Its pages are free again."""
        for lease in kept.leases:
            self._pages.end(lease)

    def run(self, kept: KeptLeases | None) -> FilledRun:
        """Decodes, with all of the prompts where nothing is compressed.

        Raises:
          ValueError: an answer has no token at a step.
        """
        self._begin()
        launched: list[SampledTokens] = []
        host, window = 0.0, self._runner.ladder.window
        start = time.perf_counter()
        for done in range(0, self._steps, window):
            begin = time.thread_time()
            launched += self._window(kept, done, min(window, self._steps - done))
            host += time.thread_time() - begin
        found = np.concatenate([np.asarray(sampled.token) for sampled in launched])[: self._steps, : self._count]
        seconds = time.perf_counter() - start
        if (found < 0).any():
            raise ValueError(f"every answer must have a token at each of {self._steps} steps, got {found.tolist()}")
        return FilledRun(seconds, host, found)

    def check(self, kept: KeptLeases | None) -> None:
        """Sees that the last answer's first step is that of dense attention over its prompt, in which each KV head sees
        what it keeps.

        Raises:
          ValueError: log-probabilities differ.
        """
        first = self._begin()
        [window] = self._window(kept, 0, 1, told=True)
        sampled = jax.tree.map(lambda x: np.asarray(x)[0, self._count - 1], window)
        logits = self._dense(int(first[-1]), kept)
        wanted = np.asarray(jax.nn.log_softmax(logits))[sampled.top_token]
        most = _CLOSE[str(self._runner.dtype)] * np.abs(logits).max()
        differ = np.abs(wanted - sampled.top_logprob).max()
        if sampled.token != sampled.top_token[0] or not differ < most:
            raise ValueError(
                f"log-probabilities of {self._count} answers behind {self._length} tokens must be within {most:.2g} of "
                f"dense attention's, got {differ:.2g}"
            )

    # Parts.

    def _begin(self) -> npt.NDArray[np.int32]:
        """Gives each answer a lane and its first token; returns these."""
        runner, V = self._runner, self._runner.config.text.vocab_size
        marks, bias = marks_row((), (), (), V), np.zeros(V, np.float32)
        for lane in range(self._count):
            runner.open_lane(lane, marks, bias, words_array((), V), recent_tokens(()))
        logits = jax.random.normal(jax.random.key(0), (round_up(self._count, runner.ladder.sequences), V))
        sampled = runner.sample(logits, self._rows()[:, ANSWER:], np.zeros(self._count, np.int32))
        return np.asarray(sampled.token)[: self._count]

    def _rows(self, *, told: bool = False) -> npt.NDArray[np.int32]:
        """Of a window, see `vlcache_jax.device.programs.window`: the most likely tokens."""
        params = SamplingParams(temperature=0, logprobs=20 if told else None).resolve({})
        return np.stack(
            [
                np.append([self._length, 0], Choosing.row(params, lane=lane, seed=0, most=self._steps + 2))
                for lane in range(self._count)
            ]
        ).astype(np.int32)

    def _window(self, kept: KeptLeases | None, done: int, tokens: int, *, told: bool = False) -> list[SampledTokens]:
        """Launches the next one, behind `done` steps."""
        rows = self._rows(told=told)
        end = np.full((2, self._count), done + 1, np.int32) + np.array([[0], [tokens - 1]], np.int32)
        if kept is None:
            return self._runner.window(rows, list(self._tables), end + self._length, tokens)
        counts = np.stack([lease.kept for lease in kept.leases], 1)
        return self._runner.compressed_window(rows, [lease.tables for lease in kept.leases], counts, end, tokens)

    def _dense(self, token: int, kept: KeptLeases | None) -> npt.NDArray[np.float32]:
        """Logits behind the last answer's first token, [V]."""
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
        """A layer of the row behind the last prompt; of the prompt's tokens, and itself, each KV head sees some
        [K, n + 1]."""
        length, table, config = self._length, self._tables[-1], self._runner.config.text
        rows = Rows(None, jnp.full((3, 1), length), None, None, None)

        def behind(pool: jax.Array, new: jax.Array) -> jax.Array:
            pages = pool.reshape(-1, PAGE, *pool.shape[1:])[table]
            return jnp.concatenate([pages.reshape(-1, *pool.shape[1:])[:length], new]).astype(jnp.float32)

        def layer(params: Any, x: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> jax.Array:
            own = self._runner.shapes.bind_layer(params)
            q, new_k, _, new_v = own.self_attn.project(own.input_layernorm(x), rows, keep=1)
            q = q.reshape(config.num_kv_heads, -1, config.head_dim).astype(jnp.float32)
            score = jnp.einsum("kgd,skd->kgs", q, behind(k, new_k), precision="highest") * config.head_dim**-0.5
            weight = jax.nn.softmax(jnp.where(seen[:, None], score, -jnp.inf), -1)
            out = jnp.einsum("kgs,skd->kgd", weight, behind(v, new_v), precision="highest")
            return own.transform(x, own.self_attn.o_proj(out.reshape(1, -1).astype(x.dtype)), jnp.ones(1, bool))

        return jax.jit(layer)


def _padded(pages: npt.NDArray[np.int32], size: int) -> npt.NDArray[np.int32]:
    """Pages as a program takes them."""
    padded = np.zeros(size, np.int32)
    padded[: len(pages)] = pages
    return padded
