"""How much the records of one salt may take, or of one tenant whatever the salts of its requests."""

from __future__ import annotations

from collections.abc import Mapping

from vlcache_jax.cache.keys import NO_TENANTS, OWNER_DIGITS


class Shares:
    """Bytes that the records of each payer take at most, in host memory and on the disk each.

    Args:
      usual: of who has no share of its own; None: no limit.
    """

    def __init__(self, usual: int | None = None):
        self._usual = usual
        self._own: Mapping[str, int | None] = {}

    def set(self, own: Mapping[str, int | None]) -> None:
        """Gives some payers their own shares, and takes from all others what they had. What is kept stays until room is
        made."""
        self._own = dict(own)

    def of(self, owner: str) -> int | None:
        """Bytes that the payer of an owner's records has; None: no limit."""
        return None if owner in NO_TENANTS else self._own.get(payer(owner), self._usual)


def payer(owner: str) -> str:
    """In whose share an owner's records count: itself, or its tenant."""
    return owner[: OWNER_DIGITS // 2]
