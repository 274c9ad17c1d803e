"""Tool calls in outputs: the JSON between `<tool_call>` tags, as Qwen's and Hermes' models write it.

`forced_call` is the grammar of calls that an output must make.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from vlcache_jax.common.checks import short
from vlcache_jax.inputs.messages import read_tools, tool_names
from vlcache_jax.protocol.deltas import CallDelta, Delta, unfinished

OPEN, CLOSE = "<tool_call>", "</tool_call>"
SEARCH = "search_library"
"""What the tool is called that an answer searches a library with."""
_SPACE = " \t\r\n"  # of JSON
_JSON = frozenset('{}[]:,"0123456789+-.eEtrufalsn' + _SPACE)  # outside of its strings
_PIECE = 256  # characters that are read at once, so that what follows a call is not copied for each


class ToolParser:
    """Tells tool calls from the text round them, whatever the pieces in which an answer comes.

    A call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Its first delta has its id and name; arguments
    follow one by one, as they were written. What is none stays content, tags included. A call that breaks when some of
    its arguments are told already cannot be taken back: it stays without its closing brace, so that its arguments are
    no JSON, and the rest is content. At the end of an answer the closing tag may lack; of a call that is cut off within
    its arguments, these are told as far as they came.

    White space before a call is left out, and that at the end of an answer with calls.

    Args:
      answer_id: of the answer, of which ids of calls are made.
    """

    def __init__(self, answer_id: str):
        self._answer_id = answer_id
        self._held = ""  # outside of calls: what came and is not told yet
        self._call: _ToolCall | None = None
        self.calls = 0
        """How many have begun; where there are some, and all are whole, the `finish_reason` "stop" is "tool_calls"."""
        self.has_broken = False
        """Whether one of them was told in part and is no call."""

    def push(self, text: str) -> list[Delta]:
        """What is new, now that there is more text."""
        told: list[Delta] = []
        self._take(text, told)
        return told

    def finish(self, *, is_cut: bool = False) -> list[Delta]:
        """What is left at the end of the text.

        Args:
          is_cut: more would have come, but for a limit.
        """
        told: list[Delta] = []
        while (call := self._call) is not None:
            if call.is_whole or (is_cut and call.has_arguments):
                self._tell(call, call.rest(), told)
                self._call = None
            else:
                self._break(call, told)
        if self._held.strip(_SPACE) or not self.calls:
            _say(self._held, told)
        self._held = ""
        return told

    def _take(self, text: str, told: list[Delta]) -> None:
        for begin in range(0, len(text), _PIECE):
            piece = text[begin : begin + _PIECE]
            while piece:
                piece = self._outside(piece, told) if self._call is None else self._inside(self._call, piece, told)

    def _outside(self, text: str, told: list[Delta]) -> str:
        """Takes text up to where a call begins; returns what follows."""
        self._held += text
        content, tag, rest = self._held.partition(OPEN)
        if not tag:
            content = content[: len(content) - unfinished(content, OPEN)]
        content = content.rstrip(_SPACE)  # what stands before a call; is it none, it is told later
        _say(content, told)
        held = self._held[len(content) : len(self._held) - len(rest)]
        self._held = "" if tag else held
        if tag:
            self._call = _ToolCall(held)
        return rest

    def _inside(self, call: _ToolCall, text: str, told: list[Delta]) -> str:
        """Takes text of a call; returns what follows."""
        rest = text[call.take(text) :]
        if call.is_closed:
            self._tell(call, call.rest(), told)
            self._call = None
        elif arguments := call.sure():
            self._tell(call, arguments, told)
        if call.is_broken:
            self._break(call, told)
        return rest

    def _break(self, call: _ToolCall, told: list[Delta]) -> None:
        """Takes what was taken for a call once more, as text in which another one may begin.

        All text is taken a few times at most: where one call sees a string, one that begins in that string sees none,
        and what both take for JSON ends at the next tag.
        """
        self._call = None
        self.has_broken |= call.is_told
        if not call.is_told:
            _say(call.before, told)
        self._take(call.untold(), told)

    def _tell(self, call: _ToolCall, arguments: str, told: list[Delta]) -> None:
        """Tells a piece of arguments, and with the first one what is called."""
        if call.is_told:
            told.append(Delta(call=CallDelta(self.calls - 1, arguments)))
            return
        call.is_told = True
        digest = hashlib.sha256(f"{self._answer_id}:{self.calls}".encode()).hexdigest()
        told.append(Delta(call=CallDelta(self.calls, "", f"call_{digest[:24]}", call.name)))
        told.append(Delta(call=CallDelta(self.calls, arguments)))
        self.calls += 1


class _ToolCall:
    """Reads a call character by character, and each member of its objects once, when it is whole.

    Attributes:
      before: the opening tag and the white space before it.
      name: of the function, once it is known.
      is_told: deltas of it are out.
      is_whole: its JSON is.
      is_closed: so is its closing tag.
      is_broken: it is no call.
    """

    def __init__(self, before: str):
        self.before = before
        self.name: str | None = None
        self.is_told = self.is_whole = self.is_closed = self.is_broken = False
        self._chars: list[str] = []  # all after the opening tag
        self._told = 0  # of these
        self._depth = 0  # of braces and brackets
        self._in_string = self._is_escaped = False
        self._member = 0  # where the member of the call's object begins, or that of its arguments
        self._arguments: list[int] = []  # where they begin, and where they end
        self._sure = 0  # where the last whole argument ends
        self._closing = ""  # of the closing tag

    def take(self, text: str) -> int:
        """Reads until the call ends or breaks; returns how many characters it took."""
        for taken, char in enumerate(text, 1):
            self._chars.append(char)
            self._read(char)
            if self.is_closed or self.is_broken:
                return taken
        return len(text)

    def sure(self) -> str:
        """Whole arguments that are not told yet, if it is known whose they are."""
        return self._until(self._sure) if self.has_arguments else ""

    @property
    def has_arguments(self) -> bool:
        """Whether they have begun, of a function whose name is known."""
        return self.name is not None and bool(self._arguments)

    def rest(self) -> str:
        """What is not told yet of the arguments of a call that is whole, or cut off within them."""
        if not self._arguments:
            return "{}"
        return self._until(len(self._chars) if self._in_arguments else self._arguments[1])

    def untold(self) -> str:
        """All that is not told yet."""
        return "".join(self._chars[self._told :])

    def _until(self, end: int) -> str:
        begin = max(self._told, self._arguments[0])
        if end <= begin:
            return ""
        self._told = end
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
        """Of the member whose value begins."""
        read = _object("".join(self._chars[self._member : -1]) + "0")
        return next(iter(read)) if read else None

    def _ends(self, *, is_last: bool) -> bool:
        """Takes a member, of the call or of its arguments, that ends here. Returns whether it is as it must be."""
        end = len(self._chars) - 1
        begin, self._member = self._member, len(self._chars)
        text = "".join(self._chars[begin:end])
        if self._in_arguments:
            has_one = len(_object(text)) == 1
            if has_one:
                self._sure = end
            if is_last:
                self._arguments.append(end + 1)
            return has_one or (is_last and begin == self._arguments[0] + 1 and not text.strip(_SPACE))
        # Of the member that the arguments are nothing may be left.
        is_right = not text.strip(_SPACE) if begin in self._arguments else self._is_member(_object(text))
        if is_last:
            self.is_whole = is_right = is_right and self.name is not None
        return is_right

    def _is_member(self, read: dict[str, Any]) -> bool:
        """Takes a member of the call's object that is not its arguments."""
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
    """A JSON object of these members; without any where they are none. Numbers are left out: only names matter."""
    try:
        read = json.loads(f"{{{members}}}", parse_int=_unread, parse_float=_unread)
    except (ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}


def _unread(number: str) -> None:
    """Digits may be thousands."""


def _say(content: str, told: list[Delta]) -> None:
    if content:
        told.append(Delta(content=content))


_AS_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Of JSON, as models have seen it."""


def forced_call(tools: Any, tool_choice: Any, *, parallel: bool = True) -> str | None:
    """What an answer must be if it is to call tools, as a grammar of Lark in llguidance's syntax.

    Args:
      tools: see `inputs.messages.read_tools`.
      tool_choice: OpenAI's: "required", any of the tools; or `{"type": "function", "function": {"name": ...}}`, that
        one. Also, as in requests to `/v1/responses`, `{"type": "function", "name": ...}`.
      parallel: there may be several calls, where no tool is named.

    Returns:
      The grammar; None where nothing is forced (None, "auto", "none").

    Raises:
      ValueError: it is no choice, or one of tools that there are not.
    """
    if tool_choice in (None, "auto", "none"):
        return None
    offered = read_tools(tools)
    if not offered:
        raise ValueError(f"tool_choice must be left out without tools, got {short(tool_choice)}")
    if (is_any := tool_choice == "required") is False:
        name = _named(tool_choice)
        if name not in tool_names(offered):
            raise ValueError(f"tool_choice must name one of {', '.join(tool_names(offered))}, got {short(name)}")
        offered = [tool for tool in offered if tool["function"]["name"] == name]
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
    """The JSON schema of a function's arguments."""
    parameters = function.get("parameters") or {"properties": {}, "additionalProperties": False}
    return {**parameters, "type": "object", "x-guidance": _AS_WRITTEN}
