"""The workload of every engine: the model, and steps, which are calls with a name."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from vlcache_jax.benchmarks.random_models import TEXT, VISION
from vlcache_jax.benchmarks.throughput import IMAGE, ThroughputLoad

SECTIONS = ("cold", "hits", "batch", "repeated", "decode", "agreement")
PATCHES = 32  # side in pixels of the area of a token
SIDES = (160, 192, 224, 256, 320)  # sides of the images of compared outputs
LOGPROBS = 5


@dataclasses.dataclass(frozen=True)
class Scale:
    """Size of the model, the images and the requests.

    Attributes:
      text, vision: Configurations of the model.
      side: Side of an image in pixels.
      images: Numbers of images of the prompts whose first token is timed.
      requests: Requests of a batch.
      decoded: Numbers of outputs that are decoded together.
      tokens: Tokens of each of these.
      compared: Prompts whose outputs are compared with transformers'.
      answer: Tokens of each of these.
      options: Options of each engine: concurrent requests, tokens of a step and of a request, images of a request, and
        bytes for KV.
    """

    text: dict[str, Any]
    vision: dict[str, Any]
    side: int = 1024
    images: tuple[int, ...] = (1, 2, 4)
    requests: int = 96
    decoded: tuple[int, ...] = (1, 8, 32)
    tokens: int = 64
    compared: int = 10
    answer: int = 16
    options: Mapping[str, int] = dataclasses.field(
        default_factory=lambda: {"requests": 64, "rows": 4096, "model_len": 8192, "images": 4, "kv_bytes": 2**30}
    )

    @property
    def max_pixels(self) -> int:
        """Pixels of the largest image."""
        return max(self.side, *SIDES) ** 2

    @property
    def image_tokens(self) -> int:
        """Tokens of an image."""
        return (self.side // PATCHES) ** 2


FULL = Scale(TEXT, VISION)
QUICK = Scale(
    TEXT | {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 2,
            "num_key_value_heads": 1, "vocab_size": 512},
    VISION | {"depth": 4, "hidden_size": 128, "intermediate_size": 256, "num_heads": 2,
              "deepstack_visual_indexes": [1, 2]},
    side=256, requests=8, decoded=(1, 2), tokens=8, compared=3, answer=4,
    options={"requests": 8, "rows": 512, "model_len": 1024, "images": 4, "kv_bytes": 2**28},
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class JobStep:
    """One call, or one for each request.

    Attributes:
      section, case: Name of the measurement; several steps with the same name are repeats.
      size: Tokens of its images, or number of concurrent outputs.
      requests: Prompt, paths of images, and max_tokens of each.
      reuse: Reuse mode of cached images; an engine without that setting leaves the step out.
      logprobs: Number of most likely tokens to return at each position.
      alone: Each request is a call.
      forget: Caches are cleared before each call.
      timed: The step is in the table.
    """

    section: str
    case: str
    size: int
    requests: Sequence[dict[str, Any]]
    reuse: str = "exact"
    logprobs: int = 0
    alone: bool = False
    forget: bool = False
    timed: bool = True


class Words:
    """Generator of letters that no prompt had before."""

    def __init__(self, seed: int):
        self._rng = np.random.default_rng(seed)

    def __call__(self, count: int) -> str:
        return bytes(self._rng.integers(97, 123, count, dtype=np.uint8)).decode()


class Pictures:
    """Writer of images that no prompt had before."""

    def __init__(self, folder: pathlib.Path, seed: int):
        folder.mkdir(parents=True)
        self._folder, self._rng, self._numbers = folder, np.random.default_rng(seed), itertools.count()

    def __call__(self, width: int, height: int) -> str:
        noise = self._rng.integers(0, 256, (height // PATCHES, width // PATCHES, 3), dtype=np.uint8)
        path = self._folder / f"{next(self._numbers)}.png"
        Image.fromarray(noise.repeat(PATCHES, axis=0).repeat(PATCHES, axis=1)).save(path)
        return str(path)


def request(before: str, images: Sequence[str], after: str, max_tokens: int = 1) -> dict[str, Any]:
    prompt = f"<|im_start|>user\n{before}{IMAGE * len(images)}{after}<|im_end|>\n<|im_start|>assistant\n"
    return {"prompt": prompt, "images": list(images), "max_tokens": max_tokens}


def make_steps(scale: Scale, sections: Sequence[str], folder: pathlib.Path, seed: int = 0) -> list[JobStep]:
    """Return all steps of the sections, in their order.

    Args:
      scale: Size of everything.
      sections: Names of the sections.
      folder: Folder of the images; it is created.
      seed: Seed of words and images.
    """
    words, pictures = Words(seed), Pictures(folder, seed)
    makers: dict[str, Callable[[], Iterator[JobStep]]] = {
        "ttft": lambda: _ttft(scale, sections, words, pictures),
        "batch": lambda: _batch(scale, "batch", folder / "batch", None),
        "repeated": lambda: _batch(scale, "repeated", folder / "repeated", 1.1),
        "decode": lambda: _decode(scale, words, pictures),
        "agreement": lambda: _agreement(scale, words, pictures),
    }
    wanted = {"ttft" if section in ("cold", "hits") else section for section in sections}
    return [step for name, make in makers.items() if name in wanted for step in make()]


def first(scale: Scale, folder: pathlib.Path) -> JobStep:
    """Return a small request with an image, which a start waits for."""
    words, pictures = Words(2**32), Pictures(folder, 2**32)
    return JobStep("start", "first answer", 1, [request(words(16), [pictures(256, 256)], words(16))])


def _ttft(scale: Scale, sections: Sequence[str], words: Words, pictures: Pictures) -> Iterator[JobStep]:
    """Yield prompts of `scale.images` images of one size: without reuse, and then repeated."""
    # The first step in a process is not timed; the smallest size runs twice, because it takes the least time.
    sizes = [(scale.images[0], False), *((count, True) for count in (scale.images[0], *scale.images))]
    for count, timed in sizes:
        images = [pictures(scale.side, scale.side) for _ in range(count)]
        before, after = words(16), words(16)
        size = count * scale.image_tokens
        yield JobStep("cold", "cold", size, [request(before, images, after)], timed=timed and "cold" in sections)
        if "hits" in sections:
            for step in _hits(size, before, images, after, words):
                yield dataclasses.replace(step, timed=timed)


def _hits(size: int, before: str, images: Sequence[str], after: str, words: Words) -> Iterator[JobStep]:
    """Yield steps with cached images. Short ones run three times."""
    for _ in range(3):
        yield JobStep("hits", "repeat", size, [request(before, images, after)])
        yield JobStep("hits", "next question", size, [request(before, images, words(16))])
        for reuse in ("approximate", "full"):
            yield JobStep("hits", "new prefix", size, [request(words(16), images, after)], reuse)
    yield JobStep("hits", "new prefix", size, [request(words(16), images, after)])
    # An order with the same beginning as another would be a prefix hit.
    orders: dict[str, tuple[int, ...]] = {"exact": (1, 0)} if len(images) == 2 else {}
    if len(images) == 4:
        orders = {"exact": (1, 0, 3, 2), "approximate": (2, 3, 0, 1), "full": (3, 2, 1, 0)}
    for reuse, order in orders.items():
        yield JobStep("hits", "reordered", size, [request(before, [images[i] for i in order], after)], reuse)


def _batch(scale: Scale, case: str, folder: pathlib.Path, zipf: float | None) -> Iterator[JobStep]:
    """Yield outputs of different lengths, all requested at once; some others come before them."""
    for name, requests, seed, timed in (("warm", 8, 2**32, False), ("load", scale.requests, 0, True)):
        (folder / name).mkdir(parents=True)
        load = ThroughputLoad(requests=min(requests, scale.requests), zipf=zipf, seed=seed)
        yield JobStep(case, case, load.requests, load.make(folder / name), forget=True, timed=timed)


def _decode(scale: Scale, words: Words, pictures: Pictures) -> Iterator[JobStep]:
    """Yield outputs of the same length after cached prompts."""
    prompts = [request(words(16), [pictures(256, 256)], words(32), scale.tokens) for _ in range(max(scale.decoded))]
    yield JobStep("decode", "prompts", len(prompts), [one | {"max_tokens": 1} for one in prompts], timed=False)
    for count in scale.decoded:
        for repeat in range(4 if count == 1 else 3):
            yield JobStep("decode", "decode", count, prompts[:count], timed=repeat > 0)


def _agreement(scale: Scale, words: Words, pictures: Pictures) -> Iterator[JobStep]:
    """Yield the same prompts in one call, and one by one."""
    sides = itertools.cycle(SIDES)
    requests = [
        request(words(8 * i), [pictures(next(sides), next(sides)) for _ in range(1 + i % 4)], words(24), scale.answer)
        for i in range(scale.compared)
    ]
    for case, alone in (("together", False), ("alone", True)):
        yield JobStep("agreement", case, len(requests), requests, logprobs=LOGPROBS, alone=alone, forget=True)
