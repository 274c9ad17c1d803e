"""Opens the tiers outside host memory that a configuration names, the fastest first."""

from __future__ import annotations

from collections.abc import Callable

from vlcache_jax.cache.config import CacheConfig
from vlcache_jax.cache.tier import Tier
from vlcache_jax.cache.tiers.disk import DiskTier

_TIMEOUT = 10.0  # seconds that a store elsewhere may take to answer


def open_tiers(config: CacheConfig, *, fingerprint: Callable[[], str], codec: str) -> list[Tier]:
    """The disk, the peers, the remote store.

    Args:
      fingerprint: of the model; asked for when a record is.
      codec: of K, V, as keys name it.

    Raises:
      ValueError: one cannot be used as it is named. Whether it answers, nobody asks yet.
      ImportError: a library is not installed; the message says which.
    """
    tiers: list[Tier] = []
    timeout = _TIMEOUT if config.timeout is None else config.timeout
    if config.disk is not None:
        tiers.append(DiskTier(config.disk, int(config.disk_bytes), owner_bytes=config.owner_bytes, ttl=config.ttl))
    if config.peers:
        from vlcache_jax.cache.tiers.peer import PeerTier

        tiers += [
            PeerTier(url, token=config.peer_token, timeout=timeout, model=fingerprint, codec=codec)
            for url in config.peers
        ]
    if config.remote is not None:
        from vlcache_jax.cache.tiers.remote import open_remote

        tiers.append(open_remote(config.remote, timeout=timeout, namespace=lambda: fingerprint()[:16]))
    return tiers
