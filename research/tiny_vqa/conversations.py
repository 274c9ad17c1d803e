"""Images and questions as chat turns, mixed as in instruction data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vlcache_jax.benchmarks.tiny_vqa.pictures import COLOURS, SHAPES
from vlcache_jax.benchmarks.tiny_vqa.tasks import Question
from vlcache_jax.study.questions import user_turn

# Fractions of the training conversations.
MIXTURE = {"image_first": 0.45, "text_first": 0.3, "question_first": 0.25}


def converse(
    rng: np.random.Generator, images: Sequence[Any], questions: Sequence[Question], arrangement: str
) -> list[dict[str, Any]]:
    """Return a full conversation: the images come with the first question, the other questions follow in separate
    turns.

    Text before the images is a system turn, an earlier exchange or sentences of the same turn.
    """
    messages: list[dict[str, Any]] = []
    other = ""
    if arrangement == "text_first":
        match rng.integers(3):
            case 0:
                messages.append({"role": "system", "content": _sentences(rng)})
                arrangement = "image_first"
            case 1:
                messages += _exchange(rng)
                arrangement = "image_first"
            case 2:
                other = _sentences(rng)
    for i, question in enumerate(questions):
        content: Any = user_turn(images, question.text, arrangement, other) if i == 0 else question.text
        messages += [{"role": "user", "content": content}, {"role": "assistant", "content": question.answer}]
    return messages


def _sentences(rng: np.random.Generator) -> str:
    return " ".join(_sentence(rng) for _ in range(rng.integers(1, 4)))


def _sentence(rng: np.random.Generator) -> str:
    glyph, number = _glyph(rng), rng.integers(1, 10)
    choices = (
        "You are a helpful assistant.",
        "Look at the picture.",
        "Please answer in a few words.",
        f"This is page {number} of the book.",
        f"Yesterday I saw a {glyph}.",
        f"There are {number} {rng.choice(SHAPES)}s on my desk.",
        f"I like {rng.choice(list(COLOURS))} more than {rng.choice(list(COLOURS))}.",
        f"My friend has a {glyph} and a {_glyph(rng)}.",
    )
    return choices[rng.integers(len(choices))]


def _exchange(rng: np.random.Generator) -> list[dict[str, Any]]:
    glyph = _glyph(rng)
    question, answer = (("Hello!", "hello"), (f"Say {glyph}.", glyph), (_sentences(rng), "ok"))[rng.integers(3)]
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _glyph(rng: np.random.Generator) -> str:
    return f"{rng.choice(list(COLOURS))} {rng.choice(SHAPES)}"
