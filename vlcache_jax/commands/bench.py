"""`vlcache bench`: benchmarks, which print a table and write JSON."""

from __future__ import annotations

import pathlib
from typing import Annotated, Any

import typer

from vlcache_jax.benchmarks import POLICIES, run_apart
from vlcache_jax.benchmarks.settings import CompressionSetup, TtftSetup
from vlcache_jax.cache.config import CacheConfig
from vlcache_jax.commands import options as opt
from vlcache_jax.commands.settings import with_settings
from vlcache_jax.common.checks import parse_bytes, parse_rates
from vlcache_jax.common.files import PICTURES, check_all_readable, check_writable
from vlcache_jax.common.progress import Progress, say, say_errors

SETTINGS = ("full", "0.03", "0.1", "approximate", "shift-0.1")  # default of `bench accuracy --reuse`
Context = Annotated[
    list[str] | None,
    typer.Option(
        metavar="<str>",
        help="Text before the images: same (none, so that reuse is exact), new-text or new-question; may be repeated.",
        show_default="all",
        rich_help_panel="Image cache",
    ),
]
Cached = Annotated[
    list[str] | None,
    typer.Option(
        metavar="<str>",
        help="Way to cache the images of a question before: together in one prompt, separately, alone (no text) or "
        "neutral (at the start of a message); may be repeated.",
        show_default="together and separately",
        rich_help_panel="Image cache",
    ),
]

app = typer.Typer(name="bench", no_args_is_help=True, help="Measure speed or accuracy, print a table and write JSON.")


@app.command("ttft")
@with_settings
def ttft_command(setup: TtftSetup, out: opt.Out = None, chart: opt.Chart = None) -> None:
    """Measure the time to first token: without reuse, with encoder output reused, and with KV reused.

    Images are noise, and the text before them is new in each prompt. Before the timing, the output with reuse is
    compared with that without reuse. Each time has its lower bound: the counted operations and bytes at the rates of
    matrix products and copies in the same run.

    Example: vlcache bench ttft --images 2 --tokens 256 --out ttft.json

    Example: vlcache bench ttft --random-weights qwen3-vl-8b --image-tokens 1024,3072,5120,10240,20480
    """
    check_writable("out", out)
    check_writable("chart", chart, PICTURES)
    say("importing JAX")
    from vlcache_jax.benchmarks import ttft

    run_apart(ttft.measure, setup, out=out, picture=chart)


@app.command("throughput")
def throughput_command(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="Checkpoint directory or Hub ID.", show_default="random weights, 6 layers x 384"
        ),
    ] = None,
    same_model: opt.SameModel = None,
    dtype: Annotated[
        str,
        typer.Option(help="Data type: float32 (outputs are compared), bfloat16, or auto (bfloat16 on a GPU).",
                     rich_help_panel="Model"),
    ] = "float32",
    requests: Annotated[int, typer.Option(help="Number of prompts, each with 0 to 2 images.")] = 96,
    images: Annotated[
        int, typer.Option(help="Number of images; half of them occur in several prompts.", rich_help_panel="Images")
    ] = 40,
    mean_answer: Annotated[
        float, typer.Option(help="Mean tokens of an output (geometric distribution).", rich_help_panel="Sampling")
    ] = 48,
    max_answer: Annotated[int, typer.Option(help="Maximum tokens of an output.", rich_help_panel="Sampling")] = 256,
    rate: Annotated[
        float | None, typer.Option(help="Requests per second, at random times.", show_default="all at once")
    ] = None,
    reuse: Annotated[
        list[str] | None,
        typer.Option(metavar="<str>", help="Reuse mode to measure; may be repeated.", show_default="exact",
                     rich_help_panel="Image cache"),
    ] = None,
    against: Annotated[
        pathlib.Path | None,
        typer.Option(help="Another checkout of this project, measured in interleaved runs.", show_default=False),
    ] = None,
    transformers: Annotated[
        bool, typer.Option("--transformers", help="Measure transformers + torch too, in its best batches.")
    ] = False,
    repeats: Annotated[int, typer.Option(help="Runs of each engine and reuse mode, interleaved.")] = 3,
    kv_cache_bytes: Annotated[
        str, typer.Option(help="Size of the KV pool of each engine.", rich_help_panel="Memory")
    ] = "512MiB",
    floor: Annotated[
        bool, typer.Option("--floor", help="Print a lower bound for the decode steps, for Qwen3-VL-8B on an H200.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of prompts, images and lengths.")] = 0,
    out: opt.Out = None,
) -> None:  # fmt: skip
    """Measure requests and tokens per second of an engine.

    Lengths of outputs are fixed. With --against, outputs of off and exact in float32 must be equal in both checkouts.

    Example: vlcache bench throughput --reuse off --reuse exact --against ../before --out throughput.json
    """
    with say_errors():
        check_writable("out", out)
        pool = parse_bytes(kv_cache_bytes, "kv_cache_bytes")
        from vlcache_jax.benchmarks import throughput

        chosen, modes = opt.one_model(model, same_model), reuse or ["exact"]
        throughput.check(modes, repeats, against, rate, transformers)
        if chosen is not None:
            from vlcache_jax.study.model_support import check_modes, read_config

            check_modes(read_config(chosen), modes)
        throughput.measure(
            chosen,
            throughput.ThroughputLoad(requests, images, mean_answer, max_answer, rate, seed),
            reuse=modes,
            dtype=dtype,
            kv_cache_bytes=pool,
            against=against,
            transformers=transformers,
            repeats=repeats,
            floor=floor,
            out=out,
        )


_BaseUrl = Annotated[
    str | None,
    typer.Option(help="URL of a server with an OpenAI API.",
                 show_default="http://127.0.0.1:8000; with --policies the command starts a server",
                 rich_help_panel="Model"),
]  # fmt: skip
_ServedModel = Annotated[
    str | None,
    typer.Option("--model", "-m", help="Name of the model at the server; for a server of the command, the checkpoint.",
                 show_default="the server's first model; random weights, 12 layers x 768", rich_help_panel="Model"),
]  # fmt: skip
_ApiKey = Annotated[str | None, typer.Option(envvar="VLCACHE_API_KEY", help="API key of the server.",
                                                 show_default=False, rich_help_panel="Model")]  # fmt: skip
_Policies = Annotated[
    str | None,
    typer.Option(help=f"Reuse modes to compare with off, such as full,mpic-32; all is {','.join(POLICIES)}.",
                 show_default=False, rich_help_panel="Image cache"),
]  # fmt: skip


@app.command("serve")
def serve_command(
    base_url: _BaseUrl = None,
    model: _ServedModel = None,
    policies: _Policies = None,
    api_key: _ApiKey = None,
    rates: Annotated[str, typer.Option(help="Requests per second, measured one after the other: 1,2,4.")] = "1",
    arrivals: Annotated[str, typer.Option(help="Arrival process: poisson, or fixed intervals.")] = "poisson",
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Maximum requests in flight; others wait.", show_default="unlimited")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Number of requests at each rate.")] = 100,
    repeats: Annotated[
        int, typer.Option(min=1, help="Runs of all rates, each with new requests; the report has medians and ranges.")
    ] = 1,
    kinds: Annotated[
        str,
        typer.Option(help="Requests: repeat (one cached image), reorder (cached images in another order), "
                     "sliding-window (an agent's last screenshots).", rich_help_panel="Images"),
    ] = "repeat,reorder,sliding-window",
    pictures: Annotated[
        int, typer.Option(min=1, help="Number of images of repeat and reorder.", rich_help_panel="Images")
    ] = 20,
    warm_cache: Annotated[
        bool,
        typer.Option("--warm-cache", help="Use the same images at all rates, and cache each before the measurement.",
                     rich_help_panel="Images"),
    ] = False,
    zipf: Annotated[
        float, typer.Option(help="Zipf exponent of the images' frequencies; 0 is uniform.", rich_help_panel="Images")
    ] = 1.0,
    window: Annotated[
        int, typer.Option(min=1, help="Number of screenshots in each sliding-window request.", rich_help_panel="Images")
    ] = 4,
    turns: Annotated[
        int,
        typer.Option(
            min=1, help="Number of turns of each agent in the sliding-window workload.", rich_help_panel="Images"
        ),
    ] = 10,
    side: Annotated[
        int, typer.Option(min=1, help="Width and height of images in pixels.", rich_help_panel="Images")
    ] = 448,
    max_tokens: opt.MaxTokens = 32,
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos", help="Continue each output to --max-tokens (a field of vLLM).",
                     rich_help_panel="Sampling"),
    ] = False,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before the measurement.")] = 3,
    slo_ttft: Annotated[float, typer.Option(help="Maximum TTFT of requests that count as goodput, in seconds.")] = 1.0,
    slo_per_token: Annotated[
        float, typer.Option(help="Maximum mean time per output token after the first, in seconds, for goodput.")
    ] = 0.1,
    timeout: Annotated[float, typer.Option(help="Timeout of a request, in seconds.")] = 600.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of images, texts and arrivals.")] = 0,
    out: opt.Out = None,
    chart: opt.Chart = None,
) -> None:  # fmt: skip
    """Measure a server under load, with requests that repeat images, reorder them or slide a window of screenshots.

    The report has the time to first token, between tokens and to the end (p50, p90, p99), throughput, goodput, and the
    fraction of prompt tokens from the cache. Times count from when a request is due. Each rate has its own images. The
    command fails if an output is empty or truncated.

    With --policies, each reuse mode gets the same requests, with a cache_salt of its own. Outputs are compared with
    those of off. A server at --base-url must allow the modes (`vlcache serve --allow-reuse`). A server that the command
    starts has compiled its programs before; its mode schedule has ratios that fall over the layers, mean 0.025.

    Example: vlcache bench serve --rates 1,2,4,8 --requests 200 --out serve.json --chart serve.png

    Example: vlcache bench serve --base-url http://gpu7:8000 --kinds sliding-window --window 6

    Example: vlcache bench serve --policies all --warm-cache --ignore-eos --max-tokens 8 --out curve.json
    """
    with say_errors():
        check_writable("out", out)
        check_writable("chart", chart, PICTURES)
        from vlcache_jax.benchmarks import serving
        from vlcache_jax.benchmarks.serving_client import Client
        from vlcache_jax.benchmarks.serving_load import ServingLoad

        fields: dict[str, Any] = {"ignore_eos": True} if ignore_eos else {}
        load = ServingLoad(
            requests=requests, kinds=tuple(kind.strip() for kind in kinds.split(",")), pictures=pictures,
            known=warm_cache, zipf=zipf, window=window, turns=turns, side=side, max_tokens=max_tokens,
            arrivals=arrivals, seed=seed,
        )  # fmt: skip
        options: dict[str, Any] = {"rates": parse_rates(rates, "rates"), "repeats": repeats, "warmup": warmup}
        goal = serving.Goal(slo_ttft, slo_per_token)
        options |= {"concurrency": concurrency, "goal": goal, "out": out, "picture": chart}
        names = serving.policy_names(policies, model if base_url is None else None)
        if base_url is None and names:
            from vlcache_jax.benchmarks.random_models import LETTERS
            from vlcache_jax.benchmarks.serving_load import own_server

            fields |= {"allowed_token_ids": LETTERS} if model is None else {}
            with own_server(model, names, load.longest) as (url, reuses):
                serving.measure(Client(url, api_key, timeout), None, load, policies=reuses, more=fields, **options)
        else:
            client = Client(base_url or "http://127.0.0.1:8000", api_key, timeout)
            serving.measure(client, model, load, policies={name: name for name in names}, more=fields, **options)


@app.command("compression")
@with_settings
def compression_command(setup: CompressionSetup, out: opt.Out = None, chart: opt.Chart = None) -> None:
    """Measure decoding with the full KV of the prompts, and with compressed KV.

    For prompts of each length, the report has the time to score and compact the KV, and the end-to-end time. Several
    outputs decode together after synthetic KV ("filled"); the first step of each is compared with dense attention. The
    time to first token is measured with and without compression. The defaults take about 10 minutes and 12 GB on two
    cores.

    Example: vlcache bench compression --lengths 1024 --answers 1,4 --repeats 1 --out compression.json
    """
    check_writable("out", out)
    check_writable("chart", chart, PICTURES)
    say("importing JAX")
    from vlcache_jax.benchmarks import compression

    run_apart(compression.measure, setup, out=out, picture=chart)


@app.command("accuracy")
def accuracy_command(
    model: opt.ModelArgument = None,
    same_model: opt.SameModel = None,
    data: opt.Data = None,
    reuse: Annotated[
        list[str] | None,
        typer.Option(metavar="<str>", help="Reuse mode to compare with no reuse; may be repeated.",
                     show_default="full, 0.03, 0.1, approximate, shift-0.1 and the schedules of the shipped model; "
                     "approximate for a model with linear attention, which takes one mode",
                     rich_help_panel="Image cache"),
    ] = None,
    context: Context = None,
    auxiliary: Annotated[
        str,
        typer.Option(
            help="Query of the prompt that fills the cache: related or neutral.", rich_help_panel="Image cache"
        ),
    ] = "related",
    cached: Cached = None,
    questions: opt.Questions = None,
    seeds: opt.Seeds = 1,
    max_tokens: opt.MaxTokens = 32,
    dtype: opt.Dtype = "auto",
    work: opt.Work = None,
    out: opt.Out = None,
    chart: opt.Chart = None,
) -> None:  # fmt: skip
    """Measure the accuracy of reuse modes, paired with the same questions without reuse.

    An auxiliary prompt with the same images and another query fills the cache. Then the question is answered. The
    report has the accuracy of each task, the mean, the worst task, the agreement of the most likely tokens with those
    of no reuse, and the error of the logits.

    Example: vlcache bench accuracy --questions 100 --reuse full --reuse 0.1 --out accuracy.json
    """
    with say_errors():
        from vlcache_jax.assets import SCHEDULES, TINY_VQA
        from vlcache_jax.benchmarks.tiny_vqa.splits import load_samples
        from vlcache_jax.study import accuracy, pairs
        from vlcache_jax.study.report import WorkLog, environment, write

        chosen = opt.one_model(model, same_model)
        orders = [accuracy.arrangement_of(one) for one in context or accuracy.CONTEXTS]
        donors = [accuracy.donors_of(one) for one in cached or ()]
        protocols = accuracy.protocols_of(orders, donors, seeds, auxiliary=auxiliary)
        check_writable("out", out)
        check_writable("chart", chart, PICTURES)
        check_all_readable("data", data or [])
        WorkLog(work, "")  # refuses another kind of file before the work
        say("importing JAX")
        from vlcache_jax import LLM
        from vlcache_jax.device.checkpoint import links_images
        from vlcache_jax.study.model_support import check_one_mode, read_config

        config = read_config(chosen or TINY_VQA)
        default = [*SETTINGS, *(map(str, SCHEDULES) if chosen is None else ())]
        settings = reuse or (default if links_images(config) else ["approximate"])
        named = accuracy.name_settings(settings, config)
        check_one_mode(config, settings)
        with Progress("reading questions"):
            samples = load_samples(data or [], questions=questions)
        engine = accuracy.engine_options(config, named, samples)
        with LLM(chosen or TINY_VQA, dtype=dtype, cache=CacheConfig(load="kv"), **engine) as llm:
            results = accuracy.run(
                llm, samples, named, accuracy.possible(protocols, samples), max_tokens=max_tokens, work=work
            )
        cases = pairs.cases_of(samples, results)
        details, totals = pairs.summarize(cases)
        pairs.show_tables(cases, details, totals)
        head = environment("jax") | {
            "model": str(chosen or "tiny_vqa, shipped with the package"),
            "data": [path.name for path in data or []] or "drawn for the shipped model",
            "max_tokens": max_tokens,
            "dtype": dtype,
            "totals": totals,
        }
        if out is not None:
            write("Accuracy under reuse", details, head, out)
        if chart is not None:
            pairs.draw(details, chart)
            print(f"written to {chart}")
