"""The protocol, paired statistics, and a whole run on a checkpoint with random weights."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image
from scipy import stats
from typer.testing import CliRunner

from vlcache_jax import LLM
from vlcache_jax.commands.cli import app
from vlcache_jax.reuse.parse import parse_policy
from vlcache_jax.reuse.schedule import Schedule
from vlcache_jax.study import accuracy
from vlcache_jax.study.accuracy import Protocol, Result, batches, paired, summarize
from vlcache_jax.study.questions import ARRANGEMENTS, Sample, read_tsv


def texts(conversation):
    return [part.get("text", "<image>") for part in conversation[0]["content"]]


def test_a_protocol_has_known_parts():
    with pytest.raises(ValueError, match="arrangement must be one of"):
        Protocol("last")
    with pytest.raises(ValueError, match="donors must be one of"):
        Protocol("text_first", donors="none")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("auxiliary", ["related", "neutral"])
@pytest.mark.parametrize("arrangement", ["text_first", "question_first"])
def test_donors_differ_before_the_images_and_show_the_same_ones(tsv, arrangement, auxiliary, seed):
    samples = read_tsv(tsv)
    together = Protocol(arrangement, auxiliary, "together", seed)
    apart = Protocol(arrangement, auxiliary, "apart", seed)
    for i, sample in enumerate(samples):
        formal = together.formal(samples, i)
        [donor] = together.donor_prompts(samples, i)
        assert texts(formal)[0] != texts(donor)[0]
        shown = [part["image"] for part in donor[0]["content"] if part["type"] == "image"]
        assert tuple(shown) == sample.images
        single = apart.donor_prompts(samples, i)
        assert [part["image"] for [turn] in single for part in turn["content"] if part["type"] == "image"] == shown
        assert len(single) == len(sample.images)


def test_batches_share_no_image(tsv):
    samples = read_tsv(tsv)
    parts = list(batches(samples, 4))
    assert sorted(i for part in parts for i in part) == list(range(6))
    assert max(map(len, parts)) <= 4
    assert all(not {0, 2} <= set(part) for part in parts)


def test_paired_statistics():
    cold = [True] * 90 + [False] * 10
    other = [True] * 78 + [False] * 12 + [True] * 2 + [False] * 8
    found = paired(cold, other)
    assert found["difference"] == pytest.approx(-10)
    assert found["p"] == pytest.approx(2 * sum([1, 14, 91]) / 2**14)  # 2 of 14 or fewer, both tails
    assert found["low"] < -10 < found["high"] < 0
    spread = np.sqrt(14 - 10**2 / 100)  # of the sum of 100 differences
    assert found["high"] - found["low"] == pytest.approx(2 * 1.96 * spread, rel=0.1)
    same = paired(cold, cold)
    assert (same["difference"], same["low"], same["high"], same["p"]) == (0, 0, 0, 1)
    # A second auxiliary prompt that changes nothing halves everything, and no question counts twice.
    twice = paired([cold, cold], [cold, other])
    assert [twice[key] for key in ("difference", "low", "high")] == [
        found[key] / 2 for key in ("difference", "low", "high")
    ]
    assert twice["p"] == pytest.approx(2 * stats.norm.sf(10 / 14**0.5))
    # Scores may be fractions; two equal prompts are as good as one.
    less = paired([1, 0.75, 0.5, 0], [0.5, 0.75, 0.75, 0])
    assert less["difference"] == pytest.approx(-6.25)
    assert less["p"] == pytest.approx(2 * stats.norm.sf(0.25 / (0.5**2 + 0.25**2) ** 0.5))
    assert paired([cold, cold], [other, other]) == found


def test_a_question_of_several_rows_counts_once():
    rows = [Sample(str(i), "t", (b"x",), "Q", ("A",), question_id=name) for i, name in enumerate(["a", "", "a", ""])]
    make = lambda i, score: Result(i, "", score, 0.5, 2, 2, 10, [2, 0], 5.0, 0.25)  # noqa: E731
    cold = [make(i, score) for i, score in enumerate([1.0, 1.0, 1.0, 0.5])]
    reused = [make(i, score) for i, score in enumerate([1.0, 1.0, 0.0, 0.5])]
    assert accuracy.by_question(rows, reused) == [0, 1, 0.5]
    details, _ = summarize(rows, {Protocol("text_first"): {"off": cold, "full": reused}})
    assert [row["questions"] for row in details] == [3, 3]
    assert [row["accuracy"] for row in details] == pytest.approx([250 / 3, 50])
    assert details[1]["difference"] == pytest.approx(-100 / 3)


def test_summary_counts_tasks_alike_and_names_the_worst():
    samples = [Sample(str(i), "big" if i < 3 else "small", (b"x",), "Q", ("A",)) for i in range(4)]
    make = lambda i, right, agree: Result(i, "", right, 0.5, agree, 2, 10, [2, 0], 5.0, 0.25)  # noqa: E731
    protocol = Protocol("text_first")
    cold = [make(i, True, 2) for i in range(4)]
    reused = [make(0, True, 2), make(1, True, 2), make(2, False, 1), make(3, False, 0)]
    details, totals = summarize(samples, {protocol: {"off": cold, "full": reused}})
    assert [row["accuracy"] for row in details] == pytest.approx([100, 100, 100 * 2 / 3, 0])
    assert totals[1]["mean"] == pytest.approx((200 / 3 + 0) / 2)
    assert totals[1]["worst"] == "-100.0 small"
    assert totals[1]["agreement"] == pytest.approx((100 * 5 / 6 + 0) / 2)
    assert totals[1]["image rows %"] == pytest.approx(10)
    assert details[2]["image rows by layer"] == pytest.approx([0.2, 0])
    assert totals[1]["ms"] == pytest.approx(250)
    again = {"off": cold, "full": [make(0, False, 2), *reused[1:]]}
    pooled, _ = summarize(samples, {protocol: {"off": cold, "full": reused}, Protocol("text_first", seed=1): again})
    assert [(row["task"], row["auxiliary prompts"]) for row in pooled] == [("big", 2), ("small", 2)] * 2
    assert pooled[2]["difference"] == pytest.approx(-100 * (0.5 + 0 + 1) / 3)


@pytest.fixture(scope="module")
def llm(checkpoints):
    with LLM(checkpoints("qwen3_vl-tied"), max_model_len=512, kv_cache_bytes=8 << 20) as engine:
        yield engine


def test_schedules_are_named_by_their_files_and_known_by_what_they_say(tmp_path):
    for folder, level in (("a", 50), ("b", 100)):
        (tmp_path / folder).mkdir()
        Schedule((level,) * 3, "qwen3_vl", "f").save(tmp_path / folder / "s.json")
    files = [str(tmp_path / folder / "s.json") for folder in "ab"]
    named = accuracy.name_settings(["full", files[0]])
    assert list(named) == ["full", "s.json"]
    assert named["s.json"].schedule.levels == (50,) * 3
    assert named != accuracy.name_settings(["full", files[1]])  # so a file of finished parts is not mistaken
    with pytest.raises(ValueError, match=r"each setting once, got '.*s\.json' after 's\.json'"):
        accuracy.name_settings(files)
    with pytest.raises(ValueError, match=r"each setting once, got '0\.10' after '0\.1'"):
        accuracy.name_settings(["0.1", "0.10"])
    for exact in ("off", "exact"):
        with pytest.raises(ValueError, match=f"reuse must link images behind something else, .* got '{exact}'"):
            accuracy.name_settings(["full", exact])
    moved = accuracy.name_settings(["shift-0.1", f"shift-{files[0]}", files[1]])
    assert list(moved) == ["shift-0.1", "shift-s.json", "s.json"]
    assert (moved["shift-s.json"].shift, moved["shift-s.json"].schedule.levels) == (True, (50,) * 3)
    with pytest.raises(ValueError, match="reuse must be a ratio from 0 to 1"):
        accuracy.name_settings(["shift-1.5"])


def test_a_run(llm, tsv, tmp_path, monkeypatch):
    samples = read_tsv(tsv)
    protocols = [Protocol(name) for name in ARRANGEMENTS] + [Protocol("question_first", donors="apart")]
    settings = {"full": parse_policy("full"), "all": parse_policy(1)}
    work = tmp_path / "work.jsonl"
    results = accuracy.run(llm, samples, settings, protocols, max_tokens=6, batch=3, work=work)
    for protocol, found in results.items():
        assert list(found) == ["off", "full", "all"]
        for name, rows in found.items():
            assert [row.sample for row in rows] == list(range(6))
            assert all(row.image_tokens > 0 and row.tokens > 0 for row in rows)
            if name == "off" or name == "all" or protocol.arrangement == "image_first":
                assert all(row.agree == row.tokens and row.squared_error < 1e-7 for row in rows)
        assert [row.text for row in found["all"]] == [row.text for row in found["off"]]
        if protocol.arrangement != "image_first":
            assert all(set(row.recomputed) == {0} for row in found["full"])
            assert any(row.squared_error > 1e-4 for row in found["full"])
            assert all(set(row.recomputed) == {row.image_tokens} for row in found["all"])
    # A second run reads what the first one wrote, also where the last line was cut off; another question is new.
    with open(work, "a", encoding="utf-8") as file:
        file.write('{"identity": ')
    answered = llm.cache.stats()
    assert accuracy.run(llm, samples, settings, protocols, max_tokens=6, batch=3, work=work) == results
    assert llm.cache.stats() == answered
    # So does one with another setting, which alone is run.
    run = []
    evaluate = accuracy.evaluate
    monkeypatch.setattr(accuracy, "evaluate", lambda *args, **named: run.append([*args[2]]) or evaluate(*args, **named))
    more = {"half": parse_policy(0.5), **settings}
    wider = accuracy.run(llm, samples, more, protocols[1:2], max_tokens=6, batch=3, work=work)[protocols[1]]
    assert {name: wider[name] for name in ("off", "full", "all")} == results[protocols[1]]
    assert len(wider["half"]) == 6
    assert set(map(tuple, run)) == {("half",)}
    answered = llm.cache.stats()
    accuracy.run(llm, samples[:2], settings, protocols[:1], max_tokens=6, batch=3, work=work)
    assert llm.cache.stats() != answered
    other = {"s": parse_policy(Schedule((9, 9, 9, 9), "qwen3_vl", llm.fingerprint))}
    with pytest.raises(ValueError, match="layers"):
        accuracy.run(llm, samples, other, protocols, max_tokens=6, batch=3)


def test_finished_parts_of_another_dtype_are_others(checkpoints, tsv, tmp_path):
    identities = set()
    for dtype in ("float32", "bfloat16"):
        with LLM(checkpoints("qwen3_vl-tied"), dtype=dtype, max_model_len=512, kv_cache_bytes=8 << 20) as engine:
            identities.add(accuracy._identity(engine, read_tsv(tsv), 4))
    assert len(identities) == 2


def test_cold_answers_are_computed_once_for_all_auxiliary_prompts(llm, tsv, monkeypatch):
    samples = read_tsv(tsv)
    cold = []
    answer = accuracy.answer_cold
    monkeypatch.setattr(accuracy, "answer_cold", lambda *args, **named: cold.append(args[2:]) or answer(*args, **named))
    protocols = [Protocol("text_first", seed=seed) for seed in range(3)]
    results = accuracy.run(llm, samples, {"full": parse_policy("full")}, protocols, max_tokens=4, batch=6)
    assert len(cold) == len(list(batches(samples, 6)))
    assert results[protocols[0]]["off"] == results[protocols[2]]["off"]
    assert results[protocols[0]]["full"] != results[protocols[2]]["full"]


@pytest.mark.ladder
def test_the_command(checkpoints, tsv, tmp_path):
    arguments = ["--data", tsv, "--reuse", "full", "--reuse", "0.5", "--max-tokens", "4", "--arrangement", "text_first"]
    out, figure = tmp_path / "accuracy.json", tmp_path / "accuracy.png"
    arguments = [checkpoints("qwen3_vl-tied"), *arguments, "--questions", "5", "--out", out, "--figure", figure]
    result = CliRunner().invoke(app, ["bench", "accuracy", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert [(row["reuse"], row["task"], row["questions"]) for row in written["rows"]] == [
        (name, task, count) for name in ("off", "full", "0.5") for task, count in (("one", 3), ("two", 2))
    ]
    shares = [row["image rows"] for row in written["rows"]]
    assert shares[:4] == [1, 1, 0, 0]
    assert 0.4 < shares[4] <= 0.5
    with Image.open(figure) as picture:
        assert picture.width > 300
    assert "Accuracy, text first" in result.stdout
    bad = CliRunner().invoke(app, ["bench", "accuracy", *map(str, arguments), "--arrangement", "sideways"])
    assert bad.exit_code == 1
    assert bad.stderr.startswith("error: arrangement must be one of")
