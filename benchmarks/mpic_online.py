"""The requests of `vlcache bench mpic` at given rates: a server knows all their images before."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from vlcache_jax.benchmarks.dialogues import DialogueTurn, as_urls, image_part
from vlcache_jax.benchmarks.serving_load import Chat, arrival_times
from vlcache_jax.benchmarks.ttft import TtftSetup
from vlcache_jax.models.registry import load_config


@dataclass(frozen=True)
class DialogueLoad:
    """Requests drawn of some dialogues, each as often as any other; see `serving_load.Load`.

    Attributes:
      turns: of the dialogues.
      requests: of a run.
      max_tokens: of an answer at most.
    """

    turns: Sequence[DialogueTurn]
    requests: int = 100
    max_tokens: int = 32

    def times(self, rate: float, run: int) -> np.ndarray:
        """When requests come, in seconds from the beginning [requests]."""
        return arrival_times(self.requests, rate, "poisson", [run, 0])

    def chats(self, run: int, count: int | None = None) -> list[Chat]:
        """The requests of a run, or so many. Each begins with words of its own, so that no prompt begins as another."""
        count = self.requests if count is None else count
        rng = np.random.default_rng([run, 1])
        order = [int(i) for _ in range(-(-count // len(self.turns))) for i in rng.permutation(len(self.turns))]
        return [self._chat(self.turns[i], f"{run}-{number}") for number, i in enumerate(order[:count])]

    def _chat(self, turn: DialogueTurn, name: str) -> Chat:
        first, *others = as_urls(turn.messages)
        content = first["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        opened = {**first, "content": [{"type": "text", "text": f"Request {name}.\n"}, *parts]}
        return Chat(f"{len(turn.images)} images", [opened, *others])

    def shown(self) -> list[Chat]:
        """What makes all images known: each once, as an upload, behind the system message alone."""
        images = dict.fromkeys(image for turn in self.turns for image in turn.images)
        look = {"type": "text", "text": "Look."}
        return [Chat("known", [{"role": "user", "content": [image_part(image), look]}]) for image in images]

    def told(self) -> dict[str, Any]:
        """What a table says of it."""
        counts = sorted({len(turn.images) for turn in self.turns})
        told = {"requests": self.requests, "dialogues' turns": len(self.turns), "images": counts}
        return told | {"max_tokens": self.max_tokens}


def longest_prompt(setup: TtftSetup, turns: Sequence[DialogueTurn], max_tokens: int) -> int:
    """Tokens of a prompt and its answer at most: images as large as they are, and a token for each byte of text."""
    with setup.opened() as (model, _):
        vision = load_config(model).vision
    side = vision.patch_size * vision.merge_size
    return max(sum(_tokens(image, side) for image in turn.images) + _letters(turn) for turn in turns) + max_tokens


def _tokens(image: bytes, side: int) -> int:
    with Image.open(io.BytesIO(image)) as opened:
        return math.prod(math.ceil(length / side) for length in opened.size) + 8  # marks, and what rounding adds


def _letters(turn: DialogueTurn) -> int:
    texts = []
    for message in turn.messages:
        content = message["content"]
        texts += [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]
    return 64 * (len(turn.messages) + 1) + sum(len(text.encode()) for text in texts)
