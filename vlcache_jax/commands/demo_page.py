"""The report of `vlcache demo`: one HTML file without external resources."""

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
from vlcache_jax.outputs import RequestOutput, Why
from vlcache_jax.study.questions import number_name

BASE = "no reuse"
MODES = {BASE: "off", "exact": "exact", "approximate": "approximate", "full": "full"}
"""Reuse modes by the name that a reader sees, in the order of the report, and their values of `reuse`."""

_CELL = 32  # pixels of a glyph's square
_DOCS = pathlib.Path(vlcache_jax.__file__).resolve().parents[1] / "docs"
# Parts of the time to the first token: a name, and fields of `Metrics`; the last one is the remainder.
_PARTS = {
    "decode images": ("lookup", "decode_image", "preprocess"),
    "vision encoder": ("encode",),
    "load KV": ("transfer", "link"),
    "prefill": ("prefill",),
    "other": (),
}
_IN_NEW_CONTEXT = {
    BASE: "everything is computed",
    "exact": "encoder output reused, KV recomputed",
    "approximate": "KV reused, 3 % of the image tokens recomputed",
    "full": "KV reused unchanged",
}
_TERMS = {
    BASE: "All images pass through the vision encoder, and the language model computes all tokens of the prompt "
    '(<code>reuse="off"</code>). The other modes are compared with it.',
    "exact": 'The default (<code>reuse="exact"</code>). In the same context the cached KV is reused. In a new context '
    "the encoder output is reused, and the KV of the image is recomputed. Answers are those of a run without reuse, up "
    "to rounding.",
    "approximate": "Like <code>full</code>, but 3 % of the image tokens are recomputed, and the mean change of their "
    'KV is added to the other tokens (<code>reuse="approximate"</code>).',
    "full": "The cached KV is reused unchanged in every context "
    '(<code>reuse="full"</code>). It is a lower bound for the time, and not meant for use.',
    "KV": "Keys and values of the attention layers.",
    "context": "Whether everything before the image in the prompt is the same as when the image was cached. In the "
    "<em>same</em> context all modes reuse the KV exactly. In a <em>new</em> context other text or another image comes "
    "before it.",
    "tokens computed": "Tokens of the prompt that the last layer of the language model computes. With reuse, these are "
    "mainly the tokens of the text.",
    "TTFT": "Time to first token: from the call to the first token of the answer, in milliseconds.",
    "code": "The framed glyph of an image.",
}
_STYLE = """
:root { color-scheme: light dark; --text: #222; --back: #fff; --soft: #595959; --line: #ddd; --field: #f6f6f6;
--wrong: #b3261e; --link: #0b57d0; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e6e6; --back: #17181a; --soft: #a9a9a9; --line: #444;
--field: #222427; --wrong: #ff8a80; --link: #8ab4f8; } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; color: var(--text);
background: var(--back); }
h1 { line-height: 1.2; margin: .5rem 0; font-size: 1.5rem; } h2 { margin: 2rem 0 .5rem; font-size: 1.25rem; }
h3 { margin: 0 0 .25rem; font-size: 1rem; } a { color: var(--link); } code { overflow-wrap: anywhere; }
.result { font-size: 1.125rem; } .soft { color: var(--soft); font-size: .875rem; }
.images { display: flex; flex-wrap: wrap; gap: 1rem 2rem; } figure { margin: 0; }
.grid { display: inline-grid; text-align: center; color: var(--soft); font-size: .875rem; }
.grid span { align-self: center; } .grid img { width: 100%; height: 100%; border: 1px solid var(--line);
image-rendering: pixelated; } figcaption { padding-left: 1.5rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1rem; } dt { font-weight: bold; }
dd { margin: 0; }
section { border-top: 1px solid var(--line); padding: 1rem 0; } section p { margin: 0; }
table { border-collapse: collapse; width: 100%; margin-top: .5rem; }
td, th { padding: .25rem .5rem; text-align: left; vertical-align: top; } thead th { color: var(--soft);
font-weight: normal; vertical-align: bottom; } thead th.n { white-space: nowrap; } tbody th { font-weight: bold; }
td.n { white-space: nowrap; font-variant-numeric: tabular-nums; }
.wrong .answer, .wrong .correct { color: var(--wrong); }
.summary tbody tr { border-top: 1px solid var(--line); }
.bar { display: flex; height: .6rem; margin-top: .2rem; } .bar i, .key i { display: block; height: .6rem; }
.key { display: flex; flex-wrap: wrap; gap: .25rem 1rem; font-size: .875rem; color: var(--soft); }
.key i { display: inline-block; width: .6rem; margin-right: .35rem; }
.p0 { background: #8c96a8; } .p1 { background: #c8553d; } .p2 { background: #2a9d8f; } .p3 { background: #e9a23b; }
.p4 { background: #b9c0cc; }
@media (min-width: 641px) { section .mode { width: 7.5rem; } section .n { width: 6rem; } section .time { width: 13rem; }
section .context { width: 5.5rem; } }
@media (max-width: 640px) { table, tbody { display: block; } thead { display: none; } tr { display: grid;
padding: .4rem 0; grid-template-columns: 11rem 1fr; gap: 0 .75rem; border-top: 1px dotted var(--line); }
td, th { padding: .1rem 0; }
th.mode, td.answer, td.time, td.what { grid-column: 1 / -1; }
td[title]::before { content: attr(title) ": "; color: var(--soft); } dl { grid-template-columns: 1fr; }
dd { margin: 0 0 .5rem; } }
"""


@dataclasses.dataclass(frozen=True)
class DemoTurn:
    """A question about shipped images.

    Attributes:
      images: file names, in the order of the prompt.
      before: text before the images; empty: the images come first.
      question: text after them.
      answer: the right one.
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
    """A turn that was answered in one mode: of its repeats the one with the median TTFT."""

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
        """TTFT."""
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
    right, before = (sum(run.is_right for run in of) for of in (own, base))
    return (
        f'With reuse="approximate", {right} of {len(own)} answers are correct (without reuse: {before} of {len(base)}) '
        f"and the first token comes {speed(total(base) / total(own))}."
    )


def lesson(runs: Mapping[str, Sequence[DemoRun]]) -> str:
    """Return what the questions have in common that `full` answers wrongly, if there are any."""
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
    """Return the report as HTML: the result, modes compared, questions, then terms.

    Args:
      runs: by mode of `MODES`; one for each question.
      model: what answered.
      repeats: number of runs that the times are medians of.
      made_on: see `environment`.
    """
    turns = [run.turn for run in runs[BASE]]
    names = dict.fromkeys(name for turn in turns for name in turn.images)
    longest = max(run.milliseconds for of in runs.values() for run in of)
    terms = "".join(f"<dt>{term}</dt><dd>{meaning}</dd>" for term, meaning in _TERMS.items())
    key = "".join(f'<span><i class="p{i}"></i>{part}</span>' for i, part in enumerate(_PARTS))
    questions = "".join(_question(i + 1, {mode: runs[mode][i] for mode in runs}, longest) for i in range(len(turns)))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>VLCache-JAX demo</title><style>{_STYLE}</style><main>"
        "<h1>VLCache-JAX demo: four reuse modes</h1>"
        f'<p class="result"><strong>{html.escape(result(runs))}</strong></p><p>{html.escape(lesson(runs))}</p>'
        f"{_modes(runs)}"
        f"<p>A small trained Qwen3-VL first cached {len(names)} images, each in a prompt of its own. Then it answered "
        f"{len(turns)} questions about them in each mode. In most of them other text or another image comes before an "
        f"image: the image has a new context.</p>{_made(model, repeats, made_on)}"
        f'<h2>Images</h2><div class="images">{"".join(map(_image, names))}</div>'
        "<h2>Questions</h2><p>The bars show the parts of the TTFT. Wrong answers are red and marked ✗.</p>"
        f'<p class="key">{key}</p>{questions}'
        f"<h2>Terms</h2><dl>{terms}</dl><p>{_more()}</p></main></html>\n"
    )


def _modes(runs: Mapping[str, Sequence[DemoRun]]) -> str:
    """Return the table that compares the modes."""
    heads = ("mode", "in a new context", "correct", "tokens computed", "TTFT [ms]", "speed")
    rows, base = "", total(runs[BASE])
    for mode, own in runs.items():
        right, tokens = sum(run.is_right for run in own), sum(run.tokens for run in own)
        compared = "baseline" if mode == BASE else speed(base / total(own))
        mark = ' class="wrong"' if right < len(own) else ""
        rows += (
            f'<tr{mark}><th scope="row" class="mode">{mode}</th><td class="what">{_IN_NEW_CONTEXT[mode]}</td>'
            f'<td class="n correct" title="correct">{right} of {len(own)}</td>'
            f'<td class="n" title="tokens computed">{tokens}</td><td class="n" title="TTFT [ms]">{total(own):.0f}</td>'
            f'<td class="n" title="speed">{compared}</td></tr>'
        )
    return f'<table class="summary">{_head(heads)}<tbody>{rows}</tbody></table>{_sums(len(runs[BASE]))}'


def _sums(questions: int) -> str:
    return f'<p class="soft">Tokens and TTFT are sums over the {questions} questions.</p>'


def _head(names: Sequence[str]) -> str:
    cells = (f"""<th scope="col"{' class="n"' if "[" in name else ""}>{name}</th>""" for name in names)
    return f"<thead><tr>{''.join(cells)}</tr></thead>"


def _made(model: str, repeats: int, made_on: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in made_on["versions"].items())
    text = (
        f"{model}; {made_on['processor']}, {made_on['cores']} cores; {versions}; {made_on['date']}. TTFT is the median "
        f"of {repeats} runs with compiled programs."
    )
    return f'<p class="soft">{html.escape(text)}</p>'


def _image(name: str) -> str:
    """Return an image with letters for its columns and numbers for its rows."""
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


def _question(number: int, runs: Mapping[str, DemoRun], longest: float) -> str:
    turn = next(iter(runs.values())).turn
    head = _head(("mode", "answer", "tokens computed", "context", "TTFT [ms]"))
    rows = "".join(_row(mode, run, longest) for mode, run in runs.items())
    return (
        f"<section><h3>{number}. {html.escape(turn.prompt)}</h3><p>Expected: {html.escape(turn.answer)}</p>"
        f"<table>{head}<tbody>{rows}</tbody></table></section>"
    )


def _row(mode: str, run: DemoRun, longest: float) -> str:
    mark = "" if run.is_right else ' class="wrong"'
    metrics, left = run.output.metrics, run.milliseconds
    bar = ""
    for i, fields in enumerate(_PARTS.values()):
        took = min(left, sum(1000 * getattr(metrics, field) for field in fields)) if fields else left
        left -= took
        bar += f'<i class="p{i}" style="width:{100 * took / longest:.1f}%"></i>'
    answer = html.escape(run.text) + " ✗" * (not run.is_right)
    return (
        f'<tr{mark}><th scope="row" class="mode">{mode}</th><td class="answer">{answer}</td>'
        f'<td class="n" title="tokens computed">{run.tokens}</td>'
        f'<td class="context" title="context">{run.context}</td>'
        f'<td class="time" title="TTFT [ms]">{run.milliseconds:.1f}<span class="bar">{bar}</span></td></tr>'
    )


def _more() -> str:
    """Return where to read on: a link to the file if the package lies in a clone."""
    guide = _DOCS / "guides" / "reuse.md"
    name = "docs/guides/reuse.md"
    shown = f'<a href="{guide.as_uri()}">{name}</a>' if guide.exists() else f"<code>{name}</code> in the repository"
    return f"How to choose a reuse mode: {shown}. Measured speed and accuracy: <code>docs/benchmarks/index.md</code>."
