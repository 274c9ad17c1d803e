"""Accuracy of linked images in a model with linear attention (`python -m research.hybrid_links`).

A question is answered while its images are linked, by transformers' modules layer by layer (`research.linked_layers`).
Settings differ in the tokens of an image that are computed. All settings answer the same questions from the same
donors, so differences are paired. An answer is right if each of its tokens is the most likely one after those before
it, so that greedy decoding finds it.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
import typer

from research.codecs import divergence
from research.donors import AFTER_IMAGES, AFTER_TEXT, IMAGES, NEUTRAL, DonorPrompts, load_decoys, mean_interval
from research.linked_layers import Kept, LayerWise, Link, MapCode, Prompt, Rows, Run, image_rows
from vlcache_jax.assets import TINY_HYBRID
from vlcache_jax.benchmarks.tiny_vqa.splits import load_samples
from vlcache_jax.commands import options as opt
from vlcache_jax.common.files import check_writable
from vlcache_jax.common.progress import Progress, say_errors
from vlcache_jax.study.accuracy import Protocol
from vlcache_jax.study.pairs import interval, paired
from vlcache_jax.study.questions import Sample
from vlcache_jax.study.report import WorkLog, environment, figures, save_figure, show, write
from vlcache_jax.study.search import solve

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
LEAST = 3  # first tokens that are always computed: the convolution of the next one sees those before the image
TOGETHER = "together"
DONORS = (NEUTRAL, AFTER_TEXT, AFTER_IMAGES, TOGETHER)
ARRANGEMENTS = ("text_first", "question_first")
PERCENTS = (0.0, 2.5, 5.0, 10.0, 20.0)
LEVELS = np.arange(0, 32.5, 2.5)  # percentages of a schedule's layers
MEANS = (5.0, 10.0)  # percentages of schedules, mean over the layers
_BATCH = 20  # questions of a line in the log
_PROFILED = 6  # questions of each task from which schedules are made


@dataclass(frozen=True)
class Setting:
    """Tokens of a linked image that are computed, and what is done with the others.

    Attributes:
      name: Name in tables.
      percent: Percentage of an image's tokens that are computed, at least `LEAST` tokens; by layer, or one for all.
      ends: Whether half of them are the last tokens, instead of the first ones only.
      shift: Kinds of layers that shift, see `Link`.
      stale: Kinds of layers that use the donor's values; the others have those of the run without reuse.
      code: Stored form of the maps, see `Link`.
    """

    name: str
    percent: float | tuple[float, ...]
    ends: bool = False
    shift: tuple[str, ...] = ()
    stale: tuple[str, ...] = ("full", "linear")
    code: MapCode | None = None

    def computed(self, tokens: int, layers: int) -> Rows:
        """Return whether a layer computes a token of an image `[layers, tokens]`."""
        shares = self.percent if isinstance(self.percent, tuple) else (self.percent,) * layers
        rows = np.zeros((layers, tokens), bool)
        for own, share in zip(rows, shares, strict=True):
            count = min(tokens, max(LEAST, round(share / 100 * tokens)))
            last = min(count // 2, count - LEAST) if self.ends else 0
            own[: count - last] = True
            own[tokens - last :] = True
        return rows


def _named(percent: float) -> str:
    return f"{percent:g} %" if percent else f"{LEAST} rows"


SETTINGS = (
    *(Setting(f"first {_named(p)}", p) for p in PERCENTS),
    *(Setting(f"ends {_named(p)}", p, ends=True) for p in PERCENTS[2:]),
    *(Setting(f"shift-first {_named(p)}", p, shift=("full",)) for p in PERCENTS),
    *(Setting(f"shift-ends {_named(p)}", p, ends=True, shift=("full",)) for p in PERCENTS[2:]),
    Setting("shift-first 5 %, also in linear layers", 5.0, shift=("full", "linear")),
    Setting("first 5 %, only full layers linked", 5.0, stale=("full",)),
    Setting("first 5 %, only linear layers linked", 5.0, stale=("linear",)),
    *(
        Setting(f"shift-ends 10 %, {name}", 10.0, ends=True, shift=("full",), code=code)
        for name, code in (
            ("maps in float32", MapCode()),
            ("maps in bfloat16", MapCode(16)),
            ("maps in int8", MapCode(8)),
            ("maps in int8, A from 0.1", MapCode(8, 0.1)),
            ("maps in int8, A from 0.5", MapCode(8, 0.5)),
            ("maps in int8, no A", MapCode(8, np.inf)),
        )
    ),
    Setting("all rows", 100.0),
)


@dataclass(frozen=True)
class Linked:
    """A question answered from linked images.

    Attributes:
      sample: Index of the question.
      right: Whether the answer is right.
      squared_error: Mean squared difference of the logits to the run without reuse, over the tokens of the right answer
        and the vocabulary.
      kl: Kullback-Leibler divergence from the probabilities without reuse, in nats, mean over the same tokens.
    """

    sample: int
    right: bool
    squared_error: float
    kl: float


Case = tuple[str, str, str]  # arrangement, donors, setting
COLD = "off"
Results = dict[Case, list[Linked]]


class Study:
    """Questions, and the runs of one model that answer them.

    Args:
      model: The model.
      samples: The questions.
      decoys: Questions about other images, for donors after images.
    """

    def __init__(self, model: LayerWise, samples: Sequence[Sample], decoys: Sequence[Sample]) -> None:
        self.model, self._samples, self._decoys = model, samples, decoys

    def donors(self, order: str, kind: str, i: int) -> list[list[Kept]]:
        """Return for each image of question `i` what each layer kept at its tokens, in a context of this kind."""
        protocol = Protocol(order)
        if kind == TOGETHER:
            conversations = dataclasses.replace(protocol, arrangement="text_first").donor_prompts(self._samples, i)
        else:
            [conversations] = DonorPrompts(kind, protocol, self._decoys).rounds(self._samples, i)
        kept = []
        for prompt in map(self.model.prompt, conversations):
            run = self.model.run(prompt)
            own = len(self._samples[i].images) if kind == TOGETHER else 1
            kept += [image_rows(run.kept, span) for span in prompt.spans[-own:]]
        return kept

    def prompt(self, order: str, i: int) -> Prompt:
        """Return question `i` with its right answer."""
        return self.model.prompt(Protocol(order).formal(self._samples, i), self._samples[i].answers[0])

    def linked(self, prompt: Prompt, cold: Run, donors: Sequence[Sequence[Kept]], setting: Setting) -> Run:
        """Return the run of a prompt whose images are linked from donors."""
        links = {}
        for k, (span, kept) in enumerate(zip(prompt.spans, donors, strict=True)):
            true = image_rows(cold.kept, span)
            mixed = [
                own if kind in setting.stale else right
                for own, right, kind in zip(kept, true, self.model.kinds, strict=True)
            ]
            computed = setting.computed(span.stop - span.start, len(self.model.kinds))
            links[k] = Link(mixed, computed, setting.shift, setting.code)
        return self.model.run(prompt, links)

    def answers(
        self, order: str, kinds: Sequence[str], settings: Sequence[Setting], i: int
    ) -> Iterator[tuple[Case, Linked]]:
        """Yield the answers to question `i` without reuse, then from donors of each kind with each setting."""
        prompt = self.prompt(order, i)
        cold = self.model.run(prompt)
        yield (order, COLD, COLD), _compared(i, prompt, cold, cold)
        for kind in kinds:
            donors = self.donors(order, kind, i)
            for setting in settings:
                yield (
                    (order, kind, setting.name),
                    _compared(i, prompt, cold, self.linked(prompt, cold, donors, setting)),
                )

    def layer_scores(self, order: str, i: int) -> npt.NDArray[np.float64]:
        """Return the sensitivity of each layer to the share of rows that it alone computes (VLCache, eq. 5).

        Returns:
          Mean squared error of the logits of question `i` `[layers, LEVELS]`.
        """
        prompt = self.prompt(order, i)
        cold = self.model.run(prompt)
        donors = self.donors(order, NEUTRAL, i)
        scores = np.zeros((len(self.model.kinds), len(LEVELS)))
        for layer, level in np.ndindex(scores.shape):
            links = {}
            for k, (span, kept) in enumerate(zip(prompt.spans, donors, strict=True)):
                percents = [0.0] * len(kept)
                percents[layer] = float(LEVELS[level])
                rows = Setting("", tuple(percents)).computed(span.stop - span.start, len(kept))
                true = image_rows(cold.kept, span)
                mixed = [_mixed(*arrays) for arrays in zip(rows, true, kept, strict=True)]
                links[k] = Link(mixed, np.zeros_like(rows))
            scores[layer, level] = _compared(i, prompt, cold, self.model.run(prompt, links)).squared_error
        return scores


def _mixed(rows: Rows, true: Kept, other: Kept) -> Kept:
    """Return arrays of a layer that are true in some rows."""
    return {
        name: torch.where(torch.from_numpy(rows).view(-1, *[1] * (array.ndim - 1)), array, other[name])
        for name, array in true.items()
    }


def schedules(study: Study, questions: int) -> list[Setting]:
    """Return the settings with the least sum of sensitivities whose share of rows does not increase by layer."""
    scores = np.mean([study.layer_scores("text_first", i) for i in range(questions)], axis=0)
    lowest = np.minimum.accumulate(scores, axis=1)
    found = []
    for mean in MEANS:
        budget = round(mean / float(LEVELS[1])) * len(lowest)
        levels = solve(lowest, budget, count_layer0=False).levels
        found.append(Setting(f"schedule {mean:g} %", tuple(float(LEVELS[level]) for level in levels)))
    return found


def _compared(i: int, prompt: Prompt, cold: Run, run: Run) -> Linked:
    is_right = run.logits.argmax(-1).tolist() == prompt.ids[-prompt.answer :]
    before, after = (one.logits.numpy() for one in (cold, run))
    error = float(np.mean(np.square(after - before)))
    return Linked(i, is_right, error, float(divergence(before, after).mean()))


def measure(
    study: Study,
    questions: int,
    kinds: Sequence[str],
    settings: Sequence[Setting],
    log: WorkLog,
    orders: Sequence[str] = ARRANGEMENTS,
) -> Results:
    """Answer all questions in each arrangement, from each kind of donors, with each setting.

    Args:
      study: The questions and their model.
      questions: Number of questions.
      kinds: Kinds of donors.
      settings: Settings.
      log: Finished parts, which are not computed again.
      orders: Arrangements.

    Returns:
      Results of the questions in order, by arrangement, kind of donors and setting.
    """
    results: Results = {}
    with Progress("questions", len(orders) * questions) as bar:
        for order in orders:
            for first in range(0, questions, _BATCH):
                batch = range(first, min(first + _BATCH, questions))
                key = json.dumps([order, list(kinds), [repr(one) for one in settings], list(batch)])
                if log.get(key) is None:
                    found = [one for i in batch for one in study.answers(order, kinds, settings, i)]
                    log.add(key, [[case, dataclasses.astuple(one)] for case, one in found])
                for case, one in log.get(key):
                    results.setdefault(tuple(case), []).append(Linked(*one))
                bar.update(len(batch))
    return results


def table(samples: Sequence[Sample], results: Results) -> list[dict[str, Any]]:
    """Return a row for each arrangement, kind of donors, number of images and setting.

    Accuracies are percentages of questions, and differences to the run without reuse are in points. "worst task" is the
    lowest end of the intervals of the tasks. MSE is that of the logits, KL per token.
    """
    rows = []
    for (order, kind, setting), found in results.items():
        for images in IMAGES:
            own, cold = (_of_images(samples, some, images) for some in (found, results[order, COLD, COLD]))
            if kind == COLD or not own:
                continue
            row = {"context": order, "donors": kind, "images": images, "setting": setting, "questions": len(own)}
            row |= {"cold": _percent(cold), "accuracy": _percent(own)} | _points(cold, own)
            tasks = dict.fromkeys(samples[one.sample].task for one in own)
            ends = {task: _points(*(_of_task(samples, some, task) for some in (cold, own)))["low"] for task in tasks}
            worst = min(ends, key=lambda task: ends[task])
            row |= {"worst task": worst, "worst low": ends[worst]}
            for name, attribute in (("MSE", "squared_error"), ("KL", "kl")):
                row |= mean_interval([getattr(one, attribute) for one in own], name)
            rows.append({name: float(f"{v:.3g}") if isinstance(v, float) else v for name, v in row.items()})
    return rows


def _of_images(samples: Sequence[Sample], found: Sequence[Linked], images: str) -> list[Linked]:
    return [one for one in found if (len(samples[one.sample].images) > 1) == (images == "several")]


def _of_task(samples: Sequence[Sample], found: Sequence[Linked], task: str) -> list[Linked]:
    return [one for one in found if samples[one.sample].task == task]


def _percent(found: Sequence[Linked]) -> float:
    return 100 * float(np.mean([one.right for one in found]))


def _points(cold: Sequence[Linked], own: Sequence[Linked]) -> dict[str, float]:
    """Return the paired difference of accuracies and its 95 % interval, in points."""
    values = paired([one.right for one in cold], [one.right for one in own])
    return {name: value for name, value in values.items() if name != "p"}


def printed(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row for print: each interval in one column."""
    shown = {name: row[name] for name in ("context", "donors", "images", "setting", "questions", "cold", "accuracy")}
    return shown | {"to cold": interval(dict(row)), "MSE": f"{row['MSE']:.2g}", "KL": f"{row['KL']:.2g}"}


def norms(study: Study, questions: int) -> list[dict[str, Any]]:
    """Return the norms of the images' maps by linear layer and value head, over images in a neutral context."""
    found: dict[int, list[np.ndarray]] = {}
    for i in range(questions):
        for kept in study.donors("text_first", NEUTRAL, i):
            for layer, own in study.model.map_norms(kept).items():
                found.setdefault(layer, []).append(own)
    return [
        {"layer": layer, "head": head, "images": len(own), "norm of A": float(f"{value:.3g}")}
        for layer, own in found.items()
        for head, value in enumerate(np.mean(own, axis=0).tolist())
    ]


@app.command()
def main(
    model: Annotated[
        pathlib.Path, typer.Option(help="Folder of a model of the family of Qwen3-VL or Qwen3.5.")
    ] = TINY_HYBRID,
    questions: Annotated[int, typer.Option(min=1, help="Questions of each of the five tasks.")] = 60,
    donors: Annotated[list[str] | None, typer.Option(help=f"Kinds of donors: {', '.join(DONORS)}.")] = None,
    setting: Annotated[list[str] | None, typer.Option(help="Names of settings; all by default.")] = None,
    work: opt.Work = None,
    out: opt.Out = None,
) -> None:
    """Compare which tokens of linked images are computed, in a model with linear attention or without.

    Example: python -m research.hybrid_links --work links.work --out links.json
    """
    with say_errors():
        check_writable("out", out)
        kinds = chosen("donors", donors, DONORS, str)
        settings = chosen("setting", setting, SETTINGS, lambda one: one.name)
        WorkLog(work, "")  # refuses another kind of file before the work
        torch.set_num_threads(1)  # small products are not faster on several
        samples = load_samples([], questions=questions)
        study = Study(LayerWise(model), samples, load_decoys())
        log = WorkLog(work, f"{model.name} {questions}")
        if "linear" not in study.model.kinds:
            settings = [
                one for one in settings if one.code is None and "linear" not in one.shift and len(one.stale) > 1
            ]
        head: dict[str, Any] = environment("torch", "transformers")
        head |= {"model": model.name, "split": "test", "dtype": "float32"}
        if setting is None:
            profiled = load_samples([], questions=_PROFILED, split="profile")
            found = schedules(Study(study.model, profiled, ()), len(profiled))
            head["schedules"] = {one.name: one.percent for one in found}
            settings += found
        rows = table(samples, measure(study, len(samples), kinds, settings, log))
        show("Linked images", [printed(row) for row in rows])
        if "linear" in study.model.kinds:
            head["norms"] = norms(study, min(len(samples), 50))
            show("Norms of A", head["norms"])
        if out is not None:
            write("Linked images", rows, head, out)


def draw(rows: Sequence[Mapping[str, Any]], picture: pathlib.Path) -> None:
    """Draw the change of accuracy by the percentage of computed tokens, for two images from neutral donors."""
    pyplot = figures()
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    at = {_named(percent): percent for percent in PERCENTS}
    for axis, context in zip(axes, ARRANGEMENTS, strict=True):
        lines: dict[str, list[tuple[float, Mapping[str, Any]]]] = {}
        for row in rows:
            kind, _, tokens = row["setting"].partition(" ")
            if (row["context"], row["donors"], row["images"]) == (context, NEUTRAL, "several") and tokens in at:
                lines.setdefault(kind, []).append((at[tokens], row))
        for kind, found in lines.items():
            middle, low, high = ([row[name] for _, row in found] for name in ("difference", "low", "high"))
            bars = np.abs(np.subtract([low, high], middle))
            axis.errorbar([percent for percent, _ in found], middle, bars, fmt="o-", capsize=2, label=kind)
        axis.axhline(0, color="gray", linewidth=0.8)
        before = "other text" if context == "text_first" else "a question"
        axis.set(title=f"{before} before two images", xlabel=f"computed tokens [%], at least {LEAST}")
    axes[0].set(ylabel="accuracy, change from no reuse [points]")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper")
    save_figure(figure, picture, dpi=100)


def chosen[T](name: str, values: Sequence[str] | None, known: Sequence[T], name_of: Callable[[T], str]) -> list[T]:
    """Return the known ones with these names, all if there are none.

    Raises:
      ValueError: A name is unknown.
    """
    by_name = {name_of(one): one for one in known}
    if unknown := [value for value in values or () if value not in by_name]:
        raise ValueError(f"{name} must be one of {', '.join(by_name)}, got {unknown[0]!r}")
    return [by_name[value] for value in values or by_name]


if __name__ == "__main__":
    app()
