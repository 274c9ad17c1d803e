"""Arguments and options that several commands have, and the model that is used if none is named."""

from __future__ import annotations

import itertools
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from vlcache_jax.assets import PICTURES
from vlcache_jax.common.checks import parse_bytes
from vlcache_jax.common.option_types import Dtype as Dtype
from vlcache_jax.common.option_types import HostBytes as HostBytes
from vlcache_jax.common.option_types import MaxTokens as MaxTokens
from vlcache_jax.common.progress import say
from vlcache_jax.convert.source import SHIPPED as MODELS

if TYPE_CHECKING:
    from vlcache_jax.llm import LLM

_MOST = 4  # the last one has nothing left to compile


def rehearse(llm: LLM, ask: Callable[[], object]) -> None:
    """Calls `ask` until it compiles no program any more, four times at most."""
    for _ in range(_MOST):
        known = llm.stats().programs
        ask()
        if llm.stats().programs == known:
            break


[SHIPPED] = MODELS
_MEDIA = ("image", "image_url", "video", "video_url", "path", "url", "base64")


def warn_of_others(conversation: Any) -> bool:
    """Says on stderr that the shipped model is not for the pictures of a conversation, if they are not the package's
    own; whether it did."""
    others = not all(map(_is_own, _shown(conversation)))
    if others:
        say(
            f"warning: no model is named (-m), so {SHIPPED} runs. It only recognizes grids of colored glyphs, and its "
            "answers about other images are wrong"
        )
    return others


def _shown(conversation: Any) -> Iterator[Any]:
    """Yield the images and videos in a conversation; invalid parts are skipped, as the engine reports them."""
    messages = conversation.get("messages") if isinstance(conversation, Mapping) else conversation
    for message in messages if isinstance(messages, list) else []:
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else []:
            for shown in (part.get(key) for key in _MEDIA) if isinstance(part, Mapping) else ():
                yield from shown if isinstance(shown, list) else [] if shown is None else [shown]


def _is_own(shown: Any) -> bool:
    path = shown.get("url") if isinstance(shown, Mapping) else shown
    if not isinstance(path, str | os.PathLike):
        return False
    try:
        return pathlib.Path(path).resolve().is_relative_to(PICTURES.resolve())
    except (OSError, ValueError):  # too long for a name, or of no text
        return False


_MODEL = f"Checkpoint directory, Hub ID, or {SHIPPED}, a small model that ships with the package."

# The model: of commands that take files, an option; of the others an argument, and the option, too.
ModelOption = Annotated[
    str | None,
    typer.Option("--model", "-m", envvar="VLCACHE_MODEL", show_default=SHIPPED, help=_MODEL, rich_help_panel="Model"),
]
ModelArgument = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", show_default="the shipped model", help="Checkpoint directory or Hub ID."),
]
SameModel = Annotated[str | None, typer.Option("--model", "-m", hidden=True)]

Reuse = Annotated[
    str,
    typer.Option(
        help="Reuse mode: exact, approximate, full, off, a ratio such as 0.1, a schedule file, "
        "or a policy such as mpic-32.",
        rich_help_panel="Image cache",
    ),
]
Compress = Annotated[
    str | None,
    typer.Option(
        help="KV compression of prompts: vl-cache-0.1 keeps a tenth. Needs --compressed-kv-bytes.",
        show_default="off",
        rich_help_panel="Image cache",
    ),
]
Codec = Annotated[
    str,
    typer.Option(
        help="Format of stored KV: auto (the data type of the model), int8 or int4.", rich_help_panel="Image cache"
    ),
]

# Sampling.
Temperature = Annotated[
    float | None,
    typer.Option(
        help="Sampling temperature; 0 is greedy.", show_default="the checkpoint's own", rich_help_panel="Sampling"
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Probability mass of the tokens to sample from.",
        show_default="the checkpoint's own",
        rich_help_panel="Sampling",
    ),
]
Seed = Annotated[
    int | None, typer.Option(min=0, help="Seed of sampling.", show_default=False, rich_help_panel="Sampling")
]
System = Annotated[
    str | None,
    typer.Option(
        help="System message for conversations that have none.", show_default=False, rich_help_panel="Sampling"
    ),
]

# Sizes.
MaxPixels = Annotated[
    int | None,
    typer.Option(
        help="Maximum number of pixels of an image; larger images are scaled down.",
        show_default="the checkpoint's own",
        rich_help_panel="Images",
    ),
]
MaxRows = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Maximum number of tokens in a prefill chunk; fewer need less memory.",
        show_default="8192, on a CPU 4096",
        rich_help_panel="Memory",
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Maximum number of tokens in a prompt and its output.",
        show_default="what model and memory allow",
        rich_help_panel="Memory",
    ),
]
KvCacheBytes = Annotated[
    str | None,
    typer.Option(
        help="Size of the KV pool, such as 4GiB.",
        show_default="most of the free memory, on a CPU a quarter at most",
        rich_help_panel="Memory",
    ),
]
CompressedKvBytes = Annotated[
    str, typer.Option(help="Size of the pool for compressed prompts, such as 1GiB.", rich_help_panel="Memory")
]
TensorParallelSize = Annotated[
    int, typer.Option(min=1, help="Number of GPUs that share the model.", rich_help_panel="Model")
]
Disk = Annotated[
    pathlib.Path | None,
    typer.Option(
        help="Directory for cached images that outlive the process.", show_default=False, rich_help_panel="Image cache"
    ),
]
DiskBytes = Annotated[
    str, typer.Option(help="Maximum size of the directory, such as 64GiB.", rich_help_panel="Image cache")
]
StatesBytes = Annotated[
    str | None,
    typer.Option(
        help="Part of the host memory for states (Qwen3.5 to 3.8), with KV of images or alone. Default: half of it.",
        rich_help_panel="Image cache",
    ),
]
DeviceBytes = Annotated[
    str, typer.Option(help="GPU memory for copies of cached images, such as 20GB.", rich_help_panel="Image cache")
]
Remote = Annotated[
    str | None,
    typer.Option(
        envvar="VLCACHE_REMOTE",
        help="URL of a store that machines share, such as s3://bucket or redis://host.",
        rich_help_panel="Image cache",
    ),
]
Peers = Annotated[
    list[str] | None,
    typer.Option(
        metavar="<str>",
        help="URL of a `vlcache cache serve`; may be repeated. VLCACHE_PEER_TOKEN has its token.",
        rich_help_panel="Image cache",
    ),
]

# What rows may ask for.
AllowRemoteImages = Annotated[
    bool, typer.Option("--allow-remote-images", help="Fetch http(s) URLs of images.", rich_help_panel="Security")
]
TrustTemplates = Annotated[
    bool,
    typer.Option(
        "--trust-request-chat-template",
        help="Accept chat templates in requests, which can run without end.",
        rich_help_panel="Security",
    ),
]

# Many engines.
Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="<address>",
        show_default=False,
        help="Run on Ray: on the cluster at an address such as host:6379, or without an address on that of this "
        "machine or a new one.",
        rich_help_panel="Ray",
    ),
]
Engines = Annotated[
    int | None,
    typer.Option(
        min=1, help="Number of engines on Ray.", show_default="as many as there are GPUs for", rich_help_panel="Ray"
    ),
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
Questions = Annotated[
    int | None, typer.Option(min=1, help="Maximum number of questions of each file.", show_default="all")
]
Work = Annotated[
    pathlib.Path | None,
    typer.Option(help="File of finished parts; a second run continues from it.", show_default=False),
]
Seeds = Annotated[int, typer.Option(min=1, help="Number of auxiliary prompts per question.")]
Out = Annotated[pathlib.Path | None, typer.Option(help="JSON file to write.", show_default=False)]
Chart = Annotated[pathlib.Path | None, typer.Option(help="Chart file to write (png, svg or pdf).", show_default=False)]


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
        raise ValueError(f"MODEL and --model are mutually exclusive, got {argument} and --model {option}")
    return option if argument is None else argument


def pool_bytes(kv_cache_bytes: str | None) -> int | None:
    """The size of the pool, if it was given.

    Raises:
      ValueError: it is no number of bytes.
    """
    return None if kv_cache_bytes is None else parse_bytes(kv_cache_bytes, "kv_cache_bytes")


def image_limits(max_pixels: int | None) -> dict[str, int] | None:
    """Return the limit of an image's pixels in the form that `LLM` takes."""
    return None if max_pixels is None else {"max_pixels": max_pixels}
