"""Outputs and deltas of the engine as OpenAI's objects."""

from __future__ import annotations

import codecs
import dataclasses
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from vlcache_jax.protocol.deltas import Joined, joined_pieces
from vlcache_jax.protocol.parsing import AnswerParser
from vlcache_jax.protocol.requests import ChatRequest, Options, OutputParts

if TYPE_CHECKING:
    from vlcache_jax.inputs.prompt import PromptRenderer
    from vlcache_jax.outputs import (
        CacheReport,
        CompletionOutput,
        Compression,
        Logprob,
        PromptOutput,
        RequestDelta,
        RequestOutput,
    )


@dataclass
class Counts:
    """Tokens of a request: of its prompts, of these reused and of images; of its answers, and of these thought."""

    prompt: int = 0
    cached: int = 0
    image: int = 0
    completion: int = 0
    reasoning: int = 0

    @classmethod
    def of_prompt(cls, token_ids: Any, num_cached_tokens: int, cache: CacheReport) -> Counts:
        images = sum(image.tokens for image in cache.images)
        return cls(len(token_ids), num_cached_tokens + cache.approximate_tokens, images)

    @classmethod
    def of(cls, output: RequestOutput) -> Counts:
        found = cls.of_prompt(output.prompt_token_ids, output.num_cached_tokens, output.cache)
        return dataclasses.replace(found, completion=sum(len(answer.token_ids) for answer in output.outputs))

    def usage(self) -> dict[str, Any]:
        """In the names of OpenAI's client."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached, "image_tokens": self.image},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }


@dataclass
class Answer(ABC):
    """Writes the answer to one request: whole, or piece by piece.

    Attributes:
      id: of the answer.
      model: that answers, as clients call it.
      options: of the request.
      answers: of each prompt (`n`).
      created: seconds since 1970.
    """

    id: str
    model: str
    options: Options = field(default_factory=Options)
    answers: int = 1
    created: int = field(default_factory=lambda: int(time.time()))

    kind: ClassVar[str]
    piece: ClassVar[str]

    def __post_init__(self) -> None:
        self._counts: dict[int, Counts] = {}  # so far, by prompt
        self._prompts: dict[int, str] = {}
        self._told: set[int] = set()  # its choices that have begun
        self._next: dict[str, Any] = {}  # what its next piece tells beside
        self._last: dict[str, Any] = {}  # and what its last one does

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer at once, of each prompt its output."""
        self._counts = dict(enumerate(map(Counts.of, outputs)))
        choices = [
            self._choice(self.answers * i + answer.index, answer, output.prompt)
            for i, output in enumerate(outputs)
            for answer in output.outputs
        ]
        told = self._head(self.kind) | {"choices": choices, "usage": self.counts().usage()}
        first = outputs[0]
        if first.prompt_logprobs is not None:
            told["prompt_logprobs"] = [None if one is None else _vllm_logprobs(one) for one in first.prompt_logprobs]
        return told | self._beside(first.prompt_token_ids, first.cache, first.compression)

    def pieces(self, delta: RequestDelta, prompt: int = 0) -> Iterator[dict[str, Any]]:
        """What follows of a stream, now that there is more of one of its prompts."""
        if delta.prompt is not None:
            self._see_prompt(prompt, delta.prompt, is_last=delta.finished)
        self._counts[prompt].completion += sum(len(one.token_ids) for one in delta.outputs)
        for one in delta.outputs:
            index = self.answers * prompt + one.index
            if index not in self._told:
                self._told.add(index)
                for choice in self._opening(index):
                    yield self._piece([choice])
            if (new := self._delta(index, one, self._prompts[prompt])) is not None:
                yield self._piece([new])

    def last(self) -> Iterator[dict[str, Any]]:
        """The end of a stream."""
        if self.options.include_usage or self._last:
            usage = {"usage": self.counts().usage()} if self.options.include_usage else {}
            yield self._piece([]) | usage | self._last

    def failed(self, error: Mapping[str, Any]) -> Mapping[str, Any]:
        """The piece that tells of an error, given OpenAI's object of it."""
        return error

    def counts(self) -> Counts:
        """Of what has been written so far."""
        columns = zip(*map(dataclasses.astuple, self._counts.values()), strict=True)
        return Counts(*map(sum, columns))

    def counts_of(self, prompt: int) -> Counts:
        """Of one prompt."""
        return self._counts[prompt]

    def _see_prompt(self, number: int, told: PromptOutput, *, is_last: bool) -> None:
        """The last time counts: what was to be reused may have had to be computed."""
        beside = self._beside(told.token_ids, told.cache, told.compression)
        cache = {key: beside.pop(key) for key in ("cache",) if key in beside}
        if number not in self._prompts:
            self._next |= beside
        if is_last:
            self._last |= cache
        self._prompts[number] = told.text
        before = self._counts.get(number, Counts())
        found = Counts.of_prompt(told.token_ids, told.num_cached_tokens, told.cache)
        self._counts[number] = dataclasses.replace(found, completion=before.completion, reasoning=before.reasoning)

    def _beside(self, token_ids: Any, cache: CacheReport, compression: Compression | None) -> dict[str, Any]:
        told: dict[str, Any] = {}
        if self.options.returns_token_ids:
            told["prompt_token_ids"] = token_ids.tolist()
        if self.options.returns_cache:
            told["cache"] = cache_report(cache)
            if compression is not None:
                told["cache"]["compression"] = dataclasses.asdict(compression)
        return told

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _piece(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usage = {"usage": self.counts().usage()} if self.options.continuous_usage else {}
        beside, self._next = self._next, {}
        return self._head(self.piece) | {"choices": choices} | usage | beside

    def _end(self, one: CompletionOutput) -> dict[str, Any]:
        """What choices and their pieces say of the end."""
        told: dict[str, Any] = {"finish_reason": one.finish_reason}
        if one.stop_reason is not None:
            told["stop_reason"] = one.stop_reason
        if self.options.returns_token_ids:
            told["token_ids"] = list(one.token_ids)
        return told

    @abstractmethod
    def _choice(self, index: int, answer: CompletionOutput, prompt: str) -> dict[str, Any]:
        """A whole answer."""

    @abstractmethod
    def _delta(self, index: int, one: CompletionOutput, prompt: str) -> dict[str, Any] | None:
        """What is new of an answer; None: nothing that is told yet."""

    def _is_told(self, one: CompletionOutput) -> bool:
        """Whether a delta is told though it may have no text."""
        has_tokens = self.options.returns_token_ids and bool(one.token_ids)
        return bool(one.logprobs) or one.finish_reason is not None or has_tokens

    def _opening(self, index: int) -> list[dict[str, Any]]:
        """What the pieces of an answer begin with."""
        return []


@dataclass
class ChatAnswer(Answer):
    """Of a chat completion.

    Attributes:
      parts: what its text is told apart into.
      chat_template: of the prompts; it tells whether the model thinks.
      tokenizer: of the model; without one no token counts as thinking.
      tells_thinking_tokens: what is told of tokens is told of those of thinking, if these are told at all.
    """

    parts: OutputParts = field(default_factory=OutputParts)
    chat_template: str | None = None
    tokenizer: Any = None
    tells_thinking_tokens: bool = True

    kind, piece = "chat.completion", "chat.completion.chunk"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._parsers: dict[int, AnswerParser] = {}  # of its answers

    def _choice(self, index: int, answer: CompletionOutput, prompt: str) -> dict[str, Any]:
        parser = self._parser(index, prompt)
        answer = self._without_thinking(index, parser, answer)
        joined = Joined.of([*parser.push(answer.text), *parser.finish(is_cut=answer.finish_reason == "length")])
        message: dict[str, Any] = {"role": "assistant", "content": joined.content}
        message |= self._thought(joined.reasoning)
        if joined.calls:
            message |= {"content": joined.content or None, "tool_calls": joined.calls}
        end = self._end(answer) | {"finish_reason": parser.finish_reason(answer.finish_reason)}
        return {"index": index, "message": message, "logprobs": self._logprobs(answer.logprobs)} | end

    def _delta(self, index: int, one: CompletionOutput, prompt: str) -> dict[str, Any] | None:
        parser = self._parser(index, prompt)
        one = self._without_thinking(index, parser, one)
        new = parser.push(one.text)
        if one.finish_reason is not None:
            new += parser.finish(is_cut=one.finish_reason == "length")
        content, calls = "".join(each.content for each in new), [each.call for each in new if each.call is not None]
        delta: dict[str, Any] = {"content": content} if content or (one.logprobs and not new) else {}
        delta |= self._thought("".join(each.reasoning for each in new))
        if calls:
            delta["tool_calls"] = [call.as_openai() for call in joined_pieces(calls)]
        if not delta and not self._is_told(one):
            return None
        end = self._end(one) | {"finish_reason": parser.finish_reason(one.finish_reason)}
        return {"index": index, "delta": delta, "logprobs": self._logprobs(one.logprobs)} | end

    def _logprobs(self, told: Sequence[Logprob] | None) -> dict[str, Any] | None:
        return None if told is None else {"content": [logprob(one, by_id=self.options.names_ids) for one in told]}

    def _parser(self, index: int, prompt: str) -> AnswerParser:
        if index not in self._parsers:
            self._parsers[index] = AnswerParser(
                f"{self.id}-{index}",
                chat_template=self.chat_template if self.parts.thoughts else None,
                prompt=prompt,
                has_tools=self.parts.calls,
                is_held=self.parts.is_held,
                is_single=self.parts.is_single,
                tokenizer=self.tokenizer,
            )
        return self._parsers[index]

    def _without_thinking(self, index: int, parser: AnswerParser, one: CompletionOutput) -> CompletionOutput:
        """Counts tokens of thinking, and leaves them out where they are not told."""
        thinking = parser.thinking(one.token_ids)
        self._counts[index // self.answers].reasoning += sum(thinking)
        if (self.parts.tells_thoughts and self.tells_thinking_tokens) or not any(thinking):
            return one
        said = [not each for each in thinking]
        logprobs = None if one.logprobs is None else tuple(itertools.compress(one.logprobs, said))
        return dataclasses.replace(one, token_ids=tuple(itertools.compress(one.token_ids, said)), logprobs=logprobs)

    def _thought(self, reasoning: str) -> dict[str, Any]:
        """What was thought, under the names that clients look for."""
        if not reasoning or not self.parts.tells_thoughts:
            return {}
        return {"reasoning": reasoning, "reasoning_content": reasoning}

    def _opening(self, index: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]


class CompletionAnswer(Answer):
    """Of a completion."""

    kind = piece = "text_completion"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._offsets: dict[int, _Offsets] = {}  # of its answers

    def _choice(self, index: int, answer: CompletionOutput, prompt: str) -> dict[str, Any]:
        logprobs = self._logprobs(index, answer.logprobs)
        return {"index": index, "text": answer.text, "logprobs": logprobs} | self._end(answer)

    def _delta(self, index: int, one: CompletionOutput, prompt: str) -> dict[str, Any] | None:
        if not one.text and not self._is_told(one):
            return None
        return {"index": index, "text": one.text, "logprobs": self._logprobs(index, one.logprobs)} | self._end(one)

    def _logprobs(self, index: int, told: Sequence[Logprob] | None) -> dict[str, Any] | None:
        if told is None:
            return None
        offsets, by_id = self._offsets.setdefault(index, _Offsets()), self.options.names_ids
        names = [_names(one, by_id=by_id) for one in told]
        return {
            "tokens": [own[one.token] for own, one in zip(names, told, strict=True)],
            "token_logprobs": [one.chosen for one in told],
            "top_logprobs": [
                {own[token]: one[token].logprob for token in (*one.top, one.token)}
                for own, one in zip(names, told, strict=True)
            ],
            "text_offset": [offsets.take(one.token_bytes[one.token]) for one in told],
        }


class _Offsets:
    """Counts the characters of an answer before each of its tokens; one that is not complete does not count."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def take(self, token: bytes) -> int:
        """Return where the next token begins."""
        begin = self._length
        self._length += len(self._decoder.decode(token))
        return begin


def cache_report(cache: CacheReport) -> dict[str, Any]:
    """What was reused, in the names of `CacheReport`; of each image what `ImageReuse` says."""
    images = [
        {
            "index": image.index,
            "key": image.key,
            "match": image.match,
            "kv": image.kv,
            "encoder": image.encoder,
            "tokens": image.tokens,
            "rows": list(image.recomputed),
            "why": None if image.why is None else image.why.value,
            "video": image.video,
            "chunk": image.chunk,
        }
        for image in cache.images
    ]
    return {
        "exact": cache.exact,
        "policy": cache.policy,
        "approximate_tokens": cache.approximate_tokens,
        "rows": list(cache.rows),
        "images": images,
    }


def answer_id(name: str, options: Options) -> str:
    """The id of an answer: `name`, or its beginning and what the client asks for."""
    return name if options.request_id is None else f"{name.partition('-')[0]}-{options.request_id}"


def logprob(one: Logprob, *, by_id: bool = False) -> dict[str, Any]:
    """Return what a chat's answer has of a token; `by_id`: tokens are named by their ids."""

    def named(token: int) -> dict[str, Any]:
        name = _id_name(token) if by_id else one.texts[token]
        return {"token": name, "logprob": one[token].logprob, "bytes": list(one.token_bytes[token])}

    return named(one.token) | {"top_logprobs": list(map(named, one.top))}


def _names(one: Logprob, *, by_id: bool) -> dict[int, str]:
    """Names of a token and of the most likely ones: their texts, or for those of a text that is taken their ids."""
    names: dict[str, int] = {}
    for token in one:
        text = one.texts[token]
        names[_id_name(token) if by_id or text in names else text] = token
    return {token: name for name, token in names.items()}


def _id_name(token: int) -> str:
    """A token by its id, as vLLM writes it."""
    return f"token_id:{token}"


def _vllm_logprobs(one: Logprob) -> Mapping[str, Any]:
    return {
        str(token): {"logprob": told.logprob, "rank": told.rank, "decoded_token": told.decoded_token}
        for token, told in one.items()
    }


@dataclass(frozen=True)
class ChatFormat:
    """Reads requests for chats with a model, and begins their answers.

    Attributes:
      renderer: makes the model's prompts.
      chat_template: Jinja, in place of the checkpoint's own.
      calls, thoughts: whether these are told apart from what is said.
    """

    renderer: PromptRenderer
    chat_template: str | None = None
    calls: bool = True
    thoughts: bool = True

    def request(self, body: Mapping[str, Any], defaults: Mapping[str, Any]) -> ChatRequest:
        """See `ChatRequest.parse`. If thinking is not told apart, the first token is held, too."""
        request = ChatRequest.parse(body, defaults, self._template({}))
        held = request.params.structured_outputs
        if held is None or self.thoughts:
            return request
        held = dataclasses.replace(held, enable_in_reasoning=True)
        return dataclasses.replace(request, params=dataclasses.replace(request.params, structured_outputs=held))

    def answer(self, request: ChatRequest, name: str, model: str, *, tells_thinking_tokens: bool = True) -> ChatAnswer:
        """What writes the answer to a request; see `ChatAnswer`."""
        asked = request.parts
        parts = dataclasses.replace(asked, calls=asked.calls and self.calls, thoughts=asked.thoughts and self.thoughts)
        return ChatAnswer(
            answer_id(name, request.options),
            model,
            request.options,
            request.params.n,
            parts=parts,
            chat_template=self._template(request.template),
            tokenizer=self.renderer.tokenizer,
            tells_thinking_tokens=tells_thinking_tokens,
        )

    def _template(self, given: Mapping[str, Any]) -> Any:
        """That which holds where this is given."""
        return given.get("chat_template") or self.chat_template or self.renderer.chat_template
