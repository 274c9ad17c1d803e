"""Models that think before they answer: what an answer is held to, and how thinking is turned off."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.helper import SIZES, assert_nothing_left, user, with_thinking_tags
from tests.server.helper import running
from vlcache_jax import AsyncLLM, SamplingParams, StructuredOutputs
from vlcache_jax.engine.thinking import CLOSING

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
HELLO = [{"role": "user", "content": "Hello"}]
_TURNS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{{ '\n' }}"
)
ALWAYS = _TURNS + "{% endif %}"
OPENS = (
    _TURNS + "{% if enable_thinking is defined and not enable_thinking %}{{ '\n</think>\n\n' }}{% endif %}{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "now"}}
SCHEMA = {"enum": ["red"]}
NAMED = {"name": "color", "schema": SCHEMA, "strict": True}
TAG = {"structures": [{"begin": "<f>", "schema": {"const": 7}, "end": "</f>"}], "triggers": ["<f"]}
# Each with what an answer is that the model is free to end.
HELD = {
    "a schema": ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, '"red"'),
    "json": ({"structured_outputs": {"json": SCHEMA}}, '"red"'),
    "a regex": ({"structured_outputs": {"regex": "r{3}"}}, "rrr"),
    "a choice": ({"structured_outputs": {"choice": ["red"]}}, "red"),
    "a grammar": ({"structured_outputs": {"grammar": 'start: "r" "ed"'}}, "red"),
    "GBNF": ({"structured_outputs": {"grammar": 'root ::= "r" tail\ntail ::= "ed"'}}, "red"),
    "a call": ({"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}, {"now": "{}"}),
}


@pytest.fixture(scope="module")
def engine(checkpoints, tmp_path_factory):
    directory = with_thinking_tags(checkpoints("qwen3_vl"), tmp_path_factory.mktemp("thinking") / "model")
    engine = AsyncLLM(directory, use_tqdm=False, **SIZES)
    yield engine
    engine.service.close()


@pytest.fixture
def served(engine):
    with running(engine, chat_template=OPENS) as served:
        yield served
    assert_nothing_left(engine)


@pytest.fixture(scope="module")
def bias(engine):
    """(likely tokens) -> what makes a model say the first of them that it may."""
    ids = engine.service.renderer.tokenizer.convert_tokens_to_ids

    def biased(*tokens):
        return {str(ids(token)): 100 - 12 * i for i, token in enumerate(tokens)}

    return biased


def said(message):
    """Content, or calls."""
    if calls := message.get("tool_calls"):
        return {one["function"]["name"]: one["function"]["arguments"] for one in calls}
    return message["content"]


def streamed(served, path, body):
    """The events of a stream."""
    status, _, found = served.ask("POST", path, body | {"stream": True})
    assert status == 200, found
    lines = [line.removeprefix("data: ") for line in found.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def joined(chunks, index):
    """A streamed message."""
    message = {"content": "", "reasoning": ""}
    calls = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            for key in message:
                message[key] += delta.get(key) or ""
            for call in delta.get("tool_calls", ()):
                name, function = call["index"], call["function"]
                one = calls.setdefault(name, {"function": {"name": function.get("name"), "arguments": ""}})
                one["function"]["arguments"] += function["arguments"]
    return message | {"tool_calls": list(calls.values())}


@pytest.mark.parametrize("name", HELD)
def test_what_is_held_comes_after_free_thinking(served, bias, name):
    """The model thinks until it says so, and never ends in it; what follows is held, streamed and whole."""
    more, expected = HELD[name]
    body = {"messages": HELLO, "n": 2, "temperature": 0, "frequency_penalty": 2, "max_tokens": 120, **more}
    # An end is likeliest, then another added token; each is less so with every time that it came.
    body["logit_bias"] = bias("<|im_end|>", "<|vision_start|>", "z", "</think>")
    status, found = served.json("POST", CHAT, body)
    assert status == 200, found
    chunks = streamed(served, CHAT, body)
    for choice in found["choices"]:
        message = choice["message"]
        assert said(message) == expected
        assert choice["finish_reason"] == ("tool_calls" if name == "a call" else "stop")
        assert set(message["reasoning"]) == {"z"}
        assert said(joined(chunks, choice["index"])) == expected
        assert joined(chunks, choice["index"])["reasoning"] == message["reasoning"]


@pytest.mark.parametrize("name", HELD)
def test_a_limit_within_thinking_leaves_thinking_alone(served, bias, name):
    body = {"messages": HELLO, "temperature": 0, "max_tokens": 5, "logit_bias": bias("z"), **HELD[name][0]}
    [choice] = served.json("POST", CHAT, body)[1]["choices"]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("zzzzz", "")
    assert choice["finish_reason"] == "length"
    message = joined(streamed(served, CHAT, body), 0)
    assert (message["reasoning"], message["content"]) == ("zzzzz", "")


@pytest.mark.parametrize("name", HELD)
def test_without_thinking_the_first_token_is_held(served, bias, name):
    more, expected = HELD[name]
    body = {"messages": HELLO, "temperature": 0, "max_tokens": 90, "logit_bias": bias("</think>", "z"), **more}
    for off in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        [choice] = served.json("POST", CHAT, body | off)[1]["choices"]
        assert said(choice["message"]) == expected
        assert "reasoning" not in choice["message"]


def test_structures_come_after_thinking(served, bias):
    """What may begin with a trigger is free before it, but the thinking is no part of that."""
    body = {"messages": HELLO, "temperature": 0, "max_tokens": 12, "structured_outputs": {"structural_tag": TAG}}
    message = served.json("POST", CHAT, body | {"logit_bias": bias("<", "f")})[1]["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("<" * 12, "")
    body |= {"logit_bias": bias("</think>", "f", "<"), "max_tokens": 4}
    message = served.json("POST", CHAT, body)[1]["choices"][0]["message"]
    assert (message.get("reasoning"), message["content"]) == (None, "f")


def test_responses_are_held_after_thinking(served, bias):
    body = {"input": "Hello", "temperature": 0, "frequency_penalty": 2, "max_output_tokens": 60}
    body["text"] = {"format": {"type": "json_schema", **NAMED}}
    body["logit_bias"] = bias("z", "</think>")
    status, found = served.json("POST", RESPONSES, body)
    assert status == 200, found
    whole = {item["type"]: item["content"][0]["text"] for item in found["output"]}
    assert whole["message"] == '"red"'
    assert set(whole["reasoning"]) == {"z"}
    last = streamed(served, RESPONSES, body)[-1]["response"]
    assert {item["type"]: item["content"][0]["text"] for item in last["output"]} == whole
    off = served.json("POST", RESPONSES, body | {"reasoning": {"effort": "none"}})[1]
    assert [item["type"] for item in off["output"]] == ["message"]
    assert off["output"][0]["content"][0]["text"] == '"red"'


def test_an_engine_holds_what_comes_after_thinking(engine, bias):
    """Of conversations, and of texts and tokens that a template made; if asked to, from the first token on."""
    tokenizer = engine.service.renderer.tokenizer
    made = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n<think>\n"
    engine.service.renderer.chat_template, own = OPENS, engine.service.renderer.chat_template

    def ask(prompt, tokens=("</think>",), **held):
        held = StructuredOutputs(choice=["red"], **held)
        biased = {int(token): value for token, value in bias(*tokens).items()}
        params = SamplingParams(temperature=0, max_tokens=12, logit_bias=biased, structured_outputs=held)

        async def last():
            return [output async for output in engine.generate(prompt, params)][-1]

        return asyncio.run(last()).outputs[0].text

    try:
        for prompt in (user("Hello"), made, {"prompt_token_ids": tokenizer(made)["input_ids"]}):
            assert ask(prompt) == "</think>\n\nred"
            assert ask(prompt, ["z"]) == "z" * 12
            assert ask(prompt, ["z"], enable_in_reasoning=True) == "red"
        assert ask(made + "\n</think>\n\n") == "red"
        assert ask("What does <think> mean?") == "red"
    finally:
        engine.service.renderer.chat_template = own


def test_thinking_that_is_not_told_apart_is_held(engine, bias):
    with running(engine, chat_template=OPENS, reasoning_parser="none") as served:
        body = {"messages": HELLO, "temperature": 0, "max_tokens": 9, "structured_outputs": {"choice": ["red"]}}
        message = served.json("POST", CHAT, body | {"logit_bias": bias("z")})[1]["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "red"}


def test_thinking_is_off_or_the_request_is_refused(engine, served):
    decode = engine.service.renderer.tokenizer.decode
    body = {"messages": HELLO, "max_tokens": 1, "return_token_ids": True}

    def prompt(served, **more):
        status, found = served.json("POST", CHAT, body | more)
        assert status == 200, found
        return decode(found["prompt_token_ids"])

    off = prompt(served, chat_template_kwargs={"enable_thinking": False})
    assert off.endswith("<think>\n\n</think>\n\n")
    assert prompt(served, reasoning_effort="none") == off
    assert prompt(served, reasoning_effort="medium") == prompt(served) != off
    with running(engine, chat_template=ALWAYS) as always:
        for path, more, param in (
            (CHAT, {"messages": HELLO, "reasoning_effort": "none"}, "reasoning_effort"),
            (RESPONSES, {"input": "Hello", "reasoning": {"effort": "none"}}, "reasoning.effort"),
        ):
            status, found = always.json("POST", path, more)
            assert (status, found["error"]["param"]) == (400, param)
            assert found["error"]["message"].startswith(
                f"{param} must be a value that the chat template supports, got 'none'"
            )


@pytest.mark.parametrize("budget", [0, 7])
def test_a_budget_closes_thinking_in_chats_and_responses(served, bias, budget):
    body = {"messages": HELLO, "temperature": 0, "max_tokens": 140, "logit_bias": bias("z")}
    body["thinking_token_budget"] = budget
    status, found = served.json("POST", CHAT, body)
    assert status == 200, found
    [choice] = found["choices"]
    assert choice["message"]["reasoning"] == ("z" * budget + CLOSING).partition("</think>")[0].strip("\n")
    assert set(choice["message"]["content"]) == {"z"}
    tokens = found["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert 100 < tokens - budget < 120
    chunks = streamed(served, CHAT, body)
    assert joined(chunks, 0)["content"] == choice["message"]["content"]
    assert joined(chunks, 0)["reasoning"] == choice["message"]["reasoning"]
    more = {"thinking_token_budget": budget, "logit_bias": body["logit_bias"], "max_output_tokens": 140}
    status, found = served.json("POST", RESPONSES, {"input": "Hello", "temperature": 0, **more})
    assert status == 200, found
    whole = {item["type"]: item["content"][0]["text"] for item in found["output"]}
    assert whole == {"reasoning": choice["message"]["reasoning"], "message": choice["message"]["content"]}


def test_a_budget_that_cannot_be_is_refused(served):
    for wrong in (-2, 1.5, "9"):
        status, found = served.json("POST", CHAT, {"messages": HELLO, "thinking_token_budget": wrong})
        assert (status, found["error"]["param"]) == (400, "thinking_token_budget")
    body = {"messages": HELLO, "thinking_token_budget": 3}
    body["structured_outputs"] = {"choice": ["red"], "enable_in_reasoning": True}
    status, found = served.json("POST", CHAT, body)
    assert status == 400
    assert "enable_in_reasoning" in found["error"]["message"]


def test_completions_think_where_their_prompt_says_so(served, bias):
    """The checkpoint's template does not think; the server's is not asked."""
    made = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n<think>\n"
    body = {"prompt": made, "temperature": 0, "max_tokens": 130, "logit_bias": bias("z"), "thinking_token_budget": 3}
    status, found = served.json("POST", "/v1/completions", body)
    assert status == 200, found
    assert found["choices"][0]["text"].startswith("zzz" + CLOSING + "z")
    held = body | {"structured_outputs": {"choice": ["red"]}}
    assert served.json("POST", "/v1/completions", held)[1]["choices"][0]["text"] == "zzz" + CLOSING + "red"


def test_an_effort_that_a_template_refuses_is_named(engine):
    with running(engine, chat_template="qwen3.8") as served:
        for path, more, param in (
            (CHAT, {"messages": HELLO, "reasoning_effort": "high"}, "reasoning_effort"),
            (RESPONSES, {"input": "Hello", "reasoning": {"effort": "high"}}, "reasoning.effort"),
        ):
            status, found = served.json("POST", path, more)
            assert status == 400
            message = "reasoning_effort must be xhigh, medium or low, got high"
            assert found["error"]["message"].endswith(message.removeprefix("reasoning_effort"))
            assert found["error"]["param"] in (param, "reasoning_effort")
