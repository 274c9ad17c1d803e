"""The command line of the conversion: `vlcache convert`, or `python -m vlcache_jax.convert`."""

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
    """Dtypes of stored weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def convert_command(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Directory with safetensors files, or Hub ID.")],
    destination: Annotated[
        pathlib.Path | None,
        typer.Argument(
            metavar="DESTINATION", help="Directory to create; must not exist or must be empty.", show_default=False
        ),
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Dtype of the converted weights, rounded to nearest (default: as stored).")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read the converted weights back and compare them with the source.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Verify the converted SOURCE against its hashes, and convert nothing."),
    ] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")] = None,
) -> None:
    """Convert a Hugging Face checkpoint to a format that opens faster.

    SOURCE is a directory, or a model on the Hub, which is downloaded first. Tensors are converted one by one, so memory
    does not limit the size of the model. All errors are reported before anything is written. DESTINATION appears when
    it is complete, so an interrupted run leaves no incomplete checkpoint.

    Example: vlcache convert Qwen/Qwen3-VL-2B-Instruct ./qwen3-vl-2b --verify

    Then: vlcache ask photo.jpg "What is this?" --model ./qwen3-vl-2b

    Later: vlcache convert --check ./qwen3-vl-2b
    """
    with _say_errors():
        if check:
            if destination is not None or dtype is not None or verify or revision is not None:
                raise ValueError("--check takes a converted directory as SOURCE and no other argument")
            say("importing JAX")
            _check(pathlib.Path(source).expanduser())
        elif destination is None:
            raise ValueError("DESTINATION is missing: name a directory, or verify a converted SOURCE with --check")
        else:
            check_free("destination", destination.expanduser())
            say("importing JAX")
            _convert(source, destination, dtype, verify, revision)


def _convert(source: str, destination: pathlib.Path, dtype: Dtype | None, verify: bool, revision: str | None) -> None:
    from vlcache_jax.convert.kept import KEPT_FILE
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
    if report.key_bias_norms:  # codecs remove the bias of keys because of large norms
        typer.echo("norm of the key bias per layer: " + " ".join(f"{norm:.4g}" for norm in report.key_bias_norms))
    if report.kept_nbytes:
        typer.echo(f"copied the tensors that are not loaded to {KEPT_FILE}, {gigabytes(report.kept_nbytes)}")
    typer.echo(report.directory)


def _check(directory: pathlib.Path) -> None:
    from vlcache_jax.convert.stream import check_contents, check_sizes
    from vlcache_jax.models.registry import load_config

    _say_leftovers(directory)
    with _progress() as progress:
        manifest = check_contents(directory, progress=progress)
    check_sizes(directory, manifest, load_config(directory))  # the manifest must also list all parameters
    typer.echo(f"{directory}: all {len(manifest.parameters)} parameters match their hashes")


def _say_leftovers(directory: pathlib.Path) -> None:
    from vlcache_jax.convert.partial import describe_leftovers

    directory = directory.expanduser().absolute()
    for leftover in describe_leftovers(directory.parent, but=directory):
        typer.echo(f"note: {leftover}", err=True)


@contextlib.contextmanager
def _say_errors() -> Iterator[None]:
    """Print errors of the user or the system as one line, and exit with code 1."""
    try:
        yield
    except (OSError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        typer.echo("interrupted: the incomplete files are deleted", err=True)
        raise typer.Exit(130) from None


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[ConvertProgress], None]]:
    """Yield a function that shows progress: a live bar on a terminal, or a line for every tenth of the bytes."""
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
