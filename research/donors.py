"""Distance of reuse to no reuse, by the context in which an image's KV was computed (`python -m research.donors`).

Each question is answered from images of each kind of context: at the beginning of a conversation (neutral), after other
text, after an earlier turn about two other images, in the newest of three random contexts, after the image's number in
the question, and after another number. All kinds and policies answer the same questions, so differences are paired.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
import typer

from research.codecs import divergence
from vlcache_jax.assets import SCHEDULES, TINY_VQA
from vlcache_jax.benchmarks.tiny_vqa.splits import load_samples
from vlcache_jax.commands import options as opt
from vlcache_jax.common.files import check_writable
from vlcache_jax.common.progress import Progress, say_errors
from vlcache_jax.study.accuracy import COLD, Cold, Protocol, answer, answer_cold, batches, identity, name_settings
from vlcache_jax.study.pairs import interval, paired
from vlcache_jax.study.questions import Sample, user_turn
from vlcache_jax.study.report import WorkLog, environment, show, write

if TYPE_CHECKING:
    from vlcache_jax.llm import LLM
    from vlcache_jax.reuse.policies import Policy

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
NEUTRAL, AFTER_TEXT, AFTER_IMAGES, NEWEST = "neutral", "after text", "after images", "newest"
NUMBERED, MISNUMBERED = "after its number", "after another number"
KINDS = (NEUTRAL, AFTER_TEXT, AFTER_IMAGES, NEWEST, NUMBERED, MISNUMBERED)
SETTINGS = ("full", "approximate", "0.1", *map(str, SCHEDULES))
ARRANGEMENTS = ("image_first", "text_first")
IMAGES = ("one", "several")
DECOYS = 40  # questions about two images that precede an image in contexts of other traffic
MAX_TOKENS = 32
_BATCH = 50  # questions that share the cache
_CONTEXTS = 3  # of an image in natural traffic
_RESAMPLES = 2000  # of the bootstrap

Conversation = list[dict[str, Any]]


@dataclass(frozen=True)
class Linked:
    """A question answered from linked KV, next to its cold answer.

    Attributes:
      sample: Index of the question.
      score: Score of the answer, from 0 to 1.
      changed: Whether the answer differs from the cold answer.
      squared_error: Mean squared difference of the logits to the cold run, over the cold answer's tokens and the
        vocabulary.
      kl: Kullback-Leibler divergence from the cold run's probabilities, in nats, mean over the cold answer's tokens.
      text: The answer.
    """

    sample: int
    score: float
    changed: bool
    squared_error: float
    kl: float
    text: str = ""


@dataclass(frozen=True)
class DonorPrompts:
    """Prompts that cache the images of questions in contexts of one kind.

    Attributes:
      kind: One of `KINDS`.
      protocol: The protocol of the questions.
      decoys: Questions about other images.
    """

    kind: str
    protocol: Protocol
    decoys: Sequence[Sample]

    def rounds(self, samples: Sequence[Sample], i: int) -> list[list[Conversation]]:
        """Return the conversations that cache the images of sample `i`, in rounds of which the last is the newest."""
        rng = np.random.default_rng([i, 1 + KINDS.index(self.kind)])
        match self.kind:
            case "neutral":
                return [dataclasses.replace(self.protocol, donors="neutral").donor_prompts(samples, i)]
            case "after text":
                return [self._after_text(samples, i, 0)]
            case "after images":
                return [self._after_images(samples, i, rng)]
            case "after its number" | "after another number":
                places = range(len(samples[i].images))
                return [[_numbered(samples[i], k, other=self.kind == MISNUMBERED) for k in places]]
        every = [(self._after_text(samples, i, k), self._after_images(samples, i, rng)) for k in range(_CONTEXTS)]
        return [[both[int(rng.integers(2))] for both in zip(*pair, strict=True)] for pair in every]

    def _after_text(self, samples: Sequence[Sample], i: int, seed: int) -> list[Conversation]:
        other = dataclasses.replace(self.protocol, arrangement="text_first", donors="apart", seed=seed)
        return other.donor_prompts(samples, i)

    def _after_images(self, samples: Sequence[Sample], i: int, rng: np.random.Generator) -> list[Conversation]:
        """Return conversations with an earlier turn about two other images before each image of sample `i`."""
        apart = dataclasses.replace(self.protocol, arrangement="image_first", donors="apart").donor_prompts(samples, i)
        return [[*_turns(self.decoys[int(rng.integers(len(self.decoys)))]), *asked] for asked in apart]

    def expected(self, images: int) -> list[tuple[str, str | None]]:
        """Return the match and the donor that a report has for each image of a question about `images` images."""
        other = "approximate", NEUTRAL if self.kind == NEUTRAL else "own"
        is_same = self.protocol.arrangement == "image_first" and self.kind == (NUMBERED if images > 1 else NEUTRAL)
        return [("exact", None) if is_same and k == 0 else other for k in range(images)]


def _turns(decoy: Sample) -> Conversation:
    return [
        {"role": "user", "content": user_turn(decoy.images, decoy.question, "image_first", numbered=decoy.numbered)},
        {"role": "assistant", "content": decoy.answers[0]},
    ]


def _numbered(sample: Sample, k: int, *, other: bool) -> Conversation:
    """Return a conversation that begins with the number of image `k` in the question's prompt, and the image.

    If `other` is True, the number is another one: that of the other image, or "one" for a single image.
    """
    is_single = len(sample.images) == 1
    if not sample.numbered or (is_single and not other):
        raise ValueError(f"images of question {sample.index} must be numbered, got none with a number")
    shown = user_turn(sample.images * (1 + is_single), sample.question, "image_first")
    number = shown[2 * (k if is_single or not other else (k + 1) % len(sample.images))]
    return [{"role": "user", "content": [number, {"type": "image", "image": sample.images[k]}]}]


def cache(llm: LLM, rounds: Sequence[Sequence[Conversation]]) -> None:
    """Empty the cache and answer conversations with exact reuse, one round after the other."""
    from vlcache_jax import SamplingParams

    llm.reset_mm_cache()
    for prompts in rounds:
        llm.chat(prompts, SamplingParams(max_tokens=1, temperature=0), reuse="exact", use_tqdm=False)
        llm.cache.flush()  # what a later round caches is newer


def in_rounds(every: Sequence[list[list[Conversation]]]) -> list[list[Conversation]]:
    """Return the conversations of several questions by round."""
    return [[one for prompts in same for one in prompts] for same in zip(*every, strict=True)]


def ask_cold(llm: LLM, samples: Sequence[Sample], protocol: Protocol, chosen: Sequence[int]) -> Cold:
    """Answer the samples `chosen` without reuse.

    Raises:
      ValueError: An answer is empty.
    """
    cold = answer_cold(llm, samples, protocol, chosen, max_tokens=MAX_TOKENS)
    if empty := [samples[i].index for i, forced in zip(chosen, cold.forced, strict=True) if not forced]:
        raise ValueError(f"every answer must have tokens, got none for questions {', '.join(empty)}")
    return cold


def link(
    llm: LLM,
    samples: Sequence[Sample],
    protocol: Protocol,
    chosen: Sequence[int],
    cold: Cold,
    policy: Policy,
    expected: Mapping[int, Sequence[tuple[str, str | None]]],
    *,
    may_compute: bool = False,
) -> list[Linked]:
    """Answer the samples `chosen` under a policy from what is cached.

    Args:
      llm: An open engine.
      samples: All questions.
      protocol: Protocol of the questions.
      chosen: Indices of the questions.
      cold: Their answers without reuse.
      policy: An approximate policy.
      expected: Match and donor of each image, by the number of images of a question.
      may_compute: Whether the question may compute an image in whose own context it is expected.

    Raises:
      ValueError: An image was not linked from the expected donor.
    """
    formal = [protocol.formal(samples, i) for i in chosen]
    scores, texts, _ = answer(llm, formal, cold, policy, max_tokens=MAX_TOKENS)
    found = []
    for i, score, text, logits, before in zip(chosen, scores, texts, cold.logits, cold.texts, strict=True):
        same = "exact" if may_compute else "miss"
        donors = [(same if image.match == "miss" else image.match, image.donor) for image in score.cache.images]
        if donors != (right := list(expected[len(samples[i].images)])):
            raise ValueError(f"images of question {samples[i].index} must be linked as {right}, got {donors}")
        error = float(np.mean(np.square(score.logits - logits)))
        kl = float(divergence(logits, score.logits).mean())
        found.append(Linked(i, samples[i].score(text), text != before, error, kl, text))
    return found


def policies_of(settings: Sequence[str]) -> dict[str, Policy]:
    """Return policies by name. The name of a schedule is that of its file without `.json`."""
    return {name.removesuffix(".json"): policy for name, policy in name_settings(settings).items()}


def load_decoys(count: int = DECOYS) -> list[Sample]:
    """Return questions about two images each, of images that no question shows."""
    return load_samples([], questions=-(-count // 5), split="decoys", images=2)[:count]


Results = dict[tuple[str, str, str], list[Linked]]


def measure(
    llm: LLM, samples: Sequence[Sample], decoys: Sequence[Sample], policies: Mapping[str, Policy], log: WorkLog
) -> Results:
    """Answer all questions in each arrangement, from each kind of donors, under each policy.

    Args:
      llm: An open engine with `load="kv"` and without prefix caching.
      samples: The questions.
      decoys: Questions about other images.
      policies: Approximate policies by name.
      log: Finished parts, which are not computed again.

    Returns:
      Results of the questions in order, by arrangement, kind and policy; the cold run is of kind `COLD`.
    """
    results: Results = {}
    work = [(order, chosen) for order in ARRANGEMENTS for chosen in batches(samples, _BATCH)]
    with Progress("questions", len(ARRANGEMENTS) * len(samples)) as bar:
        for order, chosen in work:
            protocol = Protocol(order)
            keys = _keys(samples, order, chosen, policies)
            if any(log.get(key) is None for key in keys.values()):
                _measure_batch(llm, samples, DonorPrompts(NEUTRAL, protocol, decoys), chosen, policies, keys, log)
            for case, key in keys.items():
                results.setdefault((order, *case), []).extend(Linked(*one) for one in log.get(key))
            bar.update(len(chosen))
    return {case: sorted(found, key=lambda one: one.sample) for case, found in results.items()}


def _keys(
    samples: Sequence[Sample], order: str, chosen: Sequence[int], policies: Mapping[str, Policy]
) -> dict[tuple[str, str], str]:
    """Return the key in the log of each kind and policy."""
    kinds = [kind for kind in KINDS if _asked(samples, kind, chosen)]
    cases = [(COLD, COLD), *((kind, name) for kind in kinds for name in policies)]
    shown = {COLD: COLD, **{name: repr(policy) for name, policy in policies.items()}}
    return {case: json.dumps([order, case[0], shown[case[1]], list(chosen)]) for case in cases}


def _asked(samples: Sequence[Sample], kind: str, chosen: Sequence[int]) -> list[int]:
    """Return the questions of a kind: a single image has no number in its prompt."""
    return [i for i in chosen if kind != NUMBERED or len(samples[i].images) > 1]


def _measure_batch(
    llm: LLM,
    samples: Sequence[Sample],
    prompts: DonorPrompts,
    chosen: Sequence[int],
    policies: Mapping[str, Policy],
    keys: Mapping[tuple[str, str], str],
    log: WorkLog,
) -> None:
    """Add the missing parts of a batch to the log."""
    every = ask_cold(llm, samples, prompts.protocol, chosen)
    if log.get(keys[COLD, COLD]) is None:
        log.add(keys[COLD, COLD], [[one.sample, one.score, False, 0.0, 0.0, one.text] for one in every.results])
    for kind in dict.fromkeys(kind for kind, _ in keys if kind != COLD):
        if missing := [name for name in policies if log.get(keys[kind, name]) is None]:
            own = dataclasses.replace(prompts, kind=kind)
            asked = _asked(samples, kind, chosen)
            places = [list(chosen).index(i) for i in asked]
            texts, forced = [every.texts[k] for k in places], [every.forced[k] for k in places]
            cold = Cold(texts, forced, [every.logits[k] for k in places], [every.results[k] for k in places])
            cache(llm, in_rounds([own.rounds(samples, i) for i in asked]))
            expected = {count: own.expected(count) for count in {len(samples[i].images) for i in asked}}
            for name in missing:
                found = link(llm, samples, own.protocol, asked, cold, policies[name], expected)
                log.add(keys[kind, name], [list(dataclasses.astuple(one)) for one in found])


def mean_interval(values: npt.ArrayLike, of: str) -> dict[str, float]:
    """Return the mean of differences and its 95 % interval, which is that of the percentile bootstrap.

    Args:
      values: A difference for each question `[questions]`.
      of: Key of the mean, and prefix of the keys "low" and "high".
    """
    found = np.asarray(values, float)
    drawn = np.random.default_rng(0).integers(len(found), size=(_RESAMPLES, len(found)))
    low, high = np.percentile(found[drawn].mean(1), (2.5, 97.5))
    return {of: float(found.mean()), f"{of} low": float(low), f"{of} high": float(high)}


def table(samples: Sequence[Sample], results: Results) -> list[dict[str, Any]]:
    """Return a row for each arrangement, number of images, policy and kind of donors.

    Accuracies are percentages of questions, and their differences are in points. MSE is that of the logits, KL per
    token. "over neutral" compares with neutral donors, everything else with the cold run.
    """
    rows = []
    policies = list(dict.fromkeys(name for _, kind, name in results if kind != COLD))
    for order in dict.fromkeys(order for order, _, _ in results):
        for images in IMAGES:
            for name in policies:
                cases = [kind for kind in KINDS if (order, kind, name) in results]
                own = {kind: _of_images(samples, results[order, kind, name], images) for kind in cases}
                cold = _of_images(samples, results[order, COLD, COLD], images)
                shown = {"context": order, "images": images, "reuse": name}
                rows += [shown | _row(kind, found, own[NEUTRAL], cold) for kind, found in own.items() if found]
    return [{name: _rounded(value) for name, value in row.items()} for row in rows]


def _of_images(samples: Sequence[Sample], found: Sequence[Linked], images: str) -> list[Linked]:
    return [one for one in found if (len(samples[one.sample].images) > 1) == (images == "several")]


def _row(kind: str, found: Sequence[Linked], neutral: Sequence[Linked], cold: Sequence[Linked]) -> dict[str, Any]:
    scores, usual, before = ([one.score for one in some] for some in (found, neutral, cold))
    row: dict[str, Any] = {"donors": kind, "questions": len(found), "cold": 100 * float(np.mean(before))}
    row |= {"accuracy": 100 * float(np.mean(scores))} | _points(before, scores, "")
    row |= {"changed": sum(one.changed for one in found)} | _points(usual, scores, "over neutral ")
    for name, attribute in (("MSE", "squared_error"), ("KL", "kl")):
        values, others = (np.array([getattr(one, attribute) for one in some]) for some in (found, neutral))
        row |= mean_interval(values, name) | mean_interval(values - others, f"{name} over neutral")
    return row


def _points(reference: Sequence[float], other: Sequence[float], of: str) -> dict[str, float]:
    """Return the paired difference of accuracies and its interval, in points."""
    return {f"{of}{name}": value for name, value in paired(reference, other).items() if name != "p"}


def _rounded(value: Any) -> Any:
    return float(f"{value:.3g}") if isinstance(value, float) else value


def printed(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row for print: each interval in one column."""
    shown = {name: row[name] for name in ("context", "images", "reuse", "donors", "questions", "accuracy")}
    shown |= {"to cold": interval(dict(row)), "over neutral": interval(dict(row), "over neutral ")}
    for name in ("MSE", "KL"):
        shown[name] = f"{row[name]:.2g}"
        low, high = (f"{row[f'{name} over neutral {end}']:+.1g}" for end in ("low", "high"))
        shown[f"{name} over neutral"] = f"{row[f'{name} over neutral']:+.2g} [{low}, {high}]"
    return shown


@app.command()
def main(
    questions: Annotated[int, typer.Option(min=1, help="Questions of each of the five tasks.")] = 60,
    work: opt.Work = None,
    out: opt.Out = None,
) -> None:
    """Compare the kinds of contexts from which approximate reuse links images, in the shipped model.

    Example: python -m research.donors --work donors.work --out donors.json
    """
    with say_errors():
        check_writable("out", out)
        WorkLog(work, "")  # refuses another kind of file before the work
        from vlcache_jax import LLM, CacheConfig

        samples, decoys = load_samples([], questions=questions), load_decoys()
        with LLM(TINY_VQA, cache=CacheConfig(load="kv"), enable_prefix_caching=False) as llm:
            log = WorkLog(work, identity(llm, [*samples, *decoys], MAX_TOKENS))
            rows = table(samples, measure(llm, samples, decoys, policies_of(SETTINGS), log))
            head = environment("jax") | {"model": "tiny_vqa, shipped with the package", "split": "test"}
            head["dtype"] = str(llm.service.device.runner.dtype)
        show("Donors by the context in which KV was computed", [printed(row) for row in rows])
        if out is not None:
            write("Donors by the context in which KV was computed", rows, head, out)


if __name__ == "__main__":
    app()
