"""The kernel self-test, and outputs compared with those of a CPU and of XLA."""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Iterator

import numpy as np

from vlcache_jax import LLM, BucketSizes, SamplingParams
from vlcache_jax.benchmarks.gpu.engines import checkpoint, in_process, settings
from vlcache_jax.benchmarks.gpu.plan import KERNELS, GpuCase, GpuPlan, Row
from vlcache_jax.benchmarks.random_models import drawn_weights
from vlcache_jax.kernel_selftest import run_selftest
from vlcache_jax.pallas_kernels.checks import CHECKS
from vlcache_jax.testing import make_checkpoint

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
LOGPROBS = 1e-3  # maximum difference of float32 log-probabilities between a GPU and a CPU


def contact(plan: GpuPlan) -> Iterator[GpuCase]:
    if not plan.rehearse:
        yield GpuCase("every kernel, as an engine does it", _contact)


def _contact() -> Row:
    start = time.monotonic()
    results = run_selftest(CHECKS, again=True, limit=250)
    if wrong := [f"{kernel}: {result}" for kernel, result in results.items() if not result.passed]:
        raise ValueError("; ".join(wrong))
    return {"seconds": time.monotonic() - start} | {kernel: str(result) for kernel, result in results.items()}


# Outputs compared with those of a CPU.


def answers(plan: GpuPlan) -> Iterator[GpuCase]:
    for family in FAMILIES[2:3] if plan.rehearse else FAMILIES:
        yield GpuCase(f"{family}, float32, beside the CPU", functools.partial(_beside_cpu, family))
    yield GpuCase("bfloat16, kernels beside XLA", functools.partial(_beside_xla, plan), KERNELS)


def _answers(family: str) -> dict[str, list[tuple[int, float]]]:
    """Return tokens and log-probabilities of a tiny model: without reuse, repeated, and with images linked after new
    text.
    """
    pictures = [np.random.default_rng(i).integers(0, 255, (56, 84, 3), np.uint8) for i in range(2)]
    one = "<|vision_start|><|image_pad|><|vision_end|>"
    prompts = [{"prompt": text + 2 * one + "what", "multi_modal_data": {"image": pictures}} for text in ("a", "bcd")]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=1)
    buckets = BucketSizes(rows=(64, 256), patches=(64, 256), sequences=(1, 4), window=4)
    found = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        LLM(
            make_checkpoint(folder, family),
            dtype="float32",
            kv_cache_bytes="8MiB",
            buckets=buckets,
            implementation="xla",
        ) as llm,
    ):
        for name, prompt, reuse in (
            ("cold", prompts[0], "exact"),
            ("again", prompts[0], "exact"),
            ("full", prompts[1], "full"),
            ("approximate", prompts[1], "approximate"),
        ):
            [output] = llm.generate(prompt, params, use_tqdm=False, reuse=reuse)
            found[name] = [(one.token, one.chosen) for one in output.outputs[0].logprobs or ()]
    return found


def _beside_cpu(family: str) -> Row:
    got, want = _answers(family), in_process(_answers, family, platform="cpu")
    worst = {}
    for name, expected in want.items():
        if [token for token, _ in got[name]] != [token for token, _ in expected]:
            raise ValueError(f"{name}: tokens must be {expected}, got {got[name]}")
        worst[name] = max(abs(a - b) for (_, a), (_, b) in zip(got[name], expected, strict=True))
    if not max(worst.values()) < LOGPROBS:
        raise ValueError(f"log-probabilities must be within {LOGPROBS} of a CPU's, got differences {worst}")
    return worst


def _beside_xla(plan: GpuPlan) -> Row:
    """Compare log-probabilities of kernels and XLA, and those of decoding and a prefill of the same tokens."""
    prompt = np.random.default_rng(0).integers(97, 123, 300).tolist()
    options = settings(plan) | {"kv_cache_bytes": "64MiB" if plan.rehearse else "1GiB"}
    letters = [*range(97, 123)]  # the token of an image could not be read again
    decoding = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=0, allowed_token_ids=letters)
    reading = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    first: list[int] = []
    read, row = [], {}
    with tempfile.TemporaryDirectory() as folder, drawn_weights():
        checkpoint(plan, folder, 4)
        for implementation in ("xla", "xla" if plan.rehearse else plan.implementation):
            with LLM(folder, max_model_len=512, **options | {"implementation": implementation}) as llm:

                def read_again(tokens: list[int], llm: LLM = llm) -> list[float]:
                    [output] = llm.generate({"prompt_token_ids": prompt + tokens}, reading, use_tqdm=False)
                    return [one.chosen for one in (output.prompt_logprobs or ())[-len(tokens) :] if one is not None]

                [output] = llm.generate({"prompt_token_ids": prompt}, decoding, use_tqdm=False)
                tokens = list(output.outputs[0].token_ids)
                first = first or tokens
                decoded = [one.chosen for one in output.outputs[0].logprobs or ()]
                row[f"decoded against read, {implementation}"] = _apart(decoded, read_again(tokens))
                read.append(read_again(first))
    row["read, kernels against XLA"] = _apart(*read)
    if not max(row.values()) < 0.15:
        raise ValueError(f"log-probabilities must agree up to bfloat16's rounding, got differences {row}")
    return row


def _apart(some: list[float], others: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(some, others, strict=True))
