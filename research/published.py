"""Tables that the docs quote, made of results: `python -m research.published`.

A page has `<!-- table NAME -->` before a table and `<!-- end -->` behind it, or `<!-- figure NAME -->` and
`<!-- end -->` around a figure within a line; what stands between is written anew. A test fails where a page says
something else than its files.
"""

from __future__ import annotations

import functools
import itertools
import json
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from vlcache_jax.benchmarks import label
from vlcache_jax.benchmarks.policies import OWN
from vlcache_jax.benchmarks.scale import INDEX_BYTES, Costs, zipf_hits
from vlcache_jax.benchmarks.serving import spread
from vlcache_jax.benchmarks.tiny_vqa.splits import SIZES
from vlcache_jax.reuse.parse import APPROXIMATE
from vlcache_jax.study.accuracy import COLD
from vlcache_jax.study.pairs import interval

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
COMPARED = ("full", "0.03", APPROXIMATE, "shift-0.1")  # with intervals
NOT_TRIED = "not tried"
RESULTS = ROOT / "benchmarks" / "results"
MODELS = ("unnumbered", "numbered", "without_key_norm")
GOALS = ("goal_together_text_first.json", "goal_together.json", "goal_text_first.json", "goal_question_first.json")
LENGTHS = tuple(
    f"key_lengths_{name}.json"
    for name in ("unnumbered", "unnumbered_test", "numbered", "without_key_norm", "without_key_norm_test")
)
# Of a table's columns: what stands before the images, how they were cached, and how many a question shows.
CASES = (
    ("text_first", "together", "one"), ("question_first", "together", "one"),
    ("text_first", "together", "several"), ("question_first", "together", "several"),
    ("text_first", "apart", "several"), ("question_first", "apart", "several"),
)  # fmt: skip
_TABLE = re.compile(r"(<!-- table (\w[\w -]*) -->\n).*?(<!-- end -->)", re.DOTALL)
_FIGURE = re.compile(r"(<!-- figure (\w[\w -]*) -->).*?(<!-- end -->)")

Row = dict[str, Any]


def _rows(name: str) -> list[Row]:
    rows: list[Row] = _file(name)["rows"]
    return rows


def _file(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return content


def _case(row: Row) -> tuple[str, str, str]:
    return row["arrangement"], row["donors"], row["images"]


def losses(rows: Sequence[Row]) -> Iterator[list[str]]:
    """A line for each setting: rows computed, and in each case what it loses in the mean over tasks."""
    yield [
        "`reuse`", "rows, %", "rows x layers, %",
        "one image: other text", "another question", "two, seen together: other text", "another question",
        "two, seen apart: other text", "another question",
    ]  # fmt: skip
    lines: dict[str, dict[tuple[str, str, str], Row]] = {}
    for row in rows:
        if label := _label(row):
            lines.setdefault(label, {})[_case(row)] = row
    for label, own in lines.items():
        first = next(iter(own.values()))
        value, style = ("mean", "{:.1f}") if first["reuse"] == COLD else ("difference", "{:+.1f}")
        cells = [style.format(own[case][value]) if case in own else "" for case in CASES]
        yield [label, f"{first['rows %']:.1f}", f"{first['rows x layers %']:.1f}", *cells]


def _label(row: Row) -> str:
    """What a setting is called in all cases, though each has schedules of its own; empty if it stands there already."""
    reuse, (_, by_rows, schedule) = row["reuse"], row["group"].partition("rows of ")
    if reuse == COLD:
        return "cold, right of 100"
    if not by_rows:
        return f"`{reuse}`"
    kind = reuse.partition("-")[0]
    kind = f"{kind}-" if kind in ("spread", "shift") else ""
    if reuse.endswith(schedule):
        return f"`{kind}{OWN}`" if schedule == OWN else f"`{kind}{OWN}` of the other context"
    return f"`{kind}ratio` of its mean" if schedule == OWN else ""


def goals(rows: Sequence[Row], settings: Sequence[str], digits: int = 1) -> Iterator[list[str]]:
    """A line for each case and setting: what is lost, in the mean and in the worst task, with intervals."""
    yield ["images", "`reuse`", "questions", "cold", "mean", "worst task", "some task may lose", "ms", "MB read"]
    for case in CASES:
        for row in rows:
            if _case(row) == case and row["reuse"] in settings:
                worst = "-"
                if row["worst difference"] < 0:
                    worst = f"{interval(row, 'worst ', digits)} {row['worst task']}"
                cold = row["mean"] - row["difference"]
                yield [
                    _title(case), f"`{row['reuse']}`", str(row["questions"]), f"{cold:.{digits}f}",
                    interval(row, digits=digits), worst, f"{row['at most']:.2f}", f"{row['ms']:.0f}",
                    f"{row['MB read']:.1f}",
                ]  # fmt: skip


def choice(rows: Sequence[Row]) -> Iterator[list[str]]:
    """A line for each case: what settings lose in the mean over tasks, and the error of their logits."""
    settings = [name for name in dict.fromkeys(row["reuse"] for row in rows) if name != COLD]
    yield ["images", *(f"`{name}`" for name in settings)]
    for case in CASES:
        own = {row["reuse"]: row for row in rows if _case(row) == case}
        if own:
            cells = [f"{own[name]['difference']:+.1f}, {own[name]['logit MSE']:.2g}" for name in settings]
            yield [_title(case), *cells]


def cold(rows: Sequence[Row]) -> Iterator[list[str]]:
    """A line for each case without reuse: how many of 100 answers are right, by task."""
    own = [row for row in rows if row["reuse"] == COLD and row["donors"] == "together"]
    tasks = list(dict.fromkeys(task for row in own for task in _tasks(row)))
    yield ["images", *tasks, "mean"]
    for case in CASES:
        for row in own:
            if _case(row) == case:
                scores = [f"{row[task]:.1f}" if task in _tasks(row) else "" for task in tasks]
                yield [_title(case).replace(", seen together", ""), *scores, f"{row['mean']:.1f}"]


def _tasks(row: Row) -> list[str]:
    """What stands between the setting and the number of questions; "-" where there are no such questions."""
    names = list(row)
    return [name for name in names[names.index("reuse") + 1 : names.index("questions")] if row[name] != "-"]


def answers(rows: Sequence[Row]) -> Iterator[list[str]]:
    """How many of 100 answers are right cold and under the ways to reuse: one image, and two that were seen apart."""
    yield ["images that come again", "questions", "cold", '`"approximate"`', '`"full"`']
    for case in CASES[:2] + CASES[4:]:
        own = {row["reuse"]: row for row in rows if _case(row) == case}
        if own:
            right = [f"{own[reuse]['mean']:.1f}" for reuse in (COLD, APPROXIMATE, "full")]
            yield [_title(case), str(own[COLD]["questions"]), *right]


def _title(case: tuple[str, str, str]) -> str:
    arrangement, donors, images = case
    shown = "one" if images == "one" else f"two, seen {donors}"
    return f"{shown}, behind {'other text' if arrangement == 'text_first' else 'another question'}"


def inside() -> Iterator[list[str]]:
    """What reuse does in the shipped model (`vlcache analyze errors`) in three cases."""
    names = ("text_first", "question_first", "apart")
    found = [json.loads((RESULTS / f"tiny_vqa_errors_{name}.json").read_text(encoding="utf-8")) for name in names]
    pages = ("other text", "another question", "other text, images seen apart")
    figures = [f"../benchmarks/results/tiny_vqa_errors_{name}.png" for name in names]
    yield ["behind", *(f"[{page}]({figure})" for page, figure in zip(pages, figures, strict=True))]
    attention = [report["error of attention outputs, by answer token"] for report in found]
    for setting in attention[0]:
        yield [f"error of attention outputs, {setting}", *(f"{np.nanmean(of[setting]):.2f}" for of in attention)]
    halves = [np.array_split(np.array(of["r = 0"], float), 2) for of in attention]
    yield [
        "r = 0, first and second half of the answer",
        *(" ".join(f"{np.nanmean(x):.2f}" for x in of) for of in halves),
    ]
    logits = [report["error of the logits, by layer"] for report in found]
    before, behind = "reused in a layer and all before", "reused in a layer and all behind"
    layers = len(logits[0][before])
    yield ["error of the logits, all layers reused", *(f"{of[before][-1]:.2g}" for of in logits)]
    for layer in (2, 3):
        yield [f"layers 0 to {layer} alone reused", *(f"{of[before][layer]:.2g}" for of in logits)]
    yield [f"layers 4 to {layers - 1} alone reused", *(f"{of[behind][4]:.2g}" for of in logits)]
    moved = [report["deviation of K, V, and the part that all tokens of an image share, by layer"] for report in found]
    for title, name in (
        (f"K of layers 1 to {layers - 1} differ from a cold run's by, %", "K"),
        ("of it shared by all tokens of an image, %", "of K shared"),
    ):
        yield [title, *(" ".join(f"{100 * share:.2g}" for share in of[name][1:]) for of in moved)]


def gains() -> Iterator[list[str]]:
    """What recomputing in one layer alone takes off the logits' error in the shipped model, behind another question."""
    found = json.loads((RESULTS / "tiny_vqa_sensitivity.json").read_text(encoding="utf-8"))
    ratios = [name for name in found if name.startswith("r = ")]
    layers = range(len(found[ratios[0]]))
    yield ["less error than under full reuse, %", *(f"layer {layer}" for layer in layers)]
    for ratio in ratios:
        yield [ratio, *(f"{100 * (1 - found[ratio][layer] / found['full reuse']):.1f}" for layer in layers)]


def lengths() -> Iterator[list[str]]:
    """Error of the logits where moved keys keep their length and where it is left free, and the answers that brings."""
    yield ["model", "split", "images", "length kept", "left free", "points gained"]
    for name in LENGTHS:
        found = json.loads((RESULTS / name).read_text(encoding="utf-8"))
        for case in CASES:
            for row in found["rows"]:
                if _case(row) == case and row["reuse"] == APPROXIMATE:
                    errors = [f"{row[f'{lengths} MSE']:.2g}" for lengths in ("kept", "free")]
                    yield [found["model"], found["split"], _title(case), *errors, interval(row, "gain ")]


def codecs() -> Iterator[list[str]]:
    """What coded records cost in the shipped model's answers: divergence from those of records as computed."""
    yield [
        "behind",
        "`reuse`",
        "codec",
        "right of 100",
        "mean KL",
        "largest KL of a token",
        "same most likely token, %",
    ]
    for behind, name in (("other text", "codecs_cpu.json"), ("another question", "codecs_cpu_question_first.json")):
        for row in _rows(name):
            if row["task"] == "all":
                kl = [f"{row[of]:.2g}" for of in ("mean KL", "largest KL")] if row["codec"] != "auto" else ["", ""]
                cells = [behind, f"`{row['reuse']}`", f"`{row['codec']}`", f"{row['right %']:.1f}", *kl]
                yield [*cells, f"{row['agreement %']:.2f}"]


def ttft(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Times to the first token of known images behind new text (`vlcache bench ttft --disk DIR`)."""
    of_disk = {row["configuration"]: row for row in rows if row["K, V in"] == "disk"}
    yield [
        "", "first token, s", "spread", "from disk, s", "times faster than cold", "than encoder cached", "rows a layer",
        "operations a second, of cold's", "floor, s", "times its floor", "but for computing, %",
    ]  # fmt: skip
    for row in rows:
        if row["K, V in"] != "disk":
            name = row["configuration"]
            disk = f"{of_disk[name]['TTFT ms'] / 1000:.3g}" if name in of_disk else ""
            cells = [f"{row['TTFT ms'] / 1000:.3g}", _spread(row["spread ms"] / 1000, "{:.3g}"), disk]
            cells += [_times(row[of]) for of in ("over cold", "over encoder cached")]
            cells += [f"{row['rows a layer']:.0f}", f"{row['GFLOP/s of cold']:.2f}", f"{row['floor ms'] / 1000:.3g}"]
            yield [name, *cells, f"{row['times floor']:.1f}", f"{row['TTFT minus compute %']:.0f}"]


def ttft_sizes(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Seconds to the first token by image tokens (`vlcache bench ttft --image-tokens 1024,2048`)."""
    shown = ("cold", "encoder cached", "r = 0.1", "schedule, mean 0.0250", "shift, r = 0.03", "r = 0")
    yield ["image tokens", *shown, "operations a second, of cold's: r = 0.1, schedule", "r = 0, times its floor"]
    for tokens in dict.fromkeys(row["image tokens"] for row in rows):
        found = {row["configuration"]: row for row in rows if row["image tokens"] == tokens}
        rates = [f"{found[name]['GFLOP/s of cold']:.2f}" for name in ("r = 0.1", "schedule, mean 0.0250")]
        cells = [f"{found[name]['TTFT ms'] / 1000:.3g}" for name in shown]
        yield [str(tokens), *cells, ", ".join(rates), f"{found['r = 0']['times floor']:.1f}"]


def ttft_first(rows: Sequence[Row]) -> Iterator[list[str]]:
    """What README shows of `ttft`."""
    names = {
        "cold": "cold",
        'encoder cached (`"exact"`)': "encoder cached",
        '`"approximate"`': "shift, r = 0.03",
        '`"full"`': "r = 0",
    }
    yield ["", *names]
    found = {row["configuration"]: row for row in rows if row["K, V in"] != "disk"}
    yield ["seconds", *(f"{found[name]['TTFT ms'] / 1000:.2g}" for name in names.values())]
    yield ["slowest less fastest", *(_spread(found[name]["spread ms"] / 1000, "{:.2g}") for name in names.values())]
    yield ["times faster", *(_times(found[name]["over cold"]) for name in names.values())]


def _spread(seconds: float, form: str) -> str:
    """The slowest run less the fastest."""
    return form.format(seconds) if seconds else "one run"


def _times(ratio: float) -> str:
    """A ratio of times, which are not known to more than two digits."""
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.2g}"


def prefill(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Cold runs beside torch (`python -m research.prefill`)."""
    yield ["dtype", "tokens", "prefill, s", "torch", "encoder, s", "torch", "together, torch's of ours"]
    for row in rows:
        parts = [row[f"{part} ms, {who}"] for part in ("prefill", "encode") for who in ("vlcache", "torch")]
        yield [row["dtype"], str(row["slots"]), *(f"{ms / 1000:.3g}" for ms in parts), f"{_torch_share(row):.2f}"]


def _torch_share(row: Row) -> float:
    """What torch takes of our time for pictures and prompt."""
    ours, torch = (sum(row[f"{part} ms, {who}"] for part in ("prefill", "encode")) for who in ("vlcache", "torch"))
    return float(torch / ours)


def torch_speed(dtype: str) -> str:
    """How many times as fast as ours torch's cold runs are, encoder and prefill together: "1.35 to 1.40"."""
    found = sorted(1 / _torch_share(row) for row in _rows("prefill_cpu.json") if row["dtype"] == dtype)
    return f"{found[0]:.2f} to {found[-1]:.2f}"


def peer(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Beside vLLM's build for CPUs (`python -m benchmarks.peer`)."""
    yield ["dtype", "", "image tokens, answers", "unit", "ours", "vLLM", "ours over vLLM", "CPU s", "vLLM's"]
    for row in rows:
        cells = (row[name] for name in ("ours", "vllm", "ours over vllm", "ours: CPU s", "vllm: CPU s"))
        figures = ("" if isinstance(cell, str) else f"{cell:.3g}" for cell in cells)
        yield [row["dtype"], row["case"], str(row["size"]).replace("-", ""), row["unit"], *figures]


def peer_speed(dtype: str, ours: str, theirs: str = "") -> str:
    """How many times as fast as vLLM in a case, over its sizes: "0.72 to 0.75"; of another case of vLLM's, if named."""
    found: dict[str, dict[Any, Row]] = {ours: {}, theirs or ours: {}}
    for row in _rows("peer_cpu.json"):
        if row["dtype"] == dtype and row["case"] in found:
            found[row["case"]][row["size"]] = row
    own, others = found[ours], found[theirs or ours]
    rises = next(iter(own.values()))["unit"] == "tokens/s"
    ratios = sorted(own[size]["ours"] / others[size]["vllm"] for size in own)
    least, most = (f"{ratio:.2g}" for ratio in ((ratios[0], ratios[-1]) if rises else (1 / ratios[-1], 1 / ratios[0])))
    return least if least == most else f"{least} to {most}"


def variants() -> Iterator[list[str]]:
    """Throughput of 96 requests under ways to reuse, and beside transformers (`vlcache bench batch`)."""
    yield ["", "tokens/s", "spread", "runs", "decode steps", "launches a token", "same answers, %"]
    for title, name, place in (
        ("`\"off\"`", "reuse", 0), ("`\"exact\"`", "reuse", 1), ("`0.1`", "reuse", 2), ("`\"shift-0.02\"`", "reuse", 3),
        ("the engine", "transformers", 0), ("transformers + torch", "transformers", 1),
    ):  # fmt: skip
        row = _rows(f"throughput_{name}_cpu_96.json")[place]
        launches = "" if row["launches a token"] is None else f"{row['launches a token']:.3f}"
        yield [
            title, f"{row['tokens/s']:.0f}", f"{row['spread %']:.0f} %", str(len(row["runs"])),
            f"{row['decode steps']:.0f}", launches, f"{row['equal answers %']:.0f}",
        ]  # fmt: skip


def policies(rows: Sequence[Row]) -> Iterator[list[str]]:
    """A server under each way to reuse, by the rate of requests (`vlcache bench serve --policies`)."""
    rates = list(dict.fromkeys(row["rate"] for row in rows))
    yield [
        "`reuse`", *(f"first token, s, at {rate:g}/s" for rate in rates),
        *(f"good answers/s, at {rate:g}/s" for rate in rates), "cached, %", "as cold, %",
    ]  # fmt: skip
    for name in dict.fromkeys(row["reuse"] for row in rows):
        own = [row for row in rows if row["reuse"] == name]
        shares = [f"{np.mean([row[of] for row in own]):.0f}" for of in ("cached %", "equal answers %")]
        first = [_with_spread(row, "TTFT p50 ms", 1000) for row in own]
        yield [_way(name), *first, *(_with_spread(row, "goodput/s", 1) for row in own), *shares]


def by_images(column: str, form: str, rows: Sequence[Row]) -> Iterator[list[str]]:
    """A figure of each way to reuse by the number of images (`vlcache bench mpic`)."""
    counts = list(dict.fromkeys(row["images"] for row in rows))
    yield ["`reuse`, images", *map(str, counts)]
    for name in dict.fromkeys(row["reuse"] for row in rows):
        yield [_way(name), *(form.format(row[column]) for row in rows if row["reuse"] == name)]


def _way(name: str) -> str:
    """A way to reuse, with which method it is where papers differ."""
    return label(name).replace(name, f"`{name}`", 1)


def ttft_steps(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Where the time to the first token of long prompts goes (`vlcache bench ttft --image-tokens 10240,20480`)."""
    steps = ("lookup", "decode_image", "preprocess", "encode", "transfer", "link", "prefill", "first_token")
    yield ["image tokens", "", "first token, s", *(f"{step.replace('_', ' ')}, ms" for step in steps), "over cold"]
    for row in rows:
        cells = [_three(row[f"{step} ms"]) for step in steps]
        first = f"{row['TTFT ms'] / 1000:.3g}"
        yield [str(row["image tokens"]), row["configuration"], first, *cells, _times(row["over cold"])]


def scale(rows: Sequence[Row]) -> Iterator[list[str]]:
    """How 16 simulated engines are given requests (`vlcache_jax.benchmarks.scale`), at two rates."""
    yield ["requests a second and engine", "rule", "found, %", "from another, %", "computed, %", "first token p50, ms",
           "p99, ms", "most over mean"]  # fmt: skip
    for rate, found in ((8, rows), (24, _rows("scale_busy.json"))):
        for row in (row for row in found if row["engines"] == 16):
            computed = 1 - row["found"] - row["from others"]
            shares = [f"{100 * share:.0f}" for share in (row["found"], row["from others"], computed)]
            times = [f"{row[name]:,.0f}" for name in ("p50 ms", "p99 ms")]
            yield [str(rate), f"`{row['rule']}`", *shares, *times, f"{row['most over mean']:.2f}"]


def routing(rows: Sequence[Row]) -> Iterator[list[str]]:
    """What a router does with a request (`vlcache_jax.benchmarks.routing`)."""
    yield ["engines", "JSON, ms", "hashing, ms", "beside hashing, ms", "choosing, ms", "choosing p99, ms"]
    for row in rows:
        alone = row["hash alone ms"]
        times = (row["read JSON ms"], alone, row["hash ms"] - alone, row["choose ms"], row["choose p99 ms"])
        yield [f"{row['engines']:,}", *(f"{ms:.2g}" for ms in times)]


def scale_needs() -> Iterator[list[str]]:
    """What more engines need, by the simulator's figures."""
    yield ["engines", "pictures held", "found, %", "pictures computed/s", "GB/s between machines", "records",
           "their indexes, MB"]  # fmt: skip
    costs, rate, tokens = Costs(), 8, 1024
    size = tokens * costs.token_bytes
    for engines in (1, 10, 1000):
        held = engines * 1024
        found = zipf_hits(min(held, 10**7), 10**7, 1.1)
        moved = 0.03 * engines * rate * size / 1e9 if engines > 1 else 0.0
        computed = (1 - found) * engines * rate
        records = 2 * held  # encoder rows; K and V
        yield [
            f"{engines:,}", f"{held:,}", f"{100 * found:.0f}", f"{computed:,.0f}", f"{moved:.2g}", f"{records:,}",
            f"{records * INDEX_BYTES / 1e6:,.0f}",
        ]  # fmt: skip


def _with_spread(row: Row, column: str, unit: float) -> str:
    """A median, and from where to where it goes over several runs."""
    told, found = f"{row[column] / unit:.2g}", spread(row, column)
    return told if found is None else f"{told} ({found[0] / unit:.2g} to {found[1] / unit:.2g})"


def server_cost(rows: Sequence[Row]) -> Iterator[list[str]]:
    """What HTTP costs (`python -m research.server_cost`)."""
    yield ["", "`AsyncLLM`", "over HTTP", "difference"]
    for row in rows:
        if row["what"] == "hits":
            difference = f"{row['HTTP'] - row['direct']:+.1f} ms"
            yield ["first token of a hit, ms", f"{row['direct']:.1f}", f"{row['HTTP']:.1f}", difference]
        else:
            ratio = f"{100 * (row['ratio'] - 1):+.1f} %"
            yield [f"tokens/s of {row['what']}", f"{row['direct']:.0f}", f"{row['HTTP']:.0f}", ratio]


def large_bodies(rows: Sequence[Row]) -> Iterator[list[str]]:
    """What one large body does to others (`python -m research.large_bodies`)."""
    yield ["body", "MiB", "status", "answered after, s", "CPU, s", "worst `/health`, s"]
    for row in rows:
        numbers = (f"{row[name]:.2f}" for name in ("s", "CPU s", "worst /health, s"))
        yield [row["what"].replace("/health", "`/health`"), f"{row['MiB']:.0f}", str(row["status"]), *numbers]


def slowest_refusal() -> str:
    """Seconds (`python -m research.refusals`)."""
    return f"{max(row['ms'] for row in _rows('refusals_cpu.json')) / 1000:.1f}"


def budgets(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Right answers of 100 by method and budget (`vlcache bench budgets`); memory where it is not the budget."""
    [whole, *rest] = rows
    shares = list(dict.fromkeys(row["budget %"] for row in rest))
    yield ["`compress`", *(f"{share:g} %" for share in shares)]
    for method in dict.fromkeys(row["method"] for row in rest):
        cells = []
        for row in (row for row in rest if row["method"] == method):
            differs = abs(row["memory %"] - row["budget %"]) >= 1
            cells.append(f"{row['mean']:.1f}" + f" (at {row['memory %']:.0f} %)" * differs)
        yield [f"`{method}`", *cells]
    yield ["the whole cache", *[""] * (len(shares) - 1), f"{whole['mean']:.1f}"]


def ahead(rows: Sequence[Row]) -> Iterator[list[str]]:
    """What methods gain over random at the same memory, and how near they are to the whole cache, at two budgets."""
    shares = (10.0, 50.0)
    yield [
        "`compress`", *(f"over random, at {share:g} %" for share in shares),
        *(f"same most likely token, % at {share:g} %" for share in shares),
        *(f"hit rate at {share:g} %" for share in shares),
    ]  # fmt: skip
    for method in dict.fromkeys(row["method"] for row in rows[1:]):
        own = [row for share in shares for row in rows[1:] if (row["method"], row["budget %"]) == (method, share)]
        cells = [interval(row, "over random ") for row in own] + [f"{row['agreement']:.1f}" for row in own]
        rates = ["" if row["hit rate"] is None else f"{row['hit rate']:.2f}" for row in own]
        yield [f"`{method}`", *cells, *rates]


def by_task(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Right answers of 100, task by task, at half of the memory."""
    names = list(rows[0])
    tasks = names[names.index("memory %") + 1 : names.index("questions")]
    yield ["`compress`", *tasks]
    for row in rows:
        if row["method"] == "whole" or row["budget %"] == 50:
            title = "the whole cache" if row["method"] == "whole" else f"`{row['method']}-0.5`"
            yield [title, *(f"{row[task]:.0f}" for task in tasks)]


def budget_lengths() -> str:
    """Tokens of prompts: "81 to 323"."""
    least, most = _file("budgets_tiny_vqa.json")["prompt tokens"]
    return f"{least} to {most}"


def held_out(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Right answers of 100 of the model of long prompts, by what a prompt shows (`research.tiny_vqa.held_out`)."""
    tasks = [name for name in rows[0] if name not in ("images", "image tokens", "asked")]
    yield ["pictures", "image tokens", *tasks, "questions"]
    for row in rows:
        yield [
            *(str(row[name]) for name in ("images", "image tokens")),
            *(f"{row[name]:.0f}" for name in tasks),
            str(row["asked"]),
        ]


def looked_at(name: str) -> Iterator[list[str]]:
    """How sparse attention is, and what decoded rows look at, layer by layer (`vlcache bench budgets`)."""
    found = _file(name)
    lines = {"sparsity behind the last image": found["sparsity by layer"]}
    lines["of the attention, on images"] = found["contribution of images by layer"]
    for share in ("0.1", "0.5"):
        lines[f"of the {100 * float(share):g} % looked at most, images'"] = found["coverage of images by layer"][share]
    yield ["%", *(f"layer {layer}" for layer in range(len(found["sparsity by layer"])))]
    for title, values in lines.items():
        yield [title, *(f"{100 * value:.0f}" for value in values)]


def sparse(name: str) -> Iterator[list[str]]:
    """Sparsity of attention by layer: the mean of a layer's heads, and their least and greatest (`vlcache bench
    budgets`)."""
    found = _file(name)["sparsity of heads by layer"]
    yield ["%", *(f"layer {layer}" for layer in range(len(found["prefill"]["mean"])))]
    for rows, values in found.items():
        cells = zip(*(values[of] for of in ("mean", "least", "greatest")), strict=True)
        yield [rows, *("{:.0f} ({:.0f} to {:.0f})".format(*(100 * share for share in cell)) for cell in cells)]


def stores(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Milliseconds to write and load records, and of a load its share of reading the same bytes alone."""
    yield ["", "into memory", "write, bfloat16", "load, bfloat16", "load, int8", "load, int4"]
    written = {
        row["store"]: f"{row['ms']:.0f} ms" for row in rows if (row["what"], row["codec"]) == ("write", "bfloat16")
    }
    loads = [row for row in rows if row["what"] == "read" and "not possible" not in row["page cache"]]
    for memory, where in (("new", "that is mapped anew"), ("old", "that was mapped before")):
        for store, page_cache in dict.fromkeys((row["store"], row["page cache"]) for row in loads):
            case = (store, page_cache, memory)
            own = [row for row in loads if (row["store"], row["page cache"], row["memory"]) == case]
            cells = [f"{row['ms']:.0f} ms, {row['ratio %']:.0f} %" for row in own]
            is_first = memory == "new" and page_cache != "cold"
            title = f"{store}, cold" if page_cache == "cold" else store
            yield [title, where, written.get(store, "") if is_first else "", *cells]


def gpu_attention() -> Iterator[list[str]]:
    """Attention of Qwen3-VL-8B on an H200, beside the model of the chip and XLA (`python -m benchmarks.gpu`)."""
    cases = _file("gpu_h200.json")["cases"]
    yield ["attention", "ms", "TFLOP/s", "TB/s", "by the model, ms", "XLA, ms"]
    for row in _rows("attention_model.json"):
        if row["measured us"] is not None:
            key = f"speed: attention, {row['case']}, D 128"
            own, xla = cases[key], cases.get(f"{key}, XLA")
            rates = [f"{own['TFLOP/s']:.0f}", f"{own['TB/s']:.2g}"]
            yield [row["case"], f"{own['ms']:.3g}", *rates, f"{row['us'] / 1e3:.3g}", f"{xla['ms']:.3g}" if xla else ""]


def gpu_causal() -> Iterator[list[str]]:
    """Causal attention, 32 and 8 heads of 128, bfloat16, beside other kernels (`python -m benchmarks.gpu`)."""
    cases = _file("gpu_h200.json")["cases"]
    jaxs = "jax.experimental.pallas.ops.gpu.attention_mgpu, float16"
    others = {"cuDNN": "cuDNN", "torch": "torch", "jax's Pallas kernel, float16": jaxs}
    yield ["tokens", "ours, ms", *(f"{name}, ms" for name in others), "ours, TFLOP/s"]
    for tokens in (4096, 20480):
        own = cases[f"speed: causal {tokens}"]
        found = [cases[f"speed: causal {tokens}, {name}"]["ms"] for name in others.values()]
        yield [str(tokens), *(f"{ms:.3g}" for ms in (own["ms"], *found)), f"{own['TFLOP/s']:.0f}"]


def gpu_windows(rows: Sequence[Row]) -> Iterator[list[str]]:
    """What of windows is a CUDA graph, and what the host reads (`python -m research.thunks`)."""
    columns = ("predicates read", "graphs", "kernels inside", "kernels outside", "loops outside")
    yield ["rows", "window", *columns]
    for row in rows:
        yield [str(row["rows"]), row["window"], *(str(row[name]) for name in columns)]


def gpu_first_tokens(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Times to the first token on an H200 (`python -m benchmarks.gpu`)."""
    yield ["", "first token, ms", "times as fast as cold", "spread, ms"]
    for row in rows:
        cells = [f"{row[name]:.3g}" for name in ("TTFT ms", "over cold", "spread ms")]
        yield [row["configuration"], *cells]


def first_token_modes() -> Iterator[list[str]]:
    """TTFT by reuse mode on two CPU cores and on an H200, each with its speedup over a cold run, for README."""
    modes = {
        "no reuse": "cold", '`"exact"`': "encoder cached", '`"approximate"`': "shift, r = 0.03", '`"full"`': "r = 0"
    }  # fmt: skip
    yield ["images in a new context", *modes]
    for title, name, unit, symbol, digits in (
        ("two CPU cores, 4 images of 1024 tokens", "ttft_cpu.json", 1000, "s", 2),
        ("one H200, 1 image of 4096 tokens", "ttft_h200.json", 1, "ms", 3),
    ):
        found = {row["configuration"]: row for row in _rows(name) if row["K, V in"] != "disk"}
        times = [f"{_digits(found[of]['TTFT ms'] / unit, digits)} {symbol}" for of in modes.values()]
        speedups = [f" ({_digits(found[of]['over cold'], 2)}x)" * (of != "cold") for of in modes.values()]
        yield [title, *map("".join, zip(times, speedups, strict=True))]


def _digits(value: float, count: int) -> str:
    """A number with so many significant digits, zeros included: "8.0"; none before the point is rounded away."""
    return f"{value:.0f}" if value >= 10**count else f"{value:#.{count}g}".rstrip(".")


def peer_modes() -> Iterator[list[str]]:
    """Speed relative to vLLM's CPU build by reuse mode, over the sizes that were measured, for README."""
    yield ["speed relative to vLLM (higher is faster)", "float32", "bfloat16"]
    for title, name in {
        "new images": "cold",
        "same prompt again": "repeat",
        'cached images after new text, `"exact"`': "exact",
        'cached images after new text, `"approximate"`': "approximate",
        "decoding of 1 to 32 outputs": "decode",
        "batch of 96 requests": "batch",
    }.items():
        yield [title, *(FIGURES[f"vllm {name} {dtype}"]() for dtype in ("float32", "bfloat16"))]


def batch_agreement(engine: str, dtype: str) -> str:
    """Greedy outputs that are equal alone and in a batch: "7 of 10" (`python -m benchmarks.peer`)."""
    rows = _file("peer_cpu.json")["agreement"]
    [row] = [row for row in rows if (row["answers of"], row["beside"]) == (f"{engine} {dtype}", "each prompt alone")]
    return str(row["equal"])


def spread_over(rows: Sequence[Row]) -> Iterator[list[str]]:
    """What several H200s that share a model hold, and take at least (`python -m research.spread`)."""
    times = ("cold 20K", "hit 20K, falling", "token of 1", "token of 16", "token of 64")
    yield [
        "model",
        "GPUs",
        "weights on each, GB",
        "tokens in the pool",
        *(f"{case}, ms (of it exchange)" for case in times),
    ]
    for row in rows:
        fits = row["tokens in the pool"] > 0
        found = [(row[f"{case}, ms"], row[f"{case}, exchange ms"]) for case in times]
        cells = [f"{_three(ms)} ({_three(part)})" if fits else "" for ms, part in found]
        pool = str(row["tokens in the pool"]) if fits else "does not fit"
        yield [row["model"], str(row["GPUs"]), f"{row['weights, GB']:.1f}", pool, *cells]


def _three(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def gpu_steps() -> Iterator[list[str]]:
    """Decode steps and layers compiled for an H200, before the layer was fused and now (`research.steps`)."""
    columns = {
        "launches a layer": "{:.0f}", "launches": "{:.0f}", "predicates": "{:.0f}", "MB": "{:.0f}",
        "MB of temporaries": "{:.0f}", "memory of temporaries, MB": "{:.0f}", "compile s": "{:.0f}",
        "ms by the model": "{:.3g}", "tokens/s by the model": "{:.0f}", "of the floor": "{:.2f}",
    }  # fmt: skip
    yield ["model", "program", *columns]
    for model, program, rows in _steps("steps_h200_before.json", "steps_h200.json"):
        yield [model, program, *(_changed(rows, column, form) for column, form in columns.items())]


def gpu_versions() -> Iterator[list[str]]:
    """The same programs as two versions of jax compile them (`research.steps`)."""
    columns = {
        "launches a layer": "{:.0f}", "memory of temporaries, MB": "{:.0f}", "spilled bytes": "{:.0f}",
        "registers": "{:.0f}", "compile s": "{:.0f}",
    }  # fmt: skip
    names = "steps_h200.json", "steps_h200_jax012.json"
    versions = [_file(name)["versions"]["jax"] for name in names]
    yield ["model", "program", *(f"{column}: {version}" for column in columns for version in versions)]
    for model, program, rows in _steps(*names):
        cells = [_changed([row], column, form) for column, form in columns.items() for row in rows]
        yield [model, program, *cells]


def _steps(*names: str) -> Iterator[tuple[str, str, list[Row]]]:
    """Programs of the files that there are, with their row in each."""
    tables = [
        {(row["model"], row["program"]): row for row in _rows(name)} for name in names if (RESULTS / name).exists()
    ]
    nothing = {"not compiled": NOT_TRIED}
    for model, program in dict.fromkeys(key for table in tables for key in table):
        yield model, program, [table.get((model, program), nothing) for table in tables]


def _changed(rows: Sequence[Row], column: str, form: str) -> str:
    """A figure before and now, once where it is the same or of one alone; where there is none, why."""
    tried = [row for row in rows if row["not compiled"] != NOT_TRIED] or rows[:1]
    told = [row["not compiled"] or ("" if row[column] is None else form.format(row[column])) for row in tried]
    return " → ".join(dict.fromkeys(told))


def launched(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Milliseconds of the host until the first launch of a hit (`python -m research.launched`)."""
    yield ["", "median, ms", "least, ms"]
    for row in rows:
        yield [row["what"], f"{row['ms']:.3g}", f"{row['least ms']:.3g}"]


def shares(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Percent of what a cold prompt keeps threads busy with (`python -m research.shares`)."""
    kinds = [(part, what) for part in ("encoder", "decoder") for what in ("products", "attention", "rest")]
    yield ["dtype", *(f"{part}'s {what}" for part, what in kinds)]
    for dtype, own in itertools.groupby(rows, lambda row: row["dtype"]):
        found = {(row["part"], row["what"]): row["share, %"] for row in own}
        yield [dtype, *(f"{found[kind]:.0f}" for kind in kinds)]


def host(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Milliseconds that the host takes for a step (`python -m research.host`)."""
    yield ["", "rows", "work lists", "handing over", "together", "of it before the first layer"]
    for row in rows:
        parts = ("rows", "work lists", "handing over", "together", "until the first layer")
        yield [row["case"], *(f"{row[f'{part} ms']:.1f}" for part in parts)]


def compressed_decoding(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Tokens a second of answers together (`vlcache bench compression`)."""
    first, *others = dict.fromkeys(row["K, V"] for row in rows)
    yield [
        "tokens of a prompt", "answers", "tokens/s, all K, V", *(f"`{way}`" for way in others), "times",
        "largest spread, %", "MB, all K, V", *(f"`{way}`" for way in others), "end to end, s, all K, V",
        *(f"`{way}`" for way in others),
    ]  # fmt: skip
    for prompt, answers in dict.fromkeys((row["prompt"], row["answers"]) for row in rows):
        own = {row["K, V"]: row for row in rows if (row["prompt"], row["answers"]) == (prompt, answers)}
        ways = [own[way] for way in (first, *others)]
        yield [
            str(prompt), str(answers), *(f"{row['tokens/s']:.3g}" for row in ways),
            ", ".join(_times(row["times full"]) for row in ways[1:]), f"{max(row['spread %'] for row in ways):.0f}",
            *(f"{row['K, V MB'] + row['compressed MB']:.0f}" for row in ways),
            *(f"{row['end to end s']:.3g}" for row in ways),
        ]  # fmt: skip


def compressed_requests(rows: Sequence[Row]) -> Iterator[list[str]]:
    """What compressing takes of a request, and what it gives (`vlcache bench compression`)."""
    yield [
        "tokens of the prompt", "K, V", "kept, %", "first token, s", "prefill, s", "observe and compact, s",
        "of prefill, %", "tokens/s behind it", "spread, %", "end to end, s",
    ]  # fmt: skip
    for row in rows:
        names = ("first token s", "prefill s", "observe + compact s")
        seconds = [f"{row[name]:.3g}" for name in names]
        of_prefill = f"{row['of prefill %']:.1f}" if row["observe + compact s"] else ""
        rate = [f"{row['tokens/s']:.3g}", f"{row['spread %']:.0f}", f"{row['end to end s']:.3g}"]
        yield [str(row["prompt"]), f"`{row['K, V']}`", f"{row['kept %']:.3g}", *seconds, of_prefill, *rate]


def first_tokens(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Whether first tokens wait for what is compressed (`vlcache bench compression`)."""
    yield ["requests", "first token, ms", "least", "more than the first, in pairs"]
    for row in rows:
        cells = [f"{row[name]:.3g}" for name in ("TTFT ms", "least ms")]
        yield [row["requests"], *cells, f"{row['in pairs ms']:+.2g}"]


def compressed_counted(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Decode steps of a tenth of the K, V on an H200 (`python -m research.compression`)."""
    yield [
        "answers", "tokens of each prompt", "step, ms, all K, V", "a tenth", "times", "attention alone, times",
        "by the model of the chip", "with uneven budgets",
    ]  # fmt: skip
    for row in rows:
        steps = [f"{row[name]:.2f}" for name in ("step ms", "compressed step ms")]
        names = ("step, times", "attention, times", "attention by model, times", "uneven budgets")
        yield [str(row["answers"]), str(row["tokens"]), *steps, *(f"{row[name]:.2f}" for name in names)]


def compressed_memory() -> Iterator[list[str]]:
    """Requests that fit at once, by the memory plan (`python -m research.compression`)."""
    memory = _file("compression_h200_counted.json")["memory"]
    yield ["", "pool of whole prompts", "of compressed ones", "a request", "at once"]
    for name, cells in {
        "all K, V": ("pool GB", None, "MB of a request", "requests"),
        "a tenth": (
            "pool of whole prompts GB", "pool of compressed GB", "MB of a compressed request", "compressed requests",
        ),
    }.items():  # fmt: skip
        whole, compressed, each, count = cells
        pools = [f"{memory[of]:.1f} GB" if of else "" for of in (whole, compressed)]
        yield [name, *pools, f"{memory[each]:.0f} MB", str(memory[count])]


def markdown(lines: Iterator[list[str]]) -> str:
    """A table, its first line the head."""
    head, *rest = lines
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rest)) + "\n"


def _of(make: Callable[[Sequence[Row]], Iterator[list[str]]], name: str, part: str = "rows") -> Iterator[list[str]]:
    """The table of a file's rows, or of another part of it; before there is such a file it says so."""
    return make(_file(name)[part]) if (RESULTS / name).exists() else iter([["not measured yet"]])


def _compared(rows: Sequence[Row]) -> Iterator[list[str]]:
    return goals(rows, COMPARED)


# The lines of each table, the first one its head.
TABLES: dict[str, Callable[[], Iterator[list[str]]]] = {
    "inside": inside,
    "gains": gains,
    "lengths": lengths,
    "codecs": codecs,
    "ttft": functools.partial(_of, ttft, "ttft_cpu.json"),
    "ttft first": functools.partial(_of, ttft_first, "ttft_cpu.json"),
    "ttft bfloat16": functools.partial(_of, ttft, "ttft_bf16_cpu.json"),
    "ttft shipped": functools.partial(_of, ttft, "ttft_tiny_vqa_cpu.json"),
    "ttft 8b": functools.partial(_of, ttft, "ttft_8b_cpu.json"),
    "ttft sizes": functools.partial(_of, ttft_sizes, "ttft_sizes_cpu.json"),
    "shares": functools.partial(_of, shares, "shares_cpu.json"),
    "host": functools.partial(_of, host, "host.json"),
    "launched": functools.partial(_of, launched, "launched_cpu.json"),
    "prefill": functools.partial(_of, prefill, "prefill_cpu.json"),
    "peer": functools.partial(_of, peer, "peer_cpu.json"),
    "stores": functools.partial(_of, stores, "stores_cpu.json"),
    "throughput": variants,
    "policies": functools.partial(_of, policies, "serve_policies_cpu.json"),
    "mpic times": functools.partial(_of, functools.partial(by_images, "TTFT ms", "{:.0f}"), "mpic_cpu.json"),
    "mpic rows": functools.partial(_of, functools.partial(by_images, "rows %", "{:.0f}"), "mpic_cpu.json"),
    "mpic accuracy": functools.partial(_of, functools.partial(by_images, "accuracy %", "{:.0f}"), "mpic_tiny_vqa.json"),
    "mpic rouge": functools.partial(
        _of, functools.partial(by_images, "ROUGE-L to cold", "{:.2f}"), "mpic_tiny_vqa.json"
    ),
    "mpic online": functools.partial(_of, policies, "mpic_online_cpu.json"),
    "ttft long": functools.partial(_of, ttft_steps, "ttft_long_cpu.json"),
    "scale": functools.partial(_of, scale, "scale.json"),
    "scale needs": scale_needs,
    "routing": functools.partial(_of, routing, "routing.json"),
    "large bodies": functools.partial(_of, large_bodies, "large_bodies_cpu.json"),
    "server cost": functools.partial(_of, server_cost, "server_cpu.json"),
    "compression": functools.partial(_of, compressed_decoding, "compression_cpu.json"),
    "compression requests": functools.partial(_of, compressed_requests, "compression_cpu.json", "requests"),
    "compression first tokens": functools.partial(_of, first_tokens, "compression_cpu.json", "first tokens"),
    "compression counted": functools.partial(_of, compressed_counted, "compression_h200_counted.json"),
    "compression memory": compressed_memory,
    "gpu attention": gpu_attention,
    "gpu causal": gpu_causal,
    "gpu windows": functools.partial(_of, gpu_windows, "thunks_h200.json"),
    "gpu steps": gpu_steps,
    "gpu versions": gpu_versions,
    "spread": functools.partial(_of, spread_over, "spread_h200_counted.json"),
    "first token modes": first_token_modes,
    "peer modes": peer_modes,
    "gpu first tokens": functools.partial(_of, gpu_first_tokens, "ttft_h200.json"),
    "budgets": functools.partial(_of, budgets, "budgets_tiny_vqa.json"),
    "budgets p": functools.partial(_of, budgets, "budgets_tiny_vqa_p.json"),
    "budgets ahead": functools.partial(_of, ahead, "budgets_tiny_vqa.json"),
    "budgets by task": functools.partial(_of, by_task, "budgets_tiny_vqa.json"),
    "sparsity": functools.partial(sparse, "sparsity_tiny_vqa.json"),
    "budgets inside": functools.partial(looked_at, "budgets_tiny_vqa.json"),
    "budgets long": functools.partial(_of, budgets, "budgets_long.json"),
    "budgets long ahead": functools.partial(_of, ahead, "budgets_long.json"),
    "budgets long by task": functools.partial(_of, by_task, "budgets_long.json"),
    "held out": functools.partial(_of, held_out, "tiny_vqa_long/held_out.json"),
    "goal": lambda: goals([row for name in GOALS for row in _rows(name)], (APPROXIMATE,), digits=2),
}
for _model in MODELS:
    TABLES[f"choice {_model}"] = functools.partial(_of, choice, f"choice_{_model}.json")
    for _size, (_name, _make) in itertools.product(
        SIZES, {"losses": losses, "goals": _compared, "answers": answers, "cold": cold}.items()
    ):
        TABLES[f"{_name} {_model} {_size}"] = functools.partial(_of, _make, f"study_{_model}_{_size}.json")


def _apart(reused: bool) -> str:
    """Right answers of 100 about two images seen apart, behind another question, in the largest sample."""
    case = ("question_first", "apart", "several")
    [row] = [row for row in _rows("goal_question_first.json") if _case(row) == case and row["reuse"] == APPROXIMATE]
    return f"{row['mean'] - (0 if reused else row['difference']):.2f}"


# Figures within a line.
FIGURES: dict[str, Callable[[], str]] = {
    "refusals": slowest_refusal,
    "budgets questions": lambda: str(_rows("budgets_tiny_vqa.json")[0]["questions"]),
    "budgets lengths": budget_lengths,
    "torch float32": functools.partial(torch_speed, "float32"),
    "torch bfloat16": functools.partial(torch_speed, "bfloat16"),
    "agreement bfloat16": functools.partial(batch_agreement, "ours", "bfloat16"),
    "agreement bfloat16 vllm": functools.partial(batch_agreement, "vllm", "bfloat16"),
    "apart cold": functools.partial(_apart, False),
    "apart approximate": functools.partial(_apart, True),
}
for _dtype in ("float32", "bfloat16"):
    for _name, _cases in {
        "cold": ("cold",), "repeat": ("repeat",), "decode": ("decode",), "batch": ("batch",), "exact": ("new prefix",),
        "approximate": ("new prefix, approximate", "new prefix"),
    }.items():  # fmt: skip
        FIGURES[f"vllm {_name} {_dtype}"] = functools.partial(peer_speed, _dtype, *_cases)


def rewrite(text: str) -> str:
    """A page with its tables and figures as the files say.

    Raises:
      ValueError: there is no such table, or figure.
    """

    def fill(found: re.Match[str]) -> str:
        begin, name, end = found.groups()
        if name not in TABLES:
            raise ValueError(f"table must be one of {', '.join(TABLES)}, got {name}")
        return f"{begin}{markdown(TABLES[name]())}{end}"

    def fill_in(found: re.Match[str]) -> str:
        begin, name, end = found.groups()
        if name not in FIGURES:
            raise ValueError(f"figure must be one of {', '.join(FIGURES)}, got {name}")
        return f"{begin}{FIGURES[name]()}{end}"

    return _FIGURE.sub(fill_in, _TABLE.sub(fill, text))


def main() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (new := rewrite(text)) != text:
            page.write_text(new, encoding="utf-8")
            print(f"{page} is as the results say now")


if __name__ == "__main__":
    main()
