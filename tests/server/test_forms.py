"""What answers over HTTP are held to, and what they are told apart into."""

from __future__ import annotations

import asyncio
import json
import types

import jsonschema
import pytest

from vlcache_jax.server import lifecycle
from vlcache_jax.server.app import Server
from vlcache_jax.server.config import ServerConfig

HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": ["left", "right"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["place", "count"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "wait"}},
]
WARM = {"temperature": 1, "seed": 5, "max_completion_tokens": 200}
CHAT = "/v1/chat/completions"


@pytest.fixture
def completions(serve, client):
    return client(serve()).chat.completions


def test_an_answer_of_a_schema(completions):
    spaces = dict.fromkeys(("9", "10", "13", "32"), -100)  # of which there may be any number
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
    given = {"model": "qwen3_vl", "messages": HELLO, "response_format": form, "logit_bias": spaces, **WARM}
    found = completions.create(**given, n=3)
    for choice in found.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    told = [""] * 3
    for chunk in completions.create(**given, n=3, stream=True):
        for choice in chunk.choices:
            told[choice.index] += choice.delta.content or ""
    assert told == [choice.message.content for choice in found.choices]


def test_any_object_and_vllms_names(completions):
    found = completions.create(
        model="qwen3_vl", messages=HELLO, **WARM, extra_body={"structured_outputs": {"choice": ["left", "right"]}}
    )
    assert found.choices[0].message.content in ("left", "right")
    found = completions.create(
        model="qwen3_vl", messages=HELLO, response_format={"type": "json_object"}, **WARM | {"seed": 1}
    )
    if found.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(found.choices[0].message.content), dict)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_calls_that_are_forced(completions, choice):
    given = {"model": "qwen3_vl", "messages": HELLO, "tools": TOOLS, "tool_choice": choice, **WARM}
    found = completions.create(**given, parallel_tool_calls=False).choices[0]
    assert found.finish_reason == "tool_calls"
    [call] = found.message.tool_calls
    assert not found.message.content
    if call.function.name == "look":
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    assert call.function.name in ("look", "wait") if choice == "required" else call.function.name == "look"
    # Streamed it is the same, but for ids, which are of the answer.
    name, arguments, reason = "", "", None
    for chunk in completions.create(**given, parallel_tool_calls=False, stream=True):
        [one] = chunk.choices
        reason = one.finish_reason or reason
        for piece in one.delta.tool_calls or ():
            assert piece.index == 0
            name += piece.function.name or ""
            arguments += piece.function.arguments or ""
    assert (name, arguments, reason) == (call.function.name, call.function.arguments, "tool_calls")
    # And the conversation goes on with it.
    told = [
        *HELLO,
        found.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "nothing there"},
    ]
    assert completions.create(model="qwen3_vl", messages=told, tools=TOOLS, max_tokens=2).choices


def test_no_call_is_forced(serve):
    served = serve()
    for more in ({"tool_choice": "auto"}, {"tool_choice": "none"}, {}):
        status, found = served.json("POST", CHAT, {"messages": HELLO, "tools": TOOLS, "max_tokens": 3, **more})
        assert status == 200
        assert "tool_calls" not in found["choices"][0]["message"]


def test_calls_stay_text_without_a_parser(serve):
    served = serve(tool_call_parser="none")
    body = {"messages": HELLO, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, **WARM}
    status, found = served.json("POST", CHAT, body)
    assert status == 200
    assert found["choices"][0]["message"]["content"].startswith("<tool_call>\n")


def test_thinking_is_told_apart(serve):
    """The template opens the thinking, so that answers have but its end."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content[0].text if m.content is not string else "
        "m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    body = {"messages": HELLO, "structured_outputs": None, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    served = serve(chat_template=template)
    status, found = served.json("POST", CHAT, body)
    assert status == 200
    message = found["choices"][0]["message"]
    assert message["content"] == ""  # the thinking has not ended
    assert message["reasoning"] == message["reasoning_content"] != ""
    assert found["usage"]["completion_tokens_details"] == {"reasoning_tokens": 8}
    more = body | {"include_reasoning": False, "logprobs": True, "return_token_ids": True}
    hidden = served.json("POST", CHAT, more)[1]
    [choice] = hidden["choices"]
    assert choice["message"] == {"role": "assistant", "content": ""}
    assert (choice["logprobs"], choice["token_ids"]) == ({"content": []}, [])
    assert hidden["usage"]["completion_tokens_details"] == {"reasoning_tokens": 8}
    response = served.json("POST", "/v1/responses", {
        "input": "Hello", "max_output_tokens": 8, "ignore_eos": True, "temperature": 0, "top_logprobs": 1
    })[1]  # fmt: skip
    [item] = response["output"]
    assert (item["type"], item["content"][0]["text"]) == ("reasoning", message["reasoning"])
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 8}
    plain = serve(chat_template=template, reasoning_parser="none").json("POST", CHAT, body)[1]
    assert plain["choices"][0]["message"]["content"].strip("\n") == message["reasoning"].strip("\n")
    # A form of its own holds what comes after that, and where thinking is not told apart, all.
    form = body | {"structured_outputs": {"choice": ["yes"]}, "ignore_eos": False}
    formed = served.json("POST", CHAT, form)[1]["choices"][0]["message"]
    assert formed["content"] == ""
    assert formed["reasoning"]
    formed = serve(chat_template=template, reasoning_parser="none").json("POST", CHAT, form)[1]
    assert formed["choices"][0]["message"] == {"role": "assistant", "content": "yes"}


@pytest.mark.parametrize(
    ("form", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}},
            "response_format",
        ),
        ({"structured_outputs": {"regex": "a(?=b)"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "(((a{100}){100}){100}){100}"}}, "structured_outputs"),
        ({"structured_outputs": {"json": "[" * 10_000}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "start: nowhere"}}, "structured_outputs"),
    ],
)
def test_grammars_that_cannot_be_used_are_the_clients_error(serve, form, param):
    served = serve()
    status, found = served.json("POST", CHAT, {"messages": HELLO, **WARM, **form})
    assert status == 400
    assert found["error"]["param"] == param
    assert found["error"]["message"].startswith(param)
    assert served.json("POST", CHAT, {"messages": HELLO, "max_tokens": 1})[0] == 200


def test_a_server_that_is_ready_has_read_the_vocabulary(engine, monkeypatch):
    """Nobody's first grammar stops all others for seconds."""

    async def compiled():
        assert not server.admission.is_warm

    grammars = engine.service.preparation.sequences.grammars
    monkeypatch.setattr(engine, "warmup", compiled)
    monkeypatch.setattr(grammars, "_built", None)
    server = Server(engine, ServerConfig(port=0))
    with lifecycle._bound(server.config) as place:
        asyncio.run(lifecycle._Process(server, place)._warm_up())
    assert server.admission.is_warm
    assert grammars._built is not None


@pytest.mark.parametrize(
    ("options", "url"),
    [
        ({"host": "127.0.0.1"}, "http://127.0.0.1:80/v1"),
        ({"host": "example.org", "root_path": "/a"}, "http://example.org:80/a/v1"),
        ({"host": "::1"}, "http://[::1]:80/v1"),
        ({"host": "fe80::1%eth0", "ssl_certfile": "a.pem"}, "https://[fe80::1%eth0]:80/v1"),
    ],
)
def test_the_url_of_an_address(options, url):
    """An IPv6 address has brackets."""
    config = types.SimpleNamespace(**{"root_path": "", "ssl_certfile": None} | options)
    assert lifecycle._url(config, types.SimpleNamespace(getsockname=lambda: (config.host, 80))) == url


def test_the_page_is_open_and_whole(serve):
    served = serve(api_key=["k"])
    status, headers, body = served.ask("GET", "/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert b"return_cache_report: true" in body
    assert served.json("POST", CHAT, {"messages": HELLO})[0] == 401
