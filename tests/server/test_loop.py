"""A large body costs the event loop nothing: it is parsed, checked and turned into settings in threads."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio import Handle
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from tests.server.test_retrieval import upload
from vlcache_jax import AsyncLLM, SamplingParams
from vlcache_jax.common.json_files import parse_json
from vlcache_jax.protocol.anthropic_requests import ABSENT_IN_MESSAGES, COUNT_TOKENS, MESSAGES
from vlcache_jax.protocol.responses import ABSENT_IN_RESPONSES, RESPONSES
from vlcache_jax.protocol.retrieval import ABSENT_IN_EMBEDDINGS, ABSENT_IN_RERANK, EMBEDDINGS, RERANK
from vlcache_jax.protocol.schema import ABSENT_IN_CHAT, ABSENT_IN_TEXT, CHAT, DETOKENIZE, TEXT, TOKENIZE
from vlcache_jax.server.admin import VERBS
from vlcache_jax.server.app import Server

SIZES = 2**16, 2**18  # bytes of a body
MOST = 2500  # Python calls from one turn of the loop to the next; of what is walked on it, each entry is one or more
ONE = SamplingParams(max_tokens=1)
HELLO = [{"role": "user", "content": "Hello"}]
CHAT_BODY = {"messages": HELLO, "max_tokens": 1}
BASES: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "/v1/chat/completions": (CHAT_BODY, [CHAT, ABSENT_IN_CHAT]),
    "/v1/completions": ({"prompt": "Hello", "max_tokens": 1}, [TEXT, ABSENT_IN_TEXT]),
    "/v1/responses": ({"input": "Hello", "max_output_tokens": 1}, [RESPONSES, ABSENT_IN_RESPONSES]),
    "/v1/messages": (CHAT_BODY, [MESSAGES, ABSENT_IN_MESSAGES]),
    "/v1/messages/count_tokens": ({"messages": HELLO}, [COUNT_TOKENS]),
    "/v1/embeddings": ({"input": "Hello"}, [EMBEDDINGS, ABSENT_IN_EMBEDDINGS]),
    "/v1/rerank": ({"query": "Hello", "documents": ["Hello"]}, [RERANK, ABSENT_IN_RERANK]),
    "/rerank": ({"query": "Hello", "documents": ["Hello"]}, [{"documents": {}}]),
    "/tokenize": ({"messages": HELLO}, [TOKENIZE]),
    "/detokenize": ({"tokens": [1]}, [DETOKENIZE]),
    **{f"/cache/{verb}": ({}, [fields]) for verb, fields in VERBS.items()},
}
"""Of each route a body that is right, and the fields that it knows."""


def values(size: int, field: int) -> Iterator[Any]:
    """What any field is given: many integers, and of the larger size something else, one field after the other."""
    yield [1] * (size // 2)
    if size == SIZES[-1]:
        names = {str(i): 1 for i in range(size // 10)}
        yield (["a"] * (size // 4), [[1]] * (size // 4), names, "a" * size)[field % 4]


def inner(route: str, size: int) -> Iterator[dict[str, Any]]:
    """What fields hold that are objects."""
    many, names = [1] * (size // 2), {str(i): 1 for i in range(size // 10)}
    parts = [{"type": "text", "text": "a"}] * (size // 30)
    tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(size // 50)]
    if "mm_processor_kwargs" in {name for fields in BASES[route][1] for name in fields}:
        yield from ({"mm_processor_kwargs": one} for one in ({"fps": many}, {"size": names}, names))
    if route in ("/v1/chat/completions", "/tokenize", "/v1/embeddings"):
        call = {"function": {"name": "f", "arguments": json.dumps({"a": many})}}
        frames = {"type": "video", "video": ["a"] * (size // 4)}
        for message in (
            {"role": "user", "content": parts},
            {"role": "user", "content": [frames]},
            {"role": "user", "content": [{"type": "video", "video": "a", "video_metadata": {"frames_indices": many}}]},
            {"role": "assistant", "tool_calls": [call] * 2},
            {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}] * (size // 30)},
        ):
            yield {"messages": [message]}
        yield {"messages": HELLO * (size // 40)}
    if route == "/v1/chat/completions":
        yield {"tools": tools}
        yield {"tools": [{"function": {"name": "f", "parameters": names}}], "tool_choice": "required"}
    if route == "/v1/responses":
        yield {"input": HELLO * (size // 40)}
        yield {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}] * (size // 40)}]}
        yield {"tools": [{"type": "function", "name": f"f{i}"} for i in range(size // 40)]}
        search = {"type": "file_search", "vector_store_ids": ["a"]}
        one = {"type": "eq", "key": "a", "value": 1}
        for filters in ({"type": "or", "filters": [one] * (size // 40)}, {"type": "in", "key": "a", "value": many}):
            yield {"tools": [search | {"filters": filters}]}
        yield {"text": {"format": {"type": "json_schema", "schema": {"enum": many}}}}
    if route.startswith("/v1/messages"):
        call = {"type": "tool_use", "id": "a", "name": "f", "input": {"a": many}}
        results = [{"type": "tool_result", "tool_use_id": "a", "content": parts[:1]}] * (size // 60)
        yield {"system": parts}
        yield {"messages": HELLO * (size // 40)}
        yield {"messages": [{"role": "user", "content": parts}]}
        yield {"messages": [{"role": "assistant", "content": [call] * 2}, {"role": "user", "content": results}]}
        yield {"tools": [{"name": f"f{i}", "input_schema": {}} for i in range(size // 50)]}
        yield {"output_config": {"format": {"type": "json_schema", "schema": {"enum": many}}}}
    if route in ("/v1/chat/completions", "/v1/completions"):
        yield {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": many}}}}
        for form in ({"choice": ["a"] * (size // 4)}, {"json": names}, {"regex": "a" * size}):
            yield {"structured_outputs": form}
    if route == "/v1/completions":
        yield {"prompt": [many]}


def bodies(route: str, size: int) -> Iterator[dict[str, Any]]:
    base, tables = BASES[route]
    seen = () if route == "/v1/chat/completions" or "messages" in tables[0] else {**CHAT, **ABSENT_IN_CHAT}
    for i, name in enumerate(["unknown", *(name for fields in tables for name in fields if name not in seen)]):
        yield from (base | {name: value} for value in values(size, i))
    yield from (base | given for given in inner(route, size))


class Turns:
    """Counts Python calls on the loop's thread, by the callback of which they are part.

    Attributes:
      most: of one callback.
      parsed: bodies that were parsed on that thread.
    """

    def __init__(self) -> None:
        self.most = self.parsed = self._now = 0

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        if event != "call":
            return
        self._now = 1 if frame.f_code is Handle._run.__code__ else self._now + 1
        self.most = max(self.most, self._now)
        self.parsed += frame.f_code is parse_json.__code__


@pytest.fixture
def turns(serve, monkeypatch):
    """A server, and the turns of its event loop."""
    counted, check = Turns(), Server.check_health

    async def watched(own):
        sys.setprofile(counted)  # of this thread, from here on
        await check(own)

    monkeypatch.setattr(Server, "check_health", watched)
    served = serve(admin_key="boss")
    assert served.ask("GET", "/health")[0] == 200
    return served, counted


@pytest.mark.parametrize("size", [SIZES[0], pytest.param(SIZES[1], marks=pytest.mark.slow)])
@pytest.mark.parametrize("route", BASES)
def test_no_field_is_walked_on_the_event_loop(turns, route, size):
    served, counted = turns
    statuses = set()
    for body in bodies(route, size):
        counted.most = 0
        status, _, found = served.ask("POST", route, body, Authorization="Bearer boss")
        statuses.add(status)
        changed = [name for name in body if body[name] != BASES[route][0].get(name)]
        assert counted.most < MOST, (changed, size, status, found[:200])
        assert status in (200, 400, 404, 413), (changed, size, status, found[:200])
        assert len(found) < 2 * size or status == 200, (changed, size)
    assert counted.parsed == 0
    assert 400 in statuses


def test_no_field_of_a_form_is_walked_on_the_event_loop(turns):
    served, counted = turns
    for size in (2**16, 2**16 + 2**15):  # fields have 128 KiB together
        for fields in ({"metadata": json.dumps([1] * (size // 3))}, {"id": "a" * size}, {"expires": "1" * size}):
            counted.most = 0
            given = {"id": "a"} | fields
            upload(served, "/libraries/shoes", b"no picture", key="boss", **given)
            assert counted.most < MOST, (list(fields), size)
    for size in SIZES:
        for piece in (b"\r", b"\r\n--", b"a"):
            counted.most = 0
            upload(served, "/libraries/shoes", piece * (size // len(piece)), key="boss", id="a")
            assert counted.most < MOST, (piece, size)
    assert counted.parsed == 0


FIRST: dict[str, Callable[[AsyncLLM, int], AsyncIterator[Any]]] = {
    "rates": lambda engine, size: engine.generate(HELLO, ONE, mm_processor_kwargs={"fps": [1] * size}),
    "sizes": lambda engine, size: engine.generate(HELLO, ONE, mm_processor_kwargs={"size": dict.fromkeys(range(size))}),
    "messages": lambda engine, size: engine.generate(HELLO * size, ONE),
    "tools": lambda engine, size: engine.generate(HELLO, ONE, tools=[{"function": {"name": "f"}}] * size),
    "names": lambda engine, size: engine.generate(HELLO, ONE, chat_template_kwargs={str(i): 1 for i in range(size)}),
    "ids": lambda engine, size: engine.generate([1] * size, ONE),
    "allowed": lambda engine, size: engine.generate(HELLO, SamplingParams(allowed_token_ids=[5] * size)),
    "tokenize": lambda engine, size: once(engine.tokenize(HELLO * size)),
    "embed": lambda engine, size: once(engine.embed(HELLO * size)),
    "rates of an embedding": lambda engine, size: once(engine.embed("a", mm_processor_kwargs={"fps": [1] * size})),
    "documents": lambda engine, size: once(engine.rerank("a", [0] * size)),
}


async def once(asked: Awaitable[Any]) -> AsyncIterator[Any]:
    yield await asked


@pytest.mark.parametrize("what", FIRST)
def test_arguments_are_not_walked_on_the_callers_event_loop(engine, what):
    async def ask() -> None:
        with pytest.raises(ValueError, match=r"must|needs"):
            async for _ in FIRST[what](engine, 20_000):
                pass

    counted = Turns()

    async def watched() -> None:
        sys.setprofile(counted)
        try:
            await ask()
        finally:
            sys.setprofile(None)

    asyncio.run(watched())
    assert 0 < counted.most < MOST


def test_what_is_walked_on_the_event_loop_is_seen(turns, monkeypatch):
    served, counted = turns

    async def walks(*_):
        return {"prompt": [json.dumps(number) for number in range(MOST)]}

    monkeypatch.setattr(type(served.server), "check_health", walks)
    served.ask("GET", "/health")
    assert counted.most > MOST
