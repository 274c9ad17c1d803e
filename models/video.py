"""How a family's prompts show videos (host).

A video is a sequence of chunks, as many frames each as a patch has temporal slots. Each chunk is to the model what an
image is; families differ in what stands between chunks, and in how time is told.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Videos:
    """What a family says of videos.

    Attributes:
      processor: the library's class of its video processor, which samples frames and sets their size.
      chunk: what stands in the prompt for a chunk seen at `seconds`, its one placeholder included.
      markers: the tokens before and behind a video's placeholder that are replaced with it; a placeholder without them
        is replaced alone. None: only placeholders are replaced.
      time_step: (configuration of the tower, seconds from chunk to chunk) -> how far apart chunks that follow each
        other lie on the first axis of positions.
    """

    processor: str
    chunk: str
    time_step: Callable[[Any, float], float]
    markers: tuple[str, str] | None = None

    def text(self, seconds: Sequence[float]) -> str:
        """What stands in the prompt for a video whose chunks were seen at `seconds`."""
        return "".join(self.chunk.format(seconds=one) for one in seconds)

    def times(self, vision: Any, count: int, seconds: float) -> tuple[int, ...]:
        """What is added to the positions of each of `count` chunks on the first axis, in the library's float32."""
        step = np.float32(self.time_step(vision, seconds))
        return tuple((np.arange(count, dtype=np.float32) * step).astype(np.int64).tolist())
