"""The public engine: conversations with images in, answers out."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import jax
import numpy as np
from tqdm import tqdm

from vlcache_jax.cache.config import CacheConfig
from vlcache_jax.cache.store import Store
from vlcache_jax.cache.writer import Writer
from vlcache_jax.engine import memory_plan
from vlcache_jax.engine.batching import ImageUse
from vlcache_jax.engine.checkpoint import open_checkpoint
from vlcache_jax.engine.engine import Engine, Forced, Generation
from vlcache_jax.engine.ladder import Ladder, round_up
from vlcache_jax.engine.linker import Batch, Linked, Linker, Request
from vlcache_jax.engine.runner import Runner, check_kernels
from vlcache_jax.engine.sampling import MAX_BANNED, SamplingParams
from vlcache_jax.image_cache import ImageCache
from vlcache_jax.inputs.images import ImageProcessor, Patches, check_limits
from vlcache_jax.inputs.layout import ImageRef, ImageSpan, make_layout
from vlcache_jax.inputs.prompt import Prompt, PromptRenderer
from vlcache_jax.models import ModelConfig
from vlcache_jax.outputs import (
    CacheReport,
    CompletionOutput,
    ImageReuse,
    Metrics,
    RequestOutput,
    Score,
    Verification,
)
from vlcache_jax.pallas_kernels import dispatch
from vlcache_jax.reuse.parse import parse_policy
from vlcache_jax.reuse.plan import Plan, full_prefill
from vlcache_jax.reuse.policies import Policy
from vlcache_jax.reuse.schedule import Schedule
from vlcache_jax.reuse.selection import Choice, SelectingPolicy

Conversation = Sequence[Mapping[str, Any]]
PromptLike = str | Mapping[str, Any]
Reuse = str | float | os.PathLike[str] | Schedule | Policy


class LLM:
    """Serves one Qwen vision-language model.

        with LLM("Qwen/Qwen3-VL-8B-Instruct") as llm:
            picture = {"type": "image", "image": "street.jpg"}
            question = {"type": "text", "text": "What does the sign say?"}
            [answer] = llm.chat([[{"role": "user", "content": [picture, question]}]])
            print(answer.outputs[0].text)

    A call means the same as its requests run one by one, in list order. Every request is checked before anything runs.
    Calls from several threads are served one after the other. After an error or Ctrl-C the engine serves on.

    Args:
      model: a converted checkpoint, a Hugging Face directory, or the id of a model on the hub.
      dtype: of weights and K, V: "float32", "bfloat16", "float16"; "auto" is bfloat16 on a GPU and float32 on a CPU.
      reuse: what is done with an image that was seen before, unless a call says otherwise.
        "exact": it is linked where everything before it is the same too; answers are those of a cold run.
        "full", a ratio from 0 to 1, the path of a schedule file, a `Schedule`, "mpic-K" or another `Policy`: it is
        linked anywhere; of those behind another context, the named part is computed anew, and the output says so.
        "shift-R", R a ratio or a schedule file: so too, and what is not computed is moved by what was.
        "off": every image is computed and nothing is kept.
      cache: sizes and rules of the image cache.
      kv_cache_bytes: size of the KV pool. By default most of the memory that weights and activations leave free.
        It bounds prompt and answer of one request, and how many requests run together.
      max_rows: tokens computed in one prefill step; longer prompts take several. By default 8192, on a CPU 4096, or
        what the ladder says.
      max_model_len: tokens of prompt and answer at most. By default what the model and the pool allow.
      mm_processor_kwargs: min_pixels and max_pixels of images, for all requests; a request's own come first.
      implementation: of the kernels for attention and linking: "xla", "mosaic_gpu" (Hopper GPUs),
        "mosaic_gpu_interpreted" (the same, interpreted on a CPU, for tests); None is the best for each case.
        `llm.kernels` says which run, and why.
      ladder: the sizes programs are compiled for. More rungs: less padding, more programs.
      allow_remote_images: whether http(s) image URLs are fetched.
      revision: branch, tag or commit of a model on the hub.
      seed: of answers whose sampling parameters name none.

    Raises:
      FileNotFoundError, ValueError: the checkpoint is missing, damaged or of an unknown model, or an argument is wrong.
      NotImplementedError: the implementation asked for does not do this model, dtype or device.
      MemoryError: weights and pool do not fit. Nothing has been loaded then.
    """

    def __init__(
        self,
        model: str | pathlib.Path,
        *,
        dtype: str = "auto",
        reuse: Reuse = "exact",
        cache: CacheConfig | None = None,
        kv_cache_bytes: int | None = None,
        max_rows: int | None = None,
        max_model_len: int | None = None,
        mm_processor_kwargs: Mapping[str, int] | None = None,
        implementation: str | None = None,
        ladder: Ladder | None = None,
        allow_remote_images: bool = False,
        revision: str | None = None,
        seed: int = 0,
    ):
        policy = parse_policy(reuse)
        if cache is None:
            cache = CacheConfig()
        if not isinstance(cache, CacheConfig):
            raise ValueError(f"cache must be a CacheConfig, got {cache!r}")
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ValueError(f"seed must be an integer of at least 0, got {seed!r}")
        for name, value in (
            ("kv_cache_bytes", kv_cache_bytes), ("max_rows", max_rows), ("max_model_len", max_model_len)
        ):  # fmt: skip
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        dispatch.check_name(implementation)
        device = jax.devices()[0]
        dispatch.check_device(implementation, device)
        on_cpu = device.platform == "cpu"
        _use_compilation_cache()
        self._checkpoint = open_checkpoint(
            model, dtype=("float32" if on_cpu else "bfloat16") if dtype == "auto" else dtype, revision=revision
        )
        config = self._checkpoint.config
        if implementation is not None:
            check_kernels(config, self._checkpoint.dtype, implementation)
        self._policy = self._check_policy(policy)
        self._renderer = PromptRenderer.from_pretrained(
            self._checkpoint.directory, allow_remote_images=allow_remote_images
        )
        self._processor = ImageProcessor.from_pretrained(self._checkpoint.directory).with_limits(mm_processor_kwargs)
        _check_processor(self._processor, self._renderer, config)
        self._generation, self._end_tokens = _read_generation_config(
            self._checkpoint.directory, self._renderer.tokenizer
        )

        if ladder is None:
            ladder = memory_plan.limit_rows(Ladder(), 4096 if on_cpu else 8192)
        if max_rows is not None:
            ladder = memory_plan.limit_rows(ladder, max_rows)
        longest = min(max_model_len or config.text.max_position_embeddings, config.text.max_position_embeddings)
        most_patches = self._processor.max_pixels // self._processor.patch_size**2
        ladder = memory_plan.limit_patches(
            ladder, min(most_patches, longest * self._processor.merge_size**2), self._processor.merge_size
        )
        num_slots = memory_plan.plan_pool(
            config,
            self._checkpoint.dtype,
            device,
            ladder,
            weights=self._checkpoint.nbytes(),
            kv_cache_bytes=kv_cache_bytes,
            max_model_len=longest,
        )
        self.max_model_len = min(longest, num_slots)
        if max_model_len is not None and max_model_len > self.max_model_len:
            raise ValueError(
                f"max_model_len must be at most {self.max_model_len} (the model takes "
                f"{config.text.max_position_embeddings} tokens, the KV pool {num_slots}), got {max_model_len}"
            )
        self._runner = Runner(
            config,
            self._checkpoint.load(device),
            self._processor.normalization_table,
            num_slots=num_slots,
            ladder=ladder,
            implementation=implementation,
        )
        self._store = Store(cache)
        self._writer = Writer(self._store)
        self._engine = Engine(self._runner, self._writer)
        self._random = np.random.default_rng(seed)
        self._threads = ThreadPoolExecutor(min(8, os.cpu_count() or 1), "vlcache-images")
        self._linker = Linker(
            config,
            self._store,
            self._writer,
            self._processor,
            self._renderer,
            fingerprint=lambda: self._checkpoint.fingerprint,
            dtype=self._runner.dtype,
            token_rungs=self._runner.token_rungs,
            threads=self._threads,
        )
        self.cache = ImageCache(self._store, self._writer, self._linker, self._renderer, self._precompute)
        self._lock = threading.Lock()
        self._closed = False

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        reuse: Reuse | None = None,
        cache_salt: str | None = None,
        verify: bool = False,
        mm_processor_kwargs: Mapping[str, int] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers conversations.

        Args:
          conversations: lists of messages `{"role": ..., "content": ...}`, or one such list. Content is a string, or a
            list of parts in the shape of OpenAI (`image_url`, `text`) or Hugging Face (`image`, `text`). An image is a
            path, bytes, a `data:` URL, a PIL image, an array, or, where allowed, an http(s) URL.
          sampling_params: for all, or one for each conversation; None is the checkpoint's own.
          reuse: see the class; None is what the engine was made with.
          cache_salt: calls with different salts share nothing in the cache; None is a salt of its own.
          verify: also run each request cold, and compare (`RequestOutput.verification`). Takes several times as long.
          mm_processor_kwargs: min_pixels and max_pixels for the images of this call.
          use_tqdm: show a progress bar.

        All new images of a call are decoded before it runs and held at 3 bytes a pixel: cut a very large job into
        several.
        Texts are taken as they are: control tokens in them, such as `<|im_end|>`, act as such.

        Returns:
          One output for each conversation, in their order.

        Raises:
          ValueError: a conversation, an image or a parameter is wrong; it names which. Nothing has run then.
        """
        prompts = self._conversations(conversations, mm_processor_kwargs)
        return self._generate(prompts, sampling_params, reuse, cache_salt, verify, use_tqdm)

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        reuse: Reuse | None = None,
        cache_salt: str | None = None,
        verify: bool = False,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continues prompts as they are, without a chat template.

        Args:
          prompts: a string or a dict, or a list of these. A dict holds "prompt", a text with one `<|image_pad|>` for
            each image, and may hold "multi_modal_data": {"image": [...]}, "multi_modal_uuids": {"image": [...]} and
            "mm_processor_kwargs": {...}.
          sampling_params, reuse, cache_salt, verify, use_tqdm: see `chat`.

        Returns:
          One output for each prompt, in their order.

        Raises:
          ValueError: see `chat`.
        """
        listed = [prompts] if isinstance(prompts, (str, Mapping)) else prompts
        if not isinstance(listed, Sequence):
            raise ValueError(f"prompts must be a string, a dict or a list of these, got {type(prompts).__name__}")
        rendered = [self._renderer.from_prompt(prompt, name=f"prompts[{i}]") for i, prompt in enumerate(listed)]
        return self._generate(rendered, sampling_params, reuse, cache_salt, verify, use_tqdm)

    def score(
        self,
        conversations: Conversation | Sequence[Conversation],
        continuations: Sequence[str | Sequence[int]],
        *,
        reuse: Reuse | None = None,
        cache_salt: str | None = None,
        mm_processor_kwargs: Mapping[str, int] | None = None,
        keep_logits: bool = False,
        use_tqdm: bool = True,
    ) -> list[Score]:
        """Log-probabilities of forced continuations.

        Args:
          conversations: see `chat`.
          continuations: one for each conversation, a text or token ids.
          reuse, cache_salt, mm_processor_kwargs, use_tqdm: see `chat`.
          keep_logits: also return the logits that predict each token.

        Returns:
          One score for each conversation, in their order.

        Raises:
          ValueError: see `chat`; also an empty continuation, or one that is not paired with a conversation.
        """
        policy = self._parse_policy(reuse)
        prompts = self._conversations(conversations, mm_processor_kwargs)
        if isinstance(continuations, str) or not isinstance(continuations, Sequence):
            raise ValueError(f"continuations must be a list, got {type(continuations).__name__}")
        if len(continuations) != len(prompts):
            raise ValueError(
                f"continuations must have one entry for each of {len(prompts)} conversations, got {len(continuations)}"
            )
        forced = [self._continuation(text, f"continuations[{i}]") for i, text in enumerate(continuations)]
        with self._serving(), tqdm(total=len(prompts), desc="scoring", disable=not use_tqdm) as bar:
            requests = self._linker.identify(prompts, cache_salt, lookup=policy.links)
            for request, tokens in zip(requests, forced, strict=True):
                self._check_length(request, len(tokens))
            waiting = iter(forced)

            def run(group: list[Linked]) -> list[Score]:
                sequences = [
                    self._forced(linked, next(waiting), keep_logits=keep_logits, capture=True) for linked in group
                ]
                self._engine.score(sequences, lambda _: bar.update())
                return [self._score(linked, sequence) for linked, sequence in zip(group, sequences, strict=True)]

            return self._in_batches(requests, policy, run)

    def warmup(self, *, reuse: Reuse | None = None, verbose: bool = True) -> tuple[int, float]:
        """Compiles every program ahead, so that no request waits for a compilation.

        Args:
          reuse: what calls will ask for; None is what the engine was made with.
          verbose: show a progress bar and a line at the end.

        Compiled programs are also kept on disk, so that the next process only loads them.

        Returns:
          How many programs were compiled, and the seconds it took.
        """
        policy = self._parse_policy(reuse)
        with self._serving():
            shrinking, shifting = self._needs(policy)
            selecting = policy if isinstance(policy, SelectingPolicy) else None
            keys = self._runner.keys(linking=policy.links, shrinking=shrinking, selecting=selecting, shifting=shifting)
            total = len(self._runner.missing(keys))
            with tqdm(total=total, desc="compiling", disable=not verbose) as bar:
                count, seconds = self._runner.warmup(keys, lambda _: bar.update())
        if verbose:
            print(f"compiled {count} programs in {seconds:.1f} s")
            uses = collections.Counter(
                (choice.kernel, choice.implementation, choice.why)
                for choices in self.kernels.values()
                for choice in choices
            )
            for (kernel, implementation, why), number in sorted(uses.items()):
                print(f"{kernel}: {implementation} in {number} cases ({why})")
        return count, seconds

    @property
    def kernels(self) -> dict[tuple[Any, ...], tuple[dispatch.Choice, ...]]:
        """The kernels in the programs compiled so far: which implementation runs each case, and why.

        A program's key is its name and sizes. See `vlcache_jax.pallas_kernels`.
        """
        return dict(self._runner.kernels)

    def close(self) -> None:
        """Gives back the memory of weights and pool. The engine cannot be used any more."""
        with self._lock:
            self._closed = True
            self.cache.close()
            self._threads.shutdown()
            self._writer.close()
            self._store.clear()
            self._runner = self._engine = None  # type: ignore[assignment]

    def reset_mm_cache(self) -> None:
        """Forgets every image."""
        with self._serving():
            self._writer.flush()
            self._store.clear()

    @property
    def fingerprint(self) -> str:
        """Of the weights, as schedules name them. The first use on a directory of the hub reads and hashes them all."""
        return self._checkpoint.source_digest

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Requests.

    @contextlib.contextmanager
    def _serving(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise RuntimeError("this LLM is closed")
            yield

    def _conversations(
        self, conversations: Conversation | Sequence[Conversation], mm_processor_kwargs: Mapping[str, int] | None
    ) -> list[Prompt]:
        if isinstance(conversations, (str, Mapping)) or not isinstance(conversations, Sequence):
            raise ValueError(f"conversations must be a list of conversations, got {type(conversations).__name__}")
        is_one = bool(conversations) and isinstance(conversations[0], Mapping)
        listed = cast(Sequence[Conversation], [conversations] if is_one else conversations)
        limits = check_limits(mm_processor_kwargs)
        return [
            self._renderer.from_conversation(conversation, mm_processor_kwargs=limits, name=f"conversations[{i}]")
            for i, conversation in enumerate(listed)
        ]

    def _continuation(self, continuation: str | Sequence[int], name: str) -> list[int]:
        if isinstance(continuation, str):
            tokens = self._renderer.tokenizer(continuation, add_special_tokens=False)["input_ids"]
        else:
            tokens = list(continuation) if isinstance(continuation, Sequence | np.ndarray) else [None]
            vocab_size = self._checkpoint.config.text.vocab_size
            if not all(
                type(token) is not bool and isinstance(token, (int, np.integer)) and 0 <= token < vocab_size
                for token in tokens
            ):
                raise ValueError(f"{name} must be a text or token ids below {vocab_size}, got {continuation!r}")
        if not tokens:
            raise ValueError(f"{name} must hold at least one token, got none")
        return [int(token) for token in tokens]

    def _parse_policy(self, reuse: Reuse | None) -> Policy:
        return self._policy if reuse is None else self._check_policy(parse_policy(reuse))

    def _check_policy(self, policy: Policy) -> Policy:
        if isinstance(schedule := getattr(policy, "schedule", None), Schedule):
            config = self._checkpoint.config
            fingerprint = "" if schedule.allow_other_model else self._checkpoint.source_digest
            schedule.check_model(config.model_type, config.text.num_layers, fingerprint)
        return policy

    def _needs(self, policy: Policy) -> tuple[set[int], bool]:
        """Layers that fewer rows can leave than enter, and whether K, V are moved, in the plan of a large image."""
        layers = self._runner.config.text.num_layers
        image = ImageRef("", (1, 200, 200), 10_000, _no_patches)
        layout = make_layout(np.zeros(10_001, np.int32), [0], [image], 2, ["approximate"])
        plan = policy.plan(layout, layers)
        rows = list(plan.rows(layers))
        if isinstance(policy, SelectingPolicy):
            for layer, kept in enumerate(policy.keep(layout, layers), policy.check_layer + 1):
                rows[layer] += kept
        return {layer for layer in range(layers - 1) if rows[layer + 1] < rows[layer]}, plan.shift

    def _in_batches[T: (RequestOutput, Score)](
        self, requests: Sequence[Request], policy: Policy, run: Callable[[list[Linked]], list[T]]
    ) -> list[T]:
        """Plans and runs requests in their order, as many together as the cache can hold at once."""
        results: list[T] = []
        waves = 0
        while len(results) < len(requests):
            with Batch(self._linker) as batch:
                group: list[Linked] = []
                for request in requests[len(results) :]:
                    linked = batch.add(request, policy)
                    if linked is None:
                        break
                    group.append(linked)
                if not group:
                    raise RuntimeError("records are held by requests that have ended; reset_mm_cache() helps")
                done = run(group)
            for result in done:
                result.metrics.wave += waves
            waves = 1 + max(result.metrics.wave for result in done)
            results += done
        return results

    def _precompute(
        self, conversations: list[Conversation], limits: Mapping[str, int] | None, salt: str | None
    ) -> list[str]:
        """Computes conversations of one image each; returns the images' entry keys."""
        one = SamplingParams(temperature=0, max_tokens=1)
        options: Any = {"reuse": "exact", "cache_salt": salt, "mm_processor_kwargs": limits, "use_tqdm": False}
        return [output.cache.images[0].key for output in self.chat(conversations, one, **options)]

    def _generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        reuse: Reuse | None,
        salt: str | None,
        verify: bool,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        policy = self._parse_policy(reuse)
        params = self._sampling_params(sampling_params, len(prompts))
        with self._serving(), tqdm(
            total=sum(own.n for own in params), desc="answering", disable=not use_tqdm
        ) as bar:  # fmt: skip
            requests = self._linker.identify(prompts, salt, lookup=policy.links)
            for request, own in zip(requests, params, strict=True):
                self._check_length(request, self._new_slots(request, own))
            waiting = iter(params)

            def run(group: list[Linked]) -> list[RequestOutput]:
                answers = [self._answers(linked, next(waiting)) for linked in group]
                self._engine.generate([answer for own in answers for answer in own], lambda _: bar.update())
                verified = self._verify(group, [own[0] for own in answers]) if verify else [None] * len(group)
                return [self._output(*each) for each in zip(group, answers, verified, strict=True)]

            return self._in_batches(requests, policy, run)

    def _verify(self, group: list[Linked], answers: list[Generation]) -> list[Verification]:
        """Runs requests without the cache, and both ways with the answers' tokens forced."""
        cold = [self._without_cache(linked) for linked in group]
        again = [
            dataclasses.replace(
                answer,
                layout=linked.layout,
                plan=linked.plan,
                images=(),
                level=0,
                metrics=Metrics(),
                token_ids=[],
                logprobs=[],
                finish_reason=None,
            )
            for linked, answer in zip(cold, answers, strict=True)
        ]
        self._engine.generate(again, lambda _: None)
        # An image whose record failed was computed instead: the plan that ran is the answer's.
        warm = [
            dataclasses.replace(linked, plan=answer.plan, uses=tuple(answer.images))
            for linked, answer in zip(group, answers, strict=True)
        ]
        forced = [
            [
                self._forced(one, answer.token_ids, keep_logits=True, capture=False)
                for one, answer in zip(way, answers, strict=True)
            ]
            for way in (warm, cold)
        ]
        self._engine.score([sequence for way in forced for sequence in way], lambda _: None)
        return [
            _compare(answer.token_ids, other.token_ids, *(np.stack(sequence.logits) for sequence in both))
            for answer, other, *both in zip(answers, again, *forced, strict=True)
        ]

    def _without_cache(self, linked: Linked) -> Linked:
        """The same request, with every image to be decoded, encoded and computed."""
        spans = tuple(
            dataclasses.replace(span, image=_without_records(span.image), state="miss")
            if isinstance(span, ImageSpan)
            else span
            for span in linked.layout.spans
        )
        layout = dataclasses.replace(linked.layout, spans=spans)
        plan = full_prefill(layout, self._runner.config.text.num_layers)
        return dataclasses.replace(linked, layout=layout, plan=plan, uses=(), level=0)

    def _sampling_params(
        self, given: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            given = [given or SamplingParams()] * count
        if not isinstance(given, Sequence):
            raise ValueError(f"sampling_params must be SamplingParams or a list of them, got {type(given).__name__}")
        if len(given) != count:
            raise ValueError(f"sampling_params must be one, or one for each of {count} requests, got {len(given)}")
        resolved = []
        for i, params in enumerate(given):
            if not isinstance(params, SamplingParams):
                raise ValueError(f"sampling_params[{i}] must be SamplingParams, got {type(params).__name__}")
            resolved.append(params.resolve(self._generation))
            ends, vocab_size = self._ends(params), self._checkpoint.config.text.vocab_size
            if any(end >= vocab_size for end in ends):
                raise ValueError(f"stop_token_ids must be below the vocabulary's {vocab_size}, got {sorted(ends)}")
            if params.min_tokens and len(ends) > MAX_BANNED:
                raise ValueError(f"stop_token_ids must be at most {MAX_BANNED} with min_tokens, got {len(ends)}")
        return resolved

    def _ends(self, params: SamplingParams) -> frozenset[int]:
        return frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else self._end_tokens)

    def _new_slots(self, request: Request, params: SamplingParams) -> int:
        return min(params.max_tokens, max(1, self.max_model_len - len(request.token_ids)))

    def _answers(self, linked: Linked, params: SamplingParams) -> list[Generation]:
        first = int(self._random.integers(2**32)) if params.seed is None else params.seed
        return [
            Generation(
                linked.layout,
                linked.plan,
                new_slots=self._new_slots(linked.request, params),
                images=_uses(linked, capture=i == 0),
                level=linked.level,
                choice=self._check_choice(linked, 1),
                params=params,
                seed=first if i == 0 else int(np.random.SeedSequence([first, i]).generate_state(1)[0]),
                end_tokens=self._ends(params),
                has_stop_string=self._stop_search(params.stop or ()),
                metrics=dataclasses.replace(linked.request.metrics),
            )
            for i in range(params.n)
        ]

    def _forced(self, linked: Linked, tokens: Sequence[int], *, keep_logits: bool, capture: bool) -> Forced:
        length, layers = len(linked.layout), self._runner.config.text.num_layers
        wanted = range(length - 1, length + len(tokens) - 1)
        return Forced(
            linked.layout.extended(tokens),
            linked.plan.extended(len(tokens), layers).wanting(wanted, layers),
            new_slots=0,
            images=_uses(linked, capture=capture),
            level=linked.level,
            choice=self._check_choice(linked, len(tokens)),
            keep_logits=keep_logits,
            metrics=dataclasses.replace(linked.request.metrics),
        )

    def _check_choice(self, linked: Linked, outputs: int) -> Choice | None:
        """How the request chooses rows: from one prefill step, which has to hold all of its rows and logits."""
        if linked.choice is not None:
            rows = linked.plan.rows(1)[0] + (outputs - 1)
            ladder = self._runner.ladder
            if rows > ladder.max_rows or outputs > ladder.max_sequences:
                raise ValueError(
                    f"reuse {linked.policy} chooses among all rows of a prompt, so it must have at most max_rows = "
                    f"{ladder.max_rows} of them and {ladder.max_sequences} scored tokens, got {rows} and {outputs}"
                )
        return linked.choice

    def _check_length(self, request: Request, new_slots: int) -> None:
        if len(request.token_ids) + new_slots > self.max_model_len:
            raise ValueError(
                f"prompt and answer must fit in max_model_len = {self.max_model_len} tokens (the KV pool has "
                f"{self._runner.num_slots} slots), got a prompt of {len(request.token_ids)} and an answer of at least "
                f"{new_slots}: {request.prompt.text[:40]!r}..."
            )

    def _stop_search(self, stop: Sequence[str]) -> Callable[[list[int]], bool] | None:
        if not stop:
            return None
        # A character is at most four bytes and a token at least one, so a string that ends now lies in these tokens.
        window = 4 * max(map(len, stop)) + 4
        return lambda token_ids: self._stop_at(token_ids[-window:], stop) is not None

    def _stop_at(self, token_ids: Sequence[int], stop: Sequence[str]) -> int | None:
        """Where in their text the stop string begins that the last of the tokens completes."""
        before, text = (
            cast(str, self._renderer.tokenizer.decode(ids, skip_special_tokens=True))
            for ids in (list(token_ids[:-1]), list(token_ids))
        )
        known = len(before.rstrip("\ufffd"))  # a character that is not complete yet
        places = [text.find(end, max(0, known - len(end) + 1)) for end in stop]
        return min((place for place in places if place >= 0), default=None)

    def _output(self, linked: Linked, answers: list[Generation], verification: Verification | None) -> RequestOutput:
        return RequestOutput(
            prompt=linked.request.prompt.text,
            prompt_token_ids=linked.layout.token_ids,
            outputs=tuple(self._completion(i, answer) for i, answer in enumerate(answers)),
            num_cached_tokens=_exact_tokens(answers[0]),
            metrics=answers[0].metrics,
            cache=self._report(linked, answers[0]),
            verification=verification,
        )

    def _score(self, linked: Linked, sequence: Forced) -> Score:
        return Score(
            token_ids=tuple(sequence.layout.token_ids[len(linked.layout) :].tolist()),
            logprobs=np.array(sequence.logprobs, np.float32),
            greedy=np.array(sequence.greedy, np.bool_),
            metrics=sequence.metrics,
            cache=self._report(linked, sequence),
            logits=np.stack(sequence.logits) if sequence.keep_logits else None,
        )

    def _completion(self, index: int, answer: Generation) -> CompletionOutput:
        text = cast(str, self._renderer.tokenizer.decode(answer.token_ids, skip_special_tokens=True))
        if answer.finish_reason == "stop" and answer.token_ids[-1] not in answer.end_tokens:
            text = text[: self._stop_at(answer.token_ids, answer.params.stop or ())]
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=tuple(answer.token_ids),
            finish_reason=answer.finish_reason or "length",
            logprobs=tuple(answer.logprobs) if answer.params.logprobs is not None else None,
        )

    def _report(self, linked: Linked, sequence: Generation | Forced) -> CacheReport:
        layers = self._runner.config.text.num_layers
        images = tuple(self._image_report(i, use, sequence.plan, layers) for i, use in enumerate(sequence.images))
        approximate = sum(image.tokens - image.recomputed[-1] for image in images if image.match == "approximate")
        return CacheReport(
            images,
            exact=approximate == 0,
            policy=linked.policy,
            rows=sequence.plan.rows(layers),
            approximate_tokens=approximate,
            request_key=linked.request_key,
            request_known=linked.request_known,
        )

    def _image_report(self, index: int, use: ImageUse, plan: Plan, layers: int) -> ImageReuse:
        image = use.span.image
        depth = plan.depth[use.span.tokens]
        moved = use.linked.meta.nbytes if use.linked is not None else 0
        encoder = "none"
        if depth.any():
            found = use.has_encoder and image.encoder is not None and image.encoder.is_ready
            encoder = "host" if found else "computed"
            if found and image.encoder is not None:
                rows = round_up(int(np.flatnonzero(depth)[-1]) + 1, self._runner.token_rungs)
                moved += image.encoder.data[:, :rows].nbytes
        return ImageReuse(
            index=index,
            key=image.key,
            tokens=image.num_tokens,
            encoder=encoder,
            kv="none" if use.linked is None else "host",
            match="miss" if use.linked is None else use.span.state,
            recomputed=tuple(int(np.count_nonzero(depth > layer)) for layer in range(layers)),
            bytes_moved=moved,
            why=use.why,
        )


def _uses(linked: Linked, *, capture: bool) -> tuple[ImageUse, ...]:
    """What a sequence does with its images; of several answers to a request one captures."""
    return tuple(dataclasses.replace(use, captured=use.captured if capture else None) for use in linked.uses)


def _without_records(image: ImageRef) -> ImageRef:
    return ImageRef(image.key, image.grid, image.num_tokens, lambda: image.patches)


def _compare(tokens: list[int], cold_tokens: list[int], logits: np.ndarray, cold_logits: np.ndarray) -> Verification:
    same = [a == b for a, b in zip(tokens, cold_tokens, strict=False)]
    agree = same.index(False) if False in same else len(same)
    difference = float(np.abs(logits - cold_logits).max())
    return Verification(agree, max(len(tokens), len(cold_tokens)), difference)


def _exact_tokens(sequence: Generation) -> int:
    """Prompt tokens whose K, V were reused exactly."""
    spans = [use.span for use in sequence.images if use.linked is not None and use.span.state == "exact"]
    return sum(int(np.count_nonzero(sequence.plan.depth[span.tokens] == 0)) for span in spans)


def _no_patches() -> Patches:
    raise AssertionError("this image has no pixels")


def _check_processor(processor: ImageProcessor, renderer: PromptRenderer, config: ModelConfig) -> None:
    """A checkpoint whose files contradict each other would answer, but wrongly."""
    for name in ("patch_size", "merge_size", "temporal_patch_size"):
        expected, got = getattr(config.vision, name), getattr(processor, name)
        if got != expected:
            raise ValueError(f"{name} of the image processor must be the model's {expected}, got {got}")
    if renderer.image_token_id != config.image_token_id:
        raise ValueError(
            f"image placeholder of the tokenizer must be the model's {config.image_token_id}, "
            f"got {renderer.image_token_id}"
        )


def _read_generation_config(directory: pathlib.Path, tokenizer: Any) -> tuple[dict[str, Any], frozenset[int]]:
    """The checkpoint's defaults for sampling, and its end tokens."""
    path = directory / "generation_config.json"
    try:
        generation = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        SamplingParams().resolve(generation)
        ends = generation.get("eos_token_id", tokenizer.eos_token_id)
        ends = [] if ends is None else [ends] if isinstance(ends, int) else ends
        if not all(isinstance(end, int) for end in ends):
            raise ValueError(f"eos_token_id must be token ids, got {ends!r}")
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} must hold usable sampling parameters: {error}") from error
    return generation, frozenset(ends)


def _use_compilation_cache() -> None:
    """Keeps compiled programs on disk, unless the user has decided where or whether."""
    if jax.config.jax_compilation_cache_dir is None and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        home = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache"))
        jax.config.update("jax_compilation_cache_dir", str(home / "vlcache-jax" / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
