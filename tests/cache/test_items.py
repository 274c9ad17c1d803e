"""The index of libraries, without an engine."""

from __future__ import annotations

import pytest

from vlcache_jax.cache.items import Item, Items
from vlcache_jax.cache.store import ImageKey

PICTURE = ImageKey("a" * 64, 64, 96)


@pytest.fixture
def items():
    """At a time of 1000 seconds; without a disk."""
    items = Items(None, clock=lambda: 1000.0)
    yield items
    items.close()


def item(name, entry="b" * 64, expires=None):
    return Item("shoes", name, PICTURE, {}, entry, None, {}, 5.0, expires)


def listed_items(items):
    return [(one.id, one.version, one.metadata) for one in items.items(None, "shoes")]


def test_an_item_is_changed_and_ends_by_its_name(items):
    first, other = item("first"), item("other")
    items.put(first, 0)
    items.put(other, 0)
    assert items.describe(None, "shoes", "first", {"price": 5}, lambda ends: ends)
    assert listed_items(items) == [("first", first.version, {"price": 5}), ("other", other.version, {})]
    assert items.remove(None, "shoes", "first")
    assert listed_items(items) == [("other", other.version, {})]
    for owner, library, name in ((None, "shoes", "first"), (None, "boots", "other"), ("somebody", "shoes", "other")):
        assert not items.describe(owner, library, name, {}, lambda ends: ends)
        assert not items.remove(owner, library, name)
    assert listed_items(items) == [("other", other.version, {})]


def test_records_of_an_item_that_was_replaced_belong_to_none(items):
    items.put(item("first"), 0)
    assert items.loose(None) == []
    items.put(item("first", entry="c" * 64), 0)
    assert [one.entry for one in items.loose(None)] == ["b" * 64]
    assert items.count(None, "shoes") == 1


def test_an_item_that_has_ended_is_there_until_it_is_removed(items):
    items.put(item("first", expires=999.0), 0)
    assert (items.get(None, "shoes", "first"), items.expired(None, "shoes")) == (None, ["first"])
    assert items.remove(None, "shoes", "first")
    assert items.expired(None, "shoes") == []
