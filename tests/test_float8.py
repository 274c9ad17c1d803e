"""Engines of models whose matrices stay in 8 bits: what they answer, what they keep, and what they need."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.helper import FEW, SIZES, user
from tests.models import float8
from vlcache_jax import LLM, CacheConfig, SamplingParams
from vlcache_jax.convert import convert
from vlcache_jax.device.checkpoint import open_checkpoint
from vlcache_jax.device.memory_plan import activation_bytes, dequantized_bytes, weight_bytes
from vlcache_jax.reuse.policies import Scheduled
from vlcache_jax.reuse.schedule import Schedule

PARAMS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A checkpoint in 8 bits, its conversion, and the model that both stand for."""
    root = tmp_path_factory.mktemp("float8")
    source = float8.make(root / "source", dtype="bfloat16")
    convert(source, root / "converted")
    return source, root / "converted", float8.twin(source, root / "twin")


def ask(llm, *parts, **options):
    [output] = llm.chat([user(*parts)], PARAMS, use_tqdm=False, **options)
    own = output.outputs[0]
    chosen = [choice.logprob for step in own.logprobs for choice in step.values()]
    return own.token_ids, np.array(chosen), output.cache.images[0]


@pytest.fixture
def picture(textured_image):
    return textured_image(64, 64, 1)


def answers_of(directory, disk, *questions):
    """Answers of an engine with records in a folder; questions are texts before the picture, and how it is reused."""
    with LLM(directory, cache=CacheConfig(disk=disk), use_tqdm=False, **SIZES | {"buckets": FEW}) as llm:
        found = [ask(llm, *parts, **options) for *parts, options in questions]
        llm.cache.flush()
    return found


def assert_alike(found, expected):
    for (tokens, chosen, _), (same, others, _) in zip(found, expected, strict=True):
        assert tokens == same
        np.testing.assert_allclose(chosen, others, atol=2e-5)


@pytest.mark.slow
def test_a_model_in_8_bits_answers_and_its_conversion_finds_what_it_kept(made, picture, tmp_path):
    source, converted, _ = made
    first = answers_of(source, tmp_path, ("See ", picture, {}))
    again = answers_of(converted, tmp_path, ("See ", picture, {}))
    assert [image.match for _, _, image in (*first, *again)] == ["miss", "exact"]
    assert first[0][2].key == again[0][2].key
    assert_alike(again, first)


@pytest.mark.slow
def test_answers_are_those_of_what_8_bits_stand_for(made, picture, tmp_path):
    """And so are reused ones; the other model finds none of the records."""
    source, _, twin = made
    questions = ("See ", picture, {}), ("See ", picture, {}), ("So", picture, {"reuse": 0.3})
    found, expected = (answers_of(directory, tmp_path, *questions) for directory in (source, twin))
    for own in (found, expected):
        assert [image.match for _, _, image in own] == ["miss", "exact", "approximate"]
    assert found[0][2].key != expected[0][2].key
    assert_alike(found, expected)


@pytest.mark.slow
def test_layers_with_and_without_matrices_in_8_bits_answer_together(made, picture, tmp_path):
    """As the model that they stand for; kinds of layers have programs of their own, and memory is planned for each."""
    names = [f"model.language_model.layers.1.{name}" for name in ("mlp.down_proj", "self_attn.q_proj")]
    source = float8.left_out(made[0], tmp_path / "source", names)
    twin = float8.twin(source, tmp_path / "twin")
    questions = ("See ", picture, {}), ("See ", picture, {}), ("So", picture, {"reuse": 0.3})
    found, expected = (answers_of(directory, tmp_path / "disk", *questions) for directory in (source, twin))
    assert [image.match for _, _, image in found] == ["miss", "exact", "approximate"]
    assert_alike(found, expected)
    checkpoint = open_checkpoint(source)
    assert [checkpoint.config.text.first_like(i) for i in range(3)] == [0, 1, 0]
    assert weight_bytes(checkpoint.config, checkpoint.dtype) == checkpoint.nbytes() > open_checkpoint(made[0]).nbytes()


def test_a_schedule_of_one_is_none_of_the_other(made):
    source, converted, twin = map(open_checkpoint, made)
    layers = source.config.text.num_layers
    policy = Scheduled(Schedule((250,) * layers, "qwen3_vl", source.source_digest))
    assert converted.policy_of(policy) is policy
    with pytest.raises(ValueError, match="allow_other_model"):
        twin.policy_of(policy)


def test_what_is_kept_of_a_layer_is_planned(made):
    """Programs hold no more than the plan has for them, and weights take what it says."""
    with LLM(made[0], use_tqdm=False, **SIZES | {"buckets": FEW}) as llm:
        ask(llm, "Hello", np.zeros((64, 64, 3), np.uint8))
        runner, checkpoint = llm.service.device.runner, llm.service.checkpoint
        config, buckets = runner.config, runner.buckets
        planned = dequantized_bytes(config, True)
        assert planned == 3 * 4 * 2 * 100 * 80  # gate and up
        weights = runner.text, runner.head_weights, runner._visual
        held = sum(leaf.nbytes for leaf in {id(x): x for tree in weights for x in jax.tree.leaves(tree)}.values())
        assert held == weight_bytes(config, checkpoint.dtype) == checkpoint.nbytes()
        most = activation_bytes(config, runner.shapes.kv, buckets) + planned
        layer = next(program for program in runner.programs.kernels if program.name == "layer")
        temp = layer.lowered(runner.shapes).compile().memory_analysis().temp_size_in_bytes
        assert 0 < temp < most
