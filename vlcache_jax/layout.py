"""Where everything of a request lies: tokens, M-RoPE positions, image spans (host, numpy)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from vlcache_jax.images import Patches
from vlcache_jax.models.rope import mrope_positions


@dataclass(frozen=True, eq=False)
class ImageRef:
    """An image of a request, ready for the encoder.

    Attributes:
      key: entry key (`vlcache_jax.cache`).
      num_tokens: image tokens it takes in the prompt.
      patches: its pixels.
    """

    key: str
    num_tokens: int
    patches: Patches = field(repr=False)


@dataclass(frozen=True, eq=False)
class Span:
    """Consecutive tokens of one kind, `start` counted from the first token of the prompt."""

    start: int
    length: int
    image: ImageRef | None
    state: Literal["text", "miss"]


@dataclass(frozen=True, eq=False)
class Layout:
    """One prompt, image tokens expanded.

    Attributes:
      token_ids: int32 [n].
      positions: M-RoPE triples, int32 [3, n].
      delta: generated token i has position n + i + delta on all axes.
      spans: cover the prompt in order.
    """

    token_ids: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    delta: int
    spans: tuple[Span, ...]

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def images(self) -> list[ImageRef]:
        return [span.image for span in self.spans if span.image]


def make_layout(
    token_ids: npt.NDArray[np.int32], starts: Sequence[int], images: Sequence[ImageRef], merge_size: int
) -> Layout:
    """The layout of expanded `token_ids` [n] whose k-th image begins at `starts[k]`."""
    grids = [(image.patches.grid[1] // merge_size, image.patches.grid[2] // merge_size) for image in images]
    positions, delta = mrope_positions(len(token_ids), starts, grids)
    spans, done = [], 0
    for start, image in zip(starts, images, strict=True):
        if start > done:
            spans.append(Span(done, start - done, None, "text"))
        spans.append(Span(start, image.num_tokens, image, "miss"))
        done = start + image.num_tokens
    if done < len(token_ids):
        spans.append(Span(done, len(token_ids) - done, None, "text"))
    return Layout(token_ids, positions, delta, tuple(spans))
