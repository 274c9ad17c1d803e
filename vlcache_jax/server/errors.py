"""What a client is told of what is wrong, by the fields of its own body."""

from __future__ import annotations

import logging
import re

from vlcache_jax.async_llm import QueueFullError
from vlcache_jax.protocol.fields import CHAT, TEXT
from vlcache_jax.protocol.values import ApiError
from vlcache_jax.serving import NotFiniteError

_log = logging.getLogger(__name__)

_PLACE = re.compile(r"(messages\[\d+\])(?: (?:((?:content|tool_calls)\[\d+\])|(\w+) must))?")


def as_api_error(error: BaseException, field: str = "prompt", form: str = "structured_outputs") -> ApiError:
    """What a client is told of an error. Of those that are no fault of its own the log says more.

    Args:
      field: of the body that holds what the engine calls the prompt.
      form: the one that says what the answer must be.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(str(error), status=503, retry_after=1)
    if isinstance(error, ValueError) and not isinstance(error, NotFiniteError):
        message = _told(str(error), field, form)
        code = "context_length_exceeded" if "max_model_len" in message else None
        return ApiError(message, _param(message, field, form), code=code)
    _log.error("a request failed", exc_info=error)
    return ApiError("the server failed; its log says more", status=500)


def _told(message: str, field: str, form: str) -> str:
    """An error of the engine with the names of fields at its beginning."""
    for pattern, own in (
        # What is not about the prompt, though it came up with it.
        (r"prompt: (?=sampling_params |structured_outputs|reuse |compress |max_tokens )", ""),
        (r"sampling_params (?=must leave a token)", "allowed_token_ids, bad_words and logit_bias "),
        (r"sampling_params ", ""),
        (r"structured_outputs(\.\w+)?", r"\g<0>" if form == "structured_outputs" else form),
        # Fields, and parts of one.
        (r"prompt (?=messages\[|mm_processor_kwargs|tools )", ""),
        (r"prompt prompt_token_ids(?= )", field),
        (r"(uuid of )?prompt (?=(images|videos)\[)", rf"{field}: \1"),
        (r"prompt(?=:? )", field),
    ):
        message = re.sub(f"^{pattern}", own, message)
    return message


def _param(message: str, field: str, form: str) -> str | None:
    if found := _PLACE.match(message):
        return ".".join(part for part in found.groups() if part is not None)
    if message.startswith(form):
        return form
    name = re.split(r"\W", message, maxsplit=1)[0]
    return name if name == field or name in CHAT or name in TEXT else None
