"""Parser of an output's text into deltas of reasoning (`<think>...</think>`), content and tool calls."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from vlcache_jax.engine.completions import Detokenizer
from vlcache_jax.inputs.prompt import CLOSE, OPEN, is_opened, thinks
from vlcache_jax.protocol.deltas import Delta, unfinished
from vlcache_jax.protocol.tools import ToolParser
from vlcache_jax.protocol.xml_tools import XmlToolParser


class ReasoningParser:
    """Incremental parser of reasoning. The result does not depend on the pieces in which the text arrives.

    An output has reasoning if `is_opened` is set or if it begins with `<think>`. The reasoning ends at `</think>`, or
    with the text if there is no closing tag. Line ends next to the tags are removed.

    Args:
      is_opened: True if the prompt ends within reasoning, see `is_opened`. A `<think>` at the beginning of the output
        is then removed.

    Attributes:
      thinks: True once the output is known to have reasoning.
    """

    def __init__(self, *, is_opened: bool = False):
        self.thinks = is_opened
        self._step = self._begin
        self._held = ""  # received text that is not returned yet

    @property
    def is_over(self) -> bool:
        """True if all further text is content."""
        return self._step in (self._after, self._say)

    def push(self, text: str) -> list[Delta]:
        """Return the deltas of the next piece of text."""
        self._held += text
        deltas: list[Delta] = []
        while self._step(deltas):
            pass
        return deltas

    def finish(self) -> list[Delta]:
        """Return the deltas that were held back, at the end of the text."""
        text, self._held = self._held, ""
        if self._step == self._think or (self._step == self._begin and self.thinks):
            text = text.rstrip("\n")
            return [Delta(reasoning=text)] if text else []
        return [Delta(content=text)] if text else []

    # The states of the parser. Each appends deltas and returns whether the next state can run now.

    def _begin(self, deltas: list[Delta]) -> bool:
        """Detect the opening tag."""
        begun = self._held.lstrip()
        if OPEN.startswith(begun) and begun != OPEN:
            return False
        if begun.startswith(OPEN):
            self._held = begun.removeprefix(OPEN)
            self.thinks = True
        self._step = self._open if self.thinks else self._say
        return True

    def _open(self, deltas: list[Delta]) -> bool:
        """Skip line ends before the reasoning."""
        self._held = self._held.lstrip("\n")
        if self._held:
            self._step = self._think
        return bool(self._held)

    def _think(self, deltas: list[Delta]) -> bool:
        """Return reasoning up to the closing tag. Line ends are held back, as the last ones are removed."""
        thought, tag, rest = self._held.partition(CLOSE)
        if tag:
            thought = thought.rstrip("\n")
            self._step = self._after
        else:
            thought = thought[: len(thought) - unfinished(thought, CLOSE)].rstrip("\n")
            rest = self._held[len(thought) :]
        if thought:
            deltas.append(Delta(reasoning=thought))
        self._held = rest
        return bool(tag)

    def _after(self, deltas: list[Delta]) -> bool:
        """Skip line ends before the content."""
        self._held = self._held.lstrip("\n")
        if self._held:
            self._step = self._say
        return bool(self._held)

    def _say(self, deltas: list[Delta]) -> bool:
        """Return all text as content."""
        if self._held:
            deltas.append(Delta(content=self._held))
        self._held = ""
        return False


class ThinkingTokens:
    """Classifier of thinking tokens.

    They begin with the token that completes the opening tag, if the output has one, and end with the token that
    completes the closing tag.

    Args:
      tokenizer: tokenizer of the model.
      is_opened: see `ReasoningParser`.
    """

    def __init__(self, tokenizer: Any, *, is_opened: bool = False):
        self._text = Detokenizer(tokenizer, skip_special_tokens=False)  # a tag may be a special token
        self._parser = ReasoningParser(is_opened=is_opened)

    def push(self, token_ids: Sequence[int]) -> list[bool]:
        """Return for each of the next tokens whether it is a thinking token."""
        return [not self._parser.is_over and self._take(token) for token in token_ids]

    def _take(self, token: int) -> bool:
        self._text.append([token])
        self._parser.push(self._text.take())
        return self._parser.thinks


class AnswerParser:
    """Incremental parser of an answer. The joined deltas do not depend on the pieces in which the text arrives.

    Args:
      answer_id: id of the answer, from which the ids of tool calls are made.
      chat_template: Jinja text of the prompt's template, which shows whether the model thinks. None: no reasoning is
        parsed.
      prompt: text of the prompt, which shows whether it ends within reasoning.
      has_tools: True to parse tool calls.
      xml_tools: offered tools, if the model writes calls as `protocol.xml_tools` reads them. None: calls are JSON.
      is_single: True to return only the first of several calls.
      is_held: True if structured outputs constrain the answer. It then has reasoning only if the prompt opens it.
      tokenizer: tokenizer of the model. None: thinking tokens are not counted.
    """

    def __init__(
        self,
        answer_id: str,
        *,
        chat_template: str | None = None,
        prompt: str = "",
        has_tools: bool = False,
        xml_tools: Sequence[Mapping[str, Any]] | None = None,
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
        self._tools: ToolParser | XmlToolParser | None = None
        if has_tools:
            self._tools = ToolParser(answer_id) if xml_tools is None else XmlToolParser(answer_id, xml_tools)
        self._max_calls = 1 if is_single else math.inf

    def push(self, text: str) -> list[Delta]:
        """Return the deltas of the next piece of text."""
        if self._reasoning is None:
            return self._calls(text)
        return self._with_calls(self._reasoning.push(text))

    def thinking(self, token_ids: Sequence[int]) -> list[bool]:
        """Return for each of the next tokens whether it is a thinking token."""
        return [False] * len(token_ids) if self._tokens is None else self._tokens.push(token_ids)

    def finish(self, *, is_cut: bool = False) -> list[Delta]:
        """Return the deltas that were held back, at the end of the text; `is_cut` if a length limit has cut it."""
        deltas = [] if self._reasoning is None else self._with_calls(self._reasoning.finish())
        return deltas if self._tools is None else deltas + self._limited(self._tools.finish(is_cut=is_cut))

    def finish_reason(self, reason: str | None) -> str | None:
        """Return OpenAI's finish reason: "tool_calls" instead of "stop" for an answer with complete calls."""
        if reason != "stop" or self._tools is None or self._tools.has_broken:
            return reason
        return "tool_calls" if self._tools.calls else reason

    def _with_calls(self, deltas: list[Delta]) -> list[Delta]:
        return [one for delta in deltas for one in (self._calls(delta.content) if delta.content else [delta])]

    def _calls(self, content: str) -> list[Delta]:
        if self._tools is not None:
            return self._limited(self._tools.push(content))
        return [Delta(content=content)] if content else []

    def _limited(self, deltas: list[Delta]) -> list[Delta]:
        return [delta for delta in deltas if delta.call is None or delta.call.index < self._max_calls]
