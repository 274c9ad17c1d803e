"""A limit of thinking tokens: the thinking is closed with forced tokens, and nothing else changes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.helper import SIZES, with_thinking_tags
from vlcache_jax import LLM, SamplingParams
from vlcache_jax.engine.thinking import CLOSING, Thinking, ThinkingTags

OPEN, CLOSE = "<think>", "</think>"
THINKING = "<|im_start|>user\nHello {}<|im_end|>\n<|im_start|>assistant\n<think>\n"
LONG = 170  # tokens; each character of the sentence that closes thinking is one
FREE = SamplingParams(temperature=0, max_tokens=LONG, ignore_eos=True, skip_special_tokens=False)


@pytest.fixture(scope="module", params=["qwen3_vl", "hybrid"])
def thinker(request, checkpoints, hybrid, tmp_path_factory):
    directory = hybrid if request.param == "hybrid" else checkpoints("qwen3_vl")
    return with_thinking_tags(directory, tmp_path_factory.mktemp("thinker") / "model")


@pytest.fixture(scope="module")
def llm(thinker):
    with LLM(thinker, use_tqdm=False, **SIZES) as llm:
        renderer = llm.service.renderer
        renderer.chat_template += "{# </think> #}"  # the template's model may think
        yield llm


@pytest.fixture
def tags(llm):
    return ThinkingTags.of(llm.get_tokenizer())


def ask(llm, params, *prompts):
    outputs = llm.generate([*prompts] or [THINKING.format("")], params, use_tqdm=False)
    return [one for output in outputs for one in output.outputs]


def changed(params=FREE, **changes):
    return dataclasses.replace(params, **changes)


@pytest.mark.parametrize("budget", [0, 1, 3, 4, 5, 9, 17, 30])
def test_thinking_is_closed_at_its_limit(llm, tags, budget):
    """Up to there the output is that without a limit. What follows is the model's again.

    Up to three more bytes complete a character.
    """
    [free] = ask(llm, FREE)
    [limited] = ask(llm, changed(thinking_token_budget=budget))
    begin = next(i for i in range(budget, budget + 4) if limited.token_ids[i : i + len(tags.closing)] == tags.closing)
    end = begin + len(tags.closing)
    assert CLOSE not in free.text
    assert limited.token_ids[:begin] == free.token_ids[:begin]
    assert len(limited.token_ids) == LONG
    known = llm.get_tokenizer()(THINKING.format(""))["input_ids"] + [*limited.token_ids[:end]]
    [after] = ask(llm, changed(max_tokens=LONG - end), {"prompt_token_ids": known})
    assert limited.token_ids[end:] == after.token_ids


def test_the_limit_does_not_hold_before_its_last_window(llm, monkeypatch):
    """Programs of several tokens decode the rest, as without a limit."""
    counts = {}
    for budget in (None, 1000, 40):
        before = llm.stats().windows
        ask(llm, changed(thinking_token_budget=budget))
        counts[budget] = llm.stats().windows - before
    window = SIZES["buckets"].window
    assert counts[1000] == counts[None]
    assert counts[40] <= counts[None] + window


def test_thinking_that_ends_by_itself_has_no_limit(llm, tags):
    bias = {tags.close: 100.0}  # the first token closes the thinking
    [free] = ask(llm, changed(logit_bias=bias, frequency_penalty=2))
    for budget in (1, 2, 10):
        [limited] = ask(llm, changed(logit_bias=bias, frequency_penalty=2, thinking_token_budget=budget))
        assert limited.token_ids == free.token_ids


def test_only_thinking_has_a_limit(llm, tags):
    """A prompt with closed thinking, or without tags; an output that begins with the tag has one."""
    for prompt in (THINKING.format("") + "</think>\n\n", "Hello <think> there", "Hello"):
        [free], [limited] = (ask(llm, changed(thinking_token_budget=budget), prompt) for budget in (None, 3))
        assert limited.token_ids == free.token_ids
    opens = changed(logit_bias={tags.opening: 100.0}, frequency_penalty=2)
    [free], [limited] = (ask(llm, changed(opens, thinking_token_budget=budget), "Hello") for budget in (None, 3))
    assert free.token_ids[0] == tags.opening
    assert limited.token_ids[:4] == free.token_ids[:4]
    assert limited.token_ids[4 : 4 + len(tags.closing)] == tags.closing


def test_many_at_once_are_as_alone(llm):
    """With other limits, penalties, seeds, log-probabilities and few pages, together and preempted."""
    params = [
        changed(thinking_token_budget=7),
        changed(thinking_token_budget=20, temperature=1, seed=3, n=2),
        FREE,
        changed(thinking_token_budget=11, presence_penalty=1, frequency_penalty=1),
        changed(thinking_token_budget=12, logprobs=2),
        changed(thinking_token_budget=5, bad_words=["Consi", "t"], min_tokens=30),
        changed(thinking_token_budget=6, max_tokens=9),
        changed(thinking_token_budget=25, allowed_token_ids=[*range(20, 90)]),
    ]
    prompts = [THINKING.format(i) for i in range(len(params))]
    alone = [ask(llm, one, prompt) for one, prompt in zip(params, prompts, strict=True)]
    llm.reset_prefix_cache()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    together = [output.outputs for output in outputs]
    for one, other in zip(alone, together, strict=True):
        assert [a.token_ids for a in one] == [b.token_ids for b in other]
    assert all(output.error is None for output in outputs)
    for probability, token in zip(outputs[4].outputs[0].logprobs, outputs[4].outputs[0].token_ids, strict=True):
        assert probability.token == token


def test_a_preempted_output_goes_on_with_the_same_tokens(llm, thinker):
    """There are too few pages for two of four outputs, so that some are preempted before, in or after forced tokens."""
    params = [changed(max_tokens=330, thinking_token_budget=budget) for budget in (9, 120, 190, 220)]
    prompts = [THINKING.format(i) for i in range(4)]
    expected = [ask(llm, one, prompt)[0].token_ids for one, prompt in zip(params, prompts, strict=True)]
    page = llm.stats().kv_cache_bytes // llm.stats().pages
    with LLM(thinker, use_tqdm=False, **SIZES | {"max_model_len": 512, "kv_cache_bytes": 6 * page}) as small:
        small.service.renderer.chat_template = llm.service.renderer.chat_template
        for seed in range(3):
            order = np.random.default_rng(seed).permutation(4).tolist()
            outputs = small.generate([prompts[i] for i in order], [params[i] for i in order], use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == [expected[i] for i in order]
            small.reset_prefix_cache()
        assert small.stats().preemptions > 0


def test_what_comes_after_thinking_is_held(llm, tags):
    """A grammar applies after forced tokens as after the model's own."""
    params = changed(thinking_token_budget=6, structured_outputs={"choice": ["red"]}, ignore_eos=False)
    [output] = ask(llm, params)
    assert output.text.endswith(f"{CLOSING}red")
    assert output.finish_reason == "stop"
    long = changed(params, structured_outputs={"regex": "r{40}"}, thinking_token_budget=2)
    assert ask(llm, long, THINKING.format("") + "</think>\n\n")[0].text == 40 * "r"  # forced at once
    assert ask(llm, long)[0].text.endswith(CLOSING + 40 * "r")
    [without] = ask(llm, changed(params, thinking_token_budget=0))
    assert without.text == f"{CLOSING}red"


def test_what_cannot_be_is_refused(llm, checkpoints):
    held = {"choice": ["red"], "enable_in_reasoning": True}
    with pytest.raises(ValueError, match=r"thinking_token_budget must be None if structured_outputs\.enable_in_reas"):
        ask(llm, changed(thinking_token_budget=3, structured_outputs=held))
    for wrong in (-2, 1.5, "9", True):
        with pytest.raises(ValueError, match="thinking_token_budget must be an integer from -1"):
            changed(thinking_token_budget=wrong)
    assert changed(thinking_token_budget=-1).thinking_token_budget is None
    with (
        LLM(checkpoints("qwen3_vl"), use_tqdm=False, **SIZES) as other,
        pytest.raises(ValueError, match="thinking_token_budget must be None for a tokenizer without the tokens <think"),
    ):
        ask(other, changed(thinking_token_budget=3))


@pytest.mark.parametrize("is_opened", [True, False])
def test_what_is_allowed_follows_from_what_is_known(monkeypatch, is_opened):
    tags = ThinkingTags(1, 2, (7, 2, 8), None)
    monkeypatch.setattr(ThinkingTags, "spelled", lambda self, token: {3: b" ", 4: b"\xc3"}.get(token, b"x"))
    everything = np.full(2, -1, np.int32)
    thinking = Thinking(tags, 4, 3, is_opened=is_opened, everything=everything)
    if not is_opened:
        assert [thinking.is_near(launched) for launched in (0, 2, 3)] == [False, False, True]
        thinking.append(3)
        thinking.append(1)
    begin = 0 if is_opened else 2
    assert thinking.limit == begin + 4
    for _ in range(3):
        thinking.append(9)
    assert [thinking.allowed(ahead) is everything for ahead in range(3)] == [True, False, False]
    assert thinking.allowed(1) is None  # one more token may close the thinking
    thinking.append(9)
    assert thinking.closing == (7, 2, 8)
    assert [int(thinking.allowed(ahead)[0]) for ahead in range(3)] == [1 << 7, 1 << 2, 1 << 8]
    assert thinking.allowed(3) is everything
    for token in (7, 2, 8):
        assert thinking.limit is not None
        thinking.append(token)
    assert (thinking.limit, thinking.closing, thinking.is_near(99)) == (None, (), False)


def test_a_character_is_completed_first(monkeypatch):
    monkeypatch.setattr(ThinkingTags, "spelled", lambda self, token: {4: "\u00e9".encode()[:1]}.get(token, b"x"))
    everything = np.full(2, -1, np.int32)
    for tokens, count in (([9, 4, 9], 3), ([9, 4, 4, 4, 4, 4], 5), ([9, 9], 2)):
        thinking = Thinking(ThinkingTags(1, 2, (7, 2), None), 2, 3, is_opened=True, everything=everything)
        for token in tokens[:count]:
            assert not thinking.closing
            assert thinking.allowed(0) is everything
            thinking.append(token)
            assert thinking.is_near(thinking.limit)
        assert thinking.closing == (7, 2)
