"""How values stand in the messages of errors."""

from __future__ import annotations

from typing import Any


def cut(text: str, most: int = 120) -> str:
    """A text, without its end if it has more than `most` characters."""
    return text if len(text) <= most else f"{text[: most - 20]}..."


def short(value: Any, most: int = 120) -> str:
    """A value as Python writes it, cut; one that Python does not write is named by its type."""
    try:
        return cut(repr(value), most)
    except (ValueError, RecursionError):  # integers of thousands of digits; lists in lists in lists
        return f"{type(value).__name__} too large to show"
