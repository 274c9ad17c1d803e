"""The protocol, and a whole run on a checkpoint with random weights."""

from __future__ import annotations

import json

import pytest
from PIL import Image
from typer.testing import CliRunner

from tests.helper import SIZES
from vlcache_jax import LLM
from vlcache_jax.commands.cli import app
from vlcache_jax.reuse.schedule import Schedule
from vlcache_jax.reuse.selection import parse_policy
from vlcache_jax.study import accuracy
from vlcache_jax.study.accuracy import Protocol, batches
from vlcache_jax.study.questions import ARRANGEMENTS, read_tsv


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


@pytest.fixture(scope="module")
def llm(checkpoints):
    with LLM(checkpoints("qwen3_vl"), **SIZES) as engine:
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
    with pytest.raises(ValueError, match=r"must not list a setting twice, got '.*s\.json' after 's\.json'"):
        accuracy.name_settings(files)
    with pytest.raises(ValueError, match=r"must not list a setting twice, got '0\.10' after '0\.1'"):
        accuracy.name_settings(["0.1", "0.10"])
    for exact in ("off", "exact"):
        with pytest.raises(ValueError, match=f"reuse must be an approximate mode .*, got '{exact}'"):
            accuracy.name_settings(["full", exact])
    moved = accuracy.name_settings(["shift-0.1", f"shift-{files[0]}", files[1]])
    assert list(moved) == ["shift-0.1", "shift-s.json", "s.json"]
    assert (moved["shift-s.json"].shift, moved["shift-s.json"].schedule.levels) == (True, (50,) * 3)
    with pytest.raises(ValueError, match="reuse must be shift-R with a ratio R from 0 to 1"):
        accuracy.name_settings(["shift-1.5"])


@pytest.mark.slow
def test_a_run(llm, tsv, tmp_path, monkeypatch):
    samples = read_tsv(tsv)
    protocols = [Protocol(name) for name in ARRANGEMENTS] + [
        Protocol("question_first", donors=donors) for donors in ("apart", "neutral")
    ]
    settings = {"full": parse_policy("full"), "all": parse_policy(1)}
    work = tmp_path / "work.jsonl"
    results = accuracy.run(llm, samples, settings, protocols, max_tokens=6, batch=3, work=work)
    for protocol, found in results.items():
        assert list(found) == ["off", "full", "all"]
        for name, rows in found.items():
            # One image that is cached alone is one that is cached together with no others.
            assert [row.sample for row in rows] == list(range(3 if protocol.donors == "apart" else 0, 6))
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
    other = {"s": parse_policy(Schedule((9, 9, 9), "qwen3_vl", llm.fingerprint))}
    with pytest.raises(ValueError, match="layers"):
        accuracy.run(llm, samples, other, protocols, max_tokens=6, batch=3)


def test_finished_parts_of_another_dtype_are_others(checkpoints, tsv, tmp_path):
    identities = set()
    for dtype in ("float32", "bfloat16"):
        with LLM(checkpoints("qwen3_vl"), **SIZES | {"dtype": dtype}) as engine:
            identities.add(accuracy.identity(engine, read_tsv(tsv), 4))
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


def test_what_is_read(llm, tsv):
    """Linking reads records; moving reads and writes what is not computed, in all layers but the first."""
    samples = read_tsv(tsv)
    settings = {name: parse_policy(name) for name in ("full", "spread-0.3", "shift-0.3")}
    protocol = Protocol("text_first")
    results = accuracy.run(llm, samples, settings, [protocol], max_tokens=2)[protocol]
    text = llm.service.device.runner.config.text
    token = 2 * text.num_kv_heads * text.head_dim * 4
    for full, spread, shift in zip(*(results[name] for name in settings), strict=True):
        images = len(samples[full.sample].images)
        assert full.bytes_read == 16 * images * text.num_layers * token  # records of fewer tokens are padded to 16
        assert spread.bytes_read > full.bytes_read  # encoder rows
        stays = sum(shift.image_tokens - fresh for fresh in shift.recomputed[1:])
        assert stays > 0
        assert shift.bytes_read == spread.bytes_read + 2 * stays * token
    assert {row.bytes_read for row in results["off"]} == {0}


def test_images_of_epic_are_compiled_alone(llm, tsv, monkeypatch):
    samples = read_tsv(tsv)
    filled = []
    generate = llm.generate
    monkeypatch.setattr(llm, "generate", lambda prompts, *args, **named: filled.extend(
        prompt["prompt"] for prompt in prompts) or generate(prompts, *args, **named))  # fmt: skip
    settings = {name: parse_policy(name) for name in ("epic-2", "mpic-2")}
    for protocol in (Protocol("question_first"), Protocol("question_first", donors="apart")):
        filled.clear()
        results = accuracy.run(llm, samples, settings, [protocol], max_tokens=2)[protocol]
        images = sum(len(samples[row.sample].images) for row in results["off"])
        assert filled == ["<|vision_start|><|image_pad|><|vision_end|>"] * images
        for epic, mpic in zip(results["epic-2"], results["mpic-2"], strict=True):
            assert epic.recomputed == mpic.recomputed
            assert epic.squared_error != mpic.squared_error


def test_donors_apart_need_several_images(llm, tsv):
    protocol = Protocol("text_first", donors="apart")
    with pytest.raises(ValueError, match="donors must be together for questions with one image, got apart"):
        accuracy.run(llm, read_tsv(tsv)[:3], {"full": parse_policy("full")}, [protocol])


@pytest.mark.thorough
def test_the_command(checkpoints, tsv, tmp_path):
    arguments = ["--data", tsv, "--reuse", "full", "--reuse", "0.5", "--max-tokens", "4", "--context", "new-text"]
    out, figure = tmp_path / "accuracy.json", tmp_path / "accuracy.png"
    arguments = [checkpoints("qwen3_vl"), *arguments, "--questions", "5", "--out", out, "--chart", figure]
    result = CliRunner().invoke(app, ["bench", "accuracy", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert [(row["reuse"], row["task"], row["questions"]) for row in written["rows"]] == [
        (name, task, count) for task, count in (("one", 3), ("two", 2), ("two", 2)) for name in ("off", "full", "0.5")
    ]
    cases = [(row["images"], row["donors"]) for row in written["rows"][::3]]
    assert cases == [("one", "together"), ("several", "together"), ("several", "apart")]
    shares = [row["image rows"] for row in written["rows"]]
    assert shares[::3] == [1, 1, 1]
    assert shares[1::3] == [0, 0, 0]
    assert 0.4 < shares[2] <= 0.5
    with Image.open(figure) as picture:
        assert picture.width > 300
    assert "Accuracy, new text" in result.stdout
    bad = CliRunner().invoke(app, ["bench", "accuracy", *map(str, arguments), "--context", "sideways"])
    assert bad.exit_code == 1
    assert bad.stderr.startswith("error: context must be one of")
