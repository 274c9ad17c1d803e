"""Questions of benchmark files, and user turns with images and a question."""

from __future__ import annotations

import ast
import base64
import binascii
import collections
import csv
import dataclasses
import io
import itertools
import json
import pathlib
import string
import sys
import warnings
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from PIL import Image, UnidentifiedImageError

from vlcache_jax.common.progress import say
from vlcache_jax.study.scoring import METHODS, OPTION, Rules, option, rules_of

ARRANGEMENTS = ("image_first", "text_first", "question_first")
_NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
# Queries of auxiliary prompts, about one image and about several.
RELATED = (
    ("What is shown in this picture?", "What is shown in these pictures?"),
    ("Which objects can be seen?", "Which objects can be seen in both?"),
    ("Is there any text, and what does it say?", "Is there any text in them, and what does it say?"),
    ("How many separate things are there?", "How many separate things are there in all?"),
    ("Which colours are most common?", "Which colours do they share?"),
    ("Where is the most important part?", "Which of them shows more?"),
    ("What could this be used for?", "What could these be used for?"),
    ("What is unusual about it?", "How do they differ?"),
)
_CIRCLE = 1_000_000  # rows of a circular question have the same index modulo this


@dataclasses.dataclass(frozen=True)
class Sample:
    """Row of a benchmark file.

    Attributes:
      index: index of the row in its file.
      task: category of the row, or the name of the file.
      images: encoded image files.
      question: text of the question, with its options.
      answers: accepted answers; with options, the right letter.
      options: (letter, text) of the options for the score. MMMU's questions without options have two that are not
        shown.
      method: scoring method, a name of `scoring.METHODS` or `scoring.OPTION`.
      question_id: id of a question with several rows, which is right only if all rows are; empty: a row is a question.
      numbered: True if several images are numbered in the prompt.
      related: queries of auxiliary prompts, pairs of one about a single image and one about several; at least two.
    """

    index: str
    task: str
    images: tuple[bytes, ...]
    question: str
    answers: tuple[str, ...]
    options: tuple[tuple[str, str], ...] = ()
    method: str = "words"
    question_id: str = ""
    numbered: bool = True
    related: tuple[tuple[str, str], ...] = RELATED

    def score(self, text: str) -> float:
        """Return the score of an answer, from 0 to 1."""
        if self.method == OPTION:
            return option(dict(self.options), self.answers, text)
        return METHODS[self.method](self.answers, text)


def read_tsv(path: pathlib.Path) -> list[Sample]:
    """Read a TSV file of VLMEvalKit.

    Required columns are index, image, question and answer. A to Z (options), hint, category and g_index are optional.
    An image is base64, a list of base64 (Python or JSON), or the index of the row that has the image. Rows without an
    image are left out, as VLMEvalKit does. An answer is a text, a list of accepted texts (Python or JSON), or, with
    options, a letter. The name of the file determines prompts and scores (`scoring.rules_of`).

    Raises:
      ValueError: a column is missing, no row has an image, two rows have the same index, or a row has no answer or an
        invalid image.
    """
    every = _rows(path)
    rows = [row for row in every if (row["image"] or "").strip()]
    if not rows:
        raise ValueError(f"{path} must have at least one row with an image, got none")
    if len(rows) < len(every):
        say(f"{len(every) - len(rows)} of {len(every)} rows of {path.name} have no image and are left out")
    cells = {row["index"]: row["image"] for row in rows}
    options = [_options(row) for row in rows]
    answers = [_answers(row, bool(found), _where(row, path)) for row, found in zip(rows, options, strict=True)]
    rules = rules_of(path.stem, answers)
    samples = []
    for row, choices, accepted in zip(rows, options, answers, strict=True):
        where = _where(row, path)
        scored = _scored(row, choices, accepted, rules, where)
        cell = row["image"]
        if len(cell) <= 64 and cell in cells:
            cell = cells[cell]
        samples.append(
            Sample(
                index=row["index"],
                task=(row.get("category") or path.stem).strip(),
                images=tuple(_images(cell, where)),
                question=_question(row, choices, rules),
                question_id=f"{path.stem} {_circle(row, where)}" if rules.circular else "",
                numbered=rules.numbered,
                **scored,
            )
        )
    return samples


def _rows(path: pathlib.Path) -> list[dict[str, str]]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, delimiter="\t")
            columns = set(reader.fieldnames or ())
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"data must be a readable TSV file in UTF-8, got {path}: {error}") from error
    if missing := {"index", "image", "question", "answer"} - columns:
        raise ValueError(
            f"{path} must have the columns index, image, question and answer, "
            f"got none named {', '.join(sorted(missing))}"
        )
    if not rows:
        raise ValueError(f"{path} must have at least one row, got none")
    for index, count in collections.Counter(row["index"] for row in rows).items():
        if count > 1:
            raise ValueError(f"index must be unique in {path}, got {index!r} in {count} rows")
    return rows


def _where(row: dict[str, str], path: pathlib.Path) -> str:
    return f"row {row['index']} of {path}"


def _options(row: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple((letter, row[letter].strip()) for letter in string.ascii_uppercase if (row.get(letter) or "").strip())


def _answers(row: dict[str, str], has_options: bool, where: str) -> tuple[str, ...]:
    """Return the accepted answers: the items of a list, or the text of the cell."""
    cell = (row["answer"] or "").strip()
    if not cell:
        raise ValueError(f"answer in {where} must be {'an option' if has_options else 'a text'}, got ''")
    if has_options or not cell.startswith("["):
        return (cell,)
    for parse in (json.loads, ast.literal_eval):
        try:
            with warnings.catch_warnings(action="ignore", category=SyntaxWarning):  # a text may have backslashes
                accepted = parse(cell)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
        if all(isinstance(one, str | int | float) for one in accepted):
            if not accepted:
                raise ValueError(f"answer in {where} must be a text or a list of texts, got {cell!r}")
            return tuple(map(str, accepted))
    return (cell,)  # a text that begins with a bracket


def _scored(
    row: dict[str, str], options: tuple[tuple[str, str], ...], accepted: tuple[str, ...], rules: Rules, where: str
) -> dict[str, Any]:
    """Return the fields of `Sample` that score a row: "method", "answers" and, with options, "options"."""
    if not options:
        if rules.open:
            pair = ("A", row["answer"].strip()), ("B", "Other Answers")
            return {"method": OPTION, "answers": ("A",), "options": pair}
        return {"method": rules.method_of(accepted), "answers": accepted}
    [letter] = accepted
    if letter.upper() in dict(options):
        letter = letter.upper()
    elif rules.open:
        letter = letter if letter in tuple(string.ascii_uppercase) else "A"
    else:
        raise ValueError(f"answer in {where} must be an option, got {letter!r}")
    return {"method": OPTION, "answers": (letter,), "options": options}


def _circle(row: dict[str, str], where: str) -> int:
    """Return the number that all rows of a circular question share."""
    try:
        return int(row.get("g_index") or int(row["index"]) % _CIRCLE)
    except ValueError as error:
        raise ValueError(
            f"index and g_index in {where} must be integers because the data set is circular: {error}"
        ) from error


def spread(samples: Sequence[Sample], count: int) -> list[Sample]:
    """Return `count` samples in their order, the same number from each task if it has enough."""
    tasks = list(dict.fromkeys(sample.task for sample in samples))
    by_task = {task: [i for i, sample in enumerate(samples) if sample.task == task] for task in tasks}
    interleaved = [i for group in itertools.zip_longest(*by_task.values()) for i in group if i is not None]
    return [samples[i] for i in sorted(interleaved[:count])]


def rows_of_questions(samples: Sequence[Sample]) -> list[list[int]]:
    """Return the indices of the samples of each question, in order."""
    questions: dict[Hashable, list[int]] = {}
    for i, sample in enumerate(samples):
        questions.setdefault(sample.question_id or i, []).append(i)
    return list(questions.values())


def first(samples: Sequence[Sample], count: int | None) -> list[Sample]:
    """Return the samples of the first `count` questions, in order; None: all."""
    return [samples[i] for i in sorted(itertools.chain(*rows_of_questions(samples)[:count]))]


def picture_problem(content: bytes) -> str | None:
    """Return why `content` is not a complete image file, or None if it is one.

    The check precedes long work, which a truncated file would stop midway.
    """
    try:
        with Image.open(io.BytesIO(content)) as image:
            image.load()
    except UnidentifiedImageError:
        return "Pillow does not support its format"
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        return str(error)
    return None


def _images(cell: str, where: str) -> Iterator[bytes]:
    cell = cell.strip()
    try:
        entries = ast.literal_eval(cell) if cell.startswith("[") else [cell]
        files = [base64.b64decode("".join(entry.split()), validate=True) for entry in entries]
    except (ValueError, SyntaxError, TypeError, AttributeError, binascii.Error) as error:
        shown = cell if len(cell) <= 40 else f"{cell[:40]}..."
        raise ValueError(
            f"image in {where} must be base64, a list of base64, or the index of a row that has an image, "
            f"got {shown!r}: {error}"
        ) from error
    if not files or not all(files):
        raise ValueError(f"image in {where} must not be empty")
    for content in files:
        if (problem := picture_problem(content)) is not None:
            raise ValueError(f"image in {where} must be an image file in base64, got {len(content)} bytes: {problem}")
        yield content


def _question(row: dict[str, str], options: Sequence[tuple[str, str]], rules: Rules) -> str:
    question = (row["question"] or "").strip()
    if not options and not rules.open:
        return question + rules.ending
    hint = (row.get("hint") or "").strip()
    lines = [f"Hint: {hint}"] if hint else []
    lines.append(f"Question: {question}")
    if options:
        lines += ["Options:", *(f"{letter}. {text}" for letter, text in options), rules.choose]
    return "\n".join(lines)


def user_turn(
    images: Sequence[Any], question: str, arrangement: str, other: str = "", *, numbered: bool = True
) -> list[dict[str, Any]]:
    """Return the content of a user turn with images and a question.

    Args:
      images: one or more images.
      question: text of the question.
      arrangement: "image_first": images, question; "text_first": `other`, images, question; "question_first": question,
        images.
      other: text before the images of "text_first".
      numbered: True (default) if several images are numbered in the text.

    Raises:
      ValueError: `arrangement` is unknown.
    """
    shown: list[dict[str, Any]] = []
    for i, image in enumerate(images):
        if numbered and len(images) > 1:
            shown.append(_text(f"\nImage {number_name(i + 1)}: " if shown else f"Image {number_name(i + 1)}: "))
        shown.append({"type": "image", "image": image})
    match arrangement:
        case "image_first":
            return [*shown, _text("\n" + question)]
        case "text_first":
            return [_text(other + "\n"), *shown, _text("\n" + question)]
        case "question_first":
            return [_text(question + "\n"), *shown]
    raise ValueError(f"arrangement must be one of {', '.join(ARRANGEMENTS)}, got {arrangement!r}")


def number_name(number: int) -> str:
    """Return the number of an image as prompts write it: "one" to "ten", then digits. Digits also mean counts there."""
    return _NUMBERS[number - 1] if number <= len(_NUMBERS) else str(number)


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
