"""`vlcache schedule`: from questions to scores, to a schedule, to answers with it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from vlcache_jax.commands.cli import app
from vlcache_jax.reuse.schedule import Schedule
from vlcache_jax.study.search import LayerScores, LayerTimes


@pytest.fixture
def run():
    return lambda *arguments: CliRunner().invoke(app, ["schedule", *map(str, arguments)])


@pytest.fixture
def scores(tmp_path):
    values = np.stack([(2 + i) * np.exp(-np.arange(151) / (5 + 10 * i)) for i in range(4)])
    values[:, 0] = values[0] = 3
    LayerScores(values, "qwen3_vl", "ab", 4).save(tmp_path / "scores.npz")
    return tmp_path / "scores.npz"


@pytest.mark.thorough
def test_from_questions_to_answers(run, checkpoints, questions_tsv, tmp_path):
    model = checkpoints("qwen3_vl-tied")
    scores, out, picture = (tmp_path / name for name in ("scores.npz", "schedule.json", "schedule.png"))
    measured = run("profile", model, "--data", questions_tsv, "--samples", 2, "--max-tokens", 4, "--out", scores)
    assert measured.exit_code == 0, measured.output
    assert "2 samples, error of full reuse" in measured.stdout
    loaded = LayerScores.load(scores)
    assert loaded.samples == 2
    assert loaded.values.shape[1] == 151
    assert loaded.values[0].max() == loaded.values[:, 0].min() > 0
    solved = run("solve", scores, "--mean", "0.1", "--out", out, "--chart", picture)
    assert solved.exit_code == 0, solved.output
    schedule = Schedule.load(out)
    assert f"mean {schedule.mean_text}" in solved.stdout
    assert 0 < schedule.mean <= 0.1
    assert picture.stat().st_size > 1000
    table = tmp_path / "accuracy.json"
    arguments = ["--data", questions_tsv, "--reuse", out, "--context", "new-text", "--max-tokens", 2]
    answered = CliRunner().invoke(app, ["bench", "accuracy", *map(str, [model, *arguments, "--out", table])])
    assert answered.exit_code == 0, answered.output
    cold, reused = json.loads(table.read_text())["rows"]
    assert cold["image rows"] == 1
    assert 0 < reused["image rows"] <= schedule.mean


@pytest.mark.slow
def test_within_measured_times(run, checkpoints, scores, tmp_path):
    times, out = tmp_path / "times.json", tmp_path / "schedule.json"
    measured = run("times", checkpoints("qwen3_vl-tied"), "--repeats", 1, "--out", times)
    assert measured.exit_code == 0, measured.output
    rows = LayerTimes.load(times).rows
    assert [f"{size} tokens" in measured.stdout for size in rows] == [True] * len(rows)
    times.write_text(json.dumps({"rows": [64, 512], "microseconds": [10, 30]}))
    arguments = ("solve", scores, "--times", times, "--image-tokens", 1000, "--text-rows", 64, "--out", out)
    solved = run(*arguments, "--microseconds", 80)
    assert solved.exit_code == 0, solved.output
    assert Schedule.load(out).levels == (150, 150, 0, 0)
    short = run(*arguments, "--microseconds", 39)
    assert short.exit_code == 1
    assert "microseconds must be at least 40, the time of full reuse, got 39" in short.stderr
    ignored = run(*arguments, "--microseconds", 80, "--method", "greedy")
    assert ignored.stderr.startswith("error: method greedy and free-first require mean")
    for content in ("[1]", '{"rows": 5, "microseconds": [1]}', '{"rows": ["a", 1], "microseconds": [1, 2]}'):
        times.write_text(content)
        assert "must" in (stderr := run(*arguments, "--microseconds", 80).stderr)
        assert stderr.startswith("error: times must be a file written by `vlcache schedule times`")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "exactly one of mean and microseconds is required"),
        (("--mean", "0.1", "--microseconds", "5"), "exactly one of mean and microseconds is required"),
        (("--microseconds", "5"), "microseconds and times must be set together"),
        (("--mean", "-0.1"), "mean must be from 0 to 0.3"),
        (("--mean", "0.31"), "mean must be from 0 to 0.3"),
        (("--mean", "1e-9999999"), "mean must be a number of at most 30 digits, got 1e-9999999"),
        (("--mean", "0.1", "--chart", "levels.xyz"), "chart must end in .png or .pdf or .svg, got levels.xyz"),
        (("--mean", "0.1", "--method", "luck"), "method must be 'dp' or 'greedy', got 'luck'"),
    ],
)
def test_what_solve_refuses(run, scores, tmp_path, arguments, message):
    result = run("solve", scores, "--out", tmp_path / "schedule.json", *arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {message}")
    assert not (tmp_path / "schedule.json").exists()


def test_files_that_are_no_scores_are_refused(run, scores, tmp_path):
    content = bytearray(scores.read_bytes())
    content[len(content) // 2] ^= 255
    (tmp_path / "flipped.npz").write_bytes(content)
    np.save(tmp_path / "plain.npy", np.zeros(3))
    with np.load(scores) as file:
        fields = dict(file)
    for name, changed in (("samples", np.array([1, 2])), ("values", np.array([["a"]]))):
        np.savez(tmp_path / f"{name}.npz", **{**fields, name: changed})
    for name in ("flipped.npz", "plain.npy", "samples.npz", "values.npz"):
        result = run("solve", tmp_path / name, "--mean", "0.1", "--out", tmp_path / "schedule.json")
        assert result.exit_code == 1
        assert result.stderr.startswith("error: scores must be a file written by `vlcache schedule profile`"), name


def test_what_profile_refuses(run, checkpoints, questions_tsv, tmp_path):
    arguments = ("profile", checkpoints("qwen3_vl-tied"), "--out", tmp_path / "scores.npz", "--data")
    first = run(*arguments, questions_tsv, "--context", "same")
    assert "context must be one of new-text, new-question, got 'same'" in first.stderr
    (tmp_path / "text.tsv").write_text("index\tquestion\tanswer\timage\n0\tWhat?\ta cat\t\n")
    without = run(*arguments, tmp_path / "text.tsv")
    assert without.exit_code == 1
    assert without.stderr.splitlines()[-1].startswith("error: ")
    assert "image" in without.stderr
