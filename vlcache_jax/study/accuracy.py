"""Accuracy under reuse: the same questions cold and with their images reused.

The protocol of the VLCache paper (section 5.2): an auxiliary prompt with the same images and another query fills the
cache, then the formal prompt is answered with reuse. Every setting answers every question, so differences are paired.
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
    from vlcache_jax.reuse.policies import Policy

COLD = "off"
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
# What an image is compiled behind that is compiled alone: the token that each image begins with (EPIC).
ALONE = "<|vision_start|><|image_pad|><|vision_end|>"


def behind(arrangement: str) -> str:
    """The arrangement, if something stands before the images in it.

    Raises:
      ValueError: nothing does, so that reuse is exact, or there is no such arrangement.
    """
    if arrangement not in ARRANGEMENTS[1:]:
        raise ValueError(f"arrangement must be {' or '.join(ARRANGEMENTS[1:])}, got {arrangement!r}")
    return arrangement


@dataclasses.dataclass(frozen=True)
class Protocol:
    """How the cache is filled.

    Attributes:
      arrangement: of both prompts.
      auxiliary: query of the auxiliary prompt: "related", of the sample's fixed list, or "neutral".
      donors: "together": one auxiliary prompt with all images of the question; "apart": one for each image, of
        questions about several; "alone": each image for itself, behind nothing.
      seed: chooses queries and other texts.
    """

    arrangement: str
    auxiliary: str = "related"
    donors: str = "together"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, allowed in (
            ("arrangement", ARRANGEMENTS),
            ("auxiliary", ("related", "neutral")),
            ("donors", ("together", "apart", "alone")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")

    @property
    def case(self) -> Protocol:
        """What it has in common with those that differ in their seed alone: it, with seed 0."""
        return dataclasses.replace(self, seed=0)

    def formal(self, samples: Sequence[Sample], i: int) -> list[dict[str, Any]]:
        """The conversation that is answered."""
        return self._conversation(samples[i], samples[i].images, samples[i].question, self._other(i))

    def donor_prompts(self, samples: Sequence[Sample], i: int) -> list[Any]:
        """The conversations that fill the cache before it; of donors "alone", prompts."""
        sample = samples[i]
        if self.donors == "alone":
            return [{"prompt": ALONE, "multi_modal_data": {"image": image}} for image in sample.images]
        groups = [sample.images] if self.donors == "together" else [(image,) for image in sample.images]
        other = self._other(i + 1 + (self.seed + i // len(OTHER_TEXTS)) % (len(OTHER_TEXTS) - 1))
        return [self._conversation(sample, images, self._query(sample, i, len(images)), other) for images in groups]

    def _other(self, i: int) -> str:
        return OTHER_TEXTS[i % len(OTHER_TEXTS)]

    def _query(self, sample: Sample, i: int, images: int) -> str:
        """A related query, by the sample's number (VLCache, section 5.2; algorithm specification C.1); not its own."""
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
      sample: number of the sample.
      text: the answer.
      score: how right it is, from 0 to 1.
      squared_error: mean over positions and vocabulary of the squared difference of logits to the cold run, both given
        the cold answer.
      agree, tokens: positions of the cold answer at which the most likely token is the cold run's, and all of them.
      image_tokens: in the prompt.
      recomputed: image rows computed in each layer, summed over images.
      rows: rows computed in the mean over layers, text included.
      bytes_read: of stored keys and values, brought in or moved: what linking reads, and what `shift` reads and writes.
      seconds: of prefilling prompt and cold answer; its share of the batch's.
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
    """What is compared with: answers of a batch computed without any reuse.

    Attributes:
      texts: answers.
      forced: their tokens, which every setting is scored on.
      logits: at those tokens, each [tokens, V].
      results: of the cold run itself.
    """

    texts: list[str]
    forced: list[list[int]]
    logits: list[np.ndarray]
    results: list[AccuracyResult]


def answer_cold(
    llm: LLM, samples: Sequence[Sample], protocol: Protocol, chosen: Sequence[int], *, max_tokens: int
) -> Cold:
    """Answers some samples without reuse, and scores those answers."""
    formal = [protocol.formal(samples, i) for i in chosen]
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
    """Answers some samples under every setting, one after the other, from the cache that their donors filled.

    Args:
      settings: by name.
      chosen: numbers of samples that share no image.
      cold: their answers without reuse.

    Raises:
      ValueError: an image was not found in the cache as the protocol says.
    """
    from vlcache_jax.reuse.policies import EPIC, Spread

    formal = [protocol.formal(samples, i) for i in chosen]
    alone = dataclasses.replace(protocol, donors="alone")
    filled = None
    for name, policy in sorted(settings.items(), key=lambda item: isinstance(item[1], EPIC)):
        donors = alone if isinstance(policy, EPIC) else protocol  # EPIC's records are compiled alone
        if donors != filled:
            fill(llm, samples, donors, chosen)
            filled = donors
        expected = "exact" if (donors.arrangement, donors.donors) == ("image_first", "together") else "approximate"
        scores, texts, seconds = answer(llm, formal, cold, policy, max_tokens=max_tokens)
        for i, score in zip(chosen, scores, strict=True):
            if found := {image.match for image in score.cache.images} - {expected, "exact"}:
                raise ValueError(
                    f"images of row {samples[i].index} under {name} must be found as {expected}, "
                    f"got {', '.join(sorted(found))}"
                )
        moved = isinstance(policy, Spread) and policy.shift
        yield name, _results(llm, samples, chosen, scores, texts, cold.logits, seconds, moved=moved)


def fill(llm: LLM, samples: Sequence[Sample], protocol: Protocol, chosen: Sequence[int]) -> None:
    """Empties the cache and lets the donors of some samples fill it."""
    llm.reset_mm_cache()
    donors = [prompt for i in chosen for prompt in protocol.donor_prompts(samples, i)]
    run = llm.generate if protocol.donors == "alone" else llm.chat
    run(donors, _greedy(1), reuse="exact")
    llm.cache.flush()


def answer(
    llm: LLM, formal: Sequence[Any], cold: Cold, policy: Policy, *, max_tokens: int
) -> tuple[list[Any], list[str], float]:
    """Scores of the cold answers under a policy, the policy's own answers, and the seconds that the scores took."""
    scores, seconds = _score(llm, formal, cold.forced, policy)
    texts = list(cold.texts)
    # Where every token of the cold answer is the most likely one, it is the answer.
    other = [k for k, score in enumerate(scores) if not score.greedy.all()]
    if other:
        answers = llm.chat([formal[k] for k in other], _greedy(max_tokens), reuse=policy)
        for k, output in zip(other, answers, strict=True):
            texts[k] = output.outputs[0].text
    return scores, texts, seconds


def _greedy(max_tokens: int) -> SamplingParams:
    from vlcache_jax import SamplingParams

    return SamplingParams(max_tokens=max_tokens, temperature=0)


def _score(llm: LLM, formal: Sequence[Any], forced: list[list[int]], reuse: Any) -> tuple[list[Any], float]:
    """Scores of the forced answers, and the seconds it took; where programs were compiled, a second time."""
    programs = llm.service.device.runner.programs
    while True:
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
        if moved:  # in all layers but the first, whose K, V know no context
            tokens = sum(image.tokens - fresh for image in images for fresh in image.recomputed[1:])
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


def batches(samples: Sequence[Sample], size: int, numbers: Iterable[int] | None = None) -> Iterator[list[int]]:
    """Numbers of samples in batches of at most `size` that share no image, so that each meets its own donors only.

    Args:
      numbers: of the samples; None is all.
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


def name_settings(settings: Sequence[str]) -> dict[str, Policy]:
    """Policies by name. Schedule files are read, and called as they are without their folder.

    Raises:
      ValueError: two have one name or are the same, or `reuse` cannot be such a thing.
    """
    from vlcache_jax.reuse.policies import Scheduled
    from vlcache_jax.reuse.selection import parse_policy

    named: dict[str, Policy] = {}
    policies: dict[Policy, str] = {}
    for setting in settings:
        name = setting
        policy = parse_policy(setting)
        if not policy.approximates:
            raise ValueError(f"reuse must link images behind something else, to be compared with cold, got {setting!r}")
        if getattr(policy, "schedule", None) is not None:
            prefix = "" if isinstance(policy, Scheduled) else setting.partition("-")[0] + "-"
            name = prefix + pathlib.Path(setting.removeprefix(prefix)).name
        if name in named or policy in policies:
            raise ValueError(f"reuse must name each setting once, got {setting!r} after {policies.get(policy, name)!r}")
        named[name] = policy
        policies[policy] = setting
    return named


def protocols_of(orders: Iterable[str], donors: Iterable[str] | None, seeds: int, **more: str) -> list[Protocol]:
    """Every order of the prompt with every way of filling the cache, by default together and apart, each so many
    times."""
    return [
        Protocol(order, donors=filled, seed=seed, **more)
        for order in dict.fromkeys(orders)
        for filled in dict.fromkeys(donors or ("together", "apart"))
        for seed in range(seeds)
    ]


def possible(protocols: Sequence[Protocol], samples: Sequence[Sample]) -> list[Protocol]:
    """Those that questions allow: about one image each they know no images apart, unless nothing else is asked for."""
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
    """Evaluates all samples under all protocols; settings whose answers are in the file `work` are not run again.

    Protocols with donors "apart" evaluate questions about several images alone: for others they are those "together".

    Returns:
      For each protocol and setting, one result a sample, in their order.

    Raises:
      ValueError: a schedule of another model, no question about several images though donors are apart, or `work` is
        another kind of file.
    """
    for policy in settings.values():
        llm.service.policy_of(policy)
    # What a former run has finished is read from the file.
    log = WorkLog(work, identity(llm, samples, max_tokens))
    several = [i for i, sample in enumerate(samples) if len(sample.images) > 1]
    if not several and any(protocol.donors == "apart" for protocol in protocols):
        raise ValueError("donors must be together where every question shows one image, got apart")
    all_results: dict[Protocol, dict[str, list[AccuracyResult]]] = {}
    # Protocols of one case differ in their seed alone, and share their cold answers.
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
                # What is not in the file is answered: cold first, as the settings are compared with it.
                missing = {name: policy for name, policy in settings.items() if log.get(keys[name]) is None}
                if missing or log.get(keys[COLD]) is None:
                    cold = cold or answer_cold(llm, samples, protocol, chosen, max_tokens=max_tokens)
                    if log.get(keys[COLD]) is None:
                        log.add(keys[COLD], [dataclasses.astuple(row) for row in cold.results])
                    for name, rows in evaluate(llm, samples, missing, protocol, chosen, cold, max_tokens=max_tokens):
                        log.add(keys[name], [dataclasses.astuple(row) for row in rows])
                # From the file, so that a run that goes on gives what an unbroken one does.
                for name, key in keys.items():
                    all_results[protocol][name] += [AccuracyResult(*row) for row in log.get(key)]
                bar.update(len(chosen))
    return {
        protocol: {name: sorted(rows, key=lambda result: result.sample) for name, rows in by_setting.items()}
        for protocol, by_setting in all_results.items()
    }


def identity(llm: LLM, samples: Sequence[DataclassInstance], max_tokens: int) -> str:
    """What finished parts of work belong to: the weights, their dtype, and the questions."""
    digest = hashlib.sha256(repr((llm.fingerprint, str(llm.service.device.runner.dtype), max_tokens)).encode())
    for sample in samples:
        digest.update(repr(dataclasses.astuple(sample)).encode())
    return digest.hexdigest()[:16]
