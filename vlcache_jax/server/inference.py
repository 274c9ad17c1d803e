"""Requests that are answered with text: from a body, which threads read and check, to an answer, whole or as events."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

from starlette.types import Receive, Scope, Send

from vlcache_jax.async_llm import AsyncLLM
from vlcache_jax.calls.groups import NotFiniteError, RequestError
from vlcache_jax.common.checks import short
from vlcache_jax.common.json_files import AT_ONCE
from vlcache_jax.inputs.prompt import TemplateOptions, template_text
from vlcache_jax.outputs import OutputCollector, RequestDelta, SearchBegun, SearchRound
from vlcache_jax.protocol.answers import Answer, ChatFormat, CompletionAnswer, answer_id
from vlcache_jax.protocol.requests import ChatRequest, CompletionRequest, TokenizeRequest
from vlcache_jax.protocol.response_answers import ResponseAnswer
from vlcache_jax.protocol.schema import ApiError, read_object, write
from vlcache_jax.request_options import Reuse
from vlcache_jax.sampling import SamplingParams
from vlcache_jax.server.admission import TENANT, ClientGoneError, Doubt, Entrance, read_body
from vlcache_jax.server.config import ServerConfig
from vlcache_jax.server.http_layer import IdMaker, answer_json, as_api_error, merged, until_gone
from vlcache_jax.server.metrics import ServerMetrics
from vlcache_jax.server.tenants import Register, Tenant, salted

# A large body may take seconds, for which small ones must not wait.
_large = ThreadPoolExecutor(2, "vlcache-bodies")


async def read_off_loop[R](read: Callable[[dict[str, Any], Tenant | None], R], body: bytes, tenant: Tenant | None) -> R:
    """What a body asks. The event loop serves others meanwhile.

    Args:
      read: makes a request of an object, in a thread.
      tenant: that sent it.

    Raises:
      ApiError: the body is no object of JSON; or what `read` raises.
    """

    def work() -> R:
        return read(parse_object(body), tenant)

    return await asyncio.get_running_loop().run_in_executor(_large if len(body) > AT_ONCE else None, work)


def parse_object(body: bytes) -> dict[str, Any]:
    """Raises an ApiError unless it is an object of JSON."""
    try:
        return read_object(body)
    except ValueError as error:
        told = ApiError(f"body {error}")
    raise told  # apart from the one that has the text


def check_allowed_tokens(given: Mapping[str, Any], vocab_size: int) -> None:
    """Raises an ApiError if more tokens are allowed than the vocabulary has, before one of them is looked at."""
    allowed = given.get("allowed_token_ids")
    if isinstance(allowed, list) and len(allowed) > vocab_size:
        told = f"allowed_token_ids must have at most the vocabulary's {vocab_size} tokens, got {len(allowed)}"
        raise ApiError(told, "allowed_token_ids")


SILENCE = 10.0  # seconds without a token, after which a comment says that the server is still there
_STALL = 60.0  # seconds that a client may take to read what is sent
_EVENTS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))

type Writer = Answer | ResponseAnswer
type More = RequestDelta | SearchBegun | SearchRound
type Events = AsyncGenerator[tuple[int, More] | None]


class Inference[R: (ChatRequest, CompletionRequest)](ABC):
    """Answers requests of one kind (an ASGI application).

    Args:
      models: what clients may call the model; the first is what answers call it.
      names: makes ids of answers.
    """

    prefix: ClassVar[str]
    field: ClassVar[str]
    """Of bodies, that holds what is asked."""
    most_field: ClassVar[str] = "max_tokens"
    """Of bodies, that says how long answers may be."""

    def __init__(
        self,
        engine: AsyncLLM,
        config: ServerConfig,
        models: Sequence[str],
        entrance: Entrance,
        metrics: ServerMetrics,
        register: Register | None,
        names: IdMaker,
        doubt: Doubt,
    ):
        self.engine, self.config, self._names, self._doubt = engine, config, names, doubt
        self._models, self._entrance, self._metrics, self._register = models, entrance, metrics, register

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = _Sender(send)
        try:
            with self._entrance.enter(scope) as place:
                body = await read_body(scope, receive, self.config, place)
                asked = self._answer(body, sender, scope.get(TENANT))
                del body  # pictures are large, and answers take long
                await until_gone(receive, asked)
        except ClientGoneError:
            pass
        except Exception as error:
            if not sender.has_begun:
                await self._doubt.refuse(error)(scope, receive, send)
                return
            self._doubt.count(error)
            with contextlib.suppress(ClientGoneError):
                await sender.event(sender.failed(as_api_error(error).to_dict()))
                await sender.end()
            await self._doubt.look(error)

    async def _answer(self, body: bytes, sender: _Sender, tenant: Tenant | None) -> None:
        request = await read_off_loop(self._read, body, tenant)
        del body
        await self._answer_request(request, sender, tenant)

    def _check_most(self, most: int | None) -> None:
        """Refuses answers that would be longer than prompts and answers together may be, as OpenAI and vLLM do."""
        if most is not None and most > self.engine.max_model_len:
            name = self.most_field
            raise ApiError(
                f"{name} must be at most max_model_len = {self.engine.max_model_len}, got {most}; leave it out for the "
                "longest answer that fits",
                name,
            )

    async def _answer_request(self, request: R, sender: _Sender, tenant: Tenant | None) -> None:
        prompts = self._prompts(request)
        count = request.params.n * len(prompts)
        self._check_most(request.params.max_tokens)
        self._check(request, count, tenant)
        told = request.options
        request = dataclasses.replace(request, asked=salted(request.asked, self._register, tenant))
        answer = self._begin(request, self._names.new(self.prefix), self._models[0])
        sender.failed = answer.failed
        fields = [f"{self.field}[{i}]" for i in range(len(prompts))] if len(prompts) > 1 else [self.field]
        if len(prompts) > 1:
            await self._check_prompts(prompts, request, fields)
        streams = [self._deltas(prompt, request, field) for prompt, field in zip(prompts, fields, strict=True)]
        with self._entrance.answering(tenant, count):
            async with contextlib.aclosing(merged(streams, SILENCE, self._entrance.ended)) as events:
                if told.stream:
                    last = list(await self._stream(events, answer, sender))
                    await self._keep(request, answer, tenant)
                    await sender.event(*last)
                    await sender.end()
                else:
                    whole = await self._whole(events, len(streams), answer)
                    await self._keep(request, answer, tenant)
                    await sender.respond(whole)

    async def _check_prompts(self, prompts: Sequence[Any], request: R, fields: Sequence[str]) -> None:
        """Refuse a request of which one prompt is wrong before another one runs and its first event is sent."""
        try:
            await self.engine.check(prompts, request.params, options=request.asked)
        except RequestError as error:
            raise self._error(error, request, fields[min(error.errors)]) from error

    def _deltas(self, prompt: Any, request: R, field: str) -> AsyncGenerator[More]:
        """What comes of one of the prompts; `field` is what its errors call it."""
        return self._turn(prompt, request, request.params, field)

    async def _turn(self, prompt: Any, request: R, params: SamplingParams, field: str) -> AsyncGenerator[RequestDelta]:
        asked = self.engine.deltas(prompt, params, options=request.asked, **self._template(request))
        try:
            async with contextlib.aclosing(asked) as deltas:
                async for delta in deltas:
                    yield delta
        except NotFiniteError:  # a fault of the model's
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
                await sender.comment()
                continue
            number, delta = event
            await sender.event(*self._pieces(delta, number, answer))
            if sender.silence > SILENCE:  # tokens come, but none that is text
                await sender.comment()
        return answer.last()

    def _pieces(self, delta: More, number: int, answer: Writer) -> Sequence[Mapping[str, Any]]:
        """What is written of what is new."""
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
        check_model(request.options.model, self._models)
        if n > self.config.max_n:
            raise ApiError(f"n of all prompts together must be at most {self.config.max_n}, got {n}", "n")
        check_reuse(self.engine, self.config, request.asked.reuse, tenant)
        more = self.config.allow_compress if tenant is None or tenant.compress is None else tenant.compress
        if (compress := request.asked.compress) is not None and compress not in more:
            known = " or ".join(more) or "left out"
            raise ApiError(f"compress must be {known} on this server, got {short(compress)}", "compress")

    def _error(self, error: ValueError, request: R, field: str) -> ApiError:
        """What the client is told of what is wrong with its request; `field` is of its body."""
        return as_api_error(error, field, request.options.form)

    def _read(self, body: dict[str, Any], tenant: Tenant | None) -> R:
        check_allowed_tokens(body, self.engine.service.checkpoint.config.text.vocab_size)
        return self._parse(body, tenant)

    @abstractmethod
    def _parse(self, body: dict[str, Any], tenant: Tenant | None) -> R:
        """What a body asks."""

    @abstractmethod
    def _prompts(self, request: R) -> Sequence[Any]:
        """What the engine is asked, one after the other."""

    @abstractmethod
    def _begin(self, request: R, name: str, model: str) -> Writer:
        """What writes the answer."""

    async def _keep(self, request: R, answer: Writer, tenant: Tenant | None) -> None:  # noqa: B027 - most keep nothing
        """Takes note of a whole answer, before the client hears of it."""

    def _template(self, request: R) -> TemplateOptions:
        """How the messages of a request become text."""
        return {}


class Chats(Inference[ChatRequest]):
    """Chat completions."""

    prefix, field = "chatcmpl-", "messages"

    def __init__(self, engine: AsyncLLM, config: ServerConfig, *given: Any):
        super().__init__(engine, config, *given)
        self._format = ChatFormat(
            engine.service.renderer,
            None if config.chat_template is None else template_text(config.chat_template),
            calls=config.tool_call_parser != "none",
            thoughts=config.reasoning_parser != "none",
        )

    def _parse(self, body: dict[str, Any], tenant: Tenant | None) -> ChatRequest:
        return self._chat_request(body)

    def _chat_request(self, found: dict[str, Any]) -> ChatRequest:
        if found.get("chat_template") is not None:  # a program, which clients may not bring
            raise ApiError("chat_template must be left out, as a template can run without end", "chat_template")
        return self._format.request(found, {"max_tokens": None})

    def _begin(self, request: ChatRequest, name: str, model: str) -> Writer:
        return self._format.answer(request, name, model)

    def _prompts(self, request: ChatRequest) -> Sequence[Any]:
        return [request.messages]

    def _template(self, request: ChatRequest) -> TemplateOptions:
        return template_of(request, self.config)


class Completions(Inference[CompletionRequest]):
    """Completions of texts and tokens."""

    prefix, field = "cmpl-", "prompt"

    def _parse(self, body: dict[str, Any], tenant: Tenant | None) -> CompletionRequest:
        return CompletionRequest.parse(body)

    def _begin(self, request: CompletionRequest, name: str, model: str) -> Writer:
        return CompletionAnswer(answer_id(name, request.options), model, request.options, request.params.n)

    def _prompts(self, request: CompletionRequest) -> Sequence[Any]:
        return [one if isinstance(one, str) else {"prompt_token_ids": list(one)} for one in request.prompts]


def template_of(request: ChatRequest | TokenizeRequest, config: ServerConfig) -> TemplateOptions:
    """How the messages of a request become text."""
    if config.chat_template is None:
        return request.template
    return {**request.template, "chat_template": config.chat_template}


def check_model(name: str | None, known: Sequence[str]) -> None:
    """Raises an ApiError if there is no such model."""
    if name is not None and name not in known:
        raise ApiError(f"model must be {' or '.join(known)}, got {short(name)}", "model", 404, "model_not_found")


def allowed_reuse(engine: AsyncLLM, config: ServerConfig, tenant: Tenant | None) -> list[str]:
    """Return the values of `reuse` that requests of a tenant may send; the engine's own, the default, is the first."""
    more = config.allow_reuse if tenant is None or tenant.reuse is None else tenant.reuse
    return list(dict.fromkeys(map(str, (engine.service.config.reuse, *more))))


def check_reuse(engine: AsyncLLM, config: ServerConfig, reuse: Reuse | None, tenant: Tenant | None) -> None:
    """Raises an ApiError if a request may not ask for it."""
    allowed = allowed_reuse(engine, config, tenant)
    if reuse is not None and str(reuse) not in allowed:
        option = "--allow-reuse" if tenant is None or tenant.reuse is None else "the key file"
        raise ApiError(
            f"reuse must be {' or '.join(allowed)} on this server, got {short(reuse)}; its operator can allow other "
            f"values with {option}",
            "reuse",
        )


def _event(content: Mapping[str, Any]) -> bytes:
    """As server-sent; those of responses have names."""
    name = f"event: {content['type']}\n".encode() if "type" in content else b""
    return name + b"data: " + write(content) + b"\n\n"


class _Sender:
    """Writes an answer, whole or as events.

    Attributes:
      has_begun: something of it has been sent.
      failed: makes an event of an error.
    """

    def __init__(self, send: Send):
        self.has_begun = False
        self.failed: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda error: error
        self._send, self._sent_at = send, time.monotonic()

    @property
    def silence(self) -> float:
        """Seconds since something was sent."""
        return time.monotonic() - self._sent_at

    async def respond(self, content: Mapping[str, Any]) -> None:
        """The whole answer."""
        response = answer_json(content)
        self.has_begun = True
        await self._put({"type": "http.response.start", "status": 200, "headers": response.raw_headers})
        await self._put({"type": "http.response.body", "body": response.body})

    async def event(self, *contents: Mapping[str, Any]) -> None:
        """These, one after the other."""
        if contents:
            await self._write(b"".join(map(_event, contents)))

    async def comment(self) -> None:
        """Nothing; but proxies and clients see that somebody is there."""
        await self._write(b": keep-alive\n\n")

    async def end(self) -> None:
        """Nothing follows."""
        await self._write(b"data: [DONE]\n\n")
        await self._put({"type": "http.response.body", "body": b""})

    async def _write(self, data: bytes) -> None:
        if not self.has_begun:
            self.has_begun = True
            await self._put({"type": "http.response.start", "status": 200, "headers": list(_EVENTS)})
        await self._put({"type": "http.response.body", "body": data, "more_body": True})

    async def _put(self, message: dict[str, Any]) -> None:
        """Raises a GoneError if nobody reads."""
        self._sent_at = time.monotonic()
        try:
            async with asyncio.timeout(_STALL):
                await self._send(message)
        except TimeoutError:
            raise ClientGoneError from None
