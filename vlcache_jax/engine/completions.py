"""Outputs of the engine: incremental text, log-probabilities, and the times of a request (host)."""

from __future__ import annotations

import codecs
import weakref
from collections import abc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from vlcache_jax.common.checks import short


@dataclass
class RequestMetrics:
    """Times of a request, in seconds.

    Chunks that several requests share count in full for each of them. Device times end when the results were ready,
    because no thread waits for them. Work done once for several requests of a call, such as decoding an image, counts
    for the first of them.

    Attributes:
      lookup, decode_image, preprocess: parts of the identification of the images, which ends when the request arrives.
      queue: from arrival until it received pages.
      transfer, link, encode, prefill: device time of these parts of the chunks that computed the prompt.
      first_token: rest of the time to the first token: output head, sampling, and waiting between chunks.
      compress: device time to observe the prompt and to compact its KV.
      decode: from the first token to the last.
      inter_token: times between deliveries of tokens; the tokens of one decode program arrive together.
      launched: wall-clock time from the call to the launch of the request's first program, including earlier work for
        other requests of the call.
      ttft: wall-clock time from the beginning to the first token.
      e2e: wall-clock time from the beginning to the end.
      wave: number of the pass that admitted it; not a time.
    """

    lookup: float = 0.0
    decode_image: float = 0.0
    preprocess: float = 0.0
    queue: float = 0.0
    encode: float = 0.0
    transfer: float = 0.0
    link: float = 0.0
    prefill: float = 0.0
    first_token: float = 0.0
    compress: float = 0.0
    decode: float = 0.0
    inter_token: tuple[float, ...] = ()
    launched: float = 0.0
    ttft: float = 0.0
    e2e: float = 0.0
    wave: int = 0

    @property
    def identified(self) -> float:
        """Seconds before the request arrived."""
        return self.lookup + self.decode_image + self.preprocess


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of one token, as in vLLM's mappings.

    Attributes:
      logprob: log-probability of the token.
      rank: 1 for the most likely token, 2 for the next one.
      decoded_token: text of the token; a part of a character is written as OpenAI does, such as `bytes:\\xe2\\x80`.
      token_bytes: bytes of the token.
    """

    logprob: float
    rank: int
    decoded_token: str | None
    token_bytes: bytes | None = None


@dataclass(frozen=True)
class Logprob(abc.Mapping[int, TokenLogprob]):
    """Log-probability of a sampled or given token.

    It is also vLLM's mapping by token id of that token and the most likely ones.

    Attributes:
      chosen: log-probability of the token.
      top: log-probabilities of the most likely tokens, by token id.
      token: id of the token.
      rank: 1 for the most likely token, 2 for the next one.
      texts, token_bytes: texts and bytes of all these tokens, by token id; see `TokenLogprob`.
    """

    chosen: float
    top: dict[int, float]
    token: int
    rank: int
    texts: dict[int, str] = field(default_factory=dict)
    token_bytes: dict[int, bytes] = field(default_factory=dict)

    def __getitem__(self, token: int) -> TokenLogprob:
        if token == self.token:
            logprob, rank = self.chosen, self.rank
        else:
            logprob, rank = self.top[token], 1 + list(self.top).index(token)
        return TokenLogprob(logprob, rank, self.texts.get(token), self.token_bytes.get(token))

    def __iter__(self) -> abc.Iterator[int]:
        yield self.token
        yield from (token for token in self.top if token != self.token)

    def __len__(self) -> int:
        return len(self.top) + (self.token not in self.top)


@dataclass(frozen=True)
class CompletionOutput:
    """Output of a request, or in a `RequestDelta` the new part of it.

    Attributes:
      index: index of the output in its request.
      text: text without the stop string that ended it, unless that was requested. In a delta, the new text; it may be
        empty, because incomplete characters and possible beginnings of stop strings are held back.
      token_ids: tokens up to the end token, or up to the token that completed the stop string; in a delta the new ones.
      finish_reason: "stop" (end token or stop string), "length", "error" or "abort"; None while it runs. One delta has
        it: the one with the last tokens or the one after.
      stop_reason: stop string, or token of `stop_token_ids`, that ended it; None otherwise.
      logprobs: log-probabilities of its tokens, if requested.
      cumulative_logprob: their sum; None in a delta.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: str | int | None = None
    logprobs: tuple[Logprob, ...] | None = None
    cumulative_logprob: float | None = None

    # Attributes of vLLM for features that do not exist here.
    lora_request: ClassVar[None] = None
    routed_experts: ClassVar[None] = None

    def finished(self) -> bool:
        """Return whether it has ended, like vLLM's method."""
        return self.finish_reason is not None


class Detokenizer:
    """Incremental text of one output, and detection of stop strings.

    A token is a byte string and may hold parts of characters; the text is the decoded sequence of all bytes. The cost
    per token does not depend on the length of the output. `tokenizers.DecodeStream` has neither property: it holds back
    all of a token that ends within a character, so stop strings are found later, and a run of invalid bytes takes
    quadratic time.

    Args:
      tokenizer: byte-level tokenizer of the checkpoint.
      stop: strings that end the output.
      skip_special_tokens: whether special tokens are left out of the text.
      include_stop: whether the text includes the stop string.
      min_tokens: number of tokens before which a complete stop string is ignored.

    Attributes:
      count: number of tokens so far.
      stop_reason: stop string that ended the output; None if none did.

    Raises:
      ValueError: the tokenizer is not byte-level.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        min_tokens: int = 0,
    ):
        self._bytes = _token_bytes(tokenizer, skip_special_tokens)
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._kept = max(map(len, self._stop), default=1) - 1  # number of characters that may begin a stop string
        self.count = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._parts: list[str] = []  # text after what was taken
        self._taken = 0  # number of characters taken
        self._length = 0  # number of characters in all
        self._tail = ""  # the last characters
        self._end: int | None = None  # number of characters before the cut by a stop string
        self.stop_reason: str | None = None
        self._is_finished = False

    def append(self, token_ids: Sequence[int]) -> int | None:
        """Append new tokens of the output.

        Returns:
          None, or after a stop string is complete the number of tokens up to the one that completes it. Later tokens
          are ignored, now and in later calls.
        """
        for token in token_ids:
            if self._end is not None:
                break
            self.count += 1
            if text := self._decoder.decode(self._bytes[token]):
                self._extend(text)
        return None if self._end is None else self.count

    def finish(self) -> None:
        """Mark the end of the output: an incomplete character becomes a replacement character."""
        self._is_finished = True
        if self._end is None:
            self._parts.append(self._decoder.decode(b"", final=True))

    def take(self) -> str:
        """Return the text since the last call.

        Text after the end of the output is left out. Until `finish`, an incomplete character and a possible beginning
        of a stop string are held back, since returned text is never retracted.
        """
        text, self._parts = "".join(self._parts), []
        if self._end is not None:
            text = text[: self._end - self._taken]
        elif self._kept and not (self._is_finished or self._include_stop):
            begun = (k for stop in self._stop for k in range(1, len(stop)) if text.endswith(stop[:k]))
            shown = len(text) - max(begun, default=0)
            text, self._parts = text[:shown], [text[shown:]]
        self._taken += len(text)
        return text

    def _extend(self, text: str) -> None:
        window = self._tail + text
        if self._stop and self.count >= self._min_tokens:
            self._find(window, len(self._tail))
        self._parts.append(text)
        self._length += len(text)
        if self._kept:
            self._tail = window[-self._kept :]

    def _find(self, window: str, known: int) -> None:
        """Search stop strings that end after the first `known` characters; the one that begins first wins."""
        places = ((window.find(stop, max(0, known - len(stop) + 1)), len(stop), stop) for stop in self._stop)
        first = min((place for place in places if place[0] >= 0), default=None)
        if first is not None:
            begin, length, self.stop_reason = first
            self._end = self._length - known + begin + (length if self._include_stop else 0)


class _TokenBytes(dict[int, bytes]):
    """Bytes of tokens by id, computed at first use."""

    def __init__(self, backend: Any, skip_special_tokens: bool):
        self._backend = backend
        self._skipped = {
            token
            for token, added in backend.get_added_tokens_decoder().items()
            if added.special and skip_special_tokens
        }

    def __missing__(self, token: int) -> bytes:
        # Ids beyond the vocabulary have no text.
        text = "" if token in self._skipped else self._backend.id_to_token(int(token)) or ""
        if all(character in _BYTES for character in text):
            spelled = bytes(_BYTES[character] for character in text)
        else:  # an added token may be plain text
            spelled = text.encode()
        self[token] = spelled
        return spelled


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """Return the bytes of a token, including special tokens; part of a character gives part of its bytes."""
    return _token_bytes(tokenizer, False)[token]


def spelled(data: bytes) -> str:
    """Return a token's bytes as text. Part of a character is written as OpenAI does, such as `bytes:\\xe2\\x80`."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return f"bytes:{str(data)[2:-1]}"


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of a byte-level vocabulary.

    A printable byte is its own character. The others are U+0100 and up.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()
_known: weakref.WeakKeyDictionary[Any, dict[bool, _TokenBytes]] = weakref.WeakKeyDictionary()


def _token_bytes(tokenizer: Any, skip_special_tokens: bool) -> _TokenBytes:
    """Return the token bytes of a tokenizer, which all of its detokenizers share."""
    tables = _known.setdefault(tokenizer, {})
    if skip_special_tokens not in tables:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = getattr(backend, "decoder", None)
        if type(decoder).__name__ != "ByteLevel":
            raise ValueError(f"tokenizer must decode bytes (ByteLevel), got one with the decoder {short(decoder)}")
        tables[skip_special_tokens] = _TokenBytes(backend, skip_special_tokens)
    return tables[skip_special_tokens]
