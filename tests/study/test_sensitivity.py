"""The probe against the engine, and the fast sensitivities against the definition."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helper import SIZES
from vlcache_jax import LLM, SamplingParams
from vlcache_jax.study.probe import Probe
from vlcache_jax.study.questions import user_turn
from vlcache_jax.study.sensitivity import ProfileCase, Profiler, direct, prepare, profile

pytestmark = [
    pytest.mark.slow_for("qwen2_5_vl"),  # in short, one family
    # Layers of these say how much of an image is computed again clearly enough.
    pytest.mark.parametrize(
        "family_checkpoint", ["qwen2_5_vl-flat-tied", "qwen3_vl-tied"], indirect=True, scope="session"
    ),
]


@pytest.fixture(scope="module")
def llm(family_checkpoint):
    with LLM(family_checkpoint, **SIZES) as engine:
        yield engine


@pytest.fixture(scope="module")
def case(llm, textured_image):
    images = [textured_image(150, 120), textured_image(90, 200)]
    turn = lambda text, other: [{"role": "user", "content": user_turn(images, text, "text_first", other)}]  # noqa: E731
    formal = turn("How many?", "Look here:")
    [output] = llm.chat(
        formal, SamplingParams(max_tokens=5, temperature=0, ignore_eos=True), reuse="off", use_tqdm=False
    )
    return ProfileCase(
        formal, [turn("Please describe this image.", "It was a dark night.")], output.outputs[0].token_ids
    )


@pytest.mark.slow
@pytest.mark.thorough_for("qwen2_5_vl-flat-tied")
def test_the_probe_runs_as_the_engine_does(llm, case):
    probe = Probe(llm)
    runs = prepare(probe, case)
    llm.reset_mm_cache()
    [cold] = llm.score(case.formal, [case.answer], reuse="off", keep_logits=True, use_tqdm=False)
    scale = np.abs(cold.logits).max()
    np.testing.assert_allclose(runs.cold.logits, cold.logits, atol=2e-5 * scale)
    llm.chat(case.donors, SamplingParams(max_tokens=1), use_tqdm=False)
    [full] = llm.score(case.formal, [case.answer], reuse="full", keep_logits=True, use_tqdm=False)
    assert {image.match for image in full.cache.images} == {"approximate"}
    np.testing.assert_allclose(runs.overridden.logits, full.logits, atol=2e-5 * scale)
    assert np.abs(full.logits - cold.logits).max() > 1e-3 * scale
    [third] = llm.score(case.formal, [case.answer], reuse="0.3", keep_logits=True, use_tqdm=False)
    write = probe.text_only(runs.placed) | probe.first_tokens(runs.placed, lambda tokens: 3 * tokens // 10)
    np.testing.assert_allclose(probe.run(runs.placed, write, runs.donor).logits, third.logits, atol=2e-5 * scale)


@pytest.mark.thorough_for("qwen2_5_vl-flat-tied")
@pytest.mark.slow
def test_fast_is_direct(llm, case):
    profiler = Profiler(llm)
    runs = prepare(profiler.probe, case)
    scores = profiler.scores(runs)
    layers = profiler.probe.num_layers
    assert scores.shape == (layers, 151)
    levels = [0, 60, 100, 150]
    expected = np.array([[direct(profiler.probe, runs, layer, level) for level in levels] for layer in range(layers)])
    np.testing.assert_allclose(expected[0], expected[0, 0], rtol=1e-4)  # layer 0 does not depend on context (P4)
    np.testing.assert_allclose(expected[:, 0], expected[0, 0], rtol=1e-6)  # nothing recomputed is the same everywhere
    np.testing.assert_allclose(scores[:, levels], expected, rtol=1e-3)
    assert np.abs(np.diff(expected[1:]) / expected[0, 0]).min() > 0.01  # levels can be told apart


@pytest.mark.slow
def test_a_profile_goes_on_where_it_stopped(llm, case, tmp_path):
    other = ProfileCase(case.donors[0], [case.formal], case.answer[:2])
    whole = profile(llm, [case, other], max_level=40)
    work = tmp_path / "work.jsonl"
    profile(llm, [case], max_level=40, work=work)
    with open(work, "a", encoding="utf-8") as file:
        file.write('{"model": ')
    seen: list[int] = []
    again = profile(llm, [case, other], max_level=40, work=work, progress=seen.append)
    np.testing.assert_array_equal(again.values, whole.values)
    assert (again.samples, again.fingerprint, seen) == (2, llm.service.checkpoint.source_digest, [1, 2])
    # The same answer behind another prompt is another case.
    twin = ProfileCase(other.formal, other.donors, case.answer)
    np.testing.assert_array_equal(
        profile(llm, [twin], max_level=40, work=work).values, profile(llm, [twin], max_level=40).values
    )


@pytest.mark.slow
def test_what_is_refused(llm, case):
    with pytest.raises(ValueError, match="cases must not be empty"):
        profile(llm, [])
    plain = [{"role": "user", "content": "Hello"}]
    with pytest.raises(ValueError, match="at least one image"):
        profile(llm, [ProfileCase(plain, [plain], (1, 2))])
    with pytest.raises(ValueError, match="donors must have the same images as the target"):
        profile(llm, [ProfileCase(case.formal, [plain], case.answer)])
    with pytest.raises(ValueError, match="max_level must be"):
        Profiler(llm, 501)
