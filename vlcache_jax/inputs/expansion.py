"""Expansion of image and video placeholders in the token IDs of a prompt."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = npt.NDArray[np.int32]


class Inset(NamedTuple):
    """Replacement of the placeholder of an image or a video.

    Attributes:
        ids: token IDs, int32 [n].
        starts: offsets in them at which the image, or each chunk of the video, begins.
        length: number of tokens of the image, or of each chunk.
        lead: number of text tokens at the beginning, which must be tokenized together with text before them.
        markers: tokens before and after the placeholder that are replaced with it, if both are there; None: none.
    """

    ids: Ids
    starts: tuple[int, ...]
    length: int
    lead: int = 0
    markers: tuple[int, ...] | None = None


type PlaceholderRange = tuple[int, int, Inset]
"""Range of tokens of a prompt, from the first number up to the second, and its replacement."""


class Expansion:
    """Prompt with the replacements of its images and videos.

    Args:
        token_ids: token IDs with one placeholder per image and video, int32 [n].
        places: ranges with their replacements, in order.

    Attributes:
        length: number of tokens of the expanded prompt.
    """

    def __init__(self, token_ids: Ids, places: Sequence[PlaceholderRange]):
        self._token_ids, self._places = token_ids, places
        self.length = len(token_ids) + sum([len(inset.ids) - (end - begin) for begin, end, inset in places])

    def expanded(self) -> tuple[Ids, Ids, Ids]:
        """Return the result of `Expander.expand`."""
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
    """Expander of the placeholders of images and videos in prompts.

    Args:
        tokenizer: a transformers tokenizer.
        tokenized: function from a text and its name in errors to its token IDs, int32 [n].
        special: IDs, by name, of tokens that are never merged with text; placeholders are among them.
        image, video: names of the placeholders.
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
        """Return the tokens that replace an image's placeholder, with `count` image tokens."""
        if count < 1:
            raise ValueError(f"counts must be positive, got [{count}]")
        return Inset(_repeated(self._image, count), (0,), count)

    def video_inset(self, text: str, count: int, markers: tuple[str, str] | None = None) -> Inset:
        """Return the replacement of a video: `text`, with each placeholder expanded to `count` tokens; see `Videos`."""
        ids = self._tokenized(text, "video")
        is_pad = ids == self._video
        lengths = np.where(is_pad, count, 1)
        starts = (np.cumsum(lengths) - lengths)[is_pad]
        lead = int(np.argmax(np.isin(ids, self._special)))
        pair = None if markers is None else tuple(self._named.get(marker, -1) for marker in markers)
        return Inset(np.repeat(ids, lengths), tuple(starts.tolist()), count, lead, pair)

    def pads(self, token_ids: Ids, name: str) -> npt.NDArray[np.int64]:
        """Return the offsets of the placeholders.

        Raises:
            ValueError: two placeholders are adjacent.
        """
        found = np.flatnonzero((token_ids == self._image) | (token_ids == self._video))
        if np.any(np.diff(found) == 1):  # their tokens would form one image
            first = found[int(np.argmax(np.diff(found) == 1))]
            pair = [str(self._tokenizer.convert_ids_to_tokens(int(token))) for token in token_ids[first : first + 2]]
            got = f"two {pair[0]}" if pair[0] == pair[1] else " and ".join(pair)
            raise ValueError(f"{name} must have a token between two images, got {got} side by side")
        return found

    def expand(self, token_ids: Ids, counts: Sequence[int | Inset]) -> tuple[Ids, Ids, Ids]:
        """Replace each placeholder.

        Args:
            token_ids: token IDs with one placeholder per image and video, int32 [n].
            counts: number of tokens of each image, or the replacement of an image or a video.

        Returns:
            The expanded token IDs, int32; the offset of each image and chunk of a video, and its number of tokens,
            int32 [images].

        Raises:
            ValueError: the number of placeholders differs from that of `counts`, a count is below 1, or two
                placeholders are adjacent.
        """
        return self.expansion(token_ids, counts).expanded()

    def expansion(self, token_ids: Ids, counts: Sequence[int | Inset]) -> Expansion:
        """Return the prompt and its replacements, without expanding it. It raises the errors of `expand`."""
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
        """Return a range extended to the text since `done`, if the replacement begins with text to tokenize with it."""
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
        else:  # token IDs of a caller that no text has
            together = np.concatenate([before, own])
        starts = tuple(start + len(together) - len(own) for start in inset.starts)
        ids = np.concatenate([together, inset.ids[inset.lead :]])
        return first, end, inset._replace(ids=ids, starts=starts)

    def _text(self, ids: Ids) -> str:
        return str(self._tokenizer.backend_tokenizer.decode(ids.tolist(), skip_special_tokens=False))


@functools.lru_cache(64)  # many images have the same size
def _repeated(token: int, count: int) -> Ids:
    ids = np.full(count, token, np.int32)
    ids.flags.writeable = False
    return ids
