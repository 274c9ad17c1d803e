"""Outputs that see a part of their prompt through masks, and measures of that part.

A prompt and its answer run once with the full cache. Then only the rows of answers are recomputed, each over the keys
that a mask allows: densely, one prompt at a time. This gives figures that the engine does not report, and methods that
it lacks: FastV (arXiv:2403.06764) drops image tokens during prefill, and H2O as its authors run it (arXiv:2306.14048)
continues to drop tokens while it decodes.

The measures show how well kept tokens represent all (VL-Cache, section 3). Rows of attention are softmax weights `[...,
T]` of decoded tokens over the prompt and the tokens decoded before them. Results are means over all rows: heads, layers
or tokens.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from vlcache_jax.compress.budgets import sparsity, whole
from vlcache_jax.compress.policies import Compressor, make_counts
from vlcache_jax.compress.scores import KeyStatistics, seeds
from vlcache_jax.device.buckets import round_up
from vlcache_jax.inputs.layout import Layout
from vlcache_jax.models import Rows, bind
from vlcache_jax.pallas_kernels import PAGE, attention_statistics
from vlcache_jax.study.probe import Placed, Probe, Trace

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


def filtered(attention: Array, p: float) -> Array:
    """Return the rows without entries below p x their maximum (ThresholdFilter)."""
    return np.where(attention >= p * attention.max(-1, keepdims=True), attention, 0)


def zeros(attention: Array, p: float) -> npt.NDArray[np.int64]:
    """Return how many entries of each row are below p x its maximum."""
    return np.asarray((attention < p * attention.max(-1, keepdims=True)).sum(-1))


def of_heads(sparsity: Array) -> list[list[float]]:
    """Return the minimum, mean and maximum over a layer's heads of a measure of each head `[L, H]`: `[3, L]`."""
    return [sparsity.min(1).tolist(), sparsity.mean(1).tolist(), sparsity.max(1).tolist()]


def top(values: Array, k: int) -> Mask:
    """Return a mask of the k highest values of each row; of equal ones the earlier counts as higher."""
    order = np.argsort(-values, axis=-1, kind="stable")
    mask = np.zeros(values.shape, bool)
    np.put_along_axis(mask, order[..., :k], True, axis=-1)
    return mask


def cache_hit_rate(scores: Array, attention: Array, k: int) -> float:
    """Return the fraction of the k prompt tokens with most attention that are among the k with the highest scores.

    Args:
      scores, attention: `[..., m]` each; the attention is that of the first decoded row.
    """
    return float((top(scores, k) & top(attention, k)).sum(-1).mean() / k)


def contribution(attention: Array, modality: Mask, p: float) -> float:
    """Return the fraction of the attention to the prompt that one modality has, after the filter.

    Args:
      attention: `[..., T]`.
      modality: Mask of the prompt's tokens of the modality, `[m]`, m <= T.
    """
    return _share(filtered(attention, p), modality)


def coverage(attention: Array, modality: Mask, alpha: float) -> float:
    """Return the fraction of one modality among the floor(alpha T) prompt tokens with most attention, for each row.

    Args:
      attention: `[..., T]`.
      modality: Mask of the prompt's tokens of the modality, `[m]`, m <= T.
    """
    T = attention.shape[-1]
    return _share(top(attention, *whole([alpha * T], T)).astype(np.float64), modality)


def _share(weights: Array, modality: Mask) -> float:
    """Return a modality's fraction of the weights in the prompt, without rows that have none there; NaN if all have
    none.
    """
    prompt = weights[..., : len(modality)]
    total = prompt.sum(-1)
    shares = prompt[..., modality].sum(-1)[total > 0] / total[total > 0]
    return float(shares.mean()) if len(shares) else np.nan


def mean_of_rows(rows: Sequence[Any]) -> Any:
    """Return the mean of the first axis without NaN, as lists."""
    return np.ma.masked_invalid(rows).mean(0).filled(np.nan).tolist()


def stream(
    kept: npt.NDArray[np.integer], sums: Array, row: Array, heavy: int, recent: int, every: int = 1
) -> tuple[npt.NDArray[np.integer], Array]:
    """Decode one token by H2O's original method, which continues to drop tokens while it decodes.

    Args:
      kept: Tokens that are kept, rising `[c]`.
      sums: Attention that each has received so far, `[c]`.
      row: Attention of the new token to them and to itself, `[c + 1]`.
      heavy: Number of tokens that are kept for their sums.
      recent: Number of last tokens, which are always kept.
      every: Tokens that are decoded before some are dropped again; 1: each drops one.

    Returns:
      `kept` and `sums` with the new token. If there are `every` too many, only the `heavy` ones with the highest sums
      remain of those that are not recent.
    """
    kept, sums = np.append(kept, kept[-1] + 1), np.append(sums, 0) + row
    if len(kept) < heavy + recent + every:
        return kept, sums
    stays = np.append(top(sums[: len(kept) - recent], heavy), np.ones(recent, bool))
    return kept[stays], sums[stays]


@dataclass(frozen=True, eq=False)
class Look:
    """A prompt of n tokens and an answer of c, with the full cache.

    Attributes:
      placed, trace: Placement and trace of both.
      prompt: The prompt without the answer.
      answer: Tokens of the answer.
      q: Queries of all rows, `[L, N, H, D]`.
      k, v: Rotated keys, and values; `[L, S, K, D]`, S a multiple of the page.
      statistics: Attention scores computed so far, see `MaskedAnswers.received`.
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
        """Return the attention of a row in each layer, including to itself, `[L, H, row + 1]`."""
        query = np.asarray(self.q[:, row], np.float64)
        keys = np.asarray(self.k[:, : row + 1], np.float64)
        grouped = query.reshape(len(query), keys.shape[2], -1, query.shape[-1])
        scores = np.einsum("lkgd,lskd->lkgs", grouped, keys).reshape(*query.shape[:2], -1) / query.shape[-1] ** 0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return np.asarray(weights / weights.sum(-1, keepdims=True))

    @functools.cached_property
    def first_decoded(self) -> npt.NDArray[np.float64]:
        """Attention of the first token of the answer to the prompt, `[L, H, n]`."""
        n = len(self.prompt)
        return self.attention(n)[:, :, :n]


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """Tokens that a policy keeps of a prompt.

    Attributes:
      scores: Scores by which tokens are ranked, infinite in the window, `[L, K, n]`.
      counts: Number of tokens that each layer keeps `[L]`.
      sparsity: Sparsity of each layer `[L]`; None: the policy does not need it.
    """

    scores: npt.NDArray[np.float32]
    counts: tuple[int, ...]
    sparsity: npt.NDArray[np.float64] | None

    @property
    def mask(self) -> Mask:
        """Mask of the kept tokens, bool `[L, K, n]`."""
        return np.stack([top(scores, count) for scores, count in zip(self.scores, self.counts, strict=True)])


class MaskedAnswers:
    """Analysis of prompts, and masked answers to them.

    Args:
      probe: Runs prompts.
      max_tokens: Maximum tokens of an answer.
    """

    def __init__(self, probe: Probe, max_tokens: int):
        self.probe, self.max_tokens = probe, max_tokens
        self._rows = jax.jit(self._compute)
        self._observed = jax.jit(self._observe)
        self._rest = jax.jit(self._layers)
        self._scores = jax.jit(lambda scores, seen: scores(seen), static_argnums=0)

    def look(self, conversation: Any, answer: Sequence[int]) -> Look:
        """Run a conversation and its answer with the full cache."""
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
        """Return the attention that keys receive from the prompt's last rows, and counts of small weights.

        The shapes are `[L, K, S]` and `[L, H]`; a weight is small if it is below p x the maximum of its row. See
        `attention_statistics`.
        """
        if (rows, p) not in look.statistics:
            n = len(look.prompt)
            place = np.full(round_up(rows, self.probe.runner.buckets.rows), -1, np.int32)
            place[:rows] = np.arange(n - rows, n)
            found = self._observed(look.q, look.k, place, np.float32(p))
            look.statistics[rows, p] = tuple(map(np.asarray, found))
        received, zeros = look.statistics[rows, p]
        return received, zeros

    def kept(self, look: Look, compressor: Compressor) -> KeptTokens:
        """Return the tokens that a policy keeps of a prompt."""
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
        """Compute rows of an answer.

        Args:
          look: Its prompt.
          tokens: Tokens of the answer so far, c.
          prompt: Mask of the prompt for each row, `[L, K, c, S]`, or broadcastable to it.
          own: Mask of the answer for each row, `[c, c]` or `[L, K, c, c]`; a row always sees itself. None: all before
            it.
          halves: Rotated keys and values of the prompt, `[L, S, K, D]`; None: the look's.

        Returns:
          (logits after each token `[c, V]`, attention of each row averaged over a group of heads, `[L, K, c, S + c]`).
        """
        k, v = halves or (look.k, look.v)
        (layers, slots, heads), count, n = k.shape[:3], len(tokens), len(look.prompt)
        seen = np.zeros((layers, heads, self.max_tokens, slots + self.max_tokens), bool)
        seen[:, :, :count, :slots] = prompt
        seen[:, :, :count, slots : slots + count] = np.tri(count, dtype=bool) if own is None else own
        seen[:, :, range(self.max_tokens), range(slots, slots + self.max_tokens)] = True
        ids = np.zeros(self.max_tokens, np.int32)
        ids[:count] = tokens
        position = np.tile(n + look.prompt.delta + np.arange(self.max_tokens, dtype=np.int32), (3, 1))
        hidden, weights = self._rows(self.probe.runner.text, ids, position, k, v, seen)
        return self.probe.logits(hidden)[:count], np.asarray(weights)[:, :, :count, : slots + count]

    def after(
        self, look: Look, layer: int, rows: npt.NDArray[np.integer]
    ) -> tuple[jax.Array, jax.Array, npt.NDArray[np.float32]]:
        """Run some of a prompt's rows through the layers after `layer`; the other rows are absent there.

        Args:
          rows: Rising; the last one is the prompt's.

        Returns:
          (keys and values as in a look, with the rows one after the other after that layer; logits of the first token,
          `[1, V]`).
        """
        probe, count = self.probe, len(rows)
        index = np.zeros(round_up(count, probe.runner.buckets.rows), np.int32)
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
        """Run the first n of N rows through layers, and write the first slots of their K and V, `[L, S, K, D]`."""
        index = jnp.arange(len(x), dtype=jnp.int32)
        end = jnp.where(index < n, index + 1, 0)
        rows = Rows(jnp.where(end > 0, index, k.shape[1] + index), position, jnp.zeros_like(index), end, index)
        halves = []
        for i, params in enumerate(layers):
            more = deepstack[i] if i < len(deepstack) else None
            layer, implementation = self.probe.runner.shapes.bind_layer(params), self.probe.runner.implementation
            x, memory, _ = layer(x, [k[i], v[i]], rows, more, keep=len(x), implementation=implementation)
            halves.append(memory)
        own_k, own_v = (jnp.stack(half) for half in zip(*halves, strict=True))
        return own_k, own_v, x

    def _compute(
        self, text: Any, token: jax.Array, position: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return hidden states of C rows after all layers, and their attention, float32 `[L, K, C, S + C]`."""
        shapes, size, heads = self.probe.runner.shapes, len(token), k.shape[2]
        rows, looked = Rows(None, position, None, None, None), []
        x = bind(shapes.table_graph, text["embed_tokens"])(token)
        for i, mask in enumerate(seen):
            layer = shapes.bind_layer(text["layers"][i])
            y = layer.input_layernorm(x)
            q, own_k, _, own_v = layer.self_attn.project(y, rows, keep=size)
            width = q.shape[-1]
            q = q.reshape(size, heads, -1, width)
            keys, values = jnp.concatenate([k[i], own_k]), jnp.concatenate([v[i], own_v])
            score = jnp.einsum(
                "nkgd,skd->kgns", q, keys, precision="highest", preferred_element_type=jnp.float32
            ) / width**0.5  # fmt: skip
            weight = jax.nn.softmax(jnp.where(mask[:, None], score, -jnp.inf), -1)
            out = jnp.einsum("kgns,skd->nkgd", weight.astype(x.dtype), values, precision="highest")
            x = layer.transform(x, layer.self_attn.back(y, out.reshape(size, -1, width)), jnp.ones(size, bool))
            looked.append(weight.mean(1))
        return x, jnp.stack(looked)


# Tokens of an answer so far [c] -> logits of the first one and after each, [1 + c, V].
Follow = Callable[[Sequence[int]], npt.NDArray[np.float32]]
# Tokens that a head keeps, rising, and the attention that each has received.
_State = tuple[npt.NDArray[np.integer], npt.NDArray[np.float64]]


@dataclass(frozen=True)
class FastV:
    """FastV: after a layer the prompt continues without the image tokens that get least attention of its last token.

    Attributes:
      alpha: Fraction of the image tokens that continue.
      layer: Last layer that all tokens pass.
    """

    alpha: float
    layer: int = 2

    def begin(self, masked: MaskedAnswers, look: Look) -> tuple[Follow, float]:
        """Return (logits of answers, fraction of the prompt's KV that they see).

        Raises:
          ValueError: There is no layer after `layer`.
        """
        n, layers = len(look.prompt), len(look.k)
        if self.layer >= layers - 1:
            raise ValueError(f"layer of fastv must be below {layers - 1}, got {self.layer}")
        attention = look.attention(n - 1)[self.layer].mean(0)
        rows = goes_on(attention, look.placed.is_image[:n], self.alpha)
        k, v, first = masked.after(look, self.layer, rows)
        lengths = np.where(np.arange(layers) <= self.layer, n, len(rows))
        seen = np.arange(k.shape[1]) < lengths[:, None, None, None]

        def follow(tokens: Sequence[int]) -> npt.NDArray[np.float32]:
            return np.concatenate([first, masked.run(look, tokens, seen, halves=(k, v))[0]])

        return follow, float(lengths.mean()) / n


def goes_on(attention: npt.NDArray[np.float64], is_image: Mask, alpha: float) -> npt.NDArray[np.int64]:
    """Return the prompt's tokens with which FastV continues, rising: those of text, and a fraction of those of images.

    Args:
      attention: Attention of the last token, `[n]`.
      is_image: `[n]`.
      alpha: Fraction of the image tokens that stay, at least one; of equal ones the earlier.
    """
    image = np.flatnonzero(is_image)
    stays = ~is_image
    if len(image):
        stays[image[top(attention[image], *whole([alpha * len(image)], len(image)))]] = True
    return np.flatnonzero(stays)


@dataclass(frozen=True)
class StreamingH2O:
    """H2O while decoding: keeps the last tokens and those that received most attention, with a constant budget.

    Attributes:
      alpha: Kept tokens, including those of the answer, divided by the prompt's; a tenth of them are the last ones.
      every: Tokens that are decoded before some are dropped again.
    """

    alpha: float
    every: int = 8

    def begin(self, masked: MaskedAnswers, look: Look) -> tuple[Follow, float]:
        """Start an answer, see `FastV`. The fraction does not include tokens that wait to be dropped."""
        run = _H2OStream(self, masked, look)
        return run.follow, run.budget / len(look.prompt)


class _H2OStream:
    """An answer under streaming H2O.

    Args:
      method, masked, look: Method, analysis and prompt.

    Attributes:
      budget: Tokens that each head keeps.
    """

    def __init__(self, method: StreamingH2O, masked: MaskedAnswers, look: Look):
        self._masked, self._look, self._every = masked, look, method.every
        n = len(look.prompt)
        [self.budget] = whole([method.alpha * n], n)
        self._recent = max(1, self.budget // 10)
        received, _ = masked.received(look, n, 0)
        layers, heads, slots = received.shape
        scores = received[:, :, :n].astype(np.float64)
        scores[:, :, n - self._recent :] = np.inf
        kept = np.nonzero(top(scores, self.budget))[2].reshape(layers * heads, self.budget)
        sums = np.take_along_axis(received.reshape(layers * heads, slots).astype(np.float64), kept, 1)
        self._tokens: list[int] = []
        self._states: list[list[_State]] = [list(zip(kept, sums, strict=True))]  # before each token, of each head
        self._prompt = np.zeros((layers, heads, masked.max_tokens, slots), bool)
        self._own = np.zeros((layers, heads, masked.max_tokens, masked.max_tokens), bool)

    def follow(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Continue after the common beginning of the tokens, one or more, and those before."""
        pairs = zip(tokens, self._tokens, strict=False)
        same = min(sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)), len(tokens) - 1)
        self._tokens = list(tokens)
        del self._states[same + 1 :]
        for step in range(same, len(tokens)):
            self._see(step)
            rows = slice(step + 1)
            logits, looked = self._masked.run(
                self._look, tokens[rows], self._prompt[:, :, rows], own=self._own[:, :, rows, rows]
            )
            self._states.append(self._next(step, looked[:, :, step]))
        return np.concatenate([self._look.trace.logits[:1], logits])

    def _see(self, step: int) -> None:
        """Compute the attention of a token."""
        n, heads = len(self._look.prompt), self._prompt.shape[1]
        for number, (kept, _) in enumerate(self._states[step]):
            head = (*divmod(number, heads), step)
            self._prompt[head], self._own[head] = False, False
            self._prompt[head][kept[kept < n]] = True
            self._own[head][kept[kept >= n] - n] = True

    def _next(self, step: int, looked: npt.NDArray[np.float32]) -> list[_State]:
        """Return the kept tokens after a token with this attention to prompt and answer, `[L, K, S + c]`."""
        n, slots = len(self._look.prompt), self._prompt.shape[-1]
        states = []
        for (kept, sums), row in zip(self._states[step], looked.reshape(-1, looked.shape[-1]), strict=True):
            columns = np.append(np.where(kept < n, kept, kept - n + slots), slots + step)
            states.append(stream(kept, sums, row[columns], self.budget - self._recent, self._recent, self._every))
        return states
