"""Outputs of the engine: text while it grows, log-probabilities, and the times of a request (host)."""

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
    """Seconds. Steps that several requests share count in full for each of them; steps of the device are told by when
    their results were ready, as nobody waits for them.

    What is done once for several requests of a call, such as decoding an image, counts for the first of them.

    Attributes:
      lookup, decode_image, preprocess: until the images were identified, that is, until the request arrived.
      queue: from arrival until it got pages.
      transfer, link, encode, prefill: on the device, of the steps that computed the prompt.
      first_token: the rest of the time to the first token: the output head, sampling, and waiting between steps.
      compress: on the device, to find out what the answer goes on with, and to compact it.
      decode: from the first token to the last.
      inter_token: from one delivery of tokens to the next; those of a window come together.
      launched: from the call until the first of its programs had been handed to the device, by the clock; all that was
        done before for other rows of the call is in it.
      ttft: from the beginning to the first token, by the clock.
      e2e: from the beginning to the end, by the clock.
      wave: number of the step of the engine's loop that admitted it.
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
    """What vLLM's mappings have of a token.

    Attributes:
      logprob: its log-probability.
      rank: 1 for the most likely token, 2 for the next one.
      decoded_token: its text; of a part of a character `bytes:\\xe2\\x80`, its bytes as OpenAI writes them.
      token_bytes: the bytes that it spells.
    """

    logprob: float
    rank: int
    decoded_token: str | None
    token_bytes: bytes | None = None


@dataclass(frozen=True)
class Logprob(abc.Mapping[int, TokenLogprob]):
    """Of a token that was chosen or given. It is also vLLM's mapping: that token and the most likely ones, by token id.

    Attributes:
      chosen: its log-probability.
      top: log-probabilities of the most likely tokens, by token id.
      token: its id.
      rank: 1 for the most likely token, 2 for the next one.
      texts, token_bytes: of all these tokens, by token id; see `TokenLogprob`.
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
    """One answer; in a `RequestDelta` what is new of it.

    Attributes:
      index: which of the request's answers.
      text: without the stop string that ended it, unless that was asked for. In a delta it follows the text so far. It
        may be empty then, as characters and beginnings of stop strings are held back until they are complete, or turn
        out to be none.
      token_ids: up to the end token, or the token that completed the stop string; in a delta those that follow.
      finish_reason: "stop" (end token or stop string), "length", "error" or "abort"; None while it goes on. Deltas have
        it once, with the last tokens or behind them.
      stop_reason: the stop string, or the token of `stop_token_ids`, that ended it.
      logprobs: of its tokens, if asked for.
      cumulative_logprob: their sum; None in a delta.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: str | int | None = None
    logprobs: tuple[Logprob, ...] | None = None
    cumulative_logprob: float | None = None

    # vLLM's, of what there is not here.
    lora_request: ClassVar[None] = None
    routed_experts: ClassVar[None] = None

    def finished(self) -> bool:
        """Whether it has ended; vLLM has this method."""
        return self.finish_reason is not None


class Detokenizer:
    """The text of one answer, and whether a stop string has ended it.

    A token is bytes, which may be parts of characters; the text is what all of them spell. A token costs the same
    however long the answer is. `tokenizers.DecodeStream` keeps neither rule: it holds back all of a token that ends
    within a character, so that stop strings in it are found later, and a run of invalid bytes costs it quadratic time.

    Args:
      tokenizer: of the checkpoint; a byte-level one.
      stop: strings that end the answer.
      skip_special_tokens: leave special tokens out of the text.
      include_stop: the stop string is part of the text.
      least: a stop string that is complete before that many tokens does not count.

    Attributes:
      count: tokens so far.
      stop_reason: the stop string that ended the answer; None: none did.

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
        least: int = 0,
    ):
        self._bytes = _token_bytes(tokenizer, skip_special_tokens)
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._least = least
        self._kept = max(map(len, self._stop), default=1) - 1  # characters that may begin a stop string
        self.count = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._parts: list[str] = []  # of the text, behind what has been taken
        self._taken = 0  # characters that have been
        self._length = 0  # characters in all
        self._tail = ""  # the last of them
        self._end: int | None = None  # characters up to where a stop string cuts the text
        self.stop_reason: str | None = None
        self._is_finished = False

    def append(self, token_ids: Sequence[int]) -> int | None:
        """Goes on with new tokens of the answer.

        Returns:
          None, or once a stop string is complete the number of the answer's tokens up to the one that completes it.
          The tokens behind that one count for nothing, now and later.
        """
        for token in token_ids:
            if self._end is not None:
                break
            self.count += 1
            if text := self._decoder.decode(self._bytes[token]):
                self._extend(text)
        return None if self._end is None else self.count

    def finish(self) -> None:
        """The answer has ended: what is left of a character that never became complete is shown as such."""
        self._is_finished = True
        if self._end is None:
            self._parts.append(self._decoder.decode(b"", final=True))

    def take(self) -> str:
        """What the tokens spell behind what has been taken.

        Left out are what lies behind the end of the answer, and until `finish` a character that is not complete, and
        what may be the beginning of a stop string: what has been shown is never taken back.
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
        if self._stop and self.count >= self._least:
            self._find(window, len(self._tail))
        self._parts.append(text)
        self._length += len(text)
        if self._kept:
            self._tail = window[-self._kept :]

    def _find(self, window: str, known: int) -> None:
        """Looks for stop strings that end behind the `known` first characters; the one that begins first wins."""
        places = ((window.find(stop, max(0, known - len(stop) + 1)), len(stop), stop) for stop in self._stop)
        first = min((place for place in places if place[0] >= 0), default=None)
        if first is not None:
            begin, length, self.stop_reason = first
            self._end = self._length - known + begin + (length if self._include_stop else 0)


class _TokenBytes(dict[int, bytes]):
    """The bytes of tokens by their ids; found when they are asked for first."""

    def __init__(self, backend: Any, skip_special_tokens: bool):
        self._backend = backend
        self._skipped = {
            token
            for token, added in backend.get_added_tokens_decoder().items()
            if added.special and skip_special_tokens
        }

    def __missing__(self, token: int) -> bytes:
        # Ids beyond the vocabulary spell nothing.
        text = "" if token in self._skipped else self._backend.id_to_token(int(token)) or ""
        if all(character in _BYTES for character in text):
            spelled = bytes(_BYTES[character] for character in text)
        else:  # an added token may be written as it is
            spelled = text.encode()
        self[token] = spelled
        return spelled


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """Return what a token spells, also a special one; a part of a character has a part of its bytes."""
    return _token_bytes(tokenizer, False)[token]


def spelled(data: bytes) -> str:
    """Return a token's bytes as text; those of a part of a character as OpenAI writes them, `bytes:\\xe2\\x80`."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return f"bytes:{str(data)[2:-1]}"


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary: itself if it can be printed, or U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()
_known: weakref.WeakKeyDictionary[Any, dict[bool, _TokenBytes]] = weakref.WeakKeyDictionary()


def _token_bytes(tokenizer: Any, skip_special_tokens: bool) -> _TokenBytes:
    """Of a tokenizer; all detokenizers of it share them."""
    tables = _known.setdefault(tokenizer, {})
    if skip_special_tokens not in tables:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = getattr(backend, "decoder", None)
        if type(decoder).__name__ != "ByteLevel":
            raise ValueError(f"tokenizer must decode bytes (ByteLevel), got one that decodes with {short(decoder)}")
        tables[skip_special_tokens] = _TokenBytes(backend, skip_special_tokens)
    return tables[skip_special_tokens]
