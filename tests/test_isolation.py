"""Whose records are whose, for how long, and where there is no memory for them; with a model."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest

from tests.helper import SIZES, assert_nothing_left, user
from vlcache_jax import LLM, CacheConfig, SamplingParams
from vlcache_jax.cache.keys import SHARED, owner_key
from vlcache_jax.outputs import Why

PARAMS = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


def open_llm(path, *, paging=False, **cache):
    return LLM(path, enable_prefix_caching=paging, use_tqdm=False, cache=CacheConfig(**cache), **SIZES)


@pytest.fixture(scope="module")
def engine(checkpoints):
    with open_llm(checkpoints("qwen3_vl")) as llm:
        yield llm


@pytest.fixture
def llm(engine):
    engine.cache.flush()
    engine.reset_mm_cache()
    return engine


def ask(llm, *parts, system=None, **options):
    conversation = [] if system is None else [{"role": "system", "content": system}]
    [output] = llm.chat([[*conversation, *user(*parts)]], PARAMS, use_tqdm=False, **options)
    llm.cache.flush()
    return output


def seen(output):
    [image] = output.cache.images
    return image.match, image.kv, image.encoder


@pytest.fixture
def picture(textured_image):
    return textured_image(60, 90, 1)


def test_two_tenants_share_nothing(llm, picture):
    first = ask(llm, picture, "What?", cache_salt="a")
    other = ask(llm, picture, "What?", cache_salt="b")
    assert seen(other) == seen(first) == ("miss", "none", "computed")
    assert first.cache.images[0].key != other.cache.images[0].key
    assert seen(ask(llm, picture, "What?", cache_salt="a"))[:2] == ("exact", "host")
    assert seen(ask(llm, picture, "What?"))[0] == "miss"  # no salt is a salt of its own


@pytest.mark.parametrize("system", [None, "Answer in one word."])
def test_what_is_shared_serves_every_tenant(llm, picture, system):
    cold = ask(llm, picture, "What?", system=system, reuse="off")
    [key] = llm.cache.precompute([picture], system, shared=True)
    for salt in ("a", "b", None):
        output = ask(llm, picture, "What?", system=system, cache_salt=salt)
        assert seen(output) == ("exact", "host", "none")
        assert output.outputs[0].token_ids == cold.outputs[0].token_ids
        assert output.cache.images[0].key != key  # the report names the tenant's own
    assert {record.meta.owner for record in llm.service.cache.store.tier.records()} == {owner_key(SHARED)}
    assert_nothing_left(llm)


def test_what_is_shared_has_nobodys_context(llm, picture):
    """Behind a tenant's own text it is computed, and kept for that tenant alone."""
    llm.cache.precompute([picture], shared=True)
    mine = ask(llm, "My secret is 42. ", picture, "What?", cache_salt="a")
    assert seen(mine) == ("miss", "none", "host")  # the encoder's rows depend on nothing before
    assert mine.cache.images[0].why is Why.other_context
    shared = [
        record.meta for record in llm.service.cache.store.tier.records() if record.meta.owner == owner_key(SHARED)
    ]
    assert {meta.context is None for meta in shared} == {True, False}
    assert len([meta for meta in shared if meta.context is not None]) == 1
    again = ask(llm, "My secret is 42. ", picture, "What?", cache_salt="a")
    assert seen(again)[:2] == ("exact", "host")
    assert seen(ask(llm, "My secret is 42. ", picture, "What?", cache_salt="b"))[0] == "miss"


def test_approximate_reuse_takes_what_is_shared(llm, picture):
    llm.cache.precompute([picture], shared=True)
    output = ask(llm, "Look: ", picture, "What?", cache_salt="a", reuse="full")
    assert seen(output)[:2] == ("approximate", "host")


def test_what_is_shared_has_no_salt(llm, picture):
    with pytest.raises(ValueError, match="cache_salt must be None if shared is set, got 'a'"):
        llm.cache.precompute([picture], shared=True, cache_salt="a")
    with pytest.raises(ValueError, match="shared must be a bool"):
        llm.cache.precompute([picture], shared="yes")


def test_what_is_shared_can_be_deleted(llm, picture):
    [key] = llm.cache.precompute([picture], shared=True)
    assert llm.cache.delete(key) == llm.cache.delete(picture) == 0  # they are nobody's
    assert llm.cache.pin(picture, shared=True) == 2
    assert llm.cache.evict(key, shared=True) == 0
    assert llm.cache.delete(key, shared=True) == 2
    assert seen(ask(llm, picture, "What?", cache_salt="a"))[0] == "miss"


def test_deleting_takes_pinned_records_too(llm, picture):
    ask(llm, picture, "What?")
    assert llm.cache.pin(picture) == 2
    assert llm.cache.evict(picture) == 0
    assert llm.cache.delete(picture) == 2
    assert seen(ask(llm, picture, "What?"))[0] == "miss"


def test_an_image_lives_as_long_as_it_is_told(checkpoints, picture, tmp_path):
    """In host memory, on the disk, and in the pages of the KV pool."""
    with open_llm(checkpoints("qwen3_vl"), paging=True, ttl=60.0, disk=tmp_path) as llm:
        [channel] = llm.service.cache.store.channels
        now = [channel.tier._clock()]
        llm.service.cache.store.ages._clock = llm.service.cache.store._steady = channel.tier._clock = lambda: now[0]
        long = "word " * 30  # with the image more than a page
        cold = ask(llm, picture, long, reuse="off")
        ask(llm, picture, long)
        again = ask(llm, picture, long)
        assert seen(again)[1] == "kv_pool"
        assert again.num_cached_tokens > 100
        now[0] += 61
        late = ask(llm, picture, long)
        assert (seen(late)[0], late.num_cached_tokens) == ("miss", 0)
        assert late.cache.images[0].why is Why.expired
        assert [output.outputs[0].token_ids for output in (again, late)] == [cold.outputs[0].token_ids] * 2
        assert llm.cache.stats().expired == 1
        now[0] += 50
        llm.reset_mm_cache()
        assert seen(ask(llm, picture, long))[1] == "disk"
        now[0] += 11  # what came from the disk is no younger
        assert seen(ask(llm, picture, long))[0] == "miss"
        now[0] += 61
        llm.reset_mm_cache()
        assert seen(ask(llm, picture, long))[0] == "miss"


def test_without_host_memory_the_disk_serves(checkpoints, picture, tmp_path):
    with open_llm(checkpoints("qwen3_vl"), host_bytes=0, disk=tmp_path) as llm:
        cold = ask(llm, picture, "What?", reuse="off")
        for found in ("none", "disk", "disk"):
            output = ask(llm, picture, "What?")
            assert seen(output)[1] == found
            assert output.outputs[0].token_ids == cold.outputs[0].token_ids
            assert llm.cache.stats().bytes == 0
        together = llm.chat([user(picture, "What?"), user(picture, "What else?")], PARAMS, use_tqdm=False)
        assert [seen(output)[1] for output in together] == ["disk", "host"]  # one load serves both
        assert together[0].outputs[0].token_ids == cold.outputs[0].token_ids
        llm.cache.flush()
        assert llm.cache.stats().bytes == 0
        assert_nothing_left(llm)


def test_prometheus_hears_what_stats_says(llm, picture):
    before = llm.cache.stats()
    for _ in range(2):
        ask(llm, picture, "What?")
    text = generate_latest(llm.cache.registry).decode()
    stats = llm.cache.stats()
    assert stats.whys["unknown_image"] == before.whys.get("unknown_image", 0) + 1
    assert f"vlcache_hits_exact {float(before.hits_exact + 1)}" in text
    assert f'vlcache_whys_total{{why="unknown_image"}} {float(stats.whys["unknown_image"])}' in text
    assert f"vlcache_bytes {float(stats.bytes)}" in text
