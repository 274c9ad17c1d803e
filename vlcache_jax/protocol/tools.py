"""Parser of tool calls in outputs, and the grammar that forces them. `xml_tools` has those of another form.

A call is JSON between `<tool_call>` tags, in the format of Qwen's and Hermes' models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from vlcache_jax.common.checks import short
from vlcache_jax.inputs.messages import read_tools, tool_names
from vlcache_jax.protocol import xml_tools
from vlcache_jax.protocol.deltas import CLOSE, JSON_FORMAT, OPEN, CallDelta, Delta, call_id, unfinished

SEARCH = "search_library"
"""Name of the tool with which an answer searches a library."""
_SPACE = " \t\r\n"  # white space of JSON
_JSON = frozenset('{}[]:,"0123456789+-.eEtrufalsn' + _SPACE)  # characters outside of strings
_PIECE = 256  # characters parsed at once, so that the rest of the text is not copied for each call


class ToolParser:
    """Incremental parser of tool calls. The joined deltas do not depend on the pieces in which the text arrives.

    A call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Its first delta has the id and name. The
    arguments follow one by one, as the model wrote them. Text that is not a valid call stays content, with its tags.

    A call that turns out to be invalid after some arguments were returned cannot be withdrawn. It stays without its
    closing brace, so that its arguments are not valid JSON. The rest of the text is content.

    At the end of an answer the closing tag may be missing. If a length limit has cut the arguments, the received part
    is returned.

    White space before a call and at the end of an answer with calls is removed.

    Args:
      answer_id: id of the answer, from which the ids of calls are made.

    Attributes:
      calls: number of calls that have begun.
      has_broken: True if a call became invalid after a part of it was returned.
    """

    def __init__(self, answer_id: str):
        self._answer_id = answer_id
        self._held = ""  # received text outside of calls that is not returned yet
        self._call: _ToolCall | None = None
        self.calls = 0
        self.has_broken = False

    def push(self, text: str) -> list[Delta]:
        """Return the deltas of the next piece of text."""
        deltas: list[Delta] = []
        self._take(text, deltas)
        return deltas

    def finish(self, *, is_cut: bool = False) -> list[Delta]:
        """Return the deltas that were held back, at the end of the text.

        Args:
          is_cut: True if a length limit has cut the text.
        """
        deltas: list[Delta] = []
        while (call := self._call) is not None:
            if call.is_whole or (is_cut and call.has_arguments):
                self._append(call, call.rest(), deltas)
                self._call = None
            else:
                self._break(call, deltas)
        if self._held.strip(_SPACE) or not self.calls:
            _append_content(self._held, deltas)
        self._held = ""
        return deltas

    def _take(self, text: str, deltas: list[Delta]) -> None:
        for begin in range(0, len(text), _PIECE):
            piece = text[begin : begin + _PIECE]
            while piece:
                piece = self._outside(piece, deltas) if self._call is None else self._inside(self._call, piece, deltas)

    def _outside(self, text: str, deltas: list[Delta]) -> str:
        """Parse text up to the beginning of a call, and return the rest."""
        self._held += text
        content, tag, rest = self._held.partition(OPEN)
        if not tag:
            content = content[: len(content) - unfinished(content, OPEN)]
        content = content.rstrip(_SPACE)  # white space before a call; if no call follows, it is returned later
        _append_content(content, deltas)
        held = self._held[len(content) : len(self._held) - len(rest)]
        self._held = "" if tag else held
        if tag:
            self._call = _ToolCall(held)
        return rest

    def _inside(self, call: _ToolCall, text: str, deltas: list[Delta]) -> str:
        """Parse text of a call, and return the rest."""
        rest = text[call.take(text) :]
        if call.is_closed:
            self._append(call, call.rest(), deltas)
            self._call = None
        elif arguments := call.complete():
            self._append(call, arguments, deltas)
        if call.is_broken:
            self._break(call, deltas)
        return rest

    def _break(self, call: _ToolCall, deltas: list[Delta]) -> None:
        """Parse the text of an invalid call again, as content in which another call may begin.

        Each character is parsed only a few times. A call that begins inside of a string of another one sees no string
        there. The JSON common to both ends at the next tag.
        """
        self._call = None
        self.has_broken |= call.is_returned
        if not call.is_returned:
            _append_content(call.before, deltas)
        self._take(call.unreturned(), deltas)

    def _append(self, call: _ToolCall, arguments: str, deltas: list[Delta]) -> None:
        """Append the delta of a piece of arguments; before the first one, that of the id and name."""
        if call.is_returned:
            deltas.append(Delta(call=CallDelta(self.calls - 1, arguments)))
            return
        call.is_returned = True
        deltas.append(Delta(call=CallDelta(self.calls, "", call_id(self._answer_id, self.calls), call.name)))
        deltas.append(Delta(call=CallDelta(self.calls, arguments)))
        self.calls += 1


class _ToolCall:
    """Parser of one call, character by character. Each member of its objects is decoded once, when it is complete.

    Attributes:
      before: the opening tag and the white space before it.
      name: name of the function; None until it is known.
      is_returned: True once a delta of the call was returned.
      is_whole: True once its JSON is complete.
      is_closed: True once its closing tag is complete.
      is_broken: True if it is not a valid call.
    """

    def __init__(self, before: str):
        self.before = before
        self.name: str | None = None
        self.is_returned = self.is_whole = self.is_closed = self.is_broken = False
        self._chars: list[str] = []  # all characters after the opening tag
        self._returned = 0  # number of characters that were returned
        self._depth = 0  # of braces and brackets
        self._in_string = self._is_escaped = False
        self._member = 0  # begin of the current member of the call's object or of its arguments
        self._arguments: list[int] = []  # begin and end of the arguments, once they are known
        self._complete = 0  # end of the last complete argument
        self._closing = ""  # received part of the closing tag

    def take(self, text: str) -> int:
        """Parse until the call ends or becomes invalid, and return the number of parsed characters."""
        for taken, char in enumerate(text, 1):
            self._chars.append(char)
            self._read(char)
            if self.is_closed or self.is_broken:
                return taken
        return len(text)

    def complete(self) -> str:
        """Return the complete arguments that were not returned yet, or "" while the function is unknown."""
        return self._until(self._complete) if self.has_arguments else ""

    @property
    def has_arguments(self) -> bool:
        """True if the function's name is known and its arguments have begun."""
        return self.name is not None and bool(self._arguments)

    def rest(self) -> str:
        """Return the rest of the arguments of a call that is complete, or cut within its arguments."""
        if not self._arguments:
            return "{}"
        return self._until(len(self._chars) if self._in_arguments else self._arguments[1])

    def unreturned(self) -> str:
        """Return all characters that were not returned yet."""
        return "".join(self._chars[self._returned :])

    def _until(self, end: int) -> str:
        begin = max(self._returned, self._arguments[0])
        if end <= begin:
            return ""
        self._returned = end
        return "".join(self._chars[begin:end])

    def _read(self, char: str) -> None:
        if self._in_string:
            self._read_string(char)
        elif self.is_whole:
            self._read_closing(char)
        elif self._depth == 0:
            if char == "{":
                self._depth, self._member = 1, len(self._chars)
            self.is_broken = char not in _SPACE + "{"
        elif char not in _JSON:
            self.is_broken = True
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
            if self._depth == 2 and char == "{" and self._key() == "arguments":
                self.is_broken = bool(self._arguments)
                self._arguments = [len(self._chars) - 1]
                self._member = len(self._chars)
        elif char in "}]," and self._depth == 1 + self._in_arguments:
            self.is_broken = char == "]" or not self._ends(is_last=char == "}")
            self._depth -= char == "}"
        elif char in "}]":
            self._depth -= 1

    @property
    def _in_arguments(self) -> bool:
        return len(self._arguments) == 1

    def _read_string(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._in_string = False
        else:
            self.is_broken = char < " "

    def _read_closing(self, char: str) -> None:
        if self._closing or char not in _SPACE:
            self._closing += char
        self.is_closed = self._closing == CLOSE
        self.is_broken = not CLOSE.startswith(self._closing)

    def _key(self) -> Any:
        """Return the key of the member whose value begins."""
        read = _object("".join(self._chars[self._member : -1]) + "0")
        return next(iter(read)) if read else None

    def _ends(self, *, is_last: bool) -> bool:
        """Decode the member of the call or of its arguments that ends here, and return whether it is valid."""
        end = len(self._chars) - 1
        begin, self._member = self._member, len(self._chars)
        text = "".join(self._chars[begin:end])
        if self._in_arguments:
            has_one = len(_object(text)) == 1
            if has_one:
                self._complete = end
            if is_last:
                self._arguments.append(end + 1)
            return has_one or (is_last and begin == self._arguments[0] + 1 and not text.strip(_SPACE))
        # Nothing but white space may follow the arguments in their member.
        is_right = not text.strip(_SPACE) if begin in self._arguments else self._is_member(_object(text))
        if is_last:
            self.is_whole = is_right = is_right and self.name is not None
        return is_right

    def _is_member(self, read: dict[str, Any]) -> bool:
        """Read a member of the call's object other than the arguments, and return whether it is valid."""
        if len(read) != 1 or "arguments" in read:
            return False
        if "name" not in read:
            return True
        name = read["name"]
        if self.name is not None or not isinstance(name, str) or not name or not name.isprintable():
            return False
        self.name = name
        return True


def _object(members: str) -> dict[str, Any]:
    """Return the JSON object with these members, or {} if they are invalid. Numbers become None."""
    try:
        read = json.loads(f"{{{members}}}", parse_int=_ignored, parse_float=_ignored)
    except (ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}


def _ignored(number: str) -> None:
    """Ignore a number: conversion of thousands of digits is slow, and the value is not needed."""


def _append_content(content: str, deltas: list[Delta]) -> None:
    if content:
        deltas.append(Delta(content=content))


def forced_call(tools: Any, tool_choice: Any, *, parallel: bool = True, is_xml: bool = False) -> str | None:
    """Return the grammar of an answer that must call tools, in llguidance's Lark syntax.

    Args:
      tools: see `inputs.messages.read_tools`.
      tool_choice: OpenAI's choice. "required" forces any tool, `{"type": "function", "function": {"name": ...}}` the
        named one. The form of `/v1/responses`, `{"type": "function", "name": ...}`, is also accepted.
      parallel: True to allow several calls, if no tool is named.
      is_xml: True if the model writes calls as `xml_tools` reads them.

    Returns:
      The grammar; None if no call is forced (None, "auto", "none").

    Raises:
      ValueError: the choice is wrong, or names an unknown tool.
    """
    if tool_choice in (None, "auto", "none"):
        return None
    offered = read_tools(tools)
    if not offered:
        raise ValueError(f"tool_choice requires tools, got {short(tool_choice)} without any")
    if (is_any := tool_choice == "required") is False:
        name = _named(tool_choice)
        if name not in tool_names(offered):
            raise ValueError(f"tool_choice must name one of {', '.join(tool_names(offered))}, got {short(name)}")
        offered = [tool for tool in offered if tool["function"]["name"] == name]
    if is_xml:
        return xml_tools.forced_call(offered, several=is_any and parallel)
    rules = ["start: call" + (r' ("\n" call)*' if is_any and parallel else "")]
    calls = " | ".join(f"call_{i}" for i in range(len(offered)))
    rules.append(f"call: {json.dumps(OPEN + chr(10))} ({calls}) {json.dumps(chr(10) + CLOSE)}")
    for i, tool in enumerate(offered):
        head = f'{{"name": {json.dumps(tool["function"]["name"], ensure_ascii=False)}, "arguments": '
        rules.append(f'call_{i}: {json.dumps(head, ensure_ascii=False)} arguments_{i} "}}"')
        rules.append(f"arguments_{i}: %json {json.dumps(_arguments(tool['function']))}")
    return "\n".join(rules) + "\n"


def _named(tool_choice: Any) -> str:
    if isinstance(tool_choice, Mapping) and tool_choice.get("type") == "function":
        named = tool_choice.get("function", tool_choice)
        if isinstance(named, Mapping) and isinstance(named.get("name"), str):
            return str(named["name"])
    raise ValueError(f'tool_choice must be "auto", "none", "required" or a function\'s name, got {short(tool_choice)}')


def _arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a function's arguments."""
    parameters = function.get("parameters") or {"properties": {}, "additionalProperties": False}
    return {**parameters, "type": "object", "x-guidance": JSON_FORMAT}
