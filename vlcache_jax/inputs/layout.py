"""Layout of a request: tokens, M-RoPE positions, image spans (host)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from vlcache_jax.inputs.processor import Grid, Patches
from vlcache_jax.models.rope import mrope_positions

State = Literal["text", "miss", "exact", "approximate"]


class ImageRef:
    """Image of a call, or a chunk of a video. Requests of a call that show the same image share one object.

    Attributes:
      key: entry key (`vlcache_jax.cache`).
      grid: patch grid, see `vlcache_jax.inputs.processor`.
      num_tokens: number of image tokens in the prompt.
      shared: other entry key that may have entries, such as that of an operator's shared image; None: none.
      shared_owner: digest of the salt in that key.
      keys: entry keys that may have entries, `key` first.
      has_pixels: True if the image can be computed.
    """

    def __init__(
        self,
        key: str,
        grid: Grid,
        num_tokens: int,
        load: Callable[[], Patches],
        *,
        shared: str | None = None,
        shared_owner: str | None = None,
        has_pixels: bool = True,
    ):
        self.has_pixels, self.shared_owner = has_pixels, shared_owner
        self.key, self.grid, self.num_tokens, self.shared = key, grid, num_tokens, shared
        self.keys = (key,) if shared in (None, key) else (key, shared)
        self._load = load

    @functools.cached_property
    def patches(self) -> Patches:
        """Patches of the image, decoded and cut at first access."""
        return self._load()

    @property
    def is_loaded(self) -> bool:
        """True if the patches are in memory."""
        return "patches" in self.__dict__

    def forget(self) -> None:
        """Drop the patches until the next access."""
        self.__dict__.pop("patches", None)


class Moment(NamedTuple):
    """Position of an image in a video.

    Attributes:
      video: index of the video in the request.
      chunk: index of the chunk in the video.
      time: offset added to the chunk's positions on the first axis; see `mrope_positions`.
    """

    video: int
    chunk: int
    time: int


@dataclass(frozen=True, eq=False)
class Span:
    """Consecutive tokens of one kind.

    An image is a "miss" (no KV to link, so it is computed), "exact" (its KV was computed in the same context) or
    "approximate" (its KV was computed in another context).

    Attributes:
      start: offset of the first token in the prompt.
      length: number of tokens.
      image: the image, None for text.
      state: kind of the span.
      stop: offset after the last token.
      tokens: slice of the prompt's tokens.
    """

    start: int
    length: int
    image: ImageRef | None
    state: State
    stop: int = field(init=False)
    tokens: slice = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", self.start + self.length)
        object.__setattr__(self, "tokens", slice(self.start, self.stop))

    def within(self, count: int) -> bool:
        """Return whether the span ends within the first `count` tokens."""
        return self.stop <= count


@dataclass(frozen=True, eq=False)
class ImageSpan(Span):
    """Span of an image. `moment` is its position in a video, or None."""

    image: ImageRef
    moment: Moment | None = None

    @property
    def time(self) -> int:
        """Time offset of the chunk, 0 for an image; see `Moment`."""
        return 0 if self.moment is None else self.moment.time


@dataclass(frozen=True, eq=False)
class Layout:
    """Tokens and positions of one prompt, with image tokens expanded.

    Attributes:
      token_ids: int32 [n].
      positions: M-RoPE triples, int32 [3, n].
      delta: offset of generated tokens: token i has position n + i + delta on all axes.
      spans: spans that cover the prompt, in order.
      turns: offsets of the tokens that begin a message, if the model needs them.
    """

    token_ids: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    delta: int
    spans: tuple[Span, ...]
    turns: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    @functools.cached_property
    def images(self) -> list[ImageSpan]:
        """Spans of images."""
        return [span for span in self.spans if isinstance(span, ImageSpan)]

    def marked(self, spans: Collection[Span], state: State) -> Layout:
        """Return the layout with some of its spans in another state."""
        return replace(self, spans=tuple(replace(one, state=state) if one in spans else one for one in self.spans))

    def extended(self, tokens: Sequence[int]) -> Layout:
        """Return the layout with text tokens appended, positioned like generated ones."""
        added = np.asarray(tokens, np.int32)
        position = len(self) + self.delta + np.arange(len(added), dtype=np.int32)
        return Layout(
            np.concatenate([self.token_ids, added]),
            np.concatenate([self.positions, np.tile(position, (3, 1))], axis=1),
            self.delta,
            (*self.spans, Span(len(self), len(added), None, "text")),
            self.turns,
        )


def make_layout(
    token_ids: npt.NDArray[np.int32],
    starts: Sequence[int],
    images: Sequence[ImageRef],
    merge_size: int,
    states: Sequence[State] | None = None,
    moments: Sequence[Moment | None] = (),
    turn_token: int | None = None,
) -> Layout:
    """Return the layout of a prompt.

    Args:
      token_ids: expanded token IDs, int32 [n].
      starts: offset of each image.
      images: the images, in order.
      merge_size: side of the block of patches that becomes one token.
      states: state of each image; None: all are misses.
      moments: position of each image in a video, or None; empty: all are still images.
      turn_token: ID of the token that begins a message; None: `Layout.turns` is not needed.
    """
    grids = [(image.grid[1] // merge_size, image.grid[2] // merge_size) for image in images]
    moments = moments or [None] * len(images)
    times = [0 if moment is None else moment.time for moment in moments]
    positions, delta = mrope_positions(len(token_ids), starts, grids, times)
    spans: list[Span] = []
    done = 0
    states = states or cast(list[State], ["miss"] * len(images))
    for start, image, state, moment in zip(starts, images, states, moments, strict=True):
        if start > done:
            spans.append(Span(done, start - done, None, "text"))
        spans.append(ImageSpan(start, image.num_tokens, image, state, moment))
        done = start + image.num_tokens
    if done < len(token_ids):
        spans.append(Span(done, len(token_ids) - done, None, "text"))
    turns = () if turn_token is None else tuple(np.flatnonzero(token_ids == turn_token).tolist())
    return Layout(token_ids, positions, delta, tuple(spans), turns)
