"""Requests of OpenAI's Responses API, converted to chat completions with `file_search` as a tool."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from vlcache_jax.common.checks import is_a, short
from vlcache_jax.protocol.schema import (
    ABSENT_IN_CHAT,
    CHAT,
    FLAG,
    MAX_MESSAGES,
    OBJECT,
    TEXT_OR_NULL,
    ApiError,
    Schema,
    check_absent,
    check_fields,
    check_known,
    described,
    is_same,
)
from vlcache_jax.protocol.tools import SEARCH

TYPE = "file_search"
_MAX_RESULTS, _DEFAULT_RESULTS = 50, 3  # images of a search
_MAX_DEPTH = 8  # nesting of filters
_MAX_WIDTH = 1024  # filters in one list, and values of one filter
_FIELDS = ("type", "vector_store_ids", "max_num_results", "filters", "ranking_options")
_RANKING = ("ranker", "score_threshold", "hybrid_search")
_ORDER = {"gt": operator.gt, "gte": operator.ge, "lt": operator.lt, "lte": operator.le}

type MetadataFilter = Callable[[Mapping[str, Any]], bool]


@dataclass(frozen=True)
class FileSearch:
    """Tool `file_search` of a request, with which an answer can search a library.

    Attributes:
      library: name of an operator's library, or "files" for the client's uploaded files.
      k: maximum number of images per search.
      min_score: minimum score of the images; None for no minimum.
      matches: function that returns whether an item's metadata match; None if all items match.
      where: place of the tool in the request, for errors.
    """

    library: str
    k: int = _DEFAULT_RESULTS
    min_score: float | None = None
    matches: MetadataFilter | None = None
    where: str = "tools[0]"

    @classmethod
    def parse(cls, given: Mapping[str, Any], where: str) -> Self:
        """Parse an element of `tools`.

        Args:
          given: the element.
          where: its name in errors, such as "tools[0]".

        Raises:
          ApiError: a field is wrong or unknown.
        """
        check_known(given, _FIELDS, where)
        match given.get("vector_store_ids"):
            case [str(library)] if library:
                pass
            case other:
                raise _wrong(f"{where}.vector_store_ids", "must name one library", other)
        k = _DEFAULT_RESULTS if given.get("max_num_results") is None else given["max_num_results"]
        if not is_a(k, int) or not 1 <= k <= _MAX_RESULTS:
            raise _wrong(f"{where}.max_num_results", f"must be from 1 to {_MAX_RESULTS}", k)
        ranking = {} if given.get("ranking_options") is None else given["ranking_options"]
        if not isinstance(ranking, Mapping):
            raise _wrong(f"{where}.ranking_options", "must be an object", ranking)
        check_known(ranking, _RANKING, f"{where}.ranking_options")
        ranker, hybrid = ranking.get("ranker"), ranking.get("hybrid_search")
        if ranker not in (None, "auto") and not str(ranker).startswith("default-"):
            raise _wrong(f"{where}.ranking_options.ranker", "must be auto: libraries have their own ranker", ranker)
        if hybrid is not None and (not isinstance(hybrid, Mapping) or hybrid.get("text_weight") != 0):
            wanted = "must be absent or have text_weight 0: images are found by embeddings only"
            raise _wrong(f"{where}.ranking_options.hybrid_search", wanted, hybrid)
        min_score = ranking.get("score_threshold")
        if min_score is not None and not is_a(min_score, int | float):
            raise _wrong(f"{where}.ranking_options.score_threshold", "must be a number", min_score)
        filters = given.get("filters")
        matches = None if filters is None else _metadata_filter(filters, f"{where}.filters", 0)
        return cls(library, k, min_score, matches, where)


def _wrong(where: str, needed: str, got: Any) -> ApiError:
    return ApiError(f"{where} {needed}, got {short(got)}", where)


def _metadata_filter(given: Any, where: str, depth: int) -> MetadataFilter:
    """Return the function of OpenAI's filter, a comparison or a combination of filters.

    Items without the key match only `ne` and `nin`.

    Raises:
      ApiError: the filter is wrong, or nested too deep.
    """
    if not isinstance(given, Mapping):
        raise _wrong(where, "must be an object", given)
    kind, key, value = (given.get(name) for name in ("type", "key", "value"))
    known = ("type", "filters") if kind in ("and", "or") else ("type", "key", "value")
    check_known(given, known, where)
    if kind in ("and", "or"):
        parts = given.get("filters")
        if not isinstance(parts, list) or not 0 < len(parts) <= _MAX_WIDTH or depth == _MAX_DEPTH:
            needed = f"must be a list of 1 to {_MAX_WIDTH} filters, at most {_MAX_DEPTH} deep"
            raise _wrong(f"{where}.filters", needed, parts)
        inner = [_metadata_filter(part, f"{where}.filters[{i}]", depth + 1) for i, part in enumerate(parts)]
        joined = all if kind == "and" else any
        return lambda metadata: joined(matches(metadata) for matches in inner)
    if not isinstance(key, str):
        raise _wrong(f"{where}.key", "must be a string", key)
    if "value" not in given:
        raise _wrong(where, "must have value", list(given))
    match kind:
        case "eq" | "ne":
            return lambda metadata: (key in metadata and is_same(metadata[key], value)) == (kind == "eq")
        case "in" | "nin":
            if not isinstance(value, list) or len(value) > _MAX_WIDTH:
                raise _wrong(f"{where}.value", f"must be a list of at most {_MAX_WIDTH} values", value)
            return lambda metadata: (
                (key in metadata and any(is_same(metadata[key], one) for one in value)) == (kind == "in")
            )
        case "gt" | "gte" | "lt" | "lte":
            if not is_a(value, int | float | str):
                raise _wrong(f"{where}.value", "must be a number or a string", value)
            compare, like = _ORDER[kind], str if isinstance(value, str) else int | float
            return lambda metadata: is_a(metadata.get(key), like) and compare(metadata[key], value)
    raise _wrong(f"{where}.type", f"must be eq, ne, in, nin, {', '.join(_ORDER)}, and, or", kind)


_RESULTS = "file_search_call.results"
_ROUNDS, _MAX_ROUNDS = 2, 16  # searches of an answer, default and maximum

# Fields with the same meaning in a chat, some under another name.
_RENAMED = {"max_output_tokens": "max_completion_tokens", "top_logprobs": "top_logprobs"}
_OF_CHATS = tuple(
    name
    for name in CHAT
    if name not in ("messages", "n", "logprobs", "stream_options", "reasoning_effort", "request_id", *_RENAMED.values())
)
_REASONING: Schema = {
    "effort": CHAT["reasoning_effort"],
    **{name: {"enum": ["auto", None]} for name in ("summary", "generate_summary", "context")},
    "mode": {"enum": ["standard", None]},
}
_STREAM = {"include_usage": FLAG, "include_obfuscation": CHAT["stream_options"]["properties"]["include_obfuscation"]}
RESPONSES: Mapping[str, Schema] = {
    "input": {
        "type": ["string", "array"],
        "maxItems": MAX_MESSAGES,
        "description": "A text, or items: messages, calls and what they returned.",
    },
    "instructions": described(TEXT_OR_NULL, "A system message for this response only."),
    "previous_response_id": described(TEXT_OR_NULL, "Stored response whose conversation is continued."),
    "store": described(FLAG, "Store the response, so that later requests can continue it; default: true."),
    "include": {
        "type": ["array", "null"],
        "maxItems": 64,
        "items": {"type": "string", "enum": ["message.output_text.logprobs", "reasoning.encrypted_content", _RESULTS]},
        "description": "reasoning.encrypted_content has no effect: reasoning is returned and accepted as plain text.",
    },
    "text": described(
        OBJECT,
        "`format`: a chat's `response_format`, with the fields of `json_schema` next to `type`; `verbosity`: medium.",
    ),
    "reasoning": described(
        {**OBJECT, "properties": _REASONING, "additionalProperties": False},
        "`effort`: as a chat's `reasoning_effort`. Reasoning is returned as plain text, without a summary.",
    ),
    "truncation": {"type": ["string", "null"], "enum": ["disabled", None]},
    **{new: CHAT[name] for new, name in _RENAMED.items()},
    **{name: CHAT[name] for name in _OF_CHATS},
    "stream_options": described(
        {**OBJECT, "properties": _STREAM, "additionalProperties": False},
        "Options of the stream. Its last event always has the usage.",
    ),
    "max_tool_calls": described(
        {"type": ["integer", "null"], "minimum": 1},
        "Maximum number of searches with `file_search`; default: 2, at most 16.",
    ),
}
# Names of a chat's fields at the beginning of errors, and this API's names of them.
_OWN = {
    "messages": "input",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}
_OF_CHAT = re.compile(rf"^(?P<name>{'|'.join(_OWN)})(?P<place>\[(?P<number>\d+)\])?(?!\w)")
ABSENT_IN_RESPONSES: Mapping[str, tuple[Any, ...]] = {
    **{name: ABSENT_IN_CHAT[name] for name in ("service_tier", "verbosity", "prompt_cache_options")},
    "background": (None, False),
    "background_options": (None,),
    "context_management": (None, []),
    "conversation": (None,),
    "moderation": (None,),
    "prompt": (None,),
}


@dataclass(frozen=True)
class ResponseRequest:
    """Request for a response.

    Attributes:
      chat: body of the equivalent chat completion, without its messages.
      messages: messages of the input, which follow the earlier response.
      places: place of each message in the body, such as "input[0]".
      repeated: fields of the body that the response repeats.
      previous: id of the earlier response; None if there is none.
      stores: True to store the response.
      instructions: system message for this response only.
      search: library that the answer may search; None if there is no `file_search`.
      rounds: maximum number of searches.
      returns_results: True to return the images that a search found.
    """

    chat: dict[str, Any]
    messages: list[dict[str, Any]]
    places: list[str]
    repeated: dict[str, Any]
    previous: str | None = None
    stores: bool = True
    instructions: str | None = None
    search: FileSearch | None = None
    rounds: int = _ROUNDS
    returns_results: bool = False

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Parse a body. The chat's parser checks the fields of chats.

        Raises:
          ApiError: a field is wrong, unknown or not supported.
        """
        given = check_fields(body, RESPONSES, ABSENT_IN_RESPONSES, ())
        if "input" not in given:
            raise ApiError("input is required", "input")
        chat = {name: given[name] for name in _OF_CHATS if name in given}
        chat |= {name: given[own] for own, name in _RENAMED.items() if own in given}
        search: FileSearch | None = None
        if "tools" in chat:
            functions, search = _tools(chat.pop("tools"))
            chat |= {"tools": functions} if functions or search is None else {}
        if chat.get("tool_choice") == {"type": TYPE}:
            if search is None:
                raise ApiError(f"tool_choice {TYPE} requires a tool of this type in tools", "tool_choice")
            chat["tool_choice"] = {"type": "function", "name": SEARCH}
        if chat.get("top_logprobs") is not None or "message.output_text.logprobs" in given.get("include", ()):
            chat["logprobs"] = True
        if form := _form(given.get("text", {})):
            chat["response_format"] = form
        for name, known in (("reasoning", _REASONING), ("stream_options", _STREAM)):
            check_known(given.get(name, {}), known, name)
        if (effort := given.get("reasoning", {}).get("effort")) is not None:
            chat["reasoning_effort"] = effort
        repeated = {name: given.get(name) for name in _REPEATED} | {
            "background": False,
            "parallel_tool_calls": given.get("parallel_tool_calls", True),
            "reasoning": given.get("reasoning") or {"effort": None, "summary": None},
            "store": given.get("store", True),
            "text": given.get("text") or {"format": {"type": "text"}},
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": given.get("tools") or [],
            "truncation": "disabled",
        }
        return cls(
            chat,
            *_messages(given["input"]),
            repeated,
            given.get("previous_response_id"),
            given.get("store", True),
            given.get("instructions"),
            search,
            min(given.get("max_tool_calls", _ROUNDS), _MAX_ROUNDS),
            _RESULTS in given.get("include", ()),
        )

    def body(self, before: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the body of the chat completion; `before` has the messages of the earlier response."""
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        return self.chat | {"messages": [*system, *before, *self.messages]}

    def error(self, error: ApiError, before: int) -> ApiError:
        """Return an error of the chat completion in the names of this request's fields.

        Args:
          error: the error.
          before: number of messages of the earlier response.
        """

        def own(found: re.Match[str]) -> str:
            if found["name"] != "messages" or found["number"] is None:
                return _OWN[found["name"]] + (found["place"] or "")
            number = int(found["number"]) - (self.instructions is not None)
            if number < 0:
                return "instructions"
            if number < before:
                return "previous_response_id"
            return self.places[min(number - before, len(self.places) - 1)]  # search results follow the input

        message, param = (text and _OF_CHAT.sub(own, text) for text in (error.message, error.param))
        return ApiError(message or "", param, error.status, error.code, error.retry_after)


def _tools(given: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], FileSearch | None]:
    """Return functions in the form of chats, and the `file_search` tool or None."""
    tools = []
    search: FileSearch | None = None
    for i, tool in enumerate(given):
        if tool.get("type") == TYPE:
            if search is not None:
                raise ApiError(f"tools must have at most one {TYPE}, got another at tools[{i}]", "tools")
            search = FileSearch.parse(tool, f"tools[{i}]")
            continue
        if tool.get("type") != "function":
            raise ApiError(f"tools[{i}].type is not supported, got {short(tool.get('type'))}", "tools")
        tools.append({"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}})
    return tools, search


_REPEATED = (
    "instructions", "max_output_tokens", "metadata", "previous_response_id", "temperature", "top_logprobs", "top_p",
    "user", "safety_identifier", "prompt_cache_key",
)  # fmt: skip


def _form(text: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the format of the answer as a chat's `response_format`; None if there is none."""
    check_known(text, ("format", "verbosity"), "text")
    check_absent(text, {"verbosity": ABSENT_IN_CHAT["verbosity"]}, "text.")
    if (given := text.get("format")) is None:
        return None
    if not isinstance(given, dict):
        raise ApiError(f"text.format must be an object, got {short(given)}", "text.format")
    if given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {key: value for key, value in given.items() if key != "type"}}


def _messages(given: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the messages of an input, and the place of each in the body."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}], ["input"]
    messages: list[dict[str, Any]] = []
    places: list[str] = []
    reasoning: str | None = None
    for i, item in enumerate(given):
        where = f"input[{i}]"
        if not isinstance(item, dict):
            raise ApiError(f"{where} must be an object, got {short(item)}", where)
        match item.get("type", "message"):
            case "message":
                message = {"role": item.get("role"), "content": _content(item.get("content"), f"{where}.content")}
            case "function_call":
                if not isinstance(called := item.get("name"), str) or not called:
                    raise ApiError(f"{where}.name must be a function's name, got {short(called)}", f"{where}.name")
                function = {"name": called, "arguments": item.get("arguments")}
                call = {"type": "function", "id": item.get("call_id"), "function": function}
                # Successive calls, and assistant text before them, are one message.
                if messages and messages[-1]["role"] == "assistant":
                    messages[-1].setdefault("tool_calls", []).append(call)
                    continue
                message = {"role": "assistant", "content": "", "tool_calls": [call]}
            case "function_call_output":
                content = _content(item.get("output"), f"{where}.output")
                message = {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
            case "reasoning":
                parts = item.get("content") or []
                reasoning = "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
                continue
            case "file_search_call":  # it has no images; they are in the conversation of `previous_response_id`
                continue
            case other:
                raise ApiError(f"{where}.type is not supported, got {short(other)}", f"{where}.type")
        if reasoning is not None and message["role"] == "assistant":
            message["reasoning_content"] = reasoning
        reasoning = None
        messages.append(message)
        places.append(where)
    return messages, places


def _content(given: Any, where: str) -> Any:
    """Return the content of a message in the form of chats."""
    if not isinstance(given, list):
        return given
    if len(given) > MAX_MESSAGES:
        raise ApiError(f"{where} must have at most {MAX_MESSAGES} parts, got {len(given)}", where)
    parts: list[dict[str, Any]] = []
    for i, part in enumerate(given):
        if not isinstance(part, dict):
            raise ApiError(f"{where}[{i}] must be an object, got {short(part)}", f"{where}[{i}]")
        match part.get("type"):
            case "input_text" | "output_text" | "text":
                parts.append({"type": "text", "text": part.get("text")})
            case "input_image":
                if part.get("file_id") is not None:
                    parts.append({key: value for key, value in part.items() if value is not None})
                    continue
                image = {"url": part.get("image_url"), "detail": part.get("detail")}
                image = {key: value for key, value in image.items() if value is not None}
                own = {key: part[key] for key in ("uuid",) if key in part}
                parts.append({"type": "image_url", "image_url": image} | own)
            case "input_video":
                parts.append({"type": "video_url", "video_url": {"url": part.get("video_url")}})
            case "refusal":
                parts.append({"type": "text", "text": part.get("refusal")})
            case other:
                raise ApiError(f"{where}[{i}] of type {short(other)} is not supported", f"{where}[{i}]")
    return parts
