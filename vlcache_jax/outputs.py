"""Outputs of calls, and the reporter that builds them from finished requests."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import numpy as np
import numpy.typing as npt

from vlcache_jax.cache.record import Lost, Record
from vlcache_jax.cache.record import Why as Why
from vlcache_jax.cache.records import linked_bytes
from vlcache_jax.engine.completions import CompletionOutput as CompletionOutput
from vlcache_jax.engine.completions import Logprob as Logprob
from vlcache_jax.engine.completions import RequestMetrics as RequestMetrics
from vlcache_jax.engine.completions import TokenLogprob as TokenLogprob
from vlcache_jax.engine.completions import spelled
from vlcache_jax.engine.compressed_pages import Compression as Compression
from vlcache_jax.engine.request import Generation, ImageUse, Planned
from vlcache_jax.engine.request import Sequence as Running
from vlcache_jax.engine.scoring import PooledSequence, ScoredSequence
from vlcache_jax.reuse.policies import Plan, active_rows


@dataclass(frozen=True)
class Verification:
    """Comparison of a request's output with the output of a cold run.

    Attributes:
      tokens_agree: number of tokens before the first difference between the two outputs. A compressed output is
        compared with one that uses the full prompt KV.
      tokens: number of tokens of the longer output.
      max_logit_difference: largest absolute difference of any logit at the output's tokens, with both runs forced to
        these tokens and without compression.
    """

    tokens_agree: int
    tokens: int
    max_logit_difference: float


@dataclass(frozen=True)
class ImageReuse:
    """Reuse of one image of a request. A chunk of a video, which is two frames, counts as an image.

    Attributes:
      index: index of the image in the request; chunks of videos count.
      key: entry key of the image.
      tokens: number of image tokens in the prompt.
      encoder: source of the encoder output: "computed", "device", "host", "disk", or "none" if it was not needed.
      kv: source of the KV that was not computed: "kv_pool" (KV blocks of an earlier prompt), "device", "host", "disk",
        or "none" if all KV was computed.
      match: kind of hit: "exact", "approximate" or "miss".
      recomputed: number of image tokens computed in each layer [L].
      bytes_moved: bytes of cache entries read from disk or copied to the device.
      why: reason if the image was not reused exactly, otherwise None.
      donor: for an approximate match, the context in which its KV was computed: "neutral" (nothing of another caller
        was before the image), "own" (the same caller used it before) or "other"; otherwise None.
      video: index of the video that the chunk belongs to; None for an image.
      chunk: index of the chunk in that video; None for an image.
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
    donor: str | None = None
    video: int | None = None
    chunk: int | None = None


@dataclass(frozen=True)
class CacheReport:
    """Reuse of a request's images and prefix.

    Attributes:
      images: one report per image of the request and per chunk of its videos.
      exact: True if the output equals that of a cold run, apart from rounding: in bfloat16 it may differ if two tokens
        are nearly equally likely, as between two batches. False if compression drops a part of the prompt.
      policy: name of the reuse policy.
      rows: number of prompt tokens computed in each layer [L].
      approximate_tokens: number of image tokens that were reused in a new context or stored by a codec, without those
        recomputed in every layer.
      matched_tokens: number of the prompt's first tokens whose KV the prefix cache had. More than those reused if a
        model with states has no snapshot after them, so that a part was computed again.
      request_key: key of the request's images in their order; None without images, or with `reuse="off"`.
      request_known: True if the same list of images was served before.
    """

    images: tuple[ImageReuse, ...]
    exact: bool
    policy: str
    rows: tuple[int, ...]
    approximate_tokens: int
    matched_tokens: int = 0
    request_key: str | None = None
    request_known: bool = False


@dataclass(frozen=True)
class Searched:
    """A search that an answer called.

    Attributes:
      query: text of the query.
      hits: IDs and scores of the items that the model received.
      seconds: time that the answer waited for the search, in seconds.
      error: reason if the search failed, otherwise None.
    """

    query: str
    hits: tuple[tuple[str, float], ...]
    seconds: float
    error: str | None = None


@dataclass(frozen=True)
class SearchBegun:
    """Event: a turn ended with a search call, and the search has begun. A `SearchRound` follows."""


@dataclass(frozen=True)
class SearchRound:
    """One search between two turns of an answer.

    Attributes:
      report: report of the search.
      hits: results as `library.Hit`.
      messages: the turn with the call, and the tool's message with the results.
    """

    report: Searched
    hits: tuple[Any, ...]
    messages: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class RequestOutput:
    """Outputs of one request.

    Attributes:
      prompt: text of the prompt.
      prompt_token_ids: token IDs of the prompt with images expanded, int32 [n].
      outputs: the `n` outputs; empty if the request was wrong.
      num_cached_tokens: number of prompt tokens, text or image, whose KV was reused exactly.
      metrics: times of the request in seconds.
      cache: report of what was reused and computed.
      verification: comparison with a cold run; None unless requested.
      compression: report of the compression of the first output. None: compression was not requested, the output ended
        before it, or there was no room for it (`uncompressed` in `LLM.stats`).
      error: reason if the request failed, otherwise None.
      prompt_logprobs: log-probabilities of the prompt's tokens, the first of them None; None unless requested. A
        request that was aborted or failed has those computed until then, which may be fewer than the prompt's tokens.
      searches: searches of the answer (`LLM.chat(retrieve=...)`); the output is the text after the last one.
      request_id: the given or generated ID; in `LLM` the index of the request in its call.
      finished: True if all outputs have ended.
    """

    prompt: str
    prompt_token_ids: npt.NDArray[np.int32] = field(repr=False)
    outputs: tuple[CompletionOutput, ...]
    num_cached_tokens: int
    metrics: RequestMetrics
    cache: CacheReport
    verification: Verification | None = None
    compression: Compression | None = None
    error: str | None = None
    prompt_logprobs: tuple[Logprob | None, ...] | None = None
    searches: tuple[Searched, ...] = ()
    request_id: str = ""
    finished: bool = True

    # Attributes of vLLM without an equivalent here.
    encoder_prompt: ClassVar[None] = None
    encoder_prompt_token_ids: ClassVar[None] = None
    kv_transfer_params: ClassVar[None] = None
    lora_request: ClassVar[None] = None

    def to_dict(self) -> dict[str, Any]:
        """Return the output as dicts, lists, strings and numbers, ready for `json.dumps`."""
        return cast(dict[str, Any], plain(self))


@dataclass(frozen=True)
class PromptOutput:
    """The prompt's part of a request's output.

    Attributes:
      text, token_ids, num_cached_tokens, cache, logprobs, compression: see `RequestOutput`.
    """

    text: str
    token_ids: npt.NDArray[np.int32] = field(repr=False)
    num_cached_tokens: int
    cache: CacheReport
    logprobs: tuple[Logprob | None, ...] | None = None
    compression: Compression | None = None


@dataclass(frozen=True)
class RequestDelta:
    """New part of a request's outputs. Its size does not depend on the length of the outputs so far.

    Attributes:
      request_id: the given or generated ID.
      outputs: outputs with new tokens or a finish reason; the first delta has all outputs.
      metrics: times in seconds since the request began; `inter_token` since the delta before.
      prompt: None if nothing about the prompt is new. The first delta and the last one have it. The last one counts,
        since entries that were to be reused may have been computed.
      finished: True in the last delta, when all outputs have ended.
    """

    request_id: str
    outputs: tuple[CompletionOutput, ...]
    metrics: RequestMetrics
    prompt: PromptOutput | None
    finished: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the values as dicts, lists, strings and numbers, ready for `json.dumps`."""
        return cast(dict[str, Any], plain(self))


class OutputCollector:
    """Joined deltas of a request. `add` takes time in proportion to the delta, `output` to the full output."""

    def __init__(self) -> None:
        self._answers: dict[int, list[CompletionOutput]] = {}
        self._gaps: list[float] = []
        self._prompt: PromptOutput | None = None
        self._last: RequestDelta | None = None

    def add(self, delta: RequestDelta) -> None:
        """Add the next delta.

        Raises:
          ValueError: `delta` is not a `RequestDelta`, or belongs to another request.
        """
        if not isinstance(delta, RequestDelta):
            raise ValueError(f"delta must be a RequestDelta, got {type(delta).__name__}")
        if self._last is not None and delta.request_id != self._last.request_id:
            raise ValueError(f"delta must belong to request {self._last.request_id!r}, got one of {delta.request_id!r}")
        for one in delta.outputs:
            self._answers.setdefault(one.index, []).append(one)
        self._gaps += delta.metrics.inter_token
        self._prompt = delta.prompt or self._prompt
        self._last = delta

    def output(self) -> RequestOutput:
        """Return the output so far.

        Raises:
          ValueError: no delta was added yet.
        """
        if self._prompt is None or self._last is None:
            raise ValueError("no delta was added: call add() before output()")
        for deltas in self._answers.values():
            deltas[:] = [_joined(deltas)]
        return RequestOutput(
            prompt=self._prompt.text,
            prompt_token_ids=self._prompt.token_ids,
            outputs=tuple(self._answers[i][0] for i in sorted(self._answers)),
            num_cached_tokens=self._prompt.num_cached_tokens,
            metrics=dataclasses.replace(self._last.metrics, inter_token=tuple(self._gaps)),
            cache=self._prompt.cache,
            compression=self._prompt.compression,
            prompt_logprobs=self._prompt.logprobs,
            request_id=self._last.request_id,
            finished=self._last.finished,
        )


def _joined(deltas: Sequence[CompletionOutput]) -> CompletionOutput:
    logprobs = [one.logprobs for one in deltas if one.logprobs is not None]
    return dataclasses.replace(
        deltas[-1],
        text="".join(one.text for one in deltas),
        token_ids=tuple(itertools.chain.from_iterable(one.token_ids for one in deltas)),
        logprobs=tuple(itertools.chain.from_iterable(logprobs)) if logprobs else None,
        cumulative_logprob=sum(one.chosen for tokens in logprobs for one in tokens) if logprobs else None,
    )


@dataclass(frozen=True)
class Score:
    """Log-probabilities of a forced continuation of n tokens.

    Attributes:
      token_ids: token IDs of the continuation.
      logprobs: log-probability of each token, given everything before it; float32 [n].
      greedy: True where the token is the most likely one; bool [n].
      metrics: times of the request in seconds.
      cache: report of what was reused and computed.
      logits: float32 [n, V] with `keep_logits`, otherwise None.
      error: reason if the request was not scored or its logits are not finite, otherwise None.
    """

    token_ids: tuple[int, ...]
    logprobs: npt.NDArray[np.float32]
    greedy: npt.NDArray[np.bool_]
    metrics: RequestMetrics
    cache: CacheReport
    logits: npt.NDArray[np.float32] | None = field(default=None, repr=False)
    error: str | None = None

    @property
    def total(self) -> float:
        """Log-probability of the whole continuation; NaN if it was not scored."""
        return float(self.logprobs.sum()) if self.error is None else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Return the values as dicts, lists, strings and numbers, ready for `json.dumps`."""
        return cast(dict[str, Any], plain(self))


@dataclass(frozen=True)
class HiddenState:
    """Hidden state of the last token of a prompt.

    Attributes:
      values: hidden state after the last norm, float32 [M]; NaN if the request was wrong.
      prompt_token_ids: token IDs of the prompt with images expanded, int32 [n].
      num_cached_tokens, metrics, cache, error: see `RequestOutput`.
    """

    values: npt.NDArray[np.float32] = field(repr=False)
    prompt_token_ids: npt.NDArray[np.int32] = field(repr=False)
    num_cached_tokens: int
    metrics: RequestMetrics
    cache: CacheReport
    error: str | None = None


def plain(value: Any) -> Any:
    """Convert dataclasses to dicts, arrays, tuples and bytes to lists, and enum members to their values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, tuple | list | bytes):
        return [plain(one) for one in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value.value if isinstance(value, enum.Enum) else value


_NOTHING = CacheReport((), exact=False, policy="", rows=(), approximate_tokens=0)


class Reporter:
    """Builder of outputs from requests that ran.

    Args:
      num_layers: number of the decoder's layers.
      hidden_size: width of the decoder.
      bytes_of: returns the bytes that a token spells.
    """

    def __init__(self, num_layers: int, hidden_size: int, bytes_of: Callable[[int], bytes]):
        self._num_layers, self._hidden_size = num_layers, hidden_size
        self._bytes_of = bytes_of

    def output(self, planned: Planned, answers: Sequence[Generation], request_id: str = "") -> RequestOutput:
        """Return the output of a request; none of its deltas may have been taken."""
        collector = OutputCollector()
        delta = Deltas(self, planned, answers, request_id).take()
        assert delta is not None  # the first delta has all outputs
        collector.add(delta)
        return dataclasses.replace(collector.output(), error=self.error(planned, *answers))

    def prompt(self, planned: Planned, answer: Generation) -> PromptOutput:
        """Return the prompt's part of the output, from the request's first answer."""
        logprobs = None
        if answer.params.prompt_logprobs is not None:
            logprobs = (None, *self.with_texts(answer.prompt_logprobs))
        return PromptOutput(
            text=planned.request.prompt.text,
            token_ids=planned.layout.token_ids,
            num_cached_tokens=_exact_tokens(answer),
            cache=self._report(planned, answer),
            logprobs=logprobs,
            compression=answer.report.compression,
        )

    def failed_output(self, prompt: str, error: str, request_id: str) -> RequestOutput:
        """Return the output of a request that was wrong and never ran."""
        ids = np.zeros(0, np.int32)
        return RequestOutput(prompt, ids, (), 0, RequestMetrics(), _NOTHING, error=error, request_id=request_id)

    def score(self, planned: Planned, sequence: ScoredSequence) -> Score:
        """Return the score of a request's continuation."""
        return Score(
            token_ids=tuple(sequence.layout.token_ids[len(planned.layout) :].tolist()),
            logprobs=np.array(sequence.logprobs, np.float32),
            greedy=np.array(sequence.greedy, np.bool_),
            metrics=sequence.report.take_metrics(),
            cache=self._report(planned, sequence),
            logits=np.stack(sequence.logits) if sequence.keep_logits and sequence.logits else None,
            error=self.error(planned, sequence),
        )

    def failed_score(self, error: str) -> Score:
        """Return the score of a request that was wrong and never ran: NaN in total, without tokens."""
        return Score((), np.zeros(0, np.float32), np.zeros(0, np.bool_), RequestMetrics(), _NOTHING, error=error)

    def hidden_state(self, planned: Planned, sequence: PooledSequence) -> HiddenState:
        """Return the hidden state of a request, NaN if it failed."""
        error = self.error(planned, sequence)
        values = np.full(self._hidden_size, np.nan, np.float32) if error is not None else sequence.hidden[0]
        ids, cached = planned.layout.token_ids, _exact_tokens(sequence)
        metrics = sequence.report.take_metrics()
        return HiddenState(values, ids, cached, metrics, self._report(planned, sequence), error)

    def failed_hidden_state(self, error: str) -> HiddenState:
        """Return the hidden state of a request that was wrong and never ran: NaN."""
        values, ids = np.full(self._hidden_size, np.nan, np.float32), np.zeros(0, np.int32)
        return HiddenState(values, ids, 0, RequestMetrics(), _NOTHING, error)

    def error(self, planned: Planned, *sequences: Running) -> str | None:
        """Return the first error of the request's sequences, prefixed with the request's name, or None."""
        name = planned.request.prompt.name
        errors = [sequence.end.error for sequence in sequences if sequence.end.error is not None]
        return next((error if error.startswith(name) else f"{name}: {error}" for error in errors), None)

    def with_texts(self, logprobs: Sequence[Logprob]) -> tuple[Logprob, ...]:
        """Return `logprobs` with the texts and bytes of their tokens."""
        return tuple(map(self._with_text, logprobs))

    def _with_text(self, one: Logprob) -> Logprob:
        found = {token: self._bytes_of(token) for token in (one.token, *one.top)}
        return dataclasses.replace(one, texts={token: spelled(own) for token, own in found.items()}, token_bytes=found)

    def _report(self, planned: Planned, sequence: Running) -> CacheReport:
        plan = sequence.progress.plan if sequence.report.ran is None else sequence.report.ran
        uses, cached = sequence.progress.images, sequence.report.cached
        images = tuple([self._image_report(i, use, plan, cached) for i, use in enumerate(uses)])
        compression = sequence.report.compression
        approximate = sum([image.tokens - image.recomputed[-1] for image in images if image.match == "approximate"])
        return CacheReport(
            images,
            exact=approximate == 0 and (compression is None or compression.is_whole),
            policy=planned.options.reuse.name,
            rows=plan.rows(self._num_layers),
            approximate_tokens=approximate,
            matched_tokens=sequence.report.matched,
            request_key=planned.request_key,
            request_known=planned.request_known,
        )

    def _image_report(self, index: int, use: ImageUse, plan: Plan, cached: int) -> ImageReuse:
        image = use.span.image
        depth = plan.depth[use.span.tokens]
        is_resident, computes = use.span.within(cached), bool(depth.any())
        linked = None if is_resident else use.linked
        moved = 0
        if linked is not None and use.kv_tier != "device":
            moved += linked_bytes(linked.meta, is_exact=use.span.state == "exact")
            if use.kv_tier != "host":
                moved += _fetched(linked)
        encoder = "none"
        if computes:
            # One group may compute the image for two requests, and read its tokens before the entry is filled.
            found = use.has_encoder and use.encoder is not None and not isinstance(use.encoder.state, Lost)
            encoder = use.encoder_tier if found else "computed"
            if found and use.encoder is not None and encoder != "device":
                rows = use.encoder.meta.nbytes // use.encoder.meta.padded * int(np.count_nonzero(depth))
                moved += rows if encoder == "host" else rows + _fetched(use.encoder)
        return ImageReuse(
            index=index,
            key=image.key,
            tokens=image.num_tokens,
            encoder=encoder,
            kv="kv_pool" if is_resident else "none" if linked is None else use.kv_tier,
            match="exact" if is_resident else "miss" if linked is None else use.span.state,
            recomputed=active_rows(depth, self._num_layers) if computes else (0,) * self._num_layers,
            bytes_moved=moved,
            why=None if is_resident else use.why,
            donor=None if is_resident or linked is None else use.donor,
            video=None if use.span.moment is None else use.span.moment.video,
            chunk=None if use.span.moment is None else use.span.moment.chunk,
        )


class Deltas:
    """Reader of a request's deltas. A request must have only one.

    Args:
      reporter: builds the parts of the deltas.
      planned, answers: the request and its running sequences.
      request_id: name of the request.
    """

    def __init__(self, reporter: Reporter, planned: Planned, answers: Sequence[Generation], request_id: str):
        self._reporter, self._planned, self._answers, self._request_id = reporter, planned, answers, request_id
        self._going = dict(enumerate(answers))  # answers whose end has not been returned
        self._taken = [0] * len(answers)  # tokens returned of each answer
        # State of the prompt when it was last returned: whether the first answer had tokens, and whether all had ended.
        self._prompt_state: tuple[bool, bool] | None = None

    def take(self) -> RequestDelta | None:
        """Return what is new since the last call, or None. The first call always returns a delta."""
        # Read before the answers: an answer that ends in between may not be complete.
        finished = all(one.end.is_finished for one in self._answers)
        taken = [answer.take(index, self._taken[index]) for index, answer in self._going.items()]
        is_first = self._prompt_state is None
        new = [one for one in taken if is_first or one.token_ids or one.finish_reason is not None]
        if not (new or finished):
            return None
        for one in new:
            self._taken[one.index] += len(one.token_ids)
            if one.finish_reason is not None:
                del self._going[one.index]

        prompt, state = None, (bool(self._answers[0].token_ids), finished)
        if state != self._prompt_state:
            prompt, self._prompt_state = self._reporter.prompt(self._planned, self._answers[0]), state
        return RequestDelta(
            self._request_id,
            tuple(map(self._with_texts, new)),
            self._answers[0].report.take_metrics(),
            prompt,
            finished,
        )

    def _with_texts(self, one: CompletionOutput) -> CompletionOutput:
        logprobs = None if one.logprobs is None else self._reporter.with_texts(one.logprobs)
        return dataclasses.replace(one, logprobs=logprobs)


def _fetched(record: Record) -> int:
    """Return the bytes of an entry that were read from outside host memory."""
    return len(record.meta.parts) * record.meta.part_bytes


def _exact_tokens(sequence: Running) -> int:
    """Return the number of prompt tokens whose KV was reused exactly."""
    plan, cached = sequence.progress.plan, sequence.report.cached
    linked = [use.span for use in sequence.progress.images if use.linked is not None and use.span.state == "exact"]
    depths = [plan.depth[max(span.start, cached) : span.stop] for span in linked]
    return cached + (int(np.count_nonzero(np.concatenate(depths) == 0)) if depths else 0)
