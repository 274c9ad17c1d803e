"""The requests of `vlcache bench batch`: prompts with pictures, lengths of their answers, and when they come."""

from __future__ import annotations

import math
import pathlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

SHARES = (0.3, 0.4, 0.3)  # of prompts with 0, 1 and 2 images
SIDES = (160, 192, 224, 256)  # of pictures, in pixels
TEXT = (16, 256)  # characters behind the images
BEFORE = (8, 32)  # characters in front of them, in every second prompt
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


@dataclass(frozen=True)
class Load:
    """What is asked of an engine. Equal loads have equal requests, and each part is drawn for itself.

    Attributes:
      requests: so many.
      images: pictures of the pool. Half of them stand in one place each, the others in all other places.
      mean_answer, max_answer: tokens of answers are geometric with this mean, and cut at the most.
      rate: requests a second, a Poisson process; None: all come at once.
      seed: of everything.
      zipf: exponent, by which the pictures are met in all places, some of them often; None: see `images`.

    Raises:
      ValueError: a number out of range.
    """

    requests: int = 96
    images: int = 40
    mean_answer: float = 48
    max_answer: int = 256
    rate: float | None = None
    seed: int = 0
    zipf: float | None = None

    def __post_init__(self) -> None:
        for name in ("requests", "images", "max_answer"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 1 <= self.mean_answer < math.inf:
            raise ValueError(f"mean_answer must be a number of at least 1, got {self.mean_answer}")
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise ValueError(f"rate must be a number above 0, got {self.rate}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")

    def __str__(self) -> str:
        come = "at once" if self.rate is None else f"as a Poisson process of {self.rate:g} a second"
        none, one, two = (f"{share:.0%}" for share in SHARES)
        met = "half of which are met once" if self.zipf is None else f"met by Zipf's law ({self.zipf:g})"
        return (
            f"{self.requests} prompts that come {come}; 0, 1 or 2 images ({none}, {one}, {two}) of a pool of "
            f"{self.images}, {met}, of {SIDES[0]} to {SIDES[-1]} pixels a side; behind them "
            f"{TEXT[0]} to {TEXT[1]} characters, log-uniform, in front of them {BEFORE[0]} to {BEFORE[1]} in every "
            f"second prompt; answers geometric with mean {self.mean_answer:g}, 1 to {self.max_answer} tokens; "
            f"seed {self.seed}"
        )

    def make(self, directory: pathlib.Path) -> list[dict[str, Any]]:
        """Writes the pictures; returns of each request its prompt, images, max_tokens and arrival in seconds."""
        count, answers, places, texts, noise, times = (np.random.default_rng([self.seed, i]) for i in range(6))
        counts = count.choice(len(SHARES), self.requests, p=SHARES)
        lengths = answers.geometric(1 / self.mean_answer, self.requests).clip(1, self.max_answer)
        pool = [_write_picture(noise, directory / f"{i}.png") for i in range(self.images)]
        used = self._places(places, int(counts.sum()))
        pictures = iter(used)
        wait = np.zeros(self.requests) if self.rate is None else times.exponential(1 / self.rate, self.requests)
        return [
            {
                "prompt": _prompt(texts, int(images), in_front=i % 2 == 1),
                "images": [pool[next(pictures)] for _ in range(images)],
                "max_tokens": int(length),
                "arrival": float(arrival),
            }
            for i, (images, length, arrival) in enumerate(zip(counts, lengths, np.cumsum(wait), strict=True))
        ]

    def _places(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """The picture of each place."""
        if self.zipf is not None:
            shares = np.arange(1, self.images + 1) ** -self.zipf
            return rng.choice(self.images, count, p=shares / shares.sum())
        once = min(self.images // 2, count // 2)
        used = rng.integers(self.images // 2, self.images, count)
        used[rng.choice(count, once, replace=False)] = np.arange(once)
        return used


def longest(requests: list[dict[str, Any]]) -> int:
    """Tokens of prompt and answer that no request has more of, in whole pages of 128."""
    most_tokens = (SIDES[-1] // 28 + 1) ** 2  # 28 pixels are the smallest side of a token of all families
    slots = max(len(r["prompt"]) + most_tokens * len(r["images"]) + r["max_tokens"] for r in requests)
    return -(-slots // 128) * 128


def _prompt(rng: np.random.Generator, images: int, *, in_front: bool) -> str:
    low, high = np.log(TEXT)
    after = _words(rng, round(float(np.exp(rng.uniform(low, high)))))
    before = _words(rng, int(rng.integers(BEFORE[0], BEFORE[1] + 1))) if in_front else ""
    return f"<|im_start|>user\n{before}{IMAGE * images}{after}<|im_end|>\n<|im_start|>assistant\n"


def _words(rng: np.random.Generator, count: int) -> str:
    return bytes(rng.integers(97, 123, count, dtype=np.uint8)).decode()


def _write_picture(rng: np.random.Generator, path: pathlib.Path) -> str:
    """Coloured noise, in squares of 16 pixels."""
    height, width = rng.choice(SIDES, 2) // 16
    noise = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(noise.repeat(16, axis=0).repeat(16, axis=1)).save(path)
    return str(path)
