"""The engine for programs that serve: requests come one by one, answers come as they grow."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from vlcache_jax.cache.keys import TenantSalt
from vlcache_jax.calls import Conversation, PromptLike, is_token_ids
from vlcache_jax.config import Compress, EngineConfig, EngineOptions, Reuse, shows_options
from vlcache_jax.engine.engine import EngineStats
from vlcache_jax.engine.loop import CLOSED
from vlcache_jax.engine.request import NOT_FINITE
from vlcache_jax.image_cache import ImageCache
from vlcache_jax.inputs.prompt import Prompt, TemplateOptions
from vlcache_jax.outputs import Deltas, OutputCollector, RequestDelta, RequestOutput
from vlcache_jax.progress import Progress
from vlcache_jax.sampling import SamplingParams
from vlcache_jax.service import Service, template_options
from vlcache_jax.serving import Call, Job, NotFiniteError, RequestError

_THREADS = 32  # requests whose images are being identified; others wait for one of them


class QueueFullError(RuntimeError):
    """There are as many requests as the engine takes."""


class AsyncLLM:
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
        self._room = _Room(max_waiting, raises=when_full == "raise")
        self._threads = ThreadPoolExecutor(_THREADS, "vlcache-requests")
        self._jobs: dict[str, Job | None] = {}  # None: it is still being identified
        self._aborted: set[str] = set()
        self._lock = threading.Lock()  # of both, as there may be several event loops
        self._numbers = itertools.count()

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
        **template: Unpack[TemplateOptions],
    ) -> AsyncIterator[RequestOutput]:
        """Answers a request; yields its output whenever there is more of it, the last time with `finished` set.

        Each output holds all there is so far; see `deltas` for what is new alone. Who stops asking for more aborts it.

        Args:
          prompt: as for `LLM.generate`, or a conversation as for `LLM.chat`.
          sampling_params: None is the checkpoint's own.
          request_id: by which it can be aborted; None: one is drawn.
          reuse, compress, cache_salt, mm_processor_kwargs, template: see `LLM.chat`; the last two are of conversations.
          priority: lower ones run first; among equals, who came first.

        Raises:
          QueueFullError: there are too many requests, and the engine was made to raise.
          RequestError: the request is wrong. It is a ValueError.
          NotFiniteError: logits are not finite. It is a RequestError.
          ValueError: another argument is wrong.
          RuntimeError: the engine is closed, or failed.
        """
        collector = OutputCollector()
        deltas = self.deltas(
            prompt,
            sampling_params,
            request_id,
            reuse=reuse,
            compress=compress,
            cache_salt=cache_salt,
            priority=priority,
            mm_processor_kwargs=mm_processor_kwargs,
            **template,
        )
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
        **template: Unpack[TemplateOptions],
    ) -> AsyncGenerator[RequestDelta]:
        """Answers a request as `generate` does, and yields what is new whenever there is something.

        A delta is as large as what is new in it, so that a long answer costs no more for each token than a short one.
        Joined they are what `generate` yields last: `vlcache_jax.outputs.OutputCollector` does that.

        Args:
          prompt, sampling_params, request_id, reuse, compress, cache_salt, priority, mm_processor_kwargs, template: see
            `generate`.

        Raises:
          QueueFullError, RequestError, ValueError, RuntimeError: see `generate`.
        """
        if request_id is None:
            request_id = f"request-{next(self._numbers)}"
        if not isinstance(request_id, str) or not request_id:
            raise ValueError(f"request_id must be a non-empty string, got {request_id!r}")
        if not isinstance(sampling_params, SamplingParams | None):
            raise ValueError(f"sampling_params must be SamplingParams or None, got {type(sampling_params).__name__}")
        params = None if sampling_params is None else sampling_params.clone()  # the caller's may be set meanwhile
        render = self._renders(prompt, mm_processor_kwargs, **template)
        call = self.service.call(
            "prompt", [prompt], render, reuse, cache_salt, "return", compress, params=params, priority=priority
        )
        with self._lock:
            if request_id in self._jobs:
                raise ValueError(f"request_id must not be that of a request under way, got {request_id!r}")
            self._jobs[request_id] = None
        try:
            await self._room.enter(request_id)
            try:
                # Closed at once: otherwise it would end some time after its room has been given away.
                async with contextlib.aclosing(self._stream(call, request_id)) as told:
                    async for delta in told:
                        yield delta
            finally:
                self._room.leave()
        finally:
            with self._lock:
                del self._jobs[request_id]
                self._aborted.discard(request_id)

    async def abort(self, request_id: str) -> None:
        """Ends a request; its last output has the finish reason "abort". One that is not under way is none."""
        with self._lock:
            if request_id in self._jobs:
                self._aborted.add(request_id)
                if (job := self._jobs[request_id]) is not None:
                    job.abort()
                self._room.let_in(request_id)

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
        render = self._renders(prompt, mm_processor_kwargs, **template)
        return await asyncio.wrap_future(self._threads.submit(self.service.tokens, render, prompt))

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
        self._threads.shutdown(wait=False)  # what is still to arrive is told by the engine that it is closed

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _renders(
        self, prompt: Any, mm_processor_kwargs: Mapping[str, Any] | None, **template: Unpack[TemplateOptions]
    ) -> Callable[..., Prompt]:
        """What renders the prompt."""
        if isinstance(prompt, (str, Mapping)) or is_token_ids(prompt):
            if mm_processor_kwargs is not None:
                raise ValueError("mm_processor_kwargs must stand in the prompt's dict, got them beside it")
            beside = template_options(self.generate, template)
            if given := [name for name, value in beside.items() if value is not None]:
                raise ValueError(f"{given[0]} must be left out, got it beside a prompt that has no messages")
            return self.service.renderer.from_prompt
        if not isinstance(prompt, Sequence):
            raise ValueError(f"prompt must be a string, a dict or a conversation, got {type(prompt).__name__}")
        return self.service.renders(self.generate, mm_processor_kwargs, **template)

    async def _stream(self, call: Call, request_id: str) -> AsyncGenerator[RequestDelta]:
        events = asyncio.get_running_loop()
        more = asyncio.Event()
        caller = self.service.caller

        def heard(_: Job) -> None:
            events.call_soon_threadsafe(more.set)

        def arrive() -> Job:
            with Progress("serving", show=False) if not self.service.config.use_tqdm else contextlib.nullcontext():
                return caller.arrive(call, heard)

        try:
            arriving = self._threads.submit(arrive)
        except RuntimeError as error:
            raise RuntimeError(CLOSED) from error
        try:
            job = await asyncio.shield(asyncio.wrap_future(arriving))
        except BaseException:
            # By the thread itself: the event loop may be gone when it has arrived.
            if not arriving.cancel():
                arriving.add_done_callback(lambda done: None if done.exception() else caller.end(done.result()))
            raise
        answers = job.answers
        with self._lock:
            self._jobs[request_id] = job
            if request_id in self._aborted:
                job.abort()
        deltas = Deltas(caller.reporter, job.planned, answers, request_id)
        try:
            while True:  # it may have ended long ago
                await more.wait()
                more.clear()
                delta = deltas.take()  # first: it may be the last one because of an error
                for fault in (answer.end.fault for answer in answers if answer.end.fault is not None):
                    raise RuntimeError(str(fault)) from fault
                if wrong := caller.reporter.error(job.planned, *answers):
                    is_flaw = any(answer.end.error == NOT_FINITE for answer in answers)
                    raise (NotFiniteError if is_flaw else RequestError)({0: wrong})
                if delta is not None:
                    yield delta
                    if delta.finished:
                        return
        finally:
            caller.end(job)


class _Room:
    """Lets a number of requests in; the others wait in their order, each in its event loop."""

    def __init__(self, size: int, *, raises: bool):
        self._size, self._raises = size, raises
        self._used = 0
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None], str]] = deque()
        self._lock = threading.Lock()

    async def enter(self, request_id: str) -> None:
        """Raises a QueueFullError if there is no room, and nobody is to wait."""
        with self._lock:
            if self._used < self._size:
                self._used += 1
                return
            if self._raises:
                raise QueueFullError(f"the engine takes max_waiting = {self._size} requests at a time; try again later")
            events = asyncio.get_running_loop()
            turn = events.create_future()
            self._waiting.append((events, turn, request_id))
        try:
            await turn
        except BaseException:
            with self._lock:
                is_waiting = (events, turn, request_id) in self._waiting
                if is_waiting:
                    self._waiting.remove((events, turn, request_id))
            if not is_waiting:  # it has been let in
                self.leave()
            raise

    def let_in(self, request_id: str) -> None:
        """Whoever waits under this name need not any more: it is to end, and will take no room for long."""
        with self._lock:
            for waiting in [one for one in self._waiting if one[2] == request_id]:
                self._waiting.remove(waiting)
                with contextlib.suppress(RuntimeError):  # its event loop is closed
                    waiting[0].call_soon_threadsafe(_let_in, waiting[1])
                    self._used += 1

    def leave(self) -> None:
        with self._lock:
            while self._waiting and self._used <= self._size:
                events, turn, _ = self._waiting.popleft()
                with contextlib.suppress(RuntimeError):  # its event loop is closed
                    events.call_soon_threadsafe(_let_in, turn)
                    return
            self._used -= 1


def _let_in(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)
