"""Accuracy under reuse: the same questions cold and with their images reused.

The protocol of the VLCache paper (section 5.2): an auxiliary prompt with the same images and another query fills the
cache, then the formal prompt is answered with reuse. Every setting answers every question, so differences are paired.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vlcache_jax.progress import Progress
from vlcache_jax.study.questions import ARRANGEMENTS, Sample, rows_of_questions, user_turn
from vlcache_jax.study.worklog import WorkLog

if TYPE_CHECKING:
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
_RESAMPLES, _AT_ONCE = 10_000, 1_000  # at once, as fractions have many different values


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
      auxiliary: query of the auxiliary prompt: "related", another question of the same file, or "neutral".
      donors: "together": one auxiliary prompt with all images of the question; "apart": one for each image.
      seed: chooses queries and other texts.
    """

    arrangement: str
    auxiliary: str = "related"
    donors: str = "together"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, allowed in (
            ("arrangement", ARRANGEMENTS), ("auxiliary", ("related", "neutral")), ("donors", ("together", "apart"))
        ):  # fmt: skip
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")

    @property
    def case(self) -> Protocol:
        """What it has in common with those that differ in their seed alone: it, with seed 0."""
        return dataclasses.replace(self, seed=0)

    @property
    def title(self) -> str:
        return f"{self.arrangement.replace('_', ' ')}, donors {self.donors}"

    def formal(self, samples: Sequence[Sample], i: int) -> list[dict[str, Any]]:
        """The conversation that is answered."""
        return self._conversation(samples[i], samples[i].images, samples[i].question, self._other(i))

    def donor_prompts(self, samples: Sequence[Sample], i: int) -> list[list[dict[str, Any]]]:
        """The conversations that fill the cache before it."""
        sample = samples[i]
        query = NEUTRAL if self.auxiliary == "neutral" else self._related(samples, i)
        groups = [sample.images] if self.donors == "together" else [(image,) for image in sample.images]
        other = self._other(i + 1 + (self.seed + i // len(OTHER_TEXTS)) % (len(OTHER_TEXTS) - 1))
        return [self._conversation(sample, images, query, other) for images in groups]

    def _other(self, i: int) -> str:
        return OTHER_TEXTS[i % len(OTHER_TEXTS)]

    def _related(self, samples: Sequence[Sample], i: int) -> str:
        """Another question of the task about as many images; the step to it differs from sample to sample."""
        sample = samples[i]
        step = 1 + (7 * self.seed + 3 * i) % 97
        for k in range(len(samples)):
            other = samples[(i + step + k) % len(samples)]
            alike = other.task == sample.task and len(other.images) == len(sample.images)
            if alike and other.question != sample.question:
                return other.question
        return NEUTRAL

    def _conversation(self, sample: Sample, images: Sequence[bytes], question: str, other: str) -> list[dict[str, Any]]:
        turn = user_turn(images, question, self.arrangement, other, numbered=sample.numbered)
        return [{"role": "user", "content": turn}]


@dataclasses.dataclass(frozen=True)
class Result:
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
      seconds: of prefilling prompt and cold answer; its share of the batch's, compilation included where it is new.
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
    results: list[Result]


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
    return Cold(texts, forced, logits, _results(samples, chosen, scores, texts, logits, seconds))


def evaluate(
    llm: LLM,
    samples: Sequence[Sample],
    settings: dict[str, Policy],
    protocol: Protocol,
    chosen: Sequence[int],
    cold: Cold,
    *,
    max_tokens: int,
) -> Iterator[tuple[str, list[Result]]]:
    """Answers some samples under every setting, one after the other, from the cache that their donors filled.

    Args:
      settings: by name.
      chosen: numbers of samples that share no image.
      cold: their answers without reuse.

    Raises:
      ValueError: an image was not found in the cache as the protocol says.
    """
    fill(llm, samples, protocol, chosen)
    formal = [protocol.formal(samples, i) for i in chosen]
    expected = "exact" if protocol.arrangement == "image_first" and protocol.donors == "together" else "approximate"
    for name, policy in settings.items():
        scores, texts, seconds = answer(llm, formal, cold, policy, max_tokens=max_tokens)
        for i, score in zip(chosen, scores, strict=True):
            if found := {image.match for image in score.cache.images} - {expected, "exact"}:
                raise ValueError(
                    f"images of row {samples[i].index} under {name} must be found as {expected}, "
                    f"got {', '.join(sorted(found))}"
                )
        yield name, _results(samples, chosen, scores, texts, cold.logits, seconds)


def fill(llm: LLM, samples: Sequence[Sample], protocol: Protocol, chosen: Sequence[int]) -> None:
    """Empties the cache and lets the donors of some samples fill it."""
    llm.reset_mm_cache()
    donors = [prompt for i in chosen for prompt in protocol.donor_prompts(samples, i)]
    llm.chat(donors, _greedy(1), reuse="exact")
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
    """Scores of the forced answers, and the seconds it took."""
    start = time.perf_counter()
    scores = llm.score(formal, forced, reuse=reuse, keep_logits=True)
    return scores, time.perf_counter() - start


def _results(
    samples: Sequence[Sample],
    chosen: Sequence[int],
    scores: Sequence[Any],
    texts: Sequence[str],
    reference: Sequence[np.ndarray],
    seconds: float,
) -> list[Result]:
    results = []
    for i, found, text, cold in zip(chosen, scores, texts, reference, strict=True):
        images, rows = found.cache.images, found.cache.rows
        results.append(
            Result(
                sample=i,
                text=text,
                score=samples[i].score(text),
                squared_error=float(np.mean(np.square(found.logits - cold))),
                agree=int((found.logits.argmax(-1) == cold.argmax(-1)).sum()),
                tokens=len(cold),
                image_tokens=sum(image.tokens for image in images),
                recomputed=np.sum([image.recomputed for image in images], axis=0).tolist(),
                rows=float(np.mean(rows)) - len(cold),
                seconds=seconds / len(chosen),
            )
        )
    return results


def batches(samples: Sequence[Sample], size: int) -> Iterator[list[int]]:
    """Numbers of samples in batches of at most `size` that share no image, so that each meets its own donors only."""
    waiting = list(range(len(samples)))
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
    from vlcache_jax.reuse.parse import parse_policy
    from vlcache_jax.reuse.policies import Scheduled

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


def run(
    llm: LLM,
    samples: Sequence[Sample],
    settings: dict[str, Policy],
    protocols: Sequence[Protocol],
    *,
    max_tokens: int = 32,
    batch: int = 50,
    work: pathlib.Path | None = None,
) -> dict[Protocol, dict[str, list[Result]]]:
    """Evaluates all samples under all protocols; settings whose answers are in the file `work` are not run again.

    Returns:
      For each protocol and setting, one result a sample, in their order.

    Raises:
      ValueError: a schedule of another model, or `work` is another kind of file.
    """
    for policy in settings.values():
        llm._parse_policy(policy)
    log = WorkLog(work, _identity(llm, samples, max_tokens))
    parts = list(batches(samples, batch))
    all_results: dict[Protocol, dict[str, list[Result]]] = {}
    groups: dict[Protocol, list[Protocol]] = {}
    for protocol in protocols:
        groups.setdefault(protocol.case, []).append(protocol)
        all_results[protocol] = {name: [] for name in (COLD, *settings)}
    with Progress("questions", len(protocols) * len(samples)) as bar:
        for chosen, group in itertools.product(parts, groups.values()):
            cold: Cold | None = None  # the same for all seeds
            for protocol in group:
                keys = {
                    name: json.dumps([dataclasses.asdict(protocol), chosen, repr(policy)])
                    for name, policy in {COLD: COLD, **settings}.items()
                }
                missing = {name: policy for name, policy in settings.items() if log.get(keys[name]) is None}
                if missing or log.get(keys[COLD]) is None:
                    cold = cold or answer_cold(llm, samples, protocol, chosen, max_tokens=max_tokens)
                    if log.get(keys[COLD]) is None:
                        log.add(keys[COLD], [dataclasses.astuple(row) for row in cold.results])
                    for name, rows in evaluate(llm, samples, missing, protocol, chosen, cold, max_tokens=max_tokens):
                        log.add(keys[name], [dataclasses.astuple(row) for row in rows])
                for name, key in keys.items():
                    all_results[protocol][name] += [Result(*row) for row in log.get(key)]
                bar.update(len(chosen))
    return {
        protocol: {name: sorted(rows, key=lambda result: result.sample) for name, rows in by_setting.items()}
        for protocol, by_setting in all_results.items()
    }


def _identity(llm: LLM, samples: Sequence[Sample], max_tokens: int) -> str:
    digest = hashlib.sha256(repr((llm.fingerprint, str(llm._runner.dtype), max_tokens)).encode())
    for sample in samples:
        digest.update(repr(dataclasses.astuple(sample)).encode())
    return digest.hexdigest()[:16]


def by_question(samples: Sequence[Sample], results: Sequence[Result]) -> list[float]:
    """Scores of questions: of one with several rows, the least of theirs."""
    scores = [result.score for result in results]
    return [min(scores[k] for k in rows) for rows in rows_of_questions([samples[result.sample] for result in results])]


def paired(cold: npt.ArrayLike, other: npt.ArrayLike, seed: int = 0) -> dict[str, float]:
    """Difference of accuracies in points, its bootstrap interval of 95 % and the p of McNemar's test.

    With several auxiliary prompts, a question's mean difference is one observation, for the interval (a bootstrap over
    questions) and for the test. The test is exact where every difference is -1, 0 or 1; with fractions between them it
    is the asymptotic form, their sum over the root of the sum of their squares.

    Args:
      cold, other: scores from 0 to 1, for the same questions in the same order, [questions] or [prompts, questions].
        Rows that are one question count once: see `by_question`.
    """
    from scipy import stats

    before, after = np.atleast_2d(np.asarray(cold, float)), np.atleast_2d(np.asarray(other, float))
    change = (after - before).mean(0)
    n = len(change)
    # A resample of questions is a multinomial draw of how many have each of the different differences.
    values, counts = np.unique(change, return_counts=True)
    rng = np.random.default_rng(seed)
    drawn = [rng.multinomial(n, counts / n, _AT_ONCE) @ values / n for _ in range(_RESAMPLES // _AT_ONCE)]
    low, high = np.percentile(np.concatenate(drawn), [2.5, 97.5])
    if not change.any():
        p = 1.0
    elif np.isin(change, (-1, 0, 1)).all():
        p = stats.binomtest(int((change > 0).sum()), int((change != 0).sum())).pvalue
    else:
        p = 2 * stats.norm.sf(abs(change.sum()) / np.sqrt(np.square(change).sum()))
    return {"difference": 100 * change.mean(), "low": 100 * low, "high": 100 * high, "p": float(p)}


def by_case(results: dict[Protocol, dict[str, list[Result]]]) -> dict[Protocol, list[dict[str, list[Result]]]]:
    """Results by setting of the protocols that differ in their seed alone, under what they have in common."""
    cases: dict[Protocol, list[dict[str, list[Result]]]] = {}
    for protocol, by_setting in results.items():
        cases.setdefault(protocol.case, []).append(by_setting)
    return cases


def summarize(
    samples: Sequence[Sample], results: dict[Protocol, dict[str, list[Result]]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Tables: one row for each protocol, setting and task, and one for each protocol and setting.

    Protocols that differ in their seed alone are one: the same questions, several auxiliary prompts each. Means over
    tasks count every task alike; the worst task is the one that loses most against the cold run.
    """
    details: list[dict[str, Any]] = []
    totals: list[dict[str, Any]] = []
    tasks = list(dict.fromkeys(sample.task for sample in samples))
    for protocol, runs in by_case(results).items():
        shown = {key: value for key, value in dataclasses.asdict(protocol).items() if key != "seed"}
        for name in runs[0]:
            rows = []
            for task in tasks:
                own = [[result for result in run[name] if samples[result.sample].task == task] for run in runs]
                cold = [[result for result in run[COLD] if samples[result.sample].task == task] for run in runs]
                every = [result for found in own for result in found]
                share = np.sum([r.recomputed for r in every], axis=0) / sum(r.image_tokens for r in every)
                before, after = ([by_question(samples, found) for found in part] for part in (cold, own))
                rows.append(
                    {
                        **shown,
                        "reuse": name,
                        "task": task,
                        "questions": len(after[0]),
                        "auxiliary prompts": len(runs),
                        "accuracy": 100 * float(np.mean(after)),
                        **paired(before, after),
                        "logit MSE": float(np.mean([result.squared_error for result in every])),
                        "agreement": 100 * sum(r.agree for r in every) / sum(r.tokens for r in every),
                        "image rows": float(np.mean(share)),
                        "image rows by layer": share.tolist(),
                        "rows": float(np.mean([result.rows for result in every])),
                        "seconds": float(np.median([result.seconds for result in every])),
                    }
                )
            details += rows
            worst = min(rows, key=lambda row: row["difference"])
            totals.append(
                {
                    "arrangement": protocol.arrangement,
                    "donors": protocol.donors,
                    "reuse": name,
                    **{row["task"]: row["accuracy"] for row in rows},
                    "mean": float(np.mean([row["accuracy"] for row in rows])),
                    "worst": f"{worst['difference']:+.1f} {worst['task']}" if worst["difference"] < 0 else "-",
                    "agreement": float(np.mean([row["agreement"] for row in rows])),
                    "logit MSE": f"{np.mean([row['logit MSE'] for row in rows]):.1e}",
                    "image rows %": 100 * float(np.mean([row["image rows"] for row in rows])),
                    "ms": 1e3 * float(np.mean([row["seconds"] for row in rows])),
                }
            )
    return details, totals


def draw(details: Sequence[dict[str, Any]], path: pathlib.Path) -> None:
    """Draws accuracy and agreement against the share of image rows that are recomputed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = list(dict.fromkeys((row["arrangement"], row["donors"]) for row in details))
    tasks = list(dict.fromkeys(row["task"] for row in details))
    size = 4.2 * len(cases), 6.4
    figure, axes = pyplot.subplots(2, len(cases), figsize=size, squeeze=False, sharex=True, sharey="row")
    for column, case in enumerate(cases):
        for task in tasks:
            rows = [row for row in details if (row["arrangement"], row["donors"], row["task"]) == (*case, task)]
            reused = sorted((row for row in rows if row["reuse"] != COLD), key=lambda row: row["image rows"])
            share = [100 * row["image rows"] for row in reused]
            [line] = axes[0, column].plot(share, [row["difference"] for row in reused], "o-", label=task, markersize=3)
            axes[0, column].fill_between(
                share,
                [row["low"] for row in reused],
                [row["high"] for row in reused],
                alpha=0.15,
                color=line.get_color(),
            )
            axes[1, column].plot(share, [row["agreement"] for row in reused], "o-", markersize=3)
        axes[0, column].set_title(Protocol(case[0], donors=case[1]).title)
        axes[0, column].axhline(0, color="black", linewidth=0.5)
        axes[1, column].set_xlabel("image rows recomputed, %")
    axes[0, 0].set_ylabel("accuracy against cold, points")
    axes[1, 0].set_ylabel("most likely token agrees, %")
    axes[0, 0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
