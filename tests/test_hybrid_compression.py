"""Compression of models with states: the layers with pages keep a part of the prompt, the states stay as they are."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.helper import SIZES, Oracle, give_compressed_pages, user
from vlcache_jax import LLM, BucketSizes, SamplingParams
from vlcache_jax.device.programs.compress import Compact, Observe

TOLD = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=0)
# Rows that are observed are fewer than a block of tokens; two steps take some prompts.
BUCKETS = BucketSizes(rows=(16, 64), patches=(256,), sequences=(4,), window=4)


@pytest.fixture(scope="module")
def directory(hybrid):
    return hybrid


def open_llm(directory, **changes):
    settings = {"buckets": BUCKETS, "compressed_kv_bytes": 2**22, "use_tqdm": False}
    return LLM(directory, **SIZES | settings | changes)


@pytest.fixture(scope="module")
def llm(directory):
    with open_llm(directory) as engine:
        yield engine


@pytest.fixture(scope="module")
def conversations(textured_image):
    image = textured_image(150, 170, 3)
    return [
        user("What is in ", image, "? Say it. " + "And say it again. " * 6),
        user("Only text: " + "be brief " * 20),
        user(image, "?"),
    ]


def ask(llm, *conversations, params=TOLD, **options):
    return llm.chat(list(conversations), params, use_tqdm=False, **options)


@pytest.fixture
def watched(llm, monkeypatch):
    """The tokens that each head keeps, and the sums of observed attention, in the order of launches."""
    kept, sums = [], []
    run = llm.service.device.runner.run

    def watching(program, *arguments):
        result = run(program, *arguments)
        if isinstance(program, Compact):
            kept.append(np.asarray(result[1])[:, : int(arguments[3][2])])
        elif isinstance(program, Observe):
            sums.append(np.asarray(result[0][0]))
        return result

    monkeypatch.setattr(llm.service.device.runner, "run", watching)
    return kept, sums


def continued(oracle, conversation, tokens, kept):
    """The logits of an answer's tokens, float32 [n, V], where full attention sees only `kept` of the prompt."""
    torch = pytest.importorskip("torch")
    inputs = oracle._inputs(oracle.llm.service.renderer.from_conversation(conversation))
    logits = []
    with torch.no_grad():
        out = oracle.model(use_cache=True, **inputs)
        logits.append(out.logits[0, -1].numpy())
        deltas = oracle.model.model.rope_deltas
        start = inputs["input_ids"].shape[1] + (0 if deltas is None else int(deltas.flatten()[0]))
        layer = out.past_key_values.layers[3]
        index = torch.tensor(kept.astype(np.int64))[None, :, :, None].expand(-1, -1, -1, layer.keys.shape[-1])
        layer.keys, layer.values = layer.keys.gather(2, index), layer.values.gather(2, index)
        for i, token in enumerate(tokens[:-1]):
            out = oracle.model(
                input_ids=torch.tensor([[token]]),
                position_ids=torch.full((3, 1, 1), start + i),
                **{oracle.cache: out.past_key_values},
            )
            logits.append(out.logits[0, -1].numpy())
    return np.stack(logits)


@pytest.mark.parametrize("policy", ["streaming-0.2", "snapkv-0.3", "vl-cache-0.3"])
def test_answers_are_the_librarys_with_a_part_of_the_keys(llm, directory, load_oracle, conversations, watched, policy):
    oracle = Oracle(load_oracle(directory), llm)
    for conversation in conversations:
        watched[0].clear()
        [output] = ask(llm, conversation, compress=policy)
        answer = output.outputs[0]
        [kept] = watched[0]
        assert output.compression.kept == (kept.shape[1],)
        assert kept.shape[1] < len(output.prompt_token_ids) / 2
        logits = continued(oracle, conversation, answer.token_ids, kept)
        expected = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(1, keepdims=True))
        own = [x.chosen for x in answer.logprobs]
        np.testing.assert_allclose(own, expected[range(len(own)), answer.token_ids], atol=3e-5, rtol=0)
        assert answer.token_ids == tuple(logits.argmax(1).tolist())


@pytest.mark.parametrize("snapshots", [True, False])
def test_what_is_observed_is_the_attention_of_the_last_rows(
    llm, directory, load_oracle, conversations, watched, snapshots, monkeypatch
):
    """From the last snapshot before these rows, or from the prompt's first token, if there is none."""
    torch = pytest.importorskip("torch")
    if not snapshots:
        monkeypatch.setattr(llm.service.cache.pages, "resume", lambda *_: None)
    oracle = Oracle(load_oracle(directory), llm)
    model, before = oracle.model, oracle.model.config._attn_implementation
    model.set_attn_implementation("eager")
    for conversation in conversations:
        llm.service.cache.pages.clear()
        watched[1].clear()
        ask(llm, conversation, compress="snapkv-0.3")
        inputs = oracle._inputs(llm.service.renderer.from_conversation(conversation))
        with torch.no_grad():
            found = model(output_attentions=True, **inputs)
        [weights] = [one for one in found.attentions if one is not None]
        _, heads, count, _ = weights.shape
        rows = min(32, count)
        expected = weights[0, :, -rows:].sum(1).reshape(2, heads // 2, count).mean(1).numpy()
        np.testing.assert_allclose(watched[1][-1][0, :, :count], expected, atol=2e-5, rtol=0)
    model.set_attn_implementation(before)


def test_together_and_from_few_pages_as_alone(directory, conversations):
    """Answers that wait for pages keep their states."""

    def same(outputs, expected):
        for output, one in zip(outputs, expected, strict=True):
            assert output.outputs[0].token_ids == one.outputs[0].token_ids
            own, others = ([x.chosen for x in found.outputs[0].logprobs] for found in (output, one))
            np.testing.assert_allclose(own, others, atol=1e-5, rtol=0)

    with open_llm(directory) as llm:
        alone = [ask(llm, one, compress="snapkv-0.3")[0] for one in conversations]
        full = ask(llm, *conversations)
        same(ask(llm, *conversations, compress="snapkv-0.3"), alone)
        assert [one.outputs[0].token_ids for one in alone] != [one.outputs[0].token_ids for one in full]
        long = dataclasses.replace(TOLD, max_tokens=110)  # which takes a page more
        alone = [ask(llm, one, params=long, compress="snapkv-0.3")[0] for one in conversations]
        give_compressed_pages(llm, 2)
        same(ask(llm, *conversations, params=long, compress="snapkv-0.3"), alone)
        same(ask(llm, *conversations), full)  # states and pages of others are as they were
        give_compressed_pages(llm)
