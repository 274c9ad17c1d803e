"""`vlcache demo`: the shipped model answers questions about shipped pictures, cold and with the pictures reused."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Mapping, Sequence
from functools import partial

import jax
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vlcache_jax.assets import PICTURES
from vlcache_jax.cache.config import CacheConfig
from vlcache_jax.commands.demo_page import DemoTurn, Run, make_page
from vlcache_jax.commands.rehearsal import rehearse
from vlcache_jax.commands.shipped import SHIPPED
from vlcache_jax.files import write_whole
from vlcache_jax.llm import LLM
from vlcache_jax.outputs import RequestOutput
from vlcache_jax.progress import Progress
from vlcache_jax.sampling import SamplingParams
from vlcache_jax.study.questions import user_turn
from vlcache_jax.study.report import environment

REUSE = "approximate"
LINKED = "full"
WAYS = {"cold": "off", LINKED: LINKED, REUSE: REUSE}  # what each is called, and its `reuse`
REPEATS = 5

Runs = Mapping[str, Sequence[Run]]  # by way, one of each turn

_PAIR = ("left.png", "right.png")
TURNS = (
    DemoTurn(("picture.png",), "", "What is at C2?", "red triangle"),
    DemoTurn(("picture.png",), "This is page 3 of the book.", "Where is the red circle?", "red circle B1"),
    DemoTurn(("picture.png",), "Yesterday I saw a blue ring.", "How many stars are there?", "star red green blue: 3"),
    DemoTurn(
        _PAIR,
        "Look at the picture.",
        "Which has more rings, image one or image two?",
        "image one ring orange: 1, image two ring red green blue purple: 4, so image two",
    ),
    DemoTurn(
        _PAIR,
        "I like red more than blue.",
        "In image two, what is where image one has its code?",
        "image one code B1, image two B1 red triangle",
    ),
)


def run_demo(report: pathlib.Path) -> None:
    """Asks, prints the answers side by side and writes a page with pictures, answers and times.

    The engine is the one that `ask`, `run` and the guides open, so that they find its programs on disk.

    Args:
      report: HTML file to write.
    """
    console = Console()
    start = time.perf_counter()
    with LLM(SHIPPED, cache=CacheConfig(load="link")) as llm:  # whether linking pays on this machine or not
        loaded = time.perf_counter() - start
        with Progress("compiling"):
            for name in dict.fromkeys(name for turn in TURNS for name in turn.pictures):  # each is seen once, by itself
                _ask(llm, DemoTurn((name,), "", "What is the code?", ""), "exact")
            rehearse(llm, partial(_answer, llm))
        stats = llm.stats()
        device = jax.devices()[0]
        model = f"{SHIPPED} on {device.device_kind}, {'float32' if device.platform == 'cpu' else 'bfloat16'}"
        console.print(
            f"A small trained Qwen3-VL: loaded in {loaded:.1f} s; compiled {stats.compiled_programs} programs in "
            f"{stats.compile_seconds:.1f} s, and loaded {stats.programs - stats.compiled_programs} that are kept in "
            f"{stats.load_seconds:.1f} s."
        )
        with Progress("asking", REPEATS) as bar:
            repeats = []
            for _ in range(REPEATS):
                repeats.append(_answer(llm))
                bar.update()
    runs = {
        way: [Run(turn, _median([outputs[way][i] for outputs in repeats])) for i, turn in enumerate(TURNS)]
        for way in WAYS
    }
    console.print(_table(runs))
    right = [sum(run.is_right for run in runs[way]) for way in WAYS]
    console.print(
        f"Right are {right[0]} of {len(TURNS)} cold, {right[1]} with {LINKED} and {right[2]} with {REUSE} reuse. Each "
        f"picture was seen once, alone. Times are medians of {REPEATS}, with all programs compiled. What the words "
        "mean is on the page. How often reuse keeps answers right is measured by `vlcache bench policies`."
    )
    write_whole(report, make_page(runs, model, REPEATS, environment("vlcache-jax", "jax")))
    console.print(f"Pictures, answers and times: {report.resolve()}", soft_wrap=True)


def _answer(llm: LLM) -> dict[str, list[RequestOutput]]:
    """All turns in all ways. None finds the prompt of another in the KV pool: what is reused is the pictures."""
    outputs: dict[str, list[RequestOutput]] = {way: [] for way in WAYS}
    for turn in TURNS:
        for way, reuse in WAYS.items():
            llm.reset_prefix_cache()
            outputs[way].append(_ask(llm, turn, reuse))
    return outputs


def _ask(llm: LLM, turn: DemoTurn, reuse: str) -> RequestOutput:
    images = [(PICTURES / name).read_bytes() for name in turn.pictures]
    content = user_turn(images, turn.question, "text_first" if turn.before else "image_first", turn.before)
    params = SamplingParams(max_tokens=32, temperature=0)
    [output] = llm.chat([{"role": "user", "content": content}], params, reuse=reuse, use_tqdm=False)
    llm.cache.flush()  # so that the next turn's times are its own
    return output


def _median(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """The one with the median time to the first token, of an odd number."""
    return sorted(outputs, key=lambda output: output.metrics.ttft)[len(outputs) // 2]


def _table(runs: Runs) -> Table:
    table = Table("", "", "rows", "ms", "seen in", title="Answers, tokens computed, milliseconds to the first token")
    for i, turn in enumerate(TURNS):
        table.add_row("prompt", escape(turn.prompt), style="bold")
        table.add_row("right", escape(turn.answer))
        for way in WAYS:
            run = runs[way][i]
            cells = (way, run.text, str(run.rows), f"{run.milliseconds:.1f}", run.found)
            table.add_row(*map(escape, cells), style="" if run.is_right else "red")
        table.add_section()
    return table
