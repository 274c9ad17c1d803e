"""OpenAI's Responses: stored conversations, whose answers may search libraries (`file_search`)."""

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
from vlcache_jax.library import Library, Retriever, Searches
from vlcache_jax.library.retriever import EmbeddingModel, name_of
from vlcache_jax.llm import LLM
from vlcache_jax.outputs import RequestDelta
from vlcache_jax.protocol.requests import ChatRequest
from vlcache_jax.protocol.response_answers import ResponseAnswer
from vlcache_jax.protocol.responses import FileSearch, ResponseRequest
from vlcache_jax.protocol.schema import ApiError
from vlcache_jax.server.http_layer import as_api_error
from vlcache_jax.server.inference import Chats, Events, More, Writer
from vlcache_jax.server.stored import StoredResponses
from vlcache_jax.server.tenants import Register, Tenant, owner_of
from vlcache_jax.server.uploaded_files import files_of

_MOST_SEARCHES = 64  # retrievers that are kept; each has its library's vectors

type Embedder = EmbeddingModel | Callable[[Sequence[Any]], Any]


class Searching:
    """Finds pictures for answers, of the operator's libraries and of what clients have uploaded.

    Args:
      embedder: makes vectors; None: the engine's model.

    Raises:
      ValueError: nothing tells the embedder from another one; see `Retriever`.
    """

    def __init__(self, engine: AsyncLLM, register: Register | None, embedder: Embedder | None):
        self._engine, self._register, self._embedder = engine, register, embedder
        if embedder is not None:
            name_of(embedder)
        # The last one was used last.
        self._retrievers: OrderedDict[tuple[str, TenantSalt | None], Retriever] = OrderedDict()
        self._lock = threading.Lock()

    def searches(self, asked: FileSearch, rounds: int, tenant: Tenant | None) -> Searches:
        """What an answer may do.

        Raises:
          ApiError: there is no such library.
        """
        retriever = self._retriever(asked, tenant)
        return Searches(retriever, k=asked.k, rounds=rounds, filter=asked.passes, least=asked.least)

    def _retriever(self, asked: FileSearch, tenant: Tenant | None) -> Retriever:
        is_own = asked.library == FILES
        if not is_own and asked.library not in self._engine.service.items.libraries(SHARED):
            where = f"{asked.where}.vector_store_ids"
            raise ApiError(f"{where} must name a library of this server, got {short(asked.library)}", where, 404)
        key = asked.library, owner_of(self._register, tenant) if is_own else None
        with self._lock:
            if key not in self._retrievers:
                library = files_of(self._engine, self._register, tenant) if is_own else Library(self._engine, key[0])
                self._retrievers[key] = Retriever(library, self._embedder or LLM(self._engine.service))
            self._retrievers.move_to_end(key)
            while len(self._retrievers) > _MOST_SEARCHES:
                self._retrievers.popitem(last=False)
            return self._retrievers[key]


@dataclass(frozen=True)
class AskedResponse(ChatRequest):
    """A chat that a request for a response comes to.

    Attributes:
      request: for the response.
      before: messages of the responses before.
      searches: what it may search; None: nothing.
      forces: the first turn must call, and those behind a search need not.
    """

    request: ResponseRequest = field(kw_only=True)
    before: Sequence[Mapping[str, Any]] = field(kw_only=True)
    searches: Searches | None = field(kw_only=True)
    forces: bool = field(kw_only=True)


class Responses(Chats):
    """OpenAI's Responses, which are chats that the server remembers."""

    prefix, most_field = "resp_", "max_output_tokens"

    def __init__(self, *given: Any, stored: StoredResponses, searching: Searching):
        super().__init__(*given)
        self._stored, self._searching = stored, searching

    def _parse(self, body: dict[str, Any], tenant: Tenant | None) -> AskedResponse:
        request = ResponseRequest.parse(body)
        before: Sequence[Mapping[str, Any]] = ()
        if request.previous is not None:
            found = self._stored.get(request.previous, tenant)
            if found is None:
                told = f"previous_response_id must be that of a response that is kept, got {short(request.previous)}"
                raise ApiError(told, "previous_response_id")
            before = found.messages
        chat_body, searches = request.body(before), None
        try:
            if request.search is not None:
                if self.config.tool_call_parser == "none":
                    told = f"{request.search.where} needs calls to be read, which this server does not do"
                    raise ApiError(told, request.search.where)
                searches = self._searching.searches(request.search, request.rounds, tenant)
                chat_body["tools"] = searches.beside(chat_body.get("tools", ()))
            chat = self._chat_request(chat_body)
        except ValueError as error:
            raise request.error(as_api_error(error), len(before)) from error
        given = {own.name: getattr(chat, own.name) for own in dataclasses.fields(ChatRequest)}
        forces = chat_body.get("tool_choice") not in (None, "auto", "none")
        return AskedResponse(**given, request=request, before=before, searches=searches, forces=forces)

    def _deltas(self, prompt: Any, request: ChatRequest, field: str) -> AsyncGenerator[More]:
        assert isinstance(request, AskedResponse)
        most = request.params.max_tokens

        def ask(added: Sequence[Mapping[str, Any]], used: int) -> AsyncGenerator[RequestDelta]:
            params = request.params.clone()
            if added and request.forces:
                params.structured_outputs = None
            if most is not None:
                params.max_tokens = most - used
                params.min_tokens = min(params.min_tokens, params.max_tokens)
            return self._turn([*prompt, *added], request, params, field)

        return ask((), 0) if request.searches is None else request.searches.turns(self.engine.service, ask, most)

    async def _whole(self, events: Events, prompts: int, answer: Writer) -> Mapping[str, Any]:
        assert isinstance(answer, ResponseAnswer)
        if answer.request.search is None:
            return await super()._whole(events, prompts, answer)
        async for event in events:  # an answer of several turns is put together as a stream is
            if event is not None:
                self._pieces(event[1], event[0], answer)
        for _ in answer.last():
            pass
        return answer.response

    def _error(self, error: ValueError, request: ChatRequest, field: str) -> ApiError:
        assert isinstance(request, AskedResponse)
        return request.request.error(super()._error(error, request, field), len(request.before))

    def _begin(self, request: ChatRequest, name: str, model: str) -> ResponseAnswer:
        assert isinstance(request, AskedResponse)
        # A response has no place for what is told of the tokens of its thinking.
        chat = self._format.answer(request, name, model, tells_thinking_tokens=False)
        return ResponseAnswer(chat, request.request)

    async def _keep(self, request: ChatRequest, answer: Writer, tenant: Tenant | None) -> None:
        assert isinstance(request, AskedResponse)
        assert isinstance(answer, ResponseAnswer)
        if request.request.stores:
            messages = [*request.before, *request.request.messages, *answer.said]
            await asyncio.to_thread(self._stored.put, answer.response, messages, tenant)  # it may hold many pictures
