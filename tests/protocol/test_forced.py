"""Calls that are forced: what the grammar takes, and what it refuses."""

from __future__ import annotations

import json
import re

import llguidance
import pytest

from vlcache_jax.inputs.prompt import PromptRenderer
from vlcache_jax.protocol.deltas import ParsedAnswer
from vlcache_jax.protocol.parsing import AnswerParser
from vlcache_jax.protocol.tools import forced_call

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "näh/now"}},
    {"type": "function", "name": "any", "parameters": {"type": "object"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}


def call(name, arguments="{}"):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


COLOGNE = call("weather", '{"city": "Köln <tool_call>", "days": 2}')
NOW = call("näh/now")


@pytest.fixture(scope="module")
def takes(checkpoints):
    tokenizer = PromptRenderer.from_pretrained(checkpoints("qwen3_vl-tied")).tokenizer
    built = llguidance.LLTokenizer(tokenizer.backend_tokenizer.to_str(), n_vocab=len(tokenizer))

    def matches(text, **asked):
        grammar = forced_call(TOOLS, **{"tool_choice": "required", **asked})
        matcher = llguidance.LLMatcher(built, llguidance.LLMatcher.grammar_from_lark(grammar))
        assert not matcher.is_error(), matcher.get_error()
        tokens = tokenizer(text)["input_ids"]
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    return matches


def test_right_calls_are_taken_and_read(takes):
    for text in (COLOGNE, NOW, call("any", '{"a": [1, {"b": null}]}'), f"{NOW}\n{COLOGNE}\n{NOW}"):
        assert takes(text)
        parser = AnswerParser("a", has_tools=True)
        found = ParsedAnswer.of(parser.push(text) + parser.finish())
        assert (found.content, len(found.calls)) == ("", text.count("\n<tool_call>") + 1)
        assert all(isinstance(json.loads(one["function"]["arguments"]), dict) for one in found.calls)
    assert takes(COLOGNE, tool_choice=NAMED)
    assert takes(COLOGNE, tool_choice={"type": "function", "name": "weather"})
    assert takes(f"{NOW}\n{NOW}")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Sunny.",
        f"I look. {NOW}",
        f"{NOW} done",
        NOW.removesuffix("</tool_call>"),
        call("other"),
        call("weather"),
        call("weather", '{"city": 5}'),
        call("weather", '{"city": "a", "days": 0}'),
        call("weather", '{"city": "a", "hours": 1}'),
        call("weather", '{"city":"a"}'),
        call("näh/now", '{"a": 1}'),
        call("any", "[]"),
        f"So.</think>\n\n{NOW}",
    ],
)
def test_other_answers_are_refused(takes, text):
    assert not takes(text)


def test_how_many_calls_and_which(takes):
    assert not takes(f"{NOW}\n{NOW}", parallel=False)
    assert not takes(f"{COLOGNE}\n{COLOGNE}", tool_choice=NAMED)
    assert not takes(NOW, tool_choice=NAMED)


def test_nothing_is_forced():
    for choice in (None, "auto", "none"):
        assert forced_call(TOOLS, choice) is None
        assert forced_call(None, choice) is None


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ([], "required", "tool_choice requires tools, got 'required' without any"),
        (TOOLS, {"type": "function", "name": "x"}, "tool_choice must name one of weather, näh/now, any, got 'x'"),
        (TOOLS, "any", 'tool_choice must be "auto", "none", "required" or a function\'s name, got \'any\''),
        (TOOLS, {"type": "function"}, 'tool_choice must be "auto", "none", "required" or a function\'s name, got {'),
        (TOOLS, 5, 'tool_choice must be "auto", "none", "required" or a function\'s name, got 5'),
        ([5], "required", 'tools[0] must be an object of the type "function", got 5'),
    ],
)
def test_wrong_choices_are_named(tools, choice, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        forced_call(tools, choice)
