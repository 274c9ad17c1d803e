"""What answers are held to: as users say it, and what the engine makes of it."""

import asyncio
import collections
import concurrent.futures
import itertools
import json
import re
import threading

import hypothesis
import jsonschema
import llguidance
import llguidance.numpy
import numpy as np
import pytest
from hypothesis import strategies as st

from tests.helper import BUCKETS, SIZES, WITHIN, assert_nothing_left, give_pages, user
from vlcache_jax import LLM, AsyncLLM, RequestError, SamplingParams, StructuredOutputs
from vlcache_jax.device.programs.memory import HoldDecodeSlots
from vlcache_jax.device.runner import Runner
from vlcache_jax.engine import scheduler
from vlcache_jax.engine.grammars import Matcher
from vlcache_jax.pallas_kernels import PAGE

SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": ["left", "right"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["place", "count"],
    "additionalProperties": False,
}
QUESTION = user("What is to be seen?")
TAG = {
    "structures": [{"begin": "<f>", "schema": {"type": "integer", "maximum": 99}, "end": "</f>"}],
    "triggers": ["<"],
}


@pytest.fixture(scope="module")
def llm(checkpoints):
    with LLM(checkpoints("qwen3_vl"), **SIZES, use_tqdm=False) as llm:
        yield llm


def held(**options):
    """Parameters of an answer that is held to something, drawn at random."""
    names = {field for field in StructuredOutputs.__dataclass_fields__ if field in options}
    asked = StructuredOutputs(**{name: options.pop(name) for name in names})
    return SamplingParams(**{"temperature": 1, "seed": 3, "max_tokens": 60, "structured_outputs": asked} | options)


def answer(llm, params, **options):
    [output] = llm.chat([QUESTION], params, **options)
    return output.outputs[0]


# As users say it.


def test_what_is_said_can_be_compared():
    params = SamplingParams(structured_outputs={"json": SCHEMA})
    assert params.structured_outputs == StructuredOutputs(json=json.dumps(SCHEMA))
    assert params.clone().structured_outputs is params.structured_outputs
    assert StructuredOutputs(choice=["a", "b"]).choice == ("a", "b")
    assert SamplingParams(structured_outputs=None) == SamplingParams()
    assert StructuredOutputs(json={}, json_object=None).kind == "json"
    with pytest.warns(UserWarning, match="^disable_fallback has no effect here"):
        assert StructuredOutputs(regex="a", disable_fallback=True) == StructuredOutputs(regex="a")


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({}, ValueError, r"structured_outputs must have exactly one of json, json_object, regex.*, got \[\]"),
        ({"json": {}, "regex": "a"}, ValueError, r"structured_outputs must have exactly .*, got \['json', 'regex'\]"),
        ({"json": "{"}, ValueError, "structured_outputs.json must be JSON: Expecting property name"),
        ({"json": 5}, ValueError, "structured_outputs.json must be a JSON object, got 5"),
        ({"json": "[]"}, ValueError, "structured_outputs.json must be a JSON object"),
        ({"json": {"a": {1}}}, ValueError, "structured_outputs.json must be JSON: Object of type set"),
        ({"json": '{"a":' * 10**5}, ValueError, "structured_outputs.json must be JSON: "),
        ({"json": {"multipleOf": 1000003}}, ValueError, "structured_outputs.json must have multipleOf values"),
        ({"json": {"multipleOf": 1e-300}}, ValueError, "structured_outputs.json must have multipleOf values"),
        ({"grammar": r'start: %json {"multiple\u004ff": 700001}'}, ValueError, "structured_outputs.grammar must have"),
        ({"json": {"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}}, ValueError, ".*json must have"),
        ({"grammar": '"multipleOf": 1e999999999'}, ValueError, ".*grammar must have multipleOf"),
        ({"grammar": '"multipleOf": ' + "1" * 9000}, ValueError, ".*grammar must have multipleOf"),
        ({"json_object": 1}, ValueError, "structured_outputs.json_object must be true or false, got 1"),
        ({"regex": 5}, ValueError, "structured_outputs.regex must be a string, got 5"),
        ({"regex": "a" * 70_000}, ValueError, "structured_outputs.regex must be at most 65536 characters, got 70000"),
        ({"choice": "ab"}, ValueError, "structured_outputs.choice must be a list of texts, got 'ab'"),
        ({"choice": []}, ValueError, "structured_outputs.choice must be a list of texts"),
        ({"choice": ["a", ""]}, ValueError, "structured_outputs.choice must be texts of at least one character"),
        ({"choice": ["a", 5]}, ValueError, "structured_outputs.choice must be a list of texts, got 5"),
        ({"jsn": {}}, TypeError, "StructuredOutputs has no argument jsn; did you mean json"),
        ({"json": {}, "disable_additional_properties": True}, TypeError, ".* write additionalProperties into"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(given, error, message):
    with pytest.raises(error, match=f"^{message}"):
        StructuredOutputs(**given)
    with pytest.raises(ValueError, match=message):
        SamplingParams(structured_outputs=given)


def test_multiples_that_cost_nothing():
    for multiple in (0.01, 1e6, 86400, 1e-9, 7):
        StructuredOutputs(json={"multipleOf": multiple, "description": '"multipleOf": 1000003'})


def test_response_format():
    read = StructuredOutputs.from_response_format
    assert read(None) is read({"type": "text"}) is None
    assert read({"type": "json_object"}) == StructuredOutputs(json_object=True)
    assert read({"type": "structural_tag"} | TAG).kind == "structural_tag"
    named = {"name": "place", "strict": True, "schema": SCHEMA}
    assert read({"type": "json_schema", "json_schema": named}) == StructuredOutputs(json=SCHEMA)
    for wrong in ({"type": "xml"}, {}, "json_object", 5):
        with pytest.raises(ValueError, match=r"^response_format must be an object whose type is text, json_"):
            read(wrong)
    for wrong in ({}, {"json_schema": SCHEMA}, {"json_schema": {"schema": "{}"}}):
        with pytest.raises(ValueError, match=r"^response_format.json_schema.schema must be an object, got"):
            read({"type": "json_schema"} | wrong)


# What the engine makes of it.


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"choice": ["left", "right", "top left"]}, "left|right|top left"),
        ({"regex": "(star|moon){2}[0-9]{3}"}, "(star|moon){2}[0-9]{3}"),
        ({"grammar": 'start: "a" b\nb: "x" | "y"'}, "ax|ay"),
        ({"grammar": 'root ::= "a" b\nb ::= "x" | "y"'}, "ax|ay"),
        ({"json": SCHEMA, "disable_any_whitespace": True}, r'\{"place":"(left|right)","count":[0-9]{1,2}\}'),
        ({"json": SCHEMA, "whitespace_pattern": "[_]?"}, r'\{_?"place"_?:_?"(left|right)"_?,_?"count"_?:_?\d+_?\}'),
    ],
)
@pytest.mark.parametrize("temperature", [0, 1])
def test_answers_are_what_they_are_held_to(llm, asked, expected, temperature):
    told = answer(llm, held(**asked, temperature=temperature))
    assert told.finish_reason == "stop"
    assert re.fullmatch(expected, told.text)


def test_any_json_object(llm):
    told = answer(llm, held(json_object=True, seed=5))
    assert told.text.startswith("{")
    assert told.finish_reason == "length" or isinstance(json.loads(told.text), dict)


def test_structures_between_text(llm):
    """A trigger that the model is made to write."""
    params = held(structural_tag=TAG, logit_bias={ord("<"): 100, ord(" "): -100}, max_tokens=40)
    told = answer(llm, params)
    assert re.match(r"(<f>-?\d+</f>){3}", told.text)


def test_added_tokens(llm):
    """Text that is spelled like one is text. In a structure it is the token, and nowhere else does it come."""
    tokenizer = llm.get_tokenizer()
    start, end = tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|vision_end|>"])
    spelled = "a <|vision_end|>"
    for asked in ({"json": {"const": spelled}}, {"regex": r"a <\|vision_end\|>"}, {"choice": [spelled]}):
        told = answer(llm, held(**asked))
        assert told.text.strip('"') == spelled
        assert not {start, end} & set(told.token_ids)
    tag = {"begin": "<|vision_start|>x", "schema": {"enum": [1, 2]}, "end": "\n<|vision_end|>"}
    asked = {"structures": [tag], "triggers": ["<|vision_start|>"]}
    params = held(structural_tag=asked, logit_bias={start: 100}, max_tokens=40, skip_special_tokens=False, seed=1)
    told = answer(llm, params)
    assert re.match(r"(<.vision_start.>x[12]\n<.vision_end.>){3}", told.text)
    assert told.token_ids.count(start) >= 3
    added = tokenizer.added_tokens_decoder
    for seed in range(4):
        assert not set(answer(llm, held(regex="(.|\n)*", seed=seed)).token_ids[:-1]) & set(added)


def test_ends(llm):
    """An end token comes exactly where the answer may end; where it can only end, it does."""
    ends = llm.service.preparation.sequences._end_tokens
    told = answer(llm, held(regex="ab?", seed=1))
    assert told.text in ("a", "ab")
    assert told.token_ids[-1] in ends
    for options in ({"ignore_eos": True}, {"min_tokens": 9}):
        told = answer(llm, held(regex="abc", **options))
        assert (told.text, len(told.token_ids), told.finish_reason) == ("abc", 3, "stop")
        told = answer(llm, held(regex="a*", max_tokens=9, **options))
        assert (told.text, told.finish_reason) == ("a" * 9, "length")
    told = answer(llm, held(regex="", min_tokens=1))
    assert (told.text, told.token_ids, told.finish_reason) == ("", (), "stop")
    told = answer(llm, held(regex="a{5}", max_tokens=3))
    assert (told.text, told.finish_reason) == ("aaa", "length")
    told = answer(llm, held(regex="abc", stop=["b"]))
    assert (told.text, told.finish_reason, told.stop_reason) == ("a", "stop", "b")


def test_with_other_parameters(llm):
    params = held(
        regex="[ab]{9}", n=3, logprobs=2, presence_penalty=0.5, logit_bias={ord("b"): 100}, allowed_token_ids=[97, 98]
    )
    [output] = llm.chat([QUESTION], params)
    for told in output.outputs:
        assert told.text == "b" * 9
        assert len(told.logprobs) == len(told.token_ids)
    drawn = [one.text for one in llm.chat([QUESTION], held(regex="[a-z]{9}", n=3))[0].outputs]
    assert len(set(drawn)) > 1
    assert all(re.fullmatch("[a-z]{9}", text) for text in drawn)
    for left in ({"bad_words": ["a"]}, {"allowed_token_ids": [98]}):
        for regex in ("aaa", "b" + "a" * 40):  # so many forced tokens would be a step of their own
            with pytest.raises(RequestError, match="sampling_params must leave a token to sample, got none"):
                llm.chat([QUESTION], held(regex=regex, **left))


SCALARS = st.sampled_from([
    {"type": "integer", "minimum": -9, "maximum": 99}, {"type": "boolean"}, {"type": "null"},
    {"type": "string", "maxLength": 4}, {"enum": ["left", "right", 3]}, {"const": "é🙂"},
    {"type": "string", "pattern": "^[a-c]{1,3}$"}, {"type": "number", "minimum": 0, "maximum": 1},
])  # fmt: skip
SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: (
        st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 3))
        | st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=2))
        | st.builds(
            lambda fields, needed: {
                "type": "object",
                "properties": fields,
                "required": [name for name in fields if name in needed],
                "additionalProperties": False,
            },
            st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
            st.sets(st.sampled_from("abc")),
        )
    ),
    max_leaves=5,
)


@pytest.mark.slow
@hypothesis.settings(max_examples=12, deadline=None, derandomize=True)
@hypothesis.given(st.lists(SCHEMAS, min_size=3, max_size=5))
def test_a_batch_of_schemas(llm, schemas):
    """What is finished is valid; others in the batch, and each alone, have the same tokens."""
    params = [held(json=one, disable_any_whitespace=True, seed=i, max_tokens=90) for i, one in enumerate(schemas)]
    params += [SamplingParams(temperature=1, seed=i, max_tokens=30, ignore_eos=True) for i in range(2)]
    questions = [user(f"Question {i}") for i in range(len(params))]
    together = [output.outputs[0] for output in llm.chat(questions, params)]
    for schema, told in zip(schemas, together, strict=False):
        if told.finish_reason != "length":
            jsonschema.validate(json.loads(told.text), schema)
    for question, own, told in list(zip(questions, params, together, strict=True))[-3:]:
        assert llm.chat([question], own)[0].outputs[0].token_ids == told.token_ids


def test_windows(llm):
    """Of an answer that is held to something a window has one token; others in the batch keep theirs."""
    free = SamplingParams(temperature=1, seed=1, max_tokens=33, ignore_eos=True)
    params = [held(regex="[a-z]{12}"), free]
    llm.service.engine.trace = trace = []
    try:
        llm.chat([QUESTION] * 2, params)
        windows = {(rows, tokens) for rows, _, tokens in trace}
        window = BUCKETS.window
        assert windows == {(1, window), (1, 1)}
        assert [tokens for _, _, tokens in trace].count(window) == 32 // window
        del trace[:]
        passes = llm.stats().steps
        llm.chat([QUESTION], held(regex="[a-z]{12}"))
        assert [tokens for _, _, tokens in trace] == [1] * 12
        free = llm.stats().steps - passes
        # Few tokens that are forced are windows that follow at once.
        del trace[:]
        passes = llm.stats().steps
        assert answer(llm, held(regex="abcd")).text == "abcd"
        assert [tokens for _, _, tokens in trace] == [1] * 4
        assert llm.stats().steps - passes < free / 2
    finally:
        llm.service.engine.trace = None


# Names of 30 tokens, between numbers that are drawn.
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
NAMED = {"type": "object", "properties": {name * 30: DIGIT for name in "abc"}}
NAMED |= {"required": list(NAMED["properties"]), "additionalProperties": False}


def forced(**options):
    return held(**{"json": NAMED, "disable_any_whitespace": True, "max_tokens": 400} | options)


def test_many_forced_tokens_take_one_pass(llm, monkeypatch):
    """And are computed in it as in windows: what is drawn behind them is the same, and so is whatever ends within."""
    several = [
        {}, {"seed": 8}, {"n": 2}, {"presence_penalty": 1, "repetition_penalty": 1.5, "seed": 5}, {"max_tokens": 20},
        {"stop": ["bbb"]}, {"temperature": 0, "ignore_eos": True}, {"min_tokens": 150}, {"stop_token_ids": [ord("c")]},
        {"logit_bias": {ord("7"): 50}},
    ]  # fmt: skip
    params = [forced(**more) for more in several]
    questions = [user(f"Question {i}") for i in range(len(params))]

    def run(questions, params):
        before = llm.stats()
        found = [one for output in llm.chat(questions, params) for one in output.outputs]
        after = llm.stats()
        told = [(one.token_ids, one.text, one.finish_reason, one.stop_reason) for one in found]
        return told, after.windows - before.windows, after.prefill_steps - before.prefill_steps, found

    told, windows, _, [first, *_] = run(questions, params)
    alone, alone_windows, alone_steps, _ = run(questions[:1], params[:1])
    asked, asked_windows, asked_steps, [with_logprobs] = run(questions[:1], [forced(logprobs=0)])
    assert told[:1] == alone == asked
    assert len(with_logprobs.logprobs) == len(with_logprobs.token_ids)
    monkeypatch.setattr(scheduler, "_LEAST_RUN", 1000)
    one_by_one, many_windows, _, _ = run(questions, params)
    assert told == one_by_one
    length = len(first.token_ids)
    assert length > 3 * 30
    assert (alone_steps, alone_windows) == (4, 2)  # a prompt and three names; a brace and the end
    assert (asked_steps, asked_windows) == (1, length - 1)
    assert windows < many_windows / 5


def test_what_was_forced_is_found_in_pages(llm):
    """The next turn begins with its K, V."""
    told = answer(llm, forced())
    chat = [*QUESTION, {"role": "assistant", "content": told.text}, *user("And now?")]
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=0, ignore_eos=True)
    [warm] = llm.chat([chat], params)
    assert warm.num_cached_tokens > len(told.token_ids)
    llm.reset_prefix_cache()
    [cold] = llm.chat([chat], params)
    assert cold.num_cached_tokens == 0
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    logprobs = [[one.chosen for one in output.outputs[0].logprobs] for output in (warm, cold)]
    np.testing.assert_allclose(*logprobs, atol=1e-5)


def test_forced_tokens(llm):
    """They come side by side with the tokens of others, which came first and put them back, and are the same."""
    free = SamplingParams(temperature=1, seed=1, max_tokens=250, ignore_eos=True)
    params = [free] * 3 + [forced(seed=i) for i in range(5)]
    questions = [user("A long question. " * 6 + str(i)) for i in range(8)]
    alone = [llm.chat([question], own)[0].outputs[0] for question, own in zip(questions, params, strict=True)]
    for told in alone[3:]:
        jsonschema.validate(json.loads(told.text), NAMED)
    pages = llm.service.cache.pages.count
    try:
        give_pages(llm, 5)
        before = llm.stats().preemptions
        together = llm.chat(questions, params)
        assert llm.stats().preemptions > before
    finally:
        give_pages(llm, pages)
    assert [output.outputs[0].token_ids for output in together] == [one.token_ids for one in alone]


def test_masks_have_a_thread_of_their_own(llm, monkeypatch):
    """Neither the engine's thread nor the caller's compiles or fills anything."""
    calls = collections.Counter()

    def count(place, name):
        real = getattr(place, name)

        def counted(*args, **named):
            calls[name, threading.current_thread().name.rsplit("_", 1)[0]] += 1
            return real(*args, **named)

        monkeypatch.setattr(place, name, counted)

    count(llguidance.numpy, "fill_next_token_bitmask")
    count(Matcher, "_advance")
    told = answer(llm, held(regex="[a-z]{4}[0-9]{4}"))
    tokens = len(told.token_ids)  # the end token ends it, and nobody asks what follows; none is forced
    assert calls == {
        ("fill_next_token_bitmask", "vlcache-grammars"): 2,  # the first, and one behind it
        ("fill_next_token_bitmask", "vlcache-masks"): tokens,
        ("_advance", "vlcache-masks"): tokens,
    }


def test_who_does_not_ask_has_no_program_for_it(checkpoints):
    with LLM(checkpoints("qwen3_vl"), **SIZES, use_tqdm=False) as llm:
        programs = llm.service.device.runner.programs
        assert not any(isinstance(one, HoldDecodeSlots) for one in programs.family_of(llm.service.policy))
        for _ in range(2):
            llm.chat([QUESTION], SamplingParams(max_tokens=9, ignore_eos=True))
        before = set(programs._compiled)
        assert not any(isinstance(one, HoldDecodeSlots) for one in before)
        assert answer(llm, held(regex="abc")).text == "abc"
        assert set(programs._compiled) - before == {HoldDecodeSlots(8)}


BOMBS = {
    "unclosed": {"regex": "(a"},
    "looks ahead": {"regex": "a(?=b)"},
    "repeats": {"regex": "a{1000000}"},
    "nested groups": {"regex": "(" * 20_000 + "a" + ")" * 20_000},
    "kind of value": {"json": {"type": "foo"}},
    "endless reference": {"json": {"$ref": "#"}},
    "states": {"json": {"type": "string", "allOf": [{"pattern": f"{c}.{{20}}{c}"} for c in "abcdefghij"]}},
    "product": {"json": {"allOf": [{"anyOf": [{"minimum": i}, {"maximum": -i}]} for i in range(20)]}},
    "unknown rule": {"grammar": "start: b"},
    "endless rule": {"grammar": "start: start"},
    "no character": {"regex": r"[^\s\S]"},
    "nothing": {"grammar": ""},
    "tag without trigger": {"structural_tag": TAG | {"triggers": ["<g"]}},
    "tag without anything": {"structural_tag": {}},
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_what_cannot_be_used_reaches_no_device(llm, name):
    asked = StructuredOutputs(**BOMBS[name])
    before = llm.stats().launches
    with pytest.raises(
        ValueError, match=rf"^sampling_params {re.escape(asked.name)} must compile to a grammar: .*, got '"
    ):
        answer(llm, SamplingParams(structured_outputs=asked))
    assert llm.stats().launches == before
    params = [SamplingParams(structured_outputs=asked), held(choice=["left", "right"])]
    wrong, good = llm.chat([QUESTION] * 2, params, on_error="return")
    assert wrong.error.startswith(f"sampling_params[0] {asked.name} must compile to a grammar")
    assert good.outputs[0].text in ("left", "right")


def test_a_schema_that_is_nested_too_deep_is_refused():
    with pytest.raises(
        ValueError, match=r"^structured_outputs.json must be JSON: lists and objects must be at most 200"
    ):
        StructuredOutputs(json='{"properties":{"a":' * 300 + "{}" + "}}" * 300)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("unclosed", r"unclosed group, got '\(a'"),
        ("nested groups", r"exceed the maximum [^,]+, got '\(\(\("),
        ("endless reference", "no text matches it, for example because of an endless recursion, got '{"),
        ("endless rule", "no text matches it, for example because of an endless recursion, got 'start"),
        ("no character", r"it matches no text, got '\[\^"),
        ("repeats", "lexer error: too many expressions constructed, got 'a"),
        (
            "tag without anything",
            "structures must be a list of objects with begin, schema and end, and triggers a list",
        ),
    ],
)
def test_why_something_cannot_be_used(llm, name, message):
    """Without the grammar that is made of it."""
    with pytest.raises(ValueError, match=f"must compile to a grammar: {message}"):
        answer(llm, SamplingParams(structured_outputs=BOMBS[name]))


@pytest.mark.parametrize(
    "given",
    [
        {"regex": "(a{1000}){1000}"},
        {"regex": "(((a{20,100}){100}){100}){2,}"},
        {"regex": r"(b|\(a{400}){300}"},
        {"regex": "([(]a{400}){300}"},
        {"grammar": "start: /(a{1000}){1000}/"},
    ],
)
def test_repeats_of_repeats_are_counted(given):
    """Before any compiler sees them."""
    with pytest.raises(ValueError, match=r"must have at most 100000 nested repetitions, got \d+$"):
        StructuredOutputs(**given)


@pytest.mark.parametrize(
    "regex",
    ["(a{300}){300}", r"(\w{1,50}\s){1,5000}", "a{1000}b{1000}", r"(a\){1000}(b{1000})", "[)]{1000}(a{99}|[{]){99}"],
)
def test_repeats_beside_each_other_are_not_multiplied(regex):
    assert StructuredOutputs(regex=regex).text == regex


@pytest.mark.parametrize("regex", ["a{5000}", "(a|aa)*b", "foo**", "(x+x+)+y"])
def test_what_is_large_and_cheap_runs(llm, regex):
    told = answer(llm, held(regex=regex, max_tokens=8))
    assert told.finish_reason in ("length", "stop")


def test_who_leaves_the_grammar_fails_alone(llm, monkeypatch):
    advance, calls = Matcher._advance, []

    def failing(self, tokens):
        calls.append(tokens)
        if self._params.seed == 77 and self._count >= 2:
            raise RuntimeError("the lexer has too many states")
        return advance(self, tokens)

    monkeypatch.setattr(Matcher, "_advance", failing)
    params = [held(regex="[a-z]{9}", seed=77), held(regex="[a-z]{9}", seed=5), SamplingParams(max_tokens=9)]
    failed, *others = llm.chat([QUESTION] * 3, params, on_error="return")
    assert failed.error == (
        "conversations[0]: structured_outputs must constrain the full output, but the matcher failed: "
        "the lexer has too many states"
    )
    assert all(output.error is None for output in others)
    assert_nothing_left(llm)


def test_who_is_put_back_goes_on_where_it_was(llm):
    params = [held(regex="[a-z]{99}([0-9]{40}|x)", seed=i, max_tokens=200) for i in range(3)]
    questions = [user("A long question. " * 6 + str(i)) for i in range(3)]
    alone = [llm.chat([question], own)[0].outputs[0] for question, own in zip(questions, params, strict=True)]
    pages = llm.service.cache.pages.count
    try:
        give_pages(llm, 5)
        before = llm.stats().preemptions
        together = [output.outputs[0] for output in llm.chat(questions, params)]
        assert llm.stats().preemptions > before
    finally:
        give_pages(llm, pages)
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert all(re.fullmatch(params[0].structured_outputs.regex, one.text) for one in together)
    assert PAGE == 128  # what the numbers above are made for


def test_verified_answers(llm):
    [output] = llm.chat([QUESTION], held(regex="[a-z]{9}", temperature=0), verify=True)
    assert output.verification.tokens_agree == output.verification.tokens == len(output.outputs[0].token_ids)
    [output] = llm.chat([QUESTION], held(regex="", ignore_eos=True), verify=True)
    assert (output.error, output.outputs[0].text, output.verification) == (None, "", None)


def test_an_engine_that_fails_and_one_that_closes(checkpoints, monkeypatch):
    before = set(threading.enumerate())
    llm = LLM(checkpoints("qwen3_vl"), **SIZES, use_tqdm=False)
    hold, calls = Runner.hold, itertools.count()

    def failing(self, given):
        if next(calls) == 4:
            raise RuntimeError("the device is gone")
        hold(self, given)

    monkeypatch.setattr(Runner, "hold", failing)
    with pytest.raises(RuntimeError, match="the device is gone"):
        llm.chat([QUESTION] * 2, held(regex="[a-z]{20}"))
    assert re.fullmatch("[a-z]{20}", answer(llm, held(regex="[a-z]{20}")).text)
    assert_nothing_left(llm)
    begun = threading.Event()
    monkeypatch.setattr(Runner, "hold", lambda *args: (begun.set(), hold(*args))[1])
    with concurrent.futures.ThreadPoolExecutor() as threads:
        asked = threads.submit(answer, llm, held(regex="[a-z]{900}", max_tokens=900))
        assert begun.wait(WITHIN)
        llm.close()
        with pytest.raises(RuntimeError, match="this LLM is closed"):
            asked.result(WITHIN)
    assert not {one.name for one in set(threading.enumerate()) - before if "masks" in one.name or "gramm" in one.name}


def test_what_the_tokenizer_does_not_have_never_comes(llm):
    """The model's vocabulary is larger."""
    size, known = llm.service.checkpoint.config.text.vocab_size, len(llm.get_tokenizer())
    assert known < size
    matcher = llm.service.preparation.sequences.grammars.matcher(held(regex="(.|\n)*"))
    assert matcher.wait(WITHIN)
    flags = np.unpackbits(matcher.mask(0).view(np.uint8), bitorder="little")
    assert len(flags) >= size
    assert flags[:known].any()
    assert not flags[known:].any()


def test_a_checkpoint_without_end_tokens(llm, monkeypatch):
    monkeypatch.setattr(llm.service.preparation.sequences.grammars, "_ends", frozenset())
    with pytest.raises(
        ValueError, match=r"structured_outputs\.regex must compile to a grammar: the checkpoint has no end"
    ):
        answer(llm, held(regex="never[0-9]asked"))


def test_streams_and_aborts(llm):
    async def run():
        engine = AsyncLLM(llm.service)
        # What is forced comes at once, but token by token where its log-probabilities are asked for.
        for logprobs, pieces in ((None, 2), (0, 5)):
            params = held(json=SCHEMA, disable_any_whitespace=True, logprobs=logprobs)
            texts = [out.outputs[0].text async for out in engine.generate(QUESTION, params)]
            jsonschema.validate(json.loads(texts[-1]), SCHEMA)
            assert len(texts) > pieces
        reasons = []
        async for out in engine.generate(QUESTION, held(regex="[a-z]{500}", max_tokens=500), "endless"):
            await engine.abort("endless")
            reasons.append(out.outputs[0].finish_reason)
        assert reasons[-1] == "abort"
        with pytest.raises(ValueError, match=r"structured_outputs\.regex must compile to a grammar"):
            [_ async for _ in engine.generate(QUESTION, held(regex="(a"))]

    asyncio.run(run())
    assert_nothing_left(llm)
