"""Evaluation splits as files of VLMEvalKit: `python -m vlcache_jax.benchmarks.tiny_vqa.splits --out FOLDER`."""

from __future__ import annotations

import argparse
import base64
import csv
import dataclasses
import io
import pathlib
import tempfile
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image

from vlcache_jax.benchmarks.tiny_vqa.pictures import Picture, Size, draw_pictures, render
from vlcache_jax.benchmarks.tiny_vqa.tasks import RELATED, TASKS, ask
from vlcache_jax.common.checks import check_whole
from vlcache_jax.study.questions import Sample, first, read_tsv

QUESTIONS = 1000  # of a task
# Sizes of the images in questions, each equally often: of 64 to 144 tokens, and of 400, the maximum in training; and
# small ones with the tints that `transfer` needs.
_SMALL = (Size(4, 4), Size(4, 5), Size(5, 4), Size(5, 5), Size(4, 4, 48))
SIZES = {
    "small": _SMALL,
    "large": (Size(5, 5, 64),),
    "tinted": tuple(dataclasses.replace(size, is_tinted=True) for size in _SMALL),
}
PLAIN = ("small", "large")
_IMAGES = {"grid": (1, 2), "list": (1, 2), "count": (1, 2)}  # other tasks need two


def write_splits(
    folder: pathlib.Path,
    *,
    questions: int = QUESTIONS,
    split: str = "test",
    images: int | None = None,
    size: str = "small",
    tasks: Mapping[str, Sequence[str]] = TASKS,
) -> list[pathlib.Path]:
    """Write one file for each task; equal names and numbers give equal files.

    Args:
      folder: It is created if it does not exist.
      questions: Number of questions of each task.
      split: Name of the split; each has its own images, and none has those of training.
      images: Images of each question; tasks that need more have no file. None is one or two, as the task allows.
      size: Size of the images, a name of `SIZES`.
      tasks: Kinds of questions by task.

    Raises:
      ValueError: `images` is not a positive integer, or there is no such size.
    """
    check_whole("images", images, 1, or_none=True)
    if size not in SIZES:
        raise ValueError(f"size must be {' or '.join(SIZES)}, got {size!r}")
    choices = SIZES[size]
    name = split if size == "small" else f"{size}_{split}"
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for task, kinds in tasks.items():
        possible = _IMAGES.get(task, (2,))
        counts = possible if images is None else (images,)
        if counts[0] < possible[0]:
            continue
        rng = np.random.default_rng([zlib.crc32(f"{name} {task}".encode()), 2026])
        path = folder / f"tiny_{task}_{name}.tsv"
        with open(path, "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, delimiter="\t", lineterminator="\n")
            writer.writerow(["index", "category", "question", "answer", "image"])
            for index in range(questions):
                question = None
                while question is None:
                    count = counts[int(rng.integers(len(counts)))]
                    sizes = [choices[i] for i in rng.integers(len(choices), size=count)]
                    pictures = draw_pictures(rng, sizes)
                    question = ask(rng, pictures, kinds)
                files = [base64.b64encode(png(picture)).decode() for picture in pictures]
                cell = files[0] if len(files) == 1 else str(files)
                writer.writerow([index, task, question.text, question.answer, cell])
        paths.append(path)
    return paths


def load_samples(
    data: Sequence[pathlib.Path],
    *,
    questions: int | None = None,
    split: str = "test",
    images: int | None = None,
    size: str = "small",
) -> list[Sample]:
    """Return samples of files, at most `questions` of each; without files, of splits drawn for the trained models.

    Args:
      data: Files of VLMEvalKit.
      questions: Maximum number of samples of each file.
      split, images, size: See `write_splits`.
    """
    if data:
        return [sample for path in data for sample in first(read_tsv(path), questions)]
    with tempfile.TemporaryDirectory(prefix="vlcache-splits-") as folder:
        paths = write_splits(
            pathlib.Path(folder), questions=questions or QUESTIONS, split=split, images=images, size=size
        )
        return [dataclasses.replace(sample, related=RELATED) for path in paths for sample in read_tsv(path)]


def png(picture: Picture) -> bytes:
    """Return the image as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(render(picture)).save(file, "PNG")
    return file.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--questions", type=int, default=QUESTIONS)
    parser.add_argument("--split", default="test")
    parser.add_argument("--images", type=int, help="images of each question; by default one or two, as the task allows")
    parser.add_argument("--size", choices=list(SIZES), default="small", help="size of the images")
    args = parser.parse_args()
    paths = write_splits(args.out, questions=args.questions, split=args.split, images=args.images, size=args.size)
    for path in paths:
        print(path)


if __name__ == "__main__":
    main()
