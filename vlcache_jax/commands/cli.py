"""The command `vlcache`."""

from __future__ import annotations

import functools
import os
import pathlib
import re
import warnings
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from vlcache_jax.cache.config import CacheConfig
from vlcache_jax.commands import options as opt
from vlcache_jax.commands.bench import app as bench_app
from vlcache_jax.commands.cache import app as cache_app
from vlcache_jax.commands.options import SHIPPED
from vlcache_jax.commands.schedule import app as schedule_app
from vlcache_jax.common.files import check_writable
from vlcache_jax.common.progress import say, say_errors
from vlcache_jax.convert.command import convert_command

if TYPE_CHECKING:
    from vlcache_jax.config import EngineOptions

app = typer.Typer(
    name="vlcache",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Run and serve Qwen vision-language models in JAX. Start with `vlcache demo`, which needs no weights.",
)
app.command("convert")(convert_command)
app.add_typer(bench_app)
app.add_typer(schedule_app)
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
    report: Annotated[pathlib.Path, typer.Option(help="HTML report to write.")] = pathlib.Path("vlcache-demo.html"),
) -> None:
    """Answer questions about images in four reuse modes, compare the modes, and write an HTML report.

    The model and the images ship with the package: a small Qwen3-VL, trained on grids of colored glyphs. The modes are
    no reuse, "exact", "approximate" and "full". For each mode you see the answers, the tokens computed and the time to
    the first token (TTFT).

    Example: vlcache demo --report demo.html
    """
    with say_errors():
        check_writable("report", report)
        say("importing JAX")
        from vlcache_jax.commands.demo import run_demo

        run_demo(report)


@app.command("doctor")
def doctor_command(
    again: Annotated[bool, typer.Option("--again", help="Repeat the self-test of kernels that have a result.")] = False,
) -> None:
    """Report versions, device, kernels and caches of this machine, with a remedy for each problem.

    On an NVIDIA GPU since Ampere it runs the self-test of kernels that have not been tested yet. The exit status is 1
    if there is a problem. Having no GPU is not a problem.

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
            help="Checkpoint directory, Hub ID, or a published size such as qwen3-vl-8b.",
            show_default="lists the published sizes",
        ),
    ] = None,
    same_model: opt.SameModel = None,
    image: Annotated[
        str, typer.Option(help="Image size, height x width in pixels such as 1080x1920, for which tokens are counted.")
    ] = "1024x1024",
    dtype: Annotated[
        str, typer.Option(help="Data type: float32, bfloat16, float16, or auto, which is bfloat16 as on a GPU.")
    ] = "auto",
    max_rows: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens in a prefill chunk; fewer need less memory.", show_default="what fits"),
    ] = None,
    max_pixels: Annotated[
        int | None,
        typer.Option(help="Maximum pixels of an image; fewer need less memory.", show_default="the checkpoint's own"),
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs that share the model.")] = 1,
) -> None:
    """Report what a model needs and what fits on a GPU: that of this machine, or those of common sizes.

    It reads the configuration only and downloads no weights. For published sizes of Qwen2-VL, Qwen2.5-VL and Qwen3-VL
    it needs no network.

    Example: vlcache info qwen3-vl-8b --image 1080x1920
    """
    with say_errors():
        size = re.fullmatch(r"([1-9]\d{0,5})[xX]([1-9]\d{0,5})", image)
        if size is None:
            raise ValueError(f"image must be height x width in pixels, such as 1080x1920, got {image!r}")
        if (chosen := opt.one_model(model, same_model)) is None:
            from vlcache_jax.models.registry import FP8, SIZES

            typer.echo(
                f"MODEL is a checkpoint directory, a Hub ID, {SHIPPED}, or a published size:\n"
                + "\n".join([*SIZES, *FP8])
            )
            return
        from vlcache_jax.commands.info import describe
        from vlcache_jax.study.report import show

        findings, rows, hints = describe(chosen, dtype, int(size[1]), int(size[2]), max_rows, max_pixels, gpus)
        width = 2 + max(len(name) for name, _ in findings)
        for name, found in findings:
            typer.echo(f"{name:<{width}}{found}")
        where = "a GPU" if gpus == 1 else f"{gpus} GPUs together (total bytes)"
        show(f"What fits on {where}, next to weights and activations", rows)
        typer.echo("".join(f"\n{hint}" for hint in hints), nl=bool(hints))


@app.command("calibrate")
def calibrate_command(
    model: opt.ModelArgument = None,
    same_model: opt.SameModel = None,
    dtype: opt.Dtype = "auto",
    codec: opt.Codec = "auto",
    tensor_parallel_size: opt.TensorParallelSize = 1,
) -> None:
    """Measure when loading cached images pays, once per machine and model.

    Engines with CacheConfig(load="auto"), the default, then choose the fastest way for each cached image: load its KV,
    recompute the KV from the stored encoder output, or recompute both. Run nothing else meanwhile.

    Example: vlcache calibrate Qwen/Qwen3-VL-2B-Instruct --codec int8
    """
    with say_errors():
        CacheConfig(codec=codec)
        chosen = opt.one_model(model, same_model) or SHIPPED
        say("importing JAX")
        from vlcache_jax.commands.calibrate import run

        run(chosen, dtype, codec, tensor_parallel_size)


@app.command("run", cls=opt.WithRay)
def run_command(
    source: Annotated[pathlib.Path, typer.Argument(metavar="IN", help="File of requests (JSON lines).")],
    out: Annotated[pathlib.Path, typer.Argument(metavar="OUT", help="Output file (JSON lines).")],
    model: opt.ModelOption = None,
    reuse: opt.Reuse = "exact",
    compress: opt.Compress = None,
    system: opt.System = None,
    max_tokens: Annotated[
        int,
        typer.Option(help="Maximum tokens of an output, for requests that set none.", rich_help_panel="Sampling"),
    ] = 256,
    temperature: opt.Temperature = None,
    top_p: opt.TopP = None,
    seed: opt.Seed = None,
    max_pixels: opt.MaxPixels = None,
    dtype: opt.Dtype = "auto",
    max_rows: opt.MaxRows = None,
    max_model_len: opt.MaxModelLen = None,
    kv_cache_bytes: opt.KvCacheBytes = None,
    compressed_kv_bytes: opt.CompressedKvBytes = "0",
    tensor_parallel_size: opt.TensorParallelSize = 1,
    host_bytes: opt.HostBytes = "4GiB",
    states_bytes: opt.StatesBytes = None,
    device_bytes: opt.DeviceBytes = "0",
    disk: opt.Disk = None,
    disk_bytes: opt.DiskBytes = "64GiB",
    remote: opt.Remote = None,
    peer: opt.Peers = None,
    codec: opt.Codec = "auto",
    images_from: Annotated[
        str, typer.Option(help="Folder that image paths must be in.", rich_help_panel="Images")
    ] = "/",
    allow_remote_images: opt.AllowRemoteImages = False,
    trust_request_chat_template: opt.TrustTemplates = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Discard OUT and start again.", rich_help_panel="Output")
    ] = False,
    retry_errors: Annotated[
        bool,
        typer.Option("--retry-errors", help="Run requests again that ended with an error.", rich_help_panel="Output"),
    ] = False,
    ray: opt.Ray = None,
    engines: opt.Engines = None,
) -> None:
    """Run the requests of a JSONL file. If it is stopped, the same command resumes.

    A line is a request of OpenAI's batch files, or plain: {"images": ["a.jpg"], "question": "What is it?"} or
    {"messages": [...]}, with optional "id", "metadata" and sampling parameters such as "max_tokens". Image paths are
    relative to the folder of IN. OUT gets one line per request, in the order of IN. The line of an invalid request has
    its error; the exit status is 1 only if all requests are invalid.

    Example: vlcache run questions.jsonl answers.jsonl -m Qwen/Qwen3-VL-2B-Instruct --reuse approximate
    """
    with say_errors():
        from vlcache_jax.commands.run import RunSettings, run
        from vlcache_jax.sampling import SamplingParams

        sampling = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p}
        defaults: dict[str, Any] = {name: value for name, value in sampling.items() if value is not None}
        SamplingParams(**defaults)
        cache = CacheConfig(
            host_bytes=host_bytes, states_bytes=states_bytes,
            device_bytes=device_bytes, disk=disk, disk_bytes=disk_bytes, remote=remote,
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
            "compressed_kv_bytes": compressed_kv_bytes,
            "tensor_parallel_size": tensor_parallel_size,
            "cache": cache,
        }
        settings = RunSettings(source, model, reuse, compress, system, defaults, options, trust_request_chat_template)
        if ray is None and engines is not None:
            raise ValueError(f"--engines requires --ray, got --engines {engines} without --ray")
        if ray is None:
            run(settings, out, overwrite=overwrite, retry=retry_errors)
            return
        try:
            from vlcache_jax.commands.run_ray import answer
        except ImportError as error:
            raise ValueError(
                f"--ray requires a package that is not installed: {error}; run: pip install ray"
            ) from error
        by_ray = functools.partial(answer, address=ray or None, engines=engines)
        run(settings, out, overwrite=overwrite, retry=retry_errors, answer=by_ray)


@app.command("ask")
def ask_command(
    words: Annotated[
        list[str],
        typer.Argument(metavar="[IMAGE]... QUESTION", help="Image or video files, then the question in quotes."),
    ],
    model: opt.ModelOption = None,
    reuse: opt.Reuse = "exact",
    compress: opt.Compress = None,
    system: opt.System = None,
    max_tokens: opt.MaxTokens = 256,
    temperature: opt.Temperature = None,
    top_p: opt.TopP = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed for sampling.", rich_help_panel="Sampling")] = 0,
    max_pixels: opt.MaxPixels = None,
    dtype: opt.Dtype = "auto",
    max_rows: opt.MaxRows = None,
    max_model_len: opt.MaxModelLen = None,
    kv_cache_bytes: opt.KvCacheBytes = None,
    compressed_kv_bytes: opt.CompressedKvBytes = "0",
    tensor_parallel_size: opt.TensorParallelSize = 1,
    host_bytes: opt.HostBytes = "4GiB",
    disk: opt.Disk = None,
    twice: Annotated[
        bool,
        typer.Option(
            "--twice",
            help="Ask twice, to compare TTFT without and with cached images. Programs are compiled before.",
            rich_help_panel="Image cache",
        ),
    ] = False,
    fps: Annotated[
        float | None,
        typer.Option(
            help="Frames per second sampled from videos.", show_default="the checkpoint's own", rich_help_panel="Images"
        ),
    ] = None,
) -> None:
    """Ask a question about images and videos. The file extension distinguishes them.

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
            "compressed_kv_bytes": compressed_kv_bytes,
            "tensor_parallel_size": tensor_parallel_size,
            "cache": CacheConfig(host_bytes=host_bytes, disk=disk),
        }
        sampling = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
        ask(
            words, model=model, compress=compress, system=system, fps=fps, sampling=sampling, options=options,
            twice=twice,
        )  # fmt: skip


class _Serve(TyperCommand):
    """Command with the options of the engine, which are imported when the command runs."""

    @functools.cached_property
    def own(self) -> Any:
        from vlcache_jax.commands.serve import command

        return command()

    def get_params(self, ctx: Any) -> Any:
        self.params, self.callback = self.own.params, self.own.callback
        return super().get_params(ctx)


@app.command("serve", cls=_Serve)
def serve_command() -> None:
    """Serve a model over HTTP with an OpenAI-compatible API.

    By default it accepts connections from this machine only, at http://127.0.0.1:8000/v1. Set --api-key before you set
    --host. Options of the engine and its cache have the same names as in Python. The default model is tiny-vqa.

    Example: vlcache serve Qwen/Qwen3-VL-2B-Instruct --port 8000 --api-key secret --disk ~/cache
    """


def main() -> None:
    """Run the console script."""
    # transformers logs advice for training. Errors of this package name the problem.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    warnings.showwarning = lambda message, *_, **__: say(f"warning: {message}")  # without the source line
    app()


if __name__ == "__main__":
    main()
