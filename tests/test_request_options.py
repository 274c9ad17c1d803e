"""Options of a request, as one object and as keywords."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from tests.helper import SIZES
from vlcache_jax import LLM, AsyncLLM, RequestOptions, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=2)
HELLO = [{"role": "user", "content": "Hello"}]
NAMES = {field.name for field in dataclasses.fields(RequestOptions)}
SET = {"reuse": "off", "compress": "snapkv-0.1", "cache_salt": "a", "priority": 3, "mm_processor_kwargs": {}}


@pytest.fixture(scope="module")
def llm(checkpoints):
    with LLM(checkpoints("qwen3_vl"), **SIZES, compressed_kv_bytes=2**22, use_tqdm=False) as llm:
        yield llm


def test_an_option_stands_in_one_place():
    assert RequestOptions.of(**SET) == RequestOptions(**SET)
    for name, value in SET.items():
        rest = RequestOptions(**{other: own for other, own in SET.items() if other != name})
        defaults = {field.name: field.default for field in dataclasses.fields(RequestOptions)}
        assert RequestOptions.of(rest, **{**defaults, name: value}) == RequestOptions(**SET)
        with pytest.raises(ValueError, match=f"{name} must be set in options or as a keyword, got both"):
            RequestOptions.of(RequestOptions(**{name: value}), **{name: value})
    with pytest.raises(ValueError, match="options must be RequestOptions or None, got dict"):
        RequestOptions.of({"reuse": "off"})


def test_what_bodies_and_rows_do_not_say_is_the_default():
    assert RequestOptions.read({"model": "m", "priority": None, "reuse": None}) == RequestOptions()
    assert RequestOptions.read({**SET, "user": "u"}) == RequestOptions(**SET)


def test_every_front_takes_them_whole():
    """And no keyword of theirs is missing among the options."""
    for front in (LLM, AsyncLLM):
        for name in ("chat", "chat_iter", "generate", "score", "embed", "rerank", "deltas", "check"):
            if (method := getattr(front, name, None)) is None:
                continue
            parameters = inspect.signature(method).parameters
            assert parameters["options"].annotation == "RequestOptions | None"
            assert {"reuse", "cache_salt"} <= NAMES & parameters.keys()


def test_calls_with_options_are_those_with_keywords(llm):
    [first] = llm.chat(HELLO, GREEDY, options=RequestOptions(reuse="off", cache_salt="a", priority=-1))
    [other] = llm.chat(HELLO, GREEDY, reuse="off", cache_salt="a")
    assert first.cache.policy == other.cache.policy == "off"
    assert first.outputs == other.outputs
    [(_, last)] = llm.chat_iter([HELLO], GREEDY, options=RequestOptions(reuse="off"))
    assert last.cache.policy == "off"


def test_compression_of_each_row_stands_beside_other_options(llm):
    given = {"options": RequestOptions(reuse="off"), "compress": ["snapkv-0.1", None]}
    found = dict(llm.chat_iter([HELLO, HELLO], GREEDY, **given))
    assert [found[i].cache.policy for i in range(2)] == ["off", "off"]
    with pytest.raises(ValueError, match="compress must be set in options or as a keyword, got both"):
        llm.chat_iter([HELLO], GREEDY, options=RequestOptions(compress="snapkv-0.1"), compress=["snapkv-0.1"])


@pytest.mark.parametrize(
    ("method", "given", "options", "message"),
    [
        ("chat", (HELLO,), {"priority": "high"}, "priority must be an integer, got 'high'"),
        ("chat", (HELLO,), {"cache_salt": 1}, "cache_salt must be a string or None"),
        (
            "score",
            ([HELLO], ["a"]),
            {"compress": "snapkv-0.1"},
            "compress must be None for a method that does not generate text",
        ),
        (
            "embed",
            ("Hello",),
            {"compress": "snapkv-0.1"},
            "compress must be None for a method that does not generate text",
        ),
        ("generate", ("Hello",), {"mm_processor_kwargs": {}}, "mm_processor_kwargs must be a key of the prompt's dict"),
        ("embed", (["Hello"],), {"reuse": "some"}, "reuse must be"),
    ],
)
def test_wrong_ones_are_refused_by_the_call(llm, method, given, options, message):
    with pytest.raises(ValueError, match=message):
        getattr(llm, method)(*given, options=RequestOptions(**options))
