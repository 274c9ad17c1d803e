"""The server as an ASGI application: its routes and their handlers."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from vlcache_jax import __version__
from vlcache_jax.async_llm import AsyncLLM
from vlcache_jax.cache.keys import owner_key, payer
from vlcache_jax.common.checks import short
from vlcache_jax.inputs.prompt import TemplateOptions
from vlcache_jax.protocol.requests import TokenizeRequest
from vlcache_jax.protocol.retrieval import EmbeddingRequest, RerankRequest, ScoreRequest
from vlcache_jax.protocol.schema import DETOKENIZE, ApiError, check_fields
from vlcache_jax.server import admin
from vlcache_jax.server.admission import TENANT, AdmissionControl, ClientGoneError, HealthCheck, Keys, read_body
from vlcache_jax.server.anthropic import Messages, Signatures
from vlcache_jax.server.config import ServerConfig, check_allowed
from vlcache_jax.server.conversations import Embedder, LibrarySearch, Responses
from vlcache_jax.server.http_layer import (
    MESSAGES_PATH,
    DropUnread,
    HttpChecks,
    IdMaker,
    answer_json,
    as_api_error,
    path_of,
    refuse,
    until_gone,
)
from vlcache_jax.server.inference import (
    Chats,
    Completions,
    ModelNames,
    allowed_reuse,
    read_off_loop,
    template_of,
)
from vlcache_jax.server.metrics import ServerMetrics, TrafficLog
from vlcache_jax.server.openapi import document, page
from vlcache_jax.server.retrieval import Retrieval
from vlcache_jax.server.stored import StoredResponses
from vlcache_jax.server.tenants import Register, Salts, Tenant, Tenants, server_secret
from vlcache_jax.server.uploaded_files import Files

type _Read[R] = Callable[[dict[str, Any], Tenant | None], R]
"""(JSON body, tenant) -> request. It runs in a thread."""
type _Answer[R] = Callable[[R, Tenant | None], Awaitable[Mapping[str, Any]]]
"""(request, tenant) -> JSON body of the answer."""

_PAGE = Path(__file__).with_name("page.html")


class Server:
    """HTTP server of one model.

    Args:
      engine: the engine that answers the requests.
      config: options of the server.
      embedder: an `LLM` or a function from inputs to vectors, which finds images for `file_search`; default: the
        engine's model.
      secret: secret of the tenants' salts and of the signatures of thinking, given if several servers share a cache or
        conversations; default: that of `server_secret` with tenants, otherwise a new one.
      tag: tag that makes the ids of this server unique among several; see `IdMaker`.

    Attributes:
      app: the ASGI application.
      admission: the admission control, which counts requests in flight.
      models: names of the model that requests may use; the first one is used in answers.
      register: the tenants; None if the server has none.

    Raises:
      ValueError: an option does not fit the model, or the file of keys is wrong.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        config: ServerConfig,
        *,
        embedder: Embedder | None = None,
        secret: bytes | None = None,
        tag: str = "",
    ):
        self.engine, self.config = engine, config
        for reuse in config.allow_reuse:
            check_allowed("allow_reuse", engine.service.policy_of, reuse)
        for compress in config.allow_compress:
            check_allowed("allow_compress", engine.service.compressor_of, compress)
        opened = os.fspath(engine.service.config.model)
        self.models: tuple[str, ...] = tuple(config.served_model_name) or (_name_of(opened),)
        self.register: Register | None = None
        if config.api_keys is not None:
            secret = server_secret(engine.service.config.cache.disk) if secret is None else secret
            self.register = Register(config.api_keys, config.admin_key, secret, self._apply_tenants)
        self.admission = AdmissionControl(config, self.register)
        self._stored = StoredResponses()
        self._model_names = ModelNames(self.models, config.any_model_name)
        self._metrics = ServerMetrics(self.models[0], engine, self.admission.room, self._stored, config.metrics_prefix)
        self.traffic = TrafficLog(engine, lambda: self._metrics.requests)
        names = None if config.any_model_name else self.models
        self._document = document(names, root_path=config.root_path, has_keys=config.has_keys)
        ids = IdMaker(tag)
        given = engine, config, self._model_names, self.admission, self._metrics, self.register, ids
        self._health_check = HealthCheck(engine, self.admission, self._metrics)
        search = LibrarySearch(engine, self.register, embedder)
        files = Files(engine, config, self.admission, self.register, ids)
        self._created = int(Path(opened).stat().st_mtime) if os.path.exists(opened) else 0
        asking = self._routes_of_models(
            Chats(*given, self._health_check),
            Completions(*given, self._health_check),
            Responses(*given, self._health_check, stored=self._stored, search=search),
            Messages(*given, self._health_check, signatures=Signatures(secret)),
            Retrieval(*given),
        )
        routes = [*self._routes_of_process(), *asking, *_routes_of_files(files), *self._routes_of_cache()]
        middleware = [Middleware(Keys, config=config, register=self.register)]
        if config.allowed_origins:
            origins = list(config.allowed_origins)
            cors = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
            middleware.insert(0, cors)
        middleware[:0] = [
            Middleware(DropUnread, config=config, ended=self.admission.ended),
            Middleware(HttpChecks, config=config),
        ]
        handlers: dict[Any, Any] = {HTTPException: _refuse_http, ApiError: self._refuse, Exception: self._refuse}
        self.app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
        # A redirect would be built from the Host and the scheme, which a proxy may have changed.
        self.app.router.redirect_slashes = False

    def _routes_of_process(self) -> list[Route]:
        return [
            Route("/", self._page),
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/version", self._version),
            Route("/load", self._load),
            Route("/metrics", self._show_metrics),
            Route("/openapi.json", self._openapi),
            Route("/docs", self._docs),
            Route("/v1/models", self._list_models),
            Route("/v1/models/{name:path}", self._show_model),
        ]

    def _routes_of_models(
        self, chats: Chats, completions: Completions, responses: Responses, messages: Messages, retrieval: Retrieval
    ) -> list[Route]:
        """Return the routes of inference, of stored responses and of the tokenizer."""
        rerank = self._call(_parsed(RerankRequest), retrieval.rerank)
        score = self._call(_parsed(ScoreRequest), retrieval.score)
        cohere = self._call(_parsed(RerankRequest), functools.partial(retrieval.rerank, cohere=True))
        return [
            Route("/v1/chat/completions", chats, methods=["POST"]),
            Route("/v1/responses", responses, methods=["POST"]),
            Route("/v1/responses/{name}", self._kept_response, methods=["GET", "DELETE"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route(MESSAGES_PATH, messages, methods=["POST"]),
            Route(
                f"{MESSAGES_PATH}/count_tokens",
                self._call(messages.read_prompt, messages.count_tokens),
                methods=["POST"],
            ),
            Route("/v1/embeddings", self._call(_parsed(EmbeddingRequest), retrieval.embeddings), methods=["POST"]),
            # These paths are those of vLLM. `/v2/rerank` is Cohere's.
            *(Route(path, rerank, methods=["POST"]) for path in ("/v1/rerank", "/rerank")),
            Route("/v2/rerank", cohere, methods=["POST"]),
            *(Route(path, score, methods=["POST"]) for path in ("/score", "/v1/score")),
            Route("/tokenize", self._call(_parsed(TokenizeRequest), self._tokenize), methods=["POST"]),
            Route("/detokenize", self._call(self._read_tokens, self._detokenize), methods=["POST"]),
        ]

    def _routes_of_cache(self) -> list[Route]:
        return [
            Route("/cache", self._cache),
            *(
                Route(f"/cache/{verb}", self._call(_unparsed, self._verb(verb)), methods=["POST"])
                for verb in admin.VERBS
            ),
            Route("/reset_mm_cache", self._reset_mm_cache, methods=["POST"]),
            Route("/reset_prefix_cache", self._reset_prefix_cache, methods=["POST"]),
        ]

    def _apply_tenants(self, salts: Salts, tenants: Tenants) -> None:
        """Check that the engine supports the tenants' options, and set their cache quotas and priorities.

        Raises:
          ValueError: a value of `reuse` or `compress` is not supported.
        """
        shares = {}
        for name, tenant in tenants.all().items():
            try:
                for reuse in tenant.reuse or ():
                    self.engine.service.policy_of(reuse)
                for compress in tenant.compress or ():
                    self.engine.service.compressor_of(compress)
            except ValueError as error:
                raise ValueError(f"api_keys {self.config.api_keys}: tenants.{name} {error}") from error
            if tenant.cache_bytes is not None:
                shares[payer(owner_key(salts.salt(name)))] = tenant.cache_bytes
        self.engine.service.cache.store.shares.set(shares)
        ranked = (salts.salt(name).tenant for name, tenant in tenants.all().items() if tenant.priority)
        self.engine.service.loop.engine.scheduler.tenant_order.rank(ranked)

    async def check_health(self) -> None:
        """Set `admission.failure` if the engine has failed."""
        try:
            await self.engine.check_health()
        except RuntimeError as error:
            self.admission.failure = str(error)

    # Process

    async def _health(self, _: Request) -> Response:
        await self.check_health()
        return Response(status_code=200 if self.admission.failure is None else 503)

    async def _ready(self, _: Request) -> Response:
        return Response(status_code=200 if self.admission.is_ready else 503)

    async def _page(self, _: Request) -> Response:
        return Response(_PAGE.read_bytes(), media_type="text/html; charset=utf-8")

    async def _version(self, _: Request) -> Response:
        return answer_json({"version": __version__})

    async def _load(self, _: Request) -> Response:
        return answer_json({"server_load": self.admission.inside})

    async def _show_metrics(self, _: Request) -> Response:
        content = await asyncio.to_thread(self._metrics.page)
        return Response(content, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _openapi(self, _: Request) -> Response:
        return answer_json(self._document)

    async def _docs(self, _: Request) -> Response:
        return Response(page(self._document), media_type="text/html; charset=utf-8")

    # Model

    def _card(self, name: str, request: Request) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "vlcache",
            "root": self.models[0],
            "parent": None,
            "max_model_len": self.engine.max_model_len,
            "reuse": allowed_reuse(self.engine, self.config, request.scope.get(TENANT)),
        }

    async def _list_models(self, request: Request) -> Response:
        return answer_json({"object": "list", "data": [self._card(name, request) for name in self.models]})

    async def _show_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._model_names.resolve(name)
        return answer_json(self._card(name, request))

    async def _kept_response(self, request: Request) -> Response:
        name, tenant = request.path_params["name"], request.scope.get(TENANT)
        is_delete = request.method == "DELETE"
        found = (self._stored.delete if is_delete else self._stored.get)(name, tenant)
        if found is None:
            raise ApiError(f"no stored response has the id {short(name)}", status=404)
        return answer_json({"id": name, "object": "response", "deleted": True} if is_delete else found.response)

    async def _tokenize(self, request: TokenizeRequest, _: Tenant | None) -> Mapping[str, Any]:
        self._model_names.resolve(request.model)
        is_text = isinstance(request.prompt, str)
        limits = None if is_text else request.mm_processor_kwargs
        template: TemplateOptions = {} if is_text else template_of(request, self.config)
        if request.special is False and (added := (await self.engine.get_tokenizer()).num_special_tokens_to_add()):
            message = f"add_special_tokens must be true: the tokenizer adds {added} special tokens to every prompt"
            raise ApiError(f"{message}, got false", "add_special_tokens")
        try:
            tokens = await self.engine.tokenize(request.prompt, mm_processor_kwargs=limits, **template)
        except ValueError as error:
            raise as_api_error(error, "prompt" if is_text else "messages") from error
        answer = {"count": len(tokens), "max_model_len": self.engine.max_model_len, "tokens": tokens.tolist()}
        if request.returns_texts:
            tokenizer = await self.engine.get_tokenizer()
            answer["token_strs"] = await asyncio.to_thread(tokenizer.convert_ids_to_tokens, answer["tokens"])
        return answer

    def _read_tokens(self, body: dict[str, Any], _: Tenant | None) -> list[int]:
        """Return the token ids in a body of `/detokenize`.

        Raises:
          ApiError: a field is wrong, or a token is not in the vocabulary.
        """
        known = {**DETOKENIZE, "tokens": {**DETOKENIZE["tokens"], "maxItems": self.engine.max_model_len}}
        given = check_fields(body, known, {}, ())
        self._model_names.resolve(given.get("model"))
        tokens: list[int] | None = given.get("tokens")
        max_token = len(self.engine.service.renderer.tokenizer) - 1
        if tokens is None or max(tokens, default=0) > max_token:
            raise ApiError(f"tokens must be token ids from 0 to {max_token}, got {short(tokens)}", "tokens")
        return tokens

    async def _detokenize(self, tokens: list[int], _: Tenant | None) -> Mapping[str, Any]:
        tokenizer = await self.engine.get_tokenizer()
        return {"prompt": await asyncio.to_thread(tokenizer.decode, tokens)}

    # Cache

    async def _cache(self, _: Request) -> Response:
        stats = await asyncio.to_thread(self.engine.cache.stats)
        return answer_json(dataclasses.asdict(stats))

    def _verb(self, verb: str) -> _Answer[dict[str, Any]]:
        async def work(body: dict[str, Any], _: Tenant | None) -> Mapping[str, Any]:
            return await asyncio.to_thread(admin.apply, self.engine.cache, self.register, verb, body)

        return work

    async def _reset_mm_cache(self, _: Request) -> Response:
        await self.engine.reset_mm_cache()
        return Response()

    async def _reset_prefix_cache(self, _: Request) -> Response:
        await self.engine.reset_prefix_cache()
        return Response()

    async def _refuse(self, request: Request, error: Exception) -> Response:
        return self._health_check.refuse(error, request.scope)

    def _call[R](self, read: _Read[R], answer: _Answer[R]) -> _RoutedCall[R]:
        return _RoutedCall(read, answer, self.admission, self.config, self._health_check)


class _RoutedCall[R]:
    """Route that answers JSON with JSON (an ASGI application)."""

    def __init__(
        self,
        read: _Read[R],
        answer: _Answer[R],
        admission: AdmissionControl,
        config: ServerConfig,
        health_check: HealthCheck,
    ):
        self._read, self._answer = read, answer
        self._admission, self._config, self._health_check = admission, config, health_check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def answer() -> Response:
            tenant = scope.get(TENANT)
            request = await read_off_loop(self._read, body, tenant)
            return await asyncio.to_thread(answer_json, await self._answer(request, tenant))

        try:
            with self._admission.enter(scope) as place:
                body = await read_body(scope, receive, self._config, place)
                response = await until_gone(receive, answer())
        except ClientGoneError:
            return
        except Exception as error:
            response = self._health_check.refuse(error, scope)
        if response is not None:
            await response(scope, receive, send)


def _routes_of_files(files: Files) -> list[Route]:
    return [
        Route("/v1/files", files.files, methods=["GET", "POST"]),
        Route("/v1/files/{name}", files.file, methods=["GET", "DELETE"]),
        Route("/v1/files/{name}/content", files.content, methods=["GET"]),
        Route("/libraries", files.libraries, methods=["GET"]),
        Route("/libraries/{library}", files.library, methods=["GET", "POST", "PUT"]),
        Route("/libraries/{library}/{name:path}", files.item, methods=["GET", "DELETE"]),
    ]


def _parsed[R: (EmbeddingRequest, RerankRequest, ScoreRequest, TokenizeRequest)](kind: type[R]) -> _Read[R]:
    return lambda body, _: kind.parse(body)


def _unparsed(body: dict[str, Any], _: Tenant | None) -> dict[str, Any]:
    return body


def _name_of(model: str) -> str:
    """Return the name of a model for clients: of a folder the last part only, so that its path is not published."""
    return Path(model).resolve().name if os.path.isdir(model) else model


def _refuse_http(request: Request, error: Exception) -> Response:
    """Return the response to an unknown path or method."""
    assert isinstance(error, HTTPException)
    response = refuse(ApiError(error.detail, status=error.status_code), path_of(request.scope))
    response.headers.update(error.headers or {})
    return response
