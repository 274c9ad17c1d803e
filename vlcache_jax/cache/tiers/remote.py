"""Choice of the remote tier by URL."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Callable
from typing import Any

from vlcache_jax.cache.record import Tier
from vlcache_jax.common.checks import short

_OBJECTS = ("s3", "gs", "az")
_SERVERS = {
    "redis": "redis",
    "rediss": "rediss",
    "valkey": "redis",
    "valkeys": "rediss",
}  # schemes, and their names in redis-py
_EXPECTED = (
    "remote must be a URL such as s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, file:///directory, "
    "redis://host:6379/0 or valkey://host (rediss:// and valkeys:// with TLS)"
)


def open_remote(url: str, *, timeout: float, namespace: str | Callable[[], str] | None = None) -> Tier:
    """Return the tier for a URL. Servers are not contacted yet; a directory is created.

    Args:
      url: see `check_remote`.
      timeout: time limit of each request in seconds.
      namespace: see `RedisTier`; object stores have none.

    Raises:
      ValueError: the URL is invalid, or the environment lacks settings of the store.
      ImportError: a required library is not installed.
    """
    check_remote(url)
    scheme, _, rest = url.partition(":")
    scheme = scheme.lower()
    try:
        if scheme in _SERVERS:
            from vlcache_jax.cache.tiers.redis_store import RedisTier

            return RedisTier(f"{_SERVERS[scheme]}:{rest}", timeout=timeout, namespace=namespace)
        from vlcache_jax.cache.tiers.object_store import ObjectTier

        return ObjectTier(f"{scheme}:{rest}", timeout=timeout)
    except ImportError as error:
        raise ImportError(
            f'remote {scheme}:// needs {error.name}, which is not installed: pip install "vlcache-jax[remote]"',
            name=error.name,
        ) from error


def check_remote(url: Any) -> None:
    """Check that a URL names a remote tier, without network access.

    Raises:
      ValueError: it does not. The message hides passwords.
    """
    if not isinstance(url, str):
        raise ValueError(f"{_EXPECTED}, got {short(url)}")
    if reason := _fault(url):
        raise ValueError(f"{_EXPECTED}, got {masked(url)!r}: {reason}")


def masked(url: str) -> str:
    """Return a URL with credentials, query and fragment replaced by "***"."""
    before, at, after = url.rpartition("@")
    if at:
        scheme = re.match(r"[A-Za-z0-9+.-]*:(//)?", before)
        before = f"{scheme[0] if scheme else ''}***"
    return re.sub(r"(?s)([?#]).*", r"\1***", f"{before}{at}{after}")


def _fault(url: str) -> str | None:
    """Return the reason why a URL is invalid; None: it is valid."""
    if re.search(r"[\s\x00-\x1f\x7f]", url) or not url.isprintable():
        return "it has spaces or unprintable characters"
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return "its host or port is invalid"
    if "://" not in url or parts.scheme not in (*_OBJECTS, *_SERVERS, "file"):
        return "unknown scheme"
    if parts.fragment or "#" in url:
        return "it has a fragment"
    if parts.scheme in _SERVERS:
        return _server_fault(parts, host)
    if parts.query or "?" in url:
        return "it has a query"
    if parts.scheme == "file":
        if parts.netloc or not parts.path.strip("/"):
            return "a directory needs a third slash, as in file:///directory"
        return None
    if not parts.netloc:
        return "no bucket"
    return "credentials and ports come from the environment" if "@" in parts.netloc or port is not None else None


def _server_fault(parts: urllib.parse.SplitResult, host: str | None) -> str | None:
    if not host:
        return "no host"
    if not re.fullmatch(r"(/\d{0,9})?", parts.path):
        return "its path must be the number of a database"
    if any(not name.startswith("ssl_") for name, _ in urllib.parse.parse_qsl(parts.query, keep_blank_values=True)):
        return "only options that begin with ssl_ are supported"
    return None
