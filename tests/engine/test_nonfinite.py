"""What is not finite reaches those that see it, and no record."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.helper import SIZES, damage_first_forward_pass
from vlcache_jax import LLM, SamplingParams
from vlcache_jax.cache.lookups import CacheStats
from vlcache_jax.pallas_kernels import PAGE

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def ask(llm, *questions, **options):
    rows = [
        [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]}]
        for image, text in questions
    ]
    return llm.chat(rows, GREEDY, use_tqdm=False, on_error="return", **options)


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def picture(textured_image):
    return textured_image(64, 96)


@pytest.fixture(scope="module")
def engine(checkpoints):
    with LLM(checkpoints("qwen3_vl"), **SIZES) as llm:
        yield llm


@pytest.fixture
def llm(engine):
    """An engine whose cache is empty, and has counted nothing."""
    engine.reset_mm_cache()
    engine.service.cache.store._counts = CacheStats()
    return engine


def once(monkeypatch, runner, name, damage):
    """Lets the first result of a method of the runner be damaged."""
    method, calls = getattr(runner, name), itertools.count()
    monkeypatch.setattr(runner, name, lambda *args: damage(method(*args)) if next(calls) == 0 else method(*args))


def damage_saved_kv(forward_pass):
    k, v = forward_pass.new_kv[1]
    forward_pass.new_kv[1] = k, v.at[:, 0, 3].set(np.inf)


def test_keys_and_values_that_are_not_finite_are_not_kept(llm, picture, monkeypatch):
    cold = tokens(ask(llm, (picture, "what?"), reuse="off"))
    damage_first_forward_pass(monkeypatch, damage_saved_kv)
    reports = []
    for _ in range(3):
        outputs = ask(llm, (picture, "what?"))
        assert tokens(outputs) == cold
        llm.cache.flush()
        [image] = outputs[0].cache.images
        stats = llm.cache.stats()
        why = image.why and image.why.value
        reports.append((image.match, why, image.encoder, stats.not_finite, stats.kv_records, stats.encoder_records))
    assert reports == [
        ("miss", "unknown_image", "computed", 1, 0, 1),
        ("miss", "not_finite", "host", 1, 1, 1),
        ("exact", None, "none", 1, 1, 1),
    ]
    assert llm.cache.stats().failed == 0


def test_who_waits_for_what_is_not_finite_computes(llm, picture, monkeypatch):
    questions = (picture, "what?"), (picture, "where?")
    cold = tokens(ask(llm, *questions, reuse="off"))
    damage_first_forward_pass(monkeypatch, damage_saved_kv)
    outputs = ask(llm, *questions)
    first, second = outputs
    assert first.metrics.wave == second.metrics.wave  # they ran together
    assert tokens(outputs) == cold
    assert [output.cache.images[0].match for output in outputs] == ["miss", "miss"]
    llm.cache.flush()
    assert llm.cache.stats().not_finite == 1


def test_encoder_rows_that_are_not_finite_are_not_kept(llm, picture, monkeypatch):
    cold = tokens(ask(llm, (picture, "what?"), reuse="off"))
    once(monkeypatch, llm.service.device.runner, "encode", lambda rows: rows.at[0, 2].set(np.nan))
    [output] = ask(llm, (picture, "what?"))
    assert output.error.startswith("conversations[0]: logits must be finite")
    llm.cache.flush()
    stats = llm.cache.stats()
    assert (stats.not_finite, stats.failed, stats.bytes) == (2, 0, 0)  # encoder rows, and K and V
    assert tokens(ask(llm, (picture, "what?"))) == cold


def test_damaged_weights_leave_values_finite_and_no_record(llm, picture, monkeypatch):
    projection = llm.service.device.runner.text["layers"][1]["self_attn"]["qkv_proj"]
    monkeypatch.setitem(projection, "kernel", projection["kernel"].at[3, 0, -1, 5].set(np.inf))
    [output] = ask(llm, (picture, "what?"))
    assert output.error.startswith("conversations[0]: logits must be finite")
    llm.cache.flush()
    stats = llm.cache.stats()
    assert (stats.not_finite, stats.failed, stats.bytes) == (1, 1, 0)  # the encoder rows go with their request
    used = slice(PAGE, PAGE + len(output.prompt_token_ids))
    for number, (k, v) in enumerate(llm.service.device.runner.pool.arrays):
        assert np.isfinite(v).all()
        flawed = np.isnan(k[used]).any(-1).all(0)
        assert flawed.tolist() == [number > 0, number > 1]  # of the heads


@pytest.mark.parametrize(("slots", "message"), [([4, 9, 4], "got 4 more than once"), ([0, -2], "got -2")])
def test_no_slot_is_linked_twice(llm, slots, message):
    runner = llm.service.device.runner
    group, size = runner.shapes.link_groups[0], runner.token_buckets[0]
    data = np.ones((group.count, 2, size, 2, runner.config.text.head_dim), np.float32)
    with pytest.raises(ValueError, match=f"slot must .*{message}"):
        runner.places([np.array(slots)], [np.zeros((3, len(slots)), np.int32)], size)
    places = runner.places([np.array([4, 9])], [np.zeros((3, 2), np.int32)], size)
    llm.service.engine._prefiller.copies.link(group, [runner.put([data])], places, None)
    assert {(runner.pool.arrays[0][1][slot] == 1).all().item() for slot in (4, 9)} == {True}
