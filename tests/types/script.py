"""A user's script, for mypy: what it must see of an editable install from outside the clone (`.ci/run`)."""

from typing import assert_type

from vlcache_jax import LLM, RequestOutput, SamplingParams
from vlcache_jax.models import ModelConfig
from vlcache_jax.outputs import TokenLogprob

with LLM("tiny-vqa") as llm:
    [output] = assert_type(llm.chat([{"role": "user", "content": "Hello"}]), list[RequestOutput])
    for one in output.outputs[0].logprobs or ():
        assert_type(one[5], TokenLogprob)
    llm.cache.evict("a.png", salt="mine")  # type: ignore[call-arg]
    SamplingParams(temperature="hot")  # type: ignore[arg-type]
    ModelConfig(5)  # type: ignore[arg-type, call-arg]
