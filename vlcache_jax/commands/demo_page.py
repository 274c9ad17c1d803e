"""The report of `vlcache demo`: one HTML file without external resources."""

from __future__ import annotations

import base64
import dataclasses
import io
import pathlib
import string
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jinja2
from PIL import Image

import vlcache_jax
from vlcache_jax.assets import DEMO_PAGE, PICTURES
from vlcache_jax.outputs import RequestOutput, Why
from vlcache_jax.study.questions import number_name

BASE = "no reuse"
MODES = {BASE: "off", "exact": "exact", "approximate": "approximate", "full": "full"}
"""Reuse modes by the name that a reader sees, in the order of the report, and their values of `reuse`."""

_CELL = 32  # pixels of a glyph's square
# Parts of the time to the first token: a name, and fields of `RequestMetrics`; the last one is the remainder.
_PARTS = {
    "decode images": ("lookup", "decode_image", "preprocess"),
    "vision encoder": ("encode",),
    "load KV": ("transfer", "link"),
    "prefill": ("prefill",),
    "other": (),
}


@dataclasses.dataclass(frozen=True)
class DemoTurn:
    """A question about shipped images.

    Attributes:
      images: file names, in the order of the prompt.
      before: text before the images; empty: the images come first.
      question: text after the images.
      answer: expected answer.
    """

    images: tuple[str, ...]
    before: str
    question: str
    answer: str

    @property
    def prompt(self) -> str:
        """The prompt as a reader sees it, with file names for images."""
        shown = [f"[{name}]" for name in self.images]
        if len(shown) > 1:
            shown = [f"Image {number_name(i + 1)}: {one}" for i, one in enumerate(shown)]
        return " ".join([*filter(None, [self.before]), *shown, self.question])


@dataclasses.dataclass(frozen=True)
class DemoRun:
    """Turn that was answered in one mode: the repeat with the median TTFT."""

    turn: DemoTurn
    output: RequestOutput

    @property
    def text(self) -> str:
        return self.output.outputs[0].text

    @property
    def is_right(self) -> bool:
        return self.text == self.turn.answer

    @property
    def tokens(self) -> int:
        """Tokens computed in the last layer."""
        return self.output.cache.rows[-1]

    @property
    def milliseconds(self) -> float:
        """TTFT in milliseconds."""
        return 1000 * self.output.metrics.ttft

    @property
    def context(self) -> str:
        """Context of the images relative to the cached ones: "same", "new", or both; "-" without reuse."""
        images = [image for image in self.output.cache.images if image.why is not Why.reuse_off]
        return " and ".join(sorted({"same" if image.match == "exact" else "new" for image in images})) or "-"


def total(runs: Sequence[DemoRun]) -> float:
    """Return the sum of the TTFT, in milliseconds."""
    return sum(run.milliseconds for run in runs)


def speed(ratio: float) -> str:
    """Return how a time compares, as words; `ratio` is the other time divided by it."""
    return f"{ratio:.1f}x faster" if ratio >= 1 else f"{1 / ratio:.1f}x slower"


def result(runs: Mapping[str, Sequence[DemoRun]]) -> str:
    """Return the result of the demo in one sentence."""
    own, base = runs["approximate"], runs[BASE]
    right, before = (sum(run.is_right for run in mode) for mode in (own, base))
    return (
        f'With reuse="approximate", {right} of {len(own)} answers are correct (without reuse: {before} of {len(base)}) '
        f"and the first token comes {speed(total(base) / total(own))}."
    )


def lesson(runs: Mapping[str, Sequence[DemoRun]]) -> str:
    """Return a sentence about the questions that `full` answers wrongly, with the cause they share."""
    wrong = [i for i, run in enumerate(runs["full"]) if not run.is_right]
    if not wrong:
        return 'With "full", all answers are correct.'
    numbers = " and ".join(str(i + 1) for i in wrong)
    one = len(wrong) == 1
    text = f'With "full", the {"answer" if one else "answers"} to {"question" if one else "questions"} {numbers} '
    text += "is wrong" if one else "are wrong"
    if all(len(runs["full"][i].turn.images) > 1 for i in wrong):
        text += ": the two images of the prompt were cached in separate prompts, and their unchanged KV confuses them"
    is_fixed = all(runs["approximate"][i].is_right for i in wrong)
    return text + (". Recomputing a few tokens fixes it." if is_fixed else ".")


def make_page(runs: Mapping[str, Sequence[DemoRun]], model: str, repeats: int, made_on: Mapping[str, Any]) -> str:
    """Return the report as HTML.

    Args:
      runs: runs of each mode of `MODES`, one for each question.
      model: model and device, as text.
      repeats: number of runs that the times are medians of.
      made_on: see `environment`.
    """
    names = dict.fromkeys(name for run in runs[BASE] for name in run.turn.images)
    longest = max(run.milliseconds for mode in runs.values() for run in mode)
    guide = pathlib.Path(vlcache_jax.__file__).resolve().parents[1] / "docs" / "guides" / "reuse.md"
    environment = jinja2.Environment(
        autoescape=True,
        keep_trailing_newline=True,
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.from_string(DEMO_PAGE.read_text(encoding="utf-8")).render(
        base=BASE,
        guide=guide.as_uri() if guide.exists() else None,  # only a clone has it
        images=list(map(_image, names)),
        lesson=lesson(runs),
        made_on=made_on,
        model=model,
        parts=list(_PARTS),
        repeats=repeats,
        result=result(runs),
        runs=runs,
        speed=speed,
        total=total,
        widths=partial(_widths, longest=longest),
    )


def _image(name: str) -> dict[str, Any]:
    """Return a shipped image as base64, with letters for its columns and numbers for its rows."""
    data = (PICTURES / name).read_bytes()
    with Image.open(io.BytesIO(data)) as image:
        columns, rows = (size // _CELL for size in image.size)
    letters, numbers = string.ascii_uppercase[:columns], range(1, rows + 1)
    return {"name": name, "letters": letters, "numbers": numbers, "data": base64.b64encode(data).decode()}


def _widths(run: DemoRun, longest: float) -> list[float]:
    """Return the width of each part of a run's TTFT, in percent of the longest TTFT."""
    widths, left = [], run.milliseconds
    for fields in _PARTS.values():
        took = min(left, sum(1000 * getattr(run.output.metrics, field) for field in fields)) if fields else left
        left -= took
        widths.append(100 * took / longest)
    return widths
