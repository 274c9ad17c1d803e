"""What an engine is opened with: every option, checked before anything is loaded.

Imported without jax, so that `vlcache serve --help` need not wait for it; checks import it.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self, Unpack

from vlcache_jax.cache.config import CacheConfig
from vlcache_jax.checks import check_flags, check_whole, is_a, parse_bytes
from vlcache_jax.device.ladder import Ladder
from vlcache_jax.foreign import ENGINE, VllmOptions, ours, warn_ignored
from vlcache_jax.inputs.access import Access
from vlcache_jax.inputs.images import MAX_IMAGE_PIXELS, check_max_pixels
from vlcache_jax.inputs.settings import MediaSettings, read_settings
from vlcache_jax.structured_outputs import StructuredOutputsConfig

if TYPE_CHECKING:
    from vlcache_jax.compress.policies import Compressor
    from vlcache_jax.reuse.policies import Policy
    from vlcache_jax.reuse.schedule import Schedule

type Reuse = str | float | os.PathLike[str] | Schedule | Policy
type Compress = str | Compressor

_NONE_IS_DEFAULT = ("cache", "seed", "enable_prefix_caching")


@dataclass(frozen=True)
class EngineConfig:
    """The options of `LLM` and `AsyncLLM`. (`EngineConfig.of` takes those of vLLM, too.)

    Attributes:
      model: a converted checkpoint, a Hugging Face directory, the id of a model on the hub, or "tiny-vqa", a small
        trained model that ships with the package.
      dtype: of weights and K, V: "float32", "bfloat16", "float16" or "half"; "auto" is bfloat16 on a GPU and
        float32 on a CPU.
      reuse: what is done with an image that was seen before, unless a call says otherwise.
        "exact": it is linked where everything before it is the same too; answers are those of a cold run.
        "approximate": it is linked anywhere; in a new context 3 % of its tokens are recomputed and the rest corrected.
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
      compressed_kv_bytes: size of the pool for what is kept of compressed prompts, and for their answers; likewise a
        number or a string. Without it nothing can be compressed.
      gpu_memory_utilization: share of the free memory that weights, activations and pool may take, where
        `kv_cache_bytes` says nothing. By default the pool takes 0.9 of what the others leave, on a CPU a quarter.
      tensor_parallel_size: devices that share the model: each computes its own heads, columns and experts. The bytes
        named here are those of all together. Records are the same whatever it is.
      max_num_seqs: requests that run together at most, each answer counted. By default 64, or what the ladder says.
      max_rows: tokens computed in one prefill step; longer prompts take several. By default 8192, or on a GPU what
        leaves room for a pool; on a CPU 4096, or what the ladder says.
      max_model_len: tokens of prompt and answer at most. By default what the model and the pool allow.
      mm_processor_kwargs: min_pixels and max_pixels of images, or `size={"shortest_edge": ..., "longest_edge":
        ...}`, which says the same; fps, num_frames, min_frames, max_frames and do_sample_frames of videos. For all
        requests; what a request says, or what stands beside a video, comes first. (How large a video's frames are
        is said beside it.)
      limit_mm_per_prompt: {"image": n, "video": n}: of a request at most; n may be {"count": n}. By default any.
      implementation: of the kernels: "xla", "mosaic_gpu" (Hopper GPUs), "mosaic_gpu_mma" (NVIDIA GPUs since Ampere),
        or one of these two with "_interpreted" behind it (the same, interpreted on a CPU, for tests); None is the best
        for each case. Opened on such a GPU for the first time, it checks the kernels in a process of its own, before
        jax takes the memory; XLA runs in place of what does not pass. `llm.kernels` says which run, and why.
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
      structured_outputs_config: {"disable_any_whitespace": true}: JSON that an answer is held to has no white space
        between its tokens, unless a request says otherwise. Small models may write white space until `max_tokens`.
        {"enable_in_reasoning": true}: a form holds during the model's thinking, too. By default as the checkpoint's
        generation_config.json says under this name; that of "tiny-vqa" disables white space.
      seed: of answers whose sampling parameters name none.
      use_tqdm: say on stderr what is loaded. It silences no call: each has its own.
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
    max_rows: int | None = None
    max_model_len: int | None = None
    mm_processor_kwargs: Mapping[str, Any] | None = None
    limit_mm_per_prompt: Mapping[str, int | Mapping[str, int]] | None = None
    implementation: str | None = None
    ladder: Ladder | None = None
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
        from vlcache_jax.reuse.parse import parse_policy

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
        if self.kv_cache_bytes is not None:
            self._set(kv_cache_bytes=parse_bytes(self.kv_cache_bytes, "kv_cache_bytes"))
        self._set(compressed_kv_bytes=parse_bytes(self.compressed_kv_bytes, "compressed_kv_bytes"))
        share: Any = self.gpu_memory_utilization
        if not (share is None or (is_a(share, int | float) and 0 < share <= 1)):
            raise ValueError(f"gpu_memory_utilization must be a number above 0 and at most 1, got {share!r}")
        self._set(limits=_limits_per_prompt(self.limit_mm_per_prompt))
        check_max_pixels(self.max_image_pixels)
        path, most = self.allowed_local_media_path, self.max_image_bytes
        self._set(access=Access(self.allow_remote_images, self.allowed_media_domains, path, most))
        dispatch.check_name(self.implementation)

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check_types(self) -> None:
        from vlcache_jax.convert.plan import as_dtype

        model, dtype = self.model, self.dtype
        if not isinstance(model, (str, os.PathLike)):
            raise ValueError(f"model must be a directory or the id of a model on the hub, got {model!r}")
        if not (isinstance(dtype, str) and dtype == "auto"):
            as_dtype(dtype, "auto")
        if not isinstance(self.cache, CacheConfig):
            raise ValueError(f"cache must be a CacheConfig, got {self.cache!r}")
        if not isinstance(self.ladder, Ladder | None):
            raise ValueError(f"ladder must be a Ladder or None, got {self.ladder!r}")
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
        names = [own.name for own in fields(cls) if own.init]
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
            raise TypeError(f"LLM must be given either {name} or vLLM's {other}, got both")
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
    max_rows: int | None
    max_model_len: int | None
    mm_processor_kwargs: Mapping[str, Any] | None
    limit_mm_per_prompt: Mapping[str, int | Mapping[str, int]] | None
    implementation: str | None
    ladder: Ladder | None
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


_LIMIT_KEYS = ("count", "num_frames", "width", "height", "length")  # vLLM's; but for the first they size its rehearsal


def _limits_per_prompt(limits: Any) -> dict[str, int]:
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
        if not is_a(most, int) or most < 0:
            raise ValueError(f"limit_mm_per_prompt must be integers of at least 0, got {most!r} for {kind}")
        found[kind] = most
    if idle:
        warn_ignored(idle)
    return found
