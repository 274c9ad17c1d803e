"""What whoever runs the server may see of the cache, and do to it: `llm.cache`, by JSON."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from vlcache_jax.common.checks import short
from vlcache_jax.image_cache import ImageCache
from vlcache_jax.protocol.schema import ApiError, Schema, check_fields, told
from vlcache_jax.server.tenants import Register

_TEXT: Schema = {"type": ["string", "null"]}
_OWNER: Mapping[str, Schema] = {
    "cache_salt": _TEXT,
    "tenant": told(_TEXT, "Whose; absent: what is kept of requests with the admin key."),
}
_SAME: Mapping[str, Schema] = {
    **_OWNER,
    "mm_processor_kwargs": {"type": ["object", "null"]},
    "shared": {"type": ["boolean", "null"]},
}
_ONE: Mapping[str, Schema] = {"image": {"type": ["string", "object"]}, **_SAME}
VERBS: Mapping[str, Mapping[str, Schema]] = {
    "pin": _ONE,
    "unpin": _ONE,
    "evict": _ONE,
    "delete": _ONE,
    "precompute": {"images": {"type": "array", "minItems": 1, "maxItems": 4096}, "system": _TEXT, **_SAME},
    "release_uuid": {"uuid": {"type": "string", "minLength": 1}, **_OWNER},
}
"""The fields that each takes; the first must be there."""


def apply(cache: ImageCache, register: Register | None, verb: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Does what a body asks; it may take as long as an image takes to compute.

    Args:
      verb: one of `VERBS`.

    Raises:
      ValueError: a field is wrong, or an image cannot be read.
    """
    given = check_fields(body, VERBS[verb], {}, ())
    needed = next(iter(VERBS[verb]))
    if needed not in given:
        raise ApiError(f"{needed} must be there, got none", needed)
    asked, system = given.pop(needed), given.pop("system", None)
    if (tenant := given.pop("tenant", None)) is not None:
        if register is None or tenant not in register.names():
            raise ApiError(f"tenant must be one of this server's, got {short(tenant)}", "tenant")
        if given.get("shared"):
            raise ApiError("tenant must be left out for what is shared", "tenant")
        given["cache_salt"] = register.salts.salt(tenant, given.get("cache_salt"))
    try:
        if verb == "precompute":
            return {"keys": cache.precompute(asked, system, **given)}
        if verb == "release_uuid":
            return {"released": cache.release_uuid(asked, **given)}
        work: Callable[..., int] = getattr(cache, verb)
        return {"records": work(asked, **given)}
    except ValueError as error:
        message = str(error)
        # The message that an image was computed in is none of the client's.
        message = re.sub(r"^images\[\d+\] messages\[0\](?= must)", needed if system is None else "system", message)
        message = re.sub(r"^(images\[\d+\]) messages\[\d+\] content\[0\]", r"\1", message)
        name = re.split(r"\W", message, maxsplit=1)[0]
        raise ApiError(message, name) if name in VERBS[verb] else ApiError(f"{needed}: {message}", needed) from error
