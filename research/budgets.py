"""Outputs that decode with a part of their prompt's KV, by method and budget: `python -m research.budgets`.

    python -m research.budgets                              # the shipped model, on questions drawn for it
    python -m research.budgets Qwen/Qwen3-VL-2B-Instruct --data DocVQA_VAL.tsv --questions 100 --work budgets.work

`research.budget_answers` runs the methods. They are compared at the memory that they use, because bounds on the tokens
of a layer may leave a part of a budget unused. The reference method is interpolated between two of its budgets if the
memory of another method falls between them.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
import typer

from research.masked_answers import mean_of_rows
from vlcache_jax.assets import TINY_VQA
from vlcache_jax.benchmarks.tiny_vqa.splits import load_samples
from vlcache_jax.commands import options as opt
from vlcache_jax.common.files import PICTURES, check_all_readable, check_writable
from vlcache_jax.common.progress import Progress, say, say_errors
from vlcache_jax.study import pairs
from vlcache_jax.study.accuracy import arrangement_of
from vlcache_jax.study.questions import Sample, rows_of_questions
from vlcache_jax.study.report import WorkLog, environment, figures, save_figure, show, write

if TYPE_CHECKING:
    from research.budget_answers import BudgetResult, BudgetResults

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
BUDGETS = (0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
QUESTIONS = 30  # of each task, by default

Array = npt.NDArray[np.float64]
Ways = Sequence[Sequence["BudgetResult"]]  # of a setting: [ways][samples]


def _check(**shares: Sequence[float]) -> None:
    for name, values in shares.items():
        if not all(0 < value <= 1 for value in values):
            raise ValueError(f"{name} must be above 0 and at most 1, got {', '.join(f'{one:g}' for one in values)}")


def table(samples: Sequence[Sample], answers: BudgetResults, against: str) -> list[dict[str, Any]]:
    """Return one row for the full cache, and one for each setting.

    Args:
      against: Method that settings are compared with, at their memory.
    """
    compared = _Comparison(samples, answers, against)
    rows = [compared.row("whole", 1.0, [answers.whole])]
    return rows + [compared.row(one.method, one.budget, results) for one, results in answers.results.items()]


class _Comparison:
    """Comparison of settings with the full cache, and with a method at the same memory, task by task.

    Several rows of a file may be one question, which is right if all of them are.

    Args:
      samples, answers, against: See `table`.
    """

    def __init__(self, samples: Sequence[Sample], answers: BudgetResults, against: str):
        self._tasks: dict[str, list[list[int]]] = {}
        for numbers in rows_of_questions(samples):
            self._tasks.setdefault(samples[numbers[0]].task, []).append(numbers)
        own = [results for setting, results in answers.results.items() if setting.method == against]
        self._against, self._references = against, [[answers.whole], *own]

    def row(self, method: str, budget: float, results: Ways) -> dict[str, Any]:
        """Return the row of a setting."""
        every = [one for way in results for one in way]
        rates = [one.hit_rate for one in every if one.hit_rate is not None]
        ahead = [pairs.paired(self._reference(task, results), self._scores(task, results)) for task in self._tasks]
        return {
            "method": method,
            "budget %": 100 * budget,
            "memory %": 100 * float(np.mean([one.memory for one in every])),
            **pairs.overall([self._detail(task, results) for task in self._tasks]),
            **{f"over {self._against} {name}": value for name, value in pairs.mean_of(ahead).items()},
            "same answer %": 100 * float(np.mean([one.same for one in every])),
            "hit rate": float(np.mean(rates)) if rates else None,
        }

    def _detail(self, task: str, results: Ways) -> dict[str, Any]:
        """Return the details of a task, see `pairs.overall`."""
        scores = self._scores(task, results)
        own = [way[i] for way in results for numbers in self._tasks[task] for i in numbers]
        decoded = [one for one in own if one.tokens]
        return {
            "task": task,
            "questions": scores.shape[1],
            "accuracy": 100 * float(scores.mean()),
            **pairs.paired(self._scores(task, self._references[0]), scores),
            "logit MSE": float(np.mean([one.squared_error for one in decoded])) if decoded else 0.0,
            "agreement": 100 * sum(one.agree for one in own) / max(1, sum(one.tokens for one in own)),
        }

    def _scores(self, task: str, results: Ways) -> Array:
        """Return the scores of a task, `[ways, questions]`."""
        return np.array([[min(way[i].score for i in numbers) for numbers in self._tasks[task]] for way in results])

    def _memory(self, task: str, results: Ways) -> Array:
        """Return the kept fraction of the prompt's KV, as the mean of all ways, `[questions]`."""
        kept = [[np.mean([way[i].memory for i in numbers]) for numbers in self._tasks[task]] for way in results]
        return np.mean(kept, axis=0)

    def _reference(self, task: str, results: Ways) -> Array:
        """Return scores of the reference method, at the memory of these results, `[questions]`."""
        known = [(self._memory(task, one), self._scores(task, one).mean(0)) for one in self._references]
        return interpolated(known, self._memory(task, results))


def interpolated(reference: Sequence[tuple[Array, Array]], memory: Array) -> Array:
    """Return scores of a method at other memory, question by question; below its lowest budget those of that budget.

    Args:
      reference: Memory and scores at each of its budgets, `[questions]` each.
      memory: Memory at which scores are needed, `[questions]`.
    """
    at, right = (np.array(part).T for part in zip(*reference, strict=True))
    order = np.argsort(at, axis=1, kind="stable")
    at, right = np.take_along_axis(at, order, 1), np.take_along_axis(right, order, 1)
    return np.array([np.interp(*one) for one in zip(memory, at, right, strict=True)])


def layers_of(answers: BudgetResults, budgets: Sequence[float]) -> dict[str, Any]:
    """Return the attention of decoded rows, as the mean of questions."""
    from research.budget_answers import SPARSE

    if not answers.layers:
        return {}
    coverage = mean_of_rows([one.coverage for one in answers.layers])
    lengths = [one.prompt_tokens for one in answers.layers]
    sparse = {
        rows: dict(zip(("least", "mean", "greatest"), values, strict=True))
        for rows, values in zip(SPARSE, mean_of_rows([one.sparsity for one in answers.layers]), strict=True)
    }
    return {
        "prompt tokens": [min(lengths), max(lengths)],
        "image tokens": float(np.mean([one.image_tokens for one in answers.layers])),
        "sparsity by layer": sparse["after the last image"]["mean"],
        "sparsity of heads by layer": sparse,
        "contribution of images by layer": mean_of_rows([one.contribution for one in answers.layers]),
        "coverage of images by layer": {f"{budget:g}": own for budget, own in zip(budgets, coverage, strict=True)},
    }


def draw(rows: Sequence[dict[str, Any]], path: pathlib.Path) -> None:
    """Draw accuracy, and the agreement of the most likely token, against memory, a line for each method."""
    from matplotlib.ticker import NullLocator

    pyplot = figures()
    [whole, *rest] = rows
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10.5, 4.4), sharex=True)
    for number, method in enumerate(dict.fromkeys(row["method"] for row in rest)):
        own = sorted((row for row in rest if row["method"] == method), key=lambda row: row["memory %"])
        memory = [row["memory %"] for row in own]
        look: dict[str, Any] = {"color": f"C{number % 10}", "marker": "osv^D*Px"[number % 8], "markersize": 4}
        if method == "random":
            look |= {"color": "black", "linestyle": "--"}
        left.plot(memory, [row["mean"] for row in own], label=method, **look)
        right.plot(memory, [row["agreement"] for row in own], **look)
    left.axhline(whole["mean"], color="grey", linewidth=0.8, label="full cache")
    ticks = sorted({row["budget %"] for row in rest})
    for axis, label in ((left, "accuracy [%], mean of tasks"), (right, "same most likely token [%]")):
        axis.set(xscale="log", xlabel="KV kept [%]", ylabel=label, xticks=ticks)
        axis.set_xticklabels([f"{tick:g}" for tick in ticks])
        axis.xaxis.set_minor_locator(NullLocator())
    left.legend(fontsize=8)
    figure.tight_layout()
    save_figure(figure, path)


_Methods = Annotated[
    list[str] | None,
    typer.Option(
        metavar="<str>",
        help="vl-cache, postvision, snapkv, pyramidkv, h2o, zipcache, streaming, random, fastv, h2o-stream; "
        "may be repeated.",
        show_default="all",
    ),
]
_Budgets = Annotated[
    list[float] | None,
    typer.Option(
        metavar="<float>",
        help="Fraction of a prompt's KV to keep; may be repeated.",
        show_default="0.05, 0.1, 0.2, 0.3, 0.5, 1",
    ),
]


@app.command()
def main(
    model: opt.ModelArgument = None,
    same_model: opt.SameModel = None,
    data: opt.Data = None,
    method: _Methods = None,
    budget: _Budgets = None,
    p: Annotated[
        list[float] | None,
        typer.Option(metavar="<float>", help="Threshold of a further run of vl-cache, besides 0.01; may be repeated.",
                     show_default=False),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of random; their mean counts.")] = 3,
    every: Annotated[int, typer.Option(min=1, help="Tokens that h2o-stream decodes before it drops some.")] = 8,
    against: Annotated[str, typer.Option(help="Reference method, compared at the same memory.")] = "random",
    context: Annotated[str, typer.Option(help="Text before the images: same (none), new-text, new-question.")] = "same",
    questions: Annotated[
        int | None, typer.Option(min=1, help="Maximum questions of each file.", show_default="all; drawn ones: 30")
    ] = None,
    max_tokens: opt.MaxTokens = 32,
    dtype: opt.Dtype = "auto",
    max_rows: opt.MaxRows = None,
    kv_cache_bytes: opt.KvCacheBytes = None,
    compressed_kv_bytes: opt.CompressedKvBytes = "256MiB",
    work: opt.Work = None,
    out: opt.Out = None,
    chart: opt.Chart = None,
) -> None:  # fmt: skip
    """Measure the accuracy of outputs that decode with a part of their prompt's KV, by method and budget.

    The table has the accuracy of each task and, in pairs with 95 % intervals, the differences to the full cache and to
    random at the same memory. It has the agreement of the most likely token with the full cache's, and the error of the
    logits, given its answer. It has the fraction of the tokens with most attention of the first decoded row that were
    kept. Prompt and answer must fit one step (--max-rows).

    Example: python -m research.budgets --budget 0.1 --budget 0.5 --work budgets.work --out budgets.json
    """
    with say_errors():
        # Wrong arguments and files are reported before JAX is imported and a model loaded.
        chosen, files, shares = opt.one_model(model, same_model), data or [], sorted(budget or BUDGETS)
        arrangement = arrangement_of(context)
        _check(budget=shares, p=p or ())
        check_writable("out", out)
        check_writable("chart", chart, PICTURES)
        check_all_readable("data", files)
        WorkLog(work, "")  # refuses another kind of file before the work
        pool = opt.pool_bytes(kv_cache_bytes)
        say("importing JAX")
        from research.budget_answers import METHODS, run, settings_of
        from vlcache_jax import LLM

        settings = settings_of(method or METHODS, shares, ps=p or (), seeds=seeds, every=every)
        if against not in (known := dict.fromkeys(setting.method for setting in settings)):
            raise ValueError(f"against must be one of {', '.join(known)}, got {against!r}")
        with Progress("reading questions"):
            samples = load_samples(files, questions=questions or (None if files else QUESTIONS))
        with LLM(
            chosen or TINY_VQA, dtype=dtype, max_rows=max_rows, kv_cache_bytes=pool,
            compressed_kv_bytes=compressed_kv_bytes,
        ) as llm:  # fmt: skip
            answers = run(llm, samples, settings, arrangement=arrangement, max_tokens=max_tokens, work=work)
        title, rows = "Answers that go on with a part of their prompt", table(samples, answers, against)
        show(title, [pairs.printed(row) for row in rows])
        if out is not None:
            head = environment("jax") | {
                "model": str(chosen or "tiny_vqa, shipped with the package"),
                "data": [path.name for path in files] or "drawn for the shipped model",
                "arrangement": arrangement,
                "max_tokens": max_tokens,
                "dtype": dtype,
                "seeds": seeds,
                "every": every,
                "against": against,
                **layers_of(answers, sorted(set(shares))),
            }
            write(title, rows, head, out)
        if chart is not None:
            draw(rows, chart)
            print(f"written to {chart}")


if __name__ == "__main__":
    app()
