"""Dialogues about many images: files of MMDU and SparklesEval, and questions drawn for the shipped model."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import pathlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from vlcache_jax.benchmarks.tiny_vqa.splits import load_samples
from vlcache_jax.common.checks import short
from vlcache_jax.common.files import check_all_readable
from vlcache_jax.study.accuracy import Protocol
from vlcache_jax.study.questions import Sample, picture_problem, spread

_ROLES = ("user", "human"), ("assistant", "gpt")
_MARK = re.compile(r"(?:<Img>)?<ImageHere>(?:</Img>)?")  # where an image stands in a text


@dataclass(frozen=True)
class DialogueTurn:
    """A request: the last turn of a dialogue, behind what was said before it.

    Attributes:
      name: of dialogue and turn; no two have one.
      messages: the conversation, answers before the last turn as the data have them; images are files.
      images: of all messages, in their order.
      question: text of the last turn, the marks of images in it.
      reference: the answer that the data have.
      sample: what scores an answer; None: only a judge can.
    """

    name: str
    messages: list[dict[str, Any]]
    images: tuple[bytes, ...]
    question: str
    reference: str
    sample: Sample | None = None


def draw_turns(counts: Sequence[int], questions: int, *, size: str, side: int | None = None) -> list[DialogueTurn]:
    """Questions drawn for the shipped model, text before their pictures.

    Args:
      counts: pictures of a question.
      questions: of each count, of all tasks alike.
      size: of the pictures, a name of `tiny_vqa.splits.SIZES`.
      side: pixels that they are scaled to; None: as they were drawn.
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
    """The turns of MMDU's `benchmark.json`, or of the annotations of SparklesEval.

    Images are looked for under their path, beside the file, in folders beside it, and in `images` beside its folder.

    Args:
      paths: of the files.
      counts: images of a request; those of other numbers are left out.
      questions: of each count at most; None: all.
      turns: of each dialogue at most.

    Raises:
      ValueError: a file is no such file, an image is missing or cannot be read, or no request has as many images.
    """
    check_all_readable("data", paths)
    numbers = [f"{i} " for i in range(len(paths))] if len(paths) > 1 else [""]  # files may have one name
    found = [turn for path, number in zip(paths, numbers, strict=True) for turn in _read(path, number, counts, turns)]
    by_count = {count: [turn for turn in found if len(turn.images) == count] for count in counts}
    if not any(by_count.values()):
        raise ValueError(f"data must have requests of {', '.join(map(str, counts))} images, have none")
    return [turn for chosen in by_count.values() for turn in chosen[:questions]]


def as_urls(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A conversation as it is sent to a server: images as data URLs."""

    def part(one: dict[str, Any]) -> dict[str, Any]:
        return image_part(one["image"]) if one["type"] == "image" else one

    return [
        message if isinstance(message["content"], str) else {**message, "content": list(map(part, message["content"]))}
        for message in messages
    ]


def image_part(image: bytes) -> dict[str, Any]:
    """A file as part of a message that is sent to a server."""
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
    """The turns of a file's dialogues that have as many images."""
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
        for turn, (asked, told) in enumerate(zip(said[0::2], said[1::2], strict=False)):
            text, names = asked
            shown += names
            if len(shown) > max(counts) or turn >= turns:
                break
            for name in names:
                files[name] = files.get(name) or _image(path, name, number)
            messages = [*messages, {"role": "user", "content": _parts(text, [files[name] for name in names])}]
            if len(shown) in counts:
                images = tuple(files[name] for name in shown)
                yield DialogueTurn(f"{prefix}{path.name} {number} {turn}", messages, images, text, told[0])
            messages = [*messages, {"role": "assistant", "content": told[0]}]


def _said(entry: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """What user and assistant say in turn, and the images that stand in it.

    Raises:
      ValueError, LookupError, TypeError, AttributeError: it is no dialogue.
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
            raise ValueError(f"a dialogue must be texts of {_ROLES[turns % 2][0]} in its turn, got {short(message)}")
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
    """A text with images at its marks; those that have none come first."""
    texts = _MARK.split(text)
    ahead = len(images) - (len(texts) - 1)
    parts: list[dict[str, Any]] = [{"type": "image", "image": image} for image in images[:ahead]]
    for i, piece in enumerate(texts):
        parts += [{"type": "image", "image": images[ahead + i - 1]}] if i else []
        parts += [{"type": "text", "text": piece}] if piece else []
    return parts


def _image(path: pathlib.Path, name: str, dialogue: int) -> bytes:
    """The file of an image of a dialogue."""
    base = pathlib.PurePosixPath(name.replace("\\", "/")).name
    folder = path.resolve().parent
    beside = (folder, *sorted(one for one in folder.iterdir() if one.is_dir()), folder.parent / "images")
    for place in (pathlib.Path(name), folder / name, *(one / base for one in beside)):
        if len(base) < 256 and place.is_file():
            content = place.read_bytes()
            if (problem := picture_problem(content)) is not None:
                raise ValueError(f"images of dialogue {dialogue} of {path} must be pictures, got {place}: {problem}")
            return content
    raise ValueError(f"images of dialogue {dialogue} of {path} must lie beside it, {short(name)} does not")
