"""Parsing of the argument `compress` into a policy."""

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
    """Return the policy for the argument `compress`.

    Args:
      compress: "vl-cache-A", "postvision-A", "snapkv-A", "pyramidkv-A", "h2o-A", "zipcache-A", "streaming-A" or
        "random-A", where A is the fraction of the prompt's KV to keep, above 0 and at most 1; or a `Compressor`.

    Raises:
      ValueError: it is something else, or an attribute of the `Compressor` is invalid.
    """
    if isinstance(compress, Compressor) and not isinstance(compress, type):
        _check(compress)
        return compress
    if isinstance(compress, str) and (match := _NAMED.fullmatch(compress)):
        word, alpha = match[1], float(match[2])
        if not 0 < alpha <= 1:
            raise ValueError(f"compress must be {word}-A with a fraction A (0 < A <= 1), got {short(compress)}")
        return _POLICIES[word](alpha)
    names = ", ".join(f"{word}-A" for word in _POLICIES)
    usual = [f"{word}-0.1" for word in _POLICIES]
    close = difflib.get_close_matches(compress, usual, 1) if isinstance(compress, str) else []
    raise ValueError(
        f"compress must be one of {names}, where A is the fraction of KV to keep (0 < A <= 1), or a Compressor, "
        f"got {short(compress)}{f'; did you mean {close[0]!r}?' if close else ''}"
    )


def _check(compressor: Compressor) -> None:
    """Check the attributes of a compressor before an engine uses it."""
    check_text(compressor.name, "name of compress")
    for name, share in (("alpha", compressor.alpha), ("p", 1 if compressor.p is None else compressor.p)):
        if not is_a(share, (int, float)) or not 0 < share <= 1:
            raise ValueError(f"{name} of compress must be a number above 0 and at most 1, got {short(share)}")
    scores = compressor.scores
    if not isinstance(scores, Hashable) or not callable(scores):
        raise ValueError(f"scores of compress must be callable and hashable, got {short(scores)}")
    shape = _score_shape(scores)
    if shape != _SHAPE:
        raise ValueError(f"scores of compress must return the shape [K, W] of `received`, {_SHAPE}, got {short(shape)}")


@functools.lru_cache(256)
def _score_shape(scores: Scores) -> Any:
    """Return the output shape for keys of shape `_SHAPE`."""
    received, number, seed = (
        jax.ShapeDtypeStruct(*one) for one in ((_SHAPE, np.float32), ((), np.int32), ((), np.uint32))
    )
    output = jax.eval_shape(lambda *keys: scores(KeyStatistics(*keys)), received, number, number, seed)
    return getattr(output, "shape", output)
