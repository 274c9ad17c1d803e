"""OpenAI's answer objects, made from outputs and deltas of the engine."""

from __future__ import annotations

import codecs
import dataclasses
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from vlcache_jax.protocol.deltas import Delta, ParsedAnswer, joined_pieces
from vlcache_jax.protocol.parsing import AnswerParser
from vlcache_jax.protocol.requests import ChatRequest, Options, OutputParts
from vlcache_jax.protocol.schema import ApiError

if TYPE_CHECKING:
    from vlcache_jax.inputs.prompt import PromptRenderer
    from vlcache_jax.outputs import (
        CacheReport,
        CompletionOutput,
        Compression,
        Logprob,
        RequestDelta,
        RequestOutput,
    )


@dataclass
class Counts:
    """Token counts of a request.

    Attributes:
      prompt: tokens of its prompts.
      cached: prompt tokens reused from the cache, exactly or approximately.
      image: prompt tokens of images.
      completion: generated tokens.
      reasoning: generated tokens of the thinking.
    """

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
        """Return OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached, "image_tokens": self.image},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }


@dataclass
class Answer(ABC):
    """Writer of the answer to one request, as one object or as chunks of a stream.

    Attributes:
      id: id of the answer.
      model: name of the model.
      options: options of the request.
      answers: answers per prompt (`n`).
      created: time in seconds since 1970.
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
        self._begun: set[int] = set()  # indices of the choices that have begun
        self._next: dict[str, Any] = {}  # additional fields of the next chunk
        self._last: dict[str, Any] = {}  # additional fields of the last chunk

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the complete answer; `outputs` has one output per prompt."""
        self._counts = dict(enumerate(map(Counts.of, outputs)))
        choices = [
            self._choice(self.answers * i + answer.index, answer, output.prompt)
            for i, output in enumerate(outputs)
            for answer in output.outputs
        ]
        answer = self._head(self.kind) | {"choices": choices, "usage": self.counts().usage()}
        first = outputs[0]
        if first.prompt_logprobs is not None:
            answer["prompt_logprobs"] = [None if one is None else _vllm_logprobs(one) for one in first.prompt_logprobs]
        return answer | self._extras(first.prompt_token_ids, first.cache, first.compression)

    def pieces(self, delta: RequestDelta, prompt: int = 0) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a delta of one prompt."""
        self._see(prompt, delta)
        for one in delta.outputs:
            index = self.answers * prompt + one.index
            if index not in self._begun:
                self._begun.add(index)
                for choice in self._opening(index):
                    yield self._piece([choice])
            if (new := self._delta(index, one, self._prompts[prompt])) is not None:
                yield self._piece([new])

    def last(self) -> Iterator[dict[str, Any]]:
        """Yield the last chunk of a stream, with the usage and the cache report if they were requested."""
        if self.options.include_usage or self._last:
            usage = {"usage": self.counts().usage()} if self.options.include_usage else {}
            yield self._piece([]) | usage | self._last

    def failed(self, error: ApiError) -> Mapping[str, Any]:
        """Return the chunk of an error that ends the stream."""
        return error.to_dict()

    def counts(self) -> Counts:
        """Return the token counts so far, of all prompts."""
        columns = zip(*map(dataclasses.astuple, self._counts.values()), strict=True)
        return Counts(*map(sum, columns))

    def counts_of(self, prompt: int) -> Counts:
        """Return the token counts of one prompt."""
        return self._counts[prompt]

    def _see(self, number: int, delta: RequestDelta) -> None:
        """Note the prompt of a delta, if it has one, and count its tokens.

        Only the last cache report of a prompt is sent: planned reuse can fail and be replaced by computing.
        """
        if (prompt := delta.prompt) is not None:
            extras = self._extras(prompt.token_ids, prompt.cache, prompt.compression)
            cache = {key: extras.pop(key) for key in ("cache",) if key in extras}
            if number not in self._prompts:
                self._next |= extras
            if delta.finished:
                self._last |= cache
            self._prompts[number] = prompt.text
            before = self._counts.get(number, Counts())
            found = Counts.of_prompt(prompt.token_ids, prompt.num_cached_tokens, prompt.cache)
            self._counts[number] = dataclasses.replace(found, completion=before.completion, reasoning=before.reasoning)
        self._counts[number].completion += sum(len(one.token_ids) for one in delta.outputs)

    def _extras(self, token_ids: Any, cache: CacheReport, compression: Compression | None) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if self.options.returns_token_ids:
            extras["prompt_token_ids"] = token_ids.tolist()
        if self.options.returns_cache:
            extras["cache"] = cache_report(cache)
            if compression is not None:
                extras["cache"]["compression"] = dataclasses.asdict(compression)
        return extras

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _piece(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usage = {"usage": self.counts().usage()} if self.options.continuous_usage else {}
        extras, self._next = self._next, {}
        return self._head(self.piece) | {"choices": choices} | usage | extras

    def _end(self, one: CompletionOutput) -> dict[str, Any]:
        """Return the last fields of a choice: the finish reason, and the stop reason and token ids if there are any."""
        end: dict[str, Any] = {"finish_reason": one.finish_reason}
        if one.stop_reason is not None:
            end["stop_reason"] = one.stop_reason
        if self.options.returns_token_ids:
            end["token_ids"] = list(one.token_ids)
        return end

    @abstractmethod
    def _choice(self, index: int, answer: CompletionOutput, prompt: str) -> dict[str, Any]:
        """Return the choice of a complete answer."""

    @abstractmethod
    def _delta(self, index: int, one: CompletionOutput, prompt: str) -> dict[str, Any] | None:
        """Return the choice of a delta; None if there is nothing to send yet."""

    def _is_sent(self, one: CompletionOutput) -> bool:
        """Return whether a delta is sent even without text."""
        has_tokens = self.options.returns_token_ids and bool(one.token_ids)
        return bool(one.logprobs) or one.finish_reason is not None or has_tokens

    def _opening(self, index: int) -> list[dict[str, Any]]:
        """Return the choices that open an answer in a stream."""
        return []


@dataclass
class ChatAnswer(Answer):
    """Writer of a chat completion.

    Attributes:
      parts: parts that the text is parsed into.
      chat_template: Jinja text of the chat template, which shows whether the model thinks.
      tokenizer: tokenizer of the model; without it no token counts as thinking.
      returns_thinking_tokens: False to leave out logprobs and ids of thinking tokens even if the thinking is returned.
    """

    parts: OutputParts = field(default_factory=OutputParts)
    chat_template: str | None = None
    tokenizer: Any = None
    returns_thinking_tokens: bool = True

    kind, piece = "chat.completion", "chat.completion.chunk"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._parsers: dict[int, AnswerParser] = {}  # by choice

    def read(self, delta: RequestDelta) -> tuple[list[Delta], dict[str, Any]]:
        """Return the parsed deltas of the only answer of a request, in the order of its text, and its last fields.

        Use it in place of `pieces` for an API whose answers keep this order. The last fields are `finish_reason`, which
        is None before the end, and `stop_reason` if there is one.
        """
        self._see(0, delta)
        parsed: list[Delta] = []
        end: dict[str, Any] = {"finish_reason": None}
        for one in delta.outputs:
            one, new = self._parsed(0, one, self._prompts[0])
            parsed += new
            end = self._end(one) | {"finish_reason": self._parsers[0].finish_reason(one.finish_reason)}
        if not self.parts.returns_thoughts:
            parsed = [one for one in parsed if not one.reasoning]
        return parsed, end

    @property
    def extras(self) -> dict[str, Any]:
        """Requested fields in addition to OpenAI's: token ids of the prompt, and at the end the cache report."""
        return self._next | self._last

    def _choice(self, index: int, answer: CompletionOutput, prompt: str) -> dict[str, Any]:
        parser = self._parser(index, prompt)
        answer = self._without_thinking(index, parser, answer)
        joined = ParsedAnswer.of([*parser.push(answer.text), *parser.finish(is_cut=answer.finish_reason == "length")])
        message: dict[str, Any] = {"role": "assistant", "content": joined.content}
        message |= self._thought(joined.reasoning)
        if joined.calls:
            message |= {"content": joined.content or None, "tool_calls": joined.calls}
        end = self._end(answer) | {"finish_reason": parser.finish_reason(answer.finish_reason)}
        return {"index": index, "message": message, "logprobs": self._logprobs(answer.logprobs)} | end

    def _delta(self, index: int, one: CompletionOutput, prompt: str) -> dict[str, Any] | None:
        one, new = self._parsed(index, one, prompt)
        content, calls = "".join(each.content for each in new), [each.call for each in new if each.call is not None]
        delta: dict[str, Any] = {"content": content} if content or (one.logprobs and not new) else {}
        delta |= self._thought("".join(each.reasoning for each in new))
        if calls:
            delta["tool_calls"] = [call.as_openai() for call in joined_pieces(calls)]
        if not delta and not self._is_sent(one):
            return None
        end = self._end(one) | {"finish_reason": self._parsers[index].finish_reason(one.finish_reason)}
        return {"index": index, "delta": delta, "logprobs": self._logprobs(one.logprobs)} | end

    def _parsed(self, index: int, one: CompletionOutput, prompt: str) -> tuple[CompletionOutput, list[Delta]]:
        """Return an output without the tokens that are not to be returned, and its text as parsed deltas."""
        parser = self._parser(index, prompt)
        one = self._without_thinking(index, parser, one)
        new = parser.push(one.text)
        if one.finish_reason is not None:
            new += parser.finish(is_cut=one.finish_reason == "length")
        return one, new

    def _logprobs(self, given: Sequence[Logprob] | None) -> dict[str, Any] | None:
        return None if given is None else {"content": [logprob(one, by_id=self.options.names_ids) for one in given]}

    def _parser(self, index: int, prompt: str) -> AnswerParser:
        if index not in self._parsers:
            self._parsers[index] = AnswerParser(
                f"{self.id}-{index}",
                chat_template=self.chat_template if self.parts.thoughts else None,
                prompt=prompt,
                has_tools=self.parts.calls,
                xml_tools=self.parts.xml_tools,
                is_held=self.parts.is_held,
                is_single=self.parts.is_single,
                tokenizer=self.tokenizer,
            )
        return self._parsers[index]

    def _without_thinking(self, index: int, parser: AnswerParser, one: CompletionOutput) -> CompletionOutput:
        """Count thinking tokens, and return the output without them if they are not to be returned."""
        thinking = parser.thinking(one.token_ids)
        self._counts[index // self.answers].reasoning += sum(thinking)
        if (self.parts.returns_thoughts and self.returns_thinking_tokens) or not any(thinking):
            return one
        said = [not each for each in thinking]
        logprobs = None if one.logprobs is None else tuple(itertools.compress(one.logprobs, said))
        return dataclasses.replace(one, token_ids=tuple(itertools.compress(one.token_ids, said)), logprobs=logprobs)

    def _thought(self, reasoning: str) -> dict[str, Any]:
        """Return the reasoning under the names that clients use, or {} if it is empty or not to be returned."""
        if not reasoning or not self.parts.returns_thoughts:
            return {}
        return {"reasoning": reasoning, "reasoning_content": reasoning}

    def _opening(self, index: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]


class CompletionAnswer(Answer):
    """Writer of a text completion."""

    kind = piece = "text_completion"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._offsets: dict[int, _Offsets] = {}  # by choice

    def _choice(self, index: int, answer: CompletionOutput, prompt: str) -> dict[str, Any]:
        logprobs = self._logprobs(index, answer.logprobs)
        return {"index": index, "text": answer.text, "logprobs": logprobs} | self._end(answer)

    def _delta(self, index: int, one: CompletionOutput, prompt: str) -> dict[str, Any] | None:
        if not one.text and not self._is_sent(one):
            return None
        return {"index": index, "text": one.text, "logprobs": self._logprobs(index, one.logprobs)} | self._end(one)

    def _logprobs(self, index: int, given: Sequence[Logprob] | None) -> dict[str, Any] | None:
        if given is None:
            return None
        offsets, by_id = self._offsets.setdefault(index, _Offsets()), self.options.names_ids
        names = [_names(one, by_id=by_id) for one in given]
        return {
            "tokens": [own[one.token] for own, one in zip(names, given, strict=True)],
            "token_logprobs": [one.chosen for one in given],
            "top_logprobs": [
                {own[token]: one[token].logprob for token in (*one.top, one.token)}
                for own, one in zip(names, given, strict=True)
            ],
            "text_offset": [offsets.take(one.token_bytes[one.token]) for one in given],
        }


class _Offsets:
    """Counter of the characters before each token of an answer. Incomplete characters do not count."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def take(self, token: bytes) -> int:
        """Return the offset in characters at which the next token begins; `token` is its bytes."""
        begin = self._length
        self._length += len(self._decoder.decode(token))
        return begin


def cache_report(cache: CacheReport) -> dict[str, Any]:
    """Return a cache report as JSON: the fields of `CacheReport`, and those of `ImageReuse` for each image."""
    images = [
        {
            "index": image.index,
            "key": image.key,
            "match": image.match,
            "kv": image.kv,
            "encoder": image.encoder,
            "tokens": image.tokens,
            "rows": list(image.recomputed),
            "bytes_moved": image.bytes_moved,
            "why": None if image.why is None else image.why.value,
            "donor": image.donor,
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
        "matched_tokens": cache.matched_tokens,
        "request_key": cache.request_key,
        "request_known": cache.request_known,
        "images": images,
    }


def answer_id(name: str, options: Options) -> str:
    """Return the id of an answer: `name`, or its prefix and the request's `request_id`."""
    return name if options.request_id is None else f"{name.partition('-')[0]}-{options.request_id}"


def logprob(one: Logprob, *, by_id: bool = False) -> dict[str, Any]:
    """Return a token's log probabilities as in a chat completion; `by_id` names tokens by their ids."""

    def named(token: int) -> dict[str, Any]:
        name = _id_name(token) if by_id else one.texts[token]
        return {"token": name, "logprob": one[token].logprob, "bytes": list(one.token_bytes[token])}

    return named(one.token) | {"top_logprobs": list(map(named, one.top))}


def _names(one: Logprob, *, by_id: bool) -> dict[int, str]:
    """Return names of a token and of the most likely ones: the text, or the id if another token has the same text."""
    names: dict[str, int] = {}
    for token in one:
        text = one.texts[token]
        names[_id_name(token) if by_id or text in names else text] = token
    return {token: name for name, token in names.items()}


def _id_name(token: int) -> str:
    """Return the name of a token by its id, in vLLM's format."""
    return f"token_id:{token}"


def _vllm_logprobs(one: Logprob) -> Mapping[str, Any]:
    return {
        str(token): {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": entry.decoded_token}
        for token, entry in one.items()
    }


@dataclass(frozen=True)
class ChatFormat:
    """Parser of chat requests for a model, and factory of the writers of their answers.

    Attributes:
      renderer: renderer of the model's prompts.
      chat_template: Jinja text; None for that of the checkpoint.
      calls: True to parse tool calls.
      thoughts: True to parse reasoning.
      xml_calls: True if the model writes calls as `xml_tools` reads them, False if as JSON; None: the chat template
        shows it.
    """

    renderer: PromptRenderer
    chat_template: str | None = None
    calls: bool = True
    thoughts: bool = True
    xml_calls: bool | None = None

    def request(self, body: Mapping[str, Any], defaults: Mapping[str, Any]) -> ChatRequest:
        """Return the request of a body; see `ChatRequest.parse`.

        Without reasoning parsing, structured outputs also constrain the thinking, from the first token on.

        Raises:
          ApiError: a field is wrong, unknown or not supported.
        """
        request = ChatRequest.parse(body, defaults, self.template(), self.xml_calls)
        held = request.params.structured_outputs
        if held is None or self.thoughts:
            return request
        held = dataclasses.replace(held, enable_in_reasoning=True)
        return dataclasses.replace(request, params=dataclasses.replace(request.params, structured_outputs=held))

    def answer(
        self, request: ChatRequest, name: str, model: str, *, returns_thinking_tokens: bool = True
    ) -> ChatAnswer:
        """Return the writer of the answer with the id `name`; see `ChatAnswer`."""
        own = request.parts
        parts = dataclasses.replace(own, calls=own.calls and self.calls, thoughts=own.thoughts and self.thoughts)
        return ChatAnswer(
            answer_id(name, request.options),
            model,
            request.options,
            request.params.n,
            parts=parts,
            chat_template=self.template(request.template),
            tokenizer=self.renderer.tokenizer,
            returns_thinking_tokens=returns_thinking_tokens,
        )

    def template(self, given: Mapping[str, Any] = MappingProxyType({})) -> Any:
        """Return the chat template: that of the request's template options, of this format, or of the checkpoint."""
        return given.get("chat_template") or self.chat_template or self.renderer.chat_template
