"""URLs of remote tiers: which there are, and what is said of the others."""

from __future__ import annotations

import sys

import pytest

from tests.cache.records import CASES, assert_whole, write
from vlcache_jax.cache.tiers.object_store import ObjectTier
from vlcache_jax.cache.tiers.redis_store import RedisTier
from vlcache_jax.cache.tiers.remote import check_remote, open_remote

GOOD = [
    "s3://bucket",
    "s3://bucket/a/prefix",
    "gs://bucket/prefix/",
    "az://container/prefix",
    "file:///shared/directory",
    "FILE:///shared/a%20directory",
    "redis://host",
    "redis://host:6379/0",
    "redis://:secret@host/",
    "rediss://user:secret@host:6380/1?ssl_ca_certs=/etc/ca.pem",
    "valkey://[::1]:6379/2",
    "valkeys://:sec%2Fret@host",
]
BAD = {
    "": "unknown scheme",
    "bucket": "unknown scheme",
    "/directory": "unknown scheme",
    "s3:bucket": "unknown scheme",
    "http://host/x": "unknown scheme",
    "memory:///": "unknown scheme",
    "memcached://:secret@host": "unknown scheme",
    "unix:///run/redis.sock": "unknown scheme",
    "s3://": "no bucket",
    "gs:///prefix": "no bucket",
    "s3://key:secret@bucket/prefix": "credentials and ports come from the environment",
    "s3://bucket:9000/prefix": "credentials and ports come from the environment",
    "s3://bucket/prefix?secret=secret": "it has a query",
    "s3://bucket/prefix#secret": "it has a fragment",
    "s3://bucket/a prefix": "it has spaces",
    "file://directory": "a directory needs a third slash, as in file:///directory",
    "file:///": "a directory needs a third slash, as in file:///directory",
    "redis://": "no host",
    "redis:///0": "no host",
    "redis://:secret@/0": "no host",
    "redis://:secret@host:port": "its host or port is invalid",
    "redis://:secret@host:99999": "its host or port is invalid",
    "redis://:sec/ret@host": "its host or port is invalid",
    "redis://:sec?ret@host": "its host or port is invalid",
    "redis://:sec#ret@host": "its host or port is invalid",
    "redis://:sec@ret@host/x": "its path must be the number of a database",
    "redis://:secret@[::1": "its host or port is invalid",
    "redis://host/zero": "its path must be the number of a database",
    "redis://host/0/1": "its path must be the number of a database",
    "redis://host?password=secret": "only options that begin with ssl_ are supported",
    "redis://host?socket_timeout=9": "only options that begin with ssl_ are supported",
    "redis://:secret@host\n": "it has spaces",
}


@pytest.mark.parametrize("url", GOOD)
def test_what_is_taken(url):
    check_remote(url)


@pytest.mark.parametrize("url", BAD)
def test_what_is_not(url):
    for check in (check_remote, lambda url: open_remote(url, timeout=1)):
        with pytest.raises(ValueError, match=r"^remote must be a URL such as s3://.*, got '.*': ") as raised:
            check(url)
        assert BAD[url] in str(raised.value)
        for secret in ("sec", "ret"):
            assert secret not in str(raised.value).partition("got ")[2].replace("credentials", "")


@pytest.mark.parametrize("url", [None, 7, b"s3://bucket", ["s3://bucket"]])
def test_what_is_no_text(url):
    with pytest.raises(ValueError, match=r"^remote must be a URL .*, got "):
        check_remote(url)


def test_a_shared_directory(tmp_path):
    tier = open_remote((tmp_path / "a directory").as_uri(), timeout=60, namespace=lambda: pytest.fail("asked"))
    assert isinstance(tier, ObjectTier)
    write(tier, CASES["kv"])
    assert_whole(tier, CASES["kv"])
    tier.close()


@pytest.mark.parametrize(
    ("url", "kind", "is_safe"),
    [("redis://:secret@host:7/2", "Connection", False), ("valkey://:secret@host:7/2", "Connection", False),
     ("rediss://:secret@host:7/2", "SSLConnection", True), ("Valkeys://:secret@host:7/2", "SSLConnection", True)],
)  # fmt: skip
def test_servers(url, kind, is_safe):
    """Nobody is asked before the first use."""
    tier = open_remote(url, timeout=2.5, namespace=lambda: pytest.fail("asked"))
    assert isinstance(tier, RedisTier)
    pool = tier._client.connection_pool
    about = pool.connection_kwargs
    assert pool.connection_class.__name__ == kind
    assert [about[name] for name in ("host", "port", "db", "password")] == ["host", 7, 2, "secret"]
    assert about["socket_timeout"] == about["socket_connect_timeout"] == 2.5
    assert "secret" not in repr(tier)
    tier.close()


@pytest.mark.parametrize(
    ("url", "module", "library"),
    [("s3://bucket", "object_store", "obstore"), ("valkey://host", "redis_store", "redis")],
)
def test_what_is_not_installed_is_named(monkeypatch, url, module, library):
    monkeypatch.delitem(sys.modules, f"vlcache_jax.cache.tiers.{module}")
    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=rf'needs {library}, .*: pip install "vlcache-jax\[remote\]"'):
        open_remote(url, timeout=1)
