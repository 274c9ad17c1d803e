"""Open model: builds the parts of an engine, which `LLM` and `AsyncLLM` share."""

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
from vlcache_jax.cache.items import Item, Items
from vlcache_jax.cache.keys import Quotas, Salt
from vlcache_jax.cache.record import Tier
from vlcache_jax.cache.snapshots import HostSnapshots
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
from vlcache_jax.engine.pages import BlockTable, Pages
from vlcache_jax.engine.snapshots import StateSlots
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
from vlcache_jax.preparation.openings import Openings
from vlcache_jax.preparation.planner import Identity, MetaBuilder, Planner, Rates, identity_of, time_limit
from vlcache_jax.preparation.recognition import Recognizer
from vlcache_jax.preparation.sequences import SequenceBuilder, read_generation_config
from vlcache_jax.request_options import Compress, RequestOptions, ResolvedOptions, Reuse
from vlcache_jax.reuse.policies import Policy
from vlcache_jax.sampling import StructuredOutputsConfig

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class EntryFormat:
    """Format of cache entries, and the model's part of entry keys.

    Attributes:
      kv: shape and codec of the stored KV.
      fingerprint: returns the hash of the weights. The first call hashes all weights of a Hugging Face directory.
    """

    kv: KVShape
    fingerprint: Callable[[], str]


@dataclass(frozen=True, eq=False)
class Device:
    """Programs, weights and memory of the device.

    Attributes:
      runner: weights, KV pool, and `programs`.
      memory: sizes that fit in the device's memory.
      identity: model and device that measured rates apply to.
    """

    runner: Runner
    memory: MemoryPlan
    identity: Identity


@dataclass(frozen=True, eq=False)
class Cache:
    """Image cache and prefix cache.

    Attributes:
      store: cache entries in host memory and in the other tiers.
      writer: fills cache entries with computed encoder output and KV.
      tier: selects the cache entries stored on the device.
      pages: prompts in the KV pool.
    """

    store: Store
    writer: Writer
    tier: DeviceTier
    pages: Pages


@dataclass(frozen=True, eq=False)
class Preparation:
    """Request preparation: turns prompts into sequences that can run.

    Attributes:
      processor: image processor.
      identifier: finds the entry keys of the images in prompts.
      planner: looks requests up in the cache and plans them.
      sequences: builds sequences from planned requests.
      threads: threads that decode images.
      quick_threads: threads that hash files and read their headers.
    """

    processor: ImageProcessor
    identifier: Identifier
    planner: Planner
    sequences: SequenceBuilder
    threads: Executor
    quick_threads: Executor

    def tokens(self, item: Item) -> int:
        """Return the number of tokens of a library item's image."""
        size = item.image_key
        return self.processor.num_tokens(self.processor.grid(size.height, size.width, item.limits))


@dataclass(eq=False)
class Service:
    """Open model, the common part of `LLM` and `AsyncLLM`.

    Attributes:
      config: options of the engine.
      checkpoint: files of the model.
      policy: default reuse policy of calls.
      renderer: renders messages to prompts.
      preparation: request preparation.
      device: programs, weights and memory; deleted when the service is closed.
      loop: the thread that drives the engine.
      ahead: compiles the programs that repeated images will need.
      cache: image cache and prefix cache.
      items: items of libraries.
      stored: format of cache entries.
      caller: runs calls.
      images: `LLM.cache`.
    """

    config: EngineConfig
    checkpoint: Checkpoint
    policy: Policy
    renderer: PromptRenderer
    preparation: Preparation
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
        """Open a model. Everything that can be checked without the weights is checked before they are loaded.

        Raises:
          FileNotFoundError, ValueError: the checkpoint is missing, damaged or of an unknown model, or an option does
            not fit it.
          NotImplementedError: the requested implementation does not support this model, dtype or device.
          MemoryError: weights and KV pool do not fit. Nothing has been loaded then.
          RuntimeError: the devices cannot communicate. Nothing has been loaded then.
        """
        directory = _find(config)
        jax_devices = _meet_devices(config)
        checkpoint = _open_checkpoint(config, directory, jax_devices[0])
        _check_states(config, checkpoint.config)
        devices = Devices.of(jax_devices, checkpoint.config)
        if devices.count > 1:
            with Progress(f"checking that {devices.count} devices can communicate", show=config.use_tqdm):
                check_exchange(devices)
        policy = checkpoint.policy_of("approximate" if config.reuse == "approximate" else config.policy)
        stored = _how_stored(config, checkpoint, policy)
        shares = Quotas(config.cache.owner_bytes)
        tiers = open_tiers(config.cache, shares, fingerprint=stored.fingerprint, codec=stored.kv.stored_as)
        renderer, processor = _open_inputs(config, checkpoint)
        videos = VideoProcessor.from_pretrained(checkpoint.directory, checkpoint.config, processor)
        device = _open_device(config, checkpoint, devices, processor, stored.kv)
        runner, memory = device.runner, device.memory
        renderer.max_tokens = memory.max_model_len
        sequences = _open_sequences(config, checkpoint, memory, renderer.tokenizer)
        rates = Rates.load(device.identity)
        forms = MetaBuilder(checkpoint.config, stored.kv, stored.fingerprint)
        cache = _open_cache(config, device, tiers, shares, rates, forms)
        threads = ThreadPoolExecutor(min(8, os.cpu_count() or 1), "vlcache-images")
        quick_threads = ThreadPoolExecutor(8, "vlcache-heads")
        loop = Loop(Engine(runner, cache.writer, cache.pages, threads, cache.tier))
        ahead = Ahead(runner.programs)
        items = Items(config.cache.disk)
        media = Media(
            processor, videos, renderer,
            max_patches=runner.token_buckets[-1] * processor.merge_size**2, max_pixels=config.max_image_pixels,
        )  # fmt: skip
        identifier = Identifier(
            Recognizer(cache.store, items, media, fingerprint=stored.fingerprint, codec=stored.kv.stored_as), renderer,
            threads=threads, quick_threads=quick_threads,
        )  # fmt: skip
        text = checkpoint.config.text
        planner = Planner(
            checkpoint.config, cache.store, cache.writer,
            forms=forms, token_buckets=runner.token_buckets,
            rates=rates if config.cache.load == "auto" else None,
            links_kv=runner.shapes.links_kv and bool(config.cache.memory_for_states or not text.has_states),
            keeps_pages=config.enable_prefix_caching and bool(memory.num_snapshots or not text.has_states),
            turn_token=_turn_token(renderer.tokenizer), edges=checkpoint.edges_of(policy),
            openings=Openings.of(renderer, config.cache.neutral_systems, _turn_token(renderer.tokenizer)),
            max_tokens=memory.max_model_len,
        )  # fmt: skip
        preparation = Preparation(processor, identifier, planner, sequences, threads, quick_threads)
        reporter = Reporter(text.num_layers, text.hidden_size, sequences.token_bytes)
        caller = Caller(identifier, planner, loop, sequences, reporter, ahead)
        images = ImageCache(cache.store, cache.tier, cache.writer, cache.pages, identifier, renderer, caller)
        return cls(
            config, checkpoint, policy, renderer, preparation, device, loop, ahead, cache, items, stored, caller, images
        )  # fmt: skip

    @classmethod
    def of(cls, model: str | os.PathLike[str] | EngineConfig | Self, **options: Unpack[EngineOptions]) -> Self:
        """Return `model` if it is a service, otherwise open one.

        Raises:
          TypeError, ValueError: see `EngineConfig.of`; or options are given with a configuration or a service.
          RuntimeError: the service is closed.
          FileNotFoundError, NotImplementedError, MemoryError: see `open`.
        """
        if not isinstance(model, EngineConfig | Service):
            return cls.open(EngineConfig.of(model, **options))
        for name in options:
            raise TypeError(f"{name} cannot be combined with {type(model).__name__}: set it in the EngineConfig")
        if isinstance(model, EngineConfig):
            return cls.open(model)
        model.loop.check_open()
        return model

    @property
    def engine(self) -> Engine:
        """The engine that the loop drives; not available once the service is closed."""
        return self.loop.engine

    @property
    def kernels(self) -> dict[Key, tuple[dispatch.Choice, ...]]:
        """Kernels in the programs compiled so far, see `LLM.kernels`."""
        return {program.key: choices for program, choices in dict(self.device.runner.programs.kernels).items()}

    def stats(self) -> EngineStats:
        """Return the counters of the engine, see `LLM.stats`."""
        self.loop.check_open()
        return self.engine.stats()

    def tokens(self, render: Callable[..., Prompt], given: Any, salt: Salt = None) -> npt.NDArray[np.int32]:
        """Return the token IDs of a prompt with its images expanded, int32 [n]. It decodes no pixels.

        Raises:
          RuntimeError: the service is closed.
          ValueError: the prompt is wrong; faults of pixels are not found.
        """
        self.loop.check_open()
        arrivals = self.preparation.identifier.open([render(given, name="prompt")], salt, lookup=False)
        for error in arrivals.errors.values():
            raise error
        return arrivals.token_ids(0)

    def warmup(self, reuse: Reuse | None, *, verbose: bool) -> tuple[int, float]:
        """Prepare the engine for requests, see `LLM.warmup`."""
        check_flags(verbose=verbose)
        policy = self.policy_of(reuse)
        self.loop.check_open()
        self.ahead.stop()
        compiled = _compile_all(self.device.runner.programs, policy, verbose)
        with interruptible(), Progress("warming up", show=verbose):
            with Progress(f"allocating {self.stats().kv_cache_bytes / 1e9:.2f} GB for the KV pool"):
                self.loop.prepare()
            self.stored.fingerprint()
            import_decoders()
        return compiled

    def reset_mm_cache(self) -> None:
        """Forget all images and prompts, see `LLM.reset_mm_cache`."""
        self.loop.check_open()
        self.cache.writer.flush()
        self.cache.store.clear()
        self.cache.pages.clear()

    def reset_prefix_cache(self) -> None:
        """Forget all prompts, see `LLM.reset_prefix_cache`."""
        self.loop.check_open()
        self.cache.pages.clear()

    def close(self) -> None:
        """Close the service and free the memory of weights and KV pool; calls in flight end with an error."""
        self.ahead.stop()
        self.loop.close()
        self.images.close()
        for threads in (self.preparation.threads, self.preparation.quick_threads):
            threads.shutdown(cancel_futures=True)
        self.preparation.sequences.grammars.close()
        self.cache.writer.close()
        self.cache.store.close()
        self.cache.store.clear()
        self.items.close()
        vars(self).pop("device", None)  # frees the weights

    def policy_of(self, reuse: Reuse | None) -> Policy:
        """Return the reuse policy of a call; None is the service's.

        Raises:
          ValueError: `reuse` is not a policy, or is a policy of another model.
        """
        return self.policy if reuse is None else self.checkpoint.policy_of(reuse, self.policy)

    def compressor_of(self, compress: Compress | None) -> Compressor | None:
        """Return the compression policy of a call, or None.

        Raises:
          ValueError: `compress` is not a policy, or the engine has no pool for compressed requests.
        """
        if compress is None:
            return None
        compressor = parse_compressor(compress)
        if not self.device.memory.compressed_pages:
            raise ValueError(
                f"compress={compressor.name!r} needs a compressed KV pool: open the engine with compressed_kv_bytes, "
                'for example "1GiB"'
            )
        return compressor

    def call(
        self,
        name: str,
        listed: Sequence[Any],
        render: Callable[..., Prompt],
        options: RequestOptions,
        on_error: str,
        **rest: Any,
    ) -> Call:
        """Return a checked call; the arguments are those of `Call`.

        Raises:
          RuntimeError: the service is closed.
          ValueError: an argument is wrong.
        """
        self.loop.check_open()
        donors = self.config.cache.donor_rule
        if options.donors is not None:
            donors = self.config.cache.narrower_rule(options.donors)
        policy, compressor = self.policy_of(options.reuse), self.compressor_of(options.compress)
        read = {"reuse": policy, "compress": compressor, "donors": donors}
        return Call(name, listed, render, ResolvedOptions(**{**vars(options), **read}), on_error, **rest)

    def renders(
        self, caller: Callable[..., Any], options: RequestOptions, template: Mapping[str, Any]
    ) -> Callable[..., Prompt]:
        """Return the function that renders a conversation to a prompt; `caller` is the public method of the call."""
        fields: dict[str, Any] = {**template_options(caller, template)}
        if isinstance(given := fields.get("chat_template"), str | os.PathLike):
            fields["chat_template"] = template_text(given)
        own, settings = Template(**fields) if fields else OWN_TEMPLATE, read_settings(options.mm_processor_kwargs)
        return partial(self.renderer.from_conversation, settings=settings, template=own)

    def continues(self, options: RequestOptions) -> Callable[..., Prompt]:
        """Return the function that reads a prompt without a chat template.

        Raises:
          ValueError: `mm_processor_kwargs` is an option of the call, rather than a key of the prompt.
        """
        if options.mm_processor_kwargs is not None:
            raise ValueError("mm_processor_kwargs must be a key of the prompt's dict, got it as an argument")
        return self.renderer.from_prompt


def template_options(caller: Callable[..., Any], given: Mapping[str, Any]) -> TemplateOptions:
    """Return the template's options among the extra arguments of a call of `caller`.

    Raises:
      TypeError: another argument is unknown, or vLLM's and has an equivalent; see `ours`.
    """
    known = TemplateOptions.__annotations__
    if others := {name: value for name, value in given.items() if name not in known}:
        named = inspect.signature(caller).parameters.keys() - {"template"}  # `known` has the template's options
        ours(caller.__name__, CALLS, others, (*sorted(named), *known))
    return cast(TemplateOptions, {name: value for name, value in given.items() if name in known})


# Steps of `Service.open`, in their order.


def _find(config: EngineConfig) -> pathlib.Path:
    """Return the checkpoint's directory. Its small files are checked first, before anything slow starts."""
    directory = locate(os.fspath(config.model), config.revision).directory
    load_config(directory)
    check_tokenizer(directory)
    return directory


def _meet_devices(config: EngineConfig) -> list[jax.Device]:
    if config.implementation is None:
        kernel_selftest.run_selftest(
            CHECKS, PORTABLE, show=config.use_tqdm
        )  # first: JAX may hold the device's memory later
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


def _how_stored(config: EngineConfig, checkpoint: Checkpoint, policy: Policy) -> EntryFormat:
    codec = None if config.cache.codec == "auto" else CODECS[config.cache.codec]
    if codec is not None:
        codec.group(checkpoint.config.text.head_dim)  # raises if the codec does not fit

    @functools.cache
    def fingerprint() -> str:
        with Progress("fingerprinting the weights", show=config.use_tqdm):
            return checkpoint.fingerprint

    maps = "" if (edges := checkpoint.edges_of(policy)) is None else edges.computed
    return EntryFormat(KVShape.of(checkpoint.config, checkpoint.dtype, codec, maps), fingerprint)


def _open_inputs(config: EngineConfig, checkpoint: Checkpoint) -> tuple[PromptRenderer, ImageProcessor]:
    renderer = PromptRenderer.from_pretrained(checkpoint.directory, access=config.access)
    renderer.video_options = config.settings.videos
    renderer.max_images, renderer.max_videos = config.limits.get("image"), config.limits.get("video")
    processor = ImageProcessor.from_pretrained(checkpoint.directory).with_limits(config.settings.limits)
    _check_processor(processor, renderer, checkpoint.config)
    return renderer, processor


def _check_processor(processor: ImageProcessor, renderer: PromptRenderer, config: ModelConfig) -> None:
    """Raise a ValueError if the checkpoint's files contradict each other: outputs would be silently wrong."""
    for name in ("patch_size", "merge_size", "temporal_patch_size"):
        expected, got = getattr(config.vision, name), getattr(processor, name)
        if got != expected:
            raise ValueError(f"{name} of the image processor must match the model's {expected}, got {got}")
    if renderer.image_token_id != config.image_token_id:
        raise ValueError(
            f"image placeholder of the tokenizer must match the model's image_token_id {config.image_token_id}, "
            f"got {renderer.image_token_id}"
        )
    if renderer.video_token_id != config.video_token_id:
        raise ValueError(
            f"video placeholder of the tokenizer must match the model's video_token_id {config.video_token_id}, "
            f"got {renderer.video_token_id}"
        )


def _check_states(config: EngineConfig, model: ModelConfig) -> None:
    """Raise a ValueError for options that need K,V in every layer, or states, if the model has none."""
    if not model.text.has_states:
        if config.state_snapshots:
            raise ValueError(
                f"state_snapshots must be None or 0 for {model.model_type}, whose layers have no states, got "
                f"{config.state_snapshots}"
            )
        return
    if size := config.cache.device_bytes:
        raise ValueError(
            f"cache.device_bytes must be 0 for {model.model_type}, got {size}: not all of its layers keep K,V of each "
            "token"
        )


def _turn_token(tokenizer: Any) -> int | None:
    """Return the ID of the token that begins a message, or None if the tokenizer has none."""
    found = tokenizer.get_vocab().get("<|im_start|>")
    return None if found is None else int(found)


def _open_device(
    config: EngineConfig, checkpoint: Checkpoint, devices: Devices, processor: ImageProcessor, kv: KVShape
) -> Device:
    """Check that the model fits in the device's memory, and load the weights."""
    model = widened(checkpoint.config, devices.count)
    memory = plan_memory(
        model, KVShape.of(model, checkpoint.dtype, kv.codec, kv.maps), devices.all[0], config.buckets,
        others=devices.all[1:],
        weights=weight_bytes(model, checkpoint.dtype, devices.count),
        max_rows=config.max_rows, max_sequences=config.max_num_seqs,
        max_patches=processor.max_pixels // processor.patch_size**2, max_model_len=config.max_model_len,
        kv_cache_bytes=cast(int | None, config.kv_cache_bytes), share=config.gpu_memory_utilization,
        device_bytes=int(config.cache.device_bytes), compressed_bytes=int(config.compressed_kv_bytes),
        snapshots=config.state_snapshots if config.enable_prefix_caching else 0,
    )  # fmt: skip
    runner = Runner(
        model, _load(checkpoint, devices, config.use_tqdm), processor.normalization_table,
        num_slots=memory.num_slots + PAGE, max_pages=-(-memory.max_model_len // PAGE), buckets=memory.buckets,
        implementation=config.implementation, codec=kv.codec, maps=kv.maps, kept_tokens=memory.kept_pages * PAGE_TOKENS,
        compressed_slots=memory.compressed_pages and (memory.compressed_pages + 1) * PAGE,
        num_snapshots=memory.num_snapshots, devices=devices,
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
    config: EngineConfig, device: Device, tiers: Sequence[Tier], shares: Quotas, rates: Rates | None, forms: MetaBuilder
) -> Cache:
    runner, memory = device.runner, device.memory
    token_bytes = kept_token_bytes(runner.config, runner.shapes.kv, runner.devices.count)
    tier = DeviceTier(memory.kept_pages, PAGE_TOKENS * token_bytes)
    store = Store(
        config.cache, tiers, shares=shares,
        room=partial(round_up, sizes=runner.token_buckets), limit=partial(time_limit, rates),
        forgotten=tier.drop, expired=lambda entry: pages.drop(entry), form=forms.of,
        together=runner.shapes.link_groups[0].count,
    )  # fmt: skip
    kv, host = runner.shapes.kv, None
    if kv.states and config.cache.memory_for_states and not config.cache.passes_on:
        host = HostSnapshots(store, kv.layers, kv.states)
    states = StateSlots[BlockTable].of(memory.buckets.max_sequences, runner.shapes.num_snapshots, host)
    pages = Pages(memory.num_slots // PAGE, states=states)
    return Cache(store, Writer(store, runner.devices.copies), tier, pages)


def _compile_all(programs: Programs, policy: Policy, verbose: bool) -> tuple[int, float]:
    missing, compiled = programs.missing(programs.family_of(policy)), programs.num_compiled
    with interruptible(), Progress("compiling", len(missing), show=verbose) as bar:

        def show(done: int, seconds: float) -> None:
            bar.reach(done, f"programs, {seconds:.0f} s, now {', '.join(map(str, programs.in_flight)) or 'none'}")

        count, seconds = programs.compile(missing, show)
    compiled = programs.num_compiled - compiled
    _log.info("compiled %d and loaded %d programs in %.1f s", compiled, count - compiled, seconds)
    if verbose and count:
        loaded = f" and loaded {count - compiled} from the cache" if count > compiled else ""
        say(f"compiled {compiled} programs{loaded} in {seconds:.1f} s")
        _say_kernels(choice for choices in programs.kernels.values() for choice in choices)
    return count, seconds


def _say_kernels(choices: Iterable[dispatch.Choice]) -> None:
    uses = collections.Counter((choice.kernel, choice.implementation, choice.why) for choice in choices)
    for (kernel, implementation, why), number in sorted(uses.items()):
        say(f"{kernel}: {implementation} in {number} cases ({why})")
