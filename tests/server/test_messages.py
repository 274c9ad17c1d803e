"""Anthropic's Messages API: the official client's types hold for every answer, event and error."""

from __future__ import annotations

import gzip
import io
import json
import time

import anthropic
import jsonschema
import openai
import pytest
from PIL import Image

from tests.helper import SIZES, eventually, with_thinking_tags
from tests.server.helper import data_url
from tests.server.test_entrance import decoder, posted  # noqa: F401 - a fixture
from tests.server.test_forms import SCHEMA
from tests.server.test_tenancy import written
from tests.server.test_thinking import ALWAYS, OPENS
from vlcache_jax import AsyncLLM
from vlcache_jax.engine.thinking import CLOSING
from vlcache_jax.inputs.images import ImageSource
from vlcache_jax.server import inference

HELLO = [{"role": "user", "content": "Hello"}]
PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
GREEDY = {"temperature": 0}
LOOK = {"name": "look", "description": "Looks.", "input_schema": SCHEMA}


@pytest.fixture(scope="module")
def engine(checkpoints, tmp_path_factory):
    directory = with_thinking_tags(checkpoints("qwen3_vl"), tmp_path_factory.mktemp("messages") / "model")
    engine = AsyncLLM(directory, use_tqdm=False, allowed_local_media_path=None, **SIZES)
    yield engine
    engine.service.close()


@pytest.fixture
def claude():
    """(a server) -> Anthropic's client of it, which holds every answer against its types."""
    opened = []

    def make(served, key="none", **options):
        given = {"max_retries": 0, "timeout": 60, "_strict_response_validation": True} | options
        opened.append(anthropic.Anthropic(base_url=f"http://127.0.0.1:{served.port}", api_key=key, **given))
        return opened[-1].messages

    yield make
    for one in opened:
        one.close()


def base64_of(pixels):
    return {"type": "base64", "media_type": "image/png", "data": data_url(pixels).partition(",")[2]}


def image(pixels):
    return {"type": "image", "source": base64_of(pixels)}


def chat(served, messages, **more):
    body = {"messages": messages, "max_tokens": 4} | GREEDY | more
    status, found = served.json("POST", "/v1/chat/completions", body)
    assert status == 200, found
    return found


def plain(message):
    """A message without what is of one answer: its id, the ids of calls, and what was cached."""
    found = message.model_dump(exclude={"id", "usage"}, exclude_none=True)
    for block in found["content"]:
        block.pop("id", None)
        block.pop("parsed_output", None)
    return found


def streamed(client, **given):
    """The message of a stream, and the types of its events."""
    with client.stream(**given) as stream:
        kinds = [event.type for event in stream]
        return stream.get_final_message(), kinds


def test_a_message_says_what_a_chat_does(serve, claude):
    served = serve()
    given = {"model": "model", "max_tokens": 4, "system": "Be brief.", "messages": HELLO, "extra_body": GREEDY}
    found = claude(served).create(**given)
    expected = chat(served, [{"role": "system", "content": "Be brief."}, *HELLO])
    [block] = found.content
    assert block.text == expected["choices"][0]["message"]["content"]
    assert (found.model, found.stop_reason, found.stop_sequence) == ("model", "max_tokens", None)
    assert found.id.startswith("msg_")
    usage = found.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == expected["usage"]["prompt_tokens"]
    assert (usage.output_tokens, usage.cache_creation_input_tokens) == (4, 0)
    again, kinds = streamed(claude(served), **given)
    assert plain(again) == plain(found)
    assert again.usage.cache_read_input_tokens > 0
    assert again.usage.input_tokens + again.usage.cache_read_input_tokens == expected["usage"]["prompt_tokens"]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    lines = served.ask("POST", PATH, {"max_tokens": 4, "messages": HELLO, "stream": True})[2].decode().split("\n\n")
    assert lines[0].startswith('event: message_start\ndata: {"type": "message_start", ')
    assert lines[1] == 'event: ping\ndata: {"type": "ping"}'
    assert lines[-2:] == ['event: message_stop\ndata: {"type": "message_stop"}', ""]  # no [DONE]
    metrics = served.ask("GET", "/metrics")[2].decode()
    assert 'vlcache:request_success_total{finished_reason="length",model_name="model"} 4.0' in metrics


def test_images_are_reused(serve, claude, textured_image):
    pixels = textured_image(64, 96, 3)
    served = serve(allow_reuse=["approximate"])
    content = [image(pixels) | {"cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "What is it?"}]
    given = {"model": "model", "max_tokens": 4, "messages": [{"role": "user", "content": content}]}
    more = GREEDY | {"return_cache_report": True, "reuse": "approximate"}
    found = claude(served).create(**given, extra_body=more)
    again = claude(served).create(**given, extra_body=more)
    assert [one["match"] for one in (found.cache["images"][0], again.cache["images"][0])] == ["miss", "exact"]
    assert again.usage.cache_read_input_tokens > 0
    parts = [{"type": "image_url", "image_url": {"url": data_url(pixels)}}, content[1]]
    expected = chat(served, [{"role": "user", "content": parts}])
    assert found.content[0].text == again.content[0].text == expected["choices"][0]["message"]["content"]
    events = [json.loads(line[6:]) for line in served.ask(
        "POST", PATH, given | {"stream": True} | more
    )[2].decode().splitlines() if line.startswith("data: ")]  # fmt: skip
    assert events[-2]["cache"]["images"][0]["match"] == "exact"


def test_an_agent_calls_tools_and_sees_images_in_results(serve, claude, textured_image):
    messages = claude(serve())
    given = {"model": "model", "max_tokens": 300, "tools": [LOOK], "extra_body": {"temperature": 1, "seed": 5}}
    forced = {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    found = messages.create(messages=HELLO, **given, **forced)
    [call] = found.content
    jsonschema.validate(call.input, SCHEMA)
    assert (call.type, call.name, found.stop_reason) == ("tool_use", "look", "tool_use")
    again, kinds = streamed(messages, messages=HELLO, **given, **forced)
    assert plain(again) == plain(found)
    assert "input_json" in kinds
    by_name = messages.create(messages=HELLO, **given, tool_choice={"type": "tool", "name": "look"})
    assert by_name.content[0].name == "look"
    content = [{"type": "text", "text": "Page 1:"}, image(textured_image(64, 96, 4))]
    told = [
        *HELLO,
        {"role": "assistant", "content": found.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": content}]},
    ]
    report = {"extra_body": GREEDY | {"return_cache_report": True}}
    last = messages.create(messages=told, **given | report | {"max_tokens": 4}, tool_choice={"type": "auto"})
    assert len(last.cache["images"]) == 1
    assert last.stop_reason == "max_tokens"
    assert last.usage.cache_read_input_tokens > 0  # the first turn
    counted = messages.count_tokens(model="model", messages=told, tools=[LOOK]).input_tokens
    assert counted == last.usage.input_tokens + last.usage.cache_read_input_tokens


@pytest.fixture
def bias(engine):
    """Makes a model say one letter, and end its thinking by its budget alone."""
    ids = engine.service.renderer.tokenizer.convert_tokens_to_ids
    return {"logit_bias": {str(ids("z")): 100}}


def test_thinking_goes_round_with_its_signature(serve, claude, bias):
    served = serve(chat_template=OPENS)
    messages = claude(served)
    given = {"model": "model", "max_tokens": 140, "extra_body": GREEDY | bias}
    given |= {"thinking": {"type": "enabled", "budget_tokens": 7}}
    found = messages.create(messages=HELLO, **given)
    thought, text = found.content
    assert thought.thinking == ("z" * 7 + CLOSING).partition("</think>")[0].strip("\n")
    assert set(text.text) == {"z"}
    assert 100 < found.usage.output_tokens_details.thinking_tokens - 7 < 120
    assert plain(streamed(messages, messages=HELLO, **given)[0]) == plain(found)
    told = [*HELLO, {"role": "assistant", "content": found.content}, *HELLO]
    assert messages.create(messages=told, **given | {"max_tokens": 4}).content
    forged = [{"type": "thinking", "thinking": thought.thinking + "!", "signature": thought.signature}, text]
    for content in (forged, [{"type": "thinking", "thinking": "z", "signature": ""}, text]):
        told[1] = {"role": "assistant", "content": content}
        with pytest.raises(anthropic.BadRequestError, match=r"messages\[1\]\.content\[0\]\.signature must be the one"):
            messages.create(messages=told, **given)
    off = messages.create(messages=HELLO, **given | {"thinking": {"type": "disabled"}, "max_tokens": 4})
    assert [block.type for block in off.content] == ["text"]
    hidden = {"thinking": {"type": "adaptive", "display": "omitted"}, "max_tokens": 4}
    assert messages.create(messages=HELLO, **given | hidden).content == []


def test_thinking_that_cannot_be_turned_off(serve, claude):
    with pytest.raises(anthropic.BadRequestError, match="must not be disabled"):
        claude(serve(chat_template=ALWAYS)).create(
            model="model", max_tokens=4, messages=HELLO, thinking={"type": "disabled"}
        )


def test_models_that_do_not_think_are_asked_as_claude_is(serve, claude):
    """Claude Code sends these fields to each model."""
    with claude(serve(any_model_name=True)).stream(
        model="claude-sonnet",
        max_tokens=4,
        messages=HELLO,
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"effort": "high"},
        extra_headers={"anthropic-beta": "interleaved-thinking-2025-05-14"},
        extra_query={"beta": "true"},
        extra_body={"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
    ) as stream:
        found = stream.get_final_message()
    assert (found.model, found.content[0].type) == ("claude-sonnet", "text")


def test_stop_sequences_end_a_message(serve, claude, bias):
    found = claude(serve()).create(
        model="model", max_tokens=20, messages=HELLO, stop_sequences=["zzz"], extra_body=GREEDY | bias
    )
    assert (found.stop_reason, found.stop_sequence, found.content) == ("stop_sequence", "zzz", [])
    form = {"type": "json_schema", "schema": {"enum": ["red"]}}
    found = claude(serve()).create(model="model", max_tokens=20, messages=HELLO, output_config={"format": form})
    assert (found.stop_reason, found.content[0].text) == ("end_turn", '"red"')


def test_a_message_is_continued(serve, claude):
    """The answer repeats nothing of the message that it continues."""
    served = serve()
    told = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "The answer"}]}]
    found = claude(served).create(model="model", max_tokens=4, messages=told, extra_body=GREEDY)
    messages = [*HELLO, {"role": "assistant", "content": "The answer"}]
    expected = chat(served, messages, continue_final_message=True, add_generation_prompt=False)
    assert found.content[0].text == expected["choices"][0]["message"]["content"]


def test_tokens_are_counted_as_they_are_used(serve, claude, textured_image, monkeypatch):
    served = serve()
    prompt = {
        "model": "model",
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [{"role": "user", "content": [image(textured_image(96, 64, 7)), {"type": "text", "text": "?"}]}],
        "tools": [LOOK],
    }
    used = claude(served).create(max_tokens=1, **prompt).usage
    monkeypatch.setattr(ImageSource, "decode", lambda *_: pytest.fail("it is decoded"))
    counted = claude(served).count_tokens(**prompt, thinking={"type": "enabled", "budget_tokens": 1024})
    assert counted.input_tokens == used.input_tokens + used.cache_read_input_tokens
    assert claude(served).count_tokens(**prompt | {"tools": []}).input_tokens < counted.input_tokens
    for body, status, kind in (
        ({"messages": HELLO, "max_tokens": 3}, 400, "invalid_request_error"),
        ({}, 400, "invalid_request_error"),
        ({"messages": HELLO, "model": "other"}, 404, "not_found_error"),
        ({"messages": [{"role": "user", "content": "<|image_pad|>"}]}, 400, "invalid_request_error"),
        (b"{", 400, "invalid_request_error"),
    ):
        found = served.json("POST", COUNT, body)
        assert (found[0], found[1]["error"]["type"]) == (status, kind)


def test_errors_are_those_of_the_client(serve, claude, client):
    served = serve(api_key=["key"], max_body_bytes=4000, max_waiting_bytes=4000)
    ask = {"model": "model", "max_tokens": 4, "messages": HELLO}
    messages = claude(served, "key")
    for key, wrong, error in (
        ("other", {}, anthropic.AuthenticationError),
        ("key", {"model": "other"}, anthropic.NotFoundError),
        ("key", {"max_tokens": 10**6}, anthropic.BadRequestError),
        ("key", {"messages": [{"role": "user", "content": "a" * 5000}]}, anthropic.ContentTooLargeError),
        ("key", shows("https://a.b/c.png"), anthropic.BadRequestError),
        ("key", shows("/etc/passwd"), anthropic.BadRequestError),
        ("key", {"extra_body": {"reuse": "off"}}, anthropic.BadRequestError),
        ("key", {"tools": [{"type": "bash_20250124", "name": "bash"}]}, anthropic.BadRequestError),
        ("key", {"tools": [LOOK], "tool_choice": {"type": "tool", "name": "x"}}, anthropic.BadRequestError),
    ):
        with pytest.raises(error) as found:
            claude(served, key).create(**ask | wrong)
        assert set(found.value.body) == {"type", "error", "request_id"}
        assert found.value.request_id == found.value.body["request_id"]
        with pytest.raises(error), claude(served, key).stream(**ask | wrong):
            pass
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: messages: prompt"):
        messages.create(**ask | {"messages": [{"role": "user", "content": "a" * 3000}]})
    headers = {"Authorization": "Bearer key"}
    for method, path, body, more, status in (
        ("POST", PATH, b"[]", {}, 400),
        ("POST", PATH, gzip.compress(b"{}"), {"Content-Encoding": "gzip"}, 415),
        ("POST", PATH, {}, {"Content-Type": "text/plain"}, 415),
        ("GET", PATH, None, {}, 405),
        ("POST", f"{PATH}/batches", {}, {}, 404),
        ("POST", COUNT, {}, {"Authorization": "Bearer other"}, 401),
    ):
        got, told, found = served.ask(method, path, body, **headers | more)
        assert (got, json.loads(found)["type"]) == (status, "error")
        assert told["request-id"] == json.loads(found)["request_id"]
    with pytest.raises(openai.AuthenticationError, match="Bearer"):  # others keep the form of OpenAI
        client(served, "other").models.list()
    assert set(served.json("POST", "/v1/chat/completions", {}, **headers)[1]["error"]) >= {"param", "code"}


def shows(url):
    return {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": url}}]}]}


def test_a_full_server_is_overloaded(serve, claude, decoder, textured_image):  # noqa: F811
    served = serve(max_waiting=1)
    body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {
        "url": data_url(textured_image(64, 64, 11))
    }}]}], "max_tokens": 1}  # fmt: skip
    with posted(served, body, reads=False):
        assert eventually(lambda: decoder[1])
        with pytest.raises(anthropic.ServiceUnavailableError) as found:
            claude(served).create(model="model", max_tokens=1, messages=HELLO)
        assert found.value.body["error"]["type"] == "overloaded_error"
        assert found.value.response.headers["retry-after"] == "1"
        decoder[0].set()


def test_a_silent_stream_has_pings_and_an_error_is_its_last_event(serve, claude, monkeypatch, textured_image):
    def wait(*_):
        time.sleep(0.3)
        raise ValueError("it is torn")

    monkeypatch.setattr(inference, "SILENCE", 0.05)
    monkeypatch.setattr(ImageSource, "decode", wait)
    served = serve()
    body = {"max_tokens": 3, "messages": [{"role": "user", "content": [image(textured_image(64, 64, 32))]}]}
    status, _, found = served.ask("POST", PATH, body | {"stream": True})
    ping, *_, error, rest = found.decode().split("\n\n")
    assert (status, ping, rest) == (200, 'event: ping\ndata: {"type": "ping"}', "")
    name, _, data = error.partition("\ndata: ")
    assert name == "event: error"
    told = json.loads(data)
    assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    assert told["error"]["message"].endswith("it is torn")
    with pytest.raises(anthropic.APIError, match="it is torn"), claude(served).stream(model="model", **body) as stream:
        list(stream)


def test_keys_and_tenants(serve, claude, tmp_path, textured_image):
    """Both headers name a key; what a tenant has cached or uploaded is its own."""
    served = serve(api_keys=written(tmp_path / "keys.toml", a="alice", b="bob"), admin_key="boss")
    file = io.BytesIO()
    Image.fromarray(textured_image(64, 96, 9)).save(file, "PNG")
    pixels = textured_image(64, 96, 8)
    ask = {"model": "model", "max_tokens": 2, "messages": [{"role": "user", "content": [image(pixels)]}]}
    matches = []
    for headers in ({"x_api_key": "a"}, {"Authorization": "Bearer a"}, {"x_api_key": "b"}):
        status, found = served.json("POST", PATH, ask | {"return_cache_report": True}, **headers)
        assert status == 200, found
        matches.append(found["cache"]["images"][0]["match"])
    assert matches == ["miss", "exact", "miss"]
    for headers in ({}, {"x_api_key": "c"}, {"Authorization": "Bearer c", "x_api_key": "a"}, {"x_api_key": ""}):
        status, found = served.json("POST", PATH, ask, **headers)
        assert (status, found["error"]["type"]) == (401, "authentication_error")
    assert served.ask("GET", "/v1/models", x_api_key="b")[0] == 200
    assert served.ask("GET", "/cache", x_api_key="b")[0] == 403
    assert served.ask("GET", "/cache", x_api_key="boss")[0] == 200
    alice = openai.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="a")
    with alice:
        name = alice.files.create(file=("a.png", file.getvalue()), purpose="vision").id
    uploaded = {"type": "image", "source": {"type": "file", "file_id": name}}
    ask["messages"] = [{"role": "user", "content": [uploaded]}]
    used = claude(served, "a").create(**ask).usage
    counted = claude(served, "a").count_tokens(model="model", messages=ask["messages"]).input_tokens
    assert counted == used.input_tokens + used.cache_read_input_tokens
    for call in (claude(served, "b").create, lambda **given: claude(served, "b").count_tokens(
        model=given["model"], messages=given["messages"]
    )):  # fmt: skip
        with pytest.raises(anthropic.BadRequestError, match="has no"):
            call(**ask)


def test_every_name_of_a_model(serve, client):
    """On all routes; answers have the name that the request has."""
    served = serve(any_model_name=True, served_model_name=["tiny"])
    other = {"model": "claude-opus"}
    for path, body in (
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 1}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 1}),
        (PATH, {"messages": HELLO, "max_tokens": 1}),
        ("/v1/embeddings", {"input": "a"}),
    ):
        status, found = served.json("POST", path, body | other)
        assert (status, found["model"]) == (200, "claude-opus"), found
        assert served.json("POST", path, body)[1]["model"] == "tiny"
    assert served.json("POST", COUNT, {"messages": HELLO} | other)[0] == 200
    assert served.json("POST", "/tokenize", {"prompt": "a"} | other)[0] == 200
    assert client(served).models.retrieve("claude-opus").root == "tiny"
    assert [one.id for one in client(served).models.list()] == ["tiny"]
    [schema] = [served.json("GET", "/openapi.json")[1]["components"]["schemas"]["ChatRequest"]["properties"]["model"]]
    assert "enum" not in schema


def test_clients_find_the_server(serve):
    """Claude Code sends HEAD / before its first request."""
    assert serve(api_key=["key"]).ask("HEAD", "/")[::2] == (200, b"")
