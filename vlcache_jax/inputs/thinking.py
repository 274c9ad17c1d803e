"""Where prompts open a model's thinking: `<think>...</think>` before an answer."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def thinks(chat_template: str) -> bool:
    """Return whether answers to prompts of a template may think: it removes that from those of earlier turns."""
    return CLOSE in chat_template


def is_opened(prompt: str) -> bool:
    """Return whether a prompt ends within thinking, as those of Qwen3-VL-Thinking do; the answer only closes it.

    The last tag counts: a template whose thinking is off writes an empty one, and a final message that goes on may have
    begun to think.
    """
    return prompt.rfind(OPEN) > max(prompt.rfind(CLOSE), prompt.rfind("<|im_end|>"))
