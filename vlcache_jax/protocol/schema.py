"""JSON of clients: the fields of requests and messages as JSON Schema, and the check of a body against it.

The parsers check by these schemas, and the server publishes them. `inputs.messages` reads messages, and takes a little
more: forms that examples of Qwen and Hugging Face use for images and videos.
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
from vlcache_jax.inputs.messages import DETAILS, MAX_UUID, MOST_TOOLS, ROLES, TEXT_KEYS
from vlcache_jax.sampling import LISTS, MAX_LOGPROBS, NUMBERS, SamplingParams

Schema = Mapping[str, Any]


class ApiError(ValueError):
    """A request that is not answered.

    Attributes:
      message: why.
      param: the field of the body that is wrong; None: no single one is.
      status: of HTTP's.
      code: OpenAI's word for it, if there is one.
      retry_after: seconds after which it may be answered; None: nobody knows.
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
        """OpenAI's error object."""
        told = {"message": self.message, "type": _kind(self.status), "param": self.param, "code": self.code}
        return {"error": told}


def _kind(status: int) -> str:
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    return kinds.get(status, "invalid_request_error" if status < 500 else "server_error")


def read_object(text: str | bytes) -> dict[str, Any]:
    """The object that a text of JSON is.

    Raises:
      ValueError: it is none, or holds numbers that JSON does not have.
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
    """The text of JSON, on one line."""
    try:
        return json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half of a surrogate pair, as a client wrote it
        return json.dumps(content).encode()


_TYPES: dict[str, Any] = {
    "null": type(None), "string": str, "integer": int, "number": int | float, "array": list, "object": dict,
}  # fmt: skip
_WORDS = {
    "boolean": "true or false", "string": "a string", "integer": "an integer", "number": "a number",
    "array": "a list", "object": "an object",
}  # fmt: skip


def check(value: Any, schema: Schema, name: str) -> None:
    """Sees that a value is as its schema says; a property that is null is as good as absent.

    Args:
      schema: of JSON Schema `type`, `enum`, `minimum`, `maximum`, `minLength`, `maxLength`, `minItems`, `maxItems`,
        `items`, `properties` and `required`; whatever else it says is not looked at.

    Raises:
      ApiError: it is not.
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
                raise ApiError(f"{name} must hold {key}, got {short(list(value))}", f"{name}.{key}")
        for key, one in schema.get("properties", {}).items():
            if value.get(key) is not None:
                check(value[key], one, f"{name}.{key}")


def _are_whole(values: list[Any], schema: Schema) -> bool:
    """Whether all are integers as a schema of integers has them, seen without a call for each."""
    if schema.get("type") != "integer" or set(map(type, values)) != {int}:
        return False
    return bool(schema.get("minimum", -math.inf) <= min(values) and max(values) <= schema.get("maximum", math.inf))


def _is_of(value: Any, kind: str) -> bool:
    return isinstance(value, bool) if kind == "boolean" else is_a(value, _TYPES[kind])


def _check_bounds(size: float, least: float | None, most: float | None, name: str, value: Any, of: str = "") -> None:
    """`of`: what the size counts; without it the value is its own size."""
    is_less = least is not None and size < least
    if is_less or (most is not None and size > most):
        word, bound = ("least", least) if is_less else ("most", most)
        told = f"have at {word} {bound} {of}{'' if bound == 1 else 's'}" if of else f"be at {word} {bound}"
        raise ApiError(f"{name} must {told}, got {short(value)}", name)


_EMPTY: Schema = {"enum": [None, [], {}], "description": "What is empty says nothing."}
_NOTHING: Schema = {"enum": [None, False, 0, "", [], {}]}
_NAME: Schema = {"anyOf": [{"type": "string"}, _NOTHING]}
_SOME = {"type": "string", "minLength": 1}
_URL = {
    "type": "string",
    "format": "uri",
    "description": "A data URL; others where the server allows them.",
}
_UUID = {
    "type": ["string", "null"], "minLength": 1, "maxLength": MAX_UUID, "description": "The client's own id of it."
}  # fmt: skip
_DETAIL = {"enum": [*DETAILS, None], "description": "low: at most 512 x 512 pixels; the others: as large as is usual."}


def _object(properties: Schema, *required: str, rest: Any = False) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": rest}


def _part(kind: str, key: str, value: Schema, **more: Schema) -> dict[str, Any]:
    """One that is named like its key needs no type."""
    if kind == key:
        return _object({"type": {"enum": [kind, None]}, key: value, **more}, key)
    return _object({"type": {"enum": [kind]}, key: value, **more}, "type", key)


def _linked(**more: Schema) -> dict[str, Any]:
    """A URL, alone or as that of an object."""
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
                "description": "`name`, and `arguments` as text of JSON.",
            }
        },
        "required": ["function"],
    },
}
# What a message may have beside a content, or without one; templates use what an assistant has said.
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

MOST_MESSAGES = 1 << 16  # of a conversation; more than any context holds
TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
FLAG: Schema = {"type": ["boolean", "null"]}
OBJECT: Schema = {"type": ["object", "null"]}
_LABEL = "A label for the client's own use: no answer depends on it."
EFFORTS = (None, "none", "minimal", "low", "medium", "high", "xhigh", "max")


def told(schema: Schema, description: str) -> Schema:
    return {**schema, "description": description}


def _sampling(name: str) -> Schema:
    """Of a field of `SamplingParams`, which checks it itself."""
    if name in NUMBERS:
        kind, least, most = NUMBERS[name]
        return {
            "type": ["integer" if kind is numbers.Integral else "number", "null"],
            "minimum": least,
            "maximum": most,
        }
    if name in LISTS:
        kind, most = LISTS[name]
        items = {"type": "string", "minLength": 1} if kind is str else {"type": "integer", "minimum": 0}
        schema = {"type": ["array", "null", *(["string"] if name == "stop" else [])], "items": items, "maxItems": most}
        return schema | ({"minItems": 1} if name == "allowed_token_ids" else {})
    if name == "structured_outputs":
        return told(OBJECT, "What the answer must be, see `StructuredOutputs`: one of json, regex, choice, ...")
    if name == "logit_bias":
        return {"type": ["object", "null"], "additionalProperties": {"type": "number"}}
    return FLAG


_STREAM_OPTIONS = {
    "type": ["object", "null"],
    "properties": {
        "include_usage": FLAG,
        "continuous_usage_stats": FLAG,
        "include_obfuscation": told({**FLAG, "enum": [False, None]}, "Events are not padded."),
    },
    "additionalProperties": False,
}
# Of chats and of completions alike.
_BOTH: dict[str, Schema] = {
    "model": told(TEXT_OR_NULL, "One of the names of `/v1/models`; absent: the only model there is."),
    **{name: _sampling(name) for name in SAMPLING},
    "prompt_logprobs": {**_sampling("prompt_logprobs"), "examples": [None]},
    "stream": told({**FLAG, "examples": [True]}, "Answer in server-sent events."),
    "stream_options": told(_STREAM_OPTIONS, "With `stream` alone."),
    "priority": told({"type": ["integer", "null"]}, "Of requests of one tenant, lower ones run first."),
    "cache_salt": told(
        {"type": ["string", "null"], "minLength": 1, "maxLength": 1024},
        "Keeps what is stored of this request's images to requests of the same salt.",
    ),
    "reuse": told(
        {"type": ["string", "number", "null"]}, "What is done with known images, if the server lets requests choose."
    ),
    "compress": told(
        TEXT_OR_NULL, "What of the prompt's K, V the answer goes on with, if the server lets requests choose."
    ),
    "response_format": told(OBJECT, "`json_object`, or `json_schema`: what the answer must be."),
    "return_token_ids": told(FLAG, "Also answer with the token ids of prompt and answers."),
    "return_tokens_as_token_ids": told(FLAG, "Log-probabilities name tokens `token_id:7`, not by their texts."),
    "return_cache_report": told(FLAG, "Also answer with `cache`: what of each image was reused."),
    "request_id": told({"type": ["string", "null"], "minLength": 1, "maxLength": 256}, "The end of the answer's id."),
    **{name: told({}, _LABEL) for name in ("user", "metadata", "safety_identifier", "prompt_cache_key", "session_id")},
    "prompt_cache_retention": told(TEXT_OR_NULL, "How long a cache may keep a prompt at most: it keeps none by name."),
}
CHAT: Mapping[str, Schema] = {
    "messages": {
        "type": "array",
        "minItems": 1,
        "maxItems": MOST_MESSAGES,
        "description": "OpenAI's messages: text, `image_url` and `video_url` parts, also as data URLs.",
        "examples": [[{"role": "user", "content": "Where is the star?"}]],
        "items": MESSAGE,
    },
    **_BOTH,
    "max_completion_tokens": _sampling("max_tokens"),
    "logprobs": {**FLAG, "examples": [True]},
    "top_logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": MAX_LOGPROBS},
    "tools": told(
        {"type": ["array", "null"], "items": {"type": "object"}, "maxItems": MOST_TOOLS},
        "Functions that the answer may call.",
    ),
    "tool_choice": told({"type": ["string", "object", "null"]}, "auto, none, required, or a function by its name."),
    "parallel_tool_calls": told(FLAG, "false: at most one call."),
    "reasoning_effort": told(
        {"type": ["string", "null"], "enum": list(EFFORTS)},
        "none: the chat template's thinking is off. Others are for templates that have them; medium is the default.",
    ),
    "include_reasoning": told(FLAG, "false: nothing is told of what was thought, nor of its tokens."),
    "mm_processor_kwargs": told(OBJECT, "min_pixels and max_pixels of images; fps and the like of videos."),
    "chat_template_kwargs": told(OBJECT, "Names that the chat template uses."),
    "add_generation_prompt": FLAG,
    "continue_final_message": told(FLAG, "The answer goes on with the last message."),
}
TEXT: Mapping[str, Schema] = {
    "prompt": {
        "type": ["string", "array"],
        "minItems": 1,
        "description": "A text, a list of texts, token ids, or a list of such.",
        "examples": ["A star is"],
    },
    **_BOTH,
}

TOKENIZE: Mapping[str, Schema] = {
    **{name: CHAT[name] for name in ("model", "messages", "mm_processor_kwargs", "chat_template_kwargs")},
    **{name: CHAT[name] for name in ("add_generation_prompt", "continue_final_message")},
    "prompt": told(TEXT_OR_NULL, "A text, in place of messages."),
    "add_special_tokens": told(FLAG, "false: only if the tokenizer adds none."),
    "return_token_strs": told(FLAG, "Also answer with the tokens as texts."),
}
DETOKENIZE: Mapping[str, Schema] = {
    "model": CHAT["model"],
    "tokens": {"type": "array", "items": {"type": "integer", "minimum": 0}},
}

# What there is not: the values that ask for nothing.
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
    "thinking_token_budget": (None,),
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

# What to write in place of some of these.
_INSTEAD: Mapping[str, str] = {
    "store": "leave it out, or ask /v1/responses, which keeps responses",
    "service_tier": "set priority",
    "verbosity": "say in a message how long the answer is to be",
    "prompt_cache_options": "leave it out: what is cached is for the server's options",
    "audio": "answers are text",
    "modalities": "answers are text",
    "prediction": "leave it out: it would change no answer",
    "background": "leave it out, and wait for the answer",
    "conversation": "set previous_response_id",
    "media_io_kwargs": "write fps and num_frames beside the video, or in mm_processor_kwargs",
    "chat_template": "start the server with --chat-template",
    "truncate_prompt_tokens": "send a shorter text",
    "max_tokens_per_query": "send a shorter query",
    "max_tokens_per_doc": "send shorter documents",
    "embed_dtype": "vectors are float32",
    "endianness": "vectors are little-endian",
    "use_activation": "vectors have length 1, and scores are probabilities",
}

# Of what `SamplingParams` checks itself, what means something else in a chat, or may be other than JSON has it.
_ALSO_CHECKED = ("logprobs", "logit_bias")


def check_fields(
    body: Mapping[str, Any], known: Mapping[str, Schema], absent: Mapping[str, tuple[Any, ...]], also: Collection[str]
) -> dict[str, Any]:
    """The fields of a body that say something, checked but for those of `SamplingParams`.

    Args:
      known: by name, what they may hold.
      absent: by name, the only values of what there is not.
      also: names that are known, and left to the caller.

    Raises:
      ApiError: one is unknown, not supported, or of another type.
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
    """See that fields of what there is not ask for nothing.

    Args:
      absent: by name, the values that do so.
      section: where in a body they are, such as "text.".

    Raises:
      ApiError: one asks for something.
    """
    for name, allowed in absent.items():
        if not any(is_same(body.get(name), one) for one in allowed):
            instead = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
            raise ApiError(f"{section}{name} is not supported, got {short(body[name])}{instead}", section + name)


def is_same(value: Any, other: Any) -> bool:
    """Whether they are equal; true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def sampling_params(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters of what is given, and where it says nothing of the defaults.

    Raises:
      ApiError: a value of another type, or out of range.
    """
    try:
        return SamplingParams(**{**defaults, **given})
    except ValueError as error:
        name = re.split(r"\W", str(error), maxsplit=1)[0]
        raise ApiError(str(error), name if name in SAMPLING else None) from error
