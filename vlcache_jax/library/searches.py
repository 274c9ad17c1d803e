"""Retrieval while an answer is made: the model asks for pictures by a tool call, and goes on with those that are found.

The turn of the assistant ends with its call. What a retriever finds comes as the tool's message, pictures by their
names, behind what was generated so far: that lies in the KV pool, and the pictures are linked, so that nothing is
computed twice.
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
from vlcache_jax.inputs.messages import read_tools, tool_names
from vlcache_jax.library.libraries import Library
from vlcache_jax.llm import LLM, Asked
from vlcache_jax.outputs import RequestDelta, RequestOutput, SearchBegun, Searched, SearchRound
from vlcache_jax.protocol.deltas import Joined
from vlcache_jax.protocol.parsing import AnswerParser
from vlcache_jax.protocol.tools import SEARCH, forced_call
from vlcache_jax.request_options import RequestOptions
from vlcache_jax.sampling import SamplingParams, StructuredOutputs
from vlcache_jax.service import Service

_MOST_QUERY = 300  # characters
type Filter = Callable[[Mapping[str, Any]], bool] | Mapping[str, Any] | None


@dataclass(frozen=True)
class Hit:
    """An item that was found.

    Attributes:
      id: its name in the library.
      score: the cosine of query and picture; with a reranker its score.
      metadata: of the item.
    """

    id: str
    score: float
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Finds(Protocol):
    """A `Retriever`."""

    library: Library

    def search(self, query: Any, k: int = 10, *, filter: Filter = None) -> list[Hit]:
        """See `Retriever.search`."""


@dataclass(frozen=True)
class Searches:
    """How an answer may search a library; `LLM.chat(..., retrieve=...)` takes it, or a `Retriever` for the defaults.

    Attributes:
      retriever: finds. Its library is of the model that answers.
      k: pictures that one search brings at most.
      rounds: searches of an answer at most; calls beyond stay as they are.
      tokens: that the pictures of one search take at most.
      timeout: seconds that a search may take. One that is slower, or fails, has found nothing.
      required: whether each answer begins with a search; else the model decides.
      filter: see `Retriever.search`.
      least: score that pictures have at least; None: any.

    Raises:
      ValueError: one is wrong.
    """

    retriever: Finds
    k: int = 3
    rounds: int = 2
    tokens: int = 4096
    timeout: float = 10.0
    required: bool = False
    filter: Filter = None
    least: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(getattr(self.retriever, "library", None), Library):
            raise ValueError(f"retriever must be a Retriever, got {type(self.retriever).__name__}")
        for name in ("k", "rounds", "tokens"):
            check_whole(name, getattr(self, name), 1)
        if not (is_a(self.timeout, int | float) and self.timeout > 0):
            raise ValueError(f"timeout must be a positive number of seconds, got {self.timeout!r}")
        check_flags(required=self.required)
        if not (self.least is None or is_a(self.least, int | float)):
            raise ValueError(f"least must be a number or None, got {short(self.least)}")

    @property
    def tool(self) -> dict[str, Any]:
        """What the model is told."""
        query = {"type": "string", "minLength": 1, "maxLength": _MOST_QUERY, "description": "What the pictures show."}
        count = {"type": "integer", "minimum": 1, "maximum": self.k, "description": f"How many; {self.k} by default."}
        parameters = {"type": "object", "properties": {"query": query, "k": count}, "required": ["query"]}
        about = f"Finds pictures of the library {self.retriever.library.name}. They come with the result."
        named = {"name": SEARCH, "description": about, "parameters": {**parameters, "additionalProperties": False}}
        return {"type": "function", "function": named}

    def answered(
        self,
        llm: LLM,
        conversations: Sequence[Asked],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        name: str,
        options: RequestOptions,
        more: Mapping[str, Any],
    ) -> list[RequestOutput]:
        """The answers to conversations; see `LLM.chat`.

        Args:
          name: of a conversation, with {} for its number.
          options: of all of them.
          more: the other arguments of `LLM.chat`.

        Raises:
          RequestError, ValueError: see `LLM.chat`; or the library is another model's, or another owner's.
        """
        library = self.retriever.library
        if library.service is not llm.service:
            raise ValueError(f"retrieve must search a library of this engine, got {library.name!r} of another one")
        if library.owner not in (None, options.cache_salt):
            raise ValueError(f"cache_salt must be the owner's of library {library.name!r}")
        params = _each(sampling_params, len(conversations), llm)
        rows = [_SearchRow(given, own) for given, own in zip(conversations, params, strict=True)]
        given = more.get("tools") or ()
        tools = self.beside(given)
        forced = forced_call(tools, {"type": "function", "function": {"name": SEARCH}}) if self.required else None
        for number in range(self.rounds + 1):
            going = [row for row in rows if row.goes_on]
            if not going:
                break
            outputs = llm.chat(
                [row.conversation for row in going],
                [row.params(forced if number == 0 else None) for row in going],
                **{**more, "options": options, "tools": tools, "on_error": "return"},
            )
            for row, output in zip(going, outputs, strict=True):
                row.take(output, searches=number < self.rounds)
            looking = [(row, self._begun(row.call, llm.service)) for row in going if row.goes_on]
            start = time.monotonic()
            for row, future in looking:
                with contextlib.suppress(TimeoutError):
                    future.exception(max(0.0, start + self.timeout - time.monotonic()))
                row.go_on(self._found(future, start, row.call, row.text))
        return _results(rows, name, more.get("on_error", "raise"))

    def beside(self, tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The tools of a request, and the one that searches.

        Raises:
          ValueError: one of them has its name.
        """
        if SEARCH in tool_names(read_tools(tools)):
            raise ValueError(f"tools must not have one called {SEARCH} beside one that searches a library")
        return [*tools, self.tool]

    async def turns(
        self,
        service: Service,
        ask: Callable[[Sequence[Mapping[str, Any]], int], AsyncGenerator[RequestDelta]],
        most: int | None = None,
    ) -> AsyncGenerator[RequestDelta | SearchBegun | SearchRound]:
        """An answer as it comes: the deltas of its turns, and between them what was searched for.

        Args:
          service: of the engine that answers.
          ask: (messages that follow on the conversation, tokens that were answered) -> the next turn.
          most: tokens of the whole answer; None: any number.
        """
        added: list[Mapping[str, Any]] = []
        used = 0
        for number in range(self.rounds + 1):
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
            call = _call(text) if reason == "stop" and number < self.rounds else None
            if call is None or (most is not None and used >= most):
                return
            yield SearchBegun()
            future, start = self._begun(call, service), time.monotonic()
            with contextlib.suppress(Exception):  # what it is, `future` says
                await asyncio.wait_for(asyncio.wrap_future(future), self.timeout)
            found = self._found(future, start, call, text)
            added += found.messages
            yield found

    def _begun(self, call: Mapping[str, Any], service: Service) -> concurrent.futures.Future[list[Hit]]:
        """A search under way, in a thread that nobody waits for if it hangs, not even the end of the process."""
        future: concurrent.futures.Future[list[Hit]] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()  # who stops waiting does not cancel it

        def work() -> None:
            try:
                found = self._that_fit(self._search(call), service)
            except BaseException as error:  # of the caller's own embedder, too
                told = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
                future.set_exception(told)
            else:
                future.set_result(found)

        threading.Thread(target=work, name="vlcache-search", daemon=True).start()
        return future

    def _search(self, call: Mapping[str, Any]) -> list[Hit]:
        query, count = call.get("query"), call.get("k", self.k)
        if not isinstance(query, str) or not query:
            raise ValueError(f"query must be a text, got {short(query)}")
        most = min(count, self.k) if is_a(count, int) and count > 0 else self.k
        hits = self.retriever.search(query, most, filter=self.filter)
        return hits if self.least is None else [hit for hit in hits if hit.score >= self.least]

    def _found(
        self,
        future: concurrent.futures.Future[list[Hit]],
        start: float,
        call: Mapping[str, Any],
        text: str,
    ) -> SearchRound:
        """What is told of a search, and to the model; `text` is the turn that asked."""
        hits: list[Hit] = []
        if not future.done():
            error: str | None = f"the search took more than {self.timeout:g} seconds"
        elif (failure := future.exception()) is not None:
            error = f"{type(failure).__name__}: {failure}"
        else:
            hits, error = future.result(), None
        shown = tuple((hit.id, hit.score) for hit in hits)
        told = Searched(str(call.get("query")), shown, time.monotonic() - start, error)
        parts: list[dict[str, Any]] = [] if hits else [{"type": "text", "text": "[]"}]
        for hit in hits:
            said = json.dumps({**hit.metadata, "id": hit.id}, ensure_ascii=False)
            parts += [{"type": "text", "text": f"{said}\n"}, self.retriever.library.part(hit.id)]
        turn = {"role": "assistant", "content": text}
        return SearchRound(told, tuple(hits), (turn, {"role": "tool", "content": parts}))

    def _that_fit(self, hits: Sequence[Hit], service: Service) -> list[Hit]:
        """As many as their tokens let."""
        processor, left, found = service.intake.processor, self.tokens, []
        for hit in hits:
            item = self.retriever.library.get(hit.id)
            left -= processor.num_tokens(processor.grid(item.picture.height, item.picture.width, item.limits))
            if left < 0:
                break
            found.append(hit)
        return found


@dataclass
class _SearchRow:
    """One conversation as it goes on."""

    given: Asked
    asked: SamplingParams
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
        """Of the next turn."""
        params = self.asked.clone()
        if params.max_tokens is not None:
            params.max_tokens -= self.used
            params.min_tokens = min(params.min_tokens, params.max_tokens)
        if forced is not None:
            params.structured_outputs = StructuredOutputs(grammar=forced)
        return params

    def take(self, output: RequestOutput, *, searches: bool) -> None:
        """The end of a turn."""
        self.output, self.goes_on = output, False
        if output.error is not None or not searches:
            return
        [answer] = output.outputs
        self.used += len(answer.token_ids)
        call = _call(answer.text)
        has_room = self.asked.max_tokens is None or self.used < self.asked.max_tokens
        if call is not None and answer.finish_reason == "stop" and has_room:
            self.call, self.goes_on, self.text = call, True, answer.text

    def go_on(self, found: SearchRound) -> None:
        """With what was found."""
        self.searched.append(found.told)
        self.added += found.messages


def _call(text: str) -> Mapping[str, Any] | None:
    """The arguments of an answer's last call, if all of its calls search: others wait for who asked. {} if no JSON."""
    parser = AnswerParser("", has_tools=True)
    calls = Joined.of([*parser.push(text), *parser.finish()]).calls
    if not calls or {call["function"]["name"] for call in calls} != {SEARCH}:
        return None
    try:
        found = json.loads(calls[-1]["function"]["arguments"] or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _each(given: SamplingParams | Sequence[SamplingParams] | None, count: int, llm: LLM) -> Sequence[SamplingParams]:
    """Sampling parameters of each conversation."""
    own = llm.get_default_sampling_params() if given is None else given
    listed = [own] * count if isinstance(own, SamplingParams) else list(own)
    if len(listed) != count or not all(isinstance(one, SamplingParams) for one in listed):
        raise ValueError(f"sampling_params must be one, or one for each of {count} conversations, got {short(given)}")
    for one in listed:
        if one.n != 1:
            raise ValueError(f"sampling_params n must be 1 beside retrieve, got {one.n}")
    return listed


def _results(rows: Sequence[_SearchRow], name: str, on_error: str) -> list[RequestOutput]:
    outputs = []
    errors: dict[int, str] = {}
    for number, row in enumerate(rows):
        assert row.output is not None
        error = row.output.error
        if error is not None:  # of the row's turn, whatever its place among those that went on
            error = re.sub(r"^conversations\[\d+\]", name.format(number), error)
            errors[number] = error
        outputs.append(
            dataclasses.replace(row.output, error=error, searches=tuple(row.searched), request_id=str(number))
        )
    if errors and on_error == "raise":
        raise RequestError(errors, [None if number in errors else one for number, one in enumerate(outputs)])
    return outputs
