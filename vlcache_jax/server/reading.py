"""From a body to what it asks: parsed, checked and turned into settings in threads, for all routes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vlcache_jax.fields import AT_ONCE
from vlcache_jax.protocol.values import ApiError, read_object
from vlcache_jax.server.tenants import Tenant

# A large body may take seconds, for which small ones must not wait.
_large = ThreadPoolExecutor(2, "vlcache-bodies")


async def read_off_loop[R](read: Callable[[dict[str, Any], Tenant | None], R], body: bytes, tenant: Tenant | None) -> R:
    """What a body asks. The event loop serves others meanwhile.

    Args:
      read: makes a request of an object, in a thread.
      tenant: that sent it.

    Raises:
      ApiError: the body is no object of JSON; or what `read` raises.
    """

    def work() -> R:
        return read(parse_object(body), tenant)

    return await asyncio.get_running_loop().run_in_executor(_large if len(body) > AT_ONCE else None, work)


def parse_object(body: bytes) -> dict[str, Any]:
    """Raises an ApiError unless it is an object of JSON."""
    try:
        return read_object(body)
    except ValueError as error:
        told = ApiError(f"body {error}")
    raise told  # apart from the one that has the text


def check_allowed_tokens(given: Mapping[str, Any], vocab_size: int) -> None:
    """Raises an ApiError if more tokens are allowed than the vocabulary has, before one of them is looked at."""
    allowed = given.get("allowed_token_ids")
    if isinstance(allowed, list) and len(allowed) > vocab_size:
        told = f"allowed_token_ids must have at most the vocabulary's {vocab_size} tokens, got {len(allowed)}"
        raise ApiError(told, "allowed_token_ids")
