"""The analysis of errors against definitions, and its commands."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from typer.testing import CliRunner

from vlcache_jax import LLM, SamplingParams
from vlcache_jax.commands.cli import app
from vlcache_jax.reuse.schedule import Schedule
from vlcache_jax.study.accuracy import user_turn
from vlcache_jax.study.analysis import (
    answer_attention,
    attention_error,
    decompose,
    deviation,
    first_token_rank,
    key_distance,
    recompute,
)
from vlcache_jax.study.probe import Probe
from vlcache_jax.study.search import Scores
from vlcache_jax.study.sensitivity import Case, prepare, squared_error


@pytest.fixture(scope="module")
def llm(checkpoints):
    with LLM(checkpoints("qwen3_vl-tied"), max_model_len=512, kv_cache_bytes=8 << 20) as engine:
        yield engine


@pytest.fixture(scope="module")
def probe(llm):
    return Probe(llm)


@pytest.fixture(scope="module")
def runs(probe, textured_image):
    images = [textured_image(150, 120), textured_image(90, 200)]
    turn = lambda text, other: [{"role": "user", "content": user_turn(images, text, "text_first", other)}]  # noqa: E731
    case = Case(turn("How many?", "Look here:"), [turn("Please describe this image.", "It was dark.")], (5, 77, 30, 8))
    return prepare(probe, case)


def test_errors_of_attention_outputs(probe, runs):
    errors = {level: attention_error(runs.placed, runs.cold, recompute(probe, runs, level)) for level in (0, 250, 500)}
    assert errors[0].shape == (probe.num_layers, 4)
    last = runs.placed.prompt_length - 1
    difference = np.asarray(runs.cold.attended[1, last]) - np.asarray(runs.overridden.attended[1, last])
    assert errors[0][1, 0] == pytest.approx(np.sqrt((difference.astype(np.float64) ** 2).sum()), rel=1e-5)
    assert errors[0][1:].min() > 1e-4
    assert errors[0][0].max() < 1e-5  # the first layer knows no context
    assert errors[500].max() < 1e-5
    assert errors[250].mean() < errors[0].mean()
    assert not np.allclose(recompute(probe, runs, 250, last=True).logits, recompute(probe, runs, 250).logits)


def test_the_error_is_taken_apart(probe, runs):
    image = np.flatnonzero(runs.placed.is_image)
    parts = decompose(probe, runs, tokens=5)
    assert parts.num_image_tokens == len(image)
    assert parts.total == pytest.approx(squared_error(runs.overridden.logits, runs.cold.logits), rel=1e-4)
    assert parts.until.error[-1] == parts.total
    assert parts.behind.error[-1] == parts.layer.error[-1] > 0
    assert parts.until.error[0] == parts.layer.error[0] < 1e-9 * parts.total  # P4
    assert len(parts.place) == len(parts.token.error) == 5
    assert (parts.place[0], parts.place[-1]) == (0, runs.placed.images[-1].length - 1)
    write = np.ones((probe.num_layers, len(runs.placed.layout)), bool)
    write[:, image[-1]] = False
    assert parts.token.error[-1] == squared_error(probe.run(runs.placed, write, runs.donor).logits, runs.cold.logits)
    differs = runs.overridden.logits.argmax(-1) != runs.cold.logits.argmax(-1)
    assert parts.behind.changed[0] == parts.until.changed[-1] == differs.any()
    assert not parts.until.changed[0]


def test_where_the_answer_looks(probe, runs):
    scaled, raw = answer_attention(probe, runs.placed, runs.cold)
    heads = probe.config.text.num_heads
    for span, weights, unscaled in zip(runs.placed.images, scaled, raw, strict=True):
        assert weights.shape == unscaled.shape == (probe.num_layers, heads, span.length)
        np.testing.assert_allclose(weights.sum(-1), 1)
        # Raw scores are the scaled ones times the root of the width.
        power = weights**probe.config.text.head_dim**0.5
        np.testing.assert_allclose(unscaled, power / power.sum(-1, keepdims=True), atol=1e-6)
        assert key_distance(runs, span).shape == (probe.num_layers, span.length)
        assert key_distance(runs, span)[0].max() < 1e-4 < key_distance(runs, span)[1:].min()
    assert first_token_rank(np.array([[[0.5, 0.1, 0.6, 0.2]]])) == pytest.approx(2 / 3)


def test_deviation_and_what_all_tokens_of_an_image_share(runs):
    found = deviation(runs)
    assert max(found.k[0], found.v[0]) < 1e-9 < min(found.k[1:].min(), found.v[1:].min())
    for share in (found.mean_k[1:], found.mean_v[1:]):
        assert (share > 0).all()
        assert (share < 1).all()
    k, v = runs.cold.values
    one, other = runs.placed.images
    donor = k.at[:, one.tokens].add(0.5).at[:, other.tokens].add(-2.0), v * 3
    moved = deviation(dataclasses.replace(runs, donor=donor))
    np.testing.assert_allclose(moved.mean_k, 1, rtol=1e-5)
    np.testing.assert_allclose(moved.v, 4, rtol=1e-5)
    added = (0.25 * one.length + 4 * other.length) * k.shape[2] * k.shape[3]
    images = np.flatnonzero(runs.placed.is_image)
    np.testing.assert_allclose(moved.k, added / np.square(np.asarray(k[:, images])).sum((1, 2, 3)), rtol=1e-5)


def test_images_that_were_cached_apart(llm, probe, textured_image):
    images = [textured_image(150, 120), textured_image(90, 200)]
    turn = lambda shown, other: [{"role": "user", "content": user_turn(shown, "What?", "text_first", other)}]  # noqa: E731
    case = Case(turn(images, "Here:"), [turn(images[:1], "One."), turn(images[1:], "The other one.")], (5, 77, 30))
    llm.chat(case.donors, SamplingParams(max_tokens=1), use_tqdm=False)
    [score] = llm.score([case.formal], [case.answer], reuse="full", keep_logits=True, use_tqdm=False)
    np.testing.assert_allclose(prepare(probe, case).overridden.logits, score.logits, atol=1e-4)


@pytest.mark.parametrize("command", ["errors", "attention"])
def test_commands(checkpoints, questions_tsv, tmp_path, command):
    out = tmp_path / "figures" / f"{command}.png"
    arguments = ["analyze", command, "--out", str(out), str(checkpoints("qwen3_vl-tied")), "--data", str(questions_tsv)]
    result = CliRunner().invoke(app, [*arguments, "--samples", "2"])
    assert result.exit_code == 0, result.output
    assert out.stat().st_size > 1000
    report = json.loads(out.with_suffix(".json").read_text())
    assert (report["arrangement"], report["donors"], report["samples"]) == ("text_first", "together", 2)
    if command == "errors":
        curves = report["error of attention outputs, by answer token"]
        assert list(curves) == [
            "r = 0", "r = 0.1, first tokens", "r = 0.1, last tokens", "r = 0.3, first tokens", "r = 0.3, last tokens",
        ]  # fmt: skip
        assert all(np.isfinite(curve).all() and max(curve) > 0 for curve in curves.values())
        assert len(report["single tokens"]) == 2
        shares = report["share of answers that change, by layer"]
        assert len(report["deviation of K, V, and the part that all tokens of an image share, by layer"]["K"]) == 3
        assert shares["reused in a layer and all before"][-1] == shares["reused in a layer and all behind"][0]
    else:
        assert report["images"] == 2
        for curve in report["attention on the first tokens, by layer and share of the image"]["scaled"]:
            assert curve[0] == 0
            assert curve[-1] == pytest.approx(1)
    kept = Schedule((5, 5, 5), "qwen3_vl", "f")
    kept.save(out.with_name("kept.json"))
    for name, message in (("a", "out must end in .png"), ("kept.png", "out must have another name")):
        wrong = CliRunner().invoke(app, ["analyze", command, "--out", str(out.with_name(name)), *arguments[4:]])
        assert wrong.stderr.startswith(f"error: {message}")
    assert Schedule.load(out.with_name("kept.json")) == kept
    refused = CliRunner().invoke(app, [*arguments, "--arrangement", "image_first"])
    assert refused.exit_code == 1
    assert "arrangement must be text_first or question_first" in refused.stderr


def test_sensitivity_is_drawn(tmp_path):
    values = np.tile(np.linspace(2, 1, 151), (4, 1))
    Scores(values, "qwen3_vl", "f", 3).save(tmp_path / "scores.npz")
    out = tmp_path / "sensitivity.png"
    result = CliRunner().invoke(app, ["analyze", "sensitivity", str(tmp_path / "scores.npz"), "--out", str(out)])
    assert result.exit_code == 0, result.output
    report = json.loads(out.with_suffix(".json").read_text())
    assert report["full reuse"] == 2
    np.testing.assert_allclose(report["r = 0.1"], values[:, 50])
    assert out.stat().st_size > 1000
