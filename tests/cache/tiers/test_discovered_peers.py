"""Peers that come and go: whoever is named when a record is asked for."""

from __future__ import annotations

import pickle

import pytest

from tests.cache.records import key, make, verified_read
from vlcache_jax.cache.config import CacheConfig
from vlcache_jax.cache.record import EntryGoneError, Found, TierError
from vlcache_jax.cache.tiers.discovered_peers import DiscoveredPeerTier, RecentPeers

OLD, NEW = make(context=key(7)), make(context=key(8))


class Peer:
    """A peer that holds records, or cannot be reached."""

    def __init__(self, url, records):
        self.url, self.records, self.is_closed = url, records, False

    def find(self, entry):
        if self.records is None:
            raise TierError(f"{self.url}: refused")
        return [Found(record.meta, at) for record, at in self.records if record.meta.entry == entry]

    def read(self, meta, parts, place):
        [record] = [record for record, _ in self.records if record.meta.name == meta.name]
        for part in parts:
            yield part, record.parts[part]

    def close(self):
        self.is_closed = True


@pytest.fixture
def tier():
    """(what each address holds) -> the tier, whom it knows, and who they are."""
    opened = []

    def open_tier(**held):
        peers = {}
        holders = RecentPeers()

        def connect(url):
            peers[url] = Peer(url, held[url])
            return peers[url]

        opened.append(DiscoveredPeerTier(holders, connect))
        return opened[-1], holders, peers

    yield open_tier
    for one in opened:
        one.close()


def test_all_that_are_named_are_asked(tier):
    discovered_peers, holders, _ = tier(a=[], b=None, c=[(OLD, 1.0), (NEW, 2.0)])
    assert discovered_peers.find(OLD.meta.entry) == []  # nobody is named
    holders.note("abc")
    found = discovered_peers.find(OLD.meta.entry)
    assert [(one.meta, one.written) for one in found] == [(OLD.meta, 1.0), (NEW.meta, 2.0)]
    for record in (OLD, NEW):
        verified_read(discovered_peers, record.meta)
    assert discovered_peers.find(key(2)) == []


def test_who_is_not_named_any_more_is_left(tier):
    discovered_peers, holders, peers = tier(a=[(OLD, 1.0)], **{f"p{i}": [] for i in range(16)})
    holders.note(["a"])
    assert discovered_peers.find(OLD.meta.entry)
    holders.note([f"p{i}" for i in range(16)])
    assert "a" not in holders()
    assert discovered_peers.find(OLD.meta.entry) == []
    assert (peers["a"].is_closed, peers["p0"].is_closed) == (True, False)
    holders.note(["p0", "a"])
    assert set(holders()) == {"a", *(f"p{i}" for i in range(15))}  # the least likely one left


def test_who_is_named_counts_for_a_minute():
    now = 0.0
    holders = RecentPeers(lambda: now)
    holders.note(["a", "b"])
    now = 50.0
    holders.note(["b"])
    assert set(holders()) == {"a", "b"}
    now = 100.0
    assert list(holders()) == ["b"]
    assert list(pickle.loads(pickle.dumps(holders))()) == []


def test_where_nobody_answers_it_is_a_fault(tier):
    discovered_peers, holders, _ = tier(a=None, b=None)
    holders.note("ab")
    with pytest.raises(TierError, match=": refused"):
        discovered_peers.find(OLD.meta.entry)
    with pytest.raises(EntryGoneError, match="none of the discovered peers has this cache entry"):
        list(discovered_peers.read(OLD.meta, OLD.meta.parts, OLD.parts.__getitem__))


def test_it_is_read_only(tier):
    discovered_peers, _, _ = tier()
    assert discovered_peers.is_read_only
    assert discovered_peers.write(OLD.meta, OLD.parts) == "refused"
    assert list(discovered_peers.lines()) == []


def test_neighbours_must_be_a_function():
    with pytest.raises(ValueError, match="discovered_peers must be a function or None, got list"):
        CacheConfig(discovered_peers=["http://127.0.0.1:1"])
    assert CacheConfig(host_bytes=0, discovered_peers=RecentPeers()).passes_on
