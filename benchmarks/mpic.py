"""The evaluation of MPIC: requests of one to ten images that were uploaded before (`vlcache bench mpic`).

Each request is answered alone, under every policy, from what uploading its images has left: their records behind the
system message alone. Its first token is timed, and its answer scored: by a judge, by the question's own answer where it
was drawn, and always by how like the cold answer it is. Online, the same requests come to a server at given rates.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vlcache_jax.benchmarks import label, notes
from vlcache_jax.benchmarks.dialogues import DialogueTurn
from vlcache_jax.benchmarks.judge import OVERALL, Judge
from vlcache_jax.benchmarks.mpic_online import DialogueLoad, longest_prompt
from vlcache_jax.benchmarks.random_models import LETTERS
from vlcache_jax.benchmarks.serving_client import Client
from vlcache_jax.benchmarks.ttft import TtftSetup
from vlcache_jax.cache.config import CacheConfig
from vlcache_jax.common.progress import Progress, say
from vlcache_jax.study.accuracy import COLD, identity
from vlcache_jax.study.report import environment, figures, publish, save_figure
from vlcache_jax.study.scoring import rouge_l
from vlcache_jax.study.worklog import WorkLog

if TYPE_CHECKING:
    from vlcache_jax import SamplingParams
    from vlcache_jax.llm import LLM

PREFIX = "exact"
POLICIES = (PREFIX, "full-two-pass", "full", "cacheblend-0.15", "mpic-32", "approximate")
_TRIES = 5  # of a request, until nothing was compiled
_SPELLING = [*LETTERS, ord(" ")]  # tokens of random weights' answers: most others spell nothing


@dataclasses.dataclass(frozen=True)
class MpicResult:
    """A request answered under a policy.

    Attributes:
      text: the answer.
      ttft: seconds to its first token.
      tokens: of the prompt.
      rows: of them computed, in the mean over layers.
      reused: image tokens that were not computed in every layer.
      score: from 0 to 1; None: only a judge can tell.
      marks: of the judge; None: there is none, or it gave none that can be read.
    """

    text: str
    ttft: float
    tokens: int
    rows: float
    reused: int
    score: float | None
    marks: dict[str, float] | None = None


def measure(
    setup: TtftSetup,
    turns: Sequence[DialogueTurn],
    policies: Sequence[str],
    *,
    max_tokens: int,
    judge: Judge | None = None,
    work: pathlib.Path | None = None,
    out: pathlib.Path | None = None,
    picture: pathlib.Path | None = None,
    **settings: Any,
) -> None:
    """Answers every request cold and under every policy, prints the table by number of images, and writes it.

    Args:
      setup: model and dtype.
      turns: the requests.
      policies: `reuse` of the engine; `PREFIX`, that times are compared with, is added.
      judge: scores answers.
      work: file of finished requests; a second run goes on from it.
      out, picture: JSON and picture to write.
      settings: of the engine.

    Raises:
      ValueError: an image was not found as it should be, or an answer is empty.
    """
    from vlcache_jax import LLM, SamplingParams

    names = tuple(dict.fromkeys((COLD, PREFIX, *policies)))
    judge = None if judge is None else judge.found()
    with (
        setup.opened() as (model, name),
        LLM(model, dtype=setup.dtype, cache=CacheConfig(load="link"), **settings) as llm,
    ):
        llm.service.ahead.stop()  # requests compile what they call for
        for policy in names:
            llm.service.policy_of(policy)
        params = SamplingParams(max_tokens=max_tokens, temperature=0)
        if setup.model is None:
            params = dataclasses.replace(params, allowed_token_ids=_SPELLING, ignore_eos=True)
        log = WorkLog(work, identity(llm, turns, max_tokens))
        results = _answer(llm, turns, names, log, params)
        head = environment("jax") | {
            "model": name,
            "dtype": str(llm.service.device.runner.dtype),
            "device": str(llm.service.device.runner.normalization.devices()),
            "notes": notes(names),
        }
    if judge is not None:
        results = _judged(judge, turns, results, log)
    rows = table(turns, results)
    details = [
        {"request": turn.name, "images": len(turn.images), "reuse": policy} | dataclasses.asdict(found)
        for policy, of_policy in results.items()
        for turn, found in zip(turns, of_policy, strict=True)
    ]
    publish("Requests by number of images, each alone", rows, head | {"details": details}, out)
    if picture is not None:
        draw(rows, picture)
        print(f"written to {picture}")


def measure_online(
    setup: TtftSetup,
    turns: Sequence[DialogueTurn],
    policies: Sequence[str],
    *,
    rates: Sequence[float],
    requests: int,
    max_tokens: int,
    out: pathlib.Path | None,
    picture: pathlib.Path | None,
) -> None:
    """Sends the requests to a server at each rate, all images uploaded before; see `serving.measure`."""
    from vlcache_jax.benchmarks import serving
    from vlcache_jax.benchmarks.serving_load import own_server

    load = DialogueLoad(turns, requests=requests, max_tokens=max_tokens)
    names = tuple(dict.fromkeys((COLD, PREFIX, *policies)))
    more: dict[str, Any] = {"ignore_eos": True}
    more |= {"allowed_token_ids": _SPELLING} if setup.model is None else {}
    with own_server(setup.model, names, longest_prompt(setup, turns, max_tokens)) as (url, reuses):
        serving.measure(
            Client(url), None, load, rates=rates, repeats=1, concurrency=None, warmup=0,
            goal=serving.Goal(), more=more, policies=reuses, out=out, picture=picture,
        )  # fmt: skip


def _answer(
    llm: LLM, turns: Sequence[DialogueTurn], policies: Sequence[str], log: WorkLog, params: SamplingParams
) -> dict[str, list[MpicResult]]:
    """Of each policy one result a request, in their order; what is in the log is not answered again."""
    results: dict[str, list[MpicResult]] = {name: [] for name in policies}
    with Progress("requests", len(turns) * len(policies)) as bar:
        for turn in turns:
            for policy in policies:
                key = json.dumps([turn.name, policy])
                if log.get(key) is None:
                    log.add(key, dataclasses.asdict(_ask(llm, turn, policy, params)))
                results[policy].append(MpicResult(**log.get(key)))
                bar.update()
    return results


def _ask(llm: LLM, turn: DialogueTurn, policy: str, params: SamplingParams) -> MpicResult:
    """A request alone, behind the upload of its images; where programs were compiled, once more."""
    programs = llm.service.device.runner.programs
    for _ in range(_TRIES):
        llm.reset_mm_cache()
        if policy != COLD:
            llm.cache.precompute(list(turn.images))
            llm.cache.flush()
        compiled = programs.num_programs
        [output] = llm.chat([turn.messages], params, reuse=policy, use_tqdm=False)
        if programs.num_programs == compiled:
            break
    report, answer = output.cache, output.outputs[0]
    if not answer.token_ids:
        raise ValueError(f"every answer must have tokens, that to {turn.name} under {policy} has none")
    if policy not in (COLD, PREFIX) and any(image.match == "miss" for image in report.images):
        raise ValueError(f"images of {turn.name} must be found under {policy}, got {report.images}")
    return MpicResult(
        text=answer.text,
        ttft=output.metrics.ttft,
        tokens=len(output.prompt_token_ids),
        rows=float(np.mean(report.rows)),
        reused=report.approximate_tokens,
        score=None if turn.sample is None else turn.sample.score(answer.text),
    )


def _judged(
    judge: Judge, turns: Sequence[DialogueTurn], results: Mapping[str, list[MpicResult]], log: WorkLog
) -> dict[str, list[MpicResult]]:
    """With the judge's marks; what is in the log is not judged again."""
    judged = {}
    for policy, found in results.items():
        keys = [json.dumps(["marks", judge.model, turn.name, policy]) for turn in turns]
        new = [i for i, key in enumerate(keys) if log.get(key) is None]
        if new:
            say(f"the judge reads {len(new)} answers of {policy}")
            for i, marks in zip(new, judge.scores([(turns[i], found[i].text) for i in new]), strict=True):
                log.add(keys[i], [marks])
        judged[policy] = [dataclasses.replace(one, marks=log.get(key)[0]) for one, key in zip(found, keys, strict=True)]
    if not any(one.marks for found in judged.values() for one in found):
        raise ValueError("the judge must give marks that can be read, gave none")
    return judged


def table(turns: Sequence[DialogueTurn], results: Mapping[str, Sequence[MpicResult]]) -> list[dict[str, Any]]:
    """A row for each number of images and policy, in the mean over its requests; times are medians."""
    rows = []
    is_judged = any(one.marks for found in results.values() for one in found)
    for count in dict.fromkeys(len(turn.images) for turn in turns):
        chosen = [i for i, turn in enumerate(turns) if len(turn.images) == count]
        cold, prefix = ([results[name][i] for i in chosen] for name in (COLD, PREFIX))
        for policy, every in results.items():
            found = [every[i] for i in chosen]
            ttft, usual = (statistics.median(one.ttft for one in some) for some in (found, prefix))
            row: dict[str, Any] = {
                "images": count,
                "reuse": policy,
                "requests": len(found),
                "prompt tokens": statistics.mean(one.tokens for one in found),
                "rows %": 100 * sum(one.rows for one in found) / sum(one.tokens for one in found),
                "TTFT ms": 1000 * ttft,
                "TTFT to exact %": 100 * (ttft / usual - 1),
            }
            if all(one.score is not None for one in found):
                row["accuracy %"] = 100 * statistics.mean(one.score or 0.0 for one in found)
            if is_judged:
                marks = [one.marks[OVERALL] for one in found if one.marks is not None]
                row |= {"judge": statistics.mean(marks) if marks else None, "judge failed": len(found) - len(marks)}
            texts = [(one.text, other.text) for one, other in zip(found, cold, strict=True)]
            row["as cold %"] = 100 * statistics.mean(one == other for one, other in texts)
            row["ROUGE-L to cold"] = statistics.mean(rouge_l(other, one) for one, other in texts)
            rows.append(row)
    return rows


def draw(rows: Sequence[Mapping[str, Any]], picture: pathlib.Path) -> None:
    """Draws times and scores by number of images, a line for each policy (MPIC, figure 3)."""
    pyplot = figures()
    score = next(name for name in ("judge", "accuracy %", "ROUGE-L to cold") if name in rows[0])
    figure, (times, scores) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for policy in dict.fromkeys(row["reuse"] for row in rows):
        own = [row for row in rows if row["reuse"] == policy]
        at = [row["images"] for row in own]
        times.plot(at, [row["TTFT ms"] for row in own], "o-", markersize=3, label=label(policy))
        scores.plot(at, [np.nan if row[score] is None else row[score] for row in own], "o-", markersize=3)
    times.set(xlabel="images", ylabel="TTFT, median [ms]", yscale="log")
    scores.set(
        xlabel="images",
        ylabel={"judge": "overall score of the judge", "accuracy %": "accuracy [%]"}.get(score, score),
        ylim=(0, None),
    )
    figure.legend(*times.get_legend_handles_labels(), loc="outside right upper")
    save_figure(figure, picture, dpi=100)
