"""What bodies of requests are read as. (Whole tables of wrong ones go through HTTP, in tests/server.)"""

import random
import re
from typing import Any

import jsonschema
import pytest

from vlcache_jax import SamplingParams
from vlcache_jax.inputs.messages import ROLES, read_message
from vlcache_jax.protocol.requests import ChatRequest, CompletionRequest, Options, TokenizeRequest
from vlcache_jax.protocol.responses import ResponseRequest
from vlcache_jax.protocol.retrieval import ScoreRequest
from vlcache_jax.protocol.schema import ABSENT_IN_CHAT, CHAT, MESSAGE, ApiError, check, read_object, write
from vlcache_jax.request_options import RequestOptions

HELLO = [{"role": "user", "content": "Hello"}]


def parsed(**body):
    return ChatRequest.parse({"messages": HELLO} | body, {"max_tokens": None})


def test_what_a_chat_asks():
    request = parsed(
        model="m", max_tokens=None, max_completion_tokens=8, n=2, stop=["a"], logprobs=True, top_logprobs=3, seed=-1,
        logit_bias={"5": 1}, stream=True, stream_options={"include_usage": True}, priority=-2, cache_salt="s",
        reuse=0.1, return_cache_report=True, mm_processor_kwargs={"max_pixels": 9}, chat_template_kwargs={"a": 1},
        continue_final_message=True, ignore_eos=True, user="u", prompt_cache_key="k",
    )  # fmt: skip
    assert request.params == SamplingParams(
        max_tokens=8, n=2, stop=["a"], logprobs=3, logit_bias={5: 1}, ignore_eos=True
    )
    assert request.template == {"chat_template_kwargs": {"a": 1}, "continue_final_message": True}
    limits = {"max_pixels": 9}
    assert request.request_options == RequestOptions(reuse=0.1, cache_salt="s", priority=-2, mm_processor_kwargs=limits)
    options = request.options
    assert options.model == "m"
    assert (options.stream, options.include_usage, options.continuous_usage) == (True, True, False)
    assert (options.returns_cache, options.returns_token_ids) == (True, False)


def test_what_a_chat_does_not_say():
    request = parsed()
    assert request.params == SamplingParams(max_tokens=None)
    assert (request.request_options, request.options) == (RequestOptions(), Options())
    assert not request.template
    assert ChatRequest.parse({"messages": HELLO, "seed": -1}, {"seed": 7}).params.seed == 7
    assert parsed(logprobs=False).params.logprobs is None
    assert parsed(max_tokens=3, max_completion_tokens=5).params.max_tokens == 3


def test_a_cache_key_of_openai_is_no_salt():
    """It is no secret."""
    assert parsed(prompt_cache_key="k").request_options.cache_salt is None


@pytest.mark.parametrize("name", sorted(ABSENT_IN_CHAT))
def test_what_there_is_not_is_refused_by_name(name):
    for nothing in ABSENT_IN_CHAT[name]:
        parsed(**{name: nothing})
    with pytest.raises(ApiError, match=f"^{name} is not supported, got 'something'(: .+)?$") as told:
        parsed(**{name: "something"})
    assert (told.value.param, told.value.status) == (name, 400)
    assert name not in CHAT


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("store", True, "remove it, or use /v1/responses, which stores responses"),
        ("service_tier", "flex", "set priority"),
        ("service_tier", "priority", "set priority"),
        ("verbosity", "low", "state the length of the answer in a message"),
        ("prompt_cache_options", {"mode": "explicit"}, "remove it; the server's options control the cache"),
    ],
)
def test_what_would_have_no_effect_is_refused_with_what_to_write(name, value, remedy):
    given = {name: value}
    for read in (parsed, lambda **more: CompletionRequest.parse({"prompt": "a", **more})):
        with pytest.raises(ApiError) as told:
            read(**given)
        assert told.value.message == f"{name} is not supported, got {value!r}: {remedy}"


HYBRID = "{% if enable_thinking is false %}<think>\n\n</think>{% endif %}"
ALWAYS = "{{ message.content.split('</think>') }}<think>"
LEVELS = "{{ reasoning_effort }}</think>"


@pytest.mark.parametrize(
    ("template", "effort", "own", "asked"),
    [
        (HYBRID, "none", {}, {"enable_thinking": False}),
        (HYBRID, "none", {"a": 1, "enable_thinking": False}, {"a": 1, "enable_thinking": False}),
        (HYBRID, "medium", {"a": 1}, {"a": 1}),
        (HYBRID, None, {"enable_thinking": True}, {"enable_thinking": True}),
        (ALWAYS, "medium", {}, {}),
        (HYBRID + LEVELS, "none", {}, {"enable_thinking": False}),
        (HYBRID + LEVELS, "low", {}, {"reasoning_effort": "low"}),
        ("{{ messages }}", "none", {}, {}),  # it does not think
        *((LEVELS, effort, {"a": 1}, {"a": 1, "reasoning_effort": effort}) for effort in ("none", "low", "xhigh")),
    ],
)
def test_effort_is_what_the_template_makes_of_it(template, effort, own, asked):
    body = {"messages": HELLO, "reasoning_effort": effort, "chat_template_kwargs": own}
    for more, given in (({}, template), ({"chat_template": template}, "{{ another }}")):
        request = ChatRequest.parse(body | more, {"max_tokens": None}, given)
        assert request.template.get("chat_template_kwargs", {}) == asked


@pytest.mark.parametrize(
    ("template", "effort", "own", "message"),
    [
        (
            ALWAYS,
            "none",
            {},
            "must be a value that the chat template supports, got 'none': use a model that does not think, or",
        ),
        (HYBRID, "high", {}, "must be a value that the chat template supports, got 'high': remove it, or set the"),
        ("{{ messages }}", "low", {}, "must be a value that the chat template supports, got 'low': remove it"),
        (HYBRID, "none", {"enable_thinking": True}, "'none' contradicts enable_thinking in chat_template_kwargs"),
        (
            LEVELS,
            "low",
            {"reasoning_effort": "high"},
            "'low' contradicts reasoning_effort in chat_template_kwargs; set only one of them",
        ),
        (LEVELS, "some", {}, "must be one of none, minimal, low, medium, high, xhigh, max, got 'some'"),
        (LEVELS, 5, {}, "must be a string, got 5"),
    ],
)
def test_an_effort_that_the_template_does_not_have_is_refused(template, effort, own, message):
    body = {"messages": HELLO, "reasoning_effort": effort, "chat_template_kwargs": own}
    with pytest.raises(ApiError, match=rf"^reasoning_effort .*{re.escape(message)}") as told:
        ChatRequest.parse(body, {"max_tokens": None}, template)
    assert told.value.param == "reasoning_effort"


def test_what_a_response_asks_of_thinking():
    def read(**body):
        return ResponseRequest.parse({"input": "a", **body}).chat

    assert read(reasoning={"effort": "none", "summary": "auto", "generate_summary": None}) == {
        "reasoning_effort": "none"
    }
    assert read(reasoning={"context": "auto", "mode": "standard"}, text={"verbosity": "medium"}) == {}
    assert read(stream=True, stream_options={"include_usage": True, "include_obfuscation": False}) == {"stream": True}
    for body, param, message in (
        ({"reasoning": {"effort": "some"}}, "reasoning.effort", "must be one of none, minimal"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "must be one of auto, got 'detailed'"),
        ({"reasoning": {"generate_summary": "concise"}}, "reasoning.generate_summary", "must be one of auto"),
        ({"reasoning": {"context": "all_turns"}}, "reasoning.context", "must be one of auto"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode", "must be one of standard"),
        ({"reasoning": {"budget": 5}}, "reasoning", "'budget' in reasoning; expected one of effort, summary"),
        (
            {"stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
            "must be one of False",
        ),
        (
            {"stream_options": {"more": True}},
            "stream_options",
            "'more' in stream_options; expected one of include_",
        ),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "is not supported, got 'low': state the length"),
        ({"service_tier": "flex"}, "service_tier", "is not supported, got 'flex': set priority"),
        ({"reasoning_effort": "none"}, "reasoning_effort", "unknown field 'reasoning_effort' in body"),
        ({"request_id": "a"}, "request_id", "unknown field 'request_id' in body"),
    ):
        with pytest.raises(ApiError, match=re.escape(message)) as told:
            read(**body)
        assert told.value.param == param


def test_what_a_completion_asks():
    for prompt, prompts in (("a", ("a",)), (["a", "b"], ("a", "b")), ([1, 2], ([1, 2],)), ([[1], [2]], ([1], [2]))):
        request = CompletionRequest.parse({"prompt": prompt})
        assert (request.prompts, request.params.max_tokens) == (prompts, 16)
    assert CompletionRequest.parse({"prompt": "a", "max_tokens": 3, "logprobs": 2}).params.logprobs == 2


def test_what_is_tokenised():
    assert TokenizeRequest.parse({"prompt": "a", "add_special_tokens": True}).prompt == "a"
    request = TokenizeRequest.parse({"messages": HELLO, "add_generation_prompt": False, "return_token_strs": True})
    assert (request.prompt, request.template, request.returns_texts) == (HELLO, {"add_generation_prompt": False}, True)


SCHEMA = {
    "type": "object",
    "required": ["a"],
    "properties": {
        "a": {"type": ["integer", "null"], "minimum": 1, "maximum": 3},
        "b": {"type": "array", "maxItems": 2, "items": {"enum": ["x", "y"]}},
        "c": {"type": "string", "minLength": 2},
        "d": {"type": "boolean"},
        "f": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}},
    },
}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": 2, "b": ["x"], "c": "ab", "d": True, "e": 1}, None),
        ({"a": 2, "b": None}, None),
        (5, "v must be an object, got 5"),
        ({}, "v must have a"),
        ({"a": True}, "v.a must be an integer, got True"),
        ({"a": 2.0}, "v.a must be an integer"),
        ({"a": 0}, "v.a must be at least 1"),
        ({"a": 4}, "v.a must be at most 3"),
        ({"a": 1, "b": ["x", "z"]}, r"v.b\[1\] must be one of x, y, got 'z'"),
        ({"a": 1, "b": [None]}, r"v.b\[0\] must be one of"),
        ({"a": 1, "b": ["x"] * 3}, "v.b must have at most 2 items"),
        ({"a": 1, "c": "a"}, "v.c must have at least 2 characters"),
        ({"a": 1, "d": 1}, "v.d must be true or false"),
        ({"a": 1, "f": [9, 0]}, None),
        ({"a": 1, "f": [0, 10, 5]}, r"v.f\[1\] must be at most 9, got 10"),
        ({"a": 1, "f": [9, 3, -1]}, r"v.f\[2\] must be at least 0, got -1"),
        ({"a": 1, "f": [9, 0.5]}, r"v.f\[1\] must be an integer, got 0.5"),
    ],
)
def test_values_are_held_against_their_schema(value, message):
    if message is None:
        check(value, SCHEMA, "v")
    else:
        with pytest.raises(ApiError, match=message):
            check(value, SCHEMA, "v")


def test_json_is_read_and_written():
    assert read_object(b'{"a": [1.5, "\\u00e9"]}') == {"a": [1.5, "é"]}
    for wrong in (b"", b"[]", b"{", b'{"a": NaN}', b'{"a": 1e999}', b"[" * 100_000, b"\xff"):
        with pytest.raises(ValueError, match=r"^(must be|1e999 is no|NaN is no)"):
            read_object(wrong)
    assert write({"a": "é"}) == '{"a": "é"}'.encode()
    assert write({"a": "\ud800"}) == b'{"a": "\\ud800"}'


VALUES: list[Any] = [
    None, False, 0, 0.0, "", "a", [], {}, True, 1, ["a"], {"a": 1}, [None], [""], [{"text": "a"}],
    [{"type": "text", "text": "a"}], [{"type": None, "text": "a"}], [{"type": "thinking", "thinking": "a"}],
    [{"function": {"name": "f"}}], [{"function": {"name": "f", "arguments": "{}"}, "id": "a"}], [{"function": {}}],
]  # fmt: skip
KEYS = ("content", "name", "tool_call_id", "tool_calls", "reasoning", "reasoning_content", "refusal", "unknown")


def test_messages_are_taken_where_the_document_says_so():
    """Of routes that are documented by one schema: chats and `/tokenize`."""
    rng, schema = random.Random(0), jsonschema.Draft202012Validator(MESSAGE)
    taken = 0
    for _ in range(1500):
        message = {"role": rng.choice([*ROLES, *ROLES, "nobody"])}
        message |= {
            key: rng.choice(VALUES[: rng.choice((8, len(VALUES)))]) for key in rng.sample(KEYS, rng.randrange(1, 5))
        }
        try:
            check(message, MESSAGE, "messages[0]")
            read_message(message, "messages[0]", lambda *_: None)
            is_taken = True
        except ValueError:
            is_taken = False
        assert is_taken == schema.is_valid(message), message
        taken += is_taken
    assert 100 < taken < 1400


def test_what_is_scored_may_be_an_object_with_a_text_as_content():
    asked = ScoreRequest.parse({"queries": {"content": "a"}, "documents": [{"content": "b"}, {"text": "c"}]})
    assert asked.pairs == [("a", "b"), ("a", "c")]


@pytest.mark.parametrize(
    ("kind", "statuses"),
    [
        ("authentication_error", [401]),
        ("permission_error", [403]),
        ("not_found_error", [404]),
        ("rate_limit_error", [429]),
        ("invalid_request_error", [400, 402, 405, 408, 413, 428, 430, 499]),
        ("server_error", [500, 503]),
    ],
)
def test_an_error_is_of_the_kind_that_its_status_says(kind, statuses):
    assert {ApiError("no", status=status).to_dict()["error"]["type"] for status in statuses} == {kind}


@pytest.mark.parametrize(
    ("more", "calls"),
    [
        ({}, True),
        ({"tool_choice": "auto"}, True),
        ({"tool_choice": "none"}, False),
        ({"structured_outputs": {"choice": ["a"]}}, False),
        ({"tools": []}, False),
        ({"tools": [], "tool_choice": "none"}, False),
    ],
)
def test_calls_are_looked_for_where_there_may_be_some(more, calls):
    """What is held to something else is content, whatever it looks like."""
    request = parsed(**{"tools": [{"type": "function", "function": {"name": "look"}}]} | more)
    assert request.parts.calls is calls
    assert "tools" not in parsed().template
    assert parsed().parts.calls is False


@pytest.mark.parametrize(("given", "told"), [({}, True), ({"parallel_tool_calls": False}, False)])
def test_a_response_repeats_whether_there_may_be_several_calls(given, told):
    assert ResponseRequest.parse({"input": "a", **given}).repeated["parallel_tool_calls"] is told
