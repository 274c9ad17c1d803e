"""Untrusted JSON files: reading, and checking of every field before anything is built from it.

A number out of bounds would otherwise hang or crash later, in code that does not know the file. The bounds exceed every
existing model, but they limit the work that a number can cause.
"""

from __future__ import annotations

import codecs
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vlcache_jax.common.checks import is_a, short

_MAX_BYTES = 64 << 20
AT_ONCE = 1 << 19
"""Largest text in bytes that one call of `json` parses. The call holds the GIL, for 20 ms at most."""
MAX_VALUES = 1 << 21
"""Maximum number of integers in a larger text: the ids of 128 prompts of 16384 tokens. Other values count as eight."""
_WEIGHT = 8
MAX_DEPTH = 200
"""Maximum nesting of lists and objects."""
_SHORT = 1 << 16  # longest string, in characters, that is read in one call
_PIECE = 1 << 20  # bytes or characters that are decoded in one call
_MAX_DIGITS = 4300  # of a number; Python's default limit for integers
_SPACE = re.compile(r"[ \t\n\r]{0,65536}+")
_INTEGERS = re.compile(r"(?:-?(?:0|[1-9][0-9]{0,17})[ \t\n\r]{0,64}+,[ \t\n\r]{0,64}+){16,4096}+")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]{1,1048576}+')
# Halves of a surrogate pair stay together.
_ESCAPES = re.compile(
    r'(?:\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|["\\/bfnrt])'
    r'[^"\\\x00-\x1f]{0,16}+){1,16384}+'
)
_scan: Callable[[str, int], tuple[str, int]] = json.decoder.scanstring  # type: ignore[attr-defined]
_NUMBER = re.compile(rf"[-+.0-9eE]{{0,{_MAX_DIGITS + 1}}}")


@dataclass(frozen=True)
class Kind:
    """Allowed values of a field.

    Attributes:
      words: description that follows "must be" in errors.
      accepts: test of a value.
    """

    words: str
    accepts: Callable[[Any], bool]


def whole(minimum: int, maximum: int) -> Kind:
    return Kind(
        f"an integer from {minimum} to {maximum}",
        lambda value: is_a(value, int) and minimum <= value <= maximum,
    )


def real(minimum: float, maximum: float) -> Kind:
    return Kind(
        f"a finite number from {minimum:g} to {maximum:g}",
        lambda value: is_a(value, (int, float)) and minimum <= value <= maximum,
    )


def listed(kind: Kind, limit: int) -> Kind:
    return Kind(
        f"a list of at most {limit} entries, each {kind.words}",
        lambda value: isinstance(value, list) and len(value) <= limit and all(map(kind.accepts, value)),
    )


def one_of(*names: str) -> Kind:
    return Kind(f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names)


def either(first: Kind, second: Kind) -> Kind:
    return Kind(f"{first.words} or {second.words}", lambda value: first.accepts(value) or second.accepts(value))


def optional(kind: Kind) -> Kind:
    return either(kind, Kind("null", lambda value: value is None))


FLAG = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("a string", lambda value: isinstance(value, str))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))


def read_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a JSON file that contains an object.

    Raises:
      ValueError: the file is not a regular file, is larger than 64 MiB, is not JSON, is nested too deep, or contains
        another type.
    """
    path = pathlib.Path(path)
    try:
        if not path.is_file():
            raise ValueError("not a regular file")
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"more than {_MAX_BYTES} bytes")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be a JSON file: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must be a JSON file that contains an object, got {short(content)}")
    return content


def check_fields(
    values: Mapping[str, Any],
    kinds: Mapping[str, Kind],
    source: str | os.PathLike[str] | None = None,
    *,
    section: str = "",
    required: bool = False,
) -> None:
    """Check the fields named in `kinds`; other fields are ignored.

    Args:
      values: fields of the file.
      kinds: allowed values by field.
      source: path of the file, for errors.
      section: path of the object in the file, such as "text_config.".
      required: treat a missing field as null; otherwise missing fields are skipped.

    Raises:
      ValueError: a field has another value; the message names the field and the file.
    """
    of = "" if source is None else f" of {os.fspath(source)}"
    for key, kind in kinds.items():
        if (required or key in values) and not kind.accepts(values.get(key)):
            raise ValueError(f"{section}{key}{of} must be {kind.words}, got {short(values.get(key))}")


class TooManyError(ValueError):
    """A JSON text has more values than the limit."""


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text. Texts above `AT_ONCE` bytes are parsed in pieces, so that other threads run in between.

    Raises:
      TooManyError: the text is above `AT_ONCE` bytes and has more than `MAX_VALUES` values.
      ValueError: the text is not JSON, is nested too deep, or has numbers that JSON does not allow.
    """
    if len(text) > AT_ONCE:
        return _Pieces(text if isinstance(text, str) else _decoded(text)).whole()
    try:
        value = json.loads(text, parse_constant=_finite, parse_float=_finite)
    except RecursionError:
        raise _too_deep() from None
    if _is_deep(value):
        raise _too_deep()
    return value


def _is_deep(value: Any) -> bool:
    """Return whether lists and objects are nested in more than `MAX_DEPTH` levels."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [one for one in level if isinstance(one, dict | list)]
        if not level:
            return False
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
    return True


def _too_deep() -> ValueError:
    return ValueError(f"lists and objects must be at most {MAX_DEPTH} levels deep")


def _decoded(data: bytes) -> str:
    """Return the text of `data`, decoded in pieces with the encodings of `json.loads`."""
    decoder = codecs.getincrementaldecoder(json.detect_encoding(data))("surrogatepass")
    pieces = [decoder.decode(data[i : i + _PIECE]) for i in range(0, len(data), _PIECE)]
    return "".join([*pieces, decoder.decode(b"", final=True)])


def _finite(text: str) -> float:
    """Return the number. NaN and infinities are not JSON, and readers of the results may reject them."""
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"a number must have at most {_MAX_DIGITS} digits")
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not a finite number")
    return number


class _Pieces:
    """Parser of a large JSON text. One call reads one value, a run of integers or a part of a string."""

    def __init__(self, text: str):
        self._text, self._left, self._depth = text, MAX_VALUES, 0
        self._scalar = json.JSONDecoder(parse_constant=_finite, parse_float=_finite).scan_once  # type: ignore[attr-defined]
        self._keys: dict[str, str] = {}

    def whole(self) -> Any:
        value, end = self._value(self._after_space(0))
        if (end := self._after_space(end)) != len(self._text):
            raise json.JSONDecodeError("Extra data", self._text, end)
        return value

    def _value(self, place: int) -> tuple[Any, int]:
        self._count(_WEIGHT)
        match self._text[place : place + 1]:
            case '"':
                return self._string(place + 1)
            case "[":
                return self._within(self._list, place + 1)
            case "{":
                return self._within(self._object, place + 1)
        found = _NUMBER.match(self._text, place)
        if found is not None and len(found[0]) > _MAX_DIGITS:
            raise ValueError(f"a number must have at most {_MAX_DIGITS} digits")
        try:
            return self._scalar(self._text, place)
        except StopIteration:
            raise json.JSONDecodeError("Expecting value", self._text, place) from None

    def _within(self, read: Callable[[int], tuple[Any, int]], place: int) -> tuple[Any, int]:
        """Read a value one level deeper."""
        if self._depth == MAX_DEPTH:
            raise _too_deep()
        self._depth += 1
        found = read(place)
        self._depth -= 1
        return found

    def _list(self, place: int) -> tuple[list[Any], int]:
        values: list[Any] = []
        place = self._after_space(place)
        if self._text[place : place + 1] == "]":
            return values, place + 1
        while True:
            if found := _INTEGERS.match(self._text, place):
                run = json.loads(f"[{found[0].rstrip()[:-1]}]")
                self._count(len(run))
                values += run
                place = self._after_space(found.end())
                continue
            value, place = self._value(place)
            values.append(value)
            place, is_last = self._after_value(place, "]")
            if is_last:
                return values, place

    def _object(self, place: int) -> tuple[dict[str, Any], int]:
        values: dict[str, Any] = {}
        place = self._after_space(place)
        if self._text[place : place + 1] == "}":
            return values, place + 1
        while True:
            if self._text[place : place + 1] != '"':
                message = "Expecting property name enclosed in double quotes"
                raise json.JSONDecodeError(message, self._text, place)
            key, place = self._string(place + 1)
            place = self._after_space(place)
            if self._text[place : place + 1] != ":":
                raise json.JSONDecodeError("Expecting ':' delimiter", self._text, place)
            value, place = self._value(self._after_space(place + 1))
            values[self._keys.setdefault(key, key)] = value
            place, is_last = self._after_value(place, "}")
            if is_last:
                return values, place

    def _after_value(self, place: int, end: str) -> tuple[int, bool]:
        """Return the index of the next value, or of the text after `end`, and whether the value was the last one."""
        place = self._after_space(place)
        char = self._text[place : place + 1]
        if char == end:
            return place + 1, True
        if char != ",":
            raise json.JSONDecodeError("Expecting ',' delimiter", self._text, place)
        return self._after_space(place + 1), False

    def _string(self, place: int) -> tuple[str, int]:
        """Return a string and the index after its closing quote; `place` is the index of its first character."""
        end = self._text.find('"', place, place + _SHORT)
        if end >= 0 and self._text.find("\\", place, end) < 0:
            return _scan(self._text, place)
        begin, parts = place, list[str]()
        while True:
            if found := _PLAIN.match(self._text, place):
                parts.append(found[0])
            elif found := _ESCAPES.match(self._text, place):
                parts.append(_scan(f'{found[0]}"', 0)[0])
            else:  # the end of the string, or an error
                try:
                    last, end = _scan(self._text, place)
                except json.JSONDecodeError as error:
                    at = begin - 1 if error.msg.startswith("Unterminated") else error.pos
                    raise json.JSONDecodeError(error.msg, self._text, at) from None
                return "".join([*parts, last]), end
            place = found.end()

    def _after_space(self, place: int) -> int:
        while True:
            found = _SPACE.match(self._text, place)
            assert found is not None
            if found.end() == place:
                return place
            place = found.end()

    def _count(self, values: int) -> None:
        self._left -= values
        if self._left < 0:
            raise TooManyError(f"at most {MAX_VALUES} integers, or {MAX_VALUES // _WEIGHT} other values")
