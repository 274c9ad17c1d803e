"""The model that answers where none is named, and what it is not for."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from vlcache_jax.assets import PICTURES
from vlcache_jax.convert.source import SHIPPED as MODELS
from vlcache_jax.progress import say

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
    """What the parts of a conversation show; what is wrong with it is for others to say."""
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
