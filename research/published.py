"""Tables in the docs, made from result files: `python -m research.published`.

In a page, `<!-- table NAME -->` precedes a table and `<!-- end -->` follows it. `<!-- figure NAME -->` and
`<!-- end -->` enclose a figure within a line. The command rewrites the text between them. A test fails if a page
differs from its files.
"""

from __future__ import annotations

import functools
import itertools
import json
import pathlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from research.policies import OWN
from research.scale import INDEX_BYTES, Costs, zipf_hits
from vlcache_jax.benchmarks import SCHEDULE, label
from vlcache_jax.benchmarks.floor import HYBRIDS
from vlcache_jax.benchmarks.serving import spread
from vlcache_jax.benchmarks.tiny_vqa.splits import SIZES
from vlcache_jax.benchmarks.ttft_table import ENCODER_CACHED, MODES, mode
from vlcache_jax.reuse.selection import APPROXIMATE
from vlcache_jax.study.accuracy import COLD
from vlcache_jax.study.pairs import interval

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
COMPARED = ("full", "0.03", APPROXIMATE, "shift-0.1")  # with intervals
# The settings of the study's first table.
OVERVIEW = (COLD, "full", "0.1", "epic-9", "mpic-9", "cacheblend-0.1", "spread-0.6", APPROXIMATE)
NOT_TRIED = "not tried"
DONOR_POLICIES = ("full", "approximate", "0.1")  # the schedules are close to full and 0.1
COUNTS = {"one": "one", "several": "two"}
RESULTS = ROOT / "benchmarks" / "results"
MODELS = ("unnumbered", "numbered", "without_key_norm")
GOALS = ("goal_together_text_first.json", "goal_together.json", "goal_text_first.json", "goal_question_first.json")
LENGTHS = tuple(
    f"key_lengths_{name}.json"
    for name in ("unnumbered", "unnumbered_test", "numbered", "without_key_norm", "without_key_norm_test")
)
# The columns of a table: the text before the images, how they were cached, and the number of images.
CASES = (
    ("text_first", "together", "one"), ("question_first", "together", "one"),
    ("text_first", "together", "several"), ("question_first", "together", "several"),
    ("text_first", "apart", "several"), ("question_first", "apart", "several"),
)  # fmt: skip
_TABLE = re.compile(r"(<!-- table (\w[\w -]*) -->\n).*?(<!-- end -->)", re.DOTALL)
_ALONE = "each prompt alone"  # rows of `benchmarks.peer.table.agreement`
_ENGINES = {"ours": "VLCache-JAX", "vllm": "vLLM"}
_FIGURE = re.compile(r"(<!-- figure (\w[\w -]*) -->).*?(<!-- end -->)")

Row = dict[str, Any]


def _public(names: Mapping[str, str], name: str) -> str:
    """Return the public name of a case; its own name if there is none."""
    return names.get(name, name)


def _rows(name: str) -> list[Row]:
    rows: list[Row] = _file(name)["rows"]
    return rows


def _file(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return content


def _case(row: Row) -> tuple[str, str, str]:
    return row["arrangement"], row["donors"], row["images"]


def losses(rows: Sequence[Row], cases: Sequence[tuple[str, str, str]] = CASES) -> Iterator[list[str]]:
    """Yield a line for each setting: tokens recomputed, and the change of accuracy in each case, mean over tasks."""
    yield ["`reuse`", "image tokens recomputed [%]", "tokens x layers [%]", *map(_column, cases)]
    lines: dict[str, dict[tuple[str, str, str], Row]] = {}
    for row in rows:
        if label := _label(row):
            lines.setdefault(label, {})[_case(row)] = row
    for label, own in lines.items():
        first = next(iter(own.values()))
        value, style = ("mean", "{:.1f}") if first["reuse"] == COLD else ("difference", "{:+.1f}")
        cells = [style.format(own[case][value]) if case in own else "" for case in cases]
        yield [label, f"{first['rows %']:.1f}", f"{first['rows x layers %']:.1f}", *cells]


def _label(row: Row) -> str:
    """Return the name of a setting in all cases, though each has its own schedules; empty if it is there already."""
    reuse, (_, by_rows, schedule) = row["reuse"], row["group"].partition("rows of ")
    if reuse == COLD:
        return "no reuse: accuracy [%]"
    if not by_rows:
        return f"`{reuse}`"
    kind = reuse.partition("-")[0]
    kind = f"{kind}-" if kind in ("spread", "shift") else ""
    if reuse.endswith(schedule):
        return f"`{kind}{OWN}`" if schedule == OWN else f"`{kind}{OWN}` of the other arrangement"
    return f"`{kind}R`, R the schedule's mean" if schedule == OWN else ""


def goals(rows: Sequence[Row], settings: Sequence[str], digits: int = 1) -> Iterator[list[str]]:
    """Yield a line for each case and setting: the change of accuracy, its mean and its worst task, with intervals."""
    yield [
        "images", "`reuse`", "questions", "no reuse [%]", "mean change [points]", "worst task [points]",
        "largest loss that a task's interval includes [points]", "time [ms]", "KV read [MB]",
    ]  # fmt: skip
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
    """Yield a line for each case: the change of accuracy of each setting, mean over tasks, and its logit MSE."""
    settings = [name for name in dict.fromkeys(row["reuse"] for row in rows) if name != COLD]
    yield ["images", *(f"`{name}`" for name in settings)]
    for case in CASES:
        own = {row["reuse"]: row for row in rows if _case(row) == case}
        if own:
            cells = [f"{own[name]['difference']:+.1f}, {own[name]['logit MSE']:.2g}" for name in settings]
            yield [_title(case), *cells]


def cold(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield a line for each case: accuracy without reuse, by task."""
    own = [row for row in rows if row["reuse"] == COLD and row["donors"] == "together"]
    tasks = list(dict.fromkeys(task for row in own for task in _tasks(row)))
    yield ["accuracy [%]", *tasks, "mean"]
    for case in CASES:
        for row in own:
            if _case(row) == case:
                scores = [f"{row[task]:.1f}" if task in _tasks(row) else "" for task in tasks]
                yield [_title(case).replace(", cached together", ""), *scores, f"{row['mean']:.1f}"]


def _tasks(row: Row) -> list[str]:
    """Return the cells between the setting and the number of questions; "-" if there are no such questions."""
    names = list(row)
    return [name for name in names[names.index("reuse") + 1 : names.index("questions")] if row[name] != "-"]


def answers(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield accuracy by reuse mode, for one image and for two that were cached separately."""
    yield ["repeated images", "questions", "no reuse [%]", '`"approximate"` [%]', '`"full"` [%]']
    for case in CASES[:2] + CASES[4:]:
        own = {row["reuse"]: row for row in rows if _case(row) == case}
        if own:
            right = [f"{own[reuse]['mean']:.1f}" for reuse in (COLD, APPROXIMATE, "full")]
            yield [_title(case), str(own[COLD]["questions"]), *right]


def _title(case: tuple[str, str, str]) -> str:
    """Return the name of a case as the first cell of a line."""
    shown = "one image" if case[2] == "one" else f"two images, cached {_together(case)}"
    return f"{shown}, {_before(case)} before {'it' if case[2] == 'one' else 'them'}"


def _column(case: tuple[str, str, str]) -> str:
    """Return the name of a case as the head of a column."""
    return f"{'one image' if case[2] == 'one' else f'two, cached {_together(case)}'}: {_before(case)}"


def _before(case: tuple[str, str, str]) -> str:
    return "new text" if case[0] == "text_first" else "another question"


def _together(case: tuple[str, str, str]) -> str:
    return "together" if case[1] == "together" else "separately"


def inside() -> Iterator[list[str]]:
    """Yield the errors of reuse inside the shipped model (`research.analyze errors`) in three cases."""
    names = ("text_first", "question_first", "apart")
    found = [json.loads((RESULTS / f"tiny_vqa_errors_{name}.json").read_text(encoding="utf-8")) for name in names]
    pages = ("new text", "another question", "new text, images cached separately")
    figures = [f"../../benchmarks/results/tiny_vqa_errors_{name}.png" for name in names]
    yield ["before the images", *(f"[{page}]({figure})" for page, figure in zip(pages, figures, strict=True))]
    attention = [report["error of attention outputs, by answer token"] for report in found]
    for setting in attention[0]:
        name = setting.replace("r = ", "ratio ")
        yield [f"error of attention outputs, {name}", *(f"{np.nanmean(of[setting]):.2f}" for of in attention)]
    halves = [np.array_split(np.array(of["r = 0"], float), 2) for of in attention]
    yield [
        "error of attention outputs, ratio 0, first and second half of the output",
        *(" ".join(f"{np.nanmean(x):.2f}" for x in of) for of in halves),
    ]
    logits = [report["error of the logits, by layer"] for report in found]
    before, behind = "reused in a layer and all before", "reused in a layer and all behind"
    layers = len(logits[0][before])
    yield ["logit MSE, all layers reused", *(f"{of[before][-1]:.2g}" for of in logits)]
    for layer in (2, 3):
        yield [f"logit MSE, only layers 0 to {layer} reused", *(f"{of[before][layer]:.2g}" for of in logits)]
    yield [f"logit MSE, only layers 4 to {layers - 1} reused", *(f"{of[behind][4]:.2g}" for of in logits)]
    moved = [report["deviation of K, V, and the part that all tokens of an image share, by layer"] for report in found]
    for title, name in (
        (f"difference of keys from the cold run, layers 1 to {layers - 1} [%]", "K"),
        ("fraction of it shared by all tokens of an image [%]", "of K shared"),
    ):
        yield [title, *(" ".join(f"{100 * share:.2g}" for share in of[name][1:]) for of in moved)]


def gains() -> Iterator[list[str]]:
    """Yield by how much recomputing in one layer reduces the shipped model's logit MSE, after another question."""
    found = json.loads((RESULTS / "tiny_vqa_sensitivity.json").read_text(encoding="utf-8"))
    ratios = [name for name in found if name.startswith("r = ")]
    layers = range(len(found[ratios[0]]))
    yield ["reduction of the logit MSE [%]", *(f"layer {layer}" for layer in layers)]
    for ratio in ratios:
        yield [
            ratio.replace("r = ", "ratio "),
            *(f"{100 * (1 - found[ratio][layer] / found['full reuse']):.1f}" for layer in layers),
        ]


def lengths() -> Iterator[list[str]]:
    """Yield the logit MSE with and without rescaled keys under `shift`, and the accuracy that rescaling gains."""
    yield [
        "model", "split", "images", "logit MSE, keys rescaled", "logit MSE, keys not rescaled",
        "accuracy gained [points]",
    ]  # fmt: skip
    for name in LENGTHS:
        found = json.loads((RESULTS / name).read_text(encoding="utf-8"))
        for case in CASES:
            for row in found["rows"]:
                if _case(row) == case and row["reuse"] == APPROXIMATE:
                    errors = [f"{row[f'{lengths} MSE']:.2g}" for lengths in ("kept", "free")]
                    yield [found["model"], found["split"], _title(case), *errors, interval(row, "gain ")]


def codecs() -> Iterator[list[str]]:
    """Yield the cost of codecs in the shipped model: divergence from outputs with full-precision cache entries."""
    yield [
        "before the images", "`reuse=`", "codec", "accuracy [%]", "mean KL", "largest KL of a token",
        "same most likely token [%]",
    ]  # fmt: skip
    for before, name in (("new text", "codecs_cpu.json"), ("another question", "codecs_cpu_question_first.json")):
        for row in _rows(name):
            if row["task"] == "all":
                kl = [f"{row[of]:.2g}" for of in ("mean KL", "largest KL")] if row["codec"] != "auto" else ["", ""]
                mode = "approximate" if row["reuse"] == APPROXIMATE else row["reuse"]
                cells = [before, f"`{mode}`", f"`{row['codec']}`", f"{row['right %']:.1f}", *kl]
                yield [*cells, f"{row['agreement %']:.2f}"]


def ttft(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield TTFT of cached images after new text (`vlcache bench ttft --disk DIR`), a line for each mode."""
    of_disk = {row["configuration"]: row for row in rows if row["K, V in"] == "disk"}
    yield [
        "reuse mode", "TTFT [ms]", "spread (max - min) [ms]", "TTFT after a restart, from disk [ms]",
        "speedup over no reuse", 'speedup over `"exact"`', "tokens computed per layer",
        "operations/s, relative to no reuse", "lower bound [ms]", "TTFT / lower bound",
        "time outside encoder and prefill [%]",
    ]  # fmt: skip
    for row in rows:
        if row["K, V in"] != "disk":
            name = row["configuration"]
            disk = _ms(of_disk[name]["TTFT ms"]) if name in of_disk else ""
            cells = [_ms(row["TTFT ms"]), _spread(row["spread ms"]), disk]
            cells += [_times(row[of]) for of in ("over cold", "over encoder cached")]
            cells += [f"{row['rows a layer']:,.0f}", f"{row['GFLOP/s of cold']:.2f}", _ms(row["floor ms"])]
            yield [_mode(name), *cells, f"{row['times floor']:.1f}", f"{row['TTFT minus compute %']:.0f}"]


def ttft_sizes(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield TTFT by image tokens (`vlcache bench ttft --image-tokens 1024,2048`)."""
    shown = ("cold", "encoder cached", "r = 0.1", "schedule, mean 0.0250", "shift, r = 0.03", "r = 0")
    slow = ("r = 0.1", "schedule, mean 0.0250")
    yield [
        "image tokens", *(f"{_mode(name)} [ms]" for name in shown),
        *(f"operations/s relative to no reuse, {_mode(name)}" for name in slow),
        f"{_mode('r = 0')}: TTFT / lower bound",
    ]  # fmt: skip
    for tokens in dict.fromkeys(row["image tokens"] for row in rows):
        found = {row["configuration"]: row for row in rows if row["image tokens"] == tokens}
        rates = [f"{found[name]['GFLOP/s of cold']:.2f}" for name in slow]
        cells = [_ms(found[name]["TTFT ms"]) for name in shown]
        yield [str(tokens), *cells, *rates, f"{found['r = 0']['times floor']:.1f}"]


def ttft_first(names: Sequence[str] | None, rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield TTFT by mode with KV in host memory, for the configurations `names`; None: all."""
    yield ["reuse mode", "TTFT [ms]", "spread (max - min) [ms]", "speedup"]
    found = {row["configuration"]: row for row in rows if row["K, V in"] != "disk"}
    for name in names or found:
        row = found[name]
        yield [_mode(name), _ms(row["TTFT ms"]), _spread(row["spread ms"]), _times(row["over cold"])]


def ttft_hybrid(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield TTFT of a model with linear attention (`vlcache bench ttft --random-weights hybrid`)."""
    yield [
        "reuse mode", "TTFT [ms]", "spread (max - min) [ms]", "speedup over no reuse", 'speedup over `"exact"`',
        "tokens computed per layer", "bytes moved [MB]", "lower bound [ms]",
    ]  # fmt: skip
    for row in rows:
        cells = [_ms(row["TTFT ms"]), _spread(row["spread ms"])]
        cells += [_times(row[of]) for of in ("over cold", "over encoder cached")]
        cells += [f"{row['rows a layer']:,.0f}", f"{row['MB moved']:,.0f}", _ms(row["floor ms"])]
        yield [_mode(row["configuration"]), *cells]


def hybrid_floors(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield the lower bounds of models with linear attention on an H200 (`vlcache_jax.benchmarks.floor`)."""
    parts = {
        "encoder": ("encoder",), "linears and output head": ("linear", "head"), "attention": ("attention",),
        "linking and shift": ("link", "move"), "load from host": ("load",),
    }  # fmt: skip
    yield [
        "model", "reuse mode", "lower bound [ms]", *(f"{name} [ms]" for name in parts), "bytes moved [GB]",
        'speedup over `"exact"`',
    ]  # fmt: skip
    rate = _file("floor.json")["rates"]["host"]
    for model in HYBRIDS:
        own = [row for row in rows if row["model"] == model]
        [cached] = (row["ms"] for row in own if row["case"] == ENCODER_CACHED)
        for row in own:
            case = row["case"].removesuffix(", int8")
            ends = re.fullmatch(r"shift-ends, r = ([\d.]+)", case)
            name = f"`shift-ends-{ends[1]}`" if ends else _mode(case)
            cells = [_ms(sum(row[f"{part} ms"] for part in of)) for of in parts.values()]
            moved = row["load ms"] * rate / 1e12
            coded = ', `codec="int8"`' * (row["case"] != case)
            yield [model, name + coded, _ms(row["ms"]), *cells, f"{moved:.2g}", _times(cached / row["ms"])]


def _mode(configuration: str) -> str:
    """Return the public name of a configuration; values of `reuse=` are code."""
    name = mode(configuration)
    return f"`{name}`" if re.fullmatch(r'".*"|[\d.]+', name) else name


def _ms(number: float) -> str:
    """Return milliseconds with three digits: "21,100", "607", "0.129"."""
    return f"{float(f'{number:.3g}'):,.0f}" if number >= 100 else f"{number:.3g}"


def _spread(milliseconds: float) -> str:
    """Return the slowest run minus the fastest."""
    return _ms(milliseconds) if milliseconds else "one run"


def _times(ratio: float) -> str:
    """Return a ratio of times, with the two digits that are certain."""
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.2g}"


def prefill(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield runs without reuse, next to torch (`python -m research.prefill`)."""
    yield [
        "dtype", "prompt tokens", "prefill [ms]: VLCache-JAX", "prefill [ms]: torch", "encoder [ms]: VLCache-JAX",
        "encoder [ms]: torch", "total time, torch / VLCache-JAX",
    ]  # fmt: skip
    for row in rows:
        parts = [row[f"{part} ms, {who}"] for part in ("prefill", "encode") for who in ("vlcache", "torch")]
        yield [row["dtype"], str(row["slots"]), *map(_ms, parts), f"{_torch_share(row):.2f}"]


def _torch_share(row: Row) -> float:
    """Return torch's time for images and prompt, divided by ours."""
    ours, torch = (sum(row[f"{part} ms, {who}"] for part in ("prefill", "encode")) for who in ("vlcache", "torch"))
    return float(torch / ours)


def torch_speed(dtype: str) -> str:
    """Return the speed of torch's cold runs relative to ours, encoder and prefill together: "1.35 to 1.40"."""
    found = sorted(1 / _torch_share(row) for row in _rows("prefill_cpu.json") if row["dtype"] == dtype)
    return f"{found[0]:.2f} to {found[-1]:.2f}"


# Cases of `benchmarks.peer` in public words: those of the first table, each with the case of vLLM for comparison.
PEER_CASES = {
    "cold": "new images",
    "repeat": "same request again",
    "next question": "same prefix, new question",
    "new prefix": 'new prefix, `"exact"`',
    "new prefix, approximate": 'new prefix, `"approximate"`',
    "new prefix, full": 'new prefix, `"full"`',
    "reordered": 'images reordered, `"exact"`',
    "reordered, approximate": 'images reordered, `"approximate"`',
    "reordered, full": 'images reordered, `"full"`',
    "decode": "decoding",
    "batch": "96 requests",
    "repeated": "96 requests, repeated images",
    "start to the first answer, as before": "start to the first answer, with compiled programs on disk",
    "start and warm-up, as before": "start and warm-up, with compiled programs on disk",
    "start to the first answer, nothing kept": "start to the first answer, nothing compiled",
    "start and warm-up, nothing kept": "start and warm-up, nothing compiled",
}
PEER_FIRST = ("cold", "repeat", "next question", "new prefix", "new prefix, approximate", "decode", "batch")
DTYPES = ("float32", "bfloat16")


def peer_first() -> Iterator[list[str]]:
    """Yield speed relative to vLLM's build for CPUs, as a range over all sizes."""
    yield ["case", *DTYPES]
    for case in PEER_FIRST:
        theirs = case.partition(",")[0]
        yield [PEER_CASES[case], *(peer_speed(dtype, case, theirs) for dtype in DTYPES)]


def peer_ratios(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield speed relative to vLLM by case and size; a mode that vLLM lacks is compared with vLLM's run of the same
    case.
    """
    yield ["case", "image tokens or sequences", *DTYPES]
    ours = {(row["case"], row["size"], row["dtype"]): row for row in rows}
    for case, size in dict.fromkeys((row["case"], row["size"]) for row in rows):
        cells = list[str]()
        for dtype in DTYPES:
            own, other = ours.get((case, size, dtype)), ours.get((case.partition(", ")[0], size, dtype))
            found = [row[name] for row, name in ((own, "ours"), (other, "vllm")) if row is not None]
            ratio = ""
            if own is not None and len(found) == 2 and not any(isinstance(figure, str) for figure in found):
                mine, theirs = found
                ratio = f"{mine / theirs if own['unit'] == 'tokens/s' else theirs / mine:.2g}"
            cells.append(ratio)
        if any(cells):
            yield [_public(PEER_CASES, case), str(size).replace("-", ""), *cells]


def peer(dtype: str, rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield all measurements in one data type next to vLLM's build for CPUs (`python -m benchmarks.peer`)."""
    yield [
        "case", "image tokens or sequences", "unit", "VLCache-JAX", "vLLM", "VLCache-JAX, CPU time [s]",
        "vLLM, CPU time [s]",
    ]  # fmt: skip
    for row in (row for row in rows if row["dtype"] == dtype):
        cells = (row[name] for name in ("ours", "vllm", "ours: CPU s", "vllm: CPU s"))
        figures = ("" if isinstance(cell, str) else f"{cell:.3g}" for cell in cells)
        case = _public(PEER_CASES, row["case"])
        yield [case, str(row["size"]).replace("-", ""), row["unit"], *figures]


def peer_amx(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield speed relative to vLLM on a processor with AMX; only ratios are available."""
    yield ["case", "image tokens or sequences", *DTYPES]
    for row in rows:
        yield [_public(PEER_CASES, row["case"]), str(row["size"]), *(f"{row[dtype]:.2g}" for dtype in DTYPES)]


def peer_amx_speed(dtype: str, case: str) -> str:
    """Return speed relative to vLLM on a processor with AMX, over all sizes: "0.39 to 0.53"."""
    found = sorted(row[dtype] for row in _rows("peer_amx_cpu.json") if row["case"] == case)
    return f"{found[0]:.2g} to {found[-1]:.2g}"


def router_time(part: str, engines: int = 16) -> str:
    """Return the milliseconds of one part of a router's work on a request of 20 images."""
    [row] = [row for row in _rows("routing.json") if row["engines"] == engines]
    parts = {"choose": row["choose ms"], "parse": row["read JSON ms"], "hash": row["hash ms"]}
    return f"{parts[part]:.2g}"


def architectures() -> Iterator[list[str]]:
    """Yield the portable kernels, compiled for each architecture and counted (`python -m research.architectures`)."""
    yield [
        "GPU", "attention: instructions (masked)", "attention: fraction of the matrix rate", "attention: limited by",
        "decode attention: fraction of the bandwidth", "FP8 decode: instructions",
        "FP8 decode: fraction of the bandwidth", "FP8 experts: fraction of the matrix rate",
    ]  # fmt: skip
    for name, one in _file("architectures.json").items():
        if not name.startswith("sm_"):
            continue
        kinds = (
            "paged attention, cold 4096",
            "paged attention, decode",
            "8 bits, decode of 8B",
            "8 bits, experts of 30B-A3B",
        )
        cold, decode, matrix, experts = (one["cases"][kind][0] for kind in kinds)
        yield [
            one["chip"].removeprefix("NVIDIA "),
            f"{cold['instructions of a turn']} ({cold['instructions of a masked turn']})",
            f"{cold['share of matrix rate at most']:.2g}",
            cold["limited by"],
            f"{decode['share of bandwidth at most']:.2g}",
            str(matrix["instructions of a turn"]),
            f"{matrix['share of bandwidth at most']:.2g}",
            f"{experts['share of matrix rate at most']:.2g}",
        ]


def agreement(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield greedy outputs of the same prompts in one batch and each by itself (`python -m benchmarks.peer`)."""
    yield [
        "engine", "dtype", "same outputs", "tokens with the same five most likely",
        "largest difference of log-probabilities",
    ]  # fmt: skip
    for row in rows:
        if row["beside"] == _ALONE:
            engine, dtype = row["answers of"].split()
            equal, tops = row["equal"], row["same five most likely"]
            yield [_ENGINES[engine], dtype, equal, tops, f"{row['largest difference']:.1g}"]


def agreed(engine: str, dtype: str) -> str:
    """Return how many outputs are the same in a batch and alone: "7 of 10"."""
    rows = _file("peer_cpu.json")["agreement"]
    [row] = [row for row in rows if row["beside"] == _ALONE and row["answers of"] == f"{engine} {dtype}"]
    return str(row["equal"])


def peer_speed(dtype: str, ours: str, theirs: str = "") -> str:
    """Return speed relative to vLLM in a case, over its sizes: "0.72 to 0.75"; `theirs` names another case of
    vLLM's.
    """
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
    """Yield throughput of 96 requests by reuse mode, next to transformers (`vlcache bench throughput`)."""
    yield [
        "", "output tokens/s", "spread (max - min) [%]", "runs", "decode steps", "program launches per token",
        "same answer as no reuse [%]",
    ]  # fmt: skip
    for title, name, place in (
        ("no reuse", "reuse", 0), ("`\"exact\"`", "reuse", 1), ("`0.1`", "reuse", 2), ("`\"shift-0.02\"`", "reuse", 3),
        ("VLCache-JAX", "transformers", 0), ("transformers + torch", "transformers", 1),
    ):  # fmt: skip
        row = _rows(f"throughput_{name}_cpu_96.json")[place]
        launches = "" if row["launches a token"] is None else f"{row['launches a token']:.3f}"
        yield [
            title, f"{row['tokens/s']:.0f}", f"{row['spread %']:.0f}", str(len(row["runs"])),
            f"{row['decode steps']:.0f}", launches, f"{row['equal answers %']:.0f}",
        ]  # fmt: skip


def policies(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield figures of a server in each reuse mode, by request rate (`vlcache bench serve --policies`)."""
    rates = list(dict.fromkeys(row["rate"] for row in rows))
    yield [
        "reuse mode", *(f"TTFT p50 [s] at {rate:g} requests/s" for rate in rates),
        *(f"goodput [requests/s] at {rate:g} requests/s" for rate in rates), "prompt tokens from the cache [%]",
        "same answer as no reuse [%]",
    ]  # fmt: skip
    for name in dict.fromkeys(row["reuse"] for row in rows):
        own = [row for row in rows if row["reuse"] == name]
        shares = [f"{np.mean([row[of] for row in own]):.0f}" for of in ("cached %", "equal answers %")]
        first = [_with_spread(row, "TTFT p50 ms", 1000) for row in own]
        yield [_way(name), *first, *(_with_spread(row, "goodput/s", 1) for row in own), *shares]


def policies_first(rows: Sequence[Row], rate: float = 1.0) -> Iterator[list[str]]:
    """Yield figures of a server in each reuse mode at one request rate."""
    yield [
        "reuse mode", f"TTFT p50 [s] at {rate:g} request/s", f"goodput [requests/s] at {rate:g} request/s",
        "prompt tokens from the cache [%]",
    ]  # fmt: skip
    for row in (row for row in rows if row["rate"] == rate):
        cells = [_with_spread(row, "TTFT p50 ms", 1000), _with_spread(row, "goodput/s", 1)]
        yield [_way(row["reuse"]), *cells, f"{row['cached %']:.0f}"]


def by_images(column: str, form: str, rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield a figure of each reuse mode by the number of images (`research.mpic`)."""
    counts = list(dict.fromkeys(row["images"] for row in rows))
    yield ["reuse mode", *(f"{count} image{'s' * (count > 1)}" for count in counts)]
    for name in dict.fromkeys(row["reuse"] for row in rows):
        yield [_way(name), *(form.format(row[column]) for row in rows if row["reuse"] == name)]


def _way(name: str) -> str:
    """Return a reuse mode, with a note if papers differ on the meaning of its name; values of `reuse=` are code."""
    if name == "off":
        return "no reuse"
    return label(name) if name == SCHEDULE else label(name).replace(name, f'`"{name}"`', 1)


def ttft_steps(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield the parts of the TTFT of long prompts (`vlcache bench ttft --image-tokens 10240,20480`)."""
    steps = ("lookup", "decode_image", "preprocess", "encode", "transfer", "link", "prefill", "first_token")
    names = {"lookup": "cache lookup", "decode_image": "image decoding", "encode": "encoder"}
    heads = [f"{names.get(step, step.replace('_', ' '))} [ms]" for step in steps]
    yield ["image tokens", "reuse mode", "TTFT [ms]", *heads, "speedup"]
    for row in rows:
        cells = [_ms(row[f"{step} ms"]) for step in ("TTFT", *steps)]
        yield [str(row["image tokens"]), _mode(row["configuration"]), *cells, _times(row["over cold"])]


def scale(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield figures of 16 simulated engines by routing rule (`research.scale`), at two rates."""
    yield ["requests/s per engine", "routing rule", "cached in the engine, %", "loaded from another engine, %",
           "computed, %", "TTFT p50, ms", "TTFT p99, ms", "largest load / mean load"]  # fmt: skip
    for rate, found in ((8, rows), (24, _rows("scale_busy.json"))):
        for row in (row for row in found if row["engines"] == 16):
            computed = 1 - row["found"] - row["from others"]
            shares = [f"{100 * share:.0f}" for share in (row["found"], row["from others"], computed)]
            times = [f"{row[name]:,.0f}" for name in ("p50 ms", "p99 ms")]
            yield [str(rate), f"`{row['rule']}`", *shares, *times, f"{row['most over mean']:.2f}"]


def routing(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield the times of a router for a request (`research.routing`)."""
    yield ["engines", "parse JSON, ms", "hash images, ms", "walk the body, ms",
           "choose an engine, ms", "choose p99, ms"]  # fmt: skip
    for row in rows:
        alone = row["hash alone ms"]
        times = (row["read JSON ms"], alone, row["hash ms"] - alone, row["choose ms"], row["choose p99 ms"])
        yield [f"{row['engines']:,}", *(f"{ms:.2g}" for ms in times)]


def scale_needs() -> Iterator[list[str]]:
    """Yield the needs of more engines, by the simulator's figures."""
    yield ["engines", "cached images", "hits, %", "images computed/s", "GB/s between machines", "cache entries",
           "indexes, MB"]  # fmt: skip
    costs, rate, tokens = Costs(), 8, 1024
    size = tokens * costs.token_bytes
    for engines in (1, 10, 1000):
        held = engines * 1024
        found = zipf_hits(min(held, 10**7), 10**7, 1.1)
        moved = 0.03 * engines * rate * size / 1e9 if engines > 1 else 0.0
        computed = (1 - found) * engines * rate
        records = 2 * held  # encoder rows; KV
        yield [
            f"{engines:,}", f"{held:,}", f"{100 * found:.0f}", f"{computed:,.0f}", f"{moved:.2g}", f"{records:,}",
            f"{records * INDEX_BYTES / 1e6:,.0f}",
        ]  # fmt: skip


def dialogue(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield times to the first token of a dialogue with and without snapshots of states (`research.dialogue`)."""
    yield ["turn", "prompt tokens", "of them not computed", "TTFT from a snapshot [ms]", "TTFT without [ms]", "ratio"]
    for row in rows:
        times = row["from a snapshot [ms]"], row["computed [ms]"]
        yield [*(f"{row[name]:,}" for name in ("turn", "tokens", "cached")), *map(str, times), f"{row['times']:.1f}"]


def dialogue_vllm(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield times to the first token of a dialogue beside vLLM's build for CPUs (`research.dialogue_vllm`)."""
    yield [
        "turn", "prompt tokens", "not computed, VLCache-JAX", "not computed, vLLM", "TTFT, VLCache-JAX [ms]",
        "TTFT, vLLM [ms]",
    ]  # fmt: skip
    for row in rows:
        names = "turn", "tokens", "not computed, ours", "not computed, vllm", "ours [ms]", "vllm [ms]"
        yield [f"{row[name]:,}" for name in names]


def _with_spread(row: Row, column: str, unit: float) -> str:
    """Return a median, and its range over several runs."""
    median, found = f"{row[column] / unit:.2g}", spread(row, column)
    return median if found is None else f"{median} ({found[0] / unit:.2g} to {found[1] / unit:.2g})"


def server_cost(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield the cost of HTTP (`python -m research.server_cost`)."""
    yield ["measurement", "`AsyncLLM`", "over HTTP", "difference"]
    for row in rows:
        if row["what"] == "hits":
            difference = f"{row['HTTP'] - row['direct']:+.1f} ms"
            yield ["TTFT of a cache hit [ms]", f"{row['direct']:.1f}", f"{row['HTTP']:.1f}", difference]
        else:
            ratio = f"{100 * (row['ratio'] - 1):+.1f} %"
            yield [f"output of {row['what']} [tokens/s]", f"{row['direct']:.0f}", f"{row['HTTP']:.0f}", ratio]


# Bodies of `research.large_bodies` by the field that is large.
BODIES = {
    "/health alone": "only `/health`", "a picture": "one image", "rates of videos": "`mm_processor_kwargs.fps`",
    "names of settings": "`mm_processor_kwargs`, one key repeated", "allowed tokens": "`allowed_token_ids`",
    "biases": "`logit_bias`", "metadata": "`metadata`", "messages": "`messages`", "parts": "parts of one message",
    "tools": "`tools`", "a text": "one text", "a text of escapes": "one text of escape sequences",
    "a text of other letters": "one text of non-ASCII characters", "choices": "`structured_outputs.choice`",
    "a schema": "`structured_outputs.json`", "lists in a list": "a list of lists", "spaces": "spaces",
    "digits": "digits of `seed`", "no JSON": "not JSON", "a prompt of ids": "`prompt` of token ids",
    "prompts of ids": "`prompt`, a list of token id lists", "items": "`input` of `/v1/responses`",
    "inputs": "`input` of `/v1/embeddings`", "inputs of ids": "`input` of `/v1/embeddings`, token ids",
    "documents": "`documents` of `/v1/rerank`", "a text to tokenize": "`prompt` of `/tokenize`",
    "tokens to read": "`tokens` of `/detokenize`",
}  # fmt: skip


def large_bodies(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield the cost of one large body for other requests (`python -m research.large_bodies`)."""
    yield [
        "body", "size [MiB]", "HTTP status", "response after [s]", "CPU time [s]", "slowest `/health` [s]",
    ]  # fmt: skip
    for row in rows:
        numbers = (f"{row[name]:.2f}" for name in ("s", "CPU s", "worst /health, s"))
        yield [_public(BODIES, row["what"]), f"{row['MiB']:.0f}", str(row["status"]), *numbers]


def slowest_health() -> str:
    """Return the seconds of the slowest response of `/health` during a large body."""
    return f"{max(row['worst /health, s'] for row in _rows('large_bodies_cpu.json')):.2f}"


def slowest_refusal() -> str:
    """Return the seconds of the slowest refusal (`python -m research.refusals`)."""
    return f"{max(row['ms'] for row in _rows('refusals_cpu.json')) / 1000:.1f}"


def budgets(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield accuracy by method and budget (`research.budgets`), and the memory where it is not the budget."""
    [whole, *rest] = rows
    shares = list(dict.fromkeys(row["budget %"] for row in rest))
    yield ["`compress`", *(f"{share:g} % of the KV" for share in shares)]
    for method in dict.fromkeys(row["method"] for row in rest):
        cells = []
        for row in (row for row in rest if row["method"] == method):
            differs = abs(row["memory %"] - row["budget %"]) >= 1
            cells.append(f"{row['mean']:.1f}" + f" ({row['memory %']:.0f} % kept)" * differs)
        yield [f"`{method}`", *cells]
    yield ["full cache", *[""] * (len(shares) - 1), f"{whole['mean']:.1f}"]


def ahead(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield each method's gain over random at the same memory, and its agreement with the full cache."""
    shares = (10.0, 50.0)
    yield [
        "`compress`", *(f"gain over `random` at {share:g} % [points]" for share in shares),
        *(f"same most likely token at {share:g} % [%]" for share in shares),
        *(f"hit rate at {share:g} %" for share in shares),
    ]  # fmt: skip
    for method in dict.fromkeys(row["method"] for row in rows[1:]):
        own = [row for share in shares for row in rows[1:] if (row["method"], row["budget %"]) == (method, share)]
        cells = [interval(row, "over random ") for row in own] + [f"{row['agreement']:.1f}" for row in own]
        rates = ["" if row["hit rate"] is None else f"{row['hit rate']:.2f}" for row in own]
        yield [f"`{method}`", *cells, *rates]


def by_task(rows: Sequence[Row], share: float = 50) -> Iterator[list[str]]:
    """Yield accuracy by task at a budget, in percent."""
    names = list(rows[0])
    tasks = names[names.index("memory %") + 1 : names.index("questions")]
    yield ["`compress`", *(f"{task} [%]" for task in tasks)]
    for row in rows:
        if row["method"] == "whole" or row["budget %"] == share:
            title = "full cache" if row["method"] == "whole" else f"`{row['method']}-{share / 100:g}`"
            yield [title, *(f"{row[task]:.0f}" for task in tasks)]


def budget_overview() -> Iterator[list[str]]:
    """Yield accuracy at two budgets for short and long prompts, of the methods that the page names first."""
    shares = (10.0, 50.0)
    yield ["prompts", "`compress`", *(f"accuracy at {share:g} % of the KV [%]" for share in shares), "full cache [%]"]
    for prompts, name in (("short", "budgets_tiny_vqa.json"), ("long", "budgets_long.json")):
        whole, *rest = _rows(name)
        found = {(row["method"], row["budget %"]): row for row in rest}
        for method in ("postvision", "vl-cache", "random"):
            cells = [f"{found[method, share]['mean']:.1f}" for share in shares]
            yield [prompts, f"`{method}`", *cells, f"{whole['mean']:.1f}"]


def compression_overview(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield speedup and memory by the length of prompts, with a tenth of the KV."""
    counts = sorted({row["answers"] for row in rows})
    [way] = [way for way in dict.fromkeys(row["K, V"] for row in rows) if way.startswith("postvision")]
    yield [
        "prompt [tokens]", *(f"decode speedup, {count} sequence{'s' * (count > 1)}" for count in counts),
        "KV of a sequence, full cache [MB]", f"KV of a sequence, `{way}` [MB]",
    ]  # fmt: skip
    for prompt in dict.fromkeys(row["prompt"] for row in rows):
        own = {(row["answers"], row["K, V"]): row for row in rows if row["prompt"] == prompt}
        memory = [own[1, name]["K, V MB"] + own[1, name]["compressed MB"] for name in ("full", way)]
        speedups = [_times(own[count, way]["times full"]) for count in counts]
        yield [str(prompt), *speedups, *(f"{size:.0f}" for size in memory)]


def budget_lengths(name: str) -> str:
    """Return the lengths of the prompts of a file: "81 to 323"."""
    least, most = _file(name)["prompt tokens"]
    return f"{least} to {most}"


def held_out(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield accuracy of the model of long prompts by number of images (`research.tiny_vqa.held_out`)."""
    tasks = [name for name in rows[0] if name not in ("images", "image tokens", "asked")]
    yield ["images", "image tokens", *(f"{task} [%]" for task in tasks), "questions"]
    for row in rows:
        yield [
            *(str(row[name]) for name in ("images", "image tokens")),
            *(f"{row[name]:.0f}" for name in tasks),
            str(row["asked"]),
        ]


def looked_at(name: str) -> Iterator[list[str]]:
    """Yield the sparsity of attention and what decoded tokens attend to, by layer (`research.budgets`)."""
    found = _file(name)
    lines = {"sparsity after the last image": found["sparsity by layer"]}
    lines["attention on image tokens"] = found["contribution of images by layer"]
    for share in ("0.1", "0.5"):
        title = f"image tokens among the {100 * float(share):g} % most attended"
        lines[title] = found["coverage of images by layer"][share]
    yield ["[%]", *(f"layer {layer}" for layer in range(len(found["sparsity by layer"])))]
    for title, values in lines.items():
        yield [title, *(f"{100 * value:.0f}" for value in values)]


def sparse(name: str) -> Iterator[list[str]]:
    """Yield the sparsity of attention by layer: mean, minimum and maximum over heads (`research.budgets`)."""
    found = _file(name)["sparsity of heads by layer"]
    yield ["sparsity [%]", *(f"layer {layer}" for layer in range(len(found["prefill"]["mean"])))]
    for rows, values in found.items():
        cells = zip(*(values[of] for of in ("mean", "least", "greatest")), strict=True)
        yield [rows, *("{:.0f} ({:.0f} to {:.0f})".format(*(100 * share for share in cell)) for cell in cells)]


def stores(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield milliseconds to write and load cache entries, and the rate of a load relative to reading the same bytes."""
    yield ["store", "target memory", "write, bfloat16", "load, bfloat16", "load, int8", "load, int4"]
    written = {
        row["store"]: f"{row['ms']:.0f} ms" for row in rows if (row["what"], row["codec"]) == ("write", "bfloat16")
    }
    loads = [row for row in rows if row["what"] == "read" and "not possible" not in row["page cache"]]
    for memory, where in (("new", "new mapping"), ("old", "existing mapping")):
        for store, page_cache in dict.fromkeys((row["store"], row["page cache"]) for row in loads):
            case = (store, page_cache, memory)
            own = [row for row in loads if (row["store"], row["page cache"], row["memory"]) == case]
            cells = [f"{row['ms']:.0f} ms, {row['ratio %']:.0f} %" for row in own]
            is_first = memory == "new" and page_cache != "cold"
            title = f"{store}, cold" if page_cache == "cold" else store
            yield [title, where, written.get(store, "") if is_first else "", *cells]


def gpu_attention() -> Iterator[list[str]]:
    """Yield attention of Qwen3-VL-8B on an H200, next to the model of the chip and XLA (`python -m benchmarks.gpu`)."""
    cases = _file("gpu_h200.json")["cases"]
    yield ["attention", "time [ms]", "TFLOP/s", "TB/s", "chip model [ms]", "XLA [ms]"]
    for row in _rows("attention_model.json"):
        if row["measured us"] is not None:
            key = f"speed: attention, {row['case']}, D 128"
            own, xla = cases[key], cases.get(f"{key}, XLA")
            rates = [f"{own['TFLOP/s']:.0f}", f"{own['TB/s']:.2g}"]
            yield [
                _attention(row["case"]),
                f"{own['ms']:.3g}",
                *rates,
                f"{row['us'] / 1e3:.3g}",
                f"{xla['ms']:.3g}" if xla else "",
            ]


def _attention(case: str) -> str:
    """Return a case of attention in public words."""
    words = {
        r"^cold (\d+)": r"prefill of \1 tokens", r"^cold, last chunk of (\d+)": r"last chunk of a prefill of \1 tokens",
        r"^stage (\d+) of (\d+)": r"\1 recomputed tokens of \2", r"^text rows": "text tokens of a request",
        r"^(\d+) requests x (\d+) rows x (\d+)": r"\1 requests, \2 tokens each, after \3 tokens",
        r"^decode (\d+) x (\d+)": r"decode \1 sequences of \2 tokens",
        r"^decode (\d+) beside (\d+) rows, (\d+) to (\d+)":
            r"decode \1 sequences of \3 to \4 tokens, with \2 prefill tokens",
        r"^decode (\d+) over one prefix of (\d+)": r"decode \1 sequences with a shared prefix of \2 tokens",
        r"^(\d+) x (\d+) rows over one prefix of (\d+)":
            r"\1 requests, \2 tokens each, with a shared prefix of \3 tokens",
    }  # fmt: skip
    for pattern, public in words.items():
        if re.search(f"{pattern}$", case):
            return re.sub(pattern, public, case).replace("decode 1 sequences", "decode 1 sequence")
    return case


def gpu_causal() -> Iterator[list[str]]:
    """Yield causal attention, 32 and 8 heads of 128, bfloat16, next to other kernels (`python -m benchmarks.gpu`)."""
    cases = _file("gpu_h200.json")["cases"]
    jaxs = "jax.experimental.pallas.ops.gpu.attention_mgpu, float16"
    others = {"cuDNN": "cuDNN", "torch": "torch", "Pallas kernel of jax, float16": jaxs}
    yield ["tokens", "VLCache-JAX [ms]", *(f"{name} [ms]" for name in others), "VLCache-JAX [TFLOP/s]"]
    for tokens in (4096, 20480):
        own = cases[f"speed: causal {tokens}"]
        found = [cases[f"speed: causal {tokens}, {name}"]["ms"] for name in others.values()]
        yield [str(tokens), *(f"{ms:.3g}" for ms in (own["ms"], *found)), f"{own['TFLOP/s']:.0f}"]


def gpu_windows(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield CUDA graphs of multi-step decode, and predicates that the host reads (`python -m research.thunks`)."""
    columns = {
        "predicates read": "predicates that the host reads", "graphs": "CUDA graphs",
        "kernels inside": "kernels in graphs", "kernels outside": "kernels outside graphs",
        "loops outside": "loops outside graphs",
    }  # fmt: skip
    words = {
        "drawn": "sampled",
        "any, 1 steps": "any sampling, 1 step",
        "asked, while any goes on": "one for all cases",
    }
    yield ["sequences", "program", *columns.values()]
    for row in rows:
        program = functools.reduce(lambda name, word: name.replace(*word), words.items(), row["window"])
        yield [str(row["rows"]), program, *(str(row[name]) for name in columns)]


def first_token_modes() -> Iterator[list[str]]:
    """Yield TTFT by reuse mode on two CPU cores and on an H200, each with its speedup over a cold run, for README."""
    yield ["images in a new context", *map(_mode, MODES)]
    for title, name, unit, symbol, digits in (
        ("two CPU cores, 4 images of 1024 tokens", "ttft_cpu.json", 1000, "s", 2),
        ("one H200, 1 image of 4096 tokens", "ttft_h200.json", 1, "ms", 3),
    ):
        found = {row["configuration"]: row for row in _rows(name) if row["K, V in"] != "disk"}
        times = [f"{_digits(found[of]['TTFT ms'] / unit, digits)} {symbol}" for of in MODES]
        speedups = [f" ({_digits(found[of]['over cold'], 2)}x)" * (of != "cold") for of in MODES]
        yield [title, *map("".join, zip(times, speedups, strict=True))]


def _digits(value: float, count: int) -> str:
    """Return a number with `count` significant digits, zeros included: "8.0"; none before the point is rounded away."""
    return f"{value:.0f}" if value >= 10**count else f"{value:#.{count}g}".rstrip(".")


def spread_over(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield memory and lower bounds of several H200s that share a model (`python -m research.spread`)."""
    times = ("cold 20K", "hit 20K, falling", "token of 1", "token of 16", "token of 64")
    names = {
        "cold 20K": "no reuse, 20K tokens", "hit 20K, falling": "cache hit, 20K tokens, schedule",
        "token of 1": "token of 1 sequence", "token of 16": "token of 16 sequences",
        "token of 64": "token of 64 sequences",
    }  # fmt: skip
    heads = [f"{names[case]}, lower bound (communication) [ms]" for case in times]
    yield ["model", "GPUs", "weights per GPU [GB]", "tokens in the KV pool", *heads]
    for row in rows:
        fits = row["tokens in the pool"] > 0
        found = [(row[f"{case}, ms"], row[f"{case}, exchange ms"]) for case in times]
        cells = [f"{_three(ms)} ({_three(part)})" if fits else "" for ms, part in found]
        pool = str(row["tokens in the pool"]) if fits else "does not fit"
        yield [row["model"], str(row["GPUs"]), f"{row['weights, GB']:.1f}", pool, *cells]


def _three(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


STEP_HEADS = {
    "launches a layer": "launches per layer", "launches": "launches", "predicates": "predicates", "MB": "traffic [MB]",
    "MB of temporaries": "traffic of temporaries [MB]", "memory of temporaries, MB": "memory of temporaries [MB]",
    "compile s": "compilation [s]", "ms by the model": "chip model [ms]",
    "tokens/s by the model": "chip model [tokens/s]",
    "of the floor": "lower bound / chip model", "spilled bytes": "spilled bytes", "registers": "registers",
}  # fmt: skip


def gpu_steps() -> Iterator[list[str]]:
    """Yield decode steps and layers compiled for an H200, before and after layer fusion (`research.steps`)."""
    columns = {
        "launches a layer": "{:.0f}", "launches": "{:.0f}", "predicates": "{:.0f}", "MB": "{:.0f}",
        "MB of temporaries": "{:.0f}", "memory of temporaries, MB": "{:.0f}", "compile s": "{:.0f}",
        "ms by the model": "{:.3g}", "tokens/s by the model": "{:.0f}", "of the floor": "{:.2f}",
    }  # fmt: skip
    yield ["model", "program", *(STEP_HEADS[column] for column in columns)]
    for model, program, rows in _steps("steps_h200_before.json", "steps_h200.json"):
        yield [model, _program(program), *(_changed(rows, column, form) for column, form in columns.items())]


def gpu_versions() -> Iterator[list[str]]:
    """Yield the same programs as compiled by two versions of jax (`research.steps`)."""
    columns = {
        "launches a layer": "{:.0f}", "memory of temporaries, MB": "{:.0f}", "spilled bytes": "{:.0f}",
        "registers": "{:.0f}", "compile s": "{:.0f}",
    }  # fmt: skip
    names = "steps_h200.json", "steps_h200_jax012.json"
    versions = [_file(name)["versions"]["jax"] for name in names]
    yield ["model", "program", *(f"{STEP_HEADS[name]}, jax {version}" for name in columns for version in versions)]
    for model, program, rows in _steps(*names):
        cells = [_changed([row], column, form) for column, form in columns.items() for row in rows]
        yield [model, _program(program), *cells]


def _program(name: str) -> str:
    """Return a program of `research.steps` in public words."""
    kind, count = name.split()
    if kind == "layer":
        return f"prefill chunk of {count} tokens"
    return f"decode, {count} sequence{'s' * (count != '1')}"


def _steps(*names: str) -> Iterator[tuple[str, str, list[Row]]]:
    """Yield programs of the existing files, with their row in each."""
    tables = [
        {(row["model"], row["program"]): row for row in _rows(name)} for name in names if (RESULTS / name).exists()
    ]
    nothing = {"not compiled": NOT_TRIED}
    for model, program in dict.fromkeys(key for table in tables for key in table):
        yield model, program, [table.get((model, program), nothing) for table in tables]


def _changed(rows: Sequence[Row], column: str, form: str) -> str:
    """Return a figure before and now, once if it is the same or has one value; without any, the reason."""
    tried = [row for row in rows if row["not compiled"] != NOT_TRIED] or rows[:1]
    cells = [row["not compiled"] or ("" if row[column] is None else form.format(row[column])) for row in tried]
    return " → ".join(dict.fromkeys(cells))


# Parts of a hit on the host (`research.launched`), and cases of `research.host`, in public words.
LAUNCHED = {
    "launched, from bytes": "total, images as bytes", "launched, from PIL images": "total, images as PIL images",
    "BLAKE3 of the bytes, all threads": "only BLAKE3 of the bytes, all threads",
    "BLAKE3 of the pixels, all threads": "only BLAKE3 of the pixels, all threads",
    "image processor of transformers": "only the image processor of transformers",
    "part: hash, look up": "part: hash and look up", "part: number the tokens": "part: token ids and positions",
    "part: plan": "part: plan of the layers", "part: give pages": "part: allocate KV blocks",
    "part: find what is linked": "part: find the entries to link",
    "part: make places, launch all links": "part: prepare KV slots and launch all links",
}  # fmt: skip
HOST = {
    "prefill, 8192 rows of 8 images": "prefill, 8192 tokens of 8 images",
    "prefill, 8192 rows of 64 texts": "prefill, 8192 tokens of 64 texts",
    "19 known images, a schedule of 36 layers": "19 cached images, a schedule of 36 layers",
    "a window of 8 tokens, 64 answers": "multi-step decode of 8 tokens, 64 sequences",
    "the same of compressed prompts, 1 work list": "the same with compressed prompts, 1 work list",
    "the same of compressed prompts, 4 work lists": "the same with compressed prompts, 4 work lists",
}  # fmt: skip


def launched(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield host time until the first launch of a cache hit (`python -m research.launched`)."""
    yield ["work", "median [ms]", "minimum [ms]"]
    for row in rows:
        yield [_public(LAUNCHED, row["what"]), _ms(row["ms"]), _ms(row["least ms"])]


def shares(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield the time of the threads by part, for a prompt without reuse (`python -m research.shares`)."""
    kinds = [(part, what) for part in ("encoder", "decoder") for what in ("products", "attention", "rest")]
    names = {"products": "matrix products"}
    yield ["dtype", *(f"{part}: {names.get(what, what)} [%]" for part, what in kinds)]
    for dtype, own in itertools.groupby(rows, lambda row: row["dtype"]):
        found = {(row["part"], row["what"]): row["share, %"] for row in own}
        yield [dtype, *(f"{found[kind]:.0f}" for kind in kinds)]


def host(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield host time of a step (`python -m research.host`)."""
    yield [
        "step", "token arrays [ms]", "work lists [ms]", "transfer [ms]", "total [ms]", "before the first layer [ms]",
    ]  # fmt: skip
    for row in rows:
        parts = ("rows", "work lists", "handing over", "together", "until the first layer")
        yield [_public(HOST, row["case"]), *(f"{row[f'{part} ms']:.1f}" for part in parts)]


def compressed_decoding(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield the decoding speed of sequences that run together (`vlcache bench compression`)."""
    first, *others = dict.fromkeys(row["K, V"] for row in rows)
    ways = ["full cache", *(f"`{way}`" for way in others)]
    yield [
        "prompt [tokens]", "sequences", *(f"decode, {way} [tokens/s]" for way in ways), "speedup",
        "largest spread [%]", *(f"KV, {way} [MB]" for way in ways), *(f"end to end, {way} [s]" for way in ways),
    ]  # fmt: skip
    for prompt, answers in dict.fromkeys((row["prompt"], row["answers"]) for row in rows):
        own = {row["K, V"]: row for row in rows if (row["prompt"], row["answers"]) == (prompt, answers)}
        found = [own[way] for way in (first, *others)]
        yield [
            str(prompt), str(answers), *(f"{row['tokens/s']:.3g}" for row in found),
            ", ".join(_times(row["times full"]) for row in found[1:]), f"{max(row['spread %'] for row in found):.0f}",
            *(f"{row['K, V MB'] + row['compressed MB']:.0f}" for row in found),
            *(_three(row["end to end s"]) for row in found),
        ]  # fmt: skip


def compressed_requests(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield the time that compression takes in one request, and its decoding speed (`vlcache bench compression`)."""
    yield [
        "prompt [tokens]", "`compress`", "KV kept [%]", "TTFT [s]", "prefill [s]", "observe and compact [s]",
        "the same, of prefill [%]", "decode [tokens/s]", "spread [%]", "end to end [s]",
    ]  # fmt: skip
    for row in rows:
        names = ("first token s", "prefill s", "observe + compact s")
        seconds = [f"{row[name]:.3g}" for name in names]
        of_prefill = f"{row['of prefill %']:.1f}" if row["observe + compact s"] else ""
        rate = [f"{row['tokens/s']:.3g}", f"{row['spread %']:.0f}", f"{row['end to end s']:.3g}"]
        way = "full cache" if row["K, V"] == "full" else f"`{row['K, V']}`"
        yield [str(row["prompt"]), way, f"{row['kept %']:.3g}", *seconds, of_prefill, *rate]


def first_tokens(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield the TTFT with and without compression (`vlcache bench compression`)."""
    yield ["requests", "TTFT, median [ms]", "TTFT, minimum [ms]", "paired difference from the first line [ms]"]
    for row in rows:
        cells = [f"{row[name]:.3g}" for name in ("TTFT ms", "least ms")]
        yield [row["requests"], *cells, f"{row['in pairs ms']:+.2g}"]


def compressed_counted(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield counted decode steps with a tenth of the KV on an H200 (`python -m research.compression`)."""
    yield [
        "sequences", "prompt [tokens]", "step, full cache [ms]", "step, 10 % kept [ms]", "speedup of a step",
        "speedup of attention, lower bounds", "the same, chip model", "the same, chip model, uneven budgets",
    ]  # fmt: skip
    for row in rows:
        steps = [f"{row[name]:.2f}" for name in ("step ms", "compressed step ms")]
        names = ("step, times", "attention, times", "attention by model, times", "uneven budgets")
        yield [str(row["answers"]), str(row["tokens"]), *steps, *(f"{row[name]:.2f}" for name in names)]


def compressed_memory() -> Iterator[list[str]]:
    """Yield how many requests fit together by the memory plan (`python -m research.compression`)."""
    memory = _file("compression_h200_counted.json")["memory"]
    yield ["", "KV pool [GB]", "compressed KV pool [GB]", "a request [MB]", "requests that fit together"]
    for name, cells in {
        "full cache": ("pool GB", None, "MB of a request", "requests"),
        "10 % kept": (
            "pool of whole prompts GB", "pool of compressed GB", "MB of a compressed request", "compressed requests",
        ),
    }.items():  # fmt: skip
        whole, compressed, each, count = cells
        pools = [f"{memory[of]:.1f}" if of else "" for of in (whole, compressed)]
        yield [name, *pools, f"{memory[each]:.0f}", str(memory[count])]


def donor_kinds(rows: Sequence[Row], context: str = "text_first") -> Iterator[list[str]]:
    """Yield the change of accuracy from no reuse, and KL per token, by kind of donors (`research.donors`)."""
    kinds = list(dict.fromkeys(row["donors"] for row in rows if row["images"] == "several"))
    yield ["images", "`reuse`", *kinds]
    for images, name in itertools.product(COUNTS, DONOR_POLICIES):
        cells = _by_kind(rows, kinds, (context, images, name), lambda row: f"{interval(row)}; {row['KL']:.1e}")
        yield [COUNTS[images], f"`{name}`", *cells]


def donors_paired(rows: Sequence[Row], name: str = "approximate", context: str = "text_first") -> Iterator[list[str]]:
    """Yield the paired differences to neutral donors under a policy, with intervals (`research.donors`)."""
    kinds = list(dict.fromkeys(row["donors"] for row in rows if row["images"] == "several"))[1:]

    def distance(of: str, row: Row) -> str:
        mean, low, high = (f"{row[f'{of} over neutral{end}']:+.1e}" for end in ("", " low", " high"))
        return f"{mean} [{low}, {high}]"

    measures: dict[str, Callable[[Row], str]] = {"accuracy [points]": lambda row: interval(row, "over neutral ")}
    measures["logit MSE"] = functools.partial(distance, "MSE")
    yield ["images", "difference", *kinds]
    for images, (measure, text) in itertools.product(COUNTS, measures.items()):
        yield [COUNTS[images], measure, *_by_kind(rows, kinds, (context, images, name), text)]


def donor_cost(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield times to the first token and sizes of entries with neutral donors and any (`research.donor_cost`)."""
    yield ["images", "request", '`"any"` [ms]', '`"neutral"` [ms]', '`"any"` [MiB]', '`"neutral"` [MiB]']
    for row in rows:
        values = [f"{row[f'{rule} [{unit}]']}" for unit in ("ms", "MiB") for rule in ("any", "neutral")]
        yield [str(row["images"]), row["request"], *values]


def video_donors(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield distances to no reuse of videos by the context of their chunks (`research.video_donors`)."""
    yield ["chunks are linked from", *(f"`{name}`" for name in dict.fromkeys(row["reuse"] for row in rows))]
    for kind in dict.fromkeys(row["donors"] for row in rows):
        own = [row for row in rows if row["donors"] == kind]
        yield [kind, *(f"{row['MSE']:.2g} [{row['MSE low']:.2g}, {row['MSE high']:.2g}]" for row in own)]


LINK_CASES = list(itertools.product(("text_first", "question_first"), COUNTS))


# Settings that need no line: of these images 2.5 % are three tokens, and 5 % hardly more.
_LEFT_OUT = ("first 2.5 %", "first 5 %", "ends 5 %", "shift-first 2.5 %", "shift-ends 5 %", "all rows")
_LINKS_IN_SHORT = (
    "first 3 rows",
    "ends 10 %",
    "shift-first 3 rows",
    "shift-ends 10 %",
    "shift-ends 20 %",
    "schedule 10 %",
)


def hybrid_links(rows: Sequence[Row], settings: Collection[str] = ()) -> Iterator[list[str]]:
    """Yield the change of accuracy from no reuse, and KL per token, by setting (`research.hybrid_links`).

    Args:
      settings: Names of settings; empty: all that need a line.
    """
    own = {
        (row["setting"], row["context"], row["images"]): row
        for row in rows
        if row["donors"] == "neutral" and "maps" not in row["setting"]
    }
    titles = {"text_first": "other text", "question_first": "a question"}
    yield ["setting", *(f"{COUNTS[images]}, {titles[context]} before" for context, images in LINK_CASES)]
    for name in settings or [name for name in dict.fromkeys(name for name, *_ in own) if name not in _LEFT_OUT]:
        found = [own[name, *case] for case in LINK_CASES]
        yield [name, *(f"{interval(row)}; {row['KL']:.1e}" for row in found)]


def hybrid_donors(rows: Sequence[Row], context: str = "text_first") -> Iterator[list[str]]:
    """Yield the change of accuracy for two images by kind of donors (`research.hybrid_links`)."""
    kinds = list(dict.fromkeys(row["donors"] for row in rows))
    own = {
        (row["setting"], row["donors"]): row for row in rows if (row["context"], row["images"]) == (context, "several")
    }
    yield ["setting", *kinds]
    for name in dict.fromkeys(name for name, _ in own):
        yield [name, *(f"{interval(own[name, kind])}; {own[name, kind]['KL']:.1e}" for kind in kinds)]


def hybrid_maps(rows: Sequence[Row], context: str = "text_first") -> Iterator[list[str]]:
    """Yield distances to no reuse for two images by the form of maps (`research.hybrid_links`)."""
    yield ["maps", "accuracy to no reuse [points]", "logit MSE", "KL"]
    for row in rows:
        if "maps" in row["setting"] and (row["context"], row["images"]) == (context, "several"):
            name = row["setting"].partition(", maps in ")[2]
            yield [name, interval(row), f"{row['MSE']:.2e}", f"{row['KL']:.2e}"]


def hybrid_goal(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield the change of accuracy, and the lowest end of the intervals of the tasks (`research.hybrid_links`)."""
    titles = {"text_first": "other text", "question_first": "a question"}
    yield [
        "setting",
        "before the images",
        "images",
        "questions",
        "no reuse [%]",
        "change [points]",
        "lowest end of a task",
    ]
    for row in rows:
        cells = (
            str(row["questions"]),
            f"{row['cold']:.1f}",
            interval(row),
            f"{row['worst task']} {row['worst low']:+.1f}",
        )
        yield [row["setting"], titles[row["context"]], COUNTS[row["images"]], *cells]


def hybrid_norms(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield the mean norms of the images' A by linear layer and head (`research.hybrid_links`)."""
    heads = list(dict.fromkeys(row["head"] for row in rows))
    yield ["layer", *(f"head {head}" for head in heads)]
    for layer in dict.fromkeys(row["layer"] for row in rows):
        yield [str(layer), *(f"{row['norm of A']:.2f}" for row in rows if row["layer"] == layer)]


def _by_kind(
    rows: Sequence[Row], kinds: Sequence[str], case: tuple[str, str, str], text: Callable[[Row], str]
) -> list[str]:
    """Return a cell for each kind of donors of a context, number of images and policy."""
    own = {row["donors"]: row for row in rows if (row["context"], row["images"], row["reuse"]) == case}
    return [text(own[kind]) if kind in own else "" for kind in kinds]


def poisoning(context: str = "text_first") -> Iterator[list[str]]:
    """Yield answers from natural donors, after attacks, and under the rule, by policy (`research.poisoning`).

    The last line of each number of images is from the search under that policy.
    """
    found = [(name, f"`{name}`", _rows("poisoning.json")) for name in DONOR_POLICIES]
    found.append(("approximate", "`approximate`, searched under it", _rows("poisoning_approximate.json")))
    kinds = [kind for kind in dict.fromkeys(row["donors"] for row in found[0][2]) if kind != "neutral"]
    yield ["images", "`reuse`", *kinds]
    for images, (name, title, own) in itertools.product(COUNTS, found):
        yield [COUNTS[images], title, *_by_kind(own, kinds, (context, images, name), _attacked)]


def _attacked(row: Row) -> str:
    return f"{row['mean KL']:.1e}, {row['max KL']:.1e}; {row['changed']}; {row['accuracy']:.0f} %"


def found_prefix(policy: str, prefixes: int) -> str:
    """Return the best KL after a number of prefixes of the search under a policy (`research.poisoning`)."""
    name = {"full": "poisoning.json", "approximate": "poisoning_approximate.json"}[policy]
    [row] = [row for row in _file(name)["search"] if row["prefixes"] == prefixes]
    return f"{row['best KL']:.1e}"


def markdown(lines: Iterator[list[str]]) -> str:
    """Return a Markdown table, with its first line as the head."""
    head, *rest = lines
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rest)) + "\n"


def _of(make: Callable[[Sequence[Row]], Iterator[list[str]]], name: str, part: str = "rows") -> Iterator[list[str]]:
    """Yield the table of a file's rows, or of another part of it; a note if there is no such file yet."""
    return make(_file(name)[part]) if (RESULTS / name).exists() else iter([["not measured yet"]])


def _compared(rows: Sequence[Row]) -> Iterator[list[str]]:
    return goals(rows, COMPARED)


def _overview(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield the first table of the study: few settings, and columns that fit on a page."""
    found = losses([row for row in rows if row["reuse"] in OVERVIEW], (*CASES[:3], *CASES[4:]))
    return ([name, *cells] for name, _, *cells in found)


# The lines of each table, the first one its head.
TABLES: dict[str, Callable[[], Iterator[list[str]]]] = {
    "inside": inside,
    "gains": gains,
    "lengths": lengths,
    "codecs": codecs,
    "ttft": functools.partial(_of, ttft, "ttft_cpu.json"),
    "ttft first": functools.partial(_of, functools.partial(ttft_first, tuple(MODES)), "ttft_cpu.json"),
    "gpu first": functools.partial(_of, functools.partial(ttft_first, tuple(MODES)), "ttft_h200.json"),
    "ttft bfloat16": functools.partial(_of, ttft, "ttft_bf16_cpu.json"),
    "ttft shipped": functools.partial(_of, ttft, "ttft_tiny_vqa_cpu.json"),
    "ttft 8b": functools.partial(_of, ttft, "ttft_8b_cpu.json"),
    "ttft hybrid": functools.partial(_of, ttft_hybrid, "ttft_hybrid_cpu.json"),
    "hybrid floors": functools.partial(_of, hybrid_floors, "floor.json"),
    "ttft sizes": functools.partial(_of, ttft_sizes, "ttft_sizes_cpu.json"),
    "shares": functools.partial(_of, shares, "shares_cpu.json"),
    "host": functools.partial(_of, host, "host.json"),
    "launched": functools.partial(_of, launched, "launched_cpu.json"),
    "prefill": functools.partial(_of, prefill, "prefill_cpu.json"),
    "architectures": architectures,
    "dialogue": functools.partial(_of, dialogue, "dialogue_cpu.json"),
    "dialogue vllm": functools.partial(_of, dialogue_vllm, "dialogue_vllm_cpu.json"),
    "agreement": functools.partial(_of, agreement, "peer_cpu.json", "agreement"),
    "peer first": peer_first,
    "peer ratios": functools.partial(_of, peer_ratios, "peer_cpu.json"),
    "peer amx": functools.partial(_of, peer_amx, "peer_amx_cpu.json"),
    "peer float32": functools.partial(_of, functools.partial(peer, "float32"), "peer_cpu.json"),
    "peer bfloat16": functools.partial(_of, functools.partial(peer, "bfloat16"), "peer_cpu.json"),
    "stores": functools.partial(_of, stores, "stores_cpu.json"),
    "throughput": variants,
    "policies": functools.partial(_of, policies, "serve_policies_cpu.json"),
    "policies first": functools.partial(_of, policies_first, "serve_policies_cpu.json"),
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
    "gpu first tokens": functools.partial(_of, functools.partial(ttft_first, None), "ttft_h200.json"),
    "budgets": functools.partial(_of, budgets, "budgets_tiny_vqa.json"),
    "budgets p": functools.partial(_of, budgets, "budgets_tiny_vqa_p.json"),
    "budgets ahead": functools.partial(_of, ahead, "budgets_tiny_vqa.json"),
    "budgets by task": functools.partial(_of, by_task, "budgets_tiny_vqa.json"),
    "sparsity": functools.partial(sparse, "sparsity_tiny_vqa.json"),
    "budgets inside": functools.partial(looked_at, "budgets_tiny_vqa.json"),
    "budgets long": functools.partial(_of, budgets, "budgets_long.json"),
    "budgets long ahead": functools.partial(_of, ahead, "budgets_long.json"),
    "budgets long by task": functools.partial(_of, by_task, "budgets_long.json"),
    "budgets long by task tenth": functools.partial(_of, functools.partial(by_task, share=10), "budgets_long.json"),
    "held out": functools.partial(_of, held_out, "tiny_vqa_long/held_out.json"),
    "budgets overview": budget_overview,
    "compression overview": functools.partial(_of, compression_overview, "compression_cpu.json"),
    "losses overview": functools.partial(_of, _overview, "study_unnumbered_small.json"),
    "donors": functools.partial(_of, donor_kinds, "donors_study.json"),
    "donor cost": functools.partial(_of, donor_cost, "donor_cost_cpu.json"),
    "video donors": functools.partial(_of, video_donors, "video_donors.json"),
    "donors paired": functools.partial(_of, donors_paired, "donors_study.json"),
    "poisoning": poisoning,
    "hybrid links": functools.partial(_of, hybrid_links, "hybrid_links.json"),
    "full links": functools.partial(
        _of, functools.partial(hybrid_links, settings=_LINKS_IN_SHORT), "hybrid_links_full.json"
    ),
    "hybrid goal": functools.partial(_of, hybrid_goal, "hybrid_links_goal.json"),
    "hybrid donors": functools.partial(_of, hybrid_donors, "hybrid_links_donors.json"),
    "hybrid maps": functools.partial(_of, hybrid_maps, "hybrid_links.json"),
    "hybrid norms": functools.partial(_of, hybrid_norms, "hybrid_links.json", "norms"),
    "goal": lambda: goals([row for name in GOALS for row in _rows(name)], (APPROXIMATE,), digits=2),
}
for _model in MODELS:
    TABLES[f"choice {_model}"] = functools.partial(_of, choice, f"choice_{_model}.json")
    for _size, (_name, _make) in itertools.product(
        SIZES, {"losses": losses, "goals": _compared, "answers": answers, "cold": cold}.items()
    ):
        TABLES[f"{_name} {_model} {_size}"] = functools.partial(_of, _make, f"study_{_model}_{_size}.json")


def _log(run: str) -> dict[str, Any]:
    """Return the last line of a training log."""
    line: dict[str, Any] = json.loads((RESULTS / run / "log.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    return line


def _apart(reused: bool) -> str:
    """Return the accuracy for two images cached separately, another question before them, in the largest sample."""
    case = ("question_first", "apart", "several")
    [row] = [row for row in _rows("goal_question_first.json") if _case(row) == case and row["reuse"] == APPROXIMATE]
    return f"{row['mean'] - (0 if reused else row['difference']):.2f}"


# Figures within a line.
FIGURES: dict[str, Callable[[], str]] = {
    "refusals": slowest_refusal,
    "large bodies health": slowest_health,
    "budgets questions": lambda: str(_rows("budgets_tiny_vqa.json")[0]["questions"]),
    "budgets lengths": functools.partial(budget_lengths, "budgets_tiny_vqa.json"),
    "budgets long questions": lambda: str(_rows("budgets_long.json")[0]["questions"]),
    "budgets long lengths": functools.partial(budget_lengths, "budgets_long.json"),
    "long steps": lambda: str(_log("tiny_vqa_long")["step"]),
    "long hours": lambda: f"{_log('tiny_vqa_long')['processor_seconds'] / 3600:.1f}",
    "torch float32": functools.partial(torch_speed, "float32"),
    "torch bfloat16": functools.partial(torch_speed, "bfloat16"),
    "apart cold": functools.partial(_apart, False),
    "apart approximate": functools.partial(_apart, True),
}
for _policy, _prefixes in itertools.product(("full", "approximate"), (100, 200)):
    FIGURES[f"poisoning {_policy} {_prefixes}"] = functools.partial(found_prefix, _policy, _prefixes)
for _part in ("choose", "parse", "hash"):
    FIGURES[f"router {_part}"] = functools.partial(router_time, _part)
for _dtype in DTYPES:
    FIGURES[f"vllm amx cold {_dtype}"] = functools.partial(peer_amx_speed, _dtype, "cold")
    for _engine in _ENGINES:
        FIGURES[f"agreement {_engine} {_dtype}"] = functools.partial(agreed, _engine, _dtype)


def rewrite(text: str) -> str:
    """Return a page with its tables and figures rewritten from the files.

    Raises:
      ValueError: There is no such table, or figure.
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
