"""Lines of `vlcache run`: requests of the input file, and outputs of the output file.

A line is a JSON object in one of two formats. A request of OpenAI's batch files is answered in the format of their
output files. A plain request is `{"messages": [...]}` or `{"images": [...], "question": ...}` (also "image" and
"video"). It can also have fields of `SamplingParams`, `compress` and options of the chat template.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from vlcache_jax.common.checks import check_text, is_a, short, shorten, unknown
from vlcache_jax.common.vllm_compat import GUIDED
from vlcache_jax.inputs.images import is_base64, is_url
from vlcache_jax.protocol.answers import Counts, logprob
from vlcache_jax.protocol.requests import TEMPLATE, ChatRequest, template_options
from vlcache_jax.protocol.schema import SAMPLING, read_object, write
from vlcache_jax.request_options import RequestOptions
from vlcache_jax.sampling import SamplingParams

if TYPE_CHECKING:
    from vlcache_jax.outputs import CompletionOutput, RequestOutput
    from vlcache_jax.protocol.answers import ChatFormat

BEGINNINGS = (b'{"line": ', b'{"id": "batch_req_')
"""Possible beginnings of an output line."""

_SAMPLING = tuple(name for name in sorted(SAMPLING) if name != "prompt_logprobs")
_ENVELOPE = ("custom_id", "method", "url", "body")
_URL = "/v1/chat/completions"
# Allowed values of fields that a run sets for all requests, or does not support.
_ABSENT: dict[str, tuple[Any, ...]] = {
    "stream": (None, False),
    "stream_options": (None,),
    "priority": (None, 0),
    "cache_salt": (None,),
    "reuse": (None,),
    "donors": (None,),
    "mm_processor_kwargs": (None,),
}
_PATHS = ("image", "image_url", "video", "video_url", "path", "url")


@dataclasses.dataclass(frozen=True)
class InputLine:
    """Request of the input file.

    Attributes:
      number: number of the line, from 1.
      digest: digest of the line and of the settings of the run.
      name: `custom_id` or `id` of the request; None: it has none.
      is_openai: True if it has OpenAI's format.
      conversation: messages, with the options of the chat template if there are any.
      request: sampling parameters and other options.
      error: error message of an invalid request, which has no conversation and no request.
      kept: fields of a plain request that are copied to the output line.
      written: keys of the line by the names that errors have for their image or video.
      added: number of messages added before those of the request.
    """

    number: int
    digest: str
    name: Any = None
    is_openai: bool = False
    conversation: Any = None
    request: ChatRequest | None = None
    error: str | None = None
    kept: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    written: Mapping[str, str] = dataclasses.field(default_factory=dict)
    added: int = 0

    @classmethod
    def parse(
        cls,
        line: str,
        number: int,
        digest: str,
        defaults: Mapping[str, Any],
        folder: pathlib.Path,
        *,
        trusts_templates: bool = False,
        chats: ChatFormat | None = None,
    ) -> InputLine:
        """Parse a line. The result of an invalid line has an `error`.

        Args:
          line: text of the line.
          number: number of the line, from 1.
          digest: digest of the line and of the settings of the run.
          defaults: default sampling parameters.
          folder: folder of relative image paths.
          trusts_templates: True to accept chat templates, which are programs that can run without end.
          chats: chat format of the model; None (default) only checks the line.
        """
        own = cls(number, digest)
        try:
            row = read_object(line)
            is_openai = "body" in row or "custom_id" in row
            name = row.get("custom_id" if is_openai else "id")
            kept: dict[str, Any] = {key: row[key] for key in ("id", "metadata") if key in row and not is_openai}
            written = {f"{key}s[0]": key for key in ("image", "video") if key in row}
            own = dataclasses.replace(own, name=name, is_openai=is_openai, kept=kept, written=written)
            if not is_a(name, str | int | None):
                raise ValueError(
                    f"{'custom_id' if is_openai else 'id'} must be a string or a number, got {short(name)}"
                )
            # A seed for each line, so that its output does not depend on when it runs.
            seeded = {"seed": (int(digest[:8], 16) + number) % 2**32, **defaults}
            body = row.get("body") if is_openai else row
            if not trusts_templates and isinstance(body, dict) and body.get("chat_template") is not None:
                raise ValueError(
                    "chat_template is not allowed, because a template can loop forever; "
                    "pass --trust-request-chat-template if you trust the file"
                )
            request = _openai(row, seeded, chats) if is_openai else _plain(row, seeded)
            conversation: Any = _with_paths(request.messages, folder)
            if request.template:
                conversation = {"messages": conversation, **request.template}
            return dataclasses.replace(own, conversation=conversation, request=request)
        except ValueError as error:
            return dataclasses.replace(own, error=f"line {number}: {error}")

    @property
    def params(self) -> SamplingParams | None:
        """Sampling parameters; None: the request is invalid."""
        return None if self.request is None else self.request.params

    def options(self, run: RequestOptions) -> RequestOptions:
        """Return the options of the run, with the `compress` of the request if it has one."""
        own = RequestOptions() if self.request is None else self.request.request_options
        return run if own.compress is None else dataclasses.replace(run, compress=own.compress)

    def with_system(self, system: str) -> InputLine:
        """Return the request with a system message, unless it has one or is invalid."""
        found = self.conversation
        messages = found.get("messages") if isinstance(found, dict) else found
        if not isinstance(messages, list) or any(isinstance(m, dict) and m.get("role") == "system" for m in messages):
            return self
        extended = [{"role": "system", "content": system}, *messages]
        conversation = found | {"messages": extended} if isinstance(found, dict) else extended
        return dataclasses.replace(self, conversation=conversation, added=1)

    def own_error(self, error: str, index: int) -> str:
        """Return an error of `LLM.chat_iter` for request `index` with the line's number and keys."""
        line = f"line {self.number}"
        for name in ("conversations", "sampling_params"):
            error = error.replace(f"{name}[{index}]", line, 1)
        for called, key in self.written.items():
            error = error.replace(f"{line} {called}", f"{line} {key}", 1)

        def own(found: re.Match[str]) -> str:
            place = int(found[1]) - self.added
            return f"{line} messages[{place}]" if place >= 0 else f"{line} --system"

        return re.sub(rf"{line} messages\[(\d+)\]", own, error, count=1)

    def error_line(self, error: str) -> bytes:
        """Return the output line of a request with an error."""
        if not self.is_openai:
            return _line(self._plain_head() | {"error": error})
        return _line(self._openai_head() | {"response": None, "error": {"code": "invalid_request", "message": error}})

    def output_line(self, output: RequestOutput, model: str, chats: ChatFormat) -> bytes:
        """Return the output line of a finished request."""
        if not self.is_openai:
            answers = [_plain_answer(answer) for answer in output.outputs]
            counts = Counts.of(output)
            usage = {
                "prompt_tokens": counts.prompt, "cached_tokens": counts.cached, "completion_tokens": counts.completion
            }  # fmt: skip
            content = answers[0] if len(answers) == 1 else {"outputs": answers}
            return _line(self._plain_head() | content | usage | {"error": None})
        name = f"chatcmpl-{self.number}-{self.digest}"
        assert self.request is not None
        body = chats.answer(self.request, name, model).whole([output])
        response = {"status_code": 200, "request_id": name, "body": body}
        return _line(self._openai_head() | {"response": response, "error": None})

    def _plain_head(self) -> dict[str, Any]:
        return {"line": self.number, "key": self.digest, **self.kept}

    def _openai_head(self) -> dict[str, Any]:
        return {"id": f"batch_req_{self.number}_{self.digest}", "custom_id": self.name}


@dataclasses.dataclass(frozen=True)
class OutputLine:
    """Output line: the request that it belongs to.

    Attributes:
      number: number of the input line, from 1.
      digest: digest of the input line and of the settings of the run.
      has_failed: True if it has an error.
    """

    number: int
    digest: str
    has_failed: bool

    @classmethod
    def parse(cls, line: str) -> OutputLine:
        """Parse an output line.

        Raises:
          ValueError: it is not an output line.
        """
        answer = read_object(line)
        number, digest = answer.get("line"), answer.get("key")
        if isinstance(name := answer.get("id"), str) and name.startswith("batch_req_") and number is None:
            *_, text, digest = name.split("_")
            number = int(text) if text.isdecimal() else None
        if not (is_a(number, int) and isinstance(digest, str) and digest):
            raise ValueError(f"must be an output line of this command, got {shorten(line)}")
        return cls(number, digest, answer.get("error") is not None)


def _line(content: Mapping[str, Any]) -> bytes:
    return write(content) + b"\n"


def _openai(row: Mapping[str, Any], defaults: Mapping[str, Any], chats: ChatFormat | None) -> ChatRequest:
    """Return the request of a line in OpenAI's batch format."""
    _check_keys(row, _ENVELOPE)
    if (name := row.get("custom_id")) is None:
        raise ValueError("custom_id must be a string, got none")
    check_text(name, "custom_id")
    method, url, body = row.get("method", "POST"), row.get("url", _URL), row.get("body")
    if (method, url) != ("POST", _URL):
        raise ValueError(f"method and url must be POST and {_URL}, got {short(method)} and {short(url)}")
    if not isinstance(body, dict):
        raise ValueError(f"body must be a JSON object, got {short(body)}")
    for key, allowed in _ABSENT.items():
        if body.get(key) not in allowed:
            raise ValueError(f"{key} is not supported, got {short(body[key])}")
    return ChatRequest.parse(body, defaults) if chats is None else chats.request(body, defaults)


def _plain(row: Mapping[str, Any], defaults: Mapping[str, Any]) -> ChatRequest:
    """Return the request of a plain line."""
    media = ("image", "images", "video")
    own = ("id", "metadata", "messages", "question", *media)
    given = {key: value for key, value in row.items() if key not in own}
    _check_keys(given, (*_SAMPLING, *TEMPLATE, "compress"), own)
    sampling = {key: value for key, value in given.items() if key in _SAMPLING}
    if sampling.get("seed") in (None, -1):
        sampling.pop("seed", None)
    if (compress := given.get("compress")) is not None:
        check_text(compress, "compress")
    params, options = SamplingParams(**{**defaults, **sampling}), RequestOptions.read(given)
    return ChatRequest(_messages(row, media), params, template_options(given), options)


def _messages(row: Mapping[str, Any], media: Sequence[str]) -> list[Any]:
    """Return the messages of a plain line. The renderer checks the content of `messages`."""
    if "messages" in row:
        if extra := {"question", *media} & set(row):
            raise ValueError(f"messages and {', '.join(sorted(extra))} are mutually exclusive, got both")
        return cast(list[Any], row["messages"])
    if "question" not in row:
        raise ValueError(f"must have messages, or a question and its images, got {', '.join(row) or 'nothing'}")
    check_text(row["question"], "question")
    if "image" in row and "images" in row:
        raise ValueError("image and images are mutually exclusive, got both")
    images = [row["image"]] if "image" in row else row.get("images") or []
    if not isinstance(images, list):
        raise ValueError(f"images must be a list, got {short(images)}")
    parts = [{"type": "image", "image": image} for image in images]
    if "video" in row:
        parts.append({"type": "video", "video": row["video"]})
    return [{"role": "user", "content": [*parts, {"type": "text", "text": row["question"]}]}]


def _with_paths(conversation: Any, folder: pathlib.Path) -> Any:
    """Return the conversation with image paths relative to `folder`. Invalid parts are left unchanged."""

    def path(value: Any) -> Any:
        is_path = isinstance(value, str) and not is_url(value) and not is_base64(value)
        return os.path.join(folder, os.path.expanduser(value)) if is_path else value

    def part(one: Any) -> Any:
        if not isinstance(one, dict):
            return one
        for kind in ("image_url", "video_url"):
            if isinstance(url := one.get(kind), dict):
                one = one | {kind: url | {key: path(url[key]) for key in ("url",) if key in url}}
        one = one | {key: path(one[key]) for key in _PATHS if key in one}
        frames = one.get("video")
        return one | {"video": list(map(path, frames))} if isinstance(frames, list) else one

    def message(one: Any) -> Any:
        content = one.get("content") if isinstance(one, dict) else None
        return one | {"content": list(map(part, content))} if isinstance(content, list) else one

    return list(map(message, conversation)) if isinstance(conversation, list) else conversation


def _check_keys(given: Mapping[str, Any], known: Any, also: Any = ()) -> None:
    for key in given:
        if key not in known:
            raise ValueError(unknown(key, (*also, *known), GUIDED))


def _plain_answer(answer: CompletionOutput) -> dict[str, Any]:
    content: dict[str, Any] = {"text": answer.text, "finish_reason": answer.finish_reason}
    if answer.logprobs is not None:
        content["logprobs"] = [logprob(one) for one in answer.logprobs]
    return content
