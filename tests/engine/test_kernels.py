"""The engine on each implementation of the kernels."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helper import SIZES
from vlcache_jax import LLM, BucketSizes, SamplingParams
from vlcache_jax.device.runner import check_kernels
from vlcache_jax.kernel_selftest import selftest
from vlcache_jax.kernel_selftest.gpu import Gpu
from vlcache_jax.models import layers
from vlcache_jax.models.registry import published_config
from vlcache_jax.pallas_kernels import dispatch
from vlcache_jax.pallas_kernels.checks import CHECKS, PORTABLE
from vlcache_jax.testing import make_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A model with heads of 64 in its text, and of 72 in its vision tower."""
    return make_checkpoint(
        tmp_path_factory.mktemp("checkpoint") / "model",
        model_type="qwen3_vl",
        seed=7,
        text={
            "hidden_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
        },
        vision={"depth": 2, "hidden_size": 144, "num_heads": 2, "deepstack_visual_indexes": [0]},
    )


def open_llm(directory, **settings):
    return LLM(
        directory,
        **{"dtype": "bfloat16"} | settings,
        buckets=BucketSizes(rows=(8, 64), patches=(64,), sequences=(1, 2)),
        max_model_len=512,
        kv_cache_bytes=2**20,
    )


def run(directory, implementation):
    """Tokens and logits of a cold run and of two with reuse; which kernels ran."""
    image = np.random.default_rng(0).integers(0, 255, (64, 96, 3), dtype=np.uint8)
    first, second = (
        [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": text},
                    {"type": "image", "image": image},
                    {"type": "text", "text": "what?"},
                ],
            }
        ]
        for text in ("a", "look at this")
    )
    with open_llm(directory, implementation=implementation) as llm:
        [answer] = llm.chat([first], GREEDY, reuse=0.2, use_tqdm=False)
        [score] = llm.score([second], ["the quick"], reuse=0.2, keep_logits=True, use_tqdm=False)
        return (
            answer.outputs[0].token_ids,
            [of.cache.images[0].match for of in (answer, score)],
            score.logits,
            {
                (key[0], choice.kernel, choice.implementation, choice.why)
                for key, choices in llm.kernels.items()
                for choice in choices
            },
        )


@pytest.fixture(scope="module")
def by_xla(directory):
    return run(directory, "xla")


@pytest.mark.parametrize(
    "implementation",
    [
        pytest.param("mosaic_gpu_mma_interpreted", marks=pytest.mark.interpreted),  # which no chip has run
        pytest.param("mosaic_gpu_interpreted", marks=pytest.mark.thorough),
    ],
)
def test_the_interpreted_kernels_answer_as_xla_does(directory, by_xla, implementation):
    tokens, matches, logits, kernels = by_xla
    assert matches == ["miss", "approximate"]
    of_layers = ("paged_attention", "norm_residual", "rotate_write")
    programs = {("encode", "attention"), ("link", "link")}
    programs |= {(program, kernel) for program in ("layer", "window") for kernel in of_layers}
    assert kernels == {(*program, "xla", "requested") for program in programs}

    new_tokens, new_matches, new_logits, new_kernels = run(directory, implementation)
    assert (new_tokens, new_matches) == (tokens, matches)
    # The CPU multiplies in float32 what the kernel rounds to bfloat16.
    np.testing.assert_allclose(new_logits, logits, atol=0.03 * np.abs(logits).max(), rtol=0)
    assert new_kernels == {(*program, implementation, "requested") for program in programs}


STAND_INS = """
import jax
from vlcache_jax.pallas_kernels import checks, dispatch
from vlcache_jax.pallas_kernels.attention import mosaic_gpu
from vlcache_jax.pallas_kernels.attention.xla import attention
from vlcache_jax.pallas_kernels.grouped_matmul import mosaic_gpu as mixing
from vlcache_jax.pallas_kernels.link import mosaic_gpu as linking
from vlcache_jax.pallas_kernels.quantized_matmul import mosaic_gpu as quantized
from vlcache_jax.pallas_kernels.rows import mosaic_gpu as rows
from vlcache_jax.pallas_kernels.statistics import mosaic_gpu as observing

def wrong(q, k, v, start, end, *, scale, interpret):
    return attention(q, k, v, start + 1, end, scale=scale)

def fails(*_, **__):
    raise RuntimeError("INTERNAL: no such instruction")

mosaic_gpu.attention, mosaic_gpu.paged_attention, linking.link = wrong, fails, fails
observing.attention_statistics = rows.norm_residual = rows.rotate_write = mixing.mix_experts = fails
quantized.float8_matmul = mixing.mix_float8_experts = fails
dispatch.is_hopper = lambda device: True
checks.CHECKS["attention"] = [check for check in checks.CHECKS["attention"] if check.name == "windows"]
checks.main()
"""


@pytest.mark.thorough
@pytest.mark.slow
def test_xla_answers_where_kernels_are_wrong_on_the_chip(directory, by_xla, tmp_path, monkeypatch, capsys):
    processes = []

    def command(report, limit, kernels):
        processes.append(list(kernels))
        code = f"import os, sys; sys.path[:] = {sys.path!r}; os.environ['JAX_PLATFORMS'] = 'cpu'\n{STAND_INS}"
        return [sys.executable, "-c", code, str(report), str(limit), *kernels]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(selftest, "_known", None)
    monkeypatch.setattr(selftest, "chip_of_jax", lambda: Gpu("NVIDIA H200", "9.0", "580.65.06", ""))
    monkeypatch.setattr(selftest, "command", command)
    monkeypatch.setattr(dispatch, "is_hopper", lambda device: True)
    tokens, matches, logits, kernels = run(directory, None)
    checked = ["attention", "paged_attention", "link", "link_coded", "statistics"]
    checked += ["norm_residual", "rotate_write", "experts", "float8_matmul", "float8_experts"]
    # Each that has failed ends its process. Then their portable forms find a CPU there, no device.
    portable = [PORTABLE[kernel] for kernel in checked if kernel in PORTABLE]
    assert processes == [*(checked[first:] for first in range(len(checked))), portable]
    assert (tokens, matches) == by_xla[:2]
    np.testing.assert_array_equal(logits, by_xla[2])
    whys = {kernel: why for _, kernel, _, why in kernels}
    assert {implementation for _, _, implementation, _ in kernels} == {"xla"}
    # No record is coded, nothing compressed, and there are no experts; a kernel without checks would never run.
    assert set(whys) == set(CHECKS) - {"link_coded", "statistics", "experts", "float8_matmul", "float8_experts"}
    assert re.fullmatch(r"self-test on cpu failed: windows: error must be at most 0\.04, got [\d.]+", whys["attention"])
    assert re.fullmatch(r"self-test on cpu failed: causal, .*: RuntimeError\('INTERNAL: .*", whys["paged_attention"])
    assert re.fullmatch(r"self-test on cpu failed: 5 tokens, .*: RuntimeError\('INTERNAL: no such .*", whys["link"])
    assert "attention runs on XLA; self-test on NVIDIA H200 failed: windows: error must be " in capsys.readouterr().err

    # The next process knows, but for what had no device.
    monkeypatch.setattr(selftest, "_known", None)
    with open_llm(directory):
        assert selftest.result_on("attention").passed is False
    assert processes[len(checked) :] == [portable, portable]


def test_without_a_gpu_no_process_is_started(directory, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process is started"))
    open_llm(directory).close()


def test_on_a_cpu_the_choice_is_xla_and_says_why(checkpoints, capsys):
    image = np.zeros((64, 96, 3), np.uint8)
    with LLM(checkpoints("qwen3_vl"), **SIZES) as llm:
        llm.chat(
            [[{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "what?"}]}]],
            GREEDY,
            use_tqdm=False,
        )
        choices = {choice for choices in llm.kernels.values() for choice in choices}
        llm.warmup()
    assert "attention: xla in" in capsys.readouterr().err
    assert {choice.implementation for choice in choices} == {"xla"}
    assert {choice.why for choice in choices} == {"Pallas kernels need an NVIDIA GPU (Ampere or later), got cpu"}


@dataclasses.dataclass
class Device:
    platform: str = "gpu"
    device_kind: str = "NVIDIA A100"
    compute_capability: str = "8.0"


def test_an_implementation_that_cannot_run_is_refused_before_weights_are_loaded(directory, monkeypatch):
    with pytest.raises(NotImplementedError, match="implementation='mosaic_gpu' needs a Hopper GPU, got cpu"):
        open_llm(directory, implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match="bfloat16 and float16, got q in float32"):
        open_llm(directory, implementation="mosaic_gpu_interpreted", dtype="float32")
    with pytest.raises(NotImplementedError, match=r"needs an NVIDIA GPU \(Ampere or later\), got cpu"):
        open_llm(directory, implementation="mosaic_gpu_mma")
    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    with pytest.raises(NotImplementedError, match="needs a Hopper GPU, got NVIDIA A100"):
        open_llm(directory, implementation="mosaic_gpu")


@pytest.mark.parametrize("name", ["Qwen3.5-4B-FP8", "Qwen3.6-35B-A3B-FP8"])
def test_layers_with_states_in_8_bits_are_checked(monkeypatch, name):
    """Their products, too, which have other names."""
    config, found = published_config(name), []

    def noted(x, weight, scale, *, implementation):
        found.append(weight.shape)
        return jnp.zeros((len(x), len(weight)), x.dtype)

    monkeypatch.setattr(layers, "float8_matmul", noted)
    check_kernels(config, jnp.bfloat16, "xla")
    linear, width = config.text.linear_attention, config.text.hidden_size
    keys, values = linear.key_heads * linear.key_width, linear.value_heads * linear.value_width
    assert {(2 * keys, width), (2 * values, width), (width, values)} <= set(found)


def test_experts_that_the_kernels_do_not_do_are_refused():
    config = published_config("Qwen3-VL-30B-A3B")
    odd = dataclasses.replace(config.text.experts, intermediate_size=760)
    config = dataclasses.replace(config, text=dataclasses.replace(config.text, experts=odd))
    check_kernels(config, jnp.bfloat16, "xla")
    with pytest.raises(NotImplementedError, match="multiples of 64, got 2048 and 760"):
        check_kernels(config, jnp.bfloat16, "mosaic_gpu_interpreted")
