"""An open model: the one place where its parts are put together, for every front of it."""

from __future__ import annotations

import collections
import functools
import inspect
import logging
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, Unpack, cast

import jax
import numpy as np
import numpy.typing as npt

from vlcache_jax import kernel_selftest
from vlcache_jax.cache.config import open_tiers
from vlcache_jax.cache.device import PAGE_TOKENS, DeviceTier
from vlcache_jax.cache.items import Items
from vlcache_jax.cache.keys import Quotas
from vlcache_jax.cache.record import Tier
from vlcache_jax.cache.store import Store
from vlcache_jax.cache.writer import Writer
from vlcache_jax.calls.caller import Caller
from vlcache_jax.calls.groups import Call
from vlcache_jax.common.checks import check_flags
from vlcache_jax.common.progress import Progress, interruptible, say, shown_waiting
from vlcache_jax.common.vllm_compat import CALLS, ours
from vlcache_jax.compress.parse import parse_compressor
from vlcache_jax.compress.policies import Compressor
from vlcache_jax.config import EngineConfig, EngineOptions
from vlcache_jax.convert.source import locate
from vlcache_jax.device.buckets import round_up
from vlcache_jax.device.checkpoint import Checkpoint, open_checkpoint
from vlcache_jax.device.kv_shape import KVShape
from vlcache_jax.device.memory_plan import MemoryPlan, kept_token_bytes, plan_memory, weight_bytes
from vlcache_jax.device.mesh import Devices, check_exchange, check_sizes, find_devices, part_of, widened
from vlcache_jax.device.programs.base import Key
from vlcache_jax.device.programs.compile_cache import use_compilation_cache
from vlcache_jax.device.programs.table import Programs
from vlcache_jax.device.runner import Runner, check_kernels
from vlcache_jax.engine.compile_ahead import Ahead
from vlcache_jax.engine.engine import Engine, EngineStats, Loop
from vlcache_jax.engine.pages import Pages
from vlcache_jax.image_cache import ImageCache
from vlcache_jax.inputs.messages import read_settings
from vlcache_jax.inputs.processor import ImageProcessor
from vlcache_jax.inputs.prompt import (
    OWN_TEMPLATE,
    Prompt,
    PromptRenderer,
    Template,
    TemplateOptions,
    check_tokenizer,
    template_text,
)
from vlcache_jax.inputs.video_processor import VideoProcessor
from vlcache_jax.inputs.videos import import_decoders
from vlcache_jax.models import ModelConfig, load_config
from vlcache_jax.outputs import Reporter
from vlcache_jax.pallas_kernels import CODECS, PAGE, dispatch
from vlcache_jax.pallas_kernels.checks import CHECKS, PORTABLE
from vlcache_jax.preparation.identification import Identifier
from vlcache_jax.preparation.media import Media
from vlcache_jax.preparation.planner import Forms, Identity, Planner, Rates, identity_of, time_limit
from vlcache_jax.preparation.recognition import Recognizer
from vlcache_jax.preparation.sequences import SequenceBuilder, read_generation_config
from vlcache_jax.request_options import Compress, RequestOptions, ResolvedOptions, Reuse
from vlcache_jax.reuse.policies import Policy
from vlcache_jax.reuse.selection import parse_policy
from vlcache_jax.sampling import StructuredOutputsConfig

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class EntryFormat:
    """How records are kept, and what their keys say of the model.

    Attributes:
      kv: keys and values.
      fingerprint: of the weights. The first call on a directory of the hub reads and hashes them all.
    """

    kv: KVShape
    fingerprint: Callable[[], str]


@dataclass(frozen=True, eq=False)
class Device:
    """What computes.

    Attributes:
      runner: has weights and KV pool, and its `programs`.
      memory: what fits.
      identity: what rates that were measured hold for.
    """

    runner: Runner
    memory: MemoryPlan
    identity: Identity


@dataclass(frozen=True, eq=False)
class Cache:
    """What is kept.

    Attributes:
      store: records, in host memory and in the tiers outside it.
      writer: fills records with what was computed.
      tier: says which records are kept on the device.
      pages: prompts in the KV pool.
    """

    store: Store
    writer: Writer
    tier: DeviceTier
    pages: Pages


@dataclass(frozen=True, eq=False)
class Intake:
    """What makes of prompts what can run.

    Attributes:
      processor: of images.
      identifier: finds out which images prompts show.
      planner: looks requests up and plans them.
      sequences: makes of planned requests what runs.
      threads: decode images.
      quick_threads: hash files and read their heads.
    """

    processor: ImageProcessor
    identifier: Identifier
    planner: Planner
    sequences: SequenceBuilder
    threads: Executor
    quick_threads: Executor


@dataclass(eq=False)
class Service:
    """An open model. `LLM` and `AsyncLLM` are fronts of it.

    Attributes:
      config: what it was opened with.
      checkpoint: files of the model.
      policy: what is done with known images, unless a call says otherwise.
      renderer: makes prompts of messages.
      intake: makes of prompts what can run.
      device: what computes; gone when the service is closed.
      loop: the thread that drives the engine.
      ahead: compiles what a repeat will call for.
      cache: what is kept.
      items: of libraries.
      stored: how it is kept.
      caller: answers and scores prompts.
      images: `LLM.cache`.
    """

    config: EngineConfig
    checkpoint: Checkpoint
    policy: Policy
    renderer: PromptRenderer
    intake: Intake
    device: Device
    loop: Loop
    ahead: Ahead
    cache: Cache
    items: Items
    stored: EntryFormat
    caller: Caller
    images: ImageCache

    @classmethod
    def open(cls, config: EngineConfig) -> Self:
        """Opens a model. What can be told to be wrong without its weights is told before they are loaded.

        Raises:
          FileNotFoundError, ValueError: the checkpoint is missing, damaged or of an unknown model, or an option does
            not fit it.
          NotImplementedError: the implementation asked for does not do this model, dtype or device.
          MemoryError: weights and pool do not fit. Nothing has been loaded then.
          RuntimeError: devices do not reach each other. Likewise.
        """
        directory = _find(config)
        jax_devices = _meet_devices(config)
        checkpoint = _open_checkpoint(config, directory, jax_devices[0])
        devices = Devices.of(jax_devices, checkpoint.config)
        if devices.count > 1:
            with Progress(f"seeing that {devices.count} devices reach each other", show=config.use_tqdm):
                check_exchange(devices)
        stored = _how_stored(config, checkpoint)
        shares = Quotas(config.cache.owner_bytes)
        tiers = open_tiers(config.cache, shares, fingerprint=stored.fingerprint, codec=stored.kv.stored_as)
        policy = checkpoint.check_policy(config.policy)
        renderer, processor = _open_inputs(config, checkpoint)
        videos = VideoProcessor.from_pretrained(checkpoint.directory, checkpoint.config, processor)
        device = _open_device(config, checkpoint, devices, processor, stored.kv)
        runner, memory = device.runner, device.memory
        renderer.max_tokens = memory.max_model_len
        sequences = _open_sequences(config, checkpoint, memory, renderer.tokenizer)
        rates = Rates.load(device.identity)
        forms = Forms(checkpoint.config, stored.kv, stored.fingerprint)
        cache = _open_cache(config, device, tiers, shares, rates, forms)
        threads = ThreadPoolExecutor(min(8, os.cpu_count() or 1), "vlcache-images")
        quick_threads = ThreadPoolExecutor(8, "vlcache-heads")
        loop = Loop(Engine(runner, cache.writer, cache.pages, threads, cache.tier))
        ahead = Ahead(runner.programs)
        items = Items(config.cache.disk)
        media = Media(
            processor, videos, renderer,
            max_patches=runner.token_rungs[-1] * processor.merge_size**2, max_pixels=config.max_image_pixels,
        )  # fmt: skip
        identifier = Identifier(
            Recognizer(cache.store, items, media, fingerprint=stored.fingerprint, codec=stored.kv.stored_as), renderer,
            threads=threads, quick_threads=quick_threads,
        )  # fmt: skip
        planner = Planner(
            checkpoint.config, cache.store, cache.writer,
            forms=forms, token_rungs=runner.token_rungs,
            rates=rates if config.cache.load == "auto" else None, keeps_pages=config.enable_prefix_caching,
        )  # fmt: skip
        intake = Intake(processor, identifier, planner, sequences, threads, quick_threads)
        text = checkpoint.config.text
        reporter = Reporter(text.num_layers, text.hidden_size, sequences.token_bytes)
        caller = Caller(identifier, planner, loop, sequences, reporter, ahead)
        images = ImageCache(cache.store, cache.tier, cache.writer, cache.pages, identifier, renderer, caller)
        return cls(
            config, checkpoint, policy, renderer, intake, device, loop, ahead, cache, items, stored, caller, images
        )  # fmt: skip

    @classmethod
    def of(cls, model: str | os.PathLike[str] | EngineConfig | Self, **options: Unpack[EngineOptions]) -> Self:
        """The service that a front was given, or opens by its arguments.

        Raises:
          TypeError, ValueError: see `EngineConfig.of`; or there are options beside a configuration or a service.
          RuntimeError: the service is closed.
          FileNotFoundError, NotImplementedError, MemoryError: see `open`.
        """
        if not isinstance(model, EngineConfig | Service):
            return cls.open(EngineConfig.of(model, **options))
        for name in options:
            raise TypeError(f"{name} must be left out beside {type(model).__name__}, got both")
        if isinstance(model, EngineConfig):
            return cls.open(model)
        model.loop.check_open()
        return model

    @property
    def engine(self) -> Engine:
        """Runs what the loop is given; gone when the service is closed."""
        return self.loop.engine

    @property
    def kernels(self) -> dict[Key, tuple[dispatch.Choice, ...]]:
        """See `LLM.kernels`."""
        return {program.key: choices for program, choices in dict(self.device.runner.programs.kernels).items()}

    def stats(self) -> EngineStats:
        """See `LLM.stats`."""
        self.loop.check_open()
        return self.engine.stats()

    def tokens(self, render: Callable[..., Prompt], given: Any) -> npt.NDArray[np.int32]:
        """What the model sees of a prompt: token ids, images expanded. No pixel is decoded.

        Raises:
          RuntimeError: the service is closed.
          ValueError: it is wrong, as far as pixels do not tell.
        """
        self.loop.check_open()
        arrivals = self.intake.identifier.open([render(given, name="prompt")], lookup=False)
        for error in arrivals.errors.values():
            raise error
        return arrivals.token_ids(0)

    def warmup(self, reuse: Reuse | None, *, verbose: bool) -> tuple[int, float]:
        """See `LLM.warmup`."""
        check_flags(verbose=verbose)
        policy = self.policy_of(reuse)
        self.loop.check_open()
        self.ahead.stop()
        compiled = _compile_all(self.device.runner.programs, policy, verbose)
        with interruptible(), Progress("warming up", show=verbose):
            with Progress(f"taking {self.stats().kv_cache_bytes / 1e9:.2f} GB for keys and values"):
                self.loop.prepare()
            self.stored.fingerprint()
            import_decoders()
        return compiled

    def reset_mm_cache(self) -> None:
        """See `LLM.reset_mm_cache`."""
        self.loop.check_open()
        self.cache.writer.flush()
        self.cache.store.clear()
        self.cache.pages.clear()

    def reset_prefix_cache(self) -> None:
        """See `LLM.reset_prefix_cache`."""
        self.loop.check_open()
        self.cache.pages.clear()

    def close(self) -> None:
        """Gives back the memory of weights and pool; calls under way end."""
        self.ahead.stop()
        self.loop.close()
        self.images.close()
        for threads in (self.intake.threads, self.intake.quick_threads):
            threads.shutdown(cancel_futures=True)
        self.intake.sequences.grammars.close()
        self.cache.writer.close()
        self.cache.store.close()
        self.cache.store.clear()
        self.items.close()
        vars(self).pop("device", None)  # who is closed needs no weights

    def policy_of(self, reuse: Reuse | None) -> Policy:
        """What a call asks for; None is what the service was opened with.

        Raises:
          ValueError: it is no policy, or one of another model.
        """
        return self.policy if reuse is None else self.checkpoint.check_policy(parse_policy(reuse))

    def compressor_of(self, compress: Compress | None) -> Compressor | None:
        """What a call asks for.

        Raises:
          ValueError: it is no policy, or there is no pool for it.
        """
        if compress is None:
            return None
        compressor = parse_compressor(compress)
        if not self.device.memory.compressed_pages:
            raise ValueError(
                f"compress must be left out where compressed_kv_bytes of the engine is 0, got {compressor.name}"
            )
        return compressor

    def call(
        self,
        name: str,
        listed: Sequence[Any],
        render: Callable[..., Prompt],
        options: RequestOptions,
        on_error: str,
        **more: Any,
    ) -> Call:
        """A call, checked; see `Call`.

        Raises:
          RuntimeError: the service is closed.
          ValueError: an argument is wrong.
        """
        self.loop.check_open()
        read = {"reuse": self.policy_of(options.reuse), "compress": self.compressor_of(options.compress)}
        return Call(name, listed, render, ResolvedOptions(**{**vars(options), **read}), on_error, **more)

    def renders(
        self, caller: Callable[..., Any], options: RequestOptions, template: Mapping[str, Any]
    ) -> Callable[..., Prompt]:
        """What makes a prompt of a conversation; `caller` is what was called."""
        told: dict[str, Any] = {**template_options(caller, template)}
        if isinstance(given := told.get("chat_template"), str | os.PathLike):
            told["chat_template"] = template_text(given)
        own, settings = Template(**told) if told else OWN_TEMPLATE, read_settings(options.mm_processor_kwargs)
        return partial(self.renderer.from_conversation, settings=settings, template=own)

    def continues(self, options: RequestOptions) -> Callable[..., Prompt]:
        """What takes a prompt as it is.

        Raises:
          ValueError: the settings of its images stand elsewhere than in it.
        """
        if options.mm_processor_kwargs is not None:
            raise ValueError("mm_processor_kwargs must stand in the prompt's dict, got them beside it")
        return self.renderer.from_prompt


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


# The steps of opening, in their order.


def _find(config: EngineConfig) -> pathlib.Path:
    """The checkpoint's directory. What its small files tell to be wrong is said before anything takes time."""
    directory = locate(os.fspath(config.model), config.revision).directory
    load_config(directory)
    check_tokenizer(directory)
    return directory


def _meet_devices(config: EngineConfig) -> list[jax.Device]:
    if config.implementation is None:
        kernel_selftest.meet(CHECKS, PORTABLE, show=config.use_tqdm)  # from here on jax may hold the device's memory
    devices = find_devices(config.tensor_parallel_size)
    dispatch.check_device(config.implementation, devices[0])
    use_compilation_cache(devices)
    return devices


def _open_checkpoint(config: EngineConfig, directory: pathlib.Path, device: jax.Device) -> Checkpoint:
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if device.platform == "cpu" else "bfloat16"
    checkpoint = open_checkpoint(directory, dtype=dtype, verify_weights=config.verify_weights)
    check_sizes(checkpoint.config.text, config.tensor_parallel_size)
    if config.implementation is not None:
        own = part_of(checkpoint.config, config.tensor_parallel_size)
        check_kernels(own, checkpoint.dtype, config.implementation)
    return checkpoint


def _how_stored(config: EngineConfig, checkpoint: Checkpoint) -> EntryFormat:
    codec = None if config.cache.codec == "auto" else CODECS[config.cache.codec]
    if codec is not None:
        codec.group(checkpoint.config.text.head_dim)  # checks it

    @functools.cache
    def fingerprint() -> str:
        with Progress("fingerprinting the weights", show=config.use_tqdm):
            return checkpoint.fingerprint

    return EntryFormat(KVShape.of(checkpoint.config, checkpoint.dtype, codec), fingerprint)


def _open_inputs(config: EngineConfig, checkpoint: Checkpoint) -> tuple[PromptRenderer, ImageProcessor]:
    renderer = PromptRenderer.from_pretrained(checkpoint.directory, access=config.access)
    renderer.video_options = config.settings.videos
    renderer.max_images, renderer.max_videos = config.limits.get("image"), config.limits.get("video")
    processor = ImageProcessor.from_pretrained(checkpoint.directory).with_limits(config.settings.limits)
    _check_processor(processor, renderer, checkpoint.config)
    return renderer, processor


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


def _open_device(
    config: EngineConfig, checkpoint: Checkpoint, devices: Devices, processor: ImageProcessor, kv: KVShape
) -> Device:
    """Sees that it fits, and loads the weights."""
    model = widened(checkpoint.config, devices.count)
    memory = plan_memory(
        model, KVShape.of(model, checkpoint.dtype, kv.codec), devices.all[0], config.ladder, others=devices.all[1:],
        weights=weight_bytes(model, checkpoint.dtype, devices.count),
        max_rows=config.max_rows, max_sequences=config.max_num_seqs,
        max_patches=processor.max_pixels // processor.patch_size**2, max_model_len=config.max_model_len,
        kv_cache_bytes=cast(int | None, config.kv_cache_bytes), share=config.gpu_memory_utilization,
        device_bytes=int(config.cache.device_bytes), compressed_bytes=int(config.compressed_kv_bytes),
    )  # fmt: skip
    runner = Runner(
        model, _load(checkpoint, devices, config.use_tqdm), processor.normalization_table,
        num_slots=memory.num_slots + PAGE, max_pages=-(-memory.max_model_len // PAGE), ladder=memory.ladder,
        implementation=config.implementation, codec=kv.codec, kept_tokens=memory.kept_pages * PAGE_TOKENS,
        compressed_slots=memory.compressed_pages and (memory.compressed_pages + 1) * PAGE, devices=devices,
    )  # fmt: skip
    runner.programs.shows = shown_waiting
    identity = identity_of(checkpoint.config, devices.all[0].device_kind, kv, devices.count)
    return Device(runner, memory, identity)


def _load(checkpoint: Checkpoint, devices: Devices, show: bool) -> dict[str, Any]:
    doing = f"loading weights of {checkpoint.directory.resolve().name} ({checkpoint.nbytes() / 1e9:.2f} GB)"
    with Progress(doing, checkpoint.num_parameters, show=show) as bar:
        return checkpoint.load(devices.place, bar.update)


def _open_sequences(
    config: EngineConfig, checkpoint: Checkpoint, memory: MemoryPlan, tokenizer: Any
) -> SequenceBuilder:
    model = checkpoint.config
    defaults = read_generation_config(checkpoint.directory, tokenizer, model.text.vocab_size)
    structured = StructuredOutputsConfig.of(config.structured_outputs_config)
    return SequenceBuilder(model, memory, tokenizer, *defaults, config.seed, structured)


def _open_cache(
    config: EngineConfig, device: Device, tiers: Sequence[Tier], shares: Quotas, rates: Rates | None, forms: Forms
) -> Cache:
    runner, memory = device.runner, device.memory
    token_bytes = kept_token_bytes(runner.config, runner.shapes.kv, runner.devices.count)
    tier = DeviceTier(memory.kept_pages, PAGE_TOKENS * token_bytes)
    pages = Pages(memory.num_slots // PAGE)
    store = Store(
        config.cache, tiers, shares=shares,
        room=partial(round_up, rungs=runner.token_rungs), limit=partial(time_limit, rates),
        forgotten=tier.drop, expired=pages.drop, form=forms.of, together=runner.shapes.link_groups[0].stop,
    )  # fmt: skip
    return Cache(store, Writer(store, runner.devices.copies), tier, pages)


def _compile_all(programs: Programs, policy: Policy, verbose: bool) -> tuple[int, float]:
    missing, compiled = programs.missing(programs.family_of(policy)), programs.num_compiled
    with interruptible(), Progress("compiling", len(missing), show=verbose) as bar:

        def show(done: int, seconds: float) -> None:
            bar.reach(done, f"programs, {seconds:.0f} s, now {', '.join(map(str, programs.under_way)) or 'none'}")

        count, seconds = programs.compile(missing, show)
    compiled = programs.num_compiled - compiled
    _log.info("compiled %d and loaded %d programs in %.1f s", compiled, count - compiled, seconds)
    if verbose and count:
        loaded = f" and loaded {count - compiled} kept ones" if count > compiled else ""
        say(f"compiled {compiled} programs{loaded} in {seconds:.1f} s")
        _say_kernels(choice for choices in programs.kernels.values() for choice in choices)
    return count, seconds


def _say_kernels(choices: Iterable[dispatch.Choice]) -> None:
    uses = collections.Counter((choice.kernel, choice.implementation, choice.why) for choice in choices)
    for (kernel, implementation, why), number in sorted(uses.items()):
        say(f"{kernel}: {implementation} in {number} cases ({why})")
