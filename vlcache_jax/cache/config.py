"""Options of the image cache, and the tiers that they open."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from vlcache_jax.cache.keys import Quotas
from vlcache_jax.cache.record import DONOR_RULES, Tier
from vlcache_jax.cache.tiers.discovered_peers import DiscoveredPeerTier
from vlcache_jax.cache.tiers.disk import DiskTier
from vlcache_jax.cache.tiers.peer import PeerTier, check_peers
from vlcache_jax.cache.tiers.remote import check_remote, masked, open_remote
from vlcache_jax.common.checks import SIZES, check_flags, check_text, check_whole, is_a, parse_bytes
from vlcache_jax.common.renamed import renamed

CODECS = tuple(SIZES)
LOADS = ("auto", "kv", "encoder", "none")
ADMISSIONS = ("always", "second_use")
_RENAMED = {
    "neighbours": "discovered_peers",
    "salt_bytes": "max_bytes_per_salt",
    "variants": "max_contexts_per_image",
}
_RENAMED_VALUES = {"load": {"link": "kv", "compute": "none"}, "admit": {"second": "second_use"}}
_TIMEOUT = 10.0  # seconds that a store elsewhere may take to answer
_STAGING = 2**31  # bytes of host memory for records that pass through, where none are kept


@renamed(_RENAMED, _RENAMED_VALUES)
@dataclass(frozen=True)
class CacheConfig:
    """Options of the image cache.

    Attributes:
      host_bytes: host memory for cache entries; 0 stores none; with `disk`, `remote` or `peers`, entries then only pass
        through, up to 2 GiB at a time.
      states_bytes: part of `host_bytes` for states of models with states (Qwen3.5 to 3.8): KV of images with the states
        after them, and snapshots evicted from the device; 0 stores neither; by default half of `host_bytes`.
      device_bytes: device memory for copies of the cache entries computed or loaded last; reserved before the KV pool;
        a hit copies nothing over the bus; no gain on a CPU; rounded down like the KV pool.
      disk: directory for cache entries that outlive the process; several processes may use it; written in the
        background, read if host memory does not have an image.
      disk_bytes: maximum size of the directory, for all processes that use it.
      remote: store that several machines share: `s3://`, `gs://`, `az://`, `file://`, `redis://`, `rediss://`,
        `valkey://`; written in the background, read if host memory and disk do not have an image.
      peers: URLs of `vlcache cache serve` on other machines, such as http://host:7070; read after the disk and before
        `remote`.
      peer_token: token that the peers require.
      discovered_peers: returns the URLs of peers that change at run time; called before each lookup; see `RecentPeers`.
      admit: images to write to `disk` and `remote`: "always": all images; "second_use": images that are requested a
        second time.
      donors: contexts from which approximate reuse links KV: "neutral": those with nothing of another caller before the
        image; "own": also those that the same caller used before; "any": all, in this order of preference; by default
        "neutral" with `remote`, `peers` or a server, else "any".
      neutral_systems: system messages of the operator; the neutral context of requests with one of them is after it,
        and that of other requests is without a system message.
      ttl: maximum age in seconds of cache entries and KV blocks that are used, from the time of computation; in
        `remote` from the time of the write; by default no limit.
      max_bytes_per_salt: maximum size of the entries of one `cache_salt`, in host memory and on the disk each; calls
        without a salt have no such limit; by default no limit.
      timeout: maximum wait in seconds for an entry from a store or a lookup on the disk; by default 10, and for entries
        the time to compute the image, at least 1, if `vlcache calibrate` has measured it.
      max_contexts_per_image: maximum number of contexts for which the KV of one image is stored; by default as many as
        fit.
      trust_uuids: use the `multi_modal_uuids` of a caller as the identity of images, without looking at them; otherwise
        a `uuid` stays bound to its first image, and another image with it raises an error.
      codec: format of stored KV: "auto" (the model's dtype), "int8" (8.25 bits per value) or "int4" (5 bits; heads of
        width 128); "int8" and "int4" serve approximate reuse only.
      pinned_share: fraction of `host_bytes` that `pin` can hold.
      load: part of cached images to load: "kv", "encoder" (the encoder output, and recompute the KV), "none" (recompute
        both), or "auto" (the fastest of them by `vlcache calibrate`, else "kv"); recomputed images are stored in each
        case.

    Raises:
      ValueError: a value out of range.
    """

    host_bytes: int | str = "4GiB"
    states_bytes: int | str | None = None
    device_bytes: int | str = 0
    disk: str | os.PathLike[str] | None = None
    disk_bytes: int | str = "64GiB"
    remote: str | None = field(default=None, repr=False)  # it may have a password
    peers: Sequence[str] = ()
    peer_token: str | None = field(default=None, repr=False)
    discovered_peers: Callable[[], Collection[str]] | None = field(default=None, repr=False)
    admit: str = "always"
    donors: str | None = None
    neutral_systems: Sequence[str] = ()
    ttl: float | None = None
    max_bytes_per_salt: int | str | None = None
    timeout: float | None = None
    max_contexts_per_image: int | None = None
    trust_uuids: bool = False
    codec: str = "auto"
    pinned_share: float = 0.5
    load: str = "auto"

    def __post_init__(self) -> None:
        # How much is kept here.
        for name in ("host_bytes", "device_bytes", "disk_bytes"):
            object.__setattr__(self, name, parse_bytes(getattr(self, name), name))
        for name in ("states_bytes", "max_bytes_per_salt"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, parse_bytes(getattr(self, name), name))
        # Where else.
        if not (self.disk is None or isinstance(self.disk, (str, os.PathLike))) or self.disk == "":
            raise ValueError(f"disk must be the path of a directory or None, got {self.disk!r}")
        if isinstance(self.disk, str) and "://" in self.disk:
            raise ValueError(
                f"disk must be the path of a directory, got a URL, which `remote` takes: {masked(self.disk)}"
            )
        if isinstance(self.peers, str) or not isinstance(self.peers, Sequence):
            raise ValueError(f"peers must be a list of URLs, got {type(self.peers).__name__}")
        object.__setattr__(self, "peers", tuple(self.peers))
        check_peers(self.peers, self.peer_token)
        if not (self.discovered_peers is None or callable(self.discovered_peers)):
            raise ValueError(f"discovered_peers must be a function or None, got {type(self.discovered_peers).__name__}")
        if self.remote is not None:
            check_remote(self.remote)
        # By which rules.
        if self.admit not in ADMISSIONS:
            raise ValueError(f"admit must be one of {ADMISSIONS}, got {self.admit!r}")
        if self.donors not in (None, *DONOR_RULES):
            raise ValueError(f"donors must be one of {DONOR_RULES} or None, got {self.donors!r}")
        if isinstance(self.neutral_systems, str) or not isinstance(self.neutral_systems, Sequence):
            raise ValueError(f"neutral_systems must be a list of texts, got {type(self.neutral_systems).__name__}")
        for system in self.neutral_systems:
            check_text(system, "neutral_systems", "a list of texts")
        object.__setattr__(self, "neutral_systems", tuple(self.neutral_systems))
        for name in ("ttl", "timeout"):
            seconds = getattr(self, name)
            if not (seconds is None or (is_a(seconds, (int, float)) and 0 < seconds < math.inf)):
                raise ValueError(f"{name} must be a positive number of seconds or None, got {seconds!r}")
        check_whole("max_contexts_per_image", self.max_contexts_per_image, 1, or_none=True)
        check_flags(trust_uuids=self.trust_uuids)
        names = ("auto", *CODECS)
        if self.codec not in names:
            raise ValueError(f"codec must be one of {names}, got {self.codec!r}")
        if not (is_a(self.pinned_share, (int, float)) and 0 <= self.pinned_share <= 1):
            raise ValueError(f"pinned_share must be a number from 0 to 1, got {self.pinned_share!r}")
        if self.load not in LOADS:
            raise ValueError(f"load must be one of {LOADS}, got {self.load!r}")

    @functools.cached_property
    def passes_on(self) -> bool:
        """True if cache entries only pass through host memory on their way to and from other tiers."""
        outside = self.disk, self.remote, self.discovered_peers
        return not self.host_bytes and (bool(self.peers) or any(one is not None for one in outside))

    @functools.cached_property
    def donor_rule(self) -> str:
        """The value of `donors`, or its default: other machines may have other callers."""
        has_others = bool(self.peers) or self.remote is not None or self.discovered_peers is not None
        return self.donors or ("neutral" if has_others else "any")

    def narrower_rule(self, donors: str) -> str:
        """Return the rule of a request that asks for one.

        Raises:
          ValueError: `donors` is no rule, or allows more than that of the engine.
        """
        allowed = DONOR_RULES[DONOR_RULES.index(self.donor_rule) :]
        if donors not in allowed:
            known = " or ".join(allowed)
            raise ValueError(f"donors must be {known} in an engine with donors={self.donor_rule!r}, got {donors!r}")
        return donors

    @property
    def memory_bytes(self) -> int:
        """Bytes of host memory for cache entries."""
        return _STAGING if self.passes_on else int(self.host_bytes)

    @property
    def memory_for_states(self) -> int:
        """Bytes of this memory for KV with states."""
        return self.memory_bytes // 2 if self.states_bytes is None else min(int(self.states_bytes), self.memory_bytes)

    @property
    def owner_bytes(self) -> int | None:
        """See `max_bytes_per_salt`."""
        return None if self.max_bytes_per_salt is None else int(self.max_bytes_per_salt)


def open_tiers(config: CacheConfig, shares: Quotas, *, fingerprint: Callable[[], str], codec: str) -> list[Tier]:
    """The tiers outside host memory that a configuration names, the fastest first: disk, peers, remote store.

    Args:
      shares: of the disk, of those who pay for records.
      fingerprint: of the model; asked for when a record is.
      codec: of K, V, as keys name it.

    Raises:
      ValueError: one cannot be used as it is named. Whether it answers, nobody asks yet.
      ImportError: a library is not installed; the message says which.
    """
    tiers: list[Tier] = []
    timeout = _TIMEOUT if config.timeout is None else config.timeout
    if config.disk is not None:
        tiers.append(DiskTier(config.disk, int(config.disk_bytes), shares=shares, ttl=config.ttl))

    def connect(url: str) -> PeerTier:
        return PeerTier(url, token=config.peer_token, timeout=timeout, model=fingerprint, codec=codec)

    tiers += map(connect, config.peers)
    if config.discovered_peers is not None:
        tiers.append(DiscoveredPeerTier(config.discovered_peers, connect))
    if config.remote is not None:
        tiers.append(open_remote(config.remote, timeout=timeout, namespace=lambda: fingerprint()[:16]))
    return tiers
