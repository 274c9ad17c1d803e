"""A user's script, for mypy: what it must see of an editable install from outside the clone (`.ci/run`)."""

from collections.abc import AsyncGenerator, AsyncIterator
from typing import assert_type

from vlcache_jax import LLM, AsyncLLM, CacheConfig, EngineConfig, RequestOptions, RequestOutput, SamplingParams
from vlcache_jax.models import ModelConfig
from vlcache_jax.outputs import RequestDelta, TokenLogprob

with LLM("tiny-vqa") as llm:
    [output] = assert_type(llm.chat([{"role": "user", "content": "Hello"}]), list[RequestOutput])
    for one in output.outputs[0].logprobs or ():
        assert_type(one[5], TokenLogprob)
    llm.cache.evict("a.png", salt="mine")  # type: ignore[call-arg]
    SamplingParams(temperature="hot")  # type: ignore[arg-type]
    ModelConfig(5)  # type: ignore[arg-type, call-arg]

# Options of ours and of vLLM; misspelt ones, and others of a wrong type.
LLM("tiny-vqa", max_model_len=512, cache=CacheConfig(host_bytes="1GiB"), seed=None)
LLM("tiny-vqa", max_num_batched_tokens=64, tensor_parallel_size=1, enforce_eager=True, trust_remote_code=False)
LLM("tiny-vqa", max_modellen=512)  # type: ignore[call-arg]
LLM("tiny-vqa", enforce_eagr=True)  # type: ignore[call-arg]
LLM("tiny-vqa", max_model_len="512")  # type: ignore[arg-type]
LLM("tiny-vqa", max_num_batched_tokens="64")  # type: ignore[arg-type]
llm.generate("Hello", lora_request=None, priority=0)
llm.generate("Hello", lora_requests=None)  # type: ignore[call-arg]

# Options of a request, together.
options = RequestOptions(reuse=0.1, cache_salt="mine", priority=-1)
assert_type(llm.generate("Hello", options=options), list[RequestOutput])
RequestOptions(priority="high")  # type: ignore[arg-type]
RequestOptions(salt="mine")  # type: ignore[call-arg]
llm.generate("Hello", options={"reuse": 0.1})  # type: ignore[arg-type]

# One configuration and one model for both engines.
config = EngineConfig("tiny-vqa", dtype="float32", reuse=0.1)
EngineConfig("tiny-vqa", dtype=32)  # type: ignore[arg-type]
EngineConfig("tiny-vqa", reuze="exact")  # type: ignore[call-arg]
engine = AsyncLLM(config, max_waiting=8)
assert_type(engine.generate("Hello"), AsyncIterator[RequestOutput])
assert_type(engine.deltas("Hello"), AsyncGenerator[RequestDelta])
assert_type(LLM(engine.service).service.config, EngineConfig)
AsyncLLM("tiny-vqa", max_waitin=8)  # type: ignore[call-arg]
AsyncLLM("tiny-vqa", reuse="exact", max_num_seqs=8.5)  # type: ignore[arg-type]
