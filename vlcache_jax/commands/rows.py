"""The lines of `vlcache run`: what a row asks, and the line that answers it.

A row is JSON on a line, in one of two formats: a request of OpenAI's batch files, answered in the format of their
output files; or a plain one, `{"messages": [...]}` or `{"images": [...], "question": ...}` (also "image" and "video"),
with the names of `SamplingParams` beside them. What says how messages become text may stand there, too.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vlcache_jax.checks import check_text, is_a, short, shorten
from vlcache_jax.inputs.images import is_base64, is_url
from vlcache_jax.inputs.prompt import TemplateOptions
from vlcache_jax.sampling import SamplingParams
from vlcache_jax.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from vlcache_jax.outputs import CompletionOutput, Logprob, RequestOutput

BEGINNINGS = (b'{"line": ', b'{"id": "batch_req_')
"""Of every line of answers."""

_SAMPLING = {field.name for field in dataclasses.fields(SamplingParams)} - {"prompt_logprobs"}
_ENVELOPE = ("custom_id", "method", "url", "body")
_URL = "/v1/chat/completions"
# Of a request's body: what is for another server to know, and what is here only as it is without it.
_UNUSED = (
    "model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "verbosity",
)  # fmt: skip
_ABSENT: dict[str, tuple[Any, ...]] = {
    "stream": (None, False),
    "stream_options": (None,),
    "tools": (None, []),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "modalities": (None, ["text"]),
    "reasoning_effort": (None,),
}
_TEMPLATE = tuple(TemplateOptions.__annotations__)
_PATHS = ("image", "image_url", "video", "video_url", "path", "url")
_TOKENS = ("max_tokens", "max_completion_tokens")


@dataclasses.dataclass(frozen=True)
class Row:
    """A request of a file.

    Attributes:
      number: of its line, from 1.
      digest: of what it asks and of the run's settings.
      name: the row's own `custom_id` or `id`; None: it has none.
      is_openai: whether it has OpenAI's format.
      conversation, params: what is asked.
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
    params: SamplingParams | None = None
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
    ) -> Row:
        """Reads a row, or what is wrong with it.

        Args:
          defaults: sampling parameters where the row names none.
          folder: where relative paths of images begin.
          trusts_templates: whether a row may bring a chat template, which is a program and may run without end.
        """
        own = cls(number, digest)
        try:
            row = _read(line)
            is_openai = "body" in row or "custom_id" in row
            name = row.get("custom_id" if is_openai else "id")
            kept: dict[str, Any] = {key: row[key] for key in ("id", "metadata") if key in row and not is_openai}
            written = {f"{key}s[0]": key for key in ("image", "video") if key in row}
            own = dataclasses.replace(own, name=name, is_openai=is_openai, kept=kept, written=written)
            if not is_a(name, str | int | None):
                raise ValueError(
                    f"{'custom_id' if is_openai else 'id'} must be a string or a number, got {short(name)}"
                )
            asked, given = _openai(row) if is_openai else _plain(row)
            if given.get("seed") in (None, -1):  # one of the row's own, so that its answer is the same whenever it runs
                given["seed"] = (int(digest[:8], 16) + number) % 2**32
            template = {key: given.pop(key) for key in _TEMPLATE if key in given}
            if template.get("chat_template") is not None and not trusts_templates:
                raise ValueError(
                    "chat_template must be left out, as a template can run without end; "
                    "--trust-request-chat-template takes those of a file that you trust"
                )
            params = SamplingParams(**{**defaults, **given})
            placed = _placed(asked, folder)
            return dataclasses.replace(
                own, conversation={"messages": placed, **template} if template else placed, params=params
            )
        except ValueError as error:
            return dataclasses.replace(own, error=f"line {number}: {error}")

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

    def answered(self, output: RequestOutput, model: str) -> bytes:
        """The line that answers."""
        prompt, cached = len(output.prompt_token_ids), output.num_cached_tokens + output.cache.approximate_tokens
        completion = sum(len(answer.token_ids) for answer in output.outputs)
        if not self.is_openai:
            answers = [_plain_answer(answer) for answer in output.outputs]
            usage = {"prompt_tokens": prompt, "cached_tokens": cached, "completion_tokens": completion}
            told = answers[0] if len(answers) == 1 else {"outputs": answers}
            return _line(self._plain_head() | told | usage | {"error": None})
        body = {
            "id": f"chatcmpl-{self.number}-{self.digest}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model,
            "choices": [_choice(answer) for answer in output.outputs],
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": completion,
                "total_tokens": prompt + completion,
                "prompt_tokens_details": {"cached_tokens": cached},
            },
        }
        response = {"status_code": 200, "request_id": body["id"], "body": body}
        return _line(self._openai_head() | {"response": response, "error": None})

    def _plain_head(self) -> dict[str, Any]:
        return {"line": self.number, "key": self.digest, **self.kept}

    def _openai_head(self) -> dict[str, Any]:
        return {"id": f"batch_req_{self.number}_{self.digest}", "custom_id": self.name}


@dataclasses.dataclass(frozen=True)
class Answer:
    """A line of answers, as far as it tells which row it is of.

    Raises:
      ValueError: (`parse`) it is no such line.
    """

    number: int
    digest: str
    has_failed: bool

    @classmethod
    def parse(cls, line: str) -> Answer:
        answer = _read(line)
        number, digest = answer.get("line"), answer.get("key")
        if isinstance(name := answer.get("id"), str) and name.startswith("batch_req_") and number is None:
            *_, text, digest = name.split("_")
            number = int(text) if text.isdecimal() else None
        if not (is_a(number, int) and isinstance(digest, str) and digest):
            raise ValueError(f"must be a line of answers of this command, got {shorten(line)}")
        return cls(number, digest, answer.get("error") is not None)


def _read(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"must be JSON, got {shorten(line)}: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"must be a JSON object, got {short(found)}")
    return found


def _finite(text: str) -> float:
    """JSON has no other numbers, and what reads the answers may refuse them."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is no finite number")
    return number


def _line(content: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(content, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # bytes of the file that are no text
        return json.dumps(content).encode() + b"\n"


def _openai(row: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The messages of a request of a batch file, and what is said of sampling and of the template."""
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
    given = {key: value for key, value in body.items() if key not in (*_UNUSED, *_ABSENT, *_TOKENS, "messages")}
    given = {key: value for key, value in given.items() if value is not None or key == "max_tokens"}
    if (most := next((body[key] for key in _TOKENS if body.get(key) is not None), None)) is not None:
        given["max_tokens"] = most
    if (told := given.pop("logprobs", None)) not in (None, False, True):
        raise ValueError(f"logprobs must be true or false, got {short(told)}")
    top = given.pop("top_logprobs", None)
    if top is not None and not told:
        raise ValueError(f"logprobs must be true where there are top_logprobs, got {short(told)}")
    if told:
        given["logprobs"] = top or 0
    if (held := StructuredOutputs.from_response_format(given.pop("response_format", None))) is not None:
        given["structured_outputs"] = held
    _check_keys(given, (*sorted(_SAMPLING), *_TEMPLATE))
    return body.get("messages"), given


def _plain(row: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The messages of a plain row, and what is said of sampling and of the template."""
    media = ("image", "images", "video")
    own = ("id", "metadata", "messages", "question", *media)
    given = {key: value for key, value in row.items() if key not in own}
    _check_keys(given, (*sorted(_SAMPLING), *_TEMPLATE), own)
    if "messages" in row:
        if extra := {"question", *media} & set(row):
            raise ValueError(f"must hold either messages or a question, got both: {', '.join(sorted(extra))}")
        return row["messages"], given
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
    return [{"role": "user", "content": [*parts, {"type": "text", "text": row["question"]}]}], given


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
            raise ValueError(f"must hold only {', '.join((*also, *known))}, got {key!r}")


def _plain_answer(answer: CompletionOutput) -> dict[str, Any]:
    told: dict[str, Any] = {"text": answer.text, "finish_reason": answer.finish_reason}
    if answer.logprobs is not None:
        told["logprobs"] = [_logprob(one) for one in answer.logprobs]
    return told


def _choice(answer: CompletionOutput) -> dict[str, Any]:
    logprobs = None if answer.logprobs is None else {"content": [_logprob(one) for one in answer.logprobs]}
    return {
        "index": answer.index,
        "message": {"role": "assistant", "content": answer.text},
        "logprobs": logprobs,
        "finish_reason": answer.finish_reason,
    }


def _logprob(one: Logprob) -> dict[str, Any]:
    """As OpenAI writes it."""

    def named(token: int, logprob: float) -> dict[str, Any]:
        text = one.texts[token]
        is_whole = "\ufffd" not in text  # else it is a part of a character, whose bytes are not known here
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if is_whole else None}

    return named(one.token, one.chosen) | {"top_logprobs": [named(token, value) for token, value in one.top.items()]}
