"""`vlcache demo`: the shipped model answers questions about shipped pictures, cold and with the pictures reused."""

from __future__ import annotations

import base64
import dataclasses
import html
import pathlib
import time
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vlcache_jax.assets import PICTURES, TINY_VQA
from vlcache_jax.cache.config import CacheConfig
from vlcache_jax.engine.ladder import Ladder
from vlcache_jax.engine.sampling import SamplingParams
from vlcache_jax.files import write_whole
from vlcache_jax.llm import LLM
from vlcache_jax.outputs import Metrics, RequestOutput
from vlcache_jax.progress import Progress
from vlcache_jax.study.questions import user_turn

REUSE = "approximate"
LINKED = "full"
_NAMES = ("cold", LINKED, REUSE)
_WAYS = (
    "Behind other text, and beside a picture it was never seen with, its keys and values are linked as they are "
    f"(reuse={LINKED}), or 3 % of its tokens are computed anew, and what these differ by is added to the others "
    f"(reuse={REUSE})."
)
_LADDER = Ladder(rows=(64, 256, 512), patches=(256, 512, 1024), sequences=(1, 4))
_STEPS = ("decode_image", "preprocess", "encode", "link", "prefill", "decode")


Runs = Mapping[str, Sequence[RequestOutput]]  # by name, one output a turn


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
    cache = CacheConfig(load="link")  # whether it pays on this machine or not
    with LLM(TINY_VQA, ladder=_LADDER, max_model_len=1024, kv_cache_bytes=32 * 2**20, cache=cache) as llm:
        loaded = time.perf_counter() - start
        programs, seconds = llm.warmup(reuse=REUSE)
        console.print(
            f"A small trained Qwen3-VL: loaded in {loaded:.1f} s, compiled {programs} programs in {seconds:.1f} s."
        )
        with Progress("asking"):
            for reuse in ("exact", LINKED, REUSE, "off"):  # what is slow the first time, such as opening a picture
                _ask(llm, TURNS[1], params, reuse)
            llm.reset_mm_cache()
            cold = [_ask(llm, turn, params, "off") for turn in TURNS]
            for name in dict.fromkeys(name for turn in TURNS for name in turn.pictures):  # each is seen once, by itself
                _ask(llm, Turn((name,), "", "What is the code?", ""), params, "exact")
            reused = [[_ask(llm, turn, params, reuse) for turn in TURNS] for reuse in (LINKED, REUSE)]
    runs = dict(zip(_NAMES, (cold, *reused), strict=True))
    console.print(_table(runs))
    right = [sum(_text(o) == turn.answer for o, turn in zip(run, TURNS, strict=True)) for run in runs.values()]
    console.print(
        f"Right are {right[0]} of {len(TURNS)} cold, {right[1]} with {LINKED} and {right[2]} with {REUSE} reuse. Each "
        "picture was seen "
        f"once, alone. Behind the same text it is reused exactly. {_WAYS} How often that keeps answers right is "
        "measured by `vlcache bench policies`."
    )
    write_whole(report, _page(runs))
    console.print(f"Pictures, answers and times: {report.resolve()}", soft_wrap=True)


def _ask(llm: LLM, turn: Turn, params: SamplingParams, reuse: str) -> RequestOutput:
    images = [(PICTURES / name).read_bytes() for name in turn.pictures]
    content = user_turn(images, turn.question, "text_first" if turn.before else "image_first", turn.before)
    [output] = llm.chat([{"role": "user", "content": content}], params, reuse=reuse, use_tqdm=False)
    llm.cache.flush()  # so that the next turn's times are its own
    return output


def _text(output: RequestOutput) -> str:
    return output.outputs[0].text


_HEAD = ("", "", "rows", "ms", "found")


def _rows(i: int, runs: Runs) -> list[tuple[str, ...]]:
    """The prompt and the right answer of a turn, then all runs."""
    turn = TURNS[i]
    prompt = f"{turn.before} [{', '.join(turn.pictures)}] {turn.question}".strip()
    rows: list[tuple[str, ...]] = [("prompt", prompt, "", "", ""), ("right", turn.answer, "", "", "")]
    for name, outputs in runs.items():
        output = outputs[i]
        matches = " and ".join(sorted({image.match for image in output.cache.images} - {"miss"}))
        milliseconds = f"{1000 * output.metrics.ttft:.1f}"
        rows.append((name, _text(output), str(output.cache.rows[-1]), milliseconds, matches))
    return rows


def _table(runs: Runs) -> Table:
    table = Table(*_HEAD, title="Answers, rows computed in the last layer, milliseconds to the first token")
    for i, turn in enumerate(TURNS):
        for row in _rows(i, runs):
            wrong = row[0] in runs and row[1] != turn.answer
            table.add_row(*map(escape, row), style="bold" if row[0] == "prompt" else "red" if wrong else "")
        table.add_section()
    return table


_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
figure { display: inline-block; margin: 0 1rem 1rem 0; } img { border: 1px solid #ccc; image-rendering: pixelated; }
table { border-collapse: collapse; margin: 1rem 0; } td, th { padding: .3rem .6rem; border-bottom: 1px solid #ddd;
text-align: left; vertical-align: top; } .bar { display: inline-block; height: .8rem; background: #4a7; }
.cold .bar { background: #c64; } .wrong td { color: #b00; } .prompt { font-weight: bold; } td.n { text-align: right; }
"""


def _page(runs: Runs) -> str:
    names = dict.fromkeys(name for turn in TURNS for name in turn.pictures)
    figures = "".join(
        f'<figure><img alt="{name}" height="192" src="data:image/png;base64,'
        f'{base64.b64encode((PICTURES / name).read_bytes()).decode()}"><figcaption>{name}</figcaption></figure>'
        for name in names
    )
    rows = "".join(
        f'<tr class="{row[0]}{wrong}">' + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for i, turn in enumerate(TURNS)
        for row in _rows(i, runs)
        for wrong in [" wrong" * (row[0] in runs and row[1] != turn.answer)]
    )
    longest = max(_seconds(output.metrics) for outputs in runs.values() for output in outputs)
    times = "".join(
        _times(f"{i + 1}, {name}", outputs[i], longest) for i in range(len(TURNS)) for name, outputs in runs.items()
    )
    head = "".join(f"<th>{name}</th>" for name in _HEAD)
    steps = "".join(f"<th>{step.replace('_', ' ')}</th>" for step in _STEPS)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>VLCache-JAX demo</title><style>{_STYLE}</style>'
        "<h1>The same pictures, cold and reused</h1><p>A small trained Qwen3-VL answers. Each picture was seen once "
        f"before, alone, in another prompt. Behind the same text it is reused exactly. {_WAYS} The framed glyph of a "
        f"picture is its code.</p>{figures}"
        "<h2>Answers, rows computed in the last layer, milliseconds to the first token</h2>"
        f"<table><tr>{head}</tr>{rows}</table><h2>Milliseconds of each step</h2>"
        f"<table><tr><th>question</th>{steps}<th>sum</th></tr>{times}</table></html>\n"
    )


def _seconds(metrics: Metrics) -> float:
    return sum(getattr(metrics, step) for step in _STEPS)


def _times(name: str, output: RequestOutput, longest: float) -> str:
    cells = "".join(f'<td class="n">{1000 * getattr(output.metrics, step):.1f}</td>' for step in _STEPS)
    total = _seconds(output.metrics)
    bar = f'<span class="bar" style="width:{200 * total / longest:.0f}px"></span> {1000 * total:.1f}'
    return f'<tr class="{name.split(", ")[1]}"><td>{name}</td>{cells}<td>{bar}</td></tr>'
