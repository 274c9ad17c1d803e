"""Answer objects and events of OpenAI's Responses API, made from those of chat completions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vlcache_jax.outputs import SearchBegun, SearchRound
from vlcache_jax.protocol.answers import ChatAnswer, Counts
from vlcache_jax.protocol.responses import ResponseRequest
from vlcache_jax.protocol.schema import ApiError
from vlcache_jax.protocol.tools import SEARCH

if TYPE_CHECKING:
    from vlcache_jax.outputs import RequestDelta, RequestOutput

_SEARCHES = "file_search_call"
_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc", _SEARCHES: "fs"}


@dataclass
class _Item:
    """Item of the output: reasoning, a message, a tool call or a search.

    Attributes:
      kind: its `type`.
      id: its id.
      call: `call_id` and `name` of a call.
      pieces: pieces of the text or of the arguments.
      logprobs: log probabilities of a message's tokens.
      found: result of a search; None if it has not finished.
      returns_results: True to return the images that a search found.
    """

    kind: str
    id: str
    call: dict[str, str] = field(default_factory=dict)
    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    found: SearchRound | None = None
    returns_results: bool = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def part(self) -> dict[str, Any]:
        """Return the content part."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    def to_dict(self, status: str) -> dict[str, Any]:
        """Return the item as OpenAI's object with the text so far."""
        if self.kind == _SEARCHES:
            return self._search(status)
        head = {"id": self.id, "type": self.kind, "status": status}
        if self.kind == "function_call":
            return head | self.call | {"arguments": self.text}
        own: dict[str, Any] = {"summary": []} if self.kind == "reasoning" else {"role": "assistant"}
        return head | own | {"content": [] if status == "in_progress" else [self.part()]}

    def _search(self, status: str) -> dict[str, Any]:
        if status != "in_progress":
            report = None if self.found is None else self.found.report
            status = "incomplete" if report is None else "completed" if report.error is None else "failed"
        queries = [_query(self.text)] if status != "in_progress" else []
        results = None
        if self.returns_results and self.found is not None:
            results = list(map(_result, self.found.hits))
        return {"id": self.id, "type": self.kind, "status": status, "queries": queries, "results": results}


@dataclass
class ResponseAnswer:
    """Writer of a response, as one object or as events.

    Attributes:
      chat: writer of the same answer as a chat completion, with the response's id.
      request: the request.
      said: the complete answer as chat messages, including those of its searches.
      response: the complete response object.
    """

    chat: ChatAnswer
    request: ResponseRequest
    said: list[Mapping[str, Any]] = field(default_factory=list, init=False)
    response: dict[str, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._number = 0  # `sequence_number` of the next event
        self._items: list[_Item] = []  # the last one is still open
        self._turn = 0  # number of searches so far
        self._since = 0  # number of items of earlier turns
        self._finish_reason: str | None = None
        self._extras: dict[str, Any] = {}  # fields in addition to OpenAI's

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the complete response; `outputs` has one output."""
        completion = self.chat.whole(outputs)
        self._note(completion)
        [choice] = completion["choices"]
        message = choice["message"]
        calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls", ()))]
        for _ in self._grow(message | {"tool_calls": calls}, choice.get("logprobs")):
            pass
        self._finish_reason = choice["finish_reason"]
        return self._finish(self.chat.counts())

    def pieces(self, delta: RequestDelta | SearchBegun | SearchRound, prompt: int = 0) -> Iterator[dict[str, Any]]:
        """Yield the events of a delta or of a search."""
        if isinstance(delta, SearchBegun):
            yield from self._search_begins()
            return
        if isinstance(delta, SearchRound):
            yield from self._found(delta)
            return
        if not self._number:
            for kind in ("created", "in_progress"):
                yield self._event(f"response.{kind}", response=self._object("in_progress", None))
        for chunk in self.chat.pieces(delta, self._turn):
            self._note(chunk)
            for choice in chunk["choices"]:
                yield from self._grow(choice["delta"], choice["logprobs"])
                self._finish_reason = choice["finish_reason"] or self._finish_reason

    def last(self) -> Iterator[dict[str, Any]]:
        """Yield the last events of a stream."""
        for chunk in self.chat.last():
            self._note(chunk)
        yield from self._close()
        response = self._finish(self.chat.counts())
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, error: ApiError) -> dict[str, Any]:
        """Return the event of an error that ends the stream."""
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def counts_of(self, prompt: int) -> Counts:
        """Return the token counts of the prompt of the current turn."""
        return self.chat.counts_of(self._turn)

    def _note(self, completion: Mapping[str, Any]) -> None:
        self._extras |= {key: completion[key] for key in ("cache", "prompt_token_ids") if key in completion}

    def _grow(self, delta: Mapping[str, Any], logprobs: Mapping[str, Any] | None) -> Iterator[dict[str, Any]]:
        """Yield the events of a chat's delta or of its complete message."""
        if text := delta.get("reasoning"):
            yield from self._open("reasoning")
            yield from self._add("response.reasoning_text.delta", text, content_index=0)
        said = (logprobs or {}).get("content") or []
        if (text := delta.get("content")) or said:
            yield from self._open("message")
            self._items[-1].logprobs += said
            yield from self._add("response.output_text.delta", text or "", content_index=0, logprobs=said)
        for piece in delta.get("tool_calls") or ():
            function = piece["function"]
            if "id" in piece:
                is_search = self.request.search is not None and function["name"] == SEARCH
                yield from self._open(
                    _SEARCHES if is_search else "function_call", call_id=piece["id"], name=function["name"]
                )
            if function["arguments"] and self._items[-1].kind == _SEARCHES:
                self._items[-1].pieces.append(function["arguments"])
            elif function["arguments"]:
                yield from self._add("response.function_call_arguments.delta", function["arguments"])

    def _open(self, kind: str, **call: str) -> Iterator[dict[str, Any]]:
        """Open an item of a kind, unless the last one is of this kind. Each call is a new item."""
        if self._items and self._items[-1].kind == kind and not call:
            return
        yield from self._close()
        name = f"{_PREFIXES[kind]}_{self.chat.id.partition('_')[2]}{len(self._items)}"
        item = _Item(kind, name, call, returns_results=self.request.returns_results)
        self._items.append(item)
        index = len(self._items) - 1
        yield self._event("response.output_item.added", output_index=index, item=item.to_dict("in_progress"))
        if kind == _SEARCHES:
            yield self._at_last("response.file_search_call.in_progress")
        elif kind != "function_call":
            where = {"item_id": item.id, "output_index": index, "content_index": 0}
            yield self._event("response.content_part.added", **where, part=item.part())

    def _search_begins(self) -> Iterator[dict[str, Any]]:
        if not self._items or self._items[-1].kind != _SEARCHES:  # the call was inside of the reasoning
            yield from self._open(_SEARCHES, call_id=f"{self.chat.id}-{self._turn}", name=SEARCH)
        yield self._at_last("response.file_search_call.searching")

    def _found(self, found: SearchRound) -> Iterator[dict[str, Any]]:
        """Record the result of the search that ended this turn, and begin the next turn."""
        self._items[-1].found = found
        yield self._at_last("response.file_search_call.completed")
        self.said += found.messages
        self._turn, self._since = self._turn + 1, len(self._items)

    def _at_last(self, kind: str) -> dict[str, Any]:
        return self._event(kind, item_id=self._items[-1].id, output_index=len(self._items) - 1)

    def _add(self, kind: str, text: str, **more: Any) -> Iterator[dict[str, Any]]:
        item = self._items[-1]
        item.pieces.append(text)
        yield self._event(kind, item_id=item.id, output_index=len(self._items) - 1, delta=text, **more)

    def _close(self) -> Iterator[dict[str, Any]]:
        """Yield the events that end the last item."""
        if not self._items:
            return
        item, where = self._items[-1], {"item_id": self._items[-1].id, "output_index": len(self._items) - 1}
        if item.kind == "function_call":
            done = {**where, "name": item.call["name"], "arguments": item.text}
            yield self._event("response.function_call_arguments.done", **done)
        elif item.kind != _SEARCHES:
            where["content_index"] = 0
            more = {} if item.kind == "reasoning" else {"logprobs": item.logprobs}
            yield self._event(f"response.{item.part()['type']}.done", **where, text=item.text, **more)
            yield self._event("response.content_part.done", **where, part=item.part())
        index = len(self._items) - 1
        yield self._event("response.output_item.done", output_index=index, item=item.to_dict("completed"))

    def _finish(self, counts: Counts) -> dict[str, Any]:
        items = self._items[self._since :]
        texts = {kind: "".join(item.text for item in items if item.kind == kind) for kind in _PREFIXES}
        message: dict[str, Any] = {"role": "assistant", "content": texts["message"]}
        if texts["reasoning"]:
            message["reasoning_content"] = texts["reasoning"]
        if calls := [item for item in items if item.call]:
            message["tool_calls"] = [
                {"id": item.call["call_id"], "type": "function",
                 "function": {"name": item.call["name"], "arguments": item.text}} for item in calls
            ]  # fmt: skip
        self.said.append(message)
        self.response = self._object("incomplete" if self._finish_reason == "length" else "completed", counts)
        return self.response

    def _object(self, status: str, counts: Counts | None) -> dict[str, Any]:
        """Return the response object with the items so far."""
        usage = None
        if counts is not None:
            usage = {
                "input_tokens": counts.prompt,
                "input_tokens_details": {
                    "cached_tokens": counts.cached, "cache_write_tokens": 0, "image_tokens": counts.image,
                },
                "output_tokens": counts.completion,
                "output_tokens_details": {"reasoning_tokens": counts.reasoning},
                "total_tokens": counts.prompt + counts.completion,
            }  # fmt: skip
        return {
            "id": self.chat.id,
            "object": "response",
            "created_at": self.chat.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.chat.model,
            "output": [] if status == "in_progress" else [item.to_dict(status) for item in self._items],
            "usage": usage,
            **self.request.repeated,
            **self._extras,
        }

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **more}


def _query(arguments: str) -> str:
    """Return the query in the arguments of a search, or "" if they have none."""
    try:
        found = json.loads(arguments)
    except ValueError:
        return ""
    return str(found.get("query", "")) if isinstance(found, dict) else ""


def _result(hit: Any) -> dict[str, Any]:
    """Return a hit as OpenAI's search result. Its attributes are the metadata that are strings, numbers or booleans."""
    attributes = {key: value for key, value in hit.metadata.items() if isinstance(value, str | int | float)}
    name = attributes.get("filename")
    filename = name if isinstance(name, str) else hit.id
    return {"file_id": hit.id, "filename": filename, "score": hit.score, "text": "", "attributes": attributes}
