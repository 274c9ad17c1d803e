"""What is new of a streamed answer, told apart: what is thought, what is said, what is called."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class CallDelta:
    """A piece of a tool call.

    Attributes:
      index: of the call in its answer.
      arguments: what follows of their JSON.
      id, name: in the first piece of a call alone.
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None

    def as_openai(self) -> dict[str, Any]:
        """An element of `delta.tool_calls`."""
        if self.id is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


@dataclass(frozen=True)
class Delta:
    """What is new of an answer: one of the three.

    Attributes:
      content: text for the user.
      reasoning: text that the model thinks.
      call: a piece of a tool call.
    """

    content: str = ""
    reasoning: str = ""
    call: CallDelta | None = None


@dataclass
class Joined:
    """An answer whose deltas are put together.

    Attributes:
      content, reasoning: see `Delta`.
      calls: elements of OpenAI's `message.tool_calls`.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, deltas: Iterable[Delta]) -> Joined:
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


def joined_pieces(pieces: Iterable[CallDelta]) -> list[CallDelta]:
    """Those of one event, each call once: not every client puts two pieces of one list together."""
    found: dict[int, CallDelta] = {}
    for piece in pieces:
        before = found.get(piece.index)
        found[piece.index] = piece if before is None else replace(before, arguments=before.arguments + piece.arguments)
    return list(found.values())


def unfinished(text: str, tag: str) -> int:
    """How many characters at the end of a text may be the beginning of a tag, and are not yet all of it."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
