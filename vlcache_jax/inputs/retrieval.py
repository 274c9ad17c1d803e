"""How embedding and reranking models see what they are given: as conversations of their own forms.

The forms are those that Qwen3-VL-Embedding and Qwen3-VL-Reranker were published with. With others the vectors of the
same model rank at random, and its scores are about one half for all.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlcache_jax.common.checks import check_text, short
from vlcache_jax.inputs.messages import NO_SETTINGS, MediaSettings
from vlcache_jax.inputs.prompt import Prompt, PromptRenderer

EMBEDDING_INSTRUCTION = "Represent the user's input."
RERANKING_INSTRUCTION = "Given a search query, retrieve relevant candidates that answer the query."
_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
ANSWERS = ("yes", "no")
"""Tokens whose probabilities a reranker compares."""
_NOTHING = "NULL"  # stands in place of an empty input
_RAW = ("prompt", "prompt_token_ids")


@dataclass(frozen=True)
class InputRenderer:
    """Makes prompts of what is embedded.

    Attributes:
        renderer: of the checkpoint.
        settings: of all inputs.
        instruction: what vectors are for; None: the model's own.

    Raises:
        ValueError: the instruction is no text.
    """

    renderer: PromptRenderer
    settings: MediaSettings = NO_SETTINGS
    instruction: str | None = None

    def __post_init__(self) -> None:
        check_instruction(self.instruction)

    def __call__(self, given: Any, *, name: str) -> Prompt:
        """The prompt of a string, a message's part, a list of parts, a conversation, or a dict with a `prompt`.

        A conversation, whose members have roles, says itself what instruction it has, if it begins with a system
        message. A dict of `messages` is a conversation with `TemplateOptions`. Without them the prompt ends where the
        assistant's turn begins, as the models are trained. A `prompt` or `prompt_token_ids` is taken as it is, see
        `PromptRenderer.from_prompt`.

        Raises:
            ValueError: it is none of these, it is wrong, there is an instruction beside one that it has, or it ends
                with an assistant's turn that is empty and closed.
        """
        if isinstance(given, Mapping) and any(key in given for key in _RAW):
            if self.instruction is not None:
                raise ValueError(f"instruction must be left out beside a prompt as it is, got both for {name}")
            return self.renderer.from_prompt(given, name=name)
        options: Mapping[str, Any] = {}
        if isinstance(given, Mapping) and "messages" in given:
            messages, options = given["messages"], {key: one for key, one in given.items() if key != "messages"}
            if not _is_conversation(messages):  # it is wrong, and the renderer says how
                return self._rendered(messages, options, name, added=0)
        else:
            messages = given if _is_conversation(given) else [{"role": "user", "content": parts_of(given, name)}]
        _check_last_turn(messages[-1], options, name)
        if messages[0].get("role") not in ("system", "developer"):
            own = _system(punctuated(self.instruction or "") or EMBEDDING_INSTRUCTION)
            return self._rendered([own, *messages], options, name, added=1)
        if self.instruction is not None:
            raise ValueError(f"instruction must be left out beside a system message, got both for {name}")
        return self._rendered(messages, options, name, added=0)

    def _rendered(self, messages: Any, options: Mapping[str, Any], name: str, *, added: int) -> Prompt:
        """Errors count messages as the caller has them, without those `added`."""
        try:
            return self.renderer.from_conversation({"messages": messages, **options}, settings=self.settings, name=name)
        except ValueError as error:
            told = re.sub(r"(?<=messages\[)\d+(?=\])", lambda found: str(int(found[0]) - added), str(error), count=1)
            raise ValueError(told) from error


@dataclass(frozen=True)
class PairRenderer:
    """Makes prompts of documents that are compared with a query.

    Attributes:
        renderer: of the checkpoint.
        query: a string, a message's part or a list of parts.
        settings: of all inputs.
        instruction: what makes a document a good one; None: the model's own.

    Raises:
        ValueError: query or instruction is wrong.
    """

    renderer: PromptRenderer
    query: Any
    settings: MediaSettings = NO_SETTINGS
    instruction: str | None = None

    def __post_init__(self) -> None:
        check_instruction(self.instruction)
        parts_of(self.query, "query")

    def __call__(self, document: Any, *, name: str) -> Prompt:
        """The prompt of a document: a string, a message's part or a list of parts.

        Raises:
            ValueError: it is none of these, or wrong.
        """
        parts = [
            {"type": "text", "text": f"<Instruct>: {self.instruction or RERANKING_INSTRUCTION}"},
            {"type": "text", "text": "<Query>:"},
            *parts_of(self.query, "query"),
            {"type": "text", "text": "\n<Document>:"},
            *parts_of(document, name),
        ]
        messages = [_system(_JUDGE), {"role": "user", "content": parts}]
        return self.renderer.from_conversation(messages, settings=self.settings, name=name)


def listed_inputs(given: Any, kind: str) -> tuple[Sequence[Any], str]:
    """Inputs, and what errors call each of them; `kind` is the argument that they stand in.

    Raises:
        ValueError: it is neither a string, a dict nor a list.
    """
    if isinstance(given, str | Mapping) or _is_conversation(given):
        return [given], kind
    if not isinstance(given, Sequence) or isinstance(given, bytes):
        raise ValueError(f"{kind} must be a string, a part of a message, or a list, got {type(given).__name__}")
    return given, f"{kind}[{{}}]"


def parts_of(given: Any, name: str) -> Sequence[Any]:
    """An input as the content of a message.

    Raises:
        ValueError: it is none.
    """
    if isinstance(given, str | Mapping):
        return [given or {"type": "text", "text": _NOTHING}]
    if not isinstance(given, Sequence) or isinstance(given, bytes):
        raise ValueError(f"{name} must be a string, a part of a message or a list of parts, got {short(given)}")
    return list(given) or [{"type": "text", "text": _NOTHING}]


def check_instruction(instruction: Any) -> None:
    """Raises a ValueError unless it is a text or None."""
    if instruction is not None:
        check_text(instruction, "instruction")


def punctuated(instruction: str) -> str:
    """An instruction as the embedding models know it: it ends with a mark."""
    instruction = instruction.strip()
    is_open = bool(instruction) and not unicodedata.category(instruction[-1]).startswith("P")
    return f"{instruction}." if is_open else instruction


def _is_conversation(given: Any) -> bool:
    is_list = isinstance(given, Sequence) and not isinstance(given, str | bytes)
    return is_list and bool(given) and all(isinstance(one, Mapping) and "role" in one for one in given)


def _check_last_turn(message: Mapping[str, Any], options: Mapping[str, Any], name: str) -> None:
    """Raises a ValueError if a conversation ends with an assistant's turn that is empty, and nothing says how.

    The models are trained with that turn open. Closed, as vLLM renders it by default, it gives another vector.
    """
    says_how = options.get("continue_final_message") or options.get("add_generation_prompt") is not None
    if message.get("role") != "assistant" or says_how or message.get("tool_calls"):
        return
    content = message.get("content")
    parts = content if isinstance(content, list | tuple) else [content]
    texts = (part.get("text") if isinstance(part, Mapping) else part for part in parts)
    if all(text == "" for text in texts):
        raise ValueError(
            f"{name} must not end with an assistant's turn that is empty and closed: write continue_final_message = "
            "true beside the messages, or leave that turn out"
        )


def _system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": [{"type": "text", "text": text}]}
