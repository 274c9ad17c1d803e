"""The public engine: conversations with images in, answers out."""

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

Asked = Conversation | Mapping[str, Any]


class Retrieves(Protocol):
    """Who lets answers search: see `vlcache_jax.library.Searches`."""

    def answered(
        self,
        llm: LLM,
        conversations: Sequence[Asked],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        name: str,
        options: RequestOptions,
        more: Mapping[str, Any],
    ) -> list[RequestOutput]:
        """The answers to conversations; `more` holds the other arguments of `LLM.chat`."""


class LLM(Embedder):
    """Serves one Qwen vision-language model::

        with LLM("Qwen/Qwen3-VL-8B-Instruct") as llm:
            picture = {"type": "image", "image": "street.jpg"}
            question = {"type": "text", "text": "What does the sign say?"}
            [answer] = llm.chat([[{"role": "user", "content": [picture, question]}]])
            print(answer.outputs[0].text)

    A call means the same as its requests run one by one, in list order. Every request is checked before anything runs.
    Calls from several threads run together. After an error or Ctrl-C the engine serves on.

    Args:
      model: a converted checkpoint, a Hugging Face directory, the id of a model on the hub, or "tiny-vqa", a small
        trained model that ships with the package; or an `EngineConfig`; or a `Service` that is open.
      options: those of `EngineConfig`, and those of vLLM; of the latter, those on which no answer depends are ignored,
        with a warning.

    Attributes:
      cache: the image cache.
      max_model_len: tokens of prompt and answer at most.
      service: the parts, for who measures them.

    Raises:
      FileNotFoundError, ValueError: the checkpoint is missing, damaged or of an unknown model, or an option is wrong.
      TypeError: there is no such option; of vLLM's the error says what to write.
      NotImplementedError: the implementation asked for does not do this model, dtype or device.
      MemoryError: weights and pool do not fit. Nothing has been loaded then.
    """

    from_engine_args = Absent("write LLM(model, ...) with the same arguments")

    @shows_options
    def __init__(self, model: str | os.PathLike[str] | EngineConfig | Service, **options: Unpack[EngineOptions]):
        self.service = Service.of(model, **options)
        self.cache: ImageCache = self.service.images
        self.max_model_len: int = self.service.device.memory.max_model_len

    __init__.__qualname__ = "LLM"  # by which Python's own errors call it

    def chat(
        self,
        conversations: Conversation | Sequence[Asked] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        messages: Conversation | Sequence[Asked] | None = None,
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
        """Answers conversations.

        Args:
          conversations: lists of messages `{"role": ..., "content": ...}`, or one such list. Content is a string, or a
            list of parts in the shape of OpenAI (`image_url`, `text`) or Hugging Face (`image`, `text`). An image is a
            path, bytes, a `data:` URL, a PIL image, an array, or, where allowed, an http(s) URL; it may have a `uuid`,
            your own id of the picture. A part may also be a `video` or `video_url`: frames as a list, an array or
            a tensor, or a file, with `fps` and the like beside it (`vlcache_jax.inputs.videos.VideoOptions`). What
            else a message holds, such as `tool_calls` and `reasoning_content`, is for the chat template. In a list, a
            conversation may also be a dict, `{"messages": [...], "chat_template": ...}`, with a template of its own.
          sampling_params: for all, or one for each conversation; None is the checkpoint's own.
          use_tqdm: show a progress bar, whatever the engine was opened with.
          messages: vLLM's name for conversations.
          reuse: see the class; None is what the engine was made with.
          compress: once the first token is there, what of the prompt's K, V the answer goes on with: "vl-cache-0.1" is
            about a tenth of them, chosen by what the text behind the last image looks at; so are "postvision-A",
            "snapkv-A", "pyramidkv-A", "h2o-A", "zipcache-A", "streaming-A", "random-A", and the objects of
            `vlcache_jax.compress.policies`. The output tells in `compression` what was kept. It needs
            `compressed_kv_bytes`. None: all.
          cache_salt: calls with different salts share nothing in the cache; None is a salt of its own.
          verify: also run each request cold, and compare (`RequestOutput.verification`). Takes several times as long.
          retrieve: a `vlcache_jax.library.Retriever`, or `Searches` with bounds: the model is told of a tool that finds
            pictures of a library, and an answer that calls it goes on with what was found. `output.searches` tells.
          mm_processor_kwargs: settings of images and videos, see `EngineConfig`; `fps` may be a list, one a video.
          options: the same as `RequestOptions`; an option may stand there or be a keyword.
          on_error: what a wrong conversation, image or parameter of a row does. "raise": it stops the call; "return":
            the other rows are answered, and its output tells in `error`.
          template: `chat_template`, a Jinja text in place of the checkpoint's or the path of its file;
            `chat_template_kwargs`, names that it uses; `continue_final_message=True` goes on with the last message,
            which is the assistant's; `add_generation_prompt=False` leaves out the beginning of the assistant's turn;
            `tools`, functions in OpenAI's shape that an answer may call: its text then holds the calls as the model
            writes them; `tool_choice="none"` leaves them out.

        Texts are taken as they are: control tokens in them, such as `<|im_end|>`, act as such.

        Returns:
          One output for each conversation, in their order.

        Raises:
          RequestError: rows are wrong. All that arguments and heads of files tell are named at once, before anything
            runs. A picture that breaks only when it is decoded, and logits that are not finite, stop the call after
            what is under way; the error carries the `outputs` that there are until then. It is a ValueError.
          ValueError: another argument is wrong. Nothing has run then.
        """
        check_flags(verify=verify, use_tqdm=use_tqdm)
        options = RequestOptions.of(
            options, reuse=reuse, compress=compress, cache_salt=cache_salt, mm_processor_kwargs=mm_processor_kwargs
        )
        render = self.service.renders(self.chat, options, template)
        if messages is not None and conversations is not None:
            raise ValueError("conversations must be left out beside messages, got both")
        given, kind = (conversations, "conversations") if messages is None else (messages, "messages")
        listed, name = _listed_conversations(given, kind)
        if retrieve is not None:
            more = {"verify": verify, "use_tqdm": use_tqdm, "on_error": on_error, **template}
            return retrieve.answered(self, listed, sampling_params, name, options, more)
        call = self.service.call(name, listed, render, options, on_error, params=sampling_params)
        return _answers(self.service, call, verify=verify, show=use_tqdm)

    def chat_iter(
        self,
        conversations: Iterable[Asked],
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
        """Answers conversations without end: yields (index, output) as they end, whatever their order.

        Of the conversations so many are taken as keep the engine busy, some dozens at a time, and no more until some
        have been answered. So a job of a million rows takes little memory, and where it is stopped nothing is lost that
        has been yielded.

        Args:
          conversations: anything that gives one conversation after the other.
          sampling_params: for all, or an iterable that gives one for each conversation, or more.
          compress: see `chat`; for all, or an iterable that gives one for each conversation, or more.
          use_tqdm, reuse, cache_salt, mm_processor_kwargs, options, on_error, template: see `chat`. A wrong row that
            is to be raised ends the job when what runs then has been yielded, and so does an error of the iterables.

        Raises:
          RequestError, ValueError: see `chat`.
        """
        check_flags(use_tqdm=use_tqdm)
        _check_iterables(conversations, sampling_params)
        if isinstance(sampling_params, SamplingParams):
            sampling_params = sampling_params.clone()  # the caller's may be set while the job runs
        options = RequestOptions.of(
            options, reuse=reuse, compress=compress, cache_salt=cache_salt, mm_processor_kwargs=mm_processor_kwargs
        )
        options, of_rows = _split(options)
        render = self.service.renders(self.chat_iter, options, template)
        call = self.service.call("conversations[{}]", [], render, options, on_error)
        compressors = None if of_rows is None else _compressors(self.service.compressor_of, of_rows)
        total = len(conversations) if isinstance(conversations, Sized) else None
        size = self.service.device.runner.ladder.max_sequences
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
        """Continues prompts as they are, without a chat template.

        Args:
          prompts: a string, a dict or a list of token ids, or a list of these. A dict holds "prompt", a text with one
            `<|image_pad|>` for each image, or "prompt_token_ids", and may hold "multi_modal_data": {"image": [...]},
            "multi_modal_uuids": {"image": [...]} and "mm_processor_kwargs": {...}. Videos have `<|video_pad|>` and
            "video". What `qwen_vl_utils.process_vision_info` returns is taken as it is.
          sampling_params, use_tqdm, reuse, compress, cache_salt, options, verify, on_error: see `chat`.
          foreign: see the class.

        Returns:
          One output for each prompt, in their order.

        Raises:
          RequestError, ValueError: see `chat`.
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
        conversations: Conversation | Sequence[Asked],
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
        """Log-probabilities of forced continuations.

        Args:
          conversations: see `chat`.
          continuations: one for each conversation, a text or token ids.
          reuse, cache_salt, mm_processor_kwargs, options, use_tqdm, on_error, template: see `chat`.
          keep_logits: also return the logits that predict each token.

        Returns:
          One score for each conversation, in their order.

        Raises:
          RequestError, ValueError: see `chat`; also an empty continuation, or one without its conversation.
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
        """Does ahead what the first requests would wait for.

        Every program is compiled. The memory of the KV pool is taken, weights of a directory of the hub are read and
        hashed (keys of images name them), and the decoders of pictures and videos are imported.

        Args:
          reuse: what calls will ask for; None is what the engine was made with.
          verbose: show what is done and, at the end, what was compiled; on stderr.

        Compiled programs are also kept on disk, so that the next process only loads them.

        Returns:
          How many programs were compiled, and the seconds it took.
        """
        return self.service.warmup(reuse, verbose=verbose)

    @property
    def kernels(self) -> dict[tuple[Any, ...], tuple[dispatch.Choice, ...]]:
        """The kernels in the programs compiled so far: which implementation runs each case, and why.

        A program's key is its name and sizes. See `vlcache_jax.pallas_kernels`.
        """
        return self.service.kernels

    def stats(self) -> EngineStats:
        """What the KV pool's pages hold now, and counters; those of the image cache are in `cache.stats()`."""
        return self.service.stats()

    def get_tokenizer(self) -> Any:
        """The checkpoint's tokenizer, one of transformers."""
        return self.service.renderer.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Those of the checkpoint, which calls without any take."""
        return self.service.intake.sequences.default_params()

    @property
    def fingerprint(self) -> str:
        """Of the weights, as schedules name them. The first use on a directory of the hub reads and hashes them all."""
        return self.service.checkpoint.source_digest

    def reset_mm_cache(self) -> None:
        """Forgets every image, and every prompt."""
        self.service.reset_mm_cache()

    def reset_prefix_cache(self) -> None:
        """Forgets every prompt that is in the KV pool; what is kept of images stays."""
        self.service.reset_prefix_cache()

    def close(self) -> None:
        """Gives back the memory of weights and pool. The engine cannot be used any more, and calls under way end."""
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
    """The options of all rows, and what `compress` gives for each of them; None: it is one for all."""
    of_rows = options.compress if _is_iterable(options.compress) else None
    return options if of_rows is None else dataclasses.replace(options, compress=None), of_rows


def _is_iterable(given: Any) -> TypeGuard[Iterable[Any]]:
    """Whether it gives one for each conversation; a string is one for all."""
    return isinstance(given, Iterable) and not isinstance(given, str | Mapping)


def _check_iterables(conversations: Any, params: Any) -> None:
    """Raises a ValueError unless `LLM.chat_iter` takes them."""
    if not _is_iterable(conversations):
        raise ValueError(f"conversations must be an iterable of them, got {type(conversations).__name__}")
    if not (isinstance(params, SamplingParams | None) or _is_iterable(params)):
        raise ValueError(f"sampling_params must be SamplingParams, an iterable of them or None, got {short(params)}")


def _compressors(
    read: Callable[[Compress | None], Compressor | None], given: Iterable[Compress | None]
) -> Iterable[Compressor | ValueError | None]:
    """Of each row what it asks for, or what is wrong with that."""

    def own(row: int, asked: Compress | None) -> Compressor | ValueError | None:
        try:
            return read(asked)
        except ValueError as error:
            return ValueError(f"conversations[{row}] {error}")

    return itertools.starmap(own, enumerate(given))


def _calls(
    call: Call,
    conversations: Iterable[Asked],
    params: SamplingParams | Iterable[SamplingParams] | None,
    compressors: Iterable[Compressor | ValueError | None] | None,
    size: int,
) -> Iterator[Call]:
    """A call for so many conversations at a time, with their own sampling parameters and compressors, if there are any;
    what came before an error comes first.

    Raises:
      ValueError: there are fewer of these than of conversations.
    """
    given: dict[str, Iterator[Any]] = {
        "sampling_params": itertools.repeat(None) if isinstance(params, SamplingParams | None) else iter(params),
        "compress": itertools.repeat(None) if compressors is None else iter(compressors),
    }
    faults: list[Exception] = []

    def rows() -> Iterator[tuple[Any, ...]]:
        try:
            for row in conversations:
                own = {name: next(each, faults) for name, each in given.items()}
                if short_of := [name for name, one in own.items() if one is faults]:
                    raise ValueError(f"{short_of[0]} must give one for each conversation, got fewer of them")
                yield row, *own.values()
        except Exception as fault:
            faults.append(fault)

    for number, batch in enumerate(itertools.batched(rows(), size)):
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


def _listed_conversations(given: Any, kind: str) -> tuple[Sequence[Asked], str]:
    """Conversations, and what errors call each of them; `kind` is the argument that they stand in."""
    if isinstance(given, (str, Mapping)):  # rather one conversation, which is called messages
        raise ValueError(
            'messages must be a list such as [{"role": "user", "content": ...}], or a list of such lists, '
            f"got {type(given).__name__}"
        )
    if not isinstance(given, Sequence):
        raise ValueError(f"{kind} must be a list of conversations, got {type(given).__name__}")
    is_one = bool(given) and isinstance(given[0], Mapping) and "messages" not in given[0]
    return ([given], "messages") if is_one else (given, f"{kind}[{{}}]")


def _listed_prompts(prompts: Any) -> tuple[Sequence[PromptLike], str]:
    """Prompts, and what errors call each of them."""
    if isinstance(prompts, (str, Mapping)) or is_token_ids(prompts):
        return [prompts], "prompts"
    if not isinstance(prompts, Sequence):
        raise ValueError(f"prompts must be a string, a dict or a list of these, got {type(prompts).__name__}")
    return prompts, "prompts[{}]"
