"""`vlcache bench`: measurements; each prints a table and writes JSON."""

from __future__ import annotations

import pathlib
from typing import Annotated, Any

import typer

from vlcache_jax.benchmarks import POLICIES, run_apart
from vlcache_jax.cache.config import CacheConfig
from vlcache_jax.commands import options as opt
from vlcache_jax.common.checks import parse_bytes, parse_counts, parse_rates
from vlcache_jax.common.files import PICTURES, check_all_readable, check_writable
from vlcache_jax.common.progress import Progress, say, say_errors
from vlcache_jax.reuse.schedule import Schedule

SETTINGS = ("full", "0.03", "0.1", "approximate", "shift-0.1")  # of `bench accuracy`, where none are named
_ALL = f"{','.join(POLICIES)}."

app = typer.Typer(name="bench", no_args_is_help=True, help="Measure speed or accuracy, print a table and write JSON.")


@app.command("ttft")
def ttft_command(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Checkpoint or hub id.", show_default="random weights, 12 layers x 768"),
    ] = None,
    same_model: opt.SameModel = None,
    random_weights: Annotated[
        str | None,
        typer.Option(help="Size of a published model, with random weights: qwen3-vl-8b, qwen2.5-vl-7b and so on.",
                     show_default=False),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Decoder layers with random weights.", show_default="all")
    ] = None,
    dtype: opt.Dtype = "auto",
    images: Annotated[int | None, typer.Option(min=1, help="Images in the prompt.", show_default="4")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each image; of --image-tokens, at most.")] = 1024,
    image_tokens: Annotated[
        str | None,
        typer.Option(help="All image tokens of the prompt, one number after the other, instead of --images: 1024,3072.",
                     show_default=False),
    ] = None,
    text_before: Annotated[int, typer.Option(min=1, help="Text tokens before the images, new in each prompt.")] = 20,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each configuration, taking turns.")] = 5,
    schedule: Annotated[
        pathlib.Path | None, typer.Option(help="Schedule file.", show_default="falling levels, mean 0.025")
    ] = None,
    codec: Annotated[str, typer.Option(help="Codecs of stored K, V, one after the other: auto,int8,int4.")] = "auto",
    host_bytes: opt.HostBytes = "16GiB",
    device_bytes: Annotated[
        str, typer.Option(help="Device memory for copies of images' records, such as 20GB: measured, too, if not 0.")
    ] = "0",
    disk: Annotated[
        pathlib.Path | None, typer.Option(help="Directory for records: measured, too, as after a restart.",
                                          show_default=False)
    ] = None,
    out: opt.Out = None,
    picture: opt.Picture = None,
) -> None:  # fmt: skip
    """Measures the time to the first token: cold, encoder cached, and with K, V reused.

    Images are noise, the text before them is new in each prompt. A repeat is compared with a cold run before anything
    is timed. Beside each time stands its floor: what its operations and bytes take at least, at the rates of matrix
    products and copies that are measured in the same run.

    Example: vlcache bench ttft --images 2 --tokens 256 --out ttft.json

    Example: vlcache bench ttft --random-weights qwen3-vl-8b --image-tokens 1024,3072,5120,10240,20480
    """
    with say_errors():
        check_writable("out", out)
        check_writable("picture", picture, PICTURES)
        codecs = tuple(one.strip() for one in codec.split(","))
        for one in codecs:
            CacheConfig(host_bytes=host_bytes, device_bytes=device_bytes, codec=one)
        if schedule is not None:
            Schedule.load(schedule)
        if images is not None and image_tokens is not None:
            raise ValueError(f"images must be left out beside image_tokens, got {images} and {image_tokens}")
        totals = () if image_tokens is None else parse_counts(image_tokens, "image_tokens")
        say("importing JAX")
        from vlcache_jax.benchmarks import ttft
        from vlcache_jax.benchmarks.known_images import split_images

        setup = ttft.TtftSetup(
            model=opt.one_model(model, same_model),
            random_weights=random_weights,
            layers=layers,
            dtype=dtype,
            sizes=tuple(split_images(total, tokens) for total in totals) or ((images or 4, tokens),),
            text_before=text_before,
            repeats=repeats,
            schedule=None if schedule is None else str(schedule),
            codecs=codecs,
            host_bytes=host_bytes,
            device_bytes=parse_bytes(device_bytes, "device_bytes"),
            disk=None if disk is None else str(disk),
        )
        run_apart(ttft.measure, setup, out=out, picture=picture)


@app.command("throughput")
def throughput_command(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Checkpoint or hub id.", show_default="random weights, 6 layers x 384"),
    ] = None,
    same_model: opt.SameModel = None,
    dtype: Annotated[
        str, typer.Option(help="float32, in which answers are compared; bfloat16, or auto: bfloat16 on a GPU.")
    ] = "float32",
    requests: Annotated[int, typer.Option(help="Prompts, each with 0 to 2 images.")] = 96,
    images: Annotated[int, typer.Option(help="Pictures; half of them are met once, the others several times.")] = 40,
    mean_answer: Annotated[float, typer.Option(help="Mean length of answers in tokens; lengths are geometric.")] = 48,
    max_answer: Annotated[int, typer.Option(help="Tokens of an answer at most.")] = 256,
    rate: Annotated[
        float | None, typer.Option(help="Requests a second, at random times.", show_default="all at once")
    ] = None,
    reuse: Annotated[
        list[str] | None,
        typer.Option(metavar="<str>", help="Setting to measure; may be repeated.", show_default="exact"),
    ] = None,
    against: Annotated[
        pathlib.Path | None,
        typer.Option(help="Another checkout of this project, measured in turn.", show_default=False),
    ] = None,
    transformers: Annotated[
        bool, typer.Option("--transformers", help="Measure transformers + torch too, in its best batches.")
    ] = False,
    repeats: Annotated[int, typer.Option(help="Runs of each engine and setting, taking turns.")] = 3,
    kv_cache_bytes: Annotated[str, typer.Option(help="KV pool of each checkout's engine.")] = "512MiB",
    floor: Annotated[
        bool, typer.Option("--floor", help="Print a lower bound for the decode steps, for Qwen3-VL-8B on an H200.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of prompts, pictures and lengths.")] = 0,
    out: opt.Out = None,
) -> None:  # fmt: skip
    """Measures how many requests and tokens a second are served.

    Answers have given lengths. With --against, those of off and exact in float32 must be the same in both checkouts.

    Example: vlcache bench throughput --reuse off --reuse exact --against ../before --out throughput.json
    """
    with say_errors():
        check_writable("out", out)
        pool = parse_bytes(kv_cache_bytes, "kv_cache_bytes")
        from vlcache_jax.benchmarks import throughput

        throughput.measure(
            opt.one_model(model, same_model),
            throughput.ThroughputLoad(requests, images, mean_answer, max_answer, rate, seed),
            reuse=reuse or ["exact"],
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
    typer.Option(help="Any server of OpenAI's API.",
                 show_default="http://127.0.0.1:8000; with --policies a server of its own"),
]  # fmt: skip
_ServedModel = Annotated[
    str | None,
    typer.Option("--model", "-m", help="As the server calls it; for a server of its own, what that opens.",
                 show_default="its first one; random weights, 12 layers x 768"),
]  # fmt: skip
_ApiKey = Annotated[str | None, typer.Option(envvar="VLCACHE_API_KEY", help="Of the server.", show_default=False)]
_Policies = Annotated[
    str | None,
    typer.Option(help='Ways to reuse that take turns beside "off", such as full,mpic-32; all: ' + _ALL,
                 show_default=False),
]  # fmt: skip


@app.command("serve")
def serve_command(
    base_url: _BaseUrl = None,
    model: _ServedModel = None,
    policies: _Policies = None,
    api_key: _ApiKey = None,
    rates: Annotated[str, typer.Option(help="Requests a second, one after the other: 1,2,4.")] = "1",
    arrivals: Annotated[str, typer.Option(help="poisson, or fixed: one as long after the other.")] = "poisson",
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests at once at most; others wait.", show_default="any number")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Of each rate.")] = 100,
    repeats: Annotated[
        int, typer.Option(min=1, help="Of all rates, each with requests of its own; medians and their spread are told.")
    ] = 1,
    kinds: Annotated[
        str,
        typer.Option(help="repeat: one known picture; move: several, in other places; slide: an agent's screenshots."),
    ] = "repeat,move,slide",
    pictures: Annotated[int, typer.Option(min=1, help="Of which repeat and move draw.")] = 20,
    known: Annotated[
        bool, typer.Option("--known", help="All rates draw of the same, each of which is shown once before.")
    ] = False,
    zipf: Annotated[float, typer.Option(help="How often the frequent ones come; 0: all alike.")] = 1.0,
    window: Annotated[int, typer.Option(min=1, help="Screenshots that an agent sees.")] = 4,
    turns: Annotated[int, typer.Option(min=1, help="Of an agent, before another one begins.")] = 10,
    side: Annotated[int, typer.Option(min=1, help="Of pictures, in pixels.")] = 448,
    max_tokens: opt.MaxTokens = 32,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="All answers have --max-tokens (vLLM's field).")
    ] = False,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before those that are measured.")] = 3,
    goal_ttft: Annotated[float, typer.Option(help="Seconds to the first token of an answer that is good.")] = 1.0,
    goal_per_token: Annotated[float, typer.Option(help="Seconds of each token after it, on average.")] = 0.1,
    timeout: Annotated[float, typer.Option(help="Seconds of a request.")] = 600.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of pictures, texts and times.")] = 0,
    out: opt.Out = None,
    picture: opt.Picture = None,
) -> None:  # fmt: skip
    """Measures a server under load: chats whose pictures repeat, move and slide, sent when they are due.

    Printed are times to the first token, between tokens and to the end (p50, p90, p99; waits count from when a request
    was due), answers a second, those that kept to the goals, and which share of prompt tokens the server had cached.
    Each rate has pictures of its own. Fails where an answer is empty or cut off.

    With --policies each way to reuse gets the same requests, with a cache_salt of its own, and answers are compared
    with those of "off". A server at --base-url must let requests choose (--allow-reuse). That of the command has
    compiled everything before; there "schedule" stands for levels that fall over the layers, in the mean 0.025.

    Example: vlcache bench serve --rates 1,2,4,8 --requests 200 --out serve.json --picture serve.png

    Example: vlcache bench serve --base-url http://gpu7:8000 --kinds slide --window 6

    Example: vlcache bench serve --policies all --known --ignore-eos --max-tokens 8 --out curve.json --picture curve.png
    """
    with say_errors():
        check_writable("out", out)
        check_writable("picture", picture, PICTURES)
        from vlcache_jax.benchmarks import serving
        from vlcache_jax.benchmarks.serving_client import Client
        from vlcache_jax.benchmarks.serving_load import ServingLoad

        more: dict[str, Any] = {"ignore_eos": True} if ignore_eos else {}
        load = ServingLoad(
            requests=requests, kinds=tuple(one.strip() for one in kinds.split(",")), pictures=pictures, known=known,
            zipf=zipf, window=window, turns=turns, side=side, max_tokens=max_tokens, arrivals=arrivals, seed=seed,
        )  # fmt: skip
        options: dict[str, Any] = {"rates": parse_rates(rates, "rates"), "repeats": repeats, "warmup": warmup}
        goal = serving.Goal(goal_ttft, goal_per_token)
        options |= {"concurrency": concurrency, "goal": goal, "out": out, "picture": picture}
        names = serving.policy_names(policies)
        if base_url is None and names:
            from vlcache_jax.benchmarks.random_models import LETTERS
            from vlcache_jax.benchmarks.serving_load import own_server

            more |= {"allowed_token_ids": LETTERS} if model is None else {}
            with own_server(model, names, load.longest) as (url, reuses):
                serving.measure(Client(url, api_key, timeout), None, load, policies=reuses, more=more, **options)
        else:
            client = Client(base_url or "http://127.0.0.1:8000", api_key, timeout)
            serving.measure(client, model, load, policies={name: name for name in names}, more=more, **options)


@app.command("compression")
def compression_command(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Checkpoint or hub id.", show_default="random weights, 12 layers x 768"),
    ] = None,
    same_model: opt.SameModel = None,
    random_weights: Annotated[
        str | None,
        typer.Option(help="Size of a published model, with random weights, as of bench ttft.", show_default=False),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Decoder layers with random weights.", show_default="all")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    lengths: Annotated[str, typer.Option(help="Image tokens of the prompts, rising.")] = "4096,8192,16384",
    answers: Annotated[str, typer.Option(help="How many answers decode together, rising.")] = "1,4,16",
    budget: Annotated[float, typer.Option(help="Share of the prompt's K, V that is kept.")] = 0.1,
    steps: Annotated[int, typer.Option(min=1, help="Of each run of answers together.")] = 8,
    max_tokens: opt.MaxTokens = 100,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each way to go on, taking turns.")] = 3,
    out: opt.Out = None,
    picture: opt.Picture = None,
) -> None:  # fmt: skip
    """Measures decoding with all of the prompts' K, V, and with a part of them.

    Requests are answered behind prompts of each length: what observing and compacting takes, and all of it from end to
    end. Several answers together decode behind prompts that are drawn ("filled"), each first step compared with dense
    attention. And requests that are not compressed are timed to their first tokens, as those that are. As it stands it
    takes about ten minutes and 12 GB on two cores.

    Example: vlcache bench compression --lengths 1024 --answers 1,4 --repeats 1 --out compression.json
    """
    with say_errors():
        check_writable("out", out)
        check_writable("picture", picture, PICTURES)
        prompts, counts = parse_counts(lengths, "lengths"), parse_counts(answers, "answers")
        say("importing JAX")
        from vlcache_jax.benchmarks import compression

        setup = compression.CompressionSetup(
            model=opt.one_model(model, same_model),
            random_weights=random_weights,
            layers=layers,
            dtype=dtype,
            lengths=prompts,
            answers=counts,
            budget=budget,
            steps=steps,
            max_tokens=max_tokens,
            repeats=repeats,
        )
        run_apart(compression.measure, setup, out=out, picture=picture)


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
    donors: opt.Donors = None,
    questions: opt.Questions = None,
    seeds: opt.Seeds = 1,
    max_tokens: opt.MaxTokens = 32,
    dtype: opt.Dtype = "auto",
    work: opt.Work = None,
    out: opt.Out = None,
    picture: opt.Picture = None,
) -> None:  # fmt: skip
    """Measures how reuse changes answers: each question cold and under every setting, in pairs.

    An auxiliary prompt with the same images and another query fills the cache; then the question is answered. Printed
    are the accuracy of each task, the mean, the worst task, how often the most likely token agrees with the cold
    run's, and the error of the logits.

    Example: vlcache bench accuracy --questions 100 --reuse full --reuse 0.1 --out accuracy.json
    """
    with say_errors():
        from vlcache_jax.assets import SCHEDULES, TINY_VQA
        from vlcache_jax.benchmarks.tiny_vqa.splits import load_samples
        from vlcache_jax.study import accuracy, pairs
        from vlcache_jax.study.questions import ARRANGEMENTS
        from vlcache_jax.study.report import WorkLog, environment, write

        chosen = opt.one_model(model, same_model)
        protocols = accuracy.protocols_of(arrangement or ARRANGEMENTS, donors, seeds, auxiliary=auxiliary)
        settings = reuse or [*SETTINGS, *(map(str, SCHEDULES) if chosen is None else ())]
        check_writable("out", out)
        check_writable("picture", picture, PICTURES)
        check_all_readable("data", data or [])
        WorkLog(work, "")  # refuses another kind of file before the work
        say("importing JAX")
        from vlcache_jax import LLM

        named = accuracy.name_settings(settings)
        with Progress("reading questions"):
            samples = load_samples(data or [], questions=questions)
        cache = CacheConfig(load="link")
        with LLM(chosen or TINY_VQA, dtype=dtype, cache=cache, enable_prefix_caching=False) as llm:
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
        if picture is not None:
            pairs.draw(details, picture)
            print(f"written to {picture}")
