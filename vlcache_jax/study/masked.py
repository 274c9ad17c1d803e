"""Answers that see a part of their prompt through masks: for what the engine does not do, and what it does not tell.

A prompt and its answer run once with the whole cache; then rows of answers alone are computed anew, each over the keys
that a mask lets it see. Densely and one prompt at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from vlcache_jax.compress.budgets import sparsity
from vlcache_jax.compress.policies import Compressor, make_counts
from vlcache_jax.compress.scores import KeyStatistics, seeds
from vlcache_jax.device.buckets import round_up
from vlcache_jax.inputs.layout import Layout
from vlcache_jax.models import Rows, bind
from vlcache_jax.pallas_kernels import PAGE, attention_statistics
from vlcache_jax.study.probe import Placed, Probe, Trace
from vlcache_jax.study.retention import Mask, top


@dataclass(frozen=True, eq=False)
class Look:
    """A prompt of n tokens and an answer of c, with the whole cache.

    Attributes:
      placed, trace: of both.
      prompt: the prompt alone.
      answer: its tokens.
      q: queries of all rows, [L, N, H, D].
      k, v: keys with their rotation, and values; [L, S, K, D], S whole pages.
      statistics: what has been asked for, see `MaskedAnswers.received`.
    """

    placed: Placed
    trace: Trace
    prompt: Layout
    answer: tuple[int, ...]
    q: jax.Array
    k: jax.Array
    v: jax.Array
    statistics: dict[tuple[int, float], Any] = field(default_factory=dict)

    def attention(self, row: int) -> npt.NDArray[np.float64]:
        """What a row looks at in each layer, itself included, [L, H, row + 1]."""
        query = np.asarray(self.q[:, row], np.float64)
        keys = np.asarray(self.k[:, : row + 1], np.float64)
        grouped = query.reshape(len(query), keys.shape[2], -1, query.shape[-1])
        scores = np.einsum("lkgd,lskd->lkgs", grouped, keys).reshape(*query.shape[:2], -1) / query.shape[-1] ** 0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return np.asarray(weights / weights.sum(-1, keepdims=True))

    @functools.cached_property
    def first_decoded(self) -> npt.NDArray[np.float64]:
        """What the first token of the answer looks at of the prompt, [L, H, n]."""
        n = len(self.prompt)
        return self.attention(n)[:, :, :n]


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """What a policy keeps of a prompt.

    Attributes:
      scores: what tokens are ranked by, infinite in the window, [L, K, n].
      counts: how many each layer keeps [L].
      sparsity: of each layer [L]; None: the policy does not ask for it.
    """

    scores: npt.NDArray[np.float32]
    counts: tuple[int, ...]
    sparsity: npt.NDArray[np.float64] | None

    @property
    def mask(self) -> Mask:
        """Bool [L, K, n]."""
        return np.stack([top(scores, count) for scores, count in zip(self.scores, self.counts, strict=True)])


class MaskedAnswers:
    """Looks into prompts, and computes answers to them.

    Args:
      probe: runs prompts.
      most: tokens of an answer at most.
    """

    def __init__(self, probe: Probe, most: int):
        self.probe, self.most = probe, most
        self._rows = jax.jit(self._compute)
        self._observed = jax.jit(self._observe)
        self._rest = jax.jit(self._layers)
        self._scores = jax.jit(lambda scores, seen: scores(seen), static_argnums=0)

    def look(self, conversation: Any, answer: Sequence[int]) -> Look:
        """Runs a conversation and its answer with the whole cache."""
        probe = self.probe
        placed = probe.place(conversation, answer)
        trace, n = probe.run(placed), placed.prompt_length
        parts = [probe.project(placed, trace, layer) for layer in range(probe.num_layers)]
        q, k, _, v = (jnp.stack(part) for part in zip(*parts, strict=True))
        k, v = (jnp.pad(half, ((0, 0), (0, -half.shape[1] % PAGE), (0, 0), (0, 0))) for half in (k, v))
        whole = placed.layout
        prompt = replace(whole, token_ids=whole.token_ids[:n], positions=whole.positions[:, :n], spans=whole.spans[:-1])
        return Look(placed, trace, prompt, tuple(answer), q, k, v)

    def received(self, look: Look, rows: int, p: float) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
        """What keys receive from the prompt's last rows, [L, K, S], and how often that is below p x the maximum of its
        row, [L, H]; see `attention_statistics`."""
        if (rows, p) not in look.statistics:
            n = len(look.prompt)
            place = np.full(round_up(rows, self.probe.runner.ladder.rows), -1, np.int32)
            place[:rows] = np.arange(n - rows, n)
            found = self._observed(look.q, look.k, place, np.float32(p))
            look.statistics[rows, p] = tuple(map(np.asarray, found))
        received, zeros = look.statistics[rows, p]
        return received, zeros

    def kept(self, look: Look, compressor: Compressor) -> KeptTokens:
        """What a policy keeps of a prompt."""
        n, layers = len(look.prompt), self.probe.num_layers
        rows = 0 if compressor.alpha == 1 else compressor.observed(look.prompt)
        received, zeros = self.received(look, rows, compressor.p or 0)
        gamma = sparsity(zeros, n, rows) if rows and compressor.p is not None else None
        counts = make_counts(compressor, n, gamma, layers)
        ranked = []
        for own, count, seed in zip(received, counts, seeds(look.prompt, layers), strict=True):
            window = compressor.window(count)
            seen = KeyStatistics(own, np.int32(n), np.int32(window), seed)  # type: ignore[arg-type]
            scores = np.array(self._scores(compressor.scores, seen))[:, :n]
            scores[:, n - window :] = np.inf
            ranked.append(scores)
        return KeptTokens(np.stack(ranked), counts, gamma)

    def run(
        self,
        look: Look,
        tokens: Sequence[int],
        prompt: Mask,
        *,
        own: Mask | None = None,
        halves: tuple[jax.Array, jax.Array] | None = None,
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Rows of an answer.

        Args:
          look: its prompt.
          tokens: of the answer so far, c.
          prompt: what each sees of the prompt, [L, K, c, S], or what becomes that by broadcasting.
          own: what each sees of the answer, [c, c] or [L, K, c, c]; itself in any case. None: all before it.
          halves: keys with their rotation and values of the prompt, [L, S, K, D]; None: the look's.

        Returns:
          (logits behind each [c, V], what each looks at in the mean over a group of heads, [L, K, c, S + c]).
        """
        k, v = halves or (look.k, look.v)
        (layers, slots, heads), count, n = k.shape[:3], len(tokens), len(look.prompt)
        seen = np.zeros((layers, heads, self.most, slots + self.most), bool)
        seen[:, :, :count, :slots] = prompt
        seen[:, :, :count, slots : slots + count] = np.tri(count, dtype=bool) if own is None else own
        seen[:, :, range(self.most), range(slots, slots + self.most)] = True
        ids = np.zeros(self.most, np.int32)
        ids[:count] = tokens
        position = np.tile(n + look.prompt.delta + np.arange(self.most, dtype=np.int32), (3, 1))
        hidden, weights = self._rows(self.probe.runner.text, ids, position, k, v, seen)
        return self.probe.logits(hidden)[:count], np.asarray(weights)[:, :, :count, : slots + count]

    def behind(
        self, look: Look, layer: int, rows: npt.NDArray[np.integer]
    ) -> tuple[jax.Array, jax.Array, npt.NDArray[np.float32]]:
        """Takes some of a prompt's rows through the layers behind one; the others are absent there.

        Args:
          rows: rising; the last one is the prompt's.

        Returns:
          (keys and values as a look has them, the rows' one after the other behind that layer; logits of the first
          token, [1, V]).
        """
        probe, count = self.probe, len(rows)
        index = np.zeros(round_up(count, probe.runner.ladder.rows), np.int32)
        index[:count] = rows
        text, first = probe.runner.text, layer + 1
        layers = [text["layers"][i] for i in range(first, probe.num_layers)]
        k, v, x = self._rest(
            layers, look.trace.inputs[first][index], look.placed.deepstack[first:, index],
            look.placed.layout.positions[:, index], look.k[first:], look.v[first:], np.int32(count),
        )  # fmt: skip
        k, v = (jnp.concatenate([mine[:first], more]) for mine, more in ((look.k, k), (look.v, v)))
        return k, v, probe.logits(x[count - 1 : count])

    # Programs.

    def _observe(self, q: jax.Array, k: jax.Array, place: jax.Array, p: jax.Array) -> Any:
        table = jnp.arange(k.shape[1] // PAGE, dtype=jnp.int32)
        implementation = self.probe.runner.implementation

        def layer(own: tuple[jax.Array, jax.Array]) -> Any:
            rows = own[0][jnp.maximum(place, 0)]
            return attention_statistics(rows, own[1], table, place, p, implementation=implementation)

        return jax.lax.map(layer, (q, k))

    def _layers(
        self, layers: Any, x: jax.Array, deepstack: jax.Array, position: jax.Array, k: jax.Array, v: jax.Array, n: Any
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The first n of N rows through layers, into the first slots of their K and V, [L, S, K, D]."""
        index = jnp.arange(len(x), dtype=jnp.int32)
        end = jnp.where(index < n, index + 1, 0)
        rows = Rows(jnp.where(end > 0, index, k.shape[1] + index), position, jnp.zeros_like(index), end, index)
        halves = []
        for i, params in enumerate(layers):
            more = deepstack[i] if i < len(deepstack) else None
            layer, implementation = self.probe.runner.shapes.bind_layer(params), self.probe.runner.implementation
            x, own_k, own_v, _ = layer(x, k[i], v[i], rows, more, keep=len(x), implementation=implementation)
            halves.append((own_k, own_v))
        own_k, own_v = (jnp.stack(half) for half in zip(*halves, strict=True))
        return own_k, own_v, x

    def _compute(
        self, text: Any, token: jax.Array, position: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Hidden states of C rows behind all layers, and what they look at, float32 [L, K, C, S + C]."""
        shapes, size, heads = self.probe.runner.shapes, len(token), k.shape[2]
        rows, looked = Rows(None, position, None, None, None), []
        x = bind(shapes.table_graph, text["embed_tokens"])(token)
        for i, mask in enumerate(seen):
            layer = shapes.bind_layer(text["layers"][i])
            q, own_k, _, own_v = layer.self_attn.project(layer.input_layernorm(x), rows, keep=size)
            q = q.reshape(size, heads, -1, q.shape[-1])
            keys, values = jnp.concatenate([k[i], own_k]), jnp.concatenate([v[i], own_v])
            score = jnp.einsum(
                "nkgd,skd->kgns", q, keys, precision="highest", preferred_element_type=jnp.float32
            ) / q.shape[-1] ** 0.5  # fmt: skip
            weight = jax.nn.softmax(jnp.where(mask[:, None], score, -jnp.inf), -1)
            out = jnp.einsum("kgns,skd->nkgd", weight.astype(x.dtype), values, precision="highest")
            x = layer.transform(x, layer.self_attn.o_proj(out.reshape(size, -1)), jnp.ones(size, bool))
            looked.append(weight.mean(1))
        return x, jnp.stack(looked)
