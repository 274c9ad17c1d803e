"""What the engine returns."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


class Why(enum.Enum):
    """Why an image was computed, or not reused as far as it could have been."""

    reuse_off = "reuse_off"


@dataclass(frozen=True)
class ImageReuse:
    """What happened to one image of a request.

    Attributes:
      index: which image of the request.
      key: its entry key.
      tokens: image tokens in the prompt.
      encoder: where its encoder rows came from.
      kv: where its K, V came from.
      match: how well a stored entry fitted.
      recomputed: its rows computed in each layer.
      why: the reason, when it was not reused.
    """

    index: int
    key: str
    tokens: int
    encoder: str
    kv: str
    match: str
    recomputed: tuple[int, ...]
    why: Why | None


@dataclass(frozen=True)
class CacheReport:
    """What was reused, and what was computed.

    Attributes:
      images: one entry for each image of the request.
      exact: the answer is the one that a cold run gives.
      policy: which rule chose the rows.
      rows: rows computed in each layer.
      approximate_tokens: image tokens reused behind another context than they were computed in.
    """

    images: tuple[ImageReuse, ...]
    exact: bool
    policy: str
    rows: tuple[int, ...]
    approximate_tokens: int


@dataclass
class Metrics:
    """Seconds of each step. Steps that a wave's requests share count in full for each of them."""

    decode_image: float = 0.0
    preprocess: float = 0.0
    encode: float = 0.0
    prefill: float = 0.0
    first_token: float = 0.0
    decode: float = 0.0
    wave: int = 0

    @property
    def ttft(self) -> float:
        """Seconds of all steps up to the first token."""
        return self.decode_image + self.preprocess + self.encode + self.prefill + self.first_token


@dataclass(frozen=True)
class Logprob:
    """Log-probability of the chosen token, and those of the most likely ones, by token id."""

    chosen: float
    top: dict[int, float]


@dataclass(frozen=True)
class CompletionOutput:
    """One answer. `finish_reason` is "stop" (end token or stop string) or "length"."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[Logprob, ...] | None = None


@dataclass(frozen=True)
class RequestOutput:
    """The answers to one request, in the place of the request in the call."""

    prompt: str
    prompt_token_ids: npt.NDArray[np.int32] = field(repr=False)
    outputs: tuple[CompletionOutput, ...]
    num_cached_tokens: int
    metrics: Metrics
    cache: CacheReport


@dataclass(frozen=True)
class Score:
    """Log-probabilities of a forced continuation.

    Attributes:
      token_ids: of the continuation.
      logprobs: of each of them, given everything before it; float32 [n].
      greedy: whether each is the most likely token at its place; bool [n].
      logits: float32 [n, V], if asked for.
    """

    token_ids: tuple[int, ...]
    logprobs: npt.NDArray[np.float32]
    greedy: npt.NDArray[np.bool_]
    metrics: Metrics
    cache: CacheReport
    logits: npt.NDArray[np.float32] | None = field(default=None, repr=False)

    @property
    def total(self) -> float:
        """Log-probability of the whole continuation."""
        return float(self.logprobs.sum())
