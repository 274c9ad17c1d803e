"""`research.policies`: which settings are compared, and the table."""

from __future__ import annotations

import csv
import json
from fractions import Fraction

import pytest
from typer.testing import CliRunner

from research.policies import app, find_schedules, groups_of, policies_of, questions_of, table
from vlcache_jax import LLM, CacheConfig
from vlcache_jax.assets import TINY_VQA
from vlcache_jax.reuse.policies import EPIC, Scheduled, Spread
from vlcache_jax.reuse.schedule import Schedule
from vlcache_jax.study.accuracy import AccuracyResult, Protocol
from vlcache_jax.study.pairs import cases_of
from vlcache_jax.study.questions import Sample

FALLING = Schedule((500, 100, 50, 0), "qwen3_vl", "0" * 64)


def test_groups():
    named = {"falling": FALLING}
    found = groups_of([0.1], [0.25, 0.75], named, image_tokens=80, num_layers=4)
    assert [group.reference for group in found] == ["full", "0.1", "0.25", "0.75", "0.125"]
    groups = {group.name: group.settings for group in found}
    at_ratio = groups["r = 0.1"]
    assert at_ratio[:6] == ("0.1", "ends-0.1", "spread-0.1", "shift-0.1", "epic-8", "mpic-8")
    assert {"cacheblend-0.1", "cacheblend-lmcache-0.1", "kvshare-0.1", "kvshare-attn-0.1", "question-0.1"} < set(
        at_ratio
    )
    # Policies that compute two or three of four layers whole cannot stay at a quarter of the rows.
    at_share = groups["25 % of image rows"]
    assert at_share == ("0.25", "ends-0.25", "spread-0.25", "shift-0.25", "epic-20", "mpic-20")
    assert {"cacheblend-0", "cacheblend-lmcache-0.5", "question-0.5"} < set(groups["75 % of image rows"])
    # The first layer computes what the second one needs: (100 + 100 + 50) / 4 / 500.
    assert groups["rows of falling"] == ("falling", "shift-falling", "0.125", "spread-0.125", "shift-0.125")
    policies = policies_of(found, named, {})
    assert set(policies) == {setting for settings in groups.values() for setting in settings}
    assert policies["falling"] == Scheduled(FALLING)
    assert policies["shift-falling"] == Spread(schedule=FALLING, shift=True)
    assert policies["epic-8"] == EPIC(8)


def test_table_has_a_row_for_the_cold_run_and_for_each_setting_of_each_group():
    groups = groups_of([0.5], [], {}, image_tokens=64, num_layers=2)
    names = ["off", *(setting for group in groups for setting in group.settings)]
    samples = [Sample(str(i), task, (b"x",), "Q", ("A",)) for i, task in enumerate(("grid", "grid", "count"))]
    samples.append(Sample("3", "hop", (b"x", b"y"), "Q", ("A",)))
    right = dict.fromkeys(names, (1.0, 0.0, 0.0)) | {"off": (1.0, 1.0, 0.0), "shift-0.5": (1.0, 1.0, 1.0)}
    run = {
        name: [AccuracyResult(i, "", score, 0.0, 1, 1, 8, [4, 1], 1.0, 10, 0.1) for i, score in enumerate(scores)]
        for name, scores in right.items()
    }
    [case] = cases_of(samples, {Protocol("text_first"): run, Protocol("text_first", seed=1): run})
    rows = table(groups, case)
    assert [row["group"] for row in rows] == ["cold", *(group.name for group in groups for _ in group.settings)]
    assert [row["reuse"] for row in rows] == names
    ahead = {row["reuse"]: row["over static difference"] for row in rows}
    assert ahead.pop("shift-0.5") == 75  # a half of one task, all of the other
    assert set(ahead.values()) == {0}
    assert (rows[1]["grid"], rows[1]["count"], rows[1]["hop"]) == (50, 0, "-")
    assert rows[1]["difference"] == -25
    assert (rows[1]["worst task"], rows[1]["worst difference"]) == ("grid", -50)
    assert rows[1]["by layer %"] == "50 12"
    assert rows[1]["rows x layers %"] == pytest.approx(31.25)


def test_questions_of_files_are_taken_as_they_are_and_drawn_ones_by_size(questions_tsv):
    [found] = questions_of([questions_tsv], ["small", "large"], questions=1, profiled=0, split="test")
    assert (found.size, found.profiled, len(found.asked)) == ("as they are", [], 1)
    small, large = questions_of([], ["small", "large"], questions=1, profiled=2, split="test")
    assert [len(sample.images) for sample in small.asked] == [1] * 3 + [2] * 5
    assert (small.size, large.size, len(small.profiled)) == ("small", "large", 16)
    shown, profiled, others = (
        {image for sample in samples for image in sample.images}
        for samples in (small.asked, small.profiled, large.asked)
    )
    assert not shown & (profiled | others)


@pytest.mark.thorough
def test_schedules_are_profiled_for_what_they_are_used_on():
    samples = questions_of([], ["small"], questions=1, profiled=1, split="test")[0].profiled
    with LLM(TINY_VQA, max_model_len=1024, cache=CacheConfig(load="kv"), enable_prefix_caching=False) as llm:
        text, question = (
            find_schedules(llm, samples, Protocol(arrangement), "0.1", count=2, work=None)
            for arrangement in ("text_first", "question_first")
        )
    assert list(text) == ["schedule", "schedule-of-question_first"]
    assert text["schedule"] == question["schedule-of-text_first"]
    assert question["schedule"] == text["schedule-of-question_first"]
    assert all(0 < schedule.mean <= Fraction(1, 10) for schedule in text.values())


@pytest.fixture
def mixed_tsv(questions_tsv, tmp_path):
    """Three questions about one picture each, and one about two of them."""
    path = tmp_path / "mixed.tsv"
    with open(questions_tsv, encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file, delimiter="\t")
    with open(path, "w", encoding="utf-8", newline="") as file:
        both = ["3", "What differs?", "a dog", str([rows[0][3], rows[1][3]])]
        csv.writer(file, delimiter="\t", lineterminator="\n").writerows([header, *rows, both])
    return path


@pytest.mark.thorough
def test_the_command(checkpoints, mixed_tsv, tmp_path):
    model = checkpoints("qwen3_vl")
    with LLM(model) as llm:
        schedule = Schedule((250,) * 3, "qwen3_vl", llm.fingerprint)
    schedule.save(tmp_path / "half.json")
    arguments = ["--data", mixed_tsv, "--ratio", "0.5", "--share", "0.9", "--schedule", tmp_path / "half.json"]
    arguments += ["--context", "new-question", "--max-tokens", 3, "--out", tmp_path / "o.json"]
    result = CliRunner().invoke(app, list(map(str, [model, *arguments])))
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "o.json").read_text())
    third = len(written["rows"]) // 3
    assert [(row["donors"], row["images"]) for row in written["rows"]] == [
        kind for kind in (("together", "one"), ("together", "several"), ("apart", "several")) for _ in range(third)
    ]
    rows = {(row["group"], row["reuse"]): row for row in written["rows"][:third]}
    cold = rows["cold", "off"]
    assert (cold["difference"], cold["high"], cold["rows x layers %"]) == pytest.approx((0, 39.2, 100), 1e-3)
    assert rows["no rows", "full"]["rows x layers %"] == 0
    assert rows["rows of half.json", "half.json"]["rows x layers %"] == rows["r = 0.5", "0.5"]["rows x layers %"] == 50
    # As near to 90 % as whole tokens allow, of 12 in each of three layers. Behind two whole layers, 0.7 are left for
    # the third; cacheblend looks at three layers, and has none left to save in.
    expected = dict.fromkeys(("0.9", "ends-0.9", "spread-0.9", "shift-0.9"), 10 / 12)
    expected |= dict.fromkeys(("epic-11", "mpic-11"), 11 / 12)
    choosing = ("cacheblend-lmcache-0.7", "cacheblend-proto-0.7", "kvshare-0.7", "kvshare-attn-0.7", "question-0.7")
    expected |= dict.fromkeys(choosing, (1 + 1 + 8 / 12) / 3)
    at_share = {reuse: row["rows x layers %"] for (group, reuse), row in rows.items() if group == "90 % of image rows"}
    assert at_share == pytest.approx({reuse: 100 * share for reuse, share in expected.items()})
    assert rows["90 % of image rows", "question-0.7"]["rows %"] == 100
    assert rows["no rows", "full"]["logit MSE"] > rows["r = 0.5", "question-0.5"]["logit MSE"]
    assert "as they are images, new question, several images, cached separately" in result.stdout


@pytest.mark.slow
def test_settings_can_be_named(checkpoints, questions_tsv, tmp_path):
    arguments = ["--data", questions_tsv, "--reuse", "0.5", "--reuse", "shift-0.5", "--context", "new-text"]
    arguments += ["--max-tokens", 1, "--questions", 1, "--out", tmp_path / "o.json"]
    command = list(map(str, [checkpoints("qwen3_vl"), *arguments]))
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "o.json").read_text())["rows"]
    assert [(row["group"], row["reuse"]) for row in rows] == [
        ("cold", "off"), ("asked for", "0.5"), ("asked for", "shift-0.5"),
    ]  # fmt: skip
    assert rows[1]["over static difference"] == 0


@pytest.mark.slow
def test_files_that_show_one_image_have_no_table_of_images_apart(checkpoints, questions_tsv, tmp_path):
    arguments = ["--data", questions_tsv, "--ratio", "0.5", "--share", "0.9", "--context", "new-text"]
    arguments += ["--max-tokens", 1, "--questions", 1, "--out", tmp_path / "o.json"]
    command = list(map(str, [checkpoints("qwen3_vl"), *arguments]))
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert {row["donors"] for row in json.loads((tmp_path / "o.json").read_text())["rows"]} == {"together"}


@pytest.mark.slow
def test_what_does_not_fit_is_refused(checkpoints, questions_tsv, tmp_path):
    Schedule((9,) * 5, "qwen3_vl", "f").save(tmp_path / "five.json")
    work = tmp_path / "five.json"
    for arguments, message in (
        (["--schedule", str(tmp_path / "five.json")], "layers"),
        (["--split", "tset"], "split must be profile or test, got 'tset'"),
        (["--context", "same"], "context must be one of new-text, new-question, got 'same'"),
        (["--cached", "none"], "cached must be one of together, separately, alone, neutral, got 'none'"),
        (["--cached", "separately"], "donors must be together for questions with one image, got apart"),
        (["--profiled", "3"], "profiled must be 0 with data, got 3"),
        (
            ["--reuse", "exact"],
            "reuse must be an approximate mode (approximate, full, a ratio, a schedule), got 'exact'",
        ),
        (["--work", str(work)], "work must be a new file or one that an earlier run of this command wrote, got"),
        (["--out", str(tmp_path)], "out must be a file that can be written"),
    ):
        command = [str(checkpoints("qwen3_vl")), "--data", str(questions_tsv), *arguments]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 1, result.output
        assert result.stderr.splitlines()[-1].startswith("error: ")
        assert message in result.stderr


@pytest.mark.parametrize("mean", ["0", "0.31", "much", "-0.1", "1/8"])
def test_a_mean_that_no_profile_reaches_is_refused(mean):
    result = CliRunner().invoke(app, ["nowhere", "--mean", mean])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: mean must be a number above 0, at most 0.3, got {mean!r}")


@pytest.mark.parametrize("name", ["--ratio", "--share"])
def test_ratios_out_of_range_are_refused(name):
    result = CliRunner().invoke(app, ["nowhere", name, "1.5"])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {name[2:]} must be above 0 and below 1, got 1.5")
