"""Placeholders in the token ids of a prompt, and what comes in their place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]


class Inset(NamedTuple):
    """What comes in the place of an image's or a video's placeholder.

    Attributes:
        ids: tokens.
        starts: where in them the image begins, or each chunk of the video.
        length: tokens of the image, or of each chunk.
    """

    ids: Ids
    starts: tuple[int, ...]
    length: int

    @classmethod
    def of(cls, ids: Ids, pad: int, length: int) -> Inset:
        """That of tokens in which each `pad` stands for an image, or a chunk, of `length` tokens."""
        is_pad = ids == pad
        lengths = np.where(is_pad, length, 1)
        starts = (np.cumsum(lengths) - lengths)[is_pad]
        return cls(np.repeat(ids, lengths), tuple(starts.tolist()), length)


def expand(
    token_ids: Ids, places: Sequence[int] | npt.NDArray[np.int64], insets: Sequence[Inset]
) -> tuple[Ids, Ids, Ids]:
    """The ids with insets at `places`; of each image and chunk where it begins, and its length."""
    parts: list[Ids] = []
    starts: list[int] = []
    done = length = 0
    for place, inset in zip(places, insets, strict=True):
        parts += [token_ids[done:place], inset.ids]
        length += place - done
        starts += [length + start for start in inset.starts]
        done, length = place + 1, length + len(inset.ids)
    parts.append(token_ids[done:])
    lengths = [inset.length for inset in insets for _ in inset.starts]
    return np.concatenate(parts).astype(np.int32), np.array(starts, np.int32), np.array(lengths, np.int32)
