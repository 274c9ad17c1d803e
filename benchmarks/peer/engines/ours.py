"""This checkout, or another one that PYTHONPATH names, as an engine of `benchmarks.peer`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGES = ("vlcache-jax", "jax", "flax")
REUSE = ("exact", "approximate", "full")


def setup(folder: Path) -> tuple[str, dict[str, str]]:
    """Return this environment; nothing is installed."""
    return sys.executable, {}


class OwnEngine:
    """This engine, with the interface that `engines` documents."""

    def __init__(self, model: str, dtype: str, options: dict[str, int]):
        from vlcache_jax import LLM, SamplingParams

        self._params = SamplingParams
        self._llm = LLM(
            model,
            dtype=dtype,
            max_num_seqs=options["requests"],
            max_rows=options["rows"],
            max_model_len=options["model_len"],
            kv_cache_bytes=options["kv_bytes"],
            use_tqdm=False,
        )

    def warm(self, reuse: Sequence[str]) -> None:
        for setting in reuse:
            self._llm.warmup(reuse=setting, verbose=False)

    def answer(self, requests: Sequence[dict[str, Any]], reuse: str, logprobs: int) -> list[dict[str, Any]]:
        prompts: list[Any] = [
            {"prompt": one["prompt"]} | ({"multi_modal_data": {"image": one["images"]}} if one["images"] else {})
            for one in requests
        ]
        params = [
            self._params(temperature=0, max_tokens=one["max_tokens"], ignore_eos=True, logprobs=logprobs or None)
            for one in requests
        ]
        outputs = self._llm.generate(prompts, params, reuse=reuse, use_tqdm=False)
        return [
            {
                "tokens": list(output.outputs[0].token_ids),
                "prompt_tokens": len(output.prompt_token_ids),
                "cached": output.num_cached_tokens,
                "matches": [image.match for image in output.cache.images],
                "logprobs": [{str(i): p.logprob for i, p in one.items()} for one in output.outputs[0].logprobs or ()],
            }
            for output in outputs
        ]

    def settle(self) -> None:
        self._llm.cache.flush()

    def forget(self) -> None:
        self._llm.reset_mm_cache()

    def close(self) -> None:
        self._llm.close()


ENGINE = OwnEngine
