"""Openings of prompts: contexts in which an image has nothing of another caller before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vlcache_jax.cache.keys import context_keys
from vlcache_jax.engine.completions import RequestMetrics
from vlcache_jax.engine.request import Request
from vlcache_jax.inputs.expansion import Expander
from vlcache_jax.inputs.prompt import PromptRenderer

Ids = npt.NDArray[np.int32]
_NONE = np.zeros(0, np.int32)


class Openings:
    """Neutral contexts: of an image or a video that begins the first message of a user.

    Before it is only what the chat template begins a conversation with, or a system message that the operator chose. So
    no caller had an influence on the KV that was computed there. A chunk of a video has the chunks before it, too,
    which are the request's own. Each image of a request has one neutral context, which follows from the request alone:
    outputs must not depend on the contexts that happen to be cached.

    Args:
      openings: token ids before such an image, without a system message and after each one of the operator.
      turn_token: id of the token that begins a message; None: it is unknown, and no system message is recognized.
      expander: expander of the placeholders of videos; None: there are none.
      video: ids of the placeholder of a video and of the token after it.
    """

    def __init__(
        self,
        openings: Sequence[Ids],
        turn_token: int | None,
        expander: Expander | None = None,
        video: tuple[int, int] = (-1, -1),
    ):
        self._openings, self._expander, self._video = tuple(openings), expander, np.array(video, np.int32)
        self._header = self._before = _NONE  # of a user's message, and the tokens before its image
        if turn_token is not None and len(openings) and (turns := np.flatnonzero(openings[0] == turn_token)).size:
            self._header, self._before = openings[0][turns[-1] : -1], openings[0][turns[-1] :]

    @classmethod
    def of(cls, renderer: PromptRenderer, systems: Sequence[str], turn_token: int | None) -> Openings:
        """Return the openings of a checkpoint's chat template; none if it has no template, or the template fails."""
        user: dict[str, Any] = {"role": "user", "content": [{"type": "image"}]}
        openings, video = [], (-1, -1)
        for system in [None, *systems] if renderer.chat_template is not None else []:
            conversation = [*([] if system is None else [{"role": "system", "content": system}]), user]
            try:
                text = renderer.tokenizer.apply_chat_template(
                    conversation, chat_template=renderer.chat_template, tokenize=False, add_generation_prompt=True
                )
            except Exception:  # templates come from checkpoints, and raise any type of error
                break
            ids = np.array(renderer.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
            if not (is_image := ids == renderer.image_token_id).any():
                break
            begin = int(np.argmax(is_image))
            openings.append(ids[:begin])
            video = renderer.video_token_id, int(ids[begin + 1])  # the token after a video is that after an image
        return cls(openings, turn_token, renderer.expander, video)

    def of_images(self, token_ids: Ids) -> str | None:
        """Return the neutral context of the images of a prompt; None if there is none.

        Args:
          token_ids: the prompt, int32 [n].
        """
        return None if (opening := self._of(token_ids)) is None else next(context_keys([opening, ""]))

    def of_chunks(self, request: Request, video: int) -> list[str | None]:
        """Return the neutral context of each chunk of a request's video."""
        chunks = request.chunks(video)
        alone = self.alone(request, chunks)
        return [None] * len(chunks) if alone is None else [*alone.contexts]

    def alone(self, request: Request, images: Sequence[int]) -> Request | None:
        """Return a prompt with an image or a video of a request in its neutral context; None if there is none.

        Args:
          request: the request.
          images: index of the image, or those of all chunks of the video.
        """
        if (opening := self._of(request.token_ids)) is None:
            return None
        first, moment = request.images[images[0]], request.moments[images[0]]
        starts: tuple[int, ...] = (len(opening),)
        if moment is None:
            begin = request.starts[images[0]]
            token_ids = np.concatenate([opening, request.token_ids[begin : begin + first.num_tokens]])
        else:
            assert self._expander is not None
            placeholder = np.concatenate([opening, self._video])
            token_ids, begins, _ = self._expander.expand(placeholder, [request.videos[moment.video]])
            starts = tuple(begins.tolist())
            token_ids = token_ids[: starts[-1] + first.num_tokens]
        return dataclasses.replace(
            request, token_ids=token_ids, starts=starts, images=tuple(request.images[i] for i in images),
            moments=tuple(request.moments[i] for i in images), metrics=RequestMetrics(), items=[*request.items],
        )  # fmt: skip

    def _of(self, token_ids: Ids) -> Ids | None:
        """Return the opening of a prompt: with its own system message if it is the operator's, else without one."""
        count = len(self._header)
        for start in np.flatnonzero(token_ids == self._header[0]).tolist() if count else ():
            if np.array_equal(token_ids[start : start + count], self._header):
                own = np.concatenate([token_ids[:start], self._before])
                if any(np.array_equal(own, one) for one in self._openings):
                    return own
                break
        return self._openings[0] if self._openings else None
