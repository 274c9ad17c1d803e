"""An answer's text as deltas: thinking first, then text and tool calls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from vlcache_jax.inputs.thinking import is_opened, thinks
from vlcache_jax.protocol.deltas import Delta
from vlcache_jax.protocol.reasoning import ReasoningParser, ThinkingTokens
from vlcache_jax.protocol.tools import ToolParser


class AnswerParser:
    """Tells the parts of an answer apart, whatever the pieces in which its text comes; put together, they are the same.

    Args:
      answer_id: of the answer, of which ids of calls are made.
      chat_template: that made the prompt, a Jinja text; it tells whether the model thinks. None: nothing is thinking.
      prompt: its text; it tells whether the thinking has begun there.
      has_tools: whether tool calls are looked for.
      is_single: of several calls the first alone is told.
      is_held: the answer is held to a form, so that it thinks only if the prompt opens that.
      tokenizer: of the model; None: its tokens are not looked at.
    """

    def __init__(
        self,
        answer_id: str,
        *,
        chat_template: str | None = None,
        prompt: str = "",
        has_tools: bool = False,
        is_held: bool = False,
        is_single: bool = False,
        tokenizer: Any = None,
    ):
        self._reasoning: ReasoningParser | None = None
        self._tokens: ThinkingTokens | None = None
        opened = is_opened(prompt)
        if chat_template is not None and thinks(chat_template) and (opened or not is_held):
            self._reasoning = ReasoningParser(is_opened=opened)
            self._tokens = None if tokenizer is None else ThinkingTokens(tokenizer, is_opened=opened)
        self._tools = ToolParser(answer_id) if has_tools else None
        self._most = 1 if is_single else math.inf  # calls that are told

    def push(self, text: str) -> list[Delta]:
        """What is new, now that there is more text."""
        if self._reasoning is None:
            return self._calls(text)
        return self._told(self._reasoning.push(text))

    def thinking(self, token_ids: Sequence[int]) -> list[bool]:
        """Of each of the tokens that follow whether it is thinking."""
        return [False] * len(token_ids) if self._tokens is None else self._tokens.push(token_ids)

    def finish(self, *, is_cut: bool = False) -> list[Delta]:
        """What is left at the end of the text, which is cut off by a limit or is not."""
        told = [] if self._reasoning is None else self._told(self._reasoning.finish())
        return told if self._tools is None else told + self._kept(self._tools.finish(is_cut=is_cut))

    def finish_reason(self, reason: str | None) -> str | None:
        """As OpenAI has it: what stops with calls has stopped for them."""
        if reason != "stop" or self._tools is None or self._tools.has_broken:
            return reason
        return "tool_calls" if self._tools.calls else reason

    def _told(self, deltas: list[Delta]) -> list[Delta]:
        return [one for delta in deltas for one in (self._calls(delta.content) if delta.content else [delta])]

    def _calls(self, content: str) -> list[Delta]:
        if self._tools is not None:
            return self._kept(self._tools.push(content))
        return [Delta(content=content)] if content else []

    def _kept(self, deltas: list[Delta]) -> list[Delta]:
        return [delta for delta in deltas if delta.call is None or delta.call.index < self._most]
