"""Where everything of a request lies: tokens, M-RoPE positions, image spans (host, numpy).

Placeholders in the token ids of a prompt, and what comes in their place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from vlcache_jax.inputs.processor import Grid, Patches
from vlcache_jax.models.rope import mrope_positions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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


Ids = npt.NDArray[np.int32]


class Inset(NamedTuple):
    """What comes in the place of an image's or a video's placeholder.

    Attributes:
        ids: tokens.
        starts: where in them the image begins, or each chunk of the video.
        length: tokens of the image, or of each chunk.
        lead: how many tokens at its beginning are text, which runs together with text before it.
        markers: tokens before and behind the placeholder that go with it where both are there; None: none do.
    """

    ids: Ids
    starts: tuple[int, ...]
    length: int
    lead: int = 0
    markers: tuple[int, ...] | None = None


type PlaceholderRange = tuple[int, int, Inset]
"""Tokens from the first number to the second of a prompt, and what comes in their place."""


class Expansion:
    """A prompt, and what comes in the place of its images and videos.

    Args:
        token_ids: with one pad for each image and video, int32 [n].
        places: in their order.

    Attributes:
        length: of the expanded prompt.
    """

    def __init__(self, token_ids: Ids, places: Sequence[PlaceholderRange]):
        self._token_ids, self._places = token_ids, places
        self.length = len(token_ids) + sum([len(inset.ids) - (end - begin) for begin, end, inset in places])

    def expanded(self) -> tuple[Ids, Ids, Ids]:
        """Returns what `Expander.expand` does."""
        token_ids = self._token_ids
        parts: list[Ids] = []
        starts: list[int] = []
        lengths: list[int] = []
        done = length = 0
        for begin, end, inset in self._places:
            parts += [token_ids[done:begin], inset.ids]
            length += begin - done
            starts += [length + start for start in inset.starts]
            lengths += [inset.length] * len(inset.starts)
            done, length = end, length + len(inset.ids)
        parts.append(token_ids[done:])
        return np.concatenate(parts).astype(np.int32), np.array(starts, np.int32), np.array(lengths, np.int32)


class Expander:
    """Puts into prompts what stands in the place of images and videos.

    Args:
        tokenizer: a tokenizer of transformers.
        tokenized: (text, what errors call it) -> its token ids, int32 [n].
        special: ids of the tokens that text does not run together with, by name; the placeholders' are among them.
        image, video: the placeholders.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tokenized: Callable[[str, str], Ids],
        special: Mapping[str, int],
        image: str,
        video: str,
    ):
        self._tokenizer, self._tokenized = tokenizer, tokenized
        self._named, self._special = special, [*special.values()]
        self._image, self._video = special[image], special[video]

    def image_inset(self, count: int) -> Inset:
        """An image of so many tokens."""
        if count < 1:
            raise ValueError(f"counts must be positive, got [{count}]")
        return Inset(_repeated(self._image, count), (0,), count)

    def video_inset(self, text: str, count: int, markers: tuple[str, str] | None = None) -> Inset:
        """A video that stands in the prompt as `text`, each pad in it for a chunk of so many tokens; see `Videos`."""
        ids = self._tokenized(text, "video")
        is_pad = ids == self._video
        lengths = np.where(is_pad, count, 1)
        starts = (np.cumsum(lengths) - lengths)[is_pad]
        lead = int(np.argmax(np.isin(ids, self._special)))
        pair = None if markers is None else tuple(self._named.get(marker, -1) for marker in markers)
        return Inset(np.repeat(ids, lengths), tuple(starts.tolist()), count, lead, pair)

    def pads(self, token_ids: Ids, name: str) -> npt.NDArray[np.int64]:
        """Where the placeholders are.

        Raises:
            ValueError: two stand side by side.
        """
        found = np.flatnonzero((token_ids == self._image) | (token_ids == self._video))
        if np.any(np.diff(found) == 1):  # their tokens would run together to one image
            first = found[int(np.argmax(np.diff(found) == 1))]
            pair = [str(self._tokenizer.convert_ids_to_tokens(int(token))) for token in token_ids[first : first + 2]]
            got = f"two {pair[0]}" if pair[0] == pair[1] else " and ".join(pair)
            raise ValueError(f"{name} must have a token between two images, got {got} side by side")
        return found

    def expand(self, token_ids: Ids, counts: Sequence[int | Inset]) -> tuple[Ids, Ids, Ids]:
        """Puts in the place of each pad what stands there.

        Args:
            token_ids: with one pad for each image and video, int32 [n].
            counts: tokens of each image, or what comes for it or for a video.

        Returns:
            The ids, int32, and of each image and each chunk of a video where it starts and how many tokens it has,
            int32 [images].

        Raises:
            ValueError: as many pads as there are not counts, a count below 1, or two pads side by side.
        """
        return self.expansion(token_ids, counts).expanded()

    def expansion(self, token_ids: Ids, counts: Sequence[int | Inset]) -> Expansion:
        """What `expand` needs, with the same errors."""
        pads = self.pads(token_ids, "token_ids").tolist()
        if len(counts) != len(pads):
            raise ValueError(f"counts must have one entry for each of {len(pads)} images, got {len(counts)}")
        places: list[PlaceholderRange] = []
        done = 0
        for pad, count in zip(pads, counts, strict=True):
            inset = count if isinstance(count, Inset) else self.image_inset(count)
            begin, end = pad, pad + 1
            if begin > done and inset.markers == (int(token_ids[begin - 1]), *token_ids[end : end + 1].tolist()):
                begin, end = begin - 1, end + 1
            place = begin, end, inset
            places.append(self._joined(token_ids, done, place) if inset.lead else place)
            done = end
        return Expansion(token_ids, places)

    def _joined(self, token_ids: Ids, done: int, place: PlaceholderRange) -> PlaceholderRange:
        """The place of an inset that begins with text: what stands before it, from `done` on, is one text with it."""
        begin, end, inset = place
        first = begin
        while first > done and int(token_ids[first - 1]) not in self._special:
            first -= 1
        if first == begin:
            return place
        before, own = token_ids[first:begin], inset.ids[: inset.lead]
        text = self._text(before)
        if np.array_equal(self._tokenized(text, "video"), before):
            together = self._tokenized(text + self._text(own), "video")
        else:  # a caller's ids that no text has
            together = np.concatenate([before, own])
        starts = tuple(start + len(together) - len(own) for start in inset.starts)
        ids = np.concatenate([together, inset.ids[inset.lead :]])
        return first, end, inset._replace(ids=ids, starts=starts)

    def _text(self, ids: Ids) -> str:
        return str(self._tokenizer.backend_tokenizer.decode(ids.tolist(), skip_special_tokens=False))


@functools.lru_cache(64)  # many images are of one size
def _repeated(token: int, count: int) -> Ids:
    ids = np.full(count, token, np.int32)
    ids.flags.writeable = False
    return ids
