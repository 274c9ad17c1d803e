"""Known images: what follows from an alias is looked up once, and what the store keeps of an image stays its decision.

The reference is a cold run of the same engine.
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.helper import SIZES, assert_nothing_left, user
from tests.test_reuse import png
from vlcache_jax import LLM, CacheConfig, SamplingParams
from vlcache_jax.cache import store as stores
from vlcache_jax.cache.keys import Bounded, alias_key
from vlcache_jax.preparation.recognition import KnownImage

ONE = SamplingParams(temperature=0, max_tokens=1)
MAX_CALLS = 4400  # of a hit of 20 known images; about 3900 when this was written, and 7900 before
COMPILES = "vlcache-ahead"  # a thread


def open_llm(directory, **options):
    cache = CacheConfig(load="kv", **options.pop("cache", {}))
    return LLM(directory, cache=cache, use_tqdm=False, **SIZES, **options)


@pytest.fixture
def llm(checkpoints):
    with open_llm(checkpoints("qwen3_vl")) as llm:
        yield llm
        assert_nothing_left(llm)


@pytest.fixture
def encoded(textured_image):
    return png(textured_image(56, 84, 7))


def ask(llm, *parts, **options):
    [output] = llm.chat([user(*parts, "What?")], ONE, use_tqdm=False, **options)
    return output


def matches(output):
    return [image.match for image in output.cache.images]


def described(llm, encoded, salt=None, **limits) -> KnownImage | None:
    """What is kept of a file under its alias and these limits."""
    return llm.service.cache.store.described.get((alias_key(encoded, salt), *sorted(limits.items())))


def test_a_known_image_is_described_once(llm, encoded, monkeypatch):
    cold = ask(llm, encoded, reuse="off")
    assert described(llm, encoded) is None
    ask(llm, encoded)
    ask(llm, encoded)
    known = described(llm, encoded)
    assert known is not None
    monkeypatch.setattr(type(llm.service.preparation.identifier.recognizer.media), "shape", None)  # it is not called
    hit = ask(llm, encoded, encoded)
    assert described(llm, encoded) is known
    assert {image.key for image in hit.cache.images} == {known.key} == {llm.cache.key(encoded)}
    assert known.shape.tokens == cold.cache.images[0].tokens
    again = ask(llm, encoded)
    assert matches(again) == ["exact"]
    assert again.outputs[0].token_ids == cold.outputs[0].token_ids


def test_the_table_is_bounded(checkpoints, textured_image, monkeypatch):
    monkeypatch.setattr(stores, "_DESCRIBED", 2)
    files = [png(textured_image(56, 56, seed)) for seed in range(4)]
    with open_llm(checkpoints("qwen3_vl")) as llm:
        for _ in range(3):
            outputs = [ask(llm, file) for file in files]
        assert len(llm.service.cache.store.described) == 2
        assert [matches(output) for output in outputs] == [["exact"]] * 4  # what is kept of them is another matter


def test_salts_have_tables_of_their_own(llm, encoded):
    keys = {}
    for salt in ("a", "b", None):
        assert matches(ask(llm, encoded, cache_salt=salt)) == ["miss"]
        assert described(llm, encoded, salt) is None  # it was unknown when it came
        assert matches(ask(llm, encoded, cache_salt=salt)) == ["exact"]
        keys[salt] = described(llm, encoded, salt).key
        assert keys[salt] == llm.cache.key(encoded, cache_salt=salt)
    assert len(set(keys.values())) == 3


@pytest.mark.parametrize("loss", ["delete", "evict", "clear", "spoil"])
def test_the_store_decides_what_is_kept(llm, encoded, loss):
    cold = ask(llm, encoded, reuse="off")
    for _ in range(2):
        ask(llm, encoded)
    store = llm.service.cache.store
    if loss == "clear":
        llm.reset_mm_cache()
        assert len(store.described) == len(store.image_keys) == 0
    elif loss == "spoil":
        for record in store.tier.records():
            store.discard(record)
    else:
        assert getattr(llm.cache, loss)(encoded) == 2
    again = ask(llm, encoded)
    assert matches(again) == ["miss"]
    assert again.outputs[0].token_ids == cold.outputs[0].token_ids
    assert matches(ask(llm, encoded)) == ["exact"]


def test_what_is_too_old_is_computed(checkpoints, encoded):
    with open_llm(checkpoints("qwen3_vl"), cache={"ttl": 60.0}) as llm:
        now = [llm.service.cache.store.ages._clock()]
        llm.service.cache.store.ages._clock = lambda: now[0]
        for _ in range(2):
            ask(llm, encoded)
        assert described(llm, encoded) is not None
        now[0] += 61
        assert matches(ask(llm, encoded)) == ["miss"]
        assert matches(ask(llm, encoded)) == ["exact"]


def test_limits_have_descriptions_of_their_own(llm, encoded):
    limits = {"max_pixels": 56 * 56}
    for _ in range(2):
        ask(llm, encoded)
    first = ask(llm, encoded, mm_processor_kwargs=limits)
    again = ask(llm, encoded, mm_processor_kwargs=limits)
    assert matches(first) + matches(again) == ["miss", "exact"]
    small, whole = described(llm, encoded, **limits), described(llm, encoded)
    assert small.image_key is whole.image_key
    assert small.key != whole.key
    assert small.shape.tokens == again.cache.images[0].tokens < whole.shape.tokens


def test_limits_are_checked_each_time(llm, encoded):
    """With the words of each request, and nothing is kept of what is refused."""
    for _ in range(2):
        ask(llm, encoded)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"messages images\[1\] must have at most \d+ patches, got \d+: lower"):
            llm.chat(_enlarged(encoded), ONE, use_tqdm=False)
    assert matches(ask(llm, encoded)) == ["exact"]
    assert len(llm.service.cache.store.described) == 1


def _enlarged(encoded):
    """A conversation whose second image is to be larger than any engine takes."""
    content = [
        {"type": "image", "image": encoded},
        {"type": "image", "image": encoded, "resized_height": 3500, "resized_width": 3500},
        {"type": "text", "text": "?"},
    ]
    return [{"role": "user", "content": content}]


def test_a_uuid_that_is_released_leads_to_another_picture(checkpoints, textured_image):
    first, second = (png(textured_image(56, 84, seed)) for seed in range(2))

    def named(file):
        content = [{"type": "image", "image": file, "uuid": "mine"}, {"type": "text", "text": "?"}]
        return [{"role": "user", "content": content}]

    with open_llm(checkpoints("qwen3_vl"), cache={"trust_uuids": True}) as llm:
        for _ in range(2):
            [output] = llm.chat([named(first)], ONE, use_tqdm=False)
        assert output.cache.images[0].key == llm.cache.key(first)
        assert llm.cache.release_uuid("mine")
        for _ in range(2):
            [output] = llm.chat([named(second)], ONE, use_tqdm=False)
            assert output.cache.images[0].key == llm.cache.key(second)


def test_several_threads_share_what_is_known(llm, textured_image):
    files = [png(textured_image(56, 56, seed)) for seed in range(4)]
    keys = [llm.cache.key(file) for file in files]

    def run(turn: int) -> None:
        order = [(turn + i) % 4 for i in range(4)]
        output = ask(llm, *(files[i] for i in order))
        assert [image.key for image in output.cache.images] == [keys[i] for i in order]
        if turn % 5 == 4:
            llm.service.cache.store.clear()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(run, range(20)))


def test_bounded_takes_any_key():
    table = Bounded[int](2)
    for i in range(3):
        table.put(("a", i), i)
    assert [table.get(("a", i)) for i in range(3)] == [None, 1, 2]


def test_a_hit_of_known_images_makes_few_calls(checkpoints, textured_image):
    """Python calls on all threads, but that which compiles ahead."""
    files = [png(textured_image(32, 32, seed)) for seed in range(20)]
    calls = 0

    def note(frame, event, _):
        nonlocal calls
        calls += event == "call" and threading.current_thread().name != COMPILES

    with open_llm(checkpoints("qwen3_vl"), enable_prefix_caching=False) as llm:
        for _ in range(3):  # computes; hits; hits with everything compiled
            ask(llm, *files)
        threading.setprofile_all_threads(note)
        try:
            output = ask(llm, *(bytes(bytearray(file)) for file in files))
        finally:
            threading.setprofile_all_threads(None)
            sys.setprofile(None)
    assert matches(output) == ["exact"] * 20
    assert calls <= MAX_CALLS
