"""What the official client asks and is answered."""

from __future__ import annotations

import base64
import json
import re
import struct
import zlib

import openai
import pytest

from tests.helper import assert_nothing_left, give_compressed_pages
from tests.server.helper import data_url, running, shows
from vlcache_jax import SamplingParams
from vlcache_jax.calls.caller import Caller
from vlcache_jax.inputs import access
from vlcache_jax.inputs.images import ImageSource
from vlcache_jax.protocol.schema import CHAT
from vlcache_jax.server.openapi import document

HELLO = [{"role": "user", "content": "Hello"}]
SHORT = {"model": "tiny", "temperature": 0, "max_completion_tokens": 8, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def served(engine):
    with running(engine, served_model_name=["tiny", "also"], max_n=4) as served:
        yield served
    assert not served.server.admission.inside
    assert_nothing_left(engine)


@pytest.fixture
def chats(served, client):
    return client(served).chat.completions


@pytest.fixture
def picture(textured_image):
    return data_url(textured_image(64, 96, 3))


def test_a_chat(chats, engine):
    answer = chats.create(messages=HELLO, **SHORT)
    [choice] = answer.choices
    assert (answer.object, answer.model, choice.index, choice.finish_reason) == ("chat.completion", "tiny", 0, "length")
    assert choice.message.role == "assistant"
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8
    assert answer.id.startswith("chatcmpl-")
    texts = {chats.create(messages=HELLO, **SHORT | {"model": name}).choices[0].message.content for name in ("also",)}
    assert texts == {choice.message.content}


def test_a_stream_is_the_whole_answer(chats):
    whole = chats.create(messages=HELLO, n=2, logprobs=True, top_logprobs=2, **SHORT)
    more = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(chats.create(messages=HELLO, n=2, logprobs=True, top_logprobs=2, **SHORT, **more))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.to_dict() == whole.usage.to_dict() | {
        "prompt_tokens_details": chunks[-1].usage.prompt_tokens_details.to_dict()
    }
    assert {chunk.usage for chunk in chunks[:-1]} == {None}
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    for choice in whole.choices:
        mine = [one for chunk in chunks for one in chunk.choices if one.index == choice.index]
        assert (mine[0].delta.role, mine[0].delta.content) == ("assistant", "")
        assert "".join(one.delta.content or "" for one in mine) == choice.message.content
        assert [one.finish_reason for one in mine] == [None] * (len(mine) - 1) + ["length"]
        told = [token for one in mine if one.logprobs for token in one.logprobs.content]
        assert [one.token for one in told] == [one.token for one in choice.logprobs.content]
        assert all(len(one.top_logprobs) == 2 for one in told)


def test_each_piece_may_have_its_usage(served):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": HELLO, "max_tokens": 5, "ignore_eos": True, "stream": True, "stream_options": options}
    status, headers, found = served.ask("POST", "/v1/chat/completions", body)
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    lines = found.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    pieces = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    counts = [one["usage"]["completion_tokens"] for one in pieces]
    assert counts == sorted(counts)
    assert counts[-1] == 5


def test_a_picture_that_comes_again_is_told(chats, engine, picture):
    engine.service.reset_mm_cache()
    more = {"return_cache_report": True, "return_token_ids": True}
    told = [
        chats.create(messages=shows(picture), max_completion_tokens=2, extra_body=more, model="tiny") for _ in range(2)
    ]
    first, again = (one.cache["images"] for one in told)
    assert (first[0]["match"], again[0]["match"]) == ("miss", "exact")
    assert sum(first[0]["rows"]) > sum(again[0]["rows"]) == 0
    reports = [one.cache for one in told]
    assert [one["request_known"] for one in reports] == [False, True]
    assert reports[0]["request_key"] == reports[1]["request_key"] is not None
    assert reports[0]["matched_tokens"] == 0 < reports[1]["matched_tokens"]
    assert [image["bytes_moved"] for image in (*first, *again)] == [0, 0]  # from the KV pool nothing moves
    engine.service.reset_prefix_cache()
    loaded = chats.create(messages=shows(picture), max_completion_tokens=2, extra_body=more, model="tiny").cache
    assert loaded["images"][0]["kv"] == "host"
    assert loaded["images"][0]["bytes_moved"] > 0
    details = [one.usage.prompt_tokens_details for one in told]
    assert [one.image_tokens for one in details] == [first[0]["tokens"]] * 2
    assert details[0].cached_tokens == 0 < details[1].cached_tokens
    assert len(told[0].prompt_token_ids) == told[0].usage.prompt_tokens
    assert len(told[0].choices[0].token_ids) == told[0].usage.completion_tokens
    for most in (1, 2, 20):  # of few tokens one event may be all
        first, *_, last = chats.create(
            messages=shows(picture), max_completion_tokens=most, extra_body=more, model="tiny", stream=True
        )
        assert first.prompt_token_ids == told[0].prompt_token_ids
        assert last.cache["images"][0]["match"] == "exact"


def test_an_answer_is_the_engines(chats, engine, picture):
    import asyncio

    async def whole():
        params = SamplingParams(temperature=1, seed=5, max_tokens=8, ignore_eos=True, stop=["zz"], logit_bias={40: 3})
        async for output in engine.generate(shows(picture), params):
            last = output
        return last.outputs[0].text

    expected = asyncio.run(whole())
    given = {"temperature": 1, "seed": 5, "max_tokens": 8, "stop": "zz", "logit_bias": {"40": 3}}
    answer = chats.create(model="tiny", messages=shows(picture), extra_body={"ignore_eos": True}, **given)
    assert answer.choices[0].message.content == expected


def test_what_has_no_effect_is_accepted(chats):
    plain = chats.create(messages=HELLO, **SHORT).choices[0].message.content
    given = {"user": "u", "metadata": {"a": "b"}, "prompt_cache_key": "k", "safety_identifier": "s", "store": False}
    more = {"tools": [], "response_format": {"type": "text"}, "modalities": ["text"], "priority": 3, "min_p": None}
    more |= {"service_tier": "default", "verbosity": "medium", "reasoning_effort": "medium", "session_id": "s"}
    body = SHORT["extra_body"] | more | {"mm_processor_kwargs": None}
    assert chats.create(messages=HELLO, **SHORT | {"extra_body": body} | given).choices[0].message.content == plain


def test_an_answer_has_the_id_that_is_asked_for(served):
    for path, asked in (("/v1/chat/completions", {"messages": HELLO}), ("/v1/completions", {"prompt": "One"})):
        prefix = "chatcmpl" if "chat" in path else "cmpl"
        found = served.json("POST", path, asked | {"max_tokens": 1, "request_id": "mine-7"})[1]
        assert found["id"] == f"{prefix}-mine-7"


def test_histories_as_clients_send_them(chats):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = [
        {"role": "developer", "content": "Be brief."},
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]
    assert chats.create(messages=history, **SHORT).usage.completion_tokens == 8


def test_a_message_goes_on(chats):
    begun = [*HELLO, {"role": "assistant", "content": "It is"}]
    body = {"continue_final_message": True, "return_token_ids": True}
    answer = chats.create(model="tiny", messages=begun, max_completion_tokens=2, extra_body=body)
    whole = chats.create(model="tiny", messages=begun, max_completion_tokens=2, extra_body={"return_token_ids": True})
    assert len(answer.prompt_token_ids) < len(whole.prompt_token_ids)


def test_prompts_are_scored_for_who_asks(served):
    body = {"messages": HELLO, "max_tokens": 1, "prompt_logprobs": 1}
    status, found = served.json("POST", "/v1/chat/completions", body)
    assert status == 200
    first, *others = found["prompt_logprobs"]
    assert first is None
    assert len(others) == found["usage"]["prompt_tokens"] - 1
    assert all({"logprob", "rank", "decoded_token"} == set(told) for one in others for told in one.values())


def test_completions(served, client):
    completions = client(served).completions
    given = {"model": "tiny", "temperature": 0, "max_tokens": 6, "extra_body": {"ignore_eos": True}}
    whole = completions.create(prompt=["One", "Two"], n=2, logprobs=1, **given)
    assert [one.index for one in whole.choices] == [0, 1, 2, 3]
    assert whole.usage.completion_tokens == 24
    alone = completions.create(prompt="Two", **given).choices[0].text
    assert [one.text for one in whole.choices[2:]] == [alone] * 2
    assert len(whole.choices[0].logprobs.tokens) == 6
    told = served.json("POST", "/tokenize", {"prompt": "Two"})[1]["tokens"]
    assert completions.create(prompt=told, **given).choices[0].text == alone
    assert completions.create(prompt=[told], **given).choices[0].text == alone
    texts = {0: "", 1: ""}
    # The client's type of a chunk has no room for one before the last.
    lenient = client(served, strict=False).completions
    for chunk in lenient.create(prompt=["One", "Two"], stream=True, **given):
        for one in chunk.choices:
            texts[one.index] += one.text
    assert [texts[0], texts[1]] == [whole.choices[0].text, alone]
    assert completions.create(prompt="One", model="tiny").usage.completion_tokens <= 16


TOOL = {"type": "function", "name": "look"}
WRONG = [
    ({"model": "other"}, 404, "model"),
    ({"temperature": "hot"}, 400, "temperature"),
    ({"temperature": 3e300}, 400, "temperature"),
    ({"n": 1.5}, 400, "n"),
    ({"n": True}, 400, "n"),
    ({"n": 5}, 400, "n"),
    ({"max_tokens": "8"}, 400, "max_tokens"),
    ({"max_completion_tokens": 0}, 400, "max_completion_tokens"),
    ({"top_logprobs": 21, "logprobs": True}, 400, "top_logprobs"),
    ({"top_logprobs": "x", "logprobs": True}, 400, "top_logprobs"),
    ({"top_logprobs": 2}, 400, "logprobs"),
    ({"logprobs": 5}, 400, "logprobs"),
    ({"logit_bias": [1]}, 400, "logit_bias"),
    ({"stop": 3}, 400, "stop"),
    ({"seed": "x"}, 400, "seed"),
    ({"stream": "yes"}, 400, "stream"),
    ({"stream_options": {}, "stream": False}, 400, "stream_options"),
    ({"stream": True, "stream_options": {"x": 1}}, 400, "stream_options.x"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, 400, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, 400, "stream_options.include_obfuscation"),
    ({"store": True}, 400, "store"),
    ({"reasoning_effort": "high"}, 400, "reasoning_effort"),
    ({"request_id": ""}, 400, "request_id"),
    ({"stream": True, "prompt_logprobs": 1}, 400, "prompt_logprobs"),
    ({"priority": "high"}, 400, "priority"),
    ({"priority": 1.5}, 400, "priority"),
    ({"cache_salt": ""}, 400, "cache_salt"),
    ({"cache_salt": 5}, 400, "cache_salt"),
    ({"reuse": "full"}, 400, "reuse"),
    ({"compress": "vl-cache-0.5"}, 400, "compress"),
    ({"reuse": [1]}, 400, "reuse"),
    ({"mm_processor_kwargs": {"x": 1}}, 400, "mm_processor_kwargs"),
    ({"mm_processor_kwargs": 5}, 400, "mm_processor_kwargs"),
    ({"chat_template": "{{ 1 }}"}, 400, "chat_template"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, 400, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"self": 1}}, 400, "chat_template_kwargs"),
    ({"add_generation_prompt": True, "continue_final_message": True}, 400, "add_generation_prompt"),
    ({"tools": [{}]}, 400, "tools"),
    ({"tool_choice": "required"}, 400, "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": "a"}}], "tool_choice": "b"}, 400, "tool_choice"),
    ({"tool_choice": "required"}, 400, "tool_choice"),
    ({"bad_words": ["\ud800"]}, 400, "bad_words"),
    ({"bad_words": ["a long text of many words " * 9]}, 400, "bad_words"),
    ({"allowed_token_ids": [10**6]}, 400, "allowed_token_ids"),
    ({"allowed_token_ids": [0], "structured_outputs": {"choice": ["yes"]}}, 400, "allowed_token_ids"),
    ({"stop_token_ids": [10**6]}, 400, "stop_token_ids"),
    ({"logit_bias": {"1000000": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"5": 1, "05": 2}}, 400, "logit_bias"),
    ({"logprob_token_ids": [1]}, 400, "logprob_token_ids"),
    ({"min_tokens": 9}, 400, "min_tokens"),
    ({"max_tokens": 10**6}, 400, "max_tokens"),
    ({"response_format": {"type": "xml"}}, 400, "response_format"),
    ({"response_format": {"type": "json_schema"}}, 400, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}}, 400, "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": "a" * 10**5}}}},
        400,
        "response_format",
    ),
    ({"tools": [TOOL | {"parameters": {"type": "object", "required": 5}}], "tool_choice": "required"}, 400, "tools"),
    (
        {"tools": [TOOL | {"description": "a", "parameters": {"const": "a" * 10**5}}], "tool_choice": "required"},
        400,
        "tools",
    ),
    ({"structured_outputs": {"regex": 5}}, 400, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, 400, "structured_outputs"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, 400, "response_format"),
    ({"truncate_prompt_tokens": 5}, 400, "truncate_prompt_tokens"),
    ({"unknown": 1}, 400, "unknown"),
    ({"messages": []}, 400, "messages"),
    ({"messages": "Hello"}, 400, "messages"),
    ({"bad_words": {}}, 400, "bad_words"),
    ({"logit_bias": []}, 400, "logit_bias"),
    ({"messages": None}, 400, "messages"),
    ({"messages": [5]}, 400, "messages[0]"),
    ({"messages": [{"role": "robot", "content": "a"}]}, 400, "messages[0].role"),
    ({"messages": [{"content": "a"}]}, 400, "messages[0].role"),
    ({"messages": [*HELLO, {"role": "user", "content": 5}]}, 400, "messages[1].content"),
    ({"messages": [{"role": "user", "content": [{"type": "sound"}]}]}, 400, "messages[0].content[0]"),
    ({"messages": [*HELLO, {"role": "assistant", "tool_calls": [{}]}]}, 400, "messages[1].tool_calls[0]"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]},
        400,
        "messages[0].tool_calls[0]",
    ),
    ({"messages": [{"role": "user", "content": "<|image_pad|>"}]}, 400, "messages[0]"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "messages"),
    ({"messages": [{"role": "user", "content": "a" * 50_000}]}, 400, "messages"),
    ({"messages": [{"role": "user", "content": "a b " * 1000}]}, 400, "messages"),
    ({"messages": [{"role": "user", "content": "a"}, {"role": "robot", "content": "a"}]}, 400, "messages[1].role"),
    ({"messages": shows("/etc/passwd")}, 400, "messages"),
    ({"messages": shows("file:///etc/passwd")}, 400, "messages"),
    ({"messages": shows("http://127.0.0.1/a.png")}, 400, "messages"),
    ({"messages": shows("data:image/png;base64,AAAA")}, 400, "messages"),
    ({"messages": shows("data:,")}, 400, "messages"),
]


@pytest.mark.parametrize(("change", "status", "param"), WRONG, ids=lambda one: str(one)[:60])
def test_what_is_wrong_is_named(served, change, status, param):
    """And costs no other status, streaming or not."""
    for more in ({}, {"stream": True}):
        got, found = served.json("POST", "/v1/chat/completions", {"messages": HELLO, "max_tokens": 2} | more | change)
        assert (got, found["error"]["param"]) == (status, param), found
        assert set(found["error"]) == {"message", "type", "param", "code"}
        message = found["error"]["message"]
        assert message.startswith((re.split(r"\W", param)[0], "unknown field ")), message
        assert not re.search("^prompt |sampling_params|jinja|positional", message)


@pytest.mark.parametrize(
    ("field", "told"),
    [
        ("temprature", "unknown field 'temprature' in body; did you mean 'temperature'?"),
        ("guided_json", "unknown field 'guided_json' in body; write it into structured_outputs: "),
        ("xyzzy", "unknown field 'xyzzy' in body"),
    ],
)
def test_an_unknown_field_is_told_with_the_one_that_may_be_meant(served, field, told):
    _, found = served.json("POST", "/v1/chat/completions", {"messages": HELLO, field: 1})
    assert found["error"]["message"].startswith(told)
    assert len(found["error"]["message"]) < 120


LONG = "z" * 100_000


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({LONG: 1}, 400, r"z+\.\.\. \(100000 characters\)"),
        ({"model": LONG}, 404, "model"),
        ({"messages": [{"role": "user", "content": "a", LONG: 1}]}, 400, r"messages\[0\]"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", LONG: 1}]}]}, 400, "messages.*"),
    ],
    ids=["field", "model", "field of a message", "field of a part"],
)
def test_what_is_wrong_is_told_shortly(served, change, status, param):
    """However long a name is that there is not: a refusal is not as large as what is refused."""
    got, _, told = served.ask("POST", "/v1/chat/completions", {"messages": HELLO} | change)
    assert (got, len(told) < 3000) == (status, True)
    error = json.loads(told)["error"]
    assert re.fullmatch(param, error["param"])
    assert "zzz... (10000" in error["message"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400), (b"{", 400), (b"[1]", 400), (b"[" * 100_000, 400), (b'{"messages": NaN}', 400), (b"\xff\xfe", 400),
        (b'{"messages": [{"role": "user", "content": "a"}], "temperature": 1e400}', 400),
    ],
)  # fmt: skip
def test_a_body_that_is_no_json(served, body, status):
    assert served.json("POST", "/v1/chat/completions", body)[0] == status


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": None}, {"prompt": []}, {"prompt": [1, "a"]}, {"prompt": 5}, {"prompt": [[]]}, {"prompt": [-1]},
        {"prompt": [10**9]}, {"prompt": "a", "echo": True}, {"prompt": "a", "suffix": "b"}, {"prompt": ["a"] * 200},
        {"prompt": "<|image_pad|>"}, {"prompt": "a", "best_of": 3}, {"prompt": "a", "logprobs": "x"},
    ],
    ids=str,
)  # fmt: skip
def test_completions_that_are_wrong(served, change):
    status, found = served.json("POST", "/v1/completions", change)
    assert status == 400
    [param] = change.keys() - {"prompt"} or ["prompt"]
    assert found["error"]["param"] == param
    assert found["error"]["message"].startswith(param)


@pytest.mark.parametrize(
    "wrong", ["", "<|image_pad|>", "a" * 50_000, "a b " * 1000, [10**9]], ids=lambda one: str(one)[:9]
)
def test_which_of_several_prompts_is_wrong(served, engine, wrong, monkeypatch):
    """None of them runs: a stream whose first events were sent could not be refused any more."""
    start, started = Caller.start, []
    monkeypatch.setattr(Caller, "start", lambda *given, **more: started.append(given) or start(*given, **more))
    for more in ({}, {"stream": True}):
        body = {"prompt": [[5] if isinstance(wrong, list) else "a", wrong], "max_tokens": 2} | more
        status, found = served.json("POST", "/v1/completions", body)
        assert (status, found["error"]["param"]) == (400, "prompt"), found
        assert found["error"]["message"].startswith("prompt[1]"), found
    assert not started
    assert_nothing_left(engine)


def test_a_prompt_that_is_too_long_is_told_by_code(served):
    """Clients that shorten their conversations look at it."""
    for text in ("a b " * 1000, "a" * 50_000):
        for path, body in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
            ("/v1/completions", {"prompt": text}),
            ("/v1/responses", {"input": text}),
        ):
            status, found = served.json("POST", path, body)
            error = found["error"]
            assert (status, error["code"]) == (400, "context_length_exceeded"), found
            assert error["param"] == next(iter(body))
            assert error["message"].startswith(error["param"])


def bomb(width, height):
    """A PNG that says that it is so large, in a few bytes."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(body).decode()


@pytest.mark.parametrize(
    "url",
    [
        bomb(100_000, 100_000), bomb(2**31 - 1, 1), bomb(1, 2**31 - 1), bomb(20_000, 20_000),
        "http://169.254.169.254/latest/meta-data", "http://localhost:8000/", "http://[::1]/", "https://example.com/a.png",
        "ftp://example.com/a.png", "file:///proc/self/environ", "/proc/self/environ", "~/.ssh/id_rsa", "gopher://a",
        "data:image/svg+xml;base64,PHN2Zy8+", "data:image/png;base64,!!!!", "data:text/html,<b>", "",
    ],
    ids=lambda one: one[:30],
)  # fmt: skip
def test_pictures_that_are_refused_cost_nothing(served, url, monkeypatch):
    """No pixel is decoded, and nobody is asked."""
    touched = []
    monkeypatch.setattr(ImageSource, "decode", lambda *given: touched.append(given))
    monkeypatch.setattr(access, "fetch", lambda *given, **_: touched.append(given))
    status, found = served.json("POST", "/v1/chat/completions", {"messages": shows(url)})
    assert (status, touched) == (400, []), found
    assert found["error"]["param"].startswith("messages")


def test_pictures_as_clients_name_them(chats, picture, textured_image):
    for more in ({"detail": "auto"}, {"detail": "high"}, {"detail": "low"}):
        part = {"type": "image_url", "image_url": {"url": picture, **more}}
        assert chats.create(messages=[{"role": "user", "content": [part]}], **SHORT).choices
    part = {"type": "image_url", "image_url": {"url": picture}, "uuid": "a-picture"}
    assert chats.create(messages=[{"role": "user", "content": [part]}], **SHORT).choices
    part["image_url"] = {"url": data_url(textured_image(64, 64, 8))}
    with pytest.raises(openai.BadRequestError, match="uuid"):
        chats.create(messages=[{"role": "user", "content": [part]}], **SHORT)
    part["uuid"] = "a" * 1025
    with pytest.raises(openai.BadRequestError, match=r"content\[0\] uuid must have at most 1024 characters, got 'aaa"):
        chats.create(messages=[{"role": "user", "content": [part]}], **SHORT)


def test_errors_are_those_of_the_client(chats):
    with pytest.raises(openai.NotFoundError, match="model must be"):
        chats.create(model="other", messages=HELLO)
    with pytest.raises(openai.BadRequestError) as told:
        chats.create(model="tiny", messages=HELLO, temperature=-1)
    assert told.value.param == "temperature"


def test_requests_choose_what_the_server_lets_them(serve, picture):
    served = serve(allow_reuse=["full", "0.25"])
    for reuse in ("exact", "full", 0.25, "0.25"):
        body = {"messages": shows(picture), "max_tokens": 1, "reuse": reuse, "return_cache_report": True}
        status, found = served.json("POST", "/v1/chat/completions", body)
        assert status == 200, found
    assert served.json("POST", "/v1/chat/completions", {"messages": HELLO, "reuse": 0.5})[0] == 400
    assert [one["reuse"] for one in served.json("GET", "/v1/models")[1]["data"]] == [["exact", "full", "0.25"]]
    with pytest.raises(ValueError, match=r"^allow_reuse must be .*'most'"):
        serve(allow_reuse=["most"])


@pytest.mark.slow
def test_requests_are_compressed_as_the_server_lets_them(serve, engine, picture):
    served = serve(allow_compress=["vl-cache-0.5", "random-0.5"])
    body = {"messages": shows(picture), "max_tokens": 3, "ignore_eos": True, "return_cache_report": True}
    for compress in ("vl-cache-0.5", None):
        status, found = served.json("POST", "/v1/chat/completions", body | {"compress": compress})
        assert status == 200, found
        assert found["cache"]["exact"] == ("compression" not in found["cache"]) == (compress is None)
    status, found = served.json("POST", "/v1/chat/completions", body | {"compress": "vl-cache-0.4"})
    assert (status, found["error"]["param"]) == (400, "compress")
    assert found["error"]["message"].startswith("compress must be vl-cache-0.5 or random-0.5 on this server")
    for path, asked in (("/v1/completions", {"prompt": "A star is " * 9}), ("/v1/responses", {"input": "Hello " * 9})):
        told = asked | {"compress": "random-0.5", "ignore_eos": True, "return_cache_report": True}
        status, found = served.json("POST", path, told | ({"max_output_tokens": 3} if "input" in asked else {}))
        assert (status, found["cache"]["compression"]["policy"]) == (200, "random-0.5")
    with pytest.raises(ValueError, match="compress"):
        serve(allow_compress=["most"])
    give_compressed_pages(engine, 1)
    try:
        status, found = served.json("POST", "/v1/chat/completions", body | {"compress": "random-0.5"})
        assert (status, found["error"]["param"]) == (400, "max_tokens")
        assert found["error"]["message"].startswith("max_tokens must be small enough for the compressed prompt")
    finally:
        give_compressed_pages(engine)


def test_models(served, client, engine):
    models = client(served).models
    assert [one.id for one in models.list()] == ["tiny", "also"]
    assert models.retrieve("also").max_model_len == engine.max_model_len
    assert models.retrieve("also").reuse == ["exact"]
    with pytest.raises(openai.NotFoundError):
        models.retrieve("other")


def test_tokens(served, chats, picture):
    """As many as a request is charged for, pictures counted; none is decoded."""
    for messages in (HELLO, shows(picture, picture)):
        status, found = served.json("POST", "/tokenize", {"messages": messages, "return_token_strs": True})
        assert status == 200
        assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
        assert found["count"] == chats.create(messages=messages, **SHORT).usage.prompt_tokens
    status, found = served.json("POST", "/tokenize", {"prompt": "Hello you"})
    assert served.json("POST", "/detokenize", {"tokens": found["tokens"]}) == (200, {"prompt": "Hello you"})
    for path, body in (
        ("/tokenize", {}), ("/tokenize", {"prompt": "a", "messages": HELLO}), ("/tokenize", {"prompt": 5}),
        ("/tokenize", {"prompt": ""}), ("/detokenize", {}), ("/detokenize", {"tokens": [10**9]}),
        ("/detokenize", {"tokens": ["a"]}), ("/detokenize", {"tokens": [None]}),
        ("/tokenize", {"messages": shows("/etc/passwd")}),
    ):  # fmt: skip
        assert served.json("POST", path, body)[0] == 400, (path, body)
    assert served.json("POST", "/tokenize", {"prompt": "a", "model": "other"})[0] == 404


def test_the_document_says_what_there_is(served):
    status, told = served.json("GET", "/openapi.json")
    assert (status, told) == (200, document(["tiny", "also"], has_keys=False))
    assert set(told["paths"]) == {route.path.replace(":path}", "}") for route in served.server.app.routes}
    assert set(told["components"]["schemas"]["ChatRequest"]["properties"]) > set(CHAT)
    for kind in ("Chat", "Completion", "Response"):
        assert {"reuse", "compress"} < set(told["components"]["schemas"][f"{kind}Request"]["properties"])
    status, headers, found = served.ask("GET", "/docs")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    for foreign in (b"<script", b"http://", b"https://", b"src="):
        assert foreign not in found
    assert b"max_completion_tokens" in found


def test_paths_and_methods_that_there_are_not(served):
    for method, path, status in (("GET", "/nowhere", 404), ("GET", "/v1/completions", 405), ("POST", "/health", 405)):
        got, found = served.json(method, path)
        assert got == status
        assert found["error"]["message"]
    assert set(served.ask("OPTIONS", "/v1/responses/a")[1]["allow"].split(", ")) == {"GET", "HEAD", "DELETE"}


def test_nobody_is_led_away(served):
    """A Host, and http where a proxy serves HTTPS, are no places to send a body to."""
    for method, path in (("POST", "/v1/chat/completions/"), ("GET", "/docs/"), ("GET", "/health/")):
        status, told, _ = served.ask(method, path, {} if method == "POST" else None)
        assert (status, "location" in told) == (404, False)
