"""The sizes that programs are compiled for.

Every size in a batch is rounded up to a rung of one of three ladders, and every program's shapes follow from rungs
alone, so that the family of programs is small and known before the first request.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence
from dataclasses import dataclass

from vlcache_jax.common.checks import check_whole, is_a


@dataclass(frozen=True)
class Ladder:
    """Ladders of sizes, each ascending. More rungs: less padding, more programs to compile.

    Attributes:
      rows: rows of one prefill step; the last is the most that one step computes (`max_rows`).
      patches: patches of one encoder call, multiples of merge_size**2; the last bounds the largest image.
      sequences: rows of one decode step, of the output head and of the sampler; the last is the most sequences that
        decode together.
      window: tokens that are decoded at most before the host looks at them.
    """

    rows: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
    patches: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 6144, 8192, 12288, 16384, 32768, 65536)
    sequences: tuple[int, ...] = (1, 4, 16, 64)
    window: int = 8

    def __post_init__(self) -> None:
        for name in ("rows", "patches", "sequences"):
            rungs = getattr(self, name)
            ascending = bool(rungs) and all(a < b for a, b in zip((0, *rungs), rungs, strict=False))
            if not ascending or not all(is_a(rung, int) for rung in rungs):
                raise ValueError(f"ladder.{name} must be ascending positive integers, got {rungs!r}")
        check_whole("ladder.window", self.window, 1)

    @functools.cached_property
    def max_rows(self) -> int:
        return self.rows[-1]

    @functools.cached_property
    def max_sequences(self) -> int:
        return self.sequences[-1]

    def outputs(self, rows: int) -> int:
        """Rows that leave the last layer of a step with `rows` rows: the most whose logits can be wanted."""
        return min(rows, self.max_sequences)

    def until_fewer(self, left: Sequence[int]) -> int:
        """Steps after which fewer rows will do for answers that have so many tokens left; none of them goes on then, if
        the rows are the fewest."""
        rung = bisect.bisect_left(self.sequences, len(left))
        return sorted(left, reverse=True)[self.sequences[rung - 1] if rung else 0]


def round_up(size: int, rungs: tuple[int, ...]) -> int:
    """The smallest rung that holds `size`.

    Raises:
      ValueError: `size` is beyond the last rung.
    """
    index = bisect.bisect_left(rungs, size)
    if index == len(rungs):
        raise ValueError(f"size must be at most {rungs[-1]}, the last rung, got {size}")
    return rungs[index]


def cover(size: int, rungs: tuple[int, ...]) -> list[int]:
    """The rungs that hold `size` together: the last one as often as it is filled, and one for what is left."""
    whole, rest = divmod(size, rungs[-1])
    return [rungs[-1]] * whole + ([round_up(rest, rungs)] if rest else [])


def split_rows(rows: int, rungs: tuple[int, ...], overhead: int = 256) -> list[int]:
    """Rungs for consecutive steps that together hold `rows` rows, descending.

    Prefill in several steps is exact, so 5000 rows become 4096 + 1024 rather than 8192. A further step reads all
    weights again and starts its kernels anew; `overhead` says how many computed rows that is worth.
    """
    steps: list[int] = []
    while rows > rungs[-1]:
        steps.append(rungs[-1])
        rows -= rungs[-1]
    return steps + _cheapest(rows, rungs, overhead)


def _cheapest(rows: int, rungs: tuple[int, ...], overhead: int) -> list[int]:
    whole = round_up(rows, rungs)
    lower = bisect.bisect_right(rungs, rows) - 1
    if lower < 0 or rungs[lower] == rows:
        return [whole]
    pieces = [rungs[lower], *_cheapest(rows - rungs[lower], rungs, overhead)]
    return pieces if sum(pieces) + overhead * (len(pieces) - 1) < whole else [whole]
