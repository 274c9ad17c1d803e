"""OpenAI's Responses: chats that the server remembers, and whose answers may search libraries."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vlcache_jax.cache.keys import TenantSalt
from vlcache_jax.checks import short
from vlcache_jax.library import Searches
from vlcache_jax.outputs import RequestDelta
from vlcache_jax.protocol.requests import ChatRequest
from vlcache_jax.protocol.response_answers import ResponseAnswer
from vlcache_jax.protocol.responses import ResponseRequest
from vlcache_jax.protocol.values import ApiError
from vlcache_jax.server.errors import as_api_error
from vlcache_jax.server.inference import Chats, Events, More, Writer
from vlcache_jax.server.searching import Searching
from vlcache_jax.server.stored import StoredResponses
from vlcache_jax.server.tenants import Tenant


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
    """OpenAI's Responses, which are chats that the server remembers.

    Args:
      stored: those that are remembered.
      searching: knows the libraries that answers may search.
    """

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

    def _deltas(
        self, prompt: Any, request: ChatRequest, salt: str | TenantSalt | None, field: str
    ) -> AsyncGenerator[More]:
        assert isinstance(request, AskedResponse)
        most = request.params.max_tokens

        def ask(added: Sequence[Mapping[str, Any]], used: int) -> AsyncGenerator[RequestDelta]:
            params = request.params.clone()
            if added and request.forces:
                params.structured_outputs = None
            if most is not None:
                params.max_tokens = most - used
                params.min_tokens = min(params.min_tokens, params.max_tokens)
            return self._turn([*prompt, *added], request, params, salt, field)

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
