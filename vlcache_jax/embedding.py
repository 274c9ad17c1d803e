"""Embeddings and reranking for `LLM` and `AsyncLLM`."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import numpy as np
import numpy.typing as npt

from vlcache_jax.cache.keys import Salt
from vlcache_jax.calls.caller import in_order
from vlcache_jax.calls.groups import Call, RequestError
from vlcache_jax.calls.in_flight import RequestsInFlight, together
from vlcache_jax.common.checks import check_flags, check_whole
from vlcache_jax.common.renamed import renamed_arguments
from vlcache_jax.inputs.messages import read_settings
from vlcache_jax.inputs.retrieval import ANSWERS, InputRenderer, PairRenderer, listed_inputs
from vlcache_jax.outputs import CacheReport, HiddenState, RequestMetrics, plain
from vlcache_jax.request_options import RequestOptions, Reuse
from vlcache_jax.service import Service

Input = str | Mapping[str, Any] | Sequence[Any]
"""A string, a part of a message, a list of parts, a conversation, a dict with `messages` and `TemplateOptions`, or a
dict with a `prompt` that is used without a chat template."""
Document = str | Mapping[str, Any] | Sequence[Any]
"""A string, a part of a message, or a list of parts."""


@dataclass(frozen=True)
class Embedding:
    """Embedding vector of length 1.

    Attributes:
      embedding: float32 [n].
    """

    embedding: npt.NDArray[np.float32]

    @property
    def hidden_size(self) -> int:
        """Number of dimensions n of the vector."""
        return len(self.embedding)


@dataclass(frozen=True)
class EmbeddingOutput:
    """Embedding of one input.

    Attributes:
      outputs: the embedding; NaN if the input was wrong.
      prompt_token_ids, num_cached_tokens, metrics, cache, request_id, error: see `RequestOutput`.
    """

    outputs: Embedding
    prompt_token_ids: npt.NDArray[np.int32] = field(repr=False)
    num_cached_tokens: int
    metrics: RequestMetrics
    cache: CacheReport
    request_id: str = ""
    error: str | None = None

    finished: ClassVar[bool] = True  # for compatibility with vLLM

    @classmethod
    def of(cls, state: HiddenState, dimensions: int | None, request_id: str) -> EmbeddingOutput:
        """Return the first `dimensions` of a hidden state, normalized to length 1; None: all dimensions.

        Matryoshka embeddings may be cut.
        """
        values = state.values[:dimensions]
        with np.errstate(invalid="ignore"):
            values = values / np.maximum(np.linalg.norm(values), 1e-12)
        report = (state.prompt_token_ids, state.num_cached_tokens, state.metrics, state.cache)
        return cls(Embedding(values), *report, request_id=request_id, error=state.error)

    def to_dict(self) -> dict[str, Any]:
        """Return the values as dicts, lists, strings and numbers, ready for `json.dumps`."""
        return cast(dict[str, Any], plain(self))


@dataclass(frozen=True)
class RerankOutput:
    """Relevance of a document to a query.

    Attributes:
      index: index of the document in the call.
      score: probability of "yes" rather than "no", 0 to 1; NaN if the document was wrong.
      num_tokens: number of prompt tokens: query, document and template.
      num_cached_tokens, metrics, cache, error: see `RequestOutput`.
    """

    index: int
    score: float
    num_tokens: int
    num_cached_tokens: int
    metrics: RequestMetrics = field(repr=False)
    cache: CacheReport = field(repr=False)
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the values as dicts, lists, strings and numbers, ready for `json.dumps`."""
        return cast(dict[str, Any], plain(self))


class Pooling:
    """Checks and results of pooling requests, shared by `Embedder` and `AsyncEmbedder`.

    Args:
      service: an open model.
    """

    def __init__(self, service: Service):
        self._service = service

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raise a ValueError unless vectors can be cut to `dimensions`."""
        max_dimensions = self._service.checkpoint.config.text.hidden_size
        check_whole("dimensions", dimensions, 1, max_dimensions, or_none=True)

    def check_answers(self) -> None:
        """Raise a ValueError unless the tokenizer has the tokens "yes" and "no"."""
        _ = self._margin

    def ranked(self, states: Sequence[HiddenState]) -> list[RerankOutput]:
        """Return the scores of documents with these hidden states, the best first."""
        outputs = [self._scored(index, state) for index, state in enumerate(states)]
        return sorted(outputs, key=lambda one: (math.isnan(one.score), -one.score, one.index))

    def _scored(self, index: int, state: HiddenState) -> RerankOutput:
        # Double precision, because the score depends on a small difference of two logits.
        margin = float(self._margin.astype(float) @ state.values.astype(float))
        score = 1 / (1 + math.exp(-margin)) if margin > 0 else math.exp(margin) / (1 + math.exp(margin))
        report = len(state.prompt_token_ids), state.num_cached_tokens, state.metrics, state.cache
        return RerankOutput(index, score, *report, error=state.error)

    @functools.cached_property
    def _margin(self) -> Any:
        """Difference of the output head's rows for "yes" and "no", float32 [M]."""
        known = self._service.renderer.tokenizer.get_vocab()
        if missing := [token for token in ANSWERS if token not in known]:
            raise ValueError(
                f"the model's tokenizer must have the tokens yes and no, but {missing[0]!r} is missing: "
                "use a reranker checkpoint"
            )
        yes, no = self._service.device.runner.head_rows([known[token] for token in ANSWERS])
        return yes - no


class Embedder:
    """Embedding and reranking of an engine that serves calls."""

    service: Service

    @functools.cached_property
    def _pooling(self) -> Pooling:
        return Pooling(self.service)

    def embed(
        self,
        inputs: Input | Sequence[Input],
        *,
        instruction: str | None = None,
        dimensions: int | None = None,
        reuse: Reuse | None = None,
        cache_salt: str | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        options: RequestOptions | None = None,
        use_tqdm: bool = True,
        on_error: str = "raise",
    ) -> list[EmbeddingOutput]:
        """Return embeddings: vectors of length 1 that are closer the more similar their inputs are.

        Any checkpoint of the family works; those of Qwen3-VL-Embedding are trained for it.

        Args:
          inputs: an input or a list of inputs. An input is a string, a part of a message such as `{"type": "image",
            "image": "shoe.jpg"}`, or a conversation; in a list also a list of parts. A dict with "messages" is a
            conversation with template options, such as `"continue_final_message": True`. A dict with "prompt" is used
            without a chat template.
          instruction: purpose of the vectors, used as the system message. None: "Represent the user's input."
          dimensions: number of dimensions, up to the model's width; shorter vectors are normalized prefixes. None: the
            model's width.
          reuse, cache_salt, mm_processor_kwargs, options, use_tqdm, on_error: see `chat`.

        Returns:
          One output per input, in the order of the inputs; the vector is `output.outputs.embedding`, float32 [n].

        Raises:
          RequestError, ValueError: see `chat`.
        """
        check_flags(use_tqdm=use_tqdm)
        options = RequestOptions.of(
            options, reuse=reuse, cache_salt=cache_salt, mm_processor_kwargs=mm_processor_kwargs
        )
        self._pooling.check_dimensions(dimensions)
        listed, name = listed_inputs(inputs, "inputs")
        render = InputRenderer(self.service.renderer, read_settings(options.mm_processor_kwargs), instruction)
        call = self.service.call(name, listed, render, options, on_error)
        states = in_order(self.service.caller.hidden_states(call, doing="embedding", show=use_tqdm))
        return [EmbeddingOutput.of(state, dimensions, str(i)) for i, state in enumerate(states)]

    def rerank(
        self,
        query: Document,
        documents: Document | Sequence[Document],
        *,
        instruction: str | None = None,
        reuse: Reuse | None = None,
        cache_salt: str | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        options: RequestOptions | None = None,
        use_tqdm: bool = True,
        on_error: str = "raise",
    ) -> list[RerankOutput]:
        """Score documents by their relevance to a query.

        Any checkpoint of the family works; Qwen3-VL-Reranker is trained for it.

        Args:
          query: a string, a part of a message, or a list of parts.
          documents: a list of documents, each in the form of a query.
          instruction: description of a relevant document. None: the model's default.
          reuse, cache_salt, mm_processor_kwargs, options, use_tqdm, on_error: see `chat`. Images of documents repeat
            with each query, so the cache applies to them.

        Returns:
          One output per document, the best first; `score` is the probability of "yes" rather than "no".

        Raises:
          RequestError, ValueError: see `chat`; also if the model's tokenizer lacks the token "yes" or "no".
        """
        check_flags(use_tqdm=use_tqdm)
        options = RequestOptions.of(
            options, reuse=reuse, cache_salt=cache_salt, mm_processor_kwargs=mm_processor_kwargs
        )
        listed, name = listed_inputs(documents, "documents")
        settings = read_settings(options.mm_processor_kwargs)
        render = PairRenderer(self.service.renderer, query, settings, instruction)
        call = self.service.call(name, listed, render, options, on_error)
        self._pooling.check_answers()
        return self._pooling.ranked(
            in_order(self.service.caller.hidden_states(call, doing="scoring documents", show=use_tqdm))
        )


class AsyncEmbedder:
    """Embedding and reranking of an engine that serves requests one by one."""

    service: Service
    _requests: RequestsInFlight

    @functools.cached_property
    def _pooling(self) -> Pooling:
        return Pooling(self.service)

    async def embed(
        self,
        given: Input,
        request_id: str | None = None,
        *,
        instruction: str | None = None,
        dimensions: int | None = None,
        reuse: Reuse | None = None,
        cache_salt: Salt = None,
        priority: int = 0,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        options: RequestOptions | None = None,
    ) -> EmbeddingOutput:
        """Return the embedding of one input; see `LLM.embed`.

        Args:
          given: a string, a part of a message, a list of parts, a conversation, or a dict; see `LLM.embed`.
          request_id, reuse, cache_salt, priority, mm_processor_kwargs, options: see `generate`.
          instruction, dimensions: see `LLM.embed`.

        Raises:
          QueueFullError, RequestError, ValueError, RuntimeError: see `generate`.
        """
        requested = RequestOptions.of(
            options, reuse=reuse, cache_salt=cache_salt, priority=priority, mm_processor_kwargs=mm_processor_kwargs
        )
        self._pooling.check_dimensions(dimensions)
        name, called_at = self._requests.named(request_id), time.perf_counter()

        def call() -> Call:
            render = InputRenderer(self.service.renderer, read_settings(requested.mm_processor_kwargs), instruction)
            return self.service.call("input", [given], render, requested, "return", called_at=called_at)

        return EmbeddingOutput.of(await self._hidden_state(call, name), dimensions, name)

    @renamed_arguments({"most": "max_in_flight"})
    async def rerank(
        self,
        query: Document,
        documents: Sequence[Document],
        *,
        instruction: str | None = None,
        reuse: Reuse | None = None,
        cache_salt: Salt = None,
        priority: int = 0,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        options: RequestOptions | None = None,
        max_in_flight: int = 32,
    ) -> list[RerankOutput]:
        """Score documents by their relevance to a query; see `LLM.rerank`.

        Args:
          query, documents, instruction: see `LLM.rerank`.
          reuse, cache_salt, priority, mm_processor_kwargs, options: see `generate`.
          max_in_flight: maximum number of documents in flight.

        Raises:
          QueueFullError, RequestError, ValueError, RuntimeError: see `generate`. The first error ends the call.
        """
        called_at = time.perf_counter()
        requested = RequestOptions.of(
            options, reuse=reuse, cache_salt=cache_salt, priority=priority, mm_processor_kwargs=mm_processor_kwargs
        )

        def work() -> list[Callable[[], Coroutine[Any, Any, HiddenState]]]:
            listed, name = listed_inputs(documents, "documents")
            settings = read_settings(requested.mm_processor_kwargs)
            render = PairRenderer(self.service.renderer, query, settings, instruction)
            self._pooling.check_answers()
            rest, call = (render, requested, "return"), functools.partial(self.service.call, called_at=called_at)
            calls = [functools.partial(call, name.format(i), [one], *rest) for i, one in enumerate(listed)]
            return [functools.partial(self._hidden_state, one, None) for one in calls]

        states = await together(await self._requests.run(work), max_in_flight)
        return await self._requests.run(functools.partial(self._pooling.ranked, states))

    async def _hidden_state(self, call: Callable[[], Call], name: str | None) -> HiddenState:
        """Return the hidden state of a call with one request; `call` runs in a thread."""
        caller = self.service.caller
        async with self._requests.job(lambda: caller.to_pool(call()), caller, self._requests.named(name)) as (
            job,
            progress,
        ):
            while not job.has_ended:
                await progress.wait()
                progress.clear()
            self._requests.check(job, caller)
            if any(one.end.is_aborted for one in job.sequences):
                raise RequestError({0: f"{job.kind.call.name} was aborted"})
            return cast(HiddenState, job.kind.result(job))
