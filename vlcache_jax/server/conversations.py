"""OpenAI's Responses API: stored conversations, whose answers may search libraries (`file_search`)."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vlcache_jax.async_llm import AsyncLLM
from vlcache_jax.cache.keys import SHARED, TenantSalt
from vlcache_jax.common.checks import short
from vlcache_jax.inputs.messages import FILES
from vlcache_jax.library import Library, Retriever, SearchOptions
from vlcache_jax.library.retriever import EmbeddingModel, name_of
from vlcache_jax.llm import LLM
from vlcache_jax.outputs import RequestDelta
from vlcache_jax.protocol.requests import ChatRequest
from vlcache_jax.protocol.response_answers import ResponseAnswer
from vlcache_jax.protocol.responses import FileSearch, ResponseRequest
from vlcache_jax.protocol.schema import ApiError
from vlcache_jax.server.http_layer import as_api_error
from vlcache_jax.server.inference import Chats, Events, Update, Writer
from vlcache_jax.server.stored import StoredResponses
from vlcache_jax.server.tenants import Register, Tenant, owner_of
from vlcache_jax.server.uploaded_files import files_of

_MAX_RETRIEVERS = 64  # cached retrievers; each has the vectors of its library

type Embedder = EmbeddingModel | Callable[[Sequence[Any]], Any]


class LibrarySearch:
    """Image search of answers in the operator's libraries and in the clients' uploaded files.

    Args:
      engine: the engine, which has the libraries.
      register: the tenants; None if the server has none.
      embedder: model or function that computes vectors; default: the engine's model.

    Raises:
      ValueError: the embedder has no name that identifies it; see `Retriever`.
    """

    def __init__(self, engine: AsyncLLM, register: Register | None, embedder: Embedder | None):
        self._engine, self._register, self._embedder = engine, register, embedder
        if embedder is not None:
            name_of(embedder)
        # Least recently used first.
        self._retrievers: OrderedDict[tuple[str, TenantSalt | None], Retriever] = OrderedDict()
        self._lock = threading.Lock()

    def options(self, tool: FileSearch, rounds: int, tenant: Tenant | None) -> SearchOptions:
        """Return the search options of an answer.

        Args:
          tool: the `file_search` tool of the request.
          rounds: maximum number of searches.
          tenant: the tenant of the request; None if it has none.

        Raises:
          ApiError: the library does not exist (status 404).
        """
        retriever = self._retriever(tool, tenant)
        return SearchOptions(retriever, top_k=tool.k, max_rounds=rounds, filter=tool.matches, min_score=tool.min_score)

    def _retriever(self, tool: FileSearch, tenant: Tenant | None) -> Retriever:
        is_own = tool.library == FILES
        if not is_own and tool.library not in self._engine.service.items.libraries(SHARED):
            where = f"{tool.where}.vector_store_ids"
            raise ApiError(f"{where} must name a library of this server, got {short(tool.library)}", where, 404)
        key = tool.library, owner_of(self._register, tenant) if is_own else None
        with self._lock:
            if key not in self._retrievers:
                library = files_of(self._engine, self._register, tenant) if is_own else Library(self._engine, key[0])
                self._retrievers[key] = Retriever(library, self._embedder or LLM(self._engine.service))
            self._retrievers.move_to_end(key)
            while len(self._retrievers) > _MAX_RETRIEVERS:
                self._retrievers.popitem(last=False)
            return self._retrievers[key]


@dataclass(frozen=True)
class ResponsesRequest(ChatRequest):
    """Chat request made from a request to `/v1/responses`.

    Attributes:
      request: the request for the response.
      before: messages of the earlier responses.
      searches: options of its searches; None if it has no `file_search`.
      forces: True if the first turn must call a tool. Turns after a search need not.
    """

    request: ResponseRequest = field(kw_only=True)
    before: Sequence[Mapping[str, Any]] = field(kw_only=True)
    searches: SearchOptions | None = field(kw_only=True)
    forces: bool = field(kw_only=True)


class Responses(Chats):
    """Handler of `/v1/responses`: chats that the server stores."""

    prefix, max_field = "resp_", "max_output_tokens"

    def __init__(self, *given: Any, stored: StoredResponses, search: LibrarySearch):
        super().__init__(*given)
        self._stored, self._search = stored, search

    def _parse(self, body: dict[str, Any], tenant: Tenant | None) -> ResponsesRequest:
        request = ResponseRequest.parse(body)
        before: Sequence[Mapping[str, Any]] = ()
        if request.previous is not None:
            found = self._stored.get(request.previous, tenant)
            if found is None:
                message = f"previous_response_id must be the id of a stored response, got {short(request.previous)}"
                raise ApiError(message, "previous_response_id")
            before = found.messages
        chat_body, searches = request.body(before), None
        try:
            if request.search is not None:
                if self.config.tool_call_parser == "none":
                    message = (
                        f"{request.search.where} requires tool calls: start the server without --tool-call-parser none"
                    )
                    raise ApiError(message, request.search.where)
                searches = self._search.options(request.search, request.rounds, tenant)
                chat_body["tools"] = searches.add_tool(chat_body.get("tools", ()))
            chat = self._chat_request(chat_body)
        except ValueError as error:
            raise request.error(as_api_error(error), len(before)) from error
        given = {own.name: getattr(chat, own.name) for own in dataclasses.fields(ChatRequest)}
        forces = chat_body.get("tool_choice") not in (None, "auto", "none")
        return ResponsesRequest(**given, request=request, before=before, searches=searches, forces=forces)

    def _deltas(self, prompt: Any, request: ChatRequest, field: str) -> AsyncGenerator[Update]:
        assert isinstance(request, ResponsesRequest)
        max_tokens = request.params.max_tokens

        def ask(added: Sequence[Mapping[str, Any]], used: int) -> AsyncGenerator[RequestDelta]:
            params = request.params.clone()
            if added and request.forces:
                params.structured_outputs = None
            if max_tokens is not None:
                params.max_tokens = max_tokens - used
                params.min_tokens = min(params.min_tokens, params.max_tokens)
            return self._turn([*prompt, *added], request, params, field)

        return ask((), 0) if request.searches is None else request.searches.stream(self.engine.service, ask, max_tokens)

    async def _whole(self, events: Events, prompts: int, answer: Writer) -> Mapping[str, Any]:
        assert isinstance(answer, ResponseAnswer)
        if answer.request.search is None:
            return await super()._whole(events, prompts, answer)
        async for event in events:  # an answer of several turns is joined from its stream
            if event is not None:
                self._pieces(event[1], event[0], answer)
        for _ in answer.last():
            pass
        return answer.response

    def _error(self, error: ValueError, request: ChatRequest, field: str) -> ApiError:
        assert isinstance(request, ResponsesRequest)
        return request.request.error(super()._error(error, request, field), len(request.before))

    def _begin(self, request: ChatRequest, name: str, model: str) -> ResponseAnswer:
        assert isinstance(request, ResponsesRequest)
        # A response has no field for the logprobs and ids of thinking tokens.
        chat = self._format.answer(request, name, model, returns_thinking_tokens=False)
        return ResponseAnswer(chat, request.request)

    async def _keep(self, request: ChatRequest, answer: Writer, tenant: Tenant | None) -> None:
        assert isinstance(request, ResponsesRequest)
        assert isinstance(answer, ResponseAnswer)
        if request.request.stores:
            messages = [*request.before, *request.request.messages, *answer.said]
            await asyncio.to_thread(self._stored.put, answer.response, messages, tenant)  # images make this slow
