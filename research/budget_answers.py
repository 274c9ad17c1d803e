"""Outputs that decode with a part of their prompt's KV: every method at every budget, on the same questions.

Outputs and their memory are the engine's, except for methods that the engine lacks (`masked_answers`). The run of each
question with the full cache is analyzed. It gives the tokens that a method keeps, the fraction of the tokens with most
attention of the first decoded row among them (CacheHitRate), and the logits of the answer given the answer with the
full cache. The evaluation follows VL-Cache, arXiv:2410.23317.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import pathlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from research.masked_answers import (
    FastV,
    Follow,
    Look,
    MaskedAnswers,
    StreamingH2O,
    cache_hit_rate,
    contribution,
    coverage,
    mean_of_rows,
    of_heads,
    zeros,
)
from vlcache_jax.common.progress import Progress
from vlcache_jax.compress.budgets import visible
from vlcache_jax.compress.parse import parse_compressor
from vlcache_jax.compress.policies import Compressor, Random, VLCache
from vlcache_jax.study.accuracy import Protocol, identity
from vlcache_jax.study.probe import Probe
from vlcache_jax.study.questions import Sample
from vlcache_jax.study.report import WorkLog

if TYPE_CHECKING:
    from vlcache_jax.llm import LLM
    from vlcache_jax.outputs import RequestOutput
    from vlcache_jax.sampling import SamplingParams

WHOLE = "whole"
POLICIES = ("vl-cache", "postvision", "snapkv", "pyramidkv", "h2o", "zipcache", "streaming", "random")
METHODS = (*POLICIES, "fastv", "h2o-stream")
Way = Compressor | FastV | StreamingH2O  # a method of the engine, or computed through masks
_LAYERS = "layers by heads"
SPARSE = ("prefill", "after the last image", "decoding")
"""Rows whose attention's sparsity `Layers` has: all of the prompt, those after its last image, and decoded ones."""
_P = 0.01  # fraction of a row's maximum below which attention does not count, in `Layers`


@dataclasses.dataclass(frozen=True)
class Setting:
    """A method at a budget.

    Attributes:
      method: Name of the method, the same at all budgets.
      budget: Fraction of the prompt's KV, above 0 and at most 1; for fastv, of the image tokens.
      ways: Compressors to run; one for each seed of a random method.
    """

    method: str
    budget: float
    ways: tuple[Way, ...]

    @property
    def name(self) -> str:
        return f"{self.method}-{self.budget:g}"


def settings_of(
    methods: Sequence[str], budgets: Sequence[float], *, ps: Sequence[float] = (), seeds: int = 1, every: int = 8
) -> list[Setting]:
    """Return every method at every budget.

    Args:
      methods: Some of `METHODS`.
      budgets: Fractions of the KV.
      ps: Thresholds with which vl-cache also runs.
      seeds: Number of seeds of random methods.
      every: Tokens that h2o-stream decodes before it drops some.

    Raises:
      ValueError: There is no such method, or budget.
    """
    found: list[Setting] = []
    for method in dict.fromkeys(methods):
        if method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
        for budget in dict.fromkeys(budgets):
            found.append(Setting(method, budget, _ways(method, budget, seeds, every)))
    for p in dict.fromkeys(ps):
        found += [Setting(f"vl-cache, p = {p:g}", budget, (VLCache(budget, p=p),)) for budget in dict.fromkeys(budgets)]
    return found


def _ways(method: str, budget: float, seeds: int, every: int) -> tuple[Way, ...]:
    match method:
        case Random.word:
            return tuple(Random(budget, seed=seed) for seed in range(seeds))
        case "fastv":
            return (FastV(budget),)
        case "h2o-stream":
            return (StreamingH2O(budget, every),)
    return (parse_compressor(f"{method}-{budget}"),)


@dataclasses.dataclass(frozen=True)
class BudgetResult:
    """Result of one question answered in one way.

    Attributes:
      sample: Number of the sample.
      text: The answer.
      score: Score of the answer, from 0 to 1.
      memory: Bytes of KV that the answer decodes with, divided by those of the prompt.
      same: True if its tokens are those with the full cache.
      agree, tokens: Positions after the first token of the answer with the full cache at which the most likely token
        is the same, and all of them.
      squared_error: Mean over these and the vocabulary of the squared difference of logits.
      hit_rate: CacheHitRate, the mean of layers and heads; None: nothing was decoded, or the engine lacks the method.
    """

    sample: int
    text: str
    score: float
    memory: float
    same: bool
    agree: int
    tokens: int
    squared_error: float
    hit_rate: float | None


@dataclasses.dataclass(frozen=True)
class Layers:
    """Attention of the rows of a decoded answer, layer by layer.

    Attributes:
      prompt_tokens, image_tokens: Counts of the prompt.
      sparsity: Minimum, mean and maximum over a layer's heads, for each of `SPARSE`: `[3, 3, L]`.
      contribution: Fraction of the attention to the prompt that images get `[L]`.
      coverage: Fraction of images among the tokens with most attention, by budget: `[budgets, L]`.
    """

    prompt_tokens: int
    image_tokens: int
    sparsity: list[list[list[float]]]
    contribution: list[float]
    coverage: list[list[float]]


@dataclasses.dataclass(frozen=True)
class BudgetResults:
    """All results.

    Attributes:
      whole: Results with the full cache, one for each sample.
      results: Results by setting, `[ways][samples]`.
      layers: Attention of each sample with a decoded token.
    """

    whole: list[BudgetResult]
    results: dict[Setting, list[list[BudgetResult]]]
    layers: list[Layers]


def run(
    llm: LLM,
    samples: Sequence[Sample],
    settings: Sequence[Setting],
    *,
    arrangement: str = "image_first",
    max_tokens: int = 32,
    batch: int = 16,
    work: pathlib.Path | None = None,
) -> BudgetResults:
    """Answer all samples under every setting; results in the file `work` are not computed again.

    Args:
      llm: Engine with a compressed KV pool.
      samples: The questions.
      settings: Methods and budgets.
      arrangement: Order of images, text and question.
      max_tokens: Maximum tokens of an answer.
      batch: Questions that are answered together.
      work: File of finished results; None: none.

    Raises:
      ValueError: There is no compressed KV pool, or `work` is another kind of file.
    """
    from vlcache_jax.sampling import SamplingParams

    log = WorkLog(work, identity(llm, (), max_tokens))
    ways = list(dict.fromkeys(way for setting in settings for way in setting.ways))
    budgets = sorted({setting.budget for setting in settings})
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    study = _Study(llm, MaskedAnswers(Probe(llm), max_tokens), params, budgets)
    protocol = Protocol(arrangement)
    # All results of a question that are needed, by their names in the file.
    asked = [_Question(i, sample, protocol.formal(samples, i)) for i, sample in enumerate(samples)]
    parts = {part: f"{part!r} {budgets}" if part == _LAYERS else repr(part) for part in (WHOLE, _LAYERS, *ways)}
    with Progress("questions", len(samples)) as bar:
        for some in itertools.batched(asked, batch):
            keys = {(one, part): f"{one.digest} {name}" for one in some for part, name in parts.items()}
            for case, row in study.evaluate([case for case, key in keys.items() if log.get(key) is None]):
                log.add(keys[case], row)
            bar.update(len(some))
    # Read from the file, so that a resumed run gives the same results as an uninterrupted one.
    found = {part: [log.get(f"{one.digest} {name}") for one in asked] for part, name in parts.items()}
    by_way = {way: [BudgetResult(i, *row) for i, row in enumerate(found[way])] for way in (WHOLE, *ways)}
    results = {setting: [by_way[way] for way in setting.ways] for setting in settings}
    return BudgetResults(by_way[WHOLE], results, [Layers(*row) for row in found[_LAYERS] if row])


@dataclasses.dataclass(frozen=True, eq=False)
class _Question:
    """A question and its prompt."""

    number: int
    sample: Sample
    conversation: Any

    @functools.cached_property
    def digest(self) -> str:
        content = repr((self.conversation, dataclasses.astuple(self.sample)))
        return hashlib.sha256(content.encode()).hexdigest()[:16]


_Case = tuple[_Question, Any]  # a question and the setting or `Layers` to compute


class _Study:
    """Evaluation of batches of questions.

    Args:
      llm: Engine that answers.
      masked: Computes attention and masked answers.
      params: Sampling parameters of answers.
      budgets: Budgets at which coverage is computed.
    """

    def __init__(self, llm: LLM, masked: MaskedAnswers, params: SamplingParams, budgets: Sequence[float]):
        self._llm, self._masked, self._params, self._budgets = llm, masked, params, budgets

    def evaluate(self, cases: Sequence[_Case]) -> Iterator[tuple[_Case, list[Any]]]:
        """Yield results as they come: `BudgetResult` without the sample for ways, `Layers` or none for layers."""
        questions = list(dict.fromkeys(one for one, _ in cases))
        whole = self._answer(questions)
        # Attention, question by question, and the methods that the engine lacks.
        inside: dict[Compressor, dict[_Question, tuple[Any, ...]]] = {}
        for one, before in whole.items():
            look = self._masked.look(one.conversation, before.outputs[0].token_ids)
            text, count = before.outputs[0].text, len(look.answer) - 1
            for part in (part for own, part in cases if own is one):
                if part == WHOLE:
                    yield (one, part), [text, one.sample.score(text), 1.0, True, count, count, 0.0, None]
                elif part == _LAYERS:
                    yield (one, part), list(dataclasses.astuple(self._layers(look))) if count else []
                elif isinstance(part, Compressor):
                    inside.setdefault(part, {})[one] = self._inside(look, part)
                else:
                    yield (one, part), self._beside(look, part, one.sample, text)
        # The engine's answers, way by way.
        for way, found in inside.items():
            for one, output in self._answer(list(found), way).items():
                [answer], kept = output.outputs, output.compression
                # Nothing is kept for an answer of one token.
                memory = way.alpha if kept is None else kept.bytes / kept.bytes_full
                same = answer.token_ids == whole[one].outputs[0].token_ids
                yield (one, way), [answer.text, one.sample.score(answer.text), memory, same, *found[one]]

    def _answer(self, questions: Sequence[_Question], way: Compressor | None = None) -> dict[_Question, RequestOutput]:
        if not questions:
            return {}
        outputs = self._llm.chat([one.conversation for one in questions], self._params, compress=way)
        return dict(zip(questions, outputs, strict=True))

    def _inside(self, look: Look, way: Compressor) -> tuple[int, int, float, float | None]:
        """Return the rest of a result, from `agree` on."""
        decoded = look.answer[:-1]
        if not decoded:
            return 0, 0, 0.0, None
        n, kept = len(look.prompt), self._masked.kept(look, way)
        seen = np.zeros((*kept.scores.shape[:2], 1, look.k.shape[1]), bool)
        seen[:, :, 0, :n] = kept.mask
        logits, _ = self._masked.run(look, decoded, seen)
        group = look.q.shape[2] // look.k.shape[2]
        rates = [
            cache_hit_rate(scores.repeat(group, 0), attention, count)
            for scores, attention, count in zip(kept.scores, look.first_decoded, kept.counts, strict=True)
        ]
        return *compared(logits, look.trace.logits[1:]), float(np.mean(rates))

    def _beside(self, look: Look, way: FastV | StreamingH2O, sample: Sample, text: str) -> list[Any]:
        """Return a result without its sample, of a method that the engine lacks; `text` is the full cache's answer."""
        answer = list(look.answer)
        if len(answer) == 1:
            return [text, sample.score(text), way.alpha, True, 0, 0, 0.0, None]
        follow, memory = way.begin(self._masked, look)
        tokenizer = self._llm.get_tokenizer()
        forced = follow(answer[:-1])
        tokens = greedy(follow, forced, answer, tokenizer.eos_token_id, self._masked.max_tokens)
        if tokens != answer:
            text = tokenizer.decode(tokens, skip_special_tokens=True)
        comparison = compared(forced[1:], look.trace.logits[1:])
        return [text, sample.score(text), memory, tokens == answer, *comparison, None]

    def _layers(self, look: Look) -> Layers:
        n, is_image = len(look.prompt), look.placed.is_image[: len(look.prompt)]
        decoded = [look.attention(n + i) for i in range(len(look.answer) - 1)]
        return Layers(
            n,
            int(is_image.sum()),
            layer_sparsity(self._masked, look, decoded),
            mean_of_rows([[contribution(layer, is_image, _P) for layer in row] for row in decoded]),
            [
                mean_of_rows([[coverage(layer, is_image, budget) for layer in row] for row in decoded])
                for budget in self._budgets
            ],
        )


def layer_sparsity(masked: MaskedAnswers, look: Look, decoded: Sequence[np.ndarray]) -> list[list[list[float]]]:
    """Return the sparsity of attention, see `Layers.sparsity`: the fraction of small entries among those that rows see.

    Args:
      masked: Gives the prompt's attention.
      look: The prompt and its answer.
      decoded: Attention of decoded rows, see `Look.attention`.
    """
    n = len(look.prompt)
    rows = n, VLCache(0.5).observed(look.prompt)
    shares = [masked.received(look, count, _P)[1] / visible(n, count) for count in rows]
    small = np.sum([zeros(row, _P) for row in decoded], axis=0)
    shares.append(small / sum(row.shape[-1] for row in decoded))
    return [of_heads(share) for share in shares]


def compared(logits: np.ndarray, whole: np.ndarray) -> tuple[int, int, float]:
    """Return (positions with the same most likely token, all positions, mean squared difference)."""
    same = int((logits.argmax(-1) == whole.argmax(-1)).sum())
    return same, len(whole), float(np.mean(np.square(logits.astype(np.float64) - whole)))


def greedy(follow: Follow, forced: np.ndarray, whole: list[int], end: int, max_tokens: int) -> list[int]:
    """Return a greedy answer, which reuses the answer with the full cache as far as they agree.

    Args:
      follow: Returns logits after its tokens.
      forced: Logits of the full cache's answer, `[c, V]`.
      whole: Tokens of that answer.
      end: Token that ends an answer.
      max_tokens: Maximum tokens of an answer.
    """
    differs = np.flatnonzero(forced.argmax(-1) != whole)
    if not len(differs):
        return whole
    tokens = [*whole[: differs[0]], int(forced[differs[0]].argmax())]
    while tokens[-1] != end and len(tokens) < max_tokens:
        tokens.append(int(follow(tokens)[-1].argmax()))
    return tokens
