"""Public sampling parameters and structured outputs."""

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

MAX_LENGTH = 1 << 16  # maximum characters of a grammar: longer ones may take seconds to compile
MAX_MULTIPLE = 100_000  # maximum of `multipleOf`: its automaton has as many states

MAX_REPEATS = 100_000  # maximum product of nested minimum repetitions: the compiler writes out each of them

_SWITCHES = ("disable_any_whitespace", "enable_in_reasoning")
_KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*([-+.\w]+)')
# Escaped characters, character classes, groups, and repetition counts.
_REPEAT = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*+\]?|(?P<open>\()|(?P<close>\))|\{(?P<min>\d{1,18})(?:,\d{0,18})?\}")
_ESCAPED = re.compile(r"\\u00([0-9a-fA-F]{2})")


@takes_foreign(STRUCTURED)
@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """Format of an answer: exactly one of `json`, `json_object`, `regex`, `choice`, `grammar` and `structural_tag`.

    Objects are stored as JSON text and lists as tuples, so that instances can be compared.

    Attributes:
      json: a JSON schema, as an object or a text. The answer is JSON that matches it. Default None, as of the others.
      json_object: the answer is any JSON object. Default False.
      regex: a regular expression that the whole answer matches. Lookahead and lookbehind are not supported.
      choice: a list of texts; the answer is one of them.
      grammar: a grammar in llguidance's Lark syntax, or in GBNF.
      structural_tag: an object, or its text, with `structures`, each of `begin`, `schema` and `end`, and `triggers`.
        The answer is free text, but a trigger in it begins one of the structures. Tokens added to the vocabulary, such
        as `<tool_call>`, are read as these tokens in it.
      disable_any_whitespace: allow no white space between JSON tokens. None: the engine's `structured_outputs_config`.
      whitespace_pattern: a regular expression for white space between JSON tokens; None: any.
      enable_in_reasoning: apply the format from the first token, also if the prompt opens the model's reasoning. False:
        only after `</think>`. None: the engine's `structured_outputs_config`.

    Raises:
      ValueError: none or several formats are set, a value has the wrong type, or it is too long.
      TypeError: an argument is unknown; for arguments of vLLM, the message names the equivalent.
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
            raise ValueError(f"structured_outputs must have exactly one of {', '.join(_KINDS)}, got {short(given)}")
        text = self.text + (self.whitespace_pattern or "")
        if len(text) > MAX_LENGTH:
            raise ValueError(f"{self.name} must be at most {MAX_LENGTH} characters, got {len(text)}")
        _check_multiples(text, self.name)
        if self.kind in ("regex", "grammar"):
            _check_repeats(text, self.name)

    @classmethod
    def of(cls, given: Any) -> Self | None:
        """Return the structured outputs given by an instance, a JSON object with its attributes, or None.

        Raises:
          ValueError: `given` is of another type, or a value is wrong.
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
        """Return the structured outputs of an OpenAI `response_format`, or None if it requests none.

        Args:
          given: `{"type": "text"}`, `{"type": "json_object"}`, `{"type": "json_schema", "json_schema": {"schema":
            ...}}`, which applies the schema regardless of `strict`, or vLLM's `{"type": "structural_tag",
            "structures": ..., "triggers": ...}`.

        Raises:
          ValueError: `given` is none of these.
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
        """Return a copy that takes its unset switches from an engine's options."""
        is_tight, in_reasoning = self.disable_any_whitespace, self.enable_in_reasoning
        if is_tight is None:
            is_tight = bool(config.disable_any_whitespace) and self.whitespace_pattern is None
        if in_reasoning is None:
            in_reasoning = bool(config.enable_in_reasoning)
        return dataclasses.replace(self, disable_any_whitespace=is_tight, enable_in_reasoning=in_reasoning)

    @property
    def kind(self) -> str:
        """Name of the format that is set, such as "json"."""
        return next(name for name in _KINDS if getattr(self, name) not in (None, False))

    @property
    def name(self) -> str:
        """Name of the format in errors, such as "structured_outputs.json"."""
        return f"structured_outputs.{self.kind}"

    @property
    def text(self) -> str:
        """The format as text; a list of choices as JSON."""
        if self.json_object:
            return '{"type": "object"}'
        given = getattr(self, self.kind)
        return given if isinstance(given, str) else json.dumps(given)


@dataclass(frozen=True)
class StructuredOutputsConfig:
    """Defaults of structured outputs, the engine's `structured_outputs_config`.

    Attributes:
      disable_any_whitespace, enable_in_reasoning: see `StructuredOutputs`, whose values take precedence. Default None.
    """

    disable_any_whitespace: bool | None = None
    enable_in_reasoning: bool | None = None

    @classmethod
    def of(cls, given: Any) -> Self:
        """Return the options of an object with vLLM's names, or of None.

        Raises:
          ValueError: `given` is not an object, or has an unknown or unsupported option.
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
        """Return a copy that takes its unset options from `other`."""
        own = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        return dataclasses.replace(other, **own)


def _json_text(given: Any, name: str) -> str:
    """Return a JSON object as text; raise a ValueError that begins with `name` if it is none."""
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
    """Raise a ValueError if the common multiple of all `multipleOf`, the size of the automaton, is too large."""
    together = 1
    for found in _MULTIPLE.findall(_ESCAPED.sub(lambda escaped: chr(int(escaped[1], 16)), text)):
        try:
            _, written, exponent = decimal.Decimal(found).as_tuple()
        except decimal.InvalidOperation:  # the compiler reports it
            continue
        digits = "".join(map(str, written)).rstrip("0")
        zeros = exponent + len(written) - len(digits) if isinstance(exponent, int) else math.inf
        is_usual = abs(zeros) < 20 and len(digits) < 20
        if is_usual and digits not in ("", "1"):
            together = math.lcm(together, int(digits) * 10 ** max(int(zeros), 0))
        if together > MAX_MULTIPLE or not is_usual:
            raise ValueError(
                f"{name} must have multipleOf values with a common multiple of at most {MAX_MULTIPLE}, got {found:.40}"
            )


def _check_repeats(text: str, name: str) -> None:
    """Raise a ValueError if nested repetitions multiply to an expression that is too large."""
    levels, closed = [1], 1  # repetitions in each open group, and in the group that was closed last
    end = -1  # where that group ended
    for found in _REPEAT.finditer(text):
        if found["open"]:
            levels.append(1)
        elif found["close"]:
            closed, end = levels.pop(), found.end()
            levels = levels or [1]  # an unmatched parenthesis
            levels[-1] = max(levels[-1], closed)
        elif found["min"]:
            times = int(found["min"]) * (inner := closed if found.start() == end else 1)
            levels[-1] = max(levels[-1], times)
            if times > MAX_REPEATS and inner > 1:  # the compiler reports repetitions that are not nested
                raise ValueError(f"{name} must have at most {MAX_REPEATS} nested repetitions, got {times}")


MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKENS = 4096
MAX_BIASED = 1024
MAX_BAD_STRINGS = 32
MAX_ALLOWED = 1 << 20  # larger than any vocabulary, so that an endless iterable is an error, too

NUMBERS: dict[str, tuple[Any, float, float]] = {
    "n": (numbers.Integral, 1, 1024),
    "temperature": (numbers.Real, 0, 1e9),
    "top_p": (numbers.Real, 1e-9, 1),
    "top_k": (numbers.Integral, -1, 2**31 - 1),
    "min_p": (numbers.Real, 0, 1),
    "seed": (numbers.Integral, -(2**63), 2**64 - 1),
    "max_tokens": (numbers.Integral, 1, 2**31 - 1),
    "min_tokens": (numbers.Integral, 0, 2**31 - 1),
    "thinking_token_budget": (numbers.Integral, -1, 2**31 - 1),
    "repetition_penalty": (numbers.Real, 1e-9, 1e9),
    "presence_penalty": (numbers.Real, -2, 2),
    "frequency_penalty": (numbers.Real, -2, 2),
    "logprobs": (numbers.Integral, 0, MAX_LOGPROBS),
    "prompt_logprobs": (numbers.Integral, 0, MAX_LOGPROBS),
}
"""Type, minimum and maximum of each number."""
_NEVER_NONE = ("n", "min_p", "min_tokens", "presence_penalty", "frequency_penalty")
LISTS: dict[str, tuple[Any, int]] = {
    "stop": (str, MAX_STOPS),
    "stop_token_ids": (numbers.Integral, MAX_STOP_TOKENS),
    "bad_words": (str, MAX_BAD_STRINGS),
    "allowed_token_ids": (numbers.Integral, MAX_ALLOWED),
}
"""Type of the items, and maximum length of each list."""


@takes_foreign(SAMPLING)
@dataclasses.dataclass(kw_only=True)
class SamplingParams:
    """Sampling parameters of a request. None uses the checkpoint's `generation_config.json`, or else the value below.

    Attributes can be assigned, which checks them. A call uses the values at its beginning. Lists are stored as tuples,
    and `logit_bias` as pairs of a token ID and a number, so that parameters can be compared.

    Attributes:
      n: number of outputs per prompt, 1 to 1024. Default 1.
      temperature: sampling temperature; 0 is greedy. Default None: the checkpoint's, or 1, if it sets `do_sample`;
        greedy otherwise.
      top_p: sample from the smallest set of tokens with at least this total probability. Default None: 1 (all).
      top_k: sample from the k most likely tokens; 0 or -1: all. Default None: all.
      min_p: sample from tokens at least this many times as likely as the most likely one. Default 0: all.
      seed: 64-bit integer that makes the output reproducible in any batch. Default None, or -1: drawn from the engine's
        seed.
      max_tokens: maximum number of generated tokens; `max_model_len` limits it, too. Default 256. None: no other limit.
      min_tokens: minimum number of tokens: no end token and no stop token comes before, and earlier stop strings have
        no effect. Default 0.
      thinking_token_budget: maximum number of thinking tokens. At this number a sentence and `</think>` are forced,
        about 20 tokens that count towards `max_tokens`. Then the model answers. Default None, or -1: no other limit.
      stop: a string or a list of strings that end the output, up to 64 of up to 1024 characters. Default: none.
      include_stop_str_in_output: include the stop string in the text. Default False.
      stop_token_ids: up to 4096 token IDs that end the output, in addition to the checkpoint's end tokens. Default:
        none.
      ignore_eos: continue after the checkpoint's end tokens. Default False.
      repetition_penalty: penalty of tokens in the prompt and the output; above 1 discourages them. Default None: 1.
      presence_penalty: value subtracted from the logits of all tokens in the output, -2 to 2. Default 0.
      frequency_penalty: value subtracted from a token's logit once per occurrence in the output, -2 to 2. Default 0.
      logit_bias: values added to the logits of up to 1024 token IDs, limited to -100 to 100. Keys may be strings, as in
        JSON. Default None.
      bad_words: up to 32 strings that the output must not contain. Only their usual tokens are blocked, not all
        spellings. Default None.
      allowed_token_ids: the only token IDs that may be generated. Default None: all.
      structured_outputs: format of the output, a `StructuredOutputs` or a dict with its attributes. End tokens are
        allowed where the format allows the end. If the format allows nothing else, the output ends with the reason
        "stop", regardless of `min_tokens` and `ignore_eos`. Default None: free text.
      skip_special_tokens: leave special tokens out of the text. Default True.
      logprobs: also return the log-probability of each generated token and of this many most likely ones, up to 20,
        before all of the above is applied. Default None: no log-probabilities.
      prompt_logprobs: the same for the prompt's tokens.

    Raises:
      ValueError: a value has the wrong type or is out of range.
      TypeError: a parameter is unknown; for parameters of vLLM, the message names the equivalent.
    """

    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 256
    min_tokens: int = 0
    thinking_token_budget: int | None = None
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
        """Return `SamplingParams(**given)`, as vLLM's method of this name does."""
        return cls(**given)

    def clone(self) -> SamplingParams:
        """Return a copy that can be changed independently.

        Raises:
          ValueError: `min_tokens` exceeds `max_tokens`.
        """
        cloned = copy.copy(self)
        cloned.__post_init__()
        return cloned

    def resolve(self, defaults: dict[str, Any]) -> SamplingParams:
        """Return a copy without None in temperature, top_p, top_k and repetition_penalty.

        Args:
          defaults: content of `generation_config.json`.

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
        """True if tokens that occurred before change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(SamplingParams)}


def _checked(name: str, value: Any) -> Any:
    """Return a checked value of a parameter in the form in which it is stored."""
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
    # Published examples write -1 for the default.
    return {"top_k": 0, "seed": None, "thinking_token_budget": None}.get(name, value) if value == -1 else value


def _checked_list(name: str, given: Any, item_type: Any, max_items: int) -> tuple[Any, ...] | None:
    """Return a list of strings or token IDs as a tuple, and None as an empty one. `stop` may be one string."""
    if given is None and name == "allowed_token_ids":  # None allows all tokens, an empty list would allow none
        return None
    if isinstance(given, str) and name == "stop":
        given = [given]
    try:
        if isinstance(given, str | Mapping):  # iterating would give characters or keys
            raise TypeError
        items = () if given is None else tuple(itertools.islice(given, max_items + 1))
    except TypeError as error:
        raise ValueError(f"{name} must be a list, got {short(given)}") from error
    if len(items) > max_items:
        raise ValueError(f"{name} must be a list of at most {max_items}, got {short(given)}")
    if item_type is not str and set(map(type, items)) == {int} and min(items) >= 0:  # fast path for plain integers
        return items
    if not all(is_a(item, item_type) for item in items):
        raise ValueError(f"{name} must be {'strings' if item_type is str else 'token ids'}, got {short(given)}")
    if item_type is str and not all(0 < len(text) <= MAX_STOP_LENGTH for text in items):
        raise ValueError(f"{name} must be strings of 1 to {MAX_STOP_LENGTH} characters, got {short(items)}")
    if item_type is not str and any(token < 0 for token in items):
        raise ValueError(f"{name} must be at least 0, got {short(items)}")
    if name == "allowed_token_ids" and not items:
        raise ValueError("allowed_token_ids must have at least one token id, got none")
    return items


def _checked_bias(given: Any) -> tuple[tuple[int, float], ...]:
    """Return a mapping from token IDs to numbers, or pairs of these, as sorted pairs with values from -100 to 100."""
    entries: Iterable[Any] = () if given is None else given.items() if isinstance(given, Mapping) else given
    try:
        pairs = [(_token(token), bias) for token, bias in itertools.islice(entries, MAX_BIASED + 1)]
    except (TypeError, ValueError) as error:
        raise ValueError(f"logit_bias must map token ids to numbers, got {short(given)}") from error
    if len(pairs) > MAX_BIASED:
        raise ValueError(f"logit_bias must have at most {MAX_BIASED} tokens, got {short(given)}")
    for token, bias in pairs:
        if not is_a(token, numbers.Integral) or token < 0:
            raise ValueError(f"logit_bias must have token ids of at least 0, got {short(token)}")
        if not is_a(bias, numbers.Real) or not math.isfinite(_as_float(bias)):
            raise ValueError(f"logit_bias must be finite numbers, got {short(bias)} for token {short(token)}")
    if len(dict(pairs)) < len(pairs):  # such as "5" and "05"
        raise ValueError(f"logit_bias must name each token once, got {short(given)}")
    return tuple(sorted((int(token), min(100.0, max(-100.0, float(bias)))) for token, bias in pairs))


def _token(given: Any) -> Any:
    """Return a token ID as an integer; JSON writes keys as strings."""
    return int(given) if isinstance(given, str) and given.isdecimal() and len(given) < 20 else given


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer or a fraction beyond the range of floats
        return math.inf


def _is_between(low: float, value: Any, high: float) -> bool:
    number = value if isinstance(value, int | np.integer) else _as_float(value)  # floats lack 64 bits of precision
    return bool(low <= number <= high)
