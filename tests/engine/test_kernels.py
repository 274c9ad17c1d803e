"""The engine on each implementation of the kernels."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from vlcache_jax import LLM, Ladder, SamplingParams
from vlcache_jax.testing import make_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A model with heads of 64 in its text, and of 72 in its vision tower."""
    return make_checkpoint(
        tmp_path_factory.mktemp("checkpoint") / "model",
        model_type="qwen3_vl",
        seed=7,
        text={
            "hidden_size": 128,
            "num_hidden_layers": 3,
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
        ladder=Ladder(rows=(8, 64), patches=(64,), sequences=(1, 2)),
        max_rows=64,
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
        answers = [llm.chat([c], GREEDY, reuse=0.2, use_tqdm=False)[0] for c in (first, second)]
        score = llm.score([second], ["the quick"], reuse=0.2, keep_logits=True, use_tqdm=False)[0]
        return (
            [answer.outputs[0].token_ids for answer in answers],
            [answer.cache.images[0].match for answer in answers],
            score.logits,
            {
                (key[0], choice.kernel, choice.implementation, choice.why)
                for key, choices in llm.kernels.items()
                for choice in choices
            },
        )


def test_the_interpreted_kernels_answer_as_xla_does(directory):
    tokens, matches, logits, kernels = run(directory, "xla")
    assert matches == ["miss", "approximate"]
    programs = {("encode", "attention"), ("layer", "attention"), ("decode", "attention"), ("link", "link")}
    assert kernels == {(*program, "xla", "asked for") for program in programs}

    new_tokens, new_matches, new_logits, new_kernels = run(directory, "mosaic_gpu_interpreted")
    assert (new_tokens, new_matches) == (tokens, matches)
    # The CPU multiplies in float32 what the kernel rounds to bfloat16.
    np.testing.assert_allclose(new_logits, logits, atol=0.03 * np.abs(logits).max(), rtol=0)
    assert new_kernels == {(*program, "mosaic_gpu_interpreted", "asked for") for program in programs}


def test_on_a_cpu_the_choice_is_xla_and_says_why(directory, capsys):
    image = np.zeros((64, 96, 3), np.uint8)
    with open_llm(directory) as llm:
        llm.chat(
            [[{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "what?"}]}]],
            GREEDY,
            use_tqdm=False,
        )
        choices = {choice for choices in llm.kernels.values() for choice in choices}
        llm.warmup()
    assert "attention: xla in" in capsys.readouterr().err
    assert {(choice.implementation, choice.why) for choice in choices} == {("xla", "no Hopper GPU, but cpu")}


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
    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    with pytest.raises(NotImplementedError, match="needs a Hopper GPU, got NVIDIA A100"):
        open_llm(directory, implementation="mosaic_gpu")
