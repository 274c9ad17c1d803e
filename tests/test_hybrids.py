"""Models with states (Qwen3.5): alone and together, in steps of any size, after a preemption, and what is refused."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from tests.helper import FEW, SIZES, Oracle, give_decode_slots, give_pages, user
from vlcache_jax import LLM, AsyncLLM, BucketSizes, CacheConfig, SamplingParams, StructuredOutputs

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
BUCKETS = BucketSizes(rows=(64, 256), patches=(256,), sequences=(4,), window=4)


@pytest.fixture(scope="module")
def directory(hybrid):
    return hybrid


def open_llm(directory, **changes):
    return LLM(directory, **SIZES | {"buckets": BUCKETS} | changes)


@pytest.fixture(scope="module")
def llm(directory):
    with open_llm(directory) as engine:
        yield engine


@pytest.fixture(scope="module")
def conversations(textured_image):
    """Prompts of one and of several blocks, with images before, between and after text, and several turns."""
    a, b, c = textured_image(90, 130, 1), textured_image(150, 70, 2), textured_image(64, 260, 3)
    return [
        user("What is in ", a, " and in ", b, "? Say it. " + "And say it again, but not in the same words. " * 4),
        user("Only text: tell me about it, and be brief."),
        user(c, "?"),
        [
            {"role": "system", "content": "Be terse."},
            *user(b, c, a),
            {"role": "assistant", "content": "Yes."},
            *user("!"),
        ],
    ]


def answers(outputs):
    """The tokens of each answer and their log-probabilities, which are equal to the last bit or not at all."""
    return [[(one.token_ids, [x.chosen for x in one.logprobs]) for one in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def alone(llm, conversations):
    return [answers(llm.chat([one], GREEDY, use_tqdm=False))[0] for one in conversations]


def test_greedy_answers_are_the_librarys(llm, directory, load_oracle, conversations):
    outputs = llm.chat(conversations, GREEDY, use_tqdm=False)
    oracle = Oracle(load_oracle(directory), llm)
    expected = [oracle.answer(conversation, GREEDY.max_tokens) for conversation in conversations]
    assert [output.outputs[0].token_ids for output in outputs] == [tokens for tokens, _ in expected]
    scores = llm.score(conversations, [tokens for tokens, _ in expected], keep_logits=True, use_tqdm=False)
    for (_, logits), score in zip(expected, scores, strict=True):
        np.testing.assert_allclose(score.logits, logits, atol=2e-5 * np.abs(logits).max(), rtol=0)
        assert score.greedy.all()


@pytest.mark.slow
def test_a_warm_engine_compiles_nothing(directory, conversations, alone):
    with open_llm(directory) as engine:
        engine.service.ahead.stop()
        engine.warmup(verbose=False)
        before = engine.stats().programs
        assert answers(engine.chat(conversations, GREEDY, use_tqdm=False)) == alone
        assert engine.stats().programs == before


def test_together_as_alone_to_the_last_bit(llm, conversations, alone):
    assert answers(llm.chat(conversations, GREEDY, use_tqdm=False)) == alone
    assert answers(llm.chat(conversations[::-1], GREEDY, use_tqdm=False)) == alone[::-1]


@pytest.mark.parametrize("rows", [(64,), pytest.param((128, 192), marks=pytest.mark.slow)])
def test_in_steps_of_any_size_to_the_last_bit(directory, conversations, alone, rows):
    with open_llm(directory, buckets=dataclasses.replace(BUCKETS, rows=rows)) as engine:
        assert answers(engine.chat(conversations, GREEDY, use_tqdm=False)) == alone


def test_several_outputs_of_a_prompt_have_its_states(llm, conversations, alone):
    """Greedy outputs are equal; drawn ones are those of single outputs with the same seeds."""
    four = dataclasses.replace(GREEDY, n=4)
    assert answers(llm.chat(conversations, four, use_tqdm=False)) == [4 * one for one in alone]
    drawn = SamplingParams(temperature=1, seed=5, max_tokens=8, ignore_eos=True, n=3, logprobs=0)
    together = answers(llm.chat(conversations, drawn, use_tqdm=False))
    assert len({tuple(tokens) for tokens, _ in together[0]}) == 3
    assert answers(llm.chat([conversations[0]], drawn, use_tqdm=False)) == together[:1]


def test_outputs_that_begin_later_compute_the_prompt_again(directory, conversations, alone):
    with open_llm(directory) as engine:
        give_decode_slots(engine, 2)
        four = dataclasses.replace(GREEDY, n=4)
        assert answers(engine.chat(conversations, four, use_tqdm=False)) == [4 * one for one in alone]


def test_preempted_answers_go_on_as_they_were(directory, conversations, alone):
    with open_llm(directory) as engine:
        give_pages(engine, 5)
        long = dataclasses.replace(GREEDY, max_tokens=150)
        outputs = answers(engine.chat(conversations, long, use_tqdm=False))
        assert engine.stats().preemptions
        give_pages(engine, 64)
        expected = [answers(engine.chat([one], long, use_tqdm=False))[0] for one in conversations]
    for [(tokens, chosen)], [(expected_tokens, expected_chosen)] in zip(outputs, expected, strict=True):
        assert tokens == expected_tokens
        np.testing.assert_allclose(chosen, expected_chosen, atol=2e-5, rtol=0)


def test_states_of_others_do_not_matter(llm, conversations, alone):
    """NaN in every slot but the zero one, which an earlier sequence may have left."""
    runner = llm.service.device.runner
    llm.service.cache.pages.clear()
    with runner.pool.taken() as pool:
        for i in range(3):
            pool[i] = [jnp.asarray(one).at[1:].set(jnp.nan) for one in pool[i]]
    assert answers(llm.chat(conversations, GREEDY, use_tqdm=False)) == alone


def test_encoder_output_of_known_images_is_used_in_any_context(llm, conversations, textured_image):
    image = textured_image(90, 130, 9)
    first = llm.chat(user("One: ", image), GREEDY, use_tqdm=False)[0]
    [before] = first.cache.images
    again = llm.chat(user("Quite another beginning. ", image), GREEDY, use_tqdm=False)[0]
    [found] = again.cache.images
    assert (before.encoder, found.encoder) == ("computed", "host")
    assert found.kv == "none"
    assert found.recomputed == (found.tokens,) * 4
    off = llm.chat(user("Quite another beginning. ", image), GREEDY, reuse="off", use_tqdm=False)
    assert answers([again]) == answers(off)


@pytest.mark.parametrize(
    ("reuse", "reason"),
    [
        ("approximate", "'exact' or 'off', got 'approximate': an engine of qwen3_5 links .* only by its own policy"),
        ("shift-0.03", "'exact', 'off', or a policy that computes the first or the last tokens .* as one map"),
        ("full", "'exact' or 'off', got 'full': an engine of qwen3_5 links .* only by its own policy"),
        (0.1, "'exact' or 'off', got '0.1': an engine of qwen3_5 links .* only by its own policy"),
    ],
)
def test_reuse_that_links_is_refused(llm, conversations, reuse, reason):
    with pytest.raises(ValueError, match=rf"reuse( of a request)? must be {reason}"):
        llm.chat(conversations[0], GREEDY, reuse=reuse, use_tqdm=False)


def test_a_device_tier_needs_keys_in_all_layers(directory):
    with pytest.raises(ValueError, match=r"cache.device_bytes must be 0 for qwen3_5, got 1048576"):
        open_llm(directory, cache=CacheConfig(device_bytes=2**20))


def test_forced_tokens_change_the_states_as_decoded_ones_do(llm):
    """Many forced tokens are a prefill of blocks of one token each; with log-probabilities they are decoded."""
    held = SamplingParams(
        temperature=1, seed=3, max_tokens=60, structured_outputs={"regex": "b" + "a" * 40 + "[a-z]{8}"}
    )
    question = user("What is to be seen?")
    before = llm.stats().prefill_steps
    [together] = llm.chat([question], held, use_tqdm=False)
    steps = llm.stats().prefill_steps - before
    [apart] = llm.chat([question], dataclasses.replace(held, logprobs=0), use_tqdm=False)
    assert llm.stats().prefill_steps - before - steps < steps
    assert together.outputs[0].token_ids == apart.outputs[0].token_ids


def test_answers_to_a_schema_are_the_librarys(llm, directory, load_oracle, textured_image):
    """At each place where the schema leaves a choice, the library's most probable token. A token is a byte here."""
    schema = {
        "type": "object",
        "properties": {"where": {"enum": ["left", "lower right", "right"]}, "is_large": {"type": "boolean"}},
        "required": ["where", "is_large"],
        "additionalProperties": False,
    }
    texts = [
        json.dumps({"where": where, "is_large": is_large}, separators=(",", ":")).encode()
        for where in schema["properties"]["where"]["enum"]
        for is_large in (False, True)
    ]
    asked = StructuredOutputs(json=schema, disable_any_whitespace=True)
    params = SamplingParams(temperature=0, max_tokens=60, structured_outputs=asked)
    conversations = [user("Where is ", textured_image(90, 130, seed), "?") for seed in range(4)]
    outputs = llm.chat(conversations, params, use_tqdm=False)
    oracle = Oracle(load_oracle(directory), llm)
    for conversation, output in zip(conversations, outputs, strict=True):
        [own] = output.outputs
        expected, choices = b"", 0
        while expected not in texts:
            allowed = sorted({text[len(expected)] for text in texts if text.startswith(expected)})
            choices += len(allowed) > 1
            logits = oracle.logits(conversation, list(expected))[-1] if len(allowed) > 1 else None
            expected += bytes([allowed[0] if logits is None else allowed[int(logits[allowed].argmax())]])
        assert (own.text, own.finish_reason) == (expected.decode(), "stop")
        assert choices >= 2
    assert len({output.outputs[0].text for output in outputs}) > 1  # the schema alone does not make the answer


def test_scores_of_a_mixture_of_experts_are_the_librarys(checkpoints, load_oracle):
    """Of answers that no model would give, of several blocks and of less than one."""
    directory = checkpoints("qwen3_5_moe")
    rng = np.random.default_rng(3)
    conversations = [user("Say it! " + "And again. " * 4), user("Only this.")]
    given = [rng.integers(0, 256, count).tolist() for count in (70, 5)]
    with open_llm(directory, buckets=dataclasses.replace(FEW, rows=(256,))) as engine:  # one program of all layers
        scores = engine.score(conversations, given, keep_logits=True, use_tqdm=False)
        oracle = Oracle(load_oracle(directory), engine)
        for conversation, tokens, score in zip(conversations, given, scores, strict=True):
            logits = oracle.logits(conversation, tokens)[:-1]
            np.testing.assert_allclose(score.logits, logits, atol=2e-5 * np.abs(logits).max(), rtol=0)
            norm = np.logaddexp.reduce(logits.astype(np.float64), axis=-1)
            chosen = logits[np.arange(len(tokens)), tokens] - norm
            np.testing.assert_allclose(score.logprobs, chosen, atol=2e-5, rtol=0)


def test_vectors_are_the_librarys(llm, directory, load_oracle, textured_image):
    image = {"type": "image", "image": textured_image(64, 96, 3)}
    outputs = llm.embed(["a cat", [image, "what is it?"]], use_tqdm=False)
    oracle = Oracle(load_oracle(directory), llm)
    for output, content in zip(outputs, (["a cat"], [image, "what is it?"]), strict=True):
        own = [{"role": "system", "content": "Represent the user's input."}, {"role": "user", "content": content}]
        expected = oracle.last_hidden(llm.service.renderer.from_conversation(own))
        np.testing.assert_allclose(output.outputs.embedding, expected / np.linalg.norm(expected), atol=2e-5, rtol=0)


@pytest.mark.slow
def test_random_loads_with_aborts_and_few_pages(directory, textured_image):
    """Requests of any length begin and end at any time; each answer is that of its request alone."""
    rng = np.random.default_rng(11)
    images = [textured_image(64, 96, seed) for seed in range(3)]
    requests = []
    for i in range(30):
        parts = [images[i % 3]] * int(rng.integers(0, 2)) + ["word " * int(rng.integers(1, 60))]
        requests.append((user(*parts), int(rng.integers(1, 90)), int(rng.integers(1, 4))))

    async def run():
        async def one(number):
            conversation, tokens, count = requests[number]
            params = SamplingParams(temperature=1, seed=number, max_tokens=tokens, n=count, ignore_eos=True)
            found = None
            async for found in llm.generate(conversation, params):
                if number % 5 == 4 and sum(len(output.token_ids) for output in found.outputs) > 3:
                    return None  # the request is aborted
            return [output.token_ids for output in found.outputs]

        async with AsyncLLM(directory, use_tqdm=False, **SIZES | {"buckets": BUCKETS}) as llm:
            give_pages(LLM(llm.service), 6)
            return await asyncio.gather(*map(one, range(len(requests))))

    together = asyncio.run(run())
    with open_llm(directory) as engine:
        for number, (conversation, tokens, count) in enumerate(requests):
            params = SamplingParams(temperature=1, seed=number, max_tokens=tokens, n=count, ignore_eos=True)
            if number % 5 != 4:
                [alone] = engine.chat([conversation], params, use_tqdm=False)
                assert [output.token_ids for output in alone.outputs] == together[number], number
