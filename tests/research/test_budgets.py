"""Methods of compression at budgets: what is compared with what, and a run on a checkpoint with random weights."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from research.budget_answers import POLICIES, BudgetResult, BudgetResults, Setting, layer_sparsity, run, settings_of
from research.budgets import app, interpolated, table
from research.masked_answers import FastV, MaskedAnswers, goes_on
from tests.compress.example import ATTENTION
from tests.helper import SIZES, user
from tests.study.tables import write_toy
from vlcache_jax import LLM
from vlcache_jax.compress.policies import Random, VLCache
from vlcache_jax.study.probe import Probe
from vlcache_jax.study.questions import Sample, read_tsv


@pytest.fixture
def tsv(tmp_path):
    return write_toy(tmp_path / "toy.tsv")


def test_settings():
    found = settings_of(["vl-cache", "random"], [0.1, 0.5], ps=[0.1], seeds=2)
    assert [setting.name for setting in found] == [
        "vl-cache-0.1", "vl-cache-0.5", "random-0.1", "random-0.5", "vl-cache, p = 0.1-0.1", "vl-cache, p = 0.1-0.5"
    ]  # fmt: skip
    assert found[0].ways == (VLCache(0.1),)
    assert found[2].ways == (Random(0.1), Random(0.1, seed=1))
    assert found[5].ways == (VLCache(0.5, p=0.1),)
    with pytest.raises(ValueError, match=r"method must be one of vl-cache, .*, got 'vlcache'"):
        settings_of(["vlcache"], [0.1])


def test_fastv_goes_on_with_what_the_last_token_looks_at():
    is_image = np.array([False, True, True, True, False, False])
    assert goes_on(ATTENTION[-1], is_image, 0.7).tolist() == [0, 1, 2, 4, 5]  # 0.01, 0.50, 0.001
    assert goes_on(ATTENTION[-1], is_image, 0.5).tolist() == [0, 2, 4, 5]
    assert goes_on(np.full(6, 0.1), is_image, 0.1).tolist() == [0, 1, 4, 5]  # of equal ones the earlier
    assert goes_on(ATTENTION[-1], np.zeros(6, bool), 0.1).tolist() == list(range(6))


def test_other_memory_lies_between_budgets():
    reference = [(np.array([1.0, 1]), np.array([1.0, 0])), (np.array([0.2, 0.1]), np.array([0.0, 1]))]
    np.testing.assert_allclose(interpolated(reference, np.array([0.6, 0.05])), [0.5, 1])


def result(sample, score, memory, **more):
    told = {"same": score == 1, "agree": 1, "tokens": 2, "squared_error": 0.5, "hit_rate": 0.25}
    return BudgetResult(sample, "", score, memory, **told | more)


def test_table():
    """Two tasks; the question of the second one has two rows."""
    samples = [Sample(str(i), task, (b"x",), "Q", ("A",)) for i, task in enumerate("aabb")]
    samples[2:] = [Sample(one.index, "b", (b"x",), "Q", ("A",), question_id="q") for one in samples[2:]]
    whole = [result(i, 1.0, 1.0, squared_error=0.0, agree=2, hit_rate=None) for i in range(4)]
    settings = settings_of(["vl-cache", "random"], [0.5], seeds=2)
    vl_cache = [result(0, 1.0, 0.75), result(1, 1.0, 0.75), result(2, 1.0, 0.75), result(3, 0.0, 0.75)]
    draws = [[result(i, score, 0.5) for i in range(4)] for score in (0.0, 1.0)]
    rows = table(samples, BudgetResults(whole, dict(zip(settings, ([vl_cache], draws), strict=True)), []), "random")
    assert [(row["method"], row["budget %"], row["memory %"]) for row in rows] == [
        ("whole", 100, 100), ("vl-cache", 50, 75), ("random", 50, 50)
    ]  # fmt: skip
    assert [(row["a"], row["b"], row["mean"], row["difference"]) for row in rows] == [
        (100, 100, 100, 0), (100, 0, 50, -50), (50, 50, 50, -50)
    ]  # fmt: skip
    # Random at 75 % is taken to be right in three of four cases.
    assert [row["over random difference"] for row in rows] == [0, pytest.approx((25 - 75) / 2), 0]
    assert [row["hit rate"] for row in rows] == [None, 0.25, 0.25]
    assert [row["agreement"] for row in rows] == [100, 50, 50]
    assert rows[1]["questions"] == 3


@pytest.mark.slow
def test_a_run(checkpoints, tsv, tmp_path, monkeypatch):
    samples, work = read_tsv(tsv)[1:4], tmp_path / "work.jsonl"
    settings = settings_of(["vl-cache", "random", "h2o-stream"], [0.3, 1.0], seeds=2, every=2)
    settings += [Setting("fastv", alpha, (FastV(alpha, layer=0),)) for alpha in (0.3, 1.0)]
    with LLM(checkpoints("qwen3_vl"), **SIZES, compressed_kv_bytes=2**22, use_tqdm=False) as llm:
        answers = run(llm, samples, settings, max_tokens=6, batch=2, work=work)
        # A second run reads what the first one wrote.
        with monkeypatch.context() as context:
            context.setattr(llm, "chat", None)
            assert run(llm, samples, settings, max_tokens=6, batch=2, work=work) == answers
    assert [one.sample for one in answers.whole] == [0, 1, 2]
    for setting, ways in answers.results.items():
        assert len(ways) == len(setting.ways)
        for rows in ways:
            for row, whole in zip(rows, answers.whole, strict=True):
                assert row.sample == whole.sample
                # The engine's answer is another one where masks say so, and so is that computed through them.
                assert row.same == (row.agree == row.tokens)
                assert row.tokens == 5
                is_policy = setting.method in POLICIES
                assert (row.hit_rate is not None) == is_policy
                if setting.budget < 1:
                    assert 0.2 < row.memory < 0.4 or (setting.method == "fastv" and 0.4 < row.memory < 1)
                    assert row.squared_error > 1e-5
                    assert not is_policy or 0.1 < row.hit_rate < 1
                elif setting.method == "h2o-stream":  # of prompt and answer, which are more
                    assert row.memory == 1
                else:
                    assert (row.memory, row.same) == (1, True)
                    assert row.squared_error < 1e-7
                    assert not is_policy or row.hit_rate == 1
    first, second = answers.results[settings[2]]
    assert first != second
    for told in answers.layers:
        assert 0 < told.image_tokens < told.prompt_tokens
        for shares in (told.contribution, *told.coverage):
            assert len(shares) == 4
            assert all(0 <= share < 1 for share in shares)
        assert np.shape(told.sparsity) == (3, 3, 4)  # rows; least, mean and greatest of the heads; layers
        assert (np.diff(told.sparsity, axis=1) >= 0).all()
        assert 0 <= np.min(told.sparsity) < np.max(told.sparsity) < 1


@pytest.mark.slow
def test_sparsity_of_prefill_and_decoding_is_as_defined(checkpoints, textured_image):
    """D.9: entries below p x the maximum of their row, over those that the row sees, head by head."""
    with LLM(checkpoints("qwen3_vl"), **SIZES, compressed_kv_bytes=2**22, use_tqdm=False) as llm:
        masked = MaskedAnswers(Probe(llm), 8)
        look = masked.look(user(textured_image(90, 130, 1), "What is shown?"), (5, 77, 30, 8))
        n, p = len(look.prompt), 0.01
        after = n - look.prompt.images[-1].stop
        decoded = [look.attention(n + i) for i in range(3)]
        found = layer_sparsity(masked, look, decoded)
        for rows, of_heads in zip((range(n), range(n - after, n), range(n, n + 3)), found, strict=True):
            attention = [look.attention(row) for row in rows]  # [L, H, row + 1], as defined
            small = np.sum([(one < p * one.max(-1, keepdims=True)).sum(-1) for one in attention], axis=0)
            share = small / sum(one.shape[-1] for one in attention)
            assert share.max() > 0.01
            expected = [share.min(1), share.mean(1), share.max(1)]
            np.testing.assert_allclose(of_heads, expected, atol=1.5 / (after * n))  # one entry may lie at the threshold


@pytest.mark.thorough
def test_the_command(checkpoints, tsv, tmp_path):
    out, figure = tmp_path / "budgets.json", tmp_path / "budgets.png"
    words = ["--data", tsv, "--method", "postvision", "--method", "random", "--budget", "0.5", "--p", "0.1"]
    words += ["--max-tokens", "4", "--questions", "2", "--seeds", "1", "--out", out, "--chart", figure]
    words += ["--compressed-kv-bytes", "4MiB", "--kv-cache-bytes", "16MiB", "--dtype", "float32"]
    result = CliRunner().invoke(app, [str(checkpoints("qwen3_vl")), *map(str, words)])
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["rows"]
    assert [row["method"] for row in rows] == ["whole", "postvision", "random", "vl-cache, p = 0.1"]
    assert [row["questions"] for row in rows] == [2] * 4
    with Image.open(figure) as picture:
        assert picture.width > 300
    wrong = CliRunner().invoke(app, ["nowhere", "--method", "h2o"])
    assert wrong.exit_code == 1
    assert wrong.stderr.splitlines()[-1] == "error: against must be one of h2o, got 'random'"


def test_tokens_that_are_decoded_between_drops(monkeypatch):
    """`--every`."""
    asked = []

    def settings(*_, every, **__):
        asked.append(every)
        raise ValueError("enough")

    monkeypatch.setattr("research.budget_answers.settings_of", settings)
    for words in (["--every", "3"], []):
        assert CliRunner().invoke(app, words).stderr.endswith("error: enough\n")
    assert asked == [3, 8]
