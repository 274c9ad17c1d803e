"""Arguments and options that several commands have, so that they are called, explained and checked alike."""

from __future__ import annotations

import itertools
import pathlib
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from vlcache_jax.checks import parse_bytes
from vlcache_jax.commands.shipped import SHIPPED

_MODEL = f"Checkpoint directory, hub id, or {SHIPPED}: a small model that ships with the package."

# The model: of commands that take files, an option; of the others an argument, and the option, too.
ModelOption = Annotated[
    str | None, typer.Option("--model", "-m", envvar="VLCACHE_MODEL", show_default=SHIPPED, help=_MODEL)
]
ModelArgument = Annotated[
    str | None, typer.Argument(metavar="MODEL", show_default="the shipped model", help="Checkpoint or hub id.")
]
SameModel = Annotated[str | None, typer.Option("--model", "-m", hidden=True)]

Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto: bfloat16 on a GPU.")]
Reuse = Annotated[
    str,
    typer.Option(help='"exact", "approximate", "full", "off", a ratio such as 0.1, a schedule, or another policy.'),
]
Compress = Annotated[
    str | None,
    typer.Option(
        help="What of a prompt its answer goes on with: vl-cache-0.1 is a tenth. It needs --compressed-kv-bytes.",
        show_default="all",
    ),
]
Codec = Annotated[str, typer.Option(help="Of stored keys and values: auto, int8 or int4.")]

# Sampling.
MaxTokens = Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy.", show_default="the checkpoint's own")]
TopP = Annotated[
    float | None, typer.Option(help="Share of the likeliest tokens to draw from.", show_default="the checkpoint's own")
]
Seed = Annotated[
    int | None, typer.Option(min=0, help="Of what is drawn at random: another one, other answers.", show_default=False)
]
System = Annotated[str | None, typer.Option(help="System message, where a conversation has none.", show_default=False)]

# Sizes.
MaxPixels = Annotated[
    int | None,
    typer.Option(help="Pixels of an image at most; larger ones are scaled down.", show_default="the checkpoint's own"),
]
MaxRows = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens of one prefill step; fewer need less memory.", show_default="8192, on a CPU 4096"),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens of prompt and answer at most.", show_default="what model and memory allow"),
]
KvCacheBytes = Annotated[
    str | None,
    typer.Option(help="KV pool, such as 4GiB.", show_default="most of the free memory, on a CPU a quarter at most"),
]
CompressedKvBytes = Annotated[str, typer.Option(help="Pool for what is kept of compressed prompts, such as 1GiB.")]
TensorParallelSize = Annotated[int, typer.Option(min=1, help="GPUs that share the model.")]
HostBytes = Annotated[str, typer.Option(help="Host memory for what is kept of images.")]
Disk = Annotated[
    pathlib.Path | None,
    typer.Option(help="Directory for what is kept, beyond the process.", show_default=False),
]
DiskBytes = Annotated[str, typer.Option(help="Of that directory.")]
DeviceBytes = Annotated[str, typer.Option(help="GPU memory for copies of what is kept, such as 20GB.")]
Remote = Annotated[
    str | None, typer.Option(envvar="VLCACHE_REMOTE", help="URL of a store that machines share: s3://, redis://...")
]
Peers = Annotated[
    list[str] | None,
    typer.Option(metavar="<str>", help="URL of a `vlcache cache serve`; may be repeated. VLCACHE_PEER_TOKEN counts."),
]

# What rows may ask for.
AllowRemoteImages = Annotated[bool, typer.Option("--allow-remote-images", help="Fetch http(s) URLs of images.")]
TrustTemplates = Annotated[
    bool, typer.Option("--trust-request-chat-template", help="Take chat templates of rows, which can run without end.")
]

# Many engines.
Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="<address>",
        show_default=False,
        help="Answer by Ray: by the cluster at an address such as host:6379, without one by that of this machine, "
        "or a new one.",
    ),
]
Engines = Annotated[
    int | None,
    typer.Option(min=1, help="By Ray: models that are opened.", show_default="as many as there are GPUs for"),
]

# Studies.
Data = Annotated[
    list[pathlib.Path] | None,
    typer.Option(
        metavar="<path>",
        help="TSV file of VLMEvalKit; may be repeated.",
        show_default="questions drawn for the shipped model",
    ),
]
Out = Annotated[pathlib.Path | None, typer.Option(help="JSON file to write.", show_default=False)]
Picture = Annotated[pathlib.Path | None, typer.Option(help="Picture to draw (png, svg or pdf).", show_default=False)]


class WithRay(TyperCommand):
    """A command whose `--ray` may stand without an address."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        found: list[str] = []
        for word, behind in itertools.zip_longest(args, args[1:], fillvalue="--"):
            found += [word, ""] if word == "--ray" and behind.startswith("-") else [word]
        return super().parse_args(ctx, found)


def one_model(argument: str | None, option: str | None) -> str | None:
    """The model, which may be named in either way.

    Raises:
      ValueError: it is named in both.
    """
    if argument is not None and option is not None:
        raise ValueError(f"MODEL must be named once, got {argument} and --model {option}")
    return option if argument is None else argument


def pool_bytes(kv_cache_bytes: str | None) -> int | None:
    """The size of the pool, if it was given.

    Raises:
      ValueError: it is no number of bytes.
    """
    return None if kv_cache_bytes is None else parse_bytes(kv_cache_bytes, "kv_cache_bytes")


def image_limits(max_pixels: int | None) -> dict[str, int] | None:
    """What of an image's pixels is left, as `LLM` takes it."""
    return None if max_pixels is None else {"max_pixels": max_pixels}
