"""The command `vlcache`."""

from __future__ import annotations

import os
import pathlib
import re
import warnings
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlcache_jax.cache.config import CacheConfig
from vlcache_jax.checks import parse_bytes, parse_counts
from vlcache_jax.commands import options as opt
from vlcache_jax.commands.analyze import app as analyze_app
from vlcache_jax.commands.cache import app as cache_app
from vlcache_jax.commands.schedule import app as schedule_app
from vlcache_jax.commands.schedule import say_errors
from vlcache_jax.commands.shipped import SHIPPED
from vlcache_jax.convert.command import convert_command
from vlcache_jax.files import PICTURES, check_writable
from vlcache_jax.progress import say
from vlcache_jax.reuse.schedule import Schedule

if TYPE_CHECKING:
    from vlcache_jax.config import EngineOptions

app = typer.Typer(
    name="vlcache",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Serves Qwen vision-language models in JAX. Start with `vlcache demo`: it needs no weights.",
)
app.command("convert")(convert_command)
bench = typer.Typer(name="bench", no_args_is_help=True, help="Measures, prints a table, and writes JSON.")
app.add_typer(bench)
app.add_typer(schedule_app)
app.add_typer(analyze_app)
app.add_typer(cache_app)


def _say_version(wanted: bool) -> None:
    if wanted:
        from vlcache_jax import __version__

        typer.echo(f"vlcache {__version__}")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command("demo")
def demo_command(
    report: Annotated[pathlib.Path, typer.Option(help="HTML page to write.")] = pathlib.Path("vlcache-demo.html"),
) -> None:
    """Answers questions about pictures, cold and with the pictures reused, and writes a page about it.

    Model and pictures ship with the package: a small Qwen3-VL, trained on grids of coloured glyphs. Printed are the
    answers side by side, how many rows the language model computed, and times.

    Example: vlcache demo --report demo.html
    """
    with say_errors():
        check_writable("report", report)
        say("importing JAX")
        from vlcache_jax.commands.demo import run_demo

        run_demo(report)


@app.command("doctor")
def doctor_command(
    again: Annotated[bool, typer.Option("--again", help="Check kernels anew that have been checked before.")] = False,
) -> None:
    """Says what runs on this machine and why: versions, device, kernels, caches, and what to do about each problem.

    On a Hopper GPU it checks the kernels that have not been checked yet. The exit status is 1 if there is a problem;
    having no GPU is not one.

    Example: vlcache doctor --again
    """
    with say_errors():
        say("importing JAX")
        from vlcache_jax.commands.doctor import examine

        findings, problems = examine(again)
        width = 2 + max(len(name) for name, _ in findings)
        for name, found in findings:
            typer.echo(f"{name:<{width}}{found}")
        for problem in problems:
            typer.echo(f"\nto do: {problem}")
        if problems:
            raise typer.Exit(1)


@app.command("info")
def info_command(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Checkpoint, hub id, or a published size: qwen3-vl-8b.",
            show_default="lists the published sizes",
        ),
    ] = None,
    same_model: opt.SameModel = None,
    image: Annotated[str, typer.Option(help="Height x width of an image in pixels.")] = "1024x1024",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto: bfloat16, as on a GPU.")] = "auto",
    max_rows: Annotated[int, typer.Option(min=1, help="Tokens of one prefill step; fewer need less memory.")] = 8192,
    max_pixels: Annotated[
        int | None,
        typer.Option(help="Pixels of an image at most; fewer need less memory.", show_default="the checkpoint's own"),
    ] = None,
) -> None:
    """Says what a model is, what it needs, and what fits on a GPU: this machine's, or those of usual sizes.

    Reads the configuration alone; of a model on the hub no weights are fetched. The published sizes of Qwen2-VL,
    Qwen2.5-VL and Qwen3-VL it knows by name, without a network.

    Example: vlcache info qwen3-vl-8b --image 1080x1920
    """
    with say_errors():
        size = re.fullmatch(r"([1-9]\d{0,5})[xX]([1-9]\d{0,5})", image)
        if size is None:
            raise ValueError(f"image must be height x width in pixels, such as 1080x1920, got {image!r}")
        if (chosen := opt.one_model(model, same_model)) is None:
            from vlcache_jax.models.published import SIZES

            typer.echo(f"MODEL is a directory, a hub id, {SHIPPED}, or a published size:\n" + "\n".join(SIZES))
            return
        from vlcache_jax.commands.info import describe
        from vlcache_jax.study.report import show

        findings, rows, hints = describe(chosen, dtype, int(size[1]), int(size[2]), max_rows, max_pixels)
        width = 2 + max(len(name) for name, _ in findings)
        for name, found in findings:
            typer.echo(f"{name:<{width}}{found}")
        show("Room on a GPU, beside weights and activations", rows)
        typer.echo("".join(f"\n{hint}" for hint in hints), nl=bool(hints))


@app.command("calibrate")
def calibrate_command(
    model: opt.ModelArgument = None,
    same_model: opt.SameModel = None,
    dtype: opt.Dtype = "auto",
    codec: opt.Codec = "auto",
) -> None:
    """Measures once for a machine and a model whether linking an image pays, and keeps it for all engines to come.

    Engines with CacheConfig(load="auto"), the default, then decide for each image that is found what takes least: link
    it, compute it from its stored encoder rows, or compute it from its pixels. Nothing else should run meanwhile.

    Example: vlcache calibrate Qwen/Qwen3-VL-2B-Instruct --codec int8
    """
    with say_errors():
        CacheConfig(codec=codec)
        chosen = opt.one_model(model, same_model) or SHIPPED
        say("importing JAX")
        from vlcache_jax.commands.calibrate import run

        run(chosen, dtype, codec)


@app.command("run")
def run_command(
    source: Annotated[pathlib.Path, typer.Argument(metavar="IN", help="File of rows (JSON lines).")],
    out: Annotated[pathlib.Path, typer.Argument(metavar="OUT", help="File of answers to write (JSON lines).")],
    model: opt.ModelOption = None,
    reuse: opt.Reuse = "exact",
    system: opt.System = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most, where a row does not say.")] = 256,
    temperature: opt.Temperature = None,
    top_p: opt.TopP = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Of what is drawn at random: another one, other answers.", show_default=False),
    ] = None,
    max_pixels: opt.MaxPixels = None,
    dtype: opt.Dtype = "auto",
    max_rows: opt.MaxRows = None,
    max_model_len: opt.MaxModelLen = None,
    kv_cache_bytes: opt.KvCacheBytes = None,
    host_bytes: opt.HostBytes = "4GiB",
    device_bytes: Annotated[str, typer.Option(help="GPU memory for copies of what is kept, such as 20GB.")] = "0",
    disk: opt.Disk = None,
    disk_bytes: Annotated[str, typer.Option(help="Of that directory.")] = "64GiB",
    remote: Annotated[
        str | None, typer.Option(envvar="VLCACHE_REMOTE", help="URL of a store that machines share: s3://, redis://...")
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="<str>", help="URL of a `vlcache cache serve`; may be repeated. VLCACHE_PEER_TOKEN counts."
        ),
    ] = None,
    codec: opt.Codec = "auto",
    images_from: Annotated[str, typer.Option(help="Folder in which images on disk must lie.")] = "/",
    allow_remote_images: Annotated[
        bool, typer.Option("--allow-remote-images", help="Fetch http(s) URLs of images.")
    ] = False,
    trust_request_chat_template: Annotated[
        bool,
        typer.Option("--trust-request-chat-template", help="Take chat templates of rows, which can run without end."),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Begin anew, whatever OUT holds.")] = False,
    retry_errors: Annotated[
        bool, typer.Option("--retry-errors", help="Also answer the rows again that had an error.")
    ] = False,
) -> None:
    """Answers the rows of a file, each once: stopped, the same command goes on where it was.

    A row is a request of OpenAI's batch files, or plain: {"images": ["a.jpg"], "question": "What is it?"} or
    {"messages": [...]}, with "id", "metadata" and sampling parameters such as "max_tokens" beside them. Paths of images
    are relative to IN's folder. A wrong row is answered with its error, and the exit status is 1 only where all are. In
    the end OUT has a line for each row, in the order of IN.

    Example: vlcache run questions.jsonl answers.jsonl -m Qwen/Qwen3-VL-2B-Instruct --reuse approximate
    """
    with say_errors():
        from vlcache_jax.commands.run import Job, run
        from vlcache_jax.sampling import SamplingParams

        sampling = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p}
        defaults: dict[str, Any] = {name: value for name, value in sampling.items() if value is not None}
        SamplingParams(**defaults)
        cache = CacheConfig(
            host_bytes=host_bytes, device_bytes=device_bytes, disk=disk, disk_bytes=disk_bytes, remote=remote,
            peers=peer or (), peer_token=os.environ.get("VLCACHE_PEER_TOKEN") if peer else None, codec=codec,
        )  # fmt: skip
        options: EngineOptions = {
            "mm_processor_kwargs": opt.image_limits(max_pixels),
            "max_model_len": max_model_len,
            "seed": seed,
            "dtype": dtype,
            "allow_remote_images": allow_remote_images,
            "allowed_local_media_path": images_from,
            "max_rows": max_rows,
            "kv_cache_bytes": opt.pool_bytes(kv_cache_bytes),
            "cache": cache,
        }
        job = Job(source, model, reuse, system, defaults, options, trust_request_chat_template)
        run(job, out, overwrite=overwrite, retry=retry_errors)


@app.command("ask")
def ask_command(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[IMAGE]... QUESTION", help="Files of images or videos, and last the question in quotes."
        ),
    ],
    model: opt.ModelOption = None,
    reuse: opt.Reuse = "exact",
    system: opt.System = None,
    max_tokens: opt.MaxTokens = 256,
    temperature: opt.Temperature = None,
    top_p: opt.TopP = None,
    seed: Annotated[int, typer.Option(min=0, help="Of what is drawn at random.")] = 0,
    max_pixels: opt.MaxPixels = None,
    dtype: opt.Dtype = "auto",
    max_rows: opt.MaxRows = None,
    max_model_len: opt.MaxModelLen = None,
    kv_cache_bytes: opt.KvCacheBytes = None,
    host_bytes: opt.HostBytes = "4GiB",
    disk: opt.Disk = None,
    twice: Annotated[
        bool,
        typer.Option("--twice", help="Ask once more, now that the images are known. Programs are compiled before."),
    ] = False,
    fps: Annotated[
        float | None,
        typer.Option(help="Frames a second that are sampled of videos.", show_default="as the checkpoint says"),
    ] = None,
) -> None:
    """Asks a question about images and videos. Files are told apart by their names.

    Example: vlcache ask -m Qwen/Qwen3-VL-2B-Instruct street.jpg map.png "Is the shop on the map?" --twice
    """
    with say_errors():
        from vlcache_jax.commands.ask import ask

        options: EngineOptions = {
            "reuse": reuse,
            "dtype": dtype,
            "mm_processor_kwargs": opt.image_limits(max_pixels),
            "max_rows": max_rows,
            "max_model_len": max_model_len,
            "kv_cache_bytes": opt.pool_bytes(kv_cache_bytes),
            "cache": CacheConfig(host_bytes=host_bytes, disk=disk),
        }
        sampling = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
        ask(words, model=model, system=system, fps=fps, sampling=sampling, options=options, twice=twice)


@bench.command("ttft")
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

        setup = ttft.Setup(
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
        ttft.run(setup, out=out, picture=picture)


@bench.command("batch")
def batch_command(
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

    Example: vlcache bench batch --reuse off --reuse exact --against ../before --out throughput.json
    """
    with say_errors():
        check_writable("out", out)
        pool = parse_bytes(kv_cache_bytes, "kv_cache_bytes")
        from vlcache_jax.benchmarks import throughput

        throughput.measure(
            opt.one_model(model, same_model),
            throughput.Load(requests, images, mean_answer, max_answer, rate, seed),
            reuse=reuse or ["exact"],
            dtype=dtype,
            kv_cache_bytes=pool,
            against=against,
            transformers=transformers,
            repeats=repeats,
            floor=floor,
            out=out,
        )


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


@bench.command("accuracy")
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
    from vlcache_jax.study import accuracy
    from vlcache_jax.study.questions import ARRANGEMENTS

    with say_errors():
        measure(
            opt.one_model(model, same_model),
            data or [],
            settings=reuse,
            protocols=[
                accuracy.Protocol(order, auxiliary, filled, seed)
                for order in dict.fromkeys(arrangement or ARRANGEMENTS)
                for filled in dict.fromkeys(donors or ("together", "apart"))
                for seed in range(seeds)
            ],
            questions=questions,
            max_tokens=max_tokens,
            dtype=dtype,
            work=work,
            out=out,
            picture=picture,
        )


@bench.command("policies")
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
    ratio: Annotated[
        list[float] | None,
        typer.Option(metavar="<float>", help="Every policy runs at it; may be repeated.",
                     show_default="0.03, 0.1; none with --reuse"),
    ] = None,
    share: Annotated[
        list[float] | None,
        typer.Option(metavar="<float>",
                     help="Share of image rows that every policy computes, over all layers; may be repeated.",
                     show_default="0.6; none with --reuse"),
    ] = None,
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
    from vlcache_jax.study import accuracy
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
            protocols=[
                accuracy.Protocol(accuracy.behind(order), donors=filled, seed=seed)
                for order in dict.fromkeys(arrangement or ARRANGEMENTS[1:])
                for filled in dict.fromkeys(donors or ("together", "apart"))
                for seed in range(seeds)
            ],
            questions=questions,
            split=split,
            max_tokens=max_tokens,
            dtype=dtype,
            work=work,
            out=out,
        )


def main() -> None:
    """Entry point of the console script."""
    # Advice of transformers for people who train with it; a word of ours says what is wrong.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    warnings.showwarning = lambda message, *_, **__: say(f"warning: {message}")  # nobody asked for lines of source
    app()


if __name__ == "__main__":
    main()
