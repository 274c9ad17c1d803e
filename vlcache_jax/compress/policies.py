"""Compression policies: selection of the prompt tokens that each layer keeps for decoding (host, per request)."""

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
_ROWS = 50  # observed tokens of a prompt without images, as in VL-Cache's benchmarks


@runtime_checkable
class Compressor(Protocol):
    """Policy that compresses a prompt's KV before decoding.

    If a method raises or returns an invalid value, only the request fails.

    Attributes:
      name: name in reports; for built-in policies the string that `parse.parse_compressor` accepts.
      alpha: fraction of the prompt's KV to keep; 1 keeps all, and nothing has to be observed.
      p: attention below p times the maximum of its row counts as zero in gamma; None: `counts` does not need gamma.
      scores: ranking of the tokens outside the window. Programs are compiled for it, but not for the other attributes.
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
        """Return the number of observed tokens at the end of the prompt, 0 to all."""

    def counts(self, length: int, gamma: npt.NDArray[np.float64] | None, layers: int) -> tuple[int, ...]:
        """Return the number of kept tokens per layer, 1 to `length`, equal for all heads of a layer.

        Args:
          length: tokens of the prompt.
          gamma: sparsity [L], see `budgets.sparsity`; None: not known yet. The counts are then an estimate, unless `p`
            is None or alpha is 1.
          layers: number of layers L.
        """

    def window(self, count: int) -> int:
        """Return how many of `count` kept tokens are the last ones of the prompt, 0 to all."""


@dataclass(frozen=True, kw_only=True)
class _Policy:
    """Defaults of the policies.

    No tokens are observed, and all layers have an equal budget, of which a tenth are the prompt's last tokens.

    Attributes:
      alpha: fraction of the prompt's KV to keep, above 0 and at most 1.
      granularity: "kv_head": each KV head keeps tokens of its own; "layer": all heads of a layer keep the same tokens.

    Raises:
      ValueError: an attribute is invalid.
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
        """Policy as text, such as "vl-cache-0.1", followed by the options that differ from their defaults."""
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
    """Policy that ranks by the attention of the text after the last image: VL-Cache's scores with equal budgets."""

    word: ClassVar[str] = "postvision"

    def observed(self, layout: Layout) -> int:
        """Return the number of tokens after the last image, at least 1; without images up to the last 50."""
        if not layout.images:
            return min(len(layout), _ROWS)
        return max(len(layout) - layout.images[-1].stop, 1)


@dataclass(frozen=True, kw_only=True)
class VLCache(PostVision):
    """Policy that ranks by the attention of the text after the last image and keeps more in dense layers (VL-Cache).

    Attributes:
      p: attention below p times the maximum of its row counts as zero in a layer's sparsity.
      refill: redistribute the part of alpha that bounds on the layers' budgets leave; see `budgets.layer_shares`.
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
    """Policy that ranks by the attention of the last tokens, averaged over neighboring keys (SnapKV).

    Attributes:
      rows: number of observed tokens.
      pooling: number of keys in an average, odd.
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
        # The pyramid distributes the tokens outside the window. The window is a tenth of the mean budget.
        window = 0.1 * self.alpha * length
        tokens = pyramid(self.alpha * length - window, length - window, layers) + window
        return whole(tokens + 0.5, length)


@dataclass(frozen=True, kw_only=True)
class H2O(_Policy):
    """Policy that ranks by the attention of all prompt tokens (H2O without decoding). The prompt is computed twice."""

    word: ClassVar[str] = "h2o"

    def observed(self, layout: Layout) -> int:
        return len(layout)


@dataclass(frozen=True, kw_only=True)
class ZipCache(H2O):
    """Policy that ranks by the mean attention of the tokens that see a key (the scores of ZipCache, used to drop
    tokens).
    """

    word: ClassVar[str] = "zipcache"

    @property
    def scores(self) -> Scores:
        return Normalized(self.granularity)


@dataclass(frozen=True, kw_only=True)
class Streaming(_Policy):
    """Policy that keeps the first and the last tokens (StreamingLLM, with unchanged positions).

    Attributes:
      first: number of first tokens.
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
    """Policy that keeps random tokens, the same ones for the same prompt.

    Attributes:
      seed: random seed.
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
    """Return the compressor's counts, checked.

    Raises:
      ValueError: they are not one integer from 1 to `length` per layer, or the method raised an exception.
    """
    counts = _call(compressor, lambda: tuple(compressor.counts(length, gamma, layers)), "counts")
    if len(counts) != layers or not all(is_a(count, _WHOLE) and 1 <= count <= length for count in counts):
        raise ValueError(
            f"counts of {compressor.name} must be {layers} integers from 1 to {length}, got {short(counts)}"
        )
    return tuple(map(int, counts))


def make_observed(compressor: Compressor, layout: Layout) -> int:
    """Return the number of tokens that the compressor observes, checked.

    Raises:
      ValueError: it is not an integer from 0 to the prompt's length, or the method raised an exception.
    """
    return _number(compressor, lambda: compressor.observed(layout), "observed", len(layout))


def make_windows(compressor: Compressor, counts: tuple[int, ...]) -> tuple[int, ...]:
    """Return the compressor's window in each layer, checked.

    Args:
      compressor: the policy.
      counts: kept tokens per layer.

    Raises:
      ValueError: a window is not an integer from 0 to the layer's count, or the method raised an exception.
    """
    return tuple(_number(compressor, functools.partial(compressor.window, n), "window", n) for n in counts)


def _number(compressor: Compressor, method: Callable[[], Any], what: str, maximum: int) -> int:
    number = _call(compressor, method, what)
    if not is_a(number, _WHOLE) or not 0 <= number <= maximum:
        raise ValueError(f"{what} of {compressor.name} must be an integer from 0 to {maximum}, got {short(number)}")
    return int(number)


def _call(compressor: Compressor, method: Callable[[], Any], what: str) -> Any:
    """Call a method of a user's policy; its exceptions must not stop this thread, which serves other requests too."""
    try:
        return method()
    except Exception as error:
        _log.warning("%s of %s failed", what, compressor.name, exc_info=True)
        raise ValueError(f"{what} of {compressor.name} raised {error!r}") from error
