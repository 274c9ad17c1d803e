"""The command line of a conversion: `python -m vlcache_jax.convert`, which is also `vlcache convert`."""

from __future__ import annotations

import contextlib
import enum
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from vlcache_jax.files import check_free
from vlcache_jax.progress import say

if TYPE_CHECKING:
    from vlcache_jax.convert.stream import Progress


class Dtype(enum.StrEnum):
    """What weights can be stored in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def convert_command(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Directory with safetensors files, or a hub id.")],
    destination: Annotated[
        pathlib.Path, typer.Argument(metavar="DESTINATION", help="Directory to make; it must not exist or be empty.")
    ],
    dtype: Annotated[
        Dtype | None, typer.Option(help="Cast the weights, rounding to nearest; by default they stay as stored.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read the converted weights back and compare them with the source.")
    ] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
) -> None:
    """Convert a Hugging Face checkpoint into one that loads fast.

    SOURCE is a directory, or a model of the hub, which is fetched first.
    Tensors go through memory one by one, so a model of any size can be
    converted. All that is wrong with them is said before anything is
    written. DESTINATION appears when it is complete: a run that was
    stopped leaves nothing that opens.

    Example:

        vlcache convert Qwen/Qwen3-VL-2B-Instruct ./qwen3-vl-2b --verify

    Then: vlcache ask photo.jpg "What is this?" --model ./qwen3-vl-2b
    """
    try:
        check_free("destination", destination.expanduser())
        say("importing JAX")
        from vlcache_jax.convert.stream import convert

        with _progress() as progress:
            report = convert(source, destination, dtype=dtype, verify=verify, revision=revision, progress=progress)
    except (OSError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        typer.echo("interrupted: nothing was left behind", err=True)
        raise typer.Exit(130) from None
    memory = "" if report.peak_memory is None else f", peak memory {_gigabytes(report.peak_memory)}"
    checked = " and verified" if report.verified else ""
    typer.echo(
        f"converted{checked} {report.tensors} tensors, {_gigabytes(report.nbytes)} of {report.dtype} in "
        f"{report.seconds:.1f} s ({report.nbytes / report.seconds / 1e9:.2f} GB/s{memory})\n"
        f"fingerprint {report.fingerprint}\n{report.directory}"
    )


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[Progress], None]]:
    """A live bar on a terminal, and a line for every tenth of the bytes elsewhere."""
    if not sys.stderr.isatty():
        yield _Lines()
        return

    import rich.console
    import rich.progress

    columns = ("[progress.description]{task.description}", rich.progress.BarColumn(), "{task.fields[state]}")
    with rich.progress.Progress(*columns, console=rich.console.Console(stderr=True)) as bar:
        tasks: dict[str, rich.progress.TaskID] = {}

        def show(progress: Progress) -> None:
            if progress.step not in tasks:
                tasks[progress.step] = bar.add_task(progress.step, total=progress.total_nbytes, state="")
            bar.update(tasks[progress.step], completed=progress.nbytes, state=_state(progress))

        yield show


class _Lines:
    def __init__(self) -> None:
        self._shown: tuple[str, int] | None = None

    def __call__(self, progress: Progress) -> None:
        now = progress.step, 10 * progress.nbytes // progress.total_nbytes
        if now != self._shown:
            typer.echo(f"{progress.step} {_state(progress)}", err=True)
        self._shown = now


def _state(progress: Progress) -> str:
    memory = "" if progress.peak_memory is None else f", peak memory {_gigabytes(progress.peak_memory)}"
    return (
        f"{progress.tensors}/{progress.total_tensors} tensors, {_gigabytes(progress.nbytes)} of "
        f"{_gigabytes(progress.total_nbytes)}, {progress.rate / 1e9:.2f} GB/s{memory}"
    )


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"
