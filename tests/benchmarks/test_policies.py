"""`vlcache bench policies`: which settings are compared, and the table."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from vlcache_jax import LLM
from vlcache_jax.benchmarks.policies import groups_of, table
from vlcache_jax.commands.cli import app
from vlcache_jax.reuse.parse import parse_policy
from vlcache_jax.reuse.schedule import Schedule


def test_groups(tmp_path):
    path = tmp_path / "falling.json"
    Schedule((500, 100, 50, 0), "qwen3_vl", "0" * 64).save(path)
    groups = {
        group.name: group.settings for group in groups_of([0.1], [0.25, 0.75], [path], image_tokens=80, num_layers=4)
    }
    at_ratio = groups["r = 0.1"]
    assert {group.reference for group in groups_of([0.1], [0.25], [], image_tokens=80, num_layers=4)} == {
        "full",
        "0.1",
        "0.25",
    }
    assert at_ratio[:6] == ("0.1", "ends-0.1", "spread-0.1", "shift-0.1", "epic-8", "mpic-8")
    assert {"cacheblend-0.1", "cacheblend-lmcache-0.1", "kvshare-0.1", "kvshare-attn-0.1", "asked-0.1"} < set(at_ratio)
    # Policies that compute two or three of four layers whole cannot stay at a quarter of the rows.
    at_share = groups["25 % of image rows"]
    assert at_share == ("0.25", "ends-0.25", "spread-0.25", "shift-0.25", "epic-20", "mpic-20")
    assert {"cacheblend-0", "cacheblend-lmcache-0.5", "asked-0.5"} < set(groups["75 % of image rows"])
    # The first layer computes what the second one needs.
    static = f"{(100 + 100 + 50) / 4 / 500:g}"
    assert groups["rows of falling"][:3] == ("falling.json", "shift-falling.json", static)
    for settings in groups.values():
        for setting in settings:
            parse_policy(setting.replace("falling.json", str(path)))


def test_table_has_a_row_for_each_setting_of_each_group():
    groups = groups_of([0.5], [], [], image_tokens=64, num_layers=2)
    base = {"accuracy": 90.0, "low": -3.0, "high": 0.0, "logit MSE": 0.5, "agreement": 99.0, "seconds": 0.01}
    details = [
        {**base, "reuse": setting, "task": task, "difference": lost, "image rows by layer": [0.5, lost / -10]}
        for group in groups for setting in group.settings for task, lost in (("grid", -1.0), ("count", -2.0))
    ]  # fmt: skip
    names = [setting for group in groups for setting in group.settings]
    scores = {name: [[0, 0, 1, float(name == "shift-0.5")]] * 2 for name in names}
    rows = table(groups, details, scores)
    ahead = {row["reuse"]: row["over static"] for row in rows}
    assert ahead.pop("shift-0.5") == "+25.0 [+0.0, +75.0]"
    assert set(ahead.values()) == {"+0.0 [+0.0, +0.0]"}
    assert [row["group"] for row in rows] == [group.name for group in groups for _ in group.settings]
    assert rows[0]["difference"] == pytest.approx(-1.5)
    assert rows[0]["worst"] == "-2.0 [-3.0, +0.0] count"
    assert rows[0]["by layer %"] == "50 15"
    assert rows[0]["image rows %"] == pytest.approx(32.5)


def test_the_command(checkpoints, questions_tsv, tmp_path):
    model = checkpoints("qwen3_vl-tied")
    with LLM(model) as llm:
        schedule = Schedule((250,) * 3, "qwen3_vl", llm.fingerprint)
    schedule.save(tmp_path / "half.json")
    arguments = ["--data", questions_tsv, "--ratio", "0.5", "--share", "0.9", "--schedule", tmp_path / "half.json"]
    arguments += ["--arrangement", "question_first", "--max-tokens", 3, "--out", tmp_path / "o.json"]
    result = CliRunner().invoke(app, ["bench", "policies", *map(str, [model, *arguments])])
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "o.json").read_text())
    half = len(written["rows"]) // 2
    assert [row["donors"] for row in written["rows"]] == ["together"] * half + ["apart"] * half
    rows = {(row["group"], row["reuse"]): row for row in written["rows"] if row["donors"] == "together"}
    assert rows["no rows", "full"]["image rows %"] == 0
    assert written["details"][0]["reuse"] == "off"  # what the differences are to
    assert rows["rows of half", "half.json"]["image rows %"] == rows["r = 0.5", "0.5"]["image rows %"] == 50
    # As near to 90 % as whole tokens allow, of 12 in each of three layers. Behind two whole layers, 0.7 are left for
    # the third; cacheblend looks at three layers, and has none left to save in.
    assert written["image_tokens"] == 12
    expected = dict.fromkeys(("0.9", "ends-0.9", "spread-0.9", "shift-0.9"), 10 / 12)
    expected |= dict.fromkeys(("epic-11", "mpic-11"), 11 / 12)
    choosing = ("cacheblend-lmcache-0.7", "cacheblend-proto-0.7", "kvshare-0.7", "kvshare-attn-0.7", "asked-0.7")
    expected |= dict.fromkeys(choosing, (1 + 1 + 8 / 12) / 3)
    at_share = {reuse: row["image rows %"] for (group, reuse), row in rows.items() if group == "90 % of image rows"}
    assert at_share == pytest.approx({reuse: 100 * share for reuse, share in expected.items()})
    assert float(rows["no rows", "full"]["logit MSE"]) > float(rows["r = 0.5", "asked-0.5"]["logit MSE"])


def test_what_does_not_fit_is_refused(checkpoints, questions_tsv, tmp_path):
    Schedule((9,) * 4, "qwen3_vl", "f").save(tmp_path / "four.json")
    for arguments, message in (
        (["--schedule", str(tmp_path / "four.json")], "layers"),
        (["--split", "tset"], "split must be profile or test, got 'tset'"),
        (["--arrangement", "image_first"], "arrangement must be text_first or question_first, got 'image_first'"),
        (["--donors", "none"], "donors must be one of together, apart, got 'none'"),
        (["--out", str(tmp_path)], "out must be a file that can be written"),
    ):
        command = ["bench", "policies", str(checkpoints("qwen3_vl-tied")), "--data", str(questions_tsv), *arguments]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 1, result.output
        assert result.stderr.splitlines()[-1].startswith("error: ")
        assert message in result.stderr


@pytest.mark.parametrize("name", ["--ratio", "--share"])
def test_ratios_out_of_range_are_refused(name):
    result = CliRunner().invoke(app, ["bench", "policies", "nowhere", name, "1.5"])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {name[2:]} must be between 0 and 1, got 1.5")
