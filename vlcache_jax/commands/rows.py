"""The lines of `vlcache run`: what a row asks, and the line that answers it.

A row is JSON on a line, in one of two formats: a request of OpenAI's batch files, answered in the format of their
output files; or a plain one, `{"messages": [...]}` or `{"images": [...], "question": ...}` (also "image" and "video"),
with the names of `SamplingParams` and `compress` beside them. What says how messages become text may stand there, too.
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
"""Of every line of answers."""

_SAMPLING = tuple(name for name in sorted(SAMPLING) if name != "prompt_logprobs")
_ENVELOPE = ("custom_id", "method", "url", "body")
_URL = "/v1/chat/completions"
# Of a request's body: what is one for all rows of a run, or not for files.
_ABSENT: dict[str, tuple[Any, ...]] = {
    "stream": (None, False),
    "stream_options": (None,),
    "priority": (None, 0),
    "cache_salt": (None,),
    "reuse": (None,),
    "mm_processor_kwargs": (None,),
}
_PATHS = ("image", "image_url", "video", "video_url", "path", "url")


@dataclasses.dataclass(frozen=True)
class Row:
    """A request of a file.

    Attributes:
      number: of its line, from 1.
      digest: of what it asks and of the run's settings.
      name: the row's own `custom_id` or `id`; None: it has none.
      is_openai: whether it has OpenAI's format.
      conversation: that goes on, with what says how it becomes text.
      request: what else is asked.
      error: what is wrong with it, in place of these.
      kept: of a plain row what stands in the answer as it came.
      written: the row's keys, by what errors call an image or video that stands in one.
      added: messages in front of the row's own.
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
    ) -> Row:
        """Reads a row, or what is wrong with it.

        Args:
          defaults: sampling parameters where the row names none.
          folder: where relative paths of images begin.
          trusts_templates: whether a row may bring a chat template, which is a program and may run without end.
          chats: of the model; without one it is only seen whether the row is right.
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
            # A seed of the row's own, so that its answer is the same whenever it runs.
            drawn = {"seed": (int(digest[:8], 16) + number) % 2**32, **defaults}
            asked = row.get("body") if is_openai else row
            if not trusts_templates and isinstance(asked, dict) and asked.get("chat_template") is not None:
                raise ValueError(
                    "chat_template must be left out, as a template can run without end; "
                    "--trust-request-chat-template takes those of a file that you trust"
                )
            request = _openai(row, drawn, chats) if is_openai else _plain(row, drawn)
            placed: Any = _placed(request.messages, folder)
            if request.template:
                placed = {"messages": placed, **request.template}
            return dataclasses.replace(own, conversation=placed, request=request)
        except ValueError as error:
            return dataclasses.replace(own, error=f"line {number}: {error}")

    @property
    def params(self) -> SamplingParams | None:
        """How it is answered; None: it is wrong."""
        return None if self.request is None else self.request.params

    def asked(self, run: RequestOptions) -> RequestOptions:
        """The options of its request; where it has none of its own, those of the run."""
        own = RequestOptions() if self.request is None else self.request.asked
        return run if own.compress is None else dataclasses.replace(run, compress=own.compress)

    def behind(self, system: str) -> Row:
        """The row with a system message, unless it has one or is wrong."""
        asked = self.conversation
        messages = asked.get("messages") if isinstance(asked, dict) else asked
        if not isinstance(messages, list) or any(isinstance(m, dict) and m.get("role") == "system" for m in messages):
            return self
        told = [{"role": "system", "content": system}, *messages]
        conversation = asked | {"messages": told} if isinstance(asked, dict) else told
        return dataclasses.replace(self, conversation=conversation, added=1)

    def named(self, error: str, index: int) -> str:
        """An error of `LLM.chat_iter`, which called the row by its `index`, in the row's own words."""
        line = f"line {self.number}"
        for name in ("conversations", "sampling_params"):
            error = error.replace(f"{name}[{index}]", line, 1)
        for called, key in self.written.items():
            error = error.replace(f"{line} {called}", f"{line} {key}", 1)

        def own(found: re.Match[str]) -> str:
            place = int(found[1]) - self.added
            return f"{line} messages[{place}]" if place >= 0 else f"{line} --system"

        return re.sub(rf"{line} messages\[(\d+)\]", own, error, count=1)

    def failed(self, error: str) -> bytes:
        """The line that says what is wrong."""
        if not self.is_openai:
            return _line(self._plain_head() | {"error": error})
        return _line(self._openai_head() | {"response": None, "error": {"code": "invalid_request", "message": error}})

    def answered(self, output: RequestOutput, model: str, chats: ChatFormat) -> bytes:
        """The line that answers."""
        if not self.is_openai:
            answers = [_plain_answer(answer) for answer in output.outputs]
            counts = Counts.of(output)
            usage = {
                "prompt_tokens": counts.prompt, "cached_tokens": counts.cached, "completion_tokens": counts.completion
            }  # fmt: skip
            told = answers[0] if len(answers) == 1 else {"outputs": answers}
            return _line(self._plain_head() | told | usage | {"error": None})
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
class LineAnswer:
    """A line of answers, as far as it tells which row it is of.

    Raises:
      ValueError: (`parse`) it is no such line.
    """

    number: int
    digest: str
    has_failed: bool

    @classmethod
    def parse(cls, line: str) -> LineAnswer:
        answer = read_object(line)
        number, digest = answer.get("line"), answer.get("key")
        if isinstance(name := answer.get("id"), str) and name.startswith("batch_req_") and number is None:
            *_, text, digest = name.split("_")
            number = int(text) if text.isdecimal() else None
        if not (is_a(number, int) and isinstance(digest, str) and digest):
            raise ValueError(f"must be a line of answers of this command, got {shorten(line)}")
        return cls(number, digest, answer.get("error") is not None)


def _line(content: Mapping[str, Any]) -> bytes:
    return write(content) + b"\n"


def _openai(row: Mapping[str, Any], defaults: Mapping[str, Any], chats: ChatFormat | None) -> ChatRequest:
    """What a request of a batch file asks."""
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
    """What a plain row asks."""
    media = ("image", "images", "video")
    own = ("id", "metadata", "messages", "question", *media)
    given = {key: value for key, value in row.items() if key not in own}
    _check_keys(given, (*_SAMPLING, *TEMPLATE, "compress"), own)
    sampling = {key: value for key, value in given.items() if key in _SAMPLING}
    if sampling.get("seed") in (None, -1):
        sampling.pop("seed", None)
    if (compress := given.get("compress")) is not None:
        check_text(compress, "compress")
    params, asked = SamplingParams(**{**defaults, **sampling}), RequestOptions.read(given)
    return ChatRequest(_messages(row, media), params, template_options(given), asked)


def _messages(row: Mapping[str, Any], media: Sequence[str]) -> list[Any]:
    """Of a plain row. What is wrong with those that it has, the renderer tells."""
    if "messages" in row:
        if extra := {"question", *media} & set(row):
            raise ValueError(f"must hold either messages or a question, got both: {', '.join(sorted(extra))}")
        return cast(list[Any], row["messages"])
    if "question" not in row:
        raise ValueError(f"must hold messages, or a question and its images, got {', '.join(row) or 'nothing'}")
    check_text(row["question"], "question")
    if "image" in row and "images" in row:
        raise ValueError("must hold either image or images, got both")
    images = [row["image"]] if "image" in row else row.get("images") or []
    if not isinstance(images, list):
        raise ValueError(f"images must be a list, got {short(images)}")
    parts = [{"type": "image", "image": image} for image in images]
    if "video" in row:
        parts.append({"type": "video", "video": row["video"]})
    return [{"role": "user", "content": [*parts, {"type": "text", "text": row["question"]}]}]


def _placed(conversation: Any, folder: pathlib.Path) -> Any:
    """The conversation with the paths of images as they are from here. What is wrong with it stays as it is."""

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
    told: dict[str, Any] = {"text": answer.text, "finish_reason": answer.finish_reason}
    if answer.logprobs is not None:
        told["logprobs"] = [logprob(one) for one in answer.logprobs]
    return told
