"""From what users write as `compress` to a policy."""

from __future__ import annotations

import difflib
import re
from typing import Any

from vlcache_jax.checks import short
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

_POLICIES = {
    policy.word: policy for policy in (VLCache, PostVision, SnapKV, PyramidKV, H2O, ZipCache, Streaming, Random)
}
_NAMED = re.compile(rf"({'|'.join(_POLICIES)})-((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)")


def parse_compressor(compress: Any) -> Compressor:
    """The policy that a user's `compress` stands for.

    Args:
      compress: "vl-cache-A", "postvision-A", "snapkv-A", "pyramidkv-A", "h2o-A", "zipcache-A", "streaming-A" or
        "random-A", where A is the share of the prompt's K, V to be kept, above 0 and at most 1; or a `Compressor`.

    Raises:
      ValueError: something else.
    """
    if isinstance(compress, Compressor) and not isinstance(compress, type):
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
