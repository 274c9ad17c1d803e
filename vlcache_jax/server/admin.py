"""Cache administration over HTTP: the methods of `llm.cache` with JSON bodies."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from vlcache_jax.common.checks import short
from vlcache_jax.image_cache import ImageCache
from vlcache_jax.protocol.schema import ApiError, Schema, check_fields, described
from vlcache_jax.server.tenants import Register

_TEXT: Schema = {"type": ["string", "null"]}
_OWNER: Mapping[str, Schema] = {
    "cache_salt": _TEXT,
    "tenant": described(_TEXT, "Tenant that owns the cache entries; default: the entries of the admin key."),
}
_OPTIONS: Mapping[str, Schema] = {
    **_OWNER,
    "mm_processor_kwargs": {"type": ["object", "null"]},
    "shared": {"type": ["boolean", "null"]},
}
_ONE: Mapping[str, Schema] = {"image": {"type": ["string", "object"]}, **_OPTIONS}
VERBS: Mapping[str, Mapping[str, Schema]] = {
    "pin": _ONE,
    "unpin": _ONE,
    "evict": _ONE,
    "delete": _ONE,
    "precompute": {"images": {"type": "array", "minItems": 1, "maxItems": 4096}, "system": _TEXT, **_OPTIONS},
    "release_uuid": {"uuid": {"type": "string", "minLength": 1}, **_OWNER},
}
"""Fields of the body, by operation. The first field is required."""


def apply(cache: ImageCache, register: Register | None, verb: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Run a cache operation. It blocks for as long as the images take to compute.

    Args:
      cache: the image cache of the engine.
      register: the tenants; None if the server has none.
      verb: the operation, one of `VERBS`.
      body: the parsed body of the request.

    Returns:
      The body of the answer: `keys`, `released` or `records`.

    Raises:
      ApiError: a field is wrong, or an image cannot be read.
    """
    given = check_fields(body, VERBS[verb], {}, ())
    needed = next(iter(VERBS[verb]))
    if needed not in given:
        raise ApiError(f"{needed} is required", needed)
    target, system = given.pop(needed), given.pop("system", None)
    if (tenant := given.pop("tenant", None)) is not None:
        if register is None or tenant not in register.names():
            raise ApiError(f"tenant must name a tenant of the key file (--api-keys), got {short(tenant)}", "tenant")
        if given.get("shared"):
            raise ApiError("tenant and shared are mutually exclusive, got both", "tenant")
        given["cache_salt"] = register.salts.salt(tenant, given.get("cache_salt"))
    try:
        if verb == "precompute":
            return {"keys": cache.precompute(target, system, **given)}
        if verb == "release_uuid":
            return {"released": cache.release_uuid(target, **given)}
        work: Callable[..., int] = getattr(cache, verb)
        return {"records": work(target, **given)}
    except ValueError as error:
        message = str(error)
        # `precompute` wraps each image in a message, which the client has not sent: its index is removed.
        message = re.sub(r"^images\[\d+\] messages\[0\](?= must)", needed if system is None else "system", message)
        message = re.sub(r"^(images\[\d+\]) messages\[\d+\] content\[0\]", r"\1", message)
        name = re.split(r"\W", message, maxsplit=1)[0]
        raise ApiError(message, name) if name in VERBS[verb] else ApiError(f"{needed}: {message}", needed) from error
