"""Answers scored by a model: MMDU's six criteria and an overall score, from 1 to 10 (algorithm specification C.3)."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from vlcache_jax.benchmarks.dialogues import DialogueTurn, image_part
from vlcache_jax.benchmarks.serving_client import Client

CRITERIA = (
    "Creativity",
    "Richness",
    "Visual Perception",
    "Logical Coherence",
    "Answer Accuracy",
    "Image Relationship Understanding",
)
OVERALL = "Overall Score"
_RUBRIC = """You compare an assistant's answer about some images with a reference answer, and give it marks. Be strict.

Write a sentence or two on each criterion, then give it a whole number from 1 to 10: 1 or 2 where the answer fails, \
5 or 6 where it is barely enough, 7 or 8 where it is good, 9 or 10 only where it is better than the reference.
- Creativity: it has ideas of its own, and they are worth reading.
- Richness: it goes into depth, with detail and examples.
- Visual Perception: what it says of the images is to be seen in them.
- Logical Coherence: one thing follows from the other, without contradiction.
- Answer Accuracy: it answers what was asked, and is right.
- Image Relationship Understanding: it keeps the images apart, and tells how they relate.
- Overall Score: how well it serves the person who asked; an answer that is wrong or beside the point gets 1 or 2.

End with all marks as a dictionary on one line, in this form, and write nothing behind it:
{example}

[Question]
{question}

[Reference answer]
{reference}
[End of the reference answer]

[Assistant's answer]
{answer}
[End of the assistant's answer]"""
_DICTIONARY = re.compile(r"\{[^{}]*\}")


@dataclass(frozen=True)
class Judge:
    """A model behind OpenAI's chat route.

    Attributes:
      client: of its server.
      model: as requests name it; None: the server's first, once it is `found`.
      at_once: judgements at a time.
    """

    client: Client
    model: str | None = None
    at_once: int = 4

    def found(self) -> Judge:
        """The judge with its model's name, as its server is there.

        Raises:
          ValueError: it is not, or names no model.
        """
        try:
            first = asyncio.run(self.client.model())
        except OSError as error:
            raise ValueError(f"judge must be the address of a server that can be reached: {error}") from error
        except ValueError:
            if self.model is None:
                raise
            first = self.model
        return dataclasses.replace(self, model=self.model or first)

    def scores(self, asked: Sequence[tuple[DialogueTurn, str]]) -> list[dict[str, float] | None]:
        """The marks of each answer; None: the judge gave none that can be read.

        Raises:
          OSError, ValueError: the judge cannot be reached, or its server refuses.
        """
        return asyncio.run(self._scores(asked))

    async def _scores(self, asked: Sequence[tuple[DialogueTurn, str]]) -> list[dict[str, float] | None]:
        room = asyncio.Semaphore(self.at_once)

        async def score(turn: DialogueTurn, answer: str) -> dict[str, float] | None:
            async with room:
                told = await self.client.ask("judge", _body(self.model, turn, answer), time.perf_counter())
            if told.status != 200:
                raise ValueError(f"the judge must answer, its server said: {told.error}")
            return parse_scores(told.text)

        return list(await asyncio.gather(*(score(turn, answer) for turn, answer in asked)))


def parse_scores(text: str) -> dict[str, float] | None:
    """The marks that stand in the last dictionary of a judgement; None: there is none with all of them."""
    for found in reversed(_DICTIONARY.findall(text)):
        try:
            told = ast.literal_eval(found)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        if isinstance(told, dict) and all(_is_mark(told.get(name)) for name in (*CRITERIA, OVERALL)):
            return {name: float(told[name]) for name in (*CRITERIA, OVERALL)}
    return None


def _is_mark(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 1 <= value <= 10


def _body(model: str | None, turn: DialogueTurn, answer: str) -> bytes:
    """The request for a judgement: the rubric, the question, both answers, and the images."""
    example = str(dict.fromkeys((*CRITERIA, OVERALL), 5))
    text = _RUBRIC.format(example=example, question=turn.question, reference=turn.reference, answer=answer)
    content = [{"type": "text", "text": text}, *map(image_part, turn.images)]
    asked = {"model": model, "messages": [{"role": "user", "content": content}], "temperature": 0}
    return json.dumps({**asked, "stream": True, "stream_options": {"include_usage": True}}).encode()
