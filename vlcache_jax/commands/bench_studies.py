"""`vlcache bench`: what reuse and compression do to answers."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlcache_jax.benchmarks import run_apart
from vlcache_jax.commands import options as opt
from vlcache_jax.common.checks import parse_counts, parse_rates
from vlcache_jax.common.files import PICTURES, check_writable
from vlcache_jax.common.progress import say, say_errors

if TYPE_CHECKING:
    from vlcache_jax.study.accuracy import Protocol

app = typer.Typer()


# What `bench accuracy` and `bench policies` share.
_Questions = Annotated[int | None, typer.Option(min=1, help="Questions of each file at most.", show_default="all")]
_Work = Annotated[
    pathlib.Path | None, typer.Option(help="File of finished parts; a second run goes on from it.", show_default=False)
]
_Donors = Annotated[
    list[str] | None,
    typer.Option(
        metavar="<str>",
        help="together: the images fill the cache in one prompt; apart: each in its own; may be repeated.",
        show_default="together and apart",
    ),
]
_Seeds = Annotated[int, typer.Option(min=1, help="Auxiliary prompts of each question, one after the other.")]


def _protocols(orders: Iterable[str], donors: Iterable[str] | None, seeds: int, **more: str) -> list[Protocol]:
    """Every order of the prompt with every way of filling the cache, each so many times."""
    from vlcache_jax.study.accuracy import Protocol

    return [
        Protocol(order, donors=filled, seed=seed, **more)
        for order in dict.fromkeys(orders)
        for filled in dict.fromkeys(donors or ("together", "apart"))
        for seed in range(seeds)
    ]


@app.command("accuracy")
def accuracy_command(
    model: opt.ModelArgument = None,
    same_model: opt.SameModel = None,
    data: opt.Data = None,
    reuse: Annotated[
        list[str] | None,
        typer.Option(metavar="<str>", help='Setting to compare with cold; may be repeated.',
                     show_default="full, 0.03, 0.1, approximate, shift-0.1 and the schedules of the shipped model"),
    ] = None,
    arrangement: Annotated[
        list[str] | None,
        typer.Option(metavar="<str>", help="image_first, text_first, question_first; may be repeated.",
                     show_default="all"),
    ] = None,
    auxiliary: Annotated[str, typer.Option(help="Query that fills the cache: related or neutral.")] = "related",
    donors: _Donors = None,
    questions: _Questions = None,
    seeds: _Seeds = 1,
    max_tokens: opt.MaxTokens = 32,
    dtype: opt.Dtype = "auto",
    work: _Work = None,
    out: opt.Out = None,
    picture: opt.Picture = None,
) -> None:  # fmt: skip
    """Measures how reuse changes answers: each question cold and under every setting, in pairs.

    An auxiliary prompt with the same images and another query fills the cache; then the question is answered. Printed
    are the accuracy of each task, the mean, the worst task, how often the most likely token agrees with the cold
    run's, and the error of the logits.

    Example: vlcache bench accuracy --questions 100 --reuse full --reuse 0.1 --out accuracy.json
    """
    from vlcache_jax.benchmarks.accuracy import measure
    from vlcache_jax.study.questions import ARRANGEMENTS

    with say_errors():
        measure(
            opt.one_model(model, same_model),
            data or [],
            settings=reuse,
            protocols=_protocols(arrangement or ARRANGEMENTS, donors, seeds, auxiliary=auxiliary),
            questions=questions,
            max_tokens=max_tokens,
            dtype=dtype,
            work=work,
            out=out,
            picture=picture,
        )


# Of `bench policies`.
_Ratios = Annotated[
    list[float] | None,
    typer.Option(
        metavar="<float>",
        help="Every policy runs at it; may be repeated.",
        show_default="0.03, 0.1; none with --reuse",
    ),
]
_Shares = Annotated[
    list[float] | None,
    typer.Option(
        metavar="<float>",
        help="Share of image rows that every policy computes, over all layers; may be repeated.",
        show_default="0.6; none with --reuse",
    ),
]


@app.command("policies")
def policies_command(
    model: opt.ModelArgument = None,
    same_model: opt.SameModel = None,
    data: opt.Data = None,
    reuse: Annotated[
        list[str] | None,
        typer.Option(metavar="<str>",
                     help="Setting to compare with cold and with the first of them, instead of all policies; may be "
                     "repeated.", show_default=False),
    ] = None,
    ratio: _Ratios = None,
    share: _Shares = None,
    schedule: Annotated[
        list[pathlib.Path] | None,
        typer.Option(metavar="<path>",
                     help="Schedule file, compared with others at its rows; may be repeated.", show_default=False),
    ] = None,
    mean: Annotated[str, typer.Option(help="Mean ratio of the schedules that are profiled.")] = "0.025",
    profiled: Annotated[
        int | None,
        typer.Option(min=0, help="Drawn questions that a schedule is profiled on, for each table; 0: no schedules.",
                     show_default="20; none with --data or --reuse"),
    ] = None,
    size: Annotated[
        list[str] | None,
        typer.Option(metavar="<str>",
                     help="Drawn pictures: small (64 to 144 tokens), large (400), or tinted; may be repeated.",
                     show_default="small and large"),
    ] = None,
    arrangement: Annotated[
        list[str] | None,
        typer.Option(metavar="<str>", help="text_first, question_first; may be repeated.", show_default="both"),
    ] = None,
    donors: _Donors = None,
    seeds: _Seeds = 1,
    questions: _Questions = None,
    split: Annotated[str, typer.Option(help="Of the drawn files: choose on profile, report on test.")] = "test",
    max_tokens: opt.MaxTokens = 32,
    dtype: opt.Dtype = "auto",
    work: _Work = None,
    out: opt.Out = None,
) -> None:  # fmt: skip
    """Compares all policies, at equal ratios and at equal shares of image rows.

    Without data: on questions drawn for the trained models, about one image and about two, small and large; schedules
    are profiled for each table. Printed are the accuracy of each task, the mean difference to the cold run and the
    worst task with 95 % intervals, what some task may still lose by them, the difference to a static ratio of the same
    rows, the error of the logits, how often the most likely token agrees, the image rows computed, the bytes read, and
    the time.

    Example: vlcache bench policies --questions 100 --work study.work --out study.json
    """
    from vlcache_jax.benchmarks import policies
    from vlcache_jax.benchmarks.tiny_vqa.splits import PLAIN
    from vlcache_jax.study.accuracy import behind
    from vlcache_jax.study.questions import ARRANGEMENTS

    with say_errors():
        policies.measure(
            opt.one_model(model, same_model),
            data or [],
            settings=reuse or (),
            ratios=ratio or (() if reuse else policies.RATIOS),
            shares=share or (() if reuse else policies.SHARES),
            schedules=schedule or (),
            mean=mean,
            profiled=(0 if data or reuse else policies.PROFILED) if profiled is None else profiled,
            sizes=tuple(dict.fromkeys(size or PLAIN)),
            protocols=_protocols(map(behind, arrangement or ARRANGEMENTS[1:]), donors, seeds),
            questions=questions,
            split=split,
            max_tokens=max_tokens,
            dtype=dtype,
            work=work,
            out=out,
        )


# Of `bench budgets`.
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
        help="Share of a prompt's K, V to be kept; may be repeated.",
        show_default="0.05, 0.1, 0.2, 0.3, 0.5, 1",
    ),
]


@app.command("budgets")
def budgets_command(
    model: opt.ModelArgument = None,
    same_model: opt.SameModel = None,
    data: opt.Data = None,
    method: _Methods = None,
    budget: _Budgets = None,
    p: Annotated[
        list[float] | None,
        typer.Option(metavar="<float>", help="Threshold that vl-cache runs with, beside its own 0.01; may be repeated.",
                     show_default=False),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Draws of random, whose mean counts.")] = 3,
    every: Annotated[int, typer.Option(min=1, help="Tokens that h2o-stream decodes before it drops some.")] = 8,
    against: Annotated[str, typer.Option(help="The method that all are compared with, at the same memory.")] = "random",
    arrangement: Annotated[str, typer.Option(help="image_first, text_first, question_first.")] = "image_first",
    questions: Annotated[
        int | None, typer.Option(min=1, help="Questions of each file at most.", show_default="all; drawn ones: 30")
    ] = None,
    max_tokens: opt.MaxTokens = 32,
    dtype: opt.Dtype = "auto",
    max_rows: opt.MaxRows = None,
    kv_cache_bytes: opt.KvCacheBytes = None,
    compressed_kv_bytes: opt.CompressedKvBytes = "256MiB",
    work: _Work = None,
    out: opt.Out = None,
    picture: opt.Picture = None,
) -> None:  # fmt: skip
    """Measures how right answers are that go on with a part of their prompt, by method and budget.

    Printed are the accuracy of each task and, in pairs with 95 % intervals, the differences to the whole cache and to
    random at the same memory; how often the most likely token agrees with the whole cache's, and the error of the
    logits, given its answer; and how many of the tokens that the first decoded row looks at most were kept. Prompt and
    answer must fit one step (--max-rows).

    Example: vlcache bench budgets --budget 0.1 --budget 0.5 --work budgets.work --out budgets.json
    """
    from vlcache_jax.benchmarks import budgets

    with say_errors():
        budgets.measure(
            opt.one_model(model, same_model),
            data or [],
            methods=method,
            budgets=budget or budgets.BUDGETS,
            ps=p or (),
            seeds=seeds,
            every=every,
            against=against,
            arrangement=arrangement,
            questions=questions,
            max_tokens=max_tokens,
            options={
                "dtype": dtype,
                "max_rows": max_rows,
                "kv_cache_bytes": opt.pool_bytes(kv_cache_bytes),
                "compressed_kv_bytes": compressed_kv_bytes,
            },
            work=work,
            out=out,
            picture=picture,
        )


# Of `bench mpic`.
_Dialogues = Annotated[
    list[pathlib.Path] | None,
    typer.Option(
        metavar="<path>",
        help="MMDU's benchmark.json or the annotations of SparklesEval, images beside them; may be repeated.",
        show_default="questions drawn for the shipped model",
    ),
]
_Side = Annotated[int | None, typer.Option(min=1, help="Pixels that drawn pictures are scaled to.", show_default=False)]
_Policies = Annotated[
    str,
    typer.Option(
        help="Policies to compare, beside off and exact: mpic-32,cacheblend-0.15.",
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
    typer.Option(help="Online: a server is asked at so many requests a second: 0.5,1,2.", show_default=False),
]


def _check_mpic(policies: str, unused: Mapping[str, Any], work: pathlib.Path | None) -> None:
    """Raises a ValueError for what is wrong before the work."""
    from vlcache_jax.reuse.selection import parse_policy
    from vlcache_jax.study.worklog import WorkLog

    for name, value in unused.items():
        if value is not None:
            raise ValueError(f"{name} must be left out beside rates, got {value}")
    for policy in (name.strip() for name in policies.split(",") if policies):
        parse_policy(policy)
    WorkLog(work, "")  # refuses another kind of file


@app.command("mpic")
def mpic_command(
    model: opt.ModelArgument = None,
    same_model: opt.SameModel = None,
    preset: Annotated[
        bool, typer.Option("--preset", help="Random weights, 12 layers x 768, for times, instead of the shipped model.")
    ] = False,
    data: _Dialogues = None,
    images: Annotated[str, typer.Option(help="Images of a request, one number after the other.")] = "1,2,4,6,8,10",
    questions: Annotated[
        int | None,
        typer.Option(min=1, help="Requests of each number of images at most.", show_default="10; of files all"),
    ] = None,
    turns: Annotated[int, typer.Option(min=1, help="Of each dialogue in files at most.")] = 1,
    size: Annotated[str, typer.Option(help="Drawn pictures: small (64 to 144 tokens) or large (400).")] = "small",
    side: _Side = None,
    policies: _Policies = "",
    judge: _Judge = None,
    judge_model: Annotated[str | None, typer.Option(help="Its name.", show_default="the server's first")] = None,
    judge_key: _JudgeKey = None,
    rates: _Rates = None,
    requests: Annotated[int, typer.Option(min=1, help="Online: requests of each rate.")] = 50,
    max_tokens: opt.MaxTokens = 32,
    dtype: opt.Dtype = "auto",
    max_rows: opt.MaxRows = None,
    work: _Work = None,
    out: opt.Out = None,
    picture: opt.Picture = None,
) -> None:  # fmt: skip
    """Measures requests about many images that were uploaded before, as the MPIC paper does.

    Offline each request is answered alone under every policy: printed are, by number of images, the time to the first
    token and how good answers are. A judge gives marks from 1 to 10; without one there are the accuracy of drawn
    questions, and how like cold answers the others are. With --rates, the requests come to a server at these rates, as
    in bench serve. "exact" is prefix caching.

    Example: vlcache bench mpic --images 1,2,4 --questions 5 --out mpic.json --picture mpic.png

    Example: vlcache bench mpic MODEL --data mmdu/benchmark.json --judge https://api.openai.com --judge-model NAME

    Example: vlcache bench mpic --preset --side 512 --rates 0.5,1,2 --out online.json
    """
    with say_errors():
        from vlcache_jax.assets import TINY_VQA
        from vlcache_jax.benchmarks.dialogues import draw_turns, read_turns

        check_writable("out", out)
        check_writable("picture", picture, PICTURES)
        counts = tuple(dict.fromkeys(parse_counts(images, "images")))
        at = () if rates is None else parse_rates(rates, "rates")
        chosen = opt.one_model(model, same_model)
        if preset and chosen is not None:
            raise ValueError(f"preset must be left out beside a model, got {chosen}")
        offline = {"judge": judge, "work": work, "max_rows": max_rows, "dtype": None if dtype == "auto" else dtype}
        _check_mpic(policies, offline if at else {}, work)
        asked = (
            read_turns(data, counts, questions, turns=turns)
            if data
            else draw_turns(counts, questions or 10, size=size, side=side)
        )
        say("importing JAX")
        from vlcache_jax.benchmarks import mpic, ttft
        from vlcache_jax.benchmarks.judge import Judge
        from vlcache_jax.benchmarks.serving_client import Client

        named = tuple(name.strip() for name in policies.split(",")) if policies else mpic.POLICIES
        setup = ttft.TtftSetup(model=None if preset else str(chosen or TINY_VQA), dtype=dtype)
        if at:
            mpic.measure_online(
                setup, asked, named, rates=at, requests=requests, max_tokens=max_tokens, out=out, picture=picture
            )
            return
        options: dict[str, Any] = {
            "max_tokens": max_tokens,
            "judge": None if judge is None else Judge(Client(judge, judge_key), judge_model),
            "work": work,
            "out": out,
            "picture": picture,
            "max_rows": max_rows or 8192,
        }
        run_apart(mpic.measure, setup, asked, named, **options)
