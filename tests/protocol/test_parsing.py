"""Answers told apart: thinking, text and tool calls; however the text is cut, the same comes of it."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlcache_jax.inputs.prompt import is_opened, thinks
from vlcache_jax.protocol.deltas import CallDelta, Delta, ParsedAnswer, joined_pieces, unfinished
from vlcache_jax.protocol.parsing import AnswerParser, ReasoningParser
from vlcache_jax.protocol.tools import ToolParser

WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": [1, {"a": 2}]}}\n</tool_call>'
NONE = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
BRACES = '<tool_call>{"arguments": {"command": "mkdir -p a/{b,c}; echo \\"</tool_call>\\""}, "name": "run"}</tool_call>'
THINKING = "{% if '</think>' in message.content %}...{% endif %}"
PARSERS = {
    "tools": lambda: ToolParser("a"),
    "thinking": ReasoningParser,
    "opened": lambda: ReasoningParser(is_opened=True),
    "both": lambda: AnswerParser("a", chat_template=THINKING, prompt="<think>\n", has_tools=True),
    "neither": lambda: AnswerParser("a"),
}


def whole(parser, *pieces, **end):
    deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.finish(**end)
    assert all((delta.content != "") + (delta.reasoning != "") + (delta.call is not None) == 1 for delta in deltas)
    return ParsedAnswer.of(deltas)


def called(text, **end):
    """The content, and the names and arguments of calls."""
    found = whole(ToolParser("a"), text, **end)
    assert found.reasoning == ""
    return found.content, [(call["function"]["name"], call["function"]["arguments"]) for call in found.calls]


# --- any cut ----------------------------------------------------------------------------------------------------------

# What answers are made of, right and wrong, so that any order of them is an answer.
PIECES = st.sampled_from(
    [WEATHER, NONE, BRACES, "<tool_call>", "</tool_call>", "<think>", "</think>", "\n", "\n\n", " ", "a", "ö<", "<tool",
     '{"name": "f", "arguments": ', '{"name": "f"', '{"a": 1', ', "b": "x\\"{"', "}", "}}", ",", "null", '"', "\\", "[",
     '"arguments": {', "<", "</thi", "nk>", "_call>"]
)  # fmt: skip


@pytest.mark.parametrize("name", PARSERS)
@given(text=st.lists(PIECES, max_size=12).map("".join), data=st.data())
@settings(deadline=None)
def test_streamed_is_whole_for_any_cut(name, text, data):
    expected = whole(PARSERS[name](), text)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert whole(PARSERS[name](), *pieces) == expected
    assert whole(PARSERS[name](), *text) == expected
    if name in ("tools", "both"):
        assert whole(PARSERS[name](), *pieces, is_cut=True) == whole(PARSERS[name](), text, is_cut=True)
    if name == "tools":  # nothing is lost, and what is a call can be read
        calls = [call["function"] for call in expected.calls]
        assert len({call["id"] for call in expected.calls}) == len(calls)
        said = expected.content + "".join(call["arguments"] for call in calls)
        assert Counter(said) <= Counter(text + "{}" * len(calls))
        if not calls:
            assert expected.content == text


@pytest.mark.parametrize(
    ("text", "length"),
    [("", 0), ("a", 0), ("<", 1), ("a<ab", 3), ("<a<a", 2), ("a<ab>", 0), ("<ab>", 0), ("<ab> ", 0), ("<ab><a", 2)],
)
def test_a_whole_tag_is_no_beginning_of_one(text, length):
    assert unfinished(text, "<ab>") == length


def test_pieces_of_one_event_are_joined_by_call():
    """In the order of the calls; a head keeps its id and name."""
    heads = [CallDelta(0, "", "a", "f"), CallDelta(1, "", "b", "g")]
    pieces = [CallDelta(0, "{"), heads[1], CallDelta(1, "{}"), CallDelta(0, '"x": 1'), CallDelta(0, "}")]
    assert joined_pieces([heads[0], *pieces]) == [CallDelta(0, '{"x": 1}', "a", "f"), CallDelta(1, "{}", "b", "g")]
    assert joined_pieces(pieces[3:]) == [CallDelta(0, '"x": 1}')]
    assert joined_pieces([]) == []


@given(st.lists(st.sampled_from([WEATHER, NONE, BRACES, "Some <b>text</b>", "{}"]), max_size=6))
@settings(deadline=None)
def test_no_tag_leaks_from_right_answers(parts):
    content, calls = called("\n".join(parts))
    assert not any(tag in content for tag in ("<tool_call>", "</tool_call>"))
    assert len(calls) == sum(part in (WEATHER, NONE, BRACES) for part in parts)
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)
    assert content.split() == " ".join(part for part in parts if part not in (WEATHER, NONE, BRACES)).split()


@pytest.mark.parametrize("name", PARSERS)
def test_the_cost_grows_with_what_is_new(name, monkeypatch):
    """Of text nothing is held back but what may be a tag; of calls each member is read once, when it is whole."""
    parser = PARSERS[name]()
    parser.push("So.</think>\n")
    held = 0
    for char in "word <b>" * 50:
        held += 1 - sum(len(delta.content + delta.reasoning) for delta in parser.push(char))
        assert held <= len("<tool_call>")
    if name in ("tools", "both"):
        read = []
        loads = json.loads
        monkeypatch.setattr("json.loads", lambda text, **how: read.append(text) or loads(text, **how))
        call = '<tool_call>{"name": "f", "arguments": {"text": "' + "{}, " * 500 + '", "n": [1, {"a": 2}]}}</tool_call>'
        told = [delta.call for char in call for delta in parser.push(char)]
        assert "".join(one.arguments for one in told if one) == call.removeprefix(
            '<tool_call>{"name": "f", "arguments": '
        ).removesuffix("}</tool_call>")
        assert sum(map(len, read)) <= len(call)


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"a": "',
        "<tool_call>",
        '<tool_call>{"a": ["<tool_call>", ',
        '", "<tool_call>{',
        NONE,
        "<tool_call>{{",
    ],
)
def test_nothing_is_read_again_and_again(text, monkeypatch):
    taken = []
    take = ToolParser._take
    monkeypatch.setattr(ToolParser, "_take", lambda self, text, told: taken.append(len(text)) or take(self, text, told))
    for count in (1, 200):
        taken.clear()
        given = '<tool_call>{"a": ["' * (count > 1) + text * count
        whole(ToolParser("a"), given)
        assert sum(taken) <= 4 * len(given)


# --- tool calls -------------------------------------------------------------------------------------------------------


def test_calls_and_what_stands_round_them():
    city = '{"city": "Köln", "days": [1, {"a": 2}]}'
    assert called(WEATHER) == ("", [("weather", city)])
    assert called(f"I look.\n\n{WEATHER}\n{NONE}\n") == ("I look.", [("weather", city), ("now", "{}")])
    assert called(f"Before. {NONE}\nAfter. ") == ("Before.\nAfter.", [("now", "{}")])
    assert called(BRACES) == ("", [("run", '{"command": "mkdir -p a/{b,c}; echo \\"</tool_call>\\""}')])
    assert called('<tool_call>{"name": "f"}</tool_call>') == ("", [("f", "{}")])
    assert called('<tool_call>{"id": [1, {"name": 2}], "name": "f", "arguments": { } }</tool_call>') == (
        "", [("f", "{ }")]
    )  # fmt: skip
    assert called("No calls.\n ") == ("No calls.\n ", [])


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "I write <tool_call> tags </tool_call> here.",
        "<tool_call>\nf(x)\n</tool_call>",
        '<tool_call>[{"name": "f", "arguments": {}}]</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {a: 1}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": "line\nline"}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}} and more</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": "}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {,}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {},}</tool_call>',
        '<tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 100_000 + "}}</tool_call>",
        '<tool_call>\n{"name": "f", "arguments": {"a',
        "  <tool",
    ],
)
def test_what_is_no_call_stays_content(text):
    assert called(text) == (text, [])
    content, calls = called(f"{text}\n{WEATHER}")  # and the next one is read, where no string is open
    if text.endswith("</tool_call>"):
        assert (content, len(calls)) == (text, 1)


def test_one_call_at_most_is_told():
    calls = [f'<tool_call>\n{{"name": "f", "arguments": {{"n": {n}}}}}\n</tool_call>' for n in range(3)]
    text = f"So. {calls[0]}\n{calls[1]} and\n{calls[2].removesuffix('</tool_call>')}"
    for pieces in ([text], list(text)):
        parser = AnswerParser("a", has_tools=True, is_single=True)
        found = ParsedAnswer.of([*(delta for piece in pieces for delta in parser.push(piece)), *parser.finish()])
        assert (found.content, len(found.calls)) == ("So. and", 1)
        assert found.calls[0]["function"]["arguments"] == '{"n": 0}'
        assert parser.finish_reason("stop") == "tool_calls"


def test_an_answer_that_is_cut_off():
    """A call that is whole needs no closing tag; one that is not is never JSON."""
    assert called('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool') == ("", [("f", '{"a": 1}')])
    begun = '<tool_call>\n{"name": "f", "arguments": {"a": 1'
    assert called(begun) == (begun, [])
    assert called(f'{begun}, "b": [2, ') == (', "b": [2,', [("f", '{"a": 1')])
    assert called(f"{begun},}}}}\n</tool_call>") == (",}}\n</tool_call>", [("f", '{"a": 1')])


def test_a_call_that_a_limit_cuts_off():
    """What came of its arguments is told as such, as clients know it of OpenAI's answers with the reason "length"."""
    text = 'Well.\n<tool_call>\n{"name": "f", "arguments": {"a": "b c", "d": [2, 3]}}\n</tool_call>'
    begin, end = text.index('{"a"'), text.index("}}") + 1
    for cut in range(len(text) + 1):
        content, calls = called(text[:cut], is_cut=True)
        if cut <= begin:  # that it is a call is not sure
            assert (content, calls) == (text[:cut], [])
        else:
            assert (content, calls) == ("Well.", [("f", text[begin : min(cut, end)])])


def test_arguments_are_told_one_by_one():
    parser = ToolParser("chatcmpl-1")
    told = []
    for piece in (
        "Well. <tool_",
        'call>\n{"name": "f',
        '", "arguments": {"a"',
        ': 1, "',
        'b": {"c": 2}',
        "}",
        "}\n</tool_",
    ):
        told.append(parser.push(piece))
    told += [parser.push("call>"), parser.finish()]
    first, *more = told[3]
    assert [[delta.content for delta in deltas] for deltas in told[:3]] == [["Well."], [], []]
    assert first.call.as_openai() == {
        "index": 0, "id": first.call.id, "type": "function", "function": {"name": "f", "arguments": ""}
    }  # fmt: skip
    pieces = [*more, *(delta for deltas in told[4:] for delta in deltas)]
    assert [delta.call.as_openai() for delta in pieces] == [
        {"index": 0, "function": {"arguments": text}} for text in ('{"a": 1', ', "b": {"c": 2}', "}")
    ]
    assert told[-1] == []
    ids = [call["id"] for call in whole(ToolParser("chatcmpl-1"), WEATHER, NONE).calls]
    assert ids[0] == first.call.id  # of the answer's id and the call's number, and of nothing else
    assert ids[1] not in (ids[0], whole(ToolParser("chatcmpl-2"), WEATHER, NONE).calls[1]["id"])


# --- thinking ---------------------------------------------------------------------------------------------------------


def test_thinking():
    def told(text, *, is_opened):
        found = whole(ReasoningParser(is_opened=is_opened), text)
        return found.reasoning, found.content

    assert told("reasoning</think>answer", is_opened=True) == ("reasoning", "answer")
    assert told("\nSo.\n\nWell.\n</think>\n\nThe answer.\n", is_opened=True) == ("So.\n\nWell.", "The answer.\n")
    assert told("<think>\nSo.\n</think>\n\nThe answer.", is_opened=True) == ("So.", "The answer.")
    assert told("<think>\nSo.\n</think>\n\nThe answer.", is_opened=False) == ("So.", "The answer.")
    assert told("<think>\n\n</think>\n\nThe answer.", is_opened=False) == ("", "The answer.")
    assert told("The answer has <think> and </think>.", is_opened=False) == (
        "", "The answer has <think> and </think>."
    )  # fmt: skip
    for opened in (True, False):  # cut off: all of it is thought
        assert told("<think>So. </thin", is_opened=opened) == ("So. </thin", "")
    assert told("So.\n", is_opened=True) == ("So.", "")
    assert told(" <th", is_opened=False) == ("", " <th")
    assert told(" <th", is_opened=True) == (" <th", "")
    assert told("a</think>b</think>c", is_opened=True) == ("a", "b</think>c")


def test_the_template_and_the_prompt_tell_who_thinks():
    assert thinks(THINKING)
    assert not thinks("{% for message in messages %}{{ message.content }}{% endfor %}")
    assert is_opened("<|im_start|>assistant\n<think>\n")
    assert not is_opened("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not is_opened("<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n")
    assert is_opened("<|im_start|>assistant\n<think>\nSo far")
    assert not is_opened("")


def test_thinking_comes_before_calls():
    found = whole(PARSERS["both"](), f"I may <tool_call>.\n</think>\n\nNow:\n{WEATHER}")
    assert (found.reasoning, found.content, len(found.calls)) == ("I may <tool_call>.", "Now:", 1)
    parser = PARSERS["both"]()
    assert (parser.push("So.</think>"), parser.finish_reason("stop")) == ([Delta(reasoning="So.")], "stop")
    parser.push(NONE)
    assert [parser.finish_reason(reason) for reason in ("stop", "length", None)] == ["tool_calls", "length", None]
    plain = AnswerParser("a")
    assert whole(plain, f"</think>{NONE}") == ParsedAnswer(f"</think>{NONE}")
    assert plain.finish_reason("stop") == "stop"
