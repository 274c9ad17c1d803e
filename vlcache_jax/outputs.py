"""What a call returns."""

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
from vlcache_jax.engine.completions import CompletionOutput as CompletionOutput
from vlcache_jax.engine.completions import Logprob as Logprob
from vlcache_jax.engine.completions import RequestMetrics as RequestMetrics
from vlcache_jax.engine.completions import TokenLogprob as TokenLogprob
from vlcache_jax.engine.completions import spelled
from vlcache_jax.engine.compressed_pages import Compression as Compression
from vlcache_jax.engine.request import Forced, Generation, ImageUse, Planned, PooledSequence
from vlcache_jax.engine.request import Sequence as Running
from vlcache_jax.reuse.policies import Plan, active_rows


@dataclass(frozen=True)
class Verification:
    """A request's answer beside the one of a cold run.

    Attributes:
      tokens_agree: tokens up to the first difference between both answers. A compressed one is compared with the one
        that has its whole prompt.
      tokens: of the longer answer.
      max_logit_difference: largest difference of any logit at the places of the answer's tokens, when both runs are
        given these tokens, and nothing is compressed.
    """

    tokens_agree: int
    tokens: int
    max_logit_difference: float


@dataclass(frozen=True)
class ImageReuse:
    """What happened to one image of a request. A chunk of a video, that is two frames, is an image, too.

    Attributes:
      index: which image of the request, chunks of videos counted.
      key: its entry key.
      tokens: image tokens in the prompt.
      encoder: where its encoder rows came from: "computed", "device", "host", "disk", or "none" if none were
        needed.
      kv: where the K, V that were not computed came from: "resident" (pages of an earlier prompt), "device", "host",
        "disk", or "none" if all were computed.
      match: how well a stored record fitted: "exact", "approximate" or "miss".
      recomputed: its rows computed in each layer.
      bytes_moved: of records, from the disk and to the device.
      why: the reason if it was not reused exactly.
      video: which of the request's videos it is from; None: it is a picture.
      chunk: which chunk of that video.
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
    video: int | None = None
    chunk: int | None = None


@dataclass(frozen=True)
class CacheReport:
    """What was reused, and what was computed.

    Attributes:
      images: one entry for each image of the request, and for each chunk of its videos.
      exact: the answer is the one that a cold run gives, to rounding: in bfloat16 it may differ where two tokens are
        nearly equal, as it may between two batches. It is not where something of the prompt is dropped.
      policy: which rule chose the rows.
      rows: rows computed in each layer.
      approximate_tokens: image tokens reused behind another context than they were computed in, or kept by a codec,
        those recomputed in every layer not counted.
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
class Searched:
    """A search that an answer asked for.

    Attributes:
      query: its words.
      hits: ids and scores of the items that were shown to the model.
      seconds: that the answer waited for it.
      error: why it found nothing; None: it did not fail.
    """

    query: str
    hits: tuple[tuple[str, float], ...]
    seconds: float
    error: str | None = None


@dataclass(frozen=True)
class SearchBegun:
    """A turn has ended with a call that searches, and the search has begun; a `SearchRound` follows."""


@dataclass(frozen=True)
class SearchRound:
    """What stands between two turns of an answer that searches.

    Attributes:
      told: of the search.
      hits: what was found, as `library.Hit`.
      messages: the turn before, and the tool's message with what was found.
    """

    told: Searched
    hits: tuple[Any, ...]
    messages: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class RequestOutput:
    """The answers to one request, in the place of the request in the call.

    Attributes:
      outputs: `n` answers; none if the request was wrong.
      num_cached_tokens: prompt tokens, text or image, whose K, V were reused exactly.
      prompt_logprobs: of the prompt's tokens, if asked for; None in the first place, which nothing predicts. A request
        that was aborted or failed has those of the tokens that had been computed: they may be fewer than the prompt's.
      verification: if asked for.
      compression: what its first answer goes on with; None: nothing was to be compressed, or it ended before that, or
        it could not be (`uncompressed` in `LLM.stats`).
      searches: that it made (`LLM.chat(retrieve=...)`); the answer is what came behind the last one.
      request_id: as given, or as drawn; in `LLM` the request's number in its call.
      finished: whether all answers have ended.
      error: why the request was not answered, or not to its end; None: it was.
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

    # vLLM's, of what there is not here.
    encoder_prompt: ClassVar[None] = None
    encoder_prompt_token_ids: ClassVar[None] = None
    kv_transfer_params: ClassVar[None] = None
    lora_request: ClassVar[None] = None

    def to_dict(self) -> dict[str, Any]:
        """All of it in dicts, lists, texts and numbers, as `json.dumps` takes them."""
        return cast(dict[str, Any], plain(self))


@dataclass(frozen=True)
class PromptOutput:
    """What is told of a request's prompt.

    Attributes:
      text, token_ids, num_cached_tokens, cache, logprobs, compression: what `RequestOutput` has of it.
    """

    text: str
    token_ids: npt.NDArray[np.int32] = field(repr=False)
    num_cached_tokens: int
    cache: CacheReport
    logprobs: tuple[Logprob | None, ...] | None = None
    compression: Compression | None = None


@dataclass(frozen=True)
class RequestDelta:
    """What is new of the answers to a request. It is no larger where they are longer.

    Attributes:
      request_id: as given, or as drawn.
      outputs: of the answers of which there is something new; the first delta names all of them.
      metrics: seconds so far, but `inter_token` since the delta before.
      prompt: None where nothing of it is new. The first delta has it, and the last one, which counts: what was to be
        reused may have had to be computed.
      finished: whether all answers have ended, and this is the last delta.
    """

    request_id: str
    outputs: tuple[CompletionOutput, ...]
    metrics: RequestMetrics
    prompt: PromptOutput | None
    finished: bool

    def to_dict(self) -> dict[str, Any]:
        """See `RequestOutput.to_dict`."""
        return cast(dict[str, Any], plain(self))


class OutputCollector:
    """Makes the output of a request from its deltas: `add` costs what is new, `output` what there is so far."""

    def __init__(self) -> None:
        self._answers: dict[int, list[CompletionOutput]] = {}
        self._gaps: list[float] = []
        self._prompt: PromptOutput | None = None
        self._last: RequestDelta | None = None

    def add(self, delta: RequestDelta) -> None:
        """Goes on with the next delta.

        Raises:
          ValueError: it is no delta, or one of another request.
        """
        if not isinstance(delta, RequestDelta):
            raise ValueError(f"delta must be a RequestDelta, got {type(delta).__name__}")
        if self._last is not None and delta.request_id != self._last.request_id:
            raise ValueError(f"delta must be of request {self._last.request_id!r}, got one of {delta.request_id!r}")
        for one in delta.outputs:
            self._answers.setdefault(one.index, []).append(one)
        self._gaps += delta.metrics.inter_token
        self._prompt = delta.prompt or self._prompt
        self._last = delta

    def output(self) -> RequestOutput:
        """All that has been told.

        Raises:
          ValueError: there was no delta yet.
        """
        if self._prompt is None or self._last is None:
            raise ValueError("an output is made of deltas, got none")
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
    """Of one answer."""
    told = [one.logprobs for one in deltas if one.logprobs is not None]
    return dataclasses.replace(
        deltas[-1],
        text="".join(one.text for one in deltas),
        token_ids=tuple(itertools.chain.from_iterable(one.token_ids for one in deltas)),
        logprobs=tuple(itertools.chain.from_iterable(told)) if told else None,
        cumulative_logprob=sum(one.chosen for logprobs in told for one in logprobs) if told else None,
    )


@dataclass(frozen=True)
class Score:
    """Log-probabilities of a forced continuation.

    Attributes:
      token_ids: of the continuation.
      logprobs: of each of them, given everything before it; float32 [n].
      greedy: whether each is the most likely token at its place; bool [n].
      logits: float32 [n, V], if asked for.
      error: why the request was not scored, or what is wrong with its logits; None: nothing.
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
        """See `RequestOutput.to_dict`."""
        return cast(dict[str, Any], plain(self))


@dataclass(frozen=True)
class HiddenState:
    """What the last token of a prompt comes to.

    Attributes:
      values: behind the last norm, float32 [M]; NaN where the request was wrong.
      prompt_token_ids: of the prompt, images expanded.
      num_cached_tokens, metrics, cache, error: see `RequestOutput`.
    """

    values: npt.NDArray[np.float32] = field(repr=False)
    prompt_token_ids: npt.NDArray[np.int32] = field(repr=False)
    num_cached_tokens: int
    metrics: RequestMetrics
    cache: CacheReport
    error: str | None = None


def plain(value: Any) -> Any:
    """Dataclasses as dicts, arrays, tuples and bytes as lists, members of enums as their values."""
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
    """Tells of requests that ran what their callers see.

    Args:
      num_layers: of the decoder.
      hidden_size: of it.
      bytes_of: returns what a token spells.
    """

    def __init__(self, num_layers: int, hidden_size: int, bytes_of: Callable[[int], bytes]):
        self._num_layers, self._hidden_size = num_layers, hidden_size
        self._bytes_of = bytes_of

    def output(self, planned: Planned, answers: Sequence[Generation], request_id: str = "") -> RequestOutput:
        """Of a request and its answers, of which nothing has been told."""
        collector = OutputCollector()
        delta = Deltas(self, planned, answers, request_id).take()
        assert delta is not None  # the first one names all answers
        collector.add(delta)
        return dataclasses.replace(collector.output(), error=self.error(planned, *answers))

    def prompt(self, planned: Planned, answer: Generation) -> PromptOutput:
        """Of a request's prompt, as its first answer has it."""
        told = None
        if answer.params.prompt_logprobs is not None:
            told = (None, *self.with_texts(answer.prompt_logprobs))
        return PromptOutput(
            text=planned.request.prompt.text,
            token_ids=planned.layout.token_ids,
            num_cached_tokens=_exact_tokens(answer),
            cache=self._report(planned, answer),
            logprobs=told,
            compression=answer.told.compression,
        )

    def failed_output(self, prompt: str, error: str, request_id: str) -> RequestOutput:
        """Of a request that was wrong, and never ran."""
        ids = np.zeros(0, np.int32)
        return RequestOutput(prompt, ids, (), 0, RequestMetrics(), _NOTHING, error=error, request_id=request_id)

    def score(self, planned: Planned, sequence: Forced) -> Score:
        """Of a request and its scored continuation."""
        return Score(
            token_ids=tuple(sequence.layout.token_ids[len(planned.layout) :].tolist()),
            logprobs=np.array(sequence.logprobs, np.float32),
            greedy=np.array(sequence.greedy, np.bool_),
            metrics=sequence.told.take_metrics(),
            cache=self._report(planned, sequence),
            logits=np.stack(sequence.logits) if sequence.keep_logits and sequence.logits else None,
            error=self.error(planned, sequence),
        )

    def failed_score(self, error: str) -> Score:
        """Of a request that was wrong, and never ran."""
        return Score((), np.zeros(0, np.float32), np.zeros(0, np.bool_), RequestMetrics(), _NOTHING, error=error)

    def hidden_state(self, planned: Planned, sequence: PooledSequence) -> HiddenState:
        """Of a request that was computed."""
        error = self.error(planned, sequence)
        values = np.full(self._hidden_size, np.nan, np.float32) if error is not None else sequence.hidden[0]
        ids, cached = planned.layout.token_ids, _exact_tokens(sequence)
        told = sequence.told.take_metrics()
        return HiddenState(values, ids, cached, told, self._report(planned, sequence), error)

    def failed_hidden_state(self, error: str) -> HiddenState:
        """Of a request that was wrong, and never ran."""
        values, ids = np.full(self._hidden_size, np.nan, np.float32), np.zeros(0, np.int32)
        return HiddenState(values, ids, 0, RequestMetrics(), _NOTHING, error)

    def error(self, planned: Planned, *sequences: Running) -> str | None:
        """What ended a sequence of the request, under the request's name."""
        name = planned.request.prompt.name
        errors = [sequence.end.error for sequence in sequences if sequence.end.error is not None]
        return next((error if error.startswith(name) else f"{name}: {error}" for error in errors), None)

    def with_texts(self, logprobs: Sequence[Logprob]) -> tuple[Logprob, ...]:
        """These with the texts of their tokens."""
        return tuple(map(self._with_text, logprobs))

    def _with_text(self, one: Logprob) -> Logprob:
        found = {token: self._bytes_of(token) for token in (one.token, *one.top)}
        return dataclasses.replace(one, texts={token: spelled(own) for token, own in found.items()}, token_bytes=found)

    def _report(self, planned: Planned, sequence: Running) -> CacheReport:
        plan = sequence.progress.plan if sequence.told.ran is None else sequence.told.ran
        uses, cached = sequence.progress.images, sequence.told.cached
        images = tuple([self._image_report(i, use, plan, cached) for i, use in enumerate(uses)])
        compression = sequence.told.compression
        approximate = sum([image.tokens - image.recomputed[-1] for image in images if image.match == "approximate"])
        return CacheReport(
            images,
            exact=approximate == 0 and (compression is None or compression.is_whole),
            policy=planned.options.reuse.name,
            rows=plan.rows(self._num_layers),
            approximate_tokens=approximate,
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
            moved += linked.meta.nbytes
            if use.kv_tier != "host":
                moved += _fetched(linked)
        encoder = "none"
        if computes:
            # One turn may compute it for both, and its tokens be read before the record is filled.
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
            kv="resident" if is_resident else "none" if linked is None else use.kv_tier,
            match="exact" if is_resident else "miss" if linked is None else use.span.state,
            recomputed=active_rows(depth, self._num_layers) if computes else (0,) * self._num_layers,
            bytes_moved=moved,
            why=None if is_resident else use.why,
            video=None if use.span.moment is None else use.span.moment.video,
            chunk=None if use.span.moment is None else use.span.moment.chunk,
        )


class Deltas:
    """Takes what is new of a request; nobody else may do so.

    Args:
      reporter: tells of it.
      planned, answers: the request, and what runs for it.
      request_id: its name.
    """

    def __init__(self, reporter: Reporter, planned: Planned, answers: Sequence[Generation], request_id: str):
        self._reporter, self._planned, self._answers, self._request_id = reporter, planned, answers, request_id
        self._going = dict(enumerate(answers))  # whose end has not been told
        self._taken = [0] * len(answers)  # tokens
        self._told: tuple[bool, bool] | None = None  # of the prompt: when its first answer had begun, and at the end

    def take(self) -> RequestDelta | None:
        """What is new since this was asked last; None: nothing. The first time there is something."""
        finished = all(one.end.is_finished for one in self._answers)  # first: what ends meanwhile may not be told whole
        taken = [answer.take(index, self._taken[index]) for index, answer in self._going.items()]
        new = [one for one in taken if self._told is None or one.token_ids or one.finish_reason is not None]
        if not (new or finished):
            return None
        for one in new:
            self._taken[one.index] += len(one.token_ids)
            if one.finish_reason is not None:
                del self._going[one.index]

        prompt, told = None, (bool(self._answers[0].token_ids), finished)
        if told != self._told:
            prompt, self._told = self._reporter.prompt(self._planned, self._answers[0]), told
        return RequestDelta(
            self._request_id, tuple(map(self._with_texts, new)), self._answers[0].told.take_metrics(), prompt, finished
        )

    def _with_texts(self, one: CompletionOutput) -> CompletionOutput:
        logprobs = None if one.logprobs is None else self._reporter.with_texts(one.logprobs)
        return dataclasses.replace(one, logprobs=logprobs)


def _fetched(record: Record) -> int:
    """Bytes of a record that came from outside host memory."""
    return len(record.meta.parts) * record.meta.part_bytes


def _exact_tokens(sequence: Running) -> int:
    """Prompt tokens whose K, V were reused exactly."""
    plan, cached = sequence.progress.plan, sequence.told.cached
    linked = [use.span for use in sequence.progress.images if use.linked is not None and use.span.state == "exact"]
    depths = [plan.depth[max(span.start, cached) : span.stop] for span in linked]
    return cached + (int(np.count_nonzero(np.concatenate(depths) == 0)) if depths else 0)
