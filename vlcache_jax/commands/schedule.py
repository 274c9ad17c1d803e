"""`vlcache schedule`: measurement of layers, and search of schedules."""

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
    samples: Annotated[int, typer.Option(min=1, help="Number of questions, spread over the files.")] = 40,
    context: Annotated[str, typer.Option(help="Text before the images: new-text or new-question.")] = "new-text",
    max_tokens: opt.MaxTokens = 32,
    dtype: opt.Dtype = "auto",
) -> None:  # fmt: skip
    """Measure the error that recomputation removes in each layer: S_i(r) for 150 ratios (VLCache, eq. 5).

    Each question is answered without reuse. Then its images have the KV of a prompt with neutral text, and one layer
    after the other recomputes tokens. If the command is stopped, it resumes from OUT.work.

    Example: vlcache schedule profile --samples 40 --out scores.npz
    """
    from vlcache_jax.common.files import check_writable
    from vlcache_jax.study.accuracy import Protocol, arrangement_of

    with say_errors():
        protocol = Protocol(arrangement_of(context, new=True), auxiliary="neutral")
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
            typer.echo(f"layer {layer}: remaining fraction at r = 0.01, 0.05, 0.1, 0.2, 0.3: {shown}")


@app.command("solve")
def solve_command(
    scores: Annotated[pathlib.Path, typer.Argument(metavar="SCORES", help="File of `vlcache schedule profile`.")],
    out: Annotated[pathlib.Path, typer.Option(help="Schedule file to write (json).")],
    mean: Annotated[
        str | None,
        typer.Option(help="Mean ratio over the layers, such as 0.025.", show_default=False, rich_help_panel="Budget"),
    ] = None,
    microseconds: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Time budget of all layers in microseconds; replaces --mean, needs --times.",
            show_default=False,
            rich_help_panel="Budget",
        ),
    ] = None,
    times: Annotated[
        pathlib.Path | None,
        typer.Option(help="File of `vlcache schedule times`.", show_default=False, rich_help_panel="Budget"),
    ] = None,
    image_tokens: Annotated[
        int, typer.Option(min=1, help="Image tokens of the prompt for --microseconds.", rich_help_panel="Budget")
    ] = 1024,
    text_rows: Annotated[
        int, typer.Option(min=1, help="Text tokens of the prompt for --microseconds.", rich_help_panel="Budget")
    ] = 64,
    method: Annotated[
        str,
        typer.Option(
            help="Search method with --mean: dp (dynamic programming, exact) or greedy (as in the VLCache paper).",
            rich_help_panel="Search",
        ),
    ] = "dp",
    distinct: Annotated[
        int,
        typer.Option(
            min=1, help="Maximum number of different ratios (dp); each is a shape to compile.", rich_help_panel="Search"
        ),
    ] = 6,
    free_first: Annotated[
        bool,
        typer.Option(
            "--free-first",
            help="Exclude the first layer from --mean, because it computes what the second layer needs.",
            rich_help_panel="Search",
        ),
    ] = False,
    noisy: Annotated[
        bool, typer.Option("--noisy", help="Use the scores without smoothing.", rich_help_panel="Search")
    ] = False,
    chart: opt.Chart = None,
) -> None:
    """Find the schedule with the smallest predicted error.

    Example: vlcache schedule solve scores.npz --mean 0.025 --out schedule.json --chart schedule.png
    """
    from vlcache_jax.common.files import PICTURES, check_writable
    from vlcache_jax.study.search import LayerScores, LayerTimes, find_schedule, find_schedule_within

    with say_errors():
        if (mean is None) == (microseconds is None):
            raise ValueError("exactly one of mean and microseconds is required: pass --mean or --microseconds")
        if (microseconds is None) != (times is None):
            raise ValueError("microseconds and times must be set together: pass --microseconds and --times")
        if microseconds is not None and (method != "dp" or free_first):
            raise ValueError("method greedy and free-first require mean, got microseconds: pass --mean")
        check_writable("out", out)
        check_writable("chart", chart, PICTURES)
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
        if chart is not None:
            _draw(loaded, found, chart)
            typer.echo(f"written to {chart}")


@app.command("times")
def times_command(
    out: Annotated[pathlib.Path, typer.Option(help="File to write (json).")],
    model: opt.ModelArgument = None,
    same_model: opt.SameModel = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each size, of which the median counts.")] = 20,
    dtype: opt.Dtype = "auto",
) -> None:
    """Measure the time of a layer at each bucket size, for `vlcache schedule solve --times`.

    Example: vlcache schedule times Qwen/Qwen3-VL-8B-Instruct --out times.json
    """
    from vlcache_jax.common.files import check_writable, write_whole

    with say_errors():
        check_writable("out", out)
        with open_model(opt.one_model(model, same_model), dtype) as llm:
            measured = _layer_times(llm, repeats)
        # Remove noise: more tokens never take less time.
        rows = sorted(measured)
        microseconds = [max(measured[smaller] for smaller in rows if smaller <= size) for size in rows]
        write_whole(out, json.dumps({"rows": rows, "microseconds": microseconds}, indent=1) + "\n")
        for size, took in zip(rows, microseconds, strict=True):
            typer.echo(f"{size} tokens: {took} us")
        typer.echo(f"written to {out}")


def _layer_times(llm: LLM, repeats: int) -> dict[int, int]:
    """Return the microseconds of a layer by number of tokens, for a layer without DeepStack."""
    import jax
    import numpy as np

    from vlcache_jax.device.programs.base import pack
    from vlcache_jax.device.programs.layers import Layer
    from vlcache_jax.models import Rows
    from vlcache_jax.pallas_kernels import PAGE, make_work

    runner = llm.service.device.runner
    layer = runner.config.text.num_layers - 2
    pages = range(1, runner.num_slots // PAGE)
    sizes = [size for size in runner.buckets.rows if size <= min(len(pages) * PAGE, llm.max_model_len)]
    measured = {}
    with Progress("timing", len(sizes)) as bar:
        for size in sizes:
            place = np.arange(size, dtype=np.int32)
            rows = Rows(PAGE + place, np.tile(place, (3, 1)), np.zeros_like(place), place + 1, place)
            packed = pack(rows, runner.buckets.max_rows)
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
                    x, pool[layer], _ = runner.run(
                        program, runner.text["layers"][layer], x, pool[layer], packed, active, work, None, None, None
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
    """Draw S_i(r) over the layers for r = 0.1, 0.2 and 0.3 (VLCache, figure 3)."""
    for level in (50, 100, 150):
        if level <= scores.max_level:
            axis.plot(scores.values[:, level], "o-", markersize=3, label=f"r = {level / 500:g}")
    axis.axhline(scores.values[0, 0], color="black", linestyle="--", linewidth=0.8, label="full reuse")
    axis.set(xlabel="layer that recomputes", ylabel="error of the logits, S(r)", title="Sensitivity")
    axis.legend(fontsize=8)


def open_model(model: str | pathlib.Path | None, dtype: str) -> LLM:
    """Open an engine that loads the KV of all cached images, without calibration; None: the shipped model.

    Raises:
      ValueError: layers of the model keep no KV, so that it has no schedules.
    """
    say("importing JAX")
    from vlcache_jax.assets import TINY_VQA
    from vlcache_jax.cache.config import CacheConfig
    from vlcache_jax.llm import LLM
    from vlcache_jax.study.model_support import check_keeps_kv, read_config

    check_keeps_kv(read_config(model or TINY_VQA), "vlcache schedule")
    return LLM(model or TINY_VQA, dtype=dtype, cache=CacheConfig(load="kv"))


def profile_samples(data: list[pathlib.Path] | None, count: int) -> list[Sample]:
    """Return `count` samples of files, or, without files, of synthetic questions for the shipped model."""
    from vlcache_jax.benchmarks.tiny_vqa.splits import load_samples
    from vlcache_jax.common.files import check_all_readable
    from vlcache_jax.study.questions import spread

    check_all_readable("data", data or [])
    with Progress("reading questions"):
        return spread(load_samples(data or [], questions=None if data else count, split="profile"), count)
