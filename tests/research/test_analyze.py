"""The analysis of errors against definitions, and its commands."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib

import numpy as np
import pytest
from typer.testing import CliRunner

import vlcache_jax.llm
from research import analyze
from research.reuse_effects import (
    answer_attention,
    answer_scores,
    attention_error,
    attention_map,
    decompose,
    deviation,
    distant_layers,
    first_token_rank,
    key_distance,
    recompute,
)
from tests.helper import SIZES
from vlcache_jax import LLM, SamplingParams
from vlcache_jax.commands.schedule import profile_samples
from vlcache_jax.reuse.schedule import Schedule
from vlcache_jax.study.accuracy import Protocol
from vlcache_jax.study.probe import Probe
from vlcache_jax.study.questions import user_turn
from vlcache_jax.study.search import LayerScores
from vlcache_jax.study.sensitivity import ProfileCase, cases_of, prepare, squared_error


@pytest.fixture(scope="module")
def llm(checkpoints):
    with LLM(checkpoints("qwen3_vl"), **SIZES) as engine:
        yield engine


@pytest.fixture(scope="module")
def probe(llm):
    return Probe(llm)


@pytest.fixture(scope="module")
def runs(probe, textured_image):
    images = [textured_image(150, 120), textured_image(90, 200)]
    turn = lambda text, other: [{"role": "user", "content": user_turn(images, text, "text_first", other)}]  # noqa: E731
    case = ProfileCase(
        turn("How many?", "Look here:"), [turn("Please describe this image.", "It was dark.")], (5, 77, 30, 8)
    )
    return prepare(probe, case)


@pytest.mark.slow
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


def looked(probe, runs):
    """Where the answer looks."""
    scores = answer_scores(probe, runs.placed, runs.cold)
    return answer_attention(scores, runs.placed.images, probe.config.text.head_dim)


def test_where_the_answer_looks(probe, runs):
    scaled, raw = looked(probe, runs)
    heads = probe.config.text.num_heads
    for span, weights, unscaled in zip(runs.placed.images, scaled, raw, strict=True):
        assert weights.shape == unscaled.shape == (probe.num_layers, heads, span.length)
        np.testing.assert_allclose(weights.sum(-1), 1)
        # Raw scores are the scaled ones times the root of the width.
        power = weights**probe.config.text.head_dim**0.5
        np.testing.assert_allclose(unscaled, power / power.sum(-1, keepdims=True), atol=1e-6)
        assert key_distance(runs, span).shape == (probe.num_layers, span.length)
        assert key_distance(runs, span)[0].max() < 1e-4 < key_distance(runs, span)[1:].min()


def test_the_rank_of_an_images_first_token_is_among_all_tokens(probe, runs):
    """By the definition of MPIC's figure 12: the softmax over all tokens, head by head."""
    scores, n = answer_scores(probe, runs.placed, runs.cold), runs.placed.prompt_length
    assert scores.shape == (probe.num_layers, probe.config.text.num_heads, n)
    for span in runs.placed.images:
        ranks = first_token_rank(scores, span.start)
        for layer in range(probe.num_layers):
            q, k, _, _ = (np.asarray(one, np.float64) for one in probe.project(runs.placed, runs.cold, layer))
            for head in range(q.shape[1]):
                raw = np.exp(k[:n, head * k.shape[1] // q.shape[1]] @ q[n - 1, head] / q.shape[2] ** 0.5)
                attention = raw / raw.sum()
                less = sum(attention[j] < attention[span.start] for j in range(n) if j != span.start)
                assert ranks[layer, head] == pytest.approx(100 * less / (n - 1))
    assert first_token_rank(np.array([[[3.0, 1.0, 2.0, 0.5, 2.0]]]), 2) == pytest.approx(50)
    assert first_token_rank(np.array([[[3.0, 1.0]]]), 0) == pytest.approx(100)


def test_tokens_whose_keys_differ_most():
    distances = np.zeros((4, 48))
    distances[0] = np.arange(48)  # the first layer does not count
    distances[1:, 0], distances[1:, 1] = 9, 8  # 50 of 1176 are 2 of 48
    distances[3, 7] = 10
    assert np.flatnonzero(distant_layers(distances)).tolist() == [0, 1, 7]
    assert distant_layers(distances)[[0, 1, 7]].tolist() == [3, 2, 1]
    assert distant_layers(np.eye(3)[:, :2]).sum() == 2  # at least one token a layer


def test_what_rows_look_at_in_the_first_layer(probe, runs):
    """By the definition of MPIC's figure 11: in each head negative scores as 0, min-max scaled, and then the mean."""
    found = attention_map(probe, runs.placed, runs.cold)
    size = len(runs.placed.layout)
    q, k, _, _ = (np.asarray(one, np.float64) for one in probe.project(runs.placed, runs.cold, 0))
    heads, seen = q.shape[1], np.tril_indices(size)
    expected, together = np.zeros((size, size)), np.zeros((size, size))
    for head in range(heads):
        scores = q[:size, head] @ k[:size, head * k.shape[1] // heads].T / q.shape[2] ** 0.5
        together += scores / heads
        own = [max(scores[i, j], 0) for i, j in zip(*seen, strict=True)]
        expected[seen] += (np.array(own) - min(own)) / (max(own) - min(own)) / heads
    np.testing.assert_allclose(found, expected, atol=1e-9)
    assert 0 <= found.min() < found.max() <= 1
    # The mean before the rest, which is another order, is another map.
    other = np.maximum(np.tril(together), 0)
    assert np.abs(found - other / other.max()).max() > 0.1


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


@pytest.mark.slow
def test_images_that_were_cached_apart(llm, probe, textured_image):
    images = [textured_image(150, 120), textured_image(90, 200)]
    turn = lambda shown, other: [{"role": "user", "content": user_turn(shown, "What?", "text_first", other)}]  # noqa: E731
    case = ProfileCase(
        turn(images, "Here:"), [turn(images[:1], "One."), turn(images[1:], "The other one.")], (5, 77, 30)
    )
    llm.chat(case.donors, SamplingParams(max_tokens=1), use_tqdm=False)
    [score] = llm.score([case.formal], [case.answer], reuse="full", keep_logits=True, use_tqdm=False)
    np.testing.assert_allclose(prepare(probe, case).overridden.logits, score.logits, atol=1e-4)


@pytest.fixture
def drawn(monkeypatch):
    """The lines of each panel that a command draws, by label; filled when it ends. It opens the tests' own engine."""
    monkeypatch.setattr(vlcache_jax.llm, "LLM", functools.partial(LLM, **SIZES))
    panels = []
    save = analyze._save

    def keep(figure, *rest):
        panels.extend({line.get_label(): line.get_ydata() for line in axis.lines} for axis in figure.axes)
        save(figure, *rest)

    monkeypatch.setattr(analyze, "_save", keep)
    return panels


def run(command, out, *arguments):
    result = CliRunner().invoke(analyze.app, [command, "--out", str(out), *map(str, arguments)])
    assert result.exit_code == 0, result.output
    assert out.read_bytes().startswith(b"\x89PNG")
    return json.loads(out.with_suffix(".json").read_text())


def assert_falling(curves):
    mean = {name: np.mean(curve) for name, curve in curves.items()}
    for end in ("first", "last"):
        assert mean["r = 0"] > mean[f"r = 0.1, {end} tokens"] > mean[f"r = 0.3, {end} tokens"]


@pytest.fixture
def of_cases(llm, probe, questions_tsv):
    """The runs of the questions that the commands below are about."""
    chosen = profile_samples([questions_tsv], 2)
    cases = cases_of(llm, chosen, Protocol("text_first", "neutral", "together"), max_tokens=32)
    return [prepare(probe, case) for case in cases]


@pytest.mark.slow
def test_the_errors_command(checkpoints, questions_tsv, tmp_path, probe, of_cases, drawn):
    arguments = checkpoints("qwen3_vl"), "--data", questions_tsv, "--samples", 2, "--tokens", 4
    report = run("errors", tmp_path / "figures" / "errors.png", *arguments)
    assert (report["arrangement"], report["donors"], report["samples"]) == ("text_first", "together", 2)
    curves = report["error of attention outputs, by answer token"]
    ways = {"r = 0": (0, False)}
    for level, ratio in ((50, 0.1), (150, 0.3)):
        ways |= {f"r = {ratio}, {'last' if last else 'first'} tokens": (level, last) for last in (False, True)}
    assert list(curves) == list(ways)
    layered = report["error of attention outputs, by layer and answer token"]
    growth = report["error in the second half of the answer, over that in the first"]
    for name, (level, last) in ways.items():
        errors = [
            attention_error(runs.placed, runs.cold, recompute(probe, runs, level, last=last)) for runs in of_cases
        ]
        np.testing.assert_allclose(layered[name], np.mean(errors, axis=0), rtol=1e-4, atol=1e-9)
        np.testing.assert_allclose(curves[name], np.mean(errors, axis=(0, 1)), rtol=1e-4)
        half = len(curves[name]) // 2
        np.testing.assert_allclose(growth[name], np.mean(curves[name][half:]) / np.mean(curves[name][:half]), rtol=1e-3)
        np.testing.assert_array_equal(drawn[0][name], curves[name])
    assert_falling(curves)
    parts = [decompose(probe, runs, tokens=4) for runs in of_cases]
    by_layer = report["error of the logits, by layer"]
    for name, effect in (
        ("reused in one layer only", "layer"),
        ("reused in a layer and all before", "until"),
        ("reused in a layer and all behind", "behind"),
    ):
        found = [getattr(part, effect) for part in parts]
        np.testing.assert_allclose(by_layer[name], np.mean([e.error for e in found], axis=0), rtol=1e-3, atol=1e-9)
        np.testing.assert_array_equal(drawn[1][name], by_layer[name])
        shares = report["share of answers that change, by layer"][name]
        np.testing.assert_array_equal(shares, np.mean([e.changed for e in found], axis=0))
    for single, part in zip(report["single tokens"], parts, strict=True):
        assert single["place"] == part.place.tolist()
        np.testing.assert_allclose(single["error"], part.token.error, rtol=1e-3)
    far = report["deviation of K, V, and the part that all tokens of an image share, by layer"]
    np.testing.assert_allclose(
        far["K"], np.mean([deviation(runs).k for runs in of_cases], axis=0), rtol=1e-3, atol=1e-9
    )
    np.testing.assert_array_equal(drawn[3]["K"], far["K"][1:])
    np.testing.assert_array_equal(drawn[4]["layer 1"], layered["r = 0"][1])


@pytest.mark.slow
def test_the_attention_command(checkpoints, questions_tsv, tmp_path, probe, of_cases, drawn):
    arguments = checkpoints("qwen3_vl"), "--data", questions_tsv, "--samples", 2
    report = run("attention", tmp_path / "attention.png", *arguments)
    assert report["images"] == sum(len(runs.placed.images) for runs in of_cases)
    scaled, raw = ([image for runs in of_cases for image in looked(probe, runs)[i]] for i in range(2))
    ranks = [
        first_token_rank(answer_scores(probe, runs.placed, runs.cold), span.start)
        for runs in of_cases
        for span in runs.placed.images
    ]
    for name, found in (
        ("percentile rank of an image's first token among all tokens, mean over heads by layer", np.mean(ranks, 2)),
        ("its standard deviation over heads", np.std(ranks, 2)),
    ):
        np.testing.assert_allclose(report[name], found.mean(0), atol=1e-4)
    along = report["attention on the first tokens, by layer and share of the image"]
    for name, found in (("scaled", scaled), ("raw", raw)):
        # The 12 tokens of an image end at whole twelfths of it: here at a quarter, a half, three quarters and all.
        expected = np.mean([np.cumsum(image.mean(1), axis=1)[:, [2, 5, 8, 11]] for image in found], axis=0)
        np.testing.assert_allclose(np.array(along[name])[:, [25, 50, 75, 100]], expected, rtol=1e-4)
        assert {curve[0] for curve in along[name]} == {0}
    for layer, curve in enumerate(along["scaled"]):
        np.testing.assert_array_equal(drawn[1][f"layer {layer}"], curve)
    distances = [np.cumsum(key_distance(runs, span), axis=1) for runs in of_cases for span in runs.placed.images]
    far = np.mean([distance[1:, [5, 11]] / distance[1:, 11:] for distance in distances], axis=0)
    curves = report["distance of keys on the first tokens, by layer and share of the image"]
    np.testing.assert_allclose(np.array(curves)[1:, [50, 100]], far, rtol=1e-3)
    np.testing.assert_array_equal(drawn[3]["layer 1"], curves[1])
    shares = report["share of tokens with at most this attention, by layer"]["scaled"]
    at = report["attention"]
    for layer, curve in enumerate(shares):
        below = [(image.mean(1)[layer][:, None] <= at).mean(0) for image in scaled]
        np.testing.assert_allclose(curve, np.mean(below, axis=0), atol=0.1)  # a token's weight may lie at a threshold
        assert curve[-1] == 1
    counts = report["layers but the first in which a token's keys are among the farthest, of each image"]
    spans = [(runs, span) for runs in of_cases for span in runs.placed.images]
    assert counts == [distant_layers(key_distance(runs, span)).tolist() for runs, span in spans]
    assert 0 <= report["share of such that are in the first tenth of their image"] <= 1
    seen = report["what rows behind an image see of its tokens in the first layer"]
    assert [len(image) for image in seen] == [span.length for span in of_cases[0].placed.images]


@pytest.mark.parametrize("command", ["errors", "attention"])
def test_what_commands_refuse(checkpoints, questions_tsv, tmp_path, command):
    arguments = [str(checkpoints("qwen3_vl")), "--data", str(questions_tsv)]
    kept = Schedule((5, 5, 5), "qwen3_vl", "f")
    kept.save(tmp_path / "kept.json")
    for name, message in (("a", "out must end in .png"), ("kept.png", "out must not overwrite the schedule")):
        wrong = CliRunner().invoke(analyze.app, [command, "--out", str(tmp_path / name), *arguments])
        assert wrong.stderr.startswith(f"error: {message}")
    assert Schedule.load(tmp_path / "kept.json") == kept
    arguments += ["--out", str(tmp_path / "b.png"), "--context", "same"]
    refused = CliRunner().invoke(analyze.app, [command, *arguments])
    assert refused.exit_code == 1
    assert "context must be one of new-text, new-question" in refused.stderr


def test_sensitivity_is_drawn(tmp_path, drawn):
    values = np.linspace(2, 1, 151) + np.arange(4)[:, None]
    values[:, 0] = 2
    LayerScores(values, "qwen3_vl", "f", 3).save(tmp_path / "scores.npz")
    report = run("sensitivity", tmp_path / "sensitivity.png", tmp_path / "scores.npz")
    assert report["full reuse"] == 2
    for level, name in ((50, "r = 0.1"), (100, "r = 0.2"), (150, "r = 0.3")):
        np.testing.assert_array_equal(report[name], values[:, level])
        np.testing.assert_array_equal(drawn[0][name], values[:, level])
    assert set(drawn[0]["full reuse"]) == {2}


@pytest.mark.parametrize("case", ["text_first", "question_first", "apart"])
def test_measured_errors_fall_with_the_ratio(case):
    """What docs/research/reuse_study.md says of figure 2 of the VLCache paper."""
    path = pathlib.Path(__file__).parents[2] / "benchmarks" / "results" / f"tiny_vqa_errors_{case}.json"
    curves = json.loads(path.read_text())["error of attention outputs, by answer token"]
    assert_falling(curves)
