"""Prompts for measurements of reuse: the same images repeatedly, after text that is always new."""

from __future__ import annotations

import io
import math
import string
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from vlcache_jax.inputs.processor import Grid
from vlcache_jax.models import ModelConfig
from vlcache_jax.reuse.policies import Plan

TEXT_AFTER = 6
MARKS = 2  # tokens around an image


def image_grid(tokens: int) -> tuple[int, int]:
    """Return rows and columns of an image of `tokens` tokens, as nearly square as possible."""
    rows = math.isqrt(tokens)
    while tokens % rows:
        rows -= 1
    return rows, tokens // rows


def make_images(count: int, tokens: int, cell: int) -> list[bytes]:
    """Return PNG files of colored noise; `cell` is the side of the pixels that become one token."""
    rng = np.random.default_rng(0)
    rows, columns = image_grid(tokens)
    images = []
    for _ in range(count):
        noise = rng.integers(0, 256, (rows * 2, columns * 2, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(noise.repeat(cell // 2, axis=0).repeat(cell // 2, axis=1)).save(file, "PNG")
        images.append(file.getvalue())
    return images


def edge_ranks(tokens: int, first: int) -> npt.NDArray[np.integer]:
    """Return the place of each of an image's tokens in the order of an edge policy, `[tokens]`.

    The first tokens come first, then the others from the last one on.

    Args:
      tokens: Tokens of the image.
      first: Number of first tokens that the policy computes.
    """
    return np.concatenate([np.arange(first), np.arange(tokens - 1, first - 1, -1)])


class KnownImages:
    """Generator of prompts of text, images and text, which also derives from a report which tokens were computed.

    Args:
      config, tokenizer: Configuration and tokenizer of the model.
      images: Images of a prompt.
      tokens: Tokens of each image.
      text_before, text_after: Tokens before and after the images.
      alike: True if all images are the same one, which passes the encoder once.

    Attributes:
      files: The images.
      limits: Limits of their pixels, as `mm_processor_kwargs`.
    """

    def __init__(
        self, config: ModelConfig, tokenizer: Any, *, images: int, tokens: int, text_before: int,
        text_after: int = TEXT_AFTER, alike: bool = False,
    ):  # fmt: skip
        self.images, self.tokens, self.text_before, self.text_after = images, tokens, text_before, text_after
        self._config = config
        cell = config.vision.patch_size * config.vision.merge_size
        self.files = make_images(1, tokens, cell) * images if alike else make_images(images, tokens, cell)
        self.limits = {"max_pixels": 2 * tokens * cell**2}
        self._letters = tokenizer.convert_tokens_to_ids(list(string.ascii_lowercase))
        marks = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
        self._images = tokenizer.convert_tokens_to_ids(marks) * images
        self._rng = np.random.default_rng(1)

    def __len__(self) -> int:
        """Return the number of tokens of a prompt."""
        return self.text_before + self.images * (self.tokens + MARKS) + self.text_after

    def draw(self) -> dict[str, Any]:
        """Return a prompt for `LLM.generate` with text that no other prompt has."""
        before, after = (self._rng.choice(self._letters, n).tolist() for n in (self.text_before, self.text_after))
        return {
            "prompt_token_ids": before + self._images + after,
            "multi_modal_data": {"image": self.files},
            "mm_processor_kwargs": self.limits,
        }

    def plan(self, report: Any, ranks: npt.NDArray[np.integer] | None = None) -> Plan:
        """Return the plan of a prompt from its `CacheReport`: all text tokens, and some tokens of each image.

        Args:
          report: The `CacheReport`.
          ranks: Place of each of an image's tokens in the order of selection, `[tokens]`; None is the order of the
            prompt.

        Raises:
          ValueError: The report has other numbers of rows.
        """
        layers = self._config.text.num_layers
        ranks = np.arange(self.tokens) if ranks is None else ranks
        depth = np.full(len(self), layers, np.int16)
        for image in report.images:
            first = self.text_before + image.index * (self.tokens + MARKS) + 1
            fresh = np.asarray(image.recomputed)
            depth[first : first + self.tokens] = (ranks[:, None] < fresh).sum(1)
        depth[-1] = layers + 1
        plan = Plan(depth)
        if plan.rows(layers) != tuple(report.rows):
            raise ValueError(f"counted rows must equal those of the report, {report.rows}, got {plan.rows(layers)}")
        return plan

    def encoded(self, report: Any) -> Sequence[Grid]:
        """Return grids, in patches, of the images that passed the encoder."""
        rows, columns = (side * self._config.vision.merge_size for side in image_grid(self.tokens))
        return [(1, rows, columns) for image in report.images if image.encoder == "computed"]
