"""Accuracy of a run of `long` on held-out prompts: `python -m research.tiny_vqa.held_out RUN`.

With `--questions FOLDER` evaluation splits of such prompts are written, in the format of the study's commands.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

import torch

from research.tiny_vqa.long import ALL_TASKS, MEDIUM, Trainer
from vlcache_jax.benchmarks.tiny_vqa.splits import SIZES, write_splits
from vlcache_jax.study.report import show

SMALL = SIZES["small"]
# Images of a prompt, and their sizes: about 100 tokens each, and 180.
PROMPTS = ((2, SMALL), (4, SMALL), (8, SMALL), (12, SMALL), (16, SMALL), (8, MEDIUM), (16, MEDIUM))


def measure(run: pathlib.Path, prompts: int) -> list[dict[str, Any]]:
    """Return the accuracy in %, by task, a row for each number and size of images."""
    trainer = Trainer(run, seed=0, learning_rate=0.0)
    rows = []
    for images, sizes in PROMPTS:
        found = trainer.held_out(images, prompts, sizes)
        tokens = round(images * sum(size.tokens for size in sizes) / len(sizes))
        right, asked = (sum(column) for column in zip(*found.values(), strict=True))
        by_task = {task: round(100 * found[task][0] / found[task][1], 1) for task in ALL_TASKS if task in found}
        rows.append(
            {"images": images, "image tokens": tokens, **by_task, "all": round(100 * right / asked, 1), "asked": asked}
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=pathlib.Path, help="folder of the run")
    parser.add_argument(
        "--prompts", type=int, default=12, help="prompts of each number of images, with at least 32 questions each"
    )
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    parser.add_argument("--questions", type=pathlib.Path, help="folder for evaluation splits; writes them and exits")
    parser.add_argument("--images", type=int, default=16, help="images of a prompt of the splits")
    parser.add_argument("--count", type=int, default=50, help="questions of each task of the splits")
    args = parser.parse_args()
    if args.questions is not None:
        for path in write_splits(args.questions, questions=args.count, images=args.images, tasks=ALL_TASKS):
            print(path)
        return
    torch.set_flush_denormal(True)
    trained = measure(args.run, args.prompts)
    show("Right answers of 100, the whole prompt seen", trained)
    if args.out is not None:
        args.out.write_text(json.dumps(trained, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
