"""The engine for programs that serve: requests come one by one, answers come as they grow."""

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
from vlcache_jax.calls.in_flight import UnderWay
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
    """Serves one model to any number of requests at once::

        engine = AsyncLLM("Qwen/Qwen3-VL-8B-Instruct")
        async for output in engine.generate("Hello", SamplingParams(max_tokens=20)):
            print(output.outputs[0].text)

    Requests run together and end when they are done; each means the same as it would alone. One thread drives the
    device. It may be used from several event loops.

    Args:
      model: see `LLM`. A `Service` may have several fronts; the first that is closed closes it for all.
      max_waiting: requests at most that are not answered yet, those that run included.
      when_full: what happens to one more: "wait" until there is room, or "raise" a `QueueFullError`.
      options: see `LLM`.

    Attributes:
      service: the parts, for who measures them.
      max_model_len: tokens of prompt and answer at most.

    Raises:
      ValueError: `max_waiting` or `when_full` is wrong. Else what `LLM` raises.
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
        self._requests = UnderWay(max_waiting, when_full, shows=self.service.config.use_tqdm)

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
        """Answers a request; yields its output whenever there is more of it, the last time with `finished` set.

        Each output holds all there is so far; see `deltas` for what is new alone. Who stops asking for more aborts it.

        Args:
          prompt: as for `LLM.generate`, or a conversation as for `LLM.chat`.
          sampling_params: None is the checkpoint's own.
          request_id: by which it can be aborted; None: one is drawn.
          reuse, compress, cache_salt, options: see `LLM.chat`.
          mm_processor_kwargs, template: see `LLM.chat`; they are of conversations.
          priority: lower ones run first; among equals, who came first.

        Raises:
          QueueFullError: there are too many requests, and the engine was made to raise.
          RequestError: the request is wrong. It is a ValueError.
          NotFiniteError: logits are not finite. It is a RequestError.
          ValueError: another argument is wrong.
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
        """Answers a request as `generate` does, and yields what is new whenever there is something.

        A delta is as large as what is new in it, so that a long answer costs no more for each token than a short one.
        Joined they are what `generate` yields last: `vlcache_jax.outputs.OutputCollector` does that.

        Args:
          prompt, sampling_params, request_id: see `generate`.
          reuse, compress, cache_salt, priority, mm_processor_kwargs, options, template: see `generate`.

        Raises:
          QueueFullError, RequestError, ValueError, RuntimeError: see `generate`.
        """
        asked = RequestOptions.of(
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
        params = None if sampling_params is None else sampling_params.clone()  # the caller's may be set meanwhile
        caller, called_at = self.service.caller, time.perf_counter()

        def chunk() -> RequestChunk[RequestOutput]:
            """All that is checked, in a thread: how long it takes is the caller's choice."""
            render, own = self._renders(prompt, asked, template), {"params": params, "called_at": called_at}
            return caller.to_answer(self.service.call("prompt", [prompt], render, asked, "return", **own))

        async with self._requests.job(chunk, caller, name) as (job, more):
            deltas = Deltas(caller.reporter, job.planned, job.answers, name)
            while True:  # it may have ended long ago
                await more.wait()
                more.clear()
                delta = deltas.take()  # first: it may be the last one because of an error
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

        Only faults that show in pixels or logits are left to `generate`.

        Args:
          prompts: texts, token ids or dicts.
          sampling_params, reuse, compress, cache_salt, options: of all of them, see `generate`.

        Raises:
          RequestError: a prompt is wrong; its `errors` has the first one, by its index.
          ValueError, RuntimeError: see `generate`.
        """

        asked = RequestOptions.of(options, reuse=reuse, compress=compress, cache_salt=cache_salt)

        def first_error() -> tuple[int, ValueError] | None:
            render = self.service.continues(asked)
            call = self.service.call("prompt", prompts, render, asked, "return", params=sampling_params)
            return min(self.service.caller.to_answer(call).arrivals.errors.items(), default=None)

        if (found := await self._requests.run(first_error)) is not None:
            index, error = found
            raise RequestError({index: str(error)})

    async def abort(self, request_id: str) -> None:
        """Ends a request; its last output has the finish reason "abort". One that is not under way is none."""
        self._requests.abort(request_id)

    async def tokenize(
        self,
        prompt: PromptLike | Conversation,
        *,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        **template: Unpack[TemplateOptions],
    ) -> npt.NDArray[np.int32]:
        """Token ids of a prompt as the model sees it, images expanded; no pixel is decoded.

        Args:
          prompt, mm_processor_kwargs, template: see `generate`.

        Raises:
          ValueError: it is wrong.
          RuntimeError: the engine is closed.
        """

        def tokens() -> npt.NDArray[np.int32]:
            options = RequestOptions(mm_processor_kwargs=mm_processor_kwargs)
            return self.service.tokens(self._renders(prompt, options, template), prompt)

        return await self._requests.run(tokens)

    async def check_health(self) -> None:
        """Raises a RuntimeError if no request will be answered any more."""
        self.service.loop.check_alive()

    def stats(self) -> EngineStats:
        """See `LLM.stats`."""
        return self.service.stats()

    async def get_tokenizer(self) -> Any:
        """See `LLM.get_tokenizer`."""
        return self.service.renderer.tokenizer

    async def get_default_sampling_params(self) -> SamplingParams:
        """See `LLM.get_default_sampling_params`."""
        return self.service.intake.sequences.default_params()

    @property
    def cache(self) -> ImageCache:
        """The image cache; its methods that decode or wait block."""
        return self.service.images

    async def warmup(self, *, reuse: Reuse | None = None, verbose: bool = True) -> tuple[int, float]:
        """See `LLM.warmup`."""
        return await asyncio.to_thread(self.service.warmup, reuse, verbose=verbose)

    async def reset_mm_cache(self) -> None:
        """See `LLM.reset_mm_cache`."""
        await asyncio.to_thread(self.service.reset_mm_cache)

    async def reset_prefix_cache(self) -> None:
        """See `LLM.reset_prefix_cache`."""
        await asyncio.to_thread(self.service.reset_prefix_cache)

    async def close(self) -> None:
        """Ends all requests with a RuntimeError, and gives back the memory of weights and pool."""
        await asyncio.to_thread(self.service.close)
        self._requests.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _renders(self, prompt: Any, options: RequestOptions, template: TemplateOptions) -> Callable[..., Prompt]:
        """What renders the prompt."""
        if isinstance(prompt, (str, Mapping)) or is_token_ids(prompt):
            render = self.service.continues(options)
            beside = template_options(self.generate, template)
            if given := [name for name, value in beside.items() if value is not None]:
                raise ValueError(f"{given[0]} must be left out, got it beside a prompt that has no messages")
            return render
        if not isinstance(prompt, Sequence):
            raise ValueError(f"prompt must be a string, a dict or a conversation, got {type(prompt).__name__}")
        return self.service.renders(self.generate, options, template)
