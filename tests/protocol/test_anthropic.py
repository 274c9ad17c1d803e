"""Messages of Anthropic's API as chats, and answers of chats as its messages; without a model."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from vlcache_jax.outputs import (
    CacheReport,
    CompletionOutput,
    OutputCollector,
    PromptOutput,
    RequestDelta,
    RequestMetrics,
)
from vlcache_jax.protocol.answers import ChatAnswer
from vlcache_jax.protocol.anthropic_answers import MessageAnswer, complete_part, parsed_object
from vlcache_jax.protocol.anthropic_requests import ABSENT_IN_MESSAGES, MESSAGES, MessageRequest
from vlcache_jax.protocol.requests import ChatRequest, Options, OutputParts
from vlcache_jax.protocol.schema import ApiError
from vlcache_jax.server.anthropic import Signatures

HELLO = {"role": "user", "content": "Hello"}
TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {}}}
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
THINKS = "{{ enable_thinking }}</think>"  # a template whose model thinks, and that can turn this off
ALWAYS = "</think>"
LEVELS = "{{ enable_thinking }}{{ reasoning_effort }}</think>"
SIGNATURES = Signatures(b"secret")
EVENT = TypeAdapter(RawMessageStreamEvent)


def parsed(*messages, template="", **more):
    body = {"messages": list(messages) or [HELLO], "max_tokens": 9, **more}
    return MessageRequest.parse(body, template, SIGNATURES.fits)


def chat(*messages, **more):
    """The chat's body, which the chat's parser takes."""
    found = parsed(*messages, **more).chat
    ChatRequest.parse(found, {}, more.get("template"))
    return found


def text(text):
    return {"type": "text", "text": text}


# --- requests ---------------------------------------------------------------------------------------------------------


def test_fields_have_the_names_of_a_chat():
    found = chat(
        system=[{**text("Be brief."), "cache_control": {"type": "ephemeral"}}, text("Be kind.")],
        stop_sequences=["x"],
        temperature=0.5,
        top_k=3,
        metadata={"user_id": "a"},
        service_tier="auto",
        reuse="off",
        cache_control={"type": "ephemeral"},
        mcp_servers=[],
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    )
    assert found == {
        "messages": [{"role": "system", "content": "Be brief.\n\nBe kind."}, HELLO],
        "max_tokens": 9,
        "stop": ["x"],
        "temperature": 0.5,
        "top_k": 3,
        "reuse": "off",
    }


def test_the_line_that_differs_in_each_request_is_left_out():
    """Claude Code's, at the beginning of the prompt: nothing after it could be reused."""
    found = chat(system=[text("x-anthropic-billing-header: cc_version=1; cch=4f;"), text("You help.")])
    assert found["messages"][0] == {"role": "system", "content": "You help."}
    assert chat(system=[text("x-anthropic-billing-header: a")])["messages"] == [HELLO]


def test_results_of_tools_are_messages_with_their_images_in_order():
    call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": 3}}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": SIGNATURES.sign("Hm.")}
    found = chat(
        HELLO,
        {"role": "assistant", "content": [thought, {"type": "redacted_thinking", "data": "x"}, text("I look."), call]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [PNG, text("a page"), PNG]},
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": "gone", "is_error": True},
                {"type": "tool_result", "tool_use_id": "toolu_3", "content": [PNG], "is_error": True},
                {"type": "tool_result", "tool_use_id": "toolu_4"},
                text("And now?"),
                PNG,
            ],
        },
    )
    assert found["messages"][1:] == [
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"type": "function", "id": "toolu_1", "function": {"name": "look", "arguments": {"at": 3}}}],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": [PART, text("a page"), PART]},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "Error: gone"},
        {"role": "tool", "tool_call_id": "toolu_3", "content": [text("Error: "), PART]},
        {"role": "tool", "tool_call_id": "toolu_4", "content": ""},
        {"role": "user", "content": [text("And now?"), PART]},
    ]


def test_images_are_those_of_a_chat():
    for source, part in (
        ({"type": "url", "url": "https://a.b/c.png"}, {"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}),
        ({"type": "file", "file_id": "file-1"}, {"type": "input_image", "file_id": "file-1"}),
    ):
        image = {"type": "image", "source": source, "transformations": {"oversized_image": "downsize"}}
        assert chat({"role": "user", "content": [image]})["messages"][0]["content"] == [part]


def test_tools_and_their_choice():
    offered = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {
        "type": "object", "properties": {}
    }}}  # fmt: skip
    custom = TOOL | {"type": "custom", "cache_control": {"type": "ephemeral"}, "eager_input_streaming": True}
    for choice, own in (
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "look"}, {"type": "function", "function": {"name": "look"}}),
    ):
        found = chat(tools=[custom], tool_choice=choice)
        assert (found["tools"], found["tool_choice"]) == ([offered], own)
        assert "parallel_tool_calls" not in found
    found = chat(tools=[TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert found["parallel_tool_calls"] is False


@pytest.mark.parametrize(
    ("template", "thinking", "own"),
    [
        (THINKS, {"type": "enabled", "budget_tokens": 5}, {"enable_thinking": True, "budget": 5}),
        (THINKS, {"type": "adaptive"}, {"enable_thinking": True}),
        (THINKS, {"type": "disabled"}, {"enable_thinking": False}),
        (ALWAYS, {"type": "enabled", "budget_tokens": 5}, {"budget": 5}),
        (ALWAYS, {"type": "adaptive", "display": "omitted"}, {"include_reasoning": False}),
        ("", {"type": "enabled", "budget_tokens": 5}, {}),  # a model that does not think keeps each budget
        ("", {"type": "disabled"}, {}),
        ("{{ reasoning_effort }}</think>", {"type": "disabled"}, {"reasoning_effort": "none"}),
    ],
)
def test_thinking(template, thinking, own):
    found = chat(template=template, thinking=thinking)
    kwargs = {name: own.pop(name) for name in ("enable_thinking",) if name in own}
    assert found.get("chat_template_kwargs", {}) == kwargs
    assert found.get("thinking_token_budget") == own.pop("budget", None)
    assert {name: found[name] for name in ("include_reasoning", "reasoning_effort") if name in found} == own


def test_the_effort_and_the_form_of_an_answer():
    schema = {"type": "object"}
    form = {"type": "json_schema", "schema": schema}
    for more in ({"output_config": {"format": form, "effort": "max"}}, {"output_format": form}):
        found = chat(**more)
        assert found["response_format"] == {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        assert "reasoning_effort" not in found
    assert chat(template=LEVELS, output_config={"effort": "low"})["reasoning_effort"] == "low"


def test_a_last_message_of_the_assistant_is_continued():
    begun = {"role": "assistant", "content": "The answer is ("}
    found = chat(HELLO, begun)
    assert (found["messages"][-1], found["continue_final_message"]) == (begun, True)
    found = chat(HELLO, {"role": "assistant", "content": []}, HELLO)  # an answer may be empty
    assert (found["messages"][1]["content"], "continue_final_message" in found) == ("", False)


def user(*content):
    return {"messages": [{"role": "user", "content": list(content)}]}


def assistant(*content):
    return {"messages": [HELLO, {"role": "assistant", "content": list(content)}]}


CALL = {"type": "tool_use", "id": "a", "name": "look", "input": {}}


@pytest.mark.parametrize(
    ("template", "body", "param"),
    [
        ("", {"max_tokens": None}, "max_tokens"),
        ("", {"messages": None}, "messages"),
        ("", {"messages": []}, "messages"),
        ("", {"surprise": 1}, "surprise"),
        ("", {"logprobs": True}, "logprobs"),
        ("", {"container": "c"}, "container"),
        ("", {"mcp_servers": [{}]}, "mcp_servers"),
        ("", {"service_tier": "priority"}, "service_tier"),
        ("", {"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management.edits[0]"),
        ("", {"output_config": {"task_budget": 3}}, "output_config"),
        ("", {"output_config": {"effort": "most"}}, "output_config.effort"),
        ("", {"output_config": {"format": {"type": "text", "schema": {}}}}, "output_config.format.type"),
        ("", {"thinking": {"type": "between_tools"}}, "thinking.type"),
        (THINKS, {"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        (ALWAYS, {"thinking": {"type": "disabled"}}, "thinking.type"),
        (
            THINKS,
            {"thinking": {"type": "adaptive"}, "chat_template_kwargs": {"enable_thinking": False}},
            "thinking.type",
        ),
        ("", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ("", {"tools": [{"name": "look"}]}, "tools[0].input_schema"),
        ("", {"tools": [TOOL | {"defer_loading": True}]}, "tools[0].defer_loading"),
        ("", {"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ("", {"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ("", {"tool_choice": {"type": "any"}}, "tool_choice"),
        (
            "",
            {"tools": [TOOL], "tool_choice": {"type": "any"}, "output_format": {"type": "json_schema", "schema": {}}},
            "tool_choice.type",
        ),
        ("", {"system": [PNG]}, "system[0]"),
        ("", {"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ("", {"messages": [HELLO | {"name": "a"}]}, "messages[0]"),
        ("", user(), "messages[0].content"),
        ("", user({"type": "document"}), "messages[0].content[0]"),
        ("", user(text("a"), CALL), "messages[0].content[1]"),
        ("", user({"type": "text", "text": 3}), "messages[0].content[0].text"),
        ("", user(PNG | {"alt": "a"}), "messages[0].content[0]"),
        ("", user({"type": "image", "source": {"type": "s3"}}), "messages[0].content[0].source"),
        (
            "",
            user({"type": "image", "source": {"type": "base64", "media_type": "image/tiff", "data": ""}}),
            "messages[0].content[0].source.media_type",
        ),
        ("", user({"type": "tool_result", "content": "a"}), "messages[0].content[0].tool_use_id"),
        (
            "",
            user({"type": "tool_result", "tool_use_id": "a", "content": [text("a"), {"type": "document"}]}),
            "messages[0].content[0].content[1]",
        ),
        ("", assistant(PNG), "messages[1].content[0]"),
        ("", assistant(CALL), "messages[1]"),
        ("", assistant(CALL | {"name": ""}), "messages[1].content[0].name"),
        ("", assistant(CALL | {"input": "{}"}), "messages[1].content[0].input"),
        ("", assistant({"type": "thinking", "thinking": "a"}), "messages[1].content[0].signature"),
        (
            "",
            assistant({"type": "thinking", "thinking": "a", "signature": SIGNATURES.sign("b")}),
            "messages[1].content[0].signature",
        ),
    ],
)
def test_what_is_wrong_is_named(template, body, param):
    with pytest.raises(ApiError) as error:
        parsed(template=template, **body) if "messages" not in body else MessageRequest.parse(
            {"max_tokens": 9} | body, template, SIGNATURES.fits
        )
    assert (error.value.status, error.value.param) == (400, param)
    assert error.value.message.startswith((param.partition("[")[0].partition(".")[0], "unknown field"))


def test_a_tool_of_anthropic_is_refused_by_its_name():
    with pytest.raises(ApiError, match=r"tools\[0\] 'web_search' of type 'web_search_20250305' is not supported"):
        parsed(tools=[{"type": "web_search_20250305", "name": "web_search"}])


@pytest.mark.parametrize(
    ("message", "own"),
    [
        ("messages[0] must", "system must"),
        ("messages[1] content[1] must", "messages[0].content[1] must"),
        ("messages[1].content[1]", "messages[0].content[1]"),
        ("messages[2] tool_calls[0] must", "messages[1].content[1] must"),
        ("messages[3] content[1] must", "messages[2].content[0].content[1] must"),
        ("messages[4] must", "messages[2] must"),
        ("messages: images[0] must", "messages: images[0] must"),
        ("tools[3].function.parameters must", "tools[3].input_schema must"),
        ("tools[3].function.name must", "tools[3].name must"),
        ("stop must", "stop_sequences must"),
        ("stop_token_ids must", "stop_token_ids must"),
        ("thinking_token_budget must", "thinking.budget_tokens must"),
        ("response_format must", "output_config.format must"),
    ],
)
def test_errors_of_the_chat_have_places_of_the_request(message, own):
    request = parsed(
        {"role": "user", "content": [text("a"), PNG]},
        {"role": "assistant", "content": [text("b"), CALL]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "a", "content": [text("c"), PNG]}, text("d")],
        },
        system="Be brief.",
    )
    found = request.error(ApiError(message, message.removesuffix(" must"), 400))
    assert (found.message, found.param) == (own, own.removesuffix(" must"))
    long = request.error(ApiError("messages must be shorter", code="context_length_exceeded"))
    assert long.message == "prompt is too long: messages must be shorter"


def test_errors_have_the_kinds_of_their_status():
    kinds = {
        400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
        405: "invalid_request_error", 413: "request_too_large", 429: "rate_limit_error", 500: "api_error",
        503: "api_error",
    }  # fmt: skip
    for status, kind in kinds.items():
        expected = ApiError("no", "a", status).to_anthropic("req_1")
        assert expected == {"type": "error", "error": {"type": kind, "message": "no"}, "request_id": "req_1"}
    assert ApiError("full", status=503, retry_after=1).to_anthropic("")["error"]["type"] == "overloaded_error"


def test_signatures_are_of_one_secret():
    assert SIGNATURES.fits("a", Signatures(b"secret").sign("a"))
    for text_, signature in (("b", SIGNATURES.sign("a")), ("a", "ö"), ("a", ""), ("a", Signatures().sign("a"))):
        assert not SIGNATURES.fits(text_, signature)
    assert SIGNATURES.fits("\ud800", SIGNATURES.sign("\ud800"))


def test_fields_that_have_no_effect_are_no_others():
    assert not set(MESSAGES) & set(ABSENT_IN_MESSAGES)


# --- answers ----------------------------------------------------------------------------------------------------------

HERMES = '<tool_call>\n{{"name": "look", "arguments": {}}}\n</tool_call>'
TWO = f"<think>\nHm.\n</think>\n\nI look. {HERMES.format('{"at": 3, "deep": {"a": [1, "x"]}}')}\n{HERMES.format('{}')}"
TEXTS = {
    "text": "Hello you.",
    "nothing": "",
    "thinking": "<think>\nHm.\n</think>\n\nHello.",
    "calls": TWO,
    "text between calls": f"{HERMES.format('{}')} and {HERMES.format('{"at": 1}')} done",
    "a broken call": '<tool_call>\n{"name": "look", "arguments": {"at": 3, nothing}}\n</tool_call>',
}
CUT = TWO.partition(HERMES.format("{}"))[0].rstrip()


def deltas(texts, reason, stop=None):
    expected = PromptOutput("", np.zeros(7, np.int32), 3, CacheReport((), True, "exact", (), 2))
    for i, text_ in enumerate(texts):
        is_last = i == len(texts) - 1
        ends = (reason, stop) if is_last else (None, None)
        one = CompletionOutput(0, text_, tuple(text_.encode()), *ends)
        yield RequestDelta("a", (one,), RequestMetrics(), expected if i == 0 or is_last else None, is_last)


def writer(**parts):
    options = Options(returns_cache=True)
    given = {"parts": OutputParts(thoughts=True, calls=True, **parts), "chat_template": ALWAYS}
    return MessageAnswer(ChatAnswer("msg_1", "m", options, **given), SIGNATURES.sign)


def whole(texts, reason="stop", stop=None, **parts):
    collector = OutputCollector()
    for delta in deltas(texts, reason, stop):
        collector.add(delta)
    return writer(**parts).whole([collector.output()])


def events(texts, reason="stop", stop=None, **parts):
    made = writer(**parts)
    found = [*itertools.chain(*map(made.pieces, deltas(texts, reason, stop))), *made.last()]
    for event in found:
        assert event["type"] == "ping" or EVENT.validate_python(event)
    return found


def joined(events):
    """The message of a stream, as the official client joins it."""
    buffers = {}
    message = None
    for event in events:
        if event["type"] != "ping":
            message = accumulate_event(event=EVENT.validate_python(event), current_snapshot=message, json_bufs=buffers)
    return message


def shown(message):
    return Message.model_validate(message).model_dump(exclude_none=True, exclude={"cache"})


@pytest.mark.parametrize("name", TEXTS)
def test_a_stream_is_the_whole_message_at_every_split(name):
    text_ = TEXTS[name]
    expected = shown(whole([text_]))
    for i in range(len(text_) + 1):
        assert shown(joined(events([text_[:i], text_[i:]])).model_dump()) == expected
    assert shown(joined(events([*text_, ""])).model_dump()) == expected
    assert shown(whole([*text_, ""])) == expected


XML = (
    "I look.\n<tool_call>\n<function=look>\n<parameter=at>\n3\n</parameter>\n<parameter=to>\na page\n</parameter>\n"
    "</function>\n</tool_call>\n<tool_call>\n<function=wait>\n</function>\n</tool_call>"
)
OFFERED = [
    {"type": "function", "function": {"name": name, "parameters": {"properties": {"at": {"type": "integer"}}}}}
    for name in ("look", "wait")
]


@pytest.mark.parametrize(("text_", "parts"), [(TWO, {}), (XML, {"xml_tools": OFFERED})])
@settings(deadline=None, max_examples=40)
@given(end=st.integers(0, max(len(TWO), len(XML))), places=st.lists(st.integers(0, len(TWO)), max_size=6))
def test_a_stream_that_is_cut_is_the_whole_message(text_, parts, end, places):
    text_ = text_[:end]
    end = len(text_)
    bounds = [0, *sorted(min(one, end) for one in places), end]
    texts = [text_[begin:end] for begin, end in itertools.pairwise(bounds)]
    expected = whole([text_], "length", **parts)
    assert expected["stop_reason"] == "max_tokens"
    found = events(texts, "length", **parts)
    assert shown(joined(found).model_dump()) == shown(expected)
    inputs = {}
    for event in found:
        if event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
            inputs[event["index"]] = inputs.get(event["index"], "") + event["delta"]["partial_json"]
    for index, block in enumerate(expected["content"]):
        if block["type"] == "tool_use":
            assert json.loads(inputs[index]) == block["input"]  # also for clients that read no partial JSON


def test_calls_in_xml():
    expected = whole([XML], xml_tools=OFFERED)
    assert [one.get("input") for one in expected["content"]] == [None, {"at": 3, "to": "a page"}, {}]
    assert expected["stop_reason"] == "tool_use"


def test_a_cut_call_has_the_arguments_that_are_complete():
    cut = CUT.removesuffix('"x"]}}}\n</tool_call>')
    expected = whole([cut], "length")
    assert [one["type"] for one in expected["content"]] == ["thinking", "text", "tool_use"]
    assert expected["content"][2]["input"] == {"at": 3}


def test_the_events_of_a_message():
    begin, comma, end = HERMES.format('{"at": 3, "on": 1}').partition("3,")
    found = events(["<think>\nHm.", "\n</think>\n\nI look. ", begin + comma, end])
    signature = SIGNATURES.sign("Hm.")
    [call] = [event["content_block"] for event in found if event.get("content_block", {}).get("type") == "tool_use"]
    assert call == {"type": "tool_use", "id": call["id"], "name": "look", "input": {}}
    assert call["id"].startswith("toolu_")
    kinds = [(event["type"], event.get("index"), event.get("delta")) for event in found]
    assert kinds == [
        ("message_start", None, None),
        ("ping", None, None),
        ("content_block_start", 0, None),
        ("content_block_delta", 0, {"type": "thinking_delta", "thinking": "Hm."}),
        ("content_block_delta", 0, {"type": "signature_delta", "signature": signature}),
        ("content_block_stop", 0, None),
        ("content_block_start", 1, None),
        ("content_block_delta", 1, {"type": "text_delta", "text": "I look."}),
        ("content_block_stop", 1, None),
        ("content_block_start", 2, None),
        ("content_block_delta", 2, {"type": "input_json_delta", "partial_json": '{"at": 3'}),
        ("content_block_delta", 2, {"type": "input_json_delta", "partial_json": ', "on": 1}'}),
        ("content_block_stop", 2, None),
        ("message_delta", None, {"stop_reason": "tool_use", "stop_sequence": None}),
        ("message_stop", None, None),
    ]
    usage = {"input_tokens": 2, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 5}
    assert found[0]["message"]["content"] == []
    assert found[0]["message"]["usage"].items() >= usage.items()
    assert found[-2]["usage"].items() >= usage.items()
    assert found[-2]["cache"]["policy"] == "exact"


@pytest.mark.parametrize(
    ("reason", "stop", "ended"),
    [
        ("stop", None, ("end_turn", None)),
        ("stop", "END", ("stop_sequence", "END")),
        ("stop", 7, ("end_turn", None)),  # a token of `stop_token_ids`
        ("length", None, ("max_tokens", None)),
    ],
)
def test_why_a_message_ended(reason, stop, ended):
    expected = whole(["Hello"], reason, stop)
    assert (expected["stop_reason"], expected["stop_sequence"]) == ended


def test_thinking_that_is_left_out():
    expected = whole([TEXTS["thinking"]], returns_thoughts=False)
    assert expected["content"] == [{"type": "text", "text": "Hello."}]
    assert joined(events([*TEXTS["thinking"], ""], returns_thoughts=False)).content[0].text == "Hello."


def test_an_error_ends_a_stream():
    made = writer()
    assert made.failed(ApiError("no", status=500)) == {
        "type": "error", "error": {"type": "api_error", "message": "no"}, "request_id": "req_1"
    }  # fmt: skip


@settings(deadline=None, max_examples=50)
@given(
    st.dictionaries(st.text(max_size=3), st.text(max_size=4) | st.lists(st.text(max_size=2), max_size=2), max_size=3)
)
def test_the_complete_part_of_cut_arguments(arguments):
    text_ = json.dumps(arguments)
    for end in range(len(text_)):
        found = parsed_object((complete_part("", text_[:end]) or "{") + "}")
        assert found == dict(itertools.islice(arguments.items(), len(found)))


def test_numbers_that_json_does_not_have():
    assert parsed_object('{"a": 1e999}') is None
    assert parsed_object('{"a": ' * 5000 + "1" + "}" * 5000) is None
