"""JSON Schemas of the fields of requests and messages, and the check of a body against them.

The parsers use these schemas, and the server publishes them. `inputs.messages` parses messages. It also accepts the
forms of images and videos in examples of Qwen and Hugging Face, which the schemas leave out.
"""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
import re
from collections.abc import Collection, Mapping
from typing import Any

from vlcache_jax.common.checks import is_a, short, shorten, unknown
from vlcache_jax.common.json_files import TooManyError, parse_json
from vlcache_jax.common.vllm_compat import GUIDED
from vlcache_jax.inputs.messages import DETAILS, MAX_TOOLS, MAX_UUID, ROLES, TEXT_KEYS
from vlcache_jax.sampling import LISTS, MAX_LOGPROBS, NUMBERS, SamplingParams

Schema = Mapping[str, Any]


class ApiError(ValueError):
    """Error response to a request.

    Attributes:
      message: the reason.
      param: the wrong field of the body; None if it is no single field.
      status: HTTP status.
      code: OpenAI's error code; None if there is none.
      retry_after: seconds after which the client may retry; None if unknown.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
        retry_after: int | None = None,
    ):
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code
        self.retry_after = retry_after

    def to_dict(self) -> dict[str, Any]:
        """Return OpenAI's error object."""
        error = {"message": self.message, "type": _kind(self.status), "param": self.param, "code": self.code}
        return {"error": error}

    def to_anthropic(self, request_id: str) -> dict[str, Any]:
        """Return Anthropic's error object, which has no fields for `param` and `code`."""
        kind = _ANTHROPIC_KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        if self.status == 503 and self.retry_after is not None:
            kind = "overloaded_error"
        return {"type": "error", "error": {"type": kind, "message": self.message}, "request_id": request_id}


_ANTHROPIC_KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error",
}  # fmt: skip


def _kind(status: int) -> str:
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    return kinds.get(status, "invalid_request_error" if status < 500 else "server_error")


def read_object(text: str | bytes) -> dict[str, Any]:
    """Return the object of a JSON text.

    Raises:
      ValueError: the text is not a JSON object, or has numbers that JSON does not allow.
    """
    try:
        found = parse_json(text)
    except TooManyError as error:
        raise ValueError(f"must have {error}") from error
    except (ValueError, RecursionError) as error:
        shown = shorten(text) if isinstance(text, str) else f"{len(text)} bytes"
        raise ValueError(f"must be JSON, got {shown}: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"must be a JSON object, got {short(found)}")
    return found


def write(content: Any) -> bytes:
    """Return JSON text on one line, in UTF-8."""
    try:
        return json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half of a surrogate pair from a client
        return json.dumps(content).encode()


_TYPES: dict[str, Any] = {
    "null": type(None), "string": str, "integer": int, "number": int | float, "array": list, "object": dict,
}  # fmt: skip
_WORDS = {
    "boolean": "true or false", "string": "a string", "integer": "an integer", "number": "a number",
    "array": "a list", "object": "an object",
}  # fmt: skip


def check(value: Any, schema: Schema, name: str) -> None:
    """Check a value against its schema. A property that is null counts as absent.

    Args:
      value: the value.
      schema: a JSON Schema. Only `type`, `enum`, `minimum`, `maximum`, `minLength`, `maxLength`, `minItems`,
        `maxItems`, `items`, `properties` and `required` are checked.
      name: name of the value in errors.

    Raises:
      ApiError: the value does not match.
    """
    types = schema.get("type", ())
    types = [types] if isinstance(types, str) else list(types)
    if types and not any(_is_of(value, one) for one in types):
        words = " or ".join(_WORDS[one] for one in types if one != "null")
        raise ApiError(f"{name} must be {words}, got {short(value)}", name)
    if "enum" in schema and value not in schema["enum"]:
        known = ", ".join(str(one) for one in schema["enum"] if one is not None)
        raise ApiError(f"{name} must be one of {known}, got {short(value)}", name)
    if is_a(value, int | float):
        _check_bounds(value, schema.get("minimum"), schema.get("maximum"), name, value)
    if isinstance(value, str):
        _check_bounds(len(value), schema.get("minLength"), schema.get("maxLength"), name, value, "character")
    if isinstance(value, list):
        _check_bounds(len(value), schema.get("minItems"), schema.get("maxItems"), name, value, "item")
        for i, one in enumerate(value if "items" in schema and not _are_whole(value, schema["items"]) else ()):
            check(one, schema["items"], f"{name}[{i}]")
    if isinstance(value, dict):
        for key in schema.get("required", ()):
            if value.get(key) is None:
                raise ApiError(f"{name} must have {key}, got {short(list(value))}", f"{name}.{key}")
        for key, one in schema.get("properties", {}).items():
            if value.get(key) is not None:
                check(value[key], one, f"{name}.{key}")


def _are_whole(values: list[Any], schema: Schema) -> bool:
    """Return whether all values match a schema of integers. One call for the list is faster than one per value."""
    if schema.get("type") != "integer" or set(map(type, values)) != {int}:
        return False
    return bool(schema.get("minimum", -math.inf) <= min(values) and max(values) <= schema.get("maximum", math.inf))


def _is_of(value: Any, kind: str) -> bool:
    return isinstance(value, bool) if kind == "boolean" else is_a(value, _TYPES[kind])


def _check_bounds(
    size: float, minimum: float | None, maximum: float | None, name: str, value: Any, unit: str = ""
) -> None:
    """Raise an `ApiError` if `size` is out of range. Without a `unit`, the value is its own size."""
    is_less = minimum is not None and size < minimum
    if is_less or (maximum is not None and size > maximum):
        word, bound = ("least", minimum) if is_less else ("most", maximum)
        needed = f"have at {word} {bound} {unit}{'' if bound == 1 else 's'}" if unit else f"be at {word} {bound}"
        raise ApiError(f"{name} must {needed}, got {short(value)}", name)


_EMPTY: Schema = {"enum": [None, [], {}], "description": "Ignored if empty; other values are refused."}
_NOTHING: Schema = {"enum": [None, False, 0, "", [], {}]}
_NAME: Schema = {"anyOf": [{"type": "string"}, _NOTHING]}
_SOME = {"type": "string", "minLength": 1}
_URL = {
    "type": "string",
    "format": "uri",
    "description": "A data URL. Other URLs only if the server allows them.",
}
_UUID = {
    "type": ["string", "null"],
    "minLength": 1,
    "maxLength": MAX_UUID,
    "description": "The client's id of the image or video.",
}
_DETAIL = {"enum": [*DETAILS, None], "description": "low: at most 512 x 512 pixels; other values: the default size."}


def _object(properties: Schema, *required: str, rest: Any = False) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": rest}


def _part(kind: str, key: str, value: Schema, **more: Schema) -> dict[str, Any]:
    """Return the schema of a message part. `type` is optional if it equals the key."""
    if kind == key:
        return _object({"type": {"enum": [kind, None]}, key: value, **more}, key)
    return _object({"type": {"enum": [kind]}, key: value, **more}, "type", key)


def _linked(**more: Schema) -> dict[str, Any]:
    """Return the schema of a URL, either a string or an object with `url`."""
    return {"anyOf": [_URL, _object({"url": _URL, **more}, "url")]}


_TEXTS = [{"type": "string"}, *(_part(kind, key, {"type": "string"}) for kind, key in TEXT_KEYS.items())]
_MEDIA = [
    _part("image_url", "image_url", _linked(detail=_DETAIL), uuid=_UUID),
    _part("input_image", "image_url", _URL, detail=_DETAIL, uuid=_UUID),
    _object({"type": {"enum": ["input_image"]}, "file_id": _SOME, "detail": _DETAIL}, "type", "file_id"),
    _object({"type": {"enum": ["image"]}, "library": _SOME, "id": _SOME}, "type", "library", "id"),
    _part("video_url", "video_url", _linked(), uuid=_UUID),
]


def _content(*parts: Schema) -> dict[str, Any]:
    return {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": {"anyOf": list(parts)}}]}


def _message(*roles: str, needs: str = "content", **properties: Schema) -> dict[str, Any]:
    known = {"role": {"enum": list(roles)}, "name": _NAME, "tool_call_id": _NAME, **_OR_NOT, **properties}
    return _object(known, "role", needs, rest=_EMPTY)


_CALLS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "function": {
                "type": "object",
                "properties": {"name": _SOME},
                "required": ["name"],
                "description": "`name`, and `arguments` as JSON text.",
            }
        },
        "required": ["function"],
    },
}
# Fields of a message in addition to its content or instead of it. Chat templates use those of assistant messages.
_SAID: dict[str, Any] = {
    "tool_calls": {**_CALLS, "minItems": 1},
    "reasoning": _SOME,
    "reasoning_content": _SOME,
    "refusal": _SOME,
}
_OR_NOT: dict[str, Any] = {"tool_calls": {"anyOf": [_CALLS, _NOTHING]}} | {
    name: _NAME for name in _SAID if name != "tool_calls"
}

MESSAGE: Schema = {
    "type": "object",
    "required": ["role"],
    "properties": {"role": {"type": "string", "enum": list(ROLES)}, "content": {"type": ["string", "array", "null"]}},
    "anyOf": [
        _message("user", content=_content(*_TEXTS, *_MEDIA)),
        _message(*(role for role in ROLES if role != "user"), content=_content(*_TEXTS)),
        *(_message(*ROLES, needs=name, content={"enum": [None, []]}, **{name: said}) for name, said in _SAID.items()),
    ],
}


SAMPLING = tuple(field.name for field in dataclasses.fields(SamplingParams))

MAX_MESSAGES = 1 << 16  # maximum messages of a conversation; no model has room for more
TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
FLAG: Schema = {"type": ["boolean", "null"]}
OBJECT: Schema = {"type": ["object", "null"]}
_LABEL = "A label for the client's own use. It does not affect the answer."
EFFORTS = (None, "none", "minimal", "low", "medium", "high", "xhigh", "max")


def described(schema: Schema, description: str) -> Schema:
    """Return the schema with a description."""
    return {**schema, "description": description}


def _sampling(name: str) -> Schema:
    """Return the schema of a field of `SamplingParams`, which checks the field itself."""
    if name in NUMBERS:
        kind, minimum, maximum = NUMBERS[name]
        return {
            "type": ["integer" if kind is numbers.Integral else "number", "null"],
            "minimum": minimum,
            "maximum": maximum,
        }
    if name in LISTS:
        kind, max_items = LISTS[name]
        items = {"type": "string", "minLength": 1} if kind is str else {"type": "integer", "minimum": 0}
        types = ["array", "null", *(["string"] if name == "stop" else [])]
        schema = {"type": types, "items": items, "maxItems": max_items}
        return schema | ({"minItems": 1} if name == "allowed_token_ids" else {})
    if name == "structured_outputs":
        return described(OBJECT, "Form of the answer, one of json, regex, choice, ...; see `StructuredOutputs`.")
    if name == "logit_bias":
        return {"type": ["object", "null"], "additionalProperties": {"type": "number"}}
    return FLAG


_STREAM_OPTIONS = {
    "type": ["object", "null"],
    "properties": {
        "include_usage": FLAG,
        "continuous_usage_stats": FLAG,
        "include_obfuscation": described({**FLAG, "enum": [False, None]}, "Padding of events is not supported."),
    },
    "additionalProperties": False,
}
# Fields of chats and of completions.
_BOTH: dict[str, Schema] = {
    "model": described(TEXT_OR_NULL, "A name from `/v1/models`; default: the server's model."),
    **{name: _sampling(name) for name in SAMPLING},
    "prompt_logprobs": {**_sampling("prompt_logprobs"), "examples": [None]},
    "stream": described({**FLAG, "examples": [True]}, "Send the answer as server-sent events."),
    "stream_options": described(_STREAM_OPTIONS, "Options of the stream; allowed only if `stream` is true."),
    "priority": described({"type": ["integer", "null"]}, "Lower values run first among the requests of one tenant."),
    "cache_salt": described(
        {"type": ["string", "null"], "minLength": 1, "maxLength": 1024},
        "Cached images of this request are reused only by requests with the same salt.",
    ),
    "reuse": described(
        {"type": ["string", "number", "null"]}, "Reuse mode of cached images; `/v1/models` lists the allowed values."
    ),
    "donors": described(
        TEXT_OR_NULL, "Contexts from which cached images are linked: any, own or neutral; at most the server's."
    ),
    "compress": described(TEXT_OR_NULL, "KV compression policy after prefill, if the server allows it."),
    "response_format": described(OBJECT, "Form of the answer: `json_object` or `json_schema`."),
    "return_token_ids": described(FLAG, "Also return the token ids of the prompt and the answers."),
    "return_tokens_as_token_ids": described(FLAG, "Name tokens in log probabilities as `token_id:7`, not by text."),
    "return_cache_report": described(FLAG, "Also return `cache`, a report of each image's reuse."),
    "request_id": described(
        {"type": ["string", "null"], "minLength": 1, "maxLength": 256}, "The end of the answer's id; default: random."
    ),
    **{
        name: described({}, _LABEL)
        for name in ("user", "metadata", "safety_identifier", "prompt_cache_key", "session_id")
    },
    "prompt_cache_retention": described(TEXT_OR_NULL, "Accepted for compatibility, without effect."),
}
CHAT: Mapping[str, Schema] = {
    "messages": {
        "type": "array",
        "minItems": 1,
        "maxItems": MAX_MESSAGES,
        "description": "OpenAI's messages: text, `image_url` and `video_url` parts, also as data URLs.",
        "examples": [[{"role": "user", "content": "Where is the star?"}]],
        "items": MESSAGE,
    },
    **_BOTH,
    "max_completion_tokens": _sampling("max_tokens"),
    "logprobs": {**FLAG, "examples": [True]},
    "top_logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": MAX_LOGPROBS},
    "tools": described(
        {"type": ["array", "null"], "items": {"type": "object"}, "maxItems": MAX_TOOLS},
        "Functions that the answer may call.",
    ),
    "tool_choice": described({"type": ["string", "object", "null"]}, "auto, none, required, or a function's name."),
    "parallel_tool_calls": described(FLAG, "false: at most one call."),
    "reasoning_effort": described(
        {"type": ["string", "null"], "enum": list(EFFORTS)},
        "none turns off thinking. Values other than none and medium need a chat template that supports them.",
    ),
    "include_reasoning": described(FLAG, "false: leave out the reasoning and its tokens."),
    "mm_processor_kwargs": described(
        OBJECT, "Image and video limits, such as min_pixels and max_pixels of images or fps of videos."
    ),
    "chat_template_kwargs": described(OBJECT, "Variables of the chat template."),
    "add_generation_prompt": FLAG,
    "continue_final_message": described(FLAG, "Continue the last message instead of starting a new one."),
}
TEXT: Mapping[str, Schema] = {
    "prompt": {
        "type": ["string", "array"],
        "minItems": 1,
        "description": "A text, a list of texts, token ids, or a list of lists of token ids.",
        "examples": ["A star is"],
    },
    **_BOTH,
}

TOKENIZE: Mapping[str, Schema] = {
    **{name: CHAT[name] for name in ("model", "messages", "mm_processor_kwargs", "chat_template_kwargs")},
    **{name: CHAT[name] for name in ("add_generation_prompt", "continue_final_message")},
    "prompt": described(TEXT_OR_NULL, "A text, instead of `messages`."),
    "add_special_tokens": described(FLAG, "false is allowed only if the tokenizer adds no special tokens."),
    "return_token_strs": described(FLAG, "Also return the tokens as texts."),
}
DETOKENIZE: Mapping[str, Schema] = {
    "model": CHAT["model"],
    "tokens": {"type": "array", "items": {"type": "integer", "minimum": 0}},
}

# Fields that are not supported, and their values without effect, which are accepted.
_ABSENT_IN_BOTH: Mapping[str, tuple[Any, ...]] = {
    "store": (None, False),
    "service_tier": (None, "auto", "default"),
    "verbosity": (None, "medium"),
    "prompt_cache_options": (None, {}, {"mode": "implicit"}, {"ttl": "30m"}, {"mode": "implicit", "ttl": "30m"}),
    "moderation": (None,),
    "echo": (None, False),
    "spaces_between_special_tokens": (None, True),
    "truncate_prompt_tokens": (None,),
    "truncation_side": (None,),
    "return_prompt_text": (None, False),
    "logprob_token_ids": (None, []),
    "repetition_detection": (None,),
    "stream_interval": (None, 1),
    "vllm_xargs": (None, {}),
    "kv_transfer_params": (None,),
    "ec_transfer_params": (None,),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1),
}
ABSENT_IN_CHAT: Mapping[str, tuple[Any, ...]] = {
    **_ABSENT_IN_BOTH,
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "documents": (None, []),
    "media_io_kwargs": (None, {}),
    "add_special_tokens": (None, False),
}
ABSENT_IN_TEXT: Mapping[str, tuple[Any, ...]] = {
    **_ABSENT_IN_BOTH,
    "suffix": (None, ""),
    "best_of": (None, 1),
    "add_special_tokens": (None, True),
}

# Remedies in errors about fields that are not supported.
_INSTEAD: Mapping[str, str] = {
    "store": "remove it, or use /v1/responses, which stores responses",
    "service_tier": "set priority",
    "verbosity": "state the length of the answer in a message",
    "prompt_cache_options": "remove it; the server's options control the cache",
    "audio": "answers are text",
    "modalities": "answers are text",
    "prediction": "remove it; it does not affect answers",
    "background": "remove it, and wait for the answer",
    "conversation": "set previous_response_id",
    "container": "code runs in the client's tools",
    "mcp_servers": "connect the client to them, and offer their tools in tools",
    "media_io_kwargs": "set fps and num_frames in the video's part or in mm_processor_kwargs",
    "chat_template": "start the server with --chat-template",
    "truncate_prompt_tokens": "send a shorter text",
    "max_tokens_per_query": "send a shorter query",
    "max_tokens_per_doc": "send shorter documents",
    "embed_dtype": "vectors are float32",
    "endianness": "vectors are little-endian",
    "use_activation": "vectors have length 1, and scores are probabilities",
}

# Fields of `SamplingParams` that are also checked here: they differ in a chat, or may have other types in Python.
_ALSO_CHECKED = ("logprobs", "logit_bias")


def check_fields(
    body: Mapping[str, Any], known: Mapping[str, Schema], absent: Mapping[str, tuple[Any, ...]], also: Collection[str]
) -> dict[str, Any]:
    """Return the fields of a body that are not null. Those of `SamplingParams` are not checked here.

    Args:
      body: the JSON object.
      known: schemas of the fields, by name.
      absent: fields that are not supported, with the values without effect, which are accepted.
      also: names of other fields, which the caller checks.

    Raises:
      ApiError: a field is unknown, not supported, or does not match its schema.
    """
    check_absent(body, absent)
    for name, value in body.items():
        if name in absent or name in also:
            continue
        if name not in known:
            raise ApiError(unknown(name, known, GUIDED, where="body"), shorten(name))
        if value is not None and (name not in SAMPLING or name in _ALSO_CHECKED):
            check(value, known[name], name)
    return {name: value for name, value in body.items() if value is not None and name not in absent}


def check_absent(body: Mapping[str, Any], absent: Mapping[str, tuple[Any, ...]], section: str = "") -> None:
    """Check that fields that are not supported have no effect.

    Args:
      body: the JSON object.
      absent: the accepted values, by field.
      section: prefix of the fields' names in errors, such as "text.".

    Raises:
      ApiError: a field has another value.
    """
    for name, allowed in absent.items():
        if not any(is_same(body.get(name), one) for one in allowed):
            instead = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
            raise ApiError(f"{section}{name} is not supported, got {short(body[name])}{instead}", section + name)


def check_known(given: Collection[Any], known: Collection[str], where: str) -> None:
    """Raise an `ApiError` if an object within a body has an unknown field.

    Args:
      given: names of its fields.
      known: names of the known fields.
      where: name of the object in errors, such as "tools[0]".
    """
    for name in given:
        if name not in known:
            raise ApiError(unknown(name, known, where=where), where)


def is_same(value: Any, other: Any) -> bool:
    """Return whether two JSON values are equal. Unlike in Python, `true` differs from 1."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def sampling_params(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    """Return sampling parameters.

    Args:
      given: fields of the request.
      defaults: values of fields that the request does not set.

    Raises:
      ApiError: a value has the wrong type or is out of range.
    """
    try:
        return SamplingParams(**{**defaults, **given})
    except ValueError as error:
        name = re.split(r"\W", str(error), maxsplit=1)[0]
        raise ApiError(str(error), name if name in SAMPLING else None) from error
