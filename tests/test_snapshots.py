"""Prompts of models with states continue from snapshots, at every kind of place, and never from lost ones."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.helper import SIZES, give_decode_slots, user
from vlcache_jax import LLM, BucketSizes, CacheConfig, SamplingParams
from vlcache_jax.device import kv_shape
from vlcache_jax.engine import snapshots
from vlcache_jax.inputs.qwen3_5_template import FORMS, qwen3_5_template

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
BUCKETS = BucketSizes(rows=(64, 256), patches=(256,), sequences=(4,), window=4)
SPACING = 64  # of text in these tests, whose prompts are short


@pytest.fixture(scope="module")
def directory(hybrid):
    return hybrid


def open_llm(directory, **changes):
    return LLM(directory, **SIZES | {"buckets": BUCKETS, "use_tqdm": False} | changes)


@pytest.fixture(scope="module")
def cold(directory):
    """An engine that keeps no prompt."""
    with open_llm(directory, enable_prefix_caching=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def engine(directory):
    with open_llm(directory) as engine:
        yield engine


@pytest.fixture
def llm(engine, monkeypatch):
    """An engine that knows nothing, with snapshots close to each other."""
    monkeypatch.setattr(snapshots, "IMAGE_SPACING", SPACING // 4)
    monkeypatch.setattr(snapshots, "TEXT_SPACING", SPACING)
    engine.service.cache.pages.clear()
    return engine


def run(llm, conversation, params=GREEDY, **options):
    [output] = llm.chat([conversation], params, use_tqdm=False, **options)
    return output


def values(output):
    """Tokens and their log-probabilities, which are equal to the last bit or not at all."""
    return [(one.token_ids, [x.chosen for x in one.logprobs]) for one in output.outputs]


def words(count, seed=0):
    return " ".join(np.random.default_rng(seed).choice(["red", "blue", "tall", "soft", "old"], count))


@pytest.mark.parametrize("tokens", [480, 561])
def test_a_prompt_asked_twice_is_found_but_for_its_last_token(llm, cold, tokens):
    prompt = {"prompt_token_ids": list(range(5, 5 + 200)) * 3}
    prompt["prompt_token_ids"] = prompt["prompt_token_ids"][:tokens]
    first, second = (llm.generate([prompt], GREEDY, use_tqdm=False)[0] for _ in range(2))
    [expected] = cold.generate([prompt], GREEDY, use_tqdm=False)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, tokens - 1)
    assert values(first) == values(second) == values(expected)


def test_a_prompt_goes_on_at_every_kind_of_place_to_the_last_bit(llm, cold, textured_image):
    """The end of a message, of an image, of 64 tokens of text, and the last token but one."""
    image = textured_image(90, 130, 1)
    first = [{"role": "system", "content": "Be terse."}, *user("Look: ", image, words(100))]
    answer = {"role": "assistant", "content": "Something else than it said."}
    start = run(llm, first)
    layout = len(start.prompt_token_ids)
    assert run(llm, first).num_cached_tokens == layout - 1
    turn = run(llm, [*first, answer, *user("And now?")])
    header = layout - turn.num_cached_tokens  # of the answer, which the template begins
    assert 0 < header < 8
    behind_image = run(llm, [first[0], *user("Look: ", image, "What?")])
    [seen] = behind_image.cache.images
    assert seen.kv == "kv_pool"
    inside = run(llm, [first[0], *user("Look: ", image, words(100)[:300] + "!")])
    assert inside.num_cached_tokens % SPACING == 0
    assert inside.num_cached_tokens > behind_image.num_cached_tokens + SPACING // 2
    for output, conversation in [
        (turn, [*first, answer, *user("And now?")]),
        (behind_image, [first[0], *user("Look: ", image, "What?")]),
        (inside, [first[0], *user("Look: ", image, words(100)[:300] + "!")]),
    ]:
        assert values(output) == values(run(cold, conversation))


def test_a_dialogue_with_an_image_more_each_turn_computes_what_is_new(llm, cold, textured_image):
    """A random model's answers are other tokens as text, so prompts part where the answer begins."""
    conversation = [{"role": "system", "content": "Be terse."}]
    shared = 0
    for turn in range(5):
        conversation += user(textured_image(64 + 32 * turn, 96, turn), words(20, turn))
        output = run(llm, conversation)
        assert output.num_cached_tokens >= shared
        assert values(output) == values(run(cold, conversation))
        conversation.append({"role": "assistant", "content": output.outputs[0].text})
        [*_, header] = np.flatnonzero(output.prompt_token_ids == llm.get_tokenizer().get_vocab()["<|im_start|>"])
        shared = int(header)
        assert shared > 0.9 * len(output.prompt_token_ids)


def test_behind_an_answer_a_prompt_goes_on_from_decoded_states(llm, cold):
    prompt, seen = [*range(5, 105)], 0
    for turn in range(3):
        [output] = llm.generate([{"prompt_token_ids": prompt}], GREEDY, use_tqdm=False)
        assert output.num_cached_tokens == seen
        assert output.cache.exact
        [expected] = cold.generate([{"prompt_token_ids": prompt}], GREEDY, use_tqdm=False)
        [(tokens, own)], [(cold_tokens, cold_ones)] = values(output), values(expected)
        assert tokens == cold_tokens
        np.testing.assert_allclose(own, cold_ones, atol=5e-5, rtol=0)
        seen = len(prompt) + len(tokens) - 1  # the last token was not computed
        prompt = [*prompt, *tokens, *range(7 + turn, 60)]


def test_behind_a_stop_string_the_device_has_gone_on(llm, cold):
    """Its states are of tokens that the answer does not have, so they are no snapshot."""
    prompt = [*range(9, 109)]
    [free] = llm.generate([{"prompt_token_ids": prompt}], dataclasses.replace(GREEDY, max_tokens=20), use_tqdm=False)
    stop = free.outputs[0].text[6:9]
    params = dataclasses.replace(GREEDY, max_tokens=20, stop=[stop])
    llm.service.cache.pages.clear()
    [output] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    own = output.outputs[0]
    assert own.finish_reason == "stop"
    following = {"prompt_token_ids": [*prompt, *own.token_ids, *range(5, 40)]}
    [after] = llm.generate([following], GREEDY, use_tqdm=False)
    assert after.num_cached_tokens <= len(prompt)
    assert values(after) == values(cold.generate([following], GREEDY, use_tqdm=False)[0])


def test_a_branching_is_found_from_the_third_request_on(llm, cold, monkeypatch):
    monkeypatch.setattr(snapshots, "TEXT_SPACING", 2048)
    begin = [*range(5, 250)]
    place = len(begin) // 64 * 64  # the last end of a block before the prompts differ
    before, found = llm.stats().unresumed_tokens, []
    for i in range(4):
        prompt = {"prompt_token_ids": [*begin, 5 + i, *range(60 + i, 100)]}
        [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert values(output) == values(cold.generate([prompt], GREEDY, use_tqdm=False)[0])
        found.append((output.num_cached_tokens, llm.stats().unresumed_tokens - before))
        before = llm.stats().unresumed_tokens
    rest = len(begin) - place
    assert found == [(0, 0), (0, len(begin)), (place, rest), (place, rest)]


def test_many_questions_about_one_image_in_one_call(llm, cold, textured_image):
    image = textured_image(180, 200, 3)
    conversations = [user(image, words(5, seed)) for seed in range(12)]
    outputs = llm.chat(conversations, GREEDY, use_tqdm=False)
    end = outputs[0].cache.images[0].tokens
    assert [output.num_cached_tokens > end for output in outputs] == [False] + [True] * 11
    for output, expected in zip(outputs, cold.chat(conversations, GREEDY, use_tqdm=False), strict=True):
        assert values(output) == values(expected)


def test_outputs_that_begin_later_go_on_from_the_first_ones_snapshot(directory, cold, textured_image):
    conversation = user("What is in ", textured_image(90, 130, 4), "? " + words(40))
    with open_llm(directory) as llm:
        give_decode_slots(llm, 2)
        output = run(llm, conversation, dataclasses.replace(GREEDY, n=4))
        steps = llm.stats().prefill_rows - llm.stats().padded_prefill_rows
        assert steps == len(output.prompt_token_ids) + 3
    assert values(output) == 4 * values(run(cold, conversation))


def test_what_is_deleted_is_not_found(llm, cold, textured_image):
    image = textured_image(90, 130, 5)
    conversation = user("Look: ", image, words(40))
    run(llm, conversation)
    assert run(llm, conversation).num_cached_tokens
    llm.cache.delete(image)
    again = run(llm, conversation)
    assert again.num_cached_tokens < 30  # before the image
    assert values(again) == values(run(cold, conversation))
    llm.service.cache.pages.clear()
    assert llm.stats().snapshots == 0
    assert run(llm, conversation).num_cached_tokens == 0


def test_salts_have_their_own(llm, textured_image):
    conversation = user("Look: ", textured_image(90, 130, 6))
    run(llm, conversation, cache_salt="a")
    assert run(llm, conversation, cache_salt="b").num_cached_tokens == 0
    assert run(llm, conversation, cache_salt="a").num_cached_tokens
    assert run(llm, conversation, reuse="off").num_cached_tokens == 0


@pytest.mark.parametrize("count", [0, 1, 3])
def test_few_slots_are_no_error(directory, cold, count, textured_image):
    conversations = [user(words(20, seed), textured_image(64, 96, seed % 3), words(60, seed)) for seed in range(8)]
    expected = [values(output) for output in cold.chat(conversations, GREEDY, use_tqdm=False)]
    with open_llm(directory, state_snapshots=count) as llm:
        for _ in range(2):
            outputs = llm.chat(conversations, GREEDY, use_tqdm=False)
            assert [values(output) for output in outputs] == expected
        stats = llm.stats()
        assert (stats.max_snapshots, stats.snapshots) == (count, count)
        assert (stats.snapshot_evictions > 0) is (count > 0)
        # A snapshot that is worth less than all others is not taken. With each one that is not, those lose worth.
        found = [run(llm, conversations[-1]).num_cached_tokens for _ in range(3)]
        assert (found[-1] > 0) is (count > 0)


@pytest.fixture
def few_slots(directory, monkeypatch):
    """An engine with two snapshots on the device, which moves even short ones to host memory."""
    monkeypatch.setattr(kv_shape, "STATED_TOKENS", 16)
    with open_llm(directory, state_snapshots=2) as engine:
        yield engine


def test_evicted_snapshots_return_from_host_memory(few_slots, cold, textured_image):
    """Four dialogues in turn, each of which continues where its last prompt ended, less the answer's header."""
    llm, ends = few_slots, [0] * 4
    begins = llm.get_tokenizer().get_vocab()["<|im_start|>"]
    conversations = [user(f"{seed}: ", textured_image(64, 96, seed), words(20, seed)) for seed in range(4)]
    for turn in range(3):
        for i, conversation in enumerate(conversations):
            output = run(llm, conversation)
            assert values(output) == values(run(cold, conversation))
            assert output.num_cached_tokens == ends[i]
            llm.cache.flush()
            ends[i] = int(np.flatnonzero(output.prompt_token_ids == begins)[-1])
            conversations[i] = [*conversation, {"role": "assistant", "content": f"{i}"}, *user(words(20, turn))]
    stats = llm.stats()
    assert stats.snapshot_returns == 8
    assert llm.cache.stats().snapshot_records >= 4
    llm.reset_prefix_cache()
    assert llm.cache.stats().snapshot_records == 0


def test_snapshots_in_host_memory_go_with_their_image_and_their_pages(few_slots, cold, textured_image):
    llm, images = few_slots, [textured_image(64, 96, seed) for seed in range(4)]
    conversations = [user(f"{seed}: ", image, words(20, seed)) for seed, image in enumerate(images)]
    for conversation in conversations:
        run(llm, conversation)
    llm.cache.flush()
    count = llm.cache.stats().snapshot_records
    assert count > 0
    for image in images:
        llm.cache.delete(image)
    assert llm.cache.stats().snapshot_records < count
    assert values(run(llm, conversations[0])) == values(run(cold, conversations[0]))
    llm.reset_mm_cache()
    assert llm.cache.stats().snapshot_records == 0


@pytest.mark.parametrize("cache", [{"states_bytes": 0}, {"host_bytes": 0}])
def test_without_host_memory_evicted_snapshots_are_forgotten(directory, cold, monkeypatch, cache):
    monkeypatch.setattr(kv_shape, "STATED_TOKENS", 16)
    conversations = [user(words(40, seed)) for seed in range(3)]
    with open_llm(directory, state_snapshots=1, cache=CacheConfig(**cache)) as llm:
        for conversation in conversations * 2:
            assert values(run(llm, conversation)) == values(run(cold, conversation))
        assert llm.stats().snapshot_evictions > 0
        assert (llm.stats().snapshot_returns, llm.cache.stats().snapshot_records) == (0, 0)


def test_a_lost_device_loses_snapshots_in_host_memory_too(few_slots, cold, monkeypatch):
    llm, conversations = few_slots, [user(words(40, seed)) for seed in range(3)]

    def fail(slot):
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(llm.service.device.runner.pool, "stored_states", fail)
        run(llm, conversations[0])
        run(llm, conversations[1])
        with pytest.raises(RuntimeError, match="the device is gone"):
            run(llm, conversations[2])
    assert llm.cache.stats().snapshot_records == 0
    for conversation in conversations:
        assert values(run(llm, conversation)) == values(run(cold, conversation))


def test_a_number_that_a_model_cannot_use_is_refused(checkpoints, directory):
    with pytest.raises(ValueError, match=r"state_snapshots must be None or 0 for qwen3_vl, .* got 4"):
        open_llm(checkpoints("qwen3_vl"), state_snapshots=4)
    with pytest.raises(ValueError, match=r"state_snapshots must be at most \d+, got 1000000000000: each keeps"):
        open_llm(directory, state_snapshots=10**12)


def tool_turn(turn, image):
    """A call, its result with an image, and an answer."""
    call = {"type": "function", "function": {"name": "look", "arguments": {"page": turn}}}
    return [
        {"role": "assistant", "content": "", "reasoning_content": "Which one?", "tool_calls": [call]},
        {"role": "tool", "content": [{"type": "text", "text": f"Page {turn}"}, {"type": "image", "image": image}]},
    ]


@pytest.fixture(scope="module")
def long_engine(directory):
    """Room for prompts with descriptions of tools, of which each character is a token."""
    with open_llm(directory, max_model_len=4096, kv_cache_bytes=2**25) as engine:
        yield engine


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("thinks", [False, True], ids=["off", "on"])
@pytest.mark.parametrize("has_tools", [False, True], ids=["images", "tools"])
def test_dialogues_by_the_published_forms(long_engine, textured_image, form, thinks, has_tools):
    """Each turn continues at the last message at whose start it is still equal to an earlier prompt.

    Templates remove thinking from earlier turns, at the latest when the user writes again.
    """
    options = {"chat_template": qwen3_5_template(form), "chat_template_kwargs": {"enable_thinking": thinks}}
    if has_tools:
        options["tools"] = [{"type": "function", "function": {"name": "look"}}]
    conversation, prompts = [{"role": "system", "content": "Be terse."}], []
    found, total = 0, 0
    llm = long_engine
    llm.reset_mm_cache()
    begins = llm.get_tokenizer().get_vocab()["<|im_start|>"]
    for turn in range(5):
        image = textured_image(64 + 32 * turn, 96, turn)
        conversation += user(image, words(10, turn)) if not (has_tools and turn) else user(words(10, turn))
        for _ in range(1 + has_tools):
            output = run(llm, conversation, **options)
            tokens = output.prompt_token_ids.tolist()
            alike = max((common(tokens, other) for other in prompts), default=0)
            shared = max((place for place in range(alike + 1) if tokens[place] == begins), default=0)
            found, total = found + min(output.num_cached_tokens, shared), total + shared
            prompts.append(tokens)
            if has_tools and conversation[-1]["role"] == "user":
                conversation += tool_turn(turn, image)
        conversation.append({"role": "assistant", "content": output.outputs[0].text, "reasoning_content": "So."})
    assert total > 500
    assert found >= 0.95 * total


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_many_questions_about_one_document_by_the_published_forms(long_engine, textured_image, form):
    """From the third one on, all continue where the questions begin, up to the last end of a block."""
    llm, image = long_engine, textured_image(96, 128, 1)
    llm.reset_mm_cache()
    asked = [user(image, words(150), f"{number}: is it {words(3, number)}?") for number in range(64)]
    outputs = llm.chat(asked, GREEDY, use_tqdm=False, chat_template=qwen3_5_template(form))
    first, second = (output.prompt_token_ids.tolist() for output in outputs[:2])
    shared = common(first, second)
    found = sum(min(output.num_cached_tokens, shared) for output in outputs[2:])
    assert found >= 0.95 * 62 * (shared - shared % 64)


def common(tokens, other):
    """Number of equal tokens at the beginning of both."""
    pairs = enumerate(zip(tokens, other, strict=False))
    return next((i for i, (one, two) in pairs if one != two), min(len(tokens), len(other)))
