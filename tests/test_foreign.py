"""What users of other engines type: names of arguments, and what they do with outputs."""

import dataclasses
import enum
import inspect
import itertools
import json
import warnings

import numpy as np
import pytest
from PIL import Image

import vlcache_jax
from tests.helper import SIZES
from vlcache_jax import LLM, AsyncLLM, EngineConfig, SamplingParams
from vlcache_jax.common.vllm_compat import CALLS, ENGINE, SAMPLING, VllmOptions, ours
from vlcache_jax.config import EngineOptions
from vlcache_jax.device import memory_plan
from vlcache_jax.device.kv_shape import KVShape
from vlcache_jax.inputs.messages import read_message
from vlcache_jax.sampling import StructuredOutputs, StructuredOutputsConfig

SETTINGS = {
    **SIZES,
    "kv_cache_bytes": "16MiB",
    "dtype": "float",
    "use_tqdm": False,
}
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


# Every field of EngineArgs, AsyncEngineArgs and SamplingParams of vLLM 0.33.0, every argument of its LLM, and those of
# its calls that ours do not take.
ENGINE_NAMES = """
    model enable_return_routed_experts return_sampling_mask model_weights served_model_name tokenizer hf_config_path
    runner convert skip_tokenizer_init enable_prompt_embeds tokenizer_mode trust_remote_code
    allowed_local_media_path allowed_media_domains download_dir safetensors_load_strategy
    safetensors_prefetch_num_threads safetensors_prefetch_block_size load_format config_format dtype kv_cache_dtype
    seed max_model_len cudagraph_capture_sizes max_cudagraph_capture_size ir_op_priority
    distributed_executor_backend pipeline_parallel_size master_addr master_port nnodes node_rank
    distributed_timeout_seconds cpu_distributed_timeout_seconds numa_bind numa_bind_nodes numa_bind_cpus device_ids
    tensor_parallel_size prefill_context_parallel_size decode_context_parallel_size dcp_comm_backend dcp_q_replicate
    dcp_kv_cache_interleave_size cp_kv_cache_interleave_size data_parallel_size data_parallel_rank
    data_parallel_start_rank data_parallel_size_local data_parallel_address data_parallel_rpc_port
    data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb data_parallel_backend
    enable_hc_sp enable_expert_parallel enable_batch_sharded_sampling enable_ep_weight_filter moe_backend
    linear_backend sparse_indexer_topk_backend all2all_backend enable_elastic_ep elastic_ep_max_dp_size enable_dbo
    ubatch_size dbo_decode_token_threshold dp_sync_interval dbo_prefill_token_threshold
    disable_nccl_for_dp_synchronization eplb_config enable_eplb expert_placement_strategy _api_process_count
    _api_process_rank max_parallel_loading_workers block_size enable_prefix_caching prefix_caching_hash_algo
    prefix_cache_retention_interval disable_sliding_window disable_cascade_attn offload_backend cpu_offload_gb
    cpu_offload_params offload_group_size offload_num_in_group offload_prefetch_step offload_params
    gpu_memory_utilization kv_cache_memory_bytes max_num_batched_tokens max_num_scheduled_tokens
    long_prefill_token_threshold long_prefill_token_threshold_adaptive max_num_seqs max_num_active_seqs
    max_num_queued_reqs max_num_queued_tokens max_logprobs logprobs_mode use_fp64_gumbel enable_trace_replay
    disable_log_stats aggregate_engine_logging revision code_revision hf_token hf_overrides model_class_overrides
    tokenizer_revision quantization quantization_config allow_deprecated_quantization enforce_eager
    disable_custom_all_reduce enable_shm_tensor_arena language_model_only limit_mm_per_prompt enable_mm_embeds
    interleave_mm_strings media_io_kwargs mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type
    mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend
    mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin
    io_processor_plugin renderer_num_workers skip_mm_profiling video_pruning_rate video_pruning_method mm_tensor_ipc
    mm_processor_device mm_ipc_gpu_memory_gb mm_device_do_normalize enable_lora max_loras max_lora_rank
    default_mm_loras fully_sharded_loras max_cpu_loras lora_dtype lora_target_modules enable_tower_connector_lora
    specialize_active_lora enable_mixed_moe_lora_format enable_moe_shared_loras max_lora_cls_labels
    ray_workers_use_nsight num_gpu_blocks_override model_loader_extra_config ignore_patterns enable_chunked_prefill
    disable_chunked_mm_input scheduler_reserve_full_isl prefill_schedule_interval watermark
    disable_hybrid_kv_cache_manager aux_output_config reasoning_parser
    reasoning_parser_plugin speculative_config spec_method spec_model spec_tokens watermark_config diffusion_config
    show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces per_request_spec_decode_metrics
    kv_cache_metrics kv_cache_metrics_sample custom_histogram_buckets cudagraph_metrics
    enable_layerwise_nvtx_tracing enable_mfu_metrics enable_logging_iteration_details jit_monitor_mode
    jit_monitor_verbose enable_mm_processor_stats scheduling_policy scheduler_cls pooler_config compilation_config
    attention_config engram_config mamba_config kernel_config enable_flashinfer_autotune monokernel worker_cls
    worker_extension_cls profiler_config logging_config log_level log_config_file kv_transfer_config
    kv_events_config ec_transfer_config ec_manager_config reasoning_config generation_config enable_sleep_mode
    sleep_mode_backend sleep_mode_offload_cudagraph sleep_preserve_parameter_names enable_cumem_allocator
    enable_nccl_comm_suspend override_generation_config model_impl attention_backend kv_cache_dtype_skip_layers
    mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size prefix_match_unit mamba_cache_mode
    enable_mamba_shared_prefix_checkpoint replayssm_buffer_len use_replayssm mamba_backend mamba_ssu_algorithm
    enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds additional_config use_tqdm_on_load
    pt_load_map_location logits_processors async_scheduling stream_interval kv_sharing_fast_prefill
    swa_bounded_replay optimization_level performance_mode fault_tolerance_config enable_fault_tolerance
    kv_offloading_size kv_offloading_backend tokens_only shutdown_timeout watchdog_config weight_transfer_config
    fail_on_environ_validation gdn_prefill_backend kda_prefill_backend kda_decode_backend enable_log_requests
    chat_template
"""
SAMPLING_NAMES = """
    n presence_penalty frequency_penalty repetition_penalty temperature watermarking top_p top_k min_p seed stop
    stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs prompt_logprob_token_ids
    prompt_logprob_start logprob_token_ids flat_logprobs detokenize skip_special_tokens
    spaces_between_special_tokens include_stop_str_in_output output_kind stream_interval skip_clone
    output_text_buffer_length structured_outputs logit_bias allowed_token_ids extra_args bad_words
    skip_reading_prefix_cache thinking_token_budget repetition_detection routed_experts_prompt_start
    trace_decode_token_ids
"""
CALL_NAMES = "lora_request tokenization_kwargs tools chat_template_content_format priority prompt_text trace_headers"


@pytest.fixture(scope="module")
def llm(checkpoints):
    with LLM(model=str(checkpoints("qwen3_vl")), **SETTINGS, limit_mm_per_prompt={"image": 1}) as llm:
        yield llm


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"download_dir": "/x"}, "LLM does not support vLLM's download_dir: set HF_HOME$"),
        (
            {"hf_token": "x"},
            "LLM does not support vLLM's hf_token: log in with `hf auth login`, or set HF_TOKEN$",
        ),
        (
            {"generation_config": "vllm"},
            "LLM does not support .* generation_config: pass sampling_params to each call$",
        ),
        (
            {"pipeline_parallel_size": 2},
            "pipeline_parallel_size must be None or 1, the only supported values, got 2$",
        ),
        ({"quantization": "awq"}, "quantization must be None, the only supported value, got 'awq'$"),
        ({"tokenizer": "somewhere"}, "tokenizer must be None, the only supported value, got 'somewhere'$"),
        (
            {"max_num_batched_tokens": 64, "max_rows": 64},
            "max_rows and vLLM's max_num_batched_tokens are mutually exclusive, got both$",
        ),
        ({"max_modellen": 5}, "LLM has no argument max_modellen; did you mean max_model_len[?]$"),
        ({"enforce_eagr": True}, "LLM has no argument enforce_eagr; did you mean enforce_eager[?]$"),
        ({"tensor_paralel_size": 1}, "LLM has no argument tensor_paralel_size; did you mean tensor_parallel_size[?]$"),
        ({"xyzzy": 5}, "LLM has no argument xyzzy$"),
        ({"temperature": 5}, "LLM has no argument temperature$"),
    ],
)
def test_other_engines_arguments_are_told_apart(given, message):
    with pytest.raises(TypeError, match=f"^{message}"):
        LLM("nowhere", **given)


@pytest.mark.parametrize(
    ("names", "listed", "takes"),
    [(ENGINE, ENGINE_NAMES, LLM), (SAMPLING, SAMPLING_NAMES, SamplingParams), (CALLS, CALL_NAMES, LLM.generate)],
    ids=["engine", "sampling", "calls"],
)
def test_every_name_of_vllms_is_known(names, listed, takes):
    """Each is done here, renamed, ignored or refused, in one way only, and what says nothing always passes."""
    own = set(inspect.signature(takes).parameters)
    assert [name for name in listed.split() if name not in own and name not in names] == []
    assert not own & {*names.only, *names.ignored, *names.renamed}
    assert not names.ignored & (names.only.keys() | names.renamed.keys())
    assert names.instead.keys() | names.usual <= names.only.keys() | names.ignored
    for nothing in (None, False, [], {}, ()):
        known = {*names.only, *names.ignored} - names.usual
        assert ours("it", names, dict.fromkeys(known, nothing), own) == {}


def test_options_are_those_of_the_configuration():
    """A type checker reads one list, `EngineConfig` the other."""
    keywords = EngineOptions.__annotations__
    fields = {field.name: field.type for field in dataclasses.fields(EngineConfig) if field.init}
    assert keywords.keys() - VllmOptions.__annotations__.keys() == fields.keys() - {"model"}
    unset = {"cache", "enable_prefix_caching", "seed"}
    for name in fields.keys() - {"model"}:
        assert keywords[name].__forward_arg__ == fields[name] + " | None" * (name in unset)
    for engine in (LLM, AsyncLLM):
        assert inspect.signature(engine).parameters.keys() >= fields.keys()


def test_one_model_may_have_several_fronts(llm):
    other = LLM(llm.service)
    assert other.cache is llm.cache
    assert other.service.config == EngineConfig(llm.service.config.model, **SETTINGS, limit_mm_per_prompt={"image": 1})
    assert [one.outputs for one in other.chat([{"role": "user", "content": "a"}], GREEDY)]
    for given in (llm.service, llm.service.config):
        with pytest.raises(TypeError, match=f"^dtype cannot be combined with {type(given).__name__}: "):
            LLM(given, dtype="float32")


def test_what_no_answer_depends_on_is_told_once():
    given = {
        "pipeline_parallel_size": 1,
        "trust_remote_code": True,
        "enforce_eager": True,
        "enable_chunked_prefill": True,
    }
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert ours("LLM", ENGINE, given | {"mm_processor_cache_gb": 4, "enable_chunked_prefill": True}, []) == {}
    [one] = told
    assert str(one.message) == (
        "trust_remote_code, enforce_eager, mm_processor_cache_gb have no effect here and are ignored "
        "(set cache=CacheConfig(host_bytes=...) to size the image cache)"
    )
    assert one.filename == __file__
    with pytest.warns(UserWarning, match="^enable_chunked_prefill has no effect here and is ignored$"):
        ours("LLM", ENGINE, {"enable_chunked_prefill": False}, [])


def test_warnings_name_the_line_that_called_the_package():
    """Whichever of its modules warns."""
    call = {"type": "function", "function": {"name": "look", "arguments": "no object"}}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        read_message({"role": "assistant", "content": "", "tool_calls": [call]}, "messages[0]", lambda part, name: None)
    assert [one.filename for one in told] == [__file__]


class OutputKind(enum.Enum):
    """vLLM's."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


def test_sampling_parameters_of_others():
    plain = SamplingParams(temperature=1)
    usual = {"detokenize": True, "spaces_between_special_tokens": True, "structured_outputs": None, "best_of": 1}
    for kind in (OutputKind.CUMULATIVE, OutputKind.FINAL_ONLY, 0, 2):
        assert SamplingParams(temperature=1, **usual, output_kind=kind, logits_processors=[]) == plain
    with pytest.warns(UserWarning, match="^detokenize, flat_logprobs have no effect here and are ignored$"):
        assert SamplingParams(temperature=1, detokenize=False, flat_logprobs=True) == plain
    with pytest.warns(UserWarning, match="^extra_args has no effect here"):
        plain.extra_args = {"a": 1}
    for given, message in (
        ({"output_kind": OutputKind.DELTA}, "SamplingParams does not support vLLM's output_kind: outputs contain"),
        ({"output_kind": 1}, "SamplingParams does not support vLLM's output_kind: outputs contain"),
        ({"do_sample": True}, "SamplingParams has no argument do_sample; set temperature, where 0 is greedy$"),
        ({"response_format": {}}, "SamplingParams has no argument response_format; set structured_outputs="),
        ({"best_of": 2}, "SamplingParams does not support vLLM's best_of: set n, and choose"),
        ({"logprob_token_ids": [5]}, "SamplingParams does not support .* logprob_token_ids: set logprobs, up to 20"),
        (
            {"guided_decoding": {"json": {}}},
            "SamplingParams does not support .* guided_decoding: set structured",
        ),
    ):
        with pytest.raises(TypeError, match=f"^{message}"):
            SamplingParams(**given)
        [(name, value)] = given.items()
        with pytest.raises(TypeError, match=f"^{message}"):
            setattr(plain, name, value)


def test_what_has_another_name_here(checkpoints):
    assert ours("LLM", ENGINE, {"max_num_batched_tokens": 64, "use_tqdm_on_load": None}, []) == {"max_rows": 64}
    settings = {
        name: value for name, value in SETTINGS.items() if name not in ("buckets", "kv_cache_bytes", "use_tqdm")
    }
    model = checkpoints("qwen3_vl")
    others = {"max_num_batched_tokens": 64, "kv_cache_memory_bytes": "4MiB", "use_tqdm_on_load": False}
    unset = {"tensor_parallel_size": 1, "tokenizer": str(model), "seed": None, "enable_prefix_caching": None}
    limits = {"image": 2, "video": {"count": 1, "num_frames": 32, "width": 512}, "audio": {"length": 9}}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        llm = LLM(model, **settings, **others, **unset, enforce_eager=True, limit_mm_per_prompt=limits)
    with llm:
        assert llm.service.device.runner.buckets.max_rows == 64
        assert repr(llm).startswith(f"LLM('{model}', dtype='float32'")
        assert (llm.service.renderer.max_images, llm.service.renderer.max_videos) == (2, 1)
    assert [str(one.message) for one in told] == [
        "enforce_eager has no effect here and is ignored",
        "limit_mm_per_prompt['video']['num_frames'], limit_mm_per_prompt['video']['width'], "
        "limit_mm_per_prompt['audio']['length'] have no effect here and are ignored",
    ]
    with pytest.raises(TypeError, match="chat has no argument tool"):
        ours("chat", CALLS, {"tool": 1}, ["chat_template"])
    for wrong in ({"image": {"count": -1}}, {"image": {"count": True}}, {"image": "many"}):
        with pytest.raises(ValueError, match=r"^limit_mm_per_prompt must be integers of at least 0, got .* for image$"):
            LLM("nowhere", limit_mm_per_prompt=wrong)
    with pytest.raises(ValueError, match=r"^dtype must be one of auto, float32, bfloat16, float16, got 'int4'$"):
        LLM("nowhere", dtype="int4")


def test_sizes_in_other_words(llm, checkpoints, monkeypatch):
    monkeypatch.setattr(memory_plan, "free_bytes", lambda device: 24 * 2**30)  # whatever else runs on the machine
    pages = memory_plan.round_pages(
        16 * 2**20 // (128 * KVShape.of(llm.service.device.runner.config, np.float32).slot_bytes)
    )
    assert (llm.service.device.runner.num_slots, llm.service.device.runner.dtype) == (128 * (pages + 1), np.float32)
    settings = SETTINGS | {"kv_cache_bytes": None, "gpu_memory_utilization": 0.001, "max_num_seqs": 2, "dtype": "half"}
    settings["buckets"] = dataclasses.replace(SIZES["buckets"], sequences=(1, 4))
    with LLM(checkpoints("qwen3_vl"), **settings) as small:
        assert small.service.device.runner.buckets.sequences == (1, 2)
        assert small.service.device.runner.dtype == np.float16
    with pytest.raises(MemoryError, match="model and KV pool must fit"):
        LLM(checkpoints("qwen3_vl"), **settings | {"gpu_memory_utilization": 1e-9})


def test_the_engine_shows_what_it_has(llm):
    assert llm.get_tokenizer().decode([97, 98]) == "ab"
    params = llm.get_default_sampling_params()
    assert isinstance(params, SamplingParams)
    assert params.temperature is not None


def test_calls_as_others_write_them(llm, textured_image):
    picture = Image.fromarray(textured_image(64, 64))
    asked = [{"role": "user", "content": [{"type": "image_pil", "image_pil": picture, "uuid": "mine"}]}]
    [output] = llm.chat(asked, GREEDY, False)
    [again] = llm.chat(messages_with(picture, "mine"), GREEDY, False)
    assert again.outputs[0].token_ids == output.outputs[0].token_ids
    other = Image.fromarray(textured_image(64, 64, seed=3))
    with pytest.raises(ValueError, match="mine"):
        llm.chat(messages_with(other, "mine"), GREEDY, False)  # the id is another picture's
    ids = llm.get_tokenizer()("Hello")["input_ids"]
    found = llm.generate([{"prompt_token_ids": ids}, "Hello", ids], GREEDY, False, lora_request=None)
    assert found[0].outputs == found[1].outputs == found[2].outputs
    assert [output.request_id for output in found] == ["0", "1", "2"]
    for alone in (ids, tuple(ids), np.array(ids)):
        assert [output.outputs for output in llm.generate(alone, GREEDY, False)] == [found[0].outputs]
    continued = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The answer"}]
    [output] = llm.chat(continued, GREEDY, False, continue_final_message=True)
    assert output.prompt.endswith("The answer")
    [output] = llm.chat(continued, GREEDY, False, chat_template="{{ word }}", chat_template_kwargs={"word": "ab"})
    assert output.prompt == "ab"
    [same] = llm.chat(messages=continued, sampling_params=GREEDY, use_tqdm=False, tools=None, lora_request=None)
    assert same.outputs == llm.chat(continued, GREEDY, False)[0].outputs
    [told] = llm.chat(continued, GREEDY, False, tools=[{"type": "function", "function": {"name": "look"}}])
    assert '<tools>\n{"type": "function", "function": {"name": "look"}}\n</tools>' in told.prompt
    with pytest.raises(ValueError, match=r'^tools\[0\] must be an object of the type "function", got 1$'):
        llm.chat(continued, GREEDY, False, tools=[1])
    with pytest.raises(TypeError, match=r"^generate does not support vLLM's tools: call chat, which"):
        llm.generate("a", GREEDY, False, tools=[1])
    with pytest.raises(TypeError, match=r"^chat has no argument template"):
        llm.chat(continued, GREEDY, False, template="x")
    for call in (llm.generate, llm.chat):
        for near in ("sampling_param", "sampling"):
            with pytest.raises(
                TypeError, match=f"^{call.__name__} has no argument {near}; did you mean sampling_params[?]$"
            ):
                call(continued, use_tqdm=False, **{near: GREEDY})
        with pytest.raises(TypeError, match=r"no argument temperature; write it into sampling_params=SamplingParams"):
            call(continued, use_tqdm=False, temperature=0)
    with pytest.raises(ValueError, match=r"^conversations and messages are mutually exclusive, got both$"):
        llm.chat(continued, messages=continued)
    [score] = llm.score(continued, ["a"], use_tqdm=False, continue_final_message=True)
    assert len(score.token_ids) == 1
    with pytest.raises(ValueError, match="must have at most 1 images, got 2"):
        llm.chat(
            [{"role": "user", "content": [*asked[0]["content"], {"type": "text", "text": "x"}] * 2}], GREEDY, False
        )


def messages_with(picture, uuid):
    return [{"role": "user", "content": [{"type": "image", "image": picture, "uuid": uuid}]}]


def test_what_is_public_is_listed():
    assert {"LLM", "AsyncLLM", "SamplingParams", "__version__"} <= set(dir(vlcache_jax))
    assert all(hasattr(vlcache_jax, name) for name in dir(vlcache_jax))


def test_errors_name_what_was_written(llm, textured_image):
    """One conversation, or one prompt, has no number."""
    wrong = [{"role": "user", "content": [{"type": "image", "image": b"no"}, {"type": "text", "text": "a"}]}]
    robot = [{"role": "robot", "content": "a"}]
    for call, message in (
        (lambda: llm.chat(messages=robot), r"messages\[0\] must have the role"),
        (lambda: llm.chat("hi"), r'messages must be a list such as \[{"role": "user", .* of such lists, got str$'),
        (lambda: llm.chat(robot[0]), r"messages must be a list such as .*, got dict$"),
        (lambda: llm.chat(5), r"conversations must be a list of conversations, got int$"),
        (lambda: llm.chat(robot), r"messages\[0\] must have the role"),
        (lambda: llm.chat(wrong), r"messages images\[0\] must be an image that Pillow can read"),
        (lambda: llm.chat([wrong]), r"conversations\[0\] images\[0\] must be an image"),
        (lambda: llm.chat(messages=[robot]), r"messages\[0\]\[0\] must have the role"),
        (lambda: llm.generate({"prompt": 5}), r"prompts must have a string as 'prompt'"),
        (lambda: llm.generate([{"prompt": 5}]), r"prompts\[0\] must have a string as 'prompt'"),
        (lambda: llm.cache.precompute([b"no"]), r"images\[0\] must be an image that Pillow can read"),
        (lambda: llm.cache.precompute([None]), r"images\[0\] must be an image, got None"),
        (lambda: llm.cache.precompute([], system=5), r"system must be a string, got 5"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            call()
    with pytest.raises(TypeError, match=r"^ImageCache.evict\(\) got an unexpected keyword argument 'salt'"):
        llm.cache.evict(textured_image(64, 64), salt="a")
    with pytest.raises(TypeError, match=r"^LLM\(\) missing 1 required positional argument: 'model'$"):
        LLM()
    with pytest.raises(TypeError, match=r"^score has no argument chat_templat; did you mean chat_template\?$"):
        llm.score(robot, ["a"], chat_templat="x")


def test_a_call_takes_parameters_as_they_are_when_it_begins(llm):
    params, rows = GREEDY.clone(), [[{"role": "user", "content": "a"}]] * 2
    job = llm.chat_iter(rows, params, False)
    params.max_tokens = 2
    assert [len(output.outputs[0].token_ids) for _, output in job] == [4, 4]
    assert [len(output.outputs[0].token_ids) for output in llm.chat(rows, params, False)] == [2, 2]
    params.min_tokens = 3
    with pytest.raises(ValueError, match=r"^sampling_params min_tokens must be at most max_tokens = 2, got 3$"):
        llm.chat(rows[0], params, False)


def test_seeds_of_64_bits(llm):
    def drawn(seed):
        params = SamplingParams(temperature=5, max_tokens=8, ignore_eos=True, seed=seed)
        return llm.generate("a", params, False)[0].outputs[0].token_ids

    seeds = (0, 2**32, 2**63, 2**64 - 2, -2)
    found = [drawn(seed) for seed in seeds]
    assert found == [drawn(seed) for seed in seeds]
    assert found[3] == found[4]  # as torch has it
    assert len({*found}) == 4
    assert drawn(-1) != drawn(-1)  # none


def test_a_conversation_with_a_template_of_its_own(llm):
    asked = [{"role": "user", "content": "a"}]
    own = {"messages": asked, "chat_template": "{{ word }}b", "chat_template_kwargs": {"word": "a"}}
    for given in ([own, asked], [asked, own]):
        texts = [output.prompt for output in llm.chat(given, GREEDY, False)]
        assert texts[given.index(own)] == "ab"
        assert texts[given.index(asked)] == llm.chat(asked, GREEDY, False)[0].prompt
    with pytest.raises(ValueError, match=r"^conversations\[0\] chat_template must be a string, got 5$"):
        llm.chat([own | {"chat_template": 5}])
    with pytest.raises(
        ValueError,
        match=r"^conversations\[0\]: unknown field 'tool'; expected one of messages, .*; did you mean 'tools'\?",
    ):
        llm.chat([own | {"tool": 5}])
    with pytest.raises(ValueError, match=r"^conversations\[0\] tools must be a list, got 5$"):
        llm.chat([own | {"tools": 5}])


def test_logprobs_are_mappings_too(llm):
    told = SamplingParams(
        temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=2, ignore_eos=True, logit_bias={5: 90}
    )
    [output] = llm.generate("abc", told, False)
    [answer] = output.outputs
    assert len(answer.logprobs) == 3
    assert output.prompt_logprobs[0] is None
    assert (output.lora_request, output.encoder_prompt, answer.lora_request, answer.finished()) == (
        None,
        None,
        None,
        True,
    )
    for token, one in zip(answer.token_ids, answer.logprobs, strict=True):
        assert list(one) == [5, *one.top] == [token, *one.top]  # the chosen one, which the bias made it, comes first
        assert (len(one), token in one, 5000 in one) == (3, True, False)
        assert (one[token].logprob, one[token].rank, one[token].decoded_token) == (one.chosen, one.rank, one.texts[5])
        assert one.rank > 2
        assert [(of.logprob, of.rank) for _, of in list(one.items())[1:]] == [
            (v, i) for i, v in enumerate(one.top.values(), 1)
        ]
        with pytest.raises(KeyError):
            one[5000]
    for token, one in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert one[int(token)].logprob == one.chosen
        assert len(one) == 2 + (one.rank > 2)


def test_each_row_of_a_job_has_its_own_parameters(llm):
    rows = [[{"role": "user", "content": f"{i}"}] for i in range(11)]
    lengths = [1 + i % 5 for i in range(11)]
    params = [dataclasses.replace(GREEDY, max_tokens=length) for length in lengths]
    found = dict(llm.chat_iter(iter(rows), iter(params), False))
    assert [len(found[i].outputs[0].token_ids) for i in range(11)] == lengths
    assert [found[i].request_id for i in range(11)] == list(map(str, range(11)))
    assert len(list(llm.chat_iter(iter(rows), itertools.cycle(params), False))) == 11  # more than are needed
    before = []
    with pytest.raises(ValueError, match=r"^sampling_params must have a value for each conversation, got fewer$"):
        before.extend(index for index, _ in llm.chat_iter(iter(rows), params[:9], False))
    assert sorted(before) == list(range(9))  # what came before the fault is answered
    mixed = [*params[:4], {"max_tokens": 3}, *params[5:]]
    found = dict(llm.chat_iter(rows, mixed, False, on_error="return"))
    assert found[4].error == "sampling_params[4] must be SamplingParams, got dict"
    assert sum(output.error is None for output in found.values()) == 10


def test_outputs_are_json(llm, textured_image):
    llm.reset_mm_cache()
    told = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1, n=2, ignore_eos=True)
    asked = messages_with(textured_image(64, 64), None)
    [output] = llm.chat(asked, told, False, verify=True)
    found = json.loads(json.dumps(output.to_dict()))
    assert found["prompt_token_ids"] == output.prompt_token_ids.tolist()
    assert found["outputs"][1]["token_ids"] == list(output.outputs[1].token_ids)
    assert found["outputs"][0]["logprobs"][0]["texts"]
    assert found["cache"]["images"][0]["why"] == "unknown_image"
    assert found["verification"]["tokens_agree"] == 3
    assert set(found) == {field.name for field in dataclasses.fields(output)}
    [wrong] = llm.chat([[{"role": "user"}]], told, False, on_error="return")
    assert json.loads(json.dumps(wrong.to_dict()))["error"] == wrong.error
    [score] = llm.score(asked, ["ab"], keep_logits=True, use_tqdm=False)
    assert np.shape(json.loads(json.dumps(score.to_dict()))["logits"]) == (
        2,
        llm.service.device.runner.config.text.vocab_size,
    )


@pytest.mark.parametrize("name", ["AsyncEngineArgs", "EngineArgs", "AsyncLLMEngine", "GuidedDecodingParams"])
def test_names_of_vllm_say_what_to_write(name):
    told = rf"no attribute '{name}'; (write|import) .*(LLM|StructuredOutputs)"
    with pytest.raises(AttributeError, match=told):
        getattr(vlcache_jax, name)
    with pytest.raises(ImportError, match=told):
        exec(f"from vlcache_jax import {name}")
    assert not hasattr(vlcache_jax, name)


def test_other_names_are_unknown_as_they_are_in_any_module():
    with pytest.raises(AttributeError, match=r"no attribute 'Nothing'$"):
        vlcache_jax.Nothing  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        exec("from vlcache_jax import Nothing")


def test_ways_in_which_vllm_opens_an_engine_say_what_to_write():
    for name in ("from_engine_args", "from_vllm_config"):
        with pytest.raises(AttributeError, match=rf"^AsyncLLM has no {name}; write AsyncLLM\(model, "):
            getattr(AsyncLLM, name)


@pytest.mark.parametrize("kind", ["json", "regex", "choice", "grammar"])
def test_guided_parameters_say_what_to_write(kind):
    with pytest.raises(TypeError, match=f"guided_{kind}; write it into structured_outputs: {{'{kind}': "):
        SamplingParams(**{f"guided_{kind}": "a"})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("tight", "must be an object such as"),
        ({"disable_any_whitespace": 1}, "disable_any_whitespace must be true or false, got 1"),
        ({"disable_any_whitespac": True}, "no argument disable_any_whitespac; did you mean disable_any_whitespace"),
        ({"enable_in_reasoning": "yes"}, "enable_in_reasoning must be true or false, got 'yes'"),
        ({"disable_additional_properties": True}, "write additionalProperties into each schema"),
    ],
)
def test_a_structured_outputs_config_that_cannot_be_is_refused(given, told):
    with pytest.raises(ValueError, match=f"^structured_outputs_config.*{told}"):
        EngineConfig("tiny-vqa", structured_outputs_config=given)


def test_what_asks_for_nothing_of_a_structured_outputs_config_is_taken():
    given = {"backend": "auto", "disable_any_whitespace": True, "enable_in_reasoning": False, "reasoning_parser": ""}
    taken = StructuredOutputsConfig.of(
        EngineConfig("tiny-vqa", structured_outputs_config=given).structured_outputs_config
    )
    assert taken == StructuredOutputsConfig(disable_any_whitespace=True, enable_in_reasoning=False)
    with pytest.warns(UserWarning, match="backend has no effect here"):
        EngineConfig("tiny-vqa", structured_outputs_config={"backend": "xgrammar"})


@pytest.mark.parametrize("switch", ["disable_any_whitespace", "enable_in_reasoning"])
@pytest.mark.parametrize("own", [None, False, True])
@pytest.mark.parametrize("engine", [None, False, True])
@pytest.mark.parametrize("checkpoint", [None, False, True])
def test_a_request_comes_before_its_engine_and_that_before_the_checkpoint(switch, own, engine, checkpoint):
    config = StructuredOutputsConfig(**{switch: engine}).over(StructuredOutputsConfig(**{switch: checkpoint}))
    held = StructuredOutputs(json_object=True, **{switch: own}).within(config)
    assert getattr(held, switch) is next((value for value in (own, engine, checkpoint) if value is not None), False)


@pytest.mark.parametrize("kind", ["json", "regex", "choice", "grammar"])
def test_guided_parameters_that_ask_for_nothing_are_taken(kind):
    assert SamplingParams(**{f"guided_{kind}": None}) == SamplingParams()


def test_an_error_suggests_no_name_that_is_private():
    with pytest.raises(TypeError, match=r"no argument bakend$"):
        StructuredOutputs(json_object=True, bakend="xgrammar")
