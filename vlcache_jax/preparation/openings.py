"""Openings of prompts: contexts in which an image has nothing of another caller before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vlcache_jax.cache.keys import context_keys
from vlcache_jax.inputs.prompt import PromptRenderer

Ids = npt.NDArray[np.int32]


class Openings:
    """Contexts of an image that begins the first message of a user.

    Before it is only what the chat template begins a conversation with, or a system message of the operator or of the
    request itself. So no other caller had an influence on the KV that was computed there.

    Args:
      openings: token ids before such an image, without a system message and after each one of the operator.
      turn_token: id of the token that begins a message; None: it is unknown, and requests have no opening of their own.

    Attributes:
      first: token ids of the first opening, in which images without a donor are computed; None if there is none.
    """

    def __init__(self, openings: Sequence[Ids], turn_token: int | None):
        self.first = openings[0] if openings else None
        self._contexts = tuple(map(_context, openings))
        self._header = self._before = np.zeros(0, np.int32)  # of a user's message, and the tokens before its image
        if turn_token is not None and len(openings) and (turns := np.flatnonzero(openings[0] == turn_token)).size:
            self._header, self._before = openings[0][turns[-1] : -1], openings[0][turns[-1] :]

    @classmethod
    def of(cls, renderer: PromptRenderer, systems: Sequence[str], turn_token: int | None) -> Openings:
        """Return the openings of a checkpoint's chat template; none if it has no template, or the template fails."""
        user: dict[str, Any] = {"role": "user", "content": [{"type": "image"}]}
        openings = []
        for system in [None, *systems] if renderer.chat_template is not None else []:
            conversation = [*([] if system is None else [{"role": "system", "content": system}]), user]
            try:
                text = renderer.tokenizer.apply_chat_template(
                    conversation, chat_template=renderer.chat_template, tokenize=False, add_generation_prompt=True
                )
            except Exception:  # templates come from checkpoints, and raise any type of error
                break
            ids = np.array(renderer.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
            openings.append(ids[: int(np.argmax(ids == renderer.image_token_id))])
        return cls(openings, turn_token)

    def contexts(self, token_ids: Ids) -> tuple[str, ...]:
        """Return the contexts of donors for a prompt, those to prefer first: after its own system message, then others.

        Args:
          token_ids: the prompt, int32 [n].
        """
        own = self._own(token_ids)
        return self._contexts if own is None else tuple(dict.fromkeys([_context(own), *self._contexts]))

    def _own(self, token_ids: Ids) -> Ids | None:
        """Return what an image at the beginning of the first user's message would have before it."""
        if not (count := len(self._header)):
            return None
        for start in np.flatnonzero(token_ids == self._header[0]).tolist():
            if np.array_equal(token_ids[start : start + count], self._header):
                return np.concatenate([token_ids[:start], self._before])
        return None


def _context(opening: Ids) -> str:
    return next(context_keys([opening, ""]))
