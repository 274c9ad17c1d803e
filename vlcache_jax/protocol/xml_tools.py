"""Parser of tool calls in the XML form of Qwen3-Coder and Qwen3.5, and the grammar that forces them.

A call is `<tool_call><function=NAME><parameter=KEY>value</parameter>...</function></tool_call>`, with line ends between
the tags. Values are written without escapes, so the schema of a tool decides what they mean. The rules for types and
for text outside of the form are those of vLLM's `qwen3_coder` parser, except that the text "null" is a string where the
schema allows no null.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from vlcache_jax.protocol.deltas import CLOSE, JSON_FORMAT, OPEN, CallDelta, Delta, call_id, unfinished

FORMS = ("qwen3_coder", "qwen3_xml")
"""Names of the form in options of servers."""
FUNCTION, END = "<function=", "</function>"
_PARAMETER, _VALUE_END = "<parameter=", "</parameter>"
_NEXT = "\n" + _PARAMETER  # ends a value whose closing tag is missing
_TAGS = (_PARAMETER, END, CLOSE, FUNCTION, OPEN)  # that a call's text between its parameters may contain
_SPACE = " \t\r\n"
_MAX_NAME = 256  # characters of a function's or parameter's name
_BOOLEANS = {"true": True, "false": False}
_ANY = frozenset(("null", "boolean", "integer", "number", "object", "array"))


class XmlToolParser:
    """Incremental parser of tool calls in XML form. The joined deltas do not depend on the pieces of the text.

    The first delta of a call has its id and name, and comes with its first complete parameter or with its end. Each
    complete parameter follows as a member of the arguments' JSON. A parameter that occurs twice is in it twice, and
    readers of JSON take the last one.

    Text between the tags of a call is dropped. A call also ends where the next one begins, and at the end of the text.
    If a length limit has cut the text within a call, its complete parameters are returned without a closing brace, and
    the rest is dropped. `<tool_call>` without a function after it stays content.

    Args:
      answer_id: id of the answer, from which the ids of calls are made.
      tools: offered tools, as `inputs.messages.read_tools` returns them.

    Attributes:
      calls: number of calls that have begun.
      has_broken: always False: a call that has begun remains one.
    """

    has_broken = False

    def __init__(self, answer_id: str, tools: Sequence[Mapping[str, Any]] = ()):
        self._answer_id = answer_id
        self._schemas = {one["function"]["name"]: one["function"].get("parameters") or {} for one in tools}
        self._held = ""  # received text that is not parsed yet
        self._before = ""  # white space and opening tag of a call whose function has not begun
        self._name = self._key = ""
        self._searched = 0  # characters of a value in which its end was not found
        self._has_arguments = False  # whether a parameter of the call was returned
        self._step: Callable[[list[Delta]], bool] = self._outside
        self.calls = 0

    def push(self, text: str) -> list[Delta]:
        """Return the deltas of the next piece of text."""
        self._held += text
        deltas: list[Delta] = []
        while self._step(deltas):
            pass
        return deltas

    def finish(self, *, is_cut: bool = False) -> list[Delta]:
        """Return the deltas that were held back, at the end of the text.

        Args:
          is_cut: True if a length limit has cut the text.
        """
        deltas: list[Delta] = []
        if self._step == self._value and not is_cut:
            value, tag, rest = self._held.partition(END)
            value = value if tag else self._held[: len(self._held) - unfinished(self._held, _VALUE_END)]
            self._add(value, rest, deltas)
        if self._step in (self._inside, self._read_key) and not is_cut:
            self._end(deltas)
        elif self._step in (self._inside, self._read_key, self._value) and is_cut and not self._has_arguments:
            self._begin_call(deltas)
        text, self._held = self._held, ""
        if self._step == self._outside and is_cut and (cut := _unfinished(text, (OPEN, FUNCTION))) > 1:
            text = text[: len(text) - cut].rstrip(_SPACE)
        if self._step in (self._begin, self._read_name) and not is_cut:
            text = self._before + text
        elif self._step != self._outside:
            text = ""
        if text.strip(_SPACE) or (text and not self.calls):
            deltas.append(Delta(content=text))
        self._step = self._outside
        return deltas

    # The states of the parser. Each appends deltas and returns whether the next state can run now.

    def _outside(self, deltas: list[Delta]) -> bool:
        """Return content up to the first tag of a call."""
        found = _first(self._held, (OPEN, FUNCTION))
        end = found[0] if found else len(self._held) - _unfinished(self._held, (OPEN, FUNCTION))
        content = self._held[:end].rstrip(_SPACE)  # white space before a call; without a call it is returned later
        if content:
            deltas.append(Delta(content=content))
        self._held = self._held[len(content) :]
        if not found:
            return False
        end, tag = end - len(content) + len(found[1]), found[1]
        self._before, self._held = self._held[:end], self._held[end:]
        self._step = self._begin if tag == OPEN else self._read_name
        return True

    def _begin(self, deltas: list[Delta]) -> bool:
        """Find the function after `<tool_call>`."""
        begun = self._held.lstrip(_SPACE)
        if begun.startswith(FUNCTION):
            end = len(self._held) - len(begun) + len(FUNCTION)
            self._before, self._held = self._before + self._held[:end], self._held[end:]
            self._step = self._read_name
            return True
        return not FUNCTION.startswith(begun) and self._refuse(deltas)

    def _read_name(self, deltas: list[Delta]) -> bool:
        name, is_wrong = _name(self._held)
        if is_wrong:
            return self._refuse(deltas)
        if name is None:
            return False
        self._name, self._held = name.strip(_SPACE), self._held[len(name) + 1 :]
        self._has_arguments = False
        self._step = self._inside
        return True

    def _inside(self, deltas: list[Delta]) -> bool:
        """Find the next parameter of a call, or its end."""
        found = _first(self._held, _TAGS)
        if found is None:
            self._held = self._held[len(self._held) - _unfinished(self._held, _TAGS) :]
            return False
        place, tag = found
        self._held = self._held[place + len(tag) :]
        if tag == _PARAMETER:
            self._step = self._read_key
            return True
        self._end(deltas)
        self._before = tag
        self._step = {END: self._after, CLOSE: self._outside, FUNCTION: self._read_name, OPEN: self._begin}[tag]
        return True

    def _read_key(self, deltas: list[Delta]) -> bool:
        key, is_wrong = _name(self._held)
        if key is None and not is_wrong:
            return False
        if key is not None:
            self._key, self._held = key.strip(_SPACE), self._held[len(key) + 1 :]
        self._step = self._inside if key is None else self._value
        self._searched = 0
        return True

    def _value(self, deltas: list[Delta]) -> bool:
        """Read a parameter up to its closing tag, or up to the next parameter."""
        found = _first(self._held, (_VALUE_END, _NEXT), max(0, self._searched - len(_VALUE_END)))
        if found is None:
            self._searched = len(self._held)
            return False
        place, tag = found
        rest = self._held[place + len(tag) :] if tag == _VALUE_END else self._held[place:]
        self._add(self._held[:place], rest, deltas)
        return True

    def _after(self, deltas: list[Delta]) -> bool:
        """Skip the closing tag of a call whose function has ended, or find another function in the same tags."""
        begun = self._held.lstrip(_SPACE)
        if begun.startswith(CLOSE):
            self._held, self._step = begun.removeprefix(CLOSE), self._outside
            return True
        if any(tag.startswith(begun) for tag in (CLOSE, FUNCTION)):
            return False
        self._step = self._outside
        return True

    # Results.

    def _refuse(self, deltas: list[Delta]) -> bool:
        """Return the tags of something that is not a call as content."""
        deltas.append(Delta(content=self._before))
        self._step = self._outside
        return True

    def _add(self, value: str, rest: str, deltas: list[Delta]) -> None:
        """Append a complete parameter."""
        properties = self._schemas.get(self._name, {}).get("properties")
        schema = properties.get(self._key) if isinstance(properties, Mapping) else None
        read = json.dumps(read_value(_without_line_ends(value), schema), ensure_ascii=False)
        member = f"{json.dumps(self._key, ensure_ascii=False)}: {read}"
        self._append(f", {member}" if self._has_arguments else "{" + member, deltas)
        self._has_arguments = True
        self._held, self._step = rest, self._inside

    def _end(self, deltas: list[Delta]) -> None:
        """Append the end of a call."""
        self._append("}" if self._has_arguments else "{}", deltas)

    def _append(self, arguments: str, deltas: list[Delta]) -> None:
        if not self._has_arguments:
            self._begin_call(deltas)
        deltas.append(Delta(call=CallDelta(self.calls - 1, arguments)))

    def _begin_call(self, deltas: list[Delta]) -> None:
        """Append the name of a call."""
        deltas.append(Delta(call=CallDelta(self.calls, "", call_id(self._answer_id, self.calls), self._name)))
        self.calls += 1


def _first(text: str, tags: Sequence[str], start: int = 0) -> tuple[int, str] | None:
    """Return the place of the first of some tags in a text, and the tag."""
    found = [(place, tag) for tag in tags if (place := text.find(tag, start)) >= 0]
    return min(found, default=None)


def _unfinished(text: str, tags: Sequence[str]) -> int:
    """Return the number of characters at the end of a text that may begin one of some tags."""
    return max(unfinished(text, tag) for tag in tags)


def _name(text: str) -> tuple[str | None, bool]:
    """Return the text before `>`, or None if it is not complete, and whether no name can begin so."""
    name, tag, _ = text.partition(">")
    is_wrong = len(name) > _MAX_NAME or "<" in name or not name.strip(_SPACE).isprintable()
    is_wrong |= bool(tag) and not name.strip(_SPACE)
    return (name if tag and not is_wrong else None), is_wrong


def _without_line_ends(value: str) -> str:
    """Remove one line end from each side."""
    return value.removeprefix("\n").removesuffix("\n")


def read_value(text: str, schema: Any) -> Any:
    """Return the value of a parameter by its schema; text that fits no other type of it is a string.

    Args:
      text: text between the tags.
      schema: JSON schema of the parameter; None if the tool has no such parameter, whose values are strings.
    """
    types = _types(schema)
    wanted = types - {"string"} if types else _ANY if isinstance(schema, Mapping) and schema else frozenset()
    if "null" in wanted and "string" not in types and text.strip(_SPACE) == "None":  # as some templates write it
        return None
    for read in (_READERS[name] for name in ("null", "integer", "number", "boolean") if name in wanted):
        if (found := read(text.strip(_SPACE))) is not _NOTHING:
            return found
    is_string = "string" in types or not wanted
    if not is_string or wanted & {"object", "array"}:
        found = _json(text)
        fits = (isinstance(found, dict) and "object" in wanted) or (isinstance(found, list) and "array" in wanted)
        if found is not _NOTHING and (fits or not is_string):
            return found
    return text


_NOTHING = object()


def _null(text: str) -> Any:
    return None if text.lower() == "null" else _NOTHING


def _integer(text: str) -> Any:
    return int(text) if re.fullmatch(r"[+-]?\d{1,4000}", text) else _NOTHING


def _number(text: str) -> Any:
    if (whole := _integer(text)) is not _NOTHING:
        return whole
    return float(text) if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,2})?", text) else _NOTHING


def _boolean(text: str) -> Any:
    return _BOOLEANS.get(text.lower(), _NOTHING)


_READERS = {"null": _null, "integer": _integer, "number": _number, "boolean": _boolean}


def _json(text: str) -> Any:
    """Return the value of a JSON text without NaN and infinities, or `_NOTHING`."""
    try:
        return json.loads(text, parse_constant=_refused, parse_float=_finite)
    except (ValueError, RecursionError):
        return _NOTHING


def _refused(name: str) -> None:
    raise ValueError(f"JSON must not have {name}")


def _finite(number: str) -> float:
    if not math.isfinite(found := float(number)):
        _refused(number)
    return found


_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", list: "array"}


def _types(schema: Any) -> frozenset[str]:
    """Return the types that a schema names, also by `enum`, `const` and alternatives."""
    if not isinstance(schema, Mapping):
        return frozenset()
    named = schema.get("type")
    found = {one for one in (named if isinstance(named, list) else [named]) if isinstance(one, str)}
    values = [*schema["enum"]] if isinstance(schema.get("enum"), list) else []
    values += [schema["const"]] if "const" in schema else []
    if not found:
        found |= {"null" if one is None else _KINDS.get(type(one), "string") for one in values}
    for name in ("anyOf", "oneOf", "allOf"):
        alternatives = schema.get(name)
        for one in alternatives if isinstance(alternatives, list) else ():
            found |= _types(one)
    return frozenset(found)


def forced_call(offered: Sequence[Mapping[str, Any]], *, several: bool) -> str:
    """Return the grammar of an answer that calls some of the tools, in llguidance's Lark syntax.

    Parameters come in the order of the schema, and those that are not required may be missing. A string is any text up
    to its closing tag, or one of the schema's values. Other values are JSON.

    Args:
      offered: tools that may be called, as `inputs.messages.read_tools` returns them.
      several: True to allow several calls.
    """
    calls = " | ".join(f"call_{i}" for i in range(len(offered)))
    rules = ["start: call" + (r' ("\n" call)*' if several else "")]
    rules.append(f"call: {_quoted(OPEN + chr(10))} ({calls}) {_quoted(chr(10) + CLOSE)}")
    for i, tool in enumerate(offered):
        rules += _function_rules(i, tool["function"])
    return "\n".join(rules) + "\n"


def _function_rules(number: int, function: Mapping[str, Any]) -> Iterator[str]:
    """Yield the rules of a call of one function."""
    schema = function.get("parameters") or {}
    properties, required = (schema.get(name) for name in ("properties", "required"))
    properties = properties if isinstance(properties, Mapping) else {}
    required = required if isinstance(required, list) else []
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    uses = []
    for i, (key, own) in enumerate(properties.items()):
        rule = f"parameter_{number}_{i}"
        uses.append(rule if key in required else f"{rule}?")
        yield f"{rule}: {_quoted(f'{_PARAMETER}{key}>' + chr(10))} {rule}_value"
        end = _quoted(f"\n{_VALUE_END}\n")
        types, known = _types(own), own if isinstance(own, Mapping) else {}
        values = known.get("enum")
        if types == {"string"} and isinstance(values, list) and values and all(isinstance(one, str) for one in values):
            yield f"{rule}_value: ({' | '.join(map(_quoted, values))}) {end}"
        elif "string" in types or not (types or "$ref" in known):
            yield f"{rule}_value[suffix={end}]: /(?s:.*)/"
        else:
            yield f"{rule}_value: {rule}_json {end}"
            yield f"{rule}_json: %json {json.dumps({**known, **shared, 'x-guidance': JSON_FORMAT})}"
    head = _quoted(f"{FUNCTION}{function['name']}>\n")
    yield f"call_{number}: {' '.join([head, *uses, _quoted(END)])}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
