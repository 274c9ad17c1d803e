"""Public engine: answers conversations that contain images and videos."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Protocol, Self, TypeGuard, Unpack

from vlcache_jax.calls.caller import Conversation, PromptLike, in_order, is_token_ids
from vlcache_jax.calls.groups import Call
from vlcache_jax.common.checks import check_flags, short
from vlcache_jax.common.vllm_compat import CALLS, Absent, VllmCallOptions, ours
from vlcache_jax.compress.policies import Compressor
from vlcache_jax.config import EngineConfig, EngineOptions, shows_options
from vlcache_jax.embedding import Embedder
from vlcache_jax.engine.engine import EngineStats
from vlcache_jax.image_cache import ImageCache
from vlcache_jax.inputs.prompt import TemplateOptions
from vlcache_jax.outputs import RequestOutput, Score
from vlcache_jax.pallas_kernels import dispatch
from vlcache_jax.request_options import Compress, RequestOptions, Reuse
from vlcache_jax.sampling import SamplingParams
from vlcache_jax.service import Service

ConversationLike = Conversation | Mapping[str, Any]


class Retrieves(Protocol):
    """Retrieval that lets answers search a library: see `vlcache_jax.library.SearchOptions`."""

    def answered(
        self,
        llm: LLM,
        conversations: Sequence[ConversationLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        name: str,
        options: RequestOptions,
        more: Mapping[str, Any],
    ) -> list[RequestOutput]:
        """Return one output per conversation. `more` has the remaining arguments of `LLM.chat`."""


class LLM(Embedder):
    """Engine that serves one Qwen vision-language model::

        with LLM("Qwen/Qwen3-VL-8B-Instruct") as llm:
            image = {"type": "image", "image": "street.jpg"}
            question = {"type": "text", "text": "What does the sign say?"}
            [answer] = llm.chat([[{"role": "user", "content": [image, question]}]])
            print(answer.outputs[0].text)

    A call gives the outputs that its requests give one by one, in list order. All requests are checked before any runs.
    Calls from several threads run together. The engine keeps serving after an error or Ctrl-C.

    Args:
      model: a converted checkpoint, a Hugging Face directory, a Hub ID, or "tiny-vqa", a small trained model that ships
        with the package; or an `EngineConfig`, or an open `Service`.
      options: options of `EngineConfig` or of vLLM. The engine ignores vLLM options that do not affect outputs, and
        logs a warning.

    Attributes:
      cache: the image cache.
      max_model_len: maximum number of tokens of a prompt and its output.
      service: the parts of the engine, for measurements.

    Raises:
      FileNotFoundError, ValueError: the checkpoint is missing, damaged or of an unknown model, or an option is wrong.
      TypeError: an option is unknown; for options of vLLM, the message names the equivalent.
      NotImplementedError: the requested implementation does not support this model, dtype or device.
      MemoryError: weights and KV pool do not fit. Nothing has been loaded then.
    """

    from_engine_args = Absent("write LLM(model, ...) with the same arguments")

    @shows_options
    def __init__(self, model: str | os.PathLike[str] | EngineConfig | Service, **options: Unpack[EngineOptions]):
        self.service = Service.of(model, **options)
        self.cache: ImageCache = self.service.images
        self.max_model_len: int = self.service.device.memory.max_model_len

    __init__.__qualname__ = "LLM"  # Python's own errors print this name

    def chat(
        self,
        conversations: Conversation | Sequence[ConversationLike] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        messages: Conversation | Sequence[ConversationLike] | None = None,
        reuse: Reuse | None = None,
        compress: Compress | None = None,
        cache_salt: str | None = None,
        verify: bool = False,
        retrieve: Retrieves | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        options: RequestOptions | None = None,
        on_error: str = "raise",
        **template: Unpack[TemplateOptions],
    ) -> list[RequestOutput]:
        """Answer conversations.

        Args:
          conversations: lists of messages `{"role": ..., "content": ...}`, or one such list. The content is a string or
            a list of parts in the format of OpenAI (`image_url`, `text`) or Hugging Face (`image`, `text`). An image is
            a path, bytes, a `data:` URL, a PIL image, an array, or an http(s) URL if the engine allows it; `uuid` may
            give it an ID of your own. A part may also be a `video` or `video_url`: a file, or frames as a list, an
            array or a tensor, with options such as `fps` (`vlcache_jax.inputs.videos.VideoOptions`). The chat template
            receives all other keys of a message, such as `tool_calls` and `reasoning_content`. In a list, a
            conversation may also be a dict `{"messages": [...], "chat_template": ...}` with its own template.
          sampling_params: one for all, or a list with one per conversation. None: the checkpoint's defaults.
          use_tqdm: show a progress bar, regardless of the engine's option. Default True.
          messages: vLLM's name of `conversations`.
          reuse: reuse mode, see `EngineConfig`. None: the engine's.
          compress: policy that selects the prompt KV to keep after the first token. "vl-cache-0.1" keeps about a tenth,
            selected by the attention of the text after the last image. Other policies: "postvision-A", "snapkv-A",
            "pyramidkv-A", "h2o-A", "zipcache-A", "streaming-A", "random-A", and the objects of
            `vlcache_jax.compress.policies`. `RequestOutput.compression` reports the result. Needs
            `compressed_kv_bytes`. None: keep all.
          cache_salt: calls with different salts share nothing in the cache. None is a salt, too.
          verify: compare with a run without reuse (`RequestOutput.verification`), several times slower. Default False.
          retrieve: a `vlcache_jax.library.Retriever`, or `SearchOptions` with limits: a tool with which the model
            finds images of a library and continues. `RequestOutput.searches` lists the searches. None: no tool.
          mm_processor_kwargs: settings of images and videos, see `EngineConfig`; `fps` may be a list, one per video.
          options: the options above as one `RequestOptions`; each option is set there or by its keyword.
          on_error: effect of a wrong conversation, image or parameter of one request. "raise" (default) stops the call.
            "return" answers the other requests, and `RequestOutput.error` has the reason.
          template: `chat_template`, a Jinja text that replaces the checkpoint's, or the path of its file;
            `chat_template_kwargs`, variables of the template; `continue_final_message=True`, continue the last message,
            which must be the assistant's; `add_generation_prompt=False`, leave out the beginning of the assistant's
            turn; `tools`, functions in OpenAI's format that an answer may call: its text then contains the calls as
            the model writes them; `tool_choice="none"`, leave the tools out.

        Texts are not escaped: control tokens in them, such as `<|im_end|>`, act as control tokens.

        Returns:
          One output per conversation, in the order of the conversations.

        Raises:
          RequestError: requests are wrong. It is a ValueError. One error names all faults that arguments and file
            headers show, before anything runs. An image that fails to decode, or logits that are not finite, stop the
            call once the work in flight is done; the attribute `outputs` of the error has the outputs until then.
          ValueError: another argument is wrong. Nothing has run then.
        """
        check_flags(verify=verify, use_tqdm=use_tqdm)
        options = RequestOptions.of(
            options, reuse=reuse, compress=compress, cache_salt=cache_salt, mm_processor_kwargs=mm_processor_kwargs
        )
        render = self.service.renders(self.chat, options, template)
        if messages is not None and conversations is not None:
            raise ValueError("conversations and messages are mutually exclusive, got both")
        given, kind = (conversations, "conversations") if messages is None else (messages, "messages")
        listed, name = _listed_conversations(given, kind)
        if retrieve is not None:
            more = {"verify": verify, "use_tqdm": use_tqdm, "on_error": on_error, **template}
            return retrieve.answered(self, listed, sampling_params, name, options, more)
        call = self.service.call(name, listed, render, options, on_error, params=sampling_params)
        return _answers(self.service, call, verify=verify, show=use_tqdm)

    def chat_iter(
        self,
        conversations: Iterable[ConversationLike],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        reuse: Reuse | None = None,
        compress: Compress | Iterable[Compress | None] | None = None,
        cache_salt: str | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        options: RequestOptions | None = None,
        on_error: str = "raise",
        **template: Unpack[TemplateOptions],
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Answer a stream of conversations; yield (index, output) as each ends, in any order.

        The engine reads some dozens of conversations, which keep it busy, and more once some are answered. A job of a
        million requests therefore takes little memory, and loses no output that was yielded if it is stopped.

        Args:
          conversations: an iterable of conversations.
          sampling_params: one for all, or an iterable with at least one per conversation.
          compress: see `chat`; one for all, or an iterable with at least one per conversation.
          use_tqdm, reuse, cache_salt, mm_processor_kwargs, options, on_error, template: see `chat`. An error of a
            request with `on_error="raise"`, and an error of the iterables, end the job once the outputs of all running
            requests are yielded.

        Raises:
          RequestError, ValueError: see `chat`.
        """
        check_flags(use_tqdm=use_tqdm)
        _check_iterables(conversations, sampling_params)
        if isinstance(sampling_params, SamplingParams):
            sampling_params = sampling_params.clone()  # the caller may change its object while the job runs
        options = RequestOptions.of(
            options, reuse=reuse, compress=compress, cache_salt=cache_salt, mm_processor_kwargs=mm_processor_kwargs
        )
        options, compress_each = _split(options)
        render = self.service.renders(self.chat_iter, options, template)
        call = self.service.call("conversations[{}]", [], render, options, on_error)
        compressors = None if compress_each is None else _compressors(self.service.compressor_of, compress_each)
        total = len(conversations) if isinstance(conversations, Sized) else None
        size = self.service.device.runner.buckets.max_sequences
        calls = _calls(call, conversations, sampling_params, compressors, size)
        return self.service.caller.answers(calls, total=total, show=use_tqdm, returns_all=False)

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        reuse: Reuse | None = None,
        compress: Compress | None = None,
        cache_salt: str | None = None,
        options: RequestOptions | None = None,
        verify: bool = False,
        on_error: str = "raise",
        **foreign: Unpack[VllmCallOptions],
    ) -> list[RequestOutput]:
        """Continue prompts without a chat template.

        Args:
          prompts: a string, a dict, a list of token IDs, or a list of these. A dict has "prompt", a text with one
            `<|image_pad|>` per image, or "prompt_token_ids", and may have "multi_modal_data": {"image": [...]},
            "multi_modal_uuids": {"image": [...]} and "mm_processor_kwargs": {...}. Videos use `<|video_pad|>` and
            "video". Results of `qwen_vl_utils.process_vision_info` are accepted.
          sampling_params, use_tqdm, reuse, compress, cache_salt, options, verify, on_error: see `chat`.
          foreign: arguments of vLLM, see `LLM`.

        Returns:
          One output per prompt, in the order of the prompts.

        Raises:
          RequestError, ValueError: see `chat`.
          TypeError: an argument is unknown; for arguments of vLLM, the message names the equivalent.
        """
        check_flags(verify=verify, use_tqdm=use_tqdm)
        if foreign:
            ours("generate", CALLS, foreign, inspect.signature(self.generate).parameters)
        options = RequestOptions.of(options, reuse=reuse, compress=compress, cache_salt=cache_salt)
        (listed, name), render = _listed_prompts(prompts), self.service.continues(options)
        call = self.service.call(name, listed, render, options, on_error, params=sampling_params)
        return _answers(self.service, call, verify=verify, show=use_tqdm)

    def score(
        self,
        conversations: Conversation | Sequence[ConversationLike],
        continuations: Sequence[str | Sequence[int]],
        *,
        reuse: Reuse | None = None,
        cache_salt: str | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        options: RequestOptions | None = None,
        keep_logits: bool = False,
        use_tqdm: bool = True,
        on_error: str = "raise",
        **template: Unpack[TemplateOptions],
    ) -> list[Score]:
        """Return the log-probabilities of given continuations.

        Args:
          conversations: see `chat`.
          continuations: one text or list of token IDs per conversation.
          reuse, cache_salt, mm_processor_kwargs, options, use_tqdm, on_error, template: see `chat`.
          keep_logits: also return the logits that predict each token, float32 [n, V]. Default False.

        Returns:
          One score per conversation, in the order of the conversations.

        Raises:
          RequestError, ValueError: see `chat`; also if a continuation is empty, or there is not one per conversation.
        """
        check_flags(keep_logits=keep_logits, use_tqdm=use_tqdm)
        options = RequestOptions.of(
            options, reuse=reuse, cache_salt=cache_salt, mm_processor_kwargs=mm_processor_kwargs
        )
        render = self.service.renders(self.score, options, template)
        listed, name = _listed_conversations(conversations, "conversations")
        call = self.service.call(name, listed, render, options, on_error)
        return in_order(self.service.caller.scores(call, continuations, keep_logits=keep_logits, show=use_tqdm))

    def warmup(self, *, reuse: Reuse | None = None, verbose: bool = True) -> tuple[int, float]:
        """Prepare the engine so that the first requests do not wait.

        It compiles all programs, allocates the KV pool, and imports the decoders of images and videos. It also reads
        and hashes the weights of a Hugging Face directory, whose hash is part of entry keys. Compiled programs are
        cached on disk, so the next process only loads them.

        Args:
          reuse: reuse mode of the expected calls. None: the engine's.
          verbose: print progress and the compiled programs to stderr. Default True.

        Returns:
          The number of compiled programs, and the time in seconds.
        """
        return self.service.warmup(reuse, verbose=verbose)

    @property
    def kernels(self) -> dict[tuple[Any, ...], tuple[dispatch.Choice, ...]]:
        """Kernels in the programs compiled so far: the implementation of each case, and why it was chosen.

        The key of a program is its name and its sizes.
        """
        return self.service.kernels

    def stats(self) -> EngineStats:
        """Return counters and the current content of the KV pool; `cache.stats()` has those of the image cache."""
        return self.service.stats()

    def get_tokenizer(self) -> Any:
        """Return the checkpoint's transformers tokenizer."""
        return self.service.renderer.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the checkpoint's sampling parameters, the default of all calls."""
        return self.service.preparation.sequences.default_params()

    @property
    def fingerprint(self) -> str:
        """Hash of the weights, as in schedule files. The first use hashes all weights of a Hugging Face directory."""
        return self.service.checkpoint.source_digest

    def reset_mm_cache(self) -> None:
        """Forget all cached images, and all prompts in the KV pool."""
        self.service.reset_mm_cache()

    def reset_prefix_cache(self) -> None:
        """Forget all prompts in the KV pool; cached images stay."""
        self.service.reset_prefix_cache()

    def close(self) -> None:
        """Close the engine and free the memory of weights and KV pool. Calls in flight end with an error."""
        self.service.close()

    def __repr__(self) -> str:
        checkpoint = self.service.checkpoint
        return f"{type(self).__name__}({str(checkpoint.directory)!r}, dtype={checkpoint.dtype.name!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _answers(service: Service, call: Call, *, verify: bool, show: bool) -> list[RequestOutput]:
    return in_order(service.caller.answers([call], total=len(call.listed), show=show, verify=verify))


def _split(options: RequestOptions) -> tuple[RequestOptions, Iterable[Compress | None] | None]:
    """Return the common options, and the values of `compress` per request or None if one applies to all."""
    compress_each = options.compress if _is_iterable(options.compress) else None
    return options if compress_each is None else dataclasses.replace(options, compress=None), compress_each


def _is_iterable(given: Any) -> TypeGuard[Iterable[Any]]:
    """Return whether `given` has one value per conversation; a string is one value for all."""
    return isinstance(given, Iterable) and not isinstance(given, str | Mapping)


def _check_iterables(conversations: Any, params: Any) -> None:
    """Raise a ValueError unless `LLM.chat_iter` accepts the arguments."""
    if not _is_iterable(conversations):
        raise ValueError(f"conversations must be an iterable of conversations, got {type(conversations).__name__}")
    if not (isinstance(params, SamplingParams | None) or _is_iterable(params)):
        raise ValueError(f"sampling_params must be SamplingParams, an iterable of them or None, got {short(params)}")


def _compressors(
    read: Callable[[Compress | None], Compressor | None], given: Iterable[Compress | None]
) -> Iterable[Compressor | ValueError | None]:
    """Return the compressor of each request, or the error of its value."""

    def own(index: int, requested: Compress | None) -> Compressor | ValueError | None:
        try:
            return read(requested)
        except ValueError as error:
            return ValueError(f"conversations[{index}] {error}")

    return itertools.starmap(own, enumerate(given))


def _calls(
    call: Call,
    conversations: Iterable[ConversationLike],
    params: SamplingParams | Iterable[SamplingParams] | None,
    compressors: Iterable[Compressor | ValueError | None] | None,
    size: int,
) -> Iterator[Call]:
    """Yield a call per `size` conversations, with their sampling parameters and compressors if each has its own.

    An error of an iterable is raised after the calls of the conversations before it.

    Raises:
      ValueError: there are fewer parameters or compressors than conversations.
    """
    given: dict[str, Iterator[Any]] = {
        "sampling_params": itertools.repeat(None) if isinstance(params, SamplingParams | None) else iter(params),
        "compress": itertools.repeat(None) if compressors is None else iter(compressors),
    }
    faults: list[Exception] = []

    def requests() -> Iterator[tuple[Any, ...]]:
        try:
            for conversation in conversations:
                own = {name: next(each, faults) for name, each in given.items()}
                if short_of := [name for name, one in own.items() if one is faults]:
                    raise ValueError(f"{short_of[0]} must have a value for each conversation, got fewer")
                yield conversation, *own.values()
        except Exception as fault:
            faults.append(fault)

    for number, batch in enumerate(itertools.batched(requests(), size)):
        listed, own, compress = zip(*batch, strict=True)
        yield dataclasses.replace(
            call,
            listed=listed,
            params=params if isinstance(params, SamplingParams | None) else own,
            compressors=None if compressors is None else compress,
            first=size * number,
        )
    for fault in faults:
        raise fault


def _listed_conversations(given: Any, kind: str) -> tuple[Sequence[ConversationLike], str]:
    """Return conversations, and their name in errors; `kind` is the name of the argument."""
    if isinstance(given, (str, Mapping)):  # probably meant as one conversation, which errors call messages
        raise ValueError(
            'messages must be a list such as [{"role": "user", "content": ...}], or a list of such lists, '
            f"got {type(given).__name__}"
        )
    if not isinstance(given, Sequence):
        raise ValueError(f"{kind} must be a list of conversations, got {type(given).__name__}")
    is_one = bool(given) and isinstance(given[0], Mapping) and "messages" not in given[0]
    return ([given], "messages") if is_one else (given, f"{kind}[{{}}]")


def _listed_prompts(prompts: Any) -> tuple[Sequence[PromptLike], str]:
    """Return prompts, and their name in errors."""
    if isinstance(prompts, (str, Mapping)) or is_token_ids(prompts):
        return [prompts], "prompts"
    if not isinstance(prompts, Sequence):
        raise ValueError(f"prompts must be a string, a dict or a list of these, got {type(prompts).__name__}")
    return prompts, "prompts[{}]"
