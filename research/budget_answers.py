"""Answers that go on with a part of their prompt's K, V: every method at every budget, on the same questions.

Answers and the memory that they go on with are the engine's, but for methods that it has not (`masked_answers`). Looked
into is each question's run with the whole cache: from it follows what a method keeps, how much of what the first
decoded row looks at most that is (CacheHitRate), and what the answer's logits become, given the answer with the whole
cache. After VL-Cache's evaluation, arXiv:2410.23317.
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
Way = Compressor | FastV | StreamingH2O  # of the engine, or computed through masks
_LAYERS = "layers by heads"
SPARSE = ("prefill", "after the last image", "decoding")
"""Rows whose attention's sparsity `Layers` has: all of the prompt, those after its last image, and decoded ones."""
_P = 0.01  # below this part of a row's maximum nothing counts, for what layers tell


@dataclasses.dataclass(frozen=True)
class Setting:
    """A method at a budget.

    Attributes:
      method: its name, the same at all budgets.
      budget: share of the prompt's K, V, above 0 and at most 1; of fastv, of the image tokens.
      ways: what runs; of a method that draws one for each seed.
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
    """Every method at every budget.

    Args:
      methods: of `METHODS`.
      ps: vl-cache runs with each of these thresholds, too.
      seeds: of what is drawn.
      every: tokens that h2o-stream decodes before it drops some.

    Raises:
      ValueError: there is no such method, or budget.
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
    """One question answered in one way.

    Attributes:
      sample: number of the sample.
      text: the answer.
      score: how right it is, from 0 to 1.
      memory: bytes of K, V that the answer goes on with, over those of the prompt.
      same: whether its tokens are those with the whole cache.
      agree, tokens: positions behind the first token of the answer with the whole cache at which the most likely token
        is the same, and all of them.
      squared_error: mean over these and the vocabulary of the squared difference of logits.
      hit_rate: CacheHitRate, the mean of layers and heads; None: nothing was decoded, or the engine does not do this.
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
    """What the rows of a decoded answer look at, layer by layer.

    Attributes:
      prompt_tokens, image_tokens: of the prompt.
      sparsity: of each of `SPARSE` the least, the mean and the greatest of a layer's heads: [3, 3, L].
      contribution: of the images to attention to the prompt [L].
      coverage: share of the images in the tokens looked at most, by budget: [budgets, L].
    """

    prompt_tokens: int
    image_tokens: int
    sparsity: list[list[list[float]]]
    contribution: list[float]
    coverage: list[list[float]]


@dataclasses.dataclass(frozen=True)
class BudgetResults:
    """All that was found.

    Attributes:
      whole: with the whole cache, one result a sample.
      results: by setting, [ways][samples].
      layers: of each sample of which something was decoded.
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
    """Answers all samples under every setting; what the file `work` has is not run again.

    Args:
      llm: with a pool for what is kept of prompts.
      batch: questions that are answered together.

    Raises:
      ValueError: there is no pool for what is kept, or `work` is another kind of file.
    """
    from vlcache_jax.sampling import SamplingParams

    log = WorkLog(work, identity(llm, (), max_tokens))
    ways = list(dict.fromkeys(way for setting in settings for way in setting.ways))
    budgets = sorted({setting.budget for setting in settings})
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    study = _Study(llm, MaskedAnswers(Probe(llm), max_tokens), params, budgets)
    protocol = Protocol(arrangement)
    # What each question is asked for: all that is to be found, by the name under which the file has it.
    asked = [_Asked(i, sample, protocol.formal(samples, i)) for i, sample in enumerate(samples)]
    parts = {part: f"{part!r} {budgets}" if part == _LAYERS else repr(part) for part in (WHOLE, _LAYERS, *ways)}
    with Progress("questions", len(samples)) as bar:
        for some in itertools.batched(asked, batch):
            keys = {(one, part): f"{one.digest} {name}" for one in some for part, name in parts.items()}
            for case, row in study.evaluate([case for case, key in keys.items() if log.get(key) is None]):
                log.add(keys[case], row)
            bar.update(len(some))
    # From the file, so that a run that goes on gives what an unbroken one does.
    found = {part: [log.get(f"{one.digest} {name}") for one in asked] for part, name in parts.items()}
    by_way = {way: [BudgetResult(i, *row) for i, row in enumerate(found[way])] for way in (WHOLE, *ways)}
    results = {setting: [by_way[way] for way in setting.ways] for setting in settings}
    return BudgetResults(by_way[WHOLE], results, [Layers(*row) for row in found[_LAYERS] if row])


@dataclasses.dataclass(frozen=True, eq=False)
class _Asked:
    """A question as it is asked."""

    number: int
    sample: Sample
    conversation: Any

    @functools.cached_property
    def digest(self) -> str:
        told = repr((self.conversation, dataclasses.astuple(self.sample)))
        return hashlib.sha256(told.encode()).hexdigest()[:16]


_Case = tuple[_Asked, Any]  # a question and what is to be found of it


class _Study:
    """Evaluates batches of questions.

    Args:
      llm: answers.
      masked: looks inside.
      params: of answers.
      budgets: that coverage is told for.
    """

    def __init__(self, llm: LLM, masked: MaskedAnswers, params: SamplingParams, budgets: Sequence[float]):
        self._llm, self._masked, self._params, self._budgets = llm, masked, params, budgets

    def evaluate(self, cases: Sequence[_Case]) -> Iterator[tuple[_Case, list[Any]]]:
        """Findings, as they come: of ways `BudgetResult` without the sample, of layers `Layers` or none."""
        questions = list(dict.fromkeys(one for one, _ in cases))
        whole = self._answer(questions)
        # Inside, question by question; there also the methods that the engine has not.
        inside: dict[Compressor, dict[_Asked, tuple[Any, ...]]] = {}
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
        for way, told in inside.items():
            for one, output in self._answer(list(told), way).items():
                [answer], kept = output.outputs, output.compression
                # Of an answer of one token nothing is kept.
                memory = way.alpha if kept is None else kept.bytes / kept.bytes_full
                same = answer.token_ids == whole[one].outputs[0].token_ids
                yield (one, way), [answer.text, one.sample.score(answer.text), memory, same, *told[one]]

    def _answer(self, questions: Sequence[_Asked], way: Compressor | None = None) -> dict[_Asked, RequestOutput]:
        if not questions:
            return {}
        outputs = self._llm.chat([one.conversation for one in questions], self._params, compress=way)
        return dict(zip(questions, outputs, strict=True))

    def _inside(self, look: Look, way: Compressor) -> tuple[int, int, float, float | None]:
        """The rest of a result: from `agree` on."""
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
        """A result but for its sample, of a method that the engine has not; `text` is the whole cache's answer."""
        answer = list(look.answer)
        if len(answer) == 1:
            return [text, sample.score(text), way.alpha, True, 0, 0, 0.0, None]
        follow, memory = way.begin(self._masked, look)
        tokenizer = self._llm.get_tokenizer()
        forced = follow(answer[:-1])
        tokens = greedy(follow, forced, answer, tokenizer.eos_token_id, self._masked.most)
        if tokens != answer:
            text = tokenizer.decode(tokens, skip_special_tokens=True)
        told = compared(forced[1:], look.trace.logits[1:])
        return [text, sample.score(text), memory, tokens == answer, *told, None]

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
    """How sparse attention is, see `Layers.sparsity`: the share of small entries among those that rows see.

    Args:
      masked: looks into the prompt.
      look: the prompt and its answer.
      decoded: attention of decoded rows, see `Look.attention`.
    """
    n = len(look.prompt)
    rows = n, VLCache(0.5).observed(look.prompt)
    shares = [masked.received(look, count, _P)[1] / visible(n, count) for count in rows]
    small = np.sum([zeros(row, _P) for row in decoded], axis=0)
    shares.append(small / sum(row.shape[-1] for row in decoded))
    return [of_heads(share) for share in shares]


def compared(logits: np.ndarray, whole: np.ndarray) -> tuple[int, int, float]:
    """(positions of the same most likely token, all positions, mean squared difference)."""
    same = int((logits.argmax(-1) == whole.argmax(-1)).sum())
    return same, len(whole), float(np.mean(np.square(logits.astype(np.float64) - whole)))


def greedy(follow: Follow, forced: np.ndarray, whole: list[int], end: int, most: int) -> list[int]:
    """A greedy answer, which begins as that with the whole cache as far as they agree.

    Args:
      follow: gives logits behind its tokens.
      forced: logits of the whole cache's answer, [c, V].
      whole: its tokens.
      end: the token that ends an answer.
      most: tokens of an answer at most.
    """
    differs = np.flatnonzero(forced.argmax(-1) != whole)
    if not len(differs):
        return whole
    tokens = [*whole[: differs[0]], int(forced[differs[0]].argmax())]
    while tokens[-1] != end and len(tokens) < most:
        tokens.append(int(follow(tokens)[-1].argmax()))
    return tokens
