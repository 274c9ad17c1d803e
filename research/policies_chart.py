"""Chart of accuracy against recomputed tokens from a study of policies: `python -m research.policies_chart`.

It shows one case: two images that were cached separately, and new text before them.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Sequence
from typing import Any

from research.published import RESULTS
from vlcache_jax.reuse.selection import APPROXIMATE
from vlcache_jax.study.accuracy import COLD
from vlcache_jax.study.report import figures, save_figure

STUDY = "study_unnumbered_small.json"
CASE = {"arrangement": "text_first", "donors": "apart", "images": "several"}
# The settings of each line of the chart.
FAMILIES = {
    "first tokens (VLCache, static ratio)": r"full|0\.\d{1,2}",
    "mpic": r"mpic-\d+",
    "epic": r"epic-\d+",
    "spread": r"spread-0\.\d{1,2}",
    "cacheblend": r"cacheblend-0\.\d{1,2}",
    "shift": r"shift-0\.\d{1,2}",
}


def points(rows: Sequence[dict[str, Any]], pattern: str) -> list[tuple[float, float]]:
    """Return tokens x layers and accuracy of the settings whose names match, both in percent, in rising order."""
    own = [row for row in rows if all(row[name] == value for name, value in CASE.items())]
    found = {(row["rows x layers %"], row["mean"]) for row in own if re.fullmatch(pattern, row["reuse"])}
    return sorted(found)


def draw(rows: Sequence[dict[str, Any]], path: pathlib.Path) -> None:
    """Draw a line for each family of policies, and a mark for each reuse mode."""
    pyplot = figures()
    figure, axes = pyplot.subplots(figsize=(7.5, 4.2))
    for name, pattern in FAMILIES.items():
        look: dict[str, Any] = {"color": "gray"} if "ratio" in name else {}
        axes.plot(*zip(*points(rows, pattern), strict=True), "o-", markersize=4, linewidth=1, label=name, **look)
    modes = {'"approximate"': (APPROXIMATE, "*"), '"full"': ("full", "X"), "no reuse": (COLD, "s")}
    for name, (setting, marker) in modes.items():
        [(x, y)] = points(rows, re.escape(setting))
        axes.plot(x, y, marker, color="black", markersize=10)
        shift = (-8, -16) if x > 90 else (-8, -24)
        axes.annotate(name, (x, y), xytext=shift, textcoords="offset points", ha="right" if x > 90 else "left")
    axes.set(xlabel="recomputed tokens x layers [%]", ylabel="accuracy [%], mean of tasks", ylim=(0, 104))
    axes.set_title("tiny-vqa: two images cached separately, new text before them", fontsize="medium")
    axes.legend(fontsize=8, loc="center right")
    figure.tight_layout()
    save_figure(figure, path)


def main() -> None:
    rows = json.loads((RESULTS / STUDY).read_text(encoding="utf-8"))["rows"]
    draw(rows, (RESULTS / STUDY).with_suffix(".png"))


if __name__ == "__main__":
    main()
