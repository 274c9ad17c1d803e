"""Tools that a conversation offers, in OpenAI's shape."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from vlcache_jax.checks import check_flags, check_text, exceeds, short

MOST_TOOLS = 1024
"""Functions that a conversation may offer."""
_MOST_CHARACTERS = 1 << 20  # of one

# What Qwen2.5 is told, and by default.
_SYSTEM = "You are a helpful assistant."
_OFFER = """

# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


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
    if len(given or ()) > MOST_TOOLS:
        raise ValueError(f"tools must be at most {MOST_TOOLS}, got {len(given or ())}")
    tools = [_read(tool, f"tools[{i}]") for i, tool in enumerate(given or ())]
    counts = Counter(tool_names(tools))
    if twice := next((name for name, count in counts.items() if count > 1), None):
        raise ValueError(f"tools must have names of their own, got {short(twice)} twice")
    return tools


def tool_names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of the functions of tools that `read_tools` has read."""
    return [tool["function"]["name"] for tool in tools]


def _read(tool: Any, name: str) -> dict[str, Any]:
    kind = tool.get("type", "function") if isinstance(tool, Mapping) else None
    if kind != "function":
        raise ValueError(f'{name} must be an object of the type "function", got {short(tool)}')
    if exceeds(tool, _MOST_CHARACTERS):
        raise ValueError(f"{name} must have at most {_MOST_CHARACTERS} characters, got {short(tool)}")
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
    read = {"type": "function", **tool, "function": function}
    try:
        json.dumps(read, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} must be JSON: {str(error) or type(error).__name__}") from error
    return read


def written_out(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A conversation with its tools, calls and results as text, for a template that knows of none.

    The text is what Qwen2.5's template makes of them; Qwen2.5-VL was made of that model, but its own template has only
    messages.

    Args:
      messages: as `parts.read_message` returns them.
      tools: see `read_tools`.
    """
    first, *others = (
        messages if messages[0]["role"] == "system" else [{"role": "system", "content": _SYSTEM}, *messages]
    )
    offered = _OFFER.format("\n".join(_json(tool) for tool in tools))
    told: list[dict[str, Any]] = [{**first, "content": _joined(first["content"], offered)}]
    before = None
    for message in others:
        role = message["role"]
        if role == "tool":
            result = _joined(_joined("<tool_response>\n", message["content"]), "\n</tool_response>")
            if before == "tool":
                told[-1]["content"] = _joined(_joined(told[-1]["content"], "\n"), result)
            else:
                told.append({"role": "user", "content": result})
        else:
            calls = [call.get("function", call) for call in message.get("tool_calls", ())]
            texts = [
                f'<tool_call>\n{{"name": "{call["name"]}", "arguments": {_json(call["arguments"])}}}\n</tool_call>'
                for call in calls
            ]
            content = message["content"]
            if texts:
                content = _joined(content, "\n" * bool(content) + "\n".join(texts))
            told.append({**{key: value for key, value in message.items() if key != "tool_calls"}, "content": content})
        before = role
    return told


def _joined(content: Any, more: Any) -> Any:
    """Of two contents, each a text or parts."""
    if isinstance(content, str) and isinstance(more, str):
        return content + more
    parts = [[{"type": "text", "text": one}] if isinstance(one, str) else list(one) for one in (content, more)]
    return parts[0] + parts[1]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
