"""Tools that a conversation offers, in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vlcache_jax.checks import check_flags, check_text, short


def read_tools(given: Any) -> list[dict[str, Any]]:
    """Tools as templates know them.

    Args:
      given: a list of `{"type": "function", "function": {"name": ..., "description": ..., "parameters": JSON schema}}`,
        or, as in requests to `/v1/responses`, of `{"type": "function", "name": ..., ...}`. None is no tools.

    Raises:
      ValueError: it is none; the error names what is wrong.
    """
    if not isinstance(given, Sequence | None) or isinstance(given, str | bytes):
        raise ValueError(f"tools must be a list, got {short(given)}")
    tools = [_read(tool, f"tools[{i}]") for i, tool in enumerate(given or ())]
    names = tool_names(tools)
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"tools must have names of their own, got {short(name)} twice")
    return tools


def tool_names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of the functions of tools that `read_tools` has read."""
    return [tool["function"]["name"] for tool in tools]


def _read(tool: Any, name: str) -> dict[str, Any]:
    kind = tool.get("type", "function") if isinstance(tool, Mapping) else None
    if kind != "function":
        raise ValueError(f'{name} must be an object of the type "function", got {short(tool)}')
    if "function" not in tool:
        tool = {"function": {key: value for key, value in tool.items() if key != "type"}}
    function = tool["function"]
    if not isinstance(function, Mapping):
        raise ValueError(f"{name}.function must be an object, got {short(function)}")
    function = {key: value for key, value in function.items() if value is not None}
    called = function.get("name")
    if not (isinstance(called, str) and called and called.isprintable() and not set(called) & set('"\\')):
        raise ValueError(f"{name}.function.name must be a name, got {short(called)}")
    if "description" in function:
        check_text(function["description"], f"{name}.function.description")
    if not isinstance(function.get("parameters", {}), Mapping):
        raise ValueError(f"{name}.function.parameters must be a JSON schema, got {short(function['parameters'])}")
    check_flags(**{f"{name}.function.strict": function.get("strict", False)})
    return {"type": "function", **tool, "function": function}
