"""What an answer is held to, as users say it: JSON of a schema, a regular expression, some texts, or a grammar."""

from __future__ import annotations

import decimal
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from vlcache_jax.checks import check_text, exceeds, short
from vlcache_jax.fields import parse_json
from vlcache_jax.foreign import STRUCTURED, takes_foreign

MAX_LENGTH = 1 << 16  # characters of one: what is longer may take seconds to compile
MAX_MULTIPLE = 100_000  # the same of `multipleOf`, whose automaton has as many states

MAX_REPEATS = 100_000  # of repetitions of repetitions that must come; the compiler writes out each

_KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*([-+.\w]+)')
# What stands for itself, classes of characters, groups, and how often one is repeated.
_REPEAT = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*+\]?|(?P<open>\()|(?P<close>\))|\{(?P<least>\d{1,18})(?:,\d{0,18})?\}"
)
_ESCAPED = re.compile(r"\\u00([0-9a-fA-F]{2})")


@takes_foreign(STRUCTURED)
@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """What an answer must be; one of `json`, `json_object`, `regex`, `choice`, `grammar` and `structural_tag` is given.

    Objects are kept as their JSON text, and lists as tuples, so that what was asked can be compared.

    Attributes:
      json: a JSON schema, an object or its text. The answer is JSON that it allows.
      json_object: the answer is any JSON object.
      regex: a regular expression, which the whole answer matches. Nothing looks ahead or behind.
      choice: the answer is one of these texts.
      grammar: in the syntax of Lark as llguidance has it, or in GBNF.
      structural_tag: an object, or its text, with `structures`, each of `begin`, `schema` and `end`, and `triggers`.
        The answer is text as the model likes, but where it writes a trigger, a structure that begins with it follows.
        Tokens that are added to the vocabulary, such as `<tool_call>`, are meant as such there.
      disable_any_whitespace: no white space between the tokens of JSON.
      whitespace_pattern: a regular expression of the white space there; None: any.

    Raises:
      ValueError: it is none of these, or too long.
      TypeError: there is no such argument; of vLLM's the error says what to write.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(given := getattr(self, name) or False, bool):
                raise ValueError(f"structured_outputs.{name} must be true or false, got {short(given)}")
            object.__setattr__(self, name, given)
        for name in ("json", "structural_tag"):
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, _json_text(given, f"structured_outputs.{name}"))
        for name in ("regex", "grammar", "whitespace_pattern"):
            if getattr(self, name) is not None:
                check_text(getattr(self, name), f"structured_outputs.{name}")
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(f"structured_outputs must have one of {', '.join(_KINDS)}, got {short(given)}")
        text = self.text + (self.whitespace_pattern or "")
        if len(text) > MAX_LENGTH:
            raise ValueError(f"{self.name} must be at most {MAX_LENGTH} characters, got {len(text)}")
        _check_multiples(text, self.name)
        if self.kind in ("regex", "grammar"):
            _check_repeats(text, self.name)

    @classmethod
    def of(cls, given: Any) -> Self | None:
        """As it stands in `SamplingParams`: itself, or an object of JSON with its attributes; None asks for nothing.

        Raises:
          ValueError: it is none of these, or wrong.
        """
        if given is None or isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise ValueError(f"structured_outputs must be StructuredOutputs, got {short(given)}")
        try:
            return cls(**given)
        except TypeError as error:
            raise ValueError(f"structured_outputs: {error}") from error

    @classmethod
    def from_response_format(cls, given: Any) -> Self | None:
        """What OpenAI's `response_format` asks for; None: nothing.

        Args:
          given: `{"type": "text"}`, `{"type": "json_object"}`, `{"type": "json_schema", "json_schema": {"schema":
            ...}}`, where an answer is held to the schema whether `strict` is set or not, or vLLM's `{"type":
            "structural_tag", "structures": ..., "triggers": ...}`.

        Raises:
          ValueError: it is none of these.
        """
        kind = given.get("type") if isinstance(given, Mapping) else None
        if given is None or kind == "text":
            return None
        if kind == "json_object":
            return cls(json_object=True)
        if kind == "structural_tag":
            return cls(structural_tag=given)
        if kind != "json_schema":
            kinds = "text, json_object, json_schema or structural_tag"
            raise ValueError(f"response_format must be an object whose type is {kinds}, got {short(given)}")
        named = given.get("json_schema")
        schema = named.get("schema") if isinstance(named, Mapping) else None
        if not isinstance(schema, Mapping):
            raise ValueError(f"response_format.json_schema.schema must be an object, got {short(schema)}")
        return cls(json=schema)

    @property
    def kind(self) -> str:
        """Which of them it is."""
        return next(name for name in _KINDS if getattr(self, name) not in (None, False))

    @property
    def name(self) -> str:
        """What errors call it."""
        return f"structured_outputs.{self.kind}"

    @property
    def text(self) -> str:
        """It as text; several texts as JSON."""
        if self.json_object:
            return '{"type": "object"}'
        given = getattr(self, self.kind)
        return given if isinstance(given, str) else json.dumps(given)


def _json_text(given: Any, name: str) -> str:
    """A JSON object as text."""
    try:
        found = parse_json(given) if isinstance(given, str) else given
        if not isinstance(found, Mapping):
            raise ValueError(f"{name} must be a JSON object, got {short(given)}")
        if exceeds(found, MAX_LENGTH):
            raise ValueError(f"{name} must be at most {MAX_LENGTH} characters, got {short(given)}")
        return json.dumps(found, allow_nan=False)
    except (RecursionError, TypeError, ValueError) as error:
        if str(error).startswith(name):
            raise
        raise ValueError(f"{name} must be JSON: {str(error) or type(error).__name__}, got {short(given)}") from error


def _choices(given: Any) -> tuple[str, ...]:
    name = "structured_outputs.choice"
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise ValueError(f"{name} must be a list of texts, got {short(given)}")
    if exceeds(list(given), MAX_LENGTH):
        raise ValueError(f"{name} must be at most {MAX_LENGTH} characters, got {short(given)}")
    for text in given:
        check_text(text, name, "a list of texts")
    if not all(given):
        raise ValueError(f"{name} must be texts of at least one character, got {short(given)}")
    return tuple(given)


def _check_multiples(text: str, name: str) -> None:
    """What all `multipleOf` in a text come to together, apart from powers of ten, is the size of an automaton."""
    together = 1
    for found in _MULTIPLE.findall(_ESCAPED.sub(lambda escaped: chr(int(escaped[1], 16)), text)):
        try:
            _, written, exponent = decimal.Decimal(found).as_tuple()
        except decimal.InvalidOperation:  # the compiler says what is wrong with it
            continue
        digits = "".join(map(str, written)).rstrip("0")
        zeros = exponent + len(written) - len(digits) if isinstance(exponent, int) else math.inf
        is_usual = abs(zeros) < 20 and len(digits) < 20
        if is_usual and digits not in ("", "1"):
            together = math.lcm(together, int(digits) * 10 ** max(int(zeros), 0))
        if together > MAX_MULTIPLE or not is_usual:
            raise ValueError(f"{name} must have multipleOf of a common multiple up to {MAX_MULTIPLE}, got {found:.40}")


def _check_repeats(text: str, name: str) -> None:
    """What counts of repetitions within each other multiply to is the size of an expression."""
    levels, closed = [1], 1  # repetitions in each open group; in the one that was closed last
    end = -1  # of that one
    for found in _REPEAT.finditer(text):
        if found["open"]:
            levels.append(1)
        elif found["close"]:
            closed, end = levels.pop(), found.end()
            levels = levels or [1]  # it was no group's
            levels[-1] = max(levels[-1], closed)
        elif found["least"]:
            times = int(found["least"]) * (inner := closed if found.start() == end else 1)
            levels[-1] = max(levels[-1], times)
            if times > MAX_REPEATS and inner > 1:  # of what is not nested, the compiler says it
                raise ValueError(f"{name} must have repetitions of at most {MAX_REPEATS} together, got {times}")
