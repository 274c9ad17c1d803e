"""Options that commands and the settings of measurements share, so that the help of each is written once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer


@dataclass(frozen=True)
class Parsed:
    """Annotation of a field whose option is text.

    Attributes:
      parse: Returns the value of a text. The second argument is the name of the option for errors.
    """

    parse: Callable[[str, str], Any]


Dtype = Annotated[
    str,
    typer.Option(
        help="float32, bfloat16, float16, or auto, which is bfloat16 on a GPU and float32 on a CPU.",
        rich_help_panel="Model",
    ),
]
MaxTokens = Annotated[
    int, typer.Option(min=1, help="Maximum number of tokens in an output.", rich_help_panel="Sampling")
]
HostBytes = Annotated[
    str, typer.Option(help="Host memory for cached images, such as 4GiB.", rich_help_panel="Image cache")
]
