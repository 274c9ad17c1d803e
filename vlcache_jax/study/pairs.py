"""Comparison of settings with the cold run, question by question: tables, intervals and tests of paired answers."""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vlcache_jax.study.accuracy import COLD, AccuracyResult, Protocol
from vlcache_jax.study.questions import Sample, rows_of_questions
from vlcache_jax.study.report import figures, save_figure, show

# Columns of a table of totals other than tasks.
_COLUMNS = (
    "size", "arrangement", "donors", "images", "group", "reuse", "questions", "mean", "difference", "low", "high",
    "worst", "at most", "logit MSE", "agreement", "rows %", "rows x layers %", "MB read", "ms", "by layer %",
)  # fmt: skip
_TITLES = {
    "image_first": "same context", "text_first": "new text", "question_first": "new question",
    "apart": "separately",
}  # fmt: skip
_Z = 1.959964  # quantile of a 95 % interval


@dataclasses.dataclass(frozen=True)
class PairCase:
    """Answers to the questions about one image, or about several images, under one protocol.

    Attributes:
      protocol: the protocol, with seed 0.
      images: "one" or "several" images in a question.
      samples: all samples, to which the indices of the results refer.
      runs: results by setting, one dict for each auxiliary prompt.
    """

    protocol: Protocol
    images: str
    samples: Sequence[Sample]
    runs: list[dict[str, list[AccuracyResult]]]

    @functools.cached_property
    def tasks(self) -> list[str]:
        """Names of the tasks with such questions."""
        return list(dict.fromkeys(self.samples[result.sample].task for result in self.runs[0][COLD]))

    @property
    def shown(self) -> dict[str, str]:
        """Columns that identify the case in tables."""
        return {"arrangement": self.protocol.arrangement, "donors": self.protocol.donors, "images": self.images}

    @property
    def title(self) -> str:
        """Title of the case in tables."""
        shown = "one image" if self.images == "one" else f"several images, cached {_title(self.protocol.donors)}"
        return f"{_title(self.protocol.arrangement)}, {shown}"

    def results(self, setting: str, task: str) -> list[list[AccuracyResult]]:
        """Return the results of a task's rows, [auxiliary prompts][rows]."""
        return [[result for result in run[setting] if self.samples[result.sample].task == task] for run in self.runs]

    def scores(self, setting: str, task: str) -> list[list[float]]:
        """Return the scores of a task's questions, [auxiliary prompts][questions].

        The score of a question with several rows is their minimum.
        """
        found = []
        for results in self.results(setting, task):
            rows = rows_of_questions([self.samples[result.sample] for result in results])
            found.append([min(results[k].score for k in numbers) for numbers in rows])
        return found

    def compare(self, setting: str, reference: str) -> list[dict[str, float]]:
        """Return the paired difference of a setting to a reference setting for each task, see `paired`."""
        return [paired(self.scores(reference, task), self.scores(setting, task)) for task in self.tasks]


def _title(name: str) -> str:
    return _TITLES.get(name, name)


def cases_of(samples: Sequence[Sample], results: dict[Protocol, dict[str, list[AccuracyResult]]]) -> list[PairCase]:
    """Return the cases of results. Protocols that differ in their seed only form one case."""
    by_protocol: dict[Protocol, list[dict[str, list[AccuracyResult]]]] = {}
    for protocol, by_setting in results.items():
        by_protocol.setdefault(protocol.case, []).append(by_setting)
    cases = []
    for protocol, runs in by_protocol.items():
        for images in ("one", "several"):
            own = [
                {
                    name: [row for row in rows if (len(samples[row.sample].images) > 1) == (images == "several")]
                    for name, rows in run.items()
                }
                for run in runs
            ]
            if own[0][COLD]:
                cases.append(PairCase(protocol, images, samples, own))
    return cases


def paired(reference: npt.ArrayLike, other: npt.ArrayLike) -> dict[str, float]:
    """Return the difference of accuracies in percentage points, its 95 % interval and the p of McNemar's test.

    With several auxiliary prompts, a question's mean difference is one observation. The interval is that of Agresti and
    Min (2005), which adds half a question to each cell and so has a width even if no answer differs. It is extended to
    the difference itself if there are very few questions. The test is exact if every difference is -1, 0 or 1. With
    fractions it is the asymptotic form: the sum of the differences over the root of the sum of their squares.

    Args:
      reference, other: scores from 0 to 1, for the same questions in the same order, [questions] or [prompts,
        questions].

    Returns:
      "difference", "low", "high" (percentage points) and "p".
    """
    from scipy import stats

    before, after = np.atleast_2d(np.asarray(reference, float)), np.atleast_2d(np.asarray(other, float))
    change = (after - before).mean(0)
    size = len(change) + 2
    centre = change.sum() / size
    width = _Z * math.sqrt(((np.square(change).sum() + 1) / size - centre**2) / size)
    if not change.any():
        p = 1.0
    elif np.isin(change, (-1, 0, 1)).all():
        p = stats.binomtest(int((change > 0).sum()), int((change != 0).sum())).pvalue
    else:
        p = 2 * stats.norm.sf(abs(change.sum()) / np.sqrt(np.square(change).sum()))
    found = {"difference": 100 * float(change.mean()), "p": float(p)}
    return _with_interval(found, max(-100.0, 100 * (centre - width)), min(100.0, 100 * (centre + width)))


def _with_interval(found: dict[str, float], low: float, high: float) -> dict[str, float]:
    return found | {"low": min(low, found["difference"]), "high": max(high, found["difference"])}


def mean_of(tasks: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the mean difference over tasks of equal weight, and its interval. Tasks are taken as independent.

    Args:
      tasks: result of `paired` for each task.
    """
    centre = sum(task["low"] + task["high"] for task in tasks) / 2 / len(tasks)
    width = math.sqrt(sum(((task["high"] - task["low"]) / 2) ** 2 for task in tasks)) / len(tasks)
    difference = sum(task["difference"] for task in tasks) / len(tasks)
    return _with_interval({"difference": difference}, centre - width, centre + width)


def summarize(cases: Iterable[PairCase]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return two tables: a row for each case, setting and task, and a row for each case and setting.

    Tasks have equal weight in means. The worst task loses most against the cold run. "at most" is the largest loss
    inside of the interval of any task.
    """
    details: list[dict[str, Any]] = []
    totals: list[dict[str, Any]] = []
    for case in cases:
        for name in case.runs[0]:
            rows = details_of(case, name)
            details += rows
            totals.append(case.shown | {"reuse": name} | total(rows))
    return details, totals


def details_of(case: PairCase, setting: str) -> list[dict[str, Any]]:
    """Return a row for each task: accuracy, difference from the cold run, error and cost of a setting."""
    return [_detail(case, setting, task) for task in case.tasks]


def _detail(case: PairCase, setting: str, task: str) -> dict[str, Any]:
    scores = case.scores(setting, task)
    every = [result for found in case.results(setting, task) for result in found]
    share = np.sum([r.recomputed for r in every], axis=0) / sum(r.image_tokens for r in every)
    return {
        **case.shown,
        "auxiliary": case.protocol.auxiliary,
        "reuse": setting,
        "task": task,
        "questions": len(scores[0]),
        "auxiliary prompts": len(scores),
        "accuracy": 100 * float(np.mean(scores)),
        **paired(case.scores(COLD, task), scores),
        "logit MSE": float(np.mean([result.squared_error for result in every])),
        "agreement": 100 * sum(r.agree for r in every) / sum(r.tokens for r in every),
        "image tokens": float(np.mean([result.image_tokens for result in every])),
        "image rows": float(np.mean(share)),
        "image rows by layer": share.tolist(),
        "rows": float(np.mean([result.rows for result in every])),
        "bytes read": float(np.mean([result.bytes_read for result in every])),
        "seconds": float(np.median([result.seconds for result in every])),
    }


def overall(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the accuracy of a setting in each task, in the mean and in the worst task.

    Args:
      rows: a row for each task with its name, questions, accuracy, result of `paired`, logit MSE and agreement.
    """
    worst = min(rows, key=lambda row: row["difference"])
    return {
        **{column(row["task"]): row["accuracy"] for row in rows},
        "questions": sum(row["questions"] for row in rows),
        "mean": _mean(rows, "accuracy"),
        **mean_of(rows),
        "worst task": worst["task"],
        **{f"worst {name}": worst[name] for name in ("difference", "low", "high")},
        "at most": max(0.0, *(-row["low"] for row in rows)),
        "logit MSE": _mean(rows, "logit MSE"),
        "agreement": _mean(rows, "agreement"),
    }


def total(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of totals of a setting: `overall`, and the computed tokens, bytes and time."""
    return overall(rows) | {
        "rows %": 100 * float(np.max(np.mean([row["image rows by layer"] for row in rows], axis=0))),
        "rows x layers %": 100 * _mean(rows, "image rows"),
        "MB read": _mean(rows, "bytes read") / 1e6,
        "ms": 1e3 * _mean(rows, "seconds"),
    }


def _mean(rows: Sequence[dict[str, Any]], name: str) -> float:
    return float(np.mean([row[name] for row in rows]))


def column(task: str) -> str:
    """Return the column name of a task, with a prefix if another column has the same name."""
    return f"task {task}" if task in _COLUMNS or task.startswith(("worst ", "over ")) else task


def interval(found: dict[str, Any], of: str = "", digits: int = 1) -> str:
    """Return a difference with its interval as text. `of` is the prefix of the three keys in `found`."""
    difference, low, high = (f"{found[f'{of}{name}']:+.{digits}f}" for name in ("difference", "low", "high"))
    return f"{difference} [{low}, {high}]"


def printed(row: dict[str, Any], without: Iterable[str] = ()) -> dict[str, Any]:
    """Return a row of totals for print: each interval in one column, and without the columns `without`."""
    hidden = {*without, "low", "high"}
    shown = {}
    for name, value in row.items():
        of, _, end = name.rpartition(" ")
        if name == "difference" or (end == "difference" and f"{of} low" in row):
            shown[of or "difference"] = interval(row, f"{of} " if of else "")
        elif name == "logit MSE":
            shown[name] = f"{value:.2g}"
        elif name not in hidden and end not in ("low", "high"):
            shown[name] = value
    return shown


def show_tables(cases: Iterable[PairCase], details: Sequence[dict[str, Any]], totals: Sequence[dict[str, Any]]) -> None:
    """Print the accuracy of each case, and then the differences from the cold run; see `summarize`."""
    for case in cases:
        rows = [printed(row, case.shown) for row in totals if case.shown.items() <= row.items()]
        show(f"Accuracy, {case.title} ({case.protocol.auxiliary} auxiliary query)", rows)
    names = ("arrangement", "donors", "images", "reuse", "task", "questions")
    show(
        "Against cold: points, 95 % interval of paired answers, McNemar's p",
        [
            {name: row[name] for name in names} | {"difference": interval(row), "p": f"{row['p']:.1g}"}
            for row in details
            if row["reuse"] != COLD
        ],
    )


def draw(details: Sequence[dict[str, Any]], path: pathlib.Path) -> None:
    """Draw accuracy and agreement over the ratio of recomputed image tokens."""
    pyplot = figures()
    names = ("arrangement", "donors", "images")
    cases = list(dict.fromkeys(tuple(row[name] for name in names) for row in details))
    size = 4.2 * len(cases), 6.4
    figure, axes = pyplot.subplots(2, len(cases), figsize=size, squeeze=False, sharex=True, sharey="row")
    tasks = list(dict.fromkeys(row["task"] for row in details))
    for column, case in enumerate(cases):
        for number, task in enumerate(tasks):
            rows = [row for row in details if (*(row[name] for name in names), row["task"]) == (*case, task)]
            reused = sorted((row for row in rows if row["reuse"] != COLD), key=lambda row: row["image rows"])
            share = [100 * row["image rows"] for row in reused]
            look: dict[str, Any] = {"color": f"C{number}"}
            axes[0, column].plot(share, [row["difference"] for row in reused], "o-", label=task, markersize=3, **look)
            low, high = ([row[end] for row in reused] for end in ("low", "high"))
            axes[0, column].fill_between(share, low, high, alpha=0.15, **look)
            axes[1, column].plot(share, [row["agreement"] for row in reused], "o-", markersize=3, **look)
        arrangement, donors, images = case
        shown = f"{images} image{'s' * (images != 'one')}"
        axes[0, column].set_title(f"{_title(arrangement)}, {shown}, cached {_title(donors)}")
        axes[0, column].axhline(0, color="black", linewidth=0.5)
        axes[1, column].set_xlabel("image tokens recomputed [%]")
    axes[0, 0].set_ylabel("change of accuracy [points]")
    axes[1, 0].set_ylabel("same most likely token [%]")
    axes[0, 0].legend(fontsize=8)
    figure.tight_layout()
    save_figure(figure, path)
