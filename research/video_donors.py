"""Distance of linked videos to no reuse, by the context of their chunks (`python -m research.video_donors`).

A chunk of a video always has the chunks before it in its context. Three contexts are compared: the whole video at the
beginning of a conversation, each chunk alone there, and the whole video after other text. The shipped model was not
trained on videos, so only logits are compared. A video shows four images of its questions, one in each chunk.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
import typer
from PIL import Image

from research.donors import mean_interval
from vlcache_jax.assets import TINY_VQA
from vlcache_jax.benchmarks.tiny_vqa.splits import load_samples
from vlcache_jax.commands import options as opt
from vlcache_jax.common.files import check_writable
from vlcache_jax.common.progress import Progress, say_errors
from vlcache_jax.study.accuracy import OTHER_TEXTS
from vlcache_jax.study.questions import Sample
from vlcache_jax.study.report import environment, show, write

if TYPE_CHECKING:
    from vlcache_jax.llm import LLM

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
WHOLE, APART, AFTER_TEXT = "whole video", "each chunk alone", "whole video after text"
KINDS = (WHOLE, APART, AFTER_TEXT)
SETTINGS = ("full", "approximate", "0.1")
CHUNKS = 4
_REPEATED = 2  # frames of a chunk

Frame = npt.NDArray[np.uint8]


def conversation(frames: Sequence[Frame], before: str = "", question: str = "") -> list[dict[str, Any]]:
    """Return a conversation with a video that shows each image for one chunk.

    Args:
      frames: the images, uint8 [H, W, 3].
      before, question: texts before and after the video; empty: none.
    """
    height, width, _ = frames[0].shape
    video = {
        "type": "video", "video": [frame for frame in frames for _ in range(_REPEATED)],
        "video_metadata": {"fps": 2.0}, "resized_height": height, "resized_width": width,
    }  # fmt: skip
    texts = [[{"type": "text", "text": text}] if text else [] for text in (before, question)]
    return [{"role": "user", "content": [*texts[0], video, *texts[1]]}]


def frames_of(samples: Sequence[Sample]) -> list[Frame]:
    """Return the first images of questions, in the size of the first one."""
    opened = [Image.open(io.BytesIO(sample.images[0])).convert("RGB") for sample in samples]
    return [np.asarray(image.resize(opened[0].size)) for image in opened]


def donors_of(kind: str, frames: Sequence[Frame], number: int) -> list[list[dict[str, Any]]]:
    """Return the conversations that cache the chunks of a video in contexts of a kind."""
    if kind == APART:
        return [conversation([frame]) for frame in frames]
    return [conversation(frames, OTHER_TEXTS[(number + 1) % len(OTHER_TEXTS)] if kind == AFTER_TEXT else "")]


def measure(llm: LLM, samples: Sequence[Sample]) -> dict[tuple[str, str], list[float]]:
    """Return the mean squared error of the logits of each video's answer, by kind and setting.

    Raises:
      ValueError: a chunk was not linked from another context.
    """
    from vlcache_jax import SamplingParams

    errors: dict[tuple[str, str], list[float]] = {(kind, name): [] for kind in KINDS for name in SETTINGS}
    greedy, groups = SamplingParams(temperature=0, max_tokens=8), range(0, len(samples) - CHUNKS + 1, CHUNKS)
    with Progress("videos", len(groups)) as bar:
        for number, first in enumerate(groups):
            frames = frames_of(samples[first : first + CHUNKS])
            formal = [conversation(frames, OTHER_TEXTS[number % len(OTHER_TEXTS)], samples[first].question)]
            tokens = [list(llm.chat(formal, greedy, reuse="off", use_tqdm=False)[0].outputs[0].token_ids)]
            cold = np.asarray(llm.score(formal, tokens, reuse="off", keep_logits=True, use_tqdm=False)[0].logits)
            for kind in KINDS:
                llm.reset_mm_cache()
                llm.chat(donors_of(kind, frames, number), greedy, reuse="exact", use_tqdm=False)
                llm.cache.flush()
                for name in SETTINGS:
                    [score] = llm.score(formal, tokens, reuse=name, keep_logits=True, use_tqdm=False)
                    if (found := {image.match for image in score.cache.images}) != {"approximate"}:
                        raise ValueError(f"chunks of video {number} must be approximate hits, got {found}")
                    errors[kind, name].append(float(np.mean(np.square(np.asarray(score.logits) - cold))))
            bar.update(1)
    return errors


@app.command()
def main(
    questions: Annotated[int, typer.Option(min=1, help="Questions of each of the five tasks.")] = 60,
    out: opt.Out = None,
) -> None:
    """Compare the contexts from which approximate reuse links chunks of videos, in the shipped model.

    Example: python -m research.video_donors --out video_donors.json
    """
    with say_errors():
        check_writable("out", out)
        from vlcache_jax import LLM, CacheConfig

        samples = [sample for sample in load_samples([], questions=questions) if len(sample.images) == 1]
        with LLM(TINY_VQA, cache=CacheConfig(load="kv"), enable_prefix_caching=False) as llm:
            errors = measure(llm, samples)
        rows = [
            {"donors": kind, "reuse": name, "videos": len(found)} | mean_interval(found, "MSE")
            for (kind, name), found in errors.items()
        ]
        show("Linked videos by the context of their chunks", rows)
        if out is not None:
            head = environment("jax") | {"model": "tiny_vqa, shipped with the package"}
            write("Linked videos by the context of their chunks", rows, head, out)


if __name__ == "__main__":
    app()
