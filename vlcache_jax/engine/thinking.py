"""Limit of the tokens that a model thinks before it answers (host).

At the limit the thinking is closed with forced tokens. Before that the output is not held: it is decoded in programs of
several tokens. Only in the last of these programs before the limit, the host looks at each token. A character that
several tokens spell is completed first, since grammars allow only whole ones.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from typing import Any

from vlcache_jax.engine.completions import token_bytes
from vlcache_jax.engine.grammars import Bits, bits
from vlcache_jax.inputs.prompt import CLOSE, OPEN

# The sentence with which Qwen3's technical report ends thinking at a budget (arXiv:2505.09388, section 4.2).
CLOSING = (
    "\n\nConsidering the limited time by the user, I have to give the solution based on the thinking directly now.\n"
    f"{CLOSE}\n\n"
)
_MAX_REST = 3  # bytes after the first one of a character


@dataclass(frozen=True, eq=False)
class ThinkingTags:
    """Tokens around a model's thinking.

    Attributes:
      opening, close: ids of `<think>` and `</think>`.
      closing: tokens that end the thinking at the limit, with `close` among them.
      tokenizer: tokenizer of the model.
    """

    opening: int
    close: int
    closing: tuple[int, ...]
    tokenizer: Any

    @classmethod
    def of(cls, tokenizer: Any) -> ThinkingTags | None:
        """Return the tags of a tokenizer; None if they are not tokens of it."""
        opening, close = map(tokenizer.backend_tokenizer.token_to_id, (OPEN, CLOSE))
        if opening is None or close is None:
            return None
        closing = tuple(tokenizer(CLOSING, add_special_tokens=False)["input_ids"])
        return cls(opening, close, closing, tokenizer) if close in closing else None

    def spelled(self, token: int) -> bytes:
        """Return the bytes of a token."""
        return token_bytes(self.tokenizer, token)


class Thinking:
    """Thinking of one output and its limit.

    An output thinks from the prompt on, or from the `<think>` with which it begins, up to `</think>`.

    Args:
      tags: tokens around the thinking.
      budget: largest number of tokens between the tags.
      window: largest number of tokens that a decode program appends to the output.
      is_opened: whether the prompt ends within thinking.
      everything: tokens that are allowed where nothing is forced, as bits.

    Attributes:
      closing: tokens that are forced next.
      everything: see above.
    """

    def __init__(self, tags: ThinkingTags, budget: int, window: int, *, is_opened: bool, everything: Bits):
        self._tags, self._budget, self._window, self.everything = tags, budget, window, everything
        self._count = 0  # tokens of the output so far
        self._first = 0 if is_opened else None  # number of tokens before the first thinking token, if it thinks
        self._is_over = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.closing: tuple[int, ...] = ()
        self._close()

    @property
    def limit(self) -> int | None:
        """Number of the output's tokens at which the thinking is closed; None if it is over."""
        if self._is_over:
            return None
        if self._first is None:
            return self._count + 1 + self._budget
        limit = self._first + self._budget
        return limit if self.closing else max(limit, self._count + 1)

    def append(self, token: int) -> None:
        """Note the next token of the output."""
        self._count += 1
        if self._is_over:
            return
        if self.closing:
            self.closing = self.closing[1:]
            self._is_over = not self.closing
        elif self._first is None:
            if token == self._tags.opening:
                self._first = self._count
            else:
                self._is_over = bool(self._tags.spelled(token).strip())  # white space may stand before the tag
        else:
            self._is_over = token == self._tags.close
            self._decoder.decode(self._tags.spelled(token))
        if not self.closing:
            self._close()

    def is_near(self, launched: int) -> bool:
        """Return whether a decode program after `launched` tokens of the output could pass the limit."""
        return self.limit is not None and self.limit - launched < self._window

    def allowed(self, ahead: int) -> Bits | None:
        """Return the tokens allowed `ahead` tokens after those of the output, as bits.

        None: it depends on the tokens between whether the thinking is closed.
        """
        if ahead < len(self.closing):
            return bits([self.closing[ahead]], 32 * len(self.everything))
        is_known = bool(self.closing) or self.limit is None or self._count + ahead < self.limit
        return self.everything if is_known else None

    def _close(self) -> None:
        if self._is_over or self._first is None:
            return
        beyond = self._count - self._first - self._budget
        is_whole = not self._decoder.getstate()[0]
        if beyond >= _MAX_REST or (beyond >= 0 and is_whole):
            self.closing = self._tags.closing
