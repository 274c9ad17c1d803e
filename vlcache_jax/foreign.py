"""Arguments that vLLM's classes and calls take and ours do not, by name: what each means here."""

from __future__ import annotations

import difflib
import enum
import functools
import inspect
import pathlib
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Names:
    """Arguments of a class or call of vLLM's, by what comes of them here. None, False and what is empty ask for
    nothing.

    Attributes:
      renamed: the same here under another name.
      only: errors, unless the value is one of these.
      instead: of some of the others, what to do in their place.
      ignored: no answer depends on them; they are taken with a warning.
      usual: of these, what vLLM has on: it is False that is warned of.
      strange: of names that only others than vLLM have, or none, what to write.
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


# Of EngineArgs, AsyncEngineArgs and LLM of vLLM 0.33.0, and of the versions before it.
ENGINE = Names(
    renamed={
        "kv_cache_memory_bytes": "kv_cache_bytes",
        "max_num_batched_tokens": "max_rows",
        "use_tqdm_on_load": "use_tqdm",
    },
    only={
        # one device
        "data_parallel_size": (1,),
        "decode_context_parallel_size": (1,),
        "device_ids": (),
        "nnodes": (1,),
        "pipeline_parallel_size": (1,),
        "prefill_context_parallel_size": (1,),
        "tensor_parallel_size": (1,),
        # weights and numbers as the checkpoint has them
        "config_format": ("auto", "hf"),
        "hf_config_path": (),
        "hf_overrides": (),
        "kv_cache_dtype": ("auto",),
        "load_format": ("auto", "safetensors", "hf", "fastsafetensors", "instanttensor", "runai_streamer"),
        "mm_encoder_attn_dtype": ("auto",),
        "model_class_overrides": (),
        "model_weights": (),
        "quantization": (),
        "quantization_config": (),
        "rope_scaling": (),
        "rope_theta": (),
        "tokenizer": (),
        "tokenizer_mode": ("auto", "hf", "slow"),
        "tokenizer_revision": (),
        # what there is not
        "convert": ("auto", "none"),
        "default_mm_loras": (),
        "diffusion_config": (),
        "ec_transfer_config": (),
        "enable_lora": (),
        "enable_mm_embeds": (),
        "enable_prompt_adapter": (),
        "enable_prompt_embeds": (),
        "enable_return_routed_experts": (),
        "io_processor_plugin": (),
        "kv_transfer_config": (),
        "logits_processors": (),
        "logprobs_mode": ("raw_logprobs",),
        "mm_encoder_only": (),
        "override_pooler_config": (),
        "pooler_config": (),
        "return_sampling_mask": (),
        "runner": ("auto", "generate"),
        "skip_tokenizer_init": (),
        "task": ("auto", "generate"),
        "video_pruning_rate": (0,),
        "watermark_config": (),
        # what is said in another place
        "chat_template": (),
        "download_dir": (),
        "generation_config": ("auto",),
        "hf_token": (True,),
        "language_model_only": (),
        "media_io_kwargs": (),
        "override_generation_config": (),
    },
    instead={
        "attention_backend": "implementation chooses the kernels",
        "chat_template": "give it to each call of chat",
        "device_ids": "set CUDA_VISIBLE_DEVICES",
        "disable_mm_preprocessor_cache": 'reuse="off" keeps nothing of images',
        "download_dir": "set HF_HOME",
        "enable_prompt_embeds": "give texts and images",
        "enable_mm_embeds": "give images",
        "generation_config": "give sampling_params to each call",
        "hf_token": "log in with `hf auth login`, or set HF_TOKEN",
        "kv_transfer_config": "cache=CacheConfig(remote=...) shares what is kept of images",
        "ec_transfer_config": "cache=CacheConfig(remote=...) shares what is kept of images",
        "language_model_only": 'give limit_mm_per_prompt={"image": 0, "video": 0}',
        "logits_processors": "give logit_bias, bad_words or allowed_token_ids of SamplingParams",
        "max_num_queued_reqs": "AsyncLLM has max_waiting",
        "media_io_kwargs": "give fps or num_frames beside each video",
        "mm_processor_cache_gb": "cache=CacheConfig(host_bytes=...) bounds what is kept of images",
        "num_gpu_blocks_override": "kv_cache_bytes sizes the pool",
        "override_generation_config": "give sampling_params to each call",
    },
    ignored=_listed(
        """
        attention_backend attention_config block_size compilation_config cuda_graph_sizes cudagraph_capture_sizes
        cudagraph_metrics disable_cascade_attn disable_custom_all_reduce disable_sliding_window
        enable_flashinfer_autotune enforce_eager gdn_prefill_backend ir_op_priority kda_decode_backend
        kda_prefill_backend kernel_config linear_backend max_cudagraph_capture_size max_seq_len_to_capture
        mm_encoder_attn_backend model_impl moe_backend monokernel optimization_level override_attention_dtype
        performance_mode sparse_indexer_topk_backend use_fp64_gumbel use_v2_block_manager

        async_scheduling disable_async_output_proc disable_chunked_mm_input enable_chunked_prefill
        long_prefill_token_threshold long_prefill_token_threshold_adaptive max_long_partial_prefills max_logprobs
        max_num_active_seqs max_num_partial_prefills max_num_queued_reqs max_num_queued_tokens max_num_scheduled_tokens
        multi_step_stream_outputs num_lookahead_slots num_scheduler_steps preemption_mode prefill_schedule_interval
        scheduler_cls scheduler_delay_factor scheduler_reserve_full_isl scheduling_policy stream_interval watermark

        calculate_kv_scales cpu_offload_gb cpu_offload_params disable_hybrid_kv_cache_manager enable_cumem_allocator
        enable_sleep_mode kv_cache_dtype_skip_layers kv_offloading_backend kv_offloading_size kv_sharing_fast_prefill
        num_gpu_blocks_override offload_backend offload_group_size offload_num_in_group offload_params
        offload_prefetch_step prefix_cache_retention_interval prefix_caching_hash_algo prefix_match_unit
        sleep_mode_backend sleep_mode_offload_cudagraph sleep_preserve_parameter_names swa_bounded_replay swap_space

        disable_mm_preprocessor_cache ec_manager_config enable_mm_processor_stats
        enable_multimodal_encoder_data_parallel enable_shm_tensor_arena interleave_mm_strings mm_device_do_normalize
        mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_encoder_tp_mode
        mm_hasher_algorithm mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type mm_processor_device
        mm_shm_cache_max_object_size_mb mm_tensor_ipc renderer_num_workers skip_mm_profiling video_pruning_method

        _api_process_count _api_process_rank all2all_backend cp_kv_cache_interleave_size
        cpu_distributed_timeout_seconds data_parallel_address data_parallel_backend data_parallel_external_lb
        data_parallel_hybrid_lb data_parallel_multi_port_external_lb data_parallel_rank data_parallel_rpc_port
        data_parallel_size_local data_parallel_start_rank dbo_decode_token_threshold dbo_prefill_token_threshold
        dcp_comm_backend dcp_kv_cache_interleave_size dcp_q_replicate device disable_nccl_for_dp_synchronization
        distributed_executor_backend distributed_timeout_seconds dp_sync_interval elastic_ep_max_dp_size
        enable_batch_sharded_sampling enable_dbo enable_elastic_ep enable_ep_weight_filter enable_eplb
        enable_expert_parallel enable_fault_tolerance enable_hc_sp enable_nccl_comm_suspend engine_use_ray eplb_config
        expert_placement_strategy fault_tolerance_config master_addr master_port max_parallel_loading_workers node_rank
        numa_bind numa_bind_cpus numa_bind_nodes ray_workers_use_nsight ubatch_size worker_cls worker_extension_cls
        worker_use_ray

        allow_deprecated_quantization code_revision ignore_patterns model_loader_extra_config pt_load_map_location
        safetensors_load_strategy safetensors_prefetch_block_size safetensors_prefetch_num_threads trust_remote_code
        weight_transfer_config

        enable_lora_bias enable_mixed_moe_lora_format enable_moe_shared_loras enable_tower_connector_lora
        fully_sharded_loras long_lora_scaling_factors lora_dtype lora_extra_vocab_size lora_target_modules
        max_cpu_loras max_lora_cls_labels max_lora_rank max_loras specialize_active_lora

        enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint engram_config mamba_backend
        mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_cache_philox_rounds mamba_config
        mamba_ssm_cache_dtype mamba_ssu_algorithm replayssm_buffer_len use_replayssm

        num_speculative_tokens per_request_spec_decode_metrics spec_method spec_model spec_tokens speculative_config
        speculative_model

        guided_decoding_backend logits_processor_pattern reasoning_config reasoning_parser reasoning_parser_plugin
        structured_outputs_config

        additional_config aggregate_engine_logging aux_output_config collect_detailed_traces custom_histogram_buckets
        disable_log_requests disable_log_stats enable_layerwise_nvtx_tracing enable_log_requests
        enable_logging_iteration_details enable_mfu_metrics enable_trace_replay fail_on_environ_validation
        jit_monitor_mode jit_monitor_verbose kv_cache_metrics kv_cache_metrics_sample kv_events_config log_config_file
        log_level logging_config otlp_traces_endpoint profiler_config served_model_name
        show_hidden_metrics_for_version shutdown_timeout tokens_only watchdog_config
        """
    ),
    usual=frozenset({"disable_log_stats", "enable_chunked_prefill"}),
)

# Of SamplingParams.
SAMPLING = Names(
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
        "structured_outputs": (),
        "thinking_token_budget": (-1,),
        "trace_decode_token_ids": (),
        "truncate_prompt_tokens": (-1,),
        "use_beam_search": (),
        "watermarking": (),
    },
    instead={
        "best_of": "set n, and choose by cumulative_logprob",
        "logits_processors": "set logit_bias, bad_words or allowed_token_ids",
        "logprob_token_ids": "set logprobs, up to 20, or call LLM.score",
        "output_kind": "outputs hold all there is so far, so take what is new of them",
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
        "do_sample": "set temperature, where 0 is greedy",
        "max_completion_tokens": "set max_tokens",
        "max_new_tokens": "set max_tokens",
        "num_return_sequences": "set n",
        "response_format": "answers are held to no format, so ask for it in the prompt",
    },
)

# Of LLM.chat, LLM.generate and AsyncLLM.generate.
CALLS = Names(
    only={
        "add_special_tokens": (),
        "guided_options_request": (),
        "lora_request": (),
        "mm_processor_kwargs": (),
        "prompt_adapter_request": (),
        "prompt_token_ids": (),
        "reasoning_parser_kwargs": (),
        "tokenization_kwargs": (),
        "tools": (),
        "truncate_prompt_tokens": (-1,),
    },
    instead={
        "mm_processor_kwargs": "write it into each prompt's dict",
        "prompt_token_ids": 'write it into each prompt: {"prompt_token_ids": [...]}',
        "tools": 'give chat_template_kwargs={"tools": [...]}, and read calls from the answer\'s text',
    },
    ignored=_listed(
        """
        chat_template_content_format data_parallel_rank kv_hints priority prompt_text reasoning_ended session_id
        trace_headers
        """
    ),
    strange={
        "sampling": "is it sampling_params?",
        **dict.fromkeys(("temperature", "max_tokens"), "write it into sampling_params=SamplingParams(...)"),
    },
)


def ours(name: str, names: Names, given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """What arguments that are none of ours mean here.

    Warns once of those that have no meaning here.

    Args:
      name: of what was called.
      names: what is known of vLLM's.
      given: the arguments.
      known: names of ours.

    Returns:
      Ours in place of some of them.

    Raises:
      TypeError: one is unknown, must be written in another way, or asks for what there is not.
    """
    found: dict[str, Any] = {}
    idle: list[str] = []
    for argument, value in given.items():
        if argument not in names:
            everything = (*known, *names.renamed, *names.only, *names.ignored)
            close = difflib.get_close_matches(argument, everything, 1, 0.75)
            hint = names.strange.get(argument) or (f"is it {close[0]}?" if close else "")
            raise TypeError(f"{name} has no argument {argument}" + (f"; {hint}" if hint else ""))
        asks = value is False if argument in names.usual else not _asks_nothing(value)
        if not asks:
            continue
        if argument in names.renamed:
            found[names.renamed[argument]] = value
        elif argument in names.ignored:
            idle.append(argument)
        elif not _is_one_of(value, names.only[argument]):
            if what := names.instead.get(argument):  # the value may be a secret
                raise TypeError(f"{name} cannot do what vLLM's {argument} asks for: {what}")
            expected = " or ".join(map(repr, (None, *names.only[argument])))
            raise TypeError(f"{argument} must be {expected}, as nothing else is supported here, got {value!r:.80}")
    if idle:
        warn_ignored(idle, "; ".join(names.instead[one] for one in idle if one in names.instead))
    return found


def warn_ignored(names: Collection[str], instead: str = "") -> None:
    """Warns that something of what this package was told says nothing to it."""
    has = "has" if len(names) == 1 else "have"
    told = f"{', '.join(names)} {has} no meaning here and {'is' if has == 'has' else 'are'} ignored"
    warn(f"{told} ({instead})" if instead else told)


def warn(message: str) -> None:
    """Warns whoever called this package."""
    warnings.warn(message, UserWarning, skip_file_prefixes=(str(pathlib.Path(__file__).parent),))


def _asks_nothing(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, str | Mapping | list | tuple | set) and not value)


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    if isinstance(value, enum.Enum):  # of vLLM's own
        value = value.name
    return isinstance(value, str | int | float) and value in values


def takes_foreign[T](names: Names) -> Callable[[type[T]], type[T]]:
    """Lets a class be made also with arguments of vLLM's class of the same name; see `ours`."""

    def changed(kind: Any) -> Any:
        init, known = kind.__init__, inspect.signature(kind).parameters

        @functools.wraps(init)
        def translated(self: T, *args: Any, **given: Any) -> None:
            other = {name: given.pop(name) for name in list(given) if name not in known}
            init(self, *args, **given, **ours(kind.__name__, names, other, known))

        kind.__init__ = translated
        return kind

    return changed
