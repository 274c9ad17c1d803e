"""Accuracy under reuse: the same questions without reuse and with their images reused.

The protocol is that of the VLCache paper (section 5.2). An auxiliary prompt with the same images and another query
fills the cache. Then the formal prompt is answered with reuse. Every setting answers every question, so differences are
paired.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vlcache_jax.common.progress import Progress
from vlcache_jax.study.questions import ARRANGEMENTS, Sample, user_turn
from vlcache_jax.study.report import WorkLog

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from vlcache_jax import SamplingParams
    from vlcache_jax.llm import LLM
    from vlcache_jax.models import ModelConfig
    from vlcache_jax.reuse.policies import Policy

COLD = "off"
RUNNING = 4  # prompts that run at once in a model with states
OTHER_TEXTS = (
    "Look at the picture.",
    "This is page 3 of the book.",
    "Yesterday I saw a blue ring.",
    "There are 4 stars on my desk.",
    "I like green more than purple.",
    "You are a helpful assistant.",
    "My friend has a red square and a yellow cross.",
    "Please answer in a few words.",
)
NEUTRAL = "Please describe this image."
# The prompt that caches an image by itself: only the tokens of the image (EPIC).
ALONE = "<|vision_start|><|image_pad|><|vision_end|>"
CONTEXTS = dict(zip(("same", "new-text", "new-question"), ARRANGEMENTS, strict=True))
"""Arrangements by the names of the option --context."""
CACHED = {"together": "together", "separately": "apart", "alone": "alone", "neutral": "neutral"}
"""Donors by the names of the option --cached."""


def arrangement_of(context: str, *, new: bool = False) -> str:
    """Return the arrangement of a value of --context.

    Args:
      context: "same", "new-text" or "new-question".
      new: True refuses "same", in which reuse is exact.

    Raises:
      ValueError: `context` is none of these.
    """
    known = [name for name in CONTEXTS if not (new and name == "same")]
    if context not in known:
        raise ValueError(f"context must be one of {', '.join(known)}, got {context!r}")
    return CONTEXTS[context]


def donors_of(cached: str) -> str:
    """Return the donors of a value of --cached: "together", "separately", "alone" or "neutral".

    Raises:
      ValueError: `cached` is none of these.
    """
    if cached not in CACHED:
        raise ValueError(f"cached must be one of {', '.join(CACHED)}, got {cached!r}")
    return CACHED[cached]


@dataclasses.dataclass(frozen=True)
class Protocol:
    """Order of the prompts of a study, and how auxiliary prompts fill the cache.

    Attributes:
      arrangement: order of text and images in both prompts, one of `ARRANGEMENTS`.
      auxiliary: query of the auxiliary prompt: "related" (default), from the sample's list, or "neutral".
      donors: "together" (default): one auxiliary prompt with all images of the question; "apart": one for each image,
        for questions about several images; "alone": each image in a prompt without text; "neutral": each image at the
        beginning of a user's message, as `ImageCache.precompute` does.
      seed: number that selects queries and other texts.
    """

    arrangement: str
    auxiliary: str = "related"
    donors: str = "together"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, allowed in (
            ("arrangement", ARRANGEMENTS),
            ("auxiliary", ("related", "neutral")),
            ("donors", ("together", "apart", "alone", "neutral")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")

    @property
    def case(self) -> Protocol:
        """The protocol with seed 0, equal for protocols that differ in their seed only."""
        return dataclasses.replace(self, seed=0)

    def formal(self, samples: Sequence[Sample], i: int) -> list[dict[str, Any]]:
        """Return the conversation of sample `i`, which is answered and scored."""
        return self._conversation(samples[i], samples[i].images, samples[i].question, self._other(i))

    def donor_prompts(self, samples: Sequence[Sample], i: int) -> list[Any]:
        """Return the conversations that fill the cache for sample `i`; for donors "alone", prompts."""
        sample = samples[i]
        if self.donors == "alone":
            return [{"prompt": ALONE, "multi_modal_data": {"image": image}} for image in sample.images]
        if self.donors == "neutral":
            contents = [[{"type": "image", "image": image}] for image in sample.images]
            return [[{"role": "user", "content": content}] for content in contents]
        groups = [sample.images] if self.donors == "together" else [(image,) for image in sample.images]
        other = self._other(i + 1 + (self.seed + i // len(OTHER_TEXTS)) % (len(OTHER_TEXTS) - 1))
        return [self._conversation(sample, images, self._query(sample, i, len(images)), other) for images in groups]

    def _other(self, i: int) -> str:
        return OTHER_TEXTS[i % len(OTHER_TEXTS)]

    def _query(self, sample: Sample, i: int, images: int) -> str:
        """Return a query related to sample `i`, but not its own question (VLCache, section 5.2)."""
        if self.auxiliary == "neutral":
            return NEUTRAL
        queries = [about[images > 1] for about in sample.related]
        first = i + self.seed
        turned = [queries[(first + k) % len(queries)] for k in range(len(queries))]
        return next(query for query in turned if query != sample.question)

    def _conversation(self, sample: Sample, images: Sequence[bytes], question: str, other: str) -> list[dict[str, Any]]:
        turn = user_turn(images, question, self.arrangement, other, numbered=sample.numbered)
        return [{"role": "user", "content": turn}]


@dataclasses.dataclass(frozen=True)
class AccuracyResult:
    """One question answered under one setting.

    Attributes:
      sample: index of the sample.
      text: the answer.
      score: score of the answer, from 0 to 1.
      squared_error: mean squared difference of the logits to the cold run, over positions and vocabulary. Both runs are
        given the cold answer.
      agree: positions of the cold answer at which the most likely token is that of the cold run.
      tokens: number of tokens of the cold answer.
      image_tokens: number of image tokens in the prompt.
      recomputed: number of image tokens computed in each layer, summed over images.
      rows: number of tokens computed, text included, in the mean over layers.
      bytes_read: bytes of KV that linking reads, and that `shift` reads and writes.
      seconds: time to prefill the prompt and the cold answer: that of the batch, divided by its samples.
    """

    sample: int
    text: str
    score: float
    squared_error: float
    agree: int
    tokens: int
    image_tokens: int
    recomputed: list[int]
    rows: float
    bytes_read: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Cold:
    """Baseline: the answers of a batch without reuse.

    Attributes:
      texts: the answers.
      forced: token ids of the answers, on which every setting is scored.
      logits: logits that predict these tokens, each [tokens, V].
      results: results of the cold run itself.
    """

    texts: list[str]
    forced: list[list[int]]
    logits: list[np.ndarray]
    results: list[AccuracyResult]


def answer_cold(
    llm: LLM, samples: Sequence[Sample], protocol: Protocol, chosen: Sequence[int], *, max_tokens: int
) -> Cold:
    """Answer the samples `chosen` without reuse, and score these answers."""
    formal = [protocol.formal(samples, i) for i in chosen]
    llm.reset_prefix_cache()
    outputs = llm.chat(formal, _greedy(max_tokens), reuse=COLD)
    answers = [output.outputs[0] for output in outputs]
    texts, forced = [answer.text for answer in answers], [list(answer.token_ids) for answer in answers]
    scores, seconds = _score(llm, formal, forced, COLD)
    logits = [score.logits for score in scores]
    return Cold(texts, forced, logits, _results(llm, samples, chosen, scores, texts, logits, seconds))


def evaluate(
    llm: LLM,
    samples: Sequence[Sample],
    settings: dict[str, Policy],
    protocol: Protocol,
    chosen: Sequence[int],
    cold: Cold,
    *,
    max_tokens: int,
) -> Iterator[tuple[str, list[AccuracyResult]]]:
    """Answer samples under every setting, from the cache that their auxiliary prompts filled.

    Args:
      llm: an open engine.
      samples: all samples.
      settings: policies by name.
      protocol: how the cache is filled.
      chosen: indices of samples that share no image.
      cold: their answers without reuse.
      max_tokens: maximum tokens of an answer.

    Returns:
      An iterator over (name of the setting, one result for each of `chosen`).

    Raises:
      ValueError: an image is not an exact or approximate hit as the protocol expects.
    """
    from vlcache_jax.reuse.policies import EPIC

    formal = [protocol.formal(samples, i) for i in chosen]
    alone = dataclasses.replace(protocol, donors="alone")
    filled = None
    for name, policy in sorted(settings.items(), key=lambda item: isinstance(item[1], EPIC)):
        donors = alone if isinstance(policy, EPIC) else protocol  # EPIC caches each image by itself
        if donors != filled:
            fill(llm, samples, donors, chosen)
            filled = donors
        expected = "exact" if (donors.arrangement, donors.donors) == ("image_first", "together") else "approximate"
        scores, texts, seconds = answer(llm, formal, cold, policy, max_tokens=max_tokens)
        for i, score in zip(chosen, scores, strict=True):
            if found := {image.match for image in score.cache.images} - {expected, "exact"}:
                least = llm.service.stored.kv.min_tokens
                raise ValueError(
                    f"images of row {samples[i].index} with reuse {name} must be {expected} cache hits, "
                    f"got {', '.join(sorted(found))}"
                    + f"; an image of this model is stored if it has at least {least} tokens"
                    * (least > 1)
                )
        moved = getattr(policy, "shift", False)
        yield name, _results(llm, samples, chosen, scores, texts, cold.logits, seconds, moved=moved)


def fill(llm: LLM, samples: Sequence[Sample], protocol: Protocol, chosen: Sequence[int]) -> None:
    """Empty the cache and fill it by the auxiliary prompts of the samples `chosen`."""
    llm.reset_mm_cache()
    donors = [prompt for i in chosen for prompt in protocol.donor_prompts(samples, i)]
    run = llm.generate if protocol.donors == "alone" else llm.chat
    run(donors, _greedy(1), reuse="exact")
    llm.cache.flush()


def answer(
    llm: LLM, formal: Sequence[Any], cold: Cold, policy: Policy, *, max_tokens: int
) -> tuple[list[Any], list[str], float]:
    """Return (scores of the cold answers under a policy, answers under the policy, seconds of the scoring)."""
    scores, seconds = _score(llm, formal, cold.forced, policy)
    texts = list(cold.texts)
    # If every token of the cold answer is the most likely one, the policy's answer is the cold answer.
    other = [k for k, score in enumerate(scores) if not score.greedy.all()]
    if other:
        llm.reset_prefix_cache()
        answers = llm.chat([formal[k] for k in other], _greedy(max_tokens), reuse=policy)
        for k, output in zip(other, answers, strict=True):
            texts[k] = output.outputs[0].text
    return scores, texts, seconds


def _greedy(max_tokens: int) -> SamplingParams:
    from vlcache_jax import SamplingParams

    return SamplingParams(max_tokens=max_tokens, temperature=0)


def _score(llm: LLM, formal: Sequence[Any], forced: list[list[int]], reuse: Any) -> tuple[list[Any], float]:
    """Return (scores of the forced answers, seconds). Scores again if programs were compiled meanwhile."""
    programs = llm.service.device.runner.programs
    while True:
        llm.reset_prefix_cache()  # pages of earlier runs would be exact hits
        compiled, start = programs.num_programs, time.perf_counter()
        scores = llm.score(formal, forced, reuse=reuse, keep_logits=True)
        if programs.num_programs == compiled:
            return scores, time.perf_counter() - start


def _results(
    llm: LLM,
    samples: Sequence[Sample],
    chosen: Sequence[int],
    scores: Sequence[Any],
    texts: Sequence[str],
    reference: Sequence[np.ndarray],
    seconds: float,
    *,
    moved: bool = False,
) -> list[AccuracyResult]:
    kv = llm.service.stored.kv
    results = []
    for i, found, text, cold in zip(chosen, scores, texts, reference, strict=True):
        images, rows = found.cache.images, found.cache.rows
        read = sum(image.bytes_moved for image in images)
        if moved:  # in all layers but the first, whose KV does not depend on the context
            # If some layers have no KV, all compute the same tokens, so the last counts are those of layers with KV.
            tokens = sum(image.tokens - fresh for image in images for fresh in image.recomputed[1:][-kv.layers :])
            read += 2 * tokens * kv.slot_bytes // kv.layers
        results.append(
            AccuracyResult(
                sample=i,
                text=text,
                score=samples[i].score(text),
                squared_error=float(np.mean(np.square(found.logits - cold))),
                agree=int((found.logits.argmax(-1) == cold.argmax(-1)).sum()),
                tokens=len(cold),
                image_tokens=sum(image.tokens for image in images),
                recomputed=np.sum([image.recomputed for image in images], axis=0).tolist(),
                rows=float(np.mean(rows)) - len(cold),
                bytes_read=read,
                seconds=seconds / len(chosen),
            )
        )
    return results


def engine_options(config: ModelConfig, settings: dict[str, Policy], samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the options of an engine that evaluates `settings` on the samples.

    A model with states links images by the engine's own policy, the only one of `settings`, and needs slots for the
    maps of prompts that run together. Prefix caching has these slots.
    """
    from vlcache_jax.device.checkpoint import links_images
    from vlcache_jax.study.model_support import slots_for

    if links_images(config):
        return {"enable_prefix_caching": False}
    [policy] = settings.values()
    images = max(len(sample.images) for sample in samples)
    return {"reuse": policy, "max_num_seqs": RUNNING, "state_snapshots": slots_for(images, RUNNING)}


def batches(samples: Sequence[Sample], size: int, numbers: Iterable[int] | None = None) -> Iterator[list[int]]:
    """Yield batches of sample indices.

    Samples of a batch share no image, so that each sample has only hits of its own donors.

    Args:
      samples: all samples.
      size: maximum samples of a batch.
      numbers: indices of the samples to use; None (default): all.
    """
    waiting = list(range(len(samples)) if numbers is None else numbers)
    while waiting:
        seen: set[bytes] = set()
        batch: list[int] = []
        later: list[int] = []
        for i in waiting:
            keys = {hashlib.sha256(image).digest() for image in samples[i].images}
            if len(batch) < size and not keys & seen:
                batch.append(i)
                seen |= keys
            else:
                later.append(i)
        yield batch
        waiting = later


def name_settings(settings: Sequence[str], config: ModelConfig | None = None) -> dict[str, Policy]:
    """Return the policies of settings by name. The name of a schedule is that of its file, without the folder.

    Args:
      settings: values of `reuse`.
      config: configuration of the model, on which the policy of "approximate" depends; None: it has KV in each layer.

    Raises:
      ValueError: two settings have the same name or policy, or a setting is no valid `reuse`.
    """
    from vlcache_jax.device.checkpoint import policy_for
    from vlcache_jax.reuse.policies import Scheduled
    from vlcache_jax.reuse.selection import parse_policy

    named: dict[str, Policy] = {}
    policies: dict[Policy, str] = {}
    for setting in settings:
        name = setting
        policy = parse_policy(setting) if config is None else policy_for(setting, config)
        if not policy.approximates:
            raise ValueError(
                f"reuse must be an approximate mode (approximate, full, a ratio, a schedule), got {setting!r}"
            )
        if getattr(policy, "schedule", None) is not None:
            prefix = "" if isinstance(policy, Scheduled) else setting.partition("-")[0] + "-"
            name = prefix + pathlib.Path(setting.removeprefix(prefix)).name
        if name in named or policy in policies:
            raise ValueError(
                f"reuse must not list a setting twice, got {setting!r} after {policies.get(policy, name)!r}"
            )
        named[name] = policy
        policies[policy] = setting
    return named


def protocols_of(orders: Iterable[str], donors: Iterable[str] | None, seeds: int, **more: str) -> list[Protocol]:
    """Return a protocol for each arrangement in `orders`, each of `donors` and each seed below `seeds`.

    Args:
      orders: values of `Protocol.arrangement`.
      donors: values of `Protocol.donors`; None: "together" and "apart".
      seeds: number of seeds.
      more: other attributes of `Protocol`.
    """
    return [
        Protocol(order, donors=filled, seed=seed, **more)
        for order in dict.fromkeys(orders)
        for filled in dict.fromkeys(donors or ("together", "apart"))
        for seed in range(seeds)
    ]


def possible(protocols: Sequence[Protocol], samples: Sequence[Sample]) -> list[Protocol]:
    """Return the protocols that fit the samples.

    If all questions show one image, those with donors "apart" are left out, unless there are no others.
    """
    together = [protocol for protocol in protocols if protocol.donors != "apart"]
    return together if together and all(len(sample.images) == 1 for sample in samples) else list(protocols)


def run(
    llm: LLM,
    samples: Sequence[Sample],
    settings: dict[str, Policy],
    protocols: Sequence[Protocol],
    *,
    max_tokens: int = 32,
    batch: int = 50,
    work: pathlib.Path | None = None,
) -> dict[Protocol, dict[str, list[AccuracyResult]]]:
    """Evaluate all samples under all protocols. Results in the file `work` are not computed again.

    Protocols with donors "apart" evaluate only questions about several images. For one image they equal "together".

    Args:
      llm: an open engine.
      samples: the questions.
      settings: policies by name.
      protocols: protocols to evaluate.
      max_tokens: maximum tokens of an answer.
      batch: maximum samples that share the cache.
      work: file of finished parts, which a later run resumes; None (default): no file.

    Returns:
      For each protocol and setting, including `COLD`, one result for each sample, in order.

    Raises:
      ValueError: a schedule was made for another model, all questions show one image but donors are "apart", or `work`
        is another kind of file.
    """
    for policy in settings.values():
        llm.service.policy_of(policy)
    # Parts that a former run finished are read from the file.
    log = WorkLog(work, identity(llm, samples, max_tokens))
    several = [i for i, sample in enumerate(samples) if len(sample.images) > 1]
    if not several and any(protocol.donors == "apart" for protocol in protocols):
        raise ValueError("donors must be together for questions with one image, got apart; remove --cached separately")
    all_results: dict[Protocol, dict[str, list[AccuracyResult]]] = {}
    # Protocols of one case differ in their seed only, and share their cold answers.
    groups: dict[Protocol, list[Protocol]] = {}
    for protocol in protocols:
        groups.setdefault(protocol.case, []).append(protocol)
        all_results[protocol] = {name: [] for name in (COLD, *settings)}
    of_case = {case: several if case.donors == "apart" else range(len(samples)) for case in groups}
    work_list = [(case, chosen) for case, own in of_case.items() for chosen in batches(samples, batch, own)]
    with Progress("questions", sum(len(groups[case]) * len(own) for case, own in of_case.items())) as bar:
        for case, chosen in work_list:
            group = groups[case]
            cold: Cold | None = None  # the same for all seeds
            for protocol in group:
                keys = {
                    name: json.dumps([dataclasses.asdict(protocol), chosen, repr(policy)])
                    for name, policy in {COLD: COLD, **settings}.items()
                }
                # Compute missing parts: the cold run first, because settings are compared with it.
                missing = {name: policy for name, policy in settings.items() if log.get(keys[name]) is None}
                if missing or log.get(keys[COLD]) is None:
                    cold = cold or answer_cold(llm, samples, protocol, chosen, max_tokens=max_tokens)
                    if log.get(keys[COLD]) is None:
                        log.add(keys[COLD], [dataclasses.astuple(row) for row in cold.results])
                    for name, rows in evaluate(llm, samples, missing, protocol, chosen, cold, max_tokens=max_tokens):
                        log.add(keys[name], [dataclasses.astuple(row) for row in rows])
                # Take results from the log, so that a resumed run returns the same as one without interruption.
                for name, key in keys.items():
                    all_results[protocol][name] += [AccuracyResult(*row) for row in log.get(key)]
                bar.update(len(chosen))
    return {
        protocol: {name: sorted(rows, key=lambda result: result.sample) for name, rows in by_setting.items()}
        for protocol, by_setting in all_results.items()
    }


def identity(llm: LLM, samples: Sequence[DataclassInstance], max_tokens: int) -> str:
    """Return a digest of weights, dtype, `max_tokens` and questions, which identifies finished parts of work."""
    digest = hashlib.sha256(repr((llm.fingerprint, str(llm.service.device.runner.dtype), max_tokens)).encode())
    for sample in samples:
        digest.update(repr(dataclasses.astuple(sample)).encode())
    return digest.hexdigest()[:16]
