"""What whoever runs the server may see of the cache, and do to it: `llm.cache`, by JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vlcache_jax.image_cache import ImageCache
from vlcache_jax.protocol.fields import check_fields
from vlcache_jax.protocol.values import ApiError, Schema

_TEXT: Schema = {"type": ["string", "null"]}
_SAME: Mapping[str, Schema] = {
    "cache_salt": _TEXT,
    "mm_processor_kwargs": {"type": ["object", "null"]},
    "shared": {"type": ["boolean", "null"]},
}
_ONE: Mapping[str, Schema] = {"image": {"type": ["string", "object"]}, **_SAME}
VERBS: Mapping[str, Mapping[str, Schema]] = {
    "pin": _ONE,
    "unpin": _ONE,
    "evict": _ONE,
    "delete": _ONE,
    "precompute": {"images": {"type": "array", "minItems": 1}, "system": _TEXT, **_SAME},
}
"""The fields that each takes."""


def apply(cache: ImageCache, verb: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Does what a body asks; it may take as long as an image takes to compute.

    Args:
      verb: one of `VERBS`.

    Raises:
      ValueError: a field is wrong, or an image cannot be read.
    """
    given = check_fields(body, VERBS[verb], {}, ())
    needed = "images" if verb == "precompute" else "image"
    if needed not in given:
        raise ApiError(f"{needed} must be there, got none", needed)
    images = given.pop(needed)
    if verb == "precompute":
        return {"keys": cache.precompute(images, given.pop("system", None), **given)}
    work: Callable[..., int] = getattr(cache, verb)
    return {"records": work(images, **given)}
