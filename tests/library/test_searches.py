"""Answers that search a library while they are made."""

import threading
import time

import numpy as np
import pytest

from tests.helper import SIZES, WITHIN
from vlcache_jax import LLM, RequestError, SamplingParams
from vlcache_jax.library import Library, Retriever, SearchOptions
from vlcache_jax.library.searches import _call
from vlcache_jax.pallas_kernels import PAGE
from vlcache_jax.protocol.tools import SEARCH

LONG = {**SIZES, "max_model_len": 24 * PAGE, "kv_cache_bytes": 2**25}
GREEDY = SamplingParams(temperature=0, max_tokens=500, ignore_eos=False)
QUESTION = [{"role": "user", "content": "Which shoe is red?"}]


@pytest.fixture(scope="module")
def llm(checkpoints):
    with LLM(checkpoints("qwen3_vl-tied"), use_tqdm=False, **LONG) as engine:
        yield engine


@pytest.fixture(scope="module")
def library(llm, textured_image):
    library = Library(llm, "shoes")
    alike = Retriever(library, lambda inputs: np.ones((len(inputs), 2)), name="alike")  # embeds what is added
    for i in range(4):
        library.add(textured_image(64, 64 + 32 * i, i), f"{i}", metadata={"price": i})
    assert alike.prepare() == 4
    return library


@pytest.fixture
def retriever(library):
    return Retriever(library, lambda inputs: np.ones((len(inputs), 2)), name="alike")


@pytest.fixture
def chat_calls(llm, monkeypatch):
    """What each turn was asked, and what came."""
    calls, chat = [], LLM.chat

    def noted(self, conversations, params=None, *args, **options):
        outputs = chat(self, conversations, params, *args, **options)
        if options.get("retrieve") is None:
            calls.append((conversations, params, outputs))
        return outputs

    monkeypatch.setattr(LLM, "chat", noted)
    return calls


def test_an_answer_goes_on_with_what_was_found(llm, retriever, chat_calls, textured_image):
    llm.reset_prefix_cache()
    searches = SearchOptions(retriever, top_k=2, max_rounds=1, required=True)
    [output] = llm.chat([QUESTION], GREEDY, use_tqdm=False, retrieve=searches)
    (_, _, [call]), (conversations, _, [last]) = chat_calls
    assert _call(call.outputs[0].text, TOOL) is not None
    [search] = output.searches
    assert [name for name, _ in search.hits] == ["0", "1"][: len(search.hits)]
    assert search.error is None
    assert output.outputs[0].token_ids == last.outputs[0].token_ids
    assert len(output.cache.images) == len(search.hits) > 0
    # Of the second turn nothing is computed but what is new: pictures are linked, and what was said lies in the pool.
    new = len(output.prompt_token_ids) - len(call.prompt_token_ids) - len(call.outputs[0].token_ids)
    linked = sum(image.tokens for image in output.cache.images)
    assert all(image.encoder != "computed" for image in output.cache.images)
    assert output.num_cached_tokens >= len(call.prompt_token_ids) + len(call.outputs[0].token_ids) - PAGE
    assert output.cache.rows[0] <= new + PAGE
    assert new > linked
    # The same conversation sent whole, by an engine that keeps nothing.
    *_, result = conversations[0]
    for part in result["content"]:
        if part["type"] == "image":
            number = int(part.pop("id"))
            del part["library"]
            part["image"] = textured_image(64, 64 + 32 * number, number)
    [alone] = llm.chat(conversations, GREEDY.clone(), use_tqdm=False, tools=[searches.tool], reuse="off")
    budget = GREEDY.max_tokens - len(call.outputs[0].token_ids)
    assert alone.outputs[0].token_ids[:budget] == output.outputs[0].token_ids


@pytest.mark.thorough
@pytest.mark.slow
def test_bounds(llm, library, retriever, chat_calls):
    for bound, hits in (({"k": 1}, 1), ({"tokens": 4}, 1), ({"tokens": 1}, 0)):
        searches = SearchOptions(retriever, required=True, **bound)
        [output] = llm.chat([QUESTION], GREEDY, use_tqdm=False, retrieve=searches)
        assert len(output.searches[0].hits) == hits
    del chat_calls[:]
    short = SamplingParams(temperature=0, max_tokens=5)
    [output] = llm.chat([QUESTION], short, use_tqdm=False, retrieve=SearchOptions(retriever, required=True))
    assert output.searches == ()  # its tokens are used up before its call is whole
    assert len(chat_calls) == 1
    [output] = llm.chat([QUESTION], short, use_tqdm=False, retrieve=retriever)
    assert output.searches == ()  # a model of random weights asks for nothing


@pytest.mark.parametrize("how", ["fails", "is slow", "wrong vectors"])
@pytest.mark.slow
def test_a_search_that_finds_nothing_is_told_as_such(llm, library, how, chat_calls):
    def embed(inputs):
        if how == "fails":
            raise OSError("no network")
        if how == "is slow":
            time.sleep(1)
        return np.ones((len(inputs), 2 if how == "is slow" else 3))

    retriever = Retriever(library, lambda inputs: np.ones((len(inputs), 2)), name="alike")
    retriever.prepare()
    retriever._embedder = embed
    searches = SearchOptions(retriever, timeout=0.1, max_rounds=1, required=True)
    [output] = llm.chat([QUESTION], GREEDY, use_tqdm=False, retrieve=searches)
    [search] = output.searches
    assert search.hits == ()
    said = {"fails": "OSError: no network", "is slow": "more than 0.1 s", "wrong vectors": "same length"}[how]
    assert said in search.error
    assert chat_calls[1][0][0][-1] == {"role": "tool", "content": [{"type": "text", "text": "[]"}]}
    assert output.error is None


def test_a_search_that_hangs_is_not_waited_for(llm, library):
    ends = threading.Event()
    retriever = Retriever(library, lambda inputs: np.ones((len(inputs), 2)), name="alike")
    retriever.prepare()
    retriever._embedder = lambda inputs: ends.wait(WITHIN) and np.ones((len(inputs), 2))
    try:
        searches = SearchOptions(retriever, timeout=0.1, max_rounds=1, required=True)
        outputs = llm.chat([QUESTION] * 2, GREEDY, use_tqdm=False, retrieve=searches)
        assert not ends.is_set()
        assert ["more than 0.1 s" in output.searches[0].error for output in outputs] == [True, True]
    finally:
        ends.set()


@pytest.mark.slow
def test_rows_go_on_each_for_itself(llm, retriever):
    rows = [QUESTION, [{"role": "user", "content": 3}], {"messages": [{"role": "user", "content": "Another one?"}]}]
    searches = SearchOptions(retriever, top_k=1, max_rounds=1, required=True)
    outputs = llm.chat(rows, GREEDY, use_tqdm=False, retrieve=searches, on_error="return")
    assert [output.error is None for output in outputs] == [True, False, True]
    assert outputs[1].error.startswith("conversations[1] ")
    assert [len(output.searches) for output in outputs] == [1, 0, 1]
    assert [output.request_id for output in outputs] == ["0", "1", "2"]
    [alone] = llm.chat([QUESTION], GREEDY, use_tqdm=False, retrieve=searches)
    assert alone.outputs[0].token_ids == outputs[0].outputs[0].token_ids
    with pytest.raises(RequestError, match=r"^conversations\[1\] ") as error:
        llm.chat(rows, GREEDY, use_tqdm=False, retrieve=searches)
    assert [one is None for one in error.value.outputs] == [False, True, False]


def test_what_is_wrong_is_said(llm, library, retriever, checkpoints):
    def ask(params, searches=retriever):
        return llm.chat([QUESTION], params, use_tqdm=False, retrieve=searches)

    for work, message in (
        (lambda: SearchOptions(3), "^retriever must be a Retriever, got int$"),
        (lambda: SearchOptions(retriever, top_k=0), "^top_k must be"),
        (lambda: SearchOptions(retriever, max_rounds=0), "^max_rounds must be"),
        (lambda: SearchOptions(retriever, max_tokens="x"), "^max_tokens must be"),
        (lambda: SearchOptions(retriever, timeout=0), "^timeout must be a positive number"),
        (lambda: SearchOptions(retriever, required=1), "^required must be"),
        (lambda: ask(SamplingParams(n=2, temperature=1)), "^sampling_params n must be 1"),
        (lambda: ask([GREEDY] * 2), "^sampling_params must be one, or one for each"),
        (lambda: ask(None, Retriever(Library(llm, "x", "owner"), llm)), "^cache_salt must match the owner"),
    ):
        with pytest.raises(ValueError, match=message):
            work()
    another = pytest.raises(ValueError, match=r"^retrieve must search a library of this engine")
    with LLM(checkpoints("qwen3_vl"), use_tqdm=False, **SIZES) as other, another:
        other.chat([QUESTION], retrieve=retriever)


TOOL = {
    "type": "function",
    "function": {"name": SEARCH, "parameters": {"properties": {"query": {"type": "string"}, "k": {"type": "integer"}}}},
}


def test_calls():
    call = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
    assert _call("No call.", TOOL) is None
    assert _call(call.format("other", "{}"), TOOL) is None
    assert _call("Well. " + call.format(SEARCH, '{"query": "a", "k": 2}'), TOOL) == {"query": "a", "k": 2}
    assert _call(call.format(SEARCH, "{}"), TOOL) == {}
    assert _call(call.format("look", "{}") + call.format(SEARCH, "{}"), TOOL) is None  # the client is to look first
    xml = f"<tool_call>\n<function={SEARCH}>\n<parameter=query>\n5\n</parameter>\n<parameter=k>\n2\n</parameter>\n"
    assert _call(xml + "</function>\n</tool_call>", TOOL) == {"query": "5", "k": 2}
