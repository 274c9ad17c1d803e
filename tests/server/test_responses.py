"""OpenAI's Responses: the official client's types hold for every answer and event."""

from __future__ import annotations

import base64
import json
import re

import jsonschema
import openai
import pytest

from tests.server.helper import data_url
from tests.server.test_forms import SCHEMA
from tests.server.test_tenancy import written
from vlcache_jax.server.stored import StoredResponses
from vlcache_jax.server.tenants import Tenant

GREEDY = {"model": "qwen3_vl", "temperature": 0, "max_output_tokens": 4}
PATH = "/v1/responses"
LOOK = {"type": "function", "name": "look", "parameters": SCHEMA, "strict": True}


@pytest.fixture
def served(serve):
    return serve()


@pytest.fixture
def responses(served, client):
    return client(served).responses


def chat_text(served, messages, **more):
    body = {"messages": messages, "temperature": 0, "max_tokens": 4} | more
    return served.json("POST", "/v1/chat/completions", body)[1]["choices"][0]["message"]["content"]


def test_a_response_says_what_a_chat_does(served, responses):
    found = responses.create(input="Hello", instructions="Be brief.", **GREEDY)
    told = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert found.output_text == chat_text(served, told)
    assert (found.status, found.instructions, found.store) == ("incomplete", "Be brief.", True)
    assert found.incomplete_details.reason == "max_output_tokens"
    assert found.usage.output_tokens == 4
    assert responses.retrieve(found.id) == found


def test_a_stream_comes_to_the_same(responses):
    whole = responses.create(input="Hello", **GREEDY)
    with responses.stream(input="Hello", **GREEDY) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    begin = ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
    end = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
    assert kinds[:4] == begin
    assert kinds[-4:] == [*end, "response.incomplete"]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1].response
    assert last.output_text == whole.output_text == "".join(e.delta for e in events if e.type.endswith("text.delta"))
    assert last.usage.output_tokens == whole.usage.output_tokens


def test_it_goes_on_from_one_before(served, responses, textured_image):
    parts = [{"type": "input_image", "image_url": data_url(textured_image(64, 96)), "detail": "auto"}]
    first = responses.create(
        input=[{"role": "user", "content": [*parts, {"type": "input_text", "text": "?"}]}], **GREEDY
    )
    told = [
        {"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": parts[0]["image_url"]}}, {"type": "text", "text": "?"},
        ]},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And now?"},
    ]  # fmt: skip
    second = responses.create(input="And now?", previous_response_id=first.id, **GREEDY)
    assert second.output_text == chat_text(served, told)
    assert second.usage.input_tokens_details.cached_tokens > 0
    third = responses.create(input="Go on", previous_response_id=second.id, store=False, **GREEDY)
    assert third.previous_response_id == second.id
    for name in (third.id, "resp_nowhere"):
        with pytest.raises(openai.BadRequestError, match="must be the id of a stored response"):
            responses.create(input="?", previous_response_id=name, **GREEDY)
    responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        responses.retrieve(first.id)
    assert responses.create(input="?", previous_response_id=second.id, **GREEDY).output_text  # has all that was said


def test_calls_and_forms(responses):
    given = {"model": "qwen3_vl", "temperature": 1, "max_output_tokens": 300}
    bias = {"logit_bias": dict.fromkeys(("9", "10", "13", "32"), -100), "seed": 5}
    asked = {"input": "Hello", "tools": [LOOK], "tool_choice": "required", "parallel_tool_calls": False, **given}
    found = responses.create(**asked, extra_body={"seed": 5})
    [call] = found.output
    assert (call.type, call.name, found.status) == ("function_call", "look", "completed")
    events = list(responses.create(**asked, stream=True, extra_body={"seed": 5}))
    [done] = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert done.arguments == call.arguments
    assert "".join(e.delta for e in events if e.type.endswith("arguments.delta")) == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "nothing there"}
    assert responses.create(input=[result], previous_response_id=found.id, tools=[LOOK], **GREEDY).output_text
    form = {"format": {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}}
    formed = responses.create(input="Hello", text=form, extra_body=bias, **given)
    jsonschema.validate(json.loads(formed.output_text), SCHEMA)


def test_what_was_asked_is_read(served):
    for body, param in (
        ({}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "a"}]}, "input[0].name"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]"),
        ({"input": "a", "background": True}, "background"),
        ({"input": "a", "conversation": "c"}, "conversation"),
        ({"input": "a", "n": 2}, "n"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools"),
        ({"input": "a", "text": {"format": 5}}, "text.format"),
        ({"input": "a", "text": {"type": "json_schema"}}, "text"),
        ({"input": "a", "previous_response_id": 5}, "previous_response_id"),
        ({"input": "a", "max_output_tokens": "many"}, None),
    ):
        status, found = served.json("POST", PATH, body)
        assert status == 400, body
        assert param is None or found["error"]["param"] == param


def test_what_is_wrong_is_named_as_it_was_sent(served, responses):
    first = responses.create(input="Hello").id
    said = {"role": "user", "content": "a"}
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    for change, param in (
        ({"input": [said, {"role": "robot", "content": "a"}]}, "input[1].role"),
        ({"input": [said, call, call, {"role": "user", "content": [{"type": "input_text"}]}]}, "input[3].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "input"),
        ({"input": "\ud800"}, "input"),
        ({"input": "<|image_pad|>"}, "input"),
        ({"input": [said], "instructions": "<|image_pad|>"}, "instructions"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://[::1]/"}]}]}, "input"),
        ({"input": "a", "text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "text.format"),
        ({"input": "a", "text": {"format": {"type": "xml"}}}, "text.format"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a", "stop_token_ids": [10**6]}, "stop_token_ids"),
    ):
        for before in ({}, {"previous_response_id": first}):
            status, found = served.json("POST", "/v1/responses", change | before)
            assert (status, found["error"]["param"]) == (400, param), found
            assert found["error"]["message"].startswith(re.split(r"\.(?!format)", param)[0]), found


def test_what_stands_after_an_image_is_not_stored(responses, served, textured_image):
    """The conversation goes on as it does with the whole file."""
    url = data_url(textured_image(64, 96))
    head, _, data = url.partition(",")
    padded = f"{head},{base64.b64encode(base64.b64decode(data) + bytes(2**20)).decode()}"

    def asked(url):
        return [{"role": "user", "content": [{"type": "input_image", "image_url": url, "detail": "auto"}]}]

    first, second = (responses.create(input=asked(one), **GREEDY) for one in (url, padded))
    assert second.output_text == first.output_text
    bare, trimmed = (served.server._stored.get(one.id, None).messages[0] for one in (first, second))
    assert trimmed == bare
    assert served.server._stored.counts()[1] < 2**18
    after = [responses.create(input="And?", previous_response_id=one.id, **GREEDY) for one in (first, second)]
    assert after[1].output_text == after[0].output_text


def test_tenants_have_their_own(serve, tmp_path):
    served = serve(api_keys=written(tmp_path / "keys.toml", a="alice", b="bob"))
    body = {"input": "Hello", "max_output_tokens": 1}
    name = served.json("POST", PATH, body, Authorization="Bearer a")[1]["id"]
    assert served.ask("GET", f"{PATH}/{name}", Authorization="Bearer a")[0] == 200
    assert served.ask("GET", f"{PATH}/{name}", Authorization="Bearer b")[0] == 404
    assert served.ask("DELETE", f"{PATH}/{name}", Authorization="Bearer b")[0] == 404
    again = body | {"previous_response_id": name}
    assert [served.ask("POST", PATH, again, Authorization=f"Bearer {key}")[0] for key in "ab"] == [200, 400]


def test_the_least_recently_used_leave():
    stored, alice = StoredResponses(max_responses=3, max_bytes=1000), Tenant("alice")
    for i in range(3):
        stored.put({"id": str(i)}, [], None)
    stored.put({"id": "0"}, [], alice)
    assert [stored.get(str(i), None) is None for i in range(3)] == [True, False, False]
    stored.get("1", None)
    stored.put({"id": "large"}, [{"content": "x" * 900}], alice)
    assert [stored.get(*key) is None for key in (("0", alice), ("1", None), ("2", None))] == [True, False, False]
    assert stored.get("large", alice) is not None
    stored.put({"id": "too large"}, [{"content": "x" * 1000}], alice)
    assert stored.get("too large", alice) is None
    assert stored.get("large", alice) is not None
    assert stored.delete("large", alice)
    assert not stored.delete("large", alice)


def test_a_tenant_that_stores_much_loses_its_own():
    """By bytes and by number; another that has less than an equal share loses nothing, however old."""
    stored, alice, bob, carl = (
        StoredResponses(max_responses=12, max_bytes=12_000),
        *map(Tenant, ("alice", "bob", "carl")),
    )

    def kept(*tenants):
        return ["".join(str(i) for i in range(20) if stored.get(str(i), one)) for one in tenants]

    for i in range(3):
        stored.put({"id": str(i)}, [{"content": "b" * 1000}], bob)
    for i in range(12):
        stored.put({"id": str(i)}, [{"content": "a" * 2000}], alice)
        assert kept(bob) == ["012"]
    assert kept(alice) == ["891011"]
    count, size = stored.counts()
    assert (count, 11_000 < size < 12_000) == (7, True)
    for i in range(20):
        stored.put({"id": str(i)}, [], carl)
        assert kept(alice, bob) == ["891011", "012"]
    assert kept(carl) == ["1516171819"]
    for i in range(3, 8):
        stored.put({"id": str(i)}, [{"content": "b" * 2010}], bob)
    # Once bob holds most, the oldest of his own leave.
    assert kept(alice, bob, carl) == ["91011", "67", "1516171819"]
    for one in (alice, bob, carl):
        for i in range(20):
            stored.delete(str(i), one)
    assert stored.counts() == (0, 0)


def test_a_picture_is_kept_once():
    def asked(picture, text="?"):
        return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": picture}}, {"text": text}]}

    stored, alice = StoredResponses(max_bytes=3000), Tenant("alice")
    first, said = asked("x" * 1000), {"role": "assistant", "content": "y"}
    told = [first]
    for i in range(3):  # a conversation that goes on, and one that the client tells again
        told = [*told, said, asked("x" * 1000, f"and {i}?")]
        stored.put({"id": str(i)}, told, None)
    found = [stored.get(str(i), None) for i in range(3)]
    assert [one.messages[: 2 * i + 3] for i, one in enumerate(found)] == [told[: 2 * i + 3] for i in range(3)]
    assert len({id(message["content"][0]) for one in found for message in one.messages[::2]}) == 1
    stored.put({"id": "a"}, [first], alice)  # a tenant's own is another one
    assert all(stored.get(*key) for key in (("0", None), ("1", None), ("2", None), ("a", alice)))
    stored.put({"id": "b"}, [asked("z" * 1000)], None)
    assert [stored.get(*key) is None for key in (("0", None), ("2", None), ("a", alice), ("b", None))] == [
        True, True, False, False
    ]  # fmt: skip
    stored.delete("b", None)
    stored.put({"id": "c"}, [asked("x" * 1000)], None)  # and has room again
    assert stored.get("a", alice) is not None
    stored.put({"id": "d"}, [asked("u" * 1000), asked("v" * 1000), asked("w" * 1000)], None)
    assert stored.get("d", None) is None
