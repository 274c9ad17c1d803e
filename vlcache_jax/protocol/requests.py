"""What a client asks: bodies of requests, read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

from vlcache_jax.common.checks import short
from vlcache_jax.inputs.messages import read_tools
from vlcache_jax.inputs.prompt import TemplateOptions, thinks
from vlcache_jax.protocol.schema import (
    ABSENT_IN_CHAT,
    ABSENT_IN_TEXT,
    CHAT,
    SAMPLING,
    TEXT,
    TOKENIZE,
    ApiError,
    check_fields,
    sampling_params,
)
from vlcache_jax.protocol.tools import forced_call
from vlcache_jax.request_options import RequestOptions
from vlcache_jax.sampling import SamplingParams, StructuredOutputs

TEMPLATE = tuple(TemplateOptions.__annotations__)
_LEGACY_TOKENS = 16  # of a completion that names none, as OpenAI has it
_MAX_PROMPTS = 128
_FORM = re.compile(r"^structured_outputs(\.\w+)?")


@dataclass(frozen=True)
class Options:
    """What is asked of the server beside what the engine is asked.

    Attributes:
      model: as the client calls it; None: it does not.
      stream: whether the answer comes in pieces.
      include_usage: a stream ends with its usage.
      continuous_usage: each piece has the usage so far.
      returns_token_ids, returns_cache: what is told beside the answers.
      names_ids: log-probabilities name tokens by their ids.
      request_id: what the answer's id ends with; None: it is drawn.
      form: field of the body that says what the answer must be, if one does.
    """

    model: str | None = None
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    returns_token_ids: bool = False
    returns_cache: bool = False
    names_ids: bool = False
    request_id: str | None = None
    form: str = "structured_outputs"

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Of checked fields.

        Raises:
          ApiError: two of them do not go together.
        """
        streams, told = bool(body.get("stream")), body.get("stream_options")
        if told is not None and not streams:
            raise ApiError("stream_options must be left out where stream is not true", "stream_options")
        if streams and body.get("prompt_logprobs") is not None:
            raise ApiError("prompt_logprobs must be left out where stream is true", "prompt_logprobs")
        for key in told or {}:
            if key not in CHAT["stream_options"]["properties"]:
                raise ApiError(f"stream_options.{key} is not supported", f"stream_options.{key}")
        forms = [name for name in ("structured_outputs", "response_format", "tools") if body.get(name) is not None]
        return cls(
            model=body.get("model"),
            stream=streams,
            include_usage=bool((told or {}).get("include_usage")),
            continuous_usage=bool((told or {}).get("continuous_usage_stats")),
            returns_token_ids=bool(body.get("return_token_ids")),
            returns_cache=bool(body.get("return_cache_report")),
            names_ids=bool(body.get("return_tokens_as_token_ids")),
            request_id=body.get("request_id"),
            form=[*forms, cls.form][0],
        )


@dataclass(frozen=True)
class OutputParts:
    """What the text of an answer is told apart into.

    Attributes:
      calls: calls of tools, and the rest.
      thoughts: what was thought, and what is said.
      tells_thoughts: what was thought is told, beside what is said.
      is_held: what is said has a form of its own, and is content from its beginning.
      is_single: at most one call is told.
    """

    calls: bool = False
    thoughts: bool = False
    tells_thoughts: bool = True
    is_held: bool = False
    is_single: bool = False


@dataclass(frozen=True)
class ChatRequest:
    """The next message of a conversation is asked for.

    Attributes:
      messages: of the conversation; what is wrong with them, the renderer tells.
      params: how to answer.
      template: how messages become text, see `Template`.
      asked: of the engine, beside these.
      options: what else is asked.
      parts: what the answer is told apart into.
    """

    messages: list[Any]
    params: SamplingParams
    template: TemplateOptions = field(default_factory=TemplateOptions)
    asked: RequestOptions = field(default_factory=RequestOptions)
    options: Options = field(default_factory=Options)
    parts: OutputParts = field(default_factory=OutputParts)

    @classmethod
    def parse(cls, body: Mapping[str, Any], defaults: Mapping[str, Any], chat_template: str | None = None) -> Self:
        """Reads the body of a request for a chat completion.

        Args:
          chat_template: Jinja that holds where the body has none; it says whether thinking can be turned off.
          defaults: sampling parameters where it names none; a `seed` of -1 names none.

        Raises:
          ApiError: a field is wrong, unknown or not supported.
        """
        given = check_fields(body, CHAT, ABSENT_IN_CHAT, ("chat_template",))
        if "messages" not in given:
            raise ApiError("messages must be a list, got none", "messages")
        sampling = {name: given[name] for name in SAMPLING if name in given}
        if "max_completion_tokens" in given:
            sampling.setdefault("max_tokens", given["max_completion_tokens"])
        _read_logprobs(sampling, given.get("top_logprobs"))
        _read_format(sampling, given.get("response_format"))
        is_held = "structured_outputs" in sampling
        _read_choice(sampling, given)
        template, choice = template_options(given), given.get("tool_choice")
        if (effort := _read_effort(given, str(given.get("chat_template") or chat_template or ""))) is not None:
            template["chat_template_kwargs"] = effort
        if choice != "none":  # what forces a call is no matter of the template
            template.pop("tool_choice", None)
        return cls(
            given["messages"],
            sampling_params(_seeded(sampling), defaults),
            template,
            RequestOptions.read(given),
            Options.parse(given),
            OutputParts(
                calls=bool(given.get("tools")) and choice != "none" and not is_held,
                thoughts=True,
                tells_thoughts=given.get("include_reasoning", True),
                is_held=is_held,
                is_single=not given.get("parallel_tool_calls", True),
            ),
        )


@dataclass(frozen=True)
class CompletionRequest:
    """Prompts are to be continued.

    Attributes:
      prompts: texts, or lists of token ids.
      params: how to answer each.
      asked: of the engine, beside these.
      options: what else is asked.
    """

    prompts: tuple[str | Sequence[int], ...]
    params: SamplingParams
    asked: RequestOptions = field(default_factory=RequestOptions)
    options: Options = field(default_factory=Options)

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Reads the body of a request for a completion.

        Raises:
          ApiError: a field is wrong, unknown or not supported.
        """
        given = check_fields(body, TEXT, ABSENT_IN_TEXT, ())
        sampling = {name: given[name] for name in SAMPLING if name in given}
        _read_format(sampling, given.get("response_format"))
        params = sampling_params(_seeded(sampling), {"max_tokens": _LEGACY_TOKENS})
        return cls(_prompts(given.get("prompt")), params, RequestOptions.read(given), Options.parse(given))


@dataclass(frozen=True)
class TokenizeRequest:
    """The tokens of a text or of a conversation are asked for.

    Attributes:
      prompt: a text, or messages.
      model: as the client calls it; None: it does not.
      template, mm_processor_kwargs: of messages, see `ChatRequest`.
      returns_texts: tokens are also told as texts.
      special: whether there are those that the tokenizer adds to a text; None: nothing is asked.
    """

    prompt: str | list[Any]
    model: str | None = None
    template: TemplateOptions = field(default_factory=TemplateOptions)
    mm_processor_kwargs: Mapping[str, Any] | None = None
    returns_texts: bool = False
    special: bool | None = None

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Reads a body.

        Raises:
          ApiError: a field is wrong or unknown, or it has not either messages or a prompt.
        """
        given = check_fields(body, TOKENIZE, {}, ())
        if ("prompt" in given) == ("messages" in given):
            raise ApiError("prompt or messages must be there, and not both", "prompt")
        template = template_options(given)
        prompt, settings = given["prompt" if "prompt" in given else "messages"], given.get("mm_processor_kwargs")
        texts, special = bool(given.get("return_token_strs")), given.get("add_special_tokens")
        return cls(prompt, given.get("model"), template, settings, texts, special)


def template_options(given: Mapping[str, Any]) -> TemplateOptions:
    """What is said of the template, of all that is given."""
    return cast(TemplateOptions, {name: given[name] for name in TEMPLATE if name in given})


def _seeded(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Without a seed that is to be drawn."""
    return {name: value for name, value in sampling.items() if not (name == "seed" and value == -1)}


def _read_logprobs(sampling: dict[str, Any], top: int | None) -> None:
    """From whether and how many, as chats ask, to how many."""
    told = sampling.pop("logprobs", None)
    if top is not None and not told:
        raise ApiError(f"logprobs must be true where there are top_logprobs, got {short(told)}", "logprobs")
    if told:
        sampling["logprobs"] = top or 0


def _read_format(sampling: dict[str, Any], given: Any) -> None:
    """From what an answer must be, as OpenAI asks for it."""
    try:
        held = StructuredOutputs.from_response_format(given)
    except (TypeError, ValueError) as error:
        raise ApiError(_FORM.sub("response_format", str(error)), "response_format") from error
    if held is not None:
        if sampling.get("structured_outputs") is not None:
            raise ApiError("response_format must be left out beside structured_outputs", "response_format")
        sampling["structured_outputs"] = held


def _read_choice(sampling: dict[str, Any], given: Mapping[str, Any]) -> None:
    """From the calls that an answer must make."""
    parallel = given.get("parallel_tool_calls", True)
    try:
        read_tools(given.get("tools"))
        grammar = forced_call(given.get("tools"), given.get("tool_choice"), parallel=parallel)
        held = None if grammar is None else StructuredOutputs(grammar=grammar)
    except ValueError as error:
        told = _FORM.sub("tools", str(error))
        raise ApiError(told, re.split(r"\W", told, maxsplit=1)[0]) from error
    if held is not None:
        if sampling.get("structured_outputs") is not None:
            raise ApiError("tool_choice must be auto or none where the answer is held to a form", "tool_choice")
        sampling["structured_outputs"] = held


def _read_effort(given: Mapping[str, Any], chat_template: str) -> dict[str, Any] | None:
    """The names that a template uses, with what is asked of thinking among them; None: nothing is."""
    effort, own = given.get("reasoning_effort"), given.get("chat_template_kwargs") or {}
    if effort is None or not isinstance(own, Mapping):
        return None
    if "reasoning_effort" in chat_template:
        name, value = "reasoning_effort", effort
    elif effort == "medium" or (effort == "none" and not thinks(chat_template)):
        return None
    elif effort == "none" and "enable_thinking" in chat_template:
        name, value = "enable_thinking", False
    else:
        remedy = "take a model that does not think" if effort == "none" else "leave it out"
        raise ApiError(
            f"reasoning_effort must be one that the chat template has, got {short(effort)}: {remedy}, "
            "or set what it has in chat_template_kwargs",
            "reasoning_effort",
        )
    if own.get(name, value) != value:
        raise ApiError(
            f"reasoning_effort must be left out where chat_template_kwargs has {name}, got {short(effort)}",
            "reasoning_effort",
        )
    return {**own, name: value}


def _prompts(given: Any) -> tuple[str | Sequence[int], ...]:
    if isinstance(given, str):
        return (given,)
    if given and _are_ids(given):
        return (given,)
    if not given or len(given) > _MAX_PROMPTS:
        raise ApiError(f"prompt must be one text to {_MAX_PROMPTS} of them, got {short(given)}", "prompt")
    for i, one in enumerate(given):
        if not (isinstance(one, str) or _are_ids(one)):
            raise ApiError(f"prompt[{i}] must be a text or token ids, got {short(one)}", "prompt")
    return tuple(given)


def _are_ids(given: Any) -> bool:
    return isinstance(given, list) and set(map(type, given)) == {int}
