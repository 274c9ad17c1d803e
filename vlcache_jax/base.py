"""An open model: its weights, KV pool, image cache and loop, from arguments to `close`."""

from __future__ import annotations

import collections
import functools
import inspect
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Self, cast

import jax

from vlcache_jax import first_contact
from vlcache_jax.cache.config import CacheConfig, open_tiers
from vlcache_jax.cache.device import PAGE_TOKENS, DeviceTier
from vlcache_jax.cache.movement import Movement
from vlcache_jax.cache.store import Store
from vlcache_jax.cache.writer import Writer
from vlcache_jax.calls import Caller
from vlcache_jax.checks import check_flags, parse_bytes
from vlcache_jax.convert.plan import as_dtype
from vlcache_jax.convert.source import locate
from vlcache_jax.device.checkpoint import Checkpoint, open_checkpoint
from vlcache_jax.device.ladder import Ladder, round_up
from vlcache_jax.device.memory_plan import kept_token_bytes, plan_memory
from vlcache_jax.device.programs import Programs, program_name, use_compilation_cache
from vlcache_jax.device.runner import Runner, check_kernels
from vlcache_jax.engine.ahead import Ahead
from vlcache_jax.engine.engine import Engine, EngineStats
from vlcache_jax.engine.loop import Loop
from vlcache_jax.engine.pages import Pages
from vlcache_jax.foreign import CALLS, ENGINE, ours, warn_ignored
from vlcache_jax.image_cache import ImageCache
from vlcache_jax.inputs.access import Access
from vlcache_jax.inputs.films import import_decoders
from vlcache_jax.inputs.images import MAX_IMAGE_PIXELS, check_max_pixels
from vlcache_jax.inputs.processor import ImageProcessor
from vlcache_jax.inputs.prompt import Prompt, PromptRenderer, Template, TemplateOptions, check_tokenizer
from vlcache_jax.inputs.settings import read_settings
from vlcache_jax.inputs.video_processor import VideoProcessor
from vlcache_jax.intake.costs import Rates, identity_of, time_limit
from vlcache_jax.intake.identification import Identifier
from vlcache_jax.intake.media import Media
from vlcache_jax.intake.planner import Planner
from vlcache_jax.intake.recognition import Recognizer
from vlcache_jax.intake.sequences import SequenceBuilder, read_generation_config
from vlcache_jax.models import ModelConfig, load_config
from vlcache_jax.outputs import Reporter
from vlcache_jax.pallas_kernels import CODECS, PAGE, dispatch
from vlcache_jax.pallas_kernels.checks import CHECKS
from vlcache_jax.progress import Progress, interruptible, say
from vlcache_jax.reuse.parse import parse_policy
from vlcache_jax.reuse.policies import Policy
from vlcache_jax.reuse.schedule import Schedule
from vlcache_jax.sampling import SamplingParams
from vlcache_jax.serving import Call

Reuse = str | float | os.PathLike[str] | Schedule | Policy


class BaseLLM:
    """What `LLM` and `AsyncLLM` have in common: a model that is open."""

    def __init__(
        self,
        model: str | pathlib.Path,
        *,
        dtype: str = "auto",
        reuse: Reuse = "exact",
        cache: CacheConfig | None = None,
        kv_cache_bytes: int | str | None = None,
        gpu_memory_utilization: float | None = None,
        max_num_seqs: int | None = None,
        max_rows: int | None = None,
        max_model_len: int | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        limit_mm_per_prompt: Mapping[str, int | Mapping[str, int]] | None = None,
        implementation: str | None = None,
        ladder: Ladder | None = None,
        enable_prefix_caching: bool | None = True,
        allow_remote_images: bool = False,
        allowed_media_domains: Sequence[str] | None = None,
        allowed_local_media_path: str | os.PathLike[str] | None = "/",
        max_image_bytes: int | str = "64MiB",
        max_image_pixels: int = MAX_IMAGE_PIXELS,
        revision: str | None = None,
        verify_weights: bool = False,
        seed: int | None = 0,
        use_tqdm: bool = True,
        **foreign: Any,
    ):
        """Opens a model.

        Args:
          model: a converted checkpoint, a Hugging Face directory, the id of a model on the hub, or "tiny-vqa", a small
            trained model that ships with the package.
          dtype: of weights and K, V: "float32", "bfloat16", "float16" or "half"; "auto" is bfloat16 on a GPU and
            float32 on a CPU.
          reuse: what is done with an image that was seen before, unless a call says otherwise.
            "exact": it is linked where everything before it is the same too; answers are those of a cold run.
            "full", a ratio from 0 to 1, the path of a schedule file, a `Schedule`, "mpic-K" or another `Policy`: it is
            linked anywhere; of those behind another context, the named part is computed anew, and the output says so.
            "shift-R", R a ratio or a schedule file: so too, and what is not computed is moved by what was.
            "off": every image is computed and nothing is kept.
          cache: sizes and rules of the image cache.
          kv_cache_bytes: size of the KV pool; a number or a string such as "4GiB". By default most of the memory that
            weights and activations leave free. It is rounded down to whole pages of 128 tokens, above 32 pages to
            sizes that are 1/32 to 1/16 apart, so that programs compiled for one size serve all that are nearly as
            large. `stats().kv_cache_bytes` is what requests can use. (One page more is allocated.)
            It bounds prompt and answer of one request, and how many requests run together.
          gpu_memory_utilization: share of the free memory that weights, activations and pool may take, where
            `kv_cache_bytes` says nothing. By default the pool takes 0.9 of what the others leave, on a CPU a quarter.
          max_num_seqs: requests that run together at most, each answer counted. By default 64, or what the ladder says.
          max_rows: tokens computed in one prefill step; longer prompts take several. By default 8192, on a CPU 4096, or
            what the ladder says.
          max_model_len: tokens of prompt and answer at most. By default what the model and the pool allow.
          mm_processor_kwargs: min_pixels and max_pixels of images, or `size={"shortest_edge": ..., "longest_edge":
            ...}`, which says the same; fps, num_frames, min_frames, max_frames and do_sample_frames of videos. For all
            requests; what a request says, or what stands beside a video, comes first. (How large a video's frames are
            is said beside it.)
          limit_mm_per_prompt: {"image": n, "video": n}: of a request at most; n may be {"count": n}. By default any.
          implementation: of the kernels for attention and linking: "xla", "mosaic_gpu" (Hopper GPUs),
            "mosaic_gpu_interpreted" (the same, interpreted on a CPU, for tests); None is the best for each case. Opened
            on a Hopper GPU for the first time, it checks the kernels in a process of its own, before jax takes the
            memory; XLA runs in place of what does not pass. `llm.kernels` says which run, and why.
          ladder: the sizes programs are compiled for. More rungs: less padding, more programs.
          enable_prefix_caching: what is exact of a prompt and its answer stays in the KV pool until its memory is
            needed, and a prompt that begins alike, text or images, goes on from there. Answers do not depend on it.
          allow_remote_images: whether http(s) image URLs are fetched, each within 20 seconds.
          allowed_media_domains: the hosts that URLs and redirects may name; None is all. ".example.com" is all below
            it. Only public addresses are reached; one in your own network must stand here as a number, and so in the
            URL.
          allowed_local_media_path: images on disk must lie in this folder. "/" is everywhere; None or "" refuses paths,
            as one should where messages come from others.
          max_image_bytes: of a file, encoded bytes or a URL; a number or a string such as "64MiB".
          max_image_pixels: of a picture before it is scaled; larger ones are refused by the head of their file. While a
            picture is decoded it takes seven bytes a pixel, and of all together about 512 MiB are decoded at a time.
          revision: branch, tag or commit of a model on the hub.
          verify_weights: read all weights of a converted checkpoint at opening and compare them with the hashes that
            were written with them. Otherwise only sizes are checked, and a flipped bit is not noticed.
          seed: of answers whose sampling parameters name none; None is 0.
          use_tqdm: say on stderr what is loaded. It silences no call: each has its own.
          foreign: arguments of vLLM; those on which no answer depends are ignored, with a warning.

        Raises:
          FileNotFoundError, ValueError: the checkpoint is missing, damaged or of an unknown model, or an argument is
            wrong.
          TypeError: there is no such argument; of vLLM's the error says what to write.
          NotImplementedError: the implementation asked for does not do this model, dtype or device.
          MemoryError: weights and pool do not fit. Nothing has been loaded then.
        """
        translated = _translated(foreign, model, revision)
        max_rows, use_tqdm = translated.get("max_rows", max_rows), translated.get("use_tqdm", use_tqdm)
        kv_cache_bytes = translated.get("kv_cache_bytes", kv_cache_bytes)
        seed, keeps = 0 if seed is None else seed, True if enable_prefix_caching is None else enable_prefix_caching
        policy = parse_policy(reuse)
        cache = CacheConfig() if cache is None else cache
        check_flags(verify_weights=verify_weights, use_tqdm=use_tqdm, enable_prefix_caching=keeps)
        _check_arguments(model, dtype, cache, ladder, revision, seed)
        settings = read_settings(mm_processor_kwargs, of_request=False)
        _check_counts(max_rows=max_rows, max_model_len=max_model_len, max_num_seqs=max_num_seqs)
        pool = None if kv_cache_bytes is None else parse_bytes(kv_cache_bytes, "kv_cache_bytes")
        _check_share(gpu_memory_utilization)
        most = _check_limits_per_prompt(limit_mm_per_prompt)
        check_max_pixels(max_image_pixels)
        access = Access(allow_remote_images, allowed_media_domains, allowed_local_media_path, max_image_bytes)
        dispatch.check_name(implementation)
        directory = locate(model, revision).directory
        load_config(directory)  # what small files tell to be wrong is said before anything takes time
        check_tokenizer(directory)
        if implementation is None:
            first_contact.meet(CHECKS, show=use_tqdm)  # from here on jax may hold the device's memory
        device = jax.devices()[0]
        dispatch.check_device(implementation, device)
        use_compilation_cache()
        if dtype == "auto":
            dtype = "float32" if device.platform == "cpu" else "bfloat16"
        self._checkpoint = open_checkpoint(directory, dtype=dtype, verify_weights=verify_weights)
        config = self._checkpoint.config
        if implementation is not None:
            check_kernels(config, self._checkpoint.dtype, implementation)
        codec = None if cache.codec == "auto" else CODECS[cache.codec]
        if codec is not None:
            codec.group(config.text.head_dim)  # before anything is loaded
        self._fingerprint = fingerprint = functools.cache(lambda: _fingerprint(self._checkpoint, use_tqdm))
        codec_name = str(self._checkpoint.dtype) + ("" if codec is None else f" {codec.name}")
        tiers = open_tiers(cache, fingerprint=fingerprint, codec=codec_name)
        self._policy = self._checkpoint.check_policy(policy)
        self._renderer = PromptRenderer.from_pretrained(self._checkpoint.directory, access=access)
        self._renderer.video_options = settings.videos
        self._processor = ImageProcessor.from_pretrained(self._checkpoint.directory).with_limits(settings.limits)
        _check_processor(self._processor, self._renderer, config)
        videos = VideoProcessor.from_pretrained(self._checkpoint.directory, config, self._processor)
        memory = plan_memory(
            config, self._checkpoint.dtype, device, ladder,
            weights=self._checkpoint.nbytes(), max_rows=max_rows, max_sequences=max_num_seqs,
            max_patches=self._processor.max_pixels // self._processor.patch_size**2, max_model_len=max_model_len,
            kv_cache_bytes=pool, share=gpu_memory_utilization, device_bytes=int(cache.device_bytes), codec=codec,
        )  # fmt: skip
        self.max_model_len = self._renderer.max_tokens = memory.max_model_len
        self._renderer.max_images, self._renderer.max_videos = most.get("image"), most.get("video")
        self._runner = Runner(
            config, _load(self._checkpoint, device, use_tqdm), self._processor.normalization_table,
            num_slots=memory.num_slots + PAGE, max_pages=-(-memory.max_model_len // PAGE), ladder=memory.ladder,
            implementation=implementation, codec=codec, kept_tokens=memory.kept_pages * PAGE_TOKENS,
        )  # fmt: skip
        self._runner.programs.compiling = lambda key: Progress(f"compiling {program_name(key)}")
        self._ahead = Ahead(self._runner.programs)
        tokenizer = self._renderer.tokenizer
        defaults = read_generation_config(self._checkpoint.directory, tokenizer, config.text.vocab_size)
        self._sequences = SequenceBuilder(config, memory, tokenizer, *defaults, seed, keeps)
        self._reporter = Reporter(config.text.num_layers, self._sequences.token_text)
        self._store = Store(cache)
        token_rungs = self._runner.token_rungs
        self._machine = identity_of(
            config, device.device_kind, self._runner.dtype.name, None if codec is None else codec.name
        )
        rates = Rates.load(self._machine)
        room, limit = partial(round_up, rungs=token_rungs), partial(time_limit, rates)
        self._movement = Movement(self._store, tiers, room, limit=limit)
        self._writer = Writer(self._store)
        self._pages = Pages(memory.num_slots // PAGE)
        self._threads = ThreadPoolExecutor(min(8, os.cpu_count() or 1), "vlcache-images")
        page_bytes = PAGE_TOKENS * kept_token_bytes(config, self._runner.dtype, codec)
        self._tier = DeviceTier(memory.kept_pages, page_bytes)
        self._store.forgotten, self._store.expired = self._tier.drop, self._pages.drop
        self._engine = Engine(self._runner, self._writer, self._pages, self._threads, self._tier)
        self._loop = Loop(self._engine)
        self._quick_threads = ThreadPoolExecutor(8, "vlcache-heads")
        media = Media(
            self._processor, videos, self._renderer,
            max_patches=token_rungs[-1] * self._processor.merge_size**2, max_pixels=max_image_pixels,
        )  # fmt: skip
        self._identifier = Identifier(
            Recognizer(self._store, media, fingerprint=fingerprint, codec=codec_name), self._renderer,
            threads=self._threads, quick_threads=self._quick_threads,
        )  # fmt: skip
        self._planner = Planner(
            config, self._store, self._movement, self._writer,
            dtype=self._runner.dtype, codec=codec, token_rungs=token_rungs,
            fingerprint=fingerprint, codec_name=codec_name, rates=rates if cache.load == "auto" else None,
        )  # fmt: skip
        self._caller = Caller(self._identifier, self._planner, self._loop, self._sequences, self._reporter, self._ahead)
        self.cache = ImageCache(
            self._store, self._movement, self._tier, self._writer, self._pages,
            self._identifier, self._renderer, self._caller,
        )  # fmt: skip

    __init__.__qualname__ = "LLM"  # by which Python's own errors call it

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
        check_flags(verbose=verbose)
        policy = self._parse_policy(reuse)
        self._loop.check_open()
        self._ahead.stop()
        compiled = _compile_all(self._runner.programs, policy, verbose)
        with interruptible(), Progress("warming up", show=verbose):
            with Progress(f"taking {self.stats().kv_cache_bytes / 1e9:.2f} GB for keys and values"):
                self._loop.prepare()
            self._fingerprint()
            import_decoders()
        return compiled

    @property
    def kernels(self) -> dict[tuple[Any, ...], tuple[dispatch.Choice, ...]]:
        """The kernels in the programs compiled so far: which implementation runs each case, and why.

        A program's key is its name and sizes. See `vlcache_jax.pallas_kernels`.
        """
        return dict(self._runner.programs.kernels)

    def close(self) -> None:
        """Gives back the memory of weights and pool. The engine cannot be used any more, and calls under way end."""
        self._ahead.stop()
        self._loop.close()
        self.cache.close()
        for threads in (self._threads, self._quick_threads):
            threads.shutdown(cancel_futures=True)
        self._writer.close()
        self._movement.close()
        self._store.clear()
        self._runner = self._engine = None  # type: ignore[assignment]

    def get_tokenizer(self) -> Any:
        """The checkpoint's tokenizer, one of transformers."""
        return self._renderer.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Those of the checkpoint, which calls without any take."""
        return self._sequences.default_params()

    def reset_mm_cache(self) -> None:
        """Forgets every image, and every prompt."""
        self._loop.check_open()
        self._writer.flush()
        self._store.clear()
        self._pages.clear()

    def reset_prefix_cache(self) -> None:
        """Forgets every prompt that is in the KV pool; what is kept of images stays."""
        self._loop.check_open()
        self._pages.clear()

    def stats(self) -> EngineStats:
        """What the KV pool's pages hold now, and counters; those of the image cache are in `cache.stats()`."""
        self._loop.check_open()
        return self._engine.stats()

    @property
    def fingerprint(self) -> str:
        """Of the weights, as schedules name them. The first use on a directory of the hub reads and hashes them all."""
        return self._checkpoint.source_digest

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._checkpoint.directory)!r}, dtype={self._checkpoint.dtype.name!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(
        self,
        name: str,
        listed: Sequence[Any],
        render: Callable[..., Prompt],
        reuse: Reuse | None,
        salt: str | None,
        on_error: str,
        **more: Any,
    ) -> Call:
        self._loop.check_open()
        return Call(name, listed, render, self._parse_policy(reuse), salt, on_error, **more)

    def _renders(
        self, caller: Callable[..., Any], settings: Mapping[str, Any] | None, **template: Any
    ) -> Callable[..., Prompt]:
        """What makes a prompt of a conversation; `caller` is what was called."""
        read_settings(settings)  # wrong ones are the call's, not a row's
        own = Template(**template_options(caller, template))
        return partial(self._renderer.from_conversation, mm_processor_kwargs=settings, template=own)

    def _parse_policy(self, reuse: Reuse | None) -> Policy:
        return self._policy if reuse is None else self._checkpoint.check_policy(parse_policy(reuse))


def template_options(caller: Callable[..., Any], given: Mapping[str, Any]) -> TemplateOptions:
    """What is said of the template, of all that a call of `caller` was given beside its own arguments.

    Raises:
      TypeError: the rest is unknown, or must be written in another way; see `ours`.
    """
    known = TemplateOptions.__annotations__
    if others := {name: value for name, value in given.items() if name not in known}:
        named = inspect.signature(caller).parameters.keys() - {"template"}  # those are `known`
        ours(caller.__name__, CALLS, others, (*sorted(named), *known))
    return cast(TemplateOptions, {name: value for name, value in given.items() if name in known})


def _translated(foreign: Mapping[str, Any], model: Any, revision: str | None) -> dict[str, Any]:
    """Arguments of vLLM in ours. Those that say once more what ours say already say nothing."""
    again = {"tokenizer": model, "tokenizer_revision": revision, "hf_config_path": model}
    given = {name: value for name, value in foreign.items() if name not in again or str(value) != str(again[name])}
    return ours("LLM", ENGINE, given, inspect.signature(BaseLLM).parameters)


def _fingerprint(checkpoint: Checkpoint, show: bool) -> str:
    with Progress("fingerprinting the weights", show=show):
        return checkpoint.fingerprint


def _compile_all(programs: Programs, policy: Policy, verbose: bool) -> tuple[int, float]:
    keys = programs.missing(programs.keys_for(policy))
    with interruptible(), Progress("compiling", len(keys), show=verbose) as bar:
        count, seconds = programs.compile(keys, lambda _: bar.update())
    if verbose and count:
        say(f"compiled {count} programs in {seconds:.1f} s")
        _say_kernels(choice for choices in programs.kernels.values() for choice in choices)
    return count, seconds


def _say_kernels(choices: Iterable[dispatch.Choice]) -> None:
    uses = collections.Counter((choice.kernel, choice.implementation, choice.why) for choice in choices)
    for (kernel, implementation, why), number in sorted(uses.items()):
        say(f"{kernel}: {implementation} in {number} cases ({why})")


def _check_arguments(model: Any, dtype: Any, cache: Any, ladder: Any, revision: Any, seed: Any) -> None:
    if not isinstance(model, (str, os.PathLike)):
        raise ValueError(f"model must be a directory or the id of a model on the hub, got {model!r}")
    if not (isinstance(dtype, str) and dtype == "auto"):
        as_dtype(dtype, "auto")
    if not isinstance(cache, CacheConfig):
        raise ValueError(f"cache must be a CacheConfig, got {cache!r}")
    if not isinstance(ladder, Ladder | None):
        raise ValueError(f"ladder must be a Ladder or None, got {ladder!r}")
    if not isinstance(revision, str | None):
        raise ValueError(f"revision must be a string or None, got {revision!r}")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed must be an integer of at least 0, got {seed!r}")


def _check_counts(**counts: Any) -> None:
    for name, value in counts.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be a positive integer, got {value!r}")


def _check_share(share: Any) -> None:
    if share is not None and (isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1):
        raise ValueError(f"gpu_memory_utilization must be a number above 0 and at most 1, got {share!r}")


_LIMIT_KEYS = ("count", "num_frames", "width", "height", "length")  # vLLM's; but for the first they size its rehearsal


def _check_limits_per_prompt(limits: Any) -> dict[str, int]:
    """How many images and videos a request may have; any number of what is not in it."""
    if limits is None:
        return {}
    if not isinstance(limits, Mapping):
        raise ValueError(f'limit_mm_per_prompt must be a dict such as {{"image": 4}}, got {limits!r}')
    for kind in limits:
        if kind not in ("image", "video", "audio"):
            raise ValueError(f"limit_mm_per_prompt must hold only image, video, audio, got {kind!r}")
    found: dict[str, int] = {}
    idle: list[str] = []
    for kind, given in limits.items():
        most = given
        if isinstance(given, Mapping):
            most = given.get("count")
            for key in given:
                if key not in _LIMIT_KEYS:
                    raise ValueError(
                        f"limit_mm_per_prompt[{kind!r}] must hold only {', '.join(_LIMIT_KEYS)}, got {key!r}"
                    )
            idle += [f"limit_mm_per_prompt[{kind!r}][{key!r}]" for key in given if key != "count"]
            if most is None:
                continue
        if isinstance(most, bool) or not isinstance(most, int) or most < 0:
            raise ValueError(f"limit_mm_per_prompt must be integers of at least 0, got {most!r} for {kind}")
        found[kind] = most
    if idle:
        warn_ignored(idle)
    return found


def _load(checkpoint: Checkpoint, device: jax.Device, show: bool) -> dict[str, Any]:
    doing = f"loading weights of {checkpoint.directory.resolve().name} ({checkpoint.nbytes() / 1e9:.2f} GB)"
    with Progress(doing, checkpoint.num_parameters, show=show) as bar:
        return checkpoint.load(device, bar.update)


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
    if renderer.video_token_id != config.video_token_id:
        raise ValueError(
            f"video placeholder of the tokenizer must be the model's {config.video_token_id}, "
            f"got {renderer.video_token_id}"
        )
