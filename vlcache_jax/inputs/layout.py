"""Where everything of a request lies: tokens, M-RoPE positions, image spans (host)."""

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
    """An image of a call: a picture, or a chunk of a video. Requests of a call that show the same image share one.

    Attributes:
      key: entry key (`vlcache_jax.cache`).
      grid: patches, see `vlcache_jax.inputs.processor`.
      num_tokens: image tokens it takes in the prompt.
      shared: another entry key under which it may be kept, such as an operator's for everyone; None: there is none.
      shared_owner: digest of the salt in that key.
      keys: entry keys under which it may be kept, its own first.
      has_pixels: whether it can be computed.
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
        """Its pixels, decoded and cut when they are first asked for."""
        return self._load()

    @property
    def is_loaded(self) -> bool:
        """Whether its pixels are there."""
        return "patches" in self.__dict__

    def forget(self) -> None:
        """Drops the pixels until they are asked for again."""
        self.__dict__.pop("patches", None)


class Moment(NamedTuple):
    """Where in a video an image stands.

    Attributes:
      video: which of the request's videos.
      chunk: which chunk of it.
      time: what is added to its positions on the first axis; see `mrope_positions`.
    """

    video: int
    chunk: int
    time: int


@dataclass(frozen=True, eq=False)
class Span:
    """Consecutive tokens of one kind, `start` counted from the first token of the prompt.

    An image is a "miss" (no K, V to link, so computed), "exact" (K, V were computed in this very context) or
    "approximate" (in another one).

    Attributes:
      stop: where it ends.
      tokens: its tokens among those of the prompt.
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
        """Whether it lies as a whole in the first `count` tokens."""
        return self.stop <= count


@dataclass(frozen=True, eq=False)
class ImageSpan(Span):
    """A span that is an image. `moment` says where in a video it stands; None: in none."""

    image: ImageRef
    moment: Moment | None = None

    @property
    def time(self) -> int:
        """See `Moment`."""
        return 0 if self.moment is None else self.moment.time


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

    @functools.cached_property
    def images(self) -> list[ImageSpan]:
        """The spans that are images."""
        return [span for span in self.spans if isinstance(span, ImageSpan)]

    def marked(self, spans: Collection[Span], state: State) -> Layout:
        """The same prompt with some of its spans in another state."""
        return replace(self, spans=tuple(replace(one, state=state) if one in spans else one for one in self.spans))

    def extended(self, tokens: Sequence[int]) -> Layout:
        """The same prompt with text tokens after it, as they would be generated."""
        more = np.asarray(tokens, np.int32)
        position = len(self) + self.delta + np.arange(len(more), dtype=np.int32)
        return Layout(
            np.concatenate([self.token_ids, more]),
            np.concatenate([self.positions, np.tile(position, (3, 1))], axis=1),
            self.delta,
            (*self.spans, Span(len(self), len(more), None, "text")),
        )


def make_layout(
    token_ids: npt.NDArray[np.int32],
    starts: Sequence[int],
    images: Sequence[ImageRef],
    merge_size: int,
    states: Sequence[State] | None = None,
    moments: Sequence[Moment | None] = (),
) -> Layout:
    """The layout of expanded `token_ids` [n] whose k-th image begins at `starts[k]`; by default all are misses, and
    pictures."""
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
    return Layout(token_ids, positions, delta, tuple(spans))
