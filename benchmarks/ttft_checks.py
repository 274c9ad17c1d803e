"""What must hold of what `vlcache bench ttft` times: hits are the ones that are claimed, and answers mean something."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vlcache_jax.benchmarks.ttft_table import COLD, ENCODER_CACHED
from vlcache_jax.cache.device import PAGE_TOKENS
from vlcache_jax.device.kv_shape import KVShape
from vlcache_jax.pallas_kernels import CODECS

if TYPE_CHECKING:
    from vlcache_jax import LLM
    from vlcache_jax.engine.completions import Logprob


def check_exact(llm: LLM, prompt: dict[str, Any]) -> None:
    """Sees that a repeat has the logits of a cold run, before anything is timed.

    Raises:
      ValueError: it has not.
    """
    from vlcache_jax import SamplingParams

    one = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    llm.generate(prompt, one, use_tqdm=False)
    [output] = llm.generate(prompt, one, use_tqdm=False, verify=True)
    if output.num_cached_tokens == 0 or not output.cache.exact:
        raise ValueError(f"a repeat must hit exactly, got {output.cache}")
    most, found = 1e-3 if llm.service.device.runner.dtype == np.float32 else 0.5, output.verification
    if found is None or not found.max_logit_difference < most:
        raise ValueError(f"a repeat must have the logits of a cold run, got {found}")


def check_coded(llm: LLM, codec: str, scores: Sequence[Any]) -> int:
    """Bytes of K, V that a token takes.

    Raises:
      ValueError: an image was not linked, or records are not coded as they should be.
    """
    if found := {image.match for score in scores for image in score.cache.images} - {"approximate"}:
        raise ValueError(f"images must be linked from another context with codec {codec}, got {', '.join(found)}")
    config = llm.service.device.runner.config
    planes = KVShape.of(config, llm.service.device.runner.dtype, CODECS.get(codec)).code_bytes
    metas = [record.meta for record in llm.service.cache.store.tier.records() if record.meta.context is not None]
    sizes = {(meta.planes, meta.nbytes // meta.padded) for meta in metas}
    if len(sizes) != 1 or {own for own, _ in sizes} != {planes}:
        raise ValueError(f"records of codec {codec} must have planes of {planes} bytes, got {sizes}")
    [(_, size)] = sizes
    entries = {meta.entry for meta in metas}
    if missing := {image.key for score in scores for image in score.cache.images} - entries:
        raise ValueError(f"every image must have a record of codec {codec}, {len(missing)} have none")
    return size


def check_room(llm: LLM, sizes: Sequence[tuple[int, int]]) -> None:
    """Sees that a device tier, if there is one, holds the images of a prompt.

    Args:
      sizes: of the prompts: (images, tokens of each).

    Raises:
      ValueError: it does not.
    """
    tier = llm.service.cache.tier
    wanted = max(images * -(-tokens // PAGE_TOKENS) for images, tokens in sizes)
    if 0 < tier.num_pages < wanted:
        raise ValueError(
            f"device_bytes must hold the images of a prompt, {wanted} pages of {tier.page_bytes} bytes, got room for "
            f"{tier.num_pages}"
        )


def check_found(name: str, place: str, output: Any) -> None:
    """Sees that a configuration found its images as it claims, and that there is an answer.

    Raises:
      ValueError: it did not, or there is none.
    """
    expected = {COLD: (False, "miss", "none"), ENCODER_CACHED: (True, "miss", "none")}.get(
        name, (True, "approximate", place)
    )
    found = {(image.encoder != "computed", image.match, image.kv) for image in output.cache.images}
    if found != {expected}:
        raise ValueError(f"{name} must find its images as {expected} (encoder known, match, K, V in), got {found}")
    if len(output.outputs) != 1 or len(output.outputs[0].token_ids) != 1:
        raise ValueError(f"{name} must answer with one token, got {output.outputs}")


def check_logprobs(answers: Mapping[str, Sequence[Logprob]]) -> None:
    """Sees that the answers of the configurations, each to a prompt of its own, come from logits that mean something.

    Raises:
      ValueError: log-probabilities are missing, not finite, all the same, or the same for different prompts.
    """
    names: dict[bytes, str] = {}
    for name, logprobs in answers.items():
        values = np.array([value for logprob in logprobs for value in logprob.top.values()])
        if not values.size or not np.isfinite(values).all() or np.ptp(values) == 0:
            raise ValueError(f"{name} must have log-probabilities that are finite and differ, got {values}")
        same = names.setdefault(values.tobytes(), name)
        if same != name:
            raise ValueError(f"answers must depend on the prompt, got the same log-probabilities for {same} and {name}")
