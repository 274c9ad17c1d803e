"""A server under load (`vlcache bench serve`). Requests are sent when due, whether or not others have ended."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import pathlib
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vlcache_jax.benchmarks import POLICIES, SCHEDULE, label, notes
from vlcache_jax.benchmarks.serving_client import Client, ReceivedAnswer
from vlcache_jax.benchmarks.serving_load import Chat, RequestLoad
from vlcache_jax.benchmarks.ttft import falling_schedule
from vlcache_jax.common.progress import say
from vlcache_jax.reuse.selection import parse_policy
from vlcache_jax.study.model_support import check_modes, left_out, read_config, supported_modes
from vlcache_jax.study.report import environment, figures, save_figure, show, write

PERCENTILES = (50, 90, 99)
COLD = "off"
_COUNTS = ("requests", "whole", "refused")
_SPREAD = ("TTFT p50 ms", "goodput/s")  # figures whose spread over runs is reported


@dataclass(frozen=True)
class Goal:
    """Limits of a good answer.

    Attributes:
      ttft: Seconds to the first piece.
      per_token: Seconds of each token after it, on average.
    """

    ttft: float = 1.0
    per_token: float = 0.1

    def is_met(self, answer: ReceivedAnswer) -> bool:
        return answer.ttft <= self.ttft and answer.per_token <= self.per_token


@dataclass(frozen=True)
class Sender:
    """Sender of the requests of a load to a server.

    Attributes:
      client: Client of the server.
      model: Model name in requests.
      load: The requests.
      concurrency: Maximum number of concurrent requests; others wait, and their wait counts. None: no limit.
      more: Further fields of each request.
    """

    client: Client
    model: str
    load: RequestLoad
    concurrency: int | None
    more: dict[str, Any]

    async def one_by_one(self, chats: Iterable[Chat]) -> list[ReceivedAnswer]:
        """Send chats one after the other; return their answers."""
        bodies = ((chat.kind, chat.body(self.model, self.load, self.more)) for chat in chats)
        return [await self.client.ask(kind, body, time.perf_counter()) for kind, body in bodies]

    async def at_rate(self, rate: float, run: int) -> tuple[float, list[ReceivedAnswer]]:
        """Send the requests of a run at a rate; return the time when it began, and its answers."""
        bodies = [(chat.kind, chat.body(self.model, self.load, self.more)) for chat in self.load.chats(run)]
        room = asyncio.Semaphore(self.concurrency or self.load.requests)
        began = time.perf_counter()

        async def ask(kind: str, body: bytes, due: float) -> ReceivedAnswer:
            await asyncio.sleep(due - time.perf_counter())
            async with room:
                return await self.client.ask(kind, body, due)

        times = began + self.load.times(rate, run)
        pending = (ask(kind, body, float(due)) for (kind, body), due in zip(bodies, times, strict=True))
        return began, list(await asyncio.gather(*pending))


def policy_names(text: str | None, model: str | None = None) -> tuple[str, ...]:
    """Return the names in `--policies`, the baseline first; empty for None.

    Args:
      text: Names, or "all", which leaves out those that the model does not support.
      model: Checkpoint or hub id of the own server; None: it supports all.

    Raises:
      ValueError: The model does not support a name.
    """
    if text is None:
        return ()
    names = tuple(dict.fromkeys((COLD, *(POLICIES if text == "all" else map(str.strip, text.split(","))))))
    if model is None:
        return names
    policies = {name: parse_policy(name) for name in names if name != SCHEDULE}  # errors need no model
    config = read_config(model)
    falling = falling_schedule(config.model_type, config.text.num_layers)
    modes = {name: policies.get(name, falling) for name in names}
    if text != "all":
        check_modes(config, modes.values())
    supported, others = supported_modes(config, modes)
    if others:
        say(f"not measured: {left_out(config, others)}")
    return tuple(supported)


def measure(
    client: Client,
    model: str | None,
    load: RequestLoad,
    *,
    rates: Sequence[float],
    repeats: int,
    concurrency: int | None,
    warmup: int,
    goal: Goal,
    more: dict[str, Any],
    policies: Mapping[str, str],
    out: pathlib.Path | None,
    picture: pathlib.Path | None,
) -> None:
    """Run the load at each rate, print the tables and write them.

    Args:
      client: Client of the server.
      model: Model name in requests; None: the server's first.
      load: The requests.
      rates: Requests per second, one rate after the other.
      repeats: Runs of all rates, each with its own requests; rows have medians, and `runs` each run.
      concurrency: See `Sender`.
      warmup: Requests before the measured ones, one after the other.
      goal: Limits of a good answer.
      more: Further fields of each request.
      policies: Reuse modes that are interleaved at each rate, and their values in requests. They see the same
        requests, but no cache entries of each other; answers are compared with those of the first one.
        Empty: the server's own mode.
      out, picture: JSON file and chart to write.

    Raises:
      ValueError: An answer is missing, empty, or cut off. A refusal because the server is full is no error, unless all
        requests are refused.
      OSError: The server cannot be reached.
    """
    model = model or asyncio.run(client.model())
    senders = {"": Sender(client, model, load, concurrency, more)}
    if policies:
        fields = {name: {"reuse": reuse, "cache_salt": name} for name, reuse in policies.items()}
        senders = {name: Sender(client, model, load, concurrency, more | own) for name, own in fields.items()}
    rows, kinds, wrong = asyncio.run(_measure(senders, load, rates, repeats, warmup, goal))
    show("Load", [_printed(row) for row in rows])
    show("Of each kind", kinds)
    if out is not None:
        head = environment("vlcache-jax") | {"model": model, "load": load.settings()}
        head |= {"concurrency": concurrency, "goal": dataclasses.asdict(goal), "repeats": repeats}
        head |= {"notes": notes(policies)}
        write("A server under load", rows, head | {"kinds": kinds}, out)
    if picture is not None:
        draw(rows, picture)
        print(f"written to {picture}")
    if wrong:
        raise ValueError(f"every response must be complete, got {len(wrong)} incomplete ones; the first: {wrong[0]}")


async def _measure(
    senders: Mapping[str, Sender], load: RequestLoad, rates: Sequence[float], repeats: int, warmup: int, goal: Goal
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
    """Return result rows by rate, result rows by rate and request kind, and errors. Senders alternate at each rate."""
    rows: dict[tuple[Any, ...], list[dict[str, Any]]] = {}  # the runs of each cell
    kinds: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    wrong: list[str] = []
    warming = load.chats(repeats * len(rates), warmup)
    for name, sender in senders.items():
        before = [*load.shown(), *warming]
        if before:
            say(f"{len(before)} requests before, one after the other{name and f', {name}'}")
        answers = await sender.one_by_one(before)
        wrong += [answer.error for answer in answers if answer.error]
    for run, (_, rate) in enumerate(itertools.product(range(repeats), rates)):
        cold: list[ReceivedAnswer] = []
        for name, sender in senders.items():
            say(f"{load.requests} requests, {rate:g} a second{name and f', {name}'}")
            began, answers = await sender.at_rate(rate, run)
            cold = cold or answers
            wrong += [answer.error for answer in answers if answer.error and not answer.is_refused]
            if all(answer.is_refused for answer in answers):
                wrong.append(f"the server refused all requests: {answers[0].error}")
            head = {"reuse": name} if name else {}
            row = head | summary(answers, rate, began, goal)
            row |= {"equal answers %": equal_share(answers, cold)} if name else {}
            rows.setdefault((rate, name), []).append(row)
            for kind in dict.fromkeys(answer.kind for answer in answers):
                of_kind = summary([answer for answer in answers if answer.kind == kind], rate, began, goal)
                names = ("rate", "requests", "refused", "TTFT p50 ms", "TTFT p99 ms", "cached %")
                kind_row = head | {"kind": kind} | {name: of_kind[name] for name in names}
                kinds.setdefault((rate, name, kind), []).append(kind_row)
    each = [median_of(runs) | ({"runs": runs} if repeats > 1 else {}) for runs in rows.values()]
    return each, list(map(median_of, kinds.values())), wrong


def median_of(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one row for several runs: the median of each figure, the sum of counts."""
    medians: dict[str, Any] = {}
    for name in runs[0]:
        values = [run[name] for run in runs]
        if name in _COUNTS:
            medians[name] = sum(values)
        elif isinstance(values[0], str) or len(runs) == 1:
            medians[name] = values[0]
        else:
            medians[name] = None if None in values else statistics.median(values)
    return medians


def spread(row: Mapping[str, Any], column: str) -> tuple[float, float] | None:
    """Return the minimum and maximum of a figure over the runs of a row; None: there is one run, or one without it."""
    values = [run[column] for run in row.get("runs", ())]
    return (min(values), max(values)) if values and None not in values else None


def equal_share(answers: Sequence[ReceivedAnswer], others: Sequence[ReceivedAnswer]) -> float | None:
    """Return the percentage of requests with equal texts among those answered in both; None: there are none."""
    twice = [pair for pair in zip(answers, others, strict=True) if not any(one.error for one in pair)]
    return 100 * sum(one.text == other.text for one, other in twice) / len(twice) if twice else None


def summary(answers: Sequence[ReceivedAnswer], rate: float, began: float, goal: Goal) -> dict[str, Any]:
    """Return a row of the table. Times are of full answers; "inter-token" is the time between two pieces."""
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


def _prompt(answer: ReceivedAnswer) -> tuple[int, int]:
    """Return tokens of the prompt, and cached ones."""
    details = answer.usage.get("prompt_tokens_details") or {}
    return answer.usage.get("prompt_tokens") or 0, details.get("cached_tokens") or 0


def _percentiles(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    found = np.percentile(seconds, PERCENTILES) if len(seconds) else [None] * len(PERCENTILES)
    return {
        f"{name} p{share} ms": None if value is None else 1000 * float(value)
        for share, value in zip(PERCENTILES, found, strict=True)
    }


def _printed(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with the percentiles of a time in one column."""
    shown = {name: value for name, value in row.items() if not name.endswith(" ms") and name != "runs"}
    for name in ("TTFT", "inter-token", "end-to-end"):
        values = [row[f"{name} p{share} ms"] for share in PERCENTILES]
        shown[f"{name} ms p50/p90/p99"] = "-" if None in values else "/".join(f"{value:.1f}" for value in values)
    for name in _SPREAD if "runs" in row else ():
        found = spread(row, name)
        shown[f"{name} of runs"] = "-" if found is None else f"{found[0]:.2f} to {found[1]:.2f}"
    return shown


def draw(rows: Sequence[dict[str, Any]], picture: pathlib.Path) -> None:
    """Draw times and served requests by rate: for each policy, or more figures if there is none.

    The area around a line is the spread of its runs.
    """
    pyplot = figures()
    figure, (times, served) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    times.set(xlabel="requests/s", ylabel="TTFT [ms]", xscale="log", yscale="log")
    served.set(xlabel="requests/s", ylabel="answered requests/s", xscale="log")

    def plot(axes: Any, rows: Sequence[dict[str, Any]], column: str, title: str, **style: Any) -> None:
        values = [np.nan if row[column] is None else row[column] for row in rows]
        at = [row["rate"] for row in rows]
        [line] = axes.plot(at, values, marker="o", label=title, **style)
        if all(found := [spread(row, column) for row in rows]):
            axes.fill_between(at, *zip(*found, strict=True), color=line.get_color(), alpha=0.15)

    if "reuse" in rows[0]:
        for name in dict.fromkeys(row["reuse"] for row in rows):
            own = [row for row in rows if row["reuse"] == name]
            plot(times, own, "TTFT p50 ms", label(name))
            plot(served, own, "goodput/s", label(name))
        figure.legend(*times.get_legend_handles_labels(), loc="outside right upper")
        times.set(ylabel="TTFT, median [ms]")
        served.set(ylabel="goodput [requests/s]")
    else:
        for share in PERCENTILES:
            plot(times, rows, f"TTFT p{share} ms", f"p{share}")
        for name in ("requests/s", "goodput/s"):
            plot(served, rows, name, name.removesuffix("/s"))
        shares = served.twinx()
        plot(shares, rows, "cached %", "cached", color="grey", linestyle="--")
        shares.set(ylabel="cached prompt tokens [%] (dashed)", ylim=(0, 100))
        for axes in (times, served):
            axes.legend()
    served.set_ylim(0)
    rates = list(dict.fromkeys(row["rate"] for row in rows))
    for axes in (times, served):
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axes.minorticks_off()
    save_figure(figure, picture, dpi=100)
