"""Tool calls in XML form: read at every split as a whole, values by their schemas, and the grammar that forces them."""

from __future__ import annotations

import json

import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlcache_jax.inputs.prompt import PromptRenderer, calls_in_xml
from vlcache_jax.protocol.deltas import ParsedAnswer
from vlcache_jax.protocol.parsing import AnswerParser
from vlcache_jax.protocol.requests import ChatRequest
from vlcache_jax.protocol.xml_tools import XmlToolParser, forced_call, read_value

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "hours": {"type": "array", "items": {"type": "integer"}},
                "metric": {"type": "boolean"},
                "limit": {"type": ["number", "null"]},
                "unit": {"enum": ["C", "F"]},
            },
            "required": ["city"],
        },
    },
}
PING = {"type": "function", "function": {"name": "ping"}}
TOOLS = (WEATHER, PING)


def call(name, **parameters):
    """Return a call as the templates of the models write it."""
    written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"


def read(*pieces, is_cut=False):
    parser = XmlToolParser("a", TOOLS)
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    return ParsedAnswer.of(deltas + parser.finish(is_cut=is_cut))


def summary(found):
    calls = [(one["function"]["name"], one["function"]["arguments"]) for one in found.calls]
    return found.content, calls


def loaded(found):
    return found.content, [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in found.calls]


BREMEN = call("weather", city="Bremen", days="2", hours="[1, 2]", metric="true", limit="null", unit="C")
READ = {"city": "Bremen", "days": 2, "hours": [1, 2], "metric": True, "limit": None, "unit": "C"}


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Sunny.", "Sunny.", []),
        (BREMEN, "", [("weather", READ)]),
        (f"I look.\n\n{BREMEN}", "I look.", [("weather", READ)]),
        (call("ping"), "", [("ping", {})]),
        (f"{call('ping')}\n{BREMEN}\n", "", [("ping", {}), ("weather", READ)]),
        (f"{call('ping')} Done.", " Done.", [("ping", {})]),
        ("<tool_call><function=ping></function></tool_call>", "", [("ping", {})]),
        ("<tool_call>\n" + 2 * "<function=ping>\n</function>\n" + "</tool_call>", "", 2 * [("ping", {})]),
        ("<tool_call>\n<function=ping>\n</tool_call>\n" + call("ping"), "", [("ping", {})] * 2),
        ("<function=ping>\n</function>", "", [("ping", {})]),
        ("<tool_call>\n<function= ping >\nwhat?\n</function>\n</tool_call>", "", [("ping", {})]),
        (call("weather", city=" two\n lines\n"), "", [("weather", {"city": " two\n lines\n"})]),
        (call("weather", city="a</function> <tool_call> b"), "", [("weather", {"city": "a</function> <tool_call> b"})]),
        (call("weather", city="null"), "", [("weather", {"city": "null"})]),
        (call("weather", town="5"), "", [("weather", {"town": "5"})]),
        (call("other", a="[1]"), "", [("other", {"a": "[1]"})]),
        (call("weather", city='"ü"'), "", [("weather", {"city": '"ü"'})]),
        (  # a closing tag is missing
            "<tool_call>\n<function=weather>\n<parameter=city>\nUlm\n<parameter=days>\n3\n</parameter>\n</function>",
            "",
            [("weather", {"city": "Ulm", "days": 3})],
        ),
        ("<tool_call>\n<function=weather>\n<parameter=city>\nUlm\n</function>", "", [("weather", {"city": "Ulm"})]),
        ("<tool_call>\n<function=weather>\n<parameter=city>\nUlm", "", [("weather", {"city": "Ulm"})]),
        ('<tool_call>\n{"name": "ping"}\n</tool_call>', '<tool_call>\n{"name": "ping"}\n</tool_call>', []),
        ("a <tool_call>", "a <tool_call>", []),
        ("a <b> <function=> c", "a <b> <function=> c", []),
        ("x <function=a\nb> y", "x <function=a\nb> y", []),
    ],
)  # fmt: skip
def test_a_text_is_read_the_same_at_every_split(text, content, calls):
    whole = read(text)
    assert loaded(whole) == (content, calls)
    for cut in range(1, len(text)):
        assert summary(read(text[:cut], text[cut:])) == summary(whole)
    assert summary(read(*text)) == summary(whole)


PIECES = ("<tool_call>", "\n", "<function=", "ping", ">", "<parameter=", "city", "x", "</parameter>", "</function>",
          "</tool_call>", " ", "<", "5")  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=25), st.booleans(), st.data())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_any_text_is_read_the_same_in_any_pieces(pieces, is_cut, data):
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    split = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found = read(*split, is_cut=is_cut)
    assert summary(found) == summary(read(text, is_cut=is_cut))
    if not is_cut:
        assert all(isinstance(json.loads(one["function"]["arguments"]), dict) for one in found.calls)


def test_a_call_that_a_limit_cuts_leaves_no_tags():
    """Its name and complete parameters are there. Without a closing brace, it is no whole call."""
    text = f"I look. {BREMEN}"
    for cut in range(text.index("<") + 2, text.index("</function>") + len("</function>")):
        found = read(text[:cut], is_cut=True)
        assert found.content == "I look."
        complete = text[:cut].count("</parameter>")
        [*arguments] = [one["function"]["arguments"] for one in found.calls]
        assert len(arguments) == ("<function=" in text[:cut] and ">" in text[text.index("<function=") : cut])
        assert complete or arguments in ([], [""])
        for one in filter(None, arguments):
            assert len(json.loads(one + "}")) == complete
    assert loaded(read(text.removesuffix("\n</tool_call>"), is_cut=True)) == ("I look.", [("weather", READ)])


def test_calls_have_ids_of_their_own():
    found = read(call("ping"), call("ping"))
    first, second = (one["id"] for one in found.calls)
    assert first.startswith("call_")
    assert first != second


def test_a_long_value_is_searched_once():
    """A value of many tokens, each of which arrives alone."""
    value = "x" * 40_000
    found = read(*call("weather", city=value))
    assert json.loads(found.calls[0]["function"]["arguments"]) == {"city": value}


@pytest.mark.parametrize(
    ("text", "schema", "expected"),
    [
        ("5", None, "5"),
        ("5", {}, "5"),
        ("5", {"type": "string"}, "5"),
        ("null", {"type": "string"}, "null"),
        ("null", {"type": ["string", "null"]}, None),
        ("None", {"type": ["string", "null"]}, "None"),
        ("None", {"type": ["integer", "null"]}, None),
        (" 5 ", {"type": "integer"}, 5),
        ("-5", {"type": "integer"}, -5),
        ("5.5", {"type": "integer"}, 5.5),
        ("five", {"type": "integer"}, "five"),
        ("5", {"type": "number"}, 5),
        ("5.0", {"type": "number"}, 5.0),
        ("1e3", {"type": "number"}, 1000.0),
        ("nan", {"type": "number"}, "nan"),
        ("NaN", {"type": "number"}, "NaN"),
        ("1e999", {"type": "number"}, "1e999"),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
        ("True", {"type": "boolean"}, True),
        ("false", {"type": "boolean"}, False),
        ("yes", {"type": "boolean"}, "yes"),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ("[1, 2]", {"type": "array"}, [1, 2]),
        ("[1, 2", {"type": "array"}, "[1, 2"),
        ("[" * 100_000, {"type": "array"}, "[" * 100_000),
        ("[1]", {"type": ["string", "array"]}, [1]),
        ("7", {"type": ["string", "array"]}, "7"),
        ("7", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 7),
        ("x", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "x"),
        ("2", {"enum": [1, 2]}, 2),
        ("2", {"enum": ["1", "2"]}, "2"),
        ("2", {"const": 2}, 2),
        ("2", {"description": "of any type"}, 2),
        ('"2"', {"$ref": "#/$defs/two"}, "2"),
        ("2", True, "2"),
    ],
)
def test_values_are_what_their_schemas_say(text, schema, expected):
    found = read_value(text, schema)
    assert (type(found), found) == (type(expected), expected)


@pytest.fixture(scope="module")
def takes(checkpoints):
    tokenizer = PromptRenderer.from_pretrained(checkpoints("qwen3_vl-tied")).tokenizer
    built = llguidance.LLTokenizer(tokenizer.backend_tokenizer.to_str(), n_vocab=len(tokenizer))

    def matches(text, *tools, several=True):
        grammar = forced_call(tools or TOOLS, several=several)
        matcher = llguidance.LLMatcher(built, llguidance.LLMatcher.grammar_from_lark(grammar))
        assert not matcher.is_error(), matcher.get_error()
        tokens = tokenizer(text)["input_ids"]
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    return matches


def test_the_grammar_takes_what_the_parser_reads(takes):
    for text in (BREMEN, call("ping"), call("weather", city="a <b>\n\n c"), f"{call('ping')}\n{BREMEN}"):
        assert takes(text)
        found = read(text)
        assert (found.content, len(found.calls)) == ("", text.count("<function="))
    assert takes(call("weather", city=""))
    assert takes(call("ping"), PING, several=False)


def test_the_grammar_refuses_other_texts(takes):
    for text in (
        "Sunny.",
        f"I look. {BREMEN}",
        BREMEN.removesuffix("</tool_call>"),
        call("weather"),
        call("weather", days="2"),
        call("weather", city="a", days="two"),
        call("weather", city="a", unit="K"),
        call("weather", days="2", city="a"),
        call("pong"),
    ):
        assert not takes(text)
    assert not takes(BREMEN, PING)
    assert not takes(f"{call('ping')}\n{call('ping')}", several=False)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/two"}, {"type": ["string", "null"]}, {"anyOf": [{"type": "integer"}, {"type": "string"}]}, {},
        {"type": "object", "properties": {"a": {"type": "integer"}}},
    ],
)  # fmt: skip
def test_the_grammar_is_valid_for_any_schema(takes, schema):
    parameters = {"type": "object", "properties": {"a": schema}, "$defs": {"two": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    value = '{"a": 2}' if schema.get("type") == "object" else "2"
    assert takes(call("f", a=value), tool)
    assert takes(call("f"), tool)


@pytest.mark.parametrize("parameters", [{"properties": []}, {"properties": {"a": {}}, "required": 1},
                                        {"properties": {"a": {"type": "string", "enum": [1]}}}])  # fmt: skip
def test_a_wrong_schema_still_makes_a_grammar(takes, parameters):
    assert takes(call("f"), {"type": "function", "function": {"name": "f", "parameters": parameters}})


def test_a_template_shows_the_form():
    assert calls_in_xml("... <tool_call>\n<function=' + name + '> ...")
    assert not calls_in_xml('{"name": <function-name>}')
    assert not calls_in_xml(None)


TEMPLATE = "{{ '<tool_call><function=' + call.name }} {% if thinks %}</think>{% endif %}"


def asked(template=TEMPLATE, xml_calls=None, **more):
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [*TOOLS], **more}
    return ChatRequest.parse(body, {"max_tokens": None}, template, xml_calls)


def test_a_request_has_the_form_of_its_template_or_of_the_server():
    assert asked().parts.xml_tools == [*TOOLS]
    assert asked("{{ messages }}").parts.xml_tools is None
    assert asked(xml_calls=False).parts.xml_tools is None
    assert asked("{{ messages }}", True).parts.xml_tools == [*TOOLS]
    forced = asked(tool_choice={"type": "function", "function": {"name": "weather"}})
    grammar = forced.params.structured_outputs.grammar
    assert "<function=weather>" in grammar
    assert "ping" not in grammar
    assert '{\\"name\\": ' in asked(xml_calls=False, tool_choice="required").params.structured_outputs.grammar


def test_a_call_within_thinking_is_reasoning():
    parser = AnswerParser("a", chat_template=TEMPLATE, prompt="<think>\n", has_tools=True, xml_tools=TOOLS)
    thought = f"Shall I {call('ping')}?"
    found = ParsedAnswer.of(parser.push(f"{thought}\n</think>\n\n{BREMEN}") + parser.finish())
    assert (found.reasoning, *loaded(found)) == (thought, "", [("weather", READ)])
    assert parser.finish_reason("stop") == "tool_calls"


def test_a_limit_within_a_call_is_told():
    parser = AnswerParser("a", has_tools=True, xml_tools=TOOLS)
    found = ParsedAnswer.of(parser.push(BREMEN[: BREMEN.index("<parameter=days")]) + parser.finish(is_cut=True))
    assert found.calls[0]["function"]["arguments"] == '{"city": "Bremen"'
    assert parser.finish_reason("length") == "length"
