"""Copies of records on the device: linked without anything that moves, and never needed."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import threading

import numpy as np
import pytest

from tests.cache.records import load
from tests.engine.test_uploads import SlowTier
from tests.helper import BUCKETS, SIZES, WITHIN, assert_nothing_left, one_device, user
from vlcache_jax import LLM, BucketSizes, CacheConfig, SamplingParams
from vlcache_jax.cache.device import PAGE_TOKENS, DeviceTier
from vlcache_jax.cache.record import Meta, Record
from vlcache_jax.engine.compressed_pages import Compression
from vlcache_jax.engine.prefilling import ForwardPass
from vlcache_jax.library import Library

FORCED = "the quick brown fox"
ONE = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
PLENTY = "16MB"


@pytest.fixture(scope="module")
def opened(checkpoints):
    """(family, codec="auto", pages=None, **settings) -> its engine, with empty tiers; opened once."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def open_llm(family, codec, device_bytes, rows):
            cache = CacheConfig(codec=codec, device_bytes=device_bytes)
            sizes = SIZES | {"buckets": dataclasses.replace(BUCKETS, rows=rows), "compressed_kv_bytes": 2**22}
            return stack.enter_context(
                LLM(checkpoints(family), cache=cache, enable_prefix_caching=False, use_tqdm=False, **sizes)
            )

        def get(family="qwen3_vl", codec="auto", pages=None, rows=BUCKETS.rows, device_bytes=PLENTY):
            llm = open_llm(family, codec, device_bytes, rows)
            llm.reset_mm_cache()
            llm.service.cache.tier.clear()
            llm.service.cache.tier.num_pages = (
                llm.service.device.runner.shapes.kept_tokens // PAGE_TOKENS if pages is None else pages
            )
            return llm

        yield get


@pytest.fixture
def pictures(textured_image):
    return [textured_image(60, 90, seed) for seed in range(5)]


def score(llm, *parts, reuse="exact"):
    [found] = llm.score(user(*parts), [FORCED], reuse=reuse, keep_logits=True, use_tqdm=False)
    llm.cache.flush()
    return found


def places(found):
    return [(image.match, image.kv, image.encoder, image.bytes_moved) for image in found.cache.images]


def put_nothing(llm, monkeypatch):
    """Lets every transfer of a record, and every staging of encoder rows from the host, fail."""

    def fail(*_):
        raise AssertionError("nothing has to move")

    monkeypatch.setattr(llm.service.device.runner, "put", fail)
    monkeypatch.setattr(llm.service.device.runner, "stage", fail)


HITS = [("qwen3_vl", "auto", reuse) for reuse in ("exact", 0, "0.3", "shift-0.3")]
MORE = [("qwen2_5_vl", "auto", reuse) for reuse in ("exact", 0, "0.3", "shift-0.3")]
MORE += [
    (*coded, reuse) for coded in (("qwen3_vl", "int8"), ("qwen2_5_vl", "int4")) for reuse in (0, "0.3", "shift-0.3")
]


@pytest.mark.parametrize(
    ("family", "codec", "reuse"), [*HITS, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]
)
def test_a_hit_on_the_device_moves_nothing_and_equals_one_in_host_memory(
    opened, pictures, monkeypatch, family, codec, reuse
):
    found = {}
    for tier in (PLENTY, 0):
        llm = opened(family, codec, device_bytes=tier)
        score(llm, "See ", *pictures[:3], "?")
        with monkeypatch.context() as context:
            if tier:
                put_nothing(llm, context)
            before = "See " if reuse == "exact" else "Look at "
            found[tier] = score(llm, before, *pictures[:3], "?", reuse=reuse)
    state = "exact" if reuse == "exact" else "approximate"
    computed = "none" if reuse in ("exact", 0) else "device"
    assert places(found[PLENTY]) == [(state, "device", computed, 0)] * 3
    assert {image.kv for image in found[0].cache.images} == {"host"}
    np.testing.assert_array_equal(found[PLENTY].logits, found[0].logits)
    assert found[PLENTY].cache.rows == found[0].cache.rows


@pytest.mark.parametrize("codec", ["auto", pytest.param("int8", marks=pytest.mark.slow)])
def test_what_is_linked_from_the_device_is_compressed(opened, pictures, monkeypatch, codec):
    """As what comes from host memory is, and coded K, V as they are read; compacted whole, it is what was linked."""
    params, found = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True), {}
    for tier in (PLENTY, 0):
        llm = opened(codec=codec, device_bytes=tier)
        score(llm, "See ", *pictures[:3], "?")
        for compress in (None, "vl-cache-1", "vl-cache-0.5", "h2o-0.5"):  # that observes what nothing else computes
            with monkeypatch.context() as context:
                context.setattr(Compression, "is_whole", False)
                asked = user("Look at ", *pictures[:3], "?")
                [output] = llm.chat(asked, params, reuse=0, compress=compress, use_tqdm=False)
            assert {image.kv for image in output.cache.images} == {"device" if tier else "host"}
            assert (output.compression is None) == (compress is None)
            found[tier, compress] = output.outputs[0].token_ids, output.compression and output.compression.kept
        assert found[tier, "vl-cache-1"][0] == found[tier, None][0]
        assert_nothing_left(llm)
    for compress in ("vl-cache-0.5", "h2o-0.5"):
        assert found[PLENTY, compress] == found[0, compress]


def test_what_is_linked_from_host_memory_is_on_the_device_from_then_on(opened, pictures):
    llm = opened(pages=2)
    cold = score(llm, "See ", pictures[0], "?", reuse="off")
    for picture in pictures[:3]:  # the first one has to leave
        score(llm, "See ", picture, "?")
    stats = llm.cache.stats()
    assert (stats.device_records, stats.device_bytes, stats.device_capacity) == (
        2,
        *[2 * llm.service.cache.tier.page_bytes] * 2,
    )
    for kv, picture in [("host", 0), ("device", 0), ("device", 2), ("host", 1), ("device", 2), ("host", 0)]:
        found = score(llm, "See ", pictures[picture], "?")
        assert [(image.match, image.kv) for image in found.cache.images] == [("exact", kv)], picture
        if picture == 0:
            np.testing.assert_array_equal(found.logits, cold.logits)
    approximate = score(llm, "Look at ", pictures[0], "?", reuse="0.3")
    # Its encoder rows were not brought, so those that are computed come from host memory.
    assert [(image.kv, image.encoder) for image in approximate.cache.images] == [("device", "host")]
    assert approximate.cache.images[0].bytes_moved > 0


def test_without_room_a_request_goes_on(opened, pictures):
    llm = opened(pages=1)
    cold = score(llm, "See ", *pictures[:3], "?", reuse="off")
    for _ in range(3):
        found = score(llm, "See ", *pictures[:3], "?")
        np.testing.assert_allclose(found.logits, cold.logits, atol=1e-5)
    kvs = [image.kv for image in found.cache.images]
    assert sorted(kvs) == ["device", "host", "host"]
    assert llm.cache.stats().device_records == 1
    llm.service.cache.tier.num_pages = 0
    assert_nothing_left(llm)


@pytest.mark.slow
def test_an_image_of_several_steps(opened, textured_image):
    llm = opened(rows=(16,))
    picture = textured_image(120, 180)
    score(llm, "See ", picture, "?")
    found = score(llm, "See ", picture, "?")
    assert found.cache.images[0].tokens > 16
    assert places(found) == [("exact", "device", "none", 0)]
    cold = score(llm, "See ", picture, "?", reuse="off")
    np.testing.assert_allclose(found.logits, cold.logits, atol=1e-5)
    moved = score(llm, "Look at ", picture, "?", reuse="0.9")
    assert places(moved) == [("approximate", "device", "device", 0)]
    plain = opened(rows=(16,), device_bytes=0)
    score(plain, "See ", picture, "?")
    np.testing.assert_array_equal(moved.logits, score(plain, "Look at ", picture, "?", reuse="0.9").logits)


def test_an_image_that_comes_twice(opened, pictures):
    """Of its two contexts only one has encoder rows on the device; a prompt that shows it twice links it twice."""
    llm = opened()
    parts = ("See ", pictures[0], " and ", pictures[0], "?")
    cold = score(llm, *parts, reuse="off")
    for kv in ("none", "device"):
        found = score(llm, *parts)
        assert [image.kv for image in found.cache.images] == [kv] * 2
        np.testing.assert_allclose(found.logits, cold.logits, atol=1e-5)
    again = score(llm, "Look at ", pictures[0], " or ", pictures[0], "?", reuse="0.3")
    assert [image.kv for image in again.cache.images] == ["device"] * 2
    plain = opened(device_bytes=0)
    score(plain, *parts)
    want = score(plain, "Look at ", pictures[0], " or ", pictures[0], "?", reuse="0.3")
    np.testing.assert_array_equal(again.logits, want.logits)
    # Linked from host memory at both places, one record is brought in once.
    llm.service.cache.tier.clear()
    for kv in ("host", "device"):
        again = score(llm, "Look at ", pictures[0], " or ", pictures[0], "?", reuse="0.3")
        assert [image.kv for image in again.cache.images] == [kv] * 2
        np.testing.assert_array_equal(again.logits, want.logits)
    assert llm.cache.stats().device_records == 1


@pytest.mark.slow
def test_a_call_means_its_requests_one_by_one(opened, pictures):
    llm = opened()
    rng = np.random.default_rng(3)
    asked = [user("See ", *(pictures[i] for i in rng.permutation(3)[: rng.integers(1, 4)]), "?") for _ in range(8)]
    one_by_one = [llm.chat(conversation, ONE, use_tqdm=False)[0] for conversation in asked]
    llm.reset_mm_cache()
    together = llm.chat(asked, ONE, use_tqdm=False)
    for alone, among in zip(one_by_one, together, strict=True):
        assert alone.outputs[0].token_ids == among.outputs[0].token_ids
        assert alone.cache == among.cache
    assert any(image.kv == "device" for output in together for image in output.cache.images)


def test_what_leaves_the_cache_leaves_the_device(opened, pictures):
    llm = opened()
    score(llm, "See ", *pictures[:3], "?")
    assert llm.cache.stats().device_records == 3
    llm.cache.evict(pictures[0])
    gc.collect()
    assert llm.cache.stats().device_records == 2
    [record] = [
        record
        for record in llm.service.cache.store.tier.records()
        if record.meta.context is not None and record.meta.entry == llm.cache.key(pictures[1])
    ]
    record.data[0, 0, 0] += 1
    del record
    assert len(llm.cache.verify()) == 1
    gc.collect()
    assert llm.cache.stats().device_records == 1
    llm.reset_mm_cache()
    gc.collect()
    assert (llm.cache.stats().device_records, llm.cache.stats().device_bytes) == (0, 0)


def test_after_an_error_the_device_is_empty(opened, pictures, monkeypatch):
    llm = opened()
    cold = score(llm, "See ", pictures[0], "?")
    with monkeypatch.context() as context:
        context.setattr(ForwardPass, "advance", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            score(llm, "See ", pictures[0], "?")
    assert llm.cache.stats().device_records == 0
    for kv in ("host", "device"):
        found = score(llm, "See ", pictures[0], "?")
        assert found.cache.images[0].kv == kv
        np.testing.assert_array_equal(found.logits, cold.logits)


def test_half_a_record_is_not_taken_for_a_copy(opened, pictures):
    """A record that comes layer by layer breaks off behind its first ones, which are on the device then."""
    llm = opened()
    cold = score(llm, "See ", pictures[0], "?", reuse="off")
    score(llm, "See ", pictures[0], "?")
    [record] = [record for record in llm.service.cache.store.tier.records() if record.meta.context is not None]
    tier = SlowTier(record)
    llm.service.cache.store.remove(record, None)
    name = record.meta.name
    del record
    loading = threading.Thread(target=load, args=(llm.service.cache.store, tier, name))
    loading.start()
    while llm.service.cache.store.tier.get(name) is None:
        pass
    found = []
    call = threading.Thread(target=lambda: found.append(score(llm, "See ", pictures[0], "?")))
    call.start()
    tier.gates[0].set()
    while not len(llm.service.cache.tier._copies):
        pass
    tier.broken = 1
    for gate in tier.gates:
        gate.set()
    call.join(WITHIN)
    loading.join(WITHIN)
    np.testing.assert_allclose(found[0].logits, cold.logits, atol=1e-5)
    assert llm.cache.stats().device_records == 0
    for kv in ("none", "device"):
        again = score(llm, "See ", pictures[0], "?")
        assert again.cache.images[0].kv == kv
        np.testing.assert_allclose(again.logits, cold.logits, atol=1e-5)
    assert_nothing_left(llm)


@pytest.mark.slow
@pytest.mark.parametrize("reuse", ["exact", "shift-0.3"])
def test_nothing_compiles_after_warmup(checkpoints, pictures, reuse):
    with LLM(
        checkpoints("qwen3_vl"), buckets=BucketSizes(rows=(64,), patches=(64,), sequences=(1,)), max_model_len=128,
        cache=CacheConfig(device_bytes=PLENTY), kv_cache_bytes=2**20, enable_prefix_caching=False, use_tqdm=False,
        reuse=reuse,
    ) as llm:  # fmt: skip
        count, _ = llm.warmup(verbose=False)
        for _ in range(3):
            score(llm, "See ", pictures[0], "?", reuse=None)
            llm.service.cache.tier.clear()
            score(llm, "Look at ", pictures[0], "?", reuse=None)
            score(llm, "Look at ", pictures[0], "?", reuse=None)
        assert llm.service.device.runner.programs.num_programs == count


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["auto", "int4"])
def test_repeats_are_compiled_ahead(checkpoints, pictures, codec):
    buckets = BucketSizes(rows=(64, 160), patches=(64, 256), sequences=(2,))
    with LLM(
        checkpoints("qwen3_vl"), buckets=buckets, cache=CacheConfig(device_bytes=PLENTY, codec=codec),
        max_model_len=256, kv_cache_bytes=2**20, enable_prefix_caching=False, use_tqdm=False, reuse="0.3",
    ) as llm:  # fmt: skip
        llm.service.ahead._stopped = False
        ask = functools.partial(llm.chat, user("See ", pictures[0], pictures[1], "?"), ONE, use_tqdm=False)
        ask()
        llm.cache.flush()
        llm.service.ahead.wait()
        count = llm.service.device.runner.programs.num_programs
        [output] = ask()
        assert {image.kv for image in output.cache.images} == {"device"}
        # What serves encoder rows from the device aside: which rows are computed, it is told too late.
        assert llm.service.device.runner.programs.num_programs - count == (codec == "int4")


@one_device
@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("1KB", ValueError, r"device_bytes must be 0 or at least \d+, a page of 128 tokens, got 1000"),
        (-1, ValueError, "device_bytes must be a non-negative number of bytes"),
        ("much", ValueError, "device_bytes must be a non-negative number of bytes"),
        ("900TB", MemoryError, "device_bytes 811008"),
    ],
)
def test_sizes_that_are_wrong(checkpoints, value, error, message):
    with pytest.raises(error, match=message):
        LLM(checkpoints("qwen3_vl"), cache=CacheConfig(device_bytes=value), use_tqdm=False).close()


# The tier's books.


def record(tokens, entry="a"):
    made = Record(Meta(entry, "", "c", True, (1, 2, 2), tokens, "float32", (1, 2, tokens, 1, 2)))
    made.complete()
    return made


def fill(tier, one):
    place = tier.take(one)
    tier.fill(one, one.meta.tokens, one.meta.tokens)
    return place


def test_the_least_recently_used_leave_but_not_what_is_needed():
    tier = DeviceTier(4, 10)
    old, needed, new = record(PAGE_TOKENS + 1), record(10), record(3 * PAGE_TOKENS)
    places = [fill(tier, one) for one in (old, needed)]
    assert [len(place) for place in places] == [PAGE_TOKENS + 8, 16]
    assert len({*places[0] // PAGE_TOKENS, *places[1] // PAGE_TOKENS}) == 3
    tier.find(old)
    tier.need([needed])
    fill(tier, new)
    assert [tier.find(one) is not None for one in (old, needed, new)] == [False, True, True]
    assert set(tier.find(new) // PAGE_TOKENS).isdisjoint(tier.find(needed) // PAGE_TOKENS)
    tier.need([needed, new])
    assert tier.take(record(PAGE_TOKENS)) is None
    assert tier.counts() == {"device_records": 2, "device_bytes": 40, "device_capacity": 40}
    assert tier.take(record(5 * PAGE_TOKENS)) is None
    assert tier.find(new) is not None  # nothing leaves for what would not fit anyway
    del new
    gc.collect()
    assert tier.counts()["device_records"] == 1


def test_a_copy_that_lost_its_place_is_not_filled_any_further():
    tier = DeviceTier(1, 10)
    first, second = record(20), record(20, "b")
    assert tier.begin(first) is not None
    tier.fill(first, 12, 12)
    assert tier.find(first) is None
    assert tier.begin(second) is not None
    assert tier.begin(first) is None
    tier.fill(first, 8, 8)
    assert tier.find(first) is None
    tier.fill(second, 20, 12)
    assert tier.find(second) is not None
    assert tier.find_rows(second) is None
    tier.fill(second, 0, 8)
    assert tier.find_rows(second) is not None


def test_what_is_computed_again_changes_no_complete_copy():
    """A request that was preempted computes its prompt again."""
    tier, one = DeviceTier(1, 10), record(20)
    assert tier.begin(one) is not None
    tier.fill(one, 20, 20)
    assert tier.begin(one) is None
    assert tier.find_rows(one) is not None


def test_a_librarys_items_stay_on_the_device(opened, pictures, checkpoints):
    llm = opened(pages=4)
    library = Library(llm, "shop", tier="device")
    share = llm.service.config.cache.pinned_share
    fit = int(4 * share)
    for i in range(fit):
        library.add(pictures[i], f"{i}")
    with pytest.raises(ValueError, match=r"^image must fit in the part of device_bytes that pinned_share allows"):
        library.add(pictures[fit], "more")
    assert [item.id for item in library.items()] == [f"{i}" for i in range(fit)]
    for _ in range(2):  # others come, and take turns in what is left
        for picture in pictures[fit:]:
            score(llm, "See ", picture, " what?")
    for item in library.items():
        shown = [{"type": "text", "text": "See "}, library.part(item.id)]
        [found] = llm.score([[{"role": "user", "content": shown}]], [FORCED], reuse="full", use_tqdm=False)
        assert [image.kv for image in found.cache.images] == ["device"]
    # What is removed makes room.
    library.remove("0")
    library.add(pictures[fit], "more")
    for item in library.items():
        library.remove(item.id)
    with (
        LLM(checkpoints("qwen3_vl"), use_tqdm=False, **SIZES) as without,
        pytest.raises(ValueError, match=r"^tier='device' needs a device tier"),
    ):
        Library(without, "shop", tier="device")
