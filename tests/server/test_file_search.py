"""`file_search` of /v1/responses: answers that search a library while they are made."""

from __future__ import annotations

import functools
import io
import itertools
import signal
import threading

import numpy as np
import openai
import pytest
from PIL import Image

from tests.helper import SIZES, WITHIN
from tests.server import helper
from tests.server.helper import WORDS, serving
from tests.server.test_retrieval import keys, pictures, png, upload  # noqa: F401 - fixtures
from vlcache_jax import AsyncLLM, CacheConfig
from vlcache_jax.library import Library, Retriever, SearchOptions
from vlcache_jax.outputs import SearchBegun, Searched, SearchRound
from vlcache_jax.pallas_kernels import PAGE
from vlcache_jax.protocol.answers import ChatAnswer
from vlcache_jax.protocol.response_answers import ResponseAnswer
from vlcache_jax.protocol.responses import FileSearch, ResponseRequest
from vlcache_jax.protocol.schema import ApiError
from vlcache_jax.protocol.tools import SEARCH
from vlcache_jax.server.app import Server

PATH, ADMIN = "/v1/responses", "root"
TOOL = {"type": "file_search", "vector_store_ids": ["shoes"], "max_num_results": 2}
CHOICE = {"type": "file_search"}
MODEL = "qwen3_vl-tied"
ASKED = {
    "model": MODEL,
    "input": "Which shoe is red?",
    "tools": [TOOL],
    "tool_choice": CHOICE,
    "temperature": 0,
}
# A first search is forced by a grammar; what follows is text of a model that was not trained.
ONCE = ASKED | {"max_tool_calls": 1, "max_output_tokens": 500}


@pytest.fixture(scope="module")
def engine(checkpoints, tmp_path_factory):
    sizes = {**SIZES, "max_model_len": 24 * PAGE, "kv_cache_bytes": 2**25}
    cache = CacheConfig(disk=tmp_path_factory.mktemp("disk"))
    engine = AsyncLLM(checkpoints("qwen3_vl-tied"), use_tqdm=False, allowed_local_media_path=None, cache=cache, **sizes)
    yield engine
    engine.service.close()


@pytest.fixture(scope="module")
def shoes(engine, textured_image):
    library = Library(engine, "shoes", keep_bytes=True)
    for i in range(4):
        # OpenAI's attributes are no lists, and its names are texts.
        said = {"price": 10 * i, "tags": ["new"], "nothing": None, "filename": 7}
        library.add(textured_image(64, 64 + 32 * i, i), f"sku-{i}", metadata=said)
    return library


@pytest.fixture
def served(serve, shoes, monkeypatch):
    made = lambda engine, config: Server(engine, config, embedder=near)  # noqa: E731
    monkeypatch.setattr(helper, "Server", made)
    return serve


def broken(inputs):
    raise RuntimeError("no embedder today")


def near(inputs):
    """Vectors: pictures by their width, queries as the second narrowest picture."""
    return np.array([_angle(one) for one in inputs])


def _angle(one):
    width = 96 if isinstance(one, str) else _width(one["image"])
    return [np.cos(width / 200), np.sin(width / 200)]


def _width(image):
    return Image.open(io.BytesIO(image)).width if isinstance(image, bytes) else image.shape[1]


def test_an_answer_goes_on_with_what_was_found(served, client, engine):
    responses = client(served()).responses
    found = responses.create(**ONCE, include=["file_search_call.results"])
    search, *rest = found.output
    assert (search.type, search.status, len(search.queries)) == ("file_search_call", "completed", 1)
    assert [hit.file_id for hit in search.results][:1] == ["sku-1"]
    assert search.results[0].attributes == {"price": 10, "filename": 7}
    assert search.results[0].filename == "sku-1"
    assert search.results[0].score == pytest.approx(1, abs=1e-5)
    assert {item.type for item in rest} <= {"message", "file_search_call"}
    # The second turn computed nothing that was there: what was said before lies in the pool, pictures are linked.
    usage = found.usage
    assert usage.input_tokens_details.cached_tokens > 0
    # A stream has the same, and tells of the search as it goes.
    events = list(responses.create(**ONCE, stream=True))
    kinds = [event.type for event in events]
    of_search = [kind for kind in kinds if "file_search_call" in kind][:3]
    assert of_search == [f"response.file_search_call.{what}" for what in ("in_progress", "searching", "completed")]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert not [kind for kind in kinds if "function_call" in kind]
    last = events[-1].response
    assert last.output_text == found.output_text
    assert last.output[0].queries == search.queries
    assert last.output[0].results is None
    assert last.usage.output_tokens == usage.output_tokens


@pytest.mark.slow
def test_without_another_embedder_the_served_model_finds(serve, shoes, client, keys, pictures):  # noqa: F811
    found = client(serve()).responses.create(**ONCE, include=["file_search_call.results"])
    assert {hit.file_id for hit in found.output[0].results} <= {item.id for item in shoes.items()}
    assert len(found.output[0].results) >= 1
    running = serve(api_keys=keys, admin_key=ADMIN)
    name = upload(running, "/v1/files", png(pictures[0]), key="a", purpose="vision")[1]["id"]
    files = ONCE | {"tools": [TOOL | {"vector_store_ids": ["files"]}]}
    mine, others = (
        client(running, key).responses.create(**files, include=["file_search_call.results"]).output[0].results
        for key in "ab"
    )
    assert ([hit.file_id for hit in mine], others) == ([name], [])
    running.json("DELETE", f"/v1/files/{name}", Authorization="Bearer a")


def test_a_chat_sent_whole_says_the_same(served, client, engine, shoes):
    running = served()
    found = client(running).responses.create(**ONCE, include=["file_search_call.results"])
    asked = {"role": "user", "content": ASKED["input"]}
    searches = running.server._stored.get(found.id, None).messages
    assert searches[0] == asked
    call, result, answer = searches[1:]
    assert SEARCH in call["content"]
    assert [part["id"] for part in result["content"] if part["type"] == "image"] == [
        hit.file_id for hit in found.output[0].results
    ]
    parts = [
        {"type": "image", "library": "shoes", "id": part["id"]} if part["type"] == "image" else part
        for part in result["content"]
    ]
    tools = [running_tool(shoes)]
    body = {
        "messages": [asked, call, {"role": "tool", "content": parts}], "tools": tools, "temperature": 0,
        "max_tokens": 500,
    }  # fmt: skip
    whole = running.json("POST", "/v1/chat/completions", body)[1]["choices"][0]["message"]
    assert answer["content"] == found.output_text != ""
    assert whole["content"].startswith(found.output_text)  # its 500 tokens were for the search, too


def running_tool(library):
    return SearchOptions(Retriever(library, near), top_k=2).tool


def test_it_is_remembered_with_what_was_found(served, client):
    responses = client(served()).responses
    first = responses.create(**ONCE)
    again = responses.create(
        model=MODEL, input="And now?", previous_response_id=first.id, tools=[TOOL], temperature=0, max_output_tokens=2
    )
    assert again.output_text is not None
    assert again.usage.input_tokens_details.cached_tokens > 0
    # Clients that send back what they were answered may send searches, too.
    items = [item.model_dump(exclude_none=True) for item in first.output]
    sent = [{"role": "user", "content": ASKED["input"]}, *items, {"role": "user", "content": "And now?"}]
    assert responses.create(model=MODEL, input=sent, temperature=0, max_output_tokens=2).status


def test_what_bounds_a_search(served, client):
    responses = client(served()).responses
    include = ["file_search_call.results"]

    def results(**tool):
        found = responses.create(**ONCE | {"tools": [TOOL | tool]}, include=include)
        return [hit.file_id for hit in found.output[0].results]

    assert results(max_num_results=1) == ["sku-1"]
    assert results(filters={"type": "gt", "key": "price", "value": 10})[:1] == ["sku-2"]
    assert results(filters={"type": "eq", "key": "price", "value": 7}) == []
    weights = {"embedding_weight": 1, "text_weight": 0}
    ranked = {"score_threshold": 0.99999, "ranker": "default-2024-11-15", "hybrid_search": weights}
    assert results(ranking_options=ranked) == ["sku-1"]
    short = responses.create(**ONCE | {"max_output_tokens": 3})
    assert short.status == "incomplete"
    assert {item.type for item in short.output} <= {"file_search_call", "message"}
    several = responses.create(**ONCE | {"max_tool_calls": 2, "tool_choice": CHOICE}, include=include)
    assert 1 <= sum(item.type == "file_search_call" for item in several.output) <= 3


def test_a_search_that_fails_is_told(serve, shoes, client, monkeypatch):
    monkeypatch.setattr(helper, "Server", lambda engine, config: Server(engine, config, embedder=broken))
    found = client(serve()).responses.create(**ONCE)
    assert found.output[0].status == "failed"
    assert found.status in ("completed", "incomplete")


def leaves(inputs):
    raise SystemExit(3)


def hangs(inputs):
    if isinstance(inputs[0], str):
        HELD.wait(WITHIN)
    return near(inputs)


HELD = threading.Event()


@pytest.mark.parametrize("embedder", [leaves, hangs])
def test_nobody_else_suffers_from_an_embedder(serve, shoes, client, monkeypatch, embedder):
    HELD.clear()
    impatient = functools.partialmethod(SearchOptions.__init__, timeout=0.3)
    monkeypatch.setattr(SearchOptions, "__init__", impatient)
    monkeypatch.setattr(helper, "Server", lambda engine, config: Server(engine, config, embedder=embedder))
    running = serve()
    found = client(running).responses.create(**ONCE)
    assert found.output[0].status == "failed"
    assert running.json("GET", "/v1/models")[0] == 200
    HELD.set()


def test_calls_must_be_read(serve, shoes):
    status, told = serve(tool_call_parser="none").json("POST", PATH, ONCE)
    assert (status, told["error"]["param"]) == (400, "tools[0]")
    status, told = serve().json("POST", PATH, {"input": "?", "tool_choice": CHOICE})
    assert told["error"]["message"] == "tool_choice file_search requires a tool of this type in tools"


def test_functions_stand_beside_it(served, client):
    look = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}, "strict": False}
    responses = client(served()).responses
    found = responses.create(**ONCE | {"tools": [look, TOOL]})
    assert found.output[0].type == "file_search_call"
    called = responses.create(
        **ONCE | {"tools": [look, TOOL], "tool_choice": {"type": "function", "name": "look"}, "max_output_tokens": 100}
    )
    assert called.output[0].type == "function_call"
    with pytest.raises(openai.BadRequestError, match=f"tools must not contain {SEARCH}"):
        responses.create(**ONCE | {"tools": [look | {"name": SEARCH}, TOOL]})


@pytest.mark.parametrize(
    ("tool", "where"),
    [
        ({"vector_store_ids": []}, "tools[0].vector_store_ids must name one library, got []"),
        ({"vector_store_ids": ["a", "b"]}, "tools[0].vector_store_ids must name one library"),
        ({"max_num_results": 0}, "tools[0].max_num_results must be from 1 to 50, got 0"),
        ({"more": 1}, "'more' in tools[0]; expected one of type, vector_store_ids"),
        ({"filters": {"type": "like", "key": "a", "value": 1}}, "tools[0].filters.type must be eq, ne, in, nin"),
        ({"filters": {"type": "and", "filters": []}}, "tools[0].filters.filters must be a list of 1 to 1024 filters"),
        ({"filters": {"type": "gt", "key": "a", "value": []}}, "tools[0].filters.value must be a number or a string"),
        ({"filters": {"type": "or", "filters": [{"type": "eq"}]}}, "tools[0].filters.filters[0].key must be a string"),
        ({"filters": {"type": "eq", "key": "a"}}, "tools[0].filters must have value, got ['type', 'key']"),
        (
            {"filters": {"type": "eq", "key": "a", "value": 1, "b": 1}},
            "'b' in tools[0].filters; expected one of type, key",
        ),
        ({"ranking_options": []}, "tools[0].ranking_options must be an object, got []"),
        ({"ranking_options": {"a": 1}}, "'a' in tools[0].ranking_options; expected one of ranker"),
        ({"ranking_options": {"score_threshold": "x"}}, "tools[0].ranking_options.score_threshold must be a number"),
        ({"ranking_options": {"ranker": "none"}}, "tools[0].ranking_options.ranker must be auto"),
        (
            {"ranking_options": {"hybrid_search": {"embedding_weight": 1, "text_weight": 1}}},
            "tools[0].ranking_options.hybrid_search must be absent or have text_weight 0",
        ),
    ],
)
def test_what_is_wrong_is_named(served, tool, where):
    status, told = served().json("POST", PATH, ONCE | {"tools": [TOOL | tool]})
    assert (status, where in told["error"]["message"]) == (400, True), told


def test_libraries_that_there_are_not(served):
    running = served()
    status, told = running.json("POST", PATH, ONCE | {"tools": [TOOL | {"vector_store_ids": ["boots"]}]})
    assert status == 404
    assert told["error"]["message"] == "tools[0].vector_store_ids must name a library of this server, got 'boots'"
    status, told = running.json("POST", PATH, ONCE | {"tools": [TOOL, TOOL]})
    assert (status, told["error"]["message"]) == (
        400,
        "tools must have at most one file_search, got another at tools[1]",
    )


def test_filters():
    def passes(given, **metadata):
        return FileSearch.parse(TOOL | {"filters": given}, "tools[0]").matches(metadata)

    cheap = {"type": "lte", "key": "price", "value": 10}
    red = {"type": "eq", "key": "colour", "value": "red"}
    assert passes(cheap, price=10)
    assert not passes(cheap, price=10.5)
    assert not passes(cheap, price="5")
    assert not passes(cheap)
    assert passes({"type": "and", "filters": [cheap, red]}, price=1, colour="red")
    assert not passes({"type": "and", "filters": [cheap, red]}, price=1, colour="blue")
    assert passes({"type": "or", "filters": [cheap, red]}, price=100, colour="red")
    assert passes({"type": "ne", "key": "colour", "value": "red"})
    assert not passes({"type": "eq", "key": "new", "value": 1}, new=True)
    assert passes({"type": "in", "key": "colour", "value": ["red", "blue"]}, colour="blue")
    assert passes({"type": "nin", "key": "colour", "value": ["red"]}, colour="blue")
    assert passes({"type": "nin", "key": "colour", "value": ["red"]})
    assert not passes({"type": "in", "key": "colour", "value": ["red"]})
    deep = red
    for _ in range(12):
        deep = {"type": "and", "filters": [deep]}
    with pytest.raises(ApiError, match="at most 8 deep"):
        passes(deep)
    for kind in ("in", "nin"):
        assert passes({"type": kind, "key": "number", "value": [*range(1024)]}, number=5) == (kind == "in")
        for value in ("red", {"red": 1}, [*range(1025)]):
            with pytest.raises(
                ApiError, match=r"^tools\[0\]\.filters\.value must be a list of at most 1024 values, got"
            ):
                passes({"type": kind, "key": "number", "value": value})


def test_tenants_search_what_is_theirs(served, client, keys, pictures):  # noqa: F811 - fixtures
    running = served(api_keys=keys, admin_key=ADMIN)
    for key, some in (("a", pictures[:1]), ("b", pictures[1:2])):
        for one in some:
            status, told = upload(running, "/v1/files", png(one), key=key, purpose="vision")
            assert status == 200, told
    files = ONCE | {"tools": [TOOL | {"vector_store_ids": ["files"]}]}
    seen = {}
    for key in "ab":
        found = client(running, key).responses.create(**files, include=["file_search_call.results"])
        seen[key] = {hit.file_id for hit in found.output[0].results}
        own = running.json("GET", "/v1/files", Authorization=f"Bearer {key}")[1]["data"]
        assert seen[key] == {one["id"] for one in own}
    assert len(seen["a"]) == len(seen["b"]) == 1
    assert not seen["a"] & seen["b"]
    both = client(running, "a").responses.create(**ONCE, include=["file_search_call.results"])
    assert both.output[0].results[0].file_id == "sku-1"  # the operator's are for all
    for key in "ab":
        for name in seen[key]:
            running.json("DELETE", f"/v1/files/{name}", Authorization=f"Bearer {key}")


def test_a_call_in_what_was_thought_is_told_as_a_search():
    answer = ResponseAnswer(ChatAnswer("resp_1", "m"), ResponseRequest.parse({"input": "?", "tools": [TOOL]}))
    found = SearchRound(Searched("a shoe", (), 0.1), (), ())
    kinds = [event["type"] for event in (*answer.pieces(SearchBegun()), *answer.pieces(found))]
    of_search = [f"response.file_search_call.{what}" for what in ("in_progress", "searching", "completed")]
    assert kinds == ["response.output_item.added", *of_search]


@pytest.mark.servers
def test_an_embedder_beside_the_model(checkpoints, tmp_path, pictures):  # noqa: F811 - a fixture
    words = [str(checkpoints("qwen3_vl-tied")), *WORDS, "--max-model-len", str(24 * PAGE), "--kv-cache-bytes", "32MiB"]
    words += ["--embedder", str(checkpoints("qwen3_vl")), "--disk", str(tmp_path), "--admin-key", ADMIN]
    with serving(*words) as (process, url, lines):
        running = helper.Running(None, int(url.rpartition(":")[2].partition("/")[0]))
        for i, one in enumerate(pictures[:2]):
            status, told = upload(running, "/libraries/shoes", png(one), key=ADMIN, id=f"sku-{i}")
            assert status == 200, told
        asked = ONCE | {"include": ["file_search_call.results"]}
        # The first search may take longer than it can wait, as it compiles; it goes on for the next one.
        found = iter(lambda: running.json("POST", PATH, asked)[1]["output"][0], None)
        search = next(one for one in itertools.islice(found, 20) if one["status"] == "completed")
        assert {hit["file_id"] for hit in search["results"]} in (
            {"sku-0"},
            {"sku-1"},
            {"sku-0", "sku-1"},
        )  # the model says k
        process.send_signal(signal.SIGTERM)
        assert process.wait(WITHIN) == 0, lines
