"""An output's text as deltas: thinking (`<think>...</think>`) first, then text and tool calls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from vlcache_jax.engine.completions import Detokenizer
from vlcache_jax.inputs.prompt import CLOSE, OPEN, is_opened, thinks
from vlcache_jax.protocol.deltas import Delta, unfinished
from vlcache_jax.protocol.tools import ToolParser


class ReasoningParser:
    """Tells thinking from the answer, whatever the pieces in which the text comes.

    An answer thinks if it `is_opened`, or if it begins with `<think>`. All until `</think>` is reasoning, and
    without it everything is. Line ends beside the tags are left out.

    Args:
      is_opened: the prompt ended within thinking, see `is_opened`. An answer that begins with `<think>` all the same
        loses it.

    Attributes:
      thinks: whether it is known that the answer does.
    """

    def __init__(self, *, is_opened: bool = False):
        self.thinks = is_opened
        self._step = self._begin
        self._held = ""  # what came and is not told yet

    @property
    def is_over(self) -> bool:
        """Whether all that follows is the answer."""
        return self._step in (self._after, self._say)

    def push(self, text: str) -> list[Delta]:
        """What is new, now that there is more text."""
        self._held += text
        told: list[Delta] = []
        while self._step(told):
            pass
        return told

    def finish(self) -> list[Delta]:
        """What is left at the end of the text."""
        text, self._held = self._held, ""
        if self._step == self._think or (self._step == self._begin and self.thinks):
            text = text.rstrip("\n")
            return [Delta(reasoning=text)] if text else []
        return [Delta(content=text)] if text else []

    # The steps of an answer. Each returns whether another one follows.

    def _begin(self, told: list[Delta]) -> bool:
        """Is it thinking that begins?"""
        begun = self._held.lstrip()
        if OPEN.startswith(begun) and begun != OPEN:
            return False
        if begun.startswith(OPEN):
            self._held = begun.removeprefix(OPEN)
            self.thinks = True
        self._step = self._open if self.thinks else self._say
        return True

    def _open(self, told: list[Delta]) -> bool:
        """Line ends before the first thought."""
        self._held = self._held.lstrip("\n")
        if self._held:
            self._step = self._think
        return bool(self._held)

    def _think(self, told: list[Delta]) -> bool:
        """Thoughts until the closing tag; line ends are held back, as they may be the last."""
        thought, tag, rest = self._held.partition(CLOSE)
        if tag:
            thought = thought.rstrip("\n")
            self._step = self._after
        else:
            thought = thought[: len(thought) - unfinished(thought, CLOSE)].rstrip("\n")
            rest = self._held[len(thought) :]
        if thought:
            told.append(Delta(reasoning=thought))
        self._held = rest
        return bool(tag)

    def _after(self, told: list[Delta]) -> bool:
        """Line ends before the answer."""
        self._held = self._held.lstrip("\n")
        if self._held:
            self._step = self._say
        return bool(self._held)

    def _say(self, told: list[Delta]) -> bool:
        """The answer."""
        if self._held:
            told.append(Delta(content=self._held))
        self._held = ""
        return False


class ThinkingTokens:
    """Tells which tokens of an answer are thinking: from the one with which the opening tag is whole, if the answer has
    one, to that with which the closing tag is.

    Args:
      is_opened: see `ReasoningParser`.
    """

    def __init__(self, tokenizer: Any, *, is_opened: bool = False):
        self._text = Detokenizer(tokenizer, skip_special_tokens=False)  # a tag may be one
        self._parser = ReasoningParser(is_opened=is_opened)

    def push(self, token_ids: Sequence[int]) -> list[bool]:
        """Of each of the tokens that follow whether it is."""
        return [not self._parser.is_over and self._take(token) for token in token_ids]

    def _take(self, token: int) -> bool:
        self._text.append([token])
        self._parser.push(self._text.take())
        return self._parser.thinks


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
