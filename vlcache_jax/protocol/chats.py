"""Chats with a model: how its template has requests read, and their answers told apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vlcache_jax.protocol.answers import ChatAnswer, answer_id
from vlcache_jax.protocol.requests import ChatRequest

if TYPE_CHECKING:
    from vlcache_jax.inputs.prompt import PromptRenderer


@dataclass(frozen=True)
class ChatFormat:
    """Reads requests for chats with a model, and begins their answers.

    Attributes:
      renderer: makes the model's prompts.
      chat_template: Jinja, in place of the checkpoint's own.
      calls, thoughts: whether these are told apart from what is said.
    """

    renderer: PromptRenderer
    chat_template: str | None = None
    calls: bool = True
    thoughts: bool = True

    def request(self, body: Mapping[str, Any], defaults: Mapping[str, Any]) -> ChatRequest:
        """See `ChatRequest.parse`. If thinking is not told apart, the first token is held, too."""
        request = ChatRequest.parse(body, defaults, self._template({}))
        held = request.params.structured_outputs
        if held is None or self.thoughts:
            return request
        held = dataclasses.replace(held, enable_in_reasoning=True)
        return dataclasses.replace(request, params=dataclasses.replace(request.params, structured_outputs=held))

    def answer(self, request: ChatRequest, name: str, model: str, *, tells_thinking_tokens: bool = True) -> ChatAnswer:
        """What writes the answer to a request; see `ChatAnswer`."""
        asked = request.parts
        parts = dataclasses.replace(asked, calls=asked.calls and self.calls, thoughts=asked.thoughts and self.thoughts)
        return ChatAnswer(
            answer_id(name, request.options),
            model,
            request.options,
            request.params.n,
            parts=parts,
            chat_template=self._template(request.template),
            tokenizer=self.renderer.tokenizer,
            tells_thinking_tokens=tells_thinking_tokens,
        )

    def _template(self, given: Mapping[str, Any]) -> Any:
        """That which holds where this is given."""
        return given.get("chat_template") or self.chat_template or self.renderer.chat_template
