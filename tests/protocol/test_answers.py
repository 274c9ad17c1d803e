"""Answers as clients see them: streamed and whole they tell the same, and of thinking what was asked for."""

from __future__ import annotations

import codecs
import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlcache_jax.engine.completions import spelled
from vlcache_jax.inputs.prompt import PromptRenderer, Template
from vlcache_jax.outputs import (
    CacheReport,
    CompletionOutput,
    Logprob,
    OutputCollector,
    PromptOutput,
    RequestDelta,
    RequestMetrics,
)
from vlcache_jax.protocol.answers import ChatAnswer, ChatFormat, CompletionAnswer, logprob
from vlcache_jax.protocol.requests import Options, OutputParts
from vlcache_jax.protocol.response_answers import ResponseAnswer
from vlcache_jax.protocol.responses import ResponseRequest

THINKING = "{% if '</think>' in message.content %}...{% endif %}"
TAGS = ("<think>", "</think>")


@pytest.fixture(scope="module")
def renderer(checkpoints):
    return PromptRenderer.from_pretrained(checkpoints("qwen3_vl-tied"))


@pytest.fixture(scope="module")
def tokenizer(renderer):
    """That of a model whose tokens are bytes."""
    return renderer.tokenizer


def deltas(texts, prompt):
    """An answer as it comes, byte by byte a token."""
    told = PromptOutput(prompt, np.zeros(3, np.int32), 0, CacheReport((), True, "exact", (), 0))
    for i, text in enumerate(texts):
        is_last = i == len(texts) - 1
        tokens = tuple(text.encode())
        logprobs = tuple(Logprob(-1.0, {}, token, 1, {token: chr(token)}, {token: bytes([token])}) for token in tokens)
        one = CompletionOutput(0, text, tokens, "stop" if is_last else None, None, logprobs)
        yield RequestDelta("a", (one,), RequestMetrics(), told if i == 0 or is_last else None, is_last)


def answer(tokenizer, **parts):
    options = Options(stream=True, returns_token_ids=True)
    given = {"parts": OutputParts(thoughts=True, **parts), "chat_template": THINKING, "tokenizer": tokenizer}
    return ChatAnswer("a", "m", options, **given)


def whole(writer, texts, prompt=""):
    """Content, reasoning, text of log-probabilities, text of token ids, number of thinking tokens."""
    collector = OutputCollector()
    for delta in deltas(texts, prompt):
        collector.add(delta)
    told = writer.whole([collector.output()])
    [choice] = told["choices"]
    logprobs = "".join(one["token"] for one in choice["logprobs"]["content"])
    assert bytes(itertools.chain(*(one["bytes"] for one in choice["logprobs"]["content"]))).decode() == logprobs
    ids = bytes(choice["token_ids"]).decode()
    thought = told["usage"]["completion_tokens_details"]["reasoning_tokens"]
    return choice["message"]["content"], choice["message"].get("reasoning", ""), logprobs, ids, thought


def streamed(writer, texts, prompt=""):
    """The same of the pieces."""
    content, reasoning, logprobs, ids = "", "", "", b""
    for delta in deltas(texts, prompt):
        for piece in writer.pieces(delta):
            [choice] = piece["choices"]
            content += choice["delta"].get("content", "")
            reasoning += choice["delta"].get("reasoning", "")
            logprobs += "".join(one["token"] for one in (choice["logprobs"] or {"content": ()})["content"])
            ids += bytes(choice.get("token_ids", ()))
    return content, reasoning, logprobs, ids.decode(), writer.counts().reasoning


def test_tokens_of_thinking_are_counted(tokenizer):
    def told(text, prompt="", **parts):
        return whole(answer(tokenizer, **parts), [text], prompt)

    for text, prompt, thought, said in (
        ("<think>So.</think>Well.", "", ">So.</think>", "Well."),
        ("So.</think>\n\nWell.", "<think>\n", "So.</think>", "Well."),
        ("So, and so on", "<think>\n", "So, and so on", ""),
        ("Well.", "", "", "Well."),
    ):
        assert told(text, prompt)[2:] == (text, text, len(thought))
        rest = text.replace(thought, "")
        assert told(text, prompt, returns_thoughts=False) == (said, "", rest, rest, len(thought))


@given(
    pieces=st.lists(st.sampled_from([*TAGS, "\n", "a", "<", "think>", "So. "]), min_size=1, max_size=8),
    prompt=st.sampled_from(["", "<think>\n"]),
    tells=st.booleans(),
)
@settings(deadline=None)
def test_streamed_is_whole(tokenizer, pieces, prompt, tells):
    expected = whole(answer(tokenizer, returns_thoughts=tells), ["".join(pieces)], prompt)
    for texts in (pieces, list("".join(pieces))):
        assert streamed(answer(tokenizer, returns_thoughts=tells), texts, prompt) == expected
    assert expected[2] == expected[3]
    assert len("".join(pieces)) == len(expected[2]) + (0 if tells else expected[4])


# So long that one event may have several pieces of it.
ARGUMENTS = '{"a": "' + "x" * 300 + '", "b": "' + "y" * 300 + '", "c": [1, {"d": 2}]}'
CALL = f'<tool_call>{{"name": "f", "arguments": {ARGUMENTS}}}</tool_call>'


@given(st.lists(st.integers(1, 2 * len(CALL) - 1), max_size=6))
@settings(deadline=None)
def test_streamed_calls_are_whole(tokenizer, cuts):
    """An event has one piece of a call; the pieces have all of its arguments, however many come in one event."""
    edges = sorted({0, *cuts, 2 * len(CALL)})
    texts = [(2 * CALL)[begin:end] for begin, end in itertools.pairwise(edges)]
    writer, heads, arguments = answer(tokenizer, calls=True), [], ["", ""]
    for delta in deltas(texts, ""):
        for piece in writer.pieces(delta):
            pieces = piece["choices"][0]["delta"].get("tool_calls", [])
            assert len({one["index"] for one in pieces}) == len(pieces)
            for one in pieces:
                if "id" in one:
                    heads.append((one["id"], one["type"], one["function"]["name"]))
                arguments[one["index"]] += one["function"]["arguments"]
    assert arguments == [ARGUMENTS] * 2
    assert [head[1:] for head in heads] == [("function", "f")] * 2
    assert len(set(heads)) == 2


def test_where_the_tokens_of_a_completion_stand():
    """In the whole text, in each piece of a stream; each answer of a prompt counts from 0."""

    def told(writer):
        offsets = {0: [], 1: []}
        for delta in deltas(["Wel", "l", ". ", "So."], ""):
            one = dataclasses.replace(delta.outputs[0], index=1)
            for piece in writer.pieces(dataclasses.replace(delta, outputs=(*delta.outputs, one))):
                [choice] = piece["choices"]
                offsets[choice["index"]] += choice["logprobs"]["text_offset"]
        return offsets

    assert told(CompletionAnswer("a", "m", Options(stream=True), 2)) == {0: list(range(9)), 1: list(range(9))}
    collector = OutputCollector()
    for delta in deltas(["Wel", "l", ". ", "So."], ""):
        collector.add(delta)
    [choice] = CompletionAnswer("a", "m").whole([collector.output()])["choices"]
    assert choice["logprobs"]["text_offset"] == list(range(9))


def test_a_response_has_what_was_thought_and_what_is_said(tokenizer):
    """One item of each, however the answer comes, and with what is said its log-probabilities alone."""
    texts, prompt = ["So", ". ", "Or", "</think>", "\n\nWe", "ll."], "<think>\n"
    answers = []
    for _ in range(2):
        chat = answer(tokenizer)
        chat.returns_thinking_tokens = False
        answers.append(ResponseAnswer(chat, ResponseRequest.parse({"input": "?", "top_logprobs": 1})))
    collector = OutputCollector()
    for delta in deltas(texts, prompt):
        collector.add(delta)
    whole = answers[0].whole([collector.output()])
    events = [event for delta in deltas(texts, prompt) for event in answers[1].pieces(delta)]
    for response in (whole, [*events, *answers[1].last()][-1]["response"]):
        thought, said = response["output"]
        assert (thought["type"], thought["content"][0]["text"]) == ("reasoning", "So. Or")
        [part] = said["content"]
        assert part["text"] == "Well."
        assert "".join(one["token"] for one in part["logprobs"]) == "\n\nWell."
        assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": len("So. Or</think>")}


PARTS = "a漢é🙂b"
OTHERS = {0x41: -3.0, 0xFF: -4.0, 0x1FF: -5.0, 0x2FF: -6.0}  # the last two spell nothing


def in_parts(cuts):
    """A text of which each token is a byte, with others of the same text beside it, in deltas that end at the cuts."""
    data = PARTS.encode()
    found = []
    for i, token in enumerate(data):
        others = {token: -1.0, **OTHERS} if i % 2 else OTHERS  # the chosen one need not be among the most likely
        own = {one: bytes([one]) if one < 256 else b"" for one in (token, *others)}
        texts = {one: spelled(value) for one, value in own.items()}
        found.append(Logprob(-1.0, dict(others), token, 1 if i % 2 else 7, texts, own))
    told = PromptOutput("", np.zeros(3, np.int32), 0, CacheReport((), True, "exact", (), 0))
    text = codecs.getincrementaldecoder("utf-8")()
    for begin, end in itertools.pairwise([0, *cuts, len(data)]):
        is_last = end == len(data)
        reason = "stop" if is_last else None
        new = tuple(found[begin:end])
        one = CompletionOutput(0, text.decode(data[begin:end]), tuple(data[begin:end]), reason, None, new)
        yield RequestDelta("a", (one,), RequestMetrics(), told if begin == 0 or is_last else None, is_last)


def collected(found):
    collector = OutputCollector()
    for delta in found:
        collector.add(delta)
    return collector.output()


@pytest.mark.parametrize("by_id", [False, True])
@pytest.mark.parametrize("cuts", [[], [2, 3, 7], range(1, 11)])
def test_log_probabilities_of_parts_of_characters(tokenizer, cuts, by_id):
    """Bytes spell the text; in completions each token has a name of its own, and characters count once."""
    options = Options(names_ids=by_id)

    def chat():
        return ChatAnswer("a", "m", options, tokenizer=tokenizer)

    def text():
        return CompletionAnswer("a", "m", options)

    [choice] = chat().whole([collected(in_parts(cuts))])["choices"]
    content = choice["logprobs"]["content"]
    assert bytes(itertools.chain(*(one["bytes"] for one in content))).decode() == PARTS
    names = [one["token"] for one in content]
    if by_id:
        assert names == [f"token_id:{byte}" for byte in PARTS.encode()]
    else:
        assert names[:3] == ["a", "bytes:\\xe6", "bytes:\\xbc"]
    assert [one["bytes"] for one in content[0]["top_logprobs"]] == [[0x41], [0xFF], [], []]
    assert (content[1]["logprob"], content[1]["top_logprobs"][0]["logprob"]) == (-1.0, -1.0)
    writer = chat()
    pieces = [piece for delta in in_parts(cuts) for piece in writer.pieces(delta)]
    found = [one["logprobs"] for piece in pieces for one in piece["choices"] if one["logprobs"]]
    assert [one for each in found for one in each["content"]] == content

    [choice] = text().whole([collected(in_parts(cuts))])["choices"]
    told = choice["logprobs"]
    assert told["tokens"] == names
    for i, (name, top) in enumerate(zip(names, told["top_logprobs"], strict=True)):
        assert len(top) == 5
        assert top[name] == told["token_logprobs"][i] == -1.0
    expected = {"token_id:65" if by_id else "A", "token_id:511" if by_id else "", "token_id:767"}
    assert expected < told["top_logprobs"][0].keys()
    before = [PARTS.encode()[:i].decode(errors="ignore") for i in range(len(PARTS.encode()))]
    assert told["text_offset"] == list(map(len, before))
    writer = text()
    pieces = [piece["choices"][0]["logprobs"] for delta in in_parts(cuts) for piece in writer.pieces(delta)]
    assert {key: list(itertools.chain(*(one[key] for one in pieces))) for key in told} == told


def test_what_is_held_comes_after_thinking(renderer):
    """Whose template says so: the request's own, the given one, or the checkpoint's."""
    opens = "{{ messages[0].content }}{{ tools }}</think>{% if add_generation_prompt %}<think>{% endif %}"
    messages = [{"role": "user", "content": "Hello"}]
    tools = [{"type": "function", "function": {"name": "look"}}]
    for asked in ({"tools": tools, "tool_choice": "required"}, {"response_format": {"type": "json_object"}}):
        body = {"messages": messages, **asked}
        for chats, more, is_after in (
            (ChatFormat(renderer), {}, False),
            (ChatFormat(renderer), {"chat_template": opens}, True),
            (ChatFormat(renderer, opens), {}, True),
            (ChatFormat(renderer, opens), {"add_generation_prompt": False}, False),
            (ChatFormat(renderer, opens, thoughts=False), {}, False),
        ):
            request = chats.request(body | more, {})
            template = Template(**{"chat_template": chats.chat_template, **request.template})
            prompt = renderer.from_conversation(messages, template=template)
            held = request.params.structured_outputs
            assert (prompt.opens_thought and not held.enable_in_reasoning) == is_after
            answer = chats.answer(request, "a", "m")
            assert answer.parts.thoughts == chats.thoughts


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("What does <think> mean?", False),
        ("What is this?", False),
    ],
)
def test_a_text_of_a_template_opens_thinking_by_its_end(renderer, prompt, opened):
    thinking = PromptRenderer(renderer.tokenizer, renderer.chat_template + "{# </think> #}")
    assert thinking.from_prompt(prompt).opens_thought == opened
    assert thinking.from_prompt(renderer.tokenizer(prompt)["input_ids"]).opens_thought == opened
    assert not renderer.from_prompt(prompt).opens_thought


def test_a_token_is_named_by_its_text_unless_ids_are_wanted():
    one = Logprob(-1.0, {66: -2.0}, 65, 1, {65: "A", 66: "B"}, {65: b"A", 66: b"B"})
    for named, names in ((logprob(one), ["A", "B"]), (logprob(one, by_id=True), ["token_id:65", "token_id:66"])):
        assert [told["token"] for told in (named, *named["top_logprobs"])] == names
