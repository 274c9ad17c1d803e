"""The table of `vlcache bench ttft`, with a row for each way to the first token, and its chart."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vlcache_jax.benchmarks.floor import DeviceRates, Floor
from vlcache_jax.outputs import RequestMetrics
from vlcache_jax.study.report import figures, save_figure, show, write

TITLE = "Time to the first token"
STEPS = ("lookup", "decode_image", "preprocess", "encode", "transfer", "link", "prefill", "first_token")
TIMES = ("TTFT ms", "spread ms", "over cold", "over encoder cached", "floor ms", "times floor", "TTFT minus compute %")
COUNTS = ("tokens reused", "rows a layer", "pairs a layer", "MB moved", "GFLOP", "GFLOP/s of cold")
COLD, ENCODER_CACHED = "cold", "encoder cached"
# The public mode "approximate", and that of models with states.
SHIFT, SHIFT_ENDS = "shift, r = 0.03", "shift-ends, r = 0.2"
MODES = {COLD: "no reuse", ENCODER_CACHED: '"exact"', SHIFT: '"approximate"', "r = 0": '"full"'}
"""The public name of each configuration that README compares."""


def mode(configuration: str) -> str:
    """Return the public name of a configuration: its value of `reuse=`, `schedule` or `no reuse`.

    Tables and charts show it; results keep the name of the configuration.
    """
    ratio = re.fullmatch(r"r = ([\d.]+)", configuration)
    schedule = re.fullmatch(r"schedule, mean ([\d.]+)", configuration)
    if configuration == SHIFT_ENDS:
        return MODES[SHIFT]
    if configuration in MODES:
        return MODES[configuration]
    if schedule:
        return f"schedule (mean {100 * float(schedule[1]):.3g} %)"
    return ratio[1] if ratio else configuration


@dataclasses.dataclass(frozen=True)
class MeasuredCase:
    """A measured way to the first token.

    Attributes:
      images, tokens: Images of the prompt, and tokens of each image.
      configuration: Name of the configuration.
      place, codec: Tier and codec of its stored KV; "-" if it used none.
      metrics: Metrics of each run.
      reused: Tokens that the last layer did not compute.
      rows: Tokens computed in each layer `[L]`.
      pairs: Pairs of a query and a key that it sees, in each layer `[L]`.
      moved: Bytes of cache entries read from disk or copied to the device.
      floor: Lower bound, by the rates of the device.
    """

    images: int
    tokens: int
    configuration: str
    place: str
    codec: str
    metrics: tuple[RequestMetrics, ...]
    reused: int
    rows: tuple[int, ...]
    pairs: tuple[int, ...]
    moved: int
    floor: Callable[[DeviceRates], Floor]

    @property
    def image_tokens(self) -> int:
        return self.images * self.tokens

    @property
    def ttft(self) -> float:
        """Median seconds to the first token."""
        return self.median("ttft")

    def median(self, step: str) -> float:
        """Return the median seconds of a step."""
        return statistics.median(getattr(one, step) for one in self.metrics)

    def row(self, cold: MeasuredCase, encoder_cached: MeasuredCase, rates: DeviceRates) -> dict[str, Any]:
        """Return a row of the table; the baselines are of the same prompts."""
        took = [one.ttft for one in self.metrics]
        least = self.floor(rates)
        rate, cold_rate = (case.floor(rates).operations / case.ttft for case in (self, cold))
        computing = self.median("encode") + self.median("prefill")
        return {
            "image tokens": self.image_tokens,
            "images": self.images,
            "configuration": self.configuration,
            "K, V in": self.place,
            "codec": self.codec,
            "TTFT ms": 1000 * self.ttft,
            "spread ms": 1000 * (max(took) - min(took)),
            "over cold": cold.ttft / self.ttft,
            "over encoder cached": encoder_cached.ttft / self.ttft,
            **{f"{step} ms": 1000 * self.median(step) for step in STEPS},
            "tokens reused": self.reused,
            "rows a layer": statistics.fmean(self.rows),
            "pairs a layer": statistics.fmean(self.pairs),
            "MB moved": self.moved / 1e6,
            "floor ms": 1000 * least.seconds,
            "times floor": self.ttft / least.seconds,
            "GFLOP": least.operations / 1e9,
            "GFLOP/s of cold": rate / cold_rate,
            "TTFT minus compute %": 100 * (self.ttft - computing) / self.ttft,
        }


def make_rows(cases: Sequence[MeasuredCase], rates: DeviceRates) -> list[dict[str, Any]]:
    """Return a row for each case: all of a number of image tokens, then those of the next.

    Raises:
      KeyError: A number of image tokens has no baseline.
    """
    baselines = {(case.image_tokens, case.configuration): case for case in cases}
    return [
        case.row(baselines[case.image_tokens, COLD], baselines[case.image_tokens, ENCODER_CACHED], rates)
        for case in sorted(cases, key=lambda case: case.image_tokens)
    ]


def publish(
    rows: list[dict[str, Any]], head: dict[str, Any], out: pathlib.Path | None, picture: pathlib.Path | None
) -> None:
    """Print the table in parts; write and draw it if `out` and `picture` are given."""
    names = ("image tokens", "configuration", "K, V in", "codec")
    steps = [f"{step} ms" for step in STEPS]
    parts = {
        f"{TITLE}: {head['model']}, {head['dtype']}, {head['prompt']}": TIMES,
        "What is computed": COUNTS,
        "Steps": steps,
    }
    for title, columns in parts.items():
        public = [row | {"configuration": mode(row["configuration"])} for row in rows]
        show(title, [{name: row[name] for name in (*names, *columns)} for row in public])
    if "left out" in head:
        print(f"\nnot measured: {head['left out']}")
    if out is not None:
        write(TITLE, rows, head, out)
    if picture is not None:
        draw(rows, head, picture)
        print(f"written to {picture}")


def draw(rows: Sequence[dict[str, Any]], head: dict[str, Any], picture: pathlib.Path, title: str | None = None) -> None:
    """Draw the rows as stacked bars of their steps, with one panel for each number of image tokens.

    Args:
      rows: rows of the table.
      head: the head of a result file; its model, dtype and prompt are the title unless `title` is given.
      picture: the file to write.
      title: the title of the chart.
    """
    pyplot = figures()
    sizes = sorted({row["image tokens"] for row in rows})
    shown = [step for step in STEPS if any(row[f"{step} ms"] > 0.01 * row["TTFT ms"] for row in rows)]
    height = 0.4 * len(rows) + 0.8 * len(sizes) + 0.8
    figure, all_axes = pyplot.subplots(len(sizes), squeeze=False, figsize=(9, height), layout="constrained")
    for size, axes in zip(sizes, all_axes[:, 0], strict=True):
        _draw_bars(axes, [row for row in rows if row["image tokens"] == size], shown)
        axes.set_ylabel(f"{size} image tokens", fontsize="small")
    all_axes[-1, 0].set_xlabel("time to first token [s]")
    figure.suptitle(title or f"{head['model']}, {head['dtype']}\n{head['prompt']}", fontsize="medium")
    all_axes[-1, 0].legend(ncols=2, fontsize="small", loc="lower right")
    save_figure(figure, picture)


def _draw_bars(axes: Any, rows: Sequence[dict[str, Any]], shown: Sequence[str]) -> None:
    places = {(row["K, V in"], row["codec"]) for row in rows if row["codec"] != "-"}
    apart = len(places) > 1  # a name alone does not identify a row
    names = [
        f"{mode(row['configuration'])}, {row['K, V in']}, {row['codec']}" if apart and row["codec"] != "-"
        else mode(row["configuration"])
        for row in rows
    ]  # fmt: skip
    end = np.array([row["TTFT ms"] / 1000 for row in rows])
    begin = np.zeros(len(rows))
    for step in shown:
        seconds = np.array([row[f"{step} ms"] / 1000 for row in rows])
        axes.barh(names, seconds, left=begin, label=step.replace("_", " "))
        begin += seconds
    axes.barh(names, np.maximum(end - begin, 0), left=begin, label="rest", color="lightgray")
    for row, name, seconds in zip(rows, names, end, strict=True):
        axes.text(seconds, name, f" {seconds:.2g} s, {row['over cold']:.2g}x", va="center")
    axes.invert_yaxis()
    axes.set_xlim(right=1.15 * end.max())
