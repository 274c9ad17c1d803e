"""`vlcache schedule`: measures layers, searches schedules."""

from __future__ import annotations

import json
import pathlib
import statistics
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlcache_jax.commands import options as opt
from vlcache_jax.common.progress import Progress, say, say_errors

if TYPE_CHECKING:
    from vlcache_jax.llm import LLM
    from vlcache_jax.reuse.schedule import Schedule
    from vlcache_jax.study.questions import Sample
    from vlcache_jax.study.search import LayerScores

app = typer.Typer(
    name="schedule", no_args_is_help=True, help="Find how many tokens of a reused image each layer recomputes."
)


@app.command("profile")
def profile_command(
    out: Annotated[pathlib.Path, typer.Option(help="File of scores to write (npz).")],
    model: opt.ModelArgument = None,
    same_model: opt.SameModel = None,
    data: opt.Data = None,
    samples: Annotated[int, typer.Option(min=1, help="Questions to measure on, spread over the files.")] = 40,
    arrangement: Annotated[str, typer.Option(help="text_first or question_first.")] = "text_first",
    max_tokens: opt.MaxTokens = 32,
    dtype: opt.Dtype = "auto",
) -> None:  # fmt: skip
    """Measures what each layer gains from recomputing: S_i(r) for 150 ratios (VLCache, eq. 5).

    Each question is answered cold; then its images' K, V come from a prompt with neutral text, and one layer after
    the other recomputes. Stopped, the command goes on from OUT.work.

    Example: vlcache schedule profile --samples 40 --out scores.npz
    """
    from vlcache_jax.common.files import check_writable
    from vlcache_jax.study.accuracy import Protocol, behind

    with say_errors():
        protocol = Protocol(behind(arrangement), auxiliary="neutral")
        check_writable("out", out)
        chosen = profile_samples(data, samples)
        with open_model(opt.one_model(model, same_model), dtype) as llm:
            from vlcache_jax.study.sensitivity import cases_of, profile

            cases = cases_of(llm, chosen, protocol, max_tokens=max_tokens)
            with Progress("samples", len(cases)) as bar:
                found = profile(llm, cases, work=f"{out}.work", progress=bar.reach)
        found.save(out)
        base = found.values[0, 0]
        typer.echo(f"{len(cases)} samples, error of full reuse {base:.3g}; written to {out}")
        for layer, row in enumerate(found.values):
            shown = ", ".join(f"{row[level] / base:.3f}" for level in (5, 25, 50, 100, 150)) if base else "no error"
            typer.echo(f"layer {layer}: of it left at r = 0.01, 0.05, 0.1, 0.2, 0.3: {shown}")


@app.command("solve")
def solve_command(
    scores: Annotated[pathlib.Path, typer.Argument(metavar="SCORES", help="File of `vlcache schedule profile`.")],
    out: Annotated[pathlib.Path, typer.Option(help="Schedule file to write (json).")],
    mean: Annotated[
        str | None, typer.Option(help="Mean ratio over the layers, for example 0.025.", show_default=False)
    ] = None,
    microseconds: Annotated[
        int | None, typer.Option(min=1, help="Budget of all layers instead of a mean, with --times.",
                                 show_default=False)
    ] = None,
    times: Annotated[
        pathlib.Path | None, typer.Option(help="File of `vlcache schedule times`.", show_default=False)
    ] = None,
    image_tokens: Annotated[int, typer.Option(min=1, help="Of the prompt that --times is used for.")] = 1024,
    text_rows: Annotated[int, typer.Option(min=1, help="Text tokens of that prompt.")] = 64,
    method: Annotated[str, typer.Option(help="dp (exact) or greedy (the paper's); with a mean.")] = "dp",
    distinct: Annotated[
        int, typer.Option(min=1, help="Different ratios at most; each is a shape to compile (dp).")
    ] = 6,
    free_first: Annotated[
        bool,
        typer.Option(
            "--free-first", help="The first layer costs nothing: it computes what the second needs; with a mean."
        ),
    ] = False,
    noisy: Annotated[bool, typer.Option("--noisy", help="Take scores as measured, do not smooth them.")] = False,
    picture: opt.Picture = None,
) -> None:  # fmt: skip
    """Searches the schedule with the smallest predicted error.

    Example: vlcache schedule solve scores.npz --mean 0.025 --out schedule.json --picture schedule.png
    """
    from vlcache_jax.common.files import PICTURES, check_writable
    from vlcache_jax.study.search import LayerScores, LayerTimes, find_schedule, find_schedule_within

    with say_errors():
        if (mean is None) == (microseconds is None):
            raise ValueError("mean or microseconds must be given, and not both")
        if (microseconds is None) != (times is None):
            raise ValueError("microseconds and times must be given together")
        if microseconds is not None and (method != "dp" or free_first):
            raise ValueError("method and free-first must be given with a mean, got microseconds")
        check_writable("out", out)
        check_writable("picture", picture, PICTURES)
        loaded = LayerScores.load(scores)
        if mean is not None:
            found = find_schedule(
                loaded, mean, method=method, max_distinct=distinct, count_layer0=not free_first, isotonic=not noisy
            )
        else:
            assert times is not None
            assert microseconds is not None
            found = find_schedule_within(
                loaded,
                microseconds,
                LayerTimes.load(times),
                image_tokens=image_tokens,
                text_rows=text_rows,
                max_distinct=distinct,
                isotonic=not noisy,
            )
        found.save(out)
        typer.echo(f"levels in 1/500: {', '.join(map(str, found.levels))}; mean {found.mean_text}")
        typer.echo(
            f"predicted error {found.made_by['predicted_mse']:.4g}, of full reuse "
            f"{float(loaded.values[:, 0].sum()):.4g} (sums over layers); written to {out}"
        )
        if picture is not None:
            _draw(loaded, found, picture)
            typer.echo(f"written to {picture}")


@app.command("times")
def times_command(
    out: Annotated[pathlib.Path, typer.Option(help="File to write (json).")],
    model: opt.ModelArgument = None,
    same_model: opt.SameModel = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each size; the median counts.")] = 20,
    dtype: opt.Dtype = "auto",
) -> None:
    """Measures what a layer takes at each size it is compiled for, for `solve --times`.

    Example: vlcache schedule times Qwen/Qwen3-VL-8B-Instruct --out times.json
    """
    from vlcache_jax.common.files import check_writable, write_whole

    with say_errors():
        check_writable("out", out)
        with open_model(opt.one_model(model, same_model), dtype) as llm:
            measured = _layer_times(llm, repeats)
        # Noise must not make more rows cheaper.
        rows = sorted(measured)
        microseconds = [max(measured[smaller] for smaller in rows if smaller <= size) for size in rows]
        write_whole(out, json.dumps({"rows": rows, "microseconds": microseconds}, indent=1) + "\n")
        for size, took in zip(rows, microseconds, strict=True):
            typer.echo(f"{size} rows: {took} us")
        typer.echo(f"written to {out}")


def _layer_times(llm: LLM, repeats: int) -> dict[int, int]:
    """Microseconds of a layer step by its rows, in the middle of the model (no DeepStack)."""
    import jax
    import numpy as np

    from vlcache_jax.device.programs.base import pack
    from vlcache_jax.device.programs.layers import Layer
    from vlcache_jax.models import Rows
    from vlcache_jax.pallas_kernels import PAGE, make_work

    runner = llm.service.device.runner
    layer = runner.config.text.num_layers - 2
    pages = range(1, runner.num_slots // PAGE)
    rungs = [size for size in runner.ladder.rows if size <= min(len(pages) * PAGE, llm.max_model_len)]
    measured = {}
    with Progress("timing", len(rungs)) as bar:
        for size in rungs:
            place = np.arange(size, dtype=np.int32)
            rows = Rows(PAGE + place, np.tile(place, (3, 1)), np.zeros_like(place), place + 1, place)
            packed = pack(rows, runner.ladder.max_rows)
            config = runner.shapes.work_config(size)
            work = make_work(np.zeros(size, int), rows.k_start, rows.k_end, [pages[: config.pages]], config)
            took = []
            for _ in range(repeats + 1):
                x = jax.block_until_ready(
                    runner.devices.put(np.ones((size, runner.config.text.hidden_size), runner.dtype))
                )
                program = Layer(size, size, False, False, runner.shapes.like[layer : layer + 1])
                active = np.full(2, size, np.int32)
                with runner.pool.taken() as pool:
                    start = time.perf_counter()
                    x, *pool[layer], _ = runner.run(
                        program, runner.text["layers"][layer], x, *pool[layer], packed, active, work, None, None
                    )
                    jax.block_until_ready((x, pool[layer]))
                    took.append(time.perf_counter() - start)
            measured[size] = round(1e6 * statistics.median(took[1:]))
            bar.update()
    runner.reset()
    return measured


def _draw(scores: LayerScores, schedule: Schedule, path: pathlib.Path) -> None:
    import numpy as np

    from vlcache_jax.study.report import figures, save_figure

    pyplot = figures()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    draw_scores(left, scores)
    right.bar(np.arange(scores.num_layers), [level / 500 for level in schedule.levels], color="tab:green")
    right.set(xlabel="layer", ylabel="ratio recomputed", title=f"Schedule, mean {schedule.mean_text}")
    figure.tight_layout()
    save_figure(figure, path)


def draw_scores(axis: Any, scores: LayerScores) -> None:
    """Draws S_i(r) over the layers for r = 0.1, 0.2 and 0.3 (VLCache, figure 3)."""
    for level in (50, 100, 150):
        if level <= scores.max_level:
            axis.plot(scores.values[:, level], "o-", markersize=3, label=f"r = {level / 500:g}")
    axis.axhline(scores.values[0, 0], color="black", linestyle="--", linewidth=0.8, label="full reuse")
    axis.set(xlabel="layer that recomputes", ylabel="error of the logits, S(r)", title="Sensitivity")
    axis.legend(fontsize=8)


def open_model(model: str | pathlib.Path | None, dtype: str) -> LLM:
    """An engine that links what it finds, whether that pays or not; None is the shipped model."""
    say("importing JAX")
    from vlcache_jax.assets import TINY_VQA
    from vlcache_jax.cache.config import CacheConfig
    from vlcache_jax.llm import LLM

    return LLM(model or TINY_VQA, dtype=dtype, cache=CacheConfig(load="link"))


def profile_samples(data: list[pathlib.Path] | None, count: int) -> list[Sample]:
    """`count` samples of files; without files, of splits drawn for the shipped model."""
    from vlcache_jax.benchmarks.tiny_vqa.splits import load_samples
    from vlcache_jax.common.files import check_all_readable
    from vlcache_jax.study.questions import spread

    check_all_readable("data", data or [])
    with Progress("reading questions"):
        return spread(load_samples(data or [], questions=None if data else count, split="profile"), count)
