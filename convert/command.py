"""The command line of a conversion: `python -m vlcache_jax.convert`, which is also `vlcache convert`."""

from __future__ import annotations

import contextlib
import enum
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from vlcache_jax.common.files import check_free
from vlcache_jax.common.progress import say
from vlcache_jax.convert.progress import gigabytes

if TYPE_CHECKING:
    from vlcache_jax.convert.progress import ConvertProgress


class Dtype(enum.StrEnum):
    """What weights can be stored in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def convert_command(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Directory with safetensors files, or a hub id.")],
    destination: Annotated[
        pathlib.Path | None,
        typer.Argument(
            metavar="DESTINATION", help="Directory to make; it must not exist or be empty.", show_default=False
        ),
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Cast the weights, rounding to nearest; by default they stay as stored.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read the converted weights back and compare them with the source.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Convert nothing: compare the converted SOURCE with the hashes of its weights."),
    ] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
) -> None:
    """Convert a Hugging Face checkpoint into one that opens faster.

    SOURCE is a directory, or a model of the hub, which is fetched first. Tensors go through memory one by one, so a
    model of any size can be converted. All that is wrong with them is said before anything is written. DESTINATION
    appears when it is complete: a run that was stopped leaves nothing that opens.

    Example: vlcache convert Qwen/Qwen3-VL-2B-Instruct ./qwen3-vl-2b --verify

    Then: vlcache ask photo.jpg "What is this?" --model ./qwen3-vl-2b

    Later: vlcache convert --check ./qwen3-vl-2b
    """
    with _say_errors():
        if check:
            if destination is not None or dtype is not None or verify or revision is not None:
                raise ValueError("--check must be given with a converted directory and nothing else")
            say("importing JAX")
            _check(pathlib.Path(source).expanduser())
        elif destination is None:
            raise ValueError("DESTINATION must be given, unless SOURCE is to be checked with --check")
        else:
            check_free("destination", destination.expanduser())
            say("importing JAX")
            _convert(source, destination, dtype, verify, revision)


def _convert(source: str, destination: pathlib.Path, dtype: Dtype | None, verify: bool, revision: str | None) -> None:
    from vlcache_jax.convert.stream import convert

    _say_leftovers(destination)
    with _progress() as progress:
        report = convert(source, destination, dtype=dtype, verify=verify, revision=revision, progress=progress)
    memory = "" if report.peak_memory is None else f", peak memory {gigabytes(report.peak_memory)}"
    checked = " and verified" if report.verified else ""
    typer.echo(
        f"converted{checked} {report.tensors} tensors, {gigabytes(report.nbytes)} of {report.dtype} in "
        f"{report.seconds:.1f} s ({report.nbytes / report.seconds / 1e9:.2f} GB/s{memory})\n"
        f"fingerprint {report.fingerprint}"
    )
    if report.key_bias_norms:  # large ones are why codecs of keys take the bias out
        typer.echo("norm of the key bias per layer: " + " ".join(f"{norm:.4g}" for norm in report.key_bias_norms))
    typer.echo(report.directory)


def _check(directory: pathlib.Path) -> None:
    from vlcache_jax.convert.stream import check_contents, check_sizes
    from vlcache_jax.models.registry import load_config

    _say_leftovers(directory)
    with _progress() as progress:
        manifest = check_contents(directory, progress=progress)
    check_sizes(directory, manifest, load_config(directory))  # no parameter may be missing in the manifest either
    typer.echo(f"{directory}: all {len(manifest.parameters)} parameters are as they were converted")


def _say_leftovers(directory: pathlib.Path) -> None:
    from vlcache_jax.convert.partial import describe_leftovers

    directory = directory.expanduser().absolute()
    for leftover in describe_leftovers(directory.parent, but=directory):
        typer.echo(f"note: {leftover}", err=True)


@contextlib.contextmanager
def _say_errors() -> Iterator[None]:
    """Errors of the user or the system are a line and exit code 1."""
    try:
        yield
    except (OSError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        typer.echo("interrupted: nothing was left behind", err=True)
        raise typer.Exit(130) from None


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[ConvertProgress], None]]:
    """A live bar on a terminal, and a line for every tenth of the bytes elsewhere."""
    if not sys.stderr.isatty():
        yield _PlainLines()
        return

    import rich.console
    import rich.progress

    columns = ("[progress.description]{task.description}", rich.progress.BarColumn(), "{task.fields[state]}")
    with rich.progress.Progress(*columns, console=rich.console.Console(stderr=True)) as bar:
        tasks: dict[str, rich.progress.TaskID] = {}

        def show(progress: ConvertProgress) -> None:
            if progress.step not in tasks:
                tasks[progress.step] = bar.add_task(progress.step, total=progress.total_nbytes, state="")
            bar.update(tasks[progress.step], completed=progress.nbytes, state=_state(progress))

        yield show


class _PlainLines:
    def __init__(self) -> None:
        self._shown: tuple[str, int] | None = None

    def __call__(self, progress: ConvertProgress) -> None:
        now = progress.step, 10 * progress.nbytes // progress.total_nbytes
        if now != self._shown:
            typer.echo(f"{progress.step} {_state(progress)}", err=True)
        self._shown = now


def _state(progress: ConvertProgress) -> str:
    memory = "" if progress.peak_memory is None else f", peak memory {gigabytes(progress.peak_memory)}"
    return (
        f"{progress.tensors}/{progress.total_tensors} tensors, {gigabytes(progress.nbytes)} of "
        f"{gigabytes(progress.total_nbytes)}, {progress.rate / 1e9:.2f} GB/s{memory}"
    )
