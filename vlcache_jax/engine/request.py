"""State of a request on its way through the engine.

A `Request` has its images identified. A `Planned` request also has a reuse plan: which tokens are linked and which are
computed. The engine runs `Sequence`s: a `Generation` for each output, a `ScoredSequence` to score a given continuation,
or a `PooledSequence` to compute the last hidden state.
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
from vlcache_jax.cache.keys import context_keys
from vlcache_jax.cache.record import Record, State, Why
from vlcache_jax.cache.records import Handle
from vlcache_jax.cache.store import Store
from vlcache_jax.device import sampler
from vlcache_jax.engine.completions import CompletionOutput, Detokenizer, Logprob, RequestMetrics
from vlcache_jax.engine.compressed_pages import CompressedBlockTable, Compression
from vlcache_jax.engine.grammars import Bits, Matcher
from vlcache_jax.engine.page_tree import Chain, PlacedImage
from vlcache_jax.engine.pages import BlockTable
from vlcache_jax.engine.thinking import Thinking
from vlcache_jax.inputs.expansion import Inset
from vlcache_jax.inputs.layout import ImageRef, ImageSpan, Layout, Moment
from vlcache_jax.inputs.prompt import Prompt
from vlcache_jax.request_options import ResolvedOptions
from vlcache_jax.reuse.edges import Edges
from vlcache_jax.reuse.policies import Plan
from vlcache_jax.reuse.selection import RowChoice
from vlcache_jax.sampling import SamplingParams

_log = logging.getLogger(__name__)

NOT_ALLOWED = "sampling_params must leave a token to sample, got none"
NOT_FINITE = "logits must be finite, got NaN or inf: the weights or a cache entry of an image may be damaged"


@dataclass(frozen=True, eq=False)
class Request:
    """Checked request with identified images.

    Attributes:
      prompt: the prompt as the caller passed it.
      token_ids: token ids with image tokens expanded, int32 [n].
      starts: index in `token_ids` of the first token of each image.
      images: the images in order; a video counts as one image per chunk.
      moments: position of each image in its video; None for an image that belongs to no video.
      owner: digest of the request's salt.
      metrics: times so far, in seconds.
      items: library items used by the request; the libraries keep their data while the list holds them.
      videos: replacement of the placeholder of each video.
    """

    prompt: Prompt
    token_ids: npt.NDArray[np.int32]
    starts: tuple[int, ...]
    images: tuple[ImageRef, ...]
    moments: tuple[Moment | None, ...]
    owner: str
    metrics: RequestMetrics
    items: list[Use] = field(default_factory=list)
    videos: tuple[Inset, ...] = ()

    @functools.cached_property
    def contexts(self) -> list[str]:
        """Digest of everything before each image, including its time offset in a video."""
        parts: list[str | int | npt.NDArray[np.int32]] = []
        done = 0
        for start, image, moment in zip(self.starts, self.images, self.moments, strict=True):
            parts.append(self.token_ids[done:start])
            if moment is not None and moment.time:
                parts.append(moment.time)
            parts.append(image.key)
            done = start + image.num_tokens
        return list(context_keys(parts))

    def chunks(self, video: int) -> list[int]:
        """Return the indices of the chunks of a video among the images."""
        return [i for i, moment in enumerate(self.moments) if moment is not None and moment.video == video]


@dataclass(frozen=True, eq=False)
class ImageUse:
    """Use of an image in one request.

    Attributes:
      span: position of the image in the prompt.
      linked: cache entry whose KV is linked; None if the KV is computed.
      saved: cache entry that is filled with the KV computed here; None if none is.
      encoder: cache entry of the encoder output, filled or to be filled; None if there is none.
      has_encoder: whether the encoder output was found in the cache.
      why: reason why the image is no exact hit; None for an exact hit.
      kv_tier, encoder_tier: tiers that the linked KV and the cached encoder output come from.
      donor: kind of the context of linked KV if it is another one, see `ImageReuse`; None otherwise.
    """

    span: ImageSpan
    linked: Record | None = None
    saved: Record | None = None
    encoder: Record | None = None
    has_encoder: bool = False
    why: Why | None = None
    kv_tier: str = "host"
    encoder_tier: str = "host"
    donor: str | None = None


class CacheReservation:
    """Cache entries that a planned request has pinned or will fill, until it has run.

    The planner of the request and each of its sequences count as users.

    Args:
      store: store of the cache entries.
      handles: pins of the entries that were found.
      made: entries to be filled.
      new_request: request key that was unknown before; None if it was known or there is none.
      items: library items, see `Request`; they are released at the end.
    """

    def __init__(
        self, store: Store, handles: list[Handle], made: list[Record], new_request: str | None,
        items: list[Use] | None = None,
    ):  # fmt: skip
        self._items = [] if items is None else items
        self._store, self._handles, self._made, self._new_request = store, handles, made, new_request
        self._lock, self._users = threading.Lock(), 1

    def cancel(self, record: Record, why: Why | None = None) -> None:
        """Cancel an entry to be filled, unless a sequence has begun to fill it; see `Records.cancel`."""
        if record.state is State.reserved:
            self._store.cancel(record, why)

    def enter(self) -> None:
        """Add a user of the reservation."""
        with self._lock:
            self._users += 1

    def fail(self) -> None:
        """Forget the request key, because the request is not served."""
        with self._lock:
            key, self._new_request = self._new_request, None
        if key is not None:
            self._store.requests.forget(key)

    def leave(self, *, failed: bool = False) -> None:
        """Remove a user. After the last one, cancel the entries that no sequence began to fill, and release the pins.

        Args:
          failed: also forget the request key, see `fail`.
        """
        if failed:
            self.fail()
        with self._lock:
            self._users -= 1
            if self._users:
                return
        for record in self._made:
            self.cancel(record)
        Handle.release_all(self._handles)
        self._items.clear()


@dataclass(eq=False)
class Group:
    """Group of sequences. After one fails, the others no longer start."""

    has_failed: bool = False


@dataclass(frozen=True, eq=False)
class Planned:
    """Request that is ready to run. A sequence that differs in a field has a copy of its own.

    Attributes:
      request: the request with identified images.
      options: resolved request options.
      layout: layout of the prompt.
      plan: number of layers that compute each token.
      uses: use of each image.
      choice: rule by which the device selects the tokens to recompute; None if `plan` fixes them. Such a prompt has
        prefill chunks of its own.
      owner: digest of the salt whose pages the request may share; None if it shares no pages.
      request_key: key of its set of images; None if it has no images or nothing is reused.
      request_known: whether the same set of images appeared before.
      edges: tokens of linked images that are computed, if the cache holds maps of states; else None.
      reservation: cache reservation until the request has run; None if it reserves nothing.
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
    edges: Edges | None = None
    reservation: CacheReservation | None = None


@dataclass(eq=False)
class SequenceProgress:
    """Progress of a sequence. Only the scheduler writes it.

    Attributes:
      plan, images: plan and images of the prompt, whether or not pages hold parts of it. They differ from the original
        plan for images whose cache entries did not arrive: these are computed.
      priority: priority; lower values run first.
      arrived: arrival number.
      block_table: pages while it runs, until it is compressed.
      compressed: pages after it was compressed.
      is_whole: whether it decodes with its full KV although compression was requested.
      decode_slot: its decode slot.
      state_slot: slot of its states; 0 if the model has none.
      prefilled: number of launched prefills.
      scheduled: number of tokens, including the prompt, after everything launched so far has been read.
      attempt: number of preemptions and other restarts; results of earlier attempts are ignored.
    """

    plan: Plan
    images: abc.Sequence[ImageUse]
    priority: int
    arrived: int = 0
    block_table: BlockTable | None = None
    compressed: CompressedBlockTable | None = None
    is_whole: bool = False
    decode_slot: int = 0
    state_slot: int = 0
    prefilled: int = 0
    scheduled: int = 0
    attempt: int = 0


@dataclass(eq=False)
class SequenceReport:
    """Reported facts of a sequence except its tokens. Only `results` writes it.

    Attributes:
      metrics: metrics of its request.
      called_at, arrived_at: clock times of the call and of the arrival, in seconds.
      ran: the plan as it first ran; None before that.
      cached, matched: number of tokens that were not computed because pages held them at that time, and of those that
        pages held.
      compression: compression of the prompt's KV; None if it is not compressed, or not yet.
      delivered: clock time of its last results, in seconds.
      gaps: times between deliveries, in seconds, that `take_metrics` has not returned yet.
    """

    metrics: RequestMetrics
    called_at: float = 0.0
    arrived_at: float = 0.0
    ran: Plan | None = None
    cached: int = 0
    matched: int = 0
    compression: Compression | None = None
    delivered: float = 0.0
    gaps: list[float] = field(default_factory=list)

    def take_metrics(self) -> RequestMetrics:
        """Return the metrics so far, with the `inter_token` times since the last call."""
        gaps = tuple(self.gaps)
        del self.gaps[: len(gaps)]  # the engine may have appended more meanwhile
        return dataclasses.replace(self.metrics, inter_token=gaps)


@dataclass(eq=False)
class End:
    """End of a sequence. All threads may call `Sequence.fail` and `Sequence.abort`; the engine writes the other fields.

    Attributes:
      error: message of the error that ended it early; None if there is none.
      fault: exception of the engine that ended it; None if there is none.
      is_aborted: whether the caller no longer wants it.
      is_finished: whether it has ended, for any reason.
      finish_reason: finish reason of an output; None while it runs.
      stop_reason: stop string, or token of `stop_token_ids`, that ended an output.
      listener: called by the engine's thread after each new result, and a last time after the end.
      group: sequences that no longer start after one of them failed; None for a sequence without a group.
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
    """Prompt and what is generated after it. The outputs of one request share their layout.

    The parameters never change. The state is in three objects with one writer each (`progress`, `report`, `end`).
    A test checks the writers.

    Args:
      error: message of the error that ends it before it starts; None (default) to run it.

    Attributes:
      planned: the planned request as this sequence runs it.
      new_slots: KV slots needed beyond the prompt.
      layout: layout of the prompt.
      progress: state that the scheduler writes.
      report: reported facts.
      end: state of its end.
    """

    planned: Planned
    new_slots: int
    error: InitVar[str | None] = field(default=None, kw_only=True)
    layout: Layout = field(init=False)
    progress: SequenceProgress = field(init=False)
    report: SequenceReport = field(init=False)
    end: End = field(init=False)

    def __post_init__(self, error: str | None) -> None:
        planned = self.planned
        progress = SequenceProgress(planned.plan, planned.uses, planned.options.priority)
        object.__setattr__(self, "layout", planned.layout)
        object.__setattr__(self, "progress", progress)
        object.__setattr__(self, "report", SequenceReport(dataclasses.replace(planned.request.metrics)))
        object.__setattr__(self, "end", End(error))

    @property
    def generated(self) -> abc.Sequence[int]:
        """Tokens generated after the prompt so far."""
        return ()

    @property
    def length(self) -> int:
        """Number of tokens so far, including the prompt."""
        return len(self.layout) + len(self.generated)

    @property
    def max_length(self) -> int:
        """Largest number of tokens that it can have, including the prompt."""
        return len(self.layout) + self.new_slots

    @functools.cached_property
    def chain(self) -> Chain | None:
        """Identity of the prompt's tokens in the KV pool; None if no request may share its pages."""
        owner, layout = self.planned.owner, self.layout
        if owner is None or self.progress.plan.slot is not None:  # a prompt with its own slots matches no other
            return None
        images = [
            (PlacedImage(span.start, span.image.key, span.image.grid, span.time), span.length) for span in layout.images
        ]
        return Chain.of(owner, layout.token_ids, images)

    def exact(self, num_layers: int) -> int:
        """Return how many leading tokens of the prompt have exact KV."""
        for span in self.layout.images:
            if span.state == "approximate" and self.progress.plan.depth[span.tokens].min() < num_layers:
                return span.start
        return len(self.layout)

    @property
    def is_done(self) -> bool:
        """True if everything that was requested is there."""
        return False

    def may_go_on(self, patience: float = 0.0) -> bool:
        """Return whether everything that the next token depends on is known; wait at most `patience` seconds for it."""
        return True

    @property
    def may_begin_again(self) -> bool:
        """True if it can be preempted: after a restart it continues with the same tokens."""
        return self.progress.compressed is None

    @property
    def is_swapped_out(self) -> bool:
        """True if it is compressed and waits without pages until there is room."""
        return self.progress.compressed is not None and self.progress.compressed.swapped is not None

    # For all threads.

    def fail(self, error: str) -> None:
        """End the sequence with this error in the engine's next pass."""
        self.end.error = error

    def abort(self) -> None:
        """End the sequence in the engine's next pass, or later if other sequences depend on what it computes."""
        self.end.is_aborted = True

    def listen(self, listener: abc.Callable[[Sequence], None], group: Group | None = None) -> None:
        """Set the listener and the group, see `End`."""
        self.end.listener, self.end.group = listener, group

    # For the engine's thread only.

    def tell(self) -> None:
        """Call the listener. If it raises, log the exception and abort the sequence."""
        if self.end.listener is not None:
            try:
                self.end.listener(self)
            except Exception:
                _log.exception("the output callback of a request failed; the request is aborted")
                self.end.listener = None
                self.abort()

    def finish(self) -> None:
        """Mark the sequence as ended."""
        if self.end.is_aborted:
            self.end.finish_reason = self.end.finish_reason or "abort"
        self.end.is_finished = True

    def restart(self) -> None:
        """Discard what was read of the prompt, because the sequence starts again."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Generation(Sequence):
    """Prompt whose output is generated.

    Attributes:
      params: resolved sampling parameters, see `SamplingParams.resolve`.
      seed: random seed of this output.
      end_tokens: tokens that end it.
      bad_words: token ids of each banned word.
      detokenizer: converter of its tokens to text.
      matcher: source of the tokens that a grammar allows; None if all are allowed.
      thinking: limit of its thinking; None if there is none.
      token_ids, logprobs: generated tokens and their log-probabilities so far.
      prompt_logprobs: log-probabilities of the prompt's tokens after the first, if requested.
      lock: held while the output changes, because other threads may read it.
    """

    params: SamplingParams
    seed: int
    end_tokens: frozenset[int]
    bad_words: abc.Sequence[abc.Sequence[int]]
    detokenizer: Detokenizer
    matcher: Matcher | None = None
    thinking: Thinking | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    @property
    def generated(self) -> abc.Sequence[int]:
        return self.token_ids

    def extend(self, tokens: abc.Iterable[int]) -> int:
        """Append tokens until the output ends. A negative token reports non-finite logits or that no token is allowed.

        Returns:
          The number of tokens that belong to the output.
        """
        before = len(self.token_ids)
        for token in tokens:
            if self.end.finish_reason is not None:
                break
            if token < 0:
                self.fail(NOT_ALLOWED if token == sampler.NOT_ALLOWED else NOT_FINITE)
                break
            self.token_ids.append(token)
            if self.thinking is not None:
                self.thinking.append(token)
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
        """Return what is new since the last call. The text excludes what ended it, unless the parameters include that.

        Args:
          index: index of the output in its request.
          first: number of tokens that earlier calls returned.
        """
        with self.lock:
            reason = self.end.finish_reason  # read once: an abort may set it meanwhile
            if not self.params.stop:
                self._read()
            if reason is not None:
                self.detokenizer.finish()
            logprobs = None if self.params.logprobs is None else tuple(self.logprobs[first:])
            new = tuple(self.token_ids[first:])
            return CompletionOutput(index, self.detokenizer.take(), new, reason, self.end.stop_reason, logprobs)

    def _read(self) -> int | None:
        """Pass new tokens to the detokenizer; return how many tokens remain if a stop string ended the output."""
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
        """True if the prompt's last token has been launched and more tokens may follow."""
        has_pages = not (self.awaits_compression or self.is_swapped_out)
        return 0 < self.progress.scheduled < self.max_length and has_pages

    @property
    def awaits_compression(self) -> bool:
        """True if the prompt has to be compressed before the next token is computed."""
        is_to_be = self.planned.options.compress is not None and not self.progress.is_whole
        return is_to_be and self.progress.compressed is None

    @property
    def may_begin_again(self) -> bool:
        # Its first token was returned already. After a restart the full KV would decide on the second one.
        return super().may_begin_again and not (self.awaits_compression and self.token_ids)

    @property
    def is_held(self) -> bool:
        """True if not all tokens may be allowed next, so that the host has to look at each token."""
        launched = max(self.progress.scheduled, self.length) - len(self.layout)
        return self.matcher is not None or (self.thinking is not None and self.thinking.is_near(launched))

    def allowed(self, count: int) -> Bits | None:
        """Return the tokens allowed after `count` tokens, if it `is_held` and `may_go_on`; None if they are not known.

        Args:
          count: a number of tokens, at least `length`.
        """
        ahead = count - self.length
        if self.thinking is not None:
            allowed, closing = self.thinking.allowed(ahead), self.thinking.closing
            if self.matcher is None or allowed is None or ahead < len(closing):
                return allowed
            if closing:  # the grammar has to see these tokens first
                return None
        return None if self.matcher is None else self.matcher.mask(ahead)

    @property
    def forced(self) -> abc.Sequence[int]:
        """Tokens that are forced next, if it `may_go_on`, up to a point after which the output continues.

        Empty if log-probabilities are requested or the prompt is compressed: then single decode steps compute these
        tokens.
        """
        if self.params.logprobs is not None or self.planned.options.compress is not None:
            return ()
        if self.thinking is not None and (closing := self.thinking.closing):
            return closing if self.matcher is None else closing[:-1]
        if self.matcher is None:
            return ()
        following = self.matcher.allowed()
        return following.forced if following.after is not None else following.forced[:-1]

    def may_go_on(self, patience: float = 0.0) -> bool:
        """Return whether the allowed tokens are known, see `Sequence`.

        End the output if its grammar is complete, and fail it if the grammar raises an error.
        """
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
