"""The evaluation of MPIC: requests of one to ten images that were uploaded before (`python -m research.mpic`).

Each request is answered separately under every policy, from the cache entries that uploading its images has made; they
were computed after the system message only. Its first token is timed. Its answer is scored by a judge, by the
question's own answer if it was drawn, and always by its similarity to the cold answer. Online, the same requests come
to a server at given rates.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from PIL import Image

from research.dialogues import OVERALL, DialogueTurn, Judge, as_urls, draw_turns, image_part, read_turns
from vlcache_jax.assets import TINY_VQA
from vlcache_jax.benchmarks import label, notes, run_apart, serving
from vlcache_jax.benchmarks.random_models import LETTERS
from vlcache_jax.benchmarks.serving_client import Client
from vlcache_jax.benchmarks.serving_load import Chat, arrival_times, own_server
from vlcache_jax.benchmarks.settings import TtftSetup
from vlcache_jax.cache.config import CacheConfig
from vlcache_jax.commands import options as opt
from vlcache_jax.common.checks import parse_counts, parse_rates
from vlcache_jax.common.files import PICTURES, check_writable
from vlcache_jax.common.progress import Progress, say, say_errors
from vlcache_jax.models.registry import load_config
from vlcache_jax.reuse.selection import parse_policy
from vlcache_jax.study.accuracy import COLD, identity
from vlcache_jax.study.report import WorkLog, environment, figures, publish, save_figure
from vlcache_jax.study.scoring import rouge_l

if TYPE_CHECKING:
    from vlcache_jax import SamplingParams
    from vlcache_jax.llm import LLM


@dataclass(frozen=True)
class DialogueLoad:
    """Requests drawn from some dialogues with equal probabilities; see `ServingLoad`.

    Attributes:
      turns: Turns of the dialogues.
      requests: Requests of a run.
      max_tokens: Maximum tokens of an answer.
    """

    turns: Sequence[DialogueTurn]
    requests: int = 100
    max_tokens: int = 32

    def times(self, rate: float, run: int) -> np.ndarray:
        """Return the arrival times of requests, in seconds from the beginning `[requests]`."""
        return arrival_times(self.requests, rate, "poisson", [run, 0])

    def chats(self, run: int, count: int | None = None) -> list[Chat]:
        """Return the requests of a run, or the first `count`. Each begins with its own words, so no two prompts begin
        alike.
        """
        count = self.requests if count is None else count
        rng = np.random.default_rng([run, 1])
        order = [int(i) for _ in range(-(-count // len(self.turns))) for i in rng.permutation(len(self.turns))]
        return [self._chat(self.turns[i], f"{run}-{number}") for number, i in enumerate(order[:count])]

    def _chat(self, turn: DialogueTurn, name: str) -> Chat:
        first, *others = as_urls(turn.messages)
        content = first["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        opened = {**first, "content": [{"type": "text", "text": f"Request {name}.\n"}, *parts]}
        return Chat(f"{len(turn.images)} images", [opened, *others])

    def shown(self) -> list[Chat]:
        """Return requests that cache all images: each once, as an upload, after the system message only."""
        images = dict.fromkeys(image for turn in self.turns for image in turn.images)
        look = {"type": "text", "text": "Look."}
        return [Chat("known", [{"role": "user", "content": [image_part(image), look]}]) for image in images]

    def settings(self) -> dict[str, Any]:
        """Return the settings of the load for a table."""
        counts = sorted({len(turn.images) for turn in self.turns})
        settings = {"requests": self.requests, "dialogues' turns": len(self.turns), "images": counts}
        return settings | {"max_tokens": self.max_tokens}


def longest_prompt(setup: TtftSetup, turns: Sequence[DialogueTurn], max_tokens: int) -> int:
    """Return the maximum tokens of a prompt and its answer: images at their size, and a token for each byte of text."""
    with setup.opened() as (model, _):
        vision = load_config(model).vision
    side = vision.patch_size * vision.merge_size
    return max(sum(_tokens(image, side) for image in turn.images) + _letters(turn) for turn in turns) + max_tokens


def _tokens(image: bytes, side: int) -> int:
    with Image.open(io.BytesIO(image)) as opened:
        # Markers, and an allowance for rounding.
        return math.prod(math.ceil(length / side) for length in opened.size) + 8


def _letters(turn: DialogueTurn) -> int:
    texts = []
    for message in turn.messages:
        content = message["content"]
        texts += [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]
    return 64 * (len(turn.messages) + 1) + sum(len(text.encode()) for text in texts)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
PREFIX = "exact"
POLICIES = (PREFIX, "full-two-pass", "full", "cacheblend-0.15", "mpic-32", "approximate")
_TRIES = 5  # maximum runs of a request, until nothing was compiled
_SPELLING = [*LETTERS, ord(" ")]  # tokens of random weights' answers: most others spell nothing


@dataclasses.dataclass(frozen=True)
class MpicResult:
    """A request answered under a policy.

    Attributes:
      text: The answer.
      ttft: Seconds to its first token.
      tokens: Tokens of the prompt.
      rows: Computed tokens, as the mean over layers.
      reused: Image tokens that were not computed in every layer.
      score: Score from 0 to 1; None: only a judge can score it.
      marks: Marks of the judge; None: there is none, or it gave none that can be parsed.
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
    """Answer every request without reuse and under every policy, print the table by number of images, and write it.

    Args:
      setup: Model and dtype.
      turns: The requests.
      policies: Values of `reuse` of the engine; the baseline `PREFIX` is added.
      max_tokens: Maximum tokens of an answer.
      judge: Scores answers; None: no judge.
      work: File of finished requests, from which a second run resumes.
      out, picture: JSON file and chart to write.
      settings: Settings of the engine.

    Raises:
      ValueError: An image was not found as expected, or an answer is empty.
    """
    from vlcache_jax import LLM, SamplingParams

    names = tuple(dict.fromkeys((COLD, PREFIX, *policies)))
    judge = None if judge is None else judge.found()
    with (
        setup.opened() as (model, name),
        LLM(model, dtype=setup.dtype, cache=CacheConfig(load="kv"), **settings) as llm,
    ):
        llm.service.ahead.stop()  # requests compile the programs that they need
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


def _answer(
    llm: LLM, turns: Sequence[DialogueTurn], policies: Sequence[str], log: WorkLog, params: SamplingParams
) -> dict[str, list[MpicResult]]:
    """Return for each policy one result per request, in their order; requests in the log are not answered again."""
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
    """Answer a single request after the upload of its images; repeat it if programs were compiled."""
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
        raise ValueError(f"every answer must have tokens, got none for {turn.name} under {policy}")
    if policy not in (COLD, PREFIX) and any(image.match == "miss" for image in report.images):
        raise ValueError(f"images of {turn.name} must be cached under {policy}, got {report.images}")
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
    """Add the judge's marks; answers in the log are not judged again."""
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
        raise ValueError("the judge must give marks that can be parsed, got none")
    return judged


def table(turns: Sequence[DialogueTurn], results: Mapping[str, Sequence[MpicResult]]) -> list[dict[str, Any]]:
    """Return a row for each number of images and policy, as the mean over its requests; times are medians."""
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
    """Draw times and scores by number of images, a line for each policy (MPIC, figure 3)."""
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


_Dialogues = Annotated[
    list[pathlib.Path] | None,
    typer.Option(
        metavar="<path>",
        help="MMDU's benchmark.json or the annotations of SparklesEval, with images next to them; may be repeated.",
        show_default="questions drawn for the shipped model",
    ),
]
_Side = Annotated[int | None, typer.Option(min=1, help="Pixels to which drawn images are scaled.", show_default=False)]
_Policies = Annotated[
    str,
    typer.Option(
        help="Policies to compare, in addition to off and exact: mpic-32,cacheblend-0.15.",
        show_default="full-two-pass,full,cacheblend-0.15,mpic-32,approximate",
    ),
]
_Judge = Annotated[
    str | None, typer.Option(metavar="URL", help="OpenAI server whose model scores answers.", show_default=False)
]
_JudgeKey = Annotated[
    str | None, typer.Option(envvar="OPENAI_API_KEY", help="Key of the judge's server.", show_default=False)
]
_Rates = Annotated[
    str | None,
    typer.Option(help="Online: request rates of a server per second: 0.5,1,2.", show_default=False),
]


def _check(policies: str, unused: Mapping[str, Any], work: pathlib.Path | None) -> None:
    """Raise ValueError for wrong arguments, before the work starts."""
    for name, value in unused.items():
        if value is not None:
            raise ValueError(f"{name} cannot be combined with rates, got {value}")
    for policy in (name.strip() for name in policies.split(",") if policies):
        parse_policy(policy)
    WorkLog(work, "")  # refuses another kind of file


@app.command()
def main(
    model: opt.ModelArgument = None,
    same_model: opt.SameModel = None,
    preset: Annotated[
        bool, typer.Option("--preset", help="Random weights, 12 layers x 768, for times, instead of the shipped model.")
    ] = False,
    data: _Dialogues = None,
    images: Annotated[str, typer.Option(help="Numbers of images of a request.")] = "1,2,4,6,8,10",
    questions: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum requests of each number of images.", show_default="10; of files all"),
    ] = None,
    turns: Annotated[int, typer.Option(min=1, help="Maximum turns of each dialogue in files.")] = 1,
    size: Annotated[str, typer.Option(help="Size of drawn images: small (64 to 144 tokens) or large (400).")] = "small",
    side: _Side = None,
    policies: _Policies = "",
    judge: _Judge = None,
    judge_model: Annotated[str | None, typer.Option(help="Judge model.", show_default="the server's first")] = None,
    judge_key: _JudgeKey = None,
    rates: _Rates = None,
    requests: Annotated[int, typer.Option(min=1, help="Online: requests at each rate.")] = 50,
    max_tokens: opt.MaxTokens = 32,
    dtype: opt.Dtype = "auto",
    max_rows: opt.MaxRows = None,
    work: opt.Work = None,
    out: opt.Out = None,
    chart: opt.Chart = None,
) -> None:  # fmt: skip
    """Measure requests about many images that were uploaded before, as the MPIC paper does.

    Offline each request is answered separately under every policy. The table has, by number of images, the time to the
    first token and the quality of answers. A judge gives marks from 1 to 10. Without one the quality is the accuracy of
    drawn questions, and the similarity to cold answers. With --rates, the requests come to a server at these rates, as
    in bench serve. "exact" is prefix caching.

    Example: python -m research.mpic --images 1,2,4 --questions 5 --out mpic.json --chart mpic.png

    Example: python -m research.mpic MODEL --data mmdu/benchmark.json --judge https://api.openai.com --judge-model NAME

    Example: python -m research.mpic --preset --side 512 --rates 0.5,1,2 --out online.json
    """
    with say_errors():
        check_writable("out", out)
        check_writable("chart", chart, PICTURES)
        counts = tuple(dict.fromkeys(parse_counts(images, "images")))
        at = () if rates is None else parse_rates(rates, "rates")
        chosen = opt.one_model(model, same_model)
        if preset and chosen is not None:
            raise ValueError(f"preset cannot be combined with a model, got {chosen}")
        offline = {"judge": judge, "work": work, "max_rows": max_rows, "dtype": None if dtype == "auto" else dtype}
        _check(policies, offline if at else {}, work)
        asked = (
            read_turns(data, counts, questions, turns=turns)
            if data
            else draw_turns(counts, questions or 10, size=size, side=side)
        )
        names = tuple(name.strip() for name in policies.split(",")) if policies else POLICIES
        setup = TtftSetup(model=None if preset else str(chosen or TINY_VQA), dtype=dtype)
        if not at:
            run_apart(
                measure,
                setup,
                asked,
                names,
                max_tokens=max_tokens,
                judge=None if judge is None else Judge(Client(judge, judge_key), judge_model),
                work=work,
                out=out,
                picture=chart,
                max_rows=max_rows or 8192,
            )
            return
        # All images are uploaded before the requests come.
        load = DialogueLoad(asked, requests=requests, max_tokens=max_tokens)
        names = tuple(dict.fromkeys((COLD, PREFIX, *names)))
        more: dict[str, Any] = {"ignore_eos": True}
        more |= {"allowed_token_ids": _SPELLING} if setup.model is None else {}
        with own_server(setup.model, names, longest_prompt(setup, asked, max_tokens)) as (url, reuses):
            serving.measure(
                Client(url), None, load, rates=at, repeats=1, concurrency=None, warmup=0,
                goal=serving.Goal(), more=more, policies=reuses, out=out, picture=chart,
            )  # fmt: skip


if __name__ == "__main__":
    app()
