"""Messages of chats by role, as JSON Schema. `inputs.parts` reads them, and takes a little more: what
examples of Qwen and Hugging Face write of pictures and videos.
"""

from __future__ import annotations

from typing import Any

from vlcache_jax.inputs.parts import DETAILS, MAX_UUID, ROLES, TEXT_KEYS
from vlcache_jax.protocol.values import Schema

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
