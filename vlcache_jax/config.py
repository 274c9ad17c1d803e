"""Engine options, checked before anything is loaded.

Imported without jax, so that `vlcache serve --help` need not wait for it; checks import it.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self, Unpack

from vlcache_jax.cache.config import CacheConfig
from vlcache_jax.common.checks import check_flags, check_whole, is_a, parse_bytes, unknown
from vlcache_jax.common.renamed import current, renamed
from vlcache_jax.common.vllm_compat import ENGINE, VllmOptions, ours, warn_ignored
from vlcache_jax.device.buckets import BucketSizes
from vlcache_jax.inputs.access import Access
from vlcache_jax.inputs.images import MAX_IMAGE_PIXELS, check_max_pixels
from vlcache_jax.inputs.messages import MediaSettings, read_settings
from vlcache_jax.request_options import Reuse
from vlcache_jax.sampling import StructuredOutputsConfig

if TYPE_CHECKING:
    from vlcache_jax.reuse.policies import Policy

_RENAMED = {"ladder": "buckets"}
_NONE_IS_DEFAULT = ("cache", "seed", "enable_prefix_caching")


@renamed(_RENAMED)
@dataclass(frozen=True)
class EngineConfig:
    """Options of `LLM` and `AsyncLLM`. `EngineConfig.of` also accepts vLLM's names.

    Attributes:
      model: a converted checkpoint, a Hugging Face directory, a Hub ID, or "tiny-vqa", the small model in the package.
      dtype: data type of the weights and the KV cache: "float32", "bfloat16", "float16" or "half"; "auto" is bfloat16
        on a GPU and float32 on a CPU.
      reuse: reuse mode of calls that set none: "exact", "approximate", "full", "off", a ratio from 0 to 1, a schedule
        (file), or a policy such as "mpic-K" or "shift-R".
      cache: the image cache.
      kv_cache_bytes: size of the KV pool, a number or a string such as "4GiB"; by default most of the memory that
        weights and activations leave free. It is rounded down to KV blocks of 128 tokens.
      compressed_kv_bytes: size of the pool for compressed requests; 0 disables compression.
      gpu_memory_utilization: fraction of the free memory for weights, activations and KV pool, if `kv_cache_bytes` is
        not set; by default the pool takes 0.9 of what weights and activations leave, on a CPU a quarter.
      tensor_parallel_size: number of devices that share the model; each computes its own heads, columns and experts;
        sizes in bytes are totals of all devices; cache entries do not depend on it.
      max_num_seqs: maximum number of outputs that run together; by default 64, or the last `sequences` of `buckets`.
      state_snapshots: maximum number of snapshots of states, from which prompts with the same beginning continue in
        models with states (Qwen3.5 and later); 0: none; by default 4 per output that can run, 12 if images of other
        contexts are linked, but at most a tenth of the memory that weights leave.
      max_rows: maximum number of tokens in one prefill chunk; longer prompts take several; by default 8192, or fewer if
        a GPU's memory requires it; 4096 on a CPU; or the last `rows` of `buckets`.
      max_model_len: maximum number of tokens of a prompt and its output; by default what the model and the KV pool
        allow.
      mm_processor_kwargs: defaults for images and videos: `min_pixels` and `max_pixels` of images, or
        `"size": {"shortest_edge": ..., "longest_edge": ...}`; fps, num_frames, min_frames, max_frames and
        do_sample_frames of videos. The settings of a request, or next to a video, override them.
      limit_mm_per_prompt: maximum number of images and videos per request: `{"image": n, "video": n}`; a value may also
        be `{"count": n}`; by default no limit.
      implementation: kernels: "xla", "mosaic_gpu" (Hopper GPUs), "mosaic_gpu_mma" (NVIDIA GPUs since Ampere), or one of
        the last two with "_interpreted" appended (on a CPU, for tests); by default the best for each case. When an
        engine first opens on a GPU, a separate process runs the kernel self-test, and XLA replaces kernels that fail.
        `vlcache doctor` lists the kernels and the reason for each.
      buckets: the bucket sizes that programs are compiled for.
      enable_prefix_caching: prefix caching; outputs do not depend on it.
      allow_remote_images: fetch images from http(s) URLs, each within 20 seconds.
      allowed_media_domains: hosts that URLs and redirects may name; ".example.com" allows its subdomains; by default
        all; a private address must be listed as a number, and the URL must name that number.
      allowed_local_media_path: folder that image paths must be in; "/" allows all files, and "" none, which is right if
        messages come from untrusted users.
      max_image_bytes: maximum size of an image file, of encoded bytes or of a download.
      max_image_pixels: maximum number of pixels before scaling; larger images are refused by their file header;
        decoding takes 7 bytes per pixel, and about 512 MiB are decoded at a time.
      revision: branch, tag or commit of a Hub model.
      verify_weights: read all weights of a converted checkpoint when it opens, and compare them with their hashes;
        otherwise only sizes are checked.
      structured_outputs_config: defaults of structured outputs: `disable_any_whitespace` removes white space between
        JSON tokens, `enable_in_reasoning` applies the grammar also during reasoning; by default as in the checkpoint's
        `generation_config.json`.
      seed: seed of sampling for requests that set none.
      use_tqdm: print the progress of loading to stderr.
      policy: what `reuse` means.
      settings: what `mm_processor_kwargs` means.
      limits: how many images and videos a request may have; any number of what is not in it.
      access: what images may be read from where.

    Raises:
      ValueError: an option is wrong.
    """

    model: str | os.PathLike[str]
    _: KW_ONLY
    dtype: str = "auto"
    reuse: Reuse = "exact"
    cache: CacheConfig = field(default_factory=CacheConfig)
    kv_cache_bytes: int | str | None = None
    compressed_kv_bytes: int | str = 0
    gpu_memory_utilization: float | None = None
    tensor_parallel_size: int = 1
    max_num_seqs: int | None = None
    state_snapshots: int | None = None
    max_rows: int | None = None
    max_model_len: int | None = None
    mm_processor_kwargs: Mapping[str, Any] | None = None
    limit_mm_per_prompt: Mapping[str, int | Mapping[str, int]] | None = None
    implementation: str | None = None
    buckets: BucketSizes | None = None
    enable_prefix_caching: bool = True
    allow_remote_images: bool = False
    allowed_media_domains: Sequence[str] | None = None
    allowed_local_media_path: str | os.PathLike[str] | None = "/"
    max_image_bytes: int | str = "64MiB"
    max_image_pixels: int = MAX_IMAGE_PIXELS
    revision: str | None = None
    verify_weights: bool = False
    structured_outputs_config: Mapping[str, Any] | None = None
    seed: int = 0
    use_tqdm: bool = True
    policy: Policy = field(init=False, repr=False, compare=False)
    settings: MediaSettings = field(init=False, repr=False, compare=False)
    limits: Mapping[str, int] = field(init=False, repr=False, compare=False)
    access: Access = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        from vlcache_jax.pallas_kernels import dispatch
        from vlcache_jax.reuse.selection import parse_policy

        self._set(policy=parse_policy(self.reuse))
        check_flags(
            verify_weights=self.verify_weights,
            use_tqdm=self.use_tqdm,
            enable_prefix_caching=self.enable_prefix_caching,
        )
        self._check_types()
        self._set(settings=read_settings(self.mm_processor_kwargs, of_request=False))
        check_whole("tensor_parallel_size", self.tensor_parallel_size, 1)
        for name in ("max_rows", "max_model_len", "max_num_seqs"):
            count: Any = getattr(self, name)
            if count is not None:
                check_whole(name, count, 1)
        if self.state_snapshots is not None:
            check_whole("state_snapshots", self.state_snapshots, 0)
        if self.kv_cache_bytes is not None:
            self._set(kv_cache_bytes=parse_bytes(self.kv_cache_bytes, "kv_cache_bytes"))
        self._set(compressed_kv_bytes=parse_bytes(self.compressed_kv_bytes, "compressed_kv_bytes"))
        share: Any = self.gpu_memory_utilization
        if not (share is None or (is_a(share, int | float) and 0 < share <= 1)):
            raise ValueError(f"gpu_memory_utilization must be a number above 0 and at most 1, got {share!r}")
        self._set(limits=_limits_per_prompt(self.limit_mm_per_prompt))
        check_max_pixels(self.max_image_pixels)
        path, max_bytes = self.allowed_local_media_path, self.max_image_bytes
        self._set(access=Access(self.allow_remote_images, self.allowed_media_domains, path, max_bytes))
        dispatch.check_name(self.implementation)

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check_types(self) -> None:
        from vlcache_jax.convert.plan import as_dtype

        model, dtype = self.model, self.dtype
        if not isinstance(model, (str, os.PathLike)):
            raise ValueError(f"model must be a checkpoint directory or a Hub ID, got {model!r}")
        if not (isinstance(dtype, str) and dtype == "auto"):
            as_dtype(dtype, "auto")
        if not isinstance(self.cache, CacheConfig):
            raise ValueError(f"cache must be a CacheConfig, got {self.cache!r}")
        if not isinstance(self.buckets, BucketSizes | None):
            raise ValueError(f"buckets must be a BucketSizes or None, got {self.buckets!r}")
        if not isinstance(self.revision, str | None):
            raise ValueError(f"revision must be a string or None, got {self.revision!r}")
        StructuredOutputsConfig.of(self.structured_outputs_config)
        check_whole("seed", self.seed, 0)

    @classmethod
    def of(cls, model: str | os.PathLike[str], **options: Unpack[EngineOptions]) -> Self:
        """The configuration that `LLM(model, **options)` opens.

        Raises:
          TypeError: there is no such option; of vLLM's the error says what to write.
          ValueError: an option is wrong.
        """
        names, options = [own.name for own in fields(cls) if own.init], current("LLM", _RENAMED, options)  # type: ignore[assignment]
        given: dict[str, Any] = {name: value for name, value in options.items() if name in names}
        # Some of vLLM's say once more what ours say already, which says nothing.
        again = {"tokenizer": model, "tokenizer_revision": given.get("revision"), "hf_config_path": model}
        foreign = {
            name: value
            for name, value in options.items()
            if name not in given and not (name in again and str(value) == str(again[name]))
        }
        translated = ours("LLM", ENGINE, foreign, names)
        for name in translated.keys() & given.keys():
            [other] = [other for other in foreign if ENGINE.renamed.get(other) == name]
            raise TypeError(f"{name} and vLLM's {other} are mutually exclusive, got both")
        given |= translated
        missing = [name for name in _NONE_IS_DEFAULT if name in given and given[name] is None]
        return cls(model, **{name: value for name, value in given.items() if name not in missing})


class EngineOptions(VllmOptions, total=False):
    """The options of `EngineConfig` as keywords, and those of vLLM. None is the default of `cache`, `seed` and
    `enable_prefix_caching`."""

    dtype: str
    reuse: Reuse
    cache: CacheConfig | None
    kv_cache_bytes: int | str | None
    compressed_kv_bytes: int | str
    gpu_memory_utilization: float | None
    tensor_parallel_size: int
    max_num_seqs: int | None
    state_snapshots: int | None
    max_rows: int | None
    max_model_len: int | None
    mm_processor_kwargs: Mapping[str, Any] | None
    limit_mm_per_prompt: Mapping[str, int | Mapping[str, int]] | None
    implementation: str | None
    buckets: BucketSizes | None
    enable_prefix_caching: bool | None
    allow_remote_images: bool
    allowed_media_domains: Sequence[str] | None
    allowed_local_media_path: str | os.PathLike[str] | None
    max_image_bytes: int | str
    max_image_pixels: int
    revision: str | None
    verify_weights: bool
    structured_outputs_config: Mapping[str, Any] | None
    seed: int | None
    use_tqdm: bool


def shows_options[**P](init: Callable[P, None]) -> Callable[P, None]:
    """Lets `help` and `inspect` show each option of an engine in place of `**options`."""
    *own, _ = inspect.signature(init).parameters.values()
    _, *options = inspect.signature(EngineConfig).parameters.values()
    foreign = inspect.Parameter("foreign", inspect.Parameter.VAR_KEYWORD, annotation="Unpack[VllmOptions]")
    init.__signature__ = inspect.Signature([*own, *options, foreign], return_annotation=None)  # type: ignore[attr-defined]
    return init


_LIMIT_KEYS = ("count", "num_frames", "width", "height", "length")  # vLLM sizes its profiling run by the others


def _limits_per_prompt(limits: Any) -> dict[str, int]:
    """Return the maximum number of images and videos of a request; other kinds have no limit."""
    if limits is None:
        return {}
    if not isinstance(limits, Mapping):
        raise ValueError(f'limit_mm_per_prompt must be a dict such as {{"image": 4}}, got {limits!r}')
    for kind in limits:
        if kind not in (kinds := ("image", "video", "audio")):
            raise ValueError(unknown(kind, kinds, where="limit_mm_per_prompt"))
    found: dict[str, int] = {}
    idle: list[str] = []
    for kind, given in limits.items():
        count = given
        if isinstance(given, Mapping):
            count = given.get("count")
            for key in given:
                if key not in _LIMIT_KEYS:
                    raise ValueError(unknown(key, _LIMIT_KEYS, where=f"limit_mm_per_prompt[{kind!r}]"))
            idle += [f"limit_mm_per_prompt[{kind!r}][{key!r}]" for key in given if key != "count"]
            if count is None:
                continue
        if not is_a(count, int) or count < 0:
            raise ValueError(f"limit_mm_per_prompt must be integers of at least 0, got {count!r} for {kind}")
        found[kind] = count
    if idle:
        warn_ignored(idle)
    return found
