"""Requests that are answered with vectors or with an order of documents."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from vlcache_jax.async_llm import AsyncLLM
from vlcache_jax.calls.groups import NotFiniteError
from vlcache_jax.calls.in_flight import together
from vlcache_jax.embedding import EmbeddingOutput, RerankOutput
from vlcache_jax.protocol.retrieval import (
    EMBEDDINGS,
    RERANK,
    SCORE,
    EmbeddingRequest,
    RerankRequest,
    RetrievalOptions,
    ScoreRequest,
    counts_of,
)
from vlcache_jax.protocol.schema import ApiError
from vlcache_jax.server.admission import Entrance
from vlcache_jax.server.config import ServerConfig
from vlcache_jax.server.http_layer import IdMaker, as_api_error
from vlcache_jax.server.inference import check_model, check_reuse
from vlcache_jax.server.metrics import ServerMetrics
from vlcache_jax.server.tenants import Register, Tenant, salted

_TOGETHER = 32  # inputs of one request that are under way; others need room, too


class Retrieval:
    """Embeds and ranks."""

    def __init__(
        self,
        engine: AsyncLLM,
        config: ServerConfig,
        models: Sequence[str],
        entrance: Entrance,
        metrics: ServerMetrics,
        register: Register | None,
        names: IdMaker,
    ):
        self._engine, self._config, self._models, self._names = engine, config, models, names
        self._entrance, self._metrics, self._register = entrance, metrics, register

    async def embeddings(self, request: EmbeddingRequest, tenant: Tenant | None) -> Mapping[str, Any]:
        """See OpenAI's `/v1/embeddings`."""
        settings = self._settings(request.options, tenant)
        most = _at_a_time(len(request.inputs), tenant)
        if request.adds_special_tokens is False and self._engine.service.renderer.adds_special_tokens:
            raise ApiError(
                "add_special_tokens must be true: the tokenizer adds some to every text", "add_special_tokens"
            )

        async def embed(number: int, given: Any) -> EmbeddingOutput:
            try:
                return await self._engine.embed(given, dimensions=request.dimensions, **settings)
            except NotFiniteError:
                raise
            except ValueError as error:
                name = f"input[{number}]" if len(request.inputs) > 1 else request.field
                raise _error(error, "input", name, EMBEDDINGS) from error

        with self._entrance.answering(tenant, most):
            work = [functools.partial(embed, i, one) for i, one in enumerate(self._inputs(request))]
            outputs = await together(work, most)
        await asyncio.to_thread(self._note, outputs)
        return await asyncio.to_thread(request.answer, self._models[0], outputs)

    async def rerank(self, request: RerankRequest, tenant: Tenant | None, *, cohere: bool = False) -> Mapping[str, Any]:
        """See Jina's and vLLM's `/v1/rerank`; also with the `meta` of Cohere's `/v2/rerank`."""
        settings = self._settings(request.options, tenant)
        most = _at_a_time(len(request.documents), tenant)
        with self._entrance.answering(tenant, most):
            try:
                outputs = await self._engine.rerank(request.query, request.documents, most=most, **settings)
            except NotFiniteError:
                raise
            except ValueError as error:
                raise _error(error, "documents", "documents", RERANK) from error
        await asyncio.to_thread(self._note, outputs)
        write = functools.partial(request.answer, self._names.new("rerank-"), self._models[0], outputs, cohere=cohere)
        return await asyncio.to_thread(write)

    async def score(self, request: ScoreRequest, tenant: Tenant | None) -> Mapping[str, Any]:
        """See vLLM's `/score`."""
        settings = self._settings(request.options, tenant)
        most = _at_a_time(len(request.pairs), tenant)

        async def score(pair: tuple[Any, Any], places: tuple[str, str]) -> RerankOutput:
            query, document = pair
            try:
                [output] = await self._engine.rerank(query, [document], most=1, **settings)
            except NotFiniteError:
                raise
            except ValueError as error:
                raise _pair_error(error, *places) from error
            return output

        with self._entrance.answering(tenant, most):
            work = [functools.partial(score, *one) for one in zip(request.pairs, request.places, strict=True)]
            outputs = await together(work, most)
        await asyncio.to_thread(self._note, outputs)
        return await asyncio.to_thread(request.answer, self._names.new("score-"), self._models[0], outputs)

    def _inputs(self, request: EmbeddingRequest) -> Sequence[Any]:
        """What the engine embeds; messages with how they become text."""
        if request.field != "messages":
            return request.inputs
        own = {} if self._config.chat_template is None else {"chat_template": self._config.chat_template}
        return [{"messages": one, **request.template, **own} for one in request.inputs]

    def _settings(self, given: RetrievalOptions, tenant: Tenant | None) -> dict[str, Any]:
        check_model(given.model, self._models)
        check_reuse(self._engine, self._config, given.asked.reuse, tenant)
        return {"instruction": given.instruction, "options": salted(given.asked, self._register, tenant)}

    def _note(self, outputs: Sequence[EmbeddingOutput | RerankOutput]) -> None:
        for output in outputs:
            self._metrics.answered(counts_of(output), output.metrics)


def _at_a_time(inputs: int, tenant: Tenant | None) -> int:
    """How many of its inputs a request may have under way."""
    most = None if tenant is None else tenant.requests
    return min(inputs, _TOGETHER, _TOGETHER if most is None else most)


def _error(error: ValueError, called: str, name: str, fields: Mapping[str, Any]) -> ApiError:
    """What the client is told; `called` is what the engine calls its input, and `name` what the client does."""
    told = as_api_error(error)
    message = told.message
    if name == "messages":
        message = re.sub(rf"^{called} (?=messages\[|add_generation_prompt|continue_final|chat_template)", "", message)
    message = re.sub(rf"^{called}\b(?!\[)", name, message)
    param = re.split(r"\W", message, maxsplit=1)[0]
    return ApiError(message, param if param in fields else None, told.status, told.code, told.retry_after)


def _pair_error(error: ValueError, query: str, document: str) -> ApiError:
    """The error of a pair, by the names that the client has for its members."""
    told = as_api_error(error)
    message = re.sub(r"^documents\[0\]", document, re.sub(r"^query\b", query, told.message))
    param = re.split(r"\W", message, maxsplit=1)[0]
    return ApiError(message, param if param in SCORE else None, told.status, told.code, told.retry_after)
