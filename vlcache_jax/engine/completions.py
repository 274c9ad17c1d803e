"""What is told of an answer: log-probabilities of its tokens, and what is new of it."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field


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
class CompletionDelta:
    """What is new of an answer.

    Attributes:
      index: which of the request's answers.
      text: what follows the text so far. It may be empty, as characters and beginnings of stop strings are held back
        until they are complete, or turn out to be none.
      token_ids: that follow those so far.
      finish_reason, stop_reason: see `CompletionOutput`; told once, with the last tokens or behind them.
      logprobs: of these tokens, if asked for.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: str | int | None = None
    logprobs: tuple[Logprob, ...] | None = None
