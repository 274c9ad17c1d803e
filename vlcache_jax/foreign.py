"""Arguments that vLLM's classes take and ours do not: ours in their place, or why there is none."""

from __future__ import annotations

import difflib
import functools
import inspect
import pathlib
import warnings
from collections.abc import Collection, Mapping
from typing import Any

# The same under another name.
_OURS = {"max_num_batched_tokens": "max_rows", "kv_cache_memory_bytes": "kv_cache_bytes"}
_INSTEAD = {
    "mm_processor_cache_gb": 'cache=CacheConfig(host_bytes="4GiB")',
    "mm_processor_cache_type": "cache=CacheConfig(...)",
    "disable_mm_preprocessor_cache": 'reuse="off"',
    "num_gpu_blocks_override": "kv_cache_bytes",
    "attention_backend": "implementation",
    "generation_config": "sampling_params in each call",
    "override_generation_config": "sampling_params in each call",
    "hf_token": "nothing, and log in with `hf auth login`",
    "download_dir": "nothing, and set HF_HOME",
}
_ANY = ()
# With one of these values nothing is asked for; with any value nothing that has a meaning here.
_NOTHING: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (None, False),
    "async_scheduling": _ANY,
    "block_size": _ANY,
    "chat_template_content_format": _ANY,
    "compilation_config": _ANY,
    "cpu_offload_gb": (None, 0),
    "data_parallel_size": (None, 1),
    "detokenize": (None, True),
    "disable_log_requests": _ANY,
    "disable_log_stats": _ANY,
    "distributed_executor_backend": _ANY,
    "enable_chunked_prefill": (None, True),
    "enable_log_requests": _ANY,
    "enable_lora": (None, False),
    "enable_sleep_mode": (None, False),
    "enforce_eager": (None, False),
    "hf_overrides": (None, {}),
    "kv_cache_dtype": (None, "auto"),
    "load_format": (None, "auto", "safetensors"),
    "lora_request": (None,),
    "max_logprobs": _ANY,
    "max_seq_len_to_capture": _ANY,
    "mm_encoder_tp_mode": _ANY,
    "pipeline_parallel_size": (None, 1),
    "quantization": (None,),
    "runner": (None, "auto", "generate"),
    "served_model_name": _ANY,
    "skip_mm_profiling": _ANY,
    "skip_tokenizer_init": (None, False),
    "speculative_config": (None,),
    "structured_outputs": (None,),
    "swap_space": _ANY,
    "task": (None, "auto", "generate"),
    "tensor_parallel_size": (None, 1),
    "tokenization_kwargs": (None, {}),
    "tokenizer": (None,),
    "tokenizer_mode": (None, "auto"),
    "tokenizer_revision": (None,),
    "tools": (None, []),
    "truncate_prompt_tokens": (None,),
    "trust_remote_code": _ANY,
}


def ours(name: str, given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """What arguments that are none of ours mean here.

    Warns of those that have no meaning here.

    Args:
      name: of what was called.
      given: the arguments.
      known: names of ours.

    Returns:
      Ours in place of some of them.

    Raises:
      TypeError: one is unknown, must be written in another way, or asks for what there is not.
    """
    found: dict[str, Any] = {}
    for argument, value in given.items():
        if argument in _OURS and _OURS[argument] in known:
            found[_OURS[argument]] = value
        elif argument in _INSTEAD and value is not None:
            raise TypeError(f"{name} has no argument {argument}, as vLLM has: write {_INSTEAD[argument]}")
        elif argument in _NOTHING:
            values = _NOTHING[argument]
            if values is _ANY:
                here = str(pathlib.Path(__file__).parent)
                warnings.warn(f"{argument} has no meaning here and is ignored", UserWarning, skip_file_prefixes=(here,))
            elif value not in values:
                expected = " or ".join(map(repr, values))
                raise TypeError(f"{argument} must be {expected}, as nothing else is supported here, got {value!r}")
        elif argument not in _INSTEAD:
            close = difflib.get_close_matches(argument, known, 1, 0.75)
            raise TypeError(f"{name} has no argument {argument}" + (f"; is it {close[0]}?" if close else ""))
    return found


def takes_foreign[T](kind: type[T]) -> type[T]:
    """A class that is also made with arguments of vLLM's class of the same name; see `ours`."""
    changed: Any = kind
    init: Any = changed.__init__
    names = inspect.signature(kind).parameters

    @functools.wraps(init)
    def translated(self: T, *args: Any, **given: Any) -> None:
        own = {name: value for name, value in given.items() if name in names}
        other = {name: value for name, value in given.items() if name not in names}
        init(self, *args, **own, **ours(kind.__name__, other, names))

    changed.__init__ = translated
    return kind
