"""JSON from clients: read, checked against the schema that is published for it, and refused by field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from vlcache_jax.checks import is_a, short, shorten
from vlcache_jax.fields import TooManyError, parse_json

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
      name: of the field.

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
