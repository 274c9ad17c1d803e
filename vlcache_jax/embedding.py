"""Embeddings and scores of documents, for both fronts of a service."""

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
from vlcache_jax.calls.in_flight import UnderWay, together
from vlcache_jax.common.checks import check_flags, check_whole
from vlcache_jax.inputs.messages import read_settings
from vlcache_jax.inputs.retrieval import ANSWERS, InputRenderer, PairRenderer, listed_inputs
from vlcache_jax.outputs import CacheReport, HiddenState, RequestMetrics, plain
from vlcache_jax.request_options import RequestOptions, Reuse
from vlcache_jax.service import Service

Input = str | Mapping[str, Any] | Sequence[Any]
"""A string, a part of a message, a list of parts, a conversation, a dict of `messages` with `TemplateOptions`, or one
with a `prompt` as it is."""
Document = str | Mapping[str, Any] | Sequence[Any]
"""A string, a part of a message, or a list of parts."""


@dataclass(frozen=True)
class Embedding:
    """A vector of length 1.

    Attributes:
      embedding: float32 [n].
    """

    embedding: npt.NDArray[np.float32]

    @property
    def hidden_size(self) -> int:
        """n."""
        return len(self.embedding)


@dataclass(frozen=True)
class EmbeddingOutput:
    """The embedding of one input, in the place of the input in the call.

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

    finished: ClassVar[bool] = True  # vLLM has it

    @classmethod
    def of(cls, state: HiddenState, dimensions: int | None, request_id: str) -> EmbeddingOutput:
        """Of a hidden state the first `dimensions`, as long as 1 (Matryoshka embeddings may be cut); None: all."""
        values = state.values[:dimensions]
        with np.errstate(invalid="ignore"):
            values = values / np.maximum(np.linalg.norm(values), 1e-12)
        told = (state.prompt_token_ids, state.num_cached_tokens, state.metrics, state.cache)
        return cls(Embedding(values), *told, request_id=request_id, error=state.error)

    def to_dict(self) -> dict[str, Any]:
        """See `RequestOutput.to_dict`."""
        return cast(dict[str, Any], plain(self))


@dataclass(frozen=True)
class RerankOutput:
    """How well a document suits a query.

    Attributes:
      index: which document of the call.
      score: the probability of "yes" beside "no"; NaN if the document was wrong.
      num_cached_tokens, metrics, cache, error: see `RequestOutput`.
      num_tokens: of query and document with all that stands around them.
    """

    index: int
    score: float
    num_tokens: int
    num_cached_tokens: int
    metrics: RequestMetrics = field(repr=False)
    cache: CacheReport = field(repr=False)
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """See `RequestOutput.to_dict`."""
        return cast(dict[str, Any], plain(self))


class Pooling:
    """What both fronts check, and what they make of the hidden states of documents.

    Args:
      service: an open model.
    """

    def __init__(self, service: Service):
        self._service = service

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raises a ValueError unless vectors can be cut to so many."""
        most = self._service.checkpoint.config.text.hidden_size
        check_whole("dimensions", dimensions, 1, most, or_none=True)

    def check_answers(self) -> None:
        """Raises a ValueError unless the model can say yes and no."""
        _ = self._margin

    def ranked(self, states: Sequence[HiddenState]) -> list[RerankOutput]:
        """Documents, whose hidden states these are, the best first."""
        outputs = [self._scored(index, state) for index, state in enumerate(states)]
        return sorted(outputs, key=lambda one: (math.isnan(one.score), -one.score, one.index))

    def _scored(self, index: int, state: HiddenState) -> RerankOutput:
        # In double precision, as the difference of two logits is all that counts.
        margin = float(self._margin.astype(float) @ state.values.astype(float))
        score = 1 / (1 + math.exp(-margin)) if margin > 0 else math.exp(margin) / (1 + math.exp(margin))
        told = len(state.prompt_token_ids), state.num_cached_tokens, state.metrics, state.cache
        return RerankOutput(index, score, *told, error=state.error)

    @functools.cached_property
    def _margin(self) -> Any:
        """What a hidden state is multiplied with to get the logit of "yes" less that of "no"; float32 [M]."""
        known = self._service.renderer.tokenizer.get_vocab()
        if missing := [token for token in ANSWERS if token not in known]:
            raise ValueError(f"the model's tokenizer must have the tokens yes and no, but {missing[0]} is none of its")
        yes, no = self._service.device.runner.head_rows([known[token] for token in ANSWERS])
        return yes - no


class Embedder:
    """Embedding and reranking, of an engine that answers calls."""

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
        """Vectors of length 1, which are the closer the more alike inputs are. Any checkpoint of the family gives some;
        those of Qwen3-VL-Embedding are made for it.

        Args:
          inputs: a string, a part of a message, such as `{"type": "image", "image": "shoe.jpg"}`, or a conversation; or
            a list of inputs, of which each may also be a list of parts. A dict of "messages" is a conversation with
            options of the template, such as `"continue_final_message": True`. One with a "prompt" is taken as it is.
          instruction: what the vectors are for, as the system message; None: "Represent the user's input."
          dimensions: of the vectors; None: as many as the model has. Shorter ones are the first of these.
          reuse, cache_salt, mm_processor_kwargs, options, use_tqdm, on_error: see `chat`.

        Returns:
          One output for each input, in their order; the vector is `output.outputs.embedding`, float32.

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
        """How well documents suit a query. Any checkpoint of the family tells; Qwen3-VL-Reranker is made for it.

        Args:
          query: a string, a part of a message, or a list of parts.
          documents: a list of these.
          instruction: what makes a document a good one; None: the model's own words.
          reuse, cache_salt, mm_processor_kwargs, options, use_tqdm, on_error: see `chat`. Images of documents come
            again with each query.

        Returns:
          One output for each document, the best first; `score` is the probability of "yes" beside "no".

        Raises:
          RequestError, ValueError: see `chat`; also where the model's tokenizer has no tokens "yes" and "no".
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
    """Embedding and reranking, of an engine that answers requests as they come."""

    service: Service
    _requests: UnderWay

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
        """The vector of one input; see `LLM.embed`.

        Args:
          given: a string, a part of a message, a list of parts, a conversation, or a dict; see `LLM.embed`.
          request_id, reuse, cache_salt, priority, mm_processor_kwargs, options: see `generate`.
          instruction, dimensions: see `LLM.embed`.

        Raises:
          QueueFullError, RequestError, ValueError, RuntimeError: see `generate`.
        """
        asked = RequestOptions.of(
            options, reuse=reuse, cache_salt=cache_salt, priority=priority, mm_processor_kwargs=mm_processor_kwargs
        )
        self._pooling.check_dimensions(dimensions)
        name, called_at = self._requests.named(request_id), time.perf_counter()

        def call() -> Call:
            render = InputRenderer(self.service.renderer, read_settings(asked.mm_processor_kwargs), instruction)
            return self.service.call("input", [given], render, asked, "return", called_at=called_at)

        return EmbeddingOutput.of(await self._hidden_state(call, name), dimensions, name)

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
        most: int = 32,
    ) -> list[RerankOutput]:
        """How well documents suit a query; see `LLM.rerank`.

        Args:
          query, documents, instruction: see `LLM.rerank`.
          reuse, cache_salt, priority, mm_processor_kwargs, options: see `generate`.
          most: documents that are under way at a time.

        Raises:
          QueueFullError, RequestError, ValueError, RuntimeError: see `generate`. The first error ends the call.
        """
        called_at = time.perf_counter()
        asked = RequestOptions.of(
            options, reuse=reuse, cache_salt=cache_salt, priority=priority, mm_processor_kwargs=mm_processor_kwargs
        )

        def work() -> list[Callable[[], Coroutine[Any, Any, HiddenState]]]:
            listed, name = listed_inputs(documents, "documents")
            settings = read_settings(asked.mm_processor_kwargs)
            render = PairRenderer(self.service.renderer, query, settings, instruction)
            self._pooling.check_answers()
            rest, call = (render, asked, "return"), functools.partial(self.service.call, called_at=called_at)
            calls = [functools.partial(call, name.format(i), [one], *rest) for i, one in enumerate(listed)]
            return [functools.partial(self._hidden_state, one, None) for one in calls]

        states = await together(await self._requests.run(work), most)
        return await self._requests.run(functools.partial(self._pooling.ranked, states))

    async def _hidden_state(self, call: Callable[[], Call], name: str | None) -> HiddenState:
        """Of the one request of a call, which is made in a thread."""
        caller = self.service.caller
        async with self._requests.job(lambda: caller.to_pool(call()), caller, self._requests.named(name)) as (
            job,
            more,
        ):
            while not job.has_ended:
                await more.wait()
                more.clear()
            self._requests.check(job, caller)
            if any(one.end.is_aborted for one in job.sequences):
                raise RequestError({0: f"{job.kind.call.name} was aborted"})
            return cast(HiddenState, job.kind.result(job))
