"""Ids that a server gives: where several serve together, they tell whose they are."""

from __future__ import annotations

import re
import uuid

TAG_DIGITS = 8
_NAMED = re.compile(rf"(?:resp_|file-)([0-9a-f]{{{TAG_DIGITS}}})[0-9a-f]+", re.ASCII)


class Names:
    """Makes ids.

    Args:
      tag: hex digits of this server among several; none: it is alone.

    Raises:
      ValueError: it is no tag.
    """

    def __init__(self, tag: str = ""):
        if tag and not re.fullmatch(rf"[0-9a-f]{{{TAG_DIGITS}}}", tag):
            raise ValueError(f"tag must be {TAG_DIGITS} hex digits, got {tag!r}")
        self._tag = tag

    def new(self, prefix: str, digits: int = 32) -> str:
        """An id that nobody has."""
        return f"{prefix}{self._tag}{uuid.uuid4().hex}"[: len(prefix) + digits]


def tag_in(name: str) -> str | None:
    """The tag of the server that made the id of a response or a file; of one that is alone, digits that say nothing."""
    found = _NAMED.fullmatch(name)
    return None if found is None else found[1]
