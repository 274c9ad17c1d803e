"""Requests for chat completions, completions and tokens, parsed from their bodies."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

from vlcache_jax.common.checks import short
from vlcache_jax.inputs.messages import read_tools
from vlcache_jax.inputs.prompt import TemplateOptions, calls_in_xml, thinks
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
_LEGACY_TOKENS = 16  # OpenAI's default `max_tokens` of a completion
_MAX_PROMPTS = 128
_FORM = re.compile(r"^structured_outputs(\.\w+)?")


@dataclass(frozen=True)
class Options:
    """Options of a request that concern its answer object, not the engine.

    Attributes:
      model: name of the model in the request; None if it has none.
      stream: True to send the answer as events.
      include_usage: True to end a stream with its usage.
      continuous_usage: True to add the usage so far to each chunk.
      returns_token_ids: True to return the token ids of the prompt and the answers.
      returns_cache: True to return the cache report.
      names_ids: True to name tokens by their ids in log probabilities.
      request_id: end of the answer's id; None for a random one.
      form: field of the body that constrains the answer, for errors.
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
        """Return the options of checked fields.

        Raises:
          ApiError: two fields cannot be combined, or a stream option is not supported.
        """
        streams, stream_options = bool(body.get("stream")), body.get("stream_options")
        if stream_options is not None and not streams:
            raise ApiError("stream_options requires stream to be true", "stream_options")
        if streams and body.get("prompt_logprobs") is not None:
            raise ApiError("prompt_logprobs is not supported if stream is true", "prompt_logprobs")
        for key in stream_options or {}:
            if key not in CHAT["stream_options"]["properties"]:
                raise ApiError(f"stream_options.{key} is not supported", f"stream_options.{key}")
        forms = [name for name in ("structured_outputs", "response_format", "tools") if body.get(name) is not None]
        return cls(
            model=body.get("model"),
            stream=streams,
            include_usage=bool((stream_options or {}).get("include_usage")),
            continuous_usage=bool((stream_options or {}).get("continuous_usage_stats")),
            returns_token_ids=bool(body.get("return_token_ids")),
            returns_cache=bool(body.get("return_cache_report")),
            names_ids=bool(body.get("return_tokens_as_token_ids")),
            request_id=body.get("request_id"),
            form=[*forms, cls.form][0],
        )


@dataclass(frozen=True)
class OutputParts:
    """Parts that the text of an answer is parsed into.

    Attributes:
      calls: True to parse tool calls.
      thoughts: True to parse reasoning.
      returns_thoughts: True to return the reasoning.
      is_held: True if structured outputs constrain the answer. Its text is then content from the beginning.
      is_single: True to return at most one call.
      xml_tools: offered tools, if the model writes calls as `protocol.xml_tools` reads them. None: calls are JSON.
    """

    calls: bool = False
    thoughts: bool = False
    returns_thoughts: bool = True
    is_held: bool = False
    is_single: bool = False
    xml_tools: Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class ChatRequest:
    """Request for the next message of a conversation.

    Attributes:
      messages: messages of the conversation, which the renderer checks.
      params: sampling parameters.
      template: options of the chat template.
      request_options: other options for the engine, such as `reuse`.
      options: options of the answer object.
      parts: parts that the answer is parsed into.
    """

    messages: list[Any]
    params: SamplingParams
    template: TemplateOptions = field(default_factory=TemplateOptions)
    request_options: RequestOptions = field(default_factory=RequestOptions)
    options: Options = field(default_factory=Options)
    parts: OutputParts = field(default_factory=OutputParts)

    @classmethod
    def parse(
        cls, body: Mapping[str, Any], defaults: Mapping[str, Any], chat_template: str | None = None,
        xml_calls: bool | None = None,
    ) -> Self:  # fmt: skip
        """Parse the body of a request for a chat completion.

        Args:
          body: the JSON object.
          defaults: sampling parameters that the body does not set. A `seed` of -1 counts as not set.
          chat_template: Jinja text, used if the body has none. It shows whether thinking can be turned off.
          xml_calls: see `ChatFormat`.

        Raises:
          ApiError: a field is wrong, unknown or not supported.
        """
        given = check_fields(body, CHAT, ABSENT_IN_CHAT, ("chat_template",))
        if "messages" not in given:
            raise ApiError("messages is required", "messages")
        sampling = {name: given[name] for name in SAMPLING if name in given}
        if "max_completion_tokens" in given:
            sampling.setdefault("max_tokens", given["max_completion_tokens"])
        _read_logprobs(sampling, given.get("top_logprobs"))
        _read_format(sampling, given.get("response_format"))
        is_held = "structured_outputs" in sampling
        used_template = str(given.get("chat_template") or chat_template or "")
        xml_calls = calls_in_xml(used_template) if xml_calls is None else xml_calls
        _read_choice(sampling, given, xml_calls)
        template, choice = template_options(given), given.get("tool_choice")
        if (effort := _read_effort(given, used_template)) is not None:
            template["chat_template_kwargs"] = effort
        if choice != "none":  # a grammar forces calls, not the template
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
                returns_thoughts=given.get("include_reasoning", True),
                is_held=is_held,
                is_single=not given.get("parallel_tool_calls", True),
                xml_tools=read_tools(given.get("tools")) if xml_calls else None,
            ),
        )


@dataclass(frozen=True)
class CompletionRequest:
    """Request for the continuation of prompts.

    Attributes:
      prompts: texts, or lists of token ids.
      params: sampling parameters of all prompts.
      request_options: other options for the engine, such as `reuse`.
      options: options of the answer object.
    """

    prompts: tuple[str | Sequence[int], ...]
    params: SamplingParams
    request_options: RequestOptions = field(default_factory=RequestOptions)
    options: Options = field(default_factory=Options)

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Parse the body of a request for a completion.

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
    """Request for the tokens of a text or of a conversation.

    Attributes:
      prompt: a text, or messages.
      model: name of the model in the request; None if it has none.
      template: options of the chat template.
      mm_processor_kwargs: limits of images and videos in messages.
      returns_texts: True to also return the tokens as texts.
      special: the request's `add_special_tokens`; None if it is not set.
    """

    prompt: str | list[Any]
    model: str | None = None
    template: TemplateOptions = field(default_factory=TemplateOptions)
    mm_processor_kwargs: Mapping[str, Any] | None = None
    returns_texts: bool = False
    special: bool | None = None

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Parse a body.

        Raises:
          ApiError: a field is wrong or unknown, or the body does not have exactly one of `messages` and `prompt`.
        """
        given = check_fields(body, TOKENIZE, {}, ())
        if ("prompt" in given) == ("messages" in given):
            raise ApiError("exactly one of prompt and messages is required", "prompt")
        template = template_options(given)
        prompt, settings = given["prompt" if "prompt" in given else "messages"], given.get("mm_processor_kwargs")
        texts, special = bool(given.get("return_token_strs")), given.get("add_special_tokens")
        return cls(prompt, given.get("model"), template, settings, texts, special)


def template_options(given: Mapping[str, Any]) -> TemplateOptions:
    """Return the options of the chat template among the fields of a body."""
    return cast(TemplateOptions, {name: given[name] for name in TEMPLATE if name in given})


def _seeded(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters without a `seed` of -1, which stands for a random one."""
    return {name: value for name, value in sampling.items() if not (name == "seed" and value == -1)}


def _read_logprobs(sampling: dict[str, Any], top: int | None) -> None:
    """Replace a chat's boolean `logprobs` by the number of `top_logprobs`, as in `SamplingParams`."""
    is_on = sampling.pop("logprobs", None)
    if top is not None and not is_on:
        raise ApiError(f"logprobs must be true if top_logprobs is set, got {short(is_on)}", "logprobs")
    if is_on:
        sampling["logprobs"] = top or 0


def _read_format(sampling: dict[str, Any], given: Any) -> None:
    """Set `structured_outputs` from OpenAI's `response_format`."""
    try:
        held = StructuredOutputs.from_response_format(given)
    except (TypeError, ValueError) as error:
        raise ApiError(_FORM.sub("response_format", str(error)), "response_format") from error
    if held is not None:
        if sampling.get("structured_outputs") is not None:
            raise ApiError("response_format and structured_outputs are mutually exclusive, got both", "response_format")
        sampling["structured_outputs"] = held


def _read_choice(sampling: dict[str, Any], given: Mapping[str, Any], xml_calls: bool) -> None:
    """Set `structured_outputs` from a `tool_choice` that forces calls."""
    parallel = given.get("parallel_tool_calls", True)
    try:
        read_tools(given.get("tools"))
        grammar = forced_call(given.get("tools"), given.get("tool_choice"), parallel=parallel, is_xml=xml_calls)
        held = None if grammar is None else StructuredOutputs(grammar=grammar)
    except ValueError as error:
        message = _FORM.sub("tools", str(error))
        raise ApiError(message, re.split(r"\W", message, maxsplit=1)[0]) from error
    if held is not None:
        if sampling.get("structured_outputs") is not None:
            raise ApiError(
                "tool_choice must be auto or none if response_format or structured_outputs is set, got "
                f"{short(given.get('tool_choice'))}",
                "tool_choice",
            )
        sampling["structured_outputs"] = held


def _read_effort(given: Mapping[str, Any], chat_template: str) -> dict[str, Any] | None:
    """Return the template's variables with that of `reasoning_effort`; None if the effort needs no variable.

    Raises:
      ApiError: the chat template does not support the effort, or `chat_template_kwargs` has another value.
    """
    effort, own = given.get("reasoning_effort"), given.get("chat_template_kwargs") or {}
    if effort is None or not isinstance(own, Mapping):
        return None
    if effort == "none" and "enable_thinking" in chat_template:
        name, value = "enable_thinking", False
    elif "reasoning_effort" in chat_template:
        name, value = "reasoning_effort", effort
    elif effort == "medium" or (effort == "none" and not thinks(chat_template)):
        return None
    else:
        remedy = "use a model that does not think" if effort == "none" else "remove it"
        raise ApiError(
            f"reasoning_effort must be a value that the chat template supports, got {short(effort)}: {remedy}, "
            "or set the template's own variables in chat_template_kwargs",
            "reasoning_effort",
        )
    if own.get(name, value) != value:
        raise ApiError(
            f"reasoning_effort {short(effort)} contradicts {name} in chat_template_kwargs; set only one of them",
            "reasoning_effort",
        )
    return {**own, name: value}


def _prompts(given: Any) -> tuple[str | Sequence[int], ...]:
    if isinstance(given, str):
        return (given,)
    if given and _are_ids(given):
        return (given,)
    if not given or len(given) > _MAX_PROMPTS:
        raise ApiError(f"prompt must be 1 to {_MAX_PROMPTS} texts or lists of token ids, got {short(given)}", "prompt")
    for i, one in enumerate(given):
        if not (isinstance(one, str) or _are_ids(one)):
            raise ApiError(f"prompt[{i}] must be a text or token ids, got {short(one)}", "prompt")
    return tuple(given)


def _are_ids(given: Any) -> bool:
    return isinstance(given, list) and set(map(type, given)) == {int}
