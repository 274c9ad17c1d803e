"""Charts of the documentation, redrawn from their results: `python -m research.charts [NAME ...]`."""

from __future__ import annotations

import functools
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from research import hybrid_links, mpic
from vlcache_jax.benchmarks import serving, ttft_table

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TTFT_TITLE = "Time to first token of a prompt with four cached images (4096 image tokens), two CPU cores"

Row = dict[str, Any]


def draw_modes(content: dict[str, Any], picture: pathlib.Path, title: str) -> None:
    """Draw one bar for each mode of `ttft_table.MODES`, without the rows of other tiers than host memory.

    Args:
      content: a result file of `vlcache bench ttft`.
      picture: the file to write.
      title: the title of the chart.
    """
    found = {row["configuration"]: row for row in content["rows"] if row["K, V in"] in ("-", "host")}
    ttft_table.draw([found[name] for name in ttft_table.MODES], content, picture, title)


def _draw_rows(
    draw: Callable[[Sequence[Row], pathlib.Path], None], content: dict[str, Any], path: pathlib.Path
) -> None:
    draw(content["rows"], path)


# The result file, and the function that draws it.
CHARTS: dict[str, tuple[str, Callable[[dict[str, Any], pathlib.Path], None]]] = {
    "docs/ttft.png": ("ttft_cpu.json", functools.partial(draw_modes, title=TTFT_TITLE)),
    "docs/hybrid_links.png": ("hybrid_links.json", functools.partial(_draw_rows, hybrid_links.draw)),
    "benchmarks/results/ttft_h200.png": (
        "ttft_h200.json",
        functools.partial(
            draw_modes, title="Time to first token of a prompt with one cached image (4096 tokens), H200"
        ),
    ),
    "benchmarks/results/serve_policies_cpu.png": (
        "serve_policies_cpu.json",
        functools.partial(_draw_rows, serving.draw),
    ),
    "benchmarks/results/mpic_online_cpu.png": ("mpic_online_cpu.json", functools.partial(_draw_rows, serving.draw)),
    "benchmarks/results/mpic_cpu.png": ("mpic_cpu.json", functools.partial(_draw_rows, mpic.draw)),
    "benchmarks/results/mpic_tiny_vqa.png": ("mpic_tiny_vqa.json", functools.partial(_draw_rows, mpic.draw)),
}


def main(names: Sequence[str]) -> None:
    """Draw the named charts; without names all of them.

    Raises:
      ValueError: a name is not one of `CHARTS`.
    """
    for name in names or CHARTS:
        if name not in CHARTS:
            raise ValueError(f"chart must be one of {', '.join(CHARTS)}, got {name}")
        file, draw = CHARTS[name]
        draw(json.loads((RESULTS / file).read_text(encoding="utf-8")), ROOT / name)
        print(f"written to {name}")


if __name__ == "__main__":
    main(sys.argv[1:])
