"""Arguments of vLLM's classes and calls that this package does not have, and their meaning here."""

from __future__ import annotations

import difflib
import enum
import functools
import inspect
import pathlib
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypedDict, get_type_hints

# Files that warnings skip. Code that a dataclass generates has the file name "<string>".
OURS = (str(pathlib.Path(__file__).parents[1]), "<string>")


@dataclass(frozen=True)
class VllmNames:
    """Arguments of a vLLM class or call, by their treatment here. None, False and empty values request nothing.

    Attributes:
      renamed: name here by vLLM's name.
      only: accepted values by name; other values raise an error.
      instead: remedies for some of the arguments that raise or are ignored.
      ignored: arguments without effect on outputs; they are accepted with a warning.
      usual: ignored arguments that are on by default in vLLM; False warns, True does not.
      strange: remedies for arguments that vLLM does not have, such as names from other libraries.
    """

    renamed: Mapping[str, str] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    instead: Mapping[str, str] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    usual: frozenset[str] = frozenset()
    strange: Mapping[str, str] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        return name in self.renamed or name in self.only or name in self.ignored


def _listed(names: str) -> frozenset[str]:
    return frozenset(names.split())


def _notes(options: type) -> dict[str, tuple[Any, ...]]:
    """Return the annotations of the options' types by option."""
    hints = get_type_hints(options, include_extras=True)
    return {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}


# Arguments of EngineArgs, AsyncEngineArgs and LLM of vLLM up to 0.33.0, by their treatment here.


class _Renamed(TypedDict, total=False):
    """Options with another name here, which is the annotation."""

    kv_cache_memory_bytes: Annotated[int | str | None, "kv_cache_bytes"]
    max_num_batched_tokens: Annotated[int | None, "max_rows"]
    use_tqdm_on_load: Annotated[bool | None, "use_tqdm"]


class _Only(TypedDict, total=False):
    """Options that raise an error unless the value is one of the annotations."""

    # devices
    data_parallel_size: Annotated[Any, 1]
    decode_context_parallel_size: Annotated[Any, 1]
    device_ids: Any
    nnodes: Annotated[Any, 1]
    pipeline_parallel_size: Annotated[Any, 1]
    prefill_context_parallel_size: Annotated[Any, 1]
    # weights and data types, which the checkpoint determines
    config_format: Annotated[Any, "auto", "hf"]
    hf_config_path: Any
    hf_overrides: Any
    kv_cache_dtype: Annotated[Any, "auto"]
    load_format: Annotated[Any, "auto", "safetensors", "hf", "fastsafetensors", "instanttensor", "runai_streamer"]
    mm_encoder_attn_dtype: Annotated[Any, "auto"]
    model_class_overrides: Any
    model_weights: Any
    quantization: Any
    quantization_config: Any
    rope_scaling: Any
    rope_theta: Any
    tokenizer: Any
    tokenizer_mode: Annotated[Any, "auto", "hf", "slow"]
    tokenizer_revision: Any
    # unsupported features
    convert: Annotated[Any, "auto", "none"]
    default_mm_loras: Any
    diffusion_config: Any
    ec_transfer_config: Any
    enable_lora: Any
    enable_mm_embeds: Any
    enable_prompt_adapter: Any
    enable_prompt_embeds: Any
    enable_return_routed_experts: Any
    io_processor_plugin: Any
    kv_transfer_config: Any
    logits_processors: Any
    logprobs_mode: Annotated[Any, "raw_logprobs"]
    mm_encoder_only: Any
    override_pooler_config: Any
    pooler_config: Any
    return_sampling_mask: Any
    runner: Annotated[Any, "auto", "generate"]
    skip_tokenizer_init: Any
    task: Annotated[Any, "auto", "generate"]
    video_pruning_rate: Annotated[Any, 0]
    watermark_config: Any
    # options that are set elsewhere
    chat_template: Any
    download_dir: Any
    generation_config: Annotated[Any, "auto"]
    hf_token: Annotated[Any, True]
    language_model_only: Any
    media_io_kwargs: Any
    override_generation_config: Any


# Options without effect on outputs.
# fmt: off
_Ignored = TypedDict(  # noqa: UP013
    "_Ignored",
    {
        "attention_backend": Any, "attention_config": Any, "block_size": Any, "compilation_config": Any,
        "cuda_graph_sizes": Any, "cudagraph_capture_sizes": Any, "cudagraph_metrics": Any, "disable_cascade_attn": Any,
        "disable_custom_all_reduce": Any, "disable_sliding_window": Any, "enable_flashinfer_autotune": Any,
        "enforce_eager": Any, "gdn_prefill_backend": Any, "ir_op_priority": Any, "kda_decode_backend": Any,
        "kda_prefill_backend": Any, "kernel_config": Any, "linear_backend": Any, "max_cudagraph_capture_size": Any,
        "max_seq_len_to_capture": Any, "mm_encoder_attn_backend": Any, "model_impl": Any, "moe_backend": Any,
        "monokernel": Any, "optimization_level": Any, "override_attention_dtype": Any, "performance_mode": Any,
        "sparse_indexer_topk_backend": Any, "use_fp64_gumbel": Any, "use_v2_block_manager": Any,

        "async_scheduling": Any, "disable_async_output_proc": Any, "disable_chunked_mm_input": Any,
        "enable_chunked_prefill": Any, "long_prefill_token_threshold": Any,
        "long_prefill_token_threshold_adaptive": Any, "max_long_partial_prefills": Any, "max_logprobs": Any,
        "max_num_active_seqs": Any, "max_num_partial_prefills": Any, "max_num_queued_reqs": Any,
        "max_num_queued_tokens": Any, "max_num_scheduled_tokens": Any, "multi_step_stream_outputs": Any,
        "num_lookahead_slots": Any, "num_scheduler_steps": Any, "preemption_mode": Any,
        "prefill_schedule_interval": Any, "scheduler_cls": Any, "scheduler_delay_factor": Any,
        "scheduler_reserve_full_isl": Any, "scheduling_policy": Any, "stream_interval": Any, "watermark": Any,

        "calculate_kv_scales": Any, "cpu_offload_gb": Any, "cpu_offload_params": Any,
        "disable_hybrid_kv_cache_manager": Any, "enable_cumem_allocator": Any, "enable_sleep_mode": Any,
        "kv_cache_dtype_skip_layers": Any, "kv_offloading_backend": Any, "kv_offloading_size": Any,
        "kv_sharing_fast_prefill": Any, "num_gpu_blocks_override": Any, "offload_backend": Any,
        "offload_group_size": Any, "offload_num_in_group": Any, "offload_params": Any, "offload_prefetch_step": Any,
        "prefix_cache_retention_interval": Any, "prefix_caching_hash_algo": Any, "prefix_match_unit": Any,
        "sleep_mode_backend": Any, "sleep_mode_offload_cudagraph": Any, "sleep_preserve_parameter_names": Any,
        "swa_bounded_replay": Any, "swap_space": Any,

        "disable_mm_preprocessor_cache": Any, "ec_manager_config": Any, "enable_mm_processor_stats": Any,
        "enable_multimodal_encoder_data_parallel": Any, "enable_shm_tensor_arena": Any, "interleave_mm_strings": Any,
        "mm_device_do_normalize": Any, "mm_encoder_fp8_scale_path": Any, "mm_encoder_fp8_scale_save_margin": Any,
        "mm_encoder_fp8_scale_save_path": Any, "mm_encoder_tp_mode": Any, "mm_hasher_algorithm": Any,
        "mm_ipc_gpu_memory_gb": Any, "mm_processor_cache_gb": Any, "mm_processor_cache_type": Any,
        "mm_processor_device": Any, "mm_shm_cache_max_object_size_mb": Any, "mm_tensor_ipc": Any,
        "renderer_num_workers": Any, "skip_mm_profiling": Any, "video_pruning_method": Any,

        "_api_process_count": Any, "_api_process_rank": Any, "all2all_backend": Any, "cp_kv_cache_interleave_size": Any,
        "cpu_distributed_timeout_seconds": Any, "data_parallel_address": Any, "data_parallel_backend": Any,
        "data_parallel_external_lb": Any, "data_parallel_hybrid_lb": Any, "data_parallel_multi_port_external_lb": Any,
        "data_parallel_rank": Any, "data_parallel_rpc_port": Any, "data_parallel_size_local": Any,
        "data_parallel_start_rank": Any, "dbo_decode_token_threshold": Any, "dbo_prefill_token_threshold": Any,
        "dcp_comm_backend": Any, "dcp_kv_cache_interleave_size": Any, "dcp_q_replicate": Any, "device": Any,
        "disable_nccl_for_dp_synchronization": Any, "distributed_executor_backend": Any,
        "distributed_timeout_seconds": Any, "dp_sync_interval": Any, "elastic_ep_max_dp_size": Any,
        "enable_batch_sharded_sampling": Any, "enable_dbo": Any, "enable_elastic_ep": Any,
        "enable_ep_weight_filter": Any, "enable_eplb": Any, "enable_expert_parallel": Any,
        "enable_fault_tolerance": Any, "enable_hc_sp": Any, "enable_nccl_comm_suspend": Any, "engine_use_ray": Any,
        "eplb_config": Any, "expert_placement_strategy": Any, "fault_tolerance_config": Any, "master_addr": Any,
        "master_port": Any, "max_parallel_loading_workers": Any, "node_rank": Any, "numa_bind": Any,
        "numa_bind_cpus": Any, "numa_bind_nodes": Any, "ray_workers_use_nsight": Any, "ubatch_size": Any,
        "worker_cls": Any, "worker_extension_cls": Any, "worker_use_ray": Any,

        "allow_deprecated_quantization": Any, "code_revision": Any, "ignore_patterns": Any,
        "model_loader_extra_config": Any, "pt_load_map_location": Any, "safetensors_load_strategy": Any,
        "safetensors_prefetch_block_size": Any, "safetensors_prefetch_num_threads": Any, "trust_remote_code": Any,
        "weight_transfer_config": Any,

        "enable_lora_bias": Any, "enable_mixed_moe_lora_format": Any, "enable_moe_shared_loras": Any,
        "enable_tower_connector_lora": Any, "fully_sharded_loras": Any, "long_lora_scaling_factors": Any,
        "lora_dtype": Any, "lora_extra_vocab_size": Any, "lora_target_modules": Any, "max_cpu_loras": Any,
        "max_lora_cls_labels": Any, "max_lora_rank": Any, "max_loras": Any, "specialize_active_lora": Any,

        "enable_mamba_cache_stochastic_rounding": Any, "enable_mamba_shared_prefix_checkpoint": Any,
        "engram_config": Any, "mamba_backend": Any, "mamba_block_size": Any, "mamba_cache_dtype": Any,
        "mamba_cache_mode": Any, "mamba_cache_philox_rounds": Any, "mamba_config": Any, "mamba_ssm_cache_dtype": Any,
        "mamba_ssu_algorithm": Any, "replayssm_buffer_len": Any, "use_replayssm": Any,

        "num_speculative_tokens": Any, "per_request_spec_decode_metrics": Any, "spec_method": Any, "spec_model": Any,
        "spec_tokens": Any, "speculative_config": Any, "speculative_model": Any,

        "guided_decoding_backend": Any, "logits_processor_pattern": Any, "reasoning_config": Any,
        "reasoning_parser": Any, "reasoning_parser_plugin": Any,

        "additional_config": Any, "aggregate_engine_logging": Any, "aux_output_config": Any,
        "collect_detailed_traces": Any, "custom_histogram_buckets": Any, "disable_log_requests": Any,
        "disable_log_stats": Any, "enable_layerwise_nvtx_tracing": Any, "enable_log_requests": Any,
        "enable_logging_iteration_details": Any, "enable_mfu_metrics": Any, "enable_trace_replay": Any,
        "fail_on_environ_validation": Any, "jit_monitor_mode": Any, "jit_monitor_verbose": Any, "kv_cache_metrics": Any,
        "kv_cache_metrics_sample": Any, "kv_events_config": Any, "log_config_file": Any, "log_level": Any,
        "logging_config": Any, "otlp_traces_endpoint": Any, "profiler_config": Any, "served_model_name": Any,
        "show_hidden_metrics_for_version": Any, "shutdown_timeout": Any, "tokens_only": Any, "watchdog_config": Any,
    },
    total=False,
)
# fmt: on


class VllmOptions(_Renamed, _Only, _Ignored, total=False):
    """Options of vLLM's engines that are accepted here."""


ENGINE = VllmNames(
    renamed={name: new for name, (new,) in _notes(_Renamed).items()},
    only=_notes(_Only),
    instead={
        "attention_backend": "set implementation to choose the kernels",
        "chat_template": "pass it to each call of chat",
        "device_ids": "set CUDA_VISIBLE_DEVICES",
        "disable_mm_preprocessor_cache": 'set reuse="off" to disable image caching',
        "download_dir": "set HF_HOME",
        "enable_prompt_embeds": "pass texts and images",
        "enable_mm_embeds": "pass images",
        "generation_config": "pass sampling_params to each call",
        "hf_token": "log in with `hf auth login`, or set HF_TOKEN",
        "kv_transfer_config": "set cache=CacheConfig(remote=...) to share cached images",
        "ec_transfer_config": "set cache=CacheConfig(remote=...) to share cached images",
        "language_model_only": 'set limit_mm_per_prompt={"image": 0, "video": 0}',
        "logits_processors": "set logit_bias, bad_words or allowed_token_ids of SamplingParams",
        "max_num_queued_reqs": "set max_waiting of AsyncLLM",
        "media_io_kwargs": "set fps or num_frames of each video",
        "mm_processor_cache_gb": "set cache=CacheConfig(host_bytes=...) to size the image cache",
        "num_gpu_blocks_override": "set kv_cache_bytes to size the KV pool",
        "override_generation_config": "pass sampling_params to each call",
    },
    ignored=frozenset(_Ignored.__annotations__),
    usual=frozenset({"disable_log_stats", "enable_chunked_prefill"}),
)

# Former names in vLLM of the fields of `structured_outputs`.
GUIDED = {
    f"guided_{kind}": f"write it into structured_outputs: {{{kind!r}: ...}}"
    for kind in ("json", "regex", "choice", "grammar", "json_object")
} | {
    "guided_whitespace_pattern": "write it into structured_outputs: {'whitespace_pattern': ...}",
    "guided_decoding_backend": "remove it: llguidance is the only backend",
}

# Arguments of SamplingParams.
SAMPLING = VllmNames(
    only={
        "best_of": (1,),
        "early_stopping": (),
        "guided_decoding": (),
        "length_penalty": (1,),
        "logits_processors": (),
        "logprob_token_ids": (),
        "output_kind": ("CUMULATIVE", "FINAL_ONLY", 0, 2),
        "prompt_logprob_start": (),
        "prompt_logprob_token_ids": (),
        "repetition_detection": (),
        "trace_decode_token_ids": (),
        "truncate_prompt_tokens": (-1,),
        "use_beam_search": (),
        "watermarking": (),
    },
    instead={
        "best_of": "set n, and choose by cumulative_logprob",
        "guided_decoding": "set structured_outputs=StructuredOutputs(...)",
        "logits_processors": "set logit_bias, bad_words or allowed_token_ids",
        "logprob_token_ids": "set logprobs, up to 20, or call LLM.score",
        "output_kind": "outputs contain all tokens so far; call AsyncLLM.deltas for the new ones",
        "prompt_logprob_start": "set prompt_logprobs",
        "prompt_logprob_token_ids": "set prompt_logprobs, up to 20, or call LLM.score",
        "trace_decode_token_ids": "call LLM.score",
    },
    ignored=_listed(
        """
        detokenize extra_args flat_logprobs output_text_buffer_length routed_experts_prompt_start skip_clone
        skip_reading_prefix_cache spaces_between_special_tokens stream_interval
        """
    ),
    usual=frozenset({"detokenize", "spaces_between_special_tokens"}),
    strange={
        **GUIDED,
        "do_sample": "set temperature, where 0 is greedy",
        "max_completion_tokens": "set max_tokens",
        "max_new_tokens": "set max_tokens",
        "num_return_sequences": "set n",
        "response_format": "set structured_outputs=StructuredOutputs.from_response_format(...)",
    },
)

# Arguments of StructuredOutputs.
STRUCTURED = VllmNames(
    only={"disable_additional_properties": ()},
    instead={"disable_additional_properties": "write additionalProperties into the schema"},
    ignored=_listed("_backend _backend_was_auto disable_fallback"),
)

# Arguments of StructuredOutputsConfig.
STRUCTURED_CONFIG = VllmNames(
    only={"disable_additional_properties": ()},
    instead={"disable_additional_properties": "write additionalProperties into each schema"},
    ignored=_listed("backend disable_fallback reasoning_parser reasoning_parser_plugin"),
)

# Arguments of LLM.chat, LLM.generate and AsyncLLM.generate.


class _OnlyOfCalls(TypedDict, total=False):
    """Arguments that raise an error unless the value is one of the annotations."""

    add_special_tokens: Any
    guided_options_request: Any
    lora_request: Any
    mm_processor_kwargs: Any
    prompt_adapter_request: Any
    prompt_token_ids: Any
    reasoning_parser_kwargs: Any
    tokenization_kwargs: Any
    tools: Any
    truncate_prompt_tokens: Annotated[Any, -1]


# fmt: off
_IgnoredOfCalls = TypedDict(  # noqa: UP013
    "_IgnoredOfCalls",
    {
        "chat_template_content_format": Any, "data_parallel_rank": Any, "kv_hints": Any, "priority": Any,
        "prompt_text": Any, "reasoning_ended": Any, "session_id": Any, "trace_headers": Any,
    },
    total=False,
)
# fmt: on


class VllmCallOptions(_OnlyOfCalls, _IgnoredOfCalls, total=False):
    """Arguments of vLLM's calls that are accepted here."""


CALLS = VllmNames(
    only=_notes(_OnlyOfCalls),
    instead={
        "mm_processor_kwargs": "write it into each prompt's dict",
        "priority": "write it into options=RequestOptions(priority=...)",
        "prompt_token_ids": 'write it into each prompt: {"prompt_token_ids": [...]}',
        "tools": "call chat, which renders them with the chat template",
    },
    ignored=frozenset(_IgnoredOfCalls.__annotations__),
    strange={
        "sampling": "did you mean sampling_params?",
        **dict.fromkeys(("temperature", "max_tokens"), "write it into sampling_params=SamplingParams(...)"),
    },
)


def ours(name: str, names: VllmNames, given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Translate arguments that this package does not have into its own.

    Arguments without effect here cause one warning.

    Args:
      name: name of the called class or function, for errors.
      names: treatment of vLLM's arguments.
      given: the arguments.
      known: names of the arguments that this package has.

    Returns:
      Arguments of this package that replace some of the given ones.

    Raises:
      TypeError: an argument is unknown, must be passed in another way, or requests an unsupported feature.
    """
    found: dict[str, Any] = {}
    idle: list[str] = []
    for argument, value in given.items():
        if argument in names.strange and value is None:
            continue
        if argument not in names:
            everything = [one for one in (*known, *names.renamed, *names.only, *names.ignored) if one[0] != "_"]
            close = difflib.get_close_matches(argument, everything, 1, 0.75)
            hint = names.strange.get(argument) or (f"did you mean {close[0]}?" if close else "")
            raise TypeError(f"{name} has no argument {argument}" + (f"; {hint}" if hint else ""))
        is_request = value is False if argument in names.usual else not _requests_nothing(value)
        if not is_request:
            continue
        if argument in names.renamed:
            found[names.renamed[argument]] = value
        elif argument in names.ignored:
            idle.append(argument)
        elif not _is_one_of(value, names.only[argument]):
            if what := names.instead.get(argument):  # without the value, which may be a secret
                raise TypeError(f"{name} does not support vLLM's {argument}: {what}")
            values = (None, *names.only[argument])
            supported = f"the only supported value{'s' * (len(values) > 1)}"
            raise TypeError(f"{argument} must be {' or '.join(map(repr, values))}, {supported}, got {value!r:.80}")

    if idle:
        warn_ignored(idle, "; ".join(names.instead[one] for one in idle if one in names.instead))
    return found


def warn_ignored(names: Collection[str], instead: str = "") -> None:
    """Warn that arguments are ignored, with the remedy `instead` if there is one."""
    has = "has" if len(names) == 1 else "have"
    message = f"{', '.join(names)} {has} no effect here and {'is' if has == 'has' else 'are'} ignored"
    warn(f"{message} ({instead})" if instead else message)


def warn(message: str) -> None:
    """Issue a UserWarning at the line of the caller of this package."""
    warnings.warn(message, UserWarning, skip_file_prefixes=OURS)


def _requests_nothing(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, str | Mapping | list | tuple | set) and not value)


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    if isinstance(value, enum.Enum):  # an enum of vLLM
        value = value.name
    return isinstance(value, str | int | float) and value in values


def takes_foreign[T](names: VllmNames) -> Callable[[type[T]], type[T]]:
    """Return a class decorator that adds the arguments of vLLM's class of the same name; see `ours`."""

    def changed(kind: Any) -> Any:
        init, known = kind.__init__, inspect.signature(kind).parameters

        @functools.wraps(init)
        def translated(self: T, *args: Any, **given: Any) -> None:
            other = {name: given.pop(name) for name in list(given) if name not in known}
            init(self, *args, **given, **ours(kind.__name__, names, other, known))

        kind.__init__ = translated
        return kind

    return changed


# Remedies by name for names of vLLM's package that this package does not have.
_OPTIONS = "write its arguments into LLM(model, ...) or AsyncLLM(model, ...)"
NAMES = {
    "AsyncEngineArgs": _OPTIONS,
    "AsyncLLMEngine": "import AsyncLLM",
    "EngineArgs": _OPTIONS,
    "GuidedDecodingParams": "import StructuredOutputs",
    "LLMEngine": "import LLM, or AsyncLLM for requests that arrive one by one",
    "PoolingParams": "call LLM.embed or LLM.score",
    "RequestOutputKind": "AsyncLLM.generate yields all tokens so far, AsyncLLM.deltas the new ones",
    "StructuredOutputsParams": "import StructuredOutputs",
    "TextPrompt": 'write {"prompt": ..., "multi_modal_data": ...}',
    "TokensPrompt": 'write {"prompt_token_ids": [...], "multi_modal_data": ...}',
}


class Absent:
    """Attribute of vLLM's class that this package does not have. Access raises an AttributeError with the remedy.

    Args:
      instead: the remedy.
    """

    def __init__(self, instead: str):
        self._instead = instead

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        raise AttributeError(f"{owner.__name__} has no {self._name}; {self._instead}")
