"""From what users write as `compress` to a policy."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Hashable
from typing import Any

import jax
import numpy as np

from vlcache_jax.common.checks import check_text, is_a, short
from vlcache_jax.compress.policies import (
    H2O,
    Compressor,
    PostVision,
    PyramidKV,
    Random,
    SnapKV,
    Streaming,
    VLCache,
    ZipCache,
)
from vlcache_jax.compress.scores import KeyStatistics, Scores

_POLICIES = {
    policy.word: policy for policy in (VLCache, PostVision, SnapKV, PyramidKV, H2O, ZipCache, Streaming, Random)
}
_SHAPE = 2, 256
_NAMED = re.compile(rf"({'|'.join(_POLICIES)})-((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)")


def parse_compressor(compress: Any) -> Compressor:
    """The policy that a user's `compress` stands for.

    Args:
      compress: "vl-cache-A", "postvision-A", "snapkv-A", "pyramidkv-A", "h2o-A", "zipcache-A", "streaming-A" or
        "random-A", where A is the share of the prompt's K, V to be kept, above 0 and at most 1; or a `Compressor`.

    Raises:
      ValueError: something else, or an attribute of the `Compressor` is not as it should be.
    """
    if isinstance(compress, Compressor) and not isinstance(compress, type):
        _check(compress)
        return compress
    if isinstance(compress, str) and (match := _NAMED.fullmatch(compress)):
        word, alpha = match[1], float(match[2])
        if not 0 < alpha <= 1:
            raise ValueError(f"compress must be {word}-A with a share A above 0 and at most 1, got {short(compress)}")
        return _POLICIES[word](alpha)
    names = ", ".join(f"{word}-A" for word in _POLICIES)
    usual = [f"{word}-0.1" for word in _POLICIES]
    close = difflib.get_close_matches(compress, usual, 1) if isinstance(compress, str) else []
    raise ValueError(
        f"compress must be one of {names}, where A is the share of the K, V to be kept (0 < A <= 1), or a Compressor, "
        f"got {short(compress)}{f'; is it {close[0]!r}?' if close else ''}"
    )


def _check(compressor: Compressor) -> None:
    """Sees that attributes are as they should be, before an engine works with them."""
    check_text(compressor.name, "name of compress")
    for name, share in (("alpha", compressor.alpha), ("p", 1 if compressor.p is None else compressor.p)):
        if not is_a(share, (int, float)) or not 0 < share <= 1:
            raise ValueError(f"{name} of compress must be a number above 0 and at most 1, got {short(share)}")
    scores = compressor.scores
    if not isinstance(scores, Hashable) or not callable(scores):
        raise ValueError(f"scores of compress must be Scores, which are called and can be hashed, got {short(scores)}")
    shape = _score_shape(scores)
    if shape != _SHAPE:
        raise ValueError(f"scores of compress must be [K, W] as `received` is, {_SHAPE}, got {short(shape)}")


@functools.lru_cache(256)
def _score_shape(scores: Scores) -> Any:
    """Of what it makes of `_SHAPE`."""
    received, number, seed = (
        jax.ShapeDtypeStruct(*one) for one in ((_SHAPE, np.float32), ((), np.int32), ((), np.uint32))
    )
    told = jax.eval_shape(lambda *seen: scores(KeyStatistics(*seen)), received, number, number, seed)
    return getattr(told, "shape", told)
