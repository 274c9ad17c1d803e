"""Sampling parameters and structured outputs, as users write them."""

from __future__ import annotations

import copy
import dataclasses
import decimal
import itertools
import json
import math
import numbers
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from vlcache_jax.common.checks import check_text, exceeds, is_a, short
from vlcache_jax.common.json_files import parse_json
from vlcache_jax.common.vllm_compat import SAMPLING, STRUCTURED, STRUCTURED_CONFIG, ours, takes_foreign

MAX_LENGTH = 1 << 16  # characters of one: what is longer may take seconds to compile
MAX_MULTIPLE = 100_000  # the same of `multipleOf`, whose automaton has as many states

MAX_REPEATS = 100_000  # of repetitions of repetitions that must come; the compiler writes out each

_SWITCHES = ("disable_any_whitespace", "enable_in_reasoning")
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
      disable_any_whitespace: no white space between the tokens of JSON. None: as the engine's
        `structured_outputs_config` says.
      whitespace_pattern: a regular expression of the white space there; None: any.
      enable_in_reasoning: it holds from the first token, also if the prompt opens the model's thinking. False: the
        model thinks freely, and the answer after `</think>` is held. None: as the engine's option says.

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
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    enable_in_reasoning: bool | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "json_object", self.json_object or False)
        for name in ("json_object", *_SWITCHES):
            if not isinstance(given := getattr(self, name), bool | None):
                raise ValueError(f"structured_outputs.{name} must be true or false, got {short(given)}")
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

    def within(self, config: StructuredOutputsConfig) -> Self:
        """Return this with an engine's switches where it has none of its own."""
        is_tight, in_reasoning = self.disable_any_whitespace, self.enable_in_reasoning
        if is_tight is None:
            is_tight = bool(config.disable_any_whitespace) and self.whitespace_pattern is None
        if in_reasoning is None:
            in_reasoning = bool(config.enable_in_reasoning)
        return dataclasses.replace(self, disable_any_whitespace=is_tight, enable_in_reasoning=in_reasoning)

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


@dataclass(frozen=True)
class StructuredOutputsConfig:
    """An engine's `structured_outputs_config`.

    Attributes:
      disable_any_whitespace, enable_in_reasoning: see `StructuredOutputs`, which comes first; None: not given.
    """

    disable_any_whitespace: bool | None = None
    enable_in_reasoning: bool | None = None

    @classmethod
    def of(cls, given: Any) -> Self:
        """Return the options of an object with vLLM's names; None has none.

        Raises:
          ValueError: it is no object, has unknown fields, or asks for an option that is not supported.
        """
        name = "structured_outputs_config"
        if not isinstance(given, Mapping | None):
            raise ValueError(f'{name} must be an object such as {{"disable_any_whitespace": true}}, got {short(given)}')
        options = dict(given or {})
        switches = {switch: options.pop(switch, None) for switch in _SWITCHES}
        for switch, value in switches.items():
            if not isinstance(value, bool | None):
                raise ValueError(f"{name}.{switch} must be true or false, got {short(value)}")
        if options.get("backend") == "auto":
            del options["backend"]
        try:
            ours(name, STRUCTURED_CONFIG, options, _SWITCHES)
        except TypeError as error:
            raise ValueError(str(error)) from error
        return cls(**switches)

    def over(self, other: Self) -> Self:
        """Return this with another one's options where it has none."""
        own = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        return dataclasses.replace(other, **own)


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


MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKENS = 4096
MAX_BIASED = 1024
MAX_BAD_STRINGS = 32
MAX_ALLOWED = 1 << 20  # more than any vocabulary holds, so that a list without end is an error too

NUMBERS: dict[str, tuple[Any, float, float]] = {
    "n": (numbers.Integral, 1, 1024),
    "temperature": (numbers.Real, 0, 1e9),
    "top_p": (numbers.Real, 1e-9, 1),
    "top_k": (numbers.Integral, -1, 2**31 - 1),
    "min_p": (numbers.Real, 0, 1),
    "seed": (numbers.Integral, -(2**63), 2**64 - 1),
    "max_tokens": (numbers.Integral, 1, 2**31 - 1),
    "min_tokens": (numbers.Integral, 0, 2**31 - 1),
    "repetition_penalty": (numbers.Real, 1e-9, 1e9),
    "presence_penalty": (numbers.Real, -2, 2),
    "frequency_penalty": (numbers.Real, -2, 2),
    "logprobs": (numbers.Integral, 0, MAX_LOGPROBS),
    "prompt_logprobs": (numbers.Integral, 0, MAX_LOGPROBS),
}
"""Kind, least and greatest value."""
_NEVER_NONE = ("n", "min_p", "min_tokens", "presence_penalty", "frequency_penalty")
LISTS: dict[str, tuple[Any, int]] = {
    "stop": (str, MAX_STOPS),
    "stop_token_ids": (numbers.Integral, MAX_STOP_TOKENS),
    "bad_words": (str, MAX_BAD_STRINGS),
    "allowed_token_ids": (numbers.Integral, MAX_ALLOWED),
}
"""Kind of the items, and how many there may be."""


@takes_foreign(SAMPLING)
@dataclasses.dataclass(kw_only=True)
class SamplingParams:
    """How to answer. None means what the checkpoint's `generation_config.json` says, or else the value named here.

    Attributes can be set, and are checked then. A call takes them as they are when it begins. Lists are kept as tuples,
    and `logit_bias` as pairs of a token id and a number, so that parameters can be compared.

    Attributes:
      n: answers to each prompt.
      temperature: 0 is greedy; None: greedy unless the checkpoint says `do_sample`.
      top_p: smallest set of tokens whose probability reaches it; None: 1 (all).
      top_k: only the k most likely tokens; 0 or -1: all; None: all.
      min_p: only tokens at least this many times as likely as the most likely one; 0: all.
      seed: makes an answer repeatable whatever else is in the batch, an integer of 64 bits; None or -1: drawn from the
        engine's seed.
      max_tokens: tokens to generate at most; the context's length bounds it too. None: nothing else does.
      min_tokens: no end token and no stop token before that many, and stop strings that come earlier do not count.
      stop: strings that end the answer, up to 64 of up to 1024 characters.
      include_stop_str_in_output: the stop string that ended the answer is part of its text.
      stop_token_ids: tokens that end the answer, besides the checkpoint's end tokens; up to 4096.
      ignore_eos: go on after the checkpoint's end tokens.
      repetition_penalty: above 1 discourages tokens that the prompt or the answer already holds; None: 1.
      presence_penalty: is taken from the logits of tokens that the answer already holds; -2 to 2.
      frequency_penalty: is taken from a token's logit as often as the answer already holds the token; -2 to 2.
      logit_bias: is added to the logits of these tokens, by token id, up to 1024; it stays within 100 of 0. Ids may be
        strings, as JSON has them.
      bad_words: strings that the answer must not hold, up to 32; only their usual tokens are seen, not every spelling.
      allowed_token_ids: the only tokens that may come; None: all may.
      structured_outputs: what the answer is held to; a dict with its attributes is one, too. End tokens come where the
        answer may end. Where it can only end, it does, with the reason "stop", whatever `min_tokens` and `ignore_eos`
        say. None: to nothing.
      skip_special_tokens: leave special tokens out of the text.
      logprobs: log-probabilities of the chosen and of this many most likely tokens, before all of the above; up to 20.
      prompt_logprobs: the same of the prompt's tokens.

    Raises:
      ValueError: a value of another kind, or out of range.
      TypeError: there is no such parameter; of vLLM's the error says what to write.
    """

    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 256
    min_tokens: int = 0
    stop: str | Sequence[str] | None = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None = None
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    structured_outputs: StructuredOutputs | None = None
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _DEFAULTS:
            object.__setattr__(self, name, _checked(name, value))
        else:
            ours("SamplingParams", SAMPLING, {name: value}, _DEFAULTS)

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens = {self.max_tokens}, got {self.min_tokens}")

    @classmethod
    def from_optional(cls, **given: Any) -> SamplingParams:
        """The same as the class itself, which takes None for every number; vLLM has it."""
        return cls(**given)

    def clone(self) -> SamplingParams:
        """The same parameters once more, to be set apart.

        Raises:
          ValueError: those that were set do not go together.
        """
        cloned = copy.copy(self)
        cloned.__post_init__()
        return cloned

    def resolve(self, defaults: dict[str, Any]) -> SamplingParams:
        """These parameters with nothing left open; `defaults` is the content of `generation_config.json`.

        Raises:
          ValueError: see `clone`.
        """
        fallback = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
        known = fallback | {name: defaults[name] for name in fallback if defaults.get(name) is not None}
        if not defaults.get("do_sample"):
            known["temperature"] = 0.0
        resolved = copy.copy(self)
        for name, value in known.items():
            if getattr(self, name) is None:
                setattr(resolved, name, value)
        resolved.__post_init__()
        return resolved

    @property
    def has_penalty(self) -> bool:
        """Whether tokens that came already count."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(SamplingParams)}


def _checked(name: str, value: Any) -> Any:
    """A parameter as it is kept."""
    if name == "logit_bias":
        return _checked_bias(value)
    if name == "structured_outputs":
        return StructuredOutputs.of(value)
    if name in LISTS:
        return _checked_list(name, value, *LISTS[name])
    if name not in NUMBERS:
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, got {short(value)}")
        return value
    if value is None:
        return _DEFAULTS[name] if name in _NEVER_NONE else None
    kind, low, high = NUMBERS[name]
    if not is_a(value, kind) or not _is_between(low, value, high):
        what = "an integer" if kind is numbers.Integral else "a number"
        raise ValueError(f"{name} must be {what} from {low} to {high}, got {short(value)}")
    # As published examples write them.
    return {"top_k": 0, "seed": None}.get(name, value) if value == -1 else value


def _checked_list(name: str, given: Any, item_type: Any, most: int) -> tuple[Any, ...] | None:
    """A list of strings or of token ids as a tuple; None is empty. One string is a list of it only for `stop`."""
    if given is None and name == "allowed_token_ids":  # no list allows all, and an empty one nothing
        return None
    if isinstance(given, str) and name == "stop":
        given = [given]
    try:
        if isinstance(given, str | Mapping):  # or letters or names would be taken for the items
            raise TypeError
        items = () if given is None else tuple(itertools.islice(given, most + 1))
    except TypeError as error:
        raise ValueError(f"{name} must be a list, got {short(given)}") from error
    if len(items) > most:
        raise ValueError(f"{name} must be a list of at most {most}, got {short(given)}")
    if item_type is not str and set(map(type, items)) == {int} and min(items) >= 0:  # without a call for each
        return items
    if not all(is_a(item, item_type) for item in items):
        raise ValueError(f"{name} must be {'strings' if item_type is str else 'token ids'}, got {short(given)}")
    if item_type is str and not all(0 < len(text) <= MAX_STOP_LENGTH for text in items):
        raise ValueError(f"{name} must be strings of 1 to {MAX_STOP_LENGTH} characters, got {short(items)}")
    if item_type is not str and any(token < 0 for token in items):
        raise ValueError(f"{name} must be at least 0, got {short(items)}")
    if name == "allowed_token_ids" and not items:
        raise ValueError("allowed_token_ids must be at least one token id, got none")
    return items


def _checked_bias(given: Any) -> tuple[tuple[int, float], ...]:
    """A mapping of token ids to numbers, or such pairs, as pairs in the order of the ids; within 100 of 0."""
    entries: Iterable[Any] = () if given is None else given.items() if isinstance(given, Mapping) else given
    try:
        pairs = [(_token(token), bias) for token, bias in itertools.islice(entries, MAX_BIASED + 1)]
    except (TypeError, ValueError) as error:
        raise ValueError(f"logit_bias must be numbers by token id, got {short(given)}") from error
    if len(pairs) > MAX_BIASED:
        raise ValueError(f"logit_bias must be of at most {MAX_BIASED} tokens, got {short(given)}")
    for token, bias in pairs:
        if not is_a(token, numbers.Integral) or token < 0:
            raise ValueError(f"logit_bias must be by token ids of at least 0, got {short(token)}")
        if not is_a(bias, numbers.Real) or not math.isfinite(_as_float(bias)):
            raise ValueError(f"logit_bias must be finite numbers, got {short(bias)} for token {short(token)}")
    if len(dict(pairs)) < len(pairs):  # as "5" and "05"
        raise ValueError(f"logit_bias must name each token once, got {short(given)}")
    return tuple(sorted((int(token), min(100.0, max(-100.0, float(bias)))) for token, bias in pairs))


def _token(given: Any) -> Any:
    """A token id; JSON writes those that are keys as strings."""
    return int(given) if isinstance(given, str) and given.isdecimal() and len(given) < 20 else given


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer or a fraction beyond all floats
        return math.inf


def _is_between(low: float, value: Any, high: float) -> bool:
    number = value if isinstance(value, int | np.integer) else _as_float(value)  # floats hold no 64 bits
    return bool(low <= number <= high)
