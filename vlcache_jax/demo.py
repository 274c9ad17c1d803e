"""`vlcache demo`: the shipped model answers questions about shipped pictures, cold and with the pictures reused."""

from __future__ import annotations

import base64
import dataclasses
import html
import pathlib
import time
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vlcache_jax.assets import PICTURES, TINY_VQA
from vlcache_jax.benchmarks.accuracy import user_turn
from vlcache_jax.buckets import Ladder
from vlcache_jax.llm import LLM
from vlcache_jax.outputs import Metrics, RequestOutput
from vlcache_jax.sampling import SamplingParams

REUSE = "0.1"
_LADDER = Ladder(rows=(64, 256, 512), patches=(256, 512, 1024), sequences=(1, 4))
_STEPS = ("decode_image", "preprocess", "encode", "link", "prefill", "decode")


@dataclasses.dataclass(frozen=True)
class Turn:
    """A question about shipped pictures, and the right answer; `before` is the text in front of them."""

    pictures: tuple[str, ...]
    before: str
    question: str
    answer: str


_PAIR = ("left.png", "right.png")
TURNS = (
    Turn(("picture.png",), "", "What is at C2?", "red triangle"),
    Turn(("picture.png",), "This is page 3 of the book.", "Where is the red circle?", "red circle B1"),
    Turn(("picture.png",), "Yesterday I saw a blue ring.", "How many stars are there?", "star red green blue: 3"),
    Turn(
        _PAIR,
        "Look at the picture.",
        "Which has more rings, image one or image two?",
        "image one ring orange: 1, image two ring red green blue purple: 4, so image two",
    ),
    Turn(
        _PAIR,
        "I like red more than blue.",
        "In image two, what is where image one has its code?",
        "image one code B1, image two B1 red triangle",
    ),
)


def run_demo(report: pathlib.Path) -> None:
    """Asks, prints the answers side by side and writes a page with pictures, answers and times.

    Args:
      report: HTML file to write.
    """
    console = Console()
    params = SamplingParams(max_tokens=32, temperature=0)
    start = time.perf_counter()
    with LLM(TINY_VQA, ladder=_LADDER, max_model_len=1024, kv_cache_bytes=32 * 2**20) as llm:
        loaded = time.perf_counter() - start
        programs, seconds = llm.warmup(reuse=REUSE, verbose=False)
        console.print(
            f"A small trained Qwen3-VL: loaded in {loaded:.1f} s, compiled {programs} programs in {seconds:.1f} s."
        )
        cold = [_ask(llm, turn, params, "off") for turn in TURNS]
        for names in dict.fromkeys(turn.pictures for turn in TURNS):  # each list of pictures is seen once
            _ask(llm, Turn(names, "", "What is the code?", ""), params, "exact")
        reused = [_ask(llm, turn, params, REUSE) for turn in TURNS]
    console.print(_table(cold, reused))
    right = [sum(_text(o) == turn.answer for o, turn in zip(run, TURNS, strict=True)) for run in (cold, reused)]
    console.print(
        f"Right are {right[0]} of {len(TURNS)} cold and {right[1]} reused. An image behind the same text as before is "
        f"reused exactly; behind other text, {float(REUSE):.0%} of its tokens are computed anew and the rest is "
        "linked. How often that keeps the answer right is measured by `vlcache bench accuracy`."
    )
    report.write_text(_page(cold, reused), encoding="utf-8")
    console.print(f"Pictures, answers and times: {report.resolve()}", soft_wrap=True)


def _ask(llm: LLM, turn: Turn, params: SamplingParams, reuse: str) -> RequestOutput:
    images = [(PICTURES / name).read_bytes() for name in turn.pictures]
    content = user_turn(images, turn.question, "text_first" if turn.before else "image_first", turn.before)
    [output] = llm.chat([{"role": "user", "content": content}], params, reuse=reuse, use_tqdm=False)
    llm.cache.flush()  # so that the next turn's times are its own
    return output


def _text(output: RequestOutput) -> str:
    return output.outputs[0].text


_HEAD = ("", "", "rows", "ms", "match")


def _rows(turn: Turn, cold: RequestOutput, reused: RequestOutput) -> list[tuple[str, ...]]:
    """The prompt and the right answer, then both runs."""
    matches = " and ".join(sorted({image.match for image in reused.cache.images}))
    prompt = f"{turn.before} [{', '.join(turn.pictures)}] {turn.question}".strip()
    runs = (("cold", cold, ""), ("reused", reused, matches))
    return [
        ("prompt", prompt, "", "", ""),
        ("right", turn.answer, "", "", ""),
        *(
            (name, _text(run), str(run.cache.rows[-1]), f"{1000 * run.metrics.ttft:.1f}", match)
            for name, run, match in runs
        ),
    ]


def _table(cold: Sequence[RequestOutput], reused: Sequence[RequestOutput]) -> Table:
    table = Table(*_HEAD, title="Answers, rows computed in the language model, time to the first token")
    for triple in zip(TURNS, cold, reused, strict=True):
        for row in _rows(*triple):
            table.add_row(*map(escape, row), style="bold" if row[0] == "prompt" else "")
        table.add_section()
    return table


_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
figure { display: inline-block; margin: 0 1rem 1rem 0; } img { border: 1px solid #ccc; image-rendering: pixelated; }
table { border-collapse: collapse; margin: 1rem 0; } td, th { padding: .3rem .6rem; border-bottom: 1px solid #ddd;
text-align: left; vertical-align: top; } .bar { display: inline-block; height: .8rem; background: #4a7; }
.cold .bar { background: #c64; } .prompt { font-weight: bold; } td.n { text-align: right; }
"""


def _page(cold: Sequence[RequestOutput], reused: Sequence[RequestOutput]) -> str:
    names = dict.fromkeys(name for turn in TURNS for name in turn.pictures)
    figures = "".join(
        f'<figure><img alt="{name}" height="192" src="data:image/png;base64,'
        f'{base64.b64encode((PICTURES / name).read_bytes()).decode()}"><figcaption>{name}</figcaption></figure>'
        for name in names
    )
    rows = "".join(
        f'<tr class="{row[0]}">' + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for triple in zip(TURNS, cold, reused, strict=True)
        for row in _rows(*triple)
    )
    longest = max(_seconds(output.metrics) for output in (*cold, *reused))
    times = "".join(
        _times(f"{i}, {name}", output, longest)
        for i, pair in enumerate(zip(cold, reused, strict=True), 1)
        for name, output in zip(("cold", "reused"), pair, strict=True)
    )
    head = "".join(f"<th>{name}</th>" for name in _HEAD)
    steps = "".join(f"<th>{step.replace('_', ' ')}</th>" for step in _STEPS)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>VLCache-JAX demo</title><style>{_STYLE}</style>'
        f"<h1>The same pictures, cold and reused</h1><p>A small trained Qwen3-VL answers. <i>Reused</i>: each list of "
        f"pictures was seen before in another prompt; behind the same text it is linked as it is, behind other text "
        f"{float(REUSE):.0%} of its tokens are computed anew. The framed glyph of a picture is its code.</p>{figures}"
        f"<h2>Answers</h2><table><tr>{head}</tr>{rows}</table><h2>Milliseconds of each step</h2>"
        f"<table><tr><th>question</th>{steps}<th>sum</th></tr>{times}</table></html>\n"
    )


def _seconds(metrics: Metrics) -> float:
    return sum(getattr(metrics, step) for step in _STEPS)


def _times(name: str, output: RequestOutput, longest: float) -> str:
    cells = "".join(f'<td class="n">{1000 * getattr(output.metrics, step):.1f}</td>' for step in _STEPS)
    total = _seconds(output.metrics)
    bar = f'<span class="bar" style="width:{200 * total / longest:.0f}px"></span> {1000 * total:.1f}'
    return f'<tr class="{name.split(", ")[1]}"><td>{name}</td>{cells}<td>{bar}</td></tr>'
