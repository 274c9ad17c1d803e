"""Handlers of embedding, rerank and score requests."""

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
from vlcache_jax.server.admission import AdmissionControl
from vlcache_jax.server.config import ServerConfig
from vlcache_jax.server.http_layer import IdMaker, as_api_error
from vlcache_jax.server.inference import ModelNames, check_reuse
from vlcache_jax.server.metrics import ServerMetrics
from vlcache_jax.server.tenants import Register, Tenant, salted

_TOGETHER = 32  # maximum inputs of one request in flight, which leaves room for other requests


class Retrieval:
    """Handler of `/v1/embeddings`, `/rerank` and `/score`.

    Args:
      engine, config, models, admission, metrics, register, names: see `vlcache_jax.server.inference.Inference`.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        config: ServerConfig,
        models: ModelNames,
        admission: AdmissionControl,
        metrics: ServerMetrics,
        register: Register | None,
        names: IdMaker,
    ):
        self._engine, self._config, self._models, self._names = engine, config, models, names
        self._admission, self._metrics, self._register = admission, metrics, register

    async def embeddings(self, request: EmbeddingRequest, tenant: Tenant | None) -> Mapping[str, Any]:
        """Return the answer to OpenAI's `/v1/embeddings`.

        Raises:
          ApiError: a field or an input is wrong, or a limit is reached.
          NotFiniteError: the model computed non-finite values.
        """
        settings = self._settings(request.options, tenant)
        count = _max_in_flight(len(request.inputs), tenant)
        if request.adds_special_tokens is False and self._engine.service.renderer.adds_special_tokens:
            raise ApiError(
                "add_special_tokens must be true: the tokenizer adds special tokens to every text",
                "add_special_tokens",
            )

        async def embed(number: int, given: Any) -> EmbeddingOutput:
            try:
                return await self._engine.embed(given, dimensions=request.dimensions, **settings)
            except NotFiniteError:
                raise
            except ValueError as error:
                name = f"input[{number}]" if len(request.inputs) > 1 else request.field
                raise _error(error, "input", name, EMBEDDINGS) from error

        with self._admission.answering(tenant, count):
            work = [functools.partial(embed, i, one) for i, one in enumerate(self._inputs(request))]
            outputs = await together(work, count)
        await asyncio.to_thread(self._note, outputs)
        return await asyncio.to_thread(request.answer, self._models.resolve(request.options.model), outputs)

    async def rerank(self, request: RerankRequest, tenant: Tenant | None, *, cohere: bool = False) -> Mapping[str, Any]:
        """Return the answer to `/v1/rerank` of Jina and vLLM; with `cohere`, that to Cohere's `/v2/rerank`.

        Raises:
          ApiError, NotFiniteError: as `embeddings`.
        """
        settings = self._settings(request.options, tenant)
        count = _max_in_flight(len(request.documents), tenant)
        with self._admission.answering(tenant, count):
            try:
                outputs = await self._engine.rerank(request.query, request.documents, max_in_flight=count, **settings)
            except NotFiniteError:
                raise
            except ValueError as error:
                raise _error(error, "documents", "documents", RERANK) from error
        await asyncio.to_thread(self._note, outputs)
        write = functools.partial(
            request.answer,
            self._names.new("rerank-"),
            self._models.resolve(request.options.model),
            outputs,
            cohere=cohere,
        )
        return await asyncio.to_thread(write)

    async def score(self, request: ScoreRequest, tenant: Tenant | None) -> Mapping[str, Any]:
        """Return the answer to vLLM's `/score`.

        Raises:
          ApiError, NotFiniteError: as `embeddings`.
        """
        settings = self._settings(request.options, tenant)
        count = _max_in_flight(len(request.pairs), tenant)

        async def score(pair: tuple[Any, Any], places: tuple[str, str]) -> RerankOutput:
            query, document = pair
            try:
                [output] = await self._engine.rerank(query, [document], max_in_flight=1, **settings)
            except NotFiniteError:
                raise
            except ValueError as error:
                raise _pair_error(error, *places) from error
            return output

        with self._admission.answering(tenant, count):
            work = [functools.partial(score, *one) for one in zip(request.pairs, request.places, strict=True)]
            outputs = await together(work, count)
        await asyncio.to_thread(self._note, outputs)
        return await asyncio.to_thread(
            request.answer, self._names.new("score-"), self._models.resolve(request.options.model), outputs
        )

    def _inputs(self, request: EmbeddingRequest) -> Sequence[Any]:
        """Return the inputs for the engine. Messages have the options of the chat template."""
        if request.field != "messages":
            return request.inputs
        own = {} if self._config.chat_template is None else {"chat_template": self._config.chat_template}
        return [{"messages": one, **request.template, **own} for one in request.inputs]

    def _settings(self, given: RetrievalOptions, tenant: Tenant | None) -> dict[str, Any]:
        self._models.resolve(given.model)
        check_reuse(self._engine, self._config, given.request_options, tenant)
        return {"instruction": given.instruction, "options": salted(given.request_options, self._register, tenant)}

    def _note(self, outputs: Sequence[EmbeddingOutput | RerankOutput]) -> None:
        for output in outputs:
            self._metrics.answered(counts_of(output), output.metrics)


def _max_in_flight(inputs: int, tenant: Tenant | None) -> int:
    """Return the number of inputs of a request that may be in flight at a time."""
    limit = None if tenant is None else tenant.requests
    return min(inputs, _TOGETHER, _TOGETHER if limit is None else limit)


def _error(error: ValueError, engine_name: str, name: str, fields: Mapping[str, Any]) -> ApiError:
    """Return an error with the body's name of the input, `name`, in place of the engine's."""
    api_error = as_api_error(error)
    message = api_error.message
    if name == "messages":
        message = re.sub(
            rf"^{engine_name} (?=messages\[|add_generation_prompt|continue_final|chat_template)", "", message
        )
    message = re.sub(rf"^{engine_name}\b(?!\[)", name, message)
    return _with_message(api_error, message, fields)


def _pair_error(error: ValueError, query: str, document: str) -> ApiError:
    """Return the error of a pair with the body's names of its query and document."""
    api_error = as_api_error(error)
    message = re.sub(r"^documents\[0\]", document, re.sub(r"^query\b", query, api_error.message))
    return _with_message(api_error, message, SCORE)


def _with_message(error: ApiError, message: str, fields: Mapping[str, Any]) -> ApiError:
    param = re.split(r"\W", message, maxsplit=1)[0]
    return ApiError(message, param if param in fields else None, error.status, error.code, error.retry_after)
