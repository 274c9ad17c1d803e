"""Policies: which of a prompt's tokens are kept for decoding, in each layer (host, per request)."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from vlcache_jax.common.checks import check_flags, check_whole, is_a, short
from vlcache_jax.compress.budgets import layer_shares, pyramid, whole
from vlcache_jax.compress.scores import Drawn, Earliest, Normalized, PooledScores, Received, Scores
from vlcache_jax.inputs.layout import Layout

_log = logging.getLogger(__name__)
_WHOLE = int, np.integer
_ROWS = 50  # observed of a prompt without images, as in VL-Cache's benchmarks


@runtime_checkable
class Compressor(Protocol):
    """How a prompt's K, V are compressed before its answer is decoded.

    What its methods raise, or give that is not as it should be, is the error of the one request.

    Attributes:
      name: in reports; as `parse.parse_compressor` takes it, where there is such a word.
      alpha: the share of the prompt's K, V to be kept; 1 keeps all, and nothing has to be observed.
      p: attention below p x the maximum of its row counts as zero in gamma; None: `counts` does without gamma.
      scores: what tokens outside the window are ranked by. Programs are compiled for it, and not for the rest.
    """

    @property
    def name(self) -> str: ...

    @property
    def alpha(self) -> float: ...

    @property
    def p(self) -> float | None: ...

    @property
    def scores(self) -> Scores: ...

    def observed(self, layout: Layout) -> int:
        """How many of the prompt's last rows are observed, 0 to all."""

    def counts(self, length: int, gamma: npt.NDArray[np.float64] | None, layers: int) -> tuple[int, ...]:
        """Tokens that each layer keeps of `length`, the same number for all its heads, 1 to all.

        Gamma is `budgets.sparsity`. Where it is not known yet, None, the counts are an estimate, unless `p` is None or
        alpha is 1.
        """

    def window(self, count: int) -> int:
        """How many of `count` kept tokens are the prompt's last ones, 0 to all."""


@dataclass(frozen=True, kw_only=True)
class _Policy:
    """What the policies share, but for what they say otherwise.

    No rows are observed, and all layers have an equal budget, of which a tenth are the prompt's last tokens.

    Attributes:
      alpha: the share of the prompt's K, V to be kept, above 0 and at most 1.
      granularity: "kv_head": each KV head keeps tokens of its own; "layer": all heads of a layer keep the same.

    Raises:
      ValueError: one is not such.
    """

    alpha: float = dataclasses.field(kw_only=False)
    granularity: str = "kv_head"
    word: ClassVar[str]

    def __post_init__(self) -> None:
        if not is_a(self.alpha, (int, float)) or not 0 < self.alpha <= 1:
            raise ValueError(f"alpha of compress must be a number above 0 and at most 1, got {short(self.alpha)}")
        if self.granularity not in ("kv_head", "layer"):
            raise ValueError(f"granularity of compress must be kv_head or layer, got {short(self.granularity)}")

    @property
    def name(self) -> str:
        """What stands for it as text, and options that are not the usual ones."""
        own = [(field.name, getattr(self, field.name), field.default) for field in dataclasses.fields(self)[1:]]
        options = ", ".join(f"{name}={value}" for name, value, usual in own if value != usual)
        return f"{self.word}-{self.alpha:g}{options and f' ({options})'}"

    @property
    def p(self) -> float | None:
        return None

    @property
    def scores(self) -> Scores:
        return Received(self.granularity)

    def observed(self, layout: Layout) -> int:
        return 0

    def counts(self, length: int, gamma: npt.NDArray[np.float64] | None, layers: int) -> tuple[int, ...]:
        return whole([self.alpha * length] * layers, length)

    def window(self, count: int) -> int:
        return max(1, count // 10)


@dataclass(frozen=True, kw_only=True)
class PostVision(_Policy):
    """By what the text behind the last image looks at: VL-Cache's scores with equal budgets, our own."""

    word: ClassVar[str] = "postvision"

    def observed(self, layout: Layout) -> int:
        """The rows behind the last image, at least the last one; of a prompt without images the last `_ROWS`."""
        if not layout.images:
            return min(len(layout), _ROWS)
        return max(len(layout) - layout.images[-1].stop, 1)


@dataclass(frozen=True, kw_only=True)
class VLCache(PostVision):
    """By what the text behind the last image looks at, more in layers of denser attention (VL-Cache).

    Attributes:
      p: attention below p x the maximum of its row counts as zero in a layer's sparsity.
      refill: whether all of alpha is given out, where bounds on layers' budgets leave some; see `budgets.layer_shares`.
    """

    p: float = 0.01
    refill: bool = False
    word: ClassVar[str] = "vl-cache"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flags(refill=self.refill)
        if not is_a(self.p, (int, float)) or not 0 < self.p <= 1:
            raise ValueError(f"p of compress must be a number above 0 and at most 1, got {short(self.p)}")

    def counts(self, length: int, gamma: npt.NDArray[np.float64] | None, layers: int) -> tuple[int, ...]:
        if gamma is None or self.alpha == 1:
            return super().counts(length, gamma, layers)
        return whole(layer_shares(gamma, self.alpha, refill=self.refill) * length, length)


@dataclass(frozen=True, kw_only=True)
class SnapKV(_Policy):
    """By what the last rows look at, each token with its neighbours (SnapKV).

    Attributes:
      rows: that are observed.
      pooling: tokens that a mean is over, an odd number.
    """

    rows: int = 32
    pooling: int = 5
    word: ClassVar[str] = "snapkv"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("rows of compress", self.rows, 1)
        check_whole("pooling of compress", self.pooling, 1)
        if self.pooling % 2 == 0:
            raise ValueError(f"pooling of compress must be odd, got {self.pooling}")

    @property
    def scores(self) -> Scores:
        return PooledScores(self.granularity, self.pooling)

    def observed(self, layout: Layout) -> int:
        return min(len(layout), self.rows)


@dataclass(frozen=True, kw_only=True)
class PyramidKV(SnapKV):
    """SnapKV with budgets that fall from layer to layer (PyramidKV)."""

    word: ClassVar[str] = "pyramidkv"

    def counts(self, length: int, gamma: npt.NDArray[np.float64] | None, layers: int) -> tuple[int, ...]:
        # The pyramid is of the tokens beside the window, a tenth of the mean budget.
        window = 0.1 * self.alpha * length
        tokens = pyramid(self.alpha * length - window, length - window, layers) + window
        return whole(tokens + 0.5, length)


@dataclass(frozen=True, kw_only=True)
class H2O(_Policy):
    """By what all rows look at (H2O, for the prompt alone). The prompt is computed a second time."""

    word: ClassVar[str] = "h2o"

    def observed(self, layout: Layout) -> int:
        return len(layout)


@dataclass(frozen=True, kw_only=True)
class ZipCache(H2O):
    """By what a row looks at, the mean of all that see the token (ZipCache's scores, for dropping)."""

    word: ClassVar[str] = "zipcache"

    @property
    def scores(self) -> Scores:
        return Normalized(self.granularity)


@dataclass(frozen=True, kw_only=True)
class Streaming(_Policy):
    """The first tokens and the last ones (StreamingLLM, positions as they were).

    Attributes:
      first: how many first ones.
    """

    first: int = 4
    word: ClassVar[str] = "streaming"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("first of compress", self.first, 0)

    @property
    def scores(self) -> Scores:
        return Earliest(self.granularity)

    def window(self, count: int) -> int:
        return max(1, count - self.first)


@dataclass(frozen=True, kw_only=True)
class Random(_Policy):
    """By chance, the same tokens for the same prompt.

    Attributes:
      seed: another one draws others.
    """

    seed: int = 0
    word: ClassVar[str] = "random"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("seed of compress", self.seed, 0, 2**32 - 1)

    @property
    def scores(self) -> Scores:
        return Drawn(self.granularity, self.seed)


def make_counts(
    compressor: Compressor, length: int, gamma: npt.NDArray[np.float64] | None, layers: int
) -> tuple[int, ...]:
    """The compressor's counts, checked.

    Raises:
      ValueError: they are no integers from 1 to `length`, one a layer, or it raised something.
    """
    counts = _told(compressor, lambda: tuple(compressor.counts(length, gamma, layers)), "counts")
    if len(counts) != layers or not all(is_a(count, _WHOLE) and 1 <= count <= length for count in counts):
        raise ValueError(
            f"counts of {compressor.name} must be {layers} integers from 1 to {length}, got {short(counts)}"
        )
    return tuple(map(int, counts))


def make_observed(compressor: Compressor, layout: Layout) -> int:
    """How many rows the compressor observes, checked.

    Raises:
      ValueError: no integer from 0 to all, or it raised something.
    """
    return _number(compressor, lambda: compressor.observed(layout), "observed", len(layout))


def make_windows(compressor: Compressor, counts: tuple[int, ...]) -> tuple[int, ...]:
    """The compressor's window in each layer, of which `counts` are kept, checked.

    Raises:
      ValueError: no integer from 0 to the count, or it raised something.
    """
    return tuple(_number(compressor, functools.partial(compressor.window, n), "window", n) for n in counts)


def _number(compressor: Compressor, ask: Callable[[], Any], what: str, most: int) -> int:
    number = _told(compressor, ask, what)
    if not is_a(number, _WHOLE) or not 0 <= number <= most:
        raise ValueError(f"{what} of {compressor.name} must be an integer from 0 to {most}, got {short(number)}")
    return int(number)


def _told(compressor: Compressor, ask: Callable[[], Any], what: str) -> Any:
    """What a method of somebody's own says, on a thread that serves others, too."""
    try:
        return ask()
    except Exception as error:
        _log.warning("%s of %s failed", what, compressor.name, exc_info=True)
        raise ValueError(f"{what} of {compressor.name} raised {error!r}") from error
