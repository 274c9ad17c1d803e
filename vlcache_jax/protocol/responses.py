"""Requests of OpenAI's Responses: their bodies become those of chat completions, with `file_search` as a tool."""

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
    MOST_MESSAGES,
    OBJECT,
    TEXT_OR_NULL,
    ApiError,
    Schema,
    check_absent,
    check_fields,
    is_same,
    told,
)
from vlcache_jax.protocol.tools import SEARCH

TYPE = "file_search"
_MOST, _USUAL = 50, 3  # pictures of a search
_DEEPEST = 8  # filters within filters
_WIDEST = 1024  # filters beside each other, and values of one
_FIELDS = ("type", "vector_store_ids", "max_num_results", "filters", "ranking_options")
_RANKING = ("ranker", "score_threshold", "hybrid_search")
_ORDER = {"gt": operator.gt, "gte": operator.ge, "lt": operator.lt, "lte": operator.le}

type Passes = Callable[[Mapping[str, Any]], bool]


@dataclass(frozen=True)
class FileSearch:
    """An answer may search a library.

    Attributes:
      library: one of the operator's, or "files": what the client has uploaded.
      k: pictures that a search brings at most.
      least: score that they have at least; None: any.
      passes: of an item's metadata; None: all pass.
      where: it stands in the request.
    """

    library: str
    k: int = _USUAL
    least: float | None = None
    passes: Passes | None = None
    where: str = "tools[0]"

    @classmethod
    def parse(cls, given: Mapping[str, Any], where: str) -> Self:
        """Reads an element of `tools`; `where` is what errors call it.

        Raises:
          ApiError: a field is wrong or unknown.
        """
        if unknown := [name for name in given if name not in _FIELDS]:
            raise _wrong(where, f"must hold only {', '.join(_FIELDS)}", unknown[0])
        match given.get("vector_store_ids"):
            case [str(library)] if library:
                pass
            case other:
                raise _wrong(f"{where}.vector_store_ids", "must name one library", other)
        k = _USUAL if given.get("max_num_results") is None else given["max_num_results"]
        if not is_a(k, int) or not 1 <= k <= _MOST:
            raise _wrong(f"{where}.max_num_results", f"must be from 1 to {_MOST}", k)
        ranking = {} if given.get("ranking_options") is None else given["ranking_options"]
        if not isinstance(ranking, Mapping) or not set(ranking) <= set(_RANKING):
            raise _wrong(f"{where}.ranking_options", f"must hold only {', '.join(_RANKING)}", ranking)
        ranker, hybrid = ranking.get("ranker"), ranking.get("hybrid_search")
        if ranker not in (None, "auto") and not str(ranker).startswith("default-"):
            raise _wrong(
                f"{where}.ranking_options.ranker", "must be auto, as the library has a ranker of its own", ranker
            )
        if hybrid is not None and (not isinstance(hybrid, Mapping) or hybrid.get("text_weight") != 0):
            wanted = "must be left out or have text_weight 0, as images are found by their embeddings"
            raise _wrong(f"{where}.ranking_options.hybrid_search", wanted, hybrid)
        least = ranking.get("score_threshold")
        if least is not None and not is_a(least, int | float):
            raise _wrong(f"{where}.ranking_options.score_threshold", "must be a number", least)
        filters = given.get("filters")
        return cls(library, k, least, None if filters is None else _passes(filters, f"{where}.filters", 0), where)


def _wrong(where: str, needed: str, got: Any) -> ApiError:
    return ApiError(f"{where} {needed}, got {short(got)}", where)


def _passes(given: Any, where: str, depth: int) -> Passes:
    """A filter of OpenAI's: a comparison, or several of them. An item without the key passes `ne` and `nin` alone."""
    if not isinstance(given, Mapping):
        raise _wrong(where, "must be an object", given)
    kind, key, value = (given.get(name) for name in ("type", "key", "value"))
    known = ("type", "filters") if kind in ("and", "or") else ("type", "key", "value")
    if unknown := [name for name in given if name not in known]:
        raise _wrong(where, f"must hold only {', '.join(known)}", unknown[0])
    if kind in ("and", "or"):
        parts = given.get("filters")
        if not isinstance(parts, list) or not 0 < len(parts) <= _WIDEST or depth == _DEEPEST:
            told = f"must be a list of 1 to {_WIDEST} filters, at most {_DEEPEST} deep"
            raise _wrong(f"{where}.filters", told, parts)
        inner = [_passes(part, f"{where}.filters[{i}]", depth + 1) for i, part in enumerate(parts)]
        joined = all if kind == "and" else any
        return lambda metadata: joined(passes(metadata) for passes in inner)
    if not isinstance(key, str):
        raise _wrong(f"{where}.key", "must be a string", key)
    if "value" not in given:
        raise _wrong(where, "must hold value", list(given))
    match kind:
        case "eq" | "ne":
            return lambda metadata: (key in metadata and is_same(metadata[key], value)) == (kind == "eq")
        case "in" | "nin":
            if not isinstance(value, list) or len(value) > _WIDEST:
                raise _wrong(f"{where}.value", f"must be a list of at most {_WIDEST} values", value)
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
_ROUNDS, _MOST_ROUNDS = 2, 16  # searches of an answer, where nothing is said, and at most

# Fields that mean the same in a chat, some of them under another name there.
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
        "maxItems": MOST_MESSAGES,
        "description": "A text, or items: messages, calls and what they returned.",
    },
    "instructions": told(TEXT_OR_NULL, "A system message, of this response alone."),
    "previous_response_id": told(TEXT_OR_NULL, "The conversation goes on behind that response."),
    "store": told(FLAG, "Keep the response, so that others go on from it; by default it is."),
    "include": {
        "type": ["array", "null"],
        "maxItems": 64,
        "items": {"type": "string", "enum": ["message.output_text.logprobs", "reasoning.encrypted_content", _RESULTS]},
        "description": "The second is without effect: thinking is told in clear, and may be sent back so.",
    },
    "text": told(
        OBJECT,
        "`format`: as `response_format` of chats, with the fields of `json_schema` beside `type`; `verbosity`: medium.",
    ),
    "reasoning": told(
        {**OBJECT, "properties": _REASONING, "additionalProperties": False},
        "`effort`: as `reasoning_effort` of chats. What is thought is told in clear, without a summary.",
    ),
    "truncation": {"type": ["string", "null"], "enum": ["disabled", None]},
    **{new: CHAT[name] for new, name in _RENAMED.items()},
    **{name: CHAT[name] for name in _OF_CHATS},
    "stream_options": told(
        {**OBJECT, "properties": _STREAM, "additionalProperties": False},
        "Events are not padded; the last has the usage.",
    ),
    "max_tool_calls": told(
        {"type": ["integer", "null"], "minimum": 1},
        "Searches of `file_search`; by default 2, at most 16.",
    ),
}
# What chats call it, at the beginning of errors.
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
    """A response is asked for.

    Attributes:
      chat: the body of a chat completion that asks for the same, without its messages.
      messages: that follow on the response before.
      places: where each of them begins in the input.
      told: fields of the body that the response repeats.
      previous: id of the response before.
      stores: whether it is to be kept.
      instructions: of this response alone.
      search: the library that the answer may search; None: it may search none.
      rounds: searches at most.
      tells_results: what was found is told with the search.
    """

    chat: dict[str, Any]
    messages: list[dict[str, Any]]
    places: list[str]
    told: dict[str, Any]
    previous: str | None = None
    stores: bool = True
    instructions: str | None = None
    search: FileSearch | None = None
    rounds: int = _ROUNDS
    tells_results: bool = False

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Reads a body.

        Raises:
          ApiError: a field is wrong, unknown or not supported; what is wrong in those of chats, their parser tells.
        """
        given = check_fields(body, RESPONSES, ABSENT_IN_RESPONSES, ())
        if "input" not in given:
            raise ApiError("input must be a string or a list, got none", "input")
        chat = {name: given[name] for name in _OF_CHATS if name in given}
        chat |= {name: given[own] for own, name in _RENAMED.items() if own in given}
        search: FileSearch | None = None
        if "tools" in chat:
            functions, search = _tools(chat.pop("tools"))
            chat |= {"tools": functions} if functions or search is None else {}
        if chat.get("tool_choice") == {"type": TYPE}:
            if search is None:
                raise ApiError(f"tool_choice must be another one without a tool {TYPE}", "tool_choice")
            chat["tool_choice"] = {"type": "function", "name": SEARCH}
        if chat.get("top_logprobs") is not None or "message.output_text.logprobs" in given.get("include", ()):
            chat["logprobs"] = True
        if form := _form(given.get("text", {})):
            chat["response_format"] = form
        for name, known in (("reasoning", _REASONING), ("stream_options", _STREAM)):
            if unknown := [key for key in given.get(name, {}) if key not in known]:
                raise ApiError(f"{name} must hold only {', '.join(known)}, got {short(unknown[0])}", name)
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
            min(given.get("max_tool_calls", _ROUNDS), _MOST_ROUNDS),
            _RESULTS in given.get("include", ()),
        )

    def body(self, before: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The body of a chat completion, given the messages of the response before."""
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        return self.chat | {"messages": [*system, *before, *self.messages]}

    def error(self, error: ApiError, before: int) -> ApiError:
        """An error of that chat completion in the names of this request's fields.

        Args:
          before: messages of the response before.
        """

        def own(found: re.Match[str]) -> str:
            if found["name"] != "messages" or found["number"] is None:
                return _OWN[found["name"]] + (found["place"] or "")
            number = int(found["number"]) - (self.instructions is not None)
            if number < 0:
                return "instructions"
            if number < before:
                return "previous_response_id"
            return self.places[min(number - before, len(self.places) - 1)]  # behind them stands what was found

        message, param = (text and _OF_CHAT.sub(own, text) for text in (error.message, error.param))
        return ApiError(message or "", param, error.status, error.code, error.retry_after)


def _tools(given: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], FileSearch | None]:
    """Functions, whose fields stand beside their type here, and the library that may be searched."""
    tools = []
    search: FileSearch | None = None
    for i, tool in enumerate(given):
        if tool.get("type") == TYPE:
            if search is not None:
                raise ApiError(f"tools must have one {TYPE} at most, got another at tools[{i}]", "tools")
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
    """The format of the answer as chats name it."""
    if unknown := [name for name in text if name not in ("format", "verbosity")]:
        raise ApiError(f"text must have format or verbosity, got {short(unknown[0])}", "text")
    check_absent(text, {"verbosity": ABSENT_IN_CHAT["verbosity"]}, "text.")
    if (given := text.get("format")) is None:
        return None
    if not isinstance(given, dict):
        raise ApiError(f"text.format must be an object, got {short(given)}", "text.format")
    if given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {key: value for key, value in given.items() if key != "type"}}


def _messages(given: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """The messages of an input, and where each begins."""
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
                    raise ApiError(f"{where}.name must be that of a function, got {short(called)}", f"{where}.name")
                function = {"name": called, "arguments": item.get("arguments")}
                call = {"type": "function", "id": item.get("call_id"), "function": function}
                # Calls that follow each other, or what was said before them, are one message.
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
            case "file_search_call":  # what was found does not stand in it; `previous_response_id` knows
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
    """The content of a message."""
    if not isinstance(given, list):
        return given
    if len(given) > MOST_MESSAGES:
        raise ApiError(f"{where} must have at most {MOST_MESSAGES} parts, got {len(given)}", where)
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
                told_image = {key: value for key, value in image.items() if value is not None}
                own = {key: part[key] for key in ("uuid",) if key in part}
                parts.append({"type": "image_url", "image_url": told_image} | own)
            case "input_video":
                parts.append({"type": "video_url", "video_url": {"url": part.get("video_url")}})
            case "refusal":
                parts.append({"type": "text", "text": part.get("refusal")})
            case other:
                raise ApiError(f"{where}[{i}] of type {short(other)} is not supported", f"{where}[{i}]")
    return parts
