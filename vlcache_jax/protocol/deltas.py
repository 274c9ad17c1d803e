"""Parsed deltas of a streamed answer: reasoning, content and tool calls."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
JSON_FORMAT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Format of JSON in the models' training data."""


@dataclass(frozen=True)
class CallDelta:
    """Delta of a tool call.

    Attributes:
      index: index of the call in its answer.
      arguments: next characters of the arguments' JSON.
      id, name: id and function name, only in the first delta of a call.
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None

    def as_openai(self) -> dict[str, Any]:
        """Return an element of OpenAI's `delta.tool_calls`."""
        if self.id is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


@dataclass(frozen=True)
class Delta:
    """Delta of an answer. Exactly one attribute is set.

    Attributes:
      content: text for the user.
      reasoning: text of the thinking.
      call: delta of a tool call.
    """

    content: str = ""
    reasoning: str = ""
    call: CallDelta | None = None


@dataclass
class ParsedAnswer:
    """Complete answer, joined from its deltas.

    Attributes:
      content, reasoning: see `Delta`.
      calls: elements of OpenAI's `message.tool_calls`.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, deltas: Iterable[Delta]) -> ParsedAnswer:
        content: list[str] = []
        reasoning: list[str] = []
        heads: list[CallDelta] = []
        arguments: list[list[str]] = []
        for delta in deltas:
            content.append(delta.content)
            reasoning.append(delta.reasoning)
            if delta.call is None:
                continue
            if delta.call.id is not None:
                heads.append(delta.call)
                arguments.append([])
            arguments[delta.call.index].append(delta.call.arguments)
        calls: list[dict[str, Any]] = [
            {"id": head.id, "type": "function", "function": {"name": head.name, "arguments": "".join(pieces)}}
            for head, pieces in zip(heads, arguments, strict=True)
        ]
        return cls("".join(content), "".join(reasoning), calls)


def call_id(answer_id: str, index: int) -> str:
    """Return the id of a tool call, by its index in an answer."""
    return f"call_{hashlib.sha256(f'{answer_id}:{index}'.encode()).hexdigest()[:24]}"


def joined_pieces(pieces: Iterable[CallDelta]) -> list[CallDelta]:
    """Join the deltas of each call in one event. Some clients do not support two deltas of a call in one list."""
    found: dict[int, CallDelta] = {}
    for piece in pieces:
        before = found.get(piece.index)
        found[piece.index] = piece if before is None else replace(before, arguments=before.arguments + piece.arguments)
    return list(found.values())


def unfinished(text: str, tag: str) -> int:
    """Return the number of characters at the end of `text` that may begin `tag` and are not yet all of it."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
