"""Settings of `vlcache bench ttft` and `bench compression`. Their fields are the options of the commands.

This module imports no JAX, because the commands need it for `--help`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import re
import tempfile
from collections.abc import Iterator
from typing import Annotated

import typer

from vlcache_jax.cache.config import CacheConfig
from vlcache_jax.common.checks import parse_bytes, parse_counts
from vlcache_jax.common.option_types import Dtype, HostBytes, MaxTokens, Parsed
from vlcache_jax.reuse.schedule import Schedule

IMAGE = 1024  # maximum tokens of an image of `bench compression`
LEAST_TOKENS = 9  # of an output of `bench compression`: one, and those of a multi-step decode


def split_images(total: int, most: int) -> tuple[int, int]:
    """Return the number of images with `total` tokens together, and the tokens of each, for the fewest images.

    Raises:
      ValueError: `total` cannot be divided equally among images of at most `most` tokens.
    """
    count = -(-total // most)
    if total % count:
        raise ValueError(
            f"image_tokens must be divisible by {count}, the number of images of at most {most} tokens, got {total}"
        )
    return count, total // count


def _parse_names(text: str, name: str) -> tuple[str, ...]:
    return tuple(one.strip() for one in text.split(","))


@dataclasses.dataclass(frozen=True)
class BenchModel:
    """The model of a measurement: a checkpoint, or random weights of a published or of a small shape.

    Raises:
      ValueError: A model and random weights are both given.
    """

    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="Checkpoint directory or Hub ID.", show_default="random weights, 12 layers x 768"
        ),
    ] = None
    random_weights: Annotated[
        str | None,
        typer.Option(
            help="Published size to open with random weights, such as qwen3-vl-8b or qwen2.5-vl-7b; hybrid is a small "
            "decoder with linear attention.",
            show_default=False,
            rich_help_panel="Model",
        ),
    ] = None
    layers: Annotated[
        int | None,
        typer.Option(min=1, help="Number of decoder layers of the model that --random-weights names.",
                     show_default="all", rich_help_panel="Model"),
    ] = None  # fmt: skip

    def __post_init__(self) -> None:
        for name in ("random_weights", "layers"):
            if self.model is not None and getattr(self, name) is not None:
                raise ValueError(
                    f"{name} must be None if model is set, got {getattr(self, name)!r} and model {self.model!r}"
                )

    @contextlib.contextmanager
    def opened(self) -> Iterator[tuple[str, str]]:
        """Yield the model's directory, or its id, and its name; within, it can be opened."""
        if self.model is not None:
            yield self.model, pathlib.Path(self.model).name
            return
        from vlcache_jax.benchmarks.random_models import drawn_weights, make_random_model

        with tempfile.TemporaryDirectory(prefix="vlcache-bench-") as folder, drawn_weights():
            directory, name = make_random_model(folder, self.random_weights, self.layers)
            yield str(directory), name


@dataclasses.dataclass(frozen=True)
class TtftSetup(BenchModel):
    """Settings of `vlcache bench ttft`; the options describe themselves.

    Attributes:
      ratios: Ratios of image tokens that are recomputed in every layer, each a configuration; None: `ttft.RATIOS`, or
        none for a model with states, which needs an engine for each.
      max_model_len: Limit with which engines are opened; None is the length of the longest prompt.

    Raises:
      ValueError: There is nothing to measure, or settings exclude each other.
      OSError: The schedule cannot be read.
    """

    dtype: Dtype = "auto"
    images: Annotated[
        int | None, typer.Option(min=1, help="Images in the prompt.", show_default="4", rich_help_panel="Images")
    ] = None
    tokens: Annotated[
        int,
        typer.Option(min=1, help="Tokens of each image; with --image-tokens, the maximum.", rich_help_panel="Images"),
    ] = 1024
    image_tokens: Annotated[
        tuple[int, ...] | None,
        typer.Option(
            help="Total image tokens of each prompt to measure, instead of --images: 1024,3072.",
            show_default=False,
            rich_help_panel="Images",
        ),
        Parsed(parse_counts),
    ] = None
    text_before: Annotated[
        int, typer.Option(min=1, help="Text tokens before the images, new in each prompt.", rich_help_panel="Images")
    ] = 20
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each configuration, interleaved.")] = 5
    schedule: Annotated[
        pathlib.Path | None,
        typer.Option(
            help="Schedule file to measure.", show_default="falling ratios, mean 0.025", rich_help_panel="Image cache"
        ),
    ] = None
    codecs: Annotated[
        tuple[str, ...],
        typer.Option("--codec", help="Formats of stored KV to measure: auto,int8,int4.", rich_help_panel="Image cache"),
        Parsed(_parse_names),
    ] = ("auto",)
    host_bytes: HostBytes = "16GiB"
    device_bytes: Annotated[
        int | str,
        typer.Option(
            help="Device memory for copies of cached images, such as 20GB; measured too if not 0.",
            rich_help_panel="Image cache",
        ),
        Parsed(parse_bytes),
    ] = 0
    disk: Annotated[
        pathlib.Path | None,
        typer.Option(help="Directory for cached images; measured too, as after a restart.", show_default=False,
                     rich_help_panel="Image cache"),
    ] = None  # fmt: skip
    ratios: Annotated[
        tuple[str, ...] | None,
        typer.Option(
            help="Ratios of image tokens to recompute in each layer, each a mode to measure: 0.1,0.2.",
            show_default="0.3,0.2,0.1; none for models with linear attention",
            rich_help_panel="Image cache",
        ),
        Parsed(_parse_names),
    ] = None
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for codec in self.codecs:
            CacheConfig(host_bytes=self.host_bytes, device_bytes=self.device_bytes, codec=codec)
        if self.schedule is not None:
            Schedule.load(self.schedule)
        for ratio in self.ratios or ():
            if not re.fullmatch(r"0?\.0*[1-9]\d*", ratio):
                raise ValueError(f'ratios must be numbers above 0 and below 1 like "0.1,0.2", got {ratio!r}')
        if self.images is not None and self.image_tokens is not None:
            totals = ",".join(map(str, self.image_tokens))
            raise ValueError(f"images and image_tokens are mutually exclusive, got {self.images} and {totals}")
        for name in ("sizes", "codecs"):
            given = getattr(self, name)
            if not given or len(set(given)) != len(given):
                raise ValueError(f"{name} must have at least one value and no duplicates, got {given!r}")

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Sizes of the prompts: (images, tokens of each)."""
        if self.image_tokens is None:
            return ((4 if self.images is None else self.images, self.tokens),)
        return tuple(split_images(total, self.tokens) for total in self.image_tokens)


@dataclasses.dataclass(frozen=True)
class CompressionSetup(BenchModel):
    """Settings of `vlcache bench compression`; the options describe themselves.

    Raises:
      ValueError: There is nothing to measure.
    """

    dtype: Annotated[
        str, typer.Option(help="Data type of weights and KV: float32 or bfloat16.", rich_help_panel="Model")
    ] = "float32"
    lengths: Annotated[
        tuple[int, ...],
        typer.Option(
            help="Numbers of image tokens per prompt, ascending, such as 1024,3072.", rich_help_panel="Images"
        ),
        Parsed(parse_counts),
    ] = (4096, 8192, 16384)
    answers: Annotated[
        tuple[int, ...],
        typer.Option(help="Numbers of outputs that decode together, ascending.", rich_help_panel="Sampling"),
        Parsed(parse_counts),
    ] = (1, 4, 16)
    budget: Annotated[
        float, typer.Option(help="Fraction of the prompt's KV after compression.", rich_help_panel="Image cache")
    ] = 0.1
    steps: Annotated[int, typer.Option(min=1, help="Decode steps of each run.")] = 8
    max_tokens: MaxTokens = 100
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each compression, interleaved.")] = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("lengths", "answers"):
            given = getattr(self, name)
            if not given or list(given) != sorted(set(given)):
                raise ValueError(f"{name} must have at least one number, in ascending order, got {given!r}")
        if self.max_tokens < LEAST_TOKENS:
            raise ValueError(f"max_tokens must be at least {LEAST_TOKENS}, got {self.max_tokens}")
        if not 0 < self.budget < 1:
            raise ValueError(f"budget must be above 0 and below 1, got {self.budget}")
        for length in self.lengths:
            split_images(length, IMAGE)
