"""What a request is on its way through the engine.

A `Request` has its images identified. `Planned` knows what is linked and what is computed. What runs are `Sequence`s:
one `Generation` for each answer, one `Forced` whose continuation is scored, or one `PooledSequence` whose last hidden
state is wanted.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
from collections import abc
from dataclasses import InitVar, dataclass, field

import numpy as np
import numpy.typing as npt

from vlcache_jax.cache.items import Use
from vlcache_jax.cache.record import Record, State, Why
from vlcache_jax.cache.records import Handle
from vlcache_jax.cache.store import Store
from vlcache_jax.device import sampler
from vlcache_jax.engine.completions import CompletionOutput, Detokenizer, Logprob, RequestMetrics
from vlcache_jax.engine.compressed_pages import CompressedLease, Compression
from vlcache_jax.engine.grammars import Bits, Matcher
from vlcache_jax.engine.pages import Chain, Lease, PlacedImage
from vlcache_jax.inputs.layout import ImageRef, ImageSpan, Layout, Moment
from vlcache_jax.inputs.prompt import Prompt
from vlcache_jax.request_options import ResolvedOptions
from vlcache_jax.reuse.policies import Plan
from vlcache_jax.reuse.selection import RowChoice
from vlcache_jax.sampling import SamplingParams

_log = logging.getLogger(__name__)

NOT_ALLOWED = "sampling_params must leave a token that is allowed, got none"
NOT_FINITE = "logits must be finite, got NaN or inf: weights or an image's record may be damaged"


@dataclass(frozen=True, eq=False)
class Request:
    """A checked request, its images identified.

    Attributes:
      prompt: as it came.
      token_ids: int32 [n], image tokens expanded.
      starts: where in them each image begins.
      images: in order; of a video its chunks.
      moments: of each image, where in a video it stands; None: in none.
      owner: digest of the salt that it came under.
      metrics: seconds so far.
      items: let what libraries have of its images stay, as long as they are in this list.
    """

    prompt: Prompt
    token_ids: npt.NDArray[np.int32]
    starts: tuple[int, ...]
    images: tuple[ImageRef, ...]
    moments: tuple[Moment | None, ...]
    owner: str
    metrics: RequestMetrics
    items: list[Use] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class ImageUse:
    """An image in one request.

    Attributes:
      span: where.
      linked: record whose K, V are linked in; None: there is none.
      captured: record that is filled with the K, V computed here; None: there is none.
      encoder: record of its encoder rows, which may still be to be filled; None: none is kept.
      has_encoder: whether its encoder rows were found.
      why: it is not reused exactly.
      kv_tier, encoder_tier: where what is linked, and encoder rows that were found, come from.
    """

    span: ImageSpan
    linked: Record | None = None
    captured: Record | None = None
    encoder: Record | None = None
    has_encoder: bool = False
    why: Why | None = None
    kv_tier: str = "host"
    encoder_tier: str = "host"


class Holding:
    """What a planned request needs in the cache until it has run, and what it is to fill there.

    Its users are whoever planned it, and each sequence that runs for it.

    Args:
      handles: of what was found.
      made: records to be filled.
      new_request: the request key that was not known before; None: it was, or there is none.
      items: see `Request`; they are let go at the end.
    """

    def __init__(
        self,
        store: Store,
        handles: list[Handle],
        made: list[Record],
        new_request: str | None,
        items: list[Use] | None = None,
    ):
        self._items = [] if items is None else items
        self._store, self._handles, self._made, self._new_request = store, handles, made, new_request
        self._lock = threading.Lock()
        self._users = 1

    def enter(self) -> None:
        """One more user."""
        with self._lock:
            self._users += 1

    def fail(self) -> None:
        """The request is not served: its list of images is as unknown as before."""
        with self._lock:
            key, self._new_request = self._new_request, None
        if key is not None:
            self._store.requests.forget(key)

    def leave(self, *, failed: bool = False) -> None:
        """One user less; after the last one, records that nobody has begun to fill are given up.

        Args:
          failed: see `fail`.
        """
        if failed:
            self.fail()
        with self._lock:
            self._users -= 1
            if self._users:
                return
        for record in self._made:
            if record.state is State.reserved:
                self._store.cancel(record)
        Handle.release_all(self._handles)
        self._items.clear()


@dataclass(eq=False)
class Group:
    """Sequences of which none begins any more when one of them has failed."""

    has_failed: bool = False


@dataclass(frozen=True, eq=False)
class Planned:
    """A request that is ready to run. A sequence that differs in something has a copy of its own.

    Attributes:
      request: its images identified.
      options: as they came, names read.
      layout: of the prompt.
      plan: how many layers compute each token.
      uses: what is done with each image.
      choice: how rows are chosen on the device; None: the plan says all. Such a prompt has prefill steps of its own.
      owner: digest of the salt whose pages it can use and leave; None: it does neither.
      request_key: of its images together; None: there are none, or nothing is reused.
      request_known: whether the same images came together before.
      hold: what it needs in the cache until it has run; None: nothing that it has to give back.
    """

    request: Request
    options: ResolvedOptions
    layout: Layout
    plan: Plan
    uses: tuple[ImageUse, ...] = ()
    choice: RowChoice | None = None
    owner: str | None = None
    request_key: str | None = None
    request_known: bool = False
    hold: Holding | None = None


@dataclass(eq=False)
class SequenceProgress:
    """Where a sequence stands. The scheduler alone writes it.

    Attributes:
      plan, images: of the prompt, whatever of it is in pages already. They are as planned, but for images whose records
        did not come, which are computed.
      priority: lower ones come first.
      arrived: its place among all that arrived.
      lease: its pages while it runs, until it is compressed.
      compressed: its pages from then on.
      is_whole: it was to be compressed, but nothing of it is dropped, or it could not be.
      lane: its number among those that run.
      prefilled: how many of its prefills have been launched.
      scheduled: tokens, the prompt's included, that it will have when everything launched so far has been read.
      attempt: how often it has begun; what is read of an earlier attempt is of no use.
    """

    plan: Plan
    images: abc.Sequence[ImageUse]
    priority: int
    arrived: int = 0
    lease: Lease | None = None
    compressed: CompressedLease | None = None
    is_whole: bool = False
    lane: int = 0
    prefilled: int = 0
    scheduled: int = 0
    attempt: int = 0


@dataclass(eq=False)
class Told:
    """What is told of a sequence beside its tokens. `results` alone writes it.

    Attributes:
      metrics: of its request.
      called_at, arrived_at: when the call came that brought it, and when it arrived.
      ran: the plan as it ran first; None: it has not.
      cached: tokens that were in pages then.
      compression: what its answer goes on with; None: all, or that is not known yet.
      delivered: when its last results came.
      gaps: seconds between these that `take_metrics` has not told yet.
    """

    metrics: RequestMetrics
    called_at: float = 0.0
    arrived_at: float = 0.0
    ran: Plan | None = None
    cached: int = 0
    compression: Compression | None = None
    delivered: float = 0.0
    gaps: list[float] = field(default_factory=list)

    def take_metrics(self) -> RequestMetrics:
        """Those so far, but `inter_token` since they were taken last."""
        gaps = tuple(self.gaps)
        del self.gaps[: len(gaps)]  # there may be more of them meanwhile
        return dataclasses.replace(self.metrics, inter_token=gaps)


@dataclass(eq=False)
class End:
    """How a sequence ends. `Sequence.fail` and `Sequence.abort` are the doors for all threads; the engine writes the
    rest.

    Attributes:
      error: why it ended before it was done; None: it did not.
      fault: the engine's own error that ended it; None: there was none.
      is_aborted: nobody wants it any more.
      is_finished: it ended, one way or the other.
      finish_reason: of an answer; None while it runs.
      stop_reason: the stop string or the token of `stop_token_ids` that ended an answer.
      listener: is told whenever there is more of it, the last time when it has ended, by the engine's thread.
      group: of those that do not begin any more when one of them has failed; None: it begins in any case.
    """

    error: str | None
    fault: BaseException | None = None
    is_aborted: bool = False
    is_finished: bool = False
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    listener: abc.Callable[[Sequence], None] | None = None
    group: Group | None = None


@dataclass(frozen=True, eq=False)
class Sequence:
    """One prompt and what is generated after it. Answers to one request share their layout.

    What was asked never changes. What has happened stands in three objects, each with its own writer; a test holds
    who that is.

    Args:
      error: why it ends before it begins; None: it begins.

    Attributes:
      planned: the request as this sequence runs it; its `layout` is that of the prompt.
      new_slots: slots needed beyond the prompt.
    """

    planned: Planned
    new_slots: int
    error: InitVar[str | None] = field(default=None, kw_only=True)
    layout: Layout = field(init=False)
    progress: SequenceProgress = field(init=False)
    told: Told = field(init=False)
    end: End = field(init=False)

    def __post_init__(self, error: str | None) -> None:
        planned = self.planned
        progress = SequenceProgress(planned.plan, planned.uses, planned.options.priority)
        object.__setattr__(self, "layout", planned.layout)
        object.__setattr__(self, "progress", progress)
        object.__setattr__(self, "told", Told(dataclasses.replace(planned.request.metrics)))
        object.__setattr__(self, "end", End(error))

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
        owner, layout = self.planned.owner, self.layout
        if owner is None or self.progress.plan.slot is not None:  # with slots of its own it is not like any other
            return None
        images = [
            (PlacedImage(span.start, span.image.key, span.image.grid, span.time), span.length) for span in layout.images
        ]
        return Chain.of(owner, layout.token_ids, images)

    def exact(self, num_layers: int) -> int:
        """How many tokens at the beginning have exact K, V."""
        for span in self.layout.images:
            if span.state == "approximate" and self.progress.plan.depth[span.tokens].min() < num_layers:
                return span.start
        return len(self.layout)

    @property
    def is_done(self) -> bool:
        """Whether all that was asked for is there."""
        return False

    def may_go_on(self, patience: float = 0.0) -> bool:
        """Whether all is known that its next token depends on; waits so many seconds for it."""
        return True

    @property
    def may_begin_again(self) -> bool:
        """Whether it can be put back: computed again, it goes on as it would have."""
        return self.progress.compressed is None

    @property
    def is_aside(self) -> bool:
        """Whether it is compressed, and has no pages until there is room."""
        return self.progress.compressed is not None and self.progress.compressed.aside is not None

    # Doors for all threads.

    def fail(self, error: str) -> None:
        """Ends it in the engine's next pass."""
        self.end.error = error

    def abort(self) -> None:
        """Nobody wants it any more: it ends in the engine's next pass, unless others count on what it computes."""
        self.end.is_aborted = True

    def listen(self, listener: abc.Callable[[Sequence], None], group: Group | None = None) -> None:
        """Who is told of it, and whose failure ends it, see `End`."""
        self.end.listener, self.end.group = listener, group

    # For the engine's thread.

    def tell(self) -> None:
        """There is more of it. Whoever cannot be told does not want it any more."""
        if self.end.listener is not None:
            try:
                self.end.listener(self)
            except Exception:
                _log.exception("a listener failed; its request is aborted")
                self.end.listener = None
                self.abort()

    def finish(self) -> None:
        """It has ended, one way or the other."""
        if self.end.is_aborted:
            self.end.finish_reason = self.end.finish_reason or "abort"
        self.end.is_finished = True

    def restart(self) -> None:
        """It begins again: what has been read of its prompt is of no use any more."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Generation(Sequence):
    """A prompt whose answer is generated.

    Attributes:
      params: resolved, see `SamplingParams.resolve`.
      seed: of this answer.
      end_tokens: tokens that end it.
      bad_words: tokens of those that must not come.
      detokenizer: makes text of its tokens.
      matcher: says which tokens may come next; None: all may.
      token_ids, logprobs: generated so far.
      prompt_logprobs: of the prompt's tokens from the second one on, if asked for.
      lock: is held while it changes, as others may look at it meanwhile.
    """

    params: SamplingParams
    seed: int
    end_tokens: frozenset[int]
    bad_words: abc.Sequence[abc.Sequence[int]]
    detokenizer: Detokenizer
    matcher: Matcher | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    @property
    def generated(self) -> abc.Sequence[int]:
        return self.token_ids

    def extend(self, tokens: abc.Iterable[int]) -> int:
        """Goes on with tokens as far as it goes on at all; a negative one says that logits are not finite.

        Returns:
          How many of them belong to it.
        """
        before = len(self.token_ids)
        for token in tokens:
            if self.end.finish_reason is not None:
                break
            if token < 0:
                self.fail(NOT_ALLOWED if token == sampler.NOT_ALLOWED else NOT_FINITE)
                break
            self.token_ids.append(token)
            count = len(self.token_ids)
            if token in self.end_tokens and count >= self.params.min_tokens:
                self.end.finish_reason = "stop"
                self.end.stop_reason = token if token in (self.params.stop_token_ids or ()) else None
            elif count == self.new_slots:
                self.end.finish_reason = "length"
        if self.params.stop and (left := self._read()) is not None:
            del self.token_ids[left:]
            self.end.finish_reason, self.end.stop_reason = "stop", self.detokenizer.stop_reason
        return len(self.token_ids) - before

    def take(self, index: int, first: int) -> CompletionOutput:
        """What is new since this was asked last. The text ends before what ended it, unless that is to be in it.

        Args:
          index: which of its request's answers it is.
          first: number of its tokens that have been taken.
        """
        with self.lock:
            reason = self.end.finish_reason  # an abort may set it meanwhile
            if not self.params.stop:
                self._read()
            if reason is not None:
                self.detokenizer.finish()
            logprobs = None if self.params.logprobs is None else tuple(self.logprobs[first:])
            new = tuple(self.token_ids[first:])
            return CompletionOutput(index, self.detokenizer.take(), new, reason, self.end.stop_reason, logprobs)

    def _read(self) -> int | None:
        """Hands the detokenizer what is new; how many tokens remain where a stop string ends the answer."""
        count = len(self.token_ids)
        is_end = self.end.finish_reason == "stop" and count > 0 and self.token_ids[-1] in self.end_tokens
        count -= is_end and not self.params.include_stop_str_in_output
        return self.detokenizer.append(self.token_ids[self.detokenizer.count : count])

    @property
    def is_done(self) -> bool:
        return self.end.finish_reason is not None

    def fail(self, error: str) -> None:
        super().fail(error)
        self.end.finish_reason = "error"

    @property
    def can_grow(self) -> bool:
        """Whether its prompt's last row has been launched, and more tokens may be."""
        has_pages = not (self.awaits_compression or self.is_aside)
        return 0 < self.progress.scheduled < self.most and has_pages

    @property
    def awaits_compression(self) -> bool:
        """Whether its next token is not to be computed before its prompt is compressed."""
        is_to_be = self.planned.options.compress is not None and not self.progress.is_whole
        return is_to_be and self.progress.compressed is None

    @property
    def may_begin_again(self) -> bool:
        # Its second token would be computed with the whole prompt, beside a first one that is told already.
        return super().may_begin_again and not (self.awaits_compression and self.token_ids)

    def allowed(self, count: int) -> Bits | None:
        """What may come behind `count` tokens, at least those there are, if it `may_go_on`; None: that is not known."""
        return None if self.matcher is None else self.matcher.mask(count - self.length)

    @property
    def forced(self) -> abc.Sequence[int]:
        """Tokens that must come behind those there are, if it `may_go_on`: as far as something comes behind them.

        None, where their log-probabilities are asked for, or the prompt is compressed: these come of windows.
        """
        comes_of_windows = self.params.logprobs is not None or self.planned.options.compress is not None
        if self.matcher is None or comes_of_windows:
            return ()
        told = self.matcher.allowed()
        return told.forced if told.behind is not None else told.forced[:-1]

    def may_go_on(self, patience: float = 0.0) -> bool:
        """See `Sequence`. One that its matcher says is complete has ended, and one that fails it."""
        if self.matcher is None:
            return True
        if self.is_done or not self.matcher.wait(patience):
            return False
        try:
            if self.matcher.mask(0) is not None:
                return True
        except ValueError as error:
            self.fail(str(error))
            return False
        with self.lock:
            self.end.finish_reason = "stop"
        return False

    def restart(self) -> None:
        if not self.token_ids:
            self.prompt_logprobs.clear()


@dataclass(frozen=True, eq=False, kw_only=True)
class Forced(Sequence):
    """A prompt that ends in the continuation to be scored; its plan wants the logits that predict the continuation."""

    keep_logits: bool
    logprobs: list[np.float32] = field(default_factory=list)
    greedy: list[np.bool_] = field(default_factory=list)
    logits: list[npt.NDArray[np.float32]] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return len(self.logprobs) == np.count_nonzero((depth := self.progress.plan.depth) == depth.max())

    def append(self, logprob: np.float32, is_greedy: np.bool_, logits: npt.NDArray[np.float32] | None) -> None:
        """Goes on with the score of a token."""
        self.logprobs.append(logprob)
        self.greedy.append(is_greedy)
        if logits is not None and self.keep_logits:
            self.logits.append(logits)
        if not np.isfinite(logprob):
            self.fail(NOT_FINITE)

    def restart(self) -> None:
        for scores in (self.logprobs, self.greedy, self.logits):
            scores.clear()


@dataclass(frozen=True, eq=False, kw_only=True)
class PooledSequence(Sequence):
    """A prompt whose last token's hidden state behind the last norm is wanted, float32 [M]."""

    hidden: list[npt.NDArray[np.float32]] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return bool(self.hidden)

    def append(self, hidden: npt.NDArray[np.float32]) -> None:
        """It is there."""
        self.hidden.append(hidden)
        if not np.isfinite(hidden).all():
            self.fail(NOT_FINITE)

    def restart(self) -> None:
        self.hidden.clear()
