"""Requests of Anthropic's Messages API, converted to chat completions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from vlcache_jax.common.checks import short
from vlcache_jax.inputs.messages import MAX_TOOLS
from vlcache_jax.inputs.prompt import thinks
from vlcache_jax.protocol.schema import (
    CHAT,
    FLAG,
    MAX_MESSAGES,
    OBJECT,
    SAMPLING,
    ApiError,
    Schema,
    check_absent,
    check_fields,
    check_known,
    described,
)
from vlcache_jax.sampling import LISTS

type Check = Callable[[str, str], bool]
"""(text of a thinking block, its signature) -> whether this server made the signature."""

_MEDIA_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")
# Claude Code's first block of `system`. It differs between requests, so that no prefix of a prompt could be reused.
_BILLING = "x-anthropic-billing-header:"
_KEEP_THINKING = "clear_thinking_20251015"

_THINKING = ("enabled", "disabled", "adaptive")
_CHOICES = ("auto", "any", "tool", "none")
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_OTHER_NAMES = ("n", "max_tokens", "stop", "logprobs", "prompt_logprobs", "thinking_token_budget")
# Fields with the meaning and the name that they have in a chat.
_OF_TEMPLATE = ("model", "mm_processor_kwargs", "chat_template_kwargs")
_OF_CHATS = (
    "max_tokens",
    *(name for name in SAMPLING if name not in _OTHER_NAMES),
    "stream",
    *("reuse", "compress", "donors", "cache_salt", "priority", "return_cache_report"),
)


def _closed(properties: Mapping[str, Schema], *required: str) -> Schema:
    return {**OBJECT, "properties": properties, "required": list(required), "additionalProperties": False}


_FORMAT: Schema = _closed({"type": {"enum": ["json_schema"]}, "schema": {"type": "object"}}, "type", "schema")
_ROLES = ("user", "assistant", "system")
_PROMPT: Mapping[str, Schema] = {
    "messages": {
        "type": "array",
        "minItems": 1,
        "maxItems": MAX_MESSAGES,
        "description": "The conversation: texts, images, tool calls with their results, and thinking.",
        "examples": [[{"role": "user", "content": "Where is the star?"}]],
        "items": {
            "type": "object",
            "required": ["role", "content"],
            "properties": {
                "role": {"type": "string", "enum": list(_ROLES)},
                "content": {"type": ["string", "array"], "items": {"type": "object"}},
            },
        },
    },
    "system": {
        "type": ["string", "array", "null"],
        "items": {"type": "object"},
        "description": "System message: a text, or blocks of type `text`.",
    },
    "tools": described(
        {"type": ["array", "null"], "items": {"type": "object"}, "maxItems": MAX_TOOLS},
        "Tools that the answer may call, with `name`, `description` and `input_schema`.",
    ),
    "tool_choice": described(
        _closed(
            {"type": {"enum": list(_CHOICES)}, "name": {"type": "string"}, "disable_parallel_tool_use": FLAG}, "type"
        ),
        "auto, any, tool (the one with `name`) or none.",
    ),
    "thinking": described(
        _closed(
            {
                "type": {"enum": list(_THINKING)},
                "budget_tokens": {"type": "integer", "minimum": 1},
                "display": {"enum": ["summarized", "omitted", None]},
            },
            "type",
        ),
        "enabled with a maximum number of thinking tokens, adaptive or disabled; default: that of the chat template.",
    ),
    "output_config": described(
        _closed({"effort": {"enum": [*_EFFORTS, None]}, "format": _FORMAT}),
        "`effort` of the thinking, and `format` of the answer: `json_schema` with its `schema`.",
    ),
    "output_format": described(_FORMAT, "Earlier name of `format` in `output_config`."),
    "context_management": described(
        _closed({"edits": {"type": ["array", "null"], "items": {"type": "object"}}}),
        f"Accepted without `edits`, or with one of type {_KEEP_THINKING} that keeps all.",
    ),
    "cache_control": described({}, "Accepted without effect: the server caches every prompt."),
    **{name: CHAT[name] for name in _OF_TEMPLATE},
}
MESSAGES: Mapping[str, Schema] = {
    **_PROMPT,
    **{name: CHAT[name] for name in _OF_CHATS},
    "stop_sequences": {
        "type": ["array", "null"],
        "items": {"type": "string", "minLength": 1},
        "maxItems": LISTS["stop"][1],
        "description": "Strings that end the answer.",
    },
    "metadata": described({}, "A label for the client's own use. It does not affect the answer."),
    "diagnostics": described(OBJECT, "Accepted without effect."),
}
COUNT_TOKENS = _PROMPT
"""Fields of a request for the number of tokens of a prompt."""
ABSENT_IN_MESSAGES: Mapping[str, tuple[Any, ...]] = {
    "service_tier": (None, "auto", "standard_only"),
    "speed": (None, "standard"),
    "container": (None,),
    "mcp_servers": (None, []),
    "inference_geo": (None,),
    "compaction": (None,),
    "fallbacks": (None, []),
    "fallback_credit_token": (None,),
    "billing_policy": (None,),
    "thread": (None,),
}
_ABSENT_IN_TOOLS: Mapping[str, tuple[Any, ...]] = {
    "defer_loading": (None, False),
    "allowed_callers": (None, [], ["direct"]),
    "input_examples": (None, []),
}
_TOOL_KEYS = ("type", "name", "description", "input_schema", "strict", "eager_input_streaming", "cache_control")

# Keys of each type of block, in addition to `type` and `cache_control`.
_KEYS: Mapping[str, tuple[str, ...]] = {
    "text": ("text", "citations"),
    "image": ("source", "transformations"),
    "tool_use": ("id", "name", "input", "caller"),
    "tool_result": ("tool_use_id", "content", "is_error"),
    "thinking": ("thinking", "signature"),
    "redacted_thinking": ("data",),
}
_IN_USER, _IN_RESULT, _IN_SYSTEM = ("text", "image", "tool_result"), ("text", "image"), ("text",)
_IN_ASSISTANT = ("text", "tool_use", "thinking", "redacted_thinking")
_SOURCE_KEYS = {"base64": ("media_type", "data"), "url": ("url",), "file": ("file_id",)}

# Places and fields of a chat at the beginning of errors.
_OF_MESSAGE = re.compile(r"^messages\[(?P<message>\d+)\](?:[ .](?P<kind>content|tool_calls)\[(?P<part>\d+)\])?")
_OF_TOOL = re.compile(r"^(tools\[\d+\])\.function(\.parameters)?")
_OWN = {
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
_OF_FIELD = re.compile(rf"^({'|'.join(_OWN)})(?![\w.])")


@dataclass(frozen=True)
class _MessagePlace:
    """Place of a chat message in the request.

    Attributes:
      message: place of the message, such as "messages[0]".
      content: places of the parts of its content.
      tool_calls: places of its calls.
    """

    message: str
    content: Sequence[str] = ()
    tool_calls: Sequence[str] = ()

    def of(self, kind: str | None, number: int) -> str:
        """Return the place of a part or a call; without a `kind`, or if it has none, that of the message."""
        places = self.content if kind == "content" else self.tool_calls if kind == "tool_calls" else ()
        return places[number] if number < len(places) else self.message


@dataclass(frozen=True)
class MessageRequest:
    """Request for a message.

    Attributes:
      chat: body of the equivalent chat completion.
      places: places of its messages in this request.
    """

    chat: dict[str, Any]
    places: list[_MessagePlace] = field(repr=False)

    @classmethod
    def parse(cls, body: Mapping[str, Any], chat_template: str, is_signed: Check, *, is_count: bool = False) -> Self:
        """Parse a body. The chat's parser checks the fields of chats.

        Args:
          body: the JSON object.
          chat_template: Jinja text of the chat template, which shows how the model thinks.
          is_signed: check of the signatures of thinking blocks.
          is_count: True for a request that counts tokens. It has no fields of the answer.

        Raises:
          ApiError: a field is wrong, unknown or not supported.
        """
        given = check_fields(body, COUNT_TOKENS if is_count else MESSAGES, ABSENT_IN_MESSAGES, ())
        for name in ("messages", *([] if is_count else ["max_tokens"])):
            if name not in given:
                raise ApiError(f"{name} is required", name)
        reader = _Reader(is_signed)
        reader.read(given)
        chat = {name: given[name] for name in (*_OF_TEMPLATE, *_OF_CHATS) if name in given}
        chat["messages"] = reader.messages
        if reader.continues:
            chat["continue_final_message"] = True
        if "stop_sequences" in given:
            chat["stop"] = given["stop_sequences"]
        if "tools" in given:
            chat["tools"] = _tools(given["tools"])
        _set_output(chat, given, chat_template)
        _set_choice(chat, given.get("tool_choice"))
        _set_thinking(chat, given.get("thinking"), chat_template)
        _check_edits(given.get("context_management", {}))
        return cls(chat, reader.places)

    def error(self, error: ApiError) -> ApiError:
        """Return an error of the chat completion in the names of this request's fields."""

        def own(found: re.Match[str]) -> str:
            number = min(int(found["message"]), len(self.places) - 1)
            return self.places[number].of(found["kind"], int(found["part"] or 0))

        def renamed(text: str) -> str:
            text = _OF_TOOL.sub(lambda found: found[1] + (".input_schema" if found[2] else ""), text)
            return _OF_FIELD.sub(lambda found: _OWN[found[1]], _OF_MESSAGE.sub(own, text))

        message = renamed(error.message)
        if error.code == "context_length_exceeded":  # clients shorten the conversation when they read these words
            message = f"prompt is too long: {message}"
        param = error.param and renamed(error.param)
        return ApiError(message, param, error.status, error.code, error.retry_after)


class _Reader:
    """Reader of the system message and of the messages.

    Args:
      is_signed: see `MessageRequest.parse`.

    Attributes:
      messages: messages in the form of chats.
      places: their places in the request.
      continues: True if the answer continues the last message.
    """

    def __init__(self, is_signed: Check):
        self._is_signed = is_signed
        self.messages: list[dict[str, Any]] = []
        self.places: list[_MessagePlace] = []
        self.continues = False

    def read(self, given: Mapping[str, Any]) -> None:
        """Read the messages of checked fields.

        Raises:
          ApiError: a message or a block is wrong.
        """
        if "system" in given:
            texts = _texts(given["system"], "system")
            if text := "\n\n".join(one for one in texts if not one.startswith(_BILLING)):
                self._add(_MessagePlace("system"), role="system", content=text)
        for i, message in enumerate(given["messages"]):
            where = f"messages[{i}]"
            check_known(message, ("role", "content"), where)
            match message["role"]:
                case "user":
                    self._user(message["content"], where)
                case "assistant":
                    self._assistant(message["content"], where)
                case _:
                    texts = _texts(message["content"], f"{where}.content")
                    self._add(_MessagePlace(where), role="system", content="\n\n".join(texts))
        last = self.messages[-1]
        if last["role"] == "assistant":
            if "tool_calls" in last:
                raise ApiError(
                    f"{self.places[-1].message} must be followed by a message with the tool_result of its tool_use",
                    self.places[-1].message,
                )
            self.continues = True

    def _add(self, place: _MessagePlace, **message: Any) -> None:
        self.messages.append(message)
        self.places.append(place)

    def _user(self, content: Any, where: str) -> None:
        """Add the messages of a user message: each result of a tool is a message of its own."""
        if isinstance(content, str):
            self._add(_MessagePlace(where), role="user", content=content)
            return
        if not content:
            raise ApiError(f"{where}.content must have at least one block, got none", f"{where}.content")
        parts: list[dict[str, Any]] = []
        places: list[str] = []
        for i, given in enumerate(content):
            place = f"{where}.content[{i}]"
            kind, block = _block(given, _IN_USER, place)
            if kind != "tool_result":
                if not parts:
                    self._add(_MessagePlace(where, places), role="user", content=parts)
                parts.append(_part(kind, block, place))
                places.append(place)
                continue
            self._result(block, place)
            parts, places = [], []

    def _result(self, block: Mapping[str, Any], where: str) -> None:
        """Add the message of a tool's result. An error begins with "Error: ", because templates have no flag for it."""
        content = block.get("content", "")
        prefix = "Error: " if block.get("is_error") else ""
        if not isinstance(content, str | list):
            raise ApiError(f"{where}.content must be a string or a list, got {short(content)}", f"{where}.content")
        parts: Any = prefix + content if isinstance(content, str) else [_text(prefix)] if prefix else []
        places = [where] * bool(prefix)
        for i, given in enumerate(content if isinstance(content, list) else ()):
            place = f"{where}.content[{i}]"
            kind, inner = _block(given, _IN_RESULT, place)
            parts.append(_part(kind, inner, place))
            places.append(place)
        name = _string(block, "tool_use_id", where)
        self._add(_MessagePlace(where, places), role="tool", tool_call_id=name, content=parts or "")

    def _assistant(self, content: Any, where: str) -> None:
        message: dict[str, Any] = {"role": "assistant", "content": content}
        calls: list[str] = []
        if not isinstance(content, str):
            texts: list[str] = []
            thoughts: list[str] = []
            for i, given in enumerate(content):
                place = f"{where}.content[{i}]"
                kind, block = _block(given, _IN_ASSISTANT, place)
                match kind:
                    case "text":
                        texts.append(_string(block, "text", place))
                    case "thinking":
                        thoughts.append(self._thought(block, place))
                    case "tool_use":
                        message.setdefault("tool_calls", []).append(_call(block, place))
                        calls.append(place)
            message["content"] = "".join(texts)
            if any(thoughts):
                message["reasoning_content"] = "\n".join(thoughts)
        self._add(_MessagePlace(where, (), calls), **message)

    def _thought(self, block: Mapping[str, Any], where: str) -> str:
        """Return the text of a thinking block."""
        text, signature = (_string(block, name, where) for name in ("thinking", "signature"))
        if not self._is_signed(text, signature):
            raise ApiError(
                f"{where}.signature must be the one that this server returned with this thinking, got "
                f"{short(signature)}; send the block unchanged, or leave it out",
                f"{where}.signature",
            )
        return text


def _texts(given: Any, where: str) -> list[str]:
    """Return the texts of a string or of blocks of type `text`."""
    if isinstance(given, str):
        return [given]
    places = [f"{where}[{i}]" for i in range(len(given))]
    blocks = [_block(block, _IN_SYSTEM, place)[1] for block, place in zip(given, places, strict=True)]
    return [_string(block, "text", place) for block, place in zip(blocks, places, strict=True)]


def _block(given: Any, kinds: Sequence[str], where: str) -> tuple[str, dict[str, Any]]:
    """Return the type of a block, and its fields that are set, without `type` and `cache_control`.

    Raises:
      ApiError: the type is none of `kinds`, or a field is unknown.
    """
    kind = str(given.get("type")) if isinstance(given, dict) else ""
    if kind not in kinds:
        remedy = ": send its text, or its pages as images" if kind == "document" else ""
        got = f"type {short(given.get('type'))}" if isinstance(given, dict) else short(given)
        raise ApiError(f"{where} must be a block of type {', '.join(kinds)}, got {got}{remedy}", where)
    block = {key: value for key, value in given.items() if value is not None and key not in ("type", "cache_control")}
    check_known(block, _KEYS[kind], where)
    return kind, block


def _string(block: Mapping[str, Any], name: str, where: str) -> str:
    if not isinstance(value := block.get(name), str):
        raise ApiError(f"{where}.{name} must be a string, got {short(value)}", f"{where}.{name}")
    return value


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _part(kind: str, block: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a block of type `text` or `image` as a part of a chat message."""
    return _text(_string(block, "text", where)) if kind == "text" else _image(block, where)


def _image(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    if block.get("transformations", {}) not in ({}, {"oversized_image": "downsize"}):
        raise ApiError(
            f"{where}.transformations must be absent, because large images are always scaled down, got "
            f"{short(block['transformations'])}",
            f"{where}.transformations",
        )
    source, place = block.get("source"), f"{where}.source"
    kind = source.get("type") if isinstance(source, dict) else None
    if not isinstance(source, dict) or not isinstance(kind, str) or kind not in _SOURCE_KEYS:
        raise ApiError(f"{place} must be an object of type {', '.join(_SOURCE_KEYS)}, got {short(source)}", place)
    check_known(source, ("type", *_SOURCE_KEYS[kind]), place)
    values = {name: _string(source, name, place) for name in _SOURCE_KEYS[kind]}
    if kind == "file":
        return {"type": "input_image", "file_id": values["file_id"]}
    if kind == "base64":
        if values["media_type"] not in _MEDIA_TYPES:
            known = ", ".join(_MEDIA_TYPES)
            message = f"{place}.media_type must be one of {known}, got {short(values['media_type'])}"
            raise ApiError(message, f"{place}.media_type")
        values["url"] = f"data:{values['media_type']};base64,{values['data']}"
    return {"type": "image_url", "image_url": {"url": values["url"]}}


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a block of type `tool_use` as a tool call of a chat message."""
    arguments = block.get("input", {})
    if not isinstance(arguments, dict):
        raise ApiError(f"{where}.input must be an object, got {short(arguments)}", f"{where}.input")
    if block.get("caller", {}) not in ({}, {"type": "direct"}):
        raise ApiError(f"{where}.caller must be of type direct, got {short(block['caller'])}", f"{where}.caller")
    if not (name := _string(block, "name", where)):
        raise ApiError(f"{where}.name must be the name of a tool, got {short(name)}", f"{where}.name")
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "id": _string(block, "id", where), "function": function}


def _tools(given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the tools as functions of a chat."""
    tools = []
    for i, tool in enumerate(given):
        where = f"tools[{i}]"
        if tool.get("type") not in (None, "custom"):
            raise ApiError(
                f"{where} {short(tool.get('name'))} of type {short(tool['type'])} is not supported: this server runs "
                "no tools, and the model does not know Anthropic's; define one of type custom with input_schema",
                where,
            )
        check_known(tool, (*_TOOL_KEYS, *_ABSENT_IN_TOOLS), where)
        check_absent(tool, _ABSENT_IN_TOOLS, f"{where}.")
        if not isinstance(schema := tool.get("input_schema"), dict):
            raise ApiError(f"{where}.input_schema must be an object, got {short(schema)}", f"{where}.input_schema")
        function = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
        tools.append({"type": "function", "function": function | {"parameters": schema}})
    return tools


def _set_choice(chat: dict[str, Any], choice: Mapping[str, Any] | None) -> None:
    """Set the chat's fields of `tool_choice`."""
    if choice is None:
        return
    check_known(choice, ("type", "name", "disable_parallel_tool_use"), "tool_choice")
    if choice["type"] in ("any", "tool"):
        if not chat.get("tools"):
            raise ApiError(f"tool_choice {choice['type']} requires tools, got none", "tool_choice")
        if "response_format" in chat:
            message = f"tool_choice.type must be auto or none if the answer has a format, got {short(choice['type'])}"
            raise ApiError(message, "tool_choice.type")
    if choice["type"] == "tool":
        chat["tool_choice"] = {"type": "function", "function": {"name": _string(choice, "name", "tool_choice")}}
    else:
        chat["tool_choice"] = "required" if choice["type"] == "any" else choice["type"]
    if choice.get("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False


def _set_output(chat: dict[str, Any], given: Mapping[str, Any], chat_template: str) -> None:
    """Set the chat's fields of `output_config` and `output_format`."""
    config = given.get("output_config", {})
    check_known(config, ("effort", "format"), "output_config")
    form, where = config.get("format"), "output_config.format"
    if "output_format" in given:
        if form is not None:
            raise ApiError("output_format and output_config.format are mutually exclusive, got both", "output_format")
        form, where = given["output_format"], "output_format"
    if form is not None:
        check_known(form, ("type", "schema"), where)
        chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": form["schema"]}}
    if config.get("effort") is not None and "reasoning_effort" in chat_template:  # others have one level only
        chat["reasoning_effort"] = config["effort"]


def _set_thinking(chat: dict[str, Any], thinking: Mapping[str, Any] | None, chat_template: str) -> None:
    """Set the chat's fields of `thinking`. A model that does not think keeps every budget.

    Raises:
      ApiError: the model cannot answer without thinking, or the request contradicts itself.
    """
    if thinking is None:
        return
    check_known(thinking, ("type", "budget_tokens", "display"), "thinking")
    kind, is_on = thinking["type"], thinking["type"] != "disabled"
    if "enable_thinking" in chat_template:
        own = chat.get("chat_template_kwargs", {})
        if own.get("enable_thinking", is_on) != is_on:
            message = f"thinking.type {short(kind)} contradicts enable_thinking in chat_template_kwargs"
            raise ApiError(f"{message}; set only one of them", "thinking.type")
        chat["chat_template_kwargs"] = {**own, "enable_thinking": is_on}
    elif not is_on and thinks(chat_template):
        if "reasoning_effort" not in chat_template:
            raise ApiError(
                "thinking.type must not be disabled, because the model's chat template cannot turn off thinking",
                "thinking.type",
            )
        chat["reasoning_effort"] = "none"
    if kind == "enabled":
        if thinking.get("budget_tokens") is None:
            raise ApiError("thinking.budget_tokens is required if thinking is enabled", "thinking.budget_tokens")
        if thinks(chat_template):
            chat["thinking_token_budget"] = thinking["budget_tokens"]
    if thinking.get("display") == "omitted":
        chat["include_reasoning"] = False


def _check_edits(given: Mapping[str, Any]) -> None:
    """Raise an `ApiError` if `context_management` would change the conversation."""
    check_known(given, ("edits",), "context_management")
    for i, edit in enumerate(given.get("edits") or ()):
        if edit != {"type": _KEEP_THINKING, "keep": "all"}:
            where = f"context_management.edits[{i}]"
            raise ApiError(f"{where} is not supported, got {short(edit)}: shorten the conversation yourself", where)
