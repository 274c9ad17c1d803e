"""Chats with a model: how its template has requests read, and their answers told apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vlcache_jax.inputs.prompt import Template
from vlcache_jax.protocol.answers import ChatAnswer
from vlcache_jax.protocol.reasoning import is_opened
from vlcache_jax.protocol.requests import ChatRequest

if TYPE_CHECKING:
    from vlcache_jax.inputs.prompt import PromptRenderer

_HELLO = {"role": "user", "content": "Hello"}


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
        """See `ChatRequest.parse`."""
        return ChatRequest.parse(body, defaults, opens_thinking=self._opens_thinking(body))

    def answer(self, request: ChatRequest, name: str, model: str, *, tells_thinking_tokens: bool = True) -> ChatAnswer:
        """What writes the answer to a request; see `ChatAnswer`."""
        asked = request.parts
        parts = dataclasses.replace(asked, calls=asked.calls and self.calls, thoughts=asked.thoughts and self.thoughts)
        return ChatAnswer(
            name,
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

    def _opens_thinking(self, body: Mapping[str, Any]) -> bool:
        """Whether the prompt of a request that forces a call ends within thinking: its own options of the template
        say so. What is wrong with them is told later."""
        chat_template = self._template(body)
        if chat_template is None or not self.thoughts or body.get("tool_choice") in (None, "auto", "none"):
            return False
        goes_on, messages = body.get("continue_final_message"), body.get("messages")
        try:
            template = Template(
                chat_template,
                body.get("chat_template_kwargs"),
                body.get("add_generation_prompt"),
                continue_final_message=bool(goes_on),
            )
            asked = [_HELLO, messages[-1]] if goes_on and isinstance(messages, list) and messages else [_HELLO]
            return is_opened(self.renderer.from_conversation(asked, template=template).text)
        except (ValueError, TypeError):
            return False
