"""Sizes that programs are compiled for.

Every size in a batch is rounded up to a bucket. There are three lists of buckets: for tokens, patches and sequences.
All shapes of a program follow from buckets, so the set of programs is small and known before the first request.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence
from dataclasses import dataclass

from vlcache_jax.common.checks import check_whole, is_a


@dataclass(frozen=True)
class BucketSizes:
    """Bucket sizes, each list ascending. More buckets mean less padding and more programs to compile.

    Attributes:
      rows: tokens of one prefill chunk. The last bucket is the largest chunk (`max_rows`).
      patches: patches of one encoder call, multiples of merge_size**2. The last bucket bounds the largest image.
      sequences: rows of a decode step, the output head and the sampler. The last bucket is the largest number of
        sequences that decode together.
      window: largest number of tokens decoded before the host reads them.

    Raises:
      ValueError: a list is empty, not ascending, or not of positive integers, or `window` is below 1.
    """

    rows: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
    patches: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 6144, 8192, 12288, 16384, 32768, 65536)
    sequences: tuple[int, ...] = (1, 4, 16, 64)
    window: int = 8

    def __post_init__(self) -> None:
        for name in ("rows", "patches", "sequences"):
            sizes = getattr(self, name)
            ascending = bool(sizes) and all(a < b for a, b in zip((0, *sizes), sizes, strict=False))
            if not ascending or not all(is_a(bucket, int) for bucket in sizes):
                raise ValueError(f"buckets.{name} must be ascending positive integers, got {sizes!r}")
        check_whole("buckets.window", self.window, 1)

    @functools.cached_property
    def max_rows(self) -> int:
        return self.rows[-1]

    @functools.cached_property
    def max_sequences(self) -> int:
        return self.sequences[-1]

    def outputs(self, rows: int) -> int:
        """Return how many tokens leave the last layer of a chunk of `rows` tokens: the most that can need logits."""
        return min(rows, self.max_sequences)

    def until_fewer(self, left: Sequence[int]) -> int:
        """Return the number of steps after which the next smaller bucket holds the sequences that still run.

        In the smallest bucket, this is the number of steps after which all sequences have ended.

        Args:
          left: remaining tokens of each sequence.
        """
        bucket = bisect.bisect_left(self.sequences, len(left))
        return sorted(left, reverse=True)[self.sequences[bucket - 1] if bucket else 0]


def round_up(size: int, sizes: tuple[int, ...]) -> int:
    """Return the smallest bucket that holds `size`.

    Raises:
      ValueError: `size` exceeds the last bucket.
    """
    index = bisect.bisect_left(sizes, size)
    if index == len(sizes):
        raise ValueError(f"size must be at most {sizes[-1]}, the largest bucket, got {size}")
    return sizes[index]


def cover(size: int, sizes: tuple[int, ...]) -> list[int]:
    """Return buckets that together hold `size`: the last one as often as it is filled, and one for the remainder."""
    whole, rest = divmod(size, sizes[-1])
    return [sizes[-1]] * whole + ([round_up(rest, sizes)] if rest else [])


def split_rows(rows: int, sizes: tuple[int, ...], overhead: int = 256) -> list[int]:
    """Return buckets, in descending order, for consecutive chunks that together hold `rows` tokens.

    Prefill in several chunks is exact, so 5000 tokens become 4096 + 1024 rather than 8192. Each further chunk reads all
    weights and launches its kernels again. `overhead` is this cost in computed tokens.
    """
    steps: list[int] = []
    while rows > sizes[-1]:
        steps.append(sizes[-1])
        rows -= sizes[-1]
    return steps + _cheapest(rows, sizes, overhead)


def _cheapest(rows: int, sizes: tuple[int, ...], overhead: int) -> list[int]:
    whole = round_up(rows, sizes)
    lower = bisect.bisect_right(sizes, rows) - 1
    if lower < 0 or sizes[lower] == rows:
        return [whole]
    pieces = [sizes[lower], *_cheapest(rows - sizes[lower], sizes, overhead)]
    return pieces if sum(pieces) + overhead * (len(pieces) - 1) < whole else [whole]
