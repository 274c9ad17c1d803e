"""Public engine for asynchronous programs: serves requests one by one and streams their outputs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from vlcache_jax.cache.keys import TenantSalt
from vlcache_jax.calls.caller import Conversation, PromptLike, is_token_ids
from vlcache_jax.calls.groups import RequestChunk, RequestError
from vlcache_jax.calls.in_flight import QueueFullError as QueueFullError
from vlcache_jax.calls.in_flight import RequestsInFlight
from vlcache_jax.common.vllm_compat import Absent
from vlcache_jax.config import EngineConfig, EngineOptions, shows_options
from vlcache_jax.embedding import AsyncEmbedder
from vlcache_jax.engine.engine import EngineStats
from vlcache_jax.image_cache import ImageCache
from vlcache_jax.inputs.prompt import Prompt, TemplateOptions
from vlcache_jax.outputs import Deltas, OutputCollector, RequestDelta, RequestOutput
from vlcache_jax.request_options import Compress, RequestOptions, Reuse
from vlcache_jax.sampling import SamplingParams
from vlcache_jax.service import Service, template_options


class AsyncLLM(AsyncEmbedder):
    """Engine that serves one model to any number of concurrent requests::

        engine = AsyncLLM("Qwen/Qwen3-VL-8B-Instruct")
        async for output in engine.generate("Hello", SamplingParams(max_tokens=20)):
            print(output.outputs[0].text)

    Requests run together, and each gives the output that it gives alone. One thread drives the device. The engine may
    be used from several event loops.

    Args:
      model: see `LLM`. Several engines may share a `Service`; the first one that is closed closes it for all.
      max_waiting: maximum number of requests in flight, queued and running. Default 1024.
      when_full: effect of one more request. "wait" (default): it waits until there is room. "raise": it raises a
        `QueueFullError`.
      options: see `LLM`.

    Attributes:
      service: the parts of the engine, for measurements.
      max_model_len: maximum number of tokens of a prompt and its output.

    Raises:
      ValueError: `max_waiting` or `when_full` is wrong.
      FileNotFoundError, ValueError, TypeError, NotImplementedError, MemoryError: see `LLM`.
    """

    from_engine_args = Absent("write AsyncLLM(model, ...) with the same arguments")
    from_vllm_config = Absent("write AsyncLLM(model, ...) with the engine's arguments")

    @shows_options
    def __init__(
        self,
        model: str | os.PathLike[str] | EngineConfig | Service,
        *,
        max_waiting: int = 1024,
        when_full: str = "wait",
        **options: Unpack[EngineOptions],
    ):
        if isinstance(max_waiting, bool) or not isinstance(max_waiting, int) or max_waiting < 1:
            raise ValueError(f"max_waiting must be a positive integer, got {max_waiting!r}")
        if when_full not in ("wait", "raise"):
            raise ValueError(f'when_full must be "wait" or "raise", got {when_full!r}')
        self.service = Service.of(model, **options)
        self.max_model_len: int = self.service.device.memory.max_model_len
        self._requests = RequestsInFlight(max_waiting, when_full, shows=self.service.config.use_tqdm)

    async def generate(
        self,
        prompt: PromptLike | Conversation,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        reuse: Reuse | None = None,
        compress: Compress | None = None,
        cache_salt: str | TenantSalt | None = None,
        priority: int = 0,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        options: RequestOptions | None = None,
        **template: Unpack[TemplateOptions],
    ) -> AsyncIterator[RequestOutput]:
        """Run a request; yield its output each time it grows, the last time with `finished` set.

        Each output contains everything generated so far; `deltas` yields only what is new. A caller that stops
        iterating aborts the request.

        Args:
          prompt: a prompt as in `LLM.generate`, or a conversation as in `LLM.chat`.
          sampling_params: None: the checkpoint's defaults.
          request_id: name of the request for `abort`, unique among the requests in flight. None: a generated one.
          reuse, compress, cache_salt, options: see `LLM.chat`.
          mm_processor_kwargs, template: see `LLM.chat`; only for conversations.
          priority: requests with lower values run first, those with equal values in the order of arrival. Default 0.

        Raises:
          QueueFullError: `max_waiting` requests are in flight, and `when_full` is "raise".
          RequestError: the request is wrong. It is a ValueError.
          NotFiniteError: logits are not finite. It is a RequestError.
          ValueError: another argument is wrong, or a request with this `request_id` is in flight.
          RuntimeError: the engine is closed, or failed.
        """
        options = RequestOptions.of(
            options,
            reuse=reuse,
            compress=compress,
            cache_salt=cache_salt,
            priority=priority,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        collector = OutputCollector()
        deltas = self.deltas(prompt, sampling_params, request_id, options=options, **template)
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                collector.add(delta)
                if delta.finished or any(one.token_ids for one in delta.outputs):
                    yield collector.output()

    async def deltas(
        self,
        prompt: PromptLike | Conversation,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        reuse: Reuse | None = None,
        compress: Compress | None = None,
        cache_salt: str | TenantSalt | None = None,
        priority: int = 0,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        options: RequestOptions | None = None,
        **template: Unpack[TemplateOptions],
    ) -> AsyncGenerator[RequestDelta]:
        """Run a request as `generate` does, and yield only what is new.

        The size of a delta does not depend on the length of the output so far, so the cost per token stays constant.
        `vlcache_jax.outputs.OutputCollector` joins deltas to the output that `generate` yields last.

        Args:
          prompt, sampling_params, request_id: see `generate`.
          reuse, compress, cache_salt, priority, mm_processor_kwargs, options, template: see `generate`.

        Raises:
          QueueFullError, RequestError, ValueError, RuntimeError: see `generate`.
        """
        requested = RequestOptions.of(
            options,
            reuse=reuse,
            compress=compress,
            cache_salt=cache_salt,
            priority=priority,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        name = self._requests.named(request_id)
        if not isinstance(sampling_params, SamplingParams | None):
            raise ValueError(f"sampling_params must be SamplingParams or None, got {type(sampling_params).__name__}")
        params = None if sampling_params is None else sampling_params.clone()  # the caller may change its object
        caller, called_at = self.service.caller, time.perf_counter()

        def chunk() -> RequestChunk[RequestOutput]:
            """Check the request. It runs in a thread, since its time depends on the caller's arguments."""
            render, own = self._renders(prompt, requested, template), {"params": params, "called_at": called_at}
            return caller.to_answer(self.service.call("prompt", [prompt], render, requested, "return", **own))

        async with self._requests.job(chunk, caller, name) as (job, progress):
            deltas = Deltas(caller.reporter, job.planned, job.answers, name)
            while True:  # at least once: the job may have ended already
                await progress.wait()
                progress.clear()
                delta = deltas.take()  # before the check: the last delta may end with an error
                self._requests.check(job, caller)
                if delta is not None:
                    yield delta
                    if delta.finished:
                        return

    async def check(
        self,
        prompts: Sequence[PromptLike],
        sampling_params: SamplingParams | None = None,
        *,
        reuse: Reuse | None = None,
        compress: Compress | None = None,
        cache_salt: str | TenantSalt | None = None,
        options: RequestOptions | None = None,
    ) -> None:
        """Check prompts that belong together, so that none of them runs if one is wrong.

        It does not find faults of pixels or logits; `generate` raises them.

        Args:
          prompts: texts, lists of token IDs, or dicts.
          sampling_params, reuse, compress, cache_salt, options: of all prompts, see `generate`.

        Raises:
          RequestError: a prompt is wrong; `errors` has the first one, by its index.
          ValueError, RuntimeError: see `generate`.
        """

        requested = RequestOptions.of(options, reuse=reuse, compress=compress, cache_salt=cache_salt)

        def first_error() -> tuple[int, ValueError] | None:
            render = self.service.continues(requested)
            call = self.service.call("prompt", prompts, render, requested, "return", params=sampling_params)
            return min(self.service.caller.to_answer(call).arrivals.errors.items(), default=None)

        if (found := await self._requests.run(first_error)) is not None:
            index, error = found
            raise RequestError({index: str(error)})

    async def abort(self, request_id: str) -> None:
        """End a request; its last output has the finish reason "abort". Does nothing if it is not in flight."""
        self._requests.abort(request_id)

    async def tokenize(
        self,
        prompt: PromptLike | Conversation,
        *,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        options: RequestOptions | None = None,
        **template: Unpack[TemplateOptions],
    ) -> npt.NDArray[np.int32]:
        """Return the token IDs of a prompt with its images expanded, int32 [n]. It decodes no pixels.

        Args:
          prompt, mm_processor_kwargs, options, template: see `generate`. Of the options, `cache_salt` determines whose
            uploaded files a message can name, and the others than `mm_processor_kwargs` have no effect.

        Raises:
          ValueError: the prompt is wrong.
          RuntimeError: the engine is closed.
        """

        used = RequestOptions.of(options, mm_processor_kwargs=mm_processor_kwargs)

        def tokens() -> npt.NDArray[np.int32]:
            return self.service.tokens(self._renders(prompt, used, template), prompt, used.cache_salt)

        return await self._requests.run(tokens)

    async def check_health(self) -> None:
        """Raise a RuntimeError if the engine can serve no more requests."""
        self.service.loop.check_alive()

    def stats(self) -> EngineStats:
        """Return counters and the current content of the KV pool, see `LLM.stats`."""
        return self.service.stats()

    async def get_tokenizer(self) -> Any:
        """Return the checkpoint's transformers tokenizer."""
        return self.service.renderer.tokenizer

    async def get_default_sampling_params(self) -> SamplingParams:
        """Return the checkpoint's sampling parameters, the default of all requests."""
        return self.service.preparation.sequences.default_params()

    @property
    def cache(self) -> ImageCache:
        """The image cache. Its methods that decode or wait block the event loop."""
        return self.service.images

    async def warmup(self, *, reuse: Reuse | None = None, verbose: bool = True) -> tuple[int, float]:
        """Prepare the engine so that the first requests do not wait, see `LLM.warmup`."""
        return await asyncio.to_thread(self.service.warmup, reuse, verbose=verbose)

    async def reset_mm_cache(self) -> None:
        """Forget all cached images, and all prompts in the KV pool."""
        await asyncio.to_thread(self.service.reset_mm_cache)

    async def reset_prefix_cache(self) -> None:
        """Forget all prompts in the KV pool; cached images stay."""
        await asyncio.to_thread(self.service.reset_prefix_cache)

    async def close(self) -> None:
        """End all requests with a RuntimeError, and free the memory of weights and KV pool."""
        await asyncio.to_thread(self.service.close)
        self._requests.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _renders(self, prompt: Any, options: RequestOptions, template: TemplateOptions) -> Callable[..., Prompt]:
        """Return the function that renders the prompt."""
        if isinstance(prompt, (str, Mapping)) or is_token_ids(prompt):
            render = self.service.continues(options)
            options_given = template_options(self.generate, template)
            if given := [name for name, value in options_given.items() if value is not None]:
                raise ValueError(f"{given[0]} requires a prompt with messages, got a prompt without messages")
            return render
        if not isinstance(prompt, Sequence):
            raise ValueError(f"prompt must be a string, a dict or a conversation, got {type(prompt).__name__}")
        return self.service.renders(self.generate, options, template)
