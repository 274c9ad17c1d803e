"""Handlers of requests that are answered with text: parsing in threads, then an answer as JSON or as events."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

from starlette.types import Receive, Scope, Send

from vlcache_jax.async_llm import AsyncLLM
from vlcache_jax.calls.groups import NotFiniteError, RequestError
from vlcache_jax.common.checks import short
from vlcache_jax.common.json_files import AT_ONCE
from vlcache_jax.inputs.prompt import TemplateOptions, template_text
from vlcache_jax.outputs import OutputCollector, RequestDelta, SearchBegun, SearchRound
from vlcache_jax.protocol import xml_tools
from vlcache_jax.protocol.answers import Answer, ChatFormat, CompletionAnswer, answer_id
from vlcache_jax.protocol.anthropic_answers import MessageAnswer
from vlcache_jax.protocol.requests import ChatRequest, CompletionRequest, TokenizeRequest
from vlcache_jax.protocol.response_answers import ResponseAnswer
from vlcache_jax.protocol.schema import ApiError, read_object, write
from vlcache_jax.request_options import RequestOptions
from vlcache_jax.sampling import SamplingParams
from vlcache_jax.server.admission import TENANT, AdmissionControl, ClientGoneError, HealthCheck, read_body
from vlcache_jax.server.config import ServerConfig
from vlcache_jax.server.http_layer import IdMaker, answer_json, as_api_error, merged, until_gone
from vlcache_jax.server.metrics import ServerMetrics
from vlcache_jax.server.tenants import Register, Tenant, salted

# A large body may take seconds to parse. Small ones must not wait for it.
_large = ThreadPoolExecutor(2, "vlcache-bodies")


async def read_off_loop[R](read: Callable[[dict[str, Any], Tenant | None], R], body: bytes, tenant: Tenant | None) -> R:
    """Return the request that `read` makes from a body. It runs in a thread and does not block the event loop.

    Args:
      read: function from the JSON object and the tenant to the request.
      body: JSON text.
      tenant: the tenant of the request; None if it has none.

    Raises:
      ApiError: the body is not a JSON object, or `read` refuses it.
    """

    def work() -> R:
        return read(parse_object(body), tenant)

    return await asyncio.get_running_loop().run_in_executor(_large if len(body) > AT_ONCE else None, work)


def parse_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body.

    Raises:
      ApiError: the body is not a JSON object.
    """
    try:
        return read_object(body)
    except ValueError as error:
        api_error = ApiError(f"body {error}")
    raise api_error  # outside of the handler: its context would keep the error that has the text


def check_allowed_tokens(given: Mapping[str, Any], vocab_size: int) -> None:
    """Check the length of `allowed_token_ids` before its elements are checked.

    Raises:
      ApiError: the list is longer than the vocabulary.
    """
    allowed = given.get("allowed_token_ids")
    if isinstance(allowed, list) and len(allowed) > vocab_size:
        message = f"allowed_token_ids must have at most the vocabulary's {vocab_size} tokens, got {len(allowed)}"
        raise ApiError(message, "allowed_token_ids")


SILENCE = 10.0  # seconds without an event after which a keep-alive comment is sent
_STALL = 60.0  # seconds that a client may take to read a message
_EVENTS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))

type Writer = Answer | ResponseAnswer | MessageAnswer
type Update = RequestDelta | SearchBegun | SearchRound
type Events = AsyncGenerator[tuple[int, Update] | None]


@dataclass(frozen=True)
class ModelNames:
    """Names of the model that requests may use.

    Attributes:
      known: the names of `/v1/models`. The first one is used in answers.
      accepts_any: True if requests may use every name, which answers then repeat.
    """

    known: tuple[str, ...]
    accepts_any: bool = False

    def resolve(self, name: str | None) -> str:
        """Return the model's name in the answer to a request with `name`; None is any model.

        Raises:
          ApiError: the request names another model (status 404).
        """
        if name is not None and name not in self.known and not self.accepts_any:
            message = f"model must be {' or '.join(self.known)}, got {short(name)}"
            raise ApiError(message, "model", 404, "model_not_found")
        return name if self.accepts_any and name is not None else self.known[0]


class Inference[R: (ChatRequest, CompletionRequest)](ABC):
    """Handler of one kind of request (an ASGI application).

    Args:
      engine: the engine.
      config: options of the server.
      models: names of the model that requests may use.
      admission: admission control.
      metrics: counters of requests and tokens.
      register: the tenants; None if the server has none.
      names: generator of the answers' ids.
      health_check: check of the engine after an error.
    """

    prefix: ClassVar[str]
    """Prefix of the answers' ids."""
    field: ClassVar[str]
    """The body's field for the prompt."""
    max_field: ClassVar[str] = "max_tokens"
    """The body's field for the maximum length of answers in tokens."""
    longest: ClassVar[str] = "leave it out for the longest answer that fits"
    """How a client requests the longest answer, in errors."""
    keep_alive: ClassVar[bytes] = b": keep-alive\n\n"
    """Bytes that keep a silent stream open in proxies and clients: a comment, or an event without content."""
    done: ClassVar[bytes] = b"data: [DONE]\n\n"
    """The end of a stream."""

    def __init__(
        self,
        engine: AsyncLLM,
        config: ServerConfig,
        models: ModelNames,
        admission: AdmissionControl,
        metrics: ServerMetrics,
        register: Register | None,
        names: IdMaker,
        health_check: HealthCheck,
    ):
        self.engine, self.config, self._names, self._health_check = engine, config, names, health_check
        self.models, self._admission, self._metrics, self._register = models, admission, metrics, register

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = _Sender(send, self.keep_alive, self.done)
        try:
            with self._admission.enter(scope) as place:
                body = await read_body(scope, receive, self.config, place)
                answering = self._answer(body, sender, scope.get(TENANT))
                del body  # images are large, and answers take long
                await until_gone(receive, answering)
        except ClientGoneError:
            pass
        except Exception as error:
            if not sender.has_begun:
                await self._health_check.refuse(error, scope)(scope, receive, send)
                return
            self._health_check.count(error)
            with contextlib.suppress(ClientGoneError):
                await sender.event(sender.failed(as_api_error(error)))
                await sender.end()
            await self._health_check.look(error)

    async def _answer(self, body: bytes, sender: _Sender, tenant: Tenant | None) -> None:
        request = await read_off_loop(self._read, body, tenant)
        del body
        await self._answer_request(request, sender, tenant)

    def _check_max_tokens(self, max_tokens: int | None) -> None:
        """Refuse a maximum length of more than `max_model_len`, as OpenAI and vLLM do."""
        if max_tokens is not None and max_tokens > self.engine.max_model_len:
            name = self.max_field
            raise ApiError(
                f"{name} must be at most max_model_len = {self.engine.max_model_len}, got {max_tokens}; {self.longest}",
                name,
            )

    async def _answer_request(self, request: R, sender: _Sender, tenant: Tenant | None) -> None:
        prompts = self._prompts(request)
        count = request.params.n * len(prompts)
        self._check_max_tokens(request.params.max_tokens)
        model = self.models.resolve(request.options.model)
        self._check(request, count, tenant)
        options = request.options
        salted_options = salted(request.request_options, self._register, tenant)
        request = dataclasses.replace(request, request_options=salted_options)
        answer = self._begin(request, self._names.new(self.prefix), model)
        sender.failed = answer.failed
        fields = [f"{self.field}[{i}]" for i in range(len(prompts))] if len(prompts) > 1 else [self.field]
        if len(prompts) > 1:
            await self._check_prompts(prompts, request, fields)
        streams = [self._deltas(prompt, request, field) for prompt, field in zip(prompts, fields, strict=True)]
        with self._admission.answering(tenant, count):
            async with contextlib.aclosing(merged(streams, SILENCE, self._admission.ended)) as events:
                if options.stream:
                    last = list(await self._stream(events, answer, sender))
                    await self._keep(request, answer, tenant)
                    await sender.event(*last)
                    await sender.end()
                else:
                    whole = await self._whole(events, len(streams), answer)
                    await self._keep(request, answer, tenant)
                    await sender.respond(whole)

    async def _check_prompts(self, prompts: Sequence[Any], request: R, fields: Sequence[str]) -> None:
        """Check all prompts of a request before the first one runs and its first event is sent."""
        try:
            await self.engine.check(prompts, request.params, options=request.request_options)
        except RequestError as error:
            raise self._error(error, request, fields[min(error.errors)]) from error

    def _deltas(self, prompt: Any, request: R, field: str) -> AsyncGenerator[Update]:
        """Return the updates of one prompt; `field` names it in errors."""
        return self._turn(prompt, request, request.params, field)

    async def _turn(self, prompt: Any, request: R, params: SamplingParams, field: str) -> AsyncGenerator[RequestDelta]:
        stream = self.engine.deltas(prompt, params, options=request.request_options, **self._template(request))
        try:
            async with contextlib.aclosing(stream) as deltas:
                async for delta in deltas:
                    yield delta
        except NotFiniteError:  # an error of the model, not of the request
            raise
        except ValueError as error:
            raise self._error(error, request, field) from error

    async def _whole(self, events: Events, prompts: int, answer: Writer) -> Mapping[str, Any]:
        collectors = [OutputCollector() for _ in range(prompts)]
        async for event in events:
            if event is not None:
                number, delta = event
                assert isinstance(delta, RequestDelta)
                self._note(delta)
                collectors[number].add(delta)
        outputs = [collector.output() for collector in collectors]
        whole = answer.whole(outputs)
        for i, output in enumerate(outputs):
            self._metrics.answered(answer.counts_of(i), output.metrics)
        return whole

    async def _stream(self, events: Events, answer: Writer, sender: _Sender) -> Iterable[Mapping[str, Any]]:
        async for event in events:
            if event is None:
                await sender.keep_alive()
                continue
            number, delta = event
            await sender.event(*self._pieces(delta, number, answer))
            if sender.silence > SILENCE:  # new tokens, but no new text
                await sender.keep_alive()
        return answer.last()

    def _pieces(self, delta: Update, number: int, answer: Writer) -> Sequence[Mapping[str, Any]]:
        """Return the events of an update, and count it in the metrics."""
        if isinstance(delta, SearchBegun | SearchRound):
            assert isinstance(answer, ResponseAnswer)
            return list(answer.pieces(delta))
        self._note(delta)
        pieces = list(answer.pieces(delta, number))
        if delta.finished:
            self._metrics.answered(answer.counts_of(number), delta.metrics)
        return pieces

    def _note(self, delta: RequestDelta) -> None:
        self._metrics.gaps(delta.metrics)
        for one in delta.outputs:
            if one.finish_reason is not None:
                self._metrics.ended(one.finish_reason)

    def _check(self, request: R, n: int, tenant: Tenant | None) -> None:
        if n > self.config.max_n:
            raise ApiError(f"n times the number of prompts must be at most max_n = {self.config.max_n}, got {n}", "n")
        check_reuse(self.engine, self.config, request.request_options, tenant)
        allowed = self.config.allow_compress if tenant is None or tenant.compress is None else tenant.compress
        if (compress := request.request_options.compress) is not None and compress not in allowed:
            option = "--allow-compress" if tenant is None or tenant.compress is None else "the key file"
            known = " or ".join(allowed) or "absent"
            raise ApiError(
                f"compress must be {known} on this server, got {short(compress)}; its operator can allow other values "
                f"with {option}",
                "compress",
            )

    def _error(self, error: ValueError, request: R, field: str) -> ApiError:
        """Return `error` as an `ApiError` that names fields of the body; `field` is the one that holds the prompt."""
        return as_api_error(error, field, request.options.form)

    def _read(self, body: dict[str, Any], tenant: Tenant | None) -> R:
        check_allowed_tokens(body, self.engine.service.checkpoint.config.text.vocab_size)
        return self._parse(body, tenant)

    @abstractmethod
    def _parse(self, body: dict[str, Any], tenant: Tenant | None) -> R:
        """Return the request of a body."""

    @abstractmethod
    def _prompts(self, request: R) -> Sequence[Any]:
        """Return the prompts of a request for the engine."""

    @abstractmethod
    def _begin(self, request: R, name: str, model: str) -> Writer:
        """Return the writer of an answer with the id `name`."""

    async def _keep(self, request: R, answer: Writer, tenant: Tenant | None) -> None:  # noqa: B027 - most keep nothing
        """Store a complete answer before its end is sent to the client."""

    def _template(self, request: R) -> TemplateOptions:
        """Return the options of the chat template."""
        return {}


class Chats(Inference[ChatRequest]):
    """Handler of `/v1/chat/completions`."""

    prefix, field = "chatcmpl-", "messages"

    def __init__(self, engine: AsyncLLM, config: ServerConfig, *given: Any):
        super().__init__(engine, config, *given)
        self._format = ChatFormat(
            engine.service.renderer,
            None if config.chat_template is None else template_text(config.chat_template),
            calls=config.tool_call_parser != "none",
            xml_calls=None if config.tool_call_parser == "auto" else config.tool_call_parser in xml_tools.FORMS,
            thoughts=config.reasoning_parser != "none",
        )

    def _parse(self, body: dict[str, Any], tenant: Tenant | None) -> ChatRequest:
        return self._chat_request(body)

    def _chat_request(self, found: dict[str, Any]) -> ChatRequest:
        if found.get("chat_template") is not None:  # a template is a program
            raise ApiError(
                "chat_template is not supported in requests, because a template can loop forever", "chat_template"
            )
        return self._format.request(found, {"max_tokens": None})

    def _begin(self, request: ChatRequest, name: str, model: str) -> Writer:
        return self._format.answer(request, name, model)

    def _prompts(self, request: ChatRequest) -> Sequence[Any]:
        return [request.messages]

    def _template(self, request: ChatRequest) -> TemplateOptions:
        return template_of(request, self.config)


class Completions(Inference[CompletionRequest]):
    """Handler of `/v1/completions`."""

    prefix, field = "cmpl-", "prompt"

    def _parse(self, body: dict[str, Any], tenant: Tenant | None) -> CompletionRequest:
        return CompletionRequest.parse(body)

    def _begin(self, request: CompletionRequest, name: str, model: str) -> Writer:
        return CompletionAnswer(answer_id(name, request.options), model, request.options, request.params.n)

    def _prompts(self, request: CompletionRequest) -> Sequence[Any]:
        return [one if isinstance(one, str) else {"prompt_token_ids": list(one)} for one in request.prompts]


def template_of(request: ChatRequest | TokenizeRequest, config: ServerConfig) -> TemplateOptions:
    """Return the options of the chat template: those of the request, and the server's template."""
    if config.chat_template is None:
        return request.template
    return {**request.template, "chat_template": config.chat_template}


def allowed_reuse(engine: AsyncLLM, config: ServerConfig, tenant: Tenant | None) -> list[str]:
    """Return the values of `reuse` that requests of a tenant may send. The first one is the engine's, the default."""
    others = config.allow_reuse if tenant is None or tenant.reuse is None else tenant.reuse
    return list(dict.fromkeys(map(str, (engine.service.config.reuse, *others))))


def check_reuse(engine: AsyncLLM, config: ServerConfig, options: RequestOptions, tenant: Tenant | None) -> None:
    """Raise an `ApiError` if requests of the tenant may not send these values of `reuse` and `donors`."""
    reuse, allowed = options.reuse, allowed_reuse(engine, config, tenant)
    if reuse is not None and str(reuse) not in allowed:
        option = "--allow-reuse" if tenant is None or tenant.reuse is None else "the key file"
        raise ApiError(
            f"reuse must be {' or '.join(allowed)} on this server, got {short(reuse)}; its operator can allow other "
            f"values with {option}",
            "reuse",
        )
    if options.donors == "own" and config.api_keys is None:
        raise ApiError("donors must not be own on this server, because its keys have no names (--api-keys)", "donors")


def _event(content: Mapping[str, Any]) -> bytes:
    """Return a server-sent event. Events of `/v1/responses` and `/v1/messages` have names."""
    name = f"event: {content['type']}\n".encode() if "type" in content else b""
    return name + b"data: " + write(content) + b"\n\n"


class _Sender:
    """Sender of an answer, as JSON or as events.

    Attributes:
      has_begun: True once the response's head has been sent.
      failed: function from an error to an event.

    Args:
      send: ASGI's function.
      keep_alive, done: see `Inference`.
    """

    def __init__(self, send: Send, keep_alive: bytes, done: bytes):
        self.has_begun = False
        self.failed: Callable[[ApiError], Mapping[str, Any]] = ApiError.to_dict
        self._send, self._sent_at = send, time.monotonic()
        self._keep_alive, self._done = keep_alive, done

    @property
    def silence(self) -> float:
        """Seconds since the last message was sent."""
        return time.monotonic() - self._sent_at

    async def respond(self, content: Mapping[str, Any]) -> None:
        """Send the answer as JSON."""
        response = answer_json(content)
        self.has_begun = True
        await self._put({"type": "http.response.start", "status": 200, "headers": response.raw_headers})
        await self._put({"type": "http.response.body", "body": response.body})

    async def event(self, *contents: Mapping[str, Any]) -> None:
        """Send events."""
        if contents:
            await self._write(b"".join(map(_event, contents)))

    async def keep_alive(self) -> None:
        """Send what keeps the connection open in proxies and clients."""
        await self._write(self._keep_alive)

    async def end(self) -> None:
        """Send the end of the stream."""
        if self._done:
            await self._write(self._done)
        await self._put({"type": "http.response.body", "body": b""})

    async def _write(self, data: bytes) -> None:
        if not self.has_begun:
            self.has_begun = True
            await self._put({"type": "http.response.start", "status": 200, "headers": list(_EVENTS)})
        await self._put({"type": "http.response.body", "body": data, "more_body": True})

    async def _put(self, message: dict[str, Any]) -> None:
        """Send a message; raise a `ClientGoneError` if the client does not read it."""
        self._sent_at = time.monotonic()
        try:
            async with asyncio.timeout(_STALL):
                await self._send(message)
        except TimeoutError:
            raise ClientGoneError from None
