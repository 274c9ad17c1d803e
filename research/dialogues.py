"""Dialogues about many images: files of MMDU and SparklesEval, and questions drawn for the shipped model.

A judge is a model that scores answers: MMDU's six criteria and an overall score, from 1 to 10 (algorithm specification
C.3).
"""

from __future__ import annotations

import ast
import asyncio
import base64
import dataclasses
import io
import json
import pathlib
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from vlcache_jax.benchmarks.serving_client import Client
from vlcache_jax.benchmarks.tiny_vqa.splits import load_samples
from vlcache_jax.common.checks import short
from vlcache_jax.common.files import check_all_readable
from vlcache_jax.study.accuracy import Protocol
from vlcache_jax.study.questions import Sample, picture_problem, spread

_ROLES = ("user", "human"), ("assistant", "gpt")
_MARK = re.compile(r"(?:<Img>)?<ImageHere>(?:</Img>)?")  # place of an image in a text


@dataclass(frozen=True)
class DialogueTurn:
    """A request: the last turn of a dialogue, after its earlier turns.

    Attributes:
      name: Unique name of dialogue and turn.
      messages: The conversation, with the answers of the data before the last turn; images are files.
      images: Images of all messages, in their order.
      question: Text of the last turn, with the marks of images.
      reference: Answer of the data.
      sample: Scores an answer; None: only a judge can.
    """

    name: str
    messages: list[dict[str, Any]]
    images: tuple[bytes, ...]
    question: str
    reference: str
    sample: Sample | None = None


def draw_turns(counts: Sequence[int], questions: int, *, size: str, side: int | None = None) -> list[DialogueTurn]:
    """Return questions drawn for the shipped model, with text before their images.

    Args:
      counts: Numbers of images of a question.
      questions: Number of questions of each count, equally of all tasks.
      size: Size of the images, a name of `tiny_vqa.splits.SIZES`.
      side: Pixels that they are scaled to; None: as drawn.
    """
    turns = []
    for count in counts:
        samples = spread(load_samples([], questions=questions, images=count, size=size), questions)
        samples = [
            dataclasses.replace(one, images=tuple(_scaled(image, side) for image in one.images)) for one in samples
        ]
        for i, sample in enumerate(samples):
            messages = Protocol("text_first").formal(samples, i)
            name = f"{count} {sample.task} {sample.index}"
            turns.append(DialogueTurn(name, messages, sample.images, sample.question, sample.answers[0], sample))
    return turns


def read_turns(
    paths: Sequence[pathlib.Path], counts: Sequence[int], questions: int | None, *, turns: int
) -> list[DialogueTurn]:
    """Return the turns of MMDU's `benchmark.json`, or of the annotations of SparklesEval.

    Images are searched under their path: next to the file, in folders next to it, and in `images` next to its folder.

    Args:
      paths: Paths of the files.
      counts: Numbers of images of a request; other requests are left out.
      questions: Maximum number of each count; None: all.
      turns: Maximum turns of each dialogue.

    Raises:
      ValueError: A file has another format, an image is missing or cannot be read, or no request has as many images.
    """
    check_all_readable("data", paths)
    numbers = [f"{i} " for i in range(len(paths))] if len(paths) > 1 else [""]  # files may have the same name
    found = [turn for path, number in zip(paths, numbers, strict=True) for turn in _read(path, number, counts, turns)]
    by_count = {count: [turn for turn in found if len(turn.images) == count] for count in counts}
    if not any(by_count.values()):
        raise ValueError(f"data must have requests of {', '.join(map(str, counts))} images, got none")
    return [turn for chosen in by_count.values() for turn in chosen[:questions]]


def as_urls(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation for a server: images as data URLs."""

    def part(one: dict[str, Any]) -> dict[str, Any]:
        return image_part(one["image"]) if one["type"] == "image" else one

    return [
        message if isinstance(message["content"], str) else {**message, "content": list(map(part, message["content"]))}
        for message in messages
    ]


def image_part(image: bytes) -> dict[str, Any]:
    """Return a file as part of a message for a server."""
    with Image.open(io.BytesIO(image)) as opened:
        kind = Image.MIME[str(opened.format)]
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{base64.b64encode(image).decode()}"}}


def _scaled(image: bytes, side: int | None) -> bytes:
    if side is None:
        return image
    file = io.BytesIO()
    Image.open(io.BytesIO(image)).resize((side, side), Image.Resampling.NEAREST).save(file, "PNG")
    return file.getvalue()


def _read(path: pathlib.Path, prefix: str, counts: Sequence[int], turns: int) -> Iterator[DialogueTurn]:
    """Yield the turns of a file's dialogues with one of the numbers of images."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8-sig"))
        entries = list(entries.values()) if isinstance(entries, dict) else entries
        dialogues = [list(_said(entry)) for entry in entries]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"data must be MMDU's benchmark.json or SparklesEval's annotations, got {path}: {problem}"
        ) from error
    files: dict[str, bytes] = {}
    for number, said in enumerate(dialogues):
        messages: list[dict[str, Any]] = []
        shown: list[str] = []
        for turn, (question, answer) in enumerate(zip(said[0::2], said[1::2], strict=False)):
            text, names = question
            shown += names
            if len(shown) > max(counts) or turn >= turns:
                break
            for name in names:
                files[name] = files.get(name) or _image(path, name, number)
            messages = [*messages, {"role": "user", "content": _parts(text, [files[name] for name in names])}]
            if len(shown) in counts:
                images = tuple(files[name] for name in shown)
                yield DialogueTurn(f"{prefix}{path.name} {number} {turn}", messages, images, text, answer[0])
            messages = [*messages, {"role": "assistant", "content": answer[0]}]


def _said(entry: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Yield the alternating texts of user and assistant, and the images in each.

    Raises:
      ValueError, LookupError, TypeError, AttributeError: It is no dialogue.
    """
    is_sparkles = "dialogue" in entry
    images = [] if is_sparkles else entry["image"]
    if not isinstance(images, list):
        raise ValueError(f"image of a dialogue must be a list, got {short(images)}")
    turns = 0
    for message in entry["dialogue" if is_sparkles else "conversations"]:
        role, text = message.get("role" if is_sparkles else "from"), message["content" if is_sparkles else "value"]
        if role == "system":
            continue
        if role not in _ROLES[turns % 2] or not isinstance(text, str):
            raise ValueError(f"a dialogue must have a text of {_ROLES[turns % 2][0]} next, got {short(message)}")
        count = len(_MARK.findall(text)) if turns % 2 == 0 else 0
        if is_sparkles:
            own = [f"{image['image_id']}.jpg" for image in message.get("images") or ()]
        else:
            own, images = images[:count], images[count:]
        if count > len(own) or not all(isinstance(name, str) for name in own):
            raise ValueError(f"a dialogue must have an image for each of its {count} marks, got {own} of {short(text)}")
        turns += 1
        yield text, own


def _parts(text: str, images: Sequence[bytes]) -> list[dict[str, Any]]:
    """Return the parts of a text with images at its marks; images without marks come first."""
    texts = _MARK.split(text)
    ahead = len(images) - (len(texts) - 1)
    parts: list[dict[str, Any]] = [{"type": "image", "image": image} for image in images[:ahead]]
    for i, piece in enumerate(texts):
        parts += [{"type": "image", "image": images[ahead + i - 1]}] if i else []
        parts += [{"type": "text", "text": piece}] if piece else []
    return parts


def _image(path: pathlib.Path, name: str, dialogue: int) -> bytes:
    """Return the file of an image of a dialogue."""
    base = pathlib.PurePosixPath(name.replace("\\", "/")).name
    folder = path.resolve().parent
    beside = (folder, *sorted(one for one in folder.iterdir() if one.is_dir()), folder.parent / "images")
    for place in (pathlib.Path(name), folder / name, *(one / base for one in beside)):
        if len(base) < 256 and place.is_file():
            content = place.read_bytes()
            if (problem := picture_problem(content)) is not None:
                raise ValueError(f"images of dialogue {dialogue} of {path} must be images, got {place}: {problem}")
            return content
    raise ValueError(f"images of dialogue {dialogue} of {path} must be next to it, got {short(name)}")


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
    """A judge: a model that is reached by OpenAI's chat route.

    Attributes:
      client: Client of its server.
      model: Model name in requests; None: the server's first, set by `found`.
      at_once: Concurrent judgements.
    """

    client: Client
    model: str | None = None
    at_once: int = 4

    def found(self) -> Judge:
        """Return the judge with its model's name, after reaching its server.

        Raises:
          ValueError: The server cannot be reached, or names no model.
        """
        try:
            first = asyncio.run(self.client.model())
        except OSError as error:
            raise ValueError(f"judge must be the address of a reachable server: {error}") from error
        except ValueError:
            if self.model is None:
                raise
            first = self.model
        return dataclasses.replace(self, model=self.model or first)

    def scores(self, pairs: Sequence[tuple[DialogueTurn, str]]) -> list[dict[str, float] | None]:
        """Return the marks of each answer; None: the judge gave none that can be parsed.

        Raises:
          OSError, ValueError: The judge cannot be reached, or its server refuses.
        """
        return asyncio.run(self._scores(pairs))

    async def _scores(self, pairs: Sequence[tuple[DialogueTurn, str]]) -> list[dict[str, float] | None]:
        room = asyncio.Semaphore(self.at_once)

        async def score(turn: DialogueTurn, answer: str) -> dict[str, float] | None:
            async with room:
                response = await self.client.ask("judge", _body(self.model, turn, answer), time.perf_counter())
            if response.status != 200:
                raise ValueError(f"the judge must answer, its server returned: {response.error}")
            return parse_scores(response.text)

        return list(await asyncio.gather(*(score(turn, answer) for turn, answer in pairs)))


def parse_scores(text: str) -> dict[str, float] | None:
    """Return the marks in the last dictionary of a judgement; None: no dictionary has all of them."""
    for found in reversed(_DICTIONARY.findall(text)):
        try:
            marks = ast.literal_eval(found)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        if isinstance(marks, dict) and all(_is_mark(marks.get(name)) for name in (*CRITERIA, OVERALL)):
            return {name: float(marks[name]) for name in (*CRITERIA, OVERALL)}
    return None


def _is_mark(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 1 <= value <= 10


def _body(model: str | None, turn: DialogueTurn, answer: str) -> bytes:
    """Return the request for a judgement: the rubric, the question, both answers, and the images."""
    example = str(dict.fromkeys((*CRITERIA, OVERALL), 5))
    text = _RUBRIC.format(example=example, question=turn.question, reference=turn.reference, answer=answer)
    content = [{"type": "text", "text": text}, *map(image_part, turn.images)]
    fields = {"model": model, "messages": [{"role": "user", "content": content}], "temperature": 0}
    return json.dumps({**fields, "stream": True, "stream_options": {"include_usage": True}}).encode()
