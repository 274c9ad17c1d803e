"""Messages and events of Anthropic's Messages API, made from the parsed deltas of chats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vlcache_jax.common.json_files import parse_json
from vlcache_jax.outputs import PromptOutput, RequestDelta
from vlcache_jax.protocol.answers import ChatAnswer, Counts
from vlcache_jax.protocol.deltas import CallDelta, Delta
from vlcache_jax.protocol.schema import ApiError

if TYPE_CHECKING:
    from vlcache_jax.outputs import RequestOutput

_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}  # all others are "end_turn" or "stop_sequence"


@dataclass
class _Block:
    """Content block of a message.

    Attributes:
      kind: its `type`: thinking, text or tool_use.
      call: `id` and `name` of a call.
      pieces: pieces of the text, or of the JSON of the call's input.
    """

    kind: str
    call: Mapping[str, Any] = field(default_factory=dict)
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass
class MessageAnswer:
    """Writer of a message, as one object or as events.

    Attributes:
      chat: writer of the same answer as a chat completion, with the message's id.
      sign: function from the text of a thinking block to its signature.
      message: the message so far, complete after `last`.
    """

    chat: ChatAnswer
    sign: Callable[[str], str]
    message: dict[str, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._content: list[dict[str, Any]] = []  # blocks that have ended
        self._open: _Block | None = None
        self._end: dict[str, Any] = {}

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the complete message; `outputs` has one output."""
        [output] = outputs
        prompt = PromptOutput(
            output.prompt, output.prompt_token_ids, output.num_cached_tokens, output.cache,
            compression=output.compression,
        )  # fmt: skip
        delta = RequestDelta(output.request_id, tuple(output.outputs), output.metrics, prompt, finished=True)
        for _ in (*self.pieces(delta), *self.last()):
            pass
        return self.message

    def pieces(self, delta: RequestDelta, prompt: int = 0) -> Iterator[dict[str, Any]]:
        """Yield the events of a delta."""
        parsed, end = self.chat.read(delta)
        if not self.message:
            self.message = {
                "id": self.chat.id, "type": "message", "role": "assistant", "model": self.chat.model, "content": [],
                "stop_reason": None, "stop_sequence": None, "usage": self._usage(),
            }  # fmt: skip
            yield {"type": "message_start", "message": dict(self.message)}
            yield {"type": "ping"}
        # Calls in XML consist of complete arguments even if they are cut off.
        is_cut = end["finish_reason"] == "length" and self.chat.parts.xml_tools is None
        for i, one in enumerate(parsed):
            yield from self._grow(one, is_cut=is_cut and i == len(parsed) - 1)
        if end["finish_reason"] is not None:
            self._end = end

    def last(self) -> Iterator[dict[str, Any]]:
        """Yield the last events of a stream."""
        yield from self._close()
        reason, stop = self._end.get("finish_reason"), self._end.get("stop_reason")
        sequence = stop if isinstance(stop, str) and reason == "stop" else None
        ended = {
            "stop_reason": _REASONS.get(str(reason), "end_turn" if sequence is None else "stop_sequence"),
            "stop_sequence": sequence,
        }
        usage = {"usage": self._usage()} | self.chat.extras
        self.message |= {"content": self._content} | ended | usage
        yield {"type": "message_delta", "delta": ended} | usage
        yield {"type": "message_stop"}

    def failed(self, error: ApiError) -> dict[str, Any]:
        """Return the event of an error that ends the stream."""
        return error.to_anthropic(f"req_{self.chat.id.partition('_')[2]}")

    def counts_of(self, prompt: int) -> Counts:
        """Return the token counts of the prompt."""
        return self.chat.counts_of(prompt)

    def _usage(self) -> dict[str, Any]:
        counts = self.chat.counts()
        return {
            "input_tokens": counts.prompt - counts.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": counts.cached,
            "output_tokens": counts.completion,
            "output_tokens_details": {"thinking_tokens": counts.reasoning},
        }

    def _grow(self, delta: Delta, *, is_cut: bool) -> Iterator[dict[str, Any]]:
        """Yield the events of a parsed delta; `is_cut` if it may end within an argument of a call."""
        if delta.reasoning:
            yield from self._ensure("thinking")
            yield self._add("thinking_delta", "thinking", delta.reasoning)
        elif delta.content:
            yield from self._ensure("text")
            yield self._add("text_delta", "text", delta.content)
        elif delta.call is not None:
            yield from self._call(delta.call, is_cut=is_cut)

    def _call(self, call: CallDelta, *, is_cut: bool) -> Iterator[dict[str, Any]]:
        if call.id is not None:
            yield from self._ensure("tool_use", id=call.id.replace("call_", "toolu_", 1), name=call.name)
        block = self._open
        assert block is not None
        piece = call.arguments
        if is_cut and parsed_object(block.text + piece) is None:
            piece = complete_part(block.text, piece)
        if piece:
            yield self._add("input_json_delta", "partial_json", piece)

    def _ensure(self, kind: str, **call: Any) -> Iterator[dict[str, Any]]:
        """Begin a block, unless the open one is of this kind. Each call is a block of its own."""
        if self._open is not None and self._open.kind == kind and not call:
            return
        yield from self._close()
        self._open = _Block(kind, call)
        empty: dict[str, Any] = {
            "thinking": {"thinking": "", "signature": ""}, "text": {"text": ""}, "tool_use": {**call, "input": {}},
        }[kind]  # fmt: skip
        yield self._event("content_block_start", content_block={"type": kind, **empty})

    def _add(self, kind: str, key: str, text: str) -> dict[str, Any]:
        assert self._open is not None
        self._open.pieces.append(text)
        return self._event("content_block_delta", delta={"type": kind, key: text})

    def _close(self) -> Iterator[dict[str, Any]]:
        """Yield the events that end the open block."""
        block = self._open
        if block is None:
            return
        text = block.text
        ended: dict[str, Any] = {"type": block.kind}
        if block.kind == "text":
            ended["text"] = text
        elif block.kind == "thinking":
            ended |= {"thinking": text, "signature": self.sign(text)}
            yield self._event("content_block_delta", delta={"type": "signature_delta", "signature": ended["signature"]})
        else:
            if parsed_object(text) is None and parsed_object(rest := text + "}" if text else "{}") is not None:
                yield self._add("input_json_delta", "partial_json", rest[len(text) :])
            ended |= {**block.call, "input": parsed_object(block.text) or {}}
        yield self._event("content_block_stop")
        self._content.append(ended)
        self._open = None

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        return {"type": kind, "index": len(self._content), **more}


def parsed_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object of a text; None if the text is none."""
    try:
        found = parse_json(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def complete_part(before: str, piece: str) -> str:
    """Return the beginning of a piece of cut arguments, up to the last complete argument.

    Args:
      before: the arguments so far, all complete.
      piece: the next characters of the arguments, which end within an argument.
    """
    end, depth, in_string, is_escaped = 0, 0, False, False
    for i, char in enumerate(before + piece):
        if in_string:
            in_string, is_escaped = is_escaped or char != '"', not is_escaped and char == "\\"
        elif char == '"':
            in_string = True
        elif char in "{[":
            depth += 1
            end = i + 1 if depth == 1 else end
        elif char in "}]":
            depth -= 1
        elif char == "," and depth == 1:
            end = i
    return piece[: max(0, end - len(before))]
