"""Prompts of embedding and reranking models: conversations in the formats of their training.

The formats are those of the published Qwen3-VL-Embedding and Qwen3-VL-Reranker. In other formats, vectors of the same
model rank at random, and its scores are about one half for all documents.
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
_NOTHING = "NULL"  # replaces an empty input
_RAW = ("prompt", "prompt_token_ids")


@dataclass(frozen=True)
class InputRenderer:
    """Renderer of inputs to embed.

    Attributes:
        renderer: renderer of the checkpoint.
        settings: image and video settings of all inputs.
        instruction: purpose of the vectors; None: the model's default.

    Raises:
        ValueError: the instruction is not a string.
    """

    renderer: PromptRenderer
    settings: MediaSettings = NO_SETTINGS
    instruction: str | None = None

    def __post_init__(self) -> None:
        check_instruction(self.instruction)

    def __call__(self, given: Any, *, name: str) -> Prompt:
        """Return the prompt of a string, a message's part, a list of parts, a conversation, or a dict with a `prompt`.

        A conversation is a list of messages with roles. Its system message, if it begins with one, is the instruction.
        A dict of `messages` is a conversation with `TemplateOptions`. By default, the prompt ends where the assistant's
        turn begins, as in the models' training. A `prompt` or `prompt_token_ids` is used without a chat template, see
        `PromptRenderer.from_prompt`.

        Raises:
            ValueError: `given` is none of these or is wrong, has an instruction of its own in addition to
                `instruction`, or ends with an assistant's turn that is empty and closed.
        """
        if isinstance(given, Mapping) and any(key in given for key in _RAW):
            if self.instruction is not None:
                raise ValueError(f"instruction cannot be combined with the prompt {name}: write it in the prompt")
            return self.renderer.from_prompt(given, name=name)
        options: Mapping[str, Any] = {}
        if isinstance(given, Mapping) and "messages" in given:
            messages, options = given["messages"], {key: one for key, one in given.items() if key != "messages"}
            if not _is_conversation(messages):  # the renderer raises the error
                return self._rendered(messages, options, name, added=0)
        else:
            messages = given if _is_conversation(given) else [{"role": "user", "content": parts_of(given, name)}]
        _check_last_turn(messages[-1], options, name)
        if messages[0].get("role") not in ("system", "developer"):
            own = _system(punctuated(self.instruction or "") or EMBEDDING_INSTRUCTION)
            return self._rendered([own, *messages], options, name, added=1)
        if self.instruction is not None:
            raise ValueError(f"instruction cannot be combined with the system message of {name}: set one of them")
        return self._rendered(messages, options, name, added=0)

    def _rendered(self, messages: Any, options: Mapping[str, Any], name: str, *, added: int) -> Prompt:
        """Render messages. Errors count them as the caller does, without the `added` ones."""
        try:
            return self.renderer.from_conversation({"messages": messages, **options}, settings=self.settings, name=name)
        except ValueError as error:
            message = re.sub(r"(?<=messages\[)\d+(?=\])", lambda found: str(int(found[0]) - added), str(error), count=1)
            raise ValueError(message) from error


@dataclass(frozen=True)
class PairRenderer:
    """Renderer of pairs of a query and a document.

    Attributes:
        renderer: renderer of the checkpoint.
        query: a string, a message's part or a list of parts.
        settings: image and video settings of all inputs.
        instruction: description of a relevant document; None: the model's default.

    Raises:
        ValueError: the query or the instruction is wrong.
    """

    renderer: PromptRenderer
    query: Any
    settings: MediaSettings = NO_SETTINGS
    instruction: str | None = None

    def __post_init__(self) -> None:
        check_instruction(self.instruction)
        parts_of(self.query, "query")

    def __call__(self, document: Any, *, name: str) -> Prompt:
        """Return the prompt of a document: a string, a message's part or a list of parts.

        Raises:
            ValueError: `document` is none of these, or is wrong.
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
    """Return inputs, and their name in errors; `kind` is the name of the argument.

    Raises:
        ValueError: `given` is not a string, a dict or a list.
    """
    if isinstance(given, str | Mapping) or _is_conversation(given):
        return [given], kind
    if not isinstance(given, Sequence) or isinstance(given, bytes):
        raise ValueError(f"{kind} must be a string, a part of a message, or a list, got {type(given).__name__}")
    return given, f"{kind}[{{}}]"


def parts_of(given: Any, name: str) -> Sequence[Any]:
    """Return an input as the content of a message.

    Raises:
        ValueError: `given` is not a string, a part or a list.
    """
    if isinstance(given, str | Mapping):
        return [given or {"type": "text", "text": _NOTHING}]
    if not isinstance(given, Sequence) or isinstance(given, bytes):
        raise ValueError(f"{name} must be a string, a part of a message or a list of parts, got {short(given)}")
    return list(given) or [{"type": "text", "text": _NOTHING}]


def check_instruction(instruction: Any) -> None:
    """Raise a ValueError unless `instruction` is a string or None."""
    if instruction is not None:
        check_text(instruction, "instruction")


def punctuated(instruction: str) -> str:
    """Return an instruction with a final punctuation mark, as in the training of the embedding models."""
    instruction = instruction.strip()
    is_open = bool(instruction) and not unicodedata.category(instruction[-1]).startswith("P")
    return f"{instruction}." if is_open else instruction


def _is_conversation(given: Any) -> bool:
    is_list = isinstance(given, Sequence) and not isinstance(given, str | bytes)
    return is_list and bool(given) and all(isinstance(one, Mapping) and "role" in one for one in given)


def _check_last_turn(message: Mapping[str, Any], options: Mapping[str, Any], name: str) -> None:
    """Raise a ValueError if a conversation ends with an empty assistant's turn, and no option says how to render it.

    The models are trained with this turn open. Closed, as vLLM renders it by default, it gives another vector.
    """
    says_how = options.get("continue_final_message") or options.get("add_generation_prompt") is not None
    if message.get("role") != "assistant" or says_how or message.get("tool_calls"):
        return
    content = message.get("content")
    parts = content if isinstance(content, list | tuple) else [content]
    texts = (part.get("text") if isinstance(part, Mapping) else part for part in parts)
    if all(text == "" for text in texts):
        raise ValueError(
            f"{name} must not end with an assistant's turn that is empty and closed: set continue_final_message = true "
            "next to the messages, or leave that turn out"
        )


def _system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": [{"type": "text", "text": text}]}
