"""Calls that an answer must make: a grammar to which it can be held."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from vlcache_jax.checks import short
from vlcache_jax.inputs.tools import read_tools, tool_names
from vlcache_jax.protocol.tools import CLOSE, OPEN

_AS_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Of JSON, as models have seen it."""


def forced_call(tools: Any, tool_choice: Any, *, parallel: bool = True) -> str | None:
    """What an answer must be if it is to call tools, as a grammar of Lark in llguidance's syntax.

    Args:
      tools: see `inputs.tools.read_tools`.
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
