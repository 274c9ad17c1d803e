"""Learning curves of runs: `python -m research.tiny_vqa.curve RUN... --out FILE`."""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib

import numpy as np

from vlcache_jax.benchmarks.tiny_vqa.tasks import TASKS
from vlcache_jax.study.report import figures, save_figure


def draw(runs: list[pathlib.Path], out: pathlib.Path) -> None:
    """Draw one panel per run: accuracy in training by task, on held-out prompts, and the changes of stages."""
    pyplot = figures()
    figure, axes = pyplot.subplots(1, len(runs), figsize=(5.5 * len(runs), 3.6), squeeze=False, sharey=True)
    for axis, run in zip(axes[0], runs, strict=True):
        lines = [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]
        for task, kinds in TASKS.items():
            means = [
                np.mean([line["right"][kind] for kind in kinds if kind in line["right"]] or [np.nan]) for line in lines
            ]
            axis.plot([line["step"] for line in lines], 100 * np.array(means), label=task, linewidth=1)
        held_out = [line for line in lines if "held_out" in line]
        for images in held_out[-1]["held_out"] if held_out else ():
            sums = [np.sum(list(line["held_out"][images].values()), axis=0) for line in held_out]
            shares = [100 * right / asked for right, asked in sums]
            axis.plot(
                [line["step"] for line in held_out], shares, "o-", label=f"held out, {images} images", markersize=3
            )
        for before, after in itertools.pairwise(lines):
            if after["stage"] != before["stage"]:
                axis.axvline(after["step"], color="gray", linewidth=0.5)
        axis.set_title(f"{run.name}, {lines[-1]['seconds'] / 3600:.1f} h")
        axis.set_xlabel("step")
    axes[0, 0].set_ylabel("accuracy [%]")
    axes[0, 0].legend(fontsize=8)
    figure.tight_layout()
    save_figure(figure, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=pathlib.Path, nargs="+", help="folders of runs")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="chart to write")
    args = parser.parse_args()
    draw(args.runs, args.out)


if __name__ == "__main__":
    main()
