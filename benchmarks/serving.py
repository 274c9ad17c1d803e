"""A server under load: `vlcache bench serve`. Requests come when they are due, whether others have ended or not."""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vlcache_jax.benchmarks.serving_client import Answer, Client
from vlcache_jax.benchmarks.serving_load import Load
from vlcache_jax.progress import say
from vlcache_jax.study.report import environment, show, write

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Goal:
    """What a good answer keeps to.

    Attributes:
      ttft: seconds to the first piece.
      per_token: seconds of each token after it, on average.
    """

    ttft: float
    per_token: float

    def is_met(self, answer: Answer) -> bool:
        return answer.ttft <= self.ttft and answer.per_token <= self.per_token


def measure(
    client: Client,
    model: str | None,
    load: Load,
    *,
    rates: Sequence[float],
    concurrency: int | None,
    warmup: int,
    goal: Goal,
    more: dict[str, Any],
    out: pathlib.Path | None,
    picture: pathlib.Path | None,
) -> None:
    """Runs the load at each rate, prints the tables and writes them.

    Args:
      client: of the server.
      model: as requests name it; None: the server's first.
      load: what is asked.
      rates: requests a second, one after the other.
      concurrency: requests at once at most; others wait, and their wait counts. None: any number.
      warmup: requests before those that are measured, one after the other.
      goal: what counts as good.
      more: fields of each request.
      out, picture: JSON and picture to write.

    Raises:
      ValueError: an answer is wrong: none, empty, or cut off. One that the server refuses because it is full is none of
        these, but there must be some that it does not.
      OSError: the server cannot be reached.
    """
    rows, kinds, wrong = asyncio.run(_measure(client, model, load, rates, concurrency, warmup, goal, more))
    show("Load", [_printed(row) for row in rows])
    show("Of each kind", kinds)
    if out is not None:
        head = environment("vlcache-jax") | {"load": dataclasses.asdict(load), "concurrency": concurrency}
        write("A server under load", rows, head | {"goal": dataclasses.asdict(goal), "kinds": kinds}, out)
    if picture is not None:
        draw(rows, picture)
        print(f"written to {picture}")
    if wrong:
        raise ValueError(f"every answer must be whole, got {len(wrong)} that are not; the first: {wrong[0]}")


async def _measure(
    client: Client,
    model: str | None,
    load: Load,
    rates: Sequence[float],
    concurrency: int | None,
    warmup: int,
    goal: Goal,
    more: dict[str, Any],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
    """Rows of the rates, rows of their kinds, and what was wrong."""
    model = model or await client.model()
    rows: list[dict[str, Any]] = []
    kinds: list[dict[str, Any]] = []
    wrong: list[str] = []
    for chat in dataclasses.replace(load, requests=warmup).chats(len(rates)) if warmup else ():
        answer = await client.ask(chat.kind, chat.body(model, load, more), time.perf_counter())
        wrong += [answer.error] if answer.error else []
    for run, rate in enumerate(rates):
        say(f"{load.requests} requests, {rate:g} a second")
        began, answers = await _run(client, model, load, run, rate, concurrency, more)
        wrong += [answer.error for answer in answers if answer.error and not answer.is_refused]
        rows.append(summary(answers, rate, began, goal))
        for kind in dict.fromkeys(answer.kind for answer in answers):
            of_kind = summary([answer for answer in answers if answer.kind == kind], rate, began, goal)
            names = ("rate", "requests", "refused", "TTFT p50 ms", "TTFT p99 ms", "cached %")
            kinds.append({"kind": kind} | {name: of_kind[name] for name in names})
        if all(answer.is_refused for answer in answers):
            wrong.append(f"the server refused all requests: {answers[0].error}")
    return rows, kinds, wrong


async def _run(
    client: Client,
    model: str,
    load: Load,
    run: int,
    rate: float,
    concurrency: int | None,
    more: dict[str, Any],
) -> tuple[float, list[Answer]]:
    """When it began, and the answers of a run."""
    bodies = [(chat.kind, chat.body(model, load, more)) for chat in load.chats(run)]
    room = asyncio.Semaphore(concurrency or load.requests)
    began = time.perf_counter()

    async def ask(kind: str, body: bytes, due: float) -> Answer:
        await asyncio.sleep(due - time.perf_counter())
        async with room:
            return await client.ask(kind, body, due)

    times = began + load.times(rate, run)
    asked = (ask(kind, body, float(due)) for (kind, body), due in zip(bodies, times, strict=True))
    return began, list(await asyncio.gather(*asked))


def summary(answers: Sequence[Answer], rate: float, began: float, goal: Goal) -> dict[str, Any]:
    """A row of the table. Times are of whole answers; "inter-token" is the time between two pieces."""
    whole = [answer for answer in answers if answer.error is None]
    seconds = max(answer.ended for answer in answers) - began
    gaps = [gap for answer in whole for gap in np.diff(answer.pieces)]
    prompt, cached = (sum(counts) for counts in zip((0, 0), *map(_prompt, whole), strict=True))
    return {
        "rate": rate,
        "requests": len(answers),
        "whole": len(whole),
        "refused": sum(answer.is_refused for answer in answers),
        "seconds": seconds,
        "requests/s": len(whole) / seconds,
        "tokens/s": sum(answer.tokens for answer in whole) / seconds,
        "goodput/s": sum(map(goal.is_met, whole)) / seconds,
        "cached %": 100 * cached / max(1, prompt),
        **_percentiles("TTFT", [answer.ttft for answer in whole]),
        **_percentiles("inter-token", gaps),
        **_percentiles("end-to-end", [answer.ended - answer.due for answer in whole]),
    }


def _prompt(answer: Answer) -> tuple[int, int]:
    """Tokens of the prompt, and cached ones."""
    details = answer.usage.get("prompt_tokens_details") or {}
    return answer.usage.get("prompt_tokens") or 0, details.get("cached_tokens") or 0


def _percentiles(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    found = np.percentile(seconds, PERCENTILES) if len(seconds) else [None] * len(PERCENTILES)
    return {
        f"{name} p{share} ms": None if value is None else 1000 * float(value)
        for share, value in zip(PERCENTILES, found, strict=True)
    }


def _printed(row: dict[str, Any]) -> dict[str, Any]:
    """With the percentiles of a time in one column."""
    told = {name: value for name, value in row.items() if not name.endswith(" ms")}
    for name in ("TTFT", "inter-token", "end-to-end"):
        values = [row[f"{name} p{share} ms"] for share in PERCENTILES]
        told[f"{name} ms p50/p90/p99"] = "-" if None in values else "/".join(f"{value:.1f}" for value in values)
    return told


def draw(rows: Sequence[dict[str, Any]], picture: pathlib.Path) -> None:
    """Draws times and what is served by the rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (times, served) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    rates = [row["rate"] for row in rows]
    for share in PERCENTILES:
        values = [row[f"TTFT p{share} ms"] for row in rows]
        times.plot(rates, [np.nan if one is None else one for one in values], marker="o", label=f"p{share}")
    times.set(xlabel="requests a second", ylabel="time to the first token, ms", yscale="log")
    for name in ("requests/s", "goodput/s"):
        served.plot(rates, [row[name] for row in rows], marker="o", label=name.removesuffix("/s"))
    served.set(xlabel="requests a second", ylabel="answers a second", ylim=(0, None))
    shares = served.twinx()
    shares.plot(rates, [row["cached %"] for row in rows], color="grey", linestyle="--", label="cached")
    shares.set(ylabel="prompt tokens cached, % (dashed)", ylim=(0, 100))
    for axes in (times, served):
        axes.legend()
    figure.savefig(picture)
    pyplot.close(figure)
