"""The tables of `benchmarks.peer`, and the checks of their content."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

REFERENCE = "torch"  # the engine whose outputs are the reference
# Largest difference of a log-probability from the reference's, for rounding only.
TOLERANCE = {"float32": 0.02, "bfloat16": 0.5}
BLOCK = 256  # tokens; engines find full blocks of cached prompts, and may find none of shorter prompts
RISING = ("tokens/s",)  # units for which higher is better

type Answers = list[dict[str, Any]]
type Runs = dict[tuple[str, str], list[dict[str, Any]]]
"""By engine and dtype the results of its turns, each with its `steps`: the step and what came of it."""


def check(engine: str, result: dict[str, Any]) -> None:
    """Check that an engine did what the steps request.

    Raises:
      ValueError: An answer is missing, has a wrong length, or is not finite, or a cached prompt was not found.
    """
    if not result["steps"]:
        raise ValueError(f"{engine}: at least one step must run, got none")
    for step, found in result["steps"]:
        name = f"{engine}, {step.case} {step.size} {step.reuse}"
        answers: Answers = found["answers"]
        got, requested = [len(answer["tokens"]) for answer in answers], [one["max_tokens"] for one in step.requests]
        if got != requested:
            raise ValueError(f"{name}: answers must have the requested lengths, {requested}, got {got}")
        for answer, one in zip(answers, step.requests, strict=True):
            is_known = step.case in ("repeat", "next question") and answer["prompt_tokens"] > BLOCK
            if is_known and answer["cached"] == 0:
                raise ValueError(f"{name}: the beginning of the prompt must be cached, got 0 cached tokens")
            if step.reuse != "exact" and answer["matches"] != ["approximate"] * len(one["images"]):
                raise ValueError(f"{name}: all images must be cached, got {answer['matches']}")
            logprobs = answer["logprobs"]
            if len(logprobs) != (len(answer["tokens"]) if step.logprobs else 0):
                raise ValueError(f"{name}: each token must have log-probabilities, got {len(logprobs)}")
            if not all(math.isfinite(p) for one in logprobs for p in one.values()):
                raise ValueError(f"{name}: log-probabilities must be finite")


def check_prompts(runs: Runs) -> None:
    """Check that all engines read the same prompts.

    Raises:
      ValueError: A prompt has more tokens in one.
    """
    counts: dict[tuple[int, int], tuple[int, tuple[str, str]]] = {}
    for key, turns in runs.items():
        for step, found in turns[0]["steps"]:
            for i, answer in enumerate(found["answers"]):
                count = answer["prompt_tokens"]
                first, other = counts.setdefault((id(step), i), (count, key))
                if count != first:
                    raise ValueError(
                        f"{step.case}: prompts must have the same number of tokens in all engines, "
                        f"got {first} in {other} and {count} in {key}"
                    )


def rows(runs: Runs, ours: str) -> list[dict[str, Any]]:
    """Return a row for each dtype, case and size, with columns for each engine; "-" if an engine has no value."""
    engines = list(dict.fromkeys(engine for engine, _ in runs if engine != REFERENCE))
    table: dict[tuple[str, str, int, str], dict[str, tuple[list[float], list[float]]]] = defaultdict(dict)
    for (engine, dtype), turns in runs.items():
        if engine != REFERENCE:
            for (case, size, unit), found in _figures(turns).items():
                table[dtype, case, size, unit][engine] = found
    return [
        _row(dtype, case, size, unit, {engine: found.get(engine, ([], [])) for engine in engines}, ours)
        for (dtype, case, size, unit), found in table.items()
    ]


def _row(
    dtype: str, case: str, size: int, unit: str, figures: Mapping[str, tuple[list[float], list[float]]], ours: str
) -> dict[str, Any]:
    row: dict[str, Any] = {"dtype": dtype, "case": case, "size": size or "-", "unit": unit}
    for engine, (values, cpu) in figures.items():
        row[engine] = statistics.median(values) if values else "-"
        row[f"{engine}: least"], row[f"{engine}: most"] = (min(values), max(values)) if values else ("-", "-")
        row[f"{engine}: runs"] = len(values)
        row[f"{engine}: CPU s"] = statistics.median(cpu) if cpu else "-"
    for engine in figures:
        if engine != ours:
            row[f"{ours} over {engine}"] = _ratio(row[ours], row[engine], unit)
    return row


def _ratio(one: float | str, other: float | str, unit: str) -> float | str:
    """Return how many times better the first value is."""
    if isinstance(one, str) or isinstance(other, str):
        return "-"
    return one / other if unit in RISING else other / one


def _figures(turns: Sequence[dict[str, Any]]) -> dict[tuple[str, int, str], tuple[list[float], list[float]]]:
    """Return the values of all runs, and CPU seconds, for each case, size and unit."""
    found: dict[tuple[str, int, str], tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))

    def note(case: str, size: int, unit: str, value: float, *cpu: float) -> None:
        values, times = found[case, size, unit]
        values.append(value)
        times.extend(cpu)

    for turn in turns:
        kept = "as before" if turn["kept"] else "nothing kept"
        start = turn["start"]
        note(f"start to the first answer, {kept}", 0, "s", start["first answer"])
        note(f"start and warm-up, {kept}", 0, "s", start["first answer"] + start["warm-up"])
        note("memory after the first answer", 0, "GB", start["memory"] / 1e9)
        note("memory at the end", 0, "GB", turn["end"]["memory"] / 1e9)
        for step, own in turn["steps"]:
            case = step.case if step.reuse == "exact" else f"{step.case}, {step.reuse}"
            if step.timed and step.section in ("batch", "repeated", "decode"):
                tokens = sum(one["max_tokens"] for one in step.requests)
                note(case, step.size, "tokens/s", tokens / own["seconds"], own["cpu"])
            elif step.timed and step.section in ("cold", "hits"):
                note(case, step.size, "s", own["seconds"], own["cpu"])
    return found


def agreement(runs: Runs) -> list[dict[str, Any]]:
    """Return a row for each pair: every engine with the reference, with itself one by one, and with the other engines.

    Raises:
      ValueError: An engine's log-probabilities are not the reference's.
    """
    together: dict[tuple[str, str], Answers] = {}
    table: list[dict[str, Any]] = []
    for key, turns in runs.items():
        own = {step.case: found["answers"] for step, found in turns[0]["steps"] if step.section == "agreement"}
        if own:
            together[key] = own["together"]
            if key[0] != REFERENCE:
                table.append(_compared(" ".join(key), "each prompt alone", own["together"], own["alone"]))
    keys = list(together)
    for i, key in enumerate(keys):
        for other in keys[i + 1 :]:
            if REFERENCE in (key[0], other[0]) or key[1] == other[1] or key[0] == other[0]:
                row = _compared(" ".join(key), " ".join(other), together[key], together[other])
                if REFERENCE in (key[0], other[0]):
                    dtype = other[1] if key[0] == REFERENCE else key[1]
                    if not row["largest difference"] < TOLERANCE[dtype]:
                        raise ValueError(f"log-probabilities must agree to {TOLERANCE[dtype]}, got {row}")
                table.append(row)
    return table


def _compared(name: str, other_name: str, own: Answers, others: Answers) -> dict[str, Any]:
    """Compare the tokens of outputs up to the first difference; after it they continue different texts."""
    same, sets, places, differences, firsts = 0, 0, 0, [], []
    for one, other in zip(own, others, strict=True):
        at = first_difference(one["tokens"], other["tokens"])
        same += at is None
        firsts += [] if at is None else [at]
        pairs = zip(one["logprobs"], other["logprobs"], strict=True)
        for mine, theirs in itertools.islice(pairs, None if at is None else at + 1):
            top = [set(sorted(logprobs, key=lambda i: -logprobs[i])[:5]) for logprobs in (mine, theirs)]
            sets += top[0] == top[1]
            places += 1
            differences += [abs(mine[i] - theirs[i]) for i in mine.keys() & theirs.keys()]
    return {
        "answers of": name,
        "beside": other_name,
        "equal": f"{same} of {len(own)}",
        "first differences at": ", ".join(map(str, firsts)) or "-",
        "same five most likely": f"{sets} of {places}",
        "largest difference": max(differences, default=math.nan),
        "median difference": statistics.median(differences) if differences else math.nan,
    }


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first position at which two outputs of one length differ; None: nowhere."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)


def same_answers(runs: Runs, ours: str) -> list[dict[str, Any]]:
    """Return how many outputs of a batch equal ours, by dtype, case and engine."""
    found: dict[tuple[str, str, str], Answers] = {}
    for (engine, dtype), turns in runs.items():
        for step, own in turns[0]["steps"]:
            if step.timed and step.section in ("batch", "repeated"):
                found[dtype, step.case, engine] = own["answers"]
    table = []
    for (dtype, case, engine), answers in found.items():
        mine = found[dtype, case, ours]
        same = sum(a["tokens"] == b["tokens"] for a, b in zip(answers, mine, strict=True))
        prompt = sum(answer["prompt_tokens"] for answer in answers)
        cached = sum(answer["cached"] or 0 for answer in answers)
        row = {"dtype": dtype, "case": case, "engine": engine, "answers as ours": f"{same} of {len(mine)}"}
        table.append(row | {"prompt tokens": prompt, "cached": cached})
    return table


def narrow(table: Sequence[dict[str, Any]], wanted: Callable[[str], bool]) -> list[dict[str, Any]]:
    """Return the wanted columns, with small differences readable."""
    return [
        {name: f"{value:.1e}" if name.endswith(" difference") else value for name, value in row.items() if wanted(name)}
        for row in table
    ]
