"""Cache entries of images hold the states after them: exact reuse in models with states, outside the KV pool."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import numpy as np
import pytest

from tests.helper import SIZES, user
from tests.hybrids import BUCKETS, GREEDY, ask, found, small_images_are_stored, values  # noqa: F401
from vlcache_jax import LLM, CacheConfig, SamplingParams
from vlcache_jax.cache.record import Why
from vlcache_jax.device import kv_shape
from vlcache_jax.library import Library
from vlcache_jax.study.calibration import _measure


@pytest.fixture(scope="module")
def directory(hybrid):
    return hybrid


def open_llm(directory, **changes):
    return LLM(directory, **SIZES | {"buckets": BUCKETS, "use_tqdm": False} | changes)


@pytest.fixture(scope="module")
def engine(directory):
    with open_llm(directory) as engine:
        yield engine


@pytest.fixture
def llm(engine):
    """An engine that knows nothing."""
    engine.reset_mm_cache()
    return engine


@pytest.fixture(scope="module")
def cold(directory):
    """An engine that keeps nothing."""
    with open_llm(directory, enable_prefix_caching=False, reuse="off") as engine:
        yield engine


def images_of(output):
    return sum(image.tokens for image in output.cache.images)


@pytest.fixture
def pair(textured_image):
    """A conversation about two images, and another question about them."""
    first, second = textured_image(90, 130, 1), textured_image(64, 96, 2)
    return [user("Look: ", first, " and here ", second, question) for question in (" what?", " how many, and where?")]


LINKED = ("exact", "host", None)


def test_images_are_linked_with_the_states_behind_them_to_the_last_bit(llm, cold, pair):
    """Text between them is computed from the state after the image before it."""
    [first] = ask(llm, pair[0])
    assert found(first) == [("miss", "none", Why.unknown_image)] * 2
    llm.reset_prefix_cache()
    [linked] = ask(llm, pair[1])
    assert found(linked) == [LINKED] * 2
    assert [image.recomputed for image in linked.cache.images] == [(0, 0, 0, 0)] * 2
    assert linked.num_cached_tokens == images_of(linked)
    assert values([linked]) == values(ask(cold, pair[1]))
    [resumed] = ask(llm, pair[0])  # from the snapshot that the states were loaded into
    assert resumed.num_cached_tokens > images_of(resumed)
    assert values([resumed]) == values([first]) == values(ask(cold, pair[0]))


def test_an_image_in_another_context_is_computed(llm, cold, pair, textured_image):
    ask(llm, pair[0])
    llm.reset_prefix_cache()
    other = user("Look here: ", textured_image(90, 130, 1), " what?")
    [output] = ask(llm, other)
    assert found(output) == [("miss", "none", Why.other_context)]
    assert output.cache.images[0].encoder == "host"
    assert values([output]) == values(ask(cold, other))


@pytest.mark.slow
def test_one_unknown_image_between_known_ones(llm, cold, textured_image):
    """Images after it have another context."""
    images = [textured_image(64, 96, seed) for seed in range(4)]
    ask(llm, user("A ", images[0], " b ", images[1], " c ", images[2], " d"))
    llm.reset_prefix_cache()
    question = user("A ", images[0], " b ", images[3], " c ", images[2], " d")
    [output] = ask(llm, question)
    assert [one[0] for one in found(output)] == ["exact", "miss", "miss"]
    assert values([output]) == values(ask(cold, question))


def test_a_restart_finds_images_on_the_disk(directory, cold, pair, tmp_path):
    cache = CacheConfig(disk=tmp_path)
    with open_llm(directory, cache=cache) as llm:
        ask(llm, pair[0])
        llm.cache.flush()
    with open_llm(directory, cache=cache) as llm:
        [output] = ask(llm, pair[1])
        assert found(output) == [("exact", "disk", None)] * 2
        assert output.num_cached_tokens == images_of(output)
        assert values([output]) == values(ask(cold, pair[1]))
        assert not llm.cache.stats().tiers["disk"].damaged


def damage(path, name):
    """Change a byte in the last tensor of a file whose header has `name`."""
    whole = bytearray(path.read_bytes())
    if name.encode() not in whole:
        return False
    whole[-5] ^= 1
    path.write_bytes(whole)
    return True


def test_damaged_states_are_not_loaded(directory, cold, pair, tmp_path):
    cache = CacheConfig(disk=tmp_path)
    with open_llm(directory, cache=cache) as llm:
        ask(llm, pair[0])
        llm.cache.flush()
    assert sum(damage(path, "states.0") for path in tmp_path.rglob("*.safetensors")) == 2
    with open_llm(directory, cache=cache) as llm:
        [output] = ask(llm, pair[1])
        assert {why for _, _, why in found(output)} == {Why.corrupt}
        assert values([output]) == values(ask(cold, pair[1]))
        assert llm.cache.stats().corrupt == 2


@pytest.mark.slow
def test_states_that_are_not_finite_are_not_stored(llm, pair, monkeypatch):
    """The entry of the image is withdrawn; the output does not depend on it."""
    pool = llm.service.device.runner.pool
    stored = pool.stored_states
    monkeypatch.setattr(pool, "stored_states", lambda slot: stored(slot).at[0, 3].set(np.nan))
    ask(llm, pair[0])
    llm.cache.flush()
    assert not [one for one in llm.service.cache.store.tier.records() if one.meta.context is not None]
    llm.reset_prefix_cache()
    [output] = ask(llm, pair[1])
    assert found(output) == [("miss", "none", Why.not_finite)] * 2


@pytest.mark.slow
def test_a_dialogue_goes_on_after_a_restart(directory, textured_image, tmp_path):
    """Text is computed, also that of outputs, whose states were decoded before: equal apart from rounding."""
    cache, conversation = CacheConfig(disk=tmp_path), []
    with open_llm(directory, cache=cache) as llm:
        for turn in range(4):
            conversation += user(f"Turn {turn}: ", textured_image(64, 96, turn))
            [output] = ask(llm, conversation)
            conversation.append({"role": "assistant", "content": output.outputs[0].text})
        conversation += user("And now?")
        [expected] = ask(llm, conversation)
    with open_llm(directory, cache=cache) as llm:
        [output] = ask(llm, conversation)
    assert found(output) == [("exact", "disk", None)] * 4
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    for one, other in zip(output.outputs[0].logprobs, expected.outputs[0].logprobs, strict=True):
        assert one.chosen == pytest.approx(other.chosen, abs=5e-5)


@pytest.mark.parametrize("slots", [1, 2])
def test_images_without_a_slot_for_their_states_are_computed(directory, cold, pair, slots):
    with open_llm(directory) as llm:
        ask(llm, pair[0])
        llm.cache.flush()
        records = [one for one in llm.service.cache.store.tier.records() if one.meta.context is not None]
        with open_llm(directory, state_snapshots=slots) as other:
            for record in records:
                [made] = other.service.cache.store.reserve([record.meta])
                for buffer, own in zip(made.buffers, record.buffers, strict=True):
                    buffer[:] = own
                other.service.cache.store.publish(made)
            [output] = ask(other, pair[1])
            assert found(output) == [LINKED] * slots + [("miss", "none", Why.no_state)] * (2 - slots)
            assert values([output]) == values(ask(cold, pair[1]))
            assert other.stats().snapshots <= slots


@pytest.mark.slow
def test_many_prompts_in_one_call_share_what_the_first_one_fills(llm, cold, textured_image):
    images = [textured_image(64, 96, seed) for seed in range(2)]
    prompts = [user(f"Page {i % 3}: ", images[i % 2], " or ", images[(i + 1) % 2], f" {i}?") for i in range(9)]
    expected = values(ask(cold, *prompts))
    assert values(ask(llm, *prompts)) == expected
    llm.reset_prefix_cache()
    outputs = ask(llm, *prompts)
    assert values(outputs) == expected
    assert {one for output in outputs for one in found(output)} <= {LINKED, ("exact", "kv_pool", None)}


@pytest.mark.slow
def test_several_outputs_and_preemption(directory, cold, pair):
    params = SamplingParams(n=3, temperature=1, seed=5, max_tokens=150, ignore_eos=True, logprobs=0)
    expected = values(ask(cold, pair[0], pair[1], params=params))
    with open_llm(directory, max_model_len=512, kv_cache_bytes=5 * 2**16) as llm:
        ask(llm, pair[0])
        llm.reset_prefix_cache()
        outputs = ask(llm, pair[0], pair[1], params=params)
        assert llm.stats().preemptions
        assert found(outputs[0]) == [LINKED] * 2
    # Generated tokens after a preemption are prefilled, so that only the tokens are equal to the last bit.
    assert [tokens for tokens, _ in values(outputs)] == [tokens for tokens, _ in expected]


@pytest.mark.slow
def test_images_of_whose_tokens_logits_are_wanted_are_computed(llm, cold, pair):
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)
    ask(llm, pair[0])
    llm.reset_prefix_cache()
    [output], [expected] = (ask(one, pair[0], params=params) for one in (llm, cold))
    assert {why for _, _, why in found(output)} == {Why.no_state}
    assert output.prompt_logprobs == expected.prompt_logprobs


@pytest.mark.slow
def test_an_image_at_the_end_of_a_prompt(llm, cold, textured_image):
    """Its last token is computed for its logits, and the states before that are not stored."""
    token = llm.service.checkpoint.config.image_token_id
    prompt = {
        "prompt_token_ids": [9, 10, 11, token, 12, token],
        "multi_modal_data": {"image": [textured_image(64, 96, 1), textured_image(64, 64, 2)]},
    }
    for engine in (llm, llm):
        outputs = engine.generate([prompt], GREEDY, use_tqdm=False)
        assert values(outputs) == values(cold.generate([prompt], GREEDY, use_tqdm=False))
        engine.reset_prefix_cache()
    assert [one[0] for one in found(outputs[0])] == ["exact", "miss"]


@pytest.mark.slow
def test_the_share_of_host_memory_for_states(directory, cold, textured_image):
    """The entry that was used least recently leaves, and encoder output has the rest."""
    images = [textured_image(64, 96, seed) for seed in range(4)]
    prompts = [user(f"Page {i}: ", image, " what?") for i, image in enumerate(images)]
    with open_llm(directory) as llm:
        ask(llm, prompts[0])
        llm.cache.flush()
        [size] = [one.meta.nbytes for one in llm.service.cache.store.tier.records() if one.meta.states]
    expected = values(ask(cold, *prompts))
    for count in (0, 2):
        with open_llm(directory, cache=CacheConfig(states_bytes=count * size)) as llm:
            assert values([output for prompt in prompts for output in ask(llm, prompt)]) == expected
            llm.cache.flush()
            stats = llm.cache.stats()
            assert (stats.kv_records, stats.encoder_records) == (count, 4)
            llm.reset_prefix_cache()
            outputs = [output for prompt in reversed(prompts) for output in ask(llm, prompt)]
            assert [one[0][0] for one in map(found, outputs)] == ["exact"] * count + ["miss"] * (4 - count)
            assert values(reversed(outputs)) == expected


@pytest.mark.slow
def test_coded_entries_serve_no_exact_reuse(directory, cold, pair):
    with open_llm(directory, cache=CacheConfig(codec="int8")) as llm:
        ask(llm, pair[0])
        llm.reset_prefix_cache()
        [output] = ask(llm, pair[1])
        assert [one[0] for one in found(output)] == ["miss"] * 2
        assert llm.cache.stats().kv_records == 0
        assert values([output]) == values(ask(cold, pair[1]))


@pytest.mark.slow
def test_compressed_prompts_link_images(directory, pair):
    options = {"compressed_kv_bytes": 2**22, "max_model_len": 512}
    with open_llm(directory, **options) as llm:
        [expected] = ask(llm, pair[1], compress="snapkv-0.5")
        llm.reset_prefix_cache()
        [output] = ask(llm, pair[1], compress="snapkv-0.5")
        assert found(output) == [LINKED] * 2
        assert not output.cache.exact
    assert values([output]) == values([expected])


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_libraries_pin_what_is_stored(directory, textured_image, tmp_path, monkeypatch, tier):
    """A small image has only encoder output."""
    monkeypatch.setattr(kv_shape, "STATED_TOKENS", 10)
    with open_llm(directory, cache=CacheConfig(disk=tmp_path)) as llm:
        library = Library(llm, "pages", tier=tier)
        library.add(textured_image(64, 96, 1), "small")
        library.add(textured_image(128, 96, 1), "large")
        assert (llm.cache.stats().kv_records, llm.cache.stats().encoder_records) == (1, 2)


@pytest.mark.slow
def test_rates_are_measured_with_states(directory):
    """Each hit loads KV and states from host memory, without its prompt's pages."""
    grids = (2, 3), (4, 5)
    with open_llm(directory, state_snapshots=2, mm_processor_kwargs={"min_pixels": 1024}) as llm:
        seconds, image = _measure(llm, grids, 1)
        kv = llm.service.device.runner.shapes.kv
        assert image.kv_bytes == kv.stored_bytes * 64 + kv.state_bytes  # padded to 64 tokens
    assert [*seconds["hit"]] == [6, 20]


@pytest.mark.slow
def test_random_loads_with_aborts_resets_and_few_slots(directory, cold, textured_image, tmp_path):
    """Each request has the tokens of a cold run, whatever others do and whatever is lost meanwhile."""
    rng = np.random.default_rng(3)
    images = [textured_image(64, 64 + 32 * (seed % 2), seed) for seed in range(3)]
    prompts = []
    for i in range(6):
        parts = ["Page ", images[i % 3], " and ", images[rng.integers(3)], f" {i}?"]
        prompts.append(user(*parts[: 2 + 3 * (i % 2)]))
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = [output.outputs[0].token_ids for output in ask(cold, *prompts, params=params)]
    cache = CacheConfig(disk=tmp_path, host_bytes=2**19)
    with open_llm(directory, cache=cache, state_snapshots=4, max_model_len=512, kv_cache_bytes=2**18) as llm:
        for _ in range(25):
            chosen = rng.integers(0, len(prompts), rng.integers(1, 7)).tolist()
            for number, output in zip(chosen, ask(llm, *(prompts[i] for i in chosen), params=params), strict=True):
                assert output.outputs[0].token_ids == expected[number]
            with contextlib.suppress(ValueError):
                [llm.reset_prefix_cache, llm.reset_mm_cache, llm.cache.flush, lambda: llm.cache.delete(images[0])][
                    int(rng.integers(4))
                ]()
        stats, cached = llm.stats(), llm.cache.stats()
        assert (stats.running, stats.waiting, stats.in_use) == (0, 0, 0)
        assert cached.hits_exact > 10
        assert cached.tiers["disk"].loaded > 0
        states = llm.service.cache.pages.states
        assert len(states._free) + len(states) == BUCKETS.max_sequences + 4


KILLED = """
import sys
from tests.test_image_states import BUCKETS, GREEDY, SIZES, conversations
from vlcache_jax import LLM, CacheConfig
from vlcache_jax.device import kv_shape

kv_shape.STATED_TOKENS = 1
cache = CacheConfig(disk=sys.argv[2], host_bytes=2**19)
with LLM(sys.argv[1], **SIZES | {"buckets": BUCKETS, "use_tqdm": False, "cache": cache, "state_snapshots": 2}) as llm:
    for number in range(1000):
        llm.chat(conversations(number % 7), GREEDY, use_tqdm=False)
        print(number, flush=True)
"""


def conversations(seed):
    """Two questions about images of their own."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (2, 64, 96, 3), np.uint8)
    return [user(f"Page {seed}: ", image, f" and {i}?") for i, image in enumerate(images)]


@pytest.mark.slow
def test_a_process_killed_while_it_stores_states_leaves_nothing_wrong(directory, cold, tmp_path):
    for kills in range(3):
        command = [sys.executable, "-c", KILLED, str(directory), str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(2 + 3 * kills):
                assert process.stdout.readline()
            process.kill()
        cache = CacheConfig(disk=tmp_path)
        with open_llm(directory, cache=cache) as llm:
            for seed in range(7):
                outputs, expected = (ask(one, *conversations(seed)) for one in (llm, cold))
                assert values(outputs) == values(expected)
            stats = llm.cache.stats()
            assert stats.tiers["disk"].loaded > 0
            assert (stats.corrupt, stats.failed, stats.tiers["disk"].damaged) == (0, 0, 0)
