"""What a request is on its way through the engine.

A `Request` has its images identified. `Linked` knows what is linked and what is computed. What runs are `Sequence`s:
one `Generation` for each answer, or one `Forced` whose continuation is scored.
"""

from __future__ import annotations

import functools
from collections import abc
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vlcache_jax.cache.record import Record
from vlcache_jax.cache.why import Why
from vlcache_jax.engine.pages import Chain, Lease, Picture
from vlcache_jax.engine.sampling import SamplingParams
from vlcache_jax.inputs.layout import ImageRef, ImageSpan, Layout
from vlcache_jax.inputs.prompt import Prompt
from vlcache_jax.reuse.plan import Plan
from vlcache_jax.reuse.selection import Choice

NOT_FINITE = "logits must be finite, got NaN or inf: weights or an image's record may be damaged"


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


@dataclass(frozen=True, eq=False)
class Request:
    """A checked request, its images identified.

    Attributes:
      prompt: as it came.
      token_ids: int32 [n], image tokens expanded.
      starts: where in them each image begins.
      images: in order.
      owner: digest of the salt that it came under.
      metrics: seconds so far.
    """

    prompt: Prompt
    token_ids: npt.NDArray[np.int32]
    starts: tuple[int, ...]
    images: tuple[ImageRef, ...]
    owner: str
    metrics: Metrics


@dataclass(eq=False)
class ImageUse:
    """An image in one request.

    Attributes:
      span: where.
      linked: record whose K, V are linked in; None: there is none.
      captured: record that is filled with the K, V computed here; None: there is none.
      encoder: record of its encoder rows, which may still be to be filled; None: none is kept.
      has_encoder: whether its encoder rows were found.
      why: it is not reused exactly.
    """

    span: ImageSpan
    linked: Record | None = None
    captured: Record | None = None
    encoder: Record | None = None
    has_encoder: bool = False
    why: Why | None = None


@dataclass(frozen=True, eq=False)
class Linked:
    """A request that is ready to run; see `Sequence`."""

    request: Request
    layout: Layout
    plan: Plan
    uses: tuple[ImageUse, ...]
    choice: Choice | None
    policy: str
    keeps_pages: bool
    request_key: str | None
    request_known: bool


@dataclass(eq=False)
class Sequence:
    """One prompt and what is generated after it. Answers to one request share their layout.

    Attributes:
      layout, plan: of the prompt, whatever of it is in pages already.
      new_slots: slots needed beyond the prompt.
      images: of the prompt.
      choice: how rows are chosen on the device; None: the plan says all. Such a prompt has prefill steps of its own.
      owner: digest of the salt whose pages it can use and leave; None: it does neither.
      arrived: its place among those of its call.
      lease: its pages while it runs.
      ran: the plan as it ran first; None: it has not.
      cached: tokens that were in pages then.
      error: why it ended before it was done; None: it did not.
      is_finished: it ended, one way or the other.
    """

    layout: Layout
    plan: Plan
    new_slots: int
    images: abc.Sequence[ImageUse] = ()
    choice: Choice | None = None
    owner: str | None = None
    arrived: int = field(default=0, init=False)
    lease: Lease | None = field(default=None, init=False)
    ran: Plan | None = field(default=None, init=False)
    cached: int = field(default=0, init=False)
    error: str | None = field(default=None, kw_only=True)
    is_finished: bool = field(default=False, init=False)

    @property
    def generated(self) -> abc.Sequence[int]:
        """Tokens behind the prompt so far."""
        return ()

    @property
    def length(self) -> int:
        """Tokens so far."""
        return len(self.layout) + len(self.generated)

    @property
    def most(self) -> int:
        """Tokens that it can have in the end."""
        return len(self.layout) + self.new_slots

    @functools.cached_property
    def chain(self) -> Chain | None:
        """What the prompt's tokens are; None: nobody is to know."""
        if self.owner is None or self.plan.slot is not None:  # with slots of its own it is not like any other
            return None
        images = [(Picture(span.start, span.image.key, span.image.grid), span.length) for span in self.layout.images]
        return Chain.of(self.owner, self.layout.token_ids, images)

    def exact(self, num_layers: int) -> int:
        """How many tokens at the beginning have exact K, V."""
        for span in self.layout.images:
            if span.state == "approximate" and self.plan.depth[span.tokens].min() < num_layers:
                return span.start
        return len(self.layout)

    def fail(self, error: str) -> None:
        """Ends it."""
        self.error = error


@dataclass(frozen=True)
class Logprob:
    """Log-probability of the chosen token, and those of the most likely ones, by token id."""

    chosen: float
    top: dict[int, float]


@dataclass(eq=False, kw_only=True)
class Generation(Sequence):
    """A prompt whose answer is generated.

    Attributes:
      params: resolved, see `SamplingParams.resolve`.
      seed: of this answer.
      end_tokens: tokens that end it.
      has_stop_string: tells from the tokens so far whether the last one completes a stop string; None: no such strings.
      lane: its number in the wave.
      token_ids, logprobs: generated so far.
      finish_reason: None while it runs.
    """

    params: SamplingParams
    seed: int
    end_tokens: frozenset[int]
    has_stop_string: abc.Callable[[list[int]], bool] | None
    lane: int = 0
    metrics: Metrics = field(default_factory=Metrics)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def generated(self) -> abc.Sequence[int]:
        return self.token_ids

    def append(self, token: int) -> None:
        """Goes on with a token; a negative one says that there is none, because logits are not finite."""
        if token < 0:
            self.fail(NOT_FINITE)
            return
        self.token_ids.append(token)
        count = len(self.token_ids)
        stops = token in self.end_tokens or (self.has_stop_string is not None and self.has_stop_string(self.token_ids))
        if stops and count >= self.params.min_tokens:
            self.finish_reason = "stop"
        elif count == self.new_slots:
            self.finish_reason = "length"

    def fail(self, error: str) -> None:
        super().fail(error)
        self.finish_reason = "error"


@dataclass(eq=False, kw_only=True)
class Forced(Sequence):
    """A prompt that ends in the continuation to be scored; its plan wants the logits that predict the continuation."""

    keep_logits: bool
    metrics: Metrics = field(default_factory=Metrics)
    logprobs: list[np.float32] = field(default_factory=list)
    greedy: list[np.bool_] = field(default_factory=list)
    logits: list[npt.NDArray[np.float32]] = field(default_factory=list)
