"""Inference of Qwen vision-language models in JAX, with reuse of cached images."""

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlcache_jax.async_llm import AsyncLLM as AsyncLLM
    from vlcache_jax.cache.config import CacheConfig as CacheConfig
    from vlcache_jax.calls.groups import RequestError as RequestError
    from vlcache_jax.calls.in_flight import QueueFullError as QueueFullError
    from vlcache_jax.config import EngineConfig as EngineConfig
    from vlcache_jax.device.buckets import BucketSizes as BucketSizes
    from vlcache_jax.llm import LLM as LLM
    from vlcache_jax.outputs import RequestOutput as RequestOutput
    from vlcache_jax.outputs import Score as Score
    from vlcache_jax.request_options import RequestOptions as RequestOptions
    from vlcache_jax.reuse.policies import MPIC as MPIC
    from vlcache_jax.reuse.schedule import Schedule as Schedule
    from vlcache_jax.sampling import SamplingParams as SamplingParams
    from vlcache_jax.sampling import StructuredOutputs as StructuredOutputs

__version__ = "0.1.0"

_MODELS = os.path.join(os.path.dirname(__file__), "models")
if os.path.isfile(_MODELS):
    raise ImportError(
        f"{_MODELS} must be a folder, got a file: the repository's symbolic links were unpacked as text files. "
        "Clone it with `git -c core.symlinks=true clone`, or replace models, pallas_kernels, convert and benchmarks in "
        "vlcache_jax/ by copies of the folders of the same names next to it",
        name=__name__,
    )

_HOMES = {
    "AsyncLLM": "vlcache_jax.async_llm",
    "CacheConfig": "vlcache_jax.cache.config",
    "EngineConfig": "vlcache_jax.config",
    "LLM": "vlcache_jax.llm",
    "BucketSizes": "vlcache_jax.device.buckets",
    "MPIC": "vlcache_jax.reuse.policies",
    "QueueFullError": "vlcache_jax.calls.in_flight",
    "RequestError": "vlcache_jax.calls.groups",
    "RequestOptions": "vlcache_jax.request_options",
    "RequestOutput": "vlcache_jax.outputs",
    "SamplingParams": "vlcache_jax.sampling",
    "Schedule": "vlcache_jax.reuse.schedule",
    "Score": "vlcache_jax.outputs",
    "StructuredOutputs": "vlcache_jax.sampling",
}
_RENAMED = {"Ladder": "BucketSizes"}
__all__ = [
    "LLM",
    "MPIC",
    "AsyncLLM",
    "BucketSizes",
    "CacheConfig",
    "EngineConfig",
    "QueueFullError",
    "RequestError",
    "RequestOptions",
    "RequestOutput",
    "SamplingParams",
    "Schedule",
    "Score",
    "StructuredOutputs",
]


def __getattr__(name: str) -> Any:
    # Imports at first use: the --help of a command then does not wait for JAX.
    import importlib

    if name in _RENAMED:
        from vlcache_jax.common.renamed import warn_renamed

        warn_renamed(f"vlcache_jax.{name}", _RENAMED[name])
        name = _RENAMED[name]
    if name not in _HOMES:
        raise _no_such(name)

    return getattr(importlib.import_module(_HOMES[name]), name)


def _no_such(name: str) -> Exception:
    """Return the error for an unknown name, with the equivalent of vLLM's names.

    An import statement hides the message of an AttributeError, so it gets an ImportError.
    """
    from vlcache_jax.common.vllm_compat import NAMES

    message = f"module {__name__!r} has no attribute {name!r}"
    if name not in NAMES:
        return AttributeError(message)
    message = f"{message}; {NAMES[name]}"
    is_import = sys._getframe(2).f_globals.get("__name__") == "importlib._bootstrap"
    return ImportError(message, name=__name__) if is_import else AttributeError(message)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
