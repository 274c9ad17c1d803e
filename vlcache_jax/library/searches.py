"""Retrieval during generation: the model requests images by a tool call and continues with the results.

The assistant's turn ends with the call. The results follow the generated tokens as a tool message that names the
images. The prefix is still in the KV pool and the images are loaded from the cache, so nothing is computed twice.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import re
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from vlcache_jax.calls.groups import RequestError
from vlcache_jax.common.checks import check_flags, check_whole, is_a, short
from vlcache_jax.common.renamed import renamed
from vlcache_jax.inputs.messages import read_tools, tool_names
from vlcache_jax.inputs.prompt import calls_in_xml
from vlcache_jax.library.libraries import Library
from vlcache_jax.llm import LLM, ConversationLike
from vlcache_jax.outputs import RequestDelta, RequestOutput, SearchBegun, Searched, SearchRound
from vlcache_jax.protocol.deltas import ParsedAnswer
from vlcache_jax.protocol.parsing import AnswerParser
from vlcache_jax.protocol.tools import SEARCH, forced_call
from vlcache_jax.request_options import RequestOptions
from vlcache_jax.sampling import SamplingParams, StructuredOutputs
from vlcache_jax.service import Service

_MAX_QUERY = 300  # characters
type Filter = Callable[[Mapping[str, Any]], bool] | Mapping[str, Any] | None


@dataclass(frozen=True)
class Hit:
    """Result of a search.

    Attributes:
      id: id of the item.
      score: cosine similarity of query and image; with a reranker its score.
      metadata: metadata of the item.
    """

    id: str
    score: float
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Searcher(Protocol):
    """Search over a library, such as a `Retriever`."""

    library: Library

    def search(self, query: Any, k: int = 10, *, filter: Filter = None) -> list[Hit]:
        """Return the best items for a query; see `Retriever.search`."""


@renamed({"k": "top_k", "rounds": "max_rounds", "tokens": "max_tokens", "least": "min_score"})
@dataclass(frozen=True)
class SearchOptions:
    """Options of searches during generation, for `LLM.chat(..., retrieve=...)`. A `Retriever` there means the defaults.

    Attributes:
      retriever: search over a library of the model that generates.
      top_k: maximum number of images that one search returns.
      max_rounds: maximum number of searches in one output; further calls are returned to the caller.
      max_tokens: maximum number of tokens that the images of one search take.
      timeout: time limit of a search in seconds. A search that fails or exceeds it returns no images.
      required: start each output with a search; False: the model decides.
      filter: see `Retriever.search`.
      min_score: minimum score of an image; None: any.

    Raises:
      ValueError: an attribute is invalid.
    """

    retriever: Searcher
    top_k: int = 3
    max_rounds: int = 2
    max_tokens: int = 4096
    timeout: float = 10.0
    required: bool = False
    filter: Filter = None
    min_score: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(getattr(self.retriever, "library", None), Library):
            raise ValueError(f"retriever must be a Retriever, got {type(self.retriever).__name__}")
        for name in ("top_k", "max_rounds", "max_tokens"):
            check_whole(name, getattr(self, name), 1)
        if not (is_a(self.timeout, int | float) and self.timeout > 0):
            raise ValueError(f"timeout must be a positive number of seconds, got {self.timeout!r}")
        check_flags(required=self.required)
        if not (self.min_score is None or is_a(self.min_score, int | float)):
            raise ValueError(f"min_score must be a number or None, got {short(self.min_score)}")

    @property
    def tool(self) -> dict[str, Any]:
        """Definition of the search tool for the chat template."""
        query = {"type": "string", "minLength": 1, "maxLength": _MAX_QUERY, "description": "What the pictures show."}
        count = {
            "type": "integer",
            "minimum": 1,
            "maximum": self.top_k,
            "description": f"How many; {self.top_k} by default.",
        }
        parameters = {"type": "object", "properties": {"query": query, "k": count}, "required": ["query"]}
        about = f"Finds pictures of the library {self.retriever.library.name}. They come with the result."
        named = {"name": SEARCH, "description": about, "parameters": {**parameters, "additionalProperties": False}}
        return {"type": "function", "function": named}

    def answered(
        self,
        llm: LLM,
        conversations: Sequence[ConversationLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        name: str,
        options: RequestOptions,
        more: Mapping[str, Any],
    ) -> list[RequestOutput]:
        """Return the outputs of conversations; see `LLM.chat`.

        Args:
          llm: engine that generates.
          conversations: conversations as `LLM.chat` takes them.
          sampling_params: for all conversations or one per conversation; None: the defaults.
          name: name of a conversation in errors, with {} for its number.
          options: options of all conversations.
          more: the other arguments of `LLM.chat`.

        Raises:
          RequestError, ValueError: see `LLM.chat`; or the library belongs to another engine or another owner.
        """
        library = self.retriever.library
        if library.service is not llm.service:
            raise ValueError(f"retrieve must search a library of this engine, got {library.name!r} of another engine")
        if library.owner not in (None, options.cache_salt):
            raise ValueError(f"cache_salt must match the owner of library {library.name!r}")
        params = _each(sampling_params, len(conversations), llm)
        rows = [_Conversation(given, own) for given, own in zip(conversations, params, strict=True)]
        given = more.get("tools") or ()
        tools = self.add_tool(given)
        xml = calls_in_xml(more.get("chat_template") or llm.service.renderer.chat_template)
        search = {"type": "function", "function": {"name": SEARCH}}
        forced = forced_call(tools, search, is_xml=xml) if self.required else None
        for number in range(self.max_rounds + 1):
            going = [row for row in rows if row.goes_on]
            if not going:
                break
            outputs = llm.chat(
                [row.conversation for row in going],
                [row.params(forced if number == 0 else None) for row in going],
                **{**more, "options": options, "tools": tools, "on_error": "return"},
            )
            for row, output in zip(going, outputs, strict=True):
                row.take(output, self.tool if number < self.max_rounds else None)
            searching = [(row, self._start(row.call, llm.service)) for row in going if row.goes_on]
            start = time.monotonic()
            for row, future in searching:
                with contextlib.suppress(TimeoutError):
                    future.exception(max(0.0, start + self.timeout - time.monotonic()))
                row.go_on(self._found(future, start, row.call, row.text))
        return _results(rows, name, more.get("on_error", "raise"))

    def add_tool(self, tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return the tools of a request with the search tool added.

        Raises:
          ValueError: one of them has the name of the search tool.
        """
        if SEARCH in tool_names(read_tools(tools)):
            raise ValueError(f"tools must not contain {SEARCH}, the name of the tool that searches a library")
        return [*tools, self.tool]

    async def stream(
        self,
        service: Service,
        ask: Callable[[Sequence[Mapping[str, Any]], int], AsyncGenerator[RequestDelta]],
        max_output_tokens: int | None = None,
    ) -> AsyncGenerator[RequestDelta | SearchBegun | SearchRound]:
        """Yield the deltas of an output as they arrive, with a report of each search between its turns.

        Args:
          service: service of the engine that generates.
          ask: starts the next turn, given the messages added to the conversation and the number of generated tokens.
          max_output_tokens: maximum number of tokens of the output; None: no limit.
        """
        added: list[Mapping[str, Any]] = []
        used = 0
        for number in range(self.max_rounds + 1):
            pieces: list[str] = []
            reason: str | None = None
            async with contextlib.aclosing(ask(added, used)) as deltas:
                async for delta in deltas:
                    for one in delta.outputs:
                        pieces.append(one.text)
                        used += len(one.token_ids)
                        reason = one.finish_reason or reason
                    yield delta
            text = "".join(pieces)
            call = _call(text, self.tool) if reason == "stop" and number < self.max_rounds else None
            if call is None or (max_output_tokens is not None and used >= max_output_tokens):
                return
            yield SearchBegun()
            future, start = self._start(call, service), time.monotonic()
            with contextlib.suppress(Exception):  # `_found` reads the error from `future`
                await asyncio.wait_for(asyncio.wrap_future(future), self.timeout)
            found = self._found(future, start, call, text)
            added += found.messages
            yield found

    def _start(self, call: Mapping[str, Any], service: Service) -> concurrent.futures.Future[list[Hit]]:
        """Start a search in a daemon thread: if it hangs, it delays neither requests nor the end of the process."""
        future: concurrent.futures.Future[list[Hit]] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()  # a waiter that times out must not cancel it

        def work() -> None:
            try:
                found = self._fitting(self._search(call), service)
            except BaseException as error:  # a user's embedder may raise anything
                shown = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
                future.set_exception(shown)
            else:
                future.set_result(found)

        threading.Thread(target=work, name="vlcache-search", daemon=True).start()
        return future

    def _search(self, call: Mapping[str, Any]) -> list[Hit]:
        query, count = call.get("query"), call.get("k", self.top_k)
        if not isinstance(query, str) or not query:
            raise ValueError(f"query must be a text, got {short(query)}")
        limit = min(count, self.top_k) if is_a(count, int) and count > 0 else self.top_k
        hits = self.retriever.search(query, limit, filter=self.filter)
        return hits if self.min_score is None else [hit for hit in hits if hit.score >= self.min_score]

    def _found(
        self,
        future: concurrent.futures.Future[list[Hit]],
        start: float,
        call: Mapping[str, Any],
        text: str,
    ) -> SearchRound:
        """Return the report of a search and the messages for the model; `text` is the turn with the call."""
        hits: list[Hit] = []
        if not future.done():
            error: str | None = f"the search took more than {self.timeout:g} seconds"
        elif (failure := future.exception()) is not None:
            error = f"{type(failure).__name__}: {failure}"
        else:
            hits, error = future.result(), None
        shown = tuple((hit.id, hit.score) for hit in hits)
        report = Searched(str(call.get("query")), shown, time.monotonic() - start, error)
        parts: list[dict[str, Any]] = [] if hits else [{"type": "text", "text": "[]"}]
        for hit in hits:
            described = json.dumps({**hit.metadata, "id": hit.id}, ensure_ascii=False)
            parts += [{"type": "text", "text": f"{described}\n"}, self.retriever.library.part(hit.id)]
        turn = {"role": "assistant", "content": text}
        return SearchRound(report, tuple(hits), (turn, {"role": "tool", "content": parts}))

    def _fitting(self, hits: Sequence[Hit], service: Service) -> list[Hit]:
        """Return the first hits whose images fit in `max_tokens`."""
        left, found = self.max_tokens, []
        for hit in hits:
            left -= service.preparation.tokens(self.retriever.library.get(hit.id))
            if left < 0:
                break
            found.append(hit)
        return found


@dataclass
class _Conversation:
    """State of a conversation with searches."""

    given: ConversationLike
    sampling: SamplingParams
    added: list[Mapping[str, Any]] = field(default_factory=list)
    searched: list[Searched] = field(default_factory=list)
    output: RequestOutput | None = None
    call: Mapping[str, Any] = field(default_factory=dict)
    goes_on: bool = True
    used: int = 0
    text: str = ""

    @property
    def conversation(self) -> Any:
        if isinstance(self.given, Mapping):
            return {**self.given, "messages": [*self.given["messages"], *self.added]}
        return [*self.given, *self.added]

    def params(self, forced: str | None) -> SamplingParams:
        """Return the sampling parameters of the next turn."""
        params = self.sampling.clone()
        if params.max_tokens is not None:
            params.max_tokens -= self.used
            params.min_tokens = min(params.min_tokens, params.max_tokens)
        if forced is not None:
            params.structured_outputs = StructuredOutputs(grammar=forced)
        return params

    def take(self, output: RequestOutput, tool: Mapping[str, Any] | None) -> None:
        """Record the output of a turn, and whether another one follows; `tool` is that of searches if one may."""
        self.output, self.goes_on = output, False
        if output.error is not None or tool is None:
            return
        [answer] = output.outputs
        self.used += len(answer.token_ids)
        call = _call(answer.text, tool)
        has_room = self.sampling.max_tokens is None or self.used < self.sampling.max_tokens
        if call is not None and answer.finish_reason == "stop" and has_room:
            self.call, self.goes_on, self.text = call, True, answer.text

    def go_on(self, found: SearchRound) -> None:
        """Add the result of a search."""
        self.searched.append(found.report)
        self.added += found.messages


def _call(text: str, tool: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the arguments of an output's last call if all of its calls are searches; {} if they are not JSON.

    Other calls are returned to the caller.

    Args:
      tool: the tool of searches, see `SearchOptions.tool`.
    """
    parser = AnswerParser("", has_tools=True, xml_tools=[tool] if calls_in_xml(text) else None)
    calls = ParsedAnswer.of([*parser.push(text), *parser.finish()]).calls
    if not calls or {call["function"]["name"] for call in calls} != {SEARCH}:
        return None
    try:
        found = json.loads(calls[-1]["function"]["arguments"] or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _each(given: SamplingParams | Sequence[SamplingParams] | None, count: int, llm: LLM) -> Sequence[SamplingParams]:
    """Return the sampling parameters of each conversation."""
    own = llm.get_default_sampling_params() if given is None else given
    listed = [own] * count if isinstance(own, SamplingParams) else list(own)
    if len(listed) != count or not all(isinstance(one, SamplingParams) for one in listed):
        raise ValueError(f"sampling_params must be one, or one for each of {count} conversations, got {short(given)}")
    for one in listed:
        if one.n != 1:
            raise ValueError(f"sampling_params n must be 1 with retrieve, got {one.n}")
    return listed


def _results(rows: Sequence[_Conversation], name: str, on_error: str) -> list[RequestOutput]:
    outputs = []
    errors: dict[int, str] = {}
    for number, row in enumerate(rows):
        assert row.output is not None
        error = row.output.error
        if error is not None:  # it has the number of the conversation among those of its turn
            error = re.sub(r"^conversations\[\d+\]", name.format(number), error)
            errors[number] = error
        outputs.append(
            dataclasses.replace(row.output, error=error, searches=tuple(row.searched), request_id=str(number))
        )
    if errors and on_error == "raise":
        raise RequestError(errors, [None if number in errors else one for number, one in enumerate(outputs)])
    return outputs
