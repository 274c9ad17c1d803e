"""The page of `vlcache demo`: everything in one file, nothing from elsewhere."""

from __future__ import annotations

import base64
import dataclasses
import html
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image

import vlcache_jax
from vlcache_jax.assets import PICTURES
from vlcache_jax.outputs import RequestOutput
from vlcache_jax.study.questions import number_name

_CELL = 32  # pixels of a glyph's square
_DOCS = pathlib.Path(vlcache_jax.__file__).resolve().parents[1] / "docs"
# Parts of the time to the first token: a name, and fields of `Metrics`; what they leave is the last.
_PARTS = {
    "open the pictures": ("lookup", "decode_image", "preprocess"),
    "encode": ("encode",),
    "copy keys and values": ("transfer", "link"),
    "compute rows": ("prefill",),
    "the rest": (),
}
_WORDS = {
    "cold": "Nothing is reused: every picture goes through the vision encoder, and every token of the prompt through "
    'the language model (<code>reuse="off"</code>).',
    "full": "The keys and values that were stored when the picture was seen are copied in as they are "
    '(<code>reuse="full"</code>).',
    "approximate": "So too, but 3 % of the picture's tokens are computed anew, and what these differ by is added to "
    'the others (<code>reuse="approximate"</code>).',
    "rows": "Tokens of the prompt that the last layer of the language model computed. Where pictures are reused, "
    "little more than the text is left.",
    "ms": "Milliseconds from the call to the first token of the answer.",
    "seen in": "Where the stored picture was seen. In the <em>same context</em> all before it is the same: the answer "
    "is that of a cold run. In an <em>other context</em> other text, or another picture, stands before it now.",
    "code": "The framed glyph of a picture.",
}
_STYLE = """
:root { --line: #ddd; --wrong: #b3261e; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; color: #222; }
h1 { line-height: 1.2; margin: .5rem 0; } h2 { margin: 2rem 0 .5rem; } h3 { margin: 0 0 .25rem; font-size: 1rem; }
.summary { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .75rem; margin: 1rem 0; }
.summary div { border: 1px solid var(--line); border-radius: .5rem; padding: .5rem .75rem; }
.summary b { display: block; font-size: 1.5rem; line-height: 1.3; } .made { color: #555; font-size: .875rem; }
.pictures { display: flex; flex-wrap: wrap; gap: 1rem 2rem; } figure { margin: 0; }
.grid { display: inline-grid; text-align: center; color: #555; font-size: .875rem; }
.grid span { align-self: center; } .grid img { width: 100%; height: 100%; border: 1px solid #ccc;
image-rendering: pixelated; } figcaption { padding-left: 1.5rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1rem; } dt { font-weight: bold; }
dd { margin: 0; }
section { border-top: 1px solid var(--line); padding: 1rem 0; } section p { margin: 0; }
table { border-collapse: collapse; width: 100%; margin-top: .5rem; }
td, th { padding: .25rem .5rem; text-align: left; vertical-align: top; } th { color: #555; font-weight: normal; }
td.n { white-space: nowrap; font-variant-numeric: tabular-nums; } .wrong .answer { color: var(--wrong); }
.bar { display: flex; height: .6rem; margin-top: .2rem; } .bar i, .key i { display: block; height: .6rem; }
.key { display: flex; flex-wrap: wrap; gap: .25rem 1rem; font-size: .875rem; color: #555; }
.key i { display: inline-block; width: .6rem; margin-right: .35rem; }
.p0 { background: #8c96a8; } .p1 { background: #c8553d; } .p2 { background: #2a9d8f; } .p3 { background: #e9a23b; }
.p4 { background: #d5d9e0; }
@media (min-width: 641px) { .way { width: 7rem; } td.n { width: 4.5rem; } td.time { width: 13rem; }
td.seen { width: 8rem; } }
@media (max-width: 640px) { table, tbody { display: block; } tr { display: grid; padding: .4rem 0;
grid-template-columns: 6rem 1fr; border-top: 1px dotted var(--line); } tr.head { display: none; }
td { padding: .1rem 0; } td.way, td.answer, td.time { grid-column: 1 / -1; } td.way { font-weight: bold; }
td[title]::before { content: attr(title) " "; color: #555; } dl { grid-template-columns: 1fr; }
dd { margin: 0 0 .5rem; } }
"""


_FOUND = {"exact": "same context", "approximate": "other context"}


@dataclasses.dataclass(frozen=True)
class DemoTurn:
    """A question about shipped pictures, and the right answer; `before` is the text in front of them."""

    pictures: tuple[str, ...]
    before: str
    question: str
    answer: str

    @property
    def prompt(self) -> str:
        """As a reader is shown it."""
        names = self.pictures
        shown = [f"[{name}]" for name in names]
        if len(names) > 1:
            shown = [f"Image {number_name(i + 1)}: {one}" for i, one in enumerate(shown)]
        return " ".join([*filter(None, [self.before]), *shown, self.question])


@dataclasses.dataclass(frozen=True)
class Run:
    """A turn answered in one way, the median of its repeats by the time to the first token."""

    turn: DemoTurn
    output: RequestOutput

    @property
    def text(self) -> str:
        return self.output.outputs[0].text

    @property
    def is_right(self) -> bool:
        return self.text == self.turn.answer

    @property
    def rows(self) -> int:
        return self.output.cache.rows[-1]

    @property
    def milliseconds(self) -> float:
        return 1000 * self.output.metrics.ttft

    @property
    def found(self) -> str:
        """In which context its pictures had been seen; empty: nobody looked."""
        return " and ".join(
            sorted({_FOUND[image.match] for image in self.output.cache.images if image.match in _FOUND})
        )


def make_page(runs: Mapping[str, Sequence[Run]], model: str, repeats: int, made_on: Mapping[str, Any]) -> str:
    """The page as HTML.

    Args:
      runs: by way, cold first; one for each question.
      model: what answered.
      repeats: that times are medians of.
      made_on: see `environment`.
    """
    ways = list(runs)
    turns = [run.turn for run in runs[ways[0]]]
    names = dict.fromkeys(name for turn in turns for name in turn.pictures)
    longest = max(run.milliseconds for of in runs.values() for run in of)
    words = "".join(f"<dt>{word}</dt><dd>{meaning}</dd>" for word, meaning in _WORDS.items())
    key = "".join(f'<span><i class="p{i}"></i>{part}</span>' for i, part in enumerate(_PARTS))
    questions = "".join(_question(i + 1, {way: runs[way][i] for way in ways}, longest) for i in range(len(turns)))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>VLCache-JAX demo</title><style>{_STYLE}</style>"
        "<h1>The same pictures, cold and reused</h1>"
        f"<p>A small trained Qwen3-VL was shown {len(names)} pictures, each once and alone. Then it answered "
        f"{len(turns)} questions about them, most behind other text than before, in three ways.</p>"
        f'<div class="summary">{"".join(_summary(way, runs) for way in ways)}</div>'
        f"<p>{_lesson(runs)}</p>{_made(model, repeats, made_on)}"
        f'<h2>Pictures</h2><div class="pictures">{"".join(map(_picture, names))}</div>'
        f"<h2>Words</h2><dl>{words}</dl>"
        "<h2>Questions</h2><p>Bars tell where the time to the first token went. Wrong answers are red and marked ✗.</p>"
        f'<p class="key">{key}</p>{questions}<p>{_more()}</p></html>\n'
    )


def _total(runs: Sequence[Run]) -> float:
    return sum(run.milliseconds for run in runs)


def _summary(way: str, runs: Mapping[str, Sequence[Run]]) -> str:
    own, cold = runs[way], next(iter(runs.values()))
    right, rows = sum(run.is_right for run in own), sum(run.rows for run in own)
    faster = "" if own is cold else f", cold takes {_total(cold) / _total(own):.1f} times as long"
    return (
        f"<div>{way}<b>{right} of {len(own)} right</b>{rows} rows computed<br>"
        f"{_total(own):.0f} ms to the first tokens{faster}</div>"
    )


def _lesson(runs: Mapping[str, Sequence[Run]]) -> str:
    """What the questions that `full` gets wrong have in common, if there are any."""
    wrong = [i + 1 for i, run in enumerate(runs["full"]) if not run.is_right]
    if not wrong:
        return "All ways answer alike here."
    listed = f"question{'s' * (len(wrong) > 1)} {' and '.join(map(str, wrong))}"
    lesson = f"Where stored keys and values are copied in as they are, the answer to {listed} is wrong"
    if all(len(runs["full"][i - 1].turn.pictures) > 1 for i in wrong):
        lesson += ": pictures that were not seen beside each other are not told apart"
    mended = all(runs["approximate"][i - 1].is_right for i in wrong)
    return lesson + (". A few tokens computed anew mend it." if mended else ".")


def _made(model: str, repeats: int, made_on: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in made_on["versions"].items())
    told = (
        f"{model}; {made_on['processor']}, {made_on['cores']} cores; {versions}; {made_on['date']}. Times are medians "
        f"of {repeats}, programs compiled before."
    )
    return f'<p class="made">{html.escape(told)}</p>'


def _picture(name: str) -> str:
    """A picture with letters for its columns and numbers for its rows."""
    with Image.open(PICTURES / name) as image:
        columns, rows = (size // _CELL for size in image.size)
    letters = "".join(f'<span style="grid-area:1/{2 + i}">{chr(ord("A") + i)}</span>' for i in range(columns))
    numbers = "".join(f'<span style="grid-area:{2 + i}/1">{1 + i}</span>' for i in range(rows))
    data = base64.b64encode((PICTURES / name).read_bytes()).decode()
    return (
        f'<figure><div class="grid" style="grid-template-columns:1.5rem repeat({columns},2.75rem);'
        f'grid-template-rows:1.5rem repeat({rows},2.75rem)">{letters}{numbers}'
        f'<img alt="{name}" style="grid-area:2/2/-1/-1" src="data:image/png;base64,{data}"></div>'
        f"<figcaption>{name}</figcaption></figure>"
    )


def _question(number: int, runs: Mapping[str, Run], longest: float) -> str:
    turn = next(iter(runs.values())).turn
    head = "".join(f"<th>{name}</th>" for name in ("", "answer", "rows", "seen in", "ms"))
    rows = "".join(_row(way, run, longest) for way, run in runs.items())
    return (
        f"<section><h3>{number}. {html.escape(turn.prompt)}</h3><p>Right is: {html.escape(turn.answer)}</p>"
        f'<table><tr class="head">{head}</tr>{rows}</table></section>'
    )


def _row(way: str, run: Run, longest: float) -> str:
    mark = "" if run.is_right else ' class="wrong"'
    metrics, left = run.output.metrics, run.milliseconds
    bar = ""
    for i, fields in enumerate(_PARTS.values()):
        took = min(left, sum(1000 * getattr(metrics, field) for field in fields)) if fields else left
        left -= took
        bar += f'<i class="p{i}" style="width:{100 * took / longest:.1f}%"></i>'
    answer = html.escape(run.text) + " ✗" * (not run.is_right)
    return (
        f'<tr{mark}><td class="way">{way}</td><td class="answer">{answer}</td>'
        f'<td class="n" title="rows">{run.rows}</td><td class="seen" title="seen in">{run.found or "-"}</td>'
        f'<td class="time" title="ms">{run.milliseconds:.1f}<span class="bar">{bar}</span></td></tr>'
    )


def _more() -> str:
    """Where to read on: in the clone, if this is one."""
    guide = _DOCS / "guides" / "reuse.md"
    name = "docs/guides/reuse.md"
    shown = f'<a href="{guide.as_uri()}">{name}</a>' if guide.exists() else f"<code>{name}</code> in the clone"
    return f"The ways to reuse, and when to take which: {shown}. What was measured: <code>docs/measured.md</code>."
