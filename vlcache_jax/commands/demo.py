"""`vlcache demo`: the shipped model answers questions about shipped images in each reuse mode."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import jax
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vlcache_jax.assets import PICTURES
from vlcache_jax.cache.config import CacheConfig
from vlcache_jax.commands.demo_page import BASE, MODES, DemoRun, DemoTurn, lesson, make_page, result, speed, total
from vlcache_jax.commands.options import SHIPPED, rehearse
from vlcache_jax.common.files import write_whole
from vlcache_jax.common.progress import Progress
from vlcache_jax.llm import LLM
from vlcache_jax.outputs import RequestOutput
from vlcache_jax.sampling import SamplingParams
from vlcache_jax.study.questions import user_turn
from vlcache_jax.study.report import environment

REPEATS = 5

Runs = Mapping[str, Sequence[DemoRun]]  # by mode, one for each turn

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
    """Answer the questions in each mode, print a table, and write a page with images, answers and times.

    The engine has the options of `ask`, `run` and the guides, so that they find its programs on disk.

    Args:
      report: HTML file to write.
    """
    console = Console()
    start = time.perf_counter()
    with LLM(SHIPPED, cache=CacheConfig(load="kv")) as llm:  # load cached KV even if computing were faster here
        loaded = time.perf_counter() - start
        with Progress("compiling (later runs load the programs from disk)"):
            _cache_apart(llm, dict.fromkeys(name for turn in TURNS for name in turn.images))
            rehearse(llm, partial(_answer, llm))
        stats = llm.stats()
        device = jax.devices()[0]
        model = f"{SHIPPED} on {device.device_kind}, {'float32' if device.platform == 'cpu' else 'bfloat16'}"
        console.print(
            f"{SHIPPED}, a small trained Qwen3-VL: loaded in {loaded:.1f} s. Programs: {stats.compiled_programs} "
            f"compiled in {stats.compile_seconds:.1f} s, {stats.programs - stats.compiled_programs} loaded from disk "
            f"in {stats.load_seconds:.1f} s."
        )
        with Progress("answering", REPEATS) as bar:
            repeats = []
            for _ in range(REPEATS):
                repeats.append(_answer(llm))
                bar.update()
    runs = {
        mode: [DemoRun(turn, _median([outputs[mode][i] for outputs in repeats])) for i, turn in enumerate(TURNS)]
        for mode in MODES
    }
    console.print(_answers(runs))
    console.print(_summary(runs))
    console.print(f"{result(runs)} {lesson(runs)}")
    console.print(
        f"Each image was cached by itself. TTFT is the median of {REPEATS} runs with compiled programs. The report "
        "explains the terms. `vlcache bench accuracy` measures the accuracy of reuse modes on more questions."
    )
    write_whole(report, make_page(runs, model, REPEATS, environment("vlcache-jax", "jax")))
    console.print(f"Report: {report.resolve()}", soft_wrap=True)


def _answer(llm: LLM) -> dict[str, list[RequestOutput]]:
    """Answer all turns in all modes. The prefix cache is reset before each, so that only images are reused.

    `"exact"` caches the KV of an image in its new context, where the next runs would find it. It runs last, and then
    the turn's images are cached by themselves again.
    """
    outputs: dict[str, list[RequestOutput]] = {mode: [] for mode in MODES}
    for turn in TURNS:
        for mode in sorted(MODES, key="exact".__eq__):
            llm.reset_prefix_cache()
            outputs[mode].append(_ask(llm, turn, MODES[mode]))
        for name in turn.images:
            llm.cache.delete(_bytes(name))
        _cache_apart(llm, turn.images)
    return outputs


def _cache_apart(llm: LLM, names: Iterable[str]) -> None:
    """Cache each image at the beginning of a prompt of its own."""
    for name in names:
        llm.cache.precompute([_bytes(name)])
    llm.cache.flush()


def _bytes(name: str) -> bytes:
    return (PICTURES / name).read_bytes()


def _ask(llm: LLM, turn: DemoTurn, reuse: str) -> RequestOutput:
    images = list(map(_bytes, turn.images))
    content = user_turn(images, turn.question, "text_first" if turn.before else "image_first", turn.before)
    params = SamplingParams(max_tokens=32, temperature=0)
    [output] = llm.chat([{"role": "user", "content": content}], params, reuse=reuse, use_tqdm=False)
    llm.cache.flush()  # so that the next turn's times are its own
    return output


def _median(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Return the output with the median TTFT of an odd number of outputs."""
    return sorted(outputs, key=lambda output: output.metrics.ttft)[len(outputs) // 2]


def _answers(runs: Runs) -> Table:
    table = Table("mode", "answer", "tokens computed", "TTFT \\[ms]", "context", title="Answers by reuse mode")
    for i, turn in enumerate(TURNS):
        table.add_row("prompt", escape(turn.prompt), style="bold")
        table.add_row("expected", escape(turn.answer))
        for mode in MODES:
            run = runs[mode][i]
            cells = (mode, run.text, str(run.tokens), f"{run.milliseconds:.1f}", run.context)
            table.add_row(*map(escape, cells), style="" if run.is_right else "red")
        table.add_section()
    return table


def _summary(runs: Runs) -> Table:
    table = Table("mode", "correct", "tokens computed", "TTFT \\[ms]", "speed", title=f"All {len(TURNS)} questions")
    base = total(runs[BASE])
    for mode, own in runs.items():
        right, tokens = sum(run.is_right for run in own), sum(run.tokens for run in own)
        compared = "" if mode == BASE else speed(base / total(own))
        table.add_row(mode, f"{right} of {len(own)}", str(tokens), f"{total(own):.0f}", compared)
    return table
