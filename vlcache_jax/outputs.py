"""What the engine returns."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


class Why(enum.Enum):
    """Why an image was computed, or not reused as far as it could have been."""

    reuse_off = "reuse_off"
    unknown_image = "unknown_image"  # never seen, or long forgotten
    other_context = "other_context"  # known, but computed behind something else
    evicted = "evicted"  # known, but it had to make room
    too_large = "too_large"  # the cache has no room for it
    load_failed = "load_failed"  # known, but its record could not be filled or read
    corrupt = "corrupt"  # known, but its record was found damaged


@dataclass(frozen=True)
class ImageReuse:
    """What happened to one image of a request.

    Attributes:
      index: which image of the request.
      key: its entry key.
      tokens: image tokens in the prompt.
      encoder: where its encoder rows came from: "computed", "host", or "none" if none were needed.
      kv: where the K, V that were linked came from: "host", or "none" if all were computed.
      match: how well a stored record fitted: "exact", "approximate" or "miss".
      recomputed: its rows computed in each layer.
      bytes_moved: of records, to the device.
      why: the reason if it was not reused exactly.
    """

    index: int
    key: str
    tokens: int
    encoder: str
    kv: str
    match: str
    recomputed: tuple[int, ...]
    bytes_moved: int
    why: Why | None


@dataclass(frozen=True)
class CacheReport:
    """What was reused, and what was computed.

    Attributes:
      images: one entry for each image of the request.
      exact: the answer is the one that a cold run gives.
      policy: which rule chose the rows.
      rows: rows computed in each layer.
      approximate_tokens: image tokens reused behind another context than they were computed in, those recomputed in
        every layer not counted.
      request_key: of the request's images together, in their order; None without images, or with reuse off.
      request_known: whether the same list of images was served before.
    """

    images: tuple[ImageReuse, ...]
    exact: bool
    policy: str
    rows: tuple[int, ...]
    approximate_tokens: int
    request_key: str | None = None
    request_known: bool = False


@dataclass(frozen=True)
class Verification:
    """A request's answer beside the one of a cold run.

    Attributes:
      tokens_agree: tokens up to the first difference between both answers.
      tokens: of the longer answer.
      max_logit_difference: largest difference of any logit at the places of the answer's tokens, when both runs are
        given these tokens.
    """

    tokens_agree: int
    tokens: int
    max_logit_difference: float


@dataclass
class Metrics:
    """Seconds of each step. Steps that a wave's requests share count in full for each of them.

    What is done once for several requests of a call, such as decoding an image, counts for the first of them.
    `wave` tells which requests of the call ran together.
    """

    lookup: float = 0.0
    decode_image: float = 0.0
    preprocess: float = 0.0
    encode: float = 0.0
    transfer: float = 0.0
    link: float = 0.0
    prefill: float = 0.0
    first_token: float = 0.0
    decode: float = 0.0
    wave: int = 0

    @property
    def ttft(self) -> float:
        """Seconds of all steps up to the first token."""
        before = self.lookup + self.decode_image + self.preprocess
        return before + self.encode + self.transfer + self.link + self.prefill + self.first_token


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
    verification: Verification | None = None


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
