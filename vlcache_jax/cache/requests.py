"""Lists of images that came together in a request, by their request keys."""

from __future__ import annotations

from collections.abc import Sequence

from vlcache_jax.cache.bounded import Bounded

_MOST = 4096  # lists; a hundred bytes an image


class Requests:
    """Remembers the last requests. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._known = Bounded[tuple[str, tuple[str, ...]]](_MOST)  # request key -> owner, entry keys

    def remember(self, key: str, entries: Sequence[str], owner: str) -> bool:
        """Notes a request's list of images; whether the same list was there before."""
        return self._known.put(key, (owner, tuple(entries)))

    def forget(self, key: str) -> None:
        self._known.pop(key)

    def find(self, key: str, owner: str) -> tuple[str, ...] | None:
        """The entry keys of a request's images, by its request key; None if it is not this owner's."""
        found, entries = self._known.get(key) or (None, ())
        return entries if found == owner else None

    def clear(self) -> None:
        self._known.clear()
