"""Prompts for measurements of reuse: the same images again and again, behind text that is always new."""

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
    """Rows and columns of an image of so many tokens, as nearly square as may be."""
    rows = math.isqrt(tokens)
    while tokens % rows:
        rows -= 1
    return rows, tokens // rows


def make_images(count: int, tokens: int, cell: int) -> list[bytes]:
    """PNG files of coloured noise; `cell` is the side of the pixels that become one token."""
    rng = np.random.default_rng(0)
    rows, columns = image_grid(tokens)
    images = []
    for _ in range(count):
        noise = rng.integers(0, 256, (rows * 2, columns * 2, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(noise.repeat(cell // 2, axis=0).repeat(cell // 2, axis=1)).save(file, "PNG")
        images.append(file.getvalue())
    return images


class KnownImages:
    """Draws prompts of text, then images, then text, and tells what was computed of them.

    Args:
      config, tokenizer: of the model.
      images: of a prompt.
      tokens: of each image.
      text_before, text_after: tokens before and behind the images.
      alike: all are the same one, which passes the encoder once.

    Attributes:
      files: the images.
      limits: of their pixels, as `mm_processor_kwargs`.
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
        """Tokens of a prompt."""
        return self.text_before + self.images * (self.tokens + MARKS) + self.text_after

    def draw(self) -> dict[str, Any]:
        """A prompt for `LLM.generate`; no other has its text."""
        before, after = (self._rng.choice(self._letters, n).tolist() for n in (self.text_before, self.text_after))
        return {
            "prompt_token_ids": before + self._images + after,
            "multi_modal_data": {"image": self.files},
            "mm_processor_kwargs": self.limits,
        }

    def plan(self, report: Any, ranks: npt.NDArray[np.integer] | None = None) -> Plan:
        """What was computed of a prompt, by its `CacheReport`: text whole, and of each image the first tokens.

        Args:
          ranks: the place of each of an image's tokens in the order in which they come first [tokens]; None is the
            order of the prompt.

        Raises:
          ValueError: the report has other numbers of rows.
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
            raise ValueError(f"rows counted must be those of the report, {report.rows}, got {plan.rows(layers)}")
        return plan

    def encoded(self, report: Any) -> Sequence[Grid]:
        """Grids, in patches, of the images that passed the encoder."""
        rows, columns = (side * self._config.vision.merge_size for side in image_grid(self.tokens))
        return [(1, rows, columns) for image in report.images if image.encoder == "computed"]


def split_images(total: int, most: int) -> tuple[int, int]:
    """How many images have so many tokens together, and the tokens of each: as few images as can be.

    Raises:
      ValueError: `total` cannot be shared out equally among images of at most `most` tokens.
    """
    count = -(-total // most)
    if total % count:
        raise ValueError(
            f"image_tokens must be shared out equally among images of at most {most} tokens, "
            f"got {total}, which {count} images cannot have"
        )
    return count, total // count
